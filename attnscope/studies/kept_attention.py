"""Run a model and keep its attention on a batch.

The seam is the one function, in `core.attention.seam`, through which attnscope computes the attention of all layers. A
call of it holds the queries, keys and values of a layer. `core.attention.row_samples.read_text_rows` reads weights from
kept calls.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from attnscope.core.attention.calls import keep_calls
from attnscope.core.attention.probes import WeightsRecorder
from attnscope.core.attention.seam import AttentionCall
from attnscope.models.model import Batch, Model

KeptAttention = AttentionCall | Tensor
"""The attention of a layer on a batch: the call of the seam. Weights are computed from it when they are needed.

If a model does not call the seam, it is the weights, (batch, head, query, key).
"""


def keep_attention(
    model: Model, batch: Batch, layers: Sequence[int] | None = None
) -> Mapping[Any, Mapping[int, Any]]:
    """Run a model on a batch without gradients; return the attention of some layers, or of all (None).

    Returns:
        Kind of attention, such as "encoder" → layer → `KeptAttention`.
    """
    # The path "eager" means that the model does not call the seam, so record its weights.
    probe = WeightsRecorder(layers) if model.info.path == "eager" else keep_calls(layers)
    with torch.no_grad():
        model.run(batch.to(model.info.device), probe)
    return probe.maps


def count_heads(attention: KeptAttention) -> int:
    """Return how many query heads a layer has."""
    # Weights are (batch, head, query, key).
    return attention.shape[1] if isinstance(attention, Tensor) else attention.n_heads
