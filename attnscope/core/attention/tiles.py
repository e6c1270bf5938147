"""Attention tile by tile: a block of queries against all their keys, in memory that grows with length alone.

Everything that an AttentionCall can say, in plain torch, on any device. What is not linear in the weights (the largest
weight, entropies) is computed while they lie in the cache. No gradient flows through. The tiles are ours, without the
online softmax of Dao et al. 2022: a tile holds all keys of its queries.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from attnscope.core.attention.precision import without_autocast
from attnscope.core.attention.seam import AttentionCall, attend, within_reach

TILE_ELEMENTS = 1_600_000
"""Weights in one tile. Scores and weights of that many take 13 MB in float32. A MiniLM forward with every measure on
texts of 500 takes 1.7 times as long with 100 thousand, 1.1 times with 400 thousand and with 3 million (one core)."""

MOST_ELEMENTS_ON_GPU = 256_000_000
"""Weights in one tile on a CUDA device. There each tile costs milliseconds of launches, whatever its size: a text of
16,384 tokens takes 6 times as long with 16 million (one H200)."""

GPU_BYTES_PER_ELEMENT = 96
"""A tile holds one weight for so many bytes of a GPU's memory. With what is computed from it, it takes an eighth."""

LEAST_QUERIES = 16
"""The fewest queries in one tile, however many keys there are: matrix products of fewer rows are no faster."""

_HIDDEN = -1e30
"""Added to the score of a key that may not be attended to: far below any score, and 0 times it is 0, not NaN."""

_LOWEST_BIAS = -1e29
"""Biases below this are this: finite numbers as low as finfo.min are scores like any other, above hidden ones."""

_LARGE_SCORE = 30.0
"""Scores beyond this are centred before they enter an entropy: 30 float32 roundings are 2e-6 nats."""


