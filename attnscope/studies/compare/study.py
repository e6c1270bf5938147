"""Compare all heads of a model with each other, or with those of another model, over any texts."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product, repeat
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attnscope.choice import Choice, Chosen
from attnscope.core.attention.row_samples import read_rows
from attnscope.core.attention.seam import AttentionCall, Probe
from attnscope.core.distance import LARGEST, best_matching, classical_mds, cluster_heads, divergence_sums
from attnscope.core.plain_torch import with_plain_torch
from attnscope.core.sums import RunningSums
from attnscope.corpus import BLOCK, TOKEN_BUDGET, Block, Chunk, CorpusText, block_batches
from attnscope.corpus.batching import tokens_of
from attnscope.errors import AttnscopeError
from attnscope.host import require_memory
from attnscope.models.model import Batch, Model
from attnscope.questions.compare import Comparison
from attnscope.questions.map_changes import renormalise
from attnscope.results.table import HEADS, Table
from attnscope.studies.compare.options import CompareOptions
from attnscope.studies.failures import Place
from attnscope.studies.inputs.provenance import run_of
from attnscope.studies.inputs.texts import AnyTexts, Report, batch_of, special_ids, texts_of
from attnscope.studies.run import Measurer, Part, run
from attnscope.studies.seen import count_heads, see
from attnscope.studies.workers import Workers

Floats = NDArray[np.float64]

HeadPlace = tuple[int, int]
"""Layer and head."""

Compared = tuple[tuple[HeadPlace, ...], ...]
"""The heads of the model, or of each of two."""

WEIGHTS_AT_ONCE = 2**20
"""How many weights of all layers and models together distances are computed on at once."""

_BYTES_AT_ONCE = 2**28
"""How large the sums of single texts may become before they are added up."""

_BYTES_A_PAIR = 300
"""The memory that a pair of heads takes: sums, moments, and what is computed from them."""


@with_plain_torch
def compare(
    model: Model,
    corpus: AnyTexts,
    options: CompareOptions | None = None,
    *,
    report: Report | None = None,
    workers: Workers | None = None,
) -> Comparison:
    """Compare all heads of a model with each other.

        comparison = attnscope.compare(model, "The animal didn't cross the street because it was too tired.")
        comparison.distance()  # (head, head)
        comparison["places:hellinger"]  # (head, 2), the map

    The distance of two heads is the root of their mean divergence over all queries of all texts: Σ divergence / Σ
    queries. Near-duplicate texts count once. Padding and batches do not change it.

    Memory does not grow with the number of texts, but with the square of the number of heads. It does not grow with the
    square of a text's length either, unless the model only has dense weights. After an interruption, the record covers
    whole blocks of texts, or the texts done of the first one, and says that it is incomplete.

    Args:
        model: A loaded model, see `attnscope.load`.
        corpus: What to run it on: a text, several, or a Corpus.
        options: How.
        report: Called after each batch; with workers after each block of texts.
        workers: Who runs the model, block by block, to the same result; None = this process. They load it by its name,
            and after an interruption whole blocks count.

    Raises:
        AttnscopeError: There is no text, the model cannot be compared, or no worker can begin.
    """
    result = _measure(
        (model,),
        corpus,
        options or CompareOptions(),
        report,
        (workers,) if workers else None,
    )
    distances = result.distance()
    # Clusters of heads, the order of heads by clusters, and a place in the plane for each head.
    merges, order = cluster_heads(distances)
    places, *_ = classical_mds(distances)
    name = result.distance_name
    arrays = {f"merges:{name}": merges, f"order:{name}": order, f"places:{name}": places}
    return replace(result, grids={**result.grids, **arrays})


@with_plain_torch
def compare_models(
    model: Model,
    other: Model,
    corpus: AnyTexts,
    options: CompareOptions | None = None,
    *,
    report: Report | None = None,
    workers: tuple[Workers, Workers] | None = None,
) -> Comparison:
    """Compare the heads of two models, or of two checkpoints of one.

    Distances are as in `compare`, between each head of one model and each head of the other. Heads are matched so that
    the sum of their distances is least. Both models must cut each text into the same tokens.

    Args:
        model: A loaded model, see `attnscope.load`.
        other: The model to compare it with.
        corpus: What to run both on.
        options: How.
        report: As in `compare`.
        workers: As in `compare`, for the first model and for the second.

    Raises:
        AttnscopeError: The models cut a text into different tokens; else as `compare`.
    """
    result = _measure(
        (model, other),
        corpus,
        options or CompareOptions(),
        report,
        workers,
    )
    # Which head of the other model each head is matched with; -1 = none, (head,).
    rows, columns = best_matching(result.distance()).T
    match = np.full(len(result.table("heads")), -1)
    match[rows] = columns
    return replace(result, grids={**result.grids, f"match:{result.distance_name}": match})


@with_plain_torch
def without_heads(model: Model, heads: Sequence[HeadPlace]) -> Model:
    """Return the same model with the output of some heads set to 0: to be compared with it.

    Raises:
        AttnscopeError: There is no such head, or the model's attention does not pass the seam.
    """
    require_one_kind(model)
    Choice(pick=tuple(heads)).within(model.info)
    if model.info.path != "seam":
        raise AttnscopeError(
            f"{model.info.name} does not pass its attention through the seam: no head can be taken out"
        )
    # The same network, whose attention gives nothing at these heads.
    other = copy(model)

    def run_without(batch: Batch, probe: Probe) -> Tensor:
        def attend_without(call: AttentionCall) -> Tensor:
            output = probe(call).clone()
            output[:, [head for layer, head in heads if layer == call.layer]] = 0
            return output

        return model.run(batch, attend_without)

    other.run = run_without  # type: ignore[method-assign]
    names = ", ".join(f"L{layer}H{head}" for layer, head in heads)
    other.info = replace(model.info, name=f"{model.info.name} without {names}")
    return other


def _measure(
    models: tuple[Model, ...],
    corpus: AnyTexts,
    options: CompareOptions,
    report: Report | None,
    workers: tuple[Workers, ...] | None,
) -> Comparison:
    """Run one model or two on the texts, and return the distances of all pairs of their heads."""
    # Refuse what cannot be compared before anything runs.
    for model in models:
        require_one_kind(model)
        options.choice.within(model.info)
    texts = texts_of(corpus)
    going = run(
        partial(PairMeasurer, options=options),
        models,
        texts,
        PairPart(),
        block=BLOCK,
        workers=workers,
        report=report,
        step="the comparison on a later text",
    )
    done = going.done
    if not done.n_texts and not going.complete:
        raise KeyboardInterrupt
    done.left_out.require_some_left(done.n_texts, models[0].info)
    if not done.n_tokens:
        raise AttnscopeError("no text is left: none has any token", "give texts with words in them")

    # Say what was compared.
    ((heads, divergences),) = done.divergences.items()
    facts: dict[str, Any] = {"compared": "heads", "distances": [options.distance]}
    tables = {"heads": heads_table(models[0], heads[0])}
    if len(models) > 1:
        facts |= {"compared": "models", "other_run": run_of(models[1].info)}
        tables["other_heads"] = heads_table(models[1], heads[1])
    corpus_facts = going.corpus(texts, models[0].info)
    corpus_facts["text"] = corpus if isinstance(corpus, str) else None
    arrays = distance_arrays(divergences, options)
    return Comparison(going.about(models[0].info), corpus_facts, facts, tables, arrays)


def distance_arrays(divergences: RunningSums, options: CompareOptions) -> dict[str, Floats]:
    """Return the distances of pairs of heads, with their intervals over texts and the queries behind each.

    Returns:
        Arrays (head, head) by name. A distance is the root of the mean divergence; ends are NaN for fewer than 2 texts.
    """
    ends = np.clip(divergences.interval(), 0.0, LARGEST[options.measure])  # type: ignore[index]
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
class PairPart(Part):
    """Hold sums over texts.

    Attributes:
        divergences: Heads that are compared -> the divergences of all pairs, (head, head), whose counts are queries.
            It has one entry at most; none before any text.
    """

    divergences: dict[Compared, RunningSums] = field(default_factory=dict)
    _sums: dict[int, Any] = field(default_factory=dict)


class PairMeasurer(Measurer[PairPart]):
    """Compare the heads of one model, or of two, on blocks of texts."""

    def __init__(self, *models: Model, options: CompareOptions) -> None:
        super().__init__(models[0].tokenizer)
        self._models = models
        self._options = options
        self._chosen = [options.choice.within(model.info) for model in models]
        # Refuse pairs whose sums could not be held, before the models run for minutes.
        n_first = self._chosen[0].n_heads
        n_second = self._chosen[-1].n_heads
        self._n_pairs = n_first * n_second
        require_memory(
            self._n_pairs * _BYTES_A_PAIR,
            f"all pairs of {n_first} and {n_second} heads",
            "choose fewer layers and heads (-L, -H)",
        )

    def start(self, block: Block) -> PairPart:
        """Return sums of nothing yet."""
        return PairPart()

    def batches(self, block: Block) -> list[Sequence[Chunk]]:
        """Cut a block into batches, the longest texts first; every model must cut the texts into the same tokens."""
        first = self._models[0]
        special = special_ids(first)
        if len(self._models) > 1:
            for text in block.texts:
                _require_same_tokens(self._models, text, special)
        # A text is cut where the model that takes fewest tokens needs it.
        limits = [model.info.max_tokens for model in self._models]
        batches = block_batches(
            block,
            first.tokenizer.encode,
            limit=min(filter(None, limits), default=None),
            special_ids=special,
            budget=TOKEN_BUDGET,
        )
        # Each text has its own sums and counts of all pairs, 8 bytes each, until they are added up.
        most_texts = max(1, _BYTES_AT_ONCE // (2 * 8 * self._n_pairs))
        parts: list[Sequence[Chunk]] = []
        for batch in batches[::-1]:
            parts += [batch[i : i + most_texts] for i in range(0, len(batch), most_texts)]
        return parts

    def measure(self, batch: Sequence[Chunk]) -> tuple[Compared, list[Floats | Place]]:
        """Return the heads of each model, and the sums of each chunk of a batch, or where it is broken."""
        inputs = batch_of([chunk.tokens for chunk in batch])
        seen = [*map(_Seen, self._models, repeat(inputs), self._chosen)]
        heads = tuple(each.heads for each in seen)
        return heads, [self._sum(seen, row, chunk) for row, chunk in enumerate(batch)]

    def add(
        self, part: PairPart, batch: Sequence[Chunk], result: tuple[Compared, list[Floats | Place]]
    ) -> None:
        """Add the chunks of a batch, without texts on which a model computes NaN or infinity."""
        heads, results = result
        finished = []
        for chunk, sums in zip(batch, results, strict=True):
            # A place in the model says where the chunk is broken.
            if isinstance(sums, tuple):
                part.broken.setdefault(chunk.text_index, sums)
            if chunk.text_index in part.broken:
                continue
            # Chunks of a long text add up to one text.
            part._sums[chunk.text_index] = part._sums.get(chunk.text_index, 0.0) + sums
            if part.complete_text(chunk.text_index, chunk.n_chunks):
                finished.append(part._sums.pop(chunk.text_index))
                part.n_texts += 1
                part.n_tokens += chunk.n_queries
                part.n_chunked += chunk.n_chunks > 1
        if finished:
            # Sums and counts of the finished texts, (text, head, head) each.
            divergences, counts = np.stack(finished, 1)
            if heads not in part.divergences:
                part.divergences[heads] = RunningSums(divergences.shape[1:])
            part.divergences[heads].add(divergences, counts)

    def _sum(self, seen: Sequence[_Seen], row: int, chunk: Chunk) -> Floats | Place:
        """Return the sums and counts of a chunk, (2, head, head); or where a weight is NaN or infinite.

        `row` is the place of the chunk in the batch.
        """
        # Take so many queries at a time that the weights of all heads are WEIGHTS_AT_ONCE at most.
        n_tokens = len(chunk)
        n_heads = sum(len(each.heads) for each in seen)
        step = max(16, WEIGHTS_AT_ONCE // max(1, n_tokens * n_heads))
        ordinary = ~chunk.tokens.sinks(seen[0].kind)
        total = np.zeros((2, len(seen[0].heads), len(seen[-1].heads)))
        for queries in torch.arange(n_tokens).split(step):  # type: ignore[no-untyped-call]
            weights = [each.rows(row, queries, n_tokens) for each in seen]
            for each, rows in zip(seen, weights, strict=True):
                # Name the layer of the first head with a NaN or an infinity.
                is_finite = np.isfinite(rows).all((1, 2))
                if not is_finite.all():
                    layer, _ = each.heads[is_finite.argmin()]
                    return each.kind, layer
            # Leave special tokens out as queries and as keys, and scale what is left of each row to 1.
            if self._options.hide_special:
                is_kept = ordinary[queries]
                weights = [renormalise(rows[:, is_kept][:, :, ordinary]) for rows in weights]
            total += np.stack(divergence_sums(self._options.measure, *weights))  # type: ignore[arg-type]  # one of MEASURES
        return total


class _Seen:
    """Hold a model's attention on a batch.

    Attributes:
        kind: The kind of attention.
        heads: The heads that are compared, in order of layers.
    """

    def __init__(self, model: Model, batch: Batch, chosen: Chosen) -> None:
        self.kind = model.info.kinds[0]
        self._layers = sorted(see(model, batch, chosen.layers).get(self.kind, {}).items())
        # All heads of these layers, and the numbers of those that are compared.
        every: list[HeadPlace] = []
        for layer, attention in self._layers:
            every += product([layer], range(count_heads(attention)))
        wanted = chosen.picked or [*product(chosen.layers, chosen.heads)]
        self._numbers = [number for number, place in enumerate(every) if place in wanted]
        self.heads = tuple(every[number] for number in self._numbers)
        if not self.heads:
            raise AttnscopeError(
                "none of the chosen layers and heads has attention", "choose others with -L and -H"
            )

    def rows(self, text: int, queries: Tensor, n_keys: int) -> NDArray[Any]:
        """Return the weights of some queries of a text, given by its place in the batch, (head, query, key)."""
        by_layer = []
        for _, attention in self._layers:
            weights, _ = read_rows(attention, self.kind, text, queries, n_keys)
            by_layer.append(weights)
        return torch.cat(by_layer).numpy()[self._numbers]


def heads_table(model: Model, heads: Sequence[HeadPlace]) -> Table:
    """Return a table of heads, by layer and number."""
    layers, numbers = zip(*heads, strict=True)
    return Table.of_arrays(
        HEADS,
        kind=[model.info.kinds[0]] * len(heads),
        layer=layers,
        head=numbers,
    )


def require_one_kind(model: Model) -> None:
    """Refuse encoder-decoders."""
    if len(model.info.kinds) > 1:
        raise AttnscopeError(
            f"{model.info.name} has an encoder and a decoder; heads are compared in models that have one of them",
            "look at single texts with: attnscope heatmap",
        )


def _require_same_tokens(models: Sequence[Model], text: CorpusText, special: frozenset[int]) -> None:
    """Refuse a text that two models cut into different tokens."""
    labels = [tokens_of(text, model.tokenizer.encode, special).labels for model in models]
    if labels[0] != labels[1]:
        names = " and ".join(model.info.name for model in models)
        beginnings = " and ".join(f"{' '.join(of_model[:8])} …" for of_model in labels)
        raise AttnscopeError(
            f"{names} split the same text into different tokens: {beginnings}",
            "compare models that share a tokenizer, such as two checkpoints of one",
        )
