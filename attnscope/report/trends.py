"""Draw how quantities of heads change over the steps of a training: plots with axes, measured in inches.

Used by `report.figures`. A plot shows one quantity, with a curve for each head.
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
from attnscope.report.numbers import find_most_changed, format_step

_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
"""The colours of the curves that change most; all other curves are grey."""

_GREY = "#b8b8b8"

_SCREEN_WIDTH = 12.0
"""The width of a figure on a screen, in inches."""

_MIN_FONT_PT = 9.0
"""The smallest font size on a screen, in points."""

_LOG_RATIO = 5.0
"""If the last step is more than this many times the middle step, the axis of steps is logarithmic."""

# Heights in inches at the font size of a screen: the header of the figure, with and without a caption; the title of a
# plot with the labels of its axis; the title of a plot alone, which is also the margins of the footer; a line of notes.
_HEADER_HEIGHT = 0.85
_HEADER_HEIGHT_WITHOUT_CAPTION = 0.1
_PLOT_MARGINS_HEIGHT = 0.95
_PLOT_TITLE_HEIGHT = 0.35
_NOTE_LINE_HEIGHT = 0.2


@matplotlib_defaults()
def draw_trends(report: Report, blocks: Sequence[Trends], lettering: Lettering) -> FigureRenderer:
    """Draw a plot for each block: the curves that change most in colours, all others in grey."""
    from matplotlib.figure import Figure

    # Sizes in inches. `scale` is the font size relative to a screen: the smallest font of the paper / that of a screen.
    paper = lettering.paper
    scale = 1.0
    if paper.min_px:
        scale = paper.min_px * 72 / paper.inch_px / _MIN_FONT_PT
    # Paper of a fixed width is cropped at both sides. Two plots stand side by side; on narrow paper, one.
    figure_width = _SCREEN_WIDTH
    if paper.is_fixed_width:
        figure_width = (paper.width_px - 2 * paper.crop_px) / paper.inch_px
    n_columns = 1 if paper.is_narrow else 2
    n_rows = math.ceil(len(blocks) / n_columns)
    plot_height = (0.5 if paper.is_narrow else 0.2) * figure_width
    header_height = (_HEADER_HEIGHT if paper.caption else _HEADER_HEIGHT_WITHOUT_CAPTION) * scale
    row_height = plot_height + _PLOT_MARGINS_HEIGHT * scale

    # The notes below the plots. Without a caption, they only say which parts of the study failed: `failures`.
    notes = []
    if paper.caption:
        notes = [*filter(None, [report.source]), *report.footer]
        for block in blocks:
            notes += block.notes
        if any(block.uniform_level is not None for block in blocks):
            notes.append("dotted: the value of a head that attends to all keys alike")
    # Text fills 0.92 of the width. Lines are broken at screen font size, in screen pixels: 96 per inch.
    text_width_px = figure_width * 96 / scale * 0.92
    note_lines = wrap_lines(" · ".join([*notes, *paper.failures]), text_width_px, lettering)
    footer_height = (_PLOT_TITLE_HEIGHT + _NOTE_LINE_HEIGHT * len(note_lines)) * scale

    # The figure with its title.
    height = header_height + n_rows * row_height + footer_height
    figure = Figure(figsize=(figure_width, height), dpi=paper.dpi, facecolor="white")
    families = list(lettering.families)

    def write_line(
        y: float, text: str, font_pt: float, color: str = FAINT, **text_properties: Any
    ) -> None:
        """Write a line of text whose middle is `y` inches below the upper edge of the figure."""
        text_properties |= {"va": "center", "parse_math": False, "family": families, "color": color}
        figure.text(0.02, 1 - y / height, text, fontsize=font_pt * scale, **text_properties)

    if paper.caption:
        bold = "bold" if lettering.has_bold else "normal"
        # Cut a long title at screen font size, in screen pixels: its 15 points are 20 pixels of 1/96 inch.
        title = lettering.fit(report.model, 20, 400 if paper.is_narrow else 900)
        write_line(0.28 * scale, title, 15, INK, fontweight=bold)
        write_line(0.58 * scale, report.subtitle, 11)

    # The plots, whose boxes are (left, bottom, width, height) as fractions of the figure, and the notes below them.
    left_edge, width = (0.16, 0.55) if paper.is_narrow else (0.06, 0.31)
    for plot_index, block in enumerate(blocks):
        row, column = divmod(plot_index, n_columns)
        top = header_height + row * row_height + _PLOT_TITLE_HEIGHT * scale
        box = (left_edge + 0.5 * column, 1 - (top + plot_height) / height, width, plot_height / height)
        _draw_plot(figure.add_axes(box), block, scale, families)
    for line_index, line in enumerate(note_lines):
        write_line(height - footer_height + (0.3 + _NOTE_LINE_HEIGHT * line_index) * scale, line, 9)
    return FigureRenderer(figure, lettering.families)


def _draw_plot(axes: Any, block: Trends, scale: float, families: Sequence[str]) -> None:
    """Draw the curves of a plot: the grey ones first, the coloured ones with their intervals on top.

    `scale` is the size of letters and lines relative to a screen. `block.points` is (step, curve, [value, low, high]).
    """
    steps = block.steps
    # The indices of the curves that change most, and the values of all others, (step, curve).
    named_curves = find_most_changed(block.points[..., 0], len(_COLORS))
    other_values = np.delete(block.points[..., 0], named_curves, 1)
    for values in other_values.T:
        axes.plot(steps, values, color=_GREY, linewidth=0.7 * scale, alpha=0.7, zorder=1)
    if block.uniform_level is not None:
        axes.axhline(block.uniform_level, color=FAINT, linewidth=scale, linestyle=(0, (2, 2)), zorder=1)
    # A single curve is black. With a single step there is no curve to draw, so a dot shows the value.
    has_one_curve = len(block.names) == 1
    colors = (INK,) if has_one_curve else _COLORS
    marker = "o" if len(steps) < 2 else None
    for color, curve in zip(colors, named_curves, strict=False):
        values, low, high = block.points[:, curve].T
        name = block.names[curve]
        axes.plot(steps, values, color=color, label=name, linewidth=1.8 * scale, zorder=3, marker=marker)
        if np.isfinite(low + high).any():
            axes.fill_between(steps, low, high, color=color, alpha=0.18, linewidth=0, zorder=2)
    # The axes, with a faint grid and without a frame above and at the right.
    _scale_step_axis(axes, steps)
    axes.locator_params(axis="y", nbins=5)
    axes.grid(color=LINE_COLOR, linewidth=0.5 * scale, alpha=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    # Titles and tick labels.
    axes.set_title(block.y, fontsize=11 * scale, loc="left", color=INK)
    axes.set_xlabel("step", fontsize=9.5 * scale, color=FAINT)
    ticks = (*axes.get_xticklabels(), *axes.get_yticklabels())
    for text in ticks:
        text.set_fontsize(9 * scale)
    for text in (axes.title, axes.xaxis.label, *ticks):
        text.set_family(families)
    if block.y_limits is not None:
        low, high = block.y_limits
        axes.set_ylim(low - 0.02 * high, high * 1.02)
    # A legend of the coloured curves, at the right of the plot.
    if named_curves and not has_one_curve:
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


def _scale_step_axis(axes: Any, steps: Sequence[int]) -> None:
    """Scale the axis of steps: logarithmic if there are five steps or more, the last far beyond the middle one."""
    first_step, last_step = steps[0], steps[-1]
    positive_steps = [step for step in steps if step > 0]
    if len(positive_steps) < 5 or last_step <= _LOG_RATIO * positive_steps[len(positive_steps) // 2]:
        # matplotlib needs two different limits.
        axes.set_xlim(first_step, last_step if last_step > first_step else first_step + 1)
        axes.locator_params(axis="x", nbins=6, integer=True)
        return
    # Linear from 0 to the first positive step, logarithmic from there; ticks at 0 and powers of ten.
    axes.set_xscale("symlog", linthresh=positive_steps[0], linscale=0.4, base=10)
    ticks = [10**power for power in range(9) if positive_steps[0] <= 10**power <= last_step]
    if first_step == 0:
        ticks.insert(0, 0)
    axes.set_xticks(ticks, list(map(format_step, ticks)))
    axes.minorticks_off()
    axes.set_xlim(first_step, last_step)
