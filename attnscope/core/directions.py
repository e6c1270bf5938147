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

from attnscope.core.sampled_rows import Column, Floats, Integers, Levels, Rows

Singles = NDArray[np.float32]

OFFSET_EDGES = np.array([-16, -8, -4, -3, -2, -1, 0, 1, 2, 3, 4, 8, 16])
"""Offsets at which the buckets of o begin, in tokens."""

DIMENSIONS = 96
"""Principal components of the embeddings that X keeps."""

KEY_RIDGE = 0.5
"""Weight of the ridge of K's columns: it weighs as much as this many rows. So do the other ridges."""

PAIR_RIDGE = 3.0
"""Weight of the ridges of U and V."""

TYPE_RIDGE = 8.0
"""Weight of the ridge of the scores that K has for single types."""

N_PAIRS = 2
"""Pairs U_j V_j that are fitted to a head."""

ROUNDS = 4
"""How often o and K take turns before the first pair."""

PAIR_ROUNDS = 2
"""How often V and U take turns as a pair is fitted."""

KEY_CUTS = (0.05, 0.2, 0.4, 0.6, 0.8, 0.9, 0.96)
"""Quantiles at which the levels of keys begin: shares of the fitted entries that have a lower score."""

PAIR_CUTS = (0.6, 0.8, 0.9, 0.96)
"""Quantiles at which the levels of a pair's queries begin."""

KEY_RANK = 6
PAIR_RANK = 7
"""Of features that explain as much, the one of the smallest rank is taken: known classes have smaller ones."""

GRADES = 16
"""How many values a level can have: 0, 1/15, 2/15 … 1. So few are easy to read, and rounding errors vanish."""

_NUMBERS_AT_ONCE = 2**21
"""Most numbers of an array (entry, head)."""

_SAME = 1e-5
"""Scores that differ by less than this share of their range may differ by rounding alone."""

_TINY = 1e-30
"""Instead of a divisor of 0."""


def describe_types(
    embeddings: Singles,
    occurrences: Integers,
    more: Singles,
) -> Singles:
    """Return the columns X of types, (type, DIMENSIONS + n), scaled to a mean square length of 1.

    Args:
        embeddings: (type, d): static embeddings.
        occurrences: (type,): how often each is a key of a fitted row.
        more: (type, n): further columns, such as classes; they are centred only.
    """
    weights = np.sqrt(occurrences.astype(np.float64))[:, None]
    total = max(float(weights.sum()), _TINY)
    # Types that are no key of a fitted row change nothing for the others.
    unit = embeddings
    if occurrences.any():
        unit = embeddings - embeddings[occurrences > 0].mean(0)
    # Directions of length 1, centred at their mean, weighted by the root of the types' occurrences.
    lengths = np.linalg.norm(unit, axis=1, keepdims=True)
    unit = unit / np.maximum(lengths, _TINY)
    unit = unit - (unit * weights).sum(0) / total
    # Project onto the principal components of the occurrences, (type, DIMENSIONS); eigh returns the largest last.
    _, vectors = np.linalg.eigh((unit * weights).T @ unit)
    components = vectors[:, ::-1][:, :DIMENSIONS]
    x = unit @ components
    # Where all keys are of one type, rounding is all that is left: it is not scaled up.
    length = np.sqrt(float((weights * x**2).sum()) / total)
    if length > 1e-6:
        x /= length
    centred = more - (more * weights).sum(0) / total
    return np.concatenate([x, centred], 1).astype(np.float32)


