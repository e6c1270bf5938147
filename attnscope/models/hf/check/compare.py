"""Whether what is shown of a Hugging Face model is what it computes: the comparisons of the self-check."""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from transformers import PreTrainedModel

from attnscope.core.attention.probes import Weights
from attnscope.core.attention.seam import Kind, Probe, attend
from attnscope.errors import AttnscopeError, RoundingError, is_out_of_memory, require_rounding
from attnscope.models.devices import name_dtype
from attnscope.models.hf.check.examples import Example, examples
from attnscope.models.hf.check.layers import kinds_of, listed_layers
from attnscope.models.hf.seam import Plan, perform, rehearse, use_attention
from attnscope.models.model import Batch

_Result = TypeVar("_Result")
_Side = TypeVar("_Side")
Maps = dict[Kind, list[Tensor]]

_WRONG = "the maps could be wrong, so none are shown; try another --dtype"


@dataclass(frozen=True, eq=False)
class Outcome:
    """What one forward pass computed."""

    hidden: Tensor | None  # the last hidden states, of an encoder-decoder the decoder's, (batch, token, d_model)
    encoded: Tensor | None  # of an encoder-decoder: the encoder's
    maps: Maps  # the attention weights that are known, of each kind in the order of computation
    # of each map whether sinks took part of its weight. Empty where that is not known.
    sinks: Mapping[Kind, Sequence[bool]]

    @classmethod
    def of(cls, output: Any, maps: Maps, sinks: Mapping[Kind, Sequence[bool]] | None = None) -> "Outcome":
        """From what a forward returned."""
        return cls(hidden_states(output), getattr(output, "encoder_last_hidden_state", None), maps, sinks or {})

    def last_text(self, alone: "Outcome") -> "Outcome":
        """The last text of a padded batch, cut to the sizes of the outcome that it has `alone`; padding is not seen."""

        def cut(states: Tensor | None, like: Tensor | None) -> Tensor | None:
            return states if states is None or like is None else states[-1:, : like.shape[1]]

        maps: Maps = {}
        for kind, of_kind in self.maps.items():
            maps[kind] = []
            for weights, like in zip(of_kind, alone.maps[kind], strict=True):
                n_queries, n_keys = like.shape[2:]
                if bool(weights[-1:, :, :n_queries, n_keys:].any()):
                    raise AttnscopeError("self-check: padding is attended to")
                maps[kind].append(weights[-1:, :, :n_queries, :n_keys])
        return replace(self, hidden=cut(self.hidden, alone.hidden), encoded=cut(self.encoded, alone.encoded), maps=maps)


def compare(
    model: PreTrainedModel,
    example: Example,
    ours: Outcome,
    theirs: Outcome,
    layers: Mapping[Kind, Sequence[int]],
    n_layers: Mapping[Kind, int],
    notes: list[str] | None = None,
) -> str:
    """Compares what passed the seam with what the model computes by itself; refuses what differs beyond rounding.

    The layers that pass the seam are given by kind, as is how many there are. Where rounding alone decides what the
    model attends to, a note is added.

    Returns:
        Why the seam does not see the whole, "" if it does.
    """

    def check(model: PreTrainedModel, example: Example, ours: Outcome, theirs: Outcome, allowed: float) -> str:
        _compare_hidden(model, example, ours, theirs, allowed)
        for kind, own_maps in ours.maps.items():
            # Of a model that is no encoder-decoder there is one list of maps, whatever we call its kind.
            other_maps = theirs.maps.get(kind) or theirs.maps.get("decoder" if kind == "encoder" else "encoder", [])
            if not other_maps and n_layers[kind] == len(own_maps):
                continue  # none are given out: equal hidden states and the number of layers have to do
            if len(other_maps) == n_layers[kind] and layers[kind] == listed_layers(model.config, n_layers[kind]):
                other_maps = [other_maps[layer] for layer in layers[kind]]  # MiniMax gives out linear layers' too
            if len(other_maps) != len(own_maps):
                return f"only {len(own_maps)} of {len(other_maps)} {kind} layers pass transformers' attention interface"
            sinks = ours.sinks.get(kind, [False] * len(own_maps))
            for layer, own, other, has_sinks in zip(layers[kind], own_maps, other_maps, sinks, strict=True):
                _compare_weights(example, kind, layer, own, other, allowed, has_sinks)
        return ""

    allowed = tolerance(model, sum(map(len, ours.maps.values())))
    return _within_rounding(model, example, ours, theirs, allowed, check, notes)


