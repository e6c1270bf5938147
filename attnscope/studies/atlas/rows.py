"""Read the attention of sampled texts and of examples: the second pass of an atlas."""

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
from attnscope.questions.atlas import KEPT_MASS, LEFT_OUT, MOST_KEYS
from attnscope.results.tokens import Tokens
from attnscope.studies.atlas.scores import Place, Scores
from attnscope.studies.atlas.tables import DISTANCE_QUERIES, KindTables, ReadText
from attnscope.studies.heads.measuring import decoder_start, target_of
from attnscope.studies.inputs.texts import Progress, Report, batch_of, special_ids
from attnscope.studies.run import Room

if TYPE_CHECKING:
    from torch import Tensor

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
    """Hold an example that is to be read; its fields are the columns of that name.

    Attributes:
        head: The row of its head.
        focus: Which token of the text to look at first; None = the query that counts most.
        failure: The row of `failures` if the description explains that token badly; -1 = it is none.
    """

    head: int
    why: str
    rank: int
    score: float
    focus: int | None = None
    failure: int = -1


@dataclass(frozen=True, eq=False)
class Example:
    """Hold an example that was read.

    Attributes:
        wanted: What it is to show.
        text: The text's number in the corpus; `source` and `n_tokens` are the columns of that name.
        places: The places of the shown tokens in their text, (token,), rising.
        labels: Their labels.
        special: Whether each is a special token, (token,).
        focus: Which of the shown tokens to look at first.
        excerpt: The source's own characters, see `excerpt_of`; `offsets` are where each token stands in it.
        starts: Where each token's kept keys begin in `keys` and `codes`, and where the last ends, (token + 1,).
        keys: The kept keys, as numbers of shown tokens; largest weight first.
        codes: Their weights x 255, rounded.
    """

    wanted: Wanted
    text: int
    source: str
    n_tokens: int
    places: NDArray[np.int64]
    labels: tuple[str, ...]
    special: NDArray[np.bool_]
    focus: int
    excerpt: str
    offsets: tuple[tuple[int, int], ...]
    starts: NDArray[np.int64]
    keys: NDArray[np.uint8]
    codes: NDArray[np.uint8]


@dataclass(eq=False)
class Unit:
    """Hold a text, or a chunk of a long one, that is read again.

    Attributes:
        sampled: Whether it is in the sample.
        wanted: The examples that it gives.
    """

    text: CorpusText
    chunk: Chunk
    sampled: bool = False
    wanted: list[Wanted] = field(default_factory=list)


@dataclass(eq=False)
class Rows:
    """Hold the results of the second pass, as far as it got.

    Attributes:
        tables: By kind of attention.
        examples: In no order.
        n_sampled: How many texts of the sample are in the tables.
        complete: Whether all texts were read.
    """

    tables: Mapping[str, KindTables]
    examples: list[Example] = field(default_factory=list)
    n_sampled: int = 0
    complete: bool = True


