"""Choose the points and lines to show where there is little room. Plain values."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from attnscope.results.table import Floats


def spread_evenly(n: int, room: int) -> list[int]:
    """Return at most `room` of n places, spread evenly, the first and the last among them."""
    return sorted({*np.linspace(0, n - 1, min(n, max(2, room))).round().astype(int).tolist()})


def every_nth(n: int, room: int) -> list[int]:
    """Return at most `room` of n places, from the first on and all as far apart: such as ticks of an axis."""
    step = max(1, -(-n // room))
    return list(range(0, n, step))


def find_moving(values: Floats, most: int) -> list[int]:
    """Return the columns, (step, column), that change most between any two steps, in their order.

    Of a single step they are those with the largest values.
    """
    is_known: NDArray[np.bool_] = np.isfinite(values)
    highest = np.where(is_known, values, -np.inf).max(0)
    lowest = np.where(is_known, values, np.inf).min(0)
    # Columns without any number come last, (column,).
    spread = np.full(values.shape[1], -np.inf)
    some: NDArray[np.bool_] = np.any(is_known, 0)
    spread[some] = highest[some] - (lowest[some] if len(values) > 1 else 0)
    ranked = np.argsort(-spread, kind="stable")[:most]
    return sorted(column for column in ranked.tolist() if some[column])
