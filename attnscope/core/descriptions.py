"""Fit a sparse log-linear model to sampled rows of a head's attention, and score it on other texts.

    p(k | q) ∝ exp( Σ_f w_f f(q, k) )        over the keys k that q may attend to

    explained = 1 - Σ_t KL(A ‖ p) / Σ_t KL(A ‖ uniform)      over texts t that it was not fitted on

A is the observed attention of a query (a *row*), and p the model of it. A *feature* f(q, k) in [0, 1] is a readable
property of a query and a key, such as being the same token. A *term* is one of the few features that describe a head.
The loss and its derivatives are

    KL(A_q ‖ p_q)       = -H_q - Σ_f w_f E_A[f] + ln Z_q,      Z_q = Σ_k exp(Σ_f w_f f(q, k))
    d KL / d w_f        = E_p[f] - E_A[f]
    d² KL / d w_f d w_g = Cov_p(f, g)

So A enters only by its entropy H_q and its means E_A[f]. Z_q and its derivatives need only the number of keys that have
each combination of the terms' values. These numbers are counted once for a set of terms. Then an iteration costs rows
times combinations. The loss is convex, and Newton's method finds its minimum. A small ridge penalty keeps the weights w
finite if terms describe a head perfectly.

Terms are chosen greedily. With a = mean of E_A[f] and π = mean of E_p[f] over rows, adding f to the fit p lowers the
loss by

    gain(f) >= a ln(a / π) + (1 - a) ln((1 - a) / (1 - π))      nats

Proof: if w_f changes by δ, the loss falls by δa - mean_q ln E_p[exp(δ f)]. For f in [0, 1], ln E_p[exp(δ f)] is at most
ln(1 + E_p[f] (exp(δ) - 1)). This is concave in E_p[f], so its mean over rows is at most its value at π. The bound is
the maximum over δ. It is exact for binary features with the same frequency in all rows. The candidates with the largest
bounds are then fitted together with the terms so far, and the best of these fits is taken.

All texts weigh the same, and the sampled queries of a text share its weight, because texts are the independent units: a
description predicts what the head does in a new text.

Source: ours. Exponential families and their Newton steps: Barndorff-Nielsen 1978; choosing features greedily by their
gain: Della Pietra, Della Pietra & Lafferty 1997, Inducing Features of Random Fields, section 4.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from attnscope.arrays import Floats, Integers
from attnscope.core.intervals import predicted_interval
from attnscope.core.sampled_rows import LevelCounts, RowSample
from attnscope.core.sums import RunningSums

MAX_TERMS = 4
"""The most terms of a description, unless a caller passes a smaller number."""

# "The head's nats" below are KL(A ‖ uniform), averaged over the fitted texts: the loss without any term.

MIN_GAIN = 0.02
"""A term must explain at least this share of the head's nats."""

ENOUGH_EXPLAINED = 0.995
"""The search for terms ends once this share of the head's nats is explained."""

_FIT_TOLERANCE = 1e-4
"""A fit that only serves to compare candidates stops after a step that lowers the loss by less than this share of the
head's nats."""

_TIE_TOLERANCE = 1e-8
"""Losses that differ by less than this share of the head's nats are ties: they differ only by rounding."""

# Candidates

GAIN_TOLERANCE = 0.02
"""Candidates whose gains are within this share of the largest gain count as equally good. The simplest of them is
chosen."""

N_BINARY_CANDIDATES = 6
"""How many candidates are fitted by the first rule: those with the largest gain if features were binary."""

N_GRADED_CANDIDATES = 2
"""How many candidates with more than two values are also fitted, by the second rule: those with the largest gain by a
quadratic."""

MIN_TEXTS = 3
"""The fewest fitted texts in which a feature must vary to become a term."""

# Fits

MIN_DIVISOR = 1e-9
"""Means and variances below this are raised to it, because the logarithm of 0 and division by 0 are not finite."""

RIDGE = 1e-4
"""The ridge penalty of a fit: half of this times the sum of squared weights, in nats."""

MAX_WEIGHT = 16.0
"""The largest absolute weight of a term, in log odds."""

MAX_STEP = 3.0
"""The largest change of a weight in one step of Newton's method."""

