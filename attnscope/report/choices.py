"""Which points of many are shown where there is little room. Plain values."""

from __future__ import annotations


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
