"""What the weights of heads say: copying, matching, what is read and written, which head feeds which. NumPy only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from attnscope.records.frame.checks import NUMBER, shaped
from attnscope.records.frame.codec import ARRAY, OMITTED
from attnscope.records.frame.pair_tables import OneHead, require_known
from attnscope.records.frame.record import Record

COMPOSITIONS = ("Q", "K", "V")
"""By what a head reads another: its queries, keys or values."""


@dataclass(frozen=True)
class Score:
    """A score of eigenvalues, beside heads of the same singular values that read and write anywhere.

    Attributes:
        value: The head's, -1 to 1; NaN = not defined.
        mean: Of the random ones.
        low: The least of the random ones.
        high: The largest. Of 39 draws, one more is outside in 5% of cases.
    """

    value: float
    mean: float
    low: float
    high: float

    @property
    def is_outside(self) -> bool:
        """Whether the head's is beyond all random ones."""
        return not self.low <= self.value <= self.high and bool(np.isfinite(self.value))


@dataclass(frozen=True)
class Direction:
    """A pair of singular directions of a head, with the tokens at either end of them.

    Attributes:
        share: Of the squared norm of the head's matrix.
        source: Tokens that are read: those at one end of the direction, and those at the other.
        target: What comes of them, in the same order of ends.
    """

    share: float
    source: tuple[tuple[str, ...], ...]
    target: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Answer:
    """What a head writes where it attends to a token alone: the tokens that rise by it, most first."""

    token: str
    written: tuple[str, ...]


@dataclass(frozen=True)
class WeightsOfHead(OneHead):
    """One head, by its weights.

    Attributes:
        layer: Its layer.
        head: Its number.
        copying: Whether it raises the token that it attends to: eigenvalues of W_U W_O W_V W_E.
        matching: Whether a query looks for its own token, apart from positions: eigenvalues of W_E' W_Q' W_K W_E, each
            query's scores less their mean.
        same_nats: By how much a token's score for itself is above that for others, mean over tokens, at one place.
        previous: The share of attention that the previous token gets where positions alone speak; NaN = not known.
        same: The same of the token itself.
        next: Of the next one; 0 where it cannot be seen.
        first: Of the first one.
        writes: Singular directions of W_O W_V: from the tokens that are read to those that rise by it.
        seeks: Singular directions of W_Q' W_K: from the tokens of a query to those of keys that it looks for.
        answers: What it writes for tokens that were asked for.
    """

    layer: int = field(metadata=NUMBER)
    head: int = field(metadata=NUMBER)
    copying: Score
    matching: Score
    same_nats: float
    previous: float
    same: float
    next: float
    first: float
    writes: tuple[Direction, ...] = ()
    seeks: tuple[Direction, ...] = ()
    answers: tuple[Answer, ...] = ()


@dataclass(frozen=True)
class Link:
    """How much one head reads of what another writes.

    Attributes:
        sender: Number of the earlier head among the record's.
        receiver: Number of the later one.
        by: "Q", "K" or "V".
        share: |X Y| / (|X| |Y|).
        expected: The same of matrices with the same singular values whose directions are random, in the mean.
        deviations: The share's square above its mean for such matrices, in their standard deviations.
    """

    sender: int = field(metadata={"index": "heads"})
    receiver: int = field(metadata={"index": "heads"})
    by: str
    share: float
    expected: float
    deviations: float

    @property
    def excess(self) -> float:
        """The share above what is expected."""
        return self.share - self.expected


@dataclass(frozen=True, eq=False)
class Composition:
    """How much each head reads of what each earlier one writes, beside random directions.

    Attributes:
        share: |X Y| / (|X| |Y|), (Q K V, sender, receiver), float32; NaN where the receiver is in no later layer.
        sender_spread: Sum of fourth powers of the singular values by the squared sum of squares, of W_O W_V, (head,).
        receiver_spread: The same of what queries, keys and values read by, (Q K V, head).
        dimension: Dimensions of the stream that heads can read.
    """

    share: NDArray[np.float32]
    sender_spread: NDArray[np.float64]
    receiver_spread: NDArray[np.float64]
    dimension: int

    @property
    def variation(self) -> NDArray[np.float64]:
        """Variance of the squared share over its squared mean, for random directions, (Q K V, sender, receiver).

        The squared share is tr(A R B R') with A and B of trace 1 and R random orthogonal: its mean is 1/d, and its
        variance 2 |A - 1/d|² |B - 1/d|² / ((d - 1) (d + 2)), by Schur's lemma on traceless symmetric matrices.
        """
        d = self.dimension
        senders, receivers = self.sender_spread[None, :, None], self.receiver_spread[:, None, :]
        spread: NDArray[np.float64] = np.maximum(senders - 1 / d, 0) * np.maximum(receivers - 1 / d, 0)
        return 2 * d**2 * spread / ((d - 1) * (d + 2))

    @property
    def expected(self) -> NDArray[np.float64]:
        """The mean share for random directions, to second order: (1 - variation / 8) / sqrt(d)."""
        expected: NDArray[np.float64] = (1 - np.minimum(self.variation, 4) / 8) / np.sqrt(self.dimension)
        return expected


