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

    # Sample texts up to the budget of tokens. One that is too long for what is left is passed over.
    left = min(MOST_TOKENS, max(FEWEST_TOKENS, n_tokens // SHARE))
    fitting = []
    for number in scores.sample:
        if scores.texts[number].n_tokens <= left:
            fitting.append(number)
            left -= scores.texts[number].n_tokens
    # Two are needed to tell how sure anything is, however long they are.
    for number in fitting if len(fitting) > 1 else scores.sample[:2]:
        unit(number).sampled = True
    # The best texts of each head, and one per decile; -1 = none.
    for why, by_head in (("top", scores.best()), ("decile", scores.deciles()[1])):
        for head, rank in np.argwhere(by_head >= 0).tolist():
            number = int(by_head[head, rank])
            unit(number).wanted.append(Wanted(head, why, rank, float(scores.values[number, head])))
    return list(units.values())


def read_rows(model: Model, heads: Sequence[Place], units: Sequence[Unit], report: Report | None = None) -> Rows:
    """Run the model on texts again, and read the rows that an atlas shows; an interruption returns those so far."""
    # Count the heads of each layer, and prepare the tables by the texts of the sample.
    start = decoder_start(model)
    by_kind: dict[str, dict[int, int]] = {}
    for kind, layer, _ in heads:
        n_heads = by_kind.setdefault(kind, {})
        n_heads[layer] = n_heads.get(layer, 0) + 1
    sampled = [unit.chunk for unit in units if unit.sampled]
    others = [unit.chunk for unit in units if not unit.sampled]
    rows = Rows({})
    for kind, n_heads in by_kind.items():
        rows.tables[kind] = KindTables(n_heads, [_read_by(kind, chunk, start) for chunk in sampled])

    def run(batch: Sequence[Chunk]) -> Mapping[Any, Mapping[int, Any]]:
        """Return what each kind of attention was on a batch: kind -> layer -> its call, or dense weights."""
        tokens = [chunk.tokens for chunk in batch]
        targets = [] if start is None else [target_of(start, source) for source in tokens]
        return see(model, batch_of(tokens, targets))

    # Read sampled texts first, as far as an interruption allows: the tables need them.
    unit_of = {(unit.chunk.text, unit.chunk.number): unit for unit in units}
    n_all = sum(map(len, [*sampled, *others]))
    n_done = 0
    room = Room()
    try:
        for batch in [*batches(sampled, TOKEN_BUDGET), *batches(others, TOKEN_BUDGET)]:
            for some, attention in room.each(batch, run):
                for number, chunk in enumerate(some):
                    unit = unit_of[chunk.text, chunk.number]
                    with delay_interrupts():
                        for kind in by_kind:
                            seen = _SeenText(kind, attention[kind], number, len(chunk))
                            _read_text(rows, seen, heads, unit, _read_by(kind, chunk, start))
                        rows.n_sampled += unit.sampled
                    n_done += len(chunk)
                if report is not None:
                    report(Progress(len(rows.examples), n_done, n_done / n_all, "reading examples"))
    except KeyboardInterrupt:
        rows.complete = False
    return rows


def _read_by(kind: str, chunk: Chunk, start: Tokens | None) -> ReadText:
    """Return what the heads of a kind read in a chunk; in cross-attention written tokens ask, and source tokens get."""
    source = chunk.tokens
    asks = ~chunk.repeated
    if kind == "decoder" and start is not None:
        source = target_of(start, source)
        asks = np.append(False, asks[:-1])
    return ReadText(source, asks)


def _read_text(rows: Rows, seen: _SeenText, heads: Sequence[Place], unit: Unit, text: ReadText) -> None:
    """Add what a text shows to the tables and examples."""
    # Tables take all rows; distances take a few queries at even steps.
    if unit.sampled:
        tables = rows.tables[seen.kind]
        tables.add(text, seen.tiles)
        some = np.unique(np.linspace(0, len(text) - 1, min(len(text), DISTANCE_QUERIES)).astype(np.int64))
        queries = torch.from_numpy(some[text.asks[some]])
        if len(queries):
            tables.compare(torch.cat([seen.rows(layer, queries)[0] for layer in tables.n_heads]))
    # The heads of one layer share the search for what to look at first.
    looked_at: dict[int, tuple[NDArray[np.int64], NDArray[np.int64]]] = {}
    for wanted in unit.wanted:
        kind, layer, head = heads[wanted.head]
        if kind != seen.kind:
            continue
        if layer not in looked_at:
            looked_at[layer] = _focus(seen, layer, text)
        focus, key = looked_at[layer]
        rows.examples.append(_read_example(wanted, seen, layer, head, unit, text, int(focus[head]), int(key[head])))


@dataclass(frozen=True, eq=False)
class _SeenText:
    """Hold one kind of attention on one text of a batch: layer -> its call, or dense weights; n tokens."""

    kind: str
    attention: Mapping[int, Attention]
    number: int
    n: int
    _whole: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def rows(self, layer: int, queries: Tensor) -> tuple[Tensor, Tensor]:
        """Return rows of some queries, (head, query, key), and what they may attend to, (query, key)."""
        # A text that is one tile is computed once.
        if layer not in self._whole and self._step(layer) >= self.n:
            self._whole[layer] = self._read(layer, torch.arange(self.n))
        if layer in self._whole:
            weights, allowed = self._whole[layer]
            return weights[:, queries], allowed[queries]
        return self._read(layer, queries)

    def tiles(self, layer: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield all rows, tile by tile of queries: these, and `rows` of them."""
        step = self._step(layer)
        for first in range(0, self.n, step):
            queries = slice(first, min(self.n, first + step))
            yield queries, *self.rows(layer, torch.arange(queries.start, queries.stop))

    def _read(self, layer: int, queries: Tensor) -> tuple[Tensor, Tensor]:
        weights, allowed = read_some(self.attention[layer], self.kind, self.number, queries, self.n)
        return weights.float(), allowed

    def _step(self, layer: int) -> int:
        """Return how many queries are read at once."""
        return max(16, _ELEMENTS // (self.n * count_heads(self.attention[layer])))


# Examples


def _focus(seen: _SeenText, layer: int, text: ReadText) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the query that counts most for each head of a layer, and its largest key, (head,) each.

    A query counts by the mass that it gives away outside sinks, times its nats from uniform.
    """
    outside = torch.from_numpy(text.outside_sinks)
    counts = []
    keys = []
    for _, weights, allowed in seen.tiles(layer):
        rows = weights.double()
        away = rows * outside
        nats = allowed.sum(-1).clamp(min=1).double().log() - torch.special.entr(rows).sum(-1)
        counts.append(away.sum(-1) * nats.clamp(min=0))
        keys.append(away.argmax(-1))
    focus = np.where(text.asks, torch.cat(counts, 1).numpy(), -1.0).argmax(1)
    return focus, np.take_along_axis(torch.cat(keys, 1).numpy(), focus[:, None], 1)[:, 0]


def _read_example(
    wanted: Wanted, seen: _SeenText, layer: int, head: int, unit: Unit, text: ReadText, focus: int, key: int
) -> Example:
    tokens = text.tokens
    places = window(tokens.special, focus, key)
    rows = seen.rows(layer, torch.from_numpy(places))[0][head].double().numpy()
    sparse = keep_rows(rows[:, places], rows.sum(1), KEPT_MASS, MOST_KEYS)
    excerpt, offsets = excerpt_of(tokens, places)
    return Example(
        wanted=wanted,
        text=unit.text.index,
        source=f"{unit.text.source}:{unit.text.line}",
        n_tokens=len(text),
        places=places,
        labels=tuple(tokens.labels[place] for place in places),
        special=tokens.special[places],
        focus=int(np.searchsorted(places, focus)),
        excerpt=excerpt,
        offsets=offsets,
        **sparse._asdict(),
    )


def window(special: NDArray[np.bool_], focus: int, key: int) -> NDArray[np.int64]:
    """Return which tokens of a text are shown, rising: all, or `WINDOW` tokens around what counts.

    The window has the first token, the special tokens at either end, and the key that the focus attends to most.

    Args:
        special: Which tokens are special, (token,).
        focus: The query that counts most.
        key: Its largest key.
    """
    places = np.arange(len(special))
    named = np.flatnonzero(special)
    is_shown = np.abs(places - key) <= _AROUND_KEY
    is_shown[[0, focus, *named[:_PINS], *named[-_PINS:]]] = True
    # What is nearest to the focus, until there is no more room; of two the earlier one.
    nearest = np.argsort(np.abs(places - focus), kind="stable")
    n_left = max(0, WINDOW - int(is_shown.sum()))
    is_shown[nearest[~is_shown[nearest]][:n_left]] = True
    return np.flatnonzero(is_shown)


def excerpt_of(tokens: Tokens, places: NDArray[np.int64]) -> tuple[str, tuple[tuple[int, int], ...]]:
    """Return the source's own characters of some tokens, rising, and where in them each token stands.

    Tokens that are left out are `LEFT_OUT`. Both are empty if the tokenizer has no offsets.
    """
    written = ""
    offsets: list[tuple[int, int]] = []
    end = -1  # in the source, of what is written; -1: tokens were left out since
    before = int(places[0]) - 1
    for place in places.tolist():
        start, stop = tokens.offsets[place].tolist()
        if place != before + 1:
            written += LEFT_OUT
            end = -1
        before = place
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
    if all(start == stop for start, stop in offsets):
        return "", ()
    return written, tuple(offsets)
