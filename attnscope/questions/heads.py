"""Heads: what each head of a model does, one line per head, with roles and their evidence."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console, RenderableType

from attnscope.errors import AttnscopeError, UsageError, amount, require_choice, suggest
from attnscope.questions.ablate import quantity_column
from attnscope.questions.head_roles import (
    RoleGrid,
    carried_line,
    control_line,
    description_notes,
    evidence_line,
    idle_line,
    marks_of,
    nearest_roles_line,
)
from attnscope.records.heads.descriptions import EVEN, HeadDescription
from attnscope.records.heads.findings import Findings, Head
from attnscope.records.heads.needles import CopiedWithout, Needles
from attnscope.report.blocks import Block, HeadMap, Note, Ranking, Report, Special, Words
from attnscope.report.numbers import interval_of, number, percent, q_value
from attnscope.report.plain_text import cut
from attnscope.report.terminal import render
from attnscope.report.wording import corpus_line, corpus_notes, full_name, label, model_of, printable, title_of
from attnscope.results.table import Table
from attnscope.results.table import number as number_column

SORTS = ("layer", "explained", "entropy")
"""Orders of heads: as in the model, the best described, or the sharpest first."""

SINKS = ("first_token", "outlier_token", "sink", "delimiter")
"""Roles of heads that rest: their attention goes where it does nothing."""

FAMILIES = {
    "rest mostly on sinks": SINKS,
    "look next door": ("previous_token", "next_token", "self_token", "local"),
    "look for the same or a similar token": ("same_token", "induction", "similar_token"),
    "look for rare tokens": ("rare",),
    "spread evenly": ("diffuse",),
}
"""What heads do by their first role, in the words of the answer."""

MOST_TOLD = 10
"""Heads that are listed where neither heads nor an order are chosen."""

MOST_LETTERS = 36
"""Letters of a head's line in that list; the whole line comes with --all."""

LEADING = ("distance_patches", "monotonicity")
"""The measure of pictures and of recordings whose map is shown."""

EFFECTS = ("zero_loss", "zero_l2", "zero_kl")
"""Columns of what changes without a head that are titled as `ablate` titles them."""

_SHARES = re.compile(r" \((\d+%; uniform )?\d+%\)")
_PARTS = re.compile(r"(?<=[,;]) (?![^(]*\))")
"""Where a line may be cut: after a comma or semicolon that is in no brackets."""

_EXACT = ("previous_token", "next_token", "self_token")


def show(
    findings: Findings,
    console: Console,
    *,
    measures: str | None = None,
    sort: str | None = None,
    every: bool | None = None,
    among: Findings | None = None,
) -> RenderableType:
    """Return what the terminal prints of heads; see `report`."""
    return render(report(findings, measures=measures, sort=sort, among=among), console, every=bool(every))


def report(
    findings: Findings, *, measures: str | None = None, sort: str | None = None, among: Findings | None = None
) -> Report:
    """Return what heads do, those with most to say first.

    Args:
        findings: What was found.
        measures: Names of measures that are listed of every head, with commas between; "all" is every one.
        sort: One of SORTS: all heads in this order, with the number that it goes by.
        among: The findings that heads were picked from, among which a head that is picked alone is ranked.

    Raises:
        AttnscopeError: There is no such measure or order.
    """
    require_sort(sort)
    blocks: list[Block] = []
    is_chosen = among is not None and len(findings.heads) < len(among.heads)
    is_one = is_chosen and len({(head.layer, head.head) for head in findings.heads}) == 1
    if findings.of_senses:
        blocks += _senses_blocks(findings)
    elif any(head.roles for head in findings.heads) or (findings.descriptions and findings.descriptions.heads):
        blocks += _blocks(findings, sort, is_chosen=is_chosen)
    blocks += _needles_blocks(findings.needles)
    if is_one:
        blocks += [_measures_of_one(findings, head, among or findings) for head in findings.heads]
    elif measures:
        blocks.append(measures_block(findings, parse_measures(findings, measures), sort))
    notes = [nearest_roles_line(findings), carried_line(findings), *description_notes(findings)]
    return Report(
        model=model_of(findings.run),
        answer=_answer(findings),
        blocks=blocks,
        guide=_guide(findings),
        source=corpus_line(findings),
        problems=corpus_notes(findings),
        notes=[note for note in notes if note],
    )


# The answer


