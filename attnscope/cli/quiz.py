"""Run `attnscope learn trace --quiz`: print the inputs of each step of a trace, ask for its numbers, grade answers.

A trace is the computation of one attention layer as a list of steps. A step is one operation of one head, such as its
scores, with the array that it gives.
"""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console, Group, RenderableType
from rich.text import Text

from attnscope.errors import AttnscopeError, UsageError, amount, safe
from attnscope.questions.trace import Trace, draw_numbers, draw_section, draw_title, format_heading

_TOLERANCE = 0.01 + 1e-9
"""The absolute and the relative tolerance of an answer. Two decimals are enough; 1e-9 allows for float rounding."""

_MAX_BY_HAND = 16
"""The most numbers of a step, and the most columns (d_head) of a head, that a user can compute by hand."""

Step = dict[str, Any]
"""A step of `Trace.steps`, with its "name", "head", "axes" (such as ["key"]) and "value" (an array)."""

_ASKED_STEPS = ("dot_products", "scores", "weights", "head_output")
"""The names of the steps whose numbers the user is asked for, if they are few enough. Other steps are shown."""

_STEPS_OVER_COLUMNS = ("dot_products", "head_output")
"""The names of the steps that take more work if a head has more columns."""

_HIDDEN_STEPS = ("exponentials", "weighted_values", "joined", "output")
"""The names of the steps that are neither asked nor shown."""


def run_quiz(trace: Trace, console: Console, read_line: Callable[[], str]) -> None:
    """Ask for the numbers of each traced head, and grade the answers.

    Args:
        trace: The trace of one query.
        console: Prints the questions and the grades.
        read_line: Returns the next answer with its line end; "" = the input has ended.

    Raises:
        UsageError: The trace is of all queries, or has no step that is small enough for pen and paper.
        AttnscopeError: There are fewer answers than questions.
    """
    n_questions = _count_questions(trace)

    def show(*parts: RenderableType) -> None:
        console.print(Group(*parts))

    # Go through the steps in order: ask for some, show others.
    instructions = "Type the numbers of each step with spaces between. Two decimals are enough."
    show(Text(format_heading(trace), style="bold"), Text(instructions))
    n_right = 0
    n_asked = 0
    head = None
    for step_number, step in enumerate(trace.steps, start=1):
        if step["name"] in _HIDDEN_STEPS:
            continue
        # Print a heading before the first step of each head.
        if step["head"] != head:
            head = step["head"]
            show(draw_section(trace, head))
        title, formula, code = draw_title(step, step_number)
        correct_numbers = draw_numbers(step, trace.tokens, console)
        if not _is_asked(trace, step):
            show(title, formula, code, correct_numbers)
            continue
        # Ask the question, without the code. If the step has one number per key, print the tokens of the keys.
        key_tokens = ""
        if step["axes"] == ["key"]:
            key_tokens = "    " + safe(" ".join(trace.tokens["key"]))
        show(title, formula, Text(key_tokens))
        # Read the answer, and print its grade and the correct numbers. None = the user skips the step.
        answer = _read_answer(step, console, read_line, n_asked, n_questions)
        n_asked += 1
        if answer is None:
            grade = Text("    No answer. The numbers are:", style="red")
        elif np.allclose(answer, step["value"], rtol=_TOLERANCE, atol=_TOLERANCE):
            grade = Text("    Right.", style="green")
            n_right += 1
        else:
            grade = Text("    Wrong. The numbers are:", style="red")
        show(grade, correct_numbers)
    show(Text(f"\n{n_right} of {n_questions} right", style="bold"))


def parse_numbers(answer: str, n_numbers: int) -> NDArray[np.float64]:
    """Return the numbers of an answer such as `0.18 0.18 0.37` or `(0.27, 0.27)`, as (number,).

    Raises:
        UsageError: The answer has a word that is no number, or more or fewer numbers than `n_numbers`.
    """
    # Brackets, commas and semicolons separate numbers; a typographic minus counts as one.
    words = re.sub(r"[(),;\[\]]", " ", answer.replace("−", "-")).split()
    try:
        numbers = np.array([float(word) for word in words])
    except ValueError:
        raise UsageError(
            f"{answer.strip()!r} has a word that is no number", f"type {amount(n_numbers, 'number')}"
        ) from None
    if len(numbers) != n_numbers:
        raise UsageError(f"you typed {amount(len(numbers), 'number')}", f"this step has {n_numbers}")
    return numbers


def _count_questions(trace: Trace) -> int:
    """Return how many steps of a trace the user is asked for.

    Raises:
        UsageError: The trace is of all queries, or has no step to ask for.
    """
    # None = the trace is of all queries.
    if trace.query is None:
        raise UsageError(
            "a quiz is about one query, and none is given", "choose one, such as --query sat"
        )
    n_questions = sum(_is_asked(trace, step) for step in trace.steps)
    if not n_questions:
        raise UsageError(
            f"no step of this trace has {_MAX_BY_HAND} numbers or fewer",
            "choose a shorter text for pen and paper",
        )
    return n_questions


def _is_asked(trace: Trace, step: Step) -> bool:
    """Return whether the user is asked for a step: it must be small enough to be computed by hand."""
    # The array "keys" of a head is (key, d_head).
    if step["name"] in _STEPS_OVER_COLUMNS and trace.of("keys", step["head"]).shape[-1] > _MAX_BY_HAND:
        return False
    return step["name"] in _ASKED_STEPS and step["value"].size <= _MAX_BY_HAND


def _read_answer(
    step: Step, console: Console, read_line: Callable[[], str], n_asked: int, n_questions: int
) -> NDArray[np.float64] | None:
    """Return the answer to a step, (number,); None if the line is empty. Ask again if the answer cannot be read.

    `n_asked` of `n_questions` questions have been asked before this one.

    Raises:
        AttnscopeError: The input has ended.
    """
    while True:
        console.print("    > ", end="")
        line = read_line()
        # "" = the input has ended; an empty line still has its line end.
        if not line:
            console.print()
            raise AttnscopeError(
                f"the answers end after {n_asked} of {n_questions}",
                "type one line per step; an empty line skips a step",
            )
        if not line.strip():
            return None
        try:
            return parse_numbers(line, step["value"].size)
        except UsageError as error:
            console.print(Text(f"    {error}"))
