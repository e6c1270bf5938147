"""Pictures of attention weights."""
