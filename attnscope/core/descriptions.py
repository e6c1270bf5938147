"""Fit a sparse, readable model to the rows of a head, and score it on other texts.

    p(k | q) ∝ exp( Σ_f w_f f(q, k) )        over the keys that q may attend to, few terms f out of a catalogue

    explained = 1 - Σ_t KL(A ‖ p) / Σ_t KL(A ‖ uniform)      over texts t that it was not fitted on

If every feature has values in [0, 1], the log likelihood of p under A needs only how much of each row lies on each
feature, E_A[f], and the row's entropy H. No row of weights is kept.

    KL(A_q ‖ p_q)       = -H_q - Σ_f w_f E_A[f] + ln Z_q,      Z_q = Σ_k exp(Σ_f w_f f(q, k))
    d KL / d w_f        = E_p[f] - E_A[f]
    d² KL / d w_f d w_g = Cov_p(f, g)

The loss is convex, and Newton's method finds its minimum (with a small ridge, because a head that is described
perfectly has none). Z_q and its derivatives need only how many keys of the row have each combination of the chosen
features' values. Those are counted once for a set of features, and an iteration costs rows times combinations.

Terms are chosen greedily, by what a candidate could gain at the current fit, with a = mean E_A[f], π = mean E_p[f]:

    gain(f) >= a ln(a / π) + (1 - a) ln((1 - a) / (1 - π))

(The gain along the line w_f is max_δ δa - mean_q ln E_p[exp(δ f)], and ln E_p exp(δf) <= ln(1 + E_p[f](exp(δ) - 1)) for
f in [0, 1]. That is concave in E_p[f], so the mean over rows goes inside; equal for 0/1 features that are equally
common in all rows.) The best are then refitted exactly, all terms together.

Each text weighs the same, and its sampled queries share its weight: the aim is what the head does in an unseen text,
not at a token of the longest one; and texts are the independent units.

Source: ours. Exponential families and their Newton steps: Barndorff-Nielsen 1978; choosing features greedily by their
gain: Della Pietra, Della Pietra & Lafferty 1997, Inducing Features of Random Fields, section 4.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from attnscope.core.intervals import predicted_interval
from attnscope.core.sampled_rows import Floats, Rows, Table
from attnscope.core.sums import RunningSums

MOST_TERMS = 4
LEAST_GAIN = 0.02
"""Share of the nats of the fitted texts that a term must add to stay."""

ENOUGH = 0.995
"""Share of those nats: once it is explained, the search ends."""

ALIKE = 0.02
"""Share of the largest gain within which candidates are alike, and the simplest of them is taken."""

REFITTED = 6
REFITTED_GRADED = 2
"""How many candidates are refitted: the best of all; and by another rule, of those with more than two values."""

FEWEST_TEXTS = 3
"""In how many of the fitted texts a feature must vary."""

TINY = 1e-9
"""Instead of 0, whose logarithm is not finite."""

RIDGE = 1e-4
"""The cost of a squared weight in a fit, in nats."""

LARGEST_WEIGHT = 16.0
LARGEST_STEP = 3.0
_ITERATIONS = 30
_CLOSE = 1e-7
_CLOSE_ENOUGH = 1e-4
_TIED = 1e-8
_HEADS_AT_ONCE = (
    12  # heads that share a product with all features; the tables of all of them are kept meanwhile
)


@dataclass(frozen=True, eq=False)
class Description:
    """The terms of a head.

    Attributes:
        terms: Numbers of the features, in the order in which they were chosen.
        weights: w of each, log odds for a feature that goes from 0 to 1.
        gains: Nats that each explained of the fitted texts when it was chosen.
        nats: KL(A ‖ uniform) of the fitted texts.
        first_weight: w of the first term alone; 0 = there is none.
    """

    terms: tuple[int, ...]
    weights: Floats
    gains: tuple[float, ...]
    nats: float
    first_weight: float = 0.0


@dataclass(frozen=True)
class Score:
    """How well a description holds on texts.

    Attributes:
        explained: Share of the nats from uniform that it explains; below 0 if it is worse than uniform; NaN if there
            are none.
        low: Lower end of its interval over texts; NaN where these texts cannot tell.
        high: Upper end, at most 1; NaN likewise.
        nats: The mean of KL(A ‖ uniform).
    """

    explained: float
    low: float
    high: float
    nats: float


# Find terms


def describe(
    rows: Rows,
    simplicity: Sequence[int],
    most: int = MOST_TERMS,
    candidates: Sequence[int] | None = None,
    most_own: int = 3,
) -> list[Description]:
    """Find the terms of every head.

    Args:
        rows: The rows to fit.
        simplicity: (feature,): the rank of each feature. Of candidates that are alike, the smallest rank is taken.
        most: How many terms at most.
        candidates: Which features may be terms; None = all.
        most_own: How many of the terms at most may be fitted to the head alone.

    Returns:
        One description per head, in their order.
    """
    # Only features that vary in enough texts may be terms.
    usable = rows.varies_in >= min(FEWEST_TEXTS, len(np.unique(rows.texts)))
    if candidates is not None:
        usable &= np.isin(np.arange(rows.n_shared), np.asarray(candidates))
    descriptions: list[Description] = []
    # Some heads at a time: their searches share one product with all features per round.
    for start in range(0, rows.n_heads, _HEADS_AT_ONCE):
        heads = range(start, min(start + _HEADS_AT_ONCE, rows.n_heads))
        searches = [_Search(rows, head, simplicity, most_own) for head in heads]
        while going := [search for search in searches if search.goes_on and len(search.terms) < most]:
            # One round: each search that is not done takes its next term.
            p = np.stack([search.unscaled() for search in going])  # (head, entry)
            expected = rows.means(p, rows.weights[[search.head for search in going]])
            for search, of_entries, of_features in zip(going, p, expected, strict=True):
                search.extend(of_features, of_entries, usable)
        descriptions += [search.description() for search in searches]
    return descriptions


class _Search:
    """The search for the terms of one head. Features are those that all heads share, then the head's own."""

    def __init__(self, rows: Rows, head: int, simplicity: Sequence[int], most_own: int) -> None:
        self.head = head
        self.terms: tuple[int, ...] = ()
        self._rows = rows
        self._most_own = most_own
        self._weights = np.zeros(0)
        self._gains: list[float] = []
        self._first_weight = 0.0
        self._nats = float(rows.mean_nats[head])
        self._left = self._nats
        self.goes_on = self._nats > 0
        # Features of the head alone: their values by entry, (own feature, entry).
        own = rows.own_features(head)
        columns = [rows.columns[head][number - rows.n_shared] for number in own]
        self._own_values = np.stack(
            [rows.by_entry(number, head) for number in own] or [np.zeros(rows.size)]
        )
        on_own = self._own_values @ rows.weighted(rows.attention[head].astype(np.float64), head)
        spread = [rows.variance(values) for values in self._own_values]
        n_own = len(own)
        # E_A[f] and the spread of all features, shared and own, (feature,).
        self._expected = np.append(rows.expected[head], on_own[:n_own])
        self._spread = np.append(rows.graded_variances, spread[:n_own])
        self._is_graded = np.append(rows.levels > 2, np.ones(n_own, np.bool_))
        self._simplicity = [*simplicity, *(column.rank for column in columns)]

    def unscaled(self) -> NDArray[np.float32]:
        """Return p of the terms so far, up to a factor of each row, (entry,)."""
        return self._rows.unscaled(self.terms, self._weights, self.head)

    def extend(self, expected: Floats, p: NDArray[np.float32], usable: NDArray[np.bool_]) -> None:
        """Take the next term, or end the search.

        Args:
            expected: (shared feature,): E_p[f] at the current fit.
            p: (entry,): the current fit, up to a factor of each row.
            usable: (shared feature,): which of these may be the term.
        """
        # E_p[f] of the head's own features, after those of the shared ones, (feature,).
        n_own = len(self._expected) - len(expected)
        on_own = self._own_values[:n_own] @ self._rows.weighted(p, self.head)
        # Which features may be the next term.
        has_room = sum(term >= len(expected) for term in self.terms) < self._most_own
        may_follow = np.append(usable, np.full(n_own, has_room))
        may_follow[list(self.terms)] = False
        # Refit with each of the best candidates in turn.
        least = LEAST_GAIN * self._nats
        tried = []
        for feature, step in self._candidates(np.append(expected, on_own), may_follow):
            start = np.append(self._weights, step)
            tried.append(
                (feature, *self._refit((*self.terms, feature), start, _CLOSE_ENOUGH * self._nats))
            )
        largest = self._left - min((left for *_, left in tried), default=math.inf)
        if largest < least:
            self.goes_on = False
            return
        # Of candidates that are alike the simplest, then the best; of ties by rounding, the one with the lowest number.
        alike = [trial for trial in tried if self._left - trial[2] >= max((1 - ALIKE) * largest, least)]
        simplest = min(self._simplicity[feature] for feature, *_ in alike)
        alike = [trial for trial in alike if self._simplicity[trial[0]] == simplest]
        best = min(left for *_, left in alike)
        feature, weights, _ = min(trial for trial in alike if trial[2] <= best + _TIED * self._nats)
        # Take it, and fit all terms together once more.
        if not self.terms:
            self._first_weight = float(weights[0])
        self.terms = (*self.terms, feature)
        self._weights, left = self._refit(self.terms, weights, _CLOSE)
        self._gains.append(self._left - left)
        self._left = left
        self.goes_on = left > (1 - ENOUGH) * self._nats

    def _candidates(self, pi: Floats, may_follow: NDArray[np.bool_]) -> list[tuple[int, float]]:
        """Return the features that could gain most, with the weight at which each would be gained."""
        # Gains of features of 0 and 1: the lower bound of the module's docstring.
        a = np.clip(self._expected, TINY, 1 - TINY)
        pi = np.clip(pi, TINY, 1 - TINY)
        gains = np.where(may_follow, least_gain(a, pi), -1.0)
        steps = np.log(a / pi) - np.log((1 - a) / (1 - pi))
        # A value that rises in steps varies less than one that is 0 or 1: how much less, uniform attention tells.
        # Its gain is that of a quadratic, Rao's score.
        graded_steps = (a - pi) / np.maximum(self._spread, TINY)
        graded = np.where(may_follow & self._is_graded, graded_steps * (a - pi) / 2, -1.0)
        steps = np.clip(np.where(self._is_graded, graded_steps, steps), -LARGEST_STEP, LARGEST_STEP)
        # The best by either rule, each with the weight to start from.
        best = np.argsort(-gains, kind="stable")[:REFITTED]
        best_graded = np.argsort(-graded, kind="stable")[:REFITTED_GRADED]
        chosen = [*best[gains[best] > 0].tolist(), *best_graded[graded[best_graded] > 0].tolist()]
        return [(feature, float(steps[feature])) for feature in dict.fromkeys(chosen)]

    def _refit(self, terms: tuple[int, ...], start: Floats, close: float) -> tuple[Floats, float]:
        table = self._rows.table(terms, self.head)
        return minimise(table, self._expected[list(terms)], self._rows, self.head, start, close)

    def description(self) -> Description:
        """Return the result of the search."""
        return Description(self.terms, self._weights, tuple(self._gains), self._nats, self._first_weight)


