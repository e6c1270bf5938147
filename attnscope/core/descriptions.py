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
features' values. These are counted once for a set of features, and an iteration costs rows times combinations.

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
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from attnscope.core.intervals import predicted_interval
from attnscope.core.sampled_rows import Floats, Integers, Rows, Table
from attnscope.core.sums import RunningSums

MOST_TERMS = 4
"""Terms of a description, unless a caller wants fewer."""

LEAST_GAIN = 0.02
"""Share of the nats of the fitted texts that a term must add to stay."""

ENOUGH = 0.995
"""Share of those nats: once it is explained, the search ends."""

ALIKE = 0.02
"""Share of the largest gain within which candidates are alike, and the simplest of them is taken."""

REFITTED = 6
"""How many candidates are refitted: those of the largest gain, if each feature had the values 0 and 1 alone."""

REFITTED_GRADED = 2
"""How many candidates with more than two values are refitted besides, by a rule for these."""

FEWEST_TEXTS = 3
"""In how many of the fitted texts a feature must vary."""

TINY = 1e-9
"""Instead of 0, whose logarithm is not finite."""

RIDGE = 1e-4
"""The cost of a squared weight in a fit, in nats."""

LARGEST_WEIGHT = 16.0
"""The largest weight of a term, log odds."""

LARGEST_STEP = 3.0
"""The largest change of a weight in one step of Newton's method."""

_ITERATIONS = 30
"""Most steps of Newton's method."""

_CLOSE = 1e-7
"""A fit ends with a step that gains less than this, in nats."""

_CLOSE_ENOUGH = 1e-4
"""A fit that only compares candidates ends with a step that gains less than this share of the head's nats."""

_TIED = 1e-8
"""Fits that differ by less than this share of the head's nats differ by rounding alone."""

_HEADS_AT_ONCE = 12
"""Heads that share a product with all features; the tables of all of them are kept meanwhile."""


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
        high: Upper end, at most 1; NaN where these texts cannot tell.
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
        # In each round a search takes its next term, until it is done.
        for _ in range(most):
            going = [search for search in searches if search.goes_on]
            if not going:
                break
            # (head, entry) and (head, feature).
            p = np.stack([search.unscaled() for search in going])
            expected = rows.means(p, rows.weights[[search.head for search in going]])
            for number, search in enumerate(going):
                search.extend(expected[number], p[number], usable)
        descriptions += [search.description() for search in searches]
    return descriptions


class _Trial(NamedTuple):
    """A fit of the terms so far and of one candidate.

    Attributes:
        feature: The candidate's number.
        weights: w of all these terms, the candidate's last.
        left: KL(A ‖ p) of the fit, in nats.
    """

    feature: int
    weights: Floats
    left: float


