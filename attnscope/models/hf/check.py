"""Check that the attention weights at the seam of a Hugging Face model are the weights that the model computes.

The *seam* is the function that attnscope puts in place of transformers' attention function (`hf.seam`). A model runs on
small random inputs, once with the seam and once with its own eager attention, the *reference*. Hidden states, the
number of layers and attention weights must agree within rounding. Four rules make the check strict:

1. Each attention is assigned its kind (encoder, decoder, cross) and layer (`hf.survey`).
2. Two texts of different length are padded together. The second must get the same result as alone.
3. One text is longer than all *reaches*: the lengths of windows, chunks and blocks that the configuration names. If
   that takes too much time or memory at load, the comparison waits for the first text beyond a reach.
4. A larger difference than usual counts as rounding only if seam and eager attention agree in float64, and then only up
   to 16 times the error of eager attention against float64.

If not all of a model's attention passes the seam, the model takes the *eager path*: the weights that it returns itself
are shown. A model that neither path shows truly is refused, because a wrong picture is worse than none. `hf.survey`
stores the result of a check. An `Outcome` holds the results of a forward pass by name: "hidden" for the hidden states,
and names such as "decoder layer 3" for attention weights.
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
    STATE_NAMES,
    Outcome,
    eager_outcome,
    outcome_of_states,
    read_checked_weights,
    run_unchanged,
    tolerance,
)
from attnscope.models.hf.examples import (
    OWN_INPUTS_HINT,
    TEXT_LENGTHS,
    Inputs,
    find_reaches,
    length_beyond,
    make_examples,
    real_token_mask,
)
from attnscope.models.hf.parts import count_tokens, fixed_arguments, hidden_states, max_tokens
from attnscope.models.hf.seam import TracedAttention, run_with_probe, trace_attention
from attnscope.models.hf.survey import AttentionSurvey, UnclearError, has_causal_weights, read_survey

PADDING_NOTE = "Padding changes what this model computes: texts are best shown one by one."
"""The note on a model whose result for a text depends on padding, as with convolutions across the end of the text."""


def survey_attention(model: PreTrainedModel, *, check: bool = True) -> AttentionSurvey:
    """Find a model's attention layers, and check that the weights at the seam are the ones the model computes.

    Args:
        model: The model, without the head for its task.
        check: Whether to compare it with eager attention. If False, it is compared only if layers lack attention.

    Raises:
        AttnscopeError: Neither the seam nor the eager path shows the model's true attention.
    """
    padded, alone = make_examples(model)
    seen: Sequence[TracedAttention] = ()
    with torch.no_grad():
        try:
            # The seam path: find the layers from the calls at the seam, then compare with eager attention.
            output, seen = _trace_alone(model, padded, alone)
            survey = read_survey(model.config, alone, output, seen)
            if check or survey.n_calls < sum(survey.n_layers.values()):
                notes = _check_seam(model, survey, padded, alone, _collect_outcome(survey, output, seen))
                survey = replace(survey, notes=(*survey.notes, *notes))
            return replace(survey, checked=check)
        except AttnscopeError:
            raise
        # A model may fail in any way when its attention function is replaced. An UnclearError leads here too.
        except Exception as error:
            if is_out_of_memory(error):
                raise
            # The eager path: the weights that the model itself returns.
            return _survey_eager_weights(model, padded, alone, _reason_of(error), len(seen))


def _trace_alone(
    model: PreTrainedModel, padded: Inputs, alone: Inputs
) -> tuple[Any, Sequence[TracedAttention]]:
    """Run a model with the seam on `alone`; raise an UnclearError if the seam does not support its attention."""
    try:
        return _run_with_states(padded, alone, lambda: trace_attention(model, alone))
    except AttnscopeError as error:
        raise UnclearError(_reason_of(error)) from error


def _run_with_states(
    padded: Inputs, alone: Inputs, run: Callable[[], tuple[Any, Any]]
) -> tuple[Any, Any]:
    """Call `run`, which returns a model's output and a second value; request hidden states if the output has none.

    They are requested in both inputs, for all later runs too, and `run` is called again.
    """
    result = run()
    if hidden_states(result[0]) is None:
        for inputs in (padded, alone):
            inputs["output_hidden_states"] = True
        result = run()
    return result


def _check_seam(
    model: PreTrainedModel, survey: AttentionSurvey, padded: Inputs, alone: Inputs, outcome: Outcome
) -> list[str]:
    """Compare the outcomes at the seam with eager attention; return notes for the user.

    Args:
        model: The model.
        survey: Its attention layers.
        padded: Two texts, padded to one length.
        alone: The second text alone.
        outcome: The outcome of `alone` at the seam.
    """
    notes = check_agreement(model, survey, alone, outcome)
    if padded is not alone:
        output, seen = trace_attention(model, padded)
        padded_outcome = _collect_outcome(survey, output, seen)
        try:
            check_agreement(model, survey, alone, _cut_last_text(padded_outcome, outcome), outcome)
        except AttnscopeError:
            # Both may be right: convolutions read padding, and texts of a batch compete for experts.
            check_agreement(model, survey, padded, padded_outcome)
            # AIMv2's text tower has a causal mask for a padded batch, and none for a text alone. So the first text of
            # the batch, which has no padding, must be causal if the text alone was. (1, head, query, key)
            weights = [attention.weights[:1] for attention in seen]
            is_causal = "decoder" in survey.layers
            if not model.config.is_encoder_decoder and is_causal != has_causal_weights(weights):
                raise AttnscopeError(
                    f"{model.config.model_type} lets tokens attend to later ones in texts of equal length, and not "
                    "where one is padded",
                    "it is not known how it was trained, so neither is shown",
                ) from None
            notes.append(PADDING_NOTE)
    # One text beyond as many reaches as the limits allow. The survey keeps the other reaches, for `check_beyond`.
    n_tokens = _choose_length_at_load(model, survey)
    survey.reaches[:] = [
        reach for reach in find_reaches(model.config) if length_beyond(reach) > n_tokens
    ]
    _check_long_text(model, survey, n_tokens, with_maps=True)
    return notes


def _cut_last_text(padded_outcome: Outcome, alone_outcome: Outcome) -> Outcome:
    """Return the outcome of the last text of a padded batch, cut to the shapes of the outcome of that text alone."""
    cut_outcome = {}
    for name, values in alone_outcome.items():
        # (1, query, head, key) or (1, token, d_model)
        _, n_rows, *_, n_columns = values.shape
        cut_outcome[name] = padded_outcome[name][-1:, :n_rows, ..., :n_columns]
    return cut_outcome


# Beyond windows ---------------------------------------------------------------------------------------------------

_MIN_LONG_TOKENS = 37
"""The minimal number of tokens of the longer text that is compared at load."""

_MAX_WORK_AT_LOAD = 1e10
"""Limit of parameters x tokens for the longer text that is compared at load, such as 135 million x 74."""

_MAX_MAP_BYTES = 64 * 2**20
"""Limit of the memory for the attention weights of that text, those at the seam and the eager ones."""

_MAX_EAGER_BYTES = 2 * 2**30
"""Limit of the memory of eager attention in one layer: 12 bytes per weight, for three float32 tensors of that shape."""


def _choose_length_at_load(model: PreTrainedModel, survey: AttentionSurvey) -> int:
    """Return the length of the longer text compared at load, in tokens: beyond as many reaches as the limits allow."""
    n_parameters = sum(parameter.numel() for parameter in model.parameters())
    n_heads = sum(survey.n_heads[kind] * len(layers) for kind, layers in survey.layers.items())
    # A map at the seam and one of eager attention, in float32, take 8 bytes per weight.
    max_length = min(_MAX_WORK_AT_LOAD / max(1, n_parameters), math.sqrt(_MAX_MAP_BYTES / (8 * n_heads)))
    lengths = map(length_beyond, find_reaches(model.config))
    return max([_MIN_LONG_TOKENS, *(length for length in lengths if length <= max_length)])


def check_beyond(model: PreTrainedModel, survey: AttentionSurvey, n_tokens: int) -> None:
    """Compare with eager attention once more, because a text of n_tokens exceeds a reach that was not compared yet.

    If the model passes, its `survey.reaches` lose the reach. If it fails, an error is raised, and the next text beyond
    the reach is compared again. A reach is also dropped if the comparison would not fit in memory.
    """
    # The longest text for which eager attention's scores of one layer fit in memory.
    max_length = math.sqrt(_MAX_EAGER_BYTES / (12 * max(1, *survey.n_heads.values())))
    lengths = [length_beyond(reach) for reach in survey.reaches if reach < n_tokens]
    fitting_lengths = [length for length in lengths if length <= max_length]
    if fitting_lengths and survey.checked:
        with torch.no_grad():
            _check_long_text(model, survey, max(fitting_lengths), with_maps=False)
    survey.reaches[:] = [reach for reach in survey.reaches if reach >= n_tokens]


def _check_long_text(
    model: PreTrainedModel, survey: AttentionSurvey, n_tokens: int, *, with_maps: bool
) -> None:
    """Compare hidden states, and with `with_maps` attention weights, with eager attention on a text of n_tokens."""
    n_tokens = min(n_tokens, max_tokens(model) or n_tokens)
    _, inputs = make_examples(model, n_tokens)
    # Nothing is new if the model reads no text, or on a text as short as the one that was compared alone.
    if not count_tokens(inputs) or n_tokens <= TEXT_LENGTHS[1]:
        return
    inputs |= survey.extras  # they request hidden states, from models that return none by default
    try:
        reference = _compute_reference(model, survey, inputs, with_maps=with_maps)
    except Exception as error:
        if isinstance(error, UnclearError) or is_out_of_memory(error):
            raise
        return  # the model itself fails on a text of this length, so there is nothing to compare
    outcome = _compute_seam_outcome(model, survey, inputs, with_maps=with_maps)
    check_agreement(model, survey, inputs, outcome, reference)


# Other inputs -----------------------------------------------------------------------------------------------------


def takes_light_masks(model: PreTrainedModel, survey: AttentionSurvey) -> bool:
    """Return whether a model passes attnscope's light masks on to the seam unchanged.

    A light mask is (batch, 1, 1, key) and holds only the padding, without causality or a window (see `hf.seam`). Try
    it on two texts padded together: outcomes with light and with full masks must agree within rounding.
    """
    padded, _ = make_examples(model)
    padded |= survey.extras
    try:
        with torch.no_grad():
            # min_light_keys=1: every mask with at least 1 key is light.
            light_output = run_with_probe(model, padded, survey.plan, attend, min_light_keys=1)
            full_output = run_with_probe(model, padded, survey.plan, attend)
        outcome = outcome_of_states(light_output)
        check_agreement(model, survey, padded, outcome, outcome_of_states(full_output))
    except Exception:  # a model may fail in any way on a mask of another shape
        return False
    return True


def check_on_input(
    model: PreTrainedModel, survey: AttentionSurvey, inputs: Mapping[str, Any], probe: Probe = attend
) -> None:
    """Compare the result on an input, such as a picture, with the result of the unchanged model.

    Attention weights are not compared, which would take much memory. Modules that are not in the survey's plan, such
    as a vision tower's, may attend too (`has_unplanned_modules`).
    """
    if survey.path != "seam" or not survey.checked:
        return
    inputs = {**fixed_arguments(model), **survey.extras, **inputs}
    with torch.no_grad():
        output = run_with_probe(
            model, inputs, survey.plan, probe, run_forward=survey.run_forward, has_unplanned_modules=True
        )
        reference = run_unchanged(model, inputs)
    check_agreement(model, survey, inputs, _logits_or_states(output), _logits_or_states(reference))


def _logits_or_states(output: Any) -> Outcome:
    """Return the logits, (batch, token, ...), as an outcome "hidden"; the hidden states of a model without a head."""
    logits = getattr(output, "logits", None)
    return outcome_of_states(output) if logits is None else {"hidden": logits}


# Comparing --------------------------------------------------------------------------------------------------------

_MAX_ERROR_RATIO = 16.0
"""Seam and eager attention may differ by this multiple of eager attention's error against float64, which varies."""

