"""Read the attention of sampled texts and of examples: the second pass of an atlas.

`scores` says which texts, `tables` adds up those of the sample, and `study` makes the result.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from attnscope.core.attention.row_samples import read_rows as read_some
from attnscope.core.lifts import keep_rows
from attnscope.corpus import TOKEN_BUDGET, Chunk, CorpusText, batches, chunks
from attnscope.corpus.batching import tokens_of
from attnscope.host import delay_interrupts
from attnscope.models.model import Model
from attnscope.questions.atlas import KEPT_MASS, LEFT_OUT, MOST_KEYS
from attnscope.results.tokens import Tokens
from attnscope.studies.atlas.scores import Scores
from attnscope.studies.atlas.tables import KindTables, ReadText
from attnscope.studies.heads.measuring import decoder_start, target_of
from attnscope.studies.inputs.texts import Progress, Report, batch_of, special_ids
from attnscope.studies.run import Room
from attnscope.studies.seen import Attention, count_heads, see

Head = tuple[str, int, int]
"""A head: kind of attention, layer, number."""

FEWEST_TOKENS, MOST_TOKENS, SHARE = 4096, 32_768, 8
"""How many tokens of the sample are read for profiles, tables and distances: one of `SHARE` of the corpus, within these
bounds. So an atlas of a small corpus takes little longer than a study of its heads."""

DISTANCE_QUERIES = 16
"""Queries of a text on which heads are compared, at even distances."""

WINDOW = 64
"""Tokens of an example that are shown at most."""

_PINS = 4
"""Special tokens at either end of a text that are shown with any part of it."""

_AROUND_KEY = 2
"""Tokens on either side of the key with the largest weight that are shown with it."""

_ELEMENTS = 2**20
"""Weights of a layer that are computed at once."""


@dataclass(frozen=True)
class Wanted:
    """Say which head an example shows, and why; the fields are columns of the table `examples`.

    Attributes:
        head: The row of the head in the table of heads.
        why: "top", one of its best texts, or "decile", a text from a decile of all.
        rank: Its place among the best, or its decile, from 0.
        score: The score of the text.
    """

    head: int
    why: str
    rank: int
    score: float


@dataclass(frozen=True, eq=False)
class Example:
    """Hold an example that was read: some tokens of a text, with the largest weights of their rows.

    Attributes:
        wanted: Which head it shows, and why.
        text: The text's number in the corpus.
        source: Where the text comes from, such as alice.txt:12.
        n_tokens: How many tokens the text has, or the chunk of a long one.
        places: The places of the shown tokens in their text, (token,), rising.
        labels: Their labels.
        special: Whether each is a special token, (token,).
        focus: Which of the shown tokens to look at first.
        excerpt: The source's own characters, see `excerpt_of`.
        offsets: The first and the last + 1 character of each token in the excerpt, (token, 2).
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
    offsets: ArrayLike
    starts: NDArray[np.int64]
    keys: NDArray[np.uint8]
    codes: NDArray[np.uint8]

    @property
    def n_kept(self) -> NDArray[np.int64]:
        """Return how many keys are kept of each token, (token,)."""
        return np.diff(self.starts)


@dataclass(frozen=True, eq=False)
class Unit:
    """Hold a text, or a chunk of a long one, that is read again.

    Attributes:
        text: The text.
        chunk: The text, or its chunk, in tokens.
        is_sampled: Whether it is in the sample.
        wanted: The examples that it gives.
    """

    text: CorpusText
    chunk: Chunk
    is_sampled: bool
    wanted: Sequence[Wanted]


@dataclass(eq=False)
class Rows:
    """Hold the results of the second pass, as far as it got.

    Attributes:
        tables: By kind of attention.
        examples: In no order.
        n_sampled: How many texts of the sample are in the tables.
        complete: Whether all texts were read.
    """

    tables: dict[str, KindTables] = field(default_factory=dict)
    examples: list[Example] = field(default_factory=list)
    n_sampled: int = 0
    complete: bool = True


