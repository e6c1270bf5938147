"""Does the model need this head? A model and texts in, what changes without each head out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from attnscope.core.plain_torch import with_plain_torch
from attnscope.corpus import Corpus, CorpusText
from attnscope.errors import AttnscopeError
from attnscope.models.info import ModelInfo
from attnscope.models.model import Loss, Model
from attnscope.records.ablation import Ablation, Effect, HeadEffects, SetEffects
from attnscope.studies.ablation.effects import describe_quantities, effects_by_cut, effects_of, whole_losses
from attnscope.studies.ablation.importance import DIRECTIONS, importance, normalized_by_layer
from attnscope.studies.ablation.means import heads_of, means_of
from attnscope.studies.ablation.options import EACH, AblateOptions
from attnscope.studies.ablation.reading import Reader
from attnscope.studies.ablation.sweep import Cut, CutPart, Going, HeadPlace, StandIns, measure, require_rerunnable
from attnscope.studies.failures import failure
from attnscope.studies.inputs.provenance import run_of
from attnscope.studies.inputs.texts import Report, Texts, scale_report, texts_of
from attnscope.studies.run import Run
from attnscope.studies.workers import Workers

if TYPE_CHECKING:
    from attnscope.core.attention.probes import Place


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
        self._going = Going(model, reader, texts, workers)
        self._lost: list[dict[str, Any]] = []
        self._notes: list[str] = []
        self.kinds = _kinds(model.info, options)
        self._chosen = options.choice.within(model.info)
        self._report = report
        if options.importance:
            from attnscope.models.inside.linear_runs import require_gradients

            require_gradients(model)
        passes = ("mean" in options.modes, options.modes, options.importance)
        self._n_passes = sum(map(bool, passes))
        self._pass = 0
        self._failures: list[Mapping[str, str]] = []
        self.stand_ins = StandIns({})

    def run(self) -> Ablation:
        options = self.options
        if "mean" in options.modes:
            self.stand_ins, means = means_of(self._going, self._next())
            self._note(means)
        else:
            self.stand_ins = heads_of(self._going)
        if not self.stand_ins.n_heads:
            raise AttnscopeError("no text is left: none has any token", "give texts with words in them")
        heads = self._heads()
        singles = [Cut((head,), mode) for mode in options.modes for head in heads]
        picked = options.choice.pick is not None and len(heads) > 1
        together = [Cut(tuple(heads), mode) for mode in options.modes if picked]
        cuts = [*singles, *together]
        # Without cuts it is the whole model's loss and how many texts there are: no pass of its own is shown for it.
        result = measure(self._going, cuts, self.stand_ins, self._next() if cuts else None)
        self._note(result)
        result.done.left_out.require_some_left(result.done.n_texts, self.model.info)
        effects = effects_by_cut(result, cuts, self.loss)
        by_head: dict[HeadPlace, dict[str, Effect]] = {head: {} for head in heads}
        for cut in singles:
            by_head[cut.heads[0]] |= effects[cut]
        joined = {name: effect for cut in together for name, effect in effects[cut].items()}
        complete = result.complete
        if complete and options.importance:
            complete = self._try_importance(by_head)
        return Ablation(
            run=self._run(),
            corpus=self._corpus(result, complete),
            options=self._describe(),
            whole=whole_losses(result) if self.loss else {},
            heads=tuple(HeadEffects(*head, by_head[head]) for head in heads),
            together=SetEffects(self._names(heads), joined) if together else None,
        )

    def _try_importance(self, by_head: Mapping[HeadPlace, dict[str, Effect]]) -> bool:
        """Add importances; False if that fails or is interrupted, which loses nothing of the effects."""
        try:
            return self._add_importance(by_head)
        except KeyboardInterrupt:
            return False
        except Exception as error:
            self._failures.append(failure("importance", error))
            return False

    def _next(self) -> Report | None:
        self._pass += 1
        return scale_report(self._report, self._pass - 1, self._n_passes)

    def _note(self, result: Run[Any]) -> None:
        """Keeps what a pass says of memory, failures and lost workers."""
        self._failures += result.failures
        self._notes += result.notes
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
        name = "importance" if self.loss else "sensitivity"
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
            effects[name] = replace(
                estimate, value=estimate.value / norm, low=estimate.low / norm, high=estimate.high / norm
            )
        return result.complete

    def _names(self, heads: Sequence[HeadPlace]) -> tuple[str, ...]:
        several = len(self.model.info.kinds) > 1
        return tuple(f"{kind} L{layer}H{head}" if several else f"L{layer}H{head}" for kind, layer, head in heads)

    # What the record says of itself ------------------------------------------------------------------------------

    def _run(self) -> dict[str, Any]:
        notes = []
        if not require_rerunnable(self.model).resumes:
            notes.append("This model cannot be run again from a layer on: every head takes a whole forward.")
        if "cross" in self.model.info.kinds and self.options.target is None:
            notes.append("No target was given: the decoder reads what the whole model itself writes to each text.")
        run = run_of(self.model.info, [*notes, *dict.fromkeys(self._notes)])
        failures = {"failures": [dict(each) for each in self._failures]} if self._failures else {}
        return run | {"seed": self.options.seed, "kinds": list(self.model.info.kinds)} | failures

    def _corpus(self, result: Run[CutPart], complete: bool) -> dict[str, Any]:
        facts = result.corpus(self.texts, self.model.info)
        of_other_passes = [problem for problem in self._lost if problem not in facts["problems"]]
        facts |= {"problems": [*of_other_passes, *facts["problems"]], "complete": complete}
        del facts["n_chunked"]  # chunks are not counted here
        return {**facts, "n_predictions": result.done.n_predictions}

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
