"""Compute confidence intervals and tests of ratios of sums over texts.

A ratio is r = Σs / Σc, with a sum s and a count c per text. For example, s is the attention that a head gives to
punctuation in a text, and c the number of queries. Texts are assumed to be drawn independently. There are three kinds
of ratio:

- means and differences of any sign: `mean_interval`, `mean_p_above` (Student's t);
- shares, 0 <= s <= c: `share_interval`, `share_p_above` (Wilson's score interval);
- ratios with 0 <= s whose Σs may come from a few texts: `skewed_interval` (limits of a Poisson mean).

Means over few pairs of texts are in `core.pairs`. p-values of several tests are combined by `simes` and
`benjamini_hochberg`.

The spread of the texts in a sample cannot show a kind of text that the sample lacks. If a head fires in one text of a
hundred, most samples of forty texts look as if it never did. So some intervals also allow for *unseen texts*. They
assume the largest share of texts that the sample could have missed (`unseen_share`), the largest weight that these
could have (`weight_of_unseen`), and the lowest or highest value that is possible in them. If the interval would then be
too wide to be of use, it is NaN.

NumPy and SciPy only. The module knows no heads and no measures. `core.sums` computes the sums that it needs
(`TextSums`).
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri, stdtr, stdtrit

from attnscope.arrays import Floats

FloatOrArray = Floats | NDArray[np.bool_] | float
"""One value for all ratios, or an array that broadcasts to the shape of the ratios."""

TAIL_PROBABILITY = 0.025
"""The probability that the true value is below the low end of a 95% interval, and that it is above the high end."""

UNSEEN_TAIL_PROBABILITY = 0.1
"""The tail probability of ends that assume the largest possible share, weight and value of unseen texts at once. With
TAIL_PROBABILITY instead, such ends are twice as far from the ratio as real texts need (docs/evidence.md)."""

DEPENDENCE = 0.3
"""The intraclass correlation of the queries of a text, 0 to 1, that `share_interval` assumes when it allows for unseen
texts."""

MAX_UNSEEN_WEIGHT = 0.6
"""If unseen texts could hold more than this share of Σc, a predicted share has no interval. For three texts of equal
count they could hold 0.54."""

MAX_INTERVAL_WIDTH = 1.0
"""A wider interval of a predicted share is of no use, and is returned as NaN."""

MIN_EFFECTIVE_TEXTS = 2.0
"""With fewer effective texts (`TextSums.n_texts`) a predicted share has no interval."""

MAX_UNSEEN_LOSS = 1.5
"""The largest loss that a prediction of attention may have in an unseen text, divided by the loss of uniform attention.

