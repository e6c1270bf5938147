"""Attention rollout and attention flow: how much of the input tokens is at a token's position after several layers.

Both follow Abnar & Zuidema 2020, Quantifying Attention Flow in Transformers (sections 2 and 3). A layer adds the output
of its heads to what was there before (the residual connection), so its attention is mixed with the identity. Both look
at attention alone: the contents of values, and the feed-forward layers, are left out.
"""

from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_flow

SCALE = 2**30
"""Capacities are counted in 1 / SCALE: scipy's flows are 32-bit integers, and a token's flow is at most 1."""


def mix_residual(weights: NDArray[np.floating], residual: float = 0.5) -> NDArray[np.float64]:
    """Attention with the residual connection: (1 - r) W + r I, and each row divided by its sum.

    A row that sums to less than 1 (a model with sinks) or to 0 (a query that may attend to nothing) leaves more to the
    identity. With r = 0 a row of zeros stays one.

    Args:
        weights: W, (layer, query, key), at least 0, the mean over the heads of each layer.
        residual: r, the share of the identity, 0 to 1; 0.5 in the paper.

    Returns:
        (layer, query, key), float64; rows sum to 1.

    Raises:
        ValueError: The maps are not square, or r is not from 0 to 1.
    """
    n = weights.shape[-1]
    if weights.ndim != 3 or weights.shape[1] != n:
        raise ValueError(f"attention among tokens is (layer, token, token), not {weights.shape}")
    if not 0 <= residual <= 1:
        raise ValueError(f"the residual connection's share is from 0 to 1, not {residual}")
    both = (1 - residual) * weights.astype(np.float64) + residual * np.eye(n)
    total = both.sum(-1, keepdims=True)
    shares: NDArray[np.float64] = np.divide(both, total, out=np.zeros_like(both), where=total > 0)
    return shares


def rollout(layers: NDArray[np.float64]) -> NDArray[np.float64]:
    """Attention rollout: the product of all layers up to each, Ã(l) = A(l) Ã(l - 1) (Abnar & Zuidema 2020, section 3).

    Args:
        layers: A as `mix_residual` gives it, (layer, query, key), from the first layer of the model on.

    Returns:
        (layer, query, input token), float64; rows sum to 1 where those of A do.
    """
    rolled = layers.copy()
    for layer in range(1, len(layers)):
        rolled[layer] = layers[layer] @ rolled[layer - 1]
    return rolled


def flow(
    layers: NDArray[np.float64], queries: Iterable[int] | None = None, report: Callable[[int, int], None] | None = None
) -> NDArray[np.float64]:
    """Attention flow: the most that can flow from a token of a layer to an input token (ibid., section 3).

    The tokens of all layers are the nodes of a graph. An edge leads from each query of a layer to each of its keys, one
    layer below, and lets through as much as the weight. The flow from one token to one input token is a maximum flow in
    this graph, by itself. Flows to several input tokens may use the same edges, so they do not sum to 1.

    Flows are whole numbers of 2^-30, so each weight is off by at most 2^-31. A flow is the least total weight that cuts
    token and input token apart, so it is off by at most 2^-31 times the edges of that cut. There are n² l edges in all:
    at the very worst 3e-7 for 10 tokens and 6 layers, and 1e-5 for 64.

    Args:
        layers: A as `mix_residual` gives it, (layer, query, key), from the first layer of the model on.
        queries: For which tokens; None = all.
        report: Is called after each token of each layer: how many are done, and of how many.

    Returns:
        (layer, query, input token), float64, 0 to 1; NaN in the rows of other tokens.
    """
    n_layers, n, _ = layers.shape
    tokens = range(n) if queries is None else sorted(set(queries))
    flows = np.full(layers.shape, np.nan)
    capacities = np.zeros((n * (n_layers + 1), n * (n_layers + 1)), np.int32)
    for layer, weights in enumerate(layers):
        upper, lower = n * (layer + 1), n * layer
        capacities[upper : upper + n, lower : lower + n] = np.rint(weights * SCALE)
    done, of = 0, n_layers * len(tokens)
    for layer in range(n_layers):
        size = n * (layer + 2)
        graph = csr_array(capacities[:size, :size])
        for query in tokens:
            source = n * (layer + 1) + query
            for key in range(n):
                flows[layer, query, key] = maximum_flow(graph, source, key).flow_value / SCALE
            done += 1
            if report is not None:
                report(done, of)
    return flows
