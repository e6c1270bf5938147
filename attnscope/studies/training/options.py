"""What `attnscope training` and `attnscope.training` are asked with. Loads nothing heavy."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from attnscope.errors import UsageError, require_choice
from attnscope.options import group, option, options, read_names
from attnscope.studies.heads.options import HeadsOptions
from attnscope.studies.inputs.options import LoadOptions

if TYPE_CHECKING:
    from attnscope.studies.describe.sample import DescribeOptions

MEASURES = ("previous_token", "induction", "first_token", "entropy_nats")
"""What is followed where nothing else is asked for."""

EXPLAINED = "explained"
"""The measure that is the share of a head's attention that its description explains."""


def known_measures() -> tuple[str, ...]:
    """The measures that can be followed."""
    from attnscope.core.measures.catalogue import FROM_OFFSETS, measure_names

    return (*measure_names(), FROM_OFFSETS, EXPLAINED)


def _measures(listed: str) -> tuple[str, ...]:
    return read_names(listed, known_measures(), "measure")


def _composition(listed: str) -> tuple[str, ...]:
    from attnscope.records.weights import COMPOSITIONS

    return tuple(by.upper() for by in read_names(listed, [by.lower() for by in COMPOSITIONS], "composition"))


@options
class TrainingOptions:
    """What is followed."""

    measures: tuple[str, ...] = option(
        "Measures to follow, such as induction,entropy_nats; explained: how well a head's description predicts it.  "
        "[default: previous_token, induction, first_token, entropy_nats]",
        default=MEASURES, read=_measures, complete="measures",
    )  # fmt: skip
    composition: tuple[str, ...] = option(
        "Also follow which heads read what others write, by the weights: Q, K or V, or several with commas.",
        default=(), read=_composition,
    )  # fmt: skip
    loss: bool = option("Leave out the loss of each checkpoint on the texts.", "--no-loss", default=True)
    heads: HeadsOptions = group(HeadsOptions)
    describe: DescribeOptions | None = option(
        "How heads are described, for explained; None = as usual.", default=None, python_only=True
    )
    loading: LoadOptions = option("How models are loaded.", default_factory=LoadOptions, python_only=True)

    def require(self) -> None:
        """Refuses measures, compositions and roles that there are not, and what a training does not have."""
        from attnscope.records.weights import COMPOSITIONS
        from attnscope.studies.heads.rules import complete_thresholds

        complete_thresholds(self.heads.thresholds)
        names = known_measures()
        for name in self.measures:
            require_choice("measure", name, names)
        if unknown := [by for by in self.composition if by not in COMPOSITIONS]:
            raise UsageError(f"there is no {unknown[0]!r} composition", f"choose from {', '.join(COMPOSITIONS)}")
        if not self.measures:
            raise UsageError("no measure is given", f"choose from {', '.join(names)}")
        heads = self.heads
        if heads.control or heads.causal or heads.describe is not None:
            raise UsageError("a study of training has no control", "leave them out; descriptions: EXPLAINED")

    @property
    def heads_options(self) -> HeadsOptions:
        """How the heads of each checkpoint are studied."""
        from attnscope.studies.describe.sample import DescribeOptions

        described = EXPLAINED in self.measures
        return replace(self.heads, describe=(self.describe or DescribeOptions()) if described else None)
