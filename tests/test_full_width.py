"""The single head over a layer's full width, against attention in plain loops."""

import math

import numpy as np
import pytest
import torch

from attnscope.core.attention.calls import WeightsBesideFullWidth, full_width_weights
from attnscope.core.attention.seam import AttentionCall
from tests.core_helpers import EXACT, WORKED
from tests.oracle import attention

HEADS, KV_HEADS, QUERIES, KEYS, WIDTH = 6, 3, 5, 7, 4


def call_of(n_kv_heads=HEADS, texts=2, layer=0, **changes):
    drawn = torch.Generator().manual_seed(5)
    shapes = {"query": (HEADS, QUERIES), "key": (n_kv_heads, KEYS), "value": (n_kv_heads, KEYS)}
    tensors = {
        name: torch.randn(texts, *shape, WIDTH, generator=drawn, dtype=torch.float64)
        for name, shape in shapes.items()
    }
    return AttentionCall(
        **({"layer": layer, "kind": "encoder", "scale": 1 / math.sqrt(WIDTH), **tensors} | changes)
    )


def side_by_side(heads, repeated=1):
    """(head, token, width) as (token, all columns)."""
    return np.concatenate([head for head in heads.double().numpy() for _ in range(repeated)], 1)


@pytest.mark.parametrize("n_kv_heads", [HEADS, KV_HEADS, 1])
def test_it_is_one_head_over_all_columns(n_kv_heads):
    mask = torch.rand(2, 1, QUERIES, KEYS, generator=torch.Generator().manual_seed(1)) > 0.3
    mask[0, 0, 2] = False  # a query that may attend to nothing
    bias = torch.randn(QUERIES, KEYS, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    call = call_of(n_kv_heads, mask=mask, bias=bias)
    found = full_width_weights(call)
    query = side_by_side(call.query[0])
    key = side_by_side(call.key[0], HEADS // n_kv_heads)
    _, true = attention(query, key, key, mask=mask[0, 0].numpy(), bias=bias.numpy())
    np.testing.assert_allclose(found.numpy(), true, **EXACT)


def test_the_worked_example():
    def heads(name):
        return torch.tensor(WORKED[name], dtype=torch.float64).reshape(1, 5, 2, 2).transpose(1, 2)

    call = AttentionCall(0, "encoder", heads("Q"), heads("K"), heads("V"), scale=1 / math.sqrt(2))
    np.testing.assert_allclose(full_width_weights(call), WORKED["single_head"]["weights"], atol=6e-5)


@pytest.mark.parametrize(
    "own",
    [
        {"mask": torch.arange(HEADS).view(1, HEADS, 1, 1) != torch.arange(KEYS)},
        {"bias": torch.arange(HEADS).view(HEADS, 1, 1).expand(HEADS, QUERIES, KEYS).double()},
        {"sinks": torch.zeros(HEADS)},
    ],
    ids=["mask", "bias", "sinks"],
)
def test_heads_that_differ_otherwise_have_none(own):
    assert full_width_weights(call_of(**own)) is None


def test_the_probe_keeps_it_beside_the_weights():
    probe = WeightsBesideFullWidth(layers=[1], heads=[0, 2])
    plain = call_of(layer=1)
    output = probe(plain)
    probe(call_of(layer=0))
    assert output.shape == (2, HEADS, QUERIES, WIDTH)
    assert list(probe.maps["encoder"]) == list(probe.full["encoder"]) == [1]
    assert probe.maps["encoder"][1].shape == (2, 2, QUERIES, KEYS)
    torch.testing.assert_close(
        probe.full["encoder"][1], full_width_weights(plain).float(), atol=0, rtol=0
    )
    assert probe.full["encoder"][1].dtype == torch.float32
