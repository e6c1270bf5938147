"""Draw a graph of heads that feed each other, with a row for each layer and the first layer at the bottom.

Used by `report.figures`, for the paths of patching and the composition of heads. Rows of the graph are numbered from
the bottom: row 0 is the lowest. An edge that joins heads of distant layers passes between the heads of the rows in the
middle. In each of these rows it has a dummy node, as in Sugiyama's method of drawing layered graphs.
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

_INPUT_STYLES = {
    "query": ("Q: queries", "#0072B2"),
    "key": ("K: keys", "#D55E00"),
    "value": ("V: values", "#009E73"),
}
"""The name in the legend and the colour of edges, by `GraphEdge.receiver_input`."""

Point = tuple[float, float]
"""A point on the page in pixels, (x, y); y grows downwards."""

PathNode = tuple[str, int]
"""A node on the path of an edge, (name, row): a head, or a dummy node in a row that the edge passes through.

For example, the edge from L0H1 to L2H3 has the nodes (L0H1, 0), (L0H1 L2H3, 1) and (L2H3, 2).
"""

_TOP_PX = layout.MARGIN_PX + 92
"""The upper edge of the graph, below the title and the legend."""

_NAME_FONT_PX = 12.5
"""Size of the names of heads."""

_MIN_BOX_PX = 42.0
"""Least width of the box with round ends around a name."""

_N_SORTING_PASSES = 16
"""How many times every row is sorted; see `_order_nodes`."""


def draw_graph(report: Report, block: Graph, lettering: Lettering) -> FigurePage:
    """Draw heads and the edges between them. Its weight sets the width of an edge, its input the colour."""
    # The heads at the ends of edges, each once, in the order of the edges: the dict serves as an ordered set.
    head_names: dict[str, None] = {}
    for edge in block.edges:
        head_names |= {edge.sender: None, edge.receiver: None}
    # Only layers with one of these heads have a row.
    layers = sorted({block.layers[name] for name in head_names})
    row_by_head = {name: layers.index(block.layers[name]) for name in head_names}

    # Sizes in pixels. Row 0 is the lowest, so it has the largest y.
    page = FigurePage(lettering.paper.figure_width_px(1200), lettering)
    n_rows = len(layers)
    row_px = max(58, min(92, 900 // n_rows))
    left = layout.MARGIN_PX + 60
    right = page.width_px - layout.MARGIN_PX - 40
    top = _TOP_PX + 6
    row_middles_px = [top + (n_rows - row - 0.5) * row_px for row in range(n_rows)]
    page.write_header(f"{report.model} · {block.title}", report.subtitle)

    # The point of each node on the page.
    paths = [_trace_edge(edge, row_by_head) for edge in block.edges]
    points_by_node = {}
    for (name, row), x_share in _order_nodes(paths).items():
        points_by_node[name, row] = (left + x_share * (right - left), row_middles_px[row])

    # Draw the rows, the edges, the heads on top of the edges, and the legend.
    for layer, y in zip(layers, row_middles_px, strict=True):
        # The row of the logits is not a layer, so it has no name.
        if any(name.startswith(f"L{layer}H") for name in head_names):
            page.write(
                layout.MARGIN_PX, y, f"L{layer}", 14, ha="left", color=FAINT, va="center_baseline"
            )
        page.draw_lines([[(left - 14, y), (right + 14, y)]], color="#ececec", width_px=1.0, zorder=0)
    _draw_edges(page, block.edges, paths, points_by_node)
    for name in head_names:
        _draw_head(page, name, points_by_node[name, row_by_head[name]])
    _draw_legend(page)
    page.end_with_notes(top + n_rows * row_px + 10, [*block.notes, *report.problems])
    return page


def _draw_edges(
    page: FigurePage,
    edges: Sequence[GraphEdge],
    paths: Sequence[Sequence[PathNode]],
    points_by_node: Mapping[PathNode, Point],
) -> None:
    """Draw the edges. Parallel edges, which join the same two heads, are bent apart.

    Args:
        page: The page.
        edges: The edges.
        paths: The nodes of each edge, from the sender to the receiver.
        points_by_node: The point of each node on the page.
    """
    max_weight = max(edge.weight for edge in edges)
    end_names = [(edge.sender, edge.receiver) for edge in edges]
    for index, (edge, path) in enumerate(zip(edges, paths, strict=True)):
        # Parallel edges are 9 pixels apart: three of them have the bends -9, 0 and 9.
        n_parallel = end_names.count(end_names[index])
        n_before = end_names[:index].count(end_names[index])
        bend = 9.0 * (n_before - (n_parallel - 1) / 2)
        curve = []
        for start, end in pairwise(path):
            curve += _compute_curve(points_by_node[start], points_by_node[end], bend)
        _, color = _INPUT_STYLES.get(edge.receiver_input, ("", FAINT))
        width = 1.2 + 5.0 * edge.weight / max_weight
        page.draw_lines([curve], color=color, width_px=width, alpha=0.75, zorder=2)


def _draw_head(page: FigurePage, name: str, point: Point) -> None:
    """Draw a name in a grey box with round ends and a white edge: two thick lines, the white one below and wider."""
    x, y = point
    name_px = page.lettering.width_px(name, page.paper.legible_px(_NAME_FONT_PX))
    half_width = max(_MIN_BOX_PX, name_px + 10) / 2
    line = [(x - half_width, y), (x + half_width, y)]
    page.draw_lines([line], color="#ffffff", width_px=27, capstyle="round", zorder=3)
    page.draw_lines([line], color="#e8ecf2", width_px=24, capstyle="round", zorder=3.1)
    page.write(x, y, name, _NAME_FONT_PX, ha="center", va="center_baseline", zorder=5, color=INK)


def _draw_legend(page: FigurePage) -> None:
    """Draw the legend of the colours of edges, flush right below the title."""
    x = float(page.width_px - layout.MARGIN_PX)
    y = _TOP_PX - 26
    for name, color in reversed(_INPUT_STYLES.values()):
        page.write(x, y, name, 13, ha="right", color=INK)
        x -= page.lettering.width_px(name, page.paper.legible_px(13)) + 10
        page.draw_lines([[(x - 24, y), (x, y)]], color=color, width_px=4)
        x -= 46


# The places of heads


def _trace_edge(edge: GraphEdge, row_by_head: Mapping[str, int]) -> list[PathNode]:
    """Return the nodes of an edge, one in each row from that of its sender to that of its receiver."""
    sender_row = row_by_head[edge.sender]
    receiver_row = row_by_head[edge.receiver]
    edge_name = f"{edge.sender} {edge.receiver}"
    dummy_nodes = [(edge_name, row) for row in range(sender_row + 1, receiver_row)]
    return [(edge.sender, sender_row), *dummy_nodes, (edge.receiver, receiver_row)]


def _order_nodes(paths: Sequence[Sequence[PathNode]]) -> dict[PathNode, float]:
    """Return the horizontal position of each node in its row, from 0 (left) to 1 (right).

    The nodes of a row are at equal distances. Their order is found by the barycentre method, so that few lines cross:
    each row is sorted by the mean position of a node's neighbours in other rows, and this is repeated.
    """
    # The neighbours of a node are the nodes before and after it on the edges through it.
    neighbours: dict[PathNode, set[PathNode]] = defaultdict(set)
    for path in paths:
        for lower, upper in pairwise(path):
            neighbours[lower].add(upper)
            neighbours[upper].add(lower)
    nodes_by_row: dict[int, list[PathNode]] = defaultdict(list)
    for node in sorted(neighbours):
        nodes_by_row[node[1]].append(node)

    # All nodes begin in the middle. Nodes whose neighbours have the same mean are sorted by name.
    x_share = dict.fromkeys(neighbours, 0.5)
    for _ in range(_N_SORTING_PASSES):
        for row in sorted(nodes_by_row):
            mean_x_shares = {}
            for node in nodes_by_row[row]:
                mean_x_shares[node] = float(
                    np.mean([x_share[neighbour] for neighbour in neighbours[node]])
                )
            sorted_nodes = sorted(mean_x_shares, key=lambda node: (mean_x_shares[node], node))
            for index, node in enumerate(sorted_nodes):
                x_share[node] = (index + 0.5) / len(sorted_nodes)
    return x_share


def _compute_curve(start: Point, end: Point, bend: float) -> list[Point]:
    """Return the points of a cubic Bézier curve that leaves `start` upwards and arrives at `end` from below.

    `bend` moves the middle of the curve to the right, in pixels.
    """
    (x0, y0), (x1, y1) = start, end
    middle = (y0 + y1) / 2
    controls = (start, (x0 + bend, middle), (x1 + bend, middle), end)
    t = np.linspace(0, 1, 40)
    weights = ((1 - t) ** 3, 3 * (1 - t) ** 2 * t, 3 * (1 - t) * t**2, t**3)
    # (point, control) @ (control, [x, y]) = (point, [x, y]).
    points = np.array(weights).T @ np.array(controls)
    return [(x, y) for x, y in points.tolist()]
