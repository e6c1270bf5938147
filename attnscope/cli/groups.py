"""Groups of options that travel together, and the decorator that expands them into the signature of a command.

A group is a frozen dataclass whose fields are annotated as typer's parameters are. It builds what a study is asked
with when it is called, so that the command line starts without studies, numpy or torch.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, get_args, get_origin, get_type_hints

import typer
from typer.models import OptionInfo

from attnscope.cli import options
from attnscope.errors import UsageError
from attnscope.options import heads_from, whole_numbers

if TYPE_CHECKING:
    from attnscope.output import Output
    from attnscope.studies.describe.study import DescribeOptions
    from attnscope.studies.heads.needles import NeedleOptions
    from attnscope.studies.inputs.options import LoadOptions, TextsWanted
    from attnscope.studies.inputs.reading import Prompt
    from attnscope.studies.running.workers import Workers
    from attnscope.views.drawing.style import Style


# The decorator --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Changed:
    """What one command says differently of an option of a group: its help, its default."""

    help: str | None = None
    default: Any = ...


def command(*, omit: Sequence[str] = (), **changed: str | Changed) -> Callable[[Callable[..., None]], Any]:
    """Makes a function whose parameters are options, and groups of them, a command of typer.

    A parameter whose type is a group becomes the group's fields, in their order and place; the function gets the
    group. A parameter of its own may be annotated with its help alone, `Annotated[int, "How many."]`: that is an
    option, or an argument where it has no default; a bool is a flag without a `--no-` form. Options of a group stand
    in the help under its `PANEL`; those of a parameter that belongs to none under what its annotation says third.

    Args:
        omit: Options of groups that the command does not have; their fields keep their defaults.
        changed: Options of groups of which the command says something else; a string is the help.

    Raises:
        TypeError: An option to omit or to change is in none of the groups.
    """

    def expand(function: Callable[..., None]) -> Callable[..., None]:
        parameters: list[inspect.Parameter] = []
        groups: dict[str, type] = {}
        known: set[str] = set()
        for own in inspect.signature(function).parameters.values():
            if not dataclasses.is_dataclass(own.annotation):
                parameters.append(_parameter(own.name, own.annotation, own.default))
                continue
            group: Any = own.annotation
            groups[own.name] = group
            known |= {field.name for _, field in _fields(group)}
            parameters += [
                _parameter(field.name, *_as_typer(of, field), changed.get(field.name), getattr(of, "PANEL", None))
                for of, field in _fields(group, omit)
            ]
        unknown = {*omit, *changed} - known
        if unknown:
            raise TypeError(f"{function.__name__} has no group with {', '.join(sorted(unknown))}")

        @functools.wraps(function)
        def run(**given: Any) -> None:
            for name, group in groups.items():
                values = {field.name: given.pop(field.name) for _, field in _fields(group, omit)}
                given[name] = _build(group, values)
            function(**given)

        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # what typer reads
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return expand


def _fields(group: Any, omit: Sequence[str] = ()) -> "Iterator[tuple[type, dataclasses.Field[Any]]]":
    """The fields of a group that the command line has, those of groups in it in their place; each with its group."""
    for field in dataclasses.fields(group):
        inner, known = field.metadata.get("group"), field.metadata.get("option")
        if inner is not None:
            yield from _fields(inner, omit)
        elif field.name not in omit and (known is None or not known.python_only):
            yield group, field


def _build(group: Any, values: dict[str, Any]) -> Any:
    """A group, and the groups in it, of values from the command line, by the names of fields."""
    fields = {}
    for field in dataclasses.fields(group):
        inner, known = field.metadata.get("group"), field.metadata.get("option")
        if inner is not None:
            fields[field.name] = _build(inner, values)
        elif field.name in values:
            value = values[field.name]
            if known is None:
                fields[field.name] = value
            elif value is not None:
                read = known.read or (tuple if isinstance(value, list) else None)
                fields[field.name] = value if read is None else read(value)
    return group(**fields)


@functools.cache
def _hints(group: type) -> dict[str, Any]:
    return get_type_hints(group, include_extras=True)


def _as_typer(group: type, field: "dataclasses.Field[Any]") -> tuple[Any, Any]:
    """How typer takes a field, and its default: of a study's options by their metadata, else by its annotation."""
    hint, known = _hints(group)[field.name], field.metadata.get("option")
    if known is None:
        return hint, field.default
    kind, default = hint, field.default
    if known.read is not None:
        kind, default = str if known.written is not None else str | None, known.written
    elif get_origin(hint) is tuple:
        several: Any = list
        kind, default = several[get_args(hint)[0]] | None, None
    flags = known.flags or [f"--{field.name.replace('_', '-')}"] * (kind is bool)
    complete = None if known.complete is None else getattr(options, f"complete_{known.complete}")
    about = typer.Option(*flags, help=known.help, min=known.least, max=known.most, autocompletion=complete)
    return Annotated[kind, about] if known.panel is None else Annotated[kind, about, known.panel], default


