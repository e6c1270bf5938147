"""Compute the attention of a few queries on all keys, without the weights of the other queries.

A *row* is the weights of one query on all keys. `rows_of` and `read_text_rows` compute rows. `RowRecorder` is a probe
(a hook that computes attention in place of the model): it keeps the rows of chosen queries during a forward pass.

Source: ours.
"""

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
from attnscope.core.attention.tiles import attend_without_map

RowRequest = tuple[NDArray[np.int64], int]
"""Which rows of a text to read: (positions of the queries, n_keys). Keys at position n_keys or later are padding."""


@torch.no_grad()
def rows_of(
    call: AttentionCall,
    queries: Int[Tensor, " query"],
    texts: slice = slice(None),
    keys: slice = slice(None),
) -> Float[Tensor, "text n_heads query key"]:
    """Return the exact weights, 0 to 1, of some queries on a range of keys, (text, head, query, key).

    `queries` are positions. The softmax is over all keys, and `keys` only selects which weights are returned.
    """
    # A tile is the number of weights that fits in the CPU's cache. Compute as many queries at a time as fill one.
    n_texts = len(call.query[texts])
    row_elements = max(n_texts * call.n_heads * call.key.shape[2], 1)
    elements = tiles.tile_elements(call.query.device)
    queries_at_once = max(elements // row_elements, tiles.MIN_QUERIES_PER_TILE)
    parts = []
    for some_queries in queries.split(queries_at_once):  # type: ignore[no-untyped-call]
        weights = attention_weights(select_rows(call, texts, some_queries))
        parts.append(weights[..., keys])
    return torch.cat(parts, 2)


def read_text_rows(
    attention: AttentionCall | Tensor,
    kind: str,
    text: int,
    queries: Int[Tensor, " query"],
    n_keys: int,
) -> tuple[Float[Tensor, "n_heads query {n_keys}"], Bool[Tensor, "query {n_keys}"]]:
    """Return some rows of one text of a batch, 0 to 1, and which keys their queries may attend to, both on the CPU.

    Args:
        attention: The call; or dense weights, (text, head, query, key). Their mask is unknown, so in a decoder every
            key up to the query counts as allowed, and else every key.
        kind: The kind of attention: "encoder", "decoder" or "cross".
        text: The index of the text in the batch.
        queries: The positions of the queries.
        n_keys: How many keys the text has. Later keys are padding, and left out.
    """
    texts = slice(text, text + 1)
    keys = slice(n_keys)
    allowed = torch.ones(len(queries), n_keys, dtype=torch.bool)
    if isinstance(attention, Tensor):
        if kind == "decoder":
            allowed = torch.arange(n_keys) <= queries[:, None]
        return attention[text, :, queries.to(attention.device), keys].float().cpu(), allowed
    # The mask of these rows, (1, #head, query, key), with causality and window in it. A key counts as allowed if any
    # head may attend to it.
    mask = select_rows(attention, texts, queries).mask
    if mask is not None:
        allowed &= mask.any(1)[0, :, keys].cpu()
    return rows_of(attention, queries, texts, keys)[0].cpu(), allowed


@dataclass(eq=False)
class TextRows:
    """Hold the recorded rows of one text in one kind of attention.

    Attributes:
        allowed: Layer -> which keys each query may attend to, (row, key), bool.
        weights: Layer -> weights, (row, head, key), float16. Each row sums to 1, or is zeros.
    """

    allowed: dict[int, NDArray[np.bool_]] = field(default_factory=dict)
    weights: dict[int, NDArray[np.float16]] = field(default_factory=dict)


class RowRecorder:
    """Keep the rows of chosen queries of each text of a batch; another probe computes the output.

    Each row is divided by its sum. So in a model with learned sinks, whose rows sum to less than 1, the keys share all
    of the attention.

    Args:
        requests: Which rows to keep of each text of the batch; None = no row of this text.
        probe: The probe that computes the output.

    Attributes:
        rows: For each text of the batch: kind of attention -> its rows.
    """

    def __init__(self, requests: Sequence[RowRequest | None], probe: Probe = attend_without_map) -> None:
        self.rows: list[dict[str, TextRows]] = [{} for _ in requests]
        self._requests = requests
        self._probe = probe

    def __call__(self, call: AttentionCall) -> Tensor:
        """Keep the rows of an attention, and return its output by the other probe; shape and dtype: see `Probe`.

        Raises:
            RuntimeError: The rows of this layer were kept already.
        """
        self._keep(call, call.kind, call.layer)
        return self._probe(call)

    def keep_maps(self, maps: Mapping[Kind, Mapping[int, Tensor]]) -> None:
        """Keep the rows of dense weights; `maps` is kind -> layer -> (batch, n_heads, query, key)."""
        for kind, by_layer in maps.items():
            for layer, weights in by_layer.items():
                self._keep(weights, kind, layer)

    def _keep(
        self,
        attention: AttentionCall | Tensor,
        kind: Kind,
        layer: int,
    ) -> None:
        """Keep the requested rows of an attention, or of dense weights, (text, head, query, key)."""
        for text, request in enumerate(self._requests):
            if request is None:
                continue
            queries, n_keys = request
            rows = self.rows[text].setdefault(kind, TextRows())
            require_first_visit({kind: rows.weights}, kind, layer)
            weight_parts = []
            allowed_parts = []
            # A few rows at a time in float32, because all rows and heads of a long text would be as large as a map.
            for some_queries in torch.from_numpy(queries).split(tiles.MIN_QUERIES_PER_TILE):  # type: ignore[no-untyped-call]
                weights, allowed = read_text_rows(attention, kind, text, some_queries, n_keys)
                # From (head, row, key) to (row, head, key), with each row divided by its sum. Rows of zeros stay zeros.
                weights = weights.movedim(1, 0).float()
                totals = weights.sum(-1, keepdim=True)
                weights = weights / totals.clamp_(min=torch.finfo(torch.float32).tiny)
                weight_parts.append(weights.half().numpy())
                allowed_parts.append(allowed.numpy())
            rows.weights[layer] = np.concatenate(weight_parts)
            rows.allowed[layer] = np.concatenate(allowed_parts)
