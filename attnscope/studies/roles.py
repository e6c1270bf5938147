"""From sums to evidence: the value of each measure with its interval, and the roles that survive the test.

A role is given to a head where its measure is above both a threshold and what chance would give (uniform attention, or
the best fixed offset), by a one-sided test over texts, with the false discovery rate of all heads x roles held.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from attnscope.core.running import benjamini_hochberg
from attnscope.errors import UsageError
from attnscope.findings import Estimate, Head, Role
from attnscope.studies.tally import PAIR_MEASURES, Tally

LEVEL = 0.05
"""The false discovery rate over heads x roles (Benjamini & Hochberg 1995)."""

FEWEST_TEXTS = 10
"""With fewer texts roles are tentative: said without interval and test."""

LEAST_ACTIVE = 0.1
"""A role may rest on an `_active` measure where at least this share of the attention is off the resting keys."""

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Rule:
    """What gives a head a role.

    Attributes:
        what: The role in a few words.
        measures: The measures of which one must be above the threshold, whole or `_active`.
        threshold: The threshold.
        beats_uniform: Whether the measure must be above its value under uniform attention too.
        least_defined: For what share of the queries the measure must be defined at least. A separator at the end of a
            text is hidden from all but itself in a causal layer: that says nothing about a head.
    """

    what: str
    measures: tuple[str, ...]
    threshold: float
    beats_uniform: bool = True
    least_defined: float = 0.0


RULES: dict[str, Rule] = {
    "previous_token": Rule("attends to the token before", ("previous_token",), 0.4),
    "next_token": Rule("attends to the token after", ("next_token",), 0.4),
    "self_token": Rule("attends to the token itself", ("self_token",), 0.4),
    "same_token": Rule("attends to the same token elsewhere", ("same_token",), 0.4),
    "induction": Rule("attends to what came after the same token before (Olsson 2022)", ("induction",), 0.4),
    "local": Rule("attends to tokens at most 3 away", ("window",), 0.6),
    "first_token": Rule("rests on the first token: a sink (Gu 2024)", ("first_token",), 0.3),
    "delimiter": Rule("attends to punctuation or separators", ("punctuation", "sep"), 0.5, least_defined=0.5),
    "rare": Rule("has its largest weight on the rarest token", ("rarest_token",), 0.4),
    "diffuse": Rule("spreads over all tokens alike", ("relative_entropy",), 0.9, beats_uniform=False),
    "similar_token": Rule("attends to tokens of similar meaning", ("similar_token",), 0.2),
}


def thresholds_from(given: Iterable[str]) -> dict[str, float]:
    """Thresholds by role, from strings such as `induction=0.3`; the others as in RULES.

    Raises:
        UsageError: There is no such role, or no such number.
    """
    found = {name: rule.threshold for name, rule in RULES.items()}
    for item in given:
        name, _, number = item.partition("=")
        if name not in RULES:
            raise UsageError(f"there is no role {name!r}", f"choose from {', '.join(RULES)}")
        try:
            found[name] = float(number)
        except ValueError:
            raise UsageError(f"{number!r} is no threshold for {name}", f"such as {name}=0.3") from None
        if not 0 < found[name] <= 1:
            raise UsageError(f"the threshold of {name} is {number}", "thresholds are above 0 and at most 1")
    return found


def judged(tallies: Sequence[Tally], thresholds: Mapping[str, float]) -> tuple[Head, ...]:
    """Every head with its measures and roles, by kind, layer, head."""
    held = [_Judged(tally) for tally in tallies]
    tests = [test for one in held for test in one.tests(thresholds)]
    q_values = benjamini_hochberg([test.role.p for test in tests])
    by_head: dict[tuple[str, int, int], list[Role]] = {}
    for test, q in zip(tests, q_values.tolist(), strict=True):
        role = replace(test.role, q=q)
        above = role.value > max(role.threshold, role.baseline)
        if (role.tentative and above) or (not role.tentative and q <= LEVEL):
            by_head.setdefault(test.head, []).append(role)
    return tuple(head for one in held for head in one.heads(by_head))


@dataclass(frozen=True)
class _Test:
    head: tuple[str, int, int]
    role: Role


class _Judged:
    """The results of one tally as arrays, computed once."""

    def __init__(self, tally: Tally) -> None:
        self.tally = tally
        self.values = tally.measures.ratio()
        self.counts = tally.measures.total("c")
        self.uniform = tally.uniform.ratio()
        self.low, self.high = tally.measures.interval()
        self.n_layers, self.n_heads = self.values.shape[:2]
        shares = tally.offsets.ratio()
        known = np.where(np.isnan(shares), -1.0, shares)
        self.best = known.argmax(-1)
        self.positional = np.take_along_axis(shares, self.best[..., None], -1)[..., 0]
        uniform = tally.offsets_uniform.ratio()
        self.positional_uniform = np.take_along_axis(uniform, self.best[..., None], -1)[..., 0]
        lows, highs = tally.offsets.interval()
        self.positional_ends = tuple(
            np.take_along_axis(ends, self.best[..., None], -1)[..., 0] for ends in (lows, highs)
        )

    def column(self, name: str) -> int:
        return self.tally.names.index(name)

    def tests(self, thresholds: Mapping[str, float]) -> list[_Test]:
        """One test for every head, role and measure that the role may rest on; NaN where there is nothing to test."""
        fixed = self._fixed_offset()
        made: list[_Test] = []
        for name, rule in RULES.items():
            for measure in (m for base in rule.measures for m in (base, f"{base}_active") if m in self.tally.names):
                column = self.column(measure)
                if rule.least_defined and self._share_defined(column) < rule.least_defined:
                    continue
                baseline = np.full((self.n_layers, self.n_heads), -math.inf)
                if rule.beats_uniform:
                    baseline = np.fmax(baseline, self.uniform[..., column])
                baseline = np.fmax(baseline, fixed.get(measure.removesuffix("_active"), -math.inf))
                made += self._tests_of(name, measure, column, thresholds[name], baseline)
        return made

    def _tests_of(self, name: str, measure: str, column: int, threshold: float, baseline: Floats) -> list[_Test]:
        limit = np.maximum(threshold, baseline)
        tentative = self.tally.n_texts < FEWEST_TEXTS
        limits = np.full(self.values.shape, np.nan)
        limits[..., column] = limit
        p = self.tally.measures.p_above(limits)[..., column]
        active = self._active_share() if measure.endswith("_active") else None
        made = []
        for layer, head in np.ndindex(self.n_layers, self.n_heads):
            if np.isnan(self.values[layer, head, column]):
                continue
            if active is not None and not active[layer, head] >= LEAST_ACTIVE:
                continue
            at = (layer, head, column)
            role = Role(
                name=name,
                measure=measure,
                value=float(self.values[at]),
                low=math.nan if tentative else float(self.low[at]),
                high=math.nan if tentative else float(self.high[at]),
                baseline=float(baseline[layer, head]) if math.isfinite(baseline[layer, head]) else math.nan,
                threshold=threshold,
                p=math.nan if tentative else float(p[layer, head]),
                q=math.nan,
                tentative=tentative,
                active_share=None if active is None else float(active[layer, head]),
            )
            made.append(_Test((self.tally.kind, self.tally.layers[layer], head), role))
        return made

    def heads(self, roles: Mapping[tuple[str, int, int], Sequence[Role]]) -> list[Head]:
        """All heads of the tally, each with the best evidence for each of its roles."""
        made = []
        for layer, head in np.ndindex(self.n_layers, self.n_heads):
            if np.isnan(self.values[layer, head]).all():
                continue
            name = (self.tally.kind, self.tally.layers[layer], head)
            best: dict[str, Role] = {}
            for role in roles.get(name, ()):
                # The whole measure says more than its active part; of two alike, the one further above its limit.
                rank = (role.active_share is None, role.value)
                known = best.get(role.name)
                if known is None or rank > (known.active_share is None, known.value):
                    best[role.name] = role
            ordered = sorted(best.values(), key=lambda role: -role.value / role.threshold)
            measures = {
                measure: Estimate(
                    *(float(a[layer, head, i]) for a in (self.values, self.low, self.high, self.uniform, self.counts))
                )
                for i, measure in enumerate(self.tally.names)
            }
            measures["positional"] = Estimate(
                float(self.positional[layer, head]),
                float(self.positional_ends[0][layer, head]),
                float(self.positional_ends[1][layer, head]),
                float(self.positional_uniform[layer, head]),
                float(self.tally.offsets.total("c")[layer, head, self.best[layer, head]]),
            )
            resting = measures["resting"].value if "resting" in measures else math.nan
            made.append(Head(*name, tuple(ordered), resting, measures))
        return made

    def _share_defined(self, column: int) -> float:
        """For what share of the queries a measure is defined; 1 for an `_active` one, whose count is a mass."""
        if self.tally.names[column].endswith("_active") or "resting" not in self.tally.names:
            return 1.0
        every = self.counts[..., self.column("resting")].sum()
        return float(self.counts[..., column].sum() / every) if every else 0.0

    def _active_share(self) -> Floats:
        if "resting" not in self.tally.names:
            return np.zeros((self.n_layers, self.n_heads))
        return 1 - self.values[..., self.column("resting")]

    def _fixed_offset(self) -> dict[str, float]:
        """What the best head of a fixed offset would reach on the pair measures."""
        shares = self.tally.pairs.ratio()
        best = np.max(np.where(np.isnan(shares), -math.inf, shares), axis=1)
        return {name: float(best[row]) for row, name in enumerate(PAIR_MEASURES) if math.isfinite(best[row])}
