"""Make commands for typer from functions that take dataclasses: each field of a dataclass is an option of the command.

A *group* is such a dataclass of options. The metadata of each field has an `attnscope.options.Option`, which declares
the option: its flags, help and range. This module translates declarations into typer's, and typer's values into
instances of the groups. It knows a command only by its name, which says in which formats the command writes files.
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


def make_command(function: Callable[..., None]) -> Callable[..., None]:
    """Return the function of a command as typer needs it: with one parameter for each option.

    Args:
        function: The function of the command. Each of its parameters takes a group, which its annotation names.
    """
    group_by_name: dict[str, Any] = {}
    parameters: list[inspect.Parameter] = []
    # The formats of the command's files, for the help of --format. Commands that are no kind of record, such as `show`,
    # list the formats of heatmaps, which are all formats.
    formats = ", ".join(KINDS.get(function.__name__, KINDS["heatmap"]).formats)
    for name, parameter in inspect.signature(function, eval_str=True).parameters.items():
        group_by_name[name] = parameter.annotation
        for owner, field in _list_option_fields(parameter.annotation):
            parameters.append(_make_parameter(owner, field, formats))

    # typer calls this function with the value of each option. It builds the groups, and calls the command with them.
    @functools.wraps(function)
    def run(**values: Any) -> None:
        function(**{name: _build_group(group, values) for name, group in group_by_name.items()})

    # typer makes the options of a command from the signature and the annotations.
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # functions may have it
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _list_option_fields(group: Any) -> "Iterator[tuple[Any, dataclasses.Field[Any]]]":
    """Yield each field of a group that is an option on the command line, as (the class that declares it, field).

    If a field is a group itself, its fields are yielded in its place.
    """
    for field in dataclasses.fields(group):
        inner_group = field.metadata.get("group")
        if inner_group is not None:
            yield from _list_option_fields(inner_group)
        elif not _option_of(field).python_only:
            # The method resolution order begins with the group: find the nearest class that declares the field.
            for owner in group.__mro__:
                if field.name in vars(owner).get("__annotations__", ()):
                    yield owner, field
                    break


def _option_of(field: "dataclasses.Field[Any]") -> Option:
    """Return the declaration of a field's option. A field without a declaration is for Python alone."""
    declaration: Option = field.metadata.get("option") or Option("", python_only=True)
    return declaration


def _make_parameter(owner: Any, field: "dataclasses.Field[Any]", formats: str) -> inspect.Parameter:
    """Return the parameter from which typer makes an option: its name, type, default, flags, help and range.

    `owner` is the class that declares the field. `formats`, such as "npz, csv", replaces "{formats}" in its help.
    """
    option = _option_of(field)
    value_type, default = _find_type_and_default(owner, field)
    completion = complete_models if option.completion else None
    # A positional argument has a metavar, such as TEXT; an option has flags and a range.
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
        # An option that may be repeated has the type list[str] or list[Path]: the help names the type of one value.
        if "list[" in str(value_type):
            typer_info.metavar = "<path>" if "list[pathlib" in str(value_type) else "<str>"
        # The heading above the option in the help: the option's own, or that of its class.
        typer_info.rich_help_panel = option.panel or getattr(owner, "PANEL", None)
    typer_info.hidden = option.rare
    # typer requires a value for a parameter without a default. The field may still have a default for Python users.
    if option.is_required or default is dataclasses.MISSING:
        default = inspect.Parameter.empty
    return inspect.Parameter(
        field.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[value_type, typer_info],
    )


