"""Declare a figure of maps without its values: labels, names and notes, around maps and on them. `maps` draws it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from attnscope.drawing.canvas import INK, Box


@dataclass(frozen=True)
class Axis:
    """Declare what stands along one side of a map, whose cells are counted from 0.

    Attributes:
        labels: The label of each row or column of cells; empty = the side has numbers, or nothing.
        colors: The colour of each label; empty = all have that of text.
        seams: Cells before which a line is drawn.
        marked: Cells whose label is never left out.
        n: How many cells there are, if there are no labels.
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

    def color(self, cell: int) -> str:
        """Return the colour of the label of a cell."""
        return self.colors[cell] if self.colors else INK

    def labelled(self, step: int, apart: float) -> dict[int, float]:
        """Return the cells that get a label, each with the place of the label along the side, in cells.

        Every marked cell has a label; labels that would stand less than `apart` cells from each other are moved aside.
        Of the other cells every `step`-th has a label, unless that of a marked cell is nearer than `apart`.
        """
        middles = _spread(sorted({*self.marked}), apart)
        for cell in range(0, len(self.labels), step):
            if all(abs(cell - middle) >= apart for middle in middles.values()):
                middles[cell] = cell
        return middles


def _spread(cells: Sequence[int], apart: float) -> dict[int, float]:
    """Return a place for each cell, in their order: at least `apart` from each other, and as near as that allows."""
    # Less `apart` for each cell before it, places must only not fall. Where they would, cells form a group, which gets
    # the mean of its places. A group is that mean and its size.
    groups: list[tuple[float, int]] = []
    for number, cell in enumerate(cells):
        mean = cell - number * apart
        size = 1
        while groups and groups[-1][0] > mean:
            earlier_mean, earlier_size = groups.pop()
            mean = (earlier_mean * earlier_size + mean * size) / (earlier_size + size)
            size += earlier_size
        groups.append((mean, size))
    places: dict[int, float] = {}
    for mean, size in groups:
        for _ in range(size):
            number = len(places)
            places[cells[number]] = mean + apart * number
    return places


@dataclass(frozen=True, kw_only=True)
class MapsFigure:
    """Declare a figure of maps without their values; equal figures share a page.

    Attributes:
        subtitle: The line below the title.
        notes: Sentences at the foot.
        axes: The side at the left and the side below: one pair for all maps, or a pair for each.
        titles: The title above each map; an overview shows none.
        names: For an overview, of small maps without labels: the name of the row and of the column of each map.
        meaning: What the colours mean.
        cmap: The colours.
        has_numbers: Whether a cell with enough room shows its value.
        captions: What stands beside the title of each map: facts, the most important first, with " · " between.
        lettered: Further texts that the fonts must hold.
        picture: The picture that cells are laid over, an object with `pixels`, (height, width, 3); None = no picture.
        is_smooth: Whether what is laid over the picture is interpolated between patches.
        columns: Maps side by side; 0 = as many as make the page near 4:3.
        is_shared: Whether maps share their labels: those of rows stand at the left of the first map of a row, those of
            columns below the last map of a column.
        largest_px: Most width and height of a map.
        row_px: Height of a row of cells; 0 = cells are squares.
        above: Numbers from 0 to 1 along the upper side of the uppermost maps, drawn as a strip of bars.
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
