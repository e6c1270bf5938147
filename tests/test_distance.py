"""Distances between heads against their definitions in plain loops, and what follows from them."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnscope.core.distance import (
    MAX_DIVERGENCE,
    classical_mds,
    cluster_heads,
    compute_row_divergences,
    match_heads,
    sum_divergences,
)


def weights_of(n_heads, n_queries, n_keys, seed=0, *, sharp=3.0):
    drawn = np.random.default_rng(seed).normal(size=(n_heads, n_queries, n_keys)) * sharp
    shares = np.exp(drawn - drawn.max(-1, keepdims=True))
    return (shares / shares.sum(-1, keepdims=True)).astype(np.float32)


def by_definition(measure, p, q):
    """One row against another, key by key, with what a sink took as a further key."""
    rows = []
    for row in (p, q):
        sink = max(0.0, 1 - float(np.sum(row, dtype=np.float64)))
        rows.append([*map(float, row), sink])
    total = 0.0
    for a, b in zip(*rows, strict=True):
        if measure == "hellinger":
            total += (math.sqrt(a) - math.sqrt(b)) ** 2 / 2
            continue
        middle = (a + b) / 2
        total += sum(x * math.log(x / middle) for x in (a, b) if x > 0) / 2
    return total


@pytest.mark.parametrize("measure", MAX_DIVERGENCE)
@pytest.mark.parametrize("sinks", [False, True])
def test_sums_are_those_of_the_definition(measure, sinks):
    weights = weights_of(5, 7, 3)
    weights[0, :, 0] = 0.0  # a key that one head gives nothing
    weights[0] /= weights[0].sum(-1, keepdims=True)
    if sinks:
        weights *= np.linspace(0.2, 0.9, 7, dtype=np.float32)[:, None]
    found = sum_divergences(measure, torch.from_numpy(weights))
    for a in range(5):
        for b in range(5):
            wanted = sum(by_definition(measure, weights[a, q], weights[b, q]) for q in range(7))
            assert found.sums[a, b] == pytest.approx(wanted, abs=1e-6)
            assert found.counts[a, b] == 7


@pytest.mark.parametrize("measure", MAX_DIVERGENCE)
def test_empty_rows_take_no_part(measure):
    weights = weights_of(3, 5, 7)
    weights[1, 2] = 0.0
    found = sum_divergences(measure, torch.from_numpy(weights))
    kept = [0, 1, 3, 4]
    there = sum_divergences(measure, torch.from_numpy(weights[:, kept]))
    assert found.counts.tolist() == [[5, 4, 5], [4, 4, 4], [5, 4, 5]]
    assert float(found.sums[0, 1]) == pytest.approx(float(there.sums[0, 1]), abs=1e-12)
    assert float(found.sums[0, 2]) > float(there.sums[0, 2])
    rows = compute_row_divergences(measure, weights[0], weights[1])
    assert np.isnan(rows).tolist() == [False, False, True, False, False]
    assert np.nansum(rows) == pytest.approx(float(found.sums[0, 1]), abs=1e-12)


@pytest.mark.parametrize("measure", MAX_DIVERGENCE)
@given(seed=st.integers(0, 1000), cut=st.integers(1, 8))
def test_sums_of_parts_add_up(measure, seed, cut):
    weights = torch.from_numpy(weights_of(4, 9, 5, seed))
    whole = sum_divergences(measure, weights)
    parts = [sum_divergences(measure, weights[:, part]) for part in (slice(0, cut), slice(cut, 9))]
    np.testing.assert_allclose(whole.sums, parts[0].sums + parts[1].sums, atol=1e-12)


@pytest.mark.parametrize(("measure", "most"), MAX_DIVERGENCE.items())
def test_heads_that_share_no_key_are_as_far_as_can_be(measure, most):
    weights = torch.zeros(2, 3, 4)
    weights[0, :, 0] = weights[1, :, 3] = 1.0
    found = sum_divergences(measure, weights)
    assert found.sums.tolist() == [[0.0, pytest.approx(3 * most)], [pytest.approx(3 * most), 0.0]]


def test_nearly_equal_heads_are_told_apart():
    weights = weights_of(1, 5, 7).astype(np.float64)
    moved = weights.copy()
    moved[0, :, 0] += 1e-7
    moved[0, :, 1] -= 1e-7
    wanted = sum(by_definition("hellinger", weights[0, q], moved[0, q]) for q in range(5))
    found = sum_divergences("hellinger", torch.from_numpy(weights), torch.from_numpy(moved)).sums.item()
    assert math.sqrt(found) == pytest.approx(math.sqrt(wanted), abs=1e-7)
    assert found > 0


def test_neighbours_in_a_clustering_are_the_most_alike():
    points = np.array([0.0, 10.0, 0.1, 10.2, 5.0])
    merges, order = cluster_heads(np.abs(points[:, None] - points))
    places = order.tolist()
    assert abs(places.index(0) - places.index(2)) == abs(places.index(1) - places.index(3)) == 1
    assert merges[0, 2] == pytest.approx(0.1)
    assert merges.shape == (4, 4)
    never_compared = np.array([[0.0, 1.0, np.nan], [1.0, 0.0, 2.0], [np.nan, 2.0, 0.0]])
    assert cluster_heads(never_compared)[0][:, 2].tolist() == [1.0, 2.0]


def test_points_of_a_plane_keep_their_distances():
    points = np.random.default_rng(0).normal(size=(7, 2))
    distances = np.sqrt(((points[:, None] - points) ** 2).sum(-1))
    places, explained = classical_mds(distances)
    np.testing.assert_allclose(np.sqrt(((places[:, None] - places) ** 2).sum(-1)), distances, atol=1e-9)
    assert explained.sum() == pytest.approx(1.0)
    np.testing.assert_allclose(places.mean(0), 0, atol=1e-12)
    largest = np.take_along_axis(places, np.abs(places).argmax(0)[None], 0)
    assert (largest > 0).all()  # each axis points where its largest entry is positive


@pytest.mark.parametrize("n", [0, 1])
def test_one_head_or_none_is_no_tree_and_stands_in_the_middle(n):
    merges, order = cluster_heads(np.zeros((n, n)))
    assert merges.shape == (0, 4)
    assert order.tolist() == list(range(n))
    places, explained = classical_mds(np.zeros((n, n)))
    assert places.shape == (n, 2)
    assert not places.any()
    assert not explained.any()


def test_the_matching_is_the_best_of_all_and_not_the_nearest_of_each():
    distances = np.array([[1.0, 2.0], [1.1, 9.0], [5.0, 9.0]])
    assert match_heads(distances).tolist() == [[0, 1], [1, 0]]