It is above 1, because a prediction that was fitted on other texts may be worse than uniform attention. In one of ten
texts its loss is more than 1.2 times that of uniform attention (SmolLM2)."""

_MIN_DEGREES_OF_FREEDOM = 0.1
"""With fewer degrees of freedom there is no interval. At 0.1 the quantile of t is 2e12; below, SciPy's stdtrit
fails."""

_EVENT_RANGE = (1e-6, 1e12)
"""The number of events k in `skewed_interval` is clipped to this range, so that its powers and roots stay finite."""


class TextSums(NamedTuple):
    """Hold what intervals need of the sums s and counts c of texts. All fields are arrays of one shape.

    Attributes:
        ratio: r = Σs / Σc; NaN if Σc is 0.
        standard_error: The standard error of r, written se; NaN with fewer than two texts.
        degrees_of_freedom: The effective number of texts less 1; NaN if `standard_error` is.
        n_texts: The effective number of texts, (Σc)² / Σc² (Kish 1965, section 11.7).
        total: Σc.
    """

    ratio: Floats
    standard_error: Floats
    degrees_of_freedom: Floats
    n_texts: Floats
    total: Floats


# Means ----------------------------------------------------------------------------------------------------------


def mean_interval(sample: TextSums) -> tuple[Floats, Floats]:
    """Return the ends of the 95% interval r ± t·se, with t the quantile of Student's t distribution.

    The interval is not clipped to any range. Its width is 0 if all texts have the same s / c. The ends are NaN if se is
    NaN, or with fewer than 1.1 effective texts.
    """
    half_width = _t_quantile(sample) * sample.standard_error
    return sample.ratio - half_width, sample.ratio + half_width


def mean_p_above(sample: TextSums, threshold: FloatOrArray) -> Floats:
    """Return the one-sided p-value against H0: the mean is at most the threshold, broadcast to the sample's shape.

    p = P(T >= (r - threshold) / se). It is below 2.5% exactly where `mean_interval` lies above the threshold. It is 0
    or 1 if se is 0, and NaN if se or the threshold is NaN.
    """
    # t = (r - threshold) / se; ±infinity where se is 0. Adding `distance` makes it NaN where the distance is NaN.
    distance = sample.ratio - threshold
    t_without_error = np.where(distance > 0, np.inf, -np.inf) + distance
    t = np.divide(distance, sample.standard_error, out=t_without_error, where=sample.standard_error != 0)
    # P(T >= t) = P(T <= -t). The form 1 - P(T <= t) would lose all digits of a small p.
    p: Floats = stdtr(sample.degrees_of_freedom, -t)
    return p


# Shares ---------------------------------------------------------------------------------------------------------


def share_interval(sample: TextSums, **options: FloatOrArray) -> tuple[Floats, Floats]:
    """Return the ends of the 95% interval of a share, 0 <= s <= c, within 0 to 1. It also holds near 0 and 1.

    The interval r ± t·se does not. Suppose each of ten texts counts 1 or 0, and the true share is 0.97. Then in three
    of four samples all texts count 1, and the interval is [1, 1]. Here each end is the one of two bounds that is
    farther from r:

    1. Wilson's score interval with continuity correction (Newcombe 1998, Statistics in Medicine 17, method 4) for
       n = r(1 - r) / se² independent units (Korn & Graubard 1998, Survey Methodology 24), with Student's t for the
       normal quantile. Its variance at an end θ is se² · θ(1 - θ) / r(1 - r): it grows towards the middle.
    2. A bound for unseen units. Suppose a share u of all units is of a kind that the sample lacks. N independent units
       show none of them with probability (1 - u)^N, which is α = 2.5% for u = 1 - α^(1/N). If the value of all unseen
       units is 0, the share is r · α^(1/N). If it is 1, the share is 1 - (1 - r) · α^(1/N). For a sample of ones this
       is the low end of Clopper & Pearson (1934). N is from `independent_units`.

    In simulations with 10 to 100 texts of graded values and true shares of 0.01 to 0.99, 95% intervals cover the true
    share in 94% of samples or more. If the units of a text are all 1 or all 0, coverage is 74% at worst
    (docs/evidence.md).

    Args:
        sample: The sums over texts.
        options: `hits`, `unseen`, `dependence` and `units`: the arguments of `_prepare_share`.
    """
    share = _prepare_share(sample, **options)
    r = share.r

    # Bound 1: the roots θ of (x - θ)² = a θ(1 - θ), with x = r moved by the continuity correction.
    a = _t_quantile(sample) ** 2 / share.n
    low = _score_end(np.maximum(r - share.correction, 0), a, -1)
    high = _score_end(np.minimum(r + share.correction, 1), a, 1)

    # Bound 2. If N is far below 1 the power underflows to 0, which is its limit.
    with np.errstate(under="ignore"):
        seen_share = TAIL_PROBABILITY ** (1 / share.n_unseen)
    low = np.minimum(low, r * seen_share)
    high = np.maximum(high, 1 - (1 - r) * seen_share)

    return np.clip(low, 0, 1), np.clip(high, 0, 1)


def share_p_above(sample: TextSums, threshold: FloatOrArray, **options: FloatOrArray) -> Floats:
    """Return the one-sided p-value against H0: the share is at most the threshold, broadcast to the sample's shape.

    `share_interval` inverts this test: with the same arguments, p < 2.5% exactly where the interval lies above the
    threshold θ. For θ below r, p is the larger of P(T >= (r - θ - 1/2n) / sqrt(θ(1 - θ)/n)) and (θ/r)^N, but at most
    0.5. For θ above r, p is 1 minus the same expression with 1 - r for r and 1 - θ for θ. p is NaN if the standard
    error or the threshold is NaN.
    """
    # A threshold outside 0 to 1 is clipped here; the last lines give it p = 0 or 1.
    share = _prepare_share(sample, **options)
    r = share.r
    theta = np.clip(threshold, 0, 1)
    is_below = theta < r
    distance = np.abs(r - theta)
    with np.errstate(divide="ignore", invalid="ignore", under="ignore"):
        # The t statistic of the score test; 0 within the continuity correction.
        t = np.maximum(distance - share.correction, 0) / np.sqrt(theta * (1 - theta) / share.n)
        t = np.where(distance > share.correction, t, 0)
        # If unseen units move the share from r to θ, all others are `seen_share` of the units. A sample holds only
        # these others with probability `p_unseen`.
        seen_share = np.where(is_below, theta / r, (1 - theta) / (1 - r))
        p_unseen = seen_share**share.n_unseen
    # First p of the test towards the side of θ, at most 0.5; then p of the test whether the share is above θ.
    p = np.minimum(np.maximum(stdtr(sample.degrees_of_freedom, -t), p_unseen), 0.5)
    p = np.where(is_below, p, 1 - p)
    # Every share is above a threshold below 0, and no share is above a threshold of 1 or more.
    p = np.where(np.less(threshold, 0), 0.0, p)
    p = np.where(np.greater_equal(threshold, 1), 1.0, p)
    return np.where(np.isnan(sample.standard_error + threshold), np.nan, p)


def independent_units(
    sample: TextSums,
    dependence: FloatOrArray,
    units: FloatOrArray,
) -> Floats:
    """Return N, the effective number of independent units; NaN if there is no text.

    N = 1 / (ρ/m + (1 - ρ)/Σc) for m effective texts of Σc units in total (Kish 1965, section 5.4). A unit is what one
    count stands for, such as a query.

    Args:
        sample: The sums over texts.
        dependence: The intraclass correlation ρ of the units of a text, 0 to 1; at 1 each text is one unit. It is
            assumed, because a sample whose texts all have the same value does not tell it.
        units: How many units a count of 1 stands for. Pass the harmonic mean of the texts' lengths if s and c of each
            text were divided by its length. Then Σc times it is Kish's effective number of units, (Σc)² / Σ(c/length),
            provided that c is the same share of each text.
    """
    total = sample.total * units
    n_texts = np.where(total > 0, sample.n_texts, np.nan)
    total = np.where(total > 0, total, np.nan)
    n_units: Floats = 1 / (dependence / n_texts + (1 - dependence) / total)
    return n_units


class _Share(NamedTuple):
    """Hold a share, and the number of independent units that it stands for.

    Attributes:
        r: The share, 0 to 1.
        n: The number of independent units that would have the standard error of the sample; infinite if r is 0 or 1.
        correction: The continuity correction, 1 / 2n.
        n_unseen: N of the bound for unseen units, from `independent_units`; infinite = no such bound.
    """

    r: Floats
    n: Floats
    correction: Floats
    n_unseen: Floats


def _prepare_share(
    sample: TextSums,
    hits: FloatOrArray = False,
    unseen: FloatOrArray = True,
    dependence: FloatOrArray = DEPENDENCE,
    units: FloatOrArray = 1.0,
) -> _Share:
    """Return what the interval and the test of a share need. All arguments are broadcast to the sample's shape.

    Args:
        sample: The sums over texts.
        hits: Whether the value of each unit is 1 or 0, such as whether a query's largest weight is on the first token.
            Then se² is set to at least r(1 - r) / Σc, the variance for independent units.
        unseen: Whether to bound unseen units. Pass False for the mean of a value from 0 to 1 that is no share, such as
            a relative entropy.
        dependence: As in `independent_units`.
        units: As in `independent_units`.
    """
    r = np.clip(sample.ratio, 0, 1)
    binomial = r * (1 - r)
    total = sample.total * units
    with np.errstate(divide="ignore", invalid="ignore"):
        # The smallest se² allowed: that of independent units for hits, else 0.
        min_variance = np.where(hits, binomial / np.where(total > 0, total, np.nan), 0)
        # If r is 0 or 1, se is 0, although r is not certain. Then n is infinite, and the bound for unseen units counts.
        n = np.where(binomial > 0, binomial / np.maximum(sample.standard_error**2, min_variance), np.inf)
    n_unseen = np.where(unseen, independent_units(sample, dependence, units), np.inf)
    return _Share(r, n, 0.5 / n, n_unseen)


def _score_end(
    x: Floats,
    a: Floats,
    side: int,
) -> Floats:
    """Return the lower (side -1) or upper (1) root θ of (x - θ)² = a θ(1 - θ)."""
    half = np.sqrt(a * x * (1 - x) + a * a / 4)
    end: Floats = (x + a / 2 + side * half) / (1 + a)
    return end


def _t_quantile(sample: TextSums) -> Floats:
    """Return the quantile of Student's t for a 95% interval; NaN with too few degrees of freedom."""
    degrees = sample.degrees_of_freedom
    # stdtrit returns NaN for NaN.
    degrees = np.where(degrees < _MIN_DEGREES_OF_FREEDOM, np.nan, degrees)
    quantile: Floats = stdtrit(degrees, 1 - TAIL_PROBABILITY)
    return quantile


