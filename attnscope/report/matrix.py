"""Draw matrices of numbers, and grids of heads, in the terminal."""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from attnscope.errors import safe
from attnscope.report.numbers import four_decimals
from attnscope.report.plain_text import cut

_MOST_ROWS = 24
_COLUMN_CELLS = 10
_LABEL_CELLS = 12
_INDENT = 4


def matrix(
    values: NDArray[np.float64],
    names: Sequence[str] | None,
    columns: Sequence[str] | None,
    console: Console,
    *,
    bold: bool = False,
) -> Text:
    """Return a table of numbers with four decimals, under their column labels and behind their row labels.

    Of very many rows those in the middle are left out, with a mark. So are columns without labels that have no room;
    labelled ones go on below. `names` are the labels of rows. `bold` marks the largest number of each row.
    """
    n_rows, n_columns = values.shape
    labels = [cut(safe(name), _LABEL_CELLS) for name in names or [""] * n_rows]
    heads = [cut(safe(label), _COLUMN_CELLS) for label in columns or [""] * n_columns]
    texts = [[four_decimals(value) for value in row] for row in values]
    largest = np.nanargmax(values, 1) if bold and n_columns else np.full(n_rows, -1)
    mark = "…"

    # As many columns side by side as there is room for.
    numbers = [text for row in texts for text in row]
    cell = 2 + max(map(cell_len, [*heads, *numbers]), default=6)
    margin = _INDENT + (max(map(cell_len, labels)) if names else -2)
    room = max(2, (console.width - margin) // cell)
    blocks = [_leave_out_middle(n_columns, room, 1)]
    if columns is not None:
        blocks = [
            list(range(first, min(first + room, n_columns))) for first in range(0, n_columns, room)
        ]

    # Block by block: the names of its columns, then its rows.
    text = Text(no_wrap=True, overflow="crop")
    for number, block in enumerate(blocks):
        text.append("\n" if number and n_rows > 1 else "")
        if columns is not None:
            line = "".join(_flush_right(heads[column], cell) for column in block if column is not None)
            text.append(f"{' ' * margin}{line}\n", style="dim")
        for row in _leave_out_middle(n_rows, _MOST_ROWS, _MOST_ROWS // 2):
            label = mark if row is None else labels[row]
            text.append(" " * _INDENT if names else " " * margin)
            if names:
                text.append(label + " " * (margin - _INDENT - cell_len(label)), style="dim")
            if row is not None:
                for column in block:
                    shown = mark if column is None else texts[row][column]
                    text.append(
                        _flush_right(shown, cell), style="bold" if largest[row] == column else ""
                    )
            text.append("\n")
    text.rstrip()
    return text


def _flush_right(text: str, cells: int) -> str:
    return " " * (cells - cell_len(text)) + text


def _leave_out_middle(n: int, most: int, n_last: int) -> list[int | None]:
    """Return the first and the `n_last` last of n indices, at most `most` with a None in place of those left out."""
    if n <= most:
        return list(range(n))
    return [*range(most - n_last - 1), None, *range(n - n_last, n)]


_NAMED = 5
"""Cells from which on a column has room for a name such as H11; narrower ones have numbers."""


def room_for(layers: Sequence[int], width: int) -> int:
    """Return how many of a terminal's columns the names of the layers leave."""
    return width - len(_margin(layers))


def head_grid(
    layers: Sequence[int],
    heads: Sequence[int],
    cell: int,
    width: int,
    draw: Callable[[Text, int, int], object],
) -> Text:
    """Return a grid of layers down and heads across; a layer that is wider than the terminal goes on below.

    `draw` appends the cell of a layer and head to a text; it is `cell` letters wide.
    """
    margin = _margin(layers)
    per_block = max(1, room_for(layers, width) // cell)
    text = Text(no_wrap=True, overflow="crop")
    # A block of heads per width of the terminal, with its heading and all layers.
    for first in range(0, len(heads), per_block):
        block = heads[first : first + per_block]
        text.append("\n" if first else "")
        text.append(f"{margin}{_names(block, cell)}\n", style="dim")
        for layer in layers:
            text.append(f"L{layer}".rjust(len(margin) - 1) + " ", style="dim")
            for head in block:
                draw(text, layer, head)
            text.append("\n")
    text.rstrip()
    return text


def _margin(layers: Sequence[int]) -> str:
    return " " * len(f"L{layers[-1]} ")


def _names(heads: Sequence[int], cell: int) -> str:
    """Return what stands over the columns; where numbers do not fit, over every second or third."""
    if cell >= _NAMED:
        return "".join(f"H{head}".rjust(cell - 1) + " " for head in heads)
    step = -(-len(f"{heads[-1]} ") // cell)
    before = " " if cell == 4 else ""  # where letters of roles stand
    return before + "".join(f"{head:<{cell * step}}" for head in heads[::step]).rstrip()
