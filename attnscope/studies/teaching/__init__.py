"""Attention by hand: numbers, splits and costs."""
