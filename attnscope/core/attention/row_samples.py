"""Compute the attention of a few queries on all keys, without the map of the others, and keep it by a probe. Ours."""

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
    require_first_visit,
    select_rows,
)
from attnscope.core.attention.tiles import attend_lean

RowsWanted = tuple[NDArray[np.int64], int]
"""The rows to read of a text: (positions of the queries, n_keys). Keys from n_keys on are padding."""


@torch.no_grad()
def rows_of(
    call: AttentionCall,
    queries: Int[Tensor, " query"],
    texts: slice = slice(None),
    keys: slice = slice(None),
) -> Float[Tensor, "text n_heads query key"]:
    """Return the exact weights, 0 to 1, of some queries on some keys; the softmax is over all keys.

    `queries` are positions; the weights are (text, head, query, key), of the texts, queries and keys asked for.
    """
    # Compute as many queries at a time as fill a tile.
    n_texts = len(call.query[texts])
    row_elements = max(n_texts * call.n_heads * call.key.shape[2], 1)
    elements = tiles.tile_elements(call.query.device)
    queries_at_once = max(elements // row_elements, tiles.MIN_QUERIES)
    parts = []
    for some_queries in queries.split(queries_at_once):  # type: ignore[no-untyped-call]
        weights = attention_weights(select_rows(call, texts, some_queries))
        parts.append(weights[..., keys])
    return torch.cat(parts, 2)


def read_rows(
    attention: AttentionCall | Tensor,
    kind: str,
    text: int,
    queries: Int[Tensor, " query"],
    n_keys: int,
) -> tuple[Float[Tensor, "n_heads query {n_keys}"], Bool[Tensor, "query {n_keys}"]]:
    """Return some rows of one text of a batch, 0 to 1, and which keys their queries may attend to, both on the CPU.

    Args:
        attention: The call; or dense weights, (text, head, query, key), of which the mask is unknown. Then every key
            counts as allowed, in a decoder every key up to the query.
        kind: The kind of attention: "encoder", "decoder" or "cross".
        text: The index of the text in the batch.
        queries: The positions of the queries.
        n_keys: How many keys the text has; those from there on are padding, and left out.
    """
    texts = slice(text, text + 1)
    keys = slice(n_keys)
    allowed = torch.ones(len(queries), n_keys, dtype=torch.bool)
    if isinstance(attention, Tensor):
        if kind == "decoder":
            allowed = torch.arange(n_keys) <= queries[:, None]
        return attention[text, :, queries.to(attention.device), keys].float().cpu(), allowed
    mask = select_rows(attention, texts, queries).mask
    if mask is not None:
        allowed &= mask.any(1)[0, :, keys].cpu()
    return rows_of(attention, queries, texts, keys)[0].cpu(), allowed


@dataclass(eq=False)
class SampledRows:
    """Hold the sampled rows of one text in one kind of attention.

    Attributes:
        allowed: Layer -> which keys each query may attend to, (row, key), bool.
        weights: Layer -> weights, (row, head, key), float16; each row sums to 1, or is zeros.
    """

    allowed: dict[int, NDArray[np.bool_]] = field(default_factory=dict)
    weights: dict[int, NDArray[np.float16]] = field(default_factory=dict)


class RowSamples:
    """Keep the rows of some queries of each text of a batch, and leave the output to another probe.

    Each row is divided by its sum, so a learned sink does not count: the keys share all of the attention.

    Args:
        wanted: For each text of the batch the rows to keep; None = none.
        probe: The probe that computes the output.

    Attributes:
        rows: For each text of the batch: kind of attention -> its rows.
    """

    def __init__(self, wanted: Sequence[RowsWanted | None], probe: Probe = attend_lean) -> None:
        self.rows: list[dict[str, SampledRows]] = [{} for _ in wanted]
        self._wanted = wanted
        self._probe = probe

    def __call__(self, call: AttentionCall) -> Tensor:
        """Keep the rows of an attention, and let the other probe compute its output; shape and dtype: see `Probe`.

        Raises:
            RuntimeError: The layer of this kind has been here already.
        """
        self._keep(call, call.kind, call.layer)
        return self._probe(call)

    def keep_all(self, maps: Mapping[Kind, Mapping[int, Tensor]]) -> None:
        """Keep the rows of dense weights, (batch, n_heads, query, key), which `maps` holds by kind and layer."""
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
            require_first_visit({kind: rows.weights}, kind, layer)
            weight_parts = []
            allowed_parts = []
            # A few rows at a time in float32: all rows and heads of a long text would be as large as a map.
            for some_queries in torch.from_numpy(queries).split(tiles.MIN_QUERIES):  # type: ignore[no-untyped-call]
                weights, allowed = read_rows(attention, kind, text, some_queries, n_keys)
                # Divide (row, head, key) by the sums of rows; rows of zeros stay zeros.
                weights = weights.movedim(1, 0).float()
                totals = weights.sum(-1, keepdim=True)
                weights = weights / totals.clamp_(min=torch.finfo(torch.float32).tiny)
                weight_parts.append(weights.half().numpy())
                allowed_parts.append(allowed.numpy())
            rows.weights[layer] = np.concatenate(weight_parts)
            rows.allowed[layer] = np.concatenate(allowed_parts)
