"""Turn sums into evidence: the value of each measure with its interval, and the roles that pass the test.

A head has a role if a measure of it is above both a threshold and a baseline. The test is one-sided, over texts. The
baseline is the largest of:

- the value of uniform attention;
- for measures of pairs of tokens, such as induction: the value for a head that always looks at the best fixed offset;
- for similar tokens: the mass on the token itself and on its copies.

A role has one test for each measure that may give it. A measure comes in two forms: *whole*, and *active*, such as
`window_active`: of the attention outside sinks alone. A sink is a key that a head attends to when it has nothing to do.

The p-values of a role's tests are combined (Simes). The false discovery rate over all heads and roles is at most LEVEL.
The table of roles shows the best test of each role.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from attnscope.arrays import Floats, divide
from attnscope.core.catalogue import MEASURES, Measure
from attnscope.core.intervals import benjamini_hochberg, simes
from attnscope.errors import UsageError
from attnscope.questions.heads import ROLE_EVIDENCE_COLUMNS, Heads, make_heads_table
from attnscope.results.table import Column, Estimate, Table
from attnscope.studies.heads.measure_intervals import (
    MIN_ACTIVE_SHARE,
    classify_measures,
    measure_intervals,
)
from attnscope.studies.heads.measuring import PAIR_MEASURES, KindSums

LEVEL = 0.05
"""The false discovery rate over heads x roles (Benjamini & Hochberg 1995)."""

MIN_FIRM_TEXTS = 10
"""With fewer texts, or fewer effective texts, a role is tentative: it passed the same test, but so few texts may not
represent others."""

MIN_TESTED_TEXTS = 3
"""With fewer effective texts, no role is given: Student's t has less than two degrees of freedom, and no power."""

MARGIN = 0.1
"""How far a measure must be above its baseline, as a share of the distance from the baseline to 1.

The reason: the attention of random weights differs a little from uniform attention, and does so alike on all texts. So
a test over texts finds the difference significant. Short texts have baselines above the thresholds: without the margin,
half of the heads of a random model would have a role.
"""

REFERENCE_KEYS = 1000
"""The number of keys that the threshold of `diffuse` is defined for; see `_RoleTests._diffuse_limit`."""

MIN_RESCALED_KEYS = 8
"""With fewer keys per query (geometric mean), the threshold of `diffuse` is not rescaled: in texts this short, any head
is only a few nats from uniform attention."""

MIN_MARGIN = 0.01
"""The least distance of a measure above its baseline. Near a baseline of 1, MARGIN alone would ask for almost none."""

CRITERIA = {
    "level": LEVEL,
    "fewest_texts": MIN_FIRM_TEXTS,
    "least_texts": MIN_TESTED_TEXTS,
    "margin": MARGIN,
}
"""The criteria of roles under the keys of a record's `options`."""


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
    chosen: Mapping[str, float], defaults: Mapping[str, float] | None = None
) -> dict[str, float]:
    """Return the threshold of each role: the one that the user chose, else the default.

    Args:
        chosen: Role -> threshold that the user chose.
        defaults: Role -> default threshold; None = the roles and thresholds of RULES.

    Raises:
        UsageError: A chosen role does not exist.
    """
    if defaults is None:
        defaults = {name: rule.threshold for name, rule in RULES.items()}
    for name in chosen:
        if name not in defaults:
            raise UsageError(f"there is no role {name!r}", f"choose from {', '.join(defaults)}")
    return {**defaults, **chosen}


# Evidence


def judge(
    all_kind_sums: Iterable[KindSums], thresholds: Mapping[str, float], n_texts: int
) -> dict[str, Table]:
    """Return the tables `heads` and `roles` of `questions.heads.Heads`, in the order of kind, layer and head.

    Args:
        all_kind_sums: The sums of each kind of attention.
        thresholds: The threshold of each role.
        n_texts: The number of whole texts. Chunks do not count here: they only tell how steady a head is within a text.
    """
    # Control one false discovery rate over the heads and roles of all kinds of attention, (head, role).
    tests_by_kind = [_RoleTests(kind_sums, thresholds, n_texts) for kind_sums in all_kind_sums]
    # The empty array is for a study without any kind of attention.
    p_values = np.concatenate([np.zeros((0, len(RULES))), *(tests.role_p for tests in tests_by_kind)])
    q_values = benjamini_hochberg(p_values)
    # The largest p-value that gives a role: in the Benjamini-Hochberg procedure, LEVEL * (tests passed) / (all tests).
    # The last factor makes up for the rounding of q-values.
    n_tests = (~np.isnan(p_values)).sum()
    max_p = LEVEL * float((q_values <= LEVEL).sum() / max(n_tests, 1)) * (1 + 1e-12)
    # Fill the rows of both tables. `head_number` is the row of a head in the table `heads`, over all kinds.
    tables = []
    roles: list[dict[str, Any]] = []
    head_number = 0
    for tests in tests_by_kind:
        names = []
        for row in range(len(tests.role_p)):
            head_roles = tests.list_roles(row, q_values[head_number], max_p)
            # A head may have several roles, such as "previous_token+local".
            names.append("+".join(role["role"] for role in head_roles))
            roles += [{"head": head_number, **role} for role in head_roles]
            head_number += 1
        tables.append(tests.make_table(names))
    heads = Table.stack(tables) if tables else Table.of(Heads.TABLES["heads"], [])
    return {"heads": heads, "roles": Table.of(ROLE_EVIDENCE_COLUMNS, roles)}


