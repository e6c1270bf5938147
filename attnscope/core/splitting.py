"""Split the same queries, keys and values into more or fewer heads, and compare the attention of these heads.

The module uses NumPy only. It knows no model and draws nothing.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from attnscope.arrays import Floats


@dataclass(frozen=True, eq=False)
class HeadSplit:
    """Hold the attention that results from one number of heads.

    Attributes:
        weights: (head, query, key), each row summing to 1.
        head_outputs: The output of each head, (head, query, d_head).
        entropy_nats: Mean entropy of the rows of each head, (head,); 0 to ln(key).
        n_uniform_rows: How many rows of each head are uniform over the keys that they may attend to, (head,). Rows with
            a single key are not counted.
        rank: Rank of each head's dot products, (head,); at most d_head.
        disagreement_nats: How much the heads disagree about each query, (query,): the Jensen-Shannon divergence of
            their rows, which is the entropy of their mean minus the mean of their entropies; 0 (all equal) to ln(head).
    """

    weights: Floats
    head_outputs: Floats
    entropy_nats: Floats
    n_uniform_rows: NDArray[np.int64]
    rank: NDArray[np.int64]
    disagreement_nats: Floats

    @property
    def concat_output(self) -> Floats:
        """Return the outputs of all heads side by side, (query, d_model)."""
        return np.concatenate(self.head_outputs, axis=-1)


def split_heads(
    query: Floats,
    key: Floats,
    value: Floats,
    n_heads: int,
    *,
    mask: NDArray[np.bool_] | None = None,
) -> HeadSplit:
    """Split queries, keys and values into heads by columns, and compute the attention of each head.

        head_h = softmax(Q_h K_hᵀ / sqrt(d_head)) V_h,  d_head = d_model / n_heads

    Args:
        query: (query, d_model).
        key: (key, d_model).
        value: (key, d_model).
        n_heads: The number of heads.
        mask: (query, key), True = may attend; None = all True. Every query must have a key.

    Raises:
        ValueError: d_model is no multiple of n_heads.

    Source:
        Vaswani et al. 2017, section 3.2.2. Jensen-Shannon divergence of several distributions: Lin 1991, equation 5.1.
    """
    # Split by columns: (token, d_model) -> (head, token, d_head).
    q = np.stack(np.split(query, n_heads, axis=1))
    k = np.stack(np.split(key, n_heads, axis=1))
    v = np.stack(np.split(value, n_heads, axis=1))
    # Softmax of scaled dot products, (head, query, key).
    if mask is None:
        mask = np.ones((len(query), len(key)), np.bool_)
    dots = q @ k.transpose(0, 2, 1)
    scores = np.where(mask, dots / math.sqrt(q.shape[2]), -np.inf)
    exps = np.exp(scores - scores.max(-1, keepdims=True))
    weights = exps / exps.sum(-1, keepdims=True)
    entropy = _entropy(weights)
    entropy_of_mean = _entropy(weights.mean(0))
    # A row is uniform if its largest weight is 1 / n_keys, up to rounding. A row of one key is always uniform, so it is
    # not counted.
    n_keys = mask.sum(-1)
    is_uniform = weights.max(-1) <= (1 + 1e-9) / n_keys
    is_uniform &= n_keys > 1
    # The rank of q @ k.T is that of R_q @ R_k.T from their QR factors, which are only (d_head, d_head).
    triangles_q = np.linalg.qr(q).R
    triangles_k = np.linalg.qr(k).R
    products = triangles_q @ triangles_k.transpose(0, 2, 1)
    return HeadSplit(
        weights=weights,
        head_outputs=weights @ v,
        entropy_nats=entropy.mean(-1),
        n_uniform_rows=is_uniform.sum(-1),
        rank=np.linalg.matrix_rank(products),
        disagreement_nats=np.maximum(0.0, entropy_of_mean - entropy.mean(0)),
    )


def _entropy(rows: Floats) -> Floats:
    """Return the entropy of each row, (...,), in nats, from (..., key); 0 · ln 0 counts as 0."""
    logs = np.log(rows, out=np.zeros_like(rows), where=rows > 0)
    entropy: Floats = -(rows * logs).sum(-1)
    return np.maximum(0.0, entropy)
