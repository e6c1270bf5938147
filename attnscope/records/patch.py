"""What patching on pairs changes: effects of heads on a logit difference, with intervals. NumPy only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from attnscope.records.ablation import Ablation, Effect
from attnscope.records.frame.checks import shaped
from attnscope.records.frame.codec import ARRAY
from attnscope.records.frame.head_table import Column, HeadTable


@dataclass(frozen=True)
class PatchedPair:
    """A pair, and how the model answers it.

    Attributes:
        source: The file that it comes from.
        line: Its line there.
        clean: The clean text.
        corrupt: The corrupt one.
        right: The right answers, as tokens.
        wrong: The wrong ones.
        clean_difference: The logit difference right - wrong on the clean text.
        corrupt_difference: The same on the corrupt one.
    """

    source: str
    line: int
    clean: str
    corrupt: str
    right: tuple[str, ...]
    wrong: tuple[str, ...]
    clean_difference: float
    corrupt_difference: float


@dataclass(frozen=True)
class Edge:
    """A path between heads, or from a head to the logits.

    Attributes:
        sender: Name of the head whose output comes from the other run, such as "L3H1".
        receiver: Name of the head that reads it; several names where they share a key/value head; "logits".
        by: "query", "key" or "value"; empty of logits.
        effect: What the path alone changes.
        share: Of the total effect.
        q: The smallest false discovery rate among the edges at which it is not 0.
        attribution: The mean estimate by gradients, in logits; NaN = not estimated.
    """

    sender: str
    receiver: str
    by: str
    effect: Effect
    share: Effect
    q: float
    attribution: float = np.nan


@dataclass(frozen=True)
class FaithfulnessCurve:
    """How much of the total effect is left as more and more heads get values of the corrupt run.

    Attributes:
        removed: The heads in the order in which they go, those with the smallest effect first.
        n_left: How many heads are left at each point; the first has all.
        points: The share of the total effect at each point.
    """

    removed: tuple[str, ...]
    n_left: tuple[int, ...]
    points: tuple[Effect, ...]


@dataclass(frozen=True, eq=False, repr=False)
class Patching(Ablation):
    """How a logit difference right - wrong changes where heads compute with values of another run.

    Attributes:
        run: What made it; see `Ablation`.
        corpus: What it was made on; `n_texts` is the number of pairs.
        options: What was chosen; `quantities` says what each effect means.
        whole: The logit difference in the "clean" and the "corrupt" run, and the "total" effect, clean - corrupt.
        heads: One entry a head. "effect": how much of the difference comes or goes with the head, in logits, positive
            towards right answers; "share": of the total effect; "attribution": the estimate by gradients.
        together: None.
        pairs: The pairs, in the order of `by_pair`.
        units: Which heads are patched together, (head,): heads with the same number are.
        q: The smallest false discovery rate at which each head's effect is not 0 (Benjamini-Hochberg), (head,).
        by_pair: The effect on each pair, (head, pair), float32.
        positions: Labels of the tokens of the first pair, where each position was patched alone.
        position_effects: Mean effect, low and high end of each position, (head, position, 3).
        edges: What path patching found.
        curve: Faithfulness as more and more heads are patched; None = not measured.
    """

    SCHEMA: ClassVar[str] = "attnscope.patch/1"

    pairs: tuple[PatchedPair, ...] = ()
    units: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64), metadata=shaped("heads", **ARRAY))
    q: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0), metadata=shaped("heads", **ARRAY))
    by_pair: NDArray[np.float32] = field(
        default_factory=lambda: np.zeros((0, 0), np.float32), metadata=shaped("heads pairs", **ARRAY)
    )
    positions: tuple[str, ...] = ()
    position_effects: NDArray[np.float64] = field(
        default_factory=lambda: np.zeros((0, 0, 3)), metadata=shaped("heads positions 3", **ARRAY)
    )
    edges: tuple[Edge, ...] = ()
    curve: FaithfulnessCurve | None = None

    @property
    def main(self) -> str:
        """The quantity that heads are ranked by."""
        return "effect"

    @property
    def has_shares(self) -> bool:
        """Whether the total effect is strong enough for shares of it."""
        return any(np.isfinite(head.effects["share"].value) for head in self.heads if "share" in head.effects)

    @property
    def shares_heads(self) -> bool:
        """Whether some heads are patched together."""
        return len(set(self.units.tolist())) < len(self.heads)

    def members(self, number: int) -> tuple[int, ...]:
        """The heads that are patched together with one, itself among them, by their number in the record."""
        return tuple(np.flatnonzero(self.units == self.units[number]).tolist())

    def unit_name(self, number: int) -> str:
        """A head's name, or those of all that are patched with it, such as L3H0+L3H1."""
        return "+".join(self.named(self.heads[member]) for member in self.members(number))

    def head_table(self) -> HeadTable:
        """What each head changes, with intervals, the false discovery rate, and what is patched with it."""
        table = super().head_table()
        columns = [*table.columns]
        columns.append(Column("effect_q", self.q, what="false discovery rate of the effect", range=(0, 1)))
        if self.shares_heads:
            names = [self.unit_name(number) for number in range(len(self.heads))]
            columns.append(Column("patched_with", names, what="heads that are patched together"))
        return HeadTable(table.heads, tuple(columns))

    def require_whole(self) -> None:
        """Refuse what `Ablation` does, effects without a total, and a curve whose points do not fit."""
        super().require_whole()
        if not {"clean", "corrupt", "total"} <= set(self.whole):
            raise ValueError("it has no total effect")
        curve = self.curve
        if curve is not None and not len(curve.n_left) == len(curve.points) <= len(curve.removed) + 1:
            raise ValueError("the points of the curve do not fit the heads that it takes out")

    def drawn_texts(self) -> Any:
        """The texts that figures show."""
        return [self.run.get("model", ""), *self.positions, *map(str, self.corpus.get("sources", ()))]


def quantities(by: str, direction: str) -> Mapping[str, Mapping[str, str]]:
    """What every name in a record means."""
    if direction == "denoise":
        runs = f"where the corrupt run gets the {by} of the clean one: patched - corrupt"
    else:
        runs = f"where the clean run gets the {by} of the corrupt run: clean - patched"
    return {
        "effect": {"what": f"change of the logit difference right - wrong {runs}", "unit": "logits"},
        "share": {"what": "the mean effect by the mean total effect, clean - corrupt", "unit": ""},
        "attribution": {"what": "the effect to first order: gradient times difference", "unit": "logits"},
        "faithfulness": {"what": "share of the total effect that is left", "unit": ""},
    }
