"""Show progress on stderr: a bar on a terminal, elsewhere a line once a minute."""

import contextlib
import math
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attnscope.studies.inputs.texts import Progress as StudyProgress
    from attnscope.studies.inputs.texts import ReportProgress


@contextlib.contextmanager
def progress(
    quiet: bool, texts_noun: str = "texts", tokens_noun: str = "tokens"
) -> "Iterator[ReportProgress | None]":
    """Show how many texts and tokens a study has done, tokens per second, and on a terminal the time left.

    Args:
        quiet: Whether nothing is shown.
        texts_noun: The word for what is counted as texts, such as "pictures".
        tokens_noun: The word for what is counted as tokens, such as "patches".

    Yields:
        The function that a study calls with its progress; None = nothing is shown.
    """
    started = time.monotonic()
    last_report = started
    step = ""
    with _bar(quiet, "reading") as update:
        if update is None:
            yield None
            return

        def report(done: "StudyProgress") -> None:
            nonlocal started, last_report, step
            # Each step of a study has its own rate and time left. It began when the step before it last reported.
            if done.step != step:
                started = last_report
                step = done.step
                update(restart=True)
            last_report = time.monotonic()
            rate = done.n_tokens / max(1e-9, last_report - started)
            counts = f"{done.n_texts:,} {texts_noun}, {done.n_tokens:,} {tokens_noun}"
            line = f"{counts}, {rate:,.0f} {tokens_noun}/s"
            if step:
                line = f"{step}: {line}"
            # Without a share, the bar has no end, and shows only that work goes on.
            total = None if done.share is None else 1.0
            update(description=line, total=total, completed=done.share or 0.0)

        yield report


@contextlib.contextmanager
def progress_of_layers(quiet: bool) -> "Iterator[Callable[[int, int], None] | None]":
    """Show the progress of work that goes layer by layer.

    Yields:
        The function to call with the number of layers done, and of all layers; None = nothing is shown.
    """
    with _bar(quiet, "layers") as update:
        if update is None:
            yield None
            return

        def report(n_done: int, n_layers: int) -> None:
            update(completed=n_done, total=n_layers)

        yield report


@contextlib.contextmanager
def _bar(quiet: bool, description: str) -> "Iterator[Callable[..., None] | None]":
    """Yield the function that moves a bar, or that prints a line a minute; None = nothing is shown.

    The function takes keyword arguments of `rich.progress.Progress.update`: `description`, `completed` and `total`.
    With `restart=True` alone, the bar and its clock begin anew.
    """
    if quiet or sys.stderr is None:
        yield None
        return
    # Print lines where stderr goes to a file.
    if not sys.stderr.isatty():
        yield _once_a_minute(description)
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from attnscope.report.plain_text import open_console

    # On a terminal show a bar, which vanishes at the end (transient).
    columns = (BarColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    with Progress(*columns, console=open_console(stderr=True), transient=True) as bar:
        task = bar.add_task(description, total=None)

        def update(restart: bool = False, **facts: Any) -> None:
            if restart:
                bar.reset(task, **facts)
            else:
                bar.update(task, **facts)

        yield update


def _once_a_minute(first_description: str) -> "Callable[..., None]":
    """Return a function that prints once a minute how far the work is, and takes the arguments that `_bar` lists."""
    started = last_call = last_line = time.monotonic()

    def update(
        restart: bool = False,
        description: str = first_description,
        completed: float = 0.0,
        total: float | None = None,
    ) -> None:
        nonlocal started, last_call, last_line
        # A step began when the step before it last reported.
        if restart:
            started = last_call
            return
        last_call = time.monotonic()
        if last_call - last_line < 60:
            return
        last_line = last_call
        progress = ""
        if total and completed:
            minutes_left = (last_call - started) / 60 * (total / completed - 1)
            progress = f" ({completed / total:.0%}, about {math.ceil(minutes_left)} min left)"
        print(f"note: {description}{progress}", file=sys.stderr, flush=True)

    return update
