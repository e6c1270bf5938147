"""Draw matrices of numbers, and grids of heads, in the terminal."""

import math
from collections.abc import Callable, Sequence
from itertools import chain

import numpy as np
from numpy.typing import NDArray
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from attnscope.errors import safe
from attnscope.report.numbers import four_decimals
from attnscope.report.plain_text import cut

_MOST_ROWS = 24
"""Rows of a matrix; of more rows, some in the middle are left out."""

_COLUMN_CELLS = 10
_LABEL_CELLS = 12
"""Most width of the labels of columns and of rows, in cells of the terminal."""

_INDENT = 4
"""Blanks before the labels of rows."""


def matrix(
    values: NDArray[np.float64],
    names: Sequence[str] | None,
    columns: Sequence[str] | None,
    console: Console,
    *,
    bold: bool = False,
) -> Text:
    """Return a table of numbers with four decimals, with labels of columns above and of rows at the left.

    Args:
        values: The numbers, (row, column).
        names: The labels of rows; None = they have none.
        columns: The labels of columns. Columns without room go on below; without labels, some in the middle are left
            out instead, with a mark, as are rows of a long table.
        console: The console that prints the table.
        bold: Whether the largest number of each row is bold.
    """
    n_rows, n_columns = values.shape
    labels = [cut(safe(name), _LABEL_CELLS) for name in names or [""] * n_rows]
    headers = [cut(safe(label), _COLUMN_CELLS) for label in columns or [""] * n_columns]
    texts = [list(map(four_decimals, row)) for row in values]
    largest = np.nanargmax(values, 1) if bold and n_columns else np.full(n_rows, -1)

    # Columns, in blocks of as many as stand side by side. A None stands for those that are left out.
    cell = 2 + max(map(cell_len, chain(headers, *texts)), default=6)
    margin = _INDENT + (max(map(cell_len, labels)) if names else -2)
    room = max(2, (console.width - margin) // cell)
    blocks = [_leave_out_middle(n_columns, room, 1)]
    if columns is not None:
        indices: list[int | None] = list(range(n_columns))
        blocks = [indices[first : first + room] for first in range(0, n_columns, room)]

    # Block by block: the labels of its columns, then its rows.
    text = Text(no_wrap=True, overflow="crop")
    for number, block in enumerate(blocks):
        if number and n_rows > 1:
            text.append("\n")
        if columns is not None:
            line = "".join(_flush_right(headers[column], cell) for column in block if column is not None)
            text.append(f"{' ' * margin}{line}\n", style="dim")
        for row in _leave_out_middle(n_rows, _MOST_ROWS, _MOST_ROWS // 2):
            label = _MARK if row is None else labels[row]
            if names:
                text.append(" " * _INDENT)
                text.append(label + " " * (margin - _INDENT - cell_len(label)), style="dim")
            else:
                text.append(" " * margin)
            if row is not None:
                for column in block:
                    shown = _MARK if column is None else texts[row][column]
                    style = "bold" if largest[row] == column else ""
                    text.append(_flush_right(shown, cell), style=style)
            text.append("\n")
    text.rstrip()
    return text


_MARK = "…"
"""Stands for rows or columns that are left out."""


def _flush_right(text: str, cells: int) -> str:
    return " " * (cells - cell_len(text)) + text


def _leave_out_middle(n: int, most: int, n_last: int) -> list[int | None]:
    """Return n indices; if they are more than `most`, the first ones, a None, and the `n_last` last ones."""
    if n <= most:
        return list(range(n))
    return [*range(most - n_last - 1), None, *range(n - n_last, n)]


_NAMED = 5
"""Columns of so many cells have room for a name such as H11; narrower ones have the number of the head alone."""


def room_for(layers: Sequence[int], width: int) -> int:
    """Return how many cells of a terminal's width the names of layers leave for heads."""
    return width - len(_margin(layers))


def head_grid(
    layers: Sequence[int],
    heads: Sequence[int],
    cell: int,
    width: int,
    draw: Callable[[Text, int, int], object],
) -> Text:
    """Return a grid of cells, with a row for each layer and a column for each head.

    Args:
        layers: The layers, ascending.
        heads: The head indices, ascending. Those that have no room beside each other go on below.
        cell: Width of a cell.
        width: Width of the terminal.
        draw: Appends the cell of a layer and head to a text.
    """
    margin = _margin(layers)
    per_block = max(1, room_for(layers, width) // cell)
    text = Text(no_wrap=True, overflow="crop")
    for first in range(0, len(heads), per_block):
        block = heads[first : first + per_block]
        if first:
            text.append("\n")
        text.append(f"{margin}{_names(block, cell)}\n", style="dim")
        for layer in layers:
            text.append(f"L{layer}".rjust(len(margin) - 1) + " ", style="dim")
            for head in block:
                draw(text, layer, head)
            text.append("\n")
    text.rstrip()
    return text


def _margin(layers: Sequence[int]) -> str:
    """Return blanks as wide as the widest name of a layer."""
    return " " * len(f"L{layers[-1]} ")


def _names(heads: Sequence[int], cell: int) -> str:
    """Return the names above columns; if numbers do not fit their cells, of every second or third column."""
    if cell >= _NAMED:
        return "".join(f"H{head}".rjust(cell - 1) + " " for head in heads)
    step = math.ceil(len(f"{heads[-1]} ") / cell)
    names = "".join(f"{head:<{cell * step}}" for head in heads[::step]).rstrip()
    # Cells of four hold letters of roles, which begin one further to the right.
    return f" {names}" if cell == 4 else names
