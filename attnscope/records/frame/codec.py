"""One codec for all records: turns a dataclass into plain values and arrays, and back by the types of its class.

A field is kept as its type says, unless its metadata say otherwise:

- `ARRAY`: its array stands beside the description. `beside(name)`: it does so under another name; a mapping of arrays
  does with a prefix before each of its names.
- `parts(prefix)`: it is a dataclass, or several, with arrays of their own beside the description.
- `FLAT`: it is a dataclass whose fields stand among those of its holder.
- `coded(write, read)`: it is described in another form.
- `OMITTED`: it is left out where it holds nothing.
- `APART`: its class keeps it by itself.
- `"key": name`: it has another name there.

A class names further properties to describe in `TOLD`: readers of JSON get them, `build` passes them over. `checks` has
the metadata that say which values a field may have.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

ARRAY: dict[str, Any] = {"array": None}
OMITTED: dict[str, Any] = {"omit": True}
FLAT: dict[str, Any] = {"flat": True}
APART: dict[str, Any] = {"apart": True}


def beside(name: str) -> dict[str, Any]:
    """Metadata of an array that has another name beside the description, or of a mapping of arrays: their prefix."""
    return {"array": name}


def parts(prefix: Callable[[Mapping[str, Any], int], str]) -> dict[str, Any]:
    """Metadata of a dataclass, or a tuple of them, with arrays of their own.

    Args:
        prefix: What their names begin with, by the description of the part and its number.
    """
    return {"parts": prefix}


def coded(write: Callable[[Any], Any], read: Callable[[Any], Any]) -> dict[str, Any]:
    """Metadata of a field that is described as what `write` makes of it; `read` turns that back."""
    return {"coded": (write, read)}


def describe(record: Any) -> dict[str, Any]:
    """All fields of a dataclass but those that are kept as arrays, nested ones likewise, in their order."""
    described: dict[str, Any] = {}
    for field in dataclasses.fields(record):
        value, how = getattr(record, field.name), field.metadata
        if "array" in how or "apart" in how or ("omit" in how and _is_nothing(value)):
            continue
        if "flat" in how:
            described |= {} if value is None else describe(value)
        else:
            described[_key(field)] = _describe_value(how["coded"][0](value) if "coded" in how else value)
    return described | {name: _describe_value(getattr(record, name)) for name in getattr(record, "TOLD", ())}


def _key(field: dataclasses.Field[Any]) -> str:
    key: str = field.metadata.get("key", field.name)
    return key


def _is_nothing(value: Any) -> bool:
    return value is None or (not isinstance(value, np.ndarray) and not value)


def _describe_value(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return describe(value)
    if isinstance(value, Mapping):
        return {name: _describe_value(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_describe_value(item) for item in value]
    return value


def arrays_of(record: Any) -> dict[str, NDArray[Any]]:
    """The arrays of a dataclass that are kept beside its description, by name; those of its parts too."""
    arrays: dict[str, NDArray[Any]] = {}
    for field in dataclasses.fields(record):
        value, how = getattr(record, field.name), field.metadata
        if value is None:
            continue
        if "array" in how and isinstance(value, Mapping):
            arrays |= {f"{how['array'] or ''}{name}": np.asarray(array) for name, array in value.items()}
        elif "array" in how:
            arrays[_array_name(field)] = value
        elif "flat" in how:
            arrays |= arrays_of(value)
        elif "parts" in how:
            for number, part in enumerate(value if isinstance(value, tuple) else (value,)):
                prefix = how["parts"](describe(part), number)
                arrays |= {f"{prefix}{name}": array for name, array in arrays_of(part).items()}
    return arrays


def _array_name(field: dataclasses.Field[Any]) -> str:
    name: str | None = field.metadata["array"]
    return field.name if name is None else name


def build(kind: type[Any], described: Mapping[str, Any], arrays: Mapping[str, Any] = {}, **known: Any) -> Any:
    """The dataclass that `describe` and `arrays_of` were made of.

    Names that the class does not have are passed over; fields that are missing get their default. Numbers that JSON
    has no word for are NaN.

    Args:
        kind: The dataclass.
        described: What describes it.
        arrays: The arrays beside, by name.
        known: Fields that are made already.

    Raises:
        KeyError: A field is missing that has no default.
        ValueError, TypeError: A field cannot become what the class says.
    """
    values, hints = dict(known), hints_of(kind)
    for field in dataclasses.fields(kind):
        if field.name not in values:
            value = _read_field(field, hints[field.name], described, arrays)
            if value is not dataclasses.MISSING:
                values[field.name] = value
            elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
                raise KeyError(field.name)
    return kind(**values)


def _read_field(
    field: dataclasses.Field[Any], hint: Any, described: Mapping[str, Any], arrays: Mapping[str, Any]
) -> Any:
    """A field as a description and arrays have it; MISSING where they do not."""
    how, bare = field.metadata, _without_none(hint)
    if "array" in how:
        if typing.get_origin(bare) is not np.ndarray:
            return strip(arrays, how["array"] or "")
        absent = dataclasses.MISSING if bare is hint else None
        name = _array_name(field)
        return convert(arrays[name], bare) if name in arrays else absent
    if "flat" in how:
        return None if hints_of(bare).keys().isdisjoint(described) else build(bare, described, arrays)
    if _key(field) not in described:
        return dataclasses.MISSING
    value = described[_key(field)]
    if "coded" in how:
        return how["coded"][1](value)
    if "parts" not in how or value is None:
        return convert(value, hint)
    if dataclasses.is_dataclass(bare):
        return build(bare, value, strip(arrays, how["parts"](value, 0)))  # type: ignore[arg-type]  # a class
    part = typing.get_args(bare)[0]
    return tuple(build(part, entry, strip(arrays, how["parts"](entry, at))) for at, entry in enumerate(value))


def _without_none(hint: Any) -> Any:
    """A type hint without the None that it allows beside."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return next(inner for inner in typing.get_args(hint) if inner is not types.NoneType)
    return hint


