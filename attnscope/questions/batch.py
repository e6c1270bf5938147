"""Declare the result of a batch run, which draws the attention maps of each text of a corpus.

`studies.batch` makes it, and writes its manifest beside the files: one line per text, drawn or failed.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

# The name and version of the JSON format of a batch run.
BATCH_SCHEMA = "attnscope.batch/1"


@dataclass(frozen=True)
class DrawnText:
    """Describe a text whose maps were drawn, and the files of its figures.

    Attributes:
        index: The text's number in the corpus, from 0.
        source: The corpus file that the text came from.
        line: The line of that file on which the text begins, from 1.
        folder: The name of the folder with the text's files, inside of the batch's folder.
        text: The text; empty if the user gave token ids instead.
        tokens: The labels of the tokens that the model reads.
        files: The size of each file in bytes, by its name, in the order in which they were drawn.
        model: What the user called the model.
        run: How the files were made: the model's sha256, engine, dtype, device, versions. Plain JSON values.
        notes: Sentences that a reader of the figures must know.
        fingerprint: The hash in hexadecimal of everything that the files depend on. A later run draws a text again only
            if its fingerprint differs.
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
        """Return the text's entry in the manifest as plain JSON values; its files are named "folder/name"."""
        entry = asdict(self)
        folder = entry.pop("folder")
        entry["files"] = {f"{folder}/{name}": size for name, size in self.files.items()}
        return {**entry, "n_tokens": len(self.tokens)}


@dataclass(frozen=True)
class FailedText:
    """Describe a text that could not be read or drawn.

    Attributes:
        source: The corpus file that the text came from.
        line: The line on which the text begins, from 1; None = nothing of the file could be read.
        error: The reason of the failure, in one line.
        index: The text's number in the corpus, from 0; None = the text could not be read.
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
    """Hold the outcome of a batch run: the texts that were drawn, and the texts that failed.

    Attributes:
        model: What the user called the model.
        n_texts: The number of texts in the corpus; of an interrupted run, the number of texts that it read.
        drawn: The texts whose files exist, in the order of the corpus.
        failed: The texts and files that could not be read or drawn.
        n_fresh: The number of texts that this run drew. Earlier runs into the same folder drew the other texts.
        complete: Whether the run tried every text; False = it was interrupted.
    """

    model: str
    n_texts: int
    drawn: Sequence[DrawnText]
    failed: Sequence[FailedText] = ()
    n_fresh: int = 0
    complete: bool = True

    def manifest(self) -> str:
        """Return the manifest as JSON lines: one object per text, drawn texts first."""
        entries = [*map(DrawnText.as_json, self.drawn), *map(asdict, self.failed)]
        return "".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in entries)

    def as_json(self) -> dict[str, Any]:
        """Return the batch run as plain JSON values. The facts of the run are those of the first drawn text."""
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
