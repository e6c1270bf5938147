"""The roles that heads can have: what each asks for, and its threshold."""

from collections.abc import Mapping
from dataclasses import dataclass

from attnscope.errors import UsageError


@dataclass(frozen=True)
class Rule:
    """What gives a head a role.

    Attributes:
        what: The role in a few words.
        measures: The measures of which one must be above the threshold, whole or `_active`.
        threshold: The threshold.
        beats_uniform: Whether the measure must be above its value under uniform attention too.
        least_defined: For what share of the queries the measure must be defined at least. A separator at the end of a
            text is hidden from all but itself in a causal layer, and the first token from most queries in a layer
            whose window is a few tokens: that says nothing about a head.
        any_length: Whether the threshold is a distance from uniform attention, so that it asks the same of short
            texts and of long ones; see `_Judged._even_enough`.
        needs_preference: Whether heads that spread over all tokens alike are left out: where all weights are nearly the
            same, which of them is the largest says nothing.
        is_sink: Whether it names a sink, and says nothing of what a head does elsewhere: it is named after all others.
        does: Of a role of behaviour, what the head does in a few words, to stand beside where it looks; such roles are
            named after those of where heads look. Empty of others.
        weight: Of a role of behaviour, the measure of where it looks, that must be above BEHAVIOUR_WEIGHT too.
        share: Of a role of behaviour, the measure of how much of a head's attention it is about: LEAST_ACTIVE or more.
    """

    what: str
    measures: tuple[str, ...]
    threshold: float
    beats_uniform: bool = True
    least_defined: float = 0.0
    any_length: bool = False
    needs_preference: bool = False
    is_sink: bool = False
    does: str = ""
    weight: str = ""
    share: str = ""


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
    "copying": Rule(
        "attends to the token that comes next, and raises its logit (Wang 2023)",
        ("copying_nats",),
        0.1,
        does="copies what comes",
        weight="copying_weight",
        share="copying_share",
    ),
    "copy_suppression": Rule(
        "attends to a token that the rest of the model would copy, and lowers its logit (McDougall 2023)",
        ("suppression_nats",),
        0.1,
        does="lowers what others would copy",
        weight="suppression_weight",
        share="suppression_share",
    ),
    "induction_by_effect": Rule(
        "attends to what came after the same token before, and raises its logit (Olsson 2022)",
        ("induction_nats",),
        0.1,
        does="raises what followed",
        weight="induction_weight",
        share="induction_share",
    ),
}
"""Roles by name. Those of behaviour are given where it is measured what heads write (`heads --writes`)."""


def complete_thresholds(asked: Mapping[str, float], known: Mapping[str, float] | None = None) -> dict[str, float]:
    """Thresholds by role: those that are asked for; the others as in `known`, None = RULES.

    Raises:
        UsageError: There is no such role.
    """
    usual = {name: rule.threshold for name, rule in RULES.items()} if known is None else known
    for name in asked:
        if name not in usual:
            raise UsageError(f"there is no role {name!r}", f"choose from {', '.join(usual)}")
    return {**usual, **asked}