def units_of(
    model: Model,
    scores: Scores,
    failures: Mapping[CorpusText, list[tuple[Wanted, str, str]]],
    n_tokens: int,
    **cut: int | None,
) -> list[Unit]:
    """Return the texts that are read again, those of the sample first; in the order of their lots.

    Args:
        model: The model.
        scores: The texts that show what heads do.
        failures: Texts with tokens whose attention descriptions explain badly: for each the example, the token and the
            tokens before it.
        n_tokens: Tokens of the whole corpus.
        cut: How long texts are cut, as in `corpus.chunks`.
    """
    special, limit, start = special_ids(model), model.info.max_tokens, decoder_start(model)
    units: dict[tuple[int, int], Unit] = {}
    chunks_of: dict[int, list[Chunk]] = {}

    def parts(text: CorpusText) -> list[Chunk]:
        if text.index not in chunks_of:
            tokens = tokens_of(text, model.tokenizer.encode, special)
            chunks_of[text.index] = chunks(tokens, text.index, limit=limit, **cut)
        return chunks_of[text.index]

    def unit(text: CorpusText, number: int) -> Unit:
        return units.setdefault((text.index, number), Unit(text, parts(text)[number]))

    # Sample texts up to the budget of tokens.
    left = min(MOST_TOKENS, max(FEWEST_TOKENS, n_tokens // SHARE))
    fitting = []  # a text that is too long for what is left is passed over: the others speak for the corpus
    for number in scores.sample:
        if scores.texts[number].n_tokens <= left:
            fitting.append(number)
            left -= scores.texts[number].n_tokens
    # Two are needed to tell how sure anything is, however long they are.
    for number in fitting if len(fitting) > 1 else scores.sample[:2]:
        scored = scores.texts[number]
        unit(scored.text, scored.number).sampled = True
    # The best texts of each head, and one per decile.
    for why, by_head in (("top", scores.best()), ("decile", scores.deciles()[1])):
        for head, of_head in enumerate(by_head):
            for rank, number in enumerate(of_head.tolist()):
                if number >= 0:
                    scored = scores.texts[number]
                    example = Wanted(head, why, rank, float(scores.values[number, head]))
                    unit(scored.text, scored.number).wanted.append(example)
    # Find the chunk of each failure by its token and the tokens before it.
    for text, of_text in failures.items():
        for example, token, before in of_text:
            for part in parts(text):
                source = _read_by(scores.heads[example.head][0], part, start).tokens
                labels, position = source.labels, example.focus or 0
                if (
                    labels[position : position + 1] == (token,)
                    and " ".join(labels[max(0, position - 6) : position]) == before
                ):
                    unit(text, part.number).wanted.append(example)
                    break
    return [each for each in units.values() if each.sampled or each.wanted]


def read_rows(model: Model, heads: Sequence[Place], units: Sequence[Unit], report: Report | None = None) -> Rows:
    """Run the model on texts again, and read the rows that an atlas shows; an interruption returns those so far."""
    # Count the heads of each layer.
    start = decoder_start(model)
    by_kind: dict[str, dict[int, int]] = {}
    for kind, layer, _ in heads:
        by_kind.setdefault(kind, {}).setdefault(layer, 0)
        by_kind[kind][layer] += 1
    sampled = [unit for unit in units if unit.sampled]
    rows = Rows(
        {
            kind: KindTables([*n_heads.values()], [_read_by(kind, unit.chunk, start) for unit in sampled])
            for kind, n_heads in by_kind.items()
        }
    )
    # Read sampled texts first: the tables need them.
    reader = _Reader(model, heads, by_kind, start, rows)
    by_chunk = {id(unit.chunk): unit for unit in units}
    todo = [sampled, [unit for unit in units if not unit.sampled]]
    total, done = sum(len(unit.chunk) for unit in units), 0
    room = Room()
    try:
        for part in todo:
            cut: Sequence[Sequence[Chunk]] = batches([unit.chunk for unit in part], TOKEN_BUDGET)
            for batch in cut:
                for some, seen in room.each(batch, reader.run):
                    for number, chunk in enumerate(some):
                        with delay_interrupts():
                            reader.add(by_chunk[id(chunk)], seen, number)
                    done += sum(map(len, some))
                    if report is not None:
                        report(Progress(len(rows.examples), done, done / total, "reading examples"))
    except KeyboardInterrupt:
        rows.complete = False
    return rows


class _Reader:
    """Read the examples and tables of batches."""

    def __init__(
        self,
        model: Model,
        heads: Sequence[Place],
        by_kind: Mapping[str, Mapping[int, int]],
        start: Tokens | None,
        rows: Rows,
    ) -> None:
        self._model, self._heads, self._by_kind, self._start, self._rows = model, heads, by_kind, start, rows

    def run(self, batch: Sequence[Chunk]) -> Mapping[Any, Mapping[int, Any]]:
        """Return what each kind of attention was on a batch: kind -> layer -> its call, or dense weights."""
        from attnscope.studies.seen import see

        tokens = [chunk.tokens for chunk in batch]
        targets = [] if self._start is None else [target_of(self._start, source) for source in tokens]
        return see(self._model, batch_of(tokens, targets))

    def add(self, unit: Unit, seen: Mapping[Any, Mapping[int, Any]], number: int) -> None:
        """Add what a text shows; `seen` is what `run` returned, `number` says which text of the batch it is."""
        for kind in self._by_kind:
            read = _SeenText(kind, seen[kind], number, len(unit.chunk))
            self._read_text(read, unit)
        self._rows.n_sampled += unit.sampled

    def _read_text(self, seen: _SeenText, unit: Unit) -> None:
        import torch

        layers = list(self._by_kind[seen.kind])
        text = _read_by(seen.kind, unit.chunk, self._start)
        # Tables take all rows; distances take a few queries at even steps.
        if unit.sampled:
            tables = self._rows.tables[seen.kind]
            tables.add(text, lambda number: seen.tiles(layers[number]))
            some = np.unique(np.linspace(0, len(text) - 1, min(len(text), DISTANCE_QUERIES)).astype(np.int64))
            queries = torch.from_numpy(some[text.asks[some]])
            if len(queries):
                tables.compare(torch.cat([seen.rows(layer, queries)[0] for layer in layers]))
        # Group the text's examples by layer and head.
        by_layer: dict[int, dict[int, list[Wanted]]] = {}
        for example in unit.wanted:
            kind, layer, head = self._heads[example.head]
            if kind == seen.kind:
                by_layer.setdefault(layer, {}).setdefault(head, []).append(example)
        for layer, by_head in by_layer.items():
            for head, examples in by_head.items():
                self._rows.examples += _examples(seen, layer, head, examples, unit, text)


@dataclass(frozen=True, eq=False)
class _SeenText:
    """Hold one kind of attention on one text of a batch: layer -> its call, or dense weights; n tokens."""

    kind: str
    layers: Mapping[int, Any]
    number: int
    n: int
    _whole: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def rows(self, layer: int, queries: Tensor, head: int | None = None) -> tuple[Tensor, Tensor]:
        """Return rows of some queries, (head, query, key), and what these may attend to, (query, key)."""
        from attnscope.core.attention.row_samples import read_rows

        if self._step(layer) >= self.n:
            ((_, weights, allowed),) = self.tiles(layer)
            weights, allowed = weights[:, queries], allowed[queries]
        else:
            weights, allowed = read_rows(self.layers[layer], self.kind, self.number, queries, self.n)
        weights = weights.float()
        return (weights if head is None else weights[head : head + 1]), allowed

    def tiles(self, layer: int, head: int | None = None) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield all rows, tile by tile of queries. A text that is one tile is computed once."""
        import torch

        from attnscope.core.attention.row_samples import read_rows

        step = min(self.n, self._step(layer))
        for first in range(0, self.n, step):
            queries = torch.arange(first, min(self.n, first + step))
            if layer in self._whole:
                weights, allowed = self._whole[layer]
            else:
                weights, allowed = read_rows(self.layers[layer], self.kind, self.number, queries, self.n)
                weights = weights.float()
            if step == self.n:
                self._whole[layer] = weights, allowed
            chosen = weights if head is None else weights[head : head + 1]
            yield slice(first, first + len(queries)), chosen, allowed

    def _step(self, layer: int) -> int:
        """Return how many queries are read at once."""
        from attnscope.studies.seen import count_heads

        return max(16, _ELEMENTS // (self.n * count_heads(self.layers[layer])))


def _read_by(kind: str, chunk: Chunk, start: Tokens | None) -> ReadText:
    """Return what the heads of a kind read in a chunk; in cross-attention written tokens ask, and source tokens get."""
    source = chunk.tokens
    asks = ~chunk.repeated
    if kind == "decoder" and start is not None:
        source, asks = target_of(start, source), np.concatenate([[False], asks[:-1]])
    return ReadText(source, asks)


def _examples(
    seen: _SeenText, layer: int, head: int, examples: Sequence[Wanted], unit: Unit, text: ReadText
) -> Iterator[Example]:
    """Yield the examples of one head that a text gives."""
    from attnscope.core.lifts import keep_rows

    counts, keys = _counts(seen, layer, head, text)
    counts = np.where(text.asks, counts, -1.0)
    for example in examples:
        focus = int(counts.argmax()) if example.focus is None else example.focus
        positions = window(text.tokens.special, focus, int(keys[focus]))
        import torch

        rows = seen.rows(layer, torch.from_numpy(positions), head)[0][0].double().numpy()
        sparse = keep_rows(rows[:, positions], rows.sum(1), KEPT_MASS, MOST_KEYS)
        excerpt, offsets = excerpt_of(text.tokens, positions)
        yield Example(
            wanted=example,
            text=unit.text.index,
            source=f"{unit.text.source}:{unit.text.line}",
            n_tokens=len(text),
            places=positions,
            labels=tuple(text.tokens.labels[position] for position in positions),
            special=text.tokens.special[positions],
            focus=int(np.searchsorted(positions, focus)),
            excerpt=excerpt,
            offsets=offsets,
            **sparse._asdict(),
        )


def _counts(seen: _SeenText, layer: int, head: int, text: ReadText) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return how much each query counts: the mass it gives away times its nats from uniform; and its largest key."""
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
    """Return which tokens of a text are shown, rising: all, or `WINDOW` tokens around what counts.

    The window has the first token, the special tokens at either end, and the key that the focus attends to most.

    Args:
        special: Which tokens are special, (token,).
        focus: The query that counts most.
        key: Its largest key.
    """
    n = len(special)
    if n <= WINDOW:
        return np.arange(n)
    named = np.flatnonzero(special)
    positions = {0, focus, *named[:_PINS].tolist(), *named[-_PINS:].tolist()}
    positions |= {position for position in range(key - _AROUND_KEY, key + _AROUND_KEY + 1) if 0 <= position < n}
    # What is nearest to the focus, until there is no more room; of two the earlier one.
    for position in sorted(range(n), key=lambda position: (abs(position - focus), position)):
        if len(positions) >= WINDOW:
            break
        positions.add(position)
    return np.array(sorted(positions), np.int64)


def excerpt_of(tokens: Tokens, positions: NDArray[np.int64]) -> tuple[str, tuple[tuple[int, int], ...]]:
    """Return the source's own characters of some tokens, rising, and where in them each token stands.

    Tokens that are left out are `LEFT_OUT`. Both are empty if the tokenizer has no offsets.
    """
    written = ""
    offsets: list[tuple[int, int]] = []
    end = -1  # in the source, of what is written; -1: tokens were left out since
    for number, position in enumerate(positions.tolist()):
        start, stop = tokens.offsets[position].tolist()
        if number and position != positions[number - 1] + 1:
            written, end = written + LEFT_OUT, -1
        if start < 0 or stop <= start:
            offsets.append((len(written), len(written)))
            continue
        if end < 0:
            end = start
        written += tokens.text[end : max(start, end)]
        # Tokens that are bytes of one character share it.
        first = len(written) - max(0, end - start)
        written += tokens.text[max(start, end) : stop]
        end = max(end, stop)
        offsets.append((first, len(written)))
    return (written, tuple(offsets)) if any(stop > start for start, stop in offsets) else ("", ())
