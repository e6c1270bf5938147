"""Show a report in the terminal: the answer, the blocks, how to read them. Each type of block has a render function.

A render function returns renderables: texts and tables that a console of rich prints. Nothing is printed here.
"""

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
from attnscope.report.matrix import draw_head_grid, draw_matrix, find_width_for_heads
from attnscope.report.numbers import (
    choose_formatter,
    find_most_changed,
    format_interval,
    format_small,
    format_step,
    number,
    spread_evenly,
)
from attnscope.report.plain_text import dim_lines, shade
from attnscope.report.table import TextColumn, TextTable
from attnscope.report.wording import printable
from attnscope.results.table import Table

_ZERO_COLOR = "#ffffff"
"""The background of the number 0 in shaded cells."""

_POSITIVE_COLOR = "#08519c"
"""The background of the largest number in shaded cells."""

_NEGATIVE_COLOR = "#b2182b"
"""The background of a negative number as large as the largest number."""

_NUMBER_CELL_WIDTH = 8
"""The width of a cell of a map of heads that shows a number, in characters."""

_MAX_PRINTED_CURVES = 8
"""How many curves of a `Trends` block are printed without --all."""

_NAME_COLUMN_WIDTH = 14
"""The width of the column of names in a `Trends` block, with the gap of 2 after it."""


def show(result: Any, console: Console, *, every: bool | None = None, **options: Any) -> RenderableType:
    """Return what the terminal prints of a result, for rich to print.

    Args:
        result: A `results.Result`.
        console: The console that prints it.
        every: Whether all blocks and rows are printed, as with --all; None (the option is absent) = no.
        options: Options of the result's own `report`, such as the order of a ranking; None = its default.
    """
    given_options = {name: value for name, value in options.items() if value is not None}
    return render(result.report(**given_options), console, every=bool(every))


def render(report: Report, console: Console, *, every: bool = False) -> RenderableType:
    """Return what the terminal prints of a report; `every` is as in `show`."""
    parts: list[RenderableType] = []
    for index, sentence in enumerate(report.answer):
        # The first sentence, index 0, is bold.
        parts.append(Text(sentence, style="" if index else "bold"))

    # The blocks, with an empty line before each. A block without renderables, such as a graph, is skipped.
    unprinted_headings = []
    for block in report.blocks:
        if block.printed == "never":
            continue
        if block.printed == "with --all" and not every:
            unprinted_headings.append(block.heading)
            continue
        renderables = _RENDERERS[type(block)](block, console, every)
        if not renderables:
            continue
        if parts:
            parts.append(Text())
        if block.heading:
            parts.append(Text(block.heading, style="bold"))
        parts += [*renderables, *dim_lines(block.notes)]

    # How to read the blocks, which texts were studied, what failed, and what --all adds.
    footnotes = [*report.guide, report.source]
    if every:
        footnotes += report.notes
    footnotes += report.problems
    headings = ", ".join(dict.fromkeys(filter(None, unprinted_headings)))
    if headings:
        footnotes.append(f"--all also prints: {headings}")
    return Group(*parts, Text(), *dim_lines(footnotes))


def _render_head_map(block: HeadMap, console: Console, every: bool) -> list[RenderableType]:
    """Return a grid of shaded numbers for each kind of attention (encoder, decoder or cross), named if several."""
    parts: list[RenderableType] = []
    kinds = list(dict.fromkeys(block.heads["kind"].tolist()))
    for kind in kinds:
        heads = block.heads.select(block.heads["kind"] == kind)
        if len(kinds) > 1:
            parts.append(Text(f"{printable(kind)} attention", style="bold"))
        parts.append(_build_shaded_grid(heads, block.column, console.width))
    return parts


def _build_shaded_grid(heads: Table, column: str, width: int) -> Text:
    """Return a column of a table of heads as a grid of shaded numbers, layers down and heads across.

    If the terminal is too narrow for the numbers, each cell has one digit: tenths of the largest number.
    """
    values = dict(zip(heads.layer_heads, heads[column].tolist(), strict=True))
    layers = np.unique(heads["layer"]).tolist()
    head_indices = np.unique(heads["head"]).tolist()
    magnitudes = np.abs(heads[column])
    max_magnitude = float(magnitudes[np.isfinite(magnitudes)].max(initial=0.0)) or 1.0
    format_value = choose_formatter(heads, column)
    has_numbers = len(head_indices) * _NUMBER_CELL_WIDTH <= find_width_for_heads(layers, width)
    cell_width = _NUMBER_CELL_WIDTH if has_numbers else 2

    def append_cell(text: Text, layer: int, head: int) -> None:
        value = values.get((layer, head), math.nan)
        if not math.isfinite(value):
            # The sign for undefined numbers needs a wide cell; a narrow one stays empty.
            undefined = format_value(value) if has_numbers else ""
            text.append(f"{undefined:>{cell_width - 1}}", style="dim").append(" ")
            return
        share = abs(value) / max_magnitude
        number_text = format_value(value) if has_numbers else str(min(9, int(share * 10)))
        # The exponent below 1 makes small numbers visible.
        style = shade(share**0.7, _ZERO_COLOR, _NEGATIVE_COLOR if value < 0 else _POSITIVE_COLOR)
        text.append(f"{number_text:>{cell_width - 1}}", style=style).append(" ")

    text = draw_head_grid(layers, head_indices, cell_width, width, append_cell)
    if not has_numbers:
        text.append(f"\ntenths of the largest, {format_small(max_magnitude)}", style="dim")
    return text


