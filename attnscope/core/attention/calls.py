"""Record the attention calls of a forward pass instead of maps of weights, and join several heads into a single head.

A call (`AttentionCall`) holds the queries, keys and values of one layer. Weights can be computed from it later, a few
rows at a time (`row_samples`). The single head has the columns of several heads side by side. Made from all heads of a
layer, it is the head of full width that the layer would have if it had not been split (Vaswani et al. 2017).
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
    """Return a probe that records each call, detached and without values: memory is linear in queries and keys.

    Args:
        layers: The layers to record, counted within each kind of attention from 0; None = all.
    """

    def detach_call(call: AttentionCall) -> AttentionCall:
        query = call.query.detach()
        key = call.key.detach()
        # Values of width 0: weights depend on queries and keys alone.
        return replace(call, query=query, key=key, value=key[..., :0], dropout_p=0.0)

    return HeadRecorder(detach_call, layers, attend=attend)


def join_heads(heads: Sequence[tuple[AttentionCall, int]]) -> AttentionCall | str:
    """Return the attention of one head whose queries and keys are those of several heads, concatenated.

        scores = scale / √n · Σ_h q_h · k_h  for n heads; if scale = 1 / √d_head, the new scale is 1 / √(n d_head)

    Made from all heads of a layer, it is the single head of full width with the same projections. Its weights are not
    the mean of the heads' weights. It keeps a soft cap, and masks and position biases that all heads share.

    Args:
        heads: Each head as (the call of its layer, its index in the call).

    Returns:
        A call with one head and values of width 0. Or, as text, the reason why the heads cannot be joined: they have
        sinks (a learned extra score per head), or different masks, biases, scales or soft caps.

    Source:
        Vaswani et al. 2017, section 3.2.2, compares several heads with a single head of full width. Dividing the scale
        by √n is our rule.
    """
    # One call per head, each with a single head: queries (batch, 1, query, d_head), keys (batch, 1, key, d_head).
    head_calls = [select_heads(call, [head]) for call, head in heads]
    first_call = head_calls[0]
    # The mask with causality in it, so that the joined call needs no `is_causal`.
    mask = allowed(first_call)
    for call in head_calls:
        has_same_queries = call.query.shape[:3] == first_call.query.shape[:3]
        if not has_same_queries or call.key.shape[2] != first_call.key.shape[2]:
            return "the heads are over different texts"
        if call.sinks is not None:
            return "a sink belongs to one head, and there is none for several"
        if (call.scale, call.softcap) != (first_call.scale, first_call.softcap):
            return "the heads scale or cap their scores differently"
        if not _are_equal(call.bias, first_call.bias):
            return "the heads have position biases of their own, and there is none for several"
        if not _are_equal(allowed(call), mask):
            return "the heads may attend to different keys"
    # (batch, 1, query, n d_head) and (batch, 1, key, n d_head)
    query = torch.cat([call.query for call in head_calls], -1)
    key = torch.cat([call.key for call in head_calls], -1)
    return replace(
        first_call,
        query=query,
        key=key,
        value=key[..., :0],
        scale=first_call.scale / math.sqrt(len(heads)),
        mask=mask,
        is_causal=False,
    )


def _are_equal(a: Tensor | None, b: Tensor | None) -> bool:
    """Return whether two masks or biases are both None, or equal after broadcasting."""
    if a is None or b is None:
        return a is b
    return bool((a == b).all())


class WeightsBesideFullWidth(WeightsRecorder):
    """Record the weights of heads as `WeightsRecorder` does, and the weights of each layer's single head of full width.

    Some models compute attention in code of their own, and hand over weights without queries and keys
    (`WeightsRecorder.keep`). Their layers have no entry in `full`.

    Attributes:
        full: Kind -> layer -> `full_width_weights` of each recorded layer, (query, key), float32, on the CPU. Layers
            whose heads cannot be joined are missing.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.full: dict[Kind, dict[int, Tensor]] = {}

    def _attend_and_read(self, call: AttentionCall) -> tuple[Tensor, Tensor]:
        weights = full_width_weights(call)
        if weights is not None:
            self.full.setdefault(call.kind, {})[call.layer] = weights.detach().to("cpu", torch.float32)
        return super()._attend_and_read(call)


def full_width_weights(call: AttentionCall) -> Float[Tensor, "query key"] | None:
    """Return the weights of the head into which `join_heads` joins all heads of a layer.

    Returns:
        Weights of the first text of the batch, 0 to 1. Each row sums to 1, or to 0 if the query may attend to no key.
        None if the heads cannot be joined.
    """
    # Rows of the batch, which are texts.
    first_text_call = select_rows(call, slice(0, 1))
    joined_call = join_heads([(first_text_call, head) for head in range(call.n_heads)])
    # None instead of the reason, a string. Weights are (batch, head, query, key), here with one text and one head.
    return None if isinstance(joined_call, str) else attention_weights(joined_call)[0, 0]
