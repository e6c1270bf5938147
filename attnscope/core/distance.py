"""Measure how far heads are apart, by Jensen-Shannon or Hellinger over rows of attention; cluster, map and match them.

Sums over queries come back, never means, so that blocks of queries, chunks and texts add up exactly. Everything is
computed in float64: near-equal heads (two checkpoints) differ by less than float32 resolves.

A row is a distribution over the keys, and over one key more if it sums to less than 1 by more than rounding: the share
that a sink took. A row of zeros (a query that may attend to nothing, or has nothing left without special tokens) is no
distribution. A pair of heads is compared where both have one.
"""

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from scipy.cluster.hierarchy import leaves_list, linkage
from scipy.optimize import linear_sum_assignment
from scipy.spatial.distance import squareform
from torch import Tensor

from attnscope.core.attention.precision import in_float64

Measure = Literal["hellinger", "jensen_shannon"]
Floats = NDArray[np.float64]

ROUNDING = 1e-5
"""The most that a row may lack to 1 by rounding; more is the share of a sink."""

_ELEMENTS_AT_ONCE = 2**18  # of fewer, threads wait for each other longer than they compute; of more, caches overflow
_TINY = 1e-300  # instead of 0, whose logarithm is not finite; x ln x is 7e-298 there


class PairSums(NamedTuple):
    """Sums over queries for pairs of heads, each (head of a, head of b), float64.

    Attributes:
        sums: The divergence, summed over the queries where both heads have a distribution.
        counts: How many such queries there are.
    """

    sums: Float[Tensor, "head_a head_b"]
    counts: Float[Tensor, "head_a head_b"]


def hellinger_sums(
    a: Float[Tensor, "head_a query key"], b: Float[Tensor, "head_b query key"] | None = None
) -> PairSums:
    """Sum squared Hellinger distances between all pairs of heads, by one matrix product.

        h²(p, q) = 1/2 Σ_k (√p_k - √q_k)² = 1/2 (Σ_k p_k + Σ_k q_k) - Σ_k √p_k √q_k

    The last sum, over queries as well, is the product of two matrices (head, query x key). 0 to 1; 1 if p and q share
    no key. h is a metric, and so is the root of the mean of h²: a Euclidean distance between rows of √p.

    Args:
        a: Weights, at least 0, rows summing to at most 1.
        b: Those of other heads on the same queries and keys; None = a.

    Returns:
        The sums, 0 on the diagonal if b is None.

    Source:
        Hellinger 1909; the matrix product is ours.
    """
    # Rows (head, query, key), their masses (head, query), and where they are distributions.
    first, second = _distributions(a, b)
    masses = [rows.sum(-1) for rows in (first, second)]
    present = [(mass > 0).double() for mass in masses]
    # All pairs by one product of (head, query x key) matrices.
    products = first.sqrt().flatten(1) @ second.sqrt().flatten(1).T
    sums = (masses[0] @ present[1].T + present[0] @ masses[1].T) / 2 - products
    return _pair_sums(sums, present, b is None)


