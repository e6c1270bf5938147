"""Whether the study of a record came to its end: interruptions, and steps that failed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def is_interrupted(corpus: Mapping[str, Any]) -> bool:
    """Return whether a study was stopped before it had seen all of its texts."""
    return not corpus.get("complete", True)


def failure_line(failure: Mapping[str, str]) -> str:
    """Return a line such as "describing the heads failed: not enough memory", of one failure of a record's run."""
    return f"{failure['step']} failed: {failure['error']}"


def settle_corpus(corpus: Mapping[str, Any], *, interrupted: bool = False) -> dict[str, Any]:
    """Return what a record says of its corpus after a further step, which may have been interrupted."""
    return {**corpus, "complete": not (interrupted or is_interrupted(corpus))}
