"""Does the model need this head? A model and texts in, what changes without each head out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations, product
from typing import Any

import numpy as np

from attnscope.core.plain_torch import with_plain_torch
from attnscope.core.sums import RunningSums
from attnscope.corpus import Corpus, CorpusText
from attnscope.errors import AttnscopeError
from attnscope.models.info import ModelInfo
from attnscope.models.model import Loss, Model
from attnscope.questions.ablate import EACH, PLACES, AblateOptions, Ablation, quantity_column
from attnscope.results.table import HEADS, Column, Table
from attnscope.studies.ablate.importance import DIRECTIONS, measure_importance
from attnscope.studies.ablate.measurers import (
    DONORS,
    QUANTITIES,
    Cut,
    CutPart,
    Floats,
    Head,
    MeanOutputs,
    MeanPart,
    StandIns,
    donors_of,
    heads_of,
    measure_cuts,
)
from attnscope.studies.ablate.reading import Passes, Reader, require_rerunnable
from attnscope.studies.failures import failure
from attnscope.studies.inputs.provenance import run_of
from attnscope.studies.inputs.texts import Report, scale_report, texts_of
from attnscope.studies.run import Run
from attnscope.studies.workers import Workers


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

    A head is taken out at the seam: its output is multiplied by 0 before the output projection. With grouped queries
    this is the query head, not its group. Each text is run once whole, and then again from the layer of the head on.

    If there is a loss, it is also split by position: first occurrences of a token, repeated tokens, and the first and
    second half of each text.

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
        AttnscopeError: There is no text, no such head, the model has not the loss that is asked for, its heads cannot
            be taken out, or no worker can begin.
    """
    return _Study(model, corpus, options or AblateOptions(), report, workers).run()


