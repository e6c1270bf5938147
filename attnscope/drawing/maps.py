"""Draw a page of maps side by side: coloured cells, labels or numbers around them, a colour bar, notes.

Cells are pairs of tokens with labels, patches laid over a picture, or moments and stretches of text with an axis of
numbers. `MapsFigure` declares what a page shows, and `layout` places it. The static part is drawn once: `MapsPage.show`
puts other values on the same page. It knows nothing of models.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import chain, product
from typing import TYPE_CHECKING

import numpy as np

from attnscope.drawing import layout
from attnscope.drawing.canvas import FAINT, INK, MARK, Box, colormap
from attnscope.drawing.cells import Pixels, Values, max_pool, overlay, pool_to_pixels, tint
from attnscope.drawing.inks import is_dark
from attnscope.drawing.lettering import Lettering, lettering_for
from attnscope.drawing.map_figure import Axis, MapsFigure
from attnscope.drawing.page import BOLD, SPANS_PX, FigurePage

if TYPE_CHECKING:
    from matplotlib.text import Text

LABEL_ROOM_EM = 11
"""The width at which labels are cut, in sizes of their font."""

_BOUNDARY_COLOUR = "#d1495b"  # of lines at which another text begins
_MANY_ROWS = 15  # an overview of more rows has larger names: viewers shrink it to fit the screen
_OVERHANG_PX = 8  # how far labels may extend beyond their room, into the gap between maps
_LARGEST_LABELLED_PX = 1000  # a map of many tokens grows up to this, then its labels are thinned
_LARGEST_SMALL_PX = 300  # the largest map of an overview
_TALLEST_FEW_PX = 1116  # the largest height of one or two maps on a screen
_NAMES_PX = 52  # least room for the names of an overview's rows
_TICKS_PX = 62  # room for an axis of numbers
_STRIP_PX = 30  # room for the strip of bars along the upper side
_MIN_NUMBER = 0.005  # a smaller value is not written into its cell
_N_TICKS = 11  # the most numbers below the colour bar
_STRIP_COLOUR = "#7b8794"


class MapsPage(FigurePage):
    """Draw a page of maps without their values, which `show` puts on it."""

    def __init__(self, content: MapsFigure, paper: layout.Paper) -> None:
        row_axes, column_axes = zip(*content.axes, strict=True)
        labels = chain.from_iterable(axis.labels for axis in (*row_axes, *column_axes))
        names = [text for _, _, text in content.spans]
        lettering = lettering_for([content.subtitle, *content.lettered, *names, *labels], paper)
        self.content = content
        # Functions of the font size: the width of the widest label at the left of maps, and below them.
        self._row_label_width = _label_width(lettering, row_axes)
        self._column_label_width = _label_width(lettering, column_axes)
        # The height of the bars, or of the names of spans, above maps.
        self._strip_px = 0
        if content.bars:
            self._strip_px = _STRIP_PX
        elif content.spans:
            self._strip_px = SPANS_PX
        # A cell stands for `pool` x `pool` tokens; `shape` is how many rows and columns of cells there are.
        self.pool, self.shape, places = self._arrange(lettering)
        super().__init__(places.width_px, lettering)
        self.places = places
        self.zoom = places.zoom
        # The upper left corner of each map. An overview has a corner for each pair of names, and may have fewer maps.
        self.corners = list(places.corners)
        if content.names:
            pairs = product(content.row_names, content.column_names)
            corner_of = dict(zip(pairs, places.corners, strict=True))
            self.corners = [corner_of[names_of_map] for names_of_map in content.names]
        # Draw what stays the same on all figures of this page.
        self._title = self.write_header("", content.subtitle, zoom=self.zoom, animated=True)
        self._picture_box: Box | None = None
        self._picture = None if content.picture is None else self._prepare_picture()
        self.boxes = [self._box(index) for index in range(content.n)]
        self._cmap = colormap(content.cmap)
        self.maps = [self.image(box, self._cmap) for box in self.boxes]
        self.frames(self.boxes)
        # The labels of all maps but the first, once they are written.
        self._other_labels: list[Text] | None = None
        if content.names:
            self._name_maps()
        else:
            self._title_maps()
        self._draw_strip()
        self._draw_marks()
        self._draw_foot()
        # Texts for the numbers in cells, which change; and which of 256 colours are dark, and need white numbers.
        self._number_texts = self._write_empty_numbers() if self.number_px else []
        self._is_dark = [is_dark(*color[:3]) for color in self._cmap(np.linspace(0, 1, 256))]

    # Layout ---------------------------------------------------------------------------------------------------------

    def _arrange(self, lettering: Lettering) -> tuple[int, tuple[int, int], layout.PanelLayout]:
        """Choose how many tokens share a cell: more than one if the page with labels would be too large to draw.

        Returns:
            How many tokens share a cell in each direction; how many rows and columns of cells there are; the places of
            maps.
        """
        content = self.content
        # Maps share one layout: that of the map with most rows, and of the one with most columns.
        n_rows = max(len(rows) for rows, _ in content.axes)
        n_columns = max(len(columns) for _, columns in content.axes)
        # In an overview, start with at most two cells per pixel of a usual page, but no fewer than 96.
        pool = 1
        if content.names and content.is_labelled:
            max_cells = max(96, 2 * layout.PAGE_WIDTH_PX // len(content.column_names))
            pool = max(1, math.ceil(max(n_rows, n_columns) / max_cells))
        # Pool more until the page is small enough, with about 200 pixels below the maps for the colour bar and notes.
        request_panels = self._request_small if content.names else self._request_large
        while True:
            shape = (math.ceil(n_rows / pool), math.ceil(n_columns / pool))
            places = layout.arrange(request_panels(shape, lettering), lettering.paper)
            fits = places.width_px * (places.bottom + 200) <= layout.MAX_PAGE_PIXELS
            if fits or max(shape) == 1 or not content.is_labelled:
                return pool, shape, places
            pool += 1

    def _request_small(self, shape: tuple[int, int], lettering: Lettering) -> layout.PanelRequest:
        """Return the request for the layout of an overview; each map has `shape` rows and columns of cells.

        An overview has no labels, but names for its rows and columns of maps.
        """
        content = self.content
        paper = lettering.paper
        # Names are bold, and so a tenth wider.
        size = layout.PANEL_TITLE_PX * self._name_zoom(paper) * 1.1
        widest_name = max(lettering.width_px(name, size) for name in content.row_names)
        # The names of rows stand at the left, those of columns above. Cells without labels may be as small as in a map
        # of 24 pixels, where several share a pixel.
        gap_px = 4 if paper.is_narrow else 8
        return layout.PanelRequest(
            n=len(content.row_names) * len(content.column_names),
            shape=shape,
            columns=len(content.column_names),
            margins=lambda cell_px: layout.Margins(below=gap_px),
            names_px=max(_NAMES_PX, math.ceil(widest_name) + 20),
            gap_px=gap_px,
            top_px=layout.HEADER_PX + 30 + self._strip_px,
            row_px=content.row_px,
            largest_px=_LARGEST_SMALL_PX,
            largest_cell_px=_LARGEST_SMALL_PX,
            min_cell_px=1 if content.is_labelled else 24 / max(shape),
            min_width_px=layout.NARROW_WIDTH_PX,
        )

    def _request_large(self, shape: tuple[int, int], lettering: Lettering) -> layout.PanelRequest:
        """Return the request for the layout of maps with labels or numbers; a picture is the first panel."""
        content = self.content
        paper = lettering.paper
        n_panels = content.n + (content.picture is not None)
        names_px = 0.0
        foot_px = 0.0
        if content.shares_labels:
            # Labels that maps share stand at the left of the first map of a row, and below the last of a column.
            font = paper.min_px or layout.MAX_LABEL_PX
            names_px = min(math.ceil(self._row_label_width(font)) + 8, 0.3 * paper.room_px)
            foot_px = math.ceil(self._column_label_width(font)) + 14
        # Cells of tokens have room for labels; other cells may shrink until a map has 200 pixels.
        min_cell = 200 / max(shape)
        if content.is_labelled:
            min_cell = max(2, min(layout.LEGIBLE_PX, _LARGEST_LABELLED_PX // max(shape)))
        return layout.PanelRequest(
            n=n_panels,
            shape=shape,
            columns=0 if paper.is_narrow and not content.shares_labels else content.columns,
            margins=lambda cell_px: self._room_around(cell_px, paper),
            names_px=names_px,
            foot_px=foot_px,
            row_px=content.row_px,
            largest_px=content.largest_px,
            largest_cell_px=96 if content.is_labelled else 1000,
            min_cell_px=min_cell,
            max_height_px=_TALLEST_FEW_PX if n_panels <= 2 and content.is_labelled else math.inf,
            min_width_px=layout.SMALLEST_WIDTH_PX if content.is_labelled else layout.NARROW_WIDTH_PX,
        )

    def _room_around(self, cell_px: float, paper: layout.Paper) -> layout.Margins:
        """Return the room around a map with cells of this width: for its title, labels or numbers, and the strip."""
        content = self.content
        if content.shares_labels:
            return layout.Margins(above=layout.PANEL_HEADER_PX, below=4)
        rows, columns = content.axes[0]
        _, font = layout.label_font(content.row_px or cell_px, paper)
        # Leave room for labels, else for numbers, if there are any.
        left = 0
        if rows.labels:
            left = math.ceil(self._row_label_width(font)) + 8
        elif rows.ticks:
            left = _TICKS_PX
        below = 10
        if columns.labels:
            below = math.ceil(self._column_label_width(font)) + 24
        elif columns.ticks:
            below = 34
        return layout.Margins(left=left, above=layout.PANEL_HEADER_PX + self._strip_px, below=below)

    def _axes_of(self, index: int) -> tuple[Axis, Axis]:
        """Return the sides of a map: at its left, and below it."""
        axes = self.content.axes
        return axes[index] if len(axes) > 1 else axes[0]

    def _box(self, index: int) -> Box:
        """Return the box of a map; a map with fewer tokens than others is smaller."""
        if not self.content.is_labelled:
            return (*self.corners[index], *self.places.panel)
        rows, columns = self._axes_of(index)
        cell_px = self.places.cell[0]
        width = math.ceil(len(columns) / self.pool) * cell_px
        height = math.ceil(len(rows) / self.pool) * cell_px
        return (*self.corners[index], width, height)

    @property
    def _copies_labels(self) -> bool:
        """Return whether a PNG has copies of the first map's labels at all other maps, as all have the same labels."""
        content = self.content
        has_own_labels = content.is_labelled and not content.shares_labels
        return self.paper.is_pixel_exact and len(content.axes) == 1 and has_own_labels

    @property
    def tokens_per_label(self) -> int:
        """Return how many tokens share a label."""
        cells_per_label, _ = layout.label_font(self.places.cell[1], self.paper)
        return cells_per_label * self.pool

    @property
    def number_px(self) -> float:
        """Return the font size of the numbers in cells; 0 = they have no room, or are not wanted."""
        cell_px = self.places.cell[0]
        if not self.content.has_numbers or cell_px < max(26, 2.5 * self.paper.min_px):
            return 0.0
        return self.paper.letters(min(14.0, cell_px * 0.36))

    # What stays the same --------------------------------------------------------------------------------------------

    def _name_zoom(self, paper: layout.Paper) -> float:
        """Return how much larger than usual the names of an overview are: on a screen, a tall one is shrunk to fit."""
        n_rows = len(self.content.row_names)
        return 1.0 if paper.fixed else min(2.0, max(1.0, n_rows / _MANY_ROWS))

    def _name_maps(self) -> None:
        """Write the names of an overview's rows and columns."""
        size = layout.PANEL_TITLE_PX * max(min(self.zoom, 1.4), self._name_zoom(self.paper))
        above = 14 * self.zoom + self._strip_px
        self.name_panels(self.content.row_names, self.content.column_names, self.places, size, above)

    def _prepare_picture(self) -> Pixels:
        """Return the picture in the size of a map, (height, width, 3); unless in an overview, draw it as first panel.

        That panel takes the first of the corners; the others are for maps.
        """
        from PIL import Image

        rows, columns = self.shape
        cell = self.paper.image_px(self.places.cell[0])
        picture = Image.fromarray(self.content.picture.pixels)
        pixels = np.asarray(picture.resize((columns * cell, rows * cell), Image.Resampling.LANCZOS))
        if not self.content.names:
            corner = self.corners.pop(0)
            self._picture_box = (*corner, *self.places.panel)
            self.image(self._picture_box).set_data(pixels)
            self.entitle(corner[0], corner[1] - 12 * self.zoom, "the picture")
        return pixels

    def _title_maps(self) -> None:
        """Write the title and the caption above each map, and its labels."""
        width, _ = self.places.panel
        size = layout.PANEL_TITLE_PX * self.zoom
        for index, ((x, y), title) in enumerate(zip(self.corners, self.content.titles, strict=True)):
            middle = y - 12 * self.zoom - self._strip_px
            # Without room, cut a title at its colon: the title of the page says what follows.
            if self.lettering.width_px(title, size * BOLD) > width:
                title = title.partition(":")[0]
            self.entitle(x, middle, self.lettering.fit(title, size * BOLD, max(width, 60)), size)
            # A caption stands at the right of the title, if there is room.
            if self.content.captions:
                room = width - self.lettering.width_px(title, size * 1.2) - 10
                self._write_caption(x + width, middle, self.content.captions[index], room)
        # Labels take most of the time: if possible, write those of the first map alone, and copy their pixels.
        self._label(0)
        if self._copies_labels:
            self._copy_labels()
        else:
            self.label_all()

    def _copy_labels(self) -> None:
        """Copy the pixels of the first map's labels to all other maps."""
        width, height = self.places.panel
        # The boxes of labels at the left of a map and below it: left and upper edge from the map's corner, and size.
        _, font = layout.label_font(self.places.cell[0], self.paper)
        left_px = math.ceil(self._row_label_width(font)) + 2 * _OVERHANG_PX
        below_px = math.ceil(self._column_label_width(font)) + 2 * _OVERHANG_PX
        left = (-left_px, -_OVERHANG_PX, left_px - 2, height + 2 * _OVERHANG_PX)
        below = (-_OVERHANG_PX, height + 2, width + 2 * _OVERHANG_PX, below_px)
        for dx, dy, box_width, box_height in (left, below):
            first, *others = [(x + dx, y + dy) for x, y in self.corners]
            self.repeat_box((*first, box_width, box_height), others)

    def _write_caption(self, right: float, y: float, caption: str, room: float) -> None:
        """Write as many of the facts of a caption as have room, so that they end at x = `right`."""
        while caption and self.lettering.width_px(caption, layout.CAPTION_PX) > room:
            caption = caption.rpartition(" · ")[0]
        if caption:
            self.write(right, y, caption, layout.CAPTION_PX, ha="right", color=FAINT)

    def _label(self, index: int) -> list[Text]:
        """Write the labels or numbers at the left of a map and below it; return their texts."""
        x, y, width, height = self.boxes[index]
        rows, columns = self._axes_of(index)
        cell_width, cell_height = self.places.cell
        # Cut labels to the room at the left of a map, without its gap of 8; half a pixel is for rounding.
        _, font = layout.label_font(cell_height, self.paper)
        room = max(self.places.margins.left - 8, 1.0) + 0.5
        # Shared labels stand at the left of the first map of a row, and below the last map of a column.
        if self.content.shares_labels:
            room = x - layout.MARGIN_PX - 5
            if index % self.places.columns != 0:
                rows = Axis()
            if index + self.places.columns < self.content.n:
                columns = Axis()
        # Write labels of rows, then labels of columns. They are a line of text apart, in tokens, and at least a cell.
        apart = max(1.0, font / layout.LABEL_SHARE / cell_height) * self.pool
        texts = []
        for token, place in rows.label_positions(self.tokens_per_label, apart).items():
            label = self.lettering.fit(rows.labels[token], font, room)
            middle = y + (place / self.pool + 0.5) * cell_height
            color = rows.color(token)
            point = (x - 5, middle)
            text = self.write(
                *point, label, font, color=color, keeps_size=True, ha="right", va="center_baseline"
            )
            texts.append(text)
        below = y + height + 5
        for token, place in columns.label_positions(self.tokens_per_label, apart).items():
            label = self.lettering.fit(columns.labels[token], font, LABEL_ROOM_EM * font + 0.5)
            middle = x + (place / self.pool + 0.5) * cell_width
            color = columns.color(token)
            point = (middle, below)
            text = self.write(
                *point, label, font, color=color, keeps_size=True, ha="center", va="top", rotation=90
            )
            texts.append(text)
        texts += self.draw_ticks(self.boxes[index], rows.ticks, columns.ticks)
        return texts

    def label_all(self) -> None:
        """Write the labels of all maps but the first, or show them again."""
        if self._other_labels is None:
            self._other_labels = []
            # The maps of an overview have no labels.
            for index in range(1, 0 if self.content.names else self.content.n):
                self._other_labels += self._label(index)
        for text in self._other_labels:
            text.set_visible(True)

    def _draw_strip(self) -> None:
        """Draw the strip of bars along the upper side of the uppermost maps, if the figure has one."""
        if not self.content.bars:
            return
        bars: list[Box] = []
        for x, y, width, _ in self.boxes:
            if y > self.boxes[0][1]:
                break
            # At most one bar per pixel: the highest of several.
            heights = pool_to_pixels(np.array([self.content.bars]), (width, 1))[0]
            bar_width = width / len(heights)
            for index, height in enumerate(heights):
                bar_height = height * (self._strip_px - 4)
                bars.append((x + index * bar_width, y - 4 - bar_height, bar_width, bar_height))
        self.fill(bars, [_STRIP_COLOUR])

    def _draw_marks(self) -> None:
        """Draw lines where another text begins, names above maps, and frames on them."""
        token_width, token_height = self._token_size()
        # Lines where another text begins, from side to side of each map.
        lines: list[list[tuple[float, float]]] = []
        for index, (x, y, width, height) in enumerate(self.boxes):
            rows, columns = self._axes_of(index)
            for token in rows.boundaries:
                line_y = y + token * token_height
                lines.append([(x, line_y), (x + width, line_y)])
            for token in columns.boundaries:
                line_x = x + token * token_width
                lines.append([(line_x, y), (line_x, y + height)])
            self.name_spans((x, y), self.content.spans, token_width)
        if lines:
            self.lines(lines, color=_BOUNDARY_COLOUR, animated=True)
        # Frames stand on all maps, and on the picture too.
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
            self.outline(frames, MARK, width_px * self.zoom, animated=True)

    def _token_size(self) -> tuple[float, float]:
        """Return the width and height of a token, or of a patch or a moment, on the maps in pixels."""
        if self.content.is_labelled:
            return self.places.cell[0] / self.pool, self.places.cell[1] / self.pool
        rows, columns = self.content.axes[0]
        return self.places.panel[0] / len(columns), self.places.panel[1] / len(rows)

    def _draw_foot(self) -> None:
        """Draw the colour bar, write the notes, and end the page."""
        content = self.content
        # Note what is thinned, pooled or left out.
        notes = [*content.notes, *self.lettering.notes]
        if content.is_labelled and self.tokens_per_label > 1 and not content.names:
            notes.append(f"one label for {self.tokens_per_label} tokens")
        if self.pool > 1:
            notes.append(f"a cell shows the largest weight of {self.pool} × {self.pool} tokens")
        n_rows, n_columns = self.shape
        width, height = self.places.panel
        cells_per_pixel = max(math.ceil(n_columns / width), math.ceil(n_rows / height))
        if cells_per_pixel > 1:
            notes.append(
                f"a pixel shows the largest of up to {cells_per_pixel} × {cells_per_pixel} cells"
            )
        if self.number_px:
            notes.append(f"cells without a number: less than {_MIN_NUMBER}")
        # Over a picture, the colour bar has two rows of colours, and is drawn here.
        cmap = None if self._picture is not None else self._cmap
        self.bar = self.end_with_bar(self.places.bottom, cmap, content.meaning, notes, self.zoom)
        if self._picture is not None:
            # The colours over a white part of the picture, and below over a black part, (2, 256, 3).
            ramp = self._cmap(np.linspace(0, 1, 256))[None, :, :3].repeat(2, 0)
            brightness = np.array([[1.0], [0.0]]).repeat(256, 1)
            self.image(self.bar).set_data(tint(ramp, brightness))
            self.frames([self.bar])
        # Below the bar are texts for numbers, which `show` moves and fills.
        x, y, _, bar_height = self.bar
        below = y + bar_height + 12 * self.zoom
        size = layout.CAPTION_PX * self.zoom
        self._ticks = [
            self.write(x, below, "", size, ha="center", animated=True) for _ in range(_N_TICKS)
        ]

    def _write_empty_numbers(self) -> list[Text]:
        """Put an empty text into each cell of the first map, row by row, for `show` to fill."""
        x, y = self.corners[0]
        cell_px = self.places.cell[0]
        texts = []
        for row, column in np.ndindex(*self.shape):
            middle = (x + (column + 0.5) * cell_px, y + (row + 0.5) * cell_px)
            texts.append(self.write(*middle, "", self.number_px, ha="center", animated=True))
        return texts

    # What changes ---------------------------------------------------------------------------------------------------

    def show(
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
            values: Cells of each map, (row, column), which are pooled here by their largest value; signed ones must be
                pooled already. NaN has no colour.
            limits: The values of the first and last colour of each map.
            bar_ends: The values at the left and right end of the colour bar.
            ticks: The numbers below the colour bar, and how they are written.
            numbers: Weights to be written in the cells of the first map, (row, column); None = its values, which on a
                logarithmic scale are not the weights.
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
        # Set the numbers below the colour bar. There may be more texts than numbers.
        x, _, width, _ = self.bar
        low, high = bar_ends
        for text in self._ticks:
            text.set_text("")
        for text, (tick, number_text) in zip(self._ticks, ticks.items(), strict=False):
            text.set_text(number_text)
            middle = x + width * (tick - low) / ((high - low) or 1.0)
            # Move the first number so that it stays on the page.
            half = self.lettering.width_px(number_text, layout.CAPTION_PX * self.zoom) / 2
            text.set_x(max(half + self.paper.crop_px, middle))
        # Write the weights in the cells of the first map, white where the value makes a dark colour. Without room for
        # them there are no texts.
        cells = cells_of_maps[0]
        weights = cells if numbers is None else self._pool(numbers, 0)
        low, high = limits[0]
        for text, weight, value in zip(self._number_texts, weights.ravel(), cells.ravel(), strict=False):
            # The position of the value among the colours, 0 to 1.
            position = min(1.0, max(0.0, (float(value) - low) / ((high - low) or 1.0)))
            text.set_text(f"{weight:.2f}" if weight >= _MIN_NUMBER else "")
            text.set_color("white" if self._is_dark[round(position * 255)] else INK)

    def _pool(self, values: Values, index: int) -> Values:
        """Return the cells of a map, as many as have room; each is the largest of the values that share it."""
        if not self.content.is_labelled:
            return pool_to_pixels(values, self.places.panel)
        # Values with fewer rows or columns than the map has tokens are pooled already.
        rows, columns = self._axes_of(index)
        if values.shape != (len(rows), len(columns)):
            return values
        return max_pool(values, self.pool)

    def vector(self, kind: str) -> bytes:
        """Return the figure as it stands now as SVG or PDF, where every label is text."""
        self.label_all()
        content = super().vector(kind)
        # Hide the texts again if a PNG has copies of the first map's labels there.
        if self._copies_labels:
            for text in self._other_labels or ():
                text.set_visible(False)
        return content


def _label_width(lettering: Lettering, axes: Sequence[Axis]) -> Callable[[float], float]:
    """Return a function from a font size to the width of the widest label; labels are cut at LABEL_ROOM_EM."""
    labels = set(chain.from_iterable(axis.labels for axis in axes))
    at_100 = max((lettering.width_px(label, 100.0) for label in labels), default=0.0)
    return lambda size: min(at_100 / 100, LABEL_ROOM_EM) * size
