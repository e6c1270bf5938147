"""The kinds of results: what each is called, its files, and what shows it.

These facts are known before a class is imported. Classes and views are named by strings, as importing a name such as
"questions.ablate:Ablation" only when it is used lets the command line start without them.
"""

import importlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnscope.errors import UsageError

FIGURE_FORMATS = ("png", "svg", "pdf")

PAGE_FORMATS = ("html",)

TABLE_FORMATS = ("csv", "latex", "md")
"""Formats that hold a table of a result, of which columns can be chosen."""

ENDINGS = {"latex": "tex"}
"""How files end that do not end in the name of their format."""

LOSSLESS = "npz"
"""The format that results are loaded from."""

SIZES = ("width", "dpi", "font_size", "caption", "font")
"""Options of how any figure is drawn."""

KNOWN = ("drawn", "among", "answered")
"""What `show` is told that is no option: if maps are drawn, what heads were picked from, and if it only answers."""

WHICH = ("pick", "layers", "heads")
"""Options that say which heads of a result are shown."""

TERMINAL, FIGURES = "report.terminal:show", "report.figures:pages"
"""What shows and draws a report."""

PAGE = "pages:page_of_record"


@dataclass(frozen=True)
class Kind:
    """A kind of result.

    Attributes:
        name: Its name in schemas.
        what: What people call it.
        result: Its class.
        command: The command that makes it; empty = its name.
        stem: The name of its files in a folder, without ending; empty = its name.
        data: The formats that hold what it says.
        usual: The formats that are written into a folder if none is named.
        show: What prints it: `(result, console, **shown_with)`.
        draw: What draws it: `(result, style, **drawn_with)`, figures one after the other; empty = it has none.
        glance: What makes the picture that a notebook shows: `(result) -> PNG`; empty = a notebook prints it.
        query: What refuses a query that no token is meant by: `(result, query)`; empty = there are no queries.
        page: What makes its HTML page: `(result, heads=...)`; empty = it has none.
        shown_with: What `show` takes: options, and some of `KNOWN`.
        drawn_with: What `draw` takes beside the style: options.
        others: Options that neither of these takes: of the style, of the page, or of which heads.
    """

    name: str
    what: str
    result: str
    command: str = ""
    stem: str = ""
    data: tuple[str, ...] = ("npz", *TABLE_FORMATS, "json")
    usual: tuple[str, ...] = ("npz", "csv", "png")
    show: str = TERMINAL
    draw: str = FIGURES
    glance: str = ""
    query: str = ""
    page: str = ""
    shown_with: tuple[str, ...] = ("every",)
    drawn_with: tuple[str, ...] = ()
    others: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for field in ("command", "stem"):
            object.__setattr__(self, field, getattr(self, field) or self.name)

    @property
    def with_article(self) -> str:
        """Return what one of them is called, with its article."""
        return f"{'an' if self.what[0] in 'aeiou' else 'a'} {self.what}"

    @property
    def hint(self) -> str:
        """Return what to do about a file that is none."""
        return f"give the {self.file(LOSSLESS)} that `{self.command}` wrote"

    @property
    def figures(self) -> tuple[str, ...]:
        """Return the formats that it is drawn in."""
        return FIGURE_FORMATS if self.draw else ()

    @property
    def pages(self) -> tuple[str, ...]:
        """Return the formats of its page."""
        return PAGE_FORMATS if self.page else ()

    @property
    def options(self) -> tuple[str, ...]:
        """Return what may be said of how it is shown; of what has figures `SIZES` too."""
        names = (
            name for name in (*self.shown_with, *self.drawn_with, *self.others) if name not in KNOWN
        )
        return (*dict.fromkeys(names), *(SIZES if self.draw else ()))

    @property
    def formats(self) -> tuple[str, ...]:
        """Return all formats that it is written in."""
        return (*self.figures, *self.data, *self.pages)

    def file(self, name: str) -> str:
        """Return what a file of it is called, by its format."""
        return f"{self.stem}.{ENDINGS.get(name, name)}"

    def require_options(self, names: Iterable[str]) -> None:
        """Refuse options of `show` and `draw` that say nothing about this kind."""
        for name in names:
            if name not in self.options:
                option = "no-caption" if name == "caption" else name.replace("_", "-")
                raise UsageError(f"{self.with_article} has no --{option}", "leave it out")

    def view(self, which: str) -> Any:
        """Return the function that a field such as `show` names."""
        return load_named(getattr(self, which))


