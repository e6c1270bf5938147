"""Circuits as figures: scores of all heads, who composes with whom as matrices, and the strongest pairs as a graph."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from attnscope.errors import amount
from attnscope.records.circuits import COMPOSITIONS, Circuits, Link
from attnscope.views.circuits.summary import READS, notes_of, title_of
from attnscope.views.drawing import layout
from attnscope.views.drawing.canvas import FAINT, INK, Number, Page, colormap, wrap_lines
from attnscope.views.drawing.inks import hex_of, ink_on
from attnscope.views.drawing.lettering import Lettering, lettering_for
from attnscope.views.drawing.style import USUAL, Style
from attnscope.views.tables.numbers import digits, fixed

_SIGNED, _SHARE = "RdBu_r", "Blues"
_UNKNOWN = "#dcdcdc"
_COLORS = {"Q": "#0072B2", "K": "#D55E00", "V": "#009E73"}
_TOP_PX = layout.MARGIN_PX + 92
_MOST_LINKS = 8  # of queries, of keys and of values


def pages(found: Circuits, style: Style = USUAL) -> Iterator[tuple[str, Page]]:
    """The figures one after the other, each with its file name without the ending.

    `circuits-heads` has maps of copying, matching and the previous token, `circuits-composition` a matrix each of
    queries, keys and values, `circuits-graph` the pairs that compose most.
    """
    lettering = lettering_for([title_of(found)], style.paper)
    yield "circuits-heads", heads_page(found, lettering)
    if np.isfinite(found.composition).any():
        yield "circuits-composition", composition_page(found, lettering)
        yield "circuits-graph", graph_page(found, lettering)


# -- heads


def heads_page(found: Circuits, lettering: Lettering) -> Page:
    """Maps of layers x heads: copying, matching, and what places alone give the previous token."""
    panels = [
        ("copying", {(h.layer, h.head): h.copying.value for h in found.heads}, _SIGNED),
        ("matching", {(h.layer, h.head): h.matching.value for h in found.heads}, _SIGNED),
        ("previous token, by position", {(h.layer, h.head): h.previous for h in found.heads}, _SHARE),
    ]
    panels = [one for one in panels if any(math.isfinite(value) for value in one[1].values())] or panels[:1]
    shape = max(h.layer for h in found.heads) + 1, max(h.head for h in found.heads) + 1
    paper, gap, names = lettering.paper, 34, 46
    across = 1 if paper.is_narrow else len(panels)
    room = (paper.room_px if paper.fixed else 1500) - across * names - (across - 1) * gap
    cell_w = max(4.0, min(58.0, room / across / shape[1]))
    cell_h = max(12.0, min(0.62 * cell_w, 34.0, 900 / shape[0]))
    pitch_x, pitch_y = shape[1] * cell_w + names + gap, shape[0] * cell_h + 96
    width = paper.width_for(2 * layout.MARGIN_PX + across * pitch_x - gap, 900)
    footer_y = math.ceil(_TOP_PX + math.ceil(len(panels) / across) * pitch_y)
    page = Page.above([*notes_of(found, marks=False)[:-1], _of_places(found)], width, footer_y, lettering)
    page.head(title_of(found), f"layers x heads · {amount(len(found.heads), 'head')}")
    outside = (
        {(h.layer, h.head) for h in found.heads if h.copying.is_outside},
        {(h.layer, h.head) for h in found.heads if h.matching.is_outside},
    )
    for place, (title, values, cmap) in enumerate(panels):
        left = layout.MARGIN_PX + names + (place % across) * pitch_x
        top = _TOP_PX + place // across * pitch_y
        page.write(left, top - 34, title, layout.PANEL_TITLE_PX, ha="left", weight="bold")
        signed = cmap == _SIGNED
        _map(page, (left, top), values, (cell_w, cell_h), cmap, -1.0 if signed else 0.0)
        page.name_axes((left, top), shape, (cell_w, cell_h), size_px=12.0)
        _bar(
            page,
            (left, top + shape[0] * cell_h + 16, min(200, shape[1] * cell_w), 11),
            cmap,
            -1.0 if signed else 0.0,
            1.0,
        )
        if signed:
            dim = [p for p in values if p not in outside[title == "matching"] and math.isfinite(values[p])]
            for layer, head in dim:
                page.dot((left + (head + 0.5) * cell_w, top + (layer + 0.5) * cell_h), max(1.2, cell_h * 0.09), FAINT)
    return page


def _of_places(found: Circuits) -> str:
    return (
        f"a dot: not beyond all of {found.n_draws} random heads with the same singular values · "
        "matching: the same of W_E' W_Q' W_K W_E, 1 = a query looks for its own "
        f"token · by position: the share of attention that the previous token gets where all tokens are alike, "
        f"{amount(found.n_places, 'position')}; uniform {fixed(min(found.uniform.get('previous', (math.nan,))), 2)}"
    )


def _map(
    page: Page,
    corner: tuple[float, float],
    values: dict[tuple[int, int], float],
    cell: tuple[float, float],
    cmap: str,
    low: float,
) -> None:
    colors = colormap(cmap)
    boxes = {p: (corner[0] + p[1] * cell[0], corner[1] + p[0] * cell[1], cell[0] - 1, cell[1] - 1) for p in values}
    fills = {p: hex_of(colors, (v - low) / (1 - low)) if math.isfinite(v) else _UNKNOWN for p, v in values.items()}
    page.fill(list(boxes.values()), list(fills.values()))
    size = page.paper.letters(min(12.0, cell[0] * 0.24))
    if cell[0] >= max(40, 3 * page.paper.least_px) and cell[1] >= size * 1.2 and low == 0:
        page.numbers(
            [
                Number(x + w / 2, y + h / 2, fixed(values[p], 2), size, ink_on(fills[p]))
                for p, (x, y, w, h) in boxes.items()
            ]
        )


def _bar(
    page: Page, box: tuple[float, float, float, float], cmap: str, low: float, high: float, least: str = ""
) -> None:
    """A colour bar with its ends and, where it has two signs, its middle; `least` is written at the first end."""
    x, y, width, height = box
    page.colour_bar(box, colormap(cmap))
    ticks = (low, 0.0, high) if low < 0 else (low, high)
    for tick in ticks:
        at, text = x + width * (tick - low) / (high - low), digits(tick, 2)
        text = least if least and tick == low else text
        page.write(at, y + height + 12, text, 11.5, ha="center", color=FAINT)


# -- composition


def composition_page(found: Circuits, lettering: Lettering) -> Page:
    """A matrix each of queries, keys and values: senders across, receivers down, the share above chance."""
    excess = found.excess
    shown = [place for place in range(len(COMPOSITIONS)) if np.isfinite(excess[place]).any()]
    n, paper, names, gap = len(found.heads), lettering.paper, 44, 30
    across = 1 if paper.is_narrow else len(shown)
    room = (paper.room_px if paper.fixed else 1620) - across * names - (across - 1) * gap
    size = min(room / across, 24.0 * n)
    pitch_x, pitch_y = size + names + gap, size + 100
    width = paper.width_for(2 * layout.MARGIN_PX + across * pitch_x - gap, 900)
    notes = [
        "rows: the heads that read · columns: the earlier heads that they read from · lines: layers",
        notes_of(found)[-1],
    ]
    page = Page.above(notes, width, math.ceil(_TOP_PX + math.ceil(len(shown) / across) * pitch_y), lettering)
    page.head(title_of(found), "composition: the share of a pair's norm, less its mean for random directions")
    high = max(float(np.nanmax(excess[shown])), 1e-6)
    least = "≤ 0" if float(np.nanmin(excess[shown])) < 0 else "0"
    starts = [
        place for place, head in enumerate(found.heads) if not place or head.layer != found.heads[place - 1].layer
    ]
    cell = size / n
    for place, kind in enumerate(shown):
        left = layout.MARGIN_PX + names + (place % across) * pitch_x
        top = _TOP_PX + place // across * pitch_y
        by = COMPOSITIONS[kind]
        page.write(left, top - 34, f"{by}: through {READS[by]}", layout.PANEL_TITLE_PX, ha="left", weight="bold")
        page.fill([(left, top, size, size)], ["#f4f4f4"])
        image = page.image((left, top, size, size), colormap(_SHARE), animated=False)
        image.set_zorder(1.5)
        page.set_cells(image, excess[kind].T.astype(np.float32), (0.0, high))
        page.frames([(left, top, size, size)])
        _layer_names(page, found, starts, (left, top), size, cell)
        _bar(page, (left, top + size + 22, min(200, size), 11), _SHARE, 0.0, high, least)
    return page


def _layer_names(
    page: Page, found: Circuits, starts: Sequence[int], corner: tuple[float, float], size: float, cell: float
) -> None:
    """Lines between layers, and as many of their names as have room."""
    left, top = corner
    ends = [*starts[1:], len(found.heads)]
    lines = [[(left + s * cell, top), (left + s * cell, top + size)] for s in starts[1:]]
    lines += [[(left, top + s * cell), (left + size, top + s * cell)] for s in starts[1:]]
    if cell * len(found.heads) / len(starts) > 5:
        page.lines(lines, color=_UNKNOWN, width_px=0.6, zorder=2)
    step = max(1, math.ceil(28 / (size / len(starts))))
    for number, (start, end) in enumerate(zip(starts, ends, strict=True)):
        if number % step:
            continue
        middle, name = (start + end) / 2 * cell, f"L{found.heads[start].layer}"
        page.write(left - 7, top + middle, name, 11.5, ha="right", va="center_baseline", color=FAINT)
        page.write(left + middle, top - 10, name, 11.5, ha="center", color=FAINT)


# -- the graph


def graph_page(found: Circuits, lettering: Lettering) -> Page:
    """The pairs that compose most above chance, a row for each layer that has one of them; the first below."""
    n_links = _MOST_LINKS // 2 if lettering.paper.is_narrow else _MOST_LINKS
    ranked = [link for by in COMPOSITIONS for link in found.strongest(by, n_links)]
    # The glass box's heads write to slots of their own: that they share any direction says it all.
    links = [link for link in ranked if link.excess > 0] or [link for link in ranked if link.share > 0]
    footer = (
        f"the {amount(n_links, 'pair')} each that compose most by queries, keys and values above chance; wider = "
        "a larger share; a line goes up from the head that writes to the head that reads"
    )
    subtitle = "which heads feed which: the strongest pairs"
    return draw_graph(found.heads, links, (title_of(found), subtitle, footer), lettering)


class Reader(Protocol):
    """What a line of a graph leads from or to."""

    @property
    def layer(self) -> int:
        """Its row, counted from below."""

    @property
    def name(self) -> str:
        """What is written on it."""


def draw_graph(
    heads: Sequence[Reader], links: Sequence[Link], said: tuple[str, str, str], lettering: Lettering
) -> Page:
    """Heads and what goes from one to another, a row for each layer that has one of them.

    Args:
        heads: All heads.
        links: What is drawn; their `share` is the width of a line, `by` its colour: "Q", "K", "V", else grey.
        said: Title, subtitle and footer.
        lettering: The fonts.
    """
    title, subtitle, footer_text = said
    used = sorted({place for link in links for place in (link.sender, link.receiver)})
    layers = sorted({heads[place].layer for place in used})
    paper = lettering.paper
    width = paper.width_for(1200)
    row = max(58, min(92, 900 // max(1, len(layers))))
    left, right, top = layout.MARGIN_PX + 60, width - layout.MARGIN_PX - 40, _TOP_PX + 6
    footer = wrap_lines(footer_text, width - 2 * layout.MARGIN_PX, lettering)
    footer_y = math.ceil(top + max(1, len(layers)) * row + 10)
    page = Page(width, footer_y + (len(footer) - 1) * layout.LINE_PX + layout.MARGIN_PX, lettering)
    page.head(title, subtitle)
    chains = {pair: _chain(heads, layers, *pair) for pair in dict.fromkeys((k.sender, k.receiver) for k in links)}
    row_of = {node: row for chain in chains.values() for node, row in chain}
    at = _positions(row_of, [tuple(node for node, _ in chain) for chain in chains.values()], (left, right), (top, row))
    for layer in layers:
        y = top + (len(layers) - 1 - layers.index(layer) + 0.5) * row
        named = any(heads[place].name.startswith(f"L{layer}H") for place in used)
        page.write(layout.MARGIN_PX, y, f"L{layer}" * named, 14, ha="left", color=FAINT, va="center_baseline")
        page.lines([[(left - 14, y), (right + 14, y)]], color="#ececec", width_px=1.0, zorder=0)
    most = max((link.share for link in links), default=1.0)
    pairs: dict[tuple[int, int], list[Link]] = {}
    for link in links:
        pairs.setdefault((link.sender, link.receiver), []).append(link)
    for (sender, receiver), held in pairs.items():
        for place, link in enumerate(held):
            bend = 9.0 * (place - (len(held) - 1) / 2)
            stops = [at[node] for node, _ in chains[sender, receiver]]
            curve = [point for ends in zip(stops, stops[1:], strict=False) for point in _curve(*ends, bend)]
            color = _COLORS.get(link.by, FAINT)
            page.lines([curve], color=color, width_px=1.2 + 5.0 * link.share / most, alpha=0.75, zorder=2)
    high, wide = 24, 62
    for place in used:
        x, y = at[place, place]
        page.lines(
            [[(x - wide / 2 + 10, y), (x + wide / 2 - 10, y)]],
            color="#ffffff",
            width_px=high + 3,
            capstyle="round",
            zorder=3,
        )
        page.lines(
            [[(x - wide / 2 + 10, y), (x + wide / 2 - 10, y)]],
            color="#e8ecf2",
            width_px=high,
            capstyle="round",
            zorder=3.1,
        )
        page.write(x, y, heads[place].name, 12.5, ha="center", va="center_baseline", zorder=5, color=INK)
    x = width - layout.MARGIN_PX
    for by in reversed(COMPOSITIONS):
        text = f"{by}: {READS[by]}"
        page.write(x, _TOP_PX - 26, text, 13, ha="right", color=INK)
        x -= lettering.width_px(text, paper.letters(13)) + 10
        page.lines([[(x - 24, _TOP_PX - 26), (x, _TOP_PX - 26)]], color=_COLORS[by], width_px=4)
        x -= 24 + 22
    page.foot(footer_y, footer)
    return page


Node = tuple[int, ...]
"""(head, head), or where a line passes a row of others: (sender, receiver, row)."""


def _chain(heads: Sequence[Reader], layers: Sequence[int], sender: int, receiver: int) -> list[tuple[Node, int]]:
    """The stops of a line, each with its row: its two heads, and a place in each row between, to pass by its heads."""
    first, last = (layers.index(heads[place].layer) for place in (sender, receiver))
    between: list[tuple[Node, int]] = [((sender, receiver, row), row) for row in range(first + 1, last)]
    return [((sender, sender), first), *between, ((receiver, receiver), last)]


def _positions(
    row_of: dict[Node, int],
    chains: Sequence[tuple[Node, ...]],
    ends: tuple[float, float],
    rows: tuple[float, float],
) -> dict[Node, tuple[float, float]]:
    """Where nodes stand: those of a row side by side, each near those that it is joined with; row 0 is the lowest."""
    (left, right), (top, tall) = ends, rows
    n_rows = max(row_of.values(), default=0) + 1
    by_row = [sorted(node for node, row in row_of.items() if row == number) for number in range(n_rows)]
    across: dict[Node, float] = {}
    for row in by_row:  # at first apart, in the order of their numbers
        across |= {node: (order + 0.5) / len(row) for order, node in enumerate(row)}
    joined: dict[Node, list[Node]] = {node: [] for node in row_of}
    for chain in chains:
        for one, other in zip(chain, chain[1:], strict=False):
            joined[one].append(other)
            joined[other].append(one)
    for _ in range(16):
        for row in by_row:
            wanted = {node: float(np.mean([across[other] for other in joined[node]])) for node in row}
            for order, node in enumerate(sorted(row, key=lambda node: (wanted[node], node))):
                across[node] = 0.5 * (order + 0.5) / len(row) + 0.5 * wanted[node]
            _keep_apart(across, sorted(row, key=lambda node: (across[node], node)), right - left)
    return {
        node: (left + across[node] * (right - left), top + (n_rows - 1 - row + 0.5) * tall)
        for node, row in row_of.items()
    }


def _keep_apart(across: dict[Node, float], ordered: Sequence[Node], room: float) -> None:
    """Moves what stands too close in a row, from the left and then back from the right; closer where all is full."""
    gaps = [(_width(one) + _width(other)) / 2 / room for one, other in zip(ordered, ordered[1:], strict=False)]
    gaps = [gap / max(1.0, sum(gaps)) for gap in gaps]
    for gap, before, after in zip(gaps, ordered, ordered[1:], strict=False):
        across[after] = max(across[after], across[before] + gap)
    limit = 1.0
    for gap, node in zip([*gaps[::-1], 0.0], reversed(ordered), strict=False):
        across[node] = min(across[node], limit)
        limit = across[node] - gap


def _width(node: Node) -> float:
    """The room that a head or a passing line takes."""
    return 68.0 if len(node) == 2 else 22.0


def _curve(start: tuple[float, float], end: tuple[float, float], bend: float) -> list[tuple[float, float]]:
    """A line that leaves upwards and arrives from below (Bézier)."""
    (x0, y0), (x1, y1) = start, end
    t = np.linspace(0, 1, 40)
    middle = (y0 + y1) / 2
    x = (1 - t) ** 3 * x0 + 3 * (1 - t) ** 2 * t * (x0 + bend) + 3 * (1 - t) * t**2 * (x1 + bend) + t**3 * x1
    y: NDArray[np.float64] = (1 - t) ** 3 * y0 + 3 * (1 - t) ** 2 * t * middle + 3 * (1 - t) * t**2 * middle + t**3 * y1
    return list(zip(x.tolist(), y.tolist(), strict=True))
