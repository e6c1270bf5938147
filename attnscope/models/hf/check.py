"""Check that what the seam shows of a Hugging Face model is what the model computes.

A model runs on small random inputs, through the seam and by its own eager attention. Hidden states, the number of
layers and weights must agree within rounding. Four judgements make that strict:

1. Layers are told apart, encoder from decoder from cross-attention.
2. Two texts of different length are padded together, and the second is shown as if it were alone.
3. One text is longer than all windows, chunks and blocks that the configuration names. Where that is too dear at load,
   it is tried when the first text comes that reaches past one.
4. A difference beyond the usual rounding counts as rounding only if seam and eager agree in float64, and then only up
   to the model's own error against float64.

A model that does not pass all of its attention through the seam takes the eager path: it is shown by the weights that
it gives out. One that neither path shows truly is refused. A wrong picture is worse than none. `hf.verdicts` remembers
how a check ended.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from attnscope.core.attention.probes import Place
from attnscope.core.attention.seam import Kind, attend
from attnscope.errors import AttnscopeError, is_out_of_memory
from attnscope.models.hf.eager import PADDING_MATTERS, explain_no_weights, read_eager
from attnscope.models.hf.examples import (
    LENGTHS,
    Example,
    ask_for_hidden_states,
    examples,
    extras_of,
    long_example,
    max_tokens,
    standing_arguments,
)
from attnscope.models.hf.layers import (
    Survey,
    Unclear,
    configured_layers,
    hides_later,
    kinds_of,
    length_beyond,
    notes_on,
    notes_on_gaps,
    number_layers,
    reaches,
)
from attnscope.models.hf.rounding import (
    Outcome,
    compare,
    eager_or_own,
    hidden_states,
    name_difference,
    run_as_it_is,
    run_eager,
    seen_at_seam,
    shorten,
    states_of,
    tolerance,
    width_of,
)
from attnscope.models.hf.seam import Seen, perform, rehearse, use_attention


def survey_attention(model: PreTrainedModel, *, check: bool = True) -> Survey:
    """Find out what a model's attention is, and whether what is shown of it is true; refuse what is neither.

    Args:
        model: The model, without heads for tasks.
        check: Whether to compare it with eager. Without, that is done only where the layers cannot be told otherwise.
    """
    padded, alone = examples(model)
    seen: list[Seen] = []
    with torch.no_grad():
        try:
            output = _rehearse(model, padded, alone, seen)
            survey = _read_seam(model, alone, output, seen)
            if check or survey.n_calls < sum(survey.n_layers.values()):
                survey = _check_seam(model, survey, padded, alone, output, seen, is_long=check)
        except Unclear as error:
            reason = str(error)
        else:
            return replace(survey, checked=check)
        survey = read_eager(model, padded, alone, reason, len(seen))
        wrong = _check_long(model, survey) if check else ""
        return replace(survey, notes=(*survey.notes, wrong)) if wrong else survey


# The seam ---------------------------------------------------------------------------------------------------------


def _rehearse(model: PreTrainedModel, padded: Example, alone: Example, seen: list[Seen]) -> Any:
    """Run a model through the seam; return its output, and put its calls into a list."""
    try:
        output, seen[:] = rehearse(model, alone.inputs)
        if hidden_states(output) is None:
            ask_for_hidden_states(padded, alone)
            output, seen[:] = rehearse(model, alone.inputs)
    except Exception as error:  # a model may fail in any way when its attention is exchanged
        raise Unclear(shorten(error)) from error
    if hidden_states(output) is None:
        raise Unclear("it returns no hidden states")
    if not seen:
        raise Unclear("its attention does not pass transformers' attention interface")
    return output


def _read_seam(model: PreTrainedModel, example: Example, output: Any, seen: Sequence[Seen]) -> Survey:
    """Tell the calls apart: kinds by their shapes and by what they hide, layers by layer_idx, else by counting."""
    config = model.config
    by_kind: dict[Kind, list[Seen]] = {}
    for call, kind in zip(seen, kinds_of(config, example, output, [call.weights for call in seen]), strict=True):
        by_kind.setdefault(kind, []).append(call)
    for kind in ("cross", "decoder", "encoder"):
        if config.is_encoder_decoder and kind not in by_kind:
            raise Unclear(f"its {kind} attention does not pass transformers' attention interface")
    layers: dict[Kind, tuple[int, ...]] = {}
    n_layers: dict[Kind, int] = {}
    places: dict[int, Place] = {}
    for kind, calls in by_kind.items():
        total = configured_layers(config, kind)
        layers[kind] = number_layers(config, kind, [call.module for call in calls], total)
        n_layers[kind] = max(total or 0, layers[kind][-1] + 1)
        places |= {id(call): (kind, layer) for call, layer in zip(calls, layers[kind], strict=True)}
    plan: dict[nn.Module, list[Place]] = {}
    for call in seen:
        plan.setdefault(call.module, []).append(places[id(call)])
    return Survey(
        path="seam",
        plan=plan,
        layers=layers,
        n_layers=n_layers,
        n_heads={kind: max(seen.call.n_heads for seen in calls) for kind, calls in by_kind.items()},
        n_kv_heads={kind: _shared_heads(calls) for kind, calls in by_kind.items()},
        extras=extras_of(example),
        d_model=width_of(output),
        notes=(*notes_on(by_kind, layers), *notes_on_gaps(config, layers, n_layers)),
    )


def _shared_heads(calls: Sequence[Seen]) -> int:
    """Return the key/value heads of a layer; as many as query heads where no one number is true of all layers."""
    heads = {(seen.call.n_heads, seen.call.n_kv_heads) for seen in calls}
    n_heads, n_kv_heads = max(heads)
    return n_kv_heads if len(heads) == 1 else n_heads


def _check_seam(
    model: PreTrainedModel,
    survey: Survey,
    padded: Example,
    alone: Example,
    output: Any,
    seen: Sequence[Seen],
    *,
    is_long: bool,
) -> Survey:
    """Compare what the seam saw with eager; return the survey with the notes that came of it.

    Raises:
        Unclear: The seam does not see the whole.
    """
    notes: list[str] = []
    try:
        single = seen_at_seam(survey, output, seen)
        compare(model, alone, single, eager_or_own(model, alone, survey), survey, notes)
        if padded is not alone and len(next(iter(padded.inputs.values()))) > 1:
            _check_padding(model, survey, padded, alone, single, notes)
        if is_long:
            _check_long(model, survey)
    except AttnscopeError as error:
        explained = _explain_difference(model, alone, error)
        if explained is error:
            raise  # and it keeps its own cause
        raise explained from error
    except Unclear:
        raise
    except Exception as error:  # padding, too, may be more than a model can take
        raise Unclear(shorten(error)) from error
    return replace(survey, notes=(*survey.notes, *notes))


def _check_padding(
    model: PreTrainedModel, survey: Survey, padded: Example, alone: Example, single: Outcome, notes: list[str]
) -> None:
    """Compare a text that is padded with the same alone, and where padding changes it, the batch with eager.

    A forward pass is what a check costs, and few models need the last one. (Convolutions see padding, and experts with
    limited room are shared with other texts.)
    """
    both = seen_at_seam(survey, *rehearse(model, padded.inputs))
    try:
        compare(model, alone, _last_text(both, single), single, survey)
    except AttnscopeError:
        compare(model, padded, both, eager_or_own(model, padded, survey), survey)
    else:
        return
    if alone.real is None:  # no texts
        return
    # The first text fills the batch, so that of it no key is hidden for being padding.
    for kind in survey.layers:
        whole = [x.transpose(1, 2) for name, x in single.items() if name.startswith(kind)]
        padded_first = [x[:1].transpose(1, 2) for name, x in both.items() if name.startswith(kind)]
        if kind != "cross" and hides_later(whole) != hides_later(padded_first):
            raise AttnscopeError(
                f"{model.config.model_type} lets tokens attend to later ones in texts of equal length, and not where "
                "one is padded: padding makes it causal",
                "it is not known how it was trained, so neither is shown",
            )
    notes.append(PADDING_MATTERS)


def _last_text(both: Outcome, alone: Outcome) -> Outcome:
    """Return the last text of a padded batch, cut to the sizes that it has alone."""
    cut: Outcome = {}
    for name, like in alone.items():
        rows = both[name][-1:, : like.shape[1]]
        if bool(rows[..., like.shape[-1] :].any()):
            raise AttnscopeError("self-check: padding is attended to")
        cut[name] = rows[..., : like.shape[-1]]
    return cut


def _explain_difference(model: PreTrainedModel, example: Example, error: AttnscopeError) -> AttnscopeError:
    """Say why the seam differs from eager attention, where transformers' own two implementations differ as well."""
    if not model._supports_sdpa:
        return error
    try:
        with use_attention(model, "sdpa"):
            own = states_of(model(**example.inputs))
        compare(model, example, own, eager_or_own(model, example), allowed=tolerance(model, 1) * 8)
    except AttnscopeError as differing:
        return name_difference(model, differing)
    except Exception:  # of a model that fails by sdpa nothing more is known
        return error
    return error


