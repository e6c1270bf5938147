"""Records of attention weights."""
