"""What one score of one head is made of: which parts of the model its query reads, and which its key. NumPy only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from attnscope.records.frame.checks import shaped
from attnscope.records.frame.codec import ARRAY
from attnscope.records.frame.record import Record
from attnscope.records.maps.tokens import Tokens

_COUNT: dict[str, Any] = {"range": (0, None)}


@dataclass(frozen=True)
class Part:
    """A part of a model that adds to the residual stream.

    Attributes:
        name: Such as "L3H1", "L3 MLP" or "token embedding".
        kind: "head", "MLP", "embedding" or "bias".
        layer: Its layer; -1 = it belongs to none.
        head: Its number among the heads of its layer; -1 = it is none.
    """

    name: str
    kind: str
    layer: int = -1
    head: int = -1


PARTS: dict[str, Any] = {"distinct": "name"}
"""Metadata of the parts of a model."""


@dataclass(frozen=True, eq=False, repr=False)
class Why(Record):
    """Why a head's query attends to a key: its score before softmax, as a sum over pairs of parts.

    Softmax sees only how a score differs from the others of its query. So every number but `score` and `mean` is less
    its mean over the keys that the query may attend to.

    Attributes:
        run: What made it: model, sha256, versions ... Plain JSON values.
        text: The text as given.
        kind: "encoder", "decoder" or "cross".
        layer: The head's layer.
        head: Its number.
        queries: The tokens that queries are made of.
        keys: The tokens that keys are made of.
        query: Which of the queries, from 0.
        key: Which of the keys.
        weight: The attention weight between them, 0 to 1.
        score: The score, scale * q · k + bias, in nats; before the soft cap.
        mean: The mean score of the keys that the query may attend to.
        masked_before: Keys before the query that a mask hides from it.
        masked_after: Keys from the query on that a mask hides.
        softcap: The cap that the score goes through afterwards; None = there is none.
        parts: The parts of the model that add to what is read.
        pairs: What the parts at the query (rows) times the parts at the key (columns) add, (part, part), float64, nats.
        bias: What a bias by position adds (T5, ALiBi), nats; None = there is none.
        rounding: How far the sum may be off by the rounding of the model's precision.
    """

    SCHEMA: ClassVar[str] = "attnscope.why/1"

    run: Mapping[str, Any]
    text: str
    kind: str
    layer: int = field(metadata=_COUNT)
    head: int = field(metadata=_COUNT)
    queries: Tokens
    keys: Tokens
    query: int = field(metadata={"index": "queries"})
    key: int = field(metadata={"index": "keys"})
    weight: float
    score: float
    mean: float
    masked_before: int = field(metadata=_COUNT)
    masked_after: int = field(metadata=_COUNT)
    softcap: float | None
    parts: tuple[Part, ...] = field(metadata=PARTS)
    pairs: NDArray[np.float64] = field(metadata=shaped("parts parts", **ARRAY))
    bias: float | None
    rounding: float

    @property
    def excess(self) -> float:
        """The score above the mean of its query: what the pairs and the bias sum to."""
        return self.score - self.mean

    @property
    def by_query(self) -> NDArray[np.float64]:
        """What each part adds through the query, (part,)."""
        sums: NDArray[np.float64] = self.pairs.sum(1)
        return sums

    @property
    def by_key(self) -> NDArray[np.float64]:
        """What each part adds through the key, (part,)."""
        sums: NDArray[np.float64] = self.pairs.sum(0)
        return sums

    @property
    def off(self) -> float:
        """By how much the sum of all terms differs from the score."""
        return float(abs(self.pairs.sum() + (self.bias or 0.0) - self.excess))

    @property
    def n_keys(self) -> int:
        """How many keys the query may attend to."""
        return len(self.keys) - self.masked_before - self.masked_after

    @property
    def name(self) -> str:
        """The head's name."""
        return f"L{self.layer}H{self.head}"

    def strongest(self, most: int) -> list[tuple[int, int]]:
        """The pairs that add or take away most, (part at the query, part at the key), the largest first."""
        order = np.argsort(-np.abs(self.pairs), axis=None, kind="stable")[:most]
        return [divmod(int(at), len(self.parts)) for at in order]

    def rows(self) -> Iterator[tuple[Any, ...]]:
        """One row per part: what it adds through the query and through the key."""
        yield "part", "kind", "layer", "head", "query_nats", "key_nats"
        for part, query, key in zip(self.parts, self.by_query.tolist(), self.by_key.tolist(), strict=True):
            yield part.name, part.kind, part.layer, part.head, query, key

    def drawn_texts(self) -> Any:
        """The model and the two tokens."""
        return [self.run.get("model", ""), self.queries.labels[self.query], self.keys.labels[self.key]]

    def require_whole(self) -> None:
        """Refuses a mask that hides all keys, and parts whose sum is not the score."""
        if self.n_keys < 1:
            raise ValueError("its query may attend to no key")
        if not self.off <= self.rounding:
            raise ValueError(
                f"its parts sum to {self.off:.3g} more or less than its score; rounding explains {self.rounding:.3g}"
            )
