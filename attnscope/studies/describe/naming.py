"""What terms that were fitted to one head are called: by tokens, by a known class, and by strong pairs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from attnscope.records.heads.descriptions import Pair
from attnscope.studies.describe.english import CLOSED_CLASSES, OPEN_CLASSES
from attnscope.studies.describe.features import RESTING, Feature
from attnscope.studies.describe.rows import Group

if TYPE_CHECKING:
    from attnscope.core.questions.sampled_rows import Part

Floats = NDArray[np.float64]

TOKENS = 6
"""Tokens that a term is named by, at most."""

HIGH, MOST_NAMED = 0.5, 0.35
"""The tokens that a term names have this value of its column at least, and are at most this share of all keys (or
queries)."""

COVERED, LIFTED = 0.6, 1.5
"""A known class names a term if it has this share of the term's keys, and this many times its share of all keys."""

PAIRS, FEWEST_TEXTS = 3, 2
"""Strong pairs that are kept, and the texts in which a pair must occur."""

LEAST_MORE = 0.03
"""Attention of a row, beyond what terms give a pair, from which on the pair is kept: its mean, shrunk."""

_SHRUNK_BY = 2
"""Occurrences without attention that are added to those of a pair."""

ENGLISH = 0.25
"""Share of words that are of a closed English class, from which on the texts are English."""

_SIGNS = ("sentence_end", "comma", "quote", "bracket", "punctuation")
_SHORT = {"name": "names", "punctuation": "other punctuation", "digit": "digits"}
TOO_WIDE = frozenset((RESTING, "word", "last"))
"""Classes that name nothing."""

_WIDE = frozenset(("infrequent", "frequent", "nouns"))
"""Classes that name what no narrower one does, with these limits in place of COVERED and LIFTED."""

_WIDE_COVERED, _WIDE_LIFTED = 0.75, 1.25


def least_named(values: Floats) -> float:
    """From which value of a column on a token belongs to its term; see HIGH and MOST_NAMED. The highest always does."""
    levels, counts = np.unique(values, return_counts=True)
    shares = counts[::-1].cumsum()[::-1] / max(1, len(values))
    narrow = levels[shares <= MOST_NAMED]
    highest = float(values.max(initial=0.0))
    return max(min(HIGH, highest), float(narrow[0]) if len(narrow) else highest)


@dataclass(frozen=True, eq=False)
class Kinds:
    """Kinds of keys, of which each key has one.

    Attributes:
        of_entry: (entry,): the number of each key's kind.
        wholes: What several kinds together are called, and their numbers.
        signs: The names of kinds that need no examples.
    """

    words: tuple[str, ...]
    of_entry: NDArray[np.int64]
    wholes: tuple[tuple[str, frozenset[int]], ...]
    signs: frozenset[str]

    @classmethod
    def of(cls, part: Part, features: Sequence[Feature]) -> Kinds:
        """The kinds of keys: those of the annotation, if there is one, else by how tokens are written.

        Words are told apart by English classes where a quarter of them belong to a closed one, else by frequency.
        """
        numbers = {feature.name: number for number, feature in enumerate(features)}
        annotated = [feature.name for feature in features if feature.name.startswith("kind:")]
        closed = np.any([part.levels[numbers[name]] for name in CLOSED_CLASSES], 0)
        is_english = closed.sum() >= ENGLISH * part.levels[numbers["word"]].sum()
        if annotated:
            classes = annotated
        elif is_english:
            classes = ["negations", *(name for name in CLOSED_CLASSES if name != "negations"), "name", *OPEN_CLASSES]
        else:
            classes = ["name", "frequent", "infrequent"]
        order = [*_SIGNS, *([] if annotated else ["digit"]), "piece", *classes]
        of_entry = np.full(part.size, len(order))
        for place in reversed(range(len(order))):
            of_entry[part.levels[numbers[order[place]]] > 0] = place
        words = [_SHORT.get(name, features[numbers[name]].words.removeprefix("English ")) for name in order]
        closed_classes = () if annotated else tuple(CLOSED_CLASSES)
        wholes = tuple(
            (whole, frozenset(order.index(name) for name in parts if name in order))
            for whole, parts in (("punctuation", _SIGNS), ("function words", closed_classes))
        )
        return cls((*words, "other tokens"), of_entry, wholes, frozenset((*words[: len(_SIGNS) - 1], "punctuation")))

    def merge(self, chosen: Sequence[int], matter: NDArray[np.bool_]) -> list[tuple[str, list[int]]]:
        """Chosen kinds by what they are called: those of a whole by its name, if all of it that matters is chosen."""
        by_words: dict[str, list[int]] = {}
        for number in chosen:
            words = self.words[number]
            for whole, members in self.wholes:
                mattering = {n for n in members if matter[n]}
                if number in members and len(mattering) > 1 and mattering <= set(chosen):
                    words = whole
            by_words.setdefault(words, []).append(number)
        return list(by_words.items())


