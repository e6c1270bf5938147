"""How alike are heads? All heads of a model against each other, or against those of another, over any texts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from attnscope.corpus import (
    BLOCK,
    TOKEN_BUDGET,
    Block,
    Chunk,
    Copies,
    Corpus,
    CorpusText,
    batches,
    block_batches,
    blocks,
    distinct,
)
from attnscope.errors import AttnscopeError, UsageError
from attnscope.models.model import Batch, Model
from attnscope.records.comparison import Arrangement, HeadComparison, HeadPlace, ModelComparison, PairTable
from attnscope.records.findings import Findings
from attnscope.records.maps import divided_by_rest
from attnscope.studies.choice import Choice
from attnscope.studies.late import failure
from attnscope.studies.memory import Room, give_memory_back, halves, padded_size, physical_bytes
from attnscope.studies.overflow import LeftOut, Place
from attnscope.studies.provenance import run_of
from attnscope.studies.texts import (
    Progress,
    Report,
    Texts,
    padded,
    problems_of,
    sha256_of,
    share_read,
    special_ids,
    texts_of,
)

if TYPE_CHECKING:
    from torch import Tensor

    from attnscope.core.running import RunningSums

MEASURES = ("hellinger", "jensen_shannon")

WEIGHTS_AT_ONCE = 2**20
"""Of how many weights, of all layers together, distances are computed at once."""

_BYTES_A_PAIR = 400  # five exact sums, and what is computed from them


@dataclass(frozen=True)
class CompareOptions:
    """How heads are compared.

    Attributes:
        measures: Some of "hellinger" and "jensen_shannon", that to look at first at the front.
        hide_special: Whether to look first at what is left without special tokens; both are computed.
        choice: Which heads; of two models those of both.
    """

    measures: tuple[str, ...] = MEASURES[:1]
    hide_special: bool = False
    choice: Choice = field(default_factory=Choice)

    def __post_init__(self) -> None:
        require_measures(self.measures)

    @property
    def tables(self) -> tuple[tuple[str, bool], ...]:
        """Measure and whether special tokens take part, of each table in its order."""
        return tuple(
            (measure, special) for special in (not self.hide_special, self.hide_special) for measure in self.measures
        )


def require_measures(measures: Sequence[str]) -> None:
    """Refuses measures that there are not.

    Raises:
        UsageError: There is none of a name, or none is given.
    """
    for measure in measures:
        if measure not in MEASURES:
            raise UsageError(f"there is no measure {measure!r}", f"choose from {', '.join(MEASURES)}")
    if not measures:
        raise UsageError("no measure is given", f"choose from {', '.join(MEASURES)}")


def compare(
    model: Model,
    corpus: Corpus | str | Sequence[str] | Sequence[CorpusText],
    options: CompareOptions | None = None,
    *,
    roles: Findings | None = None,
    report: Report | None = None,
) -> HeadComparison:
    """Compares all heads of a model with each other.

        found = attnscope.compare(model, "The animal didn't cross the street because it was too tired.")
        found.tables[0].distances        # (head, head)
        found.arrangements[0].places     # (head, 2), the map

    The distance of two heads is the root of their mean divergence, over all queries of all texts, of which copies count
    once: Σ divergence / Σ queries. It does not depend on padding or batches. Memory does not grow with the number of
    texts, nor (but for models that only have dense weights) with the square of a text's length; it does with the square
    of the number of heads. What is known when it is interrupted, up to the last whole text, is said to be incomplete.

    Args:
        model: A loaded model, see `attnscope.load`.
        corpus: What to run it on: a text, several, or a Corpus.
        options: How.
        roles: A record of the same model's heads, for their roles.
        report: Called after each batch.

    Raises:
        AttnscopeError: There is no text, the model cannot be compared, or the roles are of another one.
    """
    options = options or CompareOptions()
    require_one_kind(model)
    if roles is not None and roles.run.get("sha256") != model.info.sha256:
        raise AttnscopeError(
            f"the record of heads is of {roles.run.get('model')}, not of {model.info.name}",
            "give one that `attnscope heads` wrote for this model",
        )
    texts = texts_of(corpus)
    study = _Study((model,), options)
    complete = study.run(texts, report)
    sums = study.sums
    tables = tuple(sums.table(name) for name in options.tables)
    known = None if roles is None else {(h.kind, h.layer, h.head): h.roles for h in roles.heads}
    kind = model.info.kinds[0]
    return HeadComparison(
        run=_run_of((model,), study),
        corpus=_described(corpus, texts, study, complete),
        kind=kind,
        heads=sums.heads[0],
        tables=tables,
        arrangements=tuple(sums.arranged(table) for table in tables),
        roles=None
        if known is None
        else tuple(next((role.name for role in known.get((kind, *place), ())), "") for place in sums.heads[0]),
        roles_source="" if roles is None else f"{roles.run.get('model')}, {roles.corpus.get('n_texts')} texts",
    )


def compare_models(
    model: Model,
    other: Model,
    corpus: Corpus | str | Sequence[str] | Sequence[CorpusText],
    options: CompareOptions | None = None,
    *,
    report: Report | None = None,
) -> ModelComparison:
    """Compares the heads of two models, or of two checkpoints of one, that read the same tokens.

    Distances are as in `compare`, between each head of the one and each head of the other; the matching of heads is the
    one with the least sum of distances.

    Args:
        model: A loaded model, see `attnscope.load`.
        other: The model to compare it with.
        corpus: What to run both on.
        options: How.
        report: Called after each batch.

    Raises:
        AttnscopeError: The models make different tokens of a text; else as `compare`.
    """
    from attnscope.core.distance import best_matching

    options = options or CompareOptions()
    for one in (model, other):
        require_one_kind(one)
    texts = texts_of(corpus)
    study = _Study((model, other), options)
    complete = study.run(texts, report)
    sums = study.sums
    tables = tuple(sums.table(name) for name in options.tables)
    kinds = dict.fromkeys((model.info.kinds[0], other.info.kinds[0]))
    return ModelComparison(
        run=_run_of((model, other), study),
        other_run=run_of(other.info),
        corpus=_described(corpus, texts, study, complete),
        kind=" and ".join(kinds),
        heads=sums.heads[0],
        other_heads=sums.heads[1],
        tables=tables,
        matchings=tuple(best_matching(table.distances) for table in tables),
    )


def sums_of_rows(
    measure: str, rows: Sequence[NDArray[Any]], queries: NDArray[np.bool_] | None, keys: NDArray[np.bool_] | None
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The divergences of all pairs of heads, summed over queries, and over how many.

    Args:
        measure: "hellinger" or "jensen_shannon".
        rows: Weights of one model, or of two, each (head, query, key).
        queries: Which queries stay, (query,), and what keys, (key,): each row is divided by what is left of it. None =
            all, as they are.
        keys: See queries.
    """
    import torch

    from attnscope.core.distance import SUMS

    parts = [
        torch.from_numpy(one if queries is None or keys is None else divided_by_rest(one[:, queries][:, :, keys]))
        for one in rows
    ]
    found = SUMS[measure](parts[0], parts[1] if len(parts) > 1 else None)  # type: ignore[index]  # one of MEASURES
    return found.sums.numpy(), found.counts.numpy()


