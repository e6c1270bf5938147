"""Files that are elsewhere, by their addresses: hf://datasets/org/name/path.parquet, and whatever else fsspec knows.

Knows no format: a file is what can be read from any place of it, a part at a time, and nothing is kept on disk.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

from attnscope.corpus.lines import UnreadableError
from attnscope.errors import UsageError, first_line
from attnscope.hub import no_log_of_attempts, require_hub

MOST_FILES = 100_000
"""A pattern that stands for more files elsewhere is refused."""

_ADDRESS = re.compile(r"(?:[a-z][a-z0-9+.-]*::)*[a-z][a-z0-9+.-]*://", re.IGNORECASE)

_PASSWORD = re.compile(r"://[^/:@]*:[^/@]*@")


def is_address(name: str) -> bool:
    """Whether a name is an address, such as hf://datasets/org/name/path.parquet, rather than that of a file here."""
    return _ADDRESS.match(name) is not None


def files_at(address: str) -> list[str]:
    """The files that an address with a pattern stands for, by name; one without a pattern is itself.

    Raises:
        UsageError: It holds a password, or cannot be looked up.
    """
    if _PASSWORD.search(address):
        raise UsageError(
            "an address with a password would be written into records",
            "leave it out, and give it where its file system looks: for s3:// in AWS_SECRET_ACCESS_KEY, say",
        )
    if not any(mark in address for mark in "*["):  # a ? begins what is asked of a server
        return [address]
    try:
        with _reasons(address):
            system, path = _find(address)
            found = sorted(name for name, about in system.glob(path, detail=True).items() if about["type"] == "file")
            names = [system.unstrip_protocol(name) for name in found]
    except UnreadableError as error:
        raise UsageError(f"cannot look up {address}: {error.reason}", _HINT) from None
    if len(names) > MOST_FILES:
        raise UsageError(f"{address} stands for {len(names):,} files", f"at most {MOST_FILES:,} are read in one go")
    return names or [address]


def open_address(address: str, *, in_order: bool = True) -> BinaryIO:
    """A file elsewhere, opened for reading; parts of it are fetched as they are read.

    If it is read `in_order`, from start to end, more is fetched than is asked for, in larger parts.

    Raises:
        UnreadableError: It cannot be reached, or is not there.
    """
    with _reasons(address):
        system, path = _find(address)
        opened: Any = system.open(path, "rb", **({} if in_order else {"cache_type": "none"}))
    return _Guarded(opened, address)  # type: ignore[return-value]  # all that is asked of a file


def size_of(address: str) -> int | None:
    """How many bytes a file elsewhere has; None where that is not known."""
    try:
        with _reasons(address):
            system, path = _find(address)
            size = system.size(path)
    except UnreadableError:
        return None
    return size if isinstance(size, int) else None


class _Guarded:
    """A file whose reading raises nothing but UnreadableError, whatever its library raises when a network fails."""

    def __init__(self, file: Any, address: str) -> None:
        self._file, self._address = file, address
        self.closed = False

    def read(self, n: int = -1) -> bytes:
        with _reasons(self._address):
            data: bytes = self._file.read(n)
        return data

    def seek(self, place: int, whence: int = 0) -> int:
        with _reasons(self._address):
            return int(self._file.seek(place, whence))

    def tell(self) -> int:
        return int(self._file.tell())

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def writable(self) -> bool:
        return False

    def close(self) -> None:
        self.closed = True
        self._file.close()

    def __enter__(self) -> "_Guarded":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_HINT = "check the address; without a network give a file that is here"


def _find(address: str) -> tuple[Any, str]:
    """The file system of an address, and the path in it."""
    from fsspec.core import url_to_fs

    system, path = url_to_fs(address)
    if "hf://" in address.lower():  # also behind another, as in filecache::hf://
        require_hub()
    return system, path


_MISSING = {
    "RepositoryNotFoundError": "there is no such repository, or it is private and nobody is logged in",
    "GatedRepoError": "who wants it must ask for it on its page, and log in",
    "RevisionNotFoundError": "there is no such revision",
}
"""Why a file of the Hub is not there, by what its library raised."""


@contextmanager
def _reasons(address: str) -> Iterator[None]:
    """Within it, what a file system raises is an UnreadableError that says why in one line."""
    try:
        with no_log_of_attempts():
            yield
    except UnreadableError:
        raise
    except FileNotFoundError as error:
        reason = _MISSING.get(type(error.__cause__).__name__, "there is no such file")
        raise UnreadableError(reason) from None
    except ImportError as error:
        scheme = address.partition("://")[0]
        raise UnreadableError(f"{scheme}:// needs a package that is not installed; {first_line(error)}") from None
    except Exception as error:  # of any library, and of those that it uses
        raise UnreadableError(first_line(error)) from None
