"""Read the attention of sampled texts and of examples: the second pass of an atlas.

An atlas shows every head of a model on a corpus: its profile, and texts that show best what it does. Its first pass
scored each text for each head (`scores`, which also draws the sample). Here the chosen texts are read again. `tables`
adds up those of the sample, and `study` makes the result.
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

from attnscope.core.attention.row_samples import read_rows as attention_rows
from attnscope.core.lifts import keep_rows
from attnscope.corpus import TOKEN_BUDGET, Chunk, CorpusText, batches, chunks
from attnscope.corpus.batching import tokens_of
from attnscope.host import delay_interrupts
from attnscope.models.model import Model
from attnscope.questions.atlas import KEPT_MASS, MAX_KEYS, OMISSION_MARK
from attnscope.results.tokens import Tokens
from attnscope.studies.atlas.scores import Scores
from attnscope.studies.atlas.tables import KindTables, ReadText
from attnscope.studies.heads.measuring import encode_decoder_start, shift_right
from attnscope.studies.inputs.texts import Progress, ReportProgress, batch_of, special_ids
from attnscope.studies.run import BatchHalver
from attnscope.studies.seen import KeptAttention, count_heads, keep_attention

Head = tuple[str, int, int]
"""A head: kind of attention, layer, number."""

ONE_TOKEN_IN = 8
"""The sample is an eighth of the corpus, within the next two bounds: so an atlas takes little longer than `heads`."""

MIN_TOKENS = 4096
"""The least size of the sample, in tokens."""

MAX_TOKENS = 32_768
"""The largest size of the sample, in tokens."""

DISTANCE_QUERIES = 16
"""Queries of a text on which heads are compared, at even distances."""

WINDOW = 64
"""Tokens of an example that are shown at most."""

_PINS = 4
"""How many special tokens at either end of a text are shown with any part of it."""

_AROUND_KEY = 2
"""Tokens on either side of the key with the largest weight that are shown with it."""

_ELEMENTS = 2**20
"""Weights of a layer that are computed at once."""


@dataclass(frozen=True)
class WantedExample:
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
        text: The index of its text in the corpus.
        source: Where the text comes from, such as alice.txt:12.
        n_tokens: How many tokens the text has, or the chunk of a long one.
        places: The places of the shown tokens in their text, (token,), rising.
        labels: Their labels.
        special: Whether each is a special token, (token,).
        focus: Which of the shown tokens to look at first.
        excerpt: The source's own characters, see `excerpt_of`.
        offsets: The first and the last + 1 character of each token in the excerpt, (token, 2).
        starts: Where each token's kept keys begin in `keys` and `codes`, and where the last one's end, (token + 1,).
        keys: The kept keys, as indices of shown tokens; largest weight first.
        codes: Their weights x 255, rounded.
    """

    wanted: WantedExample
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
class RereadText:
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
    wanted: Sequence[WantedExample]


@dataclass(eq=False)
class SecondPass:
    """Hold the results of the second pass, as far as it got.

    Attributes:
        tables: Kind of attention -> what is added up of the sample.
        examples: The examples that were read, in no order.
        n_sampled: How many texts of the sample are in the tables.
        complete: Whether all texts were read.
    """

    tables: dict[str, KindTables] = field(default_factory=dict)
    examples: list[Example] = field(default_factory=list)
    n_sampled: int = 0
    complete: bool = True


