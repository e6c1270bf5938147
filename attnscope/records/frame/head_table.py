"""One table of heads: every number that a record has per head, with its name, unit, range and interval. NumPy only.

Conditions, orders and files of tables read this table and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Head = tuple[str, int, int]
"""Kind of attention, layer, head."""


@dataclass(frozen=True, eq=False)
class Column:
    """What a record says of every head under one name.

    Attributes:
        name: Its name in files and conditions.
        values: Per head: float64, NaN where unknown; or words, flags or lists of words.
        parts: What stands beside each value, by the ending of its name in files: "low" and "high" are the ends of a 95%
            interval, "uniform" is the baseline, "count" is over how many queries, texts or predictions.
        what: Its definition in a few words; may be empty.
        unit: Such as "nats" or "share"; empty for plain numbers.
        range: Its least and largest possible value; None where there is no bound.
        names: Names in conditions, where these are not the one in files.
        in_files: Whether files have it.
        kind: What it is: "measure", "effect", "role" (1 or 0, so that conditions may name it alone), or empty.
        label: What views call it; empty = its name with blanks.
    """

    name: str
    values: Floats | Sequence[Any]
    parts: Mapping[str, Floats] = field(default_factory=dict)
    what: str = ""
    unit: str = ""
    range: tuple[float | None, float | None] = (None, None)
    names: tuple[str, ...] = ()
    in_files: bool = True
    kind: str = ""
    label: str = ""

    @property
    def is_number(self) -> bool:
        """Whether it has a number per head, so that conditions and orders can use it."""
        return isinstance(self.values, np.ndarray)


def number_column(
    name: str, estimates: Iterable[Any], parts: Sequence[str] = ("low", "high", "uniform", "count"), **facts: Any
) -> Column:
    """A column of estimates with their intervals.

    Args:
        name: Its name.
        estimates: Per head an object with `value` and each of the parts; None where nothing is known.
        parts: What stands beside the value.
        facts: Further fields of `Column`.
    """
    estimates = list(estimates)
    return Column(name, read_numbers(estimates, "value"), {p: read_numbers(estimates, p) for p in parts}, **facts)


def read_numbers(objects: Iterable[Any], part: str) -> Floats:
    """An attribute of each object as a number; NaN where there is no object."""
    return np.array([math.nan if each is None else float(getattr(each, part)) for each in objects], np.float64)


@dataclass(frozen=True, eq=False)
class HeadTable:
    """What a record says of its heads: its columns, in the order of files."""

    heads: tuple[Head, ...]
    columns: tuple[Column, ...]

    def numbers(self) -> dict[str, Floats]:
        """The values of every column of numbers, by each name that conditions use, layer and head among them."""
        named: dict[str, Floats] = {
            "layer": np.array([layer for _, layer, _ in self.heads], np.float64),
            "head": np.array([head for _, _, head in self.heads], np.float64),
        }
        for column in self.columns:
            if isinstance(column.values, np.ndarray):
                named |= dict.fromkeys(column.names or (column.name,), column.values)
        return named

    def grid(self, kind: str, name: str) -> Floats:
        """The values of a column for one kind of attention, (layer, head); NaN where there is no such head."""
        rows = [row for row, (of, *_) in enumerate(self.heads) if of == kind]
        layers, heads = [self.heads[row][1] for row in rows], [self.heads[row][2] for row in rows]
        grid = np.full((max(layers, default=-1) + 1, max(heads, default=-1) + 1), np.nan)
        if (values := self.numbers().get(name)) is not None:
            grid[layers, heads] = values[rows]
        return grid

    def flat(self) -> dict[str, list[Any]]:
        """The columns of a file, by name: kind, layer and head, then each value and what stands beside it."""
        kinds, layers, heads = zip(*self.heads, strict=True) if self.heads else ((), (), ())
        flat: dict[str, list[Any]] = {"kind": [*kinds], "layer": [*layers], "head": [*heads]}
        for column in self.columns:
            if column.in_files:
                flat[column.name] = _listed(column.values)
                flat |= {f"{column.name}_{part}": _listed(values) for part, values in column.parts.items()}
        return flat

    def rows(self) -> Iterator[Sequence[Any]]:
        """The rows of a file, its header first."""
        flat = self.flat()
        yield tuple(flat)
        yield from zip(*flat.values(), strict=True)


def _listed(values: Floats | Sequence[Any]) -> list[Any]:
    return values.tolist() if isinstance(values, np.ndarray) else list(values)
