"""A description in words that a reader takes in at once: by kinds of keys, by distance, by relations, and by pairs.

Terms overlap, and each holds given the others. A summary says what they come to: how much more attention each kind of
key gets, and each distance, than all the other terms would give it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from attnscope.studies.describe.features import Feature
from attnscope.studies.describe.naming import Names

if TYPE_CHECKING:
    from attnscope.core.questions.descriptions import Description
    from attnscope.records.heads.descriptions import Pair, Term

Floats = NDArray[np.float64]

MORE, LESS = 1.15, 0.67
"""Kinds of keys are named that get this many times what the other terms would give them; and those that get so few."""

MOST_KINDS, MOST_AVOIDED, EXAMPLES, ALSO = 4, 3, 3, 3
"""How many of these are named, tokens of each, and tokens of other kinds."""

LEAST_SHARE = 0.02
"""Of attention, or of what the other terms would give: below it a kind or a distance is not named."""

NEAR = 1.2
"""Distances are named that get this many times what the other terms would give them."""

AS_MUCH, WEAK = 1.4, 0.04
"""Groups of terms whose nats differ by less than this factor count alike; and those are left out that have less than
this share of the strongest's."""

_REACHES = (1, 2, 4, 8)


def summarise(
    names: Names, head: int, found: Description, terms: Sequence[Term], features: Sequence[Feature]
) -> tuple[tuple[Pair, ...], str]:
    """What a head attends to when it attends, such as "nouns 1.6× (door, key), least punctuation".

    Args:
        names: Of the fitted rows.
        head: The head.
        found: Its description.
        terms: The same for readers.
        features: The features that all heads share.

    Returns:
        Pairs with much attention beyond what distances and kinds of keys give them, and the words.
    """
    part, groups = names.part, dict[str, list[int]]()
    for place, number in enumerate(found.terms):
        groups.setdefault(_group_of(number, head, names, features), []).append(place)
    scores = {
        group: sum(
            found.weights[place] * part.values_of(found.terms[place], head)[part.column(found.terms[place], head)]
            for place in places
        )
        for group, places in groups.items()
    }
    strengths = {group: _nats(names, head, of) for group, of in scores.items()}
    words: list[tuple[float, str]] = []
    for group, places in groups.items():
        others = sum((of for name, of in scores.items() if name != group), np.zeros(part.size))
        if group == "kind":
            said = by_kind(names, head, others)
        elif group == "distance":
            said = by_distance(names, head, others)
        elif group == "pair":
            said = "; ".join(_pair(names, head, found, place) for place in places[:2])
        else:
            said = ", ".join(_relation(terms[place]) for place in places)
        if said and strengths[group] >= WEAK * max(strengths.values()):
            words.append((strengths[group], said))
    words.sort(key=lambda one: -one[0])
    text, last = "", 0.0
    for strength, said in words:
        text += f"; {'equally' if last < AS_MUCH * strength else 'then'} {said}" if text else said
        last = strength
    known = sum((of for name, of in scores.items() if name != "pair"), np.zeros(part.size))
    return names.pairs(head, known), text


def _group_of(number: int, head: int, names: Names, features: Sequence[Feature]) -> str:
    if number >= len(features):
        return "kind" if names.part.own_columns(head)[number - len(features)].queries is None else "pair"
    feature = features[number]
    if feature.family == "key" or feature.name == "rarity":
        return "kind"
    return "distance" if feature.family == "offset" or feature.name.startswith(("near", "window")) else "relation"


def _nats(names: Names, head: int, scores: Floats) -> float:
    """How far attention is from uniform that goes by some scores alone."""
    part = names.part
    p = names.expected(scores)
    logs = np.add.reduceat(p * np.log(np.maximum(p, 1e-30)), part.first)
    return float(part.weights[head] @ (np.log(part.lengths) + logs))


def _relation(term: Term) -> str:
    differs = np.isfinite(term.share) and round(100 * term.share) != round(100 * term.even)
    share = f" ({100 * term.share:.0f}%; uniform {100 * term.even:.0f}%)" if differs else ""
    return f"{'not ' if term.weight < 0 else ''}{term.words}{share}"


def _pair(names: Names, head: int, found: Description, place: int) -> str:
    """What queries of some types attend to more: beside all terms but the one that is about them."""
    terms = tuple(number for number in found.terms if number != found.terms[place])
    others = names.part.scores(terms, np.delete(found.weights, place), head)
    queries, of_rows = names.queries_of(found.terms[place], head)
    keys = by_kind(names, head, others, of_rows)
    return f"from {queries}: {keys}" if keys else ""


