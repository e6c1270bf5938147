"""Hold sampled rows of attention with features of their keys, and count how often features occur together in a row.

`descriptions` fits p(k | q) ∝ n_k exp(Σ_f w_f f(q, k)) to the rows. The meaning of features is left to
`studies.describe`. An *entry* is a key that the query of a sampled row may attend to, or n_k keys whose features are
all the same. A *feature* f has a value from 0 to 1 for each entry, and only few distinct ones: its *levels*. The
features that a description uses are its *terms*. Ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Levels = NDArray[np.uint8]

_ENTRIES_AT_ONCE = 2**16
"""Entries whose features are multiplied with attention at once."""

_WEIGHTS_AT_ONCE = 2**21
"""About how many weights of several heads are held in float64 at once."""

_TABLE_BYTES = 2**26
"""About how much memory the tables (`LevelCounts`) take that are kept."""

_MAX_COMBINATIONS = 1024
"""If features could combine in more ways than this, ways that never occur get no place in a table."""

_DENSE_PER_ENTRY = 4
"""A table counts in a dense array if that has at most so many numbers per entry, else in a sparse one."""

_TINY = 1e-30
"""Instead of a divisor of 0."""


@dataclass(frozen=True, eq=False)
class FittedFeature:
    """A feature that is fitted to one head: a value of the query's type, 0 to 1, times a value of the key's type.

    A type is an entry of the vocabulary.

    Attributes:
        rank: How simple the feature is: 0 is the simplest. Of features that explain as much, the simplest is taken.
        key_values: (level,): the values of keys.
        key_levels: (type,): the level of each type of token as a key.
        query_values: (level,): the values of queries.
        query_levels: (type,): the level of each type as a query; None = all queries are alike.
    """

    rank: int
    key_values: Floats
    key_levels: Levels
    query_values: Floats = field(default_factory=lambda: np.ones(1))
    query_levels: Levels | None = None

    @cached_property
    def products(self) -> tuple[Floats, Levels]:
        """Return the distinct products of a query value and a key value, (level,), and which of these each pair has.

        The pairs are (query level, key level).
        """
        # Rounded, so that products that differ by rounding alone are one level.
        products = np.outer(self.query_values, self.key_values).round(12)
        values, levels = np.unique(products, return_inverse=True)
        return values, levels.reshape(products.shape).astype(np.uint8)


@dataclass(frozen=True, eq=False)
class LevelCounts:
    """How often each combination of some features' levels occurs in each row.

    Attributes:
        values: (combination, feature): the features' values.
        codes: (entry,): the index of each entry's combination.
        counts: (row, combination): how many of a row's keys have it.
    """

    values: Floats
    codes: NDArray[np.int32]
    counts: Floats | sp.csr_array

    @cached_property
    def counts_by_combination(self) -> Floats | sp.csc_array:
        """Return the same counts transposed, (combination, row). Kept, because SciPy takes long to transpose."""
        return self.counts.T

    def log_sums(self, weights: Floats) -> Floats:
        """Return ln Z of each row, (row,), in nats: Z is the sum of exp(Σ w f) over its keys, w the weights."""
        # The largest score is subtracted, so that the exponential does not overflow.
        scores = self.values @ weights
        top = scores.max(initial=0.0)
        log_sums: Floats = np.log(self.counts @ np.exp(scores - top)) + top
        return log_sums


def _left_out() -> NDArray[Any]:
    """Return an empty array: the default of a field, until `RowSample.__post_init__` fills it in."""
    return np.empty(0, np.int64)


@dataclass(eq=False)
class RowSample:
    """Sampled rows of some heads, all of which may attend to the same keys.

    The entries of all rows stand in one axis, row after row. A feature is a number: those that all heads share come
    first, from 0 on, then those of a head's own `columns`.

    Attributes:
        features: (feature, entry), uint8: the level of each shared feature. Level i of n has the value i / (n - 1).
        levels: (feature,): how many levels each shared feature has; 2 = it holds or does not.
        starts: (row + 1,): where each row's entries begin, and where the last row ends; no row is empty.
        texts: (row,): the number of its text.
        attention: (head, entry), floating: weights, 0 to 1. The sum of a row is its mass, by which the row counts.
        counts: (entry,): how many keys an entry stands for; empty = one each.
        key_types: (entry,): the type of each key's token; empty = all are alike.
        query_types: (row,): the type of each query's token; empty = all are alike.
        columns: For each head the features that it alone has; empty = no head has any.
        index: (row,): where each row is in the whole sample; empty = these rows are the whole sample.
        entries: (entry,): where each entry is in the whole sample; empty = these rows are the whole sample.
    """

    features: Levels
    levels: Integers
    starts: Integers
    texts: Integers
    attention: NDArray[np.floating]
    counts: Floats = field(default_factory=_left_out)
    key_types: NDArray[np.int32] = field(default_factory=_left_out)
    query_types: NDArray[np.int32] = field(default_factory=_left_out)
    columns: tuple[tuple[FittedFeature, ...], ...] = ()
    index: Integers = field(default_factory=_left_out)
    entries: Integers = field(default_factory=_left_out)

    def __post_init__(self) -> None:
        # Fill in what was left out: one key per entry, one type for all, the whole sample.
        n_rows = len(self.texts)
        left_out = {
            "counts": np.ones(self.size),
            "key_types": np.zeros(self.size, np.int32),
            "query_types": np.zeros(n_rows, np.int32),
            "index": np.arange(n_rows),
            "entries": np.arange(self.size),
        }
        for name, array in left_out.items():
            if not len(getattr(self, name)):
                setattr(self, name, array)
        # Keep the results of `_count` that were used last: about _TABLE_BYTES at 16 bytes an entry, and at least 16.
        n_kept = max(16, _TABLE_BYTES // (16 * self.size + 1))
        self._cached_count = lru_cache(n_kept)(self._count)

    def select(self, rows: Integers) -> RowSample:
        """Copy some of the rows, by their positions here, (row,), ascending."""
        # Where the chosen rows begin in the copy, and how far each one moves to get there.
        lengths = self.lengths[rows]
        starts = starts_of(lengths)
        moves = self.starts[rows] - starts[:-1]
        # The position here of each entry of the copy, (entry,).
        copied = np.arange(starts[-1]) + np.repeat(moves, lengths)
        return replace(
            self,
            features=self.features[:, copied],
            starts=starts,
            texts=self.texts[rows],
            attention=self.attention[:, copied],
            counts=self.counts[copied],
            key_types=self.key_types[copied],
            query_types=self.query_types[rows],
            index=self.index[rows],
            entries=self.entries[copied],
        )

    def of_texts(self, texts: Sequence[int]) -> RowSample:
        """Copy the rows of some texts."""
        return self.select(np.flatnonzero(np.isin(self.texts, texts)))

    def give_columns(self, columns: tuple[tuple[FittedFeature, ...], ...]) -> None:
        """Replace the features that each head alone has, and forget tables that were counted with the old ones."""
        self.columns = columns
        self._cached_count.cache_clear()

    # Sizes and weights of rows

    @property
    def n_heads(self) -> int:
        """Count the heads that the rows are of."""
        return len(self.attention)

    @property
    def n_shared(self) -> int:
        """Count the features that all heads share: feature `n_shared` is a head's first own column."""
        return len(self.levels)

    @property
    def size(self) -> int:
        """Count the entries."""
        return int(self.starts[-1])

    @cached_property
    def lengths(self) -> Integers:
        """Count the entries of each row, (row,)."""
        return np.diff(self.starts)

    @cached_property
    def row_of(self) -> Integers:
        """Return the row of each entry, (entry,)."""
        return np.repeat(np.arange(len(self.texts)), self.lengths)

    def sums(self, values: NDArray[np.floating]) -> Floats:
        """Return sums over the entries of each row, in float64: (..., entry) to (..., row)."""
        sums: Floats = np.add.reduceat(values, self.starts[:-1], axis=-1, dtype=np.float64)
        return sums

    def spread(self, row_values: NDArray[Any]) -> NDArray[Any]:
        """Give each entry the value of its row, in the same dtype: (row,) to (entry,)."""
        return np.repeat(row_values, self.lengths)

    @cached_property
    def n_keys(self) -> Floats:
        """Count the keys of each row, (row,): several for an entry that stands for several."""
        return self.sums(self.counts)

    @cached_property
    def mass(self) -> Floats:
        """Return how much attention each row holds, 0 to 1, (row, head)."""
        return np.stack([self.sums(head_weights) for head_weights in self.attention], 1)

    @cached_property
    def text_weights(self) -> Floats:
        """Return the weight of each row if all have the same mass, (row,): texts weigh the same, and all sum to 1."""
        _, text_index, n_rows = np.unique(self.texts, return_inverse=True, return_counts=True)
        return 1.0 / (n_rows[text_index] * len(n_rows))

    @cached_property
    def weights(self) -> Floats:
        """Return the weight of each row for each head, (head, row): its text's weight times its mass; they sum to 1."""
        weights = (self.mass * self.text_weights[:, None]).T
        totals = weights.sum(1, keepdims=True)
        return np.ascontiguousarray(weights / np.maximum(totals, _TINY))

    def scaled(self, head: int) -> Floats:
        """Return a head's attention with each row scaled to sum to 1, (entry,)."""
        factors = 1 / np.maximum(self.mass[:, head], _TINY)
        scaled: Floats = self.attention[head].astype(np.float64) * self.spread(factors)
        return scaled

    @cached_property
    def entropies(self) -> Floats:
        """Return H = -Σ B ln(B / n_k) of each row, (row, head), in nats; B is its attention, scaled to sum to 1."""
        entropies = np.empty((len(self.texts), self.n_heads))
        for head in range(self.n_heads):
            scaled = self.scaled(head)
            # 0 · ln 0 = 0: a finite logarithm is enough for that.
            logs = np.log(np.maximum(scaled / self.counts, 1e-300))
            entropies[:, head] = -self.sums(scaled * logs)
        return entropies

    @cached_property
    def uniform_nats(self) -> Floats:
        """Return KL(B ‖ uniform) = ln Σ n_k - H of each row, (row, head), in nats."""
        return np.maximum(np.log(self.n_keys)[:, None] - self.entropies, 0.0)

    @cached_property
    def mean_nats(self) -> Floats:
        """Return the mean of KL(B ‖ uniform) of each head, (head,)."""
        means: Floats = np.einsum("hr,rh->h", self.weights, self.uniform_nats)
        return means

    # Features

    def column_of(self, feature: int, head: int) -> FittedFeature | None:
        """Return the column of a feature that is the head's own; None for a feature that all heads share."""
        return None if feature < self.n_shared else self.columns[head][feature - self.n_shared]

    def own_columns(self, head: int) -> tuple[FittedFeature, ...]:
        """Return the features that a head alone has, those from `n_shared` on."""
        return self.columns[head] if self.columns else ()

    def values_of(self, feature: int, head: int = 0) -> Floats:
        """Return the value of each level of a feature, (level,), 0 to 1."""
        column = self.column_of(feature, head)
        if column is None:
            return np.linspace(0, 1, int(self.levels[feature]))
        values, _ = column.products
        return values

    def levels_of(self, feature: int, head: int) -> Levels:
        """Return the level that each entry has of a feature, (entry,); of an own one of the head, its product's."""
        column = self.column_of(feature, head)
        if column is None:
            return np.asarray(self.features[feature])
        # The level of each product, (query level, key level); with a single query level the key level is its index.
        _, pair_levels = column.products
        pairs = column.key_levels[self.key_types]
        if column.query_levels is not None:
            # The index of each entry's pair in the flattened array.
            n_key_levels = np.int32(pair_levels.shape[1])
            query_levels = column.query_levels[self.query_types]
            pairs = pairs + self.spread(query_levels * n_key_levels)
        return pair_levels.ravel()[pairs]

    def by_entry(self, feature: int, head: int) -> Floats:
        """Return the values of a feature, (entry,), 0 to 1."""
        return np.take(self.values_of(feature, head), self.levels_of(feature, head))

    @cached_property
    def varies_in(self) -> Integers:
        """Count the texts in which a shared feature has more than one level in some row, (feature,)."""
        n_texts = np.zeros(self.n_shared, np.int64)
        first_entries = self.starts[:-1]
        for feature, levels in enumerate(self.features):
            # Rows whose largest and smallest level differ, (row,).
            largest = np.maximum.reduceat(levels, first_entries)
            varies = largest > np.minimum.reduceat(levels, first_entries)
            n_texts[feature] = len(np.unique(self.texts[varies]))
        return n_texts

    def variance(self, values: Floats) -> float:
        """Return how much values, (entry,), vary under uniform attention: the rows' mean variance, 0 to 1/4."""
        means = self.sums(values * self.counts) / self.n_keys
        squares = self.sums(values * values * self.counts) / self.n_keys
        return float(self.text_weights @ (squares - means**2))

    @cached_property
    def graded_variances(self) -> Floats:
        """Return the `variance` of the shared features of more than 2 levels, (feature,); 0 for the others."""
        variances = np.zeros(self.n_shared)
        for feature in np.flatnonzero(self.levels > 2):
            variances[feature] = self.variance(self.by_entry(int(feature), 0))
        return variances

    # Means of features

    @cached_property
    def expected(self) -> Floats:
        """Return E_A[f] of the shared features under each head's attention A, a mean over rows, (head, feature)."""
        means = np.empty((self.n_heads, self.n_shared))
        at_once = max(1, _WEIGHTS_AT_ONCE // max(1, self.size))
        for start in range(0, self.n_heads, at_once):
            some = slice(start, start + at_once)
            means[some] = self.means(self.attention[some].astype(np.float64), self.weights[some])
        return means

    def weighted(self, p: NDArray[np.floating], head: int) -> Floats:
        """Return p, (entry,), whose rows may have any sum, scaled so that a row sums to its weight for a head."""
        factors = self.weights[head] / np.maximum(self.sums(p), _TINY)
        scaled: Floats = p * self.spread(factors)
        return scaled

    def means(self, p: NDArray[np.floating], weights: Floats) -> Floats:
        """Return E_p[f] of the shared features as a mean over rows, for several p at once, (p, feature), 0 to 1.

        Args:
            p: (p, entry): probabilities; rows may have any sum. Products are taken in this dtype.
            weights: (p, row): the weights of rows.
        """
        factors = weights / np.maximum(self.sums(p), _TINY)
        # Scale each p so that a row sums to its weight, (p, entry).
        scaled = p * np.repeat(factors.astype(p.dtype), self.lengths, axis=1)
        means = np.zeros((len(p), self.n_shared))
        for start in range(0, self.size, _ENTRIES_AT_ONCE):
            some = slice(start, start + _ENTRIES_AT_ONCE)
            means += scaled[:, some] @ self.features[:, some].T.astype(p.dtype)
        return means / (self.levels - 1)

    # Terms

    def scores(
        self,
        terms: tuple[int, ...],
        weights: Floats,
        head: int,
    ) -> Floats:
        """Return Σ w f over some terms with weights w, (term,): the score of each entry, (entry,), in nats."""
        table = self.table(terms, head)
        return np.take(table.values @ weights, table.codes)

    def unscaled(
        self,
        terms: tuple[int, ...],
        weights: Floats,
        head: int,
    ) -> NDArray[np.float32]:
        """Return p ∝ n exp(Σ w f) with the weights w, (term,), not scaled to any sum of a row, (entry,), at least 0."""
        table = self.table(terms, head)
        scores = table.values @ weights
        p = np.exp(scores - scores.max(initial=0.0)).astype(np.float32)
        return (np.take(p, table.codes) * self.counts).astype(np.float32)

    def table(self, terms: tuple[int, ...], head: int) -> LevelCounts:
        """Count how often each combination of the terms' levels occurs in each row; tables are cached."""
        # A table of shared features is the same for all heads: it is cached under head -1.
        is_shared = max(terms, default=-1) < self.n_shared
        return self._cached_count(terms, -1 if is_shared else head)

    def _count(self, terms: tuple[int, ...], head: int) -> LevelCounts:
        """Count the combinations of the terms before the last with the last one's levels."""
        n_rows = len(self.texts)
        # Without terms there is one combination, which all keys have.
        if not terms:
            no_codes = np.zeros(self.size, np.int32)
            return LevelCounts(np.empty((1, 0)), no_codes, self.n_keys[:, None])
        # As digits: code = code of the terms before · number of the last one's levels + level of the last one.
        before = self.table(terms[:-1], head)
        last_values = self.values_of(terms[-1], head)
        n_last = len(last_values)
        codes = before.codes * np.int32(n_last)
        codes += self.levels_of(terms[-1], head)
        # The old code of each combination that stays: all, unless there may be many.
        stays = np.arange(len(before.values) * n_last)
        if len(stays) > _MAX_COMBINATIONS:
            occurs = np.bincount(codes, minlength=len(stays)) > 0
            stays = np.flatnonzero(occurs)
            new_codes = np.cumsum(occurs, dtype=np.int32) - 1
            codes = new_codes[codes]
        # The values of each combination, (combination, feature).
        values = np.column_stack([before.values[stays // n_last], last_values[stays % n_last]])
        shape = n_rows, len(stays)
        # Count by row: sparse if a dense table would be mostly zeros.
        n_cells = n_rows * len(stays)
        if n_cells > _DENSE_PER_ENTRY * self.size:
            sparse = sp.csr_array((self.counts, codes, self.starts), shape)
            return LevelCounts(values, codes, sparse)
        cells = self.spread(np.arange(n_rows) * len(stays)) + codes
        # If each entry is one key, counting entries is the same and faster.
        entry_counts = None if self.counts.max(initial=1.0) == 1 else self.counts
        counts = np.bincount(cells, entry_counts, n_cells).astype(np.float64)
        return LevelCounts(values, codes, counts.reshape(shape))


def starts_of(lengths: Integers) -> Integers:
    """Return where each row begins, and where the last one ends, (row + 1,), from the lengths of rows, (row,)."""
    return np.append(np.int64(0), np.cumsum(lengths))
