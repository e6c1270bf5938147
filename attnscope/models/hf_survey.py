"""What a Hugging Face model's attention is, found out by running it: which calls, which layers, which road, is it true.

A model is run on small random inputs through the seam and by its own eager implementation. What comes of both must be
the same: hidden states, number of layers, weights. A model that does not pass (all of) its attention through the seam
takes the eager road; one that cannot be shown truly by either is refused.
"""

import contextlib
import inspect
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from attnscope.core.attention import Kind
from attnscope.errors import AttnscopeError
from attnscope.models.hf_seam import Place, Plan, Seen, rehearse, switched
from attnscope.records import spans

LENGTHS = (9, 6)
"""Tokens of the two texts of the self-check; an encoder-decoder's decoder reads TARGET_LENGTHS, which are others."""
TARGET_LENGTHS = (5, 3)

_MANY_POSITIONS = 512

Maps = dict[Kind, list[Tensor]]


@dataclass(frozen=True, eq=False)
class Survey:
    """What was found out.

    Attributes:
        road: "seam" or "eager".
        plan: On the seam: which call is which.
        layers: Kind -> numbers of the layers that have attention, in the order of computation.
        n_layers: Kind -> how many layers there are, with and without attention.
        n_heads: Kind -> the most query heads of a layer.
        n_kv_heads: Kind -> the most key/value heads of a layer.
        extras: What the forward must be given besides the inputs.
        d_model: Width of the hidden states.
        checked: Whether it was compared with eager.
        notes: What a user must know to read the pictures truly.
    """

    road: str
    plan: Plan
    layers: Mapping[Kind, tuple[int, ...]]
    n_layers: Mapping[Kind, int]
    n_heads: Mapping[Kind, int]
    n_kv_heads: Mapping[Kind, int]
    extras: Mapping[str, Any]
    d_model: int
    checked: bool
    notes: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Example:
    """Inputs of one forward pass, and which of its positions are real.

    Attributes:
        inputs: What the forward gets.
        real: (batch, token), bool, of an encoder-decoder: of the encoder; None = all, or not texts.
        target_real: As real, of the decoder.
    """

    inputs: dict[str, Any]
    real: Tensor | None = None
    target_real: Tensor | None = None


def survey(model: PreTrainedModel, *, check: bool = True) -> Survey:
    """Finds out what a model's attention is, and whether what we show of it is true.

    Args:
        model: The model without heads for tasks.
        check: Whether to compare with eager where that is not needed to tell the layers.

    Raises:
        AttnscopeError: It has no attention, differs from eager beyond rounding, or cannot be read by either road.
    """
    padded, alone = examples(model)
    extras: dict[str, Any] = {}
    with torch.no_grad():
        try:
            output, seen = rehearse(model, alone.inputs)
            if hidden_states(output) is None:
                extras = {"output_hidden_states": True}
                for example in (padded, alone):
                    example.inputs.update(extras)
                output, seen = rehearse(model, alone.inputs)
            if hidden_states(output) is None:
                raise _Unclear("it returns no hidden states")
            reason = "" if seen else "its attention does not pass transformers' attention interface"
        except Exception as error:  # a model may fail in any way when its attention is exchanged
            reason = _one_line(error)
        if not reason:
            try:
                found = _read_seam(model, alone, output, seen, extras)
            except _Unclear as error:
                reason = str(error)
        if not reason and (check or any(len(found.layers[k]) < found.n_layers[k] for k in found.layers)):
            try:
                reason = _check_seam(model, found, [(padded, None, None), (alone, output, seen)])
            except AttnscopeError:
                raise
            except Exception as error:  # padding, too, may be more than a model can take
                reason = _one_line(error)
        if not reason:
            return found if check else _replace_checked(found)
        return _read_eager(model, padded, alone, extras, reason)


class _Unclear(Exception):  # noqa: N818 - no error: the other road is taken
    """The seam does not see the whole of a model's attention, or cannot tell which is which."""


def _replace_checked(found: Survey) -> Survey:
    return Survey(**{**vars(found), "checked": False})


