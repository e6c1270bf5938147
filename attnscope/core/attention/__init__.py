"""The seam, its probes, and attention in tiles."""
