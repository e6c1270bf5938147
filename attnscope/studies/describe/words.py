"""Put a description into words that a reader takes in at once: kinds of keys, distances, relations and pairs.

Terms overlap, and each holds beside the others. A summary says how much more attention each kind of key gets, and each
distance, than all the other terms would give it. Terms that were fitted to one head are named by tokens, by a known
class, and by strong pairs. `core.descriptions` fits the terms, and `study` writes the whole line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnscope.core.descriptions import Description
from attnscope.core.sampled_rows import Rows
from attnscope.studies.describe.english import CLOSED_CLASSES, OPEN_CLASSES
from attnscope.studies.describe.features import Feature
from attnscope.studies.describe.rows import Group

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]

# Names of terms

TOKENS = 6
"""Tokens that a term is named by, at most."""

HIGH, MOST_NAMED = 0.5, 0.35
"""The tokens that a term names have this value of its column at least, and are at most this share of all keys (or
queries)."""

COVERED = 0.6
"""Kinds of tokens name queries if they are this share of them."""

PAIRS, FEWEST_TEXTS = 2, 2
"""Strong pairs that are named, and the texts in which a pair must occur."""

LEAST_PAIR = 0.03
"""Attention of a row, beyond what terms give a pair, from which on the pair is named: its mean, shrunk."""

_SHRUNK_BY, _STRONG = 2, 2**13
"""Occurrences without attention that are added to those of a pair; and how many of the strongest entries are looked
at."""

ENGLISH = 0.25
"""Share of words that are of a closed English class, from which on the texts are English."""

# Thresholds of a line

MORE, LESS = 1.3, 0.5
"""Kinds of keys are named that get this many times what the other terms would give them; and those that get so few."""

LEAST_MORE = 1.15
"""Of the strongest kind of a line's strongest group this much suffices."""

MOST_GROUPS, MOST_PHRASES = 3, 2
"""How many groups of terms a line names; and how many kinds of keys or relations a group."""

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

_SIGNS = ("sentence_end", "comma", "quote", "bracket", "punctuation")
_SHORT = {"name": "names", "punctuation": "other punctuation"}
_REACHES = (0, 1, 2, 4, 8)
_SIDES = {-1: "before", 1: "after"}
_BESIDE = {"before": "the previous token", "after": "the next token", "away": "the tokens beside it"}
_BEYOND = {"before": "tokens before it", "after": "tokens after it", "away": "other tokens"}


def least_named(values: Floats) -> float:
    """Return from which value of a column on a token belongs to its term; the highest always does."""
    levels, counts = np.unique(values, return_counts=True)
    shares = counts[::-1].cumsum()[::-1] / max(1, len(values))
    highest = float(values.max(initial=0.0))
    narrow = np.append(levels[shares <= MOST_NAMED], highest)
    return max(min(HIGH, highest), float(narrow[0]))


class Kinds:
    """Kinds of keys, of which each key has one.

    Words are told apart by English classes where a quarter of them belong to a closed one, else by frequency.

    Attributes:
        words: The name of each kind.
        of_entry: (entry,): the number of each key's kind.
        wholes: The name of several kinds together -> their numbers.
        signs: The names of kinds that need no examples.
    """

    def __init__(self, rows: Rows, features: Sequence[Feature]) -> None:
        numbers = {feature.name: number for number, feature in enumerate(features)}
        is_closed = np.any([rows.features[numbers[name]] for name in CLOSED_CLASSES], 0)
        if is_closed.sum() >= ENGLISH * rows.features[numbers["word"]].sum():
            closed = sorted(CLOSED_CLASSES, key=lambda name: name != "negations")
            order = [*_SIGNS, "digit", "piece", *closed, "name", *OPEN_CLASSES]
        else:
            order = [*_SIGNS, "digit", "piece", "name", "frequent", "infrequent"]
        # A key is of the first kind in the order that it has.
        self.of_entry = np.full(rows.size, len(order))
        for place in reversed(range(len(order))):
            self.of_entry[rows.features[numbers[order[place]]] > 0] = place
        # Names of kinds, and of wholes such as function words.
        words = [_SHORT.get(name, features[numbers[name]].words.removeprefix("English ")) for name in order]
        self.words = (*words, "other tokens")
        self.signs = {*words[: len(_SIGNS) - 1], "punctuation"}
        parts: dict[str, Sequence[str]] = {"punctuation": _SIGNS, "function words": tuple(CLOSED_CLASSES)}
        self.wholes = {whole: {order.index(name) for name in names if name in order} for whole, names in parts.items()}

    def merge(self, chosen: Sequence[int], matter: Flags) -> list[tuple[str, list[int]]]:
        """Return chosen kinds by name: members have the name of their whole, if all of it that matters is chosen."""
        by_words: dict[str, list[int]] = {}
        for number in chosen:
            words = self.words[number]
            for whole, members in self.wholes.items():
                mattering = {member for member in members if matter[member]}
                if number in members and len(mattering) > 1 and mattering <= set(chosen):
                    words = whole
            by_words.setdefault(words, []).append(number)
        return list(by_words.items())


