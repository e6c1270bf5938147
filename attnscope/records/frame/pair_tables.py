"""Divergences between heads as tables: all pairs, with intervals over texts. NumPy only."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from attnscope.errors import UsageError, amount
from attnscope.records.frame.checks import NUMBER, shaped
from attnscope.records.frame.codec import ARRAY, coded

Floats = NDArray[np.float64]
HeadPlace = tuple[int, int]
"""Layer and head."""


def head_name(place: HeadPlace) -> str:
    """Such as L3H1."""
    return f"L{place[0]}H{place[1]}"


def read_head_name(name: str) -> HeadPlace:
    """The place of a head from its name, such as L3H1."""
    layer, head = name.removeprefix("L").split("H")
    return int(layer), int(head)


HEAD_NAMES = coded(lambda heads: [*map(head_name, heads)], lambda names: tuple(map(read_head_name, names)))
"""Metadata of heads that are described by their names."""


def require_known(known: Iterable[HeadPlace], picked: Iterable[HeadPlace], where: str) -> None:
    """Refuses picked heads that a record does not hold.

    Args:
        known: The heads that it holds.
        picked: Those that are asked for.
        where: What the record is called, such as "this atlas".
    """
    heads = {*known}
    if missing := [head for head in picked if head not in heads]:
        raise UsageError(f"there is no head {head_name(missing[0])} in {where}", f"it has {amount(len(heads), 'head')}")


class OneHead:
    """What is known of a head by its layer and number."""

    layer: int
    head: int

    @property
    def name(self) -> str:
        """Such as L3H1."""
        return head_name((self.layer, self.head))


@dataclass(frozen=True)
class HeadOfKind(OneHead):
    """The same where a model may have several kinds of attention: "encoder", "decoder" or "cross"."""

    kind: str
    layer: int = field(metadata=NUMBER)
    head: int = field(metadata=NUMBER)

    @property
    def address(self) -> tuple[str, int, int]:
        """Its kind of attention, layer and number."""
        return self.kind, self.layer, self.head


def name_table(measure: str, special: bool) -> str:
    """What a table of a measure is called, with special tokens or without."""
    return measure + ("" if special else "_without_special")


@dataclass(frozen=True, eq=False)
class PairTable:
    """One divergence of all pairs of heads, over texts; the rows are heads of one side, the columns of the other.

    Attributes:
        measure: "hellinger": the squared Hellinger distance h² = 1/2 Σ_k (√p_k - √q_k)², 0 to 1; or "jensen_shannon":
            the divergence in nats, 0 to ln 2.
        special: Whether special tokens take part. Without them their rows and columns are taken out, and each row is
            divided by what is left of it; a row of which less than 1% is left takes no part. The first token of a
            decoder goes with them, see `Tokens.sinks`.
        mean: Σ divergence / Σ queries over all queries of all texts, (head, head); NaN where never compared.
        low: Lower end of the 95% interval of the mean over texts, at least 0; NaN with fewer than 2 texts.
        high: Upper end.
        count: Over how many queries.
    """

    TOLD: ClassVar[tuple[str, ...]] = ("name",)
    COLUMNS: ClassVar[tuple[str, ...]] = (
        "measure", "special_tokens", "a", "b", "distance", "mean", "low", "high", "n_queries",
    )  # fmt: skip

    measure: str
    special: bool = field(metadata={"key": "special_tokens"})
    mean: Floats = field(metadata=shaped("heads columns", **ARRAY))
    low: Floats = field(metadata=shaped("heads columns", **ARRAY))
    high: Floats = field(metadata=shaped("heads columns", **ARRAY))
    count: Floats = field(metadata=shaped("heads columns", **ARRAY))

    @property
    def name(self) -> str:
        """Such as "hellinger", or "hellinger_without_special"."""
        return name_table(self.measure, self.special)

    @property
    def distances(self) -> Floats:
        """The metric √mean: the root mean square Hellinger distance, or the root of the mean divergence."""
        distances: Floats = np.sqrt(self.mean)
        return distances

    def distance_interval(self, a: int, b: int) -> tuple[float, float, float]:
        """The distance of a pair, and the ends of its 95% interval."""
        return math.sqrt(self.mean[a, b]), math.sqrt(self.low[a, b]), math.sqrt(self.high[a, b])

    def row(self, first: HeadPlace, second: HeadPlace, a: int, b: int) -> tuple[Any, ...]:
        """What a file says of a pair of heads: `COLUMNS`.

        Args:
            first: The one head.
            second: The other.
            a: The row of the first.
            b: The column of the second.
        """
        mean, low, high = (float(part[a, b]) for part in (self.mean, self.low, self.high))
        special = "with" if self.special else "without"
        names = head_name(first), head_name(second)
        return self.measure, special, *names, math.sqrt(mean), mean, low, high, int(self.count[a, b])

    def require_whole(self) -> None:
        """Refuses divergences beyond their bounds: they would have no root."""
        if np.any(self.mean > 1.01) or any(np.any(part < 0) for part in (self.mean, self.low, self.high)):
            raise ValueError(f"its {self.name} is not between 0 and 1")
        if not np.all(self.count >= 0) or np.any(np.isinf(self.count)):
            raise ValueError(f"the queries of its {self.name} are not counted")


@dataclass(frozen=True, eq=False)
class Arrangement:
    """Heads put in order by their distances.

    Attributes:
        merges: The clusters, (heads - 1, 4), as scipy's linkage has them: average linkage of the distances.
        order: The heads in the order of the leaves, (head,), int64.
        places: The plane of classical multidimensional scaling, (head, 2), in the unit of the distances.
        explained: The share of the variance along each of its axes, (2,).
        layers: The distance between the heads of two layers, (layer, layer): the root of the mean divergence over all
            pairs of heads and all queries; on the diagonal over the pairs within, NaN where there are none.
        layers_low: Lower end of its 95% interval over texts.
        layers_high: Upper end.
    """

    merges: Floats = field(metadata=shaped("n_merges 4", **ARRAY))
    order: NDArray[np.int64] = field(metadata=shaped("heads", index="heads", distinct="", **ARRAY))
    places: Floats = field(metadata=shaped("heads 2", **ARRAY))
    explained: Floats = field(metadata=shaped("2", **ARRAY))
    layers: Floats = field(metadata=shaped("n_layers n_layers", **ARRAY))
    layers_low: Floats = field(metadata=shaped("n_layers n_layers", **ARRAY))
    layers_high: Floats = field(metadata=shaped("n_layers n_layers", **ARRAY))