# Inputs -----------------------------------------------------------------------------------------------------------


def examples(model: PreTrainedModel) -> tuple[Example, Example]:
    """Two random inputs of different length padded together, and the first of them alone."""
    config = model.config
    name = model.main_input_name
    generator = torch.Generator().manual_seed(0)
    if name not in {"input_ids", "decoder_input_ids"} and not _accepts(model, "input_ids"):
        shape = _sample_shape(config, name)
        both = torch.randn(2, *shape, generator=generator).to(model.device, model.dtype)
        padded, alone = Example({name: both}), Example({name: both[:1]})
        if getattr(config, "max_source_positions", 0) > _MANY_POSITIONS:
            # Whisper reads half a minute whatever is said in it: maps of 1500 x 1500, once is enough.
            padded = Example({name: both[:1]})
    else:
        padded, alone = _text_examples(model, "", LENGTHS, generator)
    if config.is_encoder_decoder:
        target_padded, target_alone = _text_examples(model, "decoder_", TARGET_LENGTHS, generator)
        if len(next(iter(padded.inputs.values()))) == 1:
            target_padded = target_alone
        padded = Example({**padded.inputs, **target_padded.inputs}, padded.real, target_padded.real)
        alone = Example({**alone.inputs, **target_alone.inputs}, alone.real, target_alone.real)
    for example in (padded, alone):
        example.inputs.update(standing_arguments(model))
    return padded, alone


def _text_examples(
    model: PreTrainedModel, prefix: str, lengths: tuple[int, int], generator: torch.Generator
) -> tuple[Example, Example]:
    size = vocab_size(model)
    config = model.config.get_text_config()
    named = [*vars(config).items(), *vars(model.config).items()]
    special = {v for name, v in named if name.endswith(("_token_id", "_token_index")) and isinstance(v, int)}
    plain = [number for number in range(min(size, 1000)) if number not in special] or [0]
    drawn = torch.randint(len(plain), (2, lengths[0]), generator=generator)
    ids = torch.tensor(plain)[drawn]
    real = torch.arange(lengths[0])[None] < torch.tensor(lengths)[:, None]
    ids[~real] = pad_id(model)
    ids, real = ids.to(model.device), real.to(model.device)
    names = (f"{prefix}input_ids", f"{prefix}attention_mask")
    padded = Example(dict(zip(names, (ids, real.long()), strict=True)), real)
    return padded, Example({names[0]: ids[:1]}, real[:1])


def _sample_shape(config: Any, name: str) -> tuple[int, ...]:
    if name == "pixel_values":
        size = getattr(config, "image_size", 32)
        height, width = size if isinstance(size, (tuple, list)) else (size, size)
        return getattr(config, "num_channels", 3), height, width
    if name == "input_features" and hasattr(config, "max_source_positions") and hasattr(config, "num_mel_bins"):
        return config.num_mel_bins, 2 * config.max_source_positions
    if name == "input_values":
        return (4000,)
    raise AttnscopeError(f"{config.model_type} reads {name}, which attnscope cannot make up for its self-check")


def standing_arguments(model: PreTrainedModel) -> dict[str, Any]:
    """What every forward pass gets: no storing of keys and values for a next token, and outputs by name."""
    return {name: given for name, given in (("use_cache", False), ("return_dict", True)) if _accepts(model, name)}


def vocab_size(model: PreTrainedModel) -> int:
    """How many token numbers a model has."""
    with contextlib.suppress(NotImplementedError, AttributeError):
        table: Any = model.get_input_embeddings()
        return int(table.weight.shape[0])
    with contextlib.suppress(AttributeError):
        return int(model.config.get_text_config().vocab_size)
    return 0x110000  # CANINE hashes characters: any will do


def pad_id(model: PreTrainedModel) -> int:
    """What stands at places that are no token; 0 where the configuration names none."""
    found = getattr(model.config.get_text_config(), "pad_token_id", None)
    return found if isinstance(found, int) and 0 <= found < vocab_size(model) else 0


