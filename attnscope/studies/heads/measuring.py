"""Measure every head of a model on blocks of texts, and add the measures up.

`HeadMeasurer` runs the model on batches; `core.measures` measures its heads during the forward pass. `HeadSums` holds
the sums over one or more blocks of texts, in one `KindSums` for each kind of attention (encoder, decoder, cross). Its
size does not grow with the number of texts. `studies.heads.roles` gives the heads roles by these sums.

A *chunk* is a text, or a part of a long text. Chunks may overlap: tokens that an earlier chunk has too are only
*context*, and do not count as queries again. A *unit* is one independent piece of evidence, see `HeadSums`.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from attnscope.arrays import Flags, Floats, Integers
from attnscope.core.catalogue import queries_per_unit
from attnscope.core.sums import RunningSums
from attnscope.corpus import TOKEN_BUDGET, Chunk, TextBlock, batch_block
from attnscope.models.model import Model
from attnscope.plugins import load_token_sets
from attnscope.results.tokens import Tokens
from attnscope.studies.failures import find_broken_rows
from attnscope.studies.inputs.texts import batch_of, pad_rows
from attnscope.studies.run import Measurer, PartialSums

if TYPE_CHECKING:
    from torch import Tensor

    from attnscope.core.attention.row_samples import TextRows
    from attnscope.core.catalogue import MeasureSums
    from attnscope.core.facts import TextFacts

ChunkKey = tuple[int, int]
"""A chunk: (index of its text in the corpus, number of the chunk in the text)."""

PAIR_MEASURES = ("same_token", "induction")
"""Measures of links between two tokens that need a baseline of fixed offsets: in repetitive text, even a head that
always attends to the token at offset -5 scores on them. `count_offset_hits` computes the score of each offset."""

OFFSETS = tuple(range(-8, 9))
"""The fixed offsets of this baseline: the position of the key minus that of the query, in tokens."""

_MIN_COUNT = 1e-9
"""The least count that is no rounding error, as a share of the queries of a text (`weigh_units`)."""

# Sums


@dataclass(frozen=True, eq=False)
class KindSums:
    """Hold the sums over texts for the heads of one kind of attention.

    Attributes:
        kind: The kind of attention: encoder, decoder or cross.
        layers: Numbers of the layers, in the order of the layer axis.
        names: Names of the measures, in the order of the measure axis.
        measures: The sums of the measures, (layer, head, measure).
        uniform: The sums that uniform attention over the allowed keys would have, (layer, head, measure).
        pairs: The sums of PAIR_MEASURES for a head that always attends to one of OFFSETS, (pair measure, offset).
        text_weights: The weights of the texts in these sums: 1 / n for a text of n queries (`weigh_units`).
    """

    kind: str
    layers: tuple[int, ...]
    names: tuple[str, ...]
    measures: RunningSums
    uniform: RunningSums
    pairs: RunningSums = field(default_factory=lambda: RunningSums((len(PAIR_MEASURES), len(OFFSETS))))
    text_weights: RunningSums = field(default_factory=RunningSums)

    @classmethod
    def empty(cls, kind: str, layers: Sequence[int], n_heads: int, names: Sequence[str]) -> KindSums:
        """Return the sums over no text."""
        shape = len(layers), n_heads, len(names)
        return cls(kind, tuple(layers), tuple(names), RunningSums(shape), RunningSums(shape))

    @property
    def n_texts(self) -> int:
        """Return the number of units of evidence: texts, or parts of long texts (see `HeadSums`)."""
        # `RunningSums` takes each unit for a text.
        return self.measures.n_texts

    @property
    def queries_per_count(self) -> float:
        """Return the number of queries that a count of 1 stands for; 1 without any text.

        The count of a text is divided by its number of queries, so this is the harmonic mean of these numbers.
        """
        return 1 / float(self.text_weights.ratio()) if self.text_weights.n_texts else 1.0

    def merge(self, other: KindSums) -> KindSums:
        """Return the sums over the texts of both."""
        return replace(
            self,
            measures=self.measures.merge(other.measures),
            uniform=self.uniform.merge(other.uniform),
            pairs=self.pairs.merge(other.pairs),
            text_weights=self.text_weights.merge(other.text_weights),
        )


@dataclass(kw_only=True, eq=False)
class HeadSums(PartialSums):
    """Hold the sums over the texts of a block, or of several merged blocks.

    Units of evidence: intervals and tests count independent units. If each text were one unit, a long text would count
    as a single piece of evidence, however much it shows. So each chunk is a unit, and a long chunk is cut into several
    units, each a run of its queries (`queries_per_unit`). Units of one text depend little on each other (the block
    bootstrap: Künsch 1989, Annals of Statistics 17; Politis & Romano 1994, JASA 89).

    All texts weigh the same: the sums and counts of a text of n queries are divided by n. After a chunk on which the
    model computes NaN or infinity, the later chunks of its text are left out. `n_tokens` counts a token once if two
    chunks share it.

    Attributes:
        sums_by_kind: Kind of attention -> its sums; empty if no text was read to its end.
        rows: Chunk -> kind of attention -> the attention of its sampled queries.
    """

    sums_by_kind: dict[str, KindSums] = field(default_factory=dict)
    rows: dict[ChunkKey, dict[str, TextRows]] = field(default_factory=dict)


def stack_layers(by_layer: Mapping[int, MeasureSums], name: str) -> Floats:
    """Return one field of `MeasureSums` for all layers in one array, (unit, layer, head, measure).

    Args:
        by_layer: Number of a layer -> its measures. Layers may have different numbers of heads: missing heads get 0.
        name: The field: "sum", "count" or "uniform_sum", (measure, unit, head).
    """
    # From (measure, unit, head) to (unit, head, measure).
    arrays = [np.moveaxis(getattr(by_layer[layer], name), 0, -1) for layer in sorted(by_layer)]
    # Pad the axis of heads to the largest number of heads, then stack along a new axis of layers.
    n_heads = max(array.shape[1] for array in arrays)
    padded = [np.pad(array, ((0, 0), (0, n_heads - array.shape[1]), (0, 0))) for array in arrays]
    return np.stack(padded, 1)


def weigh_units(weights: Floats, sums: Mapping[str, Floats]) -> dict[str, Floats]:
    """Multiply the sums and counts of units of evidence by the weights of their texts.

    Counts below _MIN_COUNT become 0, and so do the sums that belong to them. The reason: if a head puts all of its
    attention on sinks, rounding leaves weights such as 1e-40 on other keys, and ratios of such numbers mean nothing.

    Args:
        weights: The weight of each unit, (unit,): 1 / n for a text of n queries, so that all texts weigh the same.
        sums: Name -> array, (unit, layer, head, measure). One of the names is "count".
    """
    weights = weights[:, None, None, None]  # (unit, 1, 1, 1)
    is_negligible = sums["count"] * weights < _MIN_COUNT
    return {name: np.where(is_negligible, 0.0, array * weights) for name, array in sums.items()}


def count_offset_hits(ids: Integers, causal: bool, context: Flags) -> Floats:
    """Score, on PAIR_MEASURES in a text, a head that always attends to the key at one of OFFSETS.

    - `same_token`: a key is a hit if it is another copy of the query's token.
    - `induction`: a key is a hit if it comes right after an earlier copy of the query's token, and before the query.

    Args:
        ids: The ids of the tokens, (token,).
        causal: Whether a query only attends to itself and earlier keys.
        context: Which tokens are only context, and do not count as queries, (token,).

    Returns:
        Hits and counts, (2, pair measure, offset). The hits are the number of queries whose key at the offset is a hit.
        The counts are the number of queries with any hit on the same side as the offset, before or after the query.
        (The measures of a head that attends to both sides count queries with a hit on either side, which are more. So
        for this head the baseline, hits divided by counts, is too high.)
    """
    n = len(ids)
    position = np.arange(n)
    is_query = ~context
    # The positions of the first and the last copy of each token, (token,). `np.unique` returns the first position of
    # each distinct id, (id,); `id_rows` has the row of each token's id among the distinct ids, (token,).
    _, first_positions, id_rows = np.unique(ids, return_index=True, return_inverse=True)
    _, positions_from_end = np.unique(ids[::-1], return_index=True)
    first_copy = first_positions[id_rows]
    last_copy = n - 1 - positions_from_end[id_rows]

    # The numbers of queries that count. For induction, there must be a key between an earlier copy and the query.
    n_with_copy_before = (is_query & (first_copy < position)).sum()
    n_with_copy_after = (is_query & (last_copy > position)).sum()
    n_with_key_after_copy = (is_query & (first_copy < position - 1)).sum()

    # The number of queries with a copy of their token at each distance from -max_distance to max_distance,
    # (distance,). Induction looks one token farther than the offsets.
    max_distance = OFFSETS[-1] + 1
    # Row max_distance + d of `windows` holds, for each token, the token at distance d, (distance, token). The padding
    # beyond the text, -1, is no token's id.
    windows = sliding_window_view(np.pad(ids, max_distance, constant_values=-1), n)
    n_copies = ((windows == ids) & is_query).sum(1)

    result = np.zeros((2, len(PAIR_MEASURES), len(OFFSETS)))
    hits, counts = result
    for column, offset in enumerate(OFFSETS):
        if offset < 0:
            # In the order of PAIR_MEASURES. For induction, the copy is one token before the key at this offset.
            row = max_distance + offset
            hits[:, column] = n_copies[row], n_copies[row - 1]
            counts[:, column] = n_with_copy_before, n_with_key_after_copy
        elif offset > 0 and not causal:
            # Only `same_token`, row 0, has keys after the query.
            hits[0, column] = n_copies[max_distance + offset]
            counts[0, column] = n_with_copy_after
    return result


# Measuring


def log_frequency(counts: Integers, ids: Integers) -> Floats:
    """Return the natural logarithms of the relative frequencies of tokens, of the shape of `ids`.

    One is added to each count, so that a token that never occurred has a frequency too.

    Args:
        counts: How often each token occurred in the corpus, (id,), up to the largest id that occurred.
        ids: The ids of the tokens, of any shape.
    """
    # Larger ids never occurred: they get the 0 that is appended to the counts.
    counts_of_ids = np.append(counts, 0)[np.minimum(ids, len(counts))]
    frequencies: Floats = np.log((counts_of_ids + 1) / (counts.sum() + len(counts)))
    return frequencies


class BatchResult(NamedTuple):
    """Hold what was measured on one batch of chunks, in the order of the batch.

    Attributes:
        sums: Kind of attention -> layer -> the measures.
        hits: Kind of attention -> the results of `count_offset_hits`, (hits or counts, chunk, pair measure, offset).
            Cross-attention is left out: between two texts, an offset means nothing.
        rows: For each chunk, kind of attention -> the attention of its sampled queries; empty if no query is sampled.
    """

    sums: Mapping[str, Mapping[int, MeasureSums]]
    hits: Mapping[str, Floats]
    rows: Sequence[dict[str, TextRows]]


class HeadMeasurer(Measurer[HeadSums]):
    """Measure the heads of a model on blocks of texts.

    Args:
        model: The model.
        counts: How often each token occurs in the corpus, (id,).
        special: The ids of special tokens.
        chunk: The largest number of tokens in a chunk; None = as many as the model takes.
        stride: The number of tokens from the start of a chunk to the start of the next; None = chunks do not overlap.
        sampled: Chunk -> the positions of its queries whose attention is kept, (query,); None = no query is sampled.
        seed: Measure the same architecture with random weights of this seed, as a control; None = the model itself.

    Raises:
        AttnscopeError: The model has a decoder beside its encoder, and nothing that the decoder could read.
    """

    def __init__(
        self,
        model: Model,
        counts: Integers,
        special: frozenset[int],
        chunk: int | None = None,
        stride: int | None = None,
        sampled: Mapping[ChunkKey, Integers] | None = None,
        seed: int | None = None,
    ) -> None:
        from attnscope.core.attention.tiles import TileBuffers

        super().__init__(model.tokenizer)
        if seed is not None:
            model = model.untrained(seed)
        self._model = model
        self._counts = counts
        self._special = special
        self._chunk_options = {"chunk": chunk, "stride": stride}
        self._sampled = sampled or {}
        # The attention of some models cannot be probed. They return dense weights, (query, key), on the CPU.
        self._is_dense = model.info.path == "eager"
        self._device = "cpu" if self._is_dense else model.info.device
        self._decoder_start = encode_decoder_start(model)
        self._blocks = model.blocks()

        # Memory for temporary results, which all batches use again.
        self._buffers = TileBuffers()

    def start(self, block: TextBlock) -> HeadSums:
        """Return the sums of a block of which nothing is measured yet."""
        return HeadSums()

    def batches(self, block: TextBlock) -> Sequence[Sequence[Chunk]]:
        """Cut a block into batches of chunks, the longest texts first."""
        batches: Sequence[Sequence[Chunk]] = batch_block(
            block,
            self._model.tokenizer.encode,
            limit=self._model.info.max_tokens,
            budget=TOKEN_BUDGET,
            special_ids=self._special,
            **self._chunk_options,
        )
        # `batch_block` begins with the shortest texts.
        return batches[::-1]

    def add(self, part: HeadSums, batch: Sequence[Chunk], result: BatchResult) -> None:
        """Add the measures of a batch of chunks to the sums of its block, and count the texts that are complete now.

        A text on which the model computes NaN or infinity is put into `part.broken`. Nothing more of it is added.
        """
        # Find broken texts. All chunks of a batch have the same number of units, as shorter ones are padded.
        by_unit: dict[str, dict[int, Any]] = {}
        for kind, by_layer in result.sums.items():
            # (measure, unit, head) → (unit, measure, head)
            by_unit[kind] = {layer: measured.sum.swapaxes(0, 1) for layer, measured in by_layer.items()}
        max_tokens = max(map(len, batch))
        n_units = math.ceil(max_tokens / queries_per_unit(max_tokens))
        for unit, origin in find_broken_rows(by_unit).items():
            part.broken.setdefault(batch[unit // n_units].text_index, origin)
        is_intact = np.array([chunk.text_index not in part.broken for chunk in batch])  # (chunk,)
        if not is_intact.any():
            return

        # Add the measures of the intact texts, unit by unit.
        weights = np.array([1 / chunk.n_text_tokens for chunk in batch])  # (chunk,)
        is_added = is_intact.repeat(n_units)  # (unit,)
        for kind, by_layer in result.sums.items():
            sums = {
                name: stack_layers(by_layer, name)[is_added] for name in ("sum", "count", "uniform_sum")
            }
            # Each array is (unit, layer, head, measure).
            weighed = weigh_units(weights.repeat(n_units)[is_added], sums)
            if kind not in part.sums_by_kind:
                names = next(iter(by_layer.values())).names
                n_heads = weighed["sum"].shape[2]
                part.sums_by_kind[kind] = KindSums.empty(kind, sorted(by_layer), n_heads, names)
            kind_sums = part.sums_by_kind[kind]
            kind_sums.measures.add(weighed["sum"], weighed["count"])
            kind_sums.uniform.add(weighed["uniform_sum"], weighed["count"])
            if kind in result.hits:
                hits, counts = (
                    result.hits[kind] * weights[:, None, None]
                )  # (chunk, pair measure, offset)
                kind_sums.pairs.add(hits[is_intact], counts[is_intact])

        # Keep the attention of sampled queries, and count tokens and texts.
        for row in np.flatnonzero(is_intact).tolist():
            chunk = batch[row]
            part.n_tokens += len(chunk) - chunk.n_repeated
            if result.rows[row]:
                part.rows[chunk.text_index, chunk.number] = result.rows[row]
            # `count_row` returns whether this is the last of the text's chunks to be measured.
            if part.count_row(chunk.text_index, chunk.n_chunks):
                part.n_texts += 1
                part.n_chunked += chunk.n_chunks > 1
                for kind_sums in part.sums_by_kind.values():
                    kind_sums.text_weights.add(weights[row], 1.0)

    def finish(self, part: HeadSums) -> HeadSums:
        """Return the sums of a finished block. If no text was read to its end, the sums of its chunks are dropped."""
        return part if part.n_texts else replace(part, sums_by_kind={}, n_tokens=0)

    def measure(self, batch: Sequence[Chunk]) -> BatchResult:
        """Run the model on a batch of chunks, and return the measures and the attention of sampled queries."""
        import torch

        from attnscope.core.attention.probes import WeightsRecorder
        from attnscope.core.attention.row_samples import RowRecorder
        from attnscope.core.measures import HeadMeasures, measures_of_weights
        from attnscope.models.inside.projections import record_input_lengths

        # Kind of self-attention -> the texts that it reads, and which of their tokens are only context.
        tokens = [chunk.tokens for chunk in batch]
        contexts = [chunk.is_repeated for chunk in batch]
        texts = dict.fromkeys(self._model.info.kinds, (tokens, contexts))
        texts.pop("cross", None)
        # The decoder of an encoder-decoder reads its start token, then the text: all tokens move right by one.
        targets: list[Tokens] = []
        if self._decoder_start is not None:
            targets = [shift_right(self._decoder_start, text) for text in tokens]
            texts["decoder"] = targets, [np.append(False, context[:-1]) for context in contexts]
        hits = {}
        facts = {}
        for kind, (kind_texts, kind_contexts) in texts.items():
            text_hits = [
                count_offset_hits(text.ids, kind == "decoder", context)
                for text, context in zip(kind_texts, kind_contexts, strict=True)
            ]
            hits[kind] = np.stack(text_hits, 1)  # (hits or counts, chunk, pair measure, offset)
            facts[kind] = self._find_facts(kind_texts, kind_contexts)
        # `info.kinds` is in the order of computation, so the first kind reads the input.
        source_facts = next(iter(facts.values()))
        target_facts = facts["decoder"] if targets else None
        inputs = batch_of(tokens, targets).to(self._model.info.device)

        # For each chunk, its sampled queries and its number of keys; None = no query is sampled.
        samples: list[tuple[Integers, int] | None] = []
        for chunk in batch:
            queries = self._sampled.get((chunk.text_index, chunk.number))
            samples.append(None if queries is None else (queries, len(chunk)))
        sums: dict[Any, dict[int, MeasureSums]] = {}
        # `HeadMeasures` checks whether masks have changed. Tensors of inference_mode cannot tell, so use no_grad.
        with torch.no_grad():
            if self._is_dense:
                # Record the dense weights of all layers, then sample and measure them.
                recorder = WeightsRecorder()
                self._model.run(inputs, recorder)
                sampler = RowRecorder(samples)
                sampler.keep_maps(recorder.maps)
                for kind, by_layer in recorder.maps.items():
                    # Cross-attention has its keys in the source and its queries in the target.
                    kind_facts = (source_facts, target_facts) if kind == "cross" else (facts[kind], None)
                    sums[kind] = {
                        layer: measures_of_weights(weights, *kind_facts)
                        for layer, weights in by_layer.items()
                    }
            else:
                # Sample and measure during the forward pass. The measure `outlier_token` needs the norms of the hidden
                # states that each layer reads: `record_input_lengths` records them.
                with record_input_lengths(self._blocks) as norms:
                    probe = HeadMeasures(source_facts, target_facts, buffers=self._buffers, norms=norms)
                    sampler = RowRecorder(samples, probe)
                    self._model.run(inputs, sampler)
                sums |= probe.sums
        return BatchResult(sums, hits, sampler.rows)

    def _find_facts(self, tokens: Sequence[Tokens], contexts: Sequence[Flags]) -> TextFacts:
        """Find the facts about the texts of a batch that measures need, such as which tokens are punctuation.

        Args:
            tokens: The texts.
            contexts: Which tokens of each text are only context, (token,).
        """
        import torch

        from attnscope.core.attention.precision import move
        from attnscope.core.facts import TextFacts

        def tensor(array: NDArray[Any]) -> Tensor:
            return move(torch.from_numpy(array), self._device)

        def mark(find_tokens: Callable[[Tokens], Flags]) -> Tensor:
            """Return which tokens of each text a function finds, (text, token)."""
            return tensor(pad_rows([*map(find_tokens, tokens)]))

        # All arrays are (text, token), padded with 0 or False. Opening tokens, such as [CLS], are the special tokens
        # before the first ordinary token.
        is_real = pad_rows([np.ones(len(text), np.bool_) for text in tokens])
        ids = pad_rows([text.ids for text in tokens])
        is_special = pad_rows([text.special for text in tokens])
        is_opening = is_special & (np.cumsum(~is_special, axis=1) == 0)
        # Special tokens are in every text, so their relative frequency is taken to be 1: its logarithm is 0.
        frequency = np.where(is_special, 0.0, log_frequency(self._counts, ids))
        # The first token cannot be the rarest: in models without [CLS] it is a sink, rare or not.
        may_be_rarest = is_real & ~is_special & (np.arange(ids.shape[1]) > 0)
        candidates = np.where(may_be_rarest, frequency, np.inf)
        is_rarest = may_be_rarest & (candidates == candidates.min(1, keepdims=True))
        embeddings = look_up_unit_embeddings(self._model, tensor(ids))
        if embeddings is not None:
            embeddings = embeddings.to(self._device)
        context = None  # all tokens count as queries
        if np.any(np.concatenate(contexts)):
            context = tensor(pad_rows(contexts))
        return TextFacts(
            real=tensor(is_real),
            special=tensor(is_special),
            ids=tensor(ids),
            cls=tensor(is_opening),
            sep=tensor(is_special & ~is_opening),
            punctuation=mark(_find_punctuation),
            log_frequency=tensor(frequency),
            embeddings=embeddings,
            rarest=tensor(is_rarest),
            context=context,
            # Sets of tokens that plugins add: name -> function that finds the tokens in a text.
            plugin_sets={name: mark(find_tokens) for name, find_tokens in load_token_sets().items()},
        )


def look_up_unit_embeddings(model: Model, ids: Tensor) -> Tensor | None:
    """Look up the static embeddings of tokens, and scale them to length 1, so that their dot products are cosines.

    Args:
        model: The model.
        ids: The ids of the tokens, (batch, token).

    Returns:
        The embeddings, (batch, token, d), float32, on the model's device; None if the model has none.
    """
    from torch import finfo, float32
    from torch.nn.functional import normalize

    rows = model.static_embeddings(ids.to(model.info.device))
    return None if rows is None else normalize(rows.float(), dim=-1, eps=finfo(float32).tiny)


def _find_punctuation(tokens: Tokens) -> Flags:
    """Return which tokens consist of punctuation or symbols alone, (token,)."""
    is_punctuation = np.zeros(len(tokens), np.bool_)
    for position, label in enumerate(tokens.labels):
        # In labels, "##" marks a word piece and "·" a space. Neither is part of the text.
        characters = label.removeprefix("##").replace("·", "")
        # Unicode's categories P… are punctuation, S… symbols.
        is_mark = [unicodedata.category(character)[0] in "PS" for character in characters]
        is_punctuation[position] = bool(characters) and all(is_mark)
    return is_punctuation & ~tokens.special


# What the decoder of an encoder-decoder reads


def encode_decoder_start(model: Model) -> Tokens | None:
    """Return the start token of the decoder of an encoder-decoder, as a text of one token; None for other models."""
    # Only an encoder-decoder has several kinds of attention.
    if len(model.info.kinds) == 1 or model.text_generator is None:
        return None
    # The start token is the first token of any target, such as "a".
    return model.text_generator.encode_target("a").take(np.arange(1))


def shift_right(start: Tokens, tokens: Tokens) -> Tokens:
    """Return what the decoder of an encoder-decoder reads while it writes the text that its encoder reads.

    Args:
        start: The start token of the decoder, from `encode_decoder_start`.
        tokens: The text.

    Returns:
        The start token, then all tokens of the text but the last one.
    """
    return replace(
        tokens,
        ids=np.concatenate([start.ids, tokens.ids[:-1]]),
        labels=(*start.labels, *tokens.labels[:-1]),
        offsets=np.concatenate([start.offsets, tokens.offsets[:-1]]),
        special=np.concatenate([start.special, tokens.special[:-1]]),
    )