_MIN_VISIBLE_ERROR = 0.05
"""A larger error of an attention weight (or of hidden states, relative to the largest one) is visible in a heatmap."""


def check_agreement(
    model: PreTrainedModel,
    survey: AttentionSurvey,
    inputs: Mapping[str, Any],
    outcome: Outcome,
    reference: Outcome | None = None,
) -> list[str]:
    """Refuse an outcome at the seam that differs from a reference, by default eager attention, by more than rounding.

    1. If both agree within the usual rounding, the check is passed.
    2. Otherwise seam and eager attention must agree in float64. A head with scores of a hundred (in 16 bits, of ten)
       turns a rounding error into another attention weight, and later layers amplify it. In float64 these errors are
       negligible. This takes a copy of the model, so it is done only in this case.
    3. Then they may differ by _MAX_ERROR_RATIO times the error of eager attention against float64.
    4. If that error is visible in a heatmap, the returned note for the user says so. Else there are no notes.

    Raises:
        AttnscopeError: They differ.
    """
    # All that is no hidden state in an outcome is attention weights.
    with_maps = bool(outcome.keys() - STATE_NAMES)
    if reference is None:
        reference = _compute_reference(model, survey, inputs, with_maps=with_maps)
    allowed = tolerance(model, survey.n_calls)
    try:
        require_equal(inputs, outcome, reference, allowed)
        return []
    except RoundingError:
        # If they differ in float64 too, this is empty, so the error is 0, and the RoundingError is raised again.
        exact = _compute_float64_outcome(model, survey, inputs, with_maps=with_maps)
        error = max(_differences(inputs, reference, exact).values(), default=0.0)
        max_difference = _MAX_ERROR_RATIO * error
        # "not >" instead of "<=", so that NaN raises too.
        if not max_difference > allowed:
            raise
    require_equal(inputs, outcome, reference, max_difference)
    if error <= _MIN_VISIBLE_ERROR:
        return []
    wider_dtype = "float64" if model.dtype == torch.float32 else "float32"
    return [
        f"Rounding in {name_dtype(model.dtype)} moves attention weights by up to {min(error, 1):.2g}: "
        f"another device or batch may show others. --dtype {wider_dtype} rounds less."
    ]


