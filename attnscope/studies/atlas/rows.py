"""Run the model again on chosen texts and read its attention: the second pass of an atlas.

An atlas shows each head of a model on a corpus: averages over a sample of texts, and example texts. The first pass, in
`scores`, scored each text for each head, and drew the sample. Here, `choose_texts` picks the texts to read again, and
`run_second_pass` reads them. `tables` sums the attention on the sample, and `study` assembles the result.

A row of attention holds the weights of one query on all keys. A tile is a block of queries, computed at once.
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

from attnscope.core.attention.row_samples import read_text_rows as attention_rows
from attnscope.core.lifts import keep_largest_weights
from attnscope.corpus import TOKEN_BUDGET, Chunk, CorpusText, chunks, make_batches
from attnscope.corpus.batching import tokens_of
from attnscope.host import delay_interrupts
from attnscope.models.model import Model
from attnscope.questions.atlas import KEPT_MASS, MAX_KEYS, OMISSION_MARK
from attnscope.results.tokens import Tokens
from attnscope.studies.atlas.scores import Scores
from attnscope.studies.atlas.tables import KindTables, ReadText
from attnscope.studies.halving import BatchHalver
from attnscope.studies.heads.measuring import encode_decoder_start, shift_right
from attnscope.studies.inputs.texts import Progress, ReportProgress, batch_of, special_ids
from attnscope.studies.kept_attention import KeptAttention, count_heads, keep_attention

Head = tuple[str, int, int]
"""A head: (kind of attention, layer, index of the head in the layer), such as ("decoder", 3, 1)."""

TOKENS_PER_SAMPLED_TOKEN = 8
"""The second pass reads an eighth of the corpus, within the next two bounds. So it adds little to the first pass."""

MIN_SAMPLE_TOKENS = 4096
"""The smallest number of sampled tokens that the second pass reads, if the sample has as many."""

MAX_SAMPLE_TOKENS = 32_768
"""The largest number of sampled tokens that the second pass reads."""

N_DISTANCE_QUERIES = 16
"""The number of queries per text on which heads are compared. They are evenly spaced."""

MAX_SHOWN_TOKENS = 64
"""The largest number of tokens that an example shows."""

_MAX_PINNED_TOKENS = 4
"""An example always shows this many special tokens from the start of its text, and from the end."""

_MAX_KEY_DISTANCE = 2
"""An example always shows the key with the largest weight, and this many tokens on either side of it."""

_MAX_TILE_WEIGHTS = 2**20
"""The largest number of attention weights in a tile, over all heads of a layer. This bounds memory."""


@dataclass(frozen=True)
class WantedExample:
    """Hold which head an example shows, and why. The fields are columns of the table `examples`.

    Attributes:
        head: The row of the head in the table of heads.
        why: "top" if the text is one of the head's best, or "decile" if it is the example of a decile of scores.
        rank: The rank of the text among the best, or the index of its decile, from 0.
        score: The head's score on the text.
    """

    head: int
    why: str
    rank: int
    score: float


@dataclass(frozen=True, eq=False)
class Example:
    """Hold an example: the shown tokens of a text, and for each of them, as a query, the keys with the largest weights.

    Attributes:
        wanted: Which head the example shows, and why.
        text: The index of the text in the corpus.
        source: The file and line of the text, such as alice.txt:12.
        n_tokens: The number of tokens of the text, or of a chunk if the text is long.
        positions: The positions of the shown tokens in their text, (token,), ascending.
        labels: The labels of the shown tokens.
        special: Whether each shown token is special, (token,).
        focus: The index, among the shown tokens, of the query to look at first.
        excerpt: The characters of the shown tokens in the source, see `make_excerpt`.
        offsets: The start and stop of each shown token in the excerpt, (token, 2).
        starts: Token i has the entries starts[i] to starts[i + 1] of `keys` and `codes`, (token + 1,).
        keys: The kept keys of all tokens, as indices of shown tokens; those of a token by descending weight.
        codes: The weights of the kept keys, times 255 and rounded.
    """

    wanted: WantedExample
    text: int
    source: str
    n_tokens: int
    positions: NDArray[np.int64]
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
        """Return the number of kept keys of each token, (token,)."""
        return np.diff(self.starts)


@dataclass(frozen=True, eq=False)
class RereadText:
    """Hold a text, or a chunk of a long text, that is to be read again.

    Attributes:
        text: The text.
        chunk: The tokens of the text, or of its chunk.
        is_sampled: Whether the text is in the sample.
        wanted: The examples that show the text, of any number of heads.
    """

    text: CorpusText
    chunk: Chunk
    is_sampled: bool
    wanted: Sequence[WantedExample]


@dataclass(eq=False)
class SecondPass:
    """Hold the results of the second pass; after an interruption, those of the texts read so far.

    Attributes:
        tables: Kind of attention -> sums over the texts of the sample.
        examples: The examples, unsorted.
        n_sampled: The number of texts of the sample that are in the tables.
        complete: Whether all texts were read.
    """

    tables: dict[str, KindTables] = field(default_factory=dict)
    examples: list[Example] = field(default_factory=list)
    n_sampled: int = 0
    complete: bool = True


def choose_texts(
    model: Model, scores: Scores, n_tokens: int, **chunking: int | None
) -> list[RereadText]:
    """Return the texts to read again: first those of the sample, in its random order, then those of examples.

    Args:
        model: The model.
        scores: The result of the first pass.
        n_tokens: The number of tokens in the whole corpus.
        chunking: The arguments `chunk` and `stride` of `corpus.chunks`, which splits long texts.
    """
    # Take texts of the sample until the limit of tokens is reached. Skip a text that is longer than the tokens left.
    n_left = min(MAX_SAMPLE_TOKENS, max(MIN_SAMPLE_TOKENS, n_tokens // TOKENS_PER_SAMPLED_TOKEN))
    sampled = []
    for index in scores.sample:
        n_text_tokens = scores.texts[index].n_tokens
        if n_text_tokens <= n_left:
            sampled.append(index)
            n_left -= n_text_tokens
    # Intervals need at least two texts, even if these are longer than the limit.
    if len(sampled) < 2:
        sampled = list(scores.sample[:2])
    # Index of a scored text -> the examples that show it. Each head has its best texts, and a text of each decile.
    wanted: dict[int, list[WantedExample]] = defaultdict(list)
    _, text_of_decile = scores.deciles()
    for why, indices in (("top", scores.best()), ("decile", text_of_decile)):
        # `indices` is (head, rank), or (head, decile); -1 = there is no such text.
        for head, rank in np.argwhere(indices >= 0).tolist():
            index = int(indices[head, rank])
            score = float(scores.values[index, head])
            wanted[index].append(WantedExample(head, why, rank, score))
    # Split these texts into the same chunks as in the first pass, and take the chunk that was scored.
    special = special_ids(model)
    rereads = []
    for index in dict.fromkeys([*sampled, *wanted]):
        scored = scores.texts[index]
        tokens = tokens_of(scored.text, model.tokenizer.encode, special)
        text_chunks = chunks(tokens, scored.index, limit=model.info.max_tokens, **chunking)
        rereads.append(
            RereadText(scored.text, text_chunks[scored.number], index in sampled, wanted[index])
        )
    return rereads


def run_second_pass(
    second_pass: SecondPass,
    model: Model,
    heads: Sequence[Head],
    rereads: Sequence[RereadText],
    report: ReportProgress | None = None,
) -> None:
    """Run the model on texts again, and add sums and examples to the results, text by text.

    Args:
        second_pass: The results, which this function fills. After an interruption they hold the texts read so far.
        model: The model.
        heads: All heads, in the order of the table of heads.
        rereads: The texts to read again.
        report: The progress callback, called after each batch.
    """
    # Make empty tables for each kind of attention. Their size depends on the tokens of the sample. `start_tokens` are
    # what the decoder of an encoder-decoder reads before the text; None = the model is no encoder-decoder.
    start_tokens = encode_decoder_start(model)
    reread_by_chunk = {reread.chunk: reread for reread in rereads}
    sampled = [chunk for chunk, reread in reread_by_chunk.items() if reread.is_sampled]
    others = [chunk for chunk, reread in reread_by_chunk.items() if not reread.is_sampled]
    for kind in dict.fromkeys(kind for kind, _, _ in heads):
        # Layer -> the number of its heads.
        n_heads = Counter(layer for head_kind, layer, _ in heads if head_kind == kind)
        second_pass.tables[kind] = KindTables(
            n_heads, [_tokens_of_kind(kind, chunk, start_tokens) for chunk in sampled]
        )

    def read_attention(batch: Sequence[Chunk]) -> Any:
        """Return the attention on a batch, by kind and layer."""
        tokens = [chunk.tokens for chunk in batch]
        targets = (
            [] if start_tokens is None else [shift_right(start_tokens, source) for source in tokens]
        )
        return keep_attention(model, batch_of(tokens, targets))

    # Read the texts of the sample first, so that an interruption loses examples rather than tables. `BatchHalver`
    # splits a batch that does not fit into memory, and yields each part with its attention.
    n_tokens = sum(map(len, reread_by_chunk))
    n_tokens_done = 0
    batch_halver = BatchHalver()
    for batch in [*make_batches(sampled, TOKEN_BUDGET), *make_batches(others, TOKEN_BUDGET)]:
        for part, attention in batch_halver.run(batch, read_attention):
            for row, chunk in enumerate(part):
                # Delay an interruption until all tables have the text, so that they agree.
                with delay_interrupts():
                    _add_text(second_pass, heads, reread_by_chunk[chunk], attention, row, start_tokens)
                n_tokens_done += len(chunk)
            if report is not None:
                n_examples = len(second_pass.examples)
                report(Progress(n_examples, n_tokens_done, n_tokens_done / n_tokens, "reading examples"))


def _add_text(
    second_pass: SecondPass,
    heads: Sequence[Head],
    reread: RereadText,
    attention: Any,
    row: int,
    start_tokens: Tokens | None,
) -> None:
    """Add a text to the tables if it is in the sample, and add the examples that show it.

    Args:
        second_pass: The results.
        heads: All heads, in the order of the table of heads.
        reread: The text.
        attention: The attention on a batch, by kind and layer.
        row: The row of the text in the batch.
        start_tokens: What the decoder of an encoder-decoder reads before the text; None for other models.
    """
    for kind, tables in second_pass.tables.items():
        text = _tokens_of_kind(kind, reread.chunk, start_tokens)
        layers = {}
        for layer, kept_attention in attention[kind].items():
            layers[layer] = _TextAttention(kind, kept_attention, row, text)
        if reread.is_sampled:
            # The keys of `n_heads` are the layers of this kind that have heads, in order.
            _add_to_tables(tables, text, [layers[layer] for layer in tables.n_heads])
        # Add the examples of heads of this kind of attention.
        for wanted in reread.wanted:
            head_kind, layer, head = heads[wanted.head]
            if head_kind == kind:
                second_pass.examples.append(_make_example(wanted, reread, layers[layer], head))
    second_pass.n_sampled += reread.is_sampled


def _tokens_of_kind(kind: str, chunk: Chunk, start_tokens: Tokens | None) -> ReadText:
    """Return the tokens of a chunk as the heads of a kind of attention read them, and which of them count as queries.

    An encoder-decoder reads the same text in its encoder and its decoder. In cross-attention the decoder's tokens are
    the queries, and the encoder's tokens are the keys.
    """
    # Chunks overlap: a token that the chunk before has, too, does not count again. The decoder of an encoder-decoder
    # reads the text after a start token, which does not count. This shifts all tokens by one.
    tokens = chunk.tokens
    is_query = ~chunk.is_repeated
    if kind == "decoder" and start_tokens is not None:
        tokens = shift_right(start_tokens, tokens)
        is_query = np.append(False, is_query[:-1])
    return ReadText(tokens, is_query)


@dataclass(frozen=True, eq=False)
class _TextAttention:
    """Hold the attention of a layer on one text of a batch, and compute rows of it on demand.

    Attributes:
        kind: The kind of attention.
        attention: The attention of the layer on the whole batch: its queries and keys, or its weights.
        row: The row of the text in the batch.
        text: The tokens of the text.
    """

    kind: str
    attention: KeptAttention
    row: int
    text: ReadText

    def rows(self, queries: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights of some queries, (head, query, key), and their attention mask, (query, key)."""
        # If the whole text fits into one tile, compute all its rows once, and cache them.
        if self._tile_size < len(self.text):
            return self._compute(queries)
        weights, allowed = self._all_rows
        return weights[:, queries], allowed[queries]

    def tiles(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield all rows, tile by tile: the slice of its queries, and their weights and mask as from `rows`."""
        for queries in torch.arange(len(self.text)).split(self._tile_size):  # type: ignore[no-untyped-call]
            yield slice(int(queries[0]), int(queries[-1]) + 1), *self.rows(queries)

    def _compute(self, queries: Tensor) -> tuple[Tensor, Tensor]:
        n_keys = len(self.text)
        weights, allowed = attention_rows(self.attention, self.kind, self.row, queries, n_keys)
        return weights.float(), allowed

    @cached_property
    def _all_rows(self) -> tuple[Tensor, Tensor]:
        return self._compute(torch.arange(len(self.text)))

    @property
    def _tile_size(self) -> int:
        """Return the number of queries in a tile."""
        return max(16, _MAX_TILE_WEIGHTS // (len(self.text) * count_heads(self.attention)))

    @cached_property
    def focus(self) -> NDArray[np.int64]:
        """Return the query that shows each head best, and its key with the largest weight outside sinks, (2, head).

        The query is the one with the largest product of two numbers. One is its weight on keys outside sinks. The other
        is its distance from uniform attention in nats: the logarithm of the number of allowed keys, minus the entropy
        of its row. A sink is a special token, or the first token of a decoder.
        """
        # For all queries the products, and the keys with the largest weight, each (head, query), tile by tile.
        is_outside = torch.from_numpy(self.text.is_outside_sinks)
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
        # Products are at least 0, so -1 excludes the queries that do not count.
        queries = np.where(self.text.is_counted, products, -1.0).argmax(1)
        return np.stack([queries, keys[np.arange(len(queries)), queries]])


def _add_to_tables(tables: KindTables, text: ReadText, layers: Sequence[_TextAttention]) -> None:
    """Add the attention on a text to the tables of a kind of attention; `layers` are all layers of the kind."""
    tables.add_text(text, [layer.tiles() for layer in layers])
    # Compare heads on a few evenly spaced queries: the rows of all layers, (head, query, key).
    n_queries = min(len(text), N_DISTANCE_QUERIES)
    positions = np.unique(np.linspace(0, len(text) - 1, n_queries).astype(np.int64))
    queries = torch.from_numpy(positions[text.is_counted[positions]])
    if len(queries):
        tables.add_divergences(torch.cat([layer.rows(queries)[0] for layer in layers]))


def _make_example(
    wanted: WantedExample, reread: RereadText, layer: _TextAttention, head: int
) -> Example:
    """Return an example of a head: the shown tokens, and the largest weights between them."""
    tokens = layer.text.tokens
    # Show the query that shows the head best, its key with the largest weight, and the tokens around both.
    focus, key = layer.focus[:, head].tolist()
    positions = choose_positions(tokens.special, focus, key)
    excerpt, offsets = make_excerpt(tokens, positions)
    # The weights of the shown tokens as queries, (shown token, key).
    by_head, _ = layer.rows(torch.from_numpy(positions))
    weights = by_head[head].double().numpy()
    kept = keep_largest_weights(weights[:, positions], weights.sum(1), KEPT_MASS, MAX_KEYS)
    return Example(
        wanted=wanted,
        text=reread.text.index,
        source=f"{reread.text.source}:{reread.text.line}",
        n_tokens=len(tokens),
        positions=positions,
        labels=tuple(tokens.labels[position] for position in positions),
        special=tokens.special[positions],
        focus=int(np.searchsorted(positions, focus)),
        excerpt=excerpt,
        offsets=offsets,
        starts=kept.starts,
        keys=kept.keys,
        codes=kept.codes,
    )


def choose_positions(special: NDArray[np.bool_], focus: int, key: int) -> NDArray[np.int64]:
    """Return the positions of the tokens that an example shows, ascending: at most `MAX_SHOWN_TOKENS`.

    They are the first token, special tokens at either end, the key with its neighbours, and then the tokens nearest to
    the focus.

    Args:
        special: Which tokens are special, (token,).
        focus: The position of the query to look at first.
        key: The position of the key with its largest weight.
    """
    # Take the tokens with the smallest distance to the focus. The distance -1 puts a token before all others. The sort
    # is stable: of two equally near tokens, the earlier one is taken.
    positions = np.arange(len(special))
    special_positions = np.flatnonzero(special)
    distances = np.abs(positions - focus)
    distances[np.abs(positions - key) <= _MAX_KEY_DISTANCE] = -1
    distances[
        [0, *special_positions[:_MAX_PINNED_TOKENS], *special_positions[-_MAX_PINNED_TOKENS:]]
    ] = -1
    return np.sort(np.argsort(distances, kind="stable")[:MAX_SHOWN_TOKENS])


def make_excerpt(tokens: Tokens, positions: NDArray[np.int64]) -> tuple[str, NDArray[np.int64]]:
    """Return the characters of some tokens in their text, and the start and stop of each token in them, (token, 2).

    `OMISSION_MARK` stands in the excerpt for omitted tokens. The excerpt is "" if the tokenizer has no offsets.

    Args:
        tokens: The tokens of the text.
        positions: The positions of the excerpt's tokens, ascending.
    """
    excerpt = ""
    offsets = np.zeros((len(positions), 2), np.int64)
    # Runs of consecutive tokens: each is a range of `positions` between two edges.
    edges = [0, *np.flatnonzero(np.diff(positions) > 1) + 1, len(positions)]
    for run_start, run_stop in pairwise(edges):
        if run_start:
            excerpt += OMISSION_MARK
        starts, stops = tokens.offsets[positions[run_start:run_stop]].T
        has_characters = (starts >= 0) & (stops > starts)
        # A token without characters, such as [CLS], gets an empty span at the stop of the last token with characters.
        begin = starts[has_characters.argmax()] if has_characters.any() else 0
        ends = np.maximum.accumulate(np.where(has_characters, stops, begin))
        starts = np.where(has_characters, starts, ends)
        offsets[run_start:run_stop] = np.stack([starts, ends], 1) - begin + len(excerpt)
        excerpt += tokens.text[begin : ends[-1]]
    # All spans are empty: the tokenizer has no offsets.
    if (offsets[:, 0] == offsets[:, 1]).all():
        return "", np.zeros_like(offsets)
    return excerpt, offsets
