"""Draw rows of matrices in one figure, on one colour scale. It knows no question, only titles and numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from attnscope.drawing import layout
from attnscope.drawing.canvas import FAINT, INK, colormap, matplotlib_defaults
from attnscope.drawing.inks import hex_of
from attnscope.drawing.lettering import Lettering
from attnscope.drawing.page import Page
from attnscope.drawing.style import DEFAULT_CMAP
from attnscope.report.blocks import Report
from attnscope.results.table import Floats

_GAP, _ROW_HEAD, _PANEL_HEAD = 26, 46, 24
"""Between maps, over the maps of a row, and over a map."""

_ROW_TITLE, _PANEL_TITLE, _LABEL, _NUMBER = 16.0, 13.0, 13.0, 11.5
"""Sizes of letters."""

_LARGEST_CELL, _LARGEST_MAP, _LEAST_MAP, _WIDEST = 46, 300, 100, 1760
"""Widths: of a cell and a map at most, of a map on paper at least, and of a figure on a screen."""

_CELL_WITH_NUMBER, _CELL_WITH_LABEL = 34, 12
"""Cells from which on numbers and labels have room."""

_MOST_LABEL = 150
"""The longest label of a token."""


@dataclass(frozen=True, eq=False)
class PanelRow:
    """Matrices side by side.

    Attributes:
        title: What they have in common.
        facts: What is known of them.
        panels: The title and the weights (query, key) of each.
    """

    title: str
    facts: str
    panels: Sequence[tuple[str, Floats]]


@dataclass(frozen=True)
class _Plan:
    """Sizes in pixels: of a cell and a map, of the room for labels, and how many maps stand side by side."""

    cell: float
    map_width: float
    map_height: float
    left: float
    below: float
    per_line: int
    label_step: int  # every n-th token has its label; 0 = none has


@matplotlib_defaults()
def draw_panels(
    report: Report,
    title: str,
    rows: Sequence[PanelRow],
    queries: Sequence[str],
    keys: Sequence[str],
    lettering: Lettering,
) -> Page:
    """Draw rows of matrices: queries at the left, keys below."""
    paper = lettering.paper
    plan = _plan(rows, queries, keys, lettering)
    narrow = paper.is_narrow
    width = paper.width_for(plan.left + plan.per_line * (plan.map_width + _GAP) - _GAP + layout.MARGIN_PX, 900)
    page = Page(width, lettering)
    # The colour bar stands at the right of the subtitle, on narrow paper below it.
    room = page.width_px - 2 * layout.MARGIN_PX - (0 if narrow else 260)
    page.head(f"{report.model}: {title}", lettering.fit(report.subtitle, layout.SUBTITLE_PX, room))
    bar = (page.width_px - layout.MARGIN_PX - 160, layout.MARGIN_PX + 22, 140, 12)
    if narrow:
        bar = (layout.MARGIN_PX + 64, layout.MARGIN_PX + 50, 140, 12)
    page.draw_scale(bar, DEFAULT_CMAP, (0, 1), ticks={0.0: "weight 0", 1.0: "1"}, color=FAINT)

    top = float(layout.MARGIN_PX + (82 if narrow else 52))
    row_head = _ROW_HEAD + (20 if narrow else 0)
    line_height = _PANEL_HEAD + plan.map_height + plan.below
    for row in rows:
        _entitle(page, row, top + _ROW_HEAD, width)
        for number, (name, weights) in enumerate(row.panels):
            line, column = divmod(number, plan.per_line)
            x = plan.left + column * (plan.map_width + _GAP)
            y = top + row_head + _PANEL_HEAD + line * line_height
            _draw_panel(page, plan, name, weights, (x, y))
            _write_labels(page, plan, queries if column == 0 else (), keys, (x, y))
        n_lines = math.ceil(len(row.panels) / plan.per_line)
        top += row_head + math.ceil(n_lines * line_height) + _GAP
    page.finish(top + 4, ["rows: queries (attend) · columns: keys (are attended to)", *report.footer])
    return page


def _plan(rows: Sequence[PanelRow], queries: Sequence[str], keys: Sequence[str], lettering: Lettering) -> _Plan:
    paper = lettering.paper
    # Square cells, labelled where letters fit.
    cell: float = max(1, min(_LARGEST_CELL, _LARGEST_MAP // max(len(queries), len(keys))))
    is_labelled = cell >= _CELL_WITH_LABEL or bool(paper.least_px)
    size = paper.letters(min(_LABEL, cell * 0.8))
    # Room for labels: queries to the left, keys below.
    widths = [max((lettering.width_px(name, size) for name in names), default=0.0) for names in (queries, keys)]
    left: float = layout.MARGIN_PX
    below = 8.0
    if is_labelled:
        left += min(widths[0], paper.room_px // 4 if paper.fixed else _MOST_LABEL) + 12
        below = min(widths[1], _MOST_LABEL) + 14
    # As many panels per line as fit.
    room = (paper.width_px if paper.fixed else _WIDEST) - left - layout.MARGIN_PX
    most = max(len(row.panels) for row in rows)
    least = _LEAST_MAP if paper.fixed else cell * len(keys)
    per_line = max(1, min(most, int((room + _GAP) // (least + _GAP))))
    # Paper of fixed width stretches cells to fill the line.
    if paper.fixed:
        cell = min(float(_LARGEST_CELL), ((room + _GAP) / per_line - _GAP) / len(keys))
    # Labels closer than the least letter are thinned out.
    step = math.ceil(max(paper.least_px / 0.8, 1) / cell) if is_labelled else 0
    return _Plan(cell, cell * len(keys), cell * len(queries), left, below, per_line, step)


def _entitle(page: Page, row: PanelRow, y: float, width: float) -> None:
    """Write the name of a row, and what is known of it beside or below."""
    narrow = page.paper.is_narrow
    page.entitle(layout.MARGIN_PX, y - 26, row.title, _ROW_TITLE)
    x = float(layout.MARGIN_PX)
    if not narrow:
        x += page.lettering.width_px(row.title, _ROW_TITLE) * 1.12 + 20
    facts = page.lettering.fit(row.facts, layout.CAPTION_PX, width - layout.MARGIN_PX - x)
    page.write(x, y - (4 if narrow else 25), facts, layout.CAPTION_PX, ha="left", color=FAINT)


def _draw_panel(page: Page, plan: _Plan, name: str, weights: Floats, corner: tuple[float, float]) -> None:
    """Draw a matrix with its title, and its numbers where cells have room for them."""
    x, y = corner
    cell = plan.cell
    cmap = colormap(DEFAULT_CMAP)
    page.matrix((x, y, plan.map_width, plan.map_height), weights, cmap, (0, 1))
    # A title that is too wide loses its details.
    room = plan.map_width + (4 if page.paper.fixed else _GAP - 4)
    if page.lettering.width_px(name, _PANEL_TITLE) > room:
        name = name.partition(" · ")[0].partition(" (")[0]
    page.write(x, y - 12, page.lettering.fit(name, _PANEL_TITLE, room), _PANEL_TITLE, ha="left", color=INK)
    # Numbers in their cells.
    if cell >= max(_CELL_WITH_NUMBER, 2.5 * page.paper.least_px):
        cells = [
            ((x + column * cell, y + row * cell, cell, cell), hex_of(cmap, float(weight)))
            for (row, column), weight in np.ndenumerate(weights)
        ]
        page.number_cells(cells, [f"{weight:.2f}" for weight in weights.ravel()], page.paper.letters(_NUMBER))


def _write_labels(
    page: Page, plan: _Plan, queries: Sequence[str], keys: Sequence[str], corner: tuple[float, float]
) -> None:
    """Write keys below a map, and queries at its left."""
    if not plan.label_step:
        return
    x, y = corner
    size = page.paper.letters(min(_LABEL, plan.cell * 0.8))
    # Queries.
    for row in range(0, len(queries), plan.label_step):
        label = page.lettering.fit(queries[row], size, min(_MOST_LABEL, x - layout.MARGIN_PX - 8))
        page.write(x - 8, y + (row + 0.5) * plan.cell, label, size, ha="right")
    # Keys, turned by a quarter.
    for column in range(0, len(keys), plan.label_step):
        label = page.lettering.fit(keys[column], size, _MOST_LABEL)
        page.write(
            x + (column + 0.5) * plan.cell, y + plan.map_height + 7, label, size, ha="center", va="top", rotation=90
        )
