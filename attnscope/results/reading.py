"""Read the npz files of results. A file may be damaged or malicious, so sizes are checked before it is unpacked.

A record is a saved result.

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
from attnscope.host import require_regular_file

MAX_BYTES = 2**30
"""The number of bytes that any archive may unpack to, however small it is."""

MAX_EXPANSION = 50
"""A large archive may unpack to more bytes than `MAX_BYTES`: to this many times its own size."""

MAX_DESCRIPTION_BYTES = 2**25
"""The most bytes of the JSON in an archive that describes the arrays. It is much smaller than the arrays."""

_DTYPE_LETTERS = "biufUS"
"""The types that arrays may have, as letters of `dtype.kind`: bool, signed and unsigned integer, float, text, bytes."""


@contextlib.contextmanager
def one_error_for_damage(path: Path, noun: str, hint: str) -> Iterator[None]:
    """Turn every error of Python, NumPy, zipfile and json about a missing or damaged file into an AttnscopeError.

    Inside the block NumPy does not warn of NaN or overflow, as the checks of values refuse both.

    Args:
        path: The file that the body of the `with` statement reads.
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
    """Return the description of a record, the JSON of `Result.describe`, and all its arrays by name.

    Args:
        path: The file.
        schema: The schema that it must have, such as "attnscope.heads/1".

    Raises:
        ValueError: It has another schema, is no complete npz archive, or is too large. Other damage raises errors of
            zipfile, json or NumPy, which `one_error_for_damage` turns into an AttnscopeError.
    """
    with _open_archive(path) as archive:
        arrays = {name: archive[name] for name in archive.files}
    for name, array in arrays.items():
        # No result has arrays of another type, such as complex numbers or dates.
        if array.dtype.kind not in _DTYPE_LETTERS:
            raise ValueError(f"its {name} is of {array.dtype}, which is in no record")
    description = _parse_description(arrays["record"])
    if description["schema"] != schema:
        raise ValueError(f"it holds {description['schema']!r}, not {schema!r}")
    return description, arrays


def read_schema(path: Path) -> str:
    """Return the schema of a record, such as "attnscope.heads/1", without reading its arrays.

    Raises:
        ValueError: It is no npz archive, is too large, or names no schema.
    """
    with _open_archive(path) as archive:
        return str(_parse_description(archive["record"])["schema"])


def schema_if_record(path: Path) -> str:
    """Return the schema of a record as `read_schema` does; empty if the file is missing, damaged or no record."""
    try:
        with one_error_for_damage(path, "record", ""):
            return read_schema(path)
    except AttnscopeError:
        return ""


@contextlib.contextmanager
def _open_archive(path: Path) -> Iterator[Any]:
    """Open an npz archive after checking the size that it would unpack to.

    Raises:
        ValueError: It is no npz archive, has two members with the same name, or would unpack to too many bytes.
    """
    require_regular_file(path, "a record")
    with path.open("rb") as file:
        if not zipfile.is_zipfile(file):
            # A user may confuse heads.json with heads.npz: the message says so. `one_error_for_damage` begins it,
            # such as "heads.json is no record of heads:", so that "one" in the message is a record of heads.
            file.seek(0)
            if file.read(200).lstrip().startswith(b'{"schema"'):
                raise ValueError("it is the JSON of one, a copy for other programs")
            raise ValueError("it is no npz archive")
        _require_safe_members(file, path)
        # A pickled object could run code when it is read.
        with np.load(file, allow_pickle=False) as archive:
            yield archive


def _parse_description(stored_json: NDArray[Any]) -> dict[str, Any]:
    """Return the description of a record from its JSON, an array of uint8 or of one text.

    Raises:
        ValueError: It is too large, no JSON, or names no schema.
    """
    if stored_json.nbytes > MAX_DESCRIPTION_BYTES:
        raise ValueError(
            f"what describes it has {stored_json.nbytes:,} bytes, more than {MAX_DESCRIPTION_BYTES:,}"
        )
    # json detects the encoding: UTF-8 of bytes, UTF-32 of a text of NumPy.
    description = json.loads(stored_json.tobytes())
    if not isinstance(description, dict) or "schema" not in description:
        raise ValueError("what describes it names no schema")
    return description


def _require_safe_members(file: typing.IO[bytes], path: Path) -> None:
    """Refuse an archive whose members have the same name or would unpack to too much, before anything is unpacked."""
    with zipfile.ZipFile(file) as archive:
        members = archive.infolist()
    if len({member.filename for member in members}) < len(members):
        raise ValueError("two of its members have one name")
    # The archive declares these sizes; NumPy never reads more bytes than declared.
    unpacked_bytes = sum(member.file_size for member in members)
    max_bytes = max(MAX_BYTES, MAX_EXPANSION * path.stat().st_size)
    if unpacked_bytes > max_bytes:
        raise ValueError(f"it would unpack to {unpacked_bytes:,} bytes, more than {max_bytes:,}")
    # The file is at another position now; NumPy reads from the current one.
    file.seek(0)


def require_shown(run: Any, corpus: Any) -> None:
    """Refuse the `run` and the `corpus` of a result if the terminal, figures or pages could not show them.

    Raises:
        ValueError: A value has the wrong type, or a count is negative.
    """
    _require(isinstance(run, Mapping) and isinstance(corpus, Mapping), "its run or its corpus")
    _require(isinstance(run.get("model", ""), str), "the model of its run")
    _require(isinstance(run.get("versions", {}), Mapping), "the versions of its run")
    _require(_is_list_of(str, run.get("notes", [])), "the notes of its run")
    _require(_is_list_of(str, run.get("kinds", [])), "the kinds of its run")
    failures = run.get("failures", [])
    _require(_is_list_of(Mapping, failures), "a failure of its run")
    for failure in failures:
        texts = [failure.get(name) for name in ("step", "error", "hint")]
        _require(_is_list_of(str, texts), "a failure of its run")
    _require(_is_list_of(str, corpus.get("sources", [])), "the sources of its corpus")
    problems = corpus.get("problems", [])
    _require(_is_list_of(Mapping, problems), "a problem of its corpus")
    for problem in problems:
        _require({"source", "line", "reason"} <= problem.keys(), "a problem of its corpus")
    # `isinstance(True, int)` is true, so the exact type is compared: a bool is no count.
    for name in ("n_texts", "n_tokens", "n_chunked", "n_copies", "n_not_finite", "n_predictions"):
        count = corpus.get(name, 0)
        _require(type(count) is int and count >= 0, "a number of its corpus")


def _require(can_be_shown: bool, name: str) -> None:
    if not can_be_shown:
        raise ValueError(f"{name} cannot be shown")


def _is_list_of(entry_type: type, values: Any) -> bool:
    """Return whether a value from a file is a list or tuple of objects of one type."""
    return isinstance(values, list | tuple) and all(isinstance(value, entry_type) for value in values)