def _answer(findings: Findings) -> list[str]:
    """Say how many heads do what, each counted once, by its first role."""
    sources = corpus_line(findings)
    heads = findings.heads
    if findings.of_senses:
        return [f"{model_of(findings.run)}: what its {amount(len(heads), 'head')} measure on {sources}"]
    firsts = Counter(head.roles[0].name for head in heads if head.roles)
    said = {words: sum(firsts.pop(name, 0) for name in names) for words, names in FAMILIES.items()}
    said |= {f"have the role {label(name)}": n for name, n in firsts.items()}
    counted = sorted([(n, words) for words, n in said.items() if n], key=lambda count: -count[0])
    n_none = sum(not head.roles for head in heads)
    if n_none and counted:
        counted.append((n_none, "have no role"))
    parts: list[str] = []
    for n, words in counted:
        of = "" if parts else f" of {amount(len(heads), 'head')}"
        verb, _, rest = words.partition(" ")
        singular = "has" if verb == "have" else f"{verb}s"
        parts.append(f"{n}{of} {singular if n == 1 else verb} {rest}")
    said_of_all = ", ".join(parts) or f"none of its {amount(len(heads), 'head')} has a role"
    answer = [f"{model_of(findings.run)}: {said_of_all}"]
    evidence = evidence_line(findings)
    if not parts and evidence:
        answer = []  # it says why there is none
    return [*answer, *filter(None, (evidence, idle_line(findings), control_line(findings.control)))]


def _guide(findings: Findings) -> list[str]:
    """Say how to read it."""
    if findings.of_senses:
        return ["uniform: the value of a head that attends to all keys alike"]
    guide = []
    if any(head.roles for head in findings.heads):
        guide.append("value: of the measure that the role rests on, with its 95% interval over texts")
    described = findings.descriptions
    if described is not None and not described.heads:
        guide.append(
            "Heads are not described: that takes at least two texts (or chunks of a long one), as what is found on one "
            "is tried on another"
        )
    elif described is not None:
        guide.append(
            "KL explained: the share of what sets attention outside sinks apart from uniform that the line predicts on "
            "held-out texts; a line says where a head looks, not why"
        )
    return guide


# One line per head


def _blocks(findings: Findings, sort: str | None, *, is_chosen: bool) -> Iterator[Block]:
    """Show the heads with most to say, then with --all every head, the roles and their evidence."""
    table = findings.table()
    names = [full_name(head, findings) for head in findings.heads]
    order = sort_heads(findings, sort)
    described = {} if findings.descriptions is None else findings.descriptions.by_head
    lines = [describe_head(head, described.get(head.address)) for head in findings.heads]
    said = [
        Words("value [95%]", [_value(head) for head in findings.heads]),
        Words("KL explained", [_explained(described.get(head.address)) for head in findings.heads]),
    ]
    effect = _effect_column(findings)
    columns: list[str | Words] = [effect] if effect else []
    if effect in EFFECTS:
        shown_as = replace(table.columns[effect], short=quantity_column(effect).short)
        table = Table({**table.columns, effect: shown_as}, table.values)
    columns += [words for words in said if any(words.texts)]
    whole = Words("what it does", [line.whole for line in lines], wraps=True)
    short: list[str | Words] = [Words("what it does", [line.short for line in lines])]
    if sort == "entropy" and "entropy_nats" in table:
        short.insert(0, "entropy_nats")
    if is_chosen:
        yield Ranking(what="head", names=names, table=table, columns=[whole, *columns], order=order, most=len(order))
    else:
        shown = order
        if sort is None:
            telling = {row: _telling(findings, row, described) for row in order}
            shown = sorted(order, key=lambda row: -telling[row])[:MOST_TOLD]
        yield Ranking(
            what="head",
            names=names,
            table=table,
            columns=[*short, *columns],
            order=shown,
            most=max(MOST_TOLD, len(shown)) if sort is None else 20,
        )
        yield _next(findings, len(order) - len(shown))
        yield Ranking(
            heading="every head",
            printed="with --all",
            what="head",
            names=names,
            table=table,
            columns=[whole, *columns],
            order=order,
            most=len(order),
        )
    if any(head.roles for head in findings.heads):
        yield Special(heading="first role of each head", printed="with --all", view=RoleGrid(findings))
        yield _evidence(findings)


