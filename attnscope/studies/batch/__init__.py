"""Draw figures of many texts into a folder."""
