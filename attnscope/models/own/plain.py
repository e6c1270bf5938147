"""Compute a BERT-family encoder in NumPy: the engine "numpy", which loads neither torch nor transformers.

For a short text, the attention maps are drawn in less time than torch takes to load.
"""

import math
from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from attnscope.models.catalog import Source, read_config, verify_sha256
from attnscope.models.info import ModelInfo, require_known_ids, require_length
from attnscope.models.model import LayerMaps, Model, Tokenizer
from attnscope.models.own.layouts import Checkpoint, EncoderSettings, describe_native
from attnscope.models.tokenizer import FastTokenizer
from attnscope.results.tokens import Tokens

Array = NDArray[np.float32]


class PlainEncoder(Model):
    """A loaded encoder as a Model that computes with NumPy alone, on single texts.

    Args:
        info: The facts of the model.
        tokenizer: Its tokenizer.
        encoder: The settings of the encoder.
        weights: The weights by name, such as "layers.0.attention.q_proj.weight" (see `EncoderSettings.tensor_specs`).
    """

    # The message and the hint of the error that `Model._refuse` raises, for every method that this engine lacks
    _refusal = (
        "the numpy engine shows exact maps of a text, and does nothing else",
        "load the model with another engine (--engine auto), or leave maps unpooled (--pool 0)",
    )
    run = modules = blocks = static_embeddings = Model._refuse
    unembedding = untrained = Model._refuse

    def __init__(
        self,
        info: ModelInfo,
        tokenizer: Tokenizer,
        encoder: EncoderSettings,
        weights: dict[str, Array],
    ) -> None:
        self.info = info
        self.tokenizer = tokenizer
        self._encoder = encoder
        self._weights = weights

    def compute_maps(self, tokens: Tokens, layers: Collection[int]) -> LayerMaps:
        """Return the attention maps of the chosen layers on a text; layers after the last chosen one do not run."""
        require_length(self.info, len(tokens))
        hidden = self._embed(tokens)
        n_heads = self._encoder.num_attention_heads
        scale = (self._encoder.hidden_size // n_heads) ** -0.5
        maps = LayerMaps(weights={}, full={})
        last_layer = max(layers)
        for layer in range(last_layer + 1):
            prefix = f"layers.{layer}"
            # (head, token, d_head)
            query = self._project(hidden, f"{prefix}.attention.q_proj")
            key = self._project(hidden, f"{prefix}.attention.k_proj")
            value = self._project(hidden, f"{prefix}.attention.v_proj")
            # (head, query, key)
            scores = query @ key.swapaxes(1, 2) * scale
            weights = _softmax(scores)
            if layer in layers:
                maps.weights[layer] = weights
                # The map that one head of width d_model would have. Its dot product is the sum of the dot products of
                # all heads, divided by sqrt(d_model) = sqrt(d_head) * sqrt(n_heads). `scores` has sqrt(d_head) already.
                maps.full[layer] = _softmax(scores.sum(0) / math.sqrt(n_heads))
            # The output of the last layer is not needed.
            if layer < last_layer:
                # (head, token, d_head) -> (token, d_model)
                output = (weights @ value).swapaxes(0, 1).reshape(hidden.shape)
                hidden = self._finish_layer(hidden, output, prefix)
        return maps

    def _embed(self, tokens: Tokens) -> Array:
        """Return the hidden states before the first layer, (token, d_model)."""
        encoder = self._encoder
        ids = tokens.ids.astype(np.int64)
        require_known_ids(self.info, ids, encoder.vocab_size)
        # RoBERTa has no segments: all tokens are in segment 0.
        segments = np.zeros_like(ids)
        if not encoder.is_roberta:
            segments += tokens.segments
        require_known_ids(self.info, segments, encoder.type_vocab_size, "segment")
        hidden = self._weights["word.weight"][ids] + self._weights["segment.weight"][segments]
        hidden += self._weights["position.weight"][encoder.positions(ids)]
        return self._norm(hidden, "embedding_norm")

    def _project(self, hidden: Array, name: str) -> Array:
        """Return queries, keys or values: (token, d_model) -> (head, token, d_head)."""
        projected = self._linear(hidden, name)
        return projected.reshape(len(hidden), self._encoder.num_attention_heads, -1).swapaxes(0, 1)

    def _finish_layer(self, hidden: Array, output: Array, prefix: str) -> Array:
        """Return the hidden states after a layer, (token, d_model).

        Args:
            hidden: The hidden states before the layer, (token, d_model).
            output: The concatenated outputs of the layer's heads, (token, d_model).
            prefix: The prefix of the layer's weights, such as "layers.0".
        """
        attended = self._linear(output, f"{prefix}.attention.out_proj")
        hidden = self._norm(hidden + attended, f"{prefix}.attention_norm")
        inner = _gelu(self._linear(hidden, f"{prefix}.up"))
        return self._norm(hidden + self._linear(inner, f"{prefix}.down"), f"{prefix}.norm")

    def _linear(self, rows: Array, name: str) -> Array:
        """Apply a linear map: (token, d_in) -> (token, d_out)."""
        result: Array = rows @ self._weights[f"{name}.weight"].T
        result += self._weights[f"{name}.bias"]
        return result

    def _norm(self, rows: Array, name: str) -> Array:
        """Apply a LayerNorm: (token, d_model) -> (token, d_model)."""
        centred = rows - rows.mean(-1, keepdims=True)
        deviation = np.sqrt((centred**2).mean(-1, keepdims=True) + self._encoder.layer_norm_eps)
        normed: Array = centred / deviation * self._weights[f"{name}.weight"]
        normed += self._weights[f"{name}.bias"]
        return normed


def _softmax(scores: Array) -> Array:
    """Return the softmax over keys, (…, key)."""
    # Subtracting the largest score avoids overflow.
    exponentials = np.exp(scores - scores.max(-1, keepdims=True))
    return np.asarray(exponentials / exponentials.sum(-1, keepdims=True))


def _gelu(x: Array) -> Array:
    """Return the exact GELU, x / 2 · (1 + erf(x / √2)), which BERT uses, and not its tanh approximation."""
    return np.asarray(x / 2 * (1 + _erf(x / math.sqrt(2))))


def _erf(x: Array) -> Array:
    """Return the error function by Abramowitz and Stegun 7.1.26.

    Its error is at most 1.5e-7, about the rounding error of float32.
    """
    # erf |x| = 1 - p(t) exp(-x²). Evaluate the polynomial p by Horner's scheme, highest power first.
    t = 1 / (1 + 0.3275911 * np.abs(x))
    polynomial = np.zeros_like(t)
    for coefficient in (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592):
        polynomial = (polynomial + coefficient) * t
    # erf is odd: it has the sign of x.
    return np.asarray(np.copysign(1 - polynomial * np.exp(-x * x), x))


def load_plain(source: Source) -> PlainEncoder:
    """Load an encoder without torch. The caller has checked that `layouts.why_unsupported` returns None for it."""
    config = read_config(source)
    encoder = EncoderSettings.from_config(config)
    checkpoint = Checkpoint(source.files_folder, encoder, "np")
    weights = dict(checkpoint.tensors(lambda tensor: np.asarray(tensor, np.float32)))
    # Verify the hash last: a thread of `models.load` computes it while the weights are read.
    info = describe_native(source, config, sha256=verify_sha256(source), engine="numpy")
    return PlainEncoder(info, FastTokenizer.open(source.files_folder), encoder, weights)
