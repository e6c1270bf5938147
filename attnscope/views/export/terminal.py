"""The loss of a model with some of its key/value heads streaming, in the terminal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.text import Text

from attnscope.errors import amount
from attnscope.records.ablation import Effect
from attnscope.records.heads.needles import StreamingCheck
from attnscope.views.tables.numbers import interval, number, percent
from attnscope.views.tables.plain_text import dim_lines
from attnscope.views.tables.table import Column, Table


def show_streaming(check: StreamingCheck, console: Console) -> None:
    """Prints loss and recall of the whole model, and with shares of its key/value heads streaming."""
    rows: list[tuple[str, Effect, Effect | None, Effect]] = [("none", check.loss, None, check.recall)]
    for each in check.streamed:
        title = f"{percent(each.share)}, {'by scores' if each.by == 'scores' else each.by}"
        rows.append((title, each.loss, each.loss_rise, each.recall))

    def value(field: int) -> Callable[[Any], str]:
        return lambda row: number(row[field].value) if row[field] else ""

    def ends(field: int) -> Callable[[Any], str]:
        return lambda row: interval(row[field].low, row[field].high) if row[field] else ""

    columns = [Column("streaming", lambda row: row[0])]
    for field, title, drop in ((1, "loss", 3), (2, "rise", 2), (3, "recall", 1)):
        columns.append(Column(title, value(field), right=True, style="cyan"))
        columns.append(Column("95% interval", ends(field), right=True, drop=drop))
    console.print(Text("loss and recall with key/value heads streaming", style="bold"))
    console.print(Table(columns, rows))
    lengths = ", ".join(f"{length:,}" for length in check.lengths)
    notes = (
        f"on {amount(check.n_needles, 'text')} with a needle, of {lengths} tokens; no head was chosen on them",
        f"a streaming head sees the first {check.sink_size} and the latest {check.recent_size} tokens",
        f"of {amount(check.n_kv_heads, 'key/value head')}; random ones are drawn anew for each text",
    )
    for line in dim_lines(notes):
        console.print(line)
