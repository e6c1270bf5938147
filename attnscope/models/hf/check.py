"""Check that what the seam shows of a Hugging Face model is what the model computes.

A model runs on small random inputs, through the seam and by its own eager attention. Hidden states, the number of
layers and weights must agree within rounding. Four judgements make that strict:

1. Layers are told apart, encoder from decoder from cross-attention (`hf.survey`).
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
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from attnscope.core.attention.seam import attend
from attnscope.errors import AttnscopeError, first_line, is_out_of_memory
from attnscope.models.hf.eager import Maps, are_softmax, run_eager
from attnscope.models.hf.examples import LENGTHS, OWN_INPUTS, Example, examples, length_beyond, long_example, reaches
from attnscope.models.hf.parts import hidden_states, max_tokens, standing_arguments
from attnscope.models.hf.rounding import (
    Outcome,
    compare,
    eager_or_own,
    run_as_it_is,
    seen_at_seam,
    states_of,
    tolerance,
)
from attnscope.models.hf.seam import Seen, perform, rehearse
from attnscope.models.hf.survey import Survey, Unclear, extras_of, hides_later, read_seam, read_weights

PADDING_MATTERS = "Padding changes what this model computes: texts are best shown one by one."
"""Of convolutions, say, that run over the end of a text."""


def survey_attention(model: PreTrainedModel, *, check: bool = True) -> Survey:
    """Find a model's attention layers, and check that the weights at the seam are the ones it computes.

    Args:
        model: The model, without heads for tasks.
        check: Whether to compare it with eager. Without, that is done only where the layers cannot be told otherwise.
    """
    padded, alone = examples(model)
    seen: list[Seen] = []
    with torch.no_grad():
        try:
            # The seam path: read the layers off the calls, then compare them with eager.
            output = _rehearse(model, padded, alone, seen)
            survey = read_seam(model.config, alone, output, seen)
            if check or survey.n_calls < sum(survey.n_layers.values()):
                survey = _check_seam(model, survey, (padded, alone), seen_at_seam(survey, output, seen), is_long=check)
            return replace(survey, checked=check)
        except Unclear as error:
            reason = str(error)
        # The eager path: the weights that the model itself returns.
        survey = _read_eager(model, padded, alone, reason, len(seen))
        note = _check_long(model, survey) if check else ""
        return replace(survey, notes=(*survey.notes, note)) if note else survey


# The seam ---------------------------------------------------------------------------------------------------------


def _rehearse(model: PreTrainedModel, padded: Example, alone: Example, seen: list[Seen]) -> Any:
    """Run a model through the seam; return its output, and put its calls into a list."""
    try:
        output, seen[:] = rehearse(model, alone.inputs)
        if hidden_states(output) is None:
            _ask_for_hidden_states(padded, alone)
            output, seen[:] = rehearse(model, alone.inputs)
    except Exception as error:  # a model may fail in any way when its attention is exchanged
        raise Unclear(_shorten(error)) from error
    if hidden_states(output) is None:
        raise Unclear("it returns no hidden states")
    if not seen:
        raise Unclear("its attention does not pass transformers' attention interface")
    return output


def _ask_for_hidden_states(*inputs: Example) -> None:
    for example in inputs:
        example.inputs["output_hidden_states"] = True


def _check_seam(
    model: PreTrainedModel, survey: Survey, inputs: tuple[Example, Example], single: Outcome, *, is_long: bool
) -> Survey:
    """Compare what the seam saw with eager; return the survey with the notes that came of it.

    Raises:
        Unclear: The seam does not see the whole.
    """
    padded, alone = inputs
    notes: list[str] = []
    try:
        # One text, then two padded to one length, then one beyond all windows.
        compare(model, alone, single, eager_or_own(model, alone, survey), survey, notes)
        if padded.batch_size > 1:
            _check_padding(model, survey, padded, alone, single, notes)
        if is_long:
            _check_long(model, survey)
    except (AttnscopeError, Unclear):
        raise
    except Exception as error:  # padding, too, may be more than a model can take
        raise Unclear(_shorten(error)) from error
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
        return
    except AttnscopeError:
        compare(model, padded, both, eager_or_own(model, padded, survey), survey)
    if alone.real is None:  # no texts
        return
    # The first text fills the batch, so that none of its keys is hidden as padding.
    for kind in survey.layers.keys() - {"cross"}:
        # (text, query, head, key) -> (text, head, query, key)
        names = [name for name in single if name.startswith(kind)]
        is_causal = hides_later([single[name].transpose(1, 2) for name in names])
        if is_causal != hides_later([both[name][:1].transpose(1, 2) for name in names]):
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


# What a model gives out -------------------------------------------------------------------------------------------

_ATTENTION_IN_NAME_ONLY = {"RwkvSelfAttention", "PatchTSMixerGatedAttention"}


def _read_eager(model: PreTrainedModel, padded: Example, alone: Example, reason: str, n_seen: int) -> Survey:
    """Return the survey of a model whose attention does not all pass the seam: what it gives out itself, checked.

    `reason` says why the seam does not show it. Of the attentions that passed the seam, `n_seen`, all must be given
    out: Depth Pro leaves out an encoder.
    """
    # Run the model unchanged first: one that cannot run at all is refused for that reason.
    own = _run_own(model, padded, alone)
    try:
        output, maps = _checked_weights(model, alone)
        _, padded_maps = _checked_weights(model, padded)
        if [*map(len, maps.values())] != [*map(len, padded_maps.values())]:
            raise Unclear("it gives out other layers when texts are padded")
        weights = sum(maps.values(), [])
        if len(weights) < n_seen:
            raise Unclear(f"it gives out the weights of {len(weights)} of its {n_seen} attentions")
        survey = read_weights(model.config, alone, output, maps)
    except Exception as error:
        raise _refusal(model, reason, _shorten(error)) from error
    # Asking for weights must not change the result.
    allowed = tolerance(model, len(weights))
    compare(model, alone, states_of(output), own, allowed=allowed)
    notes = [f"Weights come from the model's own eager attention, not through the seam: {reason}."]
    # The padded text, cut to its own length, must have the weights that it has alone.
    cut = [
        other[-1:, :, : whole.shape[2], : whole.shape[3]]
        for whole, other in zip(weights, sum(padded_maps.values(), []), strict=True)
    ]
    if any(float((whole - other).abs().max()) > allowed for whole, other in zip(weights, cut, strict=True)):
        notes.append(PADDING_MATTERS)
    return replace(survey, notes=(*notes, *survey.notes))


def _checked_weights(model: PreTrainedModel, example: Example) -> tuple[Any, Maps]:
    """Return the output and the weights of a model's own eager attention.

    Raises:
        Unclear: These are not the softmax weights of all of its attention.
    """
    output, maps = run_eager(model, example.inputs)
    if hidden_states(output) is None:
        raise Unclear("it returns no hidden states")
    for kind, of_kind in maps.items():
        what = f"{kind} attention" if model.config.is_encoder_decoder else "attention weights"
        if not of_kind and any("Sdpa" in type(module).__name__ for module in model.modules()):
            raise Unclear(f'it was built for sdpa, which gives out no {what} (attn_implementation="eager" does)')
        if not of_kind:
            raise Unclear(f"it gives out no {what} of its own")
        for layer, weights in enumerate(of_kind):
            _require_weights(model, example, kind, f"its own {kind} layer {layer}", weights)
    return output, maps


def _require_weights(model: PreTrainedModel, example: Example, kind: str, name: str, weights: Any) -> None:
    """Raise Unclear where a tensor is no map of softmax weights of this kind."""
    # The shape must be (batch, head, query, key), as long as the texts.
    shape = tuple(weights.shape) if isinstance(weights, Tensor) else ()
    queries = example.real_rows(kind)
    keys = example.target_real if kind == "decoder" and model.config.is_encoder_decoder else example.real
    fits = len(shape) == 4 and shape[0] == example.batch_size
    if fits and queries is not None and keys is not None:
        fits = shape[2:] == (queries.shape[1], keys.shape[1])
    if not fits:
        raise Unclear(f"{name} has the shape {shape}, not (batch, head, query, key)")
    # Each real query's weights must be a softmax, with nothing on padding: (batch, query, head, key).
    allowed = tolerance(model, 1)
    rows = weights.float().transpose(1, 2)
    on_padding = rows if keys is None else rows * ~keys[:, None, None, :]
    if queries is not None:
        rows = rows[queries]
        on_padding = on_padding[queries]
    if not bool(are_softmax(rows, allowed).all()):
        raise Unclear(f"{name} holds numbers that are no softmax weights")
    if keys is not None and not float(on_padding.max()) <= allowed:
        raise Unclear(f"{name} gives weight to padding")


def _run_own(model: PreTrainedModel, padded: Example, alone: Example) -> Outcome:
    """Return the outcome of the unchanged model, asked for its hidden states if it does not give them unasked."""
    try:
        own = run_as_it_is(model, alone)
        if "hidden" not in own and not extras_of(alone):
            _ask_for_hidden_states(padded, alone)
            own = run_as_it_is(model, alone)
    except Exception as error:
        tensors = {name: x for name, x in alone.inputs.items() if isinstance(x, Tensor) and "mask" not in name}
        shapes = " and ".join(f"{name} {tuple(x.shape)}" for name, x in tensors.items())
        raise AttnscopeError(
            f"{model.config.model_type} does not run on the {shapes} that attnscope makes up for its self-check: "
            f"its own code says {type(error).__name__}: {_shorten(error)}",
            OWN_INPUTS,
        ) from error
    return own


def _refusal(model: PreTrainedModel, reason: str, more: str) -> AttnscopeError:
    """Say that neither path shows a model truly, or that it has no attention at all."""
    kind = model.config.model_type
    # A model without attention needs another message than one whose attention cannot be shown.
    names = {type(module).__name__ for module in model.modules()} - _ATTENTION_IN_NAME_ONLY
    if any(re.search("attention|attn", name, re.IGNORECASE) for name in names):
        why = reason if more == reason else f"{reason}; and by eager attention, {more}"
        return AttnscopeError(f"{kind} cannot be shown truly: {why}")
    return AttnscopeError(f"{kind} has no attention", "there is nothing to show of it")


# Beyond windows ---------------------------------------------------------------------------------------------------

SHORTEST = 37
"""Tokens of the text of a self-check that is alone, at the least."""

_WORK_AT_LOAD = 1e10
"""Parameters x tokens up to which a longer text is tried at load: twice 74 tokens through 135 million parameters."""

_MAPS_AT_LOAD = 64 * 2**20
"""Bytes of weights that may be held to compare them with eager ones."""

_SCORES = 2 * 2**30
"""Bytes that eager attention of one layer may take: 12 per weight, three times its scores in float32."""


def _check_long(model: PreTrainedModel, survey: Survey) -> str:
    """Compare on a text beyond what the configuration names, as far as that is cheap at load; see `_check_at`."""
    # The longest text that time and memory allow at load; two float32 maps per head take 8 bytes per weight.
    n_heads = sum(survey.n_heads[kind] * len(layers) for kind, layers in survey.layers.items())
    work = _WORK_AT_LOAD / max(1, sum(parameter.numel() for parameter in model.parameters()))
    most = min(work, math.sqrt(_MAPS_AT_LOAD / (8 * max(1, n_heads))))
    # Of the windows that the configuration names, reach past as many as that length allows.
    named = reaches(model.config)
    lengths = [length_beyond(reach) for reach in named]
    limit = max_tokens(model) or math.inf
    length = int(min(limit, max([SHORTEST, *(tokens for tokens in lengths if tokens <= most)])))
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
    # Eager attention needs the whole map of a layer: longer comparisons do not fit.
    longest = math.sqrt(_SCORES / (12 * max(1, *survey.n_heads.values())))
    compared = [reach for reach in now if length_beyond(reach) <= longest]
    if compared:
        length = min(length_beyond(compared[-1]), max_tokens(model) or length_beyond(compared[-1]))
        try:
            with torch.no_grad():
                _check_at(model, survey, length, with_maps=False)
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
    try:
        if survey.path == "eager":
            ours = states_of(_checked_weights(model, example)[0])
        elif with_maps:
            ours = seen_at_seam(survey, *rehearse(model, example.inputs))
        else:
            ours = states_of(perform(model, example.inputs, survey.plan, attend))
    except Exception as error:
        try:
            run_as_it_is(model, example)
        except Exception as own_error:
            if is_out_of_memory(own_error):
                raise own_error from None
            return ""  # it takes no text of this length, whatever its configuration says
        if survey.path == "eager":
            return f"Of a text of {n_tokens} tokens {_shorten(error)}: such texts are refused."
        raise
    # The same text by eager attention, or unchanged where ours is eager already.
    whose = survey if with_maps and survey.path == "seam" else None
    own = run_as_it_is(model, example) if survey.path == "eager" else eager_or_own(model, example, whose)
    compare(model, example, ours, own, whose, allowed=tolerance(model, survey.n_calls))
    return ""


def compare_on(model: PreTrainedModel, survey: Survey, example: Example) -> None:
    """Compare hidden states on an input with what the model computes as it is, in no more memory than that.

    What is beside the model's own attention may attend too (see `seam.perform`).
    """
    if survey.path != "seam" or not survey.checked:
        return
    example.inputs.update({**standing_arguments(model), **survey.extras})
    own = run_as_it_is(model, example)
    ours = states_of(perform(model, example.inputs, survey.plan, attend, beside=True))
    compare(model, example, ours, own, allowed=tolerance(model, survey.n_calls))


def _shorten(error: BaseException) -> str:
    """Return an error's message, in one line without its full stop."""
    return (error.message if isinstance(error, AttnscopeError) else first_line(error)).rstrip(".")