def table_of(
    measure: str, special: bool, shape: tuple[int, int], pairs: tuple[NDArray[Any], NDArray[Any]], sums: RunningSums
) -> PairTable:
    """A table from exact sums over texts of some pairs of heads; where they are those above the diagonal, of all."""
    low, high = sums.interval()
    values = [sums.ratio(), np.maximum(low, 0.0), high, sums.total("c")]
    filled = []
    end = 0.0 if sums.n_texts > 1 else math.nan
    for value, diagonal in zip(values, (0.0, end, end, float(values[3].max(initial=0.0))), strict=True):
        whole = np.full(shape, diagonal)
        whole[pairs] = value
        if len(pairs[0]) < math.prod(shape):
            whole[pairs[::-1]] = value
        filled.append(whole)
    return PairTable(measure, special, *filled)


def require_one_kind(model: Model) -> None:
    """Refuses encoder-decoders.

    Raises:
        AttnscopeError: The model has several kinds of attention.
    """
    if len(model.info.kinds) > 1:
        raise AttnscopeError(
            f"{model.info.name} has an encoder and a decoder; heads are compared in models that have one of them",
            "look at single texts with: attnscope heatmap",
        )


def _run_of(models: Sequence[Model], study: _Study) -> dict[str, Any]:
    run = run_of(models[0].info, _notes(models, study))
    return run | ({"failures": study.failures} if study.failures else {})


def _notes(models: Sequence[Model], study: _Study) -> list[str]:
    return [
        f"{model.info.name} is compared on its own dense weights: memory grows with the square of a text's length."
        for model in models
        if model.info.path == "eager"
    ] + ([study.room.note] if study.room.note else [])


