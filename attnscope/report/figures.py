"""Draw a report as figures: choose the function that draws each type of block, and draw grids.

`drawing.files` writes the pages as PNG, SVG and PDF files.
"""

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from attnscope.arrays import Floats
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
from attnscope.report.numbers import format_small
from attnscope.report.trends import draw_trends
from attnscope.report.wording import printable
from attnscope.results.storage import iterate_texts

_MAX_ROWS = 20
"""The most rows of a grid that are drawn, unless `Grid.is_drawn_whole`."""

_MIN_NAME_PITCH_PX = 15
"""The least distance between two written names. Where cells are smaller, only every n-th row or column has its name."""

_MAX_SEPARATE_CELLS = 10_000
"""A grid of more cells is drawn as one image, without numbers."""

_GRID_PX = 1500
"""The width of a grid on a screen, with the names of its rows."""

_MAX_CELL_PX = 64.0
"""The largest width of a cell."""

_ROW_PX = 26.0
"""The height of a row, unless cells are square."""

_MIN_ROW_NAMES_PX = 110
"""The least width for the names of rows. Longer names get up to three times this width, then they are shortened."""

_MAX_COLUMN_NAMES_PX = 96
"""The largest height of the names of columns, which are written upwards."""

_NAME_FONT_PX = 12.5
"""The font size of the names of rows and columns."""


def pages(
    result: Any, style: Style = DEFAULT_STYLE, **options: Any
) -> Iterator[tuple[str, FigureRenderer]]:
    """Yield the pages of the figures of a result, each with the name of its file without suffix.

    Args:
        result: A `results.Result`.
        style: The style of all figures.
        options: Options of its `report`, such as the order of a ranking; None = the default of the option.

    Raises:
        AttnscopeError: There is nothing to draw.
    """
    if result.is_empty:
        raise AttnscopeError(f"{result.record_kind().with_article} without heads has nothing to draw")
    given_options = {name: value for name, value in options.items() if value is not None}
    report = result.report(**given_options)
    blocks_by_figure = report.blocks_by_figure()
    lettering = choose_lettering(_iterate_shown_texts(report), style.paper)
    # A figure's name may come from a file, and must not be a path that leads out of the folder.
    stems = number_duplicates(re.sub(r"[^A-Za-z0-9_-]", "-", name)[:80] for name in blocks_by_figure)
    for stem, blocks in zip(stems, blocks_by_figure.values(), strict=True):
        for number, page in enumerate(_draw_figure(report, blocks, lettering), 1):
            yield stem if number == 1 else f"{stem}-{number}", page


def _draw_figure(
    report: Report, blocks: Sequence[Any], lettering: Lettering
) -> Iterable[FigureRenderer]:
    """Return the pages of a figure, whose blocks are all of one type. Only `HeadMap` and `Trends` may be several."""
    first_block: Block = blocks[0]
    match first_block:
        case HeadMap():
            return draw_head_maps(report, blocks, lettering)
        case Trends():
            return [draw_trends(report, blocks, lettering)]
        case Graph():
            return [draw_graph(report, first_block, lettering)]
        case Grid():
            return [_draw_grid(report, first_block, lettering)]
        case _:
            # Any other block with a figure is a `CustomBlock`, which draws itself.
            return [blocks[0].view.draw(report, lettering)]


def _iterate_shown_texts(report: Report) -> Iterator[str]:
    """Yield all texts that figures may show, so that fonts can be chosen that have all their letters."""
    yield from (report.model, report.subtitle, report.source, *report.footer)
    for block in report.blocks:
        if block.figure:
            yield from iterate_texts(vars(block))


