"""The second pass of an atlas: the rows of attention of sampled texts, and of those that are examples of a head."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from attnscope.corpus import TOKEN_BUDGET, Chunk, CorpusText, batches, chunks
from attnscope.corpus.batching import tokens_of
from attnscope.host import delay_interrupts
from attnscope.models.model import Model
from attnscope.records import Tokens
from attnscope.records.atlas.record import KEPT_MASS, MOST_KEYS, Example, ExampleFacts, Why
from attnscope.studies.atlas.planes import PlaneSums, draw_tokens, excerpt_of
from attnscope.studies.atlas.scores import Place, Scores
from attnscope.studies.atlas.tables import DISTANCE_QUERIES, KindTables, ReadText
from attnscope.studies.inputs.texts import Progress, Report, Texts, batch_of, special_ids
from attnscope.studies.measuring.head_blocks import decoder_start, target_of
from attnscope.studies.running.memory import Room, give_memory_back, halves, padded_size

if TYPE_CHECKING:
    from torch import Tensor

    from attnscope.core.attention.projections import TokenVectors

FEWEST_TOKENS, MOST_TOKENS, SHARE = 4096, 32_768, 8
"""Tokens of sampled texts whose rows are read for profiles, tables and distances: a part of the corpus, within these
bounds. So an atlas of a small corpus takes little longer than a study of its heads."""

WINDOW = 64
"""Tokens of an example that are shown at most."""

_PINS = 4  # special tokens at either end of a text that are shown with any part of it
_AROUND_KEY = 2
_ELEMENTS = 2**20
"""Weights of a layer that are looked at at once."""


@dataclass(frozen=True)
class Wanted:
    """An example that is to be read.

    Attributes:
        head: The head's number.
        why: What it is to show.
        rank: See `ExampleFacts`.
        score: Likewise.
        focus: Which token to look at first; None = the query that counts most.
    """

    head: int
    why: Why
    rank: int
    score: float
    focus: int | None = None


@dataclass(eq=False)
class Unit:
    """A text, or a chunk of a long one, that is read again.

    Attributes:
        text: The text.
        chunk: The chunk.
        sampled: Whether it is one of the sample.
        wanted: The examples that it is.
        lot: Of one of the sample its hash.
    """

    text: CorpusText
    chunk: Chunk
    sampled: bool = False
    wanted: list[Wanted] = field(default_factory=list)
    lot: int = 0


@dataclass(eq=False)
class Rows:
    """What the second pass came to, as far as it got.

    Attributes:
        tables: By kind of attention.
        examples: The examples, in no order.
        n_sampled: How many texts of the sample are in the tables.
        complete: Whether all texts were read.
        planes: Fields of the atlas that say where queries, keys and outputs lie; empty where they are not known.
    """

    tables: Mapping[str, KindTables]
    examples: list[Example] = field(default_factory=list)
    n_sampled: int = 0
    complete: bool = True
    planes: dict[str, Any] = field(default_factory=dict)


def units_of(
    model: Model,
    scores: Scores,
    failures: Mapping[CorpusText, list[tuple[Wanted, str, str]]],
    n_tokens: int,
    **cut: int | None,
) -> list[Unit]:
    """The texts that are read again, those of the sample first; in the order of their lots.

    Args:
        model: The model.
        scores: The texts that show what heads do.
        n_tokens: Tokens of the whole corpus.
        failures: Texts with tokens whose attention descriptions explain badly: of each the example, the token and what
            stands before it.
        cut: How long texts are cut, as of `corpus.chunks`.
    """
    special, limit, start = special_ids(model), model.info.max_tokens, decoder_start(model)
    known: dict[tuple[int, int], Unit] = {}
    held: dict[int, list[Chunk]] = {}

    def parts(text: CorpusText) -> list[Chunk]:
        if text.index not in held:
            tokens = tokens_of(text, model.tokenizer.encode, special)
            held[text.index] = chunks(tokens, text.index, limit=limit, **cut)
        return held[text.index]

    def unit(text: CorpusText, number: int) -> Unit:
        return known.setdefault((text.index, number), Unit(text, parts(text)[number]))

    left = min(MOST_TOKENS, max(FEWEST_TOKENS, n_tokens // SHARE))
    fitting = []  # a text that is too long for what is left is passed over: the others speak for the corpus
    for number in scores.sample:
        if scores.texts[number].n_tokens <= left:
            fitting.append(number)
            left -= scores.texts[number].n_tokens
    # Two are needed to tell how sure anything is, however long they are.
    for number in fitting if len(fitting) > 1 else scores.sample[:2]:
        one = scores.texts[number]
        drawn = unit(one.text, one.number)
        drawn.sampled, drawn.lot = True, one.lot
    picked: tuple[tuple[Why, NDArray[np.int64]], ...] = (("top", scores.best()), ("decile", scores.deciles()[1]))
    for why, chosen in picked:
        for head, of_head in enumerate(chosen):
            for rank, number in enumerate(of_head.tolist()):
                if number >= 0:
                    one = scores.texts[number]
                    wanted = Wanted(head, why, rank, float(scores.values[number, head]))
                    unit(one.text, one.number).wanted.append(wanted)
    for text, of_text in failures.items():
        for wanted, token, before in of_text:
            for part in parts(text):
                asked = _read_by(scores.heads[wanted.head][0], part, start).tokens
                labels, place = asked.labels, wanted.focus or 0
                if labels[place : place + 1] == (token,) and " ".join(labels[max(0, place - 6) : place]) == before:
                    unit(text, part.number).wanted.append(wanted)
                    break
    return [one for one in known.values() if one.sampled or one.wanted]


def read_rows(model: Model, heads: Sequence[Place], units: Sequence[Unit], report: Report | None = None) -> Rows:
    """Runs the model on texts again, and reads what an atlas shows of them.

    An interruption ends it: what was read up to there is returned.

    Args:
        model: The model.
        heads: All heads, by kind and layer.
        units: The texts.
        report: Called after each batch.
    """
    start = decoder_start(model)
    by_kind: dict[str, dict[int, int]] = {}
    for kind, layer, _ in heads:
        by_kind.setdefault(kind, {}).setdefault(layer, 0)
        by_kind[kind][layer] += 1
    sampled = [unit for unit in units if unit.sampled]
    found = Rows(
        {
            kind: KindTables([*n_heads.values()], [_read_by(kind, unit.chunk, start) for unit in sampled])
            for kind, n_heads in by_kind.items()
        }
    )
    reader = _Reader(model, heads, by_kind, start, found)
    reader.draw(sampled)
    by_chunk = {id(unit.chunk): unit for unit in units}
    todo = [sampled, [unit for unit in units if not unit.sampled]]
    total, done = sum(len(unit.chunk) for unit in units), 0
    room = Room()
    try:
        for part in todo:
            cut: Sequence[Sequence[Chunk]] = batches([unit.chunk for unit in part], TOKEN_BUDGET)
            for batch in cut:
                for some, seen in room.each(batch, reader.run, halves, padded_size):
                    for place, chunk in enumerate(some):
                        with delay_interrupts():
                            reader.add(by_chunk[id(chunk)], seen, place)
                    done += sum(map(len, some))
                    if report is not None:
                        report(Progress(len(found.examples), done, done / total, "reading examples"))
                give_memory_back()
    except KeyboardInterrupt:
        found.complete = False
    found.planes = reader.planes.finish(heads, model)
    return found


class _Reader:
    """Reads batches."""

    def __init__(
        self,
        model: Model,
        heads: Sequence[Place],
        by_kind: Mapping[str, Mapping[int, int]],
        start: Tokens | None,
        found: Rows,
    ) -> None:
        self._model, self._heads, self._by_kind, self._start, self._found = model, heads, by_kind, start, found
        self._drawn: dict[int, dict[str, NDArray[np.int64]]] = {}
        self.planes = PlaneSums()

    def draw(self, sampled: Sequence[Unit]) -> None:
        """Draws the tokens whose queries, keys and outputs are kept."""
        if self._model.info.path == "eager":
            return
        for kind in self._by_kind:
            texts = [_read_by(kind, unit.chunk, self._start) for unit in sampled]
            places = draw_tokens(texts, [unit.lot for unit in sampled], self._model)
            for unit, of_unit in zip(sampled, places, strict=True):
                self._drawn.setdefault(id(unit.chunk), {})[kind] = of_unit

    def run(self, batch: Sequence[Chunk]) -> _Seen:
        """What each kind of attention was on a batch."""
        import torch

        from attnscope.core.attention.calls import Calls
        from attnscope.core.attention.probes import Weights
        from attnscope.core.attention.projections import TokenVectors
        from attnscope.models.inside.around import TurnWatch

        tokens = [chunk.tokens for chunk in batch]
        targets = [] if self._start is None else [target_of(self._start, one) for one in tokens]
        given = batch_of(tokens, targets).to(self._model.info.device)
        if self._model.info.path == "eager":
            weights = Weights()
            with torch.no_grad():
                self._model.run(given, weights)
            return _Seen(weights.maps)  # type: ignore[arg-type]  # kinds are strings
        calls, turns = Calls(), TurnWatch()
        if not any(id(chunk) in self._drawn for chunk in batch):
            with torch.no_grad():
                self._model.run(given, calls)
            return _Seen(calls.maps)  # type: ignore[arg-type]
        places: Any = {
            kind: [torch.from_numpy(self._drawn[id(chunk)][kind]) for chunk in batch] for kind in self._by_kind
        }
        vectors = TokenVectors(calls, places, turns.bare)
        with torch.no_grad(), turns.watch(self._model.modules()):
            self._model.run(given, vectors)
        return _Seen(calls.maps, vectors)  # type: ignore[arg-type]

    def add(self, unit: Unit, seen: _Seen, place: int) -> None:
        """Adds what a text says.

        Args:
            unit: The text.
            seen: What `run` gave.
            place: Which text of the batch it is.
        """
        for kind in self._by_kind:
            read = _SeenText(kind, seen.layers[kind], place, len(unit.chunk))
            self._read_text(read, unit)
            vectors: Any = seen.vectors
            if vectors is not None:
                kept = {layer: of_layer[place] for layer, of_layer in vectors.kept[kind].items()}
                self.planes.add(
                    kind, unit.text.index, _read_by(kind, unit.chunk, self._start).tokens,
                    self._drawn[id(unit.chunk)][kind], kept, vectors.turned[kind],
                )  # fmt: skip
        self._found.n_sampled += unit.sampled

    def _read_text(self, seen: _SeenText, unit: Unit) -> None:
        import torch

        layers = list(self._by_kind[seen.kind])
        text = _read_by(seen.kind, unit.chunk, self._start)
        if unit.sampled:
            tables = self._found.tables[seen.kind]
            tables.add(text, lambda number: seen.tiles(layers[number]))
            some = np.unique(np.linspace(0, len(text) - 1, min(len(text), DISTANCE_QUERIES)).astype(np.int64))
            queries = torch.from_numpy(some[text.asks[some]])
            if len(queries):
                tables.compare(torch.cat([seen.rows(layer, queries)[0] for layer in layers]))
        by_layer: dict[int, dict[int, list[Wanted]]] = {}
        for wanted in unit.wanted:
            kind, layer, head = self._heads[wanted.head]
            if kind == seen.kind:
                by_layer.setdefault(layer, {}).setdefault(head, []).append(wanted)
        for layer, by_head in by_layer.items():
            for head, facts in by_head.items():
                self._found.examples += _examples(seen, layer, head, facts, unit, text)


@dataclass(frozen=True, eq=False)
class _Seen:
    """What each kind of attention was on a batch.

    Attributes:
        layers: Kind -> layer -> its call, or dense weights.
        vectors: Queries, keys and outputs of some tokens; None where none were drawn.
    """

    layers: Mapping[str, Mapping[int, Any]]
    vectors: TokenVectors | None = None


@dataclass(frozen=True, eq=False)
class _SeenText:
    """What a kind of attention was on one text of a batch.

    Attributes:
        kind: The kind.
        layers: Layer -> its call, or dense weights.
        place: Which text.
        n: Its tokens.
    """

    kind: str
    layers: Mapping[int, Any]
    place: int
    n: int
    _held: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def rows(self, layer: int, queries: Tensor, head: int | None = None) -> tuple[Tensor, Tensor]:
        """Rows of some queries, (head, query, key), and what these may attend to, (query, key)."""
        chosen = slice(None) if head is None else slice(head, head + 1)
        if self._step(layer) < self.n:
            weights, allowed = self._rows(layer, queries)
            return weights[chosen], allowed
        weights, allowed = self._whole(layer)
        return weights[chosen, queries], allowed[queries]

    def tiles(self, layer: int, head: int | None = None) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """All rows, some queries after the others."""
        import torch

        step = min(self.n, self._step(layer))
        chosen = slice(None) if head is None else slice(head, head + 1)
        for first in range(0, self.n, step):
            last = min(self.n, first + step)
            weights, allowed = self._whole(layer) if step == self.n else self._rows(layer, torch.arange(first, last))
            yield slice(first, last), weights[chosen], allowed

    def _step(self, layer: int) -> int:
        """How many queries are read at once."""
        import torch

        of = self.layers[layer]
        return max(16, _ELEMENTS // (self.n * (of.shape[1] if isinstance(of, torch.Tensor) else of.n_heads)))

    def _whole(self, layer: int) -> tuple[Tensor, Tensor]:
        """All rows of a text that is short enough, which are computed once."""
        import torch

        if layer not in self._held:
            self._held[layer] = self._rows(layer, torch.arange(self.n))
        return self._held[layer]

    def _rows(self, layer: int, queries: Tensor) -> tuple[Tensor, Tensor]:
        import torch

        from attnscope.core.attention.row_samples import rows_of, rows_of_weights
        from attnscope.core.attention.seam import attention_weights

        of = self.layers[layer]
        if isinstance(of, torch.Tensor):
            return rows_of_weights(of, self.kind, self.place, queries, self.n)
        part, allowed = rows_of(of, self.place, queries, self.n)
        return attention_weights(part)[0].to("cpu", torch.float32), allowed.cpu()


def _read_by(kind: str, chunk: Chunk, start: Tokens | None) -> ReadText:
    """What the heads of a kind read in a chunk; across, each token that is written asks, those of the source get."""
    source = chunk.tokens
    asks = ~chunk.repeated
    if kind == "decoder" and start is not None:
        source, asks = target_of(start, source), np.concatenate([[False], asks[:-1]])
    return ReadText(source, asks)


def _examples(
    seen: _SeenText, layer: int, head: int, wanted: Sequence[Wanted], unit: Unit, text: ReadText
) -> Iterator[Example]:
    """The examples that a text is of one head."""
    from attnscope.core.questions.row_tables import keep_rows

    counts, keys = _counts(seen, layer, head, text)
    counts = np.where(text.asks, counts, -1.0)
    for one in wanted:
        focus = int(counts.argmax()) if one.focus is None else one.focus
        places = window(text.tokens.special, focus, int(keys[focus]))
        import torch

        rows = seen.rows(layer, torch.from_numpy(places), head)[0][0].double().numpy()
        kept = keep_rows(rows[:, places], rows.sum(1), KEPT_MASS, MOST_KEYS)
        facts = ExampleFacts(
            one.head, one.why, one.rank, one.score, unit.text.index, f"{unit.text.source}:{unit.text.line}", len(text),
            tuple(text.tokens.labels[place] for place in places), int(np.searchsorted(places, focus)),
            *excerpt_of(text.tokens, places),
        )  # fmt: skip
        yield Example(facts, places.astype(np.int32), text.tokens.special[places], *kept)


def _counts(seen: _SeenText, layer: int, head: int, text: ReadText) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """How much each query counts: what it gives away times its nats from uniform; and its largest key off the rest."""
    import torch

    counts, keys = np.zeros(len(text)), np.zeros(len(text), np.int64)
    off = torch.from_numpy(text.outside_sinks)
    for queries, weights, allowed in seen.tiles(layer, head):
        rows = weights[0].double()
        away = rows * off
        nats = allowed.sum(-1).clamp(min=1).double().log() - torch.special.entr(rows).sum(-1)
        counts[queries] = (away.sum(-1) * nats.clamp(min=0)).numpy()
        keys[queries] = away.argmax(-1).numpy()
    return counts, keys


def window(special: NDArray[np.bool_], focus: int, key: int) -> NDArray[np.int64]:
    """Which tokens of a text are shown: all, or a window around what counts.

    With the first token, the special tokens at either end, and the key that the focus attends to most.

    Args:
        special: Which tokens are special, (token,).
        focus: The query that counts most.
        key: Its largest key.

    Returns:
        At most `WINDOW` places, rising.
    """
    n = len(special)
    if n <= WINDOW:
        return np.arange(n)
    named = np.flatnonzero(special)
    kept = {0, focus, *named[:_PINS].tolist(), *named[-_PINS:].tolist()}
    kept |= {place for place in range(key - _AROUND_KEY, key + _AROUND_KEY + 1) if 0 <= place < n}
    # What is nearest to the focus, until there is no more room; of two the earlier one.
    for place in sorted(range(n), key=lambda place: (abs(place - focus), place)):
        if len(kept) >= WINDOW:
            break
        kept.add(place)
    return np.array(sorted(kept), np.int64)


def failing_texts(texts: Texts, numbers: set[int]) -> dict[int, CorpusText]:
    """The texts of some numbers, which takes one more reading of the corpus."""
    return {text.index: text for text in texts if text.index in numbers} if numbers else {}
