"""Tell the attentions of a model apart: the kind (encoder, decoder, cross) and the layer of each.

Whose it is shows in what it hides on a small input. The layer shows in how modules are numbered, or by counting. What
is peculiar becomes a note. Nothing here runs a model.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from attnscope.core.attention.probes import Place
from attnscope.core.attention.seam import Kind
from attnscope.errors import AttnscopeError, amount
from attnscope.models.hf.examples import Example
from attnscope.models.hf.parts import hidden_states, setting
from attnscope.models.hf.seam import Plan, Seen
from attnscope.questions.maps import spans

Maps = dict[Kind, list[Tensor]]
"""Attention weights, (batch, head, query, key), of each kind in the order of computation."""


class Unclear(Exception):  # noqa: N818 - no error: the other path is taken
    """The seam does not see the whole of a model's attention, or its layers cannot be told apart."""


@dataclass(frozen=True, eq=False)
class Survey:
    """A model's attention layers: kinds, sizes, where they are computed, and how far they were checked."""

    path: str  # "seam" or "eager"
    # kind -> numbers of the layers that have attention, in the order of computation
    layers: Mapping[Kind, tuple[int, ...]]
    n_layers: Mapping[Kind, int]  # kind -> how many layers there are, with and without attention
    n_heads: Mapping[Kind, int]  # kind -> the most query heads of a layer; likewise n_kv_heads
    n_kv_heads: Mapping[Kind, int]
    d_model: int
    plan: Plan = field(default_factory=dict)  # on the seam: which call is which
    order: tuple[Place, ...] = ()  # the same for all calls of a pass, in their order; known during a check alone
    extras: Mapping[str, Any] = field(default_factory=dict)  # what the forward must be given besides the inputs
    checked: bool = True  # whether it was compared with eager
    notes: tuple[str, ...] = ()
    # windows and the like that the texts of the comparison did not reach past yet, in tokens, sorted
    reaches: list[int] = field(default_factory=list)
    beside: bool = False  # whether modules that the plan does not name attend too, as those of a tower for pictures do
    remembered: str = ""  # when, and with what, it was compared; "" = at this load
    through: Callable[..., Any] | None = None  # what is called instead of the model, to run it; see `seam.perform`

    @property
    def n_calls(self) -> int:
        """Return how many attentions one forward pass computes."""
        return sum(map(len, self.layers.values()))


def read_seam(config: Any, example: Example, output: Any, seen: Sequence[Seen]) -> Survey:
    """Return the survey of attentions that passed the seam, each with its module."""
    # Sort the calls by kind; each kind that the architecture has must be there.
    kinds = kinds_of(config, example, output, [call.weights for call in seen])
    by_kind: dict[Kind, list[Seen]] = {}
    for call, kind in zip(seen, kinds, strict=True):
        by_kind.setdefault(kind, []).append(call)
    for kind in ("encoder", "decoder", "cross"):
        if config.is_encoder_decoder and kind not in by_kind:
            raise Unclear(f"its {kind} attention does not pass transformers' attention interface")
    modules = {kind: [call.module for call in calls] for kind, calls in by_kind.items()}
    layers, n_layers = _number_layers(config, modules)

    # In a pass, each module computes its attentions in the order of the rehearsal.
    numbers = {kind: iter(of_kind) for kind, of_kind in layers.items()}
    places = [(kind, next(numbers[kind])) for kind in kinds]
    plan: dict[nn.Module, list[Place]] = {}
    for call, place in zip(seen, places, strict=True):
        plan.setdefault(call.module, []).append(place)

    # Head counts may differ between layers: the largest is reported.
    heads = {kind: {(seen.call.n_heads, seen.call.n_kv_heads) for seen in calls} for kind, calls in by_kind.items()}
    notes = _notes_on_gaps(config, layers, n_layers)
    for kind, calls in by_kind.items():
        notes += _notes_on_kind(kind, dict(zip(layers[kind], calls, strict=True)))
    return Survey(
        path="seam",
        plan=plan,
        order=tuple(places),
        layers=layers,
        n_layers=n_layers,
        n_heads={kind: max(pairs)[0] for kind, pairs in heads.items()},
        # As many as query heads where no one number is true of all layers.
        n_kv_heads={kind: max(pairs)[len(pairs) == 1] for kind, pairs in heads.items()},
        extras=extras_of(example),
        d_model=_width_of(output),
        notes=tuple(notes),
    )


