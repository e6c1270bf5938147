"""Record failures that do not end a study.

There are two kinds. A text on which the model computes NaN or infinity is left out, and the result names the text and
the layer. And if a later step of a study fails, such as describing the heads, the result keeps what the earlier steps
found, and says what failed.

To find such texts, it is enough to check sums over the attention of a layer. One score that is NaN makes all weights of
its row NaN in the softmax, and so every sum over the row.
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

MAX_NAMED = 10
"""How many of the texts that are left out a result names; the others are counted."""

BrokenAt = tuple[str, int | None]
"""Where a NaN or an infinity came up first. There are two forms:

- ("decoder", 3): the kind of attention, and the layer.
- ("without L3H1", None): the last hidden states of the model, and how the model was changed ("" = it was not).
"""


def broken_rows(sums: Mapping[str, Mapping[int, Any]]) -> dict[int, BrokenAt]:
    """Return the rows that hold a NaN or an infinity, each with the first kind and layer where it has one.

    Args:
        sums: Kind of attention -> layer -> (row, ...): arrays, or tensors on any device. A row is a text, as a rule.
    """
    # Sort into the order of computing: the encoder first; then layer by layer, self-attention before cross-attention.
    # Within a layer the order of the kinds stays, for the sort is stable.
    places: list[tuple[str, int]] = []
    for kind, by_layer in sums.items():
        places += [(kind, layer) for layer in by_layer]
    places.sort(key=lambda place: (place[0] != "encoder", place[1]))
    broken: dict[int, BrokenAt] = {}
    for kind, layer in places:
        of_layer = sums[kind][layer]
        array = np.asarray(of_layer.cpu() if hasattr(of_layer, "cpu") else of_layer)
        is_finite = np.isfinite(array).reshape(len(array), -1).all(1)
        for row in np.flatnonzero(~is_finite).tolist():
            broken.setdefault(row, (kind, layer))
    return broken


@dataclass(frozen=True)
class BrokenTexts:
    """Hold the broken texts of a study: those on which the model computes NaN or infinity.

    Attributes:
        n: How many they are.
        first: The first MAX_NAMED of them, in the order of the corpus: each as (index in the corpus, source, line,
            place).
    """

    n: int = 0
    first: tuple[tuple[int, str, int, BrokenAt], ...] = ()

    @classmethod
    def of(cls, texts: Iterable[Any], broken: Mapping[int, BrokenAt]) -> BrokenTexts:
        """Return the broken ones among some texts.

        Args:
            texts: Texts in the order of the corpus, each with its `index` there, a `source` and a `line`.
            broken: Index in the corpus -> where the first NaN or infinity came up, for each broken text.
        """
        named = [
            (text.index, text.source, text.line, broken[text.index])
            for text in texts
            if text.index in broken
        ]
        return cls(len(named), tuple(named[:MAX_NAMED]))

    def merge(self, other: BrokenTexts) -> BrokenTexts:
        """Return the broken texts of both; no text is in both."""
        return BrokenTexts(self.n + other.n, tuple(sorted((*self.first, *other.first))[:MAX_NAMED]))

    def problems(self, info: ModelInfo) -> list[dict[str, Any]]:
        """Return entries for `problems` in the `corpus` of a record: one for each named text, and one for the rest."""
        problems = [
            Problem(source, line, f"not studied: {describe_place(info, place)}; {hint(info)}")
            for _, source, line, place in self.first
        ]
        # One entry counts all texts that are not named.
        n_unnamed = self.n - len(problems)
        if n_unnamed:
            reason = f"{amount(n_unnamed, 'more text')} not studied: as those before"
            problems.append(Problem(problems[-1].source, None, reason))
        return [asdict(problem) for problem in problems]

    def require_some_left(self, n_texts: int, info: ModelInfo) -> None:
        """Refuse a study that leaves out all of its texts: of `n_texts` measured ones there are none."""
        if self.n and not n_texts:
            *_, place = self.first[0]
            what_happened = describe_place(info, place)
            raise AttnscopeError(
                f"no text is left: on all {self.n:,}, {info.name}'s {what_happened}", hint(info)
            )


def refusal(info: ModelInfo, place: BrokenAt) -> AttnscopeError:
    """Return the error for a study of one text on which the model computes NaN or infinity."""
    return AttnscopeError(f"{info.name}'s {describe_place(info, place)} on this text", hint(info))


def describe_place(info: ModelInfo, place: BrokenAt) -> str:
    """Return a clause such as "decoder layer 3 computes NaN or infinity in float16"."""
    kind, layer = place
    if layer is None:
        # Here `kind` is the change of the model, see `BrokenAt`; it may be empty.
        states = f"last hidden states {kind}".strip()
        return f"{states} are NaN or infinite in {info.dtype}"
    # Name the kind of attention only if the model has several.
    layers = f"{kind} layer" if len(info.kinds) > 1 else "layer"
    return f"{layers} {layer} computes NaN or infinity in {info.dtype}"


def hint(info: ModelInfo) -> str:
    """Return the advice to a user whose model computes NaN or infinity."""
    if info.dtype == "float16":
        return "try --dtype float32 or bfloat16, in which larger numbers fit"
    wider = "" if info.dtype == "float64" else ", or --dtype float64"
    return f"its weights may be damaged: get the files again{wider}"


# Steps that failed


R = TypeVar("R", bound=Result)


def failure(step: str, error: Exception) -> dict[str, str]:
    """Return the entry for `failures` in the `run` of a record, after a step such as "--causal" raised an error.

    If ATTNSCOPE_TRACEBACK is set in the environment, the traceback is printed too.
    """
    if os.environ.get("ATTNSCOPE_TRACEBACK"):
        traceback.print_exception(error)
    # Our own errors bring their advice. For all others, the traceback is the best one, unless memory ran out.
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
    """Do a further step of a study, and return the record with what it added.

    If an earlier step failed or was interrupted, this one is not tried. If this one fails or is interrupted, the record
    keeps what it had, and says so.

    Args:
        record: The result of the earlier steps.
        name: What the record calls the step if it fails, such as "--causal".
        add: Does the step: it takes the record, and returns one with more in it.
    """
    if is_interrupted(record.corpus) or record.run.get("failures"):
        return record
    try:
        return add(record)
    except KeyboardInterrupt:
        return replace(record, corpus=settle_corpus(record.corpus, interrupted=True))
    except Exception as error:
        return replace(record, run={**record.run, "failures": [failure(name, error)]})
