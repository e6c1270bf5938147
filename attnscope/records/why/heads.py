"""What heads' choices of keys rest on, over texts: shares of the variance of their scores. NumPy only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from attnscope.records.frame.checks import NUMBER, shaped
from attnscope.records.frame.codec import ARRAY
from attnscope.records.frame.pair_tables import HeadPlace, head_name
from attnscope.records.frame.record import Record
from attnscope.records.teaching.trace import EDGES, name_range
from attnscope.records.why.score import PARTS, Part

SIDES = ("query", "key")
"""Where a part stands; the first axis of shares."""

BANDS = (*(name_range(low, high) for low, high in pairwise(EDGES)), "not rotated")
"""What the bands are called, and the columns that are not turned."""


@dataclass(frozen=True, eq=False, repr=False)
class WhyHeads(Record):
    """Which parts of a model the scores of each head rest on, over texts.

    A query's scores are less their mean over the keys that it may attend to. The share of a part is its covariance with
    the score, over all such pairs, by the score's variance. The shares of all parts of a side, with the bias, sum to 1.

    Attributes:
        run: What made it: model, sha256, versions ... Plain JSON values.
        corpus: The texts: n_texts, n_tokens, n_copies, sources, problems.
        kind: "encoder" or "decoder".
        heads: The heads, (layer, head).
        parts: The parts of the model.
        shares: Shares of the variance, (query key, head, part), any sign; NaN where the head reads no such part.
        low: The low ends of their 95% intervals over texts; NaN with fewer than two texts.
        high: The high ends.
        bias: The share of a bias by position, (head,); 0 without one.
        variance: The mean variance of a query's scores, (head,), nats².
        composition: How much each head reads of what each head part writes by the weights alone, by queries and keys:
            shares above those of random directions, (query key, head, part); NaN where it is not known.
        wavelengths: The share of the variance that pairs of columns bring, by the band of their wavelength (BANDS), and
            its 95% interval, (head, band, [value low high]). The bands and the bias sum to 1. NaN for a head whose
            rotation is not known; None = the model has no rotary positions that attnscope can take apart.
    """

    SCHEMA: ClassVar[str] = "attnscope.why-heads/1"

    run: Mapping[str, Any]
    corpus: Mapping[str, Any]
    kind: str
    heads: tuple[tuple[int, int], ...] = field(metadata={"filled": True, "distinct": ""} | NUMBER)
    parts: tuple[Part, ...] = field(metadata=PARTS)
    shares: NDArray[np.float64] = field(metadata=shaped("2 heads parts", **ARRAY))
    low: NDArray[np.float64] = field(metadata=shaped("2 heads parts", **ARRAY))
    high: NDArray[np.float64] = field(metadata=shaped("2 heads parts", **ARRAY))
    bias: NDArray[np.float64] = field(metadata=shaped("heads", **ARRAY))
    variance: NDArray[np.float64] = field(metadata=shaped("heads", **ARRAY))
    composition: NDArray[np.float64] = field(metadata=shaped("2 heads parts", **ARRAY))
    wavelengths: NDArray[np.float64] | None = field(default=None, metadata=shaped("heads 6 3", **ARRAY))

    def name(self, head: int) -> str:
        """A head's name."""
        return head_name(self.heads[head])

    def find(self, head: HeadPlace) -> int:
        """Which of the heads it is.

        Raises:
            ValueError: It is none of them.
        """
        return self.heads.index(head)

    def strongest(self, side: str, head: int, most: int) -> list[int]:
        """The parts with the largest shares on a side, "query" or "key", the largest first."""
        values = np.nan_to_num(self.shares[SIDES.index(side), head], nan=-np.inf)
        return [at for at in np.argsort(-values, kind="stable")[:most].tolist() if np.isfinite(values[at])]

    def rows(self) -> Iterator[tuple[Any, ...]]:
        """One row per head and part that it may read."""
        numbers = ("share", "low", "high", "composition")
        yield "layer", "head", "part", *(f"{side}_{number}" for side in SIDES for number in numbers)
        arrays = (self.shares, self.low, self.high, self.composition)
        for at, (layer, head) in enumerate(self.heads):
            for column, part in enumerate(self.parts):
                values = [float(array[side, at, column]) for side in range(len(SIDES)) for array in arrays]
                if np.isfinite(values[0]) or np.isfinite(values[len(arrays)]):
                    yield layer, head, part.name, *values

    def require_whole(self) -> None:
        """Refuses shares that do not sum to 1."""
        for side in self.shares:
            total = np.nansum(side, axis=1) + self.bias
            if not np.all(np.abs(total - 1)[np.isfinite(side).any(1)] <= 0.01):
                raise ValueError("the shares of a head do not sum to 1")
        if self.wavelengths is not None:
            total = self.wavelengths[:, :, 0].sum(1) + self.bias
            if np.any(np.abs(total - 1) > 0.01):
                raise ValueError("the shares of a head's wavelengths do not sum to 1")
