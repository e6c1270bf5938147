"""Draw the elements that figures share: title, notes, colour bars, legends, cells, names and numbers around maps.

A page is one figure, whose height follows from its content. A span is a range of columns of a map that has a name, such
as a spoken word.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from attnscope.drawing.canvas import FAINT, INK, Box, Canvas, colormap, wrap_lines
from attnscope.drawing.inks import colormap_hex, text_color_on
from attnscope.drawing.layout import (
    CAPTION_PX,
    LINE_PX,
    MARGIN_PX,
    PANEL_TITLE_PX,
    SUBTITLE_PX,
    TITLE_PX,
    PanelLayout,
    ticks_between,
)
from attnscope.drawing.vectors import box_outlines
from attnscope.report.numbers import format_ticks

if TYPE_CHECKING:
    from matplotlib.colors import Colormap
    from matplotlib.text import Text

UNDEFINED_COLOUR = "#dcdcdc"
"""The colour of an undefined value (NaN)."""

BOLD_WIDTH = 1.12
"""The width of bold letters / the width of plain letters, about."""

# Names of spans stand in lanes, one above the other, so that neighbouring names do not overlap.
_N_LANES = 2
_LANE_PX = 20
SPAN_LANES_PX = _N_LANES * _LANE_PX + 6
"""Height of the room for names of spans above a map."""

_SPAN_COLOUR = "#fde8d7"
_MIN_BAR_PX = 160.0
_LEGEND_ROW_PX = 22.0
_MAX_USUAL_LEGEND_ROWS = 18
_LOW_LEGEND_ROW_PX = 15.0  # in a legend of more than _MAX_USUAL_LEGEND_ROWS
_HALF_DIGIT_EM = 0.365  # half the height of a digit / the font size


@dataclass(frozen=True)
class CellNumber:
    """Hold a number or letter to write in a cell. (x, y) is its centre, in pixels."""

    x: float
    y: float
    text: str
    size_px: float
    color: str
    is_bold: bool = False


class FigurePage(Canvas):
    """Draw on a page that is as tall as its content. Call `end_with_notes` or `end_with_bar` last: they set the height.

    Attributes:
        cell_numbers: All numbers and letters that were written in cells so far.
    """

    cell_numbers: tuple[CellNumber, ...] = ()

    def title_px(self, zoom: float) -> float:
        """Return the font size of the title. It is smaller on paper of a fixed width."""
        return PANEL_TITLE_PX if self.paper.is_fixed_width else TITLE_PX * zoom

    def write_header(
        self, title: str, subtitle: str, *, zoom: float = 1.0, animated: bool = False
    ) -> Text:
        """Write the title and the subtitle, and return the artist of the title.

        Both are hidden if figures have no caption. An animated title is redrawn in each figure, so that it can change.
        """
        margin = MARGIN_PX
        room = self.width_px - 2 * margin
        size = self.title_px(zoom)
        title = self.lettering.fit(title, size * BOLD_WIDTH, room)
        title_text = self.write_title(margin, margin + 4 * zoom, title, size, animated=animated)
        size = CAPTION_PX if self.paper.is_fixed_width else SUBTITLE_PX * zoom
        subtitle = self.lettering.fit(subtitle, size, room)
        subtitle_text = self.write(margin, margin + 34 * zoom, subtitle, size, ha="left", color=FAINT)
        for text in (title_text, subtitle_text):
            text.set_visible(self.paper.caption)
        return title_text

    def end_with_notes(self, y: float, notes: Sequence[str], zoom: float = 1.0) -> None:
        """Write the notes, with the centre of their first line at y, and end the page below them.

        If figures have no caption, the notes are left out.
        """
        y = math.ceil(y)
        lines: Sequence[str] = ()
        if notes and self.paper.caption:
            room = (self.width_px - 2 * MARGIN_PX) / zoom
            lines = wrap_lines(" · ".join(notes), room, self.lettering)
        pitch = LINE_PX * zoom
        size = CAPTION_PX * zoom
        for number, line in enumerate(lines):
            self.write(MARGIN_PX, y + number * pitch, line, size, ha="left", color=FAINT)
        # y is the centre of the first line. Without any line, the page ends one line higher.
        self.set_height(y + round((len(lines) - 1) * pitch) + MARGIN_PX)

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
            bottom: The y at which the panels end.
            cmap: The colours; None = the caller draws the bar.
            meaning: What the colours mean. If figures have no caption, only the part before a colon is written.
            notes: The notes.
            zoom: The size of letters / their usual size.

        Returns:
            The box of the bar. The caller writes the numbers below the bar.
        """
        # The first number is centred at the left end of the bar. If the margin is cropped, move the bar to the right to
        # make room for half of that number.
        inset = 0.0
        if self.paper.crop_px:
            inset = max(8.0, self.lettering.width_px("0", CAPTION_PX) / 2 - 2)
        # Without a caption there are no notes, so shorten the bar until the meaning fits beside it.
        size = CAPTION_PX * zoom
        width = min(420 * zoom, self.width_px - 2 * MARGIN_PX - inset - 12)
        if not self.paper.caption:
            meaning = meaning.partition(":")[0]
            # `draw_colour_bar` needs 50 px besides the bar and the meaning. The other 30 px are the left margin
            # and 2 px to spare.
            room = self.width_px - 80 - inset - self.lettering.width_px(meaning, size)
            width = min(width, max(room, _MIN_BAR_PX))
        bar = (MARGIN_PX + inset, bottom + 12, round(width), round(14 * zoom))
        # The caller writes the numbers. The limits (0, 1) only position ticks, and there are no ticks here.
        fits = self.draw_colour_bar(bar, cmap, (0, 1), ticks={}, size_px=size, meaning=meaning)
        # If the meaning does not fit beside the bar, make it the first note.
        if meaning and not fits:
            notes = [meaning, *notes]
        self.end_with_notes(bar[1] + round(54 * zoom), notes, zoom)
        return bar

    def write_title(
        self,
        x: float,
        y: float,
        title: str,
        size_px: float = PANEL_TITLE_PX,
        ha: str = "left",
        **options: Any,
    ) -> Text:
        """Write a title, or the name of a row or column of panels, in bold letters; `options` go to `write`."""
        return self.write(x, y, title, size_px, ha=ha, weight="bold", **options)

    def draw_colour_bar(
        self,
        box: Box,
        cmap: Colormap | str | None,
        limits: tuple[float, float],
        *,
        ticks: Mapping[float, str] | None = None,
        size_px: float = CAPTION_PX,
        color: str = INK,
        meaning: str = "",
        is_inset: bool = False,
    ) -> bool:
        """Draw a colour bar, the numbers below it, and the meaning of its colours at its right.

        Args:
            box: The box of the bar.
            cmap: The colormap or its name; None = the caller draws the bar.
            limits: The values of the first and the last colour.
            ticks: The text of each value that is marked; None = round values. May be empty.
            size_px: The font size.
            color: The colour of the numbers.
            meaning: What the colours mean.
            is_inset: Whether the first and the last number stay within the width of the bar.

        Returns:
            Whether the meaning fits beside the bar. If not, it is not written; the caller puts it into the notes.
        """
        x, y, width, height = box
        low, high = limits
        if cmap is not None:
            # Draw the colours from left to right as one row of 256 cells.
            image = self.add_image(box, colormap(cmap), animated=False)
            image.set_data(np.linspace(0, 1, 256)[None])
            self.draw_frames([box])
        # Write the numbers below the bar, centred at their values, except the outer ones if they must stay inside.
        if ticks is None:
            ticks = format_ticks(ticks_between(low, high))
        alignments = {min(ticks): "left", max(ticks): "right"} if is_inset else {}
        below = y + height + size_px * 0.96
        for tick, text in ticks.items():
            tick_x = x + width * min(1.0, max(0.0, (tick - low) / (high - low)))
            alignment = alignments.get(tick, "center")
            self.write(tick_x, below, text, size_px, ha=alignment, color=color)
        # Write the meaning at the right, if it fits on the page.
        fits = self.lettering.width_px(meaning, size_px) <= self.width_px - x - width - 50
        if meaning and fits:
            self.write(x + width + 22, y + height / 2, meaning, size_px, ha="left")
        return fits

    def draw_legend(
        self, x: float, y: float, entries: Sequence[tuple[str, str, str]], columns: int
    ) -> float:
        """Draw a legend of coloured squares with names. Entries go down the first column, then down the next.

        Args:
            x: The left edge of the squares.
            y: The centre of the first row.
            entries: (name, colour, letter in the square) of each entry; the letter "" = an empty square.
            columns: The number of columns.

        Returns:
            The centre of the row that would follow the last row.
        """
        rows = max(1, math.ceil(len(entries) / columns))
        pitch = _LEGEND_ROW_PX if rows <= _MAX_USUAL_LEGEND_ROWS else _LOW_LEGEND_ROW_PX
        column_px = self.paper.room_px / columns
        min_room = 36 if self.paper.is_fixed_width else 60
        squares: list[Box] = []
        # Entry `number` is in column number // rows and in row number % rows.
        for number, (name, color, letter) in enumerate(entries):
            left = x + number // rows * column_px
            middle = y + number % rows * pitch
            squares.append((left, middle - 8, 20, pitch - 5))
            if letter:
                self.write_title(left + 10, middle, letter, 12, ha="center", color=text_color_on(color))
            room = self.width_px - left - 30 - MARGIN_PX
            if columns > 1:
                room = min(room, column_px - 34)
            name = self.lettering.fit(name, CAPTION_PX, max(min_room, room))
            self.write(left + 28, middle, name, CAPTION_PX, ha="left")
        self.fill_boxes(squares, [color for _, color, _ in entries])
        return y + rows * pitch

    def fill_boxes(self, boxes: Sequence[Box], colors: Sequence[Any]) -> None:
        """Draw filled rectangles. `colors` has one colour per box, or a single colour for all boxes."""
        from matplotlib.collections import PolyCollection

        if not boxes:
            return
        outlines = list(box_outlines(np.array(boxes, np.float64)))
        # The boxes have no edges, so no line is drawn. But the PDFs of Matplotlib pad collections by the line width.
        width = self.to_points(1)
        artist = PolyCollection(outlines, linewidths=width, facecolors=colors, edgecolors="none")
        self.axes.add_collection(artist, autolim=False)
        self.register_artist(artist)

    def draw_matrix(
        self, box: Box, values: NDArray[Any], cmap: Colormap | str, limits: tuple[float, float]
    ) -> None:
        """Draw values, (row, column), as coloured cells. Cells that are NaN show the grey background."""
        self.fill_boxes([box], [UNDEFINED_COLOUR])
        image = self.add_image(box, colormap(cmap), animated=False)
        image.set_zorder(1.5)  # above the background (zorder 1), below lines (zorder 2)
        self.set_cells(image, values.astype(np.float32), limits)

    def draw_cells(
        self,
        corners: Sequence[tuple[float, float]],
        size: tuple[float, float],
        values: Sequence[float],
        cmap: str,
        colour_position: Callable[[float], float],
    ) -> list[tuple[Box, str]]:
        """Draw coloured cells. A cell whose value is NaN is grey.

        Args:
            corners: The upper left corner of each cell.
            size: The width and height of a cell, including the gap to the next cell.
            values: The value of each cell.
            cmap: The name of the colormap.
            colour_position: A function from a value to its position in the colormap, 0 to 1.

        Returns:
            The box and the colour of each cell.
        """
        gap = 2 if min(size) >= 24 else 1
        colors = colormap(cmap)
        cells: list[tuple[Box, str]] = []
        for corner, value in zip(corners, values, strict=True):
            color = (
                colormap_hex(colors, colour_position(value))
                if math.isfinite(value)
                else UNDEFINED_COLOUR
            )
            cells.append(((*corner, size[0] - gap, size[1] - gap), color))
        self.fill_boxes([box for box, _ in cells], [color for _, color in cells])
        return cells

    def write_numbers(self, numbers: Sequence[CellNumber]) -> None:
        """Write numbers and letters in cells."""
        # To centre digits, put their baseline half of their height below the centre of the cell.
        for number in numbers:
            self.write(
                number.x,
                number.y + number.size_px * _HALF_DIGIT_EM,
                number.text,
                number.size_px,
                color=number.color,
                ha="center",
                va="baseline",
                weight="bold" if number.is_bold else "normal",
            )
        self.cell_numbers = (*self.cell_numbers, *numbers)

    def name_spans(
        self, corner: tuple[float, float], spans: Sequence[tuple[float, float, str]], column_px: float
    ) -> None:
        """Draw the names of spans above a map. Each name stands on a coloured band over the columns of its span.

        A span gets the lowest lane that is free at its position. If no lane is free, the band is drawn without a name.

        Args:
            corner: The upper left corner of the map.
            spans: (start column, stop column, name) of each span, from left to right.
            column_px: The width of a column.
        """
        x, y = corner
        lane_ends = [0.0] * _N_LANES
        bands: list[Box] = []
        for start, stop, text in spans:
            # A name starts at its first column, or further left if it would otherwise end outside the page.
            left = x + start * column_px
            needed = self.lettering.width_px(text, CAPTION_PX) + 12
            text_left = min(left, self.width_px - needed - 4)
            # Lane 0 is the lowest. It also takes the bands without a name.
            free_lanes = [lane for lane, end in enumerate(lane_ends) if end <= text_left]
            lane = free_lanes[0] if free_lanes else 0
            top = y - 4 - (lane + 1) * _LANE_PX
            bands.append((left, top, max(1.0, (stop - start) * column_px), _LANE_PX - 3))
            if free_lanes:
                lane_ends[lane] = max(text_left + needed, x + stop * column_px)
                self.write(text_left + 4, top + _LANE_PX / 2 - 1, text, CAPTION_PX, ha="left")
        self.fill_boxes(bands, [_SPAN_COLOUR])

    def draw_ticks(
        self, box: Box, rows: Sequence[tuple[float, str]], columns: Sequence[tuple[float, str]]
    ) -> list[Text]:
        """Draw an axis of numbers at the left of a map and below it, each with a short line; return the text artists.

        Args:
            box: The box of the map.
            rows: (position, text) of each number at the left. Positions are 0 at the upper edge, 1 at the lower edge.
            columns: (position, text) of each number below. Positions are 0 at the left edge, 1 at the right edge.
        """
        x, y, width, height = box
        size = CAPTION_PX
        texts = []
        for position, text in rows:
            tick_y = y + position * height
            self.draw_lines([[(x - 5, tick_y), (x - 1, tick_y)]])
            texts.append(self.write(x - 8, tick_y, text, size, ha="right", color=FAINT))
        # Below the map, write only every n-th number if there is no room for all.
        below = y + height + 5
        longest = max((text for _, text in columns), key=len, default="")
        step = self.label_step(longest, size, width / max(1, len(columns)))
        for position, text in columns[::step]:
            tick_x = x + position * width
            self.draw_lines([[(tick_x, below - 4), (tick_x, below)]])
            texts.append(self.write(tick_x, below + 9, text, size, ha="center", color=FAINT))
        return texts

    def name_panels(
        self,
        rows: Sequence[str],
        columns: Sequence[str],
        grid: PanelLayout,
        size_px: float,
        above_px: float,
    ) -> None:
        """Write the names of rows at the left of the panels, and the names of columns above the first row of panels.

        Args:
            rows: The names of rows.
            columns: The names of columns. If there is no room for all, only every n-th is written.
            grid: The positions of the panels.
            size_px: The font size.
            above_px: The distance from the names of columns down to the panels.
        """
        width, height = grid.panel_size
        left, top = grid.corners[0]
        # Write the name of each row beside its first panel.
        for name, (_, y) in zip(rows, grid.corners[:: len(columns)], strict=True):
            self.write_title(left - 10, y + height / 2, name, size_px, ha="right")
        # A name such as "H11", in bold letters, is about 2.2 times as wide as its font size. Let it be no wider than a
        # panel, unless its letters would then be too small to read on the paper.
        size_px = self.paper.legible_px(min(size_px, width / 2.2))
        # Names of columns end with a number that grows, so the last name is the longest.
        step = self.label_step(columns[-1], size_px, grid.pitch_px)
        for number in range(0, len(columns), step):
            middle = grid.corners[number][0] + width / 2
            self.write_title(middle, top - above_px, columns[number], size_px, ha="center")
