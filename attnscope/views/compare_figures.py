"""Comparisons of heads as figures: a matrix with its clusters, a map, layers, what changes; PNG, SVG and PDF."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from attnscope.records.comparison import (
    Comparison,
    HeadComparison,
    HeadPlace,
    MinimalPair,
    ModelComparison,
    PickedHeads,
    head_name,
)
from attnscope.views import compare_maps, layout
from attnscope.views.canvas import (
    FAINT,
    INK,
    Box,
    Number,
    Page,
    colormap,
    hex_of,
    outline_of,
    wrap_lines,
    write_pages,
)
from attnscope.views.compare_summary import (
    HIDDEN,
    both_texts,
    distance,
    meaning,
    table_line,
    table_notes,
    texts_line,
    title_of,
)
from attnscope.views.heads_summary import UNCLASSIFIED, Mark, label, marks_for, model_of
from attnscope.views.inks import ink_on
from attnscope.views.lettering import Lettering, lettering_for

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
_PLANE_PX = 720
_MOST_NUMBERED = 300  # heads on a map; of more the numbers would hide the map


def draw(found: Comparison, folder: str | Path, formats: Sequence[str] = ("png",)) -> list[Path]:
    """Draws a comparison into a folder, each file whole or not at all; the same record gives the same bytes.

    All heads: `matrix`, `map`, `layers`. Picked heads: `picked`, `differences`. A minimal pair: `change`, `maps`, and
    with a query `query-N`. Two models: `matrix`, `same-heads`.

    Raises:
        AttnscopeError: An unknown format; the folder cannot be written.
    """
    return write_pages(pages(found), folder, formats)


def pages(found: Comparison) -> Iterator[tuple[str, Page]]:
    """The figures one after the other, each with its file name without the ending."""
    if isinstance(found, HeadComparison):
        lettering = lettering_for([title_of(found), texts_line(found.corpus), found.roles_source])
        yield "matrix", matrix_page(found, lettering)
        yield "map", map_page(found, lettering)
        yield "layers", layers_page(found, lettering)
    elif isinstance(found, ModelComparison):
        lettering = lettering_for([title_of(found), texts_line(found.corpus)])
        yield "matrix", models_page(found, lettering)
        if found.same():
            yield "same-heads", same_heads_page(found, lettering)
    elif isinstance(found, PickedHeads):
        yield from compare_maps.picked_pages(found)
    elif isinstance(found, MinimalPair):
        yield "change", change_page(found)
        yield from compare_maps.pair_pages(found)


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
    cell = max(2, min(44, _MATRIX_PX // n))
    left = layout.MARGIN_PX + 56 + strips * (_STRIP_PX + 3) + 4
    top = _TOP_PX + _TREE_PX + 8 + strips * (_STRIP_PX + 3)
    size = n * cell
    layers = sorted({layer for layer, _ in found.heads})
    entries_px = _legend_px(layers) + (_legend_px(marks) + 60 if found.roles is not None else 0)
    width = left + size + 40 + _LEGEND_PX + layout.MARGIN_PX
    notes = [
        "heads in the order of their clusters (average linkage); lines above: where clusters merge",
        *table_notes(table),
    ]
    footer = wrap_lines(" · ".join(notes), width - 2 * layout.MARGIN_PX, lettering)
    footer_y = math.ceil(max(top + size, top + 110 + entries_px)) + 30
    page = Page(width, footer_y + (len(footer) - 1) * layout.LINE_PX + layout.MARGIN_PX, lettering)
    page.head(title_of(found), texts_line(found.corpus))
    tree = tree_of(arrangement.merges, order)
    base = top - strips * (_STRIP_PX + 3) - 3
    page.lines(
        [[(left + x * cell, base - y / tree.top * (_TREE_PX - 6)) for x, y in branch] for branch in tree.branches],
        color="#555555",
        width_px=1.1,
    )
    layer_colors = _layer_colors(layers)
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
    step = max(1, math.ceil(9 / cell))
    for place in range(0, n, step):
        page.write(
            left - strips * (_STRIP_PX + 3) - 5, top + (place + 0.5) * cell, names[place],
            min(12.0, cell * step * 0.82), ha="right", va="center_baseline",
        )  # fmt: skip
    x = left + size + 40
    y = _bar(page, (x, top + 4, _LEGEND_PX - 40, 14), _ALIKE, high, table_line(table), "dark: alike")
    y = _legend(page, x, y + 26, "layer", [(f"L{layer}", layer_colors[layer], "") for layer in layers])
    if found.roles is not None:
        _legend(page, x, y + 14, "strongest role", _role_entries(found.roles, marks))
    page.foot(footer_y, footer)
    return page


def models_page(found: ModelComparison, lettering: Lettering) -> Page:
    """The distances between the heads of two models, matched pairs framed."""
    table, matching = found.tables[0], found.matchings[0]
    rows, columns = len(found.heads), len(found.other_heads)
    cell = max(2, min(40, _MATRIX_PX // max(rows, columns)))
    left, top = layout.MARGIN_PX + 84, _TOP_PX + 66
    width = left + columns * cell + 40 + _LEGEND_PX + layout.MARGIN_PX
    notes = [
        f"rows: heads of {model_of(found.run)} · columns: heads of {model_of(found.other_run)}",
        "framed: the one-to-one matching with the least sum of distances; "
        f"{found.moved()} of {len(matching)} match a head of another number",
        *table_notes(table),
    ]
    footer = wrap_lines(" · ".join(notes), width - 2 * layout.MARGIN_PX, lettering)
    footer_y = max(top + rows * cell, top + 120) + 30
    page = Page(width, footer_y + (len(footer) - 1) * layout.LINE_PX + layout.MARGIN_PX, lettering)
    page.head(title_of(found), texts_line(found.corpus))
    values = table.distances
    high = float(np.nanmax(values, initial=0.0)) or 1.0
    _image(page, (left, top, columns * cell, rows * cell), values, colormap(_ALIKE), high)
    page.outline([(left + b * cell, top + a * cell, cell, cell) for a, b in matching.tolist()], _MATCH, 1.6)
    step = max(1, math.ceil(9 / cell))
    size = min(12.0, cell * step * 0.82)
    for place in range(0, rows, step):
        name = head_name(found.heads[place])
        page.write(left - 6, top + (place + 0.5) * cell, name, size, ha="right", va="center_baseline")
    for place in range(0, columns, step):
        name = head_name(found.other_heads[place])
        page.write(left + (place + 0.5) * cell, top - 6, name, size, ha="center", va="bottom", rotation=90)
    bar = (left + columns * cell + 40, top + 4, _LEGEND_PX - 40, 14)
    _bar(page, bar, _ALIKE, high, table_line(table), "dark: alike")
    page.foot(footer_y, footer)
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
    pitch = _PLANE_PX + 30 + 180
    width = 2 * layout.MARGIN_PX + len(panels) * pitch - 30
    low, high = arrangement.places.min(0, initial=0.0), arrangement.places.max(0, initial=0.0)
    extent = float((high - low).max()) * 1.1 or 1.0
    tall = max(320, math.ceil(_PLANE_PX * min(1.0, (float(high[1] - low[1]) / extent) + 0.1)))
    shares = [f"{share:.0%}" for share in arrangement.explained]
    notes = [
        f"classical multidimensional scaling; the axes hold {shares[0]} and {shares[1]} of the variance: heads "
        "that are close here may still be far apart along others",
        *table_notes(table),
        *([f"roles: {found.roles_source}"] if found.roles is not None else []),
    ]
    footer = wrap_lines(" · ".join(notes), width - 2 * layout.MARGIN_PX, lettering)
    top = _TOP_PX + 26
    longest = max(_legend_px(entries) for *_, entries in panels)
    footer_y = top + max(tall, math.ceil(longest)) + 34
    page = Page(width, footer_y + (len(footer) - 1) * layout.LINE_PX + layout.MARGIN_PX, lettering)
    page.head(f"{title_of(found)}: a map", f"{table_line(table)} · {texts_line(found.corpus)}")
    scale = _PLANE_PX / extent
    middle = (low + high) / 2
    for number, (heading, fills, inside, entries) in enumerate(panels):
        left = layout.MARGIN_PX + number * pitch
        box = (left, top, _PLANE_PX, tall)
        page.write(left, top - 12, heading, layout.PANEL_TITLE_PX, ha="left", weight="bold")
        page.frames([box])
        at = (arrangement.places - middle) * (scale, -scale) + (left + _PLANE_PX / 2, top + tall / 2)
        _discs(page, at, 11.0 if len(fills) <= 100 else 8.5 if numbered else 5.0, fills, inside)
        _scale_bar(page, box, scale, extent)
        _legend(page, left + _PLANE_PX + 20, top + 10, "", entries)
    page.foot(footer_y, footer)
    return page


def _discs(page: Page, at: NDArray[np.float64], radius: float, colors: Sequence[str], inside: Sequence[str]) -> None:
    """Discs with a letter or number in each; later ones lie over earlier ones, what is written in them too."""
    from matplotlib.patches import Circle, PathPatch
    from matplotlib.path import Path as Outline

    for number, ((x, y), color, text) in enumerate(zip(at.tolist(), colors, inside, strict=True)):
        order = 3 + number * 1e-3
        disc = Circle((x, y), radius, facecolor=color, edgecolor="#ffffff", linewidth=0.9, zorder=order)
        page.axes.add_artist(disc)
        if text:
            points, kinds = outline_of(text, "bold")
            path = Outline(points * (radius * 0.011) + (x, y), kinds)
            ink = PathPatch(path, facecolor=ink_on(color), edgecolor="none", zorder=order + 5e-4)
            page.axes.add_artist(ink)


def _scale_bar(page: Page, box: Box, scale: float, extent: float) -> None:
    """How long a distance is on the map, at its lower left corner."""
    length = layout.nice_ticks(extent / 4)[-1] or extent / 4
    x, y = box[0] + 18, box[1] + box[3] - 18
    page.lines([[(x, y - 4), (x, y), (x + length * scale, y), (x + length * scale, y - 4)]], color=INK, width_px=1.4)
    page.write(x + length * scale / 2, y - 12, f"{length:g}", layout.CAPTION_PX, ha="center")


# -- layers, and grids of heads


def layers_page(found: HeadComparison, lettering: Lettering) -> Page:
    """How far the heads of each layer are from those of each other; and of each to the next, with intervals."""
    table, arrangement = found.tables[0], found.arrangements[0]
    layers = list(dict.fromkeys(layer for layer, _ in found.heads))
    n = len(layers)
    cell = max(14, min(92, 640 // n))
    left, top = layout.MARGIN_PX + 50, _TOP_PX + 56
    size = n * cell
    right = left + size + 130
    room = 560
    width = right + room + layout.MARGIN_PX + 60
    notes = [
        "a cell: the distance between the heads of two layers, over all pairs of heads; on the diagonal within a layer",
        *(["lines: 95% interval over texts"] if np.isfinite(arrangement.layers_low).any() else []),
        *table_notes(table),
    ]
    footer = wrap_lines(" · ".join(notes), width - 2 * layout.MARGIN_PX, lettering)
    footer_y = top + max(size, 200) + 92
    page = Page(width, footer_y + (len(footer) - 1) * layout.LINE_PX + layout.MARGIN_PX, lettering)
    page.head(f"{title_of(found)}: layers", f"{table_line(table)} · {texts_line(found.corpus)}")
    values = arrangement.layers
    high = float(np.nanmax(values, initial=0.0)) or 1.0
    least = float(np.nanmin(values, initial=high))
    low = math.floor(least * 20 - 0.5) / 20 if high - least < high / 2 else 0.0
    page.write(left, top - 40, "layer by layer", layout.PANEL_TITLE_PX, ha="left", weight="bold")
    _cells(page, (left, top), values, cell, (max(0.0, low), high), numbers=cell >= 34)
    step = max(1, math.ceil(14 / cell))
    for place in range(0, n, step):
        middle = (place + 0.5) * cell
        page.write(left - 8, top + middle, f"L{layers[place]}", 13, ha="right", va="center_baseline", color=FAINT)
        page.write(left + middle, top - 12, f"L{layers[place]}", 13, ha="center", color=FAINT)
    _bar(page, (left, top + size + 20, min(300, size), 12), _ALIKE, high, "", "dark: alike", max(0.0, low))
    page.write(right, top - 40, "each layer to the next", layout.PANEL_TITLE_PX, ha="left", weight="bold")
    pitch = size / n
    thick = min(30.0, pitch * 0.55)
    bars, whiskers = [], []
    for place in range(n - 1):
        value, low, top_end = (
            float(a[place, place + 1]) for a in (arrangement.layers, arrangement.layers_low, arrangement.layers_high)
        )
        y = top + (place + 1) * pitch
        if not math.isfinite(value):
            continue
        bars.append((right, y - thick / 2, room * value / high, thick))
        end = right + room * value / high
        if math.isfinite(low) and math.isfinite(top_end):
            ends = [right + room * min(1.05, bound / high) for bound in (low, top_end)]
            whiskers += [[(ends[0], y), (ends[1], y)], *[[(e, y - 5), (e, y + 5)] for e in ends]]
            end = max(end, ends[1])
        if place % step == 0:
            page.write(right - 10, y, f"L{layers[place]}–L{layers[place + 1]}", 13, ha="right", va="center_baseline")
            page.write(end + 8, y, distance(value), 13, ha="left", va="center_baseline", color=FAINT)
    page.fill(bars, ["#2f6fb0"] * len(bars))
    page.lines([[(right, top), (right, top + size)]])
    if whiskers:
        page.lines(whiskers, color=INK, width_px=1.4)
    page.foot(footer_y, footer)
    return page


def same_heads_page(found: ModelComparison, lettering: Lettering) -> Page:
    """How far each head is from that of the same number in the other model, layers down and heads across."""
    table = found.tables[0]
    values = {found.heads[a]: float(table.distances[a, b]) for a, b in found.same()}
    moved = {found.heads[a] for a, b in found.matchings[0] if found.heads[a] != found.other_heads[b]}
    notes = [
        f"framed: matches a head of another number ({len(moved)})",
        *table_notes(table),
    ]
    title = f"{model_of(found.run)} and {model_of(found.other_run)} · heads of the same number"
    subtitle = f"{table_line(table)} · {texts_line(found.corpus)}"
    return grid_page(title, subtitle, [("", values)], notes, lettering, framed=moved)


def change_page(found: MinimalPair) -> Page:
    """How much the rows of each head change, layers down and heads across: at the query, and overall."""
    lettering = lettering_for([title_of(found), *(tokens.text for tokens in found.tokens), found.query or ""])
    grids = [
        ("overall: queries that are equal in both texts", dict(zip(found.heads, found.overall().tolist(), strict=True)))
    ]
    if found.queries:
        at = dict(zip(found.heads, found.at_query().tolist(), strict=True))
        grids.insert(0, (f"at “{found.query}”", at))
    notes = ["framed: the five heads that change most", meaning(found.measure)]
    notes += [HIDDEN] if "hide_special" in found.changes else []
    framed = {found.heads[head] for head in found.ranked()[:5]}
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
    room = layout.MIN_WIDTH_PX - 2 * layout.MARGIN_PX - 50
    cell_w = max(14, min(120, room // shape[1] // (2 if len(grids) > 1 else 1)))
    cell_h = max(14, min(round(cell_w * 0.66), 60, max(20, 900 // shape[0])))
    beside = len(grids) > 1 and 2 * (50 + shape[1] * cell_w) <= layout.MIN_WIDTH_PX
    pitch_x, pitch_y = (50 + shape[1] * cell_w + 40, 0) if beside else (0, shape[0] * cell_h + 110)
    width = max(1000, 2 * layout.MARGIN_PX + 50 + shape[1] * cell_w + (pitch_x if beside else 0))
    left, top = layout.MARGIN_PX + 50, _TOP_PX + 50
    bottom = top + shape[0] * cell_h + pitch_y * (len(grids) - 1)
    footer = wrap_lines(" · ".join(notes), width - 2 * layout.MARGIN_PX, lettering)
    footer_y = bottom + 86
    page = Page(width, footer_y + (len(footer) - 1) * layout.LINE_PX + layout.MARGIN_PX, lettering)
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
        page.sides((x, y), shape, (cell_w, cell_h), size_px=13.0)
        if cell_w >= 40:
            size = min(15.0, cell_w * 0.24)
            page.numbers(
                [
                    Number(left + width / 2, upper + height / 2, distance(values[p]), size, ink_on(fills[p]))
                    for p, (left, upper, width, height) in boxes.items()
                ]
            )
        if number == 0 and framed:
            page.outline([boxes[p] for p in sorted(framed) if p in boxes], _MATCH, 2.0)
    _bar(page, (left, bottom + 20, 320, 12), _APART, high, "", "dark: differs")
    page.foot(footer_y, footer)
    return page


# -- parts


def _cells(
    page: Page,
    corner: tuple[float, float],
    values: NDArray[np.float64],
    cell: int,
    limits: tuple[float, float],
    *,
    numbers: bool,
) -> None:
    """A square of coloured cells, with their numbers if there is room."""
    colors, (low, high) = colormap(_ALIKE), limits
    boxes: list[Box] = []
    fills: list[str] = []
    written = []
    for (row, column), value in np.ndenumerate(values):
        x, y = corner[0] + column * cell, corner[1] + row * cell
        fill = hex_of(colors, (float(value) - low) / (high - low)) if math.isfinite(value) else _UNKNOWN
        boxes.append((x, y, cell - 1, cell - 1))
        fills.append(fill)
        written.append(Number(x + cell / 2, y + cell / 2, distance(float(value)), min(15.0, cell * 0.26), ink_on(fill)))
    page.fill(boxes, fills)
    if numbers:
        page.numbers(written)


def _image(page: Page, box: Box, values: NDArray[np.float64], cmap: Colormap, high: float) -> None:
    """Values as an image, whose cells are squares of whole pixels in every format."""
    times = max(1, round(box[2] / max(1, values.shape[1])))
    page.fill([box], [_UNKNOWN])  # shows through where a value is unknown
    shown = page.image(box, cmap, animated=False)
    shown.set_zorder(1.5)  # over the fill, under lines
    shown.set_data(np.ma.masked_invalid(values.repeat(times, 0).repeat(times, 1)))
    shown.set_clim(0, high)


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
            x + width * (tick - low) / (high - low), y + height + 11, f"{tick:.3g}", 11.5, ha="center", color=FAINT
        )
    page.write(x, y + height + 30, meaning_of_dark, layout.CAPTION_PX, ha="left", color=FAINT)
    return y + height + 38


def _legend(page: Page, x: float, y: float, heading: str, entries: Sequence[tuple[str, str, str]]) -> float:
    """Coloured squares with their names, a letter in each; returns where it ends below."""
    if heading:
        page.write(x, y, heading, layout.CAPTION_PX, ha="left", weight="bold")
        y += 22
    step = _legend_px(entries) / max(1, len(entries))
    page.fill([(x, y + i * step - 8, 20, step - 5) for i in range(len(entries))], [color for _, color, _ in entries])
    for number, (name, color, glyph) in enumerate(entries):
        if glyph:
            page.write(x + 10, y + number * step, glyph, 12, ha="center", weight="bold", color=ink_on(color))
        room = page.width_px - x - 30 - layout.MARGIN_PX
        named = page.lettering.fit(name, layout.CAPTION_PX, max(60, room))
        page.write(x + 28, y + number * step, named, layout.CAPTION_PX, ha="left")
    return y + _legend_px(entries)


def _legend_px(entries: Sized) -> float:
    """How tall a legend is."""
    return len(entries) * (22.0 if len(entries) <= 18 else 15.0)


def _role_entries(roles: Sequence[str], marks: dict[str, Mark]) -> list[tuple[str, str, str]]:
    entries = [(f"{label(name)} ({roles.count(name)})", mark.color, mark.glyph) for name, mark in marks.items()]
    n_none = roles.count("")
    return [*entries, (f"unclassified ({n_none})", _NO_ROLE, UNCLASSIFIED)] if n_none else entries


def _layer_colors(layers: Sequence[int]) -> dict[int, str]:
    """A colour a layer, from dark to light."""
    cmap = colormap(_LAYERS)
    return {layer: hex_of(cmap, 0.95 * n / max(1, len(layers) - 1)) for n, layer in enumerate(layers)}
