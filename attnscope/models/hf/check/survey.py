"""What a Hugging Face model's attention is, found out by running it: which calls, which layers, which path, is it true.

A model is run on small random inputs through the seam and by its own eager implementation. What comes of both must be
the same: hidden states, number of layers, weights. A model that does not pass (all of) its attention through the seam
takes the eager path; one that cannot be shown truly by either is refused.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from attnscope.core.attention.probes import Place
from attnscope.core.attention.seam import Kind
from attnscope.errors import AttnscopeError
from attnscope.models.hf.check.compare import (
    Outcome,
    compare,
    compare_hidden,
    explain_no_weights,
    hidden_states,
    run_eager,
    run_eager_or_own,
    tolerance,
)
from attnscope.models.hf.check.examples import OWN_INPUTS, Example, examples, standing_arguments
from attnscope.models.hf.check.layers import (
    Unclear,
    configured_counts,
    configured_kv_heads,
    configured_layers,
    hides_later,
    kinds_of,
    listed_layers,
    notes_on,
    notes_on_gaps,
    number_layers,
)
from attnscope.models.hf.check.longer import Survey, check_long, order_outcome, shorten
from attnscope.models.hf.seam import Seen, rehearse, use_attention


def survey_attention(model: PreTrainedModel, *, check: bool = True, inputs: Mapping[str, Any] | None = None) -> Survey:
    """Finds out what a model's attention is, and whether what we show of it is true; refuses what is neither.

    The model is without heads for tasks. Without a check, it is compared with eager only where that is needed to tell
    the layers. Inputs are what its forward gets; None = what attnscope makes up, texts of two lengths among it.
    """
    if inputs is None:
        padded, alone = examples(model)
    else:
        padded = alone = Example({**standing_arguments(model), **inputs}, is_users=True)
    extras: dict[str, Any] = {}
    seen: Sequence[Seen] = ()
    with torch.no_grad():
        try:
            output, seen = rehearse(model, alone.inputs)
            if hidden_states(output) is None:
                extras = {"output_hidden_states": True}
                for example in (padded, alone):
                    example.inputs.update(extras)
                output, seen = rehearse(model, alone.inputs)
            if hidden_states(output) is None:
                raise Unclear("it returns no hidden states")
            reason = "" if seen else "its attention does not pass transformers' attention interface"
        except Exception as error:  # a model may fail in any way when its attention is exchanged
            reason = shorten(error)
        if not reason:
            try:
                survey = _read_seam(model, alone, output, seen, extras)
            except Unclear as error:
                reason = str(error)
        if not reason and (check or any(len(survey.layers[k]) < survey.n_layers[k] for k in survey.layers)):
            try:
                reason, notes = _check_seam(model, survey, padded, alone, output, seen)
                survey = replace(survey, notes=(*survey.notes, *notes))
                reason = reason or (check_long(model, survey) if check and inputs is None else "")
            except AttnscopeError as error:
                explained = _explain_difference(model, alone, error)
                if explained is error:
                    raise  # and it keeps its own cause
                raise explained from error
            except Exception as error:  # padding, too, may be more than a model can take
                reason = shorten(error)
        if not reason:
            return survey if check else replace(survey, checked=False)
        survey = _read_eager(model, padded, alone, extras, reason, len(seen))
        if not check or inputs is not None:
            return survey
        wrong = check_long(model, survey)
        return replace(survey, notes=(*survey.notes, wrong)) if wrong else survey


def _explain_difference(model: PreTrainedModel, example: Example, error: AttnscopeError) -> AttnscopeError:
    """Why the seam differs from eager attention, where transformers' own two implementations differ as well."""
    if not model._supports_sdpa:
        return error
    try:
        with use_attention(model, "sdpa"):
            own = Outcome.of(model(**example.inputs), {})
        compare_hidden(model, example, own, run_eager_or_own(model, example), tolerance(model, 1) * 8)
    except AttnscopeError as differing:
        return _name_difference(model, differing)
    except Exception:  # of a model that fails by sdpa nothing more is known
        return error
    return error


def _name_difference(model: PreTrainedModel, error: AttnscopeError) -> AttnscopeError:
    """Says of a difference that it is between two implementations of transformers, neither of them ours."""
    difference = re.search(r"differ from the model's own by ([^,]*)", error.message)
    if not difference:
        return error
    return AttnscopeError(
        f"{model.config.model_type} computes one thing by transformers' sdpa attention and another by its eager "
        f"attention: hidden states differ by {difference[1]}",
        "it is not known which of them it was trained with, so neither is shown",
    )


# The seam ---------------------------------------------------------------------------------------------------------


