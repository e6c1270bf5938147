"""Patching on pairs with right and wrong answers."""
