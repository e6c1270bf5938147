"""Show progress on stderr: a bar if stderr is a terminal, else one line per minute."""

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
        texts_noun: What the line calls the texts of a study, such as "pictures".
        tokens_noun: What the line calls the tokens of a study, such as "patches".

    Yields:
        The function that a study calls with its progress; None = nothing is shown.
    """
    step_start_s = time.monotonic()
    last_report_s = step_start_s
    step = ""
    with _show_bar(quiet, "reading") as update:
        if update is None:
            yield None
            return

        def report(study_progress: "StudyProgress") -> None:
            nonlocal step_start_s, last_report_s, step
            # A study may have several steps, such as reading and measuring. Each step has its own rate and time left. A
            # step starts at the last report of the step before.
            if study_progress.step != step:
                step_start_s = last_report_s
                step = study_progress.step
                update(restart=True)
            last_report_s = time.monotonic()
            # In tokens per second. The maximum avoids a division by 0.
            rate = study_progress.n_tokens / max(1e-9, last_report_s - step_start_s)
            line = (
                f"{study_progress.n_texts:,} {texts_noun}, {study_progress.n_tokens:,} {tokens_noun}, "
                f"{rate:,.0f} {tokens_noun}/s"
            )
            if step:
                line = f"{step}: {line}"
            # A bar starts without an end, and shows only that work goes on. The first known share gives it the end 1.0.
            # If a later share is not known (None), the bar keeps that end, because rich ignores total=None.
            total = None if study_progress.share is None else 1.0
            update(description=line, total=total, completed=study_progress.share or 0.0)

        yield report


@contextlib.contextmanager
def progress_of_layers(quiet: bool) -> "Iterator[Callable[[int, int], None] | None]":
    """Show the progress of work that goes layer by layer.

    Yields:
        The function to call with the number of layers that are done, and the number of all layers; None = nothing is
        shown.
    """
    with _show_bar(quiet, "layers") as update:
        if update is None:
            yield None
            return

        def report(n_done: int, n_layers: int) -> None:
            update(completed=n_done, total=n_layers)

        yield report


@contextlib.contextmanager
def _show_bar(quiet: bool, description: str) -> "Iterator[Callable[..., None] | None]":
    """Show a bar, or print one line per minute, until the context ends.

    Yields:
        The function that updates the bar or the line; None = nothing is shown. It takes three keyword arguments of
        `rich.progress.Progress.update`: `description`, `completed` and `total`. With `restart=True` alone, the bar and
        its clock start again.
    """
    # Python sets stderr to None if the process has no stderr.
    if quiet or sys.stderr is None:
        yield None
        return
    # Print lines if stderr goes to a file.
    if not sys.stderr.isatty():
        yield _make_line_printer(description)
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from attnscope.report.plain_text import open_console

    # On a terminal show a bar, which vanishes at the end (transient).
    columns = (BarColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    with Progress(*columns, console=open_console(stderr=True), transient=True) as bar:
        task = bar.add_task(description, total=None)

        def update(restart: bool = False, **fields: Any) -> None:
            if restart:
                bar.reset(task, **fields)
            else:
                bar.update(task, **fields)

        yield update


def _make_line_printer(first_description: str) -> "Callable[..., None]":
    """Return a function that takes the arguments listed in `_show_bar`, and prints a line at most once a minute."""
    step_start_s = last_call_s = last_line_s = time.monotonic()

    def update(
        restart: bool = False,
        description: str = first_description,
        completed: float = 0.0,
        total: float | None = None,
    ) -> None:
        nonlocal step_start_s, last_call_s, last_line_s
        # A step starts at the last report of the step before.
        if restart:
            step_start_s = last_call_s
            return
        last_call_s = time.monotonic()
        if last_call_s - last_line_s < 60:
            return
        last_line_s = last_call_s
        progress_note = ""
        if total and completed:
            # If the rest goes at the same rate, it takes (total - completed) / completed of the time so far.
            minutes_left = (last_call_s - step_start_s) / 60 * (total / completed - 1)
            progress_note = f" ({completed / total:.0%}, about {math.ceil(minutes_left)} min left)"
        print(f"note: {description}{progress_note}", file=sys.stderr, flush=True)

    return update
