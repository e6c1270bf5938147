"""Heads written into the weights of real families: BERT, GPT-2, and Llama with grouped key heads.

The residual stream holds one-hot blocks: the token, its place (Llama: none), the token before (written by head 0 of
layer 0), and a constant. All states of a layer have the same mean and length, so that a norm can be undone by its own
weights. A head's score is a sum of three tables:

    score(i, j) = tokens[x_i, x_j] + before[x_i, x_(j-1)] + places[j - i]

Every key projection is the same, the blocks themselves; the rule stands in the query projection alone, so that query
heads which share a key head can do different things. Llama's places are sums of cosines of the distance, fitted to the
table: planted heads there follow `places` as nearly as rotary positions allow.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Family = str
FAMILIES: tuple[Family, ...] = ("bert", "gpt2", "llama")
D_ROTARY, BASE, TURNING, STILL = 256, 1e10, 64, 80
"""Llama: width of a head, rope's base, pairs that turn with the place, and the first pair that hardly does (6e-7)."""


@dataclass(frozen=True)
class Scores:
    """What a head's scores are made of, in nats.

    Attributes:
        tokens: (query token, key token).
        before: (query token, token before the key); layer 1 alone can have it.
        places: By key's place less query's, from -(P - 1) to P - 1.
    """

    tokens: Floats
    before: Floats
    places: Floats

    def of(self, ids: Sequence[int], causal: bool) -> Floats:
        """Return the weights (query, key) that these scores make, in float64: what a model must compute."""
        numbers, n = np.asarray(ids), len(ids)
        preceding = np.concatenate([numbers[:1], numbers[:-1]])
        distance = np.arange(n) - np.arange(n)[:, None]
        scores = self.tokens[numbers][:, numbers] + self.before[numbers][:, preceding]
        scores = scores + self.places[distance + len(self.places) // 2]
        if causal:
            scores = np.where(distance > 0, -np.inf, scores)
        weights = np.exp(scores - scores.max(1, keepdims=True))
        return weights / weights.sum(1, keepdims=True)


def writer_of_the_token_before(n_tokens: int, n_places: int) -> Scores:
    """Head 0 of layer 0: the token before, from the first token itself."""
    places = np.zeros(2 * n_places - 1)
    places[n_places - 2] = 80.0
    tokens = np.zeros((n_tokens, n_tokens))
    tokens[:, 0] = 40.0
    return Scores(tokens, np.zeros((n_tokens, n_tokens)), places)


def rotary_places(places: Floats) -> tuple[Floats, Floats]:
    """Weights of cosines and sines of the distance that come near a table of places at and before the query.

    Returns:
        (2, TURNING) weights, and the table that they make.
    """
    half = len(places) // 2
    basis, inverse = _rotary_basis(half + 1)
    weights = inverse @ places[half::-1]
    made = np.zeros_like(places)
    made[half::-1] = basis @ weights
    return weights.reshape(2, TURNING), made


@cache
def _rotary_basis(n_places: int) -> tuple[Floats, Floats]:
    """Cosines and sines of each distance, (distance, 2 TURNING), and what fits them to a table by least squares."""
    angles = np.outer(np.arange(n_places), BASE ** (-2 * np.arange(TURNING) / D_ROTARY))
    basis = np.concatenate([np.cos(angles), np.sin(angles)], 1)
    return basis, np.linalg.solve(basis.T @ basis + 1e-8 * np.eye(2 * TURNING), basis.T)


def build(
    family: Family, words: Sequence[str], layers: Sequence[Sequence[Scores]], n_places: int
) -> Any:
    """Return a transformers model whose heads have these scores; head 0 of layer 0 writes the token before.

    Args:
        family: "bert", "gpt2" or "llama".
        words: The vocabulary; word 0 stands before every text.
        layers: The heads of each layer, as many in each.
        n_places: The longest text, in tokens.
    """
    return {"bert": _bert, "gpt2": _gpt2, "llama": _llama}[family](len(words), layers, n_places)


def _streams(
    n_tokens: int, n_places: int, width: int
) -> tuple[Floats, Floats, tuple[slice, slice, slice, int]]:
    """Embeddings of tokens and places, and where the blocks are: token, place, token before, constant."""
    token, place = slice(0, n_tokens), slice(n_tokens, n_tokens + n_places)
    before = slice(place.stop, place.stop + n_tokens)
    constant = before.stop
    of_tokens, of_places = np.zeros((n_tokens, width)), np.zeros((n_places, width))
    of_tokens[:, token] = np.eye(n_tokens)
    of_tokens[:, constant] = 1
    of_places[:, place] = np.eye(n_places)
    return of_tokens, of_places, (token, place, before, constant)


def _absolute(
    scores: Scores, blocks: tuple[slice, slice, slice, int], d_head: int, width: int
) -> tuple[Any, Any]:
    """Query and key projections (d_head, width) of a head where places are embedded."""
    token, place, before, _ = blocks
    n_places = place.stop - place.start
    query, key = np.zeros((d_head, width)), np.zeros((d_head, width))
    key[: before.stop, : before.stop] = np.eye(before.stop)
    distance = np.arange(n_places)[:, None] - np.arange(n_places)  # (key, query)
    query[token, token] = scores.tokens.T
    query[before, token] = scores.before.T
    query[place, place] = scores.places[distance + n_places - 1]
    return query * d_head**0.5, key


def _undo(norm: Any, state: Floats) -> None:
    """Give a LayerNorm the weights that leave a state as it is, and all others of its mean and length."""
    norm.weight.fill_(float(np.sqrt(state.var() + getattr(norm, "eps", 1e-12))))
    norm.bias.fill_(float(state.mean()))


def _zeroed(model: Any) -> Any:
    for name, weight in model.named_parameters():
        weight.fill_(1.0 if "norm" in name.lower() and name.endswith("weight") else 0.0)
    return model


def _states(of_tokens: Floats, of_places: Floats, before: slice) -> tuple[Floats, Floats]:
    """Return a state of the stream ahead of layer 0 and behind it."""
    early = of_tokens[0] + of_places[0]
    late = early.copy()
    late[before.start] = 1
    return early, late


@torch.no_grad()
def _bert(n_tokens: int, layers: Sequence[Sequence[Scores]], n_places: int) -> Any:
    from transformers import BertConfig, BertModel

    n_heads, d_head = len(layers[0]), 2 * n_tokens + n_places + 1
    width = n_heads * d_head
    model = _zeroed(
        BertModel(
            BertConfig(
                vocab_size=n_tokens,
                hidden_size=width,
                num_hidden_layers=len(layers),
                num_attention_heads=n_heads,
                intermediate_size=4,
                max_position_embeddings=n_places,
                type_vocab_size=1,
                layer_norm_eps=1e-12,
                pad_token_id=None,
            ),
            add_pooling_layer=False,
        )
    )
    of_tokens, of_places, blocks = _streams(n_tokens, n_places, width)
    token, _, before, _ = blocks
    early, late = _states(of_tokens, of_places, before)
    model.embeddings.word_embeddings.weight.copy_(torch.tensor(of_tokens))
    model.embeddings.position_embeddings.weight.copy_(torch.tensor(of_places))
    _undo(model.embeddings.LayerNorm, early)
    for number, (layer, heads) in enumerate(zip(model.encoder.layer, layers, strict=True)):
        attention = layer.attention.self
        query, key = zip(*(_absolute(scores, blocks, d_head, width) for scores in heads), strict=True)
        attention.query.weight.copy_(torch.tensor(np.concatenate(query)))
        attention.key.weight.copy_(torch.tensor(np.concatenate(key)))
        if number == 0:
            attention.value.weight[token, token] = torch.eye(n_tokens)
            layer.attention.output.dense.weight[before, token] = torch.eye(n_tokens)
        _undo(layer.attention.output.LayerNorm, late)
        _undo(layer.output.LayerNorm, late)
    return model


@torch.no_grad()
def _gpt2(n_tokens: int, layers: Sequence[Sequence[Scores]], n_places: int) -> Any:
    from transformers import GPT2Config, GPT2Model

    n_heads, d_head = len(layers[0]), 2 * n_tokens + n_places + 1
    width = n_heads * d_head
    model = _zeroed(
        GPT2Model(
            GPT2Config(
                vocab_size=n_tokens,
                n_embd=width,
                n_layer=len(layers),
                n_head=n_heads,
                n_inner=4,
                n_positions=n_places,
                layer_norm_epsilon=1e-12,
                bos_token_id=0,
                eos_token_id=0,
            )
        )
    )
    of_tokens, of_places, blocks = _streams(n_tokens, n_places, width)
    token, _, before, _ = blocks
    model.wte.weight.copy_(torch.tensor(of_tokens))
    model.wpe.weight.copy_(torch.tensor(of_places))
    states = _states(of_tokens, of_places, before)
    for number, (layer, heads) in enumerate(zip(model.h, layers, strict=True)):
        _undo(layer.ln_1, states[min(number, 1)])
        query, key = zip(*(_absolute(scores, blocks, d_head, width) for scores in heads), strict=True)
        layer.attn.c_attn.weight[:, :width] = torch.tensor(np.concatenate(query).T)
        layer.attn.c_attn.weight[:, width : 2 * width] = torch.tensor(np.concatenate(key).T)
        if number == 0:
            layer.attn.c_attn.weight[token, 2 * width : 2 * width + n_tokens] = torch.eye(n_tokens)
            layer.attn.c_proj.weight[token, before] = torch.eye(n_tokens)
    return model


@torch.no_grad()
def _llama(n_tokens: int, layers: Sequence[Sequence[Scores]], n_places: int) -> Any:
    from transformers import LlamaConfig, LlamaModel

    # In float64: sums of cosines that make one token stand out are small differences of large numbers.
    n_heads, n_kv = len(layers[0]), len(layers[0]) // 2
    width = -(-(2 * n_tokens + 1) // n_heads) * n_heads
    model = _zeroed(
        LlamaModel(
            LlamaConfig(
                vocab_size=n_tokens,
                hidden_size=width,
                num_attention_heads=n_heads,
                num_key_value_heads=n_kv,
                head_dim=D_ROTARY,
                num_hidden_layers=len(layers),
                intermediate_size=4,
                max_position_embeddings=n_places,
                rms_norm_eps=1e-12,
                rope_parameters={"rope_type": "default", "rope_theta": BASE},
                bos_token_id=0,
                eos_token_id=0,
            )
        )
    ).double()
    of_tokens, _, (token, _, before, constant) = _streams(n_tokens, 0, width)
    model.embed_tokens.weight.copy_(torch.tensor(of_tokens))
    half = D_ROTARY // 2
    # Pairs that stand still keep their two columns apart: both blocks lie in them, one after the other.
    still = np.concatenate([np.arange(STILL, half), half + np.arange(STILL, half)])
    rows_token, rows_before = still[:n_tokens], still[n_tokens : 2 * n_tokens]
    turning = np.arange(TURNING)
    key = np.zeros((D_ROTARY, width))
    key[rows_token, np.arange(n_tokens)] = 1
    key[rows_before, before.start + np.arange(n_tokens)] = 1
    key[turning, constant] = 1
    for number, (layer, heads) in enumerate(zip(model.layers, layers, strict=True)):
        attention = layer.self_attn
        layer.input_layernorm.weight.fill_(float(np.sqrt((3 if number else 2) / width)))
        attention.k_proj.weight.copy_(torch.tensor(np.tile(key, (n_kv, 1))))
        for head, scores in enumerate(heads):
            query = np.zeros((D_ROTARY, width))
            query[np.ix_(rows_token, range(n_tokens))] = scores.tokens.T
            query[np.ix_(rows_before, range(n_tokens))] = scores.before.T
            # The key's pair (1, 0), d tokens before the query, gives the query's first column cos and its second -sin.
            cosines, sines = rotary_places(scores.places)[0]
            query[turning, constant], query[half + turning, constant] = cosines, -sines
            attention.q_proj.weight[head * D_ROTARY : (head + 1) * D_ROTARY] = torch.tensor(
                query * D_ROTARY**0.5
            )
        if number == 0:
            attention.v_proj.weight[:n_tokens, token] = torch.eye(n_tokens, dtype=torch.float64)
            attention.o_proj.weight[before, :n_tokens] = torch.eye(n_tokens, dtype=torch.float64)
    return model