def _parameter(
    name: str, annotation: Any, default: Any, change: str | Changed | None = None, panel: str | None = None
) -> inspect.Parameter:
    """A parameter as typer takes it."""
    if get_origin(annotation) is Annotated:
        kind, about, *named = get_args(annotation)
        if isinstance(about, str) and default is inspect.Parameter.empty:
            about = typer.Argument(help=about)
        elif isinstance(about, str):
            about = typer.Option(*[f"--{name.replace('_', '-')}"] * (kind is bool), help=about)
        if change is not None:
            change = Changed(change) if isinstance(change, str) else change
            about, default = copy(about), default if change.default is ... else change.default
            about.help = change.help or about.help
        if isinstance(about, OptionInfo):
            about = copy(about)
            about.rich_help_panel = named[0] if named else panel
        annotation = Annotated[kind, about]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


# Which model, and how it runs -----------------------------------------------------------------------------------

Model = Annotated[
    str,
    typer.Option(
        "-m",
        "--model",
        help="A known name (see `attnscope models`), a folder, or a Hub id.",
        autocompletion=options.complete_models,
    ),
    "Model",
]


ModelToo = Annotated[
    str | None,
    typer.Option(
        "-m", "--model", help="The same as MODEL, as other commands take it.", autocompletion=options.complete_models
    ),
    "Model",
]


@dataclass(frozen=True)
class Loading:
    """How a model is loaded."""

    PANEL: ClassVar[str] = "Model"

    adapter: Annotated[
        Path | None, "The folder of an adapter of peft, such as LoRA, to merge into the model (needs the extra peft)."
    ] = None
    engine: Annotated[
        str,
        "native: attnscope's own attention, for BERT-family weights; hf: transformers; numpy: BERT-family weights "
        "without torch, to look at texts; auto: native where it can, numpy where a short text is only looked at.",
    ] = "auto"
    device: Annotated[
        str, "Where the model runs: cpu, cuda, cuda:1, mps; auto: the first there is of cuda, mps, cpu."
    ] = "cpu"
    dtype: Annotated[
        str, "Precision of the model: float32, bfloat16, float16, float64. Sums are float32 or better."
    ] = "float32"
    device_map: Annotated[
        str | None, "auto: spread a model that is too large over all devices (needs the extra accelerate)."
    ] = None
    no_check: Annotated[bool, "Skip comparing a Hugging Face model with its own eager attention."] = False
    allow_pickle: Annotated[bool, "Load weights that are pickles; those can run any code on your machine."] = False
    trust_remote_code: Annotated[bool, "Run Python code that comes with the model."] = False

    def options(self, **other: str) -> "LoadOptions":
        """The options of loading, with what a command knows better."""
        from attnscope.studies.inputs.options import LoadOptions

        given = {**vars(self), **other}
        return LoadOptions(check=not given.pop("no_check"), **given)


@dataclass(frozen=True)
class Running:
    """Which workers share the texts."""

    PANEL: ClassVar[str] = "Running"

    executor: Annotated[
        str, "Where workers live: local, on this machine; ray, on those of a Ray cluster (extra [ray])."
    ] = "local"
    workers: Annotated[
        int | None,
        "Workers that share the texts, each with its own model.  [default: this process; of Ray as many as fit]",
    ] = None
    threads: Annotated[
        int | None, "Threads that each worker computes with; more than 1 for large models.  [default: 1]"
    ] = None
    ray_address: Annotated[
        str | None,
        "Address of the cluster, such as 10.0.0.1:6379.  [default: as Ray finds it, else one is started here]",
    ] = None

    def share(self, model: str, loading: "LoadOptions") -> "Workers | None":
        """The workers of a study; None = it runs in this process."""
        from attnscope.studies.running.workers import workers_from

        return workers_from(
            model, loading, executor=self.executor, n=self.workers, threads=self.threads, address=self.ray_address
        )


# Which texts ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OneText:
    """A text as it is given, or in a file."""

    PANEL: ClassVar[str] = "Text"

    text: Annotated[str | None, typer.Argument(help="A text; `-` reads stdin.", show_default=False)] = None
    file: Annotated[Path | None, "Read the text from a file (UTF-8)."] = None

    def __post_init__(self) -> None:
        options.refuse_file_names(self.text)

    @property
    def given(self) -> bool:
        """Whether there is one."""
        return self.text is not None or self.file is not None

    def read(self, *, may_be_blank: bool = False) -> str:
        """The text."""
        from attnscope.text import read_text

        return read_text(self.text, self.file, may_be_blank=may_be_blank)


