"""Confidence intervals and tests of ratios of sums over texts.

A ratio is r = Σs / Σc, with a sum s and a count c of each text. Texts were drawn independently. There are three kinds
of ratio:

- means and differences of any sign: `mean_interval`, `mean_p_above` (Student's t);
- shares, 0 <= s <= c: `share_interval`, `share_p_above` (Wilson's score interval);
- ratios with 0 <= s whose Σs may come from a few texts: `skewed_interval` (limits of a Poisson mean).

Means over few pairs of texts are in `core.pairs`. p-values of several tests are combined by `simes` and
`benjamini_hochberg`.

The spread of the texts that were seen cannot show a kind of text that the sample lacks. If a head fires in one text of
a hundred, most samples of forty texts look as if it never did. So some intervals also allow for *unseen texts*: for as
many as the sample could lack (`unseen_share`), with as much weight as they could have (`weight_of_unseen`), and with
the least or the largest value that is possible in them. Where that would make an interval too wide to be of use, there
is none (NaN).

NumPy and SciPy only. Knows no heads, no measures and no sums: those are in `core.sums`.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri, stdtr, stdtrit

Floats = NDArray[np.float64]

Numbers = Floats | NDArray[np.bool_] | float
"""One value for all ratios, or an array that broadcasts to them."""

END = 0.025
"""The probability that the true value is beyond the low end of a 95% interval, and that it is beyond the high end."""

RARELY = 0.1
"""The same probability, of an end that allows for as many unseen texts as possible, at once with the most weight and
the worst value. With END instead, such ends are twice as far away as real texts need (docs/evidence.md)."""

DEPENDENCE = 0.3
"""The intraclass correlation of the queries of a text, 0 to 1, by which `share_interval` bounds unseen texts."""

MAX_UNSEEN = 0.6
"""If unseen texts could hold more than this share of Σc, a predicted share has no interval. With three texts that count
alike they could hold 0.54."""

WIDEST = 1.0
"""A wider interval of a predicted share is of no use: it is returned as NaN."""

MIN_EFFECTIVE_TEXTS = 2.0
"""With fewer effective texts a predicted share has no interval."""

LARGEST_LOSS = 1.5
"""The largest loss that a description may have in an unseen text, in units of uniform attention's loss.

It is above 1, because a description that was fitted on other texts may be worse than uniform attention: in one of ten
texts it loses more than 1.2 times as much (SmolLM2)."""

_MIN_DEGREES = 0.1
"""With fewer degrees of freedom there is no interval: t at 95% is 2e12 here, and SciPy's stdtrit fails further down."""

_EVENTS = (1e-6, 1e12)
"""k of `skewed_interval` is cut to this range, so that its powers and roots stay finite."""


class TextSums(NamedTuple):
    """What intervals need to know of the sums s and counts c of texts. All are arrays of one shape.

    Attributes:
        ratio: r = Σs / Σc; NaN if Σc is 0.
        error: The standard error of r; NaN with fewer than two texts.
        degrees: Degrees of freedom of the error: the effective number of texts less 1; NaN without an error.
        n_texts: The effective number of texts, (Σc)² / Σc² (Kish 1965, section 11.7).
        total: Σc.
    """

    ratio: Floats
    error: Floats
    degrees: Floats
    n_texts: Floats
    total: Floats


# Means ----------------------------------------------------------------------------------------------------------


def mean_interval(sample: TextSums) -> tuple[Floats, Floats]:
    """Return the ends of the 95% interval r ± t·se, t from Student's t distribution.

    Not cut to any range. Zero width if all texts have the same s / c. NaN without an error, or with fewer than 1.1
    effective texts.
    """
    half = _student(sample) * sample.error
    return sample.ratio - half, sample.ratio + half