_MAX_ITERATIONS = 30
"""The most Newton steps of a fit."""

_TOLERANCE = 1e-7
"""The final fit stops after a step that lowers the loss by less than this, in nats."""

_HEADS_AT_ONCE = 12
"""How many heads share a matrix product with all features. More heads would need more memory, for tables of counts."""


@dataclass(frozen=True, eq=False)
class Description:
    """Hold the terms of a head, and their weights.

    Attributes:
        terms: The features, as indices into the features of the `RowSample`, in the order in which they were chosen.
        weights: w of each term, (term,): the log odds of a key with f = 1 against a key with f = 0.
        gains: How far each term lowered KL(A ‖ p) of the fitted texts when it was added, in nats.
        nats: KL(A ‖ uniform) of the fitted texts.
        first_weight: w of the first term when it was the only one; 0 if there are no terms.
    """

    terms: tuple[int, ...]
    weights: Floats
    gains: tuple[float, ...]
    nats: float
    first_weight: float = 0.0


@dataclass(frozen=True)
class DescriptionScore:
    """Hold how well a description predicts a head's attention on texts.

    Attributes:
        explained: 1 - KL(A ‖ p) / KL(A ‖ uniform), at most 1; below 0 if p is worse than uniform; NaN without rows.
        low: Lower end of the 95% interval of `explained`; NaN if the texts are too few or too different for one.
        high: Upper end of the interval, at most 1; NaN if `low` is.
        nats: KL(A ‖ uniform), averaged over texts.
    """

    explained: float
    low: float
    high: float
    nats: float


# Find terms


def find_terms(
    rows: RowSample,
    simplicity: Sequence[int],
    max_terms: int = MAX_TERMS,
    candidates: Sequence[int] | None = None,
    max_own_terms: int = 3,
) -> list[Description]:
    """Find the terms of every head, and fit their weights.

    Features are numbered: first the features that all heads share, then the head's *own* features, which belong to this
    head only (`RowSample.columns`).

    Args:
        rows: The rows to fit.
        simplicity: (shared feature,): the rank of each feature. Of equally good candidates, the one with the lowest
            rank is chosen.
        max_terms: How many terms a head may have.
        candidates: Which of the shared features may be terms, as indices; None = all.
        max_own_terms: How many of the terms may be features of the head's own.

    Returns:
        One description per head, in their order.
    """
    # Only features that vary in enough texts may be terms, (shared feature,) bool.
    usable = rows.n_varying_texts >= min(MIN_TEXTS, len(np.unique(rows.texts)))
    if candidates is not None:
        usable &= np.isin(np.arange(rows.n_shared), candidates)
    descriptions: list[Description] = []
    # Search the terms of some heads at a time, because these share one matrix product with all features per round.
    for start in range(0, rows.n_heads, _HEADS_AT_ONCE):
        heads = range(start, min(start + _HEADS_AT_ONCE, rows.n_heads))
        searches = [_Search(rows, head, simplicity, max_own_terms) for head in heads]
        # In each round, every search that is not done adds a term.
        for _ in range(max_terms):
            active = [search for search in searches if not search.is_done]
            if not active:
                break
            # p of each head, (head, entry), and the mean of E_p[f], (head, shared feature). `unscaled` gives p up to a
            # factor per row, which `means` divides out.
            p = np.stack([search.unscaled() for search in active])
            expected = rows.means(p, rows.weights[[search.head for search in active]])
            for index, search in enumerate(active):
                search.add_term(expected[index], p[index], usable)
        descriptions += [search.description() for search in searches]
    return descriptions


class _Trial(NamedTuple):
    """Hold the fit of the terms so far together with one candidate.

    Attributes:
        feature: Index of the candidate.
        weights: w of the terms so far, then w of the candidate, (term,).
        kl: KL(A ‖ p) of the fit, in nats.
    """

    feature: int
    weights: Floats
    kl: float


