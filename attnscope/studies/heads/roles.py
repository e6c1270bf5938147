"""Turn sums into evidence: the value of each measure with its interval, and the roles that pass the test.

A head has a role if its measure is above both a threshold and a baseline. The test is one-sided, over texts, and the
false discovery rate of all heads x roles is held. The baseline is the value of uniform attention. For links between
two tokens it is also that of the best fixed offset, and for similar tokens also the mass on the same token. Each
measure that a role may rest on is a test. Those of one role are combined first (Simes), and its evidence is
the best of them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnscope.core.catalogue import MEASURES, Measure
from attnscope.core.intervals import benjamini_hochberg, simes
from attnscope.core.sums import RunningSums
from attnscope.errors import UsageError
from attnscope.questions.heads import ROLES, Heads, heads_table
from attnscope.results.table import PARTS, Column, Estimate, Table
from attnscope.studies.heads.measure_intervals import LEAST_ACTIVE, kinds_of, measure_intervals
from attnscope.studies.heads.measuring import PAIR_MEASURES, Tally

LEVEL = 0.05
"""The false discovery rate over heads x roles (Benjamini & Hochberg 1995)."""

FEWEST_TEXTS = 10
"""With fewer effective texts, or fewer texts, a role is tentative: it has passed the same test, but so few may not be
like others."""

LEAST_TEXTS = 3
"""With fewer effective texts there is no role: Student's t has less than two degrees of freedom, and says nothing."""

MARGIN = 0.1
"""How much of the way from its baseline to 1 a measure must have gone, beside reaching the threshold.

Random weights differ from uniform attention by a little, and on all texts alike, so that no test over texts takes the
difference for chance. In short texts, whose baselines are above the thresholds, every other head would have a role.
"""

FULL_KEYS = 1000
"""The number of keys at which the threshold of `diffuse` is the relative entropy; see `_Judged._even_enough`."""

LEAST_KEYS = 8
"""With fewer keys to a query (the geometric mean) the threshold of `diffuse` is the relative entropy: there any head is
close to uniform attention, in nats."""

LEAST_MARGIN = 0.01
"""How far above its baseline a measure must be at least: no head can be far above a baseline of nearly 1."""

Floats = NDArray[np.float64]


# Rules --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rule:
    """The rule by which a head gets a role.

    Attributes:
        what: The meaning of the role, in a few words.
        measures: The measures of which one must be above the threshold, whole or `_active`.
        threshold: The threshold.
        beats_uniform: Whether the measure must be above its value under uniform attention too.
        least_defined: The least share of the queries for which the measure must be defined. In a causal layer, a
            separator at the end of a text is hidden from all tokens but itself; in a layer whose window is a few
            tokens, the first token is hidden from most queries. Neither says anything about a head.
        any_length: Whether the threshold is a distance from uniform attention, so that it asks the same of short
            texts and of long ones; see `_Judged._even_enough`.
        needs_preference: Whether heads that spread evenly over all tokens are left out: if all weights are nearly the
            same, it means nothing which of them is the largest.
        is_sink: Whether it names a sink, and says nothing of what a head does elsewhere. It is named last.
    """

    what: str
    measures: tuple[str, ...]
    threshold: float
    beats_uniform: bool = True
    least_defined: float = 0.0
    any_length: bool = False
    needs_preference: bool = False
    is_sink: bool = False

    def describe(self, threshold: float) -> dict[str, Any]:
        """Return the role as a record lists it."""
        return {"what": self.what, "measure": self.measures[0], "threshold": threshold}


