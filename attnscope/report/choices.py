"""Choose the points and lines to show where there is little room. Plain values."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from attnscope.results.table import Floats


def spread_evenly(n: int, room: int) -> list[int]:
    """Return at most `room` of n places, spread evenly, the first and the last among them."""
    if n <= room:
        return list(range(n))
    if room < 2:
        return [n - 1]
    return sorted({round(place * (n - 1) / (room - 1)) for place in range(room)})


def every_nth(n: int, room: int) -> list[int]:
    """Return at most `room` of n places, from the first on and all as far apart: such as ticks of an axis."""
    step = max(1, -(-n // room))
    return list(range(0, n, step))


EVENLY = 5.0
"""Where the last step is more than so many times the middle one, steps are spread as logarithms."""


def find_moving(values: Floats, most: int) -> list[int]:
    """Return the columns, (step, column), that change most between any two steps, in their order.

    Of a single step they are those with the largest values.
    """
    is_finite = np.isfinite(values)
    highest = np.where(is_finite, values, -np.inf).max(0)
    lowest = np.where(is_finite, values, np.inf).min(0)
    with np.errstate(invalid="ignore"):
        spread = highest - lowest if len(values) > 1 else highest
    spread = np.where(np.isfinite(spread), spread, -np.inf)
    ranked = np.argsort(-spread, kind="stable")[:most]
    return sorted(column for column in ranked.tolist() if is_finite[:, column].any())


def are_logarithmic(steps: Sequence[int]) -> bool:
    """Return whether steps are better told apart by their logarithms, as where they double."""
    later = [step for step in steps if step > 0]
    return len(later) > 4 and later[-1] > EVENLY * later[len(later) // 2]


def finite_range(values: Floats) -> tuple[float, float]:
    """Return the least and the largest finite number; 0 and 1 without any."""
    finite = values[np.isfinite(values)]
    return (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
