"""What the tests of core share: calls of odd sizes, and the oracle's answer to any call."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from beartype import beartype
from hypothesis import settings
from hypothesis import strategies as st
from jaxtyping import Bool, Float, jaxtyped
from torch import Tensor

from attnscope.core import example
from attnscope.core.attention import seam as attention
from attnscope.core.attention.tiles import Tile, attend_in_tiles
from tests.oracle import attention as oracle_of_head

EXACT = {"rtol": 1e-12, "atol": 1e-13}
"""float64 against float64: some hundred roundings."""

# Five different sizes, all odd: a swapped or wrongly merged axis cannot fit by chance.
SIZES = (3, 5, 7, 11, 13)

few_examples = settings(max_examples=40, deadline=None, derandomize=True, database=None)

WORKED = json.loads(Path(__file__).with_name("worked_example.json").read_text(encoding="utf-8"))
"""The worked example by hand, to four decimals; what it starts from is the package's own."""
WORKED |= {name: getattr(example, name).tolist() for name in "QKV"} | {"tokens": list(example.TOKENS)}


def make_call(
    *,
    seed: int = 0,
    batch: int = 2,
    n_kv_heads: int = 3,
    group: int = 1,
    n_queries: int = 5,
    n_keys: int = 7,
    d_head: int = 11,
    d_value: int = 13,
    dtype: torch.dtype = torch.float64,
    requires_grad: bool = False,
    mask_shape: tuple[int, ...] | None = None,
    bias_shape: tuple[int, ...] | None = None,
    with_sinks: bool = False,
    **fields: Any,
) -> attention.AttentionCall:
    """A call of random numbers; masks hide four in ten."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return (
            torch.randn(*shape, generator=generator, dtype=torch.float64)
            .to(dtype)
            .requires_grad_(requires_grad)
        )

    query = normal(batch, n_kv_heads * group, n_queries, d_head)
    key = normal(batch, n_kv_heads, n_keys, d_head)
    value = normal(batch, n_kv_heads, n_keys, d_value)
    fields.setdefault("scale", 1 / math.sqrt(d_head) if d_head else 1.0)
    if mask_shape is not None:
        fields["mask"] = torch.rand(mask_shape, generator=generator) > 0.4
    if bias_shape is not None:
        fields["bias"] = normal(*bias_shape)
    if with_sinks:
        fields["sinks"] = normal(n_kv_heads * group)
    return attention.AttentionCall(layer=0, kind="encoder", query=query, key=key, value=value, **fields)


def on(call: attention.AttentionCall, device: str) -> attention.AttentionCall:
    moved = {}
    for name, part in vars(call).items():
        if isinstance(part, Tensor):
            moved[name] = part.to(device)
    return replace(call, **moved)


def gpu_test(function: Any) -> Any:
    there = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")
    return pytest.mark.gpu(there(function))


@st.composite
def calls(draw: st.DrawFn) -> attention.AttentionCall:
    """Any call that the seam can see, small."""
    n_queries, n_keys, d_head, d_value = draw(st.permutations(SIZES))[:4]
    batch = draw(st.integers(1, 2))
    n_kv_heads = draw(st.integers(1, 3))
    group = draw(st.integers(1, 3))
    n_heads = n_kv_heads * group
    shapes = [
        (n_queries, n_keys),
        (n_heads, n_queries, n_keys),
        (batch, 1, 1, n_keys),
        (batch, 1, n_queries, n_keys),
        (batch, n_heads, n_queries, n_keys),
        (1, n_heads, 1, n_keys),
        (batch, 1, n_queries, 1),
    ]
    return make_call(
        seed=draw(st.integers(0, 2**16)),
        batch=batch,
        n_kv_heads=n_kv_heads,
        group=group,
        n_queries=n_queries,
        n_keys=n_keys,
        d_head=d_head,
        d_value=d_value,
        mask_shape=draw(st.none() | st.sampled_from(shapes)),
        bias_shape=draw(st.none() | st.sampled_from(shapes)),
        is_causal=draw(st.booleans()),
        softcap=draw(st.none() | st.floats(0.5, 50)),
        with_sinks=draw(st.booleans()),
        scale=draw(st.sampled_from([1 / math.sqrt(d_head), 1.0, 0.37])),
    )


def oracle(call: attention.AttentionCall) -> tuple[Tensor, Tensor]:
    """What the oracle says of a call, one text and head at a time: output and weights, float64."""
    batch, n_heads, n_queries, _ = call.query.shape
    scores = (batch, n_heads, n_queries, call.key.shape[2])
    mask = None if call.mask is None else call.mask.expand(scores).numpy()
    bias = None if call.bias is None else call.bias.detach().double().expand(scores).numpy()
    query = call.query.detach().double().numpy()
    key = call.key.detach().double().numpy()
    value = call.value.detach().double().numpy()
    outputs = np.zeros((batch, n_heads, n_queries, value.shape[3]))
    weights = np.zeros(scores)
    for b in range(batch):
        for h in range(n_heads):
            read = h // (n_heads // call.n_kv_heads)
            outputs[b, h], weights[b, h] = oracle_of_head(
                query[b, h],
                key[b, read],
                value[b, read],
                mask=None if mask is None else mask[b, h],
                is_causal=call.is_causal,
                scale=call.scale,
                bias=None if bias is None else bias[b, h],
                softcap=call.softcap,
                sinks=None if call.sinks is None else float(call.sinks[h]),
            )
    return torch.from_numpy(outputs), torch.from_numpy(weights)


@jaxtyped(typechecker=beartype)
def checked_seam(
    call: attention.AttentionCall,
    query: Float[Tensor, "batch head query d_head"],
    key: Float[Tensor, "batch kv_head key d_head"],
    value: Float[Tensor, "batch kv_head key d_value"],
) -> tuple[
    Float[Tensor, "batch head query d_value"],
    Float[Tensor, "batch head query d_value"],
    Float[Tensor, "batch head query key"],
    Bool[Tensor, "#batch #head #query #key"] | None,
]:
    """Everything the seam says of a call, with its axes checked: fast output, dense output, weights, mask."""
    output, weights = attention.attend_with_weights(call)
    return attention.attend(call), output, weights, attention.allowed(call)


def see_all(call: attention.AttentionCall) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    return checked_seam(call, call.query, call.key, call.value)


class TileSums(NamedTuple):
    """An attention as its tiles tell it, (batch, head, query, ...)."""

    output: Tensor
    weights: Tensor
    largest: Tensor
    entropy_nats: Tensor


def read_tiles(call: attention.AttentionCall) -> TileSums:
    """Everything that a tile can say, put together again."""
    batch, n_heads, n_queries, _ = call.query.shape
    dtype = torch.promote_types(call.query.dtype, torch.float32)
    rows = (batch, n_heads, n_queries)
    weights = torch.zeros(*rows, call.key.shape[2], dtype=dtype, device=call.query.device)
    largest, entropies = (torch.zeros(rows, dtype=dtype, device=call.query.device) for _ in range(2))

    def read(tile: Tile) -> None:
        block = tile.block
        here = (block.texts, slice(None), block.queries)
        weights[(*here, block.keys)] = tile.weights
        largest[here] = tile.weights.amax(-1)
        entropies[here] = tile.entropies(largest[here])

    return TileSums(attend_in_tiles(call, read), weights, largest, entropies)
