"""Measure every head of a model on blocks of texts, and add the measures up by kind of attention.

`HeadMeasurer` runs the model on batches with the measures of `core.measures` on. `HeadSums` adds up what it gets from a
block, and `Tally` holds the sums over all texts, of a fixed size. `studies.heads.roles` concludes from them.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
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
"""The least count of a unit of evidence, as a share of its queries: less is rounding, and counts nothing."""

# Sums ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Tally:
    """Sums over texts for the heads of one kind of attention.

    Attributes:
        kind: The kind of attention.
        layers: Numbers of the layers, in the order of the first axis.
        names: The measures, in the order of the last axis.
        measures: Each measure, (layer, head, measure).
        uniform: The same under uniform attention over the keys that the mask allows.
        pairs: The value of each pair measure for a head that always looks at one offset, (pair measure, offset).
        lengths: 1 / n of each text of n queries (`weigh_units`).
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
        parts = ("measures", "uniform", "pairs", "lengths")
        return replace(self, **{part: getattr(self, part).merge(getattr(other, part)) for part in parts})


@dataclass(kw_only=True, eq=False)
class HeadSums(Part):
    """The sums over the texts of one block. Each chunk of a text is one unit of evidence, or several.

    With one sum per text, a long text would be a single piece of evidence, and would outweigh many short ones. So each
    chunk counts apart. A long chunk is cut into blocks of its queries, which count apart too (`unit_queries`). Such
    units depend little on each other (the block bootstrap: Künsch 1989, Annals of Statistics 17; Politis & Romano 1994,
    JASA 89).

    All texts weigh the same: the sums and counts of a text of n queries are divided by n. A text in chunks of which one
    is broken is left out from that chunk on. Of a token that two chunks share, `n_tokens` counts one.

    Attributes:
        tallies: The sums by kind of attention; of nothing where no text is whole.
        rows: The rows that were to be kept, by text and chunk, then by kind of attention.
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
    """Return sums and counts of units of evidence, (unit, layer, head, measure), times the weight of their texts.

    The weight is 1 / n for a text of n queries, so that all texts weigh the same. A head that puts everything on sinks
    leaves 1e-40 elsewhere, whose ratios would be those of rounding: such counts are 0.
    """
    weighed = {name: array * weights[:, None, None, None] for name, array in sums.items()}
    is_negligible = weighed["count"] < _LEAST_COUNT
    return {name: np.where(is_negligible, 0.0, array) for name, array in weighed.items()}


def pair_hits(ids: Numbers, causal: bool, context: Flags) -> Floats:
    """Return the value of each pair measure for a head that always looks `offset` tokens further, as hits and counts.

    Tokens of the context, (token,), count nothing as queries.

    Returns:
        Hits and counts, (2, pair measure, offset). The counts are the queries that have such a key on the side of the
        offset. A head that looks both ways counts more queries, so for it this baseline is too high.
    """
    n = len(ids)
    position = np.arange(n)
    asks = ~context
    # The first and the last place of each token's type, (token,).
    _, first, number = np.unique(ids, return_index=True, return_inverse=True)
    first = first[number]
    last = n - 1 - np.unique(ids[::-1], return_index=True)[1][number]

    # Queries with such a key before and after. Induction looks at key j + 1 where x_j = x_i, j < i, but not at i.
    offsets = np.array(OFFSETS)
    is_before = offsets < 0
    n_before = (asks & (first < position)).sum()
    n_after = (asks & (last > position)).sum()
    n_followed = (asks & (first < position - 1)).sum()

    # How many of the asking tokens have the same token at each distance, one further than any offset.
    far = OFFSETS[-1] + 1
    windows = sliding_window_view(np.pad(ids, far, constant_values=-1), n)
    alike = ((windows == ids) & asks).sum(1)
    hits = [alike[offsets + far], np.where(is_before, alike[offsets - 1 + far], 0)]
    counts = [np.where(is_before, n_before, n_after), np.where(is_before, n_followed, 0)]
    is_seen = is_before | ((offsets > 0) & (not causal))
    return np.array([hits, counts], np.float64) * is_seen


# Measuring -------------------------------------------------------------------------------------------------------


def log_frequency(counts: Numbers, ids: Numbers) -> Floats:
    """Return the log frequency of tokens in nats, an array like `ids`, by how often each number of token was counted.

    With add-one smoothing, so that a token that was never counted has a frequency too. Of the vocabulary only the part
    up to the largest number that was seen is known here.
    """
    of_ids = np.append(counts, 0)[np.minimum(ids, len(counts))]
    frequencies: Floats = np.log((of_ids + 1) / (counts.sum() + len(counts)))
    return frequencies


class BatchResult(NamedTuple):
    """The results of one batch, in its order.

    Attributes:
        sums: Kind of attention -> layer -> the measures.
        hits: Kind -> `pair_hits`, (hits or counts, chunk, pair measure, offset); none across two texts, where no offset
            means anything.
        rows: The rows that are kept, by text and chunk, then by kind.
    """

    sums: Mapping[str, Mapping[int, Measured]]
    hits: Mapping[str, Floats]
    rows: Mapping[ChunkKey, dict[str, SampledRows]]


class HeadMeasurer(Measurer[HeadSums]):
    """Measure the heads of a model on blocks of texts.

    `chunk` and `stride` are those of `HeadsOptions`. `sampled` are queries whose rows are kept, by text and chunk. With
    a seed the model's untrained twin is measured.

    Raises:
        AttnscopeError: It has a decoder beside its encoder, and nothing that it could read.
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
        self._dense = model.info.path == "eager"
        self._device = "cpu" if self._dense else model.info.device
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
        """Add the measures of a batch of chunks, and the rows of its texts that are whole."""
        longest = max(map(len, batch))
        size = unit_queries(longest)
        n_units = -(-longest // size)
        sums_by_unit = {
            kind: {layer: of_layer.sum.swapaxes(0, 1) for layer, of_layer in by_layer.items()}
            for kind, by_layer in result.sums.items()
        }
        for unit, place in broken_rows(sums_by_unit).items():
            part.broken.setdefault(batch[unit // n_units].text, place)

        # Whole chunks, and their units; those of padding alone are none.
        rows = [row for row, chunk in enumerate(batch) if chunk.text not in part.broken]
        units = [row * n_units + unit for row in rows for unit in range(-(-len(batch[row]) // size))]
        if not rows:
            return
        # All texts weigh the same: a query of a longer one counts less.
        weights = np.array([1 / chunk.n_queries for chunk in batch])
        for kind, by_layer in result.sums.items():
            stacked = {
                name: stack_layers(by_layer, name)[units] for name in ("sum", "count", "uniform_sum")
            }
            weighed = weigh_units(weights.repeat(n_units)[units], stacked)
            if kind not in part.tallies:
                names = next(iter(by_layer.values())).names
                part.tallies[kind] = Tally.empty(kind, sorted(by_layer), weighed["sum"].shape[2], names)
            tally = part.tallies[kind]
            tally.measures.add(weighed["sum"], weighed["count"])
            tally.uniform.add(weighed["uniform_sum"], weighed["count"])
            if kind in result.hits:
                hits, counts = result.hits[kind] * weights[:, None, None]
                tally.pairs.add(hits[rows], counts[rows])
        for row in rows:
            chunk = batch[row]
            part.n_tokens += len(chunk) - chunk.n_repeated
            if part.complete_text(chunk.text, chunk.n_chunks):
                part.n_texts += 1
                part.n_chunked += chunk.n_chunks > 1
                for tally in part.tallies.values():
                    tally.lengths.add(weights[row], 1.0)
        part.rows |= {key: kept for key, kept in result.rows.items() if key[0] not in part.broken}

    def finish(self, part: HeadSums) -> HeadSums:
        """Return the sums over the whole texts of a block; without one there are none."""
        return part if part.n_texts else replace(part, tallies={}, n_tokens=0)

    def measure(self, batch: Sequence[Chunk]) -> BatchResult:
        """Return the measures of a batch, and the rows that are to be kept of it."""
        import torch

        from attnscope.core.attention.probes import Weights
        from attnscope.core.attention.row_samples import RowSamples
        from attnscope.core.measures import HeadMeasures, measures_of_weights
        from attnscope.models.inside.projections import watch_norms

        # The texts of each kind, and which tokens of them are repeated. A decoder beside an encoder writes them again:
        # its start token stands before them, and the last is not in it.
        tokens = [chunk.tokens for chunk in batch]
        repeated = [chunk.repeated for chunk in batch]
        texts = {kind: (tokens, repeated) for kind in self._model.info.kinds if kind != "cross"}
        targets: list[Tokens] = []
        if self._start is not None:
            targets = [target_of(self._start, text) for text in tokens]
            texts["decoder"] = targets, [np.append(False, of_text[:-1]) for of_text in repeated]
        hits = {}
        for kind, of_kind in texts.items():
            pairs = [
                pair_hits(text.ids, kind == "decoder", context)
                for text, context in zip(*of_kind, strict=True)
            ]
            hits[kind] = np.stack(pairs, 1)
        facts = {kind: self._facts(*of_kind) for kind, of_kind in texts.items()}
        read = next(iter(facts.values()))
        written = facts["decoder"] if targets else None
        inputs = batch_of(tokens, targets).to(self._model.info.device)

        # The queries whose rows are kept, of each chunk.
        wanted: list[tuple[Numbers, int] | None] = []
        for chunk in batch:
            queries = self._sampled.get((chunk.text, chunk.number))
            wanted.append(None if queries is None else (queries, len(chunk)))
        reader = RowSamples(wanted)
        sums: dict[Any, dict[int, Measured]] = {}
        # Not inference_mode: its tensors do not tell when they change, which the measures ask.
        with torch.no_grad():
            if not self._dense:
                with watch_norms(self._blocks) as norms:
                    probe = HeadMeasures(read, written, buffers=self._buffers, norms=norms)
                    reader = RowSamples(wanted, probe)
                    self._model.run(inputs, reader)
                sums |= probe.sums
            else:
                dense = Weights()
                self._model.run(inputs, dense)
                reader.keep_all(dense.maps)
                for kind, by_layer in dense.maps.items():
                    about = (read, written) if kind == "cross" else (facts[kind], None)
                    sums[kind] = {
                        layer: measures_of_weights(weights, *about)
                        for layer, weights in by_layer.items()
                    }
        # Rows by text and chunk.
        by_chunk = {}
        for chunk, rows in zip(batch, reader.rows, strict=True):
            if rows:
                by_chunk[chunk.text, chunk.number] = rows
        return BatchResult(sums, hits, by_chunk)

    def _facts(self, tokens: Sequence[Tokens], repeated: Sequence[Flags]) -> TextFacts:
        """Return the facts that measures need of the texts of a batch, each array (text, token)."""
        import torch

        from attnscope.core.attention.precision import move
        from attnscope.core.facts import TextFacts

        # Where tokens and special tokens are, (text, token).
        lengths = np.array([len(text) for text in tokens])
        real = np.arange(lengths.max()) < lengths[:, None]
        ids = pad_rows([text.ids for text in tokens])
        special = pad_rows([text.special for text in tokens])
        opening = special & (np.cumsum(~special, axis=1) == 0)
        # Special tokens are in every text, and not rare at all.
        frequency = np.where(special, 0.0, log_frequency(self._counts, ids))
        # The first token is left out too: where there is no [CLS], heads rest on it, however rare it is.
        ordinary = np.where(real & ~special & (np.arange(ids.shape[1]) > 0), frequency, np.inf)
        rarest = np.isfinite(ordinary) & (ordinary == ordinary.min(1, keepdims=True))

        def tensor(array: NDArray[Any]) -> Tensor:
            return move(torch.from_numpy(array), self._device)

        # Static embeddings are of length 1, so that products are cosines.
        embeddings = unit_embeddings(self._model, tensor(ids))
        return TextFacts(
            real=tensor(real),
            special=tensor(special),
            ids=tensor(ids),
            cls=tensor(opening),
            sep=tensor(special & ~opening),
            punctuation=tensor(pad_rows([_punctuation(text) for text in tokens])),
            log_frequency=tensor(frequency),
            embeddings=None if embeddings is None else embeddings.to(self._device),
            rarest=tensor(rarest),
            context=tensor(pad_rows(repeated)) if any(map(np.any, repeated)) else None,
            added={
                name: tensor(pad_rows([holds(text) for text in tokens]))
                for name, holds in token_sets().items()
            },
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
    bare = [label.removeprefix("##").replace("·", "") for label in tokens.labels]
    marks = [bool(label) and all(unicodedata.category(c)[0] in "PS" for c in label) for label in bare]
    return np.array(marks, np.bool_) & ~tokens.special


# Texts that a decoder writes again -------------------------------------------------------------------------------


def decoder_start(model: Model) -> Tokens | None:
    """Return tokens that begin with the one that a decoder beside an encoder starts with; None for other models."""
    if len(model.info.kinds) == 1 or model.writer is None:
        return None
    return model.writer.encode_target("a")


def target_of(start: Tokens, tokens: Tokens) -> Tokens:
    """Return the input of a decoder beside an encoder as it writes a text again: its start token, then all but the end.

    `start` is the result of `decoder_start`.
    """
    return replace(
        tokens,
        ids=np.concatenate([start.ids[:1], tokens.ids[:-1]]),
        labels=(*start.labels[:1], *tokens.labels[:-1]),
        offsets=np.concatenate([start.offsets[:1], tokens.offsets[:-1]]),
        special=np.concatenate([start.special[:1], tokens.special[:-1]]),
    )
