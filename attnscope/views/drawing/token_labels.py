"""Tokens beside a map: how wide their labels are, in which colour, and writing them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from attnscope.records import Tokens
from attnscope.views.drawing.canvas import INK, Canvas
from attnscope.views.drawing.layout import Grid
from attnscope.views.drawing.lettering import Lettering

if TYPE_CHECKING:
    from matplotlib.text import Text

_SPECIAL, _WRITTEN = "#9a5b00", "#0b6e4f"
LABEL_ROOM_EM = 11
"""Width at which labels are cut, in sizes of their font."""


def label_color(tokens: Tokens, token: int) -> str:
    """In which colour a token's label is: special tokens and what the model wrote have their own."""
    if 0 <= tokens.n_given <= token:
        return _WRITTEN
    return _SPECIAL if tokens.special[token] else INK


def write_token_labels(
    page: Canvas,
    grid: Grid,
    map_px: tuple[float, float],
    tokens_of: tuple[Tokens, Tokens],
    pool: int,
    corner: tuple[float, float],
) -> list[Text]:
    """Writes the labels of a map: queries at its left, keys below.

    Args:
        page: Where to.
        grid: How large cells and labels are.
        map_px: Width and height of the map.
        tokens_of: Queries and keys.
        pool: How many tokens a cell stands for.
        corner: Upper left corner of the map.
    """
    size, (x, y), written = grid.label_px, corner, []
    rooms = max(grid.label_room_px, 1.0) + 0.5, LABEL_ROOM_EM * size + 0.5
    for tokens, by_row, room in zip(tokens_of, (True, False), rooms, strict=True):
        for token in range(0, len(tokens), grid.label_step * pool):
            label = page.lettering.fit(tokens.labels[token], size, room)
            color, middle = label_color(tokens, token), (token // pool + 0.5) * grid.cell_px
            if by_row:
                text = page.write(x - 5, y + middle, label, size, ha="right", va="center_baseline", color=color)
            else:
                below = y + map_px[1] + 5
                text = page.write(x + middle, below, label, size, ha="center", va="top", rotation=90, color=color)
            written.append(text)
    return written


def widest_label(lettering: Lettering, labels: Sequence[str]) -> Callable[[float], float]:
    """Gives the width of the widest label at a font size; labels are cut at a bound, so no more than that."""
    at_100 = max(lettering.width_px(lettering.spell(label), 100.0) for label in set(labels))
    return lambda size: min(at_100 / 100, LABEL_ROOM_EM) * size
