"""Measure how far heads are apart, by Jensen-Shannon or Hellinger over rows of attention; cluster, map and match them.

Divergences are summed over queries and not averaged, so that blocks of queries, chunks and texts add up exactly. All
is computed in float64: heads of two checkpoints may differ by less than float32 resolves.

A row of weights that sums to less than 1 by more than rounding gets one key more, with the rest: the share of a sink
without a value. Then it is a distribution. A row of zeros is none: its query may attend to nothing, or only to special
tokens, which were left out. Two heads are compared on the queries where both have a distribution.
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
"""A row's sum may be below 1 by this much through rounding; if it is lower, the rest is the share of a sink."""

_ELEMENTS_AT_ONCE = 2**18
"""Weights that are compared at once. With fewer, threads wait longer than they compute; with more, caches overflow."""


class PairSums(NamedTuple):
    """Sums over queries for pairs of heads, each (head of a, head of b), float64.

    Attributes:
        sums: The divergence, summed over the queries where both heads have a distribution.
        counts: How many such queries there are.
    """

    sums: Float[Tensor, "head_a head_b"]
    counts: Float[Tensor, "head_a head_b"]


Weights = Tensor | NDArray[np.floating]
"""Rows of attention over the keys, in any precision."""


def divergence_sums(
    measure: Measure,
    a: Weights,
    b: Weights | None = None,
) -> PairSums:
    """Sum the divergences of all pairs of heads over queries, in float64.

        hellinger:      h²(p, q) = 1/2 Σ_k (√p_k - √q_k)² = 1/2 (Σ_k p_k + Σ_k q_k) - Σ_k √p_k √q_k
        jensen_shannon: JS(p, q) = H((p + q) / 2) - (H(p) + H(q)) / 2,  H the entropy in nats

    The sum of √p_k √q_k over keys and queries is, for all pairs of heads, one product of two matrices, (head_a, query x
    key) by (query x key, head_b). h² is 0 to 1, JS 0 to ln 2. Their roots are metrics (Endres & Schindelin 2003), and
    so are the roots of their means over queries.

    Args:
        measure: The divergence.
        a: Weights, (head_a, query, key), at least 0, rows summing to at most 1.
        b: Weights of other heads on the same queries and keys, (head_b, query, key); None = a.

    Returns:
        The sums, 0 on the diagonal if b is None.

    Source:
        Hellinger 1909; its computation by a matrix product is ours. Jensen-Shannon: Lin 1991; between heads, summed
        over tokens: Clark et al. 2019, section 6.
    """
    # Distributions, (head, query, key + sink).
    rows_a = _with_sink(a)
    rows_b = rows_a if b is None else _with_sink(b)
    # 1 where a row is a distribution, else 0, (head, query).
    is_row_a = rows_a.any(-1).double()
    is_row_b = rows_b.any(-1).double()
    counts = is_row_a @ is_row_b.T
    if measure == "hellinger":
        # 1/2 (Σ p + Σ q), summed over the queries where both heads have a distribution. That would be `counts` if rows
        # summed to exactly 1.
        mass_a = rows_a.sum(-1)
        mass_b = rows_b.sum(-1)
        sums = (mass_a @ is_row_b.T + is_row_a @ mass_b.T) / 2
        roots_a = rows_a.sqrt().flatten(1)
        roots_b = rows_b.sqrt().flatten(1)
        sums -= roots_a @ roots_b.T
    else:
        # (head_a, head_b, query)
        divergences = torch.stack([_jensen_shannon(head_rows, rows_b) for head_rows in rows_a])
        sums = (divergences * is_row_a[:, None] * is_row_b).sum(-1)
    sums = sums.clamp_min(0)
    # Rounding must not break the symmetry of a with itself.
    if b is None:
        sums = (sums + sums.T) / 2
        sums.fill_diagonal_(0.0)
    return PairSums(sums, counts)


def row_divergences(
    measure: Measure,
    p: NDArray[np.floating],
    q: NDArray[np.floating],
) -> Floats:
    """Return the divergence of each row of p from the same row of q, (..., key) to (...,); NaN if either is all 0."""
    rows_p = _with_sink(p)
    rows_q = _with_sink(q)
    if measure == "hellinger":
        divergences = (rows_p.sqrt() - rows_q.sqrt()).square().sum(-1) / 2
    else:
        divergences = _jensen_shannon(rows_p, rows_q)
    return np.where(p.any(-1) & q.any(-1), divergences.numpy(), np.nan)


