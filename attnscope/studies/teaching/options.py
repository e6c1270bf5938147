"""What `attnscope learn` and its Python functions are asked with. Loads nothing heavy."""

from __future__ import annotations

from typing import Any

from attnscope.errors import UsageError
from attnscope.options import numbers_from, option, options, seed_option


@options
class SplitOptions:
    """How queries, keys and values are cut, and what becomes of the heads."""

    counts: tuple[int, ...] = option(
        "Numbers of heads to split into, such as 1,2,4.", default=(1, 2, 4), read=numbers_from, written="1,2,4"
    )
    same_columns: bool = option("Give head 1 the columns of head 0: the two then compute the same.", default=False)
    project: str = option(
        "Mix the heads by a W_O: orthogonal or permute (random, see --seed), or a file with a matrix.", default=""
    )
    seed: int = seed_option("a random W_O")
    drop: tuple[int, ...] = option(
        "Set the output of these heads to zero, one by one, and measure the change, such as 0,1.",
        default=(), read=numbers_from,
    )  # fmt: skip

    def require(self) -> None:
        """Refuses numbers of heads that do not go together with what becomes of them."""
        if not self.counts or min(self.counts) < 1:
            raise UsageError("a number of heads is at least 1", "such as --counts 1,2,4")
        if self.same_columns and max(self.counts) < 2:
            raise UsageError("two heads are needed to share columns", "such as --counts 2")
        beyond = [head for head in self.drop if not 0 <= head < max(self.counts)]
        if beyond:
            raise UsageError(
                f"there is no head {beyond[0]} to drop",
                f"of {max(self.counts)} heads the last is {max(self.counts) - 1}",
            )


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
