"""Declare columns by name, meaning, unit and range, and hold their values as tables. Needs NumPy only.

A companion of a column is a further number for each row that belongs to it. The column `effect` may have the companions
`effect_low` and `effect_high`, the ends of its 95% interval. `COMPANIONS` lists all endings. The classes of results
(`attnscope.questions`) declare their columns with the functions here; companions need no declaration.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from attnscope.arrays import Floats
from attnscope.errors import AttnscopeError

ColumnKind = Literal["number", "count", "text", "flag"]

COMPANIONS = ("low", "high", "baseline", "count")
"""The endings of companions. "low" and "high" are the ends of the 95% interval, "baseline" is the value expected by
chance, and "count" is the number of values that were averaged. The ending "low" of `effect` makes `effect_low`."""

DTYPES: Mapping[ColumnKind, Any] = {
    "number": np.float64,
    "count": np.int64,
    "text": np.str_,
    "flag": np.bool_,
}
"""By kind of column, the NumPy type of its values in a table that is made here."""

_DTYPE_LETTERS: Mapping[ColumnKind, str] = {"number": "f", "count": "iu", "text": "U", "flag": "b"}
"""By kind of column, the values of `dtype.kind` that are accepted in a table from a file."""

_RANGE_TOLERANCE = 0.01
"""How far a number in a file may lie outside the declared range of its column, because of rounding."""


@dataclass(frozen=True)
class Column:
    """The declaration of a column: its name, meaning, unit and range.

    Attributes:
        name: Its name in Python and in files.
        meaning: A sentence on what its values are.
        unit: Such as "nats" or "share"; "" = the numbers have no unit.
        range: The smallest and the largest possible value; None = no bound.
        label: Its name in reports; "" = `name` with spaces for underscores.
        short: A shorter label for the head of a narrow column; "" = the label.
        kind: "number" (NaN = unknown), "count" (whole numbers), "text" or "flag" (true or false).
        refers_to: The name of a table, if the values are row indices of that table (-1 = no row); "" = they are not.
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
        """Return a column from its fields by name, as `dataclasses.asdict` made them and JSON stored them.

        Raises:
            ValueError: A field has another type, or the kind is unknown.
        """
        # JSON stores the tuple `range` as a list.
        low, high = description["range"]
        column = cls(**{**description, "range": (low, high)})
        are_bounds = isinstance(low, int | float | None) and isinstance(high, int | float | None)
        # Except for the range, every field of `Column` is a string.
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
        """Return the name for reports."""
        return self.label or self.name.replace("_", " ")

    @property
    def header(self) -> str:
        """Return the name for the head of a narrow column."""
        return self.short or self.title


@dataclass(frozen=True)
class Array(Column):
    """The declaration of an array of any number of axes, such as weights of shape (head, query, key).

    Attributes:
        axes: A name for each axis. An axis named after a table has an entry for each row of that table. An axis named
            by digits, such as "3", has that size. An axis of any other name has the same size in all arrays of the
            result.
    """

    axes: tuple[str, ...] = field(default=(), kw_only=True)


def number(name: str, meaning: str = "", unit: str = "", **fields: Any) -> Column:
    """Declare a column of floats. `fields` are further fields of `Column`, as in the four functions below."""
    return Column(name, meaning, unit, **fields)


def share(name: str, meaning: str = "", **fields: Any) -> Column:
    """Declare a column of floats from 0 to 1."""
    return Column(name, meaning, "share", (0, 1), **fields)


def count(name: str, meaning: str = "", **fields: Any) -> Column:
    """Declare a column of integers."""
    return Column(name, meaning, kind="count", **fields)


def text(name: str, meaning: str = "", **fields: Any) -> Column:
    """Declare a column of strings."""
    return Column(name, meaning, kind="text", **fields)


def flag(name: str, meaning: str = "", **fields: Any) -> Column:
    """Declare a column of booleans."""
    return Column(name, meaning, kind="flag", **fields)