def _accepts(model: PreTrainedModel, name: str) -> bool:
    return name in inspect.signature(model.forward).parameters


# The seam ---------------------------------------------------------------------------------------------------------


def _read_seam(
    model: PreTrainedModel, example: Example, output: Any, seen: Sequence[Seen], extras: Mapping[str, Any]
) -> Survey:
    """Tells the calls apart: kinds by their shapes and by what they hide, layers by layer_idx, else by counting."""
    config = model.config
    by_kind: dict[Kind, list[Seen]] = {}
    for one, kind in zip(seen, kinds_of(config, example, output, [one.weights for one in seen]), strict=True):
        by_kind.setdefault(kind, []).append(one)
    absent = {"encoder", "decoder", "cross"} - set(by_kind) if config.is_encoder_decoder else set()
    if absent:
        raise _Unclear(f"its {sorted(absent)[0]} attention does not pass transformers' attention interface")
    plan: dict[nn.Module, list[tuple[int, Place]]] = {}
    layers: dict[Kind, tuple[int, ...]] = {}
    n_layers: dict[Kind, int] = {}
    for kind, calls in by_kind.items():
        total = _configured_layers(config, kind)
        layers[kind] = _number_layers(kind, [one.module for one in calls], total)
        n_layers[kind] = max(total or 0, layers[kind][-1] + 1)
        for one, layer in zip(calls, layers[kind], strict=True):
            plan.setdefault(one.module, []).append((seen.index(one), Place(kind, layer)))
    return Survey(
        road="seam",
        plan={module: [place for _, place in sorted(p, key=lambda x: x[0])] for module, p in plan.items()},
        layers=layers,
        n_layers=n_layers,
        n_heads={kind: max(one.call.n_heads for one in calls) for kind, calls in by_kind.items()},
        n_kv_heads={kind: max(one.call.n_kv_heads for one in calls) for kind, calls in by_kind.items()},
        extras=extras,
        d_model=_width(output),
        checked=True,
        notes=(*_notes(by_kind, layers), *_gap_notes(layers, n_layers)),
    )


def kinds_of(config: Any, example: Example, output: Any, weights: Sequence[Tensor]) -> list[Kind]:
    """Whose attention each map is, by its shape on the example that is not padded.

    Of an encoder-decoder by how many queries and keys it has; else all are a decoder's if no query sees a later key.
    """
    shapes = [(w.shape[2], w.shape[3]) for w in weights]
    source, target = _source_length(output), TARGET_LENGTHS[0]
    if example.real is not None:
        tokens = example.real.shape[1]
        strange = next((s for s in shapes if not config.is_encoder_decoder and s != (tokens, tokens)), None)
        if strange or source != tokens:
            shape = strange or (source, source)
            raise _Unclear(
                f"it has attention of {shape[0]} queries on {shape[1]} keys where the text has {tokens} tokens"
            )
    if not config.is_encoder_decoder:
        causal = all(w.shape[2] == w.shape[3] and not bool(w.triu(1).any()) for w in weights)
        return ["decoder" if causal else "encoder"] * len(weights)
    if source == target:
        raise _Unclear(f"encoder and decoder are both {target} long, so that they cannot be told apart")
    kinds: dict[tuple[int, int], Kind] = {
        (source, source): "encoder",
        (target, target): "decoder",
        (target, source): "cross",
    }
    strange = next((shape for shape in shapes if shape not in kinds), None)
    if strange:
        raise _Unclear(
            f"it has attention of {strange[0]} queries on {strange[1]} keys where the encoder reads {source} tokens "
            f"and the decoder {target}"
        )
    return [kinds[shape] for shape in shapes]


def _source_length(output: Any) -> int:
    encoded = getattr(output, "encoder_last_hidden_state", None)
    return LENGTHS[0] if encoded is None else int(encoded.shape[1])


_LAYER_COUNTS: dict[Kind, tuple[str, ...]] = {
    "encoder": ("encoder_layers", "num_encoder_layers", "encoder_num_hidden_layers", "num_layers", "num_hidden_layers"),
    "decoder": ("decoder_layers", "num_decoder_layers", "decoder_num_hidden_layers", "num_layers", "num_hidden_layers"),
}


