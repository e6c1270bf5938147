"""Measure every head of a model on blocks of texts, and add the measures up.

`HeadMeasurer` runs the model on batches, and has `core.measures` measure its heads on the way. `HeadSums` holds what
was measured on a block of texts, or on several: a `KindSums` of sums for each kind of attention (encoder, decoder,
cross). Its size does not grow with the number of texts. `studies.heads.roles` gives the heads roles by these sums.
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

from attnscope.core.catalogue import unit_queries
from attnscope.core.sums import RunningSums
from attnscope.corpus import TOKEN_BUDGET, Chunk, TextBlock, block_batches
from attnscope.models.model import Model
from attnscope.plugins import load_token_sets
from attnscope.results.tokens import Tokens
from attnscope.studies.failures import find_broken_rows
from attnscope.studies.inputs.texts import batch_of, pad_rows
from attnscope.studies.run import Measurer, PartialSums

if TYPE_CHECKING:
    from torch import Tensor

    from attnscope.core.attention.row_samples import SampledRows
    from attnscope.core.catalogue import MeasureSums
    from attnscope.core.facts import TextFacts

Floats = NDArray[np.float64]
Numbers = NDArray[np.int64]
Flags = NDArray[np.bool_]
ChunkKey = tuple[int, int]
"""A chunk: the index of its text in the corpus, and its number in the text."""

PAIR_MEASURES = ("same_token", "induction")
"""Measures of links between two tokens. In repetitive text, a head that always attends to the token five before the
query would score on them too, so `count_offset_hits` counts what each fixed offset scores."""

OFFSETS = tuple(range(-8, 9))
"""The fixed offsets that are tried: the position of the key minus that of the query, in tokens."""

_MIN_COUNT = 1e-9
"""The least count that is no rounding, as a share of the queries of a text; smaller ones become 0 (`weigh_units`)."""

# Sums


@dataclass(frozen=True, eq=False)
class KindSums:
    """Hold the sums over texts for the heads of one kind of attention.

    Attributes:
        kind: The kind of attention.
        layers: Numbers of the layers, in the order of the first axis.
        names: The measures, in the order of the last axis.
        measures: The sums of each measure, (layer, head, measure).
        uniform: Those that uniform attention over the allowed keys would have, (layer, head, measure).
        pairs: Those of each of PAIR_MEASURES for a head that always attends to one of OFFSETS, (pair measure, offset).
        text_weights: 1 / n for each text of n queries: its weight in all of these sums (`weigh_units`).
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
        """Return a tally of no text."""
        shape = len(layers), n_heads, len(names)
        return cls(kind, tuple(layers), tuple(names), RunningSums(shape), RunningSums(shape))

    @property
    def n_texts(self) -> int:
        """Return how many units of evidence are in it: texts, or parts of long ones (see `HeadSums`)."""
        return self.measures.n_texts

    @property
    def queries_per_count(self) -> float:
        """Return by what to multiply a count to get queries: the harmonic mean length of the texts; 1 without any."""
        return 1 / float(self.text_weights.ratio()) if self.text_weights.n_texts else 1.0

    def merge(self, other: KindSums) -> KindSums:
        """Return the tally of the texts of both."""
        return replace(
            self,
            measures=self.measures.merge(other.measures),
            uniform=self.uniform.merge(other.uniform),
            pairs=self.pairs.merge(other.pairs),
            text_weights=self.text_weights.merge(other.text_weights),
        )


@dataclass(kw_only=True, eq=False)
class HeadSums(PartialSums):
    """Hold the sums over the texts of a block, or of several merged ones.

    Units of evidence: intervals and tests count independent units. If a text were one unit, a long one would be a
    single piece of evidence, however much it shows. So each chunk is a unit, and a long chunk is cut into several, each
    a run of its queries (`unit_queries`). They depend little on each other (the block bootstrap: Künsch 1989, Annals of
    Statistics 17; Politis & Romano 1994, JASA 89).

    All texts weigh the same: the sums and counts of a text of n queries are divided by n. After a chunk on which the
    model computes NaN or infinity, the later chunks of its text are left out. `n_tokens` counts a token that two chunks
    share once.

    Attributes:
        sums_by_kind: The sums by kind of attention; empty if no text was read to its end.
        rows: The rows of attention of sampled queries, by chunk, then by kind of attention.
    """

    sums_by_kind: dict[str, KindSums] = field(default_factory=dict)
    rows: dict[ChunkKey, dict[str, SampledRows]] = field(default_factory=dict)


