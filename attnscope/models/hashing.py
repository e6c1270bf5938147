"""SHA-256 of files, computed once as long as they do not change."""

import hashlib
import threading
from pathlib import Path

from attnscope.errors import AttnscopeError, first_line

_hash_lock = threading.Lock()
_hashed: dict[tuple[Path, int, int], str] = {}


def hashes() -> dict[tuple[Path, int, int], str]:
    """The hashes that this process knows, by path, size and time of change, for processes that it starts."""
    with _hash_lock:
        return dict(_hashed)


def remember_hashes(found: dict[tuple[Path, int, int], str]) -> None:
    """Takes over what `hashes` of another process gave: files that have not changed need no hashing again."""
    with _hash_lock:
        _hashed.update(found)


def file_sha256(path: Path) -> str:
    """The SHA-256 of a file, in hex; remembered until it changes.

    Raises:
        AttnscopeError: It cannot be read.
    """
    try:
        with _hash_lock, path.open("rb") as file:
            state = path.stat()
            key = (path.resolve(), state.st_size, state.st_mtime_ns)
            if key not in _hashed:
                _hashed[key] = hashlib.file_digest(file, "sha256").hexdigest()
            return _hashed[key]
    except OSError as error:
        raise AttnscopeError(f"cannot read {path}: {error.strerror or first_line(error)}") from error
