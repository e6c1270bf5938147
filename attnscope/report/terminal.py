"""Show a report in the terminal: the answer, the blocks, how to read them. One function per type of block."""

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
    Graph,
    Grid,
    HeadMap,
    Note,
    Ranking,
    Report,
    Special,
    Trends,
    Words,
)
from attnscope.report.matrix import head_grid, matrix, room_for
from attnscope.report.numbers import (
    find_moving,
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

PALE = "#ffffff"
DARK = "#08519c"
DARK_NEGATIVE = "#b2182b"
"""The colours of 0, of the largest number, and of the largest one below 0."""

_CELL = 8
"""Letters of a cell of a map of heads, with its number."""

_MOST_LINES = 8
"""Lines over the steps of a training that are printed without --all."""

_NAME_CELLS = 14
"""Width of the column of names beside steps."""


def show(result: Any, console: Console, *, every: bool | None = None, **options: Any) -> RenderableType:
    """Return what the terminal prints of a result.

    Args:
        result: A `results.Result`.
        console: What it is printed on.
        every: Whether all that was found is printed, as with --all.
        options: What the result's own `report` takes, such as the order of a ranking; None = as usual.
    """
    chosen = {name: value for name, value in options.items() if value is not None}
    return render(result.report(**chosen), console, every=bool(every))


def render(report: Report, console: Console, *, every: bool = False) -> RenderableType:
    """Return a report for rich to print: the answer first, then its blocks, then how to read them."""
    parts: list[RenderableType] = []
    # The answer, its first line bold.
    for row, line in enumerate(report.answer):
        parts.append(Text(line, style="" if row else "bold"))

    # The blocks, an empty line between them.
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

    # How to read them, and what else there is.
    below = [*report.guide, report.source, *(report.notes if every else []), *report.problems]
    named = ", ".join(dict.fromkeys(filter(None, left_out)))
    if named:
        below.append(f"--all also prints: {named}")
    return Group(*parts, Text(), *dim_lines(below))


def _head_map(block: HeadMap, console: Console, every: bool) -> list[RenderableType]:
    """Draw numbers on shaded cells, one grid per kind of attention."""
    parts: list[RenderableType] = []
    kinds = list(dict.fromkeys(block.heads["kind"].tolist()))
    for kind in kinds:
        heads = block.heads.select(block.heads["kind"] == kind)
        if len(kinds) > 1:
            parts.append(Text(f"{printable(kind)} attention", style="bold"))
        parts.append(draw_heads(heads, block.column, console.width))
    return parts


def draw_heads(heads: Table, column: str, width: int) -> Text:
    """Return a grid of shaded numbers, layers down and heads across.

    Where a layer has more heads than the terminal has room for, cells have tenths of the largest number.
    """
    values = dict(zip(heads.places, heads[column].tolist(), strict=True))
    layers = sorted({layer for layer, _ in values})
    head_indices = sorted({head for _, head in values})
    largest = max((abs(value) for value in values.values() if math.isfinite(value)), default=0.0) or 1.0
    write = writer_for(heads, column)
    has_numbers = len(head_indices) * _CELL <= room_for(layers, width)
    cell = _CELL if has_numbers else 2

    def draw(text: Text, layer: int, head: int) -> None:
        value = values.get((layer, head), math.nan)
        written = write(value) if has_numbers else " "
        if not math.isfinite(value):
            text.append(f"{written:>{cell - 1}}", style="dim").append(" ")
            return
        share = abs(value) / largest
        if not has_numbers:
            written = f"{min(9, int(share * 10))}"
        # Small numbers get some colour, too.
        style = shade(share**0.7, PALE, DARK_NEGATIVE if value < 0 else DARK)
        text.append(f"{written:>{cell - 1}}", style=style).append(" ")

    text = head_grid(layers, head_indices, cell, width, draw)
    if not has_numbers:
        text.append(f"\ntenths of the largest, {small_number(largest)}", style="dim")
    return text


def _ranking(block: Ranking, console: Console, every: bool) -> list[RenderableType]:
    """Draw a table of the first rows, each number with its interval."""
    # Without an order all rows are printed.
    order = range(len(block.names)) if block.order is None else block.order
    rows = list(order if every or block.order is None else order[: block.most])
    widest = max((len(block.names[row]) for row in rows), default=1)
    # Names stay whole up to 30 letters, then wrap.
    columns = [
        TextColumn(
            block.what,
            lambda row: printable(block.names[row]),
            style="bold",
            wraps=widest > 30,
            least=min(widest, 30),
        )
    ]
    # Columns drop from the right where the terminal is narrow; the first always stays.
    for column_index, column in enumerate(block.columns):
        drop = column_index + 1 if column_index else 0
        if isinstance(column, Words):
            columns.append(_words(column, drop))
        else:
            columns += number_columns(block.table, column, drop, rows)
    parts: list[RenderableType] = [TextTable(columns, rows, gap=2)]
    # Say how many rows are hidden.
    if len(rows) < len(order):
        n_more = amount(len(order) - len(rows), f"more {block.noun or block.what}")
        parts.append(Text(f"and {n_more}: --all prints all", style="dim"))
    return parts


def _words(column: Words, drop: int) -> TextColumn:
    """Return a column of words."""
    return TextColumn(
        column.title,
        lambda row: printable(column.texts[row], most=1000),
        wraps=column.wraps,
        least=12 if column.wraps else 1,
        drop=drop,
        right=column.right,
    )


def number_columns(table: Table, name: str, drop: int, rows: Sequence[int]) -> list[TextColumn]:
    """Return a column of the numbers of some rows, and one of their intervals where any of the rows has one."""
    title = printable(table.columns[name].head)
    write = writer_for(table, name)
    # A number has three parts, (row, 3): value and both ends of its interval. Other kinds have a value alone, (row, 1).
    parts = table.interval(name) if table.columns[name].kind == "number" else table[name][:, None]
    values = TextColumn(
        title, lambda row: write(parts[row, 0]), right=True, wraps=len(title) > 20, drop=drop
    )
    if parts.shape[1] == 1 or not np.isfinite(parts[list(rows), 1]).any():
        return [values]
    # The interval may be dropped even where its number stays.
    ends = TextColumn(
        "95% interval",
        lambda row: interval(parts[row, 1], parts[row, 2], write),
        right=True,
        style="dim",
        drop=drop or 1,
    )
    return [values, ends]


def _grid(block: Grid, console: Console, every: bool) -> list[RenderableType]:
    """Draw a matrix of numbers."""
    most = len(block.rows) if every else block.most
    return [matrix(block.values[:most], block.rows[:most], block.columns, console, bold=True)]


def _trends(block: Trends, console: Console, every: bool) -> list[RenderableType]:
    """Draw the lines that change most over the steps, shaded from their least to their largest value."""
    values = block.points[..., 0]  # (step, line), without intervals
    n_lines = len(block.names)
    shown = list(range(n_lines)) if every else find_moving(values, _MOST_LINES)
    if not np.isfinite(values[:, shown]).any():
        return [Text(f"{block.y}: undefined for all {block.what} on these texts", style="dim")]
    low = min(float(np.nanmin(values[:, shown])), 0.0)
    high = float(np.nanmax(values[:, shown]))

    def cell(step: int, line: int) -> Text:
        value = float(values[step, line])
        if n_lines == 1 or not math.isfinite(value):
            return Text(number(value))
        return Text(number(value), style=shade((value - low) / ((high - low) or 1.0), PALE, DARK))

    # As many steps as have room; the columns of names are as wide in all tables, so that steps stand below each other.
    texts = [step_text(step) for step in block.steps]
    texts[0] = f"step {texts[0]}"
    width = max(6, *(len(text) + 2 for text in texts))
    steps = spread_evenly(len(texts), max(2, (console.width - _NAME_CELLS) // width))
    names = TextColumn(
        (block.what if block.heading else block.y).ljust(_NAME_CELLS - 2),
        lambda line: printable(block.names[line]),
        wraps=True,
        least=_NAME_CELLS - 2,
    )
    columns = [names, *(TextColumn(texts[step], partial(cell, step), right=True) for step in steps)]
    parts: list[RenderableType] = [TextTable(columns, shown, gap=1)]
    if len(shown) < n_lines:
        selection = "changes most" if len(texts) > 1 else "is largest"
        parts.append(
            Text(f"the {len(shown)} of {n_lines} {block.what} in which it {selection}", style="dim")
        )
    if len(steps) < len(texts):
        parts.append(
            Text(f"{len(steps)} of {len(texts)} steps have room in {console.width} columns", style="dim")
        )
    return parts


_DRAWERS: dict[type[Block], Callable[[Any, Console, bool], list[RenderableType]]] = {
    HeadMap: _head_map,
    Ranking: _ranking,
    Grid: _grid,
    Graph: lambda block, console, every: [],  # a table of its links stands beside it
    Trends: _trends,
    Note: lambda block, console, every: [Text(line) for line in block.lines],
    Special: lambda block, console, every: list(block.view.show(console, every=every)),
}
