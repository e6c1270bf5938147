"""From sums to evidence: the value of each measure with its interval, and the roles that survive the test.

A role is given to a head where its measure is above both a threshold and what it would have anyway, by a one-sided test
over texts, with the false discovery rate of all heads x roles held. What it would have anyway is uniform attention's
value; for links between two tokens also that of the best fixed offset; for similar tokens also the mass on the same
token. Each measure that a role may rest on is a test; those of one role are combined first (Simes), and its evidence is
the best of them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from attnscope.core.exact.few_texts import allow_for_unseen
from attnscope.core.exact.multiple_tests import benjamini_hochberg, simes
from attnscope.core.exact.running import DEPENDENCE, RunningSums
from attnscope.core.measures.catalogue import FROM_OFFSETS, MEASURES, OFFSETS
from attnscope.records.heads.findings import Estimate, Head, Role
from attnscope.studies.heads.rules import RULES, Rule
from attnscope.studies.measuring.tally import PAIR_MEASURES, Tally

LEVEL = 0.05
"""The false discovery rate over heads x roles (Benjamini & Hochberg 1995)."""

FEWEST_TEXTS = 10
"""With fewer effective texts, or fewer texts, a role is tentative: it has passed the same test, but so few may not be
like others."""

LEAST_TEXTS = 3
"""With fewer effective texts there is no role: Student's t has less than two degrees of freedom, and says nothing."""

LEAST_ACTIVE = 0.1
"""A role may rest on an `_active` measure where at least this share of the attention is off the resting keys.

Of the queries that the measure itself counts: an induction head rests wherever there is nothing to repeat, over all
queries 95% of the time and more.
"""

MARGIN = 0.1
"""How much of the way from its baseline to 1 a measure must have gone, beside reaching the threshold.

Random weights differ from uniform attention by a little, and on all texts alike, so that no test over texts takes the
difference for chance. In short texts, whose baselines are above the thresholds, every other head would have a role.
"""

NO_SHARES = tuple(name for name, one in MEASURES.items() if one.low < 0 or one.high > 1)
"""Measures that are no numbers from 0 to 1."""

_HITS = ("positional", "rarest_token", "sink")
"""Shares of queries or texts, each of which counts 1 or 0; the others are shares of attention."""

_MEANS = ("relative_entropy",)
"""Means from 0 to 1 that are no share of anything. Only the high end of their interval allows for texts of an unseen
kind, in which the head may spread evenly. `diffuse` asks for the low end: it is about the texts that there are."""

_OF_WHOLE_TEXTS = ("resting", "punctuation", "distance_tokens", "signed_distance_tokens", "rms_distance_tokens")
"""Measures that differ more between texts than within them: how much a head leaves on sinks depends on what a whole
text offers, and distances on its length. A decoder's head that rests on the first token attends to punctuation all the
time in the few texts that begin with a mark. Their intervals count texts as the units. With `DEPENDENCE` those of ten
texts hold in 85% of draws at worst (`resting`), and in 82% (distances); those of 40 in 68% (`punctuation`)."""

FULL_KEYS = 1000
"""The number of keys at which the threshold of `diffuse` is the relative entropy; see `_Judged._even_enough`."""

LEAST_KEYS = 8
"""With fewer keys to a query (the geometric mean) the threshold of `diffuse` is the relative entropy: there any head is
close to uniform attention, in nats."""

LEAST_MARGIN = 0.01
"""How far above its baseline a measure must be at least: no head can be far above a baseline of nearly 1."""

Floats = NDArray[np.float64]


