"""The options of `attnscope relations` and `attnscope.relations`. Loads nothing heavy."""

from __future__ import annotations

from attnscope.errors import UsageError
from attnscope.options import chunk_option, option, options, stride_option


def _labels(listed: str) -> tuple[str, ...]:
    labels = tuple(part.strip() for part in listed.split(",") if part.strip())
    if not labels:
        raise UsageError("no relation is named", "such as --only nsubj,obj")
    return labels


@options
class AnnotationOptions:
    """How annotated files are read."""

    kind: str = option(
        "How the files are annotated: conllu, jsonl, python; auto: by their names.",
        "--annotated-as", default="auto", panel="Text", rare=True,
    )  # fmt: skip
    unit: str = option(
        "How CoNLL-U is split into texts: sentence, or document (coreference across sentences).",
        "--split", default="sentence", panel="Text",
    )  # fmt: skip


@options
class RelationsOptions:
    """How relations are studied."""

    only: tuple[str, ...] | None = option(
        "Only these relations, by label or whole name, such as nsubj,obj.  [default: all]", default=None, read=_labels
    )
    chunk: int | None = chunk_option()
    stride: int | None = stride_option()
    n_examples: int = option(
        "Show this many texts of each relation that a head expresses.", "--examples", default=0, least=0, most=100
    )
