"""Costs as a figure: multiply-adds and memory against the length of the text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnscope.records.cost import Cost, Curve
from attnscope.views.canvas import DPI, FAINT, INK, LINE, Drawing, matplotlib_defaults, write_pages
from attnscope.views.lettering import lettering_for

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_DASHES = ("solid", (0, (6, 2)), (0, (2, 2)), (0, (8, 2, 2, 2)), (0, (1, 1)), (0, (4, 1, 1, 1)))
_TITLES = {"multiply-adds": "Multiply-adds for a text of N tokens", "bytes": "Memory for a text of N tokens"}


def draw(cost: Cost, folder: str | Path, formats: Sequence[str] = ("png",)) -> list[Path]:
    """Draws `cost.png`, `.svg` or `.pdf` into a folder.

    Raises:
        UsageError: An unknown format.
        AttnscopeError: The folder cannot be written.
    """
    return write_pages([("cost", Drawing(_figure(cost)))], folder, formats)


@matplotlib_defaults()
def _figure(cost: Cost) -> Figure:
    from matplotlib.figure import Figure

    lettering = lettering_for([cost.name, cost.source])
    figure = Figure(figsize=(13.6, 7.6), dpi=DPI, facecolor="white")
    s = cost.sizes
    shared = "" if s["n_kv_heads"] == s["n_heads"] else f" on {s['n_kv_heads']} key/value heads"
    name = lettering.fit(cost.name, 20, 900)
    figure.text(0.02, 0.96, name, fontsize=15, fontweight="bold", color=INK, va="center", parse_math=False)
    what = f"{s['n_layers']} layers, {s['n_heads']} heads of {s['d_head']}{shared}, d_model {s['d_model']}"
    figure.text(0.02, 0.918, what, fontsize=11, color=FAINT, va="center", parse_math=False)
    for number, panel in enumerate(_TITLES):
        axes = figure.add_axes((0.06 + 0.49 * number, 0.27, 0.425, 0.56))
        _panel(axes, cost, panel, [curve for curve in cost.curves if curve.panel == panel])
    return figure


def _panel(axes: Any, cost: Cost, panel: str, curves: Sequence[Curve]) -> None:
    for number, curve in enumerate(curves):
        axes.plot(
            cost.lengths, curve.values, color=_COLORS[number % 6], linestyle=_DASHES[number % 6], linewidth=2.0,
            label=curve.what,
        )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=10)
    ticks = [length for length in cost.lengths if (length & (length - 1)) == 0][::2]
    axes.set_xticks(ticks, [f"{tick:,}" if tick < 1024 else f"{tick // 1024:,} k" for tick in ticks], fontsize=10)
    axes.minorticks_off()
    low, high = axes.get_ylim()
    powers = [10.0**power for power in range(0, 25) if low <= 10.0**power <= high]
    powers = powers[:: max(1, -(-len(powers) // 9))]
    unit = "bytes" if panel == "bytes" else "count"
    axes.set_yticks(powers, [_tick(power, unit) for power in powers], fontsize=10)
    axes.set_xlabel("N, tokens (1 k = 1,024)", fontsize=11, color=INK)
    axes.set_title(_TITLES[panel], fontsize=12, loc="left", color=INK)
    axes.grid(color=LINE, linewidth=0.5, alpha=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.axvline(cost.n_tokens, color=FAINT, linewidth=1, linestyle=(0, (1, 2)))
    axes.text(
        cost.n_tokens, low, f" {cost.n_tokens:,}", fontsize=9, color=FAINT, va="bottom", ha="left", parse_math=False
    )
    axes.set_ylim(low, high)
    axes.legend(fontsize=10, frameon=False, loc="upper left", bbox_to_anchor=(-0.02, -0.13), handlelength=3.6)


def _tick(power: float, unit: str) -> str:
    names = ("B", "kB", "MB", "GB", "TB", "PB") if unit == "bytes" else ("", "k", "M", "B", "T")
    step = min(int(math.log10(power) / 3 + 1e-9), len(names) - 1)
    return f"{power / 1000**step:,g} {names[step]}".strip()