def find_columns(
    part: Rows,
    offsets: NDArray[np.int32],
    x: Singles,
) -> tuple[tuple[Column, ...], ...]:
    """Fit columns to each head that tell which tokens it looks for: keys, and both ends of each pair.

    Args:
        part: The rows to fit, with the types of their tokens.
        offsets: (entry of the whole sample,): how far each key is behind its query, in tokens.
        x: (type, column), from `describe_types`.
    """
    if not part.size:
        return ((),) * part.n_heads
    # Some heads at a time, so that arrays of (entry, head) stay small.
    at_once = max(1, _NUMBERS_AT_ONCE // part.size)
    columns: list[tuple[Column, ...]] = []
    for start in range(0, part.n_heads, at_once):
        heads = range(start, min(start + at_once, part.n_heads))
        columns += _Fit(part, offsets, x, heads).columns()
    return tuple(columns)


class _Fit:
    """Fit some heads at once.

    An entry is a key of a row. Arrays of entries are (entry, head), those of types (type, head), of rows (row, head).
    """

    def __init__(
        self,
        part: Rows,
        offsets: NDArray[np.int32],
        x: Singles,
        heads: range,
    ) -> None:
        n_rows = len(part.texts)
        self._part = part
        self._n_heads = len(heads)
        # Types that do not occur are left out of the fit. Their scores follow from their columns.
        self._x_of_all = x
        self._types = np.union1d(part.key_types, part.query_types)
        self._x = x[self._types]
        # The type of each entry's key, (entry,), and of each row's query, (row,), as numbers of occurring types.
        self._keys = np.searchsorted(self._types, part.key_types)
        self._queries = np.searchsorted(self._types, part.query_types)
        # Matrices that sum entries by key type, by offset and by row, (group, entry), and rows by query type.
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
        key_scores = self._x_of_all @ self._linear.T
        key_scores[self._types] += self._own
        n_types = len(key_scores)
        n_keys = np.bincount(self._part.key_types, minlength=n_types)
        n_queries = np.bincount(self._part.query_types, minlength=n_types)
        key_scores -= (n_keys @ key_scores) / n_keys.sum()
        columns = []
        # Cut scores into levels: keys, then both signs of each pair.
        for head in range(self._n_heads):
            levels, values = quantise(key_scores[:, head], n_keys, KEY_CUTS)
            head_columns = [Column(KEY_RANK, values, levels)]
            for left, right in pairs:
                u = self._x_of_all @ left[head]
                v = self._x_of_all @ right[head]
                for sign in (1, -1):
                    positive = np.maximum(sign * u, 0)
                    query_levels, query_values = quantise(positive, n_queries, PAIR_CUTS)
                    levels, values = quantise(sign * v, n_keys, KEY_CUTS)
                    column = Column(PAIR_RANK, values, levels, query_values, query_levels)
                    head_columns.append(column)
            columns.append(tuple(head_columns))
        return columns

    def _spread(self, of_rows: Singles) -> Singles:
        """Give each entry the numbers of its row: (row, head) to (entry, head)."""
        return np.repeat(of_rows, self._part.lengths, axis=0)

    def _errors(self) -> tuple[Singles, Singles]:
        """Return the errors r = B - p, and p, each times the weight of its row, (entry, head)."""
        # Less the row's largest score, so that the exponential does not overflow.
        largest = np.maximum.reduceat(self._scores, self._part.starts[:-1], axis=0)
        self._scores -= self._spread(largest)
        p = np.exp(self._scores)
        row_sums = self._by_row @ p
        p *= self._spread(self._row_weights / row_sums)
        return self._weighted - p, p

    def _fit_offsets(self) -> None:
        """Take a Newton step for the score of each bucket of offsets, at most 2, and add it to the scores."""
        r, p = self._errors()
        gradient = self._by_bucket @ r
        curvature = self._by_bucket @ p + self._mean_weight
        step = np.clip(gradient / curvature, -2, 2)
        self._scores += np.take(step, self._buckets, axis=0)

    def _fit_keys(self) -> None:
        """Take a Newton step for K, at most 4 for a type, and add it to the scores."""
        r, p = self._errors()
        gradient = self._by_key @ r
        curvature = self._by_key @ p
        # Types' own scores are eliminated: with a ridge l they leave the share l / (h + l) of the curvature h, and of
        # the gradient where they are 0, g + h own, to the columns.
        ridge = TYPE_RIDGE * self._mean_weight
        left_share = ridge / (curvature + ridge)
        left_gradient = (gradient + curvature * self._own) * left_share
        linear = self._step(self._linear, left_gradient, curvature * left_share, KEY_RIDGE)
        change = self._x @ (linear - self._linear).T
        own = (gradient + curvature * (self._own - change)) / (curvature + ridge)
        step = np.clip(change + own - self._own, -4, 4)
        self._linear = linear
        self._own = own
        self._scores += np.take(step, self._keys, axis=0)

    def _step(
        self,
        coefficients: Singles,
        gradients: Singles,
        curvatures: Singles,
        ridge_rows: float,
    ) -> Singles:
        """Return coefficients, (head, column), after a Newton step from gradients and curvatures, (type, head).

        `ridge_rows` is the weight of the ridge, in rows.
        """
        ridge = ridge_rows * self._mean_weight
        # One system of equations per head, of as many unknowns as columns.
        stepped = np.empty_like(coefficients)
        for head, current in enumerate(coefficients):
            # In float64: in float32 the ridge would be lost.
            second = ((self._x * curvatures[:, head, None]).T @ self._x).astype(np.float64)
            second[np.diag_indices_from(second)] += ridge
            gradient = self._x.T @ gradients[:, head] - ridge * current
            stepped[head] = current + np.linalg.solve(second, gradient)
        return stepped

    def _fit_pair(self) -> tuple[Singles, Singles]:
        """Fit one more pair, (head, column) of U and of V; o and K are fitted again beside it."""
        # Scores of the pair are u(query) v(key), (entry, head).
        left, right = self._start_pair()
        u = self._query_scores(left)
        v = self._key_scores(right)
        self._scores += u * v
        for _ in range(PAIR_ROUNDS):
            # The keys' side.
            r, p = self._errors()
            gradients = self._by_key @ (r * u)
            curvatures = self._by_key @ (p * u**2)
            right = self._step(right, gradients, curvatures, PAIR_RIDGE)
            new_v = self._key_scores(right)
            self._scores += u * (new_v - v)
            v = new_v
            # The queries' side: the curvature of a row is the variance of v within it.
            r, p = self._errors()
            row_gradients = self._by_row @ (r * v)
            means = self._by_row @ (p * v)
            squares = self._by_row @ (p * v**2)
            variances = squares - means**2 / np.maximum(self._row_weights, _TINY)
            gradients = self._by_query @ row_gradients
            left = self._step(left, gradients, self._by_query @ variances, PAIR_RIDGE)
            new_u = self._query_scores(left)
            self._scores += (new_u - u) * v
            # Scale both sides, so that u has a standard deviation of 1 over queries.
            size = _scale((self._x[self._queries] @ left.T).T)
            left = left / size
            right = right * size
            u = new_u / size.T
            v = v * size.T
            self._fit_offsets()
            self._fit_keys()
        return left, right

    def _query_scores(self, left: Singles) -> Singles:
        """Return u of each entry's query, (entry, head)."""
        return self._spread(np.take(self._x @ left.T, self._queries, axis=0))

    def _key_scores(self, right: Singles) -> Singles:
        """Return v of each entry's key, (entry, head)."""
        return np.take(self._x @ right.T, self._keys, axis=0)

    def _start_pair(self) -> tuple[Singles, Singles]:
        """Return coefficients to start a pair from, (head, column) of U and of V."""
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
        for head in range(self._n_heads):
            errors = sp.csr_array((r[:, head], self._keys, self._part.starts), (n_rows, len(x)))
            white_k = _whitening((x * curvature[:, head, None]).T @ x, 0.05)
            mean = queries.T @ (errors @ x)
            lefts, sizes, rights = np.linalg.svd(white_q.T @ mean @ white_k)
            u = white_q @ lefts[:, 0]
            size = _scale((queries @ u)[None])[0, 0]
            left[head] = u / size
            # Half of the Newton step: with the whole one both sides could overshoot together.
            right[head] = white_k @ rights[0] * (sizes[0] * size / 2)
        return left, right


def _sums_by(groups: Integers, n_groups: int) -> sp.csr_array:
    """Return the matrix that sums entries by group, (group, entry)."""
    n = len(groups)
    return sp.csr_array((np.ones(n, np.float32), (groups, np.arange(n))), (n_groups, n))


def _scale(scores: Singles) -> Singles:
    """Return the standard deviation of scores over queries, (head, 1); 1 where they are alike, up to rounding."""
    deviation: Singles = scores.std(1, keepdims=True)
    return np.where(deviation > 1e-4, deviation, np.float32(1.0))


def _whitening(second: NDArray[np.floating], share: float) -> Singles:
    """Return W with W Wᵀ = the inverse of second moments, to whose diagonal a share of its mean is added."""
    n = len(second)
    ridge = max(share * float(np.trace(second)) / n, 1e-6)
    second = second + ridge * np.eye(n, dtype=np.float32)
    return np.linalg.cholesky(np.linalg.inv(second)).astype(np.float32)


# Levels


def quantise(
    scores: Singles,
    occurrences: Integers,
    cuts: tuple[float, ...],
) -> tuple[Levels, Floats]:
    """Cut scores of types into levels at quantiles.

    Args:
        scores: (type,).
        occurrences: (type,): how often each counts.
        cuts: Shares of all occurrences.

    Returns:
        The level of each type, (type,), and the value of each level, 0 to 1, (level,): its mean score, scaled.
    """
    if not occurrences.any():
        return np.zeros(len(scores), np.uint8), np.zeros(1)
    # Scores that only rounding tells apart are on one side of an edge: else the level would depend on the machine.
    step = max(_SAME * float(np.ptp(scores)), _TINY)
    rounded = np.rint(scores.astype(np.float64) / step) * step
    # Edges are quantiles of the occurrences, interpolated as np.quantile does. Were all occurrences sorted, those of a
    # type would stand from `first` to `last`.
    order = np.argsort(rounded, kind="stable")
    order = order[occurrences[order] > 0]
    last = np.cumsum(occurrences[order]) - 1
    first = last - occurrences[order] + 1
    places = np.stack([first, last], 1).ravel()
    edges = np.interp(np.array(cuts) * last[-1], places, np.repeat(rounded[order], 2))
    # Half a step lower, so that a score at an edge is above it.
    edges = np.unique(edges) - step / 2
    levels = np.searchsorted(edges, rounded, "right").astype(np.uint8)
    # The value of a level is the mean score of its occurrences; none is below that of the level before. Levels that
    # do not occur have the value of the level before, or of the first that does.
    n_levels = len(edges) + 1
    counts = np.bincount(levels, occurrences, n_levels)
    sums = np.bincount(levels, occurrences * scores.astype(np.float64), n_levels)
    means = np.where(counts > 0, sums / np.maximum(counts, 1), -np.inf)
    means = np.maximum.accumulate(means)
    means = np.maximum(means, means[np.isfinite(means)].min())
    # Scaled to 0 to 1, and rounded to the nearest of GRADES values.
    lowest = means.min()
    span = max(float(means.max() - lowest), _TINY)
    return levels, np.rint((GRADES - 1) * (means - lowest) / span) / (GRADES - 1)