def _read_seam(
    model: PreTrainedModel, example: Example, output: Any, seen: Sequence[Seen], extras: Mapping[str, Any]
) -> Survey:
    """Tells the calls apart: kinds by their shapes and by what they hide, layers by layer_idx, else by counting."""
    config = model.config
    by_kind: dict[Kind, list[Seen]] = {}
    for call, kind in zip(seen, kinds_of(config, example, output, [call.weights for call in seen]), strict=True):
        by_kind.setdefault(kind, []).append(call)
    absent = {"encoder", "decoder", "cross"} - set(by_kind) if config.is_encoder_decoder else set()
    if absent:
        raise Unclear(f"its {sorted(absent)[0]} attention does not pass transformers' attention interface")
    plan: dict[nn.Module, list[tuple[int, Place]]] = {}
    layers: dict[Kind, tuple[int, ...]] = {}
    n_layers: dict[Kind, int] = {}
    for kind, calls in by_kind.items():
        total = configured_layers(config, kind)
        layers[kind] = number_layers(config, kind, [call.module for call in calls], total)
        n_layers[kind] = max(total or 0, layers[kind][-1] + 1)
        for call, layer in zip(calls, layers[kind], strict=True):
            plan.setdefault(call.module, []).append((seen.index(call), (kind, layer)))
    return Survey(
        path="seam",
        plan={module: [place for _, place in sorted(p, key=lambda x: x[0])] for module, p in plan.items()},
        layers=layers,
        n_layers=n_layers,
        n_heads={kind: max(seen.call.n_heads for seen in calls) for kind, calls in by_kind.items()},
        n_kv_heads={kind: _shared_heads(calls) for kind, calls in by_kind.items()},
        extras=extras,
        d_model=_width(output),
        checked=True,
        notes=(*notes_on(by_kind, layers), *notes_on_gaps(config, layers, n_layers)),
    )


def _shared_heads(calls: Sequence[Seen]) -> int:
    """Key/value heads of a layer; as many as query heads where layers differ, for no one number is true of all."""
    heads = {(seen.call.n_heads, seen.call.n_kv_heads) for seen in calls}
    return next(iter(heads))[1] if len(heads) == 1 else max(n_heads for n_heads, _ in heads)


_PADDING_MATTERS = "Padding changes what this model computes: texts are best shown one by one."
"""Of convolutions, say, that run over the end of a text."""


def _check_seam(
    model: PreTrainedModel, survey: Survey, padded: Example, alone: Example, output: Any, seen: Sequence[Seen]
) -> tuple[str, tuple[str, ...]]:
    """Compares what the seam saw of a text with eager, and then what it sees of the text when padded with that.

    A forward pass is what the check costs: of four, the one by eager on the padded batch is done only where padding
    changes a text. (It may: convolutions see it, and experts with limited room are shared with other texts.)

    Returns:
        Why the seam does not see the whole, "" if it does; and what is worth a note.
    """
    sizes = survey.layers, survey.n_layers
    single, notes = order_outcome(survey, output, seen), list[str]()
    reason = compare(model, alone, single, run_eager_or_own(model, alone), *sizes, notes)
    if reason or padded is alone or len(next(iter(padded.inputs.values()))) == 1:  # it is the same input
        return reason, tuple(notes)
    both = order_outcome(survey, *rehearse(model, padded.inputs))
    try:
        return compare(model, alone, both.last_text(single), single, *sizes), tuple(notes)
    except AttnscopeError:
        reason = compare(model, padded, both, run_eager_or_own(model, padded), *sizes)
    if alone.real is None:  # no texts
        return reason, tuple(notes)
    # The first text fills the batch, so that of it no key is hidden for being padding.
    kinds = [kind for kind in single.maps if kind != "cross"]
    if any(hides_later(single.maps[kind]) != hides_later([w[:1] for w in both.maps[kind]]) for kind in kinds):
        raise AttnscopeError(
            f"{model.config.model_type} lets tokens attend to later ones in texts of equal length, and not where one "
            "is padded: padding makes it causal",
            "it is not known how it was trained, so neither is shown",
        )
    return reason, (*notes, _PADDING_MATTERS)


# The eager path ---------------------------------------------------------------------------------------------------


