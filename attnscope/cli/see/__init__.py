"""Commands that draw attention."""
