import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnscope.core.attention.probes import WeightsRecorder
from attnscope.core.attention.seam import attention_weights
from tests.core_helpers import EXACT, calls, few_examples, make_call, oracle
from tests.rounding import require_output


@given(call=calls(), data=st.data())
@few_examples
def test_chosen_heads_are_the_oracles_in_the_order_asked_for(call, data):
    heads = data.draw(st.none() | st.lists(st.integers(0, call.n_heads - 1), min_size=1, unique=True))
    probe = WeightsRecorder(heads=heads)
    output = probe(call)
    expected_output, expected = oracle(call)
    torch.testing.assert_close(output, expected_output, **EXACT)
    chosen = expected if heads is None else expected[:, heads]
    kept = probe.maps["encoder"][0]
    assert kept.dtype == torch.float32
    torch.testing.assert_close(kept.double(), chosen, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("heads", [None, [0], [2, 0]])
def test_a_model_computes_the_same_with_the_probe(heads):
    call = make_call(dtype=torch.float32, mask_shape=(2, 1, 1, 7), group=2, n_kv_heads=2)
    require_output(WeightsRecorder(heads=heads)(call), call)


def test_everything_is_kept_by_kind_and_layer():
    probe = WeightsRecorder()
    for kind in ("decoder", "cross"):
        for layer in range(2):
            probe(dataclasses.replace(make_call(seed=layer), kind=kind, layer=layer))
    assert {kind: list(layers) for kind, layers in probe.maps.items()} == {
        "decoder": [0, 1],
        "cross": [0, 1],
    }
    expected = attention_weights(make_call(seed=1)).float()
    torch.testing.assert_close(probe.maps["cross"][1], expected)
    assert not torch.equal(probe.maps["cross"][0], probe.maps["cross"][1])


def test_kept_weights_hold_no_graph_and_leave_gradients_alone():
    call = make_call(requires_grad=True)
    probe = WeightsRecorder(heads=[1])
    probe(call).sum().backward()
    kept = probe.maps["encoder"][0]
    assert not kept.requires_grad
    assert kept.device.type == "cpu"
    assert call.value.grad is not None
    assert (call.value.grad != 0).all()
