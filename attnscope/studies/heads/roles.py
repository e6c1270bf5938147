"""Turn sums into evidence: the value of each measure with its interval, and the roles that pass the test.

A head has a role if a measure of it is above both a threshold and a baseline. The test is one-sided, over texts. The
baseline is the largest of:

- the value of uniform attention;
- for measures of pairs of tokens, such as induction: the value for a head that always looks at the best fixed offset;
- for similar tokens: the mass on the token itself and on its copies.

Each measure that a role may rest on is a test. A measure comes whole and `_active`: the same over attention outside
sinks, the keys that a head rests on when it has nothing to do. The tests of a role are combined (Simes), the false
discovery rate over all heads and roles is bounded by LEVEL, and a role shows the best of its tests.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from attnscope.core.catalogue import MEASURES, Measure
from attnscope.core.intervals import benjamini_hochberg, simes
from attnscope.errors import UsageError
from attnscope.questions.heads import ROLES, Heads, heads_table
from attnscope.results.table import Column, Estimate, Table
from attnscope.studies.heads.measure_intervals import (
    MIN_ACTIVE_SHARE,
    classify_measures,
    divide,
    measure_intervals,
)
from attnscope.studies.heads.measuring import PAIR_MEASURES, KindSums

LEVEL = 0.05
"""The false discovery rate over heads x roles (Benjamini & Hochberg 1995)."""

MIN_FIRM_TEXTS = 10
"""With fewer texts, or fewer effective ones, a role is tentative: it has passed the same test, but other texts may
differ from so few."""

MIN_TESTED_TEXTS = 3
"""With fewer effective texts there is no role: Student's t has less than two degrees of freedom, and says nothing."""

MARGIN = 0.1
"""How much of the way from its baseline to 1 a measure must have gone, beside reaching the threshold.

The attention of random weights differs from uniform attention a little, and on all texts alike, so that no test over
texts takes the difference for chance. In short texts, whose baselines are above the thresholds, half of the heads would
have a role.
"""

REFERENCE_KEYS = 1000
"""The number of keys for which the threshold of `diffuse` is stated; see `_RoleTests._diffuse_limit`."""

MIN_RESCALED_KEYS = 8
"""With fewer keys to a query (in the geometric mean) the threshold of `diffuse` is not rescaled: in so short a text any
head is few nats from uniform attention."""

MIN_MARGIN = 0.01
"""How far above its baseline a measure must be at least: no head can be far above a baseline of nearly 1."""

CRITERIA = {
    "level": LEVEL,
    "fewest_texts": MIN_FIRM_TEXTS,
    "least_texts": MIN_TESTED_TEXTS,
    "margin": MARGIN,
}
"""What roles ask for, as records state it."""

Floats = NDArray[np.float64]


# Rules


@dataclass(frozen=True)
class RoleRule:
    """Hold the rule by which a head gets a role.

    Attributes:
        what: The meaning of the role, in a few words.
        measures: The measures that may give the role, each whole or `_active`: one of them must be above the threshold.
        threshold: The default threshold; users may choose another.
        must_beat_uniform: Whether the measure must also be above its value under uniform attention.
        min_defined: The least share of the queries for which the measure must be defined. If it is defined for few
            queries, the reason is the mask, and not the head. For example, in a causal layer a separator at the end of
            a text is hidden from all other tokens; in a layer with a window of a few tokens, the first token is hidden
            from most queries.
        rescales_threshold: Whether the threshold is rescaled for the length of the texts, so that it asks the same of
            short and long texts. Only `diffuse` does so; see `_RoleTests._diffuse_limit`.
        excludes_diffuse: Whether diffuse heads cannot have the role. If all weights of a head are nearly the same, it
            means nothing which weight is the largest.
        is_sink: Whether the role is to attend to a sink, which says nothing of what a head does elsewhere.
    """

    what: str
    measures: tuple[str, ...]
    threshold: float
    must_beat_uniform: bool = True
    min_defined: float = 0.0
    rescales_threshold: bool = False
    excludes_diffuse: bool = False
    is_sink: bool = False

    @property
    def tested_measures(self) -> list[str]:
        """Return the names of the measures that are tested, whole and `_active`."""
        names = []
        for measure in self.measures:
            names += [measure, f"{measure}_active"]
        return names

    def describe(self, threshold: float) -> dict[str, Any]:
        """Return the role as a record lists it."""
        return {"what": self.what, "measure": self.measures[0], "threshold": threshold}


