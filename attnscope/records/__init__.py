"""Records of heads, on their way to tables."""
