"""Compute attention maps of one input: exact, pooled, rolled out, as a page."""
