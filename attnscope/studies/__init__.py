"""One question each: a model and texts in, a record out."""
