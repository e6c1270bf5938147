"""Draw matrices of numbers, and grids with a cell for each head, in the terminal.

Widths are in character cells of the terminal; a wide character, such as a Chinese one, takes two.
"""

import math
from collections.abc import Callable, Sequence
from itertools import chain

import numpy as np
from numpy.typing import NDArray
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from attnscope.errors import safe
from attnscope.report.numbers import format_four_decimals
from attnscope.report.plain_text import cut

_MAX_ROWS = 24
"""The most rows of a matrix that are printed; a longer matrix loses rows in the middle."""

_COLUMN_CELLS = 10
"""The largest width of the label of a column, in cells of the terminal."""

_LABEL_CELLS = 12
"""The largest width of the label of a row, in cells of the terminal."""

_INDENT = 4
"""Blanks before the labels of rows."""

_OMISSION_MARK = "…"
"""Is printed in place of rows or columns that are left out."""

_MIN_NAME_CELLS = 5
"""The least width of cells below the name H11; narrower cells of a grid of heads stand below the name 11."""


def draw_matrix(
    values: NDArray[np.float64],
    row_labels: Sequence[str] | None,
    column_labels: Sequence[str] | None,
    console: Console,
    *,
    bold: bool = False,
) -> Text:
    """Return a table of numbers with four decimals, with labels above its columns and at the left of its rows.

    If the terminal is too narrow, columns with labels are printed in several blocks, one below the other. Columns
    without labels are printed in one block, with "…" in place of the middle ones. A long matrix has "…" in place of
    its middle rows.

    Args:
        values: The numbers, (row, column).
        row_labels: A label for each row; None = rows have none.
        column_labels: A label for each column; None = columns have none.
        console: The console that prints the table.
        bold: Whether the largest number of each row is bold.
    """
    n_rows, n_columns = values.shape
    headers = [cut(safe(label), _COLUMN_CELLS) for label in column_labels or ()]
    number_texts = [list(map(format_four_decimals, row)) for row in values]
    # The column of the bold number of each row, (row,); -1, which equals no column, if no number is bold.
    bold_columns = np.full(n_rows, -1)
    if bold and n_columns:
        bold_columns = np.nanargmax(values, 1)

    # The width of all columns, with two blanks before each number, and the width left of them.
    width = 2 + max(map(cell_len, chain(headers, *number_texts)), default=6)
    labels: list[str] = []
    margin = 2
    if row_labels:
        labels = [cut(safe(label), _LABEL_CELLS) for label in row_labels]
        margin = _INDENT + max(map(cell_len, labels))

    # The indices of the columns of each block, with None in place of the columns that are left out.
    columns_per_block = max(2, (console.width - margin) // width)
    if column_labels is None:
        blocks = [_omit_middle(n_columns, columns_per_block, 1)]
    else:
        columns: list[int | None] = list(range(n_columns))
        blocks = [
            columns[first : first + columns_per_block]
            for first in range(0, n_columns, columns_per_block)
        ]

    # Block by block: the labels of its columns, then its rows.
    text = Text(no_wrap=True, overflow="crop")
    for block_index, block in enumerate(blocks):
        if block_index and n_rows > 1:
            text.append("\n")
        if column_labels is not None:
            header_line = "".join(
                _align_right(headers[column], width) for column in block if column is not None
            )
            text.append(f"{' ' * margin}{header_line}\n", style="dim")
        for row in _omit_middle(n_rows, _MAX_ROWS, _MAX_ROWS // 2):
            if labels:
                label = _OMISSION_MARK if row is None else labels[row]
                text.append(" " * _INDENT)
                text.append(label + " " * (margin - _INDENT - cell_len(label)), style="dim")
            else:
                text.append(" " * margin)
            if row is not None:
                for column in block:
                    number = _OMISSION_MARK if column is None else number_texts[row][column]
                    style = "bold" if bold_columns[row] == column else ""
                    text.append(_align_right(number, width), style=style)
            text.append("\n")
    text.rstrip()
    return text


def _align_right(text: str, cells: int) -> str:
    return " " * (cells - cell_len(text)) + text


def _omit_middle(n_items: int, max_items: int, n_last_items: int) -> list[int | None]:
    """Return the indices of `n_items` items; if there are more than `max_items`, None replaces the middle ones.

    The result then has `max_items` entries: first indices, None, and the `n_last_items` last indices. For
    example, 9 items, 5 at most, with 2 last ones give [0, 1, None, 7, 8].
    """
    if n_items <= max_items:
        return list(range(n_items))
    return [*range(max_items - n_last_items - 1), None, *range(n_items - n_last_items, n_items)]


def find_width_for_heads(layers: Sequence[int], width: int) -> int:
    """Return the width that the names of layers at the left leave for the cells of heads."""
    return width - len(_make_margin(layers))


def draw_head_grid(
    layers: Sequence[int],
    heads: Sequence[int],
    cell_width: int,
    width: int,
    append_cell: Callable[[Text, int, int], object],
) -> Text:
    """Return a grid of cells, with a row for each layer and a column for each head.

    Args:
        layers: The layers, ascending.
        heads: The head indices, ascending. If the terminal is too narrow, they are printed in several blocks.
        cell_width: Width of a cell.
        width: Width of the terminal.
        append_cell: Appends the cell of a head to a text, `cell_width` characters wide: `(text, layer, head)`.
    """
    margin = _make_margin(layers)
    heads_per_block = max(1, find_width_for_heads(layers, width) // cell_width)
    text = Text(no_wrap=True, overflow="crop")
    for first in range(0, len(heads), heads_per_block):
        block = heads[first : first + heads_per_block]
        if first:
            text.append("\n")
        text.append(f"{margin}{_format_head_names(block, cell_width)}\n", style="dim")
        for layer in layers:
            text.append(f"L{layer}".rjust(len(margin) - 1) + " ", style="dim")
            for head in block:
                append_cell(text, layer, head)
            text.append("\n")
    text.rstrip()
    return text


def _make_margin(layers: Sequence[int]) -> str:
    """Return blanks as wide as the name of the last layer, which is the widest, and a blank after it."""
    return " " * len(f"L{layers[-1]} ")


def _format_head_names(heads: Sequence[int], cell_width: int) -> str:
    """Return the line of names above the columns of heads: H11, or 11 above narrow cells.

    If a number and the blank after it are wider than a cell, only every second or third head has its number.
    """
    if cell_width >= _MIN_NAME_CELLS:
        return "".join(f"H{head}".rjust(cell_width - 1) + " " for head in heads)
    head_step = math.ceil(len(f"{heads[-1]} ") / cell_width)
    names = "".join(f"{head:<{head_step * cell_width}}" for head in heads[::head_step]).rstrip()
    # `questions.head_roles` draws cells of width 4, which begin with a blank: numbers begin one column further right.
    return f" {names}" if cell_width == 4 else names
