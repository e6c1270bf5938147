"""Put the terms of a description into words: kinds of keys, distances, relations and pairs of tokens.

A summary has a phrase for each of the strongest groups of terms. It compares the attention that a kind of key or a
distance gets with what the terms of all other groups would give it; the ratio is the *lift*. Terms that were fitted to
one head alone are named by their tokens. `core.descriptions` fits the terms, and `study` writes the whole line.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnscope.core.descriptions import Description
from attnscope.core.sampled_rows import FittedFeature, Floats, RowSample
from attnscope.studies.describe.english import CLOSED_CLASSES, OPEN_CLASSES
from attnscope.studies.describe.features import Flags
from attnscope.studies.describe.rows import HeadGroup

TOKENS = 6
"""How many tokens name a term, at most."""

HIGH_VALUE = 0.5
"""A term that is a column names the tokens with at least this value in it; values are 0 to 1."""

MAX_NAMED = 0.35
"""The largest share of all keys, or of all queries, that a column names: beyond it, the value must be higher."""

MIN_COVERED = 0.6
"""Queries are named by kinds of tokens if these kinds cover at least this share of them, else by tokens."""

MAX_PAIRS = 2
"""How many strong pairs of tokens a line names, at most."""

MIN_TEXTS = 2
"""In how many texts a strong pair must occur."""

MIN_EXCESS = 0.03
"""The attention of a row that a strong pair must get beyond what the terms give it, as a mean that is shrunk to 0."""

_ADDED_OCCURRENCES = 2
"""The mean is shrunk by this many further occurrences of the pair, without any excess."""

_STRONG_ENTRIES = 2**13
"""Strong pairs are sought among this many entries, those with the largest excess."""

MIN_ENGLISH = 0.25
"""Texts are English if at least this share of their words is in closed English classes."""

MIN_LIFT = 1.3
"""A kind of key is named if its lift is at least this."""

MIN_FIRST_LIFT = 1.15
"""In the first phrase of a line, this lift is enough for the kind with the largest one."""

MAX_AVOIDED_LIFT = 0.5
"""A kind of key is named as avoided if its lift is at most this."""

MAX_GROUPS = 3
"""How many groups of terms have a phrase in a line, at most."""

MAX_PHRASES = 2
"""How many kinds of keys, avoided kinds, or relations a phrase names, at most."""

MIN_SHARE = 0.02
"""A kind is named if it gets at least this share of attention, or would get it by the other terms."""

MIN_DISTANCE_LIFT = 1.2
"""Distances are named outwards from the query while their lift is at least this; else the one with the largest lift. Of
their two halves, the one whose lift is this many times the other's is said to come first."""

MIN_PEAK_LIFT = 1.5
"""One of the named distances is named as the peak if its lift is this many times the next one's. The query itself is
named if its lift is at least this."""

EQUAL_FACTOR = 1.4
"""Groups of terms whose nats differ by less than this factor are said to count equally."""

MIN_NATS = {"kind": 0.04, "distance": 0.1, "relation": 0.05, "pair": 0.2}
"""A group of terms has no phrase if its nats are less than this share of those of the strongest group."""

MAX_ATTENTION = 0.7
"""If the distances that are named get this share of attention, no side of the query is said to be avoided."""

_SIGNS = ("sentence_end", "comma", "quote", "bracket", "punctuation")
_SHORT = {"name": "names", "punctuation": "other punctuation"}

_REACHES = (0, 1, 2, 4, 8)
"""The largest distance of each bucket of distances, in tokens. Buckets before the query have negative numbers."""

_LAST = len(_REACHES)
"""The number of the last bucket, which holds all larger distances."""

_SIDES = {-1: "before", 1: "after"}
_BESIDE = {"before": "the previous token", "after": "the next token", "away": "the tokens beside it"}
_BEYOND = {"before": "tokens before it", "after": "tokens after it", "away": "other tokens"}


def named_threshold(values: Floats) -> float:
    """Return the least value of a column, (entry,) or (row,), for which a token is named; the largest always is."""
    # The share of tokens with at least each level, and the levels that few enough have.
    levels, counts = np.unique(values, return_counts=True)
    shares = counts[::-1].cumsum()[::-1] / max(1, len(values))
    largest = float(values.max(initial=0.0))
    rare_levels = np.append(levels[shares <= MAX_NAMED], largest)
    return max(min(HIGH_VALUE, largest), float(rare_levels[0]))


