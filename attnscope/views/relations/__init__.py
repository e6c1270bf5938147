"""Pictures and tables of relations."""
