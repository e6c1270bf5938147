"""Records of heads compared."""
