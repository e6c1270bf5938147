"""Compute the layout of figures in pixels: paper, places of panels, font sizes, ticks. `page` and `maps` draw them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

MARGIN_PX = 28
"""The margin at each side of a page."""

PAGE_WIDTH_PX = 1600
"""Width of a page on a screen, unless its panels need more, or much less."""

NARROW_WIDTH_PX = 1000
"""Width of a page with panels that are narrow at their largest."""

TITLE_PX = 20.0
SUBTITLE_PX = 15.0
PANEL_TITLE_PX = 15.0
CAPTION_PX = 12.5
"""Font sizes. On paper, captions are the smallest letters."""

LINE_PX = 18
HEADER_PX = MARGIN_PX + 56
"""Height of a page's title and subtitle."""

PANEL_HEADER_PX = 26
MAX_LABEL_PX = 14.0
LEGIBLE_PX = 9
"""The least distance of two labels that can be read on a screen."""

LABEL_SHARE = 0.84
"""Font size of labels, as a share of the distance between two of them."""

MAX_PAGE_PIXELS = 60_000_000
"""The most pixels of a page; a larger one takes gigabytes to draw, and few programs open it."""

_TALLEST_INCHES = 9.0
"""The largest height of a figure on paper."""

SMALLEST_WIDTH_PX = 560
"""Width of a page with few cells."""

_NARROW_PX = 800
_MOSTLY_EMPTY = 0.6  # a page whose panels need less than this share of PAGE_WIDTH_PX is narrower
_SMALL_PANEL_PX = 110  # rather than narrower panels, fewer stand side by side
_LABELS_AT_MOST = 0.4  # the largest share of labels in the width of a panel with its labels
_CROP_PX = MARGIN_PX - 4  # a figure of an exact width lacks so much of the margin at each side


@dataclass(frozen=True)
class Paper:
    """Hold the size of a figure's page and letters, in pixels of the layout, which need not be those of the file.

    Attributes:
        width_px: The width of the page.
        fixed: Whether figures are exactly that wide; else they grow and shrink.
        least_px: The size of the smallest letters; 0 = any.
        label_px: Labels of tokens may be as small as this, if each of them has room then; 0 = no smaller than others.
        inch_px: How many pixels of the layout are an inch.
        dpi: How many pixels of a PNG are an inch.
        caption: Whether there are a title, a subtitle and notes.
        crop_px: The margin that is laid out but cut off at the left and the right; above and below it is less.
        font: The font to try first: the name of an installed family, or a file.
        failed: Parts of the study that failed: every figure says so at its foot.
    """

    width_px: int = PAGE_WIDTH_PX
    fixed: bool = False
    least_px: float = 0.0
    label_px: float = 0.0
    inch_px: float = 100.0
    dpi: int = 100
    caption: bool = True
    crop_px: float = 0.0
    font: str | None = None
    failed: tuple[str, ...] = ()

    @classmethod
    def of_width(
        cls,
        inches: float,
        points: float,
        dpi: int,
        caption: bool,
        font: str | None,
        label_points: float = 0.0,
    ) -> Paper:
        """Return paper of an exact width.

        Args:
            inches: The width.
            points: The size of captions, which are the smallest letters but for labels.
            dpi: How many pixels of a PNG are an inch.
            caption: Whether there are a title, a subtitle and notes.
            font: The font to try first.
            label_points: The size of the smallest labels; 0 = `points`.
        """
        inch_px = 72 * CAPTION_PX / points
        visible_px = inches * inch_px
        width_px = math.ceil(visible_px) + 2 * _CROP_PX
        return cls(
            width_px=width_px,
            fixed=True,
            least_px=CAPTION_PX,
            label_px=CAPTION_PX * (label_points or points) / points,
            inch_px=inch_px,
            dpi=dpi,
            caption=caption,
            crop_px=(width_px - visible_px) / 2,
            font=font,
        )

    @property
    def is_screen(self) -> bool:
        """Return whether a pixel of the layout is one of the file."""
        return self.inch_px == self.dpi and not self.crop_px and self.caption

    @property
    def max_height_px(self) -> float:
        """Return the largest height of a layout: on paper of a fixed width that of a page; else there is no limit."""
        return _TALLEST_INCHES * self.inch_px + 2 * self.crop_ends_px if self.fixed else math.inf

    @property
    def crop_ends_px(self) -> float:
        """Return the margin that is cut off above and below: less than at the sides, as letters reach into it."""
        return max(0.0, self.crop_px - 10)

    @property
    def room_px(self) -> int:
        """Return the width between the margins."""
        return self.width_px - 2 * MARGIN_PX

    @property
    def is_narrow(self) -> bool:
        """Return whether what usually stands side by side has to stand one below the other."""
        return self.width_px < _NARROW_PX

    def width_for(self, *wanted: float) -> int:
        """Return the width of a figure: the largest of the wanted ones, unless its width is fixed."""
        return self.width_px if self.fixed else math.ceil(max(wanted))

    def whole(self, size_px: float, least: int = 1) -> float:
        """Return a size in whole pixels, and at least `least`; the size itself where the width is fixed."""
        return size_px if self.fixed else max(least, math.floor(size_px))

    def image_px(self, size_px: float) -> int:
        """Return how many pixels of a PNG a length of the layout has."""
        return max(1, math.ceil(size_px * self.dpi / self.inch_px))

    def letters(self, size_px: float) -> float:
        """Return a font size, no smaller than letters may be."""
        return max(size_px, self.least_px)


