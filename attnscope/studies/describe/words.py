"""Put the terms of a description into words: kinds of keys, distances, relations and pairs of tokens.

A description is a distribution p ∝ exp(sum of weighted features) over the keys of a query, and its features are its
*terms*. Terms have four categories: kinds of keys, distances, other relations of query and key, and pairs of tokens. A
summary has a phrase for each of the strongest categories. It compares the share of attention that a kind of key gets
with the share that the terms of all other categories would give it; the ratio is the *lift*.

Most features are shared by all heads. A head's *own features* are fitted to this head alone, and are named by tokens.
An *entry* is a key of a sampled row; a row is the attention of one query. `core.descriptions` fits the terms,
`distance_words` names distances, and `study` writes the whole line.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnscope.arrays import Flags, Floats, Integers
from attnscope.core.descriptions import Description
from attnscope.core.sampled_rows import FittedFeature, RowSample
from attnscope.studies.describe.distance_words import (
    MAX_AVOIDED_LIFT,
    MIN_SHARE,
    compute_lift,
    format_shares,
    phrase_distances,
)
from attnscope.studies.describe.english import CLOSED_CLASSES, OPEN_CLASSES
from attnscope.studies.describe.rows import HeadGroup

MAX_TOKENS = 6
"""The largest number of tokens that name a term."""

HIGH_VALUE = 0.5
"""A term that is an own feature names the tokens for which the feature is at least this; its values are 0 to 1."""

MAX_NAMED = 0.35
"""An own feature names at most this share of all keys, or of all queries: if more are high, the threshold rises."""

MIN_COVERED = 0.6
"""Queries are named by kinds of tokens if these kinds cover at least this share of the queries, else by tokens."""

MAX_PAIRS = 2
"""The largest number of strong pairs of tokens that a line names."""

MIN_TEXTS = 2
"""The smallest number of texts in which a strong pair must occur."""

MIN_EXCESS = 0.03
"""A pair of tokens is strong if its mean excess is at least this. The excess is the attention beyond what terms give
it, as a part of the row's attention. The mean is shrunk towards 0."""

_ADDED_OCCURRENCES = 2
"""The number of imagined occurrences with excess 0 that shrink the mean excess of a pair."""

_N_PAIR_ENTRIES = 2**13
"""Strong pairs are sought among this number of entries, which have the largest excess."""

MIN_ENGLISH = 0.25
"""Texts are English if at least this share of their words is in closed English classes, such as prepositions."""

MIN_LIFT = 1.3
"""A kind of key is named if its lift is at least this."""

MIN_FIRST_LIFT = 1.15
"""In the first phrase of a line, the kind with the largest lift is named if its lift is at least this."""

MAX_CATEGORIES = 3
"""The largest number of categories of terms that have a phrase in a line."""

MAX_NAMES = 2
"""The largest number of kinds of keys, of avoided kinds, or of relations that a phrase names."""

EQUAL_FACTOR = 1.4
"""Two categories of terms count equally if their strengths in nats differ by less than this factor."""

MIN_STRENGTHS = {"kind": 0.04, "distance": 0.1, "relation": 0.05, "pair": 0.2}
"""Category of terms -> the smallest strength, relative to the strongest category, that gets it a phrase."""

_SIGN_KINDS = ("sentence_end", "comma", "quote", "bracket", "punctuation")
"""The kinds of punctuation marks. A mark that is of none of the others is "punctuation"."""

_SHORT_NAMES = {"name": "names", "punctuation": "other punctuation"}


def find_naming_threshold(values: Floats) -> float:
    """Return the smallest value of an own feature for which its tokens are named; the largest value always is named.

    `values` are (entry,) or (row,).
    """
    # The share of tokens at or above each level, and the levels with a share that is small enough.
    levels, counts = np.unique(values, return_counts=True)
    shares = counts[::-1].cumsum()[::-1] / max(1, len(values))
    largest = float(values.max(initial=0.0))
    rare_levels = np.append(levels[shares <= MAX_NAMED], largest)
    return max(min(HIGH_VALUE, largest), float(rare_levels[0]))


