"""Sampled rows of attention, with what descriptions are fitted to: features of their keys, and counts of these. Ours.

Fitting p(k | q) ∝ exp(Σ_f w_f f(q, k)) needs of a head's attention no more than E_A[f]: see `descriptions`.
"""

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

RIDGE = 1e-4
_ENTRIES_AT_ONCE, _RECORDS_AT_ONCE = 2**16, 64
_TABLE_BYTES = 2**25


@dataclass(frozen=True, eq=False)
class Rows:
    """Sampled rows of some heads that may attend to the same keys, as descriptions need them.

    Attributes:
        features: (feature, entry), uint8: the level of each feature at each (query, key) that attention may be paid
            to; rows one after the other. A level stands for the value level / (levels - 1).
        levels: (feature,): how many levels each has; 2 = it holds or does not.
        starts: (row + 1,): where each row's entries begin.
        texts: (row,): the number of its text.
        expected: (record, head, feature), floating: E_A[f], the mean value under the head's attention. A row has its
            own record, or shares the mean over the rows of its text: fitting needs no more.
        entropies: (row, head): H in nats.
        records: (row,): each row's record; None = its own, in order.

    Raises:
        ValueError: Shapes do not fit together, or a row has no key.
    """

    features: NDArray[np.uint8]
    levels: NDArray[np.int64]
    starts: NDArray[np.int64]
    texts: NDArray[np.int64]
    expected: NDArray[np.floating]
    entropies: Floats
    records: NDArray[np.int64] | None = None

    def __post_init__(self) -> None:
        n_rows, n_features = len(self.starts) - 1, len(self.levels)
        n_records = n_rows if self.records is None else int(self.records.max(initial=-1)) + 1
        fits = (
            self.features.shape == (n_features, self.starts[-1])
            and self.texts.shape == (n_rows,)
            and self.expected.shape == (n_records, self.n_heads, n_features)
            and self.entropies.shape == (n_rows, self.n_heads)
        )
        if not fits:
            raise ValueError(
                f"features {self.features.shape}, starts {self.starts.shape}, texts {self.texts.shape}, expected "
                f"{self.expected.shape} and entropies {self.entropies.shape} do not fit together"
            )
        if (np.diff(self.starts) < 1).any():
            raise ValueError("a row has no key")

    @property
    def n_heads(self) -> int:
        """How many heads the rows are of."""
        return int(self.entropies.shape[1])

    def records_of(self, index: NDArray[np.int64]) -> NDArray[np.int64]:
        """The records of some rows in `expected`."""
        return index if self.records is None else self.records[index]

    @cached_property
    def uniform_nats(self) -> Floats:
        """KL(A ‖ uniform) = ln n - H of each row, (row, head), in nats."""
        return np.maximum(np.log(np.diff(self.starts))[:, None] - self.entropies, 0.0)

    def of_texts(self, texts: Sequence[int]) -> "Part":
        """The rows of some texts, each text weighing the same."""
        return Part(self, np.flatnonzero(np.isin(self.texts, np.asarray(texts))))


