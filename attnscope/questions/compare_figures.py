"""Figures that comparisons alone have: distances with clusters, heads in the plane, maps and rows side by side."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from attnscope.drawing import layout
from attnscope.drawing.canvas import FAINT, INK, Box, Number, colormap, wrap_lines
from attnscope.drawing.inks import hex_of, ink_on
from attnscope.drawing.lettering import Lettering
from attnscope.drawing.map_figure import MapsFigure
from attnscope.drawing.maps import LABEL_ROOM_EM, MapsPage
from attnscope.drawing.page import Page
from attnscope.drawing.plots import spread
from attnscope.errors import amount
from attnscope.questions.distances import distance_line
from attnscope.questions.heatmap_sheets import axis_of
from attnscope.report.blocks import Report
from attnscope.report.numbers import digits
from attnscope.report.role_marks import UNCLASSIFIED, Mark, marks_for
from attnscope.report.wording import label
from attnscope.results.table import Floats

if TYPE_CHECKING:
    from attnscope.questions.compare import Comparison
    from attnscope.results.tokens import Tokens

NO_ROLE = "#e9e9e9"
"""The colour of heads without a role."""

MATCH = "#d1495b"
"""The colour of frames around matched heads."""

_ALIKE = "Blues_r"
_WEIGHTS, _SIGNED = "Blues", "RdBu_r"
_FIRST, _SECOND = "#2f6fb0", "#d9822b"
_TOP_PX = layout.MARGIN_PX + 62
_TREE_PX = 130
_STRIP_PX = 14
_LEGEND_PX = 250
_MATRIX_PX = 1010
_NAMES_PX = 110  # of layers and roles beside a map on paper
_PLANE_PX = 720
_MOST_NUMBERED = 300  # heads on a map; of more the numbers would hide the map
_MOST_KEYS, _MOST_KEYS_NARROW = 24, 10


class View:
    """A figure that the terminal has nothing of."""

    def show(self, console: Any, *, every: bool) -> Sequence[Any]:
        """Return nothing."""
        return []


# Distances as a matrix


@dataclass(frozen=True, eq=False)
class Matrix(View):
    """The distances between heads: of one model in the order of their clusters, of two with the matching framed."""

    comparison: Comparison

    def draw(self, report: Report, lettering: Lettering) -> Page:
        """Return the page."""
        if self.comparison.compared == "models":
            return self._draw_models(report, lettering)
        return self._draw_clusters(report, lettering)

    def _draw_clusters(self, report: Report, lettering: Lettering) -> Page:
        comparison, name = self.comparison, self.comparison.distance_names[0]
        heads = comparison.table("heads")
        order = comparison.grids[f"order:{name}"]
        n_heads = len(heads)

        # Strips beside the matrix: the colour of each head's layer, and of its role.
        colors = layer_colors(heads["layer"])
        strips = [[colors[layer] for layer in heads["layer"][order].tolist()]]
        marks = marks_for({*heads["role"].tolist()} - {""}) if "role" in heads else {}
        if "role" in heads:
            strips.append([marks[role].color if role else NO_ROLE for role in heads["role"][order].tolist()])
        thick = len(strips) * (_STRIP_PX + 3)

        # The matrix.
        left, top = layout.MARGIN_PX + 60 + thick, _TOP_PX + _TREE_PX + 8 + thick
        page = _MatrixPage(report, comparison.distance()[np.ix_(order, order)], (left, top), 44, lettering)
        cell, narrow, room = page.cell, page.paper.is_narrow, page.paper.room_px
        for strip, row in enumerate(strips):
            aside = (len(strips) - strip) * (_STRIP_PX + 3)
            gap = 1 if cell > 5 else 0
            page.fill([(left + i * cell, top - aside, cell - gap, _STRIP_PX) for i in range(n_heads)], row)
            page.fill([(left - aside, top + i * cell, _STRIP_PX, cell - gap) for i in range(n_heads)], row)
        page.name_rows([comparison.head_names[head] for head in order], left - thick - 5)

        # The tree of clusters above it.
        branches, highest = tree_of(comparison.grids[f"merges:{name}"], order)
        base = top - thick - 3
        lines = []
        for branch in branches:
            lines.append([(left + x * cell, base - y / highest * (_TREE_PX - 6)) for x, y in branch])
        page.lines(lines, color="#555555", width_px=1.1)

        # What the colours mean.
        x, below = page.write_key(distance_line(name))
        entries = [(f"L{layer}", color, "") for layer, color in colors.items()]
        below = page.legend(x, below + 26, "layer", entries, room // 66 if narrow else 1)
        if "role" in heads:
            entries = role_entries(heads["role"].tolist(), marks)
            below = page.legend(x, below + 14, "strongest role", entries, room // 220 if narrow else 1)
        notes = ["heads in the order of their clusters (average linkage); lines above: where clusters merge"]
        page.finish(max(top + n_heads * cell, below) + 30, [*notes, *report.footer])
        return page

    def _draw_models(self, report: Report, lettering: Lettering) -> Page:
        comparison, name = self.comparison, self.comparison.distance_names[0]
        left, top = layout.MARGIN_PX + (60 if lettering.paper.fixed else 84), _TOP_PX + 66
        page = _MatrixPage(report, comparison.distance(), (left, top), 40, lettering)
        cell = page.cell
        match = comparison.grids[f"match:{name}"]
        matched = [(row, other) for row, other in enumerate(match.tolist()) if other >= 0]
        page.outline([(left + other * cell, top + row * cell, cell, cell) for row, other in matched], MATCH, 1.6)
        page.name_rows(comparison.head_names, left - 6)
        names = comparison.other_head_names
        for column in range(0, len(names), page.name_step):
            x = left + (column + 0.5) * cell
            page.write(x, top - 6, names[column], page.name_px, ha="center", va="bottom", rotation=90)
        _, below = page.write_key(distance_line(name))
        n_moved = int(comparison.moved().sum())
        notes = [
            "rows: heads of the first model · columns: heads of the second",
            f"framed: the one-to-one matching with the least sum of distances; {n_moved} of {len(matched)} match a "
            "head of another number",
        ]
        bottom = max(top + len(comparison.head_names) * cell, top + 120, below)
        page.finish(bottom + 30, [*notes, *report.footer])
        return page


def tree_of(merges: Floats, order: NDArray[np.int64]) -> tuple[list[tuple[tuple[float, float], ...]], float]:
    """Return the branches of a dendrogram over heads in the order of the leaves, and its largest distance.

    A branch has four points (x, y): x in heads, with the middle of a head at n + 1/2, y the distance of the merge.
    """
    nodes: list[tuple[float, float]] = [(0.0, 0.0)] * len(order)
    for place, head in enumerate(order.tolist()):
        nodes[head] = (place + 0.5, 0.0)
    branches: list[tuple[tuple[float, float], ...]] = []
    for a, b, height, _ in merges.tolist():
        (left, low), (right, lower) = sorted((nodes[int(a)], nodes[int(b)]))
        branches.append(((left, low), (left, height), (right, height), (right, lower)))
        nodes.append(((left + right) / 2, height))
    highest = float(merges[:, 2].max(initial=0.0))
    return branches, highest or 1.0


class _MatrixPage(Page):
    """A page with a matrix of distances between heads, its key beside it or on narrow paper below."""

    def __init__(
        self, report: Report, values: Floats, corner: tuple[int, int], most_px: int, lettering: Lettering
    ) -> None:
        """Draw the values from their upper left corner on; a cell is `most_px` wide at most."""
        paper = lettering.paper
        rows, columns = values.shape
        beside = 0 if paper.is_narrow else 40 + _LEGEND_PX
        room = paper.width_px - layout.MARGIN_PX - corner[0] - beside if paper.fixed else _MATRIX_PX
        self.cell = paper.whole(min(float(most_px), room / max(rows, columns)), 2)
        width = corner[0] + columns * self.cell + 40 + _LEGEND_PX + layout.MARGIN_PX
        super().__init__(paper.width_for(width), lettering)
        self.box = (*corner, columns * self.cell, rows * self.cell)
        self.high = float(np.nanmax(values, initial=0.0)) or 1.0
        self.name_step = max(1, math.ceil(max(9, paper.least_px / 0.82) / self.cell))
        self.name_px = paper.letters(min(12.0, self.cell * self.name_step * 0.82))
        self.head(report.model, report.subtitle)
        self.matrix(self.box, values, _ALIKE, (0, self.high))

    def name_rows(self, names: Sequence[str], right: float) -> None:
        """Name heads at the left, as many as have room; names end at `right`."""
        for row in range(0, len(names), self.name_step):
            y = self.box[1] + (row + 0.5) * self.cell
            self.write(right, y, names[row], self.name_px, ha="right", va="center_baseline")

    def write_key(self, heading: str) -> tuple[int, float]:
        """Draw the colour bar; return its left edge and where it ends."""
        left, top, wide, tall = self.box
        x, y, width = math.ceil(left + wide) + 40, int(top) + 4, _LEGEND_PX - 40
        if self.paper.is_narrow:
            x, y = layout.MARGIN_PX + 8, math.ceil(top + tall) + 28
            width = min(300, self.paper.room_px - 60)
        for line in wrap_lines(heading, width + 40, self.lettering):
            self.entitle(x, y, line, layout.CAPTION_PX)
            y += 17
        self.draw_scale((x, y - 1, width, 14), _ALIKE, (0.0, self.high), size_px=11.5, color=FAINT)
        self.write(x, y + 43, "dark: alike", layout.CAPTION_PX, ha="left", color=FAINT)
        return x, y + 51


# Heads in the plane


@dataclass(frozen=True, eq=False)
class HeadPlane(View):
    """All heads as discs in the plane that keeps their distances best, by layer and by role."""

    comparison: Comparison

    def draw(self, report: Report, lettering: Lettering) -> Page:
        """Return the page."""
        comparison, name = self.comparison, self.comparison.distance_names[0]
        places, paper = comparison.grids[f"places:{name}"], lettering.paper
        panels = list(self._panels())

        # How large the plane is, and how much of the distances a pixel is.
        beside, plane = not paper.is_narrow, _PLANE_PX
        if paper.fixed and beside:
            plane = (paper.room_px - 30 * (len(panels) - 1)) // len(panels) - _NAMES_PX
        elif paper.fixed:
            plane = paper.room_px
        pitch = plane + 30 + (_NAMES_PX if paper.fixed else 180)
        low, high = places.min(0, initial=0.0), places.max(0, initial=0.0)
        extent = float((high - low).max()) * 1.1 or 1.0
        tall = max(min(320, plane), math.ceil(plane * min(1.0, float(high[1] - low[1]) / extent + 0.1)))
        scale = plane / extent
        radius, is_lettered = _disc_px(len(places), plane, paper)

        page = Page(paper.width_for(2 * layout.MARGIN_PX + len(panels) * pitch - 30), lettering)
        page.head(f"{report.model}: a map of its heads", report.subtitle)
        left, top, bottom = layout.MARGIN_PX, _TOP_PX + 26, 0.0
        for number, (heading, discs, entries) in enumerate(panels):
            box = (left, top, plane, tall)
            page.entitle(left, top - 12, heading if is_lettered else heading.partition(" · ")[0])
            page.frames([box])
            true = (places - (low + high) / 2) * (scale, -scale) + (left + plane / 2, top + tall / 2)
            apart = spread(true, radius * 1.05, box) if is_lettered else true
            lettered = [(color, letter if is_lettered else "") for color, letter in discs]
            _draw_discs(page, true, apart, radius, lettered)
            _write_distance(page, box, scale, extent, apart)
            if beside:
                bottom = max(bottom, top + tall, page.legend(left + plane + 20, top + 10, "", entries) - 10)
                left += pitch
            else:
                columns = max(1, paper.room_px // (220 if number else 66))
                bottom = page.legend(left, top + tall + 18, "", entries, columns)
                top = math.ceil(bottom) + 42
        first, second = comparison.grids[f"explained:{name}"].tolist()
        notes = [
            f"classical multidimensional scaling; the axes hold {first:.0%} and {second:.0%} of the variance: heads "
            "that are close here may still be far apart along others"
        ]
        if is_lettered:
            notes.append("heads that would cover each other stand side by side: a line leads to the true place")
        page.finish(bottom + (34 if beside else 46), [*notes, *report.footer])
        return page

    def _panels(self) -> Iterator[tuple[str, list[tuple[str, str]], list[tuple[str, str, str]]]]:
        """Return what each panel is: its heading, the colour and letter of each head, and the legend."""
        heads = self.comparison.table("heads")
        numbered = len(heads) <= _MOST_NUMBERED
        colors = layer_colors(heads["layer"])
        pairs = zip(heads["layer"].tolist(), heads["head"].tolist(), strict=True)
        discs = [(colors[layer], str(head) if numbered else "") for layer, head in pairs]
        yield "colour: layer · number: head", discs, [(f"L{layer}", color, "") for layer, color in colors.items()]
        if "role" in heads:
            roles = heads["role"].tolist()
            marks = marks_for({*roles} - {""})
            of_role = [marks.get(role, Mark("", NO_ROLE)) for role in roles]
            discs = [(mark.color, mark.glyph if numbered else "") for mark in of_role]
            yield "colour and letter · strongest role", discs, role_entries(roles, marks)


def _disc_px(n: int, plane: float, paper: layout.Paper) -> tuple[float, bool]:
    """Return the radius of discs on a plane of a width, and whether they have letters in them."""
    radius = 11.0 if n <= 100 else 8.5 if n <= _MOST_NUMBERED else 5.0
    if paper.fixed:  # discs of which none hides too many others; letters where they have room
        wanted = paper.least_px / 1.1
        radius = wanted if radius < wanted < plane / 60 else min(radius, max(3.0, plane / 45))
    if n <= _MOST_NUMBERED and radius * 1.1 >= paper.least_px:
        return radius, True
    return min(radius, max(3.0, plane / 80)), False


def _draw_discs(page: Page, true: Floats, apart: Floats, radius: float, discs: Sequence[tuple[str, str]]) -> None:
    """Draw discs, each of a colour and with a text; from those that were moved a line leads to their true places.

    Where they overlap all the same, later ones lie over earlier ones and their texts.
    """
    moves = np.stack([true, apart], 1).tolist()
    page.lines([pair for pair in moves if math.dist(*pair) > 1], color=FAINT, width_px=0.9)
    for number, ((x, y), (color, letter)) in enumerate(zip(apart.tolist(), discs, strict=True)):
        order = 3 + number * 1e-3
        page.dot((x, y), radius, color, order, 1.25)
        if letter:
            page.outline_numbers([Number(x, y, letter, radius * 1.1, ink_on(color), "bold")], order + 5e-4)


def _write_distance(page: Page, box: Box, scale: float, extent: float, discs: Floats) -> None:
    """Draw how long a distance is on the map, in the corner with the fewest discs, the lower left one first."""
    length = layout.nice_ticks(extent / 4)[-1] or extent / 4
    room = np.array([length * scale, 16])
    near = np.array(box[:2]) + (18, 34)
    far = np.array(box[:2]) + box[2:] - (18 + room[0], 18)
    corners = [np.array([x, y]) for x in (near[0], far[0]) for y in (far[1], near[1])]

    def count_discs(corner: Floats) -> int:
        return int((np.abs(discs - corner - room * (0.5, -0.5)) < room / 2 + 12).all(-1).sum())

    x, y = min(corners, key=count_discs).tolist()
    page.lines([[(x, y - 4), (x, y), (x + length * scale, y), (x + length * scale, y - 4)]], color=INK, width_px=1.4)
    page.write(x + length * scale / 2, y - 12, f"{length:g}", layout.CAPTION_PX, ha="center")


def role_entries(roles: Sequence[str], marks: dict[str, Mark]) -> list[tuple[str, str, str]]:
    """Return a legend's entries for roles: the name with how many heads have it, the colour and the letter."""
    entries = [(f"{label(name)} ({roles.count(name)})", mark.color, mark.glyph) for name, mark in marks.items()]
    n_none = roles.count("")
    return [*entries, (f"unclassified ({n_none})", NO_ROLE, UNCLASSIFIED)] if n_none else entries


