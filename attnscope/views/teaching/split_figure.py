"""A split as a figure: a row of heads for each number of heads, on one colour scale."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from attnscope.drawing import layout
from attnscope.drawing.canvas import FAINT, INK, Canvas, colormap, matplotlib_defaults
from attnscope.drawing.inks import hex_of
from attnscope.drawing.layout import SCREEN, Paper
from attnscope.drawing.lettering import Lettering, lettering_for
from attnscope.drawing.page import Page
from attnscope.drawing.style import DEFAULT_CMAP, USUAL, Style
from attnscope.errors import amount
from attnscope.records.teaching.split import Seen, Split
from attnscope.views.teaching.split_terminal import range_of_ranks

if TYPE_CHECKING:
    from matplotlib.colors import Colormap

_MARGIN, _GAP, _ROW_HEAD, _PANEL_HEAD = layout.MARGIN_PX, 26, 46, 24
_ROW_TITLE, _PANEL_TITLE, _LABEL, _NUMBER, _NOTE = 16.0, 13.0, 13.0, 11.5, layout.CAPTION_PX
_LEAST_MAP = 100  # on paper of a given width
_LARGEST_CELL, _LARGEST_MAP, _MOST_PANELS, _WIDEST = 46, 300, 12, 1760
_CELL_WITH_NUMBER, _CELL_WITH_LABEL = 34, 12


@dataclass(frozen=True)
class _Plan:
    """The places of everything, in pixels.

    Attributes:
        cell: Width and height of a weight.
        left: Left edge of the first map of a line.
        below: Room under a map, for the labels of keys.
        map_width: Width of a map.
        map_height: Height of a map.
        per_line: How many maps stand side by side.
        tops: The upper edge of each number of heads, and of the notes.
        width: Width of the figure.
        row_head: Room over the maps of a number of heads.
        label_step: Every n-th token has its label; this is n. 0 = none has.
    """

    cell: float
    left: int
    below: int
    map_width: float
    map_height: float
    per_line: int
    tops: tuple[int, ...]
    width: int
    row_head: int
    label_step: int

    def map_at(self, row: int, panel: int) -> tuple[float, float]:
        """The upper left corner of a map: which number of heads, which of its panels."""
        line, column = divmod(panel, self.per_line)
        x = self.left + column * (self.map_width + _GAP)
        return x, self.tops[row] + self.row_head + _PANEL_HEAD + line * (_PANEL_HEAD + self.map_height + self.below)


def pages(split: Split, style: Style = USUAL) -> Iterator[tuple[str, Canvas]]:
    """The one figure, `split`."""
    yield "split", split_page(split, style.paper)


@matplotlib_defaults()
def split_page(split: Split, paper: Paper = SCREEN) -> Canvas:
    """The figure."""
    model = str(split.run.get("model", ""))
    lettering = lettering_for([model, split.text, *split.queries, *split.keys], paper)
    plan, cmap = _plan_layout(split, lettering), colormap(DEFAULT_CMAP)
    page = Page(plan.width, lettering)
    title = f"{model}: the same queries, keys and values with more and fewer heads"
    # The colour bar stands at the right of the text, on narrow paper below it.
    text = f"“{' '.join(split.text.split())}”"
    page.head(title, lettering.fit(text, layout.SUBTITLE_PX, page.width_px - 2 * _MARGIN - 260 * (not paper.is_narrow)))
    for number, seen in enumerate(split.seen):
        _draw_row(page, plan, split, seen, number, cmap)
    _draw_bar(page, cmap)
    page.finish(plan.tops[-1] + 4, _notes(split))
    return page


def _plan_layout(split: Split, lettering: Lettering) -> _Plan:
    n_queries, n_keys = len(split.queries), len(split.keys)
    paper = lettering.paper
    cell: float = max(1, min(_LARGEST_CELL, _LARGEST_MAP // max(n_queries, n_keys)))
    labelled = cell >= _CELL_WITH_LABEL or bool(paper.least_px)
    size = paper.letters(min(_LABEL, cell * 0.8))
    widest = [max((lettering.width_px(x, size) for x in names), default=0.0) for names in (split.queries, split.keys)]
    left = _MARGIN + (min(int(widest[0]), 150 if not paper.fixed else paper.room_px // 4) + 12 if labelled else 0)
    below = min(int(widest[1]), 150) + 14 if labelled else 8
    most = max(len(_panels(seen)) for seen in split.seen)
    room = (paper.width_px if paper.fixed else _WIDEST) - left - _MARGIN
    if paper.fixed:
        per_line = max(1, min(most, (room + _GAP) // (_LEAST_MAP + _GAP)))
        cell = min(float(_LARGEST_CELL), ((room + _GAP) / per_line - _GAP) / n_keys)
    map_width, map_height = cell * n_keys, cell * n_queries
    if not paper.fixed:
        per_line = max(1, min(most, int((room + _GAP) // (map_width + _GAP))))
    tops = [_MARGIN + (52 if not paper.is_narrow else 82)]
    for seen in split.seen:
        n_lines = -(-len(_panels(seen)) // per_line)
        row_head = _ROW_HEAD + (20 if paper.is_narrow else 0)
        tops.append(tops[-1] + row_head + math.ceil(n_lines * (_PANEL_HEAD + map_height + below)) + _GAP)
    step = math.ceil(max(paper.least_px / 0.8, 1) / cell) if labelled else 0
    width = paper.width_for(left + per_line * (map_width + _GAP) - _GAP + _MARGIN, 900)
    return _Plan(cell, left, below, map_width, map_height, per_line, tuple(tops), width, row_head, step)


def _panels(seen: Seen) -> list[tuple[str, NDArray[np.float64]]]:
    """The titles and weights of a row: its heads, then their mean."""
    panels = []
    for head in range(min(seen.n_heads, _MOST_PANELS)):
        first, last = int(seen.columns[head, 0]), int(seen.columns[head, 1]) - 1
        span = f"column {first}" if first == last else f"columns {first}–{last}"
        panels.append((f"H{head} · {span}", seen.weights[head]))
    if seen.n_heads > 1:
        panels.append(("mean (no head's own)", seen.mean_weights))
    return panels


def _draw_row(page: Page, plan: _Plan, split: Split, seen: Seen, number: int, cmap: Colormap) -> None:
    """The heads of one number of heads, and what is known of them."""
    y, narrow, fit = plan.tops[number] + _ROW_HEAD, page.paper.is_narrow, page.lettering.fit
    name = f"{amount(seen.n_heads, 'head')}, d_head {seen.d_head}"
    page.entitle(_MARGIN, y - 26, name, _ROW_TITLE)
    facts = (
        f"rank {range_of_ranks(seen)} · entropy {seen.entropy_nats.mean():.2f} nats · "
        f"{int(seen.uniform.sum())} of {seen.n_heads * len(split.queries)} rows uniform · "
        f"disagreement {seen.disagreement_nats.mean():.2f} nats"
    )
    x = float(_MARGIN) if narrow else _MARGIN + page.lettering.width_px(name, _ROW_TITLE) * 1.12 + 20
    facts = fit(facts, _NOTE, plan.width - _MARGIN - x)
    page.write(x, y - (4 if narrow else 25), facts, _NOTE, ha="left", color=FAINT)
    boxes = []
    for panel, (title, weights) in enumerate(_panels(seen)):
        left, top = plan.map_at(number, panel)
        boxes.append((left, top, plan.map_width, plan.map_height))
        page.matrix(boxes[-1], weights, cmap, (0, 1))
        room = plan.map_width + (4 if page.paper.fixed else _GAP - 4)
        if page.lettering.width_px(title, _PANEL_TITLE) > room:
            title = title.partition(" · ")[0].partition(" (")[0]
        color = FAINT if title.startswith("mean") else INK
        page.write(left, top - 12, fit(title, _PANEL_TITLE, room), _PANEL_TITLE, ha="left", color=color)
        _write_labels(page, plan, split, left, top, first=panel % plan.per_line == 0)
        if (size := plan.cell) >= max(_CELL_WITH_NUMBER, 2.5 * page.paper.least_px):
            cells = [
                ((left + column * size, top + row * size, size, size), hex_of(cmap, float(weight)))
                for (row, column), weight in np.ndenumerate(weights)
            ]
            page.number_cells(cells, [f"{weight:.2f}" for weight in weights.ravel()], page.paper.letters(_NUMBER))
    page.frames(boxes)


def _draw_bar(page: Page, cmap: Colormap) -> None:
    x, y, width = page.width_px - _MARGIN - 160, _MARGIN + 22, 140
    if page.paper.is_narrow:
        x, y = _MARGIN + 64, _MARGIN + 50
    page.colour_bar((x, y, width, 12), cmap)
    page.write(x - 8, y + 6, "weight 0", _NOTE, ha="right", color=FAINT)
    page.write(x + width + 8, y + 6, "1", _NOTE, ha="left", color=FAINT)


def _write_labels(page: Page, plan: _Plan, split: Split, x: float, y: float, *, first: bool) -> None:
    """Keys below a map, and queries at the left of the first of a line."""
    if not plan.label_step:
        return
    size = page.paper.letters(min(_LABEL, plan.cell * 0.8))
    room = x - _MARGIN - 8 if page.paper.fixed else 150
    for row, label in list(enumerate(split.queries if first else ()))[:: plan.label_step]:
        label = page.lettering.fit(label, size, room)
        page.write(x - 8, y + (row + 0.5) * plan.cell, label, size, ha="right")
    for column, label in list(enumerate(split.keys))[:: plan.label_step]:
        label, middle = page.lettering.fit(label, size, 150), x + (column + 0.5) * plan.cell
        page.write(middle, y + plan.map_height + 7, label, size, ha="center", va="top", rotation=90)


def _notes(split: Split) -> list[str]:
    notes = [
        "rows: queries (attend) · columns: keys (are attended to)",
        "uniform rows choose nothing · disagreement: Jensen–Shannon divergence of the heads, 0 = alike",
    ]
    if split.same_columns:
        notes.append("head 1 has the columns of head 0, so that the two are the same")
    if any(seen.n_heads > _MOST_PANELS for seen in split.seen):
        notes.append(f"of more than {_MOST_PANELS} heads the first {_MOST_PANELS} are drawn")
    return notes
