"""Put a description into words that a reader takes in at once: kinds of keys, distances, relations and pairs.

Terms overlap, and each holds beside the others. A summary says how much more attention each kind of key gets, and each
distance, than all the other terms would give it. Terms that were fitted to one head are named by tokens, by a known
class, and by strong pairs. `core.descriptions` fits the terms, and `studies.describe.study` writes the whole line.
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
"""How many tokens name a term, at most."""

HIGH = 0.5
MOST_NAMED = 0.35
"""The tokens that a term names have at least the value HIGH of its column, which goes from 0 to 1; and they are at most
the share MOST_NAMED of all keys, or of all queries."""

COVERED = 0.6
"""Queries are named by kinds of tokens if these kinds cover at least this share of them."""

PAIRS = 2
FEWEST_TEXTS = 2
"""How many strong pairs of tokens a line names, at most; and in how many texts such a pair must occur, at least."""

LEAST_PAIR = 0.03
"""The least attention of a row, beyond what terms give a pair, for which the pair is named: its mean, shrunk."""

_SHRUNK_BY = 2
_STRONG = 2**13
"""How many occurrences without attention are added to those of a pair; and in how many of the strongest entries pairs
are sought."""

ENGLISH = 0.25
"""The share of words in closed English classes from which on the texts are English."""

# Thresholds of a line

MORE = 1.3
LEAST_MORE = 1.15
"""A kind of key is named if it gets at least MORE times what the other terms would give it; for the strongest kind of
the group that a line begins with, LEAST_MORE times are enough."""

LESS = 0.5
"""A kind of key is avoided if it gets at most this many times what the other terms would give it."""

MOST_GROUPS = 3
MOST_PHRASES = 2
"""How many groups of terms a line names, at most; and how many kinds of keys, or relations, of a group."""

LEAST_SHARE = 0.02
"""A kind or a distance is named if it gets at least this share of attention, or would get it by the other terms."""

NEAR = 1.2
"""Distances are named that get this many times what the other terms would give them; the nearer half of a window is
said to come first if it gets this many times what the other half does."""

MOSTLY = 1.5
"""One distance of several is named if it gets this many times what the next one gets; so is the query itself, if it
gets this many times what the other terms would give it."""

AS_MUCH = 1.4
"""Groups of terms whose nats differ by less than this factor are said to count equally."""

WEAK = {"kind": 0.04, "distance": 0.1, "relation": 0.05, "pair": 0.2}
"""Groups that have less than this share of the nats of the strongest group are left out."""

CLEAR = 0.7
"""If the distances that are named get this share of attention, nothing is said of the other distances."""

_SIGNS = ("sentence_end", "comma", "quote", "bracket", "punctuation")
_SHORT = {"name": "names", "punctuation": "other punctuation"}

_REACHES = (0, 1, 2, 4, 8)
_LAST = len(_REACHES)
"""How far away, in tokens, the keys of each bucket of distances are at most; and the number of the bucket beyond, which
has no end. Buckets before the query have negative numbers."""

_SIDES = {-1: "before", 1: "after"}
_BESIDE = {"before": "the previous token", "after": "the next token", "away": "the tokens beside it"}
_BEYOND = {"before": "tokens before it", "after": "tokens after it", "away": "other tokens"}


def least_named(values: Floats) -> float:
    """Return the least value of a column for which a token belongs to its term; the highest value always does."""
    levels, counts = np.unique(values, return_counts=True)
    shares = counts[::-1].cumsum()[::-1] / max(1, len(values))
    highest = float(values.max(initial=0.0))
    narrow = np.append(levels[shares <= MOST_NAMED], highest)
    return max(min(HIGH, highest), float(narrow[0]))


class Kinds:
    """Hold kinds of keys, of which each key has one.

    Words are told apart by English classes where a quarter of them belong to a closed class, else by frequency.

    Attributes:
        words: The name of each kind.
        of_entry: The number of each key's kind, (entry,).
        wholes: The name of several kinds together -> their numbers.
        signs: The names of kinds that need no examples.
    """

    def __init__(self, group: Group, rows: Rows) -> None:
        numbers = {feature.name: number for number, feature in enumerate(group.features)}

        def flags(names: Sequence[str]) -> Flags:
            """Return whether keys are of some kinds, (kind, entry)."""
            return rows.features[[numbers[name] for name in names]] > 0

        order = [*_SIGNS, "digit", "piece", "name", "frequent", "infrequent"]
        is_closed = flags(tuple(CLOSED_CLASSES)).any(0)
        if is_closed.sum() >= ENGLISH * flags(["word"]).sum():
            # Negations are in other closed classes too, and come first.
            closed = sorted(CLOSED_CLASSES, key=lambda name: name != "negations")
            order[-3:] = [*closed, "name", *OPEN_CLASSES]
        # A key is of the first kind in this order that it has; a last row stands for those of none.
        self.of_entry = np.pad(flags(order), ((0, 1), (0, 0)), constant_values=True).argmax(0)
        # Names of kinds, and of wholes such as function words.
        words = []
        for name in order:
            words.append(_SHORT.get(name, group.features[numbers[name]].words.removeprefix("English ")))
        self.words = (*words, "other tokens")
        self.signs = {*words[: len(_SIGNS) - 1], "punctuation"}
        function_words = {order.index(name) for name in CLOSED_CLASSES if name in order}
        self.wholes = {"punctuation": {*range(len(_SIGNS))}, "function words": function_words}

    def merge(self, chosen: Sequence[int], matter: Flags) -> list[tuple[str, list[int]]]:
        """Return the names of chosen kinds, each with the numbers of the kinds that it stands for.

        If all kinds of a whole that matter are chosen, they have the name of the whole.

        Args:
            chosen: The numbers of the kinds, in the order of the names.
            matter: Which kinds matter, (kind,).
        """
        by_words: dict[str, list[int]] = {}
        mattering = {*np.flatnonzero(matter).tolist()}
        for number in chosen:
            words = self.words[number]
            for whole, members in self.wholes.items():
                needed = members & mattering
                if number in members and len(needed) > 1 and needed <= {*chosen}:
                    words = whole
            by_words.setdefault(words, []).append(number)
        return list(by_words.items())

    def totals(self, of_entries: Floats) -> Floats:
        """Return the sum of numbers of entries, (entry,), for each kind, (kind,)."""
        return np.bincount(self.of_entry, of_entries, len(self.words)).astype(np.float64)


class HeadWords:
    """Name the terms of a head, and write its line, from the fitted rows of its group.

    Attributes:
        rows: The fitted rows, whose queries are ordinary.
        head: The number of the head in them.
        kinds: The kinds of keys.
        offsets: The place of each key less that of its query, in tokens, (entry,).
        on: The head's attention, each row scaled to its weight, (entry,); all entries sum to 1.
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
        """Return KL(p ‖ uniform) of the attention p that some scores, (entry,), alone give, mean over rows, in nats."""
        # ln p = score - ln Z, and ln u = -ln n.
        below_top = scores - scores.max(initial=0.0)
        log_ratio = np.log(self.rows.lengths / self.rows.sums(np.exp(below_top)))
        return float(self.rows.weights[self.head] @ log_ratio + self.expected(scores) @ below_top)

    # Terms

    def column(self, term: int) -> Column | None:
        """Return the column of a term that is the head's own; None = all heads share it."""
        return self.rows.column_of(term, self.head)

    def name(self, term: int) -> str:
        """Return the name of a term in files: its feature's, or of a column of the head's own "keys", "pair1+" …."""
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
        of_keys = column.key_values[column.key_levels][self.rows.key_types]
        weights = self.on * of_keys * (of_keys >= least_named(of_keys))
        words = "tokens like"
        if column.query_levels is not None:
            weights = weights * self.rows.spread(_values_of_rows(self.rows, column))
            words = f"from {self.of_queries(column)[0]} to"
        labels = self.labels(self.rows.key_types, weights, TOKENS)
        # A bare comma in a list separated by commas cannot be read.
        quoted = [label if _is_written(label) else f"“{label}”" for label in labels]
        return f"{words} {', '.join(quoted)}"

    def of_queries(self, column: Column) -> tuple[str, Floats]:
        """Return the name of the queries of high value in a column, and their values, (row,), 0 to 1."""
        # Rows of the queries that the column names, and their labels by weight.
        of_rows = _values_of_rows(self.rows, column)
        of_rows = np.where(of_rows >= least_named(of_rows), of_rows, 0.0)
        weights = self.rows.weights[self.head] * of_rows
        labels = self.labels(self.rows.query_types, weights, TOKENS)
        # Name them by kinds, if two kinds are most of them. The entry of a query itself tells its kind.
        itself = self.offsets == 0
        shares = self.kinds.totals(self.rows.spread(weights) * itself) / max(weights.sum(), 1e-30)
        order = np.argsort(-shares)
        common = order[shares[order] >= 0.1].tolist()
        kinds = self.kinds.merge(common, shares >= 0.05)[:2]
        words = ", ".join(name for name, _ in kinds)
        covered = sum(shares[members].sum() for _, members in kinds)
        # Else by tokens.
        written = [*filter(_is_written, labels)]
        if covered < COVERED:
            named = [label if label in written else "punctuation" for label in labels]
            return ", ".join([*dict.fromkeys(named)][:4]), of_rows
        if written and words not in self.kinds.signs:
            words += f" ({', '.join(written[:2])})"
        return words, of_rows

    def labels(self, types: NDArray[np.integer], weights: Floats, most: int) -> list[str]:
        """Return labels of types of token, those with the largest sums of weights first, none of them twice.

        Args:
            types: The type of each key or query.
            weights: The weight of each, at least 0; types whose weights sum to 0 are left out.
            most: How many labels are returned, at most.
        """
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
        # Scores of each term, (term, entry).
        by_term = np.stack([self.rows.by_entry(term, self.head) for term in description.terms])
        by_term *= description.weights[:, None]
        total = by_term.sum(0)
        # Terms about one thing are a group: its scores, (entry,), and how much it says alone, in nats.
        abouts = np.array([*map(self._about, description.terms)])
        scores = {}
        strengths = {}
        for about in dict.fromkeys(abouts.tolist()):
            scores[about] = by_term[abouts == about].sum(0)
            strengths[about] = self.nats(scores[about])
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
                pairs = [self._pair(description.terms[i], total - by_term[i]) for i in places]
                phrase = next(filter(None, pairs), "")
            else:
                relations = [_relation(terms[i]) for i in places]
                phrase = ", ".join([*filter(None, relations)][:MOST_PHRASES])
            if not phrase:
                continue
            if said:
                is_equal = strengths[said[-1]] < AS_MUCH * strengths[about]
                text += "; equally " if is_equal else "; then "
            text += phrase
            said.append(about)
        # No kind and no distance stands out.
        if not text:
            text = _relation(terms[0]) or str(terms[0]["words"])
        # Pairs go beyond the terms that hold for all queries alike.
        if "pair" not in said and len(said) < MOST_GROUPS:
            pairs_beside = self.pairs(by_term[abouts != "pair"].sum(0))
            if pairs_beside:
                text += f"; also {', '.join(pairs_beside)}"
        return text

    def _about(self, term: int) -> str:
        """Return the group of a term: "kind", "distance", "relation" or "pair"."""
        column = self.column(term)
        if column is None:
            return self._features[term].about
        return "kind" if column.query_levels is None else "pair"

    def _pair(self, term: int, others: Floats) -> str:
        """Say what the queries of a term about pairs attend to more than the scores of the others, (entry,), say."""
        column = self.column(term)
        assert column is not None
        queries, of_rows = self.of_queries(column)
        keys = self.by_kind(others, of_rows)
        return f"from {queries}: {keys}" if keys else ""

    def pairs(self, others: Floats) -> list[str]:
        """Return the pairs of tokens that get the most attention beyond what the scores of terms, (entry,), give."""
        # Attention beyond the terms, as a multiple of the mean row, and the code of the pair of types, (entry,).
        rows = self.rows
        more = (self.on - self.expected(others)) * len(rows.texts)
        codes = rows.spread(rows.query_types.astype(np.int64)) * len(self._labels) + rows.key_types
        # A strong pair has strong entries.
        strong = np.arange(len(more))
        if len(more) > _STRONG:
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
        """Name kinds of keys by how much more attention they get than other terms would give them.

        Args:
            others: The scores of the other terms, (entry,).
            of_rows: How much each row counts beside its weight, (row,); None = all alike.
            least: The strongest kind must get this many times what the other terms would give it.
        """
        # Attention, and what the other terms would give, by entry and by kind.
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

        # Choose the kinds that tell most, and of these name the largest lifts first.
        order = np.argsort(-shares * np.log(lifts))
        named = kinds.merge(order[is_more[order]].tolist(), matter)[:MOST_PHRASES]
        n_examples = 3 if len(named) == 1 else 2
        phrases: dict[str, float] = {}
        for words, members in named:
            times = float(_lift(shares[members].sum(), expected[members].sum()))
            phrase = f"{words} {times:.1f}×"
            if words not in kinds.signs:
                more = (got - even) * np.isin(kinds.of_entry, members)
                phrase += f" ({', '.join(self.labels(self.rows.key_types, more, n_examples))})"
            phrases[phrase] = times
        parts = sorted(phrases, key=phrases.__getitem__, reverse=True)
        # The kinds that get least come last.
        order = np.argsort(shares - expected)
        avoided = kinds.merge(order[is_less[order]].tolist(), matter)[:MOST_PHRASES]
        if avoided:
            parts.append(f"least {', '.join(words for words, _ in avoided)}")
        return ", ".join(parts)

    def by_distance(self, others: Floats) -> str:
        """Say how far away the keys are that get more attention than the scores of other terms, (entry,), give them."""
        # Attention by bucket, (bucket,): of the head, by the other terms, and uniform.
        away = np.abs(self.offsets)
        buckets = np.sign(self.offsets) * np.searchsorted(_REACHES, away)
        numbers = np.arange(-_LAST, _LAST + 1)

        def by_bucket(of_entries: Floats) -> Floats:
            return np.bincount(buckets + _LAST, of_entries, len(numbers)).astype(np.float64)

        even = self.expected(others)
        got_in = by_bucket(self.on)
        even_in = by_bucket(even)
        uniform_in = by_bucket(self.rows.weighted(self.rows.counts, self.head))

        def percents(some: Flags) -> str:
            return f"({100 * got_in[some].sum():.0f}%; uniform {100 * uniform_in[some].sum():.0f}%)"

        # How far it reaches on either side, while each distance gets more than the terms give it.
        lifts = _lift(got_in, even_in, LEAST_SHARE / 4)
        itself = lifts[_LAST]
        lifts[_LAST] = 0.0
        reach = {}
        for side in _SIDES:
            outwards = np.append(lifts[_LAST + side :: side], 0.0)
            reach[side] = int((outwards < NEAR).argmax())
        chosen = (numbers != 0) & (numbers >= -reach[-1]) & (numbers <= reach[1])
        # Name the reach; without one, the single distance that gets most.
        if reach[-1] and reach[-1] == reach[1]:
            phrase = _span(1, reach[1], "away")
        elif chosen.any():
            phrase = " and ".join(_span(1, reach[side], _SIDES[side]) for side in reach if reach[side])
        elif lifts.max() >= NEAR:
            chosen = numbers == numbers[lifts.argmax()]
            phrase = _bucket(int(numbers[lifts.argmax()]))
        else:
            return f"the token itself {percents(numbers == 0)}" if itself >= MOSTLY else ""
        parts = [f"{phrase} {percents(chosen)}"]

        # Where most of it is: in one bucket, or in the nearer or the farther half of the distances.
        best, *less = sorted(np.flatnonzero(chosen).tolist(), key=lambda place: -lifts[place])
        is_chosen = chosen[buckets + _LAST]
        first = away[is_chosen].min()
        last = away[is_chosen].max()
        if less and lifts[best] >= MOSTLY * lifts[less[0]]:
            parts.append(f"most {_bucket(int(numbers[best]))} ({100 * got_in[best]:.0f}%)")
        elif first < last:
            is_near = away <= (first + last) / 2
            parts.append(self._order(even, is_chosen & is_near, is_chosen & ~is_near))
        if itself >= MOSTLY:
            parts.append(f"itself ({100 * got_in[_LAST]:.0f}%)")
        if got_in[chosen].sum() < CLEAR:
            for side, word in _SIDES.items():
                some = numbers * side > 0
                if _lift(got_in[some].sum(), even_in[some].sum(), LEAST_SHARE / 4) <= LESS:
                    parts.append(f"little {word} it")
        return ", ".join(parts)

    def _order(self, even: Floats, nearer: Flags, farther: Flags) -> str:
        """Say which of two halves of the entries, (entry,) each, gets more than the attention `even` gives it."""
        near, far = (
            _lift(self.on[half].sum(), even[half].sum(), LEAST_SHARE / 4) for half in (nearer, farther)
        )
        if far >= NEAR * near:
            return "farthest first"
        return "nearest first" if near >= NEAR * far else "evenly"


def _is_written(label: str) -> bool:
    """Return whether a label has a letter or a digit."""
    return any(map(str.isalnum, label))


def _values_of_rows(rows: Rows, column: Column) -> Floats:
    """Return the value of each row's query in the column of a pair, (row,), 0 to 1."""
    assert column.query_levels is not None
    return column.query_values[column.query_levels][rows.query_types]


def _lift(share: Floats, expected: Floats, added: float = LEAST_SHARE / 2) -> Floats:
    """Return a share as a multiple of the expected one; a little is added to both, so that small ones say nothing."""
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
    """Return the name of the keys of a bucket, such as "2 before"."""
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