def _telling(findings: Findings, row: int, described: Mapping[Any, HeadDescription]) -> float:
    """Return how much there is to say of a head: what its line predicts; without lines, its role's value."""
    head = findings.heads[row]
    if described:
        each = described.get(head.address)
        return each.tells if each is not None else 0.0
    values = [role.value for role in head.roles if role.name not in (*SINKS, "diffuse")]
    return max(values, default=-1.0 + bool(head.roles) / 2)


def _next(findings: Findings, n_more: int) -> Note:
    """Say how many heads are not listed, and what to do next."""
    lines = [f"… {n_more} more with --all"] if n_more else []
    sources = [str(source) for source in findings.corpus.get("sources") or () if "." in str(source)]
    roles = {role.name for head in findings.heads for role in head.roles}
    model = findings.run.get("model")
    where = "" if model in (None, "minilm", "all-MiniLM-L6-v2") else f" -m {printable(model)}"
    if findings.kinds == ("decoder",) and "induction" not in roles and sources:
        lines.append(f"next, heads that repeat what came before: attnscope heads --probe repeat{where}")
    elif sources:
        lines.append(f"next, the texts behind each line: attnscope atlas --file {printable(sources[0])}{where}")
    return Note(lines=lines)


@dataclass(frozen=True)
class Line:
    """What a head does: whole, and as much of it as fits beside its numbers."""

    whole: str
    short: str


def describe_head(head: Head, described: HeadDescription | None) -> Line:
    """Return a line that joins a head's role and its description."""
    roles = [label(role.name) for role in head.roles if role.name not in SINKS]
    if described is None:
        words = ", ".join(label(role.name) for role in head.roles) or "unclassified"
        return Line(words, words)
    warning = f" ! {printable(described.warning, 200)}" if described.warning else ""
    whole = ": ".join([*filter(None, [", ".join(roles)]), printable(described.words, 1000)]) + warning
    summary = described.active.summary if described.active is not None and described.attends else ""
    phrase = _SHARES.sub("", summary) or described.words
    parts = _PARTS.split(phrase)
    if roles and head.roles[0].name in _EXACT:
        # The distance is the role itself.
        phrase = " ".join(re.split(r"; (?:then|equally) ", phrase)[1:])
        parts = _PARTS.split(phrase) if phrase else []
    if roles and phrase.startswith(f"the {roles[0]}"):
        roles = []  # the phrase says it
    room = MOST_LETTERS - (len(roles[0]) + 2 if roles else 0)
    return Line(whole, ": ".join(filter(None, [*roles[:1], _fit(parts, room)])))


def _fit(parts: Sequence[str], room: int) -> str:
    """Join as many parts of a line as there is room for; the first always stands, without its examples if need be."""
    text = ""
    if parts and len(parts[0]) > room - 2:
        first = re.sub(r" \([^)]*\)", "", parts[0])
        parts = [cut(first, room - 2), *parts[1:]]
    for number_of_part, part in enumerate(parts):
        joined = f"{text} {part}".strip()
        if number_of_part and len(joined) > room - 2:
            return text.rstrip(",;…") + " …"
        text = joined
    return text.rstrip(",;")


def _value(head: Head) -> str:
    """Return the value of a head's first role that is no sink's, with its interval."""
    role = next((role for role in head.roles if role.name not in SINKS), None)
    if role is None:
        return ""
    ends = interval_of(role) if math.isfinite(role.low) else ""
    return f"{number(role.value)} {ends}".strip() + (" tentative" if role.tentative else "")


def _explained(described: HeadDescription | None) -> str:
    """Return the share that a line explains, with its interval in per cent; "?" = these texts cannot tell it."""
    if described is None or described.spreads_evenly or described.main.nats < EVEN:
        return ""
    part = described.main
    if math.isnan(part.low):
        return f"{percent(part.explained)} ?"
    low, high = (str(max(round(100 * end), 0)) for end in (part.low, part.high))
    return f"{percent(part.explained)} [{low}, {high}]"


def _effect_column(findings: Findings) -> str:
    """Return the column of what changes without each head (--causal); empty = none was taken out."""
    causal = findings.options.get("causal")
    name = f"zero_{causal.get('quantity')}" if isinstance(causal, Mapping) else ""
    return name if any(name in head.effects for head in findings.heads) else ""