class Names:
    """The names of terms, from the fitted rows of a group.

    Attributes:
        rows: The fitted rows, whose queries are ordinary.
        offsets: (entry,): how far each key is behind its query, in tokens.
        kinds: The kinds of keys.
    """

    def __init__(self, group: Group, rows: Rows) -> None:
        self.group = group
        self.rows = rows
        self.kinds = Kinds(rows, group.features)
        self.offsets = group.offsets[rows.entries]
        self._words: dict[tuple[int, int], str] = {}

    # How much attention entries get

    def weighted(self, head: int, of_rows: Floats | None = None) -> Floats:
        """Return the weight of each entry's row for a head, (entry,), times that of its query if rows have any."""
        weights = self.rows.weights[head]
        if of_rows is not None:
            weights = weights * of_rows
            weights = weights / max(weights.sum(), 1e-30)
        return self.rows.spread(weights)

    def expected(self, scores: Floats) -> Floats:
        """Return p ∝ exp(score), each row scaled to 1, (entry,)."""
        p = np.exp(scores - np.max(scores, initial=0.0))
        scaled: Floats = p / self.rows.spread(np.maximum(self.rows.sums(p), 1e-300))
        return scaled

    def nats(self, head: int, scores: Floats) -> float:
        """Return KL(p ‖ uniform) of the attention p that some scores alone give, mean over rows, in nats."""
        p = self.expected(scores)
        of_rows = np.log(self.rows.lengths) + self.rows.sums(p * np.log(np.maximum(p, 1e-30)))
        return float(self.rows.weights[head] @ of_rows)

    # Terms

    def name(self, term: int, head: int) -> str:
        """Return a feature's name; of a head's own "keys", or either end of each pair."""
        features = self.group.features
        column = self.rows.column_of(term, head)
        if column is None:
            return features[term].name
        pair, is_lower = divmod(term - len(features) + 1, 2)
        return f"pair{pair}{'-' if is_lower else '+'}" if pair else "keys"

    def of_first(self, description: Description, head: int, *, in_words: bool = True) -> str:
        """Return the words or the name of the first term, with "not" before it if it is avoided; "" = there is none."""
        if not description.terms:
            return ""
        term = description.terms[0]
        sign = "not " if description.first_weight < 0 else ""
        return sign + (self.of_term(term, head) if in_words else self.name(term, head))

    def of_term(self, term: int, head: int) -> str:
        """Return the words of a term, such as "tokens like alice, dinah, abbas"."""
        column = self.rows.column_of(term, head)
        if column is None:
            return self.group.features[term].words
        if (term, head) in self._words:
            return self._words[term, head]
        # The tokens that get most attention are the examples.
        on = self.rows.scaled(head) * self.weighted(head)
        if column.queries is None:
            words = f"tokens like {self._keys_of(column.key_values[column.keys], on)}"
        else:
            from_queries = column.query_values[column.queries]
            on = on * self.rows.spread(from_queries[self.rows.query_types])
            to_keys = self._keys_of(column.key_values[column.keys], on)
            words = f"from {self.of_queries(from_queries, head)[0]} to {to_keys}"
        self._words[term, head] = words
        return words

    def of_queries(self, values: Floats, head: int) -> tuple[str, Floats]:
        """Return the name of the queries whose types have high values, and how much each row is one, (row,), 0 to 1."""
        # Rows of the queries that the column names, and their types by weight.
        of_rows = values[self.rows.query_types]
        of_rows = np.where(of_rows >= least_named(of_rows), of_rows, 0.0)
        weights = self.rows.weights[head] * of_rows
        labels = self.labels(np.bincount(self.rows.query_types, weights, len(values)), TOKENS)
        written = [label for label in labels if any(map(str.isalnum, label))]
        # By kinds, if these are most of them; a query's own entry tells its kind.
        itself = np.flatnonzero(self.offsets == 0)
        of_kinds = np.bincount(self.kinds.of_entry[itself], weights[self.rows.row_of[itself]], len(self.kinds.words))
        shares = of_kinds / max(float(weights.sum()), 1e-30)
        named = self.kinds.merge([int(n) for n in np.argsort(-shares) if shares[n] >= 0.1], shares >= 0.05)[:2]
        if sum(shares[members].sum() for _, members in named) < COVERED:
            some = dict.fromkeys(label if label in written else "punctuation" for label in labels)
            return ", ".join(list(some)[:4]), of_rows
        words = ", ".join(words for words, _ in named)
        if written and words not in self.kinds.signs:
            words += f" ({', '.join(written[:2])})"
        return words, of_rows

    def _keys_of(self, values: Floats, on: Floats) -> str:
        """Return the name of the keys whose types have high values: labels, those with most attention first."""
        of_entries = values[self.rows.key_types]
        high = np.flatnonzero(of_entries >= least_named(of_entries))
        weights = on[high] * of_entries[high]
        labels = self.labels(np.bincount(self.rows.key_types[high], weights, len(values)), TOKENS)
        # A bare comma in a list separated by commas cannot be read.
        quoted = [label if any(map(str.isalnum, label)) else f"“{label}”" for label in labels]
        return ", ".join(quoted)

    def labels(self, weights: NDArray[np.number[Any]], most: int) -> list[str]:
        """Return the labels of types, (type,), the largest weight first; none of them twice."""
        labels = []
        for number in np.argsort(-weights, kind="stable")[: 2 * most]:
            if weights[number] > 0:
                label = self.group.types.labels[number]
                labels.append(label.strip("·Ġ▁ ") or label)
        return list(dict.fromkeys(labels))[:most]

    def pairs(self, head: int, others: Floats) -> list[str]:
        """Return the pairs of tokens that get the most attention beyond what some terms, (entry,), give them."""
        # Attention beyond the terms, times the weight of the row, and the code of the pair of types, (entry,).
        rows = self.rows
        labels = self.group.types.labels
        more = (rows.scaled(head) - self.expected(others)) * self.weighted(head) * len(rows.texts)
        codes = rows.spread(rows.query_types.astype(np.int64)) * len(labels) + rows.key_types
        strong = np.arange(len(more))
        if len(more) > _STRONG:  # a strong pair has strong entries
            strong = np.flatnonzero(more >= np.partition(more, -_STRONG)[-_STRONG])
        order = strong[np.argsort(-more[strong], kind="stable")][:_STRONG]
        distinct, pair_of = np.unique(codes[order], return_inverse=True)
        # Pairs of frequent tokens have much attention by their number: each counts by its mean, shrunk towards 0.
        means = np.bincount(pair_of, more[order]) / (np.bincount(pair_of) + _SHRUNK_BY)
        pairs: list[str] = []
        for number in np.argsort(-means, kind="stable")[:60]:
            texts = np.unique(rows.texts[rows.row_of[order[pair_of == number]]])
            query, key = divmod(int(distinct[number]), len(labels))
            if len(texts) >= FEWEST_TEXTS and means[number] >= LEAST_PAIR:
                pairs.append(f"{labels[query]} → {labels[key]}")
        return pairs[:PAIRS]