def compare_on(model: PreTrainedModel, survey: Survey, example: Example) -> None:
    """Compare hidden states on an input with what the model computes as it is, in no more memory than that.

    What is beside the model's own attention may attend too (see `seam.perform`).
    """
    if survey.path != "seam" or not survey.checked:
        return
    example.inputs.update({**standing_arguments(model), **survey.extras})
    own = states_of(run_as_it_is(model, example))
    ours = states_of(perform(model, example.inputs, survey.plan, attend, beside=True))
    compare(model, example, ours, own, allowed=tolerance(model, survey.n_calls))


# Beyond windows ---------------------------------------------------------------------------------------------------

SHORTEST = 37
"""Tokens of the second text of a self-check, at the least."""

_WORK_AT_LOAD = 1e10
"""Parameters x tokens up to which a longer text is tried at load: twice 74 tokens through 135 million parameters."""

_MAPS_AT_LOAD = 64 * 2**20
"""Bytes of weights that may be held to compare them with eager ones."""

_SCORES = 2 * 2**30
"""Bytes that eager attention of one layer may take: 12 per weight, three times its scores in float32."""


def _within_limit(model: PreTrainedModel, length: int) -> int:
    limit = max_tokens(model)
    return length if limit is None else min(length, limit)


def _check_long(model: PreTrainedModel, survey: Survey) -> str:
    """Compare on a text beyond what the configuration names, as far as that is cheap at load; see `_check_at`."""
    n_heads = sum(survey.n_heads[kind] * len(layers) for kind, layers in survey.layers.items())
    work = _WORK_AT_LOAD / max(1, sum(parameter.numel() for parameter in model.parameters()))
    most = max(SHORTEST, min(work, math.sqrt(_MAPS_AT_LOAD / (8 * max(1, n_heads)))))
    named = reaches(model.config)
    lengths = [length_beyond(reach) for reach in named]
    length = _within_limit(model, max([SHORTEST, *(tokens for tokens in lengths if tokens <= most)]))
    survey.reaches[:] = [reach for reach in named if length_beyond(reach) > length]
    return _check_at(model, survey, length, with_maps=True)


