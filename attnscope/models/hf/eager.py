"""Show models whose attention does not pass the seam, by the weights that their own eager attention gives out.

What they give out is checked at load, and again on each input. `hf.check` decides who takes this path.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from attnscope.core.attention.probes import Weights
from attnscope.core.attention.seam import Kind, Probe
from attnscope.errors import AttnscopeError
from attnscope.models.hf.examples import OWN_INPUTS, Example, ask_for_hidden_states, extras_of
from attnscope.models.hf.layers import (
    Survey,
    Unclear,
    configured_counts,
    configured_kv_heads,
    configured_layers,
    count_layers,
    kinds_of,
    notes_on_gaps,
)
from attnscope.models.hf.rounding import (
    Maps,
    Outcome,
    compare,
    hidden_states,
    name_difference,
    queries_and_keys,
    run_as_it_is,
    run_eager,
    shorten,
    states_of,
    tolerance,
    width_of,
)
from attnscope.models.model import Batch

PADDING_MATTERS = "Padding changes what this model computes: texts are best shown one by one."
"""Of convolutions, say, that run over the end of a text."""


def explain_no_weights(model: PreTrainedModel, output: Any, runs: Sequence[tuple[Example, Maps]]) -> str:
    """Say why what eager gives out are not the softmax weights of all of a model's attention; "" if they are."""
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
                wrong = _not_weights(model, example, kind, weights, tolerance(model, len(of_kind)))
                if wrong:
                    return f"its own {f'{kind} ' * (len(maps) > 1)}layer {layer} {wrong}"
    return ""


def _not_weights(model: PreTrainedModel, example: Example, kind: Kind, weights: Tensor, allowed: float) -> str:
    """Say why a tensor is no map of softmax weights of this kind; "" if it is one."""
    shape = tuple(weights.shape)
    fits = len(shape) == 4 and shape[0] == len(next(iter(example.inputs.values())))
    if fits and example.real is not None:
        source = example.real.shape[1]
        target = source if example.target_real is None else example.target_real.shape[1]
        fits = shape[2:] == queries_and_keys(source, target)[kind]
    if not fits:
        return f"has the shape {shape}, not (batch, head, query, key)"
    real = example.real_rows(kind)
    values = weights.float()
    rows = values if real is None else values.transpose(1, 2)[real]
    if not bool((rows >= 0).all()) or not float((rows.sum(-1) - 1).abs().max()) <= allowed:
        return "holds numbers that are no softmax weights"
    keys = example.target_real if kind == "decoder" and model.config.is_encoder_decoder else example.real
    if keys is not None and real is not None:
        on_padding = (values * ~keys[:, None, None, :]).transpose(1, 2)[real]
        if not float(on_padding.max()) <= allowed:
            return "gives weight to padding"
    return ""


def read_eager(model: PreTrainedModel, padded: Example, alone: Example, reason: str, n_seen: int) -> Survey:
    """Return the survey of a model whose attention does not all pass the seam: what it gives out itself, checked.

    `reason` says why the seam does not show it. Of the attentions that passed the seam, `n_seen`, all must be given
    out: Depth Pro leaves out an encoder.
    """
    config = model.config
    own = _run_own(model, padded, alone)
    try:
        output, maps = run_eager(model, alone.inputs)
        maps_padded = run_eager(model, padded.inputs)[1]
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
        compare(model, alone, states_of(output), own, allowed=allowed)
    except AttnscopeError as error:
        explained = name_difference(model, error)
        if explained is error:
            raise  # and it keeps its own cause
        raise explained from error

    # What is known of its layers.
    named = maps
    if not config.is_encoder_decoder:
        try:
            named = {kinds_of(config, alone, output, flat)[0]: flat}
        except Unclear as error:
            raise _refusal(model, reason, str(error)) from error
    layers: dict[Kind, tuple[int, ...]] = {}
    n_layers: dict[Kind, int] = {}
    for kind, of_kind in named.items():
        total = configured_layers(config, kind)
        numbers = count_layers(config, len(of_kind), total)
        if numbers is None:
            more = f"it gives out {len(of_kind)} {kind} layers of {total} and does not say which"
            raise _refusal(model, reason, more)
        layers[kind] = numbers
        n_layers[kind] = max(total or 0, numbers[-1] + 1)
    n_heads = {kind: max(weights.shape[1] for weights in of_kind) for kind, of_kind in named.items()}
    notes = [f"Weights come from the model's own eager attention, not through the seam: {reason}."]
    if _padding_changes(maps, maps_padded, allowed):
        notes.append(PADDING_MATTERS)
    return Survey(
        path="eager",
        layers=layers,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads={kind: configured_kv_heads(config, n) for kind, n in n_heads.items()},
        extras=extras_of(alone),
        d_model=width_of(output),
        notes=(*notes, *notes_on_gaps(config, layers, n_layers)),
    )


