"""Sums over blocks of texts, per head and per pair of heads."""