def check_beyond(model: PreTrainedModel, survey: Survey, inputs: Mapping[str, Any]) -> None:
    """Compare with eager once more where a text comes that reaches past a window that no comparison reached yet.

    The survey remembers how each comparison ended: windows that were shown truly are compared once, and texts
    beyond one that was not are always refused. A comparison that was cut short, by an interruption or for want of
    memory, is made anew.
    """
    n_tokens = max((inputs[name].shape[1] for name in ("input_ids", "decoder_input_ids") if name in inputs), default=0)
    now = [reach for reach in survey.reaches if reach < n_tokens]
    if not now or not survey.checked:
        return
    for refused in (survey.refusals[reach] for reach in now if reach in survey.refusals):
        raise AttnscopeError(refused.message, refused.hint)
    longest = math.sqrt(_SCORES / (12 * max(1, *survey.n_heads.values())))
    compared = [reach for reach in now if length_beyond(reach) <= longest]
    if compared:
        try:
            with torch.no_grad():
                _check_at(model, survey, _within_limit(model, length_beyond(compared[-1])), with_maps=False)
        except AttnscopeError as error:
            survey.refusals[compared[-1]] = error
            raise
    survey.reaches[:] = [reach for reach in survey.reaches if reach >= n_tokens]


def _check_at(model: PreTrainedModel, survey: Survey, n_tokens: int, *, with_maps: bool) -> str:
    """Compare hidden states, and weights if they are few enough to hold, with eager on a text of so many tokens.

    Returns:
        On the eager path what a user must know; "" if all is well.

    Raises:
        Unclear: The seam does not see the whole of such a text.
    """
    example = long_example(model, n_tokens)
    if example is None or n_tokens <= LENGTHS[1]:
        return ""
    example.inputs.update(survey.extras)
    allowed = tolerance(model, survey.n_calls)
    if survey.path == "eager":
        return _check_eager_at(model, example, allowed)
    try:
        if with_maps:
            ours = seen_at_seam(survey, *rehearse(model, example.inputs))
        else:
            ours = states_of(perform(model, example.inputs, survey.plan, attend))
    except Exception:
        if _run_if_it_can(model, example) is None:
            return ""
        raise
    whose = survey if with_maps else None
    try:
        compare(model, example, ours, eager_or_own(model, example, whose), whose, allowed=allowed)
    except Unclear as error:
        raise Unclear(f"on a text of {n_tokens} tokens {error}") from error
    return ""


def _check_eager_at(model: PreTrainedModel, example: Example, allowed: float) -> str:
    """Compare what a model gives out with what it computes as it is; say why texts of this length are refused."""
    own = _run_if_it_can(model, example)
    if own is None:
        return ""
    try:
        output, maps = run_eager(model, example.inputs)
        wrong = explain_no_weights(model, output, [(example, maps)])
    except Exception as error:
        wrong = f"with eager attention it fails: {shorten(error)}"
    else:
        compare(model, example, states_of(output), own, allowed=allowed)
    n_tokens = next(iter(example.inputs.values())).shape[1]
    return f"Of a text of {n_tokens} tokens {wrong}: such texts are refused." if wrong else ""


def _run_if_it_can(model: PreTrainedModel, example: Example) -> Outcome | None:
    """Return what a model computes as it is; None where it takes no text of this length, whatever its config says."""
    try:
        return states_of(run_as_it_is(model, example))
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return None