def _described(
    given: Corpus | str | Sequence[str] | Sequence[CorpusText], texts: Texts, study: _Study, complete: bool
) -> dict[str, Any]:
    return {
        "sources": list(texts.sources) if isinstance(texts, Corpus) else ["texts"],
        "n_texts": study.n_texts,
        "n_tokens": study.n_tokens,
        "n_chunked": study.n_chunked,
        "n_copies": study.copies.n,
        "sha256": sha256_of(texts),
        "problems": [*problems_of(texts), *study.left_out.problems(study.models[0].info)],
        "complete": complete,
        "text": given if isinstance(given, str) else None,
    }


class _BrokenError(Exception):
    """A model computes NaN or infinity on a text."""

    def __init__(self, kind: str, layer: int) -> None:
        super().__init__(kind, layer)
        self.place: Place = kind, layer


class _Study:
    """One model, or two, on one corpus, text by text."""

    def __init__(self, models: Sequence[Model], options: CompareOptions) -> None:
        self.models, self.options = models, options
        self.n_texts = self.n_tokens = self.n_chunked = 0
        self.room, self.copies = Room(), Copies()
        self.left_out = LeftOut()
        self.failures: list[dict[str, str]] = []
        self._sums: _PairSums | None = None
        self._chosen = [options.choice.within(model.info) for model in models]

    @property
    def sums(self) -> _PairSums:
        """What was added up.

        Raises:
            AttnscopeError: Nothing was.
        """
        self.left_out.require_some_left(self.n_texts, self.models[0].info)
        if self._sums is None or not self.n_tokens:
            raise AttnscopeError("no text is left: none has any token", "give texts with words in them")
        return self._sums

    def run(self, texts: Texts, report: Report | None) -> bool:
        """Goes through a corpus; False if it was interrupted, or something failed, after a text at least."""
        try:
            for block in blocks(distinct(texts, self.copies), BLOCK):
                for batch in self._batches(block):
                    self._add(batch, block)
                    give_memory_back()
                    if report is not None:
                        report(Progress(self.n_texts, self.n_tokens, share_read(texts)))
        except KeyboardInterrupt:
            if not self.n_texts:
                raise
            return False
        except Exception as error:
            if not self.n_texts:
                raise
            self.failures.append(failure("the comparison on a later text", error))
            return False
        return True

    def _batches(self, block: Block) -> Iterator[tuple[Chunk, ...]]:
        """Batches of whole texts; the chunks of a text together, of which the model runs one at a time."""
        limits = [model.info.max_tokens for model in self.models if model.info.max_tokens is not None]
        given: dict[str, Any] = {"limit": min(limits, default=None), "special_ids": special_ids(self.models[0])}
        parts = [part for batch in block_batches(block, self.models[0].tokenizer.encode, **given) for part in batch]
        for other in self.models[1:]:
            theirs = [part for batch in block_batches(block, other.tokenizer.encode, **given) for part in batch]
            _require_same_tokens(self.models[0], other, parts, theirs)
        yield from batches((part for part in parts if part.n_chunks == 1), TOKEN_BUDGET)
        for text in dict.fromkeys(part.text for part in parts if part.n_chunks > 1):
            yield tuple(sorted((part for part in parts if part.text == text), key=lambda part: part.number))

    def _add(self, batch: Sequence[Chunk], block: Block) -> None:
        """Adds whole texts, or the chunks of one; without those on which a model computes NaN or infinity."""
        broken: dict[int, Place] = {}
        if batch[0].n_chunks == 1:
            for some, seen in self.room.each(batch, self._seen, halves, padded_size):
                for part, rows in zip(some, self._rows(some, seen), strict=True):
                    try:
                        self._add_text([self._summed(part, rows)], len(part))
                    except _BrokenError as error:
                        broken[part.text] = error.place
        else:
            try:
                found = [self._summed(part, rows) for part in batch for rows in self._rows([part], self._seen([part]))]
                self._add_text(found, sum(len(part) for part in batch))
                self.n_chunked += 1
            except _BrokenError as error:
                broken[batch[0].text] = error.place
        self.left_out = self.left_out.and_of(LeftOut.of(block.texts, broken))

    def _add_text(self, chunks: Sequence[_TextSums], n_tokens: int) -> None:
        if self._sums is None:
            raise AssertionError("rows come before sums")
        whole = dict(chunks[0])
        for chunk in chunks[1:]:
            whole = {name: (sums + chunk[name][0], counts + chunk[name][1]) for name, (sums, counts) in whole.items()}
        self._sums.add(whole)
        self.n_texts += 1
        self.n_tokens += n_tokens

    def _seen(self, batch: Sequence[Chunk]) -> list[_Seen]:
        """What each model attends to on a batch."""
        import torch

        tokens = [part.tokens for part in batch]
        lengths = np.array([len(t) for t in tokens])
        real = np.arange(lengths.max()) < lengths[:, None]
        seen: list[_Seen] = []
        for model, chosen in zip(self.models, self._chosen, strict=True):
            device = model.info.device

            def tensor(array: NDArray[Any], device: str = device) -> Tensor:
                return torch.from_numpy(array).to(device)

            given = Batch(
                tensor(padded([t.ids for t in tokens])),
                None if bool(real.all()) else tensor(real),
                tensor(padded([t.segments.astype(np.int64) for t in tokens])),
            )
            with torch.no_grad():
                seen.append(_Seen.of(model, given, chosen.layers, chosen.heads, chosen.picked))
        return seen

    def _rows(
        self, batch: Sequence[Chunk], seen: Sequence[_Seen]
    ) -> Iterator[Iterator[tuple[slice, list[NDArray[Any]]]]]:
        """Of each text of a batch the weights, some queries after the others: of each model (head, query, key)."""
        if self._sums is None:
            self._sums = _PairSums([one.heads for one in seen], self.options)
        for place, part in enumerate(batch):
            yield _together([one.rows(place, len(part)) for one in seen])

    def _summed(self, part: Chunk, rows: Iterator[tuple[slice, list[NDArray[Any]]]]) -> _TextSums:
        """The divergences of all pairs of heads on one chunk, summed over its queries, by table."""
        assert self._sums is not None
        ordinary, known = ~part.tokens.special, self._sums
        found: dict[tuple[str, bool], tuple[NDArray[np.float64], NDArray[np.float64]]] = {}
        for queries, weights in rows:
            for model, one, heads in zip(self.models, weights, known.heads, strict=True):
                if not np.isfinite(one).all():
                    first = int(np.flatnonzero(~np.isfinite(one).all((1, 2)))[0])
                    raise _BrokenError(model.info.kinds[0], heads[first][0])
            for measure in self.options.measures:
                whole = sums_of_rows(measure, weights, None, None)
                rest = whole if ordinary.all() else sums_of_rows(measure, weights, ordinary[queries], ordinary)
                for special, (sums, counts) in ((True, whole), (False, rest)):
                    had = found.get((measure, special))
                    found[measure, special] = (sums, counts) if had is None else (had[0] + sums, had[1] + counts)
        return found


