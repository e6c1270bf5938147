"""Count combinations of features' levels in rows of attention, and take the loss of a fit and its derivatives by them.

These tables are all that a step of a fit needs (`descriptions`). `sampled_rows` counts them. Ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

Floats = NDArray[np.float64]

RIDGE = 1e-4
"""What a squared weight of a fit costs, in nats."""


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


@dataclass(frozen=True, eq=False)
class Table:
    """The combinations of some features' levels: all that a step of a fit needs of sampled rows.

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
        """Return the combination of each entry, (entry,)."""
        if not isinstance(self.counts, np.ndarray):
            return np.asarray(self.counts.indices, np.int32)
        assert self.cells is not None
        return (self.cells - self.row_of * len(self.values)).astype(np.int32)

    @cached_property
    def counts_by_combination(self) -> Floats | sp.csc_array:
        """Return the same counts, (combination, row), which each step needs; SciPy takes long to transpose them."""
        return self.counts.T

    @property
    def n_bytes(self) -> int:
        """Return how much memory it takes."""
        if not isinstance(self.counts, np.ndarray):
            return int(self.counts.data.nbytes + self.counts.indices.nbytes)
        assert self.cells is not None
        return int(self.counts.nbytes + self.cells.nbytes)

    def log_sums(self, weights: Floats) -> Floats:
        """Return the logarithm of Z of each row, (row,), in nats."""
        scores = self.values @ weights
        top = scores.max(initial=0.0)
        log_sums: Floats = np.log(self.counts @ np.exp(scores - top)) + top
        return log_sums

    def loss(self, weights: Floats, expected: Floats, rows: Floats) -> Loss:
        """Return what a fit minimises: the mean of ln Z - Σ w E_A[f] over rows, with the ridge.

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

    def derivatives(self, loss: Loss, weights: Floats, expected: Floats, rows: Floats) -> tuple[Floats, Floats]:
        """Return the gradient, (feature,), and the second derivatives, (feature, feature), at the weights of a loss.

        Both are in nats for a weight of 1, and for its square.
        """
        means = self.counts @ (loss.e[:, None] * self.values) / loss.z[:, None]
        # How much p gives to each combination, over all rows.
        mass = loss.e * (self.counts_by_combination @ (rows / loss.z))
        second = (self.values * mass[:, None]).T @ self.values - (means * rows[:, None]).T @ means
        return rows @ means - expected + RIDGE * weights, second + RIDGE * np.eye(len(weights))
