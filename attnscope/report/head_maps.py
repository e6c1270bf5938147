"""Draw maps of heads: a large one of one column with numbers, or small ones of several columns side by side.

Rows are layers, columns are heads. Kinds of attention have maps of their own, one below the other. Maps of roles
(`questions.head_roles`) place their cells by the same functions.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from attnscope.drawing import layout
from attnscope.drawing.canvas import FAINT, INK, Box, colormap
from attnscope.drawing.inks import blend_colors, colormap_hex, text_color_on
from attnscope.drawing.lettering import Lettering
from attnscope.drawing.page import CellNumber, FigurePage
from attnscope.errors import amount
from attnscope.report.blocks import HeadMap, Report
from attnscope.report.numbers import UNDEFINED, tick_texts, writer_for_all
from attnscope.report.wording import printable, title_of
from attnscope.results.table import Table

ONE_WAY, TWO_WAYS = "Blues", "RdBu_r"
"""The colormaps for numbers of one sign, and of both signs."""

LEFT_PX = 50
"""Room at the left of a map, for the names of layers."""

TOP_PX = layout.MARGIN_PX + 62
"""Where the maps of a page begin, below its title."""

KIND_PX = 54
"""Room above a map for the name of its kind of attention, where there are several kinds."""

HEAD_NAMES_PX = 26
"""Room above a map for the names of heads."""

_FEW_MAPS = 9
_FEW_COLUMNS = 3
_MANY_COLUMNS = 5
"""Up to nine small maps stand three in a row; more maps stand five in a row."""

_SMALL_PX = 1500
"""Width of a row of small maps on a screen."""

_BESIDE_PX = 80
"""Room at both sides of a small map: names of layers at the left, a gap at the right."""

_ABOVE_AND_BELOW_PX = 142
"""Room above and below a small map: title and names of heads above, the colour bar below."""

_MIN_ACROSS_PX = 230
"""Least distance from the left edge of a small map to that of the next on a screen, so that titles have room."""

_TALLEST_PX = 3000
"""Most height of a page of small maps on a screen; further maps go on another page."""

_PALE = 0.35
"""How much of its colour a pale cell keeps, 0 to 1; the rest is white."""

_INTERVAL_SHARE = 0.7
"""The letters of an interval are at most so large, relative to those of its number."""

_MIN_INTERVAL_PX = 9.0
"""Intervals whose letters would be smaller are left out."""

_MAX_NUMBERS = 100
_N_LARGEST = 10
"""A large map of up to 100 cells has all their numbers; one of more cells has the ten largest."""

_BASELINE = "▲ uniform: the value of a head that attends to all keys that the mask allows alike"


@dataclass(frozen=True)
class ColourScale:
    """The colours of the numbers of a column. A baseline is what a number would be under uniform attention.

    Attributes:
        low: The number with the first colour. Usually 0; -`high` if any number is negative; a round number just below
            the smallest one if all are more than half of the largest.
        high: The number with the last colour: the largest absolute number of all heads and baselines.
        baseline: The smallest and the largest baseline of all heads; both NaN if the column has none.
        has_values: Whether any number is defined.
        write: Writes a number of the column, each with the same decimals.
    """

    low: float
    high: float
    baseline: tuple[float, float]
    has_values: bool
    write: Callable[[float], str]

    @property
    def cmap(self) -> str:
        """Return the name of the colormap."""
        return TWO_WAYS if self.low < 0 else ONE_WAY

    def fraction(self, value: float) -> float:
        """Return how far along the colours a number is, from 0, the first colour, to 1, the last."""
        return min(1.0, max(0.0, (value - self.low) / (self.high - self.low)))

    @property
    def has_baseline(self) -> bool:
        """Return whether the column has a baseline."""
        return math.isfinite(self.baseline[0])

    @property
    def baseline_text(self) -> str:
        """Return the baseline of all heads, such as "0.03", or "0.02 to 0.09" if it depends on the head."""
        smallest, largest = map(self.write, self.baseline)
        return smallest if smallest == largest else f"{smallest} to {largest}"


def scale_of(table: Table, name: str) -> ColourScale:
    """Return the colours of a column: one scale for all kinds of attention, which holds values and baselines."""
    values = table[name][np.isfinite(table[name])]
    baselines = table.companion(name, "baseline")
    baselines = baselines[np.isfinite(baselines)]
    baseline = (math.nan, math.nan)
    if baselines.size:
        baseline = (float(baselines.min()), float(baselines.max()))
    numbers = np.concatenate([values, baselines])
    largest = float(np.abs(numbers).max(initial=0.0)) or 1.0
    smallest = float(numbers.min(initial=math.inf))
    low = 0.0
    if smallest < 0:
        low = -largest
    elif largest / 2 < smallest < largest:
        # All numbers are far from 0: colours begin at a multiple of the step between round ticks, below them.
        step = layout.nice_ticks(largest - smallest)[1]
        low = max(0.0, math.floor(smallest / step) * step)
    return ColourScale(low, largest, baseline, bool(values.size), writer_for_all(table[name]))


class HeadGrid(NamedTuple):
    """The layers that are the rows of a map of heads, and the head indices that are its columns."""

    layers: list[int]
    heads: list[int]


def grids_of(table: Table) -> dict[str, HeadGrid]:
    """Return the rows and columns of the map of each kind of attention in a table of heads."""
    grids = {}
    for kind in dict.fromkeys(table["kind"].tolist()):
        heads = table.select(table["kind"] == kind)
        grids[kind] = HeadGrid(np.unique(heads["layer"]).tolist(), np.unique(heads["head"]).tolist())
    return grids


def count_cells(grids: Mapping[str, HeadGrid]) -> tuple[int, int]:
    """Return how many cells the maps of all kinds, one below the other, have across (at most) and down (in all)."""
    n_across = max(len(grid.heads) for grid in grids.values())
    n_down = sum(len(grid.layers) for grid in grids.values())
    return n_across, n_down


@dataclass(frozen=True)
class HeadCells:
    """The places of the cells of all heads on a page, in pixels.

    Attributes:
        grids: The rows and columns of the map of each kind of attention.
        map_corners: The upper left corner, (x, y), of the map of each kind.
        size: Width and height of a cell, with the gap to the next one.
    """

    grids: Mapping[str, HeadGrid]
    map_corners: Mapping[str, tuple[float, float]]
    size: tuple[float, float]

    def corners_of(self, table: Table) -> list[tuple[float, float]]:
        """Return the upper left corner of the cell of each row of a table of heads."""
        width, height = self.size
        corners = []
        for kind, (layer, head) in zip(table["kind"].tolist(), table.layer_heads, strict=True):
            x, y = self.map_corners[kind]
            layers, heads = self.grids[kind]
            corners.append((x + heads.index(head) * width, y + layers.index(layer) * height))
        return corners


def place_kinds(
    grids: Mapping[str, HeadGrid],
    size: tuple[float, float],
    left: float = layout.MARGIN_PX,
    top: float = TOP_PX,
) -> tuple[HeadCells, float]:
    """Place the cells of all kinds of attention, one kind below the other.

    Args:
        grids: The rows and columns of the map of each kind.
        size: Width and height of a cell.
        left: The left edge of the names of layers.
        top: The upper edge of all names and maps.

    Returns:
        The cells, and the lower edge of the last map.
    """
    corners = {}
    y = top
    for kind, grid in grids.items():
        y += HEAD_NAMES_PX + (KIND_PX if len(grids) > 1 else 0)
        corners[kind] = left + LEFT_PX, y
        y += len(grid.layers) * size[1]
    return HeadCells(grids, corners, size), y


def name_kinds(page: FigurePage, cells: HeadCells, size_px: float = layout.PANEL_TITLE_PX) -> None:
    """Write the names of layers and heads beside their cells, and those of kinds of attention if there are several."""
    for kind, grid in cells.grids.items():
        x, y = cells.map_corners[kind]
        _name_axes(page, (x, y), grid, cells.size, size_px)
        if len(cells.grids) > 1:
            page.write_title(x - LEFT_PX, y - 48, f"{printable(kind, 40)} attention", size_px * 1.2)


def _name_axes(
    page: FigurePage,
    corner: tuple[float, float],
    grid: HeadGrid,
    cell_size: tuple[float, float],
    size_px: float,
) -> None:
    """Write the names of layers at the left and of heads above; every n-th where there is no room for all.

    Args:
        page: The page.
        corner: The upper left corner of the map.
        grid: Its layers and heads.
        cell_size: Width and height of a cell.
        size_px: Size of the letters of layers, and most size of those of heads.
    """
    left, top = corner
    width, height = cell_size
    # Heads: in a large map, letters shrink with their cells. In small maps, whose letters have 12 pixels, they do not.
    size = page.paper.legible_px(min(size_px, width / 1.6) if size_px > 12 else size_px)
    widest = page.lettering.width_px(f"H{grid.heads[-1]}", size)
    step = math.ceil(math.ceil(widest * 1.25) / width)
    # The width of a cell has the gap after it: a name above a wide cell is centred without the gap.
    half_gap = 1.5 if width > 39 else 0
    for column in range(0, len(grid.heads), step):
        x = left + (column + 0.5) * width - half_gap
        page.write(x, top - size * 0.9, f"H{grid.heads[column]}", size, ha="center", color=FAINT)
    # Layers.
    size = page.paper.legible_px(size_px)
    step = math.ceil(math.ceil(size * 1.25) / height)
    for row in range(0, len(grid.layers), step):
        y = top + (row + 0.5) * height
        name = f"L{grid.layers[row]}"
        page.write(left - 8, y, name, size, ha="right", va="center_baseline", color=FAINT)


# Pages of maps


@dataclass(frozen=True)
class _Plan:
    """The layout of small maps on pages.

    Attributes:
        columns: How many maps stand side by side.
        cell_size: Width and height of a cell in pixels.
        pitch: Pixels from the corner of one map to that of the next, across and down.
        max_on_page: How many maps a page has room for.
    """

    columns: int
    cell_size: tuple[float, float]
    pitch: tuple[float, float]
    max_on_page: int


def draw_head_maps(
    report: Report, blocks: Sequence[HeadMap], lettering: Lettering
) -> Iterator[FigurePage]:
    """Yield pages of maps of heads: a single map large, with numbers; several maps small."""
    if len(blocks) == 1:
        yield _large_page(report, blocks[0], lettering)
        return
    plan = _plan(blocks[0].heads, len(blocks), lettering)
    # As few pages as possible, with equally many maps on each.
    n_pages = math.ceil(len(blocks) / plan.max_on_page)
    n_on_page = math.ceil(len(blocks) / n_pages)
    for first in range(0, len(blocks), n_on_page):
        yield _small_page(report, blocks[first : first + n_on_page], plan, lettering)


def _large_page(report: Report, block: HeadMap, lettering: Lettering) -> FigurePage:
    """Draw a large map of a column; see `_write_numbers` for the numbers in it."""
    table, name = block.heads, block.column
    column = table.columns[name]
    scale = scale_of(table, name)
    grids = grids_of(table)
    paper = lettering.paper

    # The size of cells. On a screen, all layers together are at most 1000 pixels high, unless cells would be lower than
    # 44 pixels, which a number with an interval needs.
    n_across, n_down = count_cells(grids)
    room = paper.room_px - LEFT_PX
    cell_width = paper.round_px(min(240.0, room / n_across), 24)
    tallest = max(24 if paper.is_fixed_width else 44, 1000 // n_down)
    cell_height = max(24, min(round(cell_width * 0.62), 90, tallest))

    # The page with its cells, and the numbers in them.
    width = 2 * layout.MARGIN_PX + LEFT_PX + n_across * cell_width
    page = FigurePage(paper.figure_width_px(layout.PAGE_WIDTH_PX, width), lettering)
    subtitle = " · ".join(filter(None, [printable(column.meaning, 400), report.source]))
    page.write_header(f"{report.model} · {block.title or title_of(column)}", subtitle)
    cells, bottom = place_kinds(grids, (cell_width, cell_height))
    name_kinds(page, cells)
    _draw_cells(page, table, name, cells, scale)
    notes = _write_numbers(page, table, name, cells, scale)

    # The colour bar, with what colours mean if there is room beside it, and the notes.
    bar = (layout.MARGIN_PX + LEFT_PX, bottom + 30, min(420, room - 20), 14)
    meaning = title_of(column)
    if column.range == (0, 1):
        meaning += ", 0 to 1"
    _draw_bar(page, bar, scale, layout.CAPTION_PX, 6 if paper.is_narrow else 11, meaning)
    if scale.has_baseline:
        notes.insert(0, _BASELINE)
    if not np.isfinite(table[name]).all():
        has_dashes = UNDEFINED in {number.text for number in page.cell_numbers}
        notes.append(f"grey: undefined ({UNDEFINED})" if has_dashes else "grey: undefined")
    page.end_with_notes(bottom + 102, [*notes, *block.notes, *report.problems])
    return page


def _write_numbers(
    page: FigurePage, table: Table, name: str, cells: HeadCells, scale: ColourScale
) -> list[str]:
    """Write the numbers of heads, and their intervals, where cells have room for them; return notes that explain them.

    In a map of many cells, where numbers would hide the colours, only the largest absolute numbers are written.
    """
    paper, lettering = page.paper, page.lettering
    cell_width, cell_height = cells.size
    notes = []
    if len(table) > _MAX_NUMBERS:
        # From here on, the table has only the heads whose numbers are written.
        magnitudes = np.nan_to_num(np.abs(table[name]), nan=-1.0)
        table = table.select(np.argsort(-magnitudes, kind="stable")[:_N_LARGEST])
        notes.append(f"numbers: the {_N_LARGEST} largest by absolute value")

    # The size of letters: the widest number, and the widest interval, must fit a cell.
    size = paper.legible_px(min(18.0, cell_width * 0.26))
    values = table[name].tolist()
    texts = [scale.write(value) for value in values]
    widest = max(lettering.width_px(text, size) for text in texts)
    has_numbers = cell_width > widest * 1.05 if paper.is_fixed_width else cell_width >= 40
    if not has_numbers:
        return []
    intervals = [_interval_text(scale, low, high) for _, low, high in table.interval(name).tolist()]
    # The width at letters of one pixel; 0 if no interval is known.
    unit_width = max(lettering.width_px(text, 1.0) for text in intervals)
    interval_size = min(size * _INTERVAL_SHARE, cell_width * 0.94 / unit_width) if unit_width else 0.0
    has_intervals = cell_height >= 44 and interval_size >= max(_MIN_INTERVAL_PX, paper.min_px)

    # Numbers stand in the middle of their cells, or a little higher if intervals stand below them.
    numbers = []
    cmap = colormap(scale.cmap)
    rise = cell_height * 0.14 if has_intervals else 0
    corners = cells.corners_of(table)
    for (left, top), value, text, interval in zip(corners, values, texts, intervals, strict=True):
        x = left + 0.5 * cell_width - 1
        y = top + 0.5 * cell_height - 1
        ink = text_color_on(colormap_hex(cmap, scale.fraction(value))) if math.isfinite(value) else FAINT
        numbers.append(CellNumber(x, y - rise, text, size, ink))
        if has_intervals and interval:
            numbers.append(CellNumber(x, y + cell_height * 0.22, interval, interval_size, ink))
    page.write_numbers(numbers)
    if has_intervals:
        notes.append("small numbers: the 95% interval")
    return notes


def _interval_text(scale: ColourScale, low: float, high: float) -> str:
    """Return an interval such as 0.00–0.03, with as many decimals as the numbers of the map; empty if it is unknown.

    Both ends are written instead of ±, as intervals are not symmetric where a share is near 0 or 1.
    """
    if not math.isfinite(high - low):
        return ""
    # "–−0.03" would be unreadable.
    joint = " to " if low < 0 else "–"
    return f"{scale.write(low)}{joint}{scale.write(high)}"


def _plan(table: Table, n_maps: int, lettering: Lettering) -> _Plan:
    """Lay out small maps of the columns of a table; on narrow paper one or two stand side by side."""
    paper = lettering.paper
    grids = grids_of(table)
    n_across, n_down = count_cells(grids)
    columns = _FEW_COLUMNS if n_maps <= _FEW_MAPS else _MANY_COLUMNS
    if paper.is_narrow:
        columns = 1 if n_maps <= _FEW_MAPS else 2
    columns = min(n_maps, columns)
    # Cells as large as the width, and then the height, allows.
    page_width = paper.room_px if paper.is_fixed_width else _SMALL_PX
    room = page_width - columns * _BESIDE_PX
    width = max(4.0, min(58.0, room / columns / n_across))
    height = max(12.0, min(0.62 * width, 34.0, 900 / n_down))
    # From one map to the next, with titles, labels and the colour bar.
    across = n_across * width + _BESIDE_PX
    if not paper.is_fixed_width:
        across = max(across, _MIN_ACROSS_PX)
    kinds_px = (KIND_PX + HEAD_NAMES_PX) * (len(grids) - 1)
    down = n_down * height + kinds_px + _ABOVE_AND_BELOW_PX
    # As many rows of maps as a page holds.
    tallest = paper.max_height_px if paper.is_fixed_width else _TALLEST_PX
    n_rows = max(1, int((tallest - TOP_PX) // down))
    return _Plan(columns, (width, height), (across, down), columns * n_rows)


def _small_page(
    report: Report, blocks: Sequence[HeadMap], plan: _Plan, lettering: Lettering
) -> FigurePage:
    """Draw a page of small maps, each in its own colours; cells that are not above their baseline are pale."""
    paper = lettering.paper
    grids = grids_of(blocks[0].heads)
    page = FigurePage(
        paper.figure_width_px(2 * layout.MARGIN_PX + plan.columns * plan.pitch[0], 900), lettering
    )
    n_heads = amount(len(blocks[0].heads), "head")
    page.write_header(f"{report.model} · {blocks[0].title or report.subtitle}", report.source or n_heads)

    # Maps side by side, row by row.
    room = plan.pitch[0] - 30
    corners = layout.grid_corners(len(blocks), plan.columns, (layout.MARGIN_PX, TOP_PX), plan.pitch)
    scales = [scale_of(block.heads, block.column) for block in blocks]
    for block, scale, (left, top) in zip(blocks, scales, corners, strict=True):
        # The title of a map, with its meaning and its largest value.
        column = block.heads.columns[block.column]
        lines = [_largest(block.heads, block.column, scale)]
        if column.meaning and not paper.is_fixed_width:
            lines.insert(0, printable(column.meaning, 200))
        page.write_title(left, top, lettering.fit(title_of(column), 14, 0.88 * room))
        for number, line in enumerate(lines, 1):
            text = lettering.fit(line, layout.CAPTION_PX, room)
            page.write(left, top + 18 * number, text, layout.CAPTION_PX, ha="left", color=FAINT)
        # Where kinds of attention have names, the name of the first one stands at the height of these lines.
        first_top = top + 46 - (KIND_PX if len(grids) > 1 else 0)
        cells, bottom = place_kinds(grids, plan.cell_size, left, first_top)
        name_kinds(page, cells, 12.0)
        _draw_cells(page, block.heads, block.column, cells, scale, fades=True)
        bar = left + LEFT_PX, bottom + 16, min(200, plan.pitch[0] - _BESIDE_PX), 11
        _draw_bar(page, bar, scale, 11.5, max_ticks=3)

    # Notes below the last row of maps.
    n_rows = math.ceil(len(blocks) / plan.columns)
    notes = ["rows: layers, columns: heads; each map has its own colours"]
    if any(scale.has_baseline for scale in scales):
        notes += [_BASELINE, "pale: not above it, where any head is"]
    for block in blocks:
        notes += block.notes
    page.end_with_notes(TOP_PX + n_rows * plan.pitch[1], [*notes, *report.problems])
    return page


def _largest(table: Table, name: str, scale: ColourScale) -> str:
    """Say which head has the largest value of a column; the largest absolute value if any is negative."""
    magnitudes = np.abs(table[name]) if scale.low < 0 else table[name]
    if not np.isfinite(magnitudes).any():
        return "undefined for all heads"
    row = int(np.nanargmax(magnitudes))
    names = table.head_names(with_kind=len(set(table["kind"])) > 1)
    return f"largest {scale.write(table[name][row])}, {printable(names[row])}"


def _draw_cells(
    page: FigurePage,
    table: Table,
    name: str,
    cells: HeadCells,
    scale: ColourScale,
    *,
    fades: bool = False,
) -> None:
    """Draw coloured cells of heads; grey where the number is undefined.

    If `fades`, heads that are not above their baseline are pale. No head is pale if none is above its baseline, or if
    the column has negative numbers.
    """
    baseline = table.companion(name, "baseline")
    drawn = page.draw_cells(
        cells.corners_of(table), cells.size, table[name].tolist(), scale.cmap, scale.fraction
    )
    if not fades or scale.low < 0 or not (table[name] > baseline).any():
        return
    # The same cells again, in paler colours.
    faded = [drawn[row] for row in np.flatnonzero(table[name] <= baseline)]
    page.fill_boxes(
        [box for box, _ in faded], [blend_colors(_PALE, "#ffffff", color) for _, color in faded]
    )


def _draw_bar(
    page: FigurePage, bar: Box, scale: ColourScale, size_px: float, max_ticks: int, meaning: str = ""
) -> None:
    """Draw the colour bar and the baseline, with at most `max_ticks` round numbers or else those at the ends and 0."""
    if not scale.has_values:
        return
    limits = scale.low, scale.high
    ticks = layout.ticks_between(*limits)
    if len(ticks) > max_ticks:
        ticks = (scale.low, 0.0, scale.high) if scale.low < 0 else limits
    size_px = page.paper.legible_px(size_px)
    texts = tick_texts(ticks)
    # A bar with few ticks is a short one between others: there the numbers at its ends stand within its width.
    is_inset = page.paper.is_fixed_width and max_ticks <= 3
    page.draw_colour_bar(
        bar,
        scale.cmap,
        limits,
        ticks=texts,
        size_px=size_px,
        color=FAINT,
        meaning=meaning,
        is_inset=is_inset,
    )
    if not scale.has_baseline:
        return

    # The baseline: a line across the bar at its smallest and its largest value, and a triangle below their middle.
    x, y, width, height = bar
    ends = {x + width * scale.fraction(value) for value in scale.baseline}
    page.draw_lines(
        [[(end, y - 4), (end, y + height + 3)] for end in sorted(ends)], color=INK, width_px=1.5
    )
    below = y + height + size_px * 2.4
    middle = scale.fraction(sum(scale.baseline) / 2)
    triangle_x = x + width * middle
    page.write(triangle_x, below, "▲", size_px, ha="center", color=INK)
    # The value stands on that side of the triangle that has more of the bar. It is left out if it does not fit: a note
    # explains the triangle in any case.
    words = f"uniform {scale.baseline_text}"
    words_width = page.lettering.width_px(words, size_px) * 1.04 + size_px
    right_edge = min(x + width + LEFT_PX, page.width_px - layout.MARGIN_PX / 2)
    if middle < 0.5 and triangle_x + words_width <= right_edge:
        page.write(triangle_x + size_px * 0.7, below, words, size_px, ha="left", color=INK)
    elif middle >= 0.5 and triangle_x - words_width >= x - LEFT_PX:
        page.write(triangle_x - size_px * 0.7, below, words, size_px, ha="right", color=INK)
