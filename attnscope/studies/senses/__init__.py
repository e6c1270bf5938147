"""Studies of heads on pictures and recordings."""
