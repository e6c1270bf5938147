"""Costs as a figure: multiply-adds and memory against the length of the text."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from attnscope.errors import amount
from attnscope.records.cost import Cost
from attnscope.views.canvas import FAINT, INK, LINE, Drawing, matplotlib_defaults
from attnscope.views.layout import Paper
from attnscope.views.lettering import lettering_for
from attnscope.views.style import USUAL, Style

_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_DASHES = ("solid", (0, (6, 2)), (0, (2, 2)), (0, (8, 2, 2, 2)), (0, (1, 1)), (0, (4, 1, 1, 1)))
_LEAST_PT = 9.0  # of its letters on a screen
_TITLES = {"multiply-adds": "Multiply-adds for a text of N tokens", "bytes": "Memory for a text of N tokens"}


def pages(cost: Cost, style: Style = USUAL) -> Iterator[tuple[str, Drawing]]:
    """The one figure, `cost`."""
    yield "cost", _drawing(cost, style.paper)


@matplotlib_defaults()
def _drawing(cost: Cost, paper: Paper) -> Drawing:
    from matplotlib.figure import Figure

    lettering = lettering_for([cost.name, cost.source], paper)
    # Everything is in inches and points here: `size` is how much smaller letters are than on a screen.
    size = 1.0 if not paper.least_px else paper.least_px * 72 / paper.inch_px / _LEAST_PT
    width = (paper.width_px - 2 * paper.crop_px) / paper.inch_px if paper.fixed else 13.6 * size
    stacked = paper.is_narrow
    above = (0.9 if paper.title else 0.0) * size
    plot = width * (0.6 if stacked else 0.3) if paper.fixed else 4.25 * size
    row = 0.4 * size + plot + 2.05 * size
    height = above + row * (len(_TITLES) if stacked else 1)
    figure = Figure(figsize=(width, height), dpi=paper.dpi, facecolor="white")
    said: Any = {"va": "center", "parse_math": False, "family": list(lettering.families)}
    s = cost.sizes
    shared = "" if s["n_kv_heads"] == s["n_heads"] else f" on {s['n_kv_heads']} key/value heads"
    if paper.title:
        name = lettering.fit(cost.name, 20, 900 if not stacked else 400)
        bold = "bold" if lettering.has_bold else "normal"
        figure.text(0.02, 1 - 0.3 * size / height, name, fontsize=15 * size, fontweight=bold, color=INK, **said)
        sizes = f"{amount(s['n_layers'], 'layer')}, {amount(s['n_heads'], 'head')} of {s['d_head']}{shared}"
        what = f"{sizes}, d_model {s['d_model']}"
        figure.text(0.02, 1 - 0.62 * size / height, what, fontsize=11 * size, color=FAINT, **said)
    for number, panel in enumerate(_TITLES):
        left, wide = (0.06 + 0.49 * number, 0.425) if not paper.fixed else (0.09 + 0.51 * number, 0.39)
        down = above + 0.4 * size
        if stacked:
            left, wide, down = 0.16, 0.8, down + number * row
        axes = figure.add_axes((left, 1 - (down + plot) / height, wide, plot / height))
        _panel(axes, cost, panel, size, plot, list(lettering.families))
    return Drawing(figure, lettering.families)


def _panel(axes: Any, cost: Cost, panel: str, size: float, plot: float, families: list[str]) -> None:
    curves = [curve for curve in cost.curves if curve.panel == panel]
    for number, curve in enumerate(curves):
        axes.plot(
            cost.lengths, curve.values, color=_COLORS[number % 6], linestyle=_DASHES[number % 6], linewidth=2.0 * size,
            label=curve.what,
        )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=10)
    ticks = [length for length in cost.lengths if (length & (length - 1)) == 0][::2]
    axes.set_xticks(
        ticks, [f"{tick:,}" if tick < 1024 else f"{tick // 1024:,} k" for tick in ticks], fontsize=10 * size
    )
    axes.minorticks_off()
    low, high = axes.get_ylim()
    powers = [10.0**power for power in range(0, 25) if low <= 10.0**power <= high]
    powers = powers[:: max(1, -(-len(powers) // 9))]
    unit = "bytes" if panel == "bytes" else "count"
    axes.set_yticks(powers, [_tick(power, unit) for power in powers], fontsize=10 * size)
    axes.set_xlabel("N, tokens (1 k = 1,024)", fontsize=11 * size, color=INK)
    axes.set_title(_TITLES[panel], fontsize=12 * size, loc="left", color=INK)
    axes.grid(color=LINE, linewidth=0.5, alpha=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.axvline(cost.n_tokens, color=FAINT, linewidth=1, linestyle=(0, (1, 2)))
    axes.text(
        cost.n_tokens,
        low,
        f" {cost.n_tokens:,}",
        fontsize=9 * size,
        color=FAINT,
        va="bottom",
        ha="left",
        parse_math=False,
    )
    axes.set_ylim(low, high)
    axes.legend(
        fontsize=10 * size,
        frameon=False,
        loc="upper left",
        bbox_to_anchor=(-0.02, -0.55 * size / plot),
        handlelength=3.6,
    )
    labels = (*axes.get_xticklabels(), *axes.get_yticklabels(), *axes.get_legend().texts)
    for text in (axes.title, axes.xaxis.label, *axes.texts, *labels):
        text.set_family(families)


def _tick(power: float, unit: str) -> str:
    names = ("B", "kB", "MB", "GB", "TB", "PB") if unit == "bytes" else ("", "k", "M", "B", "T")
    step = min(int(math.log10(power) / 3 + 1e-9), len(names) - 1)
    return f"{power / 1000**step:,g} {names[step]}".strip()
