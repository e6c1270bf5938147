"""What every view of findings says: a glyph and a colour for each role, counts, numbers and notes. Plain values."""

from __future__ import annotations

import colorsys
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from attnscope.errors import AttnscopeError, amount, suggest
from attnscope.records.heads.findings import Findings, Head, Role
from attnscope.report.numbers import number, percent
from attnscope.report.wording import full_name, label, printable

UNCLASSIFIED = "·"


@dataclass(frozen=True)
class Mark:
    """How a role is drawn: a capital letter that has a small one, for tentative roles, and a colour "#rrggbb"."""

    glyph: str
    color: str

    def letter(self, role: Role) -> str:
        """The glyph as it stands for a role: small where the role is tentative."""
        return self.glyph.lower() if role.tentative else self.glyph


# Okabe and Ito's seven, then colours that were chosen one by one to be as far as possible from all before them: OKLab
# distance, the smallest of normal, deutan, protan and tritan vision (Machado 2009).
MARKS = {
    "previous_token": Mark("P", "#0072B2"),
    "next_token": Mark("N", "#56B4E9"),
    "self_token": Mark("S", "#15197C"),
    "local": Mark("L", "#927EEC"),
    "same_token": Mark("E", "#009E73"),
    "induction": Mark("I", "#D55E00"),
    "similar_token": Mark("M", "#5C0300"),
    "rare": Mark("R", "#CC79A7"),
    "first_token": Mark("F", "#F0E442"),
    "outlier_token": Mark("T", "#88FCA4"),
    "sink": Mark("K", "#E69F00"),
    "delimiter": Mark("D", "#694C50"),
    "diffuse": Mark("U", "#AFC9B4"),
}
MORE_COLORS = (
    "#7C677A", "#901308", "#F4C26A", "#2E40A3", "#8AB181", "#4C3A69",
    "#5D5588",
)  # fmt: skip
_LATIN = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_BEYOND = "ΓΔΘΛΞΠΣΦΨΩБДЖЗИЛФЦЧШЩЭЮЯÄÖÜÉÈÊÅÆØÑÇÀÂÎÔÕÐÞŁŠŽČĐ"
_NO_GLYPH_LEFT = "Ŋ"


def marks_of(findings: Findings) -> dict[str, Mark]:
    """A mark for each role that occurs in findings or their control: the known ones first, each in its fixed place.

    Roles that are not known get a letter of their name, then any that is left. No two roles share a colour; nor a
    glyph, up to about 60 roles.
    """
    return marks_for({role.name for head in (*findings.heads, *findings.control) for role in head.roles})


def marks_for(names: AbstractSet[str]) -> dict[str, Mark]:
    """A mark for each of these roles, as `marks_of`."""
    marks = {name: mark for name, mark in MARKS.items() if name in names}
    taken = {mark.glyph for mark in MARKS.values()}
    for at, name in enumerate(sorted(names - MARKS.keys())):
        wanted = [letter for letter in name.upper() if letter in _LATIN]
        glyph = next((letter for letter in (*wanted, *_LATIN, *_BEYOND) if letter not in taken), _NO_GLYPH_LEFT)
        taken.add(glyph)
        marks[name] = Mark(glyph, _further_color(at))
    return marks


def _further_color(number: int) -> str:
    if number < len(MORE_COLORS):
        return MORE_COLORS[number]
    # Hues a golden angle apart never repeat; by now the glyph has to tell roles apart.
    rest = number - len(MORE_COLORS)
    parts = colorsys.hls_to_rgb(rest * 0.618034 % 1, (0.38, 0.55, 0.72)[rest % 3], 0.6)
    return "#" + "".join(f"{round(part * 255):02X}" for part in parts)


@dataclass(frozen=True)
class Count:
    """How many heads have a role, and of how many it comes first: the strongest, but a sink after all others."""

    role: str
    n_heads: int
    n_strongest: int


def threshold(findings: Findings, role: str) -> str:
    """What a role's measure had to exceed, as written; "" if unknown.

    That of the heads that have the role, from the lowest to the highest: that of `diffuse` depends on how many keys
    there are.
    """
    thresholds = [each.threshold for head in findings.heads for each in head.roles if each.name == role]
    ends = [min(thresholds), max(thresholds)] if thresholds else [findings.role_facts(role).threshold]
    return " to ".join(dict.fromkeys(number(end) for end in ends if math.isfinite(end)))


def counts(findings: Findings, marks: Iterable[str]) -> list[Count]:
    """The roles that heads have, in the order of `marks`."""
    n_heads = _count_roles(findings.heads)
    n_strongest = Counter(head.roles[0].name for head in findings.heads if head.roles)
    return [Count(name, n_heads[name], n_strongest[name]) for name in marks if n_heads[name]]


def _count_roles(heads: Iterable[Head]) -> Counter[str]:
    return Counter(name for head in heads for name in {role.name for role in head.roles})


SINKS = ("first_token", "outlier_token")
"""Roles of sinks: where heads put attention that goes nowhere else."""


