"""The oracle itself, against numbers that a person can work out."""

import ast
import math
from pathlib import Path

import numpy as np
import pytest

from attnscope.core import reference
from attnscope.core.reference import Projection
from tests import oracle
from tests.core_helpers import WORKED
from tests.oracle import attention, multi_head


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


def test_the_oracle_shares_no_code_with_what_it_judges() -> None:
    imported = set()
    for module in (oracle, reference):
        for node in ast.walk(ast.parse(Path(module.__file__).read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add(node.module)
    ours = "attnscope.core.reference"
    assert imported == {"math", "collections.abc", "dataclasses", "numpy", "numpy.typing", ours}


def test_two_keys_by_hand() -> None:
    # Scores 0 and ln 3: weights 1/4 and 3/4.
    output, weights = attention([[1.0]], [[0.0], [math.log(3)]], [[8.0, 0.0], [0.0, 4.0]])
    np.testing.assert_allclose(weights, [[0.25, 0.75]], rtol=1e-15)
    np.testing.assert_allclose(output, [[2.0, 3.0]], rtol=1e-15)


def test_scale_defaults_to_one_over_the_root_of_the_width() -> None:
    query, key, value = normal(3, 7), normal(5, 7, seed=1), normal(5, 11, seed=2)
    default, given = attention(query, key, value), attention(query, key, value, scale=7**-0.5)
    np.testing.assert_allclose(default[1], given[1], rtol=1e-14)
    assert not np.allclose(default[1], attention(query, key, value, scale=1.0)[1])


def test_mask_causality_bias_softcap_and_sink_by_hand() -> None:
    zeros, value = np.zeros((3, 1)), np.eye(3)
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


def test_fully_masked_rows_and_no_keys_are_zero() -> None:
    output, weights = attention(normal(3, 5), normal(7, 5), normal(7, 11), mask=np.zeros((3, 7), bool))
    assert not output.any()
    assert not weights.any()
    output, weights = attention(normal(3, 5), np.zeros((0, 5)), np.zeros((0, 11)))
    assert output.shape == (3, 11)
    assert weights.shape == (3, 0)
    assert not output.any()


def test_scores_of_thousands_do_not_overflow() -> None:
    _, weights = attention([[1.0]], [[5000.0], [0.0]], np.eye(2), scale=1.0)
    np.testing.assert_array_equal(weights, [[1.0, 0.0]])
    _, weights = attention([[1.0]], [[5000.0], [0.0]], np.eye(2), scale=1.0, sinks=6000.0)
    np.testing.assert_array_equal(weights, [[0.0, 0.0]])


@pytest.mark.parametrize("n_heads", [1, 2, 4])
def test_worked_example(n_heads: int) -> None:
    output, weights = multi_head(WORKED["Q"], WORKED["K"], WORKED["V"], n_heads)
    expected_weights, expected_output = {
        1: ([WORKED["single_head"]["weights"]], WORKED["single_head"]["output"]),
        2: ([WORKED["weights_head_1"], WORKED["weights_head_2"]], WORKED["output"]),
        4: (WORKED["four_heads"]["weights"], WORKED["four_heads"]["output"]),
    }[n_heads]
    np.testing.assert_allclose(weights, expected_weights, atol=5.1e-5, rtol=0)
    np.testing.assert_allclose(output, expected_output, atol=5.1e-5, rtol=0)


def test_grouped_heads_read_neighbouring_queries_first() -> None:
    # Head 0 and 1 read key/value head 0, head 2 and 3 read head 1: the values tell them apart.
    output, _ = multi_head(np.ones((1, 4)), np.ones((1, 2)), [[10.0, 20.0]], 4, n_kv_heads=2)
    np.testing.assert_array_equal(output, [[10, 10, 20, 20]])


def test_projections_are_stored_as_torch_stores_them() -> None:
    # y = W x + b with W (width out, width in): one token and one head, so the output is out(v(value)).
    v, out = Projection([[1.0, 2.0, 3.0]], [0.5]), Projection([[2.0], [3.0]], [0.0, 1.0])
    output, weights = multi_head([[1.0]], [[1.0]], [[1.0, 10.0, 100.0]], 1, v=v, out=out)
    np.testing.assert_array_equal(weights, [[[1.0]]])
    np.testing.assert_array_equal(output, [[643.0, 965.5]])


def test_masks_and_biases_are_shared_or_by_head() -> None:
    query = normal(3, 4)
    mask = np.random.default_rng(1).random((2, 3, 3)) > 0.4
    _, by_head = multi_head(query, query, query, 2, mask=mask, bias=mask * 1.0, sinks=[0.0, 1.0])
    for h in range(2):
        _, shared = multi_head(query, query, query, 2, mask=mask[h], bias=mask[h] * 1.0, sinks=[0.0, 1.0])
        np.testing.assert_array_equal(by_head[h], shared[h])


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ((normal(3, 5), normal(7, 4), normal(7, 5)), ValueError, r"\(7, 4\)"),
        ((normal(3, 5), normal(7, 5), normal(6, 5)), ValueError, r"\(6, 5\)"),
        ((normal(3), normal(7, 5), normal(7, 5)), ValueError, r"\(3,\)"),
        ((normal(3, 5), normal(7, 5), normal(7, 5), np.ones((3, 7))), TypeError, "True = may attend"),
        ((normal(3, 5), normal(7, 5), normal(7, 5), np.ones((7, 3), bool)), ValueError, r"\(3, 7\).*\(7, 3\)"),
    ],
)
def test_one_head_refuses_what_cannot_be_meant(arguments, error, says: str) -> None:
    with pytest.raises(error, match=says):
        attention(*arguments)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"n_heads": 5}, r"\(3, 4\).*5 heads"),
        ({"n_heads": 4, "n_kv_heads": 3}, "4 query heads.*3 key/value"),
        ({"n_heads": 2, "mask": np.ones((3, 3, 3), bool)}, r"2 of them.*\(3, 3, 3\)"),
        ({"n_heads": 2, "q": Projection(normal(4, 7))}, r"7 columns.*\(3, 4\)"),
    ],
)
def test_many_heads_refuse_what_cannot_be_meant(fields, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        multi_head(normal(3, 4), normal(3, 4), normal(3, 4), **fields)
