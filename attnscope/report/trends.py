"""Draw how many lines change over the steps of a training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attnscope.drawing.canvas import FAINT, INK, Drawing, matplotlib_defaults
from attnscope.drawing.lettering import Lettering
from attnscope.drawing.plots import COLORS, OTHER, Sheet, draw_line, finish_axes, letter_axes, write_foot
from attnscope.report.blocks import Report, Trends
from attnscope.report.choices import find_moving
from attnscope.report.numbers import step_text

_EVENLY = 5.0
"""Where the last step is more than so many times the middle one, the axis of steps is logarithmic."""


@matplotlib_defaults()
def draw_trends(report: Report, blocks: Sequence[Trends], lettering: Lettering) -> Drawing:
    """Draw what is followed, a plot each: the lines that change most in colours, all others in grey."""
    sheet = Sheet.on(lettering.paper, lettering)
    notes = [note for block in blocks for note in block.notes]
    if any(block.level is not None for block in blocks):
        notes.append("dotted: by chance, that is uniform attention, or of composition random directions")
    foot = write_foot([*([report.source] if report.source else []), *report.footer, *notes], sheet)

    # Two plots side by side; on narrow paper one. Sizes in inches.
    n_across = 1 if sheet.stacked else 2
    n_down = -(-len(blocks) // n_across)
    pitch = sheet.plot + 0.95 * sheet.size
    height = sheet.above + n_down * pitch + foot.height
    figure = sheet.open_figure(height, report.model, report.subtitle)
    left, width = (0.16, 0.55) if sheet.stacked else (0.06, 0.31)
    for number, block in enumerate(blocks):
        row, column = divmod(number, n_across)
        top = sheet.above + row * pitch + 0.35 * sheet.size
        axes = figure.add_axes((left + 0.5 * column, 1 - (top + sheet.plot) / height, width, sheet.plot / height))
        _draw_trends(axes, block, sheet)
    foot.write(figure)
    return Drawing(figure, lettering.families)


def _draw_trends(axes: Any, block: Trends, sheet: Sheet) -> None:
    """Draw the lines of one plot: grey ones below, coloured ones with their intervals above them."""
    chosen = find_moving(block.points[..., 0], len(COLORS))
    for line in range(len(block.names)):
        if line not in chosen:
            look = {"color": OTHER, "linewidth": 0.7 * sheet.size, "alpha": 0.7, "zorder": 1}
            axes.plot(block.steps, block.points[:, line, 0], **look)
    # The level to compare with.
    if block.level is not None:
        axes.axhline(block.level, color=FAINT, linewidth=sheet.size, linestyle=(0, (2, 2)), zorder=1)
    # A single line needs no colour to tell it apart.
    colors = COLORS if len(block.names) > 1 else (INK,)
    for color, line in zip(colors, chosen, strict=False):
        draw_line(axes, block.steps, block.points[:, line], color, sheet, block.names[line])
    _scale_steps(axes, block.steps)
    axes.locator_params(axis="y", nbins=5)
    finish_axes(axes, sheet)
    letter_axes(axes, block.y, sheet)
    if block.limits is not None:
        low, high = block.limits
        axes.set_ylim(low - 0.02 * high, high * 1.02)
    if chosen and len(block.names) > 1:
        sheet.add_legend(axes)


def _scale_steps(axes: Any, steps: Sequence[int]) -> None:
    """Scale the axis of steps: logarithmic where they are better told apart so, as where they double."""
    first, last = steps[0], steps[-1]
    later = [step for step in steps if step > 0]
    if len(later) < 5 or last <= _EVENLY * later[len(later) // 2]:
        axes.set_xlim(first, last if last > first else first + 1)
        axes.locator_params(axis="x", nbins=6, integer=True)
        return
    # A logarithmic axis with a linear part from 0 to the first step.
    axes.set_xscale("symlog", linthresh=later[0], linscale=0.4, base=10)
    ticks = [step for step in (0, *(10**power for power in range(9))) if first <= step <= last]
    ticks = [step for step in ticks if step == 0 or step >= later[0]]
    axes.set_xticks(ticks, [step_text(step) for step in ticks])
    axes.minorticks_off()
    axes.set_xlim(first, last)
