"""Record failures that do not end a study: texts on which the model computes NaN or infinity, and later steps.

Such a text is left out, and the result names it and the layer. Only small numbers are looked at, what a layer's
attention was summed up to, and never a tile: a softmax over a score that is no number has no number in its whole row,
so that every sum over the row shows it.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

import numpy as np

from attnscope.corpus import Problem
from attnscope.errors import AttnscopeError, amount, first_line, is_out_of_memory
from attnscope.models.info import ModelInfo
from attnscope.results.result import Result, is_interrupted, settle_corpus

MOST_NAMED = 10
"""Texts that are left out and named; of more there is the number."""

Place = tuple[str, int | None]
"""Kind of attention and layer; without a layer it is the last hidden states, of the whole model or "without L3H1"."""


def broken_rows(numbers: Mapping[str, Mapping[int, Any]]) -> dict[int, Place]:
    """Return which rows hold a NaN or an infinity, and where a model computed the first one.

    `numbers` are kind -> layer -> (row, ...): arrays, or tensors on any device. Rows are texts, as a rule.

    Returns:
        Row -> kind and layer, the first that was computed, for the rows that are broken alone.
    """
    # A decoder's layers are between those across; an encoder's are before all of them.
    kinds = list(numbers)
    places = [(kind, layer) for kind in kinds for layer in numbers[kind]]
    places.sort(key=lambda place: (place[0] != "encoder", place[1], kinds.index(place[0])))
    # A row belongs to the first place where it is broken.
    broken: dict[int, Place] = {}
    for kind, layer in places:
        array = numbers[kind][layer]
        array = np.asarray(array.cpu() if hasattr(array, "cpu") else array)
        is_whole = np.isfinite(array).reshape(len(array), -1).all(1)
        for row in np.flatnonzero(~is_whole).tolist():
            broken.setdefault(row, (kind, layer))
    return broken


@dataclass(frozen=True)
class LeftOut:
    """Hold the texts on which a model computes NaN or infinity.

    `first` has the first MOST_NAMED of them, in the order of the corpus: index, source, line, place.
    """

    n: int = 0
    first: tuple[tuple[int, str, int, Place], ...] = ()

    @classmethod
    def of(cls, texts: Iterable[Any], broken: Mapping[int, Place]) -> LeftOut:
        """Return the texts that are broken; `broken` has the place of each by its index in the corpus."""
        named = [
            (text.index, text.source, text.line, broken[text.index])
            for text in texts
            if text.index in broken
        ]
        return cls(len(named), tuple(sorted(named)[:MOST_NAMED]))

    def merge(self, other: LeftOut) -> LeftOut:
        """Return the texts of both, which have none in common; in any order the same."""
        return LeftOut(self.n + other.n, tuple(sorted((*self.first, *other.first))[:MOST_NAMED]))

    def problems(self, info: ModelInfo) -> list[dict[str, Any]]:
        """Entries for the problems of a corpus."""
        problems = [
            Problem(source, line, f"not studied: {describe_place(info, place)}; {hint(info)}")
            for _, source, line, place in self.first
        ]
        # Those that are not named are counted in one entry.
        more = self.n - len(problems)
        if more:
            problems.append(
                Problem(
                    problems[-1].source,
                    None,
                    f"{amount(more, 'more text')} not studied: as those before",
                )
            )
        return [asdict(problem) for problem in problems]

    def require_some_left(self, n_texts: int, info: ModelInfo) -> None:
        """Refuse a study of which no text is left."""
        if self.n and not n_texts:
            where = describe_place(info, self.first[0][3])
            raise AttnscopeError(
                f"no text is left: on all {self.n:,}, {info.name}'s {where}", hint(info)
            )


def refusal(info: ModelInfo, place: Place) -> AttnscopeError:
    """Return the error of a picture that cannot be drawn, as the model computes NaN or infinity on what it reads."""
    return AttnscopeError(f"{info.name}'s {describe_place(info, place)} on this text", hint(info))


def describe_place(info: ModelInfo, place: Place) -> str:
    """Such as `decoder layer 3 computes NaN or infinity in float16`."""
    kind, layer = place
    if layer is None:
        states = f"last hidden states {kind}".strip()
        return f"{states} are NaN or infinite in {info.dtype}"
    layers = f"{kind} layer" if len(info.kinds) > 1 else "layer"
    return f"{layers} {layer} computes NaN or infinity in {info.dtype}"


def hint(info: ModelInfo) -> str:
    """Return what may help."""
    if info.dtype == "float16":
        return "try --dtype float32 or bfloat16, in which larger numbers fit"
    wider = "" if info.dtype == "float64" else ", or --dtype float64"
    return f"its weights may be damaged: get the files again{wider}"


# Steps that failed


R = TypeVar("R", bound=Result)


def failure(step: str, error: Exception) -> dict[str, str]:
    """Return what a record lists among the `failures` of its `run` when a step, such as "--causal", raised an error."""
    if os.environ.get("ATTNSCOPE_TRACEBACK"):
        traceback.print_exception(error)
    # Our own errors say what failed and what helps; of others only the want of memory is known.
    if isinstance(error, AttnscopeError):
        return {"step": step, "error": error.message, "hint": error.hint}
    if is_out_of_memory(error):
        return {
            "step": step,
            "error": "not enough memory",
            "hint": "choose fewer layers and heads, or shorter texts",
        }
    reason = f"{type(error).__name__}: {first_line(error)}"
    return {
        "step": step,
        "error": reason,
        "hint": "with ATTNSCOPE_TRACEBACK=1 in the environment it says where",
    }


def add_step(record: R, name: str, add: Callable[[R], R]) -> R:
    """Return the record after a further step with a name; it does not follow a failure or an interruption.

    A step that fails or is interrupted leaves the record as it was, and the record says so.
    """
    if is_interrupted(record.corpus) or record.run.get("failures"):
        return record
    try:
        return add(record)
    except KeyboardInterrupt:
        return replace(record, corpus=settle_corpus(record.corpus, interrupted=True))
    except Exception as error:
        return replace(record, run={**record.run, "failures": [failure(name, error)]})
