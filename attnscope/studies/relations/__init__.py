"""Find the heads that express the links of an annotation."""
