"""Read the texts of files, one at a time, and number and hash them.

`lines` decodes a file's bytes into lines. `formats` splits plain text and parses jsonl and CSV.
"""

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
    describe_problems,
    format_of,
    guess_split,
    parse_csv_rows,
    parse_json_lines,
    read_entry,
    render_plainly,
    shorten,
    split_lines,
)
from attnscope.corpus.lines import RereadableStream, UnreadableError, read_lines
from attnscope.errors import AttnscopeError, amount, require_choice
from attnscope.host import require_regular_file
from attnscope.text import MAX_CHARACTERS, is_blank, open_stdin

_DELIMITER_BY_FORMAT = {"csv": ",", "tsv": "\t"}


@dataclass(frozen=True)
class CorpusText:
    """Hold one text of a corpus, and which line of which file it comes from.

    Exactly one of `text` and `ids` is set. Texts of files have `text`; the repeat texts of
    `corpus.probes` have `ids`.

    Attributes:
        index: The text's number in the corpus, from 0. Blank texts are not counted.
        source: The name of the file; "stdin" for standard input.
        line: The line that the text begins on, from 1.
        text: The text, or the first text of a pair; None if `ids` is set.
        ids: Token ids, including special tokens; None if `text` is set.
        pair: The second text of a pair; None if there is only one text.
        is_chat: Whether a chat template rendered the text, so that the text already contains its special tokens.
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
        """Return the number of characters; for token ids an estimate, four characters per token."""
        return len(self.full_text) if self.ids is None else 4 * len(self.ids)

    @property
    def full_text(self) -> str:
        """Return the text, or both texts of a pair with a space between; empty if the text is token ids."""
        if self.pair is not None:
            return f"{self.text} {self.pair}"
        return self.text or ""

    def bytes_to_hash(self) -> bytes:
        """Return the bytes that callers feed to a hash. They depend on the content, not on index, source and line."""
        if self.ids is not None:
            raw = np.array(self.ids, "<i8").tobytes()
            return f"ids {len(raw)}\n".encode() + raw
        # Put its length before each part, so that the concatenated bytes of two different lists of texts differ.
        raw = (self.text or "").encode("utf-8", "surrogatepass")
        kind = "chat text" if self.is_chat else "text"
        content = f"{kind} {len(raw)}\n".encode() + raw
        if self.pair is not None:
            raw_pair = self.pair.encode("utf-8", "surrogatepass")
            content += f"pair {len(raw_pair)}\n".encode() + raw_pair
        return content


class Corpus:
    """Iterate over the texts of files; each iteration reads the files again.

    Files are UTF-8, with or without a byte order mark, and may have any line ends. They may be gzipped: the first bytes
    decide, not the name. Memory holds one text at a time, and 64 KiB of its file. Blank texts are skipped. stdin and
    pipes are copied into a temporary file, so that they can be read again.

    Parts that cannot be read are listed in `problems`; the iteration goes on. A source may be missing, damaged,
    truncated, or not UTF-8 from some line on. Then the texts before that point are read, and the next source follows.
    If gzip data are damaged, the last 1 KiB before the damage is lost too. A malformed line of jsonl or CSV is skipped.
    After ten malformed lines, the rest of the source is skipped.

    Args:
        files: Names and glob patterns (`**` for any folders); "-" is stdin. Patterns are expanded at once, with matches
            sorted by name. A file that is named twice is read once.
        split: How a plain text file is split into texts. "auto": by paragraphs if blank lines separate any, else by
            lines. stdin and pipes are always split by lines, so that each line is available as soon as it is written.
        field: The field (jsonl) or column (CSV) that holds the text.
        pair_field: The field or column that holds the second text of a pair; None = `text_pair`, if it exists.
        format: The format of all files; "auto" = each file's suffix decides.
        max_characters: A longer text is cut to this length and listed in `problems`; None = no limit.

    Attributes:
        sources: The names of the files to read, in order.
        problems: The parts that could not be read in the last iteration, in order.
        n_bytes: The size of all sources; None if one of them is stdin or a pipe.
        bytes_read: How many of these bytes the last iteration has read.
        sha256: The SHA-256 of all texts of the last iteration, in hex. It does not depend on how the texts are
            distributed over files. Empty until an iteration has ended.
        chat: A function that renders a conversation of jsonl as a text. The default writes `role: content`; a study
            sets it to the model's chat template.

    Raises:
        AttnscopeError: An argument is unknown, or a source is a device. While iterating: the corpus has no text.
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
        self.sources = expand_patterns(files)
        # Refuse devices such as /dev/zero, which have no end. Pipes are allowed here.
        for source in self.sources:
            if not _is_stream(source):
                require_regular_file(Path(source), "a text")
        # Settings.
        self.split = split
        self.field = field
        self.format = format
        self.pair_field = pair_field
        self.max_characters = max_characters
        self.chat: RenderChat = render_plainly
        # Facts of the last iteration.
        self.problems: list[Problem] = []
        self.bytes_read = 0
        self.sha256 = ""
        self._splits_used: set[Split] = set()
        # The temporary copy of each stream that was read, by source.
        self._streams: dict[str, RereadableStream] = {}

    @property
    def n_bytes(self) -> int | None:
        """Return the size of all sources in bytes; None if one of them is stdin or a pipe."""
        if any(map(_is_stream, self.sources)):
            return None
        paths = map(Path, self.sources)
        return sum(path.stat().st_size for path in paths if path.is_file())

    @property
    def effective_split(self) -> Split | Literal[""]:
        """Return how the last iteration split the plain text files; "" if there were none, or if the splits differ."""
        return next(iter(self._splits_used)) if len(self._splits_used) == 1 else ""

    def __iter__(self) -> Iterator[CorpusText]:
        # Start a new iteration.
        self.problems = []
        self.bytes_read = 0
        self.sha256 = ""
        self._splits_used = set()
        # Number and hash the texts. An unreadable source ends with an exception; the next source follows.
        digest = hashlib.sha256()
        index = 0
        for source in self.sources:
            name = "stdin" if source == "-" else source
            try:
                for line, content in self._read_source(source, name):
                    text = self._make_text(index, name, line, content)
                    if text is None:
                        continue
                    digest.update(text.bytes_to_hash())
                    index += 1
                    yield text
            except UnreadableError as error:
                self.problems.append(Problem(name, error.line, error.reason))
            except OSError as error:
                self.problems.append(Problem(name, None, error.strerror or str(error)))
        if not index:
            sources = amount(len(self.sources), "source")
            # Without problems all sources were readable, so they must be blank.
            hint = "they are empty or blank: give at least one word"
            if self.problems:
                hint = self.HINT
            raise AttnscopeError(
                f"no text is left: nothing to read in {sources}{describe_problems(self.problems)}", hint
            )
        self.sha256 = digest.hexdigest()

    def _make_text(self, index: int, name: str, line: int, content: TextFields) -> CorpusText | None:
        """Return the text with this content, cut if it is too long; None if it is blank.

        `content` holds the fields `text`, `pair` and `is_chat` of a CorpusText. Only `text` is always present.
        """
        if is_blank(content["text"]):
            if "pair" in content:
                self.problems.append(Problem(name, line, "the first text of the pair is blank"))
            return None
        # Cut a text that would fill the memory when it is tokenised.
        limit = self.max_characters
        for field in ("text", "pair"):
            n = len(content.get(field, ""))
            if limit is not None and n > limit:
                reason = (
                    f"the text has {n:,} characters: the first {limit:,} are read, the rest is left out"
                )
                self.problems.append(Problem(name, line, reason))
                content[field] = content[field][:limit]
        return CorpusText(index, name, line, **content)

    def _read_source(self, source: str, name: str) -> Iterator[tuple[int, TextFields]]:
        """Yield the line number and the content of each text of a source, also of blank texts; update `bytes_read`."""
        n_before = self.bytes_read
        with self._open(source) as file:
            # Append None after the last text, so that the loop updates `bytes_read` once more at the end of the file.
            for line_and_content in itertools.chain(
                self._parse(source, name, read_lines(file, name)), [None]
            ):
                # A stream is not seekable, and its bytes are not counted. For gzip, tell() counts compressed bytes, as
                # `read_lines` decompresses them.
                if file.seekable():
                    self.bytes_read = n_before + file.tell()
                if line_and_content is not None:
                    yield line_and_content

    def _parse(self, source: str, name: str, lines: Iterator[str]) -> Iterator[tuple[int, TextFields]]:
        """Yield the line number and the content of each text in a source's lines; list malformed entries."""
        format = format_of(name) if self.format == "auto" else self.format
        # Plain text. A stream is split by lines: a guess would have to wait until its first lines are written.
        if format == "txt":
            split = self.split
            if split == "auto" and _is_stream(source):
                split = "line"
            elif split == "auto":
                # `guess_split` has consumed some lines. It returns an iterator that yields them first.
                split, lines = guess_split(lines)
            self._splits_used.add(split)
            for number, text in split_lines(lines, split):
                yield number, {"text": text}
            return
        # jsonl and CSV. A malformed entry is a str that says what is wrong. It takes the same path as an entry that
        # `read_entry` refuses. BadLineLimit lists malformed lines, and at the tenth raises UnreadableError.
        entries = (
            parse_json_lines(lines)
            if format == "jsonl"
            else parse_csv_rows(lines, _DELIMITER_BY_FORMAT[format])
        )
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
            # Report each field that holds text and is not read, once per source.
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
        # A stream can be read only once. RereadableStream keeps a copy for further iterations.
        if source not in self._streams:
            if source == "-":
                stream = open_stdin()
                # Read stdin unbuffered, so that a line is available as soon as it is written. A buffered reader would
                # also hold its lock while a thread waits for a line.
                stream = getattr(stream, "raw", stream)
            else:
                stream = Path(source).open("rb", buffering=0)  # noqa: SIM115
            self._streams[source] = RereadableStream(stream, source)
        return self._streams[source].open_at_start()


def _is_stream(source: str) -> bool:
    """Return whether a source can be read only once: stdin or a pipe."""
    return source == "-" or Path(source).is_fifo()


def expand_patterns(files: Sequence[str | Path]) -> tuple[str, ...]:
    """Replace glob patterns among file names by their matches. If several names mean one file, keep the first name."""
    name_of_file: dict[str, str] = {}
    for name in map(str, files):
        # Use os.path: the methods of Path raise errors for an unknown user (~nobody) and for circular links.
        path = os.path.expanduser(name)  # noqa: PTH111
        names = [path]
        if glob.has_magic(name) and not Path(path).exists():
            # Use glob.glob: Path.glob accepts no absolute patterns.
            matches = glob.glob(path, recursive=True)  # noqa: PTH207
            names = sorted(match for match in matches if Path(match).is_file()) or names
        for source in names:
            identity = source if source == "-" else os.path.realpath(source)
            name_of_file.setdefault(identity, source)
    return tuple(name_of_file.values())
