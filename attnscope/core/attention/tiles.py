"""Compute attention tile by tile: some queries against all of their keys, in memory linear in the text's length.

It supports every field of an AttentionCall, in plain torch, on any device, without gradients. Whoever walks over the
tiles reads a tile's weights and entropies before the next one overwrites them, so no whole map is kept. The tiles are
ours. They need no online softmax (Dao et al. 2022), because a tile holds all keys of its queries.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from attnscope.core.attention.seam import AttentionCall, attend, visible_mask, weighted_values

TILE_ELEMENTS = 1_600_000
"""About how many weights one tile holds: with its scores they take 13 MB in float32. A MiniLM forward pass with every
measure, on texts of 500 tokens and one core, is fastest so: tiles of 0.1 million weights take 1.7 times as long, those
of 0.4 million and of 3 million 1.1 times."""

MAX_ELEMENTS_ON_GPU = 256_000_000
"""The most weights of one tile on a CUDA device. There a tile costs milliseconds of kernel launches, whatever its size:
with tiles of 16 million weights a text of 16,384 tokens takes 6 times as long (one H200)."""

GPU_BYTES_PER_ELEMENT = 96
"""Bytes of a GPU's memory for each weight of a tile. The tile and what is computed from it then fill an eighth."""

MIN_QUERIES = 16
"""The fewest queries in one tile, however many keys there are: matrix products of fewer rows are no faster."""

_HIDDEN_SCORE = -1e30
"""Added to the scores of hidden keys instead of -inf: their weights are 0 as well, and 0 times their scores is not NaN
in an entropy."""

_LOWEST_BIAS = -1e29
"""Lower biases are raised to this: one of finfo.min is a score like any other, and must stay above hidden ones."""

_LARGE_SCORE = 30.0
"""Up to this size scores may be added up as they are: the rounding of 30 in float32 is 2e-6 nats of an entropy."""


