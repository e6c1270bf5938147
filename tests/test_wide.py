"""Attention on wide values: both kernels against float64, odd sizes, all masks, and memory."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from attnscope.core import wide
from attnscope.core.attention import AttentionCall, allowed, attend_with_weights, attention_weights
from attnscope.core.wide import Wide, attend_wide, blocks, choose_kernel, tiles
from tests.core_helpers import EXACT, calls, few_examples, make_call, oracle
from tests.measure_helpers import LargestTensor
from tests.rounding import in_float64, require_output

CLOSE = {"rtol": 1e-10, "atol": 1e-11}


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def dense_scores(call: AttentionCall) -> Tensor:
    """Scaled, capped, biased scores, -inf where hidden, without grouping: for lse alone."""
    group = call.n_heads // call.n_kv_heads
    scores = call.query @ call.key.repeat_interleave(group, 1).mT * call.scale
    if call.softcap is not None:
        scores = call.softcap * (scores / call.softcap).tanh()
    if call.bias is not None:
        scores = scores + call.bias
    may = allowed(call)
    return scores if may is None else scores.masked_fill(~may, -math.inf)


def expected_log_sum(call: AttentionCall) -> Tensor:
    scores = dense_scores(call)
    seen = (scores > -math.inf).any(-1)
    log_sum = scores.logsumexp(-1)
    if call.sinks is not None:
        log_sum = torch.logaddexp(log_sum, call.sinks[:, None])
    return log_sum.masked_fill(~seen, -math.inf)


def entropy_of(weights: Tensor) -> Tensor:
    return torch.special.entr(weights).sum(-1)


def asked(call: AttentionCall, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Three columns and four indices a query, some of them -1."""
    generator = torch.Generator().manual_seed(seed)
    batch, _, n_queries, _ = call.query.shape
    n_keys = call.key.shape[2]
    columns = torch.randn(batch, n_keys, 3, generator=generator, dtype=torch.float64).to(call.query.dtype)
    return columns, torch.randint(-1, n_keys, (batch, n_queries, 4), generator=generator)


def gathered_from(weights: Tensor, indices: Tensor) -> Tensor:
    index = indices.unsqueeze(1).expand(-1, weights.shape[1], -1, -1)
    return weights.gather(-1, index.clamp(min=0)).masked_fill(index < 0, 0.0)


