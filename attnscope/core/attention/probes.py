"""Define probes: functions that compute an attention, and read or change something of it on the way.

A probe takes an AttentionCall and returns its output. What it reads it keeps as attributes. It knows nothing of models:
the code that runs a model calls it once for each attention of a forward pass. Ours, unless a class names its source.
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
from attnscope.core.attention.tiles import attend_lean, tiles

Kept = TypeVar("Kept")

LayerKey = tuple[Kind, int]
"""One attention of a model: its kind, and its layer within the kind."""


class HeadRecorder(Generic[Kept]):
    """Keep what a function reads of the chosen heads in chosen layers; the model's output stays the same.

    Other layers cost nothing more. It serves one forward pass at a time: clear `maps` between two.

    Args:
        read: Gets an AttentionCall that has the chosen heads alone, and returns what to keep of it.
        layers: Which layers, counted within their kind from 0; None = all. A number beyond the model's last layer is no
            error here, because a probe does not know how many layers will come.
        heads: Which heads of each of these layers, from 0, in the order in which they are kept; None = all.
        kinds: Which kinds of attention; None = all.
        attend: The function that computes the output. The default, `attend_lean`, has no gradient.

    Attributes:
        maps: Kind -> layer -> what `read` returned, in the order in which the layers came.
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
        """Compute an attention, and read its heads if its layer is chosen; shape and dtype: see `Probe`.

        Raises:
            RuntimeError: The layer of this kind was kept already: an engine's bug, or `maps` was not cleared.
            ValueError: A chosen head is beyond the layer's last.
        """
        if not self._check_chosen(call.kind, call.layer, call.n_heads):
            return self._attend(call)
        output, kept = self._attend_and_read(call)
        self.maps.setdefault(call.kind, {})[call.layer] = kept
        return output

    def _attend_and_read(self, call: AttentionCall) -> tuple[Tensor, Kept]:
        """Return the output of an attention, and what is kept of it."""
        chosen = call if self.heads is None else select_heads(call, self.heads)
        kept = self._read(chosen)
        return self._attend(call), kept

    def _check_chosen(
        self,
        kind: Kind,
        layer: int,
        n_heads: int,
    ) -> bool:
        """Return whether this layer is chosen; if so, refuse one that came before, and heads that it does not have."""
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
        maps: Kind -> layer -> weights of the chosen heads, (batch, chosen head, query, key), as `attention_weights`
            defines them: float32, on the CPU, detached, before dropout.
    """

    def __init__(
        self,
        layers: Sequence[int] | None = None,
        heads: Sequence[int] | None = None,
        kinds: Sequence[Kind] | None = None,
    ) -> None:
        super().__init__(attention_weights, layers, heads, kinds, attend)

    def _attend_and_read(self, call: AttentionCall) -> tuple[Tensor, Tensor]:
        # The map of all heads also gives the output. If only some heads are chosen, compute their maps alone, and the
        # output by fused kernels.
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
        """Keep weights that a model computed without the seam, (batch, n_heads, query, key), if their layer is chosen.

        Raises:
            RuntimeError: The layer of this kind was kept already.
            ValueError: A chosen head is beyond the last, or the weights are not four-dimensional.
        """
        if weights.ndim != 4:
            raise ValueError(f"weights are (batch, head, query, key); got shape {tuple(weights.shape)}")
        if self._check_chosen(kind, layer, weights.shape[1]):
            chosen = weights if self.heads is None else weights[:, list(self.heads)]
            self.maps.setdefault(kind, {})[layer] = chosen.detach().to("cpu", torch.float32)


def probe_by_kind(probes: Mapping[str, Probe]) -> Probe:
    """Return a probe that hands each call to the probe of its kind of attention; without one, `attend` computes it."""
    return lambda call: probes.get(call.kind, attend)(call)


@torch.no_grad()
def key_sums(
    call: AttentionCall,
    functions: NDArray[np.float64],
) -> Float[Tensor, "batch n_heads query function"]:
    """Return sum over k of A_qk f(k) for several functions f of the key, float64, on the CPU; no map is kept.

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
    """Multiply each head's output by a number, before the output projection mixes the heads.

        o'_h = xi_h * o_h + (1 - xi_h) * m_h

    xi = 1 leaves the head as it is, bit for bit. xi = 0 replaces its output by m_h: zero (zero ablation), or a vector
    that does not depend on the token, such as the mean of its outputs (mean ablation). Differentiable in xi where
    `compute` is, as `attend` is.

    Heads are query heads: if queries are grouped, the other heads of a group stay as they are.

    Args:
        factors: (kind, layer) -> xi of its heads, (n_heads,) for all texts alike or (batch, n_heads). Layers that are
            missing stay as they are.
        stand_ins: (kind, layer) -> m of its heads, (n_heads, d_value) or (batch, n_heads, d_value). Without it m is 0.
        compute: The function that computes attention; `attend_lean` for long texts, without gradient.

    Source:
        xi: Michel et al. 2019, Are Sixteen Heads Really Better than One?, section 2.3. Mean ablation: Wang et al. 2023,
        Interpretability in the Wild, section 2.2 (ours has one mean for all positions).
    """

    def __init__(
        self,
        factors: Mapping[LayerKey, Tensor],
        stand_ins: Mapping[LayerKey, Tensor] | None = None,
        compute: Callable[[AttentionCall], Tensor] = attend,
    ) -> None:
        self.factors = dict(factors)
        self.stand_ins = dict(stand_ins or {})
        self._compute = compute

    def __call__(self, call: AttentionCall) -> Tensor:
        """Compute an attention, and multiply its heads; shape and dtype: see `Probe`.

        Raises:
            ValueError: There is not one factor for each head, or for each head and text.
        """
        output = self._compute(call)
        layer_key = (call.kind, call.layer)
        factors = self.factors.get(layer_key)
        if factors is None:
            return output
        # Other shapes might broadcast, and scale the wrong heads without an error.
        batch, n_heads = call.query.shape[:2]
        if tuple(factors.shape) not in ((n_heads,), (batch, n_heads)):
            raise ValueError(
                f"{call.kind} layer {call.layer} has {n_heads} heads and {batch} texts; got factors "
                f"{tuple(factors.shape)}"
            )
        factors = factors.to(output.device, output.dtype)[..., None, None]
        gated = output * factors
        stand_in = self.stand_ins.get(layer_key)
        if stand_in is not None:
            gated = gated + (1 - factors) * stand_in.to(output.device, output.dtype)[..., None, :]
        return gated
