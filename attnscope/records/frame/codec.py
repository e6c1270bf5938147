"""One codec for all records: turns a dataclass into plain values and arrays, and back by the types of its class.

A field is kept as its type says, but for those whose metadata are `ARRAY`, `beside` or `OMITTED`. `shaped` says which
shape an array must have.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

ARRAY = {"array": ""}
"""Metadata of a field whose array is kept beside the description; of a mapping of arrays `beside` has a prefix."""

OMITTED = {"omit": True}
"""Metadata of a field that is left out where it holds nothing."""


def beside(prefix: str) -> dict[str, str]:
    """Metadata of a mapping whose arrays are kept beside the description, each with a prefix before its name."""
    return {"array": prefix}


def shaped(axes: str, **more: Any) -> dict[str, Any]:
    """Metadata of a field that has a shape, or of a sequence that has a length, which `require_shapes` checks.

    Args:
        axes: The axes, such as "layers heads queries 2": a number; a field or property of the record, which is a size
            itself or has a length; or a name of its own, which stands for one size throughout the record.
        more: Further metadata, such as `ARRAY`.
    """
    return {"shape": tuple(axes.split()), **more}


def require_shapes(record: Any, around: Sequence[Any] = ()) -> None:
    """Refuses a record in which an array or a sequence does not have the shape that its field says.

    Args:
        record: A dataclass; what it holds is checked too.
        around: The records that hold it, the nearest first: their fields name sizes as well.

    Raises:
        ValueError: One does not.
    """
    sizes: dict[str, int] = {}
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        if (axes := field.metadata.get("shape")) is not None and value is not None:
            for array in value.values() if isinstance(value, Mapping) else (value,):
                shape = array.shape if isinstance(array, np.ndarray) else (len(array),)
                wanted = tuple(_size(axis, (record, *around), sizes, n) for axis, n in zip_longest(axes, shape))
                if shape != wanted[: len(axes)]:
                    raise ValueError(f"the shape of its {field.name}, {shape}, does not fit {' x '.join(axes)}")
        for part in (value,) if dataclasses.is_dataclass(value) else value if isinstance(value, tuple) else ():
            if dataclasses.is_dataclass(part):
                require_shapes(part, (record, *around))


def _size(axis: str | None, records: Sequence[Any], sizes: dict[str, int], measured: int | None) -> int:
    """The size that an axis must have. A name that the records do not know has the size that it had first."""
    if axis is None or axis.isdecimal():
        return int(axis or -1)
    for record in records:
        if (value := getattr(record, axis, None)) is not None:
            return value if isinstance(value, int) else len(value)
    return sizes.setdefault(axis, -1 if measured is None else measured)


def describe(record: Any) -> dict[str, Any]:
    """All fields of a dataclass but those that are kept as arrays, nested ones likewise, in their order."""
    found = {}
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        left_out = "omit" in field.metadata and not value
        if "array" not in field.metadata and not left_out:
            found[field.name] = _described(value)
    return found


def _described(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return describe(value)
    if isinstance(value, Mapping):
        return {name: _described(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_described(one) for one in value]
    return value


def arrays_of(record: Any) -> dict[str, NDArray[Any]]:
    """The arrays of a dataclass that are kept beside its description, by name."""
    found: dict[str, NDArray[Any]] = {}
    for field in dataclasses.fields(record):
        if (prefix := field.metadata.get("array")) is not None:
            value = getattr(record, field.name)
            named = value if isinstance(value, Mapping) else {field.name: value}
            found |= {f"{prefix}{name}": array for name, array in named.items()}
    return found


def build(kind: type[Any], described: Mapping[str, Any], held: Mapping[str, Any] | None = None, **known: Any) -> Any:
    """The dataclass that `describe` and `arrays_of` were made of.

    Names that the class does not have are passed over; fields that are missing get their default. Numbers that JSON
    has no word for are NaN.

    Args:
        kind: The dataclass.
        described: What describes it.
        held: The arrays beside, by name.
        known: Fields that are made already.

    Raises:
        KeyError: A field is missing that has no default.
        ValueError, TypeError: A field cannot become what the class says.
    """
    given, hints = dict(known), hints_of(kind)
    for field in dataclasses.fields(kind):
        name = field.name
        if name in given:
            continue
        if (prefix := field.metadata.get("array")) is not None:
            given[name] = _array_from(hints[name], name, prefix, held or {})
        elif name in described:
            given[name] = convert(described[name], hints[name])
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise KeyError(name)
    return kind(**given)


def _array_from(hint: Any, name: str, prefix: str, held: Mapping[str, Any]) -> Any:
    if typing.get_origin(hint) is np.ndarray:
        return convert(held[name], hint)
    mine = [key for key in held if key.startswith(prefix)]
    return {key.removeprefix(prefix): held[key] for key in mine}


def convert(value: Any, hint: Any) -> Any:
    """A plain value as what a type hint says; what cannot be stays, for `require_types` to refuse."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return value if value is None else convert(value, next(one for one in inner if one is not types.NoneType))
    if dataclasses.is_dataclass(hint):
        return build(hint, value)  # type: ignore[arg-type]  # a class
    if hint is float:
        return math.nan if value is None else float(value) if isinstance(value, int) else value
    if origin is np.ndarray:
        # JSON's null becomes NaN, and every float32 survives the way through float64. What is too large becomes
        # infinite, which whoever checks the values refuses.
        with np.errstate(over="ignore"):
            return np.array(value, typing.get_args(inner[1])[0]) if inner[1] is not Any else np.asarray(value)
    if origin is tuple and isinstance(value, list | tuple):
        kinds = [inner[0]] * len(value) if inner[-1] is ... else list(inner)
        return tuple(convert(one, kind) for one, kind in zip(value, kinds, strict=True))
    if isinstance(origin, type) and issubclass(origin, Mapping) and isinstance(value, Mapping):
        return {name: convert(one, inner[1]) for name, one in value.items()}
    return value


