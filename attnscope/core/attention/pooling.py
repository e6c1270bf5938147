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
        """The same grid, with its tensors on a device."""
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
    """One attention, tile by tile."""

    def __init__(self, call: AttentionCall, grid: Grid) -> None:
        batch, n_heads, n_queries, _ = call.query.shape
        n_keys = call.key.shape[2]
        dtype, device = torch.promote_types(call.query.dtype, torch.float32), call.query.device
        summed = sum_dtype(device)
        self._call, self._grid = call, grid
        shape = (-(-n_queries // grid.query_cell), -(-n_keys // grid.key_cell))
        self._cells = torch.zeros(batch, n_heads, *shape, dtype=summed, device=device)
        self._counted = torch.zeros(batch, n_heads, shape[0], dtype=summed, device=device)
        self._received = torch.zeros(batch, n_heads, n_keys, dtype=summed, device=device)
        self._entropies = torch.zeros(batch, n_heads, n_queries, dtype=dtype, device=device)
        self._link_places = torch.full((batch, n_heads, grid.n_links), -1, dtype=torch.int64, device=device)
        self._link_weights = torch.zeros(batch, n_heads, grid.n_links, dtype=dtype, device=device)

    def add(self, tile: Tile) -> None:
        """Adds one tile; overwrites its scores and weights."""
        block, weights, grid = tile.block, tile.weights, self._grid
        if not weights.numel():
            return
        here = (block.texts, slice(None), block.queries)
        self._add_sums(block, weights)
        columns = _ColumnMaxima(weights, block.keys.start, grid.key_cell)
        self._entropies[here] = tile.entropies(tile.log_sum_exp(columns.values.amax(-1)))
        if grid.pool == "max":
            self._add_maxima(block, columns)
        if grid.n_links:
            self._add_links(block, weights, columns)

    def result(self, output: Tensor) -> PooledAttention:
        """The whole result, once every tile was added."""
        cells = self._cells
        if self._grid.pool == "mean":
            cells = cells / self._counted.clamp(min=1).unsqueeze(-1)
        n_keys = max(self._call.key.shape[2], 1)
        links = torch.stack([self._link_places.div(n_keys, rounding_mode="floor"), self._link_places % n_keys], -1)
        return PooledAttention(
            output=output,
            cells=cells.float(),
            received=self._received,
            entropy_nats=self._entropies,
            link_places=links.masked_fill_(self._link_places.unsqueeze(-1) < 0, -1),
            link_weights=self._link_weights,
        )

    def _rows_of_cells(self, block: Block) -> tuple[int, Tensor]:
        """The first row of cells that a block touches, and how many rows after it each of its queries belongs to."""
        rows = torch.arange(block.queries.start, block.queries.stop, device=self._cells.device)
        rows.div_(self._grid.query_cell, rounding_mode="floor")
        first = block.queries.start // self._grid.query_cell
        return first, rows - first

    def _add_sums(self, block: Block, weights: Tensor) -> None:
        """Sums over queries, row of cells by row of cells: what keys receive, and the mean of cells."""
        n_texts, n_heads, n_queries, n_keys = weights.shape
        first, rows = self._rows_of_cells(block)
        n_rows = int(rows[-1]) + 1
        belongs = F.one_hot(rows, n_rows).T.to(weights.dtype)
        summed = torch.bmm(belongs.expand(n_texts * n_heads, -1, -1), weights.view(-1, n_queries, n_keys))
        summed = summed.view(n_texts, n_heads, n_rows, n_keys)
        self._received[block.texts, :, block.keys] += summed.sum(2)
        if self._grid.pool == "max":
            return
        cell = self._grid.key_cell
        before = block.keys.start % cell
        summed = F.pad(summed, (before, -(before + n_keys) % cell))
        columns = slice(block.keys.start // cell, -(-block.keys.stop // cell))
        self._cells[block.texts, :, first : first + n_rows, columns] += _in_cells(summed, cell).sum(-1)
        attends = torch.ones(n_texts, n_heads, n_queries, dtype=weights.dtype, device=weights.device)
        if block.empty is not None:
            attends = attends.masked_fill(block.empty, 0.0)
        self._counted[block.texts, :, first : first + n_rows] += attends @ belongs.T

    def _add_maxima(self, block: Block, columns: "_ColumnMaxima") -> None:
        first, rows = self._rows_of_cells(block)
        for row in range(int(rows[-1]) + 1):
            maxima = columns.values[:, :, rows == row].amax(2)
            at = (block.texts, slice(None), first + row, slice(columns.first, columns.first + maxima.shape[-1]))
            self._cells[at] = torch.maximum(self._cells[at], maxima.to(self._cells.dtype))

    def _add_links(self, block: Block, weights: Tensor, columns: "_ColumnMaxima") -> None:
        """Merges the tile's largest far weights into the largest so far; zeroes unwanted links."""
        self._forget_unwanted(block, weights, columns)
        n_texts, n_heads, _, n_keys = weights.shape
        before = self._link_weights[block.texts]
        best = columns.values.flatten(2)
        if not bool((best.amax(-1) > before[..., -1]).any()):
            return
        cell, n_columns = self._grid.key_cell, columns.values.shape[-1]
        largest, at = best.topk(min(self._grid.n_links, best.shape[-1]))
        rows, cells = at.div(n_columns, rounding_mode="floor"), at % n_columns
        keys = ((columns.first + cells) * cell - block.keys.start).unsqueeze(-1) + torch.arange(cell, device=at.device)
        inside = (keys >= 0) & (keys < n_keys) & (largest > 0).unsqueeze(-1)
        flat = rows.unsqueeze(-1) * n_keys + keys.clamp(0, n_keys - 1)
        picked = weights.view(n_texts, n_heads, -1).gather(-1, flat.flatten(2)).masked_fill_(~inside.flatten(2), 0.0)
        whole = (block.queries.start + rows).unsqueeze(-1) * self._call.key.shape[2] + block.keys.start + keys
        picked, order = torch.cat([before, picked], -1).topk(self._grid.n_links)
        places = torch.cat([self._link_places[block.texts], whole.flatten(2)], -1).gather(-1, order)
        self._link_weights[block.texts] = picked
        self._link_places[block.texts] = places.masked_fill_(picked <= 0, -1)

    def _forget_unwanted(self, block: Block, weights: Tensor, columns: "_ColumnMaxima") -> None:
        grid = self._grid
        if grid.no_key is not None:
            for key in grid.no_key[block.keys].nonzero().flatten().tolist():
                weights[..., key] = 0.0
                columns.update(weights, key, key + 1)
        if grid.far is not None:
            start = max(block.queries.start - grid.far - block.keys.start, 0)
            stop = min(block.queries.stop + grid.far - block.keys.start, weights.shape[3])
            if start < stop:
                q = torch.arange(block.queries.start, block.queries.stop, device=weights.device)
                k = torch.arange(block.keys.start + start, block.keys.start + stop, device=weights.device)
                weights[..., start:stop] *= (q[:, None] - k).abs() > grid.far
                columns.update(weights, start, stop)
        if grid.no_query is not None:
            columns.values.masked_fill_(grid.no_query[block.queries].view(1, 1, -1, 1), 0.0)


class _ColumnMaxima:
    """The largest weight of each query in each column of cells that a tile touches: (text, head, query, column).

    Attributes:
        first: The first of these columns.
    """

    def __init__(self, weights: Tensor, start: int, cell: int) -> None:
        self._start, self._cell = start, cell
        self.first = start // cell
        self.values = weights.new_empty(*weights.shape[:3], -(-(start + weights.shape[3]) // cell) - self.first)
        self.update(weights, 0, weights.shape[3])

    def update(self, weights: Tensor, start: int, stop: int) -> None:
        """Takes the maxima anew of the columns of cells that hold keys `start` up to `stop` of the tile."""
        cell, n_keys = self._cell, weights.shape[3]
        first, last = (self._start + start) // cell, -(-(self._start + stop) // cell)
        edges = [first * cell - self._start, last * cell - self._start]
        if edges[0] < 0:  # the tile begins within this column
            self.values[..., 0] = weights[..., : min(edges[0] + cell, n_keys)].amax(-1)
            first, edges[0] = first + 1, edges[0] + cell
        if edges[1] > n_keys and first < last:  # and ends within this one
            self.values[..., last - 1 - self.first] = weights[..., edges[1] - cell :].amax(-1)
            last, edges[1] = last - 1, edges[1] - cell
        if first < last:
            whole = _in_cells(weights[..., edges[0] : edges[1]], cell)
            torch.amax(whole, -1, out=self.values[..., first - self.first : last - self.first])


def _in_cells(rows: Tensor, cell: int) -> Tensor:
    """A view with the last axis cut into cells: (…, n) -> (…, n / cell, cell)."""
    return rows.view(*rows.shape[:-1], -1, cell)


@torch.no_grad()
def part_of_weights(call: AttentionCall, queries: slice, keys: slice) -> Float[Tensor, "batch n_heads query key"]:
    """The exact weights of some queries on some keys, in memory of that size; the softmax is over all keys.

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
