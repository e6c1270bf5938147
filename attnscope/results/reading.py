"""Read the files of results, which may be damaged or made to do harm: sizes are checked before contents.

Used by `results.result`, which then checks tables and arrays against the declarations of a question.
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
MOST_TIMES = 50
"""An archive may unpack to MOST_BYTES, or to MOST_TIMES its own size if that is more."""

MOST_DESCRIPTION_BYTES = 2**25
"""Most bytes of the JSON that describes the arrays of an archive, which is small beside them."""

_DTYPE_LETTERS = "biufUS"
"""Types of arrays as letters of `dtype.kind`: truth values, whole numbers, floats, texts, bytes."""


@contextlib.contextmanager
def one_error_for_damage(path: Path, noun: str, hint: str) -> Iterator[None]:
    """Turn every error of Python, NumPy, zipfile and json about a missing or damaged file into an AttnscopeError.

    NumPy's warnings of NaN, and of numbers too large for their type, are silent: later checks refuse such values.

    Args:
        path: The file that the block reads.
        noun: What the file should be, such as "record of heads".
        hint: The hint of the error.
    """
    try:
        with np.errstate(over="ignore", invalid="ignore"):
            yield
    except (AttnscopeError, MemoryError):
        raise
    except FileNotFoundError:
        raise AttnscopeError(f"there is no file {path}") from None
    except IsADirectoryError:
        raise AttnscopeError(f"the folder {path} holds no {noun}", hint) from None
    except OSError as error:
        raise AttnscopeError(f"cannot read {path}: {error.strerror or error}") from None
    except KeyError as error:
        raise AttnscopeError(f"{path} is no {noun}: it lacks {error}", hint) from None
    except Exception as error:
        raise AttnscopeError(f"{path} is no {noun}: {first_line(error)}", hint) from None


def read_record(path: Path, schema: str) -> tuple[dict[str, Any], Mapping[str, NDArray[Any]]]:
    """Return the description of a record, and all its arrays by name.

    Args:
        path: The file.
        schema: The schema that it must have.

    Raises:
        ValueError: It is a record of another kind, no whole npz archive, or too large; other damage raises the errors
            of Python's libraries.
    """
    with _open_archive(path) as archive:
        arrays = {name: archive[name] for name in archive.files}
    for name, array in arrays.items():
        # Objects, dates and the like come from elsewhere.
        if array.dtype.kind not in _DTYPE_LETTERS:
            raise ValueError(f"its {name} is of {array.dtype}, which is in no record")
    described = _parse_description(arrays["record"])
    if described["schema"] != schema:
        raise ValueError(f"it holds {described['schema']!r}, not {schema!r}")
    return described, arrays


def read_schema(path: Path) -> str:
    """Return the schema that a record's file names, such as "attnscope.heads/1"; raises as `read_record` does."""
    with _open_archive(path) as archive:
        return str(_parse_description(archive["record"])["schema"])


def schema_of(path: Path) -> str:
    """Return the schema that a record's file names; empty if the file is no record."""
    try:
        with one_error_for_damage(path, "record", ""):
            return read_schema(path)
    except AttnscopeError:
        return ""


@contextlib.contextmanager
def _open_archive(path: Path) -> Iterator[Any]:
    """Open an npz archive, if it would not unpack to more than memory holds."""
    refuse_pipe(path, "a record")
    with path.open("rb") as file:
        if not zipfile.is_zipfile(file):
            # People give the JSON copy for the record: that has a message of its own.
            file.seek(0)
            if file.read(200).lstrip().startswith(b'{"schema"'):
                raise ValueError("it is the JSON of one, a copy for other programs")
            raise ValueError("it is no npz archive")
        _require_room(file, path)
        # A pickled object could run code when it is read.
        with np.load(file, allow_pickle=False) as archive:
            yield archive


def _parse_description(written: NDArray[Any]) -> dict[str, Any]:
    """Return the description of a record, which names its schema, from its JSON: bytes as uint8, or a text."""
    if written.nbytes > MOST_DESCRIPTION_BYTES:
        raise ValueError(
            f"what describes it has {written.nbytes:,} bytes, more than {MOST_DESCRIPTION_BYTES:,}"
        )
    content = str(written).encode("utf-8", "surrogatepass")
    if written.dtype == np.uint8:
        content = written.tobytes()
    described = json.loads(content)
    if not isinstance(described, dict) or "schema" not in described:
        raise ValueError("what describes it names no schema")
    return described


def _require_room(file: typing.IO[bytes], path: Path) -> None:
    """Refuse an archive that would unpack to far more bytes than it has, before anything of it is unpacked."""
    with zipfile.ZipFile(file) as archive:
        members = archive.infolist()
    # The sizes that the archive declares; NumPy reads no more than these.
    size = sum(member.file_size for member in members)
    if len({member.filename for member in members}) < len(members):
        raise ValueError("two of its members have one name")
    most = max(MOST_BYTES, MOST_TIMES * path.stat().st_size)
    if size > most:
        raise ValueError(f"it would unpack to {size:,} bytes, more than {most:,}")
    file.seek(0)


def require_shown(run: Any, corpus: Any) -> None:
    """Refuse the `run` and the `corpus` of a result that views could not show.

    Raises:
        ValueError: A value is of another type, or a number of texts is negative.
    """
    _require(isinstance(run, Mapping) and isinstance(corpus, Mapping), "its run or its corpus")
    _require(isinstance(run.get("model", ""), str), "the model of its run")
    _require(isinstance(run.get("versions", {}), Mapping), "the versions of its run")
    _require(_is_list_of(str, run.get("notes", [])), "the notes of its run")
    _require(_is_list_of(str, run.get("kinds", [])), "the kinds of its run")
    failures = run.get("failures", [])
    _require(_is_list_of(Mapping, failures), "a failure of its run")
    for failure in failures:
        texts = [failure.get("step"), failure.get("error"), failure.get("hint")]
        _require(_is_list_of(str, texts), "a failure of its run")
    _require(_is_list_of(str, corpus.get("sources", [])), "the sources of its corpus")
    problems = corpus.get("problems", [])
    _require(_is_list_of(Mapping, problems), "a problem of its corpus")
    for problem in problems:
        _require({"source", "line", "reason"} <= problem.keys(), "a problem of its corpus")
    # Truth values are no numbers here, though Python takes them for int.
    for name in ("n_texts", "n_tokens", "n_chunked", "n_copies", "n_not_finite", "n_predictions"):
        number = corpus.get(name, 0)
        _require(type(number) is int and number >= 0, "a number of its corpus")


def _require(can_be_shown: bool, name: str) -> None:
    if not can_be_shown:
        raise ValueError(f"{name} cannot be shown")


def _is_list_of(kind: type, values: Any) -> bool:
    """Return whether a value from a file is a list or tuple of objects of one type."""
    return isinstance(values, list | tuple) and all(isinstance(value, kind) for value in values)
