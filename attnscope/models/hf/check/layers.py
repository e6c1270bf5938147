"""Which of a model's attentions is which: whose (encoder, decoder, cross), which layer's; and what is worth a note.

Whose, is seen by what the attention hides on a small input; the layer, by how it is numbered, or by counting.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from attnscope.core.attention.seam import Kind
from attnscope.errors import AttnscopeError, amount
from attnscope.models.hf.check.examples import Example, setting
from attnscope.models.hf.seam import Seen
from attnscope.records import spans


class Unclear(Exception):  # noqa: N818 - no error: the other path is taken
    """The seam does not see the whole of a model's attention, or cannot tell which is which."""


def kinds_of(config: Any, example: Example, output: Any, weights: Sequence[Tensor]) -> list[Kind]:
    """Whose attention each map is, by its shape on the example that is not padded.

    Of an encoder-decoder by how many queries and keys it has; else all are a decoder's if no query sees a later key.
    """
    shapes = [(w.shape[2], w.shape[3]) for w in weights]
    encoded = getattr(output, "encoder_last_hidden_state", None)
    tokens = None if example.real is None else example.real.shape[1]
    source = tokens if encoded is None else encoded.shape[1]
    if tokens is not None:
        strange = next((s for s in shapes if not config.is_encoder_decoder and s != (tokens, tokens)), None)
        if strange or source != tokens:
            queries, keys = strange or (source, source)
            raise Unclear(f"it has attention of {queries} queries on {keys} keys where the text has {tokens} tokens")
    pixels = example.inputs.get("pixel_values")
    if tokens is None and pixels is not None and pixels.ndim == 4 and not example.is_users:
        _require_whole_pictures(weights, len(pixels))
    if not config.is_encoder_decoder:
        return ["decoder" if hides_later(weights) else "encoder"] * len(weights)
    squares = (queries for queries, keys in shapes if queries == keys != source)
    target = example.target_real.shape[1] if example.target_real is not None else next(squares, 0)
    if source is None:
        raise Unclear("its output holds no hidden states of the encoder, by whose length its attentions are told apart")
    if source == target:
        raise Unclear(f"encoder and decoder are both {target} long, so that they cannot be told apart")
    kinds: dict[tuple[int, int], Kind] = {
        (source, source): "encoder",
        (target, target): "decoder",
        (target, source): "cross",
    }
    strange = next((shape for shape in shapes if shape not in kinds), None)
    if strange:
        raise Unclear(
            f"it has attention of {strange[0]} queries on {strange[1]} keys where the encoder reads {source} tokens "
            f"and the decoder {target}"
        )
    return [kinds[shape] for shape in shapes]


