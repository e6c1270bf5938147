"""How heads, texts, pictures and models differ."""