class _Search:
    """Search the terms of one head, one at a time.

    Arrays (feature,) have the features that all heads share, then the head's own.
    """

    def __init__(
        self,
        rows: RowSample,
        head: int,
        simplicity: Sequence[int],
        max_own_terms: int,
    ) -> None:
        self.head = head
        self.terms: tuple[int, ...] = ()
        self._rows = rows
        self._most_own = max_own_terms
        self._weights = np.zeros(0)
        self._gains: list[float] = []
        self._first_weight = 0.0
        # KL(A ‖ uniform), and KL(A ‖ p) of the fit so far, both averaged over rows. Uniform attention needs no terms,
        # so its search is done.
        self._nats = float(rows.mean_nats[head])
        self._kl = self._nats
        self.is_done = not self._nats > 0
        # The values of the head's own features, (own feature, entry). An *entry* is a key of a sampled row.
        columns = rows.own_columns(head)
        n_own = len(columns)
        self._own_values = np.zeros((n_own, rows.size))
        for index in range(n_own):
            self._own_values[index] = rows.by_entry(rows.n_shared + index, head)
        # E_A[f] of all features, shared and own, and their variance under uniform attention, (feature,) each.
        own_expected = self._own_means(rows.attention[head].astype(np.float64))
        own_variances = list(map(rows.variance, self._own_values))
        self._expected = np.append(rows.expected[head], own_expected)
        self._variances = np.append(rows.graded_variances, own_variances)
        self._is_graded = np.append(rows.levels > 2, np.ones(n_own, np.bool_))
        self._simplicity = [*simplicity, *(column.rank for column in columns)]

    def unscaled(self) -> NDArray[np.float32]:
        """Return p of the terms so far, up to a factor per row, (entry,)."""
        return self._rows.unnormalised_probabilities(self.terms, self._weights, self.head)

    def _own_means(self, p: NDArray[np.floating]) -> Floats:
        """Return the mean of E_p[f] of the head's own features, (own feature,); p is given up to a factor per row."""
        means: Floats = self._own_values @ self._rows.weight_rows(p, self.head)
        return means

    def add_term(
        self,
        expected: Floats,
        p: NDArray[np.float32],
        usable: NDArray[np.bool_],
    ) -> None:
        """Add the next term and fit all of them, or end the search if no candidate gains enough.

        Args:
            expected: (shared feature,): the mean of E_p[f] at the current fit.
            p: (entry,): the current fit, up to a factor per row.
            usable: (shared feature,): which shared features may be terms.
        """
        # A feature that is a term already is no candidate. The head's own features are candidates only while fewer than
        # `max_own_terms` of them are terms.
        n_own_terms = sum(term >= len(expected) for term in self.terms)
        own_may_follow = np.full(len(self._own_values), n_own_terms < self._most_own)
        may_follow = np.append(usable, own_may_follow)
        may_follow[list(self.terms)] = False
        # Fit the terms together with each of the best candidates in turn.
        pi = np.append(expected, self._own_means(p))
        trials = []
        for feature, weight in self._candidates(pi, may_follow).items():
            start = np.append(self._weights, weight)
            weights, kl = self._fit((*self.terms, feature), start, _FIT_TOLERANCE * self._nats)
            trials.append(_Trial(feature, weights, kl))
        min_gain = MIN_GAIN * self._nats
        largest_gain = self._kl - min((trial.kl for trial in trials), default=math.inf)
        if largest_gain < min_gain:
            self.is_done = True
            return
        # Add the chosen candidate, and fit all terms with the final tolerance.
        chosen = self._choose(trials, max((1 - GAIN_TOLERANCE) * largest_gain, min_gain))
        if not self.terms:
            self._first_weight = float(chosen.weights[0])
        self.terms = (*self.terms, chosen.feature)
        self._weights, kl = self._fit(self.terms, chosen.weights, _TOLERANCE)
        self._gains.append(self._kl - kl)
        self._kl = kl
        self.is_done = not kl > (1 - ENOUGH_EXPLAINED) * self._nats

    def _choose(self, trials: Sequence[_Trial], min_gain: float) -> _Trial:
        """Return the best of the simplest trials that gain enough. Of tied trials, the one of the first feature."""
        good = [trial for trial in trials if self._kl - trial.kl >= min_gain]
        rank = min(self._simplicity[trial.feature] for trial in good)
        simplest = [trial for trial in good if self._simplicity[trial.feature] == rank]
        min_kl = min(trial.kl for trial in simplest)
        # Rounding must not decide between equal trials, so trials within it count as tied.
        tied = [trial for trial in simplest if trial.kl <= min_kl + _TIE_TOLERANCE * self._nats]
        return min(tied, key=lambda trial: trial.feature)

    def _candidates(self, pi: Floats, may_follow: NDArray[np.bool_]) -> dict[int, float]:
        """Return the candidates to fit: index of the feature -> the weight from which to start its fit.

        `pi` is the mean of E_p[f], (feature,), and `may_follow` says which features may be the next term, (feature,).
        """
        # First rule, for binary features: the lower bound of the gain in the module's docstring, and the weight at
        # which it is reached.
        a = np.clip(self._expected, MIN_DIVISOR, 1 - MIN_DIVISOR)
        pi = np.clip(pi, MIN_DIVISOR, 1 - MIN_DIVISOR)
        log_of_ones = np.log(a / pi)
        log_of_zeros = np.log((1 - a) / (1 - pi))
        gains = a * log_of_ones + (1 - a) * log_of_zeros
        gains[~may_follow] = -1.0
        steps = log_of_ones - log_of_zeros
        # Second rule, for graded features: they have values between 0 and 1, so they vary less than the bound assumes.
        # The maximum of a quadratic, with their variance under uniform attention, is closer to the gain (Rao's score).
        graded_steps = (a - pi) / np.maximum(self._variances, MIN_DIVISOR)
        graded_gains = graded_steps * (a - pi) / 2
        graded_gains[~(may_follow & self._is_graded)] = -1.0
        steps = np.where(self._is_graded, graded_steps, steps)
        steps = np.clip(steps, -MAX_STEP, MAX_STEP)
        # Take the best candidates by either rule.
        best = {}
        for rule_gains, n_best in ((gains, N_BINARY_CANDIDATES), (graded_gains, N_GRADED_CANDIDATES)):
            for feature in np.argsort(-rule_gains, kind="stable")[:n_best].tolist():
                if rule_gains[feature] > 0:
                    best[feature] = float(steps[feature])
        return best

    def _fit(
        self,
        terms: tuple[int, ...],
        start: Floats,
        tolerance: float,
    ) -> tuple[Floats, float]:
        """Return the fitted weights w of terms, and KL(A ‖ p) in nats; `start` is where the fit starts."""
        table = self._rows.table(terms, self.head)
        return fit_weights(table, self._expected[list(terms)], self._rows, self.head, start, tolerance)

    def description(self) -> Description:
        """Return the terms that were found, and their weights."""
        return Description(self.terms, self._weights, tuple(self._gains), self._nats, self._first_weight)


