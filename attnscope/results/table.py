"""Tables of a result: columns of numbers and texts, each with its meaning, unit and range. NumPy only.

Beside the column `effect` may stand others by the endings in `PARTS`, such as `effect_low` and `effect_high`, the ends
of its 95% interval. They have these names in files too.
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
Kind = Literal["number", "count", "text", "flag"]

PARTS = ("low", "high", "baseline", "count")
"""What may stand beside a number: the ends of its 95% interval, its value under a baseline, over how many it is."""

DTYPES: Mapping[Kind, Any] = {"number": np.float64, "count": np.int64, "text": np.str_, "flag": np.bool_}
_DTYPE_KINDS: Mapping[Kind, str] = {"number": "f", "count": "iu", "text": "U", "flag": "b"}

SLACK = 0.01
"""Rounding may carry a number this far beyond its range."""


@dataclass(frozen=True)
class Column:
    """The declaration of a column: its name, meaning, unit and range.

    Attributes:
        name: Its name in Python and in files.
        meaning: What it says, in a sentence.
        unit: Such as "nats" or "share"; empty for plain numbers.
        range: Its least and its largest possible value; None where there is no bound.
        label: What people read; empty = its name with blanks.
        short: The same in a few letters, for the head of a narrow column; empty = the label.
        kind: "number" (NaN = unknown), "count" (whole numbers), "text" or "flag" (true or false).
        refers_to: The table that its whole numbers name rows of, from 0; -1 = none of them.
    """

    name: str
    meaning: str = ""
    unit: str = ""
    range: tuple[float | None, float | None] = (None, None)
    label: str = ""
    short: str = ""
    kind: Kind = "number"
    refers_to: str = ""

    @classmethod
    def rebuild(cls, described: Mapping[str, Any]) -> Column:
        """Return the column that `dataclasses.asdict` described.

        Raises:
            ValueError: It is damaged.
        """
        low, high = described["range"]
        column = cls(**{**described, "range": (low, high)})
        texts = [column.name, column.meaning, column.unit, column.label, column.short, column.refers_to]
        are_texts = all(isinstance(value, str) for value in texts)
        are_bounds = all(bound is None or isinstance(bound, int | float) for bound in column.range)
        if not (are_texts and are_bounds and column.kind in DTYPES):
            raise ValueError(f"a column is no column: {str(described)[:60]}")
        return column

    @property
    def title(self) -> str:
        """Return what people read."""
        return self.label or self.name.replace("_", " ")

    @property
    def head(self) -> str:
        """Return what stands above it in a narrow table."""
        return self.short or self.title


@dataclass(frozen=True)
class Array(Column):
    """The declaration of an array along the rows of tables.

    Attributes:
        axes: Per axis a table, whose rows it follows; its size, such as "3"; or a name of its own, which stands for
            one size throughout the result.
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
"""No model has as many layers, nor as many heads in one: numbers beyond are damage."""

HEADS = (
    text("kind", "kind of attention: encoder, decoder or cross"),
    count("layer", "its layer, from 0", range=(0, MOST_HEADS - 1)),
    count("head", "its number in the layer, from 0", range=(0, MOST_HEADS - 1)),
)
"""The columns that name a head, with which every table of heads begins."""


@dataclass(frozen=True)
class Estimate:
    """A number with what stands beside it, as a cell of `Table.of`; None = nothing does."""

    value: float
    low: float | None = None
    high: float | None = None
    baseline: float | None = None
    count: float | None = None


