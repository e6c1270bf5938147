"""Maps of heads as figures: a large one of a column with numbers, or small ones of several columns side by side.

Layers stand down, heads across, and each kind of attention has a map of its own, one below the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from attnscope.drawing import layout
from attnscope.drawing.canvas import FAINT, INK, Box, Number, colormap
from attnscope.drawing.inks import blend, hex_of, ink_on
from attnscope.drawing.lettering import Lettering
from attnscope.drawing.page import HeadGrid, Page
from attnscope.errors import amount
from attnscope.report.blocks import HeadMap, Report
from attnscope.report.numbers import UNDEFINED, digits, short_interval, writer_for
from attnscope.report.wording import printable
from attnscope.results.table import Column, Table

ONE_WAY, TWO_WAYS = "Blues", "RdBu_r"
"""The colours of numbers of one sign, and of both."""

LEFT_PX = 50
"""Room at the left of a large map, for the names of layers."""

TOP_PX = layout.MARGIN_PX + 62
KIND_PX = 54
HEAD_NAMES_PX = 26

_FEW_MAPS, _FEW_COLUMNS, _MANY_COLUMNS = 9, 3, 5
"""Small maps that stand three in a row; more of them stand five in a row."""

_SMALL_PX = 1500
"""Width of a row of small maps on a screen."""

_SMALL_AROUND_PX = 80, 142
"""Room around a small map, across and down."""

_LEAST_ACROSS_PX = 230
"""From one small map to the next on a screen at least, so that titles have room."""

_SMALL_TOP_PX = TOP_PX + 72
"""Where the first row of small maps begins."""

_TALLEST_PX = 3000
"""Height of a page of small maps on a screen; more of them go on another page."""

_PALE = 0.35
"""How much of its colour a cell keeps that is not above the baseline."""

_COMPACT_PX = 135
"""Width of a small map on paper."""

_INTERVAL_SHARE = 0.7
"""How large letters of an interval are at most, relative to those of its number."""

_LEAST_INTERVAL_PX = 9.0
"""Letters of intervals that would be smaller are left out."""

_BASELINE = "▲ uniform: the value of a head that attends to all keys that the mask allows alike"


@dataclass(frozen=True)
class Scale:
    """The colours and limits for the numbers of a column.

    Attributes:
        low: The number of the first colour: 0; -high where numbers are negative; a round one where all are far from 0.
        high: That of the last colour: the largest of all heads and baselines.
        cmap: The name of the colours.
        baseline: The least and the largest baseline; NaN = there is none.
        has_values: Whether any number is defined.
        write: What writes a number.
    """

    low: float
    high: float
    cmap: str
    baseline: tuple[float, float]
    has_values: bool
    write: Callable[[float], str]

    def share(self, value: float) -> float:
        """Return how far along the colours a number is, 0 to 1."""
        return min(1.0, max(0.0, (value - self.low) / (self.high - self.low)))

    @property
    def has_baseline(self) -> bool:
        """Return whether there is a baseline."""
        return math.isfinite(self.baseline[0])

    @property
    def baseline_text(self) -> str:
        """Return what the baseline is: 0.03, or 0.02 to 0.09 where it depends on the head."""
        low, high = (self.write(value) for value in self.baseline)
        return low if low == high else f"{low} to {high}"


def scale_of(table: Table, name: str) -> Scale:
    """Return the colours of a column, the same for all kinds of attention, wide enough for its baseline."""
    # Estimates and baselines together set the range.
    values = table[name][np.isfinite(table[name])]
    baselines = table.part(name, "baseline")
    baselines = baselines[np.isfinite(baselines)]
    both = np.concatenate([values, baselines])
    extent = float(np.abs(both).max(initial=0.0)) or 1.0
    least = float(both.min()) if both.size else 0.0
    baseline = (float(baselines.min()), float(baselines.max())) if baselines.size else (math.nan, math.nan)
    # Values of both signs: colours symmetric around 0.
    low, cmap = 0.0, ONE_WAY
    if least < 0:
        low, cmap = -extent, TWO_WAYS
    # Values far from 0: colours begin at a round number below the least.
    elif extent / 2 < least < extent:
        step = layout.nice_ticks(extent - least)[1]
        low = max(0.0, math.floor(least / step) * step)
    return Scale(low, extent, cmap, baseline, bool(values.size), writer_for(table, name))


def grids_of(table: Table) -> dict[str, HeadGrid]:
    """Return the rows and columns of each kind of attention in a table of heads."""
    grids = {}
    for kind in dict.fromkeys(table["kind"].tolist()):
        mine = table.select(table["kind"] == kind)
        grids[kind] = HeadGrid.over(zip(mine["layer"].tolist(), mine["head"].tolist(), strict=True))
    return grids


@dataclass(frozen=True)
class HeadCells:
    """The places of the cells of all heads on a page, in pixels.

    Attributes:
        grids: The rows and columns of each kind of attention.
        corners: The upper left corner of each kind's grid.
        size: Width and height of a cell, with the gap to the next one.
    """

    grids: Mapping[str, HeadGrid]
    corners: Mapping[str, tuple[float, float]]
    size: tuple[float, float]

    def corner(self, kind: str, layer: int, head: int) -> tuple[float, float]:
        """Return the upper left corner of a head's cell."""
        return self.grids[kind].corner(layer, head, self.corners[kind], self.size)