def _configured_layers(config: Any, kind: Kind) -> int | None:
    """How many layers a configuration asks for; None where it does not say in a usual way."""
    side: Kind = "encoder" if kind == "encoder" else "decoder"
    names: tuple[str, ...]
    if config.is_encoder_decoder:
        inner = getattr(config, side, None)
        if inner is not None and hasattr(inner, "to_dict"):
            config, names = inner, ("num_hidden_layers",)
        else:
            names = _LAYER_COUNTS[side]
    else:
        config, names = config.get_text_config(), ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
    found = next((getattr(config, name) for name in names if isinstance(getattr(config, name, None), int)), None)
    return found if found else None


def _number_layers(kind: Kind, modules: Sequence[nn.Module], total: int | None) -> tuple[int, ...]:
    named = [getattr(module, "layer_idx", None) for module in modules]
    numbers = [number for number in named if isinstance(number, int)]
    if len(numbers) == len(named) == len(set(numbers)) and numbers == sorted(numbers) and numbers[0] >= 0:
        if total is None and numbers == list(range(len(numbers))):
            return tuple(numbers)
        if total is not None and numbers[-1] < total:
            return tuple(numbers)
    if total in (None, len(modules)):
        return tuple(range(len(modules)))
    raise _Unclear(f"only {len(modules)} {kind} attentions of {total} layers pass transformers' attention interface")


def _check_seam(
    model: PreTrainedModel, found: Survey, runs: Sequence[tuple[Example, Any, Sequence[Seen] | None]]
) -> str:
    """Compares with eager.

    Returns:
        Why the seam does not see the whole, "" if it does.

    Raises:
        AttnscopeError: What it sees differs from eager.
    """
    ours_of: dict[Kind, list[Seen]]
    for example, output, seen in runs:
        if seen is None:
            output, seen = rehearse(model, example.inputs)
        counters = dict.fromkeys(found.plan, 0)
        ours_of = {}
        for one in seen:
            places = found.plan.get(one.module, ())
            if counters.get(one.module, 0) >= len(places):
                raise AttnscopeError("self-check: a padded batch computes more attentions than a single text")
            ours_of.setdefault(places[counters[one.module]].kind, []).append(one)
            counters[one.module] += 1
        try:
            reference, theirs_of = run_eager(model, example)
        except Exception:  # some models have no working eager attention: their own hidden states have to do
            with switched(model, None):
                reference, theirs_of = model(**example.inputs), {}
        allowed = tolerance(model, sum(map(len, ours_of.values())))
        _compare_hidden(model, example, output, reference, allowed)
        for kind, ours in ours_of.items():
            theirs = theirs_of.get(kind) or theirs_of.get("decoder" if kind == "encoder" else "encoder", [])
            if not theirs and found.n_layers[kind] == len(ours):
                continue  # none are given out: equal hidden states and the number of layers have to do
            if len(theirs) != len(ours):
                return f"only {len(ours)} of {len(theirs)} {kind} layers pass transformers' attention interface"
            for layer, own, other in zip(found.layers[kind], ours, theirs, strict=True):
                _compare_weights(example, kind, layer, own.weights, other, allowed, own.call.sinks is not None)
    return ""


def tolerance(model: PreTrainedModel, n_calls: int) -> float:
    """By how much two ways to compute the same may differ, in weights and relative to the largest hidden state.

    Rounding adds up over layers like a random walk: in units of eps * sqrt(1 + n_calls) real models in 16 bits differ
    by less than 1 (their softmax is computed in 32), in 32 bits by up to 5, random ones with scores of a hundred by 60.
    """
    eps = torch.finfo(model.dtype).eps
    return (4 if eps > 1e-5 else 128) * eps * math.sqrt(1 + n_calls)


