"""Reading records that may be damaged, or made to do harm: sizes before contents.

A result reads itself through `reading` and `read_record`; its question declares what must hold of it then.
"""

import contextlib
import json
import typing
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnscope.errors import AttnscopeError, first_line
from attnscope.host import refuse_pipe

MOST_BYTES = 2**30
"""The most that an archive may unpack to, unless MOST_TIMES its own size is more."""

MOST_TIMES = 50

MOST_DESCRIPTION_BYTES = 2**25
"""What describes the arrays of an archive is small beside them."""

_KINDS = "biufUS"
"""What arrays hold: truth values, whole numbers, floats, texts, bytes."""


@contextlib.contextmanager
def reading(path: Path, what: str, hint: str) -> Iterator[None]:
    """Turn all that a missing or damaged file makes Python, NumPy, zipfile and json raise into one AttnscopeError.

    NumPy does not warn of numbers that are too large for their type, or NaN: checks of values refuse them.

    Args:
        path: The file.
        what: What it should hold, such as "record of heads".
        hint: What to do about it.
    """
    try:
        with np.errstate(over="ignore", invalid="ignore"):
            yield
    except (AttnscopeError, MemoryError):
        raise
    except FileNotFoundError:
        raise AttnscopeError(f"there is no file {path}") from None
    except IsADirectoryError:
        raise AttnscopeError(f"the folder {path} holds no {what}", hint) from None
    except OSError as error:
        raise AttnscopeError(f"cannot read {path}: {error.strerror or error}") from None
    except KeyError as error:
        raise AttnscopeError(f"{path} is no {what}: it lacks {error}", hint) from None
    except Exception as error:
        raise AttnscopeError(f"{path} is no {what}: {first_line(error)}", hint) from None


def read_record(path: Path, schema: str = "") -> tuple[dict[str, Any], Mapping[str, NDArray[Any]]]:
    """Return what describes a record, and its arrays by name; by its content, not by its name.

    Args:
        path: The file.
        schema: The schema that it must have; empty = any.

    Raises:
        ValueError: It is a record of another kind, no whole npz archive, or too large; other damage raises whatever
            Python's libraries do.
    """
    with _open_archive(path) as archive:
        arrays = {name: archive[name] for name in archive.files}
    # NumPy's objects would run code when they are read.
    for name, array in arrays.items():
        if array.dtype.kind not in _KINDS:
            raise ValueError(f"its {name} is of {array.dtype}, which is in no record")
    described = _description(arrays["record"])
    if schema and described["schema"] != schema:
        raise ValueError(f"it holds {described['schema']!r}, not {schema!r}")
    return described, arrays


def read_schema(path: Path) -> str:
    """Return the schema that a record's file names, such as "attnscope.heads/1"; raises as `read_record` does."""
    with _open_archive(path) as archive:
        return str(_description(archive["record"])["schema"])


def schema_of(path: Path) -> str:
    """Return the schema that a record's file names; empty for what is no record."""
    try:
        with reading(path, "record", ""):
            return read_schema(path)
    except AttnscopeError:
        return ""


@contextlib.contextmanager
def _open_archive(path: Path) -> Iterator[Any]:
    """Open an npz archive, sizes first: one may unpack to more than the memory holds."""
    refuse_pipe(path, "a record")
    with path.open("rb") as file:
        if not zipfile.is_zipfile(file):
            file.seek(0)
            is_json = file.read(200).lstrip().startswith(b'{"schema"')
            raise ValueError(
                "it is the JSON of one, a copy for other programs" if is_json else "it is no npz archive"
            )
        _require_room(file, path)
        with np.load(file, allow_pickle=False) as archive:
            yield archive


def _description(written: NDArray[Any]) -> dict[str, Any]:
    """Return what describes a record: an object with its schema."""
    if written.nbytes > MOST_DESCRIPTION_BYTES:
        raise ValueError(
            f"what describes it has {written.nbytes:,} bytes, more than {MOST_DESCRIPTION_BYTES:,}"
        )
    content = (
        written.tobytes() if written.dtype == np.uint8 else str(written).encode("utf-8", "surrogatepass")
    )
    described = json.loads(content)
    if not isinstance(described, dict) or "schema" not in described:
        raise ValueError("what describes it names no schema")
    return described


def _require_room(file: typing.IO[bytes], path: Path) -> None:
    """Refuse an archive that would unpack to far more than it is, before anything of it is unpacked."""
    with zipfile.ZipFile(file) as archive:
        names = [info.filename for info in archive.infolist()]
        size = sum(info.file_size for info in archive.infolist())
    if len(set(names)) < len(names):
        raise ValueError("two of its members have one name")
    most = max(MOST_BYTES, MOST_TIMES * path.stat().st_size)
    if size > most:
        raise ValueError(f"it would unpack to {size:,} bytes, more than {most:,}")
    file.seek(0)


def require_shown(run: Any, corpus: Any) -> None:
    """Refuse what a result says of its run and its corpus where it could not be shown.

    Raises:
        ValueError: A value is of another type, or a number of texts is negative.
    """
    if not (isinstance(run, Mapping) and isinstance(corpus, Mapping)):
        raise ValueError("its run or its corpus cannot be shown")
    failures = run.get("failures", [])
    problems = corpus.get("problems", [])
    numbers = [
        corpus.get(name, 0) for name in ("n_texts", "n_tokens", "n_chunked", "n_copies", "n_not_finite")
    ]
    checks = {
        "the model of its run": isinstance(run.get("model", ""), str),
        "the versions of its run": isinstance(run.get("versions", {}), Mapping),
        "the notes of its run": _are(str, run.get("notes", [])),
        "the kinds of its run": _are(str, run.get("kinds", [])),
        "a failure of its run": _are(Mapping, failures)
        and all(
            _are(str, [failure.get(name) for name in ("step", "error", "hint")]) for failure in failures
        ),
        "a problem of its corpus": _are(Mapping, problems)
        and all({"source", "line", "reason"} <= problem.keys() for problem in problems),
        "the sources of its corpus": _are(str, corpus.get("sources", [])),
        "a number of its corpus": all(type(number) is int and number >= 0 for number in numbers),
    }
    for what, holds in checks.items():
        if not holds:
            raise ValueError(f"{what} cannot be shown")


def _are(kind: type, values: Any) -> bool:
    return isinstance(values, list | tuple) and all(isinstance(value, kind) for value in values)