class KeyKinds:
    """Assign each key one kind, such as commas or verbs.

    If the texts are English, the kinds of words are English classes; otherwise they are frequent or infrequent words.

    Attributes:
        names: The name of each kind, (kind,).
        kind_of_entry: The index of each key's kind, (entry,).
        families: The name of several kinds together, such as "function words" -> the indices of these kinds.
        names_without_examples: The names of kinds and families that a reader understands without examples of tokens.
    """

    def __init__(self, group: HeadGroup, rows: RowSample) -> None:
        index_by_name = {feature.name: index for index, feature in enumerate(group.features)}

        def find_keys(feature_names: Sequence[str]) -> Flags:
            """Return which keys have each of some features, (feature, entry)."""
            return rows.features[[index_by_name[name] for name in feature_names]] > 0

        # The features that are kinds. A key with several of them is of the first kind in this order.
        kinds = [*_SIGN_KINDS, "digit", "piece"]
        is_closed = find_keys(tuple(CLOSED_CLASSES)).any(0)
        if is_closed.sum() >= MIN_ENGLISH * find_keys(["word"]).sum():
            # Negations come first of all classes, because they are in other closed classes too.
            kinds += sorted(CLOSED_CLASSES, key=lambda name: name != "negations")
            kinds += ["name", *OPEN_CLASSES]
        else:
            kinds += ["name", "frequent", "infrequent"]
        # `argmax` returns the first kind of each key. The row of True that is padded is the kind of all other tokens.
        self.kind_of_entry = np.pad(find_keys(kinds), ((0, 1), (0, 0)), constant_values=True).argmax(0)
        # Name the kinds and the families.
        names = []
        for kind in kinds:
            words = group.features[index_by_name[kind]].words
            names.append(_SHORT_NAMES.get(kind, words.removeprefix("English ")))
        self.names = (*names, "other tokens")
        # All sign kinds but the last, which is "other punctuation".
        self.names_without_examples = {*names[: len(_SIGN_KINDS) - 1], "punctuation"}
        function_words = {kinds.index(name) for name in CLOSED_CLASSES if name in kinds}
        self.families = {"punctuation": {*range(len(_SIGN_KINDS))}, "function words": function_words}

    def merge(self, chosen_kinds: Sequence[int], is_common: Flags) -> list[tuple[str, list[int]]]:
        """Return the first MAX_NAMES names of chosen kinds, each with the indices of the kinds that it names.

        A family such as "punctuation" replaces its kinds if at least two of them are common, and all common ones are
        chosen.

        Args:
            chosen_kinds: The indices of the kinds, in the order in which they are to be named.
            is_common: Which kinds are common, (kind,).
        """
        kinds_by_name: dict[str, list[int]] = {}
        common_kinds = {*np.flatnonzero(is_common).tolist()}
        for kind in chosen_kinds:
            name = self.names[kind]
            for family, members in self.families.items():
                common_members = members & common_kinds
                if kind in members and len(common_members) > 1 and common_members <= {*chosen_kinds}:
                    name = family
            kinds_by_name.setdefault(name, []).append(kind)
        return list(kinds_by_name.items())[:MAX_NAMES]

    def sum_by_kind(self, values: Floats) -> Floats:
        """Sum values of entries over the entries of each kind, (entry,) to (kind,)."""
        return np.bincount(self.kind_of_entry, values, len(self.names)).astype(np.float64)


