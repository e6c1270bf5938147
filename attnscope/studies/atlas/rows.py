"""Read the attention of sampled texts and of examples: the second pass of an atlas."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attnscope.core.attention.row_samples import read_rows as read_some
from attnscope.core.lifts import keep_rows
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
from attnscope.studies.seen import Attention, count_heads, see

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
    """

    head: int
    why: str
    rank: int
    score: float


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

    tables: dict[str, KindTables]
    examples: list[Example] = field(default_factory=list)
    n_sampled: int = 0
    complete: bool = True


def units_of(model: Model, scores: Scores, n_tokens: int, **cut: int | None) -> list[Unit]:
    """Return the texts that are read again, those of the sample first; in the order of their lots.

    Args:
        model: The model.
        scores: The texts that show what heads do.
        n_tokens: Tokens of the whole corpus.
        cut: How long texts are cut, as in `corpus.chunks`.
    """
    special = special_ids(model)
    units: dict[int, Unit] = {}

    def unit(number: int) -> Unit:
        scored = scores.texts[number]
        if number not in units:
            tokens = tokens_of(scored.text, model.tokenizer.encode, special)
            parts = chunks(tokens, scored.text.index, limit=model.info.max_tokens, **cut)
            units[number] = Unit(scored.text, parts[scored.number])
        return units[number]

    # Sample texts up to the budget of tokens.
    left = min(MOST_TOKENS, max(FEWEST_TOKENS, n_tokens // SHARE))
    fitting = []  # a text that is too long for what is left is passed over: the others speak for the corpus
    for number in scores.sample:
        if scores.texts[number].n_tokens <= left:
            fitting.append(number)
            left -= scores.texts[number].n_tokens
    # Two are needed to tell how sure anything is, however long they are.
    for number in fitting if len(fitting) > 1 else scores.sample[:2]:
        unit(number).sampled = True
    # The best texts of each head, and one per decile.
    for why, by_head in (("top", scores.best()), ("decile", scores.deciles()[1])):
        for head, of_head in enumerate(by_head):
            for rank, number in enumerate(of_head.tolist()):
                if number >= 0:
                    unit(number).wanted.append(Wanted(head, why, rank, float(scores.values[number, head])))
    return list(units.values())


def read_rows(model: Model, heads: Sequence[Place], units: Sequence[Unit], report: Report | None = None) -> Rows:
    """Run the model on texts again, and read the rows that an atlas shows; an interruption returns those so far."""
    # Count the heads of each layer.
    start = decoder_start(model)
    by_kind: dict[str, dict[int, int]] = {}
    for kind, layer, _ in heads:
        by_kind.setdefault(kind, {}).setdefault(layer, 0)
        by_kind[kind][layer] += 1
    sampled = [unit for unit in units if unit.sampled]
    rows = Rows({})
    for kind, n_heads in by_kind.items():
        texts = [_read_by(kind, unit.chunk, start) for unit in sampled]
        rows.tables[kind] = KindTables([*n_heads.values()], texts)

    def run(batch: Sequence[Chunk]) -> Mapping[Any, Mapping[int, Any]]:
        """Return what each kind of attention was on a batch: kind -> layer -> its call, or dense weights."""
        tokens = [chunk.tokens for chunk in batch]
        targets = [] if start is None else [target_of(start, source) for source in tokens]
        return see(model, batch_of(tokens, targets))

    # Read sampled texts first: the tables need them.
    by_chunk = {id(unit.chunk): unit for unit in units}
    chunks_of = [[unit.chunk for unit in units if unit.sampled == is_sampled] for is_sampled in (True, False)]
    total, done = sum(len(unit.chunk) for unit in units), 0
    room = Room()
    try:
        for batch in [batch for part in chunks_of for batch in batches(part, TOKEN_BUDGET)]:
            for some, seen in room.each(batch, run):
                for number, chunk in enumerate(some):
                    unit = by_chunk[id(chunk)]
                    with delay_interrupts():
                        for kind, n_heads in by_kind.items():
                            read = _SeenText(kind, seen[kind], list(n_heads), number, len(chunk))
                            _read_text(rows, read, heads, unit, _read_by(kind, chunk, start))
                        rows.n_sampled += unit.sampled
                done += sum(map(len, some))
                if report is not None:
                    report(Progress(len(rows.examples), done, done / total, "reading examples"))
    except KeyboardInterrupt:
        rows.complete = False
    return rows


def _read_text(rows: Rows, seen: _SeenText, heads: Sequence[Place], unit: Unit, text: ReadText) -> None:
    """Add what a text shows to the tables and examples."""
    # Tables take all rows; distances take a few queries at even steps.
    if unit.sampled:
        tables = rows.tables[seen.kind]
        tables.add(text, lambda number: seen.tiles(seen.layers[number]))
        some = np.unique(np.linspace(0, len(text) - 1, min(len(text), DISTANCE_QUERIES)).astype(np.int64))
        queries = torch.from_numpy(some[text.asks[some]])
        if len(queries):
            tables.compare(torch.cat([seen.rows(layer, queries) for layer in seen.layers]))
    # A head may show the text more than once.
    by_head: dict[int, list[Wanted]] = {}
    for example in unit.wanted:
        by_head.setdefault(example.head, []).append(example)
    for number, examples in by_head.items():
        kind, layer, head = heads[number]
        if kind == seen.kind:
            rows.examples += _examples(seen, layer, head, examples, unit, text)


@dataclass(frozen=True, eq=False)
class _SeenText:
    """Hold one kind of attention on one text of a batch: layer -> its call, or dense weights; n tokens."""

    kind: str
    attention: Mapping[int, Attention]
    layers: Sequence[int]
    number: int
    n: int
    _whole: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def rows(self, layer: int, queries: Tensor) -> Tensor:
        """Return rows of some queries, (head, query, key)."""
        if self._step(layer) >= self.n:
            ((_, weights, _),) = self.tiles(layer)
            return weights[:, queries]
        return self._read(layer, queries)[0]

    def tiles(self, layer: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield all rows, tile by tile of queries: (head, query, key), and what they may attend to, (query, key)."""
        step = min(self.n, self._step(layer))
        for first in range(0, self.n, step):
            queries = torch.arange(first, min(self.n, first + step))
            weights, allowed = self._whole.get(layer) or self._read(layer, queries)
            # A text that is one tile is computed once.
            if step == self.n:
                self._whole[layer] = weights, allowed
            yield slice(first, first + len(queries)), weights, allowed

    def _read(self, layer: int, queries: Tensor) -> tuple[Tensor, Tensor]:
        weights, allowed = read_some(self.attention[layer], self.kind, self.number, queries, self.n)
        return weights.float(), allowed

    def _step(self, layer: int) -> int:
        """Return how many queries are read at once."""
        return max(16, _ELEMENTS // (self.n * count_heads(self.attention[layer])))


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
    """Yield the examples of one head that a text gives: they show the same tokens."""
    focus, key = _focus(seen, layer, head, text)
    positions = window(text.tokens.special, focus, key)
    rows = seen.rows(layer, torch.from_numpy(positions))[head].double().numpy()
    sparse = keep_rows(rows[:, positions], rows.sum(1), KEPT_MASS, MOST_KEYS)
    excerpt, offsets = excerpt_of(text.tokens, positions)
    for example in examples:
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


def _focus(seen: _SeenText, layer: int, head: int, text: ReadText) -> tuple[int, int]:
    """Return the query that counts most, by the mass it gives away times its nats from uniform, and its largest key."""
    counts, keys = np.zeros(len(text)), np.zeros(len(text), np.int64)
    outside = torch.from_numpy(text.outside_sinks)
    for queries, weights, allowed in seen.tiles(layer):
        rows = weights[head].double()
        away = rows * outside
        nats = allowed.sum(-1).clamp(min=1).double().log() - torch.special.entr(rows).sum(-1)
        counts[queries] = (away.sum(-1) * nats.clamp(min=0)).numpy()
        keys[queries] = away.argmax(-1).numpy()
    focus = int(np.where(text.asks, counts, -1.0).argmax())
    return focus, int(keys[focus])


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