MAX_LAYERS_OR_HEADS = 10_000
"""A bound that no model reaches with its layers, or with its heads per layer. A file with more is damaged."""

HEADS = (
    text("kind", "kind of attention: encoder, decoder or cross"),
    count("layer", "its layer, from 0", range=(0, MAX_LAYERS_OR_HEADS - 1)),
    count("head", "its number in the layer, from 0", range=(0, MAX_LAYERS_OR_HEADS - 1)),
)
"""The first three columns of every table that has one row per head."""


@dataclass(frozen=True)
class Estimate:
    """A number and its companions, as one cell of `Table.of`; None = that companion is unknown. See `COMPANIONS`."""

    value: float
    low: float | None = None
    high: float | None = None
    baseline: float | None = None
    count: float | None = None


@dataclass(frozen=True, eq=False)
class Table:
    """Columns of equal length.

    Attributes:
        columns: By name, the declaration of each column, in the order of the columns. Companions are not in it.
        values: By name, the values of each column and of each companion, such as `effect_low`; each array is (row,).
    """

    columns: Mapping[str, Column]
    values: Mapping[str, NDArray[Any]]

    @classmethod
    def of(cls, columns: Sequence[Column], rows: Sequence[Mapping[str, Any]]) -> Table:
        """Make a table from rows given as mappings.

        Args:
            columns: The declarations.
            rows: For each row, its cells by column name. In a column of kind "number" a cell may be a number, or an
                object with the attribute `value` and some of `COMPANIONS`, such as an `Estimate`. A missing cell or
                None = unknown, and becomes NaN.
        """
        values: dict[str, NDArray[Any]] = {}
        for column in columns:
            cells = [row.get(column.name) for row in rows]
            if column.kind != "number":
                values[column.name] = np.array(cells, DTYPES[column.kind])
                continue
            # float64 turns None into NaN.
            values[column.name] = np.array([getattr(cell, "value", cell) for cell in cells], np.float64)
            # If no cell has a companion, the table gets no array for it.
            for companion in COMPANIONS:
                numbers = [getattr(cell, companion, None) for cell in cells]
                if any(number is not None for number in numbers):
                    values[f"{column.name}_{companion}"] = np.array(numbers, np.float64)
        return cls({column.name: column for column in columns}, values)

    @classmethod
    def of_arrays(cls, columns: Sequence[Column], /, **values: Any) -> Table:
        """Make a table from arrays, by the names of columns and companions: `effect=…, effect_low=…`."""
        declared = {column.name: column for column in columns}
        arrays = {}
        for name, cells in values.items():
            column = declared.get(name)
            # None = the name of a companion. Companions have no declaration, and are floats.
            dtype = np.float64 if column is None else DTYPES[column.kind]
            arrays[name] = np.asarray(cells, dtype)
        return cls(declared, arrays)

    @classmethod
    def of_rows(cls, columns: Sequence[Column], rows: Sequence[Sequence[Any]]) -> Table:
        """Make a table from rows given as sequences: a cell for each column, in the order of the columns."""
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
        """Return the values of a companion of a column, (row,); all NaN if the table does not have it.

        Args:
            name: The name of the column.
            companion: The ending of the companion, one of `COMPANIONS`, such as "low".
        """
        return self.values.get(f"{name}_{companion}", np.full(len(self), math.nan))

    def interval(self, name: str) -> Floats:
        """Return (row, 3): the value of each row, then the low and the high end of its 95% interval; NaN = unknown."""
        return np.stack([self[name], self.companion(name, "low"), self.companion(name, "high")], -1)

    @property
    def number_columns(self) -> tuple[str, ...]:
        """Return the names of the columns of kind "number", in their order."""
        return tuple(name for name, column in self.columns.items() if column.kind == "number")

    def select(self, rows: Any) -> Table:
        """Return a table of some rows.

        Args:
            rows: A boolean mask, (row,), or row indices, in the order that the rows of the new table have.
        """
        return Table(self.columns, {name: values[rows] for name, values in self.values.items()})

    def with_column(self, column: Column, values: Any, **companions: Any) -> Table:
        """Return the table with one more column at the end, and companions of it by their endings: `low=…, high=…`."""
        arrays = {**self.values, column.name: np.asarray(values, DTYPES[column.kind])}
        for companion, numbers in companions.items():
            arrays[f"{column.name}_{companion}"] = np.asarray(numbers, np.float64)
        return Table({**self.columns, column.name: column}, arrays)

    @classmethod
    def stack(cls, tables: Sequence[Table]) -> Table:
        """Concatenate the rows of several tables. The result has every column that any of the tables has.

        If a table lacks a column of kind "number" or a companion, its rows get NaN. All tables must have the columns of
        the other kinds.
        """
        # A dict used as an ordered set: the names of all columns and companions, in order of first appearance.
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
        """Return the name of each row of a table of heads, such as "L3H1"; with its kind "cross L3H1"."""
        names = [f"L{layer}H{head}" for layer, head in self.layer_heads]
        if not with_kind:
            return names
        return [f"{kind} {name}" for kind, name in zip(self["kind"].tolist(), names, strict=True)]

    def grid(self, name: str, kind: str) -> Floats:
        """Return a column of a table of heads as an array (layer, head), for the heads of one kind of attention.

        The last layer and the last head of the table set its size; NaN = the table has no such head.
        """
        of_kind = self.select(self["kind"] == kind)
        layers = of_kind["layer"]
        heads = of_kind["head"]
        grid = np.full((layers.max(initial=-1) + 1, heads.max(initial=-1) + 1), math.nan)
        grid[layers, heads] = of_kind[name]
        return grid

    def rows(self) -> Iterator[Sequence[Any]]:
        """Yield a header, the names of all columns and companions, and then the values of each row."""
        yield tuple(self.values)
        yield from zip(*(values.tolist() for values in self.values.values()), strict=True)

    def as_dicts(self) -> list[dict[str, Any]]:
        """Return each row as a dict: its values by the names of columns and companions."""
        header, *rows = self.rows()
        return [dict(zip(header, row, strict=True)) for row in rows]

    def to_pandas(self) -> Any:
        """Return the table as a `pandas.DataFrame`, with a column for each column and companion.

        Raises:
            AttnscopeError: pandas is not installed; attnscope does not depend on it.
        """
        try:
            import pandas  # type: ignore[import-untyped,unused-ignore]
        except ImportError:
            raise AttnscopeError("pandas is not installed", "pip install pandas, or write csv") from None
        return pandas.DataFrame(dict(self.values))

    def require_valid(self, name: str, required: Iterable[Column], sizes: Mapping[str, int]) -> None:
        """Refuse a damaged table: it lacks columns, or has values outside their declared type or range.

        Args:
            name: The name of the table in messages.
            required: The columns that the table must have; it may declare others, too.
            sizes: By name, the number of rows of every table of the result, which `refers_to` needs.

        Raises:
            ValueError: The table is damaged.
        """
        # Each column that is required or declared has values.
        for column_name in sorted({*self.columns, *(column.name for column in required)}):
            if column_name not in self.values:
                raise ValueError(f"its {name} lack {column_name}")
        # A table from a file has the declarations of the file. Where they declare a required column, the kinds must be
        # equal. Where they do not, `get` returns the required column itself, which passes.
        for column in required:
            if self.columns.get(column.name, column).kind != column.kind:
                raise ValueError(f"{name}.{column.name} is no {column.kind}")
        # Each array has one value for each row, of the declared type and range.
        for column_name, values in self.values.items():
            full_name = f"{name}.{column_name}"
            if values.shape != (len(self),):
                raise ValueError(f"{full_name} has the shape {values.shape}, not {(len(self),)}")
            require_values(full_name, values, find_declaration(column_name, self.columns), sizes)


