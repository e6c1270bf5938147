"""Read the rows of a few queries, O(N) a row, and a probe that keeps them. Ours."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor

from attnscope.core.attention import tiles
from attnscope.core.attention.seam import (
    AttentionCall,
    Kind,
    Probe,
    attention_weights,
    refuse_second,
    select_part,
)
from attnscope.core.attention.tiles import attend_lean

RowsWanted = tuple[NDArray[np.int64], int]
"""Which rows of a text are read: the positions of the queries, and how many keys are real; they are the first ones."""


@torch.no_grad()
def rows_of(
    call: AttentionCall,
    queries: Int[Tensor, " query"],
    texts: slice = slice(None),
    keys: slice = slice(None),
) -> Float[Tensor, "text n_heads query key"]:
    """Return the exact weights, 0 to 1, of some queries on some keys; the softmax is over all keys."""
    # As many queries at once as fill a tile.
    n_texts = len(range(call.query.shape[0])[texts])
    row_elements = max(n_texts * call.n_heads * call.key.shape[2], 1)
    elements = tiles.tile_elements(call.query.device)
    at_once = max(elements // row_elements, tiles.LEAST_QUERIES)
    parts = []
    for some_queries in queries.split(at_once):  # type: ignore[no-untyped-call]
        weights = attention_weights(select_part(call, texts, some_queries))
        parts.append(weights[..., keys])
    return torch.cat(parts, 2)


def read_rows(
    attention: AttentionCall | Tensor,
    kind: str,
    text: int,
    queries: Int[Tensor, " query"],
    n_keys: int,
) -> tuple[Float[Tensor, "n_heads query {n_keys}"], Bool[Tensor, "query {n_keys}"]]:
    """Return some rows of one text of a batch, 0 to 1, and which keys they may attend to, both on the CPU.

    Dense weights, (text, head, query, key), do not tell what may be attended to: it is taken to be every key, in a
    decoder every earlier one.
    """
    texts = slice(text, text + 1)
    keys = slice(n_keys)
    allowed = torch.ones(len(queries), n_keys, dtype=torch.bool)
    if isinstance(attention, Tensor):
        if kind == "decoder":
            allowed = torch.arange(n_keys) <= queries[:, None]
        return attention[text, :, queries.to(attention.device), keys].float().cpu(), allowed
    mask = select_part(attention, texts, queries).mask
    if mask is not None:
        allowed &= mask.any(1)[0, :, keys].cpu()
    return rows_of(attention, queries, texts, keys)[0].cpu(), allowed


@dataclass(eq=False)
class SampledRows:
    """The rows of one text, by layer.

    Attributes:
        allowed: (row, key), bool: which keys may be attended to.
        weights: (row, head, key), float16.
    """

    allowed: dict[int, NDArray[np.bool_]] = field(default_factory=dict)
    weights: dict[int, NDArray[np.float16]] = field(default_factory=dict)


class RowSamples:
    """Read rows of some queries of each text of a batch, beside a probe that computes attention.

    Rows are normalised: if a head has a learned sink, its weights on keys alone are described.

    Args:
        wanted: The rows that are read of each text of the batch; None = none of this text.
        probe: The probe beside it.

    Attributes:
        rows: For each text of the batch: kind of attention -> its rows.
    """

    def __init__(self, wanted: Sequence[RowsWanted | None], probe: Probe = attend_lean) -> None:
        self.rows: list[dict[str, SampledRows]] = [{} for _ in wanted]
        self._wanted = wanted
        self._probe = probe

    def __call__(self, call: AttentionCall) -> Tensor:
        """Read the rows of an attention, and let the other probe compute it; shape and dtype: see `Probe`.

        Raises:
            RuntimeError: The layer of this kind has been here already.
        """
        self._keep(call, call.kind, call.layer)
        return self._probe(call)

    def keep_all(self, maps: Mapping[Kind, Mapping[int, Tensor]]) -> None:
        """Read dense weights, (batch, n_heads, query, key), that an engine has computed."""
        for kind, by_layer in maps.items():
            for layer, weights in by_layer.items():
                self._keep(weights, kind, layer)

    def _keep(
        self,
        attention: AttentionCall | Tensor,
        kind: Kind,
        layer: int,
    ) -> None:
        """Keep the wanted rows of an attention, or of dense weights, (text, head, query, key)."""
        for text, wanted in enumerate(self._wanted):
            if wanted is None:
                continue
            queries, n_keys = wanted
            rows = self.rows[text].setdefault(kind, SampledRows())
            refuse_second({kind: rows.weights}, kind, layer)
            weight_parts = []
            allowed_parts = []
            # A few rows at a time: those of all heads of a long text would be as large as a map.
            for some_queries in torch.from_numpy(queries).split(tiles.LEAST_QUERIES):  # type: ignore[no-untyped-call]
                weights, allowed = read_rows(attention, kind, text, some_queries, n_keys)
                # (row, head, key), each row with sum 1; rows of zeros stay zeros.
                weights = weights.movedim(1, 0).float()
                totals = weights.sum(-1, keepdim=True)
                weights = weights / totals.clamp_(min=torch.finfo(torch.float32).tiny)
                weight_parts.append(weights.half().numpy())
                allowed_parts.append(allowed.numpy())
            rows.weights[layer] = np.concatenate(weight_parts)
            rows.allowed[layer] = np.concatenate(allowed_parts)