class _Study:
    """One ablation, pass by pass over the texts."""

    def __init__(
        self, model: Model, corpus: Any, options: AblateOptions, report: Report | None, workers: Workers | None
    ) -> None:
        self._model, self._options = model, options
        self._loss = _loss(model, options.loss)
        reader = Reader(model, self._loss, masked=options.masked, seed=options.seed, target=options.target)
        self._passes = Passes(model, reader, texts_of(corpus, model), workers)
        self._chosen = options.choice.within(model.info)
        self._kinds = _kinds(model.info, options)
        if options.importance:
            from attnscope.models.inside.linear_runs import require_gradients

            require_gradients(model)

        # How far it is, over all passes.
        self._report = report
        self._n_passes = sum(map(bool, ("mean" in options.modes, options.modes, options.importance)))
        self._n_begun = 0
        self._lost: list[dict[str, Any]] = []
        self._notes: list[str] = []
        self._failures: list[Mapping[str, str]] = []

    def run(self) -> Ablation:
        """Return what changes without heads."""
        options = self._options
        stand_ins = self._stand_ins()
        heads = self._heads(stand_ins)

        # Every head alone, and if heads are picked all of them together, in every mode.
        sets: list[tuple[Head, ...]] = [(head,) for head in heads]
        if options.choice.pick is not None and len(heads) > 1:
            sets.append(tuple(heads))
        cuts = []
        for mode in options.modes:
            donors = range(DONORS) if mode == "resample" else [-1]
            cuts += [Cut(cut_heads, mode, donor) for donor, cut_heads in product(donors, sets)]
        # Without cuts it is the whole model's loss and how many texts there are: no pass of its own is shown for it.
        result = measure_cuts(self._passes, cuts, stand_ins, self._next() if cuts else None)
        self._keep(result)
        result.done.left_out.require_some_left(result.done.n_texts, self._model.info)

        columns, values, together = self._effects(result.done, len(sets), len(heads))
        complete = result.complete
        if complete and options.importance:
            complete = self._try_importance(stand_ins.n_heads, heads, columns, values)
        kinds, layers, numbers = zip(*heads, strict=True)
        tables = {
            "heads": Table.of_arrays([*HEADS, *columns], kind=kinds, layer=layers, head=numbers, **values),
            "whole": self._whole(result.done),
        }
        if len(sets) > len(heads):
            tables["together"] = together
        return Ablation(self._run(), self._corpus(result, complete), self._describe(tables["heads"]), tables)

    def _stand_ins(self) -> StandIns:
        """Return how many heads there are, and what takes their place."""
        if "mean" in self._options.modes:
            means = self._passes.run(MeanOutputs, {}, MeanPart(), self._next())
            if means.error is not None:
                raise means.error
            if not means.complete:
                raise KeyboardInterrupt  # means of some texts are none
            self._keep(means)
            stand_ins = means.done.stand_ins
        else:
            stand_ins = heads_of(self._passes)
        if not stand_ins.n_heads:
            raise AttnscopeError("no text is left: none has any token", "give texts with words in them")
        donors = donors_of(self._passes) if "resample" in self._options.modes else ()
        return StandIns(stand_ins.n_heads, stand_ins.means, donors)

    def _heads(self, stand_ins: StandIns) -> list[Head]:
        """Return the heads that were chosen, by kind, layer, head."""
        info, chosen = self._model.info, self._chosen
        heads: list[Head] = []
        for kind in self._kinds:
            most = info.n_heads[info.kinds.index(kind)]
            for layer in chosen.layers:
                n_heads = stand_ins.n_heads.get((kind, layer), 0)  # type: ignore[arg-type]  # the model's own kinds
                if not n_heads and chosen.picked is not None:
                    raise AttnscopeError(f"{info.name} has no {kind} attention in layer {layer}", "choose other heads")
                heads += [(kind, layer, head) for head in chosen.heads if head < min(n_heads, most)]
        if chosen.picked is not None:
            heads = [head for head in heads if head[1:] in chosen.picked]
            missing = [pick for pick in chosen.picked if pick not in {head[1:] for head in heads}]
            if missing:
                layer, number = missing[0]
                raise AttnscopeError(f"there is no head {number} in layer {layer} of {info.name}", "choose other heads")
        if not heads:
            raise AttnscopeError(f"{info.name} has no such heads", "choose other layers or heads")
        return heads

    # From sums to columns

    def _effects(self, done: CutPart, n_sets: int, n_heads: int) -> tuple[list[Column], dict[str, Floats], Table]:
        """Return the effects of heads as columns, and those of all of them together as a table."""
        parts = _parts(done.sums)  # (cut, quantity, 4)
        columns: list[Column] = []
        values: dict[str, Floats] = {}
        rows = []
        first = 0
        for mode in self._options.modes:
            n_donors = DONORS if mode == "resample" else 1
            of_mode = parts[first : first + n_donors * n_sets].reshape(n_donors, n_sets, len(QUANTITIES), 4)
            first += n_donors * n_sets
            for number, quantity in enumerate(QUANTITIES if self._loss else QUANTITIES[:1]):
                name = f"{mode}_{quantity}"
                effects, spread = _over_donors(of_mode[:, :, number])
                if quantity in ("l2", "kl"):
                    effects[:, 1] = np.maximum(effects[:, 1], 0)  # losses may fall; these are never below 0
                columns.append(quantity_column(name))
                values |= _as_columns(name, effects[:n_heads])
                rows.append((name, effects[-1]))
                if mode == "resample" and quantity in ("l2", "loss"):
                    columns.append(quantity_column(f"{name}_spread"))
                    values[f"{name}_spread"] = spread[:n_heads]
        together = Table.of_arrays(
            Ablation.TABLES["together"],
            quantity=[name for name, _ in rows],
            **_as_columns("value", np.array([effect for _, effect in rows]).reshape(-1, 4)),
        )
        return columns, values, together

    def _whole(self, done: CutPart) -> Table:
        """Return the loss of the unchanged model, and that by position."""
        quantities = ["loss", *(f"loss_{place}" for place in PLACES)] if self._loss else []
        parts = _parts(done.whole)[: len(quantities)]
        parts[:, 1] = np.maximum(parts[:, 1], 0)
        return Table.of_arrays(Ablation.TABLES["whole"], quantity=quantities, **_as_columns("value", parts))

    def _try_importance(
        self, n_heads: Mapping[Any, int], heads: Sequence[Head], columns: list[Column], values: dict[str, Floats]
    ) -> bool:
        """Add importances; return whether all texts are in them. A failure loses nothing of the effects."""
        has_loss = self._loss is not None
        try:
            result = measure_importance(
                self._passes, n_heads, has_loss=has_loss, seed=self._options.seed, report=self._next()
            )
        except KeyboardInterrupt:
            return False
        except Exception as error:
            self._failures.append(failure("importance", error))
            return False
        self._keep(result)
        parts = _parts(result.done.sums)
        parts[:, 1] = np.maximum(parts[:, 1], 0)
        places = [place for place, n in n_heads.items() for _ in range(n)]
        if self._options.by_layer:
            for place in n_heads:
                mine = [row for row, other in enumerate(places) if other == place]
                parts[mine, :3] /= np.linalg.norm(parts[mine, 0]) or 1.0
        numbers = [(*place, head) for place, n in n_heads.items() for head in range(n)]
        name = "importance" if has_loss else "sensitivity"
        columns.append(quantity_column(name, by_layer=self._options.by_layer, n_directions=DIRECTIONS))
        values |= _as_columns(name, parts[[numbers.index(head) for head in heads]])
        return result.complete

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
        if not require_rerunnable(self._model).resumes:
            notes.append("This model cannot be run again from a layer on: every head takes a whole forward.")
        if "cross" in info.kinds and self._options.target is None:
            notes.append("No target was given: the decoder reads what the whole model itself writes to each text.")
        run = run_of(info, [*notes, *dict.fromkeys(self._notes)])
        run |= {"seed": self._options.seed, "kinds": list(info.kinds)}
        if self._failures:
            run["failures"] = [dict(each) for each in self._failures]
        return run

    def _corpus(self, result: Run[CutPart], complete: bool) -> dict[str, Any]:
        facts = result.corpus(self._passes.texts, self._model.info)
        of_other_passes = [problem for problem in self._lost if problem not in facts["problems"]]
        facts |= {"problems": [*of_other_passes, *facts["problems"]], "complete": complete}
        del facts["n_chunked"]  # chunks are not counted here
        return {**facts, "n_predictions": result.done.n_predictions}

    def _describe(self, heads: Table) -> dict[str, Any]:
        options = self._options
        return {
            "modes": list(options.modes),
            "mean_over": "all real tokens of all texts, whatever their position" if "mean" in options.modes else None,
            "loss": self._loss,
            "predicted": _name_predictions(self._loss, options),
            "masked": options.masked if self._loss == "masked" else None,
            "target": options.target,
            "normalized": "layer" if options.by_layer else None,
            "directions": None if self._loss else DIRECTIONS,
            "rank_agreement": _rank_agreement(heads, options.modes, "loss" if self._loss else "l2"),
        }


