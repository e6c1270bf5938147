"""Define probes: hooks that compute attention in place of the model, and record or change it.

A probe takes an AttentionCall (the queries, keys, values and masks of one layer) and returns the heads' outputs. What
it records it keeps as attributes. It knows nothing of models: the code that runs a model calls the probe once for each
attention layer of a forward pass.

`sum_over_keys` is no probe: it computes numbers from a single AttentionCall.

Source: ours, unless a class names another.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Generic, TypeVar

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from attnscope.core.attention.seam import (
    AttentionCall,
    Kind,
    Probe,
    attend,
    attend_with_weights,
    attention_weights,
    require_first_visit,
    select_heads,
)
from attnscope.core.attention.tiles import attend_without_map, tiles

ReadT = TypeVar("ReadT")

LayerKey = tuple[Kind, int]
"""One attention layer of a model: its kind, and its index within the kind, such as ("cross", 0)."""


class HeadRecorder(Generic[ReadT]):
    """Apply a function to the chosen heads of the chosen layers, and keep its results.

    The model's output stays the same, and layers that are not chosen cost nothing. One recorder serves one forward pass
    at a time: clear `maps` before the next.

    Args:
        read: Gets an AttentionCall that has only the chosen heads, and returns what to keep, such as its weights.
        layers: Which layers, counted within their kind from 0; None = all. A number beyond the model's last layer is no
            error here, because a probe does not know how many layers the model has.
        heads: Which heads of each chosen layer, from 0, in the order in which they are kept; None = all.
        kinds: Which kinds of attention; None = all.
        attend: The function that computes the output. The default, `attend_without_map`, has no gradient.

    Attributes:
        maps: Kind -> layer -> what `read` returned. Layers are in the order in which the model called them.
    """

    def __init__(
        self,
        read: Callable[[AttentionCall], ReadT],
        layers: Sequence[int] | None = None,
        heads: Sequence[int] | None = None,
        kinds: Sequence[Kind] | None = None,
        attend: Probe = attend_without_map,
    ) -> None:
        self.maps: dict[Kind, dict[int, ReadT]] = {}
        self.layers = None if layers is None else frozenset(layers)
        self.heads = None if heads is None else tuple(heads)
        self.kinds = None if kinds is None else frozenset(kinds)
        self._read = read
        self._attend = attend

    def __call__(self, call: AttentionCall) -> Tensor:
        """Return the output of an attention, and record its heads if its layer is chosen; shape and dtype: see `Probe`.

        Raises:
            RuntimeError: The layer of this kind was recorded already: `maps` was not cleared, or the code that runs the
                model called the probe twice for one layer.
            ValueError: A chosen head is beyond the layer's last.
        """
        if not self._is_chosen(call.kind, call.layer, call.n_heads):
            return self._attend(call)
        output, kept = self._attend_and_read(call)
        self.maps.setdefault(call.kind, {})[call.layer] = kept
        return output

    def _attend_and_read(self, call: AttentionCall) -> tuple[Tensor, ReadT]:
        """Return the output of an attention with all heads, and what `read` returns for the chosen heads."""
        chosen = call if self.heads is None else select_heads(call, self.heads)
        kept = self._read(chosen)
        return self._attend(call), kept

    def _is_chosen(
        self,
        kind: Kind,
        layer: int,
        n_heads: int,
    ) -> bool:
        """Return whether this layer is chosen.

        Raises:
            RuntimeError: The layer is chosen, and was recorded already.
            ValueError: The layer is chosen, and lacks a chosen head.
        """
        if self.kinds is not None and kind not in self.kinds:
            return False
        if self.layers is not None and layer not in self.layers:
            return False
        require_first_visit(self.maps, kind, layer)
        for head in self.heads or ():
            if head >= n_heads:
                raise ValueError(
                    f"{kind} layer {layer} has {n_heads} heads, 0 to {n_heads - 1}; there is no head {head}"
                )
        return True


class WeightsRecorder(HeadRecorder[Tensor]):
    """Keep the attention weights of chosen layers and heads; gradients flow through the output.

    Args:
        layers: As for `HeadRecorder`.
        heads: As for `HeadRecorder`.
        kinds: As for `HeadRecorder`.

    Attributes:
        maps: Kind -> layer -> weights of the chosen heads, (batch, chosen head, query, key). They are what
            `attention_weights` returns: the exact softmax weights, before dropout; here float32, on the CPU, detached.
    """

    def __init__(
        self,
        layers: Sequence[int] | None = None,
        heads: Sequence[int] | None = None,
        kinds: Sequence[Kind] | None = None,
    ) -> None:
        super().__init__(attention_weights, layers, heads, kinds, attend)

    def _attend_and_read(self, call: AttentionCall) -> tuple[Tensor, Tensor]:
        # If all heads are kept, their weights are computed anyway, and the output is one product more. If only some
        # are, it is cheaper to compute the weights of these alone, and the output by `attend`, a fused kernel.
        if self.heads is None:
            output, weights = attend_with_weights(call)
        else:
            output, weights = super()._attend_and_read(call)
        return output, weights.detach().to("cpu", torch.float32)

    def keep(
        self,
        kind: Kind,
        layer: int,
        weights: Tensor,
    ) -> None:
        """Keep weights that the model itself returned, (batch, n_heads, query, key), if their layer is chosen.

        Some models compute attention in code of their own, so that no probe is called.

        Raises:
            RuntimeError: The layer of this kind was kept already.
            ValueError: A chosen head is beyond the last, or the weights are not four-dimensional.
        """
        if weights.ndim != 4:
            raise ValueError(f"weights are (batch, head, query, key); got shape {tuple(weights.shape)}")
        if self._is_chosen(kind, layer, weights.shape[1]):
            chosen = weights if self.heads is None else weights[:, list(self.heads)]
            self.maps.setdefault(kind, {})[layer] = chosen.detach().to("cpu", torch.float32)


def probe_by_kind(probes: Mapping[str, Probe]) -> Probe:
    """Return a probe that passes each call to the probe of its kind; `attend` computes kinds that have no probe."""
    return lambda call: probes.get(call.kind, attend)(call)


@torch.no_grad()
def sum_over_keys(
    call: AttentionCall,
    functions: NDArray[np.float64],
) -> Float[Tensor, "batch n_heads query function"]:
    """Return sum over k of A_qk f(k) for several functions f of the key, on the CPU; no map is kept.

    Products are computed in the precision of the weights, float32 or better, and stored as float64.

    `functions` holds f(k), (key, function); keys beyond its last row have f(k) = 0.
    """
    values = torch.zeros(call.key.shape[2], functions.shape[1])
    values[: len(functions)] = torch.from_numpy(functions)
    sums = torch.zeros(*call.query.shape[:3], values.shape[1], dtype=torch.float64)
    for tile in tiles(call):
        block = tile.block
        # (text, head, query, key) @ (key, function), copied into float64 on the CPU.
        sums[block.texts, :, block.queries] = (tile.weights @ values[block.keys].to(tile.weights)).cpu()
    return sums


class HeadGate:
    """Ablate heads: multiply each head's output by a factor, before the output projection mixes the heads.

        o'_h = xi_h * o_h + (1 - xi_h) * m_h

    xi = 1 leaves the head as it is, bit for bit. xi = 0 replaces its output by m_h: zero (zero ablation), or a vector
    that does not depend on the token, such as the mean of its outputs (mean ablation). Differentiable in xi where
    `run_steps` is, as `attend` is.

    Heads are query heads: if queries are grouped, the other heads of a group stay as they are.

    Args:
        factors: (kind, layer) -> xi of its heads, (n_heads,) for all texts alike or (batch, n_heads). Layers that are
            missing stay as they are.
        replacements: (kind, layer) -> m of its heads, (n_heads, d_value) or (batch, n_heads, d_value). m is 0 in layers
            that are missing.
        compute: The function that computes attention; `attend_without_map` for long texts, without gradient.

    Source:
        xi: Michel et al. 2019, Are Sixteen Heads Really Better than One?, section 2.3. Mean ablation: Wang et al. 2023,
        Interpretability in the Wild, section 2.2 (ours has one mean for all positions).
    """

    def __init__(
        self,
        factors: Mapping[LayerKey, Tensor],
        replacements: Mapping[LayerKey, Tensor] | None = None,
        compute: Callable[[AttentionCall], Tensor] = attend,
    ) -> None:
        self.factors = dict(factors)
        self.replacements = dict(replacements or {})
        self._compute = compute

    def __call__(self, call: AttentionCall) -> Tensor:
        """Return the output of an attention with its heads multiplied; shape and dtype: see `Probe`.

        Raises:
            ValueError: The factors are neither (n_heads,) nor (batch, n_heads).
        """
        output = self._compute(call)
        layer_key = (call.kind, call.layer)
        factors = self.factors.get(layer_key)
        if factors is None:
            return output
        # Another shape might broadcast, and scale the wrong heads without an error.
        batch, n_heads = call.query.shape[:2]
        if tuple(factors.shape) not in ((n_heads,), (batch, n_heads)):
            raise ValueError(
                f"{call.kind} layer {call.layer} has {n_heads} heads and {batch} texts; got factors "
                f"{tuple(factors.shape)}"
            )
        # (…, n_heads) becomes (…, n_heads, 1, 1), to multiply the output, (batch, n_heads, query, d_value).
        factors = factors.to(output.device, output.dtype)[..., None, None]
        gated = output * factors
        replacement = self.replacements.get(layer_key)
        if replacement is not None:
            gated = gated + (1 - factors) * replacement.to(output.device, output.dtype)[..., None, :]
        return gated
