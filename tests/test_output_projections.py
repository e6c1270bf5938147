"""W_O behind the heads of Hugging Face models: found wherever it lies, or it is said that it is not known."""

import math
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import attnscope
from attnscope.core.attention.seam import AttentionCall, attend, attention_weights
from attnscope.models.inside.projections import hooks
from attnscope.models.model import Batch
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


class _Calls:
    """Keeps every attention."""

    def __init__(self) -> None:
        self.calls: dict[tuple[str, int], AttentionCall] = {}

    def __call__(self, call: AttentionCall) -> Tensor:
        self.calls[call.kind, call.layer] = call
        return attend(call)


def by_loops(call: AttentionCall, w_o: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], int]:
    """Sum over queries and keys of A_qk |W_O v_k| of each head, and how many queries there are, for one text."""
    weights, values = attention_weights(call)[0].double().numpy(), call.value[0].double().numpy()
    n_heads, n_queries, n_keys = weights.shape
    group, width = n_heads // len(values), values.shape[2]
    sums = np.zeros(n_heads)
    for h in range(n_heads):
        for k in range(n_keys):
            out = [
                sum(w_o[row, h * width + i] * values[h // group, k, i] for i in range(width)) for row in range(len(w_o))
            ]
            norm = math.sqrt(sum(x * x for x in out))
            sums[h] += sum(weights[h, q, k] * norm for q in range(n_queries))
    return sums, n_queries


@pytest.mark.parametrize("name", MODELS)
def test_norms_behind_the_output_projection_of_any_architecture(name: str, tmp_path: Path) -> None:
    sizes, names = MODELS[name]
    model: Any = attnscope.load(str(write_tiny(tmp_path / name, name, **sizes)), engine="hf")
    assert model.info.path == "seam"
    state = {key: value.double().numpy() for key, value in model.modules()[0].state_dict().items()}
    found = attnscope.heads(model, TEXTS)
    assert not any("norm_weighted" in note for note in found.run["notes"])
    sums: dict[tuple[str, int], list[Any]] = {}
    for text in TEXTS:
        tokens = model.tokenizer.encode(text)
        ids = torch.from_numpy(tokens.ids)[None]
        target = torch.cat([torch.tensor([[0]]), ids[:, :-1]], 1) if "cross" in names else None
        probe = _Calls()
        with torch.no_grad():
            model.run(Batch(ids, target_ids=target), probe)
        for (kind, layer), call in probe.calls.items():
            stored = state[names[kind].format(layer)]
            sums.setdefault((kind, layer), []).append(by_loops(call, stored.T if name == "gpt2" else stored))
    for (kind, layer), texts in sums.items():
        value = sum(part / n for part, n in texts) / len(texts)
        np.testing.assert_allclose(
            found["heads"].grid("norm_weighted", kind)[layer], value, rtol=1e-5, err_msg=f"{kind} {layer}"
        )


def test_where_the_output_projection_is_not_known_it_is_said(tmp_path: Path) -> None:
    """An attention whose output is normalised before it is projected."""
    from transformers import AutoModel, AutoTokenizer

    folder = write_tiny(tmp_path / "bert")
    source: Any = AutoModel.from_pretrained(folder)
    inner = source.encoder.layer[1].attention.output
    inner.dense = torch.nn.Sequential(torch.nn.LayerNorm(15), inner.dense)
    model: Any = attnscope.load(source, AutoTokenizer.from_pretrained(folder))
    found = attnscope.heads(model, TEXTS)
    assert any("norm_weighted is undefined in encoder layer 1" in note for note in found.run["notes"])
    assert np.isfinite(found["heads"].grid("norm_weighted", "encoder")[0]).all()
    assert np.isnan(found["heads"].grid("norm_weighted", "encoder")[1]).all()


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
