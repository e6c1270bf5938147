"""The layout of figures in pixels: plain numbers, no drawing."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

MIN_WIDTH_PX = 1600
MIN_SINGLE_PX = 1200  # height that a figure of one head aims at
NARROWEST_PX = 1000  # of an overview whose maps are too narrow to fill a page
MARGIN_PX = 28
TITLE_PX = 20.0
SUBTITLE_PX = 15.0
PANEL_TITLE_PX = 15.0
CAPTION_PX = 12.5
LINE_PX = 18
MAX_LABEL_PX = 14.0
LEGIBLE_PX = 9  # distance between two labels that can still be read
MOST_PX = 60_000_000  # a figure of more takes gigabytes to draw, and few programs open it
LARGEST_MAP_PX = 1000  # a map of many tokens grows up to this, then its labels are thinned

HEADER_PX = MARGIN_PX + 56
PANEL_HEADER_PX = 26
_BAR_WIDTH_PX, _BAR_HEIGHT_PX = 420, 14
_GAP_PX = 26
_NARROW_PX = 800
_LEAST_PX = 560  # of a figure of few cells
_MOSTLY_EMPTY = 0.6
_LARGEST_CELL_PX = 96
_LABEL_SHARE = 0.84  # of the distance between two labels that their font size is
_LABELS_AT_MOST = 0.4  # of the width of a map with its labels
_SMALL_MAP_PX = 110
_MOST_BARS = 24
TALLEST_INCHES = 9.0  # of a figure on a page of paper

_CROP_PX = MARGIN_PX - 4  # what a figure of a given width does without at each side


@dataclass(frozen=True)
class Paper:
    """The page of a figure; all in pixels of the layout, which need not be those of the file."""

    width_px: int = MIN_WIDTH_PX
    fixed: bool = False  # figures are exactly that wide; else they grow and shrink
    least_px: float = 0.0  # size of the smallest letters; 0 = any
    inch_px: float = 100.0
    dpi: int = 100  # pixels of a PNG per inch
    title: bool = True
    crop_px: float = 0.0  # margin that is laid out but not shown, left and right; above and below it is less
    font: str | None = None  # taken first: the name of an installed family, or a file
    failed: tuple[str, ...] = ()  # parts of the study that failed: every figure says so at its foot

    @classmethod
    def of_width(cls, inches: float, points: float, dpi: int, title: bool, font: str | None) -> Paper:
        """Paper of an exact width, on which captions, the smallest letters, have a size in points."""
        inch_px = 72 * CAPTION_PX / points
        visible = inches * inch_px
        width = math.ceil(visible) + 2 * _CROP_PX
        return cls(width, True, CAPTION_PX, inch_px, dpi, title, (width - visible) / 2, font)

    @property
    def is_screen(self) -> bool:
        """Whether a pixel of the layout is one of the file."""
        return self.inch_px == self.dpi and not self.crop_px and self.title

    @property
    def most_px(self) -> float:
        """How tall a figure may be that could be two: as tall as the text of a page, where its width is fixed."""
        return TALLEST_INCHES * self.inch_px + 2 * self.crop_ends_px if self.fixed else math.inf

    @property
    def crop_ends_px(self) -> float:
        """Margin that is not shown above and below: the title and the last line of notes reach into it."""
        return max(0.0, self.crop_px - 10)

    @property
    def room_px(self) -> int:
        """Width between the margins."""
        return self.width_px - 2 * MARGIN_PX

    @property
    def is_narrow(self) -> bool:
        """Whether what usually stands side by side has to stand one below the other."""
        return self.width_px < _NARROW_PX

    def width_for(self, *wanted: float) -> int:
        """Width of a figure: the largest of the wanted ones, unless its width is fixed."""
        return self.width_px if self.fixed else math.ceil(max(wanted))

    def whole(self, size_px: float, least: int = 1) -> float:
        """A size in whole pixels, and at least `least`; the size itself where the width is fixed."""
        return size_px if self.fixed else max(least, math.floor(size_px))

    def image_px(self, size_px: float) -> int:
        """Pixels of an image that is so wide on the layout: as many as in the PNG."""
        return max(1, math.ceil(size_px * self.dpi / self.inch_px))

    def letters(self, size_px: float) -> float:
        """A font size, no smaller than letters may be."""
        return max(size_px, self.least_px)


SCREEN = Paper()

WidthPx = Callable[[str, float], float]
"""Gives the width of a text at a font size, all in pixels."""

Widest = Callable[[float], float]
"""Gives the width of the widest of some labels at a font size."""


@dataclass(frozen=True)
class Surroundings:
    """The notes and the meaning of colours around the maps of a figure, and its paper."""

    notes: Sequence[str]
    width_of: WidthPx
    meaning: str = ""  # of the colours: the first of the notes where it has no room beside the colour bar
    paper: Paper = SCREEN

    def with_note(self, note: str) -> Surroundings:
        """The same with one more note."""
        return replace(self, notes=[*self.notes, note])


@dataclass(frozen=True)
class _Panels:
    width_px: int
    height_px: int
    corners: Sequence[tuple[float, float]]  # upper left, of each panel
    label_px: float  # font size of token labels
    label_room_px: float  # width at which labels at the left are cut
    footer_y: int  # middle of the first line of notes
    footer: tuple[str, ...]


@dataclass(frozen=True)
class Grid(_Panels):
    """Maps of heads side by side, with what stands around them; `label_px` is 0 where tokens have no labels."""

    cell_px: float  # width and height of a cell of a map
    label_step: int  # every n-th token has its label
    zoom: float  # how much larger than on a page of the least width titles and notes are
    bar: tuple[int, int, int, int]  # the colour bar: x, y, width, height
    number_px: float  # font size of a weight with two decimals in its cell; 0 = there is no room for it
    says_meaning: bool  # whether the colours' meaning has room beside the bar; else the notes begin with it


@dataclass(frozen=True)
class Bars(_Panels):
    """Bars of several heads side by side; the keys stand at the left of each row of heads."""

    columns: int
    panel_px: int  # width of a head's bars at weight 1
    bar_px: int  # from bar to bar

    @property
    def numbers_fit(self) -> bool:
        """Whether the weight can stand at the end of a bar."""
        return self.panel_px >= 160 and self.bar_px >= 14


def columns_for(n_panels: int) -> int:
    """How many panels stand side by side: near 4:3 as a whole, with as few empty places as that allows."""

    def badness(columns: int) -> float:
        rows = math.ceil(n_panels / columns)
        empty = rows * columns - n_panels
        return abs(math.log(columns / rows / (4 / 3))) + empty / n_panels + (0.3 if empty else 0.0)

    return min(range(1, n_panels + 1), key=badness)


def labelled_grid(
    n_panels: int, shape: tuple[int, int], widest: tuple[Widest, Widest], around: Surroundings, pool: int = 1
) -> Grid:
    """A grid of maps of a shape (rows, columns), each with token labels at the left and below.

    `widest` is of the labels of rows and of columns; a row or column of a map stands for `pool` tokens.
    """
    (n_queries, n_keys), paper = shape, around.paper
    spaced = paper.least_px / _LABEL_SHARE or LEGIBLE_PX  # between two labels

    def sizes(cell: float) -> tuple[int, float, int, int]:
        step = max(1, math.ceil(spaced / cell))
        font = paper.least_px or min(MAX_LABEL_PX, cell * step * _LABEL_SHARE)
        return step, font, math.ceil(widest[0](font)) + 8, math.ceil(widest[1](font)) + 10

    if paper.fixed:
        columns, cell, left = _fill_width(n_panels, shape, sizes(1.0)[2], sizes(1.0)[3], paper)
    else:
        columns = columns_for(n_panels)
        cell, left = _fill_page(n_panels, shape, sizes), 0
    rows = math.ceil(n_panels / columns)
    step, font, beside, below = sizes(cell)
    left = left or beside
    needed = 2 * MARGIN_PX + columns * (left + n_keys * cell) + (columns - 1) * _GAP_PX
    # Of maps that fill only part of a page, the page is no wider than they need.
    least = _LEAST_PX if n_panels == 1 or needed < _MOSTLY_EMPTY * MIN_WIDTH_PX else MIN_WIDTH_PX
    total = paper.width_for(least, needed)
    spare = math.floor(total - needed)
    zoom = _zoom(total)
    header, panel_header = round(HEADER_PX * zoom), round(PANEL_HEADER_PX * zoom)
    # What is left of the page's width goes between the maps, not to one side.
    pitch_x = left + n_keys * cell + _GAP_PX + spare // columns
    pitch_y = panel_header + n_queries * cell + below + 14
    corner = MARGIN_PX + left + spare // columns // 2, header + panel_header
    corners = tile(n_panels, columns, corner, (pitch_x, pitch_y))
    if step * pool > 1:
        around = around.with_note(f"one label for {step * pool} tokens")
    bottom = math.ceil(header + rows * pitch_y)
    return _with_footer(total, bottom, cell, corners, around, (font, step, left - 8.0))


def _fill_page(n_panels: int, shape: tuple[int, int], sizes: Callable[[float], tuple[int, float, int, int]]) -> int:
    """Width of a cell at which a page of the usual width is full; it grows where labels would be unreadable."""
    (n_queries, n_keys), columns = shape, columns_for(n_panels)
    rows = math.ceil(n_panels / columns)

    def width(cell: int) -> int:
        return 2 * MARGIN_PX + columns * (sizes(cell)[2] + n_keys * cell) + (columns - 1) * _GAP_PX

    def height(cell: int) -> int:
        return HEADER_PX + rows * (PANEL_HEADER_PX + n_queries * cell + sizes(cell)[3] + 14)

    cell = max(2, min(LEGIBLE_PX, LARGEST_MAP_PX // max(shape)))
    while cell < _LARGEST_CELL_PX and width(cell + 1) <= MIN_WIDTH_PX:
        if n_panels <= 2 and height(cell + 1) > MIN_SINGLE_PX:
            break
        cell += 1
    return cell


def _fill_width(n_panels: int, shape: tuple[int, int], left: int, below: int, paper: Paper) -> tuple[int, float, int]:
    """Maps in a row, width of a cell and room for labels at which the width is full.

    Fewer maps stand side by side where they would be small, as long as the figure fits a page of paper.
    """
    n_queries, n_keys = shape

    def sizes(columns: int) -> tuple[float, int]:
        pitch = (paper.room_px - (columns - 1) * _GAP_PX) / columns
        room = max(8, min(left, round(pitch * _LABELS_AT_MOST)))
        cell = min((pitch - room) / n_keys, _LARGEST_CELL_PX)
        rows = math.ceil(n_panels / columns)
        around = rows * (PANEL_HEADER_PX + below + 14) + HEADER_PX + 100
        return min(cell, max(1.0, (TALLEST_INCHES * paper.inch_px - around) / rows / n_queries)), room

    choices = [columns_for(n_panels)]
    while choices[-1] > 1 and sizes(choices[-1])[0] * n_keys < _SMALL_MAP_PX:
        choices.append(choices[-1] - 1)
    columns = max(choices, key=lambda columns: (min(sizes(columns)[0] * n_keys, _SMALL_MAP_PX), columns))
    return columns, *sizes(columns)


def pooled_grid(
    n_panels: int, tokens: tuple[int, int], widest: tuple[Widest, Widest], around: Surroundings
) -> tuple[int, tuple[int, int], Grid]:
    """A `labelled_grid` for maps of any size: if the figure would be too large to draw, its cells are pooled.

    Returns:
        How many tokens a cell stands for in each direction, the rows and columns of a map, and the grid.
    """
    pool = 1
    while True:
        shape = (-(-tokens[0] // pool), -(-tokens[1] // pool))
        noted = around.with_note(pool_note(pool)) if pool > 1 else around
        grid = labelled_grid(n_panels, shape, widest, noted, pool)
        if grid.width_px * grid.height_px <= MOST_PX or max(shape) == 1:
            return pool, shape, grid
        pool += 1


def pool_note(pool: int) -> str:
    """The note on a figure whose cells stand for several tokens."""
    return f"a cell shows the largest weight of {pool} × {pool} tokens"


def overview_grid(n_rows: int, n_columns: int, shape: tuple[int, int], around: Surroundings, left: int = 52) -> Grid:
    """A grid of small maps, each of a shape (rows, columns), without token labels; `left` of it rows have names."""
    paper = around.paper
    gap = 8 if not paper.is_narrow else 4
    room = (paper.room_px - left - (n_columns - 1) * gap) / n_columns
    # As large as fits the page, but not huge where a layer has few heads. Maps of few keys, such as those from a long
    # target to a short text, may be as tall as the page has room for, and the page becomes narrower around them.
    is_tall = shape[0] > shape[1] and not paper.fixed
    tallest = max(min(room, 300), min((MIN_WIDTH_PX - HEADER_PX) / n_rows, 480) if is_tall else 0)
    cell = paper.whole(min(min(room, 300) / shape[1], tallest / shape[0]))
    content = math.ceil(left + n_columns * (shape[1] * cell + gap) - gap)
    page = MIN_WIDTH_PX
    if is_tall:
        page = min(page, math.ceil(max(NARROWEST_PX, 2 * MARGIN_PX + content + n_columns * shape[1] * cell)))
    total = paper.width_for(page, 2 * MARGIN_PX + content)
    spare = (total - 2 * MARGIN_PX - content) // n_columns
    pitch_x, pitch_y = shape[1] * cell + gap + spare, shape[0] * cell + gap
    zoom = _zoom(total)
    header = round((HEADER_PX + 30) * zoom)
    if not paper.fixed and not is_tall:
        pitch_y += min(spare, 40)  # as far apart as columns are
    corners = tile(n_rows * n_columns, n_columns, (MARGIN_PX + left + spare // 2, header), (pitch_x, pitch_y))
    bottom = math.ceil(header + n_rows * pitch_y)
    return _with_footer(total, bottom, cell, corners, around, (0.0, 1, 0.0))


def _with_footer(
    width: int,
    bottom: int,
    cell: float,
    corners: Sequence[tuple[float, float]],
    around: Surroundings,
    labels: tuple[float, int, float],
) -> Grid:
    """The grid with its colour bar and notes; `labels`: their font size, the step from one to the next, their room."""
    zoom, paper, (font, step, label_room) = _zoom(width), around.paper, labels
    beside = width >= _NARROW_PX
    parts = around.notes if beside or not around.meaning else [around.meaning, *around.notes]
    lines = wrap(" · ".join(parts), (width - 2 * MARGIN_PX) / zoom, around.width_of)
    bar_px = min(_BAR_WIDTH_PX * zoom, width - 2 * MARGIN_PX - 20)
    inset = 8 if paper.fixed else 0  # half of its first number
    bar = (MARGIN_PX + inset, bottom + 12, round(bar_px), round(_BAR_HEIGHT_PX * zoom))
    footer_y = bottom + 12 + round((_BAR_HEIGHT_PX + 40) * zoom)
    return Grid(
        width_px=width,
        height_px=footer_y + round((len(lines) - 1) * LINE_PX * zoom) + MARGIN_PX,
        cell_px=cell,
        corners=corners,
        label_px=font,
        label_step=step,
        zoom=zoom,
        bar=bar,
        footer_y=footer_y,
        footer=lines,
        number_px=0.0 if cell < max(26, 2.5 * paper.least_px) else paper.letters(min(14.0, cell * 0.36)),
        label_room_px=label_room,
        says_meaning=beside,
    )


def bar_grid(n_panels: int, columns: int, n_bars: int, widest: Widest, around: Surroundings) -> Bars:
    """Places the bars of several heads, `columns` of them side by side, with `n_bars` keys each."""
    paper, rows = around.paper, math.ceil(n_panels / columns)
    bar = max(_bar_pitch(paper), min(30, 1000 // (rows * n_bars)))
    font = paper.least_px or min(MAX_LABEL_PX, bar * 0.82)
    left, gap, end = math.ceil(widest(font)) + 10, 14 if columns > 4 else 60, 30
    if paper.fixed:
        left, gap, end = min(left, paper.room_px // 3), 8 if columns > 2 else 20, 0
    panel = min(900, (paper.room_px - left - (columns - 1) * gap) // columns)
    panel = max(8 if paper.fixed else 40, panel)
    pitch_y = PANEL_HEADER_PX + n_bars * bar + 20
    corner = MARGIN_PX + left, HEADER_PX + PANEL_HEADER_PX
    needed = 2 * MARGIN_PX + left + columns * (panel + gap) - gap + end
    width = paper.width_for(MIN_WIDTH_PX if columns > 1 else 0, needed)
    lines = wrap(" · ".join(around.notes), width - 2 * MARGIN_PX, around.width_of)
    footer_y = HEADER_PX + rows * pitch_y + 16
    return Bars(
        width_px=width,
        height_px=footer_y + (len(lines) - 1) * LINE_PX + MARGIN_PX,
        corners=tile(n_panels, columns, corner, (panel + gap, pitch_y)),
        columns=columns,
        panel_px=panel,
        bar_px=bar,
        label_px=font,
        label_room_px=left - 10.0,
        footer_y=footer_y,
        footer=lines,
    )


def most_bars(rows: int, paper: Paper) -> int:
    """How many keys bars are drawn of, in some rows of heads."""
    if not paper.fixed:
        return _MOST_BARS
    tall = (TALLEST_INCHES * paper.inch_px - HEADER_PX - 80) / rows - PANEL_HEADER_PX - 20
    return max(3, min(_MOST_BARS, math.floor(tall / _bar_pitch(paper))))


def _bar_pitch(paper: Paper) -> int:
    return max(12, math.ceil(paper.least_px / 0.82))


def _zoom(width: int) -> float:
    """Titles of a figure that is wider than a page grow with it, so that they can be read when it is shrunk to fit."""
    return min(2.5, max(1.0, width / MIN_WIDTH_PX))


def wrap(text: str, room_px: float, width_of: WidthPx) -> tuple[str, ...]:
    """A text broken into lines that fit the room, at spaces; a dot between two notes stands at the end of a line."""
    lines = [""]
    for word in text.split(" "):
        longer = f"{lines[-1]} {word}".strip()
        if word != "·" and lines[-1] and width_of(longer, CAPTION_PX) > room_px:
            lines.append(word)
        else:
            lines[-1] = longer
    return tuple(lines)


def pool_factor(n_tokens: int, n_heads: int) -> int:
    """How many tokens share a pixel of an overview, so that the figure stays within two screens' width."""
    room = max(96, MIN_WIDTH_PX * 2 // n_heads)
    return max(1, math.ceil(n_tokens / room))


_LEAST_TICK = 1e-11
"""Scales that end here or below have one tick: ticks are rounded to 12 decimals."""


def nice_ticks(top: float) -> tuple[float, ...]:
    """Up to six round numbers from 0 to `top`, for a colour bar."""
    if not top > _LEAST_TICK:
        return (0.0,)
    raw = top / 5
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(unit * m for m in (1, 2, 2.5, 5, 10) if unit * m >= raw * 0.999)
    return tuple(round(step * i, 12) for i in range(math.floor(top / step * 1.0001) + 1))


def ticks_between(low: float, high: float) -> tuple[float, ...]:
    """Round numbers from one end of a scale to the other; the same on both sides of 0 where it has two signs."""
    steps = nice_ticks(high - max(low, 0.0))
    if low < 0:
        return (*(-tick for tick in reversed(steps[1:])), *steps)
    if len(steps) == 1:
        return (low,)
    first = math.ceil(low / steps[1] - 1e-9) * steps[1]
    return tuple(round(first + step, 12) for step in steps if first + step <= high * 1.0001)


def tile(n: int, columns: int, corner: tuple[float, float], pitch: tuple[float, float]) -> list[tuple[float, float]]:
    """Upper left corners, (x, y), of boxes in rows; `pitch` is how far apart they are across and down."""
    return [(corner[0] + at % columns * pitch[0], corner[1] + at // columns * pitch[1]) for at in range(n)]
