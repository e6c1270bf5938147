"""Pictures and tables of weights."""
