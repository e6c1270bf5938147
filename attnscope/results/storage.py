"""Write files atomically, alone or as a set. Format table rows as CSV, LaTeX and Markdown, and values for JSON.

Every other module of attnscope writes its files through this one. Only `write_stream` is not atomic: it serves stdout
and pipes.
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
    """Write a file atomically: write a temporary file in the same folder, then rename it to `path`.

    Missing parent folders are made, and removed again if writing fails.

    Raises:
        AttnscopeError: The file cannot be written (no permission, disk full), or something other than a regular file
            has its name: a link, a device, a pipe.
    """
    require_replaceable(path)
    # Not the module tempfile: only the owner can read its files. This one gets the usual permissions.
    temporary = path.parent / f".{secrets.token_hex(8)}.part"
    with _remove_new_folders_on_error(path):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with temporary.open("xb") as file:
                file.write(content)
            temporary.replace(path)
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
    return path


@contextlib.contextmanager
def _remove_new_folders_on_error(
    path: Path, verb: str = "write", shown_path: Path | None = None
) -> Iterator[None]:
    """If the `with` block fails, remove the parent folders of `path` that it made.

    An OSError becomes an AttnscopeError.

    Args:
        path: The file or folder that the block writes.
        verb: The verb of the message "cannot <verb> <path>": "write", or "write into" for a folder.
        shown_path: The path in the message; None = `path`.
    """
    shown_path = shown_path or path
    if "\0" in str(path):
        raise AttnscopeError(
            f"cannot {verb} {str(shown_path)!r}: a name holds no NUL", "choose another with --out"
        )
    # `exists` may raise an OSError, too. The block has not run then, so there is nothing to remove.
    new_folders: list[Path] = []
    try:
        # The innermost folder comes first, as `_remove_empty_folders` needs it.
        new_folders = [folder for folder in path.parents if not folder.exists()]
        yield
    except BaseException as error:
        _remove_empty_folders(new_folders)
        if not isinstance(error, OSError):
            raise
        raise AttnscopeError(
            f"cannot {verb} {shown_path}: {error.strerror or error}",
            "choose another folder with --out, or make room there",
        ) from None


def _remove_empty_folders(folders: Iterable[Path]) -> None:
    """Remove folders, the innermost first. A folder with files in it stays: another program may have written them."""
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.rmdir()


def require_writable(folder: Path) -> None:
    """Refuse a folder in which no file can be written; leave no new file or folder behind.

    Commands call it early, so that a bad --out fails before the model runs for minutes.
    """
    if str(folder) == "-":
        raise UsageError(
            "- is stdout, which takes no files", "name a folder with --out; --json prints to stdout"
        )
    if folder.exists() and not folder.is_dir():
        raise AttnscopeError(
            f"cannot write into {folder}: it is {describe_file_type(folder.stat().st_mode)}, not a folder",
            "choose another folder with --out",
        )
    # If the attempt fails, the context manager removes the new parents of its path. A path inside the folder makes the
    # folder one of them. If the attempt succeeds, the last line of the block removes the new folders.
    with _remove_new_folders_on_error(folder / "file", "write into", folder):
        new_folders = [parent for parent in (folder, *folder.parents) if not parent.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
        _remove_empty_folders(new_folders)


# Sets of files


_STAGING_PREFIX = "unfinished-"
"""The prefix of the staging folder inside the target, such as `unfinished-1f0c9a3e`: eight random hex digits."""


@contextlib.contextmanager
def replace_together(
    target: Path, *, old_names: Iterable[str] = (), index_name: str = ""
) -> Iterator[Path]:
    """Yield a staging folder to write files into; at the end of the `with` block, move all files to the target.

    The target does not change if the block fails, if a check after it fails, or if the run is killed before the files
    move. Moving takes milliseconds.

    Args:
        target: The folder for the files; made if it is not there.
        old_names: Names of files of an older set in the target. Those that the new set lacks are removed.
        index_name: The name of the file that lists the others. It moves last, so it never lists a missing file.
            "" = the set has no such file.

    Yields:
        The staging folder, inside the target.

    Raises:
        AttnscopeError: The files cannot be written, or the target has a link, a folder or a device of the same name.
    """
    staging_folder = target / f"{_STAGING_PREFIX}{secrets.token_hex(4)}"
    with _remove_new_folders_on_error(staging_folder, "write into", target):
        try:
            staging_folder.mkdir(parents=True)
            try:
                yield staging_folder
            except AttnscopeError as error:
                # A user knows the target, not the staging folder.
                raise type(error)(
                    error.message.replace(str(staging_folder), str(target)), error.hint
                ) from error
            with delay_interrupts():
                names = sorted(path.name for path in staging_folder.iterdir() if path.name != index_name)
                # With index_name = "" this path is the staging folder itself, which is no file.
                if (staging_folder / index_name).is_file():
                    names.append(index_name)
                for name in names:
                    require_replaceable(target / name)
                # All checks have passed. From here on, the target changes.
                for name in {*old_names} - {*names}:
                    # Old names may come from a file that a user edited: a name such as "../x" must not be followed.
                    if Path(name).name == name and is_plain_file(target / name):
                        (target / name).unlink()
                for name in names:
                    (staging_folder / name).replace(target / name)
        finally:
            with delay_interrupts():
                shutil.rmtree(staging_folder, ignore_errors=True)


def remove_unfinished(target: Path) -> None:
    """Remove the staging folders that killed runs left. Call it only if no other run can be writing to the target."""
    for folder in target.glob(_STAGING_PREFIX + 8 * "[0-9a-f]"):
        if folder.is_symlink() or not folder.is_dir():
            continue
        for path in folder.iterdir():
            if is_plain_file(path):
                path.unlink()
        _remove_empty_folders([folder])


# Files, links, pipes and devices


def is_stream(path: Path) -> bool:
    """Return whether a path is `-`, which is stdout, or a pipe."""
    try:
        return str(path) == "-" or stat.S_ISFIFO(path.stat().st_mode)
    except (OSError, ValueError):
        # There is no such file, or the name holds a NUL.
        return False


def write_stream(path: Path, content: bytes) -> None:
    """Write to stdout if the path is `-`, else into a named pipe; block until the reader has taken the bytes."""
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
    """Return whether a path is a regular file with a single hard link; links, folders, pipes and devices are not."""
    try:
        status = path.lstat()
    except (OSError, ValueError):
        return False
    return stat.S_ISREG(status.st_mode) and status.st_nlink == 1


PAGE_MARK = b'<meta name="generator" content="attnscope '
"""The bytes by which `require_replaceable` recognises an HTML page of attnscope: in its first 4096 bytes."""


def require_replaceable(path: Path, mark: bytes = b"") -> None:
    """Refuse a path at which there is a link, a folder, a device, or a file that another program wrote.

    Args:
        path: The file to be written.
        mark: Bytes that all of attnscope's files of this format have in their first or last 4096 bytes. An existing
            file without them is refused, unless it is empty. b"" = any regular file may be replaced.
    """
    try:
        mode = path.lstat().st_mode
    except (OSError, ValueError):
        # There is no such file, or its name is invalid. In the second case the write itself raises the error.
        return
    if not stat.S_ISREG(mode):
        raise AttnscopeError(
            f"cannot write {path}: it is {describe_file_type(mode)}, not a file",
            "choose another name with --out",
        )
    if mark:
        # A file that is empty or has the mark may be replaced. All others are refused below the `with`: files without
        # the mark, and files that cannot be opened or read, because another program may have written them.
        with contextlib.suppress(OSError), path.open("rb") as file:
            first_bytes = file.read(4096)
            file.seek(max(0, path.stat().st_size - 4096))
            if not first_bytes or mark in first_bytes or mark in file.read():
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


def describe_file_type(mode: int) -> str:
    """Return the type of a file by its `st_mode`, for messages: "a file", "a link", …; any other type is "a device"."""
    return _FILE_TYPES.get(stat.S_IFMT(mode), "a device")


# Rows as text


def format_csv(rows: Iterable[Sequence[Any]]) -> str:
    """Return rows as CSV. A float has all its digits, see `digits`.

    Spreadsheets run a text as a formula if it begins with = + - @, a tab or a carriage return. Labels and tokens may
    come from untrusted files, so such a text gets a ' before it, unless it is a number. The CSV that a web page of
    attnscope saves does the same.
    """
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    for row in rows:
        writer.writerow(map(_escape_csv_cell, row))
    return stream.getvalue()


_LATEX_ESCAPES = {
    **{mark: f"\\{mark}" for mark in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "→": r"$\to$",
    "−": "$-$",
    "×": r"$\times$",
    "≥": r"$\ge$",
}
"""LaTeX for the characters that would be commands in LaTeX, or that its usual fonts lack."""


def format_latex(rows: Iterable[Sequence[Any]]) -> str:
    """Return rows, the first of them the header, as a booktabs table of LaTeX; floats have three significant digits."""
    table = [*rows]
    escapes = str.maketrans(_LATEX_ESCAPES)
    lines = [
        " & ".join(_format_brief(value).translate(escapes) for value in row) + r" \\" for row in table
    ]
    # A column of texts is flush left, one of numbers flush right. The last row tells which: the first is the header.
    alignments = ["l" if isinstance(value, str) else "r" for value in table[-1]]
    begin = rf"\begin{{tabular}}{{{''.join(alignments)}}}"
    return "\n".join(
        [begin, r"\toprule", lines[0], r"\midrule", *lines[1:], r"\bottomrule", r"\end{tabular}", ""]
    )


def format_markdown(rows: Iterable[Sequence[Any]]) -> str:
    """Return rows, the first of them the header, as a Markdown table; floats have three significant digits."""
    header, *body = rows
    # A column of texts is flush left, one of numbers flush right. The last row tells which: the first is the header.
    last_row = body[-1] if body else header
    alignments = ["---" if isinstance(value, str) else "--:" for value in last_row]
    lines = []
    for row in (header, alignments, *body):
        cells = [_format_brief(value).replace("|", r"\|") for value in row]
        lines.append(f"| {' | '.join(cells)} |\n")
    return "".join(lines)


TABLE_WRITERS = {"csv": format_csv, "latex": format_latex, "md": format_markdown}
"""By format, the function that turns rows into text. The first row holds the names of the columns."""


def _format_brief(value: Any) -> str:
    """Return a value as text on one line. A float has three significant digits; NaN and infinity become ""."""
    if not isinstance(value, float):
        return " ".join(str(value).split())
    if not math.isfinite(value):
        return ""
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _escape_csv_cell(value: Any) -> Any:
    """Return a cell as `format_csv` writes it: no text in it starts a formula."""
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


def iterate_texts(value: Any) -> Iterator[str]:
    """Yield every string in a value: in its keys, items, array elements and attributes, at any depth."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from iterate_texts([*value, *value.values()])
    elif isinstance(value, list | tuple):
        for item in value:
            yield from iterate_texts(item)
    elif isinstance(value, np.ndarray) and value.dtype.kind == "U":
        yield from map(str, value.ravel())
    elif hasattr(value, "__dict__"):
        yield from iterate_texts(vars(value))


