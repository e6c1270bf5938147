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
    """Show a progress bar on stderr with texts, tokens per second and the time left; elsewhere a line a minute."""
    started = heard = time.monotonic()
    step = ""
    with _bar(quiet, "reading") as update:

        def report(done: "Done") -> None:
            nonlocal started, heard, step
            # Rate and time left are those of the step, which began after the last report.
            if done.step != step:
                started = heard
                step = done.step
                update(restart=True)  # type: ignore[misc]  # never None here
            heard = time.monotonic()
            rate = done.n_tokens / max(1e-9, heard - started)
            total = None if done.share is None else 1.0
            line = f"{done.n_texts:,} {texts}, {done.n_tokens:,} {tokens}, {rate:,.0f} {tokens}/s"
            line = f"{done.step}: {line}" if done.step else line
            update(description=line, total=total, completed=done.share or 0.0)  # type: ignore[misc]  # as above

        yield report if update else None


@contextlib.contextmanager
def progress_of_steps(quiet: bool, what: str) -> "Iterator[Callable[[int, int], None] | None]":
    """Show the progress of work with counted steps."""
    with _bar(quiet, what) as update:
        yield (lambda done, of: update(completed=done, total=of)) if update else None


@contextlib.contextmanager
def _bar(quiet: bool, what: str) -> "Iterator[Callable[..., None] | None]":
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
            (bar.reset if restart else bar.update)(task, **facts)

        yield update


MINUTE_S = 60.0


def _once_a_minute(what: str) -> "Callable[..., None]":
    """Return what says once a minute how far the work is; it takes what a progress bar takes."""
    said = time.monotonic()

    def update(
        restart: bool = False,
        description: str = what,
        completed: float = 0.0,
        total: float | None = None,
    ) -> None:
        nonlocal said
        if restart or time.monotonic() - said < MINUTE_S:
            return
        said = time.monotonic()
        share = f" ({completed / total:.0%})" if total else ""
        print(f"note: {description}{share}", file=sys.stderr, flush=True)

    return update
