import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from scipy import stats

from attnscope.core.intervals import benjamini_hochberg, simes
from attnscope.core.sums import RunningSums

RNG = np.random.default_rng
LEAST = 2.0**-200
# Magnitudes whose squares are numbers too, both signs, and numbers that differ little from one another.
ANY = st.one_of(
    st.floats(-(2.0**60), 2.0**60).filter(lambda x: not 0 < abs(x) < LEAST),
    st.builds(lambda m, e: m * 2.0**e, st.floats(0.5, 1) | st.floats(-1, -0.5), st.integers(-70, 60)),
    st.builds(lambda x: 1e6 + x, st.floats(-1, 1)),
    st.integers(-1000, 1000).map(float),
)
TEXTS = st.lists(st.tuples(st.tuples(ANY, ANY), st.tuples(ANY.map(abs), ANY.map(abs))), max_size=12)
EPS = float(np.finfo(np.float64).eps)


def fill(texts, shape=(2,)):
    sums = RunningSums(shape)
    for s, c in texts:
        sums.add(s, c)
    return sums


def sums_of(s, c, shape=()):
    sums = RunningSums(shape)
    sums.add(s, c)
    return sums


def state(sums):
    return sums.moments.tobytes(), sums.n_texts


def simulated(n=200, cells=5, seed=0):
    rng = RNG(seed)
    c = rng.integers(3, 400, (n, cells)).astype(float)
    return c * rng.beta(2, 3, (n, cells)), c


# Sums and moments


def require_exact(sums, texts):
    """Compares sums, variances and covariances over texts, of two quantities, with those of fractions."""
    n, sum_s, sum_c, *moments = sums.moments
    for cell in range(2):
        pairs = [(Fraction(s[cell]), Fraction(c[cell])) for s, c in texts if s[cell] or c[cell]]
        assert n[cell] == len(pairs)
        if not pairs:
            assert [sum_s[cell], sum_c[cell], *(moment[cell] for moment in moments)] == [0] * 5
            continue
        roundings = 4 * (len(texts) + 2) * EPS
        columns = {"s": [s for s, _ in pairs], "c": [c for _, c in pairs]}
        means = {name: sum(column) / len(pairs) for name, column in columns.items()}
        size = {name: math.sqrt(sum(x * x for x in column)) for name, column in columns.items()}
        spread = {
            name: math.sqrt(sum((x - means[name]) ** 2 for x in column))
            for name, column in columns.items()
        }
        for name, total in (("s", sum_s), ("c", sum_c)):
            slack = roundings * float(sum(map(abs, columns[name])))
            assert total[cell] == pytest.approx(float(sum(columns[name])), rel=0, abs=slack)
        # A deviation from the mean is off by roundings of the mean: what is lost is in proportion to the spread.
        for (a, b), moment in zip(("ss", "sc", "cc"), moments, strict=True):
            exact = float(
                sum((x - means[a]) * (y - means[b]) for x, y in zip(columns[a], columns[b], strict=True))
            )
            slack = roundings * (
                spread[a] * size[b] + size[a] * spread[b] + roundings * size[a] * size[b]
            )
            assert moment[cell] == pytest.approx(exact, rel=0, abs=slack)


@given(TEXTS)
@example([((2.0**60, -(2.0**60)), (2.0**60, 2.0**-50))] * 5)
@example([((1e9 + x, -1e9 - x), (1e9, 1.0)) for x in (0.0, 1.0, 2.0, 4.0)])
@example([((3.0, 0.0), (5.0, 0.0))])
def test_sums_and_moments_are_those_of_fractions(texts):
    require_exact(fill(texts), texts)


@given(TEXTS, st.randoms(use_true_random=False), st.data())
def test_any_order_and_any_split_gives_the_same_within_roundings(texts, random, data):
    shuffled = random.sample(texts, len(texts))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(texts)), max_size=4)))
    parts = []
    for start, stop in zip([0, *cuts], [*cuts, len(texts)], strict=True):
        batch = shuffled[start:stop]
        if data.draw(st.booleans()):
            part = RunningSums((2,))
            part.add(
                np.reshape([s for s, _ in batch], (-1, 2)), np.reshape([c for _, c in batch], (-1, 2))
            )
        else:
            part = fill(batch)
        parts.append(part)
    random.shuffle(parts)
    while len(parts) > 1:  # a tree of any form
        first = parts.pop(random.randrange(len(parts)))
        second = parts.pop(random.randrange(len(parts)))
        before = state(first), state(second)
        parts.append(first.merge(second))
        assert (state(first), state(second)) == before
    assert parts[0].n_texts == len(texts)
    require_exact(parts[0], texts)


