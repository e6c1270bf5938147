"""A BERT-family encoder in NumPy: a third implementation, which needs neither torch nor transformers.

Slow and short. It serves to follow a model's attention where torch is not wanted, and to check the other two.
"""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnscope.core.stepwise import Inputs, compute, head_lines
from attnscope.errors import AttnscopeError
from attnscope.models.catalog import Source, read_config, verify, weight_files
from attnscope.models.checkpoint import Checkpoint
from attnscope.models.layouts import ACTIVATIONS, Encoder, native_info, supports
from attnscope.models.model import ModelInfo, Tokenizer
from attnscope.models.tokenizer import FastTokenizer
from attnscope.records import Tokens

Array = NDArray[np.float64]


class PlainEncoder:
    """A loaded encoder that computes in float64 with NumPy alone."""

    def __init__(self, info: ModelInfo, tokenizer: Tokenizer, encoder: Encoder, weights: dict[str, Array]) -> None:
        self.info = info
        self.tokenizer = tokenizer
        self._encoder = encoder
        self._weights = weights

    def inputs(self, tokens: Tokens, layer: int) -> Inputs:
        """What reaches the attention of a layer on a text.

        Returns:
            Queries, keys and values of all heads, with W_O; without what the heads put out.
        """
        hidden = self._embed(tokens)
        for number in range(layer):
            hidden = self._layer(hidden, number)
        return self._inputs(hidden, layer)

    def _embed(self, tokens: Tokens) -> Array:
        w, encoder = self._weights, self._encoder
        ids = tokens.ids.astype(np.int64)
        hidden = w["word.weight"][ids]
        if "segment.weight" in w:
            segments = tokens.segments if encoder.layout.reads_segments else np.zeros_like(ids)
            hidden = hidden + w["segment.weight"][segments]
        first = encoder.pad_token_id + 1 if encoder.layout.positions_after_padding else 0
        hidden = self._norm(hidden + w["position.weight"][first + np.arange(len(ids))], "embedding_norm")
        return self._linear(hidden, "projection") if "projection.weight" in w else hidden

    def _layer(self, hidden: Array, number: int) -> Array:
        inputs, name = self._inputs(hidden, number), f"layers.{number}"
        lines = [line for head in range(inputs.n_heads) for line in head_lines(inputs, head, None)]
        values = zip(lines, compute(lines, inputs), strict=True)
        joined = np.concatenate([value for line, value in values if line.name == "head_output"], axis=-1)
        attended = self._linear(joined, f"{name}.attention.out_proj")
        hidden = self._norm(hidden + attended, f"{name}.attention_norm")
        inner = _ACTIVATIONS[ACTIVATIONS[self._encoder.hidden_act]](self._linear(hidden, f"{name}.up"))
        return self._norm(hidden + self._linear(inner, f"{name}.down"), f"{name}.norm")

    def _inputs(self, hidden: Array, number: int) -> Inputs:
        n_heads, name = self._encoder.num_attention_heads, f"layers.{number}.attention"
        q, k, v = (self._linear(hidden, f"{name}.{part}_proj") for part in "qkv")
        return Inputs(
            Q=q, K=k, V=v, n_heads=n_heads, n_kv_heads=n_heads, scale=(q.shape[1] // n_heads) ** -0.5,
            W_O=self._weights[f"{name}.out_proj.weight"], b_O=self._weights[f"{name}.out_proj.bias"],
        )  # fmt: skip

    def _linear(self, rows: Array, name: str) -> Array:
        result: Array = rows @ self._weights[f"{name}.weight"].T + self._weights[f"{name}.bias"]
        return result

    def _norm(self, rows: Array, name: str) -> Array:
        centred = rows - rows.mean(-1, keepdims=True)
        scale = np.sqrt((centred**2).mean(-1, keepdims=True) + self._encoder.layer_norm_eps)
        result: Array = centred / scale * self._weights[f"{name}.weight"] + self._weights[f"{name}.bias"]
        return result


def load_plain(source: Source) -> PlainEncoder:
    """Loads a BERT-family encoder without torch.

    Raises:
        AttnscopeError: It is of another family; files are missing or damaged, or in a precision that NumPy lacks.
    """
    if source.folder is None:
        raise AttnscopeError(f"{source.name} has no files", "leave out --engine reference")
    config = read_config(source)
    reason = supports(config)
    if reason:
        raise AttnscopeError(
            f"without torch, attnscope computes BERT-family encoders; not {source.name}: {reason}",
            "leave out --engine reference",
        )
    encoder = Encoder.of(config)
    info = native_info(source, config, sha256=verify(source), dtype="float64")
    with ExitStack() as stack:
        checkpoint = Checkpoint(weight_files(source.folder), encoder.layout, stack, "np")
        weights = {ours: np.asarray(tensor, np.float64) for ours, _, tensor in checkpoint.raw(encoder)}
    broken = [name for name, tensor in weights.items() if not np.isfinite(tensor).all()]
    if broken:
        raise AttnscopeError(f"{source.name} holds NaN or infinite values in {broken[0]}", "the weights are damaged")
    return PlainEncoder(info, FastTokenizer.open(source.folder), encoder, weights)


def _gelu(x: Array) -> Array:
    from scipy.special import erf

    result: Array = 0.5 * x * (1 + erf(x / np.sqrt(2)))
    return result


_ACTIVATIONS: dict[str, Callable[[Array], Any]] = {
    "gelu": _gelu,
    "gelu_by_tanh": lambda x: 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
    "relu": partial(np.maximum, 0.0),
    "silu": lambda x: x / (1 + np.exp(-x)),
}