class _Search:
    """The search for the terms of one head. Features are those that all heads share, then the head's own."""

    def __init__(
        self,
        rows: Rows,
        head: int,
        simplicity: Sequence[int],
        most_own: int,
    ) -> None:
        self.head = head
        self.terms: tuple[int, ...] = ()
        self._rows = rows
        self._most_own = most_own
        self._weights = np.zeros(0)
        self._gains: list[float] = []
        self._first_weight = 0.0
        # KL(A ‖ uniform), and what the terms so far leave of it.
        self._nats = float(rows.mean_nats[head])
        self._left = self._nats
        self.goes_on = self._nats > 0
        # Features of the head alone: their values by entry, (own feature, entry).
        columns = rows.own_columns(head)
        self._n_own = len(columns)
        self._own_values = np.zeros((self._n_own, rows.size))
        for number in range(self._n_own):
            self._own_values[number] = rows.by_entry(rows.n_shared + number, head)
        # E_A[f] and the variance of all features, shared and own, (feature,).
        own_expected = self._own_means(rows.attention[head].astype(np.float64))
        own_variances = list(map(rows.variance, self._own_values))
        self._expected = np.append(rows.expected[head], own_expected)
        self._variances = np.append(rows.graded_variances, own_variances)
        self._is_graded = np.append(rows.levels > 2, np.ones(self._n_own, np.bool_))
        self._simplicity = [*simplicity, *(column.rank for column in columns)]

    def unscaled(self) -> NDArray[np.float32]:
        """Return p of the terms so far, up to a factor of each row, (entry,)."""
        return self._rows.unscaled(self.terms, self._weights, self.head)

    def _own_means(self, p: NDArray[np.floating]) -> Floats:
        """Return E_p[f] of the head's own features, (own feature,), of p up to a factor of each row, (entry,)."""
        means: Floats = self._own_values @ self._rows.weighted(p, self.head)
        return means

    def extend(
        self,
        expected: Floats,
        p: NDArray[np.float32],
        usable: NDArray[np.bool_],
    ) -> None:
        """Take the next term, or end the search.

        Args:
            expected: (shared feature,): E_p[f] at the current fit.
            p: (entry,): the current fit, up to a factor of each row.
            usable: (shared feature,): which of these may be the term.
        """
        # Which features may be the next term: those that are no term yet, and own ones while there is room for them.
        n_own_terms = sum(term >= len(expected) for term in self.terms)
        own_may_follow = np.full(self._n_own, n_own_terms < self._most_own)
        may_follow = np.append(usable, own_may_follow)
        may_follow[list(self.terms)] = False
        # Refit with each of the best candidates in turn.
        pi = np.append(expected, self._own_means(p))
        trials = []
        for feature, step in self._candidates(pi, may_follow):
            start = np.append(self._weights, step)
            fit = self._refit((*self.terms, feature), start, _CLOSE_ENOUGH * self._nats)
            trials.append(_Trial(feature, *fit))
        least_gain = LEAST_GAIN * self._nats
        largest_gain = self._left - min((trial.left for trial in trials), default=math.inf)
        if largest_gain < least_gain:
            self.goes_on = False
            return
        # Take it, and fit all terms together once more.
        taken = self._choose(trials, max((1 - ALIKE) * largest_gain, least_gain))
        if not self.terms:
            self._first_weight = float(taken.weights[0])
        self.terms = (*self.terms, taken.feature)
        self._weights, left = self._refit(self.terms, taken.weights, _CLOSE)
        self._gains.append(self._left - left)
        self._left = left
        self.goes_on = left > (1 - ENOUGH) * self._nats

    def _choose(self, trials: Sequence[_Trial], gain: float) -> _Trial:
        """Return the simplest of the trials with this gain or more; of equally simple ones the best.

        Of those that are tied up to rounding it is the one with the lowest number.
        """
        alike = [trial for trial in trials if self._left - trial.left >= gain]
        simplest = min(self._simplicity[trial.feature] for trial in alike)
        alike = [trial for trial in alike if self._simplicity[trial.feature] == simplest]
        least_left = min(trial.left for trial in alike)
        tied = [trial for trial in alike if trial.left <= least_left + _TIED * self._nats]
        return min(tied, key=lambda trial: trial.feature)

    def _candidates(self, pi: Floats, may_follow: NDArray[np.bool_]) -> list[tuple[int, float]]:
        """Return the features that could gain most, each with a weight to start its fit from.

        `pi` is the mean of E_p[f], (feature,), and `may_follow` says which features may be the next term, (feature,).
        """
        # Gains of features of 0 and 1, in nats: the lower bound of the module's docstring.
        a = np.clip(self._expected, TINY, 1 - TINY)
        pi = np.clip(pi, TINY, 1 - TINY)
        log_of_ones = np.log(a / pi)
        log_of_zeros = np.log((1 - a) / (1 - pi))
        gains = a * log_of_ones + (1 - a) * log_of_zeros
        gains[~may_follow] = -1.0
        steps = log_of_ones - log_of_zeros
        # A value that rises in steps varies less than one that is 0 or 1: how much less, uniform attention tells.
        # Its gain is that of a quadratic, Rao's score.
        graded_steps = (a - pi) / np.maximum(self._variances, TINY)
        graded_gains = graded_steps * (a - pi) / 2
        graded_gains[~(may_follow & self._is_graded)] = -1.0
        steps = np.where(self._is_graded, graded_steps, steps)
        steps = np.clip(steps, -LARGEST_STEP, LARGEST_STEP)
        # The best by either rule, each with the weight to start from.
        chosen = {}
        for rule_gains, n_best in ((gains, REFITTED), (graded_gains, REFITTED_GRADED)):
            for feature in np.argsort(-rule_gains, kind="stable")[:n_best].tolist():
                if rule_gains[feature] > 0:
                    chosen[feature] = float(steps[feature])
        return list(chosen.items())

    def _refit(
        self,
        terms: tuple[int, ...],
        start: Floats,
        close: float,
    ) -> tuple[Floats, float]:
        """Fit terms from some weights on: return w and what they leave of the nats; see `minimise`."""
        table = self._rows.table(terms, self.head)
        return minimise(table, self._expected[list(terms)], self._rows, self.head, start, close)

    def description(self) -> Description:
        """Return the result of the search."""
        return Description(self.terms, self._weights, tuple(self._gains), self._nats, self._first_weight)


