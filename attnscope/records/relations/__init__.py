"""Records of which heads express which links."""
