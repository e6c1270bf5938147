"""From effects on pairs to means with intervals, shares of the total effect, and q-values. Knows no model."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from attnscope.core.exact.multiple_tests import benjamini_hochberg
from attnscope.core.exact.ratios import mean_interval, shares_of_total
from attnscope.records.ablation import Effect

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Observations:
    """Which pairs are one observation: a pair and its mirror image, whose effects are averaged.

    Attributes:
        of_pair: The number of the observation of each pair, (pair,), from 0.
    """

    of_pair: NDArray[np.int64]

    @property
    def n(self) -> int:
        """How many there are."""
        return int(self.of_pair.max()) + 1

    def average(self, values: Floats) -> Floats:
        """Return the means over the pairs of each observation, (observation, ...), of values (pair, ...)."""
        sums = np.zeros((self.n, *values.shape[1:]))
        np.add.at(sums, self.of_pair, values)
        counts = np.bincount(self.of_pair).reshape(-1, *[1] * (values.ndim - 1))
        return sums / counts

    def means(self, values: Floats) -> tuple[list[Effect], Floats]:
        """Return the means of values (pair, quantity) with their intervals, and the q-values of being 0."""
        mean, low, high, p = mean_interval(self.average(values))
        return self._effects(mean, low, high), benjamini_hochberg(p)

    def shares(self, values: Floats, total: Floats) -> list[Effect]:
        """Return the mean values by the mean total, (pair,); NaN if the total is too weak."""
        return self._effects(*shares_of_total(self.average(values), self.average(total)[:, None]))

    def _effects(self, value: Floats, low: Floats, high: Floats) -> list[Effect]:
        ends = zip(value.tolist(), low.tolist(), high.tolist(), strict=True)
        return [Effect(*each, float(self.n)) for each in ends]


def rank_correlation(first: Floats, second: Floats) -> float:
    """Spearman's rank correlation."""
    from scipy.stats import rankdata

    return float(np.corrcoef(rankdata(first), rankdata(second))[0, 1])