def stack_layers(by_layer: Mapping[int, MeasureSums], name: str) -> Floats:
    """Return one field of `MeasureSums` for all layers in one array, (unit, layer, head, measure).

    Args:
        by_layer: The measures of each layer. Layers may have different numbers of heads: missing ones are 0.
        name: The field: "sum", "count" or "uniform_sum", (measure, unit, head).
    """
    # From (measure, unit, head) to (unit, head, measure).
    arrays = [np.moveaxis(getattr(by_layer[layer], name), 0, -1) for layer in sorted(by_layer)]
    n_heads = max(array.shape[1] for array in arrays)
    padded = [np.pad(array, ((0, 0), (0, n_heads - array.shape[1]), (0, 0))) for array in arrays]
    return np.stack(padded, 1)


def weigh_units(weights: Floats, sums: Mapping[str, Floats]) -> dict[str, Floats]:
    """Return the sums and counts of units of evidence times the weights of their texts.

    A text of n queries has the weight 1 / n, so that all texts weigh the same. If a head puts all of its attention on
    sinks, rounding leaves masses such as 1e-40 elsewhere, and their ratios mean nothing: such counts, and the sums
    beside them, become 0.

    Args:
        weights: The weight of each unit, (unit,).
        sums: Arrays by name, (unit, layer, head, measure) each; one of them is the "count".
    """
    weights = weights[:, None, None, None]
    is_negligible = sums["count"] * weights < _MIN_COUNT
    return {name: np.where(is_negligible, 0.0, array * weights) for name, array in sums.items()}


def count_offset_hits(ids: Numbers, causal: bool, context: Flags) -> Floats:
    """Return what a head scores on PAIR_MEASURES in a text if it always attends to the key at one of OFFSETS.

    A key hits for `same_token` if it is another copy of the query's token, and for `induction` if it comes right after
    an earlier copy, and before the query.

    Args:
        ids: The ids of the tokens, (token,).
        causal: Whether heads look back only.
        context: Which tokens are only context, and do not count as queries, (token,).

    Returns:
        Hits and counts, (2, pair measure, offset). A hit is a query whose key at the offset hits. A count is a query
        with any key that hits on the side of the offset, before or after it. (A head that looks both ways counts
        queries with such a key on either side. For it, this baseline is too high.)
    """
    n = len(ids)
    position = np.arange(n)
    is_query = ~context
    # The positions of the first and the last copy of each token, (token,). NumPy gives them for each different token.
    _, first_of_type, type_of = np.unique(ids, return_index=True, return_inverse=True)
    _, from_end = np.unique(ids[::-1], return_index=True)
    first_copy = first_of_type[type_of]
    last_copy = n - 1 - from_end[type_of]

    # The queries that count. For induction, an earlier copy must be followed by a key before the query.
    n_with_copy_before = (is_query & (first_copy < position)).sum()
    n_with_copy_after = (is_query & (last_copy > position)).sum()
    n_with_key_after_copy = (is_query & (first_copy < position - 1)).sum()

    # How many queries have a copy of their token at each distance from -far to far; -1 stands beyond the text.
    far = OFFSETS[-1] + 1
    # Row far + d of the windows holds, for each token, the one at distance d, (distance, token).
    windows = sliding_window_view(np.pad(ids, far, constant_values=-1), n)
    n_copies = ((windows == ids) & is_query).sum(1)

    result = np.zeros((2, len(PAIR_MEASURES), len(OFFSETS)))
    hits, counts = result
    for column, offset in enumerate(OFFSETS):
        if offset < 0:
            # The key at this offset is after a copy if the copy is one token further back.
            hits[:, column] = n_copies[far + offset], n_copies[far + offset - 1]
            counts[:, column] = n_with_copy_before, n_with_key_after_copy
        elif offset > 0 and not causal:
            hits[0, column] = n_copies[far + offset]
            counts[0, column] = n_with_copy_after
    return result


# Measuring