def by_kind(names: Names, head: int, others: Floats, of_rows: Floats | None = None) -> str:
    """Kinds of keys by how much more attention they get than the other terms would give them.

    Args:
        names: Of the fitted rows.
        head: The head.
        others: (entry,): what the other terms say.
        of_rows: (row,): how much each row counts, beside its weight; None = all alike.
    """
    part, kinds = names.part, names.kinds
    weights = part.weights[head] * (1.0 if of_rows is None else of_rows)
    rows = (weights / max(weights.sum(), 1e-30))[part.row_of]
    got, even = part.attention(head) * rows, names.expected(others) * rows
    shares, expected = (np.bincount(kinds.of_entry, of, len(kinds.words)) for of in (got, even))
    lifts = (shares + LEAST_SHARE / 2) / (expected + LEAST_SHARE / 2)
    matter = np.maximum(shares, expected) >= LEAST_SHARE
    more = kinds.merge([int(n) for n in np.argsort(-lifts) if matter[n] and lifts[n] >= MORE], matter)[:MOST_KINDS]
    less = kinds.merge([int(n) for n in np.argsort(lifts) if matter[n] and lifts[n] <= LESS], matter)[:MOST_AVOIDED]
    n_types = len(names.types.ids)
    by_type, even_by_type = (np.bincount(names.keys, of, n_types) for of in (got, even))
    excess = by_type - even_by_type
    named, said = set[int](), []
    for words, members in more:
        inside = np.isin(kinds.of_entry, members)
        of_kind = np.bincount(names.keys[inside], (got - even)[inside], n_types)
        best = [int(n) for n in np.argsort(-of_kind)[:EXAMPLES] if of_kind[n] > 0]
        named.update(best)
        times = (shares[members].sum() + LEAST_SHARE / 2) / (expected[members].sum() + LEAST_SHARE / 2)
        said.append(f"{words} {times:.1f}× ({', '.join(names.label(n) for n in best)})")
    also = [
        int(n) for n in np.argsort(-excess)[: 2 * EXAMPLES]
        if n not in named and by_type[n] >= LEAST_SHARE / 2 and by_type[n] >= 1.5 * even_by_type[n]
    ]  # fmt: skip
    if also:
        said.append(f"{'also ' if said else ''}{', '.join(dict.fromkeys(names.label(n) for n in also[:ALSO]))}")
    if less:
        said.append(f"least {', '.join(words for words, _ in less)}")
    return ", ".join(said)


def by_distance(names: Names, head: int, others: Floats) -> str:
    """How far keys are, by how much more attention such keys get than the other terms would give them."""
    part = names.part
    rows = part.weights[head][part.row_of]
    got, even, uniform = part.attention(head) * rows, names.expected(others) * rows, rows / part.lengths[part.row_of]
    sizes = np.searchsorted(_REACHES, np.abs(names.offsets)) + 1
    buckets = np.where(names.offsets == 0, 0, np.sign(names.offsets) * sizes)

    def times(some: NDArray[np.bool_]) -> float:
        return float((got[some].sum() + LEAST_SHARE / 4) / (even[some].sum() + LEAST_SHARE / 4))

    lifts = {int(bucket): times(buckets == bucket) for bucket in np.unique(buckets)}
    reach = dict.fromkeys((-1, 1), 0)
    for side in reach:
        while lifts.get(side * (reach[side] + 1), 0.0) >= NEAR:
            reach[side] += 1
    if reach[-1] and reach[-1] == reach[1]:
        chosen, said = np.abs(buckets) <= reach[1], _reach_words(reach[1], "away")
    else:
        chosen = ((buckets < 0) & (-buckets <= reach[-1])) | ((buckets > 0) & (buckets <= reach[1]))
        ends = [_reach_words(reach[side], word) for side, word in ((-1, "before"), (1, "after")) if reach[side]]
        said = " and ".join(ends)
    chosen &= buckets != 0
    if not said:
        best = max((bucket for bucket in lifts if bucket), key=lambda bucket: lifts[bucket])
        if lifts[best] < NEAR:
            return ""
        chosen, said = buckets == best, _bucket_words(best)
    parts = [f"{said} ({100 * got[chosen].sum():.0f}%; uniform {100 * uniform[chosen].sum():.0f}%)"]
    inside = sorted({int(bucket) for bucket in np.unique(buckets[chosen])}, key=lambda bucket: -lifts[bucket])
    if len(inside) > 1:
        best, second = inside[:2]
        if lifts[best] >= 1.5 * lifts[second]:
            share = got[buckets == best].sum()
            parts.append(f"most {_bucket_words(best)} ({100 * share:.0f}%)")
        elif min(map(abs, inside)) == abs(best) and lifts[best] >= 1.5 * lifts[inside[-1]]:
            parts.append("nearest first")
    if lifts.get(0, 1.0) >= NEAR:
        parts.append(f"itself ({100 * got[buckets == 0].sum():.0f}%)")
    little = [word for side, word in ((-1, "before"), (1, "after")) if times(buckets * side > 0) <= 0.5]
    return ", ".join([*parts, *(f"little {word} it" for word in little)])


def _reach_words(reach: int, side: str) -> str:
    if reach > len(_REACHES):
        return f"tokens {side} it" if side != "away" else "other tokens"
    if reach == 1:
        return {"before": "the previous token", "after": "the next token", "away": "the tokens beside it"}[side]
    return f"up to {_REACHES[reach - 1]} {side}"


def _bucket_words(bucket: int) -> str:
    side, size = ("before" if bucket < 0 else "after"), abs(bucket)
    if size <= 1:
        return _reach_words(1, side)
    if size > len(_REACHES):
        return f"{_REACHES[-1] + 1} or more {side}"
    low, high = _REACHES[size - 2] + 1, _REACHES[size - 1]
    return f"{low} {side}" if low == high else f"{low} to {high} {side}"
