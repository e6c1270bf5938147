"""Reading records that may be damaged, or made to do harm: sizes before contents.

Each kind of record reads itself through `reading` and `read_record`. `codec.require_fields` checks that its fields are
what its class says; what its own parts must have in common it checks beside.
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
from attnscope.records.frame import codec

MOST_BYTES = 2**30
"""So large may what an archive unpacks to be, or MOST_TIMES its own size if that is more."""
MOST_TIMES = 50
MOST_JSON_BYTES = 2**30
"""So large may a record in JSON be."""
_KINDS = "biufUS"
"""What arrays hold: truth values, whole numbers, floats, texts, bytes."""
MOST_HEADS = 10_000
"""No model has as many layers, nor as many heads in one: numbers beyond are damage."""


@contextlib.contextmanager
def reading(path: Path, what: str, hint: str) -> Iterator[None]:
    """Turns all that a missing or damaged file makes Python, NumPy, zipfile and json raise into one AttnscopeError.

    Of numbers that are too large for what they should be, or none, NumPy says nothing: who checks values refuses them.

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
    """What describes a record, and what the file holds by name; by its content, not by its name.

    Raises:
        ValueError: It is a record of another kind, neither a whole npz archive nor JSON, or too large; other damage
            raises whatever Python's libraries do.
    """
    held, described = read_arrays(path)
    found = described["schema"] if isinstance(described, dict) else None
    if found != schema:
        raise ValueError(f"it holds {found!r}, not {schema!r}")
    return described, held


def read_arrays(path: Path) -> tuple[Mapping[str, Any], Any]:
    """What a file holds by name, and what describes it; see `read_record`.

    The description of JSON is its `record`; where there is none, the whole document.
    """
    arrays = read_archive(path)
    if arrays is not None:
        return arrays, _description(arrays["record"])
    with path.open("rb") as file:
        if path.stat().st_size > MOST_JSON_BYTES:
            raise ValueError(f"it is no archive, and larger than {MOST_JSON_BYTES:,} bytes")
        try:
            held = json.load(file)
        except ValueError:
            raise ValueError("it is neither a whole npz archive nor JSON") from None
    if not isinstance(held, dict):
        raise ValueError("it is no JSON object")
    described = held.get("record")
    if not isinstance(described, dict) or "schema" not in described:
        return held, held
    # What describes a record beside its arrays names the schema too.
    if described["schema"] != held.get("schema", described["schema"]):
        raise ValueError(f"it names two schemas, {held['schema']!r} and {described['schema']!r}")
    return held, described


def read_archive(path: Path) -> dict[str, NDArray[Any]] | None:
    """The arrays of an npz archive, by name; None where the file is no archive."""
    with path.open("rb") as file:
        if not zipfile.is_zipfile(file):
            return None
        require_room(file, path)
        with np.load(file, allow_pickle=False) as archive:
            found = {name: archive[name] for name in archive.files}
    for name, array in found.items():
        if array.dtype.kind not in _KINDS:
            raise ValueError(f"its {name} is of {array.dtype}, which is in no record")
    return found


def described_by(path: Path) -> Mapping[str, Any]:
    """What a record says of itself; empty for what is no record."""
    try:
        with reading(path, "record", ""):
            described = read_arrays(path)[1]
    except AttnscopeError:
        return {}
    return described if isinstance(described, Mapping) else {}


def _description(held: NDArray[Any]) -> Any:
    return json.loads(held.tobytes() if held.dtype == np.uint8 else str(held))


def schema_of(path: Path) -> str:
    """The schema that a record's file names, such as "attnscope.heads/1"; empty for what is no record.

    Reads no more than it must: of an archive the member `record`, of JSON its beginning.
    """
    try:
        with reading(path, "record", ""), path.open("rb") as file:
            if zipfile.is_zipfile(file):
                require_room(file, path)
                with np.load(file, allow_pickle=False) as archive:
                    return str(_description(archive["record"])["schema"])
            file.seek(0)
            found = re.match(rb'\s*{\s*"schema":\s*"([\w./-]+)"', file.read(200))
    except AttnscopeError:
        return ""
    return found[1].decode() if found else ""


def require_room(file: typing.IO[bytes], path: Path) -> None:
    """Refuses an archive that would unpack to far more than it is, before anything of it is unpacked."""
    with zipfile.ZipFile(file) as archive:
        names = [info.filename for info in archive.infolist()]
        size = sum(info.file_size for info in archive.infolist())
    if len(set(names)) < len(names):
        raise ValueError("two of its members have one name")
    most = max(MOST_BYTES, MOST_TIMES * path.stat().st_size)
    if size > most:
        raise ValueError(f"it would unpack to {size:,} bytes, more than {most:,}")
    file.seek(0)


def require_places(layers: Sequence[int], heads: Sequence[int]) -> None:
    """Refuses numbers of layers and heads that no model has: tables are made as large as they say.

    Raises:
        ValueError: One is negative, or too large.
    """
    for what, numbers in (("layer", layers), ("head", heads)):
        for number in numbers:
            if not 0 <= number < MOST_HEADS:
                raise ValueError(f"there is no {what} {number}")


def require_run(run: Mapping[str, Any]) -> None:
    """Refuses what a record says of how it was made where it could not be shown.

    Raises:
        ValueError: The model has no name, or the notes are no texts, or a failure does not say what failed, or its
            kinds of attention have no names.
    """
    if not isinstance(run.get("model", ""), str):
        raise ValueError("its model has no name")
    notes = run.get("notes", ())
    if not isinstance(notes, list | tuple) or not all(isinstance(note, str) for note in notes):
        raise ValueError("its notes are no texts")
    failures = run.get("failures", ())
    if not isinstance(failures, list | tuple):
        raise ValueError("its failures are no list")
    for failure in failures:
        if not isinstance(failure, Mapping) or not all(
            isinstance(failure.get(name), str) for name in ("step", "error", "hint")
        ):
            raise ValueError("one of its failures does not say what failed, and why")
    if not isinstance(run.get("versions", {}), Mapping):
        raise ValueError("its versions have no names")
    kinds = run.get("kinds", ())
    if not isinstance(kinds, list | tuple) or not all(isinstance(kind, str) for kind in kinds):
        raise ValueError("its kinds of attention have no names")


def require_corpus(corpus: Mapping[str, Any]) -> None:
    """Refuses what a record says of its corpus where numbers are none, or problems do not say where they are.

    Raises:
        ValueError: They are not, or do not.
    """
    for name in ("n_texts", "n_tokens", "n_chunked", "n_copies", "n_not_finite"):
        number = corpus.get(name, 0)
        if not isinstance(number, int) or isinstance(number, bool) or number < 0:
            raise ValueError(f"{name} is {codec.show_value(number)}")
    sources = corpus.get("sources", ())
    if not isinstance(sources, list | tuple) or not all(isinstance(source, str) for source in sources):
        raise ValueError("its sources have no names")
    for problem in corpus.get("problems", ()):
        if not isinstance(problem, Mapping) or not {"source", "line", "reason"} <= set(problem):
            raise ValueError("one of its problems does not say where it is")


def require_weights(weights: Any) -> None:
    """Refuses attention weights, (..., query, key), whose rows hold more than there is; NaN and empty rows may be.

    Raises:
        ValueError: A weight is negative, or a row sums to more than 1.
    """
    if np.any(weights < 0) or np.any(np.isinf(weights)):
        raise ValueError("its weights are not between 0 and 1")
    # Rounding, in 16 bits too, stays far below the bound.
    if weights.size and np.nansum(weights, -1).max() > 1.1:
        raise ValueError("its weights sum to more than 1 in a row")
