"""Compute the layout of figures in pixels: paper, places of panels, font sizes, ticks. `page` and `maps` draw them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

MARGIN_PX = 28
"""The margin at each side of a page."""

PAGE_WIDTH_PX = 1600
"""Width of a page on a screen, unless its panels need more, or less than the share _MOSTLY_EMPTY of it."""

NARROW_WIDTH_PX = 1000
"""Width of a page on a screen whose panels are small even at their largest."""

TITLE_PX = 20.0
SUBTITLE_PX = 15.0
PANEL_TITLE_PX = 15.0
CAPTION_PX = 12.5
"""Font sizes. On paper, captions are the smallest letters."""

LINE_PX = 18
"""Distance from one line of text to the next."""

HEADER_PX = MARGIN_PX + 56
"""Height of the title and the subtitle of a page."""

PANEL_HEADER_PX = 26
"""Height of the title of a panel."""

MAX_LABEL_PX = 14.0
"""The largest font size of labels."""

LEGIBLE_PX = 9
"""The least distance between two labels at which they can be read on a screen."""

LABEL_SHARE = 0.84
"""Font size of labels, as a share of the distance between two of them."""

MAX_PAGE_PIXELS = 60_000_000
"""The most pixels of a page on a screen; a larger one takes gigabytes to draw, and few programs open it."""

_TALLEST_INCHES = 9.0
"""The largest height of a figure on paper."""

SMALLEST_WIDTH_PX = 560
"""Width of a page with few cells, which must have room for its title."""

_NARROW_PX = 800
_MOSTLY_EMPTY = 0.6  # a page whose panels need less than this share of PAGE_WIDTH_PX is narrower
_SMALL_PANEL_PX = 110  # rather than narrower panels, fewer stand side by side
_LABELS_AT_MOST = 0.4  # the largest share of labels in the width of a panel with its labels
_CROP_PX = MARGIN_PX - 4  # a figure of an exact width lacks so much of the margin at each side


@dataclass(frozen=True)
class Paper:
    """Hold the size of a figure's page and letters.

    Lengths are in pixels of the layout. A PNG may have more or fewer pixels, see `inch_px` and `dpi`.

    Attributes:
        width_px: The width of the page.
        fixed: Whether each figure has exactly this width (paper); else its width depends on its panels (a screen).
        min_px: The smallest font size; 0 = there is none.
        label_px: The size to which labels of tokens may shrink below `min_px`, if each cell then has its label; 0 =
            they may not.
        inch_px: How many pixels of the layout are an inch.
        dpi: How many pixels of a PNG are an inch.
        caption: Whether there are a title, a subtitle and notes.
        crop_px: How much of the laid-out margin is cut off at the left and at the right.
        font: The font to try first: the name of an installed family, or a file.
        failed: Notes on parts of the study that failed, which stand at the foot of every figure.
    """

    width_px: int = PAGE_WIDTH_PX
    fixed: bool = False
    min_px: float = 0.0
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
            points: The font size of captions. No letters but those of labels are smaller.
            dpi: How many pixels of a PNG are an inch.
            caption: Whether there are a title, a subtitle and notes.
            font: The font to try first.
            label_points: The font size of the smallest labels; 0 = `points`.
        """
        inch_px = 72 * CAPTION_PX / points
        visible_px = inches * inch_px
        width_px = math.ceil(visible_px) + 2 * _CROP_PX
        return cls(
            width_px=width_px,
            fixed=True,
            min_px=CAPTION_PX,
            label_px=CAPTION_PX * (label_points or points) / points,
            inch_px=inch_px,
            dpi=dpi,
            caption=caption,
            crop_px=(width_px - visible_px) / 2,
            font=font,
        )

    @property
    def is_pixel_exact(self) -> bool:
        """Return whether pixels of the layout are those of a PNG: nothing is scaled, cropped, or trimmed at the top.

        Figures without a caption are trimmed, by a height that may be no whole pixel.
        """
        return self.inch_px == self.dpi and not self.crop_px and self.caption

    @property
    def max_height_px(self) -> float:
        """Return the largest height of a figure: on paper of a fixed width that of a page; else infinity."""
        return _TALLEST_INCHES * self.inch_px + 2 * self.crop_ends_px if self.fixed else math.inf

    @property
    def crop_ends_px(self) -> float:
        """Return how much is cut off above and below: less than at the sides, as letters reach into this margin."""
        return max(0.0, self.crop_px - 10)

    @property
    def room_px(self) -> int:
        """Return the width between the margins."""
        return self.width_px - 2 * MARGIN_PX

    @property
    def is_narrow(self) -> bool:
        """Return whether things that usually stand side by side must stand one below the other."""
        return self.width_px < _NARROW_PX

    def width_for(self, *wanted: float) -> int:
        """Return the width of a figure: the largest of some wanted widths, or that of the paper if it is fixed."""
        return self.width_px if self.fixed else math.ceil(max(wanted))

    def whole(self, size_px: float, least: int) -> float:
        """Return a size rounded down to whole pixels, and at least `least`; the size itself if the width is fixed."""
        return size_px if self.fixed else max(least, math.floor(size_px))

    def image_px(self, size_px: float) -> int:
        """Return a length of the layout in pixels of a PNG."""
        return max(1, math.ceil(size_px * self.dpi / self.inch_px))

    def letters(self, size_px: float) -> float:
        """Return a font size, or the smallest of the paper if that is larger."""
        return max(size_px, self.min_px)


