"""Run the command line: parse, make one call, print. Starts without torch, transformers or matplotlib."""

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
from attnscope.cli.build import Command, CommandGroup, command
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
"""The names of commands under each heading of `--help`. Command X is the function X in the module attnscope.cli.X."""

LEARN = ("trace", "split", "cost")
"""The commands of `learn`: functions in attnscope.cli.learn."""

NAMES = tuple(name for names in PANELS.values() for name in names)
"""The names of all commands."""

_CONTEXT = {"help_option_names": ["-h", "--help"]}

_MEMORY_HINT = "choose fewer layers and heads (-L, -H, --pick), or a shorter text"

_INTERRUPTED = 130
"""The exit status after Ctrl-C, as shells count: 128 + SIGINT."""

_WORDINGS = {
    r"Input should be greater than or equal to (\S+)": r"it must be at least \1",
    r"Input should be less than or equal to (\S+)": r"it must be at most \1",
    r"Input should be a valid integer.*": "it must be a whole number",
    r"Input should be a valid number.*": "it must be a number",
    r"Unable to parse input string as an integer, exceeded maximum size": "it has too many digits",
    r"Value error, ": "",
}
"""Patterns of what typer says of a wrong value, in pydantic's words, and what attnscope says in their place."""


def main() -> None:
    """Run the command line; a user's error is one line and a hint on stderr, and exit status 1 or 2."""
    # matplotlib draws without a window system.
    use_headless_matplotlib()
    _escape_unprintable()
    status = 0
    try:
        _require_folder()
        status = _run()
        if sys.stdout is not None:
            sys.stdout.flush()
        if is_interrupted():
            status = _INTERRUPTED
    except AttnscopeError as error:
        _fail_if_interrupted()
        _fail(error.message, error.hint, status=2 if isinstance(error, UsageError) else 1)
    except (KeyboardInterrupt, typer.Abort):
        status = _INTERRUPTED
    except BrokenPipeError:
        # The program that reads our output has enough.
        _release_stdout()
        sys.exit(1)
    except MemoryError:
        _fail("not enough memory", _MEMORY_HINT)
    except OSError as error:
        where = f" {error.filename}" if error.filename else ""
        _fail(f"{error.strerror or error}{where}")
    except Exception as error:
        _fail_if_interrupted()
        if is_out_of_memory(error):
            _fail("not enough memory", _MEMORY_HINT)
        # A usage error of click is known by its attributes: typer has a copy of click inside, and exports no class.
        if getattr(error, "exit_code", 0) == 2 and hasattr(error, "format_message"):
            _fail_usage(error)
        if os.environ.get("ATTNSCOPE_TRACEBACK"):
            raise
        _fail(
            f"internal error: {type(error).__name__}: {error}",
            "this is a bug in attnscope; with ATTNSCOPE_TRACEBACK=1 in the environment it says where",
        )
    if status == _INTERRUPTED:
        _fail("interrupted", status=status)
    sys.exit(status)


