"""The arithmetic of each question that a study asks."""
