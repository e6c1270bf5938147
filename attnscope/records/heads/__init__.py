"""Records of what heads do."""