@dataclass(frozen=True, eq=False)
class Table:
    """Columns of equal length.

    Attributes:
        columns: What each column is, by name, in their order.
        values: The values of each column, and of what stands beside it.
    """

    columns: Mapping[str, Column]
    values: Mapping[str, NDArray[Any]]

    @classmethod
    def of(cls, columns: Sequence[Column], rows: Sequence[Mapping[str, Any]]) -> Table:
        """Make a table of rows.

        Args:
            columns: What the columns are.
            rows: Cells by column. In a column of numbers, None or nothing = unknown, and a cell may be an object with
                `value` and some of `PARTS`, such as an `Estimate`.
        """
        values: dict[str, NDArray[Any]] = {}
        for column in columns:
            cells = [row.get(column.name) for row in rows]
            if column.kind != "number":
                values[column.name] = np.array(cells, DTYPES[column.kind])
                continue
            # Each cell is a number, an object with `value`, or None.
            values[column.name] = np.array([getattr(cell, "value", cell) for cell in cells], np.float64)
            # What stands beside some cell; texts have a method `count`, which is no part.
            objects = [cell for cell in cells if not isinstance(cell, str)]
            for part in PARTS:
                if any(getattr(cell, part, None) is not None for cell in objects):
                    beside = [getattr(cell, part, None) for cell in cells]
                    values[f"{column.name}_{part}"] = np.array(beside, np.float64)
        return cls({column.name: column for column in columns}, values)

    @classmethod
    def of_arrays(cls, columns: Sequence[Column], /, **values: Any) -> Table:
        """Make a table of whole columns, and of what stands beside them, by name."""
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
        """Return what stands beside a column, (row,); NaN where nothing does.

        Args:
            name: The column.
            part: One of `PARTS`.
        """
        return self.values.get(f"{name}_{part}", np.full(len(self), math.nan))

    def interval(self, name: str) -> Floats:
        """Return the values of a column and the ends of their 95% intervals, (row, 3); NaN where there are none."""
        return np.stack([self[name], self.part(name, "low"), self.part(name, "high")], -1)

    @property
    def numbers(self) -> tuple[str, ...]:
        """Return the names of the columns that hold measured numbers."""
        return tuple(name for name, column in self.columns.items() if column.kind == "number")

    def select(self, rows: Any) -> Table:
        """Return a table of some rows: a mask, or their places in the order that they shall have."""
        return Table(self.columns, {name: values[rows] for name, values in self.values.items()})

    def with_column(self, column: Column, values: Any, **parts: Any) -> Table:
        """Return the table with a further column at its end, and what stands beside it by the names in `PARTS`."""
        added = {column.name: np.asarray(values, DTYPES[column.kind])}
        added |= {
            f"{column.name}_{part}": np.asarray(numbers, np.float64) for part, numbers in parts.items()
        }
        return Table({**self.columns, column.name: column}, {**self.values, **added})

    @classmethod
    def stack(cls, tables: Sequence[Table]) -> Table:
        """Return the rows of several tables below each other; numbers that a table does not have are NaN.

        Columns stand in the order in which they first come; every table has the columns of other kinds.
        """
        # The union of all columns, in order.
        columns: dict[str, Column] = {}
        names: dict[str, None] = {}
        for table in tables:
            columns |= table.columns
            names |= dict.fromkeys(table.values)
        values = {
            name: np.concatenate(
                [table.values.get(name, np.full(len(table), math.nan)) for table in tables]
            )
            for name in names
        }
        return cls(columns, values)

    @property
    def places(self) -> list[tuple[int, int]]:
        """Return (layer, head) of each row of a table of heads."""
        return list(zip(self["layer"].tolist(), self["head"].tolist(), strict=True))

    def head_names(self, *, with_kind: bool = False) -> list[str]:
        """Return what the heads of a table of heads are called: L3H1, or "cross L3H1" with their kind."""
        names = [f"L{layer}H{head}" for layer, head in self.places]
        if not with_kind:
            return names
        return [f"{kind} {name}" for kind, name in zip(self["kind"].tolist(), names, strict=True)]

    def grid(self, name: str, kind: str) -> Floats:
        """Return a column of a table of heads for one kind of attention, (layer, head); NaN = there is no such head."""
        is_kind = self["kind"] == kind
        layers, heads = self["layer"][is_kind], self["head"][is_kind]
        grid = np.full((layers.max(initial=-1) + 1, heads.max(initial=-1) + 1), math.nan)
        grid[layers, heads] = self[name][is_kind]
        return grid

    def rows(self) -> Iterator[Sequence[Any]]:
        """Return the rows of a file, the names of the columns first."""
        yield tuple(self.values)
        yield from zip(*(values.tolist() for values in self.values.values()), strict=True)

    def as_dicts(self) -> list[dict[str, Any]]:
        """Return the rows, each by column."""
        header, *rows = self.rows()
        return [dict(zip(header, row, strict=True)) for row in rows]

    def to_pandas(self) -> Any:
        """Return it as a `pandas.DataFrame`.

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
            name: What to call it.
            wanted: The columns that it must have.
            sizes: The lengths of all tables.

        Raises:
            ValueError: It is damaged.
        """
        # Columns that are wanted or described, but have no values.
        missing = {column.name for column in wanted} | {*self.columns}
        missing -= {*self.values}
        if missing:
            raise ValueError(f"its {name} lack {min(missing)}")
        # Kinds, then lengths and ranges.
        for column in wanted:
            if self.columns.get(column.name, column).kind != column.kind:
                raise ValueError(f"{name}.{column.name} is no {column.kind}")
        for column_name, values in self.values.items():
            if values.shape != (len(self),):
                raise ValueError(
                    f"{name}.{column_name} has the shape {values.shape}, not {(len(self),)}"
                )
            require_values(f"{name}.{column_name}", values, declared(self.columns, column_name), sizes)


C = TypeVar("C", bound=Column)


def declared(columns: Mapping[str, C], name: str) -> C:
    """Return what a column or an array is; what stands beside one, such as `effect_low`, is a number in any range.

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
    """Refuse values of another type, or beyond their range; NaN is no damage.

    Raises:
        ValueError: They are.
    """
    if values.dtype.kind not in _DTYPE_KINDS[column.kind]:
        raise ValueError(f"{name} is an array of {values.dtype}")
    if not values.size or column.kind in ("text", "flag"):
        return
    # A reference lies within the other table, or is -1.
    low, high = column.range
    if column.refers_to:
        low, high = -1, sizes.get(column.refers_to, 0) - 1
    # Rounding may carry numbers a little beyond their range.
    slack = SLACK if column.kind == "number" else 0
    # fmin and fmax pass over NaN, unless all are.
    least, most = np.fmin.reduce(values, axis=None), np.fmax.reduce(values, axis=None)
    is_low = low is not None and least < low - slack
    is_high = high is not None and most > high + slack
    if is_low or is_high:
        raise ValueError(f"a number of {name} is not between {low} and {high}")
