"""Measure every head of a model on blocks of texts, and add the measures up by kind of attention.

`HeadMeasurer` runs the model on batches with the measures of `core.measures` on. `HeadSums` adds up the measures of a
block, and `Tally` holds the sums over all texts, of a fixed size. `studies.heads.roles` tests them.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from attnscope.core.catalogue import unit_queries
from attnscope.core.sums import RunningSums
from attnscope.corpus import TOKEN_BUDGET, Block, Chunk, block_batches
from attnscope.models.model import Model
from attnscope.plugins import token_sets
from attnscope.results.tokens import Tokens
from attnscope.studies.failures import broken_rows
from attnscope.studies.inputs.texts import batch_of, pad_rows
from attnscope.studies.run import Measurer, Part

if TYPE_CHECKING:
    from torch import Tensor

    from attnscope.core.attention.row_samples import SampledRows
    from attnscope.core.catalogue import Measured
    from attnscope.core.facts import TextFacts

Floats = NDArray[np.float64]
Numbers = NDArray[np.int64]
Flags = NDArray[np.bool_]
ChunkKey = tuple[int, int]
"""The index of a text, and the number of its chunk."""

PAIR_MEASURES = ("same_token", "induction")
"""Measures of links between two tokens of the text, which a head of a fixed offset may hit by chance."""

OFFSETS = tuple(range(-8, 9))
"""The fixed offsets that are tried: key minus query, in tokens."""

_LEAST_COUNT = 1e-9
"""The least count of a unit of evidence, as a share of its queries: a smaller one is rounding, and becomes 0."""

# Sums


@dataclass(frozen=True, eq=False)
class Tally:
    """Hold the sums over texts for the heads of one kind of attention.

    Attributes:
        kind: The kind of attention.
        layers: Numbers of the layers, in the order of the first axis.
        names: The measures, in the order of the last axis.
        measures: Each measure, (layer, head, measure).
        uniform: The same under uniform attention over the keys that the mask allows.
        pairs: The value of each pair measure for a head that always looks at one offset, (pair measure, offset).
        lengths: The mean of 1 / n over texts of n queries, by which texts are weighed (`weigh_units`).
    """

    kind: str
    layers: tuple[int, ...]
    names: tuple[str, ...]
    measures: RunningSums
    uniform: RunningSums
    pairs: RunningSums = field(default_factory=lambda: RunningSums((len(PAIR_MEASURES), len(OFFSETS))))
    lengths: RunningSums = field(default_factory=RunningSums)

    @classmethod
    def empty(cls, kind: str, layers: Sequence[int], n_heads: int, names: Sequence[str]) -> Tally:
        """Return a tally of no text."""
        shape = len(layers), n_heads, len(names)
        return cls(kind, tuple(layers), tuple(names), RunningSums(shape), RunningSums(shape))

    @property
    def n_texts(self) -> int:
        """Return how many units of evidence are in it."""
        return self.measures.n_texts

    @property
    def queries_per_count(self) -> float:
        """Return how many queries a count of 1 stands for: the harmonic mean length of texts; 1 without any."""
        return 1 / float(self.lengths.ratio()) if self.lengths.n_texts else 1.0

    def merge(self, other: Tally) -> Tally:
        """Return the sums over the texts of both."""
        return replace(
            self,
            measures=self.measures.merge(other.measures),
            uniform=self.uniform.merge(other.uniform),
            pairs=self.pairs.merge(other.pairs),
            lengths=self.lengths.merge(other.lengths),
        )


@dataclass(kw_only=True, eq=False)
class HeadSums(Part):
    """Hold the sums over the texts of one block. Each chunk of a text is one unit of evidence, or several.

    With one sum per text, a long text would be a single piece of evidence, and would outweigh many short ones. So each
    chunk counts apart. A long chunk is cut into blocks of its queries, which count apart too (`unit_queries`). Such
    units depend little on each other (the block bootstrap: Künsch 1989, Annals of Statistics 17; Politis & Romano 1994,
    JASA 89).

    All texts weigh the same: the sums and counts of a text of n queries are divided by n. If one chunk of a text is
    broken, later ones are left out. `n_tokens` counts a token that two chunks share once.

    Attributes:
        tallies: The sums by kind of attention; empty if no text is whole.
        rows: The rows of attention that were to be kept, by text and chunk, then by kind of attention.
    """

    tallies: dict[str, Tally] = field(default_factory=dict)
    rows: dict[ChunkKey, dict[str, SampledRows]] = field(default_factory=dict)


def stack_layers(by_layer: Mapping[int, Measured], part: str) -> Floats:
    """Return one array of the measures of layers, (unit, layer, head, measure); 0 where a layer has fewer heads."""
    # Layers may have different numbers of heads: the smaller ones are padded.
    arrays = [getattr(by_layer[layer], part) for layer in sorted(by_layer)]
    n_measures, n_units, _ = arrays[0].shape
    n_heads = max(array.shape[2] for array in arrays)
    stacked = np.zeros((n_units, len(arrays), n_heads, n_measures))
    for number, array in enumerate(arrays):
        stacked[:, number, : array.shape[2]] = np.moveaxis(array, 0, -1)
    return stacked


def weigh_units(weights: Floats, sums: Mapping[str, Floats]) -> dict[str, Floats]:
    """Return sums and counts of units of evidence times the weights of their texts.

    A text of n queries has the weight 1 / n, so that all texts weigh the same. A head that puts everything on sinks
    leaves 1e-40 elsewhere, whose ratios would be those of rounding: such counts, and their sums, become 0.

    Args:
        weights: The weight of each unit, (unit,).
        sums: Arrays by name, (unit, layer, head, measure) each; one of them is the "count".
    """
    of_units = weights[:, None, None, None]
    is_negligible = sums["count"] * of_units < _LEAST_COUNT
    return {name: np.where(is_negligible, 0.0, array * of_units) for name, array in sums.items()}


def pair_hits(ids: Numbers, causal: bool, context: Flags) -> Floats:
    """Return the value of each pair measure for a head that always looks at one offset, as hits and counts.

    Args:
        ids: The tokens by number, (token,).
        causal: Whether heads look back only.
        context: Which tokens count nothing as queries, (token,).

    Returns:
        Hits and counts, (2, pair measure, offset). The counts are the queries that have such a key on the side of the
        offset. A head that looks both ways counts more queries, so for it this baseline is too high.
    """
    n = len(ids)
    position = np.arange(n)
    asks = ~context
    # The first and the last place at which each token stands, (token,): one per type, then one per token.
    _, first, type_of = np.unique(ids, return_index=True, return_inverse=True)
    _, from_end = np.unique(ids[::-1], return_index=True)
    first = first[type_of]
    last = n - 1 - from_end[type_of]

    # Queries with such a key before and after. Induction looks at key j + 1 where x_j = x_i, j < i, but not at i.
    offsets = np.array(OFFSETS)
    is_before = offsets < 0
    n_before = (asks & (first < position)).sum()
    n_after = (asks & (last > position)).sum()
    n_followed = (asks & (first < position - 1)).sum()

    # How many of the asking tokens have the same token at each distance from -far to far: one more than any offset.
    far = OFFSETS[-1] + 1
    # (distance, token): row far + d holds the token that is d tokens further; -1 beyond the text.
    windows = sliding_window_view(np.pad(ids, far, constant_values=-1), n)
    alike = ((windows == ids) & asks).sum(1)
    hits = [alike[offsets + far], np.where(is_before, alike[offsets - 1 + far], 0)]
    counts = [np.where(is_before, n_before, n_after), np.where(is_before, n_followed, 0)]
    is_seen = is_before | ((offsets > 0) & (not causal))
    return np.array([hits, counts], np.float64) * is_seen


# Measuring


def log_frequency(counts: Numbers, ids: Numbers) -> Floats:
    """Return the natural logarithms of the relative frequencies of tokens.

    One is added to each count, so that a token that was never counted has a frequency too. Of the vocabulary, only the
    part up to the largest number that was seen is known here.

    Args:
        counts: How often each token was counted, by its number.
        ids: The tokens by number, of any shape, which is that of the result.
    """
    of_ids = np.append(counts, 0)[np.minimum(ids, len(counts))]
    frequencies: Floats = np.log((of_ids + 1) / (counts.sum() + len(counts)))
    return frequencies


class BatchResult(NamedTuple):
    """Hold the results of one batch, in its order.

    Attributes:
        sums: Kind of attention -> layer -> the measures.
        hits: Kind -> `pair_hits`, (hits or counts, chunk, pair measure, offset). Cross-attention has none: between two
            texts, an offset means nothing.
        rows: The rows of attention that are kept, by text and chunk, then by kind.
    """

    sums: Mapping[str, Mapping[int, Measured]]
    hits: Mapping[str, Floats]
    rows: Mapping[ChunkKey, dict[str, SampledRows]]


class HeadMeasurer(Measurer[HeadSums]):
    """Measure the heads of a model on blocks of texts.

    Args:
        model: The model.
        counts: How often each token occurs in the corpus, by its number.
        special: The numbers of special tokens.
        chunk: As in `HeadsOptions`; likewise `stride`.
        sampled: Queries whose rows of attention are kept, by text and chunk.
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
        # Models outside the seam give dense weights alone, on the processor.
        self._is_dense = model.info.path == "eager"
        self._device = "cpu" if self._is_dense else model.info.device
        self._start = decoder_start(model)
        self._blocks = model.blocks()
        self._buffers = Buffers()

    def start(self, block: Block) -> HeadSums:
        """Return sums of nothing yet."""
        return HeadSums()

    def batches(self, block: Block) -> Sequence[Sequence[Chunk]]:
        """Cut a block into batches, the longest texts first."""
        batches: Sequence[Sequence[Chunk]] = block_batches(
            block,
            self._model.tokenizer.encode,
            limit=self._model.info.max_tokens,
            budget=TOKEN_BUDGET,
            special_ids=self._special,
            **self._cut,
        )
        return batches[::-1]

    def add(self, part: HeadSums, batch: Sequence[Chunk], result: BatchResult) -> None:
        """Add the measures of a batch of chunks, and count the texts that are whole now."""
        # Each chunk has as many units of evidence as the longest one.
        size = unit_queries(max(map(len, batch)))
        n_units = -(-max(map(len, batch)) // size)
        by_unit: dict[str, dict[int, Any]] = {}
        for kind, by_layer in result.sums.items():
            by_unit[kind] = {}
            for layer, measured in by_layer.items():
                # (measure, unit, head) → (unit, measure, head)
                by_unit[kind][layer] = measured.sum.swapaxes(0, 1)
        for unit, place in broken_rows(by_unit).items():
            part.broken.setdefault(batch[unit // n_units].text_index, place)

        # Chunks of texts that are not broken, and their units that are more than padding.
        rows = [row for row, chunk in enumerate(batch) if chunk.text_index not in part.broken]
        if not rows:
            return
        units: list[int] = []
        for row in rows:
            first = row * n_units
            units += range(first, first - (-len(batch[row]) // size))
        # All texts weigh the same: a query of a longer one counts less.
        weights = np.array([1 / chunk.n_queries for chunk in batch])
        of_units = weights.repeat(n_units)[units]
        for kind, by_layer in result.sums.items():
            sums = {
                name: stack_layers(by_layer, name)[units] for name in ("sum", "count", "uniform_sum")
            }
            weighed = weigh_units(of_units, sums)
            if kind not in part.tallies:
                names = next(iter(by_layer.values())).names
                n_heads = weighed["sum"].shape[2]
                part.tallies[kind] = Tally.empty(kind, sorted(by_layer), n_heads, names)
            tally = part.tallies[kind]
            tally.measures.add(weighed["sum"], weighed["count"])
            tally.uniform.add(weighed["uniform_sum"], weighed["count"])
            if kind in result.hits:
                hits, counts = result.hits[kind] * weights[:, None, None]
                tally.pairs.add(hits[rows], counts[rows])
        for row in rows:
            chunk = batch[row]
            part.n_tokens += len(chunk) - chunk.n_repeated
            key = (chunk.text_index, chunk.number)
            if key in result.rows:
                part.rows[key] = result.rows[key]
            if part.complete_text(chunk.text_index, chunk.n_chunks):
                part.n_texts += 1
                part.n_chunked += chunk.n_chunks > 1
                for tally in part.tallies.values():
                    tally.lengths.add(weights[row], 1.0)

    def finish(self, part: HeadSums) -> HeadSums:
        """Return the sums of a block; empty ones if no text of it is whole."""
        return part if part.n_texts else replace(part, tallies={}, n_tokens=0)

    def measure(self, batch: Sequence[Chunk]) -> BatchResult:
        """Return the measures of a batch, and the rows that are to be kept of it."""
        import torch

        from attnscope.core.attention.probes import Weights
        from attnscope.core.attention.row_samples import RowSamples
        from attnscope.core.measures import HeadMeasures, measures_of_weights
        from attnscope.models.inside.projections import watch_norms

        # What the heads of each kind read, and which tokens of it are repeated.
        tokens = [chunk.tokens for chunk in batch]
        repeated = [chunk.repeated for chunk in batch]
        texts = dict.fromkeys(self._model.info.kinds, (tokens, repeated))
        texts.pop("cross", None)
        # A decoder beside an encoder writes the text again: it reads its start token first, and never the last token.
        targets: list[Tokens] = []
        if self._start is not None:
            targets = [target_of(self._start, text) for text in tokens]
            texts["decoder"] = targets, [np.append(False, of_text[:-1]) for of_text in repeated]
        hits = {}
        facts = {}
        for kind, (of_kind, contexts) in texts.items():
            is_causal = kind == "decoder"
            pairs = [
                pair_hits(text.ids, is_causal, context)
                for text, context in zip(of_kind, contexts, strict=True)
            ]
            hits[kind] = np.stack(pairs, 1)
            facts[kind] = self._facts(of_kind, contexts)
        read = next(iter(facts.values()))
        written = facts["decoder"] if targets else None
        inputs = batch_of(tokens, targets).to(self._model.info.device)

        # The queries whose rows are kept, of each chunk.
        wanted: list[tuple[Numbers, int] | None] = []
        for chunk in batch:
            queries = self._sampled.get((chunk.text_index, chunk.number))
            wanted.append(None if queries is None else (queries, len(chunk)))
        reader = RowSamples(wanted)
        sums: dict[Any, dict[int, Measured]] = {}
        # Not inference_mode: its tensors do not tell when they change, which the measures ask.
        with torch.no_grad():
            if self._is_dense:
                dense = Weights()
                self._model.run(inputs, dense)
                reader.keep_all(dense.maps)
                for kind, by_layer in dense.maps.items():
                    about = (read, written) if kind == "cross" else (facts[kind], None)
                    sums[kind] = {}
                    for layer, weights in by_layer.items():
                        sums[kind][layer] = measures_of_weights(weights, *about)
            else:
                with watch_norms(self._blocks) as norms:
                    probe = HeadMeasures(read, written, buffers=self._buffers, norms=norms)
                    reader = RowSamples(wanted, probe)
                    self._model.run(inputs, reader)
                sums |= probe.sums
        # Rows by text and chunk.
        by_chunk = {}
        for chunk, rows in zip(batch, reader.rows, strict=True):
            if rows:
                by_chunk[chunk.text_index, chunk.number] = rows
        return BatchResult(sums, hits, by_chunk)

    def _facts(self, tokens: Sequence[Tokens], repeated: Sequence[Flags]) -> TextFacts:
        """Return the facts that measures need of the texts of a batch, each array (text, token)."""
        import torch

        from attnscope.core.attention.precision import move
        from attnscope.core.facts import TextFacts

        def tensor(array: NDArray[Any]) -> Tensor:
            return move(torch.from_numpy(array), self._device)

        def flags(of_text: Callable[[Tokens], Flags]) -> Tensor:
            return tensor(pad_rows([*map(of_text, tokens)]))

        # Where tokens and special tokens are, (text, token).
        lengths = np.array([*map(len, tokens)])
        real = np.arange(lengths.max()) < lengths[:, None]
        ids = pad_rows([text.ids for text in tokens])
        special = pad_rows([text.special for text in tokens])
        opening = special & (np.cumsum(~special, axis=1) == 0)
        # Special tokens are in every text, and not rare at all.
        frequency = np.where(special, 0.0, log_frequency(self._counts, ids))
        # The first token is left out too: where there is no [CLS], heads rest on it, however rare it is.
        ordinary = np.where(real & ~special & (np.arange(ids.shape[1]) > 0), frequency, np.inf)
        rarest = np.isfinite(ordinary) & (ordinary == ordinary.min(1, keepdims=True))
        # Static embeddings are of length 1, so that products are cosines.
        embeddings = unit_embeddings(self._model, tensor(ids))
        if embeddings is not None:
            embeddings = embeddings.to(self._device)
        context = None
        if any(map(np.any, repeated)):
            context = tensor(pad_rows(repeated))
        return TextFacts(
            real=tensor(real),
            special=tensor(special),
            ids=tensor(ids),
            cls=tensor(opening),
            sep=tensor(special & ~opening),
            punctuation=flags(_punctuation),
            log_frequency=tensor(frequency),
            embeddings=embeddings,
            rarest=tensor(rarest),
            context=context,
            added={name: flags(holds) for name, holds in token_sets().items()},
        )


def unit_embeddings(model: Model, ids: Tensor) -> Tensor | None:
    """Return static embeddings of length 1, (batch, token, d), float32, on the model's device; None if not known."""
    import torch

    rows = model.static_embeddings(ids.to(model.info.device))
    if rows is None:
        return None
    lengths: Tensor = rows.float().norm(dim=-1, keepdim=True)
    return rows.float() / lengths.clamp(min=torch.finfo(torch.float32).tiny)


def _punctuation(tokens: Tokens) -> Flags:
    """Return which tokens are punctuation and nothing else."""
    marks = np.zeros(len(tokens), np.bool_)
    for place, label in enumerate(tokens.labels):
        bare = label.removeprefix("##").replace("·", "")
        marks[place] = bool(bare) and all(unicodedata.category(letter)[0] in "PS" for letter in bare)
    return marks & ~tokens.special


# Texts that a decoder writes again


def decoder_start(model: Model) -> Tokens | None:
    """Return the one token that a decoder beside an encoder starts with; None for other models."""
    if len(model.info.kinds) == 1 or model.writer is None:
        return None
    return model.writer.encode_target("a").take(np.arange(1))


def target_of(start: Tokens, tokens: Tokens) -> Tokens:
    """Return the input of a decoder beside an encoder as it writes a text again: its start token, then all but the end.

    `start` is the result of `decoder_start`.
    """
    return replace(
        tokens,
        ids=np.concatenate([start.ids, tokens.ids[:-1]]),
        labels=(*start.labels, *tokens.labels[:-1]),
        offsets=np.concatenate([start.offsets, tokens.offsets[:-1]]),
        special=np.concatenate([start.special, tokens.special[:-1]]),
    )