# Ratios that a few texts carry ----------------------------------------------------------------------------------


def skewed_interval(
    ratio: Floats,
    half_width: Floats,
    unseen_weight: Floats,
    highest: FloatOrArray,
) -> tuple[Floats, Floats]:
    """Return the 95% interval of r = Σs / Σc over texts, 0 <= s, if most of Σs may come from a few texts.

    For example, if a head fires in one text of forty, that text holds nearly all of Σs. Two errors are allowed for:

    1. *The texts of the sample vary.* Σs varies like a count of k = (z r / half_width)² independent events, with z the
       normal quantile. k is about ten if ten texts have equal parts of Σs. The ends are the confidence limits of a
       Poisson mean after k observed events (Garwood 1936, Biometrika 28), by Byar's approximation (Breslow & Day 1987,
       Statistical Methods in Cancer Research II, section 2.3):

           low  = r / k · k (1 - 1/(9k) - z / (3 √k))³,   and r α^(1/k) for k below 1, α = 2.5%
           high = r / k · (k + 1) (1 - 1/(9(k + 1)) + z / (3 √(k + 1)))³

       For many events the ends approach r ± half_width. For few events they are skewed, like the distribution of Σs.
    2. *The sample lacks a kind of text.* Texts of this kind may hold a share w of the counts. The ratio is (1 - w) r if
       s is 0 in them, and at most (1 - w) r + w·highest.

    The errors are independent. So at each end the two distances from r, a and b, are combined as sqrt(a² + b²), at the
    low end on a logarithmic scale (MOVER: Zou & Donner 2008, Statistics in Medicine 27). The combination is ours.

    Args:
        ratio: r, at least 0.
        half_width: t·se of the ratio, half the width of `mean_interval`.
        unseen_weight: w, from `unseen_share` or `weight_of_unseen`.
        highest: The largest ratio in texts of an unseen kind; ignored if it is below r.

    Returns:
        The low end (at least 0) and the high end; NaN if `half_width` is NaN.
    """
    z = float(ndtri(1 - TAIL_PROBABILITY))
    with np.errstate(divide="ignore", invalid="ignore", over="ignore", under="ignore"):
        # Error 1: both ends of its interval, divided by r.
        k = np.where(ratio > 0, (z * ratio / half_width) ** 2, 1.0)
        k = np.where(np.isnan(half_width), np.nan, np.clip(k, *_EVENT_RANGE))
        byar = np.maximum(1 - 1 / (9 * k) - z / (3 * np.sqrt(k)), 0.0) ** 3
        low_factor = np.where(k < 1, TAIL_PROBABILITY ** (1 / k), byar)
        next_k = k + 1
        high_factor = next_k / k * (1 - 1 / (9 * next_k) + z / (3 * np.sqrt(next_k))) ** 3
        # Combine both errors. log1p(-w) is the logarithm of 1 - w, the low end of error 2 divided by r.
        low = ratio * np.exp(-np.hypot(np.log(low_factor), np.log1p(-unseen_weight)))
        above_unseen = unseen_weight * np.maximum(highest - ratio, 0.0)
        high = ratio + np.hypot(ratio * high_factor - ratio, above_unseen)
    return low, high


