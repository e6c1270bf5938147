"""attnscope's own decoder: a small transformer to be trained, whose every part is in plain sight.

A residual stream on which `core.multihead.MultiHeadAttention` reads and writes, and feed-forward networks if they are
asked for; without them it is the attention-only transformer of Elhage et al. 2021. It is an ordinary torch module:
train it as any other, save it, and load it as a model whose heads are measured.
"""

import copy
import json
import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save as to_safetensors
from torch import Tensor, nn

from attnscope.core.attention.multihead import MultiHeadAttention
from attnscope.core.attention.probes import Place
from attnscope.core.attention.seam import Probe
from attnscope.models.bare import LayeredModel
from attnscope.models.catalog import Source, read_config, verify
from attnscope.models.devices import name_dtype, place
from attnscope.models.files import weight_files
from attnscope.models.info import ModelInfo
from attnscope.models.model import Batch, Outputs, Slice
from attnscope.models.own.checkpoint import Checkpoint
from attnscope.models.own.decoder_config import ROTARY_BASE, DecoderConfig, Positions, WordTokenizer, word_tokenizer
from attnscope.models.own.native import read_weights
from attnscope.records.frame.file_sets import replace_together
from attnscope.records.frame.storage import write_whole


class OwnDecoder(nn.Module):
    """A decoder to be trained: token numbers in, scores of the next token out. `own_decoder` makes one.

        stream = embedding (+ learned position)
        stream = stream + Attention(norm(stream)), (+ FeedForward(norm(stream)))     each layer
        logits = norm(stream) W_Uᵀ

    Attention looks back only and has no biases; the feed-forward network is GELU's, with biases.
    """

    def __init__(self, config: DecoderConfig, tokenizer: WordTokenizer) -> None:
        super().__init__()
        self.config, self.tokenizer = config, tokenizer
        width = config.d_model
        self.embed = nn.Embedding(config.vocab_size, width, _weight=torch.empty(config.vocab_size, width))
        self.position = None
        if config.positions == "learned" and config.max_tokens is not None:
            self.position = nn.Embedding(config.max_tokens, width, _weight=torch.empty(config.max_tokens, width))
        self.layers = nn.ModuleList(_Layer(config, number) for number in range(config.n_layers))
        self.norm = _norm(config)
        self.unembed = nn.Linear(width, config.vocab_size, bias=False)

    def forward(self, ids: Tensor, mask: Tensor | None = None, probe: Probe | None = None) -> Tensor:
        """Scores of the next token at each token.

        Args:
            ids: Token numbers, (batch, token).
            mask: (batch, token), True = a real token; padding stands behind the text. None = nothing is padded.
            probe: What happens at the seam instead of plain attention.

        Returns:
            (batch, token, vocabulary), before softmax.
        """
        scores: Tensor = self.unembed(self.hidden(ids, mask, probe))
        return scores

    def hidden(self, ids: Tensor, mask: Tensor | None = None, probe: Probe | None = None) -> Tensor:
        """What is unembedded: the residual stream after all layers, normed, (batch, token, d_model)."""
        stream: Tensor = self.embed(ids)
        if self.position is not None:
            stream = stream + self.position(torch.arange(ids.shape[1], device=ids.device))
        turn = None
        if self.config.positions == "rotary":
            turn = partial(_turn, *_rotary_table(ids.shape[1], self.config.d_model // self.config.n_heads, stream))
        for layer in self.layers:
            stream = layer(stream, mask, probe, turn)
        normed: Tensor = self.norm(stream)
        return normed

    def save(self, folder: str | Path) -> Path:
        """Writes the folder that `attnscope.load` takes: model.safetensors, tokenizer.json, config.json.

        Raises:
            AttnscopeError: It cannot be written.
        """
        folder = Path(folder)
        state = {name: tensor.detach().contiguous().cpu() for name, tensor in self.state_dict().items()}
        with replace_together(folder) as staged:
            write_whole(staged / "model.safetensors", to_safetensors(state, metadata={"format": "pt"}))
            write_whole(staged / "tokenizer.json", self.tokenizer.backend.to_str(pretty=True).encode())
            write_whole(staged / "config.json", json.dumps(self.config.as_json(), indent=2).encode())
        return folder

    def draw(self, seed: int) -> "OwnDecoder":
        """Draws all weights anew: normal, embeddings of sigma 1 / 2, maps of 1 / sqrt(their inputs). Returns itself."""
        chance = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, weight in self.named_parameters():
                if weight.ndim == 1:
                    weight.fill_(1.0 if "norm" in name and name.endswith("weight") else 0.0)
                else:
                    sigma = 0.5 if name in ("embed.weight", "position.weight") else 1 / math.sqrt(weight.shape[1])
                    weight.copy_(torch.randn(weight.shape, generator=chance) * sigma)
        return self


def own_decoder(
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
) -> OwnDecoder:
    """Makes a decoder to be trained, an ordinary torch module.

        network = attnscope.own_decoder(40, n_layers=2, n_heads=4)
        logits = network(ids)                    # (batch, token) -> (batch, token, 40)
        network.save("run/checkpoint-100")
        model = attnscope.load("run/checkpoint-100")

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

    Raises:
        AttnscopeError: A number makes no sense, or a word is there twice.
    """
    words = [str(number) for number in range(vocabulary)] if isinstance(vocabulary, int) else list(vocabulary)
    tokenizer = word_tokenizer(words)
    config = DecoderConfig(len(words), n_layers, n_heads, d_model, d_ff, positions, norm, max_tokens)
    with torch.device("meta"):
        network = OwnDecoder(config, tokenizer)
    return network.to_empty(device="cpu").draw(seed)


class _Layer(nn.Module):
    """Attention, then perhaps a feed-forward network; each reads the stream normed, and adds to it."""

    def __init__(self, config: DecoderConfig, number: int) -> None:
        super().__init__()
        self.attention_norm = _norm(config)
        self.attention = MultiHeadAttention(config.d_model, config.n_heads, bias=False, layer=number, kind="decoder")
        self.up = self.down = None
        if config.d_ff:
            self.norm = _norm(config)
            self.up, self.down = nn.Linear(config.d_model, config.d_ff), nn.Linear(config.d_ff, config.d_model)

    def forward(
        self, stream: Tensor, mask: Tensor | None, probe: Probe | None, turn: "partial[tuple[Tensor, Tensor]] | None"
    ) -> Tensor:
        read = self.attention_norm(stream)
        written, _ = self.attention(read, key_padding_mask=mask, is_causal=True, probe=probe, turn=turn)
        stream = stream + written
        if self.up is not None and self.down is not None:
            stream = stream + self.down(nn.functional.gelu(self.up(self.norm(stream))))
        return stream


def _norm(config: DecoderConfig) -> nn.Module:
    return nn.LayerNorm(config.d_model) if config.norm else nn.Identity()


def _rotary_table(n_tokens: int, d_head: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of all places, (token, d_head), in float64 up to the last step."""
    speeds = ROTARY_BASE ** (-torch.arange(0, d_head, 2, dtype=torch.float64) / d_head)
    angles = torch.outer(torch.arange(n_tokens, dtype=torch.float64), speeds).repeat(1, 2)
    return angles.cos().to(like), angles.sin().to(like)


def _turn(cos: Tensor, sin: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    # By its name in this file, where `attnscope trace` watches it.
    return apply_rotary(query, key, cos, sin)


def apply_rotary(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Turns queries and keys, (batch, head, token, d_head), by their places: column i with column i + d_head / 2.

    Source:
        Su et al. 2021, section 3.4; pairs as in GPT-NeoX and Llama.
    """

    def rotate(rows: Tensor) -> Tensor:
        first, second = rows.chunk(2, dim=-1)
        return rows * cos + torch.cat((-second, first), -1) * sin

    return rotate(query), rotate(key)


class DecoderModel(LayeredModel):
    """A loaded decoder; see models.model.Model."""

    loss = "causal"

    def __init__(self, info: ModelInfo, network: OwnDecoder) -> None:
        layers, n_words = list(network.layers), network.config.vocab_size
        super().__init__(info, network.tokenizer, [network], layers, "attention.out_proj.weight", n_words)
        self.network = network

    def run(self, batch: Batch, probe: Probe) -> Tensor:
        """See models.model.Model; padding stands behind texts."""
        batch = self._require(batch)
        with self._forward_pass():
            return self.network.hidden(batch.ids, batch.mask, probe)

    def outputs(self, batch: Batch, probe: Probe, *, logits: bool = True, last: int | None = None) -> Outputs:
        """As `run`, with the scores of the next token if they are asked for."""
        hidden = self.run(batch, probe)
        predicting = hidden if last is None else hidden[:, -last:]
        with self._forward_pass():
            return Outputs(hidden, self.network.unembed(predicting) if logits else None)

    def head_slices(self, heads: Mapping[Place, Sequence[int]]) -> list[Slice]:  # type: ignore[override]  # others: None
        """The heads' rows of W_Q, W_K and W_V, and their columns of W_O."""
        width = self.info.d_model // self.network.config.n_heads
        slices = []
        for (_, layer), numbers in heads.items():
            mine = tuple(head * width + row for head in numbers for row in range(width))
            for role, part in {"query": "q", "key": "k", "value": "v", "output": "out"}.items():
                name = f"layers.{layer}.attention.{part}_proj.weight"
                slices.append(Slice(name, int(part == "out"), mine, role, self.network.get_parameter(name)))
        return slices

    def unembedding(self) -> nn.Module:
        """The map that the scores come from."""
        return self.network.unembed

    def static_embeddings(self, ids: Tensor) -> Tensor:
        """The rows of the token embedding."""
        return self._look_up(self.network.embed, ids)

    def untrained(self, seed: int) -> "DecoderModel":
        """The same architecture with the weights that training begins with."""
        info = self._untrained_info(f"random weights, seed {seed}", source="random")
        return DecoderModel(info, copy.deepcopy(self.network).draw(seed))


def load_decoder(source: Source, *, device: str = "cpu", dtype: str = "float32") -> DecoderModel:
    """Loads a decoder that `OwnDecoder.save` wrote; device and precision as of `models.load`."""
    folder = source.folder
    assert folder is not None  # it holds what `OwnDecoder.save` wrote
    config = DecoderConfig.of(read_config(source), source.name)
    where, precision = place(device, dtype)
    tokenizer = WordTokenizer.open(folder)
    with ExitStack() as stack:
        state = dict(read_weights(Checkpoint(weight_files(folder), None, stack), config, precision, where))
    with torch.device("meta"):
        network = OwnDecoder(config, tokenizer)
    network.load_state_dict(state, assign=True)
    info = config.info(source.name, source.origin, verify(source), dtype=dtype, device=str(where))
    return DecoderModel(info, network.eval().requires_grad_(False))


def wrap_decoder(network: OwnDecoder) -> DecoderModel:
    """A decoder in memory as a model: a copy of it as it is now."""
    weight = network.embed.weight
    info = network.config.info(
        "own decoder", "in memory", "", dtype=name_dtype(weight.dtype), device=str(weight.device)
    )
    return DecoderModel(info, copy.deepcopy(network).eval().requires_grad_(False))
