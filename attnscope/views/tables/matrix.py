"""Matrices of numbers in the terminal, with what is too wide below or left out in the middle."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from attnscope.views.tables.numbers import four_decimals
from attnscope.views.tables.plain_text import cut, safe

_MOST_ROWS = 24
_LABEL_CELLS = 12
_COLUMN_CELLS = 10


def matrix(
    lines: Text,
    rows: NDArray[np.float64],
    names: Sequence[str] | None,
    columns: Sequence[str] | None,
    console: Console,
    *,
    bold: bool = False,
) -> None:
    """Appends a table of numbers with four decimals, under their column labels and behind their row labels.

    Args:
        lines: What it is appended to.
        rows: The numbers, (row, column).
        names: Labels of the rows; None = none.
        columns: Labels of the columns; labelled ones go on below where they are too many, others lose their middle.
        console: Tells the width.
        bold: Whether the largest of each row stands out.
    """
    kept = _rows_shown(len(rows))
    named = [] if names is None else [cut(safe(name), _LABEL_CELLS) for name in names]
    margin = 4 + max((cell_len(name) for name in named), default=0) + (2 if named else 0)
    texts = [[four_decimals(value) for value in rows[at]] if at is not None else None for at in kept]
    widest = max((len(text) for row in texts if row is not None for text in row), default=6)
    heads = None if columns is None else [cut(safe(label), _COLUMN_CELLS) for label in columns]
    width = max(widest, *(cell_len(head) for head in heads)) if heads else widest
    room = max(1, (console.width - margin + 2) // (width + 2))
    parts = chunks(rows.shape[1], room, goes_on=heads is not None)
    for number, chunk in enumerate(parts):
        if heads is not None:
            labels = ["…" if at is None else heads[at] for at in chunk]
            lines.append(" " * margin + "  ".join(" " * (width - cell_len(h)) + h for h in labels) + "\n", style="dim")
        for at, row in zip(kept, texts, strict=True):
            if at is None or row is None:
                lines.append(" " * margin + "…\n", style="dim")
                continue
            label = named[at] if named else ""
            lines.append(" " * 4 + label + " " * (margin - 4 - cell_len(label)), style="dim")
            largest = int(np.nanargmax(rows[at])) if bold and rows.shape[1] else -1
            for place, column in enumerate(chunk):
                lines.append("  " if place else "")
                text = "…" if column is None else row[column]
                lines.append(" " * (width - cell_len(text)) + text, style="bold" if column == largest else "")
            lines.append("\n")
        if number < len(parts) - 1 and len(rows) > 1:
            lines.append("\n")


def _rows_shown(n: int) -> list[int | None]:
    """Which of n rows are shown, None where some are left out."""
    if n <= _MOST_ROWS:
        return list(range(n))
    return [*range(_MOST_ROWS // 2), None, *range(n - _MOST_ROWS // 2, n)]


def chunks(n: int, room: int, *, goes_on: bool) -> list[list[int | None]]:
    """Columns in lines of `room`: all of them where they may go on below, else one line with its middle left out."""
    if goes_on:
        return [list(range(first, min(n, first + room))) for first in range(0, n, room)]
    if n <= room:
        return [list(range(n))]
    if room < 3:
        return [[*range(room - 1), None]]
    return [[*range(room - 2), None, n - 1]]
