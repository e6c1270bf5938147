import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnscope.core import sums as sums_module
from attnscope.core import wide
from attnscope.core.attention import AttentionCall, allowed, attend, attention_weights
from attnscope.core.measures import MEASURES, TextFacts, measure_names, measures_of_weights, output_factor
from attnscope.core.sums import Sums
from tests.core_helpers import few_examples, make_call
from tests.measure_helpers import Expected, expected, make_facts, uniform_weights

PROJECTION = torch.randn(7, 6 * 5, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def assert_sums(got, wanted: Expected, n: int, *, tolerance: float, uniform: Expected | None = None) -> None:
    """Each measure within the tolerance for each query, distances for each query and token."""
    kinds = [("sum", wanted.sum), ("count", wanted.count)]
    if uniform is not None:
        kinds += [("uniform_sum", uniform.sum), ("uniform_count", uniform.count)]
    for kind, right in kinds:
        ours = getattr(got, kind)
        assert ours.shape == right.shape
        for i, name in enumerate(got.names):
            slack = tolerance * max(1, n) * (n if "distance" in name else 1)
            off = np.abs(ours[i] - right[i]).max(initial=0.0)
            assert off <= slack, f"{kind} of {name}: {ours[i]} is not {right[i]}"
    np.testing.assert_allclose(got.offset_sum, wanted.offset_sum, atol=tolerance * max(1, n))
    np.testing.assert_allclose(got.offset_count, wanted.offset_count, atol=tolerance * max(1, n))
    if uniform is not None:
        np.testing.assert_allclose(got.offset_uniform, uniform.offset_sum, atol=tolerance * max(1, n))


def check(call: AttentionCall, keys: TextFacts, queries: TextFacts | None = None, *, tolerance: float = 1e-11) -> None:
    """Both roads against plain loops on the dense float64 weights of the call, and uniform attention likewise."""
    exact = dataclasses.replace(
        call, query=call.query.double(), key=call.key.double(), value=call.value.double(),
        bias=None if call.bias is None else call.bias.double(),
        sinks=None if call.sinks is None else call.sinks.double(),
    )  # fmt: skip
    weights = attention_weights(exact)
    may = allowed(call)
    wanted = expected(weights, may, keys, queries, call.value, PROJECTION)
    even = expected(uniform_weights(call), may, keys, queries, call.value, PROJECTION)
    # Likeness is told less what uniform attention has.
    for name in ("similar_token", "similar_token_active"):
        even.sum[even.names.index(name)] = 0.0
    n = call.key.shape[2]
    probe = Sums(keys, query_facts=queries, output_projections={(call.kind, call.layer): PROJECTION})
    output = probe(call)
    torch.testing.assert_close(output, attend(call), rtol=1e-5, atol=1e-5)
    assert output.dtype == call.value.dtype
    assert_sums(probe.sums[call.kind][call.layer], wanted, n, tolerance=tolerance, uniform=even)
    factor = output_factor(PROJECTION, call.n_heads)
    dense = measures_of_weights(weights, keys, queries, allowed=may, values=call.value, factor=factor)
    assert_sums(dense, wanted, n, tolerance=max(tolerance, 1e-11) if call.query.dtype == torch.float64 else 1e-6,
                uniform=even)  # fmt: skip


@st.composite
def situations(draw: st.DrawFn) -> tuple[AttentionCall, TextFacts, TextFacts | None]:
    cross = draw(st.booleans())
    n_queries, n_keys = draw(st.permutations((1, 3, 5, 7, 11, 13)))[:2]
    n_queries = n_queries if cross else n_keys
    batch, seed = draw(st.integers(1, 3)), draw(st.integers(0, 2**16))
    lengths = draw(st.lists(st.integers(0, n_keys), min_size=batch, max_size=batch))
    options = {"special_ends": draw(st.booleans()), "left": draw(st.booleans()), "seed": seed}
    keys = make_facts(lengths, n_keys, **options, vocabulary=draw(st.integers(1, 6)))
    queries = None
    if cross:
        of_queries = draw(st.lists(st.integers(0, n_queries), min_size=batch, max_size=batch))
        queries = make_facts(of_queries, n_queries, **options)
    group, mask_heads = draw(st.sampled_from([1, 2, 3, 6])), draw(st.sampled_from([1, 1, 6]))
    masked = draw(st.sampled_from(["none", "padding", "any"]))
    mask = None
    generator = torch.Generator().manual_seed(seed)
    if masked == "padding":
        mask = keys.real[:, None, None]
    elif masked == "any":
        mask = torch.rand(batch, mask_heads, n_queries, n_keys, generator=generator) > 0.3
        # Padding is hidden in any sane call; a model's values there could be anything.
        mask = mask & keys.real[:, None, None]
    else:
        keys = dataclasses.replace(keys, real=torch.ones_like(keys.real), rarest=None)
    call = make_call(
        seed=seed, batch=batch, n_kv_heads=6 // group, group=group, n_queries=n_queries, n_keys=n_keys, d_value=5,
        mask=mask, is_causal=draw(st.booleans()), with_sinks=draw(st.booleans()),
        softcap=draw(st.none() | st.just(2.0)),
        bias_shape=draw(st.none() | st.just((1, 6, n_queries, n_keys))),
    )  # fmt: skip
    return dataclasses.replace(call, kind="cross" if cross else "decoder"), keys, queries


@given(situation=situations(), elements=st.sampled_from([1, 300, 10**6]), kept=st.sampled_from([0, 10**6]))
@few_examples
def test_every_measure_is_its_definition(situation, elements: int, kept: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wide, "TILE_ELEMENTS", elements)
        patch.setattr(wide, "LEAST_QUERIES", 2)
        patch.setattr(sums_module, "KEPT_NUMBERS", kept)
        patch.setattr(sums_module, "SHORT_LIST", 1 if elements == 1 else 8)
        check(*situation)
