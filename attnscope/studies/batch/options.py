"""Declare the options of `attnscope batch`, which draws many texts. Imports neither torch nor matplotlib."""

from dataclasses import field

from attnscope.choice import BetweenOptions, Choice, TokenOptions
from attnscope.drawing.style import Style
from attnscope.options import group, option, options, read_names
from attnscope.results.kinds import KINDS
from attnscope.studies.inputs.options import LoadOptions, WorkerOptions
from attnscope.studies.maps.options import MapOptions


def _read_formats(text: str) -> tuple[str, ...]:
    """Read the value of --format, such as "png,npz", and refuse formats that a heatmap cannot be saved in."""
    return read_names(text, KINDS["heatmap"].formats, "format")


@options
class BatchOptions:
    """Hold the options for drawing texts.

    `option` declares a command-line option, and `group` includes the options of another class. The command line fills
    the fields without either, `loading` and `style`, from options that several commands share.
    """

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
        """Refuse options that contradict each other: the constructor of `MapOptions` raises `UsageError`."""
        _ = self.maps

    @property
    def maps(self) -> MapOptions:
        """Return the options for computing the attention maps of each text."""
        return MapOptions(choice=self.choice, between=self.between, **vars(self.tokens))
