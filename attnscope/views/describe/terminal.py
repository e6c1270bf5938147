"""Descriptions in the terminal: a row a head, what it does and how much of its attention that explains."""

from __future__ import annotations

import math
import statistics
from functools import partial

from rich.console import Console, Group, RenderableType
from rich.text import Text

from attnscope.errors import amount
from attnscope.records.heads.descriptions import EVEN, LITTLE, UNSURE, Descriptions, HeadDescription
from attnscope.records.heads.findings import Findings, Head
from attnscope.views.heads.summary import description_notes
from attnscope.views.tables.numbers import fixed, percent
from attnscope.views.tables.plain_text import dim_lines
from attnscope.views.tables.table import Column, Table
from attnscope.views.tables.wording import full_name, printable

_FEW = 10
"""Heads that are listed where neither heads nor an order are chosen."""


def description_table(findings: Findings, console: Console, few: bool = False) -> RenderableType:
    """What heads do, a row each.

    Args:
        findings: Findings with descriptions; their heads are listed in their order.
        console: Tells the width.
        few: Whether only the ten heads are listed that have most to say, those first.
    """
    described = findings.descriptions
    assert described is not None
    if not described.heads:
        return Text(
            "Heads are not described: that takes at least two texts (or chunks of a long one), as what is found on one "
            "is tried on another.",
            style="dim",
        )
    known = described.by_head
    rows = [(head, known.get(head.address)) for head in findings.heads]
    told = [row for row in rows if row[1] is not None]
    listed = sorted(told, key=lambda row: -row[1].tells)[:_FEW] if few else told  # type: ignore[union-attr]
    shown = Table(_columns(findings), listed)
    parts: list[RenderableType] = [shown]
    if n_more := len(told) - len(listed):
        said = f"These heads have most to say: predicted × nats × attends. --all lists {n_more} more."
        parts.append(Text(said, style="dim"))
    kinds = {one.kind for one in described.heads}
    n_other = sum(head.kind not in kinds for head in findings.heads)
    return Group(*parts, *dim_lines(_notes(findings, n_other)))


def _columns(findings: Findings) -> list[Column]:
    def attends(one: HeadDescription) -> str:
        return "" if one.active is None else percent(one.active.share)

    return [
        Column("head", lambda row: full_name(row[0], findings), style="bold"),
        Column("attends", lambda row: attends(row[1]), right=True, drop=1),
        Column("nats", lambda row: fixed(row[1].main.nats, 2), right=True),
        Column("predicted", lambda row: _predicted(row[1]), right=True),
        *(Column(name, partial(_source, name), right=True, drop=2) for name in ("position", "token", "both")),
        Column("what it does", lambda row: _words(row[1]), wraps=True, least=48),
    ]


def _predicted(one: HeadDescription) -> Text:
    part = one.main
    if one.spreads_evenly or part.nats < EVEN:
        return Text("")
    known = "" if math.isnan(part.low) else f" {_bound(part.low)}-{_bound(part.high)}"
    text = Text(percent(part.explained), style="cyan" if part.explained >= LITTLE else "")
    return text.append(known, style="dim")


def _source(name: str, row: tuple[Head, HeadDescription]) -> str:
    """How much follows from one kind of mean queries and keys; "" = unknown, or there is little to predict."""
    active = row[1].active
    known = active is not None and active.sources is not None and active.nats >= EVEN
    return percent(max(0.0, getattr(active.sources, name).value)) if known else ""  # type: ignore[union-attr]


def _source_notes(described: Descriptions) -> list[str]:
    """What attention follows from without context, over all heads; why that is unknown."""
    actives = [one.active for one in described.heads if one.active is not None and one.active.nats >= EVEN]
    sources = [active.sources for active in actives if active.sources is not None]
    said = []
    if sources:
        medians = [
            percent(statistics.median(getattr(each, name).value for each in sources))
            for name in ("position", "token", "both")
        ]
        said.append(
            "position, token, both: the share that follows if each query and key is the mean for its position, its "
            "token, or both; the rest needs context. Medians: {}, {} and {}. Of the scored tokens, {} do not occur in "
            "the fitted texts and count as the mean of all tokens.".format(*medians, percent(described.unseen or 0.0))
        )
    if described.no_sources:
        left = "" if not sources else f" for {amount(len(actives) - len(sources), 'head')}"
        said.append(f"position, token and both are unknown{left}: {printable(described.no_sources, 200)}.")
    return said


def _bound(share: float) -> str:
    return f"{100 * min(1.0, max(0.0, share)):.0f}"


def _words(one: HeadDescription) -> Text:
    words = Text(printable(one.words, 1000), style="" if one.terms and not one.spreads_evenly else "dim")
    return words.append(f" ! {printable(one.warning, 200)}", style="yellow") if one.warning else words


def _notes(findings: Findings, n_other: int) -> list[str]:
    described = findings.descriptions
    assert described is not None  # the table was made of them
    said = [
        "attends: how much of its attention lies on keys other than special tokens and the first; it rests on those. "
        "nats: how far the attention on other keys is from uniform. predicted: the share of what sets it apart from "
        "uniform attention that the terms predict, on texts they were not fitted on, with its 95% interval.",
        "nouns 1.6× (door, key): such keys get 1.6 times what the rest of the line gives them; examples. (69%; uniform "
        "34%): share of attention there; under uniform attention. then: counts less. equally: as much. from …: for "
        "such queries. Pages and files have the terms behind the line.",
        "A description says where a head looks, not what for.",
    ]
    said = [" ".join(said), "; ".join(description_notes(findings))]
    said += _source_notes(described)
    n_unsure = sum(one.is_unsure for one in described.heads if not one.spreads_evenly)
    if n_unsure:
        said.append(
            f"There are too few texts to tell how much of {amount(n_unsure, 'head')} is predicted: the interval is "
            f"wider than {100 * UNSURE:.0f} points. Give more texts."
        )
    if described.unmatched:
        named = ", ".join(printable(name, 60) for name in described.unmatched)
        said.append(f"Your feature {named} was found nowhere in the sampled texts.")
    if unused := [printable(name, 60) for name in described.unused]:
        said.append(f"Your feature {', '.join(unused)} improved no head's description.")
    if n_other:
        said.append(
            f"{amount(n_other, 'head is', 'heads are')} not described: only the first kind of attention of a model is."
        )
    return said
