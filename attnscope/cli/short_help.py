"""Write what `COMMAND --help` prints: what the command does, examples, and the options that its question needs.

`--help-all` shows every option with its whole help: typer writes that.
"""

import re
import shutil
import textwrap
from typing import Any

_NAMES_WIDTH = 21
"""Width of the column for the names of options, in characters."""

_MAX_WIDTH = 100
"""The most characters of a line."""

_AFTER_FIRST_SENTENCE = re.compile(r"(?<=[\w)]); .*|(?<=[\w)])\. (?=\S).*", re.DOTALL)
"""What follows the first sentence of a help: all from a semicolon, or from a full stop with more text behind it."""

_DEFAULT = re.compile(r"  \[default: (.*)\]")
"""A default that the help itself names, at its end."""

_MAX_DEFAULT = 30
"""The most characters of a default; a longer one is not shown."""


def write_help(command: Any, path: str, help_all: str) -> str:
    """Return the help of a command.

    Args:
        command: The command, a click command that typer made.
        path: What a user types for the command, such as "attnscope heads".
        help_all: What a user types to see all options, such as "attnscope heads --help-all".
    """
    width = min(shutil.get_terminal_size().columns, _MAX_WIDTH) - 1
    arguments: list[Any] = []
    options: list[Any] = []
    for parameter in command.params:
        if parameter.hidden:
            continue
        if parameter.param_type_name == "argument":
            arguments.append(parameter)
        else:
            options.append(parameter)
    lines = [" ".join(["Usage:", path, *map(_usage, arguments), "[OPTIONS]"]), ""]
    for paragraph in (command.help or "").split("\n\n"):
        lines += [*_paragraph(paragraph, width), ""]
    for parameter in (*arguments, *options):
        lines += _option(parameter, width)
    lines += ["", f"All options: {help_all}"]
    return "\n".join(lines)


def _usage(argument: Any) -> str:
    """Return an argument as a line of usage has it: [TEXT] may be left out, FILES... may be several."""
    name: str = argument.metavar if argument.required else f"[{argument.metavar}]"
    return name if argument.nargs == 1 else f"{name}..."


def _paragraph(paragraph: str, width: int) -> list[str]:
    """Return the lines of a paragraph of Markdown, without its marks. Each example of a list begins a line."""
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
    # The first sentence of the help, then the default in brackets, if it is short.
    full_help = parameter.help or ""
    sentence = _DEFAULT.sub("", full_help)
    sentence = _AFTER_FIRST_SENTENCE.sub("", sentence).rstrip(".").replace("`", "")
    match = _DEFAULT.search(full_help)
    default = match[1] if match else _default_of(parameter)
    if default and len(default) <= _MAX_DEFAULT:
        sentence = f"{sentence} [{default}]"
    # Names too long for their column are followed by two spaces and the help, in the same line.
    head = f"  {names:<{_NAMES_WIDTH - 2}}"
    if not head.endswith(" "):
        head += "  "
    return textwrap.wrap(
        sentence,
        width,
        initial_indent=head,
        subsequent_indent=" " * _NAMES_WIDTH,
        break_on_hyphens=False,
    ) or [head]


def _default_of(parameter: Any) -> str:
    """Return the default of an option as a user would type it; "" for a flag, or without a default."""
    value = parameter.default
    is_plain = isinstance(value, str | int | float) and not isinstance(value, bool)
    return str(value) if is_plain else ""
