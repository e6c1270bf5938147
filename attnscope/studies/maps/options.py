"""What the maps of a text, a photo or a recording are asked with. Loads nothing heavy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnscope.choice import Choice, Cut, Tokens
from attnscope.errors import UsageError
from attnscope.options import group, option, options

if TYPE_CHECKING:
    from attnscope.studies.inputs.reading import Given


@options
class MapOptions(Tokens):
    """What is asked of the maps of a text, a photo or a recording."""

    choice: Choice = group(Choice)
    cut: Cut = group(Cut)
    pooled: int | None = option(
        "Pool a long text to at most this many rows and columns, 8 to 1024; 0 = never; None = 256 for more than 400 "
        "tokens.",
        default=None, python_only=True,
    )  # fmt: skip
    pool: str = option(
        "What a pooled cell shows: mean (mass per query) or max (largest weight).", default="mean", python_only=True
    )
    times: bool = option(
        "Say when each word of a recording is spoken, from the heads that the model's files name, or from those that "
        "are picked.",
        default=False, python_only=True,
    )  # fmt: skip

    def require(self) -> None:
        """Refuses what pooled maps do not have."""
        from attnscope.studies.maps.pooled import CELLS, require_cells

        require_cells(self.pooled or CELLS, self.pool)
        if self.pooled and self.exact_only:
            raise UsageError(f"pooled maps have no {self.exact_only}", "leave out one of them")

    @property
    def exact_only(self) -> str:
        """The first of the options that only exact maps have; empty = none is given."""
        options = {
            "--words": self.words, "--hide-special": self.hide_special, "--query": self.query,
            "part (--rows, --cols)": self.cut,
        }  # fmt: skip
        return next((name for name, value in options.items() if value), "")

    def require_for(self, given: Given) -> None:
        """Refuses options that a photo or a recording has no use for."""
        from attnscope.studies.inputs.reading import Prompt, Speech, View

        if self.times and not isinstance(given, Speech):
            raise UsageError("only the words of a recording are timed", "leave it out, or give --audio")
        if isinstance(given, Prompt):
            return
        lacking = {"--words": self.words, "--rows or --cols": self.cut, "--pool": self.pooled}
        what, flag = ("recording", "--audio") if isinstance(given, Speech) else ("picture", "--image")
        if isinstance(given, View):
            lacking = {"--cols": self.cut.cols, "--pool": self.pooled, "--hide-special": self.hide_special}
        if isinstance(given, Speech):
            lacking |= {"--query": self.query, "--hide-special": self.hide_special}
        for name, value in lacking.items():
            if value:
                raise UsageError(f"a {what} has no {name}", f"leave it out, or leave out {flag}")
