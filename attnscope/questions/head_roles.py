"""What is said of the roles of heads and of their evidence: counts, the grid of letters, what comes nearest."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.columns import Columns
from rich.console import Console, RenderableType
from rich.style import Style
from rich.text import Text

from attnscope.drawing.inks import ink_on
from attnscope.errors import amount
from attnscope.records.heads.descriptions import UNSURE
from attnscope.records.heads.findings import Findings, Head
from attnscope.report.blocks import Report
from attnscope.report.matrix import head_grid, room_for
from attnscope.report.numbers import number, percent
from attnscope.report.plain_text import heading
from attnscope.report.role_marks import UNCLASSIFIED, Mark, marks_for
from attnscope.report.wording import full_name, label, printable

_ROUNDING = 1e-6
"""How far a measure may be above uniform attention's by rounding alone."""


def marks_of(findings: Findings) -> dict[str, Mark]:
    """Return a mark for each role that occurs in findings or their control, in a fixed order."""
    return marks_for({role.name for head in (*findings.heads, *findings.control) for role in head.roles})


@dataclass(frozen=True)
class Count:
    """How many heads have a role, and of how many it comes first: the strongest, but a sink after all others."""

    role: str
    n_heads: int
    n_strongest: int


def counts(findings: Findings, marks: Sequence[str] | Mapping[str, Mark]) -> list[Count]:
    """Return the roles that heads have, in the order of `marks`."""
    n_heads = _count_roles(findings.heads)
    n_strongest = Counter(head.roles[0].name for head in findings.heads if head.roles)
    return [Count(name, n_heads[name], n_strongest[name]) for name in marks if n_heads[name]]


def _count_roles(heads: Sequence[Head]) -> Counter[str]:
    return Counter(name for head in heads for name in {role.name for role in head.roles})


def unclassified(heads: Sequence[Head]) -> list[Head]:
    """Return the heads without any role."""
    return [head for head in heads if not head.roles]


def threshold(findings: Findings, role: str) -> str:
    """Return what a role's measure had to exceed, as written; "" if unknown.

    That of the heads that have the role, from the lowest to the highest: that of `diffuse` depends on how many keys
    there are.
    """
    thresholds = [each.threshold for head in findings.heads for each in head.roles if each.name == role]
    ends = [min(thresholds), max(thresholds)] if thresholds else [findings.role_facts(role).threshold]
    return " to ".join(dict.fromkeys(number(end) for end in ends if math.isfinite(end)))


@dataclass(frozen=True)
class RoleGrid:
    """The first role of every head as a coloured letter, layers down and heads across, and what the letters mean.

    Letters alone suffice (NO_COLOR is respected). Where a layer is wider than the terminal, cells narrow first, then
    its heads go on below. The kinds of attention of an encoder-decoder stand one under the other.
    """

    findings: Findings

    def show(self, console: Console, *, every: bool) -> Sequence[RenderableType]:
        """Return the grids, one per kind of attention, and the legend."""
        findings = self.findings
        marks = marks_of(findings)
        parts: list[RenderableType] = []
        for kind in findings.kinds:
            if len(findings.kinds) > 1:
                parts.append(heading(f"{printable(kind)} attention"))
            parts.append(_kind_grid([head for head in findings.heads if head.kind == kind], marks, console.width))
        entries = [_entry(count, marks) for count in counts(findings, marks)]
        n_none = len(unclassified(findings.heads))
        if n_none:
            entries.append(Text(f" {UNCLASSIFIED}  unclassified {n_none}"))
        hints = []
        if any(len(head.roles) > 1 for head in findings.heads):
            hints.append(
                "the letter is the head's strongest role, or a sink's if it has no other; +: it has more roles"
            )
        if any(head.roles and head.roles[0].tentative for head in findings.heads):
            hints.append("a small letter = tentative")
        parts += [Text(), Columns(entries, padding=(0, 2)), Text("; ".join(hints), style="dim")]
        return parts

    def draw(self, report: Report, lettering: Any) -> Any:
        """Return nothing: `views.heads.figures` draws roles."""