def units_of(model: Model, scores: Scores, n_tokens: int, **cut: int | None) -> list[RereadText]:
    """Return the texts that are read again: those of the sample in its random order, then those of examples.

    Args:
        model: The model.
        scores: How well each text, or chunk of a long one, shows what each head does.
        n_tokens: Tokens of the whole corpus.
        cut: `chunk` and `stride` of `corpus.chunks`, which cuts long texts.
    """
    # Sample texts up to a number of tokens. One that is too long for the room left is passed over.
    n_left = min(MAX_TOKENS, max(MIN_TOKENS, n_tokens // ONE_TOKEN_IN))
    sampled = []
    for index in scores.sample:
        if scores.texts[index].n_tokens <= n_left:
            sampled.append(index)
            n_left -= scores.texts[index].n_tokens
    # Two are needed to tell how sure anything is, however long they are.
    if len(sampled) < 2:
        sampled = list(scores.sample[:2])
    # Index of a scored text -> the examples that it gives: the best texts of each head, and one of each decile.
    wanted: dict[int, list[WantedExample]] = defaultdict(list)
    _, text_of_decile = scores.deciles()
    for why, indices in (("top", scores.best()), ("decile", text_of_decile)):
        # (head, rank); -1 = there is no such text.
        for head, rank in np.argwhere(indices >= 0).tolist():
            index = int(indices[head, rank])
            score = float(scores.values[index, head])
            wanted[index].append(WantedExample(head, why, rank, score))
    # Cut these texts again, as they were cut when they were scored.
    special = special_ids(model)
    units = []
    for index in dict.fromkeys([*sampled, *wanted]):
        scored = scores.texts[index]
        tokens = tokens_of(scored.text, model.tokenizer.encode, special)
        parts = chunks(
            tokens,
            scored.index,
            limit=model.info.max_tokens,
            **cut,
        )
        # A scored text knows which chunk of its text it is.
        units.append(
            RereadText(
                scored.text,
                parts[scored.number],
                index in sampled,
                wanted[index],
            )
        )
    return units


def read_rows(
    second_pass: SecondPass,
    model: Model,
    heads: Sequence[Head],
    units: Sequence[RereadText],
    report: ReportProgress | None = None,
) -> None:
    """Run the model on texts again, and add what an atlas shows of them to the results, text by text.

    Args:
        second_pass: The results; an interruption leaves those so far.
        model: The model.
        heads: All heads, in the order of the table of heads.
        units: The texts.
        report: Called after each batch.
    """
    # Prepare the tables by the texts of the sample.
    start = encode_decoder_start(model)
    unit_of = {unit.chunk: unit for unit in units}
    sampled = [chunk for chunk, unit in unit_of.items() if unit.is_sampled]
    others = [chunk for chunk, unit in unit_of.items() if not unit.is_sampled]
    for kind in dict.fromkeys(kind for kind, _, _ in heads):
        # Layer -> how many heads it has.
        n_heads = Counter(layer for of_kind, layer, _ in heads if of_kind == kind)
        second_pass.tables[kind] = KindTables(
            n_heads, [_text_of_kind(kind, chunk, start) for chunk in sampled]
        )

    def run(batch: Sequence[Chunk]) -> Any:
        """Return the attention on a batch, by kind and layer."""
        tokens = [chunk.tokens for chunk in batch]
        targets = [] if start is None else [shift_right(start, source) for source in tokens]
        return keep_attention(model, batch_of(tokens, targets))

    # Read sampled texts first, as far as an interruption allows: the tables need them. A batch that does not
    # fit into memory comes in parts, each with its attention.
    n_tokens = sum(map(len, unit_of))
    n_tokens_done = 0
    halver = BatchHalver()
    for batch in [*batches(sampled, TOKEN_BUDGET), *batches(others, TOKEN_BUDGET)]:
        for part, attention in halver.run(batch, run):
            for place, chunk in enumerate(part):
                # An interruption waits until a text is in all tables.
                with delay_interrupts():
                    _add_text(second_pass, heads, unit_of[chunk], attention, place, start)
                n_tokens_done += len(chunk)
            if report is not None:
                n_examples = len(second_pass.examples)
                report(Progress(n_examples, n_tokens_done, n_tokens_done / n_tokens, "reading examples"))


def _add_text(
    second_pass: SecondPass,
    heads: Sequence[Head],
    unit: RereadText,
    attention: Any,
    place: int,
    start: Tokens | None,
) -> None:
    """Add a text to the tables, if it is in the sample, and its examples.

    Args:
        second_pass: The results.
        heads: All heads.
        unit: The text.
        attention: The attention on a batch, by kind and layer.
        place: The place of the text in the batch.
        start: What a decoder beside an encoder starts with.
    """
    for kind, tables in second_pass.tables.items():
        text = _text_of_kind(kind, unit.chunk, start)
        layers = {}
        for layer, of_layer in attention[kind].items():
            layers[layer] = _SeenLayer(kind, of_layer, place, text)
        if unit.is_sampled:
            # `n_heads` names the layers that have heads.
            _add_to_tables(tables, text, [layers[layer] for layer in tables.n_heads])
        # Examples of heads of this kind.
        for wanted in unit.wanted:
            of_kind, layer, head = heads[wanted.head]
            if of_kind == kind:
                second_pass.examples.append(_example_of(wanted, unit, layers[layer], head))
    second_pass.n_sampled += unit.is_sampled


def _text_of_kind(kind: str, chunk: Chunk, start: Tokens | None) -> ReadText:
    """Return the tokens that the heads of a kind attend among in a chunk, and which of them count as queries.

    In cross-attention, the tokens that the decoder writes are queries, and those of the source are keys: the same text.
    """
    # Tokens that the chunk repeats from the one before do not count twice. A decoder beside an encoder reads the text
    # behind its start token, which does not count.
    tokens = chunk.tokens
    asks = ~chunk.repeated
    if kind == "decoder" and start is not None:
        tokens = shift_right(start, tokens)
        asks = np.append(False, asks[:-1])
    return ReadText(tokens, asks)


@dataclass(frozen=True, eq=False)
class _SeenLayer:
    """Hold the attention of a layer on one text of a batch.

    Attributes:
        kind: The kind of attention.
        attention: The layer on the whole batch: its call, or dense weights.
        place: The place of the text in the batch.
        text: The tokens that the heads attend among.
    """

    kind: str
    attention: KeptAttention
    place: int
    text: ReadText

    def rows(self, queries: Tensor) -> tuple[Tensor, Tensor]:
        """Return rows of some queries, (head, query, key), and what they may attend to, (query, key)."""
        # All rows of a text that is one tile are computed once.
        if self._tile_size < len(self.text):
            return self._compute(queries)
        weights, allowed = self._whole
        return weights[:, queries], allowed[queries]

    def tiles(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield all rows, tile by tile: the queries of a tile, their rows, and what they may attend to."""
        for queries in torch.arange(len(self.text)).split(self._tile_size):  # type: ignore[no-untyped-call]
            yield slice(int(queries[0]), int(queries[-1]) + 1), *self.rows(queries)

    def _compute(self, queries: Tensor) -> tuple[Tensor, Tensor]:
        n_keys = len(self.text)
        weights, allowed = attention_rows(self.attention, self.kind, self.place, queries, n_keys)
        return weights.float(), allowed

    @cached_property
    def _whole(self) -> tuple[Tensor, Tensor]:
        return self._compute(torch.arange(len(self.text)))

    @property
    def _tile_size(self) -> int:
        """Return how many queries are computed at once."""
        return max(16, _ELEMENTS // (len(self.text) * count_heads(self.attention)))

    @cached_property
    def focus(self) -> NDArray[np.int64]:
        """Return the query that shows most of each head, and the key with its largest weight, (2, head).

        That is the query with the largest product of its weight on keys outside sinks and its nats from uniform
        attention: the logarithm of the number of allowed keys, less the entropy of its row.
        """
        # These products and the largest keys of all queries, (head, query), tile by tile.
        is_outside = torch.from_numpy(self.text.outside_sinks)
        tiles_of_products = []
        tiles_of_keys = []
        for _, weights, allowed in self.tiles():
            rows = weights.double()
            outside_sinks = rows * is_outside
            nats = allowed.sum(-1).clamp(min=1).double().log() - torch.special.entr(rows).sum(-1)
            tiles_of_products.append(outside_sinks.sum(-1) * nats.clamp(min=0))
            tiles_of_keys.append(outside_sinks.argmax(-1))
        products = torch.cat(tiles_of_products, 1).numpy()
        keys = torch.cat(tiles_of_keys, 1).numpy()
        queries = np.where(self.text.is_counted, products, -1.0).argmax(1)
        return np.stack([queries, keys[np.arange(len(queries)), queries]])


def _add_to_tables(tables: KindTables, text: ReadText, layers: Sequence[_SeenLayer]) -> None:
    """Add the attention of all layers of a kind on a text to its tables."""
    tables.add(text, [layer.tiles() for layer in layers])
    # Heads are compared on a few queries at even steps.
    n_queries = min(len(text), DISTANCE_QUERIES)
    places = np.unique(np.linspace(0, len(text) - 1, n_queries).astype(np.int64))
    queries = torch.from_numpy(places[text.is_counted[places]])
    if len(queries):
        tables.compare(torch.cat([layer.rows(queries)[0] for layer in layers]))


def _example_of(wanted: WantedExample, unit: RereadText, layer: _SeenLayer, head: int) -> Example:
    """Return an example of a head of a layer: the tokens that are shown, and the weights between them."""
    tokens = layer.text.tokens
    # The query that shows most, its largest key, and the tokens around both.
    focus, key = layer.focus[:, head].tolist()
    places = window(tokens.special, focus, key)
    excerpt, offsets = excerpt_of(tokens, places)
    # The rows of the shown tokens, (shown token, key).
    by_head, _ = layer.rows(torch.from_numpy(places))
    weights = by_head[head].double().numpy()
    kept = keep_rows(weights[:, places], weights.sum(1), KEPT_MASS, MAX_KEYS)
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
        starts=kept.starts,
        keys=kept.keys,
        codes=kept.codes,
    )


def window(special: NDArray[np.bool_], focus: int, key: int) -> NDArray[np.int64]:
    """Return the places of the tokens that are shown, rising: all of a short text, else `WINDOW` of them.

    These are the first token, special tokens at either end, the key with its neighbours, and the tokens nearest to the
    focus.

    Args:
        special: Which tokens are special, (token,).
        focus: The query to look at first.
        key: The key with its largest weight.
    """
    # Of two tokens equally near, the earlier one is shown. A distance of -1 makes sure that a token is shown.
    places = np.arange(len(special))
    special_places = np.flatnonzero(special)
    distances = np.abs(places - focus)
    distances[np.abs(places - key) <= _AROUND_KEY] = -1
    distances[[0, *special_places[:_PINS], *special_places[-_PINS:]]] = -1
    return np.sort(np.argsort(distances, kind="stable")[:WINDOW])


def excerpt_of(tokens: Tokens, places: NDArray[np.int64]) -> tuple[str, NDArray[np.int64]]:
    """Return the source's own characters of some tokens, and where each token begins and ends in them, (token, 2).

    Between stretches of tokens stands `OMISSION_MARK`. The excerpt is empty if the tokenizer has no offsets.

    Args:
        tokens: The tokens of the text.
        places: Those of the excerpt, rising.
    """
    excerpt = ""
    offsets = np.zeros((len(places), 2), np.int64)
    # Stretches of tokens that follow each other, as ranges of `places`.
    edges = [0, *np.flatnonzero(np.diff(places) > 1) + 1, len(places)]
    for first, last in pairwise(edges):
        if first:
            excerpt += OMISSION_MARK
        starts, stops = tokens.offsets[places[first:last]].T
        has_characters = (starts >= 0) & (stops > starts)
        # A token without characters gets an empty span, where the last one with characters ends.
        begin = starts[has_characters.argmax()] if has_characters.any() else 0
        ends = np.maximum.accumulate(np.where(has_characters, stops, begin))
        starts = np.where(has_characters, starts, ends)
        offsets[first:last] = np.stack([starts, ends], 1) - begin + len(excerpt)
        excerpt += tokens.text[begin : ends[-1]]
    if (offsets[:, 0] == offsets[:, 1]).all():
        return "", np.zeros_like(offsets)
    return excerpt, offsets
