"""What heads write for the right answers, in the terminal."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from rich.console import RenderableType
from rich.text import Text

from attnscope.errors import amount
from attnscope.records.heads.findings import Estimate, Findings, Head
from attnscope.views.tables.numbers import fixed, interval, percent
from attnscope.views.tables.plain_text import dim_lines, heading
from attnscope.views.tables.table import Column, Table

_MOST = 6
_NONE = Estimate(math.nan, math.nan, math.nan, math.nan, 0)


def writes_table(findings: Findings) -> list[RenderableType]:
    """The heads that raise and lower the logits of right answers most, and what all parts amount to."""
    heads = [head for head in findings.heads if math.isfinite(head.measures.get("writes", _NONE).value)]
    chosen, recorded = findings.options.get("writes"), findings.corpus.get("writes")
    if not heads or not isinstance(chosen, dict) or not isinstance(recorded, dict):
        return []
    said: list[RenderableType] = []
    ranked = sorted(heads, key=lambda head: -head.measures["writes"].value)
    for title, shown in (
        ("raise the logits of right answers most", [h for h in ranked[:_MOST] if h.measures["writes"].value > 0]),
        ("lower them most", [h for h in ranked[::-1][:_MOST] if h.measures["writes"].value < 0]),
    ):
        if shown:
            said += [heading(f"heads that {title}"), _table(shown)]
    parts = recorded.get("parts", {})
    line = " + ".join(f"{name.replace('_', '-')} {_number(value)}" for name, value in parts.items() if name != "logit")
    return [
        *said,
        Text(),
        *dim_lines(
            [
                f"mean of {amount(recorded.get('n_predictions', 0), 'answer')} ({chosen.get('predicted', '')}): logit "
                f"above the vocabulary's mean {_number(parts.get('logit', math.nan))} = {line}",
                f"attended to: the answer's own occurrences get {chosen.get('attended', 0):.0%} of the head's weight "
                "or more; intervals are over texts",
                "of all measures writes alone is drawn large: --measures all draws every one",
            ]
        ),
    ]


def _table(heads: list[Head]) -> Table:
    def of(name: str, write: Callable[[Estimate], str]) -> Callable[[Head], str]:
        return lambda head: write(head.measures.get(name, _NONE))

    def attended(head: Head) -> str:
        n_all, n_attended = (head.measures.get(name, _NONE).count for name in ("writes", "writes_attended"))
        return percent(n_attended / n_all if n_all else None, 1)

    columns = [
        Column("head", lambda head: head.name, style="bold"),
        Column("adds", of("writes", lambda one: _number(one.value)), style="cyan"),
        Column("95% interval", of("writes", lambda one: interval(one.low, one.high, _number)), style="dim", drop=1),
        Column("attended to", of("writes_attended", lambda one: _number(one.value)), style="cyan", drop=3),
        Column("answers", attended, drop=4),
        Column("elsewhere", of("writes_elsewhere", lambda one: _number(one.value)), drop=2),
    ]
    return Table(columns, heads)


_number = partial(fixed, decimals=3, signed=True)
