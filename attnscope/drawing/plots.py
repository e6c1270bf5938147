"""Plots with axes: a sheet in inches with its title and notes, and how lines and what stands around them are drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from attnscope.drawing.canvas import FAINT, INK, LINE, wrap_lines
from attnscope.drawing.layout import Paper
from attnscope.drawing.lettering import Lettering

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
OTHER = "#b8b8b8"
_LEAST_PT = 9.0  # of its letters on a screen


@dataclass(frozen=True)
class Sheet:
    """Sizes in inches."""

    paper: Paper
    lettering: Lettering
    width: float  # of the figure
    size: float  # of letters, relative to a screen's
    stacked: bool  # whether plots stand below each other, as paper is narrow

    @classmethod
    def on(cls, paper: Paper, lettering: Lettering, width: float = 12.0) -> Sheet:
        """Return the sizes on a paper; `width` is the figure's on a screen."""
        size = 1.0 if not paper.least_px else paper.least_px * 72 / paper.inch_px / _LEAST_PT
        width = (paper.width_px - 2 * paper.crop_px) / paper.inch_px if paper.fixed else width
        return cls(paper, lettering, width, size, paper.is_narrow)

    @property
    def families(self) -> list[str]:
        """Return the families of its letters."""
        return list(self.lettering.families)

    @property
    def plot(self) -> float:
        """Height of a plot."""
        return (0.5 if self.stacked else 0.2) * self.width

    @property
    def above(self) -> float:
        """Height of the title."""
        return (0.85 if self.paper.caption else 0.1) * self.size

    def write(self, figure: Any, x: float, down: float, text: str, points: float, **how: Any) -> None:
        """Write a text: x as a share of the figure's width, down in inches from its upper edge."""
        at = 1 - down / figure.get_figheight()
        figure.text(
            x,
            at,
            text,
            fontsize=points * self.size,
            va="center",
            parse_math=False,
            family=self.families,
            **{"color": INK, **how},
        )

    def open_figure(self, height: float, title: str, subtitle: str) -> Any:
        """Return a figure of a height, with its title."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(self.width, height), dpi=self.paper.dpi, facecolor="white")
        if self.paper.caption:
            bold = "bold" if self.lettering.has_bold else "normal"
            name = self.lettering.fit(title, 20, 400 if self.stacked else 900)
            self.write(figure, 0.02, 0.28 * self.size, name, 15, fontweight=bold)
            self.write(figure, 0.02, 0.58 * self.size, subtitle, 11, color=FAINT)
        return figure

    def add_legend(self, axes: Any) -> None:
        """Add a legend of the lines, at the right of the plot."""
        legend = axes.legend(
            fontsize=9 * self.size,
            frameon=False,
            loc="upper left",
            bbox_to_anchor=(1.0, 1.04),
            handlelength=1.2,
            borderaxespad=0.3,
        )
        for text in legend.texts:
            text.set_family(self.families)


@dataclass(frozen=True)
class Foot:
    """Notes below a figure, broken into lines, and the height that they take, in inches."""

    lines: tuple[str, ...]
    height: float
    sheet: Sheet

    def write(self, figure: Any) -> None:
        """Write them into the figure."""
        top = figure.get_figheight() - self.height
        for number, line in enumerate(self.lines):
            self.sheet.write(figure, 0.02, top + (0.3 + 0.2 * number) * self.sheet.size, line, 9, color=FAINT)


def write_foot(notes: Sequence[str], sheet: Sheet) -> Foot:
    """Lay out notes below a figure, those on parts of the study that failed last."""
    notes = [*(notes if sheet.paper.caption else ()), *sheet.lettering.paper.failed]
    lines = wrap_lines(" · ".join(notes), sheet.width * 96 / sheet.size * 0.92, sheet.lettering)
    return Foot(lines, (0.35 + 0.2 * len(lines)) * sheet.size, sheet)


def draw_line(
    axes: Any,
    steps: Sequence[float],
    parts: Any,
    color: str,
    sheet: Sheet,
    name: str = "",
) -> None:
    """Draw a value over the steps, and the band of its intervals."""
    marker = "o" if len(steps) < 2 else None
    axes.plot(steps, parts[:, 0], color=color, label=name, linewidth=1.8 * sheet.size, zorder=3, marker=marker)
    if np.isfinite(parts[:, 1:]).all(1).any():
        axes.fill_between(steps, parts[:, 1], parts[:, 2], color=color, alpha=0.18, linewidth=0, zorder=2)


def finish_axes(axes: Any, sheet: Sheet) -> None:
    """Draw a faint grid, and no frame above and at the right."""
    axes.grid(color=LINE, linewidth=0.5 * sheet.size, alpha=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def letter_axes(axes: Any, title: str, sheet: Sheet) -> None:
    """Write a plot's title, its numbers and what its axis is, in the sheet's letters."""
    axes.set_title(title, fontsize=11 * sheet.size, loc="left", color=INK)
    axes.set_xlabel("step", fontsize=9.5 * sheet.size, color=FAINT)
    for text in (*axes.get_xticklabels(), *axes.get_yticklabels()):
        text.set_fontsize(9 * sheet.size)
    for text in (axes.title, axes.xaxis.label, *axes.get_xticklabels(), *axes.get_yticklabels()):
        text.set_family(sheet.families)
