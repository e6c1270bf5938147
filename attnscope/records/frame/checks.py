"""Which values the fields of a record of heads may have: of their types, and as their metadata say.

- `"range": (least, most)`: its numbers lie between these, with `SLACK` for rounding, or are NaN.
- `"distinct": name`: no two of its members have the same attribute of that name.

What a class cannot say so, its method `require_whole` checks.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from attnscope.records.frame.codec import hints_of
from attnscope.results.table import MOST_HEADS, SLACK

NUMBER: dict[str, Any] = {"range": (0, MOST_HEADS - 1)}
"""Metadata of the number of a layer or head: tables are made as large as it says."""


def require_whole(record: Any) -> None:
    """Refuse a record that is not what its class says, in it or in what it holds.

    Raises:
        ValueError: A field is not of its type, not as its metadata say, or `require_whole` of a class refuses it.
    """
    require_types(record)
    _require_metadata(record)


def _require_metadata(record: Any) -> None:
    """Check a dataclass whose fields are of their types, and the dataclasses in it."""
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        if value is None:
            continue
        _require_value(field.name, value, field.metadata)
        parts = value if isinstance(value, tuple) else (value,)
        for part in parts:
            if dataclasses.is_dataclass(part):
                _require_metadata(part)
    if hasattr(record, "require_whole"):
        record.require_whole()


def _require_value(name: str, value: Any, rules: Mapping[str, Any]) -> None:
    """Refuse a value that breaks one of the rules."""
    if "range" in rules:
        least, most = rules["range"]
        if np.any(np.greater(value, most + SLACK)) or np.any(np.less(value, least - SLACK)):
            raise ValueError(f"a number of its {name} is not between {least} and {most}")
    if "distinct" in rules:
        members = [getattr(member, rules["distinct"]) for member in value]
        if len({*members}) < len(members):
            raise ValueError(f"two of its {name} are the same")


def require_types(record: Any, where: str = "it") -> None:
    """Refuse a record in which a field is not of the type that its class says, in it and in all that it holds.

    Args:
        record: A dataclass.
        where: What to call it.

    Raises:
        ValueError: A field is of another type.
    """
    hints = hints_of(type(record))
    for field in dataclasses.fields(record):
        require_type(getattr(record, field.name), hints[field.name], f"{where}.{field.name}")


def require_type(value: Any, hint: Any, where: str) -> None:
    """Refuse a value that is not of a type, itself or in what it holds.

    Raises:
        ValueError: It is not.
    """
    if not _fits(value, hint, where):
        raise ValueError(f"{where} is {show_value(value)}")


_PLAIN: dict[Any, tuple[type, ...]] = {
    str: (str,),
    bool: (bool, np.bool_),
    int: (int, np.integer),
    float: (float, int, np.floating, np.integer),
    types.NoneType: (types.NoneType,),
}
_DTYPES = {np.bool_: "b", np.int64: "iu", np.int32: "iu", np.float32: "f", np.float64: "f"}


def _fits(value: Any, hint: Any, where: str) -> bool:
    """Return whether a value is of a type; what lies deeper raises by itself."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return True
    if hint in _PLAIN:
        return isinstance(value, _PLAIN[hint]) and (hint is bool or not isinstance(value, bool))
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, hint):  # type: ignore[arg-type]  # a class
            return False
        require_types(value, where)
        return True
    if origin in (typing.Union, types.UnionType):
        return any(_fits_wholly(value, kind, where) for kind in inner)
    if origin is Literal:
        return value in inner
    if origin is np.ndarray:
        wanted = typing.get_args(inner[1])[0]
        return isinstance(value, np.ndarray) and value.dtype.kind in _DTYPES.get(wanted, "biufU")
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        kinds = [inner[0]] * len(value) if inner[-1] is ... else list(inner)
        if len(kinds) != len(value):
            return False
        for at, (item, kind) in enumerate(zip(value, kinds, strict=True)):
            require_type(item, kind, f"{where}[{at}]")
        return True
    if isinstance(origin, type) and issubclass(origin, Mapping):
        if not isinstance(value, Mapping):
            return False
        for name, item in value.items():
            require_type(name, inner[0], f"a name in {where}")
            require_type(item, inner[1], f"{where}[{name!r}]")
        return True
    if isinstance(origin, type) and issubclass(origin, Sequence):
        if not isinstance(value, Sequence) or isinstance(value, str):
            return False
        for at, item in enumerate(value):
            require_type(item, inner[0], f"{where}[{at}]")
        return True
    return not isinstance(hint, type) or isinstance(value, hint)


def _fits_wholly(value: Any, hint: Any, where: str) -> bool:
    try:
        return _fits(value, hint, where)
    except ValueError:
        return False


def show_value(value: Any) -> str:
    """Return a value as a message about damage names it."""
    if isinstance(value, np.ndarray):
        return f"an array of {value.dtype}"
    return f"{str(value)[:40]!r}" if isinstance(value, str | int | float | bool) else f"a {type(value).__name__}"
