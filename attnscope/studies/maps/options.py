"""Declare the options of attention maps of a text, a photo or a recording, and those of a page of maps.

`option` declares one option of the command line, and `group` the options of another class. Torch and NumPy are not
imported here, so that `--help` is fast.
"""

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
"""The fewest and the most rows and columns of cells that a map can be pooled to."""


def require_cells(cells: int) -> None:
    """Refuse to pool to too few or too many rows and columns."""
    if not MIN_CELLS <= cells <= MAX_CELLS:
        raise UsageError(
            f"a map cannot be pooled to {cells} rows and columns",
            f"choose {MIN_CELLS} to {MAX_CELLS}, or 0: not",
        )


@options
class MapOptions(TokenOptions):
    """Hold the options of the maps of a text, a photo or a recording.

    Those of `TokenOptions` say how tokens and heads are merged, averaged or left out.
    """

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
        # `between` is true if --from is given.
        if self.between:
            refuse_beside("--from", mean=self.mean, query=self.query is not None)

    @property
    def for_exact_maps(self) -> MapOptions:
        """Return the options, but reset those that pooled maps allow: an option that is still set needs exact maps."""
        return replace(self, choice=Choice(), pooled=None, times=False)

    def require_for(self, model_input: UserInput) -> None:
        """Refuse options that do not apply to the input: a text, a photo, a recording, or photos with a question."""
        from attnscope.senses.photos import Photo
        from attnscope.studies.inputs.reading import PhotoPrompt, Prompt, Speech

        if self.times and not isinstance(model_input, Speech):
            raise UsageError("only the words of a recording are timed", "leave it out, or give --audio")
        # A Prompt is a text: it may have all other options.
        if isinstance(model_input, Prompt):
            return
        # Maps of photos and recordings are never pooled, and always show all keys.
        flag = "--audio" if isinstance(model_input, Speech) else "--image"
        refuse_beside(flag, pool=self.pooled, cols=self.cut.cols)
        # Only a PhotoPrompt, photos with a question, has words to merge and rows of tokens to choose from.
        if not isinstance(model_input, PhotoPrompt):
            refuse_beside(flag, words=self.words, words_from=self.words_from, rows=self.cut.rows)
        if not isinstance(model_input, Photo):
            refuse_beside(flag, hide_special=self.hide_special)
        if isinstance(model_input, Speech):
            refuse_beside(flag, query=self.query)


@options
class PageTokenOptions(TokenOptions):
    """Hold how the page shows tokens when it opens. There is no --query: readers pick a token on the page."""

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
        """Refuse an empty page, an unknown split, and an output file that cannot be replaced."""
        from attnscope.results.storage import PAGE_MARK, is_stream, require_replaceable

        if not (self.needs_model or self.record):
            raise UsageError("there is nothing to show", "give TEXT, --file, --image, or --record")
        refuse_file_names(*self.texts)
        self.require_split()
        if self.image:
            # Of the options of reading, a photo may have --generate alone: refuse all others that are set.
            refuse_beside("--image", replace(self.reading, generate=0))
        if self.out is None:
            return
        if self.out.is_dir():
            raise UsageError(f"{self.out} is a folder", "--out names the page's file, such as page.html")
        # Only a file with the mark of our own pages is overwritten.
        if not is_stream(self.out):
            require_replaceable(self.out, mark=PAGE_MARK)

    @property
    def needs_model(self) -> bool:
        """Return whether a model must run: the page has texts, files or photos, not saved records alone."""
        return bool(self.texts or self.files or self.image)

    @property
    def changes(self) -> TokenOptions:
        """Return the options of `tokens` that change the maps; the other options only say how the page opens."""
        return TokenOptions(without_sinks=self.tokens.without_sinks, mean=self.tokens.mean)

    def start(self) -> dict[str, str]:
        """Return the URL parameters that say how the page opens; the page's JavaScript reads them.

        They are `words`, `hide` (special tokens), `scale`, `v` (the view) and `h` (the head in the view, such as 3.1).
        """
        parameters = {}
        if self.tokens.words:
            parameters["words"] = "1"
        if self.tokens.hide_special:
            parameters["hide"] = "1"
        if self.scale:
            parameters["scale"] = self.scale
        picked_heads = self.choice.pick or ()
        if len(picked_heads) == 1:
            layer, head = picked_heads[0]
            parameters |= {"v": "matrix", "h": f"{layer}.{head}"}
        return parameters
