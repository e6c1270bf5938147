"""Describe each attention of each model as one AttentionCall, and compute it: the seam of the package.

A model hands its queries, keys, values and masks over here, and gets back the heads' outputs. What happens in between
is a function from call to output (a `Probe`), which may also read or change the attention.

Masks follow `torch.nn.functional.scaled_dot_product_attention`: boolean, True = this query MAY attend to this key.
`torch.nn.MultiheadAttention` and many tutorials mean the opposite (True = hidden). Hugging Face gives its models
1 = keep in two dimensions, but adds 0 / finfo.min in four.

Two functions compute the same output: `attend` by torch's fused kernels, without a map, and `attend_with_weights` by
the dense map of exact weights, which it returns too.

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

Kind = Literal["encoder", "decoder", "cross"]
"""Whose attention it is: an encoder's own, a decoder's own, or a decoder's on the encoder."""


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """Hold one attention of one layer, as it reaches the seam.

    Attributes:
        layer: Index of the layer within its kind, from 0.
        kind: "encoder", "decoder" or "cross".
        query: Queries, (batch, n_heads, query, d_head).
        key: Keys, (batch, n_kv_heads, key, d_head). n_heads is a multiple of n_kv_heads; query head h reads
            key/value head h // (n_heads // n_kv_heads). They are not repeated: grouped queries stay visible.
        value: Values, (batch, n_kv_heads, key, d_value).
        scale: Factor on the dot products, usually 1 / sqrt(d_head).
        mask: Boolean, broadcastable to (batch, n_heads, query, key); True = may attend; None = all may. Missing axes
            are added in front, here and in `bias`, so that both have four.
        is_causal: If True, query i may attend to keys 0..i only, on top of `mask`.
        window: If set, query i may attend to keys less than `window` tokens away only, on top of `mask` and causality:
            a sliding window that needs no mask of its own.
        bias: Added to the scaled scores: position biases of T5, ALiBi. Broadcastable to the scores; finite. To hide a
            key, use `mask`: finfo.min here is a number like any other.
        softcap: If set, scaled scores s become softcap * tanh(s / softcap), before bias and mask (Gemma 2).
        sinks: One more score for each head, (n_heads,), that enters the softmax and has no value (gpt-oss): the weights
            of a query then sum to less than 1.
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
"""A function that computes an attention: call -> output, (batch, n_heads, query, d_value), in the values' dtype."""


def require_first_visit(
    seen: Mapping[Kind, Mapping[int, object]],
    kind: Kind,
    layer: int,
) -> None:
    """Refuse an attention that a probe has seen already, because a probe serves one forward pass.

    `seen` is kind -> layer -> what the probe has kept of it.

    Raises:
        RuntimeError: The layer of this kind is among those seen.
    """
    if layer in seen.get(kind, {}):
        raise RuntimeError(
            f"{kind} layer {layer} reached the probe twice; each forward pass needs a new probe"
        )


