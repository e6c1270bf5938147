"""What heads write for the right answers, in the terminal."""

from __future__ import annotations

import math

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from attnscope.errors import amount
from attnscope.records.heads.findings import Estimate, Findings, Head
from attnscope.views.tables.plain_text import dim_lines, heading, plain_table

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
                "or more; in brackets 95% intervals over texts",
                "of all measures writes alone is drawn large: --measures all draws every one",
            ]
        ),
    ]


def _table(heads: list[Head]) -> Table:
    table = plain_table()
    for column in ("head", "adds", "", "attended to", "answers", "elsewhere"):
        table.add_column(column, style="bold" if column == "head" else "", justify="left")
    for head in heads:
        on_all, looked, other = (
            head.measures.get(name, _NONE) for name in ("writes", "writes_attended", "writes_elsewhere")
        )
        share = looked.count / on_all.count if on_all.count else math.nan
        table.add_row(
            head.name, Text(_number(on_all.value), style="cyan"), Text(_interval(on_all), style="dim"),
            Text(_number(looked.value), style="cyan"), f"{share:.1%}" if math.isfinite(share) else "–",
            _number(other.value),
        )  # fmt: skip
    return table


def _number(value: float) -> str:
    return f"{value:+.3f}".replace("-", "−") if math.isfinite(value) else "–"


def _interval(one: Estimate) -> str:
    return f"[{_number(one.low)}, {_number(one.high)}]" if math.isfinite(one.low) else ""
