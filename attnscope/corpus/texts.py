"""Read the texts of files one at a time, as often as you iterate. Splitting and parsing are left to `formats`."""

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
    BadLines,
    Content,
    Format,
    Problem,
    Render,
    Split,
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
from attnscope.corpus.lines import Replay, UnreadableError, lines_of
from attnscope.errors import AttnscopeError, amount, require_choice
from attnscope.host import refuse_pipe
from attnscope.text import MOST_CHARACTERS, is_blank, open_stdin

_DELIMITERS = {"csv": ",", "tsv": "\t"}


@dataclass(frozen=True)
class CorpusText:
    """Hold one text of a corpus and its place.

    Attributes:
        index: Its number in the corpus, from 0; blank texts are not counted.
        source: The file's name; "stdin".
        line: The line it begins on, from 1.
        text: The text; None where token numbers were given instead.
        ids: Token numbers, special ones included; None where a text was given.
        pair: The second text of a pair; None = there is one text.
        is_chat: Whether its special tokens stand in the text, as a chat template wrote them.
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
        """Return how long it is; for token numbers, about how long: four characters each."""
        return len(self.written) if self.ids is None else 4 * len(self.ids)

    @property
    def written(self) -> str:
        """Return its text, or both texts of a pair one after the other; empty where token numbers were given."""
        if self.pair is not None:
            return f"{self.text} {self.pair}"
        return self.text or ""

    def digested(self) -> bytes:
        """Return the bytes that hashes of texts are made of; the place does not enter."""
        if self.ids is not None:
            raw = np.array(self.ids, "<i8").tobytes()
            return f"ids {len(raw)}\n".encode() + raw
        # Lengths tell where a text ends, and another begins.
        raw = (self.text or "").encode("utf-8", "surrogatepass")
        kind = "chat text" if self.is_chat else "text"
        digested = f"{kind} {len(raw)}\n".encode() + raw
        if self.pair is not None:
            second = self.pair.encode("utf-8", "surrogatepass")
            digested += f"pair {len(second)}\n".encode() + second
        return digested


class Corpus:
    """Hold the texts of files, read one at a time, as often as you iterate.

    Files are UTF-8, with or without a byte order mark, with any line ends, plain or gzipped (recognised under any
    name). At most one text is in memory, and 64 KiB of its file. Blank texts are skipped. stdin is read once, and kept
    in a temporary file for the next time.

    What cannot be read does not end the iteration. A source that is missing, or from some line on is not UTF-8, is
    cut off or damaged, gives the texts before that point (of damaged compressed data up to the last 1 KiB before it);
    the next source follows. Of jsonl and CSV a malformed line alone is skipped; after ten of them the source is given
    up. All of that is listed in `problems`.

    Args:
        files: Names and glob patterns (`**` for any folders); "-" is stdin. Patterns are looked up at once, their
            matches sorted by name; a file that comes twice is read once, where it comes first.
        split: How a plain text file is split into texts. "auto": by paragraphs where blank lines separate some, else
            by lines; stdin and pipes by lines, which are read as they come.
        field: The field (jsonl) or column (CSV) that holds the text.
        pair_field: The field or column that holds the second text of a pair; None = `text_pair`, where there is one.
        format: How to read all of them.
        most_characters: A longer text is cut to so many characters, and listed in `problems`; None = none is cut.

    Attributes:
        sources: The files to read, in order.
        problems: The parts that could not be read in the last iteration, in order.
        n_bytes: Size of all sources; None where stdin or a pipe is one of them.
        bytes_read: How much of it the last iteration has read.
        sha256: Hash of all texts of the last whole iteration, hex: the same texts in the same order have the same one,
            whatever files they came in. Empty before.
        chat: Writes the conversations of jsonl: as `role: content`, until a study sets its model's chat template.

    Raises:
        AttnscopeError: No file is given, or an argument is unknown. While iterating: there is no text at all.
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
        most_characters: int | None = MOST_CHARACTERS,
    ) -> None:
        require_choice("split", split, get_args(Split))
        require_choice("format", format, get_args(Format))
        if isinstance(files, str | Path):
            files = [files]
        if not files:
            raise AttnscopeError("no file given", "give --file PATH, or - for stdin")
        self.sources = expand(files)
        for source in self.sources:
            if not _is_stream(source):
                refuse_pipe(Path(source), "a text")  # a device, such as /dev/zero, has no end
        self.split = split
        self.field = field
        self.format = format
        self.pair_field = pair_field
        self.most_characters = most_characters
        self.problems: list[Problem] = []
        self.bytes_read = 0
        self.sha256 = ""
        self._splits: set[Split] = set()
        self.chat: Render = write_plainly
        self._streams: dict[str, Replay] = {}

    @property
    def n_bytes(self) -> int | None:
        """Return the size of all sources in bytes; None where stdin or a pipe is one of them."""
        if any(map(_is_stream, self.sources)):
            return None
        paths = map(Path, self.sources)
        return sum(path.stat().st_size for path in paths if path.is_file())

    @property
    def split_as(self) -> Split | Literal[""]:
        """Return how the plain text files of the last iteration were split; empty where that differs."""
        return next(iter(self._splits)) if len(self._splits) == 1 else ""

    def __iter__(self) -> Iterator[CorpusText]:
        # Start a new iteration.
        self.problems = []
        self.bytes_read = 0
        self.sha256 = ""
        self._splits = set()
        # Number and hash the texts as they pass; a failing source ends, the next one follows.
        digest = hashlib.sha256()
        index = 0
        for source in self.sources:
            name = "stdin" if source == "-" else source
            try:
                for line, content in self._read(source, name):
                    text = self._text(index, name, line, content)
                    if text is None:
                        continue
                    digest.update(text.digested())
                    index += 1
                    yield text
            except UnreadableError as error:
                self.problems.append(Problem(name, error.line, error.reason))
            except OSError as error:
                self.problems.append(Problem(name, None, error.strerror or str(error)))
        # Nothing was read: say why.
        if not index:
            sources = amount(len(self.sources), "source")
            hint = "they are empty or blank: give at least one word"
            if self.problems:
                hint = self.HINT
            raise AttnscopeError(
                f"no text is left: nothing to read in {sources}{name_problems(self.problems)}", hint
            )
        self.sha256 = digest.hexdigest()

    def _text(self, index: int, name: str, line: int, content: Content) -> CorpusText | None:
        """Return the text of the corpus with this content, from a line of a source; None where it is blank."""
        if is_blank(content["text"]):
            if "pair" in content:
                self.problems.append(Problem(name, line, "the first text of the pair is blank"))
            return None
        # A text that would fill the memory as it is tokenised is cut.
        most = self.most_characters
        for field in content.keys() & {"text", "pair"}:
            n = len(content[field])
            if most is not None and n > most:
                reason = (
                    f"the text has {n:,} characters: the first {most:,} are read, the rest is left out"
                )
                self.problems.append(Problem(name, line, reason))
                content[field] = content[field][:most]
        return CorpusText(index, name, line, **content)

    def _read(self, source: str, name: str) -> Iterator[tuple[int, Content]]:
        """Yield the contents of one source with their lines, blank texts too, and count the bytes read."""
        n_before = self.bytes_read
        with self._open(source) as file:
            contents = self._contents(source, name, lines_of(file, name))
            # None stands for the end, where all bytes are read.
            for content in itertools.chain(contents, [None]):
                if file.seekable():
                    self.bytes_read = n_before + file.tell()
                if content is not None:
                    yield content

    def _contents(self, source: str, name: str, lines: Iterator[str]) -> Iterator[tuple[int, Content]]:
        """Yield the contents of lines, each with the line that it begins on; malformed ones are listed."""
        format = format_of(name) if self.format == "auto" else self.format
        # Plain text: a stream's lines are passed on as they come, so nothing is guessed from them.
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
        # jsonl and CSV: list a malformed line, read the next.
        entries = json_entries(lines) if format == "jsonl" else csv_entries(lines, _DELIMITERS[format])
        bad = BadLines(name, self.problems)
        named: set[str] = set()
        for number, entry in entries:
            try:
                # Instead of a malformed entry comes the reason why it is malformed.
                if isinstance(entry, str):
                    raise ValueError(entry)
                content, unread = read_entry(entry, self.field, self.pair_field, self.chat)
            except ValueError as error:
                bad.add(number, str(error))
                continue
            # A field that holds text and is not read is named once.
            for field in unread:
                if field not in named:
                    named.add(field)
                    reason = f'the field "{shorten(field)}" holds text too, which is not read'
                    self.problems.append(Problem(name, number, reason))
            yield number, content

    def _open(self, source: str) -> BinaryIO:
        """Open a source at its start."""
        if not _is_stream(source):
            return Path(source).open("rb")
        # What can be read once, such as a pipe, is kept for further passes.
        if source not in self._streams:
            if source == "-":
                stream = open_stdin()
                # Unbuffered: a line is there as soon as it was written, and a thread that waits for it holds no lock.
                stream = getattr(stream, "raw", stream)
            else:
                stream = Path(source).open("rb", buffering=0)  # noqa: SIM115
            self._streams[source] = Replay(stream, source)
        return self._streams[source].again()


def _is_stream(source: str) -> bool:
    """Return whether a source can be read only once: stdin or a pipe."""
    return source == "-" or Path(source).is_fifo()


def expand(files: Sequence[str | Path]) -> tuple[str, ...]:
    """Return the names that names and patterns stand for, without those that name the same file again."""
    by_identity: dict[str, str] = {}
    for name in map(str, files):
        # Functions of os take ~ of a user that there is not, and links that go round in a circle.
        path = os.path.expanduser(name)  # noqa: PTH111
        names = [path]
        if glob.has_magic(name) and not Path(path).exists():
            # Not Path.glob, which takes no absolute patterns.
            matches = glob.glob(path, recursive=True)  # noqa: PTH207
            names = sorted(match for match in matches if Path(match).is_file()) or names
        for source in names:
            identity = source if source == "-" else os.path.realpath(source)
            by_identity.setdefault(identity, source)
    return tuple(by_identity.values())