def compare_hidden(model: PreTrainedModel, example: Example, ours: Outcome, theirs: Outcome, allowed: float) -> None:
    """Compares hidden states at real positions."""
    _within_rounding(model, example, ours, theirs, allowed, _compare_hidden)


def tolerance(model: PreTrainedModel, n_calls: int) -> float:
    """By how much two ways to compute the same may differ, in weights and relative to the largest hidden state.

    Rounding adds up over layers like a random walk: in units of eps * sqrt(1 + n_calls) real models in 16 bits differ
    by less than 1 (their softmax is computed in 32), in 32 bits by up to 5. A random model with sharp heads can exceed
    it: then its own rounding is measured.
    """
    # Many a model's own eager softmax is in 32 bits, also where all else is in 64.
    eps = max(torch.finfo(model.dtype).eps, torch.finfo(torch.float32).eps)
    return (4 if eps > 1e-5 else 128) * eps * math.sqrt(1 + n_calls)


_TIMES = 16.0
"""Allowed difference of two ways to compute the same, in units of the error of one: sharp heads have a long tail."""

_NOTED = 0.05
"""Error of a weight, or of hidden states relative to the largest, that a picture shows."""


def _within_rounding(
    model: PreTrainedModel,
    example: Example,
    ours: Outcome,
    theirs: Outcome,
    allowed: float,
    check: Callable[..., _Result],
    notes: list[str] | None = None,
) -> _Result:
    """Makes a comparison. If it fails, compares again with the model's own rounding error on this example as the bound.

    A sharp head with a score of a hundred turns rounding into another weight, and later layers turn that into other
    scores; in 16 bits a score of ten is enough. Seam and eager must then agree in float64, where rounding is too small
    for this. The bound is the error of eager attention against float64. Both need a copy of the model, so only a
    comparison that fails pays for it. A bound near 1 allows any weights: then float64 alone shows that the seam is
    right, and a note says that rounding decides.
    """
    try:
        return check(model, example, ours, theirs, allowed)
    except RoundingError as difference:
        try:
            exact = _agree_in_float64(model, example, allowed, check, with_maps=bool(ours.maps))
        except Exception as no_memory:  # which may suffice another time
            raise difference from no_memory
        if exact is None:
            raise
        error = _largest_error(theirs, exact)
        if not _TIMES * error > allowed:
            raise
        result = check(model, example, ours, theirs, _TIMES * error)
    if notes is not None and error > _NOTED:
        wider = "float64" if model.dtype == torch.float32 else "float32"
        notes.append(
            f"Rounding in {name_dtype(model.dtype)} moves attention weights by up to {min(error, 1):.2g}: "
            f"another device or batch may show others. --dtype {wider} rounds less."
        )
    return result


def _agree_in_float64(
    model: PreTrainedModel, example: Example, allowed: float, check: Callable[..., Any], *, with_maps: bool
) -> Outcome | None:
    """What a float64 copy of a model computes with its own eager attention; None if the seam differs from it.

    None also if the copy does not run. Where there is no memory for it, the error of that is let through.
    """
    inputs = {
        name: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for name, x in example.inputs.items()
    }
    example = replace(example, inputs=inputs)
    try:
        twin = copy.deepcopy(model).double()
        with _AllFloat64():  # type: ignore[no-untyped-call]
            exact = Outcome.of(*run_eager(twin, inputs))
            output, seen = rehearse(twin, inputs)
        maps: Maps = {}
        if with_maps:
            weights = [call.weights for call in seen]
            for kind, of_call in zip(kinds_of(twin.config, example, output, weights), weights, strict=True):
                maps.setdefault(kind, []).append(of_call)
        check(twin, example, Outcome.of(output, maps), exact, allowed * tolerance(twin, 0) / tolerance(model, 0))
    except Exception as error:  # a model may fail in any way in another precision
        if is_out_of_memory(error):
            raise
        return None
    return exact


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


