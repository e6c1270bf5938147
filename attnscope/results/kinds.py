"""The kinds of results: what each is called, its files, and what shows it.

These facts are known before a class is imported. Classes and views are named by strings, as importing a name such as
"questions.ablate:Ablation" only when it is used lets the command line start without them.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from attnscope.errors import UsageError

FIGURE_FORMATS = ("png", "svg", "pdf")

PAGE_FORMATS = ("html",)

LOSSLESS = "npz"
"""The format that results are loaded from."""

SIZES = ("width", "dpi", "font_size", "title", "font")
"""Options of how any figure is drawn."""

KNOWN = ("drawn", "among")
"""What `show` is told that is no option: whether maps are drawn, and the result that heads were picked from."""

WHICH = ("pick", "layers", "heads")
"""Options that say which heads of a result are shown."""

TERMINAL, FIGURES = "report.terminal:show", "report.figures:pages"
"""What shows and draws a report."""

PAGE = "pages:page_of_record"


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of result.

    Attributes:
        what: What it is called.
        result: Its class.
        command: The command that makes it.
        stem: The name of its files in a folder, without ending.
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

    what: str
    result: str
    command: str
    stem: str
    data: tuple[str, ...] = ("npz", "csv", "json")
    usual: tuple[str, ...] = ("npz", "csv", "png")
    show: str = TERMINAL
    draw: str = FIGURES
    glance: str = ""
    query: str = ""
    page: str = ""
    shown_with: tuple[str, ...] = ("every",)
    drawn_with: tuple[str, ...] = ()
    others: tuple[str, ...] = ()

    @property
    def with_article(self) -> str:
        """What one of them is called, with its article."""
        return f"{'an' if self.what[0] in 'aeiou' else 'a'} {self.what}"

    @property
    def hint(self) -> str:
        """What to do about a file that is none."""
        return f"give the {self.file(LOSSLESS)} that `{self.command}` wrote"

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
        """Return the same with files of another name."""
        return replace(self, stem=stem)

    def file(self, ending: str) -> str:
        """Return what a file of it is called."""
        return f"{self.stem}.{ending}"

    def require_options(self, names: Iterable[str]) -> None:
        """Refuse options of `show` and `draw` that say nothing about this kind."""
        for name in names:
            if name not in self.options:
                option = "no-title" if name == "title" else name.replace("_", "-")
                raise UsageError(f"{self.with_article} has no --{option}", "leave it out")

    def view(self, which: str) -> Any:
        """Return the function that a field such as `show` names."""
        return load_named(getattr(self, which))

    def load_class(self) -> Any:
        """Return its class."""
        return load_named(self.result)


_MAPS: dict[str, Any] = {
    "show": "questions.heatmap_terminal:show",
    "draw": "questions.heatmap_figures:pages",
    "usual": ("png", "npz"),
}
_MAP_STYLE = ("scale", "cmap")

KINDS = {
    "heatmap": Kind(
        what="record of attention", result="questions.heatmap:Heatmap", command="heatmap", stem="heatmap", **_MAPS,
        glance="questions.heatmap_figures:glance", query="questions.heatmap_figures:require_query", page=PAGE,
        shown_with=("drawn", "query"), drawn_with=("query",), others=(*WHICH, *_MAP_STYLE, "words", "hide_special"),
    ),
    "pooled": Kind(
        what="record of pooled attention", result="questions.pooled:PooledHeatmap", command="heatmap", stem="pooled",
        **_MAPS, glance="questions.heatmap_figures:glance", page=PAGE, shown_with=("drawn",),
        others=(*WHICH, *_MAP_STYLE),
    ),
    "rollout": Kind(
        what="record of rollout", result="questions.heatmap:Rollout", command="rollout", stem="rollout",
        **{**_MAPS, "show": "questions.heatmap_terminal:show_rollout", "usual": ("npz", "png")},
        query="questions.heatmap_figures:require_query", shown_with=("query",), drawn_with=("query",),
        others=_MAP_STYLE,
    ),
    "heads": Kind(
        what="record of heads", result="questions.heads:Heads", command="heads", stem="heads", page=PAGE,
        shown_with=("measures", "sort", "every", "among"), drawn_with=("measures",), others=WHICH,
    ),
    "compare": Kind(
        what="comparison of heads", result="questions.compare:Comparison", command="compare", stem="compare", page=PAGE
    ),
    "relations": Kind(
        what="result on relations", result="questions.relations:Relations", command="relations", stem="relations",
        page=PAGE,
    ),
    "ablate": Kind(
        what="result of an ablation", result="questions.ablate:Ablation", command="ablate", stem="ablation", page=PAGE
    ),
    "patch": Kind(
        what="result of patching", result="questions.patch:Patching", command="patch", stem="patching"
    ),
    "atlas": Kind(
        what="atlas", result="questions.atlas:Atlas", command="atlas", stem="atlas", usual=("html", "npz"), draw="",
        page=PAGE, shown_with=("every", "measures", "sort"), others=WHICH,
    ),
    "weights": Kind(
        what="result of weights", result="questions.weights:HeadWeights", command="weights", stem="weights",
        others=("pick",),
    ),
    "why": Kind(what="result on a score", result="questions.why:Why", command="why", stem="why"),
    "training": Kind(
        what="result of a training", result="questions.training:Training", command="training", stem="training"
    ),
    "trace": Kind(
        what="trace", result="questions.trace:Trace", command="learn trace", stem="trace", draw="",
        data=("npz", "json", "py"), usual=("npz", "json", "py"),
    ),
    "split": Kind(what="split", result="questions.split:Split", command="learn split", stem="split"),
    "cost": Kind(what="cost", result="questions.cost:Cost", command="learn cost", stem="cost"),
}  # fmt: skip
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
    """Return the file of a result, which may be in a set that a killed run has not moved to its names.

    Args:
        path: The file, or the folder that a command wrote it into.
        first: The kind that is meant, if the folder may hold several.
    """
    from attnscope.results.file_sets import locate  # with NumPy, which the command line starts without

    if not path.is_dir():
        return locate(path)
    kinds = [*KINDS.values()] if first is None else [first, *KINDS.values()]
    files = (locate(path / kind.file(LOSSLESS)) for kind in kinds)
    return next((file for file in files if file.is_file()), path)


def load_named(name: str) -> Any:
    """Return what "module:name" of this package names, imported on first use."""
    module, attribute = name.split(":")
    return getattr(importlib.import_module(f"attnscope.{module}"), attribute)
