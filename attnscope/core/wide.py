"""Attention on wide values: the output, the log-sum-exp and sums over keys, in memory that grows with length alone.

Whatever is linear in the weights is one more value column: A [V | U] holds A V, which the model needs, and A U, which
an observer wants. With the log-sum-exp of a query any single weight costs one dot product. Two kernels:

* `wide`: torch's fused attention on values made wider. Nothing but columns; float masks by key; long texts.
* `tile`: a block of queries against all their keys in plain torch, block after block. Everything that an AttentionCall
  can say, and what is not linear (the largest weight). `tiles` hands out its blocks.

No gradient flows through either. This module knows no measures and no models.
"""

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from attnscope.core.attention import AttentionCall

Kernel = Literal["wide", "tile"]

TILE_ELEMENTS = 1_600_000
"""Weights in one tile. Scores and weights of that many take 13 MB in float32. A MiniLM forward with every measure on
texts of 500 takes 1.7 times as long with 100 thousand, 1.1 times with 400 thousand and with 3 million (one core)."""

LEAST_QUERIES = 16
"""Queries in one tile, however many keys there are: matrix products of fewer rows are no faster."""

WIDE_FROM_KEYS = 1024
"""Keys from which `wide` is no slower than `tile` where both can answer (benchmarks/kernels.py, 12 heads of 32 on two
cores): with entropies both take 2.3 times as long as plain attention at 1024 keys, 2.2 against 2.6 times at 2048."""

ENTROPY_ROUNDING = 1e-4
"""Nats that rounding may cost a single entropy; where `wide` could lose more, `tile` runs."""

_HIDDEN = -1e30
"""Score of a key that may not be attended to: far below any score, and 0 times it is 0, not NaN."""

_LARGE_SCORE = 30.0
"""Scores beyond this are centred before they enter an entropy: 30 float32 roundings are 2e-6 nats."""


