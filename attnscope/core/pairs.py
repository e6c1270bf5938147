"""Compute intervals of means over few pairs of texts (Student's t), and of their shares of a mean total (Fieller).

A pair is a clean text and a changed one. A value is an effect that was measured on a pair, by comparing the runs of its
texts. Pairs are drawn independently, and all have the same weight. The module uses NumPy and SciPy only.
"""

import numpy as np
from scipy.special import stdtrit

from attnscope.arrays import Floats
from attnscope.core.intervals import TAIL_PROBABILITY, TextSums, mean_interval, mean_p_above

RARE_PROBABILITY = 1e-5
"""A t with a smaller one-sided probability is not put down to chance."""

MARGIN = 1.5
"""How many times the quantile of `RARE_PROBABILITY` the t of a total must be. Shares of a weaker total would have
intervals too wide to be useful."""


def degrees_of_freedom(n_pairs: int) -> float:
    """Return a third of the n - 1 degrees of freedom of Student's t, at least 1.

    Few skewed values often have too small a spread. With all n - 1, the 95% interval of exponential effects holds the
    mean in 88% of samples of 5 pairs, and in 90% of samples of 10. With a third of them it holds the mean in 98 and
    95%, and for normal effects in 99% (`python -m benchmarks.patch_intervals`). With many pairs the choice makes no
    difference. The rule is ours.
    """
    return max(1.0, (n_pairs - 1) / 3)


def pair_means(values: Floats) -> tuple[Floats, Floats, Floats, Floats]:
    """Return means over pairs, the ends of their 95% intervals, and two-sided p-values that a mean is 0.

    Student's t has fewer `degrees_of_freedom` than usual, because effects may be skewed. p is below 0.05 exactly where
    the interval excludes 0.

    Args:
        values: The values of n pairs, (pair, ...). A NaN makes its mean, ends and p NaN.

    Returns:
        Four arrays of shape (...). With a single pair the ends and p are NaN. If all pairs agree, the interval is the
        mean itself, and p is 0, or 1 for a mean of 0.
    """
    n = len(values)
    mean: Floats = values.mean(0)
    if n < 2:
        unknown = np.full_like(mean, np.nan)
        return mean, unknown, unknown, unknown
    # The standard error of the mean, (...,).
    standard_error = values.std(0, ddof=1) / np.sqrt(n)
    degrees = np.full_like(mean, degrees_of_freedom(n))
    n_pairs = np.full_like(mean, n)
    sample = TextSums(mean, standard_error, degrees, n_pairs, n_pairs)
    low, high = mean_interval(sample)
    # Two-sided: twice the p of |mean| > 0. For a mean of 0 without an error twice p is 2, so it is cut at 1.
    p = 2 * mean_p_above(sample._replace(ratio=np.abs(mean)), 0.0)
    return mean, low, high, np.minimum(p, 1)


def shares_of_total(values: Floats, total: Floats) -> tuple[Floats, Floats, Floats]:
    """Return the mean values divided by the mean total, and the low and high ends of their intervals.

    The share is rho = E(value) / E(total). Its interval has every rho that the pairs do not reject: every rho with
    |mean(d)| <= k · se(d), where d = value - rho · total (Fieller 1954). Let T be the mean total divided by its
    standard error, and u and t the quantiles of Student's t at one-sided probabilities of `RARE_PROBABILITY` and 2.5%:

        c = MARGIN · u                          the smallest |T| for which there is a share
        k = max(t, u · (3 - |T| / c) / 2)

    A strong total has k = t, which gives the 95% interval. A total with |T| near c has a k
    near u, because most samples reach such a T by chance: their mean total is too large, so the share is too small, and
    a 95% interval is too narrow to reach the true share. With k = u the interval covers every total that would reach c
    with a probability above `RARE_PROBABILITY`. The rule is ours. In simulations the interval of a share that is shown
    holds the true share in at least 90% of samples (`python -m benchmarks.patch_intervals`).

    Args:
        values: The values of some quantities, (pair, quantity).
        total: The totals of the same pairs, (pair, 1); or (pair, quantity) if each quantity has a total of its own.

    Returns:
        Three arrays of shape (quantity,); NaN if |T| is below c, or there is a single pair.
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

    # |T|. If the total is the same in all pairs, it has no error: |T| is infinite, or 0 for a total of 0.
    standard_error = np.sqrt(var_total)
    strength = np.where(mean_total == 0, 0.0, np.inf)
    np.divide(np.abs(mean_total), standard_error, out=strength, where=standard_error > 0)
    min_strength = min_total_strength(n)
    degrees = degrees_of_freedom(n)
    weak_total_k = _quantile(degrees, RARE_PROBABILITY) * (3 - strength / min_strength) / 2
    k = np.maximum(_quantile(degrees, TAIL_PROBABILITY), weak_total_k)

    # (mean - rho · mean_total)² = k² · (var_values - 2 rho · covariance + rho² · var_total), solved for rho. A mean
    # total of NaN makes all results NaN.
    mean_total = np.where(strength >= min_strength, mean_total, np.nan)
    a = mean_total**2 - k**2 * var_total
    b = means * mean_total - k**2 * covariance
    c = means**2 - k**2 * var_values
    root = np.sqrt(np.maximum(b**2 - a * c, 0))
    return means / mean_total, (b - root) / a, (b + root) / a


def min_total_strength(n_pairs: int) -> float:
    """Return c of `shares_of_total`: how many standard errors a mean total must be away from 0 to have shares.

    The rule is ours; `python -m benchmarks.patch_intervals` simulates it.
    """
    return MARGIN * _quantile(degrees_of_freedom(n_pairs), RARE_PROBABILITY)


def _quantile(degrees: float, tail_probability: float) -> float:
    """Return the value that Student's t exceeds with this probability."""
    return float(-stdtrit(degrees, tail_probability))
