"""Patching as figures: a map of layers x heads, positions, and how faithful few heads are; PNG, SVG and PDF files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from attnscope.drawing import layout
from attnscope.drawing.canvas import INK, Drawing, colormap, matplotlib_defaults
from attnscope.drawing.lettering import Lettering, lettering_for
from attnscope.drawing.page import Page
from attnscope.drawing.plots import Sheet, draw_line, finish_axes, letter_axes, write_foot
from attnscope.drawing.style import USUAL, Style
from attnscope.errors import AttnscopeError, amount
from attnscope.records.patch import Edge, FaithfulnessCurve, Patching
from attnscope.records.weights import Link
from attnscope.report.numbers import small_number
from attnscope.report.wording import corpus_line, corpus_notes, model_of, printable
from attnscope.views.ablation.figures import effect_maps
from attnscope.views.ablation.summary import label
from attnscope.views.patch.summary import curve_label, notes, title_of, total_line
from attnscope.views.patch.terminal import strongest
from attnscope.views.weights.figures import draw_graph

_MOST_ROWS = 20
_MOST_EDGES = 24
_NAMES_PX, _LABELS_PX, _ROW_PX = 110, 96, 26


def pages(patching: Patching, style: Style = USUAL) -> Iterator[tuple[str, Drawing]]:
    """The figures one after the other, each with its file name without the ending.

    `effect` is a map of all heads and `attribution` the same of its estimate. `positions` has the strongest heads by
    position, `paths` the paths whose effect is not 0 as a graph, and `curve` how much of the effect few heads keep.

    Raises:
        AttnscopeError: There are no heads.
    """
    if not patching.heads:
        raise AttnscopeError("this record of patching has no heads", "so there is nothing to draw")
    facts = [text for name in patching.names for text in (label(name), patching.facts(name).what)]
    lines = [title_of(patching), total_line(patching), *notes(patching), *map(printable, patching.positions)]
    lettering = lettering_for([model_of(patching.run), *facts, *lines], style.paper)
    names = [name for name in ("effect", "attribution") if name in patching.names]
    yield from zip(names, effect_maps(patching, names, lettering), strict=True)
    if patching.positions:
        yield "positions", positions_page(patching, lettering)
    if edges := strongest_edges(patching):
        yield "paths", paths_page(patching, edges, lettering)
    if patching.curve is not None:
        yield "curve", curve_drawing(patching, patching.curve, lettering)


def positions_page(patching: Patching, lettering: Lettering) -> Page:
    """The strongest heads down, the tokens of the first pair across."""
    rows, paper = strongest(patching, _MOST_ROWS), lettering.paper
    values = patching.position_effects[rows, :, 0]
    n = len(patching.positions)
    room = (paper.room_px if paper.fixed else 1500) - _NAMES_PX
    cell = min(64.0, room / n)
    top = layout.MARGIN_PX + 76 + _LABELS_PX
    width = paper.width_for(2 * layout.MARGIN_PX + _NAMES_PX + n * cell, 900)
    bar_y = top + len(rows) * _ROW_PX + 26
    page = Page(width, lettering)
    page.head(
        f"{model_of(patching.run)} · effect of each position alone", f"{title_of(patching)} · {total_line(patching)}"
    )
    largest = float(np.nanmax(np.abs(values))) or 1.0
    left, by_place = layout.MARGIN_PX + _NAMES_PX, dict(np.ndenumerate(np.nan_to_num(values)))
    for row, number in enumerate(rows):
        page.write(left - 8, top + (row + 0.5) * _ROW_PX, patching.unit_name(number), 12.5, ha="right", color=INK)
    page.grid_cells((left, top), (cell, _ROW_PX), by_place, "RdBu_r", lambda value: 0.5 + value / largest / 2)
    step = max(1, int(np.ceil(15 / cell)))
    for place in range(0, n, step):
        text = lettering.fit(printable(patching.positions[place], 40), 12.5, _LABELS_PX)
        page.write(left + (place + 0.5) * cell, top - 8, text, 12.5, ha="center", va="bottom", rotation=90)
    page.colour_bar((left, bar_y, min(300, room), 12), colormap("RdBu_r"))
    for share, value in ((0, -largest), (0.5, 0.0), (1, largest)):
        page.write(left + share * min(300, room), bar_y + 24, small_number(value), 11.5, ha="center")
    page.finish(bar_y + 50, ["tokens: those of the first pair", *notes(patching)])
    return page


def strongest_edges(patching: Patching) -> list[Edge]:
    """The paths whose 95% interval does not hold 0, strongest first."""
    clear = [edge for edge in patching.edges if edge.effect.low > 0 or edge.effect.high < 0]
    return sorted(clear, key=lambda edge: -abs(edge.effect.value))[:_MOST_EDGES]


class _Node(NamedTuple):
    layer: int
    name: str


def paths_page(patching: Patching, edges: Sequence[Edge], lettering: Lettering) -> Page:
    """Which head acts on the answer through which other head."""
    layers = {head.name: head.layer for head in patching.heads}
    names = dict.fromkeys(name for edge in edges for name in (edge.sender, edge.receiver))
    nodes = [_Node(layers.get(name.partition("+")[0], max(layers.values()) + 1), name) for name in names]
    places = {name: number for number, name in enumerate(names)}
    links = [
        Link(places[edge.sender], places[edge.receiver], edge.by[:1].upper(), abs(edge.effect.value), 0.0, 0.0)
        for edge in edges
    ]
    footer = (
        f"the {amount(len(edges), 'path')} with the largest effects whose 95% interval does not hold 0; "
        "wider = a larger effect, of either sign; grey: to the logits without any other head"
    )
    title = f"{model_of(patching.run)} · paths on which heads act on the answer"
    return draw_graph(nodes, links, (title, f"{title_of(patching)} · {total_line(patching)}", footer), lettering)


@matplotlib_defaults()
def curve_drawing(patching: Patching, curve: FaithfulnessCurve, lettering: Lettering) -> Drawing:
    """Draw how much of the total effect is left with fewer and fewer heads."""
    points = np.array([(point.value, point.low, point.high) for point in curve.points])
    # A point without an interval has a band of no height.
    points = np.where(np.isfinite(points), points, points[:, :1])
    has_band = bool((points[:, 1] != points[:, 2]).any())
    how = ["each head that goes has values of the corrupt run, beside those that went before"]
    how += ["band: 95% interval over pairs"] if has_band else []

    # Sizes in inches, from the top: title, plot, its axis and legend, notes.
    sheet = Sheet.on(lettering.paper, lettering)
    foot = write_foot([*how, *corpus_notes(patching)], sheet)
    plot_height = sheet.width * (0.6 if sheet.stacked else 0.4)
    below = 0.97 * sheet.size
    height = sheet.above + 0.4 * sheet.size + plot_height + below + foot.height

    title = f"{model_of(patching.run)} · heads taken out one after another"
    subtitle = lettering.fit(corpus_line(patching, predictions=True), 11 * 96 / 72, sheet.width * 92 / sheet.size)
    figure = sheet.open_figure(height, title, subtitle)
    left = 0.6 * sheet.size / sheet.width
    bottom = (foot.height + below) / height
    axes = figure.add_axes((left, bottom, 0.97 - left, plot_height / height))
    draw_line(axes, curve.n_left, points, INK, sheet, curve_label(patching))
    axes.set_xlim(curve.n_left[0], 0)
    axes.locator_params(axis="x", integer=True)
    finish_axes(axes, sheet)
    letter_axes(axes, "faithfulness: share of the total effect", sheet, across="heads left")
    sheet.add_legend(axes, (-0.01, -0.45 * sheet.size / plot_height))
    foot.write(figure)
    return Drawing(figure, lettering.families)
