"""Combinations of features' levels, counted row by row: all that a step of a fit needs of sampled rows. Ours."""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

Floats = NDArray[np.float64]

RIDGE = 1e-4


@dataclass(frozen=True, eq=False)
class Table:
    """The combinations of some features' levels.

    Attributes:
        values: (combination, feature): the features' values.
        counts: (row, combination): how many of a row's keys have them; if sparse, entry by entry.
        row_of: (entry,): the row of each.
        cells: (entry,): its row times the number of combinations, plus its combination; None if `counts` is sparse.
    """

    values: Floats
    counts: Floats | sp.csr_array
    row_of: NDArray[np.int64]
    cells: NDArray[np.int64] | None

    @cached_property
    def places(self) -> NDArray[np.int32]:
        """(entry,): the combination of each."""
        if self.cells is not None:
            return (self.cells - self.row_of * len(self.values)).astype(np.int32)
        assert not isinstance(self.counts, np.ndarray)
        return np.asarray(self.counts.indices, np.int32)

    @cached_property
    def counts_by_combination(self) -> Floats | sp.csc_array:
        """(combination, row): the same counts, which each step of a fit needs; SciPy takes long to transpose them."""
        return self.counts.T

    @property
    def n_bytes(self) -> int:
        """How much memory it takes."""
        if isinstance(self.counts, np.ndarray):
            return int(self.counts.nbytes) + (0 if self.cells is None else self.cells.nbytes)
        return int(self.counts.data.nbytes + self.counts.indices.nbytes)

    def log_sums(self, weights: Floats) -> Floats:
        """Logarithm of Z of each row, (row,), in nats."""
        scores = self.values @ weights
        top = scores.max(initial=0.0)
        log_sums: Floats = np.log(self.counts @ np.exp(scores - top)) + top
        return log_sums

    def loss(self, weights: Floats, expected: Floats, rows: Floats) -> "Loss":
        """What a fit minimises: the mean of ln Z - Σ w E_A[f] over rows, with the ridge.

        Args:
            weights: (feature,): w.
            expected: (feature,): the mean of E_A[f].
            rows: (row,): what each row counts.
        """
        scores = self.values @ weights
        top = scores.max(initial=0.0)
        e = np.exp(scores - top)
        z = self.counts @ e
        value = rows @ np.log(z) + top - weights @ expected + RIDGE / 2 * (weights @ weights)
        return Loss(float(value), e, z)

    def derivatives(self, loss: "Loss", weights: Floats, expected: Floats, rows: Floats) -> tuple[Floats, Floats]:
        """The gradient of the loss, (feature,), and its second derivatives, (feature, feature), at the same weights."""
        means = self.counts @ (loss.e[:, None] * self.values) / loss.z[:, None]
        # How much p gives to each combination, over all rows.
        mass = loss.e * (self.counts_by_combination @ (rows / loss.z))
        second = (self.values * mass[:, None]).T @ self.values - (means * rows[:, None]).T @ means
        return rows @ means - expected + RIDGE * weights, second + RIDGE * np.eye(len(weights))


class Loss(NamedTuple):
    """The loss of a fit at some weights.

    Attributes:
        value: In nats.
        e: (combination,): exp of its score, up to a factor.
        z: (row,): their sum over the row's keys.
    """

    value: float
    e: Floats
    z: Floats
