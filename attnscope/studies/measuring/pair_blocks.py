"""The distances of all pairs of heads on one block of texts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from attnscope.choice import Choice
from attnscope.corpus import TOKEN_BUDGET, Block, Chunk, batches, block_batches
from attnscope.errors import AttnscopeError
from attnscope.host import delay_interrupts
from attnscope.models.model import Batch, Model
from attnscope.records.frame.pair_tables import Arrangement, HeadPlace, PairTable
from attnscope.records.maps.heatmap import divide_by_rest
from attnscope.records.maps.tokens import Tokens
from attnscope.studies.inputs.texts import batch_of, special_ids
from attnscope.studies.running import passes
from attnscope.studies.running.memory import Room, halves, padded_size, physical_bytes
from attnscope.studies.running.overflow import LeftOut, Place

if TYPE_CHECKING:
    from torch import Tensor

    from attnscope.core.exact.running import RunningSums

WEIGHTS_AT_ONCE = 2**20
"""Of how many weights, of all layers together, distances are computed at once."""

_BYTES_A_PAIR = 400  # sums and moments, and what is computed from them

TableName = tuple[str, bool]
"""Of a table: its measure, and whether special tokens take part."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PairTotals(passes.Totals):
    """What is added up over blocks.

    Attributes:
        sums: Of all pairs; None before any text.
    """

    sums: PairSums | None = None


class _BrokenError(Exception):
    """A model computes NaN or infinity on a text."""

    def __init__(self, kind: str, layer: int) -> None:
        super().__init__(kind, layer)
        self.place: Place = kind, layer


class BlockPairs:
    """The sums over the texts of one block."""

    def __init__(self) -> None:
        self.sums: PairSums | None = None
        self.n_texts = self.n_tokens = self.n_chunked = 0
        self.broken: dict[int, Place] = {}

    def add_text(self, chunks: Sequence[_TextSums], n_tokens: int) -> None:
        """Adds a text that came in one chunk or several."""
        assert self.sums is not None  # rows come before sums
        whole = dict(chunks[0])
        for chunk in chunks[1:]:
            whole = {name: (sums + chunk[name][0], counts + chunk[name][1]) for name, (sums, counts) in whole.items()}
        with delay_interrupts():
            self.sums.add(whole)
            self.n_texts += 1
            self.n_tokens += n_tokens
            self.n_chunked += len(chunks) > 1


class PairMeasurer:
    """Compares the heads of one model, or of two, on blocks of texts.

    Two models have to cut every text into the same tokens.
    """

    def __init__(self, *models: Model, choice: Choice, tables: Sequence[TableName]) -> None:
        self._models, self._tables = models, tuple(tables)
        self._chosen = [choice.within(model.info) for model in models]
        self._measures = tuple(dict.fromkeys(measure for measure, _ in tables))
        self._room = Room()

    def begin(self, block: Block) -> BlockPairs:
        """Sums of nothing yet."""
        return BlockPairs()

    def steps(self, block: Block, sums: BlockPairs) -> Iterator[None]:
        """Adds a block to its sums, batch by batch; without texts on which a model computes NaN or infinity."""
        for batch in self._batches(block):
            if batch[0].n_chunks > 1:
                self._add_text(((part, self._look([part]), 0) for part in batch), sums)
            else:
                for some, seen in self._room.each(batch, self._look, halves, padded_size):
                    for row, part in enumerate(some):
                        self._add_text([(part, seen, row)], sums)
            yield

    def finish(self, block: Block, sums: BlockPairs, *, whole: bool) -> PairTotals:
        """What the sums amount to."""
        left_out = LeftOut.of(block.texts, sums.broken)
        return PairTotals(
            sums=sums.sums, n_texts=sums.n_texts, n_tokens=sums.n_tokens, n_chunked=sums.n_chunked,
            halved_to=self._room.tokens, left_out=left_out,
        )  # fmt: skip

    def _batches(self, block: Block) -> Iterator[Sequence[Chunk]]:
        """Batches of whole texts; the chunks of a text together, of which the model runs one at a time."""
        limits = [model.info.max_tokens for model in self._models if model.info.max_tokens is not None]
        how: dict[str, Any] = {"limit": min(limits, default=None), "special_ids": special_ids(self._models[0])}
        parts = [part for batch in block_batches(block, self._models[0].tokenizer.encode, **how) for part in batch]
        for other in self._models[1:]:
            theirs = [part for batch in block_batches(block, other.tokenizer.encode, **how) for part in batch]
            _require_same_tokens(self._models[0], other, parts, theirs)
        yield from batches((part for part in parts if part.n_chunks == 1), TOKEN_BUDGET)
        for text in dict.fromkeys(part.text for part in parts if part.n_chunks > 1):
            yield tuple(sorted((part for part in parts if part.text == text), key=lambda part: part.number))

    def _add_text(self, parts: Iterable[tuple[Chunk, Sequence[_Seen], int]], sums: BlockPairs) -> None:
        """Adds a text by its chunks, what the models attend to on each, and its row there; unless it is broken."""
        of_chunks, n_tokens = [], 0
        for part, seen, row in parts:
            if sums.sums is None:
                sums.sums = PairSums([each.heads for each in seen], self._tables)
            walks = [each.rows(row, len(part)) for each in seen]
            ordinary = ~part.tokens.sinks(self._models[0].info.kinds[0])
            try:
                of_chunks.append(self._sum_rows(ordinary, _walk_together(walks), sums.sums.heads))
            except _BrokenError as error:
                sums.broken[part.text] = error.place
                return
            n_tokens += len(part)
        sums.add_text(of_chunks, n_tokens)

    def _look(self, batch: Sequence[Chunk]) -> list[_Seen]:
        """What each model attends to on a batch."""
        import torch

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
    ) -> _TextSums:
        """The divergences of all pairs of heads on one chunk, summed over its queries, by table."""
        by_table: dict[tuple[str, bool], tuple[NDArray[np.float64], NDArray[np.float64]]] = {}
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


