"""What a model finds in long texts, whole and without some of its heads, or with parts of their memory. NumPy only."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

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


@dataclass(frozen=True)
class Streamed:
    """What a model does while a share of its key/value heads streams.

    Attributes:
        share: The share of all key/value heads that was asked for, 0 to 1.
        by: "scores" (those with the smallest values stream) or "random" (as many, drawn anew for each text).
        n_heads: How many key/value heads stream.
        loss: Nats per token.
        loss_rise: By how much that is more than of the whole model, text by text.
        recall: The share of the needles' tokens that the model writes.
        recall_drop: By how much that is less than of the whole model, text by text.
    """

    share: float
    by: str
    n_heads: int
    loss: Effect
    loss_rise: Effect
    recall: Effect
    recall_drop: Effect


@dataclass(frozen=True)
class StreamingCheck:
    """What a model loses where some of its key/value heads see the first tokens and the latest ones alone.

    Attributes:
        model: Its name.
        n_kv_heads: Key/value heads of all layers together.
        sink_size: First tokens that a streaming head sees.
        recent_size: Latest tokens that it sees.
        lengths: Tokens of the texts.
        n_needles: How many texts there are, each with a needle; no head was chosen on them.
        loss: Nats per token of the whole model.
        recall: The share of the needles' tokens that it writes.
        streamed: The same for each share, by scores and at random.
    """

    model: str
    n_kv_heads: int
    sink_size: int
    recent_size: int
    lengths: tuple[int, ...]
    n_needles: int
    loss: Effect
    recall: Effect
    streamed: tuple[Streamed, ...]

    def as_json(self) -> dict[str, Any]:
        """All of it as plain JSON values."""
        return asdict(self)
