"""Measures of attention over pictures and sound."""
