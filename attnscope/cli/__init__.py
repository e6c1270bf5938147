"""Run the command line: parse the arguments, run the function of one command, and report errors.

Command X is the function X in the module attnscope.cli.X. Only the modules of the named command are imported, so that
the command line starts without torch, transformers or matplotlib.
"""

import codecs
import contextlib
import io
import os
import re
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Annotated, Any, NoReturn

import typer

from attnscope import plugins
from attnscope.cli.build import Command, CommandGroup, make_command
from attnscope.errors import AttnscopeError, UsageError, is_out_of_memory, one_line
from attnscope.host import is_interrupted, use_headless_matplotlib
from attnscope.version import VERSION

PANELS = {
    "See where heads look": ("heatmap", "page", "batch"),
    "Explain what heads do": ("heads", "atlas", "relations", "compare", "why"),
    "Test what you think you saw": ("ablate", "patch", "weights", "training"),
    "Learn how attention works": ("learn",),
    "Tools": ("show", "models"),
}
"""The names of the commands under each heading (panel) of `--help`."""

LEARN_COMMANDS = ("trace", "split", "cost")
"""The commands of `attnscope learn`: functions in attnscope.cli.learn."""

COMMAND_NAMES = tuple(name for names in PANELS.values() for name in names)
"""The names of all commands."""

_CONTEXT = {"help_option_names": ["-h", "--help"]}

_MEMORY_HINT = "choose fewer layers and heads (-L, -H, --pick), or a shorter text"

_INTERRUPTED = 130
"""The exit status after Ctrl-C, as in shells: 128 + SIGINT."""

_WORDING_BY_PATTERN = {
    r"Input should be greater than or equal to (\S+)": r"it must be at least \1",
    r"Input should be less than or equal to (\S+)": r"it must be at most \1",
    r"Input should be a valid integer.*": "it must be a whole number",
    r"Input should be a valid number.*": "it must be a number",
    r"Unable to parse input string as an integer, exceeded maximum size": "it has too many digits",
    r"Value error, ": "",
}
"""Patterns in typer's messages about a wrong value, and the wording that replaces them."""


def main() -> None:
    """Run the command line and exit. An error is printed as one line with a hint on stderr; the status is 1 or 2."""
    # matplotlib must draw without a window system.
    use_headless_matplotlib()
    _escape_unprintable()
    try:
        _require_folder()
        status = _run()
        if sys.stdout is not None:
            sys.stdout.flush()
        # After Ctrl-C a study keeps what is done, so that no exception comes.
        if is_interrupted():
            status = _INTERRUPTED
    except AttnscopeError as error:
        _fail_if_interrupted()
        _fail(error.message, error.hint, status=2 if isinstance(error, UsageError) else 1)
    except (KeyboardInterrupt, typer.Abort):
        status = _INTERRUPTED
    except BrokenPipeError:
        # The program that reads our output, such as `head`, has ended.
        _release_stdout()
        sys.exit(1)
    except MemoryError:
        _fail("not enough memory", _MEMORY_HINT)
    except OSError as error:
        file_name = f" {error.filename}" if error.filename else ""
        _fail(f"{error.strerror or error}{file_name}")
    except Exception as error:
        _fail_unexpected(error)
    if status == _INTERRUPTED:
        _fail("interrupted", status=status)
    sys.exit(status)


