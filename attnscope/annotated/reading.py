"""From files to annotated texts, one after the other, as often as one iterates."""

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, get_args

from attnscope.annotated import conllu, python_source, spans
from attnscope.annotated.texts import AnnotatedText, AnnotationError
from attnscope.corpus import Corpus, Problem
from attnscope.corpus.formats import BadLines, name_problems, suffix_of
from attnscope.corpus.lines import UnreadableError
from attnscope.errors import AttnscopeError
from attnscope.text import MOST_CHARACTERS, refuse_other_format

Kind = Literal["auto", "conllu", "jsonl", "python"]
"""How files are annotated; "auto" goes by the name: .conllu, .conll; .jsonl, .ndjson, .json; .py, .pyi."""

Unit = Literal["sentence", "document"]
"""How a CoNLL-U file is split into texts."""

KINDS: tuple[str, ...] = get_args(Kind)
UNITS: tuple[str, ...] = get_args(Unit)

_BY_NAME = {
    ".conllu": "conllu", ".conll": "conllu", ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".py": "python",
    ".pyi": "python",
}  # fmt: skip
_SPLITS: dict[str, Literal["line", "paragraph", "file"]] = {"conllu": "paragraph", "jsonl": "line", "python": "file"}


class AnnotatedCorpus:
    """The annotated texts of files, one after the other, as often as one iterates over it.

    Files are read as `attnscope.Corpus` reads them: UTF-8, also compressed, patterns, "-" for stdin; what cannot be
    read is listed in `problems` and does not end the iteration. A malformed sentence (CoNLL-U) or line (jsonl) alone
    is skipped, with the number of the line that is wrong; after ten of them the rest of the file is. A Python file
    that does not parse is skipped.

    Args:
        files: Names and patterns; see `attnscope.Corpus`.
        kind: How they are annotated.
        unit: How a CoNLL-U file is split into texts.

    Attributes:
        sources: What will be read, in order.
        problems: What could not be read in the last iteration, in order.
        sha256: Hash of all annotated texts of the last whole iteration, hex; empty before.

    Raises:
        AttnscopeError: No file is given, an argument is unknown, or a file's name does not tell how it is annotated.
            While iterating: there is no annotated text at all.
    """

    def __init__(self, files: Sequence[str | Path] | str | Path, *, kind: str = "auto", unit: str = "sentence") -> None:
        for name, value, known in (("kind", kind, KINDS), ("unit", unit, UNITS)):
            if value not in known:
                raise AttnscopeError(f"there is no {name} {value!r}", f"choose one of {', '.join(known)}")
        self.sources = Corpus([files] if isinstance(files, str | Path) else files).sources
        self.unit = unit
        self._kinds = [_kind_of(source) if kind == "auto" else kind for source in self.sources]
        self._corpora = [
            Corpus([source], split=_SPLITS[of], format="txt", most_characters=None)
            for source, of in zip(self.sources, self._kinds, strict=True)
        ]
        self.problems: list[Problem] = []
        self.sha256 = ""

    @property
    def n_bytes(self) -> int | None:
        """Size of all sources on disk, in bytes; None where stdin is one of them."""
        sizes = [corpus.n_bytes for corpus in self._corpora]
        return None if None in sizes else sum(size for size in sizes if size is not None)

    @property
    def bytes_read(self) -> int:
        """How much of it the last iteration has read."""
        return sum(corpus.bytes_read for corpus in self._corpora)

    def __iter__(self) -> Iterator[AnnotatedText]:
        self.problems, self.sha256 = [], ""
        for corpus in self._corpora:
            corpus.bytes_read = 0
        digest, found = hashlib.sha256(), False
        for source, kind, corpus in zip(self.sources, self._kinds, self._corpora, strict=True):
            name = "stdin" if source == "-" else source
            try:
                for text in self._read(kind, corpus, BadLines(name, self.problems), name):
                    if len(text.text) > MOST_CHARACTERS:
                        reason = f"the text has {len(text.text):,} characters, more than {MOST_CHARACTERS:,}"
                        self.problems.append(Problem(name, text.line, reason))
                        continue
                    digest.update(text.digest())
                    found = True
                    yield text
            except UnreadableError as error:
                self.problems.append(Problem(name, error.line, error.reason))
            except _NothingError:
                pass
            self.problems += corpus.problems
        if not found:
            why = f": {name_problems(self.problems)}" if self.problems else ""
            raise AttnscopeError(f"there is no annotated text{why}", "give CoNLL-U, jsonl with links, or Python")
        self.sha256 = digest.hexdigest()

    def _read(self, kind: str, corpus: Corpus, bad: BadLines, name: str) -> Iterator[AnnotatedText]:
        pieces = _pieces(corpus)
        if kind == "conllu":
            yield from conllu.texts(pieces, name, self.unit, bad.add)
            return
        for line, content in pieces:
            try:
                text = spans.parse(content, name, line) if kind == "jsonl" else python_source.parse(content, name)
            except AnnotationError as error:
                bad.add(error.line or line, error.reason)
                continue
            if text is not None:
                yield text


class _NothingError(Exception):
    """A source holds nothing at all; the corpus has listed why."""


def _pieces(corpus: Corpus) -> Iterator[tuple[int, str]]:
    """Lines, paragraphs or files, with the lines that they begin on."""
    stream = iter(corpus)
    while True:
        try:
            text = next(stream)
        except StopIteration:
            return
        except AttnscopeError:
            raise _NothingError from None
        yield text.line, text.text or ""


def _kind_of(source: str) -> str:
    kind = _BY_NAME.get(suffix_of(source))
    if kind is None:
        if source != "-":
            refuse_other_format(source, source)
        ending = "stdin has no ending that says" if source == "-" else f"the ending of {source} does not say"
        raise AttnscopeError(
            f"{ending} how the file is annotated",
            f"if it is annotated, name the format: --annotated-as {' or '.join(KINDS[1:])}; plain text has no links: "
            "there, search an atlas for a pair of words, such as she -> alice",
        )
    return kind
