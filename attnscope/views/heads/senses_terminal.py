"""What heads do in pictures and recordings, in the terminal: a map of one measure, and of each the extremes."""

from __future__ import annotations

import math

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from attnscope.records.heads.findings import Findings, Head
from attnscope.views.ablation.summary import number
from attnscope.views.heads import summary as heads_summary
from attnscope.views.heads.summary import interval
from attnscope.views.tables.head_grid import head_grid
from attnscope.views.tables.plain_text import dim_lines, plain_table, shade

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
        title = Text(heads_summary.title_of(findings, leading), style="bold")
        parts += [title.append(f": {heads_summary.printable(facts.what)}", style="not bold"), Text()]
        parts += [_map(findings, leading, console.width), Text(), _extremes(findings, console.width)]
    said = ["uniform: the value of a head that attends to all keys alike", heads_summary.corpus_line(findings)]
    said += heads_summary.corpus_notes(findings)
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
    cell = max(len(f"H{n_heads - 1}"), *(len(number(value)) for value in values.values())) + 2

    def draw(text: Text, layer: int, head: int) -> None:
        value = values.get((layer, head), math.nan)
        share = (value - low) / (high - low) if high > low and math.isfinite(value) else 0.0
        text.append(number(value).rjust(cell - 1) + " ", style=shade(share, "#f7fbff", "#08519c"))

    return head_grid(layers, range(n_heads), cell, width, draw)


def _extremes(findings: Findings, width: int) -> Table:
    """A row a measure: uniform attention's value, and the heads of the least and the largest value."""
    table = plain_table(space=2)
    wide = width >= 96
    between = ("95% interval",) * wide
    for title in ("measure", "uniform", "least", "head", *between, "largest", "head", *between):
        table.add_column(title, justify="left" if title in ("measure", "head") else "right", no_wrap=True)
    for name in findings.measure_names:
        mine = [head for head in findings.heads if math.isfinite(_value(head, name))]
        if not mine:
            continue
        cells = [Text(heads_summary.printable(name)), Text(number(mine[0].measures[name].uniform))]
        for head in (min(mine, key=lambda one: _value(one, name)), max(mine, key=lambda one: _value(one, name))):
            found = head.measures[name]
            cells += [Text(number(found.value), style="cyan"), Text(head.name)]
            cells += [Text(interval(found.low, found.high, number))] * wide
        table.add_row(*cells)
    return table


def _value(head: Head, measure: str) -> float:
    found = head.measures.get(measure)
    return math.nan if found is None else found.value
