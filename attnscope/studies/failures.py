"""Record failures that do not end a study.

There are two kinds:

- A text is *broken* if the model computes NaN or infinity on it. The study leaves the text out. Its result names the
  text and the first layer with a NaN.
- A later step of a study fails, such as describing the heads. The result keeps what the earlier steps found, and says
  what failed.

Broken texts are found by sums over the attention of each layer, so no attention map is needed. One score that is NaN
makes all weights of its row NaN in the softmax, and so every sum over the row.
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

MAX_NAMED_TEXTS = 10
"""How many broken texts a result names. The others are only counted."""

NanOrigin = tuple[str, int | None]
"""Where the first NaN or infinity of a text is. There are two forms:

- ("decoder", 3): in the attention of this kind and layer.
- ("without L3H1", None): no layer is known, as only the last hidden states were checked. The string says how the model
  was changed, such as by ablating a head; "" = the model was not changed.
"""


def find_broken_rows(sums: Mapping[str, Mapping[int, Any]]) -> dict[int, NanOrigin]:
    """Find the rows that hold a NaN or an infinity.

    Args:
        sums: Kind of attention -> layer -> sums, (row, ...): arrays, or tensors on any device. A row is mostly a text.

    Returns:
        Index of each broken row -> the first kind and layer with a NaN or an infinity.
    """
    # Sort into the order in which a model computes: first all layers of the encoder, then the decoder layer by layer.
    # In a layer of the decoder, self-attention stays before cross-attention: `sums` has them so, and sort is stable.
    layer_keys: list[tuple[str, int]] = []
    for kind, by_layer in sums.items():
        layer_keys += [(kind, layer) for layer in by_layer]
    layer_keys.sort(key=lambda key: (key[0] != "encoder", key[1]))
    origin_by_row: dict[int, NanOrigin] = {}
    for kind, layer in layer_keys:
        layer_sums = sums[kind][layer]
        array = np.asarray(layer_sums.cpu() if hasattr(layer_sums, "cpu") else layer_sums)
        is_finite = np.isfinite(array).reshape(len(array), -1).all(1)  # (row,)
        for row in np.flatnonzero(~is_finite).tolist():
            # A row that was broken in an earlier layer keeps that layer.
            origin_by_row.setdefault(row, (kind, layer))
    return origin_by_row


@dataclass(frozen=True)
class BrokenTexts:
    """Hold the broken texts of a study: the texts on which the model computes NaN or infinity.

    Attributes:
        n: The number of broken texts.
        named: The first MAX_NAMED_TEXTS of these texts, in the order of the corpus. Each is (index in the corpus,
            source, line, origin of the NaN).
    """

    n: int = 0
    named: tuple[tuple[int, str, int, NanOrigin], ...] = ()

    @classmethod
    def select(cls, texts: Iterable[Any], origins: Mapping[int, NanOrigin]) -> BrokenTexts:
        """Select the broken texts from a block of texts.

        Args:
            texts: Texts in the order of the corpus. Each has its `index` in the corpus, a `source` and a `line`.
            origins: Index of each broken text in the corpus -> where its first NaN or infinity is.
        """
        broken = [
            (text.index, text.source, text.line, origins[text.index])
            for text in texts
            if text.index in origins
        ]
        return cls(len(broken), tuple(broken[:MAX_NAMED_TEXTS]))

    def merge(self, other: BrokenTexts) -> BrokenTexts:
        """Return the broken texts of two parts of a corpus, which have no text in common."""
        # The index in the corpus comes first in each tuple, so sorting restores the order of the corpus.
        named = sorted((*self.named, *other.named))
        return BrokenTexts(self.n + other.n, tuple(named[:MAX_NAMED_TEXTS]))

    def list_problems(self, info: ModelInfo) -> list[dict[str, Any]]:
        """List the entries for `problems` in the `corpus` of a record: one for each named text, one for the others."""
        problems = [
            Problem(source, line, f"not studied: {describe_nan(info, origin)}; {advise_on_nan(info)}")
            for _, source, line, origin in self.named
        ]
        # One entry counts all texts that are not named.
        n_unnamed = self.n - len(problems)
        if n_unnamed:
            reason = f"{amount(n_unnamed, 'more text')} not studied: as those before"
            problems.append(Problem(problems[-1].source, None, reason))
        return [asdict(problem) for problem in problems]

    def require_some_left(self, n_texts: int, info: ModelInfo) -> None:
        """Refuse a study whose texts are all broken.

        Args:
            n_texts: How many texts were measured, without the broken ones.
            info: The model.
        """
        if self.n and not n_texts:
            *_, origin = self.named[0]
            raise AttnscopeError(
                f"no text is left: on all {self.n:,}, {info.name}'s {describe_nan(info, origin)}",
                advise_on_nan(info),
            )


def make_nan_error(info: ModelInfo, origin: NanOrigin) -> AttnscopeError:
    """Return the error for a study of one text on which the model computes NaN or infinity."""
    return AttnscopeError(
        f"{info.name}'s {describe_nan(info, origin)} on this text", advise_on_nan(info)
    )


def describe_nan(info: ModelInfo, origin: NanOrigin) -> str:
    """Return a clause such as "decoder layer 3 computes NaN or infinity in float16"."""
    kind, layer = origin
    if layer is None:
        # In this form of `NanOrigin`, the first field is no kind: it says how the model was changed, and may be empty.
        states = f"last hidden states {kind}".strip()
        return f"{states} are NaN or infinite in {info.dtype}"
    # Name the kind of attention only if the model has several.
    layers = f"{kind} layer" if len(info.kinds) > 1 else "layer"
    return f"{layers} {layer} computes NaN or infinity in {info.dtype}"


def advise_on_nan(info: ModelInfo) -> str:
    """Return the advice to a user whose model computes NaN or infinity."""
    if info.dtype == "float16":
        return "try --dtype float32 or bfloat16, in which larger numbers fit"
    # There is no wider precision than float64.
    wider_dtype = "" if info.dtype == "float64" else ", or --dtype float64"
    return f"its weights may be damaged: get the files again{wider_dtype}"


# Steps that failed


R = TypeVar("R", bound=Result)


def describe_failure(step: str, error: Exception) -> dict[str, str]:
    """Describe an error of a step, such as "--causal", as an entry for `failures` in the `run` of a record.

    If ATTNSCOPE_TRACEBACK is set in the environment, the traceback is printed too.
    """
    if os.environ.get("ATTNSCOPE_TRACEBACK"):
        traceback.print_exception(error)
    # An AttnscopeError has its own hint. After any other error, only the traceback helps, unless memory ran out.
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
    """Run a further step of a study, and return the record with what the step adds.

    If an earlier step failed or was interrupted, this step does not run. If this step fails or is interrupted, the
    record keeps what it had, and says that it is incomplete or which step failed.

    Args:
        record: The result of the earlier steps.
        name: The name of the step in the list of failures, such as "--causal".
        add: Runs the step: takes the record, and returns a record with more in it.
    """
    if is_interrupted(record.corpus) or record.run.get("failures"):
        return record
    try:
        return add(record)
    except KeyboardInterrupt:
        return replace(record, corpus=settle_corpus(record.corpus, interrupted=True))
    except Exception as error:
        return replace(record, run={**record.run, "failures": [describe_failure(name, error)]})
