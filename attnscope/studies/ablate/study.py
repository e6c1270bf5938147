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
from attnscope.models.info import ModelInfo
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
from attnscope.studies.ablate.reading import Passes, Reader, require_rerunnable
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
    return _Study(model, corpus, options or AblateOptions(), report, workers).run()


class _Study:
    """Run one ablation, pass by pass over the texts."""

    def __init__(
        self, model: Model, corpus: Any, options: AblateOptions, report: Report | None, workers: Workers | None
    ) -> None:
        self._model = model
        self._options = options
        self._loss = None if options.loss == "none" else require_rerunnable(model).loss
        if options.importance:
            _require_slopes(model, self._loss)
        how = {name: getattr(options, name) for name in ("masked", "seed", "target", "answer")}
        self._passes = Passes(model, Reader(model, self._loss, **how), texts_of(corpus, model), workers)
        self._chosen = options.choice.within(model.info)
        self._kinds = _kinds(model.info, options)

        # How far it is, over all passes.
        self._report = report
        self._n_passes = ("mean" in options.modes) + bool(options.modes) + options.importance
        self._n_begun = 0
        self._notes: list[str] = []
        self._failures: list[Mapping[str, str]] = []
        self._lost: list[dict[str, Any]] = []

    def run(self) -> Ablation:
        """Return what changes without heads."""
        options = self._options
        n_heads = heads_of(self._passes)
        if not n_heads:
            raise AttnscopeError("no text is left: none has any token", "give texts with words in them")
        heads = self._heads(n_heads)

        # Every head alone, and if heads are picked all of them together, in every mode.
        sets: list[tuple[Head, ...]] = [(head,) for head in heads]
        if options.choice.pick is not None and len(heads) > 1:
            sets.append(tuple(heads))
        cuts = []
        for mode in options.modes:
            for donor in range(DONORS) if mode == "resample" else [-1]:
                cuts += [Cut(each, mode, donor) for each in sets]
        # Without cuts it is the whole model's loss and how many texts there are: no pass of its own is shown for it.
        result = measure_cuts(self._passes, cuts, self._stand_ins(), self._next() if cuts else None)
        self._keep(result)
        result.done.left_out.require_some_left(result.done.n_texts, self._model.info)

        table, together = self._effects(result.done, heads, len(sets))
        complete = result.complete
        if complete and options.importance:
            table, complete = self._try_importance(table, n_heads, heads)
        tables = {"heads": table, "whole": self._whole(result.done)}
        if len(sets) > len(heads):
            tables["together"] = together
        return Ablation(self._run(), self._corpus(result, complete), self._describe(table), tables)

    def _stand_ins(self) -> StandIns:
        """Return what takes the place of heads."""
        modes = self._options.modes
        means = {}
        if "mean" in modes:
            going = self._passes.run(MeanOutputs, {}, MeanPart(), self._next())
            if going.error is not None:
                raise going.error
            if not going.complete:
                raise KeyboardInterrupt  # means of some texts are none
            self._keep(going)
            means = going.done.means()
        return StandIns(means, donors_of(self._passes) if "resample" in modes else ())

    def _heads(self, n_heads: Mapping[Place, int]) -> list[Head]:
        """Return the heads that were chosen, by kind, layer, head."""
        chosen = self._chosen
        heads: list[Head] = []
        for kind in self._kinds:
            for layer in chosen.layers:
                n_here = n_heads.get((kind, layer), 0)  # type: ignore[arg-type]  # the model's own kinds
                heads += [(kind, layer, head) for head in chosen.heads if head < n_here]
        if chosen.picked is not None:
            heads = [head for head in heads if head[1:] in chosen.picked]
        if len(heads) < len(chosen.picked or [0]):
            raise AttnscopeError(f"{self._model.info.name} has no such heads", "choose other layers or heads")
        return heads

    # From sums to columns

    def _effects(self, done: TextPart, heads: Sequence[Head], n_sets: int) -> tuple[Table, Table]:
        """Return the table of heads, and the effects of all of them together."""
        kinds, layers, numbers = zip(*heads, strict=True)
        table = Table.of_arrays(HEADS, kind=kinds, layer=layers, head=numbers)
        parts = _parts(done.sums)  # (cut, quantity, 4)
        names = []
        together = []
        first = 0
        for mode in self._options.modes:
            n_donors = DONORS if mode == "resample" else 1
            # Cuts are ordered by mode, donor and set: average over donors. (donor, set, quantity, 4)
            by_donor = parts[first : first + n_donors * n_sets].reshape(n_donors, n_sets, len(QUANTITIES), 4)
            first += len(by_donor) * n_sets
            for number, quantity in enumerate(QUANTITIES if self._loss else QUANTITIES[:1]):
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

    def _whole(self, done: TextPart) -> Table:
        """Return the loss of the unchanged model."""
        columns = Ablation.TABLES["whole"]
        quantities = ["loss"] if self._loss else []
        parts = _bounded("kl", _parts(done.whole)[None])[: len(quantities)]
        return Table.of_arrays(columns, quantity=quantities, **_as_columns(parts))

    def _try_importance(self, table: Table, n_heads: Mapping[Place, int], heads: Sequence[Head]) -> tuple[Table, bool]:
        """Add importances; return whether all texts are in them. A failure loses nothing of the effects."""
        try:
            result = measure_importance(self._passes, n_heads, self._next())
        except KeyboardInterrupt:
            return table, False
        except Exception as error:
            self._failures.append(failure("importance", error))
            return table, False
        self._keep(result)
        numbers = [(*place, head) for place, n in n_heads.items() for head in range(n)]
        rows = [numbers.index(head) for head in heads]  # type: ignore[arg-type]  # the model's own kinds
        return _with_quantity(table, "importance", _parts(result.done.sums)[rows]), result.complete

    # What the result says of itself

    def _next(self) -> Report | None:
        self._n_begun += 1
        return scale_report(self._report, self._n_begun - 1, self._n_passes)

    def _keep(self, result: Run[Any]) -> None:
        """Keep what a pass says of memory, failures and lost workers."""
        self._failures += result.failures
        self._notes += result.notes
        self._lost += [problem for problem in result.lost if problem not in self._lost]

    def _run(self) -> dict[str, Any]:
        info = self._model.info
        notes = []
        if not self._model.resumes:
            notes.append("This model cannot be run again from a layer on: every head takes a whole forward.")
        if "cross" in info.kinds and self._options.target is None:
            notes.append("No target was given: the decoder reads what the whole model itself writes to each text.")
        run = run_of(info, [*notes, *dict.fromkeys(self._notes)])
        run |= {"seed": self._options.seed, "kinds": list(info.kinds)}
        if self._failures:
            run["failures"] = [dict(each) for each in self._failures]
        return run

    def _corpus(self, result: Run[TextPart], complete: bool) -> dict[str, Any]:
        facts = result.corpus(self._passes.texts, self._model.info)
        of_other_passes = [problem for problem in self._lost if problem not in facts["problems"]]
        facts |= {"problems": [*of_other_passes, *facts["problems"]], "complete": complete}
        del facts["n_chunked"]  # chunks are not counted here
        return {**facts, "n_predictions": result.done.n_predictions}

    def _describe(self, heads: Table) -> dict[str, Any]:
        options = self._options
        predictions: dict[Loss | None, str | None] = {
            "causal": "each next token",
            "masked": f"masked tokens: {options.masked:.0%} of the tokens, seed {options.seed}",
            "target": "the decoder's target",
            "class": f"the class {options.answer or 'that the whole model gives'}",
            "token_class": f"the class {options.answer or 'that the whole model gives'}, of each token",
        }
        return {
            "modes": list(options.modes),
            "mean_over": "all real tokens of all texts, whatever their position" if "mean" in options.modes else None,
            "loss": self._loss,
            "predicted": predictions.get(self._loss),
            "masked": options.masked if self._loss == "masked" else None,
            "target": options.target,
            "answer": options.answer,
            "rank_agreement": _rank_agreement(heads, options.modes, "loss" if self._loss else "l2"),
        }


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


