"""Pictures and tables of circuits."""
