"""Options that mean the same in every command, and how their values are read."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from attnscope.errors import UsageError

if TYPE_CHECKING:
    from attnscope.studies.inputs.texts import Progress as Done
    from attnscope.studies.inputs.texts import Report


def complete_models(incomplete: str) -> list[str]:
    """For the shell: names of models that begin so."""
    from attnscope.models.catalog import list_models

    return [entry.name for entry in list_models() if entry.name.startswith(incomplete)]


def complete_roles(incomplete: str) -> list[str]:
    """For the shell: roles that begin so, each ready for its threshold."""
    from attnscope.studies.heads.rules import RULES

    return [f"{role}=" for role in RULES if role.startswith(incomplete)]


def complete_measures(incomplete: str) -> list[str]:
    """For the shell: a list of measures whose last one begins so."""
    from attnscope.core.measures.catalogue import MEASURES

    before, comma, last = incomplete.rpartition(",")
    return [f"{before}{comma}{name}" for name in MEASURES if name.startswith(last)]


def one_model(argument: str | None, option: str | None) -> str | None:
    """The model of a command that takes it as its argument or by `--model`, but not by both."""
    if argument is not None and option is not None:
        raise UsageError("the model is named twice", f"leave out {argument}, or --model {option}")
    return option if argument is None else argument


@contextlib.contextmanager
def progress(quiet: bool, texts: str = "texts", tokens: str = "tokens") -> "Iterator[Report | None]":
    """A progress bar on stderr with texts, tokens, tokens a second and the time left; only on a terminal."""
    started, step = time.monotonic(), ""
    with _bar(quiet, "reading") as update:

        def report(done: "Done") -> None:
            nonlocal started, step
            if done.step != step:  # the time left is that of the step
                started, step = time.monotonic(), done.step
                update(restart=True)  # type: ignore[misc]  # never None here
            rate = done.n_tokens / max(1e-9, time.monotonic() - started)
            total = None if done.share is None else 1.0
            line = f"{done.n_texts:,} {texts}, {done.n_tokens:,} {tokens}, {rate:,.0f} {tokens}/s"
            line = f"{done.step}: {line}" if done.step else line
            update(description=line, total=total, completed=done.share or 0.0)  # type: ignore[misc]  # as above

        yield report if update else None


@contextlib.contextmanager
def progress_of_steps(quiet: bool, what: str) -> "Iterator[Callable[[int, int], None] | None]":
    """A progress bar on stderr for work whose steps are counted, with the time left; only on a terminal."""
    with _bar(quiet, what) as update:
        yield (lambda done, of: update(completed=done, total=of)) if update else None


@contextlib.contextmanager
def _bar(quiet: bool, what: str) -> "Iterator[Callable[..., None] | None]":
    if quiet or sys.stderr is None or not sys.stderr.isatty():
        yield None
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from attnscope.report.plain_text import open_console

    columns = (BarColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    with Progress(*columns, console=open_console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)

        def update(restart: bool = False, **facts: Any) -> None:
            (bar.reset if restart else bar.update)(task, **facts)

        yield update
