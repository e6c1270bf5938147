"""Comparisons of heads as figures: a matrix with its clusters, a map, layers, what changes; PNG, SVG and PDF."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from attnscope.drawing import layout
from attnscope.drawing.canvas import FAINT, INK, Box, wrap_lines
from attnscope.drawing.layout import SCREEN, Paper
from attnscope.drawing.lettering import Lettering, lettering_for
from attnscope.drawing.page import HeadGrid, Page
from attnscope.drawing.style import USUAL, Style
from attnscope.errors import amount
from attnscope.records.compare.pairs import MinimalPair
from attnscope.records.compare.record import Comparison, HeadComparison, ModelComparison, PickedHeads
from attnscope.records.frame.pair_tables import HeadPlace, head_name
from attnscope.report.wording import model_of
from attnscope.views.compare import maps as compare_maps
from attnscope.views.compare.plane import NO_ROLE, layer_colors, map_page, role_entries
from attnscope.views.compare.summary import (
    both_texts,
    distance,
    hidden_notes,
    meaning,
    table_line,
    table_notes,
    texts_line,
    title_of,
)
from attnscope.views.heads.summary import marks_for

_ALIKE, _APART = "Blues_r", "Blues"
_MATCH = "#d1495b"
_TOP_PX = layout.MARGIN_PX + 62
_TREE_PX = 130
_STRIP_PX = 14
_LEGEND_PX = 250
_MATRIX_PX = 1010


def pages(comparison: Comparison, style: Style = USUAL) -> Iterator[tuple[str, Page]]:
    """The figures one after the other, each with its file name without the ending.

    All heads: `matrix`, `map`, `layers`. Picked heads: `picked`, `differences`. A minimal pair: `change`, `maps`, and
    with a query `query-N`. Two models: `matrix`, `same-heads`.
    """
    if isinstance(comparison, HeadComparison):
        lettering = lettering_for(
            [title_of(comparison), texts_line(comparison.corpus), comparison.roles_source], style.paper
        )
        yield "matrix", matrix_page(comparison, lettering)
        yield "map", map_page(comparison, lettering)
        yield "layers", layers_page(comparison, lettering)
    elif isinstance(comparison, ModelComparison):
        lettering = lettering_for([title_of(comparison), texts_line(comparison.corpus)], style.paper)
        yield "matrix", models_page(comparison, lettering)
        if comparison.same():
            yield "same-heads", same_heads_page(comparison, lettering)
    elif isinstance(comparison, PickedHeads):
        yield from compare_maps.picked_pages(comparison, style.paper)
    elif isinstance(comparison, MinimalPair):
        yield "change", change_page(comparison, style.paper)
        yield from compare_maps.pair_pages(comparison, style.paper)


# -- matrices


@dataclass(frozen=True)
class Tree:
    """The branches of a clustering, one per merge: four points (x, y), x in heads, y the distance of the merge."""

    branches: tuple[tuple[tuple[float, float], ...], ...]
    top: float


def tree_of(merges: NDArray[np.float64], order: NDArray[np.int64]) -> Tree:
    """The branches of a dendrogram over heads in the order of the leaves; a head's middle is at n + 1/2."""
    n = len(order)
    nodes: list[tuple[float, float]] = [(0.0, 0.0)] * n
    for number, head in enumerate(order.tolist()):
        nodes[head] = (number + 0.5, 0.0)
    branches = []
    for a, b, height, _ in merges.tolist():
        (left, low), (right, lower) = sorted((nodes[int(a)], nodes[int(b)]))
        branches.append(((left, low), (left, height), (right, height), (right, lower)))
        nodes.append(((left + right) / 2, height))
    return Tree(tuple(branches), max((height for *_, height, _ in merges.tolist()), default=0.0) or 1.0)


