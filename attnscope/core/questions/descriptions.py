"""What a head does, found in the data: a sparse, readable model of its rows, scored on other texts.

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

from attnscope.core.exact.intervals import predicted_interval
from attnscope.core.exact.running import RunningSums
from attnscope.core.questions.gates import TINY, least_gain
from attnscope.core.questions.level_tables import RIDGE, Floats
from attnscope.core.questions.sampled_rows import Part

MOST_TERMS = 4
LEAST_GAIN = 0.02
"""Share of the nats of the fitted texts that a term must add to stay."""

ENOUGH = 0.995
"""Share of those nats: once it is explained, the search ends."""

ALIKE = 0.02
"""Share of the largest gain within which candidates are alike, and the simplest of them is taken."""

REFITTED, REFITTED_GRADED = 6, 2
"""How many candidates are refitted: the best of all; and by another rule, of those with more than two values."""

FEWEST_TEXTS = 3
"""In how many of the fitted texts a feature must vary."""

LATER = -2
"""In `needs` of `describe`: the feature may be a term, but not the first."""

LARGEST_WEIGHT, LARGEST_STEP = 16.0, 3.0
_ITERATIONS, _CLOSE, _CLOSE_ENOUGH = 30, 1e-7, 1e-4
_TIED = 1e-8
_SCREENED_AT_ONCE = 2**22


@dataclass(frozen=True, eq=False)
class Description:
    """The terms of a head.

    Attributes:
        terms: Numbers of the features, in the order in which they were chosen.
        weights: w of each, log odds for a feature that goes from 0 to 1.
        gains: Nats that each explained of the fitted texts when it was chosen.
        nats: KL(A ‖ uniform) of the fitted texts.
        first: The first term alone; None if there is none.
    """

    terms: tuple[int, ...]
    weights: Floats
    gains: tuple[float, ...]
    nats: float
    first: "Description | None" = None


@dataclass(frozen=True)
class Score:
    """How well a description holds on texts.

    Attributes:
        explained: Share of the nats from uniform that it explains; below 0 if it is worse than uniform; NaN if there
            are none.
        low: Lower end of its interval over texts; NaN where these texts cannot tell.
        high: Upper end, at most 1; NaN likewise.
        nats: The mean of KL(A ‖ uniform).
        left: The mean of KL(A ‖ p).
    """

    explained: float
    low: float
    high: float
    nats: float
    left: float


def refit(
    part: Part, head: int, terms: tuple[int, ...], start: Floats | None = None, close: float = _CLOSE
) -> tuple[Floats, float]:
    """The weights of some terms for which p is nearest to a head's attention, from `start` on, and how near.

    Returns:
        The weights, and the mean of KL(A ‖ p) over texts in nats (without the ridge). The last step gains less than
        `close` nats.
    """
    table = part.table(terms, head)
    (shared,) = part.expected([head])
    expected = np.array([part.share(f, head) if f >= part.n_shared else shared[f] for f in terms])
    rows = part.weights[head]
    w = np.zeros(len(terms)) if start is None else np.array(start, np.float64)
    loss = table.loss(w, expected, rows)
    for _ in range(_ITERATIONS):
        gradient, second = table.derivatives(loss, w, expected, rows)
        step = np.clip(np.linalg.solve(second, -gradient), -LARGEST_STEP, LARGEST_STEP)
        size = 1.0
        while True:
            tried = np.clip(w + size * step, -LARGEST_WEIGHT, LARGEST_WEIGHT)
            trial = table.loss(tried, expected, rows)
            if trial.value <= loss.value or size < 1e-3:
                break
            size /= 2
        gained = loss.value - trial.value
        if gained > 0:
            w, loss = tried, trial
        if gained < close:
            break
    return w, loss.value - RIDGE / 2 * float(w @ w) - float(part.entropies[head])


def describe(
    part: Part,
    simplicity: Sequence[int],
    most: int = MOST_TERMS,
    candidates: Sequence[int] | None = None,
    needs: Sequence[int] | None = None,
    most_own: int = 3,
) -> list[Description]:
    """Finds the terms of every head.

    Args:
        part: The rows to fit.
        simplicity: Of each feature; of candidates that are alike, the one with the smallest number is taken.
        most: How many terms at most.
        candidates: Which features may be terms; None = all.
        needs: For each feature, the feature that it is a part of and that must be a term before it; -1 = none must,
            LATER = any.
        most_own: How many of the terms at most may be fitted to the head alone.

    Returns:
        One description per head, in their order.
    """
    usable = part.said_in >= min(FEWEST_TEXTS, len(np.unique(part.texts)))
    if candidates is not None:
        usable &= np.isin(np.arange(len(usable)), np.asarray(candidates))
    wholes = np.full(len(usable), -1) if needs is None else np.asarray(needs)
    searches = [_Search(part, head, np.asarray(simplicity)) for head in range(part.rows.n_heads)]

    while going := [search for search in searches if search.goes_on and len(search.terms) < most]:
        for search, screened in zip(going, _screen(part, going), strict=True):
            ready = np.isin(wholes, [-1, *search.terms]) | ((wholes == LATER) & bool(search.terms))
            is_fitted = [part.is_fitted(f, search.head) for f in range(len(usable), len(screened.gains))]
            n_own = sum(part.is_fitted(term, search.head) for term in search.terms)
            own = (n_own < most_own) | ~np.array(is_fitted, np.bool_)
            search.extend(screened, np.concatenate([usable & ready, own]))
    return [search.description() for search in searches]


def score(part: Part, head: int, description: Description) -> tuple[Score, Floats]:
    """How well a description holds on rows; and KL(A ‖ p) of each row, (row,), in nats."""
    left = row_losses(part, head, description)
    nats = part.rows.uniform_nats[part.index, head]
    mass = part.mass[:, head]
    return score_of_texts(part.texts, left * mass, nats * mass, mass), left


def row_losses(part: Part, head: int, description: Description) -> Floats:
    """KL(A ‖ p) of each row of a head, (row,), in nats."""
    log_sums = part.table(description.terms, head).log_sums(description.weights)
    on = np.add.reduceat(part.attention(head) * part.scores(description.terms, description.weights, head), part.first)
    losses: Floats = np.maximum(log_sums - on - part.rows.entropies[part.index, head], 0.0)
    return losses


def score_of_texts(texts: NDArray[np.int64], left: Floats, nats: Floats, mass: Floats | None = None) -> Score:
    """Scores rows, each text with the same weight, with an interval over texts.

    The explained share is one minus a ratio of sums over texts (Cochran 1977, section 6.4). Its ends are those of
    `core.exact.intervals.predicted_interval`; NaN where these texts cannot tell.

    Args:
        texts: (row,): the number of each row's text.
        left: (row,): KL(A ‖ p), or the part of it that counts.
        nats: (row,): KL(A ‖ uniform).
        mass: (row,): the share of the row's attention that both are about, 0 to 1; None = all of it.
    """
    numbers, which, counts = np.unique(texts, return_inverse=True, return_counts=True)
    if not len(numbers):
        return Score(math.nan, math.nan, math.nan, math.nan, math.nan)
    sums = RunningSums(())
    of_left, of_nats = (np.bincount(which, of_rows) / counts for of_rows in (left, nats))
    sums.add(of_left, of_nats)
    mean_mass = 1.0 if mass is None else float((np.bincount(which, mass) / counts).mean())
    low, high = predicted_interval(sums.sample(), mean_mass, len(numbers))
    return Score(1 - float(sums.ratio()), float(low), float(high), float(of_nats.mean()), float(of_left.mean()))


class _Search:
    """The search for the terms of one head."""

    def __init__(self, part: Part, head: int, simplicity: NDArray[np.int64]) -> None:
        ranks = [column.rank for column in part.own_columns(head)]
        self._part, self.head, self._simplicity = part, head, np.concatenate([simplicity, ranks])
        self.terms: tuple[int, ...] = ()
        self.weights = np.zeros(0)
        self._gains: list[float] = []
        self._nats = self._left = float(part.uniform_nats[head])
        self._first: Description | None = None
        self.goes_on = self._nats > 0

    def extend(self, screened: "_Screened", usable: NDArray[np.bool_]) -> None:
        """Takes the next term, or ends the search."""
        gains = np.where(usable, screened.gains, -1.0)
        graded = np.where(usable, screened.graded, -1.0)
        gains[list(self.terms)] = graded[list(self.terms)] = -1.0
        best = [int(f) for f in np.argsort(-gains, kind="stable")[:REFITTED] if gains[f] > 0]
        best += [int(f) for f in np.argsort(-graded, kind="stable")[:REFITTED_GRADED] if graded[f] > 0]
        tried = []
        for feature in dict.fromkeys(best):
            start = np.append(self.weights, np.clip(screened.steps[feature], -LARGEST_STEP, LARGEST_STEP))
            terms = (*self.terms, feature)
            order = _table_order(self._part, terms)
            tried.append((feature, *self._refit(terms, start, order, _CLOSE_ENOUGH * self._nats)))
        least = LEAST_GAIN * self._nats
        if not tried or self._left - min(left for *_, left in tried) < least:
            self.goes_on = False
            return
        largest = self._left - min(left for *_, left in tried)
        alike = [trial for trial in tried if self._left - trial[2] >= max((1 - ALIKE) * largest, least)]
        simplest = min(self._simplicity[feature] for feature, *_ in alike)
        taken = self._best([trial for trial in alike if self._simplicity[trial[0]] == simplest])
        if not self.terms:
            feature, weights, left = taken
            self._first = Description((feature,), weights, (self._nats - left,), self._nats)
        feature, weights, _ = taken
        self.terms = (*self.terms, feature)
        self.weights, left = self._refit(self.terms, weights, _table_order(self._part, self.terms), _CLOSE)
        self._gains.append(self._left - left)
        self._left = left
        self.goes_on = left > (1 - ENOUGH) * self._nats

    def _best(self, tried: list[tuple[int, Floats, float]]) -> tuple[int, Floats, float]:
        """The candidate that leaves least; of ties, which only rounding tells apart, the one with the lowest number."""
        least = min(left for *_, left in tried)
        return min((trial for trial in tried if trial[2] <= least + _TIED * self._nats), key=lambda trial: trial[0])

    def _refit(self, terms: tuple[int, ...], start: Floats, order: list[int], close: float) -> tuple[Floats, float]:
        fitted, left = refit(self._part, self.head, tuple(terms[i] for i in order), start[order], close)
        weights = np.empty(len(terms))
        weights[order] = fitted
        return weights, left

    def description(self) -> Description:
        """The result of the search."""
        return Description(self.terms, self.weights, tuple(self._gains), self._nats, self._first)


@dataclass(frozen=True, eq=False)
class _Screened:
    """What each feature could gain at the current fit of a head.

    Attributes:
        gains: (feature,): the bound of the module's docstring.
        graded: (feature,): Rao's score, the gain of a quadratic, of features with more than two levels; else -1.
        steps: (feature,): the weight at which it would be gained.
    """

    gains: Floats
    graded: Floats
    steps: Floats


def _table_order(part: Part, terms: tuple[int, ...]) -> list[int]:
    """The order of terms in a table, so that heads that come to the same shared features share it."""
    if max(terms, default=-1) < part.n_shared:
        return sorted(range(len(terms)), key=terms.__getitem__)
    return list(range(len(terms)))


def _screen(part: Part, searches: Sequence[_Search]) -> list[_Screened]:
    """What each feature could gain for several heads."""
    screened: list[_Screened] = []
    part.expected([search.head for search in searches])  # of all at once
    at_once = max(1, _SCREENED_AT_ONCE // max(part.size, 1))
    for start in range(0, len(searches), at_once):
        some = searches[start : start + at_once]
        p = np.empty((len(some), part.size), np.float32)
        for row, search in enumerate(some):
            order = _table_order(part, search.terms)
            p[row] = part.unscaled(tuple(search.terms[i] for i in order), search.weights[order], search.head)
        means = part.means(p, part.weights[[search.head for search in some]])
        for search, of_p, mean in zip(some, p, means, strict=True):
            numbers = range(part.n_shared, part.n_shared + len(part.own_columns(search.head)))
            own = part.mean_under(numbers, search.head, of_p)
            screened.append(_gains(part, search.head, np.concatenate([mean, own])))
    return screened


def _gains(part: Part, head: int, pi: Floats) -> _Screened:
    own = range(part.n_shared, part.n_shared + len(part.own_columns(head)))
    a = np.concatenate([*part.expected([head]), [part.share(number, head) for number in own]])
    a, pi = np.clip(a, TINY, 1 - TINY), np.clip(pi, TINY, 1 - TINY)
    steps = np.log(a / pi) - np.log((1 - a) / (1 - pi))
    # A value that rises in steps varies less than one that is 0 or 1: how much less, uniform attention tells.
    spread = np.concatenate([part.variances, part.own_variances(head)])
    is_graded = np.concatenate([part.rows.levels > 2, np.ones(len(own), np.bool_)])
    graded = np.where(is_graded, (a - pi) ** 2 / (2 * np.maximum(spread, TINY)), -1.0)
    return _Screened(
        least_gain(a, pi), graded, np.where(is_graded, np.clip((a - pi) / np.maximum(spread, TINY), -3, 3), steps)
    )
