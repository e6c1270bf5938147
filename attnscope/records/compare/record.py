"""Heads compared with each other, side by side, and between two models; `pairs` has two texts or photos. NumPy only."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from attnscope.records.frame.codec import build, shaped
from attnscope.records.frame.kinds import load_named
from attnscope.records.frame.pair_tables import (
    Arrangement,
    HeadPlace,
    PairTable,
    find_table,
    head_name,
    pair_row,
    pair_rows,
    place_of,
    table_arrays,
    table_facts,
    tables_from,
)
from attnscope.records.frame.reading import require_weights
from attnscope.records.frame.record import Record
from attnscope.records.maps.tokens import Tokens, require_whole_tokens

_CLASSES = {
    "heads": "record:HeadComparison",
    "pick": "record:PickedHeads",
    "texts": "pairs:MinimalPair",
    "pictures": "pairs:PicturePair",
    "models": "record:ModelComparison",
}
"""The class of each shape of comparison."""


class Comparison(Record):
    """What every comparison can do: save itself, and say what it holds.

    Attributes:
        shape: Which comparison: "heads", "pick", "texts", "pictures" or "models".
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

    def facts(self) -> dict[str, Any]:
        """What its shape has beside run, kind, heads and arrays, as plain JSON values."""
        raise NotImplementedError

    def describe(self) -> dict[str, Any]:
        """All but the arrays, as plain JSON values."""
        described = {"schema": self.SCHEMA, "shape": self.shape, "run": self.run, "kind": self.kind}
        return {**described, "heads": [head_name(place) for place in self.heads], **self.facts()}

    @classmethod
    def rebuild(cls, described: Mapping[str, Any], held: Mapping[str, Any]) -> Any:
        """The comparison of whichever shape that `describe` and `arrays` were made of."""
        shape = load_named(f"attnscope.records.compare.{_CLASSES[described['shape']]}")
        if not issubclass(shape, cls):
            raise ValueError(f"it holds a comparison of {shape.shape}")
        return shape._from(described, {n: held[n] for n in held if n != "record"})

    def require_whole(self) -> None:
        """Refuses weights and tokens that are none."""
        for name in ("weights", "other_weights"):
            require_weights(getattr(self, name, np.zeros((0, 0))))
        tokens = getattr(self, "tokens", ())
        for one in (tokens,) if isinstance(tokens, Tokens) else tokens:
            require_whole_tokens(one)


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
        return find_table(self.tables, name)

    def facts(self) -> dict[str, Any]:
        """What its tables are of, as plain JSON values."""
        return {"tables": [table_facts(table) for table in self.tables]}

    def arrays(self) -> dict[str, NDArray[Any]]:
        """The numbers by name."""
        return {name: array for table in self.tables for name, array in table_arrays(table).items()}

    def rows(self) -> Iterator[Sequence[Any]]:
        """A row a pair of heads and table."""
        return pair_rows(self.tables, self.heads)

    def require_whole(self) -> None:
        """Refuses divergences beyond their bounds, and weights and tokens that are none."""
        super().require_whole()
        for table in self.tables:
            if np.any(table.mean > 1.01) or any(np.any(part < 0) for part in (table.mean, table.low, table.high)):
                raise ValueError(f"its {table.name} is not between 0 and 1")
            if not np.all(table.count >= 0) or np.any(np.isinf(table.count)):
                raise ValueError(f"the queries of its {table.name} are not counted")


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
    heads: tuple[HeadPlace, ...]
    tables: tuple[PairTable, ...]
    arrangements: tuple[Arrangement, ...]
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
        found = np.argsort(table.mean[rows, columns], kind="stable")  # NaN last
        pairs = [(int(rows[i]), int(columns[i])) for i in found[:most]]
        return [pair for pair in pairs if not math.isnan(table.mean[pair])]

    def most_alone(self, table: PairTable, most: int = 10) -> list[tuple[int, int]]:
        """The heads whose most alike other head is farthest away, each with that other head."""
        means = table.mean.copy()
        np.fill_diagonal(means, np.nan)
        known = np.flatnonzero(~np.isnan(means).all(1))
        nearest = {int(head): int(np.nanargmin(means[head])) for head in known}
        ordered = sorted(nearest, key=lambda head: (-means[head, nearest[head]], head))
        return [(head, nearest[head]) for head in ordered[:most]]

    def facts(self) -> dict[str, Any]:
        """What stands beside run, kind, heads and arrays, as plain JSON values."""
        return {"corpus": self.corpus, **super().facts(), "roles": self.roles, "roles_source": self.roles_source}

    def arrays(self) -> dict[str, NDArray[Any]]:
        """The numbers by name."""
        found: dict[str, NDArray[Any]] = {}
        for table, arrangement in zip(self.tables, self.arrangements, strict=True):
            found |= table_arrays(table) | {f"{table.name}.{k}": v for k, v in vars(arrangement).items()}
        return found

    @classmethod
    def _from(cls, data: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> HeadComparison:
        tables, heads = tables_from(data, arrays), tuple(map(place_of, data["heads"]))
        fields = Arrangement.__dataclass_fields__
        arranged = tuple(Arrangement(**{name: arrays[f"{t.name}.{name}"] for name in fields}) for t in tables)
        roles = None if data["roles"] is None else tuple(map(str, data["roles"]))
        return cls(data["run"], data["corpus"], data["kind"], heads, tables, arranged, roles, data["roles_source"])

    def require_whole(self) -> None:
        """Refuses what every comparison by tables does, and an order that is not one of its heads."""
        super().require_whole()
        if any(sorted(one.order.tolist()) != list(range(len(self.heads))) for one in self.arrangements):
            raise ValueError("its order is not one of its heads")


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
    heads: tuple[HeadPlace, ...]
    weights: NDArray[np.float32] = field(metadata=shaped("heads tokens tokens"))
    mean: NDArray[np.float32] = field(metadata=shaped("tokens tokens"))
    single: NDArray[np.float32] | None = field(metadata=shaped("tokens tokens"))
    single_note: str
    tables: tuple[PairTable, ...]
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
            found = [(f"{names[0]} − {names[1]}", _difference(self.weights[0], self.weights[1]))]
        else:
            found = [(f"{name} − mean", _difference(w, self.mean)) for name, w in zip(names, self.weights, strict=True)]
        if self.single is not None:
            found.append(("single head − mean", _difference(self.single, self.mean)))
        return found

    def facts(self) -> dict[str, Any]:
        """What stands beside run, kind, heads and arrays, as plain JSON values."""
        tokens = self.tokens.as_json()
        return {"tokens": tokens, "single_note": self.single_note, **super().facts(), "changes": self.changes}

    def arrays(self) -> dict[str, NDArray[Any]]:
        """The numbers by name."""
        single = {} if self.single is None else {"single": self.single}
        return {"weights": self.weights, "mean": self.mean, **single, **super().arrays()}

    @classmethod
    def _from(cls, data: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> PickedHeads:
        tokens, heads = build(Tokens, data["tokens"]), tuple(map(place_of, data["heads"]))
        maps = {name: np.asarray(arrays[name], np.float32) for name in ("weights", "mean", "single") if name in arrays}
        return cls(
            data["run"], tokens, data["kind"], heads, maps["weights"], maps["mean"], maps.get("single"),
            data["single_note"], tables_from(data, arrays), tuple(data["changes"]),
        )  # fmt: skip


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
    heads: tuple[HeadPlace, ...]
    other_heads: tuple[HeadPlace, ...]
    tables: tuple[PairTable, ...]
    matchings: tuple[NDArray[np.int64], ...]

    @property
    def columns(self) -> tuple[HeadPlace, ...]:
        """The heads that the columns of its tables are of."""
        return self.other_heads

    def same(self) -> list[tuple[int, int]]:
        """The heads that both models have by number: places in `heads` and in `other_heads`."""
        places = {place: number for number, place in enumerate(self.other_heads)}
        return [(number, places[place]) for number, place in enumerate(self.heads) if place in places]

    def moved(self) -> int:
        """How many heads of the first model are matched with one of another number, by the first table."""
        return sum(self.heads[a] != self.other_heads[b] for a, b in self.matchings[0])

    def facts(self) -> dict[str, Any]:
        """What stands beside run, kind, heads and arrays, as plain JSON values."""
        return {
            "other_run": self.other_run,
            "corpus": self.corpus,
            "other_heads": [head_name(place) for place in self.other_heads],
            **super().facts(),
            "matched": {
                table.name: [[head_name(self.heads[a]), head_name(self.other_heads[b])] for a, b in matching]
                for table, matching in zip(self.tables, self.matchings, strict=True)
            },
        }

    def arrays(self) -> dict[str, NDArray[Any]]:
        """The numbers by name."""
        found: dict[str, NDArray[Any]] = {}
        for table, matching in zip(self.tables, self.matchings, strict=True):
            found |= table_arrays(table) | {f"{table.name}.matching": matching}
        return found

    def rows(self) -> Iterator[Sequence[Any]]:
        """A row a pair of heads and table."""
        yield "measure", "special_tokens", "a", "b", "distance", "mean", "low", "high", "n_queries", "matched"
        for table, matching in zip(self.tables, self.matchings, strict=True):
            matched = set(map(tuple, matching.tolist()))
            for a, place in enumerate(self.heads):
                for b, other in enumerate(self.other_heads):
                    yield *pair_row(table, place, other, a, b), (a, b) in matched

    @classmethod
    def _from(cls, data: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> ModelComparison:
        heads, others = tuple(map(place_of, data["heads"])), tuple(map(place_of, data["other_heads"]))
        tables = tables_from(data, arrays)
        matchings = tuple(np.asarray(arrays[f"{t.name}.matching"], np.int64).reshape(-1, 2) for t in tables)
        return cls(data["run"], data["other_run"], data["corpus"], data["kind"], heads, others, tables, matchings)

    def require_whole(self) -> None:
        """Refuses what every comparison by tables does, and matches of heads that are not there."""
        super().require_whole()
        shape = len(self.heads), len(self.other_heads)
        if any(pairs.size and (pairs.min() < 0 or (pairs.max(0) >= shape).any()) for pairs in self.matchings):
            raise ValueError("its tables do not fit its heads")


def _difference(a: NDArray[np.float32], b: NDArray[np.float32]) -> NDArray[np.float32]:
    there = a.any(-1, keepdims=True) & b.any(-1, keepdims=True)
    return np.where(there, a - b, np.float32(np.nan))
