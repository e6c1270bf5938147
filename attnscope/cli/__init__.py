"""The command line: parse, one call, print. Starts without torch, transformers, matplotlib or numpy."""

import codecs
import contextlib
import io
import os
import re
import sys
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from attnscope.cli.explain.atlas import atlas
from attnscope.cli.explain.compare import compare
from attnscope.cli.explain.heads import heads
from attnscope.cli.explain.relations import relations
from attnscope.cli.explain.why import why
from attnscope.cli.learn.cost import cost
from attnscope.cli.learn.split import split
from attnscope.cli.learn.trace import trace
from attnscope.cli.see.batch import batch
from attnscope.cli.see.heatmap import heatmap
from attnscope.cli.see.page import page
from attnscope.cli.see.rollout import rollout
from attnscope.cli.test.ablate import ablate
from attnscope.cli.test.patch import patch
from attnscope.cli.test.prune import prune
from attnscope.cli.test.training import training
from attnscope.cli.test.weights import weights
from attnscope.cli.tools.models import info, models
from attnscope.cli.tools.show import show
from attnscope.errors import AttnscopeError, UsageError, is_out_of_memory, one_line
from attnscope.host import is_interrupted, tame_matplotlib
from attnscope.version import VERSION


class _PlainFlags:
    """Flags take no value, so help names no type of one."""

    def get_params(self, ctx: Any) -> list[Any]:
        parameters: list[Any] = super().get_params(ctx)  # type: ignore[misc]  # of a command
        for parameter in parameters:
            if getattr(parameter, "is_flag", False):
                parameter.metavar = ""
        return parameters


class _Command(_PlainFlags, TyperCommand):
    """A command that takes an empty --out for a slip, as of a variable that is not set, and not for this folder."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not ctx.resilient_parsing and self.make_parser(ctx).parse_args(args=[*args])[0].get("out") == "":
            raise UsageError("--out is empty", "name a file or folder; . is the folder that you are in")
        rest: list[str] = super().parse_args(ctx, args)
        return rest


class _Group(_PlainFlags, TyperGroup): ...


_PANELS = {
    "see": "See where heads look",
    "explain": "Explain what heads do",
    "test": "Test what you think you saw",
    "learn": "Learn how attention works",
    "tools": "Tools",
}
"""What `--help` calls the commands of each folder, in the order in which it shows them."""

app = typer.Typer(
    name="attnscope",
    cls=_Group,
    help="What each attention head of a transformer does on your text: exact heatmaps as files.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (
    heatmap, page, batch, rollout,
    heads, atlas, relations, compare, why,
    ablate, patch, prune, weights, training,
    trace, split, cost,
    show, models, info,
):  # fmt: skip
    app.command(cls=_Command, rich_help_panel=_PANELS[command.__module__.split(".")[2]])(command)
_COMMANDS = list(app.registered_commands)


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        print(f"attnscope {VERSION}")
        raise typer.Exit


@app.callback()
def attnscope(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """What each attention head of a transformer does on your text: exact heatmaps as files.

    Results go to stdout: the paths that were written, a table, or with --json one JSON document. Notes go to stderr.
    Exit status: 0 done, 1 it failed, 2 wrong usage.
    """


def main() -> None:
    """Runs the command line; a user's error is one line and a hint on stderr, and exit status 1 or 2."""
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
    """Ends as interrupted if Ctrl-C cut an import short: the errors that follow from it are not the user's."""
    if is_interrupted():
        _fail("interrupted", status=_INTERRUPTED)


def _require_folder() -> None:
    """Ends where the current folder has been removed: libraries would end the process, or open nothing by its name."""
    try:
        os.getcwd()  # noqa: PTH109  # pathlib takes longer to load
    except OSError as error:
        raise AttnscopeError(
            f"the current folder cannot be used: {error.strerror}", "it has been removed, or is closed: cd to another"
        ) from None


def _run() -> int:
    """Parses and runs; of all commands, whose options follow from their signatures, the named one alone is built."""
    if sys.argv[1:2] == ["help"]:
        sys.argv[1:] = [*sys.argv[2:], "--help"]
    chosen = [command for command in _COMMANDS if command.callback and [command.callback.__name__] == sys.argv[1:2]]
    app.registered_commands = chosen or _COMMANDS
    try:
        return app(standalone_mode=False) or 0
    except typer.Abort as error:  # typer takes what ends too early, such as a damaged file, for Ctrl-D at a prompt
        raise error.__cause__ or error from None
    finally:
        app.registered_commands = _COMMANDS


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
    """Lets text that stdout's encoding cannot write be printed nearly as it is, instead of failing."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # UTF-8 lacks only the bytes of file names that are no text, which go out as they came in.
        utf8 = codecs.lookup(sys.stdout.encoding).name == "utf-8"
        sys.stdout.reconfigure(errors="surrogateescape" if utf8 else "backslashreplace")


def _fail_usage(error: Any) -> NoReturn:
    """Says what click found wrong. Typer exports no base class for these errors, and brings a click of its own."""
    message = error.format_message()
    if not message.strip():  # the help was shown, as there were no arguments at all
        sys.exit(2)
    for theirs, ours in _WORDINGS.items():
        message = re.sub(theirs, ours, message)
    command = getattr(error.ctx, "command_path", "attnscope")
    hint = f"see {command} --help"
    flag = error.option_name if type(error).__name__ == "NoSuchOption" else ""
    if flag and 1 <= len(others := _commands_with(flag)) <= 4:
        message, hint = f"No such option: {flag}", f"{flag} belongs to {' and '.join(others)}; {hint}"
    takes = {parameter.name for parameter in error.ctx.command.params} if getattr(error, "ctx", None) else set()
    if "text" in takes and message.startswith("Got unexpected extra argument"):
        several = "several come from a file: --file" if "split" in takes else "for several: attnscope page, or batch"
        hint = f"quote a text of several words; {several}"
    _fail(message.rstrip("."), hint, status=2)


def _commands_with(flag: str) -> list[str]:
    """The commands that have an option."""
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]  # it is a group
    return [name for name, of in commands.items() if any(flag in parameter.opts for parameter in of.params)]


def _fail(message: str, hint: str = "", status: int = 1) -> NoReturn:
    for name, line in (("error", message), ("hint", hint)):
        if line:
            print(f"{name}: {one_line(line)}", file=sys.stderr)
    with contextlib.suppress(OSError):
        sys.stderr.flush()
    _release_stdout()
    sys.exit(status)


def _release_stdout() -> None:
    """Writes out what stdout still holds; where that fails, python must not complain of it once more at exit."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
