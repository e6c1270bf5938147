"""Declare the options of the maps of a text, a photo or a recording. Loads nothing heavy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from attnscope.choice import Between, Choice, Cut, Tokens
from attnscope.errors import UsageError
from attnscope.options import group, option, options, refuse_beside
from attnscope.studies.inputs.options import ReadingOptions, TextFiles, refuse_file_names

if TYPE_CHECKING:
    from attnscope.studies.inputs.reading import Given


FEWEST_CELLS, MOST_CELLS = 8, 1024
"""Bounds of the rows and columns of cells that a map may be pooled to."""


def require_cells(cells: int) -> None:
    """Refuse too few or too many cells."""
    if not FEWEST_CELLS <= cells <= MOST_CELLS:
        raise UsageError(
            f"a map cannot be pooled to {cells} rows and columns",
            f"choose {FEWEST_CELLS} to {MOST_CELLS}, or 0: not",
        )


@options
class MapOptions(Tokens):
    """Hold the options of the maps of a text, a photo or a recording."""

    choice: Choice = group(Choice)
    cut: Cut = group(Cut)
    between: Between = group(Between)
    pooled: int | None = option(
        "Pool a long text to at most this many rows and columns, 8 to 1024; 0 = never; None = 256 for more than 400 "
        "tokens.",
        default=None,
        python_only=True,
    )
    words_from: Path | None = option(
        "A file of words, one per line or between spaces, whose tokens are merged as by --words, such as Chinese.",
        default=None,
        rare=True,
    )
    times: bool = option(
        "Say when each word of a recording is spoken, from the heads that the model's files name, or from those that "
        "are picked.",
        default=False,
        python_only=True,
    )

    def require(self) -> None:
        """Refuse what pooled maps do not have."""
        if self.pooled:
            require_cells(self.pooled)
            refuse_beside("--pool", self.of_exact_maps)
        if self.between:
            refuse_beside("--from", mean=self.mean, query=self.query is not None)

    @property
    def of_exact_maps(self) -> MapOptions:
        """Return the options with only those set that pooled maps do not have."""
        return replace(self, choice=Choice(), pooled=None, times=False)

    def require_for(self, given: Given) -> None:
        """Refuse options that mean nothing for what is to be read."""
        from attnscope.senses.photos import Photo
        from attnscope.studies.inputs.reading import Prompt, Speech, View

        # A text has all options but times.
        if self.times and not isinstance(given, Speech):
            raise UsageError("only the words of a recording are timed", "leave it out, or give --audio")
        if isinstance(given, Prompt):
            return
        # Photos and recordings are neither pooled, nor are some of their keys left out.
        flag = "--audio" if isinstance(given, Speech) else "--image"
        refuse_beside(flag, pool=self.pooled, cols=self.cut.cols)
        # A View has a question, whose tokens have words and are rows.
        if not isinstance(given, View):
            refuse_beside(flag, words=self.words, words_from=self.words_from, rows=self.cut.rows)
        if not isinstance(given, Photo):
            refuse_beside(flag, hide_special=self.hide_special)
        if isinstance(given, Speech):
            refuse_beside(flag, query=self.query)


@options
class PageTokens(Tokens):
    """Hold how tokens are shown as the page opens; there is no --query, as readers of the page pick tokens there."""

    query: str | None = option("", default=None, python_only=True)


@options
class PageOrder(TextFiles):
    """Hold the contents of a page, and the file that it is written to."""

    texts: tuple[str, ...] = option(
        "Texts; `-` reads one from stdin.", default=(), argument=True, metavar="TEXT"
    )
    split: str = option("How a text file is split into texts: line, paragraph or file.", default="file")
    image: tuple[Path, ...] = option(
        "A photo; may be given several times. With TEXT, for models that read both: where in it each word looks.",
        default=(),
    )
    record: tuple[Path, ...] = option(
        "A saved record, or its folder; may be given several times. heatmap.npz: show it; heads.npz: name the heads' "
        "roles; atlas.npz: show it too.",
        default=(),
        panel="Text",
    )
    scale: str | None = option(
        "The weight of the darkest colour: 1 (fixed), each head's largest (head), the figure's (figure).  "
        "[default: fixed; head for pictures and sound]",
        default=None,
        panel="Drawing",
        rare=True,
        choices=("fixed", "head", "figure"),
    )
    out: Path | None = option(
        "The file to write, such as page.html; - is stdout.", "-o", "--out", default=None, panel="Output"
    )
    reading: ReadingOptions = group(ReadingOptions)
    choice: Choice = group(Choice)
    tokens: PageTokens = group(PageTokens)

    def require(self) -> None:
        """Refuse a page of nothing, an unknown split, and a file that cannot be replaced."""
        from attnscope.results.storage import PAGE_MARK, is_stream, require_replaceable

        if not (self.is_read or self.record):
            raise UsageError("there is nothing to show", "give TEXT, --file, --image, or --record")
        refuse_file_names(*self.texts)
        self.require_split()
        if self.image:
            # Of all options of reading, a photo has --generate alone.
            refuse_beside("--image", replace(self.reading, generate=0))
        if self.out is not None and self.out.is_dir():
            raise UsageError(f"{self.out} is a folder", "--out names the page's file, such as page.html")
        if self.out is not None and not is_stream(self.out):
            require_replaceable(self.out, mark=PAGE_MARK)

    @property
    def is_read(self) -> bool:
        """Return whether a model reads something for it."""
        return bool(self.texts or self.files or self.image)

    @property
    def changes(self) -> Tokens:
        """Return the changes of the maps themselves; the other options of `tokens` say how the page opens."""
        return Tokens(without_sinks=self.tokens.without_sinks, mean=self.tokens.mean)

    def start(self) -> dict[str, str]:
        """Return how the page opens, as parameters of its address: names and values are the page's JavaScript's."""
        opened = {}
        if self.tokens.words:
            opened["words"] = "1"
        if self.tokens.hide_special:
            opened["hide"] = "1"
        if self.scale:
            opened["scale"] = self.scale
        picked = self.choice.pick or ()
        if len(picked) == 1:
            layer, head = picked[0]
            opened |= {"v": "matrix", "h": f"{layer}.{head}"}
        return opened
