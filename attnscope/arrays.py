"""Name the types of arrays that have no better name: of any shape, which docstrings give as (axis, axis)."""

import numpy as np
from numpy.typing import NDArray

Flags = NDArray[np.bool_]
Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Levels = NDArray[np.uint8]
"""Few different values, such as the levels of a feature, from 0."""
