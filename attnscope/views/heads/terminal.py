"""Findings drawn in the terminal, with rich: a grid of roles, heads by role with their evidence, measures."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal

from rich.cells import cell_len
from rich.columns import Columns
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.style import Style
from rich.text import Text

from attnscope.errors import amount
from attnscope.records.heads.findings import Estimate, Findings, Head, Role
from attnscope.records.heads.query import choose
from attnscope.views.ablation.summary import number as small_number
from attnscope.views.describe.terminal import description_table
from attnscope.views.drawing.inks import ink_on
from attnscope.views.heads import summary as heads_summary
from attnscope.views.heads.needles_terminal import needles_table
from attnscope.views.heads.senses_terminal import picture_measures
from attnscope.views.heads.summary import UNCLASSIFIED, Mark, full_name, interval, label, number, percent
from attnscope.views.heads.writes_terminal import writes_table
from attnscope.views.tables.head_grid import head_grid, room_for
from attnscope.views.tables.plain_text import dim_lines, heading, plain_table

_MORE = "+"
_MOST_NAMED = 24
_OTHERWISE = "otherwise"
_MOST_WITH_INTERVALS = 2
_TITLE_CELLS = 22
_NOTHING = Estimate(math.nan, math.nan, math.nan, math.nan, 0.0)


def show(
    findings: Findings,
    console: Console,
    *,
    measures: str | None = None,
    where: str | None = None,
    sort: str | None = None,
    among: Findings | None = None,
) -> None:
    """Prints the grid of roles, the table of heads and what each does; of pictures and recordings what was measured.

    A head that is picked alone has all its measures, each with its interval, in a table of its own instead of the grid.

    Args:
        findings: What to print.
        console: Where to.
        measures: Also these measures of every head, separated by commas.
        where: Which heads alone are printed: see `records.head_query`; the others are blank in the grid.
        sort: In which order they are listed.
        among: The findings that these heads were picked from, if they were: what they are ranked among.

    Raises:
        AttnscopeError: There is no such measure, condition or order.
    """
    among = among or findings
    heads = choose(findings, where, sort)
    if where is not None and not heads:
        console.print(Text("no head fulfils the condition"))
        return
    findings = replace(findings, heads=tuple(heads))
    is_chosen, is_one = len(heads) < len(among.heads), len({(head.layer, head.head) for head in heads}) == 1
    is_picked = is_one and is_chosen and where is None
    if where is not None:
        said = f"match: {heads_summary.printable(where)}"
        console.print(Text(f"{len(heads)} of {amount(len(among.heads), 'head')} {said}"))
    if findings.of_senses:
        console.print(picture_measures(findings, console))
    else:
        if not is_picked:
            console.print(grid(findings, console))
        console.print(table(findings, console))
        if findings.descriptions is not None:
            console.print(Text())
            console.print(description_table(findings, console, every=not is_chosen))
        elif where is not None or sort is not None:
            console.print(Text(f"chosen: {', '.join(full_name(head, findings) for head in heads)}"))
    for part in (*writes_table(findings), *needles_table(findings)):
        console.print(part)
    if measures or is_picked:
        names = heads_summary.named_measures(findings, measures or "all")
        console.print(head_measures(findings, names, among) if is_one else measure_table(findings, names))


def grid(findings: Findings, console: Console) -> RenderableType:
    """The strongest role of every head as a coloured letter, layers down and heads across, and what the letters mean.

    Letters alone suffice (NO_COLOR is respected). Where a layer is wider than the terminal, cells narrow first, then
    its heads go on below. The kinds of attention of an encoder-decoder stand one under the other.
    """
    marks = heads_summary.marks_of(findings)
    parts: list[RenderableType] = []
    for kind in findings.kinds:
        if len(findings.kinds) > 1:
            parts.append(heading(f"{heads_summary.printable(kind)} attention"))
        parts.append(_kind_grid([head for head in findings.heads if head.kind == kind], marks, console.width))
    parts += [Text(), _legend(findings, marks)]
    return Group(*parts)


def table(findings: Findings, console: Console, most: int = 20) -> RenderableType:
    """Heads by role, the largest value first, with the evidence; what has no role, and notes, in a line each.

    A head stands under each of its roles. In a narrow terminal the least important columns go, and a line says which.

    Args:
        findings: What to draw.
        console: Tells the width.
        most: How many heads of a role are listed; a line says how many more there are.
    """
    marks = heads_summary.marks_of(findings)
    found = heads_summary.counts(findings, marks)
    columns, left_out = _fit_columns(_columns(findings, marks), console.width)
    shown = plain_table(space=1)
    for column in columns:
        wraps = column.name in ("role", "also", "does")
        shown.add_column(
            column.title, justify=column.justify, no_wrap=not wraps, overflow="fold", min_width=column.width
        )
    for count in found:
        rows = _heads_with(findings, count.role)
        for place, (head, role) in enumerate(rows[:most]):
            cells = [column.cell(head, role) for column in columns]
            if place == 0:
                cells[0] = _role_name(count.role, marks)
            shown.add_row(*cells)
        if len(rows) > most:
            shown.add_row(Text(f"and {len(rows) - most} more", style="dim"))
    parts: list[RenderableType] = [shown, Text()] if found else []
    if len(findings.heads) > 1 or not found:
        parts.append(_unclassified(findings))
    if found:
        names = {column.name for column in columns}
        parts.append(Text(_explanation(findings, [count.role for count in found], names), style="dim"))
    if left_out:
        parts.append(Text(f"not shown in {console.width} columns: {', '.join(left_out)}", style="dim"))
    said = [heads_summary.corpus_line(findings), *heads_summary.role_notes(findings)]
    said += heads_summary.corpus_notes(findings)
    return Group(*parts, *dim_lines(said))


def measure_table(findings: Findings, names: Sequence[str]) -> RenderableType:
    """Measures of every head; of one or two measures with their intervals and their value under uniform attention.

    Args:
        findings: What to draw.
        names: Which measures, a column each.

    Raises:
        AttnscopeError: There is no such measure.
    """
    heads_summary.require_measures(findings, names)
    return _Measures(findings, tuple(names))


def head_measures(findings: Findings, names: Sequence[str], among: Findings) -> RenderableType:
    """Measures of one head, a row each: value, 95% interval, value under uniform attention, and its place among heads.

    Args:
        findings: The head; of several kinds of attention, each has a table.
        names: Which measures.
        among: All heads of the model; those of the same kind are ranked, the largest value first.
    """
    parts: list[RenderableType] = []
    written = small_number if findings.of_senses else number
    for head in findings.heads:
        others = [other for other in among.heads if other.kind == head.kind]
        shown = plain_table(space=2)
        shown.add_column(full_name(head, findings), overflow="fold")
        for title in ("value", "95% interval", "uniform", f"rank of {len(others)}"):
            shown.add_column(title, justify="right", no_wrap=True)
        for name in names:
            one = head.measures.get(name, _NOTHING)
            values = [other.measures[name].value for other in others if name in other.measures]
            rank = 1 + sum(value > one.value for value in values)
            shown.add_row(
                Text(heads_summary.title_of(findings, name)),
                Text(written(one.value), style="cyan"),
                interval(one.low, one.high, written),
                written(one.uniform),
                f"{rank}" if math.isfinite(one.value) else heads_summary.UNDEFINED,
            )
        parts += [Text(), shown]
    said = ["rank: 1 = the largest value; uniform: the value under uniform attention over the same keys"]
    return Group(*parts, *dim_lines(said))


@dataclass(frozen=True, eq=False)
class _Measures:
    """Measures of every head, as many side by side as the terminal has room for, the others below."""

    findings: Findings
    names: tuple[str, ...]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        columns = self._columns()
        heads = [Text(full_name(head, self.findings), style="bold") for head in self.findings.heads]
        room = options.max_width - max((head.cell_len for head in heads), default=4)
        while columns:
            n_shown = max(1, sum(total <= room for total in accumulate(width + 2 for _, width, _ in columns)))
            shown = plain_table()
            shown.add_column("head", no_wrap=True)
            for title, width, _ in columns[:n_shown]:
                shown.add_column(title, justify="right", width=width, overflow="fold")
            for head, *cells in zip(heads, *(cells for _, _, cells in columns[:n_shown]), strict=True):
                shown.add_row(head, *cells)
            yield shown
            yield Text()
            columns = columns[n_shown:]
        for name in self.names:
            if what := self.findings.measure_facts(name).what:
                yield Text(heads_summary.printable(f"{name}: {what}"), style="dim")

    def _columns(self) -> list[tuple[Text, int, list[Text]]]:
        """Title, width and cells of each column."""
        columns = []
        written = small_number if self.findings.of_senses else number
        for name in self.names:
            title = heads_summary.title_of(self.findings, name)
            estimates = [head.measures.get(name, _NOTHING) for head in self.findings.heads]
            cells = {title: [Text(written(one.value), style="cyan") for one in estimates]}
            if len(self.names) <= _MOST_WITH_INTERVALS:
                cells["95% interval"] = [Text(interval(one.low, one.high, written)) for one in estimates]
                cells["uniform"] = [Text(written(one.uniform)) for one in estimates]
            for over, column in cells.items():
                widest = max((cell.cell_len for cell in column), default=1)
                columns.append((Text(over), max(widest, min(cell_len(over), _TITLE_CELLS)), column))
        return columns


def _kind_grid(heads: Sequence[Head], marks: Mapping[str, Mark], width: int) -> Text:
    by_head = {(head.layer, head.head): head for head in heads}
    layers = range(max(layer for layer, _ in by_head) + 1)
    n_heads = max(head for _, head in by_head) + 1
    cell = max(2, min(4, room_for(layers, width) // n_heads))

    def draw(text: Text, layer: int, head: int) -> None:
        _add_cell(text, by_head.get((layer, head)), marks, cell)

    return head_grid(layers, range(n_heads), cell, width, draw)


def _add_cell(text: Text, head: Head | None, marks: Mapping[str, Mark], cell: int) -> None:
    pad, gap = (" ", " ") if cell == 4 else ("", " " if cell == 3 else "")
    if head is None:
        text.append(" " * cell)
    elif not head.roles:
        text.append(f"{pad}{UNCLASSIFIED} {gap}", style="dim")
    else:
        more = _MORE if len(head.roles) > 1 else " "
        mark = marks[head.roles[0].name]
        text.append(pad + mark.letter(head.roles[0]) + more, style=_style(mark))
        text.append(gap)


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
            f"the letter is the strongest role, a sink's only where there is no other; {_MORE} = there are more"
        )
    if any(head.roles and head.roles[0].tentative for head in findings.heads):
        hints.append("a small letter = tentative")
    parts: list[RenderableType] = [Columns(entries, padding=(0, 2))] if entries else []
    return Group(*parts, *([Text("; ".join(hints), style="dim")] if hints else []))


def _role_name(role: str, marks: Mapping[str, Mark]) -> Text:
    text = Text()
    text.append(f" {marks[role].glyph} ", style=_style(marks[role]))
    return text.append(f" {label(role)}")


@dataclass(frozen=True)
class _Column:
    """A column of the table: its narrowest width, and how soon it goes where there is no room (0 = never)."""

    name: str
    title: str
    justify: Literal["left", "right"]
    width: int
    goes: int
    cell: Callable[[Head, Role], Text]


def _columns(findings: Findings, marks: Mapping[str, Mark]) -> list[_Column]:
    """All columns, and what stands in them; `role` is empty but for the first row of a role."""
    heads = [head for head in findings.heads if head.roles]
    roles = [role for head in heads for role in head.roles]
    n_more = max((len(head.roles) for head in heads), default=1) - 1
    names = max((len(full_name(head, findings)) for head in heads), default=4)
    widest = max((cell_len(label(role.name)) for role in roles), default=4)
    intervals = max((len(interval(role.low, role.high)) for role in roles), default=1)
    columns = [
        _Column("role", "role", "left", min(4 + widest, 18), 0, lambda head, role: Text()),
        _Column("head", "head", "left", names, 0, lambda head, role: Text(full_name(head, findings), style="bold")),
        _Column("value", "value", "right", 5, 0, lambda head, role: Text(number(role.value), style="cyan")),
        _Column("interval", "95% interval", "right", max(12, intervals), 7,
                lambda head, role: Text(interval(role.low, role.high))),
        _Column("baseline", "baseline", "right", 8, 5, lambda head, role: Text(number(role.baseline))),
        _Column("q", "q", "right", 6, 4, lambda head, role: Text(_q(role.q))),
        _Column("share", "share", "right", 5, 3, lambda head, role: Text(_share(role))),
    ]  # fmt: skip
    if any(math.isfinite(head.resting_share) for head in heads):
        sinks = _Column("sinks", "sinks", "right", 5, 6, lambda head, role: Text(percent(head.resting_share)))
        columns.insert(2, sinks)
    if any(head.effects for head in heads):
        columns.append(_Column("effect", "effect", "right", 7, 0, lambda head, role: _effect(findings, head)))
    if any(heads_summary.nearest_role(findings, head) for head in heads):
        columns.append(_Column(_OTHERWISE, _OTHERWISE, "left", 22, 1, lambda head, role: _nearest(findings, head)))
    if any(heads_summary.does(findings, head) for head in heads):
        columns.append(
            _Column("does", "does", "left", 18, 1, lambda head, role: Text(heads_summary.does(findings, head)))
        )
    if n_more:
        width = min(5, max(4, 2 * n_more - 1))
        columns.append(_Column("also", "also", "left", width, 2, lambda head, role: _other_roles(head, role, marks)))
    return columns


def _effect(findings: Findings, head: Head) -> Text:
    """What changes without a head; dim where that is nothing."""
    name = f"zero_{findings.options.get('causal', {}).get('quantity')}"
    effect = head.effects.get(name)
    if effect is None:
        return Text(heads_summary.UNDEFINED)
    return Text(small_number(effect.value), style="dim" if findings.does_nothing(head) else "")


def _nearest(findings: Findings, head: Head) -> Text:
    """What a head that is only a sink comes nearest to otherwise, as "local 0.45 of 9%"; dim, for it is no role."""
    found = heads_summary.nearest_role(findings, head)
    if found is None:
        return Text()
    return Text(f"{label(found.role)} {number(found.value)} of {percent(found.share)}", style="dim")


def _fit_columns(columns: list[_Column], width: int) -> tuple[list[_Column], list[str]]:
    """The columns that the terminal has room for, and the names of those that it has not."""
    left_out = []
    while sum(column.width + 1 for column in columns) > width + 1:
        first = min((column for column in columns if column.goes), key=lambda column: column.goes, default=None)
        if first is None:
            break
        if first.name != _OTHERWISE:  # the notes sum it up
            left_out.append(first.name)
        columns = [column for column in columns if column is not first]
    return columns, left_out


def _heads_with(findings: Findings, name: str) -> list[tuple[Head, Role]]:
    """The heads that have a role, the largest value first."""
    found = [(head, role) for head in findings.heads for role in head.roles if role.name == name]
    return sorted(found, key=lambda pair: -pair[1].value if math.isfinite(pair[1].value) else math.inf)


def _q(q: float) -> str:
    return "<0.001" if q < 0.001 else f"{q:.3f}" if q == q else heads_summary.UNDEFINED


def _share(role: Role) -> str:
    return "all" if role.active_share is None else percent(role.active_share)


def _other_roles(head: Head, shown: Role, marks: Mapping[str, Mark]) -> Text:
    text = Text()
    for role in head.roles:
        if role.name != shown.name:
            text.append(" " if text else "")
            text.append(marks[role.name].letter(role), style=_style(marks[role.name]))
    return text


def _unclassified(findings: Findings) -> Text:
    heads = heads_summary.unclassified(findings.heads)
    text = Text("unclassified: ", style="bold")
    text.append(f"{len(heads)} of {len(findings.heads)} heads", style="not bold")
    if heads:
        named = ", ".join(full_name(head, findings) for head in heads[:_MOST_NAMED])
        more = f" and {len(heads) - _MOST_NAMED} more" if len(heads) > _MOST_NAMED else ""
        text.append(f": {named}{more}", style="not bold")
    return text


def _explanation(findings: Findings, roles: Sequence[str], shown: Collection[str]) -> str:
    """How to read the columns that are shown."""
    needed = ", ".join(f"{label(role)} {number(findings.role_facts(role).threshold)}" for role in roles)
    said = {
        "sinks": "sink share, attention on special tokens and the first",
        "share": "how much of the attention the value is about: all of it, or that share excluding sinks",
    }
    causal = findings.options.get("causal")
    if isinstance(causal, dict):
        said["effect"] = f"{heads_summary.printable(causal.get('what'))} without the head, by zero ablation"
    said[_OTHERWISE] = (
        "of a head that is only a sink, the strongest measure excluding sinks, and of how much attention; it is no role"
    )
    columns = [f"{name}: {what}" for name, what in said.items() if name in shown]
    return "; ".join([*columns, f"a role must exceed its baseline and: {needed}"])
