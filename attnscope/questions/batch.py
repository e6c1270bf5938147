"""What became of many texts: which files each has, and what could not be drawn."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from attnscope.errors import parse_json

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
        asked: The model and the options that they were drawn with, by option; empty = not known.
    """

    index: int
    source: str
    line: int
    folder: str
    text: str
    tokens: tuple[str, ...]
    files: Mapping[str, int]
    model: str
    run: Mapping[str, Any]
    notes: tuple[str, ...]
    fingerprint: str
    asked: Mapping[str, str] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Return one line of the manifest, as plain JSON values; files with their folder, `/` between."""
        files = {f"{self.folder}/{name}": size for name, size in self.files.items()}
        described = {**vars(self), "tokens": list(self.tokens), "n_tokens": len(self.tokens), "files": files}
        return {name: described[name] for name in _LISTED}

    def entry(self) -> str:
        """Return what is kept beside the files: all that does not depend on where in a corpus the text stands."""
        described = {"schema": BATCH_SCHEMA, **{name: getattr(self, name) for name in _ENTRY}}
        return json.dumps(described, ensure_ascii=False) + "\n"

    @classmethod
    def from_entry(cls, content: str, **place: Any) -> DrawnText:
        """Return the text that `entry` described, at a place in a corpus: `index`, `source`, `line` and `folder`.

        Raises:
            ValueError, KeyError, TypeError, AttributeError: It is no such description.
        """
        entry = parse_json(content)
        if entry["schema"] != BATCH_SCHEMA:
            raise ValueError(f"it holds {entry['schema']!r}")
        described = {name: entry[name] for name in _ENTRY if name != "asked"}
        described["asked"] = entry.get("asked", {})  # earlier versions did not keep it
        for name in ("tokens", "notes"):
            described[name] = tuple(described[name])
        texts = [
            described["fingerprint"],
            described["text"],
            described["model"],
            *described["tokens"],
            *described["notes"],
            *described["files"],
        ]
        texts += [*described["asked"].keys(), *described["asked"].values(), *described["run"].keys()]
        if not all(isinstance(text, str) for text in texts):
            raise ValueError("a text of it is none")
        if not all(type(size) is int for size in described["files"].values()):
            raise ValueError("a size of it is no number")
        return cls(**described, **place)


_ENTRY = ("fingerprint", "text", "tokens", "model", "run", "notes", "files", "asked")
_LISTED = (
    "index", "source", "line", "text", "tokens", "n_tokens", "model", "run", "notes", "files", "fingerprint",
)  # fmt: skip


@dataclass(frozen=True)
class FailedText:
    """What could not be drawn, or not even be read.

    Attributes:
        source: The file.
        line: The line, from 1; None = the whole file.
        reason: Why, in one line.
        index: The text's number in the corpus, from 0; None where it could not be read.
        text: The text; empty where it could not be read.
    """

    source: str
    line: int | None
    reason: str
    index: int | None = None
    text: str = ""

    def as_json(self) -> dict[str, Any]:
        """One line of the manifest, as plain JSON values."""
        return {
            "index": self.index, "source": self.source, "line": self.line, "text": self.text, "error": self.reason,
        }  # fmt: skip

    def __str__(self) -> str:
        return f"{self.source}{'' if self.line is None else f', line {self.line}'}: {self.reason}"


@dataclass(frozen=True)
class Batch:
    """What became of the texts of a corpus.

    Attributes:
        model: What the user called the model.
        n_texts: How many texts there are.
        drawn: Those that have their files, in the order of the corpus.
        failed: Those that do not, and what could not be read.
        n_fresh: How many were drawn by this run; the others were done before.
    """

    model: str
    n_texts: int
    drawn: tuple[DrawnText, ...]
    failed: tuple[FailedText, ...] = ()
    n_fresh: int = 0

    @property
    def complete(self) -> bool:
        """Whether every text was tried; else the run was interrupted."""
        return self.n_texts == len(self.drawn) + sum(failure.index is not None for failure in self.failed)

    def lines(self) -> list[dict[str, Any]]:
        """The lines of the manifest: texts in the order of the corpus, then what could not be read."""
        texts: Sequence[DrawnText | FailedText] = [*self.drawn, *(f for f in self.failed if f.index is not None)]
        ordered = sorted(texts, key=lambda text: text.index or 0)
        return [text.as_json() for text in (*ordered, *(f for f in self.failed if f.index is None))]

    def manifest(self) -> str:
        """The manifest: one JSON object a line."""
        return "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in self.lines())

    def as_json(self) -> dict[str, Any]:
        """All of it as plain JSON values."""
        lines = self.lines()
        return {
            "schema": BATCH_SCHEMA,
            "run": {"model": self.model, **(self.drawn[0].run if self.drawn else {})},
            "complete": self.complete,
            "n_texts": self.n_texts,
            "n_fresh": self.n_fresh,
            "texts": [line for line in lines if "error" not in line],
            "failed": [line for line in lines if "error" in line],
        }
