"""Which heads express the links of an annotation."""
