"""Which tokens a head looks for, found in its attention: a score per type of token, and pairs of such scores.

    s(q, k) = o(k - q) + K(type of k) + Σ_j U_j(type of q) V_j(type of k),      p(k | q) ∝ exp(s)

K, U and V are linear in a few columns X that describe types (such as their static embeddings), with a ridge. K has a
further score of its own per type, which a second ridge draws to 0: words that are frequent in the fitted rows may
differ from their embedding.

Each block is fitted in turn by a Newton step on the types' sums. With r = B - p and curvature p (an upper bound of
p(1 - p), so that steps do not overshoot), the gradient of a type is Σ r over its entries. A pair starts from the
largest singular value of the whitened mean of r x_q x_kᵀ.

Source: ours. The step is iteratively reweighted least squares (McCullagh & Nelder 1989, section 2.5); pairs are reduced
rank regression (Anderson 1951).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from attnscope.core.gates import GATED_RANK, screen_gates
from attnscope.core.sampled_rows import Column, Rows

Singles = NDArray[np.float32]

OFFSET_EDGES = np.array([-16, -8, -4, -3, -2, -1, 0, 1, 2, 3, 4, 8, 16])
"""Offsets at which the buckets of o begin, in tokens."""

DIMENSIONS = 96
"""Principal components of the embeddings that X keeps."""

RIDGES = {"keys": 0.5, "pairs": 3.0, "types": 8.0}
"""Weights of the ridges, in rows."""

N_PAIRS, ROUNDS, PAIR_ROUNDS = 2, 4, 2

KEY_CUTS = (0.05, 0.2, 0.4, 0.6, 0.8, 0.9, 0.96)
"""Shares of the fitted entries below which the levels of keys begin."""

PAIR_CUTS = (0.6, 0.8, 0.9, 0.96)
"""The same of either side of a pair."""

KEY_RANK, PAIR_RANK = 6, 7
"""How simple they are: known classes that explain as much come first."""

GRADES = 16
_AT_ONCE = 2**21


@dataclass(frozen=True, eq=False)
class Directions:
    """What one head looks for.

    Attributes:
        keys: (type,): K, centred on the fitted entries.
        pairs: U and V of each pair, (type,) each.
        gated: Known classes of queries and known features that say most beside K, see `gates.screen_gates`.
    """

    keys: Singles
    pairs: tuple[tuple[Singles, Singles], ...]
    gated: tuple[tuple[int, int], ...] = ()


def describe_types(embeddings: Singles, occurrences: NDArray[np.int64], more: Singles) -> Singles:
    """The columns X of types, scaled to a mean square length of 1.

    Args:
        embeddings: (type, d): static embeddings.
        occurrences: (type,): how often each is a key of a fitted row.
        more: (type, n): further columns, such as classes.
    """
    weights = np.sqrt(occurrences.astype(np.float64))[:, None]
    total = max(float(weights.sum()), 1e-30)
    # Types that are no key of a fitted row change nothing for the others.
    unit = embeddings - embeddings[occurrences > 0].mean(0) if total > 1e-30 else embeddings
    unit = unit / np.maximum(np.linalg.norm(unit, axis=1, keepdims=True), 1e-30)
    unit = unit - (unit * weights).sum(0) / total
    second = (unit * weights).T @ unit
    _, vectors = np.linalg.eigh(second)
    x = unit @ vectors[:, ::-1][:, :DIMENSIONS]
    length = np.sqrt(float((weights * x**2).sum()) / total)
    x /= length if length > 1e-6 else 1.0  # where all keys are of one type, rounding is all that is left
    return np.concatenate([x, more - (more * weights).sum(0) / total], 1).astype(np.float32)


def find_directions(
    part: Rows, offsets: NDArray[np.int32], x: Singles, candidates: Sequence[int] = ()
) -> list[Directions]:
    """What each head looks for.

    Args:
        part: The rows to fit; their types are known.
        offsets: (entry,): how far each key is behind its query, in tokens.
        x: (type, column): see `describe_types`.
        candidates: The known features to screen by the rows' gates, if these are known.
    """
    n_heads = part.n_heads
    if not part.size:
        return [Directions(np.zeros(len(x), np.float32), ())] * n_heads
    at_once = max(1, _AT_ONCE // max(1, part.size))
    fits = [
        _Fit(part, offsets, x, range(n_heads)[start : start + at_once], candidates)
        for start in range(0, n_heads, at_once)
    ]
    return [directions for fit in fits for directions in fit.run()]


class _Fit:
    """The fit of some heads at once; arrays begin with the head."""

    def __init__(
        self, part: Rows, offsets: NDArray[np.int32], x: Singles, heads: range, candidates: Sequence[int]
    ) -> None:
        self._part, self._heads, self._candidates = part, heads, candidates
        self._first, self._row_of = part.first, part.row_of
        keys, queries = part.key_types, part.query_types
        # Types that do not occur are left out of the fit, and get what their columns say.
        self._all, self._types = x, np.union1d(keys, queries)
        self._x = x[self._types]
        self._keys, self._queries = (np.searchsorted(self._types, of) for of in (keys, queries))
        self._buckets = np.searchsorted(OFFSET_EDGES, offsets[part.entries], "right")
        self._lam = 1.0 / max(1, len(part.texts))
        n_types, n_rows, n_buckets = len(self._types), len(part.texts), len(OFFSET_EDGES) + 1
        ones, entries = np.ones(part.size, np.float32), np.arange(part.size)
        self._by_key = sp.csr_matrix((ones, (self._keys, entries)), (n_types, part.size))
        self._by_bucket = sp.csr_matrix((ones, (self._buckets, entries)), (n_buckets, part.size))
        self._by_query = sp.csr_matrix((ones[:n_rows], (self._queries, np.arange(n_rows))), (n_types, n_rows))
        self._row_weights = part.weights[list(heads)].astype(np.float32)
        self._weighted = np.stack([part.scaled(head) for head in heads]).astype(np.float32)
        self._weighted *= self._row_weights[:, self._row_of]
        self._scores = np.zeros_like(self._weighted)
        self._offset = np.zeros((len(heads), n_buckets), np.float32)
        self._linear = np.zeros((len(heads), x.shape[1]), np.float32)
        self._own = np.zeros((len(heads), n_types), np.float32)

    def run(self) -> list[Directions]:
        """Fits all blocks."""
        for _ in range(ROUNDS):
            self._fit_offsets()
            self._fit_keys()
        gated: list[tuple[tuple[int, int], ...]] = [()] * len(self._heads)
        if len(self._part.gates):
            gated = screen_gates(self._part, self._heads, self._errors()[1], self._candidates)
        pairs = [self._fit_pair() for _ in range(N_PAIRS)]
        keys = self._linear @ self._all.T
        keys[:, self._types] += self._own
        occurrences = np.bincount(self._types[self._keys], minlength=len(self._all))
        keys -= (keys @ occurrences)[:, None] / max(1, occurrences.sum())
        directions = []
        for head, of_head in enumerate(keys):
            of_pairs = tuple((self._all @ u[head], self._all @ v[head]) for u, v in pairs)
            directions.append(Directions(of_head, of_pairs, gated[head]))
        return directions

    def _errors(self) -> tuple[Singles, Singles]:
        """The errors r = B - p, and p, each times what its row counts, (head, entry)."""
        top = np.maximum.reduceat(self._scores, self._first, axis=1)
        p = top[:, self._row_of]
        np.exp(np.subtract(self._scores, p, out=p), out=p)
        p *= (self._row_weights / np.add.reduceat(p, self._first, axis=1))[:, self._row_of]
        return self._weighted - p, p

    def _fit_offsets(self) -> None:
        r, p = self._errors()
        step = _sums(self._by_bucket, r) / (_sums(self._by_bucket, p) + self._lam)
        step = np.clip(step, -2, 2)
        self._offset += step
        self._scores += step[:, self._buckets]

    def _fit_keys(self) -> None:
        r, p = self._errors()
        g, h = _sums(self._by_key, r), _sums(self._by_key, p)
        # Types' own scores are eliminated: with a ridge l they leave h l / (h + l) of the curvature to the columns.
        lam = RIDGES["types"] * self._lam
        rest = lam / (h + lam)
        pull = (g + h * self._own) * rest
        linear = self._ridge(self._linear, pull, h * rest, RIDGES["keys"])
        moved = (linear - self._linear) @ self._x.T
        own = (g + h * (self._own - moved)) / (h + lam)
        step = np.clip(moved + own - self._own, -4, 4)
        self._linear, self._own = linear, own
        self._scores += step[:, self._keys]

    def _ridge(self, current: Singles, g: Singles, h: Singles, rows: float) -> Singles:
        """The columns' coefficients after a Newton step, from the sums of types: gradient and curvature."""
        ridged, lam = np.empty_like(current), rows * self._lam
        for head, coefficients in enumerate(current):
            second = ((self._x * h[head][:, None]).T @ self._x).astype(np.float64)  # the ridge is lost in float32
            second[np.diag_indices_from(second)] += lam
            ridged[head] = coefficients + np.linalg.solve(second, self._x.T @ g[head] - lam * coefficients)
        return ridged

    def _fit_pair(self) -> tuple[Singles, Singles]:
        """One more pair, (head, column) of either side; the other blocks are fitted again beside it."""
        left, right = self._start_pair()
        u, v = left @ self._x.T, right @ self._x.T
        self._scores += u[:, self._queries][:, self._row_of] * v[:, self._keys]
        for _ in range(PAIR_ROUNDS):
            r, p = self._errors()
            of_entry = u[:, self._queries][:, self._row_of]
            g, h = _sums(self._by_key, r * of_entry), _sums(self._by_key, p * of_entry**2)
            right = self._ridge(right, g, h, RIDGES["pairs"])
            new = right @ self._x.T
            self._scores += of_entry * (new - v)[:, self._keys]
            v = new
            r, p = self._errors()
            of_entry = v[:, self._keys]
            r, p, pp = (np.add.reduceat(a, self._first, axis=1) for a in (r * of_entry, p * of_entry, p * of_entry**2))
            spread = pp - p**2 / np.maximum(self._row_weights, 1e-30)
            left = self._ridge(left, _sums(self._by_query, r), _sums(self._by_query, spread), RIDGES["pairs"])
            new = left @ self._x.T
            self._scores += (new - u)[:, self._queries][:, self._row_of] * of_entry
            u = new
            size = _scale(u[:, self._queries])
            left, right, u, v = left / size, right * size, u / size, v * size
            self._fit_offsets()
            self._fit_keys()
        return left, right

    def _start_pair(self) -> tuple[Singles, Singles]:
        r, p = self._errors()
        x, n = self._x, self._x.shape[1]
        queries = x[self._queries]
        rows = len(queries)
        white_q = _whitening(queries.T @ queries / rows, 0.02)
        left, right = np.empty((len(r), n), np.float32), np.empty((len(r), n), np.float32)
        for head in range(len(r)):
            of_rows = sp.csr_matrix((r[head], self._keys, np.append(self._first, len(self._keys))), (rows, len(x))) @ x
            h = self._by_key @ p[head]
            white_k = _whitening((x * h[:, None]).T @ x, 0.05)
            a, sizes, b = np.linalg.svd(white_q.T @ (queries.T @ of_rows) @ white_k)
            u = white_q @ a[:, 0]
            size = _scale((queries @ u)[None])[0, 0]
            left[head], right[head] = u / size, white_k @ b[0] * (sizes[0] * size / 2)
        return left, right


