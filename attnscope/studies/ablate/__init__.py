"""Measure what the model loses without a head."""
