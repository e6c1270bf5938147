"""Fit, to the rows of a head, scores of the tokens that it looks for.

    p(k | q) ∝ exp(s(q, k)),      s(q, k) = o(k - q) + K(type of k) + Σ_j U_j(type of q) V_j(type of k)

A type is an entry of the vocabulary. o is a score of the offset, K a score of the key's type, and a pair U_j V_j is a
score of the query's type times one of the key's.

K, U and V are linear in X, which describes each type by a few columns (its static embedding, for one), and a ridge
keeps their coefficients small. K adds to this a score for each type alone, with a ridge too, because the embedding of a
word that is frequent in the fitted rows may not tell all of its score.

o, K, U and V are fitted in turn, by a Newton step each. With B the attention that is fitted, the gradient of a type's
score is the sum of r = B - p over all keys of that type, and its curvature the sum of p: an upper bound of p(1 - p), so
that steps do not overshoot. A pair starts from the largest singular value of the whitened mean of r x_q x_kᵀ, where x_q
and x_k are the rows of X of query and key.

Source: ours. The step is iteratively reweighted least squares (McCullagh & Nelder 1989, section 2.5); pairs are reduced
rank regression (Anderson 1951).
"""

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from attnscope.core.sampled_rows import FittedFeature, Floats, Integers, Levels, RowSample

Singles = NDArray[np.float32]

OFFSET_EDGES = np.array([-16, -8, -4, -3, -2, -1, 0, 1, 2, 3, 4, 8, 16])
"""Offsets at which the buckets of o begin, in tokens."""

DIMENSIONS = 96
"""Principal components of the embeddings that X keeps."""

KEY_RIDGE = 0.5
"""The ridge of K's coefficients, in units of a row's weight."""

PAIR_RIDGE = 3.0
"""The ridge of the coefficients of U and V, in the same unit."""

TYPE_RIDGE = 8.0
"""The ridge of the scores that K has for each type alone, in the same unit."""

N_PAIRS = 2
"""Pairs U_j V_j that are fitted to a head."""

ROUNDS = 4
"""How often o and then K are fitted before the first pair."""

PAIR_ROUNDS = 2
"""How often V and then U are fitted in each pair."""

KEY_CUTS = (0.05, 0.2, 0.4, 0.6, 0.8, 0.9, 0.96)
"""Where a key's score is cut into levels: quantiles of the scores of all keys in the fitted rows."""

PAIR_CUTS = (0.6, 0.8, 0.9, 0.96)
"""Where a query's score is cut into levels: quantiles of the scores of all queries."""

KEY_RANK = 6
PAIR_RANK = 7
"""`FittedFeature.rank` of fitted features. A known class of words has a smaller rank, so it is preferred if it explains
as much."""

GRADES = 16
"""How many values a level can have: 0, 1/15, 2/15 … 1. So few are easy to read, and rounding errors vanish."""

_ELEMENTS_AT_ONCE = 2**21
"""The largest size of an array (entry, head)."""

_ROUNDING = 1e-5
"""Scores that differ by less than this share of their range may differ by rounding alone."""

_TINY = 1e-30
"""Instead of a divisor of 0."""


def describe_types(
    embeddings: Singles,
    occurrences: Integers,
    further_columns: Singles,
) -> Singles:
    """Return X, which describes each type, (type, DIMENSIONS + n); embeddings have a mean square length of 1 in it.

    Args:
        embeddings: (type, d): static embeddings.
        occurrences: (type,): how often each type is a key of a fitted row.
        further_columns: (type, n): such as classes of words. Their mean is subtracted, but they are not scaled.
    """
    # A type counts as the root of its occurrences.
    weights = np.sqrt(occurrences.astype(np.float64))[:, None]
    total = max(weights.sum(), _TINY)
    # Embeddings less their mean over the types that occur.
    centred = embeddings
    if occurrences.any():
        centred = embeddings - embeddings[occurrences > 0].mean(0)
    # Scaled to length 1, and centred again, at the weighted mean.
    lengths = np.linalg.norm(centred, axis=1, keepdims=True)
    unit = centred / np.maximum(lengths, _TINY)
    unit = unit - (unit * weights).sum(0) / total
    # Their weighted principal components, (type, DIMENSIONS); eigh returns the largest last.
    _, vectors = np.linalg.eigh((unit * weights).T @ unit)
    components = vectors[:, ::-1][:, :DIMENSIONS]
    x = unit @ components
    # If all keys are of one type, x is 0 but for rounding, and must not be divided by it.
    length = np.sqrt(float((weights * x**2).sum()) / total)
    if length > 1e-6:
        x /= length
    further_columns = further_columns - (further_columns * weights).sum(0) / total
    return np.concatenate([x, further_columns], 1).astype(np.float32)


