"""The project's own models, which need no transformers."""