def predicted_interval(
    loss: TextSums,
    mass: FloatOrArray,
    n_texts: int,
) -> tuple[Floats, Floats]:
    """Return the 95% interval of a predicted share, 1 - L with L = Σ loss / Σ nats over held-out texts.

    The loss of a text is that of the prediction, and its nats are the loss of uniform attention. Both may count only a
    part of the attention, such as that outside sinks, whose mean share is `mass`. In an unseen text this part may be
    all of the attention, so the text may weigh up to 1 / mass times as much as others. Its loss divided by its nats may
    be from 0 to MAX_UNSEEN_LOSS.

    Args:
        loss: Sums over texts whose ratio is L.
        mass: The mean share of attention that is counted, 0 to 1.
        n_texts: The number of held-out texts.

    Returns:
        The low and the high end, at most 1. NaN if there are fewer than MIN_EFFECTIVE_TEXTS effective texts, if unseen
        texts could hold more than MAX_UNSEEN_WEIGHT of Σ nats, or if the interval would be wider than
        MAX_INTERVAL_WIDTH.
    """
    # The interval of the loss L.
    half_width = _t_quantile(loss) * loss.standard_error
    weight = weight_of_unseen(unseen_share(max(n_texts, 1), UNSEEN_TAIL_PROBABILITY), mass)
    low_loss, high_loss = skewed_interval(loss.ratio, half_width, weight, MAX_UNSEEN_LOSS)
    is_useful = loss.n_texts >= MIN_EFFECTIVE_TEXTS
    is_useful &= weight <= MAX_UNSEEN_WEIGHT
    is_useful &= high_loss - low_loss <= MAX_INTERVAL_WIDTH
    # The predicted share is 1 - L, so the high loss gives the low end.
    return np.where(is_useful, 1 - high_loss, np.nan), np.where(is_useful, 1 - low_loss, np.nan)