def log_frequency(counts: Numbers, ids: Numbers) -> Floats:
    """Return the natural logarithms of the relative frequencies of tokens, of the shape of `ids`.

    One is added to each count, so that a token that was never counted has a frequency too.

    Args:
        counts: How often each token was counted, by its id, up to the largest id that occurred.
        ids: The ids of the tokens, of any shape.
    """
    # Larger ids take the 0 that is put at the end.
    counts_of_ids = np.append(counts, 0)[np.minimum(ids, len(counts))]
    frequencies: Floats = np.log((counts_of_ids + 1) / (counts.sum() + len(counts)))
    return frequencies


class BatchResult(NamedTuple):
    """Hold what was measured on one batch of chunks, in its order.

    Attributes:
        sums: Kind of attention -> layer -> the measures.
        hits: Kind of attention -> the results of `count_offset_hits`, (hits or counts, chunk, pair measure, offset).
            Cross-attention has none: between two texts, an offset means nothing.
        rows: For each chunk, kind of attention -> the rows of sampled queries; empty if none are sampled.
    """

    sums: Mapping[str, Mapping[int, MeasureSums]]
    hits: Mapping[str, Floats]
    rows: Sequence[dict[str, SampledRows]]


class HeadMeasurer(Measurer[HeadSums]):
    """Measure the heads of a model on blocks of texts.

    Args:
        model: The model.
        counts: How often each token occurs in the corpus, by its id.
        special: The ids of special tokens.
        chunk: How many tokens a chunk of a long text has at most; None = as many as the model takes.
        stride: How many tokens later the next chunk starts; None = chunks do not overlap.
        sampled: For each chunk, the positions of the queries whose rows of attention are kept; None = there are none.
        seed: Measure the model's untrained twin with random weights of this seed; None = the model itself.

    Raises:
        AttnscopeError: The model has a decoder beside its encoder, and nothing that the decoder could read.
    """

    def __init__(
        self,
        model: Model,
        counts: Numbers,
        special: frozenset[int],
        chunk: int | None = None,
        stride: int | None = None,
        sampled: Mapping[ChunkKey, Numbers] | None = None,
        seed: int | None = None,
    ) -> None:
        from attnscope.core.attention.tiles import Buffers

        super().__init__(model.tokenizer)
        if seed is not None:
            model = model.untrained(seed)
        self._model = model
        self._counts = counts
        self._special = special
        self._cut = {"chunk": chunk, "stride": stride}
        self._sampled = sampled or {}
        # Some models do not let a probe into their attention: they return whole matrices of weights, on the processor.
        self._is_dense = model.info.path == "eager"
        self._device = "cpu" if self._is_dense else model.info.device
        self._start = encode_decoder_start(model)
        self._blocks = model.blocks()

        self._buffers = Buffers()

    def start(self, block: TextBlock) -> HeadSums:
        """Return the sums of a block of which nothing is measured yet."""
        return HeadSums()

    def batches(self, block: TextBlock) -> Sequence[Sequence[Chunk]]:
        """Cut a block into batches of chunks, the longest texts first."""
        batches: Sequence[Sequence[Chunk]] = block_batches(
            block,
            self._model.tokenizer.encode,
            limit=self._model.info.max_tokens,
            budget=TOKEN_BUDGET,
            special_ids=self._special,
            **self._cut,
        )
        # `block_batches` begins with the shortest.
        return batches[::-1]

    def add(self, part: HeadSums, batch: Sequence[Chunk], result: BatchResult) -> None:
        """Add the measures of a batch of chunks, and count the texts whose last chunk this is.

        A text on which the model computes NaN or infinity is noted in `part.broken`, and nothing more of it is added.
        """
        # Find broken chunks. All chunks of a batch have the same number of units of evidence.
        by_unit: dict[str, dict[int, Any]] = {}
        for kind, by_layer in result.sums.items():
            # (measure, unit, head) → (unit, measure, head)
            by_unit[kind] = {layer: measured.sum.swapaxes(0, 1) for layer, measured in by_layer.items()}
        longest = max(map(len, batch))
        n_units = math.ceil(longest / unit_queries(longest))
        for unit, place in find_broken_rows(by_unit).items():
            part.broken.setdefault(batch[unit // n_units].text_index, place)
        is_whole = np.array([chunk.text_index not in part.broken for chunk in batch])
        if not is_whole.any():
            return

        # Add the measures of the others, unit by unit.
        weights = np.array([1 / chunk.n_queries for chunk in batch])
        is_added = is_whole.repeat(n_units)
        for kind, by_layer in result.sums.items():
            sums = {
                name: stack_layers(by_layer, name)[is_added] for name in ("sum", "count", "uniform_sum")
            }
            weighed = weigh_units(weights.repeat(n_units)[is_added], sums)
            if kind not in part.sums_by_kind:
                names = next(iter(by_layer.values())).names
                n_heads = weighed["sum"].shape[2]
                part.sums_by_kind[kind] = KindSums.empty(kind, sorted(by_layer), n_heads, names)
            kind_sums = part.sums_by_kind[kind]
            kind_sums.measures.add(weighed["sum"], weighed["count"])
            kind_sums.uniform.add(weighed["uniform_sum"], weighed["count"])
            if kind in result.hits:
                hits, counts = result.hits[kind] * weights[:, None, None]
                kind_sums.pairs.add(hits[is_whole], counts[is_whole])

        # Keep the rows of sampled queries, and count tokens and texts.
        for row in np.flatnonzero(is_whole).tolist():
            chunk = batch[row]
            part.n_tokens += len(chunk) - chunk.n_repeated
            if result.rows[row]:
                part.rows[chunk.text_index, chunk.number] = result.rows[row]
            if part.count_row(chunk.text_index, chunk.n_chunks):
                part.n_texts += 1
                part.n_chunked += chunk.n_chunks > 1
                for kind_sums in part.sums_by_kind.values():
                    kind_sums.text_weights.add(weights[row], 1.0)

    def finish(self, part: HeadSums) -> HeadSums:
        """Return the sums of a block; without any text that was read to its end, they lose the tallies of chunks."""
        return part if part.n_texts else replace(part, sums_by_kind={}, n_tokens=0)

    def measure(self, batch: Sequence[Chunk]) -> BatchResult:
        """Return the measures of a batch of chunks, and the rows of its sampled queries."""
        import torch

        from attnscope.core.attention.probes import WeightsRecorder
        from attnscope.core.attention.row_samples import RowSamples
        from attnscope.core.measures import HeadMeasures, measures_of_weights
        from attnscope.models.inside.projections import watch_norms

        # The texts that self-attention of each kind reads, and which of their tokens are only context.
        tokens = [chunk.tokens for chunk in batch]
        repeated = [chunk.repeated for chunk in batch]
        texts = dict.fromkeys(self._model.info.kinds, (tokens, repeated))
        texts.pop("cross", None)
        # The decoder of an encoder-decoder reads the text one token later, after its start token.
        targets: list[Tokens] = []
        if self._start is not None:
            targets = [shift_right(self._start, text) for text in tokens]
            texts["decoder"] = targets, [np.append(False, of_text[:-1]) for of_text in repeated]
        hits = {}
        facts = {}
        for kind, (texts_of_kind, contexts) in texts.items():
            of_texts = [
                count_offset_hits(text.ids, kind == "decoder", context)
                for text, context in zip(texts_of_kind, contexts, strict=True)
            ]
            hits[kind] = np.stack(of_texts, 1)
            facts[kind] = self._facts(texts_of_kind, contexts)
        # The facts of the input; and those of what the decoder of an encoder-decoder reads.
        source_facts = next(iter(facts.values()))
        target_facts = facts["decoder"] if targets else None
        inputs = batch_of(tokens, targets).to(self._model.info.device)

        # The sampled queries of each chunk, as `RowSamples` takes them: with the number of keys.
        wanted: list[tuple[Numbers, int] | None] = []
        for chunk in batch:
            queries = self._sampled.get((chunk.text_index, chunk.number))
            wanted.append(None if queries is None else (queries, len(chunk)))
        sums: dict[Any, dict[int, MeasureSums]] = {}
        # Not inference_mode: its tensors do not tell whether they have changed, which `HeadMeasures` asks of masks.
        with torch.no_grad():
            if self._is_dense:
                dense = WeightsRecorder()
                self._model.run(inputs, dense)
                reader = RowSamples(wanted)
                reader.keep_all(dense.maps)
                for kind, by_layer in dense.maps.items():
                    # Cross-attention has its queries in one text and its keys in another.
                    of_kind = (source_facts, target_facts) if kind == "cross" else (facts[kind], None)
                    sums[kind] = {
                        layer: measures_of_weights(weights, *of_kind)
                        for layer, weights in by_layer.items()
                    }
            else:
                with watch_norms(self._blocks) as norms:
                    probe = HeadMeasures(source_facts, target_facts, buffers=self._buffers, norms=norms)
                    reader = RowSamples(wanted, probe)
                    self._model.run(inputs, reader)
                sums |= probe.sums
        return BatchResult(sums, hits, reader.rows)

    def _facts(self, tokens: Sequence[Tokens], repeated: Sequence[Flags]) -> TextFacts:
        """Return the facts that measures need of the texts of a batch, each array (text, token).

        Args:
            tokens: The texts.
            repeated: Which tokens of each text are only context, (token,).
        """
        import torch

        from attnscope.core.attention.precision import move
        from attnscope.core.facts import TextFacts

        def tensor(array: NDArray[Any]) -> Tensor:
            return move(torch.from_numpy(array), self._device)

        def flags(of_text: Callable[[Tokens], Flags]) -> Tensor:
            """Return which tokens of each text a function marks, (text, token)."""
            return tensor(pad_rows([*map(of_text, tokens)]))

        # All arrays are (text, token). Opening tokens are the special ones before the first ordinary one.
        real = pad_rows([np.ones(len(text), np.bool_) for text in tokens])
        ids = pad_rows([text.ids for text in tokens])
        special = pad_rows([text.special for text in tokens])
        opening = special & (np.cumsum(~special, axis=1) == 0)
        # Special tokens are in every text, so their relative frequency is taken to be 1.
        frequency = np.where(special, 0.0, log_frequency(self._counts, ids))
        # The first token is left out of the rarest: in models without [CLS], heads rest on it, rare or not.
        may_be_rarest = real & ~special & (np.arange(ids.shape[1]) > 0)
        candidates = np.where(may_be_rarest, frequency, np.inf)
        rarest = may_be_rarest & (candidates == candidates.min(1, keepdims=True))
        embeddings = look_up_unit_embeddings(self._model, tensor(ids))
        if embeddings is not None:
            embeddings = embeddings.to(self._device)
        context = None
        if np.any(np.concatenate(repeated)):
            context = tensor(pad_rows(repeated))
        return TextFacts(
            real=tensor(real),
            special=tensor(special),
            ids=tensor(ids),
            cls=tensor(opening),
            sep=tensor(special & ~opening),
            punctuation=flags(_find_punctuation),
            log_frequency=tensor(frequency),
            embeddings=embeddings,
            rarest=tensor(rarest),
            context=context,
            added={name: flags(is_in_set) for name, is_in_set in load_token_sets().items()},
        )


def look_up_unit_embeddings(model: Model, ids: Tensor) -> Tensor | None:
    """Return the static embeddings of tokens, scaled to length 1, so that their products are cosines.

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
    """Return which tokens hold punctuation or symbols alone, (token,); marks of word pieces and spaces do not count."""
    is_punctuation = np.zeros(len(tokens), np.bool_)
    for position, label in enumerate(tokens.labels):
        bare = label.removeprefix("##").replace("·", "")
        # Unicode's categories P… are punctuation, S… symbols.
        is_mark = [unicodedata.category(letter)[0] in "PS" for letter in bare]
        is_punctuation[position] = bool(bare) and all(is_mark)
    return is_punctuation & ~tokens.special


# What the decoder of an encoder-decoder reads


def encode_decoder_start(model: Model) -> Tokens | None:
    """Return the start token of the decoder of an encoder-decoder, as a text of one token; None where none writes."""
    if len(model.info.kinds) == 1 or model.text_generator is None:
        return None
    # It is the first token of any target.
    return model.text_generator.encode_target("a").take(np.arange(1))


def shift_right(start: Tokens, tokens: Tokens) -> Tokens:
    """Return what the decoder of an encoder-decoder reads while it writes the same text that the encoder read.

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
