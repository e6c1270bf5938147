"""What the weights say, as figures: scores of all heads, who composes with whom, and the strongest pairs as a graph."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from attnscope.drawing import layout
from attnscope.drawing.canvas import FAINT, INK, Box
from attnscope.drawing.lettering import Lettering, lettering_for
from attnscope.drawing.page import HeadGrid, Page
from attnscope.drawing.style import USUAL, Style
from attnscope.errors import amount
from attnscope.records.weights import COMPOSITIONS, HeadWeights, Link
from attnscope.report.numbers import digits, fixed
from attnscope.views.weights.summary import READS, notes_of, title_of

_SIGNED, _SHARE = "RdBu_r", "Blues"
_COLORS = {"Q": "#0072B2", "K": "#D55E00", "V": "#009E73"}
_TOP_PX, _GAP_PX = layout.MARGIN_PX + 92, 32
_MOST_LINKS = 8  # of queries, of keys and of values
_MOST_CELLS = 16  # the same, in a matrix
_NAME_PX = 11.5


def pages(weights: HeadWeights, style: Style = USUAL) -> Iterator[tuple[str, Page]]:
    """The figures one after the other, each with its file name without the ending.

    `weights-heads` has maps of copying, matching and the previous token, `weights-composition` a matrix each of
    queries, keys and values, `weights-graph` the pairs that compose most.
    """
    lettering = lettering_for([title_of(weights)], style.paper)
    yield "weights-heads", heads_page(weights, lettering)
    if np.isfinite(weights.composition).any():
        yield "weights-composition", composition_page(weights, lettering)
        yield "weights-graph", graph_page(weights, lettering)


# -- heads


def heads_page(weights: HeadWeights, lettering: Lettering) -> Page:
    """Maps of layers x heads: copying, matching, and what places alone give the previous token."""
    by_head = {(head.layer, head.head): head for head in weights.heads}
    panels = [
        ("copying", {at: head.copying.value for at, head in by_head.items()}, -1.0),
        ("matching", {at: head.matching.value for at, head in by_head.items()}, -1.0),
        ("previous token, by position", {at: head.previous for at, head in by_head.items()}, 0.0),
    ]
    panels = [panel for panel in panels if any(map(math.isfinite, panel[1].values()))] or panels[:1]
    grid = HeadGrid.over(by_head)
    shape = grid.shape
    cell_w = max(4.0, min(58.0, _panel_px(len(panels), lettering, 1500, 80) / shape[1]))
    cell_h = max(12.0, min(0.62 * cell_w, 34.0, 900 / shape[0]))
    size = shape[1] * cell_w, shape[0] * cell_h
    page, corners, bottom = _start_panels(weights, len(panels), size, (80, 96), lettering)
    page.head(title_of(weights), f"layers x heads · {amount(len(weights.heads), 'head')}")
    for (title, values, low), (left, top) in zip(panels, corners, strict=True):
        page.entitle(left, top - 34, title)
        cmap = _SIGNED if low else _SHARE
        cells = page.grid_cells((left, top), (cell_w, cell_h), values, cmap, partial(_share_above, low))
        letters = lettering.paper.letters(min(12.0, cell_w * 0.24))
        if cell_w >= max(40, 3 * lettering.paper.least_px) and cell_h >= letters * 1.2 and not low:
            page.number_cells(list(cells.values()), [fixed(value, 2) for value in values.values()], letters)
        page.name_axes((left, top), grid, (cell_w, cell_h), size_px=12.0)
        _write_bar(page, (left, top + size[1] + 16, min(200, size[0]), 11), cmap, (low, 1.0))
        scores = {at: head.matching if title == "matching" else head.copying for at, head in by_head.items()}
        for layer, head in (at for at in values if low and math.isfinite(values[at]) and not scores[at].is_outside):
            x, y = grid.corner(layer, head, (left, top), (cell_w, cell_h))
            page.dot((x + cell_w / 2, y + cell_h / 2), max(1.2, cell_h * 0.09), FAINT)
    page.finish(bottom, [*notes_of(weights, marks=False)[:-1], _note_on_places(weights)])
    return page


def _share_above(low: float, value: float) -> float:
    """How far a value is on the way from `low` to 1."""
    return (value - low) / (1 - low)


def _panel_px(n: int, lettering: Lettering, screen_px: int, around_px: int) -> float:
    """How wide panels may be that stand side by side, or on narrow paper one below the other."""
    paper = lettering.paper
    across = 1 if paper.is_narrow else n
    return ((paper.room_px if paper.fixed else screen_px) - across * around_px + _GAP_PX) / across


def _start_panels(
    weights: HeadWeights, n: int, size: tuple[float, float], around: tuple[int, int], lettering: Lettering
) -> tuple[Page, list[tuple[float, float]], float]:
    """A page of panels of a size, their corners, and where the notes begin; `around` is the room for names and bars."""
    paper = lettering.paper
    across = 1 if paper.is_narrow else n
    pitch = size[0] + around[0], size[1] + around[1]
    page = Page(paper.width_for(2 * layout.MARGIN_PX + across * pitch[0] - _GAP_PX, 900), lettering)
    corners = layout.tile(n, across, (layout.MARGIN_PX + around[0] - _GAP_PX, _TOP_PX), pitch)
    return page, corners, _TOP_PX + math.ceil(n / across) * pitch[1]


def _note_on_places(weights: HeadWeights) -> str:
    uniform = min(weights.uniform.get("previous", (math.nan,)))
    return (
        f"a dot: not beyond all of {weights.n_draws} random heads with the same singular values · "
        "matching: the same of W_E' W_Q' W_K W_E, 1 = a query looks for its own "
        f"token · by position: the share of attention that the previous token gets where all tokens are alike, "
        f"{amount(weights.n_places, 'position')}; uniform {fixed(uniform, 2)}"
    )


def _write_bar(page: Page, box: Box, cmap: str, limits: tuple[float, float], least: str = "") -> None:
    """A colour bar with its ends and, where it has two signs, its middle; `least` is written at the first end."""
    ticks = {tick: digits(tick, 2) for tick in ((limits[0], 0.0, limits[1]) if limits[0] < 0 else limits)}
    page.draw_scale(box, cmap, limits, ticks=ticks | ({limits[0]: least} if least else {}), size_px=11.5, color=FAINT)


# -- composition


def composition_page(weights: HeadWeights, lettering: Lettering) -> Page:
    """A matrix each of queries, keys and values: the heads of the pairs that compose most, and the share above chance.

    Senders stand across and receivers down, both from the first layer on.
    """
    excess, heads = weights.excess, weights.heads
    n_pairs = _MOST_CELLS // 2 if lettering.paper.is_narrow else _MOST_CELLS
    shown = [number for number in range(len(COMPOSITIONS)) if np.isfinite(excess[number]).any()]
    links = {number: weights.strongest(COMPOSITIONS[number], n_pairs) for number in shown}
    above = {number: [link for link in ranked if link.excess > 0] or ranked for number, ranked in links.items()}
    names_px = lettering.width_px(max((head.name for head in heads), key=len), lettering.paper.letters(_NAME_PX)) + 16
    left_px, top_px = math.ceil(names_px + _GAP_PX), math.ceil(names_px - 22)
    size = min(_panel_px(len(shown), lettering, 1620, left_px), 42.0 * len(heads))
    page, corners, bottom = _start_panels(weights, len(shown), (size, size), (left_px, 100 + top_px), lettering)
    page.head(title_of(weights), "composition: the share of a pair's norm, less its mean for random directions")
    high = max(float(np.nanmax(excess[shown])), 1e-6)
    least = "≤ 0" if float(np.nanmin(excess[shown])) < 0 else "0"
    for number, (left, title_y) in zip(shown, corners, strict=True):
        by, top = COMPOSITIONS[number], title_y + top_px
        senders = sorted({link.sender for link in above[number]})
        receivers = sorted({link.receiver for link in above[number]})
        page.entitle(left, title_y - 34, f"{by}: through {READS[by]}")
        page.matrix(
            (left, top, size, size), excess[number][np.ix_(senders, receivers)].T, _SHARE, (0.0, high), "#f4f4f4"
        )
        page.frames([(left, top, size, size)])
        _name_heads(page, [heads[place].name for place in receivers], (left, top), size, across=False)
        _name_heads(page, [heads[place].name for place in senders], (left, top), size, across=True)
        _write_bar(page, (left, top + size + 22, min(200, size), 11), _SHARE, (0.0, high), least)
    notes = [
        "rows: the heads that read · columns: the earlier heads that they read from · shown: the heads of the "
        f"{amount(n_pairs, 'pair')} that exceed chance most; a saved record has all · grey: not in a later layer"
    ]
    page.finish(bottom, [*notes, notes_of(weights)[-1]])
    return page


def _name_heads(page: Page, names: Sequence[str], corner: tuple[float, float], size: float, *, across: bool) -> None:
    """The names of heads beside the rows or, upright, above the columns of a matrix; as many as have room."""
    (left, top), cell = corner, size / len(names)
    step = math.ceil(page.paper.letters(_NAME_PX) * 1.15 / cell)
    for number, name in list(enumerate(names))[::step]:
        middle = (number + 0.5) * cell
        if across:
            page.write(left + middle, top - 7, name, _NAME_PX, ha="center", va="bottom", rotation=90, color=FAINT)
        else:
            page.write(left - 7, top + middle, name, _NAME_PX, ha="right", va="center_baseline", color=FAINT)


# -- the graph


def graph_page(weights: HeadWeights, lettering: Lettering) -> Page:
    """The pairs that compose most above chance, a row for each layer that has one of them; the first below."""
    n_links = _MOST_LINKS // 2 if lettering.paper.is_narrow else _MOST_LINKS
    ranked = [link for by in COMPOSITIONS for link in weights.strongest(by, n_links)]
    # The glass box's heads write to slots of their own: that they share any direction says it all.
    links = [link for link in ranked if link.excess > 0] or [link for link in ranked if link.share > 0]
    footer = (
        f"the {amount(n_links, 'pair')} each that compose most by queries, keys and values above chance; wider = "
        "a larger share; a line goes up from the head that writes to the head that reads"
    )
    subtitle = "which heads feed which: the strongest pairs"
    return draw_graph(weights.heads, links, (title_of(weights), subtitle, footer), lettering)


class Reader(Protocol):
    """What a line of a graph leads from or to."""

    @property
    def layer(self) -> int:
        """Its row, counted from below."""

    @property
    def name(self) -> str:
        """What is written on it."""


def draw_graph(
    heads: Sequence[Reader], links: Sequence[Link], texts: tuple[str, str, str], lettering: Lettering
) -> Page:
    """Heads and what goes from one to another, a row for each layer that has one of them.

    A link's `share` is the width of its line, and `by` the colour: "Q", "K", "V", else grey. `texts` are the title, the
    subtitle and the footer.
    """
    title, subtitle, footer = texts
    used = sorted({place for link in links for place in (link.sender, link.receiver)})
    layers = sorted({heads[place].layer for place in used})
    paper = lettering.paper
    width = paper.width_for(1200)
    row = max(58, min(92, 900 // max(1, len(layers))))
    left, right, top = layout.MARGIN_PX + 60, width - layout.MARGIN_PX - 40, _TOP_PX + 6
    page = Page(width, lettering)
    page.head(title, subtitle)
    joined = dict.fromkeys((link.sender, link.receiver) for link in links)
    chains = {pair: _chain(heads, layers, *pair) for pair in joined}
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
    for (sender, receiver), joining in pairs.items():
        for number, link in enumerate(joining):
            bend = 9.0 * (number - (len(joining) - 1) / 2)
            stops = [at[node] for node, _ in chains[sender, receiver]]
            curve = [point for ends in zip(stops, stops[1:], strict=False) for point in _curve(*ends, bend)]
            color = _COLORS.get(link.by, FAINT)
            page.lines([curve], color=color, width_px=1.2 + 5.0 * link.share / most, alpha=0.75, zorder=2)
    for number in used:
        x, y = at[number, number]
        for color, thick, order in (("#ffffff", 27, 3), ("#e8ecf2", 24, 3.1)):
            page.lines([[(x - 21, y), (x + 21, y)]], color=color, width_px=thick, capstyle="round", zorder=order)
        page.write(x, y, heads[number].name, 12.5, ha="center", va="center_baseline", zorder=5, color=INK)
    x = width - layout.MARGIN_PX
    for by in reversed(COMPOSITIONS):
        text = f"{by}: {READS[by]}"
        page.write(x, _TOP_PX - 26, text, 13, ha="right", color=INK)
        x -= lettering.width_px(text, paper.letters(13)) + 10
        page.lines([[(x - 24, _TOP_PX - 26), (x, _TOP_PX - 26)]], color=_COLORS[by], width_px=4)
        x -= 24 + 22
    page.finish(top + max(1, len(layers)) * row + 10, [footer])
    return page


Node = tuple[int, ...]
"""(head, head), or where a line passes a row of others: (sender, receiver, row)."""


def _chain(heads: Sequence[Reader], layers: Sequence[int], sender: int, receiver: int) -> list[tuple[Node, int]]:
    """The stops of a line, each with its row: its two heads, and a place in each row between, to pass by its heads."""
    first, last = (layers.index(heads[number].layer) for number in (sender, receiver))
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
        for lower, upper in zip(chain, chain[1:], strict=False):
            joined[lower].append(upper)
            joined[upper].append(lower)
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
    gaps = [(_width(node) + _width(after)) / 2 / room for node, after in zip(ordered, ordered[1:], strict=False)]
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
