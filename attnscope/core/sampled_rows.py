"""Hold sampled rows of attention with features of their keys, and count how often features occur together in a row.

`descriptions` fits p(k | q) ∝ n_k exp(Σ_f w_f f(q, k)) to the rows. `studies.describe` gives features their meaning. An
*entry* is a key that the query of a sampled row may attend to, or n_k keys with equal features. A *feature* f has a
value from 0 to 1 for each entry, and few distinct values: its *levels*. The features of a description are its *terms*.
The method is ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from attnscope.arrays import Floats, Integers, Levels

_MAX_ENTRIES_PER_PRODUCT = 2**16
"""The most entries whose features are multiplied with attention at once."""

_MAX_FLOAT64_WEIGHTS = 2**21
"""About the most attention weights that are copied to float64 at once."""

_MAX_TABLE_BYTES = 2**26
"""About the most memory of cached tables (`LevelCounts`)."""

_MAX_COMBINATIONS = 1024
"""The most combinations of levels that a table lists in full. A larger table lists only combinations that occur."""

_MAX_DENSE_PER_ENTRY = 4
"""The most numbers per entry of a table's dense array of counts. A table that needs more has a sparse array."""

_MIN_DIVISOR = 1e-30
"""Replaces a divisor of 0, so that a row without attention stays 0."""


@dataclass(frozen=True, eq=False)
class FittedFeature:
    """Hold a feature that is fitted to one head: a value of the query's type, 0 to 1, times a value of the key's type.

    A type is a token of the vocabulary.

    Attributes:
        rank: The order of simplicity, 0 = simplest. Among features that explain equally much, the simplest is chosen.
        key_values: (level,): the value of each level of keys.
        key_levels: (type,): the level of each type as a key.
        query_values: (level,): the value of each level of queries.
        query_levels: (type,): the level of each type as a query; None = all queries have the one level, 0.
    """

    rank: int
    key_values: Floats
    key_levels: Levels
    query_values: Floats = field(default_factory=lambda: np.ones(1))
    query_levels: Levels | None = None

    @cached_property
    def products(self) -> tuple[Floats, Levels]:
        """Return the distinct products of a query value and a key value, (level,), and the index of each product.

        The indices have the shape (query level, key level).
        """
        # Rounded, so that products that differ by rounding alone are one level.
        products = np.outer(self.query_values, self.key_values).round(12)
        values, levels = np.unique(products, return_inverse=True)
        return values, levels.reshape(products.shape).astype(np.uint8)


@dataclass(frozen=True, eq=False)
class LevelCounts:
    """Hold how often each combination of some features' levels occurs in each row.

    Attributes:
        values: (combination, feature): the features' values.
        codes: (entry,): the index of each entry's combination.
        counts: (row, combination): how many keys of a row have the combination.
    """

    values: Floats
    codes: NDArray[np.int32]
    counts: Floats | sp.csr_array

    @cached_property
    def counts_by_combination(self) -> Floats | sp.csc_array:
        """Return the counts transposed, (combination, row). They are cached, because SciPy transposes slowly."""
        return self.counts.T

    def log_sums(self, weights: Floats) -> Floats:
        """Return ln Z of each row, (row,), in nats: Z sums exp(Σ w f) over its keys, with weights w, (feature,)."""
        # The largest score is subtracted, so that the exponential does not overflow.
        scores = self.values @ weights
        top = scores.max(initial=0.0)
        log_sums: Floats = np.log(self.counts @ np.exp(scores - top)) + top
        return log_sums


def _make_empty_array() -> NDArray[Any]:
    """Return an empty array: the default of a field, which `RowSample.__post_init__` replaces."""
    return np.empty(0, np.int64)


