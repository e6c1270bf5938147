"""Maps with fewer cells, and the logarithmic scale that maps of long texts are drawn on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

DECADES = 4
"""Powers of ten from the palest to the darkest colour. Attention spread evenly over 256 cells is 0.004 in each."""


def log_share(values: NDArray[np.float32], top: float) -> NDArray[np.float32]:
    """Values on the scale, 0 to 1: 1 is `top`, 0 is `top` / 10 ** DECADES and less."""
    floor = top * 10.0**-DECADES
    shares = np.log10(np.maximum(np.asarray(values, np.float64), floor) / top) / DECADES + 1
    return np.clip(shares, 0, 1).astype(np.float32)


def fit_columns(weights: NDArray[np.float32], room: int) -> NDArray[np.float32]:
    """Values, (row, column), with at most as many columns as there is room for, each the largest that it stands for."""
    n = weights.shape[1]
    if n <= room:
        return weights
    return np.asarray(np.maximum.reduceat(weights, np.arange(room) * n // room, axis=1))


def max_pool(values: NDArray[np.float32], pool: int, axes: Sequence[int] = (0, 1)) -> NDArray[np.float32]:
    """The largest of every `pool` values along each axis; the last of them may be of fewer."""
    for axis in axes if pool > 1 else ():
        values = np.maximum.reduceat(values, np.arange(0, values.shape[axis], pool), axis=axis)
    return values
