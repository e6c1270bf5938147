import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given

from attnscope.core.attention.seam import allowed, attend, attend_with_weights, attention_weights
from tests.core_helpers import EXACT, calls, few_examples, make_call, oracle, see_all

LOW = [torch.float16, torch.bfloat16]


@given(call=calls())
@few_examples
def test_both_roads_equal_the_oracle(call):
    fast, dense, weights, _ = see_all(call)
    expected_output, expected_weights = oracle(call)
    torch.testing.assert_close(fast, expected_output, **EXACT)
    torch.testing.assert_close(dense, expected_output, **EXACT)
    torch.testing.assert_close(weights, expected_weights, **EXACT)


# Each feature by itself in closed form, so that a failure says which one broke.


@pytest.mark.parametrize(("n_queries", "n_keys"), [(3, 3), (3, 7), (7, 3), (1, 5), (5, 1)])
def test_causality_is_aligned_at_the_upper_left(n_queries, n_keys):
    call = make_call(n_queries=n_queries, n_keys=n_keys, is_causal=True)
    fast, _, weights, mask = see_all(call)
    expected = torch.tensor([[k <= q for k in range(n_keys)] for q in range(n_queries)])
    assert torch.equal(mask[0, 0], expected)
    assert torch.equal(weights[0, 0] > 0, expected)
    torch_says = F.scaled_dot_product_attention(
        call.query, call.key, call.value, is_causal=True, scale=call.scale
    )
    torch.testing.assert_close(fast, torch_says, **EXACT)


def test_finfo_min_in_the_bias_is_a_number_like_any_other():
    lowest = torch.finfo(torch.float32).min
    call = make_call(dtype=torch.float32, n_queries=3, n_keys=5, bias=torch.full((3, 5), lowest))
    call.bias[0, 0, 1, 0] = 0.0
    fast, dense, weights, _ = see_all(call)
    uniform = torch.full((5,), 0.2)
    torch.testing.assert_close(weights[0, 0, 0], uniform)
    torch.testing.assert_close(weights[0, 0, 1], torch.eye(5)[0])
    torch.testing.assert_close(fast, dense)


# Rows where nothing may be attended to.

EMPTY_ROWS = {
    "mask": {},
    "causal": {"is_causal": True},
    "bias": {"bias_shape": (1, 3, 5, 7)},
    "softcap": {"softcap": 3.0},
    "sinks": {"with_sinks": True},
    "grouped": {"group": 2},
    "float16": {"dtype": torch.float16},
}


@pytest.mark.parametrize(
    "road", [attend, lambda call: attend_with_weights(call)[0]], ids=["fast", "dense"]
)
@pytest.mark.parametrize("fields", EMPTY_ROWS.values(), ids=EMPTY_ROWS)
def test_fully_masked_rows_are_zero_forward_and_backward(fields, road):
    mask = torch.ones(2, 1, 5, 7, dtype=torch.bool)
    mask[0, :, 2] = False
    mask[1] = False
    call = make_call(requires_grad=True, mask=mask, **fields)
    if call.bias is not None:
        call.bias.retain_grad()  # a view with four axes of what was given
    output = road(call)
    output.sum().backward()
    assert (output[0, :, 2] == 0).all()
    assert (output[1] == 0).all()
    assert (output[0, :, [0, 1, 3, 4]] != 0).all()
    for name in ("query", "key", "value", "bias", "sinks"):
        part = getattr(call, name)
        if part is not None:
            assert part.grad.isfinite().all(), name
    assert (call.query.grad[0, :, 2] == 0).all()
    assert (call.query.grad[1] == 0).all()
    assert (call.value.grad[1] == 0).all()
    assert (attention_weights(call)[1] == 0).all()


def test_gradients_equal_those_of_autograd_through_the_formula():
    call = make_call(
        requires_grad=True, n_kv_heads=2, mask_shape=(5, 7), softcap=2.0, with_sinks=True, group=2
    )
    seed = torch.randn(2, 4, 5, 13, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    parts = [call.query, call.key, call.value, call.sinks]
    key = call.key.repeat_interleave(2, 1)
    value = call.value.repeat_interleave(2, 1)
    scores = 2.0 * torch.tanh(torch.einsum("bhqd,bhkd->bhqk", call.query, key) * call.scale / 2.0)
    powers = torch.where(call.mask, scores.exp(), 0.0)
    output = powers / (powers.sum(-1, keepdim=True) + call.sinks.exp()[:, None, None]) @ value
    expected = torch.autograd.grad(output, parts, seed)
    torch.testing.assert_close(
        torch.autograd.grad(attend(call), parts, seed), expected, rtol=1e-10, atol=1e-12
    )


# Edges.


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"is_causal": True},
        {"with_sinks": True},
        {"group": 2, "softcap": 1.0},
        {"mask_shape": (5, 0)},
        {"bias_shape": (3, 5, 0), "is_causal": True},
    ],
)
def test_no_keys_at_all_give_zeros(fields):
    call = make_call(n_keys=0, requires_grad=True, **fields)
    fast, dense, weights, _ = see_all(call)
    assert weights.shape[-1] == 0
    assert torch.equal(fast, torch.zeros_like(fast))
    assert torch.equal(dense, torch.zeros_like(dense))
    (fast.sum() + dense.sum()).backward()
    assert (call.query.grad == 0).all()


