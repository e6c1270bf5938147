"""Declare the options of the maps of a text, a photo or a recording. Loads nothing heavy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from attnscope.choice import BetweenOptions, Choice, Crop, TokenOptions
from attnscope.errors import UsageError
from attnscope.options import group, option, options, refuse_beside
from attnscope.studies.inputs.options import ReadingOptions, TextFileOptions, refuse_file_names

if TYPE_CHECKING:
    from attnscope.studies.inputs.reading import UserInput


MIN_CELLS, MAX_CELLS = 8, 1024
"""A map is pooled to so many rows and columns of cells."""


def require_cells(cells: int) -> None:
    """Refuse to pool to too few or too many rows and columns."""
    if not MIN_CELLS <= cells <= MAX_CELLS:
        raise UsageError(
            f"a map cannot be pooled to {cells} rows and columns",
            f"choose {MIN_CELLS} to {MAX_CELLS}, or 0: not",
        )


@options
class MapOptions(TokenOptions):
    """Hold the options of the maps of a text, a photo or a recording."""

    choice: Choice = group(Choice)
    cut: Crop = group(Crop)
    between: BetweenOptions = group(BetweenOptions)
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
        """Refuse options that need exact maps beside --pool, and drawing options beside --from."""
        if self.pooled:
            require_cells(self.pooled)
            refuse_beside("--pool", self.for_exact_maps)
        if self.between:
            refuse_beside("--from", mean=self.mean, query=self.query is not None)

    @property
    def for_exact_maps(self) -> MapOptions:
        """Return these options without those that suit pooled maps too: whatever is still set needs exact maps."""
        return replace(self, choice=Choice(), pooled=None, times=False)

    def require_for(self, given: UserInput) -> None:
        """Refuse options that mean nothing for the input: a text, a photo, a recording, or photos with a question."""
        from attnscope.senses.photos import Photo
        from attnscope.studies.inputs.reading import PhotoPrompt, Prompt, Speech

        if self.times and not isinstance(given, Speech):
            raise UsageError("only the words of a recording are timed", "leave it out, or give --audio")
        # All other options suit a text.
        if isinstance(given, Prompt):
            return
        # Maps of photos and recordings are never pooled, and always have all keys.
        flag = "--audio" if isinstance(given, Speech) else "--image"
        refuse_beside(flag, pool=self.pooled, cols=self.cut.cols)
        # Only with a question (a PhotoPrompt) are there words to merge, and rows of tokens to choose from.
        if not isinstance(given, PhotoPrompt):
            refuse_beside(flag, words=self.words, words_from=self.words_from, rows=self.cut.rows)
        if not isinstance(given, Photo):
            refuse_beside(flag, hide_special=self.hide_special)
        if isinstance(given, Speech):
            refuse_beside(flag, query=self.query)


@options
class PageTokenOptions(TokenOptions):
    """Hold how tokens are shown as the page opens; there is no --query, as readers of the page pick tokens there."""

    query: str | None = option("", default=None, python_only=True)


@options
class PageOptions(TextFileOptions):
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
    tokens: PageTokenOptions = group(PageTokenOptions)

    def require(self) -> None:
        """Refuse a page of nothing, an unknown split, and a file that cannot be replaced."""
        from attnscope.results.storage import PAGE_MARK, is_stream, require_replaceable

        if not (self.needs_model or self.record):
            raise UsageError("there is nothing to show", "give TEXT, --file, --image, or --record")
        refuse_file_names(*self.texts)
        self.require_split()
        if self.image:
            # Of all options of reading, a photo has --generate alone.
            refuse_beside("--image", replace(self.reading, generate=0))
        if self.out is None:
            return
        if self.out.is_dir():
            raise UsageError(f"{self.out} is a folder", "--out names the page's file, such as page.html")
        if not is_stream(self.out):
            require_replaceable(self.out, mark=PAGE_MARK)

    @property
    def needs_model(self) -> bool:
        """Return whether a model must run for the page: it has texts, files or photos, not saved records alone."""
        return bool(self.texts or self.files or self.image)

    @property
    def changes(self) -> TokenOptions:
        """Return those options of `tokens` that change the maps; the others only say how the page opens."""
        return TokenOptions(without_sinks=self.tokens.without_sinks, mean=self.tokens.mean)

    def start(self) -> dict[str, str]:
        """Return how the page opens, as parameters of its address, which the page's JavaScript reads.

        They are `words`, `hide` (special tokens), `scale`, `v` (the view) and `h` (the head in it, layer.head).
        """
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
