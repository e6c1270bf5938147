"""Commands for records and models."""
