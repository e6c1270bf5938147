"""Draw a report as figures: one function per type of block. The figures become PNG, SVG and PDF files."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from attnscope.drawing import layout
from attnscope.drawing.canvas import INK, Drawing, matplotlib_defaults
from attnscope.drawing.files import distinct
from attnscope.drawing.lettering import Lettering, lettering_for
from attnscope.drawing.page import Page
from attnscope.drawing.plots import Sheet, draw_line, finish_axes, letter_axes, write_foot
from attnscope.drawing.style import USUAL, Style
from attnscope.errors import AttnscopeError
from attnscope.report.blocks import Block, Curves, Graph, Grid, HeadMap, Report, Special, Trends
from attnscope.report.choices import every_nth
from attnscope.report.graphs import draw_graph
from attnscope.report.head_maps import ONE_WAY, TWO_WAYS, draw_head_map, draw_small_maps
from attnscope.report.numbers import small_number
from attnscope.report.trends import draw_trends
from attnscope.report.wording import printable

_MOST_ROWS = 20
"""Rows of a grid that are drawn."""

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
        drawn: Iterable[Drawing]
        if isinstance(blocks[0], HeadMap) and len(blocks) > 1:
            drawn = draw_small_maps(report, blocks, lettering)
        else:
            drawn = [_DRAWN[type(blocks[0])](report, blocks, lettering)]
        for number, page in enumerate(drawn, 1):
            yield stem if number == 1 else f"{stem}-{number}", page


def _texts(report: Report) -> Iterator[str]:
    """Return all texts that figures may show, to find fonts for them."""
    yield from (report.model, report.subtitle, report.source, *report.footer)
    for block in report.blocks:
        if block.figure:
            yield from _texts_in(vars(block))


def _texts_in(value: Any) -> Iterator[str]:
    """Return all texts in a value, and in what it holds."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from _texts_in(list(value))
        yield from _texts_in(list(value.values()))
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _texts_in(each)
    elif isinstance(value, np.ndarray) and value.dtype.kind == "U":
        yield from map(str, value.ravel())
    elif hasattr(value, "__dict__"):
        yield from _texts_in(vars(value))


def _head_map(report: Report, blocks: Sequence[HeadMap], lettering: Lettering) -> Drawing:
    (block,) = blocks
    return draw_head_map(report, block, lettering)


def _graph(report: Report, blocks: Sequence[Graph], lettering: Lettering) -> Drawing:
    (block,) = blocks
    return draw_graph(report, block, lettering)


def _grid(report: Report, blocks: Sequence[Grid], lettering: Lettering) -> Page:
    """Draw a matrix as coloured cells, with names at the left and above, and numbers where they have room.

    If no number is below 0, the scale begins with 0, and the darkest cell is the largest.
    """
    (block,) = blocks
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
    shown = every_nth(n_columns, max(1, int(n_columns * cell / 15)))
    labels = {column: lettering.fit(printable(block.columns[column], 40), 12.5, _LABELS_PX) for column in shown}
    longest = max(lettering.width_px(label, paper.letters(12.5)) for label in labels.values())
    top = layout.MARGIN_PX + 76 + math.ceil(longest)

    page = Page(paper.width_for(left + n_columns * cell + layout.MARGIN_PX, 900), lettering)
    page.head(f"{report.model} · {block.title}", report.subtitle)

    for row in every_nth(n_rows, max(1, int(n_rows * row_px / 15))):
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
        numbers = dict(np.ndenumerate(values))
        cells = page.grid_cells(
            (left, top), (cell, row_px), numbers, colors, lambda value: (value - lowest) / (largest - lowest)
        )
        size = paper.letters(12.0)
        if cell >= 3.2 * size:
            page.number_cells(list(cells.values()), [small_number(value) for value in numbers.values()], size)
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


@matplotlib_defaults()
def _curves(report: Report, blocks: Sequence[Curves], lettering: Lettering) -> Drawing:
    """Draw few lines over one axis, their names below it."""
    (block,) = blocks

    # Sizes in inches, from the top: title, plot, its axis and the names of lines, notes.
    sheet = Sheet.on(lettering.paper, lettering)
    foot = write_foot([*block.notes, *report.problems], sheet)
    plot_height = sheet.width * (0.6 if sheet.stacked else 0.4)
    below = (0.75 + 0.22 * len(block.series)) * sheet.size
    height = sheet.above + 0.4 * sheet.size + plot_height + below + foot.height
    left = 0.6 * sheet.size / sheet.width
    bottom = (foot.height + below) / height

    subtitle = lettering.fit(report.subtitle, 11 * 96 / 72, sheet.width * 92 / sheet.size)
    figure = sheet.open_figure(height, f"{report.model} · {block.title}", subtitle)
    axes = figure.add_axes((left, bottom, 0.97 - left, plot_height / height))
    # Ranges of many lines lie below single lines.
    for series in sorted(block.series, key=lambda series: not series.is_range):
        draw_line(axes, block.x, series.points, series.color or INK, sheet, printable(series.name))
    axes.set_xlim(block.x[0], block.x[-1])
    if block.logarithmic:
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        powers = [x for x in block.x if math.log2(x).is_integer()][::2]
        axes.set_xticks(powers, [f"{x:,.0f}" if x < 1024 else f"{x // 1024:,.0f} k" for x in powers])
    else:
        axes.set_ylim(block.floor, block.ceiling)
        low, high = axes.get_ylim()
        axes.set_yticks([tick for tick in axes.get_yticks() if low <= tick <= high])
        axes.locator_params(axis="x", integer=True)
    finish_axes(axes, sheet)
    letter_axes(axes, block.y, sheet, across=block.across)
    if any(series.name for series in block.series):
        sheet.add_legend(axes, (-0.01, -0.45 * sheet.size / plot_height))
    foot.write(figure)
    return Drawing(figure, lettering.families)


def _special(report: Report, blocks: Sequence[Special], lettering: Lettering) -> Any:
    return blocks[0].view.draw(report, lettering)


_DRAWN: dict[type[Block], Callable[[Report, Any, Lettering], Drawing]] = {
    HeadMap: _head_map,
    Grid: _grid,
    Graph: _graph,
    Curves: _curves,
    Trends: draw_trends,
    Special: _special,
}
