"""Measure what changes in a model without each head: `attnscope ablate` and `attnscope.ablate`.

This module chooses the heads and makes tables of sums over texts; `measurers` runs the model. `studies.heads` calls it
to check roles, and `save` writes a model without heads.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations, islice, product
from typing import Any

import numpy as np

from attnscope.core.plain_torch import with_default_torch
from attnscope.core.sums import RunningSums
from attnscope.corpus import Corpus, CorpusText
from attnscope.errors import AttnscopeError
from attnscope.models.inside.linear_runs import require_gradients
from attnscope.models.model import LossKind, Model
from attnscope.questions.ablate import AblateOptions, Ablation, Mode, quantity_column
from attnscope.results.table import HEADS, Estimate, Floats, Table
from attnscope.studies.ablate.measurers import (
    DONORS,
    QUANTITIES,
    AblatedHeads,
    AblationSums,
    Head,
    HeadOutputs,
    PassSettings,
    Replacements,
    Shapes,
    measure_cuts,
    measure_importance,
    measure_means,
    outputs_of,
    shapes_of,
)
from attnscope.studies.ablate.reading import MASKED_SHARE, BatchReader
from attnscope.studies.failures import add_step
from attnscope.studies.inputs.texts import ReportProgress, scale_report, texts_of
from attnscope.studies.run import CorpusRun
from attnscope.studies.workers import Workers

LOWEST = (0.0, -np.inf, 0.0)
"""The least possible value of each of `QUANTITIES`: norms and divergences are not negative, but a loss may fall."""

# Indices into the last axis of `_estimates`
_VALUE = 0
_LOW = 1


@with_default_torch
def ablate(
    model: Model,
    corpus: Corpus | str | Sequence[str] | Sequence[CorpusText],
    options: AblateOptions | None = None,
    report: ReportProgress | None = None,
    workers: Workers | None = None,
) -> Ablation:
    """Take heads out of a model, and measure what changes.

        model = attnscope.load("minilm")
        ablation = attnscope.ablate(model, attnscope.Corpus("corpus.txt"))
        ablation["heads"]["zero_l2"]          # (head,), beside zero_l2_low and zero_l2_high
        ablation.save("ablation.npz")

    A head is taken out at the seam, the one function that computes attention: its output is replaced before the output
    projection. With grouped queries this is the query head, not its group. Each text is run once with all heads, and
    then again from the layer of the head on.

    Memory does not grow with the corpus. After an interruption (KeyboardInterrupt) or a failure of a later step, the
    result covers the texts up to the last whole block, and says that it is incomplete (`run["failures"]`). Texts on
    which the model computes NaN or infinity are dropped, and `corpus["problems"]` lists them. Near-duplicates count
    once (`corpus["n_copies"]`).

    Args:
        model: A loaded model, see `attnscope.load`.
        corpus: What to run it on: a Corpus, or a list of texts.
        options: What is taken out, and what is measured.
        report: Called after each batch; with workers after each block of texts.
        workers: Worker processes, which load the model by its name and run it block by block, to the same result; None
            = this process runs it.

    Raises:
        AttnscopeError: There is no text, no such head or class, the model has no loss for importances, its heads cannot
            be taken out, or no worker can begin.
    """
    options = options or AblateOptions()
    loss = None if options.loss == "none" else model.loss
    reader = BatchReader(model, loss, seed=options.seed, target=options.target, answer=options.answer)
    _check_options(model, options, loss)
    passes = PassSettings(reader, texts_of(corpus, model), workers)
    # Heads' outputs on the first text give their shapes. Resampling takes those of DONORS texts other than the one at
    # hand, so it needs one more.
    is_resampled = "resample" in options.modes
    n_outputs = DONORS + 1 if is_resampled else 1
    outputs = list(islice(outputs_of(passes), n_outputs))
    if not outputs:
        raise AttnscopeError("no text is left: none has any token", "give texts with words in them")
    if is_resampled and len(outputs) < 2:
        raise AttnscopeError("resample ablation needs outputs of other texts", "give several texts")
    shapes = shapes_of(outputs)
    heads = _choose_heads(model, options, shapes)
    # Every head is taken out alone, and heads that were picked by name also all together.
    head_sets: list[tuple[Head, ...]] = [(head,) for head in heads]
    if options.choice.pick is not None and len(heads) > 1:
        head_sets.append(tuple(heads))
    cuts = _list_cuts(head_sets, options.modes)

    # Each pass over the texts reports its part of the progress.
    pass_names = []
    if "mean" in options.modes:
        pass_names.append("means")
    if cuts:
        pass_names.append("cuts")
    if options.importance:
        pass_names.append("importance")
    reports = {}
    for index, name in enumerate(pass_names):
        reports[name] = scale_report(report, index, len(pass_names))
    # Go over the texts for the means, if they are needed, then for all cuts.
    means_run: CorpusRun[AblationSums] | None = None
    means: HeadOutputs = {}
    if "mean" in options.modes:
        means_run, means = measure_means(passes, shapes, reports["means"])
    # Even without cuts, this pass measures the whole model's loss and counts the texts.
    going = measure_cuts(passes, cuts, Replacements(means, outputs), reports.get("cuts"))
    going.done.left_out.require_some_left(going.done.n_texts, model.info)
    # Add notes and lost blocks of the pass for the means that this pass does not repeat.
    if means_run is not None:
        going.notes += [note for note in means_run.notes if note not in going.notes]
        going.lost += [problem for problem in means_run.lost if problem not in going.lost]

    # Make the record.
    tables = _tables(going.done, cuts, loss, heads, head_sets)
    run = going.about(model.info, _notes(model, options))
    run |= {"seed": options.seed, "kinds": list(model.info.kinds)}
    facts = going.corpus(passes.texts, model.info)
    facts["n_predictions"] = int(going.done.whole.total("c"))
    # Rows were counted, not chunks: 0 would be wrong.
    del facts["n_chunked"]
    ablation = Ablation(run, facts, _describe(options, loss, tables["heads"]), tables)
    if not options.importance:
        return ablation
    # If this step fails, the record stays as it is, and says so.
    add = partial(_add_importance, passes, shapes, heads, reports["importance"])
    return add_step(ablation, "importance", add)


def _check_options(model: Model, options: AblateOptions, loss: LossKind | None) -> None:
    """Refuse heads that the model does not have, and importances without a loss or gradients."""
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


def _choose_heads(model: Model, options: AblateOptions, shapes: Shapes) -> list[Head]:
    """Return the heads that the options choose, sorted by kind, layer and index."""
    kinds = model.info.kinds
    chosen = options.choice.within(model.info)
    # (layer, head): those that were named, or all combinations of the chosen layers and heads.
    wanted = chosen.picked or set(product(chosen.layers, chosen.heads))
    heads = []
    for kind, layer, index in _all_heads(shapes):
        if options.kind in (None, kind) and (layer, index) in wanted:
            heads.append((kind, layer, index))
    # Every head that was named must be there; of the combinations at least one.
    n_required = 1 if chosen.picked is None else len(chosen.picked)
    if len(heads) < n_required:
        raise AttnscopeError(f"{model.info.name} has no such heads", "choose other layers or heads")
    return sorted(heads, key=lambda head: (kinds.index(head[0]), *head[1:]))


def _all_heads(shapes: Shapes) -> list[Head]:
    """Return all heads of the model, in the order in which it computes them."""
    heads: list[Head] = []
    for place, (n_heads, _) in shapes.items():
        heads += [(*place, head) for head in range(n_heads)]
    return heads


def _list_cuts(head_sets: Sequence[tuple[Head, ...]], modes: Sequence[Mode]) -> list[AblatedHeads]:
    """Return the cuts of all sets of heads, ordered by mode, then donor, then set."""
    cuts: list[AblatedHeads] = []
    for mode in modes:
        donors = range(DONORS) if mode == "resample" else [-1]
        for donor in donors:
            cuts += [AblatedHeads(heads, mode, donor) for heads in head_sets]
    return cuts


def _add_importance(
    passes: PassSettings,
    shapes: Shapes,
    heads: Sequence[Head],
    report: ReportProgress | None,
    ablation: Ablation,
) -> Ablation:
    """Return the result with the importance of each head."""
    going = measure_importance(passes, shapes, report)
    # Of all heads of the model, (head, 4); choose those of the table.
    estimates = _estimates(going.done.sums, 0.0)
    all_heads = _all_heads(shapes)
    rows = [all_heads.index(head) for head in heads]
    table = _with_quantity(ablation.table("heads"), "importance", estimates[rows])
    return replace(ablation, tables={**ablation.tables, "heads": table})


# From sums to columns


def _tables(
    done: AblationSums,
    cuts: Sequence[AblatedHeads],
    loss: LossKind | None,
    heads: Sequence[Head],
    head_sets: Sequence[tuple[Head, ...]],
) -> dict[str, Table]:
    """Return the tables: effects of each head, of all heads together if they are a set, and the whole model's loss."""
    kinds, layers, indices = zip(*heads, strict=True)
    table = Table.of_arrays(HEADS, kind=kinds, layer=layers, head=indices)
    measured = QUANTITIES if loss else QUANTITIES[:1]
    by_cut = _estimates(done.sums)  # (cut, quantity, 4)
    together = []
    for mode in dict.fromkeys(cut.mode for cut in cuts):
        # The cuts of a mode are ordered by donor and set: (donor, set, quantity, 4).
        rows = [row for row, cut in enumerate(cuts) if cut.mode == mode]
        by_donor = by_cut[rows].reshape(-1, len(head_sets), len(QUANTITIES), 4)
        # Average over donors, and clip the low ends of intervals: (set, quantity, 4).
        effects = by_donor.mean(0)
        effects[..., _LOW] = np.maximum(effects[..., _LOW], LOWEST)
        for index, quantity in enumerate(measured):
            name = f"{mode}_{quantity}"
            table = _with_quantity(table, name, effects[: len(heads), index])
            together.append({"quantity": name, "value": _cell(effects[-1, index])})
            if mode == "resample" and quantity != "kl":
                # The standard deviation of the value over donors, (head,).
                spread = by_donor[:, : len(heads), index, _VALUE].std(0, ddof=1)
                table = table.with_column(quantity_column(f"{name}_spread"), spread)
    whole = []
    if loss:
        whole.append({"quantity": "loss", "value": _cell(_estimates(done.whole, 0.0))})
    tables = {
        "heads": table,
        "whole": Table.of(Ablation.TABLES["whole"], whole),
    }
    # A set beyond those of single heads is that of all heads.
    if len(head_sets) > len(heads):
        tables["together"] = Table.of(Ablation.TABLES["together"], together)
    return tables


