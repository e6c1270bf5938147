"""Write files, whole or not at all, one by one or as a set; turn rows and values into CSV, LaTeX, Markdown and JSON.

All files of attnscope are written here.
"""

import contextlib
import csv
import io
import math
import secrets
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnscope.errors import AttnscopeError, UsageError
from attnscope.host import delay_interrupts


def write_whole(path: Path, content: bytes) -> Path:
    """Write a file whole or not at all: into a temporary file beside it, which is then renamed.

    Folders that are made for it are removed again if writing fails.

    Raises:
        AttnscopeError: It cannot be written (no permission, no room, no such folder), or something other than a file
            has its name: a link, a device, a pipe.
    """
    require_replaceable(path)
    # Files of the module tempfile are readable for their owner alone; this one is as readable as any other.
    unfinished = path.parent / f".{secrets.token_hex(8)}.part"
    with _undoing_folders(path):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with unfinished.open("xb") as file:
                file.write(content)
            unfinished.replace(path)
        finally:
            with contextlib.suppress(OSError):
                unfinished.unlink(missing_ok=True)
    return path


@contextlib.contextmanager
def _undoing_folders(path: Path, verb: str = "write", shown: Path | None = None) -> Iterator[None]:
    """Remove the folders above a path that the block made, if it fails; turn an OSError into an AttnscopeError.

    Args:
        path: The file or folder that the block writes.
        verb: The verb of the message: cannot "write" the file, or cannot "write into" the folder.
        shown: The path in the message; None = `path`.
    """
    shown = shown or path
    if "\0" in str(path):
        raise AttnscopeError(
            f"cannot {verb} {str(shown)!r}: a name holds no NUL", "choose another with --out"
        )
    # Looking for folders may fail, too; then there are none to remove.
    new: list[Path] = []
    try:
        new = [folder for folder in path.parents if not folder.exists()]
        yield
    except BaseException as error:
        _remove_empty(new)
        if not isinstance(error, OSError):
            raise
        raise AttnscopeError(
            f"cannot {verb} {shown}: {error.strerror or error}",
            "choose another folder with --out, or make room there",
        ) from None


def _remove_empty(folders: Iterable[Path]) -> None:
    """Remove folders, the innermost first; those in which others have put something meanwhile stay."""
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.rmdir()


