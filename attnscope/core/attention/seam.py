"""Describe the attention of one layer as an AttentionCall, and compute its output and its exact weights.

This is the package's *seam*: the one function call through which the attention of every model goes. A model hands over
its queries, keys, values and masks, and gets back the heads' outputs. The function between the two is a `Probe`: a hook
that computes the output, and may also record or change the attention.

Masks follow `torch.nn.functional.scaled_dot_product_attention`: boolean, True = this query MAY attend to this key.
`torch.nn.MultiheadAttention` and many tutorials mean the opposite (True = hidden). Hugging Face has two forms. A
mask of two dimensions holds 1 = keep and 0 = hidden. A mask of four is added to scores: 0 = keep, finfo.min = hidden.

Two functions compute the same output. `attend` uses torch's fused kernels, which keep no weights.
`attend_with_weights` computes the dense *map* of exact weights, and returns it too.

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
"""The kind of attention: self-attention of an encoder or of a decoder, or cross-attention of a decoder."""


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """Hold the inputs of one attention layer.

    Attributes:
        layer: Index of the layer within its kind, from 0.
        kind: "encoder", "decoder" or "cross".
        query: Queries, (batch, n_heads, query, d_head).
        key: Keys, (batch, n_kv_heads, key, d_head). n_heads is a multiple of n_kv_heads; query head h reads
            key/value head h // (n_heads // n_kv_heads). Keys are not repeated for grouped queries.
        value: Values, (batch, n_kv_heads, key, d_value).
        scale: Factor on the dot products, usually 1 / sqrt(d_head).
        mask: Boolean, broadcastable to (batch, n_heads, query, key). True = the query may attend to the key; None =
            it may to every key. Missing axes are added in front, so that mask and bias have four.
        is_causal: If True, query i may attend only to keys 0..i, of those that `mask` allows.
        window: Width of a sliding window. If set, query i may attend only to keys j with |i - j| < window, of those
            that `mask` and causality allow.
        bias: Added to the scaled scores, such as the position biases of T5 and ALiBi. Broadcastable to the scores, and
            finite. To hide a key, use `mask`: a bias of finfo.min is a number like any other.
        softcap: If set, scaled scores s become softcap * tanh(s / softcap), before bias and mask (Gemma 2).
        sinks: Learned sinks: one more score per head, (n_heads,), that enters the softmax but has no value (gpt-oss).
            The weights of a query then sum to less than 1.
        dropout_p: Probability with which each weight is dropped; 0 outside training.

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
        scores_shape = (batch, n_heads, n_queries, n_keys)
        # Masks and biases get all four axes, of size 1 where an axis is shared.
        if self.mask is not None:
            require_boolean_mask("mask", self.mask)
            # The dataclass is frozen, so that plain assignment would raise.
            object.__setattr__(self, "mask", _align_axes("mask", self.mask, scores_shape))
        if self.bias is not None:
            if not self.bias.is_floating_point():
                raise TypeError(
                    f"bias is added to the scores and must be floating point; got {self.bias.dtype}"
                )
            object.__setattr__(self, "bias", _align_axes("bias", self.bias, scores_shape))
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
"""A hook that computes the output of an attention, (batch, n_heads, query, d_value), in the values' dtype."""


def require_first_visit(
    seen: Mapping[Kind, Mapping[int, object]],
    kind: Kind,
    layer: int,
) -> None:
    """Refuse a layer that a probe has recorded already, because a probe serves one forward pass.

    `seen` is kind -> layer -> what the probe recorded of the layer.

    Raises:
        RuntimeError: `seen` has the layer of this kind.
    """
    if layer in seen.get(kind, {}):
        raise RuntimeError(
            f"{kind} layer {layer} reached the probe twice; each forward pass needs a new probe"
        )