def _estimates(sums: RunningSums, lowest: float = -np.inf) -> Floats:
    """Return (…, 4): the value, the ends of its interval, low and high, and the count; no low end is below `lowest`."""
    low, high = sums.interval()
    low = np.maximum(low, lowest)
    return np.stack([sums.ratio(), low, high, sums.total("c")], -1)


def _cell(estimate: Floats) -> Estimate:
    """Return one of `_estimates`, (4,), as a cell of a table."""
    value, low, high, count = estimate
    return Estimate(value, low, high, count=count)


def _with_quantity(heads: Table, name: str, estimates: Floats) -> Table:
    """Return a table of heads with a further column, from `_estimates` of each head, (head, 4)."""
    value, low, high, count = estimates.T
    return heads.with_column(quantity_column(name), value, low=low, high=high, count=count)


# Notes and options of the record


def _notes(model: Model, options: AblateOptions) -> list[str]:
    """Return the notes on the model that a reader of the record needs."""
    notes = []
    if not model.resumes:
        notes.append("This model cannot be run again from a layer on: every head takes a whole forward.")
    if "cross" in model.info.kinds and options.target is None:
        notes.append(
            "No target was given: the decoder reads what the whole model itself writes to each text."
        )
    return notes


def _describe(options: AblateOptions, loss: LossKind | None, heads: Table) -> dict[str, Any]:
    """Return the options of the record, with what is predicted, and how far the modes agree on the order of heads."""
    class_name = f"the class {options.answer or 'that the whole model gives'}"
    predictions: dict[LossKind | None, str] = {
        "causal": "each next token",
        "masked": f"masked tokens: {MASKED_SHARE:.0%} of the tokens, seed {options.seed}",
        "target": "the decoder's target",
        "class": class_name,
        "token_class": f"{class_name}, of each token",
    }
    mean_over = None
    if "mean" in options.modes:
        mean_over = "all real tokens of all texts, whatever their position"
    return {
        "modes": list(options.modes),
        "mean_over": mean_over,
        "loss": loss,
        "predicted": predictions.get(loss),
        "target": options.target,
        "answer": options.answer,
        "rank_agreement": _rank_agreement(heads, options.modes, "loss" if loss else "l2"),
    }


def _rank_agreement(heads: Table, modes: Sequence[str], quantity: str) -> dict[str, float]:
    """Return Spearman's rank correlation of the heads' effects by two modes, for each pair of modes.

    There is none of fewer than three heads, or of effects that are not finite.
    """
    # Here, because this import takes most of a second, and `studies.heads` does not need it.
    from scipy.stats import spearmanr

    agreement = {}
    for first, second in combinations(modes, 2):
        values = np.stack([heads[f"{mode}_{quantity}"] for mode in (first, second)])
        if len(heads) > 2 and np.isfinite(values).all():
            agreement[f"{first}, {second}"] = float(spearmanr(*values).statistic)
    return agreement