class Names:
    """The names of terms, from the fitted rows of a group.

    Attributes:
        keys: (entry,): the type of each key.
        queries: (row,): the type of each query.
        offsets: (entry,): how far each key is behind its query, in tokens.
        kinds: The kinds of keys.
    """

    def __init__(self, group: Group, part: Part) -> None:
        assert part.rows.key_types is not None and part.rows.query_types is not None
        features = group.features
        self.group, self.part, self.types, self.kinds = group, part, group.types, Kinds.of(part, features)
        self.keys = part.key_types
        self.queries = part.rows.query_types[part.index]
        self.offsets = group.offsets[part.entries]
        self._classes = [
            (number, feature.words, feature.name in _WIDE, float(part.levels[number].sum() / max(1, part.size)))
            for number, feature in enumerate(features)
            if feature.family == "key" and feature.levels == 2 and feature.name not in TOO_WIDE
        ]
        self._words: dict[tuple[int, int], str] = {}
        itself = np.flatnonzero(self.offsets == 0)
        self._itself = np.full(len(self.queries), -1)
        self._itself[part.row_of[itself]] = itself

    def expected(self, scores: Floats) -> Floats:
        """(entry,): p ∝ exp(score), each row scaled to 1."""
        p = np.exp(scores - np.max(scores, initial=0.0))
        scaled: Floats = p / np.maximum(np.add.reduceat(p, self.part.first), 1e-300)[self.part.row_of]
        return scaled

    def label(self, number: int) -> str:
        """A type as it is written in names."""
        label = self.types.labels[number]
        return label.strip("·Ġ▁ ") or label

    def of_gate(self, gate: int) -> str:
        """What the queries of a gate are called."""
        feature = self.group.features[self.group.gates[gate]]
        return "names" if feature.name == "name" else feature.words.removeprefix("English ")

    def of_term(self, term: int, head: int) -> str:
        """What a term is called, such as "tokens like alice, dinah, abbas, 81% of them capitalised words"."""
        if term < self.part.n_shared:
            return self.group.features[term].words
        if (term, head) not in self._words:
            self._words[term, head] = self._of_own(term, head)
        return self._words[term, head]

    def _of_own(self, term: int, head: int) -> str:
        column = self.part.own_columns(head)[term - self.part.n_shared]
        if column.gate >= 0:
            return f"from {self.of_gate(column.gate)}: {self.of_term(column.gated, head)}"
        on = self.part.attention(head) * self.part.weights[head][self.part.row_of]
        if column.queries is None:
            assert column.keys is not None
            return f"tokens like {self._keys_of(column.values[column.keys], on)}"
        n_keys = column.n_key_levels
        of_queries = column.values.reshape(-1, n_keys)[:, -1][column.queries]
        assert column.keys is not None
        of_keys = column.values.reshape(-1, n_keys)[-1][column.keys]
        from_queries = of_queries[self.queries]
        to = self._keys_of(of_keys, on * from_queries[self.part.row_of])
        return f"from {self.of_queries(of_queries, head)[0]} to {to}"

    def of_queries(self, values: Floats, head: int) -> tuple[str, Floats]:
        """What queries are called whose types have high values, in few words; and (row,): how much each is one."""
        of_rows = values[self.queries]
        of_rows = np.where(of_rows >= least_named(of_rows), of_rows, 0.0)
        weights = self.part.weights[head] * of_rows
        labels = self._labels(np.bincount(self.queries, weights, len(values)))
        written = [label for label in labels if any(map(str.isalnum, label))]
        has_itself = self._itself >= 0
        by_kind = np.bincount(self.kinds.of_entry[self._itself[has_itself]], weights[has_itself], len(self.kinds.words))
        shares = by_kind / max(float(weights.sum()), 1e-30)
        kinds = self.kinds.merge([int(n) for n in np.argsort(-shares) if shares[n] >= 0.1], shares >= 0.05)[:2]
        if sum(shares[members].sum() for _, members in kinds) < COVERED:
            some = dict.fromkeys(label if label in written else "punctuation" for label in labels)
            return ", ".join(list(some)[:4]), of_rows
        words = ", ".join(words for words, _ in kinds)
        examples = f" ({', '.join(written[:2])})" if written and words not in self.kinds.signs else ""
        return words + examples, of_rows

    def _keys_of(self, values: Floats, on: Floats) -> str:
        """What keys are called whose types have high values, by the attention that they get."""
        of_entries = values[self.keys]
        high = np.flatnonzero(of_entries >= least_named(of_entries))
        weights = on[high] * of_entries[high]
        labels = self._labels(np.bincount(self.keys[high], weights, len(values)))
        # A bare comma in a list separated by commas cannot be read.
        return ", ".join(label if any(map(str.isalnum, label)) else f"“{label}”" for label in labels) + self._covered(
            high, weights
        )

    def _labels(self, weights: NDArray[np.number]) -> list[str]:
        """How types are written, up to `TOKENS`, the largest weight first."""
        best = [int(t) for t in np.argsort(-weights, kind="stable")[: 2 * TOKENS] if weights[t] > 0]
        return list(dict.fromkeys(map(self.label, best)))[:TOKENS]

    def _covered(self, entries: NDArray[np.int64], weights: Floats) -> str:
        """The known class that most of some keys belong to, with its share of them; "" = none does."""
        total = float(weights.sum())
        if total <= 0:
            return ""
        named: list[tuple[bool, float, str]] = []
        for number, words, wide, of_all in self._classes:
            share = float(weights @ self.part.levels[number][entries]) / total
            covered, lifted = (_WIDE_COVERED, _WIDE_LIFTED) if wide else (COVERED, LIFTED)
            if share >= covered and share >= lifted * of_all:
                named.append((not wide, share, words))
        if not named:
            return ""
        _, share, words = max(named, key=lambda named_class: named_class[:2])
        return f", {100 * share:.0f}% of them {words}"

    def pairs(self, head: int, others: Floats) -> tuple[Pair, ...]:
        """The pairs of tokens that get the most attention beyond what some terms, (entry,), give them."""
        part = self.part
        rows = part.row_of
        more = (part.attention(head) - self.expected(others)) * part.weights[head][rows] * len(part.index)
        codes = self.queries[rows].astype(np.int64) * len(self.types.ids) + self.keys
        strong = np.arange(len(more))
        if len(more) > 2**13:  # a strong pair has strong entries
            strong = np.flatnonzero(more >= np.partition(more, -(2**13))[-(2**13)])
        order = strong[np.argsort(-more[strong], kind="stable")][: 2**13]
        distinct, which = np.unique(codes[order], return_inverse=True)
        # Pairs of frequent tokens have much attention by their number: each counts by its mean, shrunk towards 0.
        sums = np.bincount(which, more[order]) / (np.bincount(which) + _SHRUNK_BY)
        pairs: list[Pair] = []
        for at in np.argsort(-sums, kind="stable")[: 20 * PAIRS]:
            texts = np.unique(part.texts[rows[order[which == at]]])
            query, key = divmod(int(distinct[at]), len(self.types.ids))
            if len(texts) >= FEWEST_TEXTS and sums[at] >= LEAST_MORE:
                pairs.append(Pair(self.types.labels[query], self.types.labels[key], len(texts)))
            if len(pairs) == PAIRS:
                break
        return tuple(pairs)
