"""Records of what is computed by hand."""