@given(call=calls(), elements=st.sampled_from([1, 40, 10**6]))
@few_examples
def test_tile_equals_the_oracle_on_any_call(call: AttentionCall, elements: int) -> None:
    columns, indices = asked(call)
    output, weights = oracle(call)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wide, "TILE_ELEMENTS", elements)
        patch.setattr(wide, "LEAST_QUERIES", 2)
        got = attend_wide(call, columns, indices, entropy=True, largest=True, kernel="tile")
    torch.testing.assert_close(got.output, output, **CLOSE)
    torch.testing.assert_close(got.columns, weights @ columns.unsqueeze(1), **CLOSE)
    torch.testing.assert_close(got.gathered, gathered_from(weights, indices), **CLOSE)
    torch.testing.assert_close(got.largest, weights.amax(-1), **CLOSE)
    torch.testing.assert_close(got.entropy_nats, entropy_of(weights), rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(got.log_sum_exp, expected_log_sum(call), rtol=1e-10, atol=1e-10)


@given(
    sizes=st.permutations((1, 3, 5, 7, 11, 13)),
    group=st.integers(1, 3),
    masked=st.booleans(),
    is_causal=st.booleans(),
    seed=st.integers(0, 2**16),
)
@few_examples
def test_wide_equals_the_oracle(sizes, group: int, masked: bool, is_causal: bool, seed: int) -> None:
    n_queries, n_keys, d_head, d_value = sizes[:4]
    shape = (2, 1, 1, n_keys) if masked else None
    call = make_call(
        seed=seed, n_queries=n_queries, n_keys=n_keys, d_head=d_head, d_value=d_value, group=group, n_kv_heads=2,
        mask_shape=shape, is_causal=is_causal,
    )  # fmt: skip
    columns, indices = asked(call)
    output, weights = oracle(call)
    got = attend_wide(call, columns, indices, entropy=True, kernel="wide")
    assert got.kernel == "wide"
    torch.testing.assert_close(got.output, output, **CLOSE)
    torch.testing.assert_close(got.columns, weights @ columns.unsqueeze(1), **CLOSE)
    torch.testing.assert_close(got.gathered, gathered_from(weights, indices), **CLOSE)
    torch.testing.assert_close(got.entropy_nats, entropy_of(weights), rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(got.log_sum_exp, expected_log_sum(call), rtol=1e-10, atol=1e-10)


def sliding(n_queries: int, n_keys: int, width: int) -> Tensor:
    distance = torch.arange(n_queries)[:, None] - torch.arange(n_keys)
    return (distance >= 0) & (distance < width)


def hard_calls(dtype: torch.dtype) -> dict[str, AttentionCall]:
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
def test_tile_is_as_exact_as_dense_attention_of_the_same_precision(name: str, dtype: torch.dtype) -> None:
    call = hard_calls(dtype)[name]
    exact_output, exact_weights = attend_with_weights(in_float64(call))
    dense_output, dense_weights = attend_with_weights(call)
    columns, indices = asked(call)
    got = attend_wide(call, columns, indices, entropy=True, largest=True, kernel="tile")
    assert got.output.dtype == dtype
    # At most twice the error of dense attention, and one rounding of the largest number.
    unit = torch.finfo(torch.float32).eps

    def hold(ours: Tensor, theirs: Tensor, exact: Tensor, rounding: float = unit) -> None:
        ours_off, theirs_off = ((part.double() - exact).abs().max() for part in (ours, theirs))
        assert ours_off <= 2 * theirs_off + rounding * exact.abs().max(), (float(ours_off), float(theirs_off))

    hold(got.output, dense_output, exact_output, torch.finfo(dtype).eps)
    wide_columns = columns.float().unsqueeze(1)
    hold(got.columns, dense_weights @ wide_columns, exact_weights @ wide_columns.double())
    hold(got.gathered, gathered_from(dense_weights, indices), gathered_from(exact_weights, indices))
    hold(got.largest, dense_weights.amax(-1), exact_weights.amax(-1))
    mean = got.entropy_nats.double().mean((0, 2)) - entropy_of(exact_weights).mean((0, 2))
    assert mean.abs().max() <= 1e-5 + 2 * float(
        (entropy_of(dense_weights).double() - entropy_of(exact_weights)).abs().max()
    )
    exact_log_sum = expected_log_sum(in_float64(call))
    assert not got.log_sum_exp.isnan().any()
    seen = exact_log_sum > -math.inf
    hold(got.log_sum_exp[seen], expected_log_sum(call)[seen].float(), exact_log_sum[seen])
    assert (got.log_sum_exp[~seen] == -math.inf).all()


BY_COLUMNS = ("plain", "causal", "grouped", "padded", "padded left, causal", "fully masked", "cross", "equal keys")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", BY_COLUMNS)
def test_wide_entropies_are_exact_to_1e5_a_head(name: str, dtype: torch.dtype) -> None:
    call = hard_calls(dtype)[name]
    exact_output, exact_weights = attend_with_weights(in_float64(call))
    columns, indices = asked(call)
    got = attend_wide(call, columns, indices, entropy=True, kernel="wide")
    expected = entropy_of(exact_weights)
    assert got.entropy_nats is not None
    assert (got.entropy_nats.double().mean((0, 2)) - expected.mean((0, 2))).abs().max() < 1e-5
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(got.output.double(), exact_output, rtol=2 * eps, atol=4e-6)
    exact_columns = exact_weights @ columns.double().unsqueeze(1)
    torch.testing.assert_close(got.columns.double(), exact_columns, rtol=1e-5, atol=4e-6)
    torch.testing.assert_close(got.gathered.double(), gathered_from(exact_weights, indices), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got.log_sum_exp.double(), expected_log_sum(in_float64(call)), rtol=1e-6, atol=4e-6)


@pytest.mark.parametrize("kernel", ["wide", "tile"])
def test_a_query_that_may_attend_to_nothing_weighs_nothing(kernel: wide.Kernel) -> None:
    mask = torch.tensor([False, False, True, True, False, True, True])
    call = make_call(mask=mask, is_causal=True, n_queries=7, dtype=torch.float32)
    columns, indices = asked(call)
    got = attend_wide(call, columns, indices.clamp(min=0), entropy=True, kernel=kernel)
    assert (got.log_sum_exp[:, :, :2] == -math.inf).all()
    assert got.log_sum_exp[:, :, 2:].isfinite().all()
    for name in ("output", "columns", "gathered", "entropy_nats"):
        part = getattr(got, name)
        assert (part[:, :, :2] == 0).all(), name
        assert part.isfinite().all(), name


def test_equal_keys_share_alike() -> None:
    call = hard_calls(torch.float32)["equal keys"]
    for kernel in ("wide", "tile"):
        got = attend_wide(call, entropy=True, kernel=kernel)
        torch.testing.assert_close(got.entropy_nats, torch.full_like(got.log_sum_exp, math.log(97)))


def test_scores_too_large_for_an_entropy_from_the_log_sum_take_the_tile() -> None:
    call = hard_calls(torch.float32)["scores of 1e4"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wide, "WIDE_FROM_KEYS", 1)
        assert choose_kernel(call) == "wide"
        assert choose_kernel(call, entropy=True) == "tile"
        assert attend_wide(call, entropy=True).kernel == "tile"
    with pytest.raises(ValueError, match="too large"):
        attend_wide(call, entropy=True, kernel="wide")


@pytest.mark.parametrize(
    ("fields", "options", "says"),
    [
        ({"bias_shape": (5, 7)}, {}, "bias"),
        ({"softcap": 2.0}, {}, "softcap"),
        ({"with_sinks": True}, {}, "sinks"),
        ({"mask_shape": (5, 7)}, {}, "masks by key"),
        ({"mask_shape": (2, 3, 1, 7)}, {}, "masks by key"),
        ({}, {"largest": True}, "not linear"),
        ({"n_keys": 0}, {}, "no keys"),
        ({"n_queries": 0}, {}, "no keys"),
    ],
)
def test_the_tile_runs_where_wide_cannot(monkeypatch: pytest.MonkeyPatch, fields, options, says: str) -> None:
    call = make_call(**fields)
    monkeypatch.setattr(wide, "WIDE_FROM_KEYS", 0)
    assert choose_kernel(call, **options) == "tile"
    assert attend_wide(call, **options).kernel == "tile"
    with pytest.raises(ValueError, match=says):
        attend_wide(call, **options, kernel="wide")


def test_the_kernel_is_chosen_by_the_number_of_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wide, "WIDE_FROM_KEYS", 7)
    assert attend_wide(make_call(n_keys=7)).kernel == "wide"
    assert attend_wide(make_call(n_keys=6)).kernel == "tile"


def test_without_the_fused_kernel_the_tile_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*_: object) -> tuple[Tensor, Tensor]:
        raise RuntimeError("no such operator")

    monkeypatch.setattr(wide, "WIDE_FROM_KEYS", 0)
    monkeypatch.setattr(wide, "_fused", gone)
    wide.fused_kernel_is_there.cache_clear()
    try:
        assert attend_wide(make_call()).kernel == "tile"
    finally:
        wide.fused_kernel_is_there.cache_clear()


