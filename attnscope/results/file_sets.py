"""Replace a set of files together: either all of them are new, or all of them are the earlier ones.

A set is written into the folder `unfinished-…` inside its target. Once it is complete, that folder is renamed to
`replacing-…`, and its files move to their names, which takes milliseconds. Whatever else is in the target stays.

A run that is killed before the renaming has changed nothing. A run that is killed after it leaves a complete new set,
part of which has moved. Readers find the rest where it is. The next run moves it, just before it writes its own files.

Anybody may have put a folder of such a name into the target, with anything in it. So a run moves only regular files
whose names are its own, and removes only what its earlier result in the target lists.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from attnscope.errors import AttnscopeError, UsageError
from attnscope.host import delay_interrupts
from attnscope.results.storage import is_plain_file, kind_of, making_folders_for, require_replaceable

_STAGED, _COMPLETE = "unfinished-", "replacing-"
_TOKEN = re.compile("[0-9a-f]{8}")
_PART = re.compile(r"\.[0-9a-f]{16}\.part")

_MARKS = {"png": b"Software\0attnscope ", "svg": b"<dc:title>attnscope ", "pdf": b"/Creator (attnscope "}
"""What every figure of ours holds within its first or its last 4096 bytes."""


def _list_none(folder: Path) -> Iterable[str]:
    return ()


@dataclass(frozen=True)
class OwnFiles:
    """The files that a command writes into a folder, by which it knows them again. All lie in the folder itself.

    Attributes:
        names: The names of its data.
        has_figures: Whether it draws figures besides. Their names are free; they bear a mark of ours.
        index: The file that lists the others of its set; it moves last. Empty = no file does.
        listed: Reads, for a folder, what the index there lists, itself included.
    """

    names: frozenset[str] = frozenset()
    has_figures: bool = False
    index: str = ""
    listed: Callable[[Path], Iterable[str]] = _list_none

    def has(self, path: Path) -> bool:
        """Return whether a path is a regular file, to which no link leads, has a name or a mark of ours."""
        return is_plain_file(path) and (path.name in self.names or (self.has_figures and _is_figure(path)))

    def may_replace(self, path: Path) -> bool:
        """Return whether a path is free for a file of ours: nothing has its name, or what has it is ours."""
        return not path.is_symlink() and (not path.exists() or self.has(path))


@contextlib.contextmanager
def replace_together(target: Path, own: OwnFiles = OwnFiles()) -> Iterator[Path]:  # noqa: B008  # it is frozen
    """Yield a folder to write files into; at the end of the block, all of them move to the target.

    If the block or a check at its end fails, nothing changes in the target.

    Args:
        target: The folder for the files; made if it is not there.
        own: Which files the caller writes there: what a killed run has left of these is moved first, and what its
            earlier result lists and the new one lacks is removed.

    Yields:
        A folder inside the target.

    Raises:
        AttnscopeError: The files cannot be written, or something else than a file has the name of one.
    """
    staged = target / f"{_STAGED}{secrets.token_hex(4)}"
    with making_folders_for(staged, "write into", target):
        try:
            staged.mkdir(parents=True)
            try:
                yield staged
            except AttnscopeError as error:  # a user knows the file by the name that it was to have
                raise type(error)(error.message.replace(str(staged), str(target)), error.hint) from error
            with delay_interrupts():
                names = sorted(path.name for path in staged.iterdir())
                for name in names:
                    require_replaceable(target / name)
                # All that can be refused has been checked: from here on, this run writes.
                for earlier in find_unmoved(target):
                    _move(earlier, target, _own_files_in(earlier, target, own), own)
                complete = staged.rename(target / staged.name.replace(_STAGED, _COMPLETE))
                _move(complete, target, names, own)
        finally:
            with delay_interrupts():
                shutil.rmtree(staged, ignore_errors=True)


def require_writable(folder: Path) -> None:
    """Refuse a folder that takes no files, before the model runs for minutes; leave no trace."""
    if str(folder) == "-":
        raise UsageError("- is stdout, which takes no files", "name a folder with --out; --json prints to stdout")
    hint = "choose another folder with --out, or make room there"
    new: list[Path] = []
    try:
        # Try it: make the folder and a file in it.
        new = [part for part in (folder, *folder.parents) if not part.exists()]
        if not new and not folder.is_dir():
            raise AttnscopeError(
                f"cannot write into {folder}: it is {kind_of(folder.stat().st_mode)}, not a folder", hint
            )
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise AttnscopeError(f"cannot write into {folder}: {error.strerror or error}", hint) from None
    # Remove the folders that were made for this.
    finally:
        for part in new:
            with contextlib.suppress(OSError):
                part.rmdir()


def find_unmoved(target: Path) -> list[Path]:
    """Return the folders in a target with a complete set of which files have not moved; the latest comes last."""
    return _folders_in(target, _COMPLETE)


def locate(path: Path) -> Path:
    """Return where a file is: in the complete set of a killed run if it has not moved to its name, else as named."""
    for folder in reversed(find_unmoved(path.parent)):
        if is_plain_file(folder / path.name):
            return folder / path.name
    return path


def remove_unfinished(target: Path, own: OwnFiles) -> None:
    """Remove what killed runs have left of incomplete sets. Call it only if no other run can be writing."""
    for folder in _folders_in(target, _STAGED):
        for path in folder.iterdir():
            if own.has(path) or (is_plain_file(path) and _PART.fullmatch(path.name)):
                path.unlink()
        with contextlib.suppress(OSError):  # what is not ours stays
            folder.rmdir()


def _folders_in(target: Path, begin: str) -> list[Path]:
    """Return the real folders in a target that are called so, by when they changed."""
    found: list[tuple[int, Path]] = []
    with contextlib.suppress(OSError, ValueError):  # there is no such folder, or it cannot be read
        for path in target.iterdir():
            if path.name.startswith(begin) and _TOKEN.fullmatch(path.name.removeprefix(begin)):
                status = path.lstat()
                if stat.S_ISDIR(status.st_mode):
                    found.append((status.st_mtime_ns, path))
    return [path for _, path in sorted(found)]


def _own_files_in(earlier: Path, target: Path, own: OwnFiles) -> list[str]:
    """Return which files of a killed run's set are the caller's, and may take their names in the target."""
    return [path.name for path in sorted(earlier.iterdir()) if own.has(path) and own.may_replace(target / path.name)]


def _move(complete: Path, target: Path, names: list[str], own: OwnFiles) -> None:
    """Move files of a complete set to their names, once those of the earlier set are gone that the new one lacks.

    It may be the rest of a move that was cut short. The earlier index stands until the new one takes its place, as the
    last file of its set; the new index tells which files of the new set have moved already.
    """
    # Files of the earlier set that the new one lacks go first.
    kept = {*names, *own.listed(complete)}
    if own.index in names:
        for name in own.listed(target):
            if name not in kept and Path(name).name == name and own.has(target / name):
                (target / name).unlink()
    # The index moves last: until then the earlier set counts.
    for name in sorted(names, key=lambda name: (name == own.index, name)):
        with contextlib.suppress(FileNotFoundError):  # another run, which found this set, has moved it
            (complete / name).replace(target / name)
    with contextlib.suppress(OSError):  # what is not ours stays where it is
        complete.rmdir()


def _is_figure(path: Path) -> bool:
    """Return whether a regular file is a figure that attnscope drew."""
    kind = path.suffix.removeprefix(".")
    if kind not in _MARKS:
        return False
    try:
        with path.open("rb") as file:
            begins = file.read(4096)
            file.seek(max(0, path.stat().st_size - 4096))
            return _MARKS[kind] in begins or _MARKS[kind] in file.read(4096)
    except OSError:
        return False
