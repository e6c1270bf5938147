"""Attention tile by tile against float64: odd sizes, all masks, and memory."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnscope.core.attention import tiles as tiles_module
from attnscope.core.attention.seam import attend_with_weights
from attnscope.core.attention.tiles import cut_blocks
from tests.core_helpers import calls, few_examples, make_call, oracle, read_tiles
from tests.rounding import in_float64

CLOSE = {"rtol": 1e-10, "atol": 1e-11}


pytestmark = pytest.mark.usefixtures("one_thread")


def entropy_of(weights):
    return torch.special.entr(weights).sum(-1)


@given(call=calls(), elements=st.sampled_from([1, 40, 10**6]))
@few_examples
def test_tile_equals_the_oracle_on_any_call(call, elements):
    output, weights = oracle(call)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles_module, "TILE_ELEMENTS", elements)
        patch.setattr(tiles_module, "MIN_QUERIES_PER_TILE", 2)
        got = read_tiles(call)
    torch.testing.assert_close(got.output, output, **CLOSE)
    torch.testing.assert_close(got.weights, weights, **CLOSE)
    torch.testing.assert_close(got.largest, weights.amax(-1), **CLOSE)
    torch.testing.assert_close(got.entropy_nats, entropy_of(weights), rtol=1e-9, atol=1e-10)


def sliding(n_queries, n_keys, width):
    distance = torch.arange(n_queries)[:, None] - torch.arange(n_keys)
    return (distance >= 0) & (distance < width)


def hard_calls(dtype):
    """Odd sizes and every situation that masks can make; a query with no key among them."""
    sizes = {"n_queries": 97, "n_keys": 97, "d_head": 59, "d_value": 59, "dtype": dtype}
    padding = torch.ones(2, 1, 1, 97, dtype=torch.bool)
    padding[1, ..., 41:] = False
    left = padding.flip(-1)
    nothing = padding.clone()
    nothing[0] = False
    made = {
        "plain": make_call(**sizes),
        "causal": make_call(**sizes, is_causal=True),
        "grouped": make_call(**sizes, is_causal=True, group=5),
        "padded": make_call(**sizes, mask=padding),
        "padded left, causal": make_call(**sizes, mask=left, is_causal=True),
        "fully masked": make_call(**sizes, mask=nothing),
        "sliding": make_call(**sizes, mask=sliding(97, 97, 11)),
        "cross": make_call(**(sizes | {"n_keys": 1025, "d_head": 111, "d_value": 13})),
        "scores of 1e4": make_call(**sizes),
        "equal keys": make_call(**sizes),
        "biased": make_call(**sizes, bias_shape=(6, 97, 97), group=2),
        "capped": make_call(**sizes, softcap=3.0),
        "sinks": make_call(**sizes, with_sinks=True, is_causal=True),
    }
    large = made["scores of 1e4"]
    top = (large.query @ large.key.mT).abs().max() * large.scale
    made["scores of 1e4"] = dataclasses.replace(large, scale=large.scale * 1e4 / float(top))
    equal = made["equal keys"]
    made["equal keys"] = dataclasses.replace(equal, key=equal.key[:, :, :1].expand(-1, -1, 97, -1))
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", hard_calls(torch.float32))
def test_tile_is_as_exact_as_dense_attention_of_the_same_precision(name, dtype):
    call = hard_calls(dtype)[name]
    exact_output, exact_weights = attend_with_weights(in_float64(call))
    dense_output, dense_weights = attend_with_weights(call)
    got = read_tiles(call)
    assert got.output.dtype == dtype
    # At most twice the error of dense attention, and one rounding of the largest number.
    unit = torch.finfo(torch.float32).eps

    def hold(ours, theirs, exact, rounding=unit):
        ours_off, theirs_off = ((part.double() - exact).abs().max() for part in (ours, theirs))
        assert ours_off <= 2 * theirs_off + rounding * exact.abs().max(), (
            float(ours_off),
            float(theirs_off),
        )

    hold(got.output, dense_output, exact_output, torch.finfo(dtype).eps)
    hold(got.weights, dense_weights, exact_weights)
    hold(got.largest, dense_weights.amax(-1), exact_weights.amax(-1))
    mean = got.entropy_nats.double().mean((0, 2)) - entropy_of(exact_weights).mean((0, 2))
    assert mean.abs().max() <= 1e-5 + 2 * float(
        (entropy_of(dense_weights).double() - entropy_of(exact_weights)).abs().max()
    )


def test_blocks_cover_every_query_once_and_skip_hidden_keys():
    call = make_call(n_queries=97, n_keys=97, mask=sliding(97, 97, 11))
    parts = cut_blocks(call, elements=3 * 97 * 16)
    seen = torch.zeros(2, 97, dtype=torch.int64)
    for part in parts:
        seen[part.texts, part.queries] += 1
        assert part.keys.stop - part.keys.start <= 16 + 10
    assert (seen == 1).all()
    causal = cut_blocks(make_call(n_queries=97, n_keys=97, is_causal=True), elements=3 * 97 * 16)
    assert [part.keys.stop for part in causal[:2]] == [16, 32]
    # Many short texts go together, and padding that every text of a block has is not computed.
    mask = torch.ones(9, 1, 1, 25, dtype=torch.bool)
    mask[..., 20:] = False
    short = cut_blocks(make_call(batch=9, n_queries=25, n_keys=25, mask=mask))
    assert len(short) == 1
    assert short[0].shape == (9, 25, 20)
    assert short[0].mask is None