def _largest_error(outcome: Outcome, exact: Outcome) -> float:
    """Of weights, and of hidden states relative to the largest."""
    errors = [0.0]
    for own, true in ((outcome.hidden, exact.hidden), (outcome.encoded, exact.encoded)):
        if own is not None and true is not None:
            errors.append(float((own - true).abs().max() / true.abs().max()))
    for kind, of_kind in outcome.maps.items():
        errors += [float((own - true).abs().max()) for own, true in zip(of_kind, exact.maps[kind], strict=False)]
    return max(errors)


def _compare_hidden(model: PreTrainedModel, example: Example, ours: Outcome, theirs: Outcome, allowed: float) -> None:
    target_real = example.target_real if model.config.is_encoder_decoder else example.real
    for own, other, real in ((ours.hidden, theirs.hidden, target_real), (ours.encoded, theirs.encoded, example.real)):
        if own is None or other is None:
            continue
        own, other = own.float(), other.float()
        if real is not None and own.shape[:2] == real.shape:
            own, other = own[real], other[real]
        if not bool(torch.isfinite(other).all()) and bool(torch.isfinite(own).all()):
            raise AttnscopeError(
                "self-check: with the model's own eager attention, hidden states are not finite",
                "maps cannot be compared with it, so none are shown",
            )
        if not bool(torch.isfinite(own).all()):
            raise AttnscopeError("self-check: hidden states are not finite", "the weights are damaged, or try --dtype")
        difference = float((own - other).abs().max()) / max(float(other.abs().max()), 1e-30)
        require_rounding("self-check: hidden states differ from the model's own", difference, allowed, _WRONG)


def takes_light_masks(model: PreTrainedModel, plan: Plan, extras: Mapping[str, Any]) -> bool:
    """Whether a model hands our light masks (`hf.seam.Light`) on as they are: tried on two texts padded together.

    Where it changes them, or what it computes differs beyond rounding, its masks are to be written out.
    """
    padded, _ = examples(model)
    inputs = {**extras, **padded.inputs}
    try:
        with torch.no_grad():
            light = Outcome.of(perform(model, inputs, plan, attend, light_from=1), {})
            written_out = Outcome.of(perform(model, inputs, plan, attend), {})
        compare_hidden(model, padded, light, written_out, tolerance(model, sum(map(len, plan.values()))))
    except (AttnscopeError, RuntimeError, TypeError, ValueError, IndexError):
        return False
    return True


def _compare_weights(
    example: Example, kind: Kind, layer: int, own: Tensor, other: Tensor, allowed: float, has_sinks: bool
) -> None:
    if own.shape != other.shape:
        raise AttnscopeError(f"self-check: {kind} layer {layer} is {tuple(own.shape)}, by eager {tuple(other.shape)}")
    totals = own.sum(-1, keepdim=True)
    rows = totals > 0
    real = _real_queries(example, kind)
    if real is not None and real.shape == (own.shape[0], own.shape[2]):
        rows = rows & real[:, None, :, None]
    other = other.float()
    difference = float(((own - other) * rows).abs().max())
    if not difference <= allowed and has_sinks:
        # Some eager functions give their weights out before the sink takes its part.
        difference = float(((own - other * totals) * rows).abs().max())
    what = f"self-check: weights of {kind} layer {layer} differ from the model's own"
    require_rounding(what, difference, allowed, _WRONG)


def _real_queries(example: Example, kind: Kind) -> Tensor | None:
    return example.real if example.target_real is None or kind == "encoder" else example.target_real


def run_eager(model: PreTrainedModel, inputs: Mapping[str, Any]) -> tuple[Any, Maps]:
    """Runs a model by its own eager attention; returns its output and the weights it gives out."""
    with use_attention(model, "eager"):
        parts = set(model.modules())
        output = model(**inputs, output_attentions=True)
        maps = eager_maps(model.config, output)
        if not all(maps.values()) and set(model.modules()) != parts:
            # transformers watched parts that the model then put others in place of, as BigBird does on short texts.
            for module in model.modules():
                vars(module).pop("_output_capturing_hooks_installed", None)
            output = model(**inputs, output_attentions=True)
            maps = eager_maps(model.config, output)
    if "input_ids" not in inputs:
        return output, maps
    source = inputs["input_ids"].shape[1]
    target = inputs["decoder_input_ids"].shape[1] if model.config.is_encoder_decoder else source
    return output, {
        kind: [_drop_filling(weights, *queries_and_keys(source, target)[kind]) for weights in of_kind]
        for kind, of_kind in maps.items()
    }


