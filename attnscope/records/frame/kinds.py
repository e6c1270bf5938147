"""The kinds of records: what each is called, its files, and by what it is read and shown. Names, imported on use."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from attnscope.errors import UsageError

FIGURE_FORMATS = ("png", "svg", "pdf")

PAGE_FORMATS = ("html",)

SIZES = ("width", "dpi", "font_size", "title", "font")
"""Options of how any figure is drawn."""

KNOWN = ("drawn", "among")
"""What `show` is told that is no option: whether maps are drawn, and the record that heads were picked from."""

WHICH = ("pick", "layers", "heads")
"""Options that say which heads of a record are shown."""

REPORT, FIGURES = "attnscope.report.terminal:show", "attnscope.report.figures:pages"
"""What shows and draws a `results.Result`."""

NOTEBOOK = "attnscope.report.html:to_html"
"""What shows a record of any kind in a notebook."""


@dataclass(frozen=True)
class Kind:
    """A kind of record. Where a field names a function or a class, it is as "module:name".

    Attributes:
        schema: The name of what describes it, without the version.
        what: What it is called.
        record: Its class.
        command: The command that makes it.
        stem: The name of its files in a folder, without ending.
        data: The formats that hold what it says.
        usual: The formats that are written into a folder if none is named.
        show: What the terminal shows of it: `(record, console, **shown_with)`, for rich to print; None = nothing.
        draw: What draws it: `(record, style, **drawn_with)`, figures one after the other; empty = it has none.
        glance: What makes the picture that a notebook shows: `(record) -> PNG`; empty = it shows none.
        query: What refuses a query that no token is meant by: `(record, query)`; empty = there are no queries.
        page: What makes its HTML page: `(record, findings=...)`; empty = it has none.
        shown_with: What `show` takes: options, and some of `KNOWN`.
        drawn_with: What `draw` takes beside the style: options.
        others: Options that neither of these takes: of the style, of the page, or of which heads.
        lossless: The formats that it can be loaded from.
    """

    schema: str
    what: str
    record: str
    command: str
    stem: str
    data: tuple[str, ...]
    usual: tuple[str, ...]
    show: str
    draw: str = ""
    glance: str = ""
    query: str = ""
    page: str = ""
    shown_with: tuple[str, ...] = ()
    drawn_with: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    lossless: tuple[str, ...] = ("npz",)

    @property
    def one(self) -> str:
        """What one of them is called, with its article."""
        return f"{'an' if self.what[0] in 'aeiou' else 'a'} {self.what}"

    @property
    def hint(self) -> str:
        """What to do about a file that is none."""
        return f"give the {self.file(self.lossless[0])} that `{self.command}` wrote"

    @property
    def figures(self) -> tuple[str, ...]:
        """The formats that it is drawn in."""
        return FIGURE_FORMATS if self.draw else ()

    @property
    def pages(self) -> tuple[str, ...]:
        """The formats of its page."""
        return PAGE_FORMATS if self.page else ()

    @property
    def options(self) -> tuple[str, ...]:
        """What may be said of how it is shown; of what has figures `SIZES` too."""
        names = (name for name in (*self.shown_with, *self.drawn_with, *self.others) if name not in KNOWN)
        return (*dict.fromkeys(names), *(SIZES if self.draw else ()))

    @property
    def formats(self) -> tuple[str, ...]:
        """All formats that it is written in."""
        return (*self.figures, *self.data, *self.pages)

    @property
    def named_files(self) -> frozenset[str]:
        """The names of its data and its page in a folder; figures are named by what they show."""
        return frozenset(self.file(name) for name in (*self.data, *self.pages))

    def rename(self, stem: str) -> Kind:
        """The same, with files of another name."""
        return replace(self, stem=stem)

    def file(self, ending: str) -> str:
        """How a file of it is called."""
        return f"{self.stem}.{ending}"

    def require_options(self, names: Iterable[str]) -> None:
        """Refuses options of `show` and `draw` that say nothing about this kind."""
        for name in names:
            if name not in self.options:
                option = "no-title" if name == "title" else name.replace("_", "-")
                raise UsageError(f"{self.one} has no --{option}", "leave it out")

    def view(self, which: str) -> Any:
        """What shows or draws it: the function that a field such as `show` names."""
        package = "attnscope" if which == "page" else "attnscope.views"
        return load_named(_absolute(getattr(self, which), package))

    def record_class(self) -> Any:
        """Its class, a `records.record.Record`."""
        return load_named(_absolute(self.record, "attnscope.records"))


_TABLE = ("csv", "json")

KINDS = {
    kind.schema: kind
    for kind in (
        Kind(
            "attnscope.heatmap", "record of attention", "attnscope.questions.heatmap:Heatmap", "heatmap", "heatmap",
            ("npz", *_TABLE), ("png", "npz"), "maps.terminal:show", "maps.pages:pages", "maps.pages:glance",
            "maps.pages:require_query", "pages:page_of_record", ("drawn", "query"), ("query",),
            (*WHICH, "scale", "cmap", "words", "hide_special"),
        ),
        Kind(
            "attnscope.pooled", "record of pooled attention", "attnscope.questions.pooled:PooledHeatmap", "heatmap",
            "pooled", ("npz", *_TABLE), ("png", "npz"), "maps.terminal:show", "maps.pages:pages", "maps.pages:glance",
            page="pages:page_of_record", shown_with=("drawn",), others=(*WHICH, "scale", "cmap"),
        ),
        Kind(
            "attnscope.heads", "record of heads", "heads.findings:Findings", "heads", "heads", ("npz", *_TABLE),
            ("npz", "csv", "png"), "attnscope.questions.heads:show", "heads.figures:pages",
            page="pages:page_of_record", shown_with=("measures", "sort", "every", "among"),
            drawn_with=("measures",), others=WHICH,
        ),
        Kind(
            "attnscope.compare", "comparison of heads", "attnscope.questions.compare:Comparison", "compare", "compare",
            ("npz", *_TABLE), ("npz", "csv", "png"), REPORT, FIGURES, page="pages:page_of_record",
            shown_with=("every",),
        ),
        Kind(
            "attnscope.relations", "result on relations", "attnscope.questions.relations:Relations", "relations",
            "relations", ("npz", *_TABLE), ("npz", "csv", "png"), REPORT, FIGURES, page="pages:page_of_record",
            shown_with=("every",),
        ),
        Kind(
            "attnscope.ablate", "result of an ablation", "attnscope.questions.ablate:Ablation", "ablate", "ablation",
            ("npz", *_TABLE), ("npz", "csv", "png"), REPORT, FIGURES, page="pages:page_of_record",
            shown_with=("every",),
        ),
        Kind(
            "attnscope.patch", "result of patching", "attnscope.questions.patch:Patching", "patch", "patching",
            ("npz", *_TABLE), ("npz", "csv", "png"), REPORT, FIGURES, shown_with=("every",),
        ),
        Kind(
            "attnscope.atlas", "atlas", "attnscope.questions.atlas:Atlas", "atlas", "atlas", ("npz", *_TABLE),
            ("html", "npz"), REPORT, page="pages:page_of_record", shown_with=("every", "measures", "sort"),
            others=WHICH,
        ),
        Kind(
            "attnscope.weights", "result of weights", "attnscope.questions.weights:HeadWeights", "weights", "weights",
            ("npz", *_TABLE), ("npz", "csv", "png"), REPORT, FIGURES, shown_with=("every",), others=("pick",),
        ),
        Kind(
            "attnscope.why", "result on a score", "attnscope.questions.why:Why", "why", "why", ("npz", *_TABLE),
            ("npz", "csv", "png"), REPORT, FIGURES, shown_with=("every",),
        ),
        Kind(
            "attnscope.training", "result of a training", "attnscope.questions.training:Training", "training",
            "training", ("npz", *_TABLE), ("npz", "csv", "png"), REPORT, FIGURES, shown_with=("every",),
        ),
        Kind(
            "attnscope.rollout", "record of rollout", "attnscope.questions.heatmap:Rollout", "rollout", "rollout",
            ("npz", *_TABLE), ("npz", "png"), "maps.terminal:show_rollout", "maps.pages:pages",
            query="maps.pages:require_query", shown_with=("query",), drawn_with=("query",), others=("scale", "cmap"),
        ),
        Kind(
            "attnscope.trace", "trace", "attnscope.questions.trace:Trace", "learn trace", "trace",
            ("npz", "json", "py"), ("npz", "json", "py"), REPORT, shown_with=("every",),
        ),
        Kind(
            "attnscope.split", "split", "attnscope.questions.split:Split", "learn split", "split", ("npz", *_TABLE),
            ("npz", "csv", "png"), REPORT, FIGURES, shown_with=("every",),
        ),
        Kind(
            "attnscope.cost", "cost", "attnscope.questions.cost:Cost", "learn cost", "cost", ("npz", *_TABLE),
            ("npz", "csv", "png"), REPORT, FIGURES, shown_with=("every",),
        ),
    )
}  # fmt: skip
"""By schema, without its version."""


def kind_of_schema(schema: str) -> Kind:
    """The kind of a schema such as "attnscope.heads/1"; a ValueError refuses what this version does not know."""
    name = schema.partition("/")[0] if isinstance(schema, str) else ""
    if name not in KINDS:
        raise ValueError(f"it holds {schema!r}, which this version cannot read")
    return KINDS[name]


def file_of(record: Path, first: Kind | None = None) -> Path:
    """Return the file of a record, which may be in a set that a killed run has not moved to its names.

    Args:
        record: The file, or the folder that a command wrote it into.
        first: The kind that is meant, where the folder may hold several.
    """
    from attnscope.results.file_sets import locate  # with NumPy, which the command line starts without

    if not record.is_dir():
        return locate(record)
    kinds = [*KINDS.values()] if first is None else [first, *KINDS.values()]
    names = [kind.file(ending) for kind in kinds for ending in kind.lossless]
    files = (locate(record / name) for name in names)
    return next((file for file in files if file.is_file()), record)


def _absolute(name: str, package: str) -> str:
    """Return "module:name" with the whole name of its module, which is within a package unless it is whole already."""
    return name if name.startswith("attnscope.") else f"{package}.{name}"


def load_named(name: str) -> Any:
    """What "module:name" names, imported on first use."""
    module, attribute = name.split(":")
    return getattr(importlib.import_module(module), attribute)
