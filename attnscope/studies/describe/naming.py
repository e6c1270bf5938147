"""What terms that were fitted to one head are called: by tokens, by a known class, and by strong pairs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from attnscope.records.heads.descriptions import Pair
from attnscope.studies.describe.features import RESTING, Feature
from attnscope.studies.describe.rows import Types

if TYPE_CHECKING:
    from attnscope.core.questions.sampled_rows import Column, Part

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

_SHRUNK_BY = 2
"""Occurrences without attention that are added to those of a pair."""

_TOO_WIDE = frozenset((RESTING, "word", "last"))
_WIDE = frozenset(("infrequent", "frequent"))
"""Classes that name what no narrower one does, with these limits in place of COVERED and LIFTED."""

_WIDE_COVERED, _WIDE_LIFTED = 0.75, 1.25


def least_named(values: Floats) -> float:
    """From which value of a column on a token belongs to its term; see HIGH and MOST_NAMED. The highest always does."""
    levels, counts = np.unique(values, return_counts=True)
    shares = counts[::-1].cumsum()[::-1] / max(1, len(values))
    narrow = levels[shares <= MOST_NAMED]
    highest = float(values.max(initial=0.0))
    return max(min(HIGH, highest), float(narrow[0]) if len(narrow) else highest)


class Names:
    """The names of terms, from the fitted rows of a group.

    Args:
        part: The fitted rows.
        features: The features that all heads share.
        offsets: (entry of the group,): how far each key is behind its query.
        types: The types of token.
    """

    def __init__(self, part: Part, features: Sequence[Feature], offsets: NDArray[np.int32], types: Types) -> None:
        assert part.rows.key_types is not None and part.rows.query_types is not None
        self._part, self._types = part, types
        self._keys = part.rows.key_types[part.entries]
        self._queries = part.rows.query_types[part.index]
        self._offsets = offsets[part.entries]
        self._classes = [
            (number, feature.words, feature.name in _WIDE)
            for number, feature in enumerate(features)
            if feature.family == "key" and feature.levels == 2 and feature.name not in _TOO_WIDE
        ]
        itself = np.flatnonzero(self._offsets == 0)
        self._itself = np.full(len(self._queries), -1)
        self._itself[part.row_of[itself]] = itself

    def of_column(self, column: Column, head: int) -> str:
        """What a column is called, such as "tokens like alice, dinah, abbas, 81% of them capitalised words"."""
        on = self._part.attention(head) * self._part.weights[head][self._part.row_of]
        if column.queries is None:
            assert column.keys is not None
            return f"tokens like {self._keys_of(column.values[column.keys], on)}"
        n_keys = column.n_key_levels
        of_queries = column.values.reshape(-1, n_keys)[:, -1][column.queries]
        assert column.keys is not None
        of_keys = column.values.reshape(-1, n_keys)[-1][column.keys]
        from_queries = of_queries[self._queries]
        to = self._keys_of(of_keys, on * from_queries[self._part.row_of])
        return f"from {self.of_queries(of_queries, head)} to {to}"

    def of_queries(self, values: Floats, head: int) -> str:
        """What queries are called whose types have high values."""
        of_rows = values[self._queries]
        high = of_rows >= least_named(of_rows)
        weights = self._part.weights[head] * of_rows * high
        known = self._itself >= 0
        covered = self._covered(self._itself[known], weights[known])
        return self._listed(np.bincount(self._queries, weights, len(values))) + covered

    def _keys_of(self, values: Floats, on: Floats) -> str:
        """What keys are called whose types have high values, by the attention that they get."""
        of_entries = values[self._keys]
        high = np.flatnonzero(of_entries >= least_named(of_entries))
        weights = on[high] * of_entries[high]
        return self._listed(np.bincount(self._keys[high], weights, len(values))) + self._covered(high, weights)

    def _listed(self, weights: NDArray[np.number]) -> str:
        best = [int(t) for t in np.argsort(-weights, kind="stable")[: 2 * TOKENS] if weights[t] > 0]
        labels = dict.fromkeys(self._types.labels[t].strip("·Ġ▁ ") or self._types.labels[t] for t in best)
        return ", ".join(list(labels)[:TOKENS])

    def _covered(self, entries: NDArray[np.int64], weights: Floats) -> str:
        """The known class that most of some keys belong to, with its share of them; "" = none does."""
        total = float(weights.sum())
        if total <= 0:
            return ""
        named: list[tuple[bool, float, str]] = []
        for number, words, wide in self._classes:
            flags = self._part.levels[number]
            share = float(weights @ flags[entries]) / total
            covered, lifted = (_WIDE_COVERED, _WIDE_LIFTED) if wide else (COVERED, LIFTED)
            if share >= covered and share >= lifted * float(flags.mean()):
                named.append((not wide, share, words))
        if not named:
            return ""
        _, share, words = max(named, key=lambda one: one[:2])
        return f", {100 * share:.0f}% of them {words}"

    def pairs(self, head: int) -> tuple[Pair, ...]:
        """The pairs of tokens between which a head has most attention beyond uniform."""
        part = self._part
        rows = part.row_of
        more = (part.attention(head) - (1 / part.lengths)[rows]) * part.weights[head][rows]
        codes = self._queries[rows].astype(np.int64) * len(self._types.ids) + self._keys
        order = np.argsort(-more, kind="stable")[: 2**13]  # a strong pair has strong entries
        found, which = np.unique(codes[order], return_inverse=True)
        # Pairs of frequent tokens have much attention by their number: each counts by its mean, shrunk towards 0.
        sums = np.bincount(which, more[order]) / (np.bincount(which) + _SHRUNK_BY)
        made: list[Pair] = []
        for at in np.argsort(-sums, kind="stable")[: 20 * PAIRS]:
            texts = np.unique(part.texts[rows[order[which == at]]])
            query, key = divmod(int(found[at]), len(self._types.ids))
            if len(texts) >= FEWEST_TEXTS and sums[at] > 0:
                made.append(Pair(self._types.labels[query], self._types.labels[key], len(texts)))
            if len(made) == PAIRS:
                break
        return tuple(made)
