"""Run a trace as a quiz: print the inputs of each head, ask for its outputs, and grade the answers."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console, Group, RenderableType
from rich.text import Text

from attnscope.errors import AttnscopeError, UsageError, amount, safe
from attnscope.questions.trace import Trace, draw_numbers, draw_section, draw_title, format_heading

_ROUNDING = 0.01 + 1e-9
"""An answer may be off by this much plus this share of the number: two decimals are enough, but for float rounding."""

_BY_HAND = 16
"""The most numbers of a step, and the most columns (d_head) of a head, with which a step is computed by hand."""

Step = dict[str, Any]
"""A step of `Trace.steps`, with its "name", "head", "axes" (such as ["key"]) and "value" (an array)."""

_ASKED = ("dot_products", "scores", "weights", "head_output")
"""The steps whose numbers the user is asked for, if they are small enough. Other steps are shown."""

_SUMS_OVER_COLUMNS = ("dot_products", "head_output")
"""The steps that take more work if a head has more columns."""

_HIDDEN = ("exponentials", "weighted_values", "joined", "output")
"""The steps that are neither asked nor shown."""


def ask(trace: Trace, console: Console, read_line: Callable[[], str]) -> None:
    """Ask for the numbers of each head that is traced, and grade the answers.

    Args:
        trace: The trace of one query.
        console: Prints the questions and the grades.
        read_line: Returns the next answer with its line end; "" = there is none.

    Raises:
        UsageError: The trace has all queries, or no step that is small enough for pen and paper.
        AttnscopeError: There are fewer answers than questions.
    """
    n_questions = _count_questions(trace)

    def show(*parts: RenderableType) -> None:
        console.print(Group(*parts))

    # Go through the steps in order: ask for some, show others.
    how = "Type the numbers of each step with spaces between. Two decimals are enough."
    show(Text(format_heading(trace), style="bold"), Text(how))
    n_right = 0
    n_asked = 0
    head = None
    for number, step in enumerate(trace.steps, start=1):
        if step["name"] in _HIDDEN:
            continue
        # A heading before the first step of each head.
        if step["head"] != head:
            head = step["head"]
            show(draw_section(trace, head))
        title, formula, code = draw_title(step, number)
        numbers = draw_numbers(step, trace.tokens, console)
        if not _is_asked(trace, step):
            show(title, formula, code, numbers)
            continue
        # The question. Numbers along keys stand under the tokens of the keys.
        labels = ""
        if step["axes"] == ["key"]:
            labels = "    " + safe(" ".join(trace.tokens["key"]))
        show(title, formula, Text(labels))
        # The answer, its grade, and the right numbers.
        answer = _read_answer(step, console, read_line, n_asked, n_questions)
        n_asked += 1
        if answer is None:
            grade = Text("    No answer. The numbers are:", style="red")
        elif np.allclose(answer, step["value"], rtol=_ROUNDING, atol=_ROUNDING):
            grade = Text("    Right.", style="green")
            n_right += 1
        else:
            grade = Text("    Wrong. The numbers are:", style="red")
        show(grade, numbers)
    show(Text(f"\n{n_right} of {n_questions} right", style="bold"))


def parse_numbers(written: str, n_numbers: int) -> NDArray[np.float64]:
    """Return the numbers of an answer such as `0.18 0.18 0.37` or `(0.27, 0.27)`.

    Raises:
        UsageError: It has a word that is no number, or another count of numbers than `n_numbers`.
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


def _count_questions(trace: Trace) -> int:
    """Return how many steps of a trace the user is asked for; refuse a trace without any by a UsageError."""
    if trace.query is None:
        raise UsageError(
            "a quiz is about one query, and none is given", "choose one, such as --query sat"
        )
    n_questions = sum(_is_asked(trace, step) for step in trace.steps)
    if not n_questions:
        raise UsageError(
            f"no step of this trace has {_BY_HAND} numbers or fewer",
            "choose a shorter text for pen and paper",
        )
    return n_questions


def _is_asked(trace: Trace, step: Step) -> bool:
    """Return whether the user is asked for a step: it must be small enough to be computed by hand."""
    # The keys of a head are (key, d_head).
    if step["name"] in _SUMS_OVER_COLUMNS and trace.of("keys", step["head"]).shape[-1] > _BY_HAND:
        return False
    return step["name"] in _ASKED and step["value"].size <= _BY_HAND


def _read_answer(
    step: Step, console: Console, read_line: Callable[[], str], n_before: int, n_questions: int
) -> NDArray[np.float64] | None:
    """Return the next answer, (number,); None = an empty line. An answer that cannot be read is asked for again.

    `n_before` questions of `n_questions` have been answered.
    """
    while True:
        console.print("    > ", end="")
        line = read_line()
        if not line:
            console.print()
            raise AttnscopeError(
                f"the answers end after {n_before} of {n_questions}",
                "type one line per step; an empty line skips a step",
            )
        if not line.strip():
            return None
        try:
            return parse_numbers(line, step["value"].size)
        except UsageError as error:
            console.print(Text(f"    {error}"))
