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
"""Bytes of a stream that `Replay` keeps in memory; those of a longer one go to a temporary file."""

_GZIP = b"\x1f\x8b"
"""The first bytes of gzipped data."""


class UnreadableError(Exception):
    """A source cannot be read any further.

    Attributes:
        reason: Why, for a message.
        line: The line at which reading stopped, from 1; None = the whole source cannot be read.
    """

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
        # When nobody reads it any more, its files are closed; stdin belongs to the process and stays open.
        files = [self._file] if name == "-" else [self._file, stream]
        weakref.finalize(self, _close, files)

    def again(self) -> io.BufferedReader:
        """Return a reader that begins at the start of the stream."""
        self._file.seek(0)
        return io.BufferedReader(self)

    def readable(self) -> bool:
        """Return whether it can be read: always."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer with the next bytes, as far as there are any, and return how many they are; 0 at the end.

        Raises:
            AttnscopeError: There is no room to keep them. Without them a second reading would miss a part.
        """
        # What was read before comes from the copy. After it the stream goes on, and the copy with it.
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
        """Do nothing: a reader closes it at its end, but another may follow."""


def _close(files: Sequence[IO[bytes]]) -> None:
    """Close files that nobody reads any more, also if the disk has no room for their last bytes."""
    for file in files:
        with contextlib.suppress(OSError):
            file.close()


def lines_of(file: BinaryIO, name: str) -> Iterator[str]:
    """Yield the lines of UTF-8 bytes, plain or gzipped, without their ends (LF, CR LF or CR).

    Raises:
        UnreadableError: The file cannot be read, bytes are no text, or a line is longer than MOST_BYTES. All whole
            lines before that point came out first; of damaged compressed data, those before the damaged piece.
    """
    # gzip is recognised by its first bytes, under any name.
    start = file.peek(2)[:2] if isinstance(file, io.BufferedReader) else b""
    is_gzip = start == _GZIP
    if start and not is_gzip and Path(name).suffix.lower() == ".gz":
        raise UnreadableError("not gzip, in spite of its name")
    reader: Any = gzip.GzipFile(fileobj=file) if is_gzip else file
    n_lines = 0
    while raw := _read_line(reader, n_lines):
        # The first line shows whether the file has another format; it may begin with a byte order mark.
        encoding = "utf-8"
        if n_lines == 0:
            encoding = "utf-8-sig"
            format_and_hint = other_format(raw)
            if format_and_hint is not None:
                raise UnreadableError("; ".join(format_and_hint))
        # A line without an end would fill the memory.
        if len(raw) > MOST_BYTES:
            message, _ = too_long("the line")
            raise UnreadableError(message, n_lines + 1)
        try:
            text = raw.decode(encoding)
        except UnicodeDecodeError as error:
            raise UnreadableError(f"not UTF-8: byte 0x{raw[error.start]:02X}", n_lines + 1) from None
        if "\0" in text:
            raise UnreadableError("a NUL character: not plain text", n_lines + 1)
        # A line may still hold CR line ends, as old Macs wrote them.
        for line in text.removesuffix("\n").removesuffix("\r").split("\r"):
            n_lines += 1
            yield line


def _read_line(reader: Any, n_lines: int) -> bytes:
    """Return the line after `n_lines` with its end, at most MOST_BYTES + 1 of it; empty at the end of the file."""
    # Without a first line nothing of the file can be read.
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
