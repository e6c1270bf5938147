"""Pictures and tables of ablations."""
