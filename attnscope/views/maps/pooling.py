"""Maps with fewer cells, and the logarithmic scale that maps of long texts are drawn on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

DECADES = 4
"""Powers of ten from the palest to the darkest colour. Attention spread evenly over 256 cells is 0.004 in each."""


def log_share(values: NDArray[np.float32], top: float) -> NDArray[np.float32]:
    """Return values on the scale, 0 to 1: 1 is `top`, 0 is `top` / 10 ** DECADES and less."""
    floor = top * 10.0**-DECADES
    shares = np.log10(np.maximum(np.asarray(values, np.float64), floor) / top) / DECADES + 1
    return np.clip(shares, 0, 1).astype(np.float32)


def fit(values: NDArray[np.float32], room: tuple[float, float]) -> NDArray[np.float32]:
    """Return values, (row, column), with at most one per pixel of a room, (width, height): the largest of several."""
    for axis, pixels in ((1, int(room[0])), (0, int(room[1]))):
        n = values.shape[axis]
        if n > pixels:
            values = np.maximum.reduceat(values, np.arange(pixels) * n // pixels, axis=axis)
    return values


def max_pool(values: NDArray[np.float32], pool: int, axes: Sequence[int] = (0, 1)) -> NDArray[np.float32]:
    """Return the largest of every `pool` values along each axis; the last of them may be of fewer."""
    for axis in axes if pool > 1 else ():
        values = np.maximum.reduceat(values, np.arange(0, values.shape[axis], pool), axis=axis)
    return values
