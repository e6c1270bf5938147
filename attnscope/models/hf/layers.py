"""Tell a model's attentions apart: whose each is (encoder, decoder, cross), and which layer's.

Whose it is shows in what the attention hides on a small input. The layer shows in how modules are numbered, or by
counting. What is peculiar becomes a note. Nothing here runs a model.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from attnscope.core.attention.seam import Kind
from attnscope.errors import AttnscopeError, amount
from attnscope.models.hf.examples import Example, setting
from attnscope.models.hf.seam import Plan, Seen
from attnscope.questions.maps import spans


class Unclear(Exception):  # noqa: N818 - no error: the other path is taken
    """The seam does not see the whole of a model's attention, or its layers cannot be told apart."""


def kinds_of(config: Any, example: Example, output: Any, weights: Sequence[Tensor]) -> list[Kind]:
    """Return whose attention each map is, by its shape, (batch, head, query, key), on an input without padding.

    Raises:
        Unclear: A map fits none of the sequences.
    """
    encoded = getattr(output, "encoder_last_hidden_state", None)
    tokens = None if example.real is None else example.real.shape[1]
    source = tokens if encoded is None else encoded.shape[1]
    if not config.is_encoder_decoder:
        _require_all_seen(example, weights, tokens, source)
        return ["decoder" if hides_later(weights) else "encoder"] * len(weights)

    # An encoder-decoder's attentions differ in their lengths.
    shapes = [(w.shape[2], w.shape[3]) for w in weights]
    if tokens is not None and source != tokens:
        raise Unclear(f"it has attention of {source} queries on {source} keys where the text has {tokens} tokens")
    if example.target_real is not None:
        target = example.target_real.shape[1]
    else:
        target = next((queries for queries, keys in shapes if queries == keys != source), 0)
    if source is None:
        raise Unclear("its output holds no hidden states of the encoder, by whose length its attentions are told apart")
    if source == target:
        raise Unclear(f"encoder and decoder are both {target} long, so that they cannot be told apart")
    kinds: dict[tuple[int, int], Kind] = {
        (source, source): "encoder",
        (target, target): "decoder",
        (target, source): "cross",
    }
    for queries, keys in shapes:
        if (queries, keys) not in kinds:
            raise Unclear(
                f"it has attention of {queries} queries on {keys} keys where the encoder reads {source} tokens "
                f"and the decoder {target}"
            )
    return [kinds[shape] for shape in shapes]