def _rank_agreement(heads: Table, modes: Sequence[str], quantity: str) -> dict[str, float]:
    """Return Spearman's rank correlation of the effects of heads by two modes, for each pair of modes."""
    from scipy.stats import spearmanr  # it takes most of a second, which 'heads' need not wait for

    agreement = {}
    for first, second in combinations(modes, 2):
        values = np.stack([heads[f"{mode}_{quantity}"] for mode in (first, second)])
        if len(heads) > 2 and np.isfinite(values).all():
            agreement[f"{first}, {second}"] = float(spearmanr(*values).statistic)
    return agreement


def _require_slopes(model: Model, loss: Loss | None) -> None:
    """Refuse importances of a model without a loss, or without gradients."""
    if loss is None:
        raise AttnscopeError(
            f"importance is the slope of a loss, and {model.info.name} has none here: no head predicts anything",
            "leave out --importance, or choose a model with its head",
        )
    require_gradients(model)


def _kinds(info: ModelInfo, options: AblateOptions) -> tuple[str, ...]:
    """Return the kinds of attention that heads are taken out of."""
    if options.kind is not None:
        return (info.choose_kind(options.kind),)
    if options.choice.pick is not None and len(info.kinds) > 1:
        raise AttnscopeError(
            f"{info.name} has several kinds of attention, and each has such heads", f"say --kind {info.kinds[-1]}"
        )
    return info.kinds
