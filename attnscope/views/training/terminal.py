"""A training in the terminal, with rich: since when heads have had their roles, and measures over the steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.text import Text

from attnscope.records.training import Training
from attnscope.report.numbers import number, step_text
from attnscope.report.plain_text import dim_lines, shade
from attnscope.report.table import TextColumn, TextTable
from attnscope.report.wording import model_of, printable
from attnscope.views.training.summary import (
    Series,
    find_moving,
    finite_range,
    notes,
    series_of,
    since_lines,
    spread_evenly,
    title_line,
)

_MOST_HEADS = 8
_NAME_CELLS = 14


def show(training: Training, console: Console) -> RenderableType:
    """Since when heads have had their roles, and the measures of the heads that change most."""
    width = console.width
    parts: list[RenderableType] = [Text(f"{model_of(training.run)}: {title_line(training)}", style="bold")]
    texts = [step_text(step) for step in training.steps]
    cell = max(6, *(len(text) + 2 for text in texts)) if texts else 6
    steps = [(at, texts[at]) for at in spread_evenly(len(texts), max(2, (width - _NAME_CELLS) // cell))]
    if training.has_loss:
        columns = _columns("loss, nats", steps, lambda at: lambda row: number(training.checkpoints[at].loss))
        parts += [Text(), TextTable(columns, ["all texts"], gap=1)]
    for series in series_of(training):
        parts += [Text(), _series(series, steps)]
    if roles := since_lines(training):
        columns = [
            TextColumn("role", itemgetter(0), style="bold"),
            TextColumn("heads that have it at the last step", itemgetter(1), wraps=True, least=12),
        ]
        parts += [Text(), TextTable(columns, roles)]
    lines = notes(training)
    if len(steps) < len(texts):
        lines.append(f"{len(steps)} of {len(texts)} checkpoints are shown in {width} columns; files have all")
    return Group(*parts, Text(), *dim_lines(lines))


def _columns(
    title: str, steps: Sequence[tuple[int, str]], of: Callable[[int], Callable[[Any], str | Text]]
) -> list[TextColumn]:
    """What each row is of, and its value at each checkpoint."""
    values = [TextColumn(text, of(at), right=True) for at, text in steps]
    # As wide in all tables, so that steps stand below each other.
    return [TextColumn(title.ljust(_NAME_CELLS - 2), printable, wraps=True, least=_NAME_CELLS - 2), *values]


def _series(series: Series, steps: Sequence[tuple[int, str]]) -> RenderableType:
    """A quantity of the heads, or pairs, in which it changes most, shaded from its least to its largest value."""
    values, names = series.values, series.names
    heads = find_moving(values, _MOST_HEADS)
    if not heads:
        return Text(f"{series.title}: undefined for all {series.what} on these texts", style="dim")
    low, high = finite_range(values[:, heads])
    low = min(low, 0.0)

    def of(at: int) -> Callable[[str], Text]:
        def cell(name: str) -> Text:
            value = float(values[at, names.index(name)])
            share = (value - low) / ((high - low) or 1.0) if math.isfinite(value) else 0.0
            return Text(number(value), style=shade(share, "#ffffff", "#08519c"))

        return cell

    table = TextTable(_columns(series.title, steps, of), [names[head] for head in heads], gap=1)
    if len(heads) == len(names):
        return table
    most = "changes most" if len(steps) > 1 else "is largest"
    return Group(table, Text(f"the {len(heads)} of {len(names)} {series.what} in which it {most}", style="dim"))
