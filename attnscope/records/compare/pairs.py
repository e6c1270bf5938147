"""How heads change from one text to another that differs from it in little. NumPy only."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from attnscope.records.compare.record import Comparison
from attnscope.records.frame.checks import shaped
from attnscope.records.frame.codec import ARRAY, beside
from attnscope.records.frame.pair_tables import HEAD_NAMES, Floats, HeadPlace, head_name
from attnscope.records.maps.tokens import Tokens


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class MinimalPair(Comparison):
    """How the rows of every head change from one text to another that differs from it in little: which change most.

    Tokens are aligned: equal ones, and replaced ones where as many stand in one text as in the other. A row is compared
    over aligned keys, and over those of one text alone, which weigh 0 in the other.

    Attributes:
        run: What made it. Plain JSON values.
        tokens: The two texts, token by token.
        kind: "encoder" or "decoder".
        heads: Layer and number of each head.
        weights: What each head attends to in the first text, (head, query, key), float32.
        other_weights: The same in the second.
        aligned: Places of aligned tokens in the first and in the second text, (pair, 2), int64, ascending.
        equal: Which of the aligned queries are equal tokens, (pair,), bool; the others are replaced.
        divergences: Of each aligned query by measure ("hellinger": squared; "jensen_shannon": nats), (head, pair); NaN
            where a row is empty.
        measure: That by which heads are ranked.
        query: The token that heads were asked about; None = none.
        queries: Which of the aligned pairs it names.
        changes: What was done to the weights after the model gave them: "hide_special".
    """

    shape: ClassVar[str] = "texts"
    run: Mapping[str, Any]
    tokens: tuple[Tokens, Tokens]
    kind: str
    heads: tuple[HeadPlace, ...] = field(metadata=HEAD_NAMES)
    weights: NDArray[np.float32] = field(metadata={"weights": True, **ARRAY})
    other_weights: NDArray[np.float32] = field(metadata={"weights": True, **ARRAY})
    aligned: NDArray[np.int64] = field(metadata=shaped("n_queries 2", **ARRAY))
    equal: NDArray[np.bool_] = field(metadata=shaped("n_queries", **ARRAY))
    divergences: Mapping[str, Floats] = field(metadata=shaped("heads n_queries", **beside("divergence.")))
    measure: str = "hellinger"
    query: str | None = None
    queries: tuple[int, ...] = field(default=(), metadata={"index": "equal"})
    changes: tuple[str, ...] = ()

    def overall(self, measure: str | None = None) -> Floats:
        """How much each head's rows change, (head,): the root of the mean divergence over queries equal in both texts.

        NaN where there are none.
        """
        return _root_mean(self.divergences[measure or self.measure][:, self.equal])

    def at_query(self, measure: str | None = None) -> Floats:
        """The same at the tokens that `query` names, (head,); NaN without one."""
        return _root_mean(self.divergences[measure or self.measure][:, list(self.queries)])

    def ranked(self) -> list[int]:
        """The heads by how much they change, most first: at the query if there is one, else overall."""
        change = self.at_query() if self.queries else self.overall()
        return [int(head) for head in np.argsort(-change, kind="stable") if not math.isnan(change[head])]

    def rows(self) -> Iterator[Sequence[Any]]:
        """A row a head: its change overall and at the query, by each measure."""
        names = list(self.divergences)
        yield "head", *(f"{name}_{where}" for name in names for where in ("overall", "at_query"))
        changes = [change(name).tolist() for name in names for change in (self.overall, self.at_query)]
        for place, *values in zip(self.heads, *changes, strict=True):
            yield head_name(place), *values

    def unmatched(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Places of the tokens that the other text has nothing for, in the first and in the second text."""
        return tuple(  # type: ignore[return-value]  # two of them
            tuple(sorted(set(range(len(tokens))) - set(self.aligned[:, side].tolist())))
            for side, tokens in enumerate(self.tokens)
        )

    def describe(self) -> dict[str, Any]:
        """All but the arrays, with the heads in the order of their change and the tokens that one text lacks."""
        ranked = [head_name(self.heads[head]) for head in self.ranked()]
        return {**super().describe(), "ranked": ranked, "unmatched": self.unmatched()}

    def require_whole(self) -> None:
        """Refuses divergences below 0, which have no root, and weights and aligned tokens of other texts."""
        if any(np.any(each < 0) for each in self.divergences.values()):
            raise ValueError("a divergence is less than 0")
        if self.measure not in self.divergences:
            raise ValueError(f"it has no divergence {self.measure!r}")
        sizes = [len(tokens) for tokens in self.tokens]
        shapes = [(len(self.heads), n, n) for n in sizes]
        if [self.weights.shape, self.other_weights.shape] != shapes or (
            len(self.aligned) and (self.aligned.min() < 0 or (self.aligned.max(0) >= sizes).any())
        ):
            raise ValueError("its weights do not fit its tokens")


def _root_mean(divergences: Floats) -> Floats:
    known = ~np.isnan(divergences)
    counts = known.sum(1)
    sums = np.where(known, divergences, 0.0).sum(1)
    change: Floats = np.sqrt(np.divide(sums, counts, out=np.full(len(sums), np.nan), where=counts > 0))
    return change
