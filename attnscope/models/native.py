"""The native engine: the project's own post-norm encoder on core.multihead, fed with BERT-family safetensors.

Knows no transformers. Which families it reads, and what they call their tensors, stands in layouts.py.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import cast

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from attnscope.core.attention import Probe
from attnscope.core.multihead import MultiHeadAttention
from attnscope.errors import AttnscopeError
from attnscope.models.catalog import Source, read_config, verify, weight_files
from attnscope.models.checkpoint import Checkpoint
from attnscope.models.devices import place
from attnscope.models.layouts import Encoder, native_info, supports
from attnscope.models.model import Batch, ModelInfo, Tokenizer
from attnscope.models.rerun import Outputs, Rerun
from attnscope.models.tokenizer import FastTokenizer

__all__ = ["NativeModel", "load_native", "supports"]

_tanh_gelu = partial(F.gelu, approximate="tanh")
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": _tanh_gelu,
    "gelu_pytorch_tanh": _tanh_gelu,
    "relu": F.relu,
    "silu": F.silu,
    "swish": F.silu,
}


class NativeModel:
    """A loaded encoder; see models.model.Model.

    Args:
        info: What is known of it.
        tokenizer: Its tokenizer.
        encoder: Its settings.
        network: Its weights.
    """

    def __init__(self, info: ModelInfo, tokenizer: FastTokenizer, encoder: Encoder, network: "_Network") -> None:
        self.info = info
        self.tokenizer: Tokenizer = tokenizer
        self._encoder = encoder
        self._network = network

    def run(self, batch: Batch, probe: Probe) -> Tensor:
        """Runs a batch with the probe at the seam of every attention.

        Padding is never attended to. No gradient is kept for weights; through a probe's own numbers they flow.

        Args:
            batch: Token numbers. Segments are passed over where the family's models know none (DistilBERT, RoBERTa).
            probe: What happens at the seam.

        Returns:
            The last hidden states, (batch, token, d_model); those of padding mean nothing.

        Raises:
            AttnscopeError: The batch is longer than the model's limit, or holds numbers that it has no embedding for.
        """
        device = torch.device(self.info.device)
        ids = batch.ids.to(device)
        mask = None if batch.mask is None else batch.mask.to(device)
        if mask is not None and bool(mask.all()):
            mask = None
        segments = None
        if self._encoder.layout.reads_segments and batch.segments is not None:
            segments = batch.segments.to(device)
        self._check(ids, segments)
        output: Tensor = self._network(ids, mask, segments, probe)
        return output

    def modules(self) -> list[nn.Module]:
        """The network."""
        return [self._network]

    loss = None
    resumes = True

    def outputs(self, batch: Batch, probe: Probe, *, logits: bool = True) -> Outputs:
        """As `run`; there is no language-model head, so there are no logits."""
        return Outputs(self.run(batch, probe))

    def rerun(self, batch: Batch, *, logits: bool = True) -> Rerun:
        """Runs a batch, and keeps what is needed to run it again from a layer on."""
        return Rerun(
            lambda given, probe, block_of, first: self.outputs(given, probe), batch, list(self._network.layers)
        )

    def static_embeddings(self, ids: Tensor) -> Tensor:
        """The rows of the token embedding, whatever the place: (batch, token) numbers -> (batch, token, d)."""
        found: Tensor = self._network.word(ids)
        return found

    def blocks(self) -> dict[tuple[str, int], nn.Module]:
        """The layers, by (kind, layer)."""
        return {("encoder", number): layer for number, layer in enumerate(self._network.layers)}

    def output_projections(self) -> dict[tuple[str, int], Tensor]:
        """W_O by (kind, layer), each (d_model, d_model)."""
        return {("encoder", number): weight for number, weight in enumerate(self._network.output_weights())}

    def untrained(self, seed: int) -> "NativeModel":
        """The same architecture with random weights, drawn as BERT draws them before training (sigma 0.02)."""
        network = copy.deepcopy(self._network)
        chance = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, weight in network.named_parameters():
                if weight.ndim > 1:
                    weight.copy_(torch.randn(weight.shape, generator=chance) * 0.02)
                else:
                    weight.fill_(1.0 if "norm" in name and name.endswith("weight") else 0.0)
        info = replace(
            self.info, name=f"{self.info.name} untrained", sha256="", notes=(f"random weights, seed {seed}",)
        )
        return NativeModel(info, cast(FastTokenizer, self.tokenizer), self._encoder, network)

    def _check(self, ids: Tensor, segments: Tensor | None) -> None:
        if ids.shape[1] > self._encoder.max_tokens:
            raise AttnscopeError(
                f"a text of {ids.shape[1]} tokens is longer than the {self._encoder.max_tokens} that "
                f"{self.info.name} takes",
                "give a shorter text",
            )
        for what, numbers, size in (
            ("token", ids, self._encoder.vocab_size),
            ("segment", segments, self._encoder.type_vocab_size),
        ):
            if numbers is not None and numbers.numel() and not 0 <= int(numbers.min()) <= int(numbers.max()) < size:
                raise AttnscopeError(
                    f"{what} number {int(numbers.max())} is beyond the {size} that {self.info.name} has",
                    "its tokenizer belongs to another model",
                )


def load_native(source: Source, *, device: str = "cpu", dtype: str = "float32") -> NativeModel:
    """Loads a BERT-family encoder from safetensors.

    Args:
        source: Where its files lie.
        device: Where it is to run, as torch names it; "auto" = the first there is of cuda, mps and cpu.
        dtype: Precision to compute with: "float32", "float64", "bfloat16" or "float16".

    Raises:
        AttnscopeError: The model is not one that the engine runs; files are missing or damaged; the weights are not the
            pinned ones, do not fit the configuration, or hold NaN; the device or precision does not exist.
    """
    config = read_config(source)
    reason = supports(config)
    if reason or source.folder is None:
        raise AttnscopeError(
            f"the native engine does not run {source.name}: {reason or 'it has no files'}", "use --engine hf"
        )
    where, precision = place(device, dtype)
    tokenizer = FastTokenizer.open(source.folder)
    sha256 = verify(source)
    encoder = Encoder.of(config)
    info = native_info(source, config, sha256=sha256, dtype=dtype, device=str(where))
    with ExitStack() as stack:
        weights = Checkpoint(weight_files(source.folder), encoder.layout, stack)
        if weights.has_layer(encoder.num_hidden_layers):
            note = f"The file holds more layers than the {encoder.num_hidden_layers} that config.json asks for."
            info = replace(info, notes=(note,))
        state = dict(_read(weights, encoder, precision, where))
    with torch.device("meta"):
        network = _Network(encoder)
    network.load_state_dict(state, assign=True)
    network.eval().requires_grad_(False)
    return NativeModel(info, tokenizer, encoder, network)


def _read(
    checkpoint: Checkpoint, encoder: Encoder, dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """Yields every tensor that the encoder needs by our name."""
    for ours, name, raw in checkpoint.raw(encoder):
        tensor: Tensor = raw
        if not tensor.is_floating_point():
            raise AttnscopeError(f"{checkpoint.where}: {name} is of type {tensor.dtype}", "the weights are quantised")
        tensor = tensor.to(dtype)
        # One sum tells: NaN or infinity anywhere never leaves it finite. Wide, for half precision overflows; by NumPy,
        # for waking torch's threads a hundred times takes up to ten times as long on a busy machine.
        wide = tensor if dtype.itemsize >= 4 else tensor.float()
        with np.errstate(all="ignore"):
            total = wide.numpy().sum()
        if not np.isfinite(total):
            raise AttnscopeError(
                f"{checkpoint.where}: {name} holds NaN or infinite values as {str(dtype).removeprefix('torch.')}",
                "the weights are damaged, or too large for this precision",
            )
        yield ours, tensor.to(device)


class _Network(nn.Module):
    """Embeddings and layers; parameter names are those of Encoder.tensors."""

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        width, embedding, eps = encoder.hidden_size, encoder.embedding_size, encoder.layer_norm_eps
        self.word = _embedding(encoder.vocab_size, embedding)
        self.position = _embedding(encoder.max_position_embeddings, embedding)
        self.segment = _embedding(encoder.type_vocab_size, embedding) if encoder.layout.segment else None
        self.embedding_norm = nn.LayerNorm(embedding, eps)
        self.projection = nn.Linear(embedding, width) if embedding != width else None
        self.layers = nn.ModuleList(_Layer(encoder, i) for i in range(encoder.num_hidden_layers))
        self._padding_id = encoder.pad_token_id if encoder.layout.positions_after_padding else None

    def forward(self, ids: Tensor, mask: Tensor | None, segments: Tensor | None, probe: Probe) -> Tensor:
        hidden: Tensor = self.word(ids)
        # In this order, for the sum to round as the original's does.
        if self.segment is not None:
            hidden = hidden + (self.segment.weight[0] if segments is None else self.segment(segments))
        hidden = self.embedding_norm(hidden + self.position(self._positions(ids)))
        if self.projection is not None:
            hidden = self.projection(hidden)
        for layer in self.layers:
            hidden = layer(hidden, mask, probe)
        return hidden

    def output_weights(self) -> list[Tensor]:
        """W_O of each layer."""
        return [cast(Tensor, layer.attention.out_proj.weight) for layer in cast(list[_Layer], self.layers)]

    def _positions(self, ids: Tensor) -> Tensor:
        if self._padding_id is None:
            return torch.arange(ids.shape[1], device=ids.device)
        real = ids != self._padding_id
        return real.cumsum(1) * real + self._padding_id


def _embedding(size: int, width: int) -> nn.Embedding:
    # nn.Embedding() would draw normal numbers; on the meta device that alone imports sympy, for a second.
    return nn.Embedding(size, width, _weight=torch.empty(size, width))


class _Layer(nn.Module):
    """Attention, then a feed-forward network, each added to what came in and normalised after."""

    def __init__(self, encoder: Encoder, number: int) -> None:
        super().__init__()
        width, inner = encoder.hidden_size, encoder.intermediate_size
        self.attention = MultiHeadAttention(width, encoder.num_attention_heads, layer=number)
        self.attention_norm = nn.LayerNorm(width, encoder.layer_norm_eps)
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)
        self.norm = nn.LayerNorm(width, encoder.layer_norm_eps)
        self._activation = _ACTIVATIONS[encoder.hidden_act]

    def forward(self, hidden: Tensor, mask: Tensor | None, probe: Probe) -> Tensor:
        attended, _ = self.attention(hidden, key_padding_mask=mask, probe=probe)
        hidden = self.attention_norm(hidden + attended)
        output: Tensor = self.norm(hidden + self.down(self._activation(self.up(hidden))))
        return output
