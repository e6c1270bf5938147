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
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from attnscope.core.attention.probes import Weights
from attnscope.core.attention.seam import Probe, attend
from attnscope.errors import AttnscopeError, RoundingError, first_line, is_out_of_memory
from attnscope.models.hf.examples import LENGTHS, OWN_INPUTS, Example, examples, length_beyond, long_example, reaches
from attnscope.models.hf.parts import hidden_states, max_tokens, standing_arguments
from attnscope.models.hf.rounding import (
    STATES,
    Outcome,
    compare,
    eager_or_own,
    outcome_at_seam,
    outcome_of_eager,
    require_equal,
    run_as_it_is,
    run_eager,
    states_of,
    tolerance,
)
from attnscope.models.hf.seam import Seen, perform, rehearse
from attnscope.models.hf.survey import Maps, Survey, Unclear, hides_later, read_seam, read_weights

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
            output, seen = _rehearse(model, padded, alone)
            survey = read_seam(model.config, alone, output, seen)
            if check or survey.n_calls < sum(survey.n_layers.values()):
                notes = _check_seam(model, survey, padded, alone, outcome_at_seam(survey, output, seen))
                survey = replace(survey, notes=(*survey.notes, *notes))
            return replace(survey, checked=check)
        except AttnscopeError:
            raise
        except Exception as error:  # a model may fail in any way when its attention is exchanged
            if is_out_of_memory(error):
                raise
            # The eager path: the weights that the model itself returns.
            return _read_eager(model, padded, alone, _shorten(error), len(seen))


def _rehearse(model: PreTrainedModel, padded: Example, alone: Example) -> tuple[Any, list[Seen]]:
    """Run a model on one text through the seam; raise Unclear where it attends in a way that the seam refuses."""
    try:
        output, seen = _with_hidden_states(padded, alone, lambda: rehearse(model, alone.inputs))
    except AttnscopeError as error:
        raise Unclear(_shorten(error)) from error
    if hidden_states(output) is None:
        raise Unclear("it returns no hidden states")
    if not seen:
        raise Unclear("its attention does not pass transformers' attention interface")
    return output, seen


def _with_hidden_states(padded: Example, alone: Example, run: Callable[[], tuple[Any, Any]]) -> tuple[Any, Any]:
    """Return what `run` returns, an output first; where that has no hidden states, they are asked for from now on."""
    result = run()
    if hidden_states(result[0]) is None:
        for example in (padded, alone):
            example.inputs["output_hidden_states"] = True
        result = run()
    return result


def _check_seam(model: PreTrainedModel, survey: Survey, padded: Example, alone: Example, single: Outcome) -> list[str]:
    """Compare what the seam saw with eager; return the notes that came of it."""
    # One text, then two padded to one length, then one beyond all windows.
    notes = compare(model, survey, alone, single, eager_or_own(model, survey, alone))
    if padded.batch_size > 1:
        both = outcome_at_seam(survey, *rehearse(model, padded.inputs))
        try:
            compare(model, survey, alone, _last_text(both, single), single)
        except AttnscopeError:
            # Convolutions see padding, and experts with limited room are shared with other texts.
            compare(model, survey, padded, both, eager_or_own(model, survey, padded))
            _require_same_direction(model, survey, both, single)
            notes.append(PADDING_MATTERS)
    _check_long(model, survey, _length_at_load(model, survey), with_maps=True)
    return notes


def _require_same_direction(model: PreTrainedModel, survey: Survey, both: Outcome, single: Outcome) -> None:
    """Refuse AIMv2's text tower, whose attention hides later tokens only where a text is padded."""
    for kind in survey.layers.keys() - {"cross"}:
        # The first text fills the batch: (text, query, head, key) -> (text, head, query, key).
        names = [name for name in single if name.startswith(kind)]
        looks_back = hides_later([single[name].transpose(1, 2) for name in names])
        if looks_back != hides_later([both[name][:1].transpose(1, 2) for name in names]):
            raise AttnscopeError(
                f"{model.config.model_type} lets tokens attend to later ones in texts of equal length, and not where "
                "one is padded",
                "it is not known how it was trained, so neither is shown",
            )


def _last_text(both: Outcome, alone: Outcome) -> Outcome:
    """Return the last text of a padded batch, cut to the sizes that it has alone."""
    return {name: both[name][-1:, : like.shape[1], ..., : like.shape[-1]] for name, like in alone.items()}


# Beyond windows ---------------------------------------------------------------------------------------------------

SHORTEST = 37
"""Tokens of the text of a self-check that is alone, at the least."""

_WORK_AT_LOAD = 1e10
"""Parameters x tokens up to which a longer text is tried at load: twice 74 tokens through 135 million parameters."""

_MAPS_AT_LOAD = 64 * 2**20
"""Bytes of weights that may be held to compare them with eager ones."""

_SCORES = 2 * 2**30
"""Bytes that eager attention of one layer may take: 12 per weight, three times its scores in float32."""