def read_weights(config: Any, example: Example, output: Any, maps: Maps) -> Survey:
    """Return the survey of a model that gives out its weights itself, by kind; of other than encoder-decoders, all."""
    if not config.is_encoder_decoder:
        (weights,) = maps.values()
        maps = {kinds_of(config, example, output, weights)[0]: weights}
    layers, n_layers = _number_layers(config, {kind: [None] * len(of_kind) for kind, of_kind in maps.items()})
    n_heads = {kind: max(weights.shape[1] for weights in of_kind) for kind, of_kind in maps.items()}
    return Survey(
        path="eager",
        layers=layers,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads={kind: _configured_kv_heads(config, n) for kind, n in n_heads.items()},
        extras=extras_of(example),
        d_model=_width_of(output),
        notes=tuple(_notes_on_gaps(config, layers, n_layers)),
    )


def extras_of(example: Example) -> dict[str, Any]:
    """Return the arguments that the forward needs besides the inputs."""
    return {name: example.inputs[name] for name in ("output_hidden_states",) if name in example.inputs}


def _width_of(output: Any) -> int:
    hidden = hidden_states(output)
    return 0 if hidden is None else int(hidden.shape[-1])


# Kinds ----------------------------------------------------------------------------------------------------------


def kinds_of(config: Any, example: Example, output: Any, weights: Sequence[Tensor]) -> list[Kind]:
    """Return whose attention each map is, by its shape, (batch, head, query, key), on an input without padding.

    Raises:
        Unclear: A map fits none of the sequences.
    """
    encoded = getattr(output, "encoder_last_hidden_state", None)
    n_tokens = None if example.real is None else example.real.shape[1]
    shapes = [(maps.shape[2], maps.shape[3]) for maps in weights]
    kinds: dict[tuple[int, int], Kind]
    if config.is_encoder_decoder:
        # The attentions of an encoder-decoder differ in their lengths.
        source = n_tokens if encoded is None else encoded.shape[1]
        if source is None:
            raise Unclear("its output holds no hidden states of the encoder, whose length tells its attentions apart")
        target = 0 if example.target_real is None else example.target_real.shape[1]
        if source == target or (encoded is not None and n_tokens not in (None, source)):
            raise Unclear(f"its encoder puts out {source} tokens and its decoder reads {target}")
        kinds = {(source, source): "encoder", (target, target): "decoder", (target, source): "cross"}
    else:
        kind: Kind = "decoder" if hides_later(weights) else "encoder"
        if n_tokens is None:
            _require_whole_pictures(example, weights)
            return [kind] * len(weights)
        kinds = {(n_tokens, n_tokens): kind}
    strange = next((shape for shape in shapes if shape not in kinds), None)
    if strange is not None:
        known = ", ".join(f"{queries} on {keys}" for queries, keys in kinds)
        raise Unclear(f"it has attention of {strange[0]} queries on {strange[1]} keys where {known} are expected")
    return [kinds[shape] for shape in shapes]


def _require_whole_pictures(example: Example, weights: Sequence[Tensor]) -> None:
    """Raise Unclear where layers do not each attend among all patches of a picture (Swin, SegFormer)."""
    pixels = example.inputs.get("pixel_values")
    if pixels is None or pixels.ndim != 4:
        return
    for maps in weights:
        n_maps, _, queries, keys = maps.shape
        if n_maps != len(pixels) or queries != keys or queries != weights[0].shape[2]:
            raise Unclear(
                "its layers attend within windows of a picture, or merge patches: "
                f"{n_maps // len(pixels)} of {queries} queries on {keys} keys"
            )


def hides_later(weights: Sequence[Tensor]) -> bool:
    """Return whether no query sees a later key, by the rows that hold numbers: of the others nothing is known.

    Raises:
        AttnscopeError: No row holds numbers.
    """
    is_known = False
    for maps in weights:
        rows = maps.isfinite().all(-1, keepdim=True)
        if maps.shape[2] != maps.shape[3] or bool((maps.triu(1).nan_to_num(0.0) * rows).any()):
            return False
        # The last query has no later key, so it says nothing.
        is_known = is_known or maps.shape[2] == 1 or bool(rows[:, :, :-1].any())
    if not is_known:
        raise AttnscopeError(
            "all its attention is NaN or infinite on a short random input, so that nothing can be said of it",
            "try --dtype float32 or bfloat16; if that changes nothing, the weights are damaged",
        )
    return True


# Layers ---------------------------------------------------------------------------------------------------------

_ALL_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_SIDE_LAYERS = ("{}_layers", "num_{}_layers", "{}_num_hidden_layers", "num_layers", "num_hidden_layers")