def _escape_unprintable() -> None:
    r"""Have stdout escape characters that its encoding lacks, such as \u2192, instead of raising an error."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # UTF-8 has all characters. A file name may have bytes that are no UTF-8: they are printed as they are.
        is_utf8 = codecs.lookup(sys.stdout.encoding).name == "utf-8"
        sys.stdout.reconfigure(errors="surrogateescape" if is_utf8 else "backslashreplace")


def _require_folder() -> None:
    """Refuse to run in a folder that has been removed: there, some libraries end the process, others find no file."""
    try:
        os.getcwd()  # noqa: PTH109  # pathlib takes longer to load
    except OSError as error:
        raise AttnscopeError(
            f"the current folder cannot be used: {error.strerror}",
            "it has been removed, or is closed: cd to another",
        ) from None


def _run() -> int:
    """Parse the command line, run its command and return the exit status."""
    if sys.argv[1:2] == ["help"]:
        sys.argv[1:] = [*sys.argv[2:], "--help"]
    # Build the named command alone: the options of each take time. Without a name, help lists all commands.
    names: Sequence[str] = NAMES
    if sys.argv[1:] and sys.argv[1] in (*NAMES, *plugins.load_commands()):
        names = (sys.argv[1],)
    try:
        return build_app(names)(standalone_mode=False) or 0
    except typer.Abort as error:
        # typer takes any EOFError for Ctrl-D at a prompt, also that of a damaged file that ends too early.
        raise error.__cause__ or error from None


# The commands


def build_app(names: Sequence[str] = NAMES) -> typer.Typer:
    """Return the command line with the named commands, and import no module of the others."""
    app = typer.Typer(
        name="attnscope",
        cls=CommandGroup,
        help="What each attention head of a transformer does on your text: exact heatmaps as files.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode="markdown",
        context_settings=_CONTEXT,
    )
    app.callback()(attnscope)
    for panel, panel_names in PANELS.items():
        for name in panel_names:
            if name not in names:
                continue
            if name == "learn":
                app.add_typer(_learn(), name=name, rich_help_panel=panel, context_settings=_CONTEXT)
            else:
                _add(app, getattr(import_module(f"attnscope.cli.{name}"), name), panel)
    # Commands of installed plugins.
    for name, function in plugins.load_commands().items():
        if name in names or names == NAMES:
            _add(app, function, "Added by other packages")
    return app


def _learn() -> typer.Typer:
    """Return `learn` with its commands."""
    from attnscope.cli import learn

    app = typer.Typer(
        cls=CommandGroup,
        no_args_is_help=True,
        rich_markup_mode="markdown",
        help="See how attention is computed, how heads split it, and what it costs.",
    )
    for name in LEARN:
        _add(app, getattr(learn, name))
    return app


def _add(app: typer.Typer, function: Callable[..., None], panel: str | None = None) -> None:
    """Make a command of a function, and add it to the command line or to `learn`."""
    app.command(cls=Command, rich_help_panel=panel, context_settings=_CONTEXT)(command(function))


def commands() -> dict[str, Any]:
    """Return every command, as a command of click, by what a user types, such as "heads" and "learn trace"."""
    app: Any = typer.main.get_command(build_app())
    by_path: dict[str, Any] = {}
    for name, entry in app.commands.items():
        if name == "learn":
            for inner_name, inner in entry.commands.items():
                by_path[f"learn {inner_name}"] = inner
        else:
            by_path[name] = entry
    return by_path


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
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


def _fail_usage(error: Any) -> NoReturn:
    """End with click's message on wrong usage, partly in other words, and a hint."""
    message = error.format_message()
    # After a command without arguments click has printed the help, and its message is empty.
    if not message.strip():
        sys.exit(2)
    for click_wording, wording in _WORDINGS.items():
        message = re.sub(click_wording, wording, message)
    # What was typed for the command, and the names of its options and arguments. Click may not have found a command.
    path = "attnscope"
    parameters = set()
    if error.ctx is not None:
        path = error.ctx.command_path
        parameters = {parameter.name for parameter in error.ctx.command.params}
    hint = f"see {path} --help"
    # An unquoted text looks like several arguments.
    if "text" in parameters and message.startswith("Got unexpected extra argument"):
        several = "for several: attnscope page, or batch"
        if "split" in parameters:
            several = "several come from a file: --file"
        hint = f"quote a text of several words; {several}"
    _fail(message.rstrip("."), hint, status=2)


def _fail_if_interrupted() -> None:
    """End as interrupted if Ctrl-C came during an import: an error that follows from it would mislead the user."""
    if is_interrupted():
        _fail("interrupted", status=_INTERRUPTED)


def _fail(message: str, hint: str = "", status: int = 1) -> NoReturn:
    """End with an error and a hint on stderr; "" = no such line."""
    if message:
        print(f"error: {one_line(message)}", file=sys.stderr)
    if hint:
        print(f"hint: {one_line(hint)}", file=sys.stderr)
    with contextlib.suppress(OSError):
        sys.stderr.flush()
    _release_stdout()
    sys.exit(status)


def _release_stdout() -> None:
    """Flush stdout. If that fails, replace it, so that Python does not try again at exit and print the error."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
