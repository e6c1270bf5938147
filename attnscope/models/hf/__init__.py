"""Hugging Face models: everything that knows transformers."""
