"""Hold what a study returns: tables, arrays along their rows, and their provenance. This module needs NumPy only.

`attnscope.questions` has a subclass of `Result` for each question, which declares its tables and arrays; `Result`
checks, saves, loads and draws them.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from attnscope.arrays import Floats
from attnscope.errors import AttnscopeError, UsageError, amount, suggest
from attnscope.results.kinds import SUFFIXES, ResultKind, find_record, kind_of_schema, load_named
from attnscope.results.reading import one_error_for_damage, read_record, read_schema, require_shown
from attnscope.results.storage import TABLE_WRITERS, finite_or_none, to_plain, write_whole
from attnscope.results.table import (
    COMPANIONS,
    Array,
    Column,
    Table,
    find_declaration,
    make_label,
    require_shape,
    require_values,
)

if TYPE_CHECKING:
    from attnscope.report.blocks import Report

_DESCRIPTION = "record"
"""The name of the array in an npz file that holds the JSON of `describe`; all others are those of `arrays`."""


@dataclass(frozen=True, eq=False, repr=False)
class Result:
    """The tables and arrays that answer a question.

    A model may have several kinds of attention, each with its own tables and arrays: "tokens:cross" is the table
    declared as "tokens", of cross-attention. The axis "tokens" of the array "weights:cross" then follows the table
    "tokens:cross", or "tokens" if the result has no such table.

    Attributes:
        SCHEMA: The name and version of its kind, such as "attnscope.heads/2".
        COMPRESSED: Whether its npz file is compressed.
        TABLES: The columns that each table must have, by its name without a kind. A CSV file holds the first table.
        ARRAYS: The declarations of its arrays. Each may have companions as columns do, such as `effect_low`.
        CSV: The names of two tables if a CSV file has a row for each pair of their rows; empty = it holds the first
            table.
        run: How it was made: model, sha256, versions, dtype, device, notes. Plain JSON values.
        corpus: The texts: sources, n_texts, n_tokens, sha256, problems, complete. Plain JSON values.
        options: The options of the study, and further facts about the result. Plain JSON values.
        tables: The tables by name.
        grids: The arrays that `ARRAYS` declares, by name. The method `arrays` also returns the columns of tables.
    """

    SCHEMA: ClassVar[str]
    # Compression shrinks files much, as NumPy pads all texts of a column to the length of the longest.
    COMPRESSED: ClassVar[bool] = True
    TABLES: ClassVar[Mapping[str, Sequence[Column]]] = {}
    ARRAYS: ClassVar[Sequence[Array]] = ()
    CSV: ClassVar[tuple[str, ...]] = ()

    run: Mapping[str, Any]
    corpus: Mapping[str, Any]
    options: Mapping[str, Any]
    tables: Mapping[str, Table]
    grids: Mapping[str, NDArray[Any]] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Any:
        """Return a table or an array by name."""
        return self.grids[name] if name in self.grids else self.table(name)

    def table(self, name: str) -> Table:
        """Return a table by name; an empty table if the study did not make it.

        Raises:
            KeyError: No such table is declared.
        """
        if name in self.tables:
            return self.tables[name]
        return Table.of(self.TABLES[_base_name(name)], [])

    def interval(self, name: str) -> Floats:
        """Return the values of an array, and the low and high ends of their 95% intervals, (..., 3); NaN = unknown."""
        values = self.grids[name]
        unknown = np.full(values.shape, np.nan)
        # The low ends of "effect:cross" are in "effect_low:cross".
        base_name, colon, kind = name.partition(":")
        low = self.grids.get(f"{base_name}_low{colon}{kind}", unknown)
        high = self.grids.get(f"{base_name}_high{colon}{kind}", unknown)
        return np.stack([values, low, high], -1)

    @property
    def head_names(self) -> list[str]:
        """Return the name of each row of its table of heads, such as L3H1; "cross L3H1" if it has several kinds."""
        heads = self.table("heads")
        attention_kinds = self.run.get("kinds") or heads["kind"].tolist()
        return heads.head_names(with_kind=len({*attention_kinds}) > 1)

    @property
    def file_table(self) -> Table:
        """Return its first table, which CSV, LaTeX and Markdown files hold unless `CSV` names two tables."""
        return self.table(next(iter(self.TABLES)))

    @property
    def is_empty(self) -> bool:
        """Return whether its first table has no rows, as after an interruption."""
        return not len(self.file_table)

    def report(self) -> Report:
        """Return what the terminal, figures and pages show of the result. Subclasses may take options."""
        raise NotImplementedError

    def select(self, table: str, rows: Any) -> Self:
        """Return the result with only some rows of a table. Arrays along the table lose the other rows, too.

        Columns of other tables that hold indices of its rows (`Column.refers_to`) get the new indices; -1 if the row is
        gone.

        Args:
            table: The name of the table.
            rows: A boolean mask, or indices of rows in their new order.
        """
        n_rows = len(self.table(table))
        chosen = np.arange(n_rows)[rows]
        # The new index of each row, by its old index; -1 for rows that are gone. The extra last entry stays -1: the old
        # index -1, which means no row, reads that entry.
        new_indices = np.full(n_rows + 1, -1)
        new_indices[chosen] = np.arange(len(chosen))
        tables = {
            name: _renumber_references(other_table, table, new_indices)
            for name, other_table in self.tables.items()
        }
        tables[table] = tables[table].select(chosen)
        # Arrays lose the rows along each axis that follows the table.
        grids = dict(self.grids)
        for name in grids:
            for axis, axis_name in enumerate(self._find_array(name).axes):
                if axis_name == table:
                    grids[name] = np.take(grids[name], chosen, axis)
        return replace(self, tables=tables, grids=grids)

    def only(self, picked: Sequence[tuple[int, int]]) -> Self:
        """Return the result with only some heads, each (layer, head), of every kind of attention.

        Raises:
            UsageError: It has no such head.
        """
        self.require_heads(picked)
        chosen = self.select(
            "heads", [layer_head in picked for layer_head in self.table("heads").layer_heads]
        )
        # A table whose first column refers to rows of another table, such as terms of heads, loses the rows whose head
        # is gone: their index is -1.
        for name, columns in self.TABLES.items():
            if columns[0].refers_to and name in chosen.tables:
                chosen = chosen.select(name, chosen.table(name)[columns[0].name] >= 0)
        return chosen

    def require_heads(self, picked: Sequence[tuple[int, int]]) -> None:
        """Raise a UsageError if any of these heads, each (layer, head), is not in the result."""
        layer_heads = self.table("heads").layer_heads
        for layer, head in picked:
            if (layer, head) not in layer_heads:
                raise UsageError(
                    f"there is no head L{layer}H{head} in this {self.record_kind().noun}",
                    f"it has {amount(len(layer_heads), 'head')}",
                )

    @property
    def failed(self) -> tuple[str, ...]:
        """Return a line for each part of the study that failed; every view of the result shows them."""
        return tuple(failure_line(failure) for failure in self.run.get("failures", ()))

    @classmethod
    def record_kind(cls) -> ResultKind:
        """Return its entry in `results.kinds`."""
        return kind_of_schema(cls.SCHEMA)

    def __repr__(self) -> str:
        descriptions = [repr(self.run["model"])] if "model" in self.run else []
        if "n_texts" in self.corpus:
            descriptions.append(amount(self.corpus["n_texts"], "text"))
        descriptions += [f"{len(table)} {name}" for name, table in self.tables.items()]
        return f"{type(self).__name__}({', '.join(descriptions)})"

    # Files

    def describe(self) -> dict[str, Any]:
        """Return everything except the values of columns and arrays, the schema first."""
        # Files declare their columns, so that other programs can read them.
        columns = {}
        for name, table in self.tables.items():
            columns[name] = [asdict(column) for column in table.columns.values()]
        return {
            "schema": self.SCHEMA,
            "run": self.run,
            "corpus": self.corpus,
            "options": self.options,
            "columns": columns,
        }

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return all arrays of its npz file: the values of columns as "table/column", and `grids` by their names."""
        arrays = dict(self.grids)
        for name, table in self.tables.items():
            for column, values in table.values.items():
                arrays[f"{name}/{column}"] = values
        return arrays

    def as_json(self) -> dict[str, Any]:
        """Return `describe`, tables as lists of rows, and arrays as nested lists; NaN and infinities are None."""
        tables = {name: table.as_dicts() for name, table in self.tables.items()}
        json_values: dict[str, Any] = to_plain(
            {**self.describe(), **tables, **self.grids}, finite_or_none
        )
        return json_values

    def to_json(self, **members: Any) -> str:
        """Return `as_json` as one document, with further members such as the files that were written."""
        return json.dumps({**self.as_json(), **members}, ensure_ascii=False, allow_nan=False)

    def rows(self) -> Iterable[Sequence[Any]]:
        """Return the names of columns, then all rows, of the table that CSV, LaTeX and Markdown files hold."""
        if not self.CSV:
            return self.file_table.rows()
        # A row for each pair of rows of the two tables. These are the indices of the rows of a pair, each (pair,).
        first_table, second_table = (self.table(name) for name in self.CSV)
        first_rows, second_rows = np.indices((len(first_table), len(second_table))).reshape(2, -1)
        columns = {**first_table.select(first_rows).values, **second_table.select(second_rows).values}
        # An array along both tables becomes a column. If its first axis follows a third table, each row of that table
        # gives a column, such as "effect_clean": the name of the array, then the name of the row.
        for name, values in self.grids.items():
            axes = self._find_array(name).axes
            if axes == self.CSV:
                columns[name] = values.ravel()
            elif axes[1:] == self.CSV:
                for label, pair_values in zip(self.table(axes[0])["name"].tolist(), values, strict=True):
                    columns[f"{name}_{label}"] = pair_values.ravel()
        return Table({}, columns).rows()

    @property
    def usual_columns(self) -> Sequence[str]:
        """Return the columns that table files have unless the user asks for all or names some; empty = all columns."""
        return ()

    def _iterate_chosen_rows(self, columns: Sequence[str], *, every: bool) -> Iterator[Sequence[Any]]:
        """Yield the names of the chosen columns, then their values of each row; see `to_csv` for the arguments.

        Raises:
            UsageError: It has no such column.
        """
        # The first row of `rows` has the names of the columns.
        rows = iter(self.rows())
        header = list(next(rows))
        # The hint of the error does not suggest companions, such as effect_low.
        known_columns = [name for name in header if name.rpartition("_")[2] not in COMPANIONS]
        for name in columns:
            if name not in header:
                raise UsageError(f"there is no column {name!r}", suggest(name, known_columns))
        usual_names = [] if every else [name for name in self.usual_columns if name in header]
        indices = [header.index(name) for name in columns or usual_names or header]
        yield [header[index] for index in indices]
        for row in rows:
            yield [row[index] for index in indices]

    def to_csv(self, *, every: bool = False, columns: Sequence[str] = ()) -> str:
        """Return the table as CSV: a float has as many digits as it needs to be read back unchanged, NaN is empty.

        Args:
            every: Whether the table has all columns, not only the usual ones.
            columns: The names of its columns, in their order; empty = the columns that `every` selects.
        """
        return self.to_table("csv", every=every, columns=columns)

    def to_table(
        self, format_name: str, *, every: bool = False, columns: Sequence[str] = (), **shown: Any
    ) -> str:
        """Return the table in one of `TABLE_FORMATS`; see `to_csv`. LaTeX needs the package booktabs.

        LaTeX and Markdown are for people. Columns have labels in place of names. Without `every`, the rows are those
        that the terminal lists, or all rows if it lists none. `shown` are options of `report`, such as `sort`.
        """
        rows = self._iterate_chosen_rows(columns, every=every)
        if format_name == "csv":
            return TABLE_WRITERS[format_name](rows)
        names, *body = rows
        labels = [make_label(name, self.file_table.columns) for name in names]
        if not every:
            body = [body[row] for row in self.find_listed_rows(**shown)] or body
        return TABLE_WRITERS[format_name](iter([labels, *body]))

    def find_listed_rows(self, **shown: Any) -> list[int]:
        """Find the rows of the table of files that the terminal lists; see `to_table`."""
        return self.report(**shown).find_listed_rows(self.file_table)

    def to_npz(self) -> bytes:
        """Return the bytes of an npz file: its arrays, and the JSON of `describe` as bytes. NaN and infinities stay."""
        file = io.BytesIO()
        description = np.frombuffer(json.dumps(to_plain(self.describe())).encode(), np.uint8)
        save = np.savez_compressed if self.COMPRESSED else np.savez
        save(file, allow_pickle=False, **{_DESCRIPTION: description}, **self.arrays())
        return file.getvalue()

    def save(
        self, path: str | Path, *, every: bool = False, columns: Sequence[str] = (), **shown: Any
    ) -> Path:
        """Write the result to a file, completely or not at all. The suffix names the format; `.npz` is without loss.

        Args:
            path: The name of the file.
            every: Whether a table has all columns and rows; see `to_table`.
            columns: The columns of a table (`.csv`, `.tex`, `.md`), in their order; empty = the columns that
                `every` selects.
            shown: Options that choose the rows of `.tex` and `.md`; see `to_table`.

        Raises:
            AttnscopeError: Results of this kind have no such format, there is no such column, or the file cannot be
                written.
        """
        path = Path(path)
        kind = self.record_kind()
        formats = {f".{SUFFIXES.get(name, name)}": name for name in kind.data_formats}
        if path.suffix not in formats:
            raise AttnscopeError(
                f"{kind.with_article} is not saved as {path.name!r}", f"choose from {', '.join(formats)}"
            )
        chosen = formats[path.suffix]
        content: str | bytes
        if chosen in TABLE_WRITERS:
            content = self.to_table(chosen, every=every, columns=columns, **shown)
        else:
            # These are methods such as `to_npz`, or `to_py` of a trace.
            content = getattr(self, f"to_{chosen}")()
        if isinstance(content, str):
            # Names of files that are not valid UTF-8 hold lone surrogates, which are written as \udc80.
            content = content.encode("utf-8", "backslashreplace")
        return write_whole(path, content)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a result that `save` wrote, without loss.

        Args:
            path: The file, or the folder that a command wrote it into.

        Raises:
            AttnscopeError: The file is not there, damaged, or a result of another kind.
        """
        kind = cls.record_kind()
        path = find_record(Path(path), kind)
        with one_error_for_damage(path, kind.noun, kind.hint):
            description, arrays = read_record(path, cls.SCHEMA)
            require_shown(description["run"], description["corpus"])
            result = cls.rebuild(description, arrays)
            result.require_whole()
        return result

    @classmethod
    def rebuild(cls, description: Mapping[str, Any], arrays: Mapping[str, Any]) -> Self:
        """Return the result from what its `describe` and `arrays` returned. Damaged values may raise any error."""
        # Arrays with a slash in their name are columns of tables, such as "heads/effect".
        tables = {}
        for name, columns in description["columns"].items():
            columns_by_name = {column["name"]: Column.rebuild(column) for column in columns}
            prefix = f"{name}/"
            values = {key.removeprefix(prefix): arrays[key] for key in arrays if key.startswith(prefix)}
            tables[name] = Table(columns_by_name, values)
        grids = {name: arrays[name] for name in arrays if "/" not in name and name != _DESCRIPTION}
        return cls(description["run"], description["corpus"], description["options"], tables, grids)

    def require_whole(self) -> None:
        """Refuse a result that was loaded from a damaged file.

        Raises:
            ValueError: Its tables and arrays are not as its class declares them. Subclasses check more.
        """
        if not isinstance(self.options, Mapping):
            raise ValueError("its options are no object")
        self.require_declared(self.tables, self.grids)

    @classmethod
    def require_declared(cls, tables: Mapping[str, Table], grids: Mapping[str, NDArray[Any]]) -> None:
        """Refuse tables and arrays that are not as the class declares them.

        Raises:
            ValueError: A table or an array is not declared, or has another shape, type or range. A head occurs twice.
        """
        # Tables have the columns that are declared for their name.
        sizes = {name: len(table) for name, table in tables.items()}
        for name, table in tables.items():
            if _base_name(name) not in cls.TABLES:
                raise ValueError(f"it has a table {name!r}, which it cannot have")
            table.require_valid(name, cls.TABLES[_base_name(name)], sizes)
        # Arrays have the axes, the type and the range that are declared.
        axis_sizes = sizes
        for name, values in grids.items():
            array = cls._find_array(name)
            axis_sizes = require_shape(name, values, array.axes, axis_sizes, tables)
            require_values(name, values, array, sizes)
        if "heads" in tables and "layer" in tables["heads"]:
            names = tables["heads"].head_names(with_kind=True)
            if len({*names}) < len(names):
                raise ValueError("two of its heads are the same")

    @classmethod
    def _find_array(cls, name: str) -> Array:
        """Return the declaration of an array or of its companion, such as `effect_low`."""
        return find_declaration(_base_name(name), {array.name: array for array in cls.ARRAYS})

    # Figures, pages and notebooks

    @property
    def usual_scale(self) -> str:
        """Return the scale of colours of its figures if no option names one."""
        return "fixed"

    def style(self, **options: Any) -> Any:
        """Return the style of its figures, a `drawing.style.Style`. Options that are None get their defaults.

        Raises:
            UsageError: There is no such scale, colormap, size or font.
        """
        chosen = {name: value for name, value in options.items() if value is not None}
        defaults = {"scale": self.usual_scale, "failed": self.failed}
        return load_named("drawing.style:Style")(**defaults | chosen)

    def draw(
        self,
        folder: str | Path,
        formats: str | Sequence[str] = ("png",),
        *,
        query: str | None = None,
        measures: str | None = None,
        **style: Any,
    ) -> list[Path]:
        """Draw its figures into a folder. Each file is written completely or not at all.

        Args:
            folder: The folder, which is made if it does not exist.
            formats: Some of "png", "svg", "pdf".
            query: For maps: also draw the attention of this token in all heads; a token, a word, or its place, `@3`.
                For a picture: lay this token's attention over it; see `attnscope.picture_heatmap`.
            measures: For heads: draw a large map of each of these measures, such as "local,induction", or "all".
            style: Attributes of `drawing.style.Style`; None = their defaults.

        Returns:
            The files, overview first.

        Raises:
            AttnscopeError: An unknown format, scale, colormap, size, font or token, or an option that this kind of
                result has no use for; the folder cannot be written.
        """
        kind = self.record_kind()
        wanted = [formats] if isinstance(formats, str) else list(formats)
        for name in wanted:
            if name not in kind.figure_formats:
                raise UsageError(
                    f"{kind.with_article} is not drawn as {name!r}", ", ".join(kind.figure_formats)
                )
        options = {"query": query, "measures": measures}
        # Without `shown_with`, options that only the terminal has are refused like unknown options.
        chosen = [name for name, value in {**style, **options}.items() if value is not None]
        replace(kind, shown_with=()).require_options(chosen)
        # A kind without figures gets here if `formats` is empty.
        if not kind.draw:
            return []
        drawn_with = {name: options[name] for name in kind.drawn_with}
        pages = kind.resolve("draw")(self, self.style(**style), **drawn_with)
        paths: list[Path] = load_named("drawing.files:write_pages")(pages, folder, wanted)
        return paths

    def page(self, *, findings: Any = None) -> Any:
        """Return one HTML file in which all heads can be explored; `.save(path)` writes it.

        Args:
            findings: For maps: the result of `attnscope.heads` on the same model, whose roles the page names.

        Raises:
            AttnscopeError: Results of this kind have no page, or it would be more than a browser holds.
        """
        kind = self.record_kind()
        if not kind.page:
            raise AttnscopeError(f"{kind.with_article} has no page")
        return kind.resolve("page")(self, findings=findings)

    def _repr_html_(self) -> str:
        html: str = load_named("report.plain_text:to_html")(self)
        return html


def load_record(path: str | Path) -> Result:
    """Read a result of any kind, without loss. The kind is read from the file, not from its name.

    Args:
        path: The file, or the folder that a command wrote it into.

    Raises:
        AttnscopeError: The file is not there, damaged, or no record.
    """
    path = find_record(Path(path))
    hint = "give what a command wrote with -o, such as heads.npz"
    with one_error_for_damage(path, "attnscope record", hint):
        result_class: type[Result] = kind_of_schema(read_schema(path)).resolve("result")
    return result_class.load(path)


def is_interrupted(corpus: Mapping[str, Any]) -> bool:
    """Return whether a study was stopped before it had processed all of its texts."""
    return not corpus.get("complete", True)


def failure_line(failure: Mapping[str, str]) -> str:
    """Return a line on a failure of a run, such as "describing the heads failed: not enough memory"."""
    return f"{failure['step']} failed: {failure['error']}"


def settle_corpus(corpus: Mapping[str, Any], *, interrupted: bool) -> dict[str, Any]:
    """Return a `corpus` after a step of its study. It is complete if it was before and the step was, too."""
    return {**corpus, "complete": not (interrupted or is_interrupted(corpus))}


def _base_name(name: str) -> str:
    """Return the name of a table or an array without its kind of attention: "tokens" for "tokens:cross"."""
    return name.partition(":")[0]


def _renumber_references(table: Table, selected: str, new_indices: NDArray[Any]) -> Table:
    """Return a table whose references to rows of the table `selected` are replaced by `new_indices`, (old row,)."""
    values = dict(table.values)
    for name, column in table.columns.items():
        if column.refers_to == selected:
            values[name] = new_indices[values[name]]
    return Table(table.columns, values)