class KeyKinds:
    """Assign each key one kind, such as commas or verbs.

    Words have English classes as kinds if the texts are English; otherwise they are frequent or infrequent.

    Attributes:
        words: The name of each kind.
        of_entry: The number of each key's kind, (entry,).
        wholes: The name of several kinds together -> their numbers.
        signs: The names of kinds that need no examples.
    """

    def __init__(self, group: HeadGroup, rows: RowSample) -> None:
        numbers = {feature.name: number for number, feature in enumerate(group.features)}

        def flags(names: Sequence[str]) -> Flags:
            """Return whether keys have some features, (feature, entry)."""
            return rows.features[[numbers[name] for name in names]] > 0

        order = [*_SIGNS, "digit", "piece"]
        is_closed = flags(tuple(CLOSED_CLASSES)).any(0)
        if is_closed.sum() >= MIN_ENGLISH * flags(["word"]).sum():
            # Negations come first: they are in other closed classes too.
            order += sorted(CLOSED_CLASSES, key=lambda name: name != "negations")
            order += ["name", *OPEN_CLASSES]
        else:
            order += ["name", "frequent", "infrequent"]
        # A key is of the first kind in this order that it has. The last row, all true, is that of all other tokens.
        self.of_entry = np.pad(flags(order), ((0, 1), (0, 0)), constant_values=True).argmax(0)
        # Name the kinds, and wholes such as function words.
        words = []
        for name in order:
            words.append(_SHORT.get(name, group.features[numbers[name]].words.removeprefix("English ")))
        self.words = (*words, "other tokens")
        self.signs = {*words[: len(_SIGNS) - 1], "punctuation"}
        function_words = {order.index(name) for name in CLOSED_CLASSES if name in order}
        self.wholes = {"punctuation": {*range(len(_SIGNS))}, "function words": function_words}

    def merge(self, chosen: Sequence[int], is_common: Flags) -> list[tuple[str, list[int]]]:
        """Return the names of the first MAX_PHRASES chosen kinds, each with the numbers of the kinds in it.

        A whole such as "punctuation" replaces its kinds if all common ones among these are chosen.

        Args:
            chosen: The numbers of the kinds, in the order of the names.
            is_common: Which kinds are common, (kind,).
        """
        by_words: dict[str, list[int]] = {}
        common = {*np.flatnonzero(is_common).tolist()}
        for number in chosen:
            words = self.words[number]
            for whole, members in self.wholes.items():
                needed = members & common
                if number in members and len(needed) > 1 and needed <= {*chosen}:
                    words = whole
            by_words.setdefault(words, []).append(number)
        return list(by_words.items())[:MAX_PHRASES]

    def totals(self, values: Floats) -> Floats:
        """Sum values of entries, (entry,), over those of each kind, (kind,)."""
        return np.bincount(self.of_entry, values, len(self.words)).astype(np.float64)


