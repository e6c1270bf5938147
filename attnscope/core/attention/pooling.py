"""Attention of long texts pooled to a grid, with what each key receives, each query's entropy, and far links.

Everything comes from one pass over tiles, so it is exact whatever an AttentionCall says. Memory grows with queries +
keys and with the grid, never with queries times keys. Ours.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F  # noqa: N812
from jaxtyping import Float, Int
from torch import Tensor

from attnscope.core.attention.precision import sum_dtype
from attnscope.core.attention.seam import AttentionCall
from attnscope.core.attention.tiles import Block, Tile, attend_in_tiles, blocks, tiles

Pool = Literal["mean", "max"]


@dataclass(frozen=True, eq=False)
class Grid:
    """How a map is pooled, and which of its links count as far.

    Attributes:
        query_cell: Queries that share a row of cells, at least 1.
        key_cell: Keys that share a column of cells, at least 1.
        pool: What a cell shows. "mean": the share of attention that the queries of its row give to the keys of its
            column, summed over the keys and averaged over the queries that attend to anything. Rows sum to 1, as those
            of the whole map do. "max": the largest single weight in it.
        n_links: How many links to keep of each head.
        far: A link is far if query and key are more than this many tokens apart; None = all are, as between two texts.
        no_query: Queries whose links are left out, (query,), bool; None = none.
        no_key: Keys whose links are left out, (key,), bool; None = none.

    Raises:
        ValueError: A cell holds no token, links are fewer than none, or the pool is unknown.
    """

    query_cell: int
    key_cell: int
    pool: Pool = "mean"
    n_links: int = 10
    far: int | None = None
    no_query: Tensor | None = None
    no_key: Tensor | None = None

    def on(self, device: torch.device) -> "Grid":
        """Return the same grid, with its tensors on a device."""
        no_query, no_key = (None if out is None else out.to(device) for out in (self.no_query, self.no_key))
        return replace(self, no_query=no_query, no_key=no_key)

    def __post_init__(self) -> None:
        if min(self.query_cell, self.key_cell) < 1 or self.n_links < 0 or (self.far is not None and self.far < 0):
            raise ValueError(f"cells hold at least one token, and links are no fewer than none; got {self}")
        if self.pool not in ("mean", "max"):
            raise ValueError(f"cells are pooled by mean or max; got {self.pool!r}")


@dataclass(frozen=True, eq=False)
class PooledAttention:
    """What is kept of an attention.

    Attributes:
        output: A V, (batch, n_heads, query, d_value), in the dtype of the values.
        cells: The pooled map, of ceil(query / query_cell) rows and ceil(key / key_cell) columns, float32, 0 to 1. The
            last row and column may hold fewer tokens.
        received: Mass that each key receives, sum over q of A_qk, float64. Its mean is 1 if there are as many queries
            as keys.
        entropy_nats: Entropy of each query's weights, float32 or better; 0 if it may attend to nothing.
        link_places: Query and key of the largest far weights, largest first; -1 where no more are above 0.
        link_weights: Those weights.
    """

    output: Tensor
    cells: Float[Tensor, "batch n_heads row column"]
    received: Float[Tensor, "batch n_heads key"]
    entropy_nats: Float[Tensor, "batch n_heads query"]
    link_places: Int[Tensor, "batch n_heads n_links 2"]
    link_weights: Float[Tensor, "batch n_heads n_links"]


@torch.no_grad()
def pool_attention(call: AttentionCall, grid: Grid) -> PooledAttention:
    """Attention, and what a picture of it on a long text needs.

    With rows Q and columns K of cells, and n_Q the queries of Q that may attend to anything:

        mean: cell_QK = 1 / n_Q * sum over q in Q, k in K of A_qk,   max: cell_QK = max over q in Q, k in K of A_qk,
        received_k = sum over q of A_qk,   entropy_q = - sum over k of A_qk ln A_qk,
        links: the n_links largest A_qk with |q - k| > far, q not in no_query, k not in no_key

    Dropout is not applied. Without keys or queries everything is zero.

    Raises:
        ValueError: no_query or no_key is not one truth value per query or key.

    Source:
        Ours. Summing over keys and averaging over queries keeps rows summing to 1, as Clark et al. 2019 (section 4.1)
        do for the pieces of a word. The largest weights of single queries in single columns of cells include the
        largest weights of all, so only these few cells are searched.
    """
    for name, out, n in (("no_query", grid.no_query, call.query.shape[2]), ("no_key", grid.no_key, call.key.shape[2])):
        if out is not None and out.shape != (n,):
            raise ValueError(f"{name} has shape {tuple(out.shape)}, not ({n},)")
    reader = _Reader(call, grid.on(call.query.device))
    return reader.result(attend_in_tiles(call, reader.add))


class _Reader:
    """Read one attention tile by tile."""

    def __init__(self, call: AttentionCall, grid: Grid) -> None:
        batch, n_heads, n_queries, _ = call.query.shape
        n_keys = call.key.shape[2]
        dtype, device = torch.promote_types(call.query.dtype, torch.float32), call.query.device
        summed = sum_dtype(device)
        self._grid = grid
        self._n_keys = n_keys
        shape = (-(-n_queries // grid.query_cell), -(-n_keys // grid.key_cell))
        self._cells = torch.zeros(batch, n_heads, *shape, dtype=summed, device=device)
        self._counted = torch.zeros(batch, n_heads, shape[0], dtype=summed, device=device)
        self._received = torch.zeros(batch, n_heads, n_keys, dtype=summed, device=device)
        self._entropies = torch.zeros(batch, n_heads, n_queries, dtype=dtype, device=device)
        self._link_places = torch.full((batch, n_heads, grid.n_links), -1, dtype=torch.int64, device=device)
        self._link_weights = torch.zeros(batch, n_heads, grid.n_links, dtype=dtype, device=device)

    def add(self, tile: Tile) -> None:
        """Add one tile; overwrite its scores and weights."""
        block, weights, grid = tile.block, tile.weights, self._grid
        if not weights.numel():
            return
        entropies = tile.entropies(tile.log_sum_exp(weights.amax(-1)))
        self._entropies[block.texts, :, block.queries] = entropies

        # Which row of cells each query belongs to, and sums over these queries: (text, head, row, key).
        rows = torch.arange(block.queries.start, block.queries.stop, device=weights.device) // grid.query_cell
        first = block.queries.start // grid.query_cell
        belongs = F.one_hot(rows - first).T.to(weights.dtype)
        by_row = belongs @ weights
        self._received[block.texts, :, block.keys] += by_row.sum(2)

        # Cells: (text, head, row, column).
        columns = slice(block.keys.start // grid.key_cell, -(-block.keys.stop // grid.key_cell))
        cells = self._cells[block.texts, :, first : first + len(belongs), columns]
        if grid.pool == "mean":
            cells += self._cut(by_row, block.keys).sum(-1)
            attends = torch.ones(weights.shape[:3], dtype=weights.dtype, device=weights.device)
            if block.empty is not None:
                attends = attends.masked_fill(block.empty, 0.0)
            self._counted[block.texts, :, first : first + len(belongs)] += attends @ belongs.T
        else:
            for row in range(len(belongs)):
                largest = weights[:, :, rows == first + row].amax(2)
                maxima = self._cut(largest, block.keys).amax(-1)
                cells[:, :, row] = torch.maximum(cells[:, :, row], maxima.to(cells.dtype))
        if grid.n_links:
            self._add_links(block, weights)

    def result(self, output: Tensor) -> PooledAttention:
        """Return the whole result, once every tile was added."""
        cells = self._cells
        if self._grid.pool == "mean":
            cells = cells / self._counted.clamp(min=1).unsqueeze(-1)
        n_keys = max(self._n_keys, 1)
        places = torch.stack([self._link_places // n_keys, self._link_places % n_keys], -1)
        return PooledAttention(
            output=output,
            cells=cells.float(),
            received=self._received,
            entropy_nats=self._entropies,
            link_places=places.masked_fill_(self._link_places.unsqueeze(-1) < 0, -1),
            link_weights=self._link_weights,
        )

    def _cut(self, rows: Tensor, keys: slice) -> Tensor:
        """Return rows over some keys cut into cells, (…, column, key), with zeros for keys beyond them."""
        cell = self._grid.key_cell
        padded = F.pad(rows, (keys.start % cell, -keys.stop % cell))
        return padded.view(*padded.shape[:-1], -1, cell)

    def _add_links(self, block: Block, weights: Tensor) -> None:
        """Merge the tile's largest far weights into the largest so far; unwanted weights become 0."""
        grid = self._grid
        if grid.no_key is not None:
            weights[..., grid.no_key[block.keys]] = 0.0
        if grid.no_query is not None:
            weights[:, :, grid.no_query[block.queries]] = 0.0
        if grid.far is not None:
            q = torch.arange(block.queries.start, block.queries.stop, device=weights.device)[:, None]
            k = torch.arange(block.keys.start, block.keys.stop, device=weights.device)
            weights *= (q - k).abs() > grid.far

        # The largest n weights are in the n rows with the largest maxima: (text, head, row, key).
        before = self._link_weights[block.texts]
        maxima = weights.amax(-1)
        if not bool((maxima.amax(-1) > before[..., -1]).any()):
            return
        rows = maxima.topk(min(grid.n_links, maxima.shape[-1])).indices
        candidates = weights.gather(2, rows[..., None].expand(-1, -1, -1, weights.shape[3])).flatten(2)
        largest, which = candidates.topk(min(grid.n_links, candidates.shape[-1]))
        queries = block.queries.start + rows.gather(2, which // weights.shape[3])
        places = queries * self._n_keys + block.keys.start + which % weights.shape[3]
        largest, order = torch.cat([before, largest], -1).topk(grid.n_links)
        places = torch.cat([self._link_places[block.texts], places], -1).gather(-1, order)
        self._link_weights[block.texts] = largest
        self._link_places[block.texts] = places.masked_fill_(largest <= 0, -1)


@torch.no_grad()
def part_of_weights(call: AttentionCall, queries: slice, keys: slice) -> Float[Tensor, "batch n_heads query key"]:
    """Return the exact weights of some queries on some keys, in memory of that size; the softmax is over all keys.

    Args:
        call: The attention.
        queries: From first to last + 1.
        keys: Likewise.

    Returns:
        float64 for float64 queries, else float32: what `attention_weights` has there.
    """
    batch, n_heads, _, _ = call.query.shape
    dtype = torch.promote_types(call.query.dtype, torch.float32)
    shape = (batch, n_heads, queries.stop - queries.start, keys.stop - keys.start)
    part = torch.zeros(shape, dtype=dtype, device=call.query.device)
    for tile in tiles(call, blocks(call, queries=queries)):
        block = tile.block
        start, stop = max(keys.start, block.keys.start), min(keys.stop, block.keys.stop)
        if start < stop:
            rows = slice(block.queries.start - queries.start, block.queries.stop - queries.start)
            seen = tile.weights[..., start - block.keys.start : stop - block.keys.start]
            part[block.texts, :, rows, start - keys.start : stop - keys.start] = seen
    return part
