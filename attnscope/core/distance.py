"""Measure the distance between heads by the divergence of their attention; cluster, map and match heads by it.

The divergence (Jensen-Shannon or Hellinger) compares two *rows*: the weights of one query on all keys, in two heads.
Divergences are summed over queries and not averaged, so that the sums of blocks of queries, chunks and texts can be
added. Everything is computed in float64, because heads of two checkpoints may differ by less than float32 resolves.

A row must be a distribution. If it sums to less than 1, the rest is the share of a learned sink, which has no value. It
becomes one more key of the row. A row of zeros is no distribution: its query may attend to no key, or only to special
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

from attnscope.arrays import Floats
from attnscope.core.attention.precision import in_float64

Divergence = Literal["hellinger", "jensen_shannon"]

MAX_DIVERGENCE: dict[Divergence, float] = {"hellinger": 1.0, "jensen_shannon": math.log(2)}
"""The largest value of each divergence: that of two rows that share no key."""

SUM_TOLERANCE = 1e-5
"""If a row's sum is below 1 by more than this, the rest is the share of a sink. If it is less, it is rounding."""

_ELEMENTS_AT_ONCE = 2**18
"""How many weights are compared at once. With fewer, threads wait longer than they compute. With more, the arrays do
not fit in the CPU's caches."""


class PairSums(NamedTuple):
    """Hold sums over queries for all pairs of a head of `a` and a head of `b`, float64.

    Attributes:
        sums: The divergence, summed over the queries where both heads have a distribution.
        counts: How many queries these are.
    """

    sums: Float[Tensor, "head_a head_b"]
    counts: Float[Tensor, "head_a head_b"]


AttentionRows = Tensor | NDArray[np.floating]
"""Rows of attention over the keys, in any precision."""


def sum_divergences(
    measure: Divergence,
    a: AttentionRows,
    b: AttentionRows | None = None,
) -> PairSums:
    """Return the divergence of each pair of heads, summed over queries, in float64.

        hellinger:      h²(p, q) = 1/2 Σ_k (√p_k - √q_k)² = 1/2 (Σ_k p_k + Σ_k q_k) - Σ_k √p_k √q_k
        jensen_shannon: JS(p, q) = H((p + q) / 2) - (H(p) + H(q)) / 2,  H the entropy in nats

    h² is 0 to 1, JS 0 to ln 2. Their square roots are metrics (Endres & Schindelin 2003), and so are the square roots
    of their means over queries.

    One matrix product gives the sum of √p_k √q_k over keys and queries for all pairs of heads: (head_a, query · key) @
    (query · key, head_b).

    Args:
        measure: Which divergence.
        a: Weights, (head_a, query, key), at least 0, rows summing to at most 1.
        b: Weights of other heads on the same queries and keys, (head_b, query, key); None = a.

    Returns:
        The sums and counts. Sums are 0 on the diagonal if b is None.

    Source:
        Hellinger 1909; its computation by a matrix product is ours. Jensen-Shannon: Lin 1991; between heads, summed
        over tokens: Clark et al. 2019, section 6.
    """
    # Distributions, (head, query, key + sink).
    rows_a = _append_sink(a)
    rows_b = rows_a if b is None else _append_sink(b)
    # 1 where a row is a distribution, else 0, (head, query).
    is_row_a = rows_a.any(-1).double()
    is_row_b = rows_b.any(-1).double()
    counts = is_row_a @ is_row_b.T
    if measure == "hellinger":
        # 1/2 (Σ p + Σ q), summed over the queries where both heads have a distribution, (head_a, head_b). It would be
        # `counts` if rows summed to exactly 1, but they do so only up to rounding.
        mass_a = rows_a.sum(-1)
        mass_b = rows_b.sum(-1)
        sums = (mass_a @ is_row_b.T + is_row_a @ mass_b.T) / 2
        roots_a = rows_a.sqrt().flatten(1)
        roots_b = rows_b.sqrt().flatten(1)
        sums -= roots_a @ roots_b.T
    else:
        # (head_a, head_b, query); then queries without two distributions are left out.
        divergences = torch.stack([_jensen_shannon(head_rows, rows_b) for head_rows in rows_a])
        sums = (divergences * is_row_a[:, None] * is_row_b).sum(-1)
    sums = sums.clamp_min(0)
    # Without b, the matrix is symmetric with zeros on its diagonal, but for rounding. Make it exactly so.
    if b is None:
        sums = (sums + sums.T) / 2
        sums.fill_diagonal_(0.0)
    return PairSums(sums, counts)


def compute_row_divergences(
    measure: Divergence,
    p: NDArray[np.floating],
    q: NDArray[np.floating],
) -> Floats:
    """Return the divergence of each row of p from the same row of q, (..., key) to (...,); NaN if one is all zeros."""
    rows_p = _append_sink(p)
    rows_q = _append_sink(q)
    if measure == "hellinger":
        divergences = (rows_p.sqrt() - rows_q.sqrt()).square().sum(-1) / 2
    else:
        divergences = _jensen_shannon(rows_p, rows_q)
    return np.where(p.any(-1) & q.any(-1), divergences.numpy(), np.nan)


