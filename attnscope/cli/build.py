"""Make commands for typer from dataclasses: each field of the dataclasses that a command takes is an option of it.

`attnscope.options.Option` declares what a field is on the command line. This file turns it into what typer takes. It
knows a command by its name, and so the formats of its files. `--help-all` also shows options that few need.
"""

import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from attnscope.cli.short_help import write_help
from attnscope.errors import UsageError
from attnscope.options import Option
from attnscope.results.kinds import KINDS

HELP_ALL = "--help-all"
"""The flag that shows the help with all options."""


def command(function: Callable[..., None]) -> Callable[..., None]:
    """Return what typer takes for a command: a function with one parameter for each field of its dataclasses.

    Args:
        function: The command. Each of its parameters is a dataclass of options (a group).
    """
    groups: dict[str, Any] = {}
    parameters: list[inspect.Parameter] = []
    # The formats that its help lists. `show` takes those of every kind of result, as maps have them all.
    formats = ", ".join(KINDS.get(function.__name__, KINDS["heatmap"]).formats)
    for name, parameter in inspect.signature(function, eval_str=True).parameters.items():
        groups[name] = parameter.annotation
        parameters += [_parameter(*field, formats) for field in _fields(parameter.annotation)]

    # The parameters' values go back into the groups.
    @functools.wraps(function)
    def run(**values: Any) -> None:
        function(**{name: _build(group, values) for name, group in groups.items()})

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # what typer reads
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _fields(group: Any) -> "Iterator[tuple[Any, dataclasses.Field[Any]]]":
    """Yield the fields of a group that are options, each with the class that declares it.

    A field that is a group itself stands for its fields.
    """
    for field in dataclasses.fields(group):
        inner = field.metadata.get("group")
        if inner is not None:
            yield from _fields(inner)
        elif not _option_of(field).python_only:
            # The group's class, or the nearest one that it inherits the field from.
            for owner in group.__mro__:
                if field.name in vars(owner).get("__annotations__", ()):
                    yield owner, field
                    break


def _option_of(field: "dataclasses.Field[Any]") -> Option:
    """Return the declaration of a field's option; a field without one is for Python alone."""
    declared: Option = field.metadata.get("option") or Option("", python_only=True)
    return declared


def _parameter(owner: Any, field: "dataclasses.Field[Any]", formats: str) -> inspect.Parameter:
    """Return the parameter that typer reads for a field: its name, type, default, flags, help and range.

    `owner` is the class that declares the field; `formats` stand in its help for "{formats}".
    """
    option = _option_of(field)
    kind, default = _type_and_default(owner, field)
    completion = complete_models if option.completion else None
    # An argument is found by its position, an option by its flags.
    typer_info: Any
    if option.argument:
        metavar = option.metavar or field.name.upper()
        typer_info = typer.Argument(
            help=option.help, show_default=False, metavar=metavar, autocompletion=completion
        )
    else:
        flags = option.flags or (f"--{field.name.replace('_', '-')}",)
        typer_info = typer.Option(
            *flags,
            help=option.help.replace("{formats}", formats),
            min=option.least,
            max=option.most,
            autocompletion=completion,
        )
        # The help of an option that may be repeated (list[str] or list[Path]) names the type of one value.
        if "list[" in str(kind):
            typer_info.metavar = "<path>" if "list[pathlib" in str(kind) else "<str>"
        # The heading of the help under which it stands.
        typer_info.rich_help_panel = option.panel or getattr(owner, "PANEL", None)
    typer_info.hidden = option.rare
    # Typer requires a parameter without a default. An option may be needed here and have a default in Python.
    if option.is_required or default is dataclasses.MISSING:
        default = inspect.Parameter.empty
    return inspect.Parameter(
        field.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[kind, typer_info],
    )