def _draw_grid(report: Report, block: Grid, lettering: Lettering) -> FigurePage:
    """Draw a matrix as coloured cells, with names at the left and above, and numbers where they have room."""
    paper = lettering.paper
    values = block.values if block.is_drawn_whole else block.values[:_MAX_ROWS]
    n_rows, n_columns = values.shape

    # The names of rows, whose width decides how much is left for the cells, then the size of cells in pixels.
    row_names = [
        lettering.fit(printable(name, 40), _NAME_FONT_PX, 3 * _MIN_ROW_NAMES_PX)
        for name in block.rows[:n_rows]
    ]
    widest_px = max(lettering.width_px(name, _NAME_FONT_PX) for name in row_names)
    row_names_px = max(_MIN_ROW_NAMES_PX, math.ceil(widest_px) + 14)
    cells_room_px = (paper.room_px if paper.is_fixed_width else _GRID_PX) - row_names_px
    cell_px = min(_MAX_CELL_PX, cells_room_px / n_columns)
    row_px = cell_px if block.is_drawn_whole else _ROW_PX
    left = layout.MARGIN_PX + row_names_px

    # The names of columns by their index: only every n-th column has its name if cells are narrow.
    column_names = {}
    column_step = math.ceil(_MIN_NAME_PITCH_PX / cell_px)
    for column in range(0, n_columns, column_step):
        column_names[column] = lettering.fit(
            printable(block.columns[column], 40), _NAME_FONT_PX, _MAX_COLUMN_NAMES_PX
        )
    longest_px = max(
        lettering.width_px(column_name, paper.legible_px(_NAME_FONT_PX))
        for column_name in column_names.values()
    )
    top = layout.MARGIN_PX + 76 + math.ceil(longest_px)

    # The page with the names, each at the middle of its row or column.
    cells_width_px = n_columns * cell_px
    page = FigurePage(paper.figure_width_px(left + cells_width_px + layout.MARGIN_PX, 900), lettering)
    page.write_header(f"{report.model} · {block.title}", report.subtitle)
    for row in range(0, n_rows, math.ceil(_MIN_NAME_PITCH_PX / row_px)):
        y = top + (row + 0.5) * row_px
        page.write(left - 8, y, row_names[row], _NAME_FONT_PX, ha="right", color=INK)
    for column, column_name in column_names.items():
        x = left + (column + 0.5) * cell_px
        page.write(x, top - 8, column_name, _NAME_FONT_PX, ha="center", va="bottom", rotation=90)

    # The ends of the colour scale. It is symmetric about 0 if any number is negative, else it begins at 0.
    max_magnitude = float(np.nanmax(np.abs(values))) or 1.0
    has_two_signs = bool(np.nanmin(values) < 0)
    limits = (-max_magnitude if has_two_signs else 0.0, max_magnitude)
    cmap = TWO_WAYS if has_two_signs else ONE_WAY
    if values.size > _MAX_SEPARATE_CELLS:
        page.draw_matrix((left, top, cells_width_px, n_rows * row_px), values, cmap, limits)
    else:
        _draw_numbered_cells(page, (left, top), (cell_px, row_px), values, cmap, limits)
    if block.framed_cells is not None:
        framed_positions = np.argwhere(block.framed_cells[:n_rows]).tolist()
        boxes = [
            (left + column * cell_px, top + row * row_px, cell_px, row_px)
            for row, column in framed_positions
        ]
        page.draw_outlines(boxes, INK, min(1.8, cell_px * 0.3))

    # The colour bar. The number at its right end is centred on the end, so half of the number sticks out.
    bar_y = top + n_rows * row_px + 26
    ticks = {tick: format_small(tick) for tick in sorted({*limits, 0.0})}
    half_tick_px = lettering.width_px(ticks[max_magnitude], paper.legible_px(layout.CAPTION_PX)) / 2
    page.draw_colour_bar(
        (left, bar_y, min(300.0, cells_room_px - half_tick_px), 12), cmap, limits, ticks=ticks
    )
    page.end_with_notes(bar_y + 50, [*block.notes, *report.footer])
    return page


def _draw_numbered_cells(
    page: FigurePage,
    corner: tuple[float, float],
    cell_size: tuple[float, float],
    values: Floats,
    cmap: str,
    limits: tuple[float, float],
) -> None:
    """Draw the cells of a grid, with their numbers if they are wide enough. `values` is (row, column)."""
    left, top = corner
    width, height = cell_size
    low, high = limits
    # The corners and values of all cells, row by row: (row * column,).
    corners = [(left + column * width, top + row * height) for row, column in np.ndindex(values.shape)]
    flat_values = values.ravel().tolist()
    cells = page.draw_cells(
        corners, cell_size, flat_values, cmap, lambda value: (value - low) / (high - low)
    )
    # A number such as -0.03 is about three times as wide as its font size.
    size = page.paper.legible_px(12.0)
    if width < 3.2 * size:
        return
    numbers = []
    for (box, color), value in zip(cells, flat_values, strict=True):
        x, y, box_width, box_height = box
        center = (x + box_width / 2, y + box_height / 2)
        numbers.append(CellNumber(*center, format_small(value), size, text_color_on(color)))
    page.write_numbers(numbers)
