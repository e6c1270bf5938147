"""A small decoder to train, with every part in plain sight.

    network = decoder(40, n_layers=2, n_heads=4)    # the words "0" to "39"
    logits = network(ids)                           # (batch, token) -> (batch, token, 40)
    model = wrap(network)                           # a copy as it is now: attnscope.heads(model, texts)
    network.save("run/checkpoint-100")              # for every command: -m run/checkpoint-100

A residual stream on which attention reads and writes, and feed-forward networks if they are asked for. Without them it
is the attention-only transformer of Elhage et al. 2021. The files that `save` writes are those of a GPT-NeoX, which
transformers and attnscope load; `wrap` shows how attnscope takes a network that it does not know.
"""

import copy
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import tokenizers
import torch
from tokenizers import models as tokenizer_models
from tokenizers import pre_tokenizers
from torch import Tensor, nn

from attnscope.core.attention.multihead import MultiHeadAttention
from attnscope.core.attention.seam import Probe
from attnscope.models.devices import name_dtype
from attnscope.models.info import ModelInfo
from attnscope.models.model import Batch, Outputs
from attnscope.models.own.layered import LayeredModel
from attnscope.models.tokenizer import FastTokenizer

Positions = Literal["rotary", "learned", "none"]
ROTARY_BASE = 10_000.0
LONGEST = 4096
"""The longest text of a saved decoder that has no limit of its own."""


