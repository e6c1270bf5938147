"""Titles, notes and numbers of comparisons, for every view. Plain values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from attnscope.errors import amount
from attnscope.records.compare.pairs import MinimalPair
from attnscope.records.compare.record import Comparison, HeadComparison, ModelComparison, PickedHeads
from attnscope.records.frame.pair_tables import PairTable, head_name
from attnscope.report.numbers import fixed
from attnscope.report.wording import GIVEN, hidden_tokens, model_of, printable
from attnscope.results.completion import is_interrupted

_MEASURES = {"hellinger": "Hellinger distance", "jensen_shannon": "Jensen-Shannon distance"}
_MEANINGS = {
    "hellinger": "distance: root of the mean squared Hellinger distance between two rows, 0 to 1",
    "jensen_shannon": "distance: root of the mean Jensen-Shannon divergence between two rows, 0 to 0.83 (√ln 2)",
}


def distance_name(measure: str) -> str:
    """Such as "Hellinger distance"."""
    return _MEASURES.get(measure, printable(measure, 40))


def meaning(measure: str) -> str:
    """The meaning of a distance, in a line."""
    return _MEANINGS.get(measure, "")


def _hidden_note(kind: str) -> str:
    return (
        f"without {hidden_tokens(kind)}: rows are divided by what is left of them "
        "(one with less than 1% left is left out)"
    )


def hidden_notes(comparison: PickedHeads | MinimalPair) -> list[str]:
    """A note on tokens that a comparison on one text leaves out, if any."""
    return [_hidden_note(comparison.kind)] if "hide_special" in comparison.changes else []


def table_notes(table: PairTable, kind: str) -> list[str]:
    """The meaning of a table's distances, and the rows that they leave out."""
    return [meaning(table.measure), *([] if table.special else [_hidden_note(kind)])]


def distance(value: float) -> str:
    """A distance with three decimals; `–` where it is undefined."""
    return fixed(value, 3)


def distance_with_interval(value: float, low: float, high: float) -> str:
    """Such as "0.312 [0.290, 0.331]"; without interval where there is none."""
    interval = f" [{distance(low)}, {distance(high)}]" if math.isfinite(low) and math.isfinite(high) else ""
    return distance(value) + interval


def table_line(table: PairTable) -> str:
    """Such as "Hellinger distance, without special tokens"."""
    return distance_name(table.measure) + ("" if table.special else ", without special tokens")


def texts_line(corpus: Mapping[str, Any]) -> str:
    """The corpus in a line: the text itself if there is one, else how many and their sources."""
    if isinstance(corpus.get("text"), str):
        return f"“{printable(corpus['text'], 160)}”"
    n_texts, n_tokens = corpus.get("n_texts"), corpus.get("n_tokens")
    sources, counts = corpus.get("sources"), ""
    names = [printable(name, 60) for name in sources[:3] if name != GIVEN] if isinstance(sources, list | tuple) else []
    if isinstance(n_texts, int) and isinstance(n_tokens, int):
        counts = f"{amount(n_texts, 'text')}, {amount(n_tokens, 'token')}"
    line = ": ".join(part for part in (counts, ", ".join(names)) if part)
    if isinstance(n := corpus.get("n_copies"), int) and n:
        line += f" ({amount(n, 'copy', 'copies')} left out)"
    return f"{line} (stopped early)" if is_interrupted(corpus) else line


def title_of(comparison: Comparison) -> str:
    """The subject of a comparison, in a line."""
    model = model_of(comparison.run)
    if isinstance(comparison, HeadComparison):
        return f"{model} · its {amount(len(comparison.heads), 'head')} compared"
    if isinstance(comparison, PickedHeads):
        names = ", ".join(head_name(place) for place in comparison.heads[:6])
        more = f" and {len(comparison.heads) - 6} more" if len(comparison.heads) > 6 else ""
        return f"{model} · {names}{more} side by side"
    if isinstance(comparison, MinimalPair):
        return f"{model} · what changes from one text to the other"
    if isinstance(comparison, ModelComparison):
        return f"{model} and {model_of(comparison.other_run)} · their heads compared"
    return model


def tokens_changed(pair: MinimalPair) -> list[tuple[str, str]]:
    """The differences of two texts, stretch by stretch: the labels in the first and in the second; "" = nothing."""
    first, second = pair.tokens
    stretches: list[tuple[str, str]] = []
    pairs = [(int(a), int(b)) for (a, b), equal in zip(pair.aligned, pair.equal, strict=True) if equal]
    before = (-1, -1)
    for a, b in [*pairs, (len(first), len(second))]:
        ours, theirs = (
            " ".join(tokens.labels[start + 1 : stop])
            for tokens, start, stop in ((first, before[0], a), (second, before[1], b))
        )
        if ours or theirs:
            stretches.append((printable(ours), printable(theirs)))
        before = (a, b)
    return stretches


def both_texts(pair: MinimalPair) -> str:
    """The two texts on one line."""
    return "“" + "”  →  “".join(" ".join(tokens.text.split()) for tokens in pair.tokens) + "”"


def key_name(ours: str, theirs: str) -> str:
    """A key of two texts: its label, or both where they differ."""
    return printable(ours if ours == theirs else f"{ours}/{theirs}")


def largest_change(pair: MinimalPair, head: int, row: int) -> tuple[str, float | None, float | None]:
    """The key whose weight changes most in a row: its label, and its weight in the first and in the second text.

    A key that one text lacks weighs 0 there, and is given as None. `head` is a place in `pair.heads`, `row` one of the
    aligned queries.
    """
    query, other = pair.aligned[row]
    rows = pair.weights[head, query], pair.other_weights[head, other]
    first, second = pair.tokens
    alone = pair.unmatched()
    keys: list[tuple[str, float | None, float | None]] = [
        (key_name(first.labels[a], second.labels[b]), float(rows[0][a]), float(rows[1][b])) for a, b in pair.aligned
    ]
    keys += [(printable(first.labels[a]), float(rows[0][a]), None) for a in alone[0]]
    keys += [(printable(second.labels[b]), None, float(rows[1][b])) for b in alone[1]]
    return max(keys, key=lambda key: abs((key[1] or 0.0) - (key[2] or 0.0)))