_TextSums = Mapping[tuple[str, bool], tuple[NDArray[np.float64], NDArray[np.float64]]]


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
        from attnscope.core.attention.calls import Calls
        from attnscope.core.attention.probes import Weights

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
        import torch

        from attnscope.core.attention.calls import iterate_rows
        from attnscope.core.attention.seam import select_part

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
        from attnscope.core.exact.running import RunningSums

        self.heads = heads
        self.shape = (len(heads[0]), len(heads[-1]))
        self._symmetric = len(heads) == 1
        n_pairs = math.prod(self.shape) // (2 if self._symmetric else 1)
        _require_memory(n_pairs * len(tables), self.shape)
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

    def add(self, text: _TextSums) -> None:
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

    def table(self, name: tuple[str, bool]) -> PairTable:
        """The table of a measure, with special tokens or without."""
        return table_of(*name, self.shape, self._pairs, self._sums[name])

    def arrange(self, table: PairTable) -> Arrangement:
        """Order, clusters, map and layers by a table."""
        from attnscope.core.questions.distance import classical_mds, cluster_heads

        merges, order = cluster_heads(table.distances)
        places, explained = classical_mds(table.distances)
        sums = self._between[table.measure, table.special]
        n = len(self.layers)
        layers = []
        for values in (sums.ratio(), *_interval(table.measure, sums)):
            square = np.sqrt(values).reshape(n, n)
            layers.append(np.where(np.isnan(square), square.T, square))
        return Arrangement(merges, order, places, explained, *layers)


def _sums_of_text(sums: NDArray[np.float64], counts: NDArray[np.float64]) -> RunningSums:
    from attnscope.core.exact.running import RunningSums

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
    import torch

    from attnscope.core.questions.distance import SUMS

    if queries is not None and keys is not None:
        rows = [divide_by_rest(weights[:, queries][:, :, keys]) for weights in rows]
    parts = [torch.from_numpy(weights) for weights in rows]
    divergences = SUMS[measure](parts[0], parts[1] if len(parts) > 1 else None)  # type: ignore[index]  # one of MEASURES
    return divergences.sums.numpy(), divergences.counts.numpy()


def _interval(measure: str, sums: RunningSums) -> Iterator[NDArray[np.float64]]:
    """Low and high ends, cut to what the divergence may be."""
    from attnscope.core.questions.distance import LARGEST

    for ends in sums.interval():
        yield np.clip(ends, 0.0, LARGEST[measure])  # type: ignore[index]  # one of MEASURES


def table_of(
    measure: str, special: bool, shape: tuple[int, int], pairs: tuple[NDArray[Any], NDArray[Any]], sums: RunningSums
) -> PairTable:
    """A table from sums over texts of some pairs of heads; where they are those above the diagonal, of all."""
    values = [sums.ratio(), *_interval(measure, sums), sums.total("c")]
    filled = []
    end = 0.0 if sums.n_texts > 1 else math.nan
    for value, diagonal in zip(values, (0.0, end, end, float(values[3].max(initial=0.0))), strict=True):
        whole = np.full(shape, diagonal)
        whole[pairs] = value
        if len(pairs[0]) < math.prod(shape):
            whole[pairs[::-1]] = value
        filled.append(whole)
    return PairTable(measure, special, *filled)


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
