"""One codec for records of heads: a dataclass as plain values, and back by the types of its class.

A field that its metadata calls `OMITTED` is left out where it holds nothing. `checks` has the metadata that say which
values a field may have.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from typing import Any

OMITTED: dict[str, Any] = {"omit": True}


def describe(record: Any) -> dict[str, Any]:
    """Return all fields of a dataclass in their order, nested ones likewise."""
    described: dict[str, Any] = {}
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        if "omit" in field.metadata and (value is None or not value):
            continue
        described[field.name] = _describe_value(value)
    return described


def _describe_value(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return describe(value)
    if isinstance(value, Mapping):
        return {name: _describe_value(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_describe_value(item) for item in value]
    return value


def build(kind: type[Any], described: Mapping[str, Any]) -> Any:
    """Return the dataclass that `describe` was given.

    Names that the class does not have are passed over; fields that are missing get their default. Numbers that JSON
    has no word for are NaN.

    Args:
        kind: The dataclass.
        described: What describes it.

    Raises:
        KeyError: A field is missing that has no default.
        ValueError, TypeError: A field cannot become what the class says.
    """
    hints = hints_of(kind)
    values = {}
    for field in dataclasses.fields(kind):
        if field.name in described:
            values[field.name] = convert(described[field.name], hints[field.name])
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise KeyError(field.name)
    return kind(**values)


def _without_none(hint: Any) -> Any:
    """Return a type hint without the None that it allows beside."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return next(inner for inner in typing.get_args(hint) if inner is not types.NoneType)
    return hint


def convert(value: Any, hint: Any) -> Any:
    """Return a plain value as what a type hint says; what cannot be stays, for `checks.require_types` to refuse."""
    if (bare := _without_none(hint)) is not hint:
        return value if value is None else convert(value, bare)
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        return build(hint, value)  # type: ignore[arg-type]  # a class
    if hint is float:
        return math.nan if value is None else float(value) if isinstance(value, int) else value
    if origin is tuple and isinstance(value, list | tuple):
        kinds = [inner[0]] * len(value) if inner[-1] is ... else list(inner)
        return tuple(convert(item, kind) for item, kind in zip(value, kinds, strict=True))
    if isinstance(origin, type) and issubclass(origin, Mapping) and isinstance(value, Mapping):
        return {name: convert(item, inner[1]) for name, item in value.items()}
    return value


def hints_of(kind: Any) -> dict[str, Any]:
    """Return the type of each field of a dataclass."""
    if kind not in _hints:
        _hints[kind] = typing.get_type_hints(kind)
    return _hints[kind]


_hints: dict[Any, dict[str, Any]] = {}
