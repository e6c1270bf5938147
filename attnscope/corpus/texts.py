"""Read the texts of files, one at a time. Lines are left to `lines`, splitting and parsing to `formats`."""

import glob
import hashlib
import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, ClassVar, Literal, get_args

import numpy as np

from attnscope.corpus.formats import (
    BadLineLimit,
    Format,
    Problem,
    RenderChat,
    Split,
    TextFields,
    csv_entries,
    format_of,
    guess_split,
    json_entries,
    name_problems,
    read_entry,
    shorten,
    split_lines,
    write_plainly,
)
from attnscope.corpus.lines import RereadableStream, UnreadableError, lines_of
from attnscope.errors import AttnscopeError, amount, require_choice
from attnscope.host import refuse_pipe
from attnscope.text import MAX_CHARACTERS, is_blank, open_stdin

_DELIMITERS = {"csv": ",", "tsv": "\t"}


@dataclass(frozen=True)
class CorpusText:
    """Hold one text of a corpus and its place.

    Attributes:
        index: Its number in the corpus, from 0; blank texts are not counted.
        source: The file's name; "stdin".
        line: The line it begins on, from 1.
        text: The text; None where token ids were given instead.
        ids: Token ids, special ones included; None where a text was given.
        pair: The second text of a pair; None = there is one text.
        is_chat: Whether a chat template wrote the text, with its special tokens.
    """

    index: int
    source: str
    line: int
    text: str | None = None
    ids: tuple[int, ...] | None = None
    is_chat: bool = False
    pair: str | None = None

    @property
    def n_characters(self) -> int:
        """Return the length of its text or texts; of token ids an estimate, four characters each."""
        return len(self.written) if self.ids is None else 4 * len(self.ids)

    @property
    def written(self) -> str:
        """Return its text, or both texts of a pair with a space between; empty where token ids were given."""
        if self.pair is not None:
            return f"{self.text} {self.pair}"
        return self.text or ""

    def digested(self) -> bytes:
        """Return its content as bytes, from which hashes of texts are computed; index, source and line do not count."""
        if self.ids is not None:
            raw = np.array(self.ids, "<i8").tobytes()
            return f"ids {len(raw)}\n".encode() + raw
        # With their lengths, no two lists of texts are written alike.
        raw = (self.text or "").encode("utf-8", "surrogatepass")
        kind = "chat text" if self.is_chat else "text"
        digested = f"{kind} {len(raw)}\n".encode() + raw
        if self.pair is not None:
            second = self.pair.encode("utf-8", "surrogatepass")
            digested += f"pair {len(second)}\n".encode() + second
        return digested


