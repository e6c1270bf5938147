"""How the heads of a model came to be: measures, roles and composition over a training's checkpoints. NumPy only."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from attnscope.errors import AttnscopeError
from attnscope.records.frame.checks import MOST_HEADS, shaped
from attnscope.records.frame.codec import ARRAY, OMITTED
from attnscope.records.frame.record import StudyRecord
from attnscope.records.heads.findings import MeasureFacts, read_measure_facts
from attnscope.records.weights import COMPOSITIONS

NO_ROLE, TENTATIVE, HAS_ROLE = range(3)
"""What `Training.has_role` holds."""

MOST_STEPS = 1 << 53
"""No training has more; JSON and axes hold each number up to it."""

_PARTS = ("value", "low", "high")


@dataclass(frozen=True)
class Checkpoint:
    """A model at one step of its training.

    Attributes:
        name: What it was asked for by, such as a folder.
        step: Its step.
        sha256: Hash of its weights; empty for one in memory.
        loss: Mean loss of its predictions on the texts, in nats; NaN where it was not measured.
        loss_low: Lower end of its 95% interval over texts.
        loss_high: Upper end.
        elapsed_s: How long it took to measure, in seconds; without loading.
    """

    name: str
    step: int
    sha256: str = ""
    loss: float = math.nan
    loss_low: float = math.nan
    loss_high: float = math.nan
    elapsed_s: float = math.nan


@dataclass(frozen=True)
class PairSeries:
    """How much one head reads of what an earlier one writes, over the checkpoints.

    Attributes:
        by: "Q", "K" or "V": through its queries, keys or values.
        sender: Number of the earlier head among the record's.
        receiver: Number of the later one.
        share: |X Y| / (|X| |Y|) by the weights alone, at each checkpoint.
        expected: The same of matrices with the same singular values whose directions are random, in the mean.
    """

    by: str = field(metadata={"choices": COMPOSITIONS})
    sender: int = field(metadata={"index": "heads"})
    receiver: int = field(metadata={"index": "heads"})
    share: tuple[float, ...] = field(metadata=shaped("checkpoints"))
    expected: tuple[float, ...] = field(metadata=shaped("checkpoints"))

    @property
    def excess(self) -> NDArray[np.float64]:
        """The share above what is expected, at each checkpoint."""
        return np.array(self.share, np.float64) - np.array(self.expected, np.float64)


@dataclass(frozen=True, eq=False, repr=False)
class Training(StudyRecord):
    """Measures and roles of all heads over the checkpoints of one training.

    Attributes:
        run: What made it, of the last checkpoint, as in `Findings`; `skipped` lists the checkpoints that could not be
            measured, with the reason. Plain JSON values.
        corpus: What it was made on: as in `Findings`; `n_checkpoints`, and `complete` (False after an interruption).
        options: What names mean, as in `Findings`: `measures` and `roles`; and `loss`, what was predicted.
        checkpoints: In order of their steps.
        heads: Kind, layer and head of each.
        measures: The names of the measures, in their order; "explained" is the share that a description explains.
        roles: The names of the roles that any head has at any step.
        value: Of each measure, (measure, checkpoint, head); NaN where it is undefined.
        low: Lower ends of their 95% intervals over texts.
        high: Upper ends.
        uniform: The measures' values under uniform attention, (measure, head).
        has_role: Whether a head has a role: 0 no, 1 tentatively (few texts), 2 yes; (role, checkpoint, head).
        pairs: Composition of pairs of heads, where it was asked for: of all, or of those with the most at any step.
    """

    SCHEMA: ClassVar[str] = "attnscope.training/1"
    HOLDS: ClassVar[str] = "checkpoints"

    checkpoints: tuple[Checkpoint, ...]
    heads: tuple[tuple[str, int, int], ...] = field(metadata={"filled": True, "distinct": ""})
    measures: tuple[str, ...] = field(metadata={"distinct": ""})
    roles: tuple[str, ...]
    value: NDArray[np.float64] = field(metadata=shaped("measures checkpoints heads", **ARRAY))
    low: NDArray[np.float64] = field(metadata=shaped("measures checkpoints heads", **ARRAY))
    high: NDArray[np.float64] = field(metadata=shaped("measures checkpoints heads", **ARRAY))
    uniform: NDArray[np.float64] = field(metadata=shaped("measures heads", **ARRAY))
    has_role: NDArray[np.int8] = field(metadata=shaped("roles checkpoints heads", **ARRAY))
    pairs: tuple[PairSeries, ...] = field(default=(), metadata=OMITTED)

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps, ascending."""
        return tuple(checkpoint.step for checkpoint in self.checkpoints)

    @property
    def head_names(self) -> tuple[str, ...]:
        """Such as L1H0; with the kind before it where there are several."""
        several = len({kind for kind, _, _ in self.heads}) > 1
        return tuple(f"{kind} L{layer}H{head}" if several else f"L{layer}H{head}" for kind, layer, head in self.heads)

    @property
    def has_loss(self) -> bool:
        """Whether any checkpoint's loss is known."""
        return any(math.isfinite(checkpoint.loss) for checkpoint in self.checkpoints)

    def of(self, measure: str, layer: int, head: int, kind: str | None = None) -> NDArray[np.float64]:
        """A measure of one head at each checkpoint, with the ends of its interval: (checkpoint, 3).

        Args:
            measure: Its name.
            layer: The head's layer.
            head: Its number.
            kind: Of attention; None = the first that has it.

        Raises:
            AttnscopeError: There is no such measure or head.
        """
        row = self._row(self.measures, measure, "measure")
        columns = [n for n, of in enumerate(self.heads) if of[1:] == (layer, head) and kind in (None, of[0])]
        if not columns:
            raise AttnscopeError(f"the record has no head L{layer}H{head}", "layers and heads count from 0")
        return np.stack([part[row, :, columns[0]] for part in (self.value, self.low, self.high)], 1)

    def composition(self, by: str, sender: tuple[int, int], receiver: tuple[int, int]) -> NDArray[np.float64]:
        """How much one head reads of what another writes at each checkpoint, above random directions: (checkpoint,).

        Args:
            by: "Q", "K" or "V".
            sender: Layer and head of the earlier one.
            receiver: Of the later one.

        Raises:
            AttnscopeError: Composition was not followed, or not of this pair.
        """
        for pair in self.pairs:
            if (pair.by, self.heads[pair.sender][1:], self.heads[pair.receiver][1:]) == (by, sender, receiver):
                return pair.excess
        names = "L{}H{} and L{}H{}".format(*sender, *receiver)
        raise AttnscopeError(f"the record has no {by} composition of {names}", "it is followed with --composition")

    def pair_name(self, pair: PairSeries) -> str:
        """Such as L0H1 → L1H0."""
        return f"{self.head_names[pair.sender]} → {self.head_names[pair.receiver]}"

    def since(self, role: str) -> dict[str, int]:
        """Of each head that has a role at the last step, by name: from which step on it has had it; none = {}.

        Raises:
            AttnscopeError: There is no such role.
        """
        if role not in self.roles and role in self.options.get("roles", {}):
            return {}
        has = self.has_role[self._row(self.roles, role, "role")] > NO_ROLE
        first = len(has) - np.argmin(np.concatenate([has[::-1], np.zeros((1, has.shape[1]), bool)]), 0)
        starts = zip(self.head_names, first.tolist(), strict=True)
        return {name: self.steps[start] for name, start in starts if start < len(has)}

    def measure_facts(self, measure: str) -> MeasureFacts:
        """What the record says about a measure beside its values; see `Findings.measure_facts`."""
        return read_measure_facts(self.options, measure)

    def rows(self) -> Iterator[Sequence[Any]]:
        """One row per checkpoint and head: the loss, and the head's roles and measures with their intervals."""
        columns = [name if part == "value" else f"{name}_{part}" for name in self.measures for part in _PARTS]
        followed = tuple(dict.fromkeys(pair.by for pair in self.pairs))
        sent = [f"{by}_{what}" for by in followed for what in ("from", "share", "expected")]
        yield ("checkpoint", "step", "loss", "kind", "layer", "head", "roles", *columns, *sent)
        for number, checkpoint in enumerate(self.checkpoints):
            for column, head in enumerate(self.heads):
                has_role = self.has_role[:, number, column]
                roles = "+".join(name for name, has in zip(self.roles, has_role, strict=True) if has) or "unclassified"
                parts = np.stack([self.value, self.low, self.high], -1)[:, number, column].ravel().tolist()
                best = [part for by in followed for part in self._strongest(by, number, column)]
                yield (checkpoint.name, checkpoint.step, checkpoint.loss, *head, roles, *parts, *best)

    def _strongest(self, by: str, number: int, receiver: int) -> tuple[str, float, float]:
        """The head whose writing a head reads most at a checkpoint, the share, and what is expected."""
        mine = [pair for pair in self.pairs if (pair.by, pair.receiver) == (by, receiver)]
        known = [pair for pair in mine if math.isfinite(pair.excess[number])]
        if not known:
            return "", math.nan, math.nan
        best = max(known, key=lambda pair: float(pair.excess[number]))
        return self.head_names[best.sender], best.share[number], best.expected[number]

    def require_whole(self) -> None:
        """Refuses heads that no model has, and steps that do not ascend."""
        if any(after <= before for before, after in zip(self.steps, self.steps[1:], strict=False)):
            raise ValueError("its steps do not ascend")
        if not all(0 <= step <= MOST_STEPS for step in self.steps):
            raise ValueError("it has a step that is none")
        if any(not 0 <= number < MOST_HEADS for _, *numbers in self.heads for number in numbers):
            raise ValueError("it has a head that no model has")

    @staticmethod
    def _row(names: Sequence[str], name: str, what: str) -> int:
        if name not in names:
            raise AttnscopeError(f"the record has no {what} {name!r}", f"it has {', '.join(names)}" if names else "")
        return names.index(name)