@dataclass(frozen=True, eq=False)
class Part:
    """Some rows, and what their texts weigh."""

    rows: Rows
    index: NDArray[np.int64]
    _tables: "OrderedDict[tuple[int, ...], Table]" = field(default_factory=OrderedDict)

    @cached_property
    def texts(self) -> NDArray[np.int64]:
        """(row,): the number of each row's text."""
        return self.rows.texts[self.index]

    @cached_property
    def weights(self) -> Floats:
        """(row,): what each counts; they sum to 1, and each text's to the same."""
        _, which, counts = np.unique(self.texts, return_inverse=True, return_counts=True)
        weights: Floats = 1.0 / (counts[which] * max(len(counts), 1))
        return weights

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """(row,): how many entries each has."""
        found: NDArray[np.int64] = np.diff(self.rows.starts)[self.index]
        return found

    @cached_property
    def first(self) -> NDArray[np.int64]:
        """(row,): where each row's entries begin in this part."""
        return np.concatenate([[0], np.cumsum(self.lengths)[:-1]])[: len(self.index)].astype(np.int64)

    @cached_property
    def row_of(self) -> NDArray[np.int64]:
        """(entry,): the number of each entry's row in this part."""
        return np.repeat(np.arange(len(self.index)), self.lengths)

    @cached_property
    def levels(self) -> NDArray[np.uint8]:
        """(feature, entry): levels of the features."""
        if not len(self.index):
            return self.rows.features[:, :0]
        starts = self.rows.starts
        if self.index[-1] - self.index[0] + 1 == len(self.index):  # a view, for these are most of the memory
            return self.rows.features[:, starts[self.index[0]] : starts[self.index[-1] + 1]]
        return self.rows.features[:, np.repeat(starts[self.index] - self.first, self.lengths) + np.arange(self.size)]

    @property
    def size(self) -> int:
        """How many entries there are."""
        return int(self.lengths.sum())

    @cached_property
    def expected(self) -> Floats:
        """(head, feature): the mean of E_A[f] over texts."""
        weights = np.bincount(self.rows.records_of(self.index), self.weights, len(self.rows.expected))
        found = np.zeros(self.rows.expected.shape[1:])
        for start in range(0, len(weights), _RECORDS_AT_ONCE):
            some = slice(start, start + _RECORDS_AT_ONCE)
            if weights[some].any():
                found += np.einsum("r,rhf->hf", weights[some], self.rows.expected[some], dtype=np.float64)
        return found

    @cached_property
    def even(self) -> Floats:
        """(feature,): the same under attention that is spread evenly."""
        even: Floats = self.means(np.ones((1, self.size), np.float32))[0]
        return even

    @cached_property
    def variances(self) -> Floats:
        """(feature,): how much features vary within a row where attention is spread evenly; 0 for those of 2 levels."""
        first, n = self.first, self.lengths
        found = np.zeros(len(self.levels))
        for number in np.flatnonzero(self.rows.levels > 2):
            value = self.levels[number] / (self.rows.levels[number] - 1)
            mean = np.add.reduceat(value, first) / n
            found[number] = self.weights @ (np.add.reduceat(value * value, first) / n - mean**2)
        return found

    @cached_property
    def uniform_nats(self) -> Floats:
        """(head,): the mean of KL(A ‖ uniform) over texts."""
        found: Floats = self.weights @ self.rows.uniform_nats[self.index]
        return found

    @cached_property
    def entropies(self) -> Floats:
        """(head,): the mean entropy over texts."""
        found: Floats = self.weights @ self.rows.entropies[self.index]
        return found

    @cached_property
    def said_in(self) -> NDArray[np.int64]:
        """(feature,): in how many texts a feature has more than one level in some row."""
        if not len(self.index):
            return np.zeros(len(self.levels), np.int64)
        found = np.zeros(len(self.levels), np.int64)
        for number, levels in enumerate(self.levels):
            varies = np.maximum.reduceat(levels, self.first) > np.minimum.reduceat(levels, self.first)
            found[number] = len(np.unique(self.texts[varies]))
        return found

    def means(self, unscaled: NDArray[np.float32]) -> Floats:
        """The mean of E_p[f] over texts for several p at once, (p, feature).

        Args:
            unscaled: (p, entry): probabilities but for a factor of each row.
        """
        sums = np.add.reduceat(unscaled, self.first, axis=1, dtype=np.float64)
        scaled = unscaled * (self.weights / sums).astype(np.float32)[:, self.row_of]
        found = np.zeros((len(unscaled), len(self.levels)))
        for start in range(0, unscaled.shape[1], _ENTRIES_AT_ONCE):
            some = slice(start, start + _ENTRIES_AT_ONCE)
            found += scaled[:, some] @ self.levels[:, some].T.astype(np.float32)
        return found / (self.rows.levels - 1)

    def codes(self, chosen: Sequence[int]) -> NDArray[np.int64]:
        """(entry,): one number for each combination of some features' levels."""
        codes = np.zeros(self.size, np.int64)
        for number in chosen:
            codes *= self.rows.levels[number]
            codes += self.levels[number]
        return codes

    def unscaled(self, chosen: tuple[int, ...], weights: Floats) -> NDArray[np.float32]:
        """(entry,): p but for a factor of each row."""
        table = self.table(chosen)
        scores = table.values @ weights
        found: NDArray[np.float32] = np.exp(scores - scores.max(initial=0.0)).astype(np.float32)[
            table.places[self.codes(chosen)]
        ]
        return found

    def table(self, chosen: tuple[int, ...]) -> "Table":
        """How often each combination of some features' levels occurs in each row."""
        if chosen not in self._tables:
            self._tables[chosen] = Table.of(self, chosen)
            while len(self._tables) > 1 and sum(one.counts.nbytes for one in self._tables.values()) > _TABLE_BYTES:
                self._tables.popitem(last=False)
        self._tables.move_to_end(chosen)
        return self._tables[chosen]


