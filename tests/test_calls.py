"""Attention kept as calls: the same weights as dense ones, text by text and some queries at a time."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from attnscope.core.attention.calls import join_heads, keep_calls
from attnscope.core.attention.seam import AttentionCall, attention_weights
from tests.core_helpers import EXACT


def call_of(n_heads=6, n_kv_heads=3, n_queries=40, batch=1, seed=0, **more):
    drawn = torch.Generator().manual_seed(seed)

    def tensor(heads):
        return torch.randn(batch, heads, n_queries, 5, generator=drawn, dtype=torch.float64)

    fields = {"layer": 0, "kind": "decoder", "scale": 0.7}
    return AttentionCall(
        query=tensor(n_heads), key=tensor(n_kv_heads), value=tensor(n_kv_heads), **(fields | more)
    )


def masks(n):
    near = (torch.arange(n)[:, None] - torch.arange(n)).abs() < 7
    return {
        "bidirectional": {},
        "causal": {"is_causal": True},
        "window": {"mask": near, "is_causal": True},
        "bias": {
            "bias": torch.randn(
                1, 6, n, n, generator=torch.Generator().manual_seed(3), dtype=torch.float64
            )
        },
        "sinks": {"sinks": torch.linspace(-1, 1, 6, dtype=torch.float64), "is_causal": True},
        "softcap": {"softcap": 2.0},
    }


def test_the_probe_keeps_the_chosen_layers_and_the_model_goes_on():
    call = call_of()
    probe = keep_calls([0])
    output = probe(call)
    assert output.shape == (*call.value.shape[:1], 6, 40, 5)
    probe(replace(call, layer=1))
    assert list(probe.maps["decoder"]) == [0]
    kept = probe.maps["decoder"][0]
    assert kept.value.shape[-1] == 0
    np.testing.assert_array_equal(attention_weights(kept), attention_weights(call))
    with pytest.raises(RuntimeError, match="twice"):
        probe(call)


class TestSingleHead:
    def test_it_is_the_softmax_over_queries_and_keys_side_by_side(self):
        call = call_of(is_causal=True, scale=1 / math.sqrt(5))
        found = join_heads([(call, 1), (call, 4), (call, 5)])
        weights = attention_weights(found)[0, 0]
        queries = np.concatenate([call.query[0, h].numpy() for h in (1, 4, 5)], -1)
        keys = np.concatenate([call.key[0, h // 2].numpy() for h in (1, 4, 5)], -1)
        for q in range(40):
            scores = np.array([queries[q] @ keys[k] / math.sqrt(3 * 5) for k in range(q + 1)])
            shares = np.exp(scores - scores.max())
            np.testing.assert_allclose(weights[q, : q + 1], shares / shares.sum(), **EXACT)
            assert not weights[q, q + 1 :].any()

    def test_of_one_head_it_is_that_head(self):
        call = call_of(softcap=2.0)
        found = join_heads([(call, 3)])
        np.testing.assert_allclose(
            attention_weights(found)[0, 0], attention_weights(call)[0, 3], **EXACT
        )

    def test_what_all_heads_share_stays(self):
        bias = torch.randn(1, 1, 40, 40, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        found = join_heads([(call_of(bias=bias), 0), (call_of(seed=2, bias=bias), 1)])
        assert found.bias is not None

    @pytest.mark.parametrize(
        ("first", "second", "why"),
        [
            ({"sinks": torch.zeros(6)}, {}, "sink"),
            ({"scale": 1.0}, {}, "scale"),
            (
                {"bias": torch.randn(1, 6, 40, 40)},
                {"bias": torch.randn(1, 6, 40, 40)},
                "position biases",
            ),
            ({"is_causal": True}, {}, "different keys"),
            ({"n_queries": 11}, {}, "different texts"),
        ],
    )
    def test_where_there_is_none_it_says_why(self, first, second, why):
        found = join_heads([(call_of(**first), 0), (call_of(**second), 1)])
        assert isinstance(found, str)
        assert why in found
