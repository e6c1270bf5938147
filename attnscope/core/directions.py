"""Find which tokens a head looks for: a score per type of token, and pairs of such scores.

    s(q, k) = o(k - q) + K(type of k) + Σ_j U_j(type of q) V_j(type of k),      p(k | q) ∝ exp(s)

K, U and V are linear in a few columns X that describe types (such as their static embeddings), with a ridge. K has a
further score of its own per type, which a second ridge draws to 0: words that are frequent in the fitted rows may
differ from their embedding.

Each block is fitted in turn by a Newton step on the types' sums. With B the attention, r = B - p
and curvature p (an upper bound of p(1 - p), so that steps do not overshoot), the gradient of a type is Σ r over its
entries. A pair starts from the largest singular value of the whitened mean of r x_q x_kᵀ.

Source: ours. The step is iteratively reweighted least squares (McCullagh & Nelder 1989, section 2.5); pairs are reduced
rank regression (Anderson 1951).
"""

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from attnscope.core.sampled_rows import Column, Floats, Levels, Rows

Singles = NDArray[np.float32]

OFFSET_EDGES = np.array([-16, -8, -4, -3, -2, -1, 0, 1, 2, 3, 4, 8, 16])
"""Offsets at which the buckets of o begin, in tokens."""

DIMENSIONS = 96
"""Principal components of the embeddings that X keeps."""

RIDGES = {"keys": 0.5, "pairs": 3.0, "types": 8.0}
"""Weights of the ridges: each weighs as much as this many rows."""

N_PAIRS = 2
ROUNDS = 4
PAIR_ROUNDS = 2

KEY_CUTS = (0.05, 0.2, 0.4, 0.6, 0.8, 0.9, 0.96)
"""Quantiles at which the levels of keys begin: shares of the fitted entries that have a lower score."""

PAIR_CUTS = (0.6, 0.8, 0.9, 0.96)
"""The same of the queries of a pair."""

KEY_RANK = 6
PAIR_RANK = 7
"""Of features that explain as much, the one of the smallest rank is taken: known classes have smaller ones."""

GRADES = 16
"""Values of levels are rounded to so many."""

_NUMBERS_AT_ONCE = 2**21
"""Most numbers of an array (entry, head)."""

_SAME = 1e-5
"""Share of the range of scores by which rounding may move one."""


def describe_types(embeddings: Singles, occurrences: NDArray[np.int64], more: Singles) -> Singles:
    """Return the columns X of types, scaled to a mean square length of 1.

    Args:
        embeddings: (type, d): static embeddings.
        occurrences: (type,): how often each is a key of a fitted row.
        more: (type, n): further columns, such as classes.
    """
    weights = np.sqrt(occurrences.astype(np.float64))[:, None]
    total = max(float(weights.sum()), 1e-30)
    # Types that are no key of a fitted row change nothing for the others.
    unit = embeddings - embeddings[occurrences > 0].mean(0) if total > 1e-30 else embeddings
    # Directions of length 1, centred at their mean, weighted by the root of the types' occurrences.
    unit = unit / np.maximum(np.linalg.norm(unit, axis=1, keepdims=True), 1e-30)
    unit = unit - (unit * weights).sum(0) / total
    # Project onto the principal components of the occurrences, (type, DIMENSIONS).
    _, vectors = np.linalg.eigh((unit * weights).T @ unit)
    x = unit @ vectors[:, ::-1][:, :DIMENSIONS]
    length = np.sqrt(float((weights * x**2).sum()) / total)
    x /= length if length > 1e-6 else 1.0  # where all keys are of one type, rounding is all that is left
    return np.concatenate([x, more - (more * weights).sum(0) / total], 1).astype(np.float32)


