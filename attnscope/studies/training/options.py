"""Declare the options of `attnscope training` and `attnscope.training`. Loads neither torch nor NumPy."""

from attnscope.errors import UsageError, require_choice
from attnscope.options import group, option, options, read_names
from attnscope.studies.heads.options import HeadsOptions
from attnscope.studies.inputs.options import LoadOptions

MEASURES = ("previous_token", "induction", "first_token", "entropy_nats")
"""The head measures that are followed over the steps by default."""


def _read_measures(comma_list: str) -> tuple[str, ...]:
    """Return the measures in a list such as "induction,entropy_nats"; refuse unknown measures."""
    from attnscope.core.catalogue import measure_names

    return read_names(comma_list, measure_names(), "measure")


@options
class TrainingHeads(HeadsOptions):
    """Hold the options for studying the heads of a checkpoint.

    It redefines three options of `attnscope heads`, so that they are no flags of `attnscope training`.
    """

    chunk: int | None = option(
        "Cut long texts into chunks of this many tokens.", default=None, python_only=True
    )
    control: bool = option("There is none.", default=False, python_only=True)
    causal: bool = option("No head is ablated.", default=False, python_only=True)


@options
class TrainingOptions:
    """Hold the options of a study of training: what is followed over the steps, and how models are loaded."""

    measures: tuple[str, ...] = option(
        "Measures to follow, such as induction,entropy_nats.  "
        "[default: previous_token, induction, first_token, entropy_nats]",
        default=MEASURES,
        read=_read_measures,
    )
    loss: str = option(
        "auto (also the loss of each checkpoint on the texts, by what the model's head predicts) or none.",
        default="auto",
        choices=("auto", "none"),
    )
    heads: HeadsOptions = group(TrainingHeads)
    loading: LoadOptions = option(
        "How models are loaded.", default_factory=LoadOptions, python_only=True
    )

    def require(self) -> None:
        """Refuse unknown measures and roles, an empty list of measures, and a control or ablation of the heads."""
        from attnscope.core.catalogue import measure_names
        from attnscope.studies.heads.roles import complete_thresholds

        # Called only to raise: it refuses unknown roles.
        complete_thresholds(self.heads.thresholds)
        for name in self.measures:
            require_choice("measure", name, measure_names())
        if not self.measures:
            raise UsageError("no measure is given", f"choose from {', '.join(measure_names())}")
        if self.heads.control or self.heads.causal:
            raise UsageError("a study of training has no control and ablates no head", "leave them out")