def _render_ranking(block: Ranking, console: Console, every: bool) -> list[RenderableType]:
    """Return a table of the rows that are printed, and a line on how many more rows --all prints."""
    rows = block.select_printed_rows(every=every)
    n_left_out = len(block.select_printed_rows(every=True)) - len(rows)
    # Names of up to 30 characters stay on one line; longer ones wrap in a narrow terminal.
    max_name_length = max((len(block.names[row]) for row in rows), default=1)
    columns = [
        TextColumn(
            block.header,
            lambda row: printable(block.names[row]),
            style="bold",
            wraps=max_name_length > 30,
            min_width=min(max_name_length, 30),
        )
    ]
    # A narrow terminal drops columns from the right; the first column after the names has 0: it is never dropped.
    for index, column in enumerate(block.columns):
        drop_priority = index + 1 if index else 0
        if isinstance(column, WordsColumn):
            columns.append(_build_text_column(column, drop_priority))
        else:
            columns += _build_number_columns(block.table, column, drop_priority, rows)
    parts: list[RenderableType] = [TextTable(columns, rows, gap=2)]
    if n_left_out:
        n_more = amount(n_left_out, f"more {block.noun or block.header}")
        parts.append(Text(f"and {n_more}: --all prints all", style="dim"))
    return parts


def _build_text_column(column: WordsColumn, drop_priority: int) -> TextColumn:
    """Return a column of texts of a ranking; see `TextColumn` for `drop_priority`."""
    return TextColumn(
        column.title,
        lambda row: printable(column.texts[row], most=1000),
        wraps=column.wraps,
        min_width=12 if column.wraps else 1,
        drop_priority=drop_priority,
        is_right_aligned=column.is_right_aligned,
    )


def _build_number_columns(
    table: Table, name: str, drop_priority: int, rows: Sequence[int]
) -> list[TextColumn]:
    """Return a column of numbers, and a column of their 95% intervals if any of the rows has one."""
    column_title = printable(table.columns[name].header)
    format_value = choose_formatter(table, name)
    values = table[name]
    numbers = TextColumn(
        column_title,
        lambda row: format_value(values[row]),
        is_right_aligned=True,
        wraps=len(column_title) > 20,
        drop_priority=drop_priority,
    )
    low = table.companion(name, "low")
    high = table.companion(name, "high")
    if not np.isfinite(low[list(rows)]).any():
        return [numbers]
    # Intervals are dropped with their numbers. If the numbers have 0 (never), the intervals are dropped last (1).
    intervals = TextColumn(
        "95% interval",
        lambda row: format_interval(low[row], high[row], format_value),
        is_right_aligned=True,
        style="dim",
        drop_priority=drop_priority or 1,
    )
    return [numbers, intervals]


def _render_grid(block: Grid, console: Console, every: bool) -> list[RenderableType]:
    """Return a matrix of numbers, with its first rows only unless `every`."""
    n_rows = len(block.rows) if every else block.n_printed
    return [draw_matrix(block.values[:n_rows], block.rows[:n_rows], block.columns, console, bold=True)]


def _render_trends(block: Trends, console: Console, every: bool) -> list[RenderableType]:
    """Return a table of the curves that change most: a row for each curve, a shaded column for each step that fits."""
    # (step, curve, [value, low, high]) -> (step, curve)
    values = block.points[..., 0]
    n_curves = len(block.names)
    curves = list(range(n_curves)) if every else find_most_changed(values, _MAX_PRINTED_CURVES)
    if not np.isfinite(values[:, curves]).any():
        return [Text(f"{block.y}: undefined for all {block.noun} on these texts", style="dim")]
    low = min(float(np.nanmin(values[:, curves])), 0.0)
    high = float(np.nanmax(values[:, curves]))

    def make_cell(step: int, curve: int) -> Text:
        value = float(values[step, curve])
        if n_curves == 1 or not math.isfinite(value):
            return Text(number(value))
        return Text(
            number(value),
            style=shade((value - low) / ((high - low) or 1.0), _ZERO_COLOR, _POSITIVE_COLOR),
        )

    # The steps that get a column: as many as fit, evenly spaced. The column of names has the same width in all tables
    # of trends, so that the columns of a step are aligned across tables.
    headers = list(map(format_step, block.steps))
    headers[0] = f"step {headers[0]}"
    width = max(6, 2 + max(map(len, headers)))
    shown_steps = spread_evenly(len(headers), (console.width - _NAME_COLUMN_WIDTH) // width)
    # If the block has a heading, the heading names the quantity, and the column of names says "heads".
    column_title = block.noun if block.heading else block.y
    columns = [
        TextColumn(
            column_title.ljust(_NAME_COLUMN_WIDTH - 2),
            lambda curve: printable(block.names[curve]),
            wraps=True,
            min_width=_NAME_COLUMN_WIDTH - 2,
        )
    ]
    for step in shown_steps:
        columns.append(TextColumn(headers[step], partial(make_cell, step), is_right_aligned=True))
    notes = []
    if len(curves) < n_curves:
        selection = "changes most" if len(headers) > 1 else "is largest"
        notes.append(f"the {len(curves)} of {n_curves} {block.noun} in which it {selection}")
    if len(shown_steps) < len(headers):
        notes.append(f"{len(shown_steps)} of {len(headers)} steps have room in {console.width} columns")
    return [TextTable(columns, curves, gap=1), *dim_lines(notes)]


_RENDERERS: dict[type[Block], Callable[[Any, Console, bool], list[RenderableType]]] = {
    HeadMap: _render_head_map,
    Ranking: _render_ranking,
    Grid: _render_grid,
    # A graph is drawn in figures only; the terminal lists its edges in a ranking.
    Graph: lambda block, console, every: [],
    Trends: _render_trends,
    Note: lambda block, console, every: list(map(Text, block.lines)),
    CustomBlock: lambda block, console, every: list(block.view.show(console, every=every)),
}
"""The render function of each type of block: `(block, console, every)`, where `every` is as in `show`."""
