"""Add up head measures over texts, as six numbers per measure and head that can be merged.

A head measure gives two numbers per text: a sum s and a count c. For example, s is the mass on the previous token,
summed over queries, and c the number of queries that have a previous token. The head's value is Σs / Σc. Its interval
(`core.intervals`) follows from the second moments of s and c over texts. So six numbers are enough for any number of
texts. This module knows no measures and no heads, and uses no torch.
"""

from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from attnscope.arrays import Floats, divide
from attnscope.core.intervals import (
    FloatOrArray,
    TextSums,
    mean_interval,
    mean_p_above,
    share_interval,
    share_p_above,
)

# The rows of `RunningSums.moments`: n, Σs, Σc, Σ(s - s̄)², Σ(s - s̄)(c - c̄) and Σ(c - c̄)².
_N, _S, _C, _SS, _SC, _CC = range(6)

_ROUNDING = 16 * np.finfo(np.float64).eps
"""A sum of squares that is less than this share of its terms is due to rounding. Then all texts have the same s / c."""


class RunningSums:
    """Hold sums and second moments over texts for an array of quantities, and compute ratios, errors and intervals.

    Each quantity, such as a measure of a head, has six float64 numbers: how many texts have it (n), Σs, Σc, and the
    second moments about the means, Σ(s - s̄)², Σ(s - s̄)(c - c̄) and Σ(c - c̄)². A text with s = c = 0 does not have
    the quantity, and adds nothing to any of them. The sums over two sets of texts, A and B, are merged by the formula
    of Chan, Golub & LeVeque (1979; 1983, The American Statistician 37, 242-247):

        Σ_AB (s - s̄)² = Σ_A (s - s̄)² + Σ_B (s - s̄)² + (s̄_B - s̄_A)² · n_A n_B / (n_A + n_B)

    Moments about the mean, rather than sums of squares, keep most digits of large values with a small spread. One merge
    is exact to a few units in the last place (relative error about 1e-15). The same texts in the same order and batches
    give the same numbers, bit for bit; another order or split may change the last digits.

    A new object holds no text. Merging it with other sums returns the other sums.

    Args:
        shape: The shape of the quantities, such as (layer, head, measure); () is one quantity.

    Attributes:
        moments: The six numbers, (6, *shape).
        n_texts: How many texts were added.
    """

    def __init__(self, shape: tuple[int, ...] = ()) -> None:
        self.shape = shape
        self.n_texts = 0
        self.moments = np.zeros((6, *self.shape))

    def add(self, sums: ArrayLike, counts: ArrayLike) -> None:
        """Add one text, or a batch of texts.

        Args:
            sums: s of each quantity: `shape` for one text, (text, *shape) for a batch. Any sign.
            counts: c of each quantity, at least 0; broadcast to the shape of `sums`. Both are 0 if a measure is
                undefined for a text.

        Raises:
            ValueError: A shape does not fit, a number is NaN or infinite, a count is negative. Nothing was added.
        """
        # Check everything first: an error must leave the sums unchanged.
        s = np.asarray(sums, np.float64)
        if s.shape == self.shape:
            s = s[None]
        elif s.shape[1:] != self.shape:
            raise ValueError(f"sums are {self.shape} or (text, *{self.shape}); got {s.shape}")
        c = np.broadcast_to(np.asarray(counts, np.float64), s.shape)
        if not np.isfinite([s, c]).all():
            raise ValueError("sums and counts are finite; a text gave NaN or infinity")
        if (c < 0).any():
            raise ValueError(f"counts are at least 0; got {c.min()}")
        self.moments = _merge(self.moments, _moments_of(s, c))
        self.n_texts += len(s)

    def merge(self, other: "RunningSums") -> "RunningSums":
        """Return the sums over the texts of this object and of another one; neither object is changed.

        Raises:
            ValueError: The shapes differ.
        """
        if other.shape != self.shape:
            raise ValueError(f"sums of {self.shape} and of {other.shape} cannot be merged")
        return self.from_moments(_merge(self.moments, other.moments), self.n_texts + other.n_texts)

    def __getitem__(self, index: Any) -> "RunningSums":
        """Return some of the quantities: the index selects from an array of `shape`, by the rules of NumPy."""
        chosen = [moment[index] for moment in self.moments]
        return self.from_moments(np.stack(chosen), self.n_texts)

    @classmethod
    def from_moments(cls, moments: Floats, n_texts: int) -> "RunningSums":
        """Build sums from their moments, (6, *shape)."""
        sums = cls(moments.shape[1:])
        sums.n_texts = n_texts
        sums.moments = moments
        return sums

    def total(self, name: Literal["s", "c"]) -> Floats:
        """Return Σs or Σc."""
        total: Floats = self.moments[_S if name == "s" else _C].copy()
        return total

    def ratio(self) -> Floats:
        """Return the value Σs / Σc; NaN where Σc is 0."""
        return divide(self.moments[_S], self.moments[_C], np.nan)

    def sample(self) -> TextSums:
        """Return the ratio, its standard error and the sizes that `core.intervals` needs, arrays of `shape`.

        The error is that of the delta method, for texts drawn independently. With the residuals d = s - r·c of the
        texts, Σd² = Σ(s - s̄)² - 2r Σ(s - s̄)(c - c̄) + r² Σ(c - c̄)²:

            se² = Σd² / (Σc)² · m / (m - 1),   m = (Σc)² / Σc²

        This is the ratio estimator of Cochran 1977, Sampling Techniques, section 6.4 (eq. 6.13, without the finite
        population), with m/(m-1) instead of its n/(n-1). m is the effective number of texts (Kish 1965, section
        11.7): m texts of equal count would be as much evidence. It is from 1 (one text has all counts) to n; 0 where
        Σc is 0.

        If all texts have the same count, m = n. If not, m/(m-1) makes se² unbiased and n/(n-1) does not, provided that
        the variance of a text's s is proportional to its c: then E Σd² is Σc · (1 - Σc²/(Σc)²) times the constant of
        proportion. The error is NaN if fewer than two texts have a count.
        """
        n, _, sum_c, ss, sc, cc = self.moments
        ratio = self.ratio()
        # (Σc)², Σc², and (Σc)² - Σc². The difference adds up the products c_i · c_j of two different texts, so it is 0
        # if only one text has a count.
        square_of_sum = sum_c**2
        sum_of_squares = cc + divide(square_of_sum, n, 0.0)
        pair_products = np.maximum(square_of_sum * divide(n - 1, n, 0.0) - cc, 0.0)
        # Σd² from the moments. Rounding is set to 0, so that texts with equal s / c have no error.
        r = np.nan_to_num(ratio)
        cross_term = 2 * r * sc
        square_terms = ss + r**2 * cc
        residual = square_terms - cross_term
        rounding = _ROUNDING * (square_terms + np.abs(cross_term))
        residual = np.where(residual > rounding, residual, 0.0)
        # m / (m - 1) = (Σc)² / ((Σc)² - Σc²), so se² = Σd² / ((Σc)² - Σc²).
        error = np.sqrt(divide(residual, pair_products, np.nan))
        # Degrees of freedom, m - 1; NaN where the error is NaN.
        degrees = np.where(pair_products > 0, divide(pair_products, sum_of_squares, 0.0), np.nan)
        effective_texts = divide(square_of_sum, sum_of_squares, 0.0)
        return TextSums(ratio, error, degrees, effective_texts, sum_c)

    def interval(self) -> tuple[Floats, Floats]:
        """Return the ends of the 95% interval of the ratio, see `core.intervals.mean_interval`."""
        return mean_interval(self.sample())

    def p_above(self, threshold: FloatOrArray) -> Floats:
        """Return p-values for a ratio above a threshold, see `core.intervals.mean_p_above`."""
        return mean_p_above(self.sample(), threshold)

    def share_interval(self, **options: FloatOrArray) -> tuple[Floats, Floats]:
        """Return the ends of the 95% interval of a ratio of 0 to 1; `core.intervals.share_interval` has the options."""
        return share_interval(self.sample(), **options)

    def share_p_above(self, threshold: FloatOrArray, **options: FloatOrArray) -> Floats:
        """Return p-values for a ratio of 0 to 1 above a threshold; `core.intervals.share_p_above` has the options."""
        return share_p_above(self.sample(), threshold, **options)