def check_mask_is_boolean(name: str, mask: Tensor) -> None:
    """Refuse a mask, of any shape, that is not boolean: 1 could mean "may attend" or "hidden".

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
    """Return a view with four axes; refuses a tensor that does not broadcast to the shape of the scores."""
    shape = tuple(tensor.shape)
    # Add the missing axes in front. Each axis is then whole, or of size 1.
    sizes = (1,) * (4 - len(shape)) + shape
    fits = [size in (1, full_size) for size, full_size in zip(sizes, scores, strict=False)]
    if len(sizes) != 4 or not all(fits):
        raise ValueError(f"{name} {shape} does not broadcast to (batch, head, query, key) = {scores}")
    return tensor.view(sizes)


def allowed(call: AttentionCall) -> Bool[Tensor, "#batch #n_heads #query #key"] | None:
    """Return which query may attend to which key: the call's mask with causality and window folded in.

    Causality is aligned at the upper left, as in torch's scaled_dot_product_attention: query i sees keys 0..i, even if
    there are more keys than queries. A decoder that continues from cached keys needs the lower right: give that as
    `mask`, and leave is_causal False.

    Returns:
        True = may attend; None if every query may attend to every key. May share memory with the call's mask: do not
        write into it.
    """
    queries, keys = _positions(call)
    return visible_mask(call.mask, queries, keys, call.is_causal, call.window)


def _positions(call: AttentionCall) -> tuple[Int[Tensor, " query"], Int[Tensor, " key"]]:
    """Return the positions of all queries and of all keys, from 0."""
    device = call.query.device
    queries = torch.arange(call.query.shape[2], device=device)
    keys = torch.arange(call.key.shape[2], device=device)
    return queries, keys


def visible_mask(
    mask: Tensor | None,
    queries: Int[Tensor, " query"],
    keys: Int[Tensor, " key"],
    is_causal: bool,
    window: int | None,
) -> Bool[Tensor, "#batch #n_heads #query #key"] | None:
    """Return the mask of some queries and keys with causality and window folded in; None = all may attend to all.

    Args:
        mask: (batch, n_heads, query, key), for these queries and keys; None = hides nothing.
        queries: Their positions in the text.
        keys: Their positions in the text.
        is_causal: As in an AttentionCall.
        window: As in an AttentionCall.
    """
    if not is_causal and window is None:
        return mask
    # (query, 1) against (key,): both conditions are (query, key).
    queries = queries[:, None]
    is_near = torch.ones(1, 1, len(queries), len(keys), dtype=torch.bool, device=keys.device)
    if is_causal:
        is_near &= keys <= queries
    if window is not None:
        is_near &= (keys - queries).abs() < window
    return is_near if mask is None else mask & is_near


def _allowed_without_empty_rows(call: AttentionCall) -> tuple[Tensor | None, Tensor | None]:
    """Return the `allowed` mask with its empty rows set to True, and which rows are empty, (batch, head, query, 1).

    A row is empty if its query may attend to nothing. Over -inf alone softmax is 0 / 0, and zeroing the result still
    sends NaN into the gradients. With all keys allowed it stays finite, forward and backward and in every fused kernel;
    the caller then overwrites the result with zeros. None stands for a mask that hides nothing, and for no empty row.
    """
    mask = allowed(call)
    if mask is None:
        return None, None
    mask = mask.expand(-1, -1, -1, call.key.shape[2])
    empty = ~mask.any(-1, keepdim=True)
    if not empty.any():
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
    with torch.autocast(call.query.device.type, enabled=False):
        # Scaled dot products, (batch, n_heads, query, key).
        queries = _per_kv_head(call.query.to(dtype) * call.scale, call.n_kv_heads)
        scores = queries @ call.key.to(dtype).mT
        scores = scores.reshape(batch, n_heads, n_queries, call.key.shape[2])
        if call.softcap is not None:
            scores = (scores / call.softcap).tanh() * call.softcap
        # In place from here on, because maps take most of the memory; nothing else reads these scores.
        if call.bias is not None:
            scores += call.bias.to(dtype)
        if mask is not None:
            scores.masked_fill_(~mask, -math.inf)
        # Softmax over keys.
        weights = scores.softmax(-1)
        if call.sinks is not None:
            # exp(s) / (exp(sink) + sum exp(s')) = softmax(s) * sigmoid(logsumexp(s') - sink), which needs no copy of
            # the scores with one more column.
            sinks = call.sinks.to(dtype)[:, None, None]
            weights = weights * (scores.logsumexp(-1, keepdim=True) - sinks).sigmoid()
    return weights if empty is None else weights.masked_fill(empty, 0.0)


def attend_with_weights(
    call: AttentionCall,
) -> tuple[Float[Tensor, "batch n_heads query d_value"], Float[Tensor, "batch n_heads query key"]]:
    """Compute the output from the whole map, and return both.

    Returns:
        The output sum over k of A_qk v_k, in the dtype of the values; and the weights of `attention_weights`. If
        dropout_p > 0, the output is that of weights with dropout, but the weights come back without it. Rows that may
        attend to nothing are zero in both.
    """
    weights = attention_weights(call)
    dropped = F.dropout(weights, call.dropout_p) if call.dropout_p else weights
    with torch.autocast(call.query.device.type, enabled=False):
        output = weighted_values(dropped, call.value.to(weights.dtype))
    return output.to(call.value.dtype), weights


def weighted_values(
    weights: Float[Tensor, "batch n_heads query key"],
    values: Float[Tensor, "batch n_kv_heads key width"],
) -> Float[Tensor, "batch n_heads query width"]:
    """Return the product of weights and values, in the dtype of both; values of grouped queries are not repeated."""
    products = _per_kv_head(weights, values.shape[1]) @ values
    return products.reshape(*weights.shape[:3], values.shape[3])


def select_heads(call: AttentionCall, heads: Sequence[int]) -> AttentionCall:
    """Return the attention of some query heads, in the order given, each with the key/value head that it reads."""
    chosen = list(heads)
    # Query heads of one group read one key/value head.
    group_size = call.n_heads // call.n_kv_heads
    kv_heads = [head // group_size for head in chosen]

    def select(tensor: Tensor | None) -> Tensor | None:
        """Return a mask or bias, (batch, n_heads or 1, query, key), for the chosen heads."""
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


def select_rows(
    call: AttentionCall,
    texts: slice,
    queries: Int[Tensor, " query"] | None = None,
) -> AttentionCall:
    """Return the rows of some texts and queries as an attention of their own; its mask holds causality and window.

    `queries` are their positions; None = all.
    """
    all_queries, keys = _positions(call)
    queries = all_queries if queries is None else queries.to(keys.device)

    def select(tensor: Tensor | None) -> Tensor | None:
        """Return a mask or bias for these texts and queries; it may have size 1 along both axes."""
        if tensor is None:
            return None
        tensor = tensor[texts] if tensor.shape[0] > 1 else tensor
        return tensor[:, :, queries] if tensor.shape[2] > 1 else tensor

    return replace(
        call,
        query=call.query[texts][:, :, queries],
        key=call.key[texts],
        value=call.value[texts],
        mask=visible_mask(select(call.mask), queries, keys, call.is_causal, call.window),
        bias=select(call.bias),
        is_causal=False,
        window=None,
    )


def finite_texts(call: AttentionCall) -> Bool[Tensor, " batch"]:
    """Return which texts have only finite queries and keys, bool.

    For the other texts the weights are NaN by definition. Their output may still be finite: torch's fused kernels give
    such numbers (seen on the CPU, in every precision).
    """
    return call.query.isfinite().flatten(1).all(1) & call.key.isfinite().flatten(1).all(1)


def attend(call: AttentionCall) -> Float[Tensor, "batch n_heads query d_value"]:
    """Attend the fastest way: the default, where no probe reads the weights.

    Takes torch's scaled_dot_product_attention if that can express the call (masks, causality, grouped queries, a bias
    in the queries' own dtype), else the whole map (soft cap, sinks).

    Returns:
        The output of `attend_with_weights` within rounding, in the dtype of the values. Rows that may attend to nothing
        are zero, and send zeros back in gradients.
    """
    # The kernel would round a bias to the queries' dtype: finfo.min of float32 is -inf in float16.
    would_round_bias = call.bias is not None and call.bias.dtype != call.query.dtype
    if call.softcap is not None or call.sinks is not None or would_round_bias:
        output, _ = attend_with_weights(call)
        return output
    # The kernel knows causality as a flag, but not beside a mask or bias: then they have to express it.
    kernel_is_causal = call.is_causal and call.mask is None and call.bias is None and call.window is None
    mask = None
    empty = None
    if not kernel_is_causal:
        mask, empty = _allowed_without_empty_rows(call)
    # The kernel takes a boolean mask, or numbers to add to the scores: a bias, -inf where the mask hides a key.
    if call.bias is not None:
        mask = call.bias if mask is None else torch.where(mask, call.bias, -math.inf)
        mask = mask.expand(-1, -1, call.query.shape[2], call.key.shape[2])
    output = F.scaled_dot_product_attention(
        call.query,
        call.key,
        call.value,
        attn_mask=mask,
        dropout_p=call.dropout_p,
        is_causal=kernel_is_causal,
        scale=call.scale,
        enable_gqa=call.n_kv_heads != call.n_heads,
    )
    return output if empty is None else output.masked_fill(empty, 0.0)


def _per_kv_head(rows: Tensor, n_kv_heads: int) -> Tensor:
    """Lay the rows of the query heads that share a key/value head end to end, for one matrix product.

    (batch, n_heads, query, width) becomes (batch, n_kv_heads, n_heads / n_kv_heads * query, width). Broadcasting over
    an axis of groups instead would make matmul copy the keys.
    """
    batch, n_heads, n_queries, width = rows.shape
    return rows.reshape(batch, n_kv_heads, n_heads // n_kv_heads * n_queries, width)
