"""The command line: parse, one call, print. Starts without torch, transformers or matplotlib."""

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
from attnscope.cli.build import Command, Group, command
from attnscope.errors import AttnscopeError, UsageError, is_out_of_memory, one_line
from attnscope.host import is_interrupted, tame_matplotlib
from attnscope.version import VERSION

PANELS = {
    "See where heads look": ("heatmap", "page", "batch"),
    "Explain what heads do": ("heads", "atlas", "relations", "compare", "why"),
    "Test what you think you saw": ("ablate", "patch", "weights", "training"),
    "Learn how attention works": ("learn",),
    "Tools": ("show", "models"),
}
"""The commands, as `--help` groups them. Each is the function of its name in a module of that name."""

LEARN = ("trace", "split", "cost")
"""The commands of `learn`."""

_LEARN = "See how attention is computed, how heads split it, and what it costs."

NAMES = tuple(name for names in PANELS.values() for name in names)

_USUAL = {"help_option_names": ["-h", "--help"]}


def build_app(names: Sequence[str] = NAMES) -> typer.Typer:
    """Return the command line with some of its commands: building the options of one takes its time."""
    app = typer.Typer(
        name="attnscope",
        cls=Group,
        help="What each attention head of a transformer does on your text: exact heatmaps as files.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode="markdown",
        context_settings=_USUAL,
    )
    app.callback()(attnscope)
    # Commands by panel; modules of commands that are not asked for stay unread.
    for panel, members in PANELS.items():
        for name in members:
            if name not in names:
                continue
            module = import_module(f"attnscope.cli.{name}")
            if name == "learn":
                learn = typer.Typer(
                    cls=Group, no_args_is_help=True, rich_markup_mode="markdown", help=_LEARN
                )
                for inner in LEARN:
                    _add(learn, getattr(module, inner))
                app.add_typer(learn, name="learn", rich_help_panel=panel, context_settings=_USUAL)
            else:
                _add(app, getattr(module, name), panel)
    # Commands of installed plugins.
    for name, function in plugins.commands().items():
        if name in names or names == NAMES:
            _add(app, function, "Added by other packages")
    return app


def _add(app: typer.Typer, function: Callable[..., None], panel: str | None = None) -> None:
    """Add a command."""
    app.command(cls=Command, rich_help_panel=panel, context_settings=_USUAL)(command(function))


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


def main() -> None:
    """Run the command line; a user's error is one line and a hint on stderr, and exit status 1 or 2."""
    tame_matplotlib()
    _tolerate_unprintable()
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
        # Whoever read our output has enough.
        _release_stdout()
        sys.exit(1)
    except MemoryError:
        _fail("not enough memory", _SMALLER)
    except OSError as error:
        where = f" {error.filename}" if error.filename else ""
        _fail(f"{error.strerror or error}{where}")
    except Exception as error:
        _fail_if_interrupted()
        if is_out_of_memory(error):
            _fail("not enough memory", _SMALLER)
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


def _fail_if_interrupted() -> None:
    """End as interrupted if Ctrl-C cut an import short: the errors that follow from it are not the user's."""
    if is_interrupted():
        _fail("interrupted", status=_INTERRUPTED)


def _require_folder() -> None:
    """End where the current folder has been removed: libraries would end the process, or open nothing by its name."""
    try:
        os.getcwd()  # noqa: PTH109  # pathlib takes longer to load
    except OSError as error:
        raise AttnscopeError(
            f"the current folder cannot be used: {error.strerror}",
            "it has been removed, or is closed: cd to another",
        ) from None


def _run() -> int:
    """Parse and runs; of all commands, whose options follow from their signatures, the named one alone is built."""
    if sys.argv[1:2] == ["help"]:
        sys.argv[1:] = [*sys.argv[2:], "--help"]
    known = (*NAMES, *plugins.commands())
    names = tuple(sys.argv[1:2]) if sys.argv[1:2] and sys.argv[1] in known else NAMES
    try:
        return build_app(names)(standalone_mode=False) or 0
    except typer.Abort as error:
        # typer takes what ends too early, such as a damaged file, for Ctrl-D at a prompt.
        raise error.__cause__ or error from None


_SMALLER = "choose fewer layers and heads (-L, -H, --pick), or a shorter text"

_WORDINGS = {
    r"Input should be greater than or equal to (\S+)": r"it must be at least \1",
    r"Input should be less than or equal to (\S+)": r"it must be at most \1",
    r"Input should be a valid integer.*": "it must be a whole number",
    r"Input should be a valid number.*": "it must be a number",
    r"Unable to parse input string as an integer, exceeded maximum size": "it has too many digits",
    r"Value error, ": "",
}
"""What typer says of a value, by pydantic, and how we say it."""

_INTERRUPTED = 130  # as shells count: 128 + SIGINT


def _tolerate_unprintable() -> None:
    """Let text that stdout's encoding cannot write be printed nearly as it is, instead of failing."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # UTF-8 lacks only the bytes of file names that are no text, which go out as they came in.
        utf8 = codecs.lookup(sys.stdout.encoding).name == "utf-8"
        sys.stdout.reconfigure(errors="surrogateescape" if utf8 else "backslashreplace")


def _fail_usage(error: Any) -> NoReturn:
    """Say what click found wrong. Typer exports no base class for these errors, and brings a click of its own."""
    # An empty message means that the help was shown.
    message = error.format_message()
    if not message.strip():  # the help was shown, as there were no arguments at all
        sys.exit(2)
    # Click's wording to ours.
    for theirs, ours in _WORDINGS.items():
        message = re.sub(theirs, ours, message)
    command = getattr(error.ctx, "command_path", "attnscope")
    hint = f"see {command} --help"
    # An unquoted text looks like several arguments.
    takes = (
        {parameter.name for parameter in error.ctx.command.params}
        if getattr(error, "ctx", None)
        else set()
    )
    if "text" in takes and message.startswith("Got unexpected extra argument"):
        several = (
            "several come from a file: --file"
            if "split" in takes
            else "for several: attnscope page, or batch"
        )
        hint = f"quote a text of several words; {several}"
    _fail(message.rstrip("."), hint, status=2)


def commands() -> dict[str, Any]:
    """Return every command as click has it, by its name: also "learn trace"."""
    by_path: dict[str, Any] = {}
    waiting = [("", typer.main.get_command(build_app()))]
    while waiting:
        path, one = waiting.pop()
        inner: dict[str, Any] = getattr(one, "commands", {})
        waiting += [(f"{path} {name}".strip(), each) for name, each in inner.items()]
        if not inner:
            by_path[path] = one
    return dict(reversed(by_path.items()))


def _fail(message: str, hint: str = "", status: int = 1) -> NoReturn:
    for name, line in (("error", message), ("hint", hint)):
        if line:
            print(f"{name}: {one_line(line)}", file=sys.stderr)
    with contextlib.suppress(OSError):
        sys.stderr.flush()
    _release_stdout()
    sys.exit(status)


def _release_stdout() -> None:
    """Write out what stdout still holds; where that fails, python must not complain of it once more at exit."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
