"""How sure means over few pairs of texts are, and their shares of a mean total (Student's t, Fieller).

Pairs are drawn independently, and all count the same. NumPy and SciPy only; knows no interventions.
"""

import numpy as np
from scipy.special import stdtr, stdtrit

from attnscope.core.intervals import END, Floats, Sample, mean_interval

RARE = 1e-5
"""The probability that is neglected when a share is shown: that a total of 0 passes for a strong one."""

MARGIN = 1.5
"""By how much a total must exceed the bound of `RARE`, so that intervals of shares have a useful width."""


def degrees_of_freedom(n_pairs: int) -> float:
    """Return a third of the n - 1 degrees of freedom of Student's t, at least 1.

    With all n - 1 the intervals of exponential effects hold the mean in 88% of samples of 5 pairs, and in 90% of those
    of 10: the spread of few skewed values is often too small. With a third of them it is 98 and 95%, and 99% for normal
    effects (`python -m benchmarks.patch_intervals`). The difference goes as pairs become many. The rule is ours.
    """
    return max(1.0, (n_pairs - 1) / 3)


def pair_means(values: Floats) -> tuple[Floats, Floats, Floats, Floats]:
    """Return means over pairs, the ends of their `mean_interval`, and p-values of being 0 (two-sided).

    Pairs are drawn independently, and all count the same. Effects may be skewed: Student's t has `degrees_of_freedom`.
    p is below 0.05 exactly where the interval excludes 0.

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
    low, high = mean_interval(Sample(mean, error, degrees, n_pairs, n_pairs))
    # Without an error t is infinite, or 0 for a mean of 0; NaN stays.
    distance = np.abs(mean)
    t_without_error = np.where(distance > 0, np.inf, distance)
    t = np.divide(distance, error, out=t_without_error, where=error > 0)
    return mean, low, high, 2 * stdtr(degrees, -t)


def shares_of_total(values: Floats, total: Floats) -> tuple[Floats, Floats, Floats]:
    """Return the mean values divided by the mean total, and the low and high ends of their intervals.

    The share rho = E(value) / E(total) is shown if |T| >= c, with T the mean total divided by its standard error. Its
    interval has every rho that the pairs do not refute: |mean(d)| <= k · se(d) for d = value - rho · total (Fieller
    1954). With u and t the quantiles of Student's t at one-sided probabilities of `RARE` and 2.5%:

        c = MARGIN · u
        k = max(t, u · (3 - |T| / c) / 2)

    A strong total has k = t, the 95% interval. A total near c has up to k = u, for a reason: among samples whose total
    only just passes, most owe it to chance, and then the 95% interval is too narrow and off. With k = u it reaches down
    to every total that would pass with more than the probability RARE. The rule is ours. Simulated: if a share is
    shown, its interval holds the true one in 90% of samples or more (`python -m benchmarks.patch_intervals`).

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

    # |T|: how many standard errors the total is away from 0. One that is the same for all pairs is strong.
    error = np.sqrt(var_total)
    strength = np.where(mean_total == 0, 0.0, np.inf)
    np.divide(np.abs(mean_total), error, out=strength, where=error > 0)
    weakest = weakest_total(n)
    degrees = degrees_of_freedom(n)
    widest = _quantile(degrees, RARE) * (3 - strength / weakest) / 2
    k = np.maximum(_quantile(degrees, END), widest)

    # (mean - rho · mean_total)² = k² · (var_values - 2 rho · covariance + rho² · var_total), solved for rho.
    a = mean_total**2 - k**2 * var_total
    b = means * mean_total - k**2 * covariance
    c = means**2 - k**2 * var_values
    root = np.sqrt(np.maximum(b**2 - a * c, 0))
    a = np.where(strength >= weakest, a, np.nan)
    mean_total = np.where(strength >= weakest, mean_total, np.nan)
    return means / mean_total, (b - root) / a, (b + root) / a


def weakest_total(n_pairs: int) -> float:
    """Return c of `shares_of_total`: how many standard errors a total must be away from 0 to have shares.

    The rule is ours; `python -m benchmarks.patch_intervals` simulates it.
    """
    return MARGIN * _quantile(degrees_of_freedom(n_pairs), RARE)


def _quantile(degrees: float, tail: float) -> float:
    """Return the value that Student's t exceeds with a probability of `tail`."""
    return float(-stdtrit(degrees, tail))
