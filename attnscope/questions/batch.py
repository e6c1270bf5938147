"""Declare the result of a batch: the files of each text, and the texts that failed."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

BATCH_SCHEMA = "attnscope.batch/1"


@dataclass(frozen=True)
class DrawnText:
    """One text and its files.

    Attributes:
        index: Its number in the corpus, from 0.
        source: The file that it came from.
        line: The line it begins on, from 1.
        folder: The folder of its files, a plain name inside of the batch's folder.
        text: The text; empty where token numbers were given instead.
        tokens: The labels of its tokens, as the model reads it.
        files: Size in bytes of each file, by its name, in the order of drawing.
        model: What the user called the model.
        run: What made the files: sha256, engine, dtype, device, versions. Plain JSON values.
        notes: What a reader of the figures must know, one sentence each.
        fingerprint: Hash of all that the files depend on, hex.
    """

    index: int
    source: str
    line: int
    folder: str
    text: str
    tokens: Sequence[str]
    files: Mapping[str, int]
    model: str
    run: Mapping[str, Any]
    notes: Sequence[str]
    fingerprint: str

    def as_json(self) -> dict[str, Any]:
        """Return one line of the manifest, as plain JSON values; files are named `folder/name`."""
        entry = asdict(self)
        folder = entry.pop("folder")
        entry["files"] = {f"{folder}/{name}": size for name, size in self.files.items()}
        return {**entry, "n_tokens": len(self.tokens)}


@dataclass(frozen=True)
class FailedText:
    """A text that could not be read or drawn.

    Attributes:
        source: The file.
        line: The line, from 1; None = the whole file.
        error: Why, in one line.
        index: The text's number in the corpus, from 0; None where it could not be read.
        text: The text; empty where it could not be read.
    """

    source: str
    line: int | None
    error: str
    index: int | None = None
    text: str = ""

    def __str__(self) -> str:
        if self.line is None:
            return f"{self.source}: {self.error}"
        return f"{self.source}, line {self.line}: {self.error}"


@dataclass(frozen=True)
class Batch:
    """The figures of all texts of a corpus, and the texts that failed.

    Attributes:
        model: What the user called the model.
        n_texts: How many texts there are; of a run that was interrupted, how many it had come to.
        drawn: Those that have their files, in the order of the corpus.
        failed: Those that do not, and what could not be read.
        n_fresh: How many were drawn by this run; the others were done before.
        complete: Whether every text was tried; else the run was interrupted.
    """

    model: str
    n_texts: int
    drawn: Sequence[DrawnText]
    failed: Sequence[FailedText] = ()
    n_fresh: int = 0
    complete: bool = True

    def manifest(self) -> str:
        """Return the manifest: one JSON object a line, drawn texts first."""
        entries = [text.as_json() for text in self.drawn]
        entries += [asdict(failure) for failure in self.failed]
        return "".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in entries)

    def as_json(self) -> dict[str, Any]:
        """Return all of it as plain JSON values."""
        run = self.drawn[0].run if self.drawn else {}
        return {
            "schema": BATCH_SCHEMA,
            "run": {"model": self.model, **run},
            "complete": self.complete,
            "n_texts": self.n_texts,
            "n_fresh": self.n_fresh,
            "texts": [text.as_json() for text in self.drawn],
            "failed": [asdict(failure) for failure in self.failed],
        }
