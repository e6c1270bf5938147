"""What scores are made of, as records."""