ColumnT = TypeVar("ColumnT", bound=Column)


def find_declaration(name: str, columns: Mapping[str, ColumnT]) -> ColumnT:
    """Return the declaration of a column or an array; for a companion, such as `effect_low`, make a declaration.

    Args:
        name: The name of the column, array or companion.
        columns: By name, the declarations of columns or of arrays.

    Raises:
        ValueError: The name is neither declared nor a declared name with an ending of `COMPANIONS`.
    """
    if name in columns:
        return columns[name]
    base, _, companion = name.rpartition("_")
    if base not in columns or companion not in COMPANIONS:
        raise ValueError(f"it has {name!r}, which is not declared")
    # A companion is a float without bounds, even if its column is a count or has a range.
    return replace(columns[base], kind="number", range=(None, None), refers_to="")


def make_label(name: str, columns: Mapping[str, Column]) -> str:
    """Make the header of a column for people; of a companion, such as `effect_low`, from the title of its column.

    A column that is not declared, as those of an array are, has the words of its name.
    """
    base, _, companion = name.rpartition("_")
    if companion in COMPANIONS and base in columns:
        return f"{columns[base].title} {companion}"
    return columns[name].title if name in columns else name.replace("_", " ")


def require_values(name: str, values: NDArray[Any], column: Column, sizes: Mapping[str, int]) -> None:
    """Refuse values that do not fit the declaration of their column or array. NaN fits every range.

    Args:
        name: The name of the column or array in messages.
        values: The values, of any shape.
        column: The declaration.
        sizes: By name, the number of rows of every table of the result, which `refers_to` needs.

    Raises:
        ValueError: The NumPy type does not fit the column's kind, or a value is outside the range.
    """
    if values.dtype.kind not in _DTYPE_LETTERS[column.kind]:
        raise ValueError(f"{name} is an array of {values.dtype}")
    if not values.size or column.kind in ("text", "flag"):
        return
    # Row indices of another table lie between -1, which means no row, and its last row.
    low, high = column.range
    if column.refers_to:
        low = -1
        high = sizes.get(column.refers_to, 0) - 1
    tolerance = _RANGE_TOLERANCE if column.kind == "number" else 0
    # fmin and fmax ignore NaN. If all values are NaN, so are the results: both comparisons are then false.
    smallest = np.fmin.reduce(values, axis=None)
    largest = np.fmax.reduce(values, axis=None)
    is_below = low is not None and smallest < low - tolerance
    is_above = high is not None and largest > high + tolerance
    if is_below or is_above:
        raise ValueError(f"a number of {name} is not between {low} and {high}")


