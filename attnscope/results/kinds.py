"""List the kinds of results: the name, the files and the functions of each kind.

Classes and functions are named by strings: "questions.ablate:Ablation" is `attnscope.questions.ablate.Ablation`. They
are imported on first use, so that commands start fast. `output` and `results.result` read this list.
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
"""Formats that hold one table of a result; a user can choose its columns."""

SUFFIXES = {"latex": "tex"}
"""The suffix of files by format. Every other format is its own suffix."""

LOSSLESS = "npz"
"""The format that results are loaded from, without loss. All other formats are for people and other programs."""

PAPER_OPTIONS = ("width", "dpi", "font_size", "caption", "font")
"""Options that every figure has: its size, its letters, and whether it has a caption."""

_INTERNAL_PARAMETERS = ("draws_maps", "full_result", "prints_summary")
"""Parameters of `show` that `output` sets: users have no option for them.

`draws_maps`: whether maps are printed. `full_result`: the record with all heads, from which the user picked heads.
`prints_summary`: whether only the answer is printed.
"""

CHOICE_OF_HEADS = ("pick", "layers", "heads")
"""Options that choose which heads of a result are shown."""

PAGE = "pages:page_of_record"
"""The function that makes the HTML page of a result of any kind."""


@dataclass(frozen=True)
class ResultKind:
    """A kind of result. Its class and its functions are strings, "module:name"; `resolve` imports them.

    Attributes:
        name: Its name in schemas, such as "heads" in "attnscope.heads/2".
        noun: What messages call a result of this kind, without an article.
        result: The class of its results, a subclass of `Result`.
        command: The command that makes its results; empty = `name`.
        stem: The name of its files in a folder, without suffix; empty = `name`.
        data_formats: The formats of its data files: neither figures nor pages.
        usual_formats: The formats that commands write unless the user names formats.
        show: The function that returns what the terminal prints: `(result, console, **options)`.
        draw: The function that yields the pages of its figures: `(result, style, **options)`; empty = it has none.
        notebook_image: The function that returns the PNG that a notebook shows: `(result)`; empty = a notebook shows
            what the terminal prints.
        query: The function that checks `--query`, and refuses one that names no token: `(result, query)`; empty = it
            has no option --query.
        page: The function that returns its HTML page: `(result, findings=...)`; empty = it has no page.
        shown_with: The names of the keyword arguments of `show`: options of the user, such as "every" (--all: print
            everything that was found), and some of `_INTERNAL_PARAMETERS`.
        drawn_with: The names of the keyword arguments of `draw`, all of them options of the user.
        other_options: Its options that neither `show` nor `draw` takes. They set the style of figures, or change the
            record before it is shown, for example to some of its heads.
    """

    name: str
    noun: str
    result: str
    command: str = ""
    stem: str = ""
    data_formats: tuple[str, ...] = ("npz", *TABLE_FORMATS, "json")
    usual_formats: tuple[str, ...] = ("npz", "csv", "png")
    show: str = "report.terminal:show"
    draw: str = "report.figures:pages"
    notebook_image: str = ""
    query: str = ""
    page: str = ""
    shown_with: tuple[str, ...] = ("every",)
    drawn_with: tuple[str, ...] = ()
    other_options: tuple[str, ...] = ()

    @property
    def with_article(self) -> str:
        """Return `noun` with its article, such as "an atlas"."""
        article = "an" if self.noun[0] in "aeiou" else "a"
        return f"{article} {self.noun}"

    @property
    def hint(self) -> str:
        """Return the hint of errors for files that hold no result of this kind."""
        return f"give the {self.file_name(LOSSLESS)} that `{self.command or self.name}` wrote"

    @property
    def figure_formats(self) -> tuple[str, ...]:
        """Return the formats of its figures; empty if it has no figures."""
        return FIGURE_FORMATS if self.draw else ()

    @property
    def page_formats(self) -> tuple[str, ...]:
        """Return the formats of its page; empty if it has no page."""
        return PAGE_FORMATS if self.page else ()

    @property
    def options(self) -> tuple[str, ...]:
        """Return the names of all its options of `attnscope show`, each once."""
        # The dict serves as an ordered set.
        names = dict.fromkeys((*self.shown_with, *self.drawn_with, *self.other_options))
        if self.draw:
            names |= dict.fromkeys(PAPER_OPTIONS)
        return tuple(name for name in names if name not in _INTERNAL_PARAMETERS)

    @property
    def formats(self) -> tuple[str, ...]:
        """Return all formats of its files."""
        return (*self.figure_formats, *self.data_formats, *self.page_formats)

    def file_name(self, format_name: str) -> str:
        """Return the name of its file of a format, such as "heads.npz"."""
        return f"{self.stem or self.name}.{SUFFIXES.get(format_name, format_name)}"

    def require_options(self, names: Iterable[str]) -> None:
        """Raise a UsageError if a name is not in `options`."""
        for name in names:
            if name not in self.options:
                # The field `caption` belongs to the flag --no-caption.
                option = "no-caption" if name == "caption" else name.replace("_", "-")
                raise UsageError(f"{self.with_article} has no --{option}", "leave it out")

    def resolve(self, field: str) -> Any:
        """Import and return the function or the class that a field names, such as "show" or "result"."""
        return load_named(getattr(self, field))


MAP_STYLE = ("scale", "cmap", "colours", "smooth", "layout")
"""Options of figures of attention maps, besides `PAPER_OPTIONS`."""

_ALL_KINDS = (
    ResultKind(
        "heatmap",
        "record of attention",
        "questions.heatmap:Heatmap",
        usual_formats=("png", "npz"),
        show="questions.heatmap_terminal:show",
        draw="questions.heatmap_figures:draw_pages",
        notebook_image="questions.heatmap_figures:render_first_figure",
        query="questions.heatmap_figures:require_query",
        page=PAGE,
        shown_with=("draws_maps", "query", "prints_summary", "scale"),
        drawn_with=("query",),
        other_options=(*CHOICE_OF_HEADS, *MAP_STYLE, "words", "hide_special", "without_sinks", "mean"),
    ),
    ResultKind(
        "pooled",
        "record of pooled attention",
        "questions.pooled:PooledHeatmap",
        command="heatmap",
        usual_formats=("png", "npz"),
        show="questions.heatmap_terminal:show",
        draw="questions.heatmap_figures:draw_pages",
        notebook_image="questions.heatmap_figures:render_first_figure",
        shown_with=("draws_maps", "prints_summary", "scale"),
        other_options=(*CHOICE_OF_HEADS, *MAP_STYLE),
    ),
    ResultKind(
        "rollout",
        "record of rollout",
        "questions.heatmap:Rollout",
        command="heatmap --rollout",
        show="questions.heatmap_terminal:show_rollout",
        draw="questions.heatmap_figures:draw_pages",
        usual_formats=("npz", "png"),
        query="questions.heatmap_figures:require_query",
        shown_with=("query",),
        drawn_with=("query",),
        other_options=MAP_STYLE,
    ),
    ResultKind("shares", "result on two parts", "questions.shares:Shares", command="heatmap"),
    ResultKind(
        "heads",
        "record of heads",
        "questions.heads:Heads",
        page=PAGE,
        shown_with=("measures", "sort", "every", "full_result"),
        drawn_with=("measures",),
        other_options=CHOICE_OF_HEADS,
    ),
    ResultKind("compare", "comparison of heads", "questions.compare:Comparison"),
    ResultKind("relations", "result on relations", "questions.relations:Relations"),
    ResultKind("ablate", "result of an ablation", "questions.ablate:Ablation", stem="ablation"),
    ResultKind("patch", "result of patching", "questions.patch:Patching", stem="patching"),
    ResultKind(
        "atlas",
        "atlas",
        "questions.atlas:Atlas",
        usual_formats=("html", "npz"),
        draw="",
        page=PAGE,
        shown_with=("every", "sort"),
        other_options=CHOICE_OF_HEADS,
    ),
    ResultKind("weights", "result of weights", "questions.weights:HeadWeights", other_options=("pick",)),
    ResultKind("why", "result on a score", "questions.why:Why"),
    ResultKind("training", "result of a training", "questions.training:Training"),
    ResultKind(
        "trace",
        "trace",
        "questions.trace:Trace",
        command="learn trace",
        draw="",
        data_formats=("npz", "json", "py"),
        usual_formats=("npz", "json", "py"),
    ),
    ResultKind("split", "split", "questions.split:Split", command="learn split"),
    ResultKind(
        "cost",
        "cost",
        "questions.cost:Cost",
        command="learn cost",
        draw="",
        usual_formats=("npz", "csv", "json"),
    ),
)

KINDS = {kind.name: kind for kind in _ALL_KINDS}
"""The kinds by their name."""


def kind_of_schema(schema: str) -> ResultKind:
    """Return the kind of a schema such as "attnscope.heads/2".

    Raises:
        ValueError: This version does not know the kind.
    """
    # In a damaged file the schema may be no text.
    name = str(schema).partition("/")[0].removeprefix("attnscope.")
    if name not in KINDS:
        raise ValueError(f"it holds {schema!r}, which this version cannot read")
    return KINDS[name]


def find_record(path: Path, preferred_kind: ResultKind | None = None) -> Path:
    """Return the file of a result: the path itself, or if that is a folder, the file of a result in it.

    A folder that holds no result is returned as it is: reading it raises an error that says so.

    Args:
        path: The file, or the folder that a command wrote it into.
        preferred_kind: The kind to look for before all others; None = the order of `KINDS`.
    """
    if not path.is_dir():
        return path
    kinds = [*KINDS.values()]
    if preferred_kind is not None:
        kinds.insert(0, preferred_kind)
    for kind in kinds:
        record_path = path / kind.file_name(LOSSLESS)
        if record_path.is_file():
            return record_path
    return path


def load_named(name: str) -> Any:
    """Import and return an object of this package by a name such as "questions.ablate:Ablation"."""
    module, attribute = name.split(":")
    return getattr(importlib.import_module(f"attnscope.{module}"), attribute)
