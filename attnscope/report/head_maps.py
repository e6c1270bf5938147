"""Draw maps of heads: one large map with numbers, or several small maps side by side.

A map shows one column of a table of heads. In the code, a `column` is this column of the table. In the map, layers are
one below the other, and heads stand from left to right. Each kind of attention (encoder, decoder, cross) has its own
map, one below the other. `questions.head_roles` places the cells of its maps by the same functions. A baseline is the
value that a head would have if it attended equally to all keys that the mask allows.
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
from attnscope.report.numbers import UNDEFINED, choose_shared_formatter, format_ticks
from attnscope.report.wording import printable, title_of
from attnscope.results.table import Table

ONE_WAY, TWO_WAYS = "Blues", "RdBu_r"
"""The colormaps for numbers of one sign, and of both signs."""

LEFT_PX = 50
"""The width of the names of layers, left of a map."""

TOP_PX = layout.MARGIN_PX + 62
"""The y of the first map of a page, below the title."""

KIND_PX = 54
"""The height of the name of a kind of attention above its map, if there are several kinds."""

HEAD_NAMES_PX = 26
"""The height of the names of heads above a map."""

_MAX_FEW_MAPS = 9
_FEW_MAPS_PER_ROW = 3
_MANY_MAPS_PER_ROW = 5
"""Up to nine small maps stand three in a row; more maps stand five in a row."""

_SMALL_ROW_PX = 1500
"""The width of a row of small maps on a screen."""

_SIDES_PX = 80
"""The width beside a small map: names of layers at the left, a gap at the right."""

_TOP_AND_BOTTOM_PX = 142
"""The height above and below a small map: title and names of heads above, the colour bar below."""

_MIN_MAP_PITCH_PX = 230
"""The least distance between the left edges of small maps on a screen, so that their titles fit."""

_MAX_PAGE_PX = 3000
"""The largest height of a page of small maps on a screen; further maps go on another page."""

_PALE_SHARE = 0.35
"""How much of its colour a pale cell keeps, 0 to 1; the rest is white."""

_INTERVAL_SHARE = 0.7
"""The largest font size of an interval, relative to that of its number."""

_MIN_INTERVAL_PX = 9.0
"""The smallest font size of an interval; intervals that need a smaller one are left out."""

_MAX_NUMBERS = 100
_N_LARGEST = 10
"""A large map of up to 100 cells has all their numbers; one of more cells has the ten largest."""

_BASELINE_NOTE = "▲ uniform: the value of a head that attends to all keys that the mask allows alike"


@dataclass(frozen=True)
class ColourScale:
    """The colours of the numbers of a column, and the range of its baselines.

    Attributes:
        low: The number with the first colour. It is 0 unless a number is negative (then -`high`), or all numbers exceed
            half of the largest (then a round number just below the smallest).
        high: The number with the last colour: the largest absolute number of all heads and baselines.
        baseline: The smallest and the largest baseline of all heads; both NaN if the column has none.
        has_values: Whether any number is defined.
        format_value: Formats a number of the column; all numbers get the same decimals.
    """

    low: float
    high: float
    baseline: tuple[float, float]
    has_values: bool
    format_value: Callable[[float], str]

    @property
    def cmap(self) -> str:
        """Return the name of the colormap."""
        return TWO_WAYS if self.low < 0 else ONE_WAY

    def fraction(self, value: float) -> float:
        """Return the position of a number on the colour scale, from 0, the first colour, to 1, the last."""
        return min(1.0, max(0.0, (value - self.low) / (self.high - self.low)))

    @property
    def has_baseline(self) -> bool:
        """Return whether the column has a baseline."""
        return math.isfinite(self.baseline[0])

    @property
    def baseline_text(self) -> str:
        """Return the baseline of all heads, such as "0.03", or "0.02 to 0.09" if it depends on the head."""
        smallest, largest = map(self.format_value, self.baseline)
        return smallest if smallest == largest else f"{smallest} to {largest}"


def choose_scale(table: Table, name: str) -> ColourScale:
    """Return the colour scale of a column: one for all kinds of attention, with room for values and baselines."""
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
        # All numbers are far from 0: the scale begins at the last round tick below them.
        step = layout.nice_ticks(largest - smallest)[1]
        low = max(0.0, math.floor(smallest / step) * step)
    return ColourScale(low, largest, baseline, bool(values.size), choose_shared_formatter(table[name]))


class HeadGrid(NamedTuple):
    """The layers of a map of heads from top to bottom, and its head indices from left to right."""

    layers: list[int]
    heads: list[int]


def find_grids(table: Table) -> dict[str, HeadGrid]:
    """Return the layers and heads in the map of each kind of attention in a table of heads."""
    grids = {}
    for kind in dict.fromkeys(table["kind"].tolist()):
        heads = table.select(table["kind"] == kind)
        grids[kind] = HeadGrid(np.unique(heads["layer"]).tolist(), np.unique(heads["head"]).tolist())
    return grids


def count_cells(grids: Mapping[str, HeadGrid]) -> tuple[int, int]:
    """Return how many cells the maps of all kinds, one below the other, have across (at most) and down (in total)."""
    n_across = max(len(grid.heads) for grid in grids.values())
    n_down = sum(len(grid.layers) for grid in grids.values())
    return n_across, n_down


@dataclass(frozen=True)
class HeadCells:
    """The positions of the cells of all heads on a page, in pixels.

    Attributes:
        grids: The layers and heads in the map of each kind of attention.
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
        grids: The layers and heads in the map of each kind.
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
    """Write the names of layers and heads beside their cells, and the kinds of attention if there are several."""
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
    """Write the names of layers at the left and of heads above; only every n-th name if there is no room for all.

    Args:
        page: The page.
        corner: The upper left corner of the map.
        grid: Its layers and heads.
        cell_size: Width and height of a cell.
        size_px: The font size of layers, and the largest font size of heads.
    """
    left, top = corner
    width, height = cell_size
    # Heads. In a large map, letters shrink with the cells. In small maps (size_px = 12) they keep their size.
    size = page.paper.legible_px(min(size_px, width / 1.6) if size_px > 12 else size_px)
    widest = page.lettering.width_px(f"H{grid.heads[-1]}", size)
    step = math.ceil(math.ceil(widest * 1.25) / width)
    # The width of a cell has the gap after it: a name above a wide cell is centred without the gap.
    half_gap = 1.5 if width > 39 else 0
    for index in range(0, len(grid.heads), step):
        x = left + (index + 0.5) * width - half_gap
        page.write(x, top - size * 0.9, f"H{grid.heads[index]}", size, ha="center", color=FAINT)
    # Layers.
    size = page.paper.legible_px(size_px)
    step = math.ceil(math.ceil(size * 1.25) / height)
    for index in range(0, len(grid.layers), step):
        y = top + (index + 0.5) * height
        name = f"L{grid.layers[index]}"
        page.write(left - 8, y, name, size, ha="right", va="center_baseline", color=FAINT)


