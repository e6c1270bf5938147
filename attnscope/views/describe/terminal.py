"""Descriptions in the terminal: a row a head, what it does and how much of its attention that explains."""

from __future__ import annotations

import math

from rich.console import Group, RenderableType
from rich.text import Text

from attnscope.errors import amount
from attnscope.records.heads.descriptions import EVEN, LITTLE, UNSURE, Descriptions, HeadDescription
from attnscope.records.heads.findings import Findings
from attnscope.report.numbers import fixed, percent
from attnscope.report.plain_text import dim_lines
from attnscope.report.table import TextColumn, TextTable
from attnscope.report.wording import full_name, printable
from attnscope.views.heads.summary import description_notes

_FEW = 10
"""Heads that are listed where neither heads nor an order are chosen."""


def description_table(findings: Findings, few: bool = False) -> RenderableType:
    """What heads do, a row each in their order; if `few`, of the ten that have most to say, those first."""
    described = findings.descriptions
    assert described is not None
    if not described.heads:
        return Text(
            "Heads are not described: that takes at least two texts (or chunks of a long one), as what is found on one "
            "is tried on another.",
            style="dim",
        )
    of = described.by_head
    rows = [(head, of[head.address]) for head in findings.heads if head.address in of]
    listed = sorted(rows, key=lambda row: -row[1].tells)[:_FEW] if few else rows
    parts: list[RenderableType] = [TextTable(_columns(findings), listed)]
    if n_more := len(rows) - len(listed):
        note = f"These heads have most to say: predicted × nats × attends. --all lists {n_more} more."
        parts.append(Text(note, style="dim"))
    kinds = {each.kind for each in described.heads}
    n_other = sum(head.kind not in kinds for head in findings.heads)
    return Group(*parts, *dim_lines(_notes(findings, described, n_other)))


def _columns(findings: Findings) -> list[TextColumn]:
    return [
        TextColumn("head", lambda row: full_name(row[0], findings), style="bold"),
        TextColumn("attends", lambda row: percent(row[1].active.share) if row[1].active else "", right=True, drop=1),
        TextColumn("nats", lambda row: fixed(row[1].main.nats, 2), right=True),
        TextColumn("predicted", lambda row: _predicted(row[1]), right=True),
        TextColumn("what it does", lambda row: _words(row[1]), wraps=True, least=48),
    ]


def _predicted(described: HeadDescription) -> Text:
    part = described.main
    if described.spreads_evenly or part.nats < EVEN:
        return Text("")
    text = Text(percent(part.explained), style="cyan" if part.explained >= LITTLE else "")
    if math.isnan(part.low):
        return text.append(" ?", style="dim")
    low, high = (round(100 * end) for end in (part.low, part.high))
    return text.append(f" {low if low >= 0 else '<0'}-{high if high >= 0 else '<0'}", style="dim")


def _words(described: HeadDescription) -> Text:
    is_told = described.terms and not described.spreads_evenly
    words = Text(printable(described.words, 1000), style="" if is_told else "dim")
    return words.append(f" ! {printable(described.warning, 200)}", style="yellow") if described.warning else words


def _notes(findings: Findings, described: Descriptions, n_other: int) -> list[str]:
    legend = [
        "attends: the share of a head's attention on keys other than special tokens and the first; it rests on those. "
        "nats: how far the attention on other keys is from uniform. predicted: the share of these nats that the line "
        "predicts on held-out texts, with its 95% interval.",
        "nouns 1.6× (door, key): nouns, such as door and key, get 1.6 times what the rest of the line gives them. "
        "(69%; uniform 34%): the share of attention there, and under uniform attention. then: a weaker part. equally: "
        "an equally strong part. from …: only from such queries. Pages and files have the terms behind the line.",
        "A description says where a head looks, not why.",
    ]
    notes = [" ".join(legend), "; ".join(description_notes(findings))]
    n_unsure = sum(each.is_unsure for each in described.heads if not each.spreads_evenly)
    if n_unsure:
        notes.append(
            f"These texts cannot tell how much of {amount(n_unsure, 'head')} is predicted: the interval is wider than "
            f"{100 * UNSURE:.0f} points, or there is none (?). Give more texts. A head that mostly rests needs many."
        )
    if n_other:
        notes.append(
            f"{amount(n_other, 'head is', 'heads are')} not described: only the first kind of attention of a model is."
        )
    return notes
