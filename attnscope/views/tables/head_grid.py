"""A grid of heads in the terminal: layers down, heads across; a layer that is wider than the terminal goes on below."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.text import Text

_NAMED = 5
"""Cells from which on a column has room for a name such as H11; narrower ones have numbers."""


def room_for(layers: Sequence[int], width: int) -> int:
    """How many of a terminal's columns the names of the layers leave."""
    return width - len(_margin(layers))


def head_grid(
    layers: Sequence[int], heads: Sequence[int], cell: int, width: int, draw: Callable[[Text, int, int], object]
) -> Text:
    """The grid, each head in a cell of its own.

    Args:
        layers: Which layers, the rows.
        heads: Which of their heads, the columns.
        cell: How wide a cell is.
        width: How wide the terminal is.
        draw: Appends the cell of a layer and head to a text.
    """
    margin = _margin(layers)
    per_block = max(1, room_for(layers, width) // cell)
    text = Text(no_wrap=True, overflow="crop")
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
    """What stands over the columns; where numbers do not fit, over every second or third."""
    if cell >= _NAMED:
        return "".join(f"H{head}".rjust(cell - 1) + " " for head in heads)
    step = -(-len(f"{heads[-1]} ") // cell)
    numbers = (f"{head:^3} " if cell == 4 else f"{head:<{cell * step}}" for head in heads[:: 1 if cell == 4 else step])
    return "".join(numbers).rstrip()