def _jensen_shannon(
    p: Float[Tensor, "query key"],
    q: Float[Tensor, "*head query key"],
) -> Float[Tensor, "*head query"]:
    """Return the Jensen-Shannon divergence of rows in nats, some queries at a time."""
    # As many queries at once as have about _ELEMENTS_AT_ONCE numbers in q.
    n_queries = p.shape[-2]
    step = max(1, _ELEMENTS_AT_ONCE * n_queries // max(1, q.numel()))
    parts = []
    for rows_p, rows_q in zip(p.split(step, -2), q.split(step, -2), strict=True):  # type: ignore[no-untyped-call]
        mean_entropy = (_entropy(rows_p) + _entropy(rows_q)) / 2
        entropy_of_mean = _entropy((rows_p + rows_q) / 2)
        parts.append(entropy_of_mean - mean_entropy)
    # Rounding may leave the divergence of equal rows just below 0.
    return torch.cat(parts, -1).clamp_min(0)


def _entropy(rows: Float[Tensor, "*head query key"]) -> Float[Tensor, "*head query"]:
    """Return the entropy of rows in nats."""
    entropy: Tensor = torch.special.entr(rows).sum(-1)
    return entropy


def _with_sink(rows: Weights) -> Float[Tensor, "*head query key_and_sink"]:
    """Return rows in float64 with the share of a sink as a further key: 1 - Σ, if that is more than rounding.

    A row of zeros gets a share of 0, so that it stays all zero.
    """
    rows = in_float64(torch.as_tensor(rows))
    total = rows.sum(-1, keepdim=True)
    rest = (1 - total) * rows.any(-1, keepdim=True)
    sink = rest.where(rest > ROUNDING, 0.0)
    return torch.cat([rows, sink], -1)


def cluster_heads(distances: Floats) -> tuple[Floats, NDArray[np.int64]]:
    """Cluster heads by average linkage (UPGMA), and order the leaves so that neighbours are as alike as can be.

    Args:
        distances: (head, head), symmetric; NaN (never compared) counts as the largest of all.

    Returns:
        scipy's linkage, (heads - 1, 4), one merge a row: two clusters, the distance at which they merge, and how many
        heads the new cluster has. Clusters 0 to heads - 1 are heads; the cluster heads + i comes from row i. Then the
        heads in the order of the leaves, (head,).

    Source:
        Sokal & Michener 1958; Bar-Joseph et al. 2001 for the order; by scipy.
    """
    n = len(distances)
    if n < 2:
        return np.zeros((0, 4)), np.arange(n)
    # (head, head) -> the distances of its upper triangle, as SciPy takes them.
    condensed = squareform(_without_nan(distances), checks=False)
    merges = linkage(condensed, "average", optimal_ordering=True)
    return merges, leaves_list(merges).astype(np.int64)


def classical_mds(distances: Floats) -> tuple[Floats, Floats]:
    """Place heads in the plane in which their distances are kept best: classical multidimensional scaling.

        B = -1/2 J D² J,  J = I - 1/n;  coordinates: two leading eigenvectors of B times the roots of their eigenvalues

    Roots of mean squared Hellinger distances and of mean Jensen-Shannon divergences are Euclidean if all pairs are
    compared on the same queries. Then B has no negative eigenvalues, and the map is a projection. Signs are chosen so
    that the entry of the largest size on each axis is positive: the same distances give the same map.

    Args:
        distances: (head, head), symmetric; NaN (never compared) counts as the largest of all.

    Returns:
        Coordinates, (head, 2), in the unit of the distances, centred at 0. And the share of the variance that each axis
        holds, (2,), 0 to 1.

    Source:
        Torgerson 1952; Gower 1966. Used for heads by Clark et al. 2019, section 6.
    """
    n = len(distances)
    if n < 2:
        return np.zeros((n, 2)), np.zeros(2)
    # B: squared distances, centred in rows and columns.
    squares = _without_nan(distances) ** 2
    row_means = squares.mean(1)[:, None]
    b = -(squares - squares.mean(0) - row_means + squares.mean()) / 2
    # Eigenvalues and their eigenvectors, the largest first; eigh returns the smallest first.
    values, vectors = np.linalg.eigh((b + b.T) / 2)
    values = np.maximum(values[::-1], 0.0)
    axes = vectors[:, ::-1][:, :2]
    # Turn each axis so that its entry of largest size is positive.
    largest = axes[np.abs(axes).argmax(0), [0, 1]]
    signs = np.where(largest >= 0, 1.0, -1.0)
    # Where all heads are equal there is no variance, and 0 / 1e-300 = 0 of it is explained.
    explained = values[:2] / max(values.sum(), 1e-300)
    return signs * axes * np.sqrt(values[:2]), explained


def best_matching(distances: Floats) -> NDArray[np.int64]:
    """Match heads one to one with the least sum of distances, (head_a, head_b); NaN counts as the largest.

    Returns:
        (pair, 2): heads of a, ascending, each with its head of b; as many pairs as the smaller side has heads.

    Source:
        Crouse 2016 (a modified Jonker-Volgenant algorithm), by scipy.
    """
    pairs = linear_sum_assignment(_nan_as_largest(distances))
    return np.stack(pairs, 1)


def _nan_as_largest(distances: Floats) -> Floats:
    """Return distances with the largest of them instead of NaN."""
    return np.nan_to_num(distances, nan=np.nanmax(distances, initial=0.0))


def _without_nan(distances: Floats) -> Floats:
    """Return distances without NaN, (head, head), exactly symmetric and 0 on the diagonal."""
    filled = _nan_as_largest(distances)
    filled = (filled + filled.T) / 2
    np.fill_diagonal(filled, 0.0)
    return filled