_MAPS: dict[str, Any] = {
    "show": "questions.heatmap_terminal:show",
    "draw": "questions.heatmap_figures:pages",
    "usual": ("png", "npz"),
}
_MAP_STYLE = ("scale", "cmap", "colours", "smooth", "layout")

_ALL = (
    Kind(
        "heatmap",
        "record of attention",
        "questions.heatmap:Heatmap",
        **_MAPS,
        glance="questions.heatmap_figures:glance",
        query="questions.heatmap_figures:require_query",
        page=PAGE,
        shown_with=("drawn", "query", "answered", "scale"),
        drawn_with=("query",),
        others=(*WHICH, *_MAP_STYLE, "words", "hide_special", "without_sinks", "mean"),
    ),
    Kind(
        "pooled",
        "record of pooled attention",
        "questions.pooled:PooledHeatmap",
        command="heatmap",
        **_MAPS,
        glance="questions.heatmap_figures:glance",
        shown_with=("drawn", "answered", "scale"),
        others=(*WHICH, *_MAP_STYLE),
    ),
    Kind(
        "rollout",
        "record of rollout",
        "questions.heatmap:Rollout",
        command="heatmap --rollout",
        draw="questions.heatmap_figures:pages",
        show="questions.heatmap_terminal:show_rollout",
        usual=("npz", "png"),
        query="questions.heatmap_figures:require_query",
        shown_with=("query",),
        drawn_with=("query",),
        others=_MAP_STYLE,
    ),
    Kind("shares", "result on two parts", "questions.shares:Shares", command="heatmap"),
    Kind(
        "heads",
        "record of heads",
        "questions.heads:Heads",
        page=PAGE,
        shown_with=("measures", "sort", "every", "among"),
        drawn_with=("measures",),
        others=WHICH,
    ),
    Kind("compare", "comparison of heads", "questions.compare:Comparison"),
    Kind("relations", "result on relations", "questions.relations:Relations"),
    Kind("ablate", "result of an ablation", "questions.ablate:Ablation", stem="ablation"),
    Kind("patch", "result of patching", "questions.patch:Patching", stem="patching"),
    Kind(
        "atlas",
        "atlas",
        "questions.atlas:Atlas",
        usual=("html", "npz"),
        draw="",
        page=PAGE,
        shown_with=("every", "sort"),
        others=WHICH,
    ),
    Kind("weights", "result of weights", "questions.weights:HeadWeights", others=("pick",)),
    Kind("why", "result on a score", "questions.why:Why"),
    Kind("training", "result of a training", "questions.training:Training"),
    Kind(
        "trace",
        "trace",
        "questions.trace:Trace",
        command="learn trace",
        draw="",
        data=("npz", "json", "py"),
        usual=("npz", "json", "py"),
    ),
    Kind("split", "split", "questions.split:Split", command="learn split"),
    Kind(
        "cost",
        "cost",
        "questions.cost:Cost",
        command="learn cost",
        draw="",
        usual=("npz", "csv", "json"),
    ),
)

KINDS = {kind.name: kind for kind in _ALL}
"""By the name in their schema: that of a heatmap is "attnscope.heatmap/2"."""


def kind_of_schema(schema: str) -> Kind:
    """Return the kind of a schema such as "attnscope.heads/2".

    Raises:
        ValueError: This version does not know it.
    """
    name = schema.partition("/")[0].removeprefix("attnscope.") if isinstance(schema, str) else ""
    if name not in KINDS:
        raise ValueError(f"it holds {schema!r}, which this version cannot read")
    return KINDS[name]


def file_of(path: Path, first: Kind | None = None) -> Path:
    """Return the file of a result.

    Args:
        path: The file, or the folder that a command wrote it into.
        first: The kind that is meant, if the folder may hold several.
    """
    if not path.is_dir():
        return path
    kinds = [*KINDS.values()] if first is None else [first, *KINDS.values()]
    files = (path / kind.file(LOSSLESS) for kind in kinds)
    return next((file for file in files if file.is_file()), path)


def load_named(name: str) -> Any:
    """Return what "module:name" of this package names, imported on first use."""
    module, attribute = name.split(":")
    return getattr(importlib.import_module(f"attnscope.{module}"), attribute)
