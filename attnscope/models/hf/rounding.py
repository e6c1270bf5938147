"""Compare the outcomes of two ways to run a Hugging Face model, within rounding.

How much rounding may differ is measured on the model itself where its heads are sharp: against a copy in float64.
"""

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from transformers import PreTrainedModel

from attnscope.core.attention.seam import Kind
from attnscope.errors import AttnscopeError, RoundingError, is_out_of_memory, require_rounding
from attnscope.models.devices import name_dtype
from attnscope.models.hf.examples import Example
from attnscope.models.hf.parts import hidden_states
from attnscope.models.hf.seam import Seen, rehearse, use_attention
from attnscope.models.hf.survey import Maps, Survey, Unclear, listed_layers

Outcome = dict[str, Tensor]
"""Results of one forward pass, by name.

"hidden" and, of an encoder-decoder, "encoded" are last hidden states, (batch, token, d_model). The weights of
"decoder layer 3" are (batch, query, head, key), so that both have their rows along the first two axes.
"""

STATES = ("hidden", "encoded")


# Outcomes ---------------------------------------------------------------------------------------------------------


def states_of(output: Any) -> Outcome:
    """Return the hidden states that a forward returned."""
    states = {"hidden": hidden_states(output), "encoded": getattr(output, "encoder_last_hidden_state", None)}
    return {name: x for name, x in states.items() if x is not None}


def outcome_at_seam(survey: Survey, output: Any, seen: Sequence[Seen]) -> Outcome:
    """Return the hidden states and weights that passed the seam."""
    n = len(survey.order)
    if len(seen) != n:
        raise AttnscopeError(f"self-check: {len(seen)} attentions are computed, where another text has {n}")
    outcome = states_of(output)
    for (kind, layer), call in zip(survey.order, seen, strict=True):
        outcome[f"{kind} layer {layer}"] = call.weights.transpose(1, 2)
    return outcome


def outcome_of_eager(survey: Survey, config: Any, output: Any, maps: Maps) -> Outcome:
    """Return the outcome of a model's own eager attention, each map by its kind and layer.

    Raises:
        Unclear: There are other layers than those of the survey.
    """
    outcome = states_of(output)
    for kind, layers in survey.layers.items():
        # Of a model that is no encoder-decoder there is one list of maps, whatever its kind is called.
        of_kind = maps.get(kind, []) if config.is_encoder_decoder else next(iter(maps.values()), [])
        n_layers = survey.n_layers[kind]
        if not of_kind and n_layers == len(layers):
            continue  # none are given out: equal hidden states and the number of layers have to do
        if len(of_kind) == n_layers and layers == listed_layers(config, n_layers):
            of_kind = [of_kind[layer] for layer in layers]  # MiniMax gives out linear layers' too
        if len(of_kind) != len(layers):
            raise Unclear(f"only {len(layers)} of {len(of_kind)} {kind} layers pass transformers' attention interface")
        outcome |= {f"{kind} layer {i}": w.transpose(1, 2) for i, w in zip(layers, of_kind, strict=True)}
    return outcome


def run_as_it_is(model: PreTrainedModel, inputs: Mapping[str, Any]) -> Any:
    """Return the output of a model with the attention implementation that it has."""
    with use_attention(model, None):
        return model(**inputs)


def eager_or_own(model: PreTrainedModel, survey: Survey, example: Example, *, with_maps: bool = True) -> Outcome:
    """Return the outcome of a model's own eager attention, or of the unchanged model where eager does not work."""
    try:
        output, maps = run_eager(model, example.inputs, weights=with_maps)
    except Exception:  # a model may fail in any way
        return states_of(run_as_it_is(model, example.inputs))
    return outcome_of_eager(survey, model.config, output, maps) if with_maps else states_of(output)