def mean_p_above(sample: TextSums, threshold: Numbers) -> Floats:
    """Return the one-sided p-value against H0: the mean is at most the threshold, broadcast to the sample's shape.

    P(T >= (r - threshold) / se): p < 2.5% exactly where `mean_interval` lies above the threshold. 0 or 1 if se is 0.
    NaN without an error, or if the threshold is NaN.
    """
    # t = (r - threshold) / se; ±infinity where se is 0. Adding the distance keeps its NaN.
    distance = sample.ratio - threshold
    t_without_error = np.where(distance > 0, np.inf, -np.inf) + distance
    t = np.divide(distance, sample.error, out=t_without_error, where=sample.error != 0)
    # Not 1 - stdtr(t): that loses all digits of a small p.
    p: Floats = stdtr(sample.degrees, -t)
    return p


# Shares ---------------------------------------------------------------------------------------------------------


def share_interval(sample: TextSums, **options: Numbers) -> tuple[Floats, Floats]:
    """Return the ends of the 95% interval of a share, 0 <= s <= c, within 0 to 1. It is right near 0 and 1 too.

    r ± t·se is not. Say ten texts each count 1 or 0, and the true share is 0.97. Then three in four samples are all 1,
    and give [1, 1]. Here each end is the farther of two bounds:

    1. Wilson's score interval with continuity correction (Newcombe 1998, Statistics in Medicine 17, method 4) for
       n = r(1 - r) / se² independent units (Korn & Graubard 1998, Survey Methodology 24), with Student's t for the
       normal quantile. Its variance at an end θ is se² · θ(1 - θ) / r(1 - r): it grows towards the middle.
    2. A bound for unseen units. If a share u of all units is of another kind than those of the sample, N independent
       units show none of them with probability (1 - u)^N. It is α = 2.5% for u = 1 - α^(1/N). If these units are all 0,
       the share is r · α^(1/N); if all 1, it is 1 - (1 - r) · α^(1/N). For a sample of ones alone this is the low end
       of Clopper & Pearson (1934). N is from `independent_units`.

    Simulated, 95% intervals of 10 to 100 texts with graded values hold shares of 0.01 to 0.99 in 94% of samples or
    more. If the units of a text are all 1 or all 0, it is 74% at worst (docs/evidence.md).

    Args:
        sample: The sums over texts.
        options: `hits`, `unseen`, `dependence` and `units`, as `_share` takes them.
    """
    share = _share(sample, **options)
    r = share.r

    # Bound 1: the roots θ of (x - θ)² = a θ(1 - θ), with x the share, moved by the continuity correction.
    a = _student(sample) ** 2 / share.n
    low = _score_end(np.maximum(r - share.correction, 0), a, -1)
    high = _score_end(np.minimum(r + share.correction, 1), a, 1)

    # Bound 2. With far less than one unit the power underflows to 0, which is right.
    with np.errstate(under="ignore"):
        seen_share = END ** (1 / share.n_unseen)
    low = np.minimum(low, r * seen_share)
    high = np.maximum(high, 1 - (1 - r) * seen_share)

    return np.clip(low, 0, 1), np.clip(high, 0, 1)


def share_p_above(sample: TextSums, threshold: Numbers, **options: Numbers) -> Floats:
    """Return the one-sided p-value against H0: the share is at most the threshold, broadcast to the sample's shape.

    `share_interval` is the inversion of this test, with the same arguments: p < 2.5% exactly where the interval lies
    above the threshold θ. For θ below r, p is the larger one of P(T >= (r - θ - 1/2n) / sqrt(θ(1 - θ)/n)) and
    (θ/r)^N, at most 0.5. For θ above r it is 1 less the same of 1 - r and 1 - θ. NaN without an error, or if the
    threshold is NaN.
    """
    # The share, and the threshold within 0 to 1.
    share = _share(sample, **options)
    r = share.r
    theta = np.clip(threshold, 0, 1)
    is_below = theta < r
    distance = np.abs(r - theta)
    with np.errstate(divide="ignore", invalid="ignore", under="ignore"):
        # t of the score test.
        t = np.maximum(distance - share.correction, 0) / np.sqrt(theta * (1 - theta) / share.n)
        t = np.where(distance > share.correction, t, 0)
        # The probability that a sample shows none of the units that would bring the share from r to θ.
        seen_share = np.where(is_below, theta / r, (1 - theta) / (1 - r))
        p_unseen = seen_share**share.n_unseen
    # p of the side that θ is on, so at most 0.5.
    p = np.minimum(np.maximum(stdtr(sample.degrees, -t), p_unseen), 0.5)
    p = np.where(is_below, p, 1 - p)
    # A share is above any threshold below 0, and above none from 1 on.
    p = np.where(np.less(threshold, 0), 0.0, p)
    p = np.where(np.greater_equal(threshold, 1), 1.0, p)
    return np.where(np.isnan(sample.error + threshold), np.nan, p)