def minimise(
    table: Table,
    expected: Floats,
    rows: Rows,
    head: int,
    weights: Floats,
    close: float,
) -> tuple[Floats, float]:
    """Find the weights by Newton's method from some weights on, until a step gains less than `close`, in nats.

    The loss is the mean of ln Z - Σ w E_A[f] over rows, with the ridge. `expected` has the mean of E_A[f], (feature,).

    Returns:
        The weights, (feature,), and the mean of KL(A ‖ p) over rows, in nats.
    """
    row_weights = rows.weights[head]
    ridge = RIDGE * np.eye(len(weights))

    def loss_of(weights: Floats) -> tuple[float, Floats, Floats]:
        """Return the loss; exp(Σ w f), (combination,), and Z, (row,), both divided by the largest exp."""
        scores = table.values @ weights
        top = scores.max(initial=0.0)
        e = np.exp(scores - top)
        z = table.counts @ e
        mean = row_weights @ np.log(z) + top - weights @ expected
        return float(mean + RIDGE / 2 * (weights @ weights)), e, z

    loss, e, z = loss_of(weights)
    for _ in range(_ITERATIONS):
        # Means of features under p, (row, feature), and the mass of each combination over all rows, (combination,).
        means = table.counts @ (e[:, None] * table.values) / z[:, None]
        mass = e * (table.counts_by_combination @ (row_weights / z))
        gradient = row_weights @ means - expected + RIDGE * weights
        # The second derivatives are the covariances of features under p.
        second = (table.values * mass[:, None]).T @ table.values
        second -= (means * row_weights[:, None]).T @ means
        second += ridge
        step = np.clip(np.linalg.solve(second, -gradient), -LARGEST_STEP, LARGEST_STEP)
        # Where little can be gained the loss is all but a quadratic, and need not be computed again.
        expected_gain = -float(gradient @ step) / 2
        if expected_gain < close:
            weights = np.clip(weights + step, -LARGEST_WEIGHT, LARGEST_WEIGHT)
            loss -= expected_gain
            break
        # Halve the step until the loss falls, ten times at most.
        for halvings in range(11):
            new_weights = np.clip(weights + 0.5**halvings * step, -LARGEST_WEIGHT, LARGEST_WEIGHT)
            new_loss, new_e, new_z = loss_of(new_weights)
            if new_loss <= loss:
                break
        gained = loss - new_loss
        if gained > 0:
            weights = new_weights
            loss = new_loss
            e = new_e
            z = new_z
        if gained < close:
            break
    entropy = float(row_weights @ rows.entropies[:, head])
    return weights, loss - RIDGE / 2 * float(weights @ weights) - entropy


# Score descriptions


def score(
    rows: Rows,
    head: int,
    description: Description,
) -> tuple[Score, Floats]:
    """Return how well a description holds on rows; and KL(A ‖ p) of each row, (row,), in nats."""
    left = row_losses(rows, head, description)
    mass = rows.mass[:, head]
    nats = rows.uniform_nats[:, head]
    return score_of_texts(rows.texts, left * mass, nats * mass, mass), left


def row_losses(
    rows: Rows,
    head: int,
    description: Description,
) -> Floats:
    """Return KL(A ‖ p) of each row of a head, (row,), in nats."""
    # KL(A ‖ p) = -H - Σ w E_A[f] + ln Z, of each row, (row,).
    log_sums = rows.table(description.terms, head).log_sums(description.weights)
    scores = rows.scores(description.terms, description.weights, head)
    expected = rows.sums(rows.scaled(head) * scores)
    losses: Floats = np.maximum(log_sums - expected - rows.entropies[:, head], 0.0)
    return losses


def score_of_texts(
    texts: Integers,
    left: Floats,
    nats: Floats,
    mass: Floats | None = None,
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
    text_nats = np.bincount(text, nats) / counts
    sums.add(np.bincount(text, left) / counts, text_nats)
    mean_mass = 1.0
    if mass is not None:
        mean_mass = float((np.bincount(text, mass) / counts).mean())
    low, high = predicted_interval(sums.sample(), mean_mass, len(counts))
    explained = 1 - float(sums.ratio())
    return Score(explained, float(low), float(high), float(text_nats.mean()))