def make_measure_column(name: str, measures: Mapping[str, Measure] = MEASURES) -> Column:
    """Return the column of a measure, whole or `_active`, for the table of heads."""
    # An `_active` measure has the range and unit of its whole measure.
    measure = measures[name.removesuffix("_active")]
    meaning = measure.what
    if name not in measures:
        meaning += " (excluding sinks)"
    # In a column, None = no bound.
    low, high = (end if math.isfinite(end) else None for end in (measure.low, measure.high))
    return Column(name, meaning, measure.unit, (low, high))


def effective_texts(kind_sums: KindSums) -> float:
    """Return the effective number of texts for the measure that counts most queries; 0 without any measure."""
    # "c" = the counts, the denominators of the measures, (layer, head, measure).
    counts = kind_sums.measures.total("c")
    if not counts.size:
        return 0.0
    return float(kind_sums.measures.sample().n_texts.ravel()[counts.argmax()])


class _RoleTest(NamedTuple):
    """Hold one test: a role, and a measure that may give it.

    Attributes:
        role: The name of the role.
        measure: The name of the measure, whole or `_active`.
        column: The index of the measure among the measures of `KindSums`.
        whole: The name of the whole measure, the same as `measure` unless that is `_active`.
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
    """Test the roles of all heads of one kind of attention. Heads without any measure are left out.

    Attributes:
        layers: The index of each head's layer in `KindSums.layers`, (head,).
        heads: The number of each head in its layer, (head,).
        values: The measures, sums / counts, (head, measure). `low` and `high` are the ends of their intervals, and
            `uniform` has the values of uniform attention.
        columns: Name of a measure -> its index on the measure axis.
        tests: The tests, in the order of the test axis. `role_of_test` has their roles, (test,).
        effective: The effective sample size of each test: the number of equally long texts with as much evidence,
            (head, test).
        baselines: The value of a measure for a head without any preference, (head, test); NaN = no baseline.
        limits: The number that the value must exceed, (head, test); NaN = not tested.
        p: One-sided p-values, (head, test); NaN = not tested, or too few texts.
        role_p: The combined p-values of a role's tests, (head, role); NaN = no test of the role was possible.
    """

    def __init__(self, kind_sums: KindSums, thresholds: Mapping[str, float], n_texts: int) -> None:
        self.kind_sums = kind_sums
        self.thresholds = thresholds
        self.n_texts = n_texts
        # Select the heads that have any measure: from (layer, head, measure) to (head, measure).
        has_any = ~np.isnan(kind_sums.measures.ratio()).all(-1)
        self.layers, self.heads = np.nonzero(has_any)
        measures = kind_sums.measures[has_any]
        self.sums = measures.total("s")
        self.counts = measures.total("c")
        self.values = measures.ratio()
        self.uniform = kind_sums.uniform[has_any].ratio()
        # Counts are weighted by text. Intervals of shares of queries need the number of queries per count.
        units = kind_sums.queries_per_count
        self.low, self.high = measure_intervals(measures, kind_sums.names, units, self.uniform)
        # List the tests: each role with each measure that may give it, whole and `_active`.
        self.columns = {name: column for column, name in enumerate(kind_sums.names)}
        self.tests: list[_RoleTest] = []
        for role, rule in RULES.items():
            for name in rule.tested_measures:
                if name in self.columns:
                    whole = name.removesuffix("_active")
                    self.tests.append(_RoleTest(role, name, self.columns[name], whole))
        self.baselines = np.stack([*map(self._baseline, self.tests)], -1)
        self.limits = np.stack([*map(self._limit, self.tests, self.baselines.T)], -1)
        # For shares, use the test that belongs to their intervals, with the same arguments as in `measure_intervals`.
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
        # For other measures, use Student's t. Their intervals allow for texts of a kind that the sample lacks, but the
        # t-test does not. So p is at least 0.5 unless the whole interval is above the limit.
        min_p = np.where(self.low[:, columns] > self.limits, 0.0, 0.5)
        p_of_others = np.maximum(test_sums.p_above(self.limits), min_p)
        p = np.where(kinds.are_shares, p_of_shares, p_of_others)
        self.effective = test_sums.sample().n_texts
        self.p = np.where(self.effective < MIN_TESTED_TEXTS, np.nan, p)
        # Combine the tests of each role into one p-value.
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
            # A token and its copies are the most similar keys, so the baseline is the attention to these. The suffix is
            # "" or "_active".
            suffix = test.measure.removeprefix(test.whole)
            is_same = np.isin(self.kind_sums.names, [f"self_token{suffix}", f"same_token{suffix}"])
            attention = self.sums[:, is_same].sum(-1)
            baseline = np.fmax(baseline, divide(attention, self.counts[:, test.column]))
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
        # A whole measure must be defined for enough queries. All queries count in "resting", the attention to sinks.
        # The count of an `_active` measure is the attention of its queries outside sinks. This must be enough, too.
        if rule.is_sink or not test.is_active:
            is_untested |= self._count_share(self.columns[test.whole], "resting", 1.0) < rule.min_defined
        if test.is_active:
            is_untested |= self._count_share(test.column, test.whole, 0.0) < MIN_ACTIVE_SHARE
        if rule.excludes_diffuse and "relative_entropy" in self.columns:
            is_untested |= self.values[:, self.columns["relative_entropy"]] > self._diffuse_limit()
        return np.where(is_untested, np.nan, limit)

    def _diffuse_limit(self) -> Floats:
        """Return the relative entropy above which a head is diffuse, (head,).

        A head at a distance of d nats from uniform attention over n keys has the relative entropy 1 - d / ln n. For the
        same d, it is 0.78 in a sentence of 25 tokens and 0.89 in a text of 500 tokens. So the threshold t is turned
        into a distance, by a text of REFERENCE_KEYS keys: d = (1 - t) ln REFERENCE_KEYS. For t = 0.9, d is ln 2: the
        head spreads as if evenly over half of its keys.

        The mean of ln n over queries is the entropy of uniform attention.
        """
        log_keys = np.full(len(self.values), np.nan)
        if "entropy_nats" in self.columns:
            log_keys = self.uniform[:, self.columns["entropy_nats"]]
        # In short texts, the limit is the threshold itself. This also holds if the entropy is not known (NaN).
        log_reference = math.log(REFERENCE_KEYS)
        log_keys = np.where(log_keys >= math.log(MIN_RESCALED_KEYS), log_keys, log_reference)
        return 1 - (1 - self.thresholds["diffuse"]) * log_reference / log_keys

    def _count_share(self, column: int, other_name: str, missing: float) -> Floats:
        """Return the count of a measure divided by the count of another measure, 0 to 1, (head,).

        For an `_active` measure and its whole measure, it is the share of attention outside sinks, of the queries that
        the measure counts. It is not 1 - resting, as a learned sink is no key: attention to it is neither resting nor
        active.

        Args:
            column: The index of the measure.
            other_name: The name of the other measure.
            missing: The result if the other measure was not measured.
        """
        if other_name not in self.columns:
            return np.full(len(self.values), missing)
        return divide(self.counts[:, column], self.counts[:, self.columns[other_name]], 0.0)

    def make_table(self, roles: Sequence[str]) -> Table:
        """Return the table of all heads: their measures, and the names of their roles, one string for each head."""
        resting = np.full(len(self.values), np.nan)
        if "resting" in self.columns:
            resting = self.values[:, self.columns["resting"]]
        kinds = [self.kind_sums.kind] * len(self.heads)
        layers = np.array(self.kind_sums.layers, np.int64)[self.layers]
        return make_heads_table(
            (kinds, layers, self.heads),
            [*map(make_measure_column, self.kind_sums.names)],
            roles=roles,
            sink_shares=resting,
            value=self.values,
            low=self.low,
            high=self.high,
            baseline=self.uniform,
            count=self.counts * self.kind_sums.queries_per_count,
        )

    def list_roles(self, head: int, q: Floats, max_p: float) -> list[dict[str, Any]]:
        """List the roles of a head as rows of the table `roles`: the strongest role first, but sinks last.

        Args:
            head: The index of the head on the head axis.
            q: The q-values of its roles, `role_p` after Benjamini-Hochberg, (role,).
            max_p: The largest p-value that gives a role.
        """
        roles = []
        values = self.values[head]
        for number, (name, rule) in enumerate(RULES.items()):
            # `not <=` also skips NaN: the role was not tested.
            if not q[number] <= LEVEL:
                continue
            # Show the best of the tests that pass: whole measures before `_active` ones, then the largest value.
            passed = np.flatnonzero((self.role_of_test == name) & (self.p[head] <= max_p))
            best = max(passed, key=lambda i: (not self.tests[i].is_active, values[self.tests[i].column]))
            test = self.tests[best]
            interval = self.low[head, test.column], self.high[head, test.column]
            threshold = self.thresholds[name]
            if rule.rescales_threshold:
                threshold = self.limits[head, best]
            active_share = None
            if test.is_active:
                active_share = self._count_share(test.column, test.whole, 0.0)[head]
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

        def sort_key(role: dict[str, Any]) -> tuple[bool, float]:
            return RULES[role["role"]].is_sink, -role["value"].value / role["threshold"]

        return sorted(roles, key=sort_key)
