"""Patch attention: replace the z, queries, keys, values or pattern of some heads by those of another run.

`ActivationRecorder` keeps values in one run, and `HeadPatcher` puts them into another. `GradientLeaves` and
`estimate_effect` estimate by gradients what a patch would do. The three classes are probes: a model calls a `Probe`
instead of `attend`, once per layer, with an `AttentionCall` (queries, keys, values and mask). A `LayerKey` names one
attention of the model, (kind, layer), such as ("decoder", 3). This module knows nothing of models.

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

ActivationName = Literal["z", "query", "key", "value", "pattern"]
"""The values of a head that are patched. z is its output before the output projection, the pattern its weights."""


class Patch(NamedTuple):
    """Values that replace those of some heads in some texts of a batch.

    Attributes:
        by: Which values are replaced: z, query, key, value or pattern.
        heads: The indices of the heads; for keys and values, the indices of key/value heads.
        values: (text, head, token, width), or a shape that broadcasts to it; patterns (text, head, query, key).
        texts: Which texts of the batch.
        tokens: The positions of the tokens; for a pattern, of the queries. `values` holds only these positions.
    """

    by: ActivationName
    heads: tuple[int, ...]
    values: Tensor
    texts: slice = slice(None)
    tokens: slice = slice(None)


class HeadPatcher:
    """Put values into heads, and compute the rest of the attention as the model does.

    With grouped queries, several query heads read one key/value head. Its new keys or values reach all of them.

    Args:
        patches: The patches by layer key. If two patch the same head, text and token, the later one wins.
    """

    def __init__(self, patches: Mapping[LayerKey, Sequence[Patch]]) -> None:
        self._patches = patches

    def __call__(self, call: AttentionCall) -> Tensor:
        """Compute an attention with the patches, (text, head, query, d_value); `Probe` documents the dtype."""
        patches = self._patches.get((call.kind, call.layer), ())
        # Queries, keys and values are replaced before attention is computed.
        call = replace(
            call,
            query=_replace_values(patches, "query", call.query),
            key=_replace_values(patches, "key", call.key),
            value=_replace_values(patches, "value", call.value),
        )
        # A pattern becomes a patch of z: its product with the values. Patches of z come later in the list, so they win.
        z_patches = []
        for patch in patches:
            if patch.by == "pattern":
                # (text, head, key, d_value); values of grouped queries are repeated, one for each query head.
                value = select_heads(call, patch.heads).value[patch.texts]
                z = patch.values @ value.to(patch.values)
                z_patches.append(patch._replace(by="z", values=z))
        return _replace_values([*z_patches, *patches], "z", attend(call))


def _replace_values(
    patches: Sequence[Patch],
    by: ActivationName,
    tensor: Tensor,
) -> Tensor:
    """Return a tensor, (text, head, token, width), with the values of all patches of one kind; others stay."""
    patches = [patch for patch in patches if patch.by == by]
    tensor = tensor.clone() if patches else tensor
    for patch in patches:
        tensor[patch.texts, list(patch.heads), patch.tokens] = patch.values.to(tensor)
    return tensor


class ActivationRecorder:
    """Record the call and the output, (text, head, query, d_value), of each attention in a run, for patches.

    Args:
        compute: The function that computes attention.
    """

    def __init__(self, compute: Callable[[AttentionCall], Tensor] = attend) -> None:
        self._compute = compute
        self.calls: dict[LayerKey, AttentionCall] = {}
        self.outputs: dict[LayerKey, Tensor] = {}

    def __call__(self, call: AttentionCall) -> Tensor:
        """Compute an attention, and record its call and its output; `Probe` documents shape and dtype."""
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
        by: ActivationName,
        layer_key: LayerKey,
        heads: Sequence[int],
    ) -> Tensor:
        """Return the values of some heads in one attention; for keys and values, of some key/value heads.

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
    """Make the values of heads leaves of the autograd graph, so that a score has gradients with respect to them.

    Args:
        by: Which values become leaves: z, query, key, value or pattern.

    Attributes:
        by_layer: The leaves by layer key, with the shapes of `ActivationRecorder.values`, for all heads.
    """

    def __init__(self, by: ActivationName) -> None:
        self._by = by
        self.by_layer: dict[LayerKey, Tensor] = {}

    def __call__(self, call: AttentionCall) -> Tensor:
        """Compute an attention with gradients, (text, head, query, d_value); `Probe` documents the dtype."""
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
        """Return the tensor as a leaf that requires a gradient, and keep it in `by_layer`."""
        # A tensor that depends on leaves of earlier layers is in the graph already; detaching it would cut the graph.
        tracked = tensor if tensor.requires_grad else tensor.detach().requires_grad_()
        self.by_layer[call.kind, call.layer] = tracked
        return tracked


def estimate_effect(
    gradient: Tensor,
    base: Tensor,
    source: Tensor,
) -> Float[Tensor, "text head token"]:
    """Return gradient · (source - base): the first-order estimate of how much a patch would change the score.

    The estimate has the unit of the score.

    Args:
        gradient: The gradient of the score, (text, head, token, width).
        base: The values of the heads in the run that would be patched, (text, head, token, width).
        source: Their values in the run that the patch takes them from, (text, head, token, width).
    """
    change = source.float() - base.float()
    effect: Tensor = (gradient.float() * change).sum(-1)
    return effect.detach()