_TextSums = Mapping[tuple[str, bool], tuple[NDArray[np.float64], NDArray[np.float64]]]


def _together(
    walks: Sequence[Iterator[tuple[slice, NDArray[Any]]]],
) -> Iterator[tuple[slice, list[NDArray[Any]]]]:
    """The rows of the same queries in each model."""
    if len(walks) == 1:
        for queries, rows in walks[0]:
            yield queries, [rows]
        return
    # Models of different sizes are cut at different queries: what one has more waits for the other.
    held: list[NDArray[Any] | None] = [None] * len(walks)
    start = 0
    while True:
        for number, walk in enumerate(walks):
            if held[number] is None:
                held[number] = next((rows for _, rows in walk), None)
        there = [rows for rows in held if rows is not None]
        if len(there) < len(walks):
            return
        n = min(rows.shape[1] for rows in there)
        yield slice(start, start + n), [np.ascontiguousarray(rows[:, :n]) for rows in there]
        held = [rows[:, n:] if rows.shape[1] > n else None for rows in there]
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
        from attnscope.core.calls import Calls
        from attnscope.core.probes import Weights

        kept = Weights(layers) if model.info.path == "eager" else Calls(layers)
        model.run(batch, kept)
        seen: Mapping[int, Any] = next(iter((kept.maps if isinstance(kept, Weights) else kept.calls).values()), {})
        n_heads = {n: one.shape[1] if isinstance(kept, Weights) else one.n_heads for n, one in sorted(seen.items())}
        places = [(layer, head) for layer, n in n_heads.items() for head in range(n)]
        wanted = [n for n, place in enumerate(places) if (place[1] in heads if picked is None else place in picked)]
        if not wanted:
            raise AttnscopeError("none of the chosen layers and heads has attention", "choose others with -L and -H")
        in_order = tuple(seen[layer] for layer in n_heads)
        calls, maps = ((), in_order) if isinstance(kept, Weights) else (in_order, ())
        return cls(tuple(places[n] for n in wanted), np.array(wanted), calls, maps)

    def rows(self, place: int, n: int) -> Iterator[tuple[slice, NDArray[Any]]]:
        """The weights of one text of n tokens, (head, query, key), some queries after the others.

        What was seen has no gradient, and none is switched off here: where two models take turns, the one that is
        left last would leave it switched off for the whole process.
        """
        import torch

        from attnscope.core.calls import iterate_rows, select_text

        if self.maps:
            step = max(16, WEIGHTS_AT_ONCE // max(1, n * sum(one.shape[1] for one in self.maps)))
            for low in range(0, n, step):
                part = [one[place, :, low : min(n, low + step), :n] for one in self.maps]
                yield slice(low, min(n, low + step)), torch.cat(part).numpy()[self.kept]
        else:
            texts = [select_text(call, place, n, n) for call in self.calls]
            for queries, rows in iterate_rows(texts, WEIGHTS_AT_ONCE):
                yield queries, rows.cpu().numpy()[self.kept]


class _PairSums:
    """Exact sums over texts for all pairs of heads, and for all pairs of layers of one model."""

    def __init__(self, heads: Sequence[tuple[HeadPlace, ...]], options: CompareOptions) -> None:
        from attnscope.core.running import RunningSums

        self.heads = heads
        self.shape = (len(heads[0]), len(heads[-1]))
        self._symmetric = len(heads) == 1
        n_pairs = math.prod(self.shape) // (2 if self._symmetric else 1)
        _require_memory(n_pairs * len(options.tables), self.shape)
        self._pairs = np.triu_indices(self.shape[0], 1) if self._symmetric else _all_pairs(self.shape)
        self._sums = {name: RunningSums((len(self._pairs[0]),)) for name in options.tables}
        self.layers = tuple(dict.fromkeys(layer for layer, _ in heads[0]))
        self._between = {name: RunningSums((len(self.layers) ** 2,)) for name in options.tables if self._symmetric}
        numbers = np.array([self.layers.index(layer) for layer, _ in heads[0]])
        self._group = numbers[self._pairs[0]] * len(self.layers) + numbers[self._pairs[1]] if self._symmetric else None

    def add(self, found: _TextSums) -> None:
        """Adds a text: of each table the sums and counts of all pairs, (head, head)."""
        # All at once, so that an interruption finds a text in all tables or in none.
        sums = {name: (summed[self._pairs], counts[self._pairs]) for name, (summed, counts) in found.items()}
        added = {name: self._sums[name].merge(_one_text(*parts)) for name, parts in sums.items()}
        between = {}
        if self._group is not None:
            n = len(self.layers) ** 2
            grouped = {
                name: tuple(np.bincount(self._group, part, n).astype(np.float64) for part in parts)
                for name, parts in sums.items()
            }
            between = {name: self._between[name].merge(_one_text(*parts)) for name, parts in grouped.items()}
        self._sums, self._between = added, between

    def table(self, name: tuple[str, bool]) -> PairTable:
        """The table of a measure, with special tokens or without."""
        return table_of(*name, self.shape, self._pairs, self._sums[name])

    def arranged(self, table: PairTable) -> Arrangement:
        """Order, clusters, map and layers by a table."""
        from attnscope.core.distance import classical_mds, cluster_heads

        merges, order = cluster_heads(table.distances)
        places, explained = classical_mds(table.distances)
        sums = self._between[table.measure, table.special]
        low, high = sums.interval()
        n = len(self.layers)
        layers = []
        for values in (sums.ratio(), np.maximum(low, 0.0), high):
            square = np.sqrt(values).reshape(n, n)
            layers.append(np.where(np.isnan(square), square.T, square))
        return Arrangement(merges, order, places, explained, *layers)


def _one_text(sums: NDArray[np.float64], counts: NDArray[np.float64]) -> RunningSums:
    from attnscope.core.running import RunningSums

    one = RunningSums(sums.shape)
    one.add(sums, counts)
    return one


def _all_pairs(shape: tuple[int, int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    first, second = np.indices(shape).reshape(2, -1)
    return first, second


def _require_same_tokens(model: Model, other: Model, ours: Sequence[Chunk], theirs: Sequence[Chunk]) -> None:
    """Refuses models that make different tokens of a text: their rows would be about different things."""
    for a, b in zip(ours, theirs, strict=False):
        same = np.array_equal(a.tokens.ids, b.tokens.ids) and np.array_equal(a.tokens.special, b.tokens.special)
        if not same or a.tokens.labels != b.tokens.labels:
            raise AttnscopeError(
                f"{model.info.name} and {other.info.name} make different tokens of the same text: "
                f"{' '.join(a.tokens.labels[:8])} … and {' '.join(b.tokens.labels[:8])} …",
                "compare models that share a tokenizer, such as two checkpoints of one",
            )


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
