"""Reading records that may be damaged, or made to do harm: sizes before contents.

A result reads itself through `reading` and `read_record`; its question declares what must hold of it then.
"""

from __future__ import annotations

import contextlib
import json
import re
import typing
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnscope.errors import AttnscopeError, first_line
from attnscope.host import refuse_pipe

MOST_BYTES = 2**30
"""The most that an archive may unpack to, unless MOST_TIMES its own size is more."""
MOST_TIMES = 50
MOST_JSON_BYTES = 2**30
MOST_DESCRIPTION_BYTES = 2**28
MOST_DESCRIPTION_VALUES = 2**22
"""What describes the arrays of an archive is small beside them."""
_KINDS = "biufUS"
"""What arrays hold: truth values, whole numbers, floats, texts, bytes."""

MOST_DEPTH = 64
"""How deep lists and objects may stand in each other."""

MOST_CONTAINERS = 2**21
"""How many lists and objects there may be."""

MOST_VALUES = 2**25
"""How many values there may be, as in the weights of a large model written as JSON."""

_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_OTHER = bytes(set(range(256)) - set(b"[]{},"))


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
    except AttnscopeError:
        raise
    except FileNotFoundError:
        raise AttnscopeError(f"there is no file {path}") from None
    except IsADirectoryError:
        raise AttnscopeError(f"the folder {path} holds no {what}", hint) from None
    except OSError as error:
        raise AttnscopeError(f"cannot read {path}: {error.strerror or error}") from None
    except MemoryError:
        raise
    except KeyError as error:
        raise AttnscopeError(f"{path} is no {what}: it lacks {error}", hint) from None
    except RecursionError:
        raise AttnscopeError(f"{path} is no {what}: its JSON is nested too deep", hint) from None
    except Exception as error:
        raise AttnscopeError(f"{path} is no {what}: {first_line(error)}", hint) from None


def read_record(path: Path, schema: str) -> tuple[dict[str, Any], Mapping[str, Any]]:
    """Return what describes a record, and what the file holds by name; by its content, not by its name.

    Raises:
        ValueError: It is a record of another kind, neither a whole npz archive nor JSON, or too large; other damage
            raises whatever Python's libraries do.
    """
    arrays, described = read_arrays(path)
    named = described["schema"] if isinstance(described, dict) else None
    if named != schema:
        raise ValueError(f"it holds {named!r}, not {schema!r}")
    return described, arrays


def read_arrays(path: Path) -> tuple[Mapping[str, Any], Any]:
    """Return what a file holds by name, and what describes it; see `read_record`.

    The description of JSON is its `record`; where there is none, the whole document.
    """
    arrays = read_archive(path)
    if arrays is not None:
        return arrays, _description(arrays["record"])
    with path.open("rb") as file:
        if path.stat().st_size > MOST_JSON_BYTES:
            raise ValueError(f"it is no archive, and larger than {MOST_JSON_BYTES:,} bytes")
        content = file.read()
    require_bounded(content)
    try:
        document = json.loads(content)
    except ValueError:
        raise ValueError("it is neither a whole npz archive nor JSON") from None
    if not isinstance(document, dict):
        raise ValueError("it is no JSON object")
    described = document.get("record")
    if not isinstance(described, dict) or "schema" not in described:
        return document, document
    # What describes a record beside its arrays names the schema too.
    if described["schema"] != document.get("schema", described["schema"]):
        raise ValueError(f"it names two schemas, {document['schema']!r} and {described['schema']!r}")
    return document, described


