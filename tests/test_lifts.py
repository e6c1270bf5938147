"""What rows say of tokens and offsets, against plain loops, and how often intervals of lifts hold the truth."""

import math

import numpy as np
import pytest
import torch
from scipy.stats import t as student

from attnscope.core.intervals import skewed_interval, unseen_share
from attnscope.core.lifts import ItemSums, sum_by_offset


@pytest.mark.parametrize("first", [0, 3])
def test_mass_by_offset(first):
    weights = torch.rand(2, 5, 11, generator=torch.Generator().manual_seed(0))
    expected = np.zeros((2, 7))
    for query in range(5):
        for key in range(11):
            offset = min(3, max(-3, key - query - first))
            expected[:, offset + 3] += weights[:, query, key].numpy()
    np.testing.assert_allclose(sum_by_offset(weights, 2, first), expected, rtol=1e-5)


def test_lifts_are_means_over_texts_with_their_intervals():
    chance = np.random.default_rng(0)
    n_texts = 7
    masses = chance.random((n_texts, 2)) * 4
    even = chance.random((n_texts, 2))
    counts = chance.integers(1, 9, (n_texts, 2)).astype(float)
    most = chance.random((n_texts, 2)) * 40
    sums = ItemSums(5, 2)
    second = slice(1, 2)
    for n in range(n_texts):
        sums.add(second, np.array([4, 2]), masses[[n]], even[[n]], counts[n], most[n])
    sums.add(second, np.array([0, 3]), np.ones((1, 2)), np.array([[0.5, 0.0]]), np.ones(2), np.ones(2))
    found = sums.compute_lifts()
    for item, number in ((4, 0), (2, 1)):
        lifts = masses[:, number] / even[:, number]
        half = student.ppf(0.975, n_texts - 1) * lifts.std(ddof=1) / math.sqrt(n_texts)
        low, high = skewed_interval(lifts.mean(), half, unseen_share(n_texts), most[:, number].max())
        assert (found.lift[item, 1], found.low[item, 1], found.high[item, 1]) == pytest.approx(
            (lifts.mean(), low, high)
        )
        assert found.mass[item, 1] == pytest.approx((masses[:, number] / counts[:, number]).mean())
        assert found.counts[item, 1] == counts[:, number].sum()
    assert found.n_texts[:, 1].tolist() == [1, 0, n_texts, 0, n_texts]
    assert not found.n_texts[:, 0].any()
    assert found.lift[0, 1] == 2
    assert np.isnan(found.low[0, 1])
    assert np.isnan(found.lift[3]).all()  # an even share of it is nothing


@pytest.mark.parametrize(("p", "n_texts", "least"), [(0.9, 5, 0.9), (0.5, 3, 0.85), (0.5, 20, 0.93)])
def test_intervals_of_lifts_hold_the_truth(p, n_texts, least):
    chance = np.random.default_rng(int(100 * p) + n_texts)
    n = 2000
    sums = ItemSums(n, 1)
    for _ in range(n_texts):
        hits = (chance.random(n) < p).astype(float)
        sums.add(slice(1), np.arange(n), hits[None], np.full((1, n), 0.1), np.ones(n), np.full(n, 10.0))
    found = sums.compute_lifts()
    assert ((found.low <= p / 0.1) & (p / 0.1 <= found.high)).mean() >= least
    assert (found.high > found.low).all()  # texts that were all alike make nobody sure
