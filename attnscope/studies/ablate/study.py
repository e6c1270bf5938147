"""Measure what changes in a model without each head. Forward passes are left to `measurers`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnscope.core.attention.probes import Place
from attnscope.core.plain_torch import with_plain_torch
from attnscope.core.sums import RunningSums
from attnscope.corpus import Corpus, CorpusText
from attnscope.errors import AttnscopeError
from attnscope.models.inside.linear_runs import require_gradients
from attnscope.models.model import Loss, Model
from attnscope.questions.ablate import AblateOptions, Ablation, quantity_column
from attnscope.results.table import HEADS, Table
from attnscope.studies.ablate.measurers import (
    DONORS,
    QUANTITIES,
    Cut,
    Head,
    MeanOutputs,
    MeanPart,
    StandIns,
    TextPart,
    donors_of,
    heads_of,
    measure_cuts,
    measure_importance,
)
from attnscope.studies.ablate.reading import MASKED, Passes, Reader, require_rerunnable
from attnscope.studies.failures import failure
from attnscope.studies.inputs.provenance import run_of
from attnscope.studies.inputs.texts import Report, scale_report, texts_of
from attnscope.studies.run import Run
from attnscope.studies.workers import Workers

Floats = NDArray[np.float64]

NEVER_NEGATIVE = ("l2", "kl", "importance")
"""Quantities whose intervals do not reach below 0; a loss may fall."""


@with_plain_torch
def ablate(
    model: Model,
    corpus: Corpus | str | Sequence[str] | Sequence[CorpusText],
    options: AblateOptions | None = None,
    report: Report | None = None,
    workers: Workers | None = None,
) -> Ablation:
    """Take heads out of a model, and measure what changes.

        model = attnscope.load("minilm")
        ablation = attnscope.ablate(model, attnscope.Corpus("corpus.txt"))
        ablation["heads"]["zero_l2"]          # (head,), beside zero_l2_low and zero_l2_high
        ablation.save("ablation.npz")

    A head is taken out at the seam: its output is replaced before the output projection. With grouped queries this is
    the query head, not its group. Each text is run once whole, and then again from the layer of the head on.

    Memory does not grow with the corpus. After an interruption (KeyboardInterrupt) or a failure of a later step, the
    result covers the texts up to the last whole block, and says that it is incomplete (`run["failures"]`). Texts on
    which the model computes NaN or infinity are dropped, and `corpus["problems"]` lists them. Near-duplicates count
    once (`corpus["n_copies"]`).

    Args:
        model: A loaded model, see `attnscope.load`.
        corpus: What to run it on: a Corpus, or a list of texts.
        options: What is taken out.
        report: Called after each batch; with workers after each block of texts.
        workers: Who runs the model, block by block, to the same result; None = this process. They load it by its name.

    Raises:
        AttnscopeError: There is no text, no such head or class, the model has no loss for importances, its heads cannot
            be taken out, or no worker can begin.
    """
    options = options or AblateOptions()
    loss = None if options.loss == "none" else require_rerunnable(model).loss
    _require(model, options, loss)
    reader = Reader(model, loss, seed=options.seed, target=options.target, answer=options.answer)
    passes = Passes(model, reader, texts_of(corpus, model), workers)
    n_heads = heads_of(passes)
    if not n_heads:
        raise AttnscopeError("no text is left: none has any token", "give texts with words in them")
    heads = _choose_heads(model, options, n_heads)

    # Every head alone, and if heads are picked all of them together, in every mode.
    sets: list[tuple[Head, ...]] = [(head,) for head in heads]
    if options.choice.pick is not None and len(heads) > 1:
        sets.append(tuple(heads))
    cuts = []
    for mode in options.modes:
        for donor in range(DONORS) if mode == "resample" else [-1]:
            cuts += [Cut(each, mode, donor) for each in sets]

    # Go over the texts: for means if they are needed, for all cuts, and for importances.
    n_passes = ("mean" in options.modes) + bool(cuts) + options.importance
    reports = [scale_report(report, number, n_passes) for number in range(n_passes)]
    runs: list[Run[Any]] = []
    stand_ins = StandIns(donors=donors_of(passes) if "resample" in options.modes else ())
    if "mean" in options.modes:
        runs.append(_measure_means(passes, reports.pop(0)))
        stand_ins = stand_ins._replace(means=runs[0].done.means())
    # Without cuts it is the whole model's loss and how many texts there are: no pass of its own is shown for it.
    result = measure_cuts(passes, cuts, stand_ins, reports.pop(0) if cuts else None)
    runs.append(result)
    result.done.left_out.require_some_left(result.done.n_texts, model.info)
    table, together = _effects(result.done, options.modes, loss, heads, len(sets))
    failures: list[dict[str, str]] = []
    if result.complete and options.importance:
        # A failure loses nothing of the effects.
        try:
            runs.append(measure_importance(passes, n_heads, reports.pop(0)))
            every = [(*place, head) for place, n in n_heads.items() for head in range(n)]
            rows = [every.index(head) for head in heads]  # type: ignore[arg-type]  # the model's own kinds
            table = _with_quantity(table, "importance", _parts(runs[-1].done.sums)[rows])
        except (KeyboardInterrupt, Exception) as error:
            result.complete = False
            if isinstance(error, Exception):
                failures.append(failure("importance", error))

    # The tables, and what the result says of itself.
    n_losses = 1 if loss else 0
    losses = _as_columns(_bounded("kl", _parts(result.done.whole)[None])[:n_losses])
    tables = {
        "heads": table,
        "whole": Table.of_arrays(Ablation.TABLES["whole"], quantity=["loss"] * n_losses, **losses),
    }
    if len(sets) > len(heads):
        tables["together"] = together
    complete = all(each.complete for each in runs)
    about = _about(model, options, runs, failures)
    return Ablation(about, _corpus(passes, result, runs, complete), _describe(options, loss, table), tables)


def _require(model: Model, options: AblateOptions, loss: Loss | None) -> None:
    """Refuse heads that there are not, and importances of a model without a loss or without gradients."""
    options.choice.within(model.info)
    if options.kind is not None:
        model.info.choose_kind(options.kind)
    elif options.choice.pick is not None and len(model.info.kinds) > 1:
        raise AttnscopeError(
            f"{model.info.name} has several kinds of attention, and each has such heads",
            f"say --kind {model.info.kinds[-1]}",
        )
    if not options.importance:
        return
    if loss is None:
        raise AttnscopeError(
            f"importance is the slope of a loss, and {model.info.name} has none here: no head predicts anything",
            "leave out --importance, or choose a model with its head",
        )
    require_gradients(model)


def _choose_heads(model: Model, options: AblateOptions, n_heads: Mapping[Place, int]) -> list[Head]:
    """Return the heads that were chosen, by kind, layer, head."""
    chosen = options.choice.within(model.info)
    heads: list[Head] = []
    for kind in model.info.kinds if options.kind is None else [options.kind]:
        for layer in chosen.layers:
            n_here = n_heads.get((kind, layer), 0)  # type: ignore[arg-type]  # the model's own kinds
            heads += [(kind, layer, head) for head in chosen.heads if head < n_here]
    if chosen.picked is not None:
        heads = [head for head in heads if head[1:] in chosen.picked]
    if len(heads) < len(chosen.picked or [0]):
        raise AttnscopeError(f"{model.info.name} has no such heads", "choose other layers or heads")
    return heads


def _measure_means(passes: Passes, report: Report | None) -> Run[MeanPart]:
    """Return the mean outputs of heads over all texts; those of some texts are none."""
    going = passes.run(MeanOutputs, {}, MeanPart(), report)
    if going.error is not None:
        raise going.error
    if not going.complete:
        raise KeyboardInterrupt
    return going


# From sums to columns


def _effects(
    done: TextPart, modes: Sequence[str], loss: Loss | None, heads: Sequence[Head], n_sets: int
) -> tuple[Table, Table]:
    """Return the table of heads, and the effects of all of them together."""
    kinds, layers, numbers = zip(*heads, strict=True)
    table = Table.of_arrays(HEADS, kind=kinds, layer=layers, head=numbers)
    parts = _parts(done.sums)  # (cut, quantity, 4)
    names = []
    together = []
    first = 0
    for mode in modes:
        n_donors = DONORS if mode == "resample" else 1
        # Cuts are ordered by mode, donor and set: average over donors. (donor, set, quantity, 4)
        by_donor = parts[first : first + n_donors * n_sets].reshape(n_donors, n_sets, len(QUANTITIES), 4)
        first += n_donors * n_sets
        for number, quantity in enumerate(QUANTITIES if loss else QUANTITIES[:1]):
            name = f"{mode}_{quantity}"
            effects = by_donor[:, :, number].mean(0)  # (set, 4)
            table = _with_quantity(table, name, effects[: len(heads)])
            names.append(name)
            together.append(_bounded(name, effects)[-1])
            if mode == "resample" and quantity != "kl":
                spread = by_donor[:, : len(heads), number, 0].std(0, ddof=1)
                table = table.with_column(quantity_column(f"{name}_spread"), spread)
    values = _as_columns(np.array(together).reshape(-1, 4))
    return table, Table.of_arrays(Ablation.TABLES["together"], quantity=names, **values)


def _parts(sums: RunningSums) -> Floats:
    """Return values, the ends of their intervals, and counts, (..., 4)."""
    low, high = sums.interval()
    return np.stack([sums.ratio(), low, high, sums.total("c")], -1)


def _bounded(name: str, parts: Floats) -> Floats:
    """Return parts, (row, 4), whose lower ends are at least 0 where the quantity is never below."""
    if not name.endswith(NEVER_NEGATIVE):
        return parts
    bounded = parts.copy()
    bounded[:, 1] = np.maximum(parts[:, 1], 0)
    return bounded


def _as_columns(parts: Floats) -> dict[str, Floats]:
    """Return values with what stands beside them, (row, 4), as columns of a table."""
    return dict(zip(("value", "value_low", "value_high", "value_count"), parts.T, strict=True))


def _with_quantity(heads: Table, name: str, parts: Floats) -> Table:
    """Return a table of heads with a further quantity, (head, 4)."""
    value, low, high, count = _bounded(name, parts).T
    return heads.with_column(quantity_column(name), value, low=low, high=high, count=count)


# What the result says of itself


def _about(
    model: Model, options: AblateOptions, runs: Sequence[Run[Any]], failures: Sequence[dict[str, str]]
) -> dict[str, Any]:
    info = model.info
    notes = []
    if not model.resumes:
        notes.append("This model cannot be run again from a layer on: every head takes a whole forward.")
    if "cross" in info.kinds and options.target is None:
        notes.append("No target was given: the decoder reads what the whole model itself writes to each text.")
    of_passes = [note for each in runs for note in each.notes]
    about = run_of(info, [*notes, *dict.fromkeys(of_passes)]) | {"seed": options.seed, "kinds": list(info.kinds)}
    failed = [*(each for going in runs for each in going.failures), *failures]
    return about | {"failures": failed} if failed else about


def _corpus(passes: Passes, result: Run[TextPart], runs: Sequence[Run[Any]], complete: bool) -> dict[str, Any]:
    facts = result.corpus(passes.texts, passes.model.info)
    # Blocks that other passes lost.
    for going in runs:
        facts["problems"] += [problem for problem in going.lost if problem not in facts["problems"]]
    del facts["n_chunked"]  # chunks are not counted here
    return {**facts, "complete": complete, "n_predictions": result.done.n_predictions}


def _describe(options: AblateOptions, loss: Loss | None, heads: Table) -> dict[str, Any]:
    class_name = f"the class {options.answer or 'that the whole model gives'}"
    predictions: dict[Loss | None, str] = {
        "causal": "each next token",
        "masked": f"masked tokens: {MASKED:.0%} of the tokens, seed {options.seed}",
        "target": "the decoder's target",
        "class": class_name,
        "token_class": f"{class_name}, of each token",
    }
    return {
        "modes": list(options.modes),
        "mean_over": "all real tokens of all texts, whatever their position" if "mean" in options.modes else None,
        "loss": loss,
        "predicted": predictions.get(loss),
        "target": options.target,
        "answer": options.answer,
        "rank_agreement": _rank_agreement(heads, options.modes, "loss" if loss else "l2"),
    }


def _rank_agreement(heads: Table, modes: Sequence[str], quantity: str) -> dict[str, float]:
    """Return Spearman's rank correlation of the effects of heads by two modes, for each pair of modes."""
    from scipy.stats import spearmanr  # it takes most of a second, which 'heads' need not wait for

    agreement = {}
    for first, second in combinations(modes, 2):
        values = np.stack([heads[f"{mode}_{quantity}"] for mode in (first, second)])
        if len(heads) > 2 and np.isfinite(values).all():
            agreement[f"{first}, {second}"] = float(spearmanr(*values).statistic)
    return agreement