def queries_and_keys(source: _Side, target: _Side) -> dict[Kind, tuple[_Side, _Side]]:
    """What attends in each kind of attention, and to what: of what the encoder reads, and what the decoder does."""
    return {"encoder": (source, source), "decoder": (target, target), "cross": (target, source)}


def _drop_filling(weights: Any, n_queries: int, n_keys: int) -> Any:
    """Weights without what a model itself adds to a text, to fill its last block, where none of them lies there."""
    is_map = isinstance(weights, Tensor) and weights.ndim == 4
    if not is_map or weights.shape[2] < n_queries or weights.shape[3] <= n_keys:
        return weights
    return weights if bool(weights[:, :, :n_queries, n_keys:].any()) else weights[:, :, :n_queries, :n_keys]


def run_eager_or_own(model: PreTrainedModel, example: Example, *, with_maps: bool = True) -> Outcome:
    """What a model computes by its own eager attention, or where it has none that works, in its own way."""
    try:
        if with_maps:
            return Outcome.of(*run_eager(model, example.inputs))
        with use_attention(model, "eager"):
            return Outcome.of(model(**example.inputs), {})
    except Exception:  # a model may fail in any way
        with use_attention(model, None):
            return Outcome.of(model(**example.inputs), {})


def eager_maps(config: Any, output: Any) -> Maps:
    """The weights that an output carries; those of a model that is no encoder-decoder all count as an encoder's."""
    names: dict[Kind, str] = {"encoder": "attentions"}
    if config.is_encoder_decoder:
        names = {"encoder": "encoder_attentions", "decoder": "decoder_attentions", "cross": "cross_attentions"}
    return {
        kind: [weights for weights in getattr(output, name, None) or () if weights is not None]
        for kind, name in names.items()
    }


def hidden_states(output: Any) -> Tensor | None:
    """The last hidden states of an output, of an encoder-decoder the decoder's; None if it carries none."""
    for name in ("last_hidden_state", "decoder_hidden_states", "hidden_states"):
        states = getattr(output, name, None)
        if states is not None and len(states):
            return states if isinstance(states, Tensor) else states[-1]
    return None


def check_rows(weights: Tensor, kind: Kind, layer: int, allowed: float) -> None:
    """Refuses maps that are no softmax weights on this input, though they were on the self-check's.

    No number may be negative; rows sum to 1 or, where no key is seen, to 0.
    """
    sums = weights.float().sum(-1)
    if bool((weights < 0).any()) or not bool((((sums - 1).abs() <= allowed) | (sums == 0)).all()):
        raise AttnscopeError(
            f"on this text of {weights.shape[-1]} tokens the model's own {kind} layer {layer} gives out numbers that "
            "are no softmax weights",
            "shorter texts may be shown",
        )


def not_weights(model: PreTrainedModel, example: Example, kind: Kind, weights: Tensor, allowed: float) -> str:
    """Why a tensor is no map of softmax weights of this kind, "" if it is one."""
    batch = 0 if example.is_users else len(next(iter(example.inputs.values())))
    shape = tuple(weights.shape)
    if len(shape) != 4 or (shape[0] != batch and not example.is_users):
        return f"has the shape {shape}, not (batch, head, query, key)"
    if example.real is not None:
        source = example.real.shape[1]
        target = source if example.target_real is None else example.target_real.shape[1]
        if shape[2:] != queries_and_keys(source, target)[kind]:
            return f"has the shape {shape}, not (batch, head, query, key)"
    values = weights.float()
    real = _real_queries(example, kind)
    if real is not None:
        values = values.transpose(1, 2)[real]
    if not bool((values >= 0).all()) or not float((values.sum(-1) - 1).abs().max()) <= allowed:
        return "holds numbers that are no softmax weights"
    hidden = example.real if kind != "decoder" or not model.config.is_encoder_decoder else example.target_real
    if hidden is not None and real is not None and not bool(hidden.all()):
        padding = (weights.float() * ~hidden[:, None, None, :]).transpose(1, 2)[real]
        if not float(padding.max()) <= allowed:
            return "gives weight to padding"
    return ""


