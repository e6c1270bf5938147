"""Declare columns of numbers and texts with their meaning, unit and range, and hold them as tables. NumPy only.

A column of numbers, such as `effect`, may have further arrays beside it, `effect_low` and `effect_high`: its name with
an ending from `PARTS`. Every question declares its columns with the functions here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from attnscope.errors import AttnscopeError

Floats = NDArray[np.float64]
ColumnKind = Literal["number", "count", "text", "flag"]

PARTS = ("low", "high", "baseline", "count")
"""Endings of the arrays beside a number: both ends of its 95% interval, its baseline, and how many values it is of."""

DTYPES: Mapping[ColumnKind, Any] = {
    "number": np.float64,
    "count": np.int64,
    "text": np.str_,
    "flag": np.bool_,
}
"""The NumPy type of each kind of column when a table is made."""

_DTYPE_LETTERS: Mapping[ColumnKind, str] = {"number": "f", "count": "iu", "text": "U", "flag": "b"}
"""The types that a file may have instead, as letters of `dtype.kind`."""

_SLACK = 0.01
"""How far rounding may carry a number beyond its range."""


@dataclass(frozen=True)
class Column:
    """The declaration of a column: its name, meaning, unit and range.

    Attributes:
        name: Its name in Python and in files.
        meaning: A sentence on what its values are.
        unit: Such as "nats" or "share"; empty for plain numbers.
        range: Its smallest and its largest possible value; None where there is no bound.
        label: Its name for people; empty = `name` with blanks.
        short: The same in a few letters, for the head of a narrow column; empty = the label.
        kind: "number" (NaN = unknown), "count" (whole numbers), "text" or "flag" (true or false).
        refers_to: The table whose rows its whole numbers are, from 0; -1 = no row.
    """

    name: str
    meaning: str = ""
    unit: str = ""
    range: tuple[float | None, float | None] = (None, None)
    label: str = ""
    short: str = ""
    kind: ColumnKind = "number"
    refers_to: str = ""

    @classmethod
    def rebuild(cls, described: Mapping[str, Any]) -> Column:
        """Return the column that `dataclasses.asdict` made `described` of.

        Raises:
            ValueError: It is damaged.
        """
        # JSON has a list where the range is a tuple.
        low, high = described["range"]
        column = cls(**{**described, "range": (low, high)})
        # Every field is a text, but for the range: two numbers or None.
        texts = {**described, "range": ""}.values()
        are_bounds = isinstance(low, int | float | None) and isinstance(high, int | float | None)
        if not are_bounds or column.kind not in DTYPES or not all(isinstance(t, str) for t in texts):
            raise ValueError(f"a column is no column: {str(described)[:60]}")
        return column

    @property
    def title(self) -> str:
        """Return its name for people."""
        return self.label or self.name.replace("_", " ")

    @property
    def head(self) -> str:
        """Return its name for people in a few letters."""
        return self.short or self.title


@dataclass(frozen=True)
class Array(Column):
    """The declaration of an array along the rows of tables.

    Attributes:
        axes: A name for each axis. That of a table means a value for each of its rows; digits, such as "3", mean that
            size; any other name means the same size wherever it stands in the result.
    """

    axes: tuple[str, ...] = field(default=(), kw_only=True)


def number(name: str, meaning: str = "", unit: str = "", **more: Any) -> Column:
    """Declare a column of numbers; see `Column`."""
    return Column(name, meaning, unit, **more)


def share(name: str, meaning: str = "", **more: Any) -> Column:
    """Declare a column of numbers from 0 to 1."""
    return Column(name, meaning, "share", (0, 1), **more)


def count(name: str, meaning: str = "", **more: Any) -> Column:
    """Declare a column of whole numbers."""
    return Column(name, meaning, kind="count", **more)


def text(name: str, meaning: str = "", **more: Any) -> Column:
    """Declare a column of texts."""
    return Column(name, meaning, kind="text", **more)


def flag(name: str, meaning: str = "", **more: Any) -> Column:
    """Declare a column of truth values."""
    return Column(name, meaning, kind="flag", **more)


MOST_HEADS = 10_000
"""More layers, and more heads in a layer, than any model has: a file with larger numbers is damaged."""

HEADS = (
    text("kind", "kind of attention: encoder, decoder or cross"),
    count("layer", "its layer, from 0", range=(0, MOST_HEADS - 1)),
    count("head", "its number in the layer, from 0", range=(0, MOST_HEADS - 1)),
)
"""The columns with which every table of heads begins."""


@dataclass(frozen=True)
class Estimate:
    """A cell of `Table.of`: a number, with its interval, its baseline and its count where they are known."""

    value: float
    low: float | None = None
    high: float | None = None
    baseline: float | None = None
    count: float | None = None


@dataclass(frozen=True, eq=False)
class Table:
    """Columns of equal length.

    Attributes:
        columns: The declarations by name, in the order of the columns.
        values: The values by name, (row,): of each column, and of each array beside it, such as `effect_low`.
    """

    columns: Mapping[str, Column]
    values: Mapping[str, NDArray[Any]]

    @classmethod
    def of(cls, columns: Sequence[Column], rows: Sequence[Mapping[str, Any]]) -> Table:
        """Make a table of rows.

        Args:
            columns: The declarations.
            rows: Cells by column. In a column of numbers, None or no cell = unknown, and a cell may be an object with
                `value` and some of `PARTS`, such as an `Estimate`.
        """
        values: dict[str, NDArray[Any]] = {}
        for column in columns:
            cells = [row.get(column.name) for row in rows]
            if column.kind != "number":
                values[column.name] = np.array(cells, DTYPES[column.kind])
                continue
            # Each cell is a number, an object with `value`, or None, which becomes NaN.
            values[column.name] = np.array([getattr(cell, "value", cell) for cell in cells], np.float64)
            for part in PARTS:
                beside = [getattr(cell, part, None) for cell in cells]
                if beside.count(None) < len(beside):
                    values[f"{column.name}_{part}"] = np.array(beside, np.float64)
        return cls({column.name: column for column in columns}, values)

    @classmethod
    def of_arrays(cls, columns: Sequence[Column], /, **values: Any) -> Table:
        """Make a table of arrays by name: of columns, and of what is beside them, such as `effect_low`."""
        # Arrays beside a column have no declaration: they are numbers.
        known = {column.name: column for column in columns}
        arrays = {}
        for name, cells in values.items():
            column = known.get(name)
            dtype = np.float64 if column is None else DTYPES[column.kind]
            arrays[name] = np.asarray(cells, dtype)
        return cls(known, arrays)

    @classmethod
    def of_rows(cls, columns: Sequence[Column], rows: Sequence[Sequence[Any]]) -> Table:
        """Make a table of rows that have a value for each column, in their order."""
        names = [column.name for column in columns]
        return cls.of(columns, [dict(zip(names, row, strict=True)) for row in rows])

    def __len__(self) -> int:
        return len(next(iter(self.values.values()), ()))

    def __getitem__(self, name: str) -> NDArray[Any]:
        """Return the values of a column, (row,)."""
        return self.values[name]

    def __contains__(self, name: str) -> bool:
        return name in self.values

    def __repr__(self) -> str:
        return f"Table({len(self)} rows: {', '.join(self.columns)})"

    def part(self, name: str, part: str) -> Floats:
        """Return the array beside a column, (row,); NaN if there is none.

        Args:
            name: The column.
            part: One of `PARTS`.
        """
        return self.values.get(f"{name}_{part}", np.full(len(self), math.nan))

    def interval(self, name: str) -> Floats:
        """Return the value, and the low and high end of its 95% interval, of each row, (row, 3); NaN = unknown."""
        return np.stack([self[name], self.part(name, "low"), self.part(name, "high")], -1)

    @property
    def numbers(self) -> tuple[str, ...]:
        """Return the names of the columns of numbers, in their order."""
        return tuple(name for name, column in self.columns.items() if column.kind == "number")

    def select(self, rows: Any) -> Table:
        """Return a table of some rows, by a mask or by their indices in the order that they are to have."""
        return Table(self.columns, {name: values[rows] for name, values in self.values.items()})

    def with_column(self, column: Column, values: Any, **parts: Any) -> Table:
        """Return the table with a further column at its end; `parts` are the arrays beside it, by names in `PARTS`."""
        arrays = {**self.values, column.name: np.asarray(values, DTYPES[column.kind])}
        for part, numbers in parts.items():
            arrays[f"{column.name}_{part}"] = np.asarray(numbers, np.float64)
        return Table({**self.columns, column.name: column}, arrays)

    @classmethod
    def stack(cls, tables: Sequence[Table]) -> Table:
        """Return the rows of several tables below each other, with the columns of all of them.

        Numbers that a table lacks are NaN. No table may lack a column of another kind.
        """
        # Names in the order in which they first stand in any table.
        columns: dict[str, Column] = {}
        names: dict[str, None] = {}
        for table in tables:
            columns |= table.columns
            names |= dict.fromkeys(table.values)
        values = {}
        for name in names:
            parts = [table.values.get(name, np.full(len(table), math.nan)) for table in tables]
            values[name] = np.concatenate(parts)
        return cls(columns, values)

    @property
    def places(self) -> list[tuple[int, int]]:
        """Return (layer, head) of each row of a table of heads."""
        return list(zip(self["layer"].tolist(), self["head"].tolist(), strict=True))

    def head_names(self, *, with_kind: bool = False) -> list[str]:
        """Return the name of each row of a table of heads, such as L3H1; "cross L3H1" with its kind."""
        names = [f"L{layer}H{head}" for layer, head in self.places]
        if not with_kind:
            return names
        return [f"{kind} {name}" for kind, name in zip(self["kind"].tolist(), names, strict=True)]

    def grid(self, name: str, kind: str) -> Floats:
        """Return a column of a table of heads, for one kind of attention, (layer, head); NaN = no such head."""
        mine = self.select(self["kind"] == kind)
        layers, heads = mine["layer"], mine["head"]
        # As large as the last layer and the last head.
        grid = np.full((layers.max(initial=-1) + 1, heads.max(initial=-1) + 1), math.nan)
        grid[layers, heads] = mine[name]
        return grid

    def rows(self) -> Iterator[Sequence[Any]]:
        """Yield the names of all arrays, then a row of their values at a time."""
        yield tuple(self.values)
        yield from zip(*(values.tolist() for values in self.values.values()), strict=True)

    def as_dicts(self) -> list[dict[str, Any]]:
        """Return each row as a dictionary of its values by the names of arrays."""
        header, *rows = self.rows()
        return [dict(zip(header, row, strict=True)) for row in rows]

    def to_pandas(self) -> Any:
        """Return it as a `pandas.DataFrame`, with a column for each array.

        Raises:
            AttnscopeError: pandas is not installed.
        """
        try:
            import pandas  # type: ignore[import-untyped,unused-ignore]
        except ImportError:
            raise AttnscopeError("pandas is not installed", "pip install pandas, or write csv") from None
        return pandas.DataFrame(dict(self.values))

    def require_sound(self, name: str, wanted: Iterable[Column], sizes: Mapping[str, int]) -> None:
        """Refuse a table that lacks columns, or holds values that they cannot have.

        Args:
            name: Its name in messages.
            wanted: The columns that it must have.
            sizes: The number of rows of every table of the result, by name.

        Raises:
            ValueError: It is damaged.
        """
        # Columns that are wanted or declared, and have no values.
        missing = {column.name for column in wanted} | {*self.columns}
        missing -= {*self.values}
        if missing:
            raise ValueError(f"its {name} lack {min(missing)}")
        # A file declares its own columns: kinds must be those that are wanted.
        for column in wanted:
            if self.columns.get(column.name, column).kind != column.kind:
                raise ValueError(f"{name}.{column.name} is no {column.kind}")
        # Every array has a value for each row, of its column's type and range.
        for column_name, values in self.values.items():
            full_name = f"{name}.{column_name}"
            if values.shape != (len(self),):
                raise ValueError(f"{full_name} has the shape {values.shape}, not {(len(self),)}")
            require_values(full_name, values, declaration_of(column_name, self.columns), sizes)


C = TypeVar("C", bound=Column)


def declaration_of(name: str, columns: Mapping[str, C]) -> C:
    """Return the declaration of a column or an array by its name, or of an array beside one, such as `effect_low`.

    Arrays beside others are numbers in any range.

    Raises:
        ValueError: There is none of that name.
    """
    if name in columns:
        return columns[name]
    base, _, part = name.rpartition("_")
    if base not in columns or part not in PARTS:
        raise ValueError(f"it has {name!r}, which is not declared")
    return replace(columns[base], kind="number", range=(None, None), refers_to="")


def require_values(name: str, values: NDArray[Any], column: Column, sizes: Mapping[str, int]) -> None:
    """Refuse values of another type than a column's, or beyond its range; NaN lies in every range.

    Args:
        name: Their name in messages.
        values: The values, of any shape.
        column: The declaration of their column or array.
        sizes: The number of rows of every table of the result, by name.

    Raises:
        ValueError: They are of another type, or beyond the range.
    """
    if values.dtype.kind not in _DTYPE_LETTERS[column.kind]:
        raise ValueError(f"{name} is an array of {values.dtype}")
    if not values.size or column.kind in ("text", "flag"):
        return
    # A number that refers to a table is one of its rows, or -1.
    low, high = column.range
    if column.refers_to:
        low, high = -1, sizes.get(column.refers_to, 0) - 1
    slack = _SLACK if column.kind == "number" else 0
    # fmin and fmax pass over NaN, unless all values are NaN: then both comparisons are false.
    smallest = np.fmin.reduce(values, axis=None)
    largest = np.fmax.reduce(values, axis=None)
    is_low = low is not None and smallest < low - slack
    is_high = high is not None and largest > high + slack
    if is_low or is_high:
        raise ValueError(f"a number of {name} is not between {low} and {high}")
