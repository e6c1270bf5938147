"""Draw matrices of numbers, and grids with a cell for each head, in the terminal."""

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

_MAX_ROWS = 24
"""How many rows of a matrix are printed; a longer one loses rows in the middle."""

_COLUMN_CELLS = 10
"""The largest width of the label of a column, in cells of the terminal."""

_LABEL_CELLS = 12
"""The largest width of the label of a row, in cells of the terminal."""

_INDENT = 4
"""Blanks before the labels of rows."""

_OMITTED = "…"
"""Stands in the place of rows or columns that are left out."""

_MIN_NAME_CELLS = 5
"""The narrowest cells of a grid of heads above which H11 is written; above narrower ones it is 11."""


def draw_matrix(
    values: NDArray[np.float64],
    row_labels: Sequence[str] | None,
    column_labels: Sequence[str] | None,
    console: Console,
    *,
    bold: bool = False,
) -> Text:
    """Return a table of numbers with four decimals, with labels above its columns and at the left of its rows.

    If the terminal is too narrow, columns that have labels go on below, in blocks. Columns without labels go on
    nowhere: "…" stands for some in the middle, as it does for the middle rows of a long matrix.

    Args:
        values: The numbers, (row, column).
        row_labels: A label for each row; None = rows have none.
        column_labels: A label for each column; None = columns have none.
        console: The console that prints the table.
        bold: Whether the largest number of each row is bold.
    """
    n_rows, n_columns = values.shape
    headers = [cut(safe(label), _COLUMN_CELLS) for label in column_labels or ()]
    texts = [list(map(four_decimals, row)) for row in values]
    # The column of the largest number of each row, (row,); -1 = no number is bold.
    largest = np.full(n_rows, -1)
    if bold and n_columns:
        largest = np.nanargmax(values, 1)

    # Widths, in cells of the terminal. Two blanks stand before each number.
    width = 2 + max(map(cell_len, chain(headers, *texts)), default=6)
    labels: list[str] = []
    margin = 2
    if row_labels:
        labels = [cut(safe(label), _LABEL_CELLS) for label in row_labels]
        margin = _INDENT + max(map(cell_len, labels))

    # The columns of each block, as many as stand side by side. None stands for those that are left out.
    room = max(2, (console.width - margin) // width)
    if column_labels is None:
        blocks = [_leave_out_middle(n_columns, room, 1)]
    else:
        columns: list[int | None] = list(range(n_columns))
        blocks = [columns[first : first + room] for first in range(0, n_columns, room)]

    # Block by block: the labels of its columns, then its rows.
    text = Text(no_wrap=True, overflow="crop")
    for block_index, block in enumerate(blocks):
        if block_index and n_rows > 1:
            text.append("\n")
        if column_labels is not None:
            line = "".join(
                _flush_right(headers[column], width) for column in block if column is not None
            )
            text.append(f"{' ' * margin}{line}\n", style="dim")
        for row in _leave_out_middle(n_rows, _MAX_ROWS, _MAX_ROWS // 2):
            if labels:
                label = _OMITTED if row is None else labels[row]
                text.append(" " * _INDENT)
                text.append(label + " " * (margin - _INDENT - cell_len(label)), style="dim")
            else:
                text.append(" " * margin)
            if row is not None:
                for column in block:
                    number = _OMITTED if column is None else texts[row][column]
                    style = "bold" if largest[row] == column else ""
                    text.append(_flush_right(number, width), style=style)
            text.append("\n")
    text.rstrip()
    return text


def _flush_right(text: str, cells: int) -> str:
    return " " * (cells - cell_len(text)) + text


def _leave_out_middle(n: int, most: int, n_last: int) -> list[int | None]:
    """Return the indices from 0 to n - 1. If they are more than `most`, None stands in the place of the middle ones.

    The `n_last` last ones stay, and before the None as many of the first ones as `most` allows.
    """
    if n <= most:
        return list(range(n))
    return [*range(most - n_last - 1), None, *range(n - n_last, n)]


def room_for_heads(layers: Sequence[int], width: int) -> int:
    """Return the width of a terminal that is left for heads, beside the names of layers."""
    return width - len(_margin(layers))


def draw_head_grid(
    layers: Sequence[int],
    heads: Sequence[int],
    cell: int,
    width: int,
    append_cell: Callable[[Text, int, int], object],
) -> Text:
    """Return a grid of cells, with a row for each layer and a column for each head.

    Args:
        layers: The layers, ascending.
        heads: The head indices, ascending. Those that have no room beside each other go on below.
        cell: Width of a cell.
        width: Width of the terminal.
        append_cell: Appends to a text the cell of a head: `(text, layer, head)`.
    """
    margin = _margin(layers)
    per_block = max(1, room_for_heads(layers, width) // cell)
    text = Text(no_wrap=True, overflow="crop")
    for first in range(0, len(heads), per_block):
        block = heads[first : first + per_block]
        if first:
            text.append("\n")
        text.append(f"{margin}{_head_names(block, cell)}\n", style="dim")
        for layer in layers:
            text.append(f"L{layer}".rjust(len(margin) - 1) + " ", style="dim")
            for head in block:
                append_cell(text, layer, head)
            text.append("\n")
    text.rstrip()
    return text


def _margin(layers: Sequence[int]) -> str:
    """Return blanks as wide as the widest name of a layer."""
    return " " * len(f"L{layers[-1]} ")


def _head_names(heads: Sequence[int], cell: int) -> str:
    """Return the line above the columns of heads: H11, or 11 in narrow cells.

    If 11 with its blank is wider than a cell, only every second or third head has its number.
    """
    if cell >= _MIN_NAME_CELLS:
        return "".join(f"H{head}".rjust(cell - 1) + " " for head in heads)
    step = math.ceil(len(f"{heads[-1]} ") / cell)
    names = "".join(f"{head:<{step * cell}}" for head in heads[::step]).rstrip()
    # Cells of width four hold the letters of a head's roles behind a blank; numbers begin above the letters.
    return f" {names}" if cell == 4 else names
