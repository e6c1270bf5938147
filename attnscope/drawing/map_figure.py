"""What is in a figure of maps, but its values: labels, names, notes, and what stands around maps and on them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from attnscope.drawing.canvas import INK, Box


@dataclass(frozen=True)
class Axis:
    """One side of maps.

    Attributes:
        labels: One for each row or column of cells; empty = it has numbers instead.
        colors: The colour of each label; empty = all black.
        seams: Cells before which a line is drawn.
        marked: Cells whose label is never left out.
        n: How many cells there are, where it has no labels.
        ticks: Numbers along the side: how far along each stands, 0 to 1, and how it is written.
    """

    labels: tuple[str, ...] = ()
    colors: tuple[str, ...] = ()
    seams: tuple[int, ...] = ()
    marked: tuple[int, ...] = ()
    n: int = 0
    ticks: tuple[tuple[float, str], ...] = ()

    def __len__(self) -> int:
        return self.n or len(self.labels)

    def color(self, place: int) -> str:
        """Return the colour of a label."""
        return self.colors[place] if self.colors else INK

    def labelled(self, step: int, apart: float) -> dict[int, float]:
        """Return the cells that get a label, and where along the side its middle is, both in cells.

        Marked cells have theirs, moved aside where they would stand less than `apart` from each other. Of the others
        every `step`-th has one, unless a marked one is in its way.
        """
        middles = _spread(sorted({*self.marked}), apart)
        for cell in range(0, len(self.labels), step):
            if all(abs(cell - middle) >= apart for middle in middles.values()):
                middles[cell] = cell
        return middles


def _spread(cells: Sequence[int], apart: float) -> dict[int, float]:
    """Return a place for each cell, in their order: at least `apart` from each other, and as near as that allows."""
    # Cells that are too close form groups, which stand around their common middle: the place of the first, the size.
    groups: list[tuple[float, int]] = []
    for number, cell in enumerate(cells):
        first = cell - number * apart
        size = 1
        while groups and groups[-1][0] > first:
            before, n_before = groups.pop()
            first = (before * n_before + first * size) / (n_before + size)
            size += n_before
        groups.append((first, size))
    # Within a group the next one stands `apart` further.
    firsts = np.repeat([first for first, _ in groups], [size for _, size in groups])
    places = firsts + apart * np.arange(len(cells))
    return dict(zip(cells, places.tolist(), strict=True))


@dataclass(frozen=True, kw_only=True)
class MapsFigure:
    """All of a figure of maps but their values; figures that are equal share a page.

    Attributes:
        subtitle: The line below the title.
        notes: Sentences at the foot.
        axes: The sides at the left and those below: one pair for all maps, or one for each.
        titles: What stands above each map; of an overview it is passed over.
        names: Of an overview, the name of the row and of the column of each map: maps are small and have no labels.
        meaning: What the colours mean.
        cmap: The colours.
        has_numbers: Whether a cell with enough room shows its value.
        captions: What stands beside the title of each map: facts, the most important first, with " · " between.
        lettered: Further texts that the fonts must hold.
        picture: What cells are laid over, an object with `pixels`, (height, width, 3); None = nothing. Two are the same
            only if they are one object.
        is_smooth: Whether what is laid over the picture is interpolated between patches.
        columns: Maps side by side; 0 = as many as make the page near 4:3.
        is_shared: Whether maps share their labels: those of rows stand at the left of the first map of a row, those of
            columns below the last map of a column.
        largest_px: Most width and height of a map.
        row_px: Height of a row of cells; 0 = cells are squares.
        above: Numbers from 0 to 1 along the upper side of the uppermost maps, drawn as a strip.
        boxes: Frames on all maps: left, upper, right and lower edge in tokens.
        spans: Names above all maps, where there are no numbers: first cell, last cell, text.
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
    is_shared: bool = False
    largest_px: float = math.inf
    row_px: float = 0
    above: tuple[float, ...] = ()
    boxes: tuple[Box, ...] = ()
    spans: tuple[tuple[float, float, str], ...] = ()

    @property
    def n(self) -> int:
        """Return how many maps there are."""
        return len(self.names or self.titles)

    @property
    def is_labelled(self) -> bool:
        """Return whether its tokens have labels; else cells may share pixels."""
        return bool(self.axes[0][1].labels)

    @property
    def row_names(self) -> list[str]:
        """Return the names of the rows of an overview, from above."""
        return list(dict.fromkeys(row for row, _ in self.names))

    @property
    def column_names(self) -> list[str]:
        """Return the names of the columns of an overview, from the left."""
        return list(dict.fromkeys(column for _, column in self.names))
