"""Heads of retrieval as a figure: scores of all heads, scores by depth, and what is written without them."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import cycle
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnscope.drawing.canvas import FAINT, INK, Drawing, matplotlib_defaults
from attnscope.drawing.head_maps import grids_of
from attnscope.drawing.layout import Paper
from attnscope.drawing.lettering import lettering_for
from attnscope.drawing.plots import (
    COLORS,
    OTHER,
    Sheet,
    draw_line,
    draw_map,
    finish_axes,
    letter_axes,
    write_foot,
)
from attnscope.errors import amount
from attnscope.questions.heads import name_removed, needle_notes
from attnscope.records.heads.findings import Findings, Head
from attnscope.records.heads.needles import Needles
from attnscope.report.numbers import number
from attnscope.report.wording import corpus_line, model_of, printable

_MOST = 5


@matplotlib_defaults()
def needles_drawing(findings: Findings, needles: Needles, paper: Paper) -> Drawing:
    """The figure: a map of layers x heads, lines over depths, and bars where heads were taken out."""
    heads = [head for head in findings.heads if head.roles]
    scored = [head for head in findings.heads if "retrieval" in head.measures]
    ranked = sorted(scored, key=lambda head: -head.measures["retrieval"].value)[:_MOST]
    best = [head for head in ranked if head.measures["retrieval"].value > 0]
    notes = [
        "framed: heads with the role" if heads else "no head has the role",
        "black: what the model writes; colours: what it writes while that head's largest weight is on the same token",
        *needle_notes(needles),
        corpus_line(findings),
    ]
    lettering = lettering_for([model_of(findings.run), *notes], paper)
    sheet = Sheet.on(paper, lettering)
    size, parts = sheet.size, 3 if needles.without else 2
    foot = write_foot(notes, sheet)
    above, pitch = sheet.above, 1.0 * size
    rows = len(grids_of(findings)[findings.kinds[0]].layers)
    if sheet.stacked:
        tops = [max(sheet.plot, 0.11 * rows * size), sheet.plot, 0.6 * sheet.plot][:parts]
    else:
        tops = [max(1.25 * sheet.plot, 0.1 * rows * size) + (parts == 3) * 0.7 * sheet.plot]
    height = above + sum(tops) + len(tops) * pitch + foot.height
    are = "is a retrieval head" if len(heads) == 1 else "are retrieval heads"
    subtitle = f"{len(heads)} of {amount(len(findings.heads), 'head')} {are}"
    figure = sheet.open_figure(height, model_of(findings.run), subtitle)

    def axes_at(left: float, wide: float, top: float, tall: float) -> Any:
        return figure.add_axes((left, 1 - (above + top + 0.35 * size + tall) / height, wide, tall / height))

    if sheet.stacked:
        starts = np.cumsum([0.0, *(top + pitch for top in tops)]).tolist()
        across = ((0.16, 0.7), (0.16, 0.56), (0.5, 0.36))
        places = [(*at, start, top) for at, start, top in zip(across, starts, tops, strict=False)]
    else:
        lower = 0.5 * sheet.plot
        upper = tops[0] - (parts == 3) * (lower + pitch)
        places = [(0.06, 0.36, 0.0, tops[0]), (0.52, 0.34, 0.0, upper), (0.66, 0.2, upper + pitch, lower)][:parts]
    _draw_map(figure, axes_at(*places[0]), findings, heads, sheet)
    _draw_depths(axes_at(*places[1]), needles, best, sheet)
    if needles.without:
        _draw_bars(axes_at(*places[2]), needles, sheet)
    foot.write(figure)
    return Drawing(figure, lettering.families)


def _draw_map(figure: Any, axes: Any, findings: Findings, framed: list[Head], sheet: Sheet) -> None:
    """Scores of all heads; those with the role in frames."""
    from matplotlib.patches import Rectangle

    grid = grids_of(findings)[findings.kinds[0]]
    values = findings.grid(findings.kinds[0], "retrieval")[np.ix_(grid.layers, grid.heads)]
    top = float(np.nanmax(values, initial=0.0))
    draw_map(figure, axes, values, (0.0, 1.0 if top > 0.5 else 0.5), sheet)
    for head in framed:
        corner = grid.corner(head.layer, head.head, (-0.5, -0.5), (1, 1))
        axes.add_patch(Rectangle(corner, 1, 1, fill=False, edgecolor=COLORS[1], linewidth=1.4 * sheet.size))
    for axis, numbers, letter, most in (
        (axes.xaxis, grid.heads, "H", 8 if sheet.stacked else 12),
        (axes.yaxis, grid.layers, "L", 15),
    ):
        ticks = range(0, len(numbers), -(-len(numbers) // most))
        axis.set_ticks(ticks, [f"{letter}{numbers[tick]}" for tick in ticks])
    letter_axes(axes, "retrieval score", sheet, across="")


def _draw_depths(axes: Any, needles: Needles, best: list[Head], sheet: Sheet) -> None:
    """What the model writes, by depth, and the scores of the best heads."""
    at = {(each.length, each.depth): each.copied for each in needles.at}
    lengths, depths = sorted({length for length, _ in at}), sorted({depth for _, depth in at})
    percents = [100 * depth for depth in depths]

    def parts_of(estimates: Iterable[Any]) -> NDArray[np.float64]:
        return np.array([[e.value, e.low, e.high] if e is not None else [np.nan] * 3 for e in estimates])

    for style, length in zip(cycle(("-", "--", ":", "-.")), lengths, strict=False):
        parts = parts_of(at.get((length, depth)) for depth in depths)
        name = amount(length, "token") if len(lengths) > 1 else "model"
        draw_line(
            axes, percents, parts, INK, sheet, name, band=len(lengths) == 1, linestyle=style, linewidth=4.5 * sheet.size
        )  # lines of heads that lie on it leave its edges
    for color, head in zip(COLORS, best, strict=False):
        parts = parts_of(head.estimate(f"retrieval_at_{percent:g}") for percent in percents)
        draw_line(axes, percents, parts, color, sheet, head.name, band=False)
    finish_axes(axes, sheet)
    if len(depths) > 1:
        axes.set_xlim(percents[0], percents[-1])
    axes.set_ylim(-0.02, 1.02)
    letter_axes(axes, "needle tokens written, share", sheet, across="depth of the needle, %")
    sheet.add_legend(axes)


def _draw_bars(axes: Any, needles: Needles, sheet: Sheet) -> None:
    """What is written by the whole model, and without heads."""
    size = sheet.size
    rows = [("all heads", needles.copied, INK)]
    for each in needles.without:
        color = COLORS[1] if each.what == "retrieval" else OTHER
        rows.append((f"without {printable(name_removed(each), 60)}", each.copied, color))
    for row, (_, copied, color) in enumerate(rows):
        axes.barh(row, copied.value, color=color, height=0.62)
        if np.isfinite(copied.low):
            ends = [[max(0.0, copied.value - copied.low)], [max(0.0, copied.high - copied.value)]]
            axes.errorbar(copied.value, row, xerr=ends, color=FAINT, linewidth=1.2 * size, capsize=2 * size)
        text = number(copied.value)
        axes.text(1.04, row, text, va="center", fontsize=9 * size, family=sheet.families, color=INK)
    axes.set_xlim(0, 1)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    finish_axes(axes, sheet)
    axes.set_yticks(range(len(rows)), [name for name, *_ in rows])
    letter_axes(axes, "needle tokens written", sheet, across="")