def judge(tallies: Sequence[Tally], thresholds: Mapping[str, float], n_texts: int) -> tuple[Head, ...]:
    """Every head with its measures and roles, by kind, layer, head.

    There is one tally for each kind of attention. `n_texts` is the number of whole texts: blocks and chunks of one text
    say how steady a head is in that text alone.
    """
    judged = [_Judged(tally, thresholds, n_texts) for tally in tallies]
    p_values = np.concatenate([each.role_p.ravel() for each in judged]) if judged else np.zeros(0)
    q_values = benjamini_hochberg(p_values)
    n_tests = (~np.isnan(p_values)).sum()
    accepted = LEVEL * float((q_values <= LEVEL).sum() / max(n_tests, 1)) * (1 + 1e-12)  # q was rounded
    start = 0
    heads: list[Head] = []
    for each in judged:
        stop = start + each.role_p.size
        heads += each.heads(q_values[start:stop].reshape(each.role_p.shape), accepted)
        start = stop
    return tuple(heads)


def effective_texts(tally: Tally) -> float:
    """How many texts of one length all that was measured amounts to: that of the measure that counts most queries."""
    counts = tally.measures.total("c") * tally.units(tally.names)
    return float(tally.measures.effective_texts().ravel()[counts.argmax()]) if counts.size else 0.0


def interval_of(
    sums: RunningSums,
    names: Sequence[str],
    units: NDArray[np.float64] | float = 1.0,
    uniform: Floats | None = None,
) -> tuple[Floats, Floats]:
    """The 95% intervals of measures.

    Shares have the intervals of shares. Other measures have Student's t, which allows for texts of an unseen kind
    (`allow_for_unseen`). The value of such texts lies between 0 and that of uniform attention, three times as far for
    distances (where both sides are seen, the farthest token is three times as far as the mean one), and twice as far
    for lengths of vectors. If the head leaves less than LEAST_ACTIVE outside sinks, a few texts hold all that an
    `_active` measure counts, and the sample may lack them. Then the interval of a share contains both ends that such
    texts could lead to; other measures have none.

    Args:
        sums: (…, measure).
        names: The measures.
        units: As `RunningSums.share_interval` takes them.
        uniform: (…, measure): the values of uniform attention; None = only shares allow for unseen texts.

    Returns:
        The low and the high ends, (…, measure); NaN where there is none.
    """
    low, high = sums.interval()
    shares, hits, unseen = _shares(names)
    low_of_shares, high_of_shares = sums.share_interval(
        hits=hits, unseen=unseen, dependence=_dependence(names), units=units
    )
    low, high = np.where(shares, low_of_shares, low), np.where(shares, high_of_shares, high)
    if uniform is None:
        return low, high
    share, active = _unseen_shares(sums, names, units)
    wide_low, wide_high = allow_for_unseen(sums.ratio(), low, high, share, *_range(names, uniform))
    wide_low, wide_high = (np.where(active >= LEAST_ACTIVE, ends, np.nan) for ends in (wide_low, wide_high))
    wide_high = np.where(shares, np.fmin(wide_high, 1.0), wide_high)
    r, weight = sums.ratio(), np.where(active >= LEAST_ACTIVE, 0.0, share)
    low, high = np.minimum(low, r * (1 - weight)), np.maximum(high, 1 - (1 - r) * (1 - weight))
    return np.where(shares & unseen, low, wide_low), np.where(shares & unseen, high, wide_high)


def _unseen_shares(
    sums: RunningSums, names: Sequence[str], units: NDArray[np.float64] | float
) -> tuple[Floats, Floats]:
    """The share of what a measure counts that texts of an unseen kind may hold; and the share that is outside sinks.

    An `_active` measure counts the attention outside sinks. A text of an unseen kind may have all of its attention
    there, so it weighs more than the others if the head mostly rests.
    """
    share, counts = sums.most_unseen(units, _dependence(names)), sums.total("c")
    active = np.ones_like(share)
    for column, name in enumerate(names):
        whole = name.removesuffix("_active")
        if whole != name and whole in names:
            number = names.index(whole)
            with np.errstate(invalid="ignore", divide="ignore"):
                of = counts[..., column] / counts[..., number]
            most = share[..., number]
            active[..., column] = of
            share[..., column] = most / (most + (1 - most) * of)
    return share, active


def _dependence(names: Sequence[str]) -> Floats:
    """The `dependence` of `RunningSums.share_interval`, (measure,)."""
    of_texts = np.isin([name.removesuffix("_active") for name in names], _OF_WHOLE_TEXTS)
    return np.where(of_texts, 1.0, DEPENDENCE)