def title_of(column: Column) -> str:
    """Return what a column is called, with its unit unless its name says it."""
    unit = _unit_of(column)
    return printable(column.title, 60) + (f" ({unit})" if unit and unit not in column.title else "")


def _unit_of(column: Column) -> str:
    """Return the unit of a column; empty for shares, which need none."""
    unit = printable(column.unit, 40)
    return "" if unit == "share" else unit


# A large map


def draw_head_map(report: Report, block: HeadMap, lettering: Lettering) -> Page:
    """Draw a large map of a column, with numbers and intervals where cells have room for them."""
    table, name = block.heads, block.column
    column = table.columns[name]
    scale = scale_of(table, name)
    grids = grids_of(table)
    paper = lettering.paper

    # How large cells are.
    n_across = max(len(grid.heads) for grid in grids.values())
    n_down = sum(len(grid.layers) for grid in grids.values())
    room = paper.room_px - LEFT_PX
    cell_width = paper.whole(min(240.0, room / n_across), 24)
    tallest = max(24 if paper.fixed else 44, 1000 // n_down)
    cell_height = max(24, min(round(cell_width * 0.62), 90, tallest))

    # The page, with the names of layers and heads.
    page = Page(paper.width_for(layout.MIN_WIDTH_PX, 2 * layout.MARGIN_PX + LEFT_PX + n_across * cell_width), lettering)
    subtitle = " · ".join(filter(None, [printable(column.meaning, 400), report.source]))
    page.head(f"{report.model} · {block.title or title_of(column)}", subtitle)
    cells, bottom = place_kinds(grids, (cell_width, cell_height))
    name_kinds(page, cells)

    # The cells, and the numbers in them.
    draw_cells(page, table, name, cells, scale)
    has_numbers, has_intervals = _write_numbers(page, table, name, cells, scale)

    # The colour bar and the notes.
    bar = (layout.MARGIN_PX + LEFT_PX, bottom + 30, min(420, room - 20), 14)
    draw_bar(page, bar, scale, size_px=layout.CAPTION_PX, most=6 if paper.is_narrow else 11)
    edges = layout.MARGIN_PX, page.width_px - layout.MARGIN_PX * paper.fixed
    mark_baseline(page, bar, scale, size_px=layout.CAPTION_PX, room=edges, unit=_unit_of(column))
    notes = [_BASELINE] if scale.has_baseline else []
    if has_intervals:
        notes.append("small numbers: the 95% interval")
    if not np.isfinite(table[name]).all():
        notes.append(f"grey: undefined ({UNDEFINED})" if has_numbers else "grey: undefined")
    page.finish(bottom + 102, [*notes, *block.notes, *report.problems])
    return page


def _write_numbers(page: Page, table: Table, name: str, cells: HeadCells, scale: Scale) -> tuple[bool, bool]:
    """Write the number of each head, and its interval, where cells have room for them; return whether they have."""
    paper, lettering = page.paper, page.lettering
    cell_width, cell_height = cells.size

    # Numbers, and the letters of intervals: as large as the widest one allows.
    size = paper.letters(min(18.0, cell_width * 0.26))
    texts = [scale.write(value) for value in table[name].tolist()]
    widest = max(lettering.width_px(text, size) for text in texts)
    has_numbers = cell_width > widest * 1.05 if paper.fixed else cell_width >= 40
    if not has_numbers:
        return False, False
    intervals = [short_interval(low, high) for _, low, high in table.interval(name).tolist()]
    widest = max(lettering.width_px(text, 1.0) for text in intervals)
    small = min(size * _INTERVAL_SHARE, cell_width * 0.94 / widest) if widest else 0.0
    has_intervals = cell_height >= 44 and small >= max(_LEAST_INTERVAL_PX, paper.least_px)

    numbers = []
    cmap = colormap(scale.cmap)
    rows = zip(*(table[column].tolist() for column in ("kind", "layer", "head", name)), strict=True)
    for (kind, layer, head, value), text, interval in zip(rows, texts, intervals, strict=True):
        left, top = cells.corner(kind, layer, head)
        x = left + 0.5 * cell_width - 1
        y = top + 0.5 * cell_height - 1
        ink = ink_on(hex_of(cmap, scale.share(value))) if math.isfinite(value) else FAINT
        up = cell_height * 0.14 if has_intervals else 0
        numbers.append(Number(x, y - up, text, size, ink))
        if has_intervals and interval:
            numbers.append(Number(x, y + cell_height * 0.22, interval, small, ink))
    page.numbers(numbers)
    return True, has_intervals


# Small maps side by side


@dataclass(frozen=True)
class SmallMaps:
    """The places of small maps on a page, in pixels.

    Attributes:
        columns: How many stand side by side.
        cell: Width and height of a cell.
        pitch: From one map to the next, across and down.
        most: How many a page has room for.
    """

    columns: int
    cell: tuple[float, float]
    pitch: tuple[float, float]
    most: int

    @classmethod
    def place(cls, table: Table, n_maps: int, lettering: Lettering) -> SmallMaps:
        """Place small maps of the columns of a table; on narrow paper they stand one below the other."""
        paper = lettering.paper
        # Kinds of attention share their columns and stand one below the other.
        grids = grids_of(table)
        n_across = max(len(grid.heads) for grid in grids.values())
        n_down = sum(len(grid.layers) for grid in grids.values())
        few, many = (1, 2) if paper.is_narrow else (_FEW_COLUMNS, _MANY_COLUMNS)
        columns = min(n_maps, few if n_maps <= _FEW_MAPS else many)
        # Cells as large as the width, and then the height, allows.
        room = (paper.room_px if paper.fixed else _SMALL_PX) - columns * _SMALL_AROUND_PX[0]
        width = max(4.0, min(58.0, room / columns / n_across))
        height = max(12.0, min(0.62 * width, 34.0, 900 / n_down))
        kinds_px = (KIND_PX + HEAD_NAMES_PX) * (len(grids) - 1)
        # The pitch of maps includes titles, labels and the colour bar.
        across = n_across * width + _SMALL_AROUND_PX[0]
        if not paper.fixed:
            across = max(across, _LEAST_ACROSS_PX)
        pitch = across, n_down * height + kinds_px + _SMALL_AROUND_PX[1]
        # As many rows as a page holds; more maps go on the next.
        tallest = paper.most_px if paper.fixed else _TALLEST_PX
        n_rows = max(1, int((tallest - _SMALL_TOP_PX) // pitch[1]))
        return cls(columns, (width, height), pitch, columns * n_rows)


def draw_small_maps(report: Report, blocks: Sequence[HeadMap], lettering: Lettering) -> Iterator[Page]:
    """Draw a small map of each block, on as many pages as they need."""
    maps = SmallMaps.place(blocks[0].heads, len(blocks), lettering)
    n_pages = -(-len(blocks) // maps.most)
    size = -(-len(blocks) // n_pages)
    for first in range(0, len(blocks), size):
        yield _small_maps_page(report, blocks[first : first + size], maps, lettering)


def _small_maps_page(report: Report, blocks: Sequence[HeadMap], maps: SmallMaps, lettering: Lettering) -> Page:
    """Draw a page of maps, each in its own colours, with its largest value; pale below the baseline."""
    # A page as wide as its maps.
    paper = lettering.paper
    table = blocks[0].heads
    grids = grids_of(table)
    width, height = maps.cell
    page = Page(paper.width_for(2 * layout.MARGIN_PX + maps.columns * maps.pitch[0], 900), lettering)
    n_heads = amount(len(table), "head")
    page.head(f"{report.model} · {blocks[0].title or report.subtitle}", report.source or n_heads)

    # Maps side by side, row by row.
    room = maps.pitch[0] - 30
    start = layout.MARGIN_PX + LEFT_PX, _SMALL_TOP_PX
    for block, (left, top) in zip(blocks, layout.tile(len(blocks), maps.columns, start, maps.pitch), strict=True):
        # The title of a map, with its meaning and its largest value.
        column = block.heads.columns[block.column]
        scale = scale_of(block.heads, block.column)
        lines = [_largest(block.heads, block.column, scale)]
        if column.meaning and not paper.fixed:
            lines.insert(0, printable(column.meaning, 200))
        page.entitle(left - LEFT_PX, top - 32 - 16 * len(lines), lettering.fit(title_of(column), 14, 0.88 * room))
        for number, line in enumerate(lines[::-1]):
            shown = lettering.fit(line, layout.CAPTION_PX, room)
            page.write(left - LEFT_PX, top - 30 - 16 * number, shown, layout.CAPTION_PX, ha="left", color=FAINT)
        # Kinds of attention one below the other, all in the same colours.
        corners, y = {}, top
        for kind, grid in grids.items():
            corners[kind] = left, y
            page.name_axes(corners[kind], grid, maps.cell, size_px=12.0)
            y += len(grid.layers) * height + KIND_PX + HEAD_NAMES_PX
        draw_cells(page, block.heads, block.column, HeadCells(grids, corners, maps.cell), scale, fades=True)
        # The colour bar below, with the baseline marked.
        bar = left, y - KIND_PX - HEAD_NAMES_PX + 16, min(200, maps.pitch[0] - _SMALL_AROUND_PX[0]), 11
        draw_bar(page, bar, scale, size_px=11.5, most=3)
        edges = left - LEFT_PX, left - LEFT_PX + maps.pitch[0] - 8
        mark_baseline(page, bar, scale, size_px=paper.letters(11.5), room=edges)

    # Notes below the last row of maps.
    n_rows = -(-len(blocks) // maps.columns)
    notes = ["rows: layers, columns: heads; each map has its own colours"]
    scales = [scale_of(block.heads, block.column) for block in blocks]
    if any(scale.has_baseline for scale in scales):
        notes += [_BASELINE, "pale: not above it, where any head is"]
    page.finish(
        start[1] + n_rows * maps.pitch[1] - 30,
        [*notes, *(note for block in blocks for note in block.notes), *report.problems],
    )
    return page


def _largest(table: Table, name: str, scale: Scale) -> str:
    """Return the largest value of a column and whose it is."""
    sizes = np.abs(table[name]) if scale.low < 0 else table[name]
    if not np.isfinite(sizes).any():
        return "undefined for all heads"
    row = int(np.nanargmax(sizes))
    names = table.head_names(with_kind=len({*table["kind"].tolist()}) > 1)
    return f"largest {scale.write(table[name][row])}, {printable(names[row])}"


def place_kinds(grids: Mapping[str, HeadGrid], size: tuple[float, float]) -> tuple[HeadCells, float]:
    """Return the cells of all kinds of attention, one kind below the other, and where they end."""
    corners = {}
    y = float(TOP_PX)
    for kind, grid in grids.items():
        y += HEAD_NAMES_PX + (KIND_PX if len(grids) > 1 else 0)
        corners[kind] = layout.MARGIN_PX + LEFT_PX, y
        y += len(grid.layers) * size[1]
    return HeadCells(grids, corners, size), y


def name_kinds(page: Page, cells: HeadCells, *, heads: bool = True) -> None:
    """Name layers and, if `heads`, heads beside their cells; and the kinds of attention where there are several."""
    for kind, grid in cells.grids.items():
        corner = cells.corners[kind]
        page.name_axes(corner, grid if heads else HeadGrid(grid.layers, ()), cells.size)
        if len(cells.grids) > 1:
            page.entitle(layout.MARGIN_PX, corner[1] - 48, f"{printable(kind, 40)} attention", 17)


def draw_cells(page: Page, table: Table, name: str, cells: HeadCells, scale: Scale, *, fades: bool = False) -> None:
    """Draw coloured cells of heads; grey where the number is undefined.

    If `fades`, those that are not above their baseline are pale, unless no head is above.
    """
    # Only measures from 0 on have a baseline to be above.
    baseline = table.part(name, "baseline")
    is_above = table[name] > baseline
    fades = fades and scale.low >= 0 and bool(is_above.any())
    for kind, corner in cells.corners.items():
        # The cells of one kind of attention.
        mine = table.select(table["kind"] == kind)
        places = list(zip(mine["layer"].tolist(), mine["head"].tolist(), strict=True))
        values = dict(zip(places, mine[name].tolist(), strict=True))
        drawn = page.grid_cells(corner, cells.size, values, scale.cmap, scale.share)
        # White over the cells that are not above.
        is_pale = fades & (mine[name] <= mine.part(name, "baseline"))
        faded = [drawn[place] for place, pale in zip(places, is_pale.tolist(), strict=True) if pale]
        page.fill([box for box, _ in faded], [blend(_PALE, "#ffffff", color) for _, color in faded])


def draw_bar(page: Page, bar: Box, scale: Scale, *, size_px: float, most: int) -> None:
    """Draw the colour bar with its numbers: up to `most` of them, else the ends alone."""
    if not scale.has_values:
        return
    # Round numbers, or the ends and zero where there is little room.
    ticks = layout.ticks_between(scale.low, scale.high)
    if len(ticks) > most:
        ticks = (scale.low, 0.0, scale.high) if scale.low < 0 else (scale.low, scale.high)
    page.draw_scale(
        bar,
        scale.cmap,
        (scale.low, scale.high),
        ticks={tick: digits(tick) for tick in ticks},
        size_px=page.paper.letters(size_px),
        color=FAINT,
        inside=page.paper.fixed and most <= 3,  # the ends of a short bar have no room beyond it
    )


def mark_baseline(
    page: Page, bar: Box, scale: Scale, *, size_px: float, room: tuple[float, float], unit: str = ""
) -> None:
    """Draw lines over a colour bar where the baseline is, a triangle below them, and its value beside that.

    Args:
        page: The page.
        bar: The colour bar.
        scale: Its colours.
        size_px: Size of the letters.
        room: From where to where the words may go, across.
        unit: The unit of the value.
    """
    if not (scale.has_values and scale.has_baseline):
        return
    x, y, width, height = bar
    middle = x + width * scale.share(sum(scale.baseline) / 2)
    ends = {x + width * scale.share(value) for value in scale.baseline}
    page.lines([[(end, y - 4), (end, y + height + 3)] for end in sorted(ends)], color=INK, width_px=1.5)
    if page.paper.fixed and width < _COMPACT_PX:
        return

    # The words stand at the side where there is room for them, without the unit if need be: the subtitle says it too.
    below = y + height + size_px * 2.4
    page.write(middle, below, "▲", size_px, ha="center", color=INK)
    for words in (f"uniform {scale.baseline_text} {unit}".rstrip(), f"uniform {scale.baseline_text}"):
        wide = page.lettering.width_px(words, size_px) * 1.04
        fits_right = middle + size_px + wide <= room[1]
        if not page.paper.fixed or fits_right or middle - size_px - wide >= room[0]:
            break
    else:
        return
    if fits_right:
        page.write(middle + size_px * 0.7, below, words, size_px, ha="left", color=INK)
    else:
        page.write(max(middle - size_px * 0.7, room[0] + wide), below, words, size_px, ha="right", color=INK)
