"""What every view of relations says: verdicts, rows, notes. Plain values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from attnscope.errors import amount
from attnscope.records.frame.pair_tables import head_name
from attnscope.records.relations.record import LEAST_MASS, Example, Relation, Relations
from attnscope.report.numbers import UNDEFINED, interval, number
from attnscope.report.wording import printable

Verdict = Literal["yes", "weakly", "others", "no", "none"]

RIGHT, WRONG, GOLD = "#0072B2", "#D55E00", "#8a8a8a"
"""Colours of Okabe and Ito, which everybody can tell apart; views tell right from wrong by form as well."""


def verdict(relation: Relation) -> Verdict:
    """Whether the chosen head expresses a relation, does with little weight, only others do, none, or none can say."""
    if relation.why_no_verdict:
        return "none"
    if relation.best_found:
        return "weakly" if relation.weak else "yes"
    return "others" if relation.found.any() else "no"


def list_relations(relations: Relations) -> list[Relation]:
    """The relations that have a row: one example is none, unless no relation has more."""
    several = [relation for relation in relations.ranked if relation.n_scored > 1 or relation.found.any()]
    return several or [*relations.ranked]


def unlisted_line(relations: Relations) -> str:
    """Which relations have no row, and why; empty if all have one."""
    listed = {relation.name for relation in list_relations(relations)}
    names = [printable(relation.name, 40) for relation in relations.ranked if relation.name not in listed]
    if not names:
        return ""
    few = ", ".join(names[:3]) + (" …" if len(names) > 3 else "")
    return f"without a row, as there is one example at most: {amount(len(names), 'relation')} ({few})"


@dataclass(frozen=True)
class Row:
    """A relation as a table shows it; all but the name may be `–`."""

    name: str
    head: str
    accuracy: str
    interval: str
    baseline: str
    rule: str
    n: str
    mass: str
    verdict: str


def row(relation: Relation) -> Row:
    """The chosen head of a relation on the half that it was not chosen on."""
    best = relation.best
    accuracy, low, high, mass = (
        (math.nan,) * 4
        if best is None
        else (float(part[best]) for part in (relation.accuracy, relation.low, relation.high, relation.mass))
    )
    kind = verdict(relation)
    text = {"others": f"only {_names(relation.others_found())}", "none": "too few"}.get(kind, kind)
    if kind in ("yes", "weakly"):
        others = [head for head in relation.others_found() if head not in relation.ties]
        text += f"; tied with {_names(relation.ties)}" if relation.ties else ""
        text += f"; also {_names(others)}" if others else ""
    return Row(
        name=printable(relation.name, 60),
        head=UNDEFINED if best is None else head_name(best),
        accuracy=number(accuracy),
        interval=interval(low, high),
        baseline=number(relation.baseline),
        rule=printable(relation.rule, 40),
        n=f"{relation.n_scored:,}",
        mass=number(mass),
        verdict=text,
    )


def _names(heads: Sequence[tuple[int, int]]) -> str:
    return ", ".join(map(head_name, heads[:2])) + (", …" if len(heads) > 2 else "")


def is_expressed(relation: Relation) -> bool:
    """Whether some head expresses the relation."""
    return relation.best_found or bool(relation.found.any())


def count_line(relations: Relations) -> str:
    """Such as "12 of 90 relations are expressed by some head"."""
    n = sum(map(is_expressed, relations.relations))
    judged = sum(not relation.why_no_verdict for relation in relations.relations)
    without = len(relations.relations) - judged
    if not judged and without:
        several = f"none of {without} relations has" if without > 1 else "the one relation does not have"
        return f"{several} enough examples for a verdict"
    beside = f"; {without} more have too few examples for a verdict" if without else ""
    return f"{n} of {judged} relations are expressed by some head{beside}"


def explanation(record: Relations) -> str:
    """How to read the numbers."""
    relations, options = record.relations, record.options
    margin = options.get("margin")
    above = f"{round(100 * margin)} points above it" if isinstance(margin, float) else "above it"
    fewest = options.get("fewest_links"), options.get("fewest_texts")
    few = ""
    if any(relation.why_no_verdict for relation in relations) and None not in fewest:
        few = f"; too few: fewer than {fewest[0]} links in both halves together, or than {fewest[1]} texts in the other"
    rules = "a fixed offset in words, or the same word"
    if record.kind == "cross":
        rules = "the same place or an offset in words, the diagonal, or the same word"
    if any(relation.ties for relation in relations):
        few += "; tied with: heads that were as accurate on the half that chose the head"
    if any(relation.weak for relation in relations):
        few += f"; weakly: with less than {LEAST_MASS:g} of its attention on the targets (mass)"
    return (
        "accuracy: how often the source's largest weight, among other words, is on a target, by the head that does "
        "best on one half of the texts, on the other half; n: links there; baseline: the best simple rule there "
        f"({rules}); expressed: the interval's lower end is {above}{few}"
    )


def example_line(example: Example) -> str:
    """Where an example is from."""
    n_right = sum(link.right for link in example.links)
    where = f"{printable(example.source, 60)}, line {example.line}"
    return f"{head_name((example.layer, example.head))}, {n_right} of {len(example.links)} right · {where}"
