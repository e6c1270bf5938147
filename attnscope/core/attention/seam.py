"""The seam: every attention of every model is one AttentionCall, computed by one function.

Masks follow `torch.nn.functional.scaled_dot_product_attention`: boolean, True = this query MAY attend to this key.
`torch.nn.MultiheadAttention` and many tutorials mean the opposite (True = hidden). Hugging Face gives its models
1 = keep in two dimensions, but adds 0 / finfo.min in four.

Two functions give the same output: `attend` (torch's fused kernels, no map) and `attend_with_weights` (dense, exact
weights).

Source:
    Vaswani et al. 2017, Attention Is All You Need, section 3.2; grouped queries: Ainslie et al. 2023; soft cap and
    sinks as the models that have them define them.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from attnscope.core.attention.precision import without_autocast

Kind = Literal["encoder", "decoder", "cross"]
"""Whose attention it is: an encoder's own, a decoder's own, or a decoder's on the encoder."""


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """One attention of one layer, as it reaches the seam.

    Attributes:
        layer: Index of the layer within its kind, from 0.
        kind: "encoder", "decoder" or "cross".
        query: Queries, (batch, n_heads, query, d_head).
        key: Keys, (batch, n_kv_heads, key, d_head). n_heads is a multiple of n_kv_heads; query head h reads
            key/value head h // (n_heads // n_kv_heads). They are not repeated: grouped queries stay visible.
        value: Values, (batch, n_kv_heads, key, d_value).
        scale: Factor on the dot products, usually 1 / sqrt(d_head).
        mask: Boolean, broadcastable to (batch, n_heads, query, key); True = may attend; None = all may. Kept with four
            axes, as `bias` is.
        is_causal: If True, query i may attend to keys 0..i only, on top of `mask`.
        window: If set, query i may attend to keys less than `window` tokens away only, on top of `mask` and causality:
            a sliding window that needs no mask of its own.
        bias: Added to the scaled scores: position biases of T5, ALiBi. Broadcastable to the scores; finite (what may
            not be attended to belongs in `mask`: finfo.min here is a number like any other).
        softcap: If set, scaled scores s become softcap * tanh(s / softcap), before bias and mask (Gemma 2).
        sinks: One extra score a head, (n_heads,), that takes weight and gives no value (gpt-oss): the weights of a
            query then sum to less than 1.
        dropout_p: Probability with which single weights are dropped; 0 outside training.

    Raises:
        ValueError: Shapes do not fit together, or softcap or window is not positive.
        TypeError: The mask is not boolean, or the bias not floating point.
    """

    layer: int
    kind: Kind
    query: Float[Tensor, "batch n_heads query d_head"]
    key: Float[Tensor, "batch n_kv_heads key d_head"]
    value: Float[Tensor, "batch n_kv_heads key d_value"]
    scale: float
    mask: Tensor | None = None
    is_causal: bool = False
    bias: Tensor | None = None
    softcap: float | None = None
    sinks: Float[Tensor, " n_heads"] | None = None
    dropout_p: float = 0.0
    window: int | None = None

    def __post_init__(self) -> None:
        # Broadcasting would turn most of these mistakes into a plausible, wrong picture.
        query = tuple(self.query.shape)
        key = tuple(self.key.shape)
        value = tuple(self.value.shape)
        shapes = f"query {query}, key {key}, value {value}"
        if not len(query) == len(key) == len(value) == 4:
            raise ValueError(f"queries, keys and values are (batch, head, token, width); got {shapes}")
        if query[0] != key[0] or query[3] != key[3] or key[:3] != value[:3]:
            raise ValueError(
                f"queries and keys share batch and width; keys and values share batch, heads and tokens; got {shapes}"
            )
        batch, n_heads, n_queries, _ = query
        _, n_kv_heads, n_keys, _ = key
        if n_kv_heads == 0 or n_heads % n_kv_heads:
            raise ValueError(f"{n_heads} query heads are not a multiple of {n_kv_heads} key/value heads")
        scores = (batch, n_heads, n_queries, n_keys)
        # Masks and biases get all four axes, of size 1 where an axis is shared.
        if self.mask is not None:
            check_mask_is_boolean("mask", self.mask)
            object.__setattr__(self, "mask", _align_axes("mask", self.mask, scores))
        if self.bias is not None:
            if not self.bias.is_floating_point():
                raise TypeError(
                    f"bias is added to the scores and must be floating point; got {self.bias.dtype}"
                )
            object.__setattr__(self, "bias", _align_axes("bias", self.bias, scores))
        if self.softcap is not None and not self.softcap > 0:
            raise ValueError(f"softcap must be positive; got {self.softcap}")
        if self.window is not None and not self.window > 0:
            raise ValueError(f"window must be positive; got {self.window}")
        if self.sinks is not None and self.sinks.shape != (n_heads,):
            raise ValueError(
                f"sinks hold one score for each of {n_heads} heads; got {tuple(self.sinks.shape)}"
            )

    @property
    def n_heads(self) -> int:
        """Return how many query heads there are."""
        return self.query.shape[1]

    @property
    def n_kv_heads(self) -> int:
        """Return how many key/value heads there are; fewer than n_heads where queries are grouped."""
        return self.key.shape[1]


