"""Draw a report as figures, which become PNG, SVG and PDF files: choose what draws each block, and draw grids.

`drawing.files` writes the pages.
"""

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from attnscope.drawing import layout
from attnscope.drawing.canvas import INK, FigureRenderer
from attnscope.drawing.files import number_duplicates
from attnscope.drawing.inks import text_color_on
from attnscope.drawing.lettering import Lettering, choose_lettering
from attnscope.drawing.page import CellNumber, FigurePage
from attnscope.drawing.style import DEFAULT_STYLE, Style
from attnscope.errors import AttnscopeError
from attnscope.report.blocks import Block, Graph, Grid, HeadMap, Report, Trends
from attnscope.report.graphs import draw_graph
from attnscope.report.head_maps import ONE_WAY, TWO_WAYS, draw_head_maps
from attnscope.report.numbers import small_number
from attnscope.report.trends import draw_trends
from attnscope.report.wording import printable
from attnscope.results.storage import iterate_texts
from attnscope.results.table import Floats

_MAX_ROWS = 20
"""Most rows of a grid that are drawn, unless it is drawn whole."""

_LABEL_PITCH_PX = 15
"""Least distance between the names of two rows or columns; where cells are smaller, only each n-th name is written."""

_MAX_CELLS = 10_000
"""A grid of more cells is drawn as one image, without numbers."""

_GRID_PX = 1500
"""Width of a grid with the names of its rows on a screen."""

_CELL_PX = 64.0
"""Most width of a cell."""

_ROW_PX = 26.0
"""Height of a row, unless cells are square."""

_NAMES_PX = 110
"""Least room for the names of rows, at the left. It grows up to three times as much, then names are shortened."""

_LABELS_PX = 96
"""Most height of the names of columns, which are written upwards."""

_LETTER_PX = 12.5
"""Size of the names of rows and columns."""


def pages(
    result: Any, style: Style = DEFAULT_STYLE, **shown: Any
) -> Iterator[tuple[str, FigureRenderer]]:
    """Yield the pages of the figures of a result, each with the name of its file without ending.

    Args:
        result: A `results.Result`.
        style: The style of all figures.
        shown: Arguments of its `report`; those that are None are left out.

    Raises:
        AttnscopeError: There is nothing to draw.
    """
    if result.is_empty:
        raise AttnscopeError(f"{result.record_kind().with_article} without heads has nothing to draw")
    chosen = {name: value for name, value in shown.items() if value is not None}
    report = result.report(**chosen)
    figures = report.figures()
    lettering = choose_lettering(_texts(report), style.paper)
    # A figure's name may come from a file, and must not be a path that leads out of the folder.
    stems = number_duplicates(re.sub(r"[^A-Za-z0-9_-]", "-", name)[:80] for name in figures)
    for stem, blocks in zip(stems, figures.values(), strict=True):
        for number, page in enumerate(_draw(report, blocks, lettering), 1):
            yield stem if number == 1 else f"{stem}-{number}", page


def _draw(report: Report, blocks: Sequence[Any], lettering: Lettering) -> Iterable[FigureRenderer]:
    """Return the pages of a figure, whose blocks are all of one type. Only maps of heads and trends may be several."""
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
    """Yield all texts that figures may show, so that fonts with all their letters are chosen."""
    yield from (report.model, report.subtitle, report.source, *report.footer)
    for block in report.blocks:
        if block.figure:
            yield from iterate_texts(vars(block))


