"""Models that see, hear, or read by cross-attention."""
