"""Patch heads on pairs with right and wrong answers."""
