"""What every view of a comparison says: titles, notes and numbers. Plain values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from attnscope.errors import amount
from attnscope.records.compare.pairs import MinimalPair, PicturePair
from attnscope.records.compare.record import Comparison, HeadComparison, ModelComparison, PickedHeads
from attnscope.records.frame.pair_tables import PairTable, head_name
from attnscope.records.frame.shards import is_interrupted, shards_note
from attnscope.views.tables.numbers import fixed
from attnscope.views.tables.wording import GIVEN, hidden_tokens, model_of, printable

_MEASURES = {"hellinger": "Hellinger distance", "jensen_shannon": "Jensen-Shannon distance"}
_MEANINGS = {
    "hellinger": "distance: root of the mean squared Hellinger distance between two heads' rows, 0 to 1",
    "jensen_shannon": "distance: root of the mean Jensen-Shannon divergence between two heads' rows, 0 to 0.83 (√ln 2)",
}

PICTURE_NOTES = (
    "a row's keys: the cells of the picture, and everything else together as one key; "
    "where the two pictures have different grids, both get the fewer rows and columns of the two",
)


def distance_name(measure: str) -> str:
    """Such as "Hellinger distance"."""
    return _MEASURES.get(measure, printable(measure, 40))


def meaning(measure: str) -> str:
    """What a distance is, in a line."""
    return _MEANINGS.get(measure, "")


def _hidden_note(kind: str) -> str:
    """What is left out where special tokens are, and what becomes of the rows."""
    return (
        f"without {hidden_tokens(kind)}: rows are divided by what is left of them "
        "(one with less than 1% left is left out)"
    )


def hidden_notes(found: PickedHeads | MinimalPair) -> list[str]:
    """What is left out of a comparison on one text, if anything."""
    return [_hidden_note(found.kind)] if "hide_special" in found.changes else []


def table_notes(table: PairTable, kind: str) -> list[str]:
    """What its distances are, and of which rows."""
    return [meaning(table.measure), *([] if table.special else [_hidden_note(kind)])]


def distance(value: float) -> str:
    """A distance with three decimals; `–` where it is undefined."""
    return fixed(value, 3)


def distance_with_interval(table: PairTable, a: int, b: int) -> str:
    """Such as "0.312 [0.290, 0.331]"; without interval where there is none."""
    value, low, high = table.distance_interval(a, b)
    between = f" [{distance(low)}, {distance(high)}]" if math.isfinite(low) and math.isfinite(high) else ""
    return distance(value) + between


def table_line(table: PairTable) -> str:
    """Such as "Hellinger distance, without special tokens"."""
    return distance_name(table.measure) + ("" if table.special else ", without special tokens")


def texts_line(corpus: Mapping[str, Any]) -> str:
    """What was read: the text itself if it was one, else how many and from where."""
    if isinstance(corpus.get("text"), str):
        return f"“{printable(corpus['text'], 160)}”"
    n_texts, n_tokens = corpus.get("n_texts"), corpus.get("n_tokens")
    given = corpus.get("sources")
    sources = (
        [printable(source, 60) for source in given[:3] if source != GIVEN] if isinstance(given, list | tuple) else []
    )
    counts = (
        f"{amount(n_texts, 'text')}, {amount(n_tokens, 'token')}"
        if isinstance(n_texts, int) and isinstance(n_tokens, int)
        else ""
    )
    line = ": ".join(part for part in (counts, ", ".join(sources)) if part)
    if isinstance(n := corpus.get("n_copies"), int) and n:
        line += f" ({amount(n, 'copy', 'copies')} left out)"
    amiss = [shards_note(corpus), "stopped early" if is_interrupted(corpus) else ""]
    return f"{line} ({'; '.join(filter(None, amiss))})" if any(amiss) else line


def title_of(found: Comparison) -> str:
    """What a comparison is about, in a line."""
    model = model_of(found.run)
    if isinstance(found, HeadComparison):
        return f"{model} · its {amount(len(found.heads), 'head')} compared"
    if isinstance(found, PickedHeads):
        named = ", ".join(head_name(place) for place in found.heads[:6])
        more = f" and {len(found.heads) - 6} more" if len(found.heads) > 6 else ""
        return f"{model} · {named}{more} side by side"
    if isinstance(found, MinimalPair):
        return f"{model} · what changes from one text to the other"
    if isinstance(found, PicturePair):
        from_to = "one photo to the other" if found.texts[0] == found.texts[1] else "one question to the other"
        return f"{model} · what changes from {from_to}"
    if isinstance(found, ModelComparison):
        return f"{model} and {model_of(found.other_run)} · their heads compared"
    return model


def tokens_changed(found: MinimalPair) -> list[tuple[str, str]]:
    """What differs between two texts, stretch by stretch: the labels in the first and in the second; "" = nothing."""
    first, second = found.tokens
    stretches: list[tuple[str, str]] = []
    pairs = [(int(a), int(b)) for (a, b), equal in zip(found.aligned, found.equal, strict=True) if equal]
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


def both_texts(found: MinimalPair | PicturePair) -> str:
    """The two texts on one line; of two photos their names, and what was asked."""
    if isinstance(found, PicturePair):
        names = list(dict.fromkeys(printable(picture.source) for picture in found.pictures))
        asked = list(dict.fromkeys(" ".join(text.split()) for text in found.texts))
        return f"{'  →  '.join(names)}: “{'”  →  “'.join(asked)}”"
    return "“" + "”  →  “".join(" ".join(tokens.text.split()) for tokens in found.tokens) + "”"


def key_name(ours: str, theirs: str) -> str:
    """A key of two texts: its label, or both where they differ."""
    return printable(ours if ours == theirs else f"{ours}/{theirs}")


def largest_change(found: MinimalPair, head: int, pair: int) -> tuple[str, float | None, float | None]:
    """The key whose weight changes most in a row: its label, and its weight in the first and in the second text.

    A key that one text lacks weighs 0 there, and is given as None.

    Args:
        found: The comparison.
        head: Which head, as a place in `found.heads`.
        pair: Which of the aligned queries.
    """
    query, other = found.aligned[pair]
    rows = found.weights[head, query], found.other_weights[head, other]
    first, second = found.tokens
    alone = found.unmatched()
    keys: list[tuple[str, float | None, float | None]] = [
        (key_name(first.labels[a], second.labels[b]), float(rows[0][a]), float(rows[1][b])) for a, b in found.aligned
    ]
    keys += [(printable(first.labels[a]), float(rows[0][a]), None) for a in alone[0]]
    keys += [(printable(second.labels[b]), None, float(rows[1][b])) for b in alone[1]]
    return max(keys, key=lambda key: abs((key[1] or 0.0) - (key[2] or 0.0)))