def _read_eager(
    model: PreTrainedModel, padded: Example, alone: Example, extras: dict[str, Any], reason: str, n_seen: int
) -> Survey:
    """The survey of a model whose attention does not (all) pass the seam: what it gives out itself, checked.

    `reason` says why the seam does not show it. Of the attentions that passed the seam, `n_seen`, all must be given
    out: Depth Pro leaves out an encoder.
    """
    config = model.config
    own = _own_output(model, padded, alone, extras)
    try:
        output, maps = run_eager(model, alone.inputs)
        _, maps_padded = run_eager(model, padded.inputs)
    except Exception as error:
        raise _refusal(model, reason, f"with eager attention it fails: {shorten(error)}") from error
    wrong = explain_no_weights(model, output, [(alone, maps), (padded, maps_padded)])
    if wrong:
        raise _refusal(model, reason, wrong)
    flat = [weights for of_kind in maps.values() for weights in of_kind]
    if len(flat) < n_seen:
        raise _refusal(model, reason, f"it gives out the weights of {len(flat)} of its {n_seen} attentions")
    allowed = tolerance(model, len(flat))
    try:
        compare_hidden(model, alone, Outcome.of(output, maps), Outcome.of(own, {}), allowed)
    except AttnscopeError as error:
        explained = _name_difference(model, error)
        if explained is error:
            raise  # and it keeps its own cause
        raise explained from error
    notes = [f"Weights come from the model's own eager attention, not through the seam: {reason}."]
    if any(
        float((whole.float() - cut[-1:, :, : whole.shape[2], : whole.shape[3]].float()).abs().max()) > allowed
        for kind, of_kind in maps.items()
        for whole, cut in zip(of_kind, maps_padded[kind], strict=True)
    ):
        notes.append(_PADDING_MATTERS)
    named = maps
    if not config.is_encoder_decoder:
        try:
            named = {kinds_of(config, alone, output, flat)[0]: flat}
        except Unclear as error:
            raise _refusal(model, reason, str(error)) from error
    layers = {kind: _eager_layers(model, kind, len(of_kind), reason) for kind, of_kind in named.items()}
    n_layers = {kind: max(configured_layers(config, kind) or 0, numbers[-1] + 1) for kind, numbers in layers.items()}
    n_heads = {kind: max(weights.shape[1] for weights in named[kind]) for kind in layers}
    return Survey(
        path="eager",
        plan={},
        layers=layers,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads={kind: configured_kv_heads(config, kind, n_heads[kind]) for kind in layers},
        extras=extras,
        d_model=_width(output),
        checked=True,
        notes=(*notes, *notes_on_gaps(config, layers, n_layers)),
    )


def _own_output(model: PreTrainedModel, padded: Example, alone: Example, extras: dict[str, Any]) -> Any:
    """What a model returns as it is, asked for its hidden states if it does not give them unasked."""
    try:
        with use_attention(model, None):
            own = model(**alone.inputs)
            if hidden_states(own) is None and not extras:
                extras["output_hidden_states"] = True
                for example in (padded, alone):
                    example.inputs.update(extras)
                own = model(**alone.inputs)
    except Exception as error:
        raise AttnscopeError(
            f"{model.config.model_type} does not run on the {_input_names(alone)} that "
            f"{'you give' if alone.is_users else 'attnscope makes up for its self-check'}: its own code says "
            f"{type(error).__name__}: {shorten(error)}",
            OWN_INPUTS,
        ) from error
    return own


def _input_names(example: Example) -> str:
    """What an example is made of, by name and shape, without what every forward gets."""
    tensors = {name: x for name, x in example.inputs.items() if isinstance(x, Tensor) and "mask" not in name}
    return " and ".join(f"{name} {tuple(x.shape)}" for name, x in tensors.items())


def _eager_layers(model: PreTrainedModel, kind: Kind, count: int, reason: str) -> tuple[int, ...]:
    total = configured_layers(model.config, kind)
    if total in (None, count):
        return tuple(range(count))
    if len(listed := listed_layers(model.config, total)) == count:
        return listed
    raise _refusal(model, reason, f"it gives out {count} {kind} layers of {total} and does not say which")


_ATTENTION_IN_NAME_ONLY = {"RwkvSelfAttention", "PatchTSMixerGatedAttention"}


def _refusal(model: PreTrainedModel, reason: str, more: str) -> AttnscopeError:
    kind = model.config.model_type
    names = {type(module).__name__ for module in model.modules()} - _ATTENTION_IN_NAME_ONLY
    if not any(re.search("attention|attn", name, re.IGNORECASE) for name in names):
        n_layers = configured_counts(model.config)
        if n_layers == {0}:
            return AttnscopeError(f"{kind} has no layers (its configuration says 0)", "there is nothing to show of it")
        return AttnscopeError(
            f"{kind} has no attention: its layers mix tokens by other means", "there is nothing to show of it"
        )
    why = reason if more == reason else f"{reason}; and {more}"
    return AttnscopeError(f"{kind} cannot be shown truly: {why}")


def _width(output: Any) -> int:
    hidden = hidden_states(output)
    return 0 if hidden is None else int(hidden.shape[-1])