def _to_shortest_floats(values: NDArray[np.float32]) -> list[Any]:
    """Return a float32 array as lists of floats, each with the fewest digits that read back to the same float32."""
    # Convert by way of text: NumPy writes the float32 nearest to 0.1 as "0.1", with the fewest digits. `tolist` alone
    # would return 0.10000000149011612.
    if values.ndim > 1:
        return [_to_shortest_floats(part) for part in values]
    floats: list[Any] = values.astype(str).astype(np.float64).tolist()
    return floats


def finite_or_none(number: float) -> float | None:
    """Return the number, or None if it is NaN or infinite, which JSON cannot express."""
    return number if math.isfinite(number) else None


def digits(number: float) -> str:
    """Return the shortest text that reads back to the same float; "" for NaN and infinity."""
    return repr(float(number)) if math.isfinite(number) else ""


def to_plain(value: Any, convert_float: Callable[[float], float | None] = float) -> Any:
    """Return a value made of the types that `json` writes: arrays and tuples become lists, NumPy scalars plain ones.

    `convert_float` converts each float, for example by `finite_or_none`.
    """
    # `tolist` makes booleans, integers and texts (dtype.kind in "biuU") plain. Floats still need `convert_float`.
    if isinstance(value, np.ndarray | np.generic):
        if value.dtype.kind in "biuU":
            return value.tolist()
        if isinstance(value, np.ndarray) and value.dtype == np.float32 and value.ndim:
            value = _to_shortest_floats(value)
        else:
            value = value.tolist()
    if isinstance(value, float):
        return convert_float(value)
    if isinstance(value, Mapping):
        return {str(name): to_plain(item, convert_float) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item, convert_float) for item in value]
    return value
