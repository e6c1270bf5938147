"""Draw how heads change over the steps of a training: the lines that change most, and a map of all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from attnscope.drawing.canvas import FAINT, INK, Drawing, matplotlib_defaults, wrap_lines
from attnscope.drawing.lettering import Lettering
from attnscope.drawing.plots import COLORS, OTHER, Sheet, draw_line, draw_map, finish_axes, letter_axes, write_foot
from attnscope.report.blocks import Listing, Report, Trends
from attnscope.report.choices import are_logarithmic, every_nth, find_moving, finite_range
from attnscope.report.numbers import step_text
from attnscope.report.wording import printable
from attnscope.results.table import Floats

_MOST_NAMES = 24
"""Lines up to which each has its name beside a map."""

_LONG_NAME = 12
"""Letters of a name from which on maps are moved aside."""


@matplotlib_defaults()
def draw_trends(report: Report, blocks: Sequence[Trends | Listing], lettering: Lettering) -> Drawing:
    """Draw what is followed, one below the other: at the left the lines that change most, at the right a map of all.

    What has one line has no map; a listing takes its place.
    """
    sheet = Sheet.on(lettering.paper, lettering)
    trends = [block for block in blocks if isinstance(block, Trends)]
    listings = [block for block in blocks if isinstance(block, Listing)]

    # Each panel has a row; on narrow paper a map stands below its lines.
    panels: list[tuple[Trends, bool, int]] = []
    row = -1
    for block in trends:
        row += 1
        panels.append((block, False, row))
        if len(block.names) > 1:
            row += int(sheet.stacked)
            panels.append((block, True, row))

    # Sizes in inches.
    notes = [note for block in blocks for note in block.notes]
    if any(block.level is not None for block in trends):
        notes.append("dotted: by chance, that is uniform attention")
    foot = write_foot([*([report.source] if report.source else []), *report.footer, *notes], sheet)
    pitch = sheet.plot + 0.95 * sheet.size
    height = sheet.above + (row + 1) * pitch + foot.height
    figure = sheet.open_figure(height, report.model, report.subtitle)
    longest = max(len(name) for block in trends for name in block.names)
    for block, is_map, row in panels:
        left, width = _place(is_map, is_long=longest > _LONG_NAME, is_stacked=sheet.stacked)
        top = sheet.above + row * pitch + 0.35 * sheet.size
        axes = figure.add_axes((left, 1 - (top + sheet.plot) / height, width, sheet.plot / height))
        if is_map:
            _draw_map(figure, axes, block, sheet)
        else:
            _draw_lines(axes, block, sheet)
        if len(block.names) == 1 and listings and not sheet.stacked:
            _write_listing(figure, listings.pop(0), top, sheet)
    foot.write(figure)
    return Drawing(figure, lettering.families)


def _place(is_map: bool, *, is_long: bool, is_stacked: bool) -> tuple[float, float]:
    """Return where a panel begins and how wide it is, as shares of the figure's width."""
    if is_stacked:
        left, width = (0.16, 0.72) if is_map else (0.16, 0.6)
        return (left + 0.1, width - 0.16) if is_long else (left, width)
    if is_long:
        return (0.61, 0.31) if is_map else (0.07, 0.31)
    return (0.59, 0.33) if is_map else (0.07, 0.38)


def _draw_lines(axes: Any, block: Trends, sheet: Sheet) -> None:
    """Draw what changes most in colours, with its intervals, and all others in grey."""
    # All other lines first, in grey, below the coloured ones.
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


def _draw_map(figure: Any, axes: Any, block: Trends, sheet: Sheet) -> None:
    """Draw all lines, one per row, over the same axis; a step reaches halfway to the next."""
    # (step, line, 3) to the values of (line, step).
    values = block.points[..., 0].T
    low, high = finite_range(values)
    # Both signs: white is 0.
    is_signed = low < 0 < high
    extent = max(abs(low), abs(high))
    limits = (-extent, extent) if is_signed else (min(low, 0.0), high or 1.0)
    colors = "RdBu_r" if is_signed else "Blues"
    draw_map(figure, axes, values, block.limits or limits, sheet, colors, edges=step_edges(block.steps))
    _scale_steps(axes, block.steps)
    # Names of some rows where there are too many.
    names = [printable(name, 24) for name in block.names]
    rows = range(len(names)) if len(names) <= _MOST_NAMES else every_nth(len(names), _MOST_NAMES // 2)
    axes.set_yticks(list(rows), [names[row] for row in rows])
    letter_axes(axes, f"{block.y}: all {block.what}", sheet)


def step_edges(steps: Sequence[int]) -> Floats:
    """Return where the columns of a map end, (step + 1,): halfway between steps, and at the first and the last one."""
    places = np.asarray(steps, np.float64)
    if len(places) == 1:
        return np.array([places[0], places[0] + 1])
    return np.concatenate([places[:1], (places[:-1] + places[1:]) / 2, places[-1:]])


def _scale_steps(axes: Any, steps: Sequence[int]) -> None:
    """Scale the axis of steps, the same for lines and maps: logarithmic where the steps are."""
    # An even axis.
    first, last = steps[0], steps[-1]
    if not are_logarithmic(steps):
        axes.set_xlim(first, last if last > first else first + 1)
        axes.locator_params(axis="x", nbins=6, integer=True)
        return
    # A logarithmic axis with a linear part from 0 to the first step.
    least = next(step for step in steps if step > 0)
    axes.set_xscale("symlog", linthresh=least, linscale=0.4, base=10)
    ticks = [step for step in (0, *(10**power for power in range(9))) if first <= step <= last]
    ticks = [step for step in ticks if step == 0 or step >= least]
    axes.set_xticks(ticks, [step_text(step) for step in ticks])
    axes.minorticks_off()
    axes.set_xlim(first, last)


def _write_listing(figure: Any, block: Listing, top: float, sheet: Sheet) -> None:
    """Write names and what is said of each beside a plot, as many as have room."""
    y = top + 0.1 * sheet.size
    for name, told in block.rows:
        lines = wrap_lines(told, 0.38 * sheet.width * 96 / sheet.size, sheet.lettering)
        if y + (0.2 * len(lines) + 0.1) * sheet.size > top + sheet.plot:
            break
        sheet.write(figure, 0.59, y, name, 10, fontweight="bold" if sheet.lettering.has_bold else "normal")
        for number, line in enumerate(lines, 1):
            sheet.write(figure, 0.59, y + 0.2 * number * sheet.size, line, 10)
        y += (0.2 * len(lines) + 0.32) * sheet.size