def hints_of(kind: Any) -> dict[str, Any]:
    """The type of each field of a dataclass."""
    if kind not in _hints:
        _hints[kind] = typing.get_type_hints(kind)
    return _hints[kind]


_hints: dict[Any, dict[str, Any]] = {}


def require_types(record: Any, where: str = "it") -> None:
    """Refuses a record in which a field is not of the type that its class says, in it and in all that it holds.

    Args:
        record: A dataclass.
        where: What to call it.

    Raises:
        ValueError: A field is of another type.
    """
    hints = hints_of(type(record))
    for field in dataclasses.fields(record):
        _require(getattr(record, field.name), hints[field.name], f"{where}.{field.name}")


def require_fields(record: Any) -> None:
    """Refuses a record whose fields are not of the types and shapes that its class says.

    Raises:
        ValueError: A field is not.
    """
    require_types(record)
    require_shapes(record)


_PLAIN: dict[Any, tuple[type, ...]] = {
    str: (str,),
    bool: (bool, np.bool_),
    int: (int, np.integer),
    float: (float, int, np.floating, np.integer),
    types.NoneType: (types.NoneType,),
}
_DTYPES = {np.bool_: "b", np.int64: "iu", np.int32: "iu", np.float32: "f", np.float64: "f"}


def _require(value: Any, hint: Any, where: str) -> None:
    if not _fits(value, hint, where):
        raise ValueError(f"{where} is {show_value(value)}")


def _fits(value: Any, hint: Any, where: str) -> bool:
    """Whether a value is of a type; what lies deeper raises by itself."""
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
        return any(_fits_wholly(value, one, where) for one in inner)
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
        for i, (one, kind) in enumerate(zip(value, kinds, strict=True)):
            _require(one, kind, f"{where}[{i}]")
        return True
    if isinstance(origin, type) and issubclass(origin, Mapping):
        if not isinstance(value, Mapping):
            return False
        for name, one in value.items():
            _require(name, inner[0], f"a name in {where}")
            _require(one, inner[1], f"{where}[{name!r}]")
        return True
    if isinstance(origin, type) and issubclass(origin, Sequence):
        if not isinstance(value, Sequence) or isinstance(value, str):
            return False
        for i, one in enumerate(value):
            _require(one, inner[0], f"{where}[{i}]")
        return True
    return not isinstance(hint, type) or isinstance(value, hint)


def _fits_wholly(value: Any, hint: Any, where: str) -> bool:
    try:
        return _fits(value, hint, where)
    except ValueError:
        return False


def show_value(value: Any) -> str:
    """A value as a message about damage names it."""
    if isinstance(value, np.ndarray):
        return f"an array of {value.dtype}"
    return f"{str(value)[:40]!r}" if isinstance(value, str | int | float | bool) else f"a {type(value).__name__}"
