"""The oracle itself, against numbers that a person can work out."""

import ast
import math
from pathlib import Path

import numpy as np

from tests import oracle
from tests.oracle import attention


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def test_the_oracle_shares_no_code_with_what_it_judges():
    tree = ast.parse(Path(oracle.__file__).read_text(encoding="utf-8"))
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert imported == {"collections.abc", "dataclasses", "numpy.typing"}


def test_two_keys_by_hand():
    # Scores 0 and ln 3: weights 1/4 and 3/4.
    output, weights = attention([[1.0]], [[0.0], [math.log(3)]], [[8.0, 0.0], [0.0, 4.0]])
    np.testing.assert_allclose(weights, [[0.25, 0.75]], rtol=1e-15)
    np.testing.assert_allclose(output, [[2.0, 3.0]], rtol=1e-15)


def test_mask_causality_bias_softcap_and_sink_by_hand():
    zeros = np.zeros((3, 1))
    value = np.eye(3)
    mask = np.array([[True, True, True], [False, True, True], [False, False, False]])
    _, weights = attention(zeros, zeros, value, mask=mask)
    np.testing.assert_allclose(weights, [[1 / 3, 1 / 3, 1 / 3], [0, 0.5, 0.5], [0, 0, 0]])
    _, weights = attention(zeros, zeros, value, is_causal=True)
    np.testing.assert_allclose(weights, [[1, 0, 0], [0.5, 0.5, 0], [1 / 3, 1 / 3, 1 / 3]])
    _, weights = attention(zeros, zeros, value, mask=mask, is_causal=True)
    np.testing.assert_allclose(weights, [[1, 0, 0], [0, 1, 0], [0, 0, 0]])
    _, weights = attention(zeros, zeros, value, bias=np.log([[1, 1, 2]] * 3))
    np.testing.assert_allclose(weights, [[0.25, 0.25, 0.5]] * 3)
    # Three keys of score 0 and a sink of ln 5: 1/8 each, and 5/8 to the sink.
    output, weights = attention(zeros, zeros, value, sinks=math.log(5))
    np.testing.assert_allclose(weights, [[1 / 8] * 3] * 3)
    np.testing.assert_allclose(output, weights)
    # Scores of +-1000 are capped to +-1.
    _, weights = attention([[1000.0]], [[1.0], [-1.0]], np.eye(2), scale=1.0, softcap=1.0)
    np.testing.assert_allclose(weights[0, 0] / weights[0, 1], math.e**2)