def find_columns(part: Rows, offsets: NDArray[np.int32], x: Singles) -> tuple[tuple[Column, ...], ...]:
    """Fit columns to each head that tell which tokens it looks for: keys, and both ends of each pair.

    Args:
        part: The rows to fit; their types are known. An entry is a key of a row, `size` counts them all.
        offsets: (entry of the whole sample,): how far each key is behind its query, in tokens.
        x: (type, column): see `describe_types`.
    """
    if not part.size:
        return ((),) * part.n_heads
    at_once = max(1, _NUMBERS_AT_ONCE // part.size)
    # Some heads at a time, so that arrays of (entry, head) stay small.
    columns: list[tuple[Column, ...]] = []
    for start in range(0, part.n_heads, at_once):
        columns += _Fit(part, offsets, x, range(start, min(start + at_once, part.n_heads))).columns()
    return tuple(columns)


class _Fit:
    """The fit of some heads at once. Arrays of entries are (entry, head), those of types and rows (type, head)."""

    def __init__(self, part: Rows, offsets: NDArray[np.int32], x: Singles, heads: range) -> None:
        n_rows = len(part.texts)
        self._part = part
        self._heads = heads
        # Types that do not occur are left out of the fit. Their scores follow from their columns.
        self._all = x
        self._types = np.union1d(part.key_types, part.query_types)
        self._x = x[self._types]
        self._keys = np.searchsorted(self._types, part.key_types)
        self._queries = np.searchsorted(self._types, part.query_types)
        # Matrices that sum entries by key type, by query type, by offset and by row: (group, entry).
        self._buckets = np.searchsorted(OFFSET_EDGES, offsets[part.entries], "right")
        self._by_key = _sums_by(self._keys, len(self._types))
        self._by_query = _sums_by(self._queries, len(self._types))
        self._by_bucket = _sums_by(self._buckets, len(OFFSET_EDGES) + 1)
        self._by_row = _sums_by(part.row_of, n_rows)
        # Attention B times the weight of its row, (entry, head). The scores start from 0: uniform attention.
        self._mean_weight = 1.0 / max(1, n_rows)
        self._row_weights = part.weights[list(heads)].T.astype(np.float32)
        attention = np.stack([part.scaled(head) for head in heads], 1).astype(np.float32)
        self._weighted = attention * self._spread(self._row_weights)
        self._scores = np.zeros_like(self._weighted)
        # K: coefficients of the columns, (head, column), and scores of the types' own, (type, head).
        self._linear = np.zeros((len(heads), x.shape[1]), np.float32)
        self._own = np.zeros((len(self._types), len(heads)), np.float32)

    def columns(self) -> list[tuple[Column, ...]]:
        """Fit all blocks, and return the columns of each head."""
        # Offsets and keys take turns; pairs are fitted on what these leave.
        for _ in range(ROUNDS):
            self._fit_offsets()
            self._fit_keys()
        pairs = [self._fit_pair() for _ in range(N_PAIRS)]
        # Scores of all types as keys, (type, head), centred over the keys of fitted rows.
        keys = self._all @ self._linear.T
        keys[self._types] += self._own
        n_keys = np.bincount(self._part.key_types, minlength=len(keys))
        n_queries = np.bincount(self._part.query_types, minlength=len(keys))
        keys -= (n_keys @ keys) / n_keys.sum()
        columns = []
        # Cut scores into levels: keys, then both signs of each pair.
        for head in range(len(self._heads)):
            levels, values = quantise(keys[:, head], n_keys, KEY_CUTS)
            of_head = [Column(KEY_RANK, values, levels)]
            for left, right in pairs:
                u = self._all @ left[head]
                v = self._all @ right[head]
                for sign in (1, -1):
                    query_levels, query_values = quantise(np.maximum(sign * u, 0), n_queries, PAIR_CUTS)
                    levels, values = quantise(sign * v, n_keys, KEY_CUTS)
                    of_head.append(Column(PAIR_RANK, values, levels, query_values, query_levels))
            columns.append(tuple(of_head))
        return columns

    def _spread(self, of_rows: Singles) -> Singles:
        """Give each entry the numbers of its row: (row, head) to (entry, head)."""
        return np.repeat(of_rows, self._part.lengths, axis=0)

    def _errors(self) -> tuple[Singles, Singles]:
        """Return the errors r = B - p, and p, each times the weight of its row, (entry, head)."""
        # Less the row's largest score, so that the exponential does not overflow.
        self._scores -= self._spread(np.maximum.reduceat(self._scores, self._part.starts[:-1], axis=0))
        p = np.exp(self._scores)
        p *= self._spread(self._row_weights / (self._by_row @ p))
        return self._weighted - p, p

    def _fit_offsets(self) -> None:
        r, p = self._errors()
        step = np.clip((self._by_bucket @ r) / (self._by_bucket @ p + self._mean_weight), -2, 2)
        self._scores += np.take(step, self._buckets, axis=0)

    def _fit_keys(self) -> None:
        r, p = self._errors()
        g = self._by_key @ r
        h = self._by_key @ p
        # Types' own scores are eliminated: with a ridge l they leave the share l / (h + l) of the curvature h, and of
        # the gradient where they are 0, g + h own, to the columns.
        lam = RIDGES["types"] * self._mean_weight
        rest = lam / (h + lam)
        linear = self._ridge(self._linear, (g + h * self._own) * rest, h * rest, RIDGES["keys"])
        moved = self._x @ (linear - self._linear).T
        own = (g + h * (self._own - moved)) / (h + lam)
        step = np.clip(moved + own - self._own, -4, 4)
        self._linear = linear
        self._own = own
        self._scores += np.take(step, self._keys, axis=0)

    def _ridge(self, current: Singles, g: Singles, h: Singles, rows: float) -> Singles:
        """Return coefficients, (head, column), after a Newton step from the gradient and curvature of types."""
        lam = rows * self._mean_weight
        # One Newton step per head: a system of as many unknowns as columns.
        ridged = np.empty_like(current)
        for head, coefficients in enumerate(current):
            # The ridge is lost in float32.
            second = ((self._x * h[:, head, None]).T @ self._x).astype(np.float64)
            second[np.diag_indices_from(second)] += lam
            ridged[head] = coefficients + np.linalg.solve(
                second, self._x.T @ g[:, head] - lam * coefficients
            )
        return ridged

    def _fit_pair(self) -> tuple[Singles, Singles]:
        """Fit one more pair, (head, column) of either side; the other blocks are fitted again beside it."""
        # Scores of the pair are u(query) v(key), (entry, head): `of_queries` times `of_keys`.
        left, right = self._start_pair()
        of_queries = self._of_queries(left)
        of_keys = self._of_keys(right)
        self._scores += of_queries * of_keys
        for _ in range(PAIR_ROUNDS):
            # The keys' side.
            r, p = self._errors()
            right = self._ridge(
                right,
                self._by_key @ (r * of_queries),
                self._by_key @ (p * of_queries**2),
                RIDGES["pairs"],
            )
            moved = self._of_keys(right)
            self._scores += of_queries * (moved - of_keys)
            of_keys = moved
            # The queries' side: within a row the curvature is that of a covariance.
            r, p = self._errors()
            gradients = self._by_row @ (r * of_keys)
            means = self._by_row @ (p * of_keys)
            squares = self._by_row @ (p * of_keys**2)
            spread = squares - means**2 / np.maximum(self._row_weights, 1e-30)
            left = self._ridge(
                left, self._by_query @ gradients, self._by_query @ spread, RIDGES["pairs"]
            )
            moved = self._of_queries(left)
            self._scores += (moved - of_queries) * of_keys
            # Both sides are scaled, so that queries spread by 1.
            size = _scale((self._x[self._queries] @ left.T).T)
            left = left / size
            right = right * size
            of_queries = moved / size.T
            of_keys = of_keys * size.T
            self._fit_offsets()
            self._fit_keys()
        return left, right

    def _of_queries(self, left: Singles) -> Singles:
        return self._spread(np.take(self._x @ left.T, self._queries, axis=0))

    def _of_keys(self, right: Singles) -> Singles:
        return np.take(self._x @ right.T, self._keys, axis=0)

    def _start_pair(self) -> tuple[Singles, Singles]:
        r, p = self._errors()
        x = self._x
        queries = x[self._queries]
        # The mean of r x_q x_kᵀ, whitened on both sides, has the best pair as its largest singular value.
        n_rows = len(queries)
        white_q = _whitening(queries.T @ queries / n_rows, 0.02)
        curvature = self._by_key @ p
        left = np.empty_like(self._linear)
        right = np.empty_like(self._linear)
        # One head at a time: errors as a matrix of (row, type).
        for head in range(len(left)):
            errors = sp.csr_array((r[:, head], self._keys, self._part.starts), (n_rows, len(x)))
            white_k = _whitening((x * curvature[:, head, None]).T @ x, 0.05)
            a, sizes, b = np.linalg.svd(white_q.T @ (queries.T @ (errors @ x)) @ white_k)
            u = white_q @ a[:, 0]
            size = _scale((queries @ u)[None])[0, 0]
            left[head] = u / size
            right[head] = white_k @ b[0] * (sizes[0] * size / 2)
        return left, right


def _sums_by(groups: NDArray[np.int64], n_groups: int) -> sp.csr_array:
    """Return the matrix that sums entries by group, (group, entry)."""
    n = len(groups)
    return sp.csr_array((np.ones(n, np.float32), (groups, np.arange(n))), (n_groups, n))


def _scale(scores: Singles) -> Singles:
    """Return the spread of scores, (head, 1); 1 where all queries are alike, up to rounding."""
    spread: Singles = scores.std(1, keepdims=True)
    return np.where(spread > 1e-4, spread, np.float32(1.0))


def _whitening(second: NDArray[np.floating], share: float) -> Singles:
    n = len(second)
    second = second + np.eye(n, dtype=np.float32) * max(share * float(np.trace(second)) / n, 1e-6)
    return np.linalg.cholesky(np.linalg.inv(second)).astype(np.float32)


# Levels


def quantise(
    scores: Singles, occurrences: NDArray[np.int64], cuts: tuple[float, ...]
) -> tuple[Levels, Floats]:
    """Cut scores of types into levels at quantiles, (type,), each with its value: its mean score, scaled to 0 to 1.

    Args:
        scores: (type,).
        occurrences: (type,): how often each counts.
        cuts: Shares of all occurrences.
    """
    if not occurrences.any():
        return np.zeros(len(scores), np.uint8), np.zeros(1)
    # Scores that only rounding tells apart are on one side of an edge: else the level would depend on the machine.
    step = max(_SAME * float(np.ptp(scores)), 1e-30)
    rounded = np.rint(scores.astype(np.float64) / step) * step
    # Edges are quantiles of the occurrences, as np.quantile interpolates them: between the place of a type's last
    # occurrence, were all sorted, and that of the next one's first.
    order = np.argsort(rounded, kind="stable")
    order = order[occurrences[order] > 0]
    last = np.cumsum(occurrences[order]) - 1
    first = last - occurrences[order] + 1
    places = np.array(cuts) * last[-1]
    edges = np.interp(places, np.stack([first, last], 1).ravel(), np.repeat(rounded[order], 2))
    edges = np.unique(edges) - step / 2
    levels = np.searchsorted(edges, rounded, "right").astype(np.uint8)
    # The value of a level is the mean score of its occurrences; none is below that of the level before.
    counts = np.bincount(levels, occurrences, len(edges) + 1)
    means = np.bincount(levels, occurrences * scores.astype(np.float64), len(edges) + 1) / np.maximum(
        counts, 1
    )
    means = np.maximum.accumulate(np.where(counts > 0, means, -np.inf))
    means = np.where(np.isfinite(means), means, means[np.isfinite(means)].min())
    spread = max(float(means.max() - means.min()), 1e-30)
    return levels, np.rint((GRADES - 1) * (means - means.min()) / spread) / (GRADES - 1)
