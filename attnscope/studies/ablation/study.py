"""Does the model need this head? A model and texts in, what changes without each head out."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, product
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from attnscope.core.plain_torch import with_plain_torch
from attnscope.corpus import Copies, Corpus, CorpusText, distinct
from attnscope.errors import AttnscopeError, amount
from attnscope.models.info import ModelInfo
from attnscope.models.model import Loss, Model
from attnscope.records.ablation import Ablation, Curve, Effect, Effects, HeadEffects, SetEffects, TokenChange
from attnscope.studies.ablation.effects import (
    add_loss,
    causal_share,
    describe_quantities,
    effects_by_cut,
    effects_of,
    rows_of,
    whole_losses,
)
from attnscope.studies.ablation.importance import DIRECTIONS, importance, normalized_by_layer
from attnscope.studies.ablation.lines import Lines, apart, fit_lines, require_one_kind
from attnscope.studies.ablation.means import heads_of, means_of
from attnscope.studies.ablation.options import EACH, FITTED, REPLACED, AblateOptions, Mode
from attnscope.studies.ablation.reading import Reader
from attnscope.studies.ablation.sweep import (
    QUANTITIES,
    Cut,
    Found,
    Going,
    HeadPlace,
    StandIns,
    measure,
    require_rerunnable,
)
from attnscope.studies.ablation.worst_tokens import WorstTokens
from attnscope.studies.describe.study import FAILURES
from attnscope.studies.inputs.provenance import run_of
from attnscope.studies.inputs.texts import Report, Texts, problems_of, scale_report, sha256_of, sources_of, texts_of
from attnscope.studies.running.late import failure
from attnscope.studies.running.memory import halving_note
from attnscope.studies.running.passes import Pass, merge_halving
from attnscope.studies.running.workers import Workers

if TYPE_CHECKING:
    from torch import Tensor

    from attnscope.core.attention.probes import Place

R = TypeVar("R")

CURVE_POINTS, RANDOM_ORDERS = 24, 5
REPLACED_POINTS, REPLACED_ORDERS = 8, 3
"""The same where heads get other weights, each control as many: nearly every point is a whole forward of each text."""

WORST_HEADS = 10
"""Heads of which as many tokens are kept that suffer from their lines as of all together."""

MOST_IMPORTANT = 8
"""Heads of which all pairs are taken out where none are picked."""


@with_plain_torch
def ablate(
    model: Model,
    corpus: Corpus | str | Sequence[str] | Sequence[CorpusText],
    options: AblateOptions | None = None,
    report: Report | None = None,
    workers: Workers | None = None,
) -> Ablation:
    """Takes heads out of a model, and measures what changes.

        model = attnscope.load("minilm")
        ablation = attnscope.ablate(model, attnscope.Corpus("corpus.txt"))
        ablation.heads[2].effects["zero_l2"]  # value, low, high, count
        ablation.save("ablation.npz")

    A head is taken out at the seam: its output is multiplied by 0 before the output projection. With grouped queries
    this is the query head, not its group. Each text is run once whole, and then again from the layer of the head on.

    If there is a loss, it is also split by position: first occurrences of a token, repeated tokens, and the first and
    second half of each text.

    Memory does not grow with the corpus. After an interruption (KeyboardInterrupt) or a failure of a later step, the
    record covers the texts up to the last whole block, and says that it is incomplete (`run["failures"]`). Texts on
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
    options = options or AblateOptions()
    return _Study(model, texts_of(corpus, model), options, report, workers).run()


