"""Intervals of means over few pairs of texts (Student's t), and of their shares of a mean total (Fieller).

A pair is a clean and a changed text, whose runs are compared, and a value is an effect that was measured on it. Pairs
are drawn independently, and all count the same. NumPy and SciPy only; knows no interventions.
"""

import numpy as np
from scipy.special import stdtrit

from attnscope.core.intervals import TAIL_PROBABILITY, Floats, TextSums, mean_interval, mean_p_above

RARE = 1e-5
"""The one-sided probability of a t that is so large that it is not put down to chance."""

MARGIN = 1.5
"""A total has shares if its t is this many times the quantile of `RARE`: then their intervals have a useful width."""


def degrees_of_freedom(n_pairs: int) -> float:
    """Return a third of the n - 1 degrees of freedom of Student's t, at least 1.

    The spread of few skewed values is often too small. With all n - 1, the 95% interval of exponential effects holds
    the mean in 88% of samples of 5 pairs, and in 90% of samples of 10. With a third it is 98 and 95%, and 99% for
    normal effects (`python -m benchmarks.patch_intervals`). With many pairs it makes no difference. The rule is ours.
    """
    return max(1.0, (n_pairs - 1) / 3)


def pair_means(values: Floats) -> tuple[Floats, Floats, Floats, Floats]:
    """Return means over pairs, the ends of their `mean_interval`, and p-values of being 0 (two-sided).

    Because effects may be skewed, Student's t has `degrees_of_freedom`. p is below 0.05 exactly where the interval
    excludes 0.

    Args:
        values: (pair, ...); n pairs. NaN stays NaN.

    Returns:
        Four arrays of shape (...). With a single pair the ends and p are NaN. If all pairs agree, the interval is the
        mean itself, and p is 0, or 1 for a mean of 0.
    """
    n = len(values)
    mean: Floats = values.mean(0)
    if n < 2:
        unknown = np.full_like(mean, np.nan)
        return mean, unknown, unknown, unknown
    # Student's t from the error of the mean, (...,).
    error = values.std(0, ddof=1) / np.sqrt(n)
    degrees = np.full_like(mean, degrees_of_freedom(n))
    n_pairs = np.full_like(mean, n)
    sample = TextSums(mean, error, degrees, n_pairs, n_pairs)
    low, high = mean_interval(sample)
    # Two-sided: twice the p of |mean| > 0, and 1 for a mean of 0 without an error.
    p = 2 * mean_p_above(sample._replace(ratio=np.abs(mean)), 0.0)
    return mean, low, high, np.minimum(p, 1)


def shares_of_total(values: Floats, total: Floats) -> tuple[Floats, Floats, Floats]:
    """Return the mean values divided by the mean total, and the low and high ends of their intervals.

    The share is rho = E(value) / E(total). Its interval has every rho that the pairs do not refute, that is, with
    |mean(d)| <= k · se(d) for d = value - rho · total (Fieller 1954). Let T be the mean total divided by its standard
    error, and u and t the quantiles of Student's t at one-sided probabilities of `RARE` and 2.5%:

        c = MARGIN · u                          the least |T| for which there is a share
        k = max(t, u · (3 - |T| / c) / 2)

    A strong total has k = t, the 95% interval. A total near c has a k of up to u. Most samples with such a T have it by
    chance: their mean total is too large, so the share is too small, and a 95% interval too narrow to make up for it.
    With k = u it reaches down to every total that would have shares with more than the probability RARE. The rule is
    ours. Simulated: if a share is shown, its interval holds the true one in 90% of samples or more
    (`python -m benchmarks.patch_intervals`).

    Args:
        values: (pair, quantity).
        total: The totals of the same pairs, (pair, 1), or (pair, quantity) where each quantity has its own.

    Returns:
        Three arrays of shape (quantity,); NaN if the total is too weak.
    """
    n = len(total)
    means: Floats = values.mean(0)
    if n < 2:
        unknown = np.full_like(means, np.nan)
        return unknown, unknown, unknown

    # Variances and covariances of the means.
    mean_total: Floats = total.mean(0)
    total_distances = total - mean_total
    value_distances = values - means
    scale = n * (n - 1)
    var_total = (total_distances**2).sum(0) / scale
    var_values = (value_distances**2).sum(0) / scale
    covariance = (total_distances * value_distances).sum(0) / scale

    # |T|; infinite for a total without an error, the same in all pairs, unless it is 0.
    error = np.sqrt(var_total)
    strength = np.where(mean_total == 0, 0.0, np.inf)
    np.divide(np.abs(mean_total), error, out=strength, where=error > 0)
    weakest = weakest_total(n)
    degrees = degrees_of_freedom(n)
    widest = _quantile(degrees, RARE) * (3 - strength / weakest) / 2
    k = np.maximum(_quantile(degrees, TAIL_PROBABILITY), widest)

    # (mean - rho · mean_total)² = k² · (var_values - 2 rho · covariance + rho² · var_total), solved for rho. Too weak a
    # total makes all of it NaN.
    mean_total = np.where(strength >= weakest, mean_total, np.nan)
    a = mean_total**2 - k**2 * var_total
    b = means * mean_total - k**2 * covariance
    c = means**2 - k**2 * var_values
    root = np.sqrt(np.maximum(b**2 - a * c, 0))
    return means / mean_total, (b - root) / a, (b + root) / a


def weakest_total(n_pairs: int) -> float:
    """Return c of `shares_of_total`: at how many standard errors from 0 a total begins to have shares.

    The rule is ours; `python -m benchmarks.patch_intervals` simulates it.
    """
    return MARGIN * _quantile(degrees_of_freedom(n_pairs), RARE)


def _quantile(degrees: float, tail: float) -> float:
    """Return the value that Student's t exceeds with a probability of `tail`."""
    return float(-stdtrit(degrees, tail))
