"""Declare options that several commands share: the model, printed output, files of results, and drawing figures.

Each class is a group of options. `attnscope.cli.build` makes flags of the fields of a group.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from attnscope.options import group, option, options, read_columns
from attnscope.studies.inputs.options import LoadOptions

if TYPE_CHECKING:
    from attnscope.models import Model
    from attnscope.output import Output
    from attnscope.results.kinds import ResultKind


@options
class ModelOptions:
    """Hold the options for the model, and for loading it."""

    PANEL: ClassVar[str] = "Model"

    model: str = option(
        "A known name (see `attnscope models`), a folder, or a Hub id.",
        "-m",
        "--model",
        default="minilm",
        completion="models",
    )
    loading: LoadOptions = group(LoadOptions)

    def load(self) -> Model:
        """Load the model."""
        return self.loading.load(self.model)

    def load_with_head(self) -> Model:
        """Load the model with its prediction head for masked words or classes, if it has one."""
        return self.loading.with_head(self.model).load(self.model)


@options
class PrintingOptions:
    """Hold the options for output on stdout and stderr."""

    PANEL: ClassVar[str] = "Output"

    json: bool = option("Print one JSON document.", default=False)
    quiet: bool = option("No notes and no progress on stderr.", "-q", "--quiet", default=False)


@options
class FileOptions(PrintingOptions):
    """Hold the options for results: files and printed output."""

    out: Path | None = option(
        "The folder to write to; for a single file its name, such as map.png.",
        "-o",
        "--out",
        default=None,
    )
    formats: str | None = option("Formats: {formats}.", "-f", "--format", default=None)
    columns: tuple[str, ...] = option(
        "Columns of csv, latex and md, such as layer,head,role.",
        default=(),
        read=read_columns,
        rare=True,
    )
    every: bool = option(
        "Print everything that was found, also what few need to know.", "--all", default=False
    )

    def plan_output(self, kind: str, **record_options: Any) -> Output:
        """Return the checked plan for writing and printing a record, before the study runs: wrong options fail at once.

        Args:
            kind: The kind of record, such as "heads"; see `attnscope.results.kinds`.
            record_options: Further options of this kind of record, by name, such as `query`.

        Raises:
            UsageError: A format is unknown, or there is no folder for files.
            AttnscopeError: The folder cannot be written.
        """
        from attnscope.output import plan
        from attnscope.results.kinds import KINDS

        return plan(kind, **self.output_options(KINDS[kind]), **record_options)

    def output_options(self, kind: ResultKind) -> dict[str, Any]:
        """Return the keyword arguments that `output.plan` and `output.show` take from this group, for one kind."""
        output_options = dict(vars(self))
        # Records of some kinds have no option `every` (--all): for them, --all changes nothing.
        if not self.every or "every" not in kind.options:
            del output_options["every"]
        return output_options


@options
class DrawingOptions:
    """Hold the options for drawing figures."""

    PANEL: ClassVar[str] = "Drawing"

    width: str | None = option(
        "Width of each figure: inches, 85mm, 8.5cm, column (3.3 inches) or page (6.9).  [default: as wide as needed]",
        default=None,
        rare=True,
    )
    dpi: int | None = option(
        "Pixels per inch of a PNG.  [default: 100; 300 with --width]", default=None, rare=True
    )
    font_size: float | None = option(
        "Size in points of the smallest letters.  [default: fitted to the figure; 6.5 with --width, labels from 4.5]",
        default=None,
        rare=True,
    )
    caption: bool = option(
        "Leave out the title and the notes of figures, for papers; the names of heads stay.",
        "--no-caption",
        default=True,
        rare=True,
    )
    font: str | None = option(
        "The font to try first, for any script: an installed family, or a file.", default=None, rare=True
    )

    def non_default_options(self) -> dict[str, Any]:
        """Return the options that differ from their defaults, by name, as arguments for a record's method `draw`."""
        changed_options = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value != field.default:
                changed_options[field.name] = value
        return changed_options


@options
class MapDrawingOptions(DrawingOptions):
    """Hold the options for drawing figures of attention weights."""

    scale: str | None = option(
        "The weight of the darkest colour: 1 (fixed), each head's largest (head), the figure's (figure).  "
        "[default: fixed; head for pictures and sound, figure for --rollout]",
        default=None,
        rare=True,
    )
    colours: str | None = option(
        "How weights become colours: linear, or log, over four powers of ten, with a logarithmic bar.",
        default=None,
        rare=True,
        choices=("linear", "log"),
    )
    smooth: bool = option(
        "Interpolate what is laid over a photo, in place of a square per patch.",
        default=False,
        rare=True,
    )
    layout: str | None = option(
        "Rows and columns of the maps of picked heads: 2x1 stacks two on one axis, 1x2 puts them side by side.",
        default=None,
        rare=True,
    )
    cmap: str | None = option(
        "A matplotlib colormap, such as viridis or Greys.  [default: Blues]", default=None, rare=True
    )
