"""Which values the fields of a record may have: of their types, and as their metadata say.

- `shaped(axes)`: the shape of an array, or the length of a sequence.
- `"range": (least, most)`: its numbers lie between these, with `SLACK` for rounding, or are NaN. With None for `most`
  all finite ones from `least` on do.
- `"index": axis`: its whole numbers count things from 0, so they are smaller than the size of that axis; `"least": -1`
  allows -1 for none.
- `"distinct": name`: no two of its members have the same attribute of that name; empty = no two are the same.
- `"choices"`: the values it may have.
- `"filled"`: it is not empty.
- `"weights"`: its rows are attention weights.

What a class cannot say so, its method `require_whole` checks.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any, Literal

import numpy as np

from attnscope.records.frame.codec import hints_of

SLACK = 0.01
"""So far beyond its range may rounding carry a number."""

MOST_HEADS = 10_000
"""No model has as many layers, nor as many heads in one: numbers beyond are damage."""

NUMBER: dict[str, Any] = {"range": (0, MOST_HEADS - 1)}
"""Metadata of the number of a layer or head: tables are made as large as it says."""

SHARE: dict[str, Any] = {"range": (0, 1)}


def shaped(axes: str, **more: Any) -> dict[str, Any]:
    """Metadata of a field that has a shape, or of a sequence that has a length.

    Args:
        axes: The axes, such as "layers heads queries 2": a number; a field or property of the record or of one that
            holds it, which is a size itself or has a length; or a name of its own, which stands for one size
            throughout the record.
        more: Further metadata, such as `ARRAY`.
    """
    return {"shape": tuple(axes.split()), **more}


def require_whole(record: Any) -> None:
    """Refuses a record that is not what its class says, in it or in what it holds.

    Raises:
        ValueError: A field is not of its type, not as its metadata say, or `require_whole` of a class refuses it.
    """
    require_types(record)
    _require_metadata(record, ())


def _require_metadata(record: Any, holders: Sequence[Any]) -> None:
    """Checks a dataclass whose fields are of their types; `holders` hold it, the nearest first, and name sizes too."""
    sizes: dict[str, int] = {}
    records = (record, *holders)
    for field in dataclasses.fields(record):
        value, rules = getattr(record, field.name), field.metadata
        if value is None:
            continue
        for item in (value.values() if isinstance(value, Mapping) else (value,)) if rules else ():
            _require_value(field.name, item, rules, records, sizes)
        for part in (value,) if dataclasses.is_dataclass(value) else value if isinstance(value, tuple) else ():
            if dataclasses.is_dataclass(part):
                _require_metadata(part, records)
    if hasattr(record, "require_whole"):
        record.require_whole()


def _require_value(
    name: str, value: Any, rules: Mapping[str, Any], records: Sequence[Any], sizes: dict[str, int]
) -> None:
    if "shape" in rules:
        axes, shape = rules["shape"], value.shape if isinstance(value, np.ndarray) else (len(value),)
        wanted = tuple(_size(axis, records, sizes, n) for axis, n in zip_longest(axes, shape))
        if shape != wanted[: len(axes)]:
            raise ValueError(f"the shape of its {name}, {shape}, does not fit {' x '.join(axes)}")
    if "filled" in rules and not np.size(value):
        raise ValueError(f"its {name} are empty")
    if "range" in rules:
        least, most = rules["range"]
        beyond = np.isinf(value) if most is None else np.greater(value, most + SLACK)
        if np.any(beyond) or np.any(np.less(value, least - SLACK)):
            bounds = f"{least} or more" if most is None else f"between {least} and {most}"
            raise ValueError(f"a number of its {name} is not {bounds}")
    if "index" in rules:
        numbers, size = np.asarray(value, np.int64), _size(rules["index"], records, sizes, None)
        if numbers.size and not rules.get("least", 0) <= numbers.min() <= numbers.max() < size:
            raise ValueError(f"a number of its {name} is not between {rules.get('least', 0)} and {size - 1}")
    if "distinct" in rules:
        members = [getattr(member, rules["distinct"]) if rules["distinct"] else member for member in value]
        if len({*members}) < len(members):
            raise ValueError(f"two of its {name} are the same")
    if "choices" in rules and value not in rules["choices"]:
        raise ValueError(f"its {name} is {show_value(value)}, not one of {', '.join(rules['choices'])}")
    if "weights" in rules:
        _require_weights(name, value)


def _size(axis: str | None, records: Sequence[Any], sizes: dict[str, int], measured: int | None) -> int:
    """The size that an axis must have. A name that the records do not know has the size that it had first."""
    if axis is None or axis.isdecimal():
        return int(axis or -1)
    for record in records:
        if (value := getattr(record, axis, None)) is not None:
            return value if isinstance(value, int) else len(value)
    return sizes.setdefault(axis, -1 if measured is None else measured)


def _require_weights(name: str, weights: Any) -> None:
    """Refuses attention weights, (..., query, key), whose rows hold more than there is; NaN and empty rows may be."""
    # Rounding, in 16 bits too, stays far below the upper bounds.
    if np.any(weights < 0) or np.any(weights > 1.1):
        raise ValueError(f"its {name} are not between 0 and 1")
    if weights.size and np.nansum(weights, -1).max() > 1.1:
        raise ValueError(f"its {name} sum to more than 1 in a row")


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
        require_type(getattr(record, field.name), hints[field.name], f"{where}.{field.name}")


def require_type(value: Any, hint: Any, where: str) -> None:
    """Refuses a value that is not of a type, itself or in what it holds.

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
    """A value as a message about damage names it."""
    if isinstance(value, np.ndarray):
        return f"an array of {value.dtype}"
    return f"{str(value)[:40]!r}" if isinstance(value, str | int | float | bool) else f"a {type(value).__name__}"
