"""Draw a graph of heads that feed each other, with a row for each layer and the first layer at the bottom.

Used by `report.figures`, for the paths of patching and the composition of heads. A row of the graph is numbered from 0,
the lowest. A line that joins heads of distant layers passes between the heads of the rows in the middle.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np

from attnscope.drawing import layout
from attnscope.drawing.canvas import FAINT, INK
from attnscope.drawing.lettering import Lettering
from attnscope.drawing.page import FigurePage
from attnscope.report.blocks import Graph, GraphEdge, Report

_INPUTS = {
    "query": ("Q: queries", "#0072B2"),
    "key": ("K: keys", "#D55E00"),
    "value": ("V: values", "#009E73"),
}
"""The name and the colour of lines, by `GraphEdge.receiver_input`."""

Point = tuple[float, float]
"""A place on the page in pixels, (x, y)."""

Stop = tuple[str, int]
"""Something that needs a place of its own in a row: (name, row). It is a head, or a line that passes through the row.

For example, the line from L0H1 to L2H3 has the stops (L0H1, 0), (L0H1 L2H3, 1) and (L2H3, 2).
"""

_TOP_PX = layout.MARGIN_PX + 92
"""The upper edge of the graph, below the title and the key."""

_NAME_PX = 12.5
"""Size of the names of heads."""

_MIN_PX = 42.0
"""Least width of the box with round ends around a name."""

_ROUNDS = 16
"""How often all rows are sorted; see `_place_stops`."""


def draw_graph(report: Report, block: Graph, lettering: Lettering) -> FigurePage:
    """Draw heads and the lines between them, as wide as their weights, in the colours of the inputs that they feed."""
    # The heads at the ends of lines, each once: a dict keeps their order. Only layers with such a head have a row.
    names: dict[str, None] = {}
    for link in block.links:
        names |= {link.sender: None, link.receiver: None}
    layers = sorted({block.layers[name] for name in names})
    rows = {name: layers.index(block.layers[name]) for name in names}

    # Sizes in pixels. Row 0 is the lowest, so it has the largest y.
    page = FigurePage(lettering.paper.figure_width_px(1200), lettering)
    n_rows = len(layers)
    row_px = max(58, min(92, 900 // n_rows))
    left = layout.MARGIN_PX + 60
    right = page.width_px - layout.MARGIN_PX - 40
    top = _TOP_PX + 6
    middles = [top + (n_rows - row - 0.5) * row_px for row in range(n_rows)]
    page.write_header(f"{report.model} · {block.title}", report.subtitle)

    # The place of each stop on the page.
    paths = [_stops_of(link, rows) for link in block.links]
    places = {}
    for (name, row), across in _place_stops(paths).items():
        places[name, row] = (left + across * (right - left), middles[row])

    # Draw the rows, the lines, the heads above them, and the key.
    for layer, y in zip(layers, middles, strict=True):
        # The row of the logits is not a layer, so it has no name.
        if any(name.startswith(f"L{layer}H") for name in names):
            page.write(
                layout.MARGIN_PX, y, f"L{layer}", 14, ha="left", color=FAINT, va="center_baseline"
            )
        page.draw_lines([[(left - 14, y), (right + 14, y)]], color="#ececec", width_px=1.0, zorder=0)
    _draw_links(page, block.links, paths, places)
    for name in names:
        _draw_head(page, name, places[name, rows[name]])
    _draw_key(page)
    page.end_with_notes(top + n_rows * row_px + 10, [*block.notes, *report.problems])
    return page


def _draw_links(
    page: FigurePage,
    links: Sequence[GraphEdge],
    paths: Sequence[Sequence[Stop]],
    places: Mapping[Stop, Point],
) -> None:
    """Draw the lines; several between the same two heads are bent apart. `paths` has the stops of each line."""
    largest = max(link.weight for link in links)
    ends = [(link.sender, link.receiver) for link in links]
    for index, (link, path) in enumerate(zip(links, paths, strict=True)):
        # Lines between the same heads are 9 pixels apart: three of them have the bends -9, 0 and 9.
        n_parallel = ends.count(ends[index])
        n_before = ends[:index].count(ends[index])
        bend = 9.0 * (n_before - (n_parallel - 1) / 2)
        curve = []
        for start, end in pairwise(path):
            curve += _curve(places[start], places[end], bend)
        _, color = _INPUTS.get(link.receiver_input, ("", FAINT))
        width = 1.2 + 5.0 * link.weight / largest
        page.draw_lines([curve], color=color, width_px=width, alpha=0.75, zorder=2)


def _draw_head(page: FigurePage, name: str, place: Point) -> None:
    """Draw a name in a grey box with round ends and a white edge: two thick lines, the white one below and wider."""
    x, y = place
    half_width = max(_MIN_PX, page.lettering.width_px(name, page.paper.legible_px(_NAME_PX)) + 10) / 2
    line = [(x - half_width, y), (x + half_width, y)]
    page.draw_lines([line], color="#ffffff", width_px=27, capstyle="round", zorder=3)
    page.draw_lines([line], color="#e8ecf2", width_px=24, capstyle="round", zorder=3.1)
    page.write(x, y, name, _NAME_PX, ha="center", va="center_baseline", zorder=5, color=INK)


def _draw_key(page: FigurePage) -> None:
    """Draw the key to the colours of lines, flush right below the title."""
    x = float(page.width_px - layout.MARGIN_PX)
    y = _TOP_PX - 26
    for name, color in reversed(_INPUTS.values()):
        page.write(x, y, name, 13, ha="right", color=INK)
        x -= page.lettering.width_px(name, page.paper.legible_px(13)) + 10
        page.draw_lines([[(x - 24, y), (x, y)]], color=color, width_px=4)
        x -= 46


# The places of heads


def _stops_of(link: GraphEdge, rows: Mapping[str, int]) -> list[Stop]:
    """Return the stops of a line, one in each row from the sender's to the receiver's; `rows` has the row of heads."""
    first = rows[link.sender]
    last = rows[link.receiver]
    line_name = f"{link.sender} {link.receiver}"
    between = [(line_name, row) for row in range(first + 1, last)]
    return [(link.sender, first), *between, (link.receiver, last)]


def _place_stops(paths: Sequence[Sequence[Stop]]) -> dict[Stop, float]:
    """Return the place of each stop across its row, from 0 (left) to 1 (right).

    The stops of a row are at equal distances. Their order is found by the barycentre method, so that few lines cross:
    each row is sorted by the mean place of a stop's neighbours in other rows, several times over.
    """
    # A stop's neighbours are those before and after it on its lines.
    neighbours: dict[Stop, set[Stop]] = defaultdict(set)
    for path in paths:
        for lower, upper in pairwise(path):
            neighbours[lower].add(upper)
            neighbours[upper].add(lower)
    stops_by_row: dict[int, list[Stop]] = defaultdict(list)
    for stop in sorted(neighbours):
        stops_by_row[stop[1]].append(stop)

    # All stops begin in the middle. Stops whose neighbours have the same mean are sorted by name.
    across = dict.fromkeys(neighbours, 0.5)
    for _ in range(_ROUNDS):
        for row in sorted(stops_by_row):
            means = {}
            for stop in stops_by_row[row]:
                means[stop] = float(np.mean([across[neighbour] for neighbour in neighbours[stop]]))
            ordered = sorted(means, key=lambda stop: (means[stop], stop))
            for index, stop in enumerate(ordered):
                across[stop] = (index + 0.5) / len(ordered)
    return across


def _curve(start: Point, end: Point, bend: float) -> list[Point]:
    """Return the points of a cubic Bézier curve that leaves `start` upwards and arrives at `end` from below.

    `bend` moves its middle to the right, in pixels.
    """
    (x0, y0), (x1, y1) = start, end
    middle = (y0 + y1) / 2
    controls = (start, (x0 + bend, middle), (x1 + bend, middle), end)
    t = np.linspace(0, 1, 40)
    weights = ((1 - t) ** 3, 3 * (1 - t) ** 2 * t, 3 * (1 - t) * t**2, t**3)
    # (point, control) by (control, 2).
    points = np.array(weights).T @ np.array(controls)
    return [(x, y) for x, y in points.tolist()]
