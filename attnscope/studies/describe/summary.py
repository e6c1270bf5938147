"""A description in words that a reader takes in at once: by kinds of keys, by distance, by relations, and by pairs.

Terms overlap, and each holds given the others. A summary says what they come to: how much more attention each kind of
key gets, and each distance, than all the other terms would give it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from attnscope.studies.describe.naming import Names

if TYPE_CHECKING:
    from attnscope.core.questions.descriptions import Description
    from attnscope.records.heads.descriptions import Pair, Term

Floats = NDArray[np.float64]

MORE, LESS = 1.3, 0.5
"""Kinds of keys are named that get this many times what the other terms would give them; and those that get so few."""

LEAST_MORE = 1.15
"""Of the strongest kind of a line's strongest group this much suffices."""

MOST_GROUPS, MOST_KINDS, MOST_AVOIDED, MOST_RELATIONS = 3, 2, 2, 2
"""How many groups of terms a line names, and how many kinds of keys or relations a group."""

MOST_PAIRS = 2
"""Pairs of tokens that a line names, if it says nothing else about some queries alone."""

LEAST_SHARE = 0.02
"""Of attention, or of what the other terms would give: below it a kind or a distance is not named."""

NEAR = 1.2
"""Distances are named that get this many times what the other terms would give them; the nearer half of a window is
said to come first if it gets this many times what the other half does."""

MOSTLY = 1.5
"""One distance of several is named if it gets this many times what the next gets; so is the query itself, of what the
other terms would give it."""

AS_MUCH = 1.4
"""Groups of terms whose nats differ by less than this factor count alike."""

WEAK = {"kind": 0.04, "distance": 0.1, "relation": 0.05, "pair": 0.2}
"""Groups are left out that have less than this share of the strongest's nats."""

CLEAR = 0.7
"""Share of attention at the distances that are named, from which on nothing is said of the others."""

_REACHES, _SIDES = (0, 1, 2, 4, 8), ((-1, "before"), (1, "after"))


def summarise(names: Names, head: int, description: Description, terms: Sequence[Term]) -> tuple[tuple[Pair, ...], str]:
    """What a head attends to when it attends, such as "nouns 1.6× (door, key), least punctuation".

    Returns:
        Pairs with much attention beyond what distances and kinds of keys give them, and the words.
    """
    part, groups = names.part, dict[str, list[int]]()
    for place, number in enumerate(description.terms):
        groups.setdefault(_group_of(number, head, names), []).append(place)
    values = [part.values_of(term, head)[part.column(term, head)] for term in description.terms]
    scores = {
        group: sum(description.weights[place] * values[place] for place in places) for group, places in groups.items()
    }
    strengths = {group: _nats(names, head, of) for group, of in scores.items()}
    limits = {group: WEAK[group] * max(strengths.values()) for group in groups}
    words: dict[str, str] = {}
    for group in sorted(groups, key=lambda group: -strengths[group]):
        others = sum((of for name, of in scores.items() if name != group), np.zeros(part.size))
        if len(words) == MOST_GROUPS or strengths[group] < limits[group]:
            continue
        if group == "kind":
            phrase = by_kind(names, head, others, least=MORE if words else LEAST_MORE)
        elif group == "distance":
            phrase = by_distance(names, head, others)
        elif group == "pair":
            phrase = next((phrase for place in groups[group] if (phrase := _pair(names, head, description, place))), "")
        else:
            related = [phrase for place in groups[group] if (phrase := _relation(terms[place]))]
            phrase = ", ".join(related[:MOST_RELATIONS])
        if phrase:
            words[group] = phrase
    text, last = "", 0.0
    for group, phrase in words.items():
        text += f"; {'equally' if last < AS_MUCH * strengths[group] else 'then'} {phrase}" if text else phrase
        last = strengths[group]
    pairs = names.pairs(head, _scores_beside_pairs(names, head, description))
    if not text and terms:  # no kind and no distance stands out
        text = _relation(terms[0]) or terms[0].words
    if text and pairs and "pair" not in words and len(words) < MOST_GROUPS:
        text += f", such as {', '.join(f'{pair.query} → {pair.key}' for pair in pairs[:MOST_PAIRS])}"
    return pairs, text


