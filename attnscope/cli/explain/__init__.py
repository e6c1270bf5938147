"""Commands that say what heads do."""
