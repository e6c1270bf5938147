"""Further questions about heads, in the terminal: what they write, what they find."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from rich.console import RenderableType
from rich.text import Text

from attnscope.errors import amount
from attnscope.records.heads.findings import Findings, Head
from attnscope.records.heads.needles import CopiedWithout, Needles
from attnscope.views.tables.numbers import fixed, interval_of, number, percent
from attnscope.views.tables.plain_text import dim_lines, heading
from attnscope.views.tables.table import Column, Table

_MOST_WRITERS = 6
_signed = partial(fixed, decimals=3, signed=True)


def writes_table(findings: Findings) -> list[RenderableType]:
    """The heads that raise and lower the logits of right answers most, and what all parts amount to."""
    heads = [head for head in findings.heads if math.isfinite(head.estimate("writes").value)]
    options, corpus = findings.options.get("writes"), findings.corpus.get("writes")
    if not heads or not isinstance(options, dict) or not isinstance(corpus, dict):
        return []
    tables: list[RenderableType] = []
    heads.sort(key=lambda head: -head.measures["writes"].value)
    for title, sign, ranked in (
        ("heads that raise the logits of right answers most", 1, heads),
        ("heads that lower them most", -1, heads[::-1]),
    ):
        if rows := [head for head in ranked[:_MOST_WRITERS] if sign * head.measures["writes"].value > 0]:
            tables += [heading(title), _writers(rows)]
    parts = corpus.get("parts", {})
    terms = " + ".join(f"{name.replace('_', '-')} {_signed(value)}" for name, value in parts.items() if name != "logit")
    notes = [
        f"mean of {amount(corpus.get('n_predictions', 0), 'answer')} ({options.get('predicted', '')}): logit "
        f"above the vocabulary's mean {_signed(parts.get('logit', math.nan))} = {terms}",
        f"attended to: the answer's own occurrences get {options.get('attended', 0):.0%} of the head's weight "
        "or more; intervals are over texts",
        "of all measures writes alone is drawn large: --measures all draws every one",
    ]
    return [*tables, Text(), *dim_lines(notes)]


def _writers(heads: list[Head]) -> Table:
    def share_attended(head: Head) -> str:
        n_all, n_attended = (head.estimate(name).count for name in ("writes", "writes_attended"))
        return percent(n_attended / n_all if n_all else None, 1)

    def value(name: str) -> Callable[[Head], str]:
        return lambda head: _signed(head.estimate(name).value)

    columns = [
        Column("head", lambda head: head.name, style="bold"),
        Column("adds", value("writes"), style="cyan"),
        Column("95% interval", lambda head: interval_of(head.estimate("writes"), _signed), style="dim", drop=1),
        Column("attended to", value("writes_attended"), style="cyan", drop=3),
        Column("answers", share_attended, drop=4),
        Column("elsewhere", value("writes_elsewhere"), drop=2),
    ]
    return Table(columns, heads)


def needles_table(findings: Findings) -> list[RenderableType]:
    """The share of needle tokens that is written, by length and depth, and what is left of it without heads."""
    needles = findings.needles
    if needles is None:
        return []
    parts = [heading("needle tokens that the model writes, by depth of the needle"), _by_depth(needles)]
    if needles.without:
        title = "the same without heads (outputs zero), which half of the needles chose, on the other half"
        parts += [heading(title), _without(needles)]
    return [*parts, Text(), *dim_lines(needle_notes(needles))]


def needle_notes(needles: Needles) -> list[str]:
    """What the tables of a probe mean: one sentence each."""
    notes = ["a token counts as written where it is the model's first choice after the right ones before it"]
    if needles.without:
        moved = max(each.n_moved for each in needles.without)
        n = max((each.n_heads for each in needles.without if each.what == "random"), default=0)
        but = f"; {moved} of {n} from others, as the layer has too few" if moved else ""
        notes.append(f"random heads: from the same layers, drawn anew for each needle{but}")
        if n_needles := max(each.n_needles for each in needles.without):
            notes.append(
                f"heads were taken out on {amount(n_needles, 'needle')}, and chosen on the others alone: "
                "so they may be fewer than have the role by all needles"
            )
    return [*notes, "intervals: 95% over needles"]


def name_removed(removed: CopiedWithout) -> str:
    """Such as "18 retrieval heads"."""
    return amount(removed.n_heads, f"{removed.what} head")


def _by_depth(needles: Needles) -> RenderableType:
    shares = {(each.length, each.depth): each.copied.value for each in needles.at}

    def at(depth: float) -> Callable[[int], str]:
        return lambda length: number(shares.get((length, depth), math.nan))

    lengths, depths = (sorted({place[axis] for place in shares}) for axis in (0, 1))
    columns = [Column(f"{100 * depth:g}%", at(depth), right=True, style="cyan") for depth in depths]
    return Table([Column("tokens", lambda length: f"{length:,}", right=True), *columns], lengths, goes_on=True)


def _without(needles: Needles) -> RenderableType:
    removed = [(name_removed(each), each.copied, each.change) for each in needles.without]
    columns = [
        Column("taken out", lambda row: row[0]),
        Column("written", lambda row: number(row[1].value), right=True, style="cyan"),
        Column("95% interval", lambda row: interval_of(row[1]), right=True, drop=2),
        Column("less than whole", lambda row: number(row[2].value) if row[2] else "", right=True, style="cyan", drop=1),
        Column("95% interval", lambda row: interval_of(row[2]) if row[2] else "", right=True, drop=2),
    ]
    return Table(columns, [("nothing", needles.copied, None), *removed])
