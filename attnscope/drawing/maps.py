"""A page of maps side by side: coloured cells, the labels of their rows and columns, frames, a colour bar.

The static part is drawn once: `MapsPage.show` puts other values on the same page. It knows nothing of models.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from attnscope.drawing import layout
from attnscope.drawing.canvas import FAINT, INK, MARK, Box, colormap
from attnscope.drawing.inks import is_dark
from attnscope.drawing.lettering import Lettering, lettering_for
from attnscope.drawing.page import Page

if TYPE_CHECKING:
    from matplotlib.text import Text

SEAM = "#d1495b"
"""Colour of lines at which another text begins."""

LABEL_ROOM_EM = 11
"""Width at which labels are cut, in sizes of their font."""

_MANY_ROWS = 15  # an overview of more rows is too tall for a screen, and is seen shrunk
_STRIP_PX = 8  # labels may reach so far beyond their room: the gap between maps has no more
_LARGEST_LABELLED_PX = 1000  # a map of many tokens grows up to this, then its labels are thinned
_LARGEST_SMALL_PX = 300
_TALLEST_FEW_PX = 1116  # of one or two maps on a screen
_NAMES_PX = 52
_LEAST_NUMBER = 0.005


@dataclass(frozen=True)
class Axis:
    """The labels along one side of maps.

    Attributes:
        labels: One for each row or column of cells.
        colors: The colour of each label; empty = all black.
        seams: Cells before which a line is drawn.
        marked: Cells whose label is never left out.
    """

    labels: tuple[str, ...]
    colors: tuple[str, ...] = ()
    seams: tuple[int, ...] = ()
    marked: tuple[int, ...] = ()

    def color(self, place: int) -> str:
        """Return the colour of a label."""
        return self.colors[place] if self.colors else INK


@dataclass(frozen=True, kw_only=True)
class MapsFigure:
    """All of a figure of maps but their values; figures that are equal share a page.

    Attributes:
        subtitle: The line below the title.
        notes: Sentences at the foot.
        axes: The labels at the left and those below: one pair for all maps, or one for each.
        titles: What stands above each map; of an overview it is passed over.
        names: Of an overview, the name of the row and of the column of each map: maps are small and have no labels.
        framed: Rows of cells that get a frame.
        meaning: What the colours mean.
        cmap: The colours.
        has_numbers: Whether a cell with enough room shows its value.
        has_maxima: Whether each map has its largest value above it.
        lettered: Further texts that the fonts must hold.
    """

    subtitle: str
    notes: tuple[str, ...]
    axes: tuple[tuple[Axis, Axis], ...]
    titles: tuple[str, ...] = ()
    names: tuple[tuple[str, str], ...] = ()
    framed: tuple[int, ...] = ()
    meaning: str = ""
    cmap: str = "Blues"
    has_numbers: bool = False
    has_maxima: bool = False
    lettered: tuple[str, ...] = ()

    @property
    def n(self) -> int:
        """How many maps there are."""
        return len(self.names or self.titles)

    @property
    def row_names(self) -> list[str]:
        """The names of the rows of an overview, from above."""
        return list(dict.fromkeys(row for row, _ in self.names))

    @property
    def column_names(self) -> list[str]:
        """The names of the columns of an overview, from the left."""
        return list(dict.fromkeys(column for _, column in self.names))


class MapsPage(Page):
    """A page of maps without their values, which `show` puts on it."""

    def __init__(self, figure: MapsFigure, paper: layout.Paper) -> None:
        labels = [label for pair in figure.axes for axis in pair for label in axis.labels]
        lettering = lettering_for([figure.subtitle, *figure.lettered, *labels], paper)
        self.content = figure
        rows, columns = zip(*figure.axes, strict=True)
        self._widest = (_widest(lettering, rows), _widest(lettering, columns))
        self.pool, self.shape, places = self._arrange(lettering)
        super().__init__(places.width_px, lettering)
        self.places = places
        self.zoom = places.zoom
        self.corners = list(places.corners)
        if figure.names:
            across = figure.column_names
            down = figure.row_names
            self.corners = [
                places.corners[down.index(row) * len(across) + across.index(column)] for row, column in figure.names
            ]
        self.boxes = [self._box(number) for number in range(figure.n)]
        self._title = self.head("", figure.subtitle, zoom=self.zoom, animated=True)
        cmap = colormap(figure.cmap)
        self.maps = [self.image(box, cmap) for box in self.boxes]
        self.frames(self.boxes)
        self._others: list[Text] | None = None
        if figure.names:
            self._name_maps()
        else:
            self._title_maps()
        self._draw_seams()
        self._draw_foot()
        self._numbers = self._open_numbers() if self.number_px else []
        self._dark = [is_dark(*cmap(value)[:3]) for value in np.linspace(0, 1, 256)]

    # Layout ---------------------------------------------------------------------------------------------------------

    def _arrange(self, lettering: Lettering) -> tuple[int, tuple[int, int], layout.Places]:
        """Return how many tokens share a cell in each direction, the rows and columns of cells, and all places.

        Cells are pooled where the page would be too large to draw.
        """
        figure = self.content
        tokens = [max(len(pair[side].labels) for pair in figure.axes) for side in (0, 1)]
        pool = 1
        if figure.names:
            room = max(96, 2 * layout.MIN_WIDTH_PX // len(figure.column_names))
            pool = max(1, math.ceil(max(tokens) / room))
        while True:
            shape = (-(-tokens[0] // pool), -(-tokens[1] // pool))
            places = layout.arrange(self._wanted(shape, lettering), lettering.paper)
            if places.width_px * (places.bottom + 200) <= layout.MOST_PX or max(shape) == 1:
                return pool, shape, places
            pool += 1

    def _wanted(self, shape: tuple[int, int], lettering: Lettering) -> layout.Wanted:
        figure = self.content
        paper = lettering.paper
        if figure.names:
            size = layout.PANEL_TITLE_PX * self._name_zoom(paper) * 1.1
            names = max(lettering.width_px(name, size) for name in figure.row_names)
            return layout.Wanted(
                n=len(figure.row_names) * len(figure.column_names),
                shape=shape,
                columns=len(figure.column_names),
                around=lambda cell: layout.Around(below=8 if not paper.is_narrow else 4),
                names_px=max(_NAMES_PX, math.ceil(names) + 20),
                gap_px=8 if not paper.is_narrow else 4,
                top_px=layout.HEADER_PX + 30,
                largest_px=_LARGEST_SMALL_PX,
                largest_cell_px=_LARGEST_SMALL_PX,
                least_width_px=layout.NARROWEST_PX,
            )

        def around(cell: float) -> layout.Around:
            font = self._label_font(cell, paper)[1]
            left = math.ceil(self._widest[0](font)) + 8
            below = math.ceil(self._widest[1](font)) + 24
            return layout.Around(left=left, above=layout.PANEL_HEADER_PX, below=below)

        return layout.Wanted(
            n=figure.n,
            shape=shape,
            around=around,
            least_cell_px=max(2, min(layout.LEGIBLE_PX, _LARGEST_LABELLED_PX // max(shape))),
            most_px=_TALLEST_FEW_PX if figure.n <= 2 else math.inf,
        )

    def _axes(self, number: int) -> tuple[Axis, Axis]:
        """Return the labels at the left of a map and those below."""
        axes = self.content.axes
        return axes[number] if len(axes) > 1 else axes[0]

    def _box(self, number: int) -> Box:
        """Return the box of a map; one that has fewer tokens than others is smaller."""
        n_rows, n_columns = (-(-len(axis.labels) // self.pool) for axis in self._axes(number))
        cell = self.places.cell[0]
        return (*self.corners[number], n_columns * cell, n_rows * cell)

    @staticmethod
    def _label_font(cell: float, paper: layout.Paper) -> tuple[int, float]:
        """Return how many cells share a label, and the font size of labels."""
        apart = paper.least_px / layout.LABEL_SHARE or layout.LEGIBLE_PX
        step = max(1, math.ceil(apart / cell))
        return step, paper.least_px or min(layout.MAX_LABEL_PX, cell * step * layout.LABEL_SHARE)

    @property
    def _has_copies(self) -> bool:
        """Whether in pixels the labels of all maps but the first are copies of its labels."""
        return self.paper.is_screen and len(self.content.axes) == 1

    @property
    def tokens_per_label(self) -> int:
        """How many tokens share a label."""
        return self._label_font(self.places.cell[0], self.paper)[0] * self.pool

    @property
    def number_px(self) -> float:
        """Font size of the values in cells; 0 = they have no room, or are not wanted."""
        cell = self.places.cell[0]
        if not self.content.has_numbers or cell < max(26, 2.5 * self.paper.least_px):
            return 0.0
        return self.paper.letters(min(14.0, cell * 0.36))

    # What stays the same --------------------------------------------------------------------------------------------

    def _name_zoom(self, paper: layout.Paper) -> float:
        """Return how much larger the names of an overview are if it is tall, and seen shrunk."""
        n_rows = len(self.content.row_names)
        return 1.0 if paper.fixed else min(2.0, max(1.0, n_rows / _MANY_ROWS))

    def _name_maps(self) -> None:
        size = layout.PANEL_TITLE_PX * max(min(self.zoom, 1.4), self._name_zoom(self.paper))
        figure = self.content
        names = [(row, column) for row in figure.row_names for column in figure.column_names]
        places = self.places
        self.name_panels(names, places.corners, places.panel, places.pitch_px, size, 14 * self.zoom)

    def _title_maps(self) -> None:
        """Write a title above each map, and its labels; on a screen the labels of the first are copied to the others.

        Text is what takes the time.
        """
        width, height = self.places.panel
        size = layout.PANEL_TITLE_PX * self.zoom
        for (x, y), title in zip(self.corners, self.content.titles, strict=True):
            if self.lettering.width_px(title, size * 1.12) > width:
                title = title.partition(":")[0]  # the title of the page says the rest
            self.entitle(x, y - 12 * self.zoom, self.lettering.fit(title, size * 1.12, max(width, 60)), size)
        self._label(0)
        if not self._has_copies:
            self.label_all()
            return
        font = self._label_font(self.places.cell[0], self.paper)[1]
        left, below = (math.ceil(widest(font)) + 2 * _STRIP_PX for widest in self._widest)
        beside = (-left, -_STRIP_PX, left - 2, height + 2 * _STRIP_PX)
        under = (-_STRIP_PX, height + 2, width + 2 * _STRIP_PX, below)
        x, y = self.corners[0]
        for dx, dy, wide, tall in (beside, under):
            self.copy((x + dx, y + dy, wide, tall), [(x + dx, y + dy) for x, y in self.corners[1:]])

    def _label(self, number: int) -> list[Text]:
        """Write the labels of a map: those of rows at its left, those of columns below."""
        x, y, _, height = self.boxes[number]
        rows, columns = self._axes(number)
        cell = self.places.cell[0]
        font = self._label_font(cell, self.paper)[1]
        texts = []
        room = max(self.places.around.left - 8, 1.0) + 0.5
        for place in _labelled(rows, self.tokens_per_label):
            label = self.lettering.fit(rows.labels[place], font, room)
            middle = y + (place // self.pool + 0.5) * cell
            color = rows.color(place)
            texts.append(self.write(x - 5, middle, label, font, ha="right", va="center_baseline", color=color))
        below = y + height + 5
        for place in _labelled(columns, self.tokens_per_label):
            label = self.lettering.fit(columns.labels[place], font, LABEL_ROOM_EM * font + 0.5)
            middle = x + (place // self.pool + 0.5) * cell
            color = columns.color(place)
            texts.append(self.write(middle, below, label, font, ha="center", va="top", rotation=90, color=color))
        return texts

    def label_all(self) -> None:
        """Show the labels of all maps, which in pixels are copies of the first one's."""
        if self._others is None:
            others = [] if self.content.names else range(1, self.content.n)
            self._others = [text for number in others for text in self._label(number)]
        for text in self._others:
            text.set_visible(True)

    def _draw_seams(self) -> None:
        """Draw lines where another text begins, and frames around rows."""
        tall = self.places.cell[1]
        cell = tall / self.pool
        lines: list[list[tuple[float, float]]] = []
        framed: list[Box] = []
        for number, (x, y, width, height) in enumerate(self.boxes):
            rows, columns = self._axes(number)
            lines += [[(x, y + at * cell), (x + width, y + at * cell)] for at in rows.seams]
            lines += [[(x + at * cell, y), (x + at * cell, y + height)] for at in columns.seams]
            framed += [(x, y + row // self.pool * tall, width, tall) for row in self.content.framed]
        if lines:
            self.lines(lines, color=SEAM, animated=True)
        if framed:
            self.outline(framed, MARK, 2.0 * self.zoom, animated=True)

    def _draw_foot(self) -> None:
        """Draw the colour bar and write the notes, and end the page."""
        notes = [*self.content.notes, *self.lettering.notes]
        if self.tokens_per_label > 1 and not self.content.names:
            notes.append(f"one label for {self.tokens_per_label} tokens")
        if self.pool > 1:
            notes.append(f"a cell shows the largest weight of {self.pool} × {self.pool} tokens")
        if self.number_px:
            notes.append("cells without a number: less than 0.005")
        cmap = colormap(self.content.cmap)
        self.bar = self.end_with_bar(self.places.bottom, cmap, self.content.meaning, notes, self.zoom)
        x, y, _, height = self.bar
        below = y + height + 12 * self.zoom
        size = layout.CAPTION_PX * self.zoom
        self._ticks = [self.write(x, below, "", size, ha="center", animated=True) for _ in range(11)]
        self._maxima = [
            self.write(x + self.places.panel[0], y - 12 * self.zoom, "", size, ha="right", color=FAINT, animated=True)
            for x, y in (self.corners if self.content.has_maxima and not self.content.names else ())
        ]

    def _open_numbers(self) -> list[Text]:
        x, y = self.corners[0]
        cell = self.places.cell[0]
        return [
            self.write(x + (k + 0.5) * cell, y + (q + 0.5) * cell, "", self.number_px, ha="center", animated=True)
            for q, k in np.ndindex(*self.shape)
        ]

    # What changes ---------------------------------------------------------------------------------------------------

    def show(
        self,
        title: str,
        values: Sequence[NDArray[np.float32]],
        limits: Sequence[tuple[float, float]],
        bar: tuple[float, float],
        ticks: dict[float, str],
    ) -> None:
        """Put values on the page.

        Args:
            title: The title of the page.
            values: Cells of each map, (row, column), pooled already; NaN has no colour.
            limits: The values of the first and last colour of each map.
            bar: The ends of the colour bar.
            ticks: Its numbers, and how they are written.
        """
        room = self.width_px - 2 * layout.MARGIN_PX
        self._title.set_text(self.lettering.fit(title, self.title_px(self.zoom) * 1.1, room))
        for image, cells, ends in zip(self.maps, values, limits, strict=True):
            self.set_cells(image, cells, ends)
        for text, cells in zip(self._maxima, values, strict=False):
            text.set_text(f"max {cells[np.isfinite(cells)].max(initial=0.0):.2f}")
        x, _, width, _ = self.bar
        placed = list(ticks.items())
        for number, text in enumerate(self._ticks):
            tick, written = placed[number] if number < len(placed) else (bar[0], "")
            text.set_text(written)
            text.set_x(x + width * (tick - bar[0]) / ((bar[1] - bar[0]) or 1.0))
        for text, weight in zip(self._numbers, values[0].ravel() if self._numbers else (), strict=True):
            low, high = limits[0]
            share = min(1.0, max(0.0, (float(weight) - low) / ((high - low) or 1.0)))
            text.set_text(f"{weight:.2f}" if weight >= _LEAST_NUMBER else "")
            text.set_color("white" if self._dark[round(share * 255)] else INK)

    def vector(self, kind: str) -> bytes:
        """Return the figure as it stands now as SVG or PDF, where every label is text."""
        self.label_all()
        content = super().vector(kind)
        if self._has_copies:
            for text in self._others or ():
                text.set_visible(False)
        return content


def _labelled(axis: Axis, step: int) -> list[int]:
    """Return the places with a label: every `step`-th that has room beside the marked ones, and these."""
    marked = axis.marked
    every = range(0, len(axis.labels), step)
    regular = [place for place in every if all(abs(place - other) >= step for other in marked)]
    return sorted({*regular, *marked})


def _widest(lettering: Lettering, axes: Sequence[Axis]) -> Callable[[float], float]:
    """Return the width of the widest label by font size; it is bounded, as labels are cut."""
    labels = {label for axis in axes for label in axis.labels}
    at_100 = max(lettering.width_px(lettering.spell(label), 100.0) for label in labels)
    return lambda size: min(at_100 / 100, LABEL_ROOM_EM) * size
