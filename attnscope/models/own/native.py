"""The native engine: attnscope's own post-norm encoder in torch, with the weights of BERT-family safetensors.

The engine does not use transformers. `own.layouts` knows which families it can run, and the names of their tensors.

A *probe* is a hook that computes the attention of each layer. It gets an `AttentionCall`, which holds queries, keys and
values, and returns the outputs of the heads.
"""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from attnscope.core.attention.multihead import MultiHeadAttention
from attnscope.core.attention.seam import Probe
from attnscope.models.catalog import Source, read_config, verify_sha256
from attnscope.models.devices import choose_device
from attnscope.models.info import require_known_ids
from attnscope.models.model import Batch
from attnscope.models.own.layered import LayeredModel
from attnscope.models.own.layouts import Checkpoint, EncoderSettings, describe_native
from attnscope.models.tokenizer import FastTokenizer


class NativeModel(LayeredModel):
    """A BERT-family encoder as a Model, which runs on torch."""

    _network: "_Network"

    def run(self, batch: Batch, probe: Probe) -> Tensor:
        """Run a batch; the probe computes each attention. RoBERTa has no segments, and ignores the batch's segments."""
        batch = self._prepare(batch)
        encoder = self._network.encoder
        segments = None if encoder.is_roberta else batch.segments
        if segments is not None:
            require_known_ids(self.info, segments, encoder.type_vocab_size, "segment")
        with self._forward_pass():
            output: Tensor = self._network(batch.ids, batch.mask, segments, probe)
        return output

    def static_embeddings(self, ids: Tensor) -> Tensor:
        """Return rows of the token embedding: ids, (…) -> (…, d_model)."""
        require_known_ids(self.info, ids, self._vocab_size)
        with torch.no_grad():
            rows: Tensor = self._network.word(ids.to(self.info.device))
        return rows


def load_native(source: Source, *, device: str = "cpu", dtype: str = "float32") -> NativeModel:
    """Load an encoder. The caller has checked that `why_unsupported` returns None for it.

    `models.load` explains device and dtype.
    """
    config = read_config(source)
    target, precision = choose_device(device, dtype)
    tokenizer = FastTokenizer.open(source.files_folder)
    # `verify_sha256` returns the hash of the weights, or raises AttnscopeError if it is not the pinned hash.
    info = describe_native(source, config, sha256=verify_sha256(source), dtype=dtype, device=str(target))
    encoder = EncoderSettings.from_config(config)
    tensors = Checkpoint(source.files_folder, encoder).tensors(lambda tensor: tensor.to(precision))
    state = {name: tensor.to(target) for name, tensor in tensors}
    # On the meta device, weights are neither allocated nor initialised.
    with torch.device("meta"):
        network = _Network(encoder)
    return NativeModel(info, tokenizer, network, state, encoder.vocab_size)


class _Network(nn.Module):
    """Embeddings and layers. Its parameters have the names that `EncoderSettings.tensor_specs` lists as keys."""

    def __init__(self, encoder: EncoderSettings) -> None:
        super().__init__()
        width = encoder.hidden_size
        self.word = _embedding(encoder.vocab_size, width)
        self.position = _embedding(encoder.max_position_embeddings, width)
        self.segment = _embedding(encoder.type_vocab_size, width)
        self.embedding_norm = nn.LayerNorm(width, encoder.layer_norm_eps)
        self.layers = nn.ModuleList(_Layer(encoder, layer) for layer in range(encoder.num_hidden_layers))
        self.encoder = encoder

    def forward(
        self,
        ids: Tensor,
        mask: Tensor | None,
        segments: Tensor | None,
        probe: Probe,
    ) -> Tensor:
        """Return the last hidden states: (batch, token) -> (batch, token, d_model)."""
        # Without segments, all tokens are in segment 0, and its row, (d_model,), broadcasts to (batch, token, d_model).
        segment = self.segment.weight[0] if segments is None else self.segment(segments)
        # Add the embeddings in the order of transformers' BERT, so that rounding is the same.
        hidden: Tensor = self.word(ids) + segment
        hidden = self.embedding_norm(hidden + self.position(self.encoder.positions(ids)))
        for layer in self.layers:
            hidden = layer(hidden, mask, probe)
        return hidden


def _embedding(size: int, width: int) -> nn.Embedding:
    """Return an embedding with uninitialised weights.

    nn.Embedding(size, width) would draw random weights. For that it imports sympy, which takes a second.
    """
    return nn.Embedding(size, width, _weight=torch.empty(size, width))


class _Layer(nn.Module):
    """Attention, then a feed-forward network. A LayerNorm follows each residual addition (post-norm)."""

    def __init__(self, encoder: EncoderSettings, layer: int) -> None:
        super().__init__()
        width = encoder.hidden_size
        inner_width = encoder.intermediate_size
        eps = encoder.layer_norm_eps
        self.attention = MultiHeadAttention(width, encoder.num_attention_heads, layer=layer)
        self.up = nn.Linear(width, inner_width)
        self.down = nn.Linear(inner_width, width)
        self.attention_norm = nn.LayerNorm(width, eps)
        self.norm = nn.LayerNorm(width, eps)

    def forward(self, hidden: Tensor, mask: Tensor | None, probe: Probe) -> Tensor:
        """Apply the layer to hidden states, (batch, token, d_model)."""
        attended, _ = self.attention(hidden, key_padding_mask=mask, probe=probe)
        hidden = self.attention_norm(hidden + attended)
        output: Tensor = self.norm(hidden + self.down(F.gelu(self.up(hidden))))
        return output
