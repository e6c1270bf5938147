"""Fit a model of a head's attention that scores the types of query and key: which tokens does the head look for?

    p(k | q) ∝ exp(s(q, k)),      s(q, k) = o(k - q) + K(type of k) + Σ_j U_j(type of q) V_j(type of k)

A *type* is an entry of the vocabulary. o is a score of the offset k - q, and K a score of the key's type. A *pair*
U_j V_j is a score of the query's type times a score of the key's type.

K, U and V are linear in X, a matrix that describes each type by a few *columns*, such as principal components of its
static embedding. A ridge penalty keeps the coefficients small. K also has a free score per type, with a ridge penalty
of its own, for types whose embedding predicts their score badly.

o, K, U and V are fitted in turn, by one Newton step each. B is the observed attention, p the fitted one, and r = B - p.
The gradient of a type's score is the sum of r over all keys of that type. Its curvature is the sum of p. That is an
upper bound, because the second derivative is p(1 - p), so steps do not overshoot. A pair starts from the largest
singular value of the whitened mean of r x_q x_kᵀ, where x_q and x_k are the rows of X of query and key.

The scores are then cut into levels, which become the head's own features in `core.descriptions`.

Source: ours. The step is iteratively reweighted least squares (McCullagh & Nelder 1989, section 2.5); pairs are reduced
rank regression (Anderson 1951).
"""

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from attnscope.arrays import Floats, Integers, Levels
from attnscope.core.sampled_rows import FittedFeature, RowSample

Float32Array = NDArray[np.float32]

OFFSET_EDGES = np.array([-16, -8, -4, -3, -2, -1, 0, 1, 2, 3, 4, 8, 16])
"""The first offset k - q of each bucket of o but the lowest, in tokens. All offsets of a bucket share one score."""

N_COMPONENTS = 96
"""How many principal components of the embeddings are columns of X."""

KEY_RIDGE = 0.5
"""The ridge penalty of K's coefficients. The unit of the three ridges is the mean weight of a row, 1 / n_rows."""

PAIR_RIDGE = 3.0
"""The ridge penalty of the coefficients of U and V."""

TYPE_RIDGE = 8.0
"""The ridge penalty of K's free scores of types."""

N_PAIRS = 2
"""How many pairs U_j V_j are fitted to a head."""

N_ROUNDS = 4
"""How often o and then K are fitted before the first pair."""

N_PAIR_ROUNDS = 2
"""How often V and then U are fitted in each pair."""

KEY_QUANTILES = (0.05, 0.2, 0.4, 0.6, 0.8, 0.9, 0.96)
"""The quantiles at which the scores of keys are cut into levels, over all keys of the fitted rows."""

QUERY_QUANTILES = (0.6, 0.8, 0.9, 0.96)
"""The quantiles at which the scores of queries are cut into levels, over all queries of the fitted rows."""

KEY_RANK = 6
PAIR_RANK = 7
"""The simplicity ranks (`FittedFeature.rank`) of fitted features. Of features that explain equally much, the one with
the smallest rank is chosen. Known classes of words have smaller ranks than these."""

N_LEVEL_VALUES = 16
"""Values of levels are rounded to one of 16: 0, 1/15, 2/15 … 1. That is easy to read, and removes rounding errors."""

_ELEMENTS_AT_ONCE = 2**21
"""The most elements of an array (entry, head)."""

_ROUNDING = 1e-5
"""Scores that differ by less than this share of their range may differ by rounding alone."""

_MIN_DIVISOR = 1e-30
"""Replaces a divisor of 0."""


