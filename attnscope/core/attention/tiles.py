"""Attention tile by tile: a block of queries against all their keys, in memory that grows with length alone.

Everything that an AttentionCall can say, in plain torch, on any device. What is not linear in the weights (the largest
weight, entropies) is computed while they lie in the cache. No gradient flows through. The tiles are ours, without the
online softmax of Dao et al. 2022: a tile holds all keys of its queries.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F  # noqa: N812
from jaxtyping import Bool, Float
from torch import Tensor

from attnscope.core.attention.precision import without_autocast
from attnscope.core.attention.seam import AttentionCall, attend

TILE_ELEMENTS = 1_600_000
"""Weights in one tile. Scores and weights of that many take 13 MB in float32. A MiniLM forward with every measure on
texts of 500 takes 1.7 times as long with 100 thousand, 1.1 times with 400 thousand and with 3 million (one core)."""

LEAST_QUERIES = 16
"""Queries in one tile, however many keys there are: matrix products of fewer rows are no faster."""

_HIDDEN = -1e30
"""Score of a key that may not be attended to: far below any score, and 0 times it is 0, not NaN."""

_LARGE_SCORE = 30.0
"""Scores beyond this are centred before they enter an entropy: 30 float32 roundings are 2e-6 nats."""


@dataclass(frozen=True, eq=False)
class Block:
    """Where a tile lies: some texts, some queries, and the keys that any of these queries may attend to.

    Attributes:
        texts: Which texts.
        queries: Which queries.
        keys: The smallest range of keys that holds all that these queries may attend to.
        may: View of the call's mask on the block, broadcastable to (text, head, query, key); None = it hides nothing.
        is_causal: Whether causality hides keys within the block.
        empty: Queries that may attend to nothing, broadcastable to (text, head, query); None = there are none.
        window: Distance in tokens from which keys within the block are hidden; None = none is hidden by distance.
    """

    texts: slice
    queries: slice
    keys: slice
    may: Tensor | None = None
    is_causal: bool = False
    empty: Tensor | None = None
    window: int | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """Return how many texts, queries and keys."""
        texts, queries, keys = self.texts, self.queries, self.keys
        return texts.stop - texts.start, queries.stop - queries.start, keys.stop - keys.start

    def allowed(self, device: torch.device) -> Bool[Tensor, "#text #n_heads #query #key"] | None:
        """Return which query may attend to which key, bool; None = each to all."""
        if not self.is_causal and self.window is None:
            return self.may
        _, n_queries, n_keys = self.shape
        before = self.queries.start - self.keys.start
        near = torch.ones(n_queries, n_keys, dtype=torch.bool, device=device)
        if self.is_causal:
            near = near.tril_(before)
        if self.window is not None:
            near = near.tril_(before + self.window - 1).triu_(before - self.window + 1)
        return near[None, None] if self.may is None else near & self.may

    def hide(self, scores: Float[Tensor, "text n_heads query key"], fill: float) -> None:
        """Lowers the scores of keys that may not be attended to by `fill`, in place."""
        # Adding is ten times as fast as masked_fill, and the numbers added are shared by heads.
        if self.may is not None or self.window is not None:
            allowed = self.allowed(scores.device)
            assert allowed is not None
            scores += torch.zeros(allowed.shape, dtype=scores.dtype, device=scores.device).masked_fill_(~allowed, fill)
        elif self.is_causal:
            # All keys before the block's first query may be seen: only the corner at the diagonal is touched.
            before = max(self.queries.start - self.keys.start, 0)
            corner = scores[..., before:]
            lowered = torch.full(corner.shape[-2:], fill, dtype=scores.dtype, device=scores.device)
            corner += lowered.triu(self.queries.start - self.keys.start - before + 1)


@dataclass(frozen=True, eq=False)
class Tile:
    """One block's scores and weights. Both lie in buffers that the next tile overwrites.

    Attributes:
        block: Where it lies.
        scores: The input of softmax: scaled, capped, biased. Hidden ones are -1e30, or -inf if there is a bias.
        weights: Contiguous; as `attention_weights` defines them.
        largest_score: Of each query.
        log_sum: Logarithm of the softmax's denominator, sinks included; None until needed.
        has_infinite: Whether hidden scores are -inf.
    """

    block: Block
    scores: Float[Tensor, "text n_heads query key"]
    weights: Float[Tensor, "text n_heads query key"]
    largest_score: Float[Tensor, "text n_heads query 1"]
    log_sum: Float[Tensor, "text n_heads query"] | None
    has_infinite: bool = False

    def log_sum_exp(self, largest_weight: Float[Tensor, "text n_heads query"]) -> Float[Tensor, "text n_heads query"]:
        """Logarithm of the softmax's denominator, (text, head, query), -inf for none, given the largest weights."""
        log_sum = self.largest_score[..., 0] - largest_weight.log() if self.log_sum is None else self.log_sum
        return log_sum if self.block.empty is None else log_sum.masked_fill(self.block.empty, -math.inf)

    def entropies(self, log_sum_exp: Float[Tensor, "text n_heads query"]) -> Float[Tensor, "text n_heads query"]:
        """- sum over k of A_qk ln A_qk, (text, head, query), in nats; overwrites the scores.

            H_q = sum over k of A_qk (lse_q - s_qk)

        Source: ours; the definition with ln A_qk = s_qk - lse_q put in.
        """
        scores, weights = self.scores, self.weights
        if scores.shape[-1] == 0:
            return torch.zeros_like(log_sum_exp)
        if self.block.empty is None and self.log_sum is None and not self.has_infinite:
            # A row of weights sums to 1, so any score may be taken as zero: lse is then small, and so is its rounding.
            far = self.largest_score.abs().max() > _LARGE_SCORE
            if not bool(far) and scores.dtype != torch.float64:
                return log_sum_exp - torch.mul(weights, scores, out=scores).sum(-1)
        below = log_sum_exp.unsqueeze(-1) - scores
        entropies = below.clamp_(max=-_HIDDEN).mul_(weights).sum(-1)
        return entropies if self.block.empty is None else entropies.masked_fill(self.block.empty, 0.0)