@dataclass(frozen=True)
class Texts:
    """A text, or the files that hold texts."""

    PANEL: ClassVar[str] = "Text"

    text: Annotated[str | None, typer.Argument(help="A text; `-` reads stdin.", show_default=False)] = None
    file: Annotated[
        list[str] | None,
        "Files, patterns, or addresses such as hf://datasets/org/name/*.parquet: txt, jsonl, csv, also .gz and .zst, "
        "parquet; may be given several times.",
    ] = None
    split: Annotated[str, "How a text file is split into texts: line, paragraph or file."] = "line"
    field: Annotated[str, "The field of jsonl, csv or parquet that holds the text."] = "text"

    def __post_init__(self) -> None:
        options.refuse_file_names(self.text)

    def wanted(self, files: Sequence[str] = ()) -> "TextsWanted":
        """The texts that are asked for; a command that takes files as arguments hands them over."""
        from attnscope.studies.inputs.options import TextsWanted

        return TextsWanted(self.text, tuple(files or self.file or ()), self.split, self.field)


@dataclass(frozen=True)
class Reading:
    """How a model is to read a text."""

    PANEL: ClassVar[str] = "Text"

    pair: Annotated[str | None, "A second text, for models that read pairs."] = None
    target: Annotated[str | None, "What an encoder-decoder is to write.  [default: its own greedy output]"] = None
    generate: Annotated[
        int, typer.Option(min=0, max=10000, help="Let a decoder write that many tokens, and show them too.")
    ] = 0
    chat: Annotated[bool, "Put each text into the model's chat template."] = False

    def prompt(self, text: str) -> "Prompt":
        """A text, to be read so."""
        from attnscope.studies.inputs.reading import Prompt

        return Prompt(text, **vars(self))


Image = Annotated[
    Path | None,
    "A photo, for vision transformers: attention is laid over it. --query is then CLS, REG0, a patch as ROW,COLUMN, "
    "or mean (over all patches).",
    "Text",
]


# Which heads and tokens, how drawn, and where to ----------------------------------------------------------------

Layer = Annotated[int | None, typer.Option("-L", "--layer", min=0, help="The layer, counted from 0."), "Heads"]


@dataclass(frozen=True)
class Drawing:
    """How figures are drawn."""

    PANEL: ClassVar[str] = "Drawing"

    scale: Annotated[
        str | None,
        "What the darkest colour means: weight 1 (fixed), each head's largest (head), the figure's (figure).",
    ] = None
    cmap: Annotated[str, "A matplotlib colormap, such as viridis or Greys."] = "Blues"
    width: Annotated[
        str | None,
        "Width of each figure in inches, exactly; or column (3.3), page (6.9).  [default: as wide as it needs to be]",
    ] = None
    dpi: Annotated[int | None, "Pixels an inch of a PNG.  [default: 100; 300 with --width]"] = None
    font_size: Annotated[
        float | None, "Size in points of the smallest letters.  [default: as it comes; 6.5 with --width]"
    ] = None
    no_title: Annotated[bool, "Leave out the titles of figures, as papers have captions; heads keep names."] = False
    font: Annotated[str | None, "A font to take first, for texts of any script: an installed family, or a file."] = None

    def options(self) -> dict[str, Any]:
        """What was asked for, by the names that `draw` of a record has for it."""
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        asked = {name: value for name, value in vars(self).items() if value != defaults[name]}
        return asked | {"title": False} if asked.pop("no_title", False) else asked

    def style(self) -> "Style":
        """The style."""
        from attnscope.views.drawing.style import Style

        return Style(**self.options())


@dataclass(frozen=True)
class Listing:
    """Which heads are listed with what they do."""

    PANEL: ClassVar[str] = "Heads"

    only: Annotated[
        str | None,
        typer.Option(
            "--where", help="List only the heads for which this holds, such as 'induction > 0.4 and layer > 3'."
        ),
    ] = None
    sort: Annotated[
        str | None,
        "List heads by layer, by explained (the best described first) or by entropy (the sharpest first).  "
        "[default: layer]",
    ] = None
    every: Annotated[
        bool, typer.Option("--all", help="List what every head attends to, not only the ten with most to say.")
    ] = False

    def shown(self) -> dict[str, Any]:
        """How they are shown, checked before a model runs."""
        from attnscope.records.heads.query import HeadQuery, require_sort

        require_sort(self.sort)
        if self.only is not None:
            HeadQuery(self.only)
        return {"where": self.only, "sort": self.sort, "every": self.every or None}


Thresholds = Annotated[
    list[str] | None,
    typer.Option(
        "--threshold",
        help="Threshold that a role must reach, such as induction=0.3.",
        autocompletion=options.complete_roles,
    ),
]
"""What roles must reach."""