def _padding_changes(maps: Maps, padded: Maps, allowed: float) -> bool:
    for kind, of_kind in maps.items():
        for whole, other in zip(of_kind, padded[kind], strict=True):
            cut = other[-1:, :, : whole.shape[2], : whole.shape[3]]
            if float((whole.float() - cut.float()).abs().max()) > allowed:
                return True
    return False


def _run_own(model: PreTrainedModel, padded: Example, alone: Example) -> Outcome:
    """Return what a model computes as it is, asked for its hidden states if it does not give them unasked."""
    try:
        own = states_of(run_as_it_is(model, alone))
        if "hidden" not in own and not extras_of(alone):
            ask_for_hidden_states(padded, alone)
            own = states_of(run_as_it_is(model, alone))
    except Exception as error:
        tensors = {name: x for name, x in alone.inputs.items() if isinstance(x, Tensor) and "mask" not in name}
        given = " and ".join(f"{name} {tuple(x.shape)}" for name, x in tensors.items())
        raise AttnscopeError(
            f"{model.config.model_type} does not run on the {given} that attnscope makes up for its self-check: "
            f"its own code says {type(error).__name__}: {shorten(error)}",
            OWN_INPUTS,
        ) from error
    return own


_ATTENTION_IN_NAME_ONLY = {"RwkvSelfAttention", "PatchTSMixerGatedAttention"}


def _refusal(model: PreTrainedModel, reason: str, more: str) -> AttnscopeError:
    """Say that neither path shows a model truly, or that it has no attention at all."""
    kind = model.config.model_type
    names = {type(module).__name__ for module in model.modules()} - _ATTENTION_IN_NAME_ONLY
    if any(re.search("attention|attn", name, re.IGNORECASE) for name in names):
        why = reason if more == reason else f"{reason}; and {more}"
        return AttnscopeError(f"{kind} cannot be shown truly: {why}")
    what = "has no attention: its layers mix tokens by other means"
    if configured_counts(model.config) == {0}:
        what = "has no layers (its configuration says 0)"
    return AttnscopeError(f"{kind} {what}", "there is nothing to show of it")


# Models that are shown by what they give out -----------------------------------------------------------------------


def run_for_weights(
    base: PreTrainedModel, inputs: Mapping[str, Any], layers: Mapping[Kind, Sequence[int]], name: str, probe: Probe
) -> Any:
    """Run a model by its own eager attention; the probe, which must be a `Weights`, keeps the weights."""
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
            _check_rows(weights, kind, layer, tolerance(base, len(numbers)))
            probe.keep(kind, layer, weights)
    return output


def _check_rows(weights: Tensor, kind: Kind, layer: int, allowed: float) -> None:
    """Refuse maps that are no softmax weights on this input, though they were on the self-check's."""
    sums = weights.float().sum(-1)
    is_row = ((sums - 1).abs() <= allowed) | (sums == 0)  # of a query that sees no key all are 0
    if bool((weights < 0).any()) or not bool(is_row.all()):
        raise AttnscopeError(
            f"on this text of {weights.shape[-1]} tokens the model's own {kind} layer {layer} gives out numbers that "
            "are no softmax weights",
            "shorter texts may be shown",
        )


def run_one_by_one(run: Callable[[Batch, Probe], Tensor], batch: Batch, probe: Probe) -> Tensor:
    """Run each text of a batch without its padding, which may be at either end, and put the outcomes together.

    Hidden states, (batch, token, d_model), are 0 at padding, as are the weights that the probe, a `Weights`, keeps.
    """
    source = torch.ones_like(batch.ids, dtype=torch.bool) if batch.mask is None else batch.mask
    target = source
    if batch.target_mask is not None:
        target = batch.target_mask
    elif batch.target_ids is not None:
        target = torch.ones_like(batch.target_ids, dtype=torch.bool)
    hidden = []
    maps: dict[tuple[Kind, int], list[Tensor]] = {}
    for i in range(len(batch.ids)):
        alone = Weights()
        output = run(batch.text(i), alone)
        padded = output.new_zeros(1, target.shape[1], output.shape[2])
        padded[:, target[i]] = output
        hidden.append(padded)
        # Weights of real queries on real keys go where these stand in the batch.
        for kind, by_layer in alone.maps.items():
            sides = queries_and_keys(source, target)[kind]
            queries, keys = (mask[i].to(output.device).nonzero()[:, 0] for mask in sides)
            for layer, weights in by_layer.items():
                whole = weights.new_zeros(1, weights.shape[1], *(mask.shape[1] for mask in sides))
                whole[:, :, queries[:, None], keys] = weights
                maps.setdefault((kind, layer), []).append(whole)
    if isinstance(probe, Weights):
        for (kind, layer), of_texts in maps.items():
            probe.keep(kind, layer, torch.cat(of_texts))
    return torch.cat(hidden)
