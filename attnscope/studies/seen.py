"""Keep a model's attention on a batch, and read any rows of any text from it: from its calls, else dense weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from attnscope.core.attention.calls import Calls
from attnscope.core.attention.probes import Weights
from attnscope.core.attention.row_samples import rows_of, rows_of_weights
from attnscope.core.attention.seam import AttentionCall, attention_weights
from attnscope.models.model import Batch, Model

Attention = AttentionCall | Tensor
"""A layer on a batch: its call, or the dense weights of a model without the seam."""


def see(model: Model, batch: Batch, layers: Sequence[int] | None = None) -> Mapping[Any, Mapping[int, Any]]:
    """Run a model on a batch; return its attention by kind and layer, without gradients."""
    probe = Weights(layers) if model.info.path == "eager" else Calls(layers)
    with torch.no_grad():
        model.run(batch.to(model.info.device), probe)
    return probe.maps


def count_heads(attention: Attention) -> int:
    """Return how many heads a layer has."""
    return attention.shape[1] if isinstance(attention, Tensor) else attention.n_heads


def read_rows(
    attention: Attention, kind: str, text: int, queries: Int[Tensor, " query"], n_keys: int
) -> tuple[Float[Tensor, "head query key"], Bool[Tensor, "query key"]]:
    """Return some rows of one text of a batch, and which keys they may attend to, both on the CPU."""
    if isinstance(attention, Tensor):
        return rows_of_weights(attention, kind, text, queries, n_keys)
    part, allowed = rows_of(attention, text, queries, n_keys)
    return attention_weights(part)[0].cpu(), allowed.cpu()
