"""A timeline in the terminal, with rich: since when heads have had their roles, and measures over the steps."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from attnscope.records.timeline import Timeline
from attnscope.views.heads.summary import model_of, number, printable
from attnscope.views.tables.plain_text import dim_lines, plain_table, shade
from attnscope.views.timeline.summary import (
    Series,
    finite_range,
    moving,
    notes,
    series_of,
    since_lines,
    step_text,
    thinned,
    title_line,
)

_MOST_HEADS = 8
_NAME_CELLS = 14


def show(timeline: Timeline, console: Console) -> None:
    """Prints since when heads have had their roles, and the measures of the heads that change most."""
    console.print(drawing(timeline, console.width))


def drawing(timeline: Timeline, width: int) -> RenderableType:
    """All that is printed, in so many columns."""
    parts: list[RenderableType] = [Text(f"{model_of(timeline.run)}: {title_line(timeline)}", style="bold")]
    texts = [step_text(step) for step in timeline.steps]
    cell = max(6, *(len(text) + 2 for text in texts)) if texts else 6
    shown = thinned(len(texts), max(2, (width - _NAME_CELLS) // cell))
    if timeline.has_loss:
        table = _table("loss, nats", [texts[place] for place in shown])
        table.add_row("all texts", *(number(timeline.checkpoints[place].loss) for place in shown))
        parts += [Text(), table]
    for series in series_of(timeline):
        parts += [Text(), _series(series, shown, [texts[place] for place in shown])]
    if lines := since_lines(timeline):
        table = plain_table(space=2)
        table.add_column("role", no_wrap=True)
        table.add_column("heads that have it at the last step")
        for role, heads in lines:
            table.add_row(Text(role, style="bold"), heads)
        parts += [Text(), table]
    said = notes(timeline)
    if len(shown) < len(texts):
        said.append(f"{len(shown)} of {len(texts)} checkpoints are shown in {width} columns; files have all")
    return Group(*parts, Text(), *dim_lines(said))


def _table(first: str, steps: Sequence[str]) -> Table:
    table = plain_table(space=1)
    table.add_column(first, no_wrap=True, min_width=_NAME_CELLS - 2)
    for step in steps:
        table.add_column(step, justify="right", no_wrap=True)
    return table


def _series(series: Series, shown: Sequence[int], texts: Sequence[str]) -> RenderableType:
    """A quantity of the heads, or pairs, in which it changes most, shaded from its least to its largest value."""
    table = _table(series.title, texts)
    values, names = series.values, series.names
    heads = moving(values, _MOST_HEADS)
    if not heads:
        return Text(f"{series.title}: undefined for all {series.what} on these texts", style="dim")
    low, high = finite_range(values[:, heads].ravel().tolist())
    low = min(low, 0.0)
    for head in heads:
        cells = []
        for place in shown:
            value = float(values[place, head])
            share = (value - low) / ((high - low) or 1.0) if math.isfinite(value) else 0.0
            cells.append(Text(number(value), style=shade(share, "#ffffff", "#08519c")))
        table.add_row(Text(printable(names[head]), style="bold"), *cells)
    if len(heads) == len(names):
        return table
    most = "changes most" if len(texts) > 1 else "is largest"
    return Group(table, Text(f"the {len(heads)} of {len(names)} {series.what} in which it {most}", style="dim"))