@dataclass(frozen=True)
class Measuring:
    """How heads are measured and judged."""

    thresholds: Thresholds = None
    measures: Annotated[
        str | None,
        typer.Option(
            help="Also print these measures, such as entropy_nats,positional; all: every one. Figures of heads then "
            "have a large map of each.",
            autocompletion=options.complete_measures,
        ),
    ] = None
    chunk: Annotated[int | None, "Cut long texts into chunks of so many tokens."] = None
    stride: Annotated[int | None, "How many tokens further the next chunk begins; overlaps count once."] = None
    frequencies: Annotated[Path | None, "Counts of words (word, tab, count), instead of the corpus's own."] = None
    weigh: Annotated[
        Literal["texts", "queries"],
        "What weighs the same in measures and roles: all texts, or all queries, so that long texts weigh more.",
    ] = "texts"

    def order(self) -> dict[str, Any]:
        """What a `studies.heads_order.StudyOrder` is given of it."""
        return {**vars(self), "thresholds": tuple(self.thresholds or ())}


@dataclass(frozen=True)
class Needles:
    """What `--probe needle` hides, and where."""

    PANEL: ClassVar[str] = "Text"

    lengths: Annotated[str, "Of --probe needle: lengths of the texts in tokens, such as 1024,4096."] = "1024"
    depths: Annotated[str, "Of --probe needle: around which per cent of the text it stands."] = "0,25,50,75,100"
    needles: Annotated[int, typer.Option(min=1, help="Of --probe needle: how many of each length.")] = 50

    def options(self, probe: str | None, thresholds: Sequence[str], *, ablate: bool) -> "NeedleOptions | None":
        """What is to be hidden, and whether heads are taken out; None for other probes.

        Raises:
            UsageError: Something is asked for that only this probe has, or it is no number.
        """
        if probe != "needle":
            if self != Needles():
                raise UsageError("--lengths, --depths and --needles are of --probe needle", "add --probe needle")
            return None
        from attnscope.studies.heads.needles import ROLE, THRESHOLD, NeedleOptions
        from attnscope.studies.heads.roles import thresholds_from

        return NeedleOptions(
            lengths=whole_numbers(self.lengths, "--lengths"),
            depths=tuple(percent / 100 for percent in whole_numbers(self.depths, "--depths")),
            n=self.needles, threshold=thresholds_from(thresholds, {ROLE: THRESHOLD})[ROLE], ablate=ablate,
        )  # fmt: skip


@dataclass(frozen=True)
class Describing:
    """How heads are described."""

    PANEL: ClassVar[str] = "Heads"

    no_describe: Annotated[bool, "Leave out what each head does in a line."] = False
    describe: Annotated[str | None, "Describe these heads alone, such as L3H1,L5H11."] = None
    feature: Annotated[
        list[str] | None,
        "A feature of your own for descriptions: 'NAME=PATTERN' of keys, or 'NAME=PATTERN > PATTERN' of queries and "
        "keys; may be given several times.",
    ] = None

    def options(self) -> "DescribeOptions | None":
        """What is asked for; None = nothing is described."""
        from attnscope.studies.describe.study import DescribeOptions

        if self.no_describe and self.describe is not None:
            raise UsageError("--describe names heads, and --no-describe leaves all out", "leave out one of them")
        heads = None if self.describe is None else heads_from(self.describe)
        return None if self.no_describe else DescribeOptions(tuple(self.feature or ()), heads=heads)


@dataclass(frozen=True)
class Where:
    """Where files are written, and which."""

    PANEL: ClassVar[str] = "Output"

    out: Annotated[Path | None, typer.Option("-o", "--out", help="A folder for the record and figures.")] = None
    formats: Annotated[
        str | None,
        typer.Option(
            "-f",
            "--format",
            help="Files to write: several of npz, csv, json, parquet, png, svg, pdf.  [default: npz,csv,png]",
        ),
    ] = None

    def plan(self, kind: str, printing: "Printing", **how: Any) -> "Output":
        """What is to become of a record of a kind, checked before it is made: by `output.plan`."""
        from attnscope.output import plan

        return plan(kind, self.out, self.formats, **vars(printing), **how)


Folder = Annotated[
    bool,
    "Write the page of an atlas as a folder of small files (index.html), which loads a head when it is asked for.",
    "Output",
]

Shard = Annotated[str, "Study a part of the corpus only, such as 2/8; `merge` joins them.", "Running"]

With = Annotated[
    list[Path] | None,
    typer.Option(
        "--with",
        help="Of an atlas: a record of the same model, of relations, ablate or circuits: its heads say that too; "
        "may be given several times.",
    ),
    "Heads",
]

Replace = Annotated[bool, "Give up figures in the folder that are of another model or of other options.", "Output"]


@dataclass(frozen=True)
class Printing:
    """What is said on stdout and stderr."""

    PANEL: ClassVar[str] = "Output"

    json: Annotated[bool, "Print one JSON document instead of paths."] = False
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="No notes on stderr.")] = False