def strip(arrays: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """The arrays whose names begin with a prefix, by the rest of their names."""
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}


def convert(value: Any, hint: Any) -> Any:
    """A plain value as what a type hint says; what cannot be stays, for `checks.require_types` to refuse.

    Raises:
        ValueError: It holds numbers that the array's type does not.
    """
    if (bare := _without_none(hint)) is not hint:
        return value if value is None else convert(value, bare)
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        return build(hint, value)  # type: ignore[arg-type]  # a class
    if hint is float:
        return math.nan if value is None else float(value) if isinstance(value, int) else value
    if origin is np.ndarray:
        return _convert_array(value, Any if inner[1] is Any else typing.get_args(inner[1])[0])
    if origin is tuple and isinstance(value, list | tuple):
        kinds = [inner[0]] * len(value) if inner[-1] is ... else list(inner)
        return tuple(convert(item, kind) for item, kind in zip(value, kinds, strict=True))
    if isinstance(origin, type) and issubclass(origin, Mapping) and isinstance(value, Mapping):
        return {name: convert(item, inner[1]) for name, item in value.items()}
    return value


def _convert_array(value: Any, dtype: Any) -> NDArray[Any]:
    if dtype is Any:
        return np.asarray(value)
    # JSON's null becomes NaN, and every float32 survives the way through float64. What is too large becomes infinite,
    # which checks of values refuse.
    with np.errstate(over="ignore", invalid="ignore"):
        array = np.array(value, dtype)
        if array.dtype.kind in "iu" and np.asarray(value).dtype.kind in "iuf" and not np.array_equal(array, value):
            raise ValueError(f"an array of {array.dtype} holds other numbers")
    return array


def hints_of(kind: Any) -> dict[str, Any]:
    """The type of each field of a dataclass."""
    if kind not in _hints:
        _hints[kind] = typing.get_type_hints(kind)
    return _hints[kind]


_hints: dict[Any, dict[str, Any]] = {}
