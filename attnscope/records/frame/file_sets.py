"""Replaces a set of files together: either all of them are new, or all of them are the earlier ones.

A set is written into the folder `unfinished-…` inside its target. Once it is complete, that folder is renamed to
`replacing-…`, and its files move to their names, which takes milliseconds. Whatever else is in the target stays.

A run that is killed before the renaming has changed nothing. A run that is killed after it leaves a complete new set,
part of which has moved. `attnscope show` reads the rest where it is; the next run that writes there moves it.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from attnscope.errors import AttnscopeError, UsageError
from attnscope.host import delay_interrupts
from attnscope.records.frame.storage import kind_of, making_folders_for, require_replaceable

_OBSOLETE = ".obsolete"
"""The file of a set that lists the earlier files to remove."""


@contextlib.contextmanager
def replace_together(target: Path, earlier: Iterable[str] = ()) -> Iterator[Path]:
    """Yields a folder to write files into; at the end of the block, all of them move to the target.

    If the block or a check at its end fails, nothing changes in the target.

    Args:
        target: The folder for the files; made if it is not there.
        earlier: Files of an earlier set, by their paths in the target; those that the new set lacks are removed.

    Yields:
        A folder inside the target.

    Raises:
        AttnscopeError: The files cannot be written, or something else than a file has the name of one.
    """
    staged = target / f"unfinished-{secrets.token_hex(4)}"
    with making_folders_for(staged, "write into", target):
        try:
            finish_replacing(target)
            staged.mkdir(parents=True)
            try:
                yield staged
            except AttnscopeError as error:  # a user knows the file by the name that it was to have
                raise type(error)(error.message.replace(str(staged), str(target)), error.hint) from error
            with delay_interrupts():
                names = _names_in(staged)
                for name in names:
                    _require_own(target, name)
                obsolete = sorted({*earlier} - {*names})
                if obsolete:
                    (staged / _OBSOLETE).write_text(json.dumps(obsolete), "utf-8")
                whole = staged.rename(target / staged.name.replace("unfinished", "replacing"))
                _move(whole, target)
        finally:
            with delay_interrupts():
                shutil.rmtree(staged, ignore_errors=True)


def finish_replacing(target: Path) -> None:
    """Moves the complete sets that killed runs had not yet moved to their names."""
    for whole in find_unmoved(target):
        with delay_interrupts():
            _move(whole, target)


def require_writable(folder: Path) -> None:
    """Refuses a folder that takes no files, before the model runs for minutes; leaves no trace."""
    if str(folder) == "-":
        raise UsageError("- is stdout, which takes no files", "name a folder with --out; --json prints to stdout")
    hint = "choose another folder with --out, or make room there"
    new: list[Path] = []
    try:
        new = [part for part in (folder, *folder.parents) if not part.exists()]
        if not new and not folder.is_dir():
            raise AttnscopeError(
                f"cannot write into {folder}: it is {kind_of(folder.stat().st_mode)}, not a folder", hint
            )
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
        finish_replacing(folder)
    except OSError as error:
        raise AttnscopeError(f"cannot write into {folder}: {error.strerror or error}", hint) from None
    finally:
        for part in new:
            with contextlib.suppress(OSError):
                part.rmdir()


def find_unmoved(target: Path) -> list[Path]:
    """The folders in a target that hold a complete set, some files of which have not moved to their names."""
    return [path for path in sorted(target.glob("replacing-????????")) if path.is_dir() and not path.is_symlink()]


def remove_unfinished(target: Path) -> None:
    """Removes incomplete sets of killed runs. Call it only if no other run can be writing."""
    for path in target.glob("unfinished-????????"):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)


def _names_in(folder: Path) -> list[str]:
    """The files of a set, by their paths in it."""
    paths = [path for path in sorted(folder.rglob("*")) if not path.is_dir() or path.is_symlink()]
    return [path.relative_to(folder).as_posix() for path in paths if path.name != _OBSOLETE]


def _move(whole: Path, target: Path) -> None:
    """Removes obsolete files, then moves those of a set to their names; also finishes a move that was cut short."""
    obsolete: list[str] = []
    with contextlib.suppress(OSError, ValueError):
        obsolete = [str(name) for name in json.loads((whole / _OBSOLETE).read_text("utf-8"))]
    for name in obsolete:
        with contextlib.suppress(AttnscopeError, OSError):  # it is no loss where it stays
            _require_own(target, name)
            (target / name).unlink()
    for name in _names_in(whole):
        _require_own(target, name)
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # another run, which found this set, has moved it
            (whole / name).replace(target / name)
    shutil.rmtree(whole, ignore_errors=True)


def _require_own(target: Path, name: str) -> None:
    """Refuses a path that leads out of its folder, or to something other than a file."""
    path = target / name
    inside = [parent for parent in path.parents if target in parent.parents]
    if ".." in Path(name).parts or Path(name).is_absolute() or any(parent.is_symlink() for parent in inside):
        raise AttnscopeError(f"cannot write {path}: it leads out of {target}", "choose another folder with --out")
    require_replaceable(path)