# Tiles ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Block:
    """Where a tile lies: some texts, some queries, and the keys that any of these queries may attend to.

    Attributes:
        texts: Which texts.
        queries: Which queries.
        keys: The smallest range of keys that holds all that these queries may attend to.
        may: View of the call's mask on the block, broadcastable to (text, head, query, key); None = nothing hidden but
            by causality.
        is_causal: Whether causality hides keys within the block.
        empty: Queries that may attend to nothing, broadcastable to (text, head, query); None = there are none.
        window: Distance in tokens from which keys within the block are hidden; None = none are for that.
    """

    texts: slice
    queries: slice
    keys: slice
    may: Tensor | None
    is_causal: bool
    empty: Tensor | None
    window: int | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """How many texts, queries and keys."""
        texts, queries, keys = self.texts, self.queries, self.keys
        return texts.stop - texts.start, queries.stop - queries.start, keys.stop - keys.start

    def allowed(self, device: torch.device) -> Tensor | None:
        """Which query may attend to which key, broadcastable to (text, head, query, key); None = each to all."""
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

    def hide(self, scores: Tensor, fill: float) -> None:
        """Lowers the scores of keys that may not be attended to by `fill`."""
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
        scores: (text, head, query, key), as softmax saw them: scaled, capped, biased; hidden ones -1e30, or -inf
            where there is a bias.
        weights: (text, head, query, key), contiguous; as `core.attention.attention_weights` defines them.
        largest_score: (text, head, query, 1).
        log_sum: (text, head, query): logarithm of the softmax's denominator, sinks included; None until needed.
        has_infinite: Whether hidden scores are -inf.
    """

    block: Block
    scores: Tensor
    weights: Tensor
    largest_score: Tensor
    log_sum: Tensor | None
    has_infinite: bool = False

    def log_sum_exp(self, largest_weight: Tensor) -> Tensor:
        """Logarithm of the softmax's denominator, (text, head, query), given the row's largest weight, likewise."""
        log_sum = self.largest_score[..., 0] - largest_weight.log() if self.log_sum is None else self.log_sum
        return log_sum if self.block.empty is None else log_sum.masked_fill(self.block.empty, -math.inf)

    def entropies(self, log_sum_exp: Tensor) -> Tensor:
        """- sum over k of A_qk ln A_qk, (text, head, query), in nats; spends the scores.

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
    call: AttentionCall, elements: int | None = None, queries: slice | None = None, unit: int | None = None
) -> list[Block]:
    """Cuts an attention into tiles: whole short texts together, long ones into ranges of queries.

    Depends on the call's mask, causality and shapes alone, so that what is worked out for a block serves every layer.

    Args:
        call: The attention.
        elements: About how many weights a tile may hold; None = TILE_ELEMENTS.
        queries: Which queries, from first to last + 1; None = all.
        unit: No tile holds queries on both sides of a multiple of so many, counted from the first; None = any may.

    Returns:
        Blocks that cover every one of these queries of every text once; for no texts or no queries, none. Memory:
        views of the mask, and one truth value a query.
    """
    batch, n_heads, n_queries, _ = call.query.shape
    n_keys = call.key.shape[2]
    if not batch * n_queries or (queries is not None and queries.start >= queries.stop):
        return []
    elements = TILE_ELEMENTS if elements is None else elements
    mask = None
    if call.mask is not None:
        mask = call.mask[(None,) * (4 - call.mask.ndim)]
        mask = mask.expand(batch, -1, -1, n_keys)
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
        mask = torch.ones(1, 1, 1, n_keys, dtype=torch.bool, device=call.query.device)
        part = mask[..., start:stop]
    else:
        part = mask[texts, :, queries if mask.shape[2] > 1 else slice(None), start:stop]
    seen = part.any(0).any(0).any(0).nonzero()
    keys = slice(start + int(seen[0]), start + int(seen[-1]) + 1) if len(seen) else slice(start, start)
    part = part[..., keys.start - start : keys.stop - start]
    whole = Block(texts, queries, keys, part, call.is_causal and queries.start < keys.stop - 1, None, window)
    allowed = whole.allowed(mask.device)
    assert allowed is not None
    empty = ~allowed.any(-1)
    everything = bool(part.all())
    return Block(
        texts,
        queries,
        keys,
        None if everything else part,
        whole.is_causal,
        empty if bool(empty.any()) else None,
        window,
    )


