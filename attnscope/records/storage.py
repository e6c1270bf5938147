"""How records are kept in files: whole or not at all, and known by the schema that they name."""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import re
import secrets
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from attnscope.errors import AttnscopeError


def write_whole(path: Path, content: bytes) -> Path:
    """Writes a file whole or not at all: into a temporary file beside it, then renamed.

    Raises:
        AttnscopeError: It cannot be written (no permission, no room, no such folder).
    """
    # Not by tempfile, whose files only their owner may read: what we write is as readable as any other file.
    held = path.parent / f".{secrets.token_hex(8)}.part"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with held.open("xb") as file:
            file.write(content)
        held.replace(path)
    except OSError as error:
        raise AttnscopeError(
            f"cannot write {path}: {error.strerror or error}",
            "choose another folder with --out, or make room there",
        ) from None
    else:
        return path
    finally:
        with contextlib.suppress(OSError):
            held.unlink(missing_ok=True)


def schema_of(path: Path) -> str:
    """The schema that a record's file names, such as "attnscope.heads/1"; empty for what is no record.

    Reads no more than it must: of an archive the member `record`, of JSON its beginning.
    """
    try:
        with path.open("rb") as file:
            if zipfile.is_zipfile(file):
                file.seek(0)
                with np.load(file, allow_pickle=False) as archive:
                    described = archive["record"]
                    text = described.tobytes().decode() if described.dtype == np.uint8 else str(described)
                    return str(json.loads(text)["schema"])
            file.seek(0)
            found = re.match(rb'\s*{\s*"schema":\s*"([\w./-]+)"', file.read(200))
            return found[1].decode() if found else ""
    except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile):
        return ""


def file_of(record: Path) -> Path:
    """The file of a record that is named by its folder; else the path as it is."""
    known = ("heads.npz", "weights.npz", "record.json")
    return next((record / name for name in known if (record / name).is_file()), record)


def view(name: str) -> Any:
    """A function of `attnscope.views`, such as "figures:draw", loaded on first use: records need no drawing library."""
    module, function = name.split(":")
    return getattr(importlib.import_module(f"attnscope.views.{module}"), function)


def _same(number: float) -> float:
    return number


def finite(number: float) -> float | None:
    """The number, or None where it is NaN or infinite: JSON has neither."""
    return number if math.isfinite(number) else None


def plain(value: Any, number: Callable[[float], float | None] = _same) -> Any:
    """The same as plain JSON values, NumPy's numbers and arrays included; `number` says what becomes of a float."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, float):
        return number(value)
    if isinstance(value, Mapping):
        return {str(name): plain(item, number) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, number) for item in value]
    return value
