"""Read files into annotated texts, one at a time. Parsing is left to the modules of the three formats."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from attnscope.annotated import conllu, python_source, spans
from attnscope.annotated.texts import AnnotatedText, AnnotationError
from attnscope.corpus import Corpus, Problem
from attnscope.corpus.formats import BadLineLimit, split_lines, suffix_of
from attnscope.errors import UsageError, require_choice
from attnscope.text import MAX_CHARACTERS, is_blank, require_plain_text

_SPLITS: dict[str, Literal["line", "paragraph", "file"]] = {
    "conllu": "paragraph",
    "jsonl": "line",
    "python": "file",
}
"""Which pieces of a file are parsed one by one, in each format."""

_FORMAT_OF_SUFFIX = {
    ".conllu": "conllu",
    ".conll": "conllu",
    ".py": "python",
    ".pyi": "python",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
}


class AnnotatedCorpus(Corpus):
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

    HINT = "give CoNLL-U, jsonl with links, or Python"

    def __init__(
        self, files: Sequence[str | Path] | str | Path, *, kind: str = "auto", unit: str = "sentence"
    ) -> None:
        require_choice("kind", kind, ("auto", *_SPLITS))
        require_choice("unit", unit, ("sentence", "document"))
        super().__init__(files)  # type: ignore[arg-type]  # it takes a single name too
        self.unit = unit
        self._kinds = {source: _kind_of(source) if kind == "auto" else kind for source in self.sources}

    def __iter__(self) -> Iterator[AnnotatedText]:  # type: ignore[override]  # texts of another type
        yield from super().__iter__()  # type: ignore[misc]

    def _parse(self, source: str, name: str, lines: Iterator[str]) -> Iterator[tuple[int, Any]]:
        """Yield (line, text) of each text of a file, for the base class; malformed ones are listed in `problems`."""
        kind = self._kinds[source]
        bad_lines = BadLineLimit(name, self.problems)
        numbered = split_lines(lines, _SPLITS[kind])
        pieces = ((line, piece) for line, piece in numbered if not is_blank(piece))
        if kind == "conllu":
            for text in conllu.parse(pieces, name, self.unit, bad_lines.add):
                yield text.line, text
            return
        # Each piece is one text.
        parse = spans.parse if kind == "jsonl" else python_source.parse
        for line, piece in pieces:
            try:
                parsed = parse(piece, name, line)
            except AnnotationError as error:
                bad_lines.add(error.line or line, error.reason)
                continue
            if parsed is not None:
                yield line, parsed

    def _make_text(self, index: int, name: str, line: int, content: Any) -> Any:
        """Return a text that `_parse` yields; None if it is so long that its tokens would fill the memory."""
        n_characters = len(content.text)
        if n_characters <= MAX_CHARACTERS:
            return content
        reason = f"the text has {n_characters:,} characters, more than {MAX_CHARACTERS:,}"
        self.problems.append(Problem(name, line, reason))
        return None


def _kind_of(source: str) -> str:
    """Return how a file is annotated, by the suffix of its name; refuses names that do not tell."""
    kind = _FORMAT_OF_SUFFIX.get(suffix_of(source))
    if kind is None:
        if source != "-":
            require_plain_text(source, source)
        raise UsageError(
            f"the name {source} does not say how the file is annotated",
            f"if it is annotated, name the format: --annotated-as {' or '.join(_SPLITS)}; plain text has no links: "
            "there, search an atlas for a pair of words, such as she -> alice",
        )
    return kind
