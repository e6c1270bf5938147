"""Draw a graph of heads that feed each other: a row per layer, the first layer below."""

from collections.abc import Mapping, Sequence

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

Stop = tuple[str, int]
"""Where a line passes a row: the head, or a name of its own between the heads of the row; and the row."""

_TOP_PX = layout.MARGIN_PX + 92
_NAME_PX = 12.5
_LEAST_PX = 42.0
"""Width of the capsule around a name."""

_ROUNDS = 16
"""How many times heads are put in the order of those that they are joined with."""


def draw_graph(report: Report, block: Graph, lettering: Lettering) -> Page:
    """Draw heads and the lines between them. The width of a line is its weight; its colour is what is read."""
    paper = lettering.paper
    names = list(dict.fromkeys(name for link in block.links for name in (link.sender, link.receiver)))
    layers = sorted({block.layers[name] for name in names})
    rows = {name: layers.index(block.layers[name]) for name in names}

    # Sizes in pixels.
    page = Page(paper.width_for(1200), lettering)
    row_px = max(58, min(92, 900 // max(1, len(layers))))
    left = layout.MARGIN_PX + 60
    right = page.width_px - layout.MARGIN_PX - 40
    top = _TOP_PX + 6
    page.head(f"{report.model} · {block.title}", report.subtitle)

    # Where heads stand, and where lines pass the rows between.
    paths = [_path(rows, link) for link in block.links]
    n_rows = len(layers)
    places = {}
    for (name, row), share in _place_stops(paths).items():
        places[name, row] = left + share * (right - left), top + (n_rows - row - 0.5) * row_px

    # Rows, lines, heads, and what the colours mean.
    for row, layer in enumerate(layers):
        y = top + (n_rows - row - 0.5) * row_px
        is_layer = any(rows[name] == row and name.startswith(f"L{layer}H") for name in names)
        page.write(
            layout.MARGIN_PX, y, f"L{layer}" * is_layer, 14, ha="left", color=FAINT, va="center_baseline"
        )
        page.lines([[(left - 14, y), (right + 14, y)]], color="#ececec", width_px=1.0, zorder=0)
    _draw_links(page, block.links, paths, places)
    for name in names:
        _draw_head(page, name, places[name, rows[name]])
    _draw_key(page)
    page.finish(top + max(1, n_rows) * row_px + 10, [*block.notes, *report.problems])
    return page


def _draw_links(
    page: Page, links: Sequence[Link], paths: Sequence[Sequence[Stop]], places: Mapping[Stop, Point]
) -> None:
    """Draw lines; several between the same heads are bent apart."""
    largest = max((link.weight for link in links), default=1.0)
    ends = [(link.sender, link.receiver) for link in links]
    for number, (link, path) in enumerate(zip(links, paths, strict=True)):
        bend = 9.0 * (ends[:number].count(ends[number]) - (ends.count(ends[number]) - 1) / 2)
        points = [places[stop] for stop in path]
        curve = [
            point
            for start, end in zip(points, points[1:], strict=False)
            for point in _curve(start, end, bend)
        ]
        width = 1.2 + 5.0 * link.weight / largest
        page.lines(
            [curve],
            color=BY_COLORS.get(link.receiver_input, FAINT),
            width_px=width,
            alpha=0.75,
            zorder=2,
        )


def _draw_head(page: Page, name: str, place: Point) -> None:
    """Draw a name in a capsule with a white edge."""
    x, y = place
    half = max(_LEAST_PX, page.lettering.width_px(name, page.paper.letters(_NAME_PX)) + 10) / 2
    for color, thick, order in (("#ffffff", 27, 3), ("#e8ecf2", 24, 3.1)):
        page.lines(
            [[(x - half, y), (x + half, y)]], color=color, width_px=thick, capstyle="round", zorder=order
        )
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


def _path(rows: Mapping[str, int], link: Link) -> list[Stop]:
    """Return the stops of a line: its two heads, and a place in each row between to pass by."""
    first = rows[link.sender]
    last = rows[link.receiver]
    between = [(f"{link.sender} {link.receiver}", row) for row in range(first + 1, last)]
    return [(link.sender, first), *between, (link.receiver, last)]


def _place_stops(paths: Sequence[Sequence[Stop]]) -> dict[Stop, float]:
    """Return the place of each stop across, 0 to 1: evenly in its row, in the order of those that it is joined with."""
    # Which stops a line joins, and the stops of each row in the order of their names.
    joined: dict[Stop, set[Stop]] = {stop: set() for path in paths for stop in path}
    for path in paths:
        for lower, upper in zip(path, path[1:], strict=False):
            joined[lower].add(upper)
            joined[upper].add(lower)
    rows: dict[int, list[Stop]] = {}
    for stop in sorted(joined):
        rows.setdefault(stop[1], []).append(stop)

    # Row by row, stops are put in the order of the mean place of those that they are joined with.
    across = dict.fromkeys(joined, 0.5)
    for _ in range(_ROUNDS):
        for _, stops in sorted(rows.items()):
            wanted = {stop: float(np.mean([across[other] for other in joined[stop]])) for stop in stops}
            stops.sort(key=lambda stop, wanted=wanted: (wanted[stop], stop))  # type: ignore[misc]
            for order, stop in enumerate(stops):
                across[stop] = (order + 0.5) / len(stops)
    return across


def _curve(start: Point, end: Point, bend: float) -> list[Point]:
    """Return a line that leaves upwards and arrives from below (a cubic Bézier curve)."""
    (x0, y0), (x1, y1) = start, end
    t = np.linspace(0, 1, 40)
    middle = (y0 + y1) / 2
    weights = (1 - t) ** 3, 3 * (1 - t) ** 2 * t, 3 * (1 - t) * t**2, t**3
    x = sum(
        weight * value for weight, value in zip(weights, (x0, x0 + bend, x1 + bend, x1), strict=True)
    )
    y = sum(weight * value for weight, value in zip(weights, (y0, middle, middle, y1), strict=True))
    return list(zip(np.asarray(x).tolist(), np.asarray(y).tolist(), strict=True))
