"""Banded attention (Longformer, LED) in full rows: what the model's own weights say, worked out densely."""

from typing import Any

import numpy as np
import pytest
import torch
import transformers

import attnscope

IDS = [0, 5, 9, 3, 7, 11, 12, 4, 8, 30, 21, 2, 6, 13, 17]
SIZES = {"vocab_size": 40, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}


Banded = tuple[Any, list[Any], dict[str, str], dict[str, torch.Tensor]]
"""A model, its attentions, what `heatmap` needs besides a text, and what the model needs besides its tokens."""


def longformer():
    config = transformers.LongformerConfig(
        **SIZES,
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=32,
        max_position_embeddings=64,
        attention_window=4,
    )
    network = transformers.LongformerModel(config).eval()
    return network, [layer.attention.self for layer in network.encoder.layer], {}, {}


def led():
    config = transformers.LEDConfig(
        **SIZES,
        d_model=24,
        encoder_layers=2,
        decoder_layers=1,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        max_encoder_position_embeddings=64,
        max_decoder_position_embeddings=64,
        attention_window=4,
        decoder_start_token_id=2,
    )
    network = transformers.LEDModel(config).eval()
    attentions = [layer.self_attn.longformer_self_attn for layer in network.get_encoder().layers]
    return network, attentions, {"target": "5 9"}, {"decoder_input_ids": torch.tensor([[2, 5]])}


@pytest.mark.parametrize("make", [longformer, led])
def test_bands_are_full_rows_of_a_dense_softmax(make):
    torch.manual_seed(0)
    network, attentions, target, inputs = make()
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.4)
    # The queries and keys of each layer, as the model computes them.
    kept = {}
    for number, attention in enumerate(attentions):
        for name in ("query", "key"):
            getattr(attention, name).register_forward_hook(
                lambda _module, _inputs, output, key=f"{name}{number}": kept.update(
                    {key: output.clone()}
                )
            )
    shown = attnscope.heatmap(attnscope.load(network), " ".join(map(str, IDS)), **target).maps[0]
    assert shown.kind == "encoder"
    assert shown.weights.shape == (2, 4, len(IDS), len(IDS))
    with torch.no_grad():
        network(input_ids=torch.tensor([IDS]), **inputs)
    for number in range(2):
        # (token, batch, d) of LED and Longformer alike; the text may be filled up behind.
        query, key = (kept[f"{name}{number}"].reshape(-1, 4, 6)[: len(IDS)] for name in ("query", "key"))
        scores = torch.einsum("qhd,khd->hqk", query, key) / 6**0.5
        # Half a window to either side.
        places = torch.arange(len(IDS))
        far = (places[:, None] - places).abs() > 2
        expected = scores.masked_fill(far, -torch.inf).softmax(-1).numpy()
        np.testing.assert_allclose(shown.weights[number], expected, atol=2e-6)