Probe = Callable[[AttentionCall], Tensor]
"""What computes at the seam: gets a call, returns its output (batch, n_heads, query, d_value), in the values' dtype."""


def refuse_second(
    seen: Mapping[Kind, Mapping[int, object]],
    kind: Kind,
    layer: int,
) -> None:
    """Refuse an attention that a probe has seen already: it serves one forward pass.

    Raises:
        RuntimeError: The layer of this kind is among those seen.
    """
    if layer in seen.get(kind, {}):
        raise RuntimeError(
            f"{kind} layer {layer} reached the probe twice; each forward pass needs a new probe"
        )


def check_mask_is_boolean(name: str, mask: Tensor) -> None:
    """Refuse a mask, of any shape, that is not boolean: its 1 or 0 could mean either.

    Raises:
        TypeError: The mask is not boolean; the message states the convention.
    """
    if mask.dtype != torch.bool:
        raise TypeError(
            f"{name} must be boolean with True = may attend, got {mask.dtype}. Write mask.bool() where 1 means "
            "attend, mask == 0 where numbers are added to scores (0 = attend), and ~mask for masks of "
            "torch.nn.MultiheadAttention (True = hidden)"
        )


def _align_axes(
    name: str,
    tensor: Tensor,
    scores: tuple[int, int, int, int],
) -> Tensor:
    """Return a view with four axes; refuses a tensor that does not broadcast to the scores."""
    # Missing axes are added in front.
    shape = tuple(tensor.shape)
    aligned = tensor[(None,) * (4 - len(shape))]
    fits = aligned.ndim == 4
    for size, full_size in zip(aligned.shape, scores, strict=False):
        fits &= size in (1, full_size)
    if not fits:
        raise ValueError(f"{name} {shape} does not broadcast to (batch, head, query, key) = {scores}")
    return aligned


def allowed(call: AttentionCall) -> Bool[Tensor, "#batch #n_heads #query #key"] | None:
    """Return which query may attend to which key: the call's mask with causality and window folded in.

    Causality is aligned at the upper left, as in torch's scaled_dot_product_attention: query i sees keys 0..i, even if
    there are more keys than queries. A decoder that continues from cached keys needs the lower right. It must say so in
    `mask` and leave is_causal False.

    Returns:
        True = may attend; None if every query may attend to every key. May share memory with the call's mask: do not
        write into it.
    """
    queries, keys = _positions(call)
    return within_reach(call, call.mask, queries, keys)


def _positions(call: AttentionCall) -> tuple[Int[Tensor, " query"], Int[Tensor, " key"]]:
    """Return the positions of all queries and of all keys, from 0."""
    device = call.query.device
    queries = torch.arange(call.query.shape[2], device=device)
    keys = torch.arange(call.key.shape[2], device=device)
    return queries, keys


def within_reach(
    call: AttentionCall,
    mask: Tensor | None,
    queries: Int[Tensor, " query"],
    keys: Int[Tensor, " key"],
) -> Bool[Tensor, "#batch #n_heads #query #key"] | None:
    """Return a mask of some queries and keys with causality and window folded in; None = all may attend to all.

    `queries` and `keys` are their positions, and `mask`, (batch, n_heads, query, key), is that of the call on them.
    """
    if not call.is_causal and call.window is None:
        return mask
    # (query, 1) against (key,): both conditions are (query, key).
    queries = queries[:, None]
    is_near = torch.ones(1, 1, len(queries), len(keys), dtype=torch.bool, device=keys.device)
    if call.is_causal:
        is_near &= keys <= queries
    if call.window is not None:
        is_near &= (keys - queries).abs() < call.window
    return is_near if mask is None else mask & is_near