# The line


def summarise(names: Names, head: int, description: Description, terms: Sequence[Mapping[str, Any]]) -> str:
    """Say what a head attends to when it attends, such as "nouns 1.6× (door, key), least punctuation".

    `terms` are rows of the table `terms`, those of the description.
    """
    # Scores of each group of terms, (entry,), and how much they say alone.
    rows = names.rows
    groups: dict[str, list[int]] = {}
    scores: dict[str, Floats] = {}
    for place, number in enumerate(description.terms):
        group = _group_of(number, head, names)
        groups.setdefault(group, []).append(place)
        of_term = description.weights[place] * rows.by_entry(number, head)
        scores[group] = scores.get(group, np.zeros(rows.size)) + of_term
    strengths = {group: names.nats(head, of_group) for group, of_group in scores.items()}
    # A phrase for each of the strongest groups, beside what all the others give; the strongest first.
    text = ""
    said: list[str] = []
    for group in sorted(groups, key=lambda group: -strengths[group]):
        if len(said) == MOST_GROUPS or strengths[group] < WEAK[group] * max(strengths.values()):
            continue
        others = sum((of_group for name, of_group in scores.items() if name != group), np.zeros(rows.size))
        if group == "kind":
            phrase = by_kind(names, head, others, least=MORE if said else LEAST_MORE)
        elif group == "distance":
            phrase = by_distance(names, head, others)
        elif group == "pair":
            pairs = [_pair(names, head, description, place) for place in groups[group]]
            phrase = next(filter(None, pairs), "")
        else:
            relations = [_relation(terms[place]) for place in groups[group]]
            phrase = ", ".join(list(filter(None, relations))[:MOST_PHRASES])
        if phrase:
            if said:
                text += "; equally " if strengths[said[-1]] < AS_MUCH * strengths[group] else "; then "
            text += phrase
            said.append(group)
    if not text and terms:  # no kind and no distance stands out
        text = _relation(terms[0]) or terms[0]["words"]
    # Pairs go beyond the terms that hold for all queries alike.
    if text and "pair" not in said and len(said) < MOST_GROUPS:
        columns = [rows.column_of(term, head) for term in description.terms]
        plain = [place for place, column in enumerate(columns) if column is None or column.queries is None]
        beside = rows.scores(tuple(description.terms[place] for place in plain), description.weights[plain], head)
        pairs = names.pairs(head, beside)
        if pairs:
            text += f", such as {', '.join(pairs)}"
    return text


