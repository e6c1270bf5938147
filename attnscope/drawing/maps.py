"""A page of maps side by side: coloured cells, what stands around them, a colour bar, notes.

Cells are pairs of tokens with labels, patches laid over a picture, or moments and stretches of text with an axis of
numbers. The static part is drawn once: `MapsPage.show` puts other values on the same page. It knows nothing of models.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from attnscope.drawing import layout
from attnscope.drawing.canvas import FAINT, INK, MARK, Box, colormap
from attnscope.drawing.cells import Pixels, Values, fit, max_pool, overlay, tint
from attnscope.drawing.inks import is_dark
from attnscope.drawing.lettering import Lettering, lettering_for
from attnscope.drawing.map_figure import Axis, MapsFigure
from attnscope.drawing.page import BOLD, Page

if TYPE_CHECKING:
    from matplotlib.text import Text

SEAM = "#d1495b"
"""Colour of lines at which another text begins."""

LABEL_ROOM_EM = 11
"""Width at which labels are cut, in sizes of their font."""

_MANY_ROWS = 15  # an overview of more rows is too tall for a screen, and is seen shrunk
_REACH_PX = 8  # labels may reach so far beyond their room: the gap between maps has no more
_LARGEST_LABELLED_PX = 1000  # a map of many tokens grows up to this, then its labels are thinned
_LARGEST_SMALL_PX = 300
_TALLEST_FEW_PX = 1116  # of one or two maps on a screen
_NAMES_PX = 52
_TICKS_PX = 62  # room for an axis of numbers
_LANES, _LANE_PX = 2, 20  # rows of names above a map
_STRIP_PX = 30  # numbers along the upper side
_LEAST_NUMBER = 0.005
_STRIP, _SPAN = "#7b8794", "#fde8d7"


class MapsPage(Page):
    """A page of maps without their values, which `show` puts on it."""

    def __init__(self, figure: MapsFigure, paper: layout.Paper) -> None:
        labels = [label for pair in figure.axes for axis in pair for label in axis.labels]
        lettering = lettering_for(
            [figure.subtitle, *figure.lettered, *(text for *_, text in figure.spans), *labels], paper
        )
        self.content = figure
        rows, columns = zip(*figure.axes, strict=True)
        self._widest = (_widest(lettering, rows), _widest(lettering, columns))
        self._strip_px = _STRIP_PX if figure.above else _LANES * _LANE_PX + 6 if figure.spans else 0
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
        # What stays the same on all figures of this page.
        self._title = self.head("", figure.subtitle, zoom=self.zoom, animated=True)
        self._picture_box: Box | None = None
        self._photo = None if figure.picture is None else self._draw_picture()
        self.boxes = [self._box(number) for number in range(figure.n)]
        self._cmap = colormap(figure.cmap)
        self.maps = [self.image(box, self._cmap) for box in self.boxes]
        self.frames(self.boxes)
        self._others: list[Text] | None = None
        if figure.names:
            self._name_maps()
        else:
            self._title_maps()
        self._draw_strip()
        self._draw_marks()
        self._draw_foot()
        # What changes: the numbers in cells, and their ink.
        self._numbers = self._open_numbers() if self.number_px else []
        self._dark = [is_dark(*self._cmap(value)[:3]) for value in np.linspace(0, 1, 256)]

    # Layout ---------------------------------------------------------------------------------------------------------

    def _arrange(self, lettering: Lettering) -> tuple[int, tuple[int, int], layout.Places]:
        """Return how many tokens share a cell in each direction, the rows and columns of cells, and all places.

        Cells with labels are pooled where the page would be too large to draw.
        """
        figure = self.content
        # The largest number of queries and of keys: maps share one layout.
        tokens = [max(len(pair[side]) for pair in figure.axes) for side in (0, 1)]
        # Labels of a few letters need some pixels each, so long texts start pooled.
        pool = 1
        if figure.names and figure.is_labelled:
            room = max(96, 2 * layout.MIN_WIDTH_PX // len(figure.column_names))
            pool = max(1, math.ceil(max(tokens) / room))
        # Pool more until the page is small enough.
        while True:
            shape = (-(-tokens[0] // pool), -(-tokens[1] // pool))
            places = layout.arrange(self._wanted(shape, lettering), lettering.paper)
            fits = places.width_px * (places.bottom + 200) <= layout.MOST_PX
            if fits or max(shape) == 1 or not figure.is_labelled:
                return pool, shape, places
            pool += 1

    def _wanted(self, shape: tuple[int, int], lettering: Lettering) -> layout.Wanted:
        figure = self.content
        paper = lettering.paper
        least_width = layout.LEAST_PX if figure.is_labelled else layout.NARROWEST_PX
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
                top_px=layout.HEADER_PX + 30 + self._strip_px,
                row_px=figure.row_px,
                largest_px=_LARGEST_SMALL_PX,
                largest_cell_px=_LARGEST_SMALL_PX,
                least_cell_px=1 if figure.is_labelled else 24 / max(shape),
                least_width_px=layout.NARROWEST_PX,
            )
        # Larger maps: with a picture as the first panel, if there is one.
        n = figure.n + (figure.picture is not None)
        least_cell = max(2, min(layout.LEGIBLE_PX, _LARGEST_LABELLED_PX // max(shape)))
        names_px, foot_px = self._shared_room(paper) if figure.is_shared else (0.0, 0.0)
        return layout.Wanted(
            n=n,
            shape=shape,
            columns=0 if paper.is_narrow and not figure.is_shared else figure.columns,
            around=lambda cell: self._room_around(cell, paper),
            names_px=names_px,
            foot_px=foot_px,
            row_px=figure.row_px,
            largest_px=figure.largest_px,
            largest_cell_px=96 if figure.is_labelled else 1000,
            least_cell_px=least_cell if figure.is_labelled else 200 / max(shape),
            most_px=_TALLEST_FEW_PX if n <= 2 and figure.is_labelled else math.inf,
            least_width_px=least_width,
        )

    def _shared_room(self, paper: layout.Paper) -> tuple[float, float]:
        """Return the room at the left of all maps and below them for the labels that they share."""
        font = paper.least_px or layout.MAX_LABEL_PX
        left = min(math.ceil(self._widest[0](font)) + 8, 0.3 * paper.room_px)
        return left, math.ceil(self._widest[1](font)) + 14

    def _room_around(self, cell: float, paper: layout.Paper) -> layout.Around:
        """Return the room around a map for labels or numbers, its title, strips, and names above it."""
        figure = self.content
        if figure.is_shared:
            return layout.Around(above=layout.PANEL_HEADER_PX, below=4)
        rows, columns = figure.axes[0]
        font = self._label_font(figure.row_px or cell, paper)[1]
        left = math.ceil(self._widest[0](font)) + 8 if rows.labels else _TICKS_PX if rows.ticks else 0
        below = math.ceil(self._widest[1](font)) + 24 if columns.labels else 34 if columns.ticks else 10
        return layout.Around(left=left, above=layout.PANEL_HEADER_PX + self._strip_px, below=below)

    def _axes(self, number: int) -> tuple[Axis, Axis]:
        """Return what stands at the left of a map and below it."""
        axes = self.content.axes
        return axes[number] if len(axes) > 1 else axes[0]

    def _box(self, number: int) -> Box:
        """Return the box of a map; one that has fewer tokens than others is smaller."""
        if not self.content.is_labelled:
            return (*self.corners[number], *self.places.panel)
        n_rows, n_columns = (-(-len(axis) // self.pool) for axis in self._axes(number))
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
        """Return whether in pixels the labels of all maps but the first are copies of its labels."""
        figure = self.content
        return self.paper.is_screen and len(figure.axes) == 1 and figure.is_labelled and not figure.is_shared

    @property
    def tokens_per_label(self) -> int:
        """Return how many tokens share a label."""
        return self._label_font(self.places.cell[1], self.paper)[0] * self.pool

    @property
    def number_px(self) -> float:
        """Return the font size of the values in cells; 0 = they have no room, or are not wanted."""
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
        above = 14 * self.zoom + self._strip_px
        self.name_panels(names, places.corners, places.panel, places.pitch_px, size, above)

    def _draw_picture(self) -> Pixels:
        """Draw the picture, which is the first panel unless maps are small; return it in the size of maps."""
        from PIL import Image

        rows, columns = self.shape
        # The picture in the size of a map, (height, width, 3), for maps to be laid over.
        cell = self.paper.image_px(self.places.cell[0])
        picture = Image.fromarray(self.content.picture.pixels)
        pixels = np.asarray(picture.resize((columns * cell, rows * cell), Image.Resampling.LANCZOS))
        # Unless maps are small, it stands before them.
        if not self.content.names:
            corner = self.corners.pop(0)
            self._picture_box = (*corner, *self.places.panel)
            self.image(self._picture_box).set_data(pixels)
            self.entitle(corner[0], corner[1] - 12 * self.zoom, "the picture")
        return pixels

    def _title_maps(self) -> None:
        """Write a title above each map, and its labels; on a screen the labels of the first are copied to the others.

        Text is what takes the time.
        """
        width, height = self.places.panel
        size = layout.PANEL_TITLE_PX * self.zoom
        # Titles that do not fit lose what the page's title says anyway.
        above = 12 * self.zoom + self._strip_px
        for number, ((x, y), title) in enumerate(zip(self.corners, self.content.titles, strict=True)):
            if self.lettering.width_px(title, size * BOLD) > width:
                title = title.partition(":")[0]  # the title of the page says the rest
            self.entitle(x, y - above, self.lettering.fit(title, size * BOLD, max(width, 60)), size)
            if self.content.captions:
                room = width - self.lettering.width_px(title, size * 1.2) - 10
                self._write_caption(x + width, y - above, self.content.captions[number], room)
        # Where maps share their labels, only those of the first are drawn.
        self._label(0)
        if not self._has_copies:
            self.label_all()
            return
        # Boxes of pixels, beside and below the first map, that hold its labels.
        font = self._label_font(self.places.cell[0], self.paper)[1]
        left, below = (math.ceil(widest(font)) + 2 * _REACH_PX for widest in self._widest)
        beside = (-left, -_REACH_PX, left - 2, height + 2 * _REACH_PX)
        under = (-_REACH_PX, height + 2, width + 2 * _REACH_PX, below)
        x, y = self.corners[0]
        for dx, dy, wide, tall in (beside, under):
            self.copy((x + dx, y + dy, wide, tall), [(x + dx, y + dy) for x, y in self.corners[1:]])

    def _write_caption(self, right: float, y: float, caption: str, room: float) -> None:
        """Write as many of the facts of a caption as have room, flush right."""
        while caption and self.lettering.width_px(caption, layout.CAPTION_PX) > room:
            caption = caption.rpartition(" · ")[0]
        if caption:
            self.write(right, y, caption, layout.CAPTION_PX, ha="right", color=FAINT)

    def _label(self, number: int) -> list[Text]:
        """Write what stands at the left of a map and below it: labels, or numbers."""
        x, y, width, height = self.boxes[number]
        rows, columns = self._axes(number)
        wide, tall = self.places.cell
        font = self._label_font(tall, self.paper)[1]
        texts = []
        room = max(self.places.around.left - 8, 1.0) + 0.5
        if self.content.is_shared:
            room = x - layout.MARGIN_PX - 5
            rows = rows if number % self.places.columns == 0 else Axis()
            columns = columns if number + self.places.columns >= self.content.n else Axis()
        for place in _labelled(rows, self.tokens_per_label):
            label = self.lettering.fit(rows.labels[place], font, room)
            middle = y + (place // self.pool + 0.5) * tall
            color = rows.color(place)
            texts.append(self.write(x - 5, middle, label, font, ha="right", va="center_baseline", color=color))
        below = y + height + 5
        for place in _labelled(columns, self.tokens_per_label):
            label = self.lettering.fit(columns.labels[place], font, LABEL_ROOM_EM * font + 0.5)
            middle = x + (place // self.pool + 0.5) * wide
            color = columns.color(place)
            texts.append(self.write(middle, below, label, font, ha="center", va="top", rotation=90, color=color))
        # Numbers along sides without labels.
        size = layout.CAPTION_PX
        for share, text in rows.ticks:
            self.lines([[(x - 5, y + share * height), (x - 1, y + share * height)]])
            texts.append(self.write(x - 8, y + share * height, text, size, ha="right", color=FAINT))
        longest = max((text for _, text in columns.ticks), key=len, default="")
        for share, text in columns.ticks[:: self.label_step(longest, size, width / max(1, len(columns.ticks)))]:
            self.lines([[(x + share * width, below - 4), (x + share * width, below)]])
            texts.append(self.write(x + share * width, below + 9, text, size, ha="center", color=FAINT))
        return texts

    def label_all(self) -> None:
        """Show the labels of all maps, which in pixels are copies of the first one's."""
        if self._others is None:
            others = [] if self.content.names else range(1, self.content.n)
            self._others = [text for number in others for text in self._label(number)]
        for text in self._others:
            text.set_visible(True)

    def _draw_strip(self) -> None:
        """Draw numbers along the upper side of the uppermost maps as a strip."""
        strips: list[Box] = []
        reach = self._strip_px - 4
        for x, y, width, _ in self.boxes:
            if self.content.above and y == self.boxes[0][1]:
                numbers = fit(np.array([self.content.above]), (width, 1))[0]
                wide = width / len(numbers)
                strips += [(x + n * wide, y - 4 - size * reach, wide, size * reach) for n, size in enumerate(numbers)]
        self.fill(strips, [_STRIP])

    def _draw_marks(self) -> None:
        """Draw lines where another text begins, frames, and what is written over maps."""
        wide, tall = self._per_token()
        lines: list[list[tuple[float, float]]] = []
        framed: list[Box] = []
        for number, (x, y, width, height) in enumerate(self.boxes):
            rows, columns = self._axes(number)
            lines += [[(x, y + at * tall), (x + width, y + at * tall)] for at in rows.seams]
            lines += [[(x + at * wide, y), (x + at * wide, y + height)] for at in columns.seams]
            self._draw_spans(x, y, wide)
        # Frames stand on the picture, too.
        for x, y, *_ in [*self.boxes, *([] if self._picture_box is None else [self._picture_box])]:
            for left, top, right, bottom in self.content.boxes:
                framed.append((x + left * wide, y + top * tall, (right - left) * wide, (bottom - top) * tall))
        if lines:
            self.lines(lines, color=SEAM, animated=True)
        if framed:
            self.outline(framed, MARK, (1.0 if self.content.row_px else 2.0) * self.zoom, animated=True)

    def _per_token(self) -> tuple[float, float]:
        """Return the width and height that a token has on the maps."""
        if self.content.is_labelled:
            return self.places.cell[0] / self.pool, self.places.cell[1] / self.pool
        rows, columns = self.content.axes[0]
        return self.places.panel[0] / len(columns), self.places.panel[1] / len(rows)

    def _draw_spans(self, x: float, y: float, wide: float) -> None:
        """Draw names above a map, each over its columns, in the first lane that is free; else without letters."""
        lanes = [0.0] * _LANES
        bands: list[Box] = []
        for first, last, text in self.content.spans:
            # A name begins at its columns, unless the page ends.
            left = x + first * wide
            needed = self.lettering.width_px(text, layout.CAPTION_PX) + 12
            text_left = min(left, self.width_px - needed - 4)
            # The first lane with room.
            lane = next((lane for lane, end in enumerate(lanes) if end <= text_left), None)
            top = y - 4 - ((lane or 0) + 1) * _LANE_PX
            bands.append((left, top, max(1.0, (last - first) * wide), _LANE_PX - 3))
            if lane is not None:
                lanes[lane] = max(text_left + needed, x + last * wide)
                self.write(text_left + 4, top + _LANE_PX / 2 - 1, text, layout.CAPTION_PX, ha="left")
        self.fill(bands, [_SPAN])

    def _draw_foot(self) -> None:
        """Draw the colour bar, write the notes, and end the page."""
        figure = self.content
        # Notes on what is not shown as it is.
        notes = [*figure.notes, *self.lettering.notes]
        if figure.is_labelled and self.tokens_per_label > 1 and not figure.names:
            notes.append(f"one label for {self.tokens_per_label} tokens")
        if self.pool > 1:
            notes.append(f"a cell shows the largest weight of {self.pool} × {self.pool} tokens")
        shared = max(math.ceil(n / size) for n, size in zip(self.shape[::-1], self.places.panel, strict=True))
        if shared > 1:
            notes.append(f"a pixel shows the largest of up to {shared} × {shared} cells")
        if self.number_px:
            notes.append("cells without a number: less than 0.005")
        cmap = None if self._photo is not None else self._cmap
        self.bar = self.end_with_bar(self.places.bottom, cmap, figure.meaning, notes, self.zoom)
        if self._photo is not None:  # its colours as they are over bright and over dark parts
            ramp = self._cmap(np.linspace(0, 1, 256))[None, :, :3].repeat(2, 0)
            self.image(self.bar).set_data(tint(ramp, np.array([[1.0], [0.0]]).repeat(256, 1)))
            self.frames([self.bar])
        x, y, _, height = self.bar
        below = y + height + 12 * self.zoom
        size = layout.CAPTION_PX * self.zoom
        self._ticks = [self.write(x, below, "", size, ha="center", animated=True) for _ in range(11)]

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
        values: Sequence[Values],
        limits: Sequence[tuple[float, float]],
        bar: tuple[float, float],
        ticks: dict[float, str],
        numbers: Values | None = None,
    ) -> None:
        """Put values on the page.

        Args:
            title: The title of the page.
            values: Cells of each map, (row, column), pooled if they are signed; NaN has no colour.
            limits: The values of the first and last colour of each map.
            bar: The ends of the colour bar.
            ticks: Its numbers, and how they are written.
            numbers: What is written in the cells of the first map; None = its values.
        """
        room = self.width_px - 2 * layout.MARGIN_PX
        self._title.set_text(self.lettering.fit(title, self.title_px(self.zoom) * 1.1, room))
        shown = [self._fit(cells, number) for number, cells in enumerate(values)]
        for image, cells, ends in zip(self.maps, shown, limits, strict=True):
            if self._photo is not None:
                image.set_data(overlay(self._photo, cells, self._cmap, ends[1], is_smooth=self.content.is_smooth))
            else:
                self.set_cells(image, cells, ends)
        # The numbers below the colour bar; the first one stays on the page.
        x, _, width, _ = self.bar
        placed = list(ticks.items())
        for number, text in enumerate(self._ticks):
            tick, written = placed[number] if number < len(placed) else (bar[0], "")
            text.set_text(written)
            half = self.lettering.width_px(written, layout.CAPTION_PX * self.zoom) / 2
            text.set_x(max(half + self.paper.crop_px, x + width * (tick - bar[0]) / ((bar[1] - bar[0]) or 1.0)))
        # The numbers in cells.
        weights = shown[0] if numbers is None else self._fit(numbers, 0)
        low, high = limits[0]
        for text, weight, value in zip(self._numbers, weights.ravel(), shown[0].ravel(), strict=False):
            share = min(1.0, max(0.0, (float(value) - low) / ((high - low) or 1.0)))
            text.set_text(f"{weight:.2f}" if weight >= _LEAST_NUMBER else "")
            text.set_color("white" if self._dark[round(share * 255)] else INK)

    def _fit(self, values: Values, number: int) -> Values:
        """Return the cells of a map as there is room for them, each the largest of those that share one."""
        rows, columns = self._axes(number)
        if not self.content.is_labelled:
            return fit(values, self.places.panel)
        return max_pool(values, self.pool) if values.shape == (len(rows), len(columns)) else values

    def vector(self, kind: str) -> bytes:
        """Return the figure as it stands now as SVG or PDF, where every label is text."""
        self.label_all()
        content = super().vector(kind)
        if self._has_copies:
            for text in self._others or ():
                text.set_visible(False)
        return content


def _labelled(axis: Axis, step: int) -> list[int]:
    """Return the places with a label: the marked ones, the first the most important, and every `step`-th with room."""
    chosen: list[int] = []
    for place in (*axis.marked, *range(0, len(axis.labels), step)):
        if all(abs(place - other) >= step for other in chosen):
            chosen.append(place)
    return sorted(chosen)


def _widest(lettering: Lettering, axes: Sequence[Axis]) -> Callable[[float], float]:
    """Return the width of the widest label by font size; it is bounded, as labels are cut."""
    labels = {label for axis in axes for label in axis.labels}
    at_100 = max((lettering.width_px(lettering.spell(label), 100.0) for label in labels), default=0.0)
    return lambda size: min(at_100 / 100, LABEL_ROOM_EM) * size