def tile_elements(device: torch.device) -> int:
    """Return about how many weights a tile holds on a device."""
    if device.type != "cuda":
        return TILE_ELEMENTS
    memory = torch.cuda.get_device_properties(device).total_memory
    return min(MOST_ELEMENTS_ON_GPU, memory // GPU_BYTES_PER_ELEMENT)


@dataclass(frozen=True, eq=False)
class Block:
    """Where a tile lies: some texts, some queries, and the keys that any of these queries may attend to.

    Attributes:
        texts: Which texts.
        queries: Which queries.
        keys: The smallest range of keys that holds all that these queries may attend to.
        near: The attention, if its causality or window hides keys within the block; else None.
        may: View of the call's mask on the block, broadcastable to (text, head, query, key); None = it hides nothing.
        empty: Which queries may attend to nothing, broadcastable to (text, head, query); None = there are none.
    """

    texts: slice
    queries: slice
    keys: slice
    near: AttentionCall | None = None
    may: Tensor | None = None
    empty: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """Return how many texts, queries and keys it holds."""
        n_texts = self.texts.stop - self.texts.start
        n_queries = self.queries.stop - self.queries.start
        return n_texts, n_queries, self.keys.stop - self.keys.start

    def allowed(self) -> Bool[Tensor, "#text #n_heads #query #key"] | None:
        """Return which query may attend to which key, bool; None = each to all."""
        if self.near is None:
            return self.may
        device = self.near.query.device
        queries = torch.arange(self.queries.start, self.queries.stop, device=device)
        keys = torch.arange(self.keys.start, self.keys.stop, device=device)
        return within_reach(self.near, self.may, queries, keys)


@dataclass(frozen=True, eq=False)
class Tile:
    """One block's scores and weights. Both lie in buffers that the next tile overwrites.

    Attributes:
        block: Where it lies.
        scores: The input of softmax: scaled, capped, biased; about -1e30 where hidden.
        weights: Contiguous; as `attention_weights` defines them.
        largest_score: The largest score of each query.
        log_sum: Logarithm of the softmax's denominator with its sinks; None = there are no sinks.
    """

    block: Block
    scores: Float[Tensor, "text n_heads query key"]
    weights: Float[Tensor, "text n_heads query key"]
    largest_score: Float[Tensor, "text n_heads query 1"]
    log_sum: Float[Tensor, "text n_heads query"] | None

    def entropies(
        self, largest_weight: Float[Tensor, "text n_heads query"]
    ) -> Float[Tensor, "text n_heads query"]:
        """Return - sum over k of A_qk ln A_qk, in nats, given the largest weights; overwrites the scores.

            H_q = sum over k of A_qk (lse_q - s_qk),    lse_q = max over k of s_qk - ln max over k of A_qk

        Source: ours; the definition with ln A_qk = s_qk - lse_q put in.
        """
        scores = self.scores
        empty = self.block.empty
        log_sum = self.log_sum
        if log_sum is None:
            log_sum = self.largest_score[..., 0] - largest_weight.log()
            # If each row of weights sums to 1, H_q = lse_q - sum over k of A_qk s_qk, which takes one pass less. Its
            # rounding is that of the scores, so these must be small; it is too coarse for float64.
            may_be_short = empty is None and scores.dtype != torch.float64
            if may_be_short and bool(self.largest_score.abs().max() <= _LARGE_SCORE):
                return log_sum - scores.mul_(self.weights).sum(-1)
        entropies = torch.sub(log_sum[..., None], scores, out=scores).mul_(self.weights).sum(-1)
        return entropies if empty is None else entropies.masked_fill(empty, 0.0)


def blocks(
    call: AttentionCall,
    elements: int | None = None,
    unit: int | None = None,
) -> list[Block]:
    """Cut an attention into tiles: whole short texts together, long ones into ranges of queries.

    Depends on the call's mask, causality and shapes alone, so what is worked out for a block serves every layer.

    Args:
        call: The attention.
        elements: About how many weights a tile may hold; None = `tile_elements`.
        unit: No tile holds queries on both sides of a multiple of so many; None = any may.

    Returns:
        Blocks that cover each query of every text once; none for no texts or no queries. Memory: views of the mask, and
        one truth value per query.
    """
    batch, n_heads, n_queries, _ = call.query.shape
    n_keys = call.key.shape[2]
    if not batch * n_queries:
        return []
    elements = tile_elements(call.query.device) if elements is None else elements
    row_elements = max(n_heads * n_keys, 1)
    texts_at_once = max(elements // (row_elements * n_queries), 1)
    rows_at_once = n_queries
    if texts_at_once == 1:
        rows_at_once = max(elements // row_elements, LEAST_QUERIES)
    if unit is None or unit >= n_queries:
        unit = n_queries
    else:
        texts_at_once = 1

    # Blocks hold no queries, keys or values of the call, but its mask with all keys.
    mask = None if call.mask is None else call.mask.expand(batch, -1, -1, n_keys)
    query, key, value = (part[..., :0].clone() for part in (call.query, call.key, call.value))
    masked = replace(call, query=query, key=key, value=value, mask=mask)
    parts = []
    for first in range(0, batch, texts_at_once):
        texts = slice(first, min(first + texts_at_once, batch))
        for start in range(0, n_queries, unit):
            stop = min(start + unit, n_queries)
            for row in range(start, stop, rows_at_once):
                queries = slice(row, min(row + rows_at_once, stop))
                parts.append(_block(masked, texts, queries))
    return parts


def _block(
    call: AttentionCall,
    texts: slice,
    queries: slice,
) -> Block:
    """Return the block of some texts and queries, with the smallest range of keys and the least mask that it needs."""
    # The range of keys that causality and window leave.
    start = 0
    stop = call.key.shape[2]
    if call.is_causal:
        stop = min(stop, queries.stop)
    if call.window is not None:
        stop = min(stop, queries.stop + call.window - 1)
        start = min(max(queries.start - call.window + 1, 0), stop)
    mask = call.mask
    if mask is not None:
        # Within it, the range of those that the mask lets any query see.
        mask = mask[texts, :, queries if mask.shape[2] > 1 else slice(None)]
        seen = start + mask[..., start:stop].flatten(0, 2).any(0).nonzero()
        stop = int(seen[-1]) + 1 if len(seen) else start
        start = int(seen[0]) if len(seen) else start
        mask = mask[..., start:stop]
    keys = slice(start, stop)
    if start == stop:
        empty = torch.ones(1, 1, 1, dtype=torch.bool, device=call.query.device)
        return Block(texts, queries, keys, empty=empty)
    if mask is not None and bool(mask.all()):
        mask = None
    has_reach = call.is_causal or call.window is not None
    block = Block(texts, queries, keys, call if has_reach else None, mask)
    allowed = block.allowed()
    if allowed is None or bool(allowed.all()):
        return Block(texts, queries, keys)
    empty = ~allowed.any(-1)
    return replace(block, empty=empty) if bool(empty.any()) else block


class Buffers:
    """Memory for scores and weights of tiles, kept from call to call. Serves one walk over tiles at a time.

    Memory taken anew for each layer of each batch, in ever other sizes, leaves gaps in the C library's heap, and each
    time the system hands out its pages one by one.
    """

    def __init__(self) -> None:
        self._pairs: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}

    def pair(
        self,
        size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> list[Tensor]:
        """Return two flat arrays of at least `size` numbers, of any content."""
        pair = self._pairs.pop((dtype, device), None)
        if pair is None or pair[0].numel() < size:
            # The old pair is freed before a larger one is taken.
            pair = None
            size = max(size, TILE_ELEMENTS)
            pair = [torch.empty(size, dtype=dtype, device=device) for _ in range(2)]
        self._pairs[dtype, device] = pair
        return pair


@torch.no_grad()
def tiles(
    call: AttentionCall,
    parts: list[Block] | None = None,
    buffers: Buffers | None = None,
) -> Iterator[Tile]:
    """Yield the weights of an attention, tile by tile.

        s_qk = scale * q · k,  softcap * tanh(s_qk / softcap) if there is a soft cap,  + bias_qk
        A_qk = exp(s_qk) / (exp(sink) + sum over allowed k' of exp(s_qk'))

    Args:
        call: The attention. Keys of grouped queries are not repeated. Dropout is not applied.
        parts: What `blocks` made of a call with the same mask, causality and shapes; None = cut it here.
        buffers: Where scores and weights lie; None = in memory of their own.

    Yields:
        Tiles in the order of the blocks; float64 for float64 queries, else float32. Weights of queries that may attend
        to nothing are zero. A block without keys has no tile. All the memory taken is two buffers of one tile.
    """
    batch, n_heads, all_queries, d_head = call.query.shape
    n_kv_heads = call.n_kv_heads
    dtype = torch.promote_types(call.query.dtype, torch.float32)
    parts = blocks(call) if parts is None else parts
    buffers = Buffers() if buffers is None else buffers
    largest = max((math.prod(block.shape) for block in parts), default=0) * n_heads
    flat = buffers.pair(largest, dtype, call.query.device)
    bias = None
    if call.bias is not None:
        bias = call.bias.expand(batch, -1, all_queries, call.key.shape[2])
    with without_autocast(call.query.device):
        keys = call.key.to(dtype)
        for block in parts:
            n_texts, n_queries, n_keys = block.shape
            if n_keys == 0:
                continue
            # Query heads of one key/value head lie end to end: (text · kv head, group · query, key).
            folded = (n_texts * n_kv_heads, n_heads // n_kv_heads * n_queries)
            shape = (n_texts, n_heads, n_queries, n_keys)
            scores, weights = (buffer[: math.prod(shape)].view(shape) for buffer in flat)
            queries = call.query[block.texts, :, block.queries]
            # Scaled into its final layout at once. Scaled after the product instead, weights are twice as far off.
            rows = torch.empty(queries.shape, dtype=dtype, device=queries.device)
            torch.mul(queries.to(dtype), call.scale, out=rows)
            columns = keys[block.texts, :, block.keys].reshape(folded[0], n_keys, d_head)
            torch.bmm(rows.view(*folded, d_head), columns.mT, out=scores.view(*folded, n_keys))
            if call.softcap is not None:
                scores.div_(call.softcap).tanh_().mul_(call.softcap)
            if bias is not None:
                block_bias = bias[block.texts, :, block.queries, block.keys].to(dtype)
                scores += block_bias.clamp(min=_LOWEST_BIAS)
            allowed = block.allowed()
            if allowed is not None:
                # Adding is ten times as fast as masked_fill, and the numbers added are shared by heads.
                hidden = torch.zeros(allowed.shape, dtype=dtype, device=scores.device)
                scores += hidden.masked_fill_(~allowed, _HIDDEN)
            largest_score = scores.amax(-1, keepdim=True)
            torch.softmax(scores, -1, out=weights)
            log_sum = None
            if call.sinks is not None:
                log_sum = largest_score[..., 0] - weights.amax(-1).log()
                # exp(s) / (exp(sink) + sum exp(s')) = softmax(s) * sigmoid(logsumexp(s') - sink)
                sinks = call.sinks.to(dtype)[:, None]
                weights *= (log_sum - sinks).sigmoid().unsqueeze(-1)
                log_sum = torch.logaddexp(log_sum, sinks)
            if block.empty is not None:
                weights.masked_fill_(block.empty.unsqueeze(-1), 0.0)
            yield Tile(block, scores, weights, largest_score, log_sum)


def times_values(
    weights: Float[Tensor, "text n_heads query key"],
    values: Float[Tensor, "text n_kv_heads key width"],
) -> Float[Tensor, "text n_heads query width"]:
    """Return a V for grouped heads, in the dtype of both, without repeating values; weights must be contiguous."""
    n_texts, n_heads, n_queries, n_keys = weights.shape
    n_kv_heads, width = values.shape[1], values.shape[3]
    rows = weights.view(n_texts * n_kv_heads, n_heads // n_kv_heads * n_queries, n_keys)
    product = torch.bmm(rows, values.reshape(n_texts * n_kv_heads, n_keys, width))
    return product.view(n_texts, n_heads, n_queries, width)


@torch.no_grad()
def attend_in_tiles(
    call: AttentionCall,
    read: Callable[[Tile], None] | None = None,
    parts: list[Block] | None = None,
    buffers: Buffers | None = None,
) -> Float[Tensor, "batch n_heads query d_value"]:
    """Return the output of an attention, whose tiles are read on the way.

    Args:
        call: The attention. Dropout is not applied.
        read: Gets each tile, in the order of the blocks, and may overwrite its scores and weights.
        parts: As for `tiles`.
        buffers: As for `tiles`.

    Returns:
        A V in the dtype of the values, without gradient; laid out as the model reads it next, heads side by side in
        each query's row. Zero where nothing may be attended to.
    """
    batch, n_heads, n_queries, _ = call.query.shape
    values = call.value.to(torch.promote_types(call.query.dtype, torch.float32))
    rows = values.new_zeros(batch, n_queries, n_heads, values.shape[3])
    output = rows.transpose(1, 2)
    for tile in tiles(call, parts, buffers):
        block = tile.block
        block_values = values[block.texts, :, block.keys]
        output[block.texts, :, block.queries] = times_values(tile.weights, block_values)
        if read is not None:
            read(tile)
    return output.to(call.value.dtype)


@torch.no_grad()
def attend_lean(call: AttentionCall) -> Float[Tensor, "batch n_heads query d_value"]:
    """Attend without a map, a mask or anything else of size queries times keys; dropout is not applied.

    Returns:
        The output as `seam.attend` gives it, in the dtype of the values, without gradient.
    """
    # torch's fused kernels need no map if they can express the call. They want one width and at least one key.
    is_fused = call.query.shape[3] == call.value.shape[3] and not call.dropout_p
    for name in ("bias", "softcap", "sinks", "window"):
        is_fused &= getattr(call, name) is None
    is_fused &= min(call.query.numel(), call.key.numel()) > 0
    # A mask that all heads and queries share is no larger than the keys.
    if call.mask is not None:
        is_fused &= call.query.device.type == "cpu" and not call.is_causal
        is_fused &= call.mask.shape[1:3] == (1, 1)
    return attend(call) if is_fused else attend_in_tiles(call)
