"""Sums over texts that are exact, mergeable and small, and what they say: ratios, intervals, p-values.

A head measure gives two numbers per text: a sum s and a count c (the mass on the previous token over all queries, and
how many queries have one). The head's value is Σs / Σc. How sure it is follows from three more sums, Σs², Σsc and Σc²:
five numbers for any amount of text.

All five are integers, so adding and merging are exact: the order of the texts, their grouping into batches, and the
order of merges do not matter. Knows no measures, no heads and no torch.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import stdtr, stdtrit

from attnscope.core.exact import mapped_arrays

Floats = NDArray[np.float64]
Integers = NDArray[np.object_]  # Python's, of any size

# A text's s and c become integers X = s * 2^50 of at most 26 significant bits, so that products of two of them are
# exact in float64. |s| <= 2^60: X stays within 2^110, a product within 2^220.
_FRACTION_BITS = 50
LARGEST = 2.0**60
MAX_TEXTS = 2**32

# An integer is held in limbs of 42 bits, lowest first, in int64: all but the last in 0 .. 2^42 - 1, the last with the
# sign. That writes each integer in one way only. With MAX_TEXTS texts the last one needs 59 bits.
_WIDTH = 42
_NAMES = ("s", "c", "ss", "sc", "cc")
_N_LIMBS = (3, 3, 6, 6, 6)
_FIRST = tuple(sum(_N_LIMBS[:i]) for i in range(len(_N_LIMBS)))
N_LIMBS = sum(_N_LIMBS)
_MASK = np.int64((1 << _WIDTH) - 1)

# Slices of one limb are below 2^41: the float64 sum of 2^11 of them is exact, the int64 sum of 2^20 fits.
_MOST_AT_ONCE = 2**11
_MOST_BETWEEN_CARRIES = 2**20
_ELEMENTS_AT_ONCE = 2**16  # what the processor's cache holds of the temporary arrays; changes no result

DEPENDENCE = 0.3
"""The intraclass correlation of the queries of a text that is assumed of what was never seen; see `share_interval`."""

_FEWEST_DEGREES = 0.1  # of freedom; there t is 2e12 at 95%, and further down scipy's stdtrit goes wrong


class RunningSums:
    """The five sums Σs, Σc, Σs², Σsc, Σc² over texts, for an array of quantities, and what follows from them.

    Precision: each text's s and c are first rounded to 26 significant bits (relative error at most 2^-26 = 1.5e-8;
    counts up to 2^26 = 67,108,864 are exact) and to multiples of 2^-50 (9e-16). After that everything is exact integer
    arithmetic up to the last step of each result, which is rounded once. Range: |s|, c <= 2^60, and 2^32 texts. Memory:
    192 bytes per quantity.

    A new object holds no text and is the identity of `merge`. Objects with the same texts have bit-identical
    `to_arrays()` and results, however the texts were added and merged.

    Args:
        shape: The shape of the quantities, such as (layer, head, measure); () is one quantity.
    """

    def __init__(self, shape: tuple[int, ...] = ()) -> None:
        self.shape = tuple(int(size) for size in shape)
        self.n_texts = 0
        self._limbs = mapped_arrays.zeros((N_LIMBS, math.prod(self.shape)), np.int64)

    def add(self, sums: ArrayLike, counts: ArrayLike) -> None:
        """Adds one text, or a batch of texts.

        Args:
            sums: s of each quantity: `shape` for one text, (text, *shape) for a batch. Any sign.
            counts: c of each quantity, at least 0; broadcast to the shape of `sums`. Both are 0 if a measure is
                undefined for a text.

        Raises:
            ValueError: A shape does not fit, a number is NaN or infinite, a count is negative. Nothing was added.
            OverflowError: A number is beyond 2^60 or there are more than 2^32 texts. Nothing was added.
        """
        s = np.asarray(sums, np.float64)
        if s.shape == self.shape:
            s = s[None]
        elif s.shape[1:] != self.shape or s.ndim == 0:
            raise ValueError(f"sums are {self.shape} or (text, *{self.shape}); got {s.shape}")
        c = np.broadcast_to(np.asarray(counts, np.float64), s.shape)
        n = len(s)
        if self.n_texts + n > MAX_TEXTS:
            raise OverflowError(f"{self.n_texts + n} texts are more than {MAX_TEXTS}")
        if not (np.isfinite(s).all() and np.isfinite(c).all()):
            raise ValueError("sums and counts are finite; a text gave NaN or infinity")
        if (c < 0).any():
            raise ValueError(f"counts are at least 0; got {c.min()}")
        largest = max(np.abs(s).max(initial=0.0), c.max(initial=0.0))
        if largest > LARGEST:
            raise OverflowError(f"{largest:g} is more than 2^60, the most that is held exactly")

        cells = self._limbs.shape[1]
        s, c = s.reshape(n, cells), c.reshape(n, cells)
        step = min(_MOST_AT_ONCE, max(1, _ELEMENTS_AT_ONCE // max(1, cells)))
        waiting = 0
        for start in range(0, n, step):
            part = slice(start, start + step)
            if waiting + step > _MOST_BETWEEN_CARRIES:
                _carry(self._limbs)
                waiting = 0
            _accumulate(self._limbs, _to_integers(s[part]), _to_integers(c[part]))
            waiting += step
        _carry(self._limbs)
        self.n_texts += n

    def merge(self, other: "RunningSums") -> "RunningSums":
        """The sums over the texts of both; neither is changed.

        Raises:
            ValueError: The shapes differ.
            OverflowError: Together they hold more than 2^32 texts.
        """
        if other.shape != self.shape:
            raise ValueError(f"sums of {self.shape} and of {other.shape} cannot be merged")
        if self.n_texts + other.n_texts > MAX_TEXTS:
            raise OverflowError(f"{self.n_texts + other.n_texts} texts are more than {MAX_TEXTS}")
        whole = RunningSums(self.shape)
        whole.n_texts = self.n_texts + other.n_texts
        np.add(self._limbs, other._limbs, out=whole._limbs)
        _carry(whole._limbs)
        return whole

    def beside(self, other: "RunningSums") -> "RunningSums":
        """These quantities and others after them, along the last axis; for results, not for further merges.

        Args:
            other: Sums of the same shape except for the last axis; they may be over other texts.
        """
        whole = RunningSums((*self.shape[:-1], self.shape[-1] + other.shape[-1]))
        whole.n_texts = max(self.n_texts, other.n_texts)
        mine, theirs = (sums._limbs.reshape(N_LIMBS, *sums.shape) for sums in (self, other))
        np.concatenate([mine, theirs], -1, out=whole._limbs.reshape(N_LIMBS, *whole.shape))
        return whole

    def to_arrays(self) -> dict[str, NDArray[np.int64]]:
        """The whole state as integer arrays, for npz without pickle: `limbs`, (24, *shape), and `n_texts`, ()."""
        return {"limbs": self._limbs.reshape(N_LIMBS, *self.shape).copy(), "n_texts": np.array(self.n_texts, np.int64)}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]]) -> "RunningSums":
        """The object whose `to_arrays` these are.

        Raises:
            KeyError: An array is missing.
            ValueError: They are not such arrays.
        """
        limbs, n_texts = np.asarray(arrays["limbs"]), np.asarray(arrays["n_texts"])
        if limbs.dtype != np.int64 or limbs.ndim < 1 or len(limbs) != N_LIMBS:
            raise ValueError(f"limbs are int64, ({N_LIMBS}, ...); got {limbs.dtype}, {limbs.shape}")
        if n_texts.shape != () or n_texts.dtype.kind not in "iu" or not 0 <= n_texts <= MAX_TEXTS:
            raise ValueError(f"n_texts is one integer from 0 to 2^32; got {n_texts!r}")
        sums = cls(limbs.shape[1:])
        sums.n_texts = int(n_texts)
        sums._limbs[:] = limbs.reshape(sums._limbs.shape)
        canonical = sums._limbs.copy()
        _carry(canonical)
        if not np.array_equal(canonical, sums._limbs):
            raise ValueError("limbs are out of range: the arrays are damaged")
        return sums

    def total(self, name: str) -> Floats:
        """One of the five sums, rounded to float64 once.

        Args:
            name: "s", "c", "ss" (Σs²), "sc" or "cc".
        """
        unit = 1 << (_FRACTION_BITS * len(name))
        return self._each(lambda value: value / unit, self._exact(name))

    def ratio(self) -> Floats:
        """The value Σs / Σc, rounded once; NaN where Σc is 0."""
        return self._each(_divide, self._exact("s"), self._exact("c"))

    def effective_texts(self) -> Floats:
        """How many texts of equal count would weigh the same: (Σc)² / Σc² (Kish 1965, section 11.7).

        From 1 (one text holds everything) to the number of texts; 0 where Σc is 0.
        """

        def effective(c: int, cc: int) -> float:
            return c * c / cc if cc else 0.0

        return self._each(effective, self._exact("c"), self._exact("cc"))

    def standard_error(self) -> Floats:
        """The standard error of r by the delta method, for texts drawn independently.

        With the residuals d = s - r·c of the texts, whose exact Σd² is Σs² - 2rΣsc + r²Σc²:

            se² = Σd² / (Σc)² · m / (m - 1),   m = (Σc)² / Σc²

        This is the ratio estimator of Cochran 1977, Sampling Techniques, section 6.4 (eq. 6.13, without the finite
        population), with its n/(n-1) replaced by m/(m-1), m the effective number of texts. For texts of one length both
        are the same. For others: if a text's s has a variance in proportion to its c, E Σd² is Σc·(1 - Σc²/(Σc)²) times
        the constant of proportion, so m/(m-1) makes se² unbiased and n/(n-1) does not.

        NaN if fewer than two texts have a count.
        """
        return self._each(_standard_error, *map(self._exact, _NAMES))

    def interval(self, level: float = 0.95) -> tuple[Floats, Floats]:
        """The confidence interval r ± t·se, t from Student's t with m - 1 degrees of freedom.

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
        """One-sided p-value against H0: the ratio is at most the threshold.

        P(T >= (r - threshold) / se) with T of Student's t, m - 1 degrees of freedom: p < (1 - level) / 2 exactly where
        the interval at that level lies above the threshold. For texts of one length it is the one-sample t test on
        s - threshold·c. For texts of varied lengths that test, with the variance about its mean, takes the spread of
        the lengths for noise: it cannot tell even a perfect head (s = c) from the threshold.

        0 or 1 where se is 0. NaN without a standard error, or if the threshold is NaN.

        Args:
            threshold: Broadcast to the shape of the quantities.
        """
        limits = np.broadcast_to(np.asarray(threshold, np.float64), self.shape).ravel()
        above = self._each(_difference, self._exact("s"), self._exact("c"), limits).ravel()
        error = self.standard_error().ravel()
        t = np.divide(above, error, out=np.where(above > 0, np.inf, -np.inf), where=error != 0)
        # Not 1 - stdtr(t): that loses all digits of a small p.
        p: Floats = np.where(np.isnan(above), np.nan, stdtr(self._degrees().ravel(), -t))
        return np.where(np.isnan(error), np.nan, p).reshape(self.shape)

    def share_interval(
        self,
        level: float = 0.95,
        *,
        hits: ArrayLike = False,
        unseen: ArrayLike = True,
        dependence: ArrayLike = DEPENDENCE,
        units: ArrayLike = 1.0,
    ) -> tuple[Floats, Floats]:
        """The confidence interval of a share, 0 <= s <= c: it stays within 0 to 1, and holds near them.

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
        """The largest share u of units of another kind of which these may show none, 0 to 1; NaN without a text.

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
        """One-sided p-value against H0: the share is at most the threshold, broadcast to the shape of the quantities.

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
        """Degrees of freedom m - 1, exact where m is barely above 1; NaN where there is no interval."""

        def degrees(c: int, cc: int) -> float:
            return (c * c - cc) / cc if c * c > cc else math.nan

        return self._each(degrees, self._exact("c"), self._exact("cc"))

    def _exact(self, name: str) -> Integers:
        """One of the sums as integers, in units of 2^-50 for s and c, 2^-100 for the products."""
        number = _NAMES.index(name)
        first, n = _FIRST[number], _N_LIMBS[number]
        value: Integers = self._limbs[first + n - 1].astype(object)
        for limb in self._limbs[first : first + n - 1][::-1]:
            value = value * (1 << _WIDTH) + limb.astype(object)
        return value

    def _each(self, function: Callable[..., float], *columns: Integers | Floats) -> Floats:
        values = [function(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]
        return np.array(values, np.float64).reshape(self.shape)


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


# Exact sums -----------------------------------------------------------------------------------------------------


def _to_integers(x: Floats) -> Floats:
    """Numbers in units of 2^-50, rounded to 26 significant bits and to an integer; still float64.

    The rounding to 26 bits is Veltkamp's splitting (Dekker 1971, Numerische Mathematik 18).
    """
    scaled = x * (2.0**27 + 1)
    rounded = scaled - (scaled - x)
    rounded *= 2.0**_FRACTION_BITS
    return np.rint(rounded, out=rounded)


def _accumulate(limbs: NDArray[np.int64], s: Floats, c: Floats) -> None:
    """Adds the five sums over the first axis to the limbs, without carrying."""
    for first, n, values in zip(_FIRST, _N_LIMBS, (s, c, s * s, s * c, c * c), strict=True):
        for number, total in _sliced_sums(values, n):
            limbs[first + number] += total


def _sliced_sums(rest: Floats, n_limbs: int) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """The sum over the first axis, as signed amounts of single limbs, from the highest that is not zero.

    Each value is cut at the bits where limbs meet, into slices that are multiples of 2^bits and that float64 adds
    without error (Demmel & Nguyen 2015, Parallel reproducible summation).
    """
    largest = max(rest.max(initial=0.0), -rest.min(initial=0.0))
    for number in reversed(range(n_limbs)):
        bits = number * _WIDTH
        if largest < 2.0 ** (bits - 1):  # it would be cut to 0 here
            continue
        if number:
            # Adding and taking away 1.5 * 2^(52 + bits) rounds to a multiple of 2^bits.
            shift = 1.5 * 2.0 ** (52 + bits)
            part = rest + shift
            part -= shift
            rest = rest - part
            largest = 2.0 ** (bits - 1) if rest.any() else 0.0
        else:
            part = rest
        yield number, (part.sum(axis=0) * 2.0**-bits).astype(np.int64)


def _carry(limbs: NDArray[np.int64]) -> None:
    """Brings limbs into their one canonical form, in place."""
    for first, n in zip(_FIRST, _N_LIMBS, strict=True):
        for number in range(first, first + n - 1):
            limbs[number + 1] += limbs[number] >> _WIDTH
            limbs[number] &= _MASK


def _divide(a: int, b: int) -> float:
    return a / b if b else math.nan


def _difference(s: int, c: int, limit: float) -> float:
    """The value of s / c - limit, rounded once: subtracting floats would lose the digits where the two are close."""
    if not c or math.isnan(limit):
        return math.nan
    if math.isinf(limit):
        return -limit
    a, b = limit.as_integer_ratio()
    return (s * b - a * c) / (c * b)


def _standard_error(s: int, c: int, ss: int, sc: int, cc: int) -> float:
    apart = c * c - cc  # 0 where at most one text has a count
    if apart <= 0:
        return math.nan
    return math.sqrt((ss * c * c - 2 * s * c * sc + s * s * cc) / (c * c * apart))
