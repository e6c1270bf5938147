"""The folder of a batch: whose it is, what in it is done, what is left over from a run that was killed.

A text has a folder of its own, whose files appear together; one of them, `entry.json`, lists the others: where it is,
the text is done. So a run can be killed at any moment, and the next one knows what to do from what it finds. The
manifest and the index are made of the entries at the end. Those of an earlier run stay until then, unless a text is
drawn in another way than they say.

The log is what two runs may differ in. It is also the lock: a run holds it as long as any of its processes lives.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path

from attnscope.errors import AttnscopeError, parse_json
from attnscope.records.batches import Batch, DrawnText
from attnscope.records.frame.file_sets import finish_replacing, remove_unfinished, replace_together
from attnscope.records.frame.storage import require_replaceable, write_whole
from attnscope.text import slug

LOG, MANIFEST, INDEX, ENTRY = "log.jsonl", "manifest.jsonl", "index.html", "entry.json"

_TEXT_FOLDER = re.compile(r"\d{5,}-[a-z0-9-]+")
_PATIENCE_S = 10


def folder_name(index: int, text: str) -> str:
    """The folder of a text: `00007-the-first-words`; letters, digits and hyphens, whatever the text is."""
    return f"{index:05d}-{slug(text)}"


class BatchFolder:
    """The folder of a batch, held by this run alone while the block lasts; it is made if it is not there."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.handle = -1
        self._new_folders: list[Path] = []
        self._is_new = False
        self._withdrawn: dict[str, bytes] = {}

    def __enter__(self) -> BatchFolder:
        require_replaceable(self.path / LOG)
        try:
            self._new_folders = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
            self._is_new = not (self.path / LOG).exists()
            self.path.mkdir(parents=True, exist_ok=True)
            # A link would lead out of the folder; not to wait where it is a pipe, which is then refused.
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
            self.handle = os.open(self.path / LOG, flags, 0o666)
        except OSError as error:
            self._leave_no_trace()
            raise AttnscopeError(
                f"cannot write {self.path / LOG}: {error.strerror or error}", "choose another folder with --out"
            ) from None
        try:
            self._take()
            if self._is_gone():  # the run that held it failed, and has removed it
                os.close(self.handle)
                return self.__enter__()
            self.log("start", pid=os.getpid())
        except BaseException as error:
            os.close(self.handle)
            if not isinstance(error, _HeldError):
                self._leave_no_trace()
            raise
        return self

    def __exit__(self, *raised: object) -> None:
        if raised[0] is not None:
            for name, content in self._withdrawn.items():
                with contextlib.suppress(AttnscopeError):
                    write_whole(self.path / name, content)
            self._leave_no_trace()
        # The processes of this run that still live keep the lock until they end.
        os.close(self.handle)

    def _is_gone(self) -> bool:
        try:
            return not os.path.samestat(os.fstat(self.handle), (self.path / LOG).stat())
        except OSError:
            return True

    def _leave_no_trace(self) -> None:
        """Removes the log and the folder that this run has made, if there is nothing else in it."""
        others = [path for path in _entries(self.path) if path.name != LOG]
        with contextlib.suppress(OSError):
            if self._is_new and not others:
                (self.path / LOG).unlink(missing_ok=True)
            for folder in self._new_folders:
                folder.rmdir()

    def log(self, event: str, **facts: object) -> None:
        """Adds a line to the log: when, and what."""
        line = {"at": datetime.now(UTC).isoformat(timespec="milliseconds"), "event": event, **facts}
        try:
            # A run that was killed may have left half a line.
            size = os.fstat(self.handle).st_size
            start = b"" if not size or self._read(size - 1, 1) == b"\n" else b"\n"
            os.write(self.handle, start + json.dumps(line, ensure_ascii=False).encode("utf-8", "replace") + b"\n")
        except OSError as error:
            raise AttnscopeError(
                f"cannot write {self.path / LOG}: {error.strerror or error}", "make room there"
            ) from None

    def done(self, name: str, fingerprint: str, *, index: int, source: str, line: int) -> DrawnText | None:
        """The text in a folder, if it is done with this fingerprint and all its files are there."""
        entry = self.entry(name, index=index, source=source, line=line)
        if entry is None or entry.fingerprint != fingerprint:
            return None
        try:
            whole = all((self.path / name / file).stat().st_size == size for file, size in entry.files.items())
        except (OSError, ValueError):
            return None
        return entry if whole else None

    def entry(self, name: str, *, index: int = 0, source: str = "", line: int = 0) -> DrawnText | None:
        """The entry of a text's folder; None if there is no whole one."""
        return _read_entry(self.path / name, index=index, source=source, line=line)

    def require_same(self, folders: Iterable[str], options: Mapping[str, str]) -> None:
        """Refuses to draw into folders whose figures were drawn with other options, as those would be lost.

        Figures of the same options that are damaged, or of other versions of libraries, are no loss.
        """
        for folder in folders:
            if (entry := self.entry(folder)) is None:
                continue
            before = {name: entry.asked[name] for name in options if name in entry.asked}
            differ = [f"{name} {was}, now {options[name]}" for name, was in before.items() if was != options[name]]
            if entry.asked and not differ:
                continue
            what = "; ".join(differ) or "an earlier version of attnscope drew them, and did not say with which"
            raise AttnscopeError(
                f"{self.path} holds figures of other options: {what}",
                "choose another folder with --out, or give up those figures with --replace",
            )

    def sweep(self) -> None:
        """Removes what killed runs have left half-written, and moves to its name what they had written whole."""
        for folder in (self.path, *self._text_folders()):
            with contextlib.suppress(OSError):
                remove_unfinished(folder)
                finish_replacing(folder)

    def withdraw(self) -> None:
        """Removes the manifest and the index, which are out of date; they come back if the run fails altogether."""
        for name in (MANIFEST, INDEX):
            with contextlib.suppress(OSError):
                if not (self.path / name).is_symlink():
                    self._withdrawn[name] = (self.path / name).read_bytes()
                (self.path / name).unlink(missing_ok=True)

    def publish(self, batch: Batch, index: str) -> list[Path]:
        """Writes the index and the manifest, and returns their paths."""
        with replace_together(self.path) as staged:
            write_whole(staged / INDEX, index.encode("utf-8", "backslashreplace"))
            # File names that are no text hold lone surrogates; this writes them as JSON's own \udc80.
            write_whole(staged / MANIFEST, batch.manifest().encode("utf-8", "backslashreplace"))
        return [self.path / INDEX, self.path / MANIFEST]

    def _text_folders(self) -> Iterator[Path]:
        for path in _entries(self.path):
            if _TEXT_FOLDER.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
                yield path

    def _take(self) -> None:
        """Takes the lock; waits for processes whose run is dead already, as they end by themselves."""
        until = time.monotonic() + _PATIENCE_S
        while not _is_locked(self.handle):
            pid = self._last_pid()
            if pid is None or _lives(pid) or time.monotonic() > until:
                held_by = f"process {pid}" if pid is not None else "another process"
                raise _HeldError(
                    f"{held_by} is writing into {self.path}",
                    "wait until it is done, or choose another folder with --out",
                )
            time.sleep(0.05)

    def _last_pid(self) -> int | None:
        """The process that started the last run."""
        size = os.fstat(self.handle).st_size
        for line in reversed(self._read(0, size).splitlines()):
            with contextlib.suppress(ValueError, TypeError, KeyError):
                return int(parse_json(line)["pid"])
        return None

    def _read(self, start: int, n: int) -> bytes:
        os.lseek(self.handle, start, os.SEEK_SET)
        return os.read(self.handle, n)


