"""The roles that heads can have: what each asks for, and its threshold."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from attnscope.errors import UsageError


@dataclass(frozen=True)
class Rule:
    """What gives a head a role.

    Attributes:
        what: The role in a few words.
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
        """The role as a record lists it."""
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
        "attends to tokens of outlying norm: second sinks (Sun 2024)", ("outlier_token",), 0.3,
        least_defined=0.1, is_sink=True,
    ),
    "delimiter": Rule("attends to punctuation or separators", ("punctuation", "sep"), 0.5, least_defined=0.5),
    "rare": Rule("has its largest weight on the rarest token", ("rarest_token",), 0.4, needs_preference=True),
    "diffuse": Rule("spreads over all tokens alike", ("relative_entropy",), 0.9, beats_uniform=False, any_length=True),
    "similar_token": Rule("attends to tokens like it, beyond the same token", ("similar_token",), 0.2),
}  # fmt: skip
"""Roles by name."""


def complete_thresholds(chosen: Mapping[str, float], usual: Mapping[str, float] | None = None) -> dict[str, float]:
    """Thresholds by role: the chosen ones; the others as usual, None = as in RULES.

    Raises:
        UsageError: There is no such role.
    """
    usual = {name: rule.threshold for name, rule in RULES.items()} if usual is None else usual
    for name in chosen:
        if name not in usual:
            raise UsageError(f"there is no role {name!r}", f"choose from {', '.join(usual)}")
    return {**usual, **chosen}