def require_equal(
    inputs: Mapping[str, Any], outcome: Outcome, reference: Outcome, allowed: float
) -> None:
    """Raise a RoundingError if two outcomes of these inputs differ by more than `allowed`."""
    for name, difference in _differences(inputs, outcome, reference).items():
        part = "hidden states" if name in STATE_NAMES else f"weights of {name}"
        require_close(
            f"self-check: {part} differ from the model's own",
            difference,
            allowed,
            "the maps could be wrong, so none are shown; try another --dtype",
        )


def _differences(inputs: Mapping[str, Any], outcome: Outcome, reference: Outcome) -> dict[str, float]:
    """Return the largest difference of each result that two outcomes share, at real tokens.

    The difference of hidden states is relative to the largest one of the reference.
    """
    differences = {}
    for name in outcome:
        if name not in reference:
            continue
        actual = outcome[name].float()
        expected = reference[name].float()
        if actual.shape != expected.shape:
            raise AttnscopeError(
                f"self-check: {name} is {tuple(actual.shape)}, by eager {tuple(expected.shape)}"
            )
        # Compare only rows of real tokens: (batch, token, …) -> (row, …).
        mask = real_token_mask(inputs, name)
        if mask is not None and actual.shape[:2] == mask.shape:
            actual = actual[mask]
            expected = expected[mask]
        difference = _max_abs(actual - expected)
        if name in STATE_NAMES:
            if not bool((actual.isfinite() & expected.isfinite()).all()):
                raise AttnscopeError(
                    "self-check: hidden states are not finite, at the seam or with the model's own eager attention",
                    "the weights are damaged, or try another --dtype",
                )
            difference /= max(_max_abs(expected), 1e-30)
        else:
            # Attention weights may rightly differ from eager ones in two cases. Take the smallest difference.
            totals = actual.sum(-1, keepdim=True)  # (row, head, 1)
            # Case 1: the mask hides all keys from a query. Its weights are 0 at the seam; eager ones are arbitrary.
            without_masked_rows = _max_abs(actual - expected * (totals > 0))
            # Case 2: a sink takes a part of the softmax. Some eager functions then rescale the rest to a sum of 1.
            with_sinks = _max_abs(actual - expected * totals)
            difference = min(difference, without_masked_rows, with_sinks)
        differences[name] = difference
    return differences