def describe_types(
    embeddings: Float32Array,
    occurrences: Integers,
    further_columns: Float32Array,
) -> Float32Array:
    """Return X, which describes each type, (type, N_COMPONENTS + n).

    Its first columns are principal components of the embeddings, scaled to a mean square length of 1 over types.

    Args:
        embeddings: (type, d): static embeddings.
        occurrences: (type,): how often each type is a key of a fitted row.
        further_columns: (type, n): other properties, such as classes of words. They are centred, but not scaled.
    """
    # All means over types are weighted by the square root of the type's occurrences.
    weights = np.sqrt(occurrences.astype(np.float64))[:, None]
    total = max(weights.sum(), _MIN_DIVISOR)
    # Centre the embeddings at the mean of the types that occur.
    centred = embeddings
    if occurrences.any():
        centred = embeddings - embeddings[occurrences > 0].mean(0)
    # Scale them to length 1, and centre them again, at the weighted mean.
    lengths = np.linalg.norm(centred, axis=1, keepdims=True)
    unit = centred / np.maximum(lengths, _MIN_DIVISOR)
    unit = unit - (unit * weights).sum(0) / total
    # Take weighted principal components, (type, N_COMPONENTS). eigh returns the largest last.
    _, vectors = np.linalg.eigh((unit * weights).T @ unit)
    components = vectors[:, ::-1][:, :N_COMPONENTS]
    x = unit @ components
    # If all keys are of one type, x is 0 up to rounding, and must not be scaled up.
    length = np.sqrt(float((weights * x**2).sum()) / total)
    if length > 1e-6:
        x /= length
    further_columns = further_columns - (further_columns * weights).sum(0) / total
    return np.concatenate([x, further_columns], 1).astype(np.float32)