def _compare_hidden(model: PreTrainedModel, example: Example, ours: Any, theirs: Any, allowed: float) -> None:
    for name in ("last_hidden_state", "encoder_last_hidden_state"):
        own = hidden_states(ours) if name == "last_hidden_state" else getattr(ours, name, None)
        other = hidden_states(theirs) if name == "last_hidden_state" else getattr(theirs, name, None)
        if own is None or other is None:
            continue
        is_target = model.config.is_encoder_decoder and name == "last_hidden_state"
        own, other = own.float(), other.float()
        real = example.target_real if is_target else example.real
        if real is not None and own.shape[:2] == real.shape:
            own, other = own[real], other[real]
        if not bool(torch.isfinite(own).all()):
            raise AttnscopeError("self-check: hidden states are not finite", "the weights are damaged, or try --dtype")
        difference = float((own - other).abs().max()) / max(float(other.abs().max()), 1e-30)
        if not difference <= allowed:
            raise AttnscopeError(
                f"self-check: hidden states differ from the model's own by {difference:.2g}, rounding is {allowed:.2g}",
                "its pictures would be wrong; please report the model",
            )


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
    if not difference <= allowed:
        raise AttnscopeError(
            f"self-check: weights of {kind} layer {layer} differ from the model's own by {difference:.2g}, "
            f"rounding is {allowed:.2g}",
            "its pictures would be wrong; please report the model",
        )


def _real_queries(example: Example, kind: Kind) -> Tensor | None:
    return example.real if example.target_real is None or kind == "encoder" else example.target_real


# The eager road ---------------------------------------------------------------------------------------------------


def run_eager(model: PreTrainedModel, example: Example) -> tuple[Any, Maps]:
    """Runs a model by its own eager attention; returns its output and the weights it gives out, None left in."""
    with switched(model, "eager"):
        output = model(**example.inputs, output_attentions=True)
    return output, eager_maps(model.config, output)


def eager_maps(config: Any, output: Any) -> Maps:
    """The weights that an output carries; those of a model that is no encoder-decoder all count as an encoder's."""
    if not config.is_encoder_decoder:
        return {"encoder": _list(output, "attentions")}
    return {
        "encoder": _list(output, "encoder_attentions"),
        "decoder": _list(output, "decoder_attentions"),
        "cross": _list(output, "cross_attentions"),
    }


def _list(output: Any, name: str) -> list[Tensor]:
    return [weights for weights in getattr(output, name, None) or () if weights is not None]


def _read_eager(model: PreTrainedModel, padded: Example, alone: Example, extras: dict[str, Any], reason: str) -> Survey:
    """The survey of a model whose attention does not (all) pass the seam: what it gives out itself, checked."""
    config = model.config
    try:
        with switched(model, None):
            own = model(**alone.inputs)
        if hidden_states(own) is None and not extras:
            extras = {"output_hidden_states": True}
            for example in (padded, alone):
                example.inputs.update(extras)
            with switched(model, None):
                own = model(**alone.inputs)
    except Exception as error:
        raise AttnscopeError(f"{config.model_type} does not run: {_one_line(error)}") from error
    try:
        output, maps = run_eager(model, alone)
        output_padded, maps_padded = run_eager(model, padded)
    except Exception as error:
        raise _refusal(model, reason, f"with eager attention it fails: {_one_line(error)}") from error
    flat = [weights for maps_of_kind in maps.values() for weights in maps_of_kind]
    if hidden_states(output) is None:
        raise _refusal(model, reason, "it returns no hidden states")
    if not flat or not all(isinstance(weights, Tensor) for weights in flat):
        raise _refusal(model, reason, "it gives out no attention weights of its own")
    allowed = tolerance(model, len(flat))
    _compare_hidden(model, alone, output, own, allowed)
    for name, held, example in (("alone", maps, alone), ("padded", maps_padded, padded)):
        for kind, of_kind in held.items():
            for layer, weights in enumerate(of_kind):
                wrong = _not_weights(model, example, kind, output, weights, allowed)
                if wrong:
                    raise _refusal(model, reason, f"its own {kind} layer {layer} {wrong} ({name})")
    for kind, of_kind in maps.items():
        if len(maps_padded[kind]) != len(of_kind):
            raise _refusal(model, reason, "it gives out other layers when texts are padded")
        for layer, (whole, first) in enumerate(zip(of_kind, maps_padded[kind], strict=True)):
            difference = float((whole.float() - first[:1].float()).abs().max())
            if not difference <= allowed:
                raise _refusal(model, reason, f"its own {kind} layer {layer} changes by {difference:.2g} when padded")
    named = maps
    if not config.is_encoder_decoder:
        named = {_eager_kind(model, alone, output, flat, reason): flat}
    absent = [kind for kind, of_kind in named.items() if not of_kind]
    if absent:
        raise _refusal(model, reason, f"it gives out no {absent[0]} attention of its own")
    layers = {kind: _eager_layers(model, kind, len(m), reason) for kind, m in named.items()}
    n_layers = {kind: max(_configured_layers(config, kind) or 0, numbers[-1] + 1) for kind, numbers in layers.items()}
    n_heads = {kind: max(w.shape[1] for w in named[kind]) for kind in layers}
    note = f"Weights come from the model's own eager attention, not through the seam: {reason}."
    return Survey(
        road="eager",
        plan={},
        layers=layers,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads={kind: _configured_kv_heads(config, kind, n_heads[kind]) for kind in layers},
        extras=extras,
        d_model=_width(output),
        checked=True,
        notes=(note, *_gap_notes(layers, n_layers)),
    )


