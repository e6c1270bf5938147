"""Patch attention: replace the z, queries, keys, values or pattern of some heads by those of another run.

`ActivationRecorder` keeps values in one run, `HeadPatcher` puts them into another, and `GradientLeaves` and `attribute`
estimate by gradients what a patch would do. Each is a `Probe`: a model calls it in the place of `attend`, once per
layer. A `LayerKey` is one attention of the model, (kind, layer). This module knows nothing of models.

Source: causal tracing and patching: Vig et al. 2020; Meng et al. 2022; single heads: Wang et al. 2023, Interpretability
in the Wild; practice: Zhang & Nanda 2024; by gradients: Nanda 2023, Attribution Patching.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from jaxtyping import Float
from torch import Tensor

from attnscope.core.attention.probes import LayerKey
from attnscope.core.attention.seam import AttentionCall, attend, attention_weights, select_heads

By = Literal["z", "query", "key", "value", "pattern"]
"""By which values a head is patched: z is its output before the output projection, the pattern its weights."""


class Patch(NamedTuple):
    """Values that some heads get in some texts of a batch.

    Attributes:
        by: Which values they are: z, query, key, value or pattern.
        heads: Which heads, from 0; for keys and values: which key/value heads.
        values: (text, head, token, width), or what broadcasts to that; patterns (text, head, query, key).
        texts: Which texts of the batch.
        tokens: At which tokens, or for patterns, of which queries. The token axis of `values` holds these alone.
    """

    by: By
    heads: tuple[int, ...]
    values: Tensor
    texts: slice = slice(None)
    tokens: slice = slice(None)


class HeadPatcher:
    """Put values into heads, and compute the rest of the attention as the model does.

    Keys and values of grouped queries belong to a key/value head: all query heads that read it get them.

    Args:
        patches: The patches by layer key. If two patch the same head, text and token, the later one wins.
    """

    def __init__(self, patches: Mapping[LayerKey, Sequence[Patch]]) -> None:
        self._patches = patches

    def __call__(self, call: AttentionCall) -> Tensor:
        """Compute an attention with the patches, (text, head, query, d_value); dtype: see `Probe`."""
        patches = self._patches.get((call.kind, call.layer), ())
        # Queries, keys and values are replaced before attention is computed.
        call = replace(
            call,
            query=_put(patches, "query", call.query),
            key=_put(patches, "key", call.key),
            value=_put(patches, "value", call.value),
        )
        # A pattern becomes a patch of z: its product with the values. Patches of z itself come after these.
        z_patches = []
        for patch in patches:
            if patch.by == "pattern":
                # (text, head, key, d_value); values of grouped queries are repeated, one for each query head.
                value = select_heads(call, patch.heads).value[patch.texts]
                z = patch.values @ value.to(patch.values)
                z_patches.append(patch._replace(by="z", values=z))
        return _put([*z_patches, *patches], "z", attend(call))


def _put(
    patches: Sequence[Patch],
    by: By,
    tensor: Tensor,
) -> Tensor:
    """Return a tensor (text, head, token, width) in which all patches of one kind have replaced values."""
    chosen = [patch for patch in patches if patch.by == by]
    tensor = tensor.clone() if chosen else tensor
    for patch in chosen:
        tensor[patch.texts, list(patch.heads), patch.tokens] = patch.values.to(tensor)
    return tensor


class ActivationRecorder:
    """Keep the call and output (text, head, query, d_value) of each attention in a run, for patches.

    Args:
        compute: The function that computes attention.
    """

    def __init__(self, compute: Callable[[AttentionCall], Tensor] = attend) -> None:
        self._compute = compute
        self.calls: dict[LayerKey, AttentionCall] = {}
        self.outputs: dict[LayerKey, Tensor] = {}

    def __call__(self, call: AttentionCall) -> Tensor:
        """Compute an attention, and keep its call and its output; shape and dtype: see `Probe`."""
        output = self._compute(call)
        layer_key = (call.kind, call.layer)
        # Copies, because a network may compute in place with its inputs and outputs.
        self.calls[layer_key] = replace(
            call,
            query=call.query.clone(),
            key=call.key.clone(),
            value=call.value.clone(),
        )
        self.outputs[layer_key] = output.clone()
        return output

    def values(
        self,
        by: By,
        layer_key: LayerKey,
        heads: Sequence[int],
    ) -> Tensor:
        """Return the values of one kind in some heads of one attention; for keys and values, in some key/value heads.

        Returns:
            (text, head, token, width), in the model's units; patterns (text, head, query, key), 0 to 1.
        """
        call = self.calls[layer_key]
        if by == "pattern":
            return attention_weights(select_heads(call, heads))
        # Queries, keys and values: the field of the call that has their name.
        all_heads: Tensor = self.outputs[layer_key] if by == "z" else getattr(call, by)
        return all_heads[:, list(heads)]


class GradientLeaves:
    """Make the values of heads leaves of the autograd graph, so that a loss has a gradient with respect to them.

    Args:
        by: Which values: z, query, key, value or pattern.

    Attributes:
        tensors: The leaves by layer key, with the shapes of `ActivationRecorder.values`, for all heads.
    """

    def __init__(self, by: By) -> None:
        self._by = by
        self.tensors: dict[LayerKey, Tensor] = {}

    def __call__(self, call: AttentionCall) -> Tensor:
        """Compute an attention with gradient, (text, head, query, d_value); dtype: see `Probe`."""
        if self._by == "z":
            return self._track(call, attend(call))
        if self._by == "pattern":
            # The output is computed from the weights, (text, head, query, key), so that they are part of the graph.
            weights = self._track(call, attention_weights(call))
            value = select_heads(call, range(call.n_heads)).value
            return (weights @ value.to(weights.dtype)).to(call.value.dtype)
        # Queries, keys or values: the field of the call that has their name.
        tracked: dict[str, Any] = {self._by: self._track(call, getattr(call, self._by))}
        return attend(replace(call, **tracked))

    def _track(self, call: AttentionCall, tensor: Tensor) -> Tensor:
        """Return the tensor with gradient, and keep it in `tensors`."""
        # A tensor that depends on leaves of earlier layers is part of the graph already.
        tracked = tensor if tensor.requires_grad else tensor.detach().requires_grad_()
        self.tensors[call.kind, call.layer] = tracked
        return tracked


def attribute(
    gradient: Tensor,
    base: Tensor,
    source: Tensor,
) -> Float[Tensor, "text head token"]:
    """Return gradient · (source - base): to first order, how much a patch would change the score, in its unit.

    Args:
        gradient: The gradient of the score, (text, head, token, width).
        base: What the heads computed, (text, head, token, width).
        source: What they computed in the other run, (text, head, token, width).
    """
    change = source.float() - base.float()
    effect: Tensor = (gradient.float() * change).sum(-1)
    return effect.detach()
