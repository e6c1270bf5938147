"""Compute attention tile by tile, in memory linear in the text's length.

A *block* (`TileBounds`) is a range of texts, queries and keys. A *tile* holds the scores and weights of one block: of
some queries, on all keys that they may attend to. All tiles share two buffers, so read a tile before you ask the
iterator for the next one.

It supports every field of an AttentionCall (the inputs of one attention layer) except dropout, in plain torch, on any
device, without gradients. The dense map is never computed as a whole.

Source: ours. There is no online softmax (Dao et al. 2022), because a tile holds all keys of its queries.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from attnscope.core.attention.seam import AttentionCall, attend, visible_mask, weighted_values

TILE_ELEMENTS = 1_600_000
"""About how many weights one tile holds on a CPU. Scores and weights together take 13 MB in float32.

Measured with a MiniLM forward pass with every measure, on texts of 500 tokens and one core. Relative time by million
weights per tile: 0.1: 1.7; 0.4: 1.1; 1.6: 1.0; 3: 1.1."""

MAX_TILE_ELEMENTS_ON_GPU = 256_000_000
"""The most weights of one tile on a CUDA device. There each tile costs milliseconds of kernel launches, whatever its
size. With tiles of 16 million weights a text of 16,384 tokens takes 6 times as long (one H200)."""

GPU_BYTES_PER_TILE_ELEMENT = 96
"""A tile on a GPU holds one weight per 96 bytes of the GPU's memory. A tile, together with the arrays that are computed
from it, then fills an eighth of the memory."""

MIN_QUERIES_PER_TILE = 16
"""The fewest queries in one tile, however many keys there are. Products of matrices with fewer rows are no faster."""

_HIDDEN_KEY_SCORE = -1e30
"""Added to the scores of keys that the mask hides. As with -inf, their weights become 0. But the product of weight and
score, which entropies sum up, is 0 instead of NaN."""

_LOWEST_BIAS = -1e29
"""Biases below this are clamped to it. A key with a bias of finfo.min is not hidden, so its score must stay above those
of hidden keys."""

_MAX_EXACT_SCORE = 30.0
"""Up to this absolute value, float32 scores are exact enough for the short formula of entropies: the rounding of 30 in
float32 changes an entropy by 2e-6 nats."""


def tile_elements(device: torch.device) -> int:
    """Return about how many weights a tile should hold on a device."""
    if device.type != "cuda":
        return TILE_ELEMENTS
    memory = torch.cuda.get_device_properties(device).total_memory
    return min(MAX_TILE_ELEMENTS_ON_GPU, memory // GPU_BYTES_PER_TILE_ELEMENT)


@dataclass(frozen=True, eq=False)
class TileBounds:
    """Define a block: a range of texts, queries and keys, and which of the keys each query may attend to.

    Queries and keys both start at position 0 of their text.

    Attributes:
        texts: Range of texts of the batch.
        queries: Range of queries.
        keys: The smallest range that holds all keys that these queries may attend to.
        is_causal: Whether causality hides keys of this range: those after the query.
        window: The sliding window, if it can hide keys of this range: keys j of query i with |i - j| >= window. None =
            it hides no key.
        mask: View of the call's mask on the block, broadcastable to (text, head, query, key); None = it hides no key.
        is_empty_row: True for queries that may attend to no key, broadcastable to (text, head, query); None = there is
            no such query.
    """

    texts: slice
    queries: slice
    keys: slice
    is_causal: bool = False
    window: int | None = None
    mask: Tensor | None = None
    is_empty_row: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """Return the numbers of texts, queries and keys."""
        n_texts = self.texts.stop - self.texts.start
        n_queries = self.queries.stop - self.queries.start
        return n_texts, n_queries, self.keys.stop - self.keys.start

    def positions(self, device: torch.device) -> tuple[Int[Tensor, " query"], Int[Tensor, " key"]]:
        """Return the positions of its queries and of its keys in their texts, from 0."""
        queries = torch.arange(self.queries.start, self.queries.stop, device=device)
        keys = torch.arange(self.keys.start, self.keys.stop, device=device)
        return queries, keys

    def allowed(self, device: torch.device) -> Bool[Tensor, "#text #n_heads #query #key"] | None:
        """Return which query may attend to which key, bool; None = every query to every key of the block."""
        queries, keys = self.positions(device)
        return visible_mask(self.mask, queries, keys, self.is_causal, self.window)


@dataclass(frozen=True, eq=False)
class Tile:
    """Hold the scores and weights of one block, in buffers that the next tile overwrites.

    Attributes:
        block: The texts, queries and keys of the tile.
        scores: The input of softmax: scaled, soft-capped, biased. About -1e30 where a key is hidden.
        weights: The exact softmax weights, contiguous, as `seam.attention_weights` returns them.
        largest_score: The largest score of each query.
        log_sum: Logarithm of the softmax's denominator, with the sink; None if the model has no sinks.
    """

    block: TileBounds
    scores: Float[Tensor, "text n_heads query key"]
    weights: Float[Tensor, "text n_heads query key"]
    largest_score: Float[Tensor, "text n_heads query 1"]
    log_sum: Float[Tensor, "text n_heads query"] | None

    def entropies(
        self, largest_weight: Float[Tensor, "text n_heads query"]
    ) -> Float[Tensor, "text n_heads query"]:
        """Return the entropy of each query, - sum over k of A_qk ln A_qk, in nats; overwrites the scores.

            ln A_qk = s_qk - lse_q,     so  H_q = sum over k of A_qk (lse_q - s_qk)

        lse_q is the log-sum-exp of the scores. The key with the largest weight has the largest score, so without sinks
        lse_q = max over k of s_qk - ln max over k of A_qk.

        `largest_weight` is the maximum of the weights over keys. Callers need it anyway, so they pass it.

        Source: ours.
        """
        scores = self.scores
        is_empty_row = self.block.is_empty_row
        log_sum = self.log_sum
        if log_sum is None:
            log_sum = self.largest_score[..., 0] - largest_weight.log()
            # The short formula for rows that sum to 1, H_q = lse_q - sum over k of A_qk s_qk, saves a pass over memory.
            # But its rounding error grows with the scores. So it is used only for float32, and only for small scores.
            can_use_short_formula = is_empty_row is None and scores.dtype != torch.float64
            if can_use_short_formula and self.largest_score.abs().max() <= _MAX_EXACT_SCORE:
                return log_sum - scores.mul_(self.weights).sum(-1)
        entropies = torch.sub(log_sum[..., None], scores, out=scores).mul_(self.weights).sum(-1)
        return entropies if is_empty_row is None else entropies.masked_fill(is_empty_row, 0.0)


def cut_blocks(
    call: AttentionCall,
    elements: int | None = None,
    queries_per_unit: int | None = None,
) -> list[TileBounds]:
    """Cut an attention into blocks that each fit a tile: several short texts, or some queries of a long text.

    Blocks depend only on the call's mask, causality, window and shapes. So layers that share these share the blocks.

    Args:
        call: The attention.
        elements: About how many weights a tile may hold; None = `tile_elements`.
        queries_per_unit: Each text is first cut into units of this many queries, for callers that add up each unit on
            its own. A block of some queries stays within one unit. None = each text is one unit.

    Returns:
        Blocks that cover each query of every text once; an empty list if there are no texts or no queries. They hold
        views of the mask, and one bool per query.
    """
    batch, n_heads, n_queries, _ = call.query.shape
    n_keys = call.key.shape[2]
    if not batch * n_queries:
        return []
    elements = tile_elements(call.query.device) if elements is None else elements
    row_elements = max(n_heads * n_keys, 1)
    queries_per_block = max(elements // row_elements, MIN_QUERIES_PER_TILE)
    # Several texts share a block if each text is a single unit, and if they fit.
    queries_per_unit = min(queries_per_unit or n_queries, n_queries)
    texts_per_block = 1
    if queries_per_unit == n_queries:
        texts_per_block = max(elements // (row_elements * n_queries), 1)

    mask = None if call.mask is None else call.mask.expand(batch, -1, -1, n_keys)
    blocks = []
    for first_text in range(0, batch, texts_per_block):
        texts = slice(first_text, min(first_text + texts_per_block, batch))
        for unit_start in range(0, n_queries, queries_per_unit):
            unit_stop = min(unit_start + queries_per_unit, n_queries)
            for start in range(unit_start, unit_stop, queries_per_block):
                queries = slice(start, min(start + queries_per_block, unit_stop))
                blocks.append(_narrow_block(call, mask, texts, queries))
    return blocks


def _narrow_block(
    call: AttentionCall,
    mask: Tensor | None,
    texts: slice,
    queries: slice,
) -> TileBounds:
    """Return the block of some texts and queries, with the smallest range of keys that they may attend to.

    Causality, window and mask are left out of the block if they hide no key of this range.

    `mask` is the call's mask, (batch, #n_heads, #query, key).
    """
    device = call.query.device
    # Narrow the range of keys by causality and window. Query i and key i are at the same position.
    start = 0
    stop = call.key.shape[2]
    if call.is_causal:
        stop = min(stop, queries.stop)
    if call.window is not None:
        stop = min(stop, queries.stop + call.window - 1)
        start = min(max(queries.start - call.window + 1, 0), stop)
    if mask is not None:
        # Narrow the range further: to the first and the last key that the mask shows to any query.
        mask = mask[texts]
        if mask.shape[2] > 1:
            mask = mask[:, :, queries]
        visible = start + mask[..., start:stop].flatten(0, 2).any(0).nonzero()
        stop = int(visible[-1]) + 1 if len(visible) else start
        start = int(visible[0]) if len(visible) else start
        mask = mask[..., start:stop]
    keys = slice(start, stop)
    if start == stop:
        # No query of the block may attend to any key.
        is_empty_row = torch.ones(1, 1, 1, dtype=torch.bool, device=device)
        return TileBounds(texts, queries, keys, is_empty_row=is_empty_row)
    # Drop the mask if it hides no key of this range, then all conditions if together they hide none.
    if mask is not None and mask.all():
        mask = None
    block = TileBounds(texts, queries, keys, call.is_causal, call.window, mask)
    allowed = block.allowed(device)
    if allowed is None or allowed.all():
        return TileBounds(texts, queries, keys)
    is_empty_row = ~allowed.any(-1)
    return replace(block, is_empty_row=is_empty_row) if is_empty_row.any() else block


class TileBuffers:
    """Keep the memory for scores and weights of a tile from call to call, for one iteration over tiles at a time.

    If each layer of each batch allocated its own arrays, in varying sizes, the heap of the C library would fragment,
    and each new array would cost a page fault per page.
    """

    def __init__(self) -> None:
        self._pairs: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}

    def scores_and_weights(
        self,
        size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> list[Tensor]:
        """Return two flat arrays of at least `size` numbers, for scores and for weights; their content is undefined."""
        scores_and_weights = self._pairs.pop((dtype, device), None)
        if scores_and_weights is None or scores_and_weights[0].numel() < size:
            # Drop the last reference to the old arrays, so that they are freed before larger ones are allocated.
            scores_and_weights = None
            size = max(size, TILE_ELEMENTS)
            scores_and_weights = [torch.empty(size, dtype=dtype, device=device) for _ in range(2)]
        self._pairs[dtype, device] = scores_and_weights
        return scores_and_weights


@torch.no_grad()
def tiles(
    call: AttentionCall,
    blocks: list[TileBounds] | None = None,
    buffers: TileBuffers | None = None,
) -> Iterator[Tile]:
    """Yield the scores and weights of an attention, tile by tile. Each tile overwrites the one before.

        s_qk = scale * q · k,  softcap * tanh(s_qk / softcap) if there is a soft cap,  + bias_qk
        A_qk = exp(s_qk) / (exp(sink) + sum over allowed k' of exp(s_qk'))

    Args:
        call: The attention. Dropout is not applied.
        blocks: What `cut_blocks` returned for a call with the same mask, causality, window and shapes; None = compute
            the blocks here.
        buffers: Memory for scores and weights; None = allocate it here.

    Yields:
        Tiles in the order of the blocks; float64 for float64 queries, else float32. The weights of a query that may
        attend to no key are zeros. A block without keys has no tile. Memory: two buffers of the size of the largest
        tile.
    """
    batch, n_heads, all_queries, d_head = call.query.shape
    n_kv_heads = call.n_kv_heads
    device = call.query.device
    dtype = torch.promote_types(call.query.dtype, torch.float32)
    blocks = cut_blocks(call) if blocks is None else blocks
    buffers = TileBuffers() if buffers is None else buffers
    largest = max((math.prod(block.shape) for block in blocks), default=0) * n_heads
    flat_buffers = buffers.scores_and_weights(largest, dtype, device)
    bias = None
    if call.bias is not None:
        bias = call.bias.expand(batch, -1, all_queries, call.key.shape[2])
    with torch.autocast(device.type, enabled=False):
        keys = call.key.to(dtype)
        for block in blocks:
            n_texts, n_queries, n_keys = block.shape
            if n_keys == 0:
                continue
            # The query heads that share a key/value head are joined along the query axis, so that one matrix product
            # serves them without a copy of the keys: (text · kv_head, head of the group · query, key).
            grouped_shape = (n_texts * n_kv_heads, n_heads // n_kv_heads * n_queries)
            shape = (n_texts, n_heads, n_queries, n_keys)
            scores, weights = (buffer[: math.prod(shape)].view(shape) for buffer in flat_buffers)
            queries = call.query[block.texts, :, block.queries]
            # Queries are scaled before the product, because scaling the scores has twice the rounding error. Writing
            # to `out` also makes them contiguous, in the same pass.
            scaled = torch.empty(queries.shape, dtype=dtype, device=device)
            torch.mul(queries.to(dtype), call.scale, out=scaled)
            block_keys = keys[block.texts, :, block.keys].reshape(grouped_shape[0], n_keys, d_head)
            torch.bmm(
                scaled.view(*grouped_shape, d_head),
                block_keys.mT,
                out=scores.view(*grouped_shape, n_keys),
            )
            if call.softcap is not None:
                scores.div_(call.softcap).tanh_().mul_(call.softcap)
            if bias is not None:
                block_bias = bias[block.texts, :, block.queries, block.keys].to(dtype)
                scores += block_bias.clamp(min=_LOWEST_BIAS)
            allowed = block.allowed(device)
            if allowed is not None:
                # Add about -1e30 to hidden keys. The added tensor is shared by the heads, which makes this ten times as
                # fast as masked_fill on all scores.
                hidden = torch.zeros(allowed.shape, dtype=dtype, device=device)
                scores += hidden.masked_fill_(~allowed, _HIDDEN_KEY_SCORE)
            largest_score = scores.amax(-1, keepdim=True)
            torch.softmax(scores, -1, out=weights)
            log_sum = None
            if call.sinks is not None:
                # log_sum is first that of the keys alone: see `Tile.entropies`.
                log_sum = largest_score[..., 0] - weights.amax(-1).log()
                # exp(s) / (exp(sink) + sum exp(s')) = softmax(s) * sigmoid(logsumexp(s') - sink)
                sinks = call.sinks.to(dtype)[:, None]
                weights *= (log_sum - sinks).sigmoid().unsqueeze(-1)
                # Now add the sink.
                log_sum = torch.logaddexp(log_sum, sinks)
            if block.is_empty_row is not None:
                weights.masked_fill_(block.is_empty_row.unsqueeze(-1), 0.0)
            yield Tile(block, scores, weights, largest_score, log_sum)


@torch.no_grad()
def attend_in_tiles(
    call: AttentionCall,
    read: Callable[[Tile], None] | None = None,
    blocks: list[TileBounds] | None = None,
    buffers: TileBuffers | None = None,
) -> Float[Tensor, "batch n_heads query d_value"]:
    """Return the output of an attention, and call a function with each tile.

    Args:
        call: The attention. Dropout is not applied.
        read: Called with each tile, in the order of the blocks; may overwrite its scores and weights.
        blocks: As for `tiles`.
        buffers: As for `tiles`.

    Returns:
        The product of weights and values, in the dtype of the values, without gradient; zeros for queries that may
        attend to no key. In memory the heads of a query are adjacent, as the output projection needs them.
    """
    batch, n_heads, n_queries, _ = call.query.shape
    values = call.value.to(torch.promote_types(call.query.dtype, torch.float32))
    heads_side_by_side = values.new_zeros(batch, n_queries, n_heads, values.shape[3])
    output = heads_side_by_side.transpose(1, 2)
    for tile in tiles(call, blocks, buffers):
        block = tile.block
        block_values = values[block.texts, :, block.keys]
        output[block.texts, :, block.queries] = weighted_values(tile.weights, block_values)
        if read is not None:
            read(tile)
    return output.to(call.value.dtype)


@torch.no_grad()
def attend_without_map(call: AttentionCall) -> Float[Tensor, "batch n_heads query d_value"]:
    """Return the output of an attention in memory linear in queries and keys. Dropout is not applied.

    No array of queries times keys is made, neither weights nor a mask.

    Returns:
        The output of `seam.attend` within rounding, in the dtype of the values, without gradient.
    """
    # `attend` calls torch's fused kernel. The kernel makes no array of queries times keys if queries and values have
    # one width, and there is at least one key. `attend` would apply dropout, and builds a mask for the other options.
    is_fused = call.query.shape[3] == call.value.shape[3] and not call.dropout_p
    for option in (call.bias, call.softcap, call.sinks, call.window):
        is_fused &= option is None
    is_fused &= min(call.query.numel(), call.key.numel()) > 0
    # A mask for the kernel must be shared by all heads and queries: then it is no larger than the keys. Causality would
    # add an axis of queries to it. On a GPU, flash attention takes no mask, and the
    # kernel that is used instead may make the map.
    if call.mask is not None:
        is_fused &= call.query.device.type == "cpu" and not call.is_causal
        is_fused &= call.mask.shape[1:3] == (1, 1)
    return attend(call) if is_fused else attend_in_tiles(call)