def blocks(
    call: AttentionCall,
    elements: int | None = None,
    queries: slice | None = None,
    unit: int | None = None,
) -> list[Block]:
    """Cut an attention into tiles: whole short texts together, long ones into ranges of queries.

    Depends on the call's mask, causality and shapes alone, so what is worked out for a block serves every layer.

    Args:
        call: The attention.
        elements: About how many weights a tile may hold; None = TILE_ELEMENTS.
        queries: Which queries, from first to last + 1; None = all.
        unit: No tile holds queries on both sides of a multiple of so many, counted from the first; None = any may.

    Returns:
        Blocks that cover each of these queries of every text once; none for no texts or no queries. Memory: views of
        the mask, and one truth value per query.
    """
    batch, n_heads, n_queries, _ = call.query.shape
    n_keys = call.key.shape[2]
    if not batch * n_queries or (queries is not None and queries.start >= queries.stop):
        return []
    elements = TILE_ELEMENTS if elements is None else elements
    mask = None if call.mask is None else call.mask.expand(batch, -1, -1, n_keys)
    whole_text = max(n_heads * n_queries * n_keys, 1)
    together = max(elements // whole_text, 1)
    rows = n_queries if together > 1 else min(max(elements // max(n_heads * n_keys, 1), LEAST_QUERIES), n_queries)
    first, last = (0, n_queries) if queries is None else (queries.start, queries.stop)
    unit = last - first if unit is None else min(unit, last - first)
    together = together if unit == last - first else 1
    edges = [
        (q, min(q + rows, start + unit, last))
        for start in range(first, last, unit)
        for q in range(start, min(start + unit, last), rows)
    ]
    return [
        _block(mask, slice(b, min(b + together, batch)), slice(*edge), n_keys, call)
        for b in range(0, batch, together)
        for edge in edges
    ]


def _block(mask: Tensor | None, texts: slice, queries: slice, n_keys: int, call: AttentionCall) -> Block:
    window = call.window
    start = 0 if window is None else min(max(queries.start - window + 1, 0), n_keys)
    stop = min(queries.stop, n_keys) if call.is_causal else n_keys
    stop = stop if window is None else max(start, min(stop, queries.stop + window - 1))
    if window is not None and max(queries.stop - 1 - start, stop - 1 - queries.start) < window:
        window = None  # it hides nothing here
    if mask is None and window is None:
        return Block(texts, queries, slice(start, stop), None, call.is_causal and queries.start < stop - 1, None)
    if mask is None:
        part = torch.ones(1, 1, 1, stop - start, dtype=torch.bool, device=call.query.device)
    else:
        part = mask[texts, :, queries if mask.shape[2] > 1 else slice(None), start:stop]
    seen = part.any(0).any(0).any(0).nonzero()
    keys = slice(start + int(seen[0]), start + int(seen[-1]) + 1) if len(seen) else slice(start, start)
    part = part[..., keys.start - start : keys.stop - start]
    whole = Block(texts, queries, keys, part, call.is_causal and queries.start < keys.stop - 1, None, window)
    allowed = whole.allowed(part.device)
    assert allowed is not None
    empty = ~allowed.any(-1)
    return replace(whole, may=None if bool(part.all()) else part, empty=empty if bool(empty.any()) else None)


class Buffers:
    """Memory for scores and weights of tiles, kept from call to call. Serves one walk over tiles at a time.

    Memory taken anew for each layer of each batch, in ever other sizes, leaves gaps in the C library's heap, and each
    time the system hands out its pages one by one.
    """

    def __init__(self) -> None:
        self._pairs: dict[tuple[torch.dtype, torch.device], tuple[Tensor, Tensor]] = {}

    def pair(self, size: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        """Two flat arrays of at least `size` numbers, of any content."""
        pair = self._pairs.get((dtype, device))
        if pair is None or pair[0].numel() < size:
            pair = None
            self._pairs.pop((dtype, device), None)  # freed before larger ones are taken
            room = max(size, TILE_ELEMENTS)
            pair = torch.empty(room, dtype=dtype, device=device), torch.empty(room, dtype=dtype, device=device)
            self._pairs[dtype, device] = pair
        return pair


@torch.no_grad()
def tiles(call: AttentionCall, parts: list[Block] | None = None, buffers: Buffers | None = None) -> Iterator[Tile]:
    """Yield the weights of an attention, tile by tile.

        s_qk = scale * q · k,  softcap * tanh(s_qk / softcap) if there is a soft cap,  + bias_qk
        A_qk = exp(s_qk) / (exp(sink) + sum over allowed k' of exp(s_qk'))

    Args:
        call: The attention. Keys of grouped queries are not repeated. Dropout is not applied.
        parts: What `blocks` made of a call with the same mask, causality and shapes; None = cut it here.
        buffers: Where scores and weights lie; None = in memory of their own.

    Yields:
        Tiles in the order of the blocks; float64 for float64 queries, else float32. Weights of queries that may attend
        to nothing are zero. All the memory taken is two buffers of one tile.
    """
    n_heads, n_kv_heads = call.n_heads, call.n_kv_heads
    group, d_head = n_heads // n_kv_heads, call.query.shape[3]
    dtype = torch.promote_types(call.query.dtype, torch.float32)
    parts = blocks(call) if parts is None else parts
    largest = max((math.prod(block.shape) for block in parts), default=0) * n_heads
    flat = (Buffers() if buffers is None else buffers).pair(largest, dtype, call.query.device)
    # Finite numbers as low as finfo.min are scores like any other in a bias: there only -inf is below them.
    fill = _HIDDEN if call.bias is None else -math.inf
    bias = None
    if call.bias is not None:
        bias = call.bias.expand(call.query.shape[0], -1, call.query.shape[2], -1)
    with without_autocast(call.query.device):
        keys = call.key.to(dtype)
        for block in parts:
            n_texts, n_queries, n_keys = block.shape
            size = n_texts * n_heads * n_queries * n_keys
            scores, weights = (buffer[:size].view(n_texts * n_kv_heads, group * n_queries, n_keys) for buffer in flat)
            queries = call.query[block.texts, :, block.queries]
            # Scaled into its final layout at once. Scaled after the product instead, weights are twice as far off.
            rows = torch.empty(queries.shape, dtype=dtype, device=queries.device)
            torch.mul(queries.to(dtype), call.scale, out=rows)
            rows = rows.view(n_texts * n_kv_heads, group * n_queries, d_head)
            columns = keys[block.texts, :, block.keys].reshape(n_texts * n_kv_heads, n_keys, d_head)
            torch.bmm(rows, columns.mT, out=scores)
            shape = (n_texts, n_heads, n_queries, n_keys)
            scores, weights = scores.view(shape), weights.view(shape)
            if n_keys == 0:
                lowest = torch.full((*shape[:3], 1), -math.inf, dtype=dtype, device=scores.device)
                yield Tile(block, scores, weights, lowest, lowest[..., 0])
                continue
            if call.softcap is not None:
                scores.div_(call.softcap).tanh_().mul_(call.softcap)
            if bias is not None:
                of_keys = block.keys if bias.shape[3] > 1 else slice(None)
                scores += bias[block.texts, :, block.queries, of_keys].to(dtype)
            block.hide(scores, fill)
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
            yield Tile(block, scores, weights, largest_score, log_sum, has_infinite=call.bias is not None)


def times_values(
    weights: Float[Tensor, "text n_heads query key"], values: Float[Tensor, "text n_kv_heads key width"]
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
    rows = torch.zeros(batch, n_queries, n_heads, values.shape[3], dtype=values.dtype, device=values.device)
    output = rows.transpose(1, 2)
    for tile in tiles(call, parts, buffers):
        block = tile.block
        if tile.weights.numel():
            output[block.texts, :, block.queries] = times_values(tile.weights, values[block.texts, :, block.keys])
        if read is not None:
            read(tile)
    return output.to(call.value.dtype)


@torch.no_grad()
def attend_lean(call: AttentionCall) -> Float[Tensor, "batch n_heads query d_value"]:
    """Attention without a map, a mask or anything else of size queries times keys; dropout is not applied.

    Returns:
        The output as `seam.attend` gives it, in the dtype of the values, without gradient.
    """
    # A mask that all heads and queries share is no larger than the keys.
    by_key = call.mask is None or (
        call.query.device.type == "cpu" and not call.is_causal and call.mask.shape[1:3] == (1, 1)
    )
    plain = all(getattr(call, name) is None for name in ("bias", "softcap", "sinks", "window"))
    # The fused kernel divides by the number of keys; dropout keeps torch from it.
    if not (plain and by_key and not call.dropout_p and min(call.query.numel(), call.key.numel())):
        return attend_in_tiles(call)
    # It wants one width for all three; zeros change no dot product.
    d_value = call.value.shape[3]
    width = max(d_value, call.query.shape[3])
    query, key, value = (F.pad(part, (0, width - part.shape[3])) for part in (call.query, call.key, call.value))
    return attend(replace(call, query=query, key=key, value=value))[..., :d_value]