def independent_units(
    sample: TextSums,
    dependence: Numbers,
    units: Numbers,
) -> Floats:
    """Return the effective number of independent units, by which unseen texts are bounded; NaN without a text.

    N = 1 / (ρ/m + (1 - ρ)/Σc) for m effective texts of Σc units (Kish 1965, section 5.4).

    Args:
        sample: The sums over texts.
        dependence: The intraclass correlation ρ of the units of a text, 0 to 1; at 1 each text is one unit. It is an
            assumption, because it cannot be computed from texts that are alike.
        units: How many units a count of 1 stands for. It is not 1 if s and c of each text were divided by the text's
            length: then it is the harmonic mean of the lengths, and Σc times it is Kish's effective number of units,
            (Σc)² / Σ(c/length), if c is the same share of each text.
    """
    total = sample.total * units
    n_texts = np.where(total > 0, sample.n_texts, np.nan)
    total = np.where(total > 0, total, np.nan)
    n_units: Floats = 1 / (dependence / n_texts + (1 - dependence) / total)
    return n_units


class _Share(NamedTuple):
    """A share, and how many independent units it stands for.

    Attributes:
        r: The share, 0 to 1.
        n: How many independent units would give its standard error; infinite where r is 0 or 1.
        correction: The continuity correction, 1 / 2n.
        n_unseen: The `independent_units` N of the bound for unseen units; infinite = there is no such bound.
    """

    r: Floats
    n: Floats
    correction: Floats
    n_unseen: Floats


def _share(
    sample: TextSums,
    hits: Numbers = False,
    unseen: Numbers = True,
    dependence: Numbers = DEPENDENCE,
    units: Numbers = 1.0,
) -> _Share:
    """Return a share with what its interval and its test need. All arguments are broadcast to the sample's shape.

    Args:
        sample: The sums over texts.
        hits: Whether each unit of c adds 1 or 0 to s, such as whether a query's largest weight is on some key. Then se²
            is at least r(1 - r) / Σc.
        unseen: Whether there is a bound for unseen units. There is none for the mean of a value from 0 to 1 that is no
            share, such as a relative entropy.
        dependence: As in `independent_units`.
        units: As in `independent_units`.
    """
    r = np.clip(sample.ratio, 0, 1)
    binomial = r * (1 - r)
    total = sample.total * units
    with np.errstate(divide="ignore", invalid="ignore"):
        # The squared error of hits is at least that of independent units.
        min_variance = np.where(hits, binomial / np.where(total > 0, total, np.nan), 0)
        # If r is 0 or 1, the error of 0 says nothing: then only the bound for unseen units holds.
        n = np.where(binomial > 0, binomial / np.maximum(sample.error**2, min_variance), np.inf)
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


def _student(sample: TextSums) -> Floats:
    """Return the quantile of Student's t for a 95% interval; NaN with too few degrees of freedom."""
    degrees = np.where(sample.degrees < _MIN_DEGREES, np.nan, sample.degrees)
    quantile: Floats = stdtrit(degrees, 1 - END)
    return quantile


# Ratios that a few texts carry ----------------------------------------------------------------------------------