def _length_at_load(model: PreTrainedModel, survey: Survey) -> int:
    """Return how long a text is compared at load; the windows that it does not reach past stay in `survey.reaches`."""
    # The longest text that time and memory allow; two float32 maps per head take 8 bytes per weight.
    n_heads = sum(survey.n_heads[kind] * len(layers) for kind, layers in survey.layers.items())
    work = _WORK_AT_LOAD / max(1, sum(parameter.numel() for parameter in model.parameters()))
    most = min(work, math.sqrt(_MAPS_AT_LOAD / (8 * n_heads)))
    # Of the windows that the configuration names, reach past as many as that length allows.
    lengths = {reach: length_beyond(reach) for reach in reaches(model.config)}
    length = max([SHORTEST, *(n_tokens for n_tokens in lengths.values() if n_tokens <= most)])
    length = min(length, max_tokens(model) or length)
    survey.reaches[:] = [reach for reach, n_tokens in lengths.items() if n_tokens > length]
    return length


def check_beyond(model: PreTrainedModel, survey: Survey, inputs: Mapping[str, Any]) -> None:
    """Compare with eager once more where a text comes that reaches past a window that no comparison reached yet.

    Windows that were shown truly are compared once; texts beyond one that was not are always refused.
    """
    n_tokens = max((inputs[name].shape[1] for name in ("input_ids", "decoder_input_ids") if name in inputs), default=0)
    # Eager attention needs the whole map of a layer: longer comparisons do not fit.
    longest = math.sqrt(_SCORES / (12 * max(1, *survey.n_heads.values())))
    lengths = [length_beyond(reach) for reach in survey.reaches if reach < n_tokens]
    lengths = [length for length in lengths if length <= longest]
    if lengths and survey.checked:
        with torch.no_grad():
            _check_long(model, survey, min(lengths[-1], max_tokens(model) or lengths[-1]), with_maps=False)
    survey.reaches[:] = [reach for reach in survey.reaches if reach >= n_tokens]


def _check_long(model: PreTrainedModel, survey: Survey, n_tokens: int, *, with_maps: bool) -> None:
    """Compare hidden states, and where asked for also weights, with eager on a text of so many tokens."""
    example = long_example(model, n_tokens)
    if example is None or n_tokens <= LENGTHS[1]:
        return
    example.inputs.update(survey.extras)
    try:
        if with_maps:
            ours = outcome_at_seam(survey, *rehearse(model, example.inputs))
        else:
            ours = states_of(perform(model, example.inputs, survey.plan, attend))
    except Exception:
        try:
            run_as_it_is(model, example.inputs)
        except Exception as error:
            if is_out_of_memory(error):
                raise error from None
            return  # it takes no text of this length, whatever its configuration says
        raise
    compare(model, survey, example, ours, eager_or_own(model, survey, example, with_maps=with_maps))


# Other inputs -----------------------------------------------------------------------------------------------------


def takes_light_masks(model: PreTrainedModel, survey: Survey) -> bool:
    """Return whether a model hands our light masks (`hf.seam.Light`) on as they are.

    It is tried on two texts padded together. Where it changes them, or what it computes differs beyond rounding, its
    masks are to be written out.
    """
    padded, _ = examples(model)
    inputs = {**survey.extras, **padded.inputs}
    try:
        with torch.no_grad():
            light = states_of(perform(model, inputs, survey.plan, attend, light_from=1))
            written_out = states_of(perform(model, inputs, survey.plan, attend))
        compare(model, survey, padded, light, written_out)
    except (AttnscopeError, RuntimeError, TypeError, ValueError, IndexError):
        return False
    return True


def compare_on(model: PreTrainedModel, survey: Survey, inputs: Mapping[str, Any], probe: Probe = attend) -> None:
    """Compare the result on an input with what the model computes as it is, in no more memory than that.

    What is beside the model's own attention may attend too (see `seam.perform`).
    """
    if survey.path != "seam" or not survey.checked:
        return
    inputs = {**standing_arguments(model), **survey.extras, **inputs}
    with torch.no_grad():
        ours = perform(model, inputs, survey.plan, probe, through=survey.through, beside=True)
        theirs = run_as_it_is(model, inputs)
    # No float64 copy runs without inputs: `through` would run the model itself in its place.
    example = Example({} if survey.beside else inputs)
    compare(model, survey, example, _result_of(ours), _result_of(theirs))


def _result_of(output: Any) -> Outcome:
    """Return the scores of the vocabulary, or hidden states without a head, (batch, token, ...)."""
    logits = getattr(output, "logits", None)
    return states_of(output) if logits is None else {"hidden": logits}


# What a model gives out -------------------------------------------------------------------------------------------

_ATTENTION_IN_NAME_ONLY = {"RwkvSelfAttention", "PatchTSMixerGatedAttention"}


