"""Show a report in the terminal: the answer, its blocks, how to read them. One function draws each type of block."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.text import Text

from attnscope.errors import amount
from attnscope.report.blocks import (
    Block,
    CustomBlock,
    Graph,
    Grid,
    HeadMap,
    Note,
    Ranking,
    Report,
    Trends,
    WordsColumn,
)
from attnscope.report.matrix import draw_head_grid, draw_matrix, room_for_heads
from attnscope.report.numbers import (
    find_most_changed,
    interval,
    number,
    small_number,
    spread_evenly,
    step_text,
    writer_for,
)
from attnscope.report.plain_text import dim_lines, shade
from attnscope.report.table import TextColumn, TextTable
from attnscope.report.wording import printable
from attnscope.results.table import Table

_PALE = "#ffffff"
"""The background of 0."""

_DARK = "#08519c"
"""The background of the largest number."""

_DARK_NEGATIVE = "#b2182b"
"""The background of a negative number as far from 0 as the largest."""

_NUMBER_CELLS = 8
"""The width of a cell of a map of heads that has room for its number."""

_MAX_TRENDS = 8
"""How many lines of a `Trends` block are printed without --all."""

_NAME_CELLS = 14
"""The width of the column of names in a `Trends` block, with the gap behind it."""


def show(result: Any, console: Console, *, every: bool | None = None, **options: Any) -> RenderableType:
    """Return what the terminal prints of a result.

    Args:
        result: A `results.Result`.
        console: The console that prints it.
        every: Whether all blocks and rows are printed, as with --all; None = no.
        options: Options of the result's own `report`, such as the order of a ranking; None = its default.
    """
    chosen = {name: value for name, value in options.items() if value is not None}
    return render(result.report(**chosen), console, every=bool(every))


def render(report: Report, console: Console, *, every: bool = False) -> RenderableType:
    """Return a report for rich to print: the answer, the blocks, and how to read them; `every` is as in `show`."""
    parts: list[RenderableType] = []
    for row, line in enumerate(report.answer):
        parts.append(Text(line, style="" if row else "bold"))

    # The blocks, each after an empty line; some have nothing to print.
    left_out = []
    for block in report.blocks:
        if block.printed == "never":
            continue
        if block.printed == "with --all" and not every:
            left_out.append(block.heading)
            continue
        drawn = _DRAWERS[type(block)](block, console, every)
        if not drawn:
            continue
        if parts:
            parts.append(Text())
        if block.heading:
            parts.append(Text(block.heading, style="bold"))
        parts += [*drawn, *dim_lines(block.notes)]

    # How to read them, where they come from, and what --all adds.
    below = [*report.guide, report.source]
    if every:
        below += report.notes
    below += report.problems
    headings = ", ".join(dict.fromkeys(filter(None, left_out)))
    if headings:
        below.append(f"--all also prints: {headings}")
    return Group(*parts, Text(), *dim_lines(below))


def _head_map(block: HeadMap, console: Console, every: bool) -> list[RenderableType]:
    """Return a grid of shaded numbers for each kind of attention, under its name if there are several."""
    parts: list[RenderableType] = []
    kinds = list(dict.fromkeys(block.heads["kind"].tolist()))
    for kind in kinds:
        heads = block.heads.select(block.heads["kind"] == kind)
        if len(kinds) > 1:
            parts.append(Text(f"{printable(kind)} attention", style="bold"))
        parts.append(_shaded_grid(heads, block.column, console.width))
    return parts


def _shaded_grid(heads: Table, column: str, width: int) -> Text:
    """Return a column of a table of heads as a grid of shaded numbers, layers down and heads across.

    If the numbers of a layer have no room beside each other, each cell has one digit: tenths of the largest number.
    """
    values = dict(zip(heads.layer_heads, heads[column].tolist(), strict=True))
    layers = np.unique(heads["layer"]).tolist()
    head_indices = np.unique(heads["head"]).tolist()
    sizes = np.abs(heads[column])
    largest = float(sizes[np.isfinite(sizes)].max(initial=0.0)) or 1.0
    write = writer_for(heads, column)
    is_wide = len(head_indices) * _NUMBER_CELLS <= room_for_heads(layers, width)
    cell = _NUMBER_CELLS if is_wide else 2

    def append_cell(text: Text, layer: int, head: int) -> None:
        value = values.get((layer, head), math.nan)
        if not math.isfinite(value):
            undefined = write(value) if is_wide else ""
            text.append(f"{undefined:>{cell - 1}}", style="dim").append(" ")
            return
        share = abs(value) / largest
        number_text = write(value) if is_wide else str(min(9, int(share * 10)))
        # The power gives small numbers some colour, too.
        style = shade(share**0.7, _PALE, _DARK_NEGATIVE if value < 0 else _DARK)
        text.append(f"{number_text:>{cell - 1}}", style=style).append(" ")

    text = draw_head_grid(layers, head_indices, cell, width, append_cell)
    if not is_wide:
        text.append(f"\ntenths of the largest, {small_number(largest)}", style="dim")
    return text


def _ranking(block: Ranking, console: Console, every: bool) -> list[RenderableType]:
    """Return a table of the first rows, each number with its interval, and how many rows it leaves out."""
    rows = block.shown(every=every)
    n_left_out = len(block.shown(every=True)) - len(rows)
    # Names of up to 30 characters stay on one line; longer ones wrap in a narrow terminal.
    widest = max((len(block.names[row]) for row in rows), default=1)
    names = TextColumn(
        block.header,
        lambda row: printable(block.names[row]),
        style="bold",
        wraps=widest > 30,
        least=min(widest, 30),
    )
    columns = [names]
    # A narrow terminal drops the columns of the largest `drop` first, here the last ones; 0 = never, here the first.
    for index, column in enumerate(block.columns):
        drop = index + 1 if index else 0
        if isinstance(column, WordsColumn):
            columns.append(_text_column(column, drop))
        else:
            columns += _number_columns(block.table, column, drop, rows)
    parts: list[RenderableType] = [TextTable(columns, rows, gap=2)]
    if n_left_out:
        n_more = amount(n_left_out, f"more {block.noun or block.header}")
        parts.append(Text(f"and {n_more}: --all prints all", style="dim"))
    return parts


def _text_column(column: WordsColumn, drop: int) -> TextColumn:
    """Return a column of texts; see `TextColumn` for `drop`."""
    return TextColumn(
        column.title,
        lambda row: printable(column.texts[row], most=1000),
        wraps=column.wraps,
        least=12 if column.wraps else 1,
        drop=drop,
        right=column.right,
    )


def _number_columns(table: Table, name: str, drop: int, rows: Sequence[int]) -> list[TextColumn]:
    """Return a column of numbers, and a column of their 95% intervals if any of the rows has one."""
    title = printable(table.columns[name].header)
    write = writer_for(table, name)
    values = table[name]
    numbers = TextColumn(
        title, lambda row: write(values[row]), right=True, wraps=len(title) > 20, drop=drop
    )
    low = table.companion(name, "low")
    high = table.companion(name, "high")
    if not np.isfinite(low[list(rows)]).any():
        return [numbers]
    # Where numbers are never dropped (0), their intervals are dropped last (1).
    intervals = TextColumn(
        "95% interval",
        lambda row: interval(low[row], high[row], write),
        right=True,
        style="dim",
        drop=drop or 1,
    )
    return [numbers, intervals]


def _grid(block: Grid, console: Console, every: bool) -> list[RenderableType]:
    """Return a matrix of numbers."""
    n_rows = len(block.rows) if every else block.n_printed
    return [draw_matrix(block.values[:n_rows], block.rows[:n_rows], block.columns, console, bold=True)]


def _trends(block: Trends, console: Console, every: bool) -> list[RenderableType]:
    """Return a table of the lines that change most, with a shaded column for each step that has room."""
    # The values, (step, line), without the ends of their intervals.
    values = block.points[..., 0]
    n_lines = len(block.names)
    lines = list(range(n_lines)) if every else find_most_changed(values, _MAX_TRENDS)
    if not np.isfinite(values[:, lines]).any():
        return [Text(f"{block.y}: undefined for all {block.noun} on these texts", style="dim")]
    low = min(float(np.nanmin(values[:, lines])), 0.0)
    high = float(np.nanmax(values[:, lines]))

    def cell(step: int, line: int) -> Text:
        value = float(values[step, line])
        if n_lines == 1 or not math.isfinite(value):
            return Text(number(value))
        return Text(number(value), style=shade((value - low) / ((high - low) or 1.0), _PALE, _DARK))

    # A column for each step, for as many as have room. Names have the same width in all such tables of a report, so
    # that the columns of a step stand below each other.
    headers = list(map(step_text, block.steps))
    headers[0] = f"step {headers[0]}"
    width = max(6, 2 + max(map(len, headers)))
    steps = spread_evenly(len(headers), (console.width - _NAME_CELLS) // width)
    # Below a heading, which names the quantity, the column of names says what the lines are.
    title = block.noun if block.heading else block.y
    names = TextColumn(
        title.ljust(_NAME_CELLS - 2),
        lambda line: printable(block.names[line]),
        wraps=True,
        least=_NAME_CELLS - 2,
    )
    columns = [names]
    for step in steps:
        columns.append(TextColumn(headers[step], partial(cell, step), right=True))
    notes = []
    if len(lines) < n_lines:
        selection = "changes most" if len(headers) > 1 else "is largest"
        notes.append(f"the {len(lines)} of {n_lines} {block.noun} in which it {selection}")
    if len(steps) < len(headers):
        notes.append(f"{len(steps)} of {len(headers)} steps have room in {console.width} columns")
    return [TextTable(columns, lines, gap=1), *dim_lines(notes)]


_DRAWERS: dict[type[Block], Callable[[Any, Console, bool], list[RenderableType]]] = {
    HeadMap: _head_map,
    Ranking: _ranking,
    Grid: _grid,
    # A graph is drawn in figures alone; a ranking beside it lists its lines.
    Graph: lambda block, console, every: [],
    Trends: _trends,
    Note: lambda block, console, every: list(map(Text, block.lines)),
    CustomBlock: lambda block, console, every: list(block.view.show(console, every=every)),
}
"""The function that draws each type of block: `(block, console, every)`, where `every` is as in `show`."""
