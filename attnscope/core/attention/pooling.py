"""Pool the attention of a long text into a grid of cells, and read off what else a picture of it shows.

That is the attention that each key receives, each query's entropy, and the far links: the largest weights A_qk of
which query and key are far apart. All of it comes exactly from one pass over tiles, for every AttentionCall. Memory
grows with queries + keys and with the grid, never with queries times keys. Ours.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from jaxtyping import Float, Int
from torch import Tensor

from attnscope.core.attention.precision import sum_dtype
from attnscope.core.attention.seam import AttentionCall
from attnscope.core.attention.tiles import TileBounds, tiles


@dataclass(frozen=True, eq=False)
class PoolingGrid:
    """Set the size of the cells, and which links are kept.

    Attributes:
        query_cell: How many queries share a row of cells, at least 1.
        key_cell: How many keys share a column of cells, at least 1.
        n_links: How many links to keep of each head.
        far: A link is far if query and key are more than this many tokens apart; None = all are, as between two texts.
        no_query: True = links of this query are left out, (query,), bool; None = those of no query.
        no_key: True = links to this key are left out, (key,), bool; None = those to no key.
    """

    query_cell: int
    key_cell: int
    n_links: int = 10
    far: int | None = None
    no_query: Tensor | None = None
    no_key: Tensor | None = None


@dataclass(frozen=True, eq=False)
class PooledAttention:
    """Hold a pooled attention.

    Attributes:
        cells: The pooled map, of ceil(query / query_cell) rows and ceil(key / key_cell) columns, float32: the share of
            attention that the queries of a row give to the keys of a column. The last row and column may hold fewer
            tokens.
        received: Attention that each key receives, sum over q of A_qk, float64. Its mean is 1 if there are as many
            queries as keys.
        entropy_nats: Entropy of each query's weights, float32 or better; 0 if it may attend to nothing.
        link_places: Query and key of each link, largest weight first; -1 for both where fewer weights are above 0.
        link_weights: The weights of these links; 0 where there is no link.
    """

    cells: Float[Tensor, "batch n_heads row column"]
    received: Float[Tensor, "batch n_heads key"]
    entropy_nats: Float[Tensor, "batch n_heads query"]
    link_places: Int[Tensor, "batch n_heads n_links 2"]
    link_weights: Float[Tensor, "batch n_heads n_links"]


@torch.no_grad()
def pool_attention(call: AttentionCall, grid: PoolingGrid) -> PooledAttention:
    """Pool an attention, and return the results on the CPU.

    Q and K are the queries and keys of a cell, and n_Q is how many queries of Q may attend to anything:

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

    # Round up, so that the cells hold all tokens.
    n_rows = -(-n_queries // grid.query_cell)
    n_columns = -(-n_keys // grid.key_cell)
    cells = zeros(n_rows, n_columns)
    # n_Q of each row of cells.
    n_attending = zeros(n_rows)
    received = zeros(n_keys)
    entropies = zeros(n_queries, dtype=dtype)
    links = _Links(zeros(grid.n_links, dtype=dtype), zeros(grid.n_links, 2, dtype=torch.int64) - 1)
    for tile in tiles(call):
        block = tile.block
        weights = tile.weights
        entropies[block.texts, :, block.queries] = tile.entropies(weights.amax(-1))

        # The row of cells of each query, (query,), the column of each key, (key,), and the range of both.
        queries, keys = block.positions(device)
        query_rows = queries // grid.query_cell
        key_columns = keys // grid.key_cell
        rows = slice(int(query_rows[0]), int(query_rows[-1]) + 1)
        columns = slice(int(key_columns[0]), int(key_columns[-1]) + 1)

        # Add up the queries of each row by a product with 0 and 1, (row, query) @ (text, head, query, key). Then add up
        # the keys of each column, (text, head, row, key) @ (key, column).
        in_row = F.one_hot(query_rows - rows.start).T.to(dtype)
        by_row = in_row @ weights
        received[block.texts, :, block.keys] += by_row.sum(2)
        in_column = F.one_hot(key_columns - columns.start).to(cells.dtype)
        cells[block.texts, :, rows, columns] += by_row.to(cells.dtype) @ in_column
        attends = torch.ones(weights.shape[:3], dtype=cells.dtype, device=device)
        if block.empty is not None:
            attends = attends.masked_fill(block.empty, 0.0)
        n_attending[block.texts].index_add_(2, query_rows, attends)
        # Last, because links overwrite the tile's weights.
        if grid.n_links:
            links.add(grid, block, weights)
    cells = cells / n_attending.clamp(min=1).unsqueeze(-1)
    return PooledAttention(
        cells=cells.float().cpu(),
        received=received.cpu(),
        entropy_nats=entropies.cpu(),
        link_places=links.places.cpu(),
        link_weights=links.weights.cpu(),
    )


@dataclass(frozen=True, eq=False)
class _Links:
    """Keep the largest far weights so far, (batch, head, link), largest first, with query and key of each.

    `places` are these, (batch, head, link, 2); -1 for both and a weight of 0 where there is no link yet.
    """

    weights: Tensor
    places: Tensor

    def add(
        self,
        grid: PoolingGrid,
        block: TileBounds,
        weights: Tensor,
    ) -> None:
        """Merge the largest far weights of a tile, (text, head, query, key); sets those that are no links to 0."""
        queries, keys = block.positions(weights.device)
        if grid.no_key is not None:
            weights[..., grid.no_key.to(weights.device)[block.keys]] = 0.0
        if grid.no_query is not None:
            weights[:, :, grid.no_query.to(weights.device)[block.queries]] = 0.0
        if grid.far is not None:
            weights *= (queries[:, None] - keys).abs() > grid.far

        # Most tiles of a long text have no larger weight than the links before.
        before = self.weights[block.texts]
        row_maxima = weights.amax(-1)
        if not (row_maxima.amax(-1) > before[..., -1]).any():
            return
        # The n largest weights lie in the n rows with the largest maxima: look for them in these rows alone.
        rows = row_maxima.topk(min(grid.n_links, len(queries))).indices
        candidates = weights.gather(2, rows[..., None].expand(-1, -1, -1, len(keys))).flatten(2)
        largest, flat_index = candidates.topk(min(grid.n_links, candidates.shape[-1]))
        link_queries = queries[rows.gather(2, flat_index // len(keys))]
        link_keys = keys[flat_index % len(keys)]
        # Keep the largest of these and of the links before.
        largest, order = torch.cat([before, largest], -1).topk(grid.n_links)
        new_places = torch.stack([link_queries, link_keys], -1)
        places = torch.cat([self.places[block.texts], new_places], 2)
        places = places.gather(2, order[..., None].expand(-1, -1, -1, 2))
        self.weights[block.texts] = largest
        self.places[block.texts] = places.masked_fill_(largest[..., None] <= 0, -1)
