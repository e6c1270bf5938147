"""Probes: what can happen at the seam besides plain attention.

A probe gets an AttentionCall, returns its output and keeps what it saw. It knows nothing of models: an engine calls it
once for each attention of a forward pass. Ours, unless a class names its source.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

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
    refuse_second,
    select_heads,
)
from attnscope.core.attention.tiles import attend_lean, tiles

Kept = TypeVar("Kept")

Place = tuple[Kind, int]
"""One attention of a model: its kind, and its layer within the kind."""


class OfChosen(Generic[Kept]):
    """Keep something of chosen layers and heads; the model's output stays the same.

    Other layers cost nothing more. A probe serves one forward pass at a time: clear `maps` between two.

    Args:
        read: Returns what is kept of an attention of the chosen heads alone.
        layers: Which layers, counted within their kind from 0; None = all. A number beyond the model's last layer is no
            error here, because a probe does not know how many layers will come.
        heads: Which heads of each of these layers, from 0, in the order in which they are kept; None = all.
        kinds: Which kinds of attention; None = all.
        attend: What computes the output; `attend_lean` is without gradient.

    Attributes:
        maps: Kind -> layer -> what is kept of the chosen heads, in the order in which they came.
    """

    def __init__(
        self,
        read: Callable[[AttentionCall], Kept],
        layers: Sequence[int] | None = None,
        heads: Sequence[int] | None = None,
        kinds: Sequence[Kind] | None = None,
        attend: Probe = attend_lean,
    ) -> None:
        self.maps: dict[Kind, dict[int, Kept]] = {}
        self.layers = None if layers is None else frozenset(layers)
        self.heads = None if heads is None else tuple(heads)
        self.kinds = None if kinds is None else frozenset(kinds)
        self._read = read
        self._attend = attend

    def __call__(self, call: AttentionCall) -> Tensor:
        """Compute an attention, and keep what is wanted of it if its layer is chosen; shape and dtype: see `Probe`.

        Raises:
            RuntimeError: The layer of this kind was kept already: an engine's bug, or `maps` was not cleared.
            ValueError: A chosen head is beyond the layer's last.
        """
        if not self._wants(call.kind, call.layer, call.n_heads):
            return self._attend(call)
        output, kept = self._see(call)
        self.maps.setdefault(call.kind, {})[call.layer] = kept
        return output

    def _see(self, call: AttentionCall) -> tuple[Tensor, Kept]:
        """Return the output of an attention, and what is kept of it."""
        chosen = call if self.heads is None else select_heads(call, self.heads)
        kept = self._read(chosen)
        return self._attend(call), kept

    def _wants(
        self,
        kind: Kind,
        layer: int,
        n_heads: int,
    ) -> bool:
        """Return whether to keep this layer; refuses a layer that came before, and heads that do not exist."""
        if self.kinds is not None and kind not in self.kinds:
            return False
        if self.layers is not None and layer not in self.layers:
            return False
        refuse_second(self.maps, kind, layer)
        for head in self.heads or ():
            if head >= n_heads:
                raise ValueError(
                    f"{kind} layer {layer} has {n_heads} heads, 0 to {n_heads - 1}; there is no head {head}"
                )
        return True


class Weights(OfChosen[Tensor]):
    """Keep the attention weights of chosen layers and heads; gradients flow through the output.

    It takes the arguments `layers`, `heads` and `kinds` of `OfChosen`.

    Attributes:
        maps: Kind -> layer -> weights of the chosen heads, (batch, chosen head, query, key), as `attention_weights`
            defines them: float32, on the CPU, detached, before dropout.
    """

    def __init__(self, *chosen: Any, **named: Any) -> None:
        super().__init__(attention_weights, *chosen, **named)
        self._attend = attend

    def _see(self, call: AttentionCall) -> tuple[Tensor, Tensor]:
        # Maps are what costs: only those of chosen heads are computed. The map of all heads also gives the output.
        output, weights = attend_with_weights(call) if self.heads is None else super()._see(call)
        return output, weights.detach().to("cpu", torch.float32)

    def keep(
        self,
        kind: Kind,
        layer: int,
        weights: Tensor,
    ) -> None:
        """Keep weights of all heads, (batch, n_heads, query, key), that an engine computed, if their layer is chosen.

        Raises:
            RuntimeError: The layer of this kind was kept already.
            ValueError: A chosen head is beyond the last, or the weights are not four-dimensional.
        """
        if weights.ndim != 4:
            raise ValueError(f"weights are (batch, head, query, key); got shape {tuple(weights.shape)}")
        if self._wants(kind, layer, weights.shape[1]):
            chosen = weights if self.heads is None else weights[:, list(self.heads)]
            by_layer = self.maps.setdefault(kind, {})
            by_layer[layer] = chosen.detach().to("cpu", torch.float32)


def probe_by_kind(probes: Mapping[str, Probe]) -> Probe:
    """Return a probe that hands each kind of attention to its own probe; kinds that have none are only computed."""
    return lambda call: probes.get(call.kind, attend)(call)


@torch.no_grad()
def key_sums(
    call: AttentionCall,
    functions: NDArray[np.float64],
) -> Float[Tensor, "batch n_heads query function"]:
    """Return the sums over keys of weights times functions of the key, float64, on the CPU; no map is kept.

    `functions` are the values of keys, (key, function); further keys have 0.
    """
    values = torch.zeros(call.key.shape[2], functions.shape[1])
    values[: len(functions)] = torch.from_numpy(functions)
    sums = torch.zeros(*call.query.shape[:3], values.shape[1], dtype=torch.float64)
    for tile in tiles(call):
        block = tile.block
        rows = tile.weights @ values[block.keys].to(tile.weights)
        sums[block.texts, :, block.queries] = rows.cpu().double()
    return sums


class Gate:
    """Multiply each head's output by a number, before the output projection mixes the heads.

        o'_h = xi_h * o_h + (1 - xi_h) * m_h

    xi = 1 leaves the head as it is, bit for bit. xi = 0 takes it out and puts m_h in its place: nothing (zero
    ablation), or a vector that does not depend on the token, such as the mean of its outputs (mean ablation).
    Differentiable in xi: attention is computed by `attend`, whose output has a gradient.

    Heads are query heads: if queries are grouped, the other heads of a group stay as they are.

    Args:
        factors: xi of the heads of a place, (n_heads,) for all texts alike or (batch, n_heads). Other places stay as
            they are.
        stand_ins: m of the heads of a place, (n_heads, d_value) or (batch, n_heads, d_value). Without it m is 0.
        compute: What computes attention; `attend_lean` for long texts, without gradient.

    Source:
        xi: Michel et al. 2019, Are Sixteen Heads Really Better than One?, section 2.3. Mean ablation: Wang et al. 2023,
        Interpretability in the Wild, section 2.2 (ours has one mean for all positions).
    """

    def __init__(
        self,
        factors: Mapping[Place, Tensor],
        stand_ins: Mapping[Place, Tensor] | None = None,
        compute: Callable[[AttentionCall], Tensor] = attend,
    ) -> None:
        self.factors = dict(factors)
        self.stand_ins = dict(stand_ins or {})
        self._compute = compute

    def __call__(self, call: AttentionCall) -> Tensor:
        """Compute an attention, and multiply its heads; shape and dtype: see `Probe`.

        Raises:
            ValueError: There are not as many factors as heads, or as texts.
        """
        output = self._compute(call)
        place = (call.kind, call.layer)
        factors = self.factors.get(place)
        if factors is None:
            return output
        # Broadcasting would let one text's factors stand for all heads.
        batch, n_heads = call.query.shape[:2]
        if tuple(factors.shape) not in ((n_heads,), (batch, n_heads)):
            raise ValueError(
                f"{call.kind} layer {call.layer} has {n_heads} heads and {batch} texts; got factors "
                f"{tuple(factors.shape)}"
            )
        factors = factors.to(output.device, output.dtype)[..., None, None]
        gated = output * factors
        stand_in = self.stand_ins.get(place)
        if stand_in is not None:
            gated = gated + (1 - factors) * stand_in.to(output.device, output.dtype)[..., None, :]
        return gated