def require_shape(
    name: str,
    values: NDArray[Any],
    axes: Sequence[str],
    sizes: Mapping[str, int],
    tables: Collection[str],
) -> dict[str, int]:
    """Refuse an array that does not follow its axes; return the sizes of all axes that are known after it.

    Args:
        name: Its name.
        values: The array.
        axes: Its declared axes; see `Array`.
        sizes: The size of each known axis by name: of tables, and of other axes of the arrays before it.
        tables: The names of all tables.

    Raises:
        ValueError: It has another number of axes, or the size of one is not the known size.
    """
    known = dict(sizes)
    kind = name.partition(":")[2]
    fits = values.ndim == len(axes)
    for axis, size in zip(axes, values.shape, strict=False):
        # The axis "tokens" of "weights:cross" is "tokens:cross". But where no such table is there and one table holds
        # all kinds, as "heads" may, it is that table.
        key = axis
        if kind and (f"{axis}:{kind}" in known or axis not in tables):
            key = f"{axis}:{kind}"
        # The first array with an axis that is no table sets its size.
        wanted = int(axis) if axis.isdecimal() else known.setdefault(key, size)
        fits = fits and size == wanted
    if not fits:
        raise ValueError(f"the shape of its {name}, {values.shape}, does not fit {' x '.join(axes)}")
    return known