def require_boolean_mask(name: str, mask: Tensor) -> None:
    """Refuse a mask, of any shape, that is not boolean: in a mask of numbers, 1 could mean "may attend" or "hidden".

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
    scores_shape: tuple[int, int, int, int],
) -> Tensor:
    """Return a view of a mask or bias with four axes.

    Raises:
        ValueError: The tensor does not broadcast to the shape of the scores.
    """
    shape = tuple(tensor.shape)
    # Add the missing axes in front. Then each axis must have the full size, or 1.
    sizes = (1,) * (4 - len(shape)) + shape
    fits = [size in (1, full_size) for size, full_size in zip(sizes, scores_shape, strict=False)]
    if len(sizes) != 4 or not all(fits):
        raise ValueError(
            f"{name} {shape} does not broadcast to (batch, head, query, key) = {scores_shape}"
        )
    return tensor.view(sizes)


def allowed(call: AttentionCall) -> Bool[Tensor, "#batch #n_heads #query #key"] | None:
    """Return which query may attend to which key: the call's mask, combined with causality and window.

    Query i and key i are at the same position, as in torch's scaled_dot_product_attention: a causal query i sees keys
    0..i, even if there are more keys than queries. A decoder that continues from a key/value cache has its first query
    after the cached keys. Express its causality as `mask`, and leave is_causal False.

    Returns:
        True = may attend; None if every query may attend to every key. It may share memory with the call's mask, so do
        not write into it.
    """
    query_positions, key_positions = _positions(call)
    return visible_mask(call.mask, query_positions, key_positions, call.is_causal, call.window)


def _positions(call: AttentionCall) -> tuple[Int[Tensor, " query"], Int[Tensor, " key"]]:
    """Return the positions of all queries and of all keys, from 0."""
    device = call.query.device
    query_positions = torch.arange(call.query.shape[2], device=device)
    key_positions = torch.arange(call.key.shape[2], device=device)
    return query_positions, key_positions


def visible_mask(
    mask: Tensor | None,
    query_positions: Int[Tensor, " query"],
    key_positions: Int[Tensor, " key"],
    is_causal: bool,
    window: int | None,
) -> Bool[Tensor, "#batch #n_heads #query #key"] | None:
    """Return a mask of some queries and keys, combined with causality and window.

    Args:
        mask: For these queries and keys, (batch, n_heads, query, key); None = it hides no key.
        query_positions: Positions of the queries in the text.
        key_positions: Positions of the keys in the text.
        is_causal: As in an AttentionCall.
        window: As in an AttentionCall.

    Returns:
        True = may attend; None if every query may attend to every key.
    """
    if not is_causal and window is None:
        return mask
    # Compare (query, 1) with (key,): both conditions are (query, key), and `is_near` is (1, 1, query, key).
    query_positions = query_positions[:, None]
    is_near = torch.ones(
        1, 1, len(query_positions), len(key_positions), dtype=torch.bool, device=key_positions.device
    )
    if is_causal:
        is_near &= key_positions <= query_positions
    if window is not None:
        is_near &= (key_positions - query_positions).abs() < window
    return is_near if mask is None else mask & is_near


def _allowed_without_empty_rows(call: AttentionCall) -> tuple[Tensor | None, Tensor | None]:
    """Return the `allowed` mask with its empty rows set to True, and which rows are empty, (batch, head, query, 1).

    A row of the mask is empty if its query may attend to no key. The softmax of such a row is 0 / 0 = NaN, and the NaN
    reaches the gradients even if the result is then overwritten with zeros. If the row is set to True instead, softmax
    and gradients stay finite, also in fused kernels, and the caller overwrites the result with zeros.

    The first is None if the mask hides no key; the second is None if no row is empty.
    """
    mask = allowed(call)
    if mask is None:
        return None, None
    mask = mask.expand(-1, -1, -1, call.key.shape[2])
    is_empty_row = ~mask.any(-1, keepdim=True)
    if not is_empty_row.any():
        return mask, None
    return mask | is_empty_row, is_empty_row


def attention_weights(call: AttentionCall) -> Float[Tensor, "batch n_heads query key"]:
    """Return the exact softmax weights of every head.

        s_qk = scale * q · k,  softcap * tanh(s_qk / softcap) if there is a soft cap,  + bias_qk
        A_qk = exp(s_qk) / (exp(sink) + sum over allowed k' of exp(s_qk')),  0 where k is not allowed

    Dot products and softmax are computed in float32 or better, also under autocast. Dropout is not applied.

    Returns:
        float64 for float64 queries, else float32; in [0, 1]. A row sums to 1, with sinks to less. If a query may attend
        to no key, or there are no keys, its row is zeros, never NaN, and so are its gradients.

    Source:
        Scaled dot-product attention: Vaswani et al. 2017, section 3.2.1. Grouped queries: Ainslie et al. 2023. Bias:
        Raffel et al. 2020, section 2.1; Press et al. 2022. Soft cap: Gemma Team 2024 (Gemma 2), section 2. Sinks:
        OpenAI 2025 (gpt-oss model card), section 2.2; the idea: Xiao et al. 2024.
    """
    batch, n_heads, n_queries, _ = call.query.shape
    dtype = torch.promote_types(call.query.dtype, torch.float32)
    mask, is_empty_row = _allowed_without_empty_rows(call)
    with torch.autocast(call.query.device.type, enabled=False):
        # Scaled dot products, (batch, n_heads, query, key).
        queries = _join_heads_per_kv_head(call.query.to(dtype) * call.scale, call.n_kv_heads)
        scores = queries @ call.key.to(dtype).mT
        scores = scores.reshape(batch, n_heads, n_queries, call.key.shape[2])
        if call.softcap is not None:
            scores = (scores / call.softcap).tanh() * call.softcap
        # From here on scores are changed in place, because they take most of the memory.
        if call.bias is not None:
            scores += call.bias.to(dtype)
        if mask is not None:
            scores.masked_fill_(~mask, -math.inf)
        # Softmax over keys.
        weights = scores.softmax(-1)
        if call.sinks is not None:
            # The softmax with a sink:
            # exp(s) / (exp(sink) + sum exp(s')) = softmax(s) * sigmoid(logsumexp(s') - sink).
            # The right side needs no copy of the scores with the sink as one more column.
            sinks = call.sinks.to(dtype)[:, None, None]
            weights = weights * (scores.logsumexp(-1, keepdim=True) - sinks).sigmoid()
    return weights if is_empty_row is None else weights.masked_fill(is_empty_row, 0.0)


def attend_with_weights(
    call: AttentionCall,
) -> tuple[Float[Tensor, "batch n_heads query d_value"], Float[Tensor, "batch n_heads query key"]]:
    """Compute the exact weights, and the output from them.

    Returns:
        The output sum over k of A_qk v_k, in the dtype of the values; and the weights of `attention_weights`. If
        dropout_p > 0, dropout is applied to the weights in the output, but not to those returned. Both are zeros for
        queries that may attend to no key.
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
    """Return sum over k of A_qk v_k, in the dtype of both. Grouped query heads share values, without a copy."""
    products = _join_heads_per_kv_head(weights, values.shape[1]) @ values
    return products.reshape(*weights.shape[:3], values.shape[3])


