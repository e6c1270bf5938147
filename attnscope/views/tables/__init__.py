"""Tables and numbers in the terminal."""
