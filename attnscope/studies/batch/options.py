"""Declare the options for drawing many texts. Loads nothing heavy."""

from dataclasses import field

from attnscope.choice import BetweenOptions, Choice, TokenOptions
from attnscope.drawing.style import Style
from attnscope.options import group, option, options, read_names
from attnscope.results.kinds import KINDS
from attnscope.studies.inputs.options import LoadOptions, WorkerOptions
from attnscope.studies.maps.options import MapOptions


def _read_formats(listed: str) -> tuple[str, ...]:
    return read_names(listed, KINDS["heatmap"].formats, "format")


@options
class BatchOptions:
    """Hold the options for drawing texts."""

    choice: Choice = group(Choice)
    tokens: TokenOptions = group(TokenOptions)
    between: BetweenOptions = group(BetweenOptions)
    chat: bool = option(
        "Put each text into the model's chat template.", default=False, panel="Text", rare=True
    )
    generate: int = option(
        "Let a decoder write this many tokens, and show them too.",
        default=0,
        least=0,
        most=10000,
        panel="Text",
    )
    formats: tuple[str, ...] = option(
        "What to write: several of png, svg, pdf, npz, json.",
        "-f",
        "--format",
        default=("png",),
        read=_read_formats,
        default_text="png",
        panel="Output",
    )
    running: WorkerOptions = group(WorkerOptions)
    loading: LoadOptions = field(default_factory=LoadOptions)
    style: Style = field(default_factory=Style)

    def require(self) -> None:
        """Refuse options that contradict each other: `MapOptions` refuses them when it is made."""
        _ = self.maps

    @property
    def maps(self) -> MapOptions:
        """Return the options of the maps of each text."""
        return MapOptions(choice=self.choice, between=self.between, **vars(self.tokens))
