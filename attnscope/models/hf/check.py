"""Check that what the seam shows of a Hugging Face model is what the model computes.

The seam is our function in place of transformers' attention function (`hf.seam`): it sees each call of a forward pass.
A model runs on small random inputs, through the seam and by its own eager attention. Hidden states, the number of
layers and weights must agree within rounding. Four judgements make that strict:

1. Layers are told apart, encoder from decoder from cross-attention (`hf.survey`).
2. Two texts of different length are padded together, and the second is shown as if it were alone.
3. One text is longer than all *reaches*: the lengths of windows, chunks and blocks that the configuration names. Where
   that is too dear at load, it is tried when the first text comes that is longer than one.
4. A difference beyond the usual rounding counts as rounding only if seam and eager agree in float64, and then only up
   to the model's own error against float64.

A model that does not pass all of its attention through the seam takes the eager path: it is shown by the weights that
it gives out. One that neither path shows truly is refused. A wrong picture is worse than none. `hf.survey` remembers
how a check ended. An `Outcome` has the results of a run by name: hidden states, and the weights of "decoder layer 3".
"""

import copy
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from transformers import PreTrainedModel

from attnscope.core.attention.seam import Probe, attend
from attnscope.errors import (
    AttnscopeError,
    RoundingError,
    first_line,
    is_out_of_memory,
    require_close,
)
from attnscope.models.devices import name_dtype
from attnscope.models.hf.eager import (
    STATES,
    Outcome,
    checked_weights,
    eager_outcome,
    run_unchanged,
    states_of,
    tolerance,
)
from attnscope.models.hf.examples import (
    LENGTHS,
    OWN_INPUTS,
    Inputs,
    examples,
    length_beyond,
    reaches,
    real_tokens,
)
from attnscope.models.hf.parts import count_tokens, hidden_states, max_tokens, standing_arguments
from attnscope.models.hf.seam import TracedAttention, run_with_probe, trace_attention
from attnscope.models.hf.survey import AttentionSurvey, UnclearError, has_causal_weights, read_survey

PADDING_MATTERS = "Padding changes what this model computes: texts are best shown one by one."
"""The note where padding changes what a text gets, as with convolutions that reach beyond its end."""


def survey_attention(model: PreTrainedModel, *, check: bool = True) -> AttentionSurvey:
    """Find a model's attention layers, and check that the weights at the seam are the ones it computes.

    Args:
        model: The model, without heads for tasks.
        check: Whether to compare it with eager. Without, that is done only where some layers have no attention.

    Raises:
        AttnscopeError: Neither path shows it truly.
    """
    padded, alone = examples(model)
    seen: Sequence[TracedAttention] = ()
    with torch.no_grad():
        try:
            # The seam path: read the layers off the calls, then compare them with eager.
            output, seen = _trace_alone(model, padded, alone)
            survey = read_survey(model.config, alone, output, seen)
            some_lack_attention = survey.n_calls < sum(survey.n_layers.values())
            if check or some_lack_attention:
                notes = _check_seam(model, survey, padded, alone, _outcome(survey, output, seen))
                survey = replace(survey, notes=(*survey.notes, *notes))
            return replace(survey, checked=check)
        except AttnscopeError:
            raise
        # A model may fail in any way when its attention is exchanged. Unclear, too, leads to the eager path.
        except Exception as error:
            if is_out_of_memory(error):
                raise
            # The eager path: the weights that the model itself returns.
            return _read_eager(model, padded, alone, _shorten(error), len(seen))


def _trace_alone(
    model: PreTrainedModel, padded: Inputs, alone: Inputs
) -> tuple[Any, Sequence[TracedAttention]]:
    """Run a model on the text alone through the seam; raise UnclearError where the seam refuses how it attends."""
    try:
        return _with_hidden_states(padded, alone, lambda: trace_attention(model, alone))
    except AttnscopeError as error:
        raise UnclearError(_shorten(error)) from error


def _with_hidden_states(
    padded: Inputs, alone: Inputs, run: Callable[[], tuple[Any, Any]]
) -> tuple[Any, Any]:
    """Call `run`, which returns a model's output and something else; see to it that the output has hidden states.

    If it has none, both inputs ask for them from then on, and `run` is called again.
    """
    result = run()
    if hidden_states(result[0]) is None:
        for inputs in (padded, alone):
            inputs["output_hidden_states"] = True
        result = run()
    return result


