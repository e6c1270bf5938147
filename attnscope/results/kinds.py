"""List the kinds of results: what each is called, its files, and the functions that show it.

Classes and functions are named by strings such as "questions.ablate:Ablation", which are imported on first use: so
commands start fast. `output` and `results.result` read this list.
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
"""The endings of files, by format, where they differ from its name."""

LOSSLESS = "npz"
"""The format that results are loaded from."""

SIZES = ("width", "dpi", "font_size", "caption", "font")
"""Options that every figure has."""

NO_OPTIONS = ("drawn", "among", "answered")
"""Parameters of `show` that no option sets.

They say whether maps are drawn, from which record heads were picked, and whether the answer alone is printed.
"""

CHOICE_OF_HEADS = ("pick", "layers", "heads")
"""Options that choose the heads of a result that are shown."""

PAGE = "pages:page_of_record"


@dataclass(frozen=True)
class Kind:
    """A kind of result. Its functions are named as "module:function".

    Attributes:
        name: Its name in schemas: "heads" of "attnscope.heads/2".
        noun: What people call a result of this kind, without an article.
        result: Its class.
        command: The command that makes it; empty = its name.
        stem: The name of its files in a folder, without ending; empty = its name.
        data: The formats of its files beside figures and pages.
        usual: The formats that are written if none is chosen.
        show: The function that prints it: `(result, console, **shown_with)`.
        draw: The function that yields its figures: `(result, style, **drawn_with)`; empty = it has none.
        glance: The function that makes the picture of a notebook: `(result) -> PNG`; empty = a notebook prints it.
        query: The function that refuses a query that names no token: `(result, query)`; empty = it has no queries.
        page: The function that makes its HTML page: `(result, findings=...)`; empty = it has none.
        shown_with: Parameters of `show`: options, and some of `NO_OPTIONS`.
        drawn_with: Parameters of `draw` beside the style, all of them options.
        others: Further options: for the style, the page, or the choice of heads.
    """

    name: str
    noun: str
    result: str
    command: str = ""
    stem: str = ""
    data: tuple[str, ...] = ("npz", *TABLE_FORMATS, "json")
    usual: tuple[str, ...] = ("npz", "csv", "png")
    show: str = "report.terminal:show"
    draw: str = "report.figures:pages"
    glance: str = ""
    query: str = ""
    page: str = ""
    shown_with: tuple[str, ...] = ("every",)
    drawn_with: tuple[str, ...] = ()
    others: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        # A frozen dataclass sets its own fields this way only.
        for field in ("command", "stem"):
            object.__setattr__(self, field, getattr(self, field) or self.name)

    @property
    def with_article(self) -> str:
        """Return what people call a result of this kind, such as "an atlas"."""
        article = "an" if self.noun[0] in "aeiou" else "a"
        return f"{article} {self.noun}"

    @property
    def hint(self) -> str:
        """Return the hint for users who gave another file."""
        return f"give the {self.file(LOSSLESS)} that `{self.command}` wrote"

    @property
    def figures(self) -> tuple[str, ...]:
        """Return the formats of its figures; empty if it has none."""
        return FIGURE_FORMATS if self.draw else ()

    @property
    def pages(self) -> tuple[str, ...]:
        """Return the formats of its page; empty if it has none."""
        return PAGE_FORMATS if self.page else ()

    @property
    def options(self) -> tuple[str, ...]:
        """Return the names of all options of how it is shown, drawn or made a page, each once."""
        names = dict.fromkeys((*self.shown_with, *self.drawn_with, *self.others))
        if self.draw:
            names |= dict.fromkeys(SIZES)
        return tuple(name for name in names if name not in NO_OPTIONS)

    @property
    def formats(self) -> tuple[str, ...]:
        """Return all formats of its files."""
        return (*self.figures, *self.data, *self.pages)

    def file(self, name: str) -> str:
        """Return the name of its file of a format, such as "heads.npz"."""
        return f"{self.stem}.{ENDINGS.get(name, name)}"

    def require_options(self, names: Iterable[str]) -> None:
        """Refuse options of `show` and `draw` that this kind does not have, by a UsageError."""
        for name in names:
            if name not in self.options:
                option = "no-caption" if name == "caption" else name.replace("_", "-")
                raise UsageError(f"{self.with_article} has no --{option}", "leave it out")

    def view(self, field: str) -> Any:
        """Return the function that a field such as "show" names, or the class that "result" does."""
        return load_named(getattr(self, field))


_MAPS: dict[str, Any] = {
    "show": "questions.heatmap_terminal:show",
    "draw": "questions.heatmap_figures:pages",
    "usual": ("png", "npz"),
}
"""Fields that the kinds of maps share."""

_MAP_STYLE = ("scale", "cmap", "colours", "smooth", "layout")
"""Options of how maps are drawn."""

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
        others=(*CHOICE_OF_HEADS, *_MAP_STYLE, "words", "hide_special", "without_sinks", "mean"),
    ),
    Kind(
        "pooled",
        "record of pooled attention",
        "questions.pooled:PooledHeatmap",
        command="heatmap",
        **_MAPS,
        glance="questions.heatmap_figures:glance",
        shown_with=("drawn", "answered", "scale"),
        others=(*CHOICE_OF_HEADS, *_MAP_STYLE),
    ),
    Kind(
        "rollout",
        "record of rollout",
        "questions.heatmap:Rollout",
        command="heatmap --rollout",
        show="questions.heatmap_terminal:show_rollout",
        draw="questions.heatmap_figures:pages",
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
        others=CHOICE_OF_HEADS,
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
        others=CHOICE_OF_HEADS,
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
"""The kinds by their name in schemas."""


def kind_of_schema(schema: str) -> Kind:
    """Return the kind of a schema such as "attnscope.heads/2".

    Raises:
        ValueError: This version does not know it, or a damaged file names something else than a text.
    """
    name = str(schema).partition("/")[0].removeprefix("attnscope.")
    if name not in KINDS:
        raise ValueError(f"it holds {schema!r}, which this version cannot read")
    return KINDS[name]


def file_of(path: Path, first: Kind | None = None) -> Path:
    """Return the file of a result; of a folder without one, the folder itself.

    Args:
        path: The file, or the folder that a command wrote it into.
        first: The kind to look for first where a folder holds several results.
    """
    if not path.is_dir():
        return path
    kinds = [*KINDS.values()]
    if first is not None:
        kinds.insert(0, first)
    for kind in kinds:
        file = path / kind.file(LOSSLESS)
        if file.is_file():
            return file
    return path


def load_named(name: str) -> Any:
    """Import and return an object of this package by a name such as "questions.ablate:Ablation"."""
    module, attribute = name.split(":")
    return getattr(importlib.import_module(f"attnscope.{module}"), attribute)