def _scale(scores: Singles) -> Singles:
    """The spread of scores, (head, 1); 1 where all queries are alike, up to rounding, and there is nothing to scale."""
    spread: Singles = scores.std(1, keepdims=True)
    return np.where(spread > 1e-4, spread, np.float32(1.0))


def _sums(of: sp.csr_matrix, values: NDArray[np.floating]) -> Singles:
    """(head, group): sums of (head, entry) over the entries of each group."""
    sums: Singles = (of @ values.T).T
    return sums


def _whitening(second: NDArray[np.floating], share: float) -> Singles:
    n = len(second)
    second = second + np.eye(n, dtype=np.float32) * max(share * float(np.trace(second)) / n, 1e-6)
    return np.linalg.cholesky(np.linalg.inv(second)).astype(np.float32)


def columns_of(directions: Directions, part: Rows) -> tuple[Column, ...]:
    """The features of what a head looks for: the keys, the upper and lower ends of each pair, and known pairs."""
    keys = np.bincount(part.key_types, minlength=len(directions.keys))
    queries = np.bincount(part.query_types, minlength=len(directions.keys))
    levels, values = quantise(directions.keys, keys, KEY_CUTS)
    columns = [Column(values, KEY_RANK, levels, n_key_levels=len(values))]
    for u, v in directions.pairs:
        for sign in (1.0, -1.0):
            of_queries, query_values = quantise(np.maximum(sign * u, 0).astype(np.float32), queries, PAIR_CUTS)
            of_keys, key_values = quantise(sign * v, keys, KEY_CUTS)
            both = np.outer(query_values, key_values).ravel()
            columns.append(Column(both, PAIR_RANK, of_keys, of_queries, n_key_levels=len(key_values)))
    for gate, feature in directions.gated:
        values = np.append(part.values_of(feature, 0), 0.0)  # the last level is that of queries outside the gate
        columns.append(Column(values, GATED_RANK, gate=gate, gated=feature))
    return tuple(columns)


