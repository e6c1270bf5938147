"""Means over few pairs and their shares of a total: by their definitions, and how often they hold the truth."""

import numpy as np
import pytest
from scipy.stats import binom, t

from attnscope.core.pairs import (
    MARGIN,
    RARE_PROBABILITY,
    degrees_of_freedom,
    min_total_strength,
    pair_means,
    shares_of_total,
)
from benchmarks.patch_intervals import simulate


@pytest.mark.parametrize("n", [2, 3, 11, 40])
def test_a_mean_has_the_interval_and_p_of_its_definition(n):
    values = np.random.default_rng(n).normal(0.4, 1, (n, 3))
    mean, low, high, p = pair_means(values)
    nu = max(1, (n - 1) / 3)
    error = values.std(0, ddof=1) / n**0.5
    assert degrees_of_freedom(n) == nu
    np.testing.assert_allclose(mean, values.mean(0))
    np.testing.assert_allclose(high - mean, t.ppf(0.975, nu) * error)
    np.testing.assert_allclose(mean - low, t.ppf(0.975, nu) * error)
    np.testing.assert_allclose(p, 2 * t.sf(np.abs(mean) / error, nu))
    np.testing.assert_array_equal(p < 0.05, (low > 0) | (high < 0))


def test_one_pair_and_pairs_that_agree():
    mean, low, high, p = pair_means(np.array([[2.0]]))
    assert mean == 2
    assert np.isnan([low, high, p]).all()
    assert np.isnan(shares_of_total(np.array([[2.0]]), np.array([[3.0]]))).all()
    mean, low, high, p = pair_means(np.array([[2.0, 0.0]] * 3))
    assert mean.tolist() == low.tolist() == high.tolist() == [2, 0]
    assert p.tolist() == [0, 1]
    for total in (np.full((3, 1), 4.0), np.array([[1.0], [2.0], [3.0]]) * 1e-9 + 4):
        share, low, high = shares_of_total(total / 2, total)
        np.testing.assert_allclose([share, low, high], 0.5)
    assert np.isnan(shares_of_total(np.ones((3, 1)), np.zeros((3, 1)))).all()


@pytest.mark.parametrize("mean", [1.5, 2.0, 5.0, -5.0])
def test_a_share_is_within_its_ends_where_the_pairs_do_not_refute_it(mean):
    """At the ends, |mean(d)| is k · se(d) for d = value - rho · total."""
    n = 50
    chance = np.random.default_rng(3)
    total = chance.normal(mean, 1, (n, 1))
    values = 0.4 * total + chance.normal(0.2, 0.7, (n, 2))
    share, low, high = shares_of_total(values, total)
    np.testing.assert_allclose(share, values.mean(0) / total.mean())
    nu = (n - 1) / 3
    strength = abs(total.mean()) / (total.std(ddof=1) / n**0.5)
    widest = t.isf(RARE_PROBABILITY, nu)
    assert min_total_strength(n) == pytest.approx(MARGIN * widest)
    k = max(t.isf(0.025, nu), widest * (3 - strength / (MARGIN * widest)) / 2)
    assert (k > t.isf(0.025, nu)) == (abs(mean) < 5)
    for end in (low, high):
        d = values - end * total
        np.testing.assert_allclose(np.abs(d.mean(0)), k * d.std(0, ddof=1) / n**0.5)
    assert (low < share).all()
    assert (share < high).all()


@pytest.mark.parametrize("n", [5, 10, 20, 50])
def test_a_total_that_is_not_far_from_0_has_no_shares(n):
    around = np.linspace(-1, 1, n)[:, None]
    error = around.std(ddof=1) / n**0.5
    for factor, is_shown in ((0.999, False), (1.001, True), (-0.999, False), (-1.001, True)):
        total = around + factor * min_total_strength(n) * error
        assert np.isfinite(shares_of_total(total / 3, total)).all() == is_shown


@pytest.mark.parametrize(("n", "least"), [(5, 0.95), (10, 0.94), (20, 0.93), (50, 0.93)])
def test_intervals_of_means_hold_skewed_effects(n, least):
    """With n - 1 degrees of freedom they do so in 88, 90, 91 and 93% of samples."""
    values = np.random.default_rng(0).exponential(size=(n, 4000))
    _, low, high, _ = pair_means(values)
    assert ((low <= 1) & (high >= 1)).mean() >= least


def test_a_share_that_is_shown_holds_the_truth():
    """The benchmark with fewer draws: at least 90% of what is shown, net of chance, in every cell."""
    cells = [cell for cell in simulate(np.random.default_rng(1), 500) if cell["shown"]]
    assert len(cells) > 80
    for cell in cells:
        assert binom.cdf(cell["held"], cell["shown"], 0.9) > 1e-4, cell
