"""Failures that come late: what was measured before them is kept, and the record says what failed."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from attnscope.errors import AttnscopeError, first_line, is_out_of_memory
from attnscope.records.frame.shards import is_interrupted, settle_corpus


class _Record(Protocol):
    @property
    def run(self) -> Mapping[str, Any]: ...

    @property
    def corpus(self) -> Mapping[str, Any]: ...


R = TypeVar("R", bound=_Record)


def failure(step: str, error: Exception) -> dict[str, str]:
    """What a record says of a step that failed, among the `failures` of its `run`.

    Args:
        step: What was at work, such as "--causal".
        error: What it raised.
    """
    if os.environ.get("ATTNSCOPE_TRACEBACK"):
        traceback.print_exception(error)
    if isinstance(error, AttnscopeError):
        return {"step": step, "error": error.message, "hint": error.hint}
    if is_out_of_memory(error):
        return {"step": step, "error": "not enough memory", "hint": "choose fewer layers and heads, or shorter texts"}
    reason = f"{type(error).__name__}: {first_line(error)}"
    return {"step": step, "error": reason, "hint": "with ATTNSCOPE_TRACEBACK=1 in the environment it says where"}


def try_step(found: R, step: str, do: Callable[[R], R]) -> R:
    """What a later step makes of a record; where it fails or is interrupted, the record as it was, which says so.

    Args:
        found: What was measured before.
        step: What a user calls the step.
        do: The step.
    """
    try:
        return do(found)
    except KeyboardInterrupt:
        return replace(found, corpus=settle_corpus(found.corpus, interrupted=True))  # type: ignore[type-var]  # a dataclass
    except Exception as error:
        failures = [*found.run.get("failures", ()), failure(step, error)]
        return replace(found, run={**found.run, "failures": failures})  # type: ignore[type-var]


def add_steps(found: R, steps: Sequence[tuple[str, Callable[[R], R]]]) -> R:
    """The record after further steps, each with its name; no step follows a failure or an interruption."""
    for name, add in steps:
        if not is_interrupted(found.corpus) and not found.run.get("failures"):
            found = try_step(found, name, add)
    return found
