"""Heads compared: with each other, side by side, on two texts, and between two models. NumPy only."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from attnscope.records.frame.codec import build
from attnscope.records.frame.pair_tables import (
    Arrangement,
    Floats,
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
from attnscope.records.maps.pictures import Picture, picture_from
from attnscope.records.maps.tokens import Tokens, require_whole_tokens

_DIVERGENCE = "divergence."


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
        made = {kind.shape: kind for kind in (HeadComparison, PickedHeads, MinimalPair, PicturePair, ModelComparison)}
        found = made[described["shape"]]._from(described, {n: held[n] for n in held if n != "record"})
        if not isinstance(found, cls):
            raise ValueError(f"it holds a comparison of {found.shape}")
        return found

    def require_whole(self) -> None:
        """Refuses divergences beyond their bounds, and weights and tokens that are none."""
        for table in getattr(self, "tables", ()):
            if np.any(table.mean > 1.01) or any(np.any(part < 0) for part in (table.mean, table.low, table.high)):
                raise ValueError(f"its {table.name} is not between 0 and 1")
            if not np.all(table.count >= 0) or np.any(np.isinf(table.count)):
                raise ValueError(f"the queries of its {table.name} are not counted")
        if any(np.any(each < 0) for each in getattr(self, "divergences", {}).values()):
            raise ValueError("a divergence is less than 0")
        for name in ("weights", "other_weights"):
            require_weights(getattr(self, name, np.zeros((0, 0))))
        tokens = getattr(self, "tokens", ())
        for one in (tokens,) if isinstance(tokens, Tokens) else tokens:
            require_whole_tokens(one)


@dataclass(frozen=True, eq=False, repr=False)
class HeadComparison(Comparison):
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
    roles: tuple[str, ...] | None = None
    roles_source: str = ""

    def table(self, name: str) -> PairTable:
        """The table of a name such as "hellinger" or "hellinger_without_special"."""
        return find_table(self.tables, name)

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
        return {
            "corpus": self.corpus,
            "tables": [table_facts(table) for table in self.tables],
            "roles": self.roles,
            "roles_source": self.roles_source,
        }

    def arrays(self) -> dict[str, NDArray[Any]]:
        """The numbers by name."""
        found: dict[str, NDArray[Any]] = {}
        for table, arrangement in zip(self.tables, self.arrangements, strict=True):
            found |= table_arrays(table) | {f"{table.name}.{k}": v for k, v in vars(arrangement).items()}
        return found

    def rows(self) -> Iterator[Sequence[Any]]:
        """A row a pair of heads and table."""
        return pair_rows(self.tables, self.heads)

    @classmethod
    def _from(cls, data: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> HeadComparison:
        tables = tables_from(data, arrays)
        fields = Arrangement.__dataclass_fields__
        arranged = tuple(Arrangement(**{name: arrays[f"{t.name}.{name}"] for name in fields}) for t in tables)
        heads, n = tuple(map(place_of, data["heads"])), len(data["heads"])
        layers = len({layer for layer, _ in heads})
        shapes = {
            "merges": (max(0, n - 1), 4), "order": (n,), "places": (n, 2), "explained": (2,),
            "layers": (layers,) * 2, "layers_low": (layers,) * 2, "layers_high": (layers,) * 2,
        }  # fmt: skip
        if any(t.mean.shape != (n, n) for t in tables) or any(
            getattr(a, name).shape != shape for a in arranged for name, shape in shapes.items()
        ):
            raise ValueError("its tables do not fit its heads")
        if any(sorted(a.order.tolist()) != list(range(n)) for a in arranged):
            raise ValueError("its order is not one of its heads")
        roles = None if data["roles"] is None else tuple(map(str, data["roles"]))
        if roles is not None and len(roles) != n:
            raise ValueError("its roles do not fit its heads")
        return cls(data["run"], data["corpus"], data["kind"], heads, tables, arranged, roles, data["roles_source"])


@dataclass(frozen=True, eq=False, repr=False)
class PickedHeads(Comparison):
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
    weights: NDArray[np.float32]
    mean: NDArray[np.float32]
    single: NDArray[np.float32] | None
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
        return {
            "tokens": self.tokens.as_json(),
            "single_note": self.single_note,
            "tables": [table_facts(table) for table in self.tables],
            "changes": self.changes,
        }

    def arrays(self) -> dict[str, NDArray[Any]]:
        """The numbers by name."""
        found: dict[str, NDArray[Any]] = {"weights": self.weights, "mean": self.mean}
        if self.single is not None:
            found["single"] = self.single
        for table in self.tables:
            found |= table_arrays(table)
        return found

    def rows(self) -> Iterator[Sequence[Any]]:
        """A row a pair of heads and measure."""
        return pair_rows(self.tables, self.heads)

    @classmethod
    def _from(cls, data: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> PickedHeads:
        tokens, heads = build(Tokens, data["tokens"]), tuple(map(place_of, data["heads"]))
        n = len(tokens)
        maps = [arrays["weights"], arrays["mean"], *([arrays["single"]] if "single" in arrays else [])]
        if any(m.shape[-2:] != (n, n) for m in maps) or len(maps[0]) != len(heads):
            raise ValueError("its weights do not fit its tokens")
        weights, mean, *single = (np.asarray(m, np.float32) for m in maps)
        return cls(
            data["run"], tokens, data["kind"], heads, weights, mean, single[0] if single else None,
            data["single_note"], tables_from(data, arrays), tuple(data["changes"]),
        )  # fmt: skip


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class ChangedPair(Comparison):
    """How the rows of every head change from one thing that a model reads to another: which heads change most.

    Attributes:
        run: What made it. Plain JSON values.
        kind: "encoder" or "decoder".
        heads: Layer and number of each head.
        weights: What each head attends to in the first, float32.
        other_weights: The same in the second.
        equal: Which of the aligned queries are equal tokens, (pair,), bool; the others are replaced.
        divergences: Of each aligned query by measure ("hellinger": squared; "jensen_shannon": nats), (head, pair); NaN
            where a row is empty.
        measure: That by which heads are ranked.
        query: The token that heads were asked about; None = none.
        queries: Which of the aligned pairs it names.
    """

    run: Mapping[str, Any]
    kind: str
    heads: tuple[HeadPlace, ...]
    weights: NDArray[np.float32]
    other_weights: NDArray[np.float32]
    equal: NDArray[np.bool_]
    divergences: Mapping[str, Floats]
    measure: str = "hellinger"
    query: str | None = None
    queries: tuple[int, ...] = ()

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

    def facts(self) -> dict[str, Any]:
        """What stands beside run, kind, heads and arrays, as plain JSON values."""
        ranked = [head_name(self.heads[head]) for head in self.ranked()]
        return {"measure": self.measure, "query": self.query, "queries": self.queries, "ranked": ranked}

    def arrays(self) -> dict[str, NDArray[Any]]:
        """The numbers by name."""
        held = {f"{_DIVERGENCE}{name}": values for name, values in self.divergences.items()}
        return {"weights": self.weights, "other_weights": self.other_weights, "equal": self.equal, **held}

    @classmethod
    def _shared(cls, data: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]], n: int) -> dict[str, Any]:
        """The fields that both shapes have, of n aligned queries.

        Raises:
            ValueError: They do not fit each other.
        """
        heads, queries = tuple(map(place_of, data["heads"])), tuple(data["queries"])
        named = [name for name in arrays if name.startswith(_DIVERGENCE)]
        divergences = {name.removeprefix(_DIVERGENCE): arrays[name] for name in named}
        if (
            data["measure"] not in divergences
            or any(d.shape != (len(heads), n) for d in divergences.values())
            or any(not 0 <= place < n for place in queries)
            or arrays["equal"].shape != (n,)
        ):
            raise ValueError("its divergences do not fit its heads and queries")
        weights = {name: np.asarray(arrays[name], np.float32) for name in ("weights", "other_weights")}
        same = {name: data[name] for name in ("run", "kind", "measure", "query")}
        equal = np.asarray(arrays["equal"], np.bool_)
        return {**same, **weights, "heads": heads, "equal": equal, "divergences": divergences, "queries": queries}


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class MinimalPair(ChangedPair):
    """How the rows of every head change from one text to another that differs from it in little.

    Tokens are aligned: equal ones, and replaced ones where as many stand in one text as in the other. A row is compared
    over aligned keys, and over those of one text alone, which weigh 0 in the other.

    Weights are those of the text's own queries and keys, (head, query, key).

    Attributes:
        tokens: The two texts, token by token.
        aligned: Places of aligned tokens in the first and in the second text, (pair, 2), int64, ascending.
        changes: What was done to the weights after the model gave them: "hide_special".
    """

    shape: ClassVar[str] = "texts"
    tokens: tuple[Tokens, Tokens]
    aligned: NDArray[np.int64]
    changes: tuple[str, ...] = ()

    def unmatched(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Places of the tokens that the other text has nothing for, in the first and in the second text."""
        return tuple(  # type: ignore[return-value]  # two of them
            tuple(sorted(set(range(len(tokens))) - set(self.aligned[:, side].tolist())))
            for side, tokens in enumerate(self.tokens)
        )

    def facts(self) -> dict[str, Any]:
        """What stands beside run, kind, heads and arrays, as plain JSON values."""
        tokens = [tokens.as_json() for tokens in self.tokens]
        return {"tokens": tokens, **super().facts(), "unmatched": self.unmatched(), "changes": self.changes}

    def arrays(self) -> dict[str, NDArray[Any]]:
        """The numbers by name."""
        return super().arrays() | {"aligned": self.aligned}

    @classmethod
    def _from(cls, data: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> MinimalPair:
        first, second = (build(Tokens, tokens) for tokens in data["tokens"])
        aligned = np.asarray(arrays["aligned"], np.int64).reshape(-1, 2)
        shared = cls._shared(data, arrays, len(aligned))
        shapes = ((shared["weights"].shape, len(first)), (shared["other_weights"].shape, len(second)))
        if any(shape != (len(shared["heads"]), n, n) for shape, n in shapes) or (
            len(aligned) and (aligned.min() < 0 or (aligned.max(0) >= (len(first), len(second))).any())
        ):
            raise ValueError("its weights do not fit its tokens")
        return cls(**shared, tokens=(first, second), aligned=aligned, changes=tuple(data["changes"]))


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class PicturePair(ChangedPair):
    """How what words give to a picture changes from one photo to another, or from one question to another.

    Rows are compared over the cells of one grid over all that the model saw, and over all that is elsewhere, together.

    Weights are what aligned words give to the cells, (head, word, row, column).

    Attributes:
        texts: What was asked of the first, and of the second.
        words: The labels of aligned words in both, (first, second).
        pictures: What the model saw, resized so that the cells of the grid are whole pixels.
    """

    shape: ClassVar[str] = "pictures"
    texts: tuple[str, str]
    words: tuple[tuple[str, str], ...]
    pictures: tuple[Picture, Picture]

    @property
    def asked(self) -> list[int]:
        """The words that maps are of: those that are named, else those that are equal in both, else all."""
        return list(self.queries) or np.flatnonzero(self.equal).tolist() or list(range(len(self.words)))

    def maps(self, head: int) -> tuple[Floats, Floats]:
        """What the words of `asked` give to the cells on average, (row, column), in the first and in the second."""
        first, second = (w[head, self.asked].mean(0, dtype=np.float64) for w in (self.weights, self.other_weights))
        return first, second

    def facts(self) -> dict[str, Any]:
        """What stands beside run, kind, heads and arrays, as plain JSON values."""
        words, pictures = [list(pair) for pair in self.words], [picture.describe() for picture in self.pictures]
        return {"texts": list(self.texts), "words": words, "pictures": pictures, **super().facts()}

    def arrays(self) -> dict[str, NDArray[Any]]:
        """The numbers by name."""
        return super().arrays() | {f"picture_{number}": one.pixels for number, one in enumerate(self.pictures)}

    @classmethod
    def _from(cls, data: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> PicturePair:
        first, second = (picture_from(one, arrays[f"picture_{number}"]) for number, one in enumerate(data["pictures"]))
        if first is None or second is None or first.grid != second.grid:
            raise ValueError("its pictures are not of one grid")
        words = tuple((str(ours), str(theirs)) for ours, theirs in data["words"])
        shared = cls._shared(data, arrays, len(words))
        shape = (len(shared["heads"]), len(words), *first.grid)
        if any(shared[name].shape != shape for name in ("weights", "other_weights")):
            raise ValueError("its weights do not fit its words and pictures")
        ours, theirs = map(str, data["texts"])
        return cls(**shared, texts=(ours, theirs), words=words, pictures=(first, second))


@dataclass(frozen=True, eq=False, repr=False)
class ModelComparison(Comparison):
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

    def table(self, name: str) -> PairTable:
        """The table of a name such as "hellinger" or "hellinger_without_special"."""
        return find_table(self.tables, name)

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
            "tables": [table_facts(table) for table in self.tables],
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
        shape = (len(heads), len(others))
        if any(t.mean.shape != shape for t in tables) or any(
            m.size and (m.min() < 0 or (m.max(0) >= shape).any()) for m in matchings
        ):
            raise ValueError("its tables do not fit its heads")
        return cls(data["run"], data["other_run"], data["corpus"], data["kind"], heads, others, tables, matchings)


def _difference(a: NDArray[np.float32], b: NDArray[np.float32]) -> NDArray[np.float32]:
    there = a.any(-1, keepdims=True) & b.any(-1, keepdims=True)
    return np.where(there, a - b, np.float32(np.nan))


def _root_mean(divergences: Floats) -> Floats:
    known = ~np.isnan(divergences)
    counts = known.sum(1)
    sums = np.where(known, divergences, 0.0).sum(1)
    change: Floats = np.sqrt(np.divide(sums, counts, out=np.full(len(sums), np.nan), where=counts > 0))
    return change