class _HeldError(AttnscopeError):
    """Another run holds the folder."""


def require_own(folder: Path) -> None:
    """Refuses the folder of a text that is a link: what is written there would be written elsewhere."""
    if folder.is_symlink():
        raise AttnscopeError(f"{folder} is a link, which leads out of the batch", "remove it")


def files_of(folder: Path) -> list[str]:
    """The files of the text that is drawn in a folder, as its entry lists them; empty without an entry."""
    entry = _read_entry(folder)
    return [] if entry is None else [*entry.files, ENTRY]


def _read_entry(folder: Path, *, index: int = 0, source: str = "", line: int = 0) -> DrawnText | None:
    """The entry of a text's folder; None if there is no whole one."""
    if folder.is_symlink():
        return None
    try:
        entry = (folder / ENTRY).read_text("utf-8")
        return DrawnText.from_entry(entry, index=index, source=source, line=line, folder=folder.name)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _lives(pid: int) -> bool:
    if sys.platform == "win32":  # os.kill would end it there
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True


def _is_locked(handle: int) -> bool:
    """Takes the lock on an open file, if nobody has it. It ends with the last process that has the file open."""
    try:
        if sys.platform == "win32":
            import msvcrt

            os.lseek(handle, 1 << 30, os.SEEK_SET)  # far behind the end, as a locked byte cannot be read
            msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        # Some network file systems have no locks; there it is up to the user.
        import errno

        return error.errno in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)
    return True
