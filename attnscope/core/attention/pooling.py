"""Pool the attention of long texts to a grid, with what each key receives, each query's entropy, and far links.

Everything comes from one pass over tiles, so it is exact whatever an AttentionCall says. Memory grows with queries +
keys and with the grid, never with queries times keys. Ours.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from jaxtyping import Float, Int
from torch import Tensor

from attnscope.core.attention.precision import sum_dtype
from attnscope.core.attention.seam import AttentionCall
from attnscope.core.attention.tiles import Block, tiles


@dataclass(frozen=True, eq=False)
class Grid:
    """How a map is pooled, and which of its links count as far.

    Attributes:
        query_cell: Queries that share a row of cells, at least 1.
        key_cell: Keys that share a column of cells, at least 1.
        n_links: How many links to keep of each head.
        far: A link is far if query and key are more than this many tokens apart; None = all are, as between two texts.
        no_query: Queries whose links are left out, (query,), bool; None = none.
        no_key: Keys whose links are left out, (key,), bool; None = none.
    """

    query_cell: int
    key_cell: int
    n_links: int = 10
    far: int | None = None
    no_query: Tensor | None = None
    no_key: Tensor | None = None


@dataclass(frozen=True, eq=False)
class PooledAttention:
    """What is kept of an attention.

    Attributes:
        cells: The pooled map, of ceil(query / query_cell) rows and ceil(key / key_cell) columns, float32: the share of
            attention that the queries of a row give to the keys of a column. The last row and column may hold fewer
            tokens.
        received: Mass that each key receives, sum over q of A_qk, float64. Its mean is 1 if there are as many queries
            as keys.
        entropy_nats: Entropy of each query's weights, float32 or better; 0 if it may attend to nothing.
        link_places: Query and key of the largest far weights, largest first; -1 where no more are above 0.
        link_weights: The weights of these links; 0 where there is no link.
    """

    cells: Float[Tensor, "batch n_heads row column"]
    received: Float[Tensor, "batch n_heads key"]
    entropy_nats: Float[Tensor, "batch n_heads query"]
    link_places: Int[Tensor, "batch n_heads n_links 2"]
    link_weights: Float[Tensor, "batch n_heads n_links"]


@torch.no_grad()
def pool_attention(call: AttentionCall, grid: Grid) -> PooledAttention:
    """Pool attention to what a picture of it on a long text needs, on the CPU.

    With rows Q and columns K of cells, and n_Q the queries of Q that may attend to anything:

        cell_QK = 1 / n_Q * sum over q in Q, k in K of A_qk
        received_k = sum over q of A_qk,   entropy_q = - sum over k of A_qk ln A_qk,
        links: the n_links largest A_qk with |q - k| > far, q not in no_query, k not in no_key

    Without keys or queries everything is zero.

    Source:
        Ours. Summing over keys and averaging over queries keeps rows summing to 1, as Clark et al. 2019 (section 4.1)
        do for the pieces of a word.
    """
    device = call.query.device
    dtype = torch.promote_types(call.query.dtype, torch.float32)
    batch, n_heads, n_queries, _ = call.query.shape
    n_keys = call.key.shape[2]

    def zeros(*shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.zeros(batch, n_heads, *shape, dtype=dtype or sum_dtype(device), device=device)

    # As many cells as hold all tokens: divided, and rounded up.
    n_rows = -(-n_queries // grid.query_cell)
    n_columns = -(-n_keys // grid.key_cell)
    cells = zeros(n_rows, n_columns)
    # n_Q of each row.
    counted = zeros(n_rows)
    received = zeros(n_keys)
    entropies = zeros(n_queries, dtype=dtype)
    link_weights = zeros(grid.n_links, dtype=dtype)
    link_places = zeros(grid.n_links, dtype=torch.int64) - 1
    links = _Links(link_weights, link_places, n_keys)
    for tile in tiles(call):
        block = tile.block
        weights = tile.weights
        entropies[block.texts, :, block.queries] = tile.entropies(weights.amax(-1))

        # Which row of cells each query belongs to, and which column each key, (query,) and (key,).
        row = _cells_of(block.queries, grid.query_cell, device)
        column = _cells_of(block.keys, grid.key_cell, device)
        rows = slice(int(row[0]), int(row[-1]) + 1)
        columns = slice(int(column[0]), int(column[-1]) + 1)

        # Sums over the queries of a row, (text, head, row, key), then over the keys of a column.
        in_row = F.one_hot(row - rows.start).T.to(dtype)
        by_row = in_row @ weights
        received[block.texts, :, block.keys] += by_row.sum(2)
        in_column = F.one_hot(column - columns.start).to(cells.dtype)
        cells[block.texts, :, rows, columns] += by_row.to(cells.dtype) @ in_column
        attends = torch.ones(weights.shape[:3], dtype=cells.dtype, device=device)
        if block.empty is not None:
            attends = attends.masked_fill(block.empty, 0.0)
        counted[block.texts].index_add_(2, row, attends)
        if grid.n_links:
            links.add(grid, block, weights)
    cells = cells / counted.clamp(min=1).unsqueeze(-1)
    # Query and key of each link; -1 for both where there is none.
    key_count = max(n_keys, 1)
    places = torch.stack([links.places // key_count, links.places % key_count], -1)
    places = places.masked_fill_(links.places.unsqueeze(-1) < 0, -1)
    return PooledAttention(
        cells=cells.float().cpu(),
        received=received.cpu(),
        entropy_nats=entropies.cpu(),
        link_places=places.cpu(),
        link_weights=links.weights.cpu(),
    )


def _cells_of(
    tokens: slice,
    cell: int,
    device: torch.device,
) -> Int[Tensor, " token"]:
    """Return the row or column of cells that each token of a range belongs to."""
    return torch.arange(tokens.start, tokens.stop, device=device) // cell


@dataclass(frozen=True, eq=False)
class _Links:
    """The largest far weights so far, (batch, head, link), and their places: query · n_keys + key; -1 = none."""

    weights: Tensor
    places: Tensor
    n_keys: int

    def add(
        self,
        grid: Grid,
        block: Block,
        weights: Tensor,
    ) -> None:
        """Merge a tile's largest far weights; unwanted weights become 0."""
        device = weights.device
        if grid.no_key is not None:
            weights[..., grid.no_key.to(device)[block.keys]] = 0.0
        if grid.no_query is not None:
            weights[:, :, grid.no_query.to(device)[block.queries]] = 0.0
        if grid.far is not None:
            q = torch.arange(block.queries.start, block.queries.stop, device=device)[:, None]
            k = torch.arange(block.keys.start, block.keys.stop, device=device)
            weights *= (q - k).abs() > grid.far

        # The largest n weights are in the n rows with the largest maxima: (text, head, row, key).
        before = self.weights[block.texts]
        maxima = weights.amax(-1)
        if not bool((maxima.amax(-1) > before[..., -1]).any()):
            return
        rows = maxima.topk(min(grid.n_links, maxima.shape[-1])).indices
        n_block_keys = weights.shape[3]
        candidates = weights.gather(2, rows[..., None].expand(-1, -1, -1, n_block_keys)).flatten(2)
        largest, number = candidates.topk(min(grid.n_links, candidates.shape[-1]))
        queries = block.queries.start + rows.gather(2, number // n_block_keys)
        keys = block.keys.start + number % n_block_keys
        # The largest of these and of the links before.
        largest, order = torch.cat([before, largest], -1).topk(grid.n_links)
        places = torch.cat([self.places[block.texts], queries * self.n_keys + keys], -1)
        self.weights[block.texts] = largest
        self.places[block.texts] = places.gather(-1, order).masked_fill_(largest <= 0, -1)
