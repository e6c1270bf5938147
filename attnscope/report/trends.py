"""Draw how quantities of heads change over the steps of a training: plots with axes, on a sheet measured in inches.

Used by `report.figures`.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from attnscope.drawing.canvas import (
    FAINT,
    INK,
    LINE_COLOR,
    FigureRenderer,
    matplotlib_defaults,
    wrap_lines,
)
from attnscope.drawing.lettering import Lettering
from attnscope.report.blocks import Report, Trends
from attnscope.report.numbers import find_most_changed, step_text

_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
"""Colours of the lines that change most; all others are grey."""

_OTHER = "#b8b8b8"

_WIDTH = 12.0
"""Inches of a figure on a screen."""

_MIN_PT = 9.0
"""Points of the smallest letters on a screen."""

_LOG_AXIS_RATIO = 5.0
"""If the last step is more than so many times the middle one, the axis of steps is logarithmic."""

# Inches above and below the plots, at letters of screen size: with and without a caption; a plot's title and the labels
# of its axis; a plot's title alone; a line of notes.
_HEAD = 0.85
_HEAD_WITHOUT_CAPTION = 0.1
_PLOT_MARGINS = 0.95
_PLOT_TITLE = 0.35
_NOTE_LINE = 0.2


@matplotlib_defaults()
def draw_trends(report: Report, blocks: Sequence[Trends], lettering: Lettering) -> FigureRenderer:
    """Draw a plot for each block: the lines that change most in colours, all others in grey."""
    from matplotlib.figure import Figure

    # Sizes in inches. `scale` is that of letters: the smallest ones that the paper allows over a screen's.
    paper = lettering.paper
    scale = 1.0
    if paper.min_px:
        scale = paper.min_px * 72 / paper.inch_px / _MIN_PT
    # Paper of a fixed width is cropped at both sides. Two plots lie side by side, on narrow paper one.
    full_width = _WIDTH
    if paper.is_fixed_width:
        full_width = (paper.width_px - 2 * paper.crop_px) / paper.inch_px
    n_across = 1 if paper.is_narrow else 2
    n_rows = math.ceil(len(blocks) / n_across)
    plot_height = (0.5 if paper.is_narrow else 0.2) * full_width
    head_height = (_HEAD if paper.caption else _HEAD_WITHOUT_CAPTION) * scale
    row_height = plot_height + _PLOT_MARGINS * scale

    # The notes below the plots. Without a caption, they only say which parts of the study failed: `failures`.
    notes = []
    if paper.caption:
        notes = [*filter(None, [report.source]), *report.footer]
        for block in blocks:
            notes += block.notes
        if any(block.uniform_level is not None for block in blocks):
            notes.append("dotted: the value of a head that attends to all keys alike")
    # Text fills 0.92 of the width. Lines are broken in pixels of a screen, 96 an inch, at letters of screen size.
    text_px = full_width * 96 / scale * 0.92
    lines = wrap_lines(" · ".join([*notes, *paper.failures]), text_px, lettering)
    foot_height = (_PLOT_TITLE + _NOTE_LINE * len(lines)) * scale

    # The figure with its title.
    height = head_height + n_rows * row_height + foot_height
    figure = Figure(figsize=(full_width, height), dpi=paper.dpi, facecolor="white")
    families = list(lettering.families)

    def write(down: float, text: str, points: float, color: str = FAINT, **look: Any) -> None:
        """Write a line of text so many inches below the upper edge."""
        look |= {"va": "center", "parse_math": False, "family": families, "color": color}
        figure.text(0.02, 1 - down / height, text, fontsize=points * scale, **look)

    if paper.caption:
        bold = "bold" if lettering.has_bold else "normal"
        title = lettering.fit(report.model, 20, 400 if paper.is_narrow else 900)
        write(0.28 * scale, title, 15, INK, fontweight=bold)
        write(0.58 * scale, report.subtitle, 11)

    # The plots, in shares of the figure, and the notes below them.
    left, width = (0.16, 0.55) if paper.is_narrow else (0.06, 0.31)
    for number, block in enumerate(blocks):
        row, column = divmod(number, n_across)
        top = head_height + row * row_height + _PLOT_TITLE * scale
        box = (left + 0.5 * column, 1 - (top + plot_height) / height, width, plot_height / height)
        _draw_plot(figure.add_axes(box), block, scale, families)
    for number, line in enumerate(lines):
        write(height - foot_height + (0.3 + _NOTE_LINE * number) * scale, line, 9)
    return FigureRenderer(figure, lettering.families)


def _draw_plot(axes: Any, block: Trends, scale: float, families: Sequence[str]) -> None:
    """Draw the lines of one plot: grey ones below, coloured ones with their intervals above them.

    `scale` is that of letters and lines, relative to a screen's. Points are (step, line, 3): value and interval.
    """
    steps = block.steps
    # The columns of the lines that change most.
    chosen = find_most_changed(block.points[..., 0], len(_COLORS))
    others = np.delete(block.points[..., 0], chosen, 1)
    for values in others.T:
        axes.plot(steps, values, color=_OTHER, linewidth=0.7 * scale, alpha=0.7, zorder=1)
    if block.uniform_level is not None:
        axes.axhline(block.uniform_level, color=FAINT, linewidth=scale, linestyle=(0, (2, 2)), zorder=1)
    # A single line is black; a single step is a dot.
    is_single = len(block.names) == 1
    colors = (INK,) if is_single else _COLORS
    marker = "o" if len(steps) < 2 else None
    for color, line in zip(colors, chosen, strict=False):
        values, low, high = block.points[:, line].T
        name = block.names[line]
        axes.plot(steps, values, color=color, label=name, linewidth=1.8 * scale, zorder=3, marker=marker)
        if np.isfinite(low + high).any():
            axes.fill_between(steps, low, high, color=color, alpha=0.18, linewidth=0, zorder=2)
    # Axes: a faint grid, and no frame above and at the right.
    _scale_steps(axes, steps)
    axes.locator_params(axis="y", nbins=5)
    axes.grid(color=LINE_COLOR, linewidth=0.5 * scale, alpha=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    # Letters.
    axes.set_title(block.y, fontsize=11 * scale, loc="left", color=INK)
    axes.set_xlabel("step", fontsize=9.5 * scale, color=FAINT)
    ticks = (*axes.get_xticklabels(), *axes.get_yticklabels())
    for text in ticks:
        text.set_fontsize(9 * scale)
    for text in (axes.title, axes.xaxis.label, *ticks):
        text.set_family(families)
    if block.limits is not None:
        low, high = block.limits
        axes.set_ylim(low - 0.02 * high, high * 1.02)
    # A legend of the lines, at the right of the plot.
    if chosen and not is_single:
        legend = axes.legend(
            fontsize=9 * scale,
            frameon=False,
            loc="upper left",
            bbox_to_anchor=(1.0, 1.04),
            handlelength=1.2,
            borderaxespad=0.3,
        )
        for text in legend.texts:
            text.set_family(families)


def _scale_steps(axes: Any, steps: Sequence[int]) -> None:
    """Scale the axis of steps: logarithmic where the last of five steps or more is far beyond the middle one."""
    first, last = steps[0], steps[-1]
    positive = [step for step in steps if step > 0]
    if len(positive) < 5 or last <= _LOG_AXIS_RATIO * positive[len(positive) // 2]:
        axes.set_xlim(first, last if last > first else first + 1)
        axes.locator_params(axis="x", nbins=6, integer=True)
        return
    # Linear from 0 to the first positive step, logarithmic from there; ticks at 0 and powers of ten.
    axes.set_xscale("symlog", linthresh=positive[0], linscale=0.4, base=10)
    ticks = [10**power for power in range(9) if positive[0] <= 10**power <= last]
    if first == 0:
        ticks.insert(0, 0)
    axes.set_xticks(ticks, list(map(step_text, ticks)))
    axes.minorticks_off()
    axes.set_xlim(first, last)
