"""Divergences between heads as tables: all pairs, with intervals over texts. NumPy only."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnscope.errors import AttnscopeError, UsageError, amount
from attnscope.records.frame.codec import shaped

Floats = NDArray[np.float64]
HeadPlace = tuple[int, int]
"""Layer and head."""


def head_name(place: HeadPlace) -> str:
    """Such as L3H1."""
    return f"L{place[0]}H{place[1]}"


def require_known(known: Iterable[HeadPlace], picked: Iterable[HeadPlace], where: str) -> None:
    """Refuses heads that a record does not hold.

    Args:
        known: The heads that it holds.
        picked: Those that are asked for.
        where: What the record is called, such as "this atlas".

    Raises:
        UsageError: There is one.
    """
    held = {*known}
    if missing := [place for place in picked if place not in held]:
        raise UsageError(f"there is no head {head_name(missing[0])} in {where}", f"it has {amount(len(held), 'head')}")


class OneHead:
    """What is known of a head by its layer and number."""

    layer: int
    head: int

    @property
    def name(self) -> str:
        """Such as L3H1."""
        return head_name((self.layer, self.head))


class HeadOfKind(OneHead):
    """The same where a model may have several kinds of attention."""

    kind: str

    @property
    def address(self) -> tuple[str, int, int]:
        """Its kind of attention, layer and number."""
        return self.kind, self.layer, self.head


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

    measure: str
    special: bool
    mean: Floats = field(metadata=shaped("heads columns"))
    low: Floats = field(metadata=shaped("heads columns"))
    high: Floats = field(metadata=shaped("heads columns"))
    count: Floats = field(metadata=shaped("heads columns"))

    @property
    def name(self) -> str:
        """Such as "hellinger", or "hellinger_without_special"."""
        return self.measure + ("" if self.special else "_without_special")

    @property
    def distances(self) -> Floats:
        """The metric √mean: the root mean square Hellinger distance, or the root of the mean divergence."""
        found: Floats = np.sqrt(self.mean)
        return found

    def distance_interval(self, a: int, b: int) -> tuple[float, float, float]:
        """The distance of a pair, and the ends of its 95% interval."""
        return math.sqrt(self.mean[a, b]), math.sqrt(self.low[a, b]), math.sqrt(self.high[a, b])


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

    merges: Floats = field(metadata=shaped("n_merges 4"))
    order: NDArray[np.int64] = field(metadata=shaped("heads"))
    places: Floats = field(metadata=shaped("heads 2"))
    explained: Floats = field(metadata=shaped("2"))
    layers: Floats = field(metadata=shaped("n_layers n_layers"))
    layers_low: Floats = field(metadata=shaped("n_layers n_layers"))
    layers_high: Floats = field(metadata=shaped("n_layers n_layers"))


def find_table(tables: Sequence[PairTable], name: str) -> PairTable:
    """The table of a name.

    Raises:
        AttnscopeError: There is none.
    """
    for table in tables:
        if table.name == name:
            return table
    raise AttnscopeError(f"there is no {name!r} in this record", f"it has {', '.join(t.name for t in tables)}")


def table_facts(table: PairTable) -> dict[str, Any]:
    """What a record tells of a table beside its arrays."""
    return {"name": table.name, "measure": table.measure, "special_tokens": table.special}


def table_arrays(table: PairTable) -> dict[str, NDArray[Any]]:
    """The arrays of a table by name."""
    return {f"{table.name}.{part}": getattr(table, part) for part in ("mean", "low", "high", "count")}


def tables_from(data: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> tuple[PairTable, ...]:
    """The tables that `table_facts` and `table_arrays` tell of.

    Raises:
        ValueError: Their parts do not fit each other.
    """
    tables = []
    for facts in data["tables"]:
        parts = [arrays[f"{facts['name']}.{part}"] for part in ("mean", "low", "high", "count")]
        tables.append(PairTable(str(facts["measure"]), bool(facts["special_tokens"]), *parts))
        if tables[-1].name != facts["name"]:
            raise ValueError("a table is not called as its measure is")
    if not tables:
        raise ValueError("it holds no table")
    return tuple(tables)


def pair_row(table: PairTable, first: HeadPlace, second: HeadPlace, a: int, b: int) -> tuple[Any, ...]:
    """A pair of heads in a table as a row."""
    mean = float(table.mean[a, b])
    return (
        table.measure, "with" if table.special else "without", head_name(first), head_name(second), math.sqrt(mean),
        mean, float(table.low[a, b]), float(table.high[a, b]), int(table.count[a, b]),
    )  # fmt: skip


def pair_rows(tables: Sequence[PairTable], heads: Sequence[HeadPlace]) -> Iterator[Sequence[Any]]:
    """A row a table and pair of heads of one model, the header first."""
    yield "measure", "special_tokens", "a", "b", "distance", "mean", "low", "high", "n_queries"
    for table in tables:
        for a, b in zip(*np.triu_indices(len(heads), 1), strict=True):
            yield pair_row(table, heads[int(a)], heads[int(b)], int(a), int(b))


def place_of(name: str) -> HeadPlace:
    """The place of a head from its name, such as L3H1."""
    layer, head = name.removeprefix("L").split("H")
    return int(layer), int(head)
