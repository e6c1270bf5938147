"""Show progress on stderr: a bar on a terminal, elsewhere a line once a minute."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attnscope.studies.inputs.texts import Progress as Done
    from attnscope.studies.inputs.texts import Report


@contextlib.contextmanager
def progress(quiet: bool, texts: str = "texts", tokens: str = "tokens") -> "Iterator[Report | None]":
    """Show a progress bar on stderr with texts, tokens per second and the time left; elsewhere a line a minute.

    Args:
        quiet: Whether nothing is shown.
        texts: What texts are called in it.
        tokens: What tokens are called in it.

    Yields:
        The function to call after each text; None = nothing is shown.
    """
    started = time.monotonic()
    last_report = started
    step = ""
    with _bar(quiet, "reading") as update:

        def report(done: "Done") -> None:
            nonlocal started, last_report, step
            # Rate and time left are those of the step, which began after the last report.
            if done.step != step:
                started = last_report
                step = done.step
                update(restart=True)  # type: ignore[misc]  # never None here
            last_report = time.monotonic()
            rate = done.n_tokens / max(1e-9, last_report - started)
            total = None if done.share is None else 1.0
            line = f"{done.n_texts:,} {texts}, {done.n_tokens:,} {tokens}, {rate:,.0f} {tokens}/s"
            if step:
                line = f"{step}: {line}"
            update(description=line, total=total, completed=done.share or 0.0)  # type: ignore[misc]  # as above

        yield report if update else None


@contextlib.contextmanager
def progress_of_steps(quiet: bool, what: str) -> "Iterator[Callable[[int, int], None] | None]":
    """Show the progress of work with counted steps; `what` says what they are.

    Yields:
        The function to call with the number of steps that are done, and of all; None = nothing is shown.
    """
    with _bar(quiet, what) as update:

        def report(n_done: int, n_steps: int) -> None:
            update(completed=n_done, total=n_steps)  # type: ignore[misc]  # never None here

        yield report if update else None


@contextlib.contextmanager
def _bar(quiet: bool, what: str) -> "Iterator[Callable[..., None] | None]":
    """Yield the function that moves the bar, or writes a line a minute; None = nothing is shown.

    It takes what `rich.progress.Progress.update` does, without the task; with `restart` the bar begins anew.
    """
    # No bar where nobody looks, a line a minute where output goes to a file.
    if quiet or sys.stderr is None:
        yield None
        return
    if not sys.stderr.isatty():
        yield _once_a_minute(what)
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from attnscope.report.plain_text import open_console

    # A bar that vanishes when it is done.
    columns = (BarColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    with Progress(*columns, console=open_console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)

        def update(restart: bool = False, **facts: Any) -> None:
            if restart:
                bar.reset(task, **facts)
            else:
                bar.update(task, **facts)

        yield update


def _once_a_minute(what: str) -> "Callable[..., None]":
    """Return a function that prints once a minute how far the work is; it takes what `_bar` says."""
    last_line = time.monotonic()

    def update(
        restart: bool = False,
        description: str = what,
        completed: float = 0.0,
        total: float | None = None,
    ) -> None:
        nonlocal last_line
        if restart or time.monotonic() - last_line < 60:
            return
        last_line = time.monotonic()
        share = f" ({completed / total:.0%})" if total else ""
        print(f"note: {description}{share}", file=sys.stderr, flush=True)

    return update