def least_gain(a: Floats, pi: Floats) -> Floats:
    """Return the lower bound on the gain of a feature, a ln(a / π) + (1 - a) ln((1 - a) / (1 - π)), in nats.

    `a` is the mean of E_A[f] and `pi` that of E_p[f], both 0 to 1, arrays of one shape. The result has the same shape.
    The module's docstring derives the bound.
    """
    a = np.clip(a, TINY, 1 - TINY)
    pi = np.clip(pi, TINY, 1 - TINY)
    return a * np.log(a / pi) + (1 - a) * np.log((1 - a) / (1 - pi))


def minimise(
    table: Table, expected: Floats, rows: Rows, head: int, weights: Floats, close: float
) -> tuple[Floats, float]:
    """Find the weights by Newton's method from some weights on, until a step gains less than `close`, in nats.

    The loss is the mean of ln Z - Σ w E_A[f] over rows, with the ridge. `expected` has the mean of E_A[f], (feature,).
    """
    row_weights = rows.weights[head]
    ridge = RIDGE * np.eye(len(weights))

    def loss(weights: Floats) -> tuple[float, Floats, Floats]:
        scores = table.values @ weights
        top = scores.max(initial=0.0)
        e = np.exp(scores - top)  # (combination,)
        z = table.counts @ e  # (row,)
        mean = row_weights @ np.log(z) + top - weights @ expected
        return float(mean + RIDGE / 2 * (weights @ weights)), e, z

    value, e, z = loss(weights)
    for _ in range(_ITERATIONS):
        # Gradient and second derivatives: means of features and their covariances under p, over all rows.
        means = table.counts @ (e[:, None] * table.values) / z[:, None]  # (row, feature)
        mass = e * (table.counts_by_combination @ (row_weights / z))  # (combination,)
        gradient = row_weights @ means - expected + RIDGE * weights
        second = (
            (table.values * mass[:, None]).T @ table.values
            - (means * row_weights[:, None]).T @ means
            + ridge
        )
        step = np.clip(np.linalg.solve(second, -gradient), -LARGEST_STEP, LARGEST_STEP)
        expected_gain = -float(gradient @ step) / 2
        if expected_gain < close:  # the loss is all but a quadratic here: it need not be looked at again
            weights = np.clip(weights + step, -LARGEST_WEIGHT, LARGEST_WEIGHT)
            value -= expected_gain
            break
        # Halve the step until the loss falls.
        size = 1.0
        while True:
            tried = np.clip(weights + size * step, -LARGEST_WEIGHT, LARGEST_WEIGHT)
            trial, *parts = loss(tried)
            if trial <= value or size < 1e-3:
                break
            size /= 2
        gained = value - trial
        if gained > 0:
            weights, value = tried, trial
            e, z = parts
        if gained < close:
            break
    entropy = float(row_weights @ rows.entropies[:, head])
    return weights, value - RIDGE / 2 * float(weights @ weights) - entropy