def _draw_grid(report: Report, block: Grid, lettering: Lettering) -> FigurePage:
    """Draw a matrix as coloured cells, with names at the left and above, and numbers where they have room."""
    paper = lettering.paper
    values = block.values if block.drawn_whole else block.values[:_MAX_ROWS]
    n_rows, n_columns = values.shape

    # The names of rows, whose width decides how much is left for the cells, and the size of cells.
    names = [
        lettering.fit(printable(name, 40), _LETTER_PX, 3 * _NAMES_PX) for name in block.rows[:n_rows]
    ]
    widest = max(lettering.width_px(name, _LETTER_PX) for name in names)
    names_px = max(_NAMES_PX, math.ceil(widest) + 14)
    room = (paper.room_px if paper.is_fixed_width else _GRID_PX) - names_px
    cell_px = min(_CELL_PX, room / n_columns)
    row_px = cell_px if block.drawn_whole else _ROW_PX
    left = layout.MARGIN_PX + names_px

    # The names of columns: each n-th if cells are narrow.
    labels = {}
    step = math.ceil(_LABEL_PITCH_PX / cell_px)
    for column in range(0, n_columns, step):
        labels[column] = lettering.fit(printable(block.columns[column], 40), _LETTER_PX, _LABELS_PX)
    longest = max(lettering.width_px(label, paper.legible_px(_LETTER_PX)) for label in labels.values())
    top = layout.MARGIN_PX + 76 + math.ceil(longest)

    # The page with the names, each at the middle of its row or column.
    width = n_columns * cell_px
    page = FigurePage(paper.figure_width_px(left + width + layout.MARGIN_PX, 900), lettering)
    page.write_header(f"{report.model} · {block.title}", report.subtitle)
    for row in range(0, n_rows, math.ceil(_LABEL_PITCH_PX / row_px)):
        page.write(left - 8, top + (row + 0.5) * row_px, names[row], _LETTER_PX, ha="right", color=INK)
    for column, label in labels.items():
        x = left + (column + 0.5) * cell_px
        page.write(x, top - 8, label, _LETTER_PX, ha="center", va="bottom", rotation=90)

    # Colours: from the largest magnitude below 0 to that above 0 if any number is negative, else from 0.
    largest = float(np.nanmax(np.abs(values))) or 1.0
    has_two_signs = bool(np.nanmin(values) < 0)
    limits = (-largest if has_two_signs else 0.0, largest)
    colors = TWO_WAYS if has_two_signs else ONE_WAY
    if values.size > _MAX_CELLS:
        page.draw_matrix((left, top, width, n_rows * row_px), values, colors, limits)
    else:
        _draw_cells(page, (left, top), (cell_px, row_px), values, colors, limits)
    if block.framed is not None:
        framed = np.argwhere(block.framed[:n_rows]).tolist()
        boxes = [
            (left + column * cell_px, top + row * row_px, cell_px, row_px) for row, column in framed
        ]
        page.draw_outlines(boxes, INK, min(1.8, cell_px * 0.3))

    # The colour bar. Its last number is centred on its end, so that half of it needs room at the right.
    bar_y = top + n_rows * row_px + 26
    ticks = {tick: small_number(tick) for tick in sorted({*limits, 0.0})}
    half_tick = lettering.width_px(ticks[largest], paper.legible_px(layout.CAPTION_PX)) / 2
    page.draw_colour_bar((left, bar_y, min(300.0, room - half_tick), 12), colors, limits, ticks=ticks)
    page.end_with_notes(bar_y + 50, [*block.notes, *report.footer])
    return page


def _draw_cells(
    page: FigurePage,
    corner: tuple[float, float],
    cell: tuple[float, float],
    values: Floats,
    colors: str,
    limits: tuple[float, float],
) -> None:
    """Draw the cells of a grid, (row, column), one by one, with their numbers if they are wide enough."""
    left, top = corner
    width, height = cell
    low, high = limits
    # Cell by cell, row by row.
    corners = [(left + column * width, top + row * height) for row, column in np.ndindex(values.shape)]
    flat_values = values.ravel().tolist()
    cells = page.draw_cells(
        corners, cell, flat_values, colors, lambda value: (value - low) / (high - low)
    )
    # A number such as -0.03 needs about three times the size of its letters.
    size = page.paper.legible_px(12.0)
    if width < 3.2 * size:
        return
    numbers = []
    for (box, color), value in zip(cells, flat_values, strict=True):
        x, y, box_width, box_height = box
        center = (x + box_width / 2, y + box_height / 2)
        numbers.append(CellNumber(*center, small_number(value), size, text_color_on(color)))
    page.write_numbers(numbers)