def _check_seam(
    model: PreTrainedModel, survey: AttentionSurvey, padded: Inputs, alone: Inputs, single: Outcome
) -> list[str]:
    """Compare what passes the seam with eager; return notes on it.

    Args:
        model: The model.
        survey: Its attention layers.
        padded: Two texts, padded to one length.
        alone: The second of them.
        single: What the seam gave for that one.
    """
    notes = compare(model, survey, alone, single)
    # Two texts padded to one length.
    if padded is not alone:
        output, seen = trace_attention(model, padded)
        both = _outcome(survey, output, seen)
        try:
            compare(model, survey, alone, _last_text(both, single), single)
        except AttnscopeError:
            # Both may be right: convolutions see padding, and experts with limited room are shared with other texts.
            compare(model, survey, padded, both)
            # AIMv2's text tower hides later tokens in a padded batch, and not from one text alone. So whether the text
            # alone was found to be causal must hold for the first text of the batch, which has no padding:
            # (1, head, query, key).
            weights = [attention.weights[:1] for attention in seen]
            is_causal = "decoder" in survey.layers
            if not model.config.is_encoder_decoder and is_causal != has_causal_weights(weights):
                raise AttnscopeError(
                    f"{model.config.model_type} lets tokens attend to later ones in texts of equal length, and not "
                    "where one is padded",
                    "it is not known how it was trained, so neither is shown",
                ) from None
            notes.append(PADDING_MATTERS)
    # One text beyond as many reaches as time and memory allow. The others wait for the first text beyond them.
    n_tokens = _length_at_load(model, survey)
    survey.reaches[:] = [reach for reach in reaches(model.config) if length_beyond(reach) > n_tokens]
    _check_long(model, survey, n_tokens, with_maps=True)
    return notes


def _last_text(both: Outcome, single: Outcome) -> Outcome:
    """Return the last text of a padded batch, cut to the sizes that it has alone."""
    last = {}
    for name, values in single.items():
        # (batch, query, head, key) or (batch, token, d_model)
        n_rows, size = values.shape[1], values.shape[-1]
        last[name] = both[name][-1:, :n_rows, ..., :size]
    return last


# Beyond windows ---------------------------------------------------------------------------------------------------

_SHORTEST_LONG = 37
"""The fewest tokens of the longer text that is compared at load."""

_WORK_AT_LOAD = 1e10
"""Parameters x tokens up to which a longer text is tried at load, by eager and by the seam: 135 million x 74."""

_MAPS_AT_LOAD = 64 * 2**20
"""Bytes of weights that may be held to compare them with eager ones."""

_EAGER_BYTES = 2 * 2**30
"""Bytes that eager attention of one layer may take: 12 per weight, for three float32 tensors of its scores' shape."""


def _length_at_load(model: PreTrainedModel, survey: AttentionSurvey) -> int:
    """Return how long a text is compared at load, in tokens: beyond as many reaches as time and memory allow."""
    n_parameters = sum(parameter.numel() for parameter in model.parameters())
    n_heads = sum(survey.n_heads[kind] * len(layers) for kind, layers in survey.layers.items())
    # Two float32 maps per head take 8 bytes per weight.
    longest = min(_WORK_AT_LOAD / max(1, n_parameters), math.sqrt(_MAPS_AT_LOAD / (8 * n_heads)))
    lengths = map(length_beyond, reaches(model.config))
    return max(
        (n_tokens for n_tokens in lengths if _SHORTEST_LONG < n_tokens <= longest),
        default=_SHORTEST_LONG,
    )


def check_beyond(model: PreTrainedModel, survey: AttentionSurvey, n_tokens: int) -> None:
    """Compare with eager once more, because a text of n_tokens is longer than a reach that no comparison tried yet.

    If the model passes, the reach is dropped from `survey.reaches`. If it fails, that raises, and the next text beyond
    it is compared again. Reaches whose comparison does not fit in memory are dropped untried.
    """
    # The longest text whose scores of one layer, which eager attention holds, fit in memory.
    longest = math.sqrt(_EAGER_BYTES / (12 * max(1, *survey.n_heads.values())))
    lengths = [length_beyond(reach) for reach in survey.reaches if reach < n_tokens]
    fitting = [length for length in lengths if length <= longest]
    if fitting and survey.checked:
        with torch.no_grad():
            _check_long(model, survey, max(fitting), with_maps=False)
    survey.reaches[:] = [reach for reach in survey.reaches if reach >= n_tokens]