# Score descriptions


def score(rows: Rows, head: int, description: Description) -> tuple[Score, Floats]:
    """Return how well a description holds on rows; and KL(A ‖ p) of each row, (row,), in nats."""
    left = row_losses(rows, head, description)
    mass = rows.mass[:, head]
    return score_of_texts(rows.texts, left * mass, rows.uniform_nats[:, head] * mass, mass), left


def row_losses(rows: Rows, head: int, description: Description) -> Floats:
    """Return KL(A ‖ p) of each row of a head, (row,), in nats."""
    # KL(A ‖ p) = -H - Σ w E_A[f] + ln Z, of each row, (row,).
    log_sums = rows.table(description.terms, head).log_sums(description.weights)
    scores = rows.scores(description.terms, description.weights, head)
    losses: Floats = np.maximum(
        log_sums - rows.sums(rows.scaled(head) * scores) - rows.entropies[:, head], 0.0
    )
    return losses


def score_of_texts(
    texts: NDArray[np.int64], left: Floats, nats: Floats, mass: Floats | None = None
) -> Score:
    """Return the score of rows with its interval over texts, each of which has the same weight.

    The explained share is one minus a ratio of sums over texts (Cochran 1977, section 6.4). Its ends are those of
    `core.intervals.predicted_interval`; NaN where these texts cannot tell.

    Args:
        texts: (row,): the number of each row's text.
        left: (row,): KL(A ‖ p), or the part of it that counts.
        nats: (row,): KL(A ‖ uniform).
        mass: (row,): the share of the row's attention that both are about, 0 to 1; None = all of it.
    """
    if not len(texts):
        return Score(math.nan, math.nan, math.nan, math.nan)
    # Means over the rows of each text: then all texts weigh the same, (text,).
    _, text, counts = np.unique(texts, return_inverse=True, return_counts=True)
    sums = RunningSums(())
    nats_of_texts = np.bincount(text, nats) / counts
    sums.add(np.bincount(text, left) / counts, nats_of_texts)
    mean_mass = 1.0 if mass is None else float((np.bincount(text, mass) / counts).mean())
    low, high = predicted_interval(sums.sample(), mean_mass, len(counts))
    return Score(1 - float(sums.ratio()), float(low), float(high), float(nats_of_texts.mean()))