def _range(names: Sequence[str], uniform: Floats) -> tuple[Floats, Floats]:
    """The least and the largest value that measures have in texts of an unseen kind; see `interval_of`."""
    lowest, highest = np.where(np.isin(names, _MEANS), np.inf, np.fmin(uniform, 0.0)), np.fmax(uniform, 0.0)
    for column, name in enumerate(names):
        if name.startswith("signed_") and (distance := name.removeprefix("signed_")) in names:
            far = 3 * uniform[..., names.index(distance)]
            lowest[..., column], highest[..., column] = uniform[..., column] - far, uniform[..., column] + far
        elif "distance" in name or "_weighted" in name:
            highest[..., column] *= 3 if "distance" in name else 2
    return lowest, highest


def _shares(names: Sequence[str]) -> tuple[NDArray[np.bool_], NDArray[np.bool_], NDArray[np.bool_]]:
    """Which measures are shares; and what `RunningSums.share_interval` asks: of hits, and of what may be unseen?"""
    shares = ~np.isin([name.removesuffix("_active") for name in names], NO_SHARES)
    return shares, np.isin(names, _HITS), ~np.isin(names, _MEANS)


@dataclass(frozen=True)
class _Test:
    """A role by one measure that it may rest on."""

    role: str
    rule: Rule
    measure: str
    column: int

    @property
    def is_active(self) -> bool:
        return self.measure.endswith("_active")