SCREEN = Paper()

WidthPx = Callable[[str, float], float]
"""Returns the width of a text at a font size, both in pixels."""


@dataclass(frozen=True)
class Margins:
    """Hold the room around each panel in pixels, for its title, labels and axes."""

    left: float = 0
    above: float = 0
    right: float = 0
    below: float = 0


@dataclass(frozen=True, kw_only=True)
class PanelRequest:
    """Say what panels are to be laid out; they have one size, and rows and columns of cells.

    Attributes:
        n: How many panels there are.
        shape: How many rows and columns of cells a panel has.
        columns: Panels side by side; 0 = as many as make the page near 4:3.
        around: Returns the room around a panel for a width of its cells.
        names_px: Room for names at the left of each row of panels.
        foot_px: Room for labels below the last row of panels.
        gap_px: Distance from one panel, with its room, to the next.
        top_px: Where the first row of panels begins.
        row_px: Height of a row of cells; 0 = cells are squares.
        largest_px: The largest width and height of a panel.
        largest_cell_px: The largest width of a cell.
        least_cell_px: The least width of a cell on a screen, where the page grows; on paper cells shrink. If it is less
            than 1, several cells may share a pixel.
        max_height_px: The largest height of all panels.
        least_width_px: The least width of a page with one panel, or with panels that would leave it mostly empty.
    """

    n: int
    shape: tuple[int, int]
    columns: int = 0
    around: Callable[[float], Margins] = lambda cell: Margins()
    names_px: float = 0
    foot_px: float = 0
    gap_px: float = 26
    top_px: float = HEADER_PX
    row_px: float = 0
    largest_px: float = math.inf
    largest_cell_px: float = 96
    least_cell_px: float = 1
    max_height_px: float = math.inf
    least_width_px: float = SMALLEST_WIDTH_PX


@dataclass(frozen=True)
class PanelLayout:
    """Hold the places of panels, all in pixels.

    Attributes:
        width_px: The width of the page.
        zoom: The size of titles and notes, as a multiple of that on a page of the usual width.
        columns: How many panels stand side by side.
        cell: Width and height of a cell.
        panel: Width and height of a panel.
        pitch_px: Distance from one column of panels to the next.
        around: The room around each panel.
        corners: The upper left corner of each panel, (x, y).
        bottom: The lower edge of the last row of panels with its room.
    """

    width_px: int
    zoom: float
    columns: int
    cell: tuple[float, float]
    panel: tuple[float, float]
    pitch_px: float
    around: Margins
    corners: Sequence[tuple[float, float]]
    bottom: int