RULES: dict[str, Rule] = {
    "previous_token": Rule("attends to the token before", ("previous_token",), 0.4),
    "next_token": Rule("attends to the token after", ("next_token",), 0.4),
    "self_token": Rule("attends to the token itself", ("self_token",), 0.4),
    "same_token": Rule("attends to the same token elsewhere", ("same_token",), 0.4),
    "induction": Rule("attends to what came after the same token before (Olsson 2022)", ("induction",), 0.4),
    "local": Rule("attends to tokens at most 3 away", ("window",), 0.6),
    "first_token": Rule(
        "attends to the first token: a sink (Gu 2024)", ("first_token",), 0.3, least_defined=0.5, is_sink=True
    ),
    "outlier_token": Rule(
        "attends to tokens of outlying norm: second sinks (Sun 2024)",
        ("outlier_token",),
        0.3,
        least_defined=0.1,
        is_sink=True,
    ),
    "delimiter": Rule("attends to punctuation or separators", ("punctuation", "sep"), 0.5, least_defined=0.5),
    "rare": Rule("has its largest weight on the rarest token", ("rarest_token",), 0.4, needs_preference=True),
    "diffuse": Rule("spreads over all tokens alike", ("relative_entropy",), 0.9, beats_uniform=False, any_length=True),
    "similar_token": Rule("attends to tokens like it, beyond the same token", ("similar_token",), 0.2),
}
"""Roles by name."""


def complete_thresholds(chosen: Mapping[str, float], usual: Mapping[str, float] | None = None) -> dict[str, float]:
    """Return thresholds by role: the chosen ones, and the usual ones for all other roles (None = those of RULES).

    Raises:
        UsageError: There is no such role.
    """
    usual = {name: rule.threshold for name, rule in RULES.items()} if usual is None else usual
    for name in chosen:
        if name not in usual:
            raise UsageError(f"there is no role {name!r}", f"choose from {', '.join(usual)}")
    return {**usual, **chosen}


# Evidence -----------------------------------------------------------------------------------------------------


def judge(tallies: Sequence[Tally], thresholds: Mapping[str, float], n_texts: int) -> dict[str, Table]:
    """Return the tables `heads` and `roles` of `questions.heads.Heads`, by kind, layer, head.

    There is one tally for each kind of attention. `n_texts` is the number of whole texts: blocks and chunks of one text
    say how steady a head is in that text alone.
    """
    # One false discovery rate over the heads and roles of all kinds of attention.
    judged = [_Judged(tally, thresholds, n_texts) for tally in tallies]
    p_values = np.concatenate([each.role_p.ravel() for each in judged]) if judged else np.zeros(0)
    q_values = benjamini_hochberg(p_values)
    n_tests = (~np.isnan(p_values)).sum()
    accepted = LEVEL * float((q_values <= LEVEL).sum() / max(n_tests, 1)) * (1 + 1e-12)  # q was rounded
    start = 0
    tables = []
    roles: list[dict[str, Any]] = []
    n_heads = 0
    # Rows and roles of each kind; `head` numbers the rows over all kinds.
    for each in judged:
        stop = start + each.role_p.size
        q = q_values[start:stop].reshape(each.role_p.shape)
        start = stop
        rows = [each.roles_of(tuple(place), q, accepted) for place in each.places.tolist()]
        tables.append(each.table(["+".join(role["role"] for role in of_head) for of_head in rows]))
        for head, of_head in enumerate(rows, n_heads):
            roles += [{"head": head, **role} for role in of_head]
        n_heads += len(rows)
    heads = Table.stack(tables) if tables else Table.of(Heads.TABLES["heads"], [])
    return {"heads": heads, "roles": Table.of(ROLES, roles)}


def measure_column(name: str, measures: Mapping[str, Measure] = MEASURES) -> Column:
    """Return the column of a measure, whole or `_active`."""
    # An `_active` column has the range and unit of the whole measure.
    measure = measures[name.removesuffix("_active")]
    meaning = measure.what if name in measures else f"{measure.what} (excluding sinks)"
    low, high = (end if math.isfinite(end) else None for end in (measure.low, measure.high))
    return Column(name, meaning, measure.unit, (low, high))


