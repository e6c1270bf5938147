"""Pictures and tables of comparisons."""
