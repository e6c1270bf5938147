"""Records in, pictures out: figures as files, drawings in the terminal. Knows no models and no torch."""
