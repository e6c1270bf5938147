"""Descriptions in the terminal: a row a head, what it does and how much of its attention that explains."""

from __future__ import annotations

import math

from rich.console import Console, Group, RenderableType
from rich.text import Text

from attnscope.errors import amount
from attnscope.records.heads.descriptions import LITTLE, UNSURE, Descriptions, HeadDescription
from attnscope.records.heads.findings import Findings
from attnscope.views.heads import summary as heads_summary
from attnscope.views.heads.summary import full_name
from attnscope.views.tables.plain_text import dim_lines, plain_table

_MOST_SHOWN = 160
"""Heads that are listed where none are chosen."""

_WIDE = 110
"""Columns from which there is room for all numbers."""


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
    shown = plain_table(space=2)
    wide = console.width >= _WIDE
    shown.add_column("head", no_wrap=True)
    shown.add_column("nats", justify="right", no_wrap=True)
    shown.add_column("explained", justify="right", no_wrap=True)
    if wide:
        shown.add_column("sinks known", justify="right", no_wrap=True)
    shown.add_column("what it does", overflow="fold")
    heads = findings.heads
    listed = heads[:_MOST_SHOWN] if every else heads
    n_left = 0
    for head in listed:
        one = known.get((head.kind, head.layer, head.head))
        if one is None:
            n_left += 1
            continue
        cells = [Text(full_name(head, findings), style="bold"), Text(f"{one.nats:.2f}"), _explained(one)]
        if wide:
            cells.append(Text(_percent(one.explained_beside) if not one.spreads_evenly else ""))
        shown.add_row(*cells, _words(one))
    parts: list[RenderableType] = [shown]
    if len(listed) < len(heads):
        parts.append(Text(f"and {len(heads) - len(listed)} more: choose some with --where, --sort", style="dim"))
    return Group(*parts, *dim_lines(_notes(findings, described, wide, n_left)))


def _explained(one: HeadDescription) -> Text:
    if one.spreads_evenly:
        return Text("")
    known = "" if math.isnan(one.low) else f" {_bound(one.low)}-{_bound(one.high)}"
    text = Text(_percent(one.explained), style="cyan" if one.explained >= LITTLE else "")
    return text.append(known, style="dim")


def _bound(share: float) -> str:
    return f"{100 * min(1.0, max(0.0, share)):.0f}"


def _percent(share: float) -> str:
    return heads_summary.UNDEFINED if math.isnan(share) else f"{100 * share:.0f}%"


def _words(one: HeadDescription) -> Text:
    words = Text(heads_summary.printable(one.words, 1000), style="" if one.terms and not one.spreads_evenly else "dim")
    return words.append(f" ! {heads_summary.printable(one.warning, 200)}", style="yellow") if one.warning else words


def _notes(findings: Findings, described: Descriptions, wide: bool, n_left: int) -> list[str]:
    said = [
        "nats: how far the head is from uniform attention; explained: the share of these that the terms explain, on "
        "texts they were not fitted on, with its 95% interval"
        + ("; sinks known: the same where each query's attention on special tokens and the first is known" * wide)
        + ".",
        "In brackets: share of attention on such keys; under uniform attention. Each term holds given the other terms.",
        *heads_summary.description_notes(findings),
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
        named = ", ".join(heads_summary.printable(name, 60) for name in described.unmatched)
        said.append(f"Your feature {named} was found nowhere in the sampled texts.")
    if n_left:
        said.append(
            f"{amount(n_left, 'head is', 'heads are')} not described: only the first kind of attention of a model is."
        )
    return said
