"""Attention rollout, and relevance: how much of the input tokens is at a token's position after several layers.

It follows Abnar & Zuidema 2020, Quantifying Attention Flow in Transformers (sections 2 and 3). A layer adds the output
of its heads to what was there before (the residual connection), so its attention is mixed with the identity. It looks
at attention alone: the contents of values, and the feed-forward layers, are left out.
"""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def mix_residual(weights: NDArray[np.floating], residual: float = 0.5) -> Floats:
    """Mix attention with the residual connection: (1 - r) W + r I, and each row divided by its sum.

    A row that sums to less than 1 (a model with sinks) or to 0 (a query that may attend to nothing) leaves more to the
    identity. With r = 0 a row of zeros stays one.

    Args:
        weights: W, (layer, query, key), at least 0, the mean over the heads of each layer.
        residual: r, the share of the identity, 0 to 1; 0.5 in the paper.

    Returns:
        (layer, query, key), float64; rows sum to 1.
    """
    identity = np.eye(weights.shape[-1])
    mixed = (1 - residual) * weights.astype(np.float64) + residual * identity
    return row_shares(mixed)


def row_shares(rows: Floats) -> Floats:
    """Return rows (..., key), each divided by its sum; rows of zeros stay zeros."""
    total = rows.sum(-1, keepdims=True)
    shares = np.zeros_like(rows)
    np.divide(rows, total, out=shares, where=total > 0)
    return shares


def rollout(layers: Floats) -> Floats:
    """Return the product of all layers up to each, Ã(l) = A(l) Ã(l - 1) (Abnar & Zuidema 2020, section 3).

    Args:
        layers: A as `mix_residual` gives it, (layer, query, key), from the first layer of the model on.

    Returns:
        (layer, query, input token), float64; rows sum to 1 where those of A do.
    """
    rolled = layers.copy()
    for layer in range(1, len(layers)):
        rolled[layer] = layers[layer] @ rolled[layer - 1]
    return rolled


def head_relevance(weights: NDArray[np.floating], gradients: NDArray[np.floating]) -> Floats:
    """Return the mean over heads of max(∇A ⊙ A, 0): what a layer adds to a score (Chefer et al. 2021, equation 5).

    Args:
        weights: A, (head, query, key).
        gradients: ∇A, the derivatives of the score with respect to these weights.

    Returns:
        (query, key), float64.
    """
    products = gradients.astype(np.float64) * weights.astype(np.float64)
    mean: Floats = np.maximum(products, 0).mean(0)
    return mean


def relevance(layers: Floats) -> Floats:
    """Return relevance up to each layer, R ← R + Ā R from R = I on (Chefer et al. 2021, equation 6).

    Args:
        layers: Ā as `head_relevance` gives it, (layer, query, key), from the first layer of the model on.

    Returns:
        (layer, query, input token), float64.

    Source:
        Chefer, Gur & Wolf 2021, Generic Attention-model Explainability for Interpreting Bi-Modal and Encoder-Decoder
        Transformers, section 3.1.
    """
    # R + Ā R = (I + Ā) R, so it is the product that rollout takes, of I + Ā.
    identity = np.eye(layers.shape[-1])
    return rollout(identity + layers)