def _check_long(
    model: PreTrainedModel, survey: AttentionSurvey, n_tokens: int, *, with_maps: bool
) -> None:
    """Compare hidden states, and where asked for also weights, with eager on a text of so many tokens."""
    n_tokens = min(n_tokens, max_tokens(model) or n_tokens)
    _, inputs = examples(model, n_tokens)
    # Nothing new is seen without a text, or on one no longer than the one that was compared alone.
    if not count_tokens(inputs) or n_tokens <= LENGTHS[1]:
        return
    inputs |= survey.extras  # that ask for hidden states, where the model gives none by itself
    try:
        theirs = _by_eager(model, survey, inputs, with_maps=with_maps)
    except Exception as error:
        if isinstance(error, UnclearError) or is_out_of_memory(error):
            raise
        return  # it takes no text of this length, whatever its configuration says
    ours = _at_seam(model, survey, inputs, with_maps=with_maps)
    compare(model, survey, inputs, ours, theirs)


# Other inputs -----------------------------------------------------------------------------------------------------


def takes_light_masks(model: PreTrainedModel, survey: AttentionSurvey) -> bool:
    """Return whether a model hands on our light masks as they are; else masks are to be written out.

    A light mask says which keys are real, in place of all pairs (see `hf.seam`). It is tried on two texts padded
    together: what the model computes may differ by rounding alone.
    """
    padded, _ = examples(model)
    padded |= survey.extras
    try:
        with torch.no_grad():
            # Light masks from 1 key on, that is, for all lengths.
            light = states_of(run_with_probe(model, padded, survey.plan, attend, min_light_keys=1))
            written_out = states_of(run_with_probe(model, padded, survey.plan, attend))
        compare(model, survey, padded, light, written_out)
    except Exception:  # a model may fail in any way on a mask of another shape
        return False
    return True


def compare_on(
    model: PreTrainedModel, survey: AttentionSurvey, inputs: Mapping[str, Any], probe: Probe = attend
) -> None:
    """Compare the result on an input, such as a picture, with what the unchanged model computes.

    Weights are not compared, which would take much memory. Modules that are not in the plan, which says what module
    computes which layer, may attend too.
    """
    if survey.path != "seam" or not survey.checked:
        return
    inputs = {**standing_arguments(model), **survey.extras, **inputs}
    with torch.no_grad():
        ours = run_with_probe(
            model, inputs, survey.plan, probe, run_forward=survey.run_forward, has_unplanned_modules=True
        )
        theirs = run_unchanged(model, inputs)
    compare(model, survey, inputs, _logits_or_states(ours), _logits_or_states(theirs))


def _logits_or_states(output: Any) -> Outcome:
    """Return the logits, under the name "hidden"; of a model without a head, hidden states: (batch, token, ...)."""
    logits = getattr(output, "logits", None)
    return states_of(output) if logits is None else {"hidden": logits}


# Comparing --------------------------------------------------------------------------------------------------------

_ALLOWED_ERRORS = 16.0
"""Seam and eager may differ by so many times eager's own error against float64: errors of sharp heads vary widely."""

_VISIBLE_ERROR = 0.05
"""Error of a weight, or of hidden states relative to the largest, that a picture shows: it is worth a note."""


def compare(
    model: PreTrainedModel,
    survey: AttentionSurvey,
    inputs: Mapping[str, Any],
    ours: Outcome,
    theirs: Outcome | None = None,
) -> list[str]:
    """Refuse what passed the seam where it differs beyond rounding from another run, by default by eager attention.

    1. If both agree within the usual rounding, all is well.
    2. Else seam and eager must agree in float64. A sharp head with a score of a hundred (in 16 bits, of ten) turns
       rounding into another weight, and later layers turn that into other scores; in float64 all that is too small to
       count. It takes a copy of the model, which only this case pays for.
    3. Then seam and eager may differ by _ALLOWED_ERRORS times the error of eager against float64.
    4. Where that error is visible, the note that is returned says so: float64 alone shows that the seam is right.

    Returns:
        Notes.

    Raises:
        AttnscopeError: They differ.
    """
    # What is no hidden state in an outcome is a map of weights.
    with_maps = bool(ours.keys() - STATES)
    if theirs is None:
        theirs = _by_eager(model, survey, inputs, with_maps=with_maps)
    allowed = tolerance(model, survey.n_calls)
    try:
        require_equal(inputs, ours, theirs, allowed)
        return []
    except RoundingError:
        # Empty where they differ in float64 too: the bound is 0, and the error is raised again.
        exact = _exact_outcome(model, survey, inputs, with_maps=with_maps)
        error = max(_differences(inputs, theirs, exact).values(), default=0.0)
        bound = _ALLOWED_ERRORS * error
        # "not >", so that NaN raises too.
        if not bound > allowed:
            raise
    require_equal(inputs, ours, theirs, bound)
    if error <= _VISIBLE_ERROR:
        return []
    wider = "float64" if model.dtype == torch.float32 else "float32"
    moved = f"Rounding in {name_dtype(model.dtype)} moves attention weights by up to {min(error, 1):.2g}"
    return [f"{moved}: another device or batch may show others. --dtype {wider} rounds less."]


