"""Head lists and head scores for other programs."""