@pytest.mark.parametrize("kernel", ["wide", "tile"])
def test_columns_may_differ_by_key_head(kernel: wide.Kernel) -> None:
    call = make_call(n_kv_heads=2, group=3)
    columns = torch.randn(2, 2, 7, 5, dtype=torch.float64)
    got = attend_wide(call, columns, kernel=kernel)
    expected = attention_weights(call) @ columns.repeat_interleave(3, 1)
    torch.testing.assert_close(got.columns, expected, **CLOSE)


@pytest.mark.parametrize("kernel", ["wide", "tile"])
def test_indices_may_differ_by_head(kernel: wide.Kernel) -> None:
    call = make_call(n_kv_heads=2, group=3, is_causal=True)
    indices = torch.randint(-1, 7, (2, 6, 5, 3))
    got = attend_wide(call, indices=indices, kernel=kernel)
    expected = attention_weights(call).gather(-1, indices.clamp(min=0)).masked_fill(indices < 0, 0.0)
    torch.testing.assert_close(got.gathered, expected, **CLOSE)


@pytest.mark.parametrize(("n_queries", "n_keys"), [(0, 3), (3, 0), (1, 1), (0, 0)])
def test_no_keys_and_no_queries(n_queries: int, n_keys: int) -> None:
    call = make_call(n_queries=n_queries, n_keys=n_keys)
    got = attend_wide(call, torch.ones(2, n_keys, 1, dtype=torch.float64), entropy=True, largest=True)
    torch.testing.assert_close(got.output, attend_with_weights(call)[0], **EXACT)
    assert got.columns is not None
    assert got.columns.shape == (2, 3, n_queries, 1)
    if n_keys == 0:
        assert (got.log_sum_exp == -math.inf).all()
        assert (got.entropy_nats == 0).all()


