"""Read files into annotated texts, one at a time. Each of the three formats is parsed by a module of its own."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from attnscope.annotated import conllu, python_source, spans
from attnscope.annotated.texts import AnnotatedText, AnnotationError
from attnscope.corpus import Corpus, Problem
from attnscope.corpus.formats import BadLineLimit, split_lines, suffix_of
from attnscope.errors import UsageError, require_choice
from attnscope.text import MAX_CHARACTERS, is_blank, require_plain_text

_PIECE_BY_KIND: dict[str, Literal["line", "paragraph", "file"]] = {
    "conllu": "paragraph",
    "jsonl": "line",
    "python": "file",
}
"""The pieces that a file of each kind is cut into: the parser gets one piece at a time."""

_KIND_BY_SUFFIX = {
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

    Files are read as `attnscope.Corpus` reads them: UTF-8, also compressed; patterns; "-" for stdin. A part that cannot
    be read is listed in `problems`, and the iteration goes on. A malformed sentence (CoNLL-U) or line (jsonl) is
    skipped, and listed with its line number; after ten malformed ones, the rest of the file is skipped. A Python file
    that does not parse is skipped.

    Args:
        files: Names and patterns; see `attnscope.Corpus`.
        kind: How the files are annotated: conllu, jsonl or python; auto = as the suffix of each file's name says.
        unit: How a CoNLL-U file is split into texts: sentence or document.

    Attributes:
        sources: The files to read, in order.
        problems: The parts that could not be read in the last iteration, in order.
        sha256: Hex hash of all annotated texts of the last iteration that reached the end; "" = no iteration has yet.

    Raises:
        AttnscopeError: No file is given, an argument is unknown, or a file's name does not tell how it is annotated.
            While iterating: there is no annotated text at all.
    """

    # The base class adds this hint to its error when no text could be read.
    HINT = "give CoNLL-U, jsonl with links, or Python"

    def __init__(
        self, files: Sequence[str | Path] | str | Path, *, kind: str = "auto", unit: str = "sentence"
    ) -> None:
        require_choice("kind", kind, ("auto", *_PIECE_BY_KIND))
        require_choice("unit", unit, ("sentence", "document"))
        super().__init__(files)  # type: ignore[arg-type]  # it takes a single name too
        self.unit = unit
        self._kind_by_source = {
            source: _guess_kind(source) if kind == "auto" else kind for source in self.sources
        }

    def __iter__(self) -> Iterator[AnnotatedText]:  # type: ignore[override]  # texts of another type
        yield from super().__iter__()  # type: ignore[misc]

    def _parse(self, source: str, name: str, lines: Iterator[str]) -> Iterator[tuple[int, Any]]:
        """Yield (line number, annotated text) of each text of a file; malformed texts are listed in `problems`.

        The base class calls this for each source. `name` is what problems call the source, such as "stdin" for "-".
        """
        kind = self._kind_by_source[source]
        # Adds malformed lines to `problems`; raises an error that ends the reading of the file at the tenth.
        bad_lines = BadLineLimit(name, self.problems)
        # (number of the first line, piece) of each piece
        pieces = (
            (line, piece)
            for line, piece in split_lines(lines, _PIECE_BY_KIND[kind])
            if not is_blank(piece)
        )
        # CoNLL-U: a text is one paragraph (sentence) or several (document).
        if kind == "conllu":
            for text in conllu.parse(pieces, name, self.unit, bad_lines.add):
                yield text.line, text
            return
        # Other formats: each piece is one text.
        parse = spans.parse if kind == "jsonl" else python_source.parse
        for line, piece in pieces:
            try:
                parsed_text = parse(piece, name, line)
            except AnnotationError as error:
                bad_lines.add(error.line or line, error.reason)
                continue
            # None = the text is blank.
            if parsed_text is not None:
                yield line, parsed_text

    def _make_text(self, index: int, name: str, line: int, content: Any) -> Any:
        """Return a text that `_parse` yielded (`content`); None if its tokens would fill the memory.

        The base class calls this for each text, and leaves out None.
        """
        n_characters = len(content.text)
        if n_characters <= MAX_CHARACTERS:
            return content
        reason = f"the text has {n_characters:,} characters, more than {MAX_CHARACTERS:,}"
        self.problems.append(Problem(name, line, reason))
        return None


def _guess_kind(source: str) -> str:
    """Return how a file is annotated, by the suffix of its name.

    Raises:
        AttnscopeError: The suffix says nothing about annotations.
    """
    kind = _KIND_BY_SUFFIX.get(suffix_of(source))
    if kind is None:
        # A file of a known format, such as PDF, gets an error about its format. Stdin, "-", has no suffix.
        if source != "-":
            require_plain_text(source, source)
        raise UsageError(
            f"the name {source} does not say how the file is annotated",
            f"if it is annotated, name the format: --annotated-as {' or '.join(_PIECE_BY_KIND)}; "
            "plain text has no links: there, search an atlas for a pair of words, such as she -> alice",
        )
    return kind
