"""Attention kept as calls, not as maps: the weights of several layers follow from them, a few queries at a time. Ours.

Also the single head that a layer's heads could have been (Vaswani et al. 2017): attention by all of their columns.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from attnscope.core.attention.probes import OfChosen, Weights
from attnscope.core.attention.seam import (
    AttentionCall,
    Kind,
    allowed,
    attend,
    attention_weights,
    select_heads,
    select_part,
)


def keep_calls(layers: Sequence[int] | None = None) -> OfChosen[AttentionCall]:
    """Return a probe that keeps the calls without their values, detached, in memory linear in queries and keys."""

    def keep(chosen: AttentionCall) -> AttentionCall:
        query, key = chosen.query.detach(), chosen.key.detach()
        return replace(chosen, query=query, key=key, value=key[..., :0], dropout_p=0.0)

    return OfChosen(keep, layers, attend=attend)


def single_head(heads: Sequence[tuple[AttentionCall, int]]) -> AttentionCall | str:
    """Return the attention of one head that has the queries and keys of several heads, laid side by side.

        scores = scale / √n · Σ_h q_h · k_h  for n heads: with scale = 1 / √d_head, divided by the root of n · d_head

    From all heads of a layer it is the single head of full width with the same projections; it is not the mean of the
    heads. A soft cap, and masks and position biases that all heads share, stay.

    Args:
        heads: The attention that each head is part of, and its number in it.

    Returns:
        An attention with one head, without values; or the reason why there is none: heads with sinks, or with masks,
        biases, scales or soft caps of their own.

    Source:
        Vaswani et al. 2017, section 3.2.2, compares several heads with a single one of full width; the rule is ours.
    """
    single_calls = [select_heads(call, [head]) for call, head in heads]
    first = single_calls[0]
    for call in single_calls:
        if call.query.shape[:3] != first.query.shape[:3] or call.key.shape[2] != first.key.shape[2]:
            return "the heads are over different texts"
        if call.sinks is not None:
            return "a sink belongs to one head, and there is none for several"
        if (call.scale, call.softcap) != (first.scale, first.softcap):
            return "the heads scale or cap their scores differently"
        if not _are_equal(call.bias, first.bias):
            return "the heads have position biases of their own, and there is none for several"
    query = torch.cat([call.query for call in single_calls], -1)
    key = torch.cat([call.key for call in single_calls], -1)
    # Heads of one attention may share its mask: it is not written out for each.
    whole, _ = heads[0]
    are_of_one_call = all(call is whole for call, _ in heads)
    if are_of_one_call and (whole.mask is None or whole.mask.shape[1] == 1):
        single_calls = single_calls[:1]
    mask, *other_masks = map(allowed, single_calls)
    for other_mask in other_masks:
        if not _are_equal(other_mask, mask):
            return "the heads may attend to different keys"
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
    """Return whether two tensors that broadcast to scores hold the same numbers, or both are None."""
    if a is None or b is None:
        return a is b
    return bool((a == b).all())


class WeightsBesideFullWidth(Weights):
    """Keep weights as `Weights` does, and beside them what one head over the full width would attend to.

    Weights that an engine has computed by itself (`keep`) come without queries and keys: nothing is kept beside those.

    Attributes:
        full: Kind -> layer -> `full_width` of each layer that is kept, (query, key), float32, on the CPU; layers where
            it is not defined are missing.
    """

    def __init__(self, *chosen: Any, **named: Any) -> None:
        super().__init__(*chosen, **named)
        self.full: dict[Kind, dict[int, Tensor]] = {}

    def _see(self, call: AttentionCall) -> tuple[Tensor, Tensor]:
        weights = full_width(call)
        if weights is not None:
            by_layer = self.full.setdefault(call.kind, {})
            by_layer[call.layer] = weights.detach().to("cpu", torch.float32)
        return super()._see(call)


def full_width(call: AttentionCall) -> Float[Tensor, "query key"] | None:
    """Return what one head over the full width of a layer would attend to: the `single_head` of all its heads.

    Returns:
        Weights of the first text of the batch, each row in [0, 1] with sum 1, or 0 if a query may attend to nothing.
        None where it is not defined.
    """
    text = select_part(call, slice(0, 1))
    single = single_head([(text, head) for head in range(call.n_heads)])
    return None if isinstance(single, str) else attention_weights(single)[0, 0]
