"""In what order heads are listed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from attnscope.errors import UsageError, require_choice
from attnscope.records.frame.head_table import HeadTable
from attnscope.records.heads.findings import Head

_ORDERS = {"explained": ("explained", 1), "entropy": ("entropy_nats", -1)}
"""By the name of an order: the column that it goes by, and 1 where the largest value comes first."""

SORTS = ("layer", *_ORDERS)
"""Orders: as in the model; the best described first, or the sharpest."""


class _WithHeads(Protocol):
    @property
    def heads(self) -> tuple[Head, ...]: ...

    def head_table(self) -> HeadTable: ...


def sort_heads(record: _WithHeads, sort: str | None = None) -> list[Head]:
    """Return the heads of findings or an atlas in an order.

    Args:
        record: The record.
        sort: One of SORTS; None = as in the model.
    """
    require_sort(sort)
    if sort not in _ORDERS:
        return list(record.heads)
    table = record.head_table()
    name, sign = _ORDERS[sort]
    values = table.numbers().get(name, np.full(len(table.heads), np.nan))

    def rank(row: int) -> float:
        return -sign * values[row] if np.isfinite(values[row]) else math.inf

    return [record.heads[row] for row in sorted(range(len(table.heads)), key=rank)]


def require_sort(sort: str | None) -> None:
    """Refuse an order that there is not."""
    if sort is not None and sort not in SORTS:
        raise UsageError(f"there is no order {sort!r}", f"choose from {', '.join(SORTS)}")


def require_measures(measures: str | None, known: Sequence[str]) -> None:
    """Refuse measures that are not known; `measures` are their names with commas between, "all" is every one."""
    if measures in (None, "all"):
        return
    for name in str(measures).split(","):
        require_choice("measure", name.strip(), known)