RULES: dict[str, RoleRule] = {
    "previous_token": RoleRule("attends to the token before", ("previous_token",), 0.4),
    "next_token": RoleRule("attends to the token after", ("next_token",), 0.4),
    "self_token": RoleRule("attends to the token itself", ("self_token",), 0.4),
    "same_token": RoleRule("attends to the same token elsewhere", ("same_token",), 0.4),
    "induction": RoleRule(
        "attends to what came after the same token before (Olsson 2022)", ("induction",), 0.4
    ),
    "local": RoleRule("attends to tokens at most 3 away", ("window",), 0.6),
    "first_token": RoleRule(
        "attends to the first token: a sink (Gu 2024)",
        ("first_token",),
        0.3,
        min_defined=0.5,
        is_sink=True,
    ),
    "outlier_token": RoleRule(
        "attends to tokens of outlying norm: second sinks (Sun 2024)",
        ("outlier_token",),
        0.3,
        min_defined=0.1,
        is_sink=True,
    ),
    "delimiter": RoleRule(
        "attends to punctuation or separators", ("punctuation", "sep"), 0.5, min_defined=0.5
    ),
    "rare": RoleRule(
        "has its largest weight on the rarest token", ("rarest_token",), 0.4, excludes_diffuse=True
    ),
    "diffuse": RoleRule(
        "spreads over all tokens alike",
        ("relative_entropy",),
        0.9,
        must_beat_uniform=False,
        rescales_threshold=True,
    ),
    "similar_token": RoleRule(
        "attends to tokens like it, beyond the same token", ("similar_token",), 0.2
    ),
}
"""Roles by name."""


def complete_thresholds(
    chosen: Mapping[str, float], usual: Mapping[str, float] | None = None
) -> dict[str, float]:
    """Return the threshold of each role: the chosen one, else the usual one (`usual` = None: that of RULES).

    Raises:
        UsageError: There is no such role.
    """
    if usual is None:
        usual = {name: rule.threshold for name, rule in RULES.items()}
    for name in chosen:
        if name not in usual:
            raise UsageError(f"there is no role {name!r}", f"choose from {', '.join(usual)}")
    return {**usual, **chosen}


# Evidence


def judge(
    all_kind_sums: Iterable[KindSums], thresholds: Mapping[str, float], n_texts: int
) -> dict[str, Table]:
    """Return the tables `heads` and `roles` of `questions.heads.Heads`, by kind, layer, head.

    Args:
        all_kind_sums: The sums of each kind of attention.
        thresholds: The threshold of each role.
        n_texts: How many whole texts there are: chunks of one text say how steady a head is in that text alone.
    """
    # One false discovery rate over the heads and roles of all kinds of attention, (head, role).
    judged = [_RoleTests(kind_sums, thresholds, n_texts) for kind_sums in all_kind_sums]
    p_values = np.concatenate([np.zeros((0, len(RULES))), *(each.role_p for each in judged)])
    q_values = benjamini_hochberg(p_values)
    # The largest p-value at which a role is given: Benjamini-Hochberg's LEVEL * passed / tests. The last factor makes
    # up for the rounding of q-values.
    n_tests = (~np.isnan(p_values)).sum()
    largest_p = LEVEL * float((q_values <= LEVEL).sum() / max(n_tests, 1)) * (1 + 1e-12)
    # The rows of both tables; `head` numbers the rows over all kinds.
    tables = []
    roles: list[dict[str, Any]] = []
    head_number = 0
    for each in judged:
        names = []
        for row in range(len(each.role_p)):
            of_head = each.roles_of(row, q_values[head_number], largest_p)
            names.append("+".join(role["role"] for role in of_head))
            roles += [{"head": head_number, **role} for role in of_head]
            head_number += 1
        tables.append(each.table(names))
    heads = Table.stack(tables) if tables else Table.of(Heads.TABLES["heads"], [])
    return {"heads": heads, "roles": Table.of(ROLES, roles)}