def _read_eager(model: PreTrainedModel, padded: Example, alone: Example, reason: str, n_seen: int) -> Survey:
    """Return the survey of a model whose attention does not all pass the seam: what it gives out itself, checked.

    `reason` says why the seam does not show it. Of the attentions that passed the seam, `n_seen`, all must be given
    out: Depth Pro leaves out an encoder.
    """
    # Run the model unchanged first: one that cannot run at all is refused for that reason.
    try:
        own, _ = _with_hidden_states(padded, alone, lambda: (run_as_it_is(model, alone.inputs), None))
    except Exception as error:
        raise AttnscopeError(
            f"{model.config.model_type} does not run on the input that attnscope makes up for its self-check: "
            f"its own code says {type(error).__name__}: {_shorten(error)}",
            OWN_INPUTS,
        ) from error
    try:
        output, maps = _checked_weights(model, alone)
        survey = read_weights(model.config, alone, output, maps)
        single = outcome_of_eager(survey, model.config, output, maps)
        both = outcome_of_eager(survey, model.config, *_checked_weights(model, padded))
        if survey.n_calls < n_seen:
            raise Unclear(f"it gives out the weights of {survey.n_calls} of its {n_seen} attentions")
    except Exception as error:
        raise _refusal(model, reason, _shorten(error)) from error
    # Asking for weights must not change the result; padding may.
    compare(model, survey, alone, states_of(output), states_of(own))
    notes = [f"Weights come from the model's own eager attention, not through the seam: {reason}."]
    weights = {name: maps for name, maps in single.items() if name not in STATES}
    try:
        require_equal(alone, _last_text(both, weights), weights, tolerance(model, survey.n_calls))
    except RoundingError:
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
        if not of_kind:
            raise Unclear(f"it gives out no {kind} attention of its own")
        # Queries and keys, (batch, token): the shape must be (batch, head, query, key), as long as the texts.
        queries = example.real_rows(kind)
        keys = example.target_real if kind == "decoder" and model.config.is_encoder_decoder else example.real
        for layer, weights in enumerate(of_kind):
            shape = tuple(weights.shape) if isinstance(weights, Tensor) else ()
            is_map = len(shape) == 4 and shape[0] == example.batch_size
            if is_map and queries is not None and keys is not None:
                is_map = shape[2:] == (queries.shape[1], keys.shape[1])
            if not is_map:
                raise Unclear(f"its own {kind} layer {layer} has the shape {shape}, not (batch, head, query, key)")
            # Each real query's weights on real keys must be a softmax: (batch, query, head, key).
            rows = weights.float().transpose(1, 2)
            rows = rows if keys is None else rows * keys[:, None, None, :]
            rows = rows if queries is None else rows[queries]
            if not bool(_are_softmax(rows, tolerance(model, 1)).all()):
                raise Unclear(f"its own {kind} layer {layer} holds numbers that are no softmax weights")
    return output, maps


def _are_softmax(rows: Tensor, allowed: float) -> Tensor:
    """Return which rows, (..., key), hold weights from 0 that sum to 1."""
    return (rows >= 0).all(-1) & ((rows.float().sum(-1) - 1).abs() <= allowed)


def _refusal(model: PreTrainedModel, reason: str, more: str) -> AttnscopeError:
    """Say that neither path shows a model truly, or that it has no attention at all."""
    kind = model.config.model_type
    # A model without attention needs another message than one whose attention cannot be shown.
    names = {type(module).__name__ for module in model.modules()} - _ATTENTION_IN_NAME_ONLY
    if any(re.search("attention|attn", name, re.IGNORECASE) for name in names):
        why = reason if more == reason else f"{reason}; and by eager attention, {more}"
        return AttnscopeError(f"{kind} cannot be shown truly: {why}")
    return AttnscopeError(f"{kind} has no attention", "there is nothing to show of it")


def run_for_weights(model: PreTrainedModel, inputs: Mapping[str, Any], survey: Survey, name: str, probe: Probe) -> Any:
    """Run a model by its own eager attention; the probe, which must be a `Weights`, keeps the weights.

    They were softmax weights on the self-check's texts, and must be on this input.
    """
    if not isinstance(probe, Weights):
        raise AttnscopeError(
            f"{name} does not pass its attention through the seam: only its weights can be seen",
            f"{type(probe).__name__} needs another model",
        )
    # Number the maps by the survey's layers, which may skip those without attention.
    output, maps = run_eager(model, inputs)
    if not model.config.is_encoder_decoder:
        maps = {next(iter(survey.layers)): maps["encoder"]}
    for kind, layers in survey.layers.items():
        for layer, weights in zip(layers, maps[kind], strict=True):
            # A query that sees no key has no weights.
            is_softmax = _are_softmax(weights, tolerance(model, survey.n_calls)) | (weights == 0).all(-1)
            if not bool(is_softmax.all()):
                raise AttnscopeError(
                    f"on this text of {weights.shape[-1]} tokens the model's own {kind} layer {layer} gives out "
                    "numbers that are no softmax weights",
                    "shorter texts may be shown",
                )
            probe.keep(kind, layer, weights)
    return output


def _shorten(error: BaseException) -> str:
    """Return an error's message, in one line without its full stop."""
    return (error.message if isinstance(error, AttnscopeError) else first_line(error)).rstrip(".")
