"""Run a trace as a quiz: print the inputs of each head, ask for its outputs, and grade the answers."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console, Group, RenderableType
from rich.text import Text

from attnscope.errors import AttnscopeError, UsageError, amount, safe
from attnscope.questions.trace import Trace, draw_numbers, draw_section, draw_title, heading_of

ROUNDING = 0.01
"""An answer may be off by this much, or by this share of the number: two decimals are enough."""

_BY_HAND = 16
"""Numbers that a step may have, and columns that a head may have, to be computed by hand."""

Step = dict[str, Any]
"""A step as `Trace.steps` has it."""

_ASKED = ("dot_products", "scores", "weights", "head_output")
"""The steps that are asked, if they are small enough."""

_SUMS = ("dot_products", "head_output")
"""Those of them whose numbers are sums over the columns of a head."""

_HIDDEN = ("exponentials", "weighted_values", "joined", "output")
"""The steps that are not shown."""


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
    # Only small steps of one query can be done by hand.
    if trace.query is None:
        raise UsageError(
            "a quiz is about one query, and none is given", "choose one, such as --query sat"
        )
    steps = trace.steps
    n_questions = sum(_is_asked(trace, step) for step in steps)
    if not n_questions:
        raise UsageError(
            f"no step of this trace has {_BY_HAND} numbers or fewer",
            "choose a shorter text for pen and paper",
        )

    def show(*parts: RenderableType) -> None:
        console.print(Group(*parts))

    # The steps in order: those that are asked wait for an answer, others are shown.
    how = "Type the numbers of each step with spaces between. Two decimals are enough."
    show(Text(heading_of(trace), style="bold"), Text(how))
    n_right = n_asked = 0
    head = None
    for number, step in enumerate(steps, start=1):
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
        # The question, the answer, then the numbers.
        labels = ""
        if step["axes"] == ["key"]:
            labels = "    " + safe(" ".join(trace.tokens["key"]))
        show(title, formula, Text(labels))
        answer = _read_answer(step, console, read_line, n_asked, n_questions)
        n_asked += 1
        grade = Text("    Wrong. The numbers are:", style="red")
        if answer is None:
            grade = Text("    No answer. The numbers are:", style="red")
        elif is_close(answer, step["value"]):
            grade = Text("    Right.", style="green")
            n_right += 1
        show(grade, numbers)
    show(Text(f"\n{n_right} of {n_questions} right", style="bold"))


def is_close(answer: NDArray[np.float64], value: NDArray[np.float64]) -> bool:
    """Return whether every number of an answer is right but for rounding."""
    return bool(np.isclose(answer, value, rtol=ROUNDING, atol=ROUNDING + 1e-9).all())


def parse_numbers(written: str, n_numbers: int) -> NDArray[np.float64]:
    """Return the numbers of an answer such as `0.18 0.18 0.37` or `(0.27, 0.27)`.

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
    """Return whether a step is asked, and small enough to be computed by hand."""
    if step["name"] in _SUMS and trace.of("keys", step["head"]).shape[-1] > _BY_HAND:
        return False
    return step["name"] in _ASKED and step["value"].size <= _BY_HAND


def _read_answer(
    step: Step, console: Console, read_line: Callable[[], str], n_before: int, n_questions: int
) -> NDArray[np.float64] | None:
    """Return the next answer, asked for again until it can be read; None = an empty line."""
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
