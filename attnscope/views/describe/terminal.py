"""Descriptions in the terminal: a row a head, what it does and how much of its attention that explains."""

from __future__ import annotations

import math

from rich.console import Console, Group, RenderableType
from rich.text import Text

from attnscope.errors import amount
from attnscope.records.heads.descriptions import LITTLE, UNSURE, HeadDescription
from attnscope.records.heads.findings import Findings
from attnscope.views.heads.summary import description_notes
from attnscope.views.tables.numbers import fixed, percent
from attnscope.views.tables.plain_text import dim_lines
from attnscope.views.tables.table import Column, Table
from attnscope.views.tables.wording import full_name, printable

_MOST_SHOWN = 160
"""Heads that are listed where none are chosen."""

_SINKS_KNOWN = "sinks known"


def description_table(findings: Findings, console: Console, every: bool = True) -> RenderableType:
    """What heads do, a row each.

    Args:
        findings: Findings with descriptions; their heads are listed in their order.
        console: Tells the width.
        every: Whether these are all heads that there are: of very many only the first are listed.
    """
    described = findings.descriptions
    assert described is not None
    if not described.heads:
        return Text(
            "Heads are not described: that takes at least two texts (or chunks of a long one), as what is found on one "
            "is tried on another.",
            style="dim",
        )
    known = {(one.kind, one.layer, one.head): one for one in described.heads}
    listed = findings.heads[:_MOST_SHOWN] if every else findings.heads
    rows = [(head, known.get((head.kind, head.layer, head.head))) for head in listed]
    shown = Table(_columns(findings), [row for row in rows if row[1] is not None])
    parts: list[RenderableType] = [shown]
    if n_more := len(findings.heads) - len(listed):
        parts.append(Text(f"and {n_more} more: choose some with --where, --sort", style="dim"))
    names, _ = shown.fit(console.width)
    return Group(*parts, *dim_lines(_notes(findings, _SINKS_KNOWN in names, sum(one is None for _, one in rows))))


def _columns(findings: Findings) -> list[Column]:
    def beside(one: HeadDescription) -> str:
        return "" if one.spreads_evenly else percent(one.explained_beside)

    return [
        Column("head", lambda row: full_name(row[0], findings), style="bold"),
        Column("nats", lambda row: fixed(row[1].nats, 2), right=True),
        Column("explained", lambda row: _explained(row[1]), right=True),
        Column(_SINKS_KNOWN, lambda row: beside(row[1]), right=True, drop=1),
        Column("what it does", lambda row: _words(row[1]), wraps=True, least=48),
    ]


def _explained(one: HeadDescription) -> Text:
    if one.spreads_evenly:
        return Text("")
    known = "" if math.isnan(one.low) else f" {_bound(one.low)}-{_bound(one.high)}"
    text = Text(percent(one.explained), style="cyan" if one.explained >= LITTLE else "")
    return text.append(known, style="dim")


def _bound(share: float) -> str:
    return f"{100 * min(1.0, max(0.0, share)):.0f}"


def _words(one: HeadDescription) -> Text:
    words = Text(printable(one.words, 1000), style="" if one.terms and not one.spreads_evenly else "dim")
    return words.append(f" ! {printable(one.warning, 200)}", style="yellow") if one.warning else words


def _notes(findings: Findings, sinks_known: bool, n_left: int) -> list[str]:
    described = findings.descriptions
    assert described is not None  # the table was made of them
    said = [
        "nats: how far the head is from uniform attention; explained: the share of these that the terms explain, on "
        "texts they were not fitted on, with its 95% interval"
        + "; sinks known: the same where each query's attention on special tokens and the first is known" * sinks_known
        + ".",
        "In brackets: share of attention on such keys; under uniform attention. Each term holds given the other terms.",
        *description_notes(findings),
        "A description is of attention, not of purpose.",
        f"The intervals allow for texts of another kind: {100 * described.unseen_share:.0f}% of all texts may be of a "
        "kind that is not among those scored.",
    ]
    n_unsure = sum(one.is_unsure for one in described.heads if not one.spreads_evenly)
    if n_unsure:
        said.append(
            f"The texts are too few to tell what is explained of {amount(n_unsure, 'head')}: the interval is wider "
            f"than {100 * UNSURE:.0f} points. Give more texts."
        )
    if described.unmatched:
        named = ", ".join(printable(name, 60) for name in described.unmatched)
        said.append(f"Your feature {named} was found nowhere in the sampled texts.")
    if n_left:
        said.append(
            f"{amount(n_left, 'head is', 'heads are')} not described: only the first kind of attention of a model is."
        )
    return said
