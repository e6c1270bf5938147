"""Compute attention rollout and relevance: how much each input token contributes to a position after several layers.

Rollout follows Abnar & Zuidema 2020, Quantifying Attention Flow in Transformers (sections 2 and 3). A layer adds the
output of its heads to its input (the residual connection), so its attention is mixed with the identity. Both read the
attention weights alone, not the values or the feed-forward layers.
"""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def mix_residual(weights: NDArray[np.floating], residual: float = 0.5) -> Floats:
    """Mix attention with the residual connection: (1 - r) W + r I, with each row then divided by its sum.

    Where a row of W sums to less than 1 (a model with sinks) or to 0 (a query that may attend to nothing), the identity
    has a larger share. With r = 0 a row of zeros stays zeros.

    Args:
        weights: W, (layer, query, key), at least 0, the mean over the heads of each layer.
        residual: r, the share of the identity, 0 to 1; 0.5 in the paper.

    Returns:
        (layer, query, key), float64; rows sum to 1.
    """
    identity = np.eye(weights.shape[-1])
    mixed = (1 - residual) * weights.astype(np.float64) + residual * identity
    return normalise_rows(mixed)


def normalise_rows(rows: Floats) -> Floats:
    """Divide each row of (..., key) by its sum; rows of zeros stay zeros."""
    totals = rows.sum(-1, keepdims=True)
    normalised = np.zeros_like(rows)
    np.divide(rows, totals, out=normalised, where=totals > 0)
    return normalised


def rollout(mixed: Floats) -> Floats:
    """Multiply the layers' attention, Ã(l) = A(l) Ã(l - 1) from Ã(0) = A(0) on (Abnar & Zuidema 2020, section 3).

    Args:
        mixed: A as `mix_residual` returns it, (layer, query, key), from the first layer of the model on.

    Returns:
        (layer, query, input token), float64; rows sum to 1 where those of A do.
    """
    rolled = mixed.copy()
    for layer in range(1, len(mixed)):
        rolled[layer] = mixed[layer] @ rolled[layer - 1]
    return rolled


def head_relevance(weights: NDArray[np.floating], gradients: NDArray[np.floating]) -> Floats:
    """Return Ā, the mean over heads of max(∇A ⊙ A, 0) in one layer (Chefer et al. 2021, equation 5).

    Args:
        weights: A, (head, query, key).
        gradients: ∇A, the derivatives of the explained score with respect to A, (head, query, key).

    Returns:
        (query, key), float64.
    """
    products = np.multiply(gradients, weights, dtype=np.float64)
    mean: Floats = np.maximum(products, 0).mean(0)
    return mean


def relevance(by_layer: Floats) -> Floats:
    """Return the relevance R after each layer, R ← R + Ā R from R = I on (Chefer et al. 2021, equation 6).

    Args:
        by_layer: Ā as `head_relevance` returns it, (layer, query, key), from the first layer of the model on.

    Returns:
        (layer, query, input token), float64.

    Source:
        Chefer, Gur & Wolf 2021, Generic Attention-model Explainability for Interpreting Bi-Modal and Encoder-Decoder
        Transformers, section 3.1.
    """
    # R + Ā R = (I + Ā) R: the same recursion as rollout's, with I + Ā instead of A.
    identity = np.eye(by_layer.shape[-1])
    return rollout(identity + by_layer)
