"""Draw a report as figures: one function per type of block. The figures become PNG, SVG and PDF files."""

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from attnscope.drawing import layout
from attnscope.drawing.canvas import INK, Drawing
from attnscope.drawing.files import distinct
from attnscope.drawing.inks import ink_on
from attnscope.drawing.lettering import Lettering, lettering_for
from attnscope.drawing.page import Number, Page
from attnscope.drawing.style import USUAL, Style
from attnscope.errors import AttnscopeError
from attnscope.report.blocks import Block, Graph, Grid, HeadMap, Report, Trends
from attnscope.report.graphs import draw_graph
from attnscope.report.head_maps import ONE_WAY, TWO_WAYS, draw_head_maps
from attnscope.report.numbers import small_number
from attnscope.report.trends import draw_trends
from attnscope.report.wording import printable
from attnscope.results.storage import texts_in

_MOST_ROWS = 20
"""Rows of a grid that are drawn."""

_LABEL_PITCH_PX = 15
"""From one name of a row or column of a grid to the next, at least."""

_MOST_CELLS = 10_000
"""Cells of a grid that are drawn one by one; more of them have no numbers."""

_GRID_PX = 1500
"""Width of a grid on a screen."""

_NAMES_PX, _LABELS_PX, _ROW_PX = 110, 96, 26
"""Of a grid: room for the names of rows and of columns, and the height of a row."""


def pages(result: Any, style: Style = USUAL, **shown: Any) -> Iterator[tuple[str, Drawing]]:
    """Return the figures of a result one after the other, each with the name of its file without ending.

    Args:
        result: A `results.Result`.
        style: How figures look.
        shown: How its question shows it; None = as usual.

    Raises:
        AttnscopeError: There is nothing to draw.
    """
    if result.is_empty:
        raise AttnscopeError(f"{result.record_kind().with_article} without heads has nothing to draw")
    report = result.report(**{name: value for name, value in shown.items() if value is not None})
    figures = report.figures()
    lettering = lettering_for(_texts(report), style.paper)
    # A name from a file must not lead out of the folder.
    stems = distinct(re.sub(r"[^A-Za-z0-9_-]", "-", name)[:80] for name in figures)
    for stem, blocks in zip(stems, figures.values(), strict=True):
        for number, page in enumerate(_draw(report, blocks, lettering), 1):
            yield stem if number == 1 else f"{stem}-{number}", page


def _draw(report: Report, blocks: Sequence[Any], lettering: Lettering) -> Iterable[Drawing]:
    """Return the pages of a figure, by the type of its first block; only maps of heads and trends share a figure."""
    first: Block = blocks[0]
    match first:
        case HeadMap():
            return draw_head_maps(report, blocks, lettering)
        case Trends():
            return [draw_trends(report, blocks, lettering)]
        case Graph():
            return [draw_graph(report, first, lettering)]
        case Grid():
            return [_draw_grid(report, first, lettering)]
        case _:
            return [blocks[0].view.draw(report, lettering)]


def _texts(report: Report) -> Iterator[str]:
    """Return all texts that figures may show, to find fonts for them."""
    yield from (report.model, report.subtitle, report.source, *report.footer)
    for block in report.blocks:
        if block.figure:
            yield from texts_in(vars(block))


def _draw_grid(report: Report, block: Grid, lettering: Lettering) -> Page:
    """Draw a matrix as coloured cells, with names at the left and above, and numbers where they have room.

    If no number is below 0, the scale begins with 0, and the darkest cell is the largest.
    """
    paper = lettering.paper
    values = block.values if block.drawn_whole else block.values[:_MOST_ROWS]
    n_rows, n_columns = values.shape
    largest = float(np.nanmax(np.abs(values))) or 1.0
    names = [lettering.fit(printable(name, 40), 12.5, 3 * _NAMES_PX) for name in block.rows[:n_rows]]
    names_px = max(_NAMES_PX, *(math.ceil(lettering.width_px(name, 12.5)) + 14 for name in names))
    room = (paper.room_px if paper.fixed else _GRID_PX) - names_px
    cell = min(64.0, room / n_columns)
    row_px = cell if block.drawn_whole else _ROW_PX
    left = layout.MARGIN_PX + names_px
    # The names of columns, as many as there is room for.
    shown = range(0, n_columns, math.ceil(_LABEL_PITCH_PX / cell))
    labels = {
        column: lettering.fit(printable(block.columns[column], 40), 12.5, _LABELS_PX) for column in shown
    }
    longest = max(lettering.width_px(label, paper.letters(12.5)) for label in labels.values())
    top = layout.MARGIN_PX + 76 + math.ceil(longest)

    page = Page(paper.width_for(left + n_columns * cell + layout.MARGIN_PX, 900), lettering)
    page.head(f"{report.model} · {block.title}", report.subtitle)

    for row in range(0, n_rows, math.ceil(_LABEL_PITCH_PX / row_px)):
        page.write(left - 8, top + (row + 0.5) * row_px, names[row], 12.5, ha="right", color=INK)
    for column, label in labels.items():
        x = left + (column + 0.5) * cell
        page.write(x, top - 8, label, 12.5, ha="center", va="bottom", rotation=90)

    # The cells and their colours: very many are one image.
    lowest = -largest if np.nanmin(values) < 0 else 0.0
    colors = TWO_WAYS if lowest else ONE_WAY
    if values.size > _MOST_CELLS:
        page.matrix((left, top, n_columns * cell, n_rows * row_px), values, colors, (lowest, largest))
    else:
        corners = [
            (left + column * cell, top + row * row_px) for row, column in np.ndindex(n_rows, n_columns)
        ]
        numbers = values.ravel().tolist()
        cells = page.draw_cells(
            corners, (cell, row_px), numbers, colors, lambda value: (value - lowest) / (largest - lowest)
        )
        size = paper.letters(12.0)
        for ((x, y, width, height), color), number in (
            zip(cells, numbers, strict=True) if cell >= 3.2 * size else ()
        ):
            page.numbers(
                [Number(x + width / 2, y + height / 2, small_number(number), size, ink_on(color))]
            )
    if block.framed is not None:
        framed = np.argwhere(block.framed[:n_rows]).tolist()
        boxes = [(left + column * cell, top + row * row_px, cell, row_px) for row, column in framed]
        page.outline(boxes, INK, min(1.8, cell * 0.3))
    bar_y = top + n_rows * row_px + 26
    ticks = {tick: small_number(tick) for tick in (*([lowest] if lowest else []), 0.0, largest)}
    half_tick = lettering.width_px(ticks[largest], paper.letters(layout.CAPTION_PX)) / 2
    bar_width = min(300.0, room - half_tick)
    page.draw_scale((left, bar_y, bar_width, 12), colors, (lowest, largest), ticks=ticks)
    page.finish(bar_y + 50, [*block.notes, *report.footer])
    return page
