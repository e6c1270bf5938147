"""Comparisons of heads as figures: a matrix with its clusters, a map, layers, what changes; PNG, SVG and PDF."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence, Sized
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from attnscope.errors import amount
from attnscope.records.comparison import (
    Comparison,
    HeadComparison,
    MinimalPair,
    ModelComparison,
    PickedHeads,
    PicturePair,
)
from attnscope.records.frame.pair_tables import HeadPlace, head_name
from attnscope.views.compare import maps as compare_maps
from attnscope.views.compare import pictures as compare_pictures
from attnscope.views.compare.summary import (
    PICTURE_NOTES,
    both_texts,
    distance,
    hidden_notes,
    meaning,
    table_line,
    table_notes,
    texts_line,
    title_of,
)
from attnscope.views.drawing import layout
from attnscope.views.drawing.canvas import FAINT, INK, Box, Number, Page, colormap, wrap_lines
from attnscope.views.drawing.inks import hex_of, ink_on
from attnscope.views.drawing.layout import SCREEN, Paper
from attnscope.views.drawing.lettering import Lettering, lettering_for
from attnscope.views.drawing.plots import spread
from attnscope.views.drawing.style import USUAL, Style
from attnscope.views.heads.summary import UNCLASSIFIED, Mark, marks_for
from attnscope.views.tables.numbers import digits
from attnscope.views.tables.wording import label, model_of

if TYPE_CHECKING:
    from matplotlib.colors import Colormap

_ALIKE, _APART, _LAYERS = "Blues_r", "Blues", "viridis"
_UNKNOWN, _NO_ROLE = "#dcdcdc", "#e9e9e9"
_MATCH = "#d1495b"
_TOP_PX = layout.MARGIN_PX + 62
_TREE_PX = 130
_STRIP_PX = 14
_LEGEND_PX = 250
_MATRIX_PX = 1010
_NAMES_PX = 110  # of layers and roles beside a map on paper
_PLANE_PX = 720
_MOST_NUMBERED = 300  # heads on a map; of more the numbers would hide the map


def pages(found: Comparison, style: Style = USUAL) -> Iterator[tuple[str, Page]]:
    """The figures one after the other, each with its file name without the ending.

    All heads: `matrix`, `map`, `layers`. Picked heads: `picked`, `differences`. A minimal pair: `change`, `maps`, and
    with a query `query-N`. Two photos or questions: `change`, `pictures`. Two models: `matrix`, `same-heads`.
    """
    if isinstance(found, HeadComparison):
        lettering = lettering_for([title_of(found), texts_line(found.corpus), found.roles_source], style.paper)
        yield "matrix", matrix_page(found, lettering)
        yield "map", map_page(found, lettering)
        yield "layers", layers_page(found, lettering)
    elif isinstance(found, ModelComparison):
        lettering = lettering_for([title_of(found), texts_line(found.corpus)], style.paper)
        yield "matrix", models_page(found, lettering)
        if found.same():
            yield "same-heads", same_heads_page(found, lettering)
    elif isinstance(found, PickedHeads):
        yield from compare_maps.picked_pages(found, style.paper)
    elif isinstance(found, MinimalPair):
        yield "change", change_page(found, style.paper)
        yield from compare_maps.pair_pages(found, style.paper)
    elif isinstance(found, PicturePair):
        yield "change", change_page(found, style.paper)
        yield "pictures", compare_pictures.maps_page(found, style)


# -- matrices


@dataclass(frozen=True)
class Tree:
    """The branches of a clustering, a merge each: four points (x, y), x in heads, y the distance of the merge."""

    branches: tuple[tuple[tuple[float, float], ...], ...]
    top: float


def tree_of(merges: NDArray[np.float64], order: NDArray[np.int64]) -> Tree:
    """Where the branches of a dendrogram are over heads in the order of the leaves; a head's middle is at n + 1/2."""
    n = len(order)
    at: list[tuple[float, float]] = [(0.0, 0.0)] * n
    for place, head in enumerate(order.tolist()):
        at[head] = (place + 0.5, 0.0)
    branches = []
    for a, b, height, _ in merges.tolist():
        (left, low), (right, lower) = sorted((at[int(a)], at[int(b)]))
        branches.append(((left, low), (left, height), (right, height), (right, lower)))
        at.append(((left + right) / 2, height))
    return Tree(tuple(branches), max((height for *_, height, _ in merges.tolist()), default=0.0) or 1.0)


