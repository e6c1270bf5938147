"""The options of `attnscope why`. Loads nothing heavy."""

from __future__ import annotations

from typing import ClassVar

from attnscope.options import heads_from, kind_option, option, options


@options
class WhyOptions:
    """Which score is taken apart."""

    PANEL: ClassVar[str] = "Heads"

    pick: tuple[tuple[int, int], ...] | None = option("The head, such as L18H6.", default=None, read=heads_from)
    query: str | None = option("The token that attends: a token, a word, or its number.", default=None)
    key: str | None = option(
        "The token that is attended to.  [default: the one with the most attention, apart from special tokens and a "
        "decoder's first]",
        default=None,
    )
    kind: str | None = kind_option()
