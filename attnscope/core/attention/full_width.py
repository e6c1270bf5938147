"""The single head that a layer's heads could have been (Vaswani et al. 2017): attention by all of their columns."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from attnscope.core.attention.calls import select_text, single_head
from attnscope.core.attention.probes import Weights
from attnscope.core.attention.seam import AttentionCall, Kind, attention_weights


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
    """What one head over the full width of a layer would attend to: the `single_head` of all its heads.

    Args:
        call: The attention of all heads of a layer.

    Returns:
        Weights of the first text of the batch, (query, key), each row in [0, 1] with sum 1, or 0 where a query may
        attend to nothing. None where it is not defined.
    """
    text = select_text(call, 0, call.query.shape[2], call.key.shape[2])
    single = single_head([(text, head) for head in range(call.n_heads)])
    return None if isinstance(single, str) else attention_weights(single)[0, 0]