def _moments_of(s: Floats, c: Floats) -> Floats:
    """Return the moments of a batch of texts, (6, *shape), from s and c, (text, *shape)."""
    is_counted = (s != 0) | (c != 0)
    n = is_counted.sum(0)
    sum_s = s.sum(0)
    sum_c = c.sum(0)
    at_least_one = np.maximum(n, 1)
    # Distances from the means; 0 for a text that does not have the quantity.
    ds = (s - sum_s / at_least_one) * is_counted
    dc = (c - sum_c / at_least_one) * is_counted
    ss = (ds * ds).sum(0)
    sc = (ds * dc).sum(0)
    cc = (dc * dc).sum(0)
    return np.stack([n, sum_s, sum_c, ss, sc, cc])


def _merge(a: Floats, b: Floats) -> Floats:
    """Return the moments of two sets of texts together, from the moments of each (Chan, Golub & LeVeque)."""
    # n, Σs and Σc add up.
    merged: Floats = a + b
    # Second moments also get a term for the distance between the two means. Its weight is 0 if a set has no text.
    weight = a[_N] * b[_N] / np.maximum(merged[_N], 1)
    n_a = np.maximum(a[_N], 1)
    n_b = np.maximum(b[_N], 1)
    ds = b[_S] / n_b - a[_S] / n_a
    dc = b[_C] / n_b - a[_C] / n_a
    merged[_SS] += ds * ds * weight
    merged[_SC] += ds * dc * weight
    merged[_CC] += dc * dc * weight
    return merged