@pytest.mark.parametrize(
    ("s", "c", "message"),
    [
        ([1.0, math.nan], [1, 1], "NaN"),
        ([1.0, 1.0], [1, math.inf], "NaN or infinity"),
        ([1.0, 1.0], [1, -1], "at least 0; got -1"),
        ([1.0, 1.0, 1.0], 1, r"got \(3,\)"),
        (1.0, 1, r"got \(\)"),
        ([[[1.0, 2.0]]], 1, r"got \(1, 1, 2\)"),
    ],
)
def test_what_is_refused_is_not_added(s, c, message):
    sums = fill([((1.0, 2.0), (3.0, 4.0))])
    before = state(sums)
    with pytest.raises(ValueError, match=message):
        sums.add(s, c)
    assert state(sums) == before


# What follows from them


def test_the_standard_error_is_its_formula():
    s, c = simulated(n=7)
    sums = sums_of(s, c, shape=(5,))
    r = s.sum(0) / c.sum(0)
    m = c.sum(0) ** 2 / (c**2).sum(0)
    expected = np.sqrt(((s - r * c) ** 2).sum(0) * m / (m - 1)) / c.sum(0)
    np.testing.assert_allclose(sums.sample().standard_error, expected, rtol=1e-6)
    low, high = sums.interval()
    np.testing.assert_allclose((high - low) / 2, stats.t.ppf(0.975, m - 1) * expected, rtol=1e-6)
    np.testing.assert_allclose((high + low) / 2, r, rtol=1e-8)


def test_texts_of_one_length_give_the_textbook_interval_and_test():
    s, _ = simulated(n=23)
    c = np.full_like(s, 64.0)
    sums = sums_of(s, c, shape=(5,))
    share = s / c
    expected = stats.ttest_1samp(share, 0.0).confidence_interval(0.95)
    np.testing.assert_allclose(sums.interval(), (expected.low, expected.high), rtol=1e-6)
    for threshold in (0.05, 0.4, 1.0):
        p = stats.ttest_1samp(s - threshold * c, 0.0, alternative="greater").pvalue
        np.testing.assert_allclose(sums.p_above(threshold), p, rtol=1e-5)
    assert (sums.p_above(0.05) < 1e-3).all()


def coverage(n, lengths, *, texts_differ, replications=4000, seed=7):
    """How often the 95% interval holds the known value of a simulated head; and p < 0.05 at that value."""
    rng = RNG(seed)
    c = lengths(rng, (n, replications))
    share = rng.beta(2, 3, c.shape) if texts_differ else 0.4  # its mean is 0.4 whatever the length
    s = rng.binomial(c.astype(int), share)
    sums = sums_of(s, c, shape=(replications,))
    low, high = sums.interval()
    return float(((low <= 0.4) & (high >= 0.4)).mean()), float((sums.p_above(0.4) < 0.05).mean())


LENGTHS = {
    "alike": lambda rng, shape: rng.integers(90, 110, shape).astype(float),
    "uniform": lambda rng, shape: rng.integers(5, 500, shape).astype(float),
    "log-normal": lambda rng, shape: np.ceil(rng.lognormal(4, 1, shape)),
}


@pytest.mark.parametrize("texts_differ", [False, True])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_95_percent_intervals_from_200_texts_hold_the_truth_93_to_97_percent_of_the_time(
    lengths, texts_differ
):
    # 4,000 heads: the share itself has a standard error of 0.35%.
    covered, rejected = coverage(200, LENGTHS[lengths], texts_differ=texts_differ)
    assert 0.93 <= covered <= 0.97
    assert 0.035 <= rejected <= 0.065


def texts_of_hits(share, c, rng):
    return rng.binomial(c.astype(int), share).astype(float)


def texts_that_depend(share, c, rng):  # an intraclass correlation of 0.3
    return rng.binomial(c.astype(int), rng.beta(share * 7 / 3, (1 - share) * 7 / 3, c.shape)).astype(
        float
    )


def texts_of_mass(share, c, rng):
    return c * rng.beta(share * 5, (1 - share) * 5, c.shape)


def texts_with_outliers(share, c, rng):
    return c * np.where(rng.random(c.shape) < (1 - share) / 0.8, 0.2, 1.0)


SHARES = {
    "a hit a text": (lambda rng, shape: np.ones(shape), texts_of_hits, True),
    "hits": (lambda rng, shape: np.ceil(rng.lognormal(3, 0.6, shape)), texts_of_hits, True),
    "hits that depend": (
        lambda rng, shape: np.ceil(rng.lognormal(3, 0.6, shape)),
        texts_that_depend,
        True,
    ),
    "masses": (lambda rng, shape: np.ceil(rng.lognormal(3, 0.6, shape)), texts_of_mass, False),
    "outliers": (lambda rng, shape: np.full(shape, 20.0), texts_with_outliers, False),
}


