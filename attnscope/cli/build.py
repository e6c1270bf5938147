"""Commands for typer, made of dataclasses: each field of the dataclasses that a command takes is an option of it.

Fields say what they are by `attnscope.options`. Options that few need are left to `--help-all`. This file knows
neither commands nor what their options mean.
"""

import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from operator import not_
from types import SimpleNamespace
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from attnscope.cli.short_help import write_help
from attnscope.errors import UsageError
from attnscope.options import Option

HELP_ALL = "--help-all"
"""The flag that shows the help with all options."""


def command(function: Callable[..., None]) -> Callable[..., None]:
    """Return what typer takes for a command: a function with one parameter for each field of its dataclasses.

    Args:
        function: Each of its parameters is annotated with a dataclass of options. It is called with instances of them.
    """
    # The fields of all groups become parameters in one list.
    groups: dict[str, Any] = {
        parameter.name: parameter.annotation
        for parameter in inspect.signature(function, eval_str=True).parameters.values()
    }
    parameters = [_parameter(owner, field) for group in groups.values() for owner, field in _fields(group)]

    # Typer's values go back into their dataclasses.
    @functools.wraps(function)
    def run(**values: Any) -> None:
        function(**{name: _build(group, values) for name, group in groups.items()})

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # what typer reads
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _fields(group: Any) -> "Iterator[tuple[Any, dataclasses.Field[Any]]]":
    """Yield the fields that are options, those of groups in the group too, each with the class that declares it."""
    for field in dataclasses.fields(group):
        inner = field.metadata.get("group")
        if inner is not None:
            yield from _fields(inner)
        elif not _known(field).python_only:
            yield next(owner for owner in group.__mro__ if field.name in vars(owner).get("__annotations__", ())), field


def _known(field: "dataclasses.Field[Any]") -> Option:
    """Return what a field says of its option; a field that says nothing is for Python alone."""
    known: Option = field.metadata.get("option") or Option("", python_only=True)
    return known


def _parameter(owner: Any, field: "dataclasses.Field[Any]") -> inspect.Parameter:
    """Return a field as typer takes it: its type, default, names, help, range, and where the help shows it."""
    known = _known(field)
    kind, default = _type_of(owner, field)
    # An argument has a place, an option has flags.
    about: Any
    if known.argument:
        complete = _completion(known)
        metavar = known.metavar or field.name.upper()
        about = typer.Argument(help=known.help, show_default=False, metavar=metavar, autocompletion=complete)
    else:
        flags = known.flags or (f"--{field.name.replace('_', '-')}",)
        about = typer.Option(
            *flags, help=known.help, min=known.least, max=known.most, autocompletion=_completion(known)
        )
        about.metavar = "<path>" if "list[pathlib" in str(kind) else "<str>" if "list[" in str(kind) else None
        # Where the help shows it.
        about.rich_help_panel = known.panel or getattr(owner, "PANEL", None)
    about.hidden = known.rare
    # Typer reads an empty default as required.
    if known.needed or default is dataclasses.MISSING:
        default = inspect.Parameter.empty
    return inspect.Parameter(
        field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, about]
    )


def _completion(known: Option) -> Callable[[str], list[str]] | None:
    """Return what the shell completes a value by."""
    return getattr(sys.modules[__name__], f"complete_{known.complete}") if known.complete else None


def _type_of(owner: Any, field: "dataclasses.Field[Any]") -> tuple[Any, Any]:
    """Return the type that typer reads a field as, and its default. `Option.read` turns it into the field's own."""
    known = _known(field)
    # The field's own parser reads it later, so typer passes text.
    several: Any = list
    if known.several:
        return several[str] | None, None
    if known.read is not None:
        return (str, known.written) if known.written is not None else (str | None, None)
    # Annotations are strings: resolve this one alone, in the module of its class.
    scope = vars(sys.modules[owner.__module__])
    named = SimpleNamespace(__annotations__={field.name: owner.__annotations__[field.name]})
    kind = get_type_hints(named, scope)[field.name]
    # A tuple is a flag that may be repeated.
    if get_origin(kind) is tuple:
        is_required = known.needed or field.default is dataclasses.MISSING
        one = several[get_args(kind)[0]]
        return (one, field.default) if is_required else (one | None, None)
    if field.default is True:  # its flag switches it off
        return kind, False
    if known.choices:  # others are refused by the dataclass
        return (str | None, None) if field.default is None else (str, field.default)
    return kind, field.default


def _build(group: Any, values: dict[str, Any]) -> Any:
    """Return a group of options, and the groups in it, from what was given on the command line."""
    fields = {}
    for field in dataclasses.fields(group):
        inner = field.metadata.get("group")
        if inner is not None:
            fields[field.name] = _build(inner, values)
        elif field.name in values and not _known(field).python_only and values[field.name] is not None:
            fields[field.name] = _read(field, values[field.name])
    return group(**fields)


def _read(field: "dataclasses.Field[Any]", value: Any) -> Any:
    """Return a value as its field has it."""
    known = _known(field)
    if known.read is not None:
        return known.read(value)
    if isinstance(value, list):
        return tuple(value)
    return not_(value) if field.default is True else value


# What typer builds ----------------------------------------------------------------------------------------------


class _PlainFlags:
    """Flags take no value, so help names no type of one."""

    def get_params(self, ctx: Any) -> list[Any]:
        parameters: list[Any] = super().get_params(ctx)  # type: ignore[misc]  # of a command
        for parameter in parameters:
            if getattr(parameter, "is_flag", False):
                parameter.metavar = ""
        return parameters


class Command(_PlainFlags, TyperCommand):
    """A command whose `--help` shows the first sentence on what a question needs, and `--help-all` everything."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the command line. An empty `--out` is refused: it is that of a variable that is not set."""
        # Flags after -- are texts.
        words = args[: args.index("--")] if "--" in args else args
        # All options, the short help, or a run.
        if HELP_ALL in words:
            for parameter in self.params:
                parameter.hidden = False  # type: ignore[attr-defined]  # options and typer's arguments have it
            args = ["--help"]
        elif {"-h", "--help"} & {*words}:
            typer.echo(write_help(self, ctx.command_path, f"{ctx.command_path} {HELP_ALL}"))
            ctx.exit()
        elif not ctx.resilient_parsing and self.make_parser(ctx).parse_args(args=[*args])[0].get("out") == "":
            raise UsageError("--out is empty", "name a file or folder; . is the folder that you are in")
        rest: list[str] = super().parse_args(ctx, args)
        return rest


class Group(_PlainFlags, TyperGroup):
    """Commands under one name."""


# What the shell completes ---------------------------------------------------------------------------------------


def complete_models(incomplete: str) -> list[str]:
    """Return the names of models that begin so."""
    from attnscope.models.catalog import list_models

    return [entry.name for entry in list_models() if entry.name.startswith(incomplete)]
