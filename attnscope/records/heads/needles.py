"""What a model finds in long texts, whole and without some of its heads. NumPy only."""

from __future__ import annotations

from dataclasses import dataclass

from attnscope.records.ablation import Effect


@dataclass(frozen=True)
class CopiedAt:
    """How much the whole model finds at one depth of texts of one length.

    Attributes:
        length: Of the texts, in tokens.
        depth: Around which share of the haystack the needle stands, 0 to 1.
        copied: The share of the needles' tokens that the model writes.
    """

    length: int
    depth: float
    copied: Effect


@dataclass(frozen=True)
class CopiedWithout:
    """How much a model finds without some heads, which put out nothing.

    Attributes:
        what: "retrieval", the heads that have the role on the other half of the needles; "random", others, drawn anew
            for each needle from the same layers.
        n_heads: How many heads were taken out of each needle's run.
        heads: Their names; none where they were drawn.
        copied: The share of the needles' tokens that is still written.
        change: How much less that is than by the whole model, needle by needle.
        n_moved: How many of the random heads are of other layers, as their own had too few.
        n_needles: How many needles they were taken out on; 0 in records of versions that took all.
    """

    what: str
    n_heads: int
    heads: tuple[str, ...]
    copied: Effect
    change: Effect
    n_moved: int = 0
    n_needles: int = 0


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
