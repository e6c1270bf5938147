"""Fit a sparse log-linear model to sampled rows of a head's attention, and score it on other texts.

    p(k | q) ∝ exp( Σ_f w_f f(q, k) )        over the keys k that q may attend to

    explained = 1 - Σ_t KL(A ‖ p) / Σ_t KL(A ‖ uniform)      over texts t that it was not fitted on

A *feature* f(q, k) in [0, 1] says something readable about a query and a key, such as that they are the same token. A
*term* is one of the few features that describe a head. The loss and its derivatives are

    KL(A_q ‖ p_q)       = -H_q - Σ_f w_f E_A[f] + ln Z_q,      Z_q = Σ_k exp(Σ_f w_f f(q, k))
    d KL / d w_f        = E_p[f] - E_A[f]
    d² KL / d w_f d w_g = Cov_p(f, g)

So the weights A of a row enter through its entropy H_q and the means E_A[f] alone. Z_q and its derivatives need only
how many keys of the row have each combination of the terms' values. These are counted once for a set of terms, and an
iteration costs rows times combinations. The loss is convex, and Newton's method finds its minimum; a small ridge keeps
the weights w finite where terms describe a head perfectly.

Terms are chosen greedily. With a = mean of E_A[f] and π = mean of E_p[f] over rows, adding f to the fit p gains

    gain(f) >= a ln(a / π) + (1 - a) ln((1 - a) / (1 - π))      nats

Proof: if w_f changes by δ, the loss falls by δa - mean_q ln E_p[exp(δ f)]. For f in [0, 1], ln E_p[exp(δ f)] is at most
ln(1 + E_p[f] (exp(δ) - 1)). That is concave in E_p[f], so its mean over rows is at most its value at π; the bound is
the maximum over δ. It is exact for features of 0 and 1 that are equally common in all rows. The candidates with the
largest bounds are then fitted together with the terms so far, and the best of these fits is taken.

Each text weighs the same, and its sampled queries share its weight: texts are the independent units, and a description
is of what the head does in an unseen text.

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
from attnscope.core.sampled_rows import Floats, Integers, LevelCounts, RowSample
from attnscope.core.sums import RunningSums

MAX_TERMS = 4
"""How many terms a description has at most, unless a caller wants fewer."""

# Shares of the head's nats: of KL(A ‖ uniform), averaged over the fitted texts.

MIN_GAIN = 0.02
"""A term must explain at least this share of the head's nats."""

ENOUGH = 0.995
"""The search for terms ends once this share of the head's nats is explained."""

_FIT_TOLERANCE = 1e-4
"""A fit that only compares candidates ends with a step that gains less than this share of the head's nats."""

_TIE_TOLERANCE = 1e-8
"""Fits that differ by less than this share of the head's nats differ by rounding alone."""

# Candidates

ALIKE = 0.02
"""Candidates whose gains are within this share of the largest gain count as equally good: the simplest is taken."""

BEST_BINARY = 6
"""How many candidates are fitted: those with the largest gain as if all features had the values 0 and 1 alone."""

BEST_GRADED = 2
"""How many candidates with more than two values are fitted too: those with the largest gain by a quadratic."""

MIN_TEXTS = 3
"""In how many of the fitted texts a feature must vary."""

# Fits

TINY = 1e-9
"""The least value of a mean or variance, because logarithms and quotients of 0 are not finite."""

RIDGE = 1e-4
"""The cost of a squared weight in a fit, in nats."""

LARGEST_WEIGHT = 16.0
"""The largest weight of a term, log odds."""

LARGEST_STEP = 3.0
"""The largest change of a weight in one step of Newton's method."""

_ITERATIONS = 30
"""How many steps of Newton's method a fit takes at most."""

_TOLERANCE = 1e-7
"""A final fit ends with a step that gains less than this, in nats."""

_HEADS_AT_ONCE = 12
"""How many heads share a matrix product with all features. More would need more memory, for their count tables."""


