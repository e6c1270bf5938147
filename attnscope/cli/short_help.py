"""Write what `COMMAND --help` prints: what the command does, examples, and the options that its question needs.

`--help-all` shows every option with all that is said of it, as typer does.
"""

import re
import shutil
import textwrap
from typing import Any

NAMES = 21
"""Columns of the terminal for the names of options."""

WIDEST = 100
"""Columns of the terminal that are used at most."""

_REST = re.compile(r"(?<=[\w)]); .*|(?<=[\w)])\. (?=\S).*", re.DOTALL)
"""What follows the first sentence of a help."""

_DEFAULT = re.compile(r"  \[default: (.*)\]")
"""A default that the help itself names."""

_SHORT = 30
"""The most characters of a default that is shown."""


def write_help(command: Any, path: str, more: str) -> str:
    """Return the help of a command.

    Args:
        command: The command, as typer made it.
        path: What is typed for it, such as "attnscope heads".
        more: The command that shows all options.
    """
    width = min(shutil.get_terminal_size().columns, WIDEST) - 1
    arguments: list[Any] = []
    options: list[Any] = []
    for parameter in command.params:
        if not parameter.hidden:
            is_argument = parameter.param_type_name == "argument"
            (arguments if is_argument else options).append(parameter)
    lines = [" ".join(["Usage:", path, *map(_usage, arguments), "[OPTIONS]"]), ""]
    for paragraph in (command.help or "").split("\n\n"):
        lines += [*_paragraph(paragraph, width), ""]
    for parameter in (*arguments, *options):
        lines += _option(parameter, width)
    lines += ["", f"All options: {more}"]
    return "\n".join(lines)


def _usage(argument: Any) -> str:
    """Return how an argument is given, such as [TEXT] or FILES..."""
    name: str = argument.metavar if argument.required else f"[{argument.metavar}]"
    return name if argument.nargs == 1 else f"{name}..."


def _paragraph(paragraph: str, width: int) -> list[str]:
    """Return the lines of a paragraph; of a list of examples each by itself, without marks."""
    if not paragraph.lstrip().startswith("- `"):
        return textwrap.wrap(paragraph.replace("`", ""), width)
    lines = []
    for example in re.findall(r"- `(.*?)`$", paragraph, re.MULTILINE | re.DOTALL):
        lines += textwrap.wrap(
            example, width, initial_indent="  ", subsequent_indent="      ", break_on_hyphens=False
        )
    return lines


def _option(parameter: Any, width: int) -> list[str]:
    """Return the lines of an argument or an option: its names and its help."""
    # Names: short flags before long ones.
    if parameter.param_type_name == "argument":
        names = parameter.metavar or parameter.name.upper()
    else:
        short = [name for name in parameter.opts if not name.startswith("--")]
        long = [name for name in parameter.opts if name.startswith("--")]
        names = ", ".join([*short, *long])
    # The first sentence of the help; a short default stands in brackets.
    full_help = parameter.help or ""
    sentence = _REST.sub("", _DEFAULT.sub("", full_help)).rstrip(".").replace("`", "")
    match = _DEFAULT.search(full_help)
    default = match[1] if match else _default_of(parameter)
    if default and len(default) <= _SHORT:
        sentence = f"{sentence} [{default}]"
    # Long names push the help to the right, in place of a line of its own.
    head = f"  {names:<{NAMES - 2}}"
    if len(head) > NAMES or head[-1] != " ":
        head += "  "
    return textwrap.wrap(
        sentence, width, initial_indent=head, subsequent_indent=" " * NAMES, break_on_hyphens=False
    ) or [head]


def _default_of(parameter: Any) -> str:
    """Return the default of an option that takes a value, as it is typed; "" = there is none, or it is a flag."""
    value = parameter.default
    is_plain = isinstance(value, str | int | float) and not isinstance(value, bool)
    return str(value) if is_plain else ""
