"""The command line: parse, one call, print. Starts without torch, transformers, matplotlib or numpy."""

import os
import sys
from typing import Annotated

import typer

from attnscope import __version__
from attnscope.cli.heatmap import heatmap
from attnscope.cli.models import info, models
from attnscope.cli.show import show
from attnscope.errors import AttnscopeError

app = typer.Typer(
    name="attnscope",
    help="What each attention head of a transformer does on your text: exact heatmaps as files.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(heatmap)
app.command()(show)
app.command()(models)
app.command()(info)


def _print_version(asked: bool) -> None:
    if asked:
        print(f"attnscope {__version__}")
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
    """Runs the command line; a user's error is one line and a hint on stderr, and exit status 1."""
    try:
        app()
    except AttnscopeError as error:
        _fail(error.message, error.hint)
    except KeyboardInterrupt:
        _fail("interrupted", "", status=130)
    except BrokenPipeError:
        # Whoever read our output has enough; python would complain once more when it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except MemoryError:
        _fail("not enough memory", "choose fewer layers and heads (-L, -H, --pick), or a shorter text")
    except OSError as error:
        where = f" {error.filename}" if error.filename else ""
        _fail(f"{error.strerror or error}{where}")


def _fail(message: str, hint: str = "", status: int = 1) -> None:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    if hint:
        print(f"hint: {' '.join(hint.split())}", file=sys.stderr)
    sys.exit(status)
