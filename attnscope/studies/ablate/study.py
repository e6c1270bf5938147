"""Measure what changes in a model without each head: `attnscope ablate` and `attnscope.ablate`.

Forward passes are left to `measurers`. `studies.heads` ablates heads too, to check roles, and `save` writes a model.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations, islice, product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnscope.core.plain_torch import with_plain_torch
from attnscope.core.sums import RunningSums
from attnscope.corpus import Corpus, CorpusText
from attnscope.errors import AttnscopeError
from attnscope.models.inside.linear_runs import require_gradients
from attnscope.models.model import Loss, Model
from attnscope.questions.ablate import AblateOptions, Ablation, Mode, quantity_column
from attnscope.results.table import HEADS, Estimate, Table
from attnscope.studies.ablate.measurers import (
    DONORS,
    QUANTITIES,
    Cut,
    Head,
    Passes,
    Shapes,
    StandIns,
    TextPart,
    measure_cuts,
    measure_importance,
    measure_means,
    outputs_of,
    shapes_of,
)
from attnscope.studies.ablate.reading import MASKED, Reader, require_rerunnable
from attnscope.studies.failures import add_step
from attnscope.studies.inputs.texts import Report, scale_report, texts_of
from attnscope.studies.run import Run
from attnscope.studies.workers import Workers

Floats = NDArray[np.float64]

LOWEST = (0.0, -np.inf, 0.0)
"""How low the intervals of `QUANTITIES` reach: a loss may fall, norms and divergences are never below 0."""


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
    reader = Reader(
        model,
        loss,
        seed=options.seed,
        target=options.target,
        answer=options.answer,
    )
    passes = Passes(reader, texts_of(corpus, model), workers)
    # The outputs of heads on the first text tell their shapes; those of several texts are donors.
    is_resampled = "resample" in options.modes
    n_outputs = DONORS + 1 if is_resampled else 1
    outputs = list(islice(outputs_of(passes), n_outputs))
    if not outputs:
        raise AttnscopeError("no text is left: none has any token", "give texts with words in them")
    if is_resampled and len(outputs) < 2:
        raise AttnscopeError("resample ablation needs outputs of other texts", "give several texts")
    shapes = shapes_of(outputs)
    heads = _choose_heads(model, options, shapes)
    # Every head alone, and if heads are picked all of them together.
    sets: list[tuple[Head, ...]] = [(head,) for head in heads]
    if options.choice.pick is not None and len(heads) > 1:
        sets.append(tuple(heads))
    cuts = _list_cuts(sets, options.modes)

    # Go over the texts: for means if they are needed, then for all cuts.
    is_mean = "mean" in options.modes
    n_passes = is_mean + bool(cuts) + options.importance
    reports = iter([scale_report(report, number, n_passes) for number in range(n_passes)])
    stand_ins = StandIns(donors=outputs if is_resampled else [])
    of_means: Run[TextPart] | None = None
    if is_mean:
        of_means, means = measure_means(passes, shapes, next(reports))
        stand_ins = stand_ins._replace(means=means)
    # Without cuts it is the whole model's loss and how many texts there are: no pass of its own is shown for it.
    going = measure_cuts(passes, cuts, stand_ins, next(reports) if cuts else None)
    going.done.left_out.require_some_left(going.done.n_texts, model.info)
    # What is amiss with the pass for means is told once.
    if of_means is not None:
        going.notes += [note for note in of_means.notes if note not in going.notes]
        going.lost += [problem for problem in of_means.lost if problem not in going.lost]

    # The tables, and what the result says of itself.
    tables = _tables(going.done, options.modes, loss, heads, sets)
    run = going.about(model.info, _notes(model, options))
    run |= {"seed": options.seed, "kinds": list(model.info.kinds)}
    facts = going.corpus(passes.texts, model.info)
    facts["n_predictions"] = int(going.done.whole.total("c"))
    del facts["n_chunked"]  # chunks are not counted here
    ablation = Ablation(run, facts, _describe(options, loss, tables["heads"]), tables)
    if not options.importance:
        return ablation
    # A failure loses nothing of the effects.
    add = partial(_add_importance, passes, shapes, heads, next(reports))
    return add_step(ablation, "importance", add)


def _require(model: Model, options: AblateOptions, loss: Loss | None) -> None:
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
    """Return the heads that were chosen, by kind, layer, head."""
    kinds = model.info.kinds
    chosen = options.choice.within(model.info)
    # Single heads that were named, or all of the chosen layers with the chosen numbers.
    places = chosen.picked or set(product(chosen.layers, chosen.heads))
    heads = []
    for kind, layer, number in _every_head(shapes):
        if options.kind in (None, kind) and (layer, number) in places:
            heads.append((kind, layer, number))
    # Every head that was named must be there, and without names at least one.
    n_least = 1 if chosen.picked is None else len(chosen.picked)
    if len(heads) < n_least:
        raise AttnscopeError(f"{model.info.name} has no such heads", "choose other layers or heads")
    return sorted(heads, key=lambda head: (kinds.index(head[0]), *head[1:]))


def _every_head(shapes: Shapes) -> list[Head]:
    """Return all heads of the model, in the order in which it computes them."""
    heads: list[Head] = []
    for place, (n_heads, _) in shapes.items():
        heads += [(*place, head) for head in range(n_heads)]
    return heads


def _list_cuts(sets: Sequence[tuple[Head, ...]], modes: Sequence[Mode]) -> list[Cut]:
    """Return the cuts of all sets of heads, in the order of mode, donor and set."""
    cuts: list[Cut] = []
    for mode in modes:
        donors = range(DONORS) if mode == "resample" else [-1]
        for donor in donors:
            cuts += [Cut(heads, mode, donor) for heads in sets]
    return cuts


def _add_importance(
    passes: Passes,
    shapes: Shapes,
    heads: Sequence[Head],
    report: Report | None,
    ablation: Ablation,
) -> Ablation:
    """Return the result with the importance of each head."""
    going = measure_importance(passes, shapes, report)
    parts = _parts(going.done.sums, 0.0)  # (head of the model, 4)
    # Its rows are all heads of the model; choose those of the table.
    every = _every_head(shapes)
    rows = [every.index(head) for head in heads]
    table = _with_quantity(ablation.table("heads"), "importance", parts[rows])
    return replace(ablation, tables={**ablation.tables, "heads": table})


# From sums to columns


def _tables(
    done: TextPart,
    modes: Sequence[str],
    loss: Loss | None,
    heads: Sequence[Head],
    sets: Sequence[tuple[Head, ...]],
) -> dict[str, Table]:
    """Return the tables of effects: of each head, of the whole model, and of all heads together if that is a set."""
    kinds, layers, numbers = zip(*heads, strict=True)
    table = Table.of_arrays(HEADS, kind=kinds, layer=layers, head=numbers)
    parts = _parts(done.sums)  # (cut, quantity, 4)
    together = []
    for mode in modes:
        n_donors = DONORS if mode == "resample" else 1
        # Cuts are ordered by mode, donor and set: average over donors. (donor, set, quantity, 4)
        of_mode, parts = np.split(parts, [n_donors * len(sets)])
        by_donor = of_mode.reshape(n_donors, len(sets), len(QUANTITIES), 4)
        effects = by_donor.mean(0)
        effects[..., 1] = np.maximum(effects[..., 1], LOWEST)
        for number, quantity in enumerate(QUANTITIES if loss else QUANTITIES[:1]):
            name = f"{mode}_{quantity}"
            table = _with_quantity(table, name, effects[: len(heads), number])
            together.append({"quantity": name, "value": _estimate(effects[-1, number])})
            if mode == "resample" and quantity != "kl":
                spread = by_donor[:, : len(heads), number, 0].std(0, ddof=1)
                table = table.with_column(quantity_column(f"{name}_spread"), spread)
    whole = []
    if loss:
        whole.append({"quantity": "loss", "value": _estimate(_parts(done.whole, 0.0))})
    tables = {
        "heads": table,
        "whole": Table.of(Ablation.TABLES["whole"], whole),
    }
    # The last set is all heads.
    if len(sets) > len(heads):
        tables["together"] = Table.of(Ablation.TABLES["together"], together)
    return tables


def _parts(sums: RunningSums, lowest: float = -np.inf) -> Floats:
    """Return values, the low and high ends of their intervals, and counts, (..., 4); no low end is below `lowest`."""
    low, high = sums.interval()
    low = np.maximum(low, lowest)
    return np.stack([sums.ratio(), low, high, sums.total("c")], -1)


def _estimate(parts: Floats) -> Estimate:
    """Return one of `_parts`, (4,), as a cell of a table."""
    value, low, high, count = parts
    return Estimate(value, low, high, count=count)


def _with_quantity(heads: Table, name: str, parts: Floats) -> Table:
    """Return a table of heads with a further quantity, `_parts` of each head, (head, 4)."""
    value, low, high, count = parts.T
    return heads.with_column(
        quantity_column(name),
        value,
        low=low,
        high=high,
        count=count,
    )


# What the result says of itself


def _notes(model: Model, options: AblateOptions) -> list[str]:
    """Say what the reader must know of the model."""
    notes = []
    if not model.resumes:
        notes.append("This model cannot be run again from a layer on: every head takes a whole forward.")
    if "cross" in model.info.kinds and options.target is None:
        notes.append(
            "No target was given: the decoder reads what the whole model itself writes to each text."
        )
    return notes


def _describe(options: AblateOptions, loss: Loss | None, heads: Table) -> dict[str, Any]:
    """Return the options as the result says them, with what the loss is of and how far modes agree."""
    class_name = f"the class {options.answer or 'that the whole model gives'}"
    predictions: dict[Loss | None, str] = {
        "causal": "each next token",
        "masked": f"masked tokens: {MASKED:.0%} of the tokens, seed {options.seed}",
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
    """Return Spearman's rank correlation of the effects of heads by two modes, for each pair of modes."""
    from scipy.stats import spearmanr  # it takes most of a second, which 'heads' need not wait for

    # Two heads, or effects that are NaN, have no ranks to compare.
    agreement = {}
    for first, second in combinations(modes, 2):
        values = np.stack([heads[f"{mode}_{quantity}"] for mode in (first, second)])
        if len(heads) > 2 and np.isfinite(values).all():
            agreement[f"{first}, {second}"] = float(spearmanr(*values).statistic)
    return agreement