# Texts of an unseen kind ----------------------------------------------------------------------------------------


def unseen_share(n_texts: FloatOrArray, miss_probability: float = TAIL_PROBABILITY) -> Floats:
    """Return u, 0 to 1: the largest share of all texts that may be of a kind that n independent texts all lack.

    u solves (1 - u)^n = `miss_probability`: if the share were larger, n texts would all lack the kind with a smaller
    probability. `n_texts` may be an effective number. If it is 0, u is 1.
    """
    with np.errstate(divide="ignore", under="ignore"):
        share: Floats = 1 - miss_probability ** np.divide(1, n_texts)
    return share


def weight_of_unseen(share: Floats, typical_count: FloatOrArray) -> Floats:
    """Return w, the share of Σc that unseen texts hold if each of them has the largest possible count.

    w = u / (u + (1 - u) f), where u is the share of texts that are unseen. f is the mean count of a text of the sample,
    divided by the largest possible count.

    Args:
        share: u, from `unseen_share`.
        typical_count: f, 0 to 1. At 1, unseen texts weigh as much as others: w = u.
    """
    f = np.clip(typical_count, 0.0, 1.0)
    with np.errstate(invalid="ignore", divide="ignore"):
        weight: Floats = share / (share + (1 - share) * f)
    return weight


