"""The distances of all pairs of heads on one block of texts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attnscope.choice import Choice
from attnscope.core.attention.calls import Calls, iterate_rows
from attnscope.core.attention.probes import Weights
from attnscope.core.attention.seam import select_part
from attnscope.core.distance import LARGEST, SUMS, classical_mds, cluster_heads
from attnscope.core.sums import RunningSums
from attnscope.corpus import TOKEN_BUDGET, Block, Chunk, batches, block_batches
from attnscope.errors import AttnscopeError
from attnscope.host import physical_bytes
from attnscope.models.model import Batch, Model
from attnscope.questions.distances import WITHOUT_SPECIAL
from attnscope.questions.map_changes import divide_by_rest
from attnscope.results.tokens import Tokens
from attnscope.studies.failures import Place
from attnscope.studies.inputs.texts import batch_of, special_ids
from attnscope.studies.run import Measurer, Part

Floats = NDArray[np.float64]

HeadPlace = tuple[int, int]
"""Layer and head."""

WEIGHTS_AT_ONCE = 2**20
"""Of how many weights, of all layers together, distances are computed at once."""

_BYTES_AT_ONCE = 2**28
"""Of how many texts the sums are held at once, before they are added."""

_BYTES_A_PAIR = 400  # sums and moments, and what is computed from them

TableName = tuple[str, bool]
"""Of a table: its measure, and whether special tokens take part."""


Sums = tuple[NDArray[np.float64], NDArray[np.float64]]
"""Divergences of all pairs of heads, summed over queries, and over how many: each (head, head)."""

TextSums = Mapping[TableName, Sums]
"""Of a text, or a chunk of one, by table."""


@dataclass(kw_only=True, eq=False)
class PairPart(Part):
    """What is added up over texts.

    Attributes:
        sums: Of all pairs; None before any text.
    """

    sums: PairSums | None = None
    _open: list[TextSums] = field(default_factory=list)
    _n_open_tokens: int = 0


@dataclass(frozen=True, eq=False)
class _Measured:
    """What was measured on a batch: the heads of each model, and for each text its sums, or where it is broken."""

    heads: Sequence[tuple[HeadPlace, ...]]
    texts: Sequence[TextSums | Place]


class PairMeasurer(Measurer[PairPart]):
    """Compares the heads of one model, or of two, on blocks of texts.

    Two models have to cut every text into the same tokens.
    """

    def __init__(self, *models: Model, choice: Choice, tables: Sequence[TableName]) -> None:
        super().__init__()
        self._models, self._tables = models, tuple(tables)
        self._chosen = [choice.within(model.info) for model in models]
        self._measures = tuple(dict.fromkeys(measure for measure, _ in tables))
        self._shape = self._chosen[0].n_heads, self._chosen[-1].n_heads
        _require_memory(math.prod(self._shape) // (2 if len(models) == 1 else 1) * len(tables), self._shape)

    def start(self, block: Block) -> PairPart:
        """Return sums of nothing yet."""
        return PairPart()

    def batches(self, block: Block) -> list[Sequence[Chunk]]:
        """Cut a block into batches: chunks of long texts one by one, in order, then whole texts, the longest first."""
        limits = [model.info.max_tokens for model in self._models if model.info.max_tokens is not None]
        how: dict[str, Any] = {"limit": min(limits, default=None), "special_ids": special_ids(self._models[0])}
        parts = [part for batch in block_batches(block, self._models[0].tokenizer.encode, **how) for part in batch]
        for other in self._models[1:]:
            theirs = [part for batch in block_batches(block, other.tokenizer.encode, **how) for part in batch]
            _require_same_tokens(self._models[0], other, parts, theirs)
        long = sorted((part for part in parts if part.n_chunks > 1), key=lambda part: (part.text, part.number))
        # Each text has sums of its own until they are added: of many heads fewer texts fit into memory.
        most = max(1, _BYTES_AT_ONCE // self._bytes_per_text())
        cut: list[Sequence[Chunk]] = [(part,) for part in long]
        for batch in reversed(batches((part for part in parts if part.n_chunks == 1), TOKEN_BUDGET)):
            cut += [batch[first : first + most] for first in range(0, len(batch), most)]
        return cut

    def measure(self, batch: Sequence[Chunk]) -> _Measured:
        """Return the sums of each text of a batch."""
        seen = self._look(batch)
        heads = [each.heads for each in seen]
        texts: list[TextSums | Place] = []
        for row, part in enumerate(batch):
            walks = [each.rows(row, len(part)) for each in seen]
            ordinary = ~part.tokens.sinks(self._models[0].info.kinds[0])
            try:
                texts.append(self._sum_rows(ordinary, _walk_together(walks), heads))
            except _BrokenError as error:
                texts.append(error.place)
        return _Measured(heads, texts)

    def add(self, part: PairPart, batch: Sequence[Chunk], result: _Measured) -> None:
        """Add the texts of a batch; without those on which a model computes NaN or infinity."""
        for chunk, sums in zip(batch, result.texts, strict=True):
            if chunk.number == 0:
                part._open = []
                part._n_open_tokens = 0
            if isinstance(sums, tuple):
                part.broken.setdefault(chunk.text, sums)
            if isinstance(sums, tuple) or chunk.text in part.broken:
                continue
            part._open.append(sums)
            part._n_open_tokens += len(chunk)
            if chunk.number + 1 == chunk.n_chunks:
                if part.sums is None:
                    part.sums = PairSums(result.heads, self._tables)
                part.sums.add(_add_chunks(part._open))
                part.n_texts += 1
                part.n_tokens += part._n_open_tokens
                part.n_chunked += chunk.n_chunks > 1

    def _bytes_per_text(self) -> int:
        """Return what the sums of a text take: sums and counts in float64, with special tokens and without."""
        return 2 * 2 * 8 * len(self._measures) * math.prod(self._shape)

    def _look(self, batch: Sequence[Chunk]) -> list[_Seen]:
        """What each model attends to on a batch."""
        tokens = [part.tokens for part in batch]
        seen: list[_Seen] = []
        for model, chosen in zip(self._models, self._chosen, strict=True):
            with torch.no_grad():
                inputs = batch_of(tokens).to(model.info.device)
                seen.append(_Seen.of(model, inputs, chosen.layers, chosen.heads, chosen.picked))
        return seen

    def _sum_rows(
        self,
        ordinary: NDArray[np.bool_],
        rows: Iterator[tuple[slice, list[NDArray[Any]]]],
        of: Sequence[tuple[HeadPlace, ...]],
    ) -> TextSums:
        """The divergences of all pairs of heads on one chunk, summed over its queries, by table.

        Raises:
            _BrokenError: A weight is NaN or infinite.
        """
        by_table: dict[TableName, Sums] = {}
        for queries, weights in rows:
            for model, of_model, heads in zip(self._models, weights, of, strict=True):
                if not np.isfinite(of_model).all():
                    first = int(np.flatnonzero(~np.isfinite(of_model).all((1, 2)))[0])
                    raise _BrokenError(model.info.kinds[0], heads[first][0])
            for measure in self._measures:
                whole = sums_of_rows(measure, weights, None, None)
                rest = whole if ordinary.all() else sums_of_rows(measure, weights, ordinary[queries], ordinary)
                for special, (sums, counts) in ((True, whole), (False, rest)):
                    had = by_table.get((measure, special))
                    by_table[measure, special] = (sums, counts) if had is None else (had[0] + sums, had[1] + counts)
        return by_table


class _BrokenError(Exception):
    """A model computes NaN or infinity on a text."""

    def __init__(self, kind: str, layer: int) -> None:
        super().__init__(kind, layer)
        self.place: Place = kind, layer


def _add_chunks(chunks: Sequence[TextSums]) -> TextSums:
    """Return the sums of a text by those of its chunks."""
    whole = dict(chunks[0])
    for chunk in chunks[1:]:
        whole = {name: (sums + chunk[name][0], counts + chunk[name][1]) for name, (sums, counts) in whole.items()}
    return whole


def _walk_together(
    walks: Sequence[Iterator[tuple[slice, NDArray[Any]]]],
) -> Iterator[tuple[slice, list[NDArray[Any]]]]:
    """The rows of the same queries in each model."""
    if len(walks) == 1:
        for queries, rows in walks[0]:
            yield queries, [rows]
        return
    # Models of different sizes are cut at different queries: what one has more waits for the other.
    waiting: list[NDArray[Any] | None] = [None] * len(walks)
    start = 0
    while True:
        for number, walk in enumerate(walks):
            if waiting[number] is None:
                waiting[number] = next((rows for _, rows in walk), None)
        there = [rows for rows in waiting if rows is not None]
        if len(there) < len(walks):
            return
        n = min(rows.shape[1] for rows in there)
        yield slice(start, start + n), [np.ascontiguousarray(rows[:, :n]) for rows in there]
        waiting = [rows[:, n:] if rows.shape[1] > n else None for rows in there]
        start += n


@dataclass(frozen=True, eq=False)
class _Seen:
    """What a model attended to on a batch: calls where it has the seam, else dense weights."""

    heads: tuple[HeadPlace, ...]
    kept: NDArray[np.int64]
    calls: tuple[Any, ...]
    maps: tuple[Tensor, ...]

    @classmethod
    def of(
        cls,
        model: Model,
        batch: Batch,
        layers: Sequence[int],
        heads: Sequence[int],
        picked: Sequence[HeadPlace] | None,
    ) -> _Seen:
        probe = Weights(layers) if model.info.path == "eager" else Calls(layers)
        model.run(batch, probe)
        seen: Mapping[int, Any] = next(iter(probe.maps.values()), {})
        is_dense = isinstance(probe, Weights)
        n_heads = {layer: of.shape[1] if is_dense else of.n_heads for layer, of in sorted(seen.items())}
        places = [(layer, head) for layer, n in n_heads.items() for head in range(n)]
        wanted = [n for n, place in enumerate(places) if (place[1] in heads if picked is None else place in picked)]
        if not wanted:
            raise AttnscopeError("none of the chosen layers and heads has attention", "choose others with -L and -H")
        in_order = tuple(seen[layer] for layer in n_heads)
        calls, maps = ((), in_order) if is_dense else (in_order, ())
        return cls(tuple(places[n] for n in wanted), np.array(wanted), calls, maps)

    def rows(self, place: int, n: int) -> Iterator[tuple[slice, NDArray[Any]]]:
        """The weights of one text of n tokens, (head, query, key), some queries after the others.

        What was seen has no gradient, and none is switched off here: where two models take turns, the one that is
        left last would leave it switched off for the whole process.
        """
        if self.maps:
            step = max(16, WEIGHTS_AT_ONCE // max(1, n * sum(each.shape[1] for each in self.maps)))
            for low in range(0, n, step):
                part = [each[place, :, low : min(n, low + step), :n] for each in self.maps]
                yield slice(low, min(n, low + step)), torch.cat(part).numpy()[self.kept]
        else:
            texts = [select_part(call, slice(place, place + 1), slice(n), slice(n)) for call in self.calls]
            for queries, rows in iterate_rows(texts, WEIGHTS_AT_ONCE):
                yield queries, rows.cpu().numpy()[self.kept]


class PairSums:
    """Exact sums over texts for all pairs of heads of one model or of two, and for all pairs of layers of one model."""

    def __init__(self, heads: Sequence[tuple[HeadPlace, ...]], tables: Sequence[TableName]) -> None:
        self.heads = heads
        self.shape = (len(heads[0]), len(heads[-1]))
        self._symmetric = len(heads) == 1
        self._pairs = np.triu_indices(self.shape[0], 1) if self._symmetric else _all_pairs(self.shape)
        self._sums = {name: RunningSums((len(self._pairs[0]),)) for name in tables}
        self.layers = tuple(dict.fromkeys(layer for layer, _ in heads[0]))
        self._between = {name: RunningSums((len(self.layers) ** 2,)) for name in tables if self._symmetric}
        numbers = np.array([self.layers.index(layer) for layer, _ in heads[0]])
        self._group = numbers[self._pairs[0]] * len(self.layers) + numbers[self._pairs[1]] if self._symmetric else None

    def merge(self, other: PairSums) -> PairSums:
        """The sums over the texts of both."""
        both = copy(self)
        both._sums = {name: sums.merge(other._sums[name]) for name, sums in self._sums.items()}
        both._between = {name: sums.merge(other._between[name]) for name, sums in self._between.items()}
        return both

    def add(self, text: TextSums) -> None:
        """Adds a text: of each table the sums and counts of all pairs, (head, head)."""
        # All at once, so that an interruption finds a text in all tables or in none.
        sums = {name: (summed[self._pairs], counts[self._pairs]) for name, (summed, counts) in text.items()}
        added = {name: self._sums[name].merge(_sums_of_text(*parts)) for name, parts in sums.items()}
        between = {}
        if self._group is not None:
            n = len(self.layers) ** 2
            grouped = {
                name: tuple(np.bincount(self._group, part, n).astype(np.float64) for part in parts)
                for name, parts in sums.items()
            }
            between = {name: self._between[name].merge(_sums_of_text(*parts)) for name, parts in grouped.items()}
        self._sums, self._between = added, between

    def distances(self, table: TableName) -> dict[str, Floats]:
        """Return the distances of a table by the names of the arrays of a result, each (head, head).

        A distance is the root of the mean divergence. Its interval is over texts; NaN with fewer than 2.
        """
        measure, _ = table
        sums = self._sums[table]
        low, high = _interval(measure, sums)
        counts = sums.total("c")
        end = 0.0 if sums.n_texts > 1 else math.nan
        name = name_of(table)
        return {
            f"distance:{name}": self._fill(np.sqrt(sums.ratio()), 0.0),
            f"distance_low:{name}": self._fill(np.sqrt(low), end),
            f"distance_high:{name}": self._fill(np.sqrt(high), end),
            f"distance_count:{name}": self._fill(counts, float(counts.max(initial=0.0))),
        }

    def _fill(self, values: Floats, diagonal: float) -> Floats:
        """Return numbers of pairs as a matrix, (head, head); of one model, both halves of it."""
        matrix = np.full(self.shape, diagonal)
        matrix[self._pairs] = values
        if self._symmetric:
            matrix[self._pairs[::-1]] = values
        return matrix

    def arrangement(self, table: TableName, distances: Floats) -> dict[str, NDArray[Any]]:
        """Return order, clusters, places and the distances of layers by a table, by the names of a result's arrays.

        Args:
            table: The table.
            distances: Its distances, (head, head).
        """
        measure, _ = table
        name = name_of(table)
        merges, order = cluster_heads(distances)
        places, explained = classical_mds(distances)
        arrays = {
            f"merges:{name}": merges,
            f"order:{name}": order,
            f"places:{name}": places,
            f"explained:{name}": explained,
        }
        sums = self._between[table]
        n_layers = len(self.layers)
        for part, values in zip(("", "_low", "_high"), (sums.ratio(), *_interval(measure, sums)), strict=True):
            square = np.sqrt(values).reshape(n_layers, n_layers)
            arrays[f"layer_distance{part}:{name}"] = np.where(np.isnan(square), square.T, square)
        return arrays


def name_of(table: TableName) -> str:
    """Return what a table is called in results, such as "hellinger_without_special"."""
    measure, special = table
    return measure if special else f"{measure}{WITHOUT_SPECIAL}"


def _sums_of_text(sums: NDArray[np.float64], counts: NDArray[np.float64]) -> RunningSums:
    of_text = RunningSums(sums.shape)
    of_text.add(sums, counts)
    return of_text


def sums_of_rows(
    measure: str, rows: Sequence[NDArray[Any]], queries: NDArray[np.bool_] | None, keys: NDArray[np.bool_] | None
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The divergences of all pairs of heads, summed over queries, and over how many.

    `rows` are weights of one model, or of two, each (head, query, key). Only the chosen queries, (query,), and keys,
    (key,), stay, and each row is divided by what is left of it. None = all, as they are.
    """
    if queries is not None and keys is not None:
        rows = [divide_by_rest(weights[:, queries][:, :, keys]) for weights in rows]
    parts = [torch.from_numpy(weights) for weights in rows]
    divergences = SUMS[measure](parts[0], parts[1] if len(parts) > 1 else None)  # type: ignore[index]  # one of MEASURES
    return divergences.sums.numpy(), divergences.counts.numpy()


