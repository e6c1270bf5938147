"""The seam: every attention of every model is one AttentionCall, computed by one function.

Masks follow `torch.nn.functional.scaled_dot_product_attention`: boolean, True = this query MAY attend to
this key. Beware that `torch.nn.MultiheadAttention` and many tutorials mean the opposite (True = hidden), and that
Hugging Face hands its models 1 = keep in two dimensions but adds 0 / finfo.min in four.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch  # noqa: TID253  the core is tensors; the command line imports it late
import torch.nn.functional as F  # noqa: N812, TID253
from torch import Tensor  # noqa: TID253

Kind = Literal["encoder", "decoder", "cross"]
"""Whose attention it is: an encoder's own, a decoder's own, or a decoder's on the encoder."""


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """One attention of one layer, as it reaches the seam.

    Attributes:
        layer: Index of the layer within its kind, from 0.
        kind: "encoder", "decoder" or "cross".
        query: Queries, (batch, n_heads, query, d_head).
        key: Keys, (batch, n_kv_heads, key, d_head). n_heads is a multiple of n_kv_heads; query head h reads
            key/value head h // (n_heads // n_kv_heads). They are not repeated: grouped queries stay visible.
        value: Values, (batch, n_kv_heads, key, d_value).
        scale: Factor on the dot products, usually 1 / sqrt(d_head).
        mask: Boolean, broadcastable to (batch, n_heads, query, key); True = may attend; None = all may.
        is_causal: If True, query i may attend to keys 0..i only, on top of `mask`.
        bias: Added to the scaled scores: position biases of T5, ALiBi. Broadcastable to the scores; finite.
        softcap: If set, scaled scores s become softcap * tanh(s / softcap), before bias and mask (Gemma 2).
        sinks: One extra score a head, (n_heads,), that takes weight and gives no value (gpt-oss): the weights of a query
            then sum to less than 1.
        dropout_p: Probability with which single weights are dropped; 0 outside training.
    """

    layer: int
    kind: Kind
    query: Tensor
    key: Tensor
    value: Tensor
    scale: float
    mask: Tensor | None = None
    is_causal: bool = False
    bias: Tensor | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    dropout_p: float = 0.0

    @property
    def n_heads(self) -> int:
        """How many query heads there are."""
        return self.query.shape[1]

    @property
    def n_kv_heads(self) -> int:
        """How many key/value heads there are; fewer than n_heads where queries are grouped."""
        return self.key.shape[1]


Probe = Callable[[AttentionCall], Tensor]
"""What happens at the seam: gets the call, returns its output (batch, n_heads, query, d_value)."""
