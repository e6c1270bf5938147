"""Pictures and tables of descriptions."""
