"""Models in bfloat16 and float16: whatever is added up stays float32 or better.

The oracle is float64 on the very numbers that the model has. An error may be twice that of plain PyTorch in the
model's own precision (the tolerance of flash-attention's tests), and for weights and their sums, which are float32
whatever the model's precision, a few roundings of float32.
"""

import math
from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

from attnscope.core.attention.calls import full_width_weights, join_heads
from attnscope.core.attention.probes import HeadGate
from attnscope.core.attention.row_samples import rows_of
from attnscope.core.attention.seam import AttentionCall, attend, attend_with_weights, attention_weights
from attnscope.core.attention.tiles import attend_in_tiles, attend_without_map
from attnscope.core.measures import HeadMeasures, measures_of_weights
from attnscope.core.relations import record_links
from tests.core_helpers import make_call
from tests.measure_helpers import make_facts
from tests.test_relations_core import facts_of

N = 97
# 97 roundings of numbers up to 1 that are as often up as down.
FLOAT32 = 64 * torch.finfo(torch.float32).eps

LOW = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])


def low_call(dtype, **more):
    settings = {
        "n_kv_heads": 2,
        "group": 2,
        "n_queries": N,
        "n_keys": N,
        "d_head": 16,
        "d_value": 16,
        "is_causal": True,
    }
    return make_call(dtype=dtype, **{**settings, **more})


def exact(call):
    parts = {f.name: getattr(call, f.name) for f in fields(call)}
    return replace(
        call,
        **{n: x.double() for n, x in parts.items() if isinstance(x, Tensor) and x.dtype != torch.bool},
    )


def plain(call):
    """What everyone writes, all in the model's precision: output and weights."""
    group = call.n_heads // call.n_kv_heads
    key, value = (part.repeat_interleave(group, 1) for part in (call.key, call.value))
    hidden = torch.ones(N, N, dtype=torch.bool).triu(1)
    weights = (call.query @ key.mT * call.scale).masked_fill(hidden, -math.inf).softmax(-1)
    return weights @ value, weights


def off(found, oracle):
    return float((found.double() - oracle).abs().max())


@LOW
def test_outputs_are_no_further_off_than_twice_plain_attention(dtype):
    call = low_call(dtype)
    oracle = attend_with_weights(exact(call))[0]
    allowed = 2 * off(plain(call)[0], oracle)
    assert allowed > 0
    facts = make_facts([N, N - 9], N)
    links = facts_of([list(range(N))] * 2, [(0, [3], [1], 0), (1, [9], [4], 0)])
    ones = torch.ones(call.n_heads)
    ways = {
        "attend": attend(call),
        "dense": attend_with_weights(call)[0],
        "tiles": attend_in_tiles(call),
        "lean": attend_without_map(call),
        "sums": HeadMeasures(facts)(call),
        "links": record_links(links)(call),
        "gate": HeadGate({("encoder", call.layer): ones, ("decoder", call.layer): ones})(call),
    }
    for name, output in ways.items():
        assert output.dtype == dtype, name
        assert off(output, oracle) <= allowed, name


@LOW
def test_weights_and_their_sums_are_float32(dtype):
    call = low_call(dtype)
    oracle = attention_weights(exact(call))
    assert off(plain(call)[1], oracle) > 10 * FLOAT32  # what it would be without care
    assert off(attention_weights(call), oracle) <= FLOAT32
    assert (
        off(rows_of(call, torch.arange(5, 40), keys=slice(3, 50)), oracle[:, :, 5:40, 3:50]) <= FLOAT32
    )
    one = replace(call, query=call.query[:1], key=call.key[:1], value=call.value[:1])
    for found in (
        join_heads([(one, h) for h in range(4)]),
        join_heads([(exact(one), h) for h in range(4)]),
    ):
        assert isinstance(found, AttentionCall)
    joined = [attention_weights(join_heads([(c, h) for h in range(4)])) for c in (one, exact(one))]  # type: ignore[arg-type]
    assert off(joined[0], joined[1]) <= FLOAT32
    assert off(full_width_weights(call), full_width_weights(exact(call))) <= FLOAT32  # type: ignore[arg-type]


@LOW
def test_every_measure_is_float32(dtype):
    call = low_call(dtype)
    facts = make_facts([N, N - 9], N)
    rest = facts.real[:, None, None] & torch.ones(N, N, dtype=torch.bool).tril()
    call = replace(call, mask=rest, is_causal=False)
    probe = HeadMeasures(facts)
    probe(call)
    found = probe.sums[call.kind][call.layer]
    high = exact(call)
    oracle = measures_of_weights(attention_weights(high), facts, allowed=rest)
    plainly = measures_of_weights(plain(call)[1].masked_fill(~rest, 0.0), facts, allowed=rest)
    ours, theirs = (abs(one.sum - oracle.sum) for one in (found, plainly))
    # Relative to what is added up: the largest sum of the measure; of one whose terms cancel, of their sizes.
    size = abs(oracle.sum).max((1, 2), keepdims=True).clip(1)
    assert facts.embeddings is not None
    direction = torch.nn.functional.normalize(facts.embeddings, dim=-1)
    cosine = direction @ direction.mT
    allowed = rest[:, 0]
    mean = (cosine * allowed).sum(-1, keepdim=True) / allowed.sum(-1, keepdim=True)
    terms = (attention_weights(high) * abs(cosine - mean)[:, None]).sum(-1) * facts.real[:, None]
    size[[name.startswith("similar_token") for name in found.names]] = terms.sum(-1).max()
    picks = [name == "rarest_token" for name in found.names]  # who is largest: a tie breaks either way
    for row, name in enumerate(found.names):
        if not picks[row]:
            assert (ours[row] / size[row]).max() <= 4 * FLOAT32, name
            assert ours[row].max() <= 2 * theirs[row].max() + FLOAT32, name
    assert theirs.max() > 0