def fit_features(
    rows: RowSample,
    offsets: NDArray[np.int32],
    x: Float32Array,
) -> tuple[tuple[FittedFeature, ...], ...]:
    """Fit the scores of each head, and return them as features of that head: one for K, and two for each pair.

    The features of a pair U V are the product where U is positive, and the product where U is negative.

    Args:
        rows: The rows to fit, with the types of their tokens.
        offsets: The offset k - q of each entry, in tokens. Its axis has all entries of the sample that `rows` was taken
            from; `rows.entries` indexes it.
        x: X, (type, column), from `describe_types`.
    """
    if not rows.size:
        return ((),) * rows.n_heads
    # Fit some heads at a time, so that arrays (entry, head) stay small.
    at_once = max(1, _ELEMENTS_AT_ONCE // rows.size)
    columns: list[tuple[FittedFeature, ...]] = []
    for start in range(0, rows.n_heads, at_once):
        heads = range(rows.n_heads)[start : start + at_once]
        columns += _Fit(rows, offsets, x, heads).columns()
    return tuple(columns)


class _Fit:
    """Fit the scores of a range of heads at once.

    A *row* is a sampled query, and an *entry* one of the keys that it may attend to. A *column* is a column of X. The
    last axis of most arrays is the head: (entry, head), (row, head), (type, head). Coefficients are (head, column).
    """

    def __init__(
        self,
        rows: RowSample,
        offsets: NDArray[np.int32],
        x: Float32Array,
        heads: range,
    ) -> None:
        n_rows = len(rows.texts)
        self._rows = rows
        self._n_heads = len(heads)
        # Fit only the types that occur in these rows. The scores of other types follow from their rows of X.
        self._x_of_all_types = x
        self._types = np.union1d(rows.key_types, rows.query_types)
        self._x = x[self._types]
        # Each entry's key, (entry,), and each row's query, (row,), as an index into these types.
        self._keys = np.searchsorted(self._types, rows.key_types)
        self._queries = np.searchsorted(self._types, rows.query_types)
        # The bucket of each entry's offset, (entry,).
        self._buckets = np.searchsorted(OFFSET_EDGES, offsets[rows.entries], "right")
        # Sparse 0/1 matrices that sum entries by the key's type, by bucket and by row, and rows by the query's type.
        self._by_key = _summing_matrix(self._keys, len(self._types))
        self._by_query = _summing_matrix(self._queries, len(self._types))
        self._by_bucket = _summing_matrix(self._buckets, len(OFFSET_EDGES) + 1)
        self._by_row = _summing_matrix(rows.row_of_entry, n_rows)
        # Observed attention B times the weight of its row, (entry, head). `scaled` returns rows that sum to 1, and the
        # row weights of a head sum to 1.
        self._mean_weight = 1.0 / n_rows
        self._row_weights = rows.weights[list(heads)].T.astype(np.float32)
        attention = np.stack([rows.normalise_rows(head) for head in heads], 1).astype(np.float32)
        self._weighted = attention * self._spread(self._row_weights)
        # The scores s start from 0, which is uniform attention.
        self._scores = np.zeros_like(self._weighted)
        # The two parts of K: coefficients of X, (head, column), and free scores of types, (type, head).
        self._key_coefficients = np.zeros((len(heads), x.shape[1]), np.float32)
        self._type_scores = np.zeros((len(self._types), len(heads)), np.float32)

    def columns(self) -> list[tuple[FittedFeature, ...]]:
        """Fit o, K and the pairs, and return the features of each head."""
        for _ in range(N_ROUNDS):
            self._fit_offsets()
            self._fit_keys()
        pairs = [self._fit_pair() for _ in range(N_PAIRS)]
        # K of all types, (type, head), minus its mean over the keys of the fitted rows.
        key_scores = self._x_of_all_types @ self._key_coefficients.T
        key_scores[self._types] += self._type_scores
        n_types = len(key_scores)
        n_keys = np.bincount(self._rows.key_types, minlength=n_types)
        n_queries = np.bincount(self._rows.query_types, minlength=n_types)
        key_scores -= (n_keys @ key_scores) / n_keys.sum()
        columns = []
        # Cut the scores into levels: K first, then each pair where U is positive, and where it is negative. The second
        # feature has -U and -V, whose product is U V again.
        for head in range(self._n_heads):
            levels, values = quantise(key_scores[:, head], n_keys, KEY_QUANTILES)
            head_columns = [FittedFeature(KEY_RANK, values, levels)]
            for query_coefficients, key_coefficients in pairs:
                u = self._x_of_all_types @ query_coefficients[head]
                v = self._x_of_all_types @ key_coefficients[head]
                for sign in (1, -1):
                    positive = np.maximum(sign * u, 0)
                    query_levels, query_values = quantise(positive, n_queries, QUERY_QUANTILES)
                    levels, values = quantise(sign * v, n_keys, KEY_QUANTILES)
                    column = FittedFeature(PAIR_RANK, values, levels, query_values, query_levels)
                    head_columns.append(column)
            columns.append(tuple(head_columns))
        return columns

    def _spread(self, row_values: Float32Array) -> Float32Array:
        """Repeat the values of each row for its entries: (row, head) to (entry, head)."""
        return np.repeat(row_values, self._rows.lengths, axis=0)

    def _errors(self) -> tuple[Float32Array, Float32Array]:
        """Return the errors r = B - p, and p, each times the weight of its row, (entry, head)."""
        # Subtract each row's largest score from its scores, for good. p stays the same, because it is normalised per
        # row, and the exponential of scores of at most 0 cannot overflow.
        largest = np.maximum.reduceat(self._scores, self._rows.starts[:-1], axis=0)
        self._scores -= self._spread(largest)
        p = np.exp(self._scores)
        row_sums = self._by_row @ p
        p *= self._spread(self._row_weights / row_sums)
        return self._weighted - p, p

    def _fit_offsets(self) -> None:
        """Add a Newton step for o to the scores, clipped to ±2 for each bucket."""
        r, p = self._errors()
        gradient = self._by_bucket @ r
        # A ridge of one row's weight.
        curvature = self._by_bucket @ p + self._mean_weight
        step = np.clip(gradient / curvature, -2, 2)
        self._scores += np.take(step, self._buckets, axis=0)

    def _fit_keys(self) -> None:
        """Add a Newton step for K to the scores, clipped to ±4 for each type."""
        # Gradient g and curvature h of the score of each type, (type, head).
        r, p = self._errors()
        gradient = self._by_key @ r
        curvature = self._by_key @ p
        # K has two parts, free scores t and the scores from X. Both change in one step, so t is eliminated first. If
        # the scores from X change by c, the best t is (g + h (t_old - c)) / (h + ridge). With this t, the loss as a
        # function of c alone has the gradient (g + h t_old) ridge / (h + ridge) and the curvature
        # h ridge / (h + ridge).
        ridge = TYPE_RIDGE * self._mean_weight
        reduction = ridge / (curvature + ridge)
        reduced_gradient = (gradient + curvature * self._type_scores) * reduction
        reduced_curvature = curvature * reduction
        coefficients = self._newton_step(
            self._key_coefficients, reduced_gradient, reduced_curvature, KEY_RIDGE
        )
        change = self._x @ (coefficients - self._key_coefficients).T
        type_scores = (gradient + curvature * (self._type_scores - change)) / (curvature + ridge)
        step = np.clip(change + type_scores - self._type_scores, -4, 4)
        self._key_coefficients = coefficients
        self._type_scores = type_scores
        self._scores += np.take(step, self._keys, axis=0)

    def _newton_step(
        self,
        coefficients: Float32Array,
        gradients: Float32Array,
        curvatures: Float32Array,
        ridge_rows: float,
    ) -> Float32Array:
        """Return coefficients of X, (head, column), after a Newton step.

        Gradients and curvatures are with respect to the scores of types, (type, head).
        """
        ridge = ridge_rows * self._mean_weight
        stepped = np.empty_like(coefficients)
        for head, current in enumerate(coefficients):
            # Second derivatives, (column, column), in float64, because float32 would lose the ridge.
            second = ((self._x * curvatures[:, head, None]).T @ self._x).astype(np.float64)
            second[np.diag_indices_from(second)] += ridge
            gradient = self._x.T @ gradients[:, head] - ridge * current
            stepped[head] = current + np.linalg.solve(second, gradient)
        return stepped

    def _fit_pair(self) -> tuple[Float32Array, Float32Array]:
        """Fit one more pair, and return its coefficients of U and of V, (head, column) each.

        o and K are fitted again after each round, because they depend on the pair.
        """
        # u is U of the entry's query, v is V of its key, both (entry, head). The pair adds u v to the score.
        query_coefficients, key_coefficients = self._start_pair()
        u = self._query_scores(query_coefficients)
        v = self._key_scores(key_coefficients)
        self._scores += u * v
        for _ in range(N_PAIR_ROUNDS):
            # Fit V.
            r, p = self._errors()
            gradients = self._by_key @ (r * u)
            curvatures = self._by_key @ (p * u**2)
            key_coefficients = self._newton_step(key_coefficients, gradients, curvatures, PAIR_RIDGE)
            new_v = self._key_scores(key_coefficients)
            self._scores += u * (new_v - v)
            v = new_v
            # Fit U. The curvature with respect to u of a row is the variance of v over its keys, times the row's weight
            # w. p includes that weight, so it sums to w, and the variance is Σ p v² - (Σ p v)² / w.
            r, p = self._errors()
            row_gradients = self._by_row @ (r * v)
            means = self._by_row @ (p * v)
            squares = self._by_row @ (p * v**2)
            variances = squares - means**2 / np.maximum(self._row_weights, _MIN_DIVISOR)
            gradients = self._by_query @ row_gradients
            curvatures = self._by_query @ variances
            query_coefficients = self._newton_step(query_coefficients, gradients, curvatures, PAIR_RIDGE)
            new_u = self._query_scores(query_coefficients)
            self._scores += (new_u - u) * v
            # Only the product U V matters. Scale U to a standard deviation of 1 over queries, (head,), and V inversely.
            size = _standard_deviation(self._x[self._queries] @ query_coefficients.T)
            query_coefficients = query_coefficients / size[:, None]
            key_coefficients = key_coefficients * size[:, None]
            u = new_u / size
            v = v * size
            self._fit_offsets()
            self._fit_keys()
        return query_coefficients, key_coefficients

    def _query_scores(self, coefficients: Float32Array) -> Float32Array:
        """Return u of each entry's query, (entry, head)."""
        return self._spread(np.take(self._x @ coefficients.T, self._queries, axis=0))

    def _key_scores(self, coefficients: Float32Array) -> Float32Array:
        """Return v of each entry's key, (entry, head)."""
        return np.take(self._x @ coefficients.T, self._keys, axis=0)

    def _start_pair(self) -> tuple[Float32Array, Float32Array]:
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
            # The sum of r x_q x_kᵀ, (column, column). The errors are a sparse matrix (row, type of the key).
            errors = sp.csr_array((r[:, head], self._keys, self._rows.starts), (n_rows, len(x)))
            products = queries.T @ (errors @ x)
            # To second order, the best U and V are the leading singular vectors of this sum, whitened on both sides.
            white_k = _whitening((x * curvature[:, head, None]).T @ x, ridge_share=0.05)
            lefts, singular_values, rights = np.linalg.svd(white_q.T @ products @ white_k)
            u = white_q @ lefts[:, 0]
            size = _standard_deviation(queries @ u)
            query_coefficients[head] = u / size
            # Half of the Newton step, because with all of it U and V together could overshoot. U was divided by `size`,
            # so V is multiplied by it.
            key_coefficients[head] = white_k @ rights[0] * (singular_values[0] * size / 2)
        return query_coefficients, key_coefficients


def _summing_matrix(groups: Integers, n_groups: int) -> sp.csr_array:
    """Return the sparse 0/1 matrix that sums items by group, (group, item). `groups` is the group of each, (item,)."""
    n = len(groups)
    return sp.csr_array((np.ones(n, np.float32), (groups, np.arange(n))), (n_groups, n))


def _standard_deviation(scores: Float32Array) -> Float32Array:
    """Return the standard deviation of scores over queries, (query, …) to (…); 1 where it is 0 up to rounding."""
    deviation = scores.std(0)
    return np.where(deviation > 1e-4, deviation, np.float32(1.0))


def _whitening(second: NDArray[np.floating], ridge_share: float) -> Float32Array:
    """Return W with W Wᵀ = (S + ridge I)⁻¹ for second moments S, (column, column).

    The ridge is the given share of the mean of S's diagonal.
    """
    n = len(second)
    ridge = max(ridge_share * float(np.trace(second)) / n, 1e-6)
    second = second + ridge * np.eye(n, dtype=np.float32)
    return np.linalg.cholesky(np.linalg.inv(second)).astype(np.float32)


# Levels


def quantise(
    scores: Float32Array,
    occurrences: Integers,
    cuts: tuple[float, ...],
) -> tuple[Levels, Floats]:
    """Cut scores of types into levels, at quantiles.

    Args:
        scores: (type,): the score of each type.
        occurrences: (type,): how often each type occurs; its weight in quantiles and means.
        cuts: The quantiles, 0 to 1.

    Returns:
        The level of each type, (type,); and the value of each level, 0 to 1, (level,): its mean score, scaled.
    """
    # Round scores to a grid. Otherwise the levels of nearly equal scores would depend on the machine's rounding.
    step = max(_ROUNDING * float(np.ptp(scores)), _MIN_DIVISOR)
    rounded = np.rint(scores.astype(np.float64) / step) * step
    # The edges are np.quantile(np.repeat(rounded, occurrences), cuts), computed without repeating. In the sorted
    # repeated array, a type would be at the positions `first` to `last`. Interpolating between these gives the
    # quantiles.
    order = np.argsort(rounded, kind="stable")
    order = order[occurrences[order] > 0]
    last = np.cumsum(occurrences[order]) - 1
    first = last - occurrences[order] + 1
    positions = np.stack([first, last], 1).ravel()
    edges = np.interp(np.array(cuts) * last[-1], positions, np.repeat(rounded[order], 2))
    # Move edges down by half a grid step, so that a score equal to an edge is above it.
    edges = np.unique(edges) - step / 2
    levels = np.searchsorted(edges, rounded, "right").astype(np.uint8)
    # The weighted mean score of each level, (level,); -inf if no type of the level occurs.
    n_levels = len(edges) + 1
    counts = np.bincount(levels, occurrences, n_levels)
    sums = np.bincount(levels, occurrences * scores.astype(np.float64), n_levels)
    means = np.where(counts > 0, sums / np.maximum(counts, 1), -np.inf)
    # An empty level takes the mean of the previous level; leading empty levels take that of the first non-empty one.
    # The maximum also keeps means ascending in spite of rounding.
    means = np.maximum.accumulate(means)
    means = np.maximum(means, means[np.isfinite(means)].min())
    # Scale to 0 to 1, and round to the nearest of N_LEVEL_VALUES values.
    lowest = means.min()
    span = max(float(means.max() - lowest), _MIN_DIVISOR)
    return levels, np.rint((N_LEVEL_VALUES - 1) * (means - lowest) / span) / (N_LEVEL_VALUES - 1)
