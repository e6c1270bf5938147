"""A training as a figure: the loss, and of each measure the heads that change as lines and all heads as a map."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnscope.drawing.canvas import FAINT, INK, Drawing, matplotlib_defaults, wrap_lines
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
from attnscope.drawing.style import USUAL, Style
from attnscope.errors import AttnscopeError
from attnscope.records.training import Training
from attnscope.report.numbers import step_text
from attnscope.report.wording import model_of, printable
from attnscope.views.training.summary import (
    Series,
    are_logarithmic,
    every_nth,
    find_moving,
    finite_range,
    notes,
    series_of,
    since_lines,
    title_line,
)

_MOST_NAMES = 24  # of heads beside a map


def pages(training: Training, style: Style = USUAL) -> Iterator[tuple[str, Drawing]]:
    """The one figure, `training`.

    Raises:
        AttnscopeError: There are no checkpoints.
    """
    if training.is_empty:
        raise AttnscopeError("this training has no checkpoints", "so there is nothing to draw")
    yield "training", _drawing(training, style.paper)


@matplotlib_defaults()
def _drawing(training: Training, paper: Paper) -> Drawing:
    lines = notes(training)
    followed = series_of(training)
    if any(series.level is not None for series in followed):
        lines.append("dotted: uniform attention" + ", of composition random directions" * bool(training.pairs))
    titles = [series.title for series in followed]
    names = [name for series in followed for name in series.names]
    lettering = lettering_for([model_of(training.run), *lines, *titles, *names], paper)
    sheet = Sheet.on(paper, lettering)
    size, stacked = sheet.size, sheet.stacked
    rows = 2 * len(titles) if stacked else len(titles)
    foot = write_foot(lines, sheet)
    above, pitch = sheet.above, 0.95 * size
    n_losses = int(training.has_loss)
    height = above + (rows + n_losses) * (sheet.plot + pitch) + foot.height
    figure = sheet.open_figure(height, model_of(training.run), title_line(training))

    def axes_at(row: int, right: bool) -> Any:
        top = above + row * (sheet.plot + pitch) + 0.35 * size
        left, wide = (0.16, 0.72 if right else 0.6) if stacked else (0.59, 0.33) if right else (0.07, 0.38)
        if training.pairs:  # whose names are longer
            left, wide = (left + 0.1, wide - 0.16) if stacked else (0.61, 0.31) if right else (0.07, 0.31)
        return figure.add_axes((left, 1 - (top + sheet.plot) / height, wide, sheet.plot / height))

    if n_losses:
        _draw_loss(axes_at(0, False), training, sheet)
        if not stacked:
            _write_roles(figure, training, above + 0.35 * size, sheet)
    for number, series in enumerate(followed):
        row = n_losses + (2 * number if stacked else number)
        _draw_lines(axes_at(row, False), training, series, sheet)
        _draw_map(figure, axes_at(row + stacked, True), training, series, sheet)
    foot.write(figure)
    return Drawing(figure, lettering.families)


def _draw_loss(axes: Any, training: Training, sheet: Sheet) -> None:
    losses = np.array([(step.loss, step.loss_low, step.loss_high) for step in training.checkpoints])
    draw_line(axes, training.steps, losses, INK, sheet)
    _finish(axes, training, "loss, nats a prediction", sheet)


def _write_roles(figure: Any, training: Training, top: float, sheet: Sheet) -> None:
    """Beside the loss: each role, and since when heads have had it."""
    y = top + 0.1 * sheet.size
    for role, heads in since_lines(training):
        lines = wrap_lines(heads, 0.38 * sheet.width * 96 / sheet.size, sheet.lettering)
        if y + (0.2 * len(lines) + 0.1) * sheet.size > top + sheet.plot:
            break
        sheet.write(figure, 0.59, y, role, 10, fontweight="bold" if sheet.lettering.has_bold else "normal")
        for number, line in enumerate(lines, 1):
            sheet.write(figure, 0.59, y + 0.2 * number * sheet.size, line, 10)
        y += (0.2 * len(lines) + 0.32) * sheet.size


def _draw_lines(axes: Any, training: Training, series: Series, sheet: Sheet) -> None:
    """What changes most in colours, with its intervals; all others in grey."""
    chosen, parts = find_moving(series.values, len(COLORS)), series.parts
    for head in range(parts.shape[1]):
        if head not in chosen:
            axes.plot(training.steps, parts[:, head, 0], color=OTHER, linewidth=0.7 * sheet.size, alpha=0.7, zorder=1)
    if series.level is not None:
        axes.axhline(series.level, color=FAINT, linewidth=1.0 * sheet.size, linestyle=(0, (2, 2)), zorder=1)
    for color, head in zip(COLORS, chosen, strict=False):
        draw_line(axes, training.steps, parts[:, head], color, sheet, series.names[head])
    _finish(axes, training, series.title, sheet)
    if limits := series.limits:
        axes.set_ylim(limits[0] - 0.02 * limits[1], limits[1] * 1.02)
    if chosen:
        sheet.add_legend(axes)


def _finish(axes: Any, training: Training, title: str, sheet: Sheet) -> None:
    _scale_steps(axes, training.steps)
    axes.locator_params(axis="y", nbins=5)
    finish_axes(axes, sheet)
    letter_axes(axes, title, sheet)


def _scale_steps(axes: Any, steps: Sequence[int]) -> None:
    """The axis of steps, the same for lines and maps: logarithmic where the steps are."""
    if are_logarithmic(steps):
        first = next(step for step in steps if step > 0)
        axes.set_xscale("symlog", linthresh=first, linscale=0.4, base=10)
        ticks = [step for step in (0, *(10**power for power in range(9))) if step == 0 or first <= step <= steps[-1]]
        ticks = [step for step in ticks if step >= steps[0]]
        axes.set_xticks(ticks, [step_text(step) for step in ticks])
        axes.minorticks_off()
        axes.set_xlim(steps[0], steps[-1])
    else:
        axes.set_xlim(steps[0], steps[-1] if steps[-1] > steps[0] else steps[0] + 1)
        axes.locator_params(axis="x", nbins=6, integer=True)


def _step_edges(steps: Sequence[int]) -> NDArray[np.float64]:
    """Where the columns of a map end, (steps + 1): halfway between steps, and at the first and the last one."""
    at = np.asarray(steps, dtype=np.float64)
    if len(at) == 1:
        return np.array([at[0], at[0] + 1])
    return np.concatenate([at[:1], (at[:-1] + at[1:]) / 2, at[-1:]])


def _draw_map(figure: Any, axes: Any, training: Training, series: Series, sheet: Sheet) -> None:
    """All heads or pairs, a row each, over the axis of steps of the lines; a checkpoint reaches halfway to the next."""
    values = series.values.T
    low, high = finite_range(values)
    signed = low < 0 < high
    extent = max(abs(low), abs(high))
    limits = series.limits or ((-extent, extent) if signed else (min(low, 0.0), high or 1.0))
    draw_map(figure, axes, values, limits, sheet, "RdBu_r" if signed else "Blues", edges=_step_edges(training.steps))
    _scale_steps(axes, training.steps)
    names = [printable(name, 24) for name in series.names]
    rows = list(range(len(names)))
    if len(names) > _MOST_NAMES:
        if series.what == "heads":  # the first of each layer
            layers = [layer for _, layer, _ in training.heads]
            rows = [row for row in rows if row == 0 or layers[row] != layers[row - 1]]
        rows = [rows[at] for at in every_nth(len(rows), 12)]
    axes.set_yticks(rows, [names[row] for row in rows])
    letter_axes(axes, f"{series.title}: {'followed' if series.what == 'pairs' else 'all'} {series.what}", sheet)