def effective_texts(tally: Tally) -> float:
    """Return the effective number of texts, that of the measure that counts most queries; 0 without any."""
    counts = tally.measures.total("c") * tally.queries_per_count
    return float(tally.measures.effective_texts().ravel()[counts.argmax()]) if counts.size else 0.0


@dataclass(frozen=True)
class _Test:
    """One test: a role, and a measure that it may rest on."""

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
        baselines: The value of a measure without any preference of the head; NaN = none.
        queries: How many queries a measure counts, or as many of texts of one length as its count amounts to.
        limits: The number that the value must exceed; NaN = not tested.
        p: One-sided p-values; NaN = not tested, or too few texts.
        role_p: The combined p-values of a role's tests.
    """

    def __init__(self, tally: Tally, thresholds: Mapping[str, float], n_texts: int) -> None:
        # Values, counts and intervals of all measures, (layer, head, measure).
        self.tally, self.thresholds, self.n_texts = tally, thresholds, n_texts
        self.values, self.counts = tally.measures.ratio(), tally.measures.total("c")
        self.uniform = tally.uniform.ratio()
        units = tally.queries_per_count
        self.queries = self.counts * units
        self.low, self.high = measure_intervals(tally.measures, tally.names, units, self.uniform)
        self.shape = self.values.shape[:2]
        self._sums = tally.measures.total("s")
        # The tests: each role by each measure it may rest on, whole and outside sinks.
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
        # p-values by kind of measure, (layer, head, test): shares, or Student's t.
        tested = _part(tally.measures, columns)
        self.effective = tested.effective_texts()
        kinds = kinds_of([test.measure for test in self.tests])
        of_shares = tested.share_p_above(self.limits, hits=kinds.are_hits, unseen=~kinds.are_means, units=units)
        # Texts of an unseen kind may keep a measure that is no share below its limit: see `measure_intervals`.
        least = np.where(self.low[..., columns] > self.limits, 0.0, 0.5)
        p = np.where(kinds.are_shares, of_shares, np.maximum(tested.p_above(self.limits), least))
        self.p = np.where(self.effective < LEAST_TEXTS, np.nan, p)
        # One p-value per role, (layer, head, role): its tests are combined.
        self.roles = tuple(dict.fromkeys(test.role for test in self.tests))
        self.role_p = np.stack(
            [simes(self.p[..., [test.role == role for test in self.tests]]) for role in self.roles], -1
        )

    def _column(self, name: str) -> int | None:
        return self.tally.names.index(name) if name in self.tally.names else None

    def _baseline(self, test: _Test) -> Floats:
        # The largest of all baselines that apply, (layer, head).
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
        """Return the value of a pair measure for a head that always looks at the best fixed offset, 0 to 1."""
        shares = self.tally.pairs.ratio()
        return float(np.fmax.reduce(shares[PAIR_MEASURES.index(measure)]))

    def _mass_on_the_same(self, test: _Test) -> Floats:
        """Return the attention to the same token, here or elsewhere: nothing is more like a token than itself."""
        # Mass on the same token here and elsewhere, (layer, head), over the queries that the test counts.
        ending = "_active" if test.is_active else ""
        columns = [self._column(f"{name}{ending}") for name in ("self_token", "same_token")]
        mass = sum((self._sums[..., column] for column in columns if column is not None), np.zeros(self.shape))
        counts = self.counts[..., test.column]
        return _divide(mass, counts, np.nan)

    def _limit(self, test: _Test, baseline: Floats) -> Floats:
        """Return the limit that the value must exceed: threshold, and baseline plus margin; NaN = there is no test."""
        above = baseline + np.maximum(MARGIN * (1 - baseline), LEAST_MARGIN)
        if test.rule.any_length:
            return self._even_enough()
        # The threshold; NaN where the measure, or what the rule asks of the head, is missing.
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
        """Return the relative entropy above which a head is diffuse.

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
        """Return the share of queries for which a measure is defined, (layer, head).

        For a sink's `_active` measure it is that of the whole measure. It is 1 for any other `_active` measure, whose
        count is a mass.
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
        """Return the share, 0 to 1, of the attention of a measure's own queries that is off the resting keys.

        It is not 1 - resting, because a learned sink takes attention that is neither.
        """
        whole = self._column(test.measure.removesuffix("_active"))
        if whole is None:
            return np.zeros(self.shape)
        return _divide(self.counts[..., test.column], self.counts[..., whole], 0.0)

    @property
    def places(self) -> NDArray[np.int64]:
        """Return the layer (a row of `tally.layers`) and number of each head that has any measure, (row, 2)."""
        return np.argwhere(~np.isnan(self.values).all(-1))

    def table(self, roles: Sequence[str]) -> Table:
        """Return all heads with their measures; `roles` are those of each row."""
        # From (layer, head, measure) to a row per head.
        layers, heads = self.places.T
        resting = self._column("resting")
        share = np.nan if resting is None else self.values[layers, heads, resting]
        measured = (self.values, self.low, self.high, self.uniform, self.queries)
        estimates = {part: array[layers, heads] for part, array in zip(("value", *PARTS), measured, strict=True)}
        return heads_table(
            ([self.tally.kind] * len(heads), np.array(self.tally.layers, np.int64)[layers], heads),
            [measure_column(name) for name in self.tally.names],
            roles=roles,
            resting=np.broadcast_to(share, len(heads)),
            **estimates,
        )

    def roles_of(self, at: tuple[int, ...], q: Floats, accepted: float) -> list[dict[str, Any]]:
        """Return the roles of a head as rows, each by the best of the tests that pass alone.

        The strongest comes first, but sinks come last.

        Args:
            at: Row in `tally.layers` and number of the head.
            q: `role_p` after Benjamini-Hochberg.
            accepted: The p-value up to which roles are given, that of all tallies.
        """
        roles = []
        for number, name in enumerate(self.roles):
            if not q[(*at, number)] <= LEVEL:
                continue
            # Tests of the role that pass alone, by the p-value up to which any role is given.
            passed = [i for i, test in enumerate(self.tests) if test.role == name and self.p[(*at, i)] <= accepted]
            # The whole measure says more than its active part; of two alike, the larger one.
            best = max(passed, key=lambda i: (not self.tests[i].is_active, self.values[(*at, self.tests[i].column)]))
            p_values = {"p": self.role_p[(*at, number)], "q": q[(*at, number)]}
            roles.append(self._role(at, best) | p_values)
        return sorted(roles, key=lambda role: (RULES[role["role"]].is_sink, -role["value"].value / role["threshold"]))

    def _role(self, at: tuple[int, ...], number: int) -> dict[str, Any]:
        test = self.tests[number]
        cell = (*at, test.column)
        effective = self.effective[(*at, number)]
        return {
            "role": test.role,
            "measure": test.measure,
            "value": Estimate(self.values[cell], self.low[cell], self.high[cell], self.baselines[(*at, number)]),
            "threshold": self.limits[(*at, number)] if test.rule.any_length else self.thresholds[test.role],
            "tentative": min(effective, self.n_texts) < FEWEST_TEXTS,
            "active_share": self._active_share(test)[at] if test.is_active else None,
            "effective_texts": effective,
        }


def _part(sums: RunningSums, columns: Sequence[int] | NDArray[np.int64]) -> RunningSums:
    """Return some of the quantities of (layer, head, quantity): the same ones for all heads, or each head's own."""
    index = np.broadcast_to(np.asarray(columns), (*sums.shape[:2], np.shape(columns)[-1]))
    return sums.take(index)


def _divide(a: Floats, b: Floats, undefined: float) -> Floats:
    result: Floats = np.divide(a, b, out=np.full(a.shape, undefined), where=b > 0)
    return result