def select_heads(call: AttentionCall, heads: Sequence[int]) -> AttentionCall:
    """Return a call of some query heads, in the order of `heads`, each with the key/value head that it reads."""
    chosen = list(heads)
    # Consecutive query heads form a group, and the heads of a group share one key/value head.
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
    """Return a call of some texts and queries. Its mask includes causality and window, which depend on positions.

    `queries` are positions in the text; None = all.
    """
    all_queries, key_positions = _positions(call)
    queries = all_queries if queries is None else queries.to(key_positions.device)

    def select(tensor: Tensor | None) -> Tensor | None:
        """Return a mask or bias for these texts and queries. An axis of size 1 is shared by all, and stays."""
        if tensor is None:
            return None
        tensor = tensor[texts] if tensor.shape[0] > 1 else tensor
        return tensor[:, :, queries] if tensor.shape[2] > 1 else tensor

    return replace(
        call,
        query=call.query[texts][:, :, queries],
        key=call.key[texts],
        value=call.value[texts],
        mask=visible_mask(select(call.mask), queries, key_positions, call.is_causal, call.window),
        bias=select(call.bias),
        is_causal=False,
        window=None,
    )


def find_finite_texts(call: AttentionCall) -> Bool[Tensor, " batch"]:
    """Return which texts have only finite queries and keys, bool.

    In the other texts the weights are NaN by definition. Their outputs cannot tell: torch's fused kernels may return
    finite numbers there (observed on the CPU, in every precision).
    """
    return call.query.isfinite().flatten(1).all(1) & call.key.isfinite().flatten(1).all(1)


def attend(call: AttentionCall) -> Float[Tensor, "batch n_heads query d_value"]:
    """Return the output the fastest way, without the weights. This is the default when no probe is set.

    It uses torch's scaled_dot_product_attention if that can express the call. It can express masks, causality, grouped
    queries, and a bias in the dtype of the queries. For a soft cap or sinks the dense weights are computed.

    Returns:
        The output of `attend_with_weights` within rounding, in the dtype of the values. The output of a query that may
        attend to no key is zeros, and so are its gradients.
    """
    # The kernel would round a bias to the queries' dtype, such as finfo.min of float32 to -inf of float16.
    would_round_bias = call.bias is not None and call.bias.dtype != call.query.dtype
    if call.softcap is not None or call.sinks is not None or would_round_bias:
        output, _ = attend_with_weights(call)
        return output
    # The kernel has a flag for causality, but does not accept it together with a mask. With a mask, bias or window,
    # causality therefore becomes part of the mask.
    kernel_is_causal = call.is_causal and call.mask is None and call.bias is None and call.window is None
    mask = None
    is_empty_row = None
    if not kernel_is_causal:
        mask, is_empty_row = _allowed_without_empty_rows(call)
    # The kernel has one argument for mask and bias: booleans, or numbers that are added to the scores. A bias with a
    # mask is passed as numbers, with -inf where the mask hides a key.
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
    return output if is_empty_row is None else output.masked_fill(is_empty_row, 0.0)


def _join_heads_per_kv_head(rows: Tensor, n_kv_heads: int) -> Tensor:
    """Join the rows of the query heads that share a key/value head, so that one matrix product serves them all.

    (batch, n_heads, query, width) becomes (batch, n_kv_heads, n_heads / n_kv_heads * query, width). With an axis of
    groups instead, matmul would broadcast the keys, and copy them.
    """
    batch, n_heads, n_queries, width = rows.shape
    return rows.reshape(batch, n_kv_heads, n_heads // n_kv_heads * n_queries, width)