def _interval(measure: str, sums: RunningSums) -> Iterator[NDArray[np.float64]]:
    """Low and high ends, cut to what the divergence may be."""
    for ends in sums.interval():
        yield np.clip(ends, 0.0, LARGEST[measure])  # type: ignore[index]  # one of MEASURES


def _all_pairs(shape: tuple[int, int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    first, second = np.indices(shape).reshape(2, -1)
    return first, second


def _require_same_tokens(model: Model, other: Model, ours: Sequence[Chunk], theirs: Sequence[Chunk]) -> None:
    """Refuse texts that two models cut into different tokens."""
    # Batches are sorted by length, so chunks of one place in the lists may be of different texts.
    first, second = ({(part.text, part.number): part for part in parts} for parts in (ours, theirs))
    for key in sorted(first.keys() | second.keys()):
        cuts = first.get(key), second.get(key)
        if cuts[0] and cuts[1] and _are_equal(cuts[0].tokens, cuts[1].tokens):
            continue
        beginnings = [f"{' '.join(part.tokens.labels[:8])} …" for part in cuts if part]
        raise AttnscopeError(
            f"{model.info.name} and {other.info.name} split the same text into different tokens: "
            + " and ".join(beginnings),
            "compare models that share a tokenizer, such as two checkpoints of one",
        )


def _are_equal(a: Tokens, b: Tokens) -> bool:
    return a.labels == b.labels and np.array_equal(a.ids, b.ids) and np.array_equal(a.special, b.special)


def _require_memory(n_pairs: int, shape: tuple[int, int]) -> None:
    """Refuses pairs whose sums could not be held, before the models run for minutes."""
    needed = n_pairs * _BYTES_A_PAIR
    available = physical_bytes()
    if available is not None and needed * 2 > available:
        raise AttnscopeError(
            f"all pairs of {shape[0]} and {shape[1]} heads need {needed / 2**30:.0f} GiB, this machine has "
            f"{available / 2**30:.0f} GiB",
            "choose fewer layers and heads (-L, -H)",
        )
