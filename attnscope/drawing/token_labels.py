"""Tokens beside a map: how wide their labels are, in which colour, and writing them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from attnscope.drawing.canvas import INK, Canvas
from attnscope.drawing.layout import Grid, Widest
from attnscope.drawing.lettering import Lettering
from attnscope.records import Tokens

if TYPE_CHECKING:
    from matplotlib.text import Text

_SPECIAL, _WRITTEN = "#9a5b00", "#0b6e4f"
LABEL_ROOM_EM = 11
"""Width at which labels are cut, in sizes of their font."""


def label_color(tokens: Tokens, token: int) -> str:
    """The colour of a token's label: special tokens and those that the model wrote have their own."""
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
    marked: tuple[Sequence[int], Sequence[int]] = ((), ()),
) -> list[Text]:
    """Writes the labels of a map, whose upper left corner is `corner`: queries at its left, keys below.

    Where only every n-th token has a label, so do the marked queries and keys, and their neighbours have none.
    """
    size, (x, y), labels = grid.label_px, corner, []
    rooms = max(grid.label_room_px, 1.0) + 0.5, LABEL_ROOM_EM * size + 0.5
    for tokens, by_row, room, named in zip(tokens_of, (True, False), rooms, marked, strict=True):
        for token in _labelled(len(tokens), grid.label_step * pool, named):
            label = page.lettering.fit(tokens.labels[token], size, room)
            color, middle = label_color(tokens, token), (token // pool + 0.5) * grid.cell_px
            if by_row:
                text = page.write(x - 5, y + middle, label, size, ha="right", va="center_baseline", color=color)
            else:
                below = y + map_px[1] + 5
                text = page.write(x + middle, below, label, size, ha="center", va="top", rotation=90, color=color)
            labels.append(text)
    return labels


def _labelled(n_tokens: int, step: int, marked: Sequence[int]) -> list[int]:
    """The tokens with a label: every `step`-th that has room beside the marked ones, and these."""
    regular = [token for token in range(0, n_tokens, step) if all(abs(token - other) >= step for other in marked)]
    return sorted({*regular, *marked})


def widest_label(lettering: Lettering, labels: Sequence[str]) -> Widest:
    """The width of the widest label at a font size; it is bounded, as labels are cut."""
    at_100 = max(lettering.width_px(lettering.spell(label), 100.0) for label in set(labels))
    return lambda size: min(at_100 / 100, LABEL_ROOM_EM) * size
