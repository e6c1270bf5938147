"""Heads out of a model: the HeadGate and Means probes, reruns from a layer on, and the weights that are a head's
own."""

import copy
import functools

import pytest
import torch

from attnscope.core.attention.probes import HeadGate
from attnscope.core.attention.seam import attend, attend_with_weights
from attnscope.models.hf.assembling import wrap
from attnscope.models.model import Batch
from tests.ablation_helpers import batch_of, tiny, wrapped
from tests.core_helpers import make_call

NAMES = ["bert", "gpt2", "llama", "t5", "albert", "gpt_neox", "bart"]


# The probe --------------------------------------------------------------------------------------------------------


def test_a_gate_multiplies_each_heads_output_and_puts_a_vector_in_its_place():
    call = make_call(n_kv_heads=2, group=2)
    output, _ = attend_with_weights(call)
    factors = torch.tensor([1.0, 0.0, 0.25, -2.0], dtype=torch.float64)
    stand_in = torch.randn(4, 13, dtype=torch.float64)
    gated = HeadGate({("encoder", 0): factors}, {("encoder", 0): stand_in})(call)
    for batch in range(2):
        for head in range(4):
            for query in range(5):
                expected = (
                    factors[head] * output[batch, head, query] + (1 - factors[head]) * stand_in[head]
                )
                torch.testing.assert_close(gated[batch, head, query], expected, rtol=1e-12, atol=1e-12)


def test_an_open_gate_and_other_places_change_no_bit():
    call = make_call()
    open_gate = HeadGate({("encoder", 0): torch.ones(3)}, {("encoder", 0): torch.randn(3, 13)})
    assert torch.equal(open_gate(call), attend(call))
    closed = torch.zeros(3)
    elsewhere = HeadGate({("decoder", 0): closed, ("encoder", 1): closed})
    assert torch.equal(elsewhere(call), attend(call))


@pytest.mark.parametrize("shape", [(1,), (4,), (3, 3), (2, 1), (2, 3, 1), ()])
def test_factors_that_would_be_broadcast_are_refused(shape):
    with pytest.raises(ValueError, match="3 heads and 2 texts"):
        HeadGate({("encoder", 0): torch.ones(shape)})(make_call())


# Zeroing weights by hand ------------------------------------------------------------------------------------------


def _zero_bert(model, layer, head):
    model.bert.encoder.layer[layer].attention.output.dense.weight[:, head * 5 : head * 5 + 5] = 0


def _zero_gpt2(model, layer, head):
    model.transformer.h[layer].attn.c_proj.weight[head * 5 : head * 5 + 5] = 0


def _zero_llama(model, layer, head):
    model.model.layers[layer].self_attn.o_proj.weight[:, head * 4 : head * 4 + 4] = 0


def _zero_t5(kind, model, layer, head):
    stack = model.encoder if kind == "encoder" else model.decoder
    part = stack.block[layer].layer[1 if kind == "cross" else 0]
    attention = part.EncDecAttention if kind == "cross" else part.SelfAttention
    attention.o.weight[:, head * 5 : head * 5 + 5] = 0


@pytest.mark.parametrize(
    ("name", "kind", "zero"),
    [
        ("bert", "encoder", _zero_bert),
        ("gpt2", "decoder", _zero_gpt2),
        ("llama", "decoder", _zero_llama),
        *(("t5", kind, functools.partial(_zero_t5, kind)) for kind in ("encoder", "decoder", "cross")),
    ],
)
def test_ablation_by_the_seam_is_zeroing_the_weights_by_hand(name, kind, zero):
    source = tiny(name)
    model = wrap(source)
    batch = batch_of(model)
    n_heads = {"llama": 6}.get(name, 3)
    for layer, head in [(0, 0), (1, 2)]:
        by_hand = copy.deepcopy(source)
        with torch.no_grad():
            zero(by_hand, layer, head)
            given = {"input_ids": batch.ids}
            if batch.target_ids is not None:
                given["decoder_input_ids"] = batch.target_ids
            expected = by_hand(**given, output_hidden_states=True)
            factors = torch.ones(n_heads)
            factors[head] = 0
            ours = model.outputs(batch, HeadGate({(kind, layer): factors}))
            whole = model.outputs(batch, attend)
        torch.testing.assert_close(
            ours.logits, expected.logits, rtol=1e-6, atol=1e-6 * float(expected.logits.abs().max())
        )
        assert not torch.allclose(ours.logits, whole.logits, atol=1e-3)


