"""Pictures and tables of what heads do."""
