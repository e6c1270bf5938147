"""Why heads attend where they do, in the terminal and as figures."""
