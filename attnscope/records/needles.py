"""What a model finds in long texts, whole and without some of its heads. NumPy only."""

from __future__ import annotations

from dataclasses import dataclass

from attnscope.records.ablation import Effect


@dataclass(frozen=True)
class CopiedAt:
    """How much the whole model finds at one depth of texts of one length.

    Attributes:
        length: Of the texts, in tokens.
        depth: How much of the haystack stands before the needle, 0 to 1.
        copied: The share of the needles' tokens that the model writes.
    """

    length: int
    depth: float
    copied: Effect


@dataclass(frozen=True)
class CopiedWithout:
    """How much a model finds without some heads, which put out nothing.

    Attributes:
        what: "retrieval", the heads that have the role; "random", others, drawn anew for each needle from the same
            layers.
        n_heads: How many heads were taken out of each needle's run.
        heads: Their names; none where they were drawn.
        copied: The share of the needles' tokens that is still written.
        change: How much less that is than by the whole model, needle by needle.
    """

    what: str
    n_heads: int
    heads: tuple[str, ...]
    copied: Effect
    change: Effect


@dataclass(frozen=True)
class Needles:
    """What a probe of needles in haystacks found about the model as a whole.

    Attributes:
        copied: The share of the needles' tokens that the model writes.
        at: The same by length and depth.
        without: The same without heads, where they were taken out.
    """

    copied: Effect
    at: tuple[CopiedAt, ...]
    without: tuple[CopiedWithout, ...] = ()
