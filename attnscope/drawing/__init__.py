"""The canvas that figures are drawn on: layout, letters, vectors, maps of heads."""