def fit_weights(
    table: LevelCounts,
    expected: Floats,
    rows: RowSample,
    head: int,
    weights: Floats,
    tolerance: float,
) -> tuple[Floats, float]:
    """Find the weights of terms that minimise KL(A ‖ p), by Newton's method.

    The loss is the mean of ln Z - Σ w E_A[f] over rows, plus the ridge.

    Args:
        table: How many keys of each row have each combination of the terms' values.
        expected: (term,): the mean of E_A[f] over rows.
        rows: The rows that were counted in `table`.
        head: The head whose attention A is.
        weights: (term,): the weights to start from.
        tolerance: The search stops after a step that lowers the loss by less than this, in nats.

    Returns:
        The weights, (term,), and the mean of KL(A ‖ p) over rows, in nats.
    """
    row_weights = rows.weights[head]
    ridge = RIDGE * np.eye(len(weights))

    def loss_of(weights: Floats) -> tuple[float, Floats, Floats]:
        """Return the loss; exp(Σ w f) of each combination, (combination,); and Z, (row,).

        The last two are divided by the largest exponential, so that none overflows.
        """
        scores = table.values @ weights
        top = scores.max(initial=0.0)
        e = np.exp(scores - top)
        z = table.counts @ e
        mean = row_weights @ np.log(z) + top - weights @ expected
        return float(mean + RIDGE / 2 * (weights @ weights)), e, z

    loss, e, z = loss_of(weights)
    for _ in range(_MAX_ITERATIONS):
        # E_p[f] of each row, (row, term); and the sum of p over all keys of a combination, weighted by rows,
        # (combination,).
        means = table.counts @ (e[:, None] * table.values) / z[:, None]
        mass = e * (table.counts_by_combination @ (row_weights / z))
        gradient = row_weights @ means - expected + RIDGE * weights
        # The second derivatives are the covariances of features under p: E_p[f g] - E_p[f] E_p[g], averaged over rows.
        hessian = (table.values * mass[:, None]).T @ table.values
        hessian -= (means * row_weights[:, None]).T @ means
        hessian += ridge
        step = np.clip(np.linalg.solve(hessian, -gradient), -MAX_STEP, MAX_STEP)
        # Near the minimum the loss is a quadratic, so the gain of the last step is known without computing the loss.
        predicted_gain = -float(gradient @ step) / 2
        if predicted_gain < tolerance:
            weights = np.clip(weights + step, -MAX_WEIGHT, MAX_WEIGHT)
            loss -= predicted_gain
            break
        # Halve the step until the loss falls, ten times at most.
        for halvings in range(11):
            new_weights = np.clip(weights + 0.5**halvings * step, -MAX_WEIGHT, MAX_WEIGHT)
            new_loss, new_e, new_z = loss_of(new_weights)
            if new_loss <= loss:
                break
        gain = loss - new_loss
        if gain > 0:
            weights = new_weights
            loss = new_loss
            e = new_e
            z = new_z
        if gain < tolerance:
            break
    # Without the ridge, the loss is the mean of KL(A ‖ p) + H over rows.
    entropy = float(row_weights @ rows.entropies[:, head])
    return weights, loss - RIDGE / 2 * float(weights @ weights) - entropy


