"""Queries and keys that another program computed, as a model whose attention is read from files."""