def layer_colors(layers: NDArray[np.int64]) -> dict[int, str]:
    """Return a colour for each layer, from dark to light."""
    known, cmap = np.unique(layers).tolist(), colormap("viridis")
    return {layer: hex_of(cmap, 0.95 * number / max(1, len(known) - 1)) for number, layer in enumerate(known)}


# Maps side by side


@dataclass(frozen=True, eq=False)
class Panel:
    """A map with its title: weights, (query, key), the tokens at its sides, and those that are always named."""

    title: str
    values: NDArray[Any]
    queries: Tokens
    keys: Tokens
    marked: Sequence[int] = ()


@dataclass(frozen=True, eq=False)
class Panels(View):
    """Maps side by side in the same colours: weights on a scale from 0 to 1, or differences on one with a sign.

    Attributes:
        title: The title of the figure, after the model.
        panels: The maps.
        notes: What must be known to read them.
        difference: What a difference is; empty = the maps hold weights.
    """

    title: str
    panels: Sequence[Panel]
    notes: Sequence[str]
    difference: str = ""

    def draw(self, report: Report, lettering: Lettering) -> Page:
        """Return the page."""
        low, high = 0.0, 1.0
        if self.difference:
            largest = [float(np.nan_to_num(np.abs(panel.values)).max(initial=0.0)) for panel in self.panels]
            high = max(largest) or 1.0
            low = -high
        axes = [(axis_of(panel.queries, panel.marked), axis_of(panel.keys, panel.marked)) for panel in self.panels]
        figure = MapsFigure(
            subtitle=report.subtitle,
            notes=(*self.notes, *report.footer),
            axes=tuple(dict.fromkeys(axes)) if len({*axes}) == 1 else tuple(axes),
            titles=tuple(panel.title for panel in self.panels),
            meaning=self.difference or "attention weight: the share of a query's attention that a key gets",
            cmap=_SIGNED if self.difference else _WEIGHTS,
            lettered=(report.model, self.title),
        )
        page = MapsPage(figure, lettering.paper)
        values = [_pool_signed(panel.values.astype(np.float32), page.pool) for panel in self.panels]
        ticks = {tick: digits(tick) for tick in layout.ticks_between(low, high)}
        page.show(f"{report.model} · {self.title}", values, [(low, high)] * len(values), (low, high), ticks)
        return page