@pytest.mark.parametrize(
    ("columns", "indices", "says"),
    [
        (torch.ones(2, 6, 1), None, r"\(2, 6, 1\)"),
        (torch.ones(2, 6, 7, 1), None, r"\(2, 6, 7, 1\)"),
        (None, torch.zeros(2, 7, 1, dtype=torch.int64), r"\(2, 7, 1\)"),
        (None, torch.full((2, 5, 1), 7), "got 7"),
        (None, torch.full((2, 5, 1), -2), "indices are keys 0 to 6"),
    ],
)
def test_what_does_not_fit_is_refused(columns, indices, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        attend_wide(make_call(), columns, indices)


def test_blocks_cover_every_query_once_and_skip_hidden_keys() -> None:
    call = make_call(n_queries=97, n_keys=97, mask=sliding(97, 97, 11))
    parts = blocks(call, elements=3 * 97 * 16)
    seen = torch.zeros(2, 97, dtype=torch.int64)
    for part in parts:
        seen[part.texts, part.queries] += 1
        assert part.keys.stop - part.keys.start <= 16 + 10
    assert (seen == 1).all()
    causal = blocks(make_call(n_queries=97, n_keys=97, is_causal=True), elements=3 * 97 * 16)
    assert [part.keys.stop for part in causal[:2]] == [16, 32]
    # Many short texts go together, and padding that every text of a block has is not computed.
    mask = torch.ones(9, 1, 1, 25, dtype=torch.bool)
    mask[..., 20:] = False
    short = blocks(make_call(batch=9, n_queries=25, n_keys=25, mask=mask))
    assert len(short) == 1
    assert short[0].shape == (9, 25, 20)
    assert short[0].may is None


@pytest.mark.parametrize("kernel", ["wide", "tile"])
@pytest.mark.parametrize("is_causal", [True, False])
def test_no_array_of_queries_by_keys(monkeypatch: pytest.MonkeyPatch, kernel: wide.Kernel, is_causal: bool) -> None:
    monkeypatch.setattr(wide, "TILE_ELEMENTS", 200_000)
    n = 2049
    call = make_call(batch=1, n_kv_heads=1, group=3, n_queries=n, n_keys=n, dtype=torch.float32, is_causal=is_causal)
    columns, indices = asked(call)
    with LargestTensor() as seen:
        attend_wide(call, columns, indices, entropy=True, kernel=kernel)
    assert seen.elements < n * n / 8


def test_tiles_hold_the_weights() -> None:
    call = make_call(n_queries=97, n_keys=97, group=2, is_causal=True)
    weights = attention_weights(call)
    for tile in tiles(call, blocks(call, elements=6 * 97 * 16)):
        block = tile.block
        expected = weights[block.texts, :, block.queries]
        torch.testing.assert_close(tile.weights, expected[..., block.keys], **EXACT)
        assert (expected[..., block.keys.stop :] == 0).all()


def test_inputs_are_left_alone_and_no_gradient_is_kept() -> None:
    call = make_call(requires_grad=True, mask_shape=(2, 1, 5, 7), bias_shape=(5, 7))
    before = [part.detach().clone() for part in (call.query, call.key, call.value, call.mask, call.bias)]
    got: Wide = attend_wide(call, entropy=True)
    assert not got.output.requires_grad
    for part, copy in zip((call.query, call.key, call.value, call.mask, call.bias), before, strict=True):
        assert torch.equal(part, copy)


def test_the_output_is_the_models() -> None:
    call = make_call(dtype=torch.float32, n_queries=31, n_keys=31, mask_shape=(2, 1, 1, 31))
    require_output(attend_wide(call, kernel="tile").output, call)
    require_output(attend_wide(call, kernel="wide").output, call)
