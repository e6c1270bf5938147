"""Declare columns of numbers and texts with their meaning, unit and range, and hold them as tables. NumPy only.

A column of numbers, such as `effect`, may have companions: further numbers for each row, such as `effect_low` and
`effect_high`, the ends of its intervals. `COMPANIONS` lists them. Every question declares its columns with the
functions here; companions need no declaration.
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

COMPANIONS = ("low", "high", "baseline", "count")
"""What the companions of a column of numbers hold: both ends of its 95% interval, its value by chance, and how many
values it is the mean of. Their names are the column's with these endings."""

DTYPES: Mapping[ColumnKind, Any] = {
    "number": np.float64,
    "count": np.int64,
    "text": np.str_,
    "flag": np.bool_,
}
"""The NumPy type of each kind of column when a table is made."""

_DTYPE_LETTERS: Mapping[ColumnKind, str] = {"number": "f", "count": "iu", "text": "U", "flag": "b"}
"""The NumPy types of each kind of column that are accepted from a file, as letters of `dtype.kind`."""

_SLACK = 0.01
"""How far a number in a file may be beyond the declared range of its column, as rounding may carry it there."""


@dataclass(frozen=True)
class Column:
    """The declaration of a column: its name, meaning, unit and range.

    Attributes:
        name: Its name in Python and in files.
        meaning: A sentence on what its values are.
        unit: Such as "nats" or "share"; empty for plain numbers.
        range: Its smallest and its largest possible value; None where there is no bound.
        label: Its name for people; empty = `name` with blanks.
        short: The same in a few letters, above a narrow column; empty = the label.
        kind: "number" (NaN = unknown), "count" (whole numbers), "text" or "flag" (true or false).
        refers_to: The name of a table, if its whole numbers are indices of that table's rows; -1 = no row.
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
    def rebuild(cls, description: Mapping[str, Any]) -> Column:
        """Return a column from its fields by name, as `dataclasses.asdict` returns them.

        Raises:
            ValueError: A field has another type, or the kind is unknown.
        """
        # JSON has a list where the range is a tuple.
        low, high = description["range"]
        column = cls(**{**description, "range": (low, high)})
        are_bounds = isinstance(low, int | float | None) and isinstance(high, int | float | None)
        # All other fields are texts.
        texts = [value for name, value in description.items() if name != "range"]
        if (
            not are_bounds
            or column.kind not in DTYPES
            or not all(isinstance(text, str) for text in texts)
        ):
            raise ValueError(f"a column is no column: {str(description)[:60]}")
        return column

    @property
    def title(self) -> str:
        """Return its name for people."""
        return self.label or self.name.replace("_", " ")

    @property
    def header(self) -> str:
        """Return its name for people above a narrow column."""
        return self.short or self.title


@dataclass(frozen=True)
class Array(Column):
    """The declaration of an array along the rows of tables.

    Attributes:
        axes: A name for each axis. The name of a table: the axis has an entry for each of its rows. Digits, such as
            "3": it has that size. Any other name: it has the same size in all arrays of the result.
    """

    axes: tuple[str, ...] = field(default=(), kw_only=True)


def number(name: str, meaning: str = "", unit: str = "", **fields: Any) -> Column:
    """Declare a column of numbers; `fields` are other fields of `Column`, here and below."""
    return Column(name, meaning, unit, **fields)


def share(name: str, meaning: str = "", **fields: Any) -> Column:
    """Declare a column of numbers from 0 to 1."""
    return Column(name, meaning, "share", (0, 1), **fields)


def count(name: str, meaning: str = "", **fields: Any) -> Column:
    """Declare a column of whole numbers."""
    return Column(name, meaning, kind="count", **fields)


def text(name: str, meaning: str = "", **fields: Any) -> Column:
    """Declare a column of texts."""
    return Column(name, meaning, kind="text", **fields)


def flag(name: str, meaning: str = "", **fields: Any) -> Column:
    """Declare a column of truth values."""
    return Column(name, meaning, kind="flag", **fields)


MAX_HEADS = 10_000
"""More layers, and more heads in a layer, than any model has: a file with larger numbers is damaged."""

HEADS = (
    text("kind", "kind of attention: encoder, decoder or cross"),
    count("layer", "its layer, from 0", range=(0, MAX_HEADS - 1)),
    count("head", "its number in the layer, from 0", range=(0, MAX_HEADS - 1)),
)
"""The columns with which every table of heads begins."""


@dataclass(frozen=True)
class Estimate:
    """A cell of `Table.of`: a number with those of its `COMPANIONS` that are known."""

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
        values: The values of columns and of their companions, such as `effect_low`, by name; each (row,).
    """

    columns: Mapping[str, Column]
    values: Mapping[str, NDArray[Any]]

    @classmethod
    def of(cls, columns: Sequence[Column], rows: Sequence[Mapping[str, Any]]) -> Table:
        """Make a table of rows.

        Args:
            columns: The declarations.
            rows: The cells of each row by the name of their column. A cell of a column of numbers may be an `Estimate`,
                or another object with `value` and some of `COMPANIONS`; None or no cell = unknown.
        """
        values: dict[str, NDArray[Any]] = {}
        for column in columns:
            cells = [row.get(column.name) for row in rows]
            if column.kind != "number":
                values[column.name] = np.array(cells, DTYPES[column.kind])
                continue
            # Each cell is a number, an object with `value`, or None, which becomes NaN.
            values[column.name] = np.array([getattr(cell, "value", cell) for cell in cells], np.float64)
            # A companion that no cell has is left out.
            for companion in COMPANIONS:
                numbers = [getattr(cell, companion, None) for cell in cells]
                if any(number is not None for number in numbers):
                    values[f"{column.name}_{companion}"] = np.array(numbers, np.float64)
        return cls({column.name: column for column in columns}, values)

    @classmethod
    def of_arrays(cls, columns: Sequence[Column], /, **values: Any) -> Table:
        """Make a table of arrays by name: the values of columns and of their companions, such as `effect_low`."""
        declared = {column.name: column for column in columns}
        arrays = {}
        for name, cells in values.items():
            # A companion has no declaration, and holds numbers.
            column = declared.get(name)
            dtype = np.float64 if column is None else DTYPES[column.kind]
            arrays[name] = np.asarray(cells, dtype)
        return cls(declared, arrays)

    @classmethod
    def of_rows(cls, columns: Sequence[Column], rows: Sequence[Sequence[Any]]) -> Table:
        """Make a table of rows that have a cell for each column, in the order of the columns."""
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

    def companion(self, name: str, companion: str) -> Floats:
        """Return a companion of a column, (row,); NaN if the table does not have it.

        Args:
            name: The column.
            companion: One of `COMPANIONS`, such as "low".
        """
        return self.values.get(f"{name}_{companion}", np.full(len(self), math.nan))

    def interval(self, name: str) -> Floats:
        """Return the value, and the low and high end of its 95% interval, of each row, (row, 3); NaN = unknown."""
        return np.stack([self[name], self.companion(name, "low"), self.companion(name, "high")], -1)

    @property
    def number_columns(self) -> tuple[str, ...]:
        """Return the names of the columns of numbers, in their order."""
        return tuple(name for name, column in self.columns.items() if column.kind == "number")

    def select(self, rows: Any) -> Table:
        """Return a table of some rows, by a mask or by their indices in the order that they are to have."""
        return Table(self.columns, {name: values[rows] for name, values in self.values.items()})

    def with_column(self, column: Column, values: Any, **companions: Any) -> Table:
        """Return the table with a further column at its end, and with its companions, by names in `COMPANIONS`."""
        arrays = {**self.values, column.name: np.asarray(values, DTYPES[column.kind])}
        for companion, numbers in companions.items():
            arrays[f"{column.name}_{companion}"] = np.asarray(numbers, np.float64)
        return Table({**self.columns, column.name: column}, arrays)

    @classmethod
    def stack(cls, tables: Sequence[Table]) -> Table:
        """Return one table with the rows of several tables, below each other, and the columns of all of them.

        Where a table lacks a column or companion of numbers, its rows have NaN. No table may lack a column of another
        kind.
        """
        # The names of all arrays, in the order in which they first stand in any table.
        columns: dict[str, Column] = {}
        names: dict[str, None] = {}
        for table in tables:
            columns |= table.columns
            names |= dict.fromkeys(table.values)
        values = {}
        for name in names:
            blocks = [table.values.get(name, np.full(len(table), math.nan)) for table in tables]
            values[name] = np.concatenate(blocks)
        return cls(columns, values)

    @property
    def layer_heads(self) -> list[tuple[int, int]]:
        """Return (layer, head) of each row of a table of heads."""
        return list(zip(self["layer"].tolist(), self["head"].tolist(), strict=True))

    def head_names(self, *, with_kind: bool = False) -> list[str]:
        """Return the name of each row of a table of heads, such as L3H1; "cross L3H1" with its kind."""
        names = [f"L{layer}H{head}" for layer, head in self.layer_heads]
        if not with_kind:
            return names
        return [f"{kind} {name}" for kind, name in zip(self["kind"].tolist(), names, strict=True)]

    def grid(self, name: str, kind: str) -> Floats:
        """Return a column of a table of heads, for one kind of attention, (layer, head).

        It reaches to the last layer and the last head in the table; NaN = the table has no such head.
        """
        of_kind = self.select(self["kind"] == kind)
        layers = of_kind["layer"]
        heads = of_kind["head"]
        grid = np.full((layers.max(initial=-1) + 1, heads.max(initial=-1) + 1), math.nan)
        grid[layers, heads] = of_kind[name]
        return grid

    def rows(self) -> Iterator[Sequence[Any]]:
        """Yield the names of all columns and companions, then the values of one row after the other."""
        yield tuple(self.values)
        yield from zip(*(values.tolist() for values in self.values.values()), strict=True)

    def as_dicts(self) -> list[dict[str, Any]]:
        """Return each row as a dictionary: its values by the names of columns and companions."""
        header, *rows = self.rows()
        return [dict(zip(header, row, strict=True)) for row in rows]

    def to_pandas(self) -> Any:
        """Return it as a `pandas.DataFrame`, with a column for each column and companion.

        Raises:
            AttnscopeError: pandas is not installed; attnscope does not depend on it.
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
            wanted: The columns that it must have; it may declare others, too.
            sizes: The number of rows of every table of the result, by name.

        Raises:
            ValueError: It is damaged.
        """
        # Each column that is wanted or declared has values.
        for column_name in sorted({*self.columns, *(column.name for column in wanted)}):
            if column_name not in self.values:
                raise ValueError(f"its {name} lack {column_name}")
        # A column that is wanted has the wanted kind, if the file declares it itself.
        for column in wanted:
            if self.columns.get(column.name, column).kind != column.kind:
                raise ValueError(f"{name}.{column.name} is no {column.kind}")
        # Each column and companion has a value for each row, of the declared type and range.
        for column_name, values in self.values.items():
            full_name = f"{name}.{column_name}"
            if values.shape != (len(self),):
                raise ValueError(f"{full_name} has the shape {values.shape}, not {(len(self),)}")
            require_values(full_name, values, declaration_of(column_name, self.columns), sizes)


