"""Matrices of numbers in the terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray
from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.text import Text

from attnscope.errors import safe
from attnscope.views.tables.numbers import four_decimals
from attnscope.views.tables.plain_text import cut, spell_out
from attnscope.views.tables.table import Column, Table

_MOST_ROWS = 24
_COLUMN_CELLS = 10
_INDENT = 4


def matrix(
    values: NDArray[np.float64],
    names: Sequence[str] | None,
    columns: Sequence[str] | None,
    console: Console,
    *,
    bold: bool = False,
    label_cells: int = 12,
) -> RenderableType:
    """A table of numbers with four decimals, under their column labels and behind their row labels.

    Of very many rows those in the middle are left out, with a mark. So are columns without labels that have no room;
    labelled ones go on below.

    Args:
        values: The numbers, (row, column).
        names: Labels of the rows; None = none.
        columns: Labels of the columns; None = none.
        console: Tells the width.
        bold: Whether the largest of each row stands out.
        label_cells: How wide a row's label is at most.
    """
    n_rows, n_columns = values.shape
    labels = [spell_out(cut(safe(name), label_cells), console) for name in names or [""] * n_rows]
    heads = [spell_out(cut(safe(label), _COLUMN_CELLS), console) for label in columns or [""] * n_columns]
    texts = [[four_decimals(value) for value in row] for row in values]
    largest = np.nanargmax(values, 1) if bold and n_columns else np.full(n_rows, -1)
    least = max(map(cell_len, [*heads, *(text for row in texts for text in row)]), default=6)
    margin = _INDENT + (max(map(cell_len, labels)) + 2 if names else 0)
    room = n_columns if columns else max(2, (console.width - margin + 2) // (least + 2))
    mark = spell_out("…", console)

    def of(at: int | None) -> Callable[[int | None], Text]:
        def cell(row: int | None) -> Text:
            if row is None or at is None:
                return Text(mark if row is not None else "")
            return Text(texts[row][at], style="bold" if largest[row] == at else "")

        return cell

    shown = [Column("", lambda row: mark if row is None else labels[row], style="dim")]
    shown += [
        Column("" if at is None else heads[at], of(at), right=True, least=least)
        for at in _leave_out_middle(n_columns, room, 1)
    ]
    rows = _leave_out_middle(n_rows, _MOST_ROWS, _MOST_ROWS // 2)
    # A column of no labels is one cell wide, and the gap two.
    indent = _INDENT if names else _INDENT - 3
    table = Table(shown, rows, goes_on=columns is not None, header=columns is not None)
    return Padding(table, (0, 0, 0, indent), expand=False)


def _leave_out_middle(n: int, most: int, n_last: int) -> list[int | None]:
    """The places of n that are shown if at most so many may be, and None in place of the others."""
    return [*range(n)] if n <= most else [*range(most - n_last - (n_last == 1)), None, *range(n - n_last, n)]