_SAME = 1e-5
"""Share of the range of scores by which rounding may move one."""


def _edges_of(scores: Singles, occurrences: NDArray[np.int64], cuts: tuple[float, ...]) -> NDArray[np.float64]:
    """Where the levels of some scores begin, except the first: quantiles of their occurrences, each once.

    Scores that only rounding tells apart are on one side of an edge: else the level would depend on the machine.
    """
    if not occurrences.any():
        return np.empty(0)
    step = max(_SAME * float(np.ptp(scores)), 1e-30)
    rounded = np.rint(scores.astype(np.float64) / step) * step
    order = np.argsort(rounded, kind="stable")
    last = np.cumsum(occurrences[order]) - 1  # the place of each type's last occurrence, were all sorted
    at = np.array(cuts) * last[-1]
    share = at - np.floor(at)
    below, above = (rounded[order[np.searchsorted(last, np.minimum(np.floor(at) + n, last[-1]))]] for n in (0, 1))
    edges = np.where(share < 0.5, below + (above - below) * share, above - (above - below) * (1 - share))
    return np.unique(edges) - step / 2  # as np.quantile rounds


def quantise(
    scores: Singles, occurrences: NDArray[np.int64], cuts: tuple[float, ...]
) -> tuple[NDArray[np.uint8], NDArray[np.float64]]:
    """Levels of types by quantiles, (type,), and each level's value: its mean score, 0 to 1.

    Args:
        scores: (type,).
        occurrences: (type,): how often each counts.
        cuts: Shares of all occurrences.
    """
    if not occurrences.any():
        return np.zeros(len(scores), np.uint8), np.zeros(1)
    edges = _edges_of(scores, occurrences, cuts)
    levels = np.searchsorted(edges, scores, "right").astype(np.uint8)
    counts = np.bincount(levels, occurrences, len(edges) + 1)
    means = np.bincount(levels, occurrences * scores.astype(np.float64), len(edges) + 1) / np.maximum(counts, 1)
    means = np.maximum.accumulate(np.where(counts > 0, means, -np.inf))
    means = np.where(np.isfinite(means), means, means[np.isfinite(means)].min())
    spread = max(float(means.max() - means.min()), 1e-30)
    values = np.rint((GRADES - 1) * (means - means.min()) / spread) / (GRADES - 1)
    return levels, values


