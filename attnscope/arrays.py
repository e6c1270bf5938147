"""Name types of arrays, whose shapes docstrings give as (axis, axis), and divide arrays."""

import numpy as np
from numpy.typing import NDArray

Flags = NDArray[np.bool_]
Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Levels = NDArray[np.uint8]
"""Few different values, such as the levels of a feature, from 0."""


def divide(values: Floats, divisors: Floats, undefined: float = np.nan) -> Floats:
    """Return values / divisors, which broadcast to the shape of the values; `undefined` where a divisor is 0."""
    quotients = np.full(np.shape(values), undefined)
    np.divide(values, divisors, out=quotients, where=divisors != 0)
    return quotients