def units_of(model: Model, scores: Scores, n_tokens: int, **cut: int | None) -> list[Unit]:
    """Return the texts that are read again, those of the sample first, in the order of their hashes.

    Args:
        model: The model.
        scores: The texts that show what heads do.
        n_tokens: Tokens of the whole corpus.
        cut: How long texts are cut, as in `corpus.chunks`.
    """
    # Sample texts up to a number of tokens. One that is too long for what is left is passed over.
    left = min(MOST_TOKENS, max(FEWEST_TOKENS, n_tokens // SHARE))
    sampled = []
    for number in scores.sample:
        if scores.texts[number].n_tokens <= left:
            sampled.append(number)
            left -= scores.texts[number].n_tokens
    # Two are needed to tell how sure anything is, however long they are.
    if len(sampled) < 2:
        sampled = list(scores.sample[:2])
    # By number of the text: the best texts of each head, and one per decile. There -1 = no text.
    wanted: dict[int, list[Wanted]] = defaultdict(list)
    for why, numbers in (("top", scores.best()), ("decile", scores.deciles()[1])):
        for head, rank in np.argwhere(numbers >= 0).tolist():
            number = int(numbers[head, rank])
            score = float(scores.values[number, head])
            wanted[number].append(Wanted(head, why, rank, score))
    # Cut these texts again, as they were cut when they were scored.
    special = special_ids(model)
    units = []
    for number in dict.fromkeys([*sampled, *wanted]):
        scored = scores.texts[number]
        tokens = tokens_of(scored.text, model.tokenizer.encode, special)
        parts = chunks(
            tokens,
            scored.index,
            limit=model.info.max_tokens,
            **cut,
        )
        units.append(
            Unit(
                scored.text,
                parts[scored.number],
                number in sampled,
                wanted[number],
            )
        )
    return units


def read_rows(
    rows: Rows, model: Model, heads: Sequence[Head], units: Sequence[Unit], report: Report | None = None
) -> None:
    """Run the model on texts again, and add to `rows` what an atlas shows of them, text by text.

    Args:
        rows: The results; an interruption leaves those so far.
        model: The model.
        heads: All heads, in the order of the table of heads.
        units: The texts.
        report: Called after each batch.
    """
    # Prepare the tables by the texts of the sample.
    start = decoder_start(model)
    unit_of = {unit.chunk: unit for unit in units}
    sampled = [chunk for chunk, unit in unit_of.items() if unit.is_sampled]
    others = [chunk for chunk, unit in unit_of.items() if not unit.is_sampled]
    for kind in dict.fromkeys(kind for kind, _, _ in heads):
        n_heads = Counter(layer for of_kind, layer, _ in heads if of_kind == kind)
        rows.tables[kind] = KindTables(
            n_heads,
            [
                _read_by(
                    kind,
                    chunk,
                    start,
                )
                for chunk in sampled
            ],
        )

    def run(batch: Sequence[Chunk]) -> Any:
        """Return each kind of attention on a batch, by layer."""
        tokens = [chunk.tokens for chunk in batch]
        targets = [] if start is None else [target_of(start, source) for source in tokens]
        return see(model, batch_of(tokens, targets))

    # Read sampled texts first, as far as an interruption allows: the tables need them.
    n_all = sum(map(len, unit_of))
    n_done = 0
    room = Room()
    for batch in [*batches(sampled, TOKEN_BUDGET), *batches(others, TOKEN_BUDGET)]:
        for some, attention in room.each(batch, run):
            for number, chunk in enumerate(some):
                # An interruption waits until a text is in all tables.
                with delay_interrupts():
                    _add_text(rows, heads, unit_of[chunk], attention, number, start)
                n_done += len(chunk)
            if report is not None:
                report(Progress(len(rows.examples), n_done, n_done / n_all, "reading examples"))


def _add_text(
    rows: Rows,
    heads: Sequence[Head],
    unit: Unit,
    attention: Any,
    number: int,
    start: Tokens | None,
) -> None:
    """Add a text to the tables, if it is in the sample, and its examples.

    Args:
        rows: The results.
        heads: All heads.
        unit: The text.
        attention: The attention on a batch, by kind and layer.
        number: The place of the text in the batch.
        start: What a decoder beside an encoder starts with.
    """
    for kind, tables in rows.tables.items():
        text = _read_by(kind, unit.chunk, start)
        layers = {}
        for layer, of_layer in attention[kind].items():
            layers[layer] = _SeenLayer(kind, of_layer, number, text)
        if unit.is_sampled:
            _add_to_tables(tables, text, [layers[layer] for layer in tables.n_heads])
        # Examples of heads of this kind.
        for wanted in unit.wanted:
            of_kind, layer, head = heads[wanted.head]
            if of_kind == kind:
                rows.examples.append(_example_of(wanted, unit, layers[layer], head))
    rows.n_sampled += unit.is_sampled


def _read_by(kind: str, chunk: Chunk, start: Tokens | None) -> ReadText:
    """Return what the heads of a kind read in a chunk; in cross-attention written tokens ask, and source tokens get."""
    # A decoder beside an encoder reads the text behind its start token, which asks nothing that counts.
    tokens = chunk.tokens
    asks = ~chunk.repeated
    if kind == "decoder" and start is not None:
        tokens = target_of(start, tokens)
        asks = np.append(False, asks[:-1])
    return ReadText(tokens, asks)


@dataclass(frozen=True, eq=False)
class _SeenLayer:
    """Hold the attention of a layer on one text of a batch.

    Attributes:
        kind: The kind of attention.
        attention: The layer on the whole batch: its call, or dense weights.
        number: Which text of the batch it is.
        text: What the heads read in it.
    """

    kind: str
    attention: Attention
    number: int
    text: ReadText

    def rows(self, queries: Tensor) -> tuple[Tensor, Tensor]:
        """Return rows of some queries, (head, query, key), and what they may attend to, (query, key)."""
        # A text that is one tile is computed once.
        if self._tile < len(self.text):
            return self._compute(queries)
        weights, allowed = self._whole
        return weights[:, queries], allowed[queries]

    def tiles(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield all rows, tile by tile: the queries of a tile, their rows, and what they may attend to."""
        for queries in torch.arange(len(self.text)).split(self._tile):  # type: ignore[no-untyped-call]
            yield slice(int(queries[0]), int(queries[-1]) + 1), *self.rows(queries)

    def _compute(self, queries: Tensor) -> tuple[Tensor, Tensor]:
        n_keys = len(self.text)
        weights, allowed = read_some(
            self.attention,
            self.kind,
            self.number,
            queries,
            n_keys,
        )
        return weights.float(), allowed

    @cached_property
    def _whole(self) -> tuple[Tensor, Tensor]:
        return self._compute(torch.arange(len(self.text)))

    @property
    def _tile(self) -> int:
        """Return how many queries are computed at once."""
        return max(16, _ELEMENTS // (len(self.text) * count_heads(self.attention)))

    @cached_property
    def focus(self) -> NDArray[np.int64]:
        """Return the query that counts most for each head, and its largest key, (2, head).

        A query counts by the mass that it gives away outside sinks, times its nats from uniform.
        """
        # Counts and largest keys of all queries, (head, query), tile by tile.
        outside = torch.from_numpy(self.text.outside_sinks)
        tiles_of_counts = []
        tiles_of_keys = []
        for _, weights, allowed in self.tiles():
            rows = weights.double()
            away = rows * outside
            nats = allowed.sum(-1).clamp(min=1).double().log() - torch.special.entr(rows).sum(-1)
            tiles_of_counts.append(away.sum(-1) * nats.clamp(min=0))
            tiles_of_keys.append(away.argmax(-1))
        counts = torch.cat(tiles_of_counts, 1).numpy()
        keys = torch.cat(tiles_of_keys, 1).numpy()
        queries = np.where(self.text.asks, counts, -1.0).argmax(1)
        return np.stack([queries, keys[np.arange(len(queries)), queries]])


def _add_to_tables(tables: KindTables, text: ReadText, layers: Sequence[_SeenLayer]) -> None:
    """Add the attention of all layers of a kind on a text to its tables."""
    tables.add(text, [layer.tiles() for layer in layers])
    # Heads are compared on a few queries at even steps.
    n_queries = min(len(text), DISTANCE_QUERIES)
    places = np.unique(np.linspace(0, len(text) - 1, n_queries).astype(np.int64))
    queries = torch.from_numpy(places[text.asks[places]])
    if len(queries):
        tables.compare(torch.cat([layer.rows(queries)[0] for layer in layers]))


def _example_of(wanted: Wanted, unit: Unit, layer: _SeenLayer, head: int) -> Example:
    """Return an example of a head of a layer: the tokens that are shown, and the weights between them."""
    tokens = layer.text.tokens
    # The query that counts most, its largest key, and the tokens around both.
    focus, key = layer.focus[:, head].tolist()
    places = window(tokens.special, focus, key)
    excerpt, offsets = excerpt_of(tokens, places)
    # The rows of the shown tokens, (shown token, key).
    by_head, _ = layer.rows(torch.from_numpy(places))
    weights = by_head[head].double().numpy()
    kept = keep_rows(
        weights[:, places],
        weights.sum(1),
        KEPT_MASS,
        MOST_KEYS,
    )
    return Example(
        wanted=wanted,
        text=unit.text.index,
        source=f"{unit.text.source}:{unit.text.line}",
        n_tokens=len(tokens),
        places=places,
        labels=tuple(tokens.labels[place] for place in places),
        special=tokens.special[places],
        focus=int(np.searchsorted(places, focus)),
        excerpt=excerpt,
        offsets=offsets,
        **kept._asdict(),
    )


def window(special: NDArray[np.bool_], focus: int, key: int) -> NDArray[np.int64]:
    """Return which tokens of a text are shown, rising: all, or `WINDOW` tokens around what counts.

    The window has the first token, the special tokens at either end, and the key that the focus attends to most.

    Args:
        special: Which tokens are special, (token,).
        focus: The query that counts most.
        key: Its largest key.
    """
    # The nearest to the focus are shown, of two the earlier one. What must be shown is nearer than any.
    places = np.arange(len(special))
    special_places = np.flatnonzero(special)
    distances = np.abs(places - focus)
    distances[np.abs(places - key) <= _AROUND_KEY] = -1
    distances[[0, *special_places[:_PINS], *special_places[-_PINS:]]] = -1
    return np.sort(np.argsort(distances, kind="stable")[:WINDOW])


def excerpt_of(tokens: Tokens, places: NDArray[np.int64]) -> tuple[str, NDArray[np.int64]]:
    """Return the source's own characters of some tokens, rising, and where in them each token stands, (token, 2).

    Tokens that are left out are `LEFT_OUT`. The excerpt is empty if the tokenizer has no offsets.
    """
    excerpt = ""
    offsets = np.zeros((len(places), 2), np.int64)
    # Stretches of tokens that follow each other, as ranges of `places`.
    edges = [0, *np.flatnonzero(np.diff(places) > 1) + 1, len(places)]
    for first, last in pairwise(edges):
        if first:
            excerpt += LEFT_OUT
        starts, stops = tokens.offsets[places[first:last]].T
        has_characters = (starts >= 0) & (stops > starts)
        # How far the text has come with each token. Bytes of one character share it; the others have no characters.
        begin = starts[has_characters.argmax()] if has_characters.any() else 0
        ends = np.maximum.accumulate(np.where(has_characters, stops, begin))
        starts = np.where(has_characters, starts, ends)
        offsets[first:last] = np.stack([starts, ends], 1) - begin + len(excerpt)
        excerpt += tokens.text[begin : ends[-1]]
    if (offsets[:, 0] == offsets[:, 1]).all():
        return "", np.zeros_like(offsets)
    return excerpt, offsets