def _kind_grid(heads: Sequence[Head], marks: Mapping[str, Mark], width: int) -> Text:
    by_place = {(head.layer, head.head): head for head in heads}
    layers = range(max(layer for layer, _ in by_place) + 1)
    n_heads = max(head for _, head in by_place) + 1
    cell = max(2, min(4, room_for(layers, width) // n_heads))
    before = " " if cell == 4 else ""
    after = "" if cell == 2 else " "

    def draw(text: Text, layer: int, place: int) -> None:
        head = by_place.get((layer, place))
        if head is None:
            text.append(" " * cell)
        elif not head.roles:
            text.append(f"{before}{UNCLASSIFIED} {after}", style="dim")
        else:
            role = head.roles[0]
            mark = marks[role.name]
            more = "+" if len(head.roles) > 1 else " "
            text.append(before + mark.letter(tentative=role.tentative) + more, style=_style(mark)).append(after)

    return head_grid(layers, range(n_heads), cell, width, draw)


def _style(mark: Mark) -> Style:
    return Style(color=ink_on(mark.color), bgcolor=mark.color, bold=True)


def _entry(count: Count, marks: Mapping[str, Mark]) -> Text:
    """Return what a letter means, and how many heads have it."""
    text = Text(f" {marks[count.role].glyph} ", style=_style(marks[count.role]))
    entry = Text().append_text(text).append(f" {label(count.role)} ").append(f"{count.n_heads}", style="bold")
    if count.n_strongest < count.n_heads:
        entry.append(f", first in {count.n_strongest}" if count.n_strongest else ", never first", style="dim")
    return entry


# What is said of roles and descriptions


@dataclass(frozen=True)
class NearestRole:
    """What a head that only rests comes nearest to outside sinks.

    Attributes:
        role: Its name.
        value: The `_active` measure of that.
        share: The share of the attention of that measure's queries that is on other keys than sinks.
    """

    role: str
    value: float
    share: float


def nearest_role(findings: Findings, head: Head) -> NearestRole | None:
    """Return what a head without a role but a sink's comes nearest to: the largest part of a threshold.

    None for other heads, and where no measure is above uniform attention's.
    """
    if not _is_only_sink(head):
        return None
    roles = findings.options.get("roles")
    parts: dict[NearestRole, float] = {}
    for name in roles if isinstance(roles, Mapping) else ():
        facts = findings.role_facts(name)
        active = head.measures.get(f"{facts.measure}_active")
        whole = head.measures.get(facts.measure)
        if name in ("first_token", "outlier_token") or active is None or whole is None:
            continue
        if active.value > active.uniform + _ROUNDING and whole.count > 0:
            parts[NearestRole(name, active.value, active.count / whole.count)] = active.value / facts.threshold
    return max(parts, key=lambda role: parts[role], default=None)


def _is_only_sink(head: Head) -> bool:
    return bool(head.roles) and all(role.name in ("first_token", "outlier_token") for role in head.roles)


def role_notes(findings: Findings) -> list[str]:
    """Return what a reader of roles must know beside them: one sentence each."""
    lines = (
        idle_line(findings),
        nearest_roles_line(findings),
        evidence_line(findings),
        carried_line(findings),
        control_line(findings.control),
    )
    return [line for line in lines if line]


def nearest_roles_line(findings: Findings) -> str:
    """Say what the heads that have no role but a sink's come nearest to elsewhere; empty where there are none."""
    sinks = [head for head in findings.heads if _is_only_sink(head)]
    n_heads = Counter(nearest.role for head in sinks if (nearest := nearest_role(findings, head)) is not None)
    if not n_heads:
        return ""
    return (
        f"{amount(len(sinks), 'head is only a sink', 'heads are only sinks')}; strongest pattern outside sinks, "
        f"too weak or uncertain for a role: {', '.join(f'{label(name)} {n}' for name, n in n_heads.most_common())}"
    )


def control_line(heads: Sequence[Head]) -> str:
    """Say how many heads of a model with random weights have roles; empty = none was studied."""
    if not heads:
        return ""
    roles = [f"{n} {label(name)}" for name, n in _count_roles(heads).most_common()]
    n_none = len(unclassified(heads))
    roles += [f"{n_none} unclassified"] if n_none else []
    return f"untrained control (random weights, same texts), {amount(len(heads), 'head')}: {', '.join(roles)}"


def evidence_line(findings: Findings) -> str:
    """Say what few texts mean for roles; empty where there are enough, or the record does not say how many."""
    fewest, least = (findings.options.get(name) for name in ("fewest_texts", "least_texts"))
    effective = findings.corpus.get("effective_texts")
    weight = ""
    if isinstance(effective, int | float) and findings.heads:
        if findings.corpus.get("n_texts") != 1:
            weight = f"; all together weigh as much as {effective:.1f} texts of one length"
        if isinstance(least, int) and effective < least:
            return (
                f"no role can be given below {least} texts{weight}: give more texts, or cut long ones into chunks that "
                "count apart (--chunk 512)"
            )
    if not any(role.tentative for head in findings.heads for role in head.roles):
        return ""
    return f"tentative (small letter): a role on the evidence of {least} to {fewest} texts of one length{weight}"


def carried_line(findings: Findings) -> str:
    """Say which roles rest on a sum of which one text holds much; empty if none does."""
    parts = [
        (part, f"{full_name(head, findings)} {label(role.name)} ({percent(part)})")
        for head in findings.heads
        for role in head.roles
        if (part := head.estimate(role.measure).largest_part)
    ]
    if not parts:
        return ""
    named = [words for _, words in sorted(parts, key=lambda part: -part[0])]
    more = f" and {len(named) - 6} more" if len(named) > 6 else ""
    return f"one text holds much of what a role adds up: {', '.join(named[:6])}{more}"


def idle_line(findings: Findings) -> str:
    """Say which heads look like something and do nothing; empty where none was taken out (`heads --causal`)."""
    tried = [head for head in findings.heads if head.roles and head.effects]
    causal = findings.options.get("causal")
    if not tried or causal is None:
        return ""
    idle = [head for head in tried if findings.does_nothing(head)]
    what = f"{printable(causal.get('what', 'effect'))} below {causal.get('nothing_below'):g}"
    if not idle:
        return f"{amount(len(tried), 'head')} with a role, and each does something: none has {what}"
    named = ", ".join(f"{full_name(head, findings)} ({label(head.roles[0].name)})" for head in idle[:12])
    more = f" and {len(idle) - 12} more" if len(idle) > 12 else ""
    return f"look like something and do nothing ({what}): {named}{more}"


def description_notes(findings: Findings) -> list[str]:
    """Say from which texts heads are described, how lines read, and how sure they are: one sentence each."""
    described = findings.descriptions
    if described is None or not described.heads:
        return []
    n_texts = findings.corpus.get("n_texts")
    notes = [described.sample_line(n_texts if isinstance(n_texts, int) else None), described.stability_line]
    n_unsure = sum(each.is_unsure for each in described.heads if not each.spreads_evenly)
    if n_unsure:
        notes.append(
            f"these texts cannot tell how much of {amount(n_unsure, 'head')} is explained: the interval is wider than "
            f"{100 * UNSURE:.0f} points, or there is none (?); give more texts, as a head that mostly rests needs many"
        )
    kinds = {each.kind for each in described.heads}
    n_other = sum(head.kind not in kinds for head in findings.heads)
    if n_other:
        notes.append(
            f"{amount(n_other, 'head is', 'heads are')} not described: only the first kind of attention of a model is"
        )
    notes.append(
        "nouns 1.6× (door, key): nouns, such as door and key, get 1.6 times what the rest of the line gives them; "
        "(69%; uniform 34%): the share of attention there, and under uniform attention; then: a weaker part; "
        "equally: an equally strong part; from …: only from such queries"
    )
    return [line for line in notes if line]