def matrix_page(found: HeadComparison, lettering: Lettering) -> Page:
    """The distances of all pairs, heads in the order of their clusters, which stand above."""
    table, arrangement = found.tables[0], found.arrangements[0]
    n = len(found.heads)
    order = arrangement.order
    marks = marks_for(set(found.roles or ()) - {""})
    strips = 1 + (found.roles is not None)
    left = layout.MARGIN_PX + 56 + strips * (_STRIP_PX + 3) + 4
    paper = lettering.paper
    cell = _cell_px(paper, left, n, 44)
    top = _TOP_PX + _TREE_PX + 8 + strips * (_STRIP_PX + 3)
    size = n * cell
    layers = sorted({layer for layer, _ in found.heads})
    layer_colors = _layer_colors(layers)
    layer_entries = [(f"L{layer}", layer_colors[layer], "") for layer in layers]
    role_entries = [] if found.roles is None else _role_entries(found.roles, marks)
    width = paper.width_for(left + size + 40 + _LEGEND_PX + layout.MARGIN_PX)
    x, y, bar_px = _key_place(paper, left, top, size)
    columns = (paper.room_px // 66, paper.room_px // 220) if paper.is_narrow else (1, 1)
    key_px = _bar_px(table_line(table), bar_px, lettering) + 26 + 22 + _legend_px(layer_entries, columns[0])
    key_px += 36 + _legend_px(role_entries, columns[1]) if role_entries else 0
    notes = [
        "heads in the order of their clusters (average linkage); lines above: where clusters merge",
        *table_notes(table, found.kind),
    ]
    page = Page.above(notes, width, math.ceil(max(top + size, y + key_px)) + 30, lettering)
    page.head(title_of(found), texts_line(found.corpus))
    tree = tree_of(arrangement.merges, order)
    base = top - strips * (_STRIP_PX + 3) - 3
    page.lines(
        [[(left + x * cell, base - y / tree.top * (_TREE_PX - 6)) for x, y in branch] for branch in tree.branches],
        color="#555555",
        width_px=1.1,
    )
    colors = [[layer_colors[found.heads[head][0]] for head in order]]
    if found.roles is not None:
        colors.append([marks[found.roles[head]].color if found.roles[head] else _NO_ROLE for head in order])
    for strip, row in enumerate(colors):
        above, beside = top - (strips - strip) * (_STRIP_PX + 3), left - (strips - strip) * (_STRIP_PX + 3)
        gap = 1 if cell > 5 else 0
        page.fill([(left + i * cell, above, cell - gap, _STRIP_PX) for i in range(n)], row)
        page.fill([(beside, top + i * cell, _STRIP_PX, cell - gap) for i in range(n)], row)
    values = table.distances[np.ix_(order, order)]
    high = float(np.nanmax(values, initial=0.0)) or 1.0
    _image(page, (left, top, size, size), values, colormap(_ALIKE), high)
    names = [head_name(found.heads[head]) for head in order]
    step = _label_step(paper, cell)
    for place in range(0, n, step):
        page.write(
            left - strips * (_STRIP_PX + 3) - 5, top + (place + 0.5) * cell, names[place],
            paper.letters(min(12.0, cell * step * 0.82)), ha="right", va="center_baseline",
        )  # fmt: skip
    below = _bar(page, (x, y, bar_px, 14), _ALIKE, high, table_line(table), "dark: alike")
    below = _legend(page, x, below + 26, "layer", layer_entries, columns[0])
    if role_entries:
        _legend(page, x, below + 14, "strongest role", role_entries, columns[1])
    return page


def models_page(found: ModelComparison, lettering: Lettering) -> Page:
    """The distances between the heads of two models, matched pairs framed."""
    table, matching = found.tables[0], found.matchings[0]
    rows, columns = len(found.heads), len(found.other_heads)
    paper = lettering.paper
    left, top = layout.MARGIN_PX + (60 if paper.fixed else 84), _TOP_PX + 66
    cell = _cell_px(paper, left, max(rows, columns), 40)
    width = paper.width_for(left + columns * cell + 40 + _LEGEND_PX + layout.MARGIN_PX)
    x, y, bar_px = _key_place(paper, left, top, rows * cell)
    x = x if paper.is_narrow else math.ceil(left + columns * cell) + 40
    notes = [
        f"rows: heads of {model_of(found.run)} · columns: heads of {model_of(found.other_run)}",
        "framed: the one-to-one matching with the least sum of distances; "
        f"{found.moved()} of {len(matching)} match a head of another number",
        *table_notes(table, found.kind),
    ]
    key_px = _bar_px(table_line(table), bar_px, lettering)
    footer_y = math.ceil(max(top + rows * cell, top + 120, y + key_px * paper.is_narrow)) + 30
    page = Page.above(notes, width, footer_y, lettering)
    page.head(title_of(found), texts_line(found.corpus))
    values = table.distances
    high = float(np.nanmax(values, initial=0.0)) or 1.0
    _image(page, (left, top, columns * cell, rows * cell), values, colormap(_ALIKE), high)
    page.outline([(left + b * cell, top + a * cell, cell, cell) for a, b in matching.tolist()], _MATCH, 1.6)
    step = _label_step(paper, cell)
    size = paper.letters(min(12.0, cell * step * 0.82))
    for place in range(0, rows, step):
        name = head_name(found.heads[place])
        page.write(left - 6, top + (place + 0.5) * cell, name, size, ha="right", va="center_baseline")
    for place in range(0, columns, step):
        name = head_name(found.other_heads[place])
        page.write(left + (place + 0.5) * cell, top - 6, name, size, ha="center", va="bottom", rotation=90)
    _bar(page, (x, y, bar_px, 14), _ALIKE, high, table_line(table), "dark: alike")
    return page


# -- the map


def map_page(found: HeadComparison, lettering: Lettering) -> Page:
    """Heads in the plane that keeps their distances best, coloured by layer, and beside that by role."""
    table, arrangement = found.tables[0], found.arrangements[0]
    layers = sorted({layer for layer, _ in found.heads})
    colors = _layer_colors(layers)
    numbered = len(found.heads) <= _MOST_NUMBERED
    panels: list[tuple[str, list[str], list[str], list[tuple[str, str, str]]]] = [
        (
            "colour: layer · number: head",
            [colors[layer] for layer, _ in found.heads],
            [str(head) if numbered else "" for _, head in found.heads],
            [(f"L{layer}", colors[layer], "") for layer in layers],
        )
    ]
    if found.roles is not None:
        marks = marks_for(set(found.roles) - {""})
        marked = [marks.get(role, Mark(UNCLASSIFIED, _NO_ROLE)) for role in found.roles]
        roles = "colour and letter: strongest role"
        entries = _role_entries(found.roles, marks)
        glyphs = [m.glyph if numbered and m.glyph != UNCLASSIFIED else "" for m in marked]
        panels.append((roles, [m.color for m in marked], glyphs, entries))
    paper = lettering.paper
    beside = not paper.is_narrow
    plane = _PLANE_PX
    if paper.fixed:
        plane = paper.room_px if not beside else (paper.room_px - 30 * (len(panels) - 1)) // len(panels) - _NAMES_PX
    pitch = plane + 30 + (180 if not paper.fixed else _NAMES_PX)
    width = paper.width_for(2 * layout.MARGIN_PX + len(panels) * pitch - 30)
    low, high = arrangement.places.min(0, initial=0.0), arrangement.places.max(0, initial=0.0)
    extent = float((high - low).max()) * 1.1 or 1.0
    tall = max(min(320, plane), math.ceil(plane * min(1.0, (float(high[1] - low[1]) / extent) + 0.1)))
    radius = 11.0 if len(found.heads) <= 100 else 8.5 if numbered else 5.0
    if paper.fixed:  # discs of which none hides too many others; letters where they have room
        wanted = paper.least_px / 1.1
        radius = wanted if radius < wanted < plane / 60 else min(radius, max(3.0, plane / 45))
    if not (lettered := numbered and radius * 1.1 >= paper.least_px):
        radius = min(radius, max(3.0, plane / 80))
    shares = [f"{share:.0%}" for share in arrangement.explained]
    notes = [
        f"classical multidimensional scaling; the axes hold {shares[0]} and {shares[1]} of the variance: heads "
        "that are close here may still be far apart along others",
        *(["heads that would cover each other stand side by side: a line leads to the true place"] * lettered),
        *table_notes(table, found.kind),
        *([f"roles: {found.roles_source}"] if found.roles is not None else []),
    ]
    top = _TOP_PX + 26
    columns = [1 if beside else max(1, paper.room_px // (66 if not number else 220)) for number in range(len(panels))]
    keys = [_legend_px(entries, n) for n, (*_, entries) in zip(columns, panels, strict=True)]
    pitch_y = 0 if beside else math.ceil(tall + max(keys)) + 60
    footer_y = top + math.ceil(max(tall, *keys) if beside else pitch_y * len(panels) - 30) + 34
    page = Page.above(notes, width, footer_y, lettering)
    page.head(f"{title_of(found)}: a map", f"{table_line(table)} · {texts_line(found.corpus)}")
    scale = plane / extent
    middle = (low + high) / 2
    for number, (heading, fills, inside, entries) in enumerate(panels):
        left = layout.MARGIN_PX + number * pitch * beside
        top += pitch_y * (number > 0)
        box = (left, top, plane, tall)
        heading = heading if lettered else heading.partition(" · ")[0].partition(" and ")[0]
        page.write(left, top - 12, heading, layout.PANEL_TITLE_PX, ha="left", weight="bold")
        page.frames([box])
        at = (arrangement.places - middle) * (scale, -scale) + (left + plane / 2, top + tall / 2)
        shown = spread(at, radius * 1.05, box) if lettered else at
        _discs(page, at, shown, radius, fills, inside if lettered else [""] * len(inside))
        _scale_bar(page, box, scale, extent, shown)
        if beside:
            _legend(page, left + plane + 20, top + 10, "", entries)
        else:
            _legend(page, left, top + tall + 18, "", entries, columns[number])
    return page


def _discs(
    page: Page,
    true: NDArray[np.float64],
    at: NDArray[np.float64],
    radius: float,
    colors: Sequence[str],
    inside: Sequence[str],
) -> None:
    """Discs with a letter or number in each; from those that were moved a line leads to their true places.

    Where they overlap all the same, later ones lie over earlier ones, what is written in them too.
    """
    from matplotlib.patches import Circle

    page.lines([pair for pair in np.stack([true, at], 1).tolist() if math.dist(*pair) > 1], color=FAINT, width_px=0.9)
    for number, ((x, y), color, text) in enumerate(zip(at.tolist(), colors, inside, strict=True)):
        order = 3 + number * 1e-3
        disc = Circle((x, y), radius, facecolor=color, edgecolor="#ffffff", linewidth=page.points(1.25), zorder=order)
        page.axes.add_artist(disc)
        if text:
            page.outline_numbers([Number(x, y, text, radius * 1.1, ink_on(color), "bold")], order + 5e-4)


def _scale_bar(page: Page, box: Box, scale: float, extent: float, discs: NDArray[np.float64]) -> None:
    """How long a distance is on the map, in the corner with the fewest discs, the lower left one first."""
    length = layout.nice_ticks(extent / 4)[-1] or extent / 4
    room = np.array([length * scale, 16])
    near, far = np.array(box[:2]) + (18, 34), np.array(box[:2]) + box[2:] - (18 + room[0], 18)
    corners = [np.array([x, y]) for x in (near[0], far[0]) for y in (far[1], near[1])]
    x, y = min(
        corners, key=lambda at: int((np.abs(discs - at - room * (0.5, -0.5)) < room / 2 + 12).all(-1).sum())
    ).tolist()
    page.lines([[(x, y - 4), (x, y), (x + length * scale, y), (x + length * scale, y - 4)]], color=INK, width_px=1.4)
    page.write(x + length * scale / 2, y - 12, f"{length:g}", layout.CAPTION_PX, ha="center")


# -- layers, and grids of heads


def layers_page(found: HeadComparison, lettering: Lettering) -> Page:
    """How far the heads of each layer are from those of each other; and of each to the next, with intervals."""
    table, arrangement = found.tables[0], found.arrangements[0]
    layers = list(dict.fromkeys(layer for layer, _ in found.heads))
    n = len(layers)
    paper = lettering.paper
    left, top = layout.MARGIN_PX + 50, _TOP_PX + 56
    if paper.fixed:
        cell = min(92.0, (paper.room_px - 50 if paper.is_narrow else 0.42 * paper.room_px) / n)
    else:
        cell = max(14, min(92, 640 // n))
    size = n * cell
    pitch = max(size / n, paper.least_px * 1.2)
    right, room, down = math.ceil(left + size) + 130, 560, top
    if paper.is_narrow:
        right, down = layout.MARGIN_PX + 70, math.ceil(top + size) + 150
    if paper.fixed:
        room = paper.width_px - layout.MARGIN_PX - 60 - right
    width = paper.width_for(right + room + layout.MARGIN_PX + 60)
    notes = [
        "a cell: the distance between the heads of two layers, over all pairs of heads; on the diagonal within a layer",
        *(["lines: 95% interval over texts"] if np.isfinite(arrangement.layers_low).any() else []),
        *table_notes(table, found.kind),
    ]
    tall = pitch * n if paper.fixed else size
    footer_y = math.ceil(max(top + max(size, 200 * (not paper.fixed)) + 92, down + tall + 30))
    page = Page.above(notes, width, footer_y, lettering)
    page.head(f"{title_of(found)}: layers", f"{table_line(table)} · {texts_line(found.corpus)}")
    values = arrangement.layers
    high = float(np.nanmax(values, initial=0.0)) or 1.0
    least = float(np.nanmin(values, initial=high))
    low = math.floor(least * 20 - 0.5) / 20 if high - least < high / 2 else 0.0
    page.write(left, top - 40, "layer by layer", layout.PANEL_TITLE_PX, ha="left", weight="bold")
    _cells(page, (left, top), values, cell, (max(0.0, low), high), numbers=cell >= max(34, 2.6 * paper.least_px))
    step = max(1, math.ceil(max(14, 1.2 * paper.least_px) / cell))
    for place in range(0, n, step):
        middle = (place + 0.5) * cell
        page.write(left - 8, top + middle, f"L{layers[place]}", 13, ha="right", va="center_baseline", color=FAINT)
        if place % page.label_step(f"L{layers[-1]}", 13, cell) == 0:
            page.write(left + middle, top - 12, f"L{layers[place]}", 13, ha="center", color=FAINT)
    _bar(page, (left, top + size + 20, min(300, size), 12), _ALIKE, high, "", "dark: alike", max(0.0, low))
    page.write(right, down - 40, "each layer to the next", layout.PANEL_TITLE_PX, ha="left", weight="bold")
    thick = min(30.0, pitch * 0.55)
    bars, whiskers = [], []
    for place in range(n - 1):
        value, low, top_end = (
            float(a[place, place + 1]) for a in (arrangement.layers, arrangement.layers_low, arrangement.layers_high)
        )
        y = down + (place + 1) * pitch
        if not math.isfinite(value):
            continue
        bars.append((right, y - thick / 2, room * value / high, thick))
        end = right + room * value / high
        if math.isfinite(low) and math.isfinite(top_end):
            ends = [right + room * min(1.05, bound / high) for bound in (low, top_end)]
            whiskers += [[(ends[0], y), (ends[1], y)], *[[(e, y - 5), (e, y + 5)] for e in ends]]
            end = max(end, ends[1])
        if place % (1 if paper.fixed else step) == 0:
            page.write(right - 10, y, f"L{layers[place]}–L{layers[place + 1]}", 13, ha="right", va="center_baseline")
            page.write(end + 8, y, distance(value), 13, ha="left", va="center_baseline", color=FAINT)
    page.fill(bars, ["#2f6fb0"] * len(bars))
    page.lines([[(right, down), (right, down + pitch * n)]])
    if whiskers:
        page.lines(whiskers, color=INK, width_px=1.4)
    return page


def same_heads_page(found: ModelComparison, lettering: Lettering) -> Page:
    """How far each head is from that of the same number in the other model, layers down and heads across."""
    table = found.tables[0]
    values = {found.heads[a]: float(table.distances[a, b]) for a, b in found.same()}
    moved = {found.heads[a] for a, b in found.matchings[0] if found.heads[a] != found.other_heads[b]}
    notes = [
        f"framed: matches a head of another number ({len(moved)})",
        *table_notes(table, found.kind),
    ]
    title = f"{model_of(found.run)} and {model_of(found.other_run)} · heads of the same number"
    subtitle = f"{table_line(table)} · {texts_line(found.corpus)}"
    return grid_page(title, subtitle, [("", values)], notes, lettering, framed=moved)


def change_page(found: MinimalPair | PicturePair, paper: Paper = SCREEN) -> Page:
    """How much the rows of each head change, layers down and heads across: at the query, and overall."""
    lettering = lettering_for([title_of(found), both_texts(found), found.query or ""], paper)
    photos = isinstance(found, PicturePair)
    equal = f"{'words' if photos else 'queries'} that are equal in both texts"
    if isinstance(found, PicturePair) and found.texts[0] == found.texts[1]:
        equal = "all words of the question"
    framed = {found.heads[head] for head in found.ranked()[: compare_pictures.HEADS if photos else 5]}
    grids = [(f"overall: {equal}", dict(zip(found.heads, found.overall().tolist(), strict=True)))]
    if found.queries:
        at = dict(zip(found.heads, found.at_query().tolist(), strict=True))
        grids.insert(0, (f"at “{found.query}”", at))
    notes = [
        f"framed: the {amount(len(framed), 'head that changes', 'heads that change')} most",
        meaning(found.measure),
    ]
    if isinstance(found, PicturePair):
        notes += PICTURE_NOTES
    else:
        notes += hidden_notes(found)
    return grid_page(title_of(found), both_texts(found), grids, notes, lettering, framed=framed)


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
    places = [place for _, values in grids for place in values]
    shape = max(layer for layer, _ in places) + 1, max(head for _, head in places) + 1
    paper = lettering.paper
    several = 2 if len(grids) > 1 and not paper.is_narrow else 1
    if paper.fixed:
        cell_w = min(120.0, ((paper.room_px - 40 * (several - 1)) / several - 50) / shape[1])
    else:
        cell_w = max(14, min(120, (paper.room_px - 50) // shape[1] // several))
    cell_h = max(14, min(round(cell_w * 0.66), 60, max(20, 900 // shape[0])))
    beside = several == 2 and (paper.fixed or 2 * (50 + shape[1] * cell_w) <= layout.MIN_WIDTH_PX)
    pitch_x, pitch_y = (50 + shape[1] * cell_w + 40, 0) if beside else (0, shape[0] * cell_h + 110)
    width = paper.width_for(1000, 2 * layout.MARGIN_PX + 50 + shape[1] * cell_w + (pitch_x if beside else 0))
    left, top = layout.MARGIN_PX + 50, _TOP_PX + 50
    bottom = top + shape[0] * cell_h + pitch_y * (len(grids) - 1)
    page = Page.above(notes, width, math.ceil(bottom) + 86, lettering)
    page.head(title, subtitle)
    high = max((v for _, values in grids for v in values.values() if math.isfinite(v)), default=0.0) or 1.0
    cmap = colormap(_APART)
    for number, (heading, values) in enumerate(grids):
        x, y = left + number * pitch_x, top + number * pitch_y
        if heading:
            page.write(x, y - 34, heading, layout.PANEL_TITLE_PX, ha="left", weight="bold")
        boxes = {p: (x + p[1] * cell_w, y + p[0] * cell_h, cell_w - 2, cell_h - 2) for p in values}
        fills = {p: hex_of(cmap, v / high) if math.isfinite(v) else _UNKNOWN for p, v in values.items()}
        page.fill(list(boxes.values()), list(fills.values()))
        page.name_axes((x, y), shape, (cell_w, cell_h), size_px=13.0)
        size = paper.letters(min(15.0, cell_w * 0.24))
        if cell_w >= max(40, 2.7 * paper.least_px):
            page.numbers(
                [
                    Number(left + width / 2, upper + height / 2, distance(values[p]), size, ink_on(fills[p]))
                    for p, (left, upper, width, height) in boxes.items()
                ]
            )
        if number == 0 and framed:
            page.outline([boxes[p] for p in sorted(framed) if p in boxes], _MATCH, 2.0)
    bar = (left, bottom + 20, min(320, width - left - layout.MARGIN_PX - 20), 12)
    _bar(page, bar, _APART, high, "", "dark: differs most")
    return page


# -- parts


def _cells(
    page: Page,
    corner: tuple[float, float],
    values: NDArray[np.float64],
    cell: float,
    limits: tuple[float, float],
    *,
    numbers: bool,
) -> None:
    """A square of coloured cells, with their numbers if there is room."""
    colors, (low, high) = colormap(_ALIKE), limits
    boxes: list[Box] = []
    fills: list[str] = []
    written, size = [], page.paper.letters(min(15.0, cell * 0.26))
    for (row, column), value in np.ndenumerate(values):
        x, y = corner[0] + column * cell, corner[1] + row * cell
        fill = hex_of(colors, (float(value) - low) / (high - low)) if math.isfinite(value) else _UNKNOWN
        boxes.append((x, y, cell - 1, cell - 1))
        fills.append(fill)
        written.append(Number(x + cell / 2, y + cell / 2, distance(float(value)), size, ink_on(fill)))
    page.fill(boxes, fills)
    if numbers:
        page.numbers(written)


def _image(page: Page, box: Box, values: NDArray[np.float64], cmap: Colormap, high: float) -> None:
    """Values as coloured cells."""
    page.fill([box], [_UNKNOWN])  # shows through where a value is unknown
    shown = page.image(box, cmap, animated=False)
    shown.set_zorder(1.5)  # over the fill, under lines
    page.set_cells(shown, values.astype(np.float32), (0, high))


def _cell_px(paper: Paper, left: int, n: int, most: int) -> float:
    """Width of a cell of a square matrix of heads."""
    if not paper.fixed:
        return max(2, min(most, _MATRIX_PX // n))
    beside = 0 if paper.is_narrow else 40 + _LEGEND_PX
    return min(float(most), (paper.width_px - layout.MARGIN_PX - left - beside) / n)


def _label_step(paper: Paper, cell: float) -> int:
    """Every how many-th head beside a matrix has its name."""
    return max(1, math.ceil(max(9, paper.least_px / 0.82) / cell))


def _key_place(paper: Paper, left: int, top: int, size: float) -> tuple[int, int, int]:
    """Where the key of a matrix begins, beside it or on narrow paper below, and the width of its colour bar."""
    if paper.is_narrow:
        return layout.MARGIN_PX + 8, math.ceil(top + size) + 28, min(300, paper.room_px - 60)
    return math.ceil(left + size) + 40, top + 4, _LEGEND_PX - 40


def _bar_px(heading: str, width: float, lettering: Lettering) -> float:
    """How tall a colour bar is with its heading."""
    return 14 + 38 + 16 + 17 * (len(wrap_lines(heading, width + 40, lettering)) - 1)


def _bar(page: Page, bar: Box, cmap: str, high: float, heading: str, meaning_of_dark: str, low: float = 0.0) -> float:
    """A colour bar, and what it means; returns where it ends below."""
    x, y, width, height = bar
    if heading:
        for number, line in enumerate(wrap_lines(heading, width + 40, page.lettering)):
            page.write(x, y + number * 17, line, layout.CAPTION_PX, ha="left", weight="bold")
            y += 17 if number else 0
        y += 16
    page.colour_bar((x, y, width, height), colormap(cmap))
    step = layout.nice_ticks(high - low)[-1] / max(1, len(layout.nice_ticks(high - low)) - 1) or high
    for tick in np.arange(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1) * step:
        page.write(
            x + width * (tick - low) / (high - low), y + height + 11, digits(tick), 11.5, ha="center", color=FAINT
        )
    page.write(x, y + height + 30, meaning_of_dark, layout.CAPTION_PX, ha="left", color=FAINT)
    return y + height + 38


def _legend(
    page: Page, x: float, y: float, heading: str, entries: Sequence[tuple[str, str, str]], columns: int = 1
) -> float:
    """Coloured squares with their names, a letter in each; returns where it ends below."""
    if heading:
        page.write(x, y, heading, layout.CAPTION_PX, ha="left", weight="bold")
        y += 22
    rows = math.ceil(len(entries) / columns)
    step = _legend_px(entries, columns) / max(1, rows)
    wide = page.paper.room_px / columns
    for number, (name, color, glyph) in enumerate(entries):
        left, middle = x + number // max(1, rows) * wide, y + number % max(1, rows) * step
        page.fill([(left, middle - 8, 20, step - 5)], [color])
        if glyph:
            page.write(left + 10, middle, glyph, 12, ha="center", weight="bold", color=ink_on(color))
        room = min(page.width_px - left - 30 - layout.MARGIN_PX, wide - 34 if columns > 1 else math.inf)
        named = page.lettering.fit(name, layout.CAPTION_PX, max(36 if page.paper.fixed else 60, room))
        page.write(left + 28, middle, named, layout.CAPTION_PX, ha="left")
    return y + _legend_px(entries, columns)


def _legend_px(entries: Sized, columns: int = 1) -> float:
    """How tall a legend is."""
    rows = math.ceil(len(entries) / columns)
    return rows * (22.0 if rows <= 18 else 15.0)


def _role_entries(roles: Sequence[str], marks: dict[str, Mark]) -> list[tuple[str, str, str]]:
    entries = [(f"{label(name)} ({roles.count(name)})", mark.color, mark.glyph) for name, mark in marks.items()]
    n_none = roles.count("")
    return [*entries, (f"unclassified ({n_none})", _NO_ROLE, UNCLASSIFIED)] if n_none else entries


def _layer_colors(layers: Sequence[int]) -> dict[int, str]:
    """A colour a layer, from dark to light."""
    cmap = colormap(_LAYERS)
    return {layer: hex_of(cmap, 0.95 * n / max(1, len(layers) - 1)) for n, layer in enumerate(layers)}
