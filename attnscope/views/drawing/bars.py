"""Where bars of several heads stand, in pixels: plain numbers, no drawing."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from attnscope.views.drawing import layout
from attnscope.views.drawing.layout import Paper, Surroundings

_MOST_BARS = 24


@dataclass(frozen=True)
class Bars:
    """Bars for several heads side by side; the keys stand at the left of each row of heads.

    Attributes:
        width_px: Width of the figure.
        height_px: Height of the figure.
        corners: Upper left corner of each head's bars, (x, y).
        panel_px: Width of a head's bars at weight 1.
        bar_px: Distance from bar to bar.
        label_px: Font size of the keys' labels.
        label_room_px: Width at which they are cut.
        first_of_row: Which heads begin a row and so have the labels.
        footer_y: Middle of the first line of notes.
        footer: The notes, broken into lines.
    """

    width_px: int
    height_px: int
    corners: tuple[tuple[int, int], ...]
    panel_px: int
    bar_px: int
    label_px: float
    label_room_px: float
    first_of_row: tuple[int, ...]
    footer_y: int
    footer: tuple[str, ...]

    @property
    def numbers_fit(self) -> bool:
        """Whether the weight can stand at the end of a bar."""
        return self.panel_px >= 160 and self.bar_px >= 14


def bar_grid(
    n_panels: int,
    columns: int,
    n_bars: int,
    widest: Callable[[float], float],
    around: Surroundings,
) -> Bars:
    """Places the bars of several heads.

    Args:
        n_panels: How many heads.
        columns: How many of them stand side by side.
        n_bars: How many keys each has.
        widest: Gives the width of the widest label at a font size.
        around: What stands around them.
    """
    paper = around.paper
    rows = math.ceil(n_panels / columns)
    bar = max(_bar_pitch(paper), min(30, 1000 // (rows * n_bars)))
    font = paper.least_px or min(layout.MAX_LABEL_PX, bar * 0.82)
    left = math.ceil(widest(font)) + 10
    gap = 14 if columns > 4 else 60
    end = 30
    if paper.fixed:
        left, gap, end = min(left, paper.room_px // 3), 8 if columns > 2 else 20, 0
    panel = min(900, (paper.room_px - left - (columns - 1) * gap - end * paper.fixed) // columns)
    panel = max(8 if paper.fixed else 40, panel)
    pitch_y = layout.PANEL_HEADER_PX + n_bars * bar + 20
    corners = tuple(
        (
            layout.MARGIN_PX + left + (i % columns) * (panel + gap),
            layout.HEADER_PX + layout.PANEL_HEADER_PX + (i // columns) * pitch_y,
        )
        for i in range(n_panels)
    )
    width = paper.width_for(
        layout.MIN_WIDTH_PX if columns > 1 else 0, 2 * layout.MARGIN_PX + left + columns * (panel + gap) - gap + end
    )
    lines = layout.wrap(" · ".join(around.notes), width - 2 * layout.MARGIN_PX, around.width_of)
    footer_y = layout.HEADER_PX + rows * pitch_y + 16
    return Bars(
        width_px=width,
        height_px=footer_y + (len(lines) - 1) * layout.LINE_PX + layout.MARGIN_PX,
        corners=corners,
        panel_px=panel,
        bar_px=bar,
        label_px=font,
        label_room_px=left - 10.0,
        first_of_row=tuple(range(0, n_panels, columns)),
        footer_y=footer_y,
        footer=lines,
    )


def most_bars(rows: int, paper: Paper) -> int:
    """How many keys bars are drawn of, in so many rows of heads."""
    if not paper.fixed:
        return _MOST_BARS
    tall = (layout.TALLEST_INCHES * paper.inch_px - layout.HEADER_PX - 80) / rows - layout.PANEL_HEADER_PX - 20
    return max(3, min(_MOST_BARS, math.floor(tall / _bar_pitch(paper))))


def _bar_pitch(paper: Paper) -> int:
    return max(12, math.ceil(paper.least_px / 0.82))
