"""Read the texts of files one at a time, as often as you iterate. Splitting and parsing are left to `formats`."""

import contextlib
import errno
import glob
import hashlib
import io
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal, get_args

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
    unread_fields,
    write_plainly,
)
from attnscope.corpus.lines import Replay, UnreadableError, lines_of
from attnscope.errors import AttnscopeError, amount, require_choice
from attnscope.text import MOST_CHARACTERS, is_blank


@dataclass(frozen=True)
class CorpusText:
    """Hold one text of a corpus and its place.

    Attributes:
        index: Its number in the corpus, from 0; blank texts are not counted.
        source: The file's name as it was given or found; "stdin".
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
        """Return how long it is; where it came as token numbers, about how long it would be."""
        return len(self.written) if self.ids is None else 4 * len(self.ids)

    @property
    def written(self) -> str:
        """Return its text, or both texts of a pair one after the other; empty where token numbers were given."""
        return self.text or "" if self.pair is None else f"{self.text} {self.pair}"

    def digested(self) -> bytes:
        """Return the bytes that hashes of texts are made of; the place does not enter."""
        if self.ids is not None:
            raw = np.array(self.ids, "<i8").tobytes()
            return f"ids {len(raw)}\n".encode() + raw
        raw = (self.text or "").encode("utf-8", "surrogatepass")
        digested = f"{'chat ' if self.is_chat else ''}text {len(raw)}\n".encode() + raw
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
            if Path(source).is_char_device():  # such as /dev/zero, which has no end
                raise AttnscopeError(
                    f"{source} is a device, and a text is read from a file", "give a file, or - for stdin"
                )
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
        if "-" in self.sources:
            return None
        sizes = [_size(Path(source)) for source in self.sources]
        known = [size for size in sizes if size is not None]
        return sum(known) if len(known) == len(sizes) else None

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
            if len(self.problems) == len(self.sources) == 1 and self.problems[0].reason == os.strerror(errno.ENOENT):
                raise AttnscopeError(f"there is no file {self.problems[0].source}", "check its name")
            why = f"; {name_problems(self.problems)}" if self.problems else ""
            raise AttnscopeError(
                f"no text is left: nothing to read in {amount(len(self.sources), 'source')}{why}",
                self._hint(),
            )
        self.sha256 = digest.hexdigest()

    def _text(self, index: int, name: str, line: int, content: Content) -> CorpusText | None:
        """Return what a source holds at a place as a text of the corpus; None where it is blank."""
        if is_blank(content["text"]):
            if "pair" in content:
                self.problems.append(Problem(name, line, "the first text of the pair is blank"))
            return None
        cut: Content = {field: self._cut(content[field], name, line) for field in ("text", "pair") if field in content}
        return CorpusText(index, name, line, **(content | cut))

    def _cut(self, text: str, name: str, line: int) -> str:
        """Return a text, or the beginning of one that would fill the memory as it is tokenised."""
        most = self.most_characters
        if most is None or len(text) <= most:
            return text
        reason = f"the text has {len(text):,} characters: the first {most:,} are read, the rest is left out"
        self.problems.append(Problem(name, line, reason))
        return text[:most]

    def _hint(self) -> str:
        if not self.problems:
            return "they are empty or blank: give at least one word"
        if any(self._format_of(problem.source) != "txt" for problem in self.problems):
            return "say with --field which field or column holds the text; for conversations see docs/heads.md"
        return "name files that hold text"

    def _read(self, source: str, name: str) -> Iterator[tuple[int, Content]]:
        """Yield what one source holds, with the lines that it begins on; blank texts too."""
        n_before = self.bytes_read
        with self._open(source) as file:
            for place in self._contents(source, name, lines_of(file, name)):
                if file.seekable():
                    self.bytes_read = n_before + file.tell()
                yield place
            if file.seekable():
                self.bytes_read = n_before + file.tell()

    def _contents(self, source: str, name: str, lines: Iterator[str]) -> Iterator[tuple[int, Content]]:
        """Yield what lines hold by their format; malformed ones are listed."""
        wanted = self._format_of(name)
        # Plain text: a stream's lines are passed on as they come, so nothing is guessed from them.
        if wanted == "txt":
            split = self.split
            if split == "auto":
                comes_slowly = source == "-" or Path(source).is_fifo()
                split, lines = ("line", lines) if comes_slowly else guess_split(lines)
            self._splits.add(split)
            for number, text in split_lines(lines, split):
                yield number, {"text": text}
            return
        # jsonl and CSV: list a malformed line, read the next.
        bad = BadLines(name, self.problems)
        named: set[str] = set()
        delimiters = {"csv": ",", "tsv": "\t"}
        entries = csv_entries(lines, delimiters[wanted]) if wanted in delimiters else json_entries(lines)
        for number, entry in entries:
            try:
                if isinstance(entry, str):
                    raise ValueError(entry)
                content = read_entry(entry, self.field, self.pair_field, self.chat)
            except ValueError as error:
                bad.add(number, str(error))
                continue
            # A field that holds text and is not read is named once.
            for unread in unread_fields(entry, self.field, self.pair_field, self.chat):
                if unread not in named:
                    reason = f'the field "{shorten(unread)}" holds text too, which is not read'
                    self.problems.append(Problem(name, number, reason))
                named.add(unread)
            yield number, content

    def _format_of(self, name: str) -> Format:
        return format_of(name) if self.format == "auto" else self.format

    def _open(self, source: str) -> BinaryIO:
        if source != "-" and not Path(source).is_fifo():
            return Path(source).open("rb")
        if source not in self._streams:  # what can be read once, such as a pipe, is kept for further passes
            stream = _open_stdin() if source == "-" else Path(source).open("rb", buffering=0)  # noqa: SIM115
            self._streams[source] = Replay(stream, source)
        return self._streams[source].again()


def _open_stdin() -> BinaryIO:
    if sys.stdin is None:
        raise AttnscopeError("there is no stdin to read from", "give --file PATH")
    stream = getattr(sys.stdin, "buffer", None)
    # Unbuffered: a line is there as soon as it was written, and a thread that waits for it holds no lock.
    stream = getattr(stream, "raw", stream)
    return stream or io.BytesIO(sys.stdin.read().encode("utf-8", "surrogatepass"))


def _size(path: Path) -> int | None:
    """Return how many bytes a file has; None = that of a pipe is not known."""
    if path.is_fifo():
        return None
    return path.stat().st_size if path.is_file() else 0


def expand(files: Sequence[str | Path]) -> tuple[str, ...]:
    """Return the names that names and patterns stand for, without those that name the same file again."""
    by_identity: dict[str, str] = {}
    for name in map(str, files):
        if name == "-":
            by_identity.setdefault(name, name)
            continue
        path = Path(name)
        with contextlib.suppress(RuntimeError):  # ~ of a user that there is not
            path = path.expanduser()
        names = [str(path)]
        if glob.has_magic(name) and not path.exists():
            # Not Path.glob, which takes no absolute patterns.
            matches = glob.glob(str(path), recursive=True)  # noqa: PTH207
            names = sorted(match for match in matches if Path(match).is_file()) or names
        for each in names:
            by_identity.setdefault(_identity(each), each)
    return tuple(by_identity.values())


def _identity(name: str) -> str:
    try:
        return str(Path(name).resolve())
    except (OSError, RuntimeError):  # links that go round in a circle
        return name