def _jensen_shannon(
    p: Float[Tensor, "query key"],
    q: Float[Tensor, "*head query key"],
) -> Float[Tensor, "*head query"]:
    """Return the Jensen-Shannon divergence of rows in nats."""
    # Compute some queries at a time: as many as have about _ELEMENTS_AT_ONCE weights in q.
    n_queries = p.shape[-2]
    step = max(1, _ELEMENTS_AT_ONCE * n_queries // max(1, q.numel()))
    parts = []
    for rows_p, rows_q in zip(p.split(step, -2), q.split(step, -2), strict=True):  # type: ignore[no-untyped-call]
        mean_entropy = (_entropy(rows_p) + _entropy(rows_q)) / 2
        entropy_of_mean = _entropy((rows_p + rows_q) / 2)
        parts.append(entropy_of_mean - mean_entropy)
    # Rounding may make the divergence of equal rows slightly negative.
    return torch.cat(parts, -1).clamp_min(0)


def _entropy(rows: Float[Tensor, "*head query key"]) -> Float[Tensor, "*head query"]:
    """Return the entropy of rows in nats."""
    entropy: Tensor = torch.special.entr(rows).sum(-1)
    return entropy


def _append_sink(rows: AttentionRows) -> Float[Tensor, "*head query key_and_sink"]:
    """Return rows in float64 with the sink's share as one more key.

    The share is 1 minus the row's sum if that is more than rounding, else 0. It is 0 for a row of zeros, so that the
    row stays zeros.
    """
    rows = in_float64(torch.as_tensor(rows))
    total = rows.sum(-1, keepdim=True)
    rest = (1 - total) * rows.any(-1, keepdim=True)
    sink = rest.where(rest > SUM_TOLERANCE, 0.0)
    return torch.cat([rows, sink], -1)


def cluster_heads(distances: Floats) -> tuple[Floats, NDArray[np.int64]]:
    """Cluster heads by average linkage (UPGMA), and order them so that neighbours are as similar as possible.

    Args:
        distances: (head, head), symmetric. NaN (the heads were never compared) counts as the largest distance.

    Returns:
        The merges as SciPy's linkage, (n_heads - 1, 4); and the heads in the order of the tree's leaves, (head,).
        A row of the merges has the two clusters, the distance at which they merge, and how many heads the new cluster
        has. Clusters below n_heads are single heads; row i makes cluster n_heads + i.

    Source:
        Sokal & Michener 1958; Bar-Joseph et al. 2001 for the order; by scipy.
    """
    n = len(distances)
    if n < 2:
        return np.zeros((0, 4)), np.arange(n)
    # SciPy takes the upper triangle of (head, head), as a flat array.
    condensed = squareform(_make_symmetric(distances), checks=False)
    merges = linkage(condensed, "average", optimal_ordering=True)
    return merges, leaves_list(merges).astype(np.int64)


def classical_mds(distances: Floats) -> tuple[Floats, Floats]:
    """Place heads in the plane in which their distances are kept best: classical multidimensional scaling.

        B = -1/2 J D² J,  J = I - 1/n;  coordinates: two leading eigenvectors of B times the roots of their eigenvalues

    Distances are Euclidean if they are square roots of mean divergences, and all pairs are compared on the same
    queries. Then B has no negative eigenvalues, and the map is a projection. The sign of an eigenvector is arbitrary.
    It is chosen so that the head farthest out on the axis is on the positive side: the same distances always give the
    same map.

    Args:
        distances: (head, head), symmetric. NaN (the heads were never compared) counts as the largest distance.

    Returns:
        Coordinates, (head, 2), in the unit of the distances, centred at 0; and the share of the variance that each axis
        explains, (2,), 0 to 1.

    Source:
        Torgerson 1952; Gower 1966. Used for heads by Clark et al. 2019, section 6.
    """
    n = len(distances)
    if n < 2:
        return np.zeros((n, 2)), np.zeros(2)
    # B: squared distances with the means of rows and columns subtracted, times -1/2, (head, head).
    squares = _make_symmetric(distances) ** 2
    row_means = squares.mean(1)[:, None]
    b = -(squares - squares.mean(0) - row_means + squares.mean()) / 2
    # Eigenvalues, (head,), and eigenvectors, (head, axis). eigh sorts them ascending, so they are reversed.
    values, vectors = np.linalg.eigh((b + b.T) / 2)
    values = np.maximum(values[::-1], 0.0)
    axes = vectors[:, ::-1][:, :2]
    # Flip each axis whose entry of largest absolute value is negative.
    largest = axes[np.abs(axes).argmax(0), [0, 1]]
    signs = np.where(largest >= 0, 1.0, -1.0)
    # If all heads are equal there is no variance; then each axis explains 0 / 1e-300 = 0.
    explained = values[:2] / max(values.sum(), 1e-300)
    return signs * axes * np.sqrt(values[:2]), explained


def match_heads(distances: Floats) -> NDArray[np.int64]:
    """Match heads of a with heads of b one to one, so that the sum of their distances is minimal.

    `distances` are (head_a, head_b). NaN counts as the largest distance.

    Returns:
        Pairs (head_a, head_b), ascending in head_a, (pair, 2). There are as many pairs as heads of the smaller side.

    Source:
        Crouse 2016 (a modified Jonker-Volgenant algorithm), by scipy.
    """
    pairs = linear_sum_assignment(_replace_nan(distances))
    return np.stack(pairs, 1)


def _replace_nan(distances: Floats) -> Floats:
    """Return distances with NaN replaced by the largest distance."""
    return np.nan_to_num(distances, nan=np.nanmax(distances, initial=0.0))


def _make_symmetric(distances: Floats) -> Floats:
    """Return distances, (head, head), with NaN replaced, exactly symmetric, and 0 on the diagonal."""
    filled = _replace_nan(distances)
    filled = (filled + filled.T) / 2
    np.fill_diagonal(filled, 0.0)
    return filled