def make_measure_column(name: str, measures: Mapping[str, Measure] = MEASURES) -> Column:
    """Return the column of a measure, whole or `_active`."""
    # An `_active` column has the range and unit of the whole measure.
    measure = measures[name.removesuffix("_active")]
    meaning = measure.what
    if name not in measures:
        meaning += " (excluding sinks)"
    low, high = (end if math.isfinite(end) else None for end in (measure.low, measure.high))
    return Column(name, meaning, measure.unit, (low, high))


def effective_texts(kind_sums: KindSums) -> float:
    """Return the effective number of texts, that of the measure that counts most queries; 0 without any."""
    # The counts of `RunningSums`, (layer, head, measure).
    counts = kind_sums.measures.total("c")
    if not counts.size:
        return 0.0
    return float(kind_sums.measures.sample().n_texts.ravel()[counts.argmax()])


class _RoleTest(NamedTuple):
    """Hold a role, and a measure by which a head may get it.

    Attributes:
        role: The role.
        measure: The measure, whole or `_active`.
        column: Its place among the measures of the tally.
        whole: The name of the whole measure.
    """

    role: str
    measure: str
    column: int
    whole: str

    @property
    def is_active(self) -> bool:
        """Return whether the measure counts attention outside sinks alone."""
        return self.measure != self.whole


