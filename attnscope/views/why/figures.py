"""Why a head attends there, as a figure: the parts at the query against the parts at the key."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from attnscope.drawing import layout
from attnscope.drawing.canvas import FAINT, INK
from attnscope.drawing.lettering import Lettering, lettering_for
from attnscope.drawing.page import Page
from attnscope.drawing.style import USUAL, Style
from attnscope.records.why.score import Why
from attnscope.report.numbers import number
from attnscope.views.why.summary import notes_of, score_line, title_of

_SIGNED, _MOST = "RdBu_r", 12
_TOP_PX = layout.MARGIN_PX + 92


def pages(record: Why, style: Style = USUAL) -> Iterator[tuple[str, Page]]:
    """One figure, with its file name without the ending."""
    yield f"why-{record.name}", pairs_page(record, lettering_for([title_of(record)], style.paper))


def pairs_page(record: Why, lettering: Lettering) -> Page:
    """A matrix of pairs: rows are the parts at the query, columns those at the key, margins their sums.

    The strongest parts of each side stand alone, in the order of the model; the last row and column hold all others.
    """
    rows, columns = (
        np.sort(np.argsort(-np.abs(side), kind="stable")[:_MOST]) for side in (record.by_query, record.by_key)
    )
    values = _fold(_fold(record.pairs, rows).T, columns).T
    names = [part.name for part in record.parts]
    left = [*(names[at] for at in rows), *["others"] * (len(values) > len(rows))]
    above = [*(names[at] for at in columns), *["others"] * (values.shape[1] > len(columns))]
    values = np.block([[values, values.sum(1, keepdims=True)], [values.sum(0, keepdims=True), values.sum()]])
    left, above = [*left, "sum"], [*above, "sum"]
    paper, size = lettering.paper, lettering.paper.letters(12.0)
    names_px = max(lettering.width_px(name, size) for name in left) + 16
    head_px = max(lettering.width_px(name, size) for name in above) + 12
    room = (paper.room_px if paper.fixed else 1100) - names_px
    cell_w = max(8.0, min(64.0, room / len(above)))
    cell_h = max(size * 1.5, min(30.0, cell_w))
    corner = layout.MARGIN_PX + names_px, _TOP_PX + head_px
    width = paper.width_for(2 * layout.MARGIN_PX + names_px + len(above) * cell_w, 900)
    page = Page(width, lettering)
    page.head(title_of(record), score_line(record))
    high = max(float(np.abs(values).max()), 1e-12)
    by_place = {place: float(value) for place, value in np.ndenumerate(values)}
    cells = page.grid_cells(corner, (cell_w, cell_h), by_place, _SIGNED, lambda value: 0.5 + 0.5 * value / high)
    if cell_w >= 3.2 * size:
        page.number_cells(list(cells.values()), [number(value) for value in by_place.values()], size)
    for row, name in enumerate(left):
        at = corner[1] + (row + 0.5) * cell_h
        page.write(corner[0] - 8, at, name, size, ha="right", va="center_baseline", color=INK)
    for column, name in enumerate(above):
        at = corner[0] + (column + 0.5) * cell_w
        page.write(at, corner[1] - 6, name, size, ha="center", va="bottom", rotation=90, color=INK)
    page.write(layout.MARGIN_PX, corner[1] - 10, "rows: query", size, ha="left", color=FAINT)
    page.write(layout.MARGIN_PX, corner[1] - 10 - size * 1.3, "columns: key", size, ha="left", color=FAINT)
    page.finish(corner[1] + len(left) * cell_h + 30, notes_of(record))
    return page


def _fold(values: np.ndarray, shown: np.ndarray) -> np.ndarray:
    """The rows that are shown, and below them the sum of the others, if there are any."""
    others = np.setdiff1d(np.arange(len(values)), shown)
    return np.vstack([values[shown], values[others].sum(0)]) if len(others) else values[shown]
