"""Declare the options of `attnscope training` and `attnscope.training`. Loads nothing heavy."""

from __future__ import annotations

from dataclasses import replace

from attnscope.errors import UsageError, require_choice
from attnscope.options import group, option, options, read_names
from attnscope.studies.heads.options import DescribeOptions, HeadsOptions
from attnscope.studies.inputs.options import LoadOptions

MEASURES = ("previous_token", "induction", "first_token", "entropy_nats")
"""The measures that are followed by default."""

EXPLAINED = "explained"
"""The measure that is the share of a head's attention that its description explains."""


def known_measures() -> tuple[str, ...]:
    """Return the measures that can be followed."""
    from attnscope.core.catalogue import measure_names

    return (*measure_names(), EXPLAINED)


def _measures(listed: str) -> tuple[str, ...]:
    return read_names(listed, known_measures(), "measure")


def _composition(listed: str) -> tuple[str, ...]:
    from attnscope.questions.weights import COMPOSITIONS

    return tuple(by.upper() for by in read_names(listed, [by.lower() for by in COMPOSITIONS], "composition"))


@options
class TrainingHeads(HeadsOptions):
    """Hold the options for studying the heads of a checkpoint."""

    chunk: int | None = option("Cut long texts into chunks of this many tokens.", default=None, python_only=True)
    control: bool = option("There is none.", default=False, python_only=True)
    causal: bool = option("No head is ablated.", default=False, python_only=True)


@options
class TrainingOptions:
    """Hold the measures, compositions and roles that are followed."""

    measures: tuple[str, ...] = option(
        "Measures to follow, such as induction,entropy_nats; explained: how well a head's description predicts it.  "
        "[default: previous_token, induction, first_token, entropy_nats]",
        default=MEASURES,
        read=_measures,
        complete="measures",
    )
    composition: tuple[str, ...] = option(
        "Also follow which heads read what others write, by the weights: Q, K or V, or several with commas.",
        default=(),
        read=_composition,
    )
    loss: str = option(
        "auto: also the loss of each checkpoint on the texts, by what the model's head predicts; none: leave it out.",
        default="auto",
        choices=("auto", "none"),
    )
    heads: HeadsOptions = group(TrainingHeads)
    describe: DescribeOptions | None = option(
        "How heads are described, for explained; None = as usual.", default=None, python_only=True
    )
    loading: LoadOptions = option("How models are loaded.", default_factory=LoadOptions, python_only=True)

    def require(self) -> None:
        """Refuse measures, compositions and roles that there are not, and what a training does not have."""
        from attnscope.questions.weights import COMPOSITIONS
        from attnscope.studies.heads.roles import complete_thresholds

        complete_thresholds(self.heads.thresholds)
        names = known_measures()
        for name in self.measures:
            require_choice("measure", name, names)
        if unknown := [by for by in self.composition if by not in COMPOSITIONS]:
            raise UsageError(f"there is no {unknown[0]!r} composition", f"choose from {', '.join(COMPOSITIONS)}")
        if not self.measures:
            raise UsageError("no measure is given", f"choose from {', '.join(names)}")
        heads = self.heads
        if heads.control or heads.causal:
            raise UsageError("a study of training has no control and ablates no head", "leave them out")

    @property
    def heads_options(self) -> HeadsOptions:
        """Return how the heads of each checkpoint are studied."""
        described = EXPLAINED in self.measures
        return replace(self.heads, describe=(self.describe or DescribeOptions()) if described else None)
