"""What every result can do: save, load, draw and show itself. What it holds, and how that is checked, others say."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Self, TypedDict, Unpack

import numpy as np
from numpy.typing import NDArray

from attnscope.errors import AttnscopeError, UsageError, amount
from attnscope.results import reading
from attnscope.results.completion import failure_line
from attnscope.results.kinds import Kind, file_of, kind_of_schema, load_named
from attnscope.results.storage import csv_text, finite, plain, write_whole


class StyleOptions(TypedDict, total=False):
    """How figures look; None = as usual.

    Attributes:
        scale: Of maps: what the darkest colour means: weight 1 ("fixed"), each head's largest weight ("head"), or
            the figure's ("figure"). None = "fixed"; "figure" for rollout, "head" for pictures and sound.
        colours: Of maps: "linear", or "log" over four powers of ten; None = "linear".
        smooth: Over a photo: whether weights are interpolated between patches; None = a patch is a square.
        cmap: Of maps: name of a matplotlib colormap; None = "Blues".
        width: Width of each figure in inches, exactly, or such as "85mm", or "column" (3.3) or "page" (6.9); None = as
            wide as it needs to be.
        dpi: Pixels an inch of a PNG; None = 100, with a width 300.
        font_size: Size in points of the smallest letters; None = fitted to the figure, with a width 6.5.
        title: Whether a figure says above itself what it shows; None = it does.
        font: A font to take first: the name of an installed family, or a file.
    """

    scale: str | None
    cmap: str | None
    colours: str | None
    smooth: bool | None
    width: float | str | None
    dpi: int | None
    font_size: float | None
    title: bool | None
    font: str | None


_PLUMBING = frozenset({
    "ARRAYS", "ASCII", "COMPRESSED", "FIELDS", "MAPS", "SCHEMA", "STORED", "TABLES",
    "arrays", "as_json", "block", "content", "describe", "drawn_texts", "facts", "is_empty", "is_of_text",
    "more_arrays", "more_options", "more_tables", "read", "read_apart", "read_more", "rebuild", "record_kind",
    "require_sound", "require_whole", "shape", "style", "usual_scale",
})  # fmt: skip
"""Names that the package itself uses, which would crowd what a notebook completes."""


class Record:
    """A result that was measured: what it says, and the files that it becomes.

    Attributes:
        SCHEMA: The name and version of what describes it, such as "attnscope.heads/2".
        ASCII: Whether its JSON is written in ASCII alone.
        COMPRESSED: Whether the arrays of its npz are compressed.
    """

    SCHEMA: ClassVar[str]
    ASCII: ClassVar[bool] = False
    COMPRESSED: ClassVar[bool] = False

    # What it holds

    def describe(self) -> dict[str, Any]:
        """Return all but the arrays that are kept beside, schema first; NaN stays."""
        raise NotImplementedError

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return the arrays that an npz keeps beside what describes them, by name."""
        raise NotImplementedError

    @classmethod
    def rebuild(cls, described: Mapping[str, Any], held: Mapping[str, Any]) -> Self:
        """Return the record that `describe` and `arrays` were made of; what is damaged raises anything."""
        raise NotImplementedError

    def rows(self) -> Iterable[Sequence[Any]]:
        """Return the table that CSV holds, its header first."""
        raise NotImplementedError

    def require_whole(self) -> None:
        """Refuse a record whose parts do not fit each other, before a picture of it fails or lies.

        Raises:
            ValueError: They do not.
        """

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to draw."""
        return False

    @property
    def failed(self) -> tuple[str, ...]:
        """Parts of the study that failed, one sentence each; every view of the record shows them."""
        return tuple(failure_line(failure) for failure in getattr(self, "run", {}).get("failures", ()))

    @classmethod
    def record_kind(cls) -> Kind:
        """Return its entry in the table of kinds."""
        return kind_of_schema(cls.SCHEMA)

    def __dir__(self) -> list[str]:
        """What a notebook completes: what was measured, and what to do with it; not how it is stored and drawn."""
        return [name for name in super().__dir__() if name not in _PLUMBING]

    def __repr__(self) -> str:
        run, corpus = getattr(self, "run", {}), getattr(self, "corpus", {})
        parts = [f"{run['model']!r}"] if "model" in run else []
        if "n_texts" in corpus:
            parts.append(amount(corpus["n_texts"], "text"))
        for name, table in getattr(self, "tables", {}).items():
            if name in ("heads", "relations", "checkpoints") and len(table):
                parts.append(amount(len(table), name[:-1]))
                break
        return f"{type(self).__name__}({', '.join(parts)})"

    # Files

    def as_json(self) -> dict[str, Any]:
        """Return what its JSON holds, as plain values; NaN and infinities become null."""
        document: dict[str, Any] = plain({**self.describe(), **self.arrays()}, finite)
        return document

    def to_json(self, *, ascii_only: bool = False, **more: Any) -> str:
        """Return one JSON document.

        Args:
            ascii_only: Whether other characters are written as JSON escapes.
            more: Further members of the document, such as the files that were written.
        """
        return json.dumps({**self.as_json(), **more}, ensure_ascii=ascii_only, allow_nan=False)

    def to_csv(self, *, every: bool = False) -> str:
        """Return the table as CSV: a float has as many digits as it needs to be read back unchanged, NaN is empty.

        Args:
            every: Whether columns that few need are there too.
        """
        return csv_text(self.rows())

    def to_npz(self) -> bytes:
        """Return its arrays, and `record`, the bytes of the JSON that describes them; NaN and infinities stay."""
        file = io.BytesIO()
        described = np.frombuffer(json.dumps(plain(self.describe())).encode(), np.uint8)
        save = np.savez_compressed if self.COMPRESSED else np.savez
        save(file, allow_pickle=False, record=described, **self.arrays())
        return file.getvalue()

    def content(self, ending: str, *, every: bool = False) -> bytes:
        """Return what a file of an ending such as "npz" holds; `every` is that of `to_csv`.

        Raises:
            AttnscopeError: Records of this kind are not saved so.
        """
        kind = self.record_kind()
        if ending not in kind.data:
            known = " or ".join(", ".join(f".{name}" for name in kind.data).rsplit(", ", 1))
            named = f".{ending}" if ending else "no ending"
            raise AttnscopeError(f"{kind.with_article} is saved as {known}, not {named!r}")
        if ending == "json":
            # A folder's name that is no text holds lone surrogates; this writes them as JSON's own \udc80.
            return self.to_json(ascii_only=self.ASCII).encode("utf-8", "backslashreplace")
        options = {"every": every} if ending == "csv" else {}
        content: str | bytes = getattr(self, f"to_{ending}")(**options)
        return content if isinstance(content, bytes) else content.encode("utf-8", "backslashreplace")

    def save(self, path: str | Path, *, every: bool = False) -> Path:
        """Write the record, whole or not at all; the ending says how, and `.npz` is without loss.

        Args:
            path: Where to.
            every: Whether a CSV has the columns that few need, too.

        Raises:
            AttnscopeError: Records of this kind are not saved so, or the file cannot be written.
        """
        path = Path(path)
        return write_whole(path, self.content(path.suffix.removeprefix("."), every=every))

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a record that `save` wrote, without loss.

        Args:
            path: The file, or the folder that a command wrote it into.

        Raises:
            AttnscopeError: The file is not there, damaged, or a record of another kind.
        """
        return cls.read(file_of(Path(path), cls.record_kind()))

    @classmethod
    def read(cls, path: Path) -> Self:
        """As `load`, of the very file."""
        kind = cls.record_kind()
        with reading.reading(path, kind.what, kind.hint):
            described, held = reading.read_record(path, cls.SCHEMA)
            if isinstance(held.get("schema"), str):
                raise ValueError("it is the JSON of one, a copy for other programs")
            record = cls.rebuild(described, held)
            reading.require_shown(record)
            record.require_whole()
        return record

    # Figures, pages and notebooks

    def drawn_texts(self) -> Any:
        """Return what holds all texts that its figures may show, to find fonts for."""
        return self.describe()

    @property
    def usual_scale(self) -> str:
        """What the darkest colour of its figures means, unless it is said."""
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
        **style: Unpack[StyleOptions],
    ) -> list[Path]:
        """Draw the record's figures into a folder, each file whole or not at all.

        Args:
            folder: Where to; made if it is not there.
            formats: Some of "png", "svg", "pdf".
            query: Of maps: also draws what this token attends to in all heads: a token, a word, or `@3`, a place. Of
                a picture: whose attention is laid over it; see `attnscope.picture_heatmap`.
            measures: Of heads: the measures that have a large map each, such as "local,induction"; "all" is every one.
                None = no measure has one.
            style: How they look; None = as usual.

        Returns:
            The files, overview first.

        Raises:
            AttnscopeError: An unknown format, scale, colormap, size, font or token, or an option that this kind of
                record has no use for; the folder cannot be written.
        """
        kind = self.record_kind()
        wanted = [formats] if isinstance(formats, str) else list(formats)
        for name in wanted:
            if name not in kind.figures:
                known = ", ".join(kind.figures)
                hint = f"choose from {known}" if known else ""
                raise UsageError(f"{kind.with_article} is not drawn as {name!r}", hint)
        options = {"query": query, "measures": measures}
        # What only the terminal takes says nothing about figures.
        figures = replace(kind, shown_with=())
        figures.require_options([name for name, value in {**style, **options}.items() if value is not None])
        if not kind.draw:
            return []
        pages = kind.view("draw")(self, self.style(**style), **{name: options[name] for name in kind.drawn_with})
        paths: list[Path] = load_named("drawing.files:write_pages")(pages, folder, wanted)
        return paths

    def page(self, *, findings: Any = None) -> Any:
        """Return the record as one HTML file to look into all heads with; `.save(path)` writes it.

        Args:
            findings: Of attention: what `attnscope.heads` found about the heads of the same model; names their roles.

        Raises:
            AttnscopeError: Records of this kind have no page, or it would be more than a browser holds.
        """
        kind = self.record_kind()
        if not kind.page:
            raise AttnscopeError(f"{kind.with_article} has no page")
        return kind.view("page")(self, findings=findings)

    def _repr_html_(self) -> str:
        html: str = load_named("report.html:to_html")(self)
        return html


def load_record(path: str | Path) -> Record:
    """Read a record of any kind, which it is known by, not by its name; without loss.

    An npz archive of bare arrays is read as well: `weights` and `tokens`, as `record_from_arrays` takes them.

    Args:
        path: The file, or the folder that a command wrote it into.

    Raises:
        AttnscopeError: The file is not there, damaged, or no record.
    """
    path = file_of(Path(path))
    bare: Record | None = load_named("questions.arrays:load_arrays")(path)
    if bare is not None:
        return bare
    with reading.reading(path, "attnscope record", "give what a command wrote with -o, such as heads.npz"):
        schema = reading.schema_of(path) or reading.read_arrays(path)[1]["schema"]
        kind: type[Record] = kind_of_schema(schema).load_class()
    return kind.read(path)