@dataclass(frozen=True, eq=False, repr=False)
class HeadWeights(Record):
    """What the weights of all heads of a model say, without any text.

    Attributes:
        run: What made it: model, sha256, versions ... Plain JSON values.
        kind: "encoder" or "decoder".
        ends: What tokens stand for what is written: "unembedding", or "static embeddings".
        places: How places are known to the model: "in the stream", or "in the scores".
        n_places: How many places the shares of previous and other tokens are means over.
        uniform: The same shares of a head that attends to all alike: name -> by layer.
        dimension: Dimensions of the stream that heads can read: d_model, one less where all norms centre.
        n_draws: Random heads that scores are compared with.
        seed: Of those.
        heads: All heads, by layer and number.
        composition: Shares, (Q K V, sender, receiver), float32; NaN where the receiver is in no later layer.
        sender_spread: Sum of fourth powers of the singular values by the squared sum of squares, of W_O W_V, (head,).
        receiver_spread: The same of what queries, keys and values read by, (Q K V, head).
        picked: Numbers of heads that are shown one by one; none = the strongest of all.
    """

    SCHEMA: ClassVar[str] = "attnscope.weights/1"

    run: Mapping[str, Any]
    kind: str
    ends: str
    places: str
    n_places: int
    uniform: Mapping[str, tuple[float, ...]]
    dimension: int = field(metadata={"range": (2, None)})
    n_draws: int
    seed: int
    heads: tuple[WeightsOfHead, ...] = field(metadata={"filled": True, "distinct": "name"})
    composition: NDArray[np.float32] = field(metadata=shaped("3 heads heads", **ARRAY))
    sender_spread: NDArray[np.float64] = field(metadata=shaped("heads", **ARRAY))
    receiver_spread: NDArray[np.float64] = field(metadata=shaped("3 heads", **ARRAY))
    picked: tuple[int, ...] = field(default=(), metadata={"index": "heads", **OMITTED})

    @property
    def _composed(self) -> Composition:
        return Composition(self.composition, self.sender_spread, self.receiver_spread, self.dimension)

    @property
    def variation(self) -> NDArray[np.float64]:
        """Variance of the squared share over its squared mean, for random directions; see `Composition`."""
        return self._composed.variation

    @property
    def expected(self) -> NDArray[np.float64]:
        """The mean share for random directions, (Q K V, sender, receiver); see `Composition`."""
        return self._composed.expected

    @property
    def excess(self) -> NDArray[np.float64]:
        """Shares above what is expected of random directions, (Q K V, sender, receiver)."""
        excess: NDArray[np.float64] = self.composition - self.expected
        return excess

    @property
    def deviations(self) -> NDArray[np.float64]:
        """How many standard deviations the squared share is above its mean, (Q K V, sender, receiver)."""
        squared: NDArray[np.float64] = self.composition.astype(np.float64) ** 2
        with np.errstate(divide="ignore", invalid="ignore"):
            return (squared * self.dimension - 1) / np.sqrt(self.variation)

    def strongest(self, by: str, most: int = 10) -> list[Link]:
        """The pairs that compose most by "Q", "K" or "V", above what is expected of random directions."""
        number = COMPOSITIONS.index(by)
        excess, expected, deviations = self.excess[number], self.expected[number], self.deviations[number]
        order = np.argsort(-np.nan_to_num(excess, nan=-np.inf), axis=None, kind="stable")[:most]
        pairs = [divmod(int(at), len(self.heads)) for at in order]
        return [
            Link(s, r, by, float(self.composition[number, s, r]), float(expected[s, r]), float(deviations[s, r]))
            for s, r in pairs
            if np.isfinite(excess[s, r])
        ]

    def only(self, picked: Sequence[tuple[int, int]]) -> HeadWeights:
        """The same record, which tells what it knows of some heads, (layer, head)."""
        numbers = {(head.layer, head.head): number for number, head in enumerate(self.heads)}
        require_known(numbers, picked, "this record")
        return replace(self, picked=tuple(numbers[head] for head in dict.fromkeys(picked)))

    def drawn_texts(self) -> Any:
        """Only the model: tables have tokens, figures have none."""
        return self.run.get("model", "")

    def rows(self) -> Iterator[tuple[Any, ...]]:
        """One row per head; of compositions the strongest sender by queries, keys and values."""
        scores = ("value", "mean", "low", "high")
        shares = ("same_nats", "previous", "same", "next", "first")
        sent = [f"{by}_{what}" for by in COMPOSITIONS for what in ("from", "share", "expected")]
        yield (
            "layer", "head", *(f"{name}_{part}" for name in ("copying", "matching") for part in scores), *shares,
            "writes", "seeks", *sent,
        )  # fmt: skip
        excess, expected = self.excess, self.expected
        for receiver, head in enumerate(self.heads):
            row: list[Any] = [head.layer, head.head]
            row += [getattr(score, part) for score in (head.copying, head.matching) for part in scores]
            row += [getattr(head, name) for name in shares]
            row += [" ".join(directions[0].target[0]) if directions else "" for directions in (head.writes, head.seeks)]
            for number in range(len(COMPOSITIONS)):
                column = excess[number, :, receiver]
                if not np.isfinite(column).any():
                    row += ["", np.nan, np.nan]
                    continue
                sender = int(np.nan_to_num(column, nan=-np.inf).argmax())
                values = (self.composition[number, sender, receiver], expected[number, sender, receiver])
                row += [self.heads[sender].name, *map(float, values)]
            yield tuple(row)
