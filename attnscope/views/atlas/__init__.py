"""Pictures and tables of atlases."""