def arrange(request: PanelRequest, paper: Paper) -> PanelLayout:
    """Place panels as large as the page allows; on a screen the page grows where cells would be too small.

    On narrow paper fewer panels than usual stand side by side.
    """
    # Have fewer panels side by side while they are small and that makes their cells larger.
    columns = request.columns or columns_for(request.n)
    cell = _largest_cell(request, columns, paper)
    while not request.columns and columns > 1 and cell * request.shape[1] < _SMALL_PANEL_PX:
        larger = _largest_cell(request, columns - 1, paper)
        if larger <= cell:
            break
        columns -= 1
        cell = larger
    # A page that the panels would leave mostly empty is as narrow as they allow.
    around = _room_around(request, cell, columns, paper)
    cell_size = (cell, request.row_px or cell)
    panel = (request.shape[1] * cell_size[0], request.shape[0] * cell_size[1])
    # On a screen a panel has whole pixels; 1e-4 makes up for rounding.
    if not paper.fixed:
        panel = (max(1, math.floor(panel[0] + 1e-4)), max(1, math.floor(panel[1] + 1e-4)))
    needed = _needed_width(request, columns, panel[0], around)
    least_width = request.least_width_px
    if request.n > 1 and needed >= _MOSTLY_EMPTY * PAGE_WIDTH_PX:
        least_width = PAGE_WIDTH_PX
    width = paper.width_for(least_width, needed)
    zoom = min(2.5, max(1.0, width / PAGE_WIDTH_PX))
    # Distribute the width that is left between the panels.
    spare = max(0, math.floor(width - needed)) // columns
    rows = math.ceil(request.n / columns)
    above = around.above * zoom
    pitch_x = around.left + panel[0] + around.right + request.gap_px + spare
    pitch_y = above + panel[1] + around.below
    if request.columns and not paper.fixed:
        pitch_y += min(spare, 40)  # rows of an overview move apart as its columns do
    top = request.top_px + HEADER_PX * (zoom - 1)
    x = MARGIN_PX + request.names_px + around.left + spare // 2
    y = top + above
    # On a screen, panels begin at whole pixels.
    if not paper.fixed:
        x = round(x)
        y = round(y)
        pitch_x = math.ceil(pitch_x)
        pitch_y = math.ceil(pitch_y)
    corners = tile(request.n, columns, (x, y), (pitch_x, pitch_y))
    bottom = math.ceil(top + rows * pitch_y + request.foot_px)
    return PanelLayout(width, zoom, columns, cell_size, panel, pitch_x, around, corners, bottom)


def _largest_cell(request: PanelRequest, columns: int, paper: Paper) -> float:
    """Return the largest width of a cell at which panels fit the width of the page and their own limits."""
    n_rows, n_columns = request.shape
    rows = math.ceil(request.n / columns)
    # Unless the columns are set, panels fit one page of paper, with 100 px for what is below them.
    tallest = request.max_height_px
    if not request.columns:
        tallest = min(tallest, paper.max_height_px - request.top_px - 100)

    def fits(cell: float) -> bool:
        around = _room_around(request, cell, columns, paper)
        height = (
            rows * (around.above + n_rows * (request.row_px or cell) + around.below) + request.foot_px
        )
        # If rows have a fixed height, narrower cells do not make panels lower.
        is_low = bool(request.row_px) or height <= tallest
        return is_low and _needed_width(request, columns, n_columns * cell, around) <= paper.width_px

    # Bisect the largest width that fits.
    low = 0.0
    longest = n_columns if request.row_px else max(request.shape)
    high = min(request.largest_cell_px, request.largest_px / longest)
    if not fits(high):
        for _ in range(24):
            middle = (low + high) / 2
            if fits(middle):
                low = middle
            else:
                high = middle
        high = low
    if paper.fixed:
        return max(high, 0.01)
    # On a screen a cell is whole pixels wide, or several cells share a pixel.
    whole = math.floor(high + 1e-4) if high >= 1 else high
    return max(request.least_cell_px, whole)


