"""Sums over texts that are mergeable and small, and what they say: ratios, intervals, p-values.

A head measure gives two numbers per text: a sum s and a count c (the mass on the previous token over all queries, and
how many queries have one). The head's value is Σs / Σc. How sure it is follows from the second moments of s and c over
texts. Six numbers per measure hold all this, for any amount of text. Knows no measures, no heads and no torch.
"""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import stdtr, stdtrit

Floats = NDArray[np.float64]

N_MOMENTS = 6
_N, _S, _C, _SS, _SC, _CC = range(N_MOMENTS)

_ROUNDING = 16 * np.finfo(np.float64).eps
"""Residuals below this part of their terms are rounding: all texts have the same s / c."""

DEPENDENCE = 0.3
"""The intraclass correlation of the queries of a text that is assumed of what was never seen; see `share_interval`."""

_FEWEST_DEGREES = 0.1  # of freedom; there t is 2e12 at 95%, and further down scipy's stdtrit goes wrong


class RunningSums:
    """Sums and second moments over texts, for an array of quantities, and what follows from them.

    Each quantity has six float64 numbers: how many texts have it (n), Σs, Σc, and the second moments about the means,
    Σ(s - s̄)², Σ(s - s̄)(c - c̄) and Σ(c - c̄)². A text with s = c = 0 says nothing and is in none of them. Parts are
    merged by the formula of Chan, Golub & LeVeque (1979; 1983, The American Statistician 37, 242-247):

        Σ_AB (s - s̄)² = Σ_A (s - s̄)² + Σ_B (s - s̄)² + (s̄_B - s̄_A)² · n_A n_B / (n_A + n_B)

    Moments about the mean lose no digits to large values with a small spread. One merge is exact to a few units in the
    last place (relative error about 1e-15). So the same texts in the same order and batches give the same numbers,
    bit for bit; another order or split may change the last digits.

    A new object holds no text and is the identity of `merge`.

    Args:
        shape: The shape of the quantities, such as (layer, head, measure); () is one quantity.
    """

    def __init__(self, shape: tuple[int, ...] = ()) -> None:
        self.shape = tuple(int(size) for size in shape)
        self.n_texts = 0
        self._moments = np.zeros((N_MOMENTS, *self.shape))

    def add(self, sums: ArrayLike, counts: ArrayLike) -> None:
        """Add one text, or a batch of texts.

        Args:
            sums: s of each quantity: `shape` for one text, (text, *shape) for a batch. Any sign.
            counts: c of each quantity, at least 0; broadcast to the shape of `sums`. Both are 0 if a measure is
                undefined for a text.

        Raises:
            ValueError: A shape does not fit, a number is NaN or infinite, a count is negative. Nothing was added.
        """
        s = np.asarray(sums, np.float64)
        if s.shape == self.shape:
            s = s[None]
        elif s.shape[1:] != self.shape or s.ndim == 0:
            raise ValueError(f"sums are {self.shape} or (text, *{self.shape}); got {s.shape}")
        c = np.broadcast_to(np.asarray(counts, np.float64), s.shape)
        if not (np.isfinite(s).all() and np.isfinite(c).all()):
            raise ValueError("sums and counts are finite; a text gave NaN or infinity")
        if (c < 0).any():
            raise ValueError(f"counts are at least 0; got {c.min()}")
        self._moments = _merge(self._moments, _moments_of(s, c))
        self.n_texts += len(s)

    def merge(self, other: "RunningSums") -> "RunningSums":
        """Return the sums over the texts of both; neither is changed.

        Raises:
            ValueError: The shapes differ.
        """
        if other.shape != self.shape:
            raise ValueError(f"sums of {self.shape} and of {other.shape} cannot be merged")
        return self._of(_merge(self._moments, other._moments), self.n_texts + other.n_texts)

    def take(self, index: NDArray[np.int64]) -> "RunningSums":
        """Return some of the quantities along the last axis, as `numpy.take_along_axis` picks them by `index`."""
        return self._of(np.take_along_axis(self._moments, index[None], -1), self.n_texts)

    @classmethod
    def _of(cls, moments: Floats, n_texts: int) -> "RunningSums":
        sums = cls(())
        sums.shape = moments.shape[1:]
        sums.n_texts = n_texts
        sums._moments = moments
        return sums

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """Return the whole state, for npz without pickle: `moments`, (6, *shape), and `n_texts`, ()."""
        return {"moments": self._moments.copy(), "n_texts": np.array(self.n_texts, np.int64)}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]]) -> "RunningSums":
        """Return the object whose `to_arrays` these are.

        Raises:
            KeyError: An array is missing.
            ValueError: They are not such arrays.
        """
        moments, n_texts = np.asarray(arrays["moments"]), np.asarray(arrays["n_texts"])
        if moments.dtype != np.float64 or moments.ndim < 1 or len(moments) != N_MOMENTS:
            raise ValueError(f"moments are float64, ({N_MOMENTS}, ...); got {moments.dtype}, {moments.shape}")
        if n_texts.shape != () or n_texts.dtype.kind not in "iu" or n_texts < 0:
            raise ValueError(f"n_texts is one integer, at least 0; got {n_texts!r}")
        if not np.isfinite(moments).all() or (moments[[_N, _C, _SS, _CC]] < 0).any() or (moments[_N] > n_texts).any():
            raise ValueError("moments are out of range: the arrays are damaged")
        return cls._of(moments.copy(), int(n_texts))

    def total(self, name: Literal["s", "c"]) -> Floats:
        """Return Σs or Σc."""
        total: Floats = self._moments[_S if name == "s" else _C].copy()
        return total

    def ratio(self) -> Floats:
        """Return the value Σs / Σc; NaN where Σc is 0."""
        return _divide(self._moments[_S], self._moments[_C], np.nan)

    def effective_texts(self) -> Floats:
        """Return how many texts of equal count would weigh the same: (Σc)² / Σc² (Kish 1965, section 11.7).

        From 1 (one text holds everything) to the number of texts; 0 where Σc is 0.
        """
        return _divide(self._moments[_C] ** 2, self._squared_counts(), 0.0)

    def standard_error(self) -> Floats:
        """Return the standard error of r by the delta method, for texts drawn independently.

        With the residuals d = s - r·c of the texts, Σd² = Σ(s - s̄)² - 2r Σ(s - s̄)(c - c̄) + r² Σ(c - c̄)²:

            se² = Σd² / (Σc)² · m / (m - 1),   m = (Σc)² / Σc²

        This is the ratio estimator of Cochran 1977, Sampling Techniques, section 6.4 (eq. 6.13, without the finite
        population), with its n/(n-1) replaced by m/(m-1), m the effective number of texts. For texts of one length both
        are the same. For others: if a text's s has a variance in proportion to its c, E Σd² is Σc·(1 - Σc²/(Σc)²) times
        the constant of proportion, so m/(m-1) makes se² unbiased and n/(n-1) does not.

        NaN if fewer than two texts have a count.
        """
        _, _, _, ss, sc, cc = self._moments
        r = np.nan_to_num(self.ratio())
        residual = ss - 2 * r * sc + r**2 * cc
        terms = ss + 2 * np.abs(r * sc) + r**2 * cc
        residual = np.where(residual > _ROUNDING * terms, residual, 0.0)
        apart = self._apart()
        return np.sqrt(_divide(residual, np.where(apart > 0, apart, 0.0), np.nan))

    def interval(self, level: float = 0.95) -> tuple[Floats, Floats]:
        """Return the confidence interval r ± t·se, t from Student's t with m - 1 degrees of freedom.

        m is the effective number of texts, n for texts of one length. With n itself, one long text among ten makes 95%
        intervals that hold the truth 75% of the time (simulated: counts log-normal with sigma 1.5).

        Not cut to the measure's range. Zero width if all texts have the same s/c. NaN if fewer than two texts have a
        count, or if one has so much of it that m is below 1.1.

        Args:
            level: The coverage, between 0 and 1.

        Returns:
            The low and the high ends.

        Raises:
            ValueError: The level is not between 0 and 1.
        """
        if not 0 < level < 1:
            raise ValueError(f"a level is between 0 and 1; got {level}")
        ratio, half = self.ratio(), self._student(level) * self.standard_error()
        return ratio - half, ratio + half

    def p_above(self, threshold: ArrayLike) -> Floats:
        """Return the one-sided p-value against H0: the ratio is at most the threshold.

        P(T >= (r - threshold) / se) with T of Student's t, m - 1 degrees of freedom: p < (1 - level) / 2 exactly where
        the interval at that level lies above the threshold. For texts of one length it is the one-sample t test on
        s - threshold·c. For texts of varied lengths that test, with the variance about its mean, takes the spread of
        the lengths for noise: it cannot tell even a perfect head (s = c) from the threshold.

        0 or 1 where se is 0. NaN without a standard error, or if the threshold is NaN.

        Args:
            threshold: Broadcast to the shape of the quantities.
        """
        above = self.ratio() - np.broadcast_to(np.asarray(threshold, np.float64), self.shape)
        error = self.standard_error()
        t = np.divide(above, error, out=np.where(above > 0, np.inf, -np.inf), where=error != 0)
        # Not 1 - stdtr(t): that loses all digits of a small p.
        p = np.where(np.isnan(above), np.nan, stdtr(self._degrees(), -t))
        return np.where(np.isnan(error), np.nan, p)

    def share_interval(
        self,
        level: float = 0.95,
        *,
        hits: ArrayLike = False,
        unseen: ArrayLike = True,
        dependence: ArrayLike = DEPENDENCE,
        units: ArrayLike = 1.0,
    ) -> tuple[Floats, Floats]:
        """Return the confidence interval of a share, 0 <= s <= c: it stays within 0 to 1, and holds near them.

        r ± t·se fails there: of ten texts that each count 1 or 0, with a share of 0.97, three in four samples are all 1
        and give [1, 1]. There are two bounds, of which the wider one holds:

        1. Wilson's score interval with continuity correction (Newcombe 1998, Statistics in Medicine 17, method 4) for
           n = r(1 - r) / se² independent units (Korn & Graubard 1998, Survey Methodology 24), with se as in
           `standard_error` and Student's t with m - 1 degrees of freedom for the normal quantile. Its variance at an
           end θ is se² · θ(1 - θ) / r(1 - r): it grows towards the middle, as that of any share does.
        2. What was never seen (`unseen`). Texts that are all alike give se = 0. Yet a share u of units of another kind
        stays
           unseen in N independent ones with probability (1 - u)^N. The low end is at most r · α^(1/N), α = (1 - level)
           / 2, as if such units were at 0; the high end at least 1 - (1 - r) · α^(1/N). If all units are hits this is
           Clopper & Pearson's (1934) end. N = 1 / (ρ/m + (1 - ρ)/Σc) is the effective number of units for an intraclass
           correlation ρ within texts (Kish 1965, section 5.4). Texts that are alike cannot tell ρ: it is DEPENDENCE, or
           1 if a text is all or nothing.

        Simulated, 95% intervals of 10 to 100 texts hold shares of 0.01 to 0.99 in 94% of samples or more, whether texts
        count 1 or 0, hits that depend on each other within texts (ρ of 0 to 0.3), or masses. They are conservative (97
        to 100%) near 0 and 1, where few texts cannot tell 0.99 from 1, with fewer than ten texts, and for masses that
        hardly vary (a standard deviation over texts of 0.03 with ten texts). Of three texts that are either 0.2 or 1 as
        a whole (ρ = 1) they hold the truth in 71%.

        `hits`, `unseen`, `dependence` and `units` are broadcast to the shape of the quantities.

        Args:
            level: The coverage, between 0 and 1.
            hits: Whether each unit of c counts 1 or 0, as a query whose largest weight is in one place: then se² is at
                least r(1 - r) / Σc.
            unseen: Whether the second bound holds; not for means such as a relative entropy, which are no share of
                anything.
            dependence: The ρ of the second bound, 0 to 1; at 1 texts are the units.
            units: How many units a count of 1 stands for, if s and c of a text were divided by its length: the harmonic
                mean of the lengths. Σc times it is then Kish's effective number of units, (Σc)² / Σ(c/length), of a
                quantity that is defined for the same share of each text.

        Returns:
            The low and the high ends; NaN where `interval` is.

        Raises:
            ValueError: The level is not between 0 and 1.
        """
        if not 0 < level < 1:
            raise ValueError(f"a level is between 0 and 1; got {level}")
        part = self._share(hits, unseen, dependence, units)
        a = self._student(level) ** 2 / part.n

        def ends(x: Floats) -> tuple[Floats, Floats]:  # (x - θ)² = a θ(1 - θ)
            half = np.sqrt(a * x * (1 - x) + a * a / 4)
            return (x + a / 2 - half) / (1 + a), (x + a / 2 + half) / (1 + a)

        with np.errstate(under="ignore"):  # of next to no units nothing is seen
            seen = ((1 - level) / 2) ** (1 / part.n_unseen)
        low = np.minimum(ends(np.maximum(part.r - part.correction, 0))[0], part.r * seen)
        high = np.maximum(ends(np.minimum(part.r + part.correction, 1))[1], 1 - (1 - part.r) * seen)
        defined = ~np.isnan(a)
        return np.where(defined, np.clip(low, 0, 1), np.nan), np.where(defined, np.clip(high, 0, 1), np.nan)

    def most_unseen(self, units: ArrayLike = 1.0, dependence: ArrayLike = DEPENDENCE) -> Floats:
        """Return the largest share u of units of another kind of which these may show none, 0 to 1; NaN without a text.

        None is seen with a probability of 2.5%, which a 95% interval leaves at each end. See `share_interval` for its
        second bound, and for `units` and `dependence`.
        """
        n_unseen: Floats = self._share(False, True, dependence, units).n_unseen
        return 1 - 0.025 ** (1 / n_unseen)

    def share_p_above(
        self,
        threshold: ArrayLike,
        *,
        hits: ArrayLike = False,
        unseen: ArrayLike = True,
        dependence: ArrayLike = DEPENDENCE,
        units: ArrayLike = 1.0,
    ) -> Floats:
        """Return the one-sided p-value against H0: the share is at most the threshold.

        The threshold is broadcast to the shape of the quantities.

        The test that `share_interval` is the inversion of, with the same arguments: p < (1 - level) / 2 exactly where
        the interval at that level lies above the threshold θ. The larger one of P(T >= (r - θ - 1/2n) / sqrt(θ(1 -
        θ)/n)) and (θ/r)^N, at most 0.5; for θ above r likewise, counted from the other side. NaN without a standard
        error, or if the threshold is NaN.
        """
        part = self._share(hits, unseen, dependence, units)
        limit = np.broadcast_to(np.asarray(threshold, np.float64), self.shape)
        inside = np.clip(limit, 0, 1)
        distance = np.abs(part.r - inside)
        with np.errstate(divide="ignore", invalid="ignore", under="ignore"):
            t = np.maximum(distance - part.correction, 0) / np.sqrt(inside * (1 - inside) / part.n)
            t = np.where(distance > part.correction, t, 0)
            away = np.where(inside < part.r, inside / part.r, (1 - inside) / (1 - part.r)) ** part.n_unseen
        p = np.minimum(np.maximum(stdtr(self._degrees(), -t), away), 0.5)  # beyond lies the other side
        p = np.where(inside < part.r, p, 1 - p)
        p = np.where(limit < 0, 0.0, np.where(limit >= 1, 1.0, p))
        defined = ~(np.isnan(self.standard_error()) | np.isnan(limit))
        return np.where(defined, p, np.nan)

    def _share(self, hits: ArrayLike, unseen: ArrayLike, dependence: ArrayLike, units: ArrayLike = 1.0) -> "_Share":
        r, m = np.clip(self.ratio(), 0, 1), self.effective_texts()
        total = self.total("c") * np.asarray(units, np.float64)
        total, m = np.where(total > 0, total, np.nan), np.where(total > 0, m, np.nan)
        binomial = r * (1 - r)
        variance = self.standard_error() ** 2
        with np.errstate(divide="ignore", invalid="ignore"):
            least = np.where(np.broadcast_to(hits, self.shape), binomial / total, 0)
            # The spread is unknown if everything is 0 or 1: then the second bound alone holds.
            n = np.where(binomial > 0, binomial / np.maximum(variance, least), np.inf)
            rho = np.broadcast_to(np.asarray(dependence, np.float64), self.shape)
            n_unseen = 1 / (rho / m + (1 - rho) / total)
        return _Share(r, n, 0.5 / n, np.where(np.broadcast_to(unseen, self.shape), n_unseen, np.inf))

    def _student(self, level: float) -> Floats:
        degrees = self._degrees()
        quantile: Floats = stdtrit(np.where(degrees < _FEWEST_DEGREES, np.nan, degrees), (1 + level) / 2)
        return quantile

    def _degrees(self) -> Floats:
        """Return the degrees of freedom m - 1; NaN where there is no interval."""
        apart = self._apart()
        return _divide(np.where(apart > 0, apart, np.nan), self._squared_counts(), np.nan)

    def _squared_counts(self) -> Floats:
        """Return Σc²."""
        squares: Floats = self._moments[_CC] + _divide(self._moments[_C] ** 2, self._moments[_N], 0.0)
        return squares

    def _apart(self) -> Floats:
        """Return (Σc)² - Σc², which is 0 where at most one text has a count."""
        n = self._moments[_N]
        apart: Floats = self._moments[_C] ** 2 * _divide(n - 1, n, 0.0) - self._moments[_CC]
        return apart