def _number_layers(
    config: Any, modules: Mapping[Kind, Sequence[nn.Module | None]]
) -> tuple[dict[Kind, tuple[int, ...]], dict[Kind, int]]:
    """Return which layers the attentions of each kind belong to, in the order of computation, and how many there are.

    Modules name their layer, or all layers attend, or the configuration lists those that do.
    """
    layers: dict[Kind, tuple[int, ...]] = {}
    n_layers: dict[Kind, int] = {}
    for kind, of_kind in modules.items():
        # Prefer the numbers that the modules carry, if they ascend and fit the configuration.
        total = _configured_layers(config, kind)
        n = len(of_kind)
        named = [getattr(module, "layer_idx", None) for module in of_kind]
        numbers = tuple(number for number in named if isinstance(number, int))
        is_ascending = len(numbers) == n and list(numbers) == sorted({*numbers}) and numbers[0] >= 0
        is_possible = numbers == tuple(range(n)) if total is None else max(numbers, default=0) < total
        if not (is_ascending and is_possible):
            numbers = tuple(range(n)) if total in (None, n) else listed_layers(config, total)
        if len(numbers) != n:
            raise Unclear(f"only {n} {kind} attentions of {total} layers are to be seen")
        layers[kind] = numbers
        n_layers[kind] = max(total or 0, numbers[-1] + 1)
    return layers, n_layers


def _configured_layers(config: Any, kind: Kind) -> int | None:
    """Return how many layers a configuration asks for; None where it does not say in a usual way."""
    names: Sequence[str] = _ALL_LAYERS
    if config.is_encoder_decoder:
        side = "encoder" if kind == "encoder" else "decoder"
        # Either the side has a configuration of its own, or the names of its sizes begin with the side.
        inner = getattr(config, side, None)
        if inner is not None and hasattr(inner, "to_dict"):
            config = inner
            names = _ALL_LAYERS[:1]
        else:
            names = [name.format(side) for name in _SIDE_LAYERS]
    else:
        config = config.get_text_config()
    counts = (setting(config, name) for name in names)
    return next((count for count in counts if isinstance(count, int)), None) or None


def listed_layers(config: Any, total: int | None) -> tuple[int, ...]:
    """Return the numbers of the layers that a configuration lists as attention; Zamba calls them hybrid."""
    config = config.get_text_config()
    # A list that does not name every layer says nothing about any.
    types = [str(name) for name in setting(config, "layers_block_type") or setting(config, "layer_types") or ()]
    if len(types) != total:
        return ()
    attends = [name == "hybrid" or ("attention" in name and "linear" not in name) for name in types]
    return tuple(layer for layer, is_attention in enumerate(attends) if is_attention)


def _configured_kv_heads(config: Any, n_heads: int) -> int:
    """Return the key/value heads of a layer as a configuration names them; n_heads where it does not."""
    inner = config if config.is_encoder_decoder else config.get_text_config()
    n = setting(inner, "num_key_value_heads") or setting(inner, "num_kv_heads")
    if getattr(inner, "multi_query", False) and not getattr(inner, "new_decoder_architecture", False):
        n = 1  # Falcon
    return n if isinstance(n, int) and n and n_heads % n == 0 else n_heads


# Notes ----------------------------------------------------------------------------------------------------------


def _notes_on_kind(kind: Kind, by_layer: Mapping[int, Seen]) -> list[str]:
    """Return notes on caps, sinks, windows and shared weights of a kind of attention."""
    peculiar: dict[str, list[int]] = {}
    for layer, seen in by_layer.items():
        if seen.call.softcap is not None:
            peculiar.setdefault(f"Scores are capped at +-{seen.call.softcap:g} before the softmax", []).append(layer)
        if seen.call.sinks is not None:
            peculiar.setdefault("Sinks take part of the weight (rows sum to less than 1)", []).append(layer)
        if seen.window:
            reach = f"of {seen.window} tokens" if kind == "decoder" else f"of {seen.window - 1} tokens to either side"
            peculiar.setdefault(f"A sliding window {reach}", []).append(layer)
    notes = [f"{note} in {kind} layers {spans(layers)}." for note, layers in peculiar.items()]
    n_modules = len({seen.module for seen in by_layer.values()})
    if n_modules < len(by_layer):
        notes.append(f"{len(by_layer)} {kind} layers share {amount(n_modules, 'set')} of weights.")
    return notes


def _notes_on_gaps(config: Any, layers: Mapping[Kind, tuple[int, ...]], n_layers: Mapping[Kind, int]) -> list[str]:
    """Return notes on layers without attention of text."""
    crossing = setting(config.get_text_config(), "cross_attention_layers") or ()
    notes = []
    for kind, numbers in layers.items():
        absent = set(range(n_layers[kind])) - set(numbers)
        to_pictures = sorted(absent & set(crossing))
        if to_pictures:
            notes.append(f"Layers {spans(to_pictures)} attend to pictures alone: without one they compute nothing.")
        if absent - set(to_pictures):
            present = sorted({*numbers, *to_pictures})
            notes.append(f"Only layers {spans(present)} of {n_layers[kind]} have attention ({kind}).")
    return notes