def _allowed_without_empty_rows(call: AttentionCall) -> tuple[Tensor | None, Tensor | None]:
    """Return `allowed`, and the rows (batch, head, query, 1) where nothing is allowed; None if there are none.

    Rows that may attend to nothing are opened wide. Their softmax then stays finite, forward and backward and in every
    fused kernel, and the caller overwrites the result with zeros. Over -inf alone softmax is 0 / 0, and zeroing its
    result afterwards still sends NaN into the gradients.
    """
    mask = allowed(call)
    if mask is None:
        return None, None
    # (…, query, 1): true where no key is allowed.
    mask = mask.expand(-1, -1, -1, call.key.shape[2])
    empty = ~mask.any(-1, keepdim=True)
    if not bool(empty.any()):
        return mask, None
    return mask | empty, empty


def attention_weights(call: AttentionCall) -> Float[Tensor, "batch n_heads query key"]:
    """Return the exact softmax weights of every head.

        s_qk = scale * q · k,  softcap * tanh(s_qk / softcap) if there is a soft cap,  + bias_qk
        A_qk = exp(s_qk) / (exp(sink) + sum over allowed k' of exp(s_qk')),  0 where k is not allowed

    Dot products and softmax are computed in float32 or better, under autocast too. Dropout and values do not enter.
    Keys of grouped queries are not copied.

    Returns:
        float64 for float64 queries, else float32; in [0, 1]. A row sums to 1; with sinks to less. A row that may attend
        to nothing, or that is over no keys at all, is all zeros, never NaN, and sends zeros back in gradients.

    Source:
        Scaled dot-product attention: Vaswani et al. 2017, section 3.2.1. Grouped queries: Ainslie et al. 2023. Bias:
        Raffel et al. 2020, section 2.1; Press et al. 2022. Soft cap: Gemma Team 2024 (Gemma 2), section 2. Sinks:
        OpenAI 2025 (gpt-oss model card), section 2.2; the idea: Xiao et al. 2024.
    """
    batch, n_heads, n_queries, _ = call.query.shape
    dtype = torch.promote_types(call.query.dtype, torch.float32)
    mask, empty = _allowed_without_empty_rows(call)
    with without_autocast(call.query.device):
        # Scaled dot products, (batch, n_heads, query, key).
        queries = _per_kv_head(call.query.to(dtype) * call.scale, call.n_kv_heads)
        scores = queries @ call.key.to(dtype).mT
        scores = scores.reshape(batch, n_heads, n_queries, call.key.shape[2])
        if call.softcap is not None:
            scores = (scores / call.softcap).tanh() * call.softcap
        # In place from here: `scores` is this function's own, and maps are what memory goes to.
        if call.bias is not None:
            scores += call.bias.to(dtype)
        if mask is not None:
            scores.masked_fill_(~mask, -math.inf)
        # Softmax over keys.
        weights = scores.softmax(-1)
        if call.sinks is not None:
            # exp(s) / (exp(sink) + sum exp(s')) = softmax(s) * sigmoid(logsumexp(s') - sink): no
            # copy of all scores with one column more.
            sinks = call.sinks.to(dtype)[:, None, None]
            weights = weights * (scores.logsumexp(-1, keepdim=True) - sinks).sigmoid()
    return weights if empty is None else weights.masked_fill(empty, 0.0)


def attend_with_weights(
    call: AttentionCall,
) -> tuple[Float[Tensor, "batch n_heads query d_value"], Float[Tensor, "batch n_heads query key"]]:
    """Attend by the whole map: return the output and the weights that made it.

    Returns:
        The output sum over k of A_qk v_k, in the dtype of the values; and the weights of `attention_weights`. If
        dropout_p > 0, dropout applies to the weights behind the output only. Rows that may attend to nothing are zero
        in both.
    """
    weights = attention_weights(call)
    # Dropout is on the way to the output only: the weights that come back are whole.
    dropped = F.dropout(weights, call.dropout_p) if call.dropout_p else weights
    with without_autocast(call.query.device):
        output = _per_kv_head(dropped, call.n_kv_heads) @ call.value.to(weights.dtype)
    output = output.reshape(*call.query.shape[:3], call.value.shape[3])
    return output.to(call.value.dtype), weights


