"""Features from some queries alone: where a head does something else from a class of queries, both are found."""

from dataclasses import replace

import numpy as np
import pytest

from attnscope.core.descriptions import describe
from attnscope.core.directions import columns_of, describe_types, find_directions
from attnscope.core.gates import split_gains
from attnscope.core.sampled_rows import Column, Rows

N_TEXTS, N_ROWS, N_KEYS, N_TYPES = 24, 7, 19, 53
N = N_TEXTS * N_ROWS


def sample(seed: int) -> Rows:
    """Random rows with four features and three gates; types say nothing of either."""
    drawn = np.random.default_rng(seed)
    return Rows(
        (drawn.random((4, N * N_KEYS)) < 0.3).astype(np.uint8), np.full(4, 2), np.arange(N + 1) * N_KEYS,
        np.repeat(np.arange(N_TEXTS), N_ROWS), np.full((1, N * N_KEYS), 1 / N_KEYS),
        key_types=drawn.integers(0, N_TYPES, N * N_KEYS).astype(np.int32),
        query_types=drawn.integers(0, N_TYPES, N).astype(np.int32), gates=drawn.random((3, N)) < 0.4,
    )  # fmt: skip


def attending(rows: Rows, scores: np.ndarray, seed: int) -> Rows:
    """Rows of a head with some scores and noise."""
    raised = np.exp(scores + 0.5 * np.random.default_rng(seed).normal(size=scores.shape))
    return replace(rows, attention=(raised / np.repeat(np.add.reduceat(raised, rows.starts[:-1]), N_KEYS))[None])


def test_a_gated_column_has_the_levels_of_its_feature_in_the_gate_and_one_more_elsewhere() -> None:
    rows = replace(sample(0), columns=((Column(np.array([0.0, 1.0, 0.0]), 5, gate=1, gated=2),),))
    part = rows.of_texts(range(4, 9))
    assert rows.gates is not None
    inside = np.repeat(rows.gates[1], N_KEYS)[part.entries]
    values = part.by_entry(4, 0)
    np.testing.assert_array_equal(values, part.features[2] * inside)
    assert not part.is_fitted(4, 0)


def test_what_a_split_gains_is_by_definition_what_both_sides_gain_beyond_the_whole() -> None:
    drawn = np.random.default_rng(1)
    a, pi, w = drawn.uniform(0.05, 0.3, (2, 5)), drawn.uniform(0.05, 0.3, (2, 5)), np.array([0.4])
    gains = split_gains(np.stack([a[0], a.sum(0)]) / 2, np.stack([pi[0], pi.sum(0)]) / 2, w)

    def gain(x: float, y: float) -> float:
        return float(x * np.log(x / y) + (1 - x) * np.log((1 - x) / (1 - y)))

    for f in range(5):
        sides = 0.4 * gain(a[0, f] / 0.8, pi[0, f] / 0.8) + 0.6 * gain(a[1, f] / 1.2, pi[1, f] / 1.2)
        assert gains[0, f] == pytest.approx(sides - gain(a[:, f].mean(), pi[:, f].mean()), abs=1e-9)
        assert gains[0, f] > -1e-9


@pytest.mark.parametrize("seed", range(3))
def test_a_known_class_of_queries_is_found_that_attends_to_a_known_class_of_keys(seed: int) -> None:
    rows = sample(seed)
    assert rows.gates is not None
    rows = attending(rows, 2.5 * rows.features[3] * np.repeat(rows.gates[seed], N_KEYS), seed)
    x = describe_types(
        np.random.default_rng(seed).normal(size=(N_TYPES, 5)).astype(np.float32),
        np.bincount(rows.key_types, minlength=N_TYPES), np.zeros((N_TYPES, 0), np.float32),
    )  # fmt: skip
    fitted = rows.of_texts(range(12))
    (directions,) = find_directions(fitted, np.tile(np.arange(N_KEYS), N).astype(np.int32), x, range(4))
    assert directions.gated[0] == (seed, 3)
    columns = columns_of(directions, fitted)
    (found,) = describe(replace(rows, columns=(columns,)).of_texts(range(12)), [5] * 4, most=2)
    first = columns[found.terms[0] - 4]
    assert (first.gate, first.gated) == (seed, 3) and first.values.tolist() == [0, 1, 0]
