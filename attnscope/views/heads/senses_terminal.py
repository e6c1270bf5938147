"""What heads do in pictures and recordings, in the terminal: a map of one measure, and of each the extremes."""

from __future__ import annotations

import math
from functools import partial

from rich.console import Console, Group, RenderableType
from rich.text import Text

from attnscope.records.heads.findings import Findings, Head
from attnscope.views.tables.head_grid import head_grid
from attnscope.views.tables.numbers import interval, small_number
from attnscope.views.tables.plain_text import dim_lines, shade
from attnscope.views.tables.table import Column, Table
from attnscope.views.tables.wording import corpus_line, corpus_notes, printable, title_of

LEADING = ("distance_patches", "looks", "monotonicity")
"""The measure that the map shows: how far heads look is the first thing that is asked of a vision transformer, and
whether they move on with the tokens of one that listens."""


def picture_measures(findings: Findings, console: Console) -> RenderableType:
    """A map of the leading measure with numbers, layers down and heads across; then each measure's extremes.

    Numbers alone suffice (NO_COLOR is respected). Where a layer is wider than the terminal, its heads go on below.
    """
    names = findings.measure_names
    parts: list[RenderableType] = []
    if names:
        leading = next((name for name in LEADING if name in names), names[0])
        facts = findings.measure_facts(leading)
        title = Text(title_of(findings, leading), style="bold")
        parts += [title.append(f": {printable(facts.what)}", style="not bold"), Text()]
        parts += [_map(findings, leading, console.width), Text(), _extremes(findings)]
    said = ["uniform: the value of a head that attends to all keys alike", corpus_line(findings)]
    said += corpus_notes(findings)
    grounding = [(head.name, role) for head in findings.heads for role in head.roles if role.name == "grounding"]
    if "grounding" in findings.options.get("roles", {}):
        named = ", ".join(f"{name} ({role.value:.2f}, q {role.q:.2g})" for name, role in grounding)
        said.append(f"heads that look into the box by {0.1:g} more than its area: {named or 'none'}")
    return Group(*parts, *dim_lines(said))


def _map(findings: Findings, measure: str, width: int) -> Text:
    values = {(head.layer, head.head): _value(head, measure) for head in findings.heads}
    known = [value for value in values.values() if math.isfinite(value)]
    low, high = min(known, default=0.0), max(known, default=0.0)
    layers, n_heads = sorted({layer for layer, _ in values}), max(head for _, head in values) + 1
    cell = max(len(f"H{n_heads - 1}"), *(len(small_number(value)) for value in values.values())) + 2

    def draw(text: Text, layer: int, head: int) -> None:
        value = values.get((layer, head), math.nan)
        share = (value - low) / (high - low) if high > low and math.isfinite(value) else 0.0
        text.append(small_number(value).rjust(cell - 1) + " ", style=shade(share, "#f7fbff", "#08519c"))

    return head_grid(layers, range(n_heads), cell, width, draw)


def _extremes(findings: Findings) -> Table:
    """A row per measure: uniform attention's value, and the heads of the least and the largest value."""
    rows = []
    for name in findings.measure_names:
        heads = [head for head in findings.heads if math.isfinite(_value(head, name))]
        if heads:
            ends = [end(heads, key=lambda head: _value(head, name)) for end in (min, max)]
            rows.append((name, *((head.name, head.measures[name]) for head in ends)))
    columns = [
        Column("measure", lambda row: printable(row[0])),
        Column("uniform", lambda row: small_number(row[1][1].uniform), right=True, drop=1),
    ]
    for at, title in ((1, "least"), (2, "largest")):
        columns += [
            Column(title, partial(lambda at, row: small_number(row[at][1].value), at), right=True, style="cyan"),
            Column("head", partial(lambda at, row: row[at][0], at)),
            Column("95% interval", partial(lambda at, row: interval(row[at][1].low, row[at][1].high, small_number), at),
                   right=True, drop=2),
        ]  # fmt: skip
    return Table(columns, rows)


def _value(head: Head, measure: str) -> float:
    found = head.measures.get(measure)
    return math.nan if found is None else found.value