def _scores_beside_pairs(names: Names, head: int, description: Description) -> Floats:
    """(entry,): what the terms say, except those about some queries alone."""
    part, columns = names.part, names.part.own_columns(head)
    places = []
    for place, term in enumerate(description.terms):
        own = columns[term - part.n_shared] if term >= part.n_shared else None
        if own is None or (own.queries is None and own.gate < 0):
            places.append(place)
    return part.scores(tuple(description.terms[place] for place in places), description.weights[places], head)


def _group_of(number: int, head: int, names: Names) -> str:
    features = names.group.features
    if number >= len(features):
        column = names.part.own_columns(head)[number - len(features)]
        return "kind" if column.queries is None and column.gate < 0 else "pair"
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
    """A relation with its share; "" if its share and its weight disagree, or the share says nothing."""
    if not np.isfinite(term.share):
        return f"{'avoids ' if term.weight < 0 else ''}{term.words}"
    if term.weight * (term.share - term.even) <= 0 or round(100 * term.share) == round(100 * term.even):
        return ""
    share = f"({100 * term.share:.0f}%; uniform {100 * term.even:.0f}%)"
    return f"{'avoids ' if term.weight < 0 else ''}{term.words} {share}"


def _pair(names: Names, head: int, description: Description, place: int) -> str:
    """What queries of some types attend to more: beside all terms but the one that is about them."""
    terms = tuple(number for number in description.terms if number != description.terms[place])
    others = names.part.scores(terms, np.delete(description.weights, place), head)
    column = names.part.own_columns(head)[description.terms[place] - names.part.n_shared]
    if column.gate >= 0:
        return _gated(names, head, description, place, others)
    assert column.queries is not None
    values = column.values.reshape(-1, column.n_key_levels)[:, -1][column.queries]
    queries, of_rows = names.of_queries(values, head)
    keys = by_kind(names, head, others, of_rows)
    return f"from {queries}: {keys}" if keys else ""


def _gated(names: Names, head: int, description: Description, place: int, others: Floats) -> str:
    """A feature from some queries: its kinds of keys, or its words."""
    part = names.part
    column = part.own_columns(head)[description.terms[place] - part.n_shared]
    assert part.rows.gates is not None
    feature = names.group.features[column.gated]
    if feature.family == "key" or feature.name == "rarity":
        keys = by_kind(names, head, others, part.rows.gates[column.gate, part.index].astype(float))
    else:
        keys = f"{'avoids ' if description.weights[place] < 0 else ''}{feature.words}"
    return f"from {names.of_gate(column.gate)}: {keys}" if keys else ""


def by_kind(names: Names, head: int, others: Floats, of_rows: Floats | None = None, least: float = MORE) -> str:
    """Kinds of keys by how much more attention they get than the other terms, (entry,), would give them.

    `of_rows`, (row,), is how much each row counts beside its weight; None = all alike. The strongest kind must get
    `least` times what the other terms would give it.
    """
    part, kinds = names.part, names.kinds
    weights = part.weights[head] * (1.0 if of_rows is None else of_rows)
    rows = (weights / max(weights.sum(), 1e-30))[part.row_of]
    got, even = part.attention(head) * rows, names.expected(others) * rows

    shares, expected = (np.bincount(kinds.of_entry, of, len(kinds.words)).astype(float) for of in (got, even))
    lifts = _lift(shares, expected)
    matter = np.maximum(shares, expected) >= LEAST_SHARE
    more = matter & (lifts >= min(MORE, max(least, lifts[matter].max(initial=0.0))))
    less = matter & (lifts <= LESS)
    parts = []
    ordered = np.argsort(-shares * np.log(lifts))  # what tells most of them, and then the largest lifts first
    named = kinds.merge([int(n) for n in ordered if more[n]], matter)[:MOST_KINDS]
    for words, members in sorted(named, key=lambda kind: -_lift(shares[kind[1]].sum(), expected[kind[1]].sum())):
        inside = np.isin(kinds.of_entry, members)
        of_kind = np.bincount(names.keys[inside], (got - even)[inside], len(names.types.ids))
        best = [int(n) for n in np.argsort(-of_kind)[: 3 if len(named) == 1 else 2] if of_kind[n] > 0]
        times = _lift(shares[members].sum(), expected[members].sum())
        examples = f" ({', '.join(names.label(n) for n in best)})" if words not in kinds.signs else ""
        parts.append(f"{words} {times:.1f}×{examples}")
    avoided = kinds.merge([int(n) for n in np.argsort(shares - expected) if less[n]], matter)[:MOST_AVOIDED]
    if avoided:
        parts.append(f"least {', '.join(words for words, _ in avoided)}")
    return ", ".join(parts)


