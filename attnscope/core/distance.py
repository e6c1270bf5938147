"""Measure how far heads are apart, by Jensen-Shannon or Hellinger over rows of attention; cluster, map and match them.

Sums over queries come back, never means, so that blocks of queries, chunks and texts add up exactly. Everything is
computed in float64: near-equal heads (two checkpoints) differ by less than float32 resolves.

A row is a distribution over the keys, and over one key more if it sums to less than 1 by more than rounding: the share
that a sink took. A row of zeros (a query that may attend to nothing, or has nothing left without special tokens) is no
distribution. A pair of heads is compared where both have one.
"""

import math
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

LARGEST: dict[Measure, float] = {"hellinger": 1.0, "jensen_shannon": math.log(2)}
"""The divergence of two rows that share no key: its largest value."""

ROUNDING = 1e-5
"""The most that a row may lack to 1 by rounding; more is the share of a sink."""

_ELEMENTS_AT_ONCE = 2**18  # of fewer, threads wait for each other longer than they compute; of more, caches overflow


class PairSums(NamedTuple):
    """Sums over queries for pairs of heads, each (head of a, head of b), float64.

    Attributes:
        sums: The divergence, summed over the queries where both heads have a distribution.
        counts: How many such queries there are.
    """

    sums: Float[Tensor, "head_a head_b"]
    counts: Float[Tensor, "head_a head_b"]


def divergence_sums(
    measure: Measure, a: Float[Tensor, "head_a query key"], b: Float[Tensor, "head_b query key"] | None = None
) -> PairSums:
    """Sum the divergences of all pairs of heads over queries, in float64.

        hellinger:      h²(p, q) = 1/2 Σ_k (√p_k - √q_k)² = 1/2 (Σ_k p_k + Σ_k q_k) - Σ_k √p_k √q_k
        jensen_shannon: JS(p, q) = H((p + q) / 2) - (H(p) + H(q)) / 2,  H the entropy in nats

    The sum over keys of h², over queries as well, is the product of two matrices (head, query x key). h² is 0 to 1, JS
    0 to ln 2. Their roots are metrics (Endres & Schindelin 2003), and so are the roots of their means over queries.

    Args:
        measure: The divergence.
        a: Weights, at least 0, rows summing to at most 1.
        b: Those of other heads on the same queries and keys; None = a.

    Returns:
        The sums, 0 on the diagonal if b is None.

    Source:
        Hellinger 1909, the matrix product is ours; Lin 1991, between heads and summed over tokens: Clark et al. 2019,
        section 6.
    """
    # Rows (head, query, key), and where they are distributions, (head, query).
    first, second = (_with_sink(rows) for rows in (a, a if b is None else b))
    present = [rows.any(-1).double() for rows in (first, second)]
    counts = present[0] @ present[1].T
    if measure == "hellinger":
        # Masses instead of counts: rounding leaves rows a little more or less than 1.
        masses = [rows.sum(-1) for rows in (first, second)]
        sums = (masses[0] @ present[1].T + present[0] @ masses[1].T) / 2
        sums -= first.sqrt().flatten(1) @ second.sqrt().flatten(1).T
    else:
        # (head_a, head_b, query)
        divergences = torch.stack([_jensen_shannon(head, second) for head in first])
        sums = (divergences * present[0][:, None] * present[1]).sum(-1)
    sums = sums.clamp_min(0)
    if b is None:
        sums = (sums + sums.T) / 2
        sums.fill_diagonal_(0.0)
    return PairSums(sums, counts)


def row_divergences(measure: Measure, p: NDArray[np.floating], q: NDArray[np.floating]) -> Floats:
    """Return the divergence of matching rows of weights, (..., key) to (...,); NaN where one of them is all zeros."""
    first, second = (_with_sink(torch.from_numpy(rows)) for rows in (p, q))
    if measure == "hellinger":
        divergences = (first.sqrt() - second.sqrt()).square().sum(-1) / 2
    else:
        divergences = _jensen_shannon(first, second)
    return np.where(p.any(-1) & q.any(-1), divergences.numpy(), np.nan)


def _jensen_shannon(p: Float[Tensor, "query key"], q: Float[Tensor, "*head query key"]) -> Float[Tensor, "*head query"]:
    """Return the divergence of rows, some queries at a time."""
    parts = []
    step = max(1, _ELEMENTS_AT_ONCE * p.shape[-2] // max(1, q.numel()))
    for rows, others in zip(p.split(step, -2), q.split(step, -2), strict=True):  # type: ignore[no-untyped-call]
        entropies = torch.special.entr(rows).sum(-1) + torch.special.entr(others).sum(-1)
        parts.append(torch.special.entr((rows + others) / 2).sum(-1) - entropies / 2)
    # Rounding may leave a divergence of nothing just below 0.
    return torch.cat(parts, -1).clamp_min(0)


def _with_sink(rows: Float[Tensor, "*head query key"]) -> Float[Tensor, "*head query more"]:
    """Return rows in float64 with the share of a sink as a further key: what a row lacks to 1 by more than rounding."""
    rows = in_float64(rows)
    lacking = (1 - rows.sum(-1, keepdim=True)) * rows.any(-1, keepdim=True)
    return torch.cat([rows, lacking.where(lacking > ROUNDING, 0.0)], -1)


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
