"""Turn the bytes of a source (a file or stdin), plain or gzipped, into lines. `formats` turns lines into texts."""

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
from attnscope.text import MAX_BYTES, find_other_format, make_too_long_message

_MAX_MEMORY_BYTES = 1 << 24
"""The most bytes of a stream that `RereadableStream` keeps in memory; a longer stream goes to a temporary file."""

_GZIP_MAGIC = b"\x1f\x8b"
"""The first bytes of gzipped data."""


class UnreadableError(Exception):
    """Raised when a source cannot be read any further.

    Attributes:
        reason: The reason, for a message.
        line: The line at which reading stopped, from 1; None = nothing can be read.
    """

    def __init__(self, reason: str, line: int | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.line = line


class RereadableStream(io.RawIOBase):
    """Read a stream such as stdin, and keep a copy of its bytes, so that it can be read again from its start."""

    def __init__(self, stream: BinaryIO, name: str) -> None:
        self._stream = stream
        self._name = "stdin" if name == "-" else name
        self._copy = tempfile.SpooledTemporaryFile(_MAX_MEMORY_BYTES)  # noqa: SIM115
        # Close both files when this object is deleted, except stdin, which belongs to the process.
        files: list[IO[bytes]] = [self._copy]
        if name != "-":
            files.append(stream)
        weakref.finalize(self, _close, files)

    def open_at_start(self) -> io.BufferedReader:
        """Return a reader that begins at the start of the stream."""
        self._copy.seek(0)
        return io.BufferedReader(self)

    def readable(self) -> bool:
        """Return True, as `io.RawIOBase` requires of a readable stream."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer with the next bytes, and return their number; 0 at the end.

        Raises:
            AttnscopeError: There is no room for the copy, so the bytes would be missing when the stream is read again.
        """
        # Read the copy up to its end. Then read the stream, and append its bytes to the copy.
        data: bytes = self._copy.read(len(buffer))
        if not data:
            data = self._stream.read(len(buffer)) or b""
            try:
                self._copy.write(data)
                self._copy.flush()
            except OSError as error:
                raise AttnscopeError(
                    f"{self._name} cannot be kept to be read again: {error.strerror or error}",
                    "give a file instead, or let TMPDIR name a folder with room for it",
                ) from None
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        """Do nothing. `io.BufferedReader` closes its stream when it is deleted, but this one must stay readable."""


def _close(files: Sequence[IO[bytes]]) -> None:
    """Close files, and ignore a disk that has no room for their last bytes."""
    for file in files:
        with contextlib.suppress(OSError):
            file.close()


def read_lines(file: BinaryIO, name: str) -> Iterator[str]:
    """Yield the lines of UTF-8 bytes, plain or gzipped, without line ends (LF, CR LF or CR).

    Raises:
        UnreadableError: The file cannot be read, bytes are no text, or a line is longer than MAX_BYTES. The lines
            before the error are yielded first; in damaged gzip data, the lines before the damaged part.
    """
    # gzip data are recognised by their first bytes, whatever the name of the file.
    first_bytes = file.peek(2)[:2] if isinstance(file, io.BufferedReader) else b""
    is_gzip = first_bytes == _GZIP_MAGIC
    if first_bytes and not is_gzip and Path(name).suffix.lower() == ".gz":
        raise UnreadableError("not gzip, in spite of its name")
    reader: Any = gzip.GzipFile(fileobj=file) if is_gzip else file
    n_lines = 0
    while raw_line := _read_line(reader, n_lines):
        # The first line may begin with a byte order mark. It also shows a file that is no text, such as a PDF.
        encoding = "utf-8"
        if n_lines == 0:
            encoding = "utf-8-sig"
            format_and_hint = find_other_format(raw_line)
            if format_and_hint is not None:
                raise UnreadableError("; ".join(format_and_hint))
        if len(raw_line) > MAX_BYTES:
            raise UnreadableError(make_too_long_message("the line")[0], n_lines + 1)
        try:
            text = raw_line.decode(encoding)
        except UnicodeDecodeError as error:
            raise UnreadableError(
                f"not UTF-8: byte 0x{raw_line[error.start]:02X}", n_lines + 1
            ) from None
        if "\0" in text:
            raise UnreadableError("a NUL character: not plain text", n_lines + 1)
        # `_read_line` splits at LF alone. A CR ends a line too, as in files of old Macs.
        for line in text.removesuffix("\n").removesuffix("\r").split("\r"):
            n_lines += 1
            yield line


def _read_line(reader: Any, n_lines: int) -> bytes:
    """Return line n_lines + 1 with its LF, cut after MAX_BYTES + 1 bytes; b"" at the end of the file."""
    # If the first line cannot be read, the error is about the whole file, which line None says.
    line = n_lines + 1 if n_lines else None
    try:
        raw_line: bytes = reader.readline(MAX_BYTES + 1)
    except EOFError:
        raise UnreadableError("the gzip data end too early: the file is cut off", line) from None
    except (zlib.error, gzip.BadGzipFile) as error:
        raise UnreadableError(f"damaged gzip data: {error}", line) from None
    except OSError as error:
        raise UnreadableError(error.strerror or str(error), line) from None
    return raw_line
