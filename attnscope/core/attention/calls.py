"""Keep the calls of a forward pass instead of maps, and build a single head of full width from several heads.

From the queries and keys of a call, weights are computed later, a few rows at a time (`row_samples`). The single head
has the columns of all heads side by side, as if the layer had not been split into heads (Vaswani et al. 2017). Ours.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from attnscope.core.attention.probes import HeadRecorder, WeightsRecorder
from attnscope.core.attention.seam import (
    AttentionCall,
    Kind,
    allowed,
    attend,
    attention_weights,
    select_heads,
    select_rows,
)


def keep_calls(layers: Sequence[int] | None) -> HeadRecorder[AttentionCall]:
    """Return a probe that keeps each call, detached and with values of width 0: memory is linear in queries and keys.

    `layers` are counted within their kind from 0; None = all.
    """

    def keep(call: AttentionCall) -> AttentionCall:
        query = call.query.detach()
        key = call.key.detach()
        return replace(call, query=query, key=key, value=key[..., :0], dropout_p=0.0)

    return HeadRecorder(keep, layers, attend=attend)


def single_head(heads: Sequence[tuple[AttentionCall, int]]) -> AttentionCall | str:
    """Return the attention of one head that has the queries and keys of several heads, laid side by side.

        scores = scale / √n · Σ_h q_h · k_h  for n heads; if scale = 1 / √d_head, that is 1 / √(n d_head), as usual

    Made from all heads of a layer, it is the single head of full width with the same projections, not the mean of the
    heads. A soft cap, and masks and position biases that all heads share, stay.

    Args:
        heads: (call, head) pairs: each head's attention, and its index there.

    Returns:
        A call with one head and values of width 0. Or, in words, the reason why there is none: heads with sinks, or
        with different masks, biases, scales or soft caps.

    Source:
        Vaswani et al. 2017, section 3.2.2, compares several heads with a single one of full width; the rule is ours.
    """
    single_calls = [select_heads(call, [head]) for call, head in heads]
    first = single_calls[0]
    mask = allowed(first)
    for call in single_calls:
        if call.query.shape[:3] != first.query.shape[:3] or call.key.shape[2] != first.key.shape[2]:
            return "the heads are over different texts"
        if call.sinks is not None:
            return "a sink belongs to one head, and there is none for several"
        if (call.scale, call.softcap) != (first.scale, first.softcap):
            return "the heads scale or cap their scores differently"
        if not _are_equal(call.bias, first.bias):
            return "the heads have position biases of their own, and there is none for several"
        if not _are_equal(allowed(call), mask):
            return "the heads may attend to different keys"
    query = torch.cat([call.query for call in single_calls], -1)
    key = torch.cat([call.key for call in single_calls], -1)
    return replace(
        first,
        query=query,
        key=key,
        value=key[..., :0],
        scale=first.scale / math.sqrt(len(heads)),
        mask=mask,
        is_causal=False,
    )


def _are_equal(a: Tensor | None, b: Tensor | None) -> bool:
    """Return whether two masks or biases are both None, or equal when broadcast to one shape."""
    if a is None or b is None:
        return a is b
    return bool((a == b).all())


class WeightsBesideFullWidth(WeightsRecorder):
    """Keep the weights of the heads as `WeightsRecorder` does, and those of the layer's single head of full width.

    Weights that a model computed without the seam (`keep`) come without queries and keys: for these layers `full` has
    no entry.

    Attributes:
        full: Kind -> layer -> `full_width` of each layer that is kept, (query, key), float32, on the CPU; layers where
            it is not defined are missing.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.full: dict[Kind, dict[int, Tensor]] = {}

    def _attend_and_read(self, call: AttentionCall) -> tuple[Tensor, Tensor]:
        weights = full_width(call)
        if weights is not None:
            self.full.setdefault(call.kind, {})[call.layer] = weights.detach().to("cpu", torch.float32)
        return super()._attend_and_read(call)


def full_width(call: AttentionCall) -> Float[Tensor, "query key"] | None:
    """Return the weights of the `single_head` that all heads of a layer make together.

    Returns:
        Weights of the first text of the batch, each row in [0, 1] with sum 1, or 0 if a query may attend to nothing.
        None where the heads make no single head.
    """
    text = select_rows(call, slice(0, 1))
    single = single_head([(text, head) for head in range(call.n_heads)])
    return None if isinstance(single, str) else attention_weights(single)[0, 0]
