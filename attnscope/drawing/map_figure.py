"""Declare everything of a figure of attention maps (heatmaps) except the values: labels, titles, notes, marks.

`maps` draws the figure and colours its cells. A cell is one square of a map, usually one query and one key.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from attnscope.drawing.canvas import INK, Box


@dataclass(frozen=True)
class Axis:
    """Declare one side of a map: the labels of its rows, or of its columns.

    Cells along the side are counted from 0. A side has either `labels`, or `n` cells without labels.

    Attributes:
        labels: The label of each row or column of cells; empty = the side has `ticks`, or nothing.
        colors: The colour of each label; empty = all labels have the usual colour of text.
        boundary_cells: The cells at which another text begins. A line is drawn before each of them.
        marked_cells: The cells whose label is always written.
        n: The number of cells of a side without labels.
        ticks: Numbers along the side, as (position, text). Position 0 is the start of the first cell, 1 the end of the
            last cell.
    """

    labels: tuple[str, ...] = ()
    colors: tuple[str, ...] = ()
    boundary_cells: tuple[int, ...] = ()
    marked_cells: tuple[int, ...] = ()
    n: int = 0
    ticks: tuple[tuple[float, str], ...] = ()

    def __len__(self) -> int:
        return self.n or len(self.labels)

    def color(self, cell: int) -> str:
        """Return the colour of the label of a cell."""
        return self.colors[cell] if self.colors else INK

    def label_positions(self, step: int, min_distance: float) -> dict[int, float]:
        """Return which cells have a label, and where: the position of each label along the side, by its cell.

        Positions are in cells; a label in the middle of its cell has the cell's number. Every marked cell has a label.
        Labels of marked cells that are less than `min_distance` cells apart are moved apart. Of the other cells, every
        `step`-th has a label, unless a label of a marked cell is closer than `min_distance`.
        """
        middles = _spread_labels(sorted({*self.marked_cells}), min_distance)
        for cell in range(0, len(self.labels), step):
            if all(abs(cell - middle) >= min_distance for middle in middles.values()):
                middles[cell] = cell
        return middles


def _spread_labels(cells: Sequence[int], min_distance: float) -> dict[int, float]:
    """Return a position for each cell, in a sorted sequence of cells: as near to the cell as possible.

    Consecutive positions are at least `min_distance` apart. The algorithm is isotonic regression (pool adjacent
    violators). After subtracting `i * min_distance` from the position of the i-th cell, the positions must not
    decrease. Neighbours that would decrease are replaced by their mean.
    """
    # Groups of neighbouring cells that share a position: (position after the subtraction, number of cells).
    groups: list[tuple[float, int]] = []
    for i, cell in enumerate(cells):
        mean = cell - i * min_distance
        size = 1
        while groups and groups[-1][0] > mean:
            earlier_mean, earlier_size = groups.pop()
            mean = (earlier_mean * earlier_size + mean * size) / (earlier_size + size)
            size += earlier_size
        groups.append((mean, size))
    # Add `i * min_distance` again.
    positions: dict[int, float] = {}
    for mean, size in groups:
        for _ in range(size):
            i = len(positions)
            positions[cells[i]] = mean + min_distance * i
    return positions


@dataclass(frozen=True, kw_only=True)
class MapsFigure:
    """Declare a figure of maps without their values.

    Figures with equal declarations are drawn on one page, on which only the values change. An overview is a grid of
    small maps without labels, such as all heads of a model, with names for its rows and columns of maps.

    Attributes:
        subtitle: The line below the title.
        notes: Sentences at the foot of the figure.
        axes: Pairs of (side at the left, side below): one pair for all maps, or one pair per map.
        titles: The title above each map; empty for an overview.
        names: For an overview, the pair (row name, column name) of each map. Empty = the figure is no overview.
        meaning: What the colours mean, for the colour bar.
        cmap: The name of the matplotlib colormap.
        has_numbers: Whether cells show their values as numbers, if these have room.
        captions: The text at the right of each map's title: facts separated by " · ", the most important first. Facts
            without room are dropped from the end.
        font_texts: Further texts that the fonts must have characters for, such as the title. Labels, names of spans and
            the subtitle are always considered.
        picture: The picture under the cells, an object with `pixels`, (height, width, 3); None = no picture.
        is_smooth: Whether the weights over a picture are interpolated between patches.
        columns: The number of maps side by side; 0 = chosen so that the page is near 4:3.
        shares_labels: Whether maps share their labels. Row labels then stand only at the left of the first map of each
            row of maps, column labels only below the last map of each column of maps.
        max_panel_px: The largest width and height of a map.
        row_px: Height of a row of cells; 0 = cells are squares.
        bars: Heights from 0 to 1 of a strip of bars above the uppermost maps; empty = no bars.
        framed_boxes: Frames on all maps: left, upper, right and lower edge, in tokens.
        spans: Names above all maps, if there are no bars: (start, stop, text), in cells.
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
    font_texts: tuple[str, ...] = ()
    picture: Any = None
    is_smooth: bool = False
    columns: int = 0
    shares_labels: bool = False
    max_panel_px: float = math.inf
    row_px: float = 0
    bars: tuple[float, ...] = ()
    framed_boxes: tuple[Box, ...] = ()
    spans: tuple[tuple[float, float, str], ...] = ()

    @property
    def n(self) -> int:
        """Return the number of maps."""
        return len(self.names or self.titles)

    @property
    def is_labelled(self) -> bool:
        """Return whether rows and columns are labelled tokens.

        Patches of a picture and moments of a sound have no labels, so several of them may share a pixel.
        """
        return bool(self.axes[0][1].labels)

    @property
    def row_names(self) -> list[str]:
        """Return the names of an overview's rows, from top to bottom."""
        return list(dict.fromkeys(row for row, _ in self.names))

    @property
    def column_names(self) -> list[str]:
        """Return the names of an overview's columns, from left to right."""
        return list(dict.fromkeys(column for _, column in self.names))
