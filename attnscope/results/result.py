"""What every study returns: tables, arrays along their rows, and where they come from. NumPy only.

A question declares its tables and arrays once, in `attnscope.questions`; files, the terminal, figures and pages read
these declarations. One class saves, loads and checks them all.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from attnscope.errors import UsageError, amount
from attnscope.results.record import Record
from attnscope.results.storage import finite, plain
from attnscope.results.table import PARTS, Array, Column, Floats, Table, require_values

if TYPE_CHECKING:
    from attnscope.report.blocks import Report

_DESCRIPTION = "record"
"""The member of an archive that describes the others."""


@dataclass(frozen=True, eq=False, repr=False)
class Result(Record):
    """The tables and arrays that answer a question.

    A table or an array of one kind of attention has the kind after a colon in its name, such as "tokens:cross". Its
    axes then follow the tables of that kind, where there are such.

    Attributes:
        TABLES: The columns that each table has; a table may have more, which it describes itself. CSV holds the first.
        ARRAYS: What each array is. The ends of intervals stand in arrays of their own, such as `effect_low`.
        run: What made it: model, sha256, versions, dtype, device, notes. Plain JSON values.
        corpus: What it was made on: sources, n_texts, n_tokens, sha256, problems, complete. Plain JSON values.
        options: What was chosen, and what names mean. Plain JSON values.
        tables: The tables by name.
        grids: The arrays by name.
    """

    ASCII: ClassVar[bool] = True
    COMPRESSED: ClassVar[bool] = True  # columns of texts are mostly blanks
    TABLES: ClassVar[Mapping[str, Sequence[Column]]] = {}
    ARRAYS: ClassVar[Sequence[Array]] = ()

    run: Mapping[str, Any]
    corpus: Mapping[str, Any]
    options: Mapping[str, Any]
    tables: Mapping[str, Table]
    grids: Mapping[str, NDArray[Any]] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Any:
        """Return a table or an array by name."""
        return self.grids[name] if name in self.grids else self.table(name)

    def table(self, name: str) -> Table:
        """Return a table by name, which is empty where the study found nothing for it.

        Raises:
            KeyError: There is no such table.
        """
        if name in self.tables:
            return self.tables[name]
        return Table.of(self.TABLES[_base(name)], [])

    def interval(self, name: str) -> Floats:
        """Return an array with the ends of its 95% intervals along a last axis, (..., 3); NaN where there are none."""
        values = self.grids[name]
        unknown = np.full(values.shape, np.nan)
        base, colon, kind = name.partition(":")
        ends = [self.grids.get(f"{base}_{part}{colon}{kind}", unknown) for part in ("low", "high")]
        return np.stack([values, *ends], -1)

    @property
    def head_names(self) -> list[str]:
        """What the rows of its table of heads are called, with their kind where there are several kinds."""
        heads = self.table("heads")
        kinds = self.run.get("kinds") or heads["kind"].tolist()
        return heads.head_names(with_kind=len({*kinds}) > 1)

    @property
    def is_empty(self) -> bool:
        """Return whether its first table is empty, as after an interruption."""
        return bool(self.TABLES) and not len(self.table(next(iter(self.TABLES))))

    def report(self) -> Report:
        """Return what is said of it, as blocks that the terminal, figures and pages draw.

        A question may take options of how it is shown.
        """
        raise NotImplementedError

    def select(self, table: str, rows: Any) -> Self:
        """Return the result of some rows of a table, with its arrays along them.

        Whole numbers that refer to the table count its rows anew; those of rows that are gone become -1.

        Args:
            table: The name of the table.
            rows: A mask, or the places of rows in the order that they shall have.
        """
        chosen = self.table(table)
        places = np.arange(len(chosen))[rows]
        new_places = np.full(len(chosen) + 1, -1)  # its last entry stands for -1
        new_places[places] = np.arange(len(places))
        tables = {name: _renumber(other, table, new_places) for name, other in self.tables.items()}
        tables[table] = tables[table].select(places)
        grids = {}
        for name, values in self.grids.items():
            axes = self._array(name).axes
            grids[name] = values
            for axis, axis_name in enumerate(axes):
                if axis_name == table:
                    grids[name] = np.take(grids[name], places, axis)
        return replace(self, tables=tables, grids=grids)

    def only(self, picked: Sequence[tuple[int, int]]) -> Self:
        """Return the result of some heads, (layer, head), of every kind.

        The rows of a table whose first column refers to rows that are gone go, too.

        Raises:
            UsageError: It has no such head.
        """
        heads = self.table("heads")
        places = list(zip(heads["layer"].tolist(), heads["head"].tolist(), strict=True))
        missing = [place for place in picked if place not in places]
        if missing:
            layer, head = missing[0]
            where = f"this {self.record_kind().what}"
            raise UsageError(f"there is no head L{layer}H{head} in {where}", f"it has {amount(len(heads), 'head')}")
        wanted = {*picked}
        chosen = self.select("heads", [place in wanted for place in places])
        for name, columns in self.TABLES.items():
            if columns[0].refers_to and name in chosen.tables:
                chosen = chosen.select(name, chosen.table(name)[columns[0].name] >= 0)
        return chosen

    # Files

    def describe(self) -> dict[str, Any]:
        """Return all but the values of columns and arrays, the schema first."""
        columns = {name: [asdict(column) for column in table.columns.values()] for name, table in self.tables.items()}
        return {
            "schema": self.SCHEMA,
            "run": self.run,
            "corpus": self.corpus,
            "options": self.options,
            "columns": columns,
        }

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return the values of columns as "table/column", and arrays by their names."""
        arrays = dict(self.grids)
        for name, table in self.tables.items():
            for column, values in table.values.items():
                arrays[f"{name}/{column}"] = values
        return arrays

    def as_json(self) -> dict[str, Any]:
        """Return the tables as lists of rows, and the arrays as lists; NaN becomes null."""
        tables = {}
        for name, table in self.tables.items():
            header, *rows = table.rows()
            tables[name] = [dict(zip(header, row, strict=True)) for row in rows]
        document: dict[str, Any] = plain({**self.describe(), **tables, **self.grids}, finite)
        return document

    def rows(self) -> Iterable[Sequence[Any]]:
        """Return the rows of its first table, which CSV holds."""
        return self.table(next(iter(self.TABLES))).rows()

    @classmethod
    def rebuild(cls, described: Mapping[str, Any], held: Mapping[str, Any]) -> Self:
        """Return the result that `describe` and `arrays` were made of; what is damaged raises anything."""
        tables = {}
        for name, columns in described["columns"].items():
            known = [Column.rebuild(column) for column in columns]
            prefix = f"{name}/"
            values = {key.removeprefix(prefix): held[key] for key in held if key.startswith(prefix)}
            tables[name] = Table({column.name: column for column in known}, values)
        grids = {name: held[name] for name in held if "/" not in name and name != _DESCRIPTION}
        return cls(described["run"], described["corpus"], described["options"], tables, grids)

    def require_whole(self) -> None:
        """Refuse tables and arrays that are not as the question declares them.

        Raises:
            ValueError: They are not.
        """
        if not isinstance(self.options, Mapping):
            raise ValueError("its options are no object")
        sizes = {name: len(table) for name, table in self.tables.items()}
        for name, table in self.tables.items():
            if _base(name) not in self.TABLES:
                raise ValueError(f"it has a table {name!r}, which it cannot have")
            table.require_sound(name, self.TABLES[_base(name)], sizes)
        for name, values in self.grids.items():
            array = self._array(name)
            _require_shape(name, values, array.axes, sizes, self.tables)
            require_values(name, values, array, sizes)
        if "heads" in self.tables and "layer" in self.tables["heads"]:
            names = self.table("heads").head_names(with_kind=True)
            if len({*names}) < len(names):
                raise ValueError("two of its heads are the same")

    def _array(self, name: str) -> Array:
        """Return what an array is; the ends of intervals may lie anywhere.

        Raises:
            ValueError: The question has no such array.
        """
        arrays = {array.name: array for array in self.ARRAYS}
        base = _base(name)
        if base in arrays:
            return arrays[base]
        measured, _, part = base.rpartition("_")
        if measured not in arrays or part not in PARTS:
            raise ValueError(f"it has an array {name!r}, which it cannot have")
        return replace(arrays[measured], range=(None, None))


def _base(name: str) -> str:
    """Return the name of a table or an array without its kind of attention."""
    return name.partition(":")[0]


def _renumber(table: Table, referred: str, new_places: NDArray[Any]) -> Table:
    """Return a table whose whole numbers that refer to another one are those of its rows after a selection."""
    values = dict(table.values)
    for name, column in table.columns.items():
        if column.refers_to == referred:
            values[name] = new_places[values[name]]
    return Table(table.columns, values)


def _require_shape(
    name: str, values: NDArray[Any], axes: Sequence[str], sizes: dict[str, int], tables: Collection[str]
) -> None:
    """Refuse an array that does not follow its axes; a size that was not known before is kept in `sizes`.

    Raises:
        ValueError: It does not.
    """
    fits = values.ndim == len(axes)
    for axis, size in zip(axes, values.shape, strict=False):
        of_kind = f"{axis}:{name.partition(':')[2]}"
        key = of_kind if of_kind in sizes or ":" in name and axis not in tables else axis
        wanted = int(axis) if axis.isdecimal() else sizes.setdefault(key, size)
        fits = fits and size == wanted
    if not fits:
        raise ValueError(f"the shape of its {name}, {values.shape}, does not fit {' x '.join(axes)}")