# Precision.


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("fields", [{}, {"group": 3, "is_causal": True}, {"bias_shape": (3, 97, 101)}])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_error_is_at_most_twice_that_of_plain_torch(dtype, fields, seed):
    call = make_call(seed=seed, dtype=dtype, n_queries=97, n_keys=101, d_head=59, d_value=59, **fields)
    true = dataclasses.replace(
        call,
        query=call.query.double(),
        key=call.key.double(),
        value=call.value.double(),
        bias=None if call.bias is None else call.bias.double(),
    )
    true_output, true_weights = attend_with_weights(true)

    # Plain torch in the precision of the call.
    group = call.n_heads // call.n_kv_heads
    key = call.key.repeat_interleave(group, 1)
    value = call.value.repeat_interleave(group, 1)
    scores = call.query @ key.mT * call.scale
    if call.bias is not None:
        scores = scores + call.bias
    mask = allowed(call)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    plain_weights = scores.softmax(-1)
    plain_output = plain_weights @ value

    def error(got, expected):
        return (got.double() - expected).abs().max().item()

    fast, dense, weights, _ = see_all(call)
    assert fast.dtype == dense.dtype == dtype
    assert weights.dtype == torch.float32
    assert error(fast, true_output) <= 2 * error(plain_output, true_output)
    assert error(dense, true_output) <= 2 * error(plain_output, true_output)
    # Weights are computed in float32 whatever the model's precision: closer by far, not just by a factor.
    assert error(weights, true_weights) <= error(plain_weights, true_weights) / 50


def test_autocast_does_not_lower_the_weights():
    call = make_call(dtype=torch.float32, n_keys=101, d_head=59)
    expected = attend_with_weights(call)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = attend_with_weights(call)
    assert torch.equal(got[0], expected[0])
    assert torch.equal(got[1], expected[1])


# Dropout.


def test_dropout_touches_the_output_and_not_the_weights():
    plain = make_call(n_keys=101)
    call = dataclasses.replace(
        plain, dropout_p=0.5, value=torch.eye(101).double().expand(2, 3, 101, 101)
    )
    torch.manual_seed(0)
    output, weights = attend_with_weights(call)
    torch.testing.assert_close(weights, attention_weights(plain), **EXACT)
    # The values are the identity matrix, so the output is the weights after dropout: 0, or doubled.
    kept = output != 0
    assert 0.4 < kept.double().mean() < 0.6
    torch.testing.assert_close(output[kept], 2 * weights[kept], **EXACT)
    fast = attend(call)
    assert 0.4 < (fast != 0).double().mean() < 0.6


# What a call refuses.


@pytest.mark.parametrize(
    ("fields", "error", "says"),
    [
        ({"mask": torch.ones(5, 7)}, TypeError, "True = may attend"),
        ({"mask": torch.ones(7, 5, dtype=torch.bool)}, ValueError, r"mask \(7, 5\).*\(2, 3, 5, 7\)"),
        ({"bias": torch.ones(7, 5)}, ValueError, r"bias \(7, 5\)"),
        ({"softcap": 0.0}, ValueError, "softcap"),
        ({"sinks": torch.ones(1)}, ValueError, r"3 heads.*\(1,\)"),
        (
            {"key": torch.ones(2, 2, 7, 11), "value": torch.ones(2, 2, 7, 13)},
            ValueError,
            "3 query heads.*2 key",
        ),
        ({"key": torch.ones(2, 3, 7, 13)}, ValueError, r"\(2, 3, 7, 13\)"),
        ({"value": torch.ones(2, 3, 5, 13)}, ValueError, r"\(2, 3, 5, 13\)"),
        ({"query": torch.ones(1, 3, 5, 11)}, ValueError, r"\(1, 3, 5, 11\)"),
    ],
)
def test_a_call_that_cannot_be_meant_is_refused(fields, error, says):
    with pytest.raises(error, match=says):
        dataclasses.replace(make_call(), **fields)