def _evidence(findings: Findings) -> Block:
    """Show each role's heads, the largest value first, with what the value had to exceed."""
    order = list(marks_of(findings))
    rows = [(role, head) for head in findings.heads for role in head.roles]
    rows.sort(key=lambda row: (order.index(row[0].name), -row[0].value if math.isfinite(row[0].value) else math.inf))
    cells = [{"value": role, "baseline": role.baseline, "threshold": role.threshold} for role, _ in rows]
    table = Table.of([number_column("value"), number_column("baseline"), number_column("threshold")], cells)
    shares = ["all" if role.active_share is None else percent(role.active_share) for role, _ in rows]
    return Ranking(
        heading="the evidence for each role",
        printed="with --all",
        what="role",
        names=[label(role.name) for role, _ in rows],
        table=table,
        columns=[
            Words("head", [full_name(head, findings) for _, head in rows]),
            "value",
            Words("q", [q_value(role.q) for role, _ in rows]),
            "threshold",
            "baseline",
            Words("sink mass", [percent(head.resting_share) for _, head in rows]),
            Words("share", shares),
        ],
        order=range(len(rows)),
        most=len(rows),
        notes=[
            "a role's value must exceed its baseline and its threshold; share: how much of the head's attention the "
            "value counts: all of it, or that share outside sinks; sink mass: attention on special tokens and the first"
        ],
    )


# Orders and measures


def require_sort(sort: str | None) -> None:
    """Refuse an order that there is not."""
    if sort is not None and sort not in SORTS:
        raise UsageError(f"there is no order {sort!r}", f"choose from {', '.join(SORTS)}")


def sort_heads(record: Any, sort: str | None = None) -> list[int]:
    """Return the places of the heads of findings or an atlas in an order; None = as in the model."""
    require_sort(sort)
    rows = list(range(len(record.heads)))
    values = [math.nan for _ in rows]
    if sort == "entropy":
        values = [head.estimate("entropy_nats").value for head in record.heads]
    elif sort == "explained" and record.descriptions is not None:
        described = record.descriptions.by_head
        values = [
            -described[head.address].main.explained if head.address in described else math.nan for head in record.heads
        ]
    return sorted(rows, key=lambda row: values[row] if math.isfinite(values[row]) else math.inf)


def require_measures(measures: str | None, known: Sequence[str]) -> None:
    """Refuse measures that are not known; `measures` are their names with commas between, "all" is every one."""
    if measures in (None, "all"):
        return
    for name in str(measures).split(","):
        require_choice("measure", name.strip(), known)


def parse_measures(findings: Findings, listed: str) -> list[str]:
    """Return the measures in a list such as "induction,local"; "all" is every one.

    Raises:
        AttnscopeError: There is no such measure.
    """
    if listed == "all":
        return list(findings.measure_names)
    names = [name.strip() for name in listed.split(",")]
    for name in names:
        if name not in findings.measure_names:
            raise AttnscopeError(
                f"there is no measure {name!r} in these findings", suggest(name, findings.measure_names)
            )
    return names


def large_measures(findings: Findings, listed: str | None) -> list[str]:
    """Return the measures that have a figure of their own: those that are listed and defined for some head."""
    names = [] if listed is None else parse_measures(findings, listed)
    return [name for name in names if any(math.isfinite(head.estimate(name).value) for head in findings.heads)]


def measures_block(findings: Findings, names: Sequence[str], sort: str | None = None) -> Ranking:
    """Show measures of every head, with their intervals."""
    meanings = [printable(f"{name}: {what}") for name in names if (what := findings.measure_facts(name).what)]
    return Ranking(
        heading="measures",
        what="head",
        names=[full_name(head, findings) for head in findings.heads],
        table=findings.table(),
        columns=list(names),
        order=sort_heads(findings, sort),
        most=len(findings.heads),
        notes=meanings,
    )


