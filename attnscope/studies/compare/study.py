"""How alike are heads? All heads of a model against each other, or against those of another, over any texts."""

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
from attnscope.errors import AttnscopeError, amount
from attnscope.models.model import Batch, Model
from attnscope.questions.compare import Comparison
from attnscope.questions.heads import Heads
from attnscope.results.table import HEADS, Table, text
from attnscope.studies.compare.options import CompareOptions
from attnscope.studies.compare.pairs import PairMeasurer, PairPart, PairSums, name_of
from attnscope.studies.inputs.provenance import run_of
from attnscope.studies.inputs.texts import Report, texts_of
from attnscope.studies.run import Run, run
from attnscope.studies.workers import Workers


@with_plain_torch
def compare(
    model: Model,
    corpus: Corpus | str | Sequence[str] | Sequence[CorpusText],
    options: CompareOptions | None = None,
    *,
    roles: Heads | None = None,
    report: Report | None = None,
    workers: Workers | None = None,
) -> Comparison:
    """Compares all heads of a model with each other.

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
        roles: A record of the same model's heads, for their roles.
        report: Called after each batch; with workers after each block of texts.
        workers: Who runs the model, block by block, to the same result; None = this process. They load it by its name,
            and after an interruption whole blocks count.

    Raises:
        AttnscopeError: There is no text, the model cannot be compared, the roles are of another one, or no worker can
            begin.
    """
    options = options or CompareOptions()
    require_one_kind(model)
    if roles is not None and roles.run.get("sha256") != model.info.sha256:
        raise AttnscopeError(
            f"the record of heads is of {roles.run.get('model')}, not of {model.info.name}",
            "give one that `attnscope heads` wrote for this model",
        )
    going, sums, corpus_facts = _run((model,), corpus, options, report, (workers,) if workers else None)
    heads = heads_table(model, sums.heads[0])
    said = {"compared": "heads", "distances": [name_of(table) for table in options.tables]}
    if roles is not None:
        heads = heads.with_column(text("role", "its strongest role; empty = it has none"), _roles_of(heads, roles))
        said["roles_source"] = f"{roles.run.get('model')}, {amount(roles.corpus['n_texts'], 'text')}"
    arrays: dict[str, NDArray[Any]] = {}
    for table in options.tables:
        distances = sums.distances(table)
        arrays |= distances | sums.arrangement(table, distances[f"distance:{name_of(table)}"])
    layers = Table.of_arrays(Comparison.TABLES["layers"], layer=sums.layers)
    tables = {"heads": heads, "layers": layers}
    return Comparison(_run_of((model,), going), corpus_facts, said, tables, arrays)


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
    """Compares the heads of two models, or of two checkpoints of one.

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
    for each in (model, other):
        require_one_kind(each)
    going, sums, corpus_facts = _run((model, other), corpus, options, report, workers)
    ours, theirs = (heads_table(each, heads) for each, heads in zip((model, other), sums.heads, strict=True))
    arrays: dict[str, NDArray[Any]] = {}
    for table in options.tables:
        name = name_of(table)
        arrays |= sums.distances(table)
        match = np.full(len(ours), -1)
        rows, columns = best_matching(arrays[f"distance:{name}"]).T
        match[rows] = columns
        arrays[f"match:{name}"] = match
    said = {
        "compared": "models",
        "distances": [name_of(table) for table in options.tables],
        "other_run": run_of(other.info),
    }
    tables = {"heads": ours, "other_heads": theirs}
    return Comparison(_run_of((model, other), going), corpus_facts, said, tables, arrays)


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


def heads_table(model: Model, heads: Sequence[tuple[int, int]]) -> Table:
    """Return a table of heads, by layer and number."""
    layers, numbers = zip(*heads, strict=True)
    return Table.of_arrays(HEADS, kind=[model.info.kinds[0]] * len(heads), layer=layers, head=numbers)


def _roles_of(heads: Table, roles: Heads) -> list[str]:
    """Return the strongest role of each head; empty = it has none."""
    known = roles.table("heads")
    joined = zip(known.head_names(with_kind=True), known["role"].tolist(), strict=True)
    first_role = {name: role.partition("+")[0] for name, role in joined}
    return [first_role.get(name, "") for name in heads.head_names(with_kind=True)]


def require_one_kind(model: Model) -> None:
    """Refuses encoder-decoders."""
    if len(model.info.kinds) > 1:
        raise AttnscopeError(
            f"{model.info.name} has an encoder and a decoder; heads are compared in models that have one of them",
            "look at single texts with: attnscope heatmap",
        )


def _run(
    models: tuple[Model, ...],
    corpus: Corpus | str | Sequence[str] | Sequence[CorpusText],
    options: CompareOptions,
    report: Report | None,
    workers: tuple[Workers, ...] | None,
) -> tuple[Run[PairPart], PairSums, dict[str, Any]]:
    """Run the models on the texts; return what that came to, the sums of all pairs, and what is said of the texts."""
    for model in models:
        options.choice.within(model.info)
    texts = texts_of(corpus)
    make = partial(PairMeasurer, choice=options.choice, tables=options.tables)
    step = "the comparison on a later text"
    going = run(make, models, texts, PairPart(), block=BLOCK, workers=workers, report=report, step=step)
    if not going.done.n_texts and not going.complete:
        raise KeyboardInterrupt
    going.done.left_out.require_some_left(going.done.n_texts, models[0].info)
    if going.done.sums is None or not going.done.n_tokens:
        raise AttnscopeError("no text is left: none has any token", "give texts with words in them")
    single = corpus if isinstance(corpus, str) else None
    return going, going.done.sums, {**going.corpus(texts, models[0].info), "text": single}


def _run_of(models: Sequence[Model], going: Run[PairPart]) -> dict[str, Any]:
    notes = [
        f"{model.info.name} is compared on its own dense weights: memory grows with the square of a text's length."
        for model in models
        if model.info.path == "eager"
    ]
    run = run_of(models[0].info, [*notes, *going.notes])
    return run | ({"failures": going.failures} if going.failures else {})