def matrix_page(comparison: HeadComparison, lettering: Lettering) -> Page:
    """The distances of all pairs, heads in the order of their clusters, which stand above."""
    table, arrangement = comparison.tables[0], comparison.arrangements[0]
    heads, roles, order, n = comparison.heads, comparison.roles, arrangement.order, len(comparison.heads)
    colors, marks = layer_colors(heads), marks_for(set(roles or ()) - {""})
    strips = [[colors[heads[head][0]] for head in order]]
    if roles is not None:
        strips.append([marks[roles[head]].color if roles[head] else NO_ROLE for head in order])
    thick = len(strips) * (_STRIP_PX + 3)
    left, top = corner = layout.MARGIN_PX + 60 + thick, _TOP_PX + _TREE_PX + 8 + thick
    page = _MatrixPage(comparison, table.distances[np.ix_(order, order)], corner, 44, lettering)
    cell, narrow, room = page.cell, page.paper.is_narrow, page.paper.room_px
    tree, base = tree_of(arrangement.merges, order), top - thick - 3
    page.lines(
        [[(left + x * cell, base - y / tree.top * (_TREE_PX - 6)) for x, y in branch] for branch in tree.branches],
        color="#555555",
        width_px=1.1,
    )
    for strip, row in enumerate(strips):
        aside, gap = (len(strips) - strip) * (_STRIP_PX + 3), 1 if cell > 5 else 0
        page.fill([(left + i * cell, top - aside, cell - gap, _STRIP_PX) for i in range(n)], row)
        page.fill([(left - aside, top + i * cell, _STRIP_PX, cell - gap) for i in range(n)], row)
    page.name_rows([head_name(heads[head]) for head in order], left - thick - 5)
    x, below = page.write_key(table_line(table))
    entries = [(f"L{layer}", color, "") for layer, color in colors.items()]
    below = page.legend(x, below + 26, "layer", entries, room // 66 if narrow else 1)
    if entries := [] if roles is None else role_entries(roles, marks):
        below = page.legend(x, below + 14, "strongest role", entries, room // 220 if narrow else 1)
    notes = [
        "heads in the order of their clusters (average linkage); lines above: where clusters merge",
        *table_notes(table, comparison.kind),
    ]
    page.finish(max(top + n * cell, below) + 30, notes)
    return page


def models_page(comparison: ModelComparison, lettering: Lettering) -> Page:
    """The distances between the heads of two models, matched pairs framed."""
    table, matching = comparison.tables[0], comparison.matchings[0]
    left, top = corner = layout.MARGIN_PX + (60 if lettering.paper.fixed else 84), _TOP_PX + 66
    page = _MatrixPage(comparison, table.distances, corner, 40, lettering)
    cell, size = page.cell, page.name_px
    page.outline([(left + b * cell, top + a * cell, cell, cell) for a, b in matching.tolist()], _MATCH, 1.6)
    page.name_rows(list(map(head_name, comparison.heads)), left - 6)
    for column, head in list(enumerate(comparison.other_heads))[:: page.name_step]:
        page.write(left + (column + 0.5) * cell, top - 6, head_name(head), size, ha="center", va="bottom", rotation=90)
    _, below = page.write_key(table_line(table))
    notes = [
        f"rows: heads of {model_of(comparison.run)} · columns: heads of {model_of(comparison.other_run)}",
        "framed: the one-to-one matching with the least sum of distances; "
        f"{comparison.count_moved()} of {len(matching)} match a head of another number",
        *table_notes(table, comparison.kind),
    ]
    page.finish(max(top + len(comparison.heads) * cell, top + 120, below) + 30, notes)
    return page


class _MatrixPage(Page):
    """A page with a matrix of distances between heads, its key beside it or on narrow paper below."""

    def __init__(
        self,
        comparison: HeadComparison | ModelComparison,
        values: NDArray[np.float64],
        corner: tuple[int, int],
        most_px: int,
        lettering: Lettering,
    ) -> None:
        """Draws the values from their upper left corner on; a cell is `most_px` wide at most."""
        paper, (rows, columns) = lettering.paper, values.shape
        beside = 0 if paper.is_narrow else 40 + _LEGEND_PX
        room = paper.width_px - layout.MARGIN_PX - corner[0] - beside if paper.fixed else _MATRIX_PX
        self.cell = paper.whole(min(float(most_px), room / max(rows, columns)), 2)
        super().__init__(
            paper.width_for(corner[0] + columns * self.cell + 40 + _LEGEND_PX + layout.MARGIN_PX), lettering
        )
        self.box, self.high = (*corner, columns * self.cell, rows * self.cell), _highest(values)
        self.name_step = max(1, math.ceil(max(9, paper.least_px / 0.82) / self.cell))
        self.name_px = paper.letters(min(12.0, self.cell * self.name_step * 0.82))
        self.head(title_of(comparison), texts_line(comparison.corpus))
        self.matrix(self.box, values, _ALIKE, (0, self.high))

    def name_rows(self, names: Sequence[str], right: float) -> None:
        """Names heads at the left, as many as have room; names end at `right`."""
        for row, name in list(enumerate(names))[:: self.name_step]:
            y = self.box[1] + (row + 0.5) * self.cell
            self.write(right, y, name, self.name_px, ha="right", va="center_baseline")

    def write_key(self, heading: str) -> tuple[int, float]:
        """Draws the colour bar; returns its left edge and where it ends."""
        left, top, wide, tall = self.box
        x, y, width = math.ceil(left + wide) + 40, int(top) + 4, _LEGEND_PX - 40
        if self.paper.is_narrow:
            x, y, width = layout.MARGIN_PX + 8, math.ceil(top + tall) + 28, min(300, self.paper.room_px - 60)
        return x, _write_bar(self, (x, y, width, 14), _ALIKE, (0.0, self.high), heading, "dark: alike")


def _highest(values: NDArray[np.float64]) -> float:
    """The largest value; 1 where none is above 0."""
    return float(np.nanmax(values, initial=0.0)) or 1.0


# -- layers, and grids of heads


def layers_page(comparison: HeadComparison, lettering: Lettering) -> Page:
    """How far the heads of each layer are from those of each other; and of each to the next, with intervals."""
    table, arrangement, paper = comparison.tables[0], comparison.arrangements[0], lettering.paper
    layers = list(dict.fromkeys(layer for layer, _ in comparison.heads))
    n, values, title_px = len(layers), arrangement.layers, 40
    left, top = layout.MARGIN_PX + 50, _TOP_PX + 56
    square = 640.0 if not paper.fixed else paper.room_px - 50 if paper.is_narrow else 0.42 * paper.room_px
    cell = paper.whole(min(92.0, square / n), 14)
    size = n * cell
    high = _highest(values)
    least = float(np.nanmin(values, initial=high))
    low = max(0.0, math.floor(least * 20 - 0.5) / 20 if high - least < high / 2 else 0.0)
    right, down = math.ceil(left + size) + 130, top
    if paper.is_narrow:
        right, down = layout.MARGIN_PX + 70, math.ceil(top + size) + 150
    room = paper.width_px - layout.MARGIN_PX - 60 - right if paper.fixed else 560
    page = Page(paper.width_for(right + room + layout.MARGIN_PX + 60), lettering)
    page.head(f"{title_of(comparison)}: layers", f"{table_line(table)} · {texts_line(comparison.corpus)}")
    page.entitle(left, top - title_px, "layer by layer")
    _draw_layers(page, (left, top), values, cell, (low, high))
    step = max(1, math.ceil(max(14, 1.2 * paper.least_px) / cell))
    for row in range(0, n, step):
        name, middle = f"L{layers[row]}", (row + 0.5) * cell
        page.write(left - 8, top + middle, name, 13, ha="right", va="center_baseline", color=FAINT)
        if row % page.label_step(f"L{layers[-1]}", 13, cell) == 0:
            page.write(left + middle, top - 12, name, 13, ha="center", color=FAINT)
    _write_bar(page, (left, top + size + 20, min(300, size), 12), _ALIKE, (low, high), "", "dark: alike")
    page.entitle(right, down - title_px, "each layer to the next")
    pitch = max(cell, paper.least_px * 1.2)
    names = {row: f"L{layers[row]}–L{layers[row + 1]}" for row in range(0, n - 1, 1 if paper.fixed else step)}
    edges = np.stack([np.diagonal(edge, 1) for edge in (values, arrangement.layers_low, arrangement.layers_high)], 1)
    _draw_steps(page, (right, down, room, pitch), edges, high, names)
    page.lines([[(right, down), (right, down + pitch * n)]])
    notes = [
        "a cell: the distance between the heads of two layers, over all pairs of heads; on the diagonal within a layer",
        *(["lines: 95% interval over texts"] if np.isfinite(arrangement.layers_low).any() else []),
        *table_notes(table, comparison.kind),
    ]
    lowest = down + (pitch * n if paper.fixed else size) + 30
    page.finish(max(top + max(size, 200 * (not paper.fixed)) + 92, lowest), notes)
    return page


def _draw_layers(
    page: Page, corner: tuple[float, float], values: NDArray[np.float64], cell: float, limits: tuple[float, float]
) -> None:
    """Draws a square of coloured cells, with their numbers if there is room."""
    low, high = limits
    by_pair = {(row, column): float(value) for (row, column), value in np.ndenumerate(values)}
    cells = page.grid_cells(corner, (cell, cell), by_pair, _ALIKE, lambda value: (value - low) / (high - low))
    if cell >= max(34, 2.6 * page.paper.least_px):
        size = page.paper.letters(min(15.0, cell * 0.26))
        page.number_cells(list(cells.values()), [distance(value) for value in by_pair.values()], size)


def _draw_steps(
    page: Page, room: tuple[float, float, float, float], steps: NDArray[np.float64], high: float, names: dict[int, str]
) -> None:
    """Draws bars of the distance of each layer to the next, (step, 3) with the ends of its interval.

    `room` is the left and upper edge, the width of the largest distance `high`, and the pitch of bars; some steps have
    names.
    """
    left, top, width, pitch = room
    thick = min(30.0, pitch * 0.55)
    bars, whiskers = [], []
    for row, (value, *interval) in enumerate(steps.tolist()):
        if not math.isfinite(value):
            continue
        y, end = top + (row + 1) * pitch, left + width * value / high
        bars.append((left, y - thick / 2, end - left, thick))
        if all(map(math.isfinite, interval)):
            ends = [left + width * min(1.05, bound / high) for bound in interval]
            whiskers += [[(ends[0], y), (ends[1], y)], *[[(x, y - 5), (x, y + 5)] for x in ends]]
            end = max(end, ends[1])
        if row in names:
            page.write(left - 10, y, names[row], 13, ha="right", va="center_baseline")
            page.write(end + 8, y, distance(value), 13, ha="left", va="center_baseline", color=FAINT)
    page.fill(bars, ["#2f6fb0"] * len(bars))
    if whiskers:
        page.lines(whiskers, color=INK, width_px=1.4)


def same_heads_page(comparison: ModelComparison, lettering: Lettering) -> Page:
    """How far each head is from that of the same number in the other model, layers down and heads across."""
    table = comparison.tables[0]
    values = {comparison.heads[a]: float(table.distances[a, b]) for a, b in comparison.same()}
    pairs = [(comparison.heads[a], comparison.other_heads[b]) for a, b in comparison.matchings[0]]
    moved = {head for head, other in pairs if head != other}
    notes = [f"framed: matches a head of another number ({len(moved)})", *table_notes(table, comparison.kind)]
    title = f"{model_of(comparison.run)} and {model_of(comparison.other_run)} · heads of the same number"
    subtitle = f"{table_line(table)} · {texts_line(comparison.corpus)}"
    return grid_page(title, subtitle, [("", values)], notes, lettering, framed=moved)


def change_page(comparison: MinimalPair, paper: Paper = SCREEN) -> Page:
    """How much the rows of each head change, layers down and heads across: at the query, and overall."""
    lettering = lettering_for([title_of(comparison), both_texts(comparison), comparison.query or ""], paper)
    framed = {comparison.heads[head] for head in comparison.ranked()[:5]}
    overall = dict(zip(comparison.heads, comparison.overall().tolist(), strict=True))
    grids = [("overall: queries that are equal in both texts", overall)]
    if comparison.queries:
        at_query = dict(zip(comparison.heads, comparison.at_query().tolist(), strict=True))
        grids.insert(0, (f"at “{comparison.query}”", at_query))
    notes = [
        f"framed: the {amount(len(framed), 'head that changes', 'heads that change')} most",
        meaning(comparison.measure),
        *hidden_notes(comparison),
    ]
    return grid_page(title_of(comparison), both_texts(comparison), grids, notes, lettering, framed=framed)


def grid_page(
    title: str,
    subtitle: str,
    grids: Sequence[tuple[str, dict[HeadPlace, float]]],
    notes: Sequence[str],
    lettering: Lettering,
    *,
    framed: set[HeadPlace],
) -> Page:
    """Grids of layers and heads, one scale for all, some heads framed in the first."""
    paper, grid = lettering.paper, HeadGrid.over(head for _, values in grids for head in values)
    n_layers, n_heads = grid.shape
    several = 2 if len(grids) > 1 and not paper.is_narrow else 1
    room = (paper.room_px - 40 * (several - 1)) / several - 50 if paper.fixed else (paper.room_px - 50) / several
    cell_w = paper.whole(min(120.0, room / n_heads), 14)
    cell_h = max(14, min(round(cell_w * 0.66), 60, max(20, 900 // n_layers)))
    wide, tall = n_heads * cell_w, n_layers * cell_h
    beside = several == 2 and (paper.fixed or 2 * (50 + wide) <= layout.MIN_WIDTH_PX)
    page = Page(paper.width_for(1000, 2 * layout.MARGIN_PX + (1 + beside) * (50 + wide) + 40 * beside), lettering)
    page.head(title, subtitle)
    high = max((v for _, values in grids for v in values.values() if math.isfinite(v)), default=0.0) or 1.0
    left, top = layout.MARGIN_PX + 50, _TOP_PX + 50
    corners = layout.tile(len(grids), 2 if beside else 1, (left, top), (90 + wide, tall + 110))
    for (heading, values), corner in zip(grids, corners, strict=True):
        if heading:
            page.entitle(corner[0], corner[1] - 34, heading)
        cells = page.grid_cells(corner, (cell_w, cell_h), values, _APART, lambda value: value / high)
        page.name_axes(corner, grid, (cell_w, cell_h), size_px=13.0)
        if cell_w >= max(40, 2.7 * paper.least_px):
            texts = [distance(value) for value in values.values()]
            page.number_cells(list(cells.values()), texts, paper.letters(min(15.0, cell_w * 0.24)))
        if corner == corners[0] and framed:
            page.outline([cells[head][0] for head in sorted(framed) if head in cells], _MATCH, 2.0)
    bottom = corners[-1][1] + tall
    bar = (left, bottom + 20, min(320, page.width_px - left - layout.MARGIN_PX - 20), 12)
    _write_bar(page, bar, _APART, (0.0, high), "", "dark: differs most")
    page.finish(bottom + 86, notes)
    return page


# -- parts


def _write_bar(
    page: Page, bar: Box, cmap: str, limits: tuple[float, float], heading: str, meaning_of_dark: str
) -> float:
    """Draws a colour bar with its meaning; returns where it ends."""
    x, y, width, height = bar
    if heading:
        for line in wrap_lines(heading, width + 40, page.lettering):
            page.entitle(x, y, line, layout.CAPTION_PX)
            y += 17
        y -= 1
    page.draw_scale((x, y, width, height), cmap, limits, size_px=11.5, color=FAINT)
    page.write(x, y + height + 30, meaning_of_dark, layout.CAPTION_PX, ha="left", color=FAINT)
    return y + height + 38
