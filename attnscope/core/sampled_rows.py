"""Hold sampled rows of attention, features of their keys, and counts of these: all that fitting descriptions needs.

To fit p(k | q) ∝ n_k exp(Σ_f w_f f(q, k)), a head's attention is needed only through E_A[f]: see `descriptions`. What
features mean is known in `studies.describe`. Ours.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from attnscope.core.fit_tables import Floats, Table

_ENTRIES_AT_ONCE, _WEIGHTS_AT_ONCE = 2**16, 2**21
_TABLE_BYTES = _COLUMN_BYTES = 2**26
_MOST_DENSE, _MOST_CODES = 160, 1024


@dataclass(frozen=True, eq=False)
class Column:
    """A feature of one head alone: a level per key, times a level per query or per row; or a feature from some queries.

    The level at a (query, key) is the query's level times `n_key_levels`, plus the key's. A gated column has the levels
    of another feature if the query is in the gate, and one more level, the last, if not.

    Attributes:
        values: (level,): the value of each level, 0 to 1.
        rank: How simple the feature is; see `descriptions.describe`.
        keys: (type,): the level of each type of token as a key; None = the levels of the feature `key_feature`.
        queries: (type,): the level of each type as a query; None = all queries are alike, or `rows` has their levels.
        rows: (row,): the level of each sampled row.
        row_edges: Where each of these levels but the first begins, in what was quantised.
        key_feature: The number of a feature.
        n_key_levels: How many levels keys have.
        gate: The number of the gate, one of `Rows.gates`; -1 = the column holds for all queries.
        gated: The number of the feature that holds in the gate, one that all heads share.
    """

    values: Floats
    rank: int
    keys: NDArray[np.uint8] | None = None
    queries: NDArray[np.uint8] | None = None
    rows: NDArray[np.uint8] | None = None
    row_edges: Floats | None = None
    key_feature: int = -1
    n_key_levels: int = 2
    gate: int = -1
    gated: int = -1

    @property
    def is_of_keys(self) -> bool:
        """Say whether it holds for all queries alike."""
        return self.queries is None and self.gate < 0

    @property
    def query_values(self) -> Floats:
        """Return the value of each type as a query, (type,), at keys of the highest level."""
        assert self.queries is not None
        return self.values.reshape(-1, self.n_key_levels)[:, -1][self.queries]


def _nothing() -> NDArray[Any]:
    return np.empty(0, np.int64)


@dataclass(eq=False)
class Rows:
    """Sampled rows of some heads that may attend to the same keys, as descriptions need them.

    Attributes:
        features: (feature, entry), uint8: the level of each feature at each allowed (query, key); rows one after the
            other. A level stands for the value level / (levels - 1).
        levels: (feature,): how many levels each has; 2 = it holds or does not.
        starts: (row + 1,): where each row's entries begin.
        texts: (row,): the number of its text.
        attention: (head, entry), floating: weights, 0 to 1. The sum of a row is its mass, by which the row counts.
        counts: (entry,): how many keys an entry stands for; None = one each.
        key_types: (entry,): the type of each key's token; empty = all are alike.
        query_types: (row,): the type of each query's token.
        gates: (gate, row): which queries are in each class of queries.
        columns: For each head the features that it alone has; they are numbered after `features`.
        index: (row,): of selected rows, their numbers in the whole sample; empty = it is the whole sample.
        entries: (entry,): the same of entries.

    Raises:
        ValueError: Shapes do not fit together, or a row has no key.
    """

    features: NDArray[np.uint8]
    levels: NDArray[np.int64]
    starts: NDArray[np.int64]
    texts: NDArray[np.int64]
    attention: NDArray[np.floating]
    counts: Floats | None = None
    key_types: NDArray[np.int32] = field(default_factory=_nothing)
    query_types: NDArray[np.int32] = field(default_factory=_nothing)
    gates: NDArray[np.bool_] = field(default_factory=_nothing)
    columns: tuple[tuple[Column, ...], ...] = ()
    index: NDArray[np.int64] = field(default_factory=_nothing)
    entries: NDArray[np.int64] = field(default_factory=_nothing)
    _tables: OrderedDict[tuple[int, tuple[int, ...]], Table] = field(default_factory=OrderedDict, init=False)
    _columns: OrderedDict[tuple[int, int], NDArray[np.uint8]] = field(default_factory=OrderedDict, init=False)
    _shares: dict[tuple[int, int], float] = field(default_factory=dict, init=False)
    _scaled: tuple[int, Floats] = field(default=(-1, np.empty(0)), init=False)

    def __post_init__(self) -> None:
        n_rows = len(self.starts) - 1
        n_entries = int(self.starts[-1])
        fits = (
            self.features.shape == (len(self.levels), n_entries)
            and self.texts.shape == (n_rows,)
            and self.attention.shape == (self.n_heads, n_entries)
            and len(self.columns) in (0, self.n_heads)
        )
        if not fits:
            raise ValueError(
                f"features {self.features.shape}, starts {self.starts.shape}, texts {self.texts.shape}, weights "
                f"{self.attention.shape} and columns of {len(self.columns)} heads do not fit together"
            )
        if (self.lengths < 1).any():
            raise ValueError("a row has no key")
        if not len(self.key_types):
            self.key_types = np.zeros(n_entries, np.int32)
            self.query_types = self.query_types if len(self.query_types) else np.zeros(n_rows, np.int32)
        if not len(self.gates):
            self.gates = np.zeros((0, n_rows), np.bool_)
        if not len(self.index):
            self.index = np.arange(n_rows)
            self.entries = np.arange(n_entries)

    def select(self, rows: NDArray[np.int64]) -> Rows:
        """Copy some of the rows, by their numbers, (row,), ascending."""
        lengths = self.lengths[rows]
        starts = starts_of(lengths)
        entries = np.repeat(self.starts[rows] - starts[:-1], lengths) + np.arange(starts[-1])
        return Rows(
            features=self.features[:, entries],
            levels=self.levels,
            starts=starts,
            texts=self.texts[rows],
            attention=self.attention[:, entries],
            counts=None if self.counts is None else self.counts[entries],
            key_types=self.key_types[entries],
            query_types=self.query_types[rows],
            gates=self.gates[:, rows],
            columns=self.columns,
            index=self.index[rows],
            entries=self.entries[entries],
        )

    def of_texts(self, texts: Sequence[int]) -> Rows:
        """Copy the rows of some texts."""
        return self.select(np.flatnonzero(np.isin(self.texts, np.asarray(texts))))

    def give_columns(self, columns: tuple[tuple[Column, ...], ...]) -> None:
        """Give each head features of its own, instead of those that it had."""
        self.columns = columns
        self._tables.clear()
        self._columns.clear()
        self._shares.clear()

    # Sizes and weights of rows

    @property
    def n_heads(self) -> int:
        """Count the heads that the rows are of."""
        return len(self.attention)

    @property
    def n_shared(self) -> int:
        """Count the features that all heads share; numbers from there on are those of a head's own columns."""
        return len(self.levels)

    @property
    def size(self) -> int:
        """Count the entries."""
        return int(self.starts[-1])

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """Count the entries of each row, (row,)."""
        return np.diff(self.starts)

    @cached_property
    def first(self) -> NDArray[np.int64]:
        """Return where each row's entries begin, (row,)."""
        return self.starts[:-1]

    @cached_property
    def row_of(self) -> NDArray[np.int64]:
        """Return the row of each entry, (entry,)."""
        return np.repeat(np.arange(len(self.texts)), self.lengths)

    @cached_property
    def _n_keys(self) -> Floats:
        return np.ones(self.size) if self.counts is None else self.counts

    @cached_property
    def mass(self) -> Floats:
        """Return how much attention each row holds, 0 to 1, (row, head)."""
        return np.stack([np.add.reduceat(of_head, self.first, dtype=np.float64) for of_head in self.attention], 1)

    @cached_property
    def text_weights(self) -> Floats:
        """Return what each row counts if all have the same mass, (row,): each text's rows sum to the same, all to 1."""
        _, text, counts = np.unique(self.texts, return_inverse=True, return_counts=True)
        return 1.0 / (counts[text] * max(len(counts), 1))

    @cached_property
    def weights(self) -> Floats:
        """Return what each row counts for each head, (head, row): its text's weight times its mass; they sum to 1."""
        weights = (self.mass * self.text_weights[:, None]).T
        return np.ascontiguousarray(weights / np.maximum(weights.sum(1, keepdims=True), 1e-30))

    def scaled(self, head: int) -> Floats:
        """Return a head's attention with each row scaled to 1, (entry,); that of the last head asked for is kept."""
        if self._scaled[0] != head:
            mass = np.maximum(self.mass[:, head], 1e-30)
            self._scaled = head, self.attention[head].astype(np.float64) / mass[self.row_of]
        return self._scaled[1]

    @cached_property
    def entropies(self) -> Floats:
        """Return -Σ B ln(B / n), (row, head), in nats, of B, each row scaled to 1, and n, the entries' counts."""
        entropies = np.empty((len(self.texts), self.n_heads))
        for head in range(self.n_heads):
            scaled = self.scaled(head)
            by_key = scaled if self.counts is None else scaled / self.counts
            entropies[:, head] = -np.add.reduceat(scaled * np.log(np.maximum(by_key, 1e-300)), self.first)
        return entropies

    @cached_property
    def uniform_nats(self) -> Floats:
        """Return KL(B ‖ uniform) = ln n - H of each row, (row, head), in nats."""
        n_keys = self.lengths if self.counts is None else np.add.reduceat(self.counts, self.first)
        return np.maximum(np.log(n_keys)[:, None] - self.entropies, 0.0)

    @cached_property
    def mean_entropies(self) -> Floats:
        """Return the mean entropy of each head, (head,)."""
        means: Floats = np.einsum("hr,rh->h", self.weights, self.entropies)
        return means

    @cached_property
    def mean_nats(self) -> Floats:
        """Return the mean of KL(B ‖ uniform) of each head, (head,)."""
        means: Floats = np.einsum("hr,rh->h", self.weights, self.uniform_nats)
        return means

    # Features

    def column_of(self, feature: int, head: int) -> Column | None:
        """Return a head's own column by its number; None = all heads share the feature."""
        return None if feature < self.n_shared else self.columns[head][feature - self.n_shared]

    def own_features(self, head: int) -> range:
        """Return the numbers of the features that a head alone has."""
        return range(self.n_shared, self.n_shared + (len(self.columns[head]) if self.columns else 0))

    def is_fitted(self, feature: int, head: int) -> bool:
        """Say whether a term was fitted to this head alone."""
        column = self.column_of(feature, head)
        return column is not None and column.gate < 0

    def values_of(self, feature: int, head: int) -> Floats:
        """Return the values of a feature's levels, (level,), 0 to 1."""
        column = self.column_of(feature, head)
        if column is not None:
            return column.values
        n_levels = int(self.levels[feature])
        return np.arange(n_levels) / (n_levels - 1)

    def levels_of(self, feature: int, head: int) -> NDArray[np.uint8]:
        """Return the levels of a feature that all heads share, or that this head alone has, (entry,)."""
        column = self.column_of(feature, head)
        if column is None:
            shared: NDArray[np.uint8] = self.features[feature]
            return shared
        key = head, feature
        if key not in self._columns:
            self._columns[key] = self._make_levels(column, head)
            while len(self._columns) > max(16, _COLUMN_BYTES // max(1, self.size)):
                self._columns.popitem(last=False)
        self._columns.move_to_end(key)
        return self._columns[key]

    def _make_levels(self, column: Column, head: int) -> NDArray[np.uint8]:
        if column.gate >= 0:
            outside = np.uint8(len(column.values) - 1)
            levels: NDArray[np.uint8] = np.where(
                self.gates[column.gate][self.row_of], self.levels_of(column.gated, head), outside
            )
            return levels
        of_keys: NDArray[np.uint8] = self.features[column.key_feature]
        if column.keys is not None:
            of_keys = column.keys[self.key_types]
        of_rows = column.rows
        if of_rows is not None:
            of_rows = of_rows[self.index]
        if column.queries is not None:
            of_rows = column.queries[self.query_types]
        if of_rows is None:
            return of_keys
        first_of_row = (of_rows * np.uint8(column.n_key_levels))[self.row_of]
        levels_of_both: NDArray[np.uint8] = np.add(first_of_row, of_keys, dtype=np.uint8)
        return levels_of_both

    def by_entry(self, feature: int, head: int) -> Floats:
        """Return the values of a feature, (entry,), 0 to 1."""
        return self.values_of(feature, head)[self.levels_of(feature, head)]

    @cached_property
    def varies_in(self) -> NDArray[np.int64]:
        """Count the texts in which a shared feature has more than one level in some row, (feature,)."""
        n_texts = np.zeros(self.n_shared, np.int64)
        for number, levels in enumerate(self.features if len(self.texts) else ()):
            varies = np.maximum.reduceat(levels, self.first) > np.minimum.reduceat(levels, self.first)
            n_texts[number] = len(np.unique(self.texts[varies]))
        return n_texts

    def variance(self, feature: int, head: int = 0) -> float:
        """Return how much a feature varies within a row under uniform attention: the mean variance, 0 to 1/4."""
        values = self.by_entry(feature, head)
        mean = np.add.reduceat(values, self.first) / self.lengths
        square = np.add.reduceat(values * values, self.first) / self.lengths
        return float(self.text_weights @ (square - mean**2))

    @cached_property
    def graded_variances(self) -> Floats:
        """Return the same of the features that all heads share, (feature,); 0 for those of 2 levels."""
        return np.array([self.variance(n) if self.levels[n] > 2 else 0.0 for n in range(self.n_shared)])

    # Means of features

    @cached_property
    def expected(self) -> Floats:
        """Return the means of E_A[f] of the features that all heads share, (head, feature)."""
        means = np.empty((self.n_heads, self.n_shared))
        at_once = max(1, _WEIGHTS_AT_ONCE // max(1, self.size))
        for start in range(0, self.n_heads, at_once):
            some = slice(start, start + at_once)
            means[some] = self.means(self.attention[some].astype(np.float64), self.weights[some])
        return means

    def share(self, feature: int, head: int) -> float:
        """Return the mean of E_A[f] of any feature, 0 to 1."""
        if feature < self.n_shared:
            return float(self.expected[head, feature])
        if (feature, head) not in self._shares:
            self._shares[feature, head] = self.mean_under([feature], head, self.scaled(head))[0]
        return self._shares[feature, head]

    def even(self, feature: int, head: int) -> float:
        """Return the same under uniform attention."""
        return self.mean_under([feature], head, self._n_keys)[0]

    def mean_under(self, features: Sequence[int], head: int, unscaled: NDArray[np.floating]) -> list[float]:
        """Return the means of E_p[f] of some features, 0 to 1, for p that is known up to a factor of each row.

        Args:
            features: Their numbers.
            head: The head whose rows' weights count.
            unscaled: (entry,): p times any factor of its row above 0.
        """
        sums = np.add.reduceat(unscaled, self.first, dtype=np.float64)
        p = unscaled * (self.weights[head] / np.maximum(sums, 1e-30))[self.row_of]
        return [float(self.by_entry(feature, head) @ p) for feature in features]

    def means(self, unscaled: NDArray[np.floating], weights: Floats) -> Floats:
        """Return the means of E_p[f] of the shared features for several p at once, (p, feature), 0 to 1.

        Args:
            unscaled: (p, entry): probabilities up to a factor of each row; sums have their precision.
            weights: (p, row): what rows count.
        """
        sums = np.maximum(np.add.reduceat(unscaled, self.first, axis=1, dtype=np.float64), 1e-30)
        scaled = unscaled * (weights / sums).astype(unscaled.dtype)[:, self.row_of]
        means = np.zeros((len(unscaled), self.n_shared))
        for start in range(0, self.size, _ENTRIES_AT_ONCE):
            some = slice(start, start + _ENTRIES_AT_ONCE)
            means += scaled[:, some] @ self.features[:, some].T.astype(unscaled.dtype)
        return means / (self.levels - 1)

    # What terms expect

    def scores(self, terms: tuple[int, ...], weights: Floats, head: int) -> Floats:
        """Return Σ w f of some terms, (entry,), in nats."""
        table = self.table(terms, head)
        return (table.values @ weights)[table.places]

    def unscaled(self, terms: tuple[int, ...], weights: Floats, head: int) -> NDArray[np.float32]:
        """Return p of some terms up to a factor of each row, (entry,), at least 0."""
        table = self.table(terms, head)
        scores = table.values @ weights
        p: NDArray[np.float32] = np.exp(scores - scores.max(initial=0.0)).astype(np.float32)[table.places]
        return p if self.counts is None else (p * self.counts).astype(np.float32)

    def table(self, terms: tuple[int, ...], head: int) -> Table:
        """Count how often each combination of some terms' levels occurs in each row; some tables are kept."""
        key = (head if max(terms, default=-1) >= self.n_shared else -1), terms
        if key not in self._tables:
            self._tables[key] = self._count(terms, head)
            # All are of one size, except for a few.
            while len(self._tables) > max(2, _TABLE_BYTES // max(1, self._tables[key].n_bytes)):
                self._tables.popitem(last=False)
        self._tables.move_to_end(key)
        return self._tables[key]

    def _count(self, terms: tuple[int, ...], head: int) -> Table:
        """Count the combinations: those of all but the last term, each with the last one's levels."""
        n_rows = len(self.texts)
        if not terms:
            counts = self.lengths if self.counts is None else np.add.reduceat(self.counts, self.first)
            return Table(np.empty((1, 0)), counts[:, None].astype(np.float64), self.row_of, self.row_of)
        before = self.table(terms[:-1], head)
        levels = self.levels_of(terms[-1], head)
        last = self.values_of(terms[-1], head)
        size = len(before.values) * len(last)
        seen = np.arange(size)
        cells = None
        if size <= _MOST_DENSE and before.cells is not None:
            cells = before.cells * len(last)
            cells += levels
            counts = np.bincount(cells, self.counts, n_rows * size).reshape(n_rows, size).astype(np.float64)
        else:  # most are in few rows
            places = before.places * np.int32(len(last))
            places += levels
            if size > _MOST_CODES:  # else those that never occur do no harm
                seen = np.flatnonzero(np.bincount(places, minlength=size))
                number = np.zeros(size, np.int32)
                number[seen] = np.arange(len(seen), dtype=np.int32)
                places = number[places]
            counts = sp.csr_array((self._n_keys, places, self.starts), (n_rows, len(seen)))
        values = np.concatenate([before.values[seen // len(last)], last[seen % len(last)][:, None]], 1)
        return Table(values, counts, self.row_of, cells)


def starts_of(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return where each of some rows begins, and where the last ends, (row + 1,)."""
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