SCREEN = Paper()

WidthPx = Callable[[str, float], float]
"""Returns the width of a text at a font size, both in pixels."""


@dataclass(frozen=True)
class Margins:
    """Hold the room around a panel in pixels, for its title, labels and axes."""

    left: float = 0
    above: float = 0
    right: float = 0
    below: float = 0


@dataclass(frozen=True, kw_only=True)
class PanelRequest:
    """Say which panels are to be laid out. All have the same size and the same rows and columns of cells.

    Attributes:
        n: How many panels there are.
        shape: How many rows and columns of cells a panel has.
        columns: Panels side by side; 0 = as many as make the page near 4:3.
        margins: Returns the room around a panel, given the width of its cells in pixels.
        names_px: Width of the names at the left of each row of panels.
        foot_px: Height of the labels below the last row of panels.
        gap_px: Distance from the margins of one panel to those of the next.
        top_px: The y at which the margins of the first row of panels begin.
        row_px: Height of a row of cells; 0 = cells are squares.
        largest_px: The largest width and height of a panel.
        largest_cell_px: The largest width of a cell.
        min_cell_px: The least width of a cell on a screen: the page grows if it must. Below 1, several cells may
            share a pixel. On paper, cells may always shrink.
        max_height_px: The largest height of all rows of panels.
        min_width_px: The least width of a page with one panel, or with panels that would leave it mostly empty.
    """

    n: int
    shape: tuple[int, int]
    columns: int = 0
    margins: Callable[[float], Margins] = lambda cell_width: Margins()
    names_px: float = 0
    foot_px: float = 0
    gap_px: float = 26
    top_px: float = HEADER_PX
    row_px: float = 0
    largest_px: float = math.inf
    largest_cell_px: float = 96
    min_cell_px: float = 1
    max_height_px: float = math.inf
    min_width_px: float = SMALLEST_WIDTH_PX


@dataclass(frozen=True)
class PanelLayout:
    """Hold the sizes and places of panels, all in pixels.

    Attributes:
        width_px: The width of the page.
        zoom: The size of titles and notes, as a multiple of their size on a page PAGE_WIDTH_PX wide.
        columns: How many panels stand side by side.
        cell: Width and height of a cell.
        panel: Width and height of a panel.
        pitch_px: Distance from the left edge of a panel to that of the next one in its row.
        margins: The room around each panel.
        corners: The upper left corner of each panel, (x, y), row by row.
        bottom: The lower edge of the last row of panels, with its margins and `foot_px`.
    """

    width_px: int
    zoom: float
    columns: int
    cell: tuple[float, float]
    panel: tuple[float, float]
    pitch_px: float
    margins: Margins
    corners: Sequence[tuple[float, float]]
    bottom: int