def _room_around(request: PanelRequest, cell: float, columns: int, paper: Paper) -> Margins:
    """Return the room around a panel; on paper labels at its left are cut to a share of its width."""
    around = request.around(cell)
    if not paper.fixed:
        return around
    pitch = (paper.room_px - request.names_px - (columns - 1) * request.gap_px) / columns
    return replace(around, left=min(around.left, pitch * _LABELS_AT_MOST))


def _needed_width(request: PanelRequest, columns: int, panel_px: float, around: Margins) -> float:
    """Return the width of a page with so many panels side by side."""
    panels = columns * (around.left + panel_px + around.right) + (columns - 1) * request.gap_px
    return 2 * MARGIN_PX + request.names_px + panels


def label_font(cell_px: float, paper: Paper) -> tuple[int, float]:
    """Return how many cells share a label, and the font size of labels."""
    # On paper the font size is set; on a screen it grows with the distance between labels.
    least_distance = paper.least_px / LABEL_SHARE or LEGIBLE_PX
    step = max(1, math.ceil(least_distance / cell_px))
    # Take smaller letters if then each cell has its label.
    room = cell_px * LABEL_SHARE
    if step > 1 and 0 < paper.label_px <= room:
        return 1, room
    return step, paper.least_px or min(MAX_LABEL_PX, cell_px * step * LABEL_SHARE)


def columns_for(n_panels: int) -> int:
    """Return how many panels stand side by side: near 4:3 as a whole, with as few empty places as that allows."""

    def badness(columns: int) -> float:
        """Return how far the shape is from 4:3, plus the share of empty places, plus 0.3 if there are any."""
        rows = math.ceil(n_panels / columns)
        n_empty = rows * columns - n_panels
        from_shape = abs(math.log(columns / rows / (4 / 3)))
        return from_shape + n_empty / n_panels + (0.3 if n_empty else 0.0)

    return min(range(1, n_panels + 1), key=badness)


def wrap(text: str, room_px: float, width_of: WidthPx) -> tuple[str, ...]:
    """Return a text broken at spaces into lines that fit the room; no line begins with the dot between two notes."""
    lines = [""]
    for word in text.split(" "):
        longer = f"{lines[-1]} {word}".strip()
        if word != "·" and lines[-1] and width_of(longer, CAPTION_PX) > room_px:
            lines.append(word)
        else:
            lines[-1] = longer
    return tuple(lines)


_LEAST_TICK = 1e-11
"""A scale that ends here or below has one tick, 0: ticks are rounded to 12 decimals."""


def nice_ticks(top: float) -> tuple[float, ...]:
    """Return up to six round numbers from 0 to `top`, for a colour bar."""
    if not top > _LEAST_TICK:
        return (0.0,)
    # The least round step of which at most five fit: a power of ten times 1, 2, 2.5, 5 or 10.
    least_step = top / 5
    unit = 10.0 ** math.floor(math.log10(least_step))
    step = next(unit * m for m in (1, 2, 2.5, 5, 10) if unit * m >= least_step * 0.999)
    n_steps = math.floor(top / step * 1.0001)
    return tuple(round(step * number, 12) for number in range(n_steps + 1))


def ticks_between(low: float, high: float) -> tuple[float, ...]:
    """Return round numbers from one end of a scale to the other; if it has two signs, the same on both sides of 0."""
    # Multiples of a round step, from 0 to the length of the scale, or to the upper end of one with two signs.
    steps = nice_ticks(high - max(low, 0.0))
    if low < 0:
        return (*(-tick for tick in reversed(steps[1:])), *steps)
    if len(steps) == 1:
        return (low,)
    # Begin at the first multiple of a step within the scale.
    first = math.ceil(low / steps[1] - 1e-9) * steps[1]
    return tuple(round(first + step, 12) for step in steps if first + step <= high * 1.0001)


def tile(
    n: int, columns: int, corner: tuple[float, float], pitch: tuple[float, float]
) -> list[tuple[float, float]]:
    """Return the upper left corners of n boxes in rows of `columns`; `pitch` is their distance across and down."""
    x, y = corner
    across, down = pitch
    return [(x + box % columns * across, y + box // columns * down) for box in range(n)]