def _group_of(number: int, head: int, names: Names) -> str:
    column = names.rows.column_of(number, head)
    if column is not None:
        return "kind" if column.queries is None else "pair"
    feature = names.group.features[number]
    if feature.is_of_keys:
        return "kind"
    return "distance" if feature.family == "offset" or feature.name.startswith(("near", "window")) else "relation"


def _relation(term: Mapping[str, Any]) -> str:
    """Return a relation with its share; "" if its share and its weight disagree, or the share says nothing."""
    words = f"avoids {term['words']}" if term["weight"] < 0 else str(term["words"])
    share = 100 * term["share"].value
    even = 100 * term["share"].baseline
    if not np.isfinite(share):
        return words
    if term["weight"] * (share - even) <= 0 or round(share) == round(even):
        return ""
    return f"{words} ({share:.0f}%; uniform {even:.0f}%)"


def _pair(names: Names, head: int, description: Description, place: int) -> str:
    """Say what queries of some types attend to more: beside all terms but the one that is about them."""
    rows = names.rows
    term = description.terms[place]
    terms = tuple(number for number in description.terms if number != term)
    others = rows.scores(terms, np.delete(description.weights, place), head)
    column = rows.column_of(term, head)
    assert column is not None
    queries, of_rows = names.of_queries(column.query_values[column.queries], head)
    keys = by_kind(names, head, others, of_rows)
    return f"from {queries}: {keys}" if keys else ""


def by_kind(names: Names, head: int, others: Floats, of_rows: Floats | None = None, least: float = MORE) -> str:
    """Name kinds of keys by how much more attention they get than the other terms, (entry,), would give them.

    `of_rows`, (row,), is how much each row counts beside its weight; None = all alike. The strongest kind must get
    `least` times what the other terms would give it.
    """
    # Attention of each kind, and what the other terms would give it, (kind,).
    kinds = names.kinds
    weights = names.weighted(head, of_rows)
    got = names.rows.scaled(head) * weights
    even = names.expected(others) * weights
    shares = np.bincount(kinds.of_entry, got, len(kinds.words)).astype(float)
    expected = np.bincount(kinds.of_entry, even, len(kinds.words)).astype(float)
    lifts = _lift(shares, expected)
    matter = np.maximum(shares, expected) >= LEAST_SHARE
    is_more = matter & (lifts >= min(MORE, max(least, lifts[matter].max(initial=0.0))))
    is_less = matter & (lifts <= LESS)

    # Name the kinds that tell most, and of these the largest lifts first.
    telling = np.argsort(-shares * np.log(lifts))
    named = kinds.merge([int(n) for n in telling if is_more[n]], matter)[:MOST_PHRASES]
    phrases: dict[str, float] = {}
    for words, members in named:
        times = float(_lift(shares[members].sum(), expected[members].sum()))
        is_inside = np.isin(kinds.of_entry, members)
        of_types = np.bincount(names.rows.key_types[is_inside], (got - even)[is_inside], len(names.group.types.ids))
        examples = ""
        if words not in kinds.signs:
            examples = f" ({', '.join(names.labels(of_types, 3 if len(named) == 1 else 2))})"
        phrases[f"{words} {times:.1f}×{examples}"] = times
    parts = sorted(phrases, key=phrases.__getitem__, reverse=True)
    # The kinds that get least come last.
    avoided = kinds.merge([int(n) for n in np.argsort(shares - expected) if is_less[n]], matter)[:MOST_PHRASES]
    if avoided:
        parts.append(f"least {', '.join(words for words, _ in avoided)}")
    return ", ".join(parts)