class _Share(NamedTuple):
    """A share, and its number of independent units, for `share_interval` and `share_p_above`.

    Attributes:
        r: The share.
        n: The units that would have its standard error.
        correction: For continuity.
        n_unseen: The units under the assumed dependence within texts; infinite without the second bound.
    """

    r: Floats
    n: Floats
    correction: Floats
    n_unseen: Floats


def _moments_of(s: Floats, c: Floats) -> Floats:
    """Return the moments of a batch of texts, (6, *shape), from s and c, (text, *shape)."""
    has = (s != 0) | (c != 0)
    n = has.sum(0)
    sum_s = s.sum(0)
    sum_c = c.sum(0)
    at_least_one = np.maximum(n, 1)
    ds = np.where(has, s - sum_s / at_least_one, 0.0)
    dc = np.where(has, c - sum_c / at_least_one, 0.0)
    return np.stack([n, sum_s, sum_c, (ds * ds).sum(0), (ds * dc).sum(0), (dc * dc).sum(0)])


def _merge(a: Floats, b: Floats) -> Floats:
    """Return the moments of the texts of two parts (Chan, Golub & LeVeque)."""
    merged: Floats = a + b
    # Of a part without texts the weight is 0, whatever is taken for its means.
    weight = a[_N] * b[_N] / np.maximum(merged[_N], 1)
    ds = b[_S] / np.maximum(b[_N], 1) - a[_S] / np.maximum(a[_N], 1)
    dc = b[_C] / np.maximum(b[_N], 1) - a[_C] / np.maximum(a[_N], 1)
    merged[_SS] += ds * ds * weight
    merged[_SC] += ds * dc * weight
    merged[_CC] += dc * dc * weight
    return merged


def _divide(a: Floats, b: Floats, undefined: float) -> Floats:
    """Return a / b; `undefined` where b is 0."""
    result: Floats = np.divide(a, b, out=np.full(np.shape(a), undefined), where=b != 0)
    return result
