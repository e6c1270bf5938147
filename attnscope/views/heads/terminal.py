"""Findings drawn in the terminal, with rich: a grid of roles, heads by role with their evidence, measures."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter
from textwrap import wrap
from typing import Any

from rich.cells import cell_len
from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.style import Style
from rich.text import Text

from attnscope.drawing.inks import ink_on
from attnscope.records.heads.findings import Estimate, Findings, Head, Role
from attnscope.records.heads.order import sort_heads
from attnscope.report.matrix import head_grid, room_for
from attnscope.report.numbers import UNDEFINED, interval_of, number, percent, q_value, small_number
from attnscope.report.plain_text import dim_lines, heading, shade
from attnscope.report.table import TextColumn, TextTable
from attnscope.report.wording import corpus_line, corpus_notes, full_name, label, printable, title_of
from attnscope.views.describe.terminal import description_table
from attnscope.views.heads import summary as heads_summary
from attnscope.views.heads.questions_terminal import needles_table
from attnscope.views.heads.summary import UNCLASSIFIED, Mark

_MORE = "+"
_MOST_NAMED = 24
_OTHERWISE = "otherwise"
_MOST_WITH_INTERVALS = 2
_TITLE_CELLS = 22


def show(
    findings: Findings,
    console: Console,
    *,
    measures: str | None = None,
    sort: str | None = None,
    every: bool | None = None,
    among: Findings | None = None,
) -> RenderableType:
    """The grid of roles, the table of heads and what each does; of pictures and recordings what was measured.

    A head that is picked alone has all its measures, each with its interval, in a table of its own instead of the grid.
    It is ranked `among` the findings that it was picked from. `measures` names some that are listed of every head, too.
    What heads attend to is listed of the ten with most to say, or of `every` one, as with an order.

    Raises:
        AttnscopeError: There is no such measure or order.
    """
    among = among or findings
    heads = sort_heads(findings, sort)
    parts: list[RenderableType] = []
    findings = replace(findings, heads=tuple(heads))
    is_chosen, is_one = len(heads) < len(among.heads), len({(head.layer, head.head) for head in heads}) == 1
    is_picked = is_one and is_chosen
    if findings.of_senses:
        parts.append(picture_measures(findings, console))
    else:
        parts += [] if is_picked else [grid(findings, console)]
        parts.append(table(findings, console))
        if findings.descriptions is not None:
            parts += [Text(), description_table(findings, few=not (is_chosen or every or sort))]
        elif sort is not None:
            parts.append(Text(f"in this order: {', '.join(full_name(head, findings) for head in heads)}"))
    parts += needles_table(findings)
    if measures or is_picked:
        names = heads_summary.parse_measures(findings, measures or "all")
        parts.append(head_measures(findings, names, among) if is_one else measure_table(findings, names))
    return Group(*parts)


def grid(findings: Findings, console: Console) -> RenderableType:
    """The strongest role of every head as a coloured letter, layers down and heads across, and what the letters mean.

    Letters alone suffice (NO_COLOR is respected). Where a layer is wider than the terminal, cells narrow first, then
    its heads go on below. The kinds of attention of an encoder-decoder stand one under the other.
    """
    marks = heads_summary.marks_of(findings)
    parts: list[RenderableType] = []
    for kind in findings.kinds:
        if len(findings.kinds) > 1:
            parts.append(heading(f"{printable(kind)} attention"))
        parts.append(_kind_grid([head for head in findings.heads if head.kind == kind], marks, console.width))
    parts += [Text(), _legend(findings, marks)]
    return Group(*parts)


def table(findings: Findings, console: Console, most: int = 20) -> RenderableType:
    """Heads by role, the largest value first, with the evidence; what has no role, and notes, in a line each.

    A head stands under each of its roles, `most` of them at most. In a narrow terminal the least important columns go,
    and a line says which.
    """
    marks = heads_summary.marks_of(findings)
    roles = [count.role for count in heads_summary.counts(findings, marks)]
    rows = [row for role in roles for row in _rows_of_role(findings, role, marks, most)]
    heads = TextTable(_columns(findings, marks), rows, gap=1)
    parts: list[RenderableType] = [heads, Text()] if roles else []
    if len(findings.heads) > 1 or not roles:
        parts.append(_unclassified(findings))
    if roles:
        names, _ = heads.fit(console.width)
        parts.append(Text(_explanation(findings, roles, names), style="dim"))
    notes = [corpus_line(findings), *heads_summary.role_notes(findings), *corpus_notes(findings)]
    return Group(*parts, *dim_lines(notes))


def measure_table(findings: Findings, names: Sequence[str]) -> RenderableType:
    """Measures of every head; of one or two measures with their intervals and their value under uniform attention.

    Raises:
        AttnscopeError: There is no such measure.
    """
    heads_summary.require_measures(findings, names)
    write_number = _number_format(findings)

    def of(name: str, write: Callable[[Estimate], str]) -> Callable[[Head], str]:
        return lambda head: write(head.estimate(name))

    columns = [TextColumn("head", lambda head: full_name(head, findings), style="bold")]
    for name in names:
        title = "\n".join(wrap(title_of(findings, name), _TITLE_CELLS))
        value = of(name, lambda estimate: write_number(estimate.value))
        columns.append(TextColumn(title, value, right=True, least=min(len(title), _TITLE_CELLS), style="cyan"))
        if len(names) <= _MOST_WITH_INTERVALS:
            columns += [
                TextColumn("95% interval", of(name, lambda estimate: interval_of(estimate, write_number)), right=True),
                TextColumn("uniform", of(name, lambda estimate: write_number(estimate.uniform)), right=True),
            ]
    meanings = [printable(f"{name}: {what}") for name in names if (what := findings.measure_facts(name).what)]
    return Group(TextTable(columns, findings.heads, goes_on=True), Text(), *dim_lines(meanings))


def head_measures(findings: Findings, names: Sequence[str], among: Findings) -> RenderableType:
    """Measures of one head, a row each: value, 95% interval, value under uniform attention, and its place among heads.

    Each kind of attention has a table, and is ranked among all heads of that kind, the largest value first.
    """
    parts: list[RenderableType] = []
    write_number = _number_format(findings)
    for head in findings.heads:
        others = [other for other in among.heads if other.kind == head.kind]
        estimates = [head.estimate(name) for name in names]
        values = [[other.measures[name].value for other in others if name in other.measures] for name in names]
        columns = [
            TextColumn(full_name(head, findings), lambda row: title_of(findings, row[0]), wraps=True, least=12),
            TextColumn("value", lambda row: write_number(row[1].value), right=True, style="cyan"),
            TextColumn("95% interval", lambda row: interval_of(row[1], write_number), right=True, drop=2),
            TextColumn("uniform", lambda row: write_number(row[1].uniform), right=True, drop=1),
            TextColumn(f"rank of {len(others)}", lambda row: _rank(row[1].value, row[2]), right=True, drop=3),
        ]
        parts += [Text(), TextTable(columns, zip(names, estimates, values, strict=True))]
    notes = ["rank: 1 = the largest value; uniform: the value under uniform attention over the same keys"]
    for head in findings.heads:
        carried = [(name, part) for name in names if (part := head.estimate(name).largest_part)]
        if carried:
            listed = ", ".join(f"{title_of(findings, name)} ({percent(part)})" for name, part in carried)
            notes.append(f"one text holds much of the sum: {listed}")
    return Group(*parts, *dim_lines(notes))


def _number_format(findings: Findings) -> Callable[[float], str]:
    return small_number if findings.of_senses else number


def _rank(value: float, values: Sequence[float]) -> str:
    return f"{1 + sum(other > value for other in values)}" if math.isfinite(value) else UNDEFINED


def _kind_grid(heads: Sequence[Head], marks: Mapping[str, Mark], width: int) -> Text:
    by_head = {(head.layer, head.head): head for head in heads}
    layers = range(max(layer for layer, _ in by_head) + 1)
    n_heads = max(head for _, head in by_head) + 1
    cell = max(2, min(4, room_for(layers, width) // n_heads))

    pad, gap = (" ", " ") if cell == 4 else ("", " " if cell == 3 else "")

    def draw(text: Text, layer: int, number: int) -> None:
        head = by_head.get((layer, number))
        if head is None:
            text.append(" " * cell)
        elif not head.roles:
            text.append(f"{pad}{UNCLASSIFIED} {gap}", style="dim")
        else:
            mark = marks[head.roles[0].name]
            more = _MORE if len(head.roles) > 1 else " "
            text.append(pad + mark.letter(head.roles[0]) + more, style=_style(mark)).append(gap)

    return head_grid(layers, range(n_heads), cell, width, draw)


def _style(mark: Mark) -> Style:
    return Style(color=ink_on(mark.color), bgcolor=mark.color, bold=True)


def _legend(findings: Findings, marks: Mapping[str, Mark]) -> RenderableType:
    entries = []
    for count in heads_summary.counts(findings, marks):
        entry = _role_name(count.role, marks)
        entry.append(f" {count.n_heads}", style="bold")
        if count.n_strongest < count.n_heads:
            strongest = f"first in {count.n_strongest}" if count.n_strongest else "never first"
            entry.append(f", {strongest}", style="dim")
        entries.append(entry)
    if n_none := len(heads_summary.unclassified(findings.heads)):
        entry = Text(f" {UNCLASSIFIED} ", style="dim")
        entry.append(" unclassified", style="not dim").append(f" {n_none}", style="bold not dim")
        entries.append(entry)
    hints = []
    if any(len(head.roles) > 1 for head in findings.heads):
        hints.append(
            f"the letter is the head's strongest role, or a sink's if it has no other; {_MORE}: it has more roles"
        )
    if any(head.roles and head.roles[0].tentative for head in findings.heads):
        hints.append("a small letter = tentative")
    parts: list[RenderableType] = [Columns(entries, padding=(0, 2))] if entries else []
    return Group(*parts, *([Text("; ".join(hints), style="dim")] if hints else []))


def _role_name(role: str, marks: Mapping[str, Mark]) -> Text:
    text = Text()
    text.append(f" {marks[role].glyph} ", style=_style(marks[role]))
    return text.append(f" {label(role)}")


def _rows_of_role(findings: Findings, name: str, marks: Mapping[str, Mark], most: int) -> list[tuple[Text, Any]]:
    """The heads that have a role, the largest value first, each with what stands in the column of roles.

    The name of the role stands on its first row; below the last one, how many more heads have it.
    """
    heads = [(head, role) for head in findings.heads for role in head.roles if role.name == name]
    heads.sort(key=lambda pair: -pair[1].value if math.isfinite(pair[1].value) else math.inf)
    rows = [(Text() if at else _role_name(name, marks), pair) for at, pair in enumerate(heads[:most])]
    n_more = len(heads) - len(rows)
    return [*rows, (Text(f"and {n_more} more", style="dim"), None)] if n_more else rows


def _columns(findings: Findings, marks: Mapping[str, Mark]) -> list[TextColumn]:
    """The columns that these findings have."""
    heads = [head for head in findings.heads if head.roles]
    n_more = max((len(head.roles) for head in heads), default=1) - 1
    widest = max((cell_len(label(role.name)) for head in heads for role in head.roles), default=4)

    def of(write: Callable[[Head, Role], str | Text]) -> Callable[[Any], str | Text]:
        return lambda row: write(*row[1]) if row[1] else ""  # the last row of a role says how many more heads have it

    columns = [
        TextColumn("role", itemgetter(0), wraps=True, least=min(4 + widest, 18)),
        TextColumn("head", of(lambda head, role: full_name(head, findings)), style="bold"),
        TextColumn("sinks", of(lambda head, role: percent(head.resting_share)), right=True, drop=2),
        TextColumn("value", of(lambda head, role: number(role.value)), right=True, style="cyan"),
        TextColumn("95% interval", of(lambda head, role: interval_of(role)), right=True, drop=1),
        TextColumn("baseline", of(lambda head, role: number(role.baseline)), right=True, drop=3),
        TextColumn("q", of(lambda head, role: q_value(role.q)), right=True, least=6, drop=4),
        TextColumn("share", of(lambda head, role: "all" if role.active_share is None else percent(role.active_share)),
               right=True, drop=5),
        TextColumn("effect", of(lambda head, role: _effect(findings, head)), right=True, least=7),
        TextColumn(_OTHERWISE, of(lambda head, role: _nearest(findings, head)), least=22, drop=8),
        TextColumn("also", of(lambda head, role: _other_roles(head, role, marks)), wraps=True, drop=6,
               least=min(5, max(4, 2 * n_more - 1))),
    ]  # fmt: skip
    has = {
        "sinks": any(math.isfinite(head.resting_share) for head in heads),
        "effect": findings.options.get("causal") is not None and any(head.effects for head in heads),
        _OTHERWISE: any(heads_summary.nearest_role(findings, head) for head in heads),
        "also": n_more > 0,
    }
    return [column for column in columns if has.get(column.name, True)]


def _effect(findings: Findings, head: Head) -> Text:
    """What changes without a head; dim where that is nothing."""
    name = f"zero_{findings.options.get('causal', {}).get('quantity')}"
    effect = head.effects.get(name)
    if effect is None:
        return Text(UNDEFINED)
    return Text(small_number(effect.value), style="dim" if findings.does_nothing(head) else "")


def _nearest(findings: Findings, head: Head) -> Text:
    """What a head that is only a sink comes nearest to otherwise, as "local 0.45 of 9%"; dim, for it is no role."""
    nearest = heads_summary.nearest_role(findings, head)
    if nearest is None:
        return Text()
    return Text(f"{label(nearest.role)} {number(nearest.value)} of {percent(nearest.share)}", style="dim")


def _other_roles(head: Head, row_role: Role, marks: Mapping[str, Mark]) -> Text:
    others = [role for role in head.roles if role.name != row_role.name]
    return Text(" ").join(Text(marks[role.name].letter(role), _style(marks[role.name])) for role in others)


def _unclassified(findings: Findings) -> Text:
    heads = heads_summary.unclassified(findings.heads)
    text = Text("unclassified: ", style="bold")
    text.append(f"{len(heads)} of {len(findings.heads)} heads", style="not bold")
    if heads:
        named = ", ".join(full_name(head, findings) for head in heads[:_MOST_NAMED])
        more = f" and {len(heads) - _MOST_NAMED} more" if len(heads) > _MOST_NAMED else ""
        text.append(f": {named}{more}", style="not bold")
    return text


def _explanation(findings: Findings, roles: Sequence[str], columns: Collection[str]) -> str:
    """How to read the columns that are shown."""
    thresholds = ", ".join(f"{label(role)} {heads_summary.threshold(findings, role)}" for role in roles)
    causal = findings.options.get("causal")
    effect = printable(causal.get("what")) if isinstance(causal, dict) else ""
    meanings = {
        "sinks": "share of the head's attention on special tokens and the first token",
        "share": "how much of the head's attention the value counts: all of it, or that share outside sinks",
        "effect": f"{effect} without the head, by zero ablation",
        _OTHERWISE: "if a head's only role is a sink, its strongest other pattern, and the share of attention that "
        "this covers; it is no role",
    }
    notes = [f"{name}: {meaning}" for name, meaning in meanings.items() if name in columns]
    return "; ".join([*notes, f"a role's value must exceed its baseline and its threshold: {thresholds}"])


LEADING = ("distance_patches", "monotonicity")
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
    notes = ["uniform: the value of a head that attends to all keys alike", corpus_line(findings)]
    notes += corpus_notes(findings)
    return Group(*parts, *dim_lines(notes))


def _map(findings: Findings, measure: str, width: int) -> Text:
    values = {(head.layer, head.head): head.estimate(measure).value for head in findings.heads}
    finite = [value for value in values.values() if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    layers, n_heads = sorted({layer for layer, _ in values}), max(head for _, head in values) + 1
    cell = max(len(f"H{n_heads - 1}"), *(len(small_number(value)) for value in values.values())) + 2

    def draw(text: Text, layer: int, head: int) -> None:
        value = values.get((layer, head), math.nan)
        share = (value - low) / (high - low) if high > low and math.isfinite(value) else 0.0
        text.append(small_number(value).rjust(cell - 1) + " ", style=shade(share, "#f7fbff", "#08519c"))

    return head_grid(layers, range(n_heads), cell, width, draw)


def _extremes(findings: Findings) -> TextTable:
    """A row per measure: uniform attention's value, and the heads of the least and the largest value."""
    rows = []
    for name in findings.measure_names:
        heads = [head for head in findings.heads if math.isfinite(head.estimate(name).value)]
        if heads:
            ends = [end(heads, key=lambda head: head.estimate(name).value) for end in (min, max)]
            rows.append((name, *((head.name, head.measures[name]) for head in ends)))
    columns = [
        TextColumn("measure", lambda row: printable(row[0])),
        TextColumn("uniform", lambda row: small_number(row[1][1].uniform), right=True, drop=1),
    ]
    for at, title in ((1, "least"), (2, "largest")):
        columns += [
            TextColumn(title, partial(lambda at, row: small_number(row[at][1].value), at), right=True, style="cyan"),
            TextColumn("head", partial(lambda at, row: row[at][0], at)),
            TextColumn("95% interval", partial(lambda at, row: interval_of(row[at][1], small_number), at), right=True,
                   drop=2),
        ]  # fmt: skip
    return TextTable(columns, rows)