def require_equal(inputs: Mapping[str, Any], ours: Outcome, theirs: Outcome, allowed: float) -> None:
    """Raise a RoundingError where two outcomes of these inputs differ by more than is allowed."""
    for name, difference in _differences(inputs, ours, theirs).items():
        part = "hidden states" if name in STATES else f"weights of {name}"
        require_close(
            f"self-check: {part} differ from the model's own",
            difference,
            allowed,
            "the maps could be wrong, so none are shown; try another --dtype",
        )


def _differences(inputs: Mapping[str, Any], ours: Outcome, theirs: Outcome) -> dict[str, float]:
    """Return the largest difference of each result that two outcomes share, at real tokens.

    Hidden states are compared relative to the largest of `theirs`.
    """
    differences = {}
    for name in ours:
        if name not in theirs:
            continue
        our = ours[name].float()
        their = theirs[name].float()
        if our.shape != their.shape:
            raise AttnscopeError(
                f"self-check: {name} is {tuple(our.shape)}, by eager {tuple(their.shape)}"
            )
        # Only rows of real tokens count: (batch, token, …) -> (row, …).
        real = real_tokens(inputs, name)
        if real is not None and our.shape[:2] == real.shape:
            our = our[real]
            their = their[real]
        difference = _largest(our - their)
        if name in STATES:
            if not bool((our.isfinite() & their.isfinite()).all()):
                raise AttnscopeError(
                    "self-check: hidden states are not finite, at the seam or with the model's own eager attention",
                    "the weights are damaged, or try another --dtype",
                )
            difference /= max(_largest(their), 1e-30)
        else:
            # Weights may differ from eager's in two right ways; the smallest difference counts.
            totals = our.sum(-1, keepdim=True)
            # A query that sees no key has no weights at the seam, whatever eager gives it.
            where_seeing = _largest(our - their * (totals > 0))
            # Some eager functions leave out the part that a sink takes: their rows sum to 1, ours to less.
            with_sinks = _largest(our - their * totals)
            difference = min(difference, where_seeing, with_sinks)
        differences[name] = difference
    return differences


def _largest(values: Tensor) -> float:
    return float(values.abs().max())


def _exact_outcome(
    model: PreTrainedModel, survey: AttentionSurvey, inputs: Mapping[str, Any], *, with_maps: bool
) -> Outcome:
    """Return the outcome of a float64 copy of a model by eager attention.

    Empty if the seam differs from it, if the copy does not run, or if there is no memory for it.
    """
    if survey.has_unplanned_modules:
        return {}  # `survey.through` would run the model itself in the copy's place, which proves nothing
    inputs = tree_map(_widen, dict(inputs))
    try:
        # Both ways on the copy; code that asks for fewer bits gets 64 as well.
        twin = copy.deepcopy(model).double()
        with _AllFloat64():  # type: ignore[no-untyped-call]
            exact = eager_outcome(twin, survey, inputs, with_maps=with_maps)
            ours = _at_seam(twin, survey, inputs, with_maps=with_maps)
        require_equal(inputs, ours, exact, tolerance(twin, survey.n_calls))
    except Exception:  # a model may fail in any way in another precision
        return {}
    return exact


_NARROW = (torch.float32, torch.bfloat16, torch.float16)