class HeadWords:
    """Name the terms of a head, and write its line, from the fitted rows of its group.

    Attributes:
        rows: The fitted rows. An entry is a key of one of them.
        head: The number of the head in these rows.
        kinds: The kinds of keys.
        offsets: The position of each key less that of its query, in tokens, (entry,).
        attention: The head's attention, each row scaled to its weight, (entry,); all entries sum to 1.
    """

    def __init__(self, group: HeadGroup, rows: RowSample, kinds: KeyKinds, head: int) -> None:
        self.rows = rows
        self.head = head
        self.kinds = kinds
        self.offsets = group.offsets[rows.entries]
        self.attention = rows.weight_rows(rows.normalise_rows(head), head)
        self._features = group.features
        self._labels = group.types.labels

    # Attention that terms give

    def expected(self, scores: Floats) -> Floats:
        """Return the attention p ∝ exp(score), (entry,), in the units of `attention`."""
        return self.rows.weight_rows(np.exp(scores - scores.max(initial=0.0)), self.head)

    def nats(self, scores: Floats) -> float:
        """Return KL(p ‖ uniform) of the attention p ∝ exp(score), (entry,), as a mean over rows, in nats."""
        # ln p = score - ln Z, and ln uniform = -ln n. The largest score is subtracted so that exp does not overflow.
        scores = scores - scores.max(initial=0.0)
        log_ratio = np.log(self.rows.lengths / self.rows.sums(np.exp(scores)))
        return float(self.rows.weights[self.head] @ log_ratio + self.expected(scores) @ scores)

    # Terms

    def column(self, term: int) -> FittedFeature | None:
        """Return the column of a term that was fitted to this head alone; None = all heads share its feature."""
        return self.rows.column_of(term, self.head)

    def name(self, term: int) -> str:
        """Return the name of a term in files: that of its feature; of columns "keys", "pair1+", "pair1-" and so on."""
        if self.column(term) is None:
            return self._features[term].name
        pair, is_lower = divmod(term - len(self._features) + 1, 2)
        return f"pair{pair}{'-' if is_lower else '+'}" if pair else "keys"

    def describe_term(self, term: int) -> str:
        """Return the words of a term, such as "tokens like alice, dinah, abbas"."""
        column = self.column(term)
        if column is None:
            return self._features[term].words
        # Keys that the column names are the examples, by their attention times their value.
        key_values = column.key_values[column.key_levels][self.rows.key_types]
        weights = self.attention * key_values * (key_values >= named_threshold(key_values))
        words = "tokens like"
        if column.query_levels is not None:
            weights = weights * self.rows.repeat_rows(_query_values(self.rows, column))
            words = f"from {self.name_queries(column)[0]} to"
        labels = self.top_labels(self.rows.key_types, weights, TOKENS)
        # A bare comma cannot be read in a list that commas separate.
        quoted = [label if _is_word(label) else f"“{label}”" for label in labels]
        return f"{words} {', '.join(quoted)}"

    def name_queries(self, column: FittedFeature) -> tuple[str, Floats]:
        """Name the queries of a column about pairs, and return how much each row counts among them, (row,), 0 to 1."""
        # The value of each row's query; 0 if the column does not name it.
        values = _query_values(self.rows, column)
        values = np.where(values >= named_threshold(values), values, 0.0)
        weights = self.rows.weights[self.head] * values
        labels = self.top_labels(self.rows.query_types, weights, TOKENS)
        # The share of each kind of query, (kind,). Kinds are known of keys: take the entry of the query itself.
        itself = self.offsets == 0
        shares = self.kinds.totals(self.rows.repeat_rows(weights) * itself) / max(weights.sum(), 1e-30)
        # Name the queries by the two largest kinds if these cover most of them, else by tokens.
        order = np.argsort(-shares)
        large = order[shares[order] >= 0.1].tolist()
        kinds = self.kinds.merge(large, shares >= 0.05)
        covered = sum(shares[members].sum() for _, members in kinds)
        if covered < MIN_COVERED:
            tokens = [label if _is_word(label) else "punctuation" for label in labels]
            return ", ".join([*dict.fromkeys(tokens)][:4]), values
        words = ", ".join(name for name, _ in kinds)
        examples = [label for label in labels if _is_word(label)][:2]
        if examples and words not in self.kinds.signs:
            words += f" ({', '.join(examples)})"
        return words, values

    def top_labels(self, types: NDArray[np.integer], weights: Floats, most: int) -> list[str]:
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
        """Say what a head attends to off the sinks, such as "nouns 1.6× (door, key), least punctuation".

        `terms` are the rows of the table `terms` that the description has.
        """
        if not terms:
            return ""
        # Scores of each term, (term, entry).
        by_term = np.stack([self.rows.by_entry(term, self.head) for term in description.terms])
        by_term *= description.weights[:, None]
        total = by_term.sum(0)
        # Group the terms by what they are about. Each group has scores, (entry,), and a strength: its nats alone.
        abouts = np.array([self._about(term) for term in description.terms])
        scores = {}
        strengths = {}
        for about in dict.fromkeys(abouts.tolist()):
            scores[about] = by_term[abouts == about].sum(0)
            strengths[about] = self.nats(scores[about])
        strongest = max(strengths.values())
        # Write a phrase for each group that is strong enough, the strongest first.
        text = ""
        said: list[str] = []
        for about in sorted(scores, key=lambda about: -strengths[about]):
            if len(said) == MAX_GROUPS or strengths[about] < MIN_NATS[about] * strongest:
                continue
            indices = np.flatnonzero(abouts == about).tolist()
            others = total - scores[about]
            if about == "kind":
                phrase = self.phrase_kinds(others, least=MIN_LIFT if said else MIN_FIRST_LIFT)
            elif about == "distance":
                phrase = self.phrase_distances(others)
            elif about == "pair":
                pairs = [self._phrase_pair(description.terms[i], total - by_term[i]) for i in indices]
                phrase = next(filter(None, pairs), "")
            else:
                relations = [_phrase_relation(terms[i]) for i in indices]
                phrase = ", ".join([*filter(None, relations)][:MAX_PHRASES])
            # Nothing stands out in this group.
            if not phrase:
                continue
            if said:
                is_equal = strengths[said[-1]] < EQUAL_FACTOR * strengths[about]
                text += "; equally " if is_equal else "; then "
            text += phrase
            said.append(about)
        # If no group has a phrase, name the first term.
        if not text:
            text = _phrase_relation(terms[0]) or str(terms[0]["words"])
        # Add strong pairs that terms without pairs do not explain.
        if "pair" not in said and len(said) < MAX_GROUPS:
            strong_pairs = self.find_pairs(by_term[abouts != "pair"].sum(0))
            if strong_pairs:
                text += f"; also {', '.join(strong_pairs)}"
        return text

    def _about(self, term: int) -> str:
        """Return the group of a term: "kind", "distance", "relation" or "pair"."""
        column = self.column(term)
        if column is None:
            return self._features[term].about
        return "kind" if column.query_levels is None else "pair"

    def _phrase_pair(self, term: int, others: Floats) -> str:
        """Name the queries of a term about pairs, and the kinds of keys that they attend to; "" = none stands out.

        `others` are the scores of all other terms, (entry,).
        """
        column = self.column(term)
        assert column is not None
        queries, row_factors = self.name_queries(column)
        keys = self.phrase_kinds(others, row_factors)
        return f"from {queries}: {keys}" if keys else ""

    def find_pairs(self, scores: Floats) -> list[str]:
        """Find the pairs of tokens that get much more attention than some scores, (entry,), give them."""
        # The excess of attention as a multiple of the mean row, and a code of the types of query and key, (entry,).
        rows = self.rows
        excess = (self.attention - self.expected(scores)) * len(rows.texts)
        codes = rows.repeat_rows(rows.query_types.astype(np.int64)) * len(self._labels) + rows.key_types
        # Take the entries with the largest excess, of equal ones the first; the partition spares sorting all of them.
        candidates = np.arange(len(excess))
        if len(excess) > _STRONG_ENTRIES:
            least = np.partition(excess, -_STRONG_ENTRIES)[-_STRONG_ENTRIES]
            candidates = np.flatnonzero(excess >= least)
        order = np.argsort(-excess[candidates], kind="stable")
        entries = candidates[order][:_STRONG_ENTRIES]
        pairs, pair_of_entry = np.unique(codes[entries], return_inverse=True)
        # Rank pairs by their shrunk mean over these entries: a sum would favour frequent tokens, a mean rare ones.
        counts = np.bincount(pair_of_entry) + _ADDED_OCCURRENCES
        means = np.bincount(pair_of_entry, excess[entries]) / counts
        names: list[str] = []
        for pair in np.argsort(-means, kind="stable")[:60]:
            texts = np.unique(rows.texts[rows.row_of_entry[entries[pair_of_entry == pair]]])
            query, key = divmod(int(pairs[pair]), len(self._labels))
            if len(texts) >= MIN_TEXTS and means[pair] >= MIN_EXCESS:
                names.append(f"{self._labels[query]} → {self._labels[key]}")
        return names[:MAX_PAIRS]

    def phrase_kinds(
        self, others: Floats, row_factors: Floats | None = None, least: float = MIN_LIFT
    ) -> str:
        """Name the kinds of keys with a large lift, with their lifts and examples, and the kinds that are avoided.

        Args:
            others: The scores of the terms of other groups, (entry,).
            row_factors: How much each row counts beside its weight, (row,); None = all alike.
            least: The lift that is enough for the kind with the largest one; the others need `MIN_LIFT`.
        """
        # The head's attention, and what the other terms would give, by entry and by kind.
        kinds = self.kinds
        attention = self.attention
        expected = self.expected(others)
        if row_factors is not None:
            mean_factor = max(self.rows.weights[self.head] @ row_factors, 1e-30)
            factors = self.rows.repeat_rows(row_factors / mean_factor)
            attention = attention * factors
            expected = expected * factors
        shares = kinds.totals(attention)
        expected_shares = kinds.totals(expected)
        lifts = _lift(shares, expected_shares)
        is_common = np.maximum(shares, expected_shares) >= MIN_SHARE
        largest = lifts[is_common].max(initial=0.0)
        is_named = is_common & (lifts >= np.clip(largest, least, MIN_LIFT))
        is_avoided = is_common & (lifts <= MAX_AVOIDED_LIFT)

        # Choose the kinds that add most to the KL from expected shares, and name those with the largest lifts first.
        order = np.argsort(-shares * np.log(lifts))
        named = kinds.merge(order[is_named[order]].tolist(), is_common)
        n_examples = 3 if len(named) == 1 else 2
        lift_of: dict[str, float] = {}
        for words, members in named:
            lift = float(_lift(shares[members].sum(), expected_shares[members].sum()))
            phrase = f"{words} {lift:.1f}×"
            if words not in kinds.signs:
                excess = (attention - expected) * np.isin(kinds.of_entry, members)
                phrase += f" ({', '.join(self.top_labels(self.rows.key_types, excess, n_examples))})"
            lift_of[phrase] = lift
        phrases = sorted(lift_of, key=lambda phrase: -lift_of[phrase])
        # Name the kinds that get least last.
        order = np.argsort(shares - expected_shares)
        avoided = kinds.merge(order[is_avoided[order]].tolist(), is_common)
        if avoided:
            phrases.append(f"least {', '.join(words for words, _ in avoided)}")
        return ", ".join(phrases)

    def phrase_distances(self, others: Floats) -> str:
        """Name the distances with a large lift over what some scores, (entry,), give, such as "up to 4 before (…)"."""
        # The bucket of each entry, and the numbers of all buckets: 0 is the query itself, negative ones are before it.
        distances = np.abs(self.offsets)
        entry_buckets = np.sign(self.offsets) * np.searchsorted(_REACHES, distances)
        buckets = np.arange(-_LAST, _LAST + 1)

        def by_bucket(values: Floats) -> Floats:
            return np.bincount(entry_buckets + _LAST, values, len(buckets)).astype(np.float64)

        # The head's attention, what the other terms would give, and uniform attention, (bucket,).
        expected = self.expected(others)
        shares = by_bucket(self.attention)
        expected_shares = by_bucket(expected)
        uniform_shares = by_bucket(self.rows.weight_rows(self.rows.counts, self.head))

        # Count the adjacent buckets of large lift on either side. The query itself has a phrase of its own.
        lifts = _distance_lift(shares, expected_shares)
        own_lift = lifts[_LAST]
        lifts[_LAST] = 0.0
        reach = {}
        for side in _SIDES:
            outwards = np.append(lifts[_LAST + side :: side], 0.0)
            reach[side] = int((outwards < MIN_DISTANCE_LIFT).argmax())
        chosen = (buckets != 0) & (buckets >= -reach[-1]) & (buckets <= reach[1])
        # Name these buckets; if there are none, the one with the largest lift.
        if reach[-1] and reach[-1] == reach[1]:
            phrase = _name_buckets(1, reach[1], "away")
        elif chosen.any():
            sides = [side for side in _SIDES if reach[side]]
            phrase = " and ".join(_name_buckets(1, reach[side], _SIDES[side]) for side in sides)
        elif lifts.max() >= MIN_DISTANCE_LIFT:
            best = int(buckets[lifts.argmax()])
            chosen = buckets == best
            phrase = _name_bucket(best)
        elif own_lift >= MIN_PEAK_LIFT:
            return f"the token itself {_percents(shares[_LAST], uniform_shares[_LAST])}"
        else:
            return ""
        phrases = [f"{phrase} {_percents(shares[chosen].sum(), uniform_shares[chosen].sum())}"]

        # Say where the lift is largest: in one bucket, or in the nearer or the farther half of the distances.
        best, *next_best = sorted(buckets[chosen].tolist(), key=lambda bucket: -lifts[bucket + _LAST])
        is_chosen = chosen[entry_buckets + _LAST]
        nearest = distances[is_chosen].min()
        farthest = distances[is_chosen].max()
        if next_best and lifts[best + _LAST] >= MIN_PEAK_LIFT * lifts[next_best[0] + _LAST]:
            phrases.append(f"most {_name_bucket(best)} ({100 * shares[best + _LAST]:.0f}%)")
        elif nearest < farthest:
            is_near = distances <= (nearest + farthest) / 2
            phrases.append(self._compare_halves(expected, is_chosen & is_near, is_chosen & ~is_near))
        if own_lift >= MIN_PEAK_LIFT:
            phrases.append(f"itself ({100 * shares[_LAST]:.0f}%)")
        # Name a side that is avoided.
        if shares[chosen].sum() < MAX_ATTENTION:
            for side, word in _SIDES.items():
                is_on_side = buckets * side > 0
                side_lift = _distance_lift(shares[is_on_side].sum(), expected_shares[is_on_side].sum())
                if side_lift <= MAX_AVOIDED_LIFT:
                    phrases.append(f"little {word} it")
        return ", ".join(phrases)

    def _compare_halves(self, expected: Floats, nearer: Flags, farther: Flags) -> str:
        """Say which of two halves of the entries, (entry,) each, has the larger lift over expected attention."""
        near = _distance_lift(self.attention[nearer].sum(), expected[nearer].sum())
        far = _distance_lift(self.attention[farther].sum(), expected[farther].sum())
        if far >= MIN_DISTANCE_LIFT * near:
            return "farthest first"
        return "nearest first" if near >= MIN_DISTANCE_LIFT * far else "evenly"