GATE_RANK, MATCH_RANK = 9, 8
_GATE_ROUNDS = 4


def gate_columns(part: Rows, x: Singles, resting: int) -> list[Column]:
    """From which queries each head rests more: resting keys, and the more so the higher the score of a query's type.

    Scores are a logistic regression of the mass on resting keys, linear in X.

    Args:
        part: The rows to fit.
        x: (type, column): see `describe_types`.
        resting: The number of the feature that resting keys have.
    """
    types, of_rows = np.unique(part.query_types, return_inverse=True)
    fitted = x[types]
    occurrences = np.bincount(part.query_types, minlength=len(x))
    flags, lam = part.features[resting], RIDGES["pairs"] / max(1, len(part.texts))
    columns = []
    for head in range(part.n_heads):
        rests = np.add.reduceat(part.scaled(head) * flags, part.first)
        rests = np.clip(rests, 1e-4, 1 - 1e-4)
        mean = float(np.average(rests, weights=part.text_weights))
        start, coefficients = np.log(mean / (1 - mean)), np.zeros(x.shape[1])
        for _ in range(_GATE_ROUNDS):
            p = 1 / (1 + np.exp(-start - (fitted @ coefficients)[of_rows]))
            g = np.bincount(of_rows, part.text_weights * (rests - p))
            h = np.bincount(of_rows, part.text_weights * np.maximum(p * (1 - p), 0.02))
            second = (fitted * h[:, None]).T @ fitted
            second[np.diag_indices_from(second)] += lam
            coefficients += np.linalg.solve(second, fitted.T @ g - lam * coefficients)
            start += float(np.sum(part.text_weights * (rests - p)) / np.sum(h))
        levels, values = quantise((x @ coefficients).astype(np.float32), occurrences, KEY_CUTS)
        on_resting = np.outer(values, [0.0, 1.0]).ravel()
        columns.append(Column(on_resting, GATE_RANK, queries=levels, key_feature=resting))
    return columns


def match_column(matches: NDArray[np.float64], fitted: NDArray[np.int64], resting: int) -> Column:
    """Resting keys, the more so the less there is to attend to.

    Args:
        matches: (row,): the logarithm of the mean of exp(s) over the keys that are not resting.
        fitted: Which rows are fitted.
        resting: The number of the feature that resting keys have.
    """
    scores, occurrences = -matches.astype(np.float32), np.bincount(fitted, minlength=len(matches))
    levels, values = quantise(scores, occurrences, KEY_CUTS)
    on_resting = np.outer(values, [0.0, 1.0]).ravel()
    edges = _edges_of(scores, occurrences, KEY_CUTS)
    return Column(on_resting, MATCH_RANK, rows=levels, row_edges=edges, key_feature=resting)