def require_writable(folder: Path) -> None:
    """Refuse a folder that takes no files, before the model runs for minutes; leave no trace."""
    if str(folder) == "-":
        raise UsageError(
            "- is stdout, which takes no files", "name a folder with --out; --json prints to stdout"
        )
    if folder.exists() and not folder.is_dir():
        raise AttnscopeError(
            f"cannot write into {folder}: it is {kind_of(folder.stat().st_mode)}, not a folder",
            "choose another folder with --out",
        )
    # As if a file in the folder were written: so the folder itself is removed too, if it is new.
    with _undoing_folders(folder / "file", "write into", folder):
        new = [parent for parent in (folder, *folder.parents) if not parent.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
        _remove_empty(new)


# Sets of files


_STAGED_PREFIX = "unfinished-"
"""The prefix of the folder, inside the target, in which a set is written; eight random hexadecimal digits follow."""


@contextlib.contextmanager
def replace_together(target: Path, *, earlier: Iterable[str] = (), last: str = "") -> Iterator[Path]:
    """Yield a folder to write files into; at the end of the block, all of them move to the target.

    If the block fails, a check after it fails, or the run is killed before files move, nothing changes in the target.
    Moving takes milliseconds.

    Args:
        target: The folder for the files; made if it is not there.
        earlier: Names of files of an earlier set, which are removed unless the new set has them.
        last: The name of the file that moves last, because it lists the others.

    Yields:
        A folder inside the target.

    Raises:
        AttnscopeError: The files cannot be written, or something other than a file has the name of one.
    """
    staged = target / f"{_STAGED_PREFIX}{secrets.token_hex(4)}"
    with _undoing_folders(staged, "write into", target):
        try:
            staged.mkdir(parents=True)
            try:
                yield staged
            except AttnscopeError as error:
                # A user knows the target, not the staged folder.
                raise type(error)(error.message.replace(str(staged), str(target)), error.hint) from error
            with delay_interrupts():
                names = sorted(path.name for path in staged.iterdir() if path.name != last)
                if (staged / last).is_file():
                    names.append(last)
                for name in names:
                    require_replaceable(target / name)
                # All that can be refused has been checked: from here on, the target changes.
                for name in {*earlier} - {*names}:
                    # Earlier names may be read from a file: never follow one to another folder.
                    if Path(name).name == name and is_plain_file(target / name):
                        (target / name).unlink()
                for name in names:
                    (staged / name).replace(target / name)
        finally:
            with delay_interrupts():
                shutil.rmtree(staged, ignore_errors=True)


def remove_unfinished(target: Path) -> None:
    """Remove the staged folders that killed runs have left. Call it only if no other run can be writing."""
    for folder in target.glob(_STAGED_PREFIX + 8 * "[0-9a-f]"):
        if folder.is_symlink() or not folder.is_dir():
            continue
        for path in folder.iterdir():
            if is_plain_file(path):
                path.unlink()
        _remove_empty([folder])


# Files, links, pipes and devices


def is_stream(path: Path) -> bool:
    """Return whether a path is `-`, which is stdout, or a pipe."""
    try:
        return str(path) == "-" or stat.S_ISFIFO(path.stat().st_mode)
    except (OSError, ValueError):
        # There is no such file, or the name holds a NUL.
        return False


def write_stream(path: Path, content: bytes) -> None:
    """Write to stdout, which is `-`, or into a pipe, and wait until it is read."""
    if str(path) == "-":
        sys.stdout.flush()
        sys.stdout.buffer.write(content)
        sys.stdout.buffer.flush()
        return
    try:
        with path.open("wb") as pipe:
            pipe.write(content)
    except OSError as error:
        raise AttnscopeError(f"cannot write {path}: {error.strerror or error}") from None


def is_plain_file(path: Path) -> bool:
    """Return whether a path is a regular file of one name: no link of any kind, no folder, no pipe, no device."""
    try:
        status = path.lstat()
    except (OSError, ValueError):
        return False
    return stat.S_ISREG(status.st_mode) and status.st_nlink == 1


PAGE_MARK = b'<meta name="generator" content="attnscope '
"""Bytes that every HTML page of attnscope holds within its first 4096."""


def require_replaceable(path: Path, mark: bytes = b"") -> None:
    """Refuse to replace a link, a device or anything else that is no regular file, and files of other programs.

    Args:
        path: The file to be written.
        mark: Bytes that attnscope's files of this format hold in their first or last 4096; a file that is there must
            hold them, or be empty. Empty = any file may be replaced.
    """
    try:
        mode = path.lstat().st_mode
    except (OSError, ValueError):
        # Nothing is there; or the name is impossible, and writing will say so.
        return
    if not stat.S_ISREG(mode):
        raise AttnscopeError(
            f"cannot write {path}: it is {kind_of(mode)}, not a file", "choose another name with --out"
        )
    if mark:
        # A file that cannot be read is refused, too.
        with contextlib.suppress(OSError), path.open("rb") as file:
            begin = file.read(4096)
            file.seek(max(0, path.stat().st_size - 4096))
            if not begin or mark in begin or mark in file.read():
                return
        raise AttnscopeError(
            f"cannot replace {path}: attnscope did not write it",
            "choose another name with --out, or remove that file",
        )


_FILE_TYPES = {
    stat.S_IFREG: "a file",
    stat.S_IFLNK: "a link",
    stat.S_IFIFO: "a pipe",
    stat.S_IFDIR: "a folder",
    stat.S_IFSOCK: "a socket",
}


def kind_of(mode: int) -> str:
    """Return the type of a file from its mode: a file, a link, a pipe, a folder, a socket, or else a device."""
    return _FILE_TYPES.get(stat.S_IFMT(mode), "a device")


# Rows as text


def csv_text(rows: Iterable[Sequence[Any]]) -> str:
    """Return rows as CSV: a float as `digits` writes it, and no text that a spreadsheet would take for a formula.

    Labels, tokens and names come from anywhere: one that begins with = + - @, a tab or a carriage return, and is no
    number, gets a ' before it, as in the CSV that a page saves.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for row in rows:
        writer.writerow(map(_csv_cell, row))
    return text.getvalue()


_LATEX = {
    **{mark: f"\\{mark}" for mark in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "→": r"$\to$",
    "−": "$-$",
    "×": r"$\times$",
    "≥": r"$\ge$",
}
"""LaTeX for characters that would be commands, or that its usual fonts lack."""


def latex_text(rows: Iterable[Sequence[Any]]) -> str:
    """Return rows as a LaTeX table with the rules of the package booktabs, numbers with three digits."""
    table = [*rows]
    escapes = str.maketrans(_LATEX)
    lines = [" & ".join(_brief(value).translate(escapes) for value in row) + r" \\" for row in table]
    # Texts are flush left, numbers flush right, as the last row shows.
    sides = ["l" if isinstance(value, str) else "r" for value in table[-1]]
    begin = rf"\begin{{tabular}}{{{''.join(sides)}}}"
    return "\n".join(
        [begin, r"\toprule", lines[0], r"\midrule", *lines[1:], r"\bottomrule", r"\end{tabular}", ""]
    )


def markdown_text(rows: Iterable[Sequence[Any]]) -> str:
    """Return rows as a table of Markdown, numbers with three digits."""
    header, *body = rows
    # Texts are flush left, numbers flush right, as the last row shows.
    last = body[-1] if body else header
    sides = ["---" if isinstance(value, str) else "--:" for value in last]
    lines = []
    for row in (header, sides, *body):
        cells = [_brief(value).replace("|", r"\|") for value in row]
        lines.append(f"| {' | '.join(cells)} |\n")
    return "".join(lines)


TABLE_WRITERS = {"csv": csv_text, "latex": latex_text, "md": markdown_text}
"""The functions that write rows, the names of columns first, by format."""


def _brief(value: Any) -> str:
    """Return a value on one line, a float with three digits; empty where it is undefined."""
    if not isinstance(value, float):
        return " ".join(str(value).split())
    if not math.isfinite(value):
        return ""
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _csv_cell(value: Any) -> Any:
    """Return a value as `csv_text` writes it."""
    if isinstance(value, float):
        return digits(value)
    if not isinstance(value, str) or not value.startswith(("=", "+", "-", "@", "\t", "\r")):
        return value
    try:
        float(value)
    except ValueError:
        return f"'{value}"
    return value


# Values


def texts_in(value: Any) -> Iterator[str]:
    """Yield all texts in a value, also in its items and attributes."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from texts_in([*value, *value.values()])
    elif isinstance(value, list | tuple):
        for item in value:
            yield from texts_in(item)
    elif isinstance(value, np.ndarray) and value.dtype.kind == "U":
        yield from map(str, value.ravel())
    elif hasattr(value, "__dict__"):
        yield from texts_in(vars(value))


def _shortest(values: NDArray[np.float32]) -> list[Any]:
    """Return a float32 array as lists, each number with the fewest digits that read back to the same float32."""
    if values.ndim > 1:
        return [_shortest(part) for part in values]
    shortest: list[Any] = values.astype(str).astype(np.float64).tolist()
    return shortest


def finite_or_none(number: float) -> float | None:
    """Return the number, or None where it is NaN or infinite: JSON has neither."""
    return number if math.isfinite(number) else None


def digits(number: float) -> str:
    """Return the digits that are needed to read a number back unchanged; empty where it is undefined."""
    return repr(float(number)) if math.isfinite(number) else ""


def plain(value: Any, convert_float: Callable[[float], float | None] = float) -> Any:
    """Return a value as JSON takes it, with NumPy's arrays as lists; `convert_float` converts each float."""
    # Truth values, whole numbers and texts (the letters "biuU") are plain after `tolist`; floats are converted below.
    if isinstance(value, np.ndarray | np.generic):
        if value.dtype.kind in "biuU":
            return value.tolist()
        if isinstance(value, np.ndarray) and value.dtype == np.float32 and value.ndim:
            value = _shortest(value)
        else:
            value = value.tolist()
    if isinstance(value, float):
        return convert_float(value)
    if isinstance(value, Mapping):
        return {str(name): plain(item, convert_float) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, convert_float) for item in value]
    return value
