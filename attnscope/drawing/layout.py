"""Compute the layout of figures in pixels: page size, positions of panels, font sizes, ticks. It draws nothing.

A panel is one map or plot of a figure, a grid of cells. A figure is laid out either for a screen, where its width
depends on its panels, or for paper of a fixed width (`Paper.is_fixed_width`), where the panels shrink to fit.
`page` and `maps` draw what is laid out here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

MARGIN_PX = 28
"""The margin at each side of a page."""

PAGE_WIDTH_PX = 1600
"""Width of a page on a screen. It grows if panels need more, and shrinks if they fill less than _MIN_FILLED_SHARE."""

NARROW_WIDTH_PX = 1000
"""Least width of a page on a screen whose panels are small even at their maximal size."""

TITLE_PX = 20.0
SUBTITLE_PX = 15.0
PANEL_TITLE_PX = 15.0
CAPTION_PX = 12.5
"""Font sizes. On paper, captions have the smallest letters."""

LINE_PX = 18
"""Distance from one line of text to the next."""

HEADER_PX = MARGIN_PX + 56
"""Height of the title and the subtitle of a page."""

PANEL_HEADER_PX = 26
"""Height of the title of a panel."""

MAX_LABEL_PX = 14.0
"""The largest font size of labels."""

MIN_LABEL_DISTANCE_PX = 9
"""The smallest distance between two labels at which they are legible on a screen."""

LABEL_FONT_SHARE = 0.84
"""The font size of labels / the distance from one label to the next."""

MAX_PAGE_PIXELS = 60_000_000
"""The largest number of pixels of a page on a screen. More take gigabytes to draw, and few programs open them."""

_MAX_HEIGHT_INCHES = 9.0
"""The largest height of a figure on paper. It fits one page."""

MIN_WIDTH_PX = 560
"""Least width of a page with few cells, so that its title fits."""

_NARROW_PX = 800  # a narrower page stacks elements that usually stand side by side
_MIN_FILLED_SHARE = 0.6  # a page whose panels need less than this share of PAGE_WIDTH_PX is narrower
_MIN_PANEL_PX = 110  # if panels would be narrower than this, fewer stand side by side
_MAX_LABELS_SHARE = 0.4  # the largest width of a panel's labels / the width of the panel with its labels
_CROP_PX = MARGIN_PX - 4  # the least width cropped off each side margin of a figure of exact width


@dataclass(frozen=True)
class Paper:
    """Hold the sizes of a figure's page and letters.

    Lengths are in pixels of the layout. A PNG file may have more or fewer pixels: an inch is `inch_px` pixels of the
    layout, and `dpi` pixels of the file.

    Attributes:
        width_px: The width of the page.
        is_fixed_width: Whether each figure has exactly the width `width_px` (for print); else the width depends on the
            panels (for a screen).
        min_px: The smallest font size; 0 = no limit.
        label_px: Token labels may be smaller than `min_px`, down to this font size, if every cell then gets its label.
            0 = they are never smaller than `min_px`.
        inch_px: The number of pixels of the layout per inch.
        dpi: The number of pixels of a PNG per inch.
        caption: Whether figures have a title, a subtitle and notes.
        crop_px: The width that is cropped from the layout's margin at the left and at the right.
        font: The font to try first: the name of an installed family, or a file; None = DejaVu Sans.
        failures: Sentences on parts of the study that failed. They stand at the foot of every figure.
    """

    width_px: int = PAGE_WIDTH_PX
    is_fixed_width: bool = False
    min_px: float = 0.0
    label_px: float = 0.0
    inch_px: float = 100.0
    dpi: int = 100
    caption: bool = True
    crop_px: float = 0.0
    font: str | None = None
    failures: tuple[str, ...] = ()

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
            points: The font size of captions. Only labels may have smaller letters.
            dpi: The number of pixels of a PNG per inch.
            caption: Whether figures have a title, a subtitle and notes.
            font: The font to try first.
            label_points: The font size of the smallest labels; 0 = `points`.
        """
        # Choose the scale so that captions, CAPTION_PX in the layout, have the wanted size in points (1/72 inch).
        inch_px = 72 * CAPTION_PX / points
        visible_px = inches * inch_px
        # Lay the figure out in whole pixels and with full margins; crop the excess, the same at both sides.
        width_px = math.ceil(visible_px) + 2 * _CROP_PX
        return cls(
            width_px=width_px,
            is_fixed_width=True,
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
        """Return whether each pixel of the layout is one pixel of a PNG: nothing is scaled, cropped or trimmed.

        The top of a figure without a caption is trimmed, possibly by a fraction of a pixel.
        """
        return self.inch_px == self.dpi and not self.crop_px and self.caption

    @property
    def max_height_px(self) -> float:
        """Return the largest height of a figure: the height of a printed page if the width is fixed, else infinity."""
        return (
            _MAX_HEIGHT_INCHES * self.inch_px + 2 * self.crop_vertical_px
            if self.is_fixed_width
            else math.inf
        )

    @property
    def crop_vertical_px(self) -> float:
        """Return the height cropped at the top and at the bottom, 10 px less than the width cropped at the sides.

        Letters reach about 10 px further into the margins at the top and at the bottom than into those at the sides.
        """
        return max(0.0, self.crop_px - 10)

    @property
    def room_px(self) -> int:
        """Return the width between the margins."""
        return self.width_px - 2 * MARGIN_PX

    @property
    def is_narrow(self) -> bool:
        """Return whether elements that usually stand side by side must be stacked."""
        return self.width_px < _NARROW_PX

    def figure_width_px(self, *wanted: float) -> int:
        """Return the width of a figure: the paper's width if it is fixed, else the largest wanted width."""
        return self.width_px if self.is_fixed_width else math.ceil(max(wanted))

    def round_px(self, size_px: float, min_size_px: int) -> float:
        """Round a size down to whole pixels, at least `min_size_px`; return it unchanged if the width is fixed."""
        return size_px if self.is_fixed_width else max(min_size_px, math.floor(size_px))

    def png_px(self, size_px: float) -> int:
        """Convert a length from pixels of the layout to whole pixels of a PNG, rounded up."""
        return max(1, math.ceil(size_px * self.dpi / self.inch_px))

    def legible_px(self, size_px: float) -> float:
        """Return a font size, raised to the paper's smallest font size if it is below."""
        return max(size_px, self.min_px)


SCREEN_PAPER = Paper()
"""The sizes of figures for a screen."""

TextWidth = Callable[[str, float], float]
"""A function from a text and its font size in pixels to the width of the text in pixels."""


@dataclass(frozen=True)
class Margins:
    """Hold the room around a panel in pixels, for its title, labels and axes."""

    left: float = 0
    above: float = 0
    right: float = 0
    below: float = 0


@dataclass(frozen=True, kw_only=True)
class PanelRequest:
    """Say which panels to lay out. All have the same size and the same numbers of rows and columns of cells.

    Attributes:
        n: The number of panels.
        shape: The numbers of rows and columns of cells in a panel.
        columns: The number of panels side by side; 0 = chosen so that the page is near 4:3.
        margins: A function from the width of a cell in pixels to the margins around a panel.
        names_px: Width of the names at the left of each row of panels.
        foot_px: Height of the labels below the last row of panels.
        gap_px: Distance from the right margin of one panel to the left margin of the next.
        top_px: The y at which the margins of the first row of panels begin.
        row_px: Height of a row of cells; 0 = cells are squares.
        max_panel_px: The largest width and height of a panel.
        max_cell_px: The largest width of a cell.
        min_cell_px: The smallest width of a cell on a screen. The page grows to keep it. If it is below 1, several
            cells may share a pixel. On paper, cells may shrink without a limit.
        max_height_px: The largest height of all rows of panels together.
        min_width_px: The smallest width of a page on a screen. But if several panels fill _MIN_FILLED_SHARE of
            PAGE_WIDTH_PX or more, the smallest width is PAGE_WIDTH_PX.
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
    max_panel_px: float = math.inf
    max_cell_px: float = 96
    min_cell_px: float = 1
    max_height_px: float = math.inf
    min_width_px: float = MIN_WIDTH_PX


@dataclass(frozen=True)
class PanelLayout:
    """Hold the sizes and positions of panels, all in pixels of the layout.

    Attributes:
        width_px: The width of the page.
        zoom: The size of titles and notes / their size on a page PAGE_WIDTH_PX wide.
        columns: The number of panels side by side.
        cell_size: Width and height of a cell.
        panel_size: Width and height of a panel, without margins.
        pitch_px: Distance from the left edge of a panel to the left edge of the next panel in its row.
        margins: The margins around each panel.
        corners: The upper left corner of each panel, (x, y), without margins, row by row.
        bottom_y: The lower edge of the last row of panels, including its margins and `foot_px`.
    """

    width_px: int
    zoom: float
    columns: int
    cell_size: tuple[float, float]
    panel_size: tuple[float, float]
    pitch_px: float
    margins: Margins
    corners: Sequence[tuple[float, float]]
    bottom_y: int


def arrange_panels(request: PanelRequest, paper: Paper) -> PanelLayout:
    """Place panels as large as the page allows. On a screen, the page grows if cells would be too small.

    If panels are small, fewer stand side by side, unless the request sets the columns.
    """
    # While panels are narrower than _MIN_PANEL_PX, try one column of panels less, and stop when cells do not grow.
    panel_columns = request.columns or choose_n_columns(request.n)
    cell_rows, cell_columns = request.shape
    cell_width = _max_cell_width(request, panel_columns, paper)
    while not request.columns and panel_columns > 1 and cell_width * cell_columns < _MIN_PANEL_PX:
        larger = _max_cell_width(request, panel_columns - 1, paper)
        if larger <= cell_width:
            break
        panel_columns -= 1
        cell_width = larger
    margins = _panel_margins(request, cell_width, panel_columns, paper)
    cell_height = request.row_px or cell_width
    panel_width = cell_columns * cell_width
    panel_height = cell_rows * cell_height
    # On a screen, round a panel down to whole pixels. The 1e-4 keeps a rounding error from losing a pixel.
    if not paper.is_fixed_width:
        panel_width = max(1, math.floor(panel_width + 1e-4))
        panel_height = max(1, math.floor(panel_height + 1e-4))
    # Use the usual width if several panels fill enough of it; else the page is as narrow as the panels allow.
    needed = _needed_width(request, panel_columns, panel_width, margins)
    min_width = request.min_width_px
    if request.n > 1 and needed >= _MIN_FILLED_SHARE * PAGE_WIDTH_PX:
        min_width = PAGE_WIDTH_PX
    width = paper.figure_width_px(min_width, needed)
    # Titles grow with a wide page, up to a limit.
    zoom = min(2.5, max(1.0, width / PAGE_WIDTH_PX))
    # Distribute the unused width evenly over the columns of panels.
    spare = max(0, math.floor(width - needed)) // panel_columns
    above = margins.above * zoom
    pitch_x = margins.left + panel_width + margins.right + request.gap_px + spare
    pitch_y = above + panel_height + margins.below
    # If the caller chose the columns, move the rows of panels apart too.
    if request.columns and not paper.is_fixed_width:
        pitch_y += min(spare, 40)
    top = request.top_px + HEADER_PX * (zoom - 1)
    x = MARGIN_PX + request.names_px + margins.left + spare // 2
    y = top + above
    # On a screen, panels begin at whole pixels.
    if not paper.is_fixed_width:
        x = round(x)
        y = round(y)
        pitch_x = math.ceil(pitch_x)
        pitch_y = math.ceil(pitch_y)
    corners = grid_corners(request.n, panel_columns, (x, y), (pitch_x, pitch_y))
    bottom = math.ceil(top + math.ceil(request.n / panel_columns) * pitch_y + request.foot_px)
    cell = (cell_width, cell_height)
    panel = (panel_width, panel_height)
    return PanelLayout(width, zoom, panel_columns, cell, panel, pitch_x, margins, corners, bottom)


def _max_cell_width(request: PanelRequest, panel_columns: int, paper: Paper) -> float:
    """Return the largest width of a cell at which panels fit the page and stay within the limits of the request."""
    cell_rows, cell_columns = request.shape
    panel_rows = math.ceil(request.n / panel_columns)
    # Unless the caller chose the columns, all panels must fit on one page of paper, with 100 px below for notes.
    max_height = request.max_height_px
    if not request.columns:
        max_height = min(max_height, paper.max_height_px - request.top_px - 100)

    def fits(cell_width: float) -> bool:
        margins = _panel_margins(request, cell_width, panel_columns, paper)
        needed = _needed_width(request, panel_columns, cell_columns * cell_width, margins)
        # With a fixed `row_px`, the height does not depend on the width of cells, so there is nothing to check.
        if request.row_px:
            return needed <= paper.width_px
        height = panel_rows * (margins.above + cell_rows * cell_width + margins.below) + request.foot_px
        return needed <= paper.width_px and height <= max_height

    # Find the largest width that fits by bisection, to about 1e-4 pixels.
    low = 0.0
    longest = cell_columns if request.row_px else max(request.shape)
    high = min(request.max_cell_px, request.max_panel_px / longest)
    if not fits(high):
        for _ in range(24):
            middle = (low + high) / 2
            if fits(middle):
                low = middle
            else:
                high = middle
        high = low
    if paper.is_fixed_width:
        return max(high, 0.01)
    # On a screen, a cell is a whole number of pixels wide, or less than 1 pixel.
    whole = math.floor(high + 1e-4) if high >= 1 else high
    return max(request.min_cell_px, whole)


def _panel_margins(request: PanelRequest, cell_width: float, columns: int, paper: Paper) -> Margins:
    """Return the margins around a panel. On paper, limit the left margin to _MAX_LABELS_SHARE of the panel's width."""
    margins = request.margins(cell_width)
    if not paper.is_fixed_width:
        return margins
    width_per_panel = (paper.room_px - request.names_px - (columns - 1) * request.gap_px) / columns
    return replace(margins, left=min(margins.left, width_per_panel * _MAX_LABELS_SHARE))


def _needed_width(request: PanelRequest, columns: int, panel_width: float, margins: Margins) -> float:
    """Return the width of a page with `columns` panels side by side."""
    panels = columns * (margins.left + panel_width + margins.right) + (columns - 1) * request.gap_px
    return 2 * MARGIN_PX + request.names_px + panels


def choose_label_font(cell_px: float, paper: Paper) -> tuple[int, float]:
    """Return the number of cells per label and the font size of labels, for cells `cell_px` high or wide."""
    # On paper, the smallest font size decides how close labels may stand. On a screen, MIN_LABEL_DISTANCE_PX does.
    min_distance = paper.min_px / LABEL_FONT_SHARE if paper.min_px else MIN_LABEL_DISTANCE_PX
    step = max(1, math.ceil(min_distance / cell_px))
    # Use smaller letters, down to `paper.label_px`, if each cell can then have its label.
    size = cell_px * LABEL_FONT_SHARE
    if step > 1 and 0 < paper.label_px <= size:
        return 1, size
    return step, paper.min_px or min(MAX_LABEL_PX, cell_px * step * LABEL_FONT_SHARE)


def choose_n_columns(n_panels: int) -> int:
    """Return the number of panels side by side that minimises a cost: shapes far from 4:3 and empty slots cost.

    A slot is empty if the last row has fewer panels than the other rows.
    """

    def cost(columns: int) -> float:
        """Return |log of the shape / 4:3|, plus the share of empty slots, plus 0.3 if any slot is empty."""
        rows = math.ceil(n_panels / columns)
        n_empty = rows * columns - n_panels
        distance = abs(math.log(columns / rows / (4 / 3)))
        return distance + n_empty / n_panels + (0.3 if n_empty else 0.0)

    return min(range(1, n_panels + 1), key=cost)


def wrap_text(text: str, room_px: float, width_of: TextWidth) -> tuple[str, ...]:
    """Break a text at spaces into lines at most `room_px` wide. No line begins with "·", the separator of notes."""
    lines = [""]
    for word in text.split(" "):
        longer = f"{lines[-1]} {word}".strip()
        if word != "·" and lines[-1] and width_of(longer, CAPTION_PX) > room_px:
            lines.append(word)
        else:
            lines[-1] = longer
    return tuple(lines)


_MIN_SCALE_END = 1e-11
"""A scale that ends at or below this value gets only the tick 0, as ticks are rounded to 12 decimals."""


def nice_ticks(top: float) -> tuple[float, ...]:
    """Return up to six round numbers from 0 to `top`, for a colour bar."""
    # `not >` also catches NaN.
    if not top > _MIN_SCALE_END:
        return (0.0,)
    # Choose the smallest round step that gives at most five steps. Round steps are powers of ten times 1, 2, 2.5 or 5.
    # The factors 0.999 and 1.0001 allow for rounding errors.
    min_step = top / 5
    unit = 10.0 ** math.floor(math.log10(min_step))
    step = next(unit * m for m in (1, 2, 2.5, 5, 10) if unit * m >= min_step * 0.999)
    n_steps = math.floor(top / step * 1.0001)
    return tuple(round(step * number, 12) for number in range(n_steps + 1))


def ticks_between(low: float, high: float) -> tuple[float, ...]:
    """Return round numbers from `low` to `high`, the ends of a scale; from -`high` to `high` if `low` < 0."""
    # A scale with negative values is symmetric about 0.
    if low < 0:
        ticks = nice_ticks(high)
        return (*(-tick for tick in reversed(ticks[1:])), *ticks)
    # Otherwise take the ticks of a scale from 0, and shift them to the first multiple of their step above `low`.
    offsets = nice_ticks(high - low)
    if len(offsets) == 1:
        return (low,)
    step = offsets[1]
    start = math.ceil(low / step - 1e-9) * step
    return tuple(round(start + offset, 12) for offset in offsets if start + offset <= high * 1.0001)


def grid_corners(
    n: int, columns: int, corner: tuple[float, float], pitch: tuple[float, float]
) -> list[tuple[float, float]]:
    """Return the upper left corners, (x, y), of n boxes in a grid with `columns` columns, row by row.

    The first box is at `corner`. `pitch` is the distance from one corner to the next in x and in y.
    """
    x, y = corner
    pitch_x, pitch_y = pitch
    return [(x + box % columns * pitch_x, y + box // columns * pitch_y) for box in range(n)]
