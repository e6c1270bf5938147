"""Draw what pages of figures share: title, notes, colour bars, legends, cells, and names and numbers around maps."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from attnscope.drawing import layout
from attnscope.drawing.canvas import FAINT, INK, Box, Canvas, colormap, wrap_lines
from attnscope.drawing.inks import hex_of, ink_on
from attnscope.drawing.vectors import vertices_of
from attnscope.report.numbers import tick_texts

if TYPE_CHECKING:
    from matplotlib.colors import Colormap
    from matplotlib.text import Text

UNKNOWN = "#dcdcdc"
"""The colour of a value that is undefined."""

BOLD = 1.12
"""The width of bold letters, as a multiple of that of plain ones."""

_N_LANES = 2
_LANE_PX = 20
SPANS_PX = _N_LANES * _LANE_PX + 6
"""Room for the names of spans above a map; they stand in lanes, one above the other, so as not to overlap."""

_SPAN_COLOUR = "#fde8d7"
_MIN_BAR_PX = 160.0
_LEGEND_ROW_PX = 22.0
_MANY_LEGEND_ROWS = 18
_LOW_LEGEND_ROW_PX = 15.0  # in a legend of more than _MANY_LEGEND_ROWS
_HALF_DIGIT = 0.365  # half of the height of a digit, as a share of the font size


@dataclass(frozen=True)
class CellNumber:
    """Hold a number or letter to be written in a cell; x and y are its middle."""

    x: float
    y: float
    text: str
    size_px: float
    color: str
    is_bold: bool = False


class FigurePage(Canvas):
    """Draw on a page that is as tall as what stands on it: `finish` ends it.

    Attributes:
        written_numbers: All numbers and letters in cells so far.
    """

    written_numbers: tuple[CellNumber, ...] = ()

    def title_px(self, zoom: float) -> float:
        """Return the size of the letters of its title, which are small on paper of a fixed width."""
        return layout.PANEL_TITLE_PX if self.paper.fixed else layout.TITLE_PX * zoom

    def write_header(
        self, title: str, subtitle: str, *, zoom: float = 1.0, animated: bool = False
    ) -> Text:
        """Write the title and the subtitle, and return the title. Both are hidden if figures have no caption.

        An animated title changes with the figure.
        """
        margin = layout.MARGIN_PX
        room = self.width_px - 2 * margin
        size = self.title_px(zoom)
        title = self.lettering.fit(title, size * BOLD, room)
        title_text = self.entitle(margin, margin + 4 * zoom, title, size, animated=animated)
        size = layout.CAPTION_PX if self.paper.fixed else layout.SUBTITLE_PX * zoom
        subtitle = self.lettering.fit(subtitle, size, room)
        below = self.write(margin, margin + 34 * zoom, subtitle, size, ha="left", color=FAINT)
        for text in (title_text, below):
            text.set_visible(self.paper.caption)
        return title_text

    def finish(self, y: float, notes: Sequence[str], zoom: float = 1.0) -> None:
        """Write the notes, their first line centred at y, unless figures have no caption; end the page below them."""
        y = math.ceil(y)
        lines: Sequence[str] = ()
        if notes and self.paper.caption:
            room = (self.width_px - 2 * layout.MARGIN_PX) / zoom
            lines = wrap_lines(" · ".join(notes), room, self.lettering)
        pitch = layout.LINE_PX * zoom
        size = layout.CAPTION_PX * zoom
        for number, line in enumerate(lines):
            self.write(layout.MARGIN_PX, y + number * pitch, line, size, ha="left", color=FAINT)
        self.end_at(y + round((len(lines) - 1) * pitch) + layout.MARGIN_PX)

    def end_with_bar(
        self,
        bottom: float,
        cmap: Colormap | str | None,
        meaning: str,
        notes: Sequence[str],
        zoom: float,
    ) -> Box:
        """Draw a colour bar, the meaning of its colours and the notes below all panels, and end the page.

        Args:
            bottom: Where the panels end.
            cmap: The colours; None = the caller draws the bar.
            meaning: What the colours mean.
            notes: The notes.
            zoom: How much larger than usual letters are.

        Returns:
            The box of the bar. The caller writes the numbers below it.
        """
        # If paper has its margin cut off, move the bar to the right: half of its first number is left of it.
        inset = 0.0
        if self.paper.crop_px:
            inset = max(8.0, self.lettering.width_px("0", layout.CAPTION_PX) / 2 - 2)
        # Without a caption there are no notes: the bar leaves room for the meaning beside it.
        size = layout.CAPTION_PX * zoom
        width = min(420 * zoom, self.width_px - 2 * layout.MARGIN_PX - inset - 12)
        if not self.paper.caption:
            meaning = meaning.partition(":")[0]
            room = self.width_px - 80 - inset - self.lettering.width_px(meaning, size)
            width = min(width, max(room, _MIN_BAR_PX))
        bar = (layout.MARGIN_PX + inset, bottom + 12, round(width), round(14 * zoom))
        # The caller writes the numbers: without ticks, the limits do not matter.
        fits = self.draw_colour_bar(bar, cmap, (0, 1), ticks={}, size_px=size, meaning=meaning)
        # A meaning without room opens the notes.
        if meaning and not fits:
            notes = [meaning, *notes]
        self.finish(bar[1] + round(54 * zoom), notes, zoom)
        return bar

    def entitle(
        self,
        x: float,
        y: float,
        title: str,
        size_px: float = layout.PANEL_TITLE_PX,
        ha: str = "left",
        **options: Any,
    ) -> Text:
        """Write a title, or the name of a row or column of panels, in bold letters; `options` are those of `write`."""
        return self.write(x, y, title, size_px, ha=ha, weight="bold", **options)

    def draw_colour_bar(
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
        if cmap is not None:
            # The colours from left to right, one row of 256 cells.
            image = self.image(box, colormap(cmap), animated=False)
            image.set_data(np.linspace(0, 1, 256)[None])
            self.frames([box])
        # Numbers below the bar, their middle at the value unless the first and last one must stay inside.
        if ticks is None:
            ticks = tick_texts(layout.ticks_between(low, high))
        alignments = {min(ticks): "left", max(ticks): "right"} if inside else {}
        below = y + height + size_px * 0.96
        for tick, text in ticks.items():
            tick_x = x + width * min(1.0, max(0.0, (tick - low) / (high - low)))
            alignment = alignments.get(tick, "center")
            self.write(tick_x, below, text, size_px, ha=alignment, color=color)
        # The meaning at the right.
        fits = self.lettering.width_px(meaning, size_px) <= self.width_px - x - width - 50
        if meaning and fits:
            self.write(x + width + 22, y + height / 2, meaning, size_px, ha="left")
        return fits

    def draw_legend(
        self, x: float, y: float, entries: Sequence[tuple[str, str, str]], columns: int
    ) -> float:
        """Draw coloured squares with their names, down one column and then the next.

        Args:
            x: The left side of the squares.
            y: The middle of the first row.
            entries: The name of each, its colour, and a letter in the square; "" = none.
            columns: How many columns there are.

        Returns:
            The middle of the row that would follow.
        """
        rows = max(1, math.ceil(len(entries) / columns))
        pitch = _LEGEND_ROW_PX if rows <= _MANY_LEGEND_ROWS else _LOW_LEGEND_ROW_PX
        column_px = self.paper.room_px / columns
        min_room = 36 if self.paper.fixed else 60
        squares: list[Box] = []
        # Go down one column and then the next.
        for number, (name, color, letter) in enumerate(entries):
            left = x + number // rows * column_px
            middle = y + number % rows * pitch
            squares.append((left, middle - 8, 20, pitch - 5))
            if letter:
                self.entitle(left + 10, middle, letter, 12, ha="center", color=ink_on(color))
            room = self.width_px - left - 30 - layout.MARGIN_PX
            if columns > 1:
                room = min(room, column_px - 34)
            name = self.lettering.fit(name, layout.CAPTION_PX, max(min_room, room))
            self.write(left + 28, middle, name, layout.CAPTION_PX, ha="left")
        self.fill(squares, [color for _, color, _ in entries])
        return y + rows * pitch

    def fill(self, boxes: Sequence[Box], colors: Sequence[Any]) -> None:
        """Draw filled rectangles, each in its colour, or all in one."""
        from matplotlib.collections import PolyCollection

        if not boxes:
            return
        outlines = list(vertices_of(np.array(boxes, np.float64)))
        width = self.points(1)
        artist = PolyCollection(outlines, linewidths=width, facecolors=colors, edgecolors="none")
        self.axes.add_collection(artist, autolim=False)
        self.register(artist)

    def draw_matrix(
        self, box: Box, values: NDArray[Any], cmap: Colormap | str, limits: tuple[float, float]
    ) -> None:
        """Draw values, (row, column), as coloured cells; where one is NaN, the grey ground shows."""
        self.fill([box], [UNKNOWN])
        image = self.image(box, colormap(cmap), animated=False)
        image.set_zorder(1.5)  # over the ground, under lines
        self.set_cells(image, values.astype(np.float32), limits)

    def draw_cells(
        self,
        corners: Sequence[tuple[float, float]],
        size: tuple[float, float],
        values: Sequence[float],
        cmap: str,
        colour_position: Callable[[float], float],
    ) -> list[tuple[Box, str]]:
        """Draw coloured cells, grey where a value is NaN.

        Args:
            corners: The upper left corner of each cell.
            size: The width and height of a cell, with the gap to the next one.
            values: The value of each cell.
            cmap: The colours.
            colour_position: Returns the position of a value among the colours, 0 to 1.

        Returns:
            The box and the colour of each cell.
        """
        gap = 2 if min(size) >= 24 else 1
        colors = colormap(cmap)
        cells: list[tuple[Box, str]] = []
        for corner, value in zip(corners, values, strict=True):
            color = hex_of(colors, colour_position(value)) if math.isfinite(value) else UNKNOWN
            cells.append(((*corner, size[0] - gap, size[1] - gap), color))
        self.fill([box for box, _ in cells], [color for _, color in cells])
        return cells

    def write_numbers(self, numbers: Sequence[CellNumber]) -> None:
        """Write numbers and letters in cells."""
        # The baseline of digits is half of their height below the middle of the cell.
        for number in numbers:
            self.write(
                number.x,
                number.y + number.size_px * _HALF_DIGIT,
                number.text,
                number.size_px,
                color=number.color,
                ha="center",
                va="baseline",
                weight="bold" if number.is_bold else "normal",
            )
        self.written_numbers = (*self.written_numbers, *numbers)

    def name_spans(
        self, corner: tuple[float, float], spans: Sequence[tuple[float, float, str]], column_px: float
    ) -> None:
        """Draw names above a map, each over a band of its columns, in the lowest lane that is free there.

        If no lane is free, the band is drawn without its name.

        Args:
            corner: The upper left corner of the map.
            spans: The first column of each, its last one, and the name.
            column_px: The width of a column.
        """
        x, y = corner
        lane_ends = [0.0] * _N_LANES
        bands: list[Box] = []
        for first, last, text in spans:
            # A name begins at its first column, or further left so that it ends within the page.
            left = x + first * column_px
            needed = self.lettering.width_px(text, layout.CAPTION_PX) + 12
            text_left = min(left, self.width_px - needed - 4)
            # Lane 0 is the lowest. A band without a name is in it.
            free_lanes = [lane for lane, end in enumerate(lane_ends) if end <= text_left]
            lane = free_lanes[0] if free_lanes else 0
            top = y - 4 - (lane + 1) * _LANE_PX
            bands.append((left, top, max(1.0, (last - first) * column_px), _LANE_PX - 3))
            if free_lanes:
                lane_ends[lane] = max(text_left + needed, x + last * column_px)
                self.write(text_left + 4, top + _LANE_PX / 2 - 1, text, layout.CAPTION_PX, ha="left")
        self.fill(bands, [_SPAN_COLOUR])

    def draw_ticks(
        self, box: Box, rows: Sequence[tuple[float, str]], columns: Sequence[tuple[float, str]]
    ) -> list[Text]:
        """Write numbers at the left of a map and below it, each with a short line; return their texts.

        Args:
            box: The map.
            rows: The numbers at the left: how far down each stands, 0 to 1, and how it is written.
            columns: The numbers below: how far to the right each stands, and how it is written.
        """
        x, y, width, height = box
        size = layout.CAPTION_PX
        texts = []
        for share, text in rows:
            tick_y = y + share * height
            self.lines([[(x - 5, tick_y), (x - 1, tick_y)]])
            texts.append(self.write(x - 8, tick_y, text, size, ha="right", color=FAINT))
        # Write every n-th number below the map, if there is no room for all.
        below = y + height + 5
        longest = max((text for _, text in columns), key=len, default="")
        step = self.label_step(longest, size, width / max(1, len(columns)))
        for share, text in columns[::step]:
            tick_x = x + share * width
            self.lines([[(tick_x, below - 4), (tick_x, below)]])
            texts.append(self.write(tick_x, below + 9, text, size, ha="center", color=FAINT))
        return texts

    def name_panels(
        self,
        rows: Sequence[str],
        columns: Sequence[str],
        places: layout.PanelLayout,
        size_px: float,
        above_px: float,
    ) -> None:
        """Name the rows of panels at their left, and the columns above the first row.

        Args:
            rows: The names of rows.
            columns: The names of columns; where there is no room for all, every n-th is written.
            places: Where the panels are.
            size_px: The size of letters.
            above_px: How far above panels the names of columns are.
        """
        width, height = places.panel
        left, top = places.corners[0]
        # Name each row at its first panel.
        for name, (_, y) in zip(rows, places.corners[:: len(columns)], strict=True):
            self.entitle(left - 10, y + height / 2, name, size_px, ha="right")
        size_px = self.paper.letters(min(size_px, width / 2.2))
        # The last name stands for the longest: names of columns are numbered.
        step = self.label_step(columns[-1], size_px, places.pitch_px)
        for number in range(0, len(columns), step):
            middle = places.corners[number][0] + width / 2
            self.entitle(middle, top - above_px, columns[number], size_px, ha="center")
