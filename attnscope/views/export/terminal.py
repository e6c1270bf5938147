"""What a model loses where some of its key/value heads stream, in the terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from attnscope.errors import amount
from attnscope.records.heads.streaming import StreamingCheck
from attnscope.views.tables.numbers import interval, number, percent
from attnscope.views.tables.plain_text import dim_lines
from attnscope.views.tables.table import Column, Table


def show_streaming(check: StreamingCheck, console: Console) -> None:
    """Prints loss and recall of the whole model, and with shares of its key/value heads streaming."""
    rows: list[tuple[str, Any]] = [("none", check)]
    rows += [(f"{percent(one.share)}, by {one.by}" if one.by == "scores" else f"{percent(one.share)}, random", one)
             for one in check.streamed]  # fmt: skip

    def part(name: str) -> tuple[Any, Any]:
        return (
            lambda row: number(getattr(row[1], name).value) if hasattr(row[1], name) else "",
            lambda row: (
                interval(getattr(row[1], name).low, getattr(row[1], name).high) if hasattr(row[1], name) else ""
            ),
        )

    columns = [Column("streaming", lambda row: row[0])]
    for name, title, drop in (("loss", "loss", 3), ("loss_rise", "rise", 2), ("recall", "recall", 1)):
        value, ends = part(name)
        columns.append(Column(title, value, right=True, style="cyan"))
        columns.append(Column("95% interval", ends, right=True, drop=drop))
    console.print(Text("loss and recall with key/value heads streaming", style="bold"))
    console.print(Table(columns, rows))
    said = (
        f"on {amount(check.n_needles, 'text')} with a needle, of {', '.join(map(str, check.lengths))} tokens; no head "
        "was chosen on them",
        f"a streaming head sees the first {check.sink_size} and the latest {check.recent_size} tokens",
        f"of {amount(check.n_kv_heads, 'key/value head')}; random ones are drawn anew for each text",
    )
    for line in dim_lines(said):
        console.print(line)
