"""Pictures and tables of what is computed by hand."""