def arrange(request: PanelRequest, paper: Paper) -> PanelLayout:
    """Place panels as large as the page allows; on a screen the page grows where cells would be too small.

    On narrow paper fewer panels than usual stand side by side.
    """
    # Put fewer panels side by side while they are small, if that makes their cells larger.
    columns = request.columns or columns_for(request.n)
    n_rows, n_columns = request.shape
    cell_width = _largest_cell_width(request, columns, paper)
    while not request.columns and columns > 1 and cell_width * n_columns < _SMALL_PANEL_PX:
        larger = _largest_cell_width(request, columns - 1, paper)
        if larger <= cell_width:
            break
        columns -= 1
        cell_width = larger
    margins = _margins(request, cell_width, columns, paper)
    cell_height = request.row_px or cell_width
    panel_width = n_columns * cell_width
    panel_height = n_rows * cell_height
    # On a screen a panel has whole pixels; 1e-4 makes up for rounding.
    if not paper.fixed:
        panel_width = max(1, math.floor(panel_width + 1e-4))
        panel_height = max(1, math.floor(panel_height + 1e-4))
    # A page that the panels would leave mostly empty is as narrow as they allow.
    needed = _needed_width(request, columns, panel_width, margins)
    min_width = request.min_width_px
    if request.n > 1 and needed >= _MOSTLY_EMPTY * PAGE_WIDTH_PX:
        min_width = PAGE_WIDTH_PX
    width = paper.width_for(min_width, needed)
    # Titles grow with a wide page, up to a limit.
    zoom = min(2.5, max(1.0, width / PAGE_WIDTH_PX))
    # Each column of panels gets the same share of the width that is left.
    spare = max(0, math.floor(width - needed)) // columns
    above = margins.above * zoom
    pitch_x = margins.left + panel_width + margins.right + request.gap_px + spare
    pitch_y = above + panel_height + margins.below
    # Where the caller chose the columns, rows of panels move apart as columns do.
    if request.columns and not paper.fixed:
        pitch_y += min(spare, 40)
    top = request.top_px + HEADER_PX * (zoom - 1)
    x = MARGIN_PX + request.names_px + margins.left + spare // 2
    y = top + above
    # On a screen, panels begin at whole pixels.
    if not paper.fixed:
        x = round(x)
        y = round(y)
        pitch_x = math.ceil(pitch_x)
        pitch_y = math.ceil(pitch_y)
    corners = tile(request.n, columns, (x, y), (pitch_x, pitch_y))
    bottom = math.ceil(top + math.ceil(request.n / columns) * pitch_y + request.foot_px)
    cell = (cell_width, cell_height)
    panel = (panel_width, panel_height)
    return PanelLayout(width, zoom, columns, cell, panel, pitch_x, margins, corners, bottom)


def _largest_cell_width(request: PanelRequest, columns: int, paper: Paper) -> float:
    """Return the largest width of a cell at which panels fit the width of the page and their own limits."""
    n_rows, n_columns = request.shape
    rows = math.ceil(request.n / columns)
    # Unless the caller chose the columns, all panels fit one page of paper, with 100 px below them for notes.
    max_height = request.max_height_px
    if not request.columns:
        max_height = min(max_height, paper.max_height_px - request.top_px - 100)

    def fits(cell_width: float) -> bool:
        margins = _margins(request, cell_width, columns, paper)
        needed = _needed_width(request, columns, n_columns * cell_width, margins)
        # Narrower cells make panels lower only if cells are squares.
        if request.row_px:
            return needed <= paper.width_px
        height = rows * (margins.above + n_rows * cell_width + margins.below) + request.foot_px
        return needed <= paper.width_px and height <= max_height

    # Bisect the largest width that fits, to about 1e-4 pixels.
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
    return max(request.min_cell_px, whole)


def _margins(request: PanelRequest, cell_width: float, columns: int, paper: Paper) -> Margins:
    """Return the room around a panel; on paper its labels at the left get at most a share of the width per panel."""
    margins = request.margins(cell_width)
    if not paper.fixed:
        return margins
    width_per_panel = (paper.room_px - request.names_px - (columns - 1) * request.gap_px) / columns
    return replace(margins, left=min(margins.left, width_per_panel * _LABELS_AT_MOST))


