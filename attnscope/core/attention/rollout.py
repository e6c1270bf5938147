"""Compute attention rollout and relevance: how much each input token contributes to a position after several layers.

*Rollout* follows Abnar & Zuidema 2020, Quantifying Attention Flow in Transformers (sections 2 and 3). A layer adds the
output of its heads to its input (the residual connection). So its attention is first mixed with the identity
(`mix_residual`), and then the layers are multiplied (`rollout`).

*Relevance* (`head_relevance`, then `relevance`) follows Chefer et al. 2021. It weighs attention by the gradient of a
score, such as the logit of the predicted token.

Neither considers the values or the feed-forward layers.
"""

import numpy as np
from numpy.typing import NDArray

from attnscope.arrays import Floats, divide


def mix_residual(weights: NDArray[np.floating], residual: float = 0.5) -> Floats:
    """Return (1 - r) W + r I, with each row then divided by its sum: attention mixed with the residual connection.

    The identity's share of a row is larger than r if the row of W sums to less than 1. It does in a model with sinks,
    whose softmax gives a part to no key. If a query may attend to no key, its row of W is zeros, and the mix is the
    identity; with r = 0 it stays zeros.

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
    """Return (..., key) with each row divided by its sum; rows of zeros stay zeros."""
    return divide(rows, rows.sum(-1, keepdims=True), 0.0)


def rollout(mixed: Floats) -> Floats:
    """Return the products of the layers' attention, Ã(0) = A(0) and Ã(l) = A(l) Ã(l - 1).

    Source: Abnar & Zuidema 2020, section 3.

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
        gradients: ∇A, the gradient of the score with respect to A, (head, query, key).

    Returns:
        (query, key), float64.
    """
    products = np.multiply(gradients, weights, dtype=np.float64)
    mean: Floats = np.maximum(products, 0).mean(0)
    return mean


def relevance(by_layer: Floats) -> Floats:
    """Return the relevance R after each layer: R starts as I, and each layer adds Ā R (Chefer et al. 2021, equation 6).

    Args:
        by_layer: Ā as `head_relevance` returns it, (layer, query, key), from the first layer of the model on.

    Returns:
        (layer, query, input token), float64.

    Source:
        Chefer, Gur & Wolf 2021, Generic Attention-model Explainability for Interpreting Bi-Modal and Encoder-Decoder
        Transformers, section 3.1.
    """
    # R + Ā R = (I + Ā) R: the recursion of `rollout`, with I + Ā instead of A.
    identity = np.eye(by_layer.shape[-1])
    return rollout(identity + by_layer)