class _Study:
    """One ablation, pass by pass over the texts."""

    def __init__(
        self, model: Model, texts: Texts, options: AblateOptions, report: Report | None, workers: Workers | None
    ) -> None:
        self.model, self.texts, self.options = model, texts, options
        self.loss = _loss(model, options.loss)
        reader = Reader(model, self.loss, masked=options.masked, seed=options.seed, target=options.target)
        fitted, tried = self._apart()
        self._lines = self._fit_lines(fitted, tried)
        self._going, self._fitting = (Going(model, reader, some, workers) for some in (tried, fitted))
        self._halved_to: int | None = None
        self._lost: list[dict[str, Any]] = []
        self._notes: list[str] = []
        self.kinds = _kinds(model.info, options)
        self._chosen = options.choice.within(model.info)
        self._report = report
        self._by_importance = options.curve and not set(options.modes) & set(REPLACED)
        wants_importance = options.importance or self._by_importance
        if wants_importance:
            from attnscope.models.inside.linear_runs import require_gradients

            require_gradients(model)
        passes = (
            "mean" in options.modes,
            "pattern" in options.modes,
            options.modes,
            wants_importance,
            options.joint,
            options.curve,
        )
        self._n_passes = sum(map(bool, passes))
        self._pass = 0
        self._failures: list[Mapping[str, str]] = []
        self.stand_ins = StandIns({})

    def run(self) -> Ablation:
        options = self.options
        if "mean" in options.modes:
            self.stand_ins, self._lost = means_of(self._going, self._next())
        else:
            self.stand_ins = heads_of(self._going)
        patterns: Mapping[Place, Tensor] = {}
        if "pattern" in options.modes:
            means, lost = means_of(self._fitting, self._next(), patterns=True)
            patterns, self._lost = means.means, self._lost + lost
        self.stand_ins = replace(self.stand_ins, lines=self._lines, patterns=patterns)
        if not self.stand_ins.n_heads:
            raise AttnscopeError("no text is left: none has any token", "give texts with words in them")
        heads = self._heads()
        if self.options.joint and len(heads) < 2:
            raise AttnscopeError("a pair has two heads, and one is chosen", "choose more heads")
        singles = [Cut((head,), mode) for mode in options.modes for head in heads]
        picked = self.options.choice.pick is not None and len(heads) > 1
        together = [Cut(tuple(heads), mode) for mode in options.modes if picked or mode == "line" and len(heads) > 1]
        cuts = [*singles, *together]
        lines = [number for number, cut in enumerate(cuts) if cut.mode == "line"]
        result = self._measure(cuts, self._beside_uniform(heads, len(cuts)), lines)
        result.done.left_out.require_some_left(result.done.n_texts, self.model.info)
        effects = effects_by_cut(result, cuts, self.loss)
        by_head: dict[HeadPlace, dict[str, Effect]] = {head: {} for head in heads}
        for cut in singles:
            by_head[cut.heads[0]] |= effects[cut]
        if self._compares_lines:
            self._add_causal_shares(by_head, result, len(cuts))
        sets = []
        if together:
            joined = {name: effect for cut in together for name, effect in effects[cut].items()}
            sets.append(SetEffects(self._names(heads), joined, {}))
        complete = result.complete
        curves: list[Curve] = []
        if complete and (options.importance or self._by_importance):
            complete = self._try("importance", lambda: self._add_importance(by_head)) or False
        if complete and options.joint:
            pairs, complete = self._try("--joint", lambda: self._pairs(heads, by_head)) or ([], False)
            sets += pairs
        if complete and options.curve:
            curves, complete = self._try("--curve", lambda: self._curves(heads, by_head, result)) or ([], False)
        if not options.importance:
            for of_head in by_head.values():
                of_head.pop(self._importance, None)
        return Ablation(
            run=self._run(),
            corpus=self._corpus(result, complete),
            options=self._describe(),
            whole=whole_losses(result) if self.loss else {},
            heads=tuple(HeadEffects(*head, by_head[head]) for head in heads),
            sets=tuple(sets),
            curves=tuple(curves),
            worst_tokens=self._worst_tokens(cuts, effects, result.done.worst),
        )

    def _try(self, step: str, do: Callable[[], R]) -> R | None:
        """The result of a later step; None if it fails, which loses nothing of the earlier results."""
        try:
            return do()
        except KeyboardInterrupt:
            return None
        except Exception as error:
            self._failures.append(failure(step, error))
            return None

    @property
    def _importance(self) -> str:
        return "importance" if self.loss else "sensitivity"

    def _next(self) -> Report | None:
        self._pass += 1
        return scale_report(self._report, self._pass - 1, self._n_passes)

    def _measure(
        self, cuts: Sequence[Cut], contrasts: NDArray[np.float64] | None = None, tokens_of: Sequence[int] = ()
    ) -> Pass[Found]:
        # Without cuts it is the whole model's loss and how many texts there are: no pass of its own is shown for it.
        report = self._next() if cuts else None
        result = measure(self._going, cuts, self.stand_ins, contrasts=contrasts, tokens_of=tokens_of, report=report)
        self._note(result)
        return result

    def _note(self, result: Pass[Any]) -> None:
        """Keeps what a pass says of memory, failures and lost workers."""
        self._failures += result.failures
        self._notes += result.notes
        self._halved_to = merge_halving(self._halved_to, result.done.halved_to)
        self._lost += [problem for problem in result.lost if problem not in self._lost]

    def _heads(self) -> list[HeadPlace]:
        """The heads that were chosen, by kind, layer, head."""
        info, chosen = self.model.info, self._chosen
        heads = []
        for kind in self.kinds:
            number = info.kinds.index(kind)
            for layer in chosen.layers:
                n_heads = self.stand_ins.n_heads.get((kind, layer), 0)  # type: ignore[arg-type]  # the model's own kinds
                if not n_heads and chosen.picked is not None:
                    raise AttnscopeError(f"{info.name} has no {kind} attention in layer {layer}", "choose other heads")
                heads += [(kind, layer, head) for head in chosen.heads if head < min(n_heads, info.n_heads[number])]
        if chosen.picked is not None:
            heads = [place for place in heads if place[1:] in chosen.picked]
            missing = [pick for pick in chosen.picked if pick not in {place[1:] for place in heads}]
            if missing:
                layer, head = missing[0]
                raise AttnscopeError(f"there is no head {head} in layer {layer} of {info.name}", "choose other heads")
        if not heads:
            raise AttnscopeError(f"{info.name} has no such heads", "choose other layers or heads")
        return heads

    def _add_importance(self, by_head: Mapping[HeadPlace, dict[str, Effect]]) -> bool:
        options = self.options
        result = importance(
            self._going, self.stand_ins, has_loss=self.loss is not None, seed=options.seed, report=self._next()
        )
        self._note(result)
        norms: Mapping[Place, float] = dict.fromkeys(result.done.sums, 1.0)
        if options.by_layer:
            norms = normalized_by_layer({place: sums.ratio() for place, sums in result.done.sums.items()})
        estimates = {place: effects_of(sums) for place, sums in result.done.sums.items()}
        for (kind, layer, head), effects in by_head.items():
            place: Place = (kind, layer)  # type: ignore[assignment]
            estimate, norm = estimates[place][head], norms[place]
            effects[self._importance] = replace(
                estimate, value=estimate.value / norm, low=estimate.low / norm, high=estimate.high / norm
            )
        return result.complete

    # Lines in the place of weights ---------------------------------------------------------------------------------

    def _apart(self) -> tuple[Sequence[CorpusText], Texts]:
        """The texts to fit lines and patterns on, half of them if a mode asks for it, and those to try them on."""
        if not set(FITTED) & set(self.options.modes):
            return (), self.texts
        if {"line", "other"} & set(self.options.modes):
            require_one_kind(self.model)
        return apart(list(distinct(self.texts, Copies())), self.options.seed)

    def _fit_lines(self, fitted: Sequence[CorpusText], tried: Texts) -> Lines | None:
        """Descriptions of heads, if a mode asks for them."""
        if not {"line", "other"} & set(self.options.modes):
            return None
        return fit_lines(self.model, fitted, list(tried), self.options.seed)

    @property
    def _compares_lines(self) -> bool:
        return {"line", "uniform"} <= set(self.options.modes)

    def _beside_uniform(self, heads: Sequence[HeadPlace], n_cuts: int) -> NDArray[np.float64] | None:
        """Each cut, and for each head its line less uniform attention, which pairs them text by text."""
        if not self._compares_lines:
            return None
        modes = self.options.modes
        less = np.zeros((len(heads), n_cuts))
        for row in range(len(heads)):
            less[row, modes.index("line") * len(heads) + row] = 1
            less[row, modes.index("uniform") * len(heads) + row] = -1
        return np.concatenate([np.eye(n_cuts), less])

    def _add_causal_shares(self, by_head: dict[HeadPlace, dict[str, Effect]], result: Pass[Found], n_cuts: int) -> None:
        name, modes, n = "loss" if self.loss else "l2", self.options.modes, len(by_head)
        rows = [row[name] for row in rows_of(result.done.sums, "", self.loss, signed=True)]
        for at, effects in enumerate(by_head.values()):
            line, uniform = (rows[modes.index(mode) * n + at] for mode in ("line", "uniform"))
            effects["causal_share"] = causal_share(line, uniform, rows[n_cuts + at])

    def _worst_tokens(
        self, cuts: Sequence[Cut], effects: Mapping[Cut, Effects], worst: WorstTokens
    ) -> tuple[TokenChange, ...]:
        """The tokens that suffer most, all heads together first, then by head; fewer of heads that matter less."""
        name = "line_loss" if self.loss else "line_l2"
        singles = [cut for number, cut in enumerate(cuts) if number in worst.by_cut and len(cut.heads) == 1]
        most = sorted(singles, key=lambda cut: -effects[cut][name].value)[:WORST_HEADS]
        rows = sorted(worst.by_cut.items(), key=lambda row: len(cuts[row[0]].heads) == 1)
        return tuple(
            replace(token, heads=self._names(cut.heads)[0] if cut in singles else "")
            for cut, tokens in ((cuts[number], tokens) for number, tokens in rows)
            for token in (tokens if cut in most or cut not in singles else tokens[:FAILURES])
        )

    def _pairs(self, heads: Sequence[HeadPlace], by_head: Mapping[HeadPlace, Effects]) -> tuple[list[SetEffects], bool]:
        """All pairs, and how much more changes without both than without each alone, text by text."""
        mode = self.options.modes[0]
        chosen = list(heads)
        if self.options.choice.pick is None:
            ranked = sorted(heads, key=lambda head: -self._effect(by_head[head]))
            chosen = sorted(ranked[:MOST_IMPORTANT], key=list(heads).index)
        pairs = list(combinations(range(len(chosen)), 2))
        cuts = [Cut((head,), mode) for head in chosen]
        cuts += [Cut((chosen[a], chosen[b]), mode) for a, b in pairs]
        contrasts = np.zeros((2 * len(pairs), len(cuts)))
        for row, (a, b) in enumerate(pairs):
            contrasts[2 * row : 2 * row + 2, len(chosen) + row] = 1
            contrasts[2 * row + 1, [a, b]] = -1
        result = self._measure(cuts, contrasts)
        both, more = (rows_of(result.done.sums, mode, self.loss, signed=signed) for signed in (False, True))
        return [
            SetEffects(self._names([chosen[a], chosen[b]]), both[2 * row], more[2 * row + 1])
            for row, (a, b) in enumerate(pairs)
        ], result.complete

    def _curves(
        self, heads: Sequence[HeadPlace], by_head: Mapping[HeadPlace, Effects], result: Pass[Found]
    ) -> tuple[list[Curve], bool]:
        """Heads taken out one after another: those that matter least first, and in random orders."""
        orders: list[tuple[str, int | None, list[HeadPlace]]] = []
        if self._by_importance:
            least = sorted(heads, key=lambda head: by_head[head][self._importance].value)
            orders.append((self._importance, None, least))
        if self._lines is not None:
            best = sorted(heads, key=self._explained_share, reverse=True)
            orders += [("explained", None, best), ("unexplained", None, best[::-1])]
        elif self.options.modes:
            orders.append(("effect", None, sorted(heads, key=lambda head: self._effect(by_head[head]))))
        n_orders, n_points = self._curve_sizes
        for number in range(n_orders):
            seed = self.options.seed + number
            lots = np.random.PCG64(np.random.SeedSequence(seed)).random_raw(len(heads)).argsort(kind="stable")
            orders.append(("random", seed, [heads[at] for at in lots]))
        gone = sorted({round(k) for k in np.linspace(0, len(heads), min(len(heads), n_points) + 1)})
        modes: Sequence[Mode] = [mode for mode in self.options.modes if mode in REPLACED] or ["zero"]
        # Of controls random orders tell enough.
        lines = [
            (mode, order) for mode, order in product(modes, orders) if mode in ("zero", "line") or order[0] == "random"
        ]
        cuts = [Cut(tuple(order[:k]), mode) for mode, (_, _, order) in lines for k in gone[1:]]
        sums = self._measure(cuts)
        rows = iter(rows_of(sums.done.sums, "", self.loss, QUANTITIES))
        whole = whole_losses(result)["loss"] if self.loss else None
        curves = []
        for mode, (name, drawn_from, order) in lines:
            points = [self._start(result), *(next(rows) for _ in gone[1:])]
            points = [add_loss(point, whole) for point in points]
            left = tuple(len(heads) - k for k in gone)
            curves.append(Curve(name, drawn_from, self._names(order), left, tuple(points), mode))
        return curves, sums.complete

    def _explained_share(self, head: HeadPlace) -> float:
        """How much of a head's attention its line explains; 1 for a head that spreads evenly, which needs no more."""
        assert self._lines is not None  # a mode asks for them
        kind, layer, number = head
        explained = self._lines.expectations.explained((kind, layer), number)  # type: ignore[arg-type]
        return 1.0 if math.isnan(explained) else explained

    @property
    def _curve_sizes(self) -> tuple[int, int]:
        """How many random orders curves have, and how many points."""
        is_replaced = set(self.options.modes) & set(REPLACED)
        return (REPLACED_ORDERS, REPLACED_POINTS) if is_replaced else (RANDOM_ORDERS, CURVE_POINTS)

    def _start(self, result: Pass[Found]) -> dict[str, Effect]:
        """What changes without any head taken out."""
        names = QUANTITIES if self.loss else QUANTITIES[:1]
        done = result.done
        return {name: Effect(0.0, 0.0, 0.0, done.n_texts if name == "l2" else done.n_predictions) for name in names}

    def _effect(self, effects: Effects) -> float:
        """What heads are ranked by."""
        mode = self.options.modes[0]
        return effects[f"{mode}_loss" if self.loss else f"{mode}_l2"].value

    def _names(self, heads: Sequence[HeadPlace]) -> tuple[str, ...]:
        several = len(self.model.info.kinds) > 1
        return tuple(f"{kind} L{layer}H{head}" if several else f"L{layer}H{head}" for kind, layer, head in heads)

    # What the record says of itself ------------------------------------------------------------------------------

    def _run(self) -> dict[str, Any]:
        notes = []
        if fitted := self._fitting.texts:
            names = ["Lines"] * (self._lines is not None) + ["mean patterns"] * ("pattern" in self.options.modes)
            what, n_fitted = " and ".join(names).capitalize(), amount(len(list(fitted)), "text")
            notes.append(f"{what} were fitted on {n_fitted}, and take the place of weights on the others.")
        if not require_rerunnable(self.model).resumes:
            notes.append("This model cannot be run again from a layer on: every head takes a whole forward.")
        if "cross" in self.model.info.kinds and self.options.target is None:
            notes.append("No target was given: the decoder reads what the whole model itself writes to each text.")
        halved_to = merge_halving(self._halved_to, self._going.reader.room.tokens)
        notes += [] if halved_to is None else [halving_note(halved_to)]
        run = run_of(self.model.info, [*notes, *dict.fromkeys(self._notes)])
        failures = {"failures": [dict(each) for each in self._failures]} if self._failures else {}
        return run | {"seed": self.options.seed, "kinds": list(self.model.info.kinds)} | failures

    def _corpus(self, result: Pass[Found], complete: bool) -> dict[str, Any]:
        return {
            "sources": sources_of(self.texts),
            "n_texts": result.done.n_texts,
            "n_tokens": result.done.n_tokens,
            "n_predictions": result.done.n_predictions,
            "n_copies": result.n_copies,
            "sha256": sha256_of(self.texts),
            "problems": [*problems_of(self.texts), *self._lost, *result.done.left_out.problems(self.model.info)],
            "complete": complete,
        }

    def _describe(self) -> dict[str, Any]:
        options = self.options
        return {
            "modes": list(options.modes),
            "mean_over": "all real tokens of all texts, whatever their position" if "mean" in options.modes else None,
            "loss": self.loss,
            "predicted": _name_predictions(self.loss, options),
            "masked": options.masked if self.loss == "masked" else None,
            "target": options.target,
            "normalized": "layer" if options.by_layer else None,
            "directions": None if self.loss else DIRECTIONS,
            "curve_points": self._curve_sizes[1] if options.curve else None,
            "quantities": describe_quantities(options),
        }


def _loss(model: Model, name: str) -> Loss | None:
    """The loss to use; an AttnscopeError refuses one that the model has no head for."""
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
    """The kinds of attention that heads are taken out of."""
    if options.kind is not None and options.kind not in info.kinds:
        raise AttnscopeError(f"{info.name} has no {options.kind} attention", f"it has {', '.join(info.kinds)}")
    if options.kind is None and options.choice.pick is not None and len(info.kinds) > 1:
        raise AttnscopeError(
            f"{info.name} has several kinds of attention, and each has such heads", f"say --kind {info.kinds[-1]}"
        )
    return info.kinds if options.kind is None else (options.kind,)


def _name_predictions(loss: Loss | None, options: AblateOptions) -> str | None:
    share = "each ordinary token in turn" if options.masked == EACH else f"{float(options.masked):.0%} of the tokens"
    names: dict[Loss | None, str | None] = {
        "causal": "each next token",
        "masked": f"masked tokens: {share}" + ("" if options.masked == EACH else f", seed {options.seed}"),
        "target": "the decoder's target",
        None: None,
    }
    return names[loss]
