"""Heads compared with each other, side by side, and between two models; `pairs` has two texts. NumPy only."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from attnscope.errors import AttnscopeError
from attnscope.records.frame import codec
from attnscope.records.frame.checks import shaped
from attnscope.records.frame.codec import APART, ARRAY
from attnscope.records.frame.kinds import load_named
from attnscope.records.frame.pair_tables import HEAD_NAMES, Arrangement, HeadPlace, PairTable, head_name, name_table
from attnscope.records.frame.record import Record
from attnscope.records.maps.tokens import Tokens

_CLASSES = {
    "heads": "record:HeadComparison",
    "pick": "record:PickedHeads",
    "texts": "pairs:MinimalPair",
    "models": "record:ModelComparison",
}
"""The class of each shape of comparison."""


class Comparison(Record):
    """What every comparison can do: save itself, and say what it holds.

    Attributes:
        shape: Which comparison: "heads", "pick", "texts" or "models".
        run: What made it. Plain JSON values.
        kind: "encoder" or "decoder".
        heads: Layer and number of each head.
    """

    SCHEMA: ClassVar[str] = "attnscope.compare/1"
    ASCII: ClassVar[bool] = True
    shape: ClassVar[str]
    run: Mapping[str, Any]
    kind: str
    heads: tuple[HeadPlace, ...]

    def describe(self) -> dict[str, Any]:
        """All but the arrays, with its shape."""
        return {**super().describe(), "shape": self.shape}

    @classmethod
    def rebuild(cls, described: Mapping[str, Any], held: Mapping[str, Any]) -> Any:
        """The comparison of whichever shape that `describe` and `arrays` were made of."""
        shape = load_named(f"attnscope.records.compare.{_CLASSES[described['shape']]}")
        if not issubclass(shape, cls):
            raise ValueError(f"it holds a comparison of {shape.shape}")
        return codec.build(shape, described, held, **shape.read_apart(described, held))

    @classmethod
    def read_apart(cls, described: Mapping[str, Any], held: Mapping[str, Any]) -> dict[str, Any]:
        """The fields that the codec does not read."""
        return {}


def _table_prefix(table: Mapping[str, Any], _: int = 0) -> str:
    if table["name"] != name_table(str(table["measure"]), bool(table["special_tokens"])):
        raise ValueError("a table is not called as its measure is")
    return f"{table['name']}."


TABLES = shaped("n_tables", filled=True, **codec.parts(_table_prefix))


class TableComparison(Comparison):
    """A comparison by tables of all pairs of heads.

    Attributes:
        tables: The divergences, that to look at first at the front.
    """

    tables: tuple[PairTable, ...]

    @property
    def columns(self) -> tuple[HeadPlace, ...]:
        """The heads that the columns of its tables are of; the rows are of `heads`."""
        return self.heads

    def table(self, name: str) -> PairTable:
        """The table of a name such as "hellinger" or "hellinger_without_special"."""
        for table in self.tables:
            if table.name == name:
                return table
        known = ", ".join(table.name for table in self.tables)
        raise AttnscopeError(f"there is no {name!r} in this record", f"it has {known}")

    def rows(self) -> Iterator[Sequence[Any]]:
        """One row per pair of heads and table."""
        yield PairTable.COLUMNS
        for table in self.tables:
            for a, b in itertools.combinations(range(len(self.heads)), 2):
                yield table.row(self.heads[a], self.heads[b], a, b)


@dataclass(frozen=True, eq=False, repr=False)
class HeadComparison(TableComparison):
    """All heads of a model against each other.

    Attributes:
        run: What made it: model, sha256, engine, versions, dtype, device, notes ... Plain JSON values.
        corpus: What it was made on: `sources`, `n_texts`, `n_tokens`, `sha256`, `problems`, `complete`, and `text` if
            it was one text. Plain JSON values.
        kind: "encoder" or "decoder".
        heads: Layer and number of each head, in the order of rows and columns.
        tables: The divergences, that to look at first at the front.
        arrangements: Order, clusters and map by each of them.
        roles: The strongest role of each head ("" = unclassified), from a record of heads; None = not known.
        roles_source: Where the roles came from: model and texts, in a few words.
    """

    shape: ClassVar[str] = "heads"
    run: Mapping[str, Any]
    corpus: Mapping[str, Any]
    kind: str
    heads: tuple[HeadPlace, ...] = field(metadata=HEAD_NAMES)
    tables: tuple[PairTable, ...] = field(metadata=TABLES)
    arrangements: tuple[Arrangement, ...] = field(metadata=shaped("tables", **APART))
    roles: tuple[str, ...] | None = field(default=None, metadata=shaped("heads"))
    roles_source: str = ""

    @property
    def n_layers(self) -> int:
        """How many layers its heads are of."""
        return len({layer for layer, _ in self.heads})

    @property
    def n_merges(self) -> int:
        """How many merges it takes to put all heads in one cluster."""
        return max(0, len(self.heads) - 1)

    def most_alike(self, table: PairTable, most: int = 10) -> list[tuple[int, int]]:
        """The pairs of heads with the least distance, as places in `heads`."""
        rows, columns = np.triu_indices(len(self.heads), 1)
        order = np.argsort(table.mean[rows, columns], kind="stable")  # NaN last
        pairs = [(int(rows[i]), int(columns[i])) for i in order[:most]]
        return [pair for pair in pairs if not math.isnan(table.mean[pair])]

    def most_alone(self, table: PairTable, most: int = 10) -> list[tuple[int, int]]:
        """The heads whose most alike other head is farthest away, each with that other head."""
        means = table.mean.copy()
        np.fill_diagonal(means, np.nan)
        known = np.flatnonzero(~np.isnan(means).all(1))
        nearest = {int(head): int(np.nanargmin(means[head])) for head in known}
        ordered = sorted(nearest, key=lambda head: (-means[head, nearest[head]], head))
        return [(head, nearest[head]) for head in ordered[:most]]

    def arrays(self) -> dict[str, NDArray[Any]]:
        """The numbers by name."""
        return super().arrays() | {
            f"{table.name}.{name}": array
            for table, arrangement in zip(self.tables, self.arrangements, strict=True)
            for name, array in codec.arrays_of(arrangement).items()
        }

    @classmethod
    def read_apart(cls, described: Mapping[str, Any], held: Mapping[str, Any]) -> dict[str, Any]:
        """The arrangements, whose arrays stand among those of their tables."""
        arrays = [codec.strip(held, _table_prefix(table)) for table in described["tables"]]
        return {"arrangements": tuple(codec.build(Arrangement, {}, own) for own in arrays)}


@dataclass(frozen=True, eq=False, repr=False)
class PickedHeads(TableComparison):
    """A few heads side by side on one text, their mean, and the single head that they would make.

    Attributes:
        run: What made it. Plain JSON values.
        tokens: The text, token by token.
        kind: "encoder" or "decoder".
        heads: Layer and number of each head.
        weights: Their attention weights, (head, query, key), float32.
        mean: The mean of the heads, (query, key), float32.
        single: The single head: softmax over the heads' queries and keys laid side by side, scores divided by the root
            of heads x d_head, (query, key), float32; None where there is none.
        single_note: What the single head means here, or why there is none.
        tables: Both divergences between the heads on this text, as `weights` are.
        changes: What was done to the weights after the model gave them: "hide_special".
    """

    shape: ClassVar[str] = "pick"
    run: Mapping[str, Any]
    tokens: Tokens
    kind: str
    heads: tuple[HeadPlace, ...] = field(metadata=HEAD_NAMES)
    weights: NDArray[np.float32] = field(metadata=shaped("heads tokens tokens", weights=True, **ARRAY))
    mean: NDArray[np.float32] = field(metadata=shaped("tokens tokens", **ARRAY))
    single: NDArray[np.float32] | None = field(metadata=shaped("tokens tokens", **ARRAY))
    single_note: str
    tables: tuple[PairTable, ...] = field(metadata=TABLES)
    changes: tuple[str, ...] = ()

    def maps(self) -> list[tuple[str, NDArray[np.float32]]]:
        """What stands side by side: the heads, their mean, the single head."""
        shown = [(head_name(place), w) for place, w in zip(self.heads, self.weights, strict=True)]
        shown.append(("mean", self.mean))
        return [*shown, ("single head", self.single)] if self.single is not None else shown

    def differences(self) -> list[tuple[str, NDArray[np.float32]]]:
        """Two heads: the first minus the second; more: each minus their mean; and the single head minus the mean.

        NaN in rows of which one is empty.
        """
        names = [head_name(place) for place in self.heads]
        if len(names) == 2:
            maps = [(f"{names[0]} − {names[1]}", _difference(self.weights[0], self.weights[1]))]
        else:
            maps = [(f"{name} − mean", _difference(w, self.mean)) for name, w in zip(names, self.weights, strict=True)]
        if self.single is not None:
            maps.append(("single head − mean", _difference(self.single, self.mean)))
        return maps


@dataclass(frozen=True, eq=False, repr=False)
class ModelComparison(TableComparison):
    """The heads of one model against those of another.

    Attributes:
        run: What made it, the first model. Plain JSON values.
        other_run: The second model.
        corpus: What it was made on, as in HeadComparison.
        kind: "encoder" or "decoder".
        heads: Layer and number of each head of the first model, in the order of rows.
        other_heads: Those of the second model, in the order of columns.
        tables: The divergences, that to look at first at the front.
        matchings: By each table the one-to-one matching with the least sum of distances, (pair, 2), int64: heads of
            the first model, ascending, each with its head of the second.
    """

    shape: ClassVar[str] = "models"
    run: Mapping[str, Any]
    other_run: Mapping[str, Any]
    corpus: Mapping[str, Any]
    kind: str
    heads: tuple[HeadPlace, ...] = field(metadata=HEAD_NAMES)
    other_heads: tuple[HeadPlace, ...] = field(metadata=HEAD_NAMES)
    tables: tuple[PairTable, ...] = field(metadata=TABLES)
    matchings: tuple[NDArray[np.int64], ...] = field(metadata=shaped("tables", **APART))

    TOLD: ClassVar[tuple[str, ...]] = ("matched",)

    @property
    def columns(self) -> tuple[HeadPlace, ...]:
        """The heads that the columns of its tables are of."""
        return self.other_heads

    def same(self) -> list[tuple[int, int]]:
        """The heads that both models have by number: places in `heads` and in `other_heads`."""
        places = {place: number for number, place in enumerate(self.other_heads)}
        return [(number, places[place]) for number, place in enumerate(self.heads) if place in places]

    def count_moved(self) -> int:
        """How many heads of the first model are matched with one of another number, by the first table."""
        return sum(self.heads[a] != self.other_heads[b] for a, b in self.matchings[0])

    @property
    def matched(self) -> dict[str, list[list[str]]]:
        """The matchings by the names of their tables, as names of heads."""
        return {
            table.name: [[head_name(self.heads[a]), head_name(self.other_heads[b])] for a, b in matching]
            for table, matching in zip(self.tables, self.matchings, strict=True)
        }

    def arrays(self) -> dict[str, NDArray[Any]]:
        """The numbers by name."""
        named = zip(self.tables, self.matchings, strict=True)
        return super().arrays() | {f"{table.name}.matching": matching for table, matching in named}

    def rows(self) -> Iterator[Sequence[Any]]:
        """One row per pair of heads and table."""
        yield *PairTable.COLUMNS, "matched"
        for table, matching in zip(self.tables, self.matchings, strict=True):
            matched = set(map(tuple, matching.tolist()))
            for a, head in enumerate(self.heads):
                for b, other in enumerate(self.other_heads):
                    yield *table.row(head, other, a, b), (a, b) in matched

    @classmethod
    def read_apart(cls, described: Mapping[str, Any], held: Mapping[str, Any]) -> dict[str, Any]:
        """The matchings, whose arrays stand among those of their tables."""
        arrays = [np.asarray(held[f"{table['name']}.matching"], np.int64) for table in described["tables"]]
        return {"matchings": tuple(array.reshape(-1, 2) for array in arrays)}

    def require_whole(self) -> None:
        """Refuses matches of heads that are not there."""
        shape = len(self.heads), len(self.other_heads)
        if any(pairs.size and (pairs.min() < 0 or (pairs.max(0) >= shape).any()) for pairs in self.matchings):
            raise ValueError("its tables do not fit its heads")


def _difference(a: NDArray[np.float32], b: NDArray[np.float32]) -> NDArray[np.float32]:
    there = a.any(-1, keepdims=True) & b.any(-1, keepdims=True)
    return np.where(there, a - b, np.float32(np.nan))
