"""What does this model's attention cost? From its sizes alone: parameters, multiply-adds, memory."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import asdict

from attnscope.core.plain_torch import with_plain_torch
from attnscope.errors import AttnscopeError, UsageError, amount, require_choice
from attnscope.models import configuration
from attnscope.models.catalog import find_config
from attnscope.models.sizes import (
    PRESETS,
    Sizes,
    attention_biases,
    attention_weights,
    change_sizes,
    divisors,
    sizes_by_hand,
    sizes_of,
)
from attnscope.records.teaching.cost import Cost, Curve, HeadRow, Quantity
from attnscope.results.storage import plain

BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1}
DEFAULT_TOKENS = 2048

_SIZE_OPTIONS = ("d_model", "n_heads", "n_layers", "n_kv_heads", "d_head", "d_ff", "vocab_size")


def find_sizes(spec: str | None = None, **changes: int | None) -> Sizes:
    """The sizes of a preset, of a model by its configuration, or by hand; sizes that you give replace a model's.

    Args:
        spec: A preset, a known name, a folder, a config.json, or a Hub id; None = the sizes by hand.
        changes: Some of d_model, n_heads, n_layers, n_kv_heads, d_head, d_ff and vocab_size.

    Raises:
        UsageError: Neither a model nor d_model, n_heads and n_layers are given.
        AttnscopeError: There is no such model, or its sizes make no sense.
    """
    unknown = set(changes) - set(_SIZE_OPTIONS)
    if unknown:
        raise UsageError(f"there is no size {unknown.pop()!r}", f"there are: {', '.join(_SIZE_OPTIONS)}")
    if spec is None:
        d_model, n_heads, n_layers = (changes.get(name) for name in ("d_model", "n_heads", "n_layers"))
        if d_model is None or n_heads is None or n_layers is None:
            raise UsageError(
                "no model is given, nor all of --d-model, --n-heads and --n-layers",
                f"presets: {', '.join(PRESETS)}; or a folder, or a Hub id",
            )
        others = {name: value for name, value in changes.items() if name not in ("d_model", "n_heads", "n_layers")}
        return sizes_by_hand(d_model, n_heads, n_layers, **others)
    if spec in PRESETS:
        return change_sizes(PRESETS[spec], **changes)
    close = difflib.get_close_matches(spec.lower(), PRESETS, n=1, cutoff=0.75)
    try:
        source = find_config(spec)
    except AttnscopeError as error:
        hint = f"did you mean the preset {close[0]}?" if close else f"{error.hint}; presets: {', '.join(PRESETS)}"
        raise AttnscopeError(error.message, hint.removeprefix("; ")) from None
    return change_sizes(sizes_of(configuration(source), source.name, source.origin), **changes)


@with_plain_torch
def cost(model: str | Sizes, n_tokens: int | None = None, *, dtype: str = "float16", **changes: int | None) -> Cost:
    """What a model's attention costs.

    Multiply-adds are those of matrix products; norms, activations and additions are left out, as they are small. A
    multiply-add is two floating-point operations.

    Args:
        model: Its sizes, or whatever `find_sizes` takes.
        n_tokens: For texts of this length; None = the model's longest, or 2048 if there is no limit.
        dtype: Precision of the scores: float32, float16, bfloat16 or int8.
        changes: Sizes that replace the model's, such as n_kv_heads=8.

    Raises:
        AttnscopeError: There is no such model, or sizes that make no sense.
        UsageError: An unknown precision, or no tokens.
    """
    require_choice("precision", dtype, tuple(BYTES))
    if n_tokens is not None and n_tokens < 1:
        raise UsageError(f"a text of {n_tokens} tokens is none", "give at least 1")
    if not isinstance(model, str | Sizes):
        raise UsageError("a loaded model has no list of sizes", "give the name or the folder that it was loaded from")
    sizes = find_sizes(model, **changes) if isinstance(model, str) else change_sizes(model, **changes)
    n = n_tokens or sizes.max_tokens or DEFAULT_TOKENS
    notes = list(sizes.notes)
    if sizes.kind != "encoder":
        notes.append(
            "a causal mask needs half of the scores and values of a text, N·(N + 1)/2 of N²; kernels that skip the "
            "rest compute so much, dense ones all"
        )
    if sizes.max_tokens and n > sizes.max_tokens:
        notes.append(f"{sizes.name} takes {amount(sizes.max_tokens, 'token')}; {n:,} are asked for")
    return Cost(
        name=sizes.name, source=sizes.source, sizes=plain(asdict(sizes)), n_tokens=n, dtype=dtype,
        groups={
            "parameters": tuple(_parameters(sizes)),
            "per_token": tuple(_per_token(sizes, n)),
            "per_text": tuple(_per_text(sizes, n)),
            "memory": tuple(_memory(sizes, n, dtype)),
            "kv_cache": tuple(_kv_cache(sizes, n)),
        },
        heads=tuple(_head_rows(sizes, n, BYTES[dtype])), lengths=_lengths(n), curves=tuple(_curves(sizes, n, dtype)),
        notes=tuple(notes),
    )  # fmt: skip


# Parameters -------------------------------------------------------------------------------------------------------


def _parameters(s: Sizes) -> list[Quantity]:
    each = _quantities_in("parameters")
    weights, biases, layers = attention_weights(s), attention_biases(s), s.n_attentions
    if s.n_kv_heads == s.n_heads and s.n_heads * s.d_head == s.d_model:
        formula, numbers = "4 · d_model²", f"4 · {s.d_model}²"
    else:
        formula = "2 · d_model · d_head · (n_heads + n_kv_heads)"
        numbers = f"2 · {s.d_model} · {s.d_head} · ({s.n_heads} + {s.n_kv_heads})"
    quantities = [
        each("attention_weights_per_layer", "attention weights, per layer", formula, numbers, weights),
        each("attention_weights", "attention weights, total", f"{_layers(s)} · weights per layer",
           f"{layers} · {weights:,}", layers * weights),
    ]  # fmt: skip
    if biases:
        terms = [
            *(["d_head · (n_heads + 2 · n_kv_heads)"] if s.qkv_bias else []), *(["d_model"] if s.o_bias else [])
        ]  # fmt: skip
        values = [
            *([f"{s.d_head} · ({s.n_heads} + 2 · {s.n_kv_heads})"] if s.qkv_bias else []),
            *([f"{s.d_model}"] if s.o_bias else []),
        ]
        quantities.append(
            each("attention_biases", "attention biases, total", f"{_layers(s)} · ({' + '.join(terms)})",
               f"{layers} · ({' + '.join(values)})", layers * biases)
        )  # fmt: skip
    quantities += _other_parameters(s)
    total, formula = sum(int(q.value) for q in quantities[1:]), "the sum"
    if s.counted is not None:
        total, formula = s.counted, "counted in the model, built without weights"
    what = "all parameters" if s.counted is not None or s.vocab_size else "all but the embeddings"
    quantities.append(each("parameters", what, formula, "", total))
    share = layers * (weights + biases) / total
    quantities.append(
        Quantity("attention_share", "attention's share of them", "(weights + biases) / all",
                 f"{layers * (weights + biases):,} / {total:,}", share, "share")
    )  # fmt: skip
    return quantities


def _other_parameters(s: Sizes) -> list[Quantity]:
    if s.counted is not None:
        return []
    each = _quantities_in("parameters")
    n_blocks = s.n_layers + s.n_decoder_layers
    ff_bias = s.ff_bias * ((s.ff_matrices - 1) * s.d_ff + s.d_model)
    formula = "layers · (ff_matrices · d_model · d_ff"
    numbers = f"{n_blocks} · ({s.ff_matrices} · {s.d_model} · {s.d_ff}"
    if s.ff_bias:
        ups = "" if s.ff_matrices == 2 else f"{s.ff_matrices - 1} · "
        formula, numbers = f"{formula} + {ups}d_ff + d_model", f"{numbers} + {ups}{s.d_ff} + {s.d_model}"
    quantities = [
        each("feed_forward", "feed-forward, total", f"{formula})", f"{numbers})",
           n_blocks * (s.ff_matrices * s.d_model * s.d_ff + ff_bias))
    ]  # fmt: skip
    if s.vocab_size:
        quantities.append(
            each("embeddings", "token embeddings", "vocab_size · d_embedding", f"{s.vocab_size} · {s.d_embedding}",
               s.vocab_size * s.d_embedding)
        )  # fmt: skip
        rows = s.n_positions + s.n_segments
        if rows:
            formula = "(n_positions + n_segments) · d_embedding"
            quantities.append(
                each("position_embeddings", "position and segment embeddings", formula,
                     f"({s.n_positions} + {s.n_segments}) · {s.d_embedding}", rows * s.d_embedding)
            )  # fmt: skip
        if s.d_embedding != s.d_model:
            quantities.append(
                each("embedding_projection", "from embeddings to layers", "d_embedding · d_model + d_model",
                   f"{s.d_embedding} · {s.d_model} + {s.d_model}", (s.d_embedding + 1) * s.d_model)
            )  # fmt: skip
    if s.relative_buckets:
        quantities.append(
            each("position_biases", "position biases, in both stacks", "2 · buckets · n_heads",
               f"2 · {s.relative_buckets} · {s.n_heads}", 2 * s.relative_buckets * s.n_heads)
        )  # fmt: skip
    quantities += _norms(s)
    if s.pooler:
        quantities.append(
            each("pooler", "pooler", "d_model² + d_model", f"{s.d_model}² + {s.d_model}", s.d_model**2 + s.d_model)
        )
    if s.unembedding == "own" and s.vocab_size:
        quantities.append(
            each("unembedding", "unembedding", "vocab_size · d_model", f"{s.vocab_size} · {s.d_model}",
               s.vocab_size * s.d_model)
        )  # fmt: skip
    return quantities


def _norms(s: Sizes) -> list[Quantity]:
    """Norms before and after the layers; those on embeddings are as wide as these."""
    if not s.norm_vectors:
        return []
    in_layers = s.norm_vectors * s.n_layers + (s.norm_vectors + 1) * s.n_decoder_layers
    outside = s.norm_vectors_outside * (s.d_embedding if s.kind == "encoder" else s.d_model)
    formula, numbers = "vectors in the layers · d_model + those outside", f"{in_layers} · {s.d_model} + {outside}"
    return [_quantities_in("parameters")("norms", "norms", formula, numbers, in_layers * s.d_model + outside)]


# Multiply-adds ----------------------------------------------------------------------------------------------------


def _per_token(s: Sizes, n: int) -> list[Quantity]:
    """For one token in a text of n tokens."""
    weights, layers, width = attention_weights(s), s.n_attentions, s.n_heads * s.d_head
    each = _quantities_in("multiply-adds")
    if s.kind == "encoder-decoder":
        what = "one token of the source and one of the target"
        feed = s.n_layers + s.n_decoder_layers
    else:
        what, feed = "per token", s.n_layers
    quantities = [
        each("projections_per_token", "projections (W_Q, W_K, W_V, W_O)", f"{_layers(s)} · attention weights",
             f"{layers} · {weights:,}", layers * weights),
        each("scores_per_token", "scores (q · k with N keys)", f"{_layers(s)} · n_heads · d_head · N",
             f"{layers} · {s.n_heads} · {s.d_head} · {n}", layers * width * n),
        each("values_per_token", "weighted values (with N values)", f"{_layers(s)} · n_heads · d_head · N",
             f"{layers} · {s.n_heads} · {s.d_head} · {n}", layers * width * n),
        each("feed_forward_per_token", "feed-forward", "layers · ff_matrices · d_model · d_ff",
             f"{feed} · {s.ff_matrices} · {s.d_model} · {s.d_ff}", feed * s.ff_matrices * s.d_model * s.d_ff),
    ]  # fmt: skip
    if s.unembedding and s.vocab_size:
        quantities.append(
            each("unembedding_per_token", "unembedding", "d_model · vocab_size", f"{s.d_model} · {s.vocab_size}",
                 s.d_model * s.vocab_size)
        )  # fmt: skip
    quantities.append(each("per_token", f"total, {what}", "the sum", "", sum(int(q.value) for q in quantities)))
    quantities.append(
        Quantity("exponentials_per_token", "softmax, in addition", f"{_layers(s)} · n_heads · N",
                 f"{layers} · {s.n_heads} · {n}", layers * s.n_heads * n, "exponentials")
    )  # fmt: skip
    return quantities


def _per_text(s: Sizes, n: int) -> list[Quantity]:
    """For a text of n tokens (an encoder-decoder: and a target of n)."""
    quantities = []
    for q in _per_token(s, n):
        name = q.name.replace("_per_token", "_per_text").replace("per_token", "per_text")
        numbers = f"{n} · {q.value:,}"
        what = "total, per text" if name == "per_text" else q.what
        quantities.append(Quantity(name, what, "N · the same per token", numbers, n * int(q.value), q.unit))
    return quantities


# Memory -----------------------------------------------------------------------------------------------------------


def _memory(s: Sizes, n: int, dtype: str) -> list[Quantity]:
    each, size = _quantities_in("bytes"), BYTES[dtype]
    one_layer = s.n_heads * n * n * size
    statistics = s.n_heads * n * 4
    return [
        each("scores_bytes", "scores of one layer, kept whole", f"n_heads · N² · {size} bytes ({dtype})",
             f"{s.n_heads} · {n}² · {size}", one_layer),
        each("scores_bytes_all_layers", "of all layers, as training keeps them", f"{_layers(s)} · one layer's",
             f"{s.n_attentions} · {one_layer:,}", s.n_attentions * one_layer),
        each("tiled_bytes", "tiled attention: log-sum-exp of one layer", "n_heads · N · 4 bytes (float32)",
             f"{s.n_heads} · {n} · 4", statistics),
        Quantity("tiled_ratio", "how many times less that is", f"N · {size} / 4", f"{n} · {size} / 4",
                 n * size / 4, "times"),
    ]  # fmt: skip


def _kv_cache(s: Sizes, n: int) -> list[Quantity]:
    """Keys and values of a text of n, by sharing and by precision; an encoder keeps none."""
    layers = s.caching_layers
    if not layers:
        return []
    each = _quantities_in("bytes")
    quantities = []
    for name, what, heads in _sharings(s):
        for dtypes in (("float32",), ("float16", "bfloat16"), ("int8",)):
            size, names = BYTES[dtypes[0]], " or ".join(dtypes)
            quantities.append(
                each(f"kv_cache_{name}_{dtypes[0]}", f"{what}, {names}", "2 · layers · n_kv_heads · d_head · N · bytes",
                     f"2 · {layers} · {heads} · {s.d_head} · {n} · {size}", 2 * layers * heads * s.d_head * n * size)
            )  # fmt: skip
    return quantities


def _sharings(s: Sizes) -> list[tuple[str, str, int]]:
    """Who may share keys and values: a name, a label, and the number of key/value heads."""
    own = s.n_kv_heads
    name = {s.n_heads: "MHA", 1: "MQA"}.get(own, f"GQA of {own}")
    sharings = [("own", f"as it is ({name})", own)]
    if own != s.n_heads:
        sharings.append(("mha", f"MHA ({s.n_heads} key/value heads)", s.n_heads))
    grouped = next((heads for heads in (8, 4, 2) if s.n_heads % heads == 0 and heads not in (own, s.n_heads)), None)
    if grouped is not None and own in (1, s.n_heads):
        sharings.append(("gqa", f"GQA ({grouped} key/value heads)", grouped))
    if own != 1:
        sharings.append(("mqa", "MQA (1 key/value head)", 1))
    return sharings


# Tables and curves ------------------------------------------------------------------------------------------------


def _head_rows(s: Sizes, n: int, size: int) -> list[HeadRow]:
    """Numbers of heads that divide d_model: powers of two, and the model's own."""
    fits = [heads for heads in divisors(s.d_model) if (heads & (heads - 1)) == 0 or heads == s.n_heads]
    return [
        HeadRow(
            n_heads=heads, d_head=s.d_model // heads, scale=(s.d_model // heads) ** -0.5, weights_mha=4 * s.d_model**2,
            weights_mqa=2 * s.d_model**2 + 2 * s.d_model * (s.d_model // heads), scores_bytes=heads * n * n * size,
            chosen=heads == s.n_heads and s.n_heads * s.d_head == s.d_model,
        )
        for heads in fits
        if heads <= max(128, s.n_heads)
    ]  # fmt: skip


def _lengths(n: int) -> tuple[int, ...]:
    top = max(32768, 4 * n)
    return tuple(sorted({n, *(2**k for k in range(5, top.bit_length()))}))


def _curves(s: Sizes, n: int, dtype: str) -> list[Curve]:
    lengths = _lengths(n)
    curves = []
    texts = [{q.name: q for q in _per_text(s, length)} for length in lengths]
    for names, what in (
        (("projections_per_text",), "projections"),
        (("scores_per_text", "values_per_text"), "scores and weighted values"),
        (("feed_forward_per_text",), "feed-forward"),
    ):
        curves.append(Curve("multiply-adds", what, tuple(sum(int(t[name].value) for name in names) for t in texts)))
    memories = [{q.name: int(q.value) for q in _memory(s, length, dtype)} for length in lengths]
    curves.append(Curve("bytes", f"scores of one layer ({dtype})", tuple(m["scores_bytes"] for m in memories)))
    curves.append(Curve("bytes", "log-sum-exp of one layer (tiled)", tuple(m["tiled_bytes"] for m in memories)))
    for _, what, heads in _sharings(s) if s.caching_layers else []:
        per_token = 2 * s.caching_layers * heads * s.d_head * BYTES["float16"]
        curves.append(Curve("bytes", f"KV cache, {what} (float16)", tuple(per_token * length for length in lengths)))
    return curves


def _layers(s: Sizes) -> str:
    return "layers" if s.kind != "encoder-decoder" else "(encoder + 2 · decoder layers)"


def _quantities_in(unit: str) -> Callable[[str, str, str, str, int], Quantity]:
    return lambda name, what, formula, numbers, value: Quantity(name, what, formula, numbers, value, unit)
