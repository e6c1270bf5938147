"""What `attnscope learn` and its Python functions are asked with. Loads nothing heavy."""

from __future__ import annotations

from typing import Any

from attnscope.options import numbers_from, option, options


@options
class TraceOptions:
    """What is traced of a layer."""

    target: str | None = option(
        "What an encoder-decoder is to write.  [default: its own greedy output]",
        default=None, panel="Text", rare=True,
    )  # fmt: skip
    heads: tuple[int, ...] | None = option(
        "Heads of that layer, such as 1,8-10.", "-H", "--heads", default=None, read=numbers_from, panel="Heads"
    )
    query: str | None = option(
        "Follow this query: a token, a word, or a place such as @3.  [default: all]", default=None, panel="Heads"
    )
    kind: str | None = option(
        "In an encoder-decoder: encoder, decoder or cross.  [default: the first]",
        default=None, panel="Heads", rare=True,
    )  # fmt: skip


def layer_option() -> Any:
    """Return the field `layer` of a dataclass of options about one layer."""
    return option("The layer, counted from 0.", "-L", "--layers", default=None, least=0, panel="Heads")