def select_heads(call: AttentionCall, heads: Sequence[int]) -> AttentionCall:
    """Return the attention of some query heads, in the order given, each with the key/value head that it reads."""
    chosen = list(heads)
    group = call.n_heads // call.n_kv_heads
    # Query heads of one group read one key/value head.
    kv_heads = [head // group for head in chosen]

    def select(tensor: Tensor | None) -> Tensor | None:
        """Return the chosen heads of a mask or bias; one that all heads share stays whole."""
        if tensor is None or tensor.shape[1] == 1:
            return tensor
        return tensor[:, chosen]

    return replace(
        call,
        query=call.query[:, chosen],
        key=call.key[:, kv_heads],
        value=call.value[:, kv_heads],
        mask=select(call.mask),
        bias=select(call.bias),
        sinks=None if call.sinks is None else call.sinks[chosen],
    )


def select_part(
    call: AttentionCall,
    texts: slice = slice(None),
    queries: Int[Tensor, " query"] | None = None,
) -> AttentionCall:
    """Return the same attention of some texts and queries (None = all), with causality and window in its mask."""
    all_queries, keys = _positions(call)
    queries = all_queries if queries is None else queries.to(keys.device)

    def cut(tensor: Tensor | None) -> Tensor | None:
        """Return these texts and queries of a mask or bias; an axis that all share stays."""
        if tensor is None:
            return None
        tensor = tensor[texts] if tensor.shape[0] > 1 else tensor
        return tensor[:, :, queries] if tensor.shape[2] > 1 else tensor

    return replace(
        call,
        query=call.query[texts][:, :, queries],
        key=call.key[texts],
        value=call.value[texts],
        mask=within_reach(call, cut(call.mask), queries, keys),
        bias=cut(call.bias),
        is_causal=False,
        window=None,
    )


def are_numbers(call: AttentionCall) -> Bool[Tensor, " batch"]:
    """Return which texts' queries and keys are all finite, bool.

    If they are not, weights are NaN by definition. But torch's fused kernels may then give finite numbers (seen on the
    processor, in every precision), so the output does not tell.
    """
    return call.query.isfinite().flatten(1).all(1) & call.key.isfinite().flatten(1).all(1)


def attend(call: AttentionCall) -> Float[Tensor, "batch n_heads query d_value"]:
    """Attend by the fastest way there is: what a model runs when nobody watches.

    Takes torch's scaled_dot_product_attention if that can express the call (masks, causality, grouped queries, a bias
    in the queries' own dtype), else the whole map (soft cap, sinks).

    Returns:
        The output of `attend_with_weights` within rounding, in the dtype of the values. Rows that may attend to nothing
        are zero, and send zeros back in gradients.
    """
    needs_map = call.softcap is not None or call.sinks is not None
    # A bias in another dtype would be rounded to the queries': finfo.min of float32 is -inf in float16.
    if call.bias is not None and call.bias.dtype != call.query.dtype:
        needs_map = True
    if needs_map:
        output, _ = attend_with_weights(call)
        return output
    # Only plain causality can be given to the kernel as a flag; a mask or a bias has to carry it within.
    kernel_is_causal = call.is_causal and call.mask is None and call.bias is None and call.window is None
    mask, empty = (None, None) if kernel_is_causal else _allowed_without_empty_rows(call)
    # The kernel takes one tensor: a mask, or numbers to add, -inf where hidden.
    kernel_mask = mask
    if call.bias is not None:
        added = call.bias if mask is None else torch.where(mask, call.bias, -math.inf)
        kernel_mask = added.expand(-1, -1, call.query.shape[2], call.key.shape[2])
    output = F.scaled_dot_product_attention(
        call.query,
        call.key,
        call.value,
        attn_mask=kernel_mask,
        dropout_p=call.dropout_p,
        is_causal=kernel_is_causal,
        scale=call.scale,
        enable_gqa=call.n_kv_heads != call.n_heads,
    )
    return output if empty is None else output.masked_fill(empty, 0.0)


def _per_kv_head(rows: Tensor, n_kv_heads: int) -> Tensor:
    """Lay the query heads of one key/value head end to end: (batch, n_kv_heads, group * query, …).

    One matrix product then serves the group; broadcasting over a group axis would make matmul copy the keys.
    """
    batch, n_heads, n_queries, width = rows.shape
    return rows.reshape(batch, n_kv_heads, n_heads // n_kv_heads * n_queries, width)
