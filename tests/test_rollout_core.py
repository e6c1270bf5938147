"""Attention rollout: on a graph worked by hand, and against its plain definition."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from attnscope.core.attention.rollout import mix_residual, rollout
from tests.record_helpers import shares

# Two layers of three tokens, worked by hand. With half of the identity:
#   A1 = [1, 0, 0; 1/4, 3/4, 0; 1/2, 0, 1/2]     A2 = [1, 0, 0; 0, 1, 0; 1/4, 1/4, 1/2]
FIRST = [[1, 0, 0], [0.5, 0.5, 0], [1, 0, 0]]
SECOND = [[1, 0, 0], [0, 1, 0], [0.5, 0.5, 0]]
BY_HAND = np.array([FIRST, SECOND])
# Row 2 of A2 A1: 1/4 [1, 0, 0] + 1/4 [1/4, 3/4, 0] + 1/2 [1/2, 0, 1/2] = [9/16, 3/16, 1/4].
ROLLED = [[1, 0, 0], [0.25, 0.75, 0], [9 / 16, 3 / 16, 0.25]]


def test_a_graph_worked_by_hand():
    layers = mix_residual(BY_HAND)
    np.testing.assert_allclose(
        layers, [[[1, 0, 0], [0.25, 0.75, 0], [0.5, 0, 0.5]], np.array(SECOND) / 2 + np.eye(3) / 2]
    )
    np.testing.assert_allclose(rollout(layers), [layers[0], ROLLED], atol=1e-15)


def test_the_residual_share_and_rows_that_are_not_whole():
    weights = np.array([[[0.5, 0.0], [0.0, 0.0]]])
    np.testing.assert_allclose(mix_residual(weights, 0.2), [[[1, 0], [0, 1]]])
    np.testing.assert_array_equal(mix_residual(weights, 0.0), [[[1, 0], [0, 0]]])
    np.testing.assert_array_equal(mix_residual(BY_HAND, 0.0), BY_HAND)
    np.testing.assert_array_equal(mix_residual(BY_HAND, 1.0), [np.eye(3)] * 2)
    np.testing.assert_allclose(
        mix_residual(np.array([[[0.0, 0.6], [0.3, 0.7]]]), 0.25)[0],
        [[0.25 / 0.7, 0.45 / 0.7], [0.225, 0.775]],
    )


def random_layers(n_layers, n, seed, causal):
    weights = shares(n_layers, n, n, seed=seed).astype(np.float64)
    if causal:
        weights = np.tril(weights)
        weights /= weights.sum(-1, keepdims=True)
    return mix_residual(weights, 0.3)


@given(st.integers(1, 5), st.integers(1, 7), st.integers(0, 99), st.booleans())
def test_rollout_is_a_sum_over_paths(n_layers, n, seed, causal):
    layers = random_layers(n_layers, n, seed, causal)
    found = rollout(layers)
    np.testing.assert_allclose(found.sum(-1), 1)
    expected = np.eye(n)
    for layer in range(n_layers):
        product = np.zeros((n, n))
        for query, key, between in np.ndindex(n, n, n):
            product[query, key] += layers[layer, query, between] * expected[between, key]
        expected = product
        np.testing.assert_allclose(found[layer], expected, atol=1e-14)
    if causal:
        assert not np.triu(found, 1).any()
