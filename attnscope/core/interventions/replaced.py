"""Weights from elsewhere at the seam: what heads put out if they attend to something else, with the model's own values.

Knows nothing of models or of the origin of the weights: a description, a rule, another program.

Source: weights computed from a head's description, Hayes et al. 2026, arXiv 2606.19317. Single edges taken out:
attention knockout, Geva et al. 2023, section 5.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from attnscope.core.attention.probes import Place
from attnscope.core.attention.seam import AttentionCall, allowed, attend, may_attend, select_heads, select_part

LEAST = -1e4
"""The score of a weight of 0: exp of it is 0 in every precision, and it is finite, as biases must be."""


@dataclass(frozen=True, eq=False)
class Replacement:
    """What some heads attend to in some texts of a batch, in place of their own weights.

    Attributes:
        heads: Which query heads, from 0.
        scores: Floating point and finite; the weights are their softmax over the keys that the mask allows. Or a
            function that gives them for a mask (text, 1, query, key). None = the heads' own.
        texts: Which texts of the batch.
        hidden: Single edges to take out: the keys that a query does not see, bool. The other weights of the query grow
            in proportion.
    """

    heads: tuple[int, ...]
    scores: Float[Tensor, "#text #head #query #key"] | Callable[[Tensor], Tensor] | None = None
    texts: slice = field(default_factory=lambda: slice(None))
    hidden: Bool[Tensor, "#text #head #query #key"] | None = None


def scores_of(weights: Tensor) -> Tensor:
    """Scores whose softmax is the given weights, of any shape, whose rows sum to 1 over the allowed keys."""
    return weights.log().clamp(min=LEAST)


class Replaced:
    """Gives heads other weights, and keeps the model's own values, masks and everything behind.

        o_h = sum over allowed k of softmax_k(scores_h)_qk v_k

    A row that may attend to nothing puts out nothing. Soft caps and sinks of the model do not act on replaced scores,
    so their rows sum to 1. Each query head is replaced on its own, even if queries are grouped.

    Args:
        replacements: By place; of two that name the same head and text the later one holds.
        compute: What computes the attention of the other heads.
    """

    def __init__(
        self,
        replacements: Mapping[Place, Sequence[Replacement]],
        compute: Callable[[AttentionCall], Tensor] = attend,
    ) -> None:
        self.replacements = dict(replacements)
        self._compute = compute

    def __call__(self, call: AttentionCall) -> Tensor:
        """Computes an attention with the weights of some heads replaced; shape and dtype: see `Probe`.

        Raises:
            ValueError: A replacement names a head that there is not, or its scores do not fit.
        """
        output = self._compute(call)
        replacements = self.replacements.get((call.kind, call.layer), ())
        if replacements:
            output = output.clone()
        for new in replacements:
            if not all(0 <= head < call.n_heads for head in new.heads):
                raise ValueError(f"{call.kind} layer {call.layer} has {call.n_heads} heads; got heads {new.heads}")
            chosen = _replace_scores(select_part(select_heads(call, new.heads), new.texts), new)
            output[new.texts, list(new.heads)] = attend(chosen)
        return output


def _replace_scores(call: AttentionCall, by: Replacement) -> AttentionCall:
    if by.hidden is not None:
        seen = ~by.hidden.to(call.query.device)
        mask = allowed(call)
        call = replace(call, mask=seen if mask is None else mask & seen, is_causal=False, window=None)
    if by.scores is None:
        return call
    scores = by.scores
    if callable(scores) and not isinstance(scores, Tensor):
        scores = scores(may_attend(call))
    # Queries and keys of one 0 have scores of 0, to which the bias is all that is added.
    return replace(
        call,
        query=torch.zeros_like(call.query[..., :1]),
        key=torch.zeros_like(call.key[..., :1]),
        bias=scores.to(call.query.device),
        scale=1.0,
        softcap=None,
        sinks=None,
    )


def on_first_key(n_keys: int) -> Float[Tensor, "1 1 1 key"]:
    """Scores of a head that attends to the first key alone; if it may not, to all others alike.

    0 for the first of n_keys keys and LEAST for all others, in nats.
    """
    scores = torch.full((n_keys,), LEAST)
    scores[0] = 0.0
    return scores[None, None, None]


def evenly() -> Float[Tensor, "1 1 1 1"]:
    """Scores of a head that attends to all keys alike: 0 nats, (1, 1, 1, 1)."""
    return torch.zeros(1, 1, 1, 1)
