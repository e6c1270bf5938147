"""The oracle: attention in plain NumPy float64 loops, slow and easy to believe.

Everything else in core is tested against this module, so it shares no code with it: no torch, no broadcasting, no
einsum; one number at a time, as the formulas are written. One text at a time, no batch. Same conventions as
core.attention: boolean masks with True = may attend, causality aligned at the upper left, all zeros where nothing may
be attended to.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Projection:
    """A linear map as torch.nn.Linear stores it: y = W x + b.

    Attributes:
        weight: (width out, width in).
        bias: (width out,), None = zero.
    """

    weight: ArrayLike
    bias: ArrayLike | None = None


def attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    mask: ArrayLike | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    bias: ArrayLike | None = None,
    softcap: float | None = None,
    sinks: float | None = None,
) -> tuple[Array, Array]:
    """One head of scaled dot-product attention.

        s_qk = scale * q · k,  softcap * tanh(s_qk / softcap) if there is a soft cap,  + bias_qk
        A_qk = exp(s_qk) / (exp(sink) + sum over allowed k' of exp(s_qk')),  0 where k is not allowed
        output_q = sum over k of A_qk v_k

    Args:
        query: (query, d_head).
        key: (key, d_head).
        value: (key, d_value).
        mask: Boolean, (query, key), True = may attend; None = all may.
        is_causal: Whether query i may attend to keys 0..i only, on top of the mask.
        scale: Factor on the dot products; None = 1 / sqrt(d_head).
        bias: Added to the scores, (query, key); finite.
        softcap: Bound of the scores; None = none.
        sinks: The head's extra score that takes weight and gives no value; None = none.

    Returns:
        The output, (query, d_value), and the weights, (query, key), in [0, 1]. Rows that may attend to nothing, or
        where there are no keys, are zero in both.

    Raises:
        ValueError: Shapes do not fit together.
        TypeError: The mask is not boolean.

    Source:
        Vaswani et al. 2017, section 3.2.1; for the rest see core.attention.attention_weights.
    """
    queries = _float64(query)
    keys = _float64(key)
    values = _float64(value)
    shapes = f"query {queries.shape}, key {keys.shape}, value {values.shape}"
    if not queries.ndim == keys.ndim == values.ndim == 2:
        raise ValueError(f"one head of one text is (token, width); got {shapes}")
    (n_queries, d_head), n_keys, d_value = queries.shape, keys.shape[0], values.shape[1]
    if keys.shape[1] != d_head or values.shape[0] != n_keys:
        raise ValueError(
            f"queries and keys share their width, keys and values their number of tokens; got {shapes}"
        )
    may = None if mask is None else np.asarray(mask)
    if may is not None and may.dtype != np.bool_:
        raise TypeError(f"mask must be boolean with True = may attend; got {may.dtype}")
    added = None if bias is None else _float64(bias)
    for name, array in (("mask", may), ("bias", added)):
        if array is not None and array.shape != (n_queries, n_keys):
            raise ValueError(f"{name} must be (query, key) = {(n_queries, n_keys)}; got {array.shape}")
    if scale is None:
        scale = 1.0 / math.sqrt(d_head)

    output = np.zeros((n_queries, d_value))
    weights = np.zeros((n_queries, n_keys))
    for q in range(n_queries):
        scores: dict[int, float] = {}
        for k in range(n_keys):
            if (may is not None and not may[q, k]) or (is_causal and k > q):
                continue
            score = 0.0
            for d in range(d_head):
                score += queries[q, d] * keys[k, d]
            score *= scale
            if softcap is not None:
                score = softcap * math.tanh(score / softcap)
            if added is not None:
                score += added[q, k]
            scores[k] = score
        if not scores:
            continue
        largest = max(scores.values())
        if sinks is not None:
            largest = max(largest, sinks)
        total = 0.0 if sinks is None else math.exp(sinks - largest)
        for score in scores.values():
            total += math.exp(score - largest)
        for k, score in scores.items():
            weights[q, k] = math.exp(score - largest) / total
            for d in range(d_value):
                output[q, d] += weights[q, k] * values[k, d]
    return output, weights


def multi_head(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    n_heads: int,
    *,
    q: Projection | None = None,
    k: Projection | None = None,
    v: Projection | None = None,
    out: Projection | None = None,
    n_kv_heads: int | None = None,
    mask: ArrayLike | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    bias: ArrayLike | None = None,
    softcap: float | None = None,
    sinks: Sequence[float] | None = None,
) -> tuple[Array, Array]:
    """Multi-head attention on one text: project, cut into heads by columns, attend, join, project.

    Args:
        query: (query, width).
        key: (key, width).
        value: (key, width).
        n_heads: How many query heads; head h takes columns h * d_head up to (h + 1) * d_head of the projected
            queries.
        q: Projection of the queries; None = identity, the columns as they are. Likewise k, v, and `out` for the
            output.
        k: Projection of the keys.
        v: Projection of the values.
        out: Projection of the joined heads.
        n_kv_heads: How many key/value heads; None = n_heads. With fewer, query head h reads head h // (n_heads //
            n_kv_heads).
        mask: Boolean, (query, key) for all heads or (n_heads, query, key); True = may attend.
        is_causal: Whether query i may attend to keys 0..i only, on top of the mask.
        scale: Factor on the dot products; None = 1 / sqrt(d_head).
        bias: Added to the scores, (query, key) for all heads or (n_heads, query, key).
        softcap: Bound of the scores; None = none.
        sinks: Each head's extra score.

    Returns:
        The output, (query, width of the output), and the weights, (n_heads, query, key).

    Raises:
        ValueError: The projected widths are not divisible by the number of heads, or shapes do not fit together.
        TypeError: The mask is not boolean.

    Source:
        Vaswani et al. 2017, section 3.2.2. Grouped queries: Ainslie et al. 2023.
    """
    n_kv_heads = n_heads if n_kv_heads is None else n_kv_heads
    if n_heads < 1 or n_kv_heads < 1 or n_heads % n_kv_heads:
        raise ValueError(f"{n_heads} query heads are not a multiple of {n_kv_heads} key/value heads")
    queries = project(query, q)
    keys = project(key, k)
    values = project(value, v)
    for name, rows, heads in (
        ("query", queries, n_heads),
        ("key", keys, n_kv_heads),
        ("value", values, n_kv_heads),
    ):
        if rows.ndim != 2 or rows.shape[1] % heads:
            raise ValueError(
                f"{name} {rows.shape} is not (token, width) with a width divisible by {heads} heads"
            )

    heads_out: list[Array] = []
    weights: list[Array] = []
    for h in range(n_heads):
        read = h // (n_heads // n_kv_heads)
        head_output, head_weights = attention(
            _columns(queries, h, n_heads),
            _columns(keys, read, n_kv_heads),
            _columns(values, read, n_kv_heads),
            mask=_of_head(mask, h, n_heads),
            is_causal=is_causal,
            scale=scale,
            bias=_of_head(bias, h, n_heads),
            softcap=softcap,
            sinks=None if sinks is None else float(sinks[h]),
        )
        heads_out.append(head_output)
        weights.append(head_weights)
    return project(np.concatenate(heads_out, axis=1), out), np.stack(weights)


def project(rows: ArrayLike, projection: Projection | None) -> Array:
    """Rows, (token, width in), through a linear map, None = identity: (token, width out).

    Raises:
        ValueError: The map does not fit the rows.
    """
    values = _float64(rows)
    if projection is None:
        return values
    weight = _float64(projection.weight)
    width_out, width_in = weight.shape
    if values.ndim != 2 or values.shape[1] != width_in:
        raise ValueError(f"a projection from {width_in} columns does not fit {values.shape}")
    bias = np.zeros(width_out) if projection.bias is None else _float64(projection.bias)
    result = np.zeros((values.shape[0], width_out))
    for row in range(values.shape[0]):
        for j in range(width_out):
            total = bias[j]
            for i in range(width_in):
                total += weight[j, i] * values[row, i]
            result[row, j] = total
    return result


def _columns(rows: Array, head: int, n_heads: int) -> Array:
    width = rows.shape[1] // n_heads
    return rows[:, head * width : (head + 1) * width]


def _of_head(array: ArrayLike | None, head: int, n_heads: int) -> NDArray[np.generic] | None:
    """A head's own (query, key) part of a mask or bias, or the one that all heads share."""
    if array is None:
        return None
    whole: NDArray[np.generic] = np.asarray(array)
    if whole.ndim == 3 and whole.shape[0] != n_heads:
        raise ValueError(f"a mask or bias by heads needs {n_heads} of them; got {whole.shape}")
    return whole[head] if whole.ndim == 3 else whole


def _float64(array: ArrayLike) -> Array:
    return np.asarray(array, dtype=np.float64)
