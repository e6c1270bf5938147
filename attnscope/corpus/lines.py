"""From the bytes of a source, plain or compressed, to its lines."""

import codecs
import contextlib
import io
import tempfile
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import IO, Any, BinaryIO

from attnscope.errors import AttnscopeError
from attnscope.pipes import open_input
from attnscope.text import MOST_BYTES, other_format, too_long

_CHUNK = 65536
# Compressed bytes that are handed over at a time: where one of them is damaged, no more than their text is lost.
_COMPRESSED_PIECE = 1024
# So much of a stream that is to be read again is kept in memory; from there on it takes room on disk.
_IN_MEMORY = 1 << 24
_GZIP = b"\x1f\x8b"


class UnreadableError(Exception):
    """A source cannot be read any further."""

    def __init__(self, reason: str, line: int | None = None) -> None:
        super().__init__(reason)
        self.reason, self.line = reason, line


class Replay:
    """A stream that can be read from its start again: what was read is kept, beyond _IN_MEMORY in a temporary file."""

    def __init__(self, stream: BinaryIO, name: str = "stdin") -> None:
        self._stream, self._name = stream, name
        self._file = tempfile.SpooledTemporaryFile(_IN_MEMORY)  # noqa: SIM115
        weakref.finalize(self, _close, self._file)

    @classmethod
    def of_pipe(cls, path: Path) -> "Replay":
        """Return what a named pipe holds; it is closed with the last user of it.

        Raises:
            UnreadableError: Nothing comes through it.
        """
        try:
            stream = open_input(path)
        except AttnscopeError as error:
            raise UnreadableError(error.message) from None
        replay = cls(stream, str(path))
        weakref.finalize(replay, stream.close)
        return replay

    def again(self) -> "Replay":
        """The same stream at its start."""
        self._file.seek(0)
        return self

    def read(self, n: int) -> bytes:
        """At most n bytes, fewer where no more are there yet; none at the end.

        Raises:
            AttnscopeError: They cannot be kept. This is no fault of the stream's, and part of it is not the whole.
        """
        data: bytes = self._file.read(n)
        if not data:
            data = self._stream.read(n) or b""
            try:
                self._file.write(data)
                self._file.flush()
            except OSError as error:
                raise AttnscopeError(
                    f"{self._name} cannot be kept to be read again: {error.strerror or error}",
                    "give a file instead, or let TMPDIR name a folder with room for it",
                ) from None
        return data

    def __enter__(self) -> "Replay":
        return self

    def __exit__(self, *_: object) -> None:
        pass


def _close(file: IO[bytes]) -> None:
    """Closes a file whose last bytes may find no room: nobody wants them any more."""
    with contextlib.suppress(OSError):
        file.close()


def read_pieces(file: "BinaryIO | Replay", count: Callable[[int], None]) -> Iterator[bytes]:
    """The bytes of a file piece by piece; `count` is told how many each has.

    Raises:
        UnreadableError: The file cannot be read any further.
    """
    while True:
        try:
            chunk = file.read(_CHUNK)
        except OSError as error:
            raise UnreadableError(error.strerror or str(error)) from None
        if not chunk:
            return
        count(len(chunk))
        yield chunk


def decompress(chunks: Iterator[bytes], name: str) -> Iterator[bytes]:
    """The bytes themselves, or what gzip made them of.

    Raises:
        UnreadableError: They are damaged, cut off, or not what the name says.
    """
    first = next(chunks, b"")
    whole = chain([first], chunks)
    suffix = Path(name).suffix.lower()
    if first.startswith(_GZIP):
        return _inflate(whole)
    if first and suffix == ".gz":
        raise UnreadableError("not gzip, in spite of its name")
    return whole


def _inflate(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Decompress gzip data: any number of members, with zeros between and after them."""
    member: Any = None
    for chunk in chunks:
        for start in range(0, len(chunk), _COMPRESSED_PIECE):
            rest = chunk[start : start + _COMPRESSED_PIECE]
            while rest:
                if member is None:
                    rest = rest.lstrip(b"\0")
                    if not rest:
                        break
                    member = zlib.decompressobj(wbits=31)
                try:
                    piece = member.decompress(rest)
                except zlib.error as error:
                    raise UnreadableError(f"damaged gzip data: {error}") from None
                if piece:
                    yield piece
                if not member.eof:
                    break
                rest, member = member.unused_data, None
    if member is not None:
        raise UnreadableError("the gzip data end too early: the file is cut off")


def lines_of(pieces: Iterator[bytes]) -> Iterator[str]:
    """The lines of UTF-8 bytes, without their ends (LF, CR LF or CR).

    Raises:
        UnreadableError: Bytes are no text, a line is longer than MOST_BYTES, or `pieces` raised it. All whole lines
            before that point were given.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    ends = io.IncrementalNewlineDecoder(None, translate=True)
    held: list[str] = []  # the parts of a line that is not whole yet
    n_lines = n_bytes = n_held = 0
    begun = over = False
    while not over:
        wrong = ""
        try:
            piece = next(pieces, b"")
            over = not piece
            if n_bytes == 0 and (other := other_format(piece)):
                raise UnreadableError("; ".join(other))
            n_bytes += len(piece)
            text = decoder.decode(piece, final=over)
        except UnreadableError as error:
            error.line = n_lines + 1 if begun else None
            raise
        except UnicodeDecodeError as error:
            text = error.object[: error.start].decode()
            at = n_bytes - len(error.object) + error.start
            wrong = f"not UTF-8: byte 0x{error.object[error.start]:02X} at offset {at}"
        if not begun and text:
            text, begun = text.removeprefix("\ufeff"), True
        if (nul := text.find("\0")) >= 0:
            text, wrong = text[:nul], "a NUL character: not plain text"
        first, *others = ends.decode(text, final=over or bool(wrong)).split("\n")
        held.append(first)
        n_held += len(first)
        if n_held > MOST_BYTES:
            raise UnreadableError(too_long("the line")[0], n_lines + 1)
        for following in others:
            n_lines += 1
            yield "".join(held)
            held, n_held = [following], len(following)
        if wrong:
            raise UnreadableError(wrong, n_lines + 1)
    if last := "".join(held):
        yield last
