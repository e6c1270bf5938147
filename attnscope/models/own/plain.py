"""Compute a BERT-family encoder in NumPy, without torch and transformers: the engine "numpy".

It shows what heads attend to on a short text before torch would be loaded.
"""

import math
from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from attnscope.models.catalog import Source, read_config, verify
from attnscope.models.info import ModelInfo, require_length, require_numbers
from attnscope.models.model import Maps, Model, Tokenizer
from attnscope.models.own.layouts import Checkpoint, Encoder, native_info
from attnscope.models.tokenizer import FastTokenizer
from attnscope.results.tokens import Tokens

Array = NDArray[np.float32]


class PlainEncoder(Model):
    """A loaded encoder as a Model that computes with NumPy alone, on single texts.

    Args:
        info: The facts of the model.
        tokenizer: Its tokenizer.
        encoder: Its settings.
        weights: Its weights, by the names of `Encoder.tensors`.
    """

    _refusal = (
        "the numpy engine shows exact maps of a text, and does nothing else",
        "load the model with another engine (--engine auto), or leave maps unpooled (--pool 0)",
    )
    run = outputs = rerun = modules = blocks = static_embeddings = Model._refuse
    unembedding = untrained = Model._refuse

    def __init__(
        self,
        info: ModelInfo,
        tokenizer: Tokenizer,
        encoder: Encoder,
        weights: dict[str, Array],
    ) -> None:
        self.info = info
        self.tokenizer = tokenizer
        self._encoder = encoder
        self._weights = weights

    def look(self, tokens: Tokens, layers: Collection[int]) -> Maps:
        """Return the attention maps of some layers on a text; layers after the last of them do not run."""
        require_length(self.info, len(tokens))
        hidden = self._embed(tokens)
        n_heads = self._encoder.num_attention_heads
        scale = np.float32((self._encoder.hidden_size // n_heads) ** -0.5)
        maps = Maps({}, {})
        last = max(layers, default=-1)
        for number in range(last + 1):
            name = f"layers.{number}"
            # (head, token, d_head)
            query = self._project(hidden, f"{name}.attention.q_proj")
            key = self._project(hidden, f"{name}.attention.k_proj")
            value = self._project(hidden, f"{name}.attention.v_proj")
            # (head, query, key)
            scores = query @ key.swapaxes(1, 2) * scale
            weights = _softmax(scores)
            # The full-width map divides the sum of the heads' dot products by sqrt(d_model), not by sqrt(d_head).
            if number in layers:
                maps.weights[number] = weights
                maps.full[number] = _softmax(scores.sum(0) / np.float32(math.sqrt(n_heads)))
            # (head, token, d_head) -> (token, d_model); the last layer's output is not needed.
            if number < last:
                output = (weights @ value).swapaxes(0, 1).reshape(hidden.shape)
                hidden = self._finish(hidden, output, name)
        return maps

    def _embed(self, tokens: Tokens) -> Array:
        """Return the hidden states before the first layer, (token, d_model)."""
        encoder = self._encoder
        ids = tokens.ids.astype(np.int64)
        require_numbers(self.info, ids, encoder.vocab_size)
        segments = np.asarray(np.zeros_like(ids) if encoder.is_roberta else tokens.segments)
        require_numbers(self.info, segments, encoder.type_vocab_size, "segment")
        hidden = self._weights["word.weight"][ids] + self._weights["segment.weight"][segments]
        hidden += self._weights["position.weight"][encoder.positions(ids)]
        return self._norm(hidden, "embedding_norm")

    def _project(self, hidden: Array, name: str) -> Array:
        """Return queries, keys or values: (token, d_model) -> (head, token, d_head)."""
        rows = self._linear(hidden, name)
        return rows.reshape(len(rows), self._encoder.num_attention_heads, -1).swapaxes(0, 1)

    def _finish(self, hidden: Array, output: Array, name: str) -> Array:
        """Return hidden states after a layer, from those before it and the output of its heads, (token, d_model)."""
        attended = self._linear(output, f"{name}.attention.out_proj")
        hidden = self._norm(hidden + attended, f"{name}.attention_norm")
        inner = _gelu(self._linear(hidden, f"{name}.up"))
        return self._norm(hidden + self._linear(inner, f"{name}.down"), f"{name}.norm")

    def _linear(self, rows: Array, name: str) -> Array:
        """Return rows after a linear map: (token, d_in) -> (token, d_out)."""
        result: Array = rows @ self._weights[f"{name}.weight"].T
        result += self._weights[f"{name}.bias"]
        return result

    def _norm(self, rows: Array, name: str) -> Array:
        """Return rows after a LayerNorm, (token, d_model)."""
        centred = rows - rows.mean(-1, keepdims=True)
        scale = np.sqrt((centred**2).mean(-1, keepdims=True) + np.float32(self._encoder.layer_norm_eps))
        normed: Array = centred / scale * self._weights[f"{name}.weight"]
        normed += self._weights[f"{name}.bias"]
        return normed


def _softmax(scores: Array) -> Array:
    """Return the softmax over keys, (…, key)."""
    powers = np.exp(scores - scores.max(-1, keepdims=True))
    return np.asarray(powers / powers.sum(-1, keepdims=True))


def _gelu(x: Array) -> Array:
    """Return GELU by the error function, as BERT computes it."""
    return np.asarray(x / 2 * (1 + _erf(x / np.float32(math.sqrt(2)))))


def _erf(x: Array) -> Array:
    """Return the error function by Abramowitz and Stegun 7.1.26, whose error of 1.5e-7 is that of float32."""
    # Horner's scheme for the polynomial in t, highest power first.
    t = 1 / (1 + np.float32(0.3275911) * np.abs(x))
    tail = np.zeros_like(t)
    for factor in (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592):
        tail = (tail + np.float32(factor)) * t
    return np.asarray(np.copysign(1 - tail * np.exp(-x * x), x))


def load_plain(source: Source) -> PlainEncoder:
    """Load an encoder that `layouts.why_unsupported` has nothing against, without torch."""
    config = read_config(source)
    encoder = Encoder.of(config)
    checkpoint = Checkpoint(source.files_folder, encoder, "np")
    weights = dict(checkpoint.tensors(lambda tensor: np.asarray(tensor, np.float32)))
    # The hash is asked for last: a thread of `models.load` computes it meanwhile.
    info = native_info(source, config, sha256=verify(source), engine="numpy")
    return PlainEncoder(info, FastTokenizer.open(source.files_folder), encoder, weights)
