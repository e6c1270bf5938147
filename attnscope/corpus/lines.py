"""Turn the bytes of a source, plain or gzipped, into lines. Formats are left to `formats`."""

import contextlib
import gzip
import io
import tempfile
import weakref
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, BinaryIO

from attnscope.errors import AttnscopeError
from attnscope.text import MOST_BYTES, other_format, too_long

_IN_MEMORY = 1 << 24
"""So much of a stream that is to be read again is kept in memory; from there on it takes room on disk."""

_GZIP = b"\x1f\x8b"


class UnreadableError(Exception):
    """A source cannot be read any further."""

    def __init__(self, reason: str, line: int | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.line = line


class Replay(io.RawIOBase):
    """Keep a stream so that it can be read again: in memory, beyond _IN_MEMORY bytes in a temporary file."""

    def __init__(self, stream: BinaryIO, name: str) -> None:
        self._stream = stream
        self._name = "stdin" if name == "-" else name
        self._file = tempfile.SpooledTemporaryFile(_IN_MEMORY)  # noqa: SIM115
        ours = [self._file] if name == "-" else [self._file, stream]
        weakref.finalize(self, _close, ours)

    def again(self) -> io.BufferedReader:
        """Return the same stream at its start."""
        self._file.seek(0)
        return io.BufferedReader(self)

    def readable(self) -> bool:
        """Return whether it can be read: always."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read as many bytes as are there, at most as many as the buffer holds; none at the end.

        Raises:
            AttnscopeError: They cannot be kept. This is no fault of the stream's, and part of it is not the whole.
        """
        data: bytes = self._file.read(len(buffer))
        if not data:
            data = self._stream.read(len(buffer)) or b""
            try:
                self._file.write(data)
                self._file.flush()
            except OSError as error:
                raise AttnscopeError(
                    f"{self._name} cannot be kept to be read again: {error.strerror or error}",
                    "give a file instead, or let TMPDIR name a folder with room for it",
                ) from None
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        """Leave it open: a reader of it has come to its end, and another may follow."""


def _close(files: Sequence[IO[bytes]]) -> None:
    """Close files whose last bytes may find no room: nobody wants them any more."""
    for file in files:
        with contextlib.suppress(OSError):
            file.close()


def lines_of(file: BinaryIO, name: str) -> Iterator[str]:
    """Yield the lines of UTF-8 bytes, plain or gzipped, without their ends (LF, CR LF or CR).

    Raises:
        UnreadableError: The file cannot be read, bytes are no text, or a line is longer than MOST_BYTES. All whole
            lines before that point were given; of damaged compressed data, those before the damaged piece.
    """
    # gzip is recognised by its first bytes, under any name.
    begin = file.peek(2)[:2] if isinstance(file, io.BufferedReader) else b""
    reader: Any = gzip.GzipFile(fileobj=file) if begin == _GZIP else file
    if begin not in (b"", _GZIP) and Path(name).suffix.lower() == ".gz":
        raise UnreadableError("not gzip, in spite of its name")
    n_lines = 0
    while raw := _read_line(reader, n_lines):
        other = None if n_lines else other_format(raw)
        if other is not None:
            raise UnreadableError("; ".join(other))
        if len(raw) > MOST_BYTES:
            raise UnreadableError(too_long("the line")[0], n_lines + 1)
        try:
            text = raw.decode("utf-8" if n_lines else "utf-8-sig")
        except UnicodeDecodeError as error:
            raise UnreadableError(f"not UTF-8: byte 0x{raw[error.start]:02X}", n_lines + 1) from None
        if "\0" in text:
            raise UnreadableError("a NUL character: not plain text", n_lines + 1)
        # A line may still hold CR line ends, as old Macs wrote them.
        for line in text.removesuffix("\n").removesuffix("\r").split("\r"):
            n_lines += 1
            yield line


def _read_line(reader: Any, n_lines: int) -> bytes:
    """Read a line with its end; empty at the end of the file."""
    line = n_lines + 1 if n_lines else None
    try:
        raw: bytes = reader.readline(MOST_BYTES + 1)
    except EOFError:
        raise UnreadableError("the gzip data end too early: the file is cut off", line) from None
    except (zlib.error, gzip.BadGzipFile) as error:
        raise UnreadableError(f"damaged gzip data: {error}", line) from None
    except OSError as error:
        raise UnreadableError(error.strerror or str(error), line) from None
    return raw
