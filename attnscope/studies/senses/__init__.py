"""What each head does on pictures and recordings."""
