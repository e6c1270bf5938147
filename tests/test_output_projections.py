"""W_O behind the heads of Hugging Face models: found wherever it lies, or it is said that it is not known."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import attnscope
from attnscope.models import turns
from attnscope.models.hf import weights
from attnscope.models.inside.projections import hooks
from tests.conftest import write_tiny

TEXTS = ["the cat", "a b c d e", "the the cat."]

SMALL: dict[str, Any] = {"d_model": 15, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 3,
                         "decoder_attention_heads": 3, "encoder_ffn_dim": 11, "decoder_ffn_dim": 11}  # fmt: skip
MODELS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    # Name of the kind's weight, {} for the layer; Conv1D stores its map the other way round.
    "bert": ({}, {"encoder": "encoder.layer.{}.attention.output.dense.weight"}),
    "gpt2": ({"n_embd": 15, "n_layer": 2, "n_head": 3}, {"decoder": "h.{}.attn.c_proj.weight"}),
    "llama": (
        {"hidden_size": 24, "num_attention_heads": 6, "num_key_value_heads": 2, "attention_bias": True},
        {"decoder": "layers.{}.self_attn.o_proj.weight"},
    ),
    "opt": (
        {"hidden_size": 15, "ffn_dim": 11, "word_embed_proj_dim": 15, "num_hidden_layers": 2},
        {"decoder": "decoder.layers.{}.self_attn.out_proj.weight"},
    ),
    "gpt_neox": ({"hidden_size": 24, "rotary_pct": 1.0}, {"decoder": "layers.{}.attention.dense.weight"}),
    "t5": (
        {"d_model": 15, "d_kv": 5, "num_heads": 3, "num_layers": 2, "d_ff": 11, "pad_token_id": 0,
         "decoder_start_token_id": 0},
        {"encoder": "encoder.block.{}.layer.0.SelfAttention.o.weight",
         "decoder": "decoder.block.{}.layer.0.SelfAttention.o.weight",
         "cross": "decoder.block.{}.layer.1.EncDecAttention.o.weight"},
    ),
    "bart": (
        SMALL | {"decoder_start_token_id": 0, "pad_token_id": 0},
        {"encoder": "encoder.layers.{}.self_attn.out_proj.weight",
         "decoder": "decoder.layers.{}.self_attn.out_proj.weight",
         "cross": "decoder.layers.{}.encoder_attn.out_proj.weight"},
    ),
    "albert": ({"embedding_size": 7, "num_hidden_layers": 2},
               {"encoder": "encoder.albert_layer_groups.0.albert_layers.0.attention.dense.weight"}),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_output_projections_of_any_architecture(name: str, tmp_path: Path) -> None:
    sizes, names = MODELS[name]
    model: Any = attnscope.load(str(write_tiny(tmp_path / name, name, **sizes)), engine="hf")
    state = model.modules()[0].state_dict()
    projections = model.output_projections()
    assert {kind for kind, _ in projections} == set(names)
    for (kind, layer), weight in projections.items():
        stored = state[names[kind].format(layer)]
        torch.testing.assert_close(weight, stored.T if name == "gpt2" else stored)


def test_what_another_thread_runs_of_a_model_is_not_taken_for_ours() -> None:
    """Two studies of one model at once: W_O was not found then, and measures that need it were left out in silence."""
    module, seen = torch.nn.Linear(2, 2), []
    with hooks([module], lambda *_: seen.append(threading.get_ident())):
        other = threading.Thread(target=module, args=(torch.zeros(2),))
        other.start()
        other.join()
        assert seen == []
        module(torch.zeros(2))
    assert seen == [threading.get_ident()]


def test_no_other_pass_of_a_model_ends_while_w_o_is_sought(tiny_bert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At its end a pass puts back the state of all modules, and with it the hooks that were there as it began."""
    model = attnscope.load(tiny_bert, engine="hf")
    base: Any = model.modules()[0]
    perform, was_free = weights.perform, []

    def watch(*given: Any) -> Any:
        (lock,) = turns._locks[base]
        other = threading.Thread(target=lambda: was_free.append(lock.acquire(blocking=False)))
        other.start()
        other.join()
        return perform(*given)

    monkeypatch.setattr(weights, "perform", watch)
    assert model.output_projections()
    assert was_free == [False]
