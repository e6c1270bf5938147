"""Compare all heads of a model with each other, or with those of another model, over any texts."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from attnscope.choice import Choice
from attnscope.core.attention.seam import AttentionCall, Probe
from attnscope.core.distance import best_matching
from attnscope.core.plain_torch import with_plain_torch
from attnscope.corpus import BLOCK, Corpus, CorpusText
from attnscope.errors import AttnscopeError, UsageError
from attnscope.models.model import Batch, Model
from attnscope.questions.compare import Comparison
from attnscope.results.table import Table
from attnscope.studies.compare.options import CompareOptions, CompareOrder
from attnscope.studies.compare.pairs import PairMeasurer, PairPart, PairSums, heads_table, require_one_kind
from attnscope.studies.compare.texts import compare_heads, compare_texts
from attnscope.studies.inputs.options import LoadOptions, TextsWanted
from attnscope.studies.inputs.provenance import run_of
from attnscope.studies.inputs.texts import Report, texts_of
from attnscope.studies.run import run
from attnscope.studies.workers import Workers
from attnscope.text import read_text, require_text


def study(
    spec: str,
    texts: TextsWanted,
    order: CompareOrder,
    loading: LoadOptions,
    report: Report | None,
    workers: Workers | None = None,
) -> Comparison:
    """Load a model, or two, and compare as the order says. What can be refused is, before a model is loaded."""
    order.require_for(texts)
    if order.other_text is None and order.choice.pick is None:
        # One literal text is known as such, so that figures can name it.
        is_literal = texts.text not in (None, "-") and not texts.files
        corpus = texts.text if is_literal and texts.text is not None else texts.corpus()
        if order.ablated is not None:
            if workers is not None:
                raise UsageError("workers have no heads taken out", "leave out --workers, --executor and --threads")
            model = loading.load(spec)
            return compare_models(model, without_heads(model, order.ablated), corpus, order, report=report)
        if order.other_model is None:
            return compare(loading.load(spec), corpus, order, report=report, workers=workers)
        other_loading = replace(loading, adapter=None)
        pair = None
        if workers is not None:
            pair = (workers, replace(workers, spec=order.other_model, loading=other_loading))
        models = loading.load(spec), other_loading.load(order.other_model)
        return compare_models(*models, corpus, order, report=report, workers=pair)
    if workers is not None:
        raise UsageError("workers share many texts: here is one", "leave out --workers, --executor and --threads")
    text = read_text(texts.text)
    how: dict[str, Any] = {"measure": order.measure, "hide_special": order.hide_special}
    if order.other_text is None:
        return compare_heads(loading.load(spec), text, order.choice.pick or (), **how)
    require_text(order.other_text, "the second text")
    return compare_texts(loading.load(spec), text, order.other_text, query=order.query, **how)


@with_plain_torch
def compare(
    model: Model,
    corpus: Corpus | str | Sequence[str] | Sequence[CorpusText],
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
    whole blocks of 512 texts, or the texts done of the first one, and says that it is incomplete.

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
    options = options or CompareOptions()
    sums, about, corpus_facts = _run((model,), corpus, options, report, (workers,) if workers else None)
    distances = sums.distances(options.measure)
    layers = Table.of_arrays(Comparison.TABLES["layers"], layer=sums.layers)
    return Comparison(
        about,
        corpus_facts,
        {"compared": "heads", "distances": options.distances},
        {"heads": heads_table(model, sums.heads[0]), "layers": layers},
        distances | sums.arrangement(options.measure, distances),
    )


@with_plain_torch
def compare_models(
    model: Model,
    other: Model,
    corpus: Corpus | str | Sequence[str] | Sequence[CorpusText],
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
        report: As of `compare`.
        workers: As of `compare`: how workers load the one model, and the other.

    Raises:
        AttnscopeError: The models cut a text into different tokens; else as `compare`.
    """
    options = options or CompareOptions()
    sums, about, corpus_facts = _run((model, other), corpus, options, report, workers)
    arrays: dict[str, NDArray[Any]] = {**sums.distances(options.measure)}
    for name in options.distances:
        match = np.full(len(sums.heads[0]), -1)
        rows, columns = best_matching(arrays[f"distance:{name}"]).T
        match[rows] = columns
        arrays[f"match:{name}"] = match
    return Comparison(
        about,
        corpus_facts,
        {"compared": "models", "distances": options.distances, "other_run": run_of(other.info)},
        {"heads": heads_table(model, sums.heads[0]), "other_heads": heads_table(other, sums.heads[1])},
        arrays,
    )


@with_plain_torch
def without_heads(model: Model, heads: Sequence[tuple[int, int]]) -> Model:
    """Return the same model with the output of some heads, (layer, head), set to 0: to be compared with it.

    Raises:
        AttnscopeError: There is no such head, or the model's attention does not pass the seam.
    """
    require_one_kind(model)
    Choice(pick=tuple(heads)).within(model.info)
    if model.info.path != "seam":
        raise AttnscopeError(
            f"{model.info.name} does not pass its attention through the seam: no head can be taken out"
        )
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


def _run(
    models: tuple[Model, ...],
    corpus: Corpus | str | Sequence[str] | Sequence[CorpusText],
    options: CompareOptions,
    report: Report | None,
    workers: tuple[Workers, ...] | None,
) -> tuple[PairSums, dict[str, Any], dict[str, Any]]:
    """Run the models on the texts; return the sums of all pairs, and what is said of the run and of the texts."""
    for model in models:
        require_one_kind(model)
        options.choice.within(model.info)
    texts = texts_of(corpus)
    make = partial(PairMeasurer, choice=options.choice, measure=options.measure)
    step = "the comparison on a later text"
    going = run(make, models, texts, PairPart(), block=BLOCK, workers=workers, report=report, step=step)
    if not going.done.n_texts and not going.complete:
        raise KeyboardInterrupt
    going.done.left_out.require_some_left(going.done.n_texts, models[0].info)
    if going.done.sums is None or not going.done.n_tokens:
        raise AttnscopeError("no text is left: none has any token", "give texts with words in them")

    # What is said of the run and of the texts.
    notes = [
        f"{model.info.name} is compared on its own dense weights: memory grows with the square of a text's length."
        for model in models
        if model.info.path == "eager"
    ]
    about = run_of(models[0].info, [*notes, *going.notes])
    if going.failures:
        about["failures"] = going.failures
    text = corpus if isinstance(corpus, str) else None
    return going.done.sums, about, {**going.corpus(texts, models[0].info), "text": text}