def skewed_interval(
    ratio: Floats,
    half: Floats,
    unseen: Floats,
    highest: Numbers,
) -> tuple[Floats, Floats]:
    """Return the 95% interval of r = Σs / Σc over texts, 0 <= s, if most of Σs may come from a few texts.

    If a head fires in one text of forty, that text holds nearly all of Σs. Two errors are allowed for:

    1. *The texts of the sample vary.* Their Σs varies as the number of k = (z r / half)² independent events does, z the
       normal quantile: k is about ten if ten texts have equal parts of Σs. The ends are the limits of a Poisson mean
       after k observed events (Garwood 1936, Biometrika 28), by Byar's approximation (Breslow & Day 1987, Statistical
       Methods in Cancer Research II, section 2.3):

           low  = r / k · k (1 - 1/(9k) - z / (3 √k))³,   and r α^(1/k) for k below 1, α = 2.5%
           high = r / k · (k + 1) (1 - 1/(9(k + 1)) + z / (3 √(k + 1)))³

       For many events these are r ± half. For few they are skewed, as such sums are.
    2. *The sample lacks a kind of text.* It may hold a share w of the counts. Then the ratio is between (1 - w) r, if s
       is 0 in such texts, and (1 - w) r + w·highest.

    The errors are independent, so at each end the two distances from r are combined as sqrt(a² + b²); at the low end,
    the distances of logarithms (MOVER: Zou & Donner 2008, Statistics in Medicine 27). The combination is ours.

    Args:
        ratio: r, at least 0.
        half: t·se of the ratio, as of `mean_interval`.
        unseen: w, as of `unseen_share` or `weight_of_unseen`.
        highest: The largest ratio in texts of an unseen kind; ignored if it is below r.

    Returns:
        The low end (at least 0) and the high end; NaN if `half` is NaN.
    """
    z = float(ndtri(1 - END))
    with np.errstate(divide="ignore", invalid="ignore", over="ignore", under="ignore"):
        # Error 1: both ends, divided by r.
        k = np.where(ratio > 0, (z * ratio / half) ** 2, 1.0)
        k = np.where(np.isnan(half), np.nan, np.clip(k, *_EVENTS))
        byar = np.maximum(1 - 1 / (9 * k) - z / (3 * np.sqrt(k)), 0.0) ** 3
        low_factor = np.where(k < 1, END ** (1 / k), byar)
        next_k = k + 1
        high_factor = next_k / k * (1 - 1 / (9 * next_k) + z / (3 * np.sqrt(next_k))) ** 3
        # Both errors.
        low = ratio * np.exp(-np.hypot(np.log(low_factor), np.log1p(-unseen)))
        above_unseen = unseen * np.maximum(highest - ratio, 0.0)
        high = ratio + np.hypot(ratio * high_factor - ratio, above_unseen)
    return low, high


def predicted_interval(
    loss: TextSums,
    mass: Numbers,
    n_texts: int,
) -> tuple[Floats, Floats]:
    """Return the 95% interval of a predicted share, 1 - L, L = Σ loss / Σ nats over held-out texts.

    Both sums may count only the attention outside sinks, whose mean share is `mass`. In an unseen text all attention
    may be there, so that it weighs up to 1 / mass times as much as a text of the sample. Its loss may be between 0 and
    LARGEST_LOSS.

    Args:
        loss: L, as of sums over texts.
        mass: The mean share of attention that is counted, 0 to 1; 1 if all of it is.
        n_texts: How many texts there are.

    Returns:
        The low and the high end, at most 1. NaN if the texts of `loss` are fewer than MIN_EFFECTIVE_TEXTS, if unseen
        texts could hold more than MAX_UNSEEN of Σ nats, or if the interval would be wider than WIDEST.
    """
    # The interval of the loss L.
    half = _student(loss) * loss.error
    weight = weight_of_unseen(unseen_share(max(n_texts, 1), RARELY), mass)
    low_loss, high_loss = skewed_interval(loss.ratio, half, weight, LARGEST_LOSS)
    is_useful = loss.n_texts >= MIN_EFFECTIVE_TEXTS
    is_useful &= weight <= MAX_UNSEEN
    is_useful &= high_loss - low_loss <= WIDEST
    # The predicted share is 1 - L, so the high loss gives the low end.
    return np.where(is_useful, 1 - high_loss, np.nan), np.where(is_useful, 1 - low_loss, np.nan)


# Texts of an unseen kind ----------------------------------------------------------------------------------------


def unseen_share(n_texts: Numbers, missed: float = END) -> Floats:
    """Return the largest share u, 0 to 1, of all texts that may be of a kind which n independent texts do not show.

    u solves (1 - u)^n = `missed`, the probability that the kind is yet more frequent. `n_texts` may be an effective
    number; at 0 any text may be of an unseen kind, and u is 1.
    """
    with np.errstate(divide="ignore", under="ignore"):
        share: Floats = 1 - missed ** np.divide(1, n_texts)
    return share


