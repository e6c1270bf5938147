"""The steps of attention in plain NumPy float64 loops, slow and easy to believe.

`learn trace` is checked against this module, which shares no code with it: no torch, no broadcasting, no einsum;
one number at a time, as the formulas are written, one text at a time. The kernels are tested against tests/oracle.py.
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


def head_steps(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    scale: float,
    *,
    mask: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    softcap: float | None = None,
    sink: float | None = None,
) -> dict[str, Array]:
    """One head, with everything on the way from dot products to output.

        s_qk = scale * q · k,  softcap * tanh(s_qk / softcap) if there is a soft cap,  + bias_qk
        A_qk = exp(s_qk) / (exp(sink) + sum over allowed k' of exp(s_qk')),  0 where k is not allowed
        output_q = sum over k of A_qk v_k

    Args:
        query: (query, d_head).
        key: (key, d_head).
        value: (key, d_value).
        scale: Factor on the dot products.
        mask: Boolean, (query, key), True = may attend; None = all may.
        bias: Added to the scores, (query, key).
        softcap: Bound of the scores; None = none.
        sink: The head's extra score; None = none.

    Returns:
        By name, each (query, key) unless noted: dot_products; scores (scaled); capped_scores, biased_scores,
        masked_scores (-inf where not allowed), each only if it applies; exponentials (of the score less the row's
        largest); sink (query, 1), if there is one; weights; weighted_values (query, key, d_value); head_output (query,
        d_value). A row that may attend to nothing has NaN exponentials, and weights of zero.
    """
    queries, keys, values = _float64(query), _float64(key), _float64(value)
    may = None if mask is None else np.asarray(mask)
    added = None if bias is None else _float64(bias)
    (n_queries, d_head), n_keys, d_value = queries.shape, keys.shape[0], values.shape[1]
    names = ["dot_products", "scores"]
    for name, option in (("capped_scores", softcap), ("biased_scores", added), ("masked_scores", may)):
        names += [name] if option is not None else []
    steps = {name: np.zeros((n_queries, n_keys)) for name in (*names, "exponentials", "weights")}
    if sink is not None:
        steps["sink"] = np.zeros((n_queries, 1))
    steps["weighted_values"] = np.zeros((n_queries, n_keys, d_value))
    steps["head_output"] = np.zeros((n_queries, d_value))
    for q in range(n_queries):
        scores: list[float] = []
        for k in range(n_keys):
            dot = 0.0
            for d in range(d_head):
                dot += queries[q, d] * keys[k, d]
            score = dot * scale
            steps["dot_products"][q, k], steps["scores"][q, k] = dot, score
            if softcap is not None:
                score = steps["capped_scores"][q, k] = softcap * math.tanh(score / softcap)
            if added is not None:
                score = steps["biased_scores"][q, k] = score + added[q, k]
            if may is not None:
                score = steps["masked_scores"][q, k] = score if may[q, k] else -math.inf
            scores.append(score)
        largest = max(scores, default=-math.inf)
        if largest == -math.inf:
            steps["exponentials"][q] = math.nan
            continue
        total = 0.0 if sink is None else math.exp(sink - largest)
        if sink is not None:
            steps["sink"][q, 0] = total
        for k, score in enumerate(scores):
            steps["exponentials"][q, k] = math.exp(score - largest)
            total += steps["exponentials"][q, k]
        for k in range(n_keys):
            weight = steps["weights"][q, k] = steps["exponentials"][q, k] / total
            for d in range(d_value):
                steps["weighted_values"][q, k, d] = weight * values[k, d]
                steps["head_output"][q, d] += weight * values[k, d]
    return steps


def rotate(rows: ArrayLike, cos: ArrayLike, sin: ArrayLike, partner: Sequence[int]) -> Array:
    """Rotary positions: rotated_i = x_i cos_i + x_partner(i) sin_i, each row by its own angles; all (token, d_head).

    `sin` has its sign; `partner` is the column that each column is turned with, (d_head,).

    Source:
        Su et al. 2021, section 3.4.2, equation 34, with columns paired as the model pairs them.
    """
    values, cosines, sines = _float64(rows), _float64(cos), _float64(sin)
    rotated = np.zeros(values.shape)
    for t in range(values.shape[0]):
        for i in range(values.shape[1]):
            rotated[t, i] = values[t, i] * cosines[t, i] + values[t, partner[i]] * sines[t, i]
    return rotated


def _float64(array: ArrayLike) -> Array:
    return np.asarray(array, dtype=np.float64)


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