def _find_type_and_default(owner: Any, field: "dataclasses.Field[Any]") -> tuple[Any, Any]:
    """Return the type and the default of the value that typer passes for a field; MISSING = typer requires a value.

    `_convert_value` converts typer's value to the field's. For None, the field keeps its own default.
    """
    option = _option_of(field)
    # As Any: type checkers refuse list[x] where x is a value.
    list_of: Any = list
    # The field's own parser (`read`) takes a string, or a list of strings if the flag may be repeated. `default_text`
    # is the default as a user would type it.
    if option.is_repeatable:
        return list_of[str] | None, None
    if option.read is not None:
        return str | None, option.default_text
    # Annotations are strings. Resolve this one alone: others may name modules that are not imported yet.
    scope = vars(sys.modules[owner.__module__])
    one_annotation = SimpleNamespace(__annotations__={field.name: owner.__annotations__[field.name]})
    field_type = get_type_hints(one_annotation, scope)[field.name]
    # typer repeats an option of a list type. In the dataclass, it is a tuple.
    if get_origin(field_type) is tuple:
        default = dataclasses.MISSING if field.default is dataclasses.MISSING else None
        return list_of[get_args(field_type)[0]] | None, default
    # A field that is True by default has a flag that switches it off, such as --no-caption. typer's value says whether
    # the user gave the flag.
    if field.default is True:
        return field_type, False
    # typer passes any string, and the dataclass refuses a string that is not among the choices.
    if option.choices:
        return str | None, field.default
    return field_type, field.default


def _build_group(group: Any, values: dict[str, Any]) -> Any:
    """Return an instance of a group, with the groups in it, from typer's values by option; None = the default."""
    field_values = {}
    for field in dataclasses.fields(group):
        inner_group = field.metadata.get("group")
        value = values.get(field.name)
        if inner_group is not None:
            field_values[field.name] = _build_group(inner_group, values)
        elif value is not None and not _option_of(field).python_only:
            field_values[field.name] = _convert_value(field, value)
    return group(**field_values)


def _convert_value(field: "dataclasses.Field[Any]", value: Any) -> Any:
    """Return the field's value for typer's value, whose type is that of `_find_type_and_default`."""
    option = _option_of(field)
    if option.read is not None:
        return option.read(value)
    if isinstance(value, list):
        return tuple(value)
    # The flag of a field that is True by default sets it to False.
    if field.default is True:
        return not value
    return value


# Classes of commands ----------------------------------------------------------------------------------------------


class _FlagsWithoutType:
    """Make a command's help show no type for flags: they take no value."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters of a command. A flag gets an empty metavar, which the help shows as its type."""
        parameters: list[Any] = super().get_params(ctx)  # type: ignore[misc]  # of a command
        for parameter in parameters:
            if getattr(parameter, "is_flag", False):
                parameter.metavar = ""
        return parameters


class Command(_FlagsWithoutType, TyperCommand):
    """A command whose `--help` shows the options that most users need, one line each, and `--help-all` everything."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words after the command's name, or print help.

        Raises:
            UsageError: `--out` is empty, as it is if a shell's variable is not set.
        """
        # After --, a word is an argument even if it looks like a flag.
        words_before_dashes = args[: args.index("--")] if "--" in args else args
        if HELP_ALL in words_before_dashes:
            for parameter in self.params:
                parameter.hidden = False  # type: ignore[attr-defined]  # options and typer's arguments have it
            # typer prints its own help, with all options.
            args = ["--help"]
        elif not {"-h", "--help"}.isdisjoint(words_before_dashes):
            typer.echo(write_help(self, ctx.command_path, f"{ctx.command_path} {HELP_ALL}"))
            ctx.exit()
        # While a shell completes a command line (resilient parsing), the line is not finished, and --out may be empty.
        elif not ctx.resilient_parsing:
            values, *_ = self.make_parser(ctx).parse_args(args=[*args])
            if values.get("out") == "":
                raise UsageError(
                    "--out is empty", "name a file or folder; . is the folder that you are in"
                )
        unparsed: list[str] = super().parse_args(ctx, args)
        return unparsed


class CommandGroup(_FlagsWithoutType, TyperGroup):
    """A command that has commands of its own, such as `attnscope learn`."""


# Completion in the shell ------------------------------------------------------------------------------------------


def complete_models(incomplete: str) -> list[str]:
    """Return the names of known models that begin with `incomplete`: the letters that the user has typed so far."""
    from attnscope.models.catalog import list_models

    return [entry.name for entry in list_models() if entry.name.startswith(incomplete)]