def weight_of_unseen(share: Floats, typical: Numbers) -> Floats:
    """Return w, the share of Σc that unseen texts hold if they are a share u of all texts and count the most possible.

    w = u / (u + (1 - u) f), where f is the mean count of a text of the sample, divided by the largest possible count.

    Args:
        share: u, as of `unseen_share`.
        typical: f, 0 to 1. At 1 unseen texts weigh as much as others: w = u.
    """
    f = np.clip(typical, 0.0, 1.0)
    with np.errstate(invalid="ignore", divide="ignore"):
        weight: Floats = share / (share + (1 - share) * f)
    return weight


def allow_for_unseen(
    ratio: Floats,
    low: Floats,
    high: Floats,
    unseen: Floats,
    lowest: Numbers,
    highest: Numbers,
) -> tuple[Floats, Floats]:
    """Return the ends of an interval that also allows for texts of an unseen kind.

    If they hold a share w of the counts, the ratio is between (1 - w) r + w·lowest and (1 - w) r + w·highest. This
    error is independent of the one that `low` and `high` are from. So at each end the two distances from r are combined
    as sqrt(a² + b²) (MOVER: Zou & Donner 2008, Statistics in Medicine 27).

    Args:
        ratio: r.
        low: The low end without unseen texts.
        high: The high end without them.
        unseen: w, as of `weight_of_unseen`.
        lowest: The least ratio in unseen texts; ignored if it is above r.
        highest: The largest ratio in them; ignored if it is below r.
    """
    below = np.hypot(ratio - low, unseen * np.maximum(ratio - lowest, 0.0))
    above = np.hypot(high - ratio, unseen * np.maximum(highest - ratio, 0.0))
    return ratio - below, ratio + above


def allow_share_for_unseen(
    share: Floats,
    low: Floats,
    high: Floats,
    below: Floats,
    above: Floats,
) -> tuple[Floats, Floats]:
    """Return the ends of an interval of a share that also allows for unseen texts, whose share may be 0, or 1.

    If they hold a share w of the counts, the share is between (1 - w) r and (1 - w) r + w. Each end is the farther one
    of this and of the interval, as in `share_interval`.

    Args:
        share: r.
        low: The low end without unseen texts.
        high: The high end without them.
        below: The largest w of unseen texts whose share is 0.
        above: The largest w of unseen texts whose share is 1.
    """
    least = share * (1 - below)
    most = 1 - (1 - share) * (1 - above)
    return np.minimum(low, least), np.maximum(high, most)


# Several tests -------------------------------------------------------------------------------------------------


def simes(p: Floats) -> Floats:
    """Return one p-value for several tests of one claim: the least n·p_(i) / i of the n p-values in ascending order.

    Simes 1986, Biometrika 73. Valid for independent tests and for positively dependent ones, as tests of one head on
    the same texts are (Sarkar 1998).

    Args:
        p: p-values, 0 to 1; the tests of a claim along the last axis. NaN = no test, not counted in n.

    Returns:
        The p-values, without the last axis; NaN if there is no test.
    """
    # n·p_(i) / i, (..., test); sorting puts NaN last.
    ascending = np.sort(p, axis=-1)
    n = np.isfinite(p).sum(-1)
    rank = np.arange(1, ascending.shape[-1] + 1)
    # fmin ignores NaN, unless there is nothing else.
    combined: Floats = np.fmin.reduce(ascending * n[..., None] / rank, -1)
    return combined


def benjamini_hochberg(p: Floats) -> Floats:
    """Return q-values: the smallest false discovery rate at which each hypothesis is rejected.

    q of the i-th smallest of n p-values is the least n·p_j / j over j >= i (Benjamini & Hochberg 1995; adjusted as in
    Yekutieli & Benjamini 1999). Valid for independent tests and for positively dependent ones.

    Args:
        p: p-values, 0 to 1, of any shape. NaN = no test: it stays NaN and is not counted in n.

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
