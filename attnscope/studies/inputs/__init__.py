"""Declare and read the inputs of studies: models, texts, photos, recordings, and heads."""