class Buffers:
    """Memory for scores and weights of tiles, to be kept from call to call. Serves one walk over tiles at a time.

    Taken anew for each layer of each batch, in ever other sizes, it leaves gaps in the C library's heap, and each time
    the system hands out its pages one by one.
    """

    def __init__(self) -> None:
        self._held: dict[tuple[torch.dtype, torch.device], tuple[Tensor, Tensor]] = {}

    def pair(self, size: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        """Two flat arrays of at least `size` numbers, of any content."""
        held = self._held.get((dtype, device))
        if held is None or held[0].numel() < size:
            self._held.pop((dtype, device), None)
            room = max(size, TILE_ELEMENTS)
            held = torch.empty(room, dtype=dtype, device=device), torch.empty(room, dtype=dtype, device=device)
            self._held[dtype, device] = held
        return held


@torch.no_grad()
def tiles(call: AttentionCall, parts: list[Block] | None = None, buffers: Buffers | None = None) -> Iterator[Tile]:
    """The weights of an attention, tile by tile.

        s_qk = scale * q · k,  softcap * tanh(s_qk / softcap) if there is a soft cap,  + bias_qk
        A_qk = exp(s_qk) / (exp(sink) + sum over allowed k' of exp(s_qk'))

    Args:
        call: The attention. Keys of grouped queries are not repeated. Dropout is not applied.
        parts: What `blocks` made of a call with the same mask, causality and shapes; None = cut it here.
        buffers: Where scores and weights lie; None = in memory of their own.

    Yields:
        Tiles in the order of the blocks; float64 for float64 queries, else float32. Weights of queries that may attend
        to nothing are zero. Two buffers of one tile are all the memory that is taken.
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
        bias = call.bias[(None,) * (4 - call.bias.ndim)].expand(call.query.shape[0], -1, call.query.shape[2], -1)
    with torch.autocast(call.query.device.type, enabled=False):
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
                scores += bias[block.texts, :, block.queries, block.keys if bias.shape[3] > 1 else slice(None)].to(
                    dtype
                )
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


def times_values(weights: Tensor, values: Tensor) -> Tensor:
    """A V for grouped heads, without repeating values.

    Args:
        weights: (text, n_heads, query, key), contiguous.
        values: (text, n_kv_heads, key, width).

    Returns:
        (text, n_heads, query, width).
    """
    n_texts, n_heads, n_queries, n_keys = weights.shape
    n_kv_heads, width = values.shape[1], values.shape[3]
    rows = weights.view(n_texts * n_kv_heads, n_heads // n_kv_heads * n_queries, n_keys)
    product = torch.bmm(rows, values.reshape(n_texts * n_kv_heads, n_keys, width))
    return product.view(n_texts, n_heads, n_queries, width)


# Attention on wide values ---------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Wide:
    """What one attention call on wide values gives.

    Attributes:
        output: A V, (batch, n_heads, query, d_value), in the dtype of the values.
        log_sum_exp: ln of the softmax's denominator, (batch, n_heads, query): of the scaled, capped, biased, allowed
            scores, and of the sink if there is one; -inf where nothing may be attended to.
        columns: A U, (batch, n_heads, query, c); None if none were given.
        gathered: A[q, index(q)], (batch, n_heads, query, g); None if no indices were given.
        entropy_nats: - sum of A ln A over the keys, (batch, n_heads, query), at least 0 up to rounding; None if it was
            not asked for. With sinks the sink's own share is not among the keys.
        largest: max over k of A_qk, (batch, n_heads, query); None if it was not asked for.
        kernel: Which kernel ran.
    """

    output: Tensor
    log_sum_exp: Tensor
    columns: Tensor | None
    gathered: Tensor | None
    entropy_nats: Tensor | None
    largest: Tensor | None
    kernel: Kernel


@torch.no_grad()
def attend_wide(
    call: AttentionCall,
    columns: Tensor | None = None,
    indices: Tensor | None = None,
    *,
    entropy: bool = False,
    largest: bool = False,
    kernel: Kernel | None = None,
) -> Wide:
    """Attention, and what can be seen of its weights without keeping them.

        output = A V,  columns = A U,  log_sum_exp_q = ln(exp(sink) + sum over allowed k of exp(s_qk)),
        gathered_qg = A[q, indices_qg],  entropy_q = lse_q - s · q · (A K)_q,  largest_q = max over k of A_qk

    Args:
        call: The attention. Dropout is not applied.
        columns: U, value columns that all heads share, (batch, key, c), or of each key/value head, (batch, n_kv_heads,
            key, c).
        indices: Which single weights to read, int64: keys, or -1 for none (which reads 0); (batch, query, g) for all
            heads, or (batch, n_heads, query, g).
        entropy: Whether to compute entropies.
        largest: Whether to compute each query's largest weight: only `tile` can.
        kernel: "wide" or "tile"; None = the faster one that can answer (`choose_kernel`).

    Returns:
        All that was asked for, in float64 for float64 queries, else in float32. Memory grows with queries + keys, not
        with their product. Without keys everything is zero, and log_sum_exp -inf.

    Raises:
        ValueError: Shapes do not fit together, an index is beyond the keys, or `wide` was asked for what it cannot do.

    Source:
        Fused attention by blocks: Dao et al. 2022 (FlashAttention); the columns and the entropy: ours. As ln A_qk =
        s_qk - lse_q, the entropy is lse_q - sum over k of A_qk s_qk, and s_qk is linear in k.
    """
    batch, n_heads, n_queries, _ = call.query.shape
    n_keys = call.key.shape[2]
    if columns is not None:
        shapes = ((batch, n_keys), (batch, call.n_kv_heads, n_keys))
        if columns.shape[:-1] not in shapes:
            raise ValueError(f"columns are (batch, key, c) or (batch, kv_head, key, c); got {tuple(columns.shape)}")
        columns = columns.unsqueeze(1).expand(-1, call.n_kv_heads, -1, -1) if columns.ndim == 3 else columns
    if indices is not None:
        if indices.shape[:-1] not in ((batch, n_queries), (batch, n_heads, n_queries)):
            raise ValueError(f"indices are (batch, query, g) or (batch, head, query, g); got {tuple(indices.shape)}")
        if indices.numel() and not -1 <= int(indices.min()) <= int(indices.max()) < n_keys:
            raise ValueError(f"indices are keys 0 to {n_keys - 1}, or -1 for none; got {int(indices.max())}")
        indices = (indices.unsqueeze(1) if indices.ndim == 3 else indices).expand(-1, n_heads, -1, -1)
    reason = _why_not_wide(call, entropy=entropy, largest=largest)
    if kernel == "wide" and reason:
        raise ValueError(f"the wide kernel cannot do this: {reason}")
    if kernel is None:
        kernel = "tile" if reason or n_keys < WIDE_FROM_KEYS else "wide"
    if kernel == "wide":
        return _wide(call, columns, indices, entropy)
    return _tiled(call, columns, indices, entropy, largest)


def choose_kernel(call: AttentionCall, *, entropy: bool = False, largest: bool = False) -> Kernel:
    """The kernel that `attend_wide` takes of itself: `wide` from 1024 keys on where it can answer, else `tile`.

    `wide` needs a torch that has the fused kernel, on the processor or on CUDA, at most a mask by key (on CUDA none),
    no bias, soft cap, sinks or window, and, for entropies, scores small enough that rounding stays under 1e-4 nats.

    Args:
        call: The attention.
        entropy: Whether entropies are wanted.
        largest: Whether the largest weights are wanted.
    """
    if call.key.shape[2] < WIDE_FROM_KEYS or _why_not_wide(call, entropy=entropy, largest=largest):
        return "tile"
    return "wide"


def _why_not_wide(call: AttentionCall, *, entropy: bool, largest: bool) -> str:
    """What keeps the wide kernel from answering; empty if nothing does."""
    if largest:
        return "the largest weight is not linear in the weights"
    for name in ("bias", "softcap", "sinks", "window"):
        if getattr(call, name) is not None:
            return f"it knows no {name}"
    mask = call.mask
    if mask is not None and mask.ndim >= 2 and (mask.shape[-2] != 1 or (mask.ndim >= 3 and mask.shape[-3] != 1)):
        return "it takes masks by key alone"
    if min(call.query.numel(), call.key.numel()) == 0:
        return "there are no keys or queries"  # the fused kernel divides by their number, and the process dies
    device = call.query.device
    if device.type != "cpu":
        if mask is not None:
            return f"on {device.type} it takes no mask"
        if call.query.dtype == torch.float64:
            return f"on {device.type} it has no float64"
    if not fused_kernel_is_there(device):
        return "this torch has no fused kernel that returns the log-sum-exp here"
    if entropy and call.query.dtype != torch.float64:
        keys = call.key.float()
        keys = keys - keys.mean(2, keepdim=True)
        reach = call.query.float().norm(dim=-1).amax() * keys.norm(dim=-1).amax() * abs(call.scale)
        if not bool(reach * torch.finfo(torch.float32).eps <= ENTROPY_ROUNDING):
            return "scores are too large for an entropy from the log-sum-exp"
    return ""


def _fused_on_cpu(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, call: AttentionCall
) -> tuple[Tensor, Tensor]:
    result: tuple[Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, call.is_causal, attn_mask=mask, scale=call.scale
    )
    return result


def _fused_on_cuda(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, call: AttentionCall
) -> tuple[Tensor, Tensor]:
    """The memory-efficient kernel: the flash one takes half precision alone, which sums must not be in."""
    if mask is not None:
        raise ValueError("no mask")
    # It knows no groups, wants widths of whole 16 bytes, and fills its log-sum-exp up to a multiple of 32 queries.
    group, width = query.shape[1] // key.shape[1], query.shape[3]
    query, key, value = (F.pad(part, (0, -width % 8)) for part in (query, key, value))
    key, value = (part.repeat_interleave(group, 1) for part in (key, value))
    output, log_sum, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, None, True, 0.0, call.is_causal, scale=call.scale
    )
    return output[..., :width], log_sum[..., : query.shape[2]]


_FUSED = {"cpu": _fused_on_cpu, "cuda": _fused_on_cuda}
"""The kernel on each type of device; elsewhere there are tiles."""


def _fused(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, call: AttentionCall
) -> tuple[Tensor, Tensor]:
    return _FUSED[query.device.type](query, key, value, mask, call)


@functools.cache
def fused_kernel_is_there(device: torch.device) -> bool:
    """Whether torch has its private kernel on a device and it answers as we expect, to 1e-5.

    Tried once: with groups, an odd number of queries and other of keys, causality, and on the processor a mask. It is
    no part of torch's public interface, so what it gives is believed only after this.
    """
    if device.type not in _FUSED:
        return False
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 35), (1, 37))
    query, key = (torch.randn(1, heads, n, 9, generator=generator) for heads, n in shapes)
    mask = torch.zeros(1, 1, 1, 37).masked_fill_(torch.arange(37) % 3 == 1, -math.inf) if device.type == "cpu" else None
    scores = (query @ key.mT * 0.5).masked_fill(~torch.ones(35, 37, dtype=torch.bool).tril(), -math.inf)
    scores = scores if mask is None else scores + mask
    there_query, there_key = query.to(device), key.to(device)
    call = AttentionCall(0, "decoder", there_query, there_key, there_key, 0.5, is_causal=True)
    try:
        output, log_sum = (part.cpu() for part in _fused(there_query, there_key, there_key, mask, call))
    except (AttributeError, NotImplementedError, RuntimeError, TypeError):
        return False
    return torch.allclose(output, scores.softmax(-1) @ key, atol=1e-5) and torch.allclose(
        log_sum, scores.logsumexp(-1), atol=1e-5
    )


def _wide(call: AttentionCall, columns: Tensor | None, indices: Tensor | None, entropy: bool) -> Wide:
    dtype = torch.promote_types(call.query.dtype, torch.float32)
    query, key, value = (part.to(dtype) for part in (call.query, call.key, call.value))
    # Softmax does not see what all keys share; the log-sum-exp does, and gets it back below.
    shared = key.mean(2, keepdim=True)
    key = key - shared
    parts = [value]
    if columns is not None:
        parts.append(columns.to(dtype))
    if entropy:
        parts.append(key)
    value = torch.cat(parts, -1)
    d_head, width = query.shape[3], value.shape[3]
    full = max(d_head, width)
    # The kernel wants one width for all three; zeros change no dot product.
    padded_query, padded_key, padded_value = (F.pad(part, (0, full - part.shape[3])) for part in (query, key, value))
    may = None
    mask = None
    if call.mask is not None:
        may = call.mask[(None,) * (4 - call.mask.ndim)].expand(query.shape[0], 1, 1, key.shape[2])
        mask = torch.zeros(may.shape, dtype=dtype, device=may.device).masked_fill_(~may, -math.inf)
    summed, log_sum = _fused(padded_query, padded_key, padded_value, mask, call)
    group = call.n_heads // call.n_kv_heads
    gathered = None
    if indices is not None:
        gathered = _single_weights(query, key, log_sum, indices, may, call, group)
    ends = [call.value.shape[3]]
    ends.append(ends[0] + (0 if columns is None else columns.shape[3]))
    output, sums = summed[..., : ends[0]], summed[..., ends[0] : ends[1]]
    entropies = None
    if entropy:
        scores = (query * summed[..., ends[1] : width]).sum(-1) * call.scale
        entropies = log_sum - scores
    shift = shared.repeat_interleave(group, 1).mul(query).sum(-1) * call.scale
    log_sum = log_sum + shift
    if may is not None:
        # The kernel leaves zeros where nothing may be attended to, in the log-sum-exp too.
        seen = may.expand(-1, 1, 1, -1)[:, 0, 0]
        if call.is_causal:
            before = seen.cumsum(1) > 0
            last = torch.arange(query.shape[2], device=query.device).clamp(max=key.shape[2] - 1)
            empty = ~before[:, last]
        else:
            empty = ~seen.any(1, keepdim=True).expand(-1, query.shape[2])
        empty = empty.unsqueeze(1)
        log_sum = log_sum.masked_fill(empty, -math.inf)
        output, sums = output.masked_fill(empty[..., None], 0.0), sums.masked_fill(empty[..., None], 0.0)
        entropies = None if entropies is None else entropies.masked_fill(empty, 0.0)
        gathered = None if gathered is None else gathered.masked_fill(empty[..., None], 0.0)
    return Wide(
        output=output.to(call.value.dtype),
        log_sum_exp=log_sum,
        columns=None if columns is None else sums,
        gathered=gathered,
        entropy_nats=entropies,
        largest=None,
        kernel="wide",
    )


def _single_weights(
    query: Tensor, key: Tensor, log_sum: Tensor, indices: Tensor, may: Tensor | None, call: AttentionCall, group: int
) -> Tensor:
    """A[q, index(q)] = exp(s · q · k_index - lse_q); one index at a time, for each takes as much memory as the keys."""
    found = query.new_zeros(indices.shape)
    of_head = torch.arange(call.n_heads, device=query.device) // group
    for g in range(indices.shape[3]):
        index = indices[..., g]
        texts = torch.arange(query.shape[0], device=query.device)[:, None, None]
        chosen = key[texts, of_head[None, :, None], index.clamp(min=0)]
        weight = ((query * chosen).sum(-1) * call.scale - log_sum).exp()
        reads = index >= 0
        if call.is_causal:
            reads = reads & (index <= torch.arange(query.shape[2], device=query.device))
        if may is not None:
            reads = reads & may[:, 0, 0].gather(1, index.clamp(min=0).flatten(1)).view(index.shape)
        found[..., g] = weight.masked_fill(~reads, 0.0)
    return found


def _tiled(call: AttentionCall, columns: Tensor | None, indices: Tensor | None, entropy: bool, largest: bool) -> Wide:
    batch, n_heads, n_queries, _ = call.query.shape
    dtype = torch.promote_types(call.query.dtype, torch.float32)
    device = call.query.device
    values = call.value.to(dtype)
    if columns is not None:
        values = torch.cat([values, columns.to(dtype)], -1)
    rows = (batch, n_heads, n_queries)
    summed = torch.zeros(*rows, values.shape[3], dtype=dtype, device=device)
    log_sum = torch.full(rows, -math.inf, dtype=dtype, device=device)
    gathered = None if indices is None else torch.zeros(indices.shape, dtype=dtype, device=device)
    entropies, tops = (torch.zeros(rows, dtype=dtype, device=device) if want else None for want in (entropy, largest))
    for tile in tiles(call):
        block = tile.block
        here = (block.texts, slice(None), block.queries)
        if block.keys.start == block.keys.stop:
            continue
        summed[here] = times_values(tile.weights, values[block.texts, :, block.keys])
        top = tile.weights.amax(-1)
        if tops is not None:
            tops[here] = top
        log_sum[here] = tile.log_sum_exp(top)
        if gathered is not None and indices is not None:
            index = indices[here] - block.keys.start
            inside = (indices[here] >= 0) & (index >= 0) & (index < block.shape[2])
            found = tile.weights.gather(-1, index.clamp(0, block.shape[2] - 1))
            gathered[here] = found.masked_fill_(~inside, 0.0)
        if entropies is not None:
            entropies[here] = tile.entropies(log_sum[here])
    d_value = call.value.shape[3]
    return Wide(
        output=summed[..., :d_value].to(call.value.dtype),
        log_sum_exp=log_sum,
        columns=None if columns is None else summed[..., d_value:],
        gathered=gathered,
        entropy_nats=entropies,
        largest=tops,
        kernel="tile",
    )
