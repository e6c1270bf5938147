"""Compare all heads of a model with each other, or with the heads of another model, over any texts.

`core.distance` computes divergences of attention rows. This module runs the models on batches of texts, sums the
divergences over queries and texts, and makes the record.

The *seam* is the function through which a model computes its attention (`core.attention.seam`). It takes an
`AttentionCall`: queries, keys, values and mask of a layer. A `Probe` is a hook in place of that function. A model whose
`info.path` is "eager" does not pass through the seam: it only gives dense attention weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attnscope.arrays import Floats
from attnscope.choice import Choice, ChosenHeads
from attnscope.core.attention.row_samples import read_text_rows
from attnscope.core.attention.seam import AttentionCall, Probe
from attnscope.core.distance import (
    MAX_DIVERGENCE,
    classical_mds,
    cluster_heads,
    match_heads,
    sum_divergences,
)
from attnscope.core.plain_torch import with_default_torch
from attnscope.core.sums import RunningSums
from attnscope.corpus import BLOCK, TOKEN_BUDGET, Chunk, CorpusText, TextBlock, batch_block
from attnscope.corpus.batching import tokens_of
from attnscope.errors import AttnscopeError
from attnscope.host import require_memory
from attnscope.models.info import run_facts
from attnscope.models.model import Batch, Model
from attnscope.questions.compare import Comparison
from attnscope.questions.map_changes import renormalise
from attnscope.results.table import HEADS, Table
from attnscope.studies.compare.options import CompareOptions
from attnscope.studies.failures import NanOrigin
from attnscope.studies.inputs.texts import AnyTexts, ReportProgress, batch_of, special_ids, texts_of
from attnscope.studies.kept_attention import count_heads, keep_attention
from attnscope.studies.run import Measurer, PartialSums, run
from attnscope.studies.workers import Workers

Head = tuple[int, int]
"""A head: (layer, head index)."""

ComparedHeads = tuple[tuple[Head, ...], ...]
"""One tuple of heads per model: of one model, or of the first and the second."""

WEIGHTS_AT_ONCE = 2**20
"""The number of attention weights, of all heads of both models, that are held in memory at once."""

_MAX_SUM_BYTES = 2**28
"""The memory for the sums of a batch. Each text of the batch has sums of its own, for all pairs of heads."""

_BYTES_PER_PAIR = 300
"""The memory that a pair of heads takes: sums, second moments, distances and intervals."""


@with_default_torch
def compare(
    model: Model,
    corpus: AnyTexts,
    options: CompareOptions | None = None,
    *,
    report: ReportProgress | None = None,
    workers: Workers | None = None,
) -> Comparison:
    """Compare all heads of a model with each other.

        comparison = attnscope.compare(model, "The animal didn't cross the street because it was too tired.")
        comparison.distance()  # (head, head)
        comparison["places:hellinger"]  # (head, 2), the map

    The distance of two heads is the root of their mean divergence over all queries of all texts: Σ divergence / Σ
    queries. Near-duplicate texts count once. Padding and batches do not change it.

    Memory grows with the square of the number of heads, but not with the number of texts. It grows with the square of a
    text's length only if the model computes dense weights. After an interruption, the record covers whole blocks of
    texts, or the finished texts of the first block, and says that it is incomplete.

    Args:
        model: A loaded model, see `attnscope.load`.
        corpus: What to run it on: a text, several, or a Corpus.
        options: The distance, and which heads are compared; None = the defaults.
        report: Called after each batch; with workers after each block of texts.
        workers: Processes that load the model by its name and run it, block by block, to the same result; None = this
            process. After an interruption only whole blocks count.

    Raises:
        AttnscopeError: There is no text, the model cannot be compared, or no worker can begin.
    """
    result = _measure((model,), corpus, options, report, (workers,) if workers else None)
    distances = result.distance()
    # Cluster the heads, order them by cluster, and give each head a point in the plane, (head, 2), such that distances
    # in the plane are about those of the heads.
    merges, order = cluster_heads(distances)
    places, *_ = classical_mds(distances)
    name = result.distance_name
    arrays = {f"merges:{name}": merges, f"order:{name}": order, f"places:{name}": places}
    return replace(result, grids={**result.grids, **arrays})


@with_default_torch
def compare_models(
    model: Model,
    other: Model,
    corpus: AnyTexts,
    options: CompareOptions | None = None,
    *,
    report: ReportProgress | None = None,
    workers: tuple[Workers, Workers] | None = None,
) -> Comparison:
    """Compare the heads of two models, or of two checkpoints of one.

    Distances are as in `compare`, between each head of one model and each head of the other. Heads are matched one to
    one so that the sum of their distances is minimal. Both models must split each text into the same tokens.

    Args:
        model: A loaded model, see `attnscope.load`.
        other: The model to compare it with.
        corpus: What to run both on.
        options: As in `compare`.
        report: As in `compare`.
        workers: As in `compare`, for the first model and for the second.

    Raises:
        AttnscopeError: The models split a text into different tokens; else as `compare`.
    """
    result = _measure((model, other), corpus, options, report, workers)
    # The index of the other model's head that each head is matched with, (head,); -1 if the other model has fewer heads
    # and none is left.
    heads, other_heads = match_heads(result.distance()).T
    match = np.full(len(result.table("heads")), -1)
    match[heads] = other_heads
    return replace(result, grids={**result.grids, f"match:{result.distance_name}": match})


@with_default_torch
def without_heads(model: Model, heads: Sequence[Head]) -> Model:
    """Return a copy of a model in which some heads output 0, to compare the model with it.

    Raises:
        AttnscopeError: There is no such head, or the model's attention does not pass the seam.
    """
    require_one_kind(model)
    # `within` refuses heads that the model does not have.
    Choice(pick=tuple(heads)).within(model.info)
    if model.info.path != "seam":
        raise AttnscopeError(
            f"{model.info.name} does not pass its attention through the seam: no head can be taken out"
        )
    # The shallow copy shares the network. It runs it with a probe that calls the given probe, then zeroes the heads.
    ablated = copy(model)

    def run_without(batch: Batch, probe: Probe) -> Tensor:
        def attend_without(call: AttentionCall) -> Tensor:
            # (text, head, query, d_head)
            output = probe(call).clone()
            output[:, [head for layer, head in heads if layer == call.layer]] = 0
            return output

        return model.run(batch, attend_without)

    ablated.run = run_without  # type: ignore[method-assign]
    names = ", ".join(f"L{layer}H{head}" for layer, head in heads)
    ablated.info = replace(model.info, name=f"{model.info.name} without {names}")
    return ablated


def _measure(
    models: tuple[Model, ...],
    corpus: AnyTexts,
    options: CompareOptions | None,
    report: ReportProgress | None,
    workers: tuple[Workers, ...] | None,
) -> Comparison:
    """Run one model or two on the texts, and return the distances of all pairs of their heads."""
    options = options or CompareOptions()
    # Refuse models and heads that cannot be compared before anything runs.
    for model in models:
        require_one_kind(model)
        options.choice.within(model.info)
    texts = texts_of(corpus)
    # `run` measures block by block, here or in workers, and adds the sums of all blocks up in `outcome.done`.
    outcome = run(
        partial(PairMeasurer, options=options),
        models,
        texts,
        DistanceSums(),
        block_size=BLOCK,
        workers=workers,
        report=report,
        step="the comparison on a later text",
    )
    sums = outcome.done
    # An interruption before the first finished text leaves nothing to report.
    if not sums.n_texts and not outcome.complete:
        raise KeyboardInterrupt
    # Texts on which a model computes NaN are left out: refuse if these are all texts.
    sums.left_out.require_some_left(sums.n_texts, models[0].info)
    if not sums.n_tokens:
        raise AttnscopeError("no text is left: none has any token", "give texts with words in them")

    # Make the record. All texts have the same heads, so `divergences` has exactly one entry.
    ((heads, divergences),) = sums.divergences.items()
    record_options: dict[str, Any] = {"compared": "heads", "distances": [options.distance]}
    tables = {"heads": make_heads_table(models[0], heads[0])}
    if len(models) > 1:
        record_options |= {"compared": "models", "other_run": run_facts(models[1].info)}
        tables["other_heads"] = make_heads_table(models[1], heads[1])
    record_corpus = outcome.corpus(texts, models[0].info)
    record_corpus["text"] = corpus if isinstance(corpus, str) else None
    arrays = make_distance_arrays(divergences, options)
    return Comparison(
        outcome.describe_run(models[0].info), record_corpus, record_options, tables, arrays
    )


def make_distance_arrays(divergences: RunningSums, options: CompareOptions) -> dict[str, Floats]:
    """Return the distances of all pairs of heads, their intervals over texts, and their numbers of queries.

    A distance is the square root of the mean divergence over queries.

    Returns:
        Arrays (head, head) by name; the ends of intervals are NaN for fewer than 2 texts.
    """
    # (low or high, head, head)
    ends = np.clip(divergences.interval(), 0.0, MAX_DIVERGENCE[options.measure])  # type: ignore[index]
    low, high = np.sqrt(ends)
    name = options.distance
    return {
        f"distance:{name}": np.sqrt(divergences.ratio()),
        f"distance_low:{name}": low,
        f"distance_high:{name}": high,
        f"distance_count:{name}": divergences.total("c"),
    }


# Over blocks of texts


@dataclass(kw_only=True, eq=False)
class DistanceSums(PartialSums):
    """Hold sums over texts.

    Attributes:
        divergences: The heads that are compared -> the divergences of all pairs, (head, head), and their queries as
            counts. All texts have the same heads, so there is one entry; before the first text there is no entry.
        _unfinished: Index of a text of which some chunks are still missing -> the sums of its chunks so far.
    """

    divergences: dict[ComparedHeads, RunningSums] = field(default_factory=dict)
    _unfinished: dict[int, Any] = field(default_factory=dict)


class PairMeasurer(Measurer[DistanceSums]):
    """Compare the heads of one model, or of two, on blocks of texts.

    `run` cuts each block into batches with `batches`, calls `measure` on each batch, and `add` with its result.
    """

    def __init__(self, *models: Model, options: CompareOptions) -> None:
        super().__init__(models[0].tokenizer)
        self._models = models
        self._options = options
        self._chosen = [options.choice.within(model.info) for model in models]
        # Refuse sums that do not fit into memory before the models run for minutes. With one model, the first and the
        # last are the same: it is compared with itself.
        n_first = self._chosen[0].n_heads
        n_second = self._chosen[-1].n_heads
        self._n_pairs = n_first * n_second
        require_memory(
            self._n_pairs * _BYTES_PER_PAIR,
            f"all pairs of {n_first} and {n_second} heads",
            "choose fewer layers and heads (-L, -H)",
        )

    def start(self, block: TextBlock) -> DistanceSums:
        """Return empty sums."""
        return DistanceSums()

    def batches(self, block: TextBlock) -> list[Sequence[Chunk]]:
        """Cut a block into batches, the longest texts first; refuse texts that the models split differently."""
        first = self._models[0]
        special = special_ids(first)
        if len(self._models) > 1:
            for text in block.texts:
                _require_same_tokens(self._models, text, special)
        # Cut texts into chunks that fit both models. A model without a limit has `max_tokens` None.
        limits = [model.info.max_tokens for model in self._models if model.info.max_tokens]
        batches = batch_block(
            block,
            first.tokenizer.encode,
            limit=min(limits, default=None),
            special_ids=special,
            budget=TOKEN_BUDGET,
        )
        # Split batches by memory: each text has a sum and a count, 8 bytes each, for every pair of heads.
        max_texts = max(1, _MAX_SUM_BYTES // (2 * 8 * self._n_pairs))
        small_batches: list[Sequence[Chunk]] = []
        # `batch_block` returns the shortest texts first.
        for batch in batches[::-1]:
            small_batches += [batch[i : i + max_texts] for i in range(0, len(batch), max_texts)]
        return small_batches

    def measure(self, batch: Sequence[Chunk]) -> tuple[ComparedHeads, list[Floats | NanOrigin]]:
        """Return the heads of each model, and for each chunk what `_sum_chunk` returns."""
        inputs = batch_of([chunk.tokens for chunk in batch])
        attentions = [
            _BatchAttention(model, inputs, chosen)
            for model, chosen in zip(self._models, self._chosen, strict=True)
        ]
        heads = tuple(attention.heads for attention in attentions)
        return heads, [self._sum_chunk(attentions, row, chunk) for row, chunk in enumerate(batch)]

    def add(
        self,
        part: DistanceSums,
        batch: Sequence[Chunk],
        result: tuple[ComparedHeads, list[Floats | NanOrigin]],
    ) -> None:
        """Add the chunks of a batch; leave out texts on which a model computes NaN or infinity."""
        heads, results = result
        finished = []
        for chunk, sums in zip(batch, results, strict=True):
            # A tuple is no sums, but the (kind, layer) of a NaN or an infinity.
            if isinstance(sums, tuple):
                part.broken.setdefault(chunk.text_index, sums)
            if chunk.text_index in part.broken:
                continue
            # Sum the chunks of a text. `count_row` returns True at the last of its chunks.
            part._unfinished[chunk.text_index] = part._unfinished.get(chunk.text_index, 0.0) + sums
            if part.count_row(chunk.text_index, chunk.n_chunks):
                finished.append(part._unfinished.pop(chunk.text_index))
                part.n_texts += 1
                part.n_tokens += chunk.n_text_tokens
                part.n_chunked += chunk.n_chunks > 1
        if finished:
            # Sums and counts of the finished texts, (text, head, head) each.
            divergences, counts = np.stack(finished, 1)
            if heads not in part.divergences:
                part.divergences[heads] = RunningSums(divergences.shape[1:])
            part.divergences[heads].add(divergences, counts)

    def _sum_chunk(
        self, attentions: Sequence[_BatchAttention], row: int, chunk: Chunk
    ) -> Floats | NanOrigin:
        """Return the divergences of a chunk summed over queries, and the number of queries, (2, head, head).

        If a weight is NaN or infinite, return its kind and layer instead. `row` is the index of the chunk in the batch.
        """
        # Take some queries at a time: at most WEIGHTS_AT_ONCE weights in all heads, but at least 16 queries.
        n_tokens = len(chunk)
        n_heads = sum(len(attention.heads) for attention in attentions)
        n_queries = max(16, WEIGHTS_AT_ONCE // max(1, n_tokens * n_heads))
        is_shown = ~chunk.tokens.sinks(attentions[0].kind)
        # With one model, the first and the last attention are the same.
        total = np.zeros((2, len(attentions[0].heads), len(attentions[-1].heads)))
        for queries in torch.arange(n_tokens).split(n_queries):  # type: ignore[no-untyped-call]
            # Of each model, (head, query, key).
            weights = [attention.read_rows(row, queries, n_tokens) for attention in attentions]
            for attention, rows in zip(attentions, weights, strict=True):
                # Return the layer of the first head with a NaN or an infinity.
                is_finite = np.isfinite(rows).all((1, 2))
                if not is_finite.all():
                    layer, _ = attention.heads[is_finite.argmin()]
                    return attention.kind, layer
            # Leave out special tokens as queries and as keys, and renormalise the rows.
            if self._options.hide_special:
                rows_shown = is_shown[queries]
                weights = [renormalise(rows[:, rows_shown][:, :, is_shown]) for rows in weights]
            total += np.stack(sum_divergences(self._options.measure, *weights))  # type: ignore[arg-type]  # one of MEASURES
        return total


class _BatchAttention:
    """Hold a model's attention on a batch. Making it runs the model.

    Attributes:
        kind: The model's only kind of attention: "encoder" or "decoder".
        heads: The heads that are compared, in order of layers.
    """

    def __init__(self, model: Model, batch: Batch, chosen: ChosenHeads) -> None:
        self.kind = model.info.kinds[0]
        self._layers = sorted(keep_attention(model, batch, chosen.layers).get(self.kind, {}).items())
        # All heads of these layers, and the indices of the chosen heads among them.
        all_heads: list[Head] = []
        for layer, attention in self._layers:
            all_heads += product([layer], range(count_heads(attention)))
        chosen_heads = chosen.picked or [*product(chosen.layers, chosen.heads)]
        self._indices = [index for index, head in enumerate(all_heads) if head in chosen_heads]
        self.heads = tuple(all_heads[index] for index in self._indices)
        if not self.heads:
            raise AttnscopeError(
                "none of the chosen layers and heads has attention", "choose others with -L and -H"
            )

    def read_rows(self, row: int, queries: Tensor, n_keys: int) -> NDArray[Any]:
        """Return the weights of some queries of a text, (head, query, key); `row` is the text's index in the batch."""
        weights_of_layers = []
        for _, attention in self._layers:
            weights, _ = read_text_rows(attention, self.kind, row, queries, n_keys)
            weights_of_layers.append(weights)
        return torch.cat(weights_of_layers).numpy()[self._indices]


def make_heads_table(model: Model, heads: Sequence[Head]) -> Table:
    """Return a table with one row per head: its kind of attention, layer and index."""
    kind = model.info.kinds[0]
    return Table.of_rows(HEADS, [(kind, *head) for head in heads])


def require_one_kind(model: Model) -> None:
    """Refuse a model with several kinds of attention, such as an encoder-decoder."""
    if len(model.info.kinds) > 1:
        raise AttnscopeError(
            f"{model.info.name} has an encoder and a decoder; heads are compared in models that have one of them",
            "look at single texts with: attnscope heatmap",
        )


def _require_same_tokens(models: Sequence[Model], text: CorpusText, special: frozenset[int]) -> None:
    """Refuse a text that two models split into different tokens."""
    labels_of_models = [tokens_of(text, model.tokenizer.encode, special).labels for model in models]
    if labels_of_models[0] != labels_of_models[1]:
        names = " and ".join(model.info.name for model in models)
        beginnings = " and ".join(f"{' '.join(labels[:8])} …" for labels in labels_of_models)
        raise AttnscopeError(
            f"{names} split the same text into different tokens: {beginnings}",
            "compare models that share a tokenizer, such as two checkpoints of one",
        )