def tile_elements(device: torch.device) -> int:
    """Return about how many weights a tile should hold on a device."""
    if device.type != "cuda":
        return TILE_ELEMENTS
    memory = torch.cuda.get_device_properties(device).total_memory
    return min(MAX_ELEMENTS_ON_GPU, memory // GPU_BYTES_PER_ELEMENT)


@dataclass(frozen=True, eq=False)
class TileBounds:
    """Say which texts, queries and keys a tile is of, and which of the keys each query may attend to.

    Attributes:
        texts: Which texts of the batch.
        queries: Which queries.
        keys: The smallest range of keys that holds all that these queries may attend to.
        is_causal: Whether causality hides keys of this range, as in an AttentionCall.
        window: The call's sliding window, if it may hide keys of this range; None = it hides none.
        mask: View of the call's mask on the block, broadcastable to (text, head, query, key); None = it hides nothing.
        empty: Which queries may attend to nothing, broadcastable to (text, head, query); None = there are none.
    """

    texts: slice
    queries: slice
    keys: slice
    is_causal: bool = False
    window: int | None = None
    mask: Tensor | None = None
    empty: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """Return how many texts, queries and keys it holds."""
        n_texts = self.texts.stop - self.texts.start
        n_queries = self.queries.stop - self.queries.start
        return n_texts, n_queries, self.keys.stop - self.keys.start

    def positions(self, device: torch.device) -> tuple[Int[Tensor, " query"], Int[Tensor, " key"]]:
        """Return the positions of its queries and of its keys in their texts, from 0."""
        queries = torch.arange(self.queries.start, self.queries.stop, device=device)
        keys = torch.arange(self.keys.start, self.keys.stop, device=device)
        return queries, keys

    def allowed(self, device: torch.device) -> Bool[Tensor, "#text #n_heads #query #key"] | None:
        """Return which query may attend to which key, bool; None = each to all."""
        queries, keys = self.positions(device)
        return visible_mask(self.mask, queries, keys, self.is_causal, self.window)


@dataclass(frozen=True, eq=False)
class Tile:
    """Hold the scores and weights of one block, in buffers that the next tile overwrites.

    Attributes:
        block: The texts, queries and keys that it is of.
        scores: The input of softmax: scaled, capped, biased; about -1e30 where a key is hidden.
        weights: The weights that `attention_weights` defines, contiguous.
        largest_score: The largest score of each query.
        log_sum: Logarithm of the softmax's denominator, the sink included; None = there are no sinks.
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

            H_q = sum over k of A_qk (lse_q - s_qk),    lse_q = max over k of s_qk - ln max over k of A_qk

        Source: ours; the definition with ln A_qk = s_qk - lse_q, where lse is the log-sum-exp of the scores.
        """
        scores = self.scores
        empty = self.block.empty
        log_sum = self.log_sum
        if log_sum is None:
            log_sum = self.largest_score[..., 0] - largest_weight.log()
            # Where each row of weights sums to 1, H_q = lse_q - sum over k of A_qk s_qk, one pass over memory less. Its
            # error is the rounding of the scores: for float32 that is small enough if they are, for float64 never.
            may_be_short = empty is None and scores.dtype != torch.float64
            if may_be_short and self.largest_score.abs().max() <= _LARGE_SCORE:
                return log_sum - scores.mul_(self.weights).sum(-1)
        entropies = torch.sub(log_sum[..., None], scores, out=scores).mul_(self.weights).sum(-1)
        return entropies if empty is None else entropies.masked_fill(empty, 0.0)


def cut_blocks(
    call: AttentionCall,
    elements: int | None = None,
    unit: int | None = None,
) -> list[TileBounds]:
    """Cut an attention into the blocks of its tiles: several short texts each, or a range of a long text's queries.

    Blocks depend on the call's mask, causality, window and shapes alone, so layers that share these share the blocks.

    Args:
        call: The attention.
        elements: About how many weights a tile may hold; None = `tile_elements`.
        unit: Each text is first cut into ranges of so many queries, and no block reaches into two of them; None = not
            cut.

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
    queries_per_block = max(elements // row_elements, MIN_QUERIES)
    # Several whole texts share a block where they fit into it, and are not cut into units.
    unit = min(unit or n_queries, n_queries)
    texts_per_block = 1
    if unit == n_queries:
        texts_per_block = max(elements // (row_elements * n_queries), 1)

    mask = None if call.mask is None else call.mask.expand(batch, -1, -1, n_keys)
    blocks = []
    for first_text in range(0, batch, texts_per_block):
        texts = slice(first_text, min(first_text + texts_per_block, batch))
        for unit_start in range(0, n_queries, unit):
            unit_stop = min(unit_start + unit, n_queries)
            for start in range(unit_start, unit_stop, queries_per_block):
                queries = slice(start, min(start + queries_per_block, unit_stop))
                blocks.append(_cut_block(call, mask, texts, queries))
    return blocks


def _cut_block(
    call: AttentionCall,
    mask: Tensor | None,
    texts: slice,
    queries: slice,
) -> TileBounds:
    """Return the block of some texts and queries, with the smallest range of keys and the least mask that it needs.

    `mask` is the call's mask, (batch, #n_heads, #query, key).
    """
    device = call.query.device
    # The range of keys that causality and window leave.
    start = 0
    stop = call.key.shape[2]
    if call.is_causal:
        stop = min(stop, queries.stop)
    if call.window is not None:
        stop = min(stop, queries.stop + call.window - 1)
        start = min(max(queries.start - call.window + 1, 0), stop)
    if mask is not None:
        # The mask leaves less: from the first to the last key of this range that it shows to any query.
        mask = mask[texts]
        if mask.shape[2] > 1:
            mask = mask[:, :, queries]
        visible = start + mask[..., start:stop].flatten(0, 2).any(0).nonzero()
        stop = int(visible[-1]) + 1 if len(visible) else start
        start = int(visible[0]) if len(visible) else start
        mask = mask[..., start:stop]
    keys = slice(start, stop)
    if start == stop:
        empty = torch.ones(1, 1, 1, dtype=torch.bool, device=device)
        return TileBounds(texts, queries, keys, empty=empty)
    # Within the range, keep what still hides keys of some query.
    if mask is not None and mask.all():
        mask = None
    block = TileBounds(texts, queries, keys, call.is_causal, call.window, mask)
    allowed = block.allowed(device)
    if allowed is None or allowed.all():
        return TileBounds(texts, queries, keys)
    empty = ~allowed.any(-1)
    return replace(block, empty=empty) if empty.any() else block


class Buffers:
    """Keep memory for the scores and weights of a tile from call to call, for one walk over tiles at a time.

    If each layer of each batch allocated its own, in ever other sizes, the C library's heap would fragment, and the
    system would hand out its pages one by one each time.
    """

    def __init__(self) -> None:
        self._pairs: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}

    def pair(
        self,
        size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> list[Tensor]:
        """Return two flat arrays of at least `size` numbers, whose content is undefined."""
        pair = self._pairs.pop((dtype, device), None)
        if pair is None or pair[0].numel() < size:
            # Without this name the old pair is freed before a larger one is allocated.
            pair = None
            size = max(size, TILE_ELEMENTS)
            pair = [torch.empty(size, dtype=dtype, device=device) for _ in range(2)]
        self._pairs[dtype, device] = pair
        return pair


@torch.no_grad()
def tiles(
    call: AttentionCall,
    blocks: list[TileBounds] | None = None,
    buffers: Buffers | None = None,
) -> Iterator[Tile]:
    """Yield the scores and weights of an attention, tile by tile.

        s_qk = scale * q · k,  softcap * tanh(s_qk / softcap) if there is a soft cap,  + bias_qk
        A_qk = exp(s_qk) / (exp(sink) + sum over allowed k' of exp(s_qk'))

    Args:
        call: The attention. Keys of grouped queries are not repeated. Dropout is not applied.
        blocks: What `cut_blocks` returned for a call with the same mask, causality, window and shapes; None = cut here.
        buffers: Memory for scores and weights; None = allocate it here.

    Yields:
        Tiles in the order of the blocks; float64 for float64 queries, else float32. Weights of queries that may attend
        to nothing are zero. A block without keys has no tile. Memory: two buffers of the size of the largest tile.
    """
    batch, n_heads, all_queries, d_head = call.query.shape
    n_kv_heads = call.n_kv_heads
    device = call.query.device
    dtype = torch.promote_types(call.query.dtype, torch.float32)
    blocks = cut_blocks(call) if blocks is None else blocks
    buffers = Buffers() if buffers is None else buffers
    largest = max((math.prod(block.shape) for block in blocks), default=0) * n_heads
    flat_buffers = buffers.pair(largest, dtype, device)
    bias = None
    if call.bias is not None:
        bias = call.bias.expand(batch, -1, all_queries, call.key.shape[2])
    with torch.autocast(device.type, enabled=False):
        keys = call.key.to(dtype)
        for block in blocks:
            n_texts, n_queries, n_keys = block.shape
            if n_keys == 0:
                continue
            # The query heads of one key/value head lie end to end, for one matrix product:
            # (text · kv head, group · query, key).
            grouped = (n_texts * n_kv_heads, n_heads // n_kv_heads * n_queries)
            shape = (n_texts, n_heads, n_queries, n_keys)
            scores, weights = (buffer[: math.prod(shape)].view(shape) for buffer in flat_buffers)
            queries = call.query[block.texts, :, block.queries]
            # Scale the queries before the product: scores scaled after it have twice the rounding error. `out` makes
            # them contiguous in the same pass.
            scaled = torch.empty(queries.shape, dtype=dtype, device=device)
            torch.mul(queries.to(dtype), call.scale, out=scaled)
            block_keys = keys[block.texts, :, block.keys].reshape(grouped[0], n_keys, d_head)
            torch.bmm(scaled.view(*grouped, d_head), block_keys.mT, out=scores.view(*grouped, n_keys))
            if call.softcap is not None:
                scores.div_(call.softcap).tanh_().mul_(call.softcap)
            if bias is not None:
                block_bias = bias[block.texts, :, block.queries, block.keys].to(dtype)
                scores += block_bias.clamp(min=_LOWEST_BIAS)
            allowed = block.allowed(device)
            if allowed is not None:
                # Adding a tensor that the heads share is ten times as fast as masked_fill on all scores.
                hidden = torch.zeros(allowed.shape, dtype=dtype, device=device)
                scores += hidden.masked_fill_(~allowed, _HIDDEN_SCORE)
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


@torch.no_grad()
def attend_in_tiles(
    call: AttentionCall,
    read: Callable[[Tile], None] | None = None,
    blocks: list[TileBounds] | None = None,
    buffers: Buffers | None = None,
) -> Float[Tensor, "batch n_heads query d_value"]:
    """Return the output of an attention, and hand each of its tiles to a function on the way.

    Args:
        call: The attention. Dropout is not applied.
        read: Gets each tile, in the order of the blocks, and may overwrite its scores and weights.
        blocks: As for `tiles`.
        buffers: As for `tiles`.

    Returns:
        The product of weights and values, in the dtype of the values, without gradient. In memory the heads of a query
        lie side by side, as the output projection reads them. Zero where nothing may be attended to.
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
def attend_lean(call: AttentionCall) -> Float[Tensor, "batch n_heads query d_value"]:
    """Attend in memory linear in queries and keys: no map, and no mask of that size is made; dropout is not applied.

    Returns:
        The output as `seam.attend` gives it, in the dtype of the values, without gradient.
    """
    # torch's fused kernels make no map where they can express the call. They need one width and at least one key.
    is_fused = call.query.shape[3] == call.value.shape[3] and not call.dropout_p
    for option in (call.bias, call.softcap, call.sinks, call.window):
        is_fused &= option is None
    is_fused &= min(call.query.numel(), call.key.numel()) > 0
    # A mask that all heads and queries share is no larger than the keys.
    if call.mask is not None:
        is_fused &= call.query.device.type == "cpu" and not call.is_causal
        is_fused &= call.mask.shape[1:3] == (1, 1)
    return attend(call) if is_fused else attend_in_tiles(call)