class _RoleTests:
    """Hold the results of one kind of attention as arrays, with the tests on them, for the heads that have any measure.

    Attributes:
        layers: The place of each head's layer in the tally, (head,).
        heads: The number of each head in its layer, (head,).
        values: The measures, sums / counts, (head, measure). `low` and `high` are the ends of their intervals, and
            `uniform` is what uniform attention has.
        columns: Name of a measure -> its place among these.
        tests: Which role is tested by which measure. `role_of_test` has their roles, (test,).
        effective: The effective sample size of each test: the number of equally long texts with as much evidence,
            (head, test).
        baselines: The value of a measure without any preference of the head, (head, test); NaN = none.
        limits: The number that the value must exceed, (head, test); NaN = not tested.
        p: One-sided p-values, (head, test); NaN = not tested, or too few texts.
        role_p: The combined p-values of a role's tests, (head, role); NaN = none could be tested.
    """

    def __init__(self, kind_sums: KindSums, thresholds: Mapping[str, float], n_texts: int) -> None:
        self.kind_sums = kind_sums
        self.thresholds = thresholds
        self.n_texts = n_texts
        # From (layer, head, measure) to heads that have any measure.
        has_any = ~np.isnan(kind_sums.measures.ratio()).all(-1)
        self.layers, self.heads = np.nonzero(has_any)
        measures = kind_sums.measures[has_any]
        self.sums = measures.total("s")
        self.counts = measures.total("c")
        self.values = measures.ratio()
        self.uniform = kind_sums.uniform[has_any].ratio()
        # A count stands for so many queries: intervals of shares of queries need their number.
        units = kind_sums.queries_per_count
        self.low, self.high = measure_intervals(measures, kind_sums.names, units, self.uniform)
        # The tests: each role by each measure that it may rest on, whole and outside sinks.
        self.columns = {name: column for column, name in enumerate(kind_sums.names)}
        self.tests: list[_RoleTest] = []
        for role, rule in RULES.items():
            for name in rule.tested_measures:
                if name in self.columns:
                    whole = name.removesuffix("_active")
                    self.tests.append(_RoleTest(role, name, self.columns[name], whole))
        self.baselines = np.stack([*map(self._baseline, self.tests)], -1)
        self.limits = np.stack([*map(self._limit, self.tests, self.baselines.T)], -1)
        # Shares, from 0 to 1: the test whose inversion gives their intervals, with the same arguments.
        columns = [test.column for test in self.tests]
        test_sums = measures[:, columns]
        kinds = classify_measures([test.measure for test in self.tests])
        p_of_shares = test_sums.share_p_above(
            self.limits,
            hits=kinds.are_hits,
            unseen=~kinds.are_means,
            dependence=kinds.dependence,
            units=units,
        )
        # Other measures: Student's t. Their intervals allow for texts of a kind that the sample lacks, and the t-test
        # does not: so p is at least 0.5 unless the whole interval is above the limit.
        min_p = np.where(self.low[:, columns] > self.limits, 0.0, 0.5)
        p_of_others = np.maximum(test_sums.p_above(self.limits), min_p)
        p = np.where(kinds.are_shares, p_of_shares, p_of_others)
        self.effective = test_sums.sample().n_texts
        self.p = np.where(self.effective < MIN_TESTED_TEXTS, np.nan, p)
        # One p-value per role: its tests are combined.
        self.role_of_test = np.array([test.role for test in self.tests])
        self.role_p = np.full((len(self.p), len(RULES)), np.nan)
        for number, role in enumerate(RULES):
            if role in self.role_of_test:
                self.role_p[:, number] = simes(self.p[:, self.role_of_test == role])

    def _baseline(self, test: _RoleTest) -> Floats:
        """Return the largest of all baselines of a test, (head,)."""
        baseline = np.full(len(self.values), np.nan)
        if RULES[test.role].must_beat_uniform:
            baseline = self.uniform[:, test.column]
        if test.whole in PAIR_MEASURES:
            # The value for a head that always looks at the best fixed offset, from (pair measure, offset).
            by_offset = self.kind_sums.pairs.ratio()[PAIR_MEASURES.index(test.whole)]
            baseline = np.fmax(baseline, np.fmax.reduce(by_offset))
        if test.whole == "similar_token":
            # Nothing is more like a token than itself and its copies: the mass on these. `ending` is "" or "_active".
            ending = test.measure.removeprefix(test.whole)
            is_same = np.isin(self.kind_sums.names, [f"self_token{ending}", f"same_token{ending}"])
            mass = self.sums[:, is_same].sum(-1)
            baseline = np.fmax(baseline, divide(mass, self.counts[:, test.column]))
        return baseline

    def _limit(self, test: _RoleTest, baseline: Floats) -> Floats:
        """Return the number that the value must exceed, (head,): the threshold, or the baseline plus a margin.

        NaN = the head is not tested: it lacks the measure, or does not meet the conditions of the rule.
        """
        rule = RULES[test.role]
        if rule.rescales_threshold:
            return self._diffuse_limit()
        above_baseline = baseline + np.maximum(MARGIN * (1 - baseline), MIN_MARGIN)
        limit: Floats = np.fmax(self.thresholds[test.role], above_baseline)
        is_untested = np.isnan(self.values[:, test.column])
        # The measure must be defined for enough of the queries, which all count in "resting" (the mass on sinks). The
        # count of an `_active` measure is no number of queries, but their mass outside sinks, which must be enough.
        if rule.is_sink or not test.is_active:
            is_untested |= self._share_of(self.columns[test.whole], "resting", 1.0) < rule.min_defined
        if test.is_active:
            is_untested |= self._share_of(test.column, test.whole, 0.0) < MIN_ACTIVE_SHARE
        if rule.excludes_diffuse and "relative_entropy" in self.columns:
            is_untested |= self.values[:, self.columns["relative_entropy"]] > self._diffuse_limit()
        return np.where(is_untested, np.nan, limit)

    def _diffuse_limit(self) -> Floats:
        """Return the relative entropy above which a head is diffuse, (head,).

        Relative entropy is 1 - d / ln n for a head d nats from uniform attention over n keys. At the same d it is 0.78
        in a sentence of 25 tokens and 0.89 in a text of 500. So the threshold t stands for a distance, that of a text
        of REFERENCE_KEYS keys: d = (1 - t) ln REFERENCE_KEYS. That is ln 2 for t = 0.9: the head spreads as if evenly
        over half of its keys. The mean of ln n is the entropy of uniform attention.
        """
        log_keys = np.full(len(self.values), np.nan)
        if "entropy_nats" in self.columns:
            log_keys = self.uniform[:, self.columns["entropy_nats"]]
        # In short texts, the threshold is the relative entropy itself.
        log_reference = math.log(REFERENCE_KEYS)
        log_keys = np.where(log_keys >= math.log(MIN_RESCALED_KEYS), log_keys, log_reference)
        return 1 - (1 - self.thresholds["diffuse"]) * log_reference / log_keys

    def _share_of(self, column: int, other: str, missing: float) -> Floats:
        """Return the count of a measure as a share, 0 to 1, of that of another, (head,); `missing` without the other.

        For an `_active` measure and the whole one, it is the mass outside sinks of the queries that the measure counts.
        That is not 1 - resting: attention to a learned sink, which is no key, is neither resting nor active.
        """
        if other not in self.columns:
            return np.full(len(self.values), missing)
        return divide(self.counts[:, column], self.counts[:, self.columns[other]], 0.0)

    def table(self, roles: Sequence[str]) -> Table:
        """Return all heads with their measures, and with the names of their roles, one text for each head."""
        resting = np.full(len(self.values), np.nan)
        if "resting" in self.columns:
            resting = self.values[:, self.columns["resting"]]
        kinds = [self.kind_sums.kind] * len(self.heads)
        layers = np.array(self.kind_sums.layers, np.int64)[self.layers]
        return heads_table(
            (kinds, layers, self.heads),
            [*map(make_measure_column, self.kind_sums.names)],
            roles=roles,
            resting=resting,
            value=self.values,
            low=self.low,
            high=self.high,
            baseline=self.uniform,
            count=self.counts * self.kind_sums.queries_per_count,
        )

    def roles_of(self, head: int, q: Floats, largest_p: float) -> list[dict[str, Any]]:
        """Return the roles of a head as rows, each by the best of its tests; the strongest first, but sinks last.

        Args:
            head: The row of the head in these arrays.
            q: Its `role_p` after Benjamini-Hochberg, (role,).
            largest_p: The p-value up to which any head gets any role.
        """
        roles = []
        values = self.values[head]
        for number, (name, rule) in enumerate(RULES.items()):
            # NaN, where nothing was tested, is no role.
            if not q[number] <= LEVEL:
                continue
            # Of the tests that pass alone, a whole measure says more than its active part; then the largest value.
            passed = np.flatnonzero((self.role_of_test == name) & (self.p[head] <= largest_p))
            best = max(passed, key=lambda i: (not self.tests[i].is_active, values[self.tests[i].column]))
            test = self.tests[best]
            interval = self.low[head, test.column], self.high[head, test.column]
            threshold = self.thresholds[name]
            if rule.rescales_threshold:
                threshold = self.limits[head, best]
            active_share = None
            if test.is_active:
                active_share = self._share_of(test.column, test.whole, 0.0)[head]
            effective = self.effective[head, best]
            roles.append(
                {
                    "role": name,
                    "measure": test.measure,
                    "value": Estimate(values[test.column], *interval, self.baselines[head, best]),
                    "threshold": threshold,
                    "p": self.role_p[head, number],
                    "q": q[number],
                    "tentative": min(effective, self.n_texts) < MIN_FIRM_TEXTS,
                    "active_share": active_share,
                    "effective_texts": effective,
                }
            )

        def order(role: dict[str, Any]) -> tuple[bool, float]:
            return RULES[role["role"]].is_sink, -role["value"].value / role["threshold"]

        return sorted(roles, key=order)