def run_eager(model: PreTrainedModel, inputs: Mapping[str, Any], *, weights: bool = True) -> tuple[Any, Maps]:
    """Run a model by its own eager attention; return its output and the weights that it gives out.

    Those of a model that is no encoder-decoder all count as an encoder's.
    """
    with use_attention(model, "eager"):
        arguments = {**inputs, "output_attentions": True} if weights else inputs
        parts = set(model.modules())
        output = model(**arguments)
        if weights and set(model.modules()) != parts:
            # BigBird exchanges its layers on a short text, after transformers began to watch them: watch the new ones.
            for module in model.modules():
                vars(module).pop("_output_capturing_hooks_installed", None)
            output = model(**arguments)
    names: dict[Kind, str] = {"encoder": "attentions"}
    if model.config.is_encoder_decoder:
        names = {"encoder": "encoder_attentions", "decoder": "decoder_attentions", "cross": "cross_attentions"}
    maps: Maps = {kind: [w for w in getattr(output, name, None) or () if w is not None] for kind, name in names.items()}
    if hasattr(model.config, "attention_window"):
        maps["encoder"] = [_whole_rows(band, model.config.attention_window) for band in maps["encoder"]]
    return output, maps


def _whole_rows(band: Tensor, window: int | list[int]) -> Tensor:
    """Scatter a band around the diagonal (Longformer), (batch, head, query, window + 1), into rows over all keys.

    A band with columns for keys that every query sees is left as it is, and refused later as no map.
    """
    n_queries, width = band.shape[2:]
    if width not in ({window + 1} if isinstance(window, int) else {each + 1 for each in window}):
        return band
    # Place j of query i is key i + j - width // 2; what lies beyond the text is 0, and cut off.
    keys = torch.arange(n_queries, device=band.device)[:, None] + torch.arange(width, device=band.device)
    rows = band.new_zeros(*band.shape[:3], n_queries + width - 1)
    return rows.scatter(3, keys.expand_as(band), band)[..., width // 2 :][..., :n_queries]


# Rounding ---------------------------------------------------------------------------------------------------------

_TIMES = 16.0
"""Allowed difference of two ways to compute the same, in units of the error of one: sharp heads have a long tail."""

_NOTED = 0.05
"""Error of a weight, or of hidden states relative to the largest, that a picture shows."""


def tolerance(model: PreTrainedModel, n_calls: int) -> float:
    """Return by how much two ways to compute the same may differ, in weights and relative to the largest hidden state.

    Rounding adds up over layers like a random walk. In units of eps * sqrt(1 + n_calls), real models in 16 bits differ
    by less than 1 (their softmax is computed in 32), in 32 bits by up to 5. A random model with sharp heads can exceed
    it: then its own rounding is measured.
    """
    # Many a model's own eager softmax is in 32 bits, also where all else is in 64.
    eps = max(torch.finfo(model.dtype).eps, torch.finfo(torch.float32).eps)
    return (4 if eps > 1e-5 else 128) * eps * math.sqrt(1 + n_calls)


def compare(model: PreTrainedModel, survey: Survey, example: Example, ours: Outcome, theirs: Outcome) -> list[str]:
    """Refuse what passed the seam where it differs beyond rounding from what the model computes by itself.

    A sharp head with a score of a hundred turns rounding into another weight, and later layers turn that into other
    scores; in 16 bits a score of ten is enough. Seam and eager must then agree in float64, where rounding is too small
    for this. The bound is the error of eager attention against float64. Both need a copy of the model, so only a
    comparison that fails pays for it. A bound near 1 allows any weights: then float64 alone shows that the seam is
    right, and the note that is returned says that rounding decides.

    Raises:
        AttnscopeError: They differ.
    """
    allowed = tolerance(model, survey.n_calls)
    try:
        require_equal(example, ours, theirs, allowed)
        return []
    except RoundingError as difference:
        try:
            exact = _agree_in_float64(model, survey, example, allowed, with_maps=bool(ours.keys() - STATES))
        except Exception as no_memory:  # which may suffice another time
            raise difference from no_memory
        # Seam and eager agree in float64: the model's own rounding may explain the difference.
        error = 0.0 if exact is None else _largest_error(theirs, exact)
        if not _TIMES * error > allowed:
            raise
    require_equal(example, ours, theirs, _TIMES * error)
    if error <= _NOTED:
        return []
    wider = "float64" if model.dtype == torch.float32 else "float32"
    moved = f"Rounding in {name_dtype(model.dtype)} moves attention weights by up to {min(error, 1):.2g}"
    return [f"{moved}: another device or batch may show others. --dtype {wider} rounds less."]


def require_equal(example: Example, ours: Outcome, theirs: Outcome, allowed: float) -> None:
    """Raise a RoundingError where what both have differs by more than is allowed, at real positions."""
    for name in [name for name in ours if name in theirs]:
        own = ours[name].float()
        other = theirs[name].float()
        if own.shape != other.shape:
            raise AttnscopeError(f"self-check: {name} is {tuple(own.shape)}, by eager {tuple(other.shape)}")
        # Only rows of real tokens count: (batch, token, …) -> (row, …).
        real = example.real_rows(name)
        if real is not None and own.shape[:2] == real.shape:
            own = own[real]
            other = other[real]
        difference = _largest(own - other)
        if name in STATES:
            if not bool((own.isfinite() & other.isfinite()).all()):
                raise AttnscopeError(
                    "self-check: hidden states are not finite, at the seam or with the model's own eager attention",
                    "the weights are damaged, or try another --dtype",
                )
            difference /= max(_largest(other), 1e-30)
        elif not difference <= allowed:
            # A query that sees no key has no weights; some eager functions leave out the part that a sink takes.
            totals = own.sum(-1, keepdim=True)
            difference = min(_largest(own - other * (totals > 0)), _largest(own - other * totals))
        require_rounding(
            f"self-check: {'hidden states' if name in STATES else f'weights of {name}'} differ from the model's own",
            difference,
            allowed,
            "the maps could be wrong, so none are shown; try another --dtype",
        )


def _largest(values: Tensor) -> float:
    return float(values.abs().max())


def _agree_in_float64(
    model: PreTrainedModel, survey: Survey, example: Example, allowed: float, *, with_maps: bool
) -> Outcome | None:
    """Return the outcome of a float64 copy of a model by eager attention; None if the seam differs from it.

    None also if the copy does not run. Where there is no memory for it, the error of that is let through.
    """
    inputs = {name: _widen(value) for name, value in example.inputs.items()}
    try:
        # Both ways on the copy; code that asks for fewer bits gets 64 as well.
        twin = copy.deepcopy(model).double()
        with _AllFloat64():  # type: ignore[no-untyped-call]
            theirs = run_eager(twin, inputs)
            ours = rehearse(twin, inputs)
        exact = states_of(theirs[0])
        seen = states_of(ours[0])
        if with_maps:
            exact = outcome_of_eager(survey, twin.config, *theirs)
            seen = outcome_at_seam(survey, *ours)
        require_equal(example, seen, exact, allowed * tolerance(twin, 0) / tolerance(model, 0))
    except Exception as error:  # a model may fail in any way in another precision
        if is_out_of_memory(error):
            raise
        return None
    return exact


def _largest_error(outcome: Outcome, exact: Outcome) -> float:
    """Return the largest error of weights, and of hidden states relative to the largest."""
    errors = [0.0]
    for name in outcome.keys() & exact.keys():
        error = _largest(outcome[name] - exact[name])
        errors.append(error / _largest(exact[name]) if name in STATES else error)
    return max(errors)


_NARROW = (torch.float32, torch.bfloat16, torch.float16)


class _AllFloat64(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Computes in float64 what a model's code asks to have in fewer bits: its norms, rotary angles and softmax."""

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {name: _widen(value) for name, value in (kwargs or {}).items()}
        return tree_map(_widen, op(*args, **kwargs))


def _widen(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.double() if value.dtype in _NARROW else value
    return torch.float64 if value in _NARROW else value
