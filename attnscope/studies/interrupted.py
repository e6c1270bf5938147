"""What becomes of a study that was interrupted: it is written, but never over one that got further."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from attnscope.records.reading import described_by

FOLDER = "interrupted"
"""Where in the named folder an interrupted study goes that would replace a record of more texts."""


T = TypeVar("T")


def settle(found: T, out: Path | None, stem: str) -> tuple[T, Path | None]:
    """Says where a study is written to: into its folder, unless it was interrupted and a record there says more.

    Args:
        found: The record of the study.
        out: The folder that was named; None = nothing is to be written.
        stem: How the record's files are named in it.

    Returns:
        The record, with a note where it goes elsewhere, and the folder; None = nothing is to be written.

    Raises:
        KeyboardInterrupt: It was interrupted before anything was done, so there is nothing to tell.
    """
    study: Any = found
    corpus: Mapping[str, Any] = getattr(study, "corpus", {})  # records of one text have none
    if corpus.get("complete", True):
        return found, out
    if not corpus.get("n_texts"):
        raise KeyboardInterrupt
    if out is None or not _says_more(out, stem, corpus["n_texts"]):
        return found, out
    aside = out / FOLDER
    told = f"{out} holds a record that got further, which stays"
    if aside.is_symlink() or _says_more(aside, stem, corpus["n_texts"]):
        return _noted(study, f"Interrupted, and {told}: nothing is written."), None
    return _noted(study, f"Interrupted, and {told}."), aside


def _noted(study: Any, note: str) -> Any:
    return replace(study, run={**study.run, "notes": [*study.run.get("notes", ()), note]})


def _says_more(folder: Path, stem: str, n_texts: int) -> bool:
    """Whether files of an earlier run there are complete, or of more texts; those that do not tell are taken to be."""
    earlier = [folder / f"{stem}.{ending}" for ending in ("npz", "json", "csv", "parquet")]
    there = [path for path in earlier if path.is_file()]
    told = [corpus for path in there if isinstance(corpus := described_by(path).get("corpus"), Mapping)]
    if not told:
        return bool(there)
    return any(
        corpus.get("complete", True) or not isinstance(n := corpus.get("n_texts"), int) or n > n_texts
        for corpus in told
    )
