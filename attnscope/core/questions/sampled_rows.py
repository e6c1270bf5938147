"""Sampled rows of attention, with what descriptions are fitted to: features of their keys, and counts of these. Ours.

To fit p(k | q) ∝ n_k exp(Σ_f w_f f(q, k)), a head's attention is needed only through E_A[f]: see `descriptions`.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from attnscope.core.questions.level_tables import Floats, Table

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
        rows: (row,): the level of each row.
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


@dataclass(frozen=True, eq=False)
class Rows:
    """Sampled rows of some heads that may attend to the same keys, as descriptions need them.

    Attributes:
        features: (feature, entry), uint8: the level of each feature at each allowed (query, key); rows one after the
            other. A level stands for the value level / (levels - 1).
        levels: (feature,): how many levels each has; 2 = it holds or does not.
        starts: (row + 1,): where each row's entries begin.
        texts: (row,): the number of its text.
        weights: (head, entry), floating: attention, 0 to 1. The sum of a row is its mass, by which the row counts.
        counts: (entry,): how many keys an entry stands for; None = one each.
        key_types: (entry,): the type of each key's token; None = types are not known.
        query_types: (row,): the type of each query's token.
        gates: (gate, row): which queries are in each class of queries.
        columns: For each head the features that it alone has; they are numbered after `features`.

    Raises:
        ValueError: Shapes do not fit together, or a row has no key.
    """

    features: NDArray[np.uint8]
    levels: NDArray[np.int64]
    starts: NDArray[np.int64]
    texts: NDArray[np.int64]
    weights: NDArray[np.floating]
    counts: Floats | None = None
    key_types: NDArray[np.int32] | None = None
    query_types: NDArray[np.int32] | None = None
    gates: NDArray[np.bool_] | None = None
    columns: tuple[tuple[Column, ...], ...] = ()

    def __post_init__(self) -> None:
        n_rows, n_features = len(self.starts) - 1, len(self.levels)
        fits = (
            self.features.shape == (n_features, self.starts[-1])
            and self.texts.shape == (n_rows,)
            and self.weights.shape == (len(self.weights), self.starts[-1])
            and len(self.columns) in (0, len(self.weights))
        )
        if not fits:
            raise ValueError(
                f"features {self.features.shape}, starts {self.starts.shape}, texts {self.texts.shape}, weights "
                f"{self.weights.shape} and columns of {len(self.columns)} heads do not fit together"
            )
        if (np.diff(self.starts) < 1).any():
            raise ValueError("a row has no key")

    @property
    def n_heads(self) -> int:
        """How many heads the rows are of."""
        return len(self.weights)

    @cached_property
    def mass(self) -> Floats:
        """(row, head): how much attention each row holds, 0 to 1."""
        return np.stack([np.add.reduceat(w, self.starts[:-1], dtype=np.float64) for w in self.weights], 1)

    @cached_property
    def entropies(self) -> Floats:
        """(row, head): -Σ B ln(B / n), in nats, of B, each row's attention scaled to 1, and n, the entries' counts."""
        entropies = np.empty((len(self.texts), self.n_heads))
        for head, of_head in enumerate(self.weights):
            scaled = of_head / np.repeat(np.maximum(self.mass[:, head], 1e-30), np.diff(self.starts))
            logs = np.log(np.maximum(scaled if self.counts is None else scaled / self.counts, 1e-300))
            entropies[:, head] = -np.add.reduceat(scaled * logs, self.starts[:-1])
        return entropies

    @cached_property
    def uniform_nats(self) -> Floats:
        """KL(B ‖ uniform) = ln n - H of each row, (row, head), in nats."""
        n = np.diff(self.starts) if self.counts is None else np.add.reduceat(self.counts, self.starts[:-1])
        return np.maximum(np.log(n)[:, None] - self.entropies, 0.0)

    def of_texts(self, texts: Sequence[int]) -> "Part":
        """The rows of some texts, each text weighing the same."""
        return Part(self, np.flatnonzero(np.isin(self.texts, np.asarray(texts))))


@dataclass(frozen=True, eq=False)
class Part:
    """Some rows, and what their texts weigh."""

    rows: Rows
    index: NDArray[np.int64]
    _tables: OrderedDict[tuple[int, tuple[int, ...]], Table] = field(default_factory=OrderedDict)
    _columns: OrderedDict[tuple[int, int], NDArray[np.uint8]] = field(default_factory=OrderedDict)
    _expected: dict[int, Floats] = field(default_factory=dict)
    _attention: dict[int, Floats] = field(default_factory=dict)
    _shares: dict[tuple[int, int], float] = field(default_factory=dict)
    _spreads: dict[int, Floats] = field(default_factory=dict)

    @cached_property
    def texts(self) -> NDArray[np.int64]:
        """(row,): the number of each row's text."""
        return self.rows.texts[self.index]

    @cached_property
    def text_weights(self) -> Floats:
        """(row,): what each counts if all rows have the same mass; they sum to 1, and each text's to the same."""
        _, which, counts = np.unique(self.texts, return_inverse=True, return_counts=True)
        return 1.0 / (counts[which] * max(len(counts), 1))

    @cached_property
    def mass(self) -> Floats:
        """(row, head): how much attention each row holds."""
        return self.rows.mass[self.index]

    @cached_property
    def weights(self) -> Floats:
        """(head, row): what each row counts for each head, its text's weight times its mass; they sum to 1."""
        weights = (self.mass * self.text_weights[:, None]).T
        scaled: Floats = weights / np.maximum(weights.sum(1, keepdims=True), 1e-30)
        return np.ascontiguousarray(scaled)

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """(row,): how many entries each has."""
        return np.diff(self.rows.starts)[self.index]

    @cached_property
    def first(self) -> NDArray[np.int64]:
        """(row,): where each row's entries begin in this part."""
        return np.concatenate([[0], np.cumsum(self.lengths)[:-1]])[: len(self.index)].astype(np.int64)

    @cached_property
    def row_of(self) -> NDArray[np.int64]:
        """(entry,): the number of each entry's row in this part."""
        return np.repeat(np.arange(len(self.index)), self.lengths)

    @cached_property
    def entries(self) -> slice | NDArray[np.int64]:
        """Which entries of the rows belong to this part; a slice if possible, so that it makes views."""
        starts = self.rows.starts
        if not len(self.index):
            return slice(0, 0)
        if self.index[-1] - self.index[0] + 1 == len(self.index):
            return slice(int(starts[self.index[0]]), int(starts[self.index[-1] + 1]))
        return np.repeat(starts[self.index] - self.first, self.lengths) + np.arange(self.size)

    @cached_property
    def levels(self) -> NDArray[np.uint8]:
        """(feature, entry): levels of the features that all heads share."""
        return self.rows.features[:, self.entries]

    @cached_property
    def key_types(self) -> NDArray[np.int32]:
        """(entry,): the type of each key's token."""
        assert self.rows.key_types is not None
        return self.rows.key_types[self.entries]

    @cached_property
    def query_types(self) -> NDArray[np.int32]:
        """(row,): the type of each query's token."""
        assert self.rows.query_types is not None
        return self.rows.query_types[self.index]

    @cached_property
    def gates(self) -> NDArray[np.bool_]:
        """(gate, row): which queries are in each gate."""
        assert self.rows.gates is not None
        return self.rows.gates[:, self.index]

    @cached_property
    def counts(self) -> Floats | None:
        """(entry,): how many keys each stands for; None = one each."""
        return None if self.rows.counts is None else self.rows.counts[self.entries]

    def attention(self, head: int) -> Floats:
        """(entry,): a head's attention, each row scaled to 1."""
        if head not in self._attention:
            self._attention.clear()  # heads come one after the other
            on = self.rows.weights[head, self.entries].astype(np.float64)
            on /= np.maximum(self.mass[:, head], 1e-30)[self.row_of]
            self._attention[head] = on
        return self._attention[head]

    @property
    def size(self) -> int:
        """How many entries there are."""
        return int(self.lengths.sum())

    @property
    def n_shared(self) -> int:
        """How many features all heads share; numbers from there on are those of a head's own columns."""
        return len(self.rows.levels)

    def own_columns(self, head: int) -> tuple[Column, ...]:
        """The features that a head alone has."""
        return self.rows.columns[head] if self.rows.columns else ()

    def column(self, feature: int, head: int) -> NDArray[np.uint8]:
        """(entry,): the levels of a feature, whether all heads share it or this head alone has it."""
        if feature < self.n_shared:
            shared: NDArray[np.uint8] = self.levels[feature]
            return shared
        if (head, feature) not in self._columns:
            self._columns[head, feature] = self._make_column(feature, head)
            while len(self._columns) > max(16, _COLUMN_BYTES // max(1, self.size)):
                self._columns.popitem(last=False)
        self._columns.move_to_end((head, feature))
        return self._columns[head, feature]

    def _make_column(self, feature: int, head: int) -> NDArray[np.uint8]:
        own = self.own_columns(head)[feature - self.n_shared]
        if own.gate >= 0:
            outside = np.uint8(len(own.values) - 1)
            return np.where(self.gates[own.gate][self.row_of], self.column(own.gated, head), outside)
        of_keys = self.levels[own.key_feature] if own.keys is None else own.keys[self.key_types]
        if own.queries is not None:
            of_rows = own.queries[self.query_types]
        elif own.rows is not None:
            of_rows = own.rows[self.index]
        else:
            return np.asarray(of_keys, np.uint8)
        return (of_rows * np.uint8(own.n_key_levels))[self.row_of] + of_keys

    def is_fitted(self, feature: int, head: int) -> bool:
        """Whether a term was fitted to this head alone."""
        if feature < self.n_shared:
            return False
        own = self.own_columns(head)[feature - self.n_shared]
        return own.gate < 0

    def values_of(self, feature: int, head: int) -> Floats:
        """(level,): the values of a feature's levels."""
        if feature >= self.n_shared:
            return self.own_columns(head)[feature - self.n_shared].values
        n = int(self.rows.levels[feature])
        return np.arange(n) / (n - 1)

    def expected(self, heads: Sequence[int]) -> list[Floats]:
        """For each head the means of E_A[f], (feature,), of the features that all heads share."""
        missing = [head for head in heads if head not in self._expected]
        at_once = max(1, _WEIGHTS_AT_ONCE // max(1, self.size))
        for start in range(0, len(missing), at_once):
            some = missing[start : start + at_once]
            rows = self.rows.weights if len(some) == self.rows.n_heads else self.rows.weights[some]  # no copy of all
            on = rows[:, self.entries]
            self._expected.update(zip(some, self.means(on.astype(np.float64), self.weights[some]), strict=True))
        return [self._expected[head] for head in heads]

    def share(self, feature: int, head: int) -> float:
        """The mean of E_A[f] of any feature, 0 to 1."""
        if (feature, head) not in self._shares:
            self._shares[feature, head] = self.mean_under([feature], head, self.attention(head))[0]
        return self._shares[feature, head]

    def even(self, feature: int, head: int) -> float:
        """The same under uniform attention."""
        counts = np.ones(self.size) if self.counts is None else self.counts
        return self.mean_under([feature], head, counts)[0]

    def mean_under(self, features: Sequence[int], head: int, unscaled: NDArray[np.floating]) -> list[float]:
        """The means of E_p[f] of some features, 0 to 1, for p that is known up to a factor of each row."""
        sums = np.add.reduceat(unscaled, self.first, dtype=np.float64)
        p = unscaled * (self.weights[head] / np.maximum(sums, 1e-30))[self.row_of]

        def mean(feature: int) -> float:
            values = self.values_of(feature, head)
            return float(values @ np.bincount(self.column(feature, head), p, len(values)))

        return [mean(feature) for feature in features]

    @cached_property
    def variances(self) -> Floats:
        """(feature,): how much features vary within a row under uniform attention; 0 for those of 2 levels."""
        variances = np.zeros(len(self.levels))
        for number in np.flatnonzero(self.rows.levels > 2):
            variances[number] = self._variance(self.values_of(int(number), 0)[self.levels[number]])
        return variances

    def own_variances(self, head: int) -> Floats:
        """The same of the features that a head alone has."""
        if head not in self._spreads:
            numbers = range(self.n_shared, self.n_shared + len(self.own_columns(head)))
            spreads = [self._variance(self.values_of(f, head)[self.column(f, head)]) for f in numbers]
            self._spreads[head] = np.array(spreads)
        return self._spreads[head]

    def _variance(self, value: Floats) -> float:
        mean = np.add.reduceat(value, self.first) / self.lengths
        return float(self.text_weights @ (np.add.reduceat(value * value, self.first) / self.lengths - mean**2))

    @cached_property
    def uniform_nats(self) -> Floats:
        """(head,): the mean of KL(A ‖ uniform)."""
        means: Floats = np.einsum("hr,rh->h", self.weights, self.rows.uniform_nats[self.index])
        return means

    @cached_property
    def entropies(self) -> Floats:
        """(head,): the mean entropy."""
        means: Floats = np.einsum("hr,rh->h", self.weights, self.rows.entropies[self.index])
        return means

    @cached_property
    def said_in(self) -> NDArray[np.int64]:
        """(feature,): in how many texts a feature has more than one level in some row."""
        n_texts = np.zeros(len(self.levels), np.int64)
        for number, levels in enumerate(self.levels if len(self.index) else ()):
            varies = np.maximum.reduceat(levels, self.first) > np.minimum.reduceat(levels, self.first)
            n_texts[number] = len(np.unique(self.texts[varies]))
        return n_texts

    def means(self, unscaled: NDArray[np.floating], weights: Floats) -> Floats:
        """The mean of E_p[f] for several p at once, (p, feature).

        Args:
            unscaled: (p, entry): probabilities up to a factor of each row; sums have their precision.
            weights: (p, row): what rows count.
        """
        sums = np.maximum(np.add.reduceat(unscaled, self.first, axis=1, dtype=np.float64), 1e-30)
        scaled = unscaled * (weights / sums).astype(unscaled.dtype)[:, self.row_of]
        means = np.zeros((len(unscaled), len(self.levels)))
        for start in range(0, unscaled.shape[1], _ENTRIES_AT_ONCE):
            some = slice(start, start + _ENTRIES_AT_ONCE)
            means += scaled[:, some] @ self.levels[:, some].T.astype(unscaled.dtype)
        return means / (self.rows.levels - 1)

    def scores(self, chosen: tuple[int, ...], weights: Floats, head: int = 0) -> Floats:
        """(entry,): Σ w f."""
        table = self.table(chosen, head)
        return (table.values @ weights)[table.places]

    def unscaled(self, chosen: tuple[int, ...], weights: Floats, head: int = 0) -> NDArray[np.float32]:
        """(entry,): p up to a factor of each row."""
        table = self.table(chosen, head)
        scores = table.values @ weights
        p: NDArray[np.float32] = np.exp(scores - scores.max(initial=0.0)).astype(np.float32)[table.places]
        return p if self.counts is None else (p * self.counts).astype(np.float32)

    def table(self, chosen: tuple[int, ...], head: int = 0) -> Table:
        """How often each combination of some features' levels occurs in each row."""
        key = head if max(chosen, default=-1) >= self.n_shared else -1, chosen
        if key not in self._tables:
            self._tables[key] = self._count(chosen, head)
            # All are of one size, except for a few.
            while len(self._tables) > max(2, _TABLE_BYTES // max(1, self._tables[key].n_bytes)):
                self._tables.popitem(last=False)
        self._tables.move_to_end(key)
        return self._tables[key]

    def _count(self, chosen: tuple[int, ...], head: int) -> Table:
        """Counts the combinations: those of all but the last feature, each with the last one's levels."""
        n_rows, row_of = len(self.index), self.row_of
        if not chosen:
            counts = self.lengths[:, None] if self.counts is None else np.add.reduceat(self.counts, self.first)[:, None]
            return Table(np.empty((1, 0)), counts.astype(np.float64), row_of, row_of)
        before, levels = self.table(chosen[:-1], head), self.values_of(chosen[-1], head)
        column, size = self.column(chosen[-1], head), len(before.values) * len(levels)
        seen, cells = np.arange(size), None
        if size <= _MOST_DENSE and before.cells is not None:
            cells = before.cells * len(levels)
            cells += column
            counts = np.bincount(cells, self.counts, n_rows * size).reshape(n_rows, size).astype(np.float64)
        else:  # most are in few rows
            combinations = before.places * np.int32(len(levels))
            combinations += column
            if size > _MOST_CODES:  # else those that never occur do no harm
                seen = np.flatnonzero(np.bincount(combinations, minlength=size))
                number = np.zeros(size, np.int32)
                number[seen] = np.arange(len(seen), dtype=np.int32)
                combinations = number[combinations]
            ones = np.ones(self.size) if self.counts is None else self.counts
            counts = sp.csr_array((ones, combinations, np.append(self.first, self.size)), (n_rows, len(seen)))
        values = np.concatenate([before.values[seen // len(levels)], levels[seen % len(levels)][:, None]], 1)
        return Table(values, counts, row_of, cells)