@dataclass(eq=False)
class RowSample:
    """Hold sampled rows of some heads, all of which may attend to the same keys.

    The entries of all rows are on one axis, row after row. A feature is known by its index: 0 to n_shared - 1 are the
    features that all heads share, and from n_shared on come the features of a head's own `columns`.

    Attributes:
        features: (feature, entry), uint8: the level of each shared feature. Level i of n has the value i / (n - 1).
        levels: (feature,): the number of levels of each shared feature; 2 = it is binary.
        starts: (row + 1,): the index of each row's first entry, and the number of entries; no row is empty.
        texts: (row,): the index of the text.
        attention: (head, entry), floating: weights, 0 to 1. The sum over a row is its mass, which weights the row.
        counts: (entry,): the number of keys that an entry stands for; empty = 1.
        key_types: (entry,): the type of each key's token; empty = one type for all.
        query_types: (row,): the type of each query's token; empty = one type for all.
        columns: For each head its own features; empty = no head has own features.
        index: (row,): the index of each row in the full sample, from which `select` copied it; empty = 0, 1, 2, ….
        entries: (entry,): the index of each entry in the full sample; empty = 0, 1, 2, ….
    """

    features: Levels
    levels: Integers
    starts: Integers
    texts: Integers
    attention: NDArray[np.floating]
    counts: Floats = field(default_factory=_make_empty_array)
    key_types: NDArray[np.int32] = field(default_factory=_make_empty_array)
    query_types: NDArray[np.int32] = field(default_factory=_make_empty_array)
    columns: tuple[tuple[FittedFeature, ...], ...] = ()
    index: Integers = field(default_factory=_make_empty_array)
    entries: Integers = field(default_factory=_make_empty_array)

    def __post_init__(self) -> None:
        # Replace empty arrays by defaults: one key per entry, one type for all, and the indices of a full sample.
        n_rows = len(self.texts)
        defaults = {
            "counts": np.ones(self.size),
            "key_types": np.zeros(self.size, np.int32),
            "query_types": np.zeros(n_rows, np.int32),
            "index": np.arange(n_rows),
            "entries": np.arange(self.size),
        }
        for name, array in defaults.items():
            if not len(getattr(self, name)):
                setattr(self, name, array)
        # Cache the latest results of `_count`, about _TABLE_BYTES at 16 bytes an entry, and at least 16.
        n_kept = max(16, _MAX_TABLE_BYTES // (16 * self.size + 1))
        self._cached_count = lru_cache(n_kept)(self._count)

    def select(self, rows: Integers) -> RowSample:
        """Copy some of the rows, by their indices in this object, (row,), ascending."""
        # Where the selected rows begin in the copy, and their distance from there in this object.
        lengths = self.lengths[rows]
        starts = starts_from_lengths(lengths)
        distances = self.starts[rows] - starts[:-1]
        # The index in this object of each entry of the copy, (entry,).
        copied_entries = np.arange(starts[-1]) + np.repeat(distances, lengths)
        return replace(
            self,
            features=self.features[:, copied_entries],
            starts=starts,
            texts=self.texts[rows],
            attention=self.attention[:, copied_entries],
            counts=self.counts[copied_entries],
            key_types=self.key_types[copied_entries],
            query_types=self.query_types[rows],
            index=self.index[rows],
            entries=self.entries[copied_entries],
        )

    def select_texts(self, texts: Sequence[int]) -> RowSample:
        """Copy the rows of some texts."""
        return self.select(np.flatnonzero(np.isin(self.texts, texts)))

    def set_columns(self, columns: tuple[tuple[FittedFeature, ...], ...]) -> None:
        """Replace each head's own features, and clear the cache of tables, which were counted with the old features."""
        self.columns = columns
        self._cached_count.cache_clear()

    # Sizes and weights of rows

    @property
    def n_heads(self) -> int:
        """Count the heads."""
        return len(self.attention)

    @property
    def n_shared(self) -> int:
        """Count the features that all heads share. Feature `n_shared` is the first of a head's own columns."""
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
    def row_of_entry(self) -> Integers:
        """Return the row of each entry, (entry,)."""
        return np.repeat(np.arange(len(self.texts)), self.lengths)

    def sums(self, values: NDArray[np.floating]) -> Floats:
        """Sum values over the entries of each row, in float64: (..., entry) to (..., row)."""
        sums: Floats = np.add.reduceat(values, self.starts[:-1], axis=-1, dtype=np.float64)
        return sums

    def repeat_rows(self, row_values: NDArray[Any]) -> NDArray[Any]:
        """Give each entry the value of its row, in the same dtype: (row,) to (entry,)."""
        return np.repeat(row_values, self.lengths)

    @cached_property
    def n_keys(self) -> Floats:
        """Count the keys of each row, (row,). An entry may stand for several keys."""
        return self.sums(self.counts)

    @cached_property
    def mass(self) -> Floats:
        """Return the summed attention of each row, 0 to 1, (row, head)."""
        return np.stack([self.sums(head_weights) for head_weights in self.attention], 1)

    @cached_property
    def text_weights(self) -> Floats:
        """Return the weight of each row if masses were equal, (row,): texts weigh the same, and all rows sum to 1."""
        _, text_index, n_rows = np.unique(self.texts, return_inverse=True, return_counts=True)
        return 1.0 / (n_rows[text_index] * len(n_rows))

    @cached_property
    def weights(self) -> Floats:
        """Return the weight of each row for each head, (head, row): `text_weights` times mass, scaled to a sum of 1."""
        weights = (self.mass * self.text_weights[:, None]).T
        totals = weights.sum(1, keepdims=True)
        return np.ascontiguousarray(weights / np.maximum(totals, _MIN_DIVISOR))

    def normalise_rows(self, head: int) -> Floats:
        """Return a head's attention with each row scaled to sum to 1, (entry,)."""
        factors = 1 / np.maximum(self.mass[:, head], _MIN_DIVISOR)
        scaled: Floats = self.attention[head].astype(np.float64) * self.repeat_rows(factors)
        return scaled

    @cached_property
    def entropies(self) -> Floats:
        """Return H = -Σ B ln(B / n_k) of each row, (row, head), in nats; B is its attention, scaled to sum to 1."""
        entropies = np.empty((len(self.texts), self.n_heads))
        for head in range(self.n_heads):
            scaled = self.normalise_rows(head)
            # 0 · ln 0 is 0: replacing 0 by a tiny number makes the logarithm finite, so that the product is 0.
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
        """Return the column of one of the head's own features; None for a feature that all heads share."""
        return None if feature < self.n_shared else self.columns[head][feature - self.n_shared]

    def own_columns(self, head: int) -> tuple[FittedFeature, ...]:
        """Return the head's own features, which have the indices from `n_shared` on."""
        return self.columns[head] if self.columns else ()

    def values_of(self, feature: int, head: int = 0) -> Floats:
        """Return the value of each level of a feature, (level,), 0 to 1."""
        column = self.column_of(feature, head)
        if column is None:
            return np.linspace(0, 1, int(self.levels[feature]))
        values, _ = column.products
        return values

    def levels_of(self, feature: int, head: int) -> Levels:
        """Return the level of a feature at each entry, (entry,). The levels of own features are those of `products`."""
        column = self.column_of(feature, head)
        if column is None:
            return np.asarray(self.features[feature])
        # The level of each pair, (query level, key level), read in flattened form. With one query level the index of a
        # pair is the key level.
        _, pair_levels = column.products
        pairs = column.key_levels[self.key_types]
        if column.query_levels is not None:
            # Else the index is query level · number of key levels + key level.
            n_key_levels = np.int32(pair_levels.shape[1])
            query_levels = column.query_levels[self.query_types]
            pairs = pairs + self.repeat_rows(query_levels * n_key_levels)
        return pair_levels.ravel()[pairs]

    def by_entry(self, feature: int, head: int) -> Floats:
        """Return the values of a feature, (entry,), 0 to 1."""
        return np.take(self.values_of(feature, head), self.levels_of(feature, head))

    @cached_property
    def n_varying_texts(self) -> Integers:
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
        """Return the variance of values, (entry,), under uniform attention, a mean over rows, 0 to 1/4."""
        means = self.sums(values * self.counts) / self.n_keys
        squares = self.sums(values * values * self.counts) / self.n_keys
        return float(self.text_weights @ (squares - means**2))

    @cached_property
    def graded_variances(self) -> Floats:
        """Return the `variance` of each shared feature with more than 2 levels, (feature,); 0 for binary features."""
        variances = np.zeros(self.n_shared)
        for feature in np.flatnonzero(self.levels > 2):
            variances[feature] = self.variance(self.by_entry(int(feature), 0))
        return variances

    # Means of features

    @cached_property
    def expected(self) -> Floats:
        """Return E_A[f] of the shared features under each head's attention A, a mean over rows, (head, feature)."""
        means = np.empty((self.n_heads, self.n_shared))
        n_per_chunk = max(1, _MAX_FLOAT64_WEIGHTS // max(1, self.size))
        for start in range(0, self.n_heads, n_per_chunk):
            chunk = slice(start, start + n_per_chunk)
            means[chunk] = self.means(self.attention[chunk].astype(np.float64), self.weights[chunk])
        return means

    def weight_rows(self, p: NDArray[np.floating], head: int) -> Floats:
        """Scale p, (entry,), so that each row sums to its weight for a head. Rows of p may have any sum."""
        factors = self.weights[head] / np.maximum(self.sums(p), _MIN_DIVISOR)
        scaled: Floats = p * self.repeat_rows(factors)
        return scaled

    def means(self, p: NDArray[np.floating], weights: Floats) -> Floats:
        """Return E_p[f] of the shared features as a mean over rows, for several p at once, (p, feature), 0 to 1.

        Args:
            p: (p, entry): unnormalised probabilities. Their dtype is that of the products.
            weights: (p, row): the weights of rows.
        """
        factors = weights / np.maximum(self.sums(p), _MIN_DIVISOR)
        # Scale each p so that a row sums to its weight, (p, entry).
        scaled = p * np.repeat(factors.astype(p.dtype), self.lengths, axis=1)
        means = np.zeros((len(p), self.n_shared))
        for start in range(0, self.size, _MAX_ENTRIES_PER_PRODUCT):
            chunk = slice(start, start + _MAX_ENTRIES_PER_PRODUCT)
            means += scaled[:, chunk] @ self.features[:, chunk].T.astype(p.dtype)
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

    def unnormalised_probabilities(
        self,
        terms: tuple[int, ...],
        weights: Floats,
        head: int,
    ) -> NDArray[np.float32]:
        """Return p ∝ n exp(Σ w f) with the weights w, (term,), at least 0, (entry,). Rows do not sum to 1."""
        table = self.table(terms, head)
        scores = table.values @ weights
        p = np.exp(scores - scores.max(initial=0.0)).astype(np.float32)
        return (np.take(p, table.codes) * self.counts).astype(np.float32)

    def table(self, terms: tuple[int, ...], head: int) -> LevelCounts:
        """Count how often each combination of the terms' levels occurs in each row; tables are cached."""
        # A table of shared features is the same for all heads, so it is cached once, as that of head -1.
        is_shared = max(terms, default=-1) < self.n_shared
        return self._cached_count(terms, -1 if is_shared else head)

    def _count(self, terms: tuple[int, ...], head: int) -> LevelCounts:
        """Count combinations: those of all terms but the last, from their table, times the levels of the last term."""
        n_rows = len(self.texts)
        # Without terms there is one combination, which all keys have.
        if not terms:
            zero_codes = np.zeros(self.size, np.int32)
            return LevelCounts(np.empty((1, 0)), zero_codes, self.n_keys[:, None])
        # Codes are like digits: code of the earlier terms · number of levels of the last term + level of the last term.
        prefix_table = self.table(terms[:-1], head)
        last_values = self.values_of(terms[-1], head)
        n_last_levels = len(last_values)
        codes = prefix_table.codes * np.int32(n_last_levels)
        codes += self.levels_of(terms[-1], head)
        # The code of each combination that the table keeps: all, or only those that occur, if there are many.
        kept_codes = np.arange(len(prefix_table.values) * n_last_levels)
        if len(kept_codes) > _MAX_COMBINATIONS:
            is_used = np.bincount(codes, minlength=len(kept_codes)) > 0
            kept_codes = np.flatnonzero(is_used)
            new_codes = np.cumsum(is_used, dtype=np.int32) - 1
            codes = new_codes[codes]
        # Read codes back as digits, for the values of each combination, (combination, feature).
        values = np.column_stack(
            [prefix_table.values[kept_codes // n_last_levels], last_values[kept_codes % n_last_levels]]
        )
        shape = n_rows, len(kept_codes)
        # Count the keys of each combination by row. The array is sparse if a dense one would be mostly zeros.
        n_cells = n_rows * len(kept_codes)
        if n_cells > _MAX_DENSE_PER_ENTRY * self.size:
            sparse = sp.csr_array((self.counts, codes, self.starts), shape)
            return LevelCounts(values, codes, sparse)
        cells = self.repeat_rows(np.arange(n_rows) * len(kept_codes)) + codes
        # If each entry is one key, counting entries gives the same numbers, and is faster.
        entry_counts = None if self.counts.max(initial=1.0) == 1 else self.counts
        counts = np.bincount(cells, entry_counts, n_cells).astype(np.float64)
        return LevelCounts(values, codes, counts.reshape(shape))


def starts_from_lengths(lengths: Integers) -> Integers:
    """Return the start of each row, and the end of the last row, (row + 1,), from the lengths of rows, (row,)."""
    return np.append(np.int64(0), np.cumsum(lengths))