def _max_abs(values: Tensor) -> float:
    return float(values.abs().max())


def _compute_float64_outcome(
    model: PreTrainedModel, survey: AttentionSurvey, inputs: Mapping[str, Any], *, with_maps: bool
) -> Outcome:
    """Return the outcome of a float64 copy of a model with eager attention.

    It is empty if the outcome at the seam differs in float64 too, if the copy does not run, or if memory is lacking.
    """
    if survey.has_unplanned_modules:
        return {}  # its `survey.run_forward` runs the model itself, not the copy, which would prove nothing
    inputs = tree_map(_widen_to_float64, dict(inputs))
    try:
        # Run the copy with eager attention and with the seam. Code that asks for fewer bits gets float64 too.
        twin = copy.deepcopy(model).double()
        with _AllFloat64():  # type: ignore[no-untyped-call]
            exact = eager_outcome(twin, survey, inputs, with_maps=with_maps)
            outcome = _compute_seam_outcome(twin, survey, inputs, with_maps=with_maps)
        require_equal(inputs, outcome, exact, tolerance(twin, survey.n_calls))
    except Exception:  # a model may fail in any way in another precision
        return {}
    return exact


_NARROW_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class _AllFloat64(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Makes a model's code compute in float64 where it asks for fewer bits, as for norms, rotary angles and softmax."""

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Code asks for a dtype in a keyword argument. Tensors in `args` are float64 already, as every result is.
        kwargs = {name: _widen_to_float64(value) for name, value in (kwargs or {}).items()}
        return tree_map(_widen_to_float64, op(*args, **kwargs))


def _widen_to_float64(value: Any) -> Any:
    """Return a tensor of floats as float64, a narrower dtype as torch.float64, and any other value unchanged."""
    if isinstance(value, Tensor):
        return value.double() if value.dtype in _NARROW_DTYPES else value
    return torch.float64 if value in _NARROW_DTYPES else value


# Outcomes ---------------------------------------------------------------------------------------------------------


def _collect_outcome(survey: AttentionSurvey, output: Any, seen: Sequence[TracedAttention]) -> Outcome:
    """Return an output's hidden states (an output {} has none) and the weights of attentions in the survey's order."""
    n_calls = len(survey.order)
    if len(seen) != n_calls:
        raise AttnscopeError(
            f"self-check: {len(seen)} attentions are computed, where another text has {n_calls}"
        )
    outcome = outcome_of_states(output)
    for (kind, layer), attention in zip(survey.order, seen, strict=True):
        # (batch, head, query, key) -> (batch, query, head, key): rows are tokens, as in hidden states.
        outcome[f"{kind} layer {layer}"] = attention.weights.transpose(1, 2)
    return outcome


def _compute_seam_outcome(
    model: PreTrainedModel, survey: AttentionSurvey, inputs: Mapping[str, Any], *, with_maps: bool
) -> Outcome:
    """Return the outcome of a model with the seam; without maps only hidden states, in less memory."""
    if with_maps:
        return _collect_outcome(survey, *trace_attention(model, inputs))
    # An empty plan, with `has_unplanned_modules`, lets the seam compute all attention without storing it.
    return outcome_of_states(run_with_probe(model, inputs, {}, attend, has_unplanned_modules=True))


def _compute_reference(
    model: PreTrainedModel, survey: AttentionSurvey, inputs: Mapping[str, Any], *, with_maps: bool
) -> Outcome:
    """Return the outcome of a model's own eager attention, or of the unchanged model if eager attention fails."""
    try:
        return eager_outcome(model, survey, inputs, with_maps=with_maps)
    except UnclearError:
        raise
    except Exception:  # a model may fail in any way
        return outcome_of_states(run_unchanged(model, inputs))


# The eager path ---------------------------------------------------------------------------------------------------

_ATTENTION_IN_NAME_ONLY = {"RwkvSelfAttention", "PatchTSMixerGatedAttention"}
"""Module classes that are called attention, but compute no weights of queries on keys."""


def _survey_eager_weights(
    model: PreTrainedModel, padded: Inputs, alone: Inputs, reason: str, n_seen: int
) -> AttentionSurvey:
    """Check the attention weights that a model returns itself, and return its survey. Not all of them pass the seam.

    Args:
        model: The model.
        padded: Two texts, padded to one length.
        alone: The second text alone.
        reason: Why the seam does not show the model, for messages.
        n_seen: How many attentions passed the seam. All must be returned: Depth Pro returns none of one encoder.
    """
    # Run the model unchanged first: one that cannot run at all is refused for that reason.
    try:
        own_output, _ = _run_with_states(padded, alone, lambda: (run_unchanged(model, alone), None))
    except Exception as error:
        raise AttnscopeError(
            f"{model.config.model_type} does not run on the input that attnscope makes up for its self-check: "
            f"its own code says {type(error).__name__}: {_reason_of(error)}",
            OWN_INPUTS_HINT,
        ) from error
    if hidden_states(own_output) is None:
        raise _make_refusal(model, reason, eager_reason="it returns no hidden states")
    try:
        output, seen = read_checked_weights(model, alone)
        survey = read_survey(model.config, alone, output, seen)
        # Compare only weights: {} is an output without hidden states.
        outcome = _collect_outcome(survey, {}, seen)
        padded_outcome = _collect_outcome(survey, *read_checked_weights(model, padded))
        if survey.n_calls < n_seen:
            raise UnclearError(
                f"it gives out the weights of {survey.n_calls} of its {n_seen} attentions"
            )
    except Exception as error:
        raise _make_refusal(model, reason, _reason_of(error)) from error
    # The request for weights must not change the result. Padding may change it, and is noted.
    check_agreement(model, survey, alone, outcome_of_states(output), outcome_of_states(own_output))
    notes = [f"Weights come from the model's own eager attention, not through the seam: {reason}."]
    try:
        require_equal(
            alone, _cut_last_text(padded_outcome, outcome), outcome, tolerance(model, survey.n_calls)
        )
    except RoundingError:
        notes.append(PADDING_NOTE)
    return replace(survey, notes=(*notes, *survey.notes))


def _make_refusal(model: PreTrainedModel, seam_reason: str, eager_reason: str) -> AttnscopeError:
    """Return the error for a model that neither path shows truly, with both reasons, or that has no attention."""
    model_type = model.config.model_type
    # Tell a model without attention from one whose attention cannot be shown, by the class names of its modules.
    names = {type(module).__name__ for module in model.modules()} - _ATTENTION_IN_NAME_ONLY
    if any(re.search("attention|attn", name, re.IGNORECASE) for name in names):
        reason = seam_reason
        if eager_reason != seam_reason:
            reason = f"{seam_reason}; and by eager attention, {eager_reason}"
        return AttnscopeError(f"{model_type} cannot be shown truly: {reason}")
    return AttnscopeError(f"{model_type} has no attention", "there is nothing to show of it")


def _reason_of(error: BaseException) -> str:
    """Return an error's message in one line, without a full stop, to be quoted in another message."""
    return (error.message if isinstance(error, AttnscopeError) else first_line(error)).rstrip(".")
