"""Failures that come late: what was measured before them is kept, and the record says what failed."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from attnscope.errors import AttnscopeError, first_line, is_out_of_memory
from attnscope.results.completion import is_interrupted, settle_corpus


class _Record(Protocol):
    @property
    def run(self) -> Mapping[str, Any]: ...

    @property
    def corpus(self) -> Mapping[str, Any]: ...


R = TypeVar("R", bound=_Record)


def failure(step: str, error: Exception) -> dict[str, str]:
    """What a record lists among the `failures` of its `run` when a step, such as "--causal", raised an error."""
    if os.environ.get("ATTNSCOPE_TRACEBACK"):
        traceback.print_exception(error)
    if isinstance(error, AttnscopeError):
        return {"step": step, "error": error.message, "hint": error.hint}
    if is_out_of_memory(error):
        return {"step": step, "error": "not enough memory", "hint": "choose fewer layers and heads, or shorter texts"}
    reason = f"{type(error).__name__}: {first_line(error)}"
    return {"step": step, "error": reason, "hint": "with ATTNSCOPE_TRACEBACK=1 in the environment it says where"}


def try_step(record: R, step: str, do: Callable[[R], R]) -> R:
    """What a later step makes of a record. If it fails or is interrupted, the record as it was, which says so."""
    try:
        return do(record)
    except KeyboardInterrupt:
        return replace(record, corpus=settle_corpus(record.corpus, interrupted=True))  # type: ignore[type-var]  # a dataclass
    except Exception as error:
        failures = [*record.run.get("failures", ()), failure(step, error)]
        return replace(record, run={**record.run, "failures": failures})  # type: ignore[type-var]


def add_steps(record: R, steps: Sequence[tuple[str, Callable[[R], R]]]) -> R:
    """The record after further steps, each with its name; no step follows a failure or an interruption."""
    for name, add in steps:
        if not is_interrupted(record.corpus) and not record.run.get("failures"):
            record = try_step(record, name, add)
    return record
