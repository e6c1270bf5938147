"""What the zones of conversations give to each other, in the terminal."""

from __future__ import annotations

import math

from rich.console import RenderableType

from attnscope.records.heads.findings import Estimate, Findings, Head
from attnscope.views.tables.numbers import interval, percent
from attnscope.views.tables.plain_text import dim_lines, heading
from attnscope.views.tables.table import Column, Table
from attnscope.views.tables.wording import printable

_MOST = 12
Row = tuple[str, Head, Estimate]


def zones_table(findings: Findings) -> list[RenderableType]:
    """For each pair of zones the head that attends most beyond uniform attention; the strongest pairs first.

    Pairs of two zones of text come before a zone with itself and before what the template writes.
    """
    zones = findings.options.get("zones")
    if not isinstance(zones, list):
        return []
    rows: list[Row] = []
    for a, b in ((str(a), str(b)) for a in zones for b in zones):
        known = [(head, head.measures.get(f"zone_{a}_to_{b}")) for head in findings.heads]
        mine = [(f"{a} → {b}", head, of) for head, of in known if of is not None and math.isfinite(of.value)]
        rows += sorted(mine, key=_beyond)[-1:]
    rows.sort(key=lambda row: ("template" in row[0], len({*row[0].split(" → ")}) == 1, -_beyond(row)))
    columns = [
        Column("zones", lambda row: printable(row[0])),
        Column("best head", lambda row: row[1].name, style="bold"),
        Column("attention", lambda row: percent(row[2].value), style="cyan"),
        Column("95% interval", lambda row: interval(row[2].low, row[2].high, percent), style="dim", drop=2),
        Column("uniform", lambda row: percent(row[2].uniform)),
        Column("texts", lambda row: f"{row[2].count:.0f}", drop=1),
    ]
    lines = [
        "one head per pair of zones, that is furthest above uniform attention",
        f"chosen as the best of {len(findings.heads):,} heads on these same texts: the interval, over texts, is not "
        "adjusted for the choice, so measure the head again on other texts",
    ]
    lines += [f"{len(rows) - _MOST} more pairs: --measures zone_A_to_B lists every head"] * (len(rows) > _MOST)
    return [heading("attention from zone to zone"), Table(columns, rows[:_MOST]), *dim_lines(lines)] if rows else []


def _beyond(row: Row) -> float:
    return row[2].value - row[2].uniform