@dataclass(frozen=True, eq=False)
class Table:
    """The combinations of some features' levels.

    Attributes:
        values: (combination, feature): the features' values.
        counts: (row, combination): how many of a row's keys have them.
        places: Which combination each code stands for; see `codes`.
    """

    values: Floats
    counts: Floats
    places: NDArray[np.int64]

    @classmethod
    def of(cls, part: Part, chosen: Sequence[int]) -> "Table":
        """Counts the combinations."""
        codes = part.codes(chosen)
        size = math.prod(int(part.rows.levels[number]) for number in chosen)
        n_rows = len(part.index)
        seen = np.flatnonzero(np.bincount(codes, minlength=size))
        place = np.zeros(size, np.int64)
        place[seen] = np.arange(len(seen))
        codes = place[codes]
        counts = np.bincount(part.row_of * len(seen) + codes, minlength=n_rows * len(seen))
        values, rest = np.empty((len(seen), len(chosen))), seen
        for column in range(len(chosen) - 1, -1, -1):
            levels = int(part.rows.levels[chosen[column]])
            values[:, column] = rest % levels / (levels - 1)
            rest = rest // levels
        return cls(values, counts.reshape(n_rows, len(seen)).astype(np.float64), place)

    def log_sums(self, weights: Floats) -> Floats:
        """Logarithm of Z of each row, (row,), in nats."""
        scores = self.values @ weights
        top = scores.max(initial=0.0)
        found: Floats = np.log(self.counts @ np.exp(scores - top)) + top
        return found

    def loss(self, weights: Floats, expected: Floats, rows: Floats) -> tuple[float, Floats, Floats]:
        """What is made as small as can be: the mean of ln Z - Σ w E_A[f] over rows, with the ridge.

        Args:
            weights: (feature,): w.
            expected: (feature,): the mean of E_A[f].
            rows: (row,): what each row counts.

        Returns:
            Its value in nats, its gradient (feature,), and its second derivatives (feature, feature).
        """
        scores = self.values @ weights
        top = scores.max(initial=0.0)
        e = np.exp(scores - top)
        n = self.values.shape[1]
        sums = self.counts @ np.concatenate([e[:, None], e[:, None] * self.values], 1)
        z = sums[:, 0]
        means = sums[:, 1:] / z[:, None]
        mean = rows @ means
        # Of each combination, over all rows: how much p gives to it.
        given = e * ((rows / z) @ self.counts)
        second = (self.values * given[:, None]).T @ self.values - (means * rows[:, None]).T @ means
        value = rows @ np.log(z) + top - weights @ expected + RIDGE / 2 * (weights @ weights)
        return float(value), mean - expected + RIDGE * weights, second + RIDGE * np.eye(n)
