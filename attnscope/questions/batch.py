"""Declare the result of a batch, which draws each text of a corpus: the files of each text, and the failed texts."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

BATCH_SCHEMA = "attnscope.batch/1"


@dataclass(frozen=True)
class DrawnText:
    """Describe a text that was drawn, and its files.

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
        fingerprint: Hash of everything that the files depend on, hex.
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
        """Return the text's entry in the manifest as plain JSON values; files are named `folder/name`."""
        entry = asdict(self)
        folder = entry.pop("folder")
        entry["files"] = {f"{folder}/{name}": size for name, size in self.files.items()}
        return {**entry, "n_tokens": len(self.tokens)}


@dataclass(frozen=True)
class FailedText:
    """Describe a text that could not be read or drawn.

    Attributes:
        source: The file that it came from.
        line: The line it begins on, from 1; None = the whole file could not be read.
        error: Why, in one line.
        index: The text's number in the corpus, from 0; None = it could not be read.
        text: The text; empty if it could not be read.
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
class BatchRun:
    """Hold the texts of a corpus that were drawn, and those that failed.

    Attributes:
        model: What the user called the model.
        n_texts: The number of texts; if the run was interrupted, only those that it had read by then.
        drawn: The texts whose files exist, in the order of the corpus.
        failed: The texts and files that could not be read or drawn.
        n_fresh: The number of texts that this run drew; earlier runs drew the others.
        complete: Whether the run came to every text; False = it was interrupted.
    """

    model: str
    n_texts: int
    drawn: Sequence[DrawnText]
    failed: Sequence[FailedText] = ()
    n_fresh: int = 0
    complete: bool = True

    def manifest(self) -> str:
        """Return the manifest: one JSON object a line, drawn texts first."""
        entries = [*map(DrawnText.as_json, self.drawn), *map(asdict, self.failed)]
        return "".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in entries)

    def as_json(self) -> dict[str, Any]:
        """Return the whole batch as plain JSON values."""
        run = self.drawn[0].run if self.drawn else {}
        return {
            "schema": BATCH_SCHEMA,
            "run": {"model": self.model, **run},
            "complete": self.complete,
            "n_texts": self.n_texts,
            "n_fresh": self.n_fresh,
            "texts": list(map(DrawnText.as_json, self.drawn)),
            "failed": list(map(asdict, self.failed)),
        }
