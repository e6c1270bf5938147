"""What `attnscope patch` and its Python function are asked with. Loads nothing heavy."""

from __future__ import annotations

from typing import Literal, get_args

from attnscope.choice import Choice
from attnscope.errors import UsageError
from attnscope.options import group, option, options

Direction = Literal["denoise", "noise"]
By = Literal["z", "query", "key", "value", "pattern"]
BY: tuple[By, ...] = get_args(By)


@options
class PatchOptions:
    """What comes from which run, and what is measured."""

    by: By = option(
        "What a head gets from the other run: z (its output before the output projection), query, key, value, or "
        "pattern (its weights).", default="z", choices=BY,
    )  # fmt: skip
    direction: Direction = option(
        "denoise: the corrupt run gets values of the clean one; noise: the clean run gets values of the corrupt one.",
        default="denoise", choices=("denoise", "noise"),
    )  # fmt: skip
    positions: bool = option(
        "Also patch each position alone; all pairs must have the same number of tokens.", default=False
    )
    attribution: bool = option(
        "Also estimate every head by gradient times difference, and say how well that ranks them.", default=False
    )
    exact: int | None = option(
        "Patch only the N heads that attribution patching puts first.  [default: all heads]", default=None, least=1
    )
    curve: bool = option(
        "Faithfulness: keep the k best heads, and patch all others from the corrupt run.", default=False
    )
    paths: int | None = option(
        "Path patching among the N strongest heads: head to head through query, key and value, and head to logits.",
        default=None, least=1,
    )  # fmt: skip
    edges: int | None = option(
        "Estimate the paths among all heads by gradient times difference, and patch the N with the largest estimates.",
        default=None, least=1,
    )  # fmt: skip
    choice: Choice = group(Choice)

    def require(self) -> None:
        """Refuses what needs values that are not measured."""
        if self.curve and self.exact is not None:
            raise UsageError("--curve ranks all heads by exact values", "leave out --exact")
        if self.paths is not None and self.edges is not None:
            raise UsageError("--paths and --edges choose paths in two ways", "leave out one of them")
        if (self.paths or self.edges) is not None and self.by != "z":
            option = "--paths" if self.paths is not None else "--edges"
            raise UsageError(f"{option} begin at the z of heads, and --by is {self.by}", "leave out --by")
