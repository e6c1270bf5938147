"""A page of panels: title, panels, colour bars, legends and notes, and the names and numbers around maps of heads."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from attnscope.drawing import layout
from attnscope.drawing.canvas import FAINT, INK, Box, Canvas, colormap, wrap_lines
from attnscope.drawing.inks import hex_of, ink_on
from attnscope.drawing.lettering import Lettering
from attnscope.drawing.vectors import vertices_of
from attnscope.report.numbers import tick_texts

if TYPE_CHECKING:
    from matplotlib.colors import Colormap
    from matplotlib.text import Text

UNKNOWN = "#dcdcdc"
"""The colour of a value that is undefined."""

BOLD = 1.12
"""How much wider bold letters are than plain ones."""

_LEAST_BAR_PX = 160.0
_LEGEND_ROW_PX, _LOW_ROW_PX, _MANY_ROWS = 22.0, 15.0, 18
_HALF_DIGIT = 0.365  # of the font size: the middle of digits over the line that they stand on

FontStyle = Literal["plain", "bold", "italic"]


@dataclass(frozen=True)
class Number:
    """A number or letter in a cell; x and y are its middle."""

    x: float
    y: float
    text: str
    size_px: float
    color: str
    font: FontStyle = "plain"


@dataclass(frozen=True)
class HeadGrid:
    """The rows and columns of a map of heads: layers down, heads across. Those that no head is of are left out."""

    layers: tuple[int, ...]
    heads: tuple[int, ...]

    @classmethod
    def over(cls, heads: Iterable[tuple[int, int]]) -> HeadGrid:
        """Return the grid of some heads, (layer, head)."""
        layers, numbers = zip(*heads, strict=True)
        return cls(tuple(sorted({*layers})), tuple(sorted({*numbers})))

    @property
    def shape(self) -> tuple[int, int]:
        """Return how many rows and columns it has."""
        return len(self.layers), len(self.heads)

    def corner(
        self, layer: int, head: int, start: tuple[float, float], cell: tuple[float, float]
    ) -> tuple[float, float]:
        """Return the upper left corner of a head's cell; `start` is the grid's corner, `cell` the size of a cell."""
        return start[0] + self.heads.index(head) * cell[0], start[1] + self.layers.index(layer) * cell[1]


class Page(Canvas):
    """A page as tall as what stands on it: `finish` ends it."""

    written_numbers: tuple[Number, ...] = ()

    def __init__(self, width_px: int, lettering: Lettering) -> None:
        super().__init__(width_px, 0, lettering)

    def title_px(self, zoom: float = 1.0) -> float:
        """Size of the letters of its title, which are small on paper of a fixed width."""
        return layout.PANEL_TITLE_PX if self.paper.fixed else layout.TITLE_PX * zoom

    def head(self, title: str, subtitle: str, *, zoom: float = 1.0, animated: bool = False) -> Text:
        """Write title and subtitle, unless figures have no caption; an animated title changes with the figure."""
        left, room = layout.MARGIN_PX, self.width_px - 2 * layout.MARGIN_PX
        size, below = self.title_px(zoom), layout.CAPTION_PX if self.paper.fixed else layout.SUBTITLE_PX * zoom
        title = self.lettering.fit(title, size * BOLD, room)
        first = self.write(left, left + 4 * zoom, title, size, ha="left", weight="bold", animated=animated)
        subtitle = self.lettering.fit(subtitle, below, room)
        second = self.write(left, left + 34 * zoom, subtitle, below, ha="left", color=FAINT)
        for text in (first, second):
            text.set_visible(self.paper.caption)
        return first

    def finish(self, y: float, notes: Sequence[str], zoom: float = 1.0) -> None:
        """Write notes, the middle of their first line at y, and end the page below them."""
        y = math.ceil(y)
        room = (self.width_px - 2 * layout.MARGIN_PX) / zoom
        if not self.paper.caption:
            notes = []
        lines = wrap_lines(" · ".join(notes), room, self.lettering) if notes else ()
        pitch = layout.LINE_PX * zoom
        for number, line in enumerate(lines):
            down = y + number * pitch
            self.write(layout.MARGIN_PX, down, line, layout.CAPTION_PX * zoom, ha="left", color=FAINT)
        self.end_at(y + round((len(lines) - 1) * pitch) + layout.MARGIN_PX)

    def end_with_bar(
        self,
        bottom: float,
        cmap: Colormap | str | None,
        meaning: str,
        notes: Sequence[str],
        zoom: float = 1.0,
    ) -> Box:
        """Draw a colour bar below what is on the page, what its colours mean, and the notes; return the bar.

        Without `cmap` the bar is left to be drawn. No numbers are below it.
        """
        inset = 0.0
        if self.paper.crop_px:  # the margin is cut off, and half of the first number would be
            inset = max(8.0, self.lettering.width_px("0", layout.CAPTION_PX) / 2 - 2)
        # The bar with its numbers, and its meaning beside it: without a caption there is no other place for it.
        width = min(420 * zoom, self.width_px - 2 * layout.MARGIN_PX - inset - 12)
        if not self.paper.caption:
            meaning = meaning.partition(":")[0]
            room = self.width_px - 80 - inset - self.lettering.width_px(meaning, layout.CAPTION_PX * zoom)
            width = min(width, max(room, _LEAST_BAR_PX))
        bar = (layout.MARGIN_PX + inset, bottom + 12, round(width), round(14 * zoom))
        size = layout.CAPTION_PX * zoom
        fits = self.draw_scale(bar, cmap, (0.0, 1.0), ticks={}, size_px=size, meaning=meaning)
        # A meaning without room opens the notes.
        if meaning and not fits:
            notes = [meaning, *notes]
        self.finish(bar[1] + round(54 * zoom), notes, zoom)
        return bar

    def entitle(self, x: float, y: float, title: str, size_px: float = layout.PANEL_TITLE_PX, **options: Any) -> Text:
        """Write the title of a panel, or the name of a row or column of panels."""
        return self.write(x, y, title, size_px, **{"ha": "left", "weight": "bold"} | options)

    def draw_scale(
        self,
        box: Box,
        cmap: Colormap | str | None,
        limits: tuple[float, float],
        *,
        ticks: Mapping[float, str] | None = None,
        size_px: float = layout.CAPTION_PX,
        color: str = INK,
        meaning: str = "",
        inside: bool = False,
    ) -> bool:
        """Draw a colour bar with its numbers below it, and at its right what the colours mean.

        Args:
            box: The bar.
            cmap: Its colours, or their name; None = it is drawn already.
            limits: The values of its first and last colour.
            ticks: The values that are marked, each with its text; None = round ones.
            size_px: Size of the letters.
            color: Colour of the numbers.
            meaning: What the colours mean.
            inside: Whether the first and last number stay within the bar's width.

        Returns:
            Whether the meaning has room; else it is not written, and belongs to the notes.
        """
        x, y, width, height = box
        low, high = limits
        # The bar.
        if cmap is not None:
            self.colour_bar(box, colormap(cmap) if isinstance(cmap, str) else cmap)
        # Its numbers.
        if ticks is None:
            ticks = tick_texts(layout.ticks_between(low, high))
        sides = {min(ticks): "left", max(ticks): "right"} if inside else {}
        for tick, text in ticks.items():
            at = x + width * min(1.0, max(0.0, (tick - low) / (high - low)))
            self.write(at, y + height + size_px * 0.96, text, size_px, ha=sides.get(tick, "center"), color=color)
        # Its meaning, at the right.
        fits = self.lettering.width_px(meaning, size_px) <= self.width_px - x - width - 50
        if meaning and fits:
            self.write(x + width + 22, y + height / 2, meaning, size_px, ha="left")
        return fits

    def legend(self, x: float, y: float, entries: Sequence[tuple[str, str, str]], columns: int = 1) -> float:
        """Draw coloured squares with their names, down one column and then the next; return where it ends.

        The middle of the first line is y. An entry is a name, a colour, and a letter in the square.
        """
        rows = max(1, math.ceil(len(entries) / columns))
        pitch = _LEGEND_ROW_PX if rows <= _MANY_ROWS else _LOW_ROW_PX
        wide = self.paper.room_px / columns
        corners = [(x + number // rows * wide, y + number % rows * pitch) for number in range(len(entries))]
        self.fill([(left, top - 8, 20, pitch - 5) for left, top in corners], [color for _, color, _ in entries])
        # A letter in each square, its name beside it.
        for (name, color, glyph), (left, middle) in zip(entries, corners, strict=True):
            if glyph:
                self.entitle(left + 10, middle, glyph, 12, ha="center", color=ink_on(color))
            room = min(self.width_px - left - 30 - layout.MARGIN_PX, wide - 34 if columns > 1 else math.inf)
            name = self.lettering.fit(name, layout.CAPTION_PX, max(36 if self.paper.fixed else 60, room))
            self.write(left + 28, middle, name, layout.CAPTION_PX, ha="left")
        return y + rows * pitch

    def fill(self, boxes: Sequence[Box], colors: Sequence[Any]) -> None:
        """Draw filled rectangles."""
        from matplotlib.collections import PolyCollection

        if not boxes:
            return
        outlines = list(vertices_of(np.array(boxes, np.float64)))
        artist = PolyCollection(outlines, linewidths=self.points(1), facecolors=colors, edgecolors="none")
        self.axes.add_collection(artist, autolim=False)
        self.keep(artist)

    def matrix(self, box: Box, values: NDArray[Any], cmap: Colormap | str, limits: tuple[float, float]) -> None:
        """Draw values as coloured cells; the ground shows where a value is unknown."""
        self.fill([box], [UNKNOWN])
        image = self.image(box, colormap(cmap) if isinstance(cmap, str) else cmap, animated=False)
        image.set_zorder(1.5)  # over the ground, under lines
        self.set_cells(image, values.astype(np.float32), limits)

    def grid_cells(
        self,
        corner: tuple[float, float],
        cell: tuple[float, float],
        values: Mapping[tuple[int, int], float],
        cmap: str,
        share: Callable[[float], float],
    ) -> dict[tuple[int, int], tuple[Box, str]]:
        """Draw coloured cells of a grid, grey where a value is undefined; return the box and the colour of each.

        Values are by (row, column), such as (layer, head); `share` tells how far along the colours one is, 0 to 1. A
        cell's width and height include the gap to the next.
        """
        gap, colors = 2 if min(cell) >= 24 else 1, colormap(cmap)
        grid = HeadGrid.over(values)
        cells: dict[tuple[int, int], tuple[Box, str]] = {}
        for (row, column), value in values.items():
            box = (*grid.corner(row, column, corner, cell), cell[0] - gap, cell[1] - gap)
            cells[row, column] = box, hex_of(colors, share(value)) if math.isfinite(value) else UNKNOWN
        self.fill([box for box, _ in cells.values()], [color for _, color in cells.values()])
        return cells

    def number_cells(self, cells: Sequence[tuple[Box, str]], texts: Sequence[str], size_px: float) -> None:
        """Write a number in the middle of each cell, in an ink that can be read on its colour."""
        self.numbers(
            [
                Number(x + width / 2, y + height / 2, text, size_px, ink_on(color))
                for ((x, y, width, height), color), text in zip(cells, texts, strict=True)
            ]
        )

    def numbers(self, numbers: Sequence[Number]) -> None:
        """Write numbers and letters in cells."""
        for number in numbers:
            self.write(
                number.x,
                number.y + number.size_px * _HALF_DIGIT,
                number.text,
                number.size_px,
                color=number.color,
                ha="center",
                va="baseline",
                weight="bold" if number.font == "bold" else "normal",
                style="italic" if number.font == "italic" else "normal",
            )
        self.written_numbers = (*self.written_numbers, *numbers)

    def name_panels(
        self,
        names: Sequence[tuple[str, str]],
        corners: Sequence[tuple[float, float]],
        panel: tuple[float, float],
        pitch: float,
        size_px: float = layout.PANEL_TITLE_PX,
        above_px: float = 14,
    ) -> None:
        """Name the rows of panels at their left and the columns above; every n-th where there is no room for all.

        Each panel has the names of its row and its column, and its upper left corner; the first is the upper left one.
        `panel` is their width and height, `pitch` the distance from one column to the next.
        """
        rows = {row: y + panel[1] / 2 for (row, _), (_, y) in zip(names, corners, strict=True)}
        columns = {column: x + panel[0] / 2 for (_, column), (x, _) in zip(names, corners, strict=True)}
        for name, y in rows.items():
            self.entitle(corners[0][0] - 10, y, name, size_px, ha="right")
        size_px = self.paper.letters(min(size_px, panel[0] / 2.2))
        step = self.label_step(list(columns)[-1], size_px, pitch)
        for name, x in list(columns.items())[::step]:
            self.entitle(x, corners[0][1] - above_px, name, size_px, ha="center")

    def name_axes(
        self,
        corner: tuple[float, float],
        grid: HeadGrid,
        cell: tuple[float, float],
        size_px: float = layout.PANEL_TITLE_PX,
    ) -> None:
        """Name layers at the left and heads above; every n-th where there is no room for all."""
        # Heads above, in letters that fit their cells.
        size = self.paper.letters(min(size_px, cell[0] / 1.6 if size_px > 12 else size_px))
        widest = self.lettering.width_px(f"H{max(grid.heads, default=0)}", size)
        step = math.ceil(math.ceil(widest * 1.25) / cell[0])
        for column, head in list(enumerate(grid.heads))[::step]:
            x = corner[0] + (column + 0.5) * cell[0] - (1.5 if cell[0] > 39 else 0)
            self.write(x, corner[1] - size * 0.9, f"H{head}", size, ha="center", color=FAINT)
        # Layers at the left.
        size_px = self.paper.letters(size_px)
        step = math.ceil(math.ceil(size_px * 1.25) / cell[1])
        for row, layer in list(enumerate(grid.layers))[::step]:
            y = corner[1] + (row + 0.5) * cell[1]
            self.write(corner[0] - 8, y, f"L{layer}", size_px, ha="right", va="center_baseline", color=FAINT)
