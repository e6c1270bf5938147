"""Declare a figure of maps (heatmaps) without their values: labels, titles and notes. `maps` draws it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from attnscope.drawing.canvas import INK, Box


@dataclass(frozen=True)
class Axis:
    """Declare the labels along one side of a map: one for each row, or for each column. Cells are counted from 0.

    Attributes:
        labels: The label of each row or column of cells; empty = the side has `ticks`, or nothing.
        colors: The colour of each label; empty = all have that of text.
        boundaries: The cells at which another text begins: a line is drawn before each.
        marked: Cells whose label is never left out.
        n: How many cells there are, if there are no labels.
        ticks: Numbers along the side: (position, text), from 0 at the first cell to 1 after the last one.
    """

    labels: tuple[str, ...] = ()
    colors: tuple[str, ...] = ()
    boundaries: tuple[int, ...] = ()
    marked: tuple[int, ...] = ()
    n: int = 0
    ticks: tuple[tuple[float, str], ...] = ()

    def __len__(self) -> int:
        return self.n or len(self.labels)

    def color(self, cell: int) -> str:
        """Return the colour of the label of a cell."""
        return self.colors[cell] if self.colors else INK

    def label_positions(self, step: int, apart: float) -> dict[int, float]:
        """Return the position of each label along the side, in cells, by the cell that it belongs to.

        Every marked cell has a label; labels that would stand less than `apart` cells from each other are moved aside.
        Of the other cells every `step`-th has a label, unless that of a marked cell is nearer than `apart`.
        """
        middles = _move_apart(sorted({*self.marked}), apart)
        for cell in range(0, len(self.labels), step):
            if all(abs(cell - middle) >= apart for middle in middles.values()):
                middles[cell] = cell
        return middles


def _move_apart(cells: Sequence[int], apart: float) -> dict[int, float]:
    """Return a position for each cell: at least `apart` after the one before it, and as near to the cell as possible.

    The algorithm is that of isotonic regression (pool adjacent violators). Take `i * apart` from the position of the
    i-th cell: then positions may be equal, but must not decrease. Those that decrease are replaced by their mean.
    """
    # Groups of cells with one such position: (the position, how many cells).
    groups: list[tuple[float, int]] = []
    for i, cell in enumerate(cells):
        mean = cell - i * apart
        size = 1
        while groups and groups[-1][0] > mean:
            earlier_mean, earlier_size = groups.pop()
            mean = (earlier_mean * earlier_size + mean * size) / (earlier_size + size)
            size += earlier_size
        groups.append((mean, size))
    # Add `i * apart` again.
    positions: dict[int, float] = {}
    for mean, size in groups:
        for _ in range(size):
            i = len(positions)
            positions[cells[i]] = mean + apart * i
    return positions


@dataclass(frozen=True, kw_only=True)
class MapsFigure:
    """Declare a figure of maps without their values.

    Figures with equal declarations are drawn on one page, on which only the values change.

    Attributes:
        subtitle: The line below the title.
        notes: Sentences at the foot.
        axes: The side at the left and the side below: one pair for all maps, or a pair for each.
        titles: The title above each map; an overview has none.
        names: Of an overview, a grid of small maps without labels: each map's (name of its row, name of its column).
            Empty = the figure is no overview.
        meaning: What the colours mean.
        cmap: The colours.
        has_numbers: Whether a cell with enough room shows its value.
        captions: What stands beside the title of each map: facts, the most important first, with " · " between.
        lettered: Texts beside labels and the subtitle whose characters the fonts must hold, such as the title.
        picture: The picture that cells are laid over, an object with `pixels`, (height, width, 3); None = no picture.
        is_smooth: Whether what is laid over the picture is interpolated between patches.
        columns: Maps side by side; 0 = as many as make the page near 4:3.
        shares_labels: Whether maps share their labels: those of rows stand at the left of the first map of a row,
            those of columns below the last map of a column.
        largest_px: Most width and height of a map.
        row_px: Height of a row of cells; 0 = cells are squares.
        bars: Heights from 0 to 1 of a strip of bars along the upper side of the uppermost maps.
        framed_boxes: Frames on all maps: left, upper, right and lower edge in tokens.
        spans: Names above all maps, if there are no bars: first cell, last cell, text.
    """

    subtitle: str
    notes: tuple[str, ...]
    axes: tuple[tuple[Axis, Axis], ...]
    titles: tuple[str, ...] = ()
    names: tuple[tuple[str, str], ...] = ()
    meaning: str
    cmap: str
    has_numbers: bool = False
    captions: tuple[str, ...] = ()
    lettered: tuple[str, ...] = ()
    picture: Any = None
    is_smooth: bool = False
    columns: int = 0
    shares_labels: bool = False
    largest_px: float = math.inf
    row_px: float = 0
    bars: tuple[float, ...] = ()
    framed_boxes: tuple[Box, ...] = ()
    spans: tuple[tuple[float, float, str], ...] = ()

    @property
    def n(self) -> int:
        """Return how many maps there are."""
        return len(self.names or self.titles)

    @property
    def is_labelled(self) -> bool:
        """Return whether its tokens have labels. Patches and moments have none: several of them may share a pixel."""
        return bool(self.axes[0][1].labels)

    @property
    def row_names(self) -> list[str]:
        """Return the names of the rows of an overview, from above."""
        return list(dict.fromkeys(row for row, _ in self.names))

    @property
    def column_names(self) -> list[str]:
        """Return the names of the columns of an overview, from the left."""
        return list(dict.fromkeys(column for _, column in self.names))