def explain_no_weights(model: PreTrainedModel, output: Any, runs: Sequence[tuple[Example, Maps]]) -> str:
    """Why what eager gives out are not the softmax weights of all of a model's attention; "" if they are."""
    if hidden_states(output) is None:
        return "it returns no hidden states"
    for example, maps in runs:
        for kind, of_kind in maps.items():
            what = f"{kind} attention" if model.config.is_encoder_decoder else "attention weights"
            if not of_kind and any("Sdpa" in type(module).__name__ for module in model.modules()):
                return f'it was built for sdpa, which gives out no {what} (attn_implementation="eager" builds it anew)'
            if not of_kind:
                return f"it gives out no {what} of its own"
            if not all(isinstance(weights, Tensor) for weights in of_kind):
                return f"its own {what} are no tensors, one for each layer"
            if len(of_kind) != len(runs[0][1][kind]):
                return "it gives out other layers when texts are padded"
            for layer, weights in enumerate(of_kind):
                wrong = not_weights(model, example, kind, weights, tolerance(model, len(of_kind)))
                if wrong:
                    return f"its own {f'{kind} ' * (len(maps) > 1)}layer {layer} {wrong}"
    return ""


def run_for_weights(
    base: PreTrainedModel, inputs: Mapping[str, Any], layers: Mapping[Kind, Sequence[int]], name: str, probe: Probe
) -> Any:
    """Runs a model by its own eager attention; the probe, which must be a `Weights`, keeps the weights."""
    if not isinstance(probe, Weights):
        raise AttnscopeError(
            f"{name} does not pass its attention through the seam: only its weights can be seen",
            f"{type(probe).__name__} needs another model",
        )
    output, maps = run_eager(base, inputs)
    if not base.config.is_encoder_decoder:
        maps = {next(iter(layers)): maps["encoder"]}
    for kind, numbers in layers.items():
        if len(maps[kind]) != len(numbers):
            raise AttnscopeError(f"{name} gave out {len(maps[kind])} {kind} layers, not the {len(numbers)} it has")
        for layer, weights in zip(numbers, maps[kind], strict=True):
            check_rows(weights, kind, layer, tolerance(base, len(numbers)))
            probe.keep(kind, layer, weights)
    return output


def run_one_by_one(run: Callable[[Batch, Probe], Tensor], batch: Batch, probe: Probe) -> Tensor:
    """Runs each text of a batch without its padding, which may be at either end, and puts the outcomes together.

    Hidden states, (batch, token, d_model), are 0 at padding, as are the weights that the probe, a `Weights`, keeps.
    """
    hidden, maps = [], dict[tuple[Kind, int], list[Tensor]]()
    real = torch.ones_like(batch.ids, dtype=torch.bool) if batch.mask is None else batch.mask
    written = real if batch.target_ids is None else torch.ones_like(batch.target_ids, dtype=torch.bool)
    written = written if batch.target_mask is None else batch.target_mask
    sides = queries_and_keys(real, written)
    for i in range(len(batch.ids)):
        weights_probe = Weights()
        output = run(_take_text(batch, i), weights_probe)
        padded = output.new_zeros(1, written.shape[1], output.shape[2])
        padded[:, written[i]] = output
        hidden.append(padded)
        for kind, by_layer in weights_probe.maps.items():
            queries, keys = (mask[i].to(output.device).nonzero()[:, 0] for mask in sides[kind])
            for layer, weights in by_layer.items():
                whole = weights.new_zeros(1, weights.shape[1], *(mask.shape[1] for mask in sides[kind]))
                whole[:, :, queries[:, None], keys] = weights
                maps.setdefault((kind, layer), []).append(whole)
    if isinstance(probe, Weights):
        for (kind, layer), of_texts in maps.items():
            probe.keep(kind, layer, torch.cat(of_texts))
    return torch.cat(hidden)


def _take_text(batch: Batch, i: int) -> Batch:
    """One text of a batch without padding."""

    def cut(values: Tensor | None, mask: Tensor | None) -> Tensor | None:
        return values if values is None else values[i : i + 1] if mask is None else values[i : i + 1, mask[i]]

    ids = cut(batch.ids, batch.mask)
    assert ids is not None
    return Batch(ids, None, cut(batch.segments, batch.mask), cut(batch.target_ids, batch.target_mask))
