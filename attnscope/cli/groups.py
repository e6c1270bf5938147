"""Groups of options that travel together, and the decorator that expands them into the signature of a command.

A group is a frozen dataclass whose fields are annotated as typer's parameters are. It builds what a study is asked
with when it is called, so that the command line starts without studies, numpy or torch.
"""

import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from operator import not_
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, get_args, get_origin, get_type_hints

import typer
from typer.models import OptionInfo

from attnscope.cli import options
from attnscope.errors import UsageError
from attnscope.options import heads_from

if TYPE_CHECKING:
    from attnscope.drawing.style import Style
    from attnscope.output import Output
    from attnscope.studies.describe.sample import DescribeOptions


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
        def run(**arguments: Any) -> None:
            for name, group in groups.items():
                values = {field.name: arguments.pop(field.name) for _, field in _fields(group, omit)}
                arguments[name] = _build(group, values)
            function(**arguments)

        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # what typer reads
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return expand


def _fields(group: Any, omit: Sequence[str] = ()) -> "Iterator[tuple[type, dataclasses.Field[Any]]]":
    """The fields of a group that the command line has, those of groups in it in their place; each with its class."""
    for field in dataclasses.fields(group):
        inner, known = field.metadata.get("group"), field.metadata.get("option")
        if inner is not None:
            yield from _fields(inner, omit)
        elif field.name not in omit and (known is None or not known.python_only):
            yield next(owner for owner in group.__mro__ if field.name in vars(owner).get("__annotations__", ())), field


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
                read = known.read or (tuple if isinstance(value, list) else not_ if field.default is True else None)
                fields[field.name] = value if read is None else read(value)
    return group(**fields)


@functools.cache
def _as_typer(group: type, field: "dataclasses.Field[Any]") -> tuple[Any, Any]:
    """How typer takes a field, and its default: of a study's options by their metadata, else by its annotation."""
    scope = vars(sys.modules[group.__module__])
    named = SimpleNamespace(__annotations__={field.name: group.__annotations__[field.name]})
    hint, known = get_type_hints(named, scope, include_extras=True)[field.name], field.metadata.get("option")
    if known is None:
        return hint, field.default
    kind, default = hint, field.default
    several: Any = list
    if known.several:
        kind, default = several[str] | None, None
    elif known.read is not None:
        kind, default = str if known.written is not None else str | None, known.written
    elif get_origin(hint) is tuple:
        kind, default = several[get_args(hint)[0]] | None, None
    elif default is True:
        default = False
    elif known.choices:  # `Option.require` refuses others
        kind = str if default is not None else str | None
    if known.argument:
        return Annotated[kind, typer.Argument(help=known.help, show_default=False)], default
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


Image = Annotated[
    Path | None,
    "A photo, for vision transformers: attention is laid over it. --query is then CLS, REG0, a patch as ROW,COLUMN, "
    "or mean (over all patches).",
    "Text",
]


Every = Annotated[
    bool,
    typer.Option("--all", help="Print all that was found, and what few need to know."),
    "Output",
]


# Which heads and tokens, how drawn, and where to ----------------------------------------------------------------

Layer = Annotated[int | None, typer.Option("-L", "--layer", min=0, help="The layer, counted from 0."), "Heads"]


@dataclass(frozen=True)
class Drawing:
    """How figures are drawn."""

    PANEL: ClassVar[str] = "Drawing"

    scale: Annotated[
        str | None,
        "The weight of the darkest colour: 1 (fixed), each head's largest (head), the figure's (figure).",
    ] = None
    cmap: Annotated[str, "A matplotlib colormap, such as viridis or Greys."] = "Blues"
    width: Annotated[
        str | None,
        "Width of each figure: inches, 85mm, 8.5cm, column (3.3 inches) or page (6.9).  [default: as wide as needed]",
    ] = None
    dpi: Annotated[int | None, "Pixels per inch of a PNG.  [default: 100; 300 with --width]"] = None
    font_size: Annotated[
        float | None, "Size in points of the smallest letters.  [default: fitted to the figure; 6.5 with --width]"
    ] = None
    no_title: Annotated[bool, "Leave out figure titles (for papers with captions); the names of heads stay."] = False
    font: Annotated[str | None, "The font to try first, for any script: an installed family, or a file."] = None

    def options(self) -> dict[str, Any]:
        """What differs from the defaults, by the names that `draw` of a record has for it."""
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        options = {name: value for name, value in vars(self).items() if value != defaults[name]}
        return options | {"title": False} if options.pop("no_title", False) else options

    def style(self) -> "Style":
        """The style."""
        from attnscope.drawing.style import Style

        return Style(**self.options())


@dataclass(frozen=True)
class Describing:
    """How heads are described."""

    PANEL: ClassVar[str] = "Heads"

    no_describe: Annotated[bool, "Leave out the one-line descriptions."] = False
    describe: Annotated[str | None, "Describe only these heads, such as L3H1,L5H11."] = None

    def options(self) -> "DescribeOptions | None":
        """What is asked for; None = nothing is described."""
        from attnscope.studies.describe.sample import DescribeOptions

        if self.no_describe and self.describe is not None:
            raise UsageError("--describe names heads, and --no-describe leaves all out", "leave out one of them")
        heads = None if self.describe is None else heads_from(self.describe)
        return None if self.no_describe else DescribeOptions(heads=heads)


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
            help="Files to write: several of npz, csv, json, png, svg, pdf.  [default: npz,csv,png]",
        ),
    ] = None

    def plan(self, kind: str, printing: "Printing", **how: Any) -> "Output":
        """What is to become of a record of a kind, checked before it is made: by `output.plan`."""
        from attnscope.output import plan

        return plan(kind, self.out, self.formats, **vars(printing), **how)


@dataclass(frozen=True)
class Printing:
    """What is said on stdout and stderr."""

    PANEL: ClassVar[str] = "Output"

    json: Annotated[bool, "Print one JSON document instead of paths."] = False
    quiet: Annotated[
        bool, typer.Option("-q", "--quiet", help="No notes and no progress on stderr; results are still printed.")
    ] = False
