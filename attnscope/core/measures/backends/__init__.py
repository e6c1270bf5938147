"""The one pass over a head's weights, by torch, numba or triton."""
