"""How far heads are apart: Jensen-Shannon and Hellinger over rows of attention, and what follows from all pairs.

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
"""What a row may lack to 1 by rounding; more is the share of a sink."""

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
    """Squared Hellinger distances between all pairs of heads, by one matrix product.

        h²(p, q) = 1/2 Σ_k (√p_k - √q_k)² = 1/2 (Σ_k p_k + Σ_k q_k) - Σ_k √p_k √q_k

    The last sum, over queries as well, is the product of two matrices (head, query x key). 0 to 1; 1 if p and q share
    no key. h is a metric, and so is the root of the mean of h²: a Euclidean distance between rows of √p.

    Args:
        a: Weights, at least 0, rows summing to at most 1.
        b: Those of other heads on the same queries and keys; None = a.

    Returns:
        The sums, 0 on the diagonal if b is None.

    Raises:
        ValueError: The shapes do not fit together.

    Source:
        Hellinger 1909; the matrix product is ours.
    """
    rows, defined = _distributions(a, b)
    roots = [part.sqrt().flatten(1) for part in rows]
    masses = [part.sum(-1) for part in rows]
    present = [part.to(torch.float64) for part in defined]
    sums = (masses[0] @ present[-1].T + present[0] @ masses[-1].T) / 2 - roots[0] @ roots[-1].T
    return _pair_sums(sums, present[0] @ present[-1].T, b is None)


def jensen_shannon_sums(
    a: Float[Tensor, "head_a query key"], b: Float[Tensor, "head_b query key"] | None = None
) -> PairSums:
    """Jensen-Shannon divergences between all pairs of heads, in nats: exact, and of every pair.

        JS(p, q) = 1/2 Σ_k p_k ln(p_k / m_k) + 1/2 Σ_k q_k ln(q_k / m_k),  m = (p + q) / 2
                 = 1/2 [Σ_k f(p_k) + Σ_k f(q_k) - Σ_k f(p_k + q_k)] + 1/2 ln 2 · Σ_k (p_k + q_k),  f(x) = x ln x

    0 to ln 2. The second form needs one logarithm for each key of a pair. The root of JS is a metric (Endres &
    Schindelin 2003), and the root of its mean over queries is too.

    Arguments, result and errors are those of `hellinger_sums`.

    Source:
        Lin 1991; between heads and summed over tokens: Clark et al. 2019, section 6.
    """
    rows, defined = _distributions(a, b)
    present = [part.to(torch.float64) for part in defined]
    rows = [part.clamp_min(_TINY) for part in rows]
    own = [(part * part.log()).sum(-1) + math.log(2) * part.sum(-1) for part in rows]
    first, second = rows[0], rows[-1]
    sums = torch.zeros(len(first), len(second), dtype=torch.float64, device=first.device)
    for head in range(len(first)):
        start = head + 1 if b is None else 0
        n_others = len(second) - start
        step = max(1, _ELEMENTS_AT_ONCE // max(1, n_others * first.shape[2]))
        for low in range(0, first.shape[1] if n_others else 0, step):
            part = slice(low, low + step)
            both = second[start:, part] + first[head, part]
            crossed = both.log().mul_(both).sum(-1)
            divergence = (own[0][head, part] + own[-1][start:, part] - crossed) / 2
            both_there = present[0][head, part] * present[-1][start:, part]
            # Rounding may leave a divergence of nothing just below 0.
            sums[head, start:] += (divergence.clamp_min(0) * both_there).sum(-1)
    if b is None:
        sums = sums + sums.T
    return _pair_sums(sums, present[0] @ present[-1].T, b is None)


SUMS: dict[Measure, Callable[[Tensor, Tensor | None], PairSums]] = {
    "hellinger": hellinger_sums,
    "jensen_shannon": jensen_shannon_sums,
}
"""The two divergences by name."""

LARGEST: dict[Measure, float] = {"hellinger": 1.0, "jensen_shannon": math.log(2)}
"""Of two rows that share no key."""


def row_divergences(measure: Measure, p: NDArray[np.floating], q: NDArray[np.floating]) -> Floats:
    """The divergence of matching rows of weights, (..., key): h² or JS, as `hellinger_sums` and `jensen_shannon_sums`.

    Returns:
        (...,), at least 0; NaN where one of the two rows is all zeros.
    """
    p, q = np.asarray(p, np.float64), np.asarray(q, np.float64)
    rest = [1 - p.sum(-1, keepdims=True), 1 - q.sum(-1, keepdims=True)]
    p, q = (np.concatenate([x, np.where(r > ROUNDING, r, 0.0)], -1) for x, r in zip((p, q), rest, strict=True))
    if measure == "hellinger":
        divergences = ((np.sqrt(p) - np.sqrt(q)) ** 2).sum(-1) / 2
    else:
        own, other, both = (np.maximum(x, _TINY) for x in (p, q, p + q))
        terms = own * np.log(own) + other * np.log(other) - both * np.log(both / 2)
        divergences = np.maximum(terms.sum(-1) / 2, 0.0)
    nothing = (p[..., :-1].sum(-1) == 0) | (q[..., :-1].sum(-1) == 0)
    return np.where(nothing, np.nan, divergences)


def as_distance(mean: Floats) -> Floats:
    """The metric that a mean divergence stands for: its square root, as both measures are squares of metrics."""
    return np.sqrt(np.maximum(mean, 0.0))


class Clustering(NamedTuple):
    """A hierarchical clustering.

    Attributes:
        merges: scipy's linkage, (heads - 1, 4): two clusters (numbers from the number of heads on are earlier merges),
            the distance at which they merge, how many heads are in it.
        order: The heads in the order of the leaves, (head,), int64.
    """

    merges: Floats
    order: NDArray[np.int64]


def cluster_heads(distances: Floats) -> Clustering:
    """Heads clustered by average linkage (UPGMA), leaves ordered so that neighbours are as alike as can be.

    Distances are (head, head), symmetric; NaN (never compared) counts as the largest of all.

    Source:
        Sokal & Michener 1958; Bar-Joseph et al. 2001 for the order; by scipy.
    """
    n = len(distances)
    if n < 2:
        return Clustering(np.zeros((0, 4)), np.arange(n))
    merges = linkage(squareform(_fill(distances), checks=False), "average", optimal_ordering=True)
    return Clustering(np.asarray(merges, np.float64), leaves_list(merges).astype(np.int64))


class PlaneMap(NamedTuple):
    """Heads in the plane.

    Attributes:
        coordinates: (head, 2), in the unit of the distances, centred at 0.
        explained: The share of the variance that each axis holds, (2,), 0 to 1.
    """

    coordinates: Floats
    explained: Floats


def classical_mds(distances: Floats) -> PlaneMap:
    """The plane in which distances between heads are kept best: classical multidimensional scaling.

        B = -1/2 J D² J,  J = I - 1/n;  coordinates: two leading eigenvectors of B times the roots of their eigenvalues

    Distances are (head, head), symmetric; NaN (never compared) counts as the largest of all. Roots of mean squared
    Hellinger distances and of mean Jensen-Shannon divergences are Euclidean if all pairs are compared on the same
    queries. Then B has no negative eigenvalues, and the map leaves out axes but bends nothing. An axis points to where
    its entry of largest size is positive, so that the same distances give the same map.

    Source:
        Torgerson 1952; Gower 1966. Used for heads by Clark et al. 2019, section 6.
    """
    n = len(distances)
    if not n:
        return PlaneMap(np.zeros((0, 2)), np.zeros(2))
    squares = _fill(distances) ** 2
    centred = -(squares - squares.mean(0) - squares.mean(1)[:, None] + squares.mean()) / 2
    values, vectors = np.linalg.eigh((centred + centred.T) / 2)
    values, vectors = np.maximum(values[::-1], 0.0), vectors[:, ::-1]
    coordinates, explained = np.zeros((n, 2)), np.zeros(2)
    for axis in range(min(2, n)):
        vector = vectors[:, axis]
        sign = 1.0 if vector[np.abs(vector).argmax()] >= 0 else -1.0
        coordinates[:, axis] = sign * vector * math.sqrt(values[axis])
        explained[axis] = values[axis] / values.sum() if values.sum() > 0 else 0.0
    return PlaneMap(coordinates, explained)


def best_matching(distances: Floats) -> NDArray[np.int64]:
    """The one-to-one matching of heads with the least sum of distances, (head, head); NaN counts as the largest.

    Returns:
        (pair, 2): heads of a, ascending, each with its head of b; as many pairs as the smaller side has heads.

    Source:
        Crouse 2016 (a modified Jonker-Volgenant algorithm), by scipy.
    """
    filled = np.nan_to_num(distances, nan=np.nanmax(distances, initial=0.0))
    return np.stack(linear_sum_assignment(filled), 1).astype(np.int64)


def _fill(distances: Floats) -> Floats:
    """Without NaN, symmetric to the last bit, 0 on the diagonal."""
    finite = distances[~np.isnan(distances)]
    filled = np.nan_to_num(distances, nan=float(finite.max(initial=0.0)))
    filled = (filled + filled.T) / 2
    np.fill_diagonal(filled, 0.0)
    return filled


def _distributions(a: Tensor, b: Tensor | None) -> tuple[list[Tensor], list[Tensor]]:
    """The rows of a and b in float64, with the share of sinks as a further key; and which rows are distributions."""
    inputs = [a] if b is None else [a, b]
    if any(part.ndim != 3 for part in inputs) or inputs[0].shape[1:] != inputs[-1].shape[1:]:
        shapes = [tuple(part.shape) for part in inputs]
        raise ValueError(f"weights are (head, query, key) over the same queries and keys; got {shapes}")
    rows = [in_float64(part) for part in inputs]
    defined = [(part > 0).any(-1) for part in rows]
    rest = [(1 - part.sum(-1, keepdim=True)) * there[..., None] for part, there in zip(rows, defined, strict=True)]
    if any(bool((part > ROUNDING).any()) for part in rest):
        taken = [part.where(part > ROUNDING, 0.0) for part in rest]
        rows = [torch.cat([part, more], -1) for part, more in zip(rows, taken, strict=True)]
    return rows, defined


def _pair_sums(sums: Tensor, counts: Tensor, symmetric: bool) -> PairSums:
    sums = sums.clamp_min(0)
    if symmetric:
        sums = (sums + sums.T) / 2
        sums.fill_diagonal_(0.0)
    return PairSums(sums, counts)
