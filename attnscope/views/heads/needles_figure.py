"""Heads of retrieval as a figure: scores of all heads, scores by depth, and what is written without them."""

from __future__ import annotations

from typing import Any

import numpy as np

from attnscope.errors import amount
from attnscope.records.heads.findings import Findings, Head
from attnscope.records.heads.needles import Needles
from attnscope.views.drawing.canvas import FAINT, INK, Drawing, matplotlib_defaults
from attnscope.views.drawing.head_maps import grids_of
from attnscope.views.drawing.layout import Paper
from attnscope.views.drawing.lettering import lettering_for
from attnscope.views.drawing.plots import (
    COLORS,
    OTHER,
    Sheet,
    draw_line,
    draw_map,
    finish_axes,
    letter_axes,
    write_foot,
)
from attnscope.views.heads.needles_terminal import notes, what_is_out
from attnscope.views.tables.numbers import number
from attnscope.views.tables.wording import corpus_line, model_of, printable

_MOST = 5


@matplotlib_defaults()
def needles_drawing(findings: Findings, found: Needles, paper: Paper) -> Drawing:
    """The figure: a map of layers x heads, lines over depths, and bars where heads were taken out."""
    heads = [head for head in findings.heads if head.roles]
    scores = [(head.measures["retrieval"].value, head) for head in findings.heads if "retrieval" in head.measures]
    ranked = sorted(scores, key=lambda one: -one[0])
    best = [head for score, head in ranked[:_MOST] if score > 0]
    said = [*notes(found), corpus_line(findings)]
    said.insert(0, "framed: heads with the role" if heads else "no head has the role")
    said.insert(
        1, "black: what the model writes; colours: what it writes while that head's largest weight is on the same token"
    )
    lettering = lettering_for([model_of(findings.run), *said], paper)
    sheet = Sheet.on(paper, lettering)
    size, parts = sheet.size, 3 if found.without else 2
    foot = write_foot(said, sheet)
    above, pitch = sheet.above, 1.0 * size
    rows = len(grids_of(findings)[findings.kinds[0]].layers)
    if sheet.stacked:
        tops = [max(sheet.plot, 0.11 * rows * size), sheet.plot, 0.6 * sheet.plot][:parts]
    else:
        tops = [max(1.25 * sheet.plot, 0.1 * rows * size) + (parts == 3) * 0.7 * sheet.plot]
    height = above + sum(tops) + len(tops) * pitch + foot.height
    subtitle = (
        f"{len(heads)} of {amount(len(findings.heads), 'head')} {'is a' if len(heads) == 1 else 'are'} retrieval "
    )
    subtitle += "head" if len(heads) == 1 else "heads"
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
    _draw_depths(axes_at(*places[1]), found, best, sheet)
    if found.without:
        _draw_bars(axes_at(*places[2]), found, sheet)
    foot.write(figure)
    return Drawing(figure, lettering.families)


def _draw_map(figure: Any, axes: Any, findings: Findings, named: list[Head], sheet: Sheet) -> None:
    """Scores of all heads; those with the role in frames."""
    from matplotlib.patches import Rectangle

    grid = grids_of(findings)[findings.kinds[0]]
    values = findings.grid(findings.kinds[0], "retrieval")[np.ix_(grid.layers, grid.heads)]
    top = float(np.nanmax(values, initial=0.0))
    draw_map(figure, axes, values, (0.0, 1.0 if top > 0.5 else 0.5), sheet)
    for head in named:
        frame = Rectangle(
            grid.corner(head.layer, head.head, (-0.5, -0.5), (1, 1)), 1, 1, fill=False, edgecolor=COLORS[1],
            linewidth=1.4 * sheet.size,
        )  # fmt: skip
        axes.add_patch(frame)
    for axis, numbers, letter in ((axes.xaxis, grid.heads, "H"), (axes.yaxis, grid.layers, "L")):
        step = -(-len(numbers) // (12 if letter == "H" and not sheet.stacked else 8 if letter == "H" else 15))
        ticks = range(0, len(numbers), step)
        axis.set_ticks(list(ticks), [f"{letter}{numbers[tick]}" for tick in ticks])
    letter_axes(axes, "retrieval score", sheet, across="")


def _draw_depths(axes: Any, found: Needles, best: list[Head], sheet: Sheet) -> None:
    """What the model writes, by depth, and the scores of the best heads."""
    depths = sorted({one.depth for one in found.at})
    lengths = sorted({one.length for one in found.at})
    at = {(one.length, one.depth): one.copied for one in found.at}
    for number_, length in enumerate(lengths):
        parts = np.array([[at[length, d].value, at[length, d].low, at[length, d].high] if (length, d) in at
                          else [np.nan] * 3 for d in depths])  # fmt: skip
        style = ("-", "--", ":", "-.")[number_ % 4]
        name = f"{amount(length, 'token')}" if len(lengths) > 1 else "model"
        draw_line(
            axes, [100 * d for d in depths], parts, INK, sheet, name, band=len(lengths) == 1,
            linestyle=style, linewidth=4.5 * sheet.size,
        )  # fmt: skip  # lines of heads that lie on it leave its edges
    for color, head in zip(COLORS, best, strict=False):
        ones = [head.estimate(f"retrieval_at_{100 * d:g}") for d in depths]
        draw_line(
            axes, [100 * d for d in depths], np.array([[one.value, one.low, one.high] for one in ones]), color, sheet,
            head.name, band=False,
        )  # fmt: skip
    finish_axes(axes, sheet)
    if len(depths) > 1:
        axes.set_xlim(100 * depths[0], 100 * depths[-1])
    axes.set_ylim(-0.02, 1.02)
    letter_axes(axes, "needle tokens written, share", sheet, across="depth of the needle, %")
    sheet.add_legend(axes)


def _draw_bars(axes: Any, found: Needles, sheet: Sheet) -> None:
    """What is written by the whole model, and without heads."""
    rows = [("all heads", found.copied, INK)]
    rows += [
        (f"without {printable(what_is_out(one), 60)}", one.copied, COLORS[1] if one.what == "retrieval" else OTHER)
        for one in found.without
    ]
    for place, (_, copied, color) in enumerate(rows):
        axes.barh(place, copied.value, color=color, height=0.62)
        if np.isfinite(copied.low):
            ends = [[max(0.0, copied.value - copied.low)], [max(0.0, copied.high - copied.value)]]
            axes.errorbar(
                copied.value, place, xerr=ends, color=FAINT, linewidth=1.2 * sheet.size, capsize=2 * sheet.size
            )
        axes.text(
            1.04, place, number(copied.value), va="center", fontsize=9 * sheet.size, family=sheet.families, color=INK
        )
    axes.set_xlim(0, 1)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    finish_axes(axes, sheet)
    axes.set_yticks(range(len(rows)), [name for name, *_ in rows])
    letter_axes(axes, "needle tokens written", sheet, across="")
