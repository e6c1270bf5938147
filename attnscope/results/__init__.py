"""Results of all questions: labelled tables, arrays along their rows, and the files that they become. NumPy only."""