C = TypeVar("C", bound=Column)


def declaration_of(name: str, columns: Mapping[str, C]) -> C:
    """Return the declaration of a column or an array, or make that of a companion, such as `effect_low`.

    Args:
        name: The name of the column, array or companion.
        columns: The declarations by name.

    Raises:
        ValueError: It is neither declared nor a companion of one that is.
    """
    if name in columns:
        return columns[name]
    base, _, companion = name.rpartition("_")
    if base not in columns or companion not in COMPANIONS:
        raise ValueError(f"it has {name!r}, which is not declared")
    # Companions are numbers in any range, also those of columns of other kinds.
    return replace(columns[base], kind="number", range=(None, None), refers_to="")


def require_values(name: str, values: NDArray[Any], column: Column, sizes: Mapping[str, int]) -> None:
    """Refuse values that a column or an array cannot have; NaN lies in every range.

    Args:
        name: Their name in messages.
        values: The values, of any shape.
        column: The declaration.
        sizes: The number of rows of every table of the result, by name.

    Raises:
        ValueError: Their type is not that of the column's kind, or one is beyond the range.
    """
    if values.dtype.kind not in _DTYPE_LETTERS[column.kind]:
        raise ValueError(f"{name} is an array of {values.dtype}")
    if not values.size or column.kind in ("text", "flag"):
        return
    # Indices of rows of a table lie between -1, no row, and its last row.
    low, high = column.range
    if column.refers_to:
        low = -1
        high = sizes.get(column.refers_to, 0) - 1
    slack = _SLACK if column.kind == "number" else 0
    # fmin and fmax ignore NaN. If all values are NaN, so are the results: both comparisons are then false.
    smallest = np.fmin.reduce(values, axis=None)
    largest = np.fmax.reduce(values, axis=None)
    is_below = low is not None and smallest < low - slack
    is_above = high is not None and largest > high + slack
    if is_below or is_above:
        raise ValueError(f"a number of {name} is not between {low} and {high}")