def _needed_width(request: PanelRequest, columns: int, panel_width: float, margins: Margins) -> float:
    """Return the width of a page with so many panels side by side."""
    panels = columns * (margins.left + panel_width + margins.right) + (columns - 1) * request.gap_px
    return 2 * MARGIN_PX + request.names_px + panels


def label_font(cell_px: float, paper: Paper) -> tuple[int, float]:
    """Return how many cells share a label, and the font size of labels, for cells `cell_px` high or wide."""
    # On paper the font size is given; on a screen it grows with the distance between labels.
    min_distance = paper.min_px / LABEL_SHARE if paper.min_px else LEGIBLE_PX
    step = max(1, math.ceil(min_distance / cell_px))
    # Use smaller letters if each cell then has its label.
    size = cell_px * LABEL_SHARE
    if step > 1 and 0 < paper.label_px <= size:
        return 1, size
    return step, paper.min_px or min(MAX_LABEL_PX, cell_px * step * LABEL_SHARE)


def columns_for(n_panels: int) -> int:
    """Return how many panels to put side by side, for a shape near 4:3 and few empty places in the last row."""

    def badness(columns: int) -> float:
        """Return how far the shape is from 4:3, plus the share of empty places, plus 0.3 if there are any."""
        rows = math.ceil(n_panels / columns)
        n_empty = rows * columns - n_panels
        distance = abs(math.log(columns / rows / (4 / 3)))
        return distance + n_empty / n_panels + (0.3 if n_empty else 0.0)

    return min(range(1, n_panels + 1), key=badness)


def wrap(text: str, room_px: float, width_of: WidthPx) -> tuple[str, ...]:
    """Return a text broken at spaces into lines that fit the room. None begins with "·", which stands between notes."""
    lines = [""]
    for word in text.split(" "):
        longer = f"{lines[-1]} {word}".strip()
        if word != "·" and lines[-1] and width_of(longer, CAPTION_PX) > room_px:
            lines.append(word)
        else:
            lines[-1] = longer
    return tuple(lines)


_MIN_TICK = 1e-11
"""The end of a scale that is too short for ticks other than 0, as ticks are rounded to 12 decimals."""


def nice_ticks(top: float) -> tuple[float, ...]:
    """Return up to six round numbers from 0 to `top`, for a colour bar."""
    if not top > _MIN_TICK:
        return (0.0,)
    # The least round step of which at most five fit: a power of ten times 1, 2, 2.5, 5 or 10. 0.999 and 1.0001 make up
    # for rounding.
    min_step = top / 5
    unit = 10.0 ** math.floor(math.log10(min_step))
    step = next(unit * m for m in (1, 2, 2.5, 5, 10) if unit * m >= min_step * 0.999)
    n_steps = math.floor(top / step * 1.0001)
    return tuple(round(step * number, 12) for number in range(n_steps + 1))


def ticks_between(low: float, high: float) -> tuple[float, ...]:
    """Return round numbers from the lower end of a scale to its upper end; from -`high` to `high` if `low` < 0."""
    # A scale with both signs is symmetric about 0.
    if low < 0:
        ticks = nice_ticks(high)
        return (*(-tick for tick in reversed(ticks[1:])), *ticks)
    # Else shift ticks from 0 to the first multiple of their step within the scale.
    offsets = nice_ticks(high - low)
    if len(offsets) == 1:
        return (low,)
    step = offsets[1]
    first = math.ceil(low / step - 1e-9) * step
    return tuple(round(first + offset, 12) for offset in offsets if first + offset <= high * 1.0001)


def tile(
    n: int, columns: int, corner: tuple[float, float], pitch: tuple[float, float]
) -> list[tuple[float, float]]:
    """Return the upper left corners, (x, y), of n boxes in rows of `columns`, the first at `corner`.

    `pitch` is the distance from one corner to the next in x and in y.
    """
    x, y = corner
    across, down = pitch
    return [(x + box % columns * across, y + box // columns * down) for box in range(n)]
