"""The single head that a layer's heads could have been (Vaswani et al. 2017): attention by all of their columns."""

import math
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from attnscope.core.attention import AttentionCall, Kind, attention_weights
from attnscope.core.probes import Weights


class WeightsBesideFullWidth(Weights):
    """A probe that keeps weights as `Weights` does, and beside them what one head over the full width would attend to.

    Weights that an engine has computed by itself (`keep`) come without queries and keys: nothing is kept beside those.

    Attributes:
        full: Kind -> layer -> `full_width` of the call, (query, key), float32, on the CPU, of the first text of the
            batch; of the layers that are kept, where it is defined.
    """

    def __init__(self, *chosen: Any, **named: Any) -> None:
        super().__init__(*chosen, **named)
        self.full: dict[Kind, dict[int, Tensor]] = {}

    def __call__(self, call: AttentionCall) -> Tensor:
        """Computes an attention, and keeps what is wanted of it; see Weights.

        Returns:
            Its output, (batch, n_heads, query, d_value), in the dtype of the values.
        """
        output = super().__call__(call)
        if call.layer in self.maps.get(call.kind, {}) and (single := full_width(call)) is not None:
            self.full.setdefault(call.kind, {})[call.layer] = single.detach().to("cpu", torch.float32)
        return output


def full_width(call: AttentionCall) -> Float[Tensor, "query key"] | None:
    """What one head over the full width of a layer would attend to.

        A = softmax( [q_0 | q_1 | ...] [k_0 | k_1 | ...]^T * scale / sqrt(n_heads) )

    Joined over the heads, queries and keys are n_heads times as wide; with the usual scale of 1 / sqrt(d_head) this is
    1 / sqrt(n_heads * d_head), the scale of a single head of that width (Vaswani et al. 2017, section 3.2.1). The mask
    and the bias that all heads share hold for it too. Key/value heads that several query heads read are repeated.

    Args:
        call: The attention of all heads of a layer.

    Returns:
        Weights of the first text of the batch, (query, key), each row in [0, 1] with sum 1, or 0 where a query may
        attend to nothing. None where it is not defined, as heads differ in more than their queries and keys: a mask
        or a bias of each head's own, a soft cap, sinks.
    """
    own_mask = call.mask is not None and call.mask.ndim >= 3 and call.mask.shape[-3] > 1
    own_bias = call.bias is not None and call.bias.ndim >= 3 and call.bias.shape[-3] > 1
    if own_mask or own_bias or call.softcap is not None or call.sinks is not None:
        return None

    def joined(heads: Tensor) -> Tensor:
        whole = heads[:1].repeat_interleave(call.n_heads // heads.shape[1], 1)
        return whole.transpose(1, 2).flatten(2)[:, None]

    def of_first_text(shared: Tensor | None) -> Tensor | None:
        return shared[:1] if shared is not None and shared.ndim == 4 else shared

    key = joined(call.key)
    single = replace(
        call,
        query=joined(call.query),
        key=key,
        value=key,
        scale=call.scale / math.sqrt(call.n_heads),
        mask=of_first_text(call.mask),
        bias=of_first_text(call.bias),
    )
    return attention_weights(single)[0, 0]
