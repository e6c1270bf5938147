"""Put a description into words that a reader takes in at once: kinds of keys, distances, relations and pairs.

Terms overlap, and each holds beside the others. A summary says how much more attention each kind of key gets, and each
distance, than all the other terms would give it. Terms that were fitted to one head are named by tokens, by a known
class, and by strong pairs. `core.descriptions` fits the terms, and `study` writes the whole line.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnscope.core.descriptions import Description
from attnscope.core.sampled_rows import Column, Floats, Rows
from attnscope.studies.describe.english import CLOSED_CLASSES, OPEN_CLASSES
from attnscope.studies.describe.features import Flags
from attnscope.studies.describe.rows import Group

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

    def __init__(self, group: Group, rows: Rows) -> None:
        numbers = {feature.name: number for number, feature in enumerate(group.features)}
        is_closed = rows.features[[numbers[name] for name in CLOSED_CLASSES]].any(0)
        order = [*_SIGNS, "digit", "piece", "name", "frequent", "infrequent"]
        if is_closed.sum() >= ENGLISH * rows.features[numbers["word"]].sum():
            closed = sorted(CLOSED_CLASSES, key=lambda name: name != "negations")
            order[-3:] = [*closed, "name", *OPEN_CLASSES]
        # A key is of the first kind in the order that it has, (kind, entry).
        is_kind = rows.features[[numbers[name] for name in order]] > 0
        self.of_entry = np.pad(is_kind, ((0, 1), (0, 0)), constant_values=True).argmax(0)
        # Names of kinds, and of wholes such as function words.
        words = [
            _SHORT.get(name, group.features[numbers[name]].words.removeprefix("English "))
            for name in order
        ]
        self.words = (*words, "other tokens")
        self.signs = {*words[: len(_SIGNS) - 1], "punctuation"}
        parts: dict[str, Sequence[str]] = {
            "punctuation": _SIGNS,
            "function words": tuple(CLOSED_CLASSES),
        }
        self.wholes = {
            whole: {order.index(name) for name in names if name in order}
            for whole, names in parts.items()
        }

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

    def totals(self, of_entries: Floats) -> Floats:
        """Return the sum of numbers of entries, (entry,), for each kind, (kind,)."""
        return np.bincount(self.of_entry, of_entries, len(self.words)).astype(np.float64)


class HeadWords:
    """The names of a head's terms, and its line, from the fitted rows of its group.

    Attributes:
        rows: The fitted rows, whose queries are ordinary.
        head: The number of the head in them.
        kinds: The kinds of keys.
        offsets: (entry,): how far each key is behind its query, in tokens.
        on: (entry,): the head's attention, each row scaled to its weight; all sum to 1.
    """

    def __init__(self, group: Group, rows: Rows, kinds: Kinds, head: int) -> None:
        self.rows = rows
        self.head = head
        self.kinds = kinds
        self.offsets = group.offsets[rows.entries]
        self.on = rows.weighted(rows.scaled(head), head)
        self._features = group.features
        self._labels = group.types.labels

    # How much attention entries get

    def expected(self, scores: Floats) -> Floats:
        """Return p ∝ exp(score), each row scaled to its weight, (entry,)."""
        return self.rows.weighted(np.exp(scores - scores.max(initial=0.0)), self.head)

    def nats(self, scores: Floats) -> float:
        """Return KL(p ‖ uniform) of the attention p that some scores alone give, mean over rows, in nats."""
        # ln p = score - ln Z, and ln u = -ln n.
        below_top = scores - scores.max(initial=0.0)
        log_ratio = np.log(self.rows.lengths / self.rows.sums(np.exp(below_top)))
        return float(self.rows.weights[self.head] @ log_ratio + self.expected(scores) @ below_top)

    # Terms

    def column(self, term: int) -> Column | None:
        """Return the column of a term that is the head's own; None = all heads share it."""
        return self.rows.column_of(term, self.head)

    def name(self, term: int) -> str:
        """Return a feature's name; of a head's own "keys", or either end of each pair."""
        if self.column(term) is None:
            return self._features[term].name
        pair, is_lower = divmod(term - len(self._features) + 1, 2)
        return f"pair{pair}{'-' if is_lower else '+'}" if pair else "keys"

    def of_term(self, term: int) -> str:
        """Return the words of a term, such as "tokens like alice, dinah, abbas"."""
        column = self.column(term)
        if column is None:
            return self._features[term].words
        # The tokens that get most attention are the examples.
        of_keys = column.key_values[column.keys][self.rows.key_types]
        weights = self.on * of_keys * (of_keys >= least_named(of_keys))
        words = "tokens like"
        if column.queries is not None:
            weights = weights * self.rows.spread(_values_of_rows(self.rows, column))
            words = f"from {self.of_queries(column)[0]} to"
        labels = self.labels(self.rows.key_types, weights, TOKENS)
        # A bare comma in a list separated by commas cannot be read.
        quoted = [label if any(map(str.isalnum, label)) else f"“{label}”" for label in labels]
        return f"{words} {', '.join(quoted)}"

    def of_queries(self, column: Column) -> tuple[str, Floats]:
        """Return the name of the queries of high value in a column, and how much each row is one, (row,), 0 to 1."""
        # Rows of the queries that the column names, and their types by weight.
        of_rows = _values_of_rows(self.rows, column)
        of_rows = np.where(of_rows >= least_named(of_rows), of_rows, 0.0)
        weights = self.rows.weights[self.head] * of_rows
        labels = self.labels(self.rows.query_types, weights, TOKENS)
        written = [label for label in labels if any(map(str.isalnum, label))]
        # By kinds, if these are most of them; a query's own entry tells its kind.
        itself = self.offsets == 0
        shares = self.kinds.totals(self.rows.spread(weights) * itself) / max(weights.sum(), 1e-30)
        common = [number for number in np.argsort(-shares).tolist() if shares[number] >= 0.1]
        named = self.kinds.merge(common, shares >= 0.05)[:2]
        if sum(shares[members].sum() for _, members in named) < COVERED:
            some = dict.fromkeys(label if label in written else "punctuation" for label in labels)
            return ", ".join(list(some)[:4]), of_rows
        words = ", ".join(words for words, _ in named)
        if written and words not in self.kinds.signs:
            words += f" ({', '.join(written[:2])})"
        return words, of_rows

    def labels(self, types: NDArray[np.integer], weights: Floats, most: int) -> list[str]:
        """Return the labels of types, those with the largest sum of weights above 0 first; none of them twice."""
        labels = []
        sums = np.bincount(types, weights)
        for number in np.argsort(-sums, kind="stable")[: 2 * most]:
            if sums[number] > 0:
                label = self._labels[number]
                labels.append(label.strip("·Ġ▁ ") or label)
        return list(dict.fromkeys(labels))[:most]

    # The line

    def summarise(self, description: Description, terms: Sequence[Mapping[str, Any]]) -> str:
        """Say what a head attends to when it attends, such as "nouns 1.6× (door, key), least punctuation".

        `terms` are rows of the table `terms`, those of the description.
        """
        if not terms:
            return ""
        # Scores of each term, (term, entry), and how much the terms about one thing say alone.
        by_term = np.stack([self.rows.by_entry(term, self.head) for term in description.terms])
        by_term *= description.weights[:, None]
        total = by_term.sum(0)
        abouts = np.array([self._about(term) for term in description.terms])
        scores = {about: by_term[abouts == about].sum(0) for about in dict.fromkeys(abouts.tolist())}
        strengths = {about: self.nats(of_group) for about, of_group in scores.items()}
        # A phrase for each of the strongest groups, beside what all the others give; the strongest first.
        text = ""
        said: list[str] = []
        for about in sorted(scores, key=lambda about: -strengths[about]):
            if len(said) == MOST_GROUPS or strengths[about] < WEAK[about] * max(strengths.values()):
                continue
            places = np.flatnonzero(abouts == about).tolist()
            others = total - scores[about]
            if about == "kind":
                phrase = self.by_kind(others, least=MORE if said else LEAST_MORE)
            elif about == "distance":
                phrase = self.by_distance(others)
            elif about == "pair":
                pairs = (
                    self._pair(description.terms[place], total - by_term[place]) for place in places
                )
                phrase = next(filter(None, pairs), "")
            else:
                relations = filter(None, (_relation(terms[place]) for place in places))
                phrase = ", ".join(list(relations)[:MOST_PHRASES])
            if phrase:
                if said:
                    text += (
                        "; equally " if strengths[said[-1]] < AS_MUCH * strengths[about] else "; then "
                    )
                text += phrase
                said.append(about)
        if not text:  # no kind and no distance stands out
            text = _relation(terms[0]) or str(terms[0]["words"])
        # Pairs go beyond the terms that hold for all queries alike.
        if "pair" not in said and len(said) < MOST_GROUPS:
            pairs_beside = self.pairs(by_term[abouts != "pair"].sum(0))
            if pairs_beside:
                text += f", such as {', '.join(pairs_beside)}"
        return text

    def _about(self, term: int) -> str:
        column = self.column(term)
        if column is None:
            return self._features[term].about
        return "kind" if column.queries is None else "pair"

    def _pair(self, term: int, others: Floats) -> str:
        """Say what queries of some types attend to more: beside all terms but the one that is about them."""
        column = self.column(term)
        assert column is not None
        queries, of_rows = self.of_queries(column)
        keys = self.by_kind(others, of_rows)
        return f"from {queries}: {keys}" if keys else ""

    def pairs(self, others: Floats) -> list[str]:
        """Return the pairs of tokens that get the most attention beyond what some terms, (entry,), give them."""
        # Attention beyond the terms, as a multiple of the mean row, and the code of the pair of types, (entry,).
        rows = self.rows
        more = (self.on - self.expected(others)) * len(rows.texts)
        codes = rows.spread(rows.query_types.astype(np.int64)) * len(self._labels) + rows.key_types
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
            query, key = divmod(int(distinct[number]), len(self._labels))
            if len(texts) >= FEWEST_TEXTS and means[number] >= LEAST_PAIR:
                pairs.append(f"{self._labels[query]} → {self._labels[key]}")
        return pairs[:PAIRS]

    def by_kind(self, others: Floats, of_rows: Floats | None = None, least: float = MORE) -> str:
        """Name kinds of keys by how much more attention they get than the other terms, (entry,), would give them.

        `of_rows`, (row,), is how much each row counts beside its weight; None = all alike. The strongest kind must get
        `least` times what the other terms would give it.
        """
        # Attention of each kind, and what the other terms would give it, (kind,).
        kinds = self.kinds
        got = self.on
        even = self.expected(others)
        if of_rows is not None:
            factors = self.rows.spread(of_rows / max(self.rows.weights[self.head] @ of_rows, 1e-30))
            got = got * factors
            even = even * factors
        shares = kinds.totals(got)
        expected = kinds.totals(even)
        lifts = _lift(shares, expected)
        matter = np.maximum(shares, expected) >= LEAST_SHARE
        is_more = matter & (lifts >= min(MORE, max(least, lifts[matter].max(initial=0.0))))
        is_less = matter & (lifts <= LESS)

        # Name the kinds that tell most, and of these the largest lifts first.
        telling = np.argsort(-shares * np.log(lifts))
        named = kinds.merge(telling[is_more[telling]].tolist(), matter)[:MOST_PHRASES]
        phrases: dict[str, float] = {}
        for words, members in named:
            times = float(_lift(shares[members].sum(), expected[members].sum()))
            examples = ""
            if words not in kinds.signs:
                more = (got - even) * np.isin(kinds.of_entry, members)
                labels = self.labels(self.rows.key_types, more, 3 if len(named) == 1 else 2)
                examples = f" ({', '.join(labels)})"
            phrases[f"{words} {times:.1f}×{examples}"] = times
        parts = sorted(phrases, key=phrases.__getitem__, reverse=True)
        # The kinds that get least come last.
        telling = np.argsort(shares - expected)
        avoided = kinds.merge(telling[is_less[telling]].tolist(), matter)[:MOST_PHRASES]
        if avoided:
            parts.append(f"least {', '.join(words for words, _ in avoided)}")
        return ", ".join(parts)

    def by_distance(self, others: Floats) -> str:
        """Say how far keys are, by how much more attention such keys get than the other terms would give them."""
        # Attention by entry: of the head, by the other terms, and uniform.
        away = np.abs(self.offsets)
        got = self.on
        even = self.expected(others)
        uniform = self.rows.weighted(self.rows.counts, self.head)
        buckets = np.sign(self.offsets) * np.searchsorted(_REACHES, away)

        def times(some: Flags) -> float:
            return float(_lift(got[some].sum(), even[some].sum(), LEAST_SHARE / 4))

        def shares(some: Flags) -> str:
            return f"({100 * got[some].sum():.0f}%; uniform {100 * uniform[some].sum():.0f}%)"

        # How far it reaches on either side, while each distance gets more than the terms give it.
        lifts = {int(bucket): times(buckets == bucket) for bucket in np.unique(buckets)}
        itself = lifts.pop(0, 0.0)
        reach = {-1: 0, 1: 0}
        for side in reach:
            while lifts.get(side * (reach[side] + 1), 0.0) >= NEAR:
                reach[side] += 1
        chosen = (buckets != 0) & (buckets >= -reach[-1]) & (buckets <= reach[1])
        # Name the reach; without one, the single distance that gets most.
        if reach[-1] and reach[-1] == reach[1]:
            phrase = _span(1, reach[1], "away")
        elif chosen.any():
            spans = [_span(1, reach[side], word) for side, word in _SIDES.items() if reach[side]]
            phrase = " and ".join(spans)
        else:
            best = max(lifts, key=lifts.__getitem__)
            if lifts[best] < NEAR:
                return f"the token itself {shares(buckets == 0)}" if itself >= MOSTLY else ""
            chosen = buckets == best
            phrase = _bucket(best)
        parts = [f"{phrase} {shares(chosen)}"]

        # Where most of it is.
        best, *less = sorted(set(buckets[chosen].tolist()), key=lambda bucket: -lifts[bucket])
        first, last = away[chosen].min(), away[chosen].max()
        if less and lifts[best] >= MOSTLY * lifts[less[0]]:
            parts.append(f"most {_bucket(best)} ({100 * got[buckets == best].sum():.0f}%)")
        elif first < last:
            is_nearer = away <= (first + last) / 2
            more = times(chosen & is_nearer) / times(chosen & ~is_nearer)
            order = "nearest first" if more >= NEAR else "evenly"
            parts.append("farthest first" if more <= 1 / NEAR else order)
        if itself >= MOSTLY:
            parts.append(f"itself ({100 * got[buckets == 0].sum():.0f}%)")
        if got[chosen].sum() < CLEAR:
            parts += [
                f"little {word} it" for side, word in _SIDES.items() if times(buckets * side > 0) <= LESS
            ]
        return ", ".join(parts)


def _values_of_rows(rows: Rows, column: Column) -> Floats:
    """Return the value of each row's query in the column of a pair, (row,), 0 to 1."""
    assert column.queries is not None
    return column.query_values[column.queries][rows.query_types]


def _lift(share: Floats, expected: Floats, added: float = LEAST_SHARE / 2) -> Floats:
    return (share + added) / (expected + added)


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
