"""A timeline as a figure: the loss, and of each measure the heads that change as lines and all heads as a map."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from attnscope.errors import AttnscopeError
from attnscope.records.timeline import Timeline
from attnscope.views.canvas import FAINT, INK, LINE, Drawing, matplotlib_defaults, wrap_lines
from attnscope.views.heads_summary import model_of, printable
from attnscope.views.layout import Paper
from attnscope.views.lettering import Lettering, lettering_for
from attnscope.views.style import USUAL, Style
from attnscope.views.timeline_summary import (
    Series,
    are_logarithmic,
    moving,
    notes,
    series_of,
    since_lines,
    step_text,
    thinned,
    title_line,
)

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
OTHER = "#b8b8b8"
_LEAST_PT = 9.0  # of its letters on a screen
_MOST_NAMES = 24  # of heads beside a map


def pages(timeline: Timeline, style: Style = USUAL) -> Iterator[tuple[str, Drawing]]:
    """The one figure, `timeline`.

    Raises:
        AttnscopeError: There are no checkpoints.
    """
    if timeline.is_empty:
        raise AttnscopeError("this timeline has no checkpoints", "so there is nothing to draw")
    yield "timeline", _drawing(timeline, style.paper)


@dataclass(frozen=True)
class Sheet:
    """Sizes in inches, and how much smaller letters are than on a screen."""

    width: float
    size: float
    plot: float
    stacked: bool
    families: list[str]

    @classmethod
    def on(cls, paper: Paper, lettering: Lettering) -> Sheet:
        """The sizes on a paper: side by side, or on a narrow one below each other."""
        size = 1.0 if not paper.least_px else paper.least_px * 72 / paper.inch_px / _LEAST_PT
        width = (paper.width_px - 2 * paper.crop_px) / paper.inch_px if paper.fixed else 12.0
        stacked = paper.is_narrow
        return cls(width, size, (0.5 if stacked else 0.2) * width, stacked, list(lettering.families))

    def add_legend(self, axes: Any) -> None:
        """Names of lines at the right of a plot."""
        legend = axes.legend(
            fontsize=9 * self.size, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.04), handlelength=1.2,
            borderaxespad=0.3,
        )  # fmt: skip
        for text in legend.texts:
            text.set_family(self.families)

    def add_bar(self, figure: Any, image: Any, axes: Any) -> None:
        """What the colours of a map mean, at its right."""
        bar = figure.colorbar(image, ax=axes, fraction=0.05, pad=0.03)
        bar.outline.set_visible(False)
        bar.locator = _locator()
        bar.update_ticks()
        for text in bar.ax.get_yticklabels():
            text.set_fontsize(9 * self.size)
            text.set_family(self.families)


@dataclass(frozen=True)
class Foot:
    """Notes below a figure, broken into lines, and the height that they take, in inches."""

    lines: tuple[str, ...]
    height: float
    sheet: Sheet

    def write(self, figure: Any, height: float) -> None:
        """Writes them into a figure of a height."""
        size = self.sheet.size
        for place, line in enumerate(self.lines):
            at = (self.height - (0.3 + 0.2 * place) * size) / height
            figure.text(
                0.02, at, line, fontsize=9 * size, color=FAINT, va="center", parse_math=False,
                family=self.sheet.families,
            )  # fmt: skip


@matplotlib_defaults()
def _drawing(timeline: Timeline, paper: Paper) -> Drawing:
    from matplotlib.figure import Figure

    said = notes(timeline)
    followed = series_of(timeline)
    if any(series.level is not None for series in followed):
        said.append("dotted: uniform attention" + ", of composition random directions" * bool(timeline.pairs))
    titles = [series.title for series in followed]
    names = [name for series in followed for name in series.names]
    lettering = lettering_for([model_of(timeline.run), *said, *titles, *names], paper)
    sheet = Sheet.on(paper, lettering)
    size, width, stacked = sheet.size, sheet.width, sheet.stacked
    rows = 2 * len(titles) if stacked else len(titles)
    foot = write_foot(said, sheet, lettering)
    above, below, pitch = (0.85 if paper.title else 0.1) * size, foot.height, 0.95 * size
    n_losses = int(timeline.has_loss)
    height = above + (rows + n_losses) * (sheet.plot + pitch) + below
    figure = Figure(figsize=(width, height), dpi=paper.dpi, facecolor="white")
    written: Any = {"va": "center", "parse_math": False, "family": sheet.families}
    if paper.title:
        bold = "bold" if lettering.has_bold else "normal"
        name = lettering.fit(model_of(timeline.run), 20, 900 if not stacked else 400)
        figure.text(0.02, 1 - 0.28 * size / height, name, fontsize=15 * size, fontweight=bold, color=INK, **written)
        told = title_line(timeline)
        figure.text(0.02, 1 - 0.58 * size / height, told, fontsize=11 * size, color=FAINT, **written)

    def axes_at(row: int, right: bool, named: str = "heads") -> Any:
        top = above + row * (sheet.plot + pitch) + 0.35 * size
        left, wide = (0.16, 0.72 if right else 0.6) if stacked else (0.59, 0.33) if right else (0.07, 0.38)
        if named == "pairs":  # whose names are longer
            left, wide = (left + 0.1, wide - 0.16) if stacked else (0.61, 0.31) if right else (0.07, 0.31)
        return figure.add_axes((left, 1 - (top + sheet.plot) / height, wide, sheet.plot / height))

    if n_losses:
        _draw_loss(axes_at(0, False), timeline, sheet)
        if not stacked:
            _write_roles(figure, timeline, (above + 0.35 * size, height), sheet, lettering)
    for number, series in enumerate(followed):
        row = n_losses + (2 * number if stacked else number)
        _draw_lines(axes_at(row, False, series.what), timeline, series, sheet)
        _draw_map(figure, axes_at(row + stacked, True, series.what), timeline, series, sheet)
    foot.write(figure, height)
    return Drawing(figure, lettering.families)


def write_foot(said: Sequence[str], sheet: Sheet, lettering: Lettering) -> Foot:
    """Notes as they will stand below a figure."""
    lines = wrap_lines(" · ".join(said), sheet.width * 96 / sheet.size * 0.92, lettering)
    return Foot(lines, (0.35 + 0.2 * len(lines)) * sheet.size, sheet)


def _draw_loss(axes: Any, timeline: Timeline, sheet: Sheet) -> None:
    losses = np.array([(one.loss, one.loss_low, one.loss_high) for one in timeline.checkpoints])
    draw_line(axes, timeline.steps, losses, INK, sheet)
    _finish(axes, timeline, "loss, nats a prediction", sheet)


def _write_roles(figure: Any, timeline: Timeline, at: tuple[float, float], sheet: Sheet, lettering: Lettering) -> None:
    """Beside the loss: each role, and since when heads have had it."""
    top, height = at
    y, written = top + 0.1 * sheet.size, {"va": "center", "parse_math": False, "family": sheet.families}
    for role, heads in since_lines(timeline):
        lines = wrap_lines(heads, 0.38 * sheet.width * 96 / sheet.size, lettering)
        if y + (0.2 * len(lines) + 0.1) * sheet.size > top + sheet.plot:
            break
        bold = "bold" if lettering.has_bold else "normal"
        figure.text(0.59, 1 - y / height, role, fontsize=10 * sheet.size, fontweight=bold, color=INK, **written)
        for place, line in enumerate(lines, 1):
            down = y + 0.2 * place * sheet.size
            figure.text(0.59, 1 - down / height, line, fontsize=10 * sheet.size, color=INK, **written)
        y += (0.2 * len(lines) + 0.32) * sheet.size


def _draw_lines(axes: Any, timeline: Timeline, series: Series, sheet: Sheet) -> None:
    """What changes most in colours, with its intervals; all others in grey."""
    chosen, parts = moving(series.values, len(COLORS)), series.parts
    for head in range(parts.shape[1]):
        if head not in chosen:
            axes.plot(timeline.steps, parts[:, head, 0], color=OTHER, linewidth=0.7 * sheet.size, alpha=0.7, zorder=1)
    if series.level is not None:
        axes.axhline(series.level, color=FAINT, linewidth=1.0 * sheet.size, linestyle=(0, (2, 2)), zorder=1)
    for color, head in zip(COLORS, chosen, strict=False):
        draw_line(axes, timeline.steps, parts[:, head], color, sheet, series.names[head])
    _finish(axes, timeline, series.title, sheet)
    if limits := series.limits:
        axes.set_ylim(limits[0] - 0.02 * limits[1], limits[1] * 1.02)
    if chosen:
        sheet.add_legend(axes)


def draw_line(
    axes: Any, steps: Sequence[float], parts: Any, color: str, sheet: Sheet, name: str = "", *, style: str = "-",
    band: bool = True, wide: float = 1.0,
) -> None:  # fmt: skip
    """A value over the steps, and the band of its intervals."""
    axes.plot(
        steps, parts[:, 0], color=color, linewidth=1.8 * wide * sheet.size, label=name, zorder=3, linestyle=style,
        marker="o" if len(steps) < 2 else None,
    )  # fmt: skip
    if band and np.isfinite(parts[:, 1:]).all(1).any():
        axes.fill_between(steps, parts[:, 1], parts[:, 2], color=color, alpha=0.18, linewidth=0, zorder=2)


def _finish(axes: Any, timeline: Timeline, title: str, sheet: Sheet) -> None:
    steps = timeline.steps
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
    axes.locator_params(axis="y", nbins=5)
    finish_axes(axes, sheet)
    letter_axes(axes, title, sheet)


def finish_axes(axes: Any, sheet: Sheet) -> None:
    """A faint grid, and no frame above and at the right."""
    axes.grid(color=LINE, linewidth=0.5 * sheet.size, alpha=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _draw_map(figure: Any, axes: Any, timeline: Timeline, series: Series, sheet: Sheet) -> None:
    """All heads or pairs and checkpoints, a column each, whatever lies between their steps."""
    values = series.values.T
    known = values[np.isfinite(values)]
    low, high = (float(known.min()), float(known.max())) if known.size else (0.0, 1.0)
    signed = low < 0 < high
    extent = max(abs(low), abs(high))
    limits = series.limits or ((-extent, extent) if signed else (min(low, 0.0), high or 1.0))
    image = axes.imshow(
        np.ma.masked_invalid(values), aspect="auto", interpolation="nearest", cmap="RdBu_r" if signed else "Blues",
        vmin=limits[0], vmax=limits[1],
    )  # fmt: skip
    axes.set_facecolor("#dcdcdc")
    places = thinned(len(timeline.steps), 4 if sheet.stacked else 7)
    axes.set_xticks(places, [step_text(timeline.steps[place]) for place in places])
    names = [printable(name, 24) for name in series.names]
    if len(names) <= _MOST_NAMES:
        axes.set_yticks(range(len(names)), names)
    elif series.what == "pairs":
        rows = thinned(len(names), 12)
        axes.set_yticks(rows, [names[place] for place in rows])
    else:
        layers = [layer for _, layer, _ in timeline.heads]
        starts = [place for place, layer in enumerate(layers) if place == 0 or layer != layers[place - 1]]
        starts = [starts[place] for place in thinned(len(starts), 12)]
        axes.set_yticks(starts, [names[place] for place in starts])
    axes.tick_params(length=2 * sheet.size)
    for side in ("top", "right", "bottom", "left"):
        axes.spines[side].set_visible(False)
    letter_axes(axes, f"{series.title}: {'followed' if series.what == 'pairs' else 'all'} {series.what}", sheet)
    sheet.add_bar(figure, image, axes)


def _locator() -> Any:
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(4)


def letter_axes(axes: Any, title: str, sheet: Sheet, across: str = "step") -> None:
    """Writes a plot's title, its numbers and what its axis is, in the sheet's letters."""
    axes.set_title(title, fontsize=11 * sheet.size, loc="left", color=INK)
    axes.set_xlabel(across, fontsize=9.5 * sheet.size, color=FAINT)
    for text in (*axes.get_xticklabels(), *axes.get_yticklabels()):
        text.set_fontsize(9 * sheet.size)
    for text in (axes.title, axes.xaxis.label, *axes.get_xticklabels(), *axes.get_yticklabels()):
        text.set_family(sheet.families)
