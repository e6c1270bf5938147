"""Compare heads, texts, pictures and models."""