def _eager_kind(model: PreTrainedModel, example: Example, output: Any, flat: list[Tensor], reason: str) -> Kind:
    try:
        return kinds_of(model.config, example, output, flat)[0]
    except _Unclear as error:
        raise _refusal(model, reason, str(error)) from error


def check_rows(weights: Tensor, kind: Kind, layer: int, allowed: float) -> None:
    """Refuses maps that are no softmax weights on this input, though they were on the self-check's.

    Raises:
        AttnscopeError: A number is negative, or a row sums neither to 1 nor, seeing no key, to 0.
    """
    sums = weights.float().sum(-1)
    if bool((weights < 0).any()) or not bool((((sums - 1).abs() <= allowed) | (sums == 0)).all()):
        raise AttnscopeError(
            f"on this input the model's own {kind} layer {layer} gives out numbers that are no softmax weights",
            "a text of another length may be shown",
        )


def _not_weights(
    model: PreTrainedModel, example: Example, kind: Kind, output: Any, weights: Tensor, allowed: float
) -> str:
    """Why a tensor is no map of softmax weights of this kind, "" if it is one."""
    batch = len(next(iter(example.inputs.values())))
    source = _source_length(output) if model.config.is_encoder_decoder else LENGTHS[0]
    queries, keys = {
        "encoder": (source, source),
        "decoder": (TARGET_LENGTHS[0], TARGET_LENGTHS[0]),
        "cross": (TARGET_LENGTHS[0], source),
    }[kind]
    is_text = example.real is not None
    shape = tuple(weights.shape)
    if len(shape) != 4 or shape[0] != batch or (is_text and shape[2:] != (queries, keys)):
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


def _eager_layers(model: PreTrainedModel, kind: Kind, count: int, reason: str) -> tuple[int, ...]:
    total = _configured_layers(model.config, kind)
    if total in (None, count):
        return tuple(range(count))
    config = model.config.get_text_config()
    types = getattr(config, "layers_block_type", None) or getattr(config, "layer_types", None) or ()
    numbers = tuple(i for i, name in enumerate(types) if "attention" in str(name) and "linear" not in str(name))
    if len(types) == total and len(numbers) == count:
        return numbers
    raise _refusal(model, reason, f"it gives out {count} {kind} layers of {total} and does not say which")


def _configured_kv_heads(config: Any, kind: Kind, n_heads: int) -> int:
    inner = config.get_text_config() if not config.is_encoder_decoder else config
    found = getattr(inner, "num_key_value_heads", None) or getattr(inner, "num_kv_heads", None)
    if getattr(inner, "multi_query", False) and not getattr(inner, "new_decoder_architecture", False):
        found = 1
    return found if isinstance(found, int) and found and n_heads % found == 0 else n_heads