def _measures_of_one(findings: Findings, head: Head, among: Findings) -> Ranking:
    """Show all measures of one head with its place among the heads of its kind, 1 = the largest value."""
    others = [other for other in among.heads if other.kind == head.kind]
    names = list(findings.measure_names)
    ranks = []
    for name in names:
        value = head.estimate(name).value
        n_larger = sum(other.estimate(name).value > value for other in others)
        ranks.append(f"{n_larger + 1}" if math.isfinite(value) else "–")
    estimates = [{"value": head.estimate(name), "uniform": head.estimate(name).uniform} for name in names]
    carried = [(name, part) for name in names if (part := head.estimate(name).largest_part)]
    listed = ", ".join(f"{title_of(findings, name)} ({percent(part)})" for name, part in carried)
    return Ranking(
        what=full_name(head, findings),
        names=[title_of(findings, name) for name in names],
        table=Table.of([number_column("value"), number_column("uniform")], estimates),
        columns=["value", "uniform", Words(f"rank of {len(others)}", ranks)],
        order=range(len(names)),
        most=len(names),
        noun="measure",
        notes=[
            "rank: 1 = the largest value; uniform: the value under uniform attention over the same keys",
            *([f"one text holds much of the sum: {listed}"] if listed else []),
        ],
    )


def _senses_blocks(findings: Findings) -> Iterator[Block]:
    """Show a map of the leading measure of pictures or recordings, and the extremes of each."""
    names = findings.measure_names
    if not names:
        return
    table = findings.table()
    leading = next((name for name in LEADING if name in names), names[0])
    facts = findings.measure_facts(leading)
    yield HeadMap(heading=f"{title_of(findings, leading)}: {printable(facts.what)}", heads=table, column=leading)
    rows = []
    for name in names:
        known = [head for head in findings.heads if math.isfinite(head.estimate(name).value)]
        if known:
            known.sort(key=lambda head: head.estimate(name).value)
            rows.append((name, known[0], known[-1]))
    cells = [
        {"uniform": most.estimate(name).uniform, "least": least.estimate(name), "largest": most.estimate(name)}
        for name, least, most in rows
    ]
    yield Ranking(
        what="measure",
        names=[printable(name) for name, *_ in rows],
        table=Table.of([number_column("largest"), number_column("least"), number_column("uniform")], cells),
        columns=[
            "largest",
            Words("head", [full_name(most, findings) for *_, most in rows]),
            "least",
            Words("of", [full_name(least, findings) for _, least, _ in rows]),
            "uniform",
        ],
        order=range(len(rows)),
        most=len(rows),
    )


# Needles


def _needles_blocks(needles: Needles | None) -> Iterator[Block]:
    """Show the share of needle tokens that is written, by length and depth, and what is left of it without heads."""
    if needles is None:
        return
    lengths = sorted({at.length for at in needles.at})
    depths = sorted({at.depth for at in needles.at})
    shares = {(at.length, at.depth): number(at.copied.value) for at in needles.at}
    yield Ranking(
        heading="needle tokens that the model writes, by depth of the needle",
        what="tokens",
        names=[f"{length:,}" for length in lengths],
        table=Table.of([], []),
        columns=[
            Words(f"{100 * depth:g}%", [shares.get((length, depth), "–") for length in lengths]) for depth in depths
        ],
        order=range(len(lengths)),
        most=len(lengths),
        notes=needle_notes(needles),
    )
    if needles.without:
        removed: list[Mapping[str, Any]] = [{"written": needles.copied}]
        removed += [{"written": each.copied, "less": each.change} for each in needles.without]
        columns = [number_column("written"), number_column("less", label="less than whole")]
        yield Ranking(
            heading="the same without heads (outputs zero), which half of the needles chose, on the other half",
            what="taken out",
            names=["nothing", *(name_removed(each) for each in needles.without)],
            table=Table.of(columns, removed),
            columns=["written", "less"],
            order=range(len(removed)),
            most=len(removed),
        )


def needle_notes(needles: Needles) -> list[str]:
    """Return what the tables of a probe mean: one sentence each."""
    notes = ["a token counts as written where it is the model's first choice after the right ones before it"]
    if needles.without:
        moved = max(each.n_moved for each in needles.without)
        n = max((each.n_heads for each in needles.without if each.what == "random"), default=0)
        but = f"; {moved} of {n} from others, as the layer has too few" if moved else ""
        notes.append(f"random heads: from the same layers, drawn anew for each needle{but}")
        n_needles = max(each.n_needles for each in needles.without)
        if n_needles:
            notes.append(
                f"heads were taken out on {amount(n_needles, 'needle')}, and chosen on the others alone: "
                "so they may be fewer than have the role by all needles"
            )
    return [*notes, "intervals: 95% over needles"]


def name_removed(removed: CopiedWithout) -> str:
    """Return such as "18 retrieval heads"."""
    return amount(removed.n_heads, f"{removed.what} head")