def _escape_unprintable() -> None:
    r"""Have stdout escape characters that its encoding lacks, such as \u2192, instead of raising an error."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # UTF-8 has all characters. A file name may have bytes that are not UTF-8: they are printed unchanged.
        is_utf8 = codecs.lookup(sys.stdout.encoding).name == "utf-8"
        sys.stdout.reconfigure(errors="surrogateescape" if is_utf8 else "backslashreplace")


def _require_folder() -> None:
    """Refuse to run in a folder that has been removed: some libraries end the process there, others find no files."""
    try:
        os.getcwd()  # noqa: PTH109  # pathlib takes longer to load
    except OSError as error:
        raise AttnscopeError(
            f"the current folder cannot be used: {error.strerror}",
            "it has been removed, or is closed: cd to another",
        ) from None


def _run() -> int:
    """Parse the command line, run its command and return the exit status."""
    # `attnscope help heads` means `attnscope heads --help`.
    if sys.argv[1:2] == ["help"]:
        sys.argv[1:] = [*sys.argv[2:], "--help"]
    # Build only the named command, because building its options takes time. Without a name, help lists all commands.
    names: Sequence[str] = COMMAND_NAMES
    if sys.argv[1:] and sys.argv[1] in (*COMMAND_NAMES, *plugins.load_commands()):
        names = (sys.argv[1],)
    try:
        # With standalone_mode=False, typer raises errors and returns the exit status, instead of ending the process.
        return build_app(names)(standalone_mode=False) or 0
    except typer.Abort as error:
        # typer takes any EOFError for Ctrl-D at a prompt, even the EOFError of a truncated file: raise that one.
        raise error.__cause__ or error from None


# The commands


def build_app(names: Sequence[str] = COMMAND_NAMES) -> typer.Typer:
    """Return the command line with the named commands; only their modules are imported."""
    app = typer.Typer(
        name="attnscope",
        cls=CommandGroup,
        help="What each attention head of a transformer does on your text: exact heatmaps as files.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode="markdown",
        context_settings=_CONTEXT,
    )
    # The function `attnscope` declares the options before a command's name, such as --version.
    app.callback()(attnscope)
    for panel, panel_names in PANELS.items():
        for name in panel_names:
            if name not in names:
                continue
            if name == "learn":
                app.add_typer(
                    _build_learn(), name=name, rich_help_panel=panel, context_settings=_CONTEXT
                )
            else:
                _add_command(app, getattr(import_module(f"attnscope.cli.{name}"), name), panel)
    # Add the commands of installed plugins.
    for name, function in plugins.load_commands().items():
        if name in names or names == COMMAND_NAMES:
            _add_command(app, function, "Added by other packages")
    return app


def _build_learn() -> typer.Typer:
    """Return the command `learn`, which has commands of its own."""
    from attnscope.cli import learn

    app = typer.Typer(
        cls=CommandGroup,
        no_args_is_help=True,
        rich_markup_mode="markdown",
        help="See how attention is computed, how heads split it, and what it costs.",
    )
    for name in LEARN_COMMANDS:
        _add_command(app, getattr(learn, name))
    return app


def _add_command(app: typer.Typer, function: Callable[..., None], panel: str | None = None) -> None:
    """Make a command of a function, and add it to `app` under the heading `panel` of its help; None = no heading."""
    app.command(cls=Command, rich_help_panel=panel, context_settings=_CONTEXT)(make_command(function))


def commands() -> dict[str, Any]:
    """Return every command, a command of click, by the words that a user types, such as "heads" and "learn trace"."""
    app: Any = typer.main.get_command(build_app())
    command_by_path: dict[str, Any] = {}
    for name, command in app.commands.items():
        if name == "learn":
            for inner_name, inner_command in command.commands.items():
                command_by_path[f"learn {inner_name}"] = inner_command
        else:
            command_by_path[name] = command
    return command_by_path


def _print_version(is_given: bool) -> None:
    if is_given:
        print(f"attnscope {VERSION}")
        raise typer.Exit


def attnscope(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """What each attention head of a transformer does on your text: exact heatmaps as files.

    Results go to stdout: the paths that were written, a table, or with --json one JSON document. Notes go to stderr.
    Exit status: 0 done, 1 it failed, 2 wrong usage.
    """


# Failures


def _fail_unexpected(error: Exception) -> NoReturn:
    """End with an error that no other part of attnscope has handled: out of memory, wrong usage, or a bug.

    Raises:
        Exception: The error itself, with its traceback, if it is a bug and ATTNSCOPE_TRACEBACK is set.
    """
    _fail_if_interrupted()
    if is_out_of_memory(error):
        _fail("not enough memory", _MEMORY_HINT)
    # Recognise click's usage errors by their attributes: typer has a copy of click inside, and exports no class.
    if getattr(error, "exit_code", 0) == 2 and hasattr(error, "format_message"):
        _fail_usage(error)
    if os.environ.get("ATTNSCOPE_TRACEBACK"):
        raise error
    _fail(
        f"internal error: {type(error).__name__}: {error}",
        "this is a bug in attnscope; with ATTNSCOPE_TRACEBACK=1 in the environment it says where",
    )


def _fail_usage(error: Any) -> NoReturn:
    """End with click's message about wrong usage, reworded, and a hint."""
    message = error.format_message()
    # For a command without arguments, click has printed the help, and its message is empty.
    if not message.strip():
        sys.exit(2)
    for pattern, wording in _WORDING_BY_PATTERN.items():
        message = re.sub(pattern, wording, message)
    # What the user typed for the command, and the names of its options and arguments. None = click found no command.
    path = "attnscope"
    parameter_names = set()
    if error.ctx is not None:
        path = error.ctx.command_path
        parameter_names = {parameter.name for parameter in error.ctx.command.params}
    hint = f"see {path} --help"
    # An unquoted text looks like several arguments. Commands with --split read several texts from a file.
    if "text" in parameter_names and message.startswith("Got unexpected extra argument"):
        several_texts_hint = "for several: attnscope page, or batch"
        if "split" in parameter_names:
            several_texts_hint = "several come from a file: --file"
        hint = f"quote a text of several words; {several_texts_hint}"
    _fail(message.rstrip("."), hint, status=2)


def _fail_if_interrupted() -> None:
    """End as interrupted if Ctrl-C came before the error: the error may only be a consequence, and mislead the user."""
    if is_interrupted():
        _fail("interrupted", status=_INTERRUPTED)


def _fail(message: str, hint: str = "", status: int = 1) -> NoReturn:
    """End the process with an error and a hint on stderr; "" = print no line of this sort."""
    if message:
        print(f"error: {one_line(message)}", file=sys.stderr)
    if hint:
        print(f"hint: {one_line(hint)}", file=sys.stderr)
    with contextlib.suppress(OSError):
        sys.stderr.flush()
    _release_stdout()
    sys.exit(status)


def _release_stdout() -> None:
    """Flush stdout. If that fails, send it to the null device, or Python flushes again at exit and prints an error."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
