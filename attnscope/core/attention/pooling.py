"""Pool the attention of a long text into a grid of cells, small enough to draw.

The same pass also computes the attention that each key receives, the entropy of each query, and the *far links*: the
largest weights A_qk whose query and key are far apart. All results are exact.

The pass reads the attention tile by tile (`core.attention.tiles`): a tile holds the weights of some queries on all
their keys. So memory grows with queries + keys and with the grid, never with queries times keys.

Source: ours.
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
    """Set the size of the cells, and which far links are kept.

    Attributes:
        query_cell: Height of a cell: how many queries it pools, at least 1.
        key_cell: Width of a cell: how many keys it pools, at least 1.
        n_links: How many links to keep per head.
        far_tokens: A link is far if query and key are more than this many tokens apart. None = every link is far, such
            as in cross-attention, where query and key belong to different texts.
        is_excluded_query: Queries whose links are left out, (query,), bool; None = no query is excluded.
        is_excluded_key: Keys whose links are left out, (key,), bool; None = no key is excluded.
    """

    query_cell: int
    key_cell: int
    n_links: int = 10
    far_tokens: int | None = None
    is_excluded_query: Tensor | None = None
    is_excluded_key: Tensor | None = None


@dataclass(frozen=True, eq=False)
class PooledAttention:
    """Hold the pooled attention of one layer.

    Attributes:
        cells: The pooled map, float32, of ceil(n_queries / query_cell) rows and ceil(n_keys / key_cell) columns. A cell
            is the share of attention that the queries of its row give to the keys of its column. The last row and
            column may pool fewer tokens than the others.
        received: Attention that each key receives, sum over q of A_qk, float64. Its mean is 1 if there are as many
            queries as keys.
        entropy_nats: Entropy of each query's weights, float32 or better; 0 if the query may attend to no key.
        link_places: (query, key) of each link, largest weight first. A head with fewer than n_links far weights above 0
            has (-1, -1) in the remaining entries.
        link_weights: The weight of each link; 0 where `link_places` is (-1, -1).
    """

    cells: Float[Tensor, "batch n_heads row column"]
    received: Float[Tensor, "batch n_heads key"]
    entropy_nats: Float[Tensor, "batch n_heads query"]
    link_places: Int[Tensor, "batch n_heads n_links 2"]
    link_weights: Float[Tensor, "batch n_heads n_links"]


@torch.no_grad()
def pool_attention(call: AttentionCall, grid: PoolingGrid) -> PooledAttention:
    """Pool an attention, and return the results on the CPU.

    Q and K are the queries and keys of a cell, and n_Q is the number of queries in Q that may attend to any key:

        cell_QK = 1 / n_Q * sum over q in Q, k in K of A_qk
        received_k = sum over q of A_qk,   entropy_q = - sum over k of A_qk ln A_qk,
        links: the n_links largest A_qk with |q - k| > far_tokens, q and k not excluded

    Without keys or queries everything is zero.

    Source:
        Ours. Weights are summed over keys and averaged over queries, so rows still sum to 1. Clark et al. 2019 (section
        4.1) merge the pieces of a word in the same way.
    """
    device = call.query.device
    dtype = torch.promote_types(call.query.dtype, torch.float32)
    batch, n_heads, n_queries, _ = call.query.shape
    n_keys = call.key.shape[2]

    def zeros(*shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.zeros(batch, n_heads, *shape, dtype=dtype or sum_dtype(device), device=device)

    # -(-a // b) is a / b rounded up, so that the cells cover all tokens.
    n_rows = -(-n_queries // grid.query_cell)
    n_columns = -(-n_keys // grid.key_cell)
    cells = zeros(n_rows, n_columns)
    # n_Q of each row of cells, (batch, head, row).
    n_attending = zeros(n_rows)
    received = zeros(n_keys)
    entropies = zeros(n_queries, dtype=dtype)
    links = _Links(zeros(grid.n_links, dtype=dtype), zeros(grid.n_links, 2, dtype=torch.int64) - 1)
    for tile in tiles(call):
        block = tile.block
        weights = tile.weights
        entropies[block.texts, :, block.queries] = tile.entropies(weights.amax(-1))

        # The row of cells of each query, (query,), and the column of each key, (key,). A tile holds consecutive queries
        # and keys, so it touches a consecutive range of rows and of columns.
        queries, keys = block.positions(device)
        query_rows = queries // grid.query_cell
        key_columns = keys // grid.key_cell
        rows = slice(int(query_rows[0]), int(query_rows[-1]) + 1)
        columns = slice(int(key_columns[0]), int(key_columns[-1]) + 1)

        # Sum the queries of each row, by a product with a 0/1 matrix: (row, query) @ (text, head, query, key) gives
        # (text, head, row, key). Then sum the keys of each column: @ (key, column) gives (text, head, row, column).
        in_row = F.one_hot(query_rows - rows.start).T.to(dtype)
        by_row = in_row @ weights
        received[block.texts, :, block.keys] += by_row.sum(2)
        in_column = F.one_hot(key_columns - columns.start).to(cells.dtype)
        cells[block.texts, :, rows, columns] += by_row.to(cells.dtype) @ in_column
        # 1 for each query that may attend to some key, (text, head, query).
        attends = torch.ones(weights.shape[:3], dtype=cells.dtype, device=device)
        if block.is_empty_row is not None:
            attends = attends.masked_fill(block.is_empty_row, 0.0)
        n_attending[block.texts].index_add_(2, query_rows, attends)
        # The links come last, because they overwrite the weights of the tile.
        if grid.n_links:
            links.add(grid, block, weights)
    # From sums to means. Where n_Q is 0 the sum is 0 too, so any divisor gives 0.
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
    """Keep the n_links largest far weights of the tiles that were added.

    Attributes:
        weights: (batch, head, link), largest first; 0 where there is no link yet.
        places: (query, key) of each link, (batch, head, link, 2); (-1, -1) where there is no link yet.
    """

    weights: Tensor
    places: Tensor

    def add(
        self,
        grid: PoolingGrid,
        block: TileBounds,
        weights: Tensor,
    ) -> None:
        """Merge the largest far weights of a tile into the links.

        `weights` are those of the tile, (text, head, query, key). Weights that are near or excluded are set to 0 in it.
        """
        queries, keys = block.positions(weights.device)
        if grid.is_excluded_key is not None:
            weights[..., grid.is_excluded_key.to(weights.device)[block.keys]] = 0.0
        if grid.is_excluded_query is not None:
            weights[:, :, grid.is_excluded_query.to(weights.device)[block.queries]] = 0.0
        if grid.far_tokens is not None:
            weights *= (queries[:, None] - keys).abs() > grid.far_tokens

        # Most tiles of a long text have no weight above the smallest link so far, so most calls end here.
        old_weights = self.weights[block.texts]
        row_maxima = weights.amax(-1)
        if not (row_maxima.amax(-1) > old_weights[..., -1]).any():
            return
        # The n largest weights lie in the n rows with the largest maxima, so only these rows are searched: `rows` is
        # (text, head, row), `candidates` (text, head, row · key).
        rows = row_maxima.topk(min(grid.n_links, len(queries))).indices
        candidates = weights.gather(2, rows[..., None].expand(-1, -1, -1, len(keys))).flatten(2)
        largest, flat_index = candidates.topk(min(grid.n_links, candidates.shape[-1]))
        link_queries = queries[rows.gather(2, flat_index // len(keys))]
        link_keys = keys[flat_index % len(keys)]
        # Of the old and the new links, keep the n_links largest.
        largest, order = torch.cat([old_weights, largest], -1).topk(grid.n_links)
        new_places = torch.stack([link_queries, link_keys], -1)
        places = torch.cat([self.places[block.texts], new_places], 2)
        places = places.gather(2, order[..., None].expand(-1, -1, -1, 2))
        self.weights[block.texts] = largest
        self.places[block.texts] = places.masked_fill_(largest[..., None] <= 0, -1)