def allow_for_unseen(
    ratio: Floats,
    low: Floats,
    high: Floats,
    unseen_weight: Floats,
    lowest: FloatOrArray,
    highest: FloatOrArray,
) -> tuple[Floats, Floats]:
    """Return the ends of an interval of a mean or difference, widened for unseen texts.

    If unseen texts hold a share w of the counts, the ratio is from (1 - w) r + w·lowest to (1 - w) r + w·highest. This
    error is independent of the error that `low` and `high` allow for. So at each end the two distances from r, a and b,
    are combined as sqrt(a² + b²) (MOVER: Zou & Donner 2008, Statistics in Medicine 27).

    Args:
        ratio: r.
        low: The low end without unseen texts.
        high: The high end without unseen texts.
        unseen_weight: w, from `weight_of_unseen`.
        lowest: The smallest ratio in unseen texts; ignored if it is above r.
        highest: The largest ratio in unseen texts; ignored if it is below r.
    """
    below = np.hypot(ratio - low, unseen_weight * np.maximum(ratio - lowest, 0.0))
    above = np.hypot(high - ratio, unseen_weight * np.maximum(highest - ratio, 0.0))
    return ratio - below, ratio + above


def allow_share_for_unseen(
    share: Floats,
    low: Floats,
    high: Floats,
    weight_at_0: Floats,
    weight_at_1: Floats,
) -> tuple[Floats, Floats]:
    """Return the ends of an interval of a share, widened for unseen texts, whose share may be 0 or 1.

    If unseen texts hold a share w of the counts, the share is from (1 - w) r to (1 - w) r + w. Each end is this one or
    that without unseen texts, whichever is farther from r, as in `share_interval`.

    Args:
        share: r.
        low: The low end without unseen texts.
        high: The high end without unseen texts.
        weight_at_0: The largest w of unseen texts whose share is 0.
        weight_at_1: The largest w of unseen texts whose share is 1.
    """
    min_share = share * (1 - weight_at_0)
    max_share = 1 - (1 - share) * (1 - weight_at_1)
    return np.minimum(low, min_share), np.maximum(high, max_share)


# Several tests -------------------------------------------------------------------------------------------------


def simes(p: Floats) -> Floats:
    """Return one p-value for several tests of one claim: the smallest n·p_(i) / i, with p_(i) the i-th smallest of n.

    Source: Simes 1986, Biometrika 73. It is valid for independent tests, and for positively dependent ones (Sarkar
    1998), such as several tests of one head on the same texts.

    Args:
        p: p-values, 0 to 1; the tests of a claim are along the last axis. NaN = no test, not counted in n.

    Returns:
        The p-values, without the last axis; NaN if there is no test.
    """
    # n·p_(i) / i, (..., test); sorting puts NaN last.
    ascending = np.sort(p, axis=-1)
    n = np.isfinite(p).sum(-1)
    rank = np.arange(1, ascending.shape[-1] + 1)
    # fmin ignores NaN, unless all values are NaN.
    combined: Floats = np.fmin.reduce(ascending * n[..., None] / rank, -1)
    return combined


def benjamini_hochberg(p: Floats) -> Floats:
    """Return q-values: the smallest false discovery rate at which each hypothesis is rejected.

    q of the i-th smallest of n p-values is the smallest n·p_(j) / j over j >= i, with p_(j) the j-th smallest
    (Benjamini & Hochberg 1995; adjusted as in Yekutieli & Benjamini 1999). It is valid for independent tests, and for
    positively dependent ones.

    Args:
        p: p-values, 0 to 1, of any shape. NaN = no test: it stays NaN, and is not counted in n.

    Returns:
        The q-values, in the shape of p.

    Raises:
        ValueError: A p-value is outside 0 .. 1.
    """
    from scipy.stats import false_discovery_control

    q = np.full(p.shape, np.nan)
    is_tested = ~np.isnan(p)
    q[is_tested] = false_discovery_control(p[is_tested])
    return q