_ROUNDING = 1e-6
"""How far a measure may be above uniform attention's by rounding alone."""


@dataclass(frozen=True)
class NearestRole:
    """What a head comes nearest to excluding sinks.

    Attributes:
        role: Its name.
        value: The `_active` measure of that.
        share: The share of the attention of that measure's queries that is on other keys than sinks.
    """

    role: str
    value: float
    share: float


def nearest_role(findings: Findings, head: Head) -> NearestRole | None:
    """What a head that has no role but a sink's comes nearest to: the largest part of a threshold, above uniform.

    None for other heads, and where no measure is above uniform attention's.
    """
    if not _is_only_sink(head):
        return None
    parts: dict[NearestRole, float] = {}
    for name in _role_names(findings):
        facts = findings.role_facts(name)
        active, whole = head.measures.get(f"{facts.measure}_active"), head.measures.get(facts.measure)
        if name in SINKS or active is None or whole is None:
            continue
        if active.value > active.uniform + _ROUNDING and whole.count > 0:
            parts[NearestRole(name, active.value, active.count / whole.count)] = active.value / facts.threshold
    return max(parts, key=lambda role: parts[role], default=None)


def _is_only_sink(head: Head) -> bool:
    return bool(head.roles) and all(role.name in SINKS for role in head.roles)


def _role_names(findings: Findings) -> list[str]:
    """The roles that were asked for; none where the record does not say."""
    roles = findings.options.get("roles")
    return list(roles) if isinstance(roles, Mapping) else []


def nearest_roles_line(findings: Findings) -> str:
    """What the heads that have no role but a sink's come nearest to elsewhere; empty where there are none."""
    sinks = [head for head in findings.heads if _is_only_sink(head)]
    n_heads = Counter(nearest.role for head in sinks if (nearest := nearest_role(findings, head)) is not None)
    if not n_heads:
        return ""
    return (
        f"{amount(len(sinks), 'head is only a sink', 'heads are only sinks')}; strongest pattern outside sinks, "
        f"too weak or uncertain for a role: {', '.join(f'{label(name)} {n}' for name, n in n_heads.most_common())}"
    )


def parse_measures(findings: Findings, listed: str) -> list[str]:
    """The measures in a list such as "induction,local"; "all" is every one.

    Raises:
        AttnscopeError: There is no such measure.
    """
    if listed == "all":
        return list(findings.measure_names)
    names = [name.strip() for name in listed.split(",")]
    require_measures(findings, names)
    return names


def require_measures(findings: Findings, names: Iterable[str]) -> None:
    """Refuses names of measures that findings do not have.

    Raises:
        AttnscopeError: There is no such measure.
    """
    for name in names:
        if name not in findings.measure_names:
            raise AttnscopeError(
                f"there is no measure {name!r} in these findings", suggest(name, findings.measure_names)
            )


def large_measures(findings: Findings, listed: str | None) -> list[str]:
    """The measures that have a figure of their own: those that are listed and defined for some head."""
    names = [] if listed is None else parse_measures(findings, listed)
    return [name for name in names if any(math.isfinite(head.estimate(name).value) for head in findings.heads)]


def unclassified(heads: Iterable[Head]) -> list[Head]:
    """The heads without any role."""
    return [head for head in heads if not head.roles]


def role_notes(findings: Findings) -> list[str]:
    """What a reader of roles must know beside them: one sentence each."""
    lines = (
        idle_line(findings),
        nearest_roles_line(findings),
        evidence_line(findings),
        carried_line(findings),
        _control_line(findings.control),
    )
    return [line for line in lines if line]


def _control_line(heads: Sequence[Head]) -> str:
    if not heads:
        return ""
    roles = [f"{n} {label(name)}" for name, n in _count_roles(heads).most_common()]
    n_none = len(unclassified(heads))
    roles += [f"{n_none} unclassified"] if n_none else []
    return f"untrained control (random weights, same texts), {amount(len(heads), 'head')}: {', '.join(roles)}"


def evidence_line(findings: Findings) -> str:
    """What few texts mean for roles, in numbers; empty where there are enough, or the record does not say how many."""
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
    if not isinstance(least, int):  # a record of version 0.1 or earlier
        return "tentative (small letter): a role that rests on its value alone, as so few texts give no interval"
    return f"tentative (small letter): a role on the evidence of {least} to {fewest} texts of one length{weight}"


def carried_line(findings: Findings) -> str:
    """Return which roles rest on a sum of which one text holds much; empty if none does."""
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
    """Which heads look like something and do nothing; empty where none was taken out (`heads --causal`)."""
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
    """From which texts heads are described, and in how many the halves of the texts agree: one sentence each."""
    described = findings.descriptions
    if described is None or not described.heads:
        return []
    n_texts = findings.corpus.get("n_texts")
    said = [described.sample_line(n_texts if isinstance(n_texts, int) else None), described.stability_line]
    return [line for line in said if line]
