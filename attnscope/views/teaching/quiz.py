"""A trace as a quiz: what goes into a head is printed, what comes out is asked for and graded."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from rich.console import Console, RenderableType
from rich.text import Text

from attnscope.errors import AttnscopeError, UsageError, amount
from attnscope.records.teaching.trace import Step, Trace
from attnscope.report.plain_text import safe, spell_out_parts
from attnscope.views.teaching.trace_terminal import draw_heading, draw_numbers, draw_title, name_section

ROUNDING = 0.01
"""An answer may be off by this much, or by this share of the number: two decimals are enough."""

_BY_HAND = 16
"""Numbers that a step may have, and columns that a head may have, to be computed by hand."""

_ASKED = ("dot_products", "scores", "weights", "head_output")
_SUMS = ("dot_products", "head_output")
_HIDDEN = ("exponentials", "weighted_values", "joined", "output")


def ask(trace: Trace, console: Console, read_line: Callable[[], str]) -> None:
    """Asks for the numbers of each head that is traced, and grades the answers.

    `read_line` gives the next answer with its line end; "" = there is none.

    Raises:
        UsageError: The trace has all queries, or no step that is small enough for pen and paper.
        AttnscopeError: There are fewer answers than questions.
    """
    if trace.query is None:
        raise UsageError("a quiz is about one query, and none is given", "choose one, such as --query sat")
    questions = [step for step in trace.steps if _is_asked(trace, step)]
    if not questions:
        raise UsageError(
            f"no step of this trace has {_BY_HAND} numbers or fewer", "choose a shorter text for pen and paper"
        )

    def show(*parts: RenderableType) -> None:
        console.print(spell_out_parts(parts, console))

    show(draw_heading(trace), Text("Type the numbers of each step with spaces between. Two decimals are enough."))
    n_right, head = 0, None
    for number, step in enumerate(trace.steps, start=1):
        if step.name in _HIDDEN:
            continue
        if step.head != head:
            head = step.head
            show(Text(f"\n{name_section(trace, head)}", style="bold underline"))
        if step not in questions:
            show(*draw_title(step, number), *draw_numbers(trace, step, console))
            continue
        show(*draw_title(step, number)[:2], Text(f"    {safe(' '.join(trace.keys))}" if step.axes == ("key",) else ""))
        answer = _read_answer(step, console, read_line, questions.index(step), len(questions))
        is_right = answer is not None and is_close(answer, step.value)
        n_right += is_right
        grade = "Right." if is_right else "No answer. The numbers are:" if answer is None else "Wrong. The numbers are:"
        show(Text(f"    {grade}", style="green" if is_right else "red"), *draw_numbers(trace, step, console))
    show(Text(f"\n{n_right} of {len(questions)} right", style="bold"))


def is_close(answer: NDArray[np.float64], value: NDArray[np.float64]) -> bool:
    """Whether every number of an answer is right but for rounding."""
    return bool(np.isclose(answer, value, rtol=ROUNDING, atol=ROUNDING + 1e-9).all())


def parse_numbers(written: str, n_numbers: int) -> NDArray[np.float64]:
    """The numbers of an answer such as `0.18 0.18 0.37` or `(0.27, 0.27)`.

    Raises:
        UsageError: It has other than numbers, or not as many as asked for.
    """
    words = re.sub(r"[(),;\[\]]", " ", written.replace("−", "-")).split()
    try:
        numbers = np.array([float(word) for word in words])
    except ValueError:
        raise UsageError(
            f"{written.strip()!r} has a word that is no number", f"type {amount(n_numbers, 'number')}"
        ) from None
    if len(numbers) != n_numbers:
        raise UsageError(f"you typed {amount(len(numbers), 'number')}", f"this step has {n_numbers}")
    return numbers


def _is_asked(trace: Trace, step: Step) -> bool:
    columns = trace.of("keys", step.head).shape[-1] if step.name in _SUMS else 0
    return step.name in _ASKED and max(step.value.size, columns) <= _BY_HAND


def _read_answer(
    step: Step, console: Console, read_line: Callable[[], str], n_before: int, n_asked: int
) -> NDArray[np.float64] | None:
    """The next answer, asked for again until it can be read; None = an empty line."""
    while True:
        console.print("    > ", end="")
        line = read_line()
        if not line:
            console.print()
            raise AttnscopeError(
                f"the answers end after {n_before} of {n_asked}", "type one line per step; an empty line skips a step"
            )
        if not line.strip():
            return None
        try:
            return parse_numbers(line, step.value.size)
        except UsageError as error:
            console.print(Text(f"    {error}"))