_ATTENTION_IN_NAME_ONLY = {"rwkv"}


def _refusal(model: PreTrainedModel, reason: str, more: str) -> AttnscopeError:
    kind = model.config.model_type
    names = {type(module).__name__ for module in model.modules()}
    if kind in _ATTENTION_IN_NAME_ONLY or not any(re.search("attention|attn", name, re.IGNORECASE) for name in names):
        return AttnscopeError(
            f"{kind} has no attention: its layers mix tokens by other means", "there is nothing to show of it"
        )
    return AttnscopeError(f"{kind} cannot be shown truly: {reason}; and {more}")


# Words about it ---------------------------------------------------------------------------------------------------


def hidden_states(output: Any) -> Tensor | None:
    """The last hidden states of an output, of an encoder-decoder the decoder's; None if it carries none."""
    for name in ("last_hidden_state", "decoder_hidden_states", "hidden_states"):
        found = getattr(output, name, None)
        if found is not None and len(found):
            return found if isinstance(found, Tensor) else found[-1]
    return None


def _width(output: Any) -> int:
    hidden = hidden_states(output)
    return 0 if hidden is None else int(hidden.shape[-1])


def _notes(by_kind: Mapping[Kind, Sequence[Seen]], layers: Mapping[Kind, tuple[int, ...]]) -> list[str]:
    notes = []
    for kind, calls in by_kind.items():
        heads, shared = {(one.call.n_heads, one.call.n_kv_heads) for one in calls}, calls[0].call
        group = shared.n_heads // shared.n_kv_heads
        if len(heads) == 1 and group > 1:
            last = shared.n_heads - group
            notes.append(
                f"Query heads 0-{group - 1} share key/value head 0"
                + (f", and so on up to {last}-{shared.n_heads - 1} with {shared.n_kv_heads - 1}" if last else "")
                + f" ({kind})."
            )
        elif len(heads) > 1:
            notes.append(f"Layers differ in their numbers of heads ({kind}).")
        modules = {one.module for one in calls}
        if len(modules) < len(calls):
            sets = "1 set" if len(modules) == 1 else f"{len(modules)} sets"
            notes.append(f"{len(calls)} {kind} layers share {sets} of weights.")
        for value, what in (("softcap", "Scores are capped at +-{:g}"), ("sinks", "")):
            having = [n for n, one in zip(layers[kind], calls, strict=True) if getattr(one.call, value) is not None]
            if not having:
                continue
            where = f"in {kind} layers {spans(having)}"
            if value == "sinks":
                notes.append(f"Sinks take part of the weight {where}: rows sum to less than 1.")
            else:
                caps = {one.call.softcap for one in calls if one.call.softcap is not None}
                notes.append(f"{what.format(max(caps))} before the softmax {where}.")
        biased = [n for n, one in zip(layers[kind], calls, strict=True) if one.call.bias is not None]
        if biased:
            notes.append(f"Scores have a position bias in {kind} layers {spans(biased)}.")
        windows: dict[int, list[int]] = {}
        for number, one in zip(layers[kind], calls, strict=True):
            if one.window:
                windows.setdefault(one.window, []).append(number)
        notes += [
            f"A sliding window of {width} tokens in {kind} layers {spans(numbers)}."
            for width, numbers in windows.items()
        ]
    return notes


def _gap_notes(layers: Mapping[Kind, tuple[int, ...]], n_layers: Mapping[Kind, int]) -> list[str]:
    return [
        f"Only layers {spans(numbers)} of {n_layers[kind]} have attention ({kind})."
        for kind, numbers in layers.items()
        if len(numbers) < n_layers[kind]
    ]


def _one_line(error: BaseException) -> str:
    text = error.message if isinstance(error, AttnscopeError) else str(error)
    line = next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)
    return line[:200].rstrip(".")
