"""Draw a graph of heads that feed each other: a row per layer, the first layer below."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from attnscope.drawing import layout
from attnscope.drawing.canvas import FAINT, INK
from attnscope.drawing.lettering import Lettering
from attnscope.drawing.page import Page
from attnscope.report.blocks import Graph, Link, Report

BY_COLORS = {"query": "#0072B2", "key": "#D55E00", "value": "#009E73"}
"""The colours of lines, by what the receiver computes."""

BY_NAMES = {"query": "Q: queries", "key": "K: keys", "value": "V: values"}

Point = tuple[float, float]

Stop = tuple[str, ...]
"""A place where a line passes a row: (head,), or (sender, receiver, row) between the heads of the row."""

_TOP_PX = layout.MARGIN_PX + 92
_NAME_PX = 12.5
_LEAST_PX = 42.0
"""Width of the capsule around a name."""

_STEPS = 16
"""How many times heads are moved towards those that they are joined with."""


def draw_graph(report: Report, block: Graph, lettering: Lettering) -> Page:
    """Draw heads and the lines between them. The width of a line is its weight; its colour is what is read."""
    paper = lettering.paper
    names = list(dict.fromkeys(name for link in block.links for name in (link.sender, link.receiver)))
    layers = sorted({block.layers[name] for name in names})
    rows = {name: layers.index(block.layers[name]) for name in names}
    widths = {name: max(_LEAST_PX, lettering.width_px(name, paper.letters(_NAME_PX)) + 10) for name in names}

    # Sizes in pixels.
    page = Page(paper.width_for(1200), lettering)
    row_px = max(58, min(92, 900 // max(1, len(layers))))
    left = layout.MARGIN_PX + 60
    right = page.width_px - layout.MARGIN_PX - 40
    top = _TOP_PX + 6
    page.head(f"{report.model} · {block.title}", report.subtitle)

    # Where heads stand, and where lines pass the rows between.
    chains = {(link.sender, link.receiver): _chain(rows, link.sender, link.receiver) for link in block.links}
    across = _place_stops(chains.values(), widths, right - left)
    n_rows = len(layers)
    places = {
        stop: (left + x * (right - left), top + (n_rows - row - 0.5) * row_px) for stop, (row, x) in across.items()
    }

    # Rows, lines, heads, and what the colours mean.
    for row, layer in enumerate(layers):
        y = top + (n_rows - row - 0.5) * row_px
        is_layer = any(rows[name] == row and name.startswith(f"L{layer}H") for name in names)
        page.write(layout.MARGIN_PX, y, f"L{layer}" * is_layer, 14, ha="left", color=FAINT, va="center_baseline")
        page.lines([[(left - 14, y), (right + 14, y)]], color="#ececec", width_px=1.0, zorder=0)
    _draw_links(page, block.links, chains, places)
    for name in names:
        _draw_head(page, name, places[(name,)], widths[name])
    _draw_key(page)
    page.finish(top + max(1, n_rows) * row_px + 10, [*block.notes, *report.problems])
    return page


def _draw_links(
    page: Page,
    links: Sequence[Link],
    chains: Mapping[tuple[str, str], Sequence[tuple[Stop, int]]],
    places: Mapping[Stop, Point],
) -> None:
    """Draw lines; several between the same heads are bent apart."""
    largest = max((link.weight for link in links), default=1.0)
    by_ends: dict[tuple[str, str], list[Link]] = {}
    for link in links:
        by_ends.setdefault((link.sender, link.receiver), []).append(link)
    for ends, joining in by_ends.items():
        points = [places[stop] for stop, _ in chains[ends]]
        for number, link in enumerate(joining):
            bend = 9.0 * (number - (len(joining) - 1) / 2)
            curve: list[Point] = []
            for start, end in zip(points, points[1:], strict=False):
                curve += _curve(start, end, bend)
            width = 1.2 + 5.0 * link.weight / largest
            page.lines([curve], color=BY_COLORS.get(link.by, FAINT), width_px=width, alpha=0.75, zorder=2)


def _draw_head(page: Page, name: str, place: Point, width: float) -> None:
    """Draw a name in a capsule with a white edge."""
    x, y = place
    half = width / 2
    for color, thick, order in (("#ffffff", 27, 3), ("#e8ecf2", 24, 3.1)):
        page.lines([[(x - half, y), (x + half, y)]], color=color, width_px=thick, capstyle="round", zorder=order)
    page.write(x, y, name, _NAME_PX, ha="center", va="center_baseline", zorder=5, color=INK)


def _draw_key(page: Page) -> None:
    """Draw what the colours of lines mean, flush right below the title."""
    x = float(page.width_px - layout.MARGIN_PX)
    y = _TOP_PX - 26
    for by in reversed(BY_NAMES):
        page.write(x, y, BY_NAMES[by], 13, ha="right", color=INK)
        x -= page.lettering.width_px(BY_NAMES[by], page.paper.letters(13)) + 10
        page.lines([[(x - 24, y), (x, y)]], color=BY_COLORS[by], width_px=4)
        x -= 46


# Where heads stand


def _chain(rows: Mapping[str, int], sender: str, receiver: str) -> list[tuple[Stop, int]]:
    """Return the stops of a line, each with its row: its two heads, and a place in each row between to pass by."""
    first, last = rows[sender], rows[receiver]
    between: list[tuple[Stop, int]] = [((sender, receiver, str(row)), row) for row in range(first + 1, last)]
    return [((sender,), first), *between, ((receiver,), last)]


def _place_stops(
    chains: Iterable[Sequence[tuple[Stop, int]]], widths: Mapping[str, float], room: float
) -> dict[Stop, tuple[int, float]]:
    """Return the row of each stop and its place across, 0 to 1: near those that it is joined with."""
    rows: dict[Stop, int] = {}
    joined: dict[Stop, list[Stop]] = {}
    for chain in chains:
        for stop, row in chain:
            rows[stop] = row
            joined.setdefault(stop, [])
        for (lower, _), (upper, _) in zip(chain, chain[1:], strict=False):
            joined[lower].append(upper)
            joined[upper].append(lower)

    # At first the stops of a row stand apart in the order of their names.
    by_row: dict[int, list[Stop]] = {}
    for stop in sorted(rows):
        by_row.setdefault(rows[stop], []).append(stop)
    across: dict[Stop, float] = {}
    for stops in by_row.values():
        for order, stop in enumerate(stops):
            across[stop] = (order + 0.5) / len(stops)

    # Then each moves towards the mean of those that it is joined with, and those of a row are kept apart.
    for _ in range(_STEPS):
        for _, stops in sorted(by_row.items()):
            wanted = {stop: float(np.mean([across[other] for other in joined[stop]])) for stop in stops}
            for order, stop in enumerate(sorted(stops, key=lambda stop: (wanted[stop], stop))):
                across[stop] = 0.5 * (order + 0.5) / len(stops) + 0.5 * wanted[stop]
            _keep_apart(across, sorted(stops, key=lambda stop: (across[stop], stop)), widths, room)
    return {stop: (rows[stop], across[stop]) for stop in rows}


def _keep_apart(across: dict[Stop, float], ordered: Sequence[Stop], widths: Mapping[str, float], room: float) -> None:
    """Move apart what stands too close in a row, from the left and then back from the right; closer if it is full."""

    def width(stop: Stop) -> float:
        return widths[stop[0]] + 26 if len(stop) == 1 else 22.0

    # Gaps between neighbours, as shares of the row; a row that is too full shrinks them all.
    gaps = [(width(stop) + width(after)) / 2 / room for stop, after in zip(ordered, ordered[1:], strict=False)]
    gaps = [gap / max(1.0, sum(gaps)) for gap in gaps]
    # Push to the right.
    for gap, before, after in zip(gaps, ordered, ordered[1:], strict=False):
        across[after] = max(across[after], across[before] + gap)
    # Push back from the right end.
    limit = 1.0
    for gap, stop in zip([*gaps[::-1], 0.0], reversed(ordered), strict=False):
        across[stop] = min(across[stop], limit)
        limit = across[stop] - gap


def _curve(start: Point, end: Point, bend: float) -> list[Point]:
    """Return a line that leaves upwards and arrives from below (a cubic Bézier curve)."""
    (x0, y0), (x1, y1) = start, end
    t = np.linspace(0, 1, 40)
    middle = (y0 + y1) / 2
    weights = (1 - t) ** 3, 3 * (1 - t) ** 2 * t, 3 * (1 - t) * t**2, t**3
    x = sum(weight * value for weight, value in zip(weights, (x0, x0 + bend, x1 + bend, x1), strict=True))
    y = sum(weight * value for weight, value in zip(weights, (y0, middle, middle, y1), strict=True))
    return list(zip(np.asarray(x).tolist(), np.asarray(y).tolist(), strict=True))