def _pool_signed(values: NDArray[np.float32], pool: int) -> NDArray[np.float32]:
    """Return the value of the largest size in each block of pool x pool, with its sign."""
    if pool == 1:
        return values
    for axis in (0, 1):
        starts = np.arange(0, values.shape[axis], pool)
        highest = np.maximum.reduceat(values, starts, axis=axis)
        lowest = np.minimum.reduceat(values, starts, axis=axis)
        values = np.where(highest >= -lowest, highest, lowest)
    return values


# Rows of two texts, key by key


@dataclass(frozen=True, eq=False)
class RowPair:
    """What a head attends to from one query in two texts, (key,) each."""

    title: str
    before: Floats
    after: Floats


@dataclass(frozen=True, eq=False)
class Rows(View):
    """Two bars per key for each head: what one query attends to in two texts.

    Attributes:
        title: The title of the figure, after the model.
        rows: The heads.
        keys: What the keys are called.
        notes: What must be known to read them.
    """

    title: str
    rows: Sequence[RowPair]
    keys: Sequence[str]
    notes: Sequence[str]

    def draw(self, report: Report, lettering: Lettering) -> Page:
        """Return the page."""
        paper = lettering.paper
        page = Page(paper.width_px, lettering)
        page.head(f"{report.model} · {self.title}", report.subtitle)
        shown = self._largest_keys(_MOST_KEYS_NARROW if paper.is_narrow else _MOST_KEYS)
        bottom = self._draw_panels(page, shown)
        notes = [*self.notes]
        if len(shown) < len(self.keys):
            notes.append(f"the {amount(len(shown), 'key')} with the largest weights")
        page.finish(bottom, [*notes, *report.footer])
        return page

    def _largest_keys(self, most: int) -> list[int]:
        """Return the keys with the largest weights, in their order."""
        weights = [np.maximum(row.before, row.after) for row in self.rows]
        return sorted(np.argsort(-np.max(weights, 0), kind="stable")[:most].tolist())

    def _draw_panels(self, page: Page, keys: Sequence[int]) -> float:
        """Draw a panel of bars for each head; return where the notes begin."""
        paper, lettering = page.paper, page.lettering
        columns = min(2 if paper.is_narrow else 3, len(self.rows))
        pitch = max(24, min(34, 760 // len(keys)))
        size, thick = paper.letters(min(layout.MAX_LABEL_PX, pitch * 0.46)), pitch * 0.36
        names = [self.keys[key] for key in keys]
        left = math.ceil(min(max(lettering.width_px(name, size) for name in names), LABEL_ROOM_EM * size)) + 14
        if paper.fixed:
            left = min(left, paper.room_px // 3)
        panel, high = (paper.room_px - left - columns * 40) // columns, len(keys) * pitch
        start, top = layout.MARGIN_PX + left, layout.MARGIN_PX + 110
        for x, name, color in ((start, "first text", _FIRST), (start + 130, "second text", _SECOND)):
            page.fill([(x, top - 52, 18, 12)], [color])
            page.write(x + 26, top - 46, name, layout.CAPTION_PX, ha="left")
        corners = layout.tile(len(self.rows), columns, (start, top + 14), (panel + 40, high + 60))
        page.bar_axes(corners, panel, high)
        for number, (row, corner) in enumerate(zip(self.rows, corners, strict=True)):
            page.entitle(corner[0], corner[1] - 16, row.title)
            if number % columns == 0:
                for place, name in enumerate(names):
                    shown = lettering.fit(name, size, min(LABEL_ROOM_EM * size, left - 10))
                    y = corner[1] + (place + 0.5) * pitch
                    page.write(corner[0] - 7, y, shown, size, ha="right", va="center_baseline", color=INK)
            _draw_bars(page, row, keys, corner, (panel, pitch, thick))
        return top + math.ceil(len(self.rows) / columns) * (high + 60) + 8


def _draw_bars(
    page: Page, row: RowPair, keys: Sequence[int], corner: tuple[float, float], sizes: tuple[float, float, float]
) -> None:
    """Draw the two bars of each key, with their weights where they are not tiny.

    Args:
        page: The page.
        row: The head.
        keys: Which keys are shown.
        corner: The upper left corner of the panel.
        sizes: The width of a full bar, the distance of two keys, and the thickness of a bar.
    """
    full, pitch, thick = sizes
    x, top = corner
    for weights, shift, color in ((row.before, -thick, _FIRST), (row.after, 0.0, _SECOND)):
        for place, key in enumerate(keys):
            weight = float(weights[key])
            y = top + (place + 0.5) * pitch + shift
            page.fill([(x, y, full * weight, thick - 1)], [color])
            if weight < 0.005 or thick * 1.05 < page.paper.least_px:
                continue
            is_inside = weight > 0.85
            page.write(
                x + full * weight + (-5 if is_inside else 5),
                y + thick / 2,
                f"{weight:.2f}",
                min(12.0, thick * 1.05),
                ha="right" if is_inside else "left",
                va="center_baseline",
                color="#ffffff" if is_inside else FAINT,
            )