class _Judged:
    """The results of one tally as arrays, and the tests on them, (layer, head, …).

    Attributes:
        roles: The last axis of `role_p`.
        tests: The last axis of the other arrays below.
        effective: How many texts of one length the evidence of a test amounts to.
        baselines: What a measure would have without any preference of the head; NaN = none.
        queries: How many queries a measure counts, or as many of texts of one length as its count amounts to.
        limits: What the value must be above; NaN = not tested.
        p: One-sided p-values; NaN = not tested, or too few texts.
        role_p: The combined p-values of a role's tests.
    """

    def __init__(self, tally: Tally, thresholds: Mapping[str, float], n_texts: int) -> None:
        self.tally, self.thresholds, self.n_texts = tally, thresholds, n_texts
        self.values, self.counts = tally.measures.ratio(), tally.measures.total("c")
        self.uniform = tally.uniform.ratio()
        units = tally.units(tally.names)
        self.queries = self.counts * units
        self.low, self.high = interval_of(tally.measures, tally.names, units, self.uniform)
        self.shape = self.values.shape[:2]
        self._sums = tally.measures.total("s")
        self.tests = [
            _Test(name, rule, measure, tally.names.index(measure))
            for name, rule in RULES.items()
            for base in rule.measures
            for measure in (base, f"{base}_active")
            if measure in tally.names
        ]
        columns = [test.column for test in self.tests]
        self.baselines = np.stack([self._baseline(test) for test in self.tests], -1)
        self.limits = np.stack(
            [self._limit(test, self.baselines[..., i]) for i, test in enumerate(self.tests)], axis=-1
        )
        tested = _part(tally.measures, columns)
        self.effective = tested.effective_texts()
        shares, hits, unseen = _shares([test.measure for test in self.tests])
        of_shares = tested.share_p_above(self.limits, hits=hits, unseen=unseen, units=units[columns])
        # Texts of an unseen kind may keep a measure that is no share below its limit: see `interval_of`.
        least = np.where(self.low[..., columns] > self.limits, 0.0, 0.5)
        p = np.where(shares, of_shares, np.maximum(tested.p_above(self.limits), least))
        self.p = np.where(self.effective < LEAST_TEXTS, np.nan, p)
        self.roles = tuple(dict.fromkeys(test.role for test in self.tests))
        self.role_p = np.stack(
            [simes(self.p[..., [test.role == role for test in self.tests]]) for role in self.roles], -1
        )

    def _column(self, name: str) -> int | None:
        return self.tally.names.index(name) if name in self.tally.names else None

    def _baseline(self, test: _Test) -> Floats:
        baseline = np.full(self.shape, np.nan)
        if test.rule.beats_uniform:
            baseline = np.fmax(baseline, self.uniform[..., test.column])
        measure = test.measure.removesuffix("_active")
        if measure in PAIR_MEASURES:
            baseline = np.fmax(baseline, self._best_fixed_offset(measure))
        if measure == "similar_token":
            baseline = np.fmax(baseline, self._mass_on_the_same(test))
        return baseline

    def _best_fixed_offset(self, measure: str) -> float:
        """What a head that always looks at the best fixed offset would reach on a pair measure."""
        shares = self.tally.pairs.ratio()
        return float(np.fmax.reduce(shares[PAIR_MEASURES.index(measure)]))

    def _mass_on_the_same(self, test: _Test) -> Floats:
        """The attention to the same token, here or elsewhere: nothing is more like a token than itself."""
        ending = "_active" if test.is_active else ""
        columns = [self._column(f"{name}{ending}") for name in ("self_token", "same_token")]
        mass = sum((self._sums[..., column] for column in columns if column is not None), np.zeros(self.shape))
        counts = self.counts[..., test.column]
        return _divide(mass, counts, np.nan)

    def _limit(self, test: _Test, baseline: Floats) -> Floats:
        """What the value must be above: the threshold, and the baseline by a margin; NaN where there is no test."""
        above = baseline + np.maximum(MARGIN * (1 - baseline), LEAST_MARGIN)
        if test.rule.any_length:
            return self._even_enough()
        limit: Floats = np.fmax(np.full(self.shape, self.thresholds[test.role]), above)
        limit[np.isnan(self.values[..., test.column])] = np.nan
        if test.rule.least_defined:
            limit[self._share_defined(test) < test.rule.least_defined] = np.nan
        if test.is_active:
            limit[~(self._active_share(test) >= LEAST_ACTIVE)] = np.nan
        entropy = self._column("relative_entropy")
        if test.rule.needs_preference and entropy is not None:
            limit[self.values[..., entropy] > self._even_enough()] = np.nan
        return limit

    def _even_enough(self) -> Floats:
        """The relative entropy above which a head is diffuse.

        Relative entropy is 1 - d / ln n for a head d nats from uniform attention over n keys. At the same d it is 0.78
        in a sentence of 25 tokens and 0.89 in a text of 500. So the threshold t stands for a distance, that of a text
        of FULL_KEYS keys: d = (1 - t) ln FULL_KEYS. That is ln 2 for t = 0.9: the head spreads as if evenly over half
        of its keys. The mean of ln n is the entropy of uniform attention.
        """
        threshold = self.thresholds["diffuse"]
        column = self._column("entropy_nats")
        log_keys = np.full(self.shape, np.nan) if column is None else self.uniform[..., column]
        far = np.where(log_keys >= math.log(LEAST_KEYS), log_keys, math.log(FULL_KEYS))
        return 1 - (1 - threshold) * math.log(FULL_KEYS) / far

    def _share_defined(self, test: _Test) -> Floats:
        """For what share of the queries a measure is defined; for a sink's `_active` measure, the measure without that.

        1 for any other `_active` measure, whose count is a mass.
        """
        resting, column = self._column("resting"), test.column
        if test.is_active and test.rule.is_sink:
            column = self.tally.names.index(test.measure.removesuffix("_active"))
        elif test.is_active:
            resting = None
        if resting is None:
            return np.ones(self.shape)
        return _divide(self.counts[..., column], self.counts[..., resting], 0.0)

    def _active_share(self, test: _Test) -> Floats:
        """What share of the attention of a measure's own queries is off the resting keys, as counted.

        Not 1 less what rests: a learned sink takes attention that is neither.
        """
        whole = self._column(test.measure.removesuffix("_active"))
        if whole is None:
            return np.zeros(self.shape)
        return _divide(self.counts[..., test.column], self.counts[..., whole], 0.0)

    def heads(self, q: Floats, accepted: float) -> list[Head]:
        """All heads of the tally, each with the best evidence for each of its roles.

        `q` is `role_p` after Benjamini-Hochberg. Roles are given up to the p-value `accepted`, that of all tallies.
        """
        positional = self._positional()
        resting = self._column("resting")
        heads = []
        for at in np.ndindex(*self.shape):
            if np.isnan(self.values[at]).all():
                continue
            arrays = (self.values, self.low, self.high, self.uniform, self.queries)
            columns = zip(self.tally.names, *(array[at].tolist() for array in arrays), strict=True)
            measures = {name: Estimate(*numbers) for name, *numbers in columns}
            measures[FROM_OFFSETS] = Estimate(*(float(array[at]) for array in positional))
            share = math.nan if resting is None else float(self.values[(*at, resting)])
            layer, head = self.tally.layers[at[0]], at[1]
            heads.append(Head(self.tally.kind, layer, head, self._roles(at, q, accepted), share, measures))
        return heads

    def _roles(self, at: tuple[int, ...], q: Floats, accepted: float) -> tuple[Role, ...]:
        """The roles of a head, each by the best of the tests that pass alone.

        The strongest comes first, but sinks come last.
        """
        roles = []
        for number, name in enumerate(self.roles):
            if not q[(*at, number)] <= LEVEL:
                continue
            passed = [i for i, test in enumerate(self.tests) if test.role == name and self.p[(*at, i)] <= accepted]
            # The whole measure says more than its active part; of two alike, the larger one.
            best = max(passed, key=lambda i: (not self.tests[i].is_active, self.values[(*at, self.tests[i].column)]))
            roles.append(self._role(at, best, float(self.role_p[(*at, number)]), float(q[(*at, number)])))

        return tuple(sorted(roles, key=lambda role: (RULES[role.name].is_sink, -role.value / role.threshold)))

    def _role(self, at: tuple[int, ...], number: int, p: float, q: float) -> Role:
        test = self.tests[number]
        cell = (*at, test.column)
        effective = float(self.effective[(*at, number)])
        return Role(
            name=test.role,
            measure=test.measure,
            value=float(self.values[cell]),
            low=float(self.low[cell]),
            high=float(self.high[cell]),
            baseline=float(self.baselines[(*at, number)]),
            threshold=float(self.limits[(*at, number)]) if test.rule.any_length else self.thresholds[test.role],
            p=p,
            q=q,
            tentative=min(effective, self.n_texts) < FEWEST_TEXTS,
            active_share=float(self._active_share(test)[at]) if test.is_active else None,
            effective_texts=effective,
        )

    def _positional(self) -> tuple[Floats, Floats, Floats, Floats, Floats]:
        """Value, interval, uniform attention's value, and count at each head's most frequent offset.

        It is the offset with the most hits, the nearest of several: a single query that may look 8 tokens back, and
        does, is no habit.
        """
        offsets = self.tally.offsets
        nearest = np.argsort(np.abs(OFFSETS), kind="stable")
        best = nearest[offsets.total("s")[..., nearest].argmax(-1)][..., None]
        mine = _part(offsets, best)
        units = self.tally.queries_per_count
        low, high = mine.share_interval(hits=True, units=units)
        uniform = _part(self.tally.offsets_uniform, best).ratio()
        return tuple(array[..., 0] for array in (mine.ratio(), low, high, uniform, mine.total("c") * units))  # type: ignore[return-value]


def _part(sums: RunningSums, columns: Sequence[int] | NDArray[np.int64]) -> RunningSums:
    """Some of the quantities of (layer, head, quantity): the same ones for all heads, or each head's own."""
    index = np.broadcast_to(np.asarray(columns), (*sums.shape[:2], np.shape(columns)[-1]))
    return sums.take(index)


def _divide(a: Floats, b: Floats, undefined: float) -> Floats:
    result: Floats = np.divide(a, b, out=np.full(a.shape, undefined), where=b > 0)
    return result