# Score descriptions


def score_description(
    rows: RowSample,
    head: int,
    description: Description,
) -> tuple[DescriptionScore, Floats]:
    """Return how well a description predicts the rows of a head, and KL(A ‖ p) of each row, (row,), in nats.

    A row is weighted by its mass: the share of the query's attention that is on the keys of the row.
    """
    losses = compute_row_losses(rows, head, description)
    mass = rows.mass[:, head]
    nats = rows.uniform_nats[:, head]
    return score_texts(rows.texts, losses * mass, nats * mass, mass), losses


def compute_row_losses(
    rows: RowSample,
    head: int,
    description: Description,
) -> Floats:
    """Return KL(A ‖ p) of each row of a head, (row,), in nats."""
    # -H - Σ w E_A[f] + ln Z of each row, (row,); `expected` is Σ w E_A[f].
    log_sums = rows.table(description.terms, head).log_sums(description.weights)
    scores = rows.scores(description.terms, description.weights, head)
    expected = rows.sums(rows.normalise_rows(head) * scores)
    losses: Floats = np.maximum(log_sums - expected - rows.entropies[:, head], 0.0)
    return losses


def score_texts(
    texts: Integers,
    losses: Floats,
    nats: Floats,
    mass: Floats | None = None,
) -> DescriptionScore:
    """Return the score of a description on rows, with its interval over texts. All texts weigh the same.

    The explained share is 1 minus a ratio of sums over texts (Cochran 1977, section 6.4). Its interval is
    `core.intervals.predicted_interval`, or NaN if the texts are too few or too different.

    Args:
        texts: (row,): the text of each row, by number.
        losses: (row,): KL(A ‖ p), times the row's mass.
        nats: (row,): KL(A ‖ uniform), times the row's mass.
        mass: (row,): the share of the query's attention that is on the keys of the row, 0 to 1; None = 1 for all rows.
    """
    if not len(texts):
        return DescriptionScore(math.nan, math.nan, math.nan, math.nan)
    # Average over the rows of each text, (text,), so that all texts weigh the same.
    _, text_index, n_rows = np.unique(texts, return_inverse=True, return_counts=True)
    sums = RunningSums(())
    text_nats = np.bincount(text_index, nats) / n_rows
    sums.add(np.bincount(text_index, losses) / n_rows, text_nats)
    mean_mass = 1.0
    if mass is not None:
        mean_mass = float((np.bincount(text_index, mass) / n_rows).mean())
    low, high = predicted_interval(sums.sample(), mean_mass, len(n_rows))
    explained = 1 - float(sums.ratio())
    return DescriptionScore(explained, float(low), float(high), float(text_nats.mean()))