def read_archive(path: Path) -> dict[str, NDArray[Any]] | None:
    """Return the arrays of an npz archive, by name; None where the file is no archive."""
    refuse_pipe(path, "a record")
    # Sizes first: an archive may unpack to more than the memory holds.
    with path.open("rb") as file:
        if not zipfile.is_zipfile(file):
            return None
        require_room(file, path)
        with np.load(file, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
    # NumPy's objects would run code when they are read.
    for name, array in arrays.items():
        if array.dtype.kind not in _KINDS:
            raise ValueError(f"its {name} is of {array.dtype}, which is in no record")
    return arrays


def read_description(path: Path) -> Mapping[str, Any]:
    """Return what a record says of itself; empty for what is no record."""
    try:
        with reading(path, "record", ""):
            described = read_arrays(path)[1]
    except AttnscopeError:
        return {}
    return described if isinstance(described, Mapping) else {}


def _description(written: NDArray[Any]) -> Any:
    if written.nbytes > MOST_DESCRIPTION_BYTES:
        raise ValueError(f"what describes it has {written.nbytes:,} bytes, more than {MOST_DESCRIPTION_BYTES:,}")
    content = written.tobytes() if written.dtype == np.uint8 else str(written).encode("utf-8", "surrogatepass")
    require_bounded(content, MOST_DESCRIPTION_VALUES)
    return json.loads(content)


def require_bounded(document: bytes, most_values: int = MOST_VALUES) -> None:
    """Refuse JSON that is too large to be parsed.

    How deep it is and how many values it holds is counted before any object is made of it. A kilobyte that unpacks to
    `[],[],[]…` would otherwise fill the memory: an empty list takes 64 bytes, its text 3.

    Raises:
        ValueError: It is nested deeper than MOST_DEPTH, or holds more lists, objects or values than there may be.
    """
    # Brackets and commas alone, without strings.
    structure = _STRING.sub(b"", document).translate(None, delete=_OTHER)
    n_containers = structure.count(b"[") + structure.count(b"{")
    if n_containers > MOST_CONTAINERS:
        raise ValueError(f"its JSON holds {n_containers:,} lists and objects, more than {MOST_CONTAINERS:,}")
    n_values = n_containers + structure.count(b",")
    if n_values > most_values:
        raise ValueError(f"its JSON holds {n_values:,} values, more than {most_values:,}")
    # Depth: brackets that open minus those that close.
    brackets = np.frombuffer(structure.replace(b",", b""), np.uint8)
    opens = (brackets == ord("[")) | (brackets == ord("{"))
    depth = int(np.where(opens, 1, -1).cumsum().max(initial=0))
    if depth > MOST_DEPTH:
        raise ValueError(f"its JSON is nested {depth:,} deep, more than {MOST_DEPTH}")


def schema_of(path: Path) -> str:
    """Return the schema that a record's file names, such as "attnscope.heads/1"; empty for what is no record.

    Reads no more than it must: of an archive the member `record`, of JSON its beginning.
    """
    try:
        refuse_pipe(path, "a record")
        with reading(path, "record", ""), path.open("rb") as file:
            if zipfile.is_zipfile(file):
                require_room(file, path)
                with np.load(file, allow_pickle=False) as archive:
                    return str(_description(archive["record"])["schema"])
            file.seek(0)
            match = re.match(rb'\s*{\s*"schema":\s*"([\w./-]+)"', file.read(200))
    except AttnscopeError:
        return ""
    return match[1].decode() if match else ""


def require_room(file: typing.IO[bytes], path: Path) -> None:
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


def require_shown(record: Any) -> None:
    """Refuse what a result says of its run and its corpus where it could not be shown.

    Raises:
        ValueError: A value is of another type, or a number of texts is negative.
    """
    # The run: names, notes, and steps that failed.
    run = _mapping(record, "run")
    corpus = _mapping(record, "corpus")
    _require(isinstance(run.get("model", ""), str), "the model of its run")
    _require(isinstance(run.get("versions", {}), Mapping), "the versions of its run")
    for name in ("notes", "kinds"):
        _require(_are_texts(run.get(name, ())), f"the {name} of its run")
    for failure in _entries(run, "failures"):
        _require(_are_texts([failure.get(name) for name in ("step", "error", "hint")]), "a failure of its run")
    # The corpus: sources, problems, and counts.
    for problem in _entries(corpus, "problems"):
        _require({"source", "line", "reason"} <= problem.keys(), "a problem of its corpus")
    _require(_are_texts(corpus.get("sources", ())), "the sources of its corpus")
    for name in ("n_texts", "n_tokens", "n_chunked", "n_copies", "n_not_finite"):
        number = corpus.get(name, 0)
        is_count = isinstance(number, int) and not isinstance(number, bool) and number >= 0
        _require(is_count, f"{name} of its corpus")


def _mapping(record: Any, name: str) -> Mapping[str, Any]:
    """Return what a result says of its run or its corpus; empty where it says nothing."""
    said = getattr(record, name, {})
    _require(isinstance(said, Mapping), f"its {name}")
    return said


def _entries(said: Mapping[str, Any], name: str) -> Sequence[Mapping[str, Any]]:
    """Return a list of mappings under a name; empty where there is none."""
    entries: Sequence[Mapping[str, Any]] = said.get(name, ())
    is_list = isinstance(entries, list | tuple)
    _require(is_list and all(isinstance(entry, Mapping) for entry in entries), f"the {name} of the result")
    return entries


def _are_texts(values: Any) -> bool:
    return isinstance(values, list | tuple) and all(isinstance(value, str) for value in values)


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(f"{what} cannot be shown")