def _require_whole_pictures(weights: Sequence[Tensor], n_pictures: int) -> None:
    """Raises Unclear where layers do not each see all patches of a picture, as those of Swin and SegFormer."""
    sizes = dict.fromkeys((w.shape[0] // n_pictures, w.shape[2], w.shape[3]) for w in weights)
    for n_windows, queries, keys in sizes:
        if n_windows != 1:
            raise Unclear(f"it attends within {n_windows} windows of a picture, each {queries} queries on {keys} keys")
        if queries != keys or len(sizes) > 1:
            layers = " and ".join(f"{n} queries on {m} keys" for _, n, m in sizes)
            raise Unclear(f"it merges patches: its layers have attention of {layers}")


def hides_later(weights: Sequence[Tensor]) -> bool:
    """Whether no query sees a later key, by the rows that hold numbers: of one that overflowed nothing is known."""
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


_LAYER_COUNTS: dict[Kind, tuple[str, ...]] = {
    "encoder": ("encoder_layers", "num_encoder_layers", "encoder_num_hidden_layers", "num_layers", "num_hidden_layers"),
    "decoder": ("decoder_layers", "num_decoder_layers", "decoder_num_hidden_layers", "num_layers", "num_hidden_layers"),
}


def configured_layers(config: Any, kind: Kind) -> int | None:
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
    return next((n for name in names if isinstance(n := setting(config, name), int)), None) or None


def number_layers(config: Any, kind: Kind, modules: Sequence[nn.Module], total: int | None) -> tuple[int, ...]:
    """Numbers of the layers that attentions of one kind belong to, in the order of computation."""
    named = [getattr(module, "layer_idx", None) for module in modules]
    numbers = [number for number in named if isinstance(number, int)]
    if len(numbers) == len(named) == len(set(numbers)) and numbers == sorted(numbers) and numbers[0] >= 0:
        if total is None and numbers == list(range(len(numbers))):
            return tuple(numbers)
        if total is not None and numbers[-1] < total:
            return tuple(numbers)
    if total in (None, len(modules)):
        return tuple(range(len(modules)))
    if len(listed := listed_layers(config, total)) == len(modules):
        return listed
    raise Unclear(f"only {len(modules)} {kind} attentions of {total} layers pass transformers' attention interface")


def listed_layers(config: Any, total: int | None) -> tuple[int, ...]:
    """Numbers of the layers that have attention as a configuration lists them; Zamba calls them hybrid."""
    config = config.get_text_config()
    types = [str(name) for name in setting(config, "layers_block_type") or setting(config, "layer_types") or ()]
    if len(types) != total:
        return ()
    return tuple(
        i for i, name in enumerate(types) if name == "hybrid" or ("attention" in name and "linear" not in name)
    )


def configured_kv_heads(config: Any, kind: Kind, n_heads: int) -> int:
    """Key/value heads of a layer as a configuration names them; as many as query heads where it does not."""
    inner = config.get_text_config() if not config.is_encoder_decoder else config
    n = setting(inner, "num_key_value_heads") or setting(inner, "num_kv_heads")
    if getattr(inner, "multi_query", False) and not getattr(inner, "new_decoder_architecture", False):
        n = 1
    return n if isinstance(n, int) and n and n_heads % n == 0 else n_heads


def configured_counts(config: Any) -> set[int]:
    """All numbers of layers that a configuration names."""
    names = {name for of_side in _LAYER_COUNTS.values() for name in of_side} | {"n_layer", "n_layers"}
    counts = (setting(part, name) for part in (config, config.get_text_config()) for name in names)
    return {count for count in counts if isinstance(count, int)}


def notes_on(by_kind: Mapping[Kind, Sequence[Seen]], layers: Mapping[Kind, tuple[int, ...]]) -> list[str]:
    """What a user must know of each kind of attention to read the pictures truly."""
    notes = []
    for kind, calls in by_kind.items():
        heads = sorted({(seen.call.n_heads, seen.call.n_kv_heads) for seen in calls})
        if len(heads) > 1:
            groups = ", ".join(f"{n} query heads on {kv} key/value heads" for n, kv in heads)
            notes.append(f"Layers differ in their heads ({kind}): {groups}.")
        modules = {seen.module for seen in calls}
        if len(modules) < len(calls):
            notes.append(f"{len(calls)} {kind} layers share {amount(len(modules), 'set')} of weights.")
        by_layer = dict(zip(layers[kind], calls, strict=True))
        caps = {layer: seen.call.softcap for layer, seen in by_layer.items() if seen.call.softcap is not None}
        if caps:
            cap = f"{max(caps.values()):g}"
            notes.append(f"Scores are capped at +-{cap} before the softmax in {kind} layers {spans(list(caps))}.")
        if sinks := [layer for layer, seen in by_layer.items() if seen.call.sinks is not None]:
            notes.append(f"Sinks take part of the weight in {kind} layers {spans(sinks)}: rows sum to less than 1.")
        if biases := [layer for layer, seen in by_layer.items() if seen.call.bias is not None]:
            notes.append(f"Scores have a position bias in {kind} layers {spans(biases)}.")
        for width in dict.fromkeys(seen.window for seen in calls if seen.window):
            reach = f"of {width} tokens" if kind == "decoder" else f"that reaches {width - 1} tokens to either side"
            windows = [layer for layer, seen in by_layer.items() if seen.window == width]
            notes.append(f"A sliding window {reach} in {kind} layers {spans(windows)}.")
    return notes


def notes_on_gaps(config: Any, layers: Mapping[Kind, tuple[int, ...]], n_layers: Mapping[Kind, int]) -> list[str]:
    """Which layers have no attention of text."""
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