def _require_all_seen(example: Example, weights: Sequence[Tensor], tokens: int | None, source: int | None) -> None:
    """Raise Unclear where layers do not each see all tokens of a text, or all patches of a picture (Swin)."""
    if tokens is not None:
        shapes = [tuple(w.shape[2:]) for w in weights]
        strange = next((shape for shape in shapes if shape != (tokens, tokens)), None)
        if strange or source != tokens:
            queries, keys = strange or (source, source)
            raise Unclear(f"it has attention of {queries} queries on {keys} keys where the text has {tokens} tokens")
        return
    pixels = example.inputs.get("pixel_values")
    if pixels is None or pixels.ndim != 4:
        return
    sizes = dict.fromkeys((w.shape[0] // len(pixels), w.shape[2], w.shape[3]) for w in weights)
    for n_windows, queries, keys in sizes:
        if n_windows != 1:
            raise Unclear(f"it attends within {n_windows} windows of a picture, each {queries} queries on {keys} keys")
        if queries != keys or len(sizes) > 1:
            layers = " and ".join(f"{n} queries on {m} keys" for _, n, m in sizes)
            raise Unclear(f"it merges patches: its layers have attention of {layers}")


def hides_later(weights: Sequence[Tensor]) -> bool:
    """Return whether no query sees a later key, by the rows that hold numbers: of the others nothing is known."""
    is_known = False
    for maps in weights:
        if maps.shape[2] != maps.shape[3]:
            return False
        rows = maps.isfinite().all(-1, keepdim=True)
        if bool((maps.triu(1).nan_to_num(0.0) * rows).any()):
            return False
        is_known = is_known or maps.shape[2] == 1 or bool(rows[:, :, :-1].any())
    if not is_known:
        raise AttnscopeError(
            "all its attention is NaN or infinite on a short random input, so that nothing can be said of it",
            "try --dtype float32 or bfloat16; if that changes nothing, the weights are damaged",
        )
    return True


@dataclass(frozen=True, eq=False)
class Survey:
    """What was found out of a model's attention."""

    path: str  # "seam" or "eager"
    # kind -> numbers of the layers that have attention, in the order of computation
    layers: Mapping[Kind, tuple[int, ...]]
    n_layers: Mapping[Kind, int]  # kind -> how many layers there are, with and without attention
    n_heads: Mapping[Kind, int]  # kind -> the most query heads of a layer; likewise n_kv_heads
    n_kv_heads: Mapping[Kind, int]
    d_model: int
    plan: Plan = field(default_factory=dict)  # on the seam: which call is which
    extras: Mapping[str, Any] = field(default_factory=dict)  # what the forward must be given besides the inputs
    checked: bool = True  # whether it was compared with eager
    notes: tuple[str, ...] = ()
    # windows and the like that the texts of the comparison did not reach past yet, in tokens, sorted
    reaches: list[int] = field(default_factory=list)
    # of these, those beyond which what would be shown differs from eager, and what was said of it
    refusals: dict[int, AttnscopeError] = field(default_factory=dict)
    beside: bool = False  # whether modules that the plan does not name attend too, as those of a tower for pictures do
    remembered: str = ""  # when, and with what, it was compared; "" = at this load
    through: Callable[..., Any] | None = None  # what is called instead of the model, to run it; see `seam.perform`

    @property
    def n_calls(self) -> int:
        """Return how many attentions one forward pass computes."""
        return sum(map(len, self.layers.values()))


# Numbers of layers ------------------------------------------------------------------------------------------------

_ALL_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_SIDE_LAYERS = ("{}_layers", "num_{}_layers", "{}_num_hidden_layers", "num_layers", "num_hidden_layers")


def configured_layers(config: Any, kind: Kind) -> int | None:
    """Return how many layers a configuration asks for; None where it does not say in a usual way."""
    names: Sequence[str] = _ALL_LAYERS
    if config.is_encoder_decoder:
        side = "encoder" if kind == "encoder" else "decoder"
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


def configured_counts(config: Any) -> set[int]:
    """Return all numbers of layers that a configuration names."""
    names = {*_ALL_LAYERS, *(name.format(side) for name in _SIDE_LAYERS for side in ("encoder", "decoder"))}
    values = [setting(part, name) for part in (config, config.get_text_config()) for name in names]
    return {value for value in values if isinstance(value, int)}


def number_layers(config: Any, kind: Kind, modules: Sequence[nn.Module], total: int | None) -> tuple[int, ...]:
    """Return the numbers of the layers that attentions of one kind belong to, in the order of computation."""
    named = [getattr(module, "layer_idx", None) for module in modules]
    numbers = [number for number in named if isinstance(number, int)]
    if len(numbers) == len(named) == len(set(numbers)) and numbers == sorted(numbers) and numbers[0] >= 0:
        are_all = numbers == list(range(len(numbers)))
        if are_all if total is None else numbers[-1] < total:
            return tuple(numbers)
    counted = count_layers(config, len(modules), total)
    if counted is None:
        raise Unclear(f"only {len(modules)} {kind} attentions of {total} layers pass transformers' attention interface")
    return counted


def count_layers(config: Any, n: int, total: int | None) -> tuple[int, ...] | None:
    """Return the numbers of n layers that have attention: all there are, or those listed; None if neither fits."""
    if total in (None, n):
        return tuple(range(n))
    listed = listed_layers(config, total)
    return listed if len(listed) == n else None


def listed_layers(config: Any, total: int | None) -> tuple[int, ...]:
    """Return the numbers of the layers that a configuration lists as attention; Zamba calls them hybrid."""
    config = config.get_text_config()
    types = [str(name) for name in setting(config, "layers_block_type") or setting(config, "layer_types") or ()]
    if len(types) != total:
        return ()
    return tuple(
        i for i, name in enumerate(types) if name == "hybrid" or ("attention" in name and "linear" not in name)
    )


def configured_kv_heads(config: Any, n_heads: int) -> int:
    """Return the key/value heads of a layer as a configuration names them; n_heads where it does not."""
    inner = config if config.is_encoder_decoder else config.get_text_config()
    n = setting(inner, "num_key_value_heads") or setting(inner, "num_kv_heads")
    if getattr(inner, "multi_query", False) and not getattr(inner, "new_decoder_architecture", False):
        n = 1
    return n if isinstance(n, int) and n and n_heads % n == 0 else n_heads


# Notes ------------------------------------------------------------------------------------------------------------


def notes_on(by_kind: Mapping[Kind, Sequence[Seen]], layers: Mapping[Kind, tuple[int, ...]]) -> list[str]:
    """Return what a user must know of each kind of attention to read the pictures truly."""
    notes = []
    for kind, calls in by_kind.items():
        notes += _notes_on_kind(kind, dict(zip(layers[kind], calls, strict=True)))
    return notes


def _notes_on_kind(kind: Kind, by_layer: Mapping[int, Seen]) -> list[str]:
    calls = list(by_layer.values())
    notes = []

    def say(text: str, has: Callable[[Seen], Any]) -> None:
        chosen = [layer for layer, seen in by_layer.items() if has(seen)]
        if chosen:
            notes.append(text.format(f"in {kind} layers {spans(chosen)}"))

    heads = sorted({(seen.call.n_heads, seen.call.n_kv_heads) for seen in calls})
    if len(heads) > 1:
        groups = ", ".join(f"{n} query heads on {kv} key/value heads" for n, kv in heads)
        notes.append(f"Layers differ in their heads ({kind}): {groups}.")
    n_modules = len({seen.module for seen in calls})
    if n_modules < len(calls):
        notes.append(f"{len(calls)} {kind} layers share {amount(n_modules, 'set')} of weights.")
    cap = max(seen.call.softcap or 0.0 for seen in calls)
    say(f"Scores are capped at +-{cap:g} before the softmax {{}}.", lambda seen: seen.call.softcap is not None)
    say("Sinks take part of the weight {}: rows sum to less than 1.", lambda seen: seen.call.sinks is not None)
    say("Scores have a position bias {}.", lambda seen: seen.call.bias is not None)
    for width in dict.fromkeys(seen.window for seen in calls if seen.window):
        reach = f"of {width} tokens" if kind == "decoder" else f"that reaches {width - 1} tokens to either side"
        layers = [layer for layer, seen in by_layer.items() if seen.window == width]
        notes.append(f"A sliding window {reach} in {kind} layers {spans(layers)}.")
    return notes


def notes_on_gaps(config: Any, layers: Mapping[Kind, tuple[int, ...]], n_layers: Mapping[Kind, int]) -> list[str]:
    """Return which layers have no attention of text."""
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


# Windows ---------------------------------------------------------------------------------------------------------

_REACH = re.compile(
    r"(window|window_size|chunk_size|chunk_length|block_size|local_attention|local_radius|index_top_?k"
    r"|original_max_position_embeddings)$"
)
_ELSEWHERE = re.compile(r"mamba|ssm|linear|feed_forward|vision|image|video|audio|speech|conv|n_window")


def reaches(config: Any) -> list[int]:
    """Return the windows, chunks and blocks that a configuration names, in tokens, sorted."""
    numbers = {*_numbers(vars(config.get_text_config())), *_numbers(vars(config)), full_up_to(config)}
    return sorted(number for number in numbers if number is not None)


def full_up_to(config: Any) -> int | None:
    """Return the tokens up to which BigBird attends in full, and sparsely beyond; None for other models."""
    blocks = getattr(config, "block_size", None)
    chance = getattr(config, "num_random_blocks", None)
    return (5 + 2 * chance) * blocks if isinstance(blocks, int) and isinstance(chance, int) else None


def _numbers(settings: Mapping[str, Any]) -> Iterator[int]:
    for name, value in settings.items():
        if isinstance(value, dict) and "rope" in name:
            yield from _numbers(value)
        elif isinstance(name, str) and _REACH.search(name) and not _ELSEWHERE.search(name):
            values = value if isinstance(value, list | tuple) else [value]
            yield from (number for number in values if isinstance(number, int) and number > 1)


def length_beyond(reach: int) -> int:
    """Return a length at which some queries see past a window, and that is no multiple of a block."""
    return reach + 1 + min(reach // 2, 32)


def mixes_lengths(config: Any, mask: Tensor | None) -> bool:
    """Return whether padding changes what a model computes for a text of a batch.

    BigBird attends in full up to a length and sparsely beyond. Rotary positions by longrope have long and short
    factors, chosen by the longest text of a batch; dynamic ones are scaled by its length beyond a limit. The mask is
    (text, token), 1 or True at real tokens.
    """
    if mask is None or _length_class(config, mask.shape[1]) == _length_class(config, 0):
        return False
    return len({_length_class(config, n_tokens) for n_tokens in (mask.shape[1], *mask.sum(1).tolist())}) > 1


def _length_class(config: Any, n_tokens: int) -> tuple[int, ...]:
    """Return what differs between lengths that are not computed alike."""
    limit = full_up_to(config)
    text = config.get_text_config()
    longest = getattr(text, "max_position_embeddings", 0)
    kinds: list[int] = [] if limit is None else [n_tokens > limit]
    for rope in _rotary(getattr(text, "rope_parameters", None) or {}):
        if rope["rope_type"] == "longrope":
            kinds.append(n_tokens > rope.get("original_max_position_embeddings", longest))
        elif "dynamic" in rope["rope_type"]:
            kinds.append(max(n_tokens, longest))
    return tuple(kinds)


def _rotary(settings: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the settings of rotary positions; some models have several, by kind of layer."""
    if "rope_type" in settings:
        yield settings
        return
    for value in settings.values():
        if isinstance(value, dict):
            yield from _rotary(value)