def test_a_query_head_goes_without_its_group():
    source = tiny("llama")
    model = wrap(source)
    batch = batch_of(model)
    by_hand = copy.deepcopy(source)
    with torch.no_grad():
        # Without the values of the first group, all three heads that read it are out.
        by_hand.model.layers[1].self_attn.v_proj.weight[:4] = 0
        group = by_hand(input_ids=batch.ids).logits
        first_out = torch.tensor([0.0, 1, 1, 1, 1, 1])
        three_out = torch.tensor([0.0, 0, 0, 1, 1, 1])
        one = model.outputs(batch, HeadGate({("decoder", 1): first_out})).logits
        three = model.outputs(batch, HeadGate({("decoder", 1): three_out})).logits
    torch.testing.assert_close(three, group, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(one, group, atol=1e-3)


# Reruns -----------------------------------------------------------------------------------------------------------


def _gates(model, batch, times, place, n_heads):
    factors = torch.rand(times * len(batch.ids), n_heads, generator=torch.Generator().manual_seed(3))
    return HeadGate({place: factors})


@pytest.mark.parametrize("name", NAMES)
def test_a_rerun_from_the_layer_on_is_the_whole_forward(name):
    model = wrapped(name)
    batch = batch_of(model)
    assert model.resumes
    with torch.no_grad():
        rerun = model.rerun(batch)
        n_blocks = len({rerun.first_block_of([place]) for place in rerun.calls})
        assert n_blocks == sum(
            n for kind, n in zip(model.info.kinds, model.info.n_layers, strict=True) if kind != "cross"
        )
        for place in rerun.calls:
            gate = _gates(model, batch, 3, place, model.info.n_heads[model.info.kinds.index(place[0])])
            short = rerun.run_from(gate, rerun.first_block_of([place]), 3)
            repeated = Batch(
                batch.ids.repeat(3, 1),
                target_ids=None if batch.target_ids is None else batch.target_ids.repeat(3, 1),
            )
            whole = model.outputs(repeated, gate)
            torch.testing.assert_close(short.hidden, whole.hidden, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(short.logits, whole.logits, rtol=1e-4, atol=1e-4)


def test_a_model_is_left_as_it_was():
    source = tiny("gpt2")
    model = wrap(source)
    batch = batch_of(model)
    before = source(input_ids=batch.ids).logits
    with torch.no_grad():
        rerun = model.rerun(batch)
        rerun.run_from(HeadGate({}), 2)
    assert all("forward" not in vars(module) for module in source.modules())
    torch.testing.assert_close(source(input_ids=batch.ids).logits, before)


def test_a_model_that_cannot_be_resumed_is_computed_whole(monkeypatch):
    from attnscope.models.hf import model as hf_model

    monkeypatch.setattr(hf_model, "tolerance", lambda *_: -1.0)
    model = wrapped("bert")
    assert not model.resumes
    batch = batch_of(model)
    with torch.no_grad():
        rerun = model.rerun(batch)
        assert {rerun.first_block_of([place]) for place in rerun.calls} == {0}
        gate = HeadGate({("encoder", 2): torch.zeros(3)})
        torch.testing.assert_close(rerun.run_from(gate).hidden, model.outputs(batch, gate).hidden)


@pytest.mark.parametrize("spec", ["minilm", "own", "own-causal"])
def test_models_of_our_own_are_resumed(spec):
    from attnscope.models import load

    model = load(spec)
    tokens = [
        model.tokenizer.encode(text).ids.astype("int64") for text in ("the cat sat", "a dog ran on")
    ]
    n = min(map(len, tokens))
    batch = Batch(torch.stack([torch.from_numpy(ids[:n]) for ids in tokens]))
    kind = model.info.kinds[0]
    for layer in range(model.info.n_layers[0]):
        gate = _gates(model, batch, 2, (kind, layer), model.info.n_heads[0])
        with torch.no_grad():
            rerun = model.rerun(batch)
            assert rerun.first_block_of([(kind, layer)]) == layer
            ours = rerun.run_from(gate, layer, 2).hidden
            whole = model.outputs(Batch(batch.ids.repeat(2, 1)), gate).hidden
        torch.testing.assert_close(ours, whole, rtol=1e-5, atol=1e-5)