def _lift(share: Floats, expected: Floats) -> Floats:
    return (share + LEAST_SHARE / 2) / (expected + LEAST_SHARE / 2)


def by_distance(names: Names, head: int, others: Floats) -> str:
    """Say how far keys are, by how much more attention such keys get than the other terms would give them."""
    # Attention by entry: of the head, by the other terms, and uniform.
    away = np.abs(names.offsets)
    weights = names.weighted(head)
    got = names.rows.scaled(head) * weights
    even = names.expected(others) * weights
    uniform = weights / names.rows.spread(names.rows.lengths)
    buckets = np.sign(names.offsets) * np.where(away > 0, np.searchsorted(_REACHES, away), 0)

    def times(some: Flags) -> float:
        return float((got[some].sum() + LEAST_SHARE / 4) / (even[some].sum() + LEAST_SHARE / 4))

    def shares(some: Flags) -> str:
        return f"({100 * got[some].sum():.0f}%; uniform {100 * uniform[some].sum():.0f}%)"

    # How far it reaches on either side, while each distance gets more than the terms give it.
    lifts = {int(bucket): times(buckets == bucket) for bucket in np.unique(buckets)}
    reach = {-1: 0, 1: 0}
    for side in reach:
        while lifts.get(side * (reach[side] + 1), 0.0) >= NEAR:
            reach[side] += 1
    chosen = (buckets != 0) & (buckets >= -reach[-1]) & (buckets <= reach[1])
    # Name the reach; without one, the single distance that gets most.
    if reach[-1] and reach[-1] == reach[1]:
        phrase = _span(1, reach[1], "away")
    elif any(reach.values()):
        phrase = " and ".join(_span(1, reach[side], word) for side, word in _SIDES.items() if reach[side])
    else:
        best = max((bucket for bucket in lifts if bucket), key=lambda bucket: lifts[bucket])
        if lifts[best] < NEAR:
            return f"the token itself {shares(buckets == 0)}" if lifts.get(0, 0.0) >= MOSTLY else ""
        chosen = buckets == best
        phrase = _bucket(best)
    parts = [f"{phrase} {shares(chosen)}"]

    # Where most of it is.
    best, *less = sorted({int(bucket) for bucket in buckets[chosen]}, key=lambda bucket: -lifts[bucket])
    first, last = away[chosen].min(), away[chosen].max()
    if less and lifts[best] >= MOSTLY * lifts[less[0]]:
        parts.append(f"most {_bucket(best)} ({100 * got[buckets == best].sum():.0f}%)")
    elif first < last:
        is_nearer = away <= (first + last) / 2
        more = times(chosen & is_nearer) / times(chosen & ~is_nearer)
        order = "nearest first" if more >= NEAR else "evenly"
        parts.append("farthest first" if more <= 1 / NEAR else order)
    if lifts.get(0, 0.0) >= MOSTLY:
        parts.append(f"itself ({100 * got[buckets == 0].sum():.0f}%)")
    if got[chosen].sum() < CLEAR:
        parts += [f"little {word} it" for side, word in _SIDES.items() if times(buckets * side > 0) <= LESS]
    return ", ".join(parts)


def _bucket(bucket: int) -> str:
    return _span(abs(bucket), abs(bucket), _SIDES[1 if bucket > 0 else -1])


def _span(first: int, last: int, side: str) -> str:
    """Return the name of the keys of some buckets on a side, such as "5 to 8 before"."""
    low = _REACHES[first - 1] + 1
    if last >= len(_REACHES):
        return f"{low} or more {side}" if first > 1 else _BEYOND[side]
    high = _REACHES[last]
    if high == 1:
        return _BESIDE[side]
    if first == 1:
        return f"up to {high} {side}"
    return f"{low} {side}" if low == high else f"{low} to {high} {side}"