def _lift(share: Floats, expected: Floats) -> Floats:
    return (share + LEAST_SHARE / 2) / (expected + LEAST_SHARE / 2)


def by_distance(names: Names, head: int, others: Floats) -> str:
    """How far keys are, by how much more attention such keys get than the other terms would give them."""
    part, away = names.part, np.abs(names.offsets)
    rows = part.weights[head][part.row_of]
    got, even, uniform = part.attention(head) * rows, names.expected(others) * rows, rows / part.lengths[part.row_of]
    buckets = np.sign(names.offsets) * np.where(away > 0, np.searchsorted(_REACHES, away), 0)

    def times(some: NDArray[np.bool_]) -> float:
        return float((got[some].sum() + LEAST_SHARE / 4) / (even[some].sum() + LEAST_SHARE / 4))

    lifts = {int(bucket): times(buckets == bucket) for bucket in np.unique(buckets)}
    reach = dict.fromkeys((-1, 1), 0)
    for side in reach:
        while lifts.get(side * (reach[side] + 1), 0.0) >= NEAR:
            reach[side] += 1
    chosen = (buckets != 0) & (buckets >= -reach[-1]) & (buckets <= reach[1])
    if reach[-1] and reach[-1] == reach[1]:
        phrase = _span(1, reach[1], "away")
    elif any(reach.values()):
        phrase = " and ".join(_span(1, reach[side], word) for side, word in _SIDES if reach[side])
    else:
        best = max((bucket for bucket in lifts if bucket), key=lambda bucket: lifts[bucket])
        if lifts[best] < NEAR and lifts.get(0, 0.0) < MOSTLY:
            return ""
        if lifts[best] < NEAR:
            return f"the token itself ({_shares(got, uniform, buckets == 0)})"
        chosen, phrase = buckets == best, _span(abs(best), abs(best), dict(_SIDES)[1 if best > 0 else -1])
    parts = [f"{phrase} ({_shares(got, uniform, chosen)})"]
    best, *less = sorted({int(bucket) for bucket in buckets[chosen]}, key=lambda bucket: -lifts[bucket])
    first, last = away[chosen].min(), away[chosen].max()
    if less and lifts[best] >= MOSTLY * lifts[less[0]]:
        where = _span(abs(best), abs(best), dict(_SIDES)[1 if best > 0 else -1])
        parts.append(f"most {where} ({100 * got[buckets == best].sum():.0f}%)")
    elif first < last:
        nearer = away <= (first + last) / 2
        more = times(chosen & nearer) / times(chosen & ~nearer)
        parts.append("nearest first" if more >= NEAR else "farthest first" if more <= 1 / NEAR else "evenly")
    if lifts.get(0, 0.0) >= MOSTLY:
        parts.append(f"itself ({100 * got[buckets == 0].sum():.0f}%)")
    if got[chosen].sum() < CLEAR:
        parts += [f"little {word} it" for side, word in _SIDES if times(buckets * side > 0) <= LESS]
    return ", ".join(parts)


def _shares(got: Floats, uniform: Floats, some: NDArray[np.bool_]) -> str:
    return f"{100 * got[some].sum():.0f}%; uniform {100 * uniform[some].sum():.0f}%"


def _span(first: int, last: int, side: str) -> str:
    """What the keys of some buckets on a side are called, such as "5 to 8 before"; buckets end at `_REACHES`."""
    low = int(_REACHES[first - 1]) + 1
    if last >= len(_REACHES):
        return f"{low} or more {side}" if first > 1 else "other tokens" if side == "away" else f"tokens {side} it"
    high = _REACHES[last]
    if high == 1:
        return {"before": "the previous token", "after": "the next token", "away": "the tokens beside it"}[side]
    return f"up to {high} {side}" if first == 1 else f"{low} {side}" if low == high else f"{low} to {high} {side}"
