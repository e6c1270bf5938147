"""Draw a page of attention maps side by side: coloured cells, labels or numbers around them, a colour bar, notes.

A cell is a pair of labelled tokens, a patch of a picture, or a moment of a sound with an axis of numbers. `MapsFigure`
declares what a page shows, and `layout` computes the positions. Labels are drawn once: `MapsPage.set_values` puts other
values on the same page. This module knows nothing of models.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import chain, product
from typing import TYPE_CHECKING

import numpy as np

from attnscope.drawing import layout
from attnscope.drawing.canvas import FAINT, INK, MARK_COLOR, Box, colormap
from attnscope.drawing.cells import Pixels, Values, darken, max_pool, overlay, pool_to_pixels
from attnscope.drawing.inks import is_dark
from attnscope.drawing.lettering import Lettering, choose_lettering
from attnscope.drawing.map_figure import Axis, MapsFigure
from attnscope.drawing.page import BOLD_WIDTH, SPAN_LANES_PX, FigurePage

if TYPE_CHECKING:
    from matplotlib.text import Text

MAX_LABEL_EM = 11
"""The largest width of a label / its font size. Longer labels are cut."""

_BOUNDARY_COLOUR = "#d1495b"  # of lines at which another text begins
_N_USUAL_ROWS = 15  # an overview of more rows gets larger names, as viewers shrink it to fit the screen
_LABEL_OVERHANG_PX = 8  # how far labels may extend beyond their room, into the gap between maps
_MAX_LABELLED_PX = 1000  # a map of more tokens does not grow further: some of its labels are left out
_MAX_OVERVIEW_PX = 300  # the largest map of an overview
_MAX_HEIGHT_PX = 1116  # the largest height of one or two maps on a screen
_MIN_NAMES_PX = 52  # the smallest width for the names of an overview's rows
_TICK_ROOM_PX = 62  # room for an axis of numbers
_BAR_STRIP_PX = 30  # room for the strip of bars along the upper side
_MIN_WRITTEN_WEIGHT = 0.005  # a smaller value is not written into its cell
_MAX_TICKS = 11  # the largest number of ticks below the colour bar
_BAR_COLOUR = "#7b8794"


class MapsPage(FigurePage):
    """Draw a page of maps without values; `set_values` then colours the cells.

    Attributes: `grid` has the positions of maps. A cell shows `pool` x `pool` tokens. A map has `shape` cells.
    """

    def __init__(self, content: MapsFigure, paper: layout.Paper) -> None:
        row_axes, column_axes = zip(*content.axes, strict=True)
        labels = chain.from_iterable(axis.labels for axis in (*row_axes, *column_axes))
        names = [text for _, _, text in content.spans]
        lettering = choose_lettering([content.subtitle, *content.font_texts, *names, *labels], paper)
        self.content = content
        # Functions from the font size to the width of the widest label, at the left of maps and below them.
        self._row_label_px = _label_width_function(lettering, row_axes)
        self._column_label_px = _label_width_function(lettering, column_axes)
        # The height of the strip above maps: for bars, or for names of spans.
        self._strip_px = 0
        if content.bars:
            self._strip_px = _BAR_STRIP_PX
        elif content.spans:
            self._strip_px = SPAN_LANES_PX
        self.pool, self.shape, grid = self._arrange(lettering)
        super().__init__(grid.width_px, lettering)
        self.grid = grid
        self.zoom = grid.zoom
        # The upper left corner of each map. An overview has a corner for each pair of names, but may lack some maps.
        self.corners = list(grid.corners)
        if content.names:
            pairs = product(content.row_names, content.column_names)
            corner_of = dict(zip(pairs, grid.corners, strict=True))
            self.corners = [corner_of[names_of_map] for names_of_map in content.names]
        # Draw what all figures of this page share.
        self._title = self.write_header("", content.subtitle, zoom=self.zoom, animated=True)
        self._picture_box: Box | None = None
        self._picture = None if content.picture is None else self._prepare_picture()
        self.boxes = [self._map_box(index) for index in range(content.n)]
        self._cmap = colormap(content.cmap)
        self.maps = [self.add_image(box, self._cmap) for box in self.boxes]
        self.draw_frames(self.boxes)
        # The labels of all maps but the first, once they are written.
        self._other_labels: list[Text] | None = None
        if content.names:
            self._name_maps()
        else:
            self._title_maps()
        self._draw_strip()
        self._draw_marks()
        self._draw_foot()
        # Prepare texts for the numbers in cells, and find which of 256 colours are dark and need white numbers.
        self._number_texts = self._write_empty_numbers() if self.number_px else []
        self._is_dark = [is_dark(*color[:3]) for color in self._cmap(np.linspace(0, 1, 256))]

    # Layout ---------------------------------------------------------------------------------------------------------

    def _arrange(self, lettering: Lettering) -> tuple[int, tuple[int, int], layout.PanelLayout]:
        """Return `pool`, `shape` and `grid` (see the class). Pool tokens if the page would be too large to draw."""
        content = self.content
        # All maps share one layout, with room for the largest number of rows and of columns.
        n_rows = max(len(rows) for rows, _ in content.axes)
        n_columns = max(len(columns) for _, columns in content.axes)
        # In an overview, start with at most two cells per pixel of a usual page, but no fewer than 96.
        pool = 1
        if content.names and content.is_labelled:
            max_cells = max(96, 2 * layout.PAGE_WIDTH_PX // len(content.column_names))
            pool = max(1, math.ceil(max(n_rows, n_columns) / max_cells))
        # Increase the pooling until the page is small enough. The colour bar and the notes take about 200 pixels.
        request_panels = self._request_overview if content.names else self._request_maps
        while True:
            shape = (math.ceil(n_rows / pool), math.ceil(n_columns / pool))
            grid = layout.arrange_panels(request_panels(shape, lettering), lettering.paper)
            fits = grid.width_px * (grid.bottom_y + 200) <= layout.MAX_PAGE_PIXELS
            if fits or max(shape) == 1 or not content.is_labelled:
                return pool, shape, grid
            pool += 1

    def _request_overview(self, shape: tuple[int, int], lettering: Lettering) -> layout.PanelRequest:
        """Return the layout request of an overview, which has names for its rows and columns of maps, and no labels."""
        content = self.content
        paper = lettering.paper
        # Names are bold, so allow for a tenth more width.
        size = layout.PANEL_TITLE_PX * self._name_zoom(paper) * 1.1
        widest_name = max(lettering.width_px(name, size) for name in content.row_names)
        # Names of rows stand at the left, names of columns above. Maps of unlabelled cells may shrink to 24 pixels;
        # several cells then share a pixel.
        gap_px = 4 if paper.is_narrow else 8
        return layout.PanelRequest(
            n=len(content.row_names) * len(content.column_names),
            shape=shape,
            columns=len(content.column_names),
            margins=lambda cell_px: layout.Margins(below=gap_px),
            names_px=max(_MIN_NAMES_PX, math.ceil(widest_name) + 20),
            gap_px=gap_px,
            top_px=layout.HEADER_PX + 30 + self._strip_px,
            row_px=content.row_px,
            max_panel_px=_MAX_OVERVIEW_PX,
            max_cell_px=_MAX_OVERVIEW_PX,
            min_cell_px=1 if content.is_labelled else 24 / max(shape),
            min_width_px=layout.NARROW_WIDTH_PX,
        )

    def _request_maps(self, shape: tuple[int, int], lettering: Lettering) -> layout.PanelRequest:
        """Return the layout request of maps with labels or numbers. If there is a picture, it is the first panel."""
        content = self.content
        paper = lettering.paper
        n_panels = content.n + (content.picture is not None)
        names_px = 0.0
        foot_px = 0.0
        if content.shares_labels:
            # Shared labels stand at the left of each row of maps, and below each column of maps.
            font = paper.min_px or layout.MAX_LABEL_PX
            names_px = min(math.ceil(self._row_label_px(font)) + 8, 0.3 * paper.room_px)
            foot_px = math.ceil(self._column_label_px(font)) + 14
        # Cells of tokens need room for labels. Other cells may shrink until a map is 200 pixels wide.
        min_cell = 200 / max(shape)
        if content.is_labelled:
            min_cell = max(2, min(layout.MIN_LABEL_DISTANCE_PX, _MAX_LABELLED_PX // max(shape)))
        return layout.PanelRequest(
            n=n_panels,
            shape=shape,
            columns=0 if paper.is_narrow and not content.shares_labels else content.columns,
            margins=lambda cell_px: self._margins_around(cell_px, paper),
            names_px=names_px,
            foot_px=foot_px,
            row_px=content.row_px,
            max_panel_px=content.max_panel_px,
            max_cell_px=96 if content.is_labelled else 1000,
            min_cell_px=min_cell,
            max_height_px=_MAX_HEIGHT_PX if n_panels <= 2 and content.is_labelled else math.inf,
            min_width_px=layout.MIN_WIDTH_PX if content.is_labelled else layout.NARROW_WIDTH_PX,
        )

    def _margins_around(self, cell_px: float, paper: layout.Paper) -> layout.Margins:
        """Return the margins of a map whose cells have this width: for title, labels or numbers, and the strip."""
        content = self.content
        if content.shares_labels:
            return layout.Margins(above=layout.PANEL_HEADER_PX, below=4)
        rows, columns = content.axes[0]
        _, font = layout.choose_label_font(content.row_px or cell_px, paper)
        # Leave room for labels, or for an axis of numbers.
        left = 0
        if rows.labels:
            left = math.ceil(self._row_label_px(font)) + 8
        elif rows.ticks:
            left = _TICK_ROOM_PX
        below = 10
        if columns.labels:
            below = math.ceil(self._column_label_px(font)) + 24
        elif columns.ticks:
            below = 34
        return layout.Margins(left=left, above=layout.PANEL_HEADER_PX + self._strip_px, below=below)

    def _axes_of(self, index: int) -> tuple[Axis, Axis]:
        """Return the two sides of a map: (at its left, below it)."""
        axes = self.content.axes
        return axes[index] if len(axes) > 1 else axes[0]

    def _map_box(self, index: int) -> Box:
        """Return the box of a map. A map with fewer tokens than the largest is smaller than its panel."""
        if not self.content.is_labelled:
            return (*self.corners[index], *self.grid.panel_size)
        rows, columns = self._axes_of(index)
        cell_px = self.grid.cell_size[0]
        width = math.ceil(len(columns) / self.pool) * cell_px
        height = math.ceil(len(rows) / self.pool) * cell_px
        return (*self.corners[index], width, height)

    @property
    def _copies_labels(self) -> bool:
        """Return whether the labels of all maps but the first are pixel copies, as all maps have the same labels."""
        content = self.content
        has_own_labels = content.is_labelled and not content.shares_labels
        return self.paper.is_pixel_exact and len(content.axes) == 1 and has_own_labels

    @property
    def tokens_per_label(self) -> int:
        """Return the number of tokens per label."""
        cells_per_label, _ = layout.choose_label_font(self.grid.cell_size[1], self.paper)
        return cells_per_label * self.pool

    @property
    def number_px(self) -> float:
        """Return the font size of the numbers in cells; 0 = no numbers, by declaration or for lack of room."""
        cell_px = self.grid.cell_size[0]
        if not self.content.has_numbers or cell_px < max(26, 2.5 * self.paper.min_px):
            return 0.0
        return self.paper.legible_px(min(14.0, cell_px * 0.36))

    # What stays the same --------------------------------------------------------------------------------------------

    def _name_zoom(self, paper: layout.Paper) -> float:
        """Return the size of an overview's names / the usual size. Viewers shrink tall pages, so names grow."""
        n_rows = len(self.content.row_names)
        return 1.0 if paper.is_fixed_width else min(2.0, max(1.0, n_rows / _N_USUAL_ROWS))

    def _name_maps(self) -> None:
        """Write the names of an overview's rows and columns."""
        size = layout.PANEL_TITLE_PX * max(min(self.zoom, 1.4), self._name_zoom(self.paper))
        above = 14 * self.zoom + self._strip_px
        self.name_panels(self.content.row_names, self.content.column_names, self.grid, size, above)

    def _prepare_picture(self) -> Pixels:
        """Return the picture, scaled to the size of a map in a PNG, (height, width, 3).

        Except in an overview, also draw the picture as the first panel. It takes the first of `self.corners`.
        """
        from PIL import Image

        rows, columns = self.shape
        cell = self.paper.png_px(self.grid.cell_size[0])
        picture = Image.fromarray(self.content.picture.pixels)
        pixels = np.asarray(picture.resize((columns * cell, rows * cell), Image.Resampling.LANCZOS))
        if not self.content.names:
            corner = self.corners.pop(0)
            self._picture_box = (*corner, *self.grid.panel_size)
            self.add_image(self._picture_box).set_data(pixels)
            self.write_title(corner[0], corner[1] - 12 * self.zoom, "the picture")
        return pixels

    def _title_maps(self) -> None:
        """Write the title and the caption above each map, and its labels."""
        width, _ = self.grid.panel_size
        size = layout.PANEL_TITLE_PX * self.zoom
        for index, ((x, y), title) in enumerate(zip(self.corners, self.content.titles, strict=True)):
            middle = y - 12 * self.zoom - self._strip_px
            # If a title is too wide, cut it at its colon. The title of the page repeats the rest.
            if self.lettering.width_px(title, size * BOLD_WIDTH) > width:
                title = title.partition(":")[0]
            self.write_title(
                x, middle, self.lettering.fit(title, size * BOLD_WIDTH, max(width, 60)), size
            )
            # Write the caption at the right of the title. The 1.2 allows for bold letters and a gap.
            if self.content.captions:
                room = width - self.lettering.width_px(title, size * 1.2) - 10
                self._write_caption(x + width, middle, self.content.captions[index], room)
        # Drawing labels takes most of the time. If possible, write only the first map's labels, and copy their pixels.
        self._write_labels(0)
        if self._copies_labels:
            self._copy_labels()
        else:
            self.write_all_labels()

    def _copy_labels(self) -> None:
        """Copy the pixels of the first map's labels to all other maps."""
        width, height = self.grid.panel_size
        # The boxes of the labels at the left of a map and below it. Their corners are relative to the map's corner.
        _, font = layout.choose_label_font(self.grid.cell_size[0], self.paper)
        left_px = math.ceil(self._row_label_px(font)) + 2 * _LABEL_OVERHANG_PX
        below_px = math.ceil(self._column_label_px(font)) + 2 * _LABEL_OVERHANG_PX
        left = (-left_px, -_LABEL_OVERHANG_PX, left_px - 2, height + 2 * _LABEL_OVERHANG_PX)
        below = (-_LABEL_OVERHANG_PX, height + 2, width + 2 * _LABEL_OVERHANG_PX, below_px)
        for dx, dy, box_width, box_height in (left, below):
            first, *others = [(x + dx, y + dy) for x, y in self.corners]
            self.copy_box((*first, box_width, box_height), others)

    def _write_caption(self, right: float, y: float, caption: str, room: float) -> None:
        """Write a caption right-aligned at x = `right`. Drop facts from its end until the rest fits into `room`."""
        while caption and self.lettering.width_px(caption, layout.CAPTION_PX) > room:
            caption = caption.rpartition(" · ")[0]
        if caption:
            self.write(right, y, caption, layout.CAPTION_PX, ha="right", color=FAINT)

    def _write_labels(self, index: int) -> list[Text]:
        """Write the labels or numbers at the left of a map and below it; return their text artists."""
        x, y, width, height = self.boxes[index]
        rows, columns = self._axes_of(index)
        cell_width, cell_height = self.grid.cell_size
        # Cut labels to the left margin of the map, minus its gap of 8 px. Half a pixel allows for rounding.
        _, font = layout.choose_label_font(cell_height, self.paper)
        room = max(self.grid.margins.left - 8, 1.0) + 0.5
        # Write shared labels only at the first map of a row and the last map of a column. An Axis() has no labels.
        if self.content.shares_labels:
            room = x - layout.MARGIN_PX - 5
            if index % self.grid.columns != 0:
                rows = Axis()
            if index + self.grid.columns < self.content.n:
                columns = Axis()
        # Write the labels of rows, then of columns. Their distance, in tokens, is at least a line of text and a cell.
        min_distance = max(1.0, font / layout.LABEL_FONT_SHARE / cell_height) * self.pool
        texts = []
        for token, position in rows.label_positions(self.tokens_per_label, min_distance).items():
            label = self.lettering.fit(rows.labels[token], font, room)
            mid_y = y + (position / self.pool + 0.5) * cell_height
            color = rows.color(token)
            text = self.write(
                x - 5, mid_y, label, font, color=color, keeps_size=True, ha="right", va="center_baseline"
            )
            texts.append(text)
        below = y + height + 5
        for token, position in columns.label_positions(self.tokens_per_label, min_distance).items():
            label = self.lettering.fit(columns.labels[token], font, MAX_LABEL_EM * font + 0.5)
            mid_x = x + (position / self.pool + 0.5) * cell_width
            color = columns.color(token)
            text = self.write(
                mid_x,
                below,
                label,
                font,
                color=color,
                keeps_size=True,
                ha="center",
                va="top",
                rotation=90,
            )
            texts.append(text)
        texts += self.draw_ticks(self.boxes[index], rows.ticks, columns.ticks)
        return texts

    def write_all_labels(self) -> None:
        """Write the labels of all maps but the first, or, if they are already written, make them visible again."""
        if self._other_labels is None:
            self._other_labels = []
            # The maps of an overview have no labels, so the range is empty.
            for index in range(1, 0 if self.content.names else self.content.n):
                self._other_labels += self._write_labels(index)
        for text in self._other_labels:
            text.set_visible(True)

    def _draw_strip(self) -> None:
        """Draw the strip of bars above each map of the first row, if the figure has bars."""
        if not self.content.bars:
            return
        bars: list[Box] = []
        for x, y, width, _ in self.boxes:
            if y > self.boxes[0][1]:
                break
            # Draw at most one bar per pixel. If several share a pixel, draw the highest.
            heights = pool_to_pixels(np.array([self.content.bars]), (width, 1))[0]
            bar_width = width / len(heights)
            for index, height in enumerate(heights):
                bar_height = height * (self._strip_px - 4)
                bars.append((x + index * bar_width, y - 4 - bar_height, bar_width, bar_height))
        self.fill_boxes(bars, [_BAR_COLOUR])

    def _draw_marks(self) -> None:
        """Draw lines where another text begins, names above maps, and frames on them."""
        token_width, token_height = self._token_size()
        # Draw lines across each map where another text begins.
        lines: list[list[tuple[float, float]]] = []
        for index, (x, y, width, height) in enumerate(self.boxes):
            rows, columns = self._axes_of(index)
            for token in rows.boundary_cells:
                line_y = y + token * token_height
                lines.append([(x, line_y), (x + width, line_y)])
            for token in columns.boundary_cells:
                line_x = x + token * token_width
                lines.append([(line_x, y), (line_x, y + height)])
            self.name_spans((x, y), self.content.spans, token_width)
        if lines:
            self.draw_lines(lines, color=_BOUNDARY_COLOUR, animated=True)
        # Draw the frames on all maps, and on the picture.
        framed = [*self.boxes]
        if self._picture_box is not None:
            framed.append(self._picture_box)
        frames: list[Box] = []
        for x, y, _, _ in framed:
            for left, top, right, bottom in self.content.framed_boxes:
                size = ((right - left) * token_width, (bottom - top) * token_height)
                frames.append((x + left * token_width, y + top * token_height, *size))
        if frames:
            # Rows of a fixed height, such as bands of sound, are low: their frames are thin.
            width_px = 1.0 if self.content.row_px else 2.0
            self.draw_outlines(frames, MARK_COLOR, width_px * self.zoom, animated=True)

    def _token_size(self) -> tuple[float, float]:
        """Return the width and height in pixels of a token (or patch, or moment) on the maps."""
        if self.content.is_labelled:
            return self.grid.cell_size[0] / self.pool, self.grid.cell_size[1] / self.pool
        rows, columns = self.content.axes[0]
        return self.grid.panel_size[0] / len(columns), self.grid.panel_size[1] / len(rows)

    def _draw_foot(self) -> None:
        """Draw the colour bar, write the notes, and end the page."""
        content = self.content
        # Add notes on labels that are left out, pooled cells and numbers that are left out.
        notes = [*content.notes, *self.lettering.notes]
        if content.is_labelled and self.tokens_per_label > 1 and not content.names:
            notes.append(f"one label for {self.tokens_per_label} tokens")
        if self.pool > 1:
            notes.append(f"a cell shows the largest weight of {self.pool} × {self.pool} tokens")
        n_rows, n_columns = self.shape
        width, height = self.grid.panel_size
        cells_per_pixel = max(math.ceil(n_columns / width), math.ceil(n_rows / height))
        if cells_per_pixel > 1:
            notes.append(
                f"a pixel shows the largest of up to {cells_per_pixel} × {cells_per_pixel} cells"
            )
        if self.number_px:
            notes.append(f"cells without a number: less than {_MIN_WRITTEN_WEIGHT}")
        # Over a picture, the colour bar has two rows of colours. It is drawn here, so pass no colormap.
        cmap = None if self._picture is not None else self._cmap
        self.bar = self.end_with_bar(self.grid.bottom_y, cmap, content.meaning, notes, self.zoom)
        if self._picture is not None:
            # The first row has the colours over white pixels, the second over black ones, (2, 256, 3).
            ramp = self._cmap(np.linspace(0, 1, 256))[None, :, :3].repeat(2, 0)
            brightness = np.array([[1.0], [0.0]]).repeat(256, 1)
            self.add_image(self.bar).set_data(darken(ramp, brightness))
            self.draw_frames([self.bar])
        # Put empty texts below the bar. `set_values` moves them and writes the numbers.
        x, y, _, bar_height = self.bar
        below = y + bar_height + 12 * self.zoom
        size = layout.CAPTION_PX * self.zoom
        self._ticks = [
            self.write(x, below, "", size, ha="center", animated=True) for _ in range(_MAX_TICKS)
        ]

    def _write_empty_numbers(self) -> list[Text]:
        """Put an empty text into each cell of the first map, row by row. `set_values` fills them."""
        x, y = self.corners[0]
        cell_px = self.grid.cell_size[0]
        texts = []
        for row, column in np.ndindex(*self.shape):
            middle = (x + (column + 0.5) * cell_px, y + (row + 0.5) * cell_px)
            texts.append(self.write(*middle, "", self.number_px, ha="center", animated=True))
        return texts

    # What changes ---------------------------------------------------------------------------------------------------

    def set_values(
        self,
        title: str,
        values: Sequence[Values],
        limits: Sequence[tuple[float, float]],
        bar_ends: tuple[float, float],
        ticks: dict[float, str],
        numbers: Values | None = None,
    ) -> None:
        """Put values on the page.

        Args:
            title: The title of the page.
            values: The values of each map, (row, column). They are max-pooled here, so the caller must pool signed
                values. NaN is transparent.
            limits: The values of the first and the last colour of each map.
            bar_ends: The values at the left and the right end of the colour bar.
            ticks: The text of each number below the colour bar.
            numbers: The numbers to write in the cells of the first map, (row, column), such as weights if `values` are
                their logarithms. None = the values.
        """
        room = self.width_px - 2 * layout.MARGIN_PX
        self._title.set_text(self.lettering.fit(title, self.title_px(self.zoom) * 1.1, room))
        # Set the colours of cells.
        cells_of_maps = [self._pool(cells, index) for index, cells in enumerate(values)]
        is_smooth = self.content.is_smooth
        for image, cells, ends in zip(self.maps, cells_of_maps, limits, strict=True):
            if self._picture is None:
                self.set_cells(image, cells, ends)
            else:
                image.set_data(overlay(self._picture, cells, self._cmap, ends[1], is_smooth=is_smooth))
        # Set the numbers below the colour bar. Spare texts stay empty.
        x, _, width, _ = self.bar
        low, high = bar_ends
        for text in self._ticks:
            text.set_text("")
        for text, (tick, number_text) in zip(self._ticks, ticks.items(), strict=False):
            text.set_text(number_text)
            middle = x + width * (tick - low) / ((high - low) or 1.0)
            # Keep the first number on the page.
            half = self.lettering.width_px(number_text, layout.CAPTION_PX * self.zoom) / 2
            text.set_x(max(half + self.paper.crop_px, middle))
        # Write the weights in the cells of the first map, in white on dark colours. If cells have no numbers, there are
        # no texts, and the loop does nothing.
        cells = cells_of_maps[0]
        weights = cells if numbers is None else self._pool(numbers, 0)
        low, high = limits[0]
        for text, weight, value in zip(self._number_texts, weights.ravel(), cells.ravel(), strict=False):
            # The position of the value in the colormap, 0 to 1.
            position = min(1.0, max(0.0, (float(value) - low) / ((high - low) or 1.0)))
            text.set_text(f"{weight:.2f}" if weight >= _MIN_WRITTEN_WEIGHT else "")
            text.set_color("white" if self._is_dark[round(position * 255)] else INK)

    def _pool(self, values: Values, index: int) -> Values:
        """Max-pool the values of a map to its cells, (row, column)."""
        if not self.content.is_labelled:
            return pool_to_pixels(values, self.grid.panel_size)
        # Other shapes than one value per pair of tokens mean that the caller has pooled the values.
        rows, columns = self._axes_of(index)
        if values.shape != (len(rows), len(columns)):
            return values
        return max_pool(values, self.pool)

    def render_vector(self, kind: str) -> bytes:
        """Return the figure in its present state as "svg" or "pdf". Every label is text there, not a pixel copy."""
        self.write_all_labels()
        content = super().render_vector(kind)
        # Hide the texts again if a PNG has pixel copies of labels at these positions.
        if self._copies_labels:
            for text in self._other_labels or ():
                text.set_visible(False)
        return content


def _label_width_function(lettering: Lettering, axes: Sequence[Axis]) -> Callable[[float], float]:
    """Return a function from a font size to the width of the widest label, at most MAX_LABEL_EM times the size."""
    # Widths are proportional to the font size, so measure once, at 100 pixels.
    labels = set(chain.from_iterable(axis.labels for axis in axes))
    at_100 = max((lettering.width_px(label, 100.0) for label in labels), default=0.0)
    return lambda size: min(at_100 / 100, MAX_LABEL_EM) * size