def _type_and_default(owner: Any, field: "dataclasses.Field[Any]") -> tuple[Any, Any]:
    """Return the type of the value that typer gives for a field, and its default; MISSING = it is required.

    `_read` makes the field's own value of typer's.
    """
    option = _option_of(field)
    # As Any: type checkers refuse list[x] where x is a value.
    list_of: Any = list
    # Typer passes text, which the field's own parser reads later: several words, or one. `default_text` is the default,
    # as a user would type it.
    if option.is_repeatable:
        return list_of[str] | None, None
    if option.read is not None:
        return str | None, option.default_text
    # Annotations are strings. Resolve this one alone: others may name modules that are not imported yet.
    scope = vars(sys.modules[owner.__module__])
    named = SimpleNamespace(__annotations__={field.name: owner.__annotations__[field.name]})
    kind = get_type_hints(named, scope)[field.name]
    # A tuple is an option that may be repeated. None leaves the field's own default in place.
    if get_origin(kind) is tuple:
        default = dataclasses.MISSING if field.default is dataclasses.MISSING else None
        return list_of[get_args(kind)[0]] | None, default
    # A field that is True by default has a flag that switches it off, such as --no-check. Typer's value says whether
    # the flag was given: by default it was not.
    if field.default is True:
        return kind, False
    # Typer passes text, and the dataclass refuses what is none of the choices.
    if option.choices:
        return str | None, field.default
    return kind, field.default


def _build(group: Any, values: dict[str, Any]) -> Any:
    """Return a group of options, and the groups in it, from typer's values by name; None = the field's default."""
    field_values = {}
    for field in dataclasses.fields(group):
        inner = field.metadata.get("group")
        value = values.get(field.name)
        if inner is not None:
            field_values[field.name] = _build(inner, values)
        elif value is not None and not _option_of(field).python_only:
            field_values[field.name] = _read(field, value)
    return group(**field_values)


def _read(field: "dataclasses.Field[Any]", value: Any) -> Any:
    """Return the field's value from typer's; see `_type_and_default`."""
    option = _option_of(field)
    if option.read is not None:
        return option.read(value)
    if isinstance(value, list):
        return tuple(value)
    # A flag that was given switches off what is True by default.
    if field.default is True:
        return not value
    return value


# What typer builds ----------------------------------------------------------------------------------------------


class _PlainFlags:
    """Leave out of the help the type of a flag's value: flags take none."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters of a command, flags without a metavar."""
        parameters: list[Any] = super().get_params(ctx)  # type: ignore[misc]  # of a command
        for parameter in parameters:
            if getattr(parameter, "is_flag", False):
                parameter.metavar = ""
        return parameters


class Command(_PlainFlags, TyperCommand):
    """A command whose `--help` shows the options that most need, one line each, and `--help-all` everything."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the command line, or print help. An empty `--out` is refused: a shell's variable may not be set."""
        # What follows -- is text, even if it looks like a flag.
        words = args[: args.index("--")] if "--" in args else args
        if HELP_ALL in words:
            for parameter in self.params:
                parameter.hidden = False  # type: ignore[attr-defined]  # options and typer's arguments have it
            args = ["--help"]
        elif "-h" in words or "--help" in words:
            typer.echo(write_help(self, ctx.command_path, f"{ctx.command_path} {HELP_ALL}"))
            ctx.exit()
        # A line that a shell completes is not finished: it is not refused.
        elif not ctx.resilient_parsing:
            values, *_ = self.make_parser(ctx).parse_args(args=[*args])
            if values.get("out") == "":
                raise UsageError(
                    "--out is empty", "name a file or folder; . is the folder that you are in"
                )
        unparsed: list[str] = super().parse_args(ctx, args)
        return unparsed


class CommandGroup(_PlainFlags, TyperGroup):
    """Commands under one name."""


# What the shell completes ---------------------------------------------------------------------------------------


def complete_models(incomplete: str) -> list[str]:
    """Return the names of models that begin with what is typed so far."""
    from attnscope.models.catalog import list_models

    return [entry.name for entry in list_models() if entry.name.startswith(incomplete)]