class HeadWords:
    """Name the terms of a head, and summarise its description.

    Attributes:
        rows: The rows to which the description was fitted.
        head: The index of the head in these rows.
        kinds: The kinds of keys.
        offsets: The position of each key minus the position of its query, in tokens, (entry,).
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

    # Scores of terms. A score is a sum of weighted features, (entry,).

    def predict_attention(self, scores: Floats) -> Floats:
        """Return the attention p ∝ exp(score), (entry,), in the units of `attention`."""
        return self.rows.weight_rows(np.exp(scores - scores.max(initial=0.0)), self.head)

    def compute_nats(self, scores: Floats) -> float:
        """Return KL(p ‖ uniform) of the attention p ∝ exp(score), (entry,), as a mean over rows, in nats."""
        # ln p = score - ln Z, and ln uniform = -ln n. The largest score is subtracted so that exp does not overflow.
        scores = scores - scores.max(initial=0.0)
        log_ratio = np.log(self.rows.lengths / self.rows.sums(np.exp(scores)))
        return float(self.rows.weights[self.head] @ log_ratio + self.predict_attention(scores) @ scores)

    # Terms

    def find_own_feature(self, term: int) -> FittedFeature | None:
        """Return the own feature that a term is; None = the term is a feature that all heads share."""
        return self.rows.column_of(term, self.head)

    def name_term(self, term: int) -> str:
        """Return the name of a term in files: the name of its feature; or "keys", "pair1+", "pair1-" and so on.

        Own features have indices after the shared ones. They are: one about keys, then two for each pair of directions.
        """
        if self.find_own_feature(term) is None:
            return self._features[term].name
        pair, is_lower = divmod(term - len(self._features) + 1, 2)
        return f"pair{pair}{'-' if is_lower else '+'}" if pair else "keys"

    def describe_term(self, term: int) -> str:
        """Return the words of a term, such as "the previous token" or "tokens like alice, dinah, abbas"."""
        own_feature = self.find_own_feature(term)
        if own_feature is None:
            return self._features[term].words
        # The examples are keys of high value. They are ranked by attention times value.
        key_values = own_feature.key_values[own_feature.key_levels][self.rows.key_types]
        weights = self.attention * key_values * (key_values >= find_naming_threshold(key_values))
        words = "tokens like"
        if own_feature.query_levels is not None:
            weights = weights * self.rows.repeat_rows(_compute_query_values(self.rows, own_feature))
            words = f"from {self.name_queries(own_feature)[0]} to"
        labels = self.find_top_labels(self.rows.key_types, weights, MAX_TOKENS)
        # Quote signs: the list is separated by commas, so a bare comma would be unreadable.
        quoted = [label if _is_word(label) else f"“{label}”" for label in labels]
        return f"{words} {', '.join(quoted)}"

    def name_queries(self, own_feature: FittedFeature) -> tuple[str, Floats]:
        """Name the queries of an own feature about pairs of tokens, and return the weight of each row among them.

        Returns:
            The words; and the feature's value for the query of each row, (row,), 0 to 1, or 0 for queries of low value.
        """
        values = _compute_query_values(self.rows, own_feature)
        values = np.where(values >= find_naming_threshold(values), values, 0.0)
        weights = self.rows.weights[self.head] * values
        labels = self.find_top_labels(self.rows.query_types, weights, MAX_TOKENS)
        # The share of each kind of query, (kind,). Only keys have kinds: take the entry in which the key is the query.
        is_query = self.offsets == 0
        shares = self.kinds.sum_by_kind(self.rows.repeat_rows(weights) * is_query) / max(
            weights.sum(), 1e-30
        )
        # Name the queries by the two largest kinds if these cover most queries, else by tokens.
        order = np.argsort(-shares)
        large_kinds = order[shares[order] >= 0.1].tolist()
        named_kinds = self.kinds.merge(large_kinds, shares >= 0.05)
        covered_share = sum(shares[kinds].sum() for _, kinds in named_kinds)
        if covered_share < MIN_COVERED:
            tokens = [label if _is_word(label) else "punctuation" for label in labels]
            return ", ".join([*dict.fromkeys(tokens)][:4]), values
        words = ", ".join(name for name, _ in named_kinds)
        examples = [label for label in labels if _is_word(label)][:2]
        if examples and words not in self.kinds.names_without_examples:
            words += f" ({', '.join(examples)})"
        return words, values

    def find_top_labels(self, types: NDArray[np.integer], weights: Floats, max_labels: int) -> list[str]:
        """Return the labels of the types of token with the largest sums of weights, without duplicates.

        Args:
            types: The type of each key, (entry,), or of each query, (row,). A type is an entry of the vocabulary.
            weights: The weight of each key or query. Types whose weights sum to 0 or less are left out.
            max_labels: The largest number of labels.
        """
        labels = []
        # (type,)
        sums = np.bincount(types, weights)
        # Take twice the number of types: two may have the same label without the tokenizer's marks for spaces.
        for token_type in np.argsort(-sums, kind="stable")[: 2 * max_labels]:
            if sums[token_type] > 0:
                label = self._labels[token_type]
                labels.append(label.strip("·Ġ▁ ") or label)
        return list(dict.fromkeys(labels))[:max_labels]

    # The summary

    def summarise(self, description: Description, term_rows: Sequence[Mapping[str, Any]]) -> str:
        """Say what a head attends to off the sinks, such as "nouns 1.6× (door, key), least punctuation".

        `term_rows` are the rows of the table `terms` for the terms of the description, in the same order.
        """
        if not term_rows:
            return ""
        # The scores that each term gives, (term, entry).
        term_scores = np.stack([self.rows.by_entry(term, self.head) for term in description.terms])
        term_scores *= description.weights[:, None]
        # Category -> its strength: the nats of its terms without the others.
        categories = np.array([self._categorise(term) for term in description.terms])
        strengths = {}
        for category in dict.fromkeys(categories.tolist()):
            strengths[category] = self.compute_nats(term_scores[categories == category].sum(0))
        max_strength = max(strengths.values())
        # Write a phrase for each category that is strong enough, the strongest first.
        text = ""
        phrased: list[str] = []
        for category in sorted(strengths, key=lambda category: -strengths[category]):
            min_strength = MIN_STRENGTHS[category] * max_strength
            if len(phrased) == MAX_CATEGORIES or strengths[category] < min_strength:
                continue
            indices = np.flatnonzero(categories == category)
            min_lift = MIN_LIFT if phrased else MIN_FIRST_LIFT
            phrase = self._phrase_category(
                category, indices, description.terms, term_rows, term_scores, min_lift
            )
            # The phrase is "" if nothing stands out in this category.
            if not phrase:
                continue
            if phrased:
                is_equal = strengths[phrased[-1]] < EQUAL_FACTOR * strengths[category]
                text += "; equally " if is_equal else "; then "
            text += phrase
            phrased.append(category)
        # If no category has a phrase, name the first term.
        if not text:
            text = _phrase_relation(term_rows[0]) or str(term_rows[0]["words"])
        # Add strong pairs of tokens that the terms about single tokens do not explain.
        if "pair" not in phrased and len(phrased) < MAX_CATEGORIES:
            strong_pairs = self.find_strong_pairs(term_scores[categories != "pair"].sum(0))
            if strong_pairs:
                text += f"; also {', '.join(strong_pairs)}"
        return text

    def _phrase_category(
        self,
        category: str,
        indices: Integers,
        terms: Sequence[int],
        term_rows: Sequence[Mapping[str, Any]],
        term_scores: Floats,
        min_lift: float,
    ) -> str:
        """Write the phrase of a category of terms; "" if nothing stands out.

        Args:
            category: The category.
            indices: Which of the description's terms belong to it.
            terms: All terms of the description.
            term_rows: Their rows of the table `terms`.
            term_scores: Their scores, (term, entry).
            min_lift: The lift that is enough for the kind of key with the largest lift.
        """
        total_scores = term_scores.sum(0)
        other_scores = total_scores - term_scores[indices].sum(0)
        if category == "kind":
            return self.phrase_kinds(other_scores, min_lift=min_lift)
        if category == "distance":
            expected = self.predict_attention(other_scores)
            uniform = self.rows.weight_rows(self.rows.counts, self.head)
            return phrase_distances(self.offsets, self.attention, expected, uniform)
        if category == "pair":
            # The first pair of directions that stands out.
            pairs = [self._phrase_pair(terms[i], total_scores - term_scores[i]) for i in indices]
            return next(filter(None, pairs), "")
        relations = [_phrase_relation(term_rows[i]) for i in indices]
        return ", ".join([*filter(None, relations)][:MAX_NAMES])

    def _categorise(self, term: int) -> str:
        """Return the category of a term: "kind", "distance", "relation" or "pair"."""
        own_feature = self.find_own_feature(term)
        if own_feature is None:
            return self._features[term].about
        return "kind" if own_feature.query_levels is None else "pair"

    def _phrase_pair(self, term: int, other_scores: Floats) -> str:
        """Name the queries of a term about pairs, and the kinds of keys to which they attend; "" if no kind stands out.

        `other_scores` are the scores that all other terms give, (entry,).
        """
        own_feature = self.find_own_feature(term)
        assert own_feature is not None
        queries, row_factors = self.name_queries(own_feature)
        keys = self.phrase_kinds(other_scores, row_factors)
        return f"from {queries}: {keys}" if keys else ""

    def find_strong_pairs(self, scores: Floats) -> list[str]:
        """Name the pairs of tokens that get much more attention than the scores, (entry,), predict.

        Returns:
            At most MAX_PAIRS names, such as "door → key", the largest excess first.
        """
        # The excess of attention as a part of the row's, (entry,): entries of a mean row sum to 1 / number of rows.
        rows = self.rows
        excess = (self.attention - self.predict_attention(scores)) * len(rows.texts)
        # A code for the types of query and key, (entry,).
        codes = rows.repeat_rows(rows.query_types.astype(np.int64)) * len(self._labels) + rows.key_types
        # Take the entries with the largest excess; of entries with equal excess, the first ones. `partition` finds the
        # smallest excess among these, so that few entries need sorting.
        candidates = np.arange(len(excess))
        if len(excess) > _N_PAIR_ENTRIES:
            min_excess = np.partition(excess, -_N_PAIR_ENTRIES)[-_N_PAIR_ENTRIES]
            candidates = np.flatnonzero(excess >= min_excess)
        order = np.argsort(-excess[candidates], kind="stable")
        entries = candidates[order][:_N_PAIR_ENTRIES]
        pairs, pair_of_entry = np.unique(codes[entries], return_inverse=True)
        # Rank pairs by their shrunk mean excess. A sum would favour frequent tokens, and a plain mean rare tokens.
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
        self, other_scores: Floats, row_factors: Floats | None = None, min_lift: float = MIN_LIFT
    ) -> str:
        """Name the kinds of keys with a large lift, with their lifts and examples, and the kinds that are avoided.

        Args:
            other_scores: The scores that the terms of other categories give, (entry,).
            row_factors: A factor on the weight of each row, (row,); None = 1 for all rows.
            min_lift: The lift that is enough for the kind with the largest lift. Other kinds need `MIN_LIFT`.
        """
        # The head's attention, and the attention that the other terms predict, (entry,).
        kinds = self.kinds
        attention = self.attention
        expected = self.predict_attention(other_scores)
        if row_factors is not None:
            mean_factor = max(self.rows.weights[self.head] @ row_factors, 1e-30)
            factors = self.rows.repeat_rows(row_factors / mean_factor)
            attention = attention * factors
            expected = expected * factors
        # Both by kind, (kind,), and the kinds with large and with small lifts.
        shares = kinds.sum_by_kind(attention)
        expected_shares = kinds.sum_by_kind(expected)
        lifts = compute_lift(shares, expected_shares)
        is_common = np.maximum(shares, expected_shares) >= MIN_SHARE
        # Between `min_lift` and MIN_LIFT, the largest lift itself is the threshold: only its kind is named.
        largest_lift = lifts[is_common].max(initial=0.0)
        is_named = is_common & (lifts >= np.clip(largest_lift, min_lift, MIN_LIFT))
        is_avoided = is_common & (lifts <= MAX_AVOIDED_LIFT)

        # Choose the kinds that contribute most to KL(shares ‖ expected shares).
        order = np.argsort(-shares * np.log(lifts))
        named_kinds = kinds.merge(order[is_named[order]].tolist(), is_common)
        n_examples = 3 if len(named_kinds) == 1 else 2
        lift_by_phrase: dict[str, float] = {}
        for name, members in named_kinds:
            lift = float(compute_lift(shares[members].sum(), expected_shares[members].sum()))
            phrase = f"{name} {lift:.1f}×"
            if name not in kinds.names_without_examples:
                excess = (attention - expected) * np.isin(kinds.kind_of_entry, members)
                examples = self.find_top_labels(self.rows.key_types, excess, n_examples)
                phrase += f" ({', '.join(examples)})"
            lift_by_phrase[phrase] = lift
        # Name the kind with the largest lift first.
        phrases = sorted(lift_by_phrase, key=lambda phrase: -lift_by_phrase[phrase])
        # Add the avoided kinds, first the kind that loses most attention.
        order = np.argsort(shares - expected_shares)
        avoided_kinds = kinds.merge(order[is_avoided[order]].tolist(), is_common)
        if avoided_kinds:
            phrases.append(f"least {', '.join(name for name, _ in avoided_kinds)}")
        return ", ".join(phrases)


def _is_word(label: str) -> bool:
    """Return whether a label has a letter or a digit."""
    return any(map(str.isalnum, label))


def _compute_query_values(rows: RowSample, own_feature: FittedFeature) -> Floats:
    """Return the value of an own feature about pairs for the query of each row, (row,), 0 to 1."""
    assert own_feature.query_levels is not None
    return own_feature.query_values[own_feature.query_levels][rows.query_types]


def _phrase_relation(term_row: Mapping[str, Any]) -> str:
    """Name a term with its share of attention, such as "the same token (12%; uniform 3%)".

    Return "" if the share equals the share under uniform attention, or contradicts the sign of the weight: a term with
    a positive weight should get more than under uniform attention, and a term with a negative weight less.
    """
    weight = term_row["weight"]
    words = f"avoids {term_row['words']}" if weight < 0 else str(term_row["words"])
    share = term_row["share"].value
    uniform = term_row["share"].baseline
    # The share of a term about pairs is NaN.
    if not np.isfinite(share):
        return words
    if weight * (share - uniform) <= 0 or round(100 * share) == round(100 * uniform):
        return ""
    return f"{words} {format_shares(share, uniform)}"