def find_columns(
    rows: RowSample,
    offsets: NDArray[np.int32],
    x: Singles,
) -> tuple[tuple[FittedFeature, ...], ...]:
    """Fit scores to each head, and return them as features of that head alone: one of keys, and two of each pair.

    A pair U V has one feature where U is positive, and one where it is negative.

    Args:
        rows: The rows to fit, with the types of their tokens.
        offsets: (entry of the whole sample,): how far each key is behind its query, in tokens.
        x: (type, column), from `describe_types`.
    """
    if not rows.size:
        return ((),) * rows.n_heads
    # Some heads at a time, so that arrays of (entry, head) stay small.
    at_once = max(1, _ELEMENTS_AT_ONCE // rows.size)
    columns: list[tuple[FittedFeature, ...]] = []
    for start in range(0, rows.n_heads, at_once):
        heads = range(rows.n_heads)[start : start + at_once]
        columns += _Fit(rows, offsets, x, heads).columns()
    return tuple(columns)


class _Fit:
    """Fit some heads at once.

    An entry is a key of a row. A column is one of X. Most arrays have a number per head: (entry, head), (row, head),
    (type, head), or (head, column) for coefficients.
    """

    def __init__(
        self,
        rows: RowSample,
        offsets: NDArray[np.int32],
        x: Singles,
        heads: range,
    ) -> None:
        n_rows = len(rows.texts)
        self._rows = rows
        self._n_heads = len(heads)
        # Only types that occur in these rows are fitted. The scores of all others follow from their rows of X.
        self._x_of_all_types = x
        self._types = np.union1d(rows.key_types, rows.query_types)
        self._x = x[self._types]
        # Each entry's key, (entry,), and each row's query, (row,), as an index into these types.
        self._keys = np.searchsorted(self._types, rows.key_types)
        self._queries = np.searchsorted(self._types, rows.query_types)
        # The range of offsets that each entry is in, (entry,).
        self._buckets = np.searchsorted(OFFSET_EDGES, offsets[rows.entries], "right")
        # Sparse matrices of 0 and 1 that sum entries by key type, by offset and by row, and rows by query type.
        self._by_key = _summing_matrix(self._keys, len(self._types))
        self._by_query = _summing_matrix(self._queries, len(self._types))
        self._by_bucket = _summing_matrix(self._buckets, len(OFFSET_EDGES) + 1)
        self._by_row = _summing_matrix(rows.row_of, n_rows)
        # Attention B times the weight of its row, (entry, head). A head's row weights sum to 1.
        self._mean_weight = 1.0 / n_rows
        self._row_weights = rows.weights[list(heads)].T.astype(np.float32)
        attention = np.stack([rows.scaled(head) for head in heads], 1).astype(np.float32)
        self._weighted = attention * self._spread(self._row_weights)
        # The scores s start from 0, which is uniform attention.
        self._scores = np.zeros_like(self._weighted)
        # The two parts of K: coefficients of X, (head, column), and scores of each type alone, (type, head).
        self._key_coefficients = np.zeros((len(heads), x.shape[1]), np.float32)
        self._type_scores = np.zeros((len(self._types), len(heads)), np.float32)

    def columns(self) -> list[tuple[FittedFeature, ...]]:
        """Fit o, K and the pairs, and return the features of each head."""
        for _ in range(ROUNDS):
            self._fit_offsets()
            self._fit_keys()
        pairs = [self._fit_pair() for _ in range(N_PAIRS)]
        # K of all types, (type, head), less its mean over the keys of fitted rows.
        key_scores = self._x_of_all_types @ self._key_coefficients.T
        key_scores[self._types] += self._type_scores
        n_types = len(key_scores)
        n_keys = np.bincount(self._rows.key_types, minlength=n_types)
        n_queries = np.bincount(self._rows.query_types, minlength=n_types)
        key_scores -= (n_keys @ key_scores) / n_keys.sum()
        columns = []
        # Cut the scores into levels: K, then each pair where U is positive, and where it is negative.
        for head in range(self._n_heads):
            levels, values = quantise(key_scores[:, head], n_keys, KEY_CUTS)
            head_columns = [FittedFeature(KEY_RANK, values, levels)]
            for query_coefficients, key_coefficients in pairs:
                u = self._x_of_all_types @ query_coefficients[head]
                v = self._x_of_all_types @ key_coefficients[head]
                for sign in (1, -1):
                    positive = np.maximum(sign * u, 0)
                    query_levels, query_values = quantise(positive, n_queries, PAIR_CUTS)
                    levels, values = quantise(sign * v, n_keys, KEY_CUTS)
                    column = FittedFeature(PAIR_RANK, values, levels, query_values, query_levels)
                    head_columns.append(column)
            columns.append(tuple(head_columns))
        return columns

    def _spread(self, row_values: Singles) -> Singles:
        """Give each entry the values of its row: (row, head) to (entry, head)."""
        return np.repeat(row_values, self._rows.lengths, axis=0)

    def _errors(self) -> tuple[Singles, Singles]:
        """Return the errors r = B - p, and p, each times the weight of its row, (entry, head).

        This also subtracts each row's largest score from its scores, which leaves p as it is.
        """
        # Scores of at most 0 cannot overflow the exponential.
        largest = np.maximum.reduceat(self._scores, self._rows.starts[:-1], axis=0)
        self._scores -= self._spread(largest)
        p = np.exp(self._scores)
        row_sums = self._by_row @ p
        p *= self._spread(self._row_weights / row_sums)
        return self._weighted - p, p

    def _fit_offsets(self) -> None:
        """Add to the scores a Newton step for each range of offsets, at most 2 in size."""
        r, p = self._errors()
        gradient = self._by_bucket @ r
        # With a ridge of one row.
        curvature = self._by_bucket @ p + self._mean_weight
        step = np.clip(gradient / curvature, -2, 2)
        self._scores += np.take(step, self._buckets, axis=0)

    def _fit_keys(self) -> None:
        """Add to the scores a Newton step for K, at most 4 in size for each type."""
        # Gradient g and curvature h of the score of each type, (type, head).
        r, p = self._errors()
        gradient = self._by_key @ r
        curvature = self._by_key @ p
        # Solve for the scores of types alone, t, in terms of the change c of the other part, with the ridge l:
        # t = (g + h (t_before - c)) / (h + l). Put into the quadratic, this leaves for c the gradient
        # (g + h t_before) l / (h + l) and the curvature h l / (h + l).
        ridge = TYPE_RIDGE * self._mean_weight
        left_share = ridge / (curvature + ridge)
        left_gradient = (gradient + curvature * self._type_scores) * left_share
        left_curvature = curvature * left_share
        coefficients = self._newton_step(
            self._key_coefficients, left_gradient, left_curvature, KEY_RIDGE
        )
        change = self._x @ (coefficients - self._key_coefficients).T
        type_scores = (gradient + curvature * (self._type_scores - change)) / (curvature + ridge)
        step = np.clip(change + type_scores - self._type_scores, -4, 4)
        self._key_coefficients = coefficients
        self._type_scores = type_scores
        self._scores += np.take(step, self._keys, axis=0)

    def _newton_step(
        self,
        coefficients: Singles,
        gradients: Singles,
        curvatures: Singles,
        ridge_rows: float,
    ) -> Singles:
        """Return coefficients of X, (head, column), after a Newton step.

        Gradients and curvatures are of the scores of types, (type, head). The ridge is in units of a row's weight.
        """
        ridge = ridge_rows * self._mean_weight
        stepped = np.empty_like(coefficients)
        for head, current in enumerate(coefficients):
            # Second derivatives, (column, column), in float64: in float32 the ridge would be lost.
            second = ((self._x * curvatures[:, head, None]).T @ self._x).astype(np.float64)
            second[np.diag_indices_from(second)] += ridge
            gradient = self._x.T @ gradients[:, head] - ridge * current
            stepped[head] = current + np.linalg.solve(second, gradient)
        return stepped

    def _fit_pair(self) -> tuple[Singles, Singles]:
        """Fit one more pair, and return its coefficients of U and of V, (head, column) each.

        o and K are fitted again after each round.
        """
        # The score of the pair is u(query) v(key), (entry, head).
        query_coefficients, key_coefficients = self._start_pair()
        u = self._query_scores(query_coefficients)
        v = self._key_scores(key_coefficients)
        self._scores += u * v
        for _ in range(PAIR_ROUNDS):
            # Fit V.
            r, p = self._errors()
            gradients = self._by_key @ (r * u)
            curvatures = self._by_key @ (p * u**2)
            key_coefficients = self._newton_step(key_coefficients, gradients, curvatures, PAIR_RIDGE)
            new_v = self._key_scores(key_coefficients)
            self._scores += u * (new_v - v)
            v = new_v
            # Fit U: the curvature of a row is the variance of v within it.
            r, p = self._errors()
            row_gradients = self._by_row @ (r * v)
            means = self._by_row @ (p * v)
            squares = self._by_row @ (p * v**2)
            variances = squares - means**2 / np.maximum(self._row_weights, _TINY)
            gradients = self._by_query @ row_gradients
            curvatures = self._by_query @ variances
            query_coefficients = self._newton_step(query_coefficients, gradients, curvatures, PAIR_RIDGE)
            new_u = self._query_scores(query_coefficients)
            self._scores += (new_u - u) * v
            # Divide U by its standard deviation over queries, (head,), and multiply V by it.
            size = _deviation(self._x[self._queries] @ query_coefficients.T)
            query_coefficients = query_coefficients / size[:, None]
            key_coefficients = key_coefficients * size[:, None]
            u = new_u / size
            v = v * size
            self._fit_offsets()
            self._fit_keys()
        return query_coefficients, key_coefficients

    def _query_scores(self, coefficients: Singles) -> Singles:
        """Return u of each entry's query, (entry, head)."""
        return self._spread(np.take(self._x @ coefficients.T, self._queries, axis=0))

    def _key_scores(self, coefficients: Singles) -> Singles:
        """Return v of each entry's key, (entry, head)."""
        return np.take(self._x @ coefficients.T, self._keys, axis=0)

    def _start_pair(self) -> tuple[Singles, Singles]:
        """Return the coefficients of U and of V from which the fit of a pair starts, (head, column) each."""
        r, p = self._errors()
        x = self._x
        queries = x[self._queries]
        n_rows = len(queries)
        white_q = _whitening(queries.T @ queries / n_rows, ridge_share=0.02)
        curvature = self._by_key @ p
        query_coefficients = np.empty_like(self._key_coefficients)
        key_coefficients = np.empty_like(self._key_coefficients)
        for head in range(self._n_heads):
            # The sum of r x_q x_kᵀ, (column, column), from the errors as a sparse matrix (row, type).
            errors = sp.csr_array((r[:, head], self._keys, self._rows.starts), (n_rows, len(x)))
            products = queries.T @ (errors @ x)
            # Whitened on both sides, its largest singular vectors are the best pair.
            white_k = _whitening((x * curvature[:, head, None]).T @ x, ridge_share=0.05)
            lefts, singular_values, rights = np.linalg.svd(white_q.T @ products @ white_k)
            u = white_q @ lefts[:, 0]
            size = _deviation(queries @ u)
            query_coefficients[head] = u / size
            # Half of the Newton step: with the whole one U and V could overshoot together.
            key_coefficients[head] = white_k @ rights[0] * (singular_values[0] * size / 2)
        return query_coefficients, key_coefficients


def _summing_matrix(groups: Integers, n_groups: int) -> sp.csr_array:
    """Return the matrix that sums items by group, (group, item), from the group of each item, (item,)."""
    n = len(groups)
    return sp.csr_array((np.ones(n, np.float32), (groups, np.arange(n))), (n_groups, n))


def _deviation(scores: Singles) -> Singles:
    """Return the standard deviation of scores over queries, (query, …) to (…); 1 where it is 0 up to rounding."""
    deviation = scores.std(0)
    return np.where(deviation > 1e-4, deviation, np.float32(1.0))


def _whitening(second: NDArray[np.floating], ridge_share: float) -> Singles:
    """Return W with W Wᵀ = (S + ridge)⁻¹ for second moments S; the ridge is a share of the mean of S's diagonal."""
    n = len(second)
    ridge = max(ridge_share * float(np.trace(second)) / n, 1e-6)
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
    # Rounded to a grid: the level of scores that only rounding tells apart would depend on the machine.
    step = max(_ROUNDING * float(np.ptp(scores)), _TINY)
    rounded = np.rint(scores.astype(np.float64) / step) * step
    # np.quantile(np.repeat(rounded, occurrences), cuts), without repeating. In the sorted array the occurrences of a
    # type would stand at the positions `first` to `last`.
    order = np.argsort(rounded, kind="stable")
    order = order[occurrences[order] > 0]
    last = np.cumsum(occurrences[order]) - 1
    first = last - occurrences[order] + 1
    positions = np.stack([first, last], 1).ravel()
    edges = np.interp(np.array(cuts) * last[-1], positions, np.repeat(rounded[order], 2))
    # Half a step lower, so that a score at an edge is above it.
    edges = np.unique(edges) - step / 2
    levels = np.searchsorted(edges, rounded, "right").astype(np.uint8)
    # The mean score of the occurrences of each level, (level,); -inf if it has none.
    n_levels = len(edges) + 1
    counts = np.bincount(levels, occurrences, n_levels)
    sums = np.bincount(levels, occurrences * scores.astype(np.float64), n_levels)
    means = np.where(counts > 0, sums / np.maximum(counts, 1), -np.inf)
    # Never less than the level before, from which levels without occurrences take their mean; the first ones take it
    # from the first that has any.
    means = np.maximum.accumulate(means)
    means = np.maximum(means, means[np.isfinite(means)].min())
    # Scaled to 0 to 1, and rounded to the nearest of GRADES values.
    lowest = means.min()
    span = max(float(means.max() - lowest), _TINY)
    return levels, np.rint((GRADES - 1) * (means - lowest) / span) / (GRADES - 1)
