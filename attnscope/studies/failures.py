"""Record failures that do not end a study: texts on which the model computes NaN or infinity, and later steps.

Such a text is left out, and the result names it and the layer. Only sums over a layer's attention are checked, never a
tile: after the softmax a NaN among the scores is in the whole row, so that every sum over the row is NaN.
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
"""How many of the texts that are left out are named; the others are counted."""

Place = tuple[str, int | None]
"""Where a NaN came up: kind of attention and layer. For the last hidden states the layer is None, and in place of the
kind stands the change of the model, such as "without L3H1"; empty = it was not changed."""


def broken_rows(numbers: Mapping[str, Mapping[int, Any]]) -> dict[int, Place]:
    """Return the rows that hold a NaN or an infinity, each with the first kind and layer where it has one.

    `numbers` are kind → layer → (row, ...): arrays, or tensors on any device. Rows are texts, as a rule.
    """
    # In the order of computing: the encoder first; then layer by layer, a decoder's own attention and the one across.
    places: list[tuple[bool, int, int, str]] = []
    for number, (kind, by_layer) in enumerate(numbers.items()):
        places += [(kind != "encoder", layer, number, kind) for layer in by_layer]
    broken: dict[int, Place] = {}
    for _, layer, _, kind in sorted(places):
        array = numbers[kind][layer]
        array = np.asarray(array.cpu() if hasattr(array, "cpu") else array)
        is_whole = np.isfinite(array).reshape(len(array), -1).all(1)
        for row in np.flatnonzero(~is_whole).tolist():
            broken.setdefault(row, (kind, layer))
    return broken


@dataclass(frozen=True)
class LeftOut:
    """Hold the texts on which a model computes NaN or infinity.

    Attributes:
        n: How many they are.
        first: The first MOST_NAMED of them, in the order of the corpus: index, source, line, place.
    """

    n: int = 0
    first: tuple[tuple[int, str, int, Place], ...] = ()

    @classmethod
    def of(cls, texts: Iterable[Any], broken: Mapping[int, Place]) -> LeftOut:
        """Return those of some texts that are broken: `broken` has their indices in the corpus, each with its place."""
        named = [
            (text.index, text.source, text.line, broken[text.index])
            for text in texts
            if text.index in broken
        ]
        return cls(len(named), tuple(sorted(named)[:MOST_NAMED]))

    def merge(self, other: LeftOut) -> LeftOut:
        """Return these texts and the other ones; no text is in both."""
        return LeftOut(self.n + other.n, tuple(sorted((*self.first, *other.first))[:MOST_NAMED]))

    def problems(self, info: ModelInfo) -> list[dict[str, Any]]:
        """Return them as problems of a corpus."""
        problems = [
            Problem(source, line, f"not studied: {describe_place(info, place)}; {hint(info)}")
            for _, source, line, place in self.first
        ]
        # Count those that are not named, in one problem.
        n_unnamed = self.n - len(problems)
        if n_unnamed:
            reason = f"{amount(n_unnamed, 'more text')} not studied: as those before"
            problems.append(Problem(problems[-1].source, None, reason))
        return [asdict(problem) for problem in problems]

    def require_some_left(self, n_texts: int, info: ModelInfo) -> None:
        """Refuse a study of which no text is left."""
        if self.n and not n_texts:
            where = describe_place(info, self.first[0][3])
            raise AttnscopeError(
                f"no text is left: on all {self.n:,}, {info.name}'s {where}", hint(info)
            )


def refusal(info: ModelInfo, place: Place) -> AttnscopeError:
    """Return the error for a model that computes NaN or infinity on the one text that it was to read."""
    return AttnscopeError(f"{info.name}'s {describe_place(info, place)} on this text", hint(info))


def describe_place(info: ModelInfo, place: Place) -> str:
    """Return a clause such as "decoder layer 3 computes NaN or infinity in float16"."""
    kind, layer = place
    if layer is None:
        states = f"last hidden states {kind}".strip()
        return f"{states} are NaN or infinite in {info.dtype}"
    layers = f"{kind} layer" if len(info.kinds) > 1 else "layer"
    return f"{layers} {layer} computes NaN or infinity in {info.dtype}"


def hint(info: ModelInfo) -> str:
    """Return what a user may do about NaN or infinity."""
    if info.dtype == "float16":
        return "try --dtype float32 or bfloat16, in which larger numbers fit"
    wider = "" if info.dtype == "float64" else ", or --dtype float64"
    return f"its weights may be damaged: get the files again{wider}"


# Steps that failed


R = TypeVar("R", bound=Result)


def failure(step: str, error: Exception) -> dict[str, str]:
    """Return the entry for `failures` in the `run` of a record, after a step such as "--causal" raised an error."""
    if os.environ.get("ATTNSCOPE_TRACEBACK"):
        traceback.print_exception(error)
    # Our own errors come with a hint; of others only the want of memory has one.
    if isinstance(error, AttnscopeError):
        reason = error.message
        advice = error.hint
    elif is_out_of_memory(error):
        reason = "not enough memory"
        advice = "choose fewer layers and heads, or shorter texts"
    else:
        reason = f"{type(error).__name__}: {first_line(error)}"
        advice = "with ATTNSCOPE_TRACEBACK=1 in the environment it says where"
    return {"step": step, "error": reason, "hint": advice}


def add_step(record: R, name: str, add: Callable[[R], R]) -> R:
    """Return the record after a further step, `add`, which is left out after a failure or an interruption.

    If the step fails or is interrupted, the record stays as it was, and says so: a failure names the step by `name`.
    """
    if is_interrupted(record.corpus) or record.run.get("failures"):
        return record
    try:
        return add(record)
    except KeyboardInterrupt:
        return replace(record, corpus=settle_corpus(record.corpus, interrupted=True))
    except Exception as error:
        return replace(record, run={**record.run, "failures": [failure(name, error)]})
