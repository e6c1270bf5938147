"""Sums that merge exactly, and the float64 oracle."""
