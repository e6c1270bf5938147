"""Commands that show how attention is computed."""