@dataclass(frozen=True, eq=False)
class Description:
    """Hold the terms of a head, and their weights.

    Attributes:
        terms: The features, as indices into those of `RowSample`, in the order in which they were chosen.
        weights: w of each term, (term,): the log odds of a key with f = 1 against one with f = 0.
        gains: By how many nats each term lowered KL(A ‖ p) of the fitted texts when it was added.
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
    """Say how well a description predicts a head's attention on texts.

    Attributes:
        explained: 1 - KL(A ‖ p) / KL(A ‖ uniform), at most 1; below 0 if p is worse than uniform; NaN without rows.
        low: Lower end of its interval over texts; NaN if these texts are too few or too different to tell.
        high: Upper end, at most 1; NaN likewise.
        nats: KL(A ‖ uniform), averaged over texts.
    """

    explained: float
    low: float
    high: float
    nats: float


# Find terms


def describe(
    rows: RowSample,
    simplicity: Sequence[int],
    max_terms: int = MAX_TERMS,
    candidates: Sequence[int] | None = None,
    most_own: int = 3,
) -> list[Description]:
    """Find the terms of every head.

    The features are those that all heads share, then those that belong to one head (its *own*: `RowSample.columns`).

    Args:
        rows: The rows to fit.
        simplicity: (shared feature,): the rank of each feature; of equally good candidates the lowest rank is taken.
        max_terms: How many terms a head may have.
        candidates: Which of the shared features may be terms; None = all.
        most_own: How many of the terms may be features of the head's own.

    Returns:
        One description per head, in their order.
    """
    # Only features that vary in enough texts may be terms.
    usable = rows.varies_in >= min(MIN_TEXTS, len(np.unique(rows.texts)))
    if candidates is not None:
        usable &= np.isin(np.arange(rows.n_shared), candidates)
    descriptions: list[Description] = []
    # Some heads at a time, whose searches share one product with all features per round.
    for start in range(0, rows.n_heads, _HEADS_AT_ONCE):
        heads = range(start, min(start + _HEADS_AT_ONCE, rows.n_heads))
        searches = [_Search(rows, head, simplicity, most_own) for head in heads]
        # In each round, each search that is not done adds a term.
        for _ in range(max_terms):
            active = [search for search in searches if not search.is_done]
            if not active:
                break
            # p of each head up to a factor of each row, (head, entry), and E_p[f], (head, shared feature).
            p = np.stack([search.unscaled() for search in active])
            expected = rows.means(p, rows.weights[[search.head for search in active]])
            for index, search in enumerate(active):
                search.add_term(expected[index], p[index], usable)
        descriptions += [search.description() for search in searches]
    return descriptions


class _Trial(NamedTuple):
    """Hold a fit of the terms so far together with one candidate.

    Attributes:
        feature: The candidate.
        weights: w of all these terms, the candidate's last.
        kl: KL(A ‖ p) of the fit, in nats.
    """

    feature: int
    weights: Floats
    kl: float


class _Search:
    """Search the terms of one head, one at a time. Features are those that all heads share, then the head's own."""

    def __init__(
        self,
        rows: RowSample,
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
        # KL(A ‖ uniform), and KL(A ‖ p) of the terms so far.
        self._nats = float(rows.mean_nats[head])
        self._kl = self._nats
        self.is_done = not self._nats > 0
        # The values of the head's own features, (own feature, entry). An entry is a key of a sampled row.
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
        """Return p of the terms so far, up to a factor of each row, (entry,)."""
        return self._rows.unscaled(self.terms, self._weights, self.head)

    def _own_means(self, p: NDArray[np.floating]) -> Floats:
        """Return E_p[f] of the head's own features, (own feature,); p is known up to a factor of each row, (entry,)."""
        means: Floats = self._own_values @ self._rows.weighted(p, self.head)
        return means

    def add_term(
        self,
        expected: Floats,
        p: NDArray[np.float32],
        usable: NDArray[np.bool_],
    ) -> None:
        """Add the next term and fit all of them, or end the search if no candidate gains enough.

        Args:
            expected: (shared feature,): E_p[f] at the current fit.
            p: (entry,): the current fit, up to a factor of each row.
            usable: (shared feature,): which of these may be terms.
        """
        # The next term is no term yet; and one of the head's own only while it has fewer than `most_own` of them.
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
        # Add the chosen one, and fit all terms to the end.
        chosen = self._choose(trials, max((1 - ALIKE) * largest_gain, min_gain))
        if not self.terms:
            self._first_weight = float(chosen.weights[0])
        self.terms = (*self.terms, chosen.feature)
        self._weights, kl = self._fit(self.terms, chosen.weights, _TOLERANCE)
        self._gains.append(self._kl - kl)
        self._kl = kl
        self.is_done = not kl > (1 - ENOUGH) * self._nats

    def _choose(self, trials: Sequence[_Trial], min_gain: float) -> _Trial:
        """Return the best of the simplest trials that gain enough; of equal ones the one with the first feature."""
        good = [trial for trial in trials if self._kl - trial.kl >= min_gain]
        rank = min(self._simplicity[trial.feature] for trial in good)
        simplest = [trial for trial in good if self._simplicity[trial.feature] == rank]
        min_kl = min(trial.kl for trial in simplest)
        # Up to rounding, several may be the best.
        tied = [trial for trial in simplest if trial.kl <= min_kl + _TIE_TOLERANCE * self._nats]
        return min(tied, key=lambda trial: trial.feature)

    def _candidates(self, pi: Floats, may_follow: NDArray[np.bool_]) -> dict[int, float]:
        """Return the features that could gain most, and the weight from which to start the fit of each.

        `pi` is the mean of E_p[f], (feature,), and `may_follow` says which features may be the next term, (feature,).
        """
        # Binary features: the lower bound of the gain in the module's docstring, and the weight where it is reached.
        a = np.clip(self._expected, TINY, 1 - TINY)
        pi = np.clip(pi, TINY, 1 - TINY)
        log_of_ones = np.log(a / pi)
        log_of_zeros = np.log((1 - a) / (1 - pi))
        gains = a * log_of_ones + (1 - a) * log_of_zeros
        gains[~may_follow] = -1.0
        steps = log_of_ones - log_of_zeros
        # Graded features, with values between 0 and 1, vary less than this bound assumes. The maximum of a quadratic
        # with their variance under uniform attention tells more of their gain (Rao's score).
        graded_steps = (a - pi) / np.maximum(self._variances, TINY)
        graded_gains = graded_steps * (a - pi) / 2
        graded_gains[~(may_follow & self._is_graded)] = -1.0
        steps = np.where(self._is_graded, graded_steps, steps)
        steps = np.clip(steps, -LARGEST_STEP, LARGEST_STEP)
        # The best by either rule.
        best = {}
        for rule_gains, n_best in ((gains, BEST_BINARY), (graded_gains, BEST_GRADED)):
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
        """Fit the weights w of terms, beginning with `start`; return them and KL(A ‖ p), in nats: see `minimise`."""
        table = self._rows.table(terms, self.head)
        return minimise(table, self._expected[list(terms)], self._rows, self.head, start, tolerance)

    def description(self) -> Description:
        """Return the result of the search."""
        return Description(self.terms, self._weights, tuple(self._gains), self._nats, self._first_weight)


def minimise(
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
        table: How often each combination of the terms' values occurs in each row.
        expected: (term,): the mean of E_A[f] over rows.
        rows: The rows that the table is of.
        head: Whose attention A is.
        weights: (term,): where to begin.
        tolerance: The search ends with a step that gains less than this, in nats.

    Returns:
        The weights, (term,), and the mean of KL(A ‖ p) over rows, in nats.
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
        # E_p[f] of each row, (row, term), and the sum of p over all keys of each combination, (combination,).
        means = table.counts @ (e[:, None] * table.values) / z[:, None]
        mass = e * (table.counts_by_combination @ (row_weights / z))
        gradient = row_weights @ means - expected + RIDGE * weights
        # The second derivatives are the covariances of features under p: E_p[f g] - E_p[f] E_p[g], averaged over rows.
        hessian = (table.values * mass[:, None]).T @ table.values
        hessian -= (means * row_weights[:, None]).T @ means
        hessian += ridge
        step = np.clip(np.linalg.solve(hessian, -gradient), -LARGEST_STEP, LARGEST_STEP)
        # Near the minimum the loss is a quadratic: its last gain is known without computing it again.
        predicted_gain = -float(gradient @ step) / 2
        if predicted_gain < tolerance:
            weights = np.clip(weights + step, -LARGEST_WEIGHT, LARGEST_WEIGHT)
            loss -= predicted_gain
            break
        # Halve the step until the loss falls, ten times at most.
        for halvings in range(11):
            new_weights = np.clip(weights + 0.5**halvings * step, -LARGEST_WEIGHT, LARGEST_WEIGHT)
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
    # The loss without the ridge is the mean of KL(A ‖ p) + H.
    entropy = float(row_weights @ rows.entropies[:, head])
    return weights, loss - RIDGE / 2 * float(weights @ weights) - entropy


# Score descriptions


def score(
    rows: RowSample,
    head: int,
    description: Description,
) -> tuple[DescriptionScore, Floats]:
    """Return how well a description predicts the rows of a head, and KL(A ‖ p) of each row, (row,), in nats.

    A row counts by its mass: the share of the query's attention that the row holds.
    """
    losses = row_losses(rows, head, description)
    mass = rows.mass[:, head]
    nats = rows.uniform_nats[:, head]
    return score_of_texts(rows.texts, losses * mass, nats * mass, mass), losses


def row_losses(
    rows: RowSample,
    head: int,
    description: Description,
) -> Floats:
    """Return KL(A ‖ p) of each row of a head, (row,), in nats."""
    # -H - Σ w E_A[f] + ln Z, of each row, (row,).
    log_sums = rows.table(description.terms, head).log_sums(description.weights)
    scores = rows.scores(description.terms, description.weights, head)
    expected = rows.sums(rows.scaled(head) * scores)
    losses: Floats = np.maximum(log_sums - expected - rows.entropies[:, head], 0.0)
    return losses


def score_of_texts(
    texts: Integers,
    losses: Floats,
    nats: Floats,
    mass: Floats | None = None,
) -> DescriptionScore:
    """Return the score of a description on rows, with its interval over texts, which all weigh the same.

    The explained share is one minus a ratio of sums over texts (Cochran 1977, section 6.4). Its interval is
    `core.intervals.predicted_interval`; NaN where these texts cannot tell.

    Args:
        texts: (row,): the text of each row, by number.
        losses: (row,): KL(A ‖ p), times the row's mass.
        nats: (row,): KL(A ‖ uniform), times the row's mass.
        mass: (row,): the share of the query's attention that the row holds, 0 to 1; None = all of it.
    """
    if not len(texts):
        return DescriptionScore(math.nan, math.nan, math.nan, math.nan)
    # Average over the rows of each text, (text,), so that texts weigh the same.
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