class _AllFloat64(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Computes in float64 what a model's code asks to have in fewer bits: its norms, rotary angles and softmax."""

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # A dtype is asked for by keyword. Tensors are wide already, as every result is widened.
        kwargs = {name: _widen(value) for name, value in (kwargs or {}).items()}
        return tree_map(_widen, op(*args, **kwargs))


def _widen(value: Any) -> Any:
    """Return a tensor of floats in float64, and for the name of a narrower precision float64; others as they are."""
    if isinstance(value, Tensor):
        return value.double() if value.dtype in _NARROW else value
    return torch.float64 if value in _NARROW else value


# Outcomes ---------------------------------------------------------------------------------------------------------


def _outcome(survey: AttentionSurvey, output: Any, seen: Sequence[TracedAttention]) -> Outcome:
    """Return the hidden states and weights of attentions in the order of the survey."""
    n_calls = len(survey.order)
    if len(seen) != n_calls:
        raise AttnscopeError(
            f"self-check: {len(seen)} attentions are computed, where another text has {n_calls}"
        )
    outcome = states_of(output)
    for (kind, layer), attention in zip(survey.order, seen, strict=True):
        # (batch, head, query, key) -> (batch, query, head, key): rows are tokens, as in hidden states.
        outcome[f"{kind} layer {layer}"] = attention.weights.transpose(1, 2)
    return outcome


def _at_seam(
    model: PreTrainedModel, survey: AttentionSurvey, inputs: Mapping[str, Any], *, with_maps: bool
) -> Outcome:
    """Return the outcome of a model through the seam; without maps, hidden states alone, in less memory."""
    if with_maps:
        return _outcome(survey, *trace_attention(model, inputs))
    # Without a plan all attention is "beside" it: computed at the seam, and never kept.
    return states_of(run_with_probe(model, inputs, {}, attend, has_unplanned_modules=True))


def _by_eager(
    model: PreTrainedModel, survey: AttentionSurvey, inputs: Mapping[str, Any], *, with_maps: bool
) -> Outcome:
    """Return the outcome of a model's own eager attention, or of the unchanged model where eager does not work."""
    try:
        return eager_outcome(model, survey, inputs, with_maps=with_maps)
    except UnclearError:
        raise
    except Exception:  # a model may fail in any way
        return states_of(run_unchanged(model, inputs))


# What a model gives out -------------------------------------------------------------------------------------------

_ATTENTION_IN_NAME_ONLY = {"RwkvSelfAttention", "PatchTSMixerGatedAttention"}
"""Classes of modules that compute no weights of queries on keys."""


def _read_eager(
    model: PreTrainedModel, padded: Inputs, alone: Inputs, reason: str, n_seen: int
) -> AttentionSurvey:
    """Return the survey of a model whose attention does not all pass the seam: what it gives out itself, checked.

    Args:
        model: The model.
        padded: Two texts, padded to one length.
        alone: The second of them.
        reason: Why the seam does not show it.
        n_seen: How many attentions passed the seam. All must be given out: Depth Pro leaves out an encoder.
    """
    # Run the model unchanged first: one that cannot run at all is refused for that reason.
    try:
        own, _ = _with_hidden_states(padded, alone, lambda: (run_unchanged(model, alone), None))
    except Exception as error:
        raise AttnscopeError(
            f"{model.config.model_type} does not run on the input that attnscope makes up for its self-check: "
            f"its own code says {type(error).__name__}: {_shorten(error)}",
            OWN_INPUTS,
        ) from error
    if hidden_states(own) is None:
        raise _refusal(model, reason, eager_reason="it returns no hidden states")
    try:
        output, seen = checked_weights(model, alone)
        survey = read_survey(model.config, alone, output, seen)
        # Weights alone are compared: {} is an output without hidden states.
        single = _outcome(survey, {}, seen)
        both = _outcome(survey, *checked_weights(model, padded))
        if survey.n_calls < n_seen:
            raise UnclearError(
                f"it gives out the weights of {survey.n_calls} of its {n_seen} attentions"
            )
    except Exception as error:
        raise _refusal(model, reason, _shorten(error)) from error
    # Asking for weights must not change the result; padding may.
    compare(model, survey, alone, states_of(output), states_of(own))
    notes = [f"Weights come from the model's own eager attention, not through the seam: {reason}."]
    try:
        require_equal(alone, _last_text(both, single), single, tolerance(model, survey.n_calls))
    except RoundingError:
        notes.append(PADDING_MATTERS)
    return replace(survey, notes=(*notes, *survey.notes))


def _refusal(model: PreTrainedModel, seam_reason: str, eager_reason: str) -> AttnscopeError:
    """Return the error that neither path shows a model truly, with both reasons, or that it has no attention at all."""
    kind = model.config.model_type
    # A model without attention needs another message than one whose attention cannot be shown.
    names = {type(module).__name__ for module in model.modules()} - _ATTENTION_IN_NAME_ONLY
    if any(re.search("attention|attn", name, re.IGNORECASE) for name in names):
        why = seam_reason
        if eager_reason != seam_reason:
            why = f"{seam_reason}; and by eager attention, {eager_reason}"
        return AttnscopeError(f"{kind} cannot be shown truly: {why}")
    return AttnscopeError(f"{kind} has no attention", "there is nothing to show of it")


def _shorten(error: BaseException) -> str:
    """Return an error's message, in one line without its full stop."""
    return (error.message if isinstance(error, AttnscopeError) else first_line(error)).rstrip(".")