# Pages of maps


@dataclass(frozen=True)
class _SmallMapsPlan:
    """The layout of small maps on pages.

    Attributes:
        maps_per_row: How many maps stand side by side.
        cell_size: Width and height of a cell in pixels.
        pitch: The distance in pixels between the corners of neighbouring maps, across and down.
        max_on_page: How many maps a page has room for.
    """

    maps_per_row: int
    cell_size: tuple[float, float]
    pitch: tuple[float, float]
    max_on_page: int


def draw_head_maps(
    report: Report, blocks: Sequence[HeadMap], lettering: Lettering
) -> Iterator[FigurePage]:
    """Yield pages of maps of heads: a single map is large, with numbers; several maps are small."""
    if len(blocks) == 1:
        yield _draw_large_page(report, blocks[0], lettering)
        return
    plan = _plan_small_maps(blocks[0].heads, len(blocks), lettering)
    # As few pages as possible, with the same number of maps on each.
    n_pages = math.ceil(len(blocks) / plan.max_on_page)
    n_on_page = math.ceil(len(blocks) / n_pages)
    for first_map in range(0, len(blocks), n_on_page):
        yield _draw_small_page(report, blocks[first_map : first_map + n_on_page], plan, lettering)


def _draw_large_page(report: Report, block: HeadMap, lettering: Lettering) -> FigurePage:
    """Draw a large map of a column; `_write_numbers` writes its numbers."""
    table, name = block.heads, block.column
    column = table.columns[name]
    scale = choose_scale(table, name)
    grids = find_grids(table)
    paper = lettering.paper

    # The size of cells. The height follows from the width, within limits. With many layers, the upper limit sinks so
    # that all layers fit 1000 pixels; on a screen it stays at 44 or more, which a number with an interval needs.
    n_across, n_down = count_cells(grids)
    room_px = paper.room_px - LEFT_PX
    cell_width = paper.round_px(min(240.0, room_px / n_across), 24)
    max_height = max(24 if paper.is_fixed_width else 44, 1000 // n_down)
    cell_height = max(24, min(round(cell_width * 0.62), 90, max_height))

    # The page with its cells, and the numbers in them.
    width = 2 * layout.MARGIN_PX + LEFT_PX + n_across * cell_width
    page = FigurePage(paper.figure_width_px(layout.PAGE_WIDTH_PX, width), lettering)
    subtitle = " · ".join(filter(None, [printable(column.meaning, 400), report.source]))
    page.write_header(f"{report.model} · {block.title or title_of(column)}", subtitle)
    cells, bottom = place_kinds(grids, (cell_width, cell_height))
    name_kinds(page, cells)
    _draw_cells(page, table, name, cells, scale)
    notes = _write_numbers(page, table, name, cells, scale)

    # The colour bar with the meaning of colours, and the notes.
    bar_box = (layout.MARGIN_PX + LEFT_PX, bottom + 30, min(420, room_px - 20), 14)
    meaning = title_of(column)
    if column.range == (0, 1):
        meaning += ", 0 to 1"
    _draw_bar(page, bar_box, scale, layout.CAPTION_PX, 6 if paper.is_narrow else 11, meaning)
    if scale.has_baseline:
        notes.insert(0, _BASELINE_NOTE)
    if not np.isfinite(table[name]).all():
        has_dashes = UNDEFINED in {number.text for number in page.cell_numbers}
        notes.append(f"grey: undefined ({UNDEFINED})" if has_dashes else "grey: undefined")
    page.end_with_notes(bottom + 102, [*notes, *block.notes, *report.problems])
    return page


def _write_numbers(
    page: FigurePage, table: Table, name: str, cells: HeadCells, scale: ColourScale
) -> list[str]:
    """Write the numbers of heads, and their intervals, where cells have room for them; return notes that explain them.

    In a map of many cells numbers would hide the colours: only the largest absolute numbers are written.
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
    texts = [scale.format_value(value) for value in values]
    widest = max(lettering.width_px(text, size) for text in texts)
    has_numbers = cell_width > widest * 1.05 if paper.is_fixed_width else cell_width >= 40
    if not has_numbers:
        return []
    intervals = [_interval_text(scale, low, high) for _, low, high in table.interval(name).tolist()]
    # The width at a font size of one pixel; 0 if no interval is known (all texts are empty).
    unit_width = max(lettering.width_px(text, 1.0) for text in intervals)
    interval_size = min(size * _INTERVAL_SHARE, cell_width * 0.94 / unit_width) if unit_width else 0.0
    has_intervals = cell_height >= 44 and interval_size >= max(_MIN_INTERVAL_PX, paper.min_px)

    # Numbers are in the middle of their cells, or a little higher if intervals are below them.
    numbers = []
    cmap = colormap(scale.cmap)
    shift_up = cell_height * 0.14 if has_intervals else 0
    corners = cells.corners_of(table)
    for (left, top), value, text, interval in zip(corners, values, texts, intervals, strict=True):
        x = left + 0.5 * cell_width - 1
        y = top + 0.5 * cell_height - 1
        ink = text_color_on(colormap_hex(cmap, scale.fraction(value))) if math.isfinite(value) else FAINT
        numbers.append(CellNumber(x, y - shift_up, text, size, ink))
        if has_intervals and interval:
            numbers.append(CellNumber(x, y + cell_height * 0.22, interval, interval_size, ink))
    page.write_numbers(numbers)
    if has_intervals:
        notes.append("small numbers: the 95% interval")
    return notes


def _interval_text(scale: ColourScale, low: float, high: float) -> str:
    """Return an interval such as 0.00–0.03, with as many decimals as the numbers of the map; empty if it is unknown.

    The text has both ends, not ±, as the interval of a share near 0 or 1 is not symmetric.
    """
    if not math.isfinite(high - low):
        return ""
    # "–−0.03" would be unreadable.
    separator = " to " if low < 0 else "–"
    return f"{scale.format_value(low)}{separator}{scale.format_value(high)}"


def _plan_small_maps(table: Table, n_maps: int, lettering: Lettering) -> _SmallMapsPlan:
    """Lay out small maps, one per column of a table; on narrow paper one or two of them stand in a row."""
    paper = lettering.paper
    grids = find_grids(table)
    n_across, n_down = count_cells(grids)
    maps_per_row = _FEW_MAPS_PER_ROW if n_maps <= _MAX_FEW_MAPS else _MANY_MAPS_PER_ROW
    if paper.is_narrow:
        maps_per_row = 1 if n_maps <= _MAX_FEW_MAPS else 2
    maps_per_row = min(n_maps, maps_per_row)
    # Cells are as large as the width of the page, and then the height, allows.
    page_width = paper.room_px if paper.is_fixed_width else _SMALL_ROW_PX
    room_px = page_width - maps_per_row * _SIDES_PX
    width = max(4.0, min(58.0, room_px / maps_per_row / n_across))
    height = max(12.0, min(0.62 * width, 34.0, 900 / n_down))
    # The distances between maps, with titles, labels and colour bars.
    across = n_across * width + _SIDES_PX
    if not paper.is_fixed_width:
        across = max(across, _MIN_MAP_PITCH_PX)
    down = n_down * height + _TOP_AND_BOTTOM_PX
    if len(grids) > 1:
        # The name of each kind, and the names of heads above each map but the first.
        down += KIND_PX * len(grids) + HEAD_NAMES_PX * (len(grids) - 1)
    # As many rows of maps as a page holds.
    max_height = paper.max_height_px if paper.is_fixed_width else _MAX_PAGE_PX
    n_rows = max(1, int((max_height - TOP_PX) // down))
    return _SmallMapsPlan(maps_per_row, (width, height), (across, down), maps_per_row * n_rows)


def _draw_small_page(
    report: Report, blocks: Sequence[HeadMap], plan: _SmallMapsPlan, lettering: Lettering
) -> FigurePage:
    """Draw a page of small maps, each in its own colours; cells that do not exceed their baseline are pale."""
    paper = lettering.paper
    grids = find_grids(blocks[0].heads)
    width = 2 * layout.MARGIN_PX + plan.maps_per_row * plan.pitch[0]
    page = FigurePage(paper.figure_width_px(width, 900), lettering)
    n_heads = amount(len(blocks[0].heads), "head")
    page.write_header(f"{report.model} · {blocks[0].title or report.subtitle}", report.source or n_heads)

    # Maps side by side, row by row.
    room_px = plan.pitch[0] - 30
    corners = layout.grid_corners(len(blocks), plan.maps_per_row, (layout.MARGIN_PX, TOP_PX), plan.pitch)
    scales = [choose_scale(block.heads, block.column) for block in blocks]
    for block, scale, (left, top) in zip(blocks, scales, corners, strict=True):
        # The title of a map, and lines with its meaning and its largest value.
        column = block.heads.columns[block.column]
        lines = [_describe_largest(block.heads, block.column, scale)]
        if column.meaning and not paper.is_fixed_width:
            lines.insert(0, printable(column.meaning, 200))
        page.write_title(left, top, lettering.fit(title_of(column), 14, 0.88 * room_px))
        for number, line in enumerate(lines, 1):
            text = lettering.fit(line, layout.CAPTION_PX, room_px)
            page.write(left, top + 18 * number, text, layout.CAPTION_PX, ha="left", color=FAINT)
        cells, bottom = place_kinds(grids, plan.cell_size, left, top + 46)
        name_kinds(page, cells, 12.0)
        _draw_cells(page, block.heads, block.column, cells, scale, has_pale_cells=True)
        bar_box = left + LEFT_PX, bottom + 16, min(200, plan.pitch[0] - _SIDES_PX), 11
        _draw_bar(page, bar_box, scale, 11.5, max_ticks=3)

    # Notes below the last row of maps.
    n_rows = math.ceil(len(blocks) / plan.maps_per_row)
    notes = ["rows: layers, columns: heads; each map has its own colours"]
    if any(scale.has_baseline for scale in scales):
        notes += [_BASELINE_NOTE, "pale: not above it, where any head is"]  # as `_draw_cells` says
    for block in blocks:
        notes += block.notes
    page.end_with_notes(TOP_PX + n_rows * plan.pitch[1], [*notes, *report.problems])
    return page


def _describe_largest(table: Table, name: str, scale: ColourScale) -> str:
    """Return a line on the head with the largest value of a column; the largest absolute value if any is negative."""
    magnitudes = np.abs(table[name]) if scale.low < 0 else table[name]
    if not np.isfinite(magnitudes).any():
        return "undefined for all heads"
    row = int(np.nanargmax(magnitudes))
    names = table.head_names(with_kind=len(set(table["kind"])) > 1)
    return f"largest {scale.format_value(table[name][row])}, {printable(names[row])}"


def _draw_cells(
    page: FigurePage,
    table: Table,
    name: str,
    cells: HeadCells,
    scale: ColourScale,
    *,
    has_pale_cells: bool = False,
) -> None:
    """Draw coloured cells of heads; grey where the number is undefined.

    If `has_pale_cells`, heads that do not exceed their baseline are pale. No head is pale if no head
    exceeds its baseline, or if the column has negative numbers.
    """
    baseline = table.companion(name, "baseline")
    drawn_cells = page.draw_cells(
        cells.corners_of(table), cells.size, table[name].tolist(), scale.cmap, scale.fraction
    )
    if not has_pale_cells or scale.low < 0 or not (table[name] > baseline).any():
        return
    # These cells are drawn a second time, in paler colours.
    faded = [drawn_cells[row] for row in np.flatnonzero(table[name] <= baseline)]
    page.fill_boxes(
        [box for box, _ in faded], [blend_colors(_PALE_SHARE, "#ffffff", color) for _, color in faded]
    )


def _draw_bar(
    page: FigurePage, bar_box: Box, scale: ColourScale, size_px: float, max_ticks: int, meaning: str = ""
) -> None:
    """Draw the colour bar and the baseline. If round numbers exceed `max_ticks`, the ends and 0 are the ticks."""
    if not scale.has_values:
        return
    limits = scale.low, scale.high
    ticks = layout.ticks_between(*limits)
    if len(ticks) > max_ticks:
        ticks = (scale.low, 0.0, scale.high) if scale.low < 0 else limits
    size_px = page.paper.legible_px(size_px)
    # A bar with at most three ticks belongs to a small map, close to other bars: its numbers stay within its width.
    is_inset = page.paper.is_fixed_width and max_ticks <= 3
    page.draw_colour_bar(
        bar_box,
        scale.cmap,
        limits,
        ticks=format_ticks(ticks),
        size_px=size_px,
        color=FAINT,
        meaning=meaning,
        is_inset=is_inset,
    )
    if not scale.has_baseline:
        return

    # The baseline: a line across the bar at the smallest and at the largest baseline, and a triangle between them.
    x, y, width, height = bar_box
    line_xs = {x + width * scale.fraction(value) for value in scale.baseline}
    lines = [[(line_x, y - 4), (line_x, y + height + 3)] for line_x in sorted(line_xs)]
    page.draw_lines(lines, color=INK, width_px=1.5)
    label_y = y + height + size_px * 2.4
    middle_share = scale.fraction(sum(scale.baseline) / 2)
    triangle_x = x + width * middle_share
    page.write(triangle_x, label_y, "▲", size_px, ha="center", color=INK)
    # The label stands on the side of the triangle with more of the bar. If it does not fit, it is left out: a note
    # below the map explains the triangle anyway.
    label = f"uniform {scale.baseline_text}"
    label_width = page.lettering.width_px(label, size_px) * 1.04 + size_px
    right_edge = min(x + width + LEFT_PX, page.width_px - layout.MARGIN_PX / 2)
    if middle_share < 0.5 and triangle_x + label_width <= right_edge:
        page.write(triangle_x + size_px * 0.7, label_y, label, size_px, ha="left", color=INK)
    elif middle_share >= 0.5 and triangle_x - label_width >= x - LEFT_PX:
        page.write(triangle_x - size_px * 0.7, label_y, label, size_px, ha="right", color=INK)