def _parts(sums: RunningSums) -> Floats:
    """Return values, the ends of their intervals, and counts, (..., 4)."""
    low, high = sums.interval()
    return np.stack([sums.ratio(), low, high, sums.total("c")], -1)


def _as_columns(name: str, parts: Floats) -> dict[str, Floats]:
    """Return values with what stands beside them, (row, 4), as columns of a table."""
    value, low, high, counts = parts.T
    return {name: value, f"{name}_low": low, f"{name}_high": high, f"{name}_count": counts}


def _over_donors(parts: Floats) -> tuple[Floats, Floats]:
    """Return the mean over donors of values, (donor, set, 4), and the standard deviation of the values over donors."""
    if len(parts) == 1:
        return parts[0].copy(), np.zeros(parts.shape[1])
    return parts.mean(0), parts[..., 0].std(0, ddof=1)


def _rank_agreement(heads: Table, modes: Sequence[str], quantity: str) -> dict[str, float]:
    """Return Spearman's rank correlation of the effects of heads by two modes, for each pair of modes."""
    from scipy.stats import spearmanr

    agreement = {}
    for first, second in combinations(modes, 2):
        values = np.stack([heads[f"{mode}_{quantity}"] for mode in (first, second)])
        if len(heads) > 2 and np.isfinite(values).all():
            agreement[f"{first}, {second}"] = float(spearmanr(*values).statistic)
    return agreement


def _loss(model: Model, name: str) -> Loss | None:
    """Return the loss to use.

    Raises:
        AttnscopeError: The model has no head for it.
    """
    own = require_rerunnable(model).loss
    if name == "none":
        return None
    if name in ("auto", own):
        return own
    heads = {"causal": "next tokens", "masked": "masked tokens", "target": "a target"}
    has = f"its head predicts {heads[own]}" if own else "it has no language-model head"
    raise AttnscopeError(
        f"{model.info.name} does not predict {heads[name]}: {has}",
        f"--loss {own}" if own else "leave out --loss: hidden states are compared then",
    )


def _kinds(info: ModelInfo, options: AblateOptions) -> tuple[str, ...]:
    """Return the kinds of attention that heads are taken out of."""
    if options.kind is not None and options.kind not in info.kinds:
        raise AttnscopeError(f"{info.name} has no {options.kind} attention", f"it has {', '.join(info.kinds)}")
    if options.kind is None and options.choice.pick is not None and len(info.kinds) > 1:
        raise AttnscopeError(
            f"{info.name} has several kinds of attention, and each has such heads", f"say --kind {info.kinds[-1]}"
        )
    return info.kinds if options.kind is None else (options.kind,)


def _name_predictions(loss: Loss | None, options: AblateOptions) -> str | None:
    """Say what is predicted."""
    if loss == "causal":
        return "each next token"
    if loss == "target":
        return "the decoder's target"
    if loss is None:
        return None
    if options.masked == EACH:
        return "masked tokens: each ordinary token in turn"
    return f"masked tokens: {float(options.masked):.0%} of the tokens, seed {options.seed}"
