"""What may happen at the seam: probes get every AttentionCall of a forward pass and return its output."""
