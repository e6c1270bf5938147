"""Ablate each head of a model, and measure what changes: `attnscope ablate` and `attnscope.ablate`.

To ablate a head is to replace its output, before the output projection, by other values. The clean run is the forward
pass without ablation. This module chooses the heads, and turns sums over texts into the tables of the result.
`measurers` runs the model, and `save` writes a model without some heads.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations, islice, product
from typing import Any

import numpy as np

from attnscope.arrays import Floats
from attnscope.core.plain_torch import with_default_torch
from attnscope.core.sums import RunningSums
from attnscope.corpus import Corpus, CorpusText
from attnscope.errors import AttnscopeError
from attnscope.models.inside.linear_runs import require_gradients
from attnscope.models.model import LossKind, Model
from attnscope.questions.ablate import AblateOptions, Ablation, Mode, quantity_column
from attnscope.results.table import HEADS, Estimate, Table
from attnscope.studies.ablate.measurers import (
    N_DONORS,
    QUANTITIES,
    AblationSums,
    Head,
    HeadOutputs,
    HeadShapes,
    Intervention,
    PassSettings,
    Replacements,
    find_head_shapes,
    iterate_head_outputs,
    measure_importance,
    measure_interventions,
    measure_means,
)
from attnscope.studies.ablate.reading import MASKED_SHARE, BatchReader
from attnscope.studies.failures import add_step
from attnscope.studies.inputs.texts import ReportProgress, scale_report, texts_of
from attnscope.studies.run import CorpusRun
from attnscope.studies.workers import Workers

QUANTITY_MINIMA = (0.0, -np.inf, 0.0)
"""The smallest possible value of each of `QUANTITIES`, which are l2, loss and kl. Only the loss can decrease."""

# `_estimate_from_sums` returns arrays with a last axis (value, low, high, count). These are indices into it.
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
    """Ablate heads of a model one at a time, and measure what changes.

        model = attnscope.load("minilm")
        ablation = attnscope.ablate(model, attnscope.Corpus("corpus.txt"))
        ablation["heads"]["zero_l2"]          # (head,), beside zero_l2_low and zero_l2_high
        ablation.save("ablation.npz")

    A head is ablated at the seam, the one function that computes attention for all models: the head's output is
    replaced before the output projection. With grouped queries, one query head is ablated, not its group. On each text
    the model runs once with all heads, and then for each head again from that head's layer on.

    Memory does not grow with the corpus. After an interruption (KeyboardInterrupt) or a failure of a later step, the
    result covers the texts up to the last complete block. It says that it is incomplete (`ablation.run["failures"]`).
    Texts on which the model computes NaN or infinity are dropped, and `ablation.corpus["problems"]` lists them.
    Near-duplicates count once; `ablation.corpus["n_copies"]` counts the dropped ones.

    Args:
        model: A loaded model, see `attnscope.load`.
        corpus: The texts to run it on: a Corpus, or a list of texts.
        options: Which heads are ablated, how, and what is measured.
        report: The progress callback, called after each batch; with workers, after each block of texts.
        workers: Worker processes, which load the model by its name and share the blocks of texts. The result is the
            same. None = this process runs the model.

    Raises:
        AttnscopeError: There is no text, no such head or class, the model has no loss for importances, its heads cannot
            be ablated, or no worker can start.
    """
    options = options or AblateOptions()
    loss = None if options.loss == "none" else model.loss
    reader = BatchReader(model, loss, seed=options.seed, target=options.target, answer=options.answer)
    _check_options(model, options, loss)
    pass_settings = PassSettings(reader, texts_of(corpus, model), workers)
    # The outputs of heads on the first text show their shapes. Resample ablation needs the outputs on N_DONORS other
    # texts, the donors. Because a text cannot be its own donor, one more text is read.
    is_resampled = "resample" in options.modes
    n_outputs = N_DONORS + 1 if is_resampled else 1
    outputs = list(islice(iterate_head_outputs(pass_settings), n_outputs))
    if not outputs:
        raise AttnscopeError("no text is left: none has any token", "give texts with words in them")
    if is_resampled and len(outputs) < 2:
        raise AttnscopeError("resample ablation needs outputs of other texts", "give several texts")
    shapes = find_head_shapes(outputs)
    heads = _choose_heads(model, options, shapes)
    # Each head is ablated alone. If the user named heads (--pick L3H1,L5H11), all of them are also ablated together.
    head_sets: list[tuple[Head, ...]] = [(head,) for head in heads]
    if options.choice.pick is not None and len(heads) > 1:
        head_sets.append(tuple(heads))
    interventions = _list_interventions(head_sets, options.modes)

    # Each pass over the texts reports an equal part of the progress.
    pass_names = []
    if "mean" in options.modes:
        pass_names.append("means")
    if interventions:
        pass_names.append("interventions")
    if options.importance:
        pass_names.append("importance")
    reports = {
        name: scale_report(report, index, len(pass_names)) for index, name in enumerate(pass_names)
    }
    # The first pass computes mean outputs, if mean ablation needs them.
    means_run: CorpusRun[AblationSums] | None = None
    means: HeadOutputs = {}
    if "mean" in options.modes:
        means_run, means = measure_means(pass_settings, shapes, reports["means"])
    # The second pass runs every intervention. Even with none, it measures the loss of the clean run and counts texts.
    ablation_run = measure_interventions(
        pass_settings, interventions, Replacements(means, outputs), reports.get("interventions")
    )
    ablation_run.done.left_out.require_some_left(ablation_run.done.n_texts, model.info)
    # Add the notes and lost blocks of the first pass, except for those that the second pass had, too.
    if means_run is not None:
        ablation_run.notes += [note for note in means_run.notes if note not in ablation_run.notes]
        ablation_run.lost += [problem for problem in means_run.lost if problem not in ablation_run.lost]

    # Make the result.
    tables = _make_tables(ablation_run.done, interventions, loss, heads, head_sets)
    run = ablation_run.describe_run(model.info, _make_notes(model, options))
    run |= {"seed": options.seed, "kinds": list(model.info.kinds)}
    facts = ablation_run.corpus(pass_settings.texts, model.info)
    facts["n_predictions"] = int(ablation_run.done.clean_loss.total("c"))
    # This study does not count the texts that were split into chunks, so the 0 here would be wrong.
    del facts["n_chunked"]
    ablation = Ablation(run, facts, _describe_options(options, loss, tables["heads"]), tables)
    if not options.importance:
        return ablation
    # If the pass for the importances fails, `add_step` returns the result without them, and records the failure in it.
    add = partial(_add_importance, pass_settings, shapes, heads, reports["importance"])
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


def _choose_heads(model: Model, options: AblateOptions, shapes: HeadShapes) -> list[Head]:
    """Return the heads that the options choose, sorted by kind, layer and index."""
    kinds = model.info.kinds
    chosen = options.choice.within(model.info)
    # Pairs (layer, head): the heads that the user named, or all combinations of the chosen layers and head indices.
    chosen_pairs = chosen.picked or set(product(chosen.layers, chosen.heads))
    heads = []
    for kind, layer, index in _list_all_heads(shapes):
        if options.kind in (None, kind) and (layer, index) in chosen_pairs:
            heads.append((kind, layer, index))
    # Every head that the user named must exist. Of combinations, at least one must exist.
    n_required = 1 if chosen.picked is None else len(chosen.picked)
    if len(heads) < n_required:
        raise AttnscopeError(f"{model.info.name} has no such heads", "choose other layers or heads")
    return sorted(heads, key=lambda head: (kinds.index(head[0]), *head[1:]))


def _list_all_heads(shapes: HeadShapes) -> list[Head]:
    """Return all heads of the model, in the order in which it computes them."""
    heads: list[Head] = []
    for (kind, layer), (n_heads, _) in shapes.items():
        heads += [(kind, layer, head) for head in range(n_heads)]
    return heads


def _list_interventions(
    head_sets: Sequence[tuple[Head, ...]], modes: Sequence[Mode]
) -> list[Intervention]:
    """Return an intervention for each mode, donor and set of heads, ordered by mode, then donor, then set."""
    interventions: list[Intervention] = []
    for mode in modes:
        # -1 = the mode needs no donor.
        donors = range(N_DONORS) if mode == "resample" else [-1]
        for donor in donors:
            interventions += [Intervention(heads, mode, donor) for heads in head_sets]
    return interventions


def _add_importance(
    pass_settings: PassSettings,
    shapes: HeadShapes,
    heads: Sequence[Head],
    report: ReportProgress | None,
    ablation: Ablation,
) -> Ablation:
    """Return the result with the importance of each head.

    Its parameter `ablation` comes last, because `add_step` passes it.
    """
    importance_run = measure_importance(pass_settings, shapes, report)
    # The pass measured all heads of the model, (head, 4). The table has only the chosen heads.
    estimates = _estimate_from_sums(importance_run.done.sums, 0.0)
    all_heads = _list_all_heads(shapes)
    rows = [all_heads.index(head) for head in heads]
    table = _add_quantity(ablation.table("heads"), "importance", estimates[rows])
    return replace(ablation, tables={**ablation.tables, "heads": table})


# From sums to columns


def _make_tables(
    done: AblationSums,
    interventions: Sequence[Intervention],
    loss: LossKind | None,
    heads: Sequence[Head],
    head_sets: Sequence[tuple[Head, ...]],
) -> dict[str, Table]:
    """Return the tables: effects of each head, effects of all heads together, and the loss of the clean run."""
    kinds, layers, indices = zip(*heads, strict=True)
    table = Table.of_arrays(HEADS, kind=kinds, layer=layers, head=indices)
    # Without a loss only l2 is measured, the first quantity.
    measured = QUANTITIES if loss else QUANTITIES[:1]
    by_intervention = _estimate_from_sums(done.sums)  # (intervention, quantity, 4)
    joint_rows = []
    for mode in dict.fromkeys(intervention.mode for intervention in interventions):
        # The interventions of a mode are ordered by donor, then set: (donor, set, quantity, 4).
        rows = [row for row, intervention in enumerate(interventions) if intervention.mode == mode]
        by_donor = by_intervention[rows].reshape(-1, len(head_sets), len(QUANTITIES), 4)
        # Average over donors, and clip the low ends of intervals: (set, quantity, 4). The set of all heads, if there is
        # one, comes last, behind the sets of one head.
        effects = by_donor.mean(0)
        effects[..., _LOW] = np.maximum(effects[..., _LOW], QUANTITY_MINIMA)
        for index, quantity in enumerate(measured):
            name = f"{mode}_{quantity}"
            table = _add_quantity(table, name, effects[: len(heads), index])
            joint_rows.append({"quantity": name, "value": _make_cell(effects[-1, index])})
            if mode == "resample" and quantity != "kl":
                # The standard deviation of the value over donors, (head,).
                spread = by_donor[:, : len(heads), index, _VALUE].std(0, ddof=1)
                table = table.with_column(quantity_column(f"{name}_spread"), spread)
    clean_rows = []
    if loss:
        clean_rows.append(
            {"quantity": "loss", "value": _make_cell(_estimate_from_sums(done.clean_loss, 0.0))}
        )
    tables = {"heads": table, "whole": Table.of(Ablation.TABLES["whole"], clean_rows)}
    # The last set is that of all heads only if there are more sets than heads. Else `joint_rows` is not needed.
    if len(head_sets) > len(heads):
        tables["together"] = Table.of(Ablation.TABLES["together"], joint_rows)
    return tables


def _estimate_from_sums(sums: RunningSums, lowest: float = -np.inf) -> Floats:
    """Return (…, 4): value, low and high end of its interval, and count. `lowest` is a lower bound of the low ends."""
    low, high = sums.interval()
    low = np.maximum(low, lowest)
    # "c" is the sum of the counts that `RunningSums.add` got.
    return np.stack([sums.ratio(), low, high, sums.total("c")], -1)


def _make_cell(estimate: Floats) -> Estimate:
    """Return one estimate, (4,) of `_estimate_from_sums`, as a cell of a table."""
    value, low, high, count = estimate
    return Estimate(value, low, high, count=count)


def _add_quantity(heads: Table, name: str, estimates: Floats) -> Table:
    """Return a table of heads with one more column, from the estimates of each head, (head, 4)."""
    value, low, high, count = estimates.T
    return heads.with_column(quantity_column(name), value, low=low, high=high, count=count)


# Notes and options of the result


def _make_notes(model: Model, options: AblateOptions) -> list[str]:
    """Return the notes on the model that a reader of the result needs."""
    notes = []
    if not model.resumes:
        notes.append("This model cannot be run again from a layer on: every head takes a whole forward.")
    if "cross" in model.info.kinds and options.target is None:
        notes.append(
            "No target was given: the decoder reads what the whole model itself writes to each text."
        )
    return notes


def _describe_options(options: AblateOptions, loss: LossKind | None, heads: Table) -> dict[str, Any]:
    """Return the options of the result. They include what is predicted, and how similarly the modes rank the heads."""
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
        "rank_agreement": _correlate_modes(heads, options.modes, "loss" if loss else "l2"),
    }


def _correlate_modes(heads: Table, modes: Sequence[str], quantity: str) -> dict[str, float]:
    """Return Spearman's rank correlation of the heads' effects by two modes, for each pair of modes.

    A pair is left out if there are fewer than three heads, or effects that are not finite.
    """
    # Not at the top of the module, because this import takes most of a second, and `studies.heads`, which imports the
    # module, does not need it.
    from scipy.stats import spearmanr

    agreement = {}
    for first, second in combinations(modes, 2):
        values = np.stack([heads[f"{mode}_{quantity}"] for mode in (first, second)])
        if len(heads) > 2 and np.isfinite(values).all():
            agreement[f"{first}, {second}"] = float(spearmanr(*values).statistic)
    return agreement
