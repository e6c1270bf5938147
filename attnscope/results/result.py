"""What every study returns: tables, arrays along their rows, and where they come from. NumPy only.

A question declares its tables and arrays once, in `attnscope.questions`; files, the terminal, figures and pages read
these declarations. One class checks, saves, loads and draws them all.
"""

from __future__ import annotations

import io
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from attnscope.errors import AttnscopeError, UsageError, amount, suggest
from attnscope.results import reading
from attnscope.results.kinds import ENDINGS, Kind, file_of, kind_of_schema, load_named
from attnscope.results.storage import TABLES, finite, plain, write_whole
from attnscope.results.table import PARTS, Array, Column, Floats, Table, declared, require_values

if TYPE_CHECKING:
    from attnscope.report.blocks import Report

_DESCRIPTION = "record"
"""The member of an archive that describes the others."""


@dataclass(frozen=True, eq=False, repr=False)
class Result:
    """The tables and arrays that answer a question.

    A table or an array of one kind of attention has the kind after a colon in its name, such as "tokens:cross". Its
    axes then follow the tables of that kind, where there are such.

    Attributes:
        SCHEMA: The name and version of its kind, such as "attnscope.heads/2".
        COMPRESSED: Whether the arrays of its npz are compressed.
        TABLES: The columns that each table has; a table may have more, which it describes itself. CSV holds the first.
        CSV: Two tables of which CSV has a row per pair of rows, with the arrays along both.
        ARRAYS: What each array is. The ends of intervals stand in arrays of their own, such as `effect_low`.
        run: What made it: model, sha256, versions, dtype, device, notes. Plain JSON values.
        corpus: What it was made on: sources, n_texts, n_tokens, sha256, problems, complete. Plain JSON values.
        options: What was chosen, and what names mean. Plain JSON values.
        tables: The tables by name.
        grids: The arrays by name.
    """

    SCHEMA: ClassVar[str]
    COMPRESSED: ClassVar[bool] = True  # columns of texts are mostly blanks
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
        """Return what the rows of its table of heads are called, with their kind where there are several kinds."""
        heads = self.table("heads")
        kinds = self.run.get("kinds") or heads["kind"].tolist()
        return heads.head_names(with_kind=len({*kinds}) > 1)

    @property
    def is_empty(self) -> bool:
        """Return whether its first table is empty, as after an interruption."""
        return bool(self.TABLES) and not len(self.table(next(iter(self.TABLES))))

    def report(self) -> Report:
        """Return the report: blocks that the terminal, figures and pages draw.

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
        # New row numbers by old ones, (row + 1,).
        chosen = self.table(table)
        places = np.arange(len(chosen))[rows]
        new_places = np.full(len(chosen) + 1, -1)  # its last entry stands for -1
        new_places[places] = np.arange(len(places))
        # Other tables refer to the new numbers.
        tables = {name: _renumber(other, table, new_places) for name, other in self.tables.items()}
        tables[table] = tables[table].select(places)
        # Arrays keep the chosen rows along every axis that is named for the table.
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
        self.require_heads(picked)
        # Rows of heads, then of tables that belong to heads.
        wanted = {*picked}
        chosen = self.select("heads", [place in wanted for place in self.table("heads").places])
        for name, columns in self.TABLES.items():
            if columns[0].refers_to and name in chosen.tables:
                chosen = chosen.select(name, chosen.table(name)[columns[0].name] >= 0)
        return chosen

    def require_heads(self, picked: Sequence[tuple[int, int]]) -> None:
        """Refuse heads, (layer, head), that are not in it, by a UsageError."""
        places = self.table("heads").places
        for layer, head in picked:
            if (layer, head) not in places:
                where = f"this {self.record_kind().what}"
                raise UsageError(
                    f"there is no head L{layer}H{head} in {where}",
                    f"it has {amount(len(places), 'head')}",
                )

    @property
    def failed(self) -> tuple[str, ...]:
        """Return a sentence for each part of the study that failed; every view of the result shows them."""
        return tuple(failure_line(failure) for failure in self.run.get("failures", ()))

    @classmethod
    def record_kind(cls) -> Kind:
        """Return its entry in the table of kinds."""
        return kind_of_schema(cls.SCHEMA)

    def __repr__(self) -> str:
        parts = [repr(self.run["model"])] if "model" in self.run else []
        if "n_texts" in self.corpus:
            parts.append(amount(self.corpus["n_texts"], "text"))
        parts += [f"{len(table)} {name}" for name, table in self.tables.items()]
        return f"{type(self).__name__}({', '.join(parts)})"

    # Files

    def describe(self) -> dict[str, Any]:
        """Return all but the values of columns and arrays, the schema first."""
        columns = {
            name: [asdict(column) for column in table.columns.values()]
            for name, table in self.tables.items()
        }
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
        """Return what describes it, tables as lists of rows, and arrays as lists; NaN becomes null."""
        tables = {name: table.as_dicts() for name, table in self.tables.items()}
        document: dict[str, Any] = plain({**self.describe(), **tables, **self.grids}, finite)
        return document

    def to_json(self, **more: Any) -> str:
        """Return one JSON document, with further members such as the files that were written."""
        return json.dumps({**self.as_json(), **more}, ensure_ascii=False, allow_nan=False)

    def rows(self) -> Iterable[Sequence[Any]]:
        """Return all rows of its table in files, the names of columns first.

        It is its first table, or one with a row per pair of rows of the two tables that `CSV` names.
        """
        if not self.CSV:
            return self.table(next(iter(self.TABLES))).rows()
        first, second = (self.table(name) for name in self.CSV)
        outer, inner = np.indices((len(first), len(second))).reshape(2, -1)
        columns = {**first.select(outer).values, **second.select(inner).values}
        # Arrays along both tables; those with a third axis before have a column for each row of its table.
        for name, values in self.grids.items():
            axes = tuple(self._array(name).axes)
            if axes == self.CSV:
                columns[name] = values.ravel()
            elif axes[1:] == self.CSV:
                for label, part in zip(self.table(axes[0])["name"].tolist(), values, strict=True):
                    columns[f"{name}_{label}"] = part.ravel()
        return Table({}, columns).rows()

    @property
    def usual_columns(self) -> Sequence[str]:
        """Return the columns that files have unless all are asked for; none = they have all."""
        return ()

    def _chosen_rows(self, columns: Sequence[str], *, every: bool) -> Iterator[Sequence[Any]]:
        """Yield the rows of its table in files with some columns, the names first.

        Raises:
            UsageError: It has no such column.
        """
        rows = iter(self.rows())
        header = [*next(rows)]
        # A hint names columns without what stands beside them, such as effect_low.
        known = [name for name in header if name.rpartition("_")[2] not in PARTS]
        for name in columns:
            if name not in header:
                raise UsageError(f"there is no column {name!r}", suggest(name, known))
        usual = [] if every else [name for name in self.usual_columns if name in header]
        places = [header.index(name) for name in columns or usual or header]
        yield [header[place] for place in places]
        for row in rows:
            yield [row[place] for place in places]

    def to_csv(self, *, every: bool = False, columns: Sequence[str] = ()) -> str:
        """Return the table as CSV: a float has as many digits as it needs to be read back unchanged, NaN is empty.

        Args:
            every: Whether it has the columns that few need, too.
            columns: Its columns, in their order; none = the usual ones.
        """
        return self.to_table("csv", every=every, columns=columns)

    def to_table(self, form: str, *, every: bool = False, columns: Sequence[str] = ()) -> str:
        """Return the table as one of `TABLE_FORMATS`; see `to_csv`. LaTeX needs the package booktabs."""
        return TABLES[form](self._chosen_rows(columns, every=every))

    def to_npz(self) -> bytes:
        """Return its arrays, and `record`, the bytes of the JSON that describes them; NaN and infinities stay."""
        file = io.BytesIO()
        described = np.frombuffer(json.dumps(plain(self.describe())).encode(), np.uint8)
        save = np.savez_compressed if self.COMPRESSED else np.savez
        save(file, allow_pickle=False, **{_DESCRIPTION: described}, **self.arrays())
        return file.getvalue()

    def save(self, path: str | Path, *, every: bool = False, columns: Sequence[str] = ()) -> Path:
        """Write the result, whole or not at all; the ending says how, and `.npz` is without loss.

        Args:
            path: Where to.
            every: Whether a table has the columns that few need, too.
            columns: The columns of a table (`.csv`, `.tex`, `.md`), in their order; none = the usual ones.

        Raises:
            AttnscopeError: Results of this kind are not saved so, there is no such column, or the file cannot be
                written.
        """
        path = Path(path)
        kind = self.record_kind()
        formats = {ENDINGS.get(name, name): name for name in kind.data}
        chosen = formats.get(path.suffix.removeprefix("."))
        if chosen is None:
            known = ", ".join(f".{ending}" for ending in formats)
            raise AttnscopeError(
                f"{kind.with_article} is not saved as {path.name!r}", f"choose from {known}"
            )
        content: str | bytes
        if chosen in TABLES:
            content = self.to_table(chosen, every=every, columns=columns)
        else:
            content = getattr(self, f"to_{chosen}")()
        if isinstance(content, str):
            # A folder's name that is no text holds lone surrogates; this writes them as JSON's own \udc80.
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
        path = file_of(Path(path), kind)
        with reading.reading(path, kind.what, kind.hint):
            described, arrays = reading.read_record(path, cls.SCHEMA)
            # What is said of the tables, then how they fit together.
            reading.require_shown(described["run"], described["corpus"])
            result = cls.rebuild(described, arrays)
            result.require_whole()
        return result

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
        self.require_declared(self.tables, self.grids)

    @classmethod
    def require_declared(cls, tables: Mapping[str, Table], grids: Mapping[str, NDArray[Any]]) -> None:
        """Refuse tables and arrays that are not as the question declares them.

        Raises:
            ValueError: They are not.
        """
        # Tables have the columns that are declared for their name.
        sizes = {name: len(table) for name, table in tables.items()}
        for name, table in tables.items():
            if _base(name) not in cls.TABLES:
                raise ValueError(f"it has a table {name!r}, which it cannot have")
            table.require_sound(name, cls.TABLES[_base(name)], sizes)
        # Arrays have the axes and the range that are declared.
        for name, values in grids.items():
            array = cls._array(name)
            _require_shape(name, values, array.axes, sizes, tables)
            require_values(name, values, array, sizes)
        # Heads are told apart by their names.
        if "heads" in tables and "layer" in tables["heads"]:
            names = tables["heads"].head_names(with_kind=True)
            if len({*names}) < len(names):
                raise ValueError("two of its heads are the same")

    @classmethod
    def _array(cls, name: str) -> Array:
        """Return what an array is; see `declared`."""
        return declared({array.name: array for array in cls.ARRAYS}, _base(name))

    # Figures, pages and notebooks

    def drawn_texts(self) -> Any:
        """Return what holds all texts that its figures may show, to find fonts for."""
        return self.describe()

    @property
    def usual_scale(self) -> str:
        """Return what the darkest colour of its figures means, unless an option says it."""
        return "fixed"

    def style(self, **options: Any) -> Any:
        """Return how its figures are drawn, a `drawing.style.Style`: by options, and as usual where they are None.

        Raises:
            UsageError: There is no such scale, colormap, size or font.
        """
        chosen = {name: value for name, value in options.items() if value is not None}
        usual = {"scale": self.usual_scale, "failed": self.failed}
        return load_named("drawing.style:Style")(**usual | chosen)

    def draw(
        self,
        folder: str | Path,
        formats: str | Sequence[str] = ("png",),
        *,
        query: str | None = None,
        measures: str | None = None,
        **style: Any,
    ) -> list[Path]:
        """Draw its figures into a folder, each file whole or not at all.

        Args:
            folder: Where to; made if it is not there.
            formats: Some of "png", "svg", "pdf".
            query: Of maps: also draws what this token attends to in all heads: a token, a word, or `@3`, a place. Of
                a picture: whose attention is laid over it; see `attnscope.picture_heatmap`.
            measures: Of heads: the measures that have a large map each, such as "local,induction"; "all" is every one.
                None = no measure has one.
            style: How they look, as the attributes of `drawing.style.Style`; None = as usual.

        Returns:
            The files, overview first.

        Raises:
            AttnscopeError: An unknown format, scale, colormap, size, font or token, or an option that this kind of
                result has no use for; the folder cannot be written.
        """
        kind = self.record_kind()
        wanted = [formats] if isinstance(formats, str) else list(formats)
        for name in wanted:
            if name not in kind.figures:
                raise UsageError(
                    f"{kind.with_article} is not drawn as {name!r}", ", ".join(kind.figures)
                )
        options = {"query": query, "measures": measures}
        # What only the terminal takes says nothing about figures.
        figures = replace(kind, shown_with=())
        figures.require_options(
            [name for name, value in {**style, **options}.items() if value is not None]
        )
        if not kind.draw:
            return []
        pages = kind.view("draw")(
            self, self.style(**style), **{name: options[name] for name in kind.drawn_with}
        )
        paths: list[Path] = load_named("drawing.files:write_pages")(pages, folder, wanted)
        return paths

    def page(self, *, findings: Any = None) -> Any:
        """Return it as one HTML file to look into all heads with; `.save(path)` writes it.

        Args:
            findings: Of attention: what `attnscope.heads` found about the heads of the same model; names their roles.

        Raises:
            AttnscopeError: Results of this kind have no page, or it would be more than a browser holds.
        """
        kind = self.record_kind()
        if not kind.page:
            raise AttnscopeError(f"{kind.with_article} has no page")
        return kind.view("page")(self, findings=findings)

    def _repr_html_(self) -> str:
        html: str = load_named("report.plain_text:to_html")(self)
        return html


def load_record(path: str | Path) -> Result:
    """Read a result of any kind, which it is known by, not by its name; without loss.

    Args:
        path: The file, or the folder that a command wrote it into.

    Raises:
        AttnscopeError: The file is not there, damaged, or no record.
    """
    path = file_of(Path(path))
    with reading.reading(
        path, "attnscope record", "give what a command wrote with -o, such as heads.npz"
    ):
        kind: type[Result] = kind_of_schema(reading.read_schema(path)).view("result")
    return kind.load(path)


def is_interrupted(corpus: Mapping[str, Any]) -> bool:
    """Return whether a study was stopped before it had seen all of its texts."""
    return not corpus.get("complete", True)


def failure_line(failure: Mapping[str, str]) -> str:
    """Return a line such as "describing the heads failed: not enough memory", of one failure of a run."""
    return f"{failure['step']} failed: {failure['error']}"


def settle_corpus(corpus: Mapping[str, Any], *, interrupted: bool = False) -> dict[str, Any]:
    """Return what a result says of its corpus after a further step, which may have been interrupted."""
    return {**corpus, "complete": not (interrupted or is_interrupted(corpus))}


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
