"""Read files into annotated texts, one at a time, as often as you iterate. Parsing is left to each format's module."""

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from attnscope.annotated import conllu, python_source, spans
from attnscope.annotated.texts import AnnotatedText, AnnotationError
from attnscope.corpus import Corpus, Problem
from attnscope.corpus.formats import BadLines, name_problems, suffix_of
from attnscope.corpus.lines import UnreadableError
from attnscope.errors import AttnscopeError, UsageError
from attnscope.text import MOST_CHARACTERS, refuse_other_format

_SPLITS: dict[str, Literal["line", "paragraph", "file"]] = {"conllu": "paragraph", "jsonl": "line", "python": "file"}
"""The unit of a file of each kind that holds a text."""

_BY_NAME = {".conllu": "conllu", ".conll": "conllu", ".py": "python", ".pyi": "python"}
_BY_NAME |= dict.fromkeys((".jsonl", ".ndjson", ".json"), "jsonl")


class AnnotatedCorpus:
    """Hold the annotated texts of files, read one at a time, as often as you iterate.

    Files are read as `attnscope.Corpus` reads them: UTF-8, also compressed, patterns, "-" for stdin; what cannot be
    read is listed in `problems` and does not end the iteration. A malformed sentence (CoNLL-U) or line (jsonl) alone
    is skipped, with the number of the line that is wrong; after ten of them the rest of the file is. A Python file
    that does not parse is skipped.

    Args:
        files: Names and patterns; see `attnscope.Corpus`.
        kind: How they are annotated: conllu, jsonl or python; auto = by their names.
        unit: How a CoNLL-U file is split into texts: sentence or document.

    Attributes:
        sources: The files to read, in order.
        problems: The parts that could not be read in the last iteration, in order.
        sha256: Hash of all annotated texts of the last whole iteration, hex; empty before.

    Raises:
        AttnscopeError: No file is given, an argument is unknown, or a file's name does not tell how it is annotated.
            While iterating: there is no annotated text at all.
    """

    def __init__(self, files: Sequence[str | Path] | str | Path, *, kind: str = "auto", unit: str = "sentence") -> None:
        for name, value, known in (("kind", kind, ("auto", *_SPLITS)), ("unit", unit, ("sentence", "document"))):
            if value not in known:
                raise UsageError(f"there is no {name} {value!r}", f"choose one of {', '.join(known)}")
        # Each file is a corpus of its own: its kind decides how it is split.
        self.sources = Corpus([files] if isinstance(files, str | Path) else files).sources
        self.unit = unit
        self._kinds = [_kind_of(source) if kind == "auto" else kind for source in self.sources]
        self._corpora = [
            Corpus([source], split=_SPLITS[kind], format="txt", most_characters=None)
            for source, kind in zip(self.sources, self._kinds, strict=True)
        ]
        self.problems: list[Problem] = []
        self.sha256 = ""

    @property
    def share_read(self) -> float | None:
        """Return the share of all bytes that the last iteration has read, 0 to 1; None = unknown, as for stdin."""
        sizes = [corpus.n_bytes for corpus in self._corpora]
        n_bytes = sum(size or 0 for size in sizes)
        if None in sizes or not n_bytes:
            return None
        return min(1.0, sum(corpus.bytes_read for corpus in self._corpora) / n_bytes)

    def __iter__(self) -> Iterator[AnnotatedText]:
        # Start a new iteration.
        self.problems = []
        self.sha256 = ""
        for corpus in self._corpora:
            corpus.bytes_read = 0
        # Read the sources in turn, and hash the texts as they pass.
        digest = hashlib.sha256()
        n_texts = 0
        for kind, corpus in zip(self._kinds, self._corpora, strict=True):
            for text in self._read(kind, corpus):
                digest.update(text.digest())
                n_texts += 1
                yield text
        if not n_texts:
            why = name_problems(self.problems)
            raise AttnscopeError(f"there is no annotated text{why}", "give CoNLL-U, jsonl with links, or Python")
        self.sha256 = digest.hexdigest()

    def _read(self, kind: str, corpus: Corpus) -> Iterator[AnnotatedText]:
        """Yield the texts of one source, and list malformed or oversized ones in the problems."""
        name = "stdin" if corpus.sources[0] == "-" else corpus.sources[0]
        bad = BadLines(name, self.problems)
        try:
            for text in self._parse(kind, corpus, name, bad):
                if len(text.text) <= MOST_CHARACTERS:
                    yield text
                    continue
                reason = f"the text has {len(text.text):,} characters, more than {MOST_CHARACTERS:,}"
                self.problems.append(Problem(name, text.line, reason))
        except UnreadableError as error:
            self.problems.append(Problem(name, error.line, error.reason))
        self.problems += corpus.problems

    def _parse(self, kind: str, corpus: Corpus, name: str, bad: BadLines) -> Iterator[AnnotatedText]:
        if kind == "conllu":
            yield from conllu.texts(_pieces(corpus), name, self.unit, bad.add)
            return
        for line, content in _pieces(corpus):
            try:
                text = spans.parse(content, name, line) if kind == "jsonl" else python_source.parse(content, name)
            except AnnotationError as error:
                bad.add(error.line or line, error.reason)
                continue
            if text is not None:
                yield text


def _pieces(corpus: Corpus) -> Iterator[tuple[int, str]]:
    """Return lines, paragraphs or files, with the lines that they begin on; nothing of a source that holds nothing."""
    try:
        for text in corpus:
            yield text.line, text.text or ""
    except AttnscopeError:
        return  # the corpus has listed why


def _kind_of(source: str) -> str:
    """Return how a file is annotated, by its name."""
    kind = _BY_NAME.get(suffix_of(source))
    if kind is None:
        if source != "-":
            refuse_other_format(source, source)
        raise UsageError(
            f"the name {source} does not say how the file is annotated",
            f"if it is annotated, name the format: --annotated-as {' or '.join(_SPLITS)}; plain text has no links: "
            "there, search an atlas for a pair of words, such as she -> alice",
        )
    return kind
