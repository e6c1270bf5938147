"""Answer one question per study: take a model and texts, return a record. Drawing is left to `drawing`."""
