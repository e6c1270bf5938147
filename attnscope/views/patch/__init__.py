"""Pictures and tables of patching."""
