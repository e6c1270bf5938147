"""Costs as a figure: multiply-adds and memory against the length of the text."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import cycle
from typing import Any

from attnscope.drawing.canvas import FAINT, Drawing, matplotlib_defaults
from attnscope.drawing.layout import Paper
from attnscope.drawing.lettering import lettering_for
from attnscope.drawing.plots import COLORS, Sheet, finish_axes, letter_axes
from attnscope.drawing.style import USUAL, Style
from attnscope.errors import amount
from attnscope.records.teaching.cost import Cost
from attnscope.report.wording import printable

_DASHES = ("solid", (0, (6, 2)), (0, (2, 2)), (0, (8, 2, 2, 2)), (0, (1, 1)), (0, (4, 1, 1, 1)))
_TITLES = {"multiply-adds": "Multiply-adds for a text of N tokens", "bytes": "Memory for a text of N tokens"}


def pages(cost: Cost, style: Style = USUAL) -> Iterator[tuple[str, Drawing]]:
    """The one figure, `cost`."""
    yield "cost", _drawing(cost, style.paper)


@matplotlib_defaults()
def _drawing(cost: Cost, paper: Paper) -> Drawing:
    lettering = lettering_for([cost.name, cost.source], paper)
    sheet = Sheet.on(paper, lettering, 13.6)
    size = sheet.size
    plot = sheet.width * (0.6 if sheet.stacked else 0.3) if paper.fixed else 4.25
    row = 0.4 * size + plot + 2.05 * size
    height = sheet.above + row * (len(_TITLES) if sheet.stacked else 1)
    s = cost.sizes
    shared = "" if s["n_kv_heads"] == s["n_heads"] else f" on {s['n_kv_heads']} key/value heads"
    sizes = f"{amount(s['n_layers'], 'layer')}, {amount(s['n_heads'], 'head')} of {s['d_head']}{shared}"
    figure = sheet.open_figure(height, cost.name, f"{sizes}, d_model {s['d_model']}")
    for number, panel in enumerate(_TITLES):
        left, wide = (0.06 + 0.49 * number, 0.425) if not paper.fixed else (0.09 + 0.51 * number, 0.39)
        down = sheet.above + 0.4 * size
        if sheet.stacked:
            left, wide, down = 0.16, 0.8, down + number * row
        axes = figure.add_axes((left, 1 - (down + plot) / height, wide, plot / height))
        _panel(axes, cost, panel, sheet, plot)
    return Drawing(figure, lettering.families)


def _panel(axes: Any, cost: Cost, panel: str, sheet: Sheet, plot: float) -> None:
    size, curves = sheet.size, [curve for curve in cost.curves if curve.panel == panel]
    for color, dashes, curve in zip(cycle(COLORS), cycle(_DASHES), curves, strict=False):
        axes.plot(cost.lengths, curve.values, color=color, linestyle=dashes, linewidth=2.0 * size,
                  label=printable(curve.what))  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=10)
    ticks = [length for length in cost.lengths if (length & (length - 1)) == 0][::2]
    axes.set_xticks(ticks, [f"{tick:,}" if tick < 1024 else f"{tick // 1024:,} k" for tick in ticks])
    axes.minorticks_off()
    low, high = axes.get_ylim()
    powers = [10.0**power for power in range(0, 25) if low <= 10.0**power <= high]
    powers = powers[:: max(1, -(-len(powers) // 9))]
    unit = "bytes" if panel == "bytes" else "count"
    axes.set_yticks(powers, [_tick(power, unit) for power in powers])
    finish_axes(axes, sheet)
    axes.axvline(cost.n_tokens, color=FAINT, linewidth=1, linestyle=(0, (1, 2)))
    axes.text(
        cost.n_tokens, low, f" {cost.n_tokens:,}", fontsize=9 * size, color=FAINT, va="bottom", ha="left",
        parse_math=False, family=sheet.families,
    )  # fmt: skip
    axes.set_ylim(low, high)
    below = (-0.02, -0.55 * size / plot)
    legend = axes.legend(fontsize=10 * size, frameon=False, loc="upper left", bbox_to_anchor=below, handlelength=3.6)
    for text in legend.texts:
        text.set_family(sheet.families)
    letter_axes(axes, _TITLES[panel], sheet, across="N, tokens (1 k = 1,024)")


def _tick(power: float, unit: str) -> str:
    names = ("B", "kB", "MB", "GB", "TB", "PB") if unit == "bytes" else ("", "k", "M", "B", "T")
    step = min(int(math.log10(power) / 3 + 1e-9), len(names) - 1)
    return f"{power / 1000**step:,g} {names[step]}".strip()