class Corpus:
    """Iterate over the texts of files; each iteration reads the files again.

    Files are UTF-8, with or without a byte order mark, with any line ends, plain or gzipped (recognised under any
    name). One text at a time is in memory, and 64 KiB of its file. Blank texts are skipped. stdin is kept in a
    temporary file, so that it can be read again.

    What cannot be read is listed in `problems`, and does not end the iteration. If a source is missing, damaged or cut
    off, or is not UTF-8 from some line on, the texts before that point are read (of damaged gzip data those up to 1 KiB
    before it), and then the next source. A malformed line of jsonl or CSV is skipped; at ten such lines the rest of
    the source is.

    Args:
        files: Names and glob patterns (`**` for any folders); "-" is stdin. Patterns are expanded at once, with matches
            sorted by name. A file that is named twice is read once.
        split: How a plain text file is split into texts. "auto": by paragraphs where blank lines separate some, else
            by lines; stdin and pipes always by lines, so that each is a text as soon as it is written.
        field: The field (jsonl) or column (CSV) that holds the text.
        pair_field: The field or column that holds the second text of a pair; None = `text_pair`, where there is one.
        format: The format of all files; "auto" = as the name of each says.
        max_characters: A longer text is cut to so many characters, and listed in `problems`; None = none is cut.

    Attributes:
        sources: The names of the files to read, in order.
        problems: The parts that could not be read in the last iteration, in order.
        n_bytes: The size of all sources; None where stdin or a pipe is one of them.
        bytes_read: How many of these bytes the last iteration has read.
        sha256: The SHA-256 of all texts of the last iteration, in hex, whatever files they came in; empty until it has
            ended.
        chat: Writes the conversations of jsonl: as `role: content`, until a study sets its model's chat template.

    Raises:
        AttnscopeError: An argument is unknown, or a source is a device. While iterating: there is no text at all.
    """

    HINT: ClassVar[str] = (
        "name files that hold text, and with --field what holds it in jsonl or CSV; see docs/heads.md"
    )

    def __init__(
        self,
        files: Sequence[str | Path],
        *,
        split: Split = "auto",
        field: str = "text",
        pair_field: str | None = None,
        format: Format = "auto",
        max_characters: int | None = MAX_CHARACTERS,
    ) -> None:
        require_choice("split", split, get_args(Split))
        require_choice("format", format, get_args(Format))
        if isinstance(files, str | Path):
            files = [files]
        self.sources = expand(files)
        # Refuse devices such as /dev/zero, which have no end.
        for source in self.sources:
            if not _is_stream(source):
                refuse_pipe(Path(source), "a text")
        # What to read, and how.
        self.split = split
        self.field = field
        self.format = format
        self.pair_field = pair_field
        self.max_characters = max_characters
        self.chat: RenderChat = write_plainly
        # Facts of the last iteration.
        self.problems: list[Problem] = []
        self.bytes_read = 0
        self.sha256 = ""
        self._splits: set[Split] = set()
        # Copies of the streams that were read, by source.
        self._streams: dict[str, RereadableStream] = {}

    @property
    def n_bytes(self) -> int | None:
        """Return the size of all sources in bytes; None where stdin or a pipe is one of them."""
        if any(map(_is_stream, self.sources)):
            return None
        paths = map(Path, self.sources)
        return sum(path.stat().st_size for path in paths if path.is_file())

    @property
    def split_as(self) -> Split | Literal[""]:
        """Return how the plain text files of the last iteration were split; empty where not all were split alike."""
        return next(iter(self._splits)) if len(self._splits) == 1 else ""

    def __iter__(self) -> Iterator[CorpusText]:
        # Start a new iteration.
        self.problems = []
        self.bytes_read = 0
        self.sha256 = ""
        self._splits = set()
        # Number and hash the texts. After a source that cannot be read the next one follows.
        digest = hashlib.sha256()
        index = 0
        for source in self.sources:
            name = "stdin" if source == "-" else source
            try:
                for line, content in self._read_source(source, name):
                    text = self._make_text(index, name, line, content)
                    if text is None:
                        continue
                    digest.update(text.digested())
                    index += 1
                    yield text
            except UnreadableError as error:
                self.problems.append(Problem(name, error.line, error.reason))
            except OSError as error:
                self.problems.append(Problem(name, None, error.strerror or str(error)))
        if not index:
            sources = amount(len(self.sources), "source")
            hint = "they are empty or blank: give at least one word"
            if self.problems:
                hint = self.HINT
            raise AttnscopeError(
                f"no text is left: nothing to read in {sources}{name_problems(self.problems)}", hint
            )
        self.sha256 = digest.hexdigest()

    def _make_text(self, index: int, name: str, line: int, content: TextFields) -> CorpusText | None:
        """Return the text of the corpus with this content, cut if it is too long; None if it is blank."""
        if is_blank(content["text"]):
            if "pair" in content:
                self.problems.append(Problem(name, line, "the first text of the pair is blank"))
            return None
        # Cut a text that would fill the memory when it is tokenised.
        most = self.max_characters
        for field in ("text", "pair"):
            n = len(content.get(field, ""))
            if most is not None and n > most:
                reason = (
                    f"the text has {n:,} characters: the first {most:,} are read, the rest is left out"
                )
                self.problems.append(Problem(name, line, reason))
                content[field] = content[field][:most]
        return CorpusText(index, name, line, **content)

    def _read_source(self, source: str, name: str) -> Iterator[tuple[int, TextFields]]:
        """Yield the line and the content of each text of a source, blank texts too; update `bytes_read`."""
        n_before = self.bytes_read
        with self._open(source) as file:
            # None follows the last text, so that bytes are counted once more at the end of the file.
            for line_and_content in itertools.chain(
                self._parse(source, name, lines_of(file, name)), [None]
            ):
                if file.seekable():
                    self.bytes_read = n_before + file.tell()
                if line_and_content is not None:
                    yield line_and_content

    def _parse(self, source: str, name: str, lines: Iterator[str]) -> Iterator[tuple[int, TextFields]]:
        """Yield the line and the content of each text in the lines of a source; list malformed ones."""
        format = format_of(name) if self.format == "auto" else self.format
        # Plain text. Nothing is guessed from a stream, for a guess would wait for its first lines.
        if format == "txt":
            split = self.split
            if split == "auto" and _is_stream(source):
                split = "line"
            elif split == "auto":
                split, lines = guess_split(lines)
            self._splits.add(split)
            for number, text in split_lines(lines, split):
                yield number, {"text": text}
            return
        # jsonl and CSV. In place of a malformed entry comes a str that says what is wrong.
        entries = json_entries(lines) if format == "jsonl" else csv_entries(lines, _DELIMITERS[format])
        bad = BadLineLimit(name, self.problems)
        unread_fields: set[str] = set()
        for number, entry in entries:
            try:
                if isinstance(entry, str):
                    raise ValueError(entry)
                content, unread = read_entry(entry, self.field, self.pair_field, self.chat)
            except ValueError as error:
                bad.add(number, str(error))
                continue
            # Say once of a field that it holds text and is not read.
            for field in unread:
                if field not in unread_fields:
                    unread_fields.add(field)
                    reason = f'the field "{shorten(field)}" holds text too, which is not read'
                    self.problems.append(Problem(name, number, reason))
            yield number, content

    def _open(self, source: str) -> BinaryIO:
        """Open a source for reading from its start."""
        if not _is_stream(source):
            return Path(source).open("rb")
        # A stream can be read only once, so that a copy is kept for further iterations.
        if source not in self._streams:
            if source == "-":
                stream = open_stdin()
                # Unbuffered: a line comes as soon as it is written, and a thread that waits for it holds no lock.
                stream = getattr(stream, "raw", stream)
            else:
                stream = Path(source).open("rb", buffering=0)  # noqa: SIM115
            self._streams[source] = RereadableStream(stream, source)
        return self._streams[source].again()


def _is_stream(source: str) -> bool:
    """Return whether a source can be read only once: stdin or a pipe."""
    return source == "-" or Path(source).is_fifo()


def expand(files: Sequence[str | Path]) -> tuple[str, ...]:
    """Expand patterns among names of files; of several names of one file the first is returned."""
    name_of_file: dict[str, str] = {}
    for name in map(str, files):
        # The functions of os, for those of Path raise errors on ~nobody and on links that form a circle.
        path = os.path.expanduser(name)  # noqa: PTH111
        names = [path]
        if glob.has_magic(name) and not Path(path).exists():
            # Not Path.glob, which takes no absolute patterns.
            matches = glob.glob(path, recursive=True)  # noqa: PTH207
            names = sorted(match for match in matches if Path(match).is_file()) or names
        for source in names:
            identity = source if source == "-" else os.path.realpath(source)
            name_of_file.setdefault(identity, source)
    return tuple(name_of_file.values())