def jensen_shannon_sums(
    a: Float[Tensor, "head_a query key"], b: Float[Tensor, "head_b query key"] | None = None
) -> PairSums:
    """Sum Jensen-Shannon divergences between all pairs of heads, in nats.

        JS(p, q) = 1/2 Σ_k p_k ln(p_k / m_k) + 1/2 Σ_k q_k ln(q_k / m_k),  m = (p + q) / 2
                 = 1/2 [Σ_k f(p_k) + Σ_k f(q_k) - Σ_k f(p_k + q_k)] + 1/2 ln 2 · Σ_k (p_k + q_k),  f(x) = x ln x

    0 to ln 2. The second form needs one logarithm for each key of a pair. The root of JS is a metric (Endres &
    Schindelin 2003), and the root of its mean over queries is too. Arguments and result are those of `hellinger_sums`.

    Source:
        Lin 1991; between heads and summed over tokens: Clark et al. 2019, section 6.
    """
    # Rows with 0 replaced by a number so small that x ln x is 0, and where they are distributions.
    first, second = _distributions(a, b)
    present = [(rows.sum(-1) > 0).double() for rows in (first, second)]
    first, second = first.clamp_min(_TINY), second.clamp_min(_TINY)
    # The parts of the second form that need one head alone, (head, query).
    own = [(rows * rows.log()).sum(-1) + math.log(2) * rows.sum(-1) for rows in (first, second)]
    sums = torch.zeros(len(first), len(second), dtype=torch.float64, device=first.device)
    # One head against all others, some queries at a time: (other head, query, key).
    for head in range(len(first)):
        # Of heads with each other, each pair once.
        others = slice(head + 1 if b is None else 0, None)
        n_elements = second[others].shape[0] * first.shape[2]
        step = max(1, _ELEMENTS_AT_ONCE // max(1, n_elements))
        for low in range(0, first.shape[1] if n_elements else 0, step):
            queries = slice(low, low + step)
            both = second[others, queries] + first[head, queries]
            crossed = both.log().mul_(both).sum(-1)
            divergence = (own[0][head, queries] + own[1][others, queries] - crossed) / 2
            are_present = present[0][head, queries] * present[1][others, queries]
            # Rounding may leave a divergence of nothing just below 0.
            sums[head, others] += (divergence.clamp_min(0) * are_present).sum(-1)
    if b is None:
        sums = sums + sums.T
    return _pair_sums(sums, present, b is None)


SUMS: dict[Measure, Callable[[Tensor, Tensor | None], PairSums]] = {
    "hellinger": hellinger_sums,
    "jensen_shannon": jensen_shannon_sums,
}
"""The two divergences by name."""

LARGEST: dict[Measure, float] = {"hellinger": 1.0, "jensen_shannon": math.log(2)}
"""The divergence of two rows that share no key: its largest value."""


def row_divergences(measure: Measure, p: NDArray[np.floating], q: NDArray[np.floating]) -> Floats:
    """Return the divergence of matching rows of weights, (..., key) to (...,); NaN where one of them is all zeros."""
    first, second = (_with_sink(weights.astype(np.float64)) for weights in (p, q))
    if measure == "hellinger":
        divergences = ((np.sqrt(first) - np.sqrt(second)) ** 2).sum(-1) / 2
    else:
        both = np.maximum(first + second, _TINY)
        parts = [rows * np.log(2 * np.maximum(rows, _TINY) / both) for rows in (first, second)]
        divergences = np.maximum((parts[0] + parts[1]).sum(-1) / 2, 0.0)
    return np.where(p.any(-1) & q.any(-1), divergences, np.nan)


def _with_sink(rows: Floats) -> Floats:
    lacking = 1 - rows.sum(-1, keepdims=True)
    return np.concatenate([rows, np.where(lacking > ROUNDING, lacking, 0.0)], -1)


def as_distance(mean: Floats) -> Floats:
    """Return the metric that a mean divergence stands for: its square root, as both are squares of metrics."""
    return np.sqrt(np.maximum(mean, 0.0))


def cluster_heads(distances: Floats) -> tuple[Floats, NDArray[np.int64]]:
    """Cluster heads by average linkage (UPGMA), leaves ordered so that neighbours are as alike as can be.

    Args:
        distances: (head, head), symmetric; NaN (never compared) counts as the largest of all.

    Returns:
        scipy's linkage, (heads - 1, 4): two clusters (numbers from the number of heads on are earlier merges), the
        distance at which they merge, how many heads are in it. And the heads in the order of the leaves, (head,).

    Source:
        Sokal & Michener 1958; Bar-Joseph et al. 2001 for the order; by scipy.
    """
    n = len(distances)
    if n < 2:
        return np.zeros((0, 4)), np.arange(n)
    merges = linkage(squareform(_fill(distances), checks=False), "average", optimal_ordering=True)
    return np.asarray(merges, np.float64), leaves_list(merges).astype(np.int64)


def classical_mds(distances: Floats) -> tuple[Floats, Floats]:
    """Place heads in the plane in which their distances are kept best: classical multidimensional scaling.

        B = -1/2 J D² J,  J = I - 1/n;  coordinates: two leading eigenvectors of B times the roots of their eigenvalues

    Roots of mean squared Hellinger distances and of mean Jensen-Shannon divergences are Euclidean if all pairs are
    compared on the same queries. Then B has no negative eigenvalues, and the map leaves out axes but bends nothing. An
    axis points to where its entry of largest size is positive, so that the same distances give the same map.

    Args:
        distances: (head, head), symmetric; NaN (never compared) counts as the largest of all.

    Returns:
        Coordinates, (head, 2), in the unit of the distances, centred at 0. And the share of the variance that each axis
        holds, (2,), 0 to 1.

    Source:
        Torgerson 1952; Gower 1966. Used for heads by Clark et al. 2019, section 6.
    """
    n = len(distances)
    coordinates = np.zeros((n, 2))
    explained = np.zeros(2)
    if n < 2:
        return coordinates, explained
    # B: squared distances, centred in rows and columns.
    squares = _fill(distances) ** 2
    centred = -(squares - squares.mean(0) - squares.mean(1)[:, None] + squares.mean()) / 2
    values, vectors = np.linalg.eigh((centred + centred.T) / 2)
    values = np.maximum(values[::-1], 0.0)
    # The two leading axes, each with a fixed sign.
    axes = vectors[:, :-3:-1]
    signs = np.where(np.take_along_axis(axes, np.abs(axes).argmax(0)[None], 0) >= 0, 1.0, -1.0)
    explained = values[:2] / max(float(values.sum()), 1e-300)
    return signs * axes * np.sqrt(values[:2]), explained


def best_matching(distances: Floats) -> NDArray[np.int64]:
    """Match heads one to one with the least sum of distances, (head, head); NaN counts as the largest.

    Returns:
        (pair, 2): heads of a, ascending, each with its head of b; as many pairs as the smaller side has heads.

    Source:
        Crouse 2016 (a modified Jonker-Volgenant algorithm), by scipy.
    """
    filled = np.nan_to_num(distances, nan=np.nanmax(distances, initial=0.0))
    return np.stack(linear_sum_assignment(filled), 1).astype(np.int64)


def _fill(distances: Floats) -> Floats:
    """Return distances without NaN, symmetric to the last bit, 0 on the diagonal."""
    filled = np.nan_to_num(distances, nan=np.nanmax(distances, initial=0.0))
    filled = (filled + filled.T) / 2
    np.fill_diagonal(filled, 0.0)
    return filled


def _distributions(a: Tensor, b: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the rows of a and b in float64, with the share of sinks as a further key; b = a if there is none."""
    # A row that lacks more than rounding went to a sink: it gets one key more.
    rows = [in_float64(a), in_float64(a if b is None else b)]
    lacking = [(1 - weights.sum(-1, keepdim=True)) * (weights > 0).any(-1, keepdim=True) for weights in rows]
    if any(bool((share > ROUNDING).any()) for share in lacking):
        taken = [share.where(share > ROUNDING, 0.0) for share in lacking]
        rows = [torch.cat(pair, -1) for pair in zip(rows, taken, strict=True)]
    return rows[0], rows[1]


def _pair_sums(sums: Tensor, present: list[Tensor], is_symmetric: bool) -> PairSums:
    sums = sums.clamp_min(0)
    if is_symmetric:
        sums = (sums + sums.T) / 2
        sums.fill_diagonal_(0.0)
    return PairSums(sums, present[0] @ present[1].T)
