"""One codec for all records: a dataclass becomes plain values and arrays, and comes back by what its class says.

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
from typing import Any

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
    """How long an axis must be; of a name that the records do not know, as long as it was first."""
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
    """A plain value as what a type hint says; what cannot be stays, for `reading.require_types` to refuse."""
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