def _is_word(label: str) -> bool:
    """Return whether a label has a letter or a digit."""
    return any(map(str.isalnum, label))


def _query_values(rows: RowSample, column: FittedFeature) -> Floats:
    """Return the value of each row's query in a column about pairs, (row,), 0 to 1."""
    assert column.query_levels is not None
    return column.query_values[column.query_levels][rows.query_types]


def _lift(share: Floats, expected: Floats, added: float = MIN_SHARE / 2) -> Floats:
    """Return share / expected share. A little is added to both, so that the lift of small shares is near 1."""
    return (share + added) / (expected + added)


def _distance_lift(share: Floats, expected: Floats) -> Floats:
    """Return the lift of a bucket of distances; buckets have smaller shares than kinds."""
    return _lift(share, expected, MIN_SHARE / 4)


def _percents(share: float, uniform: float) -> str:
    return f"({100 * share:.0f}%; uniform {100 * uniform:.0f}%)"


def _phrase_relation(term: Mapping[str, Any]) -> str:
    """Name a relation with its share; "" if the share is as under uniform attention, or contradicts the weight."""
    words = f"avoids {term['words']}" if term["weight"] < 0 else str(term["words"])
    share = term["share"].value
    uniform = term["share"].baseline
    if not np.isfinite(share):
        return words
    if term["weight"] * (share - uniform) <= 0 or round(100 * share) == round(100 * uniform):
        return ""
    return f"{words} {_percents(share, uniform)}"


def _name_bucket(bucket: int) -> str:
    """Name the keys of a bucket, such as "2 before"."""
    return _name_buckets(abs(bucket), abs(bucket), _SIDES[1 if bucket > 0 else -1])


def _name_buckets(first: int, last: int, side: str) -> str:
    """Name the keys of consecutive buckets on a side, such as "5 to 8 before"."""
    low = _REACHES[first - 1] + 1
    if last >= len(_REACHES):
        return f"{low} or more {side}" if first > 1 else _BEYOND[side]
    high = _REACHES[last]
    if high == 1:
        return _BESIDE[side]
    if first == 1:
        return f"up to {high} {side}"
    return f"{low} {side}" if low == high else f"{low} to {high} {side}"
