"""Why heads attend where they do."""
