"""Write what `COMMAND --help` prints: what the command does, examples, and the options that most users need.

Each option has the first sentence of its help here. typer writes `--help-all`: every option with its whole help.
"""

import re
import shutil
import textwrap
from typing import Any

_NAMES_WIDTH = 21
"""Width of the column for the names of options, in characters."""

_MAX_LINE_WIDTH = 100
"""The most characters of a line."""

_REST_PATTERN = re.compile(r"(?<=[\w)]); .*|(?<=[\w)])\. (?=\S).*", re.DOTALL)
"""The rest of a help after its first sentence: all from a semicolon, or from a full stop with more text behind it."""

_DEFAULT_PATTERN = re.compile(r"  \[default: (.*)\]")
"""The default at the end of a help that names one itself, such as "Layers, such as 0,3-5.  [default: all]"."""

_MAX_DEFAULT_WIDTH = 30
"""The most characters of a default. A longer default is not shown."""


def write_help(command: Any, path: str, help_all: str) -> str:
    """Return the help of a command.

    Args:
        command: The command, a click command that typer made.
        path: What a user types for the command, such as "attnscope heads".
        help_all: What a user types to see all options, such as "attnscope heads --help-all".
    """
    width = min(shutil.get_terminal_size().columns, _MAX_LINE_WIDTH) - 1
    arguments: list[Any] = []
    options: list[Any] = []
    for parameter in command.params:
        # Rarely needed options are hidden: only `--help-all` shows them.
        if parameter.hidden:
            continue
        if parameter.param_type_name == "argument":
            arguments.append(parameter)
        else:
            options.append(parameter)
    lines = [" ".join(["Usage:", path, *map(_format_usage, arguments), "[OPTIONS]"]), ""]
    for paragraph in (command.help or "").split("\n\n"):
        lines += [*_wrap_paragraph(paragraph, width), ""]
    for parameter in (*arguments, *options):
        lines += _format_parameter(parameter, width)
    lines += ["", f"All options: {help_all}"]
    return "\n".join(lines)


def _format_usage(argument: Any) -> str:
    """Return an argument for the line of usage: [TEXT] for an optional one, FILES... for one of several values."""
    name: str = argument.metavar if argument.required else f"[{argument.metavar}]"
    return name if argument.nargs == 1 else f"{name}..."


def _wrap_paragraph(paragraph: str, width: int) -> list[str]:
    """Return the lines of a paragraph of Markdown, without backticks; of a list of examples, each begins a line.

    A list of examples has lines such as "- `attnscope models minilm`".
    """
    if not paragraph.lstrip().startswith("- `"):
        return textwrap.wrap(paragraph.replace("`", ""), width)
    lines = []
    for example in re.findall(r"- `(.*?)`$", paragraph, re.MULTILINE | re.DOTALL):
        lines += textwrap.wrap(
            example, width, initial_indent="  ", subsequent_indent="      ", break_on_hyphens=False
        )
    return lines


def _format_parameter(parameter: Any, width: int) -> list[str]:
    """Return the lines of an argument or an option: its names, and the first sentence of its help."""
    if parameter.param_type_name == "argument":
        names = parameter.metavar or parameter.name.upper()
    else:
        # Short flags (False) come before long flags (True).
        names = ", ".join(sorted(parameter.opts, key=lambda flag: flag.startswith("--")))
    # The first sentence of the help is followed by the default in brackets, if that is short.
    full_help = parameter.help or ""
    sentence = _DEFAULT_PATTERN.sub("", full_help)
    sentence = _REST_PATTERN.sub("", sentence).rstrip(".").replace("`", "")
    match = _DEFAULT_PATTERN.search(full_help)
    default = match[1] if match else _format_default(parameter)
    if default and len(default) <= _MAX_DEFAULT_WIDTH:
        sentence = f"{sentence} [{default}]"
    # Pad the names to the width of their column. If they are too long for it, two spaces separate them from the help.
    names_cell = f"  {names:<{_NAMES_WIDTH - 2}}"
    if not names_cell.endswith(" "):
        names_cell += "  "
    # Without any help, there is nothing to wrap: the line has the names alone.
    return textwrap.wrap(
        sentence,
        width,
        initial_indent=names_cell,
        subsequent_indent=" " * _NAMES_WIDTH,
        break_on_hyphens=False,
    ) or [names_cell]


def _format_default(parameter: Any) -> str:
    """Return the default of an option as a user would type it; "" for a flag, or an option without a default."""
    default = parameter.default
    # Flags are left out: True and False are of the type int too.
    is_plain = isinstance(default, str | int | float) and not isinstance(default, bool)
    return str(default) if is_plain else ""