def share_coverage(kind, n, share, *, replications=4000):
    """How often the 95% interval of a share holds it."""
    lengths, draw, hits = SHARES[kind]
    rng = RNG(7)
    c = lengths(rng, (n, replications))
    sums = sums_of(draw(share, c, rng), c, shape=(replications,))
    low, high = sums.share_interval(hits=hits)
    return float(((low <= share) & (share <= high)).mean())


@pytest.mark.parametrize("share", [0.03, 0.5, 0.9, 0.97, 0.99])
@pytest.mark.parametrize("n", [10, 30, 100])
@pytest.mark.parametrize("kind", SHARES)
def test_intervals_of_shares_hold_the_truth_near_the_edges_too(kind, n, share):
    if kind == "outliers" and share < 0.2:
        pytest.skip("no text is below 0.2")
    covered = share_coverage(kind, n, share)
    # From above they are bounded by their widths, below: at 0.99 all that ten texts show is often 1.
    assert covered >= 0.93
    if n == 100 and share == 0.5:
        assert covered <= 0.97


def test_a_hit_a_text_has_wilsons_interval():
    sums = sums_of(np.repeat([1.0, 0.0], [1700, 300]), np.ones(2000))
    wilson = stats.binomtest(1700, 2000).proportion_ci(0.95, method="wilsoncc")
    np.testing.assert_allclose(sums.share_interval(hits=True), (wilson.low, wilson.high), rtol=1e-4)


@given(
    st.lists(st.tuples(st.integers(1, 40), st.floats(0, 1)), min_size=3, max_size=12),
    st.booleans(),
    st.booleans(),
)
@example([(1, 1.0)] * 5, True, True)
@example([(7, 0.0)] * 5, False, True)
@example([(7, 0.4)] * 5, False, False)
def test_p_of_a_share_agrees_with_its_interval(texts, hits, unseen):
    c = np.array([c for c, _ in texts], float)
    s = np.array([share for _, share in texts]) * c
    sums = sums_of(np.round(s) if hits else s, c)
    low, high = sums.share_interval(hits=hits, unseen=unseen)
    assert 0 <= low <= np.clip(sums.ratio(), 0, 1) + 1e-12
    assert low <= high <= 1
    limits = np.linspace(-0.1, 1.1, 121)
    p = np.array([sums.share_p_above(limit, hits=hits, unseen=unseen) for limit in limits])
    assert ((p >= 0) & (p <= 1)).all()
    assert (np.diff(p) >= -1e-12).all()
    apart = np.abs(limits[:, None] - [low, high]).min(1) > 1e-6
    np.testing.assert_array_equal((p < 0.025)[apart], (limits < low)[apart])
    np.testing.assert_array_equal((p > 0.975)[apart], (limits > high)[apart])


def test_what_cannot_be_known_is_nan():
    #                never counted, in one text only, in two
    sums = RunningSums((3,))
    assert np.isnan(sums.ratio()).all()
    assert np.isnan(sums.interval()).all()
    sums.add([0, 0, 1], [0, 0, 2])
    assert np.isnan(sums.interval()).all()
    sums.add([0, 3, 1], [0, 4, 4])
    np.testing.assert_array_equal(sums.ratio(), [np.nan, 0.75, 2 / 6])
    np.testing.assert_array_equal(sums.sample().n_texts, [0, 1, 36 / 20])
    assert np.isnan(np.array(sums.interval())).tolist() == [[True, True, False]] * 2
    assert np.isnan(sums.p_above(0.1)).tolist() == [True, True, False]


def test_tests_of_one_claim_are_one():
    p = [[0.04, 0.03, math.nan], [0.04, math.nan, math.nan], [math.nan] * 3, [0.01, 0.9, 0.5]]
    np.testing.assert_allclose(simes(p), [0.04, 0.04, math.nan, 0.03])
    # Two tests that say the same say no more than one; two independent ones of a false claim reject it as often as one.
    two = RNG(0).random((100_000, 2))
    assert (simes(two) < 0.05).mean() == pytest.approx(0.05, abs=0.003)
    assert (two.min(1) < 0.05).mean() > 0.09
    np.testing.assert_array_equal(simes(two[:, [0, 0]]), two[:, 0])


@given(st.lists(st.floats(0, 1) | st.just(math.nan), max_size=30))
@example([0.01, 0.02, 0.02, 0.9])
def test_q_values_are_those_of_scipy(p):
    p = np.array(p)
    q = benjamini_hochberg(p)
    tested = ~np.isnan(p)
    assert np.isnan(q[~tested]).all()
    expected = stats.false_discovery_control(p[tested], method="bh") if tested.any() else []
    np.testing.assert_allclose(q[tested], expected, rtol=1e-12)
    assert (q[tested] >= p[tested]).all()