class Decoder(nn.Module):
    """Token numbers in, scores of the next token out. `decoder` makes one.

        stream = embedding (+ learned position)
        stream = stream + Attention(norm(stream)), (+ FeedForward(norm(stream)))     each layer
        logits = norm(stream) W_Uᵀ

    Attention looks back only and has no biases; the feed-forward network is GELU's, with biases.
    """

    def __init__(
        self,
        words: Sequence[str],
        n_layers: int,
        n_heads: int,
        d_model: int,
        d_ff: int,
        positions: Positions,
        *,
        norm: bool,
        max_tokens: int | None,
    ) -> None:
        super().__init__()
        self.words = tuple(words)
        self.n_heads, self.d_model, self.d_ff = n_heads, d_model, d_ff
        self.positions, self.has_norms, self.max_tokens = positions, norm, max_tokens
        self.embed = nn.Embedding(len(words), d_model)
        self.position = None
        if positions == "learned":
            if max_tokens is None:
                raise ValueError("learned positions need max_tokens, the longest text")
            self.position = nn.Embedding(max_tokens, d_model)
        self.layers = nn.ModuleList(
            Layer(number, n_heads, d_model, d_ff, norm) for number in range(n_layers)
        )
        self.norm = nn.LayerNorm(d_model) if norm else nn.Identity()
        self.unembed = nn.Linear(d_model, len(words), bias=False)

    def forward(self, ids: Tensor, mask: Tensor | None = None, probe: Probe | None = None) -> Tensor:
        """Return scores of the next token at each token, (batch, token, vocabulary), before softmax.

        Args:
            ids: Token numbers, (batch, token).
            mask: (batch, token), True = a real token; padding stands behind the text. None = nothing is padded.
            probe: What happens at the seam instead of plain attention.
        """
        scores: Tensor = self.unembed(self.hidden(ids, mask, probe))
        return scores

    def hidden(self, ids: Tensor, mask: Tensor | None = None, probe: Probe | None = None) -> Tensor:
        """Return what is unembedded: the residual stream after all layers, normed, (batch, token, d_model)."""
        stream: Tensor = self.embed(ids)
        if self.position is not None:
            stream = stream + self.position(torch.arange(ids.shape[1], device=ids.device))
        turn = None
        if self.positions == "rotary":
            cos, sin = rotary_table(ids.shape[1], self.d_model // self.n_heads, stream)
            turn = partial(apply_rotary, cos=cos, sin=sin)
        for layer in self.layers:
            stream = layer(stream, mask, probe, turn)
        normed: Tensor = self.norm(stream)
        return normed

    def draw(self, seed: int) -> "Decoder":
        """Draw all weights anew: normal, embeddings of sigma 1 / 2, maps of 1 / sqrt(their inputs). Return itself."""
        chance = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, weight in self.named_parameters():
                if weight.ndim == 1:
                    weight.fill_(1.0 if "norm" in name and name.endswith("weight") else 0.0)
                else:
                    sigma = (
                        0.5
                        if name in ("embed.weight", "position.weight")
                        else 1 / math.sqrt(weight.shape[1])
                    )
                    weight.copy_(torch.randn(weight.shape, generator=chance) * sigma)
        return self

    def save(self, folder: str | Path) -> Path:
        """Write it as the files of a GPT-NeoX, which has the same parts if positions are rotary and there are norms."""
        from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, PreTrainedTokenizerFast

        if self.positions != "rotary" or not self.has_norms:
            raise ValueError("a GPT-NeoX has rotary positions and norms: take wrap(network)")
        config = GPTNeoXConfig(
            vocab_size=len(self.words),
            hidden_size=self.d_model,
            num_hidden_layers=len(self.layers),
            num_attention_heads=self.n_heads,
            intermediate_size=max(self.d_ff, 1),
            hidden_act="gelu",
            rope_parameters={
                "rope_type": "default",
                "rope_theta": ROTARY_BASE,
                "partial_rotary_factor": 1.0,
            },
            max_position_embeddings=self.max_tokens or LONGEST,
            use_parallel_residual=False,
            attention_bias=False,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=None,
        )
        network = GPTNeoXForCausalLM(config)
        state = {
            "gpt_neox.embed_in": self.embed,
            "gpt_neox.final_layer_norm": self.norm,
            "lm_head": self.unembed,
        }
        with torch.no_grad():
            for number, layer in enumerate(self.layers):
                there = network.gpt_neox.layers[number]
                attention = layer.attention
                parts = [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]
                # (head, d_head, d_model).
                of_heads = [part.unflatten(0, (self.n_heads, -1)) for part in parts]
                there.attention.query_key_value.weight.copy_(torch.cat(of_heads, 1).flatten(0, 1))
                state[f"gpt_neox.layers.{number}.attention.dense"] = attention.out_proj
                state[f"gpt_neox.layers.{number}.input_layernorm"] = layer.attention_norm
                if self.d_ff:
                    state[f"gpt_neox.layers.{number}.post_attention_layernorm"] = layer.norm
                    state[f"gpt_neox.layers.{number}.mlp.dense_h_to_4h"] = layer.up
                    state[f"gpt_neox.layers.{number}.mlp.dense_4h_to_h"] = layer.down
                else:  # a network of one hidden number that writes nothing
                    for weight in there.mlp.parameters():
                        weight.zero_()
            for name, module in state.items():
                network.get_submodule(name).load_state_dict(module.state_dict())
        network.save_pretrained(folder)
        PreTrainedTokenizerFast(tokenizer_object=words_apart(self.words)).save_pretrained(folder)
        return Path(folder)


def decoder(
    vocabulary: int | Sequence[str],
    *,
    n_layers: int = 2,
    n_heads: int = 4,
    d_model: int = 64,
    d_ff: int = 0,
    positions: Positions = "rotary",
    norm: bool = True,
    max_tokens: int | None = None,
    seed: int = 0,
) -> Decoder:
    """Make a decoder to be trained, an ordinary torch module.

    Args:
        vocabulary: Its words, without blanks; a number n stands for the words "0" to n - 1. Texts are words with blanks
            between.
        n_layers: Layers.
        n_heads: Heads of each.
        d_model: Width of the residual stream, a multiple of n_heads.
        d_ff: Width within the feed-forward networks; 0 = attention only.
        positions: "rotary" (Su et al. 2021, base 10,000), "learned" or "none".
        norm: Whether there are LayerNorms: before attention, feed-forward network and unembedding.
        max_tokens: The longest text; None = no limit. Learned positions need one.
        seed: Of the weights it begins with. torch's own random numbers are not drawn.
    """
    words = (
        [str(number) for number in range(vocabulary)]
        if isinstance(vocabulary, int)
        else list(vocabulary)
    )
    with torch.device("meta"):
        network = Decoder(
            words, n_layers, n_heads, d_model, d_ff, positions, norm=norm, max_tokens=max_tokens
        )
    return network.to_empty(device="cpu").draw(seed)


class Layer(nn.Module):
    """Attention, then perhaps a feed-forward network; each reads the stream normed, and adds to it."""

    def __init__(self, number: int, n_heads: int, d_model: int, d_ff: int, norm: bool) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(d_model) if norm else nn.Identity()
        self.attention = MultiHeadAttention(d_model, n_heads, bias=False, layer=number, kind="decoder")
        self.up = self.down = None
        if d_ff:
            self.norm = nn.LayerNorm(d_model) if norm else nn.Identity()
            self.up, self.down = nn.Linear(d_model, d_ff), nn.Linear(d_ff, d_model)

    def forward(self, stream: Tensor, mask: Tensor | None, probe: Probe | None, turn: Any) -> Tensor:
        """Return the stream with what attention and feed-forward network add to it."""
        read = self.attention_norm(stream)
        written, _ = self.attention(read, key_padding_mask=mask, is_causal=True, probe=probe, turn=turn)
        stream = stream + written
        if self.up is not None and self.down is not None:
            stream = stream + self.down(nn.functional.gelu(self.up(self.norm(stream))))
        return stream


def rotary_table(n_tokens: int, d_head: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of all places, (token, d_head), in float64 up to the last step."""
    speeds = ROTARY_BASE ** (-torch.arange(0, d_head, 2, dtype=torch.float64) / d_head)
    angles = torch.outer(torch.arange(n_tokens, dtype=torch.float64), speeds).repeat(1, 2)
    return angles.cos().to(like), angles.sin().to(like)


def apply_rotary(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Turn queries and keys, (batch, head, token, d_head), by their places: column i with column i + d_head / 2."""

    def rotate(rows: Tensor) -> Tensor:
        first, second = rows.chunk(2, dim=-1)
        return rows * cos + torch.cat((-second, first), -1) * sin

    return rotate(query), rotate(key)


def words_apart(words: Sequence[str]) -> tokenizers.Tokenizer:
    """Return the tokenizer of words with blanks between them, each a token; it knows no others."""
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = tokenizers.Tokenizer(tokenizer_models.WordLevel(vocabulary, unk_token="[no such word]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


class DecoderModel(LayeredModel):
    """A decoder as attnscope's functions take it: what `attnscope.models.model.Model` asks for."""

    loss = "causal"

    def __init__(self, info: ModelInfo, network: Decoder) -> None:
        tokenizer = FastTokenizer(words_apart(network.words), "words")
        super().__init__(info, tokenizer, network, network.state_dict(), len(network.words))
        self.network = network

    def run(self, batch: Batch, probe: Probe) -> Tensor:
        """Return the last hidden states; padding stands behind texts."""
        batch = self._prepare(batch)
        with self._forward_pass():
            return self.network.hidden(batch.ids, batch.mask, probe)

    def outputs(
        self, batch: Batch, probe: Probe, *, logits: bool = True, last: int | None = None
    ) -> Outputs:
        """Return the hidden states, with the scores of the next token if they are asked for."""
        hidden = self.run(batch, probe)
        predicting = hidden if last is None else hidden[:, -last:]
        with self._forward_pass():
            return Outputs(hidden, self.network.unembed(predicting) if logits else None)

    def unembedding(self) -> nn.Module:
        """Return the map that the scores come from."""
        return self.network.unembed

    def static_embeddings(self, ids: Tensor) -> Tensor:
        """Return the rows of the token embedding."""
        with torch.no_grad():
            rows: Tensor = self.network.embed(ids.to(self.info.device))
        return rows

    def untrained(self, seed: int) -> "DecoderModel":
        """Return the same architecture with the weights that training begins with."""
        twin = super().untrained(seed)
        twin.network.draw(seed)
        return twin


def wrap(network: Decoder) -> DecoderModel:
    """Return a copy of a decoder, as it is now, as a model for attnscope."""
    weight = network.embed.weight
    n_heads = network.n_heads
    info = ModelInfo(
        name="decoder",
        source="memory",
        sha256="",
        architecture="decoder",
        kinds=("decoder",),
        n_layers=(len(network.layers),),
        n_heads=(n_heads,),
        n_kv_heads=(n_heads,),
        d_model=network.d_model,
        n_parameters=sum(parameter.numel() for parameter in network.parameters()),
        max_tokens=network.max_tokens,
        dtype=name_dtype(weight.dtype),
        device=str(weight.device),
    )
    return DecoderModel(info, copy.deepcopy(network).eval().requires_grad_(False))
