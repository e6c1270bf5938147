"""What does this model's attention cost? From its sizes alone: parameters, MACs and memory.

A MAC (multiply-accumulate) is one multiplication and one addition in a matrix product, two floating-point operations.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import numpy as np

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
from attnscope.questions.cost import Cost
from attnscope.results.storage import plain
from attnscope.results.table import Table

BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1}
"""Bytes of a number, by its precision."""

DEFAULT_TOKENS = 2048
"""The length of the text for a model without a limit."""

SIZE_OPTIONS = ("d_model", "n_heads", "n_layers", "n_kv_heads", "d_head", "d_ff", "vocab_size")
"""The sizes that may replace those of a model."""

_NEEDED = SIZE_OPTIONS[:3]

_UNITS = {"parameters": "parameters", "per_token": "MACs", "per_text": "MACs", "memory": "bytes", "kv_cache": "bytes"}

Row = dict[str, Any]
"""A row of the table of quantities."""


def find_sizes(spec: str | None = None, **changes: int | None) -> Sizes:
    """Return the sizes of a preset, of a model by its configuration, or by hand.

    Args:
        spec: A preset, a known name, a folder, a config.json, or a Hub id; None = the sizes by hand.
        changes: Some of `SIZE_OPTIONS`, which replace the model's.

    Raises:
        UsageError: Neither a model nor d_model, n_heads and n_layers are given.
        AttnscopeError: There is no such model, or its sizes make no sense.
    """
    unknown = set(changes) - set(SIZE_OPTIONS)
    if unknown:
        raise UsageError(f"there is no size {unknown.pop()!r}", f"there are: {', '.join(SIZE_OPTIONS)}")
    if spec is None:
        d_model, n_heads, n_layers = (changes.get(name) for name in _NEEDED)
        if d_model is None or n_heads is None or n_layers is None:
            raise UsageError(
                "no model is given, nor all of --d-model, --n-heads and --n-layers",
                f"presets: {', '.join(PRESETS)}; or a folder, or a Hub id",
            )
        others = {name: value for name, value in changes.items() if name not in _NEEDED}
        return sizes_by_hand(d_model, n_heads, n_layers, **others)
    if spec in PRESETS:
        return change_sizes(PRESETS[spec], **changes)
    try:
        source = find_config(spec)
    except AttnscopeError as error:
        close = difflib.get_close_matches(spec.lower(), PRESETS, n=1, cutoff=0.75)
        hint = f"did you mean the preset {close[0]}?" if close else f"{error.hint}; presets: {', '.join(PRESETS)}"
        raise AttnscopeError(error.message, hint.removeprefix("; ")) from None
    return change_sizes(sizes_of(configuration(source), source.name, source.origin), **changes)


@with_plain_torch
def cost(model: str | Sizes, n_tokens: int | None = None, *, dtype: str = "float16", **changes: int | None) -> Cost:
    """Count what a model's attention costs.

    Only MACs of matrix products count: norms, activations and additions are small.

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

    # The quantities, then what other numbers of heads and other lengths would change.
    quantities = [
        *_parameters(sizes),
        *_per_token(sizes, n),
        *_per_text(sizes, n),
        *_memory(sizes, n, dtype),
        *_kv_cache(sizes, n),
    ]
    lengths = _lengths(n)
    curves = _curves(sizes, lengths, dtype)
    tables = {
        "quantities": Table.of(Cost.TABLES["quantities"], quantities),
        "heads": Table.of(Cost.TABLES["heads"], list(_heads(sizes, n, BYTES[dtype]))),
        "lengths": Table.of_arrays(Cost.TABLES["lengths"], n_tokens=lengths),
        "curves": Table.of(Cost.TABLES["curves"], [{"panel": panel, "what": what} for panel, what in curves]),
    }
    options = {"sizes": plain(asdict(sizes)), "n_tokens": n, "dtype": dtype, "notes": _notes(sizes, n)}
    run = {"model": sizes.name, "source": sizes.source}
    return Cost(run, {}, options, tables, {"curve_values": np.array(list(curves.values()), np.float64)})


def _notes(sizes: Sizes, n: int) -> list[str]:
    """Return what a reader must know."""
    notes = list(sizes.notes)
    if sizes.kind != "encoder":
        notes.append(
            "a causal mask needs half of the scores and values of a text, N·(N + 1)/2 of N²; kernels that skip the "
            "rest compute so much, dense ones all"
        )
    if sizes.max_tokens and n > sizes.max_tokens:
        notes.append(f"{sizes.name} takes {amount(sizes.max_tokens, 'token')}; {n:,} are asked for")
    return notes


def _row(group: str, name: str, what: str, formula: str, numbers: str, value: float, unit: str = "") -> Row:
    """Return a quantity; its unit is that of its group unless it has another."""
    unit = unit or _UNITS[group]
    names = ("group", "name", "what", "formula", "numbers", "value", "unit")
    return dict(zip(names, (group, name, what, formula, numbers, value, unit), strict=True))


# Parameters -------------------------------------------------------------------------------------------------------


def _parameters(s: Sizes) -> list[Row]:
    """Count parameters: those of attention, the others, all, and attention's share."""
    weights = attention_weights(s)
    biases = attention_biases(s)
    layers = s.n_attentions
    formula = "4 · d_model²"
    numbers = f"4 · {s.d_model}²"
    if s.n_kv_heads != s.n_heads or s.n_heads * s.d_head != s.d_model:
        formula = "2 · d_model · d_head · (n_heads + n_kv_heads)"
        numbers = f"2 · {s.d_model} · {s.d_head} · ({s.n_heads} + {s.n_kv_heads})"
    of_layer = _row(
        "parameters", "projections_per_layer", "W_Q, W_K, W_V and W_O of one layer", formula, numbers, weights
    )
    rows = [
        _row(
            "parameters", "projections", "projections, all layers",
            f"{_layers(s)} · those of one layer", f"{layers} · {weights:,}", layers * weights,
        ),
        *_projection_biases(s, layers * biases),
        *_other_parameters(s),
    ]  # fmt: skip
    total = s.counted
    formula = "counted in the model, built without weights"
    if total is None:
        total = sum(int(row["value"]) for row in rows)
        formula = "the sum"
    is_whole = s.counted is not None or bool(s.vocab_size)
    what = "all parameters" if is_whole else "all but the embeddings"
    attention = layers * (weights + biases)
    share = _row(
        "parameters", "attention_share", "attention's share of them", "(projections + biases) / all",
        f"{attention:,} / {total:,}", attention / total, "share",
    )  # fmt: skip
    return [of_layer, *rows, _row("parameters", "parameters", what, formula, "", total), share]


def _projection_biases(s: Sizes, value: int) -> Iterator[Row]:
    """Count the biases of projections, where there are any."""
    terms = []
    numbers = []
    if s.qkv_bias:
        terms.append("d_head · (n_heads + 2 · n_kv_heads)")
        numbers.append(f"{s.d_head} · ({s.n_heads} + 2 · {s.n_kv_heads})")
    if s.o_bias:
        terms.append("d_model")
        numbers.append(f"{s.d_model}")
    if value:
        yield _row(
            "parameters", "projection_biases", "biases of projections, all layers",
            f"{_layers(s)} · ({' + '.join(terms)})", f"{s.n_attentions} · ({' + '.join(numbers)})", value,
        )  # fmt: skip


def _other_parameters(s: Sizes) -> Iterator[Row]:
    """Count the parameters beside attention, by closed forms; nothing where the model was built and counted."""
    if s.counted is not None:
        return

    def row(*parts: Any) -> Row:
        return _row("parameters", *parts)

    # Feed-forward layers.
    n_blocks = s.n_layers + s.n_decoder_layers
    formula = "layers · (ff_matrices · d_model · d_ff"
    numbers = f"{n_blocks} · ({s.ff_matrices} · {s.d_model} · {s.d_ff}"
    if s.ff_bias:
        ups = "" if s.ff_matrices == 2 else f"{s.ff_matrices - 1} · "
        formula += f" + {ups}d_ff + d_model"
        numbers += f" + {ups}{s.d_ff} + {s.d_model}"
    ff_bias = s.ff_bias * ((s.ff_matrices - 1) * s.d_ff + s.d_model)
    value = n_blocks * (s.ff_matrices * s.d_model * s.d_ff + ff_bias)
    yield row("feed_forward", "feed-forward, all layers", f"{formula})", f"{numbers})", value)

    # Embeddings of tokens, positions and segments.
    if s.vocab_size:
        numbers = f"{s.vocab_size} · {s.d_embedding}"
        yield row("embeddings", "token embeddings", "vocab_size · d_embedding", numbers, s.vocab_size * s.d_embedding)
        n_rows = s.n_positions + s.n_segments
        if n_rows:
            yield row(
                "position_embeddings", "position and segment embeddings", "(n_positions + n_segments) · d_embedding",
                f"({s.n_positions} + {s.n_segments}) · {s.d_embedding}", n_rows * s.d_embedding,
            )  # fmt: skip
        if s.d_embedding != s.d_model:
            yield row(
                "embedding_projection", "from embeddings to layers", "d_embedding · d_model + d_model",
                f"{s.d_embedding} · {s.d_model} + {s.d_model}", (s.d_embedding + 1) * s.d_model,
            )  # fmt: skip
    # Norms before and after the layers; those on embeddings are as wide as these.
    if s.norm_vectors:
        in_layers = s.norm_vectors * s.n_layers
        outside = s.norm_vectors_outside * (s.d_embedding if s.kind == "encoder" else s.d_model)
        yield row(
            "norms", "norms", "vectors in the layers · d_model + those outside",
            f"{in_layers} · {s.d_model} + {outside}", in_layers * s.d_model + outside,
        )  # fmt: skip

    # What comes after the layers.
    if s.pooler:
        yield row("pooler", "pooler", "d_model² + d_model", f"{s.d_model}² + {s.d_model}", s.d_model**2 + s.d_model)
    if s.unembedding == "own" and s.vocab_size:
        numbers = f"{s.vocab_size} · {s.d_model}"
        yield row("unembedding", "unembedding", "vocab_size · d_model", numbers, s.vocab_size * s.d_model)


def _layers(s: Sizes) -> str:
    return "layers" if s.kind != "encoder-decoder" else "(encoder + 2 · decoder layers)"


# MACs -------------------------------------------------------------------------------------------------------------


def _per_token(s: Sizes, n: int) -> list[Row]:
    """Count the MACs for one token in a text of n tokens; of an encoder-decoder, for one of each side."""
    layers = s.n_attentions
    weights = attention_weights(s)
    width = s.n_heads * s.d_head
    feed = s.n_layers
    what = "per token"
    if s.kind == "encoder-decoder":
        feed += s.n_decoder_layers
        what = "one token of the source and one of the target"

    def row(name: str, *parts: Any) -> Row:
        return _row("per_token", name, *parts)

    by_key = f"{_layers(s)} · n_heads · d_head · N"
    numbers = f"{layers} · {s.n_heads} · {s.d_head} · {n}"
    rows = [
        row(
            "projections_per_token", "projections (W_Q, W_K, W_V, W_O)", f"{_layers(s)} · their parameters",
            f"{layers} · {weights:,}", layers * weights,
        ),
        row("scores_per_token", "scores (q · k with N keys)", by_key, numbers, layers * width * n),
        row("values_per_token", "weighted values (with N values)", by_key, numbers, layers * width * n),
        row(
            "feed_forward_per_token", "feed-forward", "layers · ff_matrices · d_model · d_ff",
            f"{feed} · {s.ff_matrices} · {s.d_model} · {s.d_ff}", feed * s.ff_matrices * s.d_model * s.d_ff,
        ),
    ]  # fmt: skip
    if s.unembedding and s.vocab_size:
        numbers = f"{s.d_model} · {s.vocab_size}"
        value = s.d_model * s.vocab_size
        rows.append(row("unembedding_per_token", "unembedding", "d_model · vocab_size", numbers, value))
    rows.append(row("per_token", f"all MACs, {what}", "the sum", "", sum(int(each["value"]) for each in rows)))
    exponentials = layers * s.n_heads * n
    numbers = f"{layers} · {s.n_heads} · {n}"
    formula = f"{_layers(s)} · n_heads · N"
    rows.append(row("exponentials_per_token", "softmax, in addition", formula, numbers, exponentials, "exponentials"))
    return rows


def _per_text(s: Sizes, n: int) -> Iterator[Row]:
    """Count the MACs for a text of n tokens; of an encoder-decoder, and a target of n."""
    for row in _per_token(s, n):
        name = row["name"].replace("per_token", "per_text")
        what = "all MACs, per text" if name == "per_text" else row["what"]
        value = int(row["value"])
        yield _row("per_text", name, what, "N · the same per token", f"{n} · {value:,}", n * value, row["unit"])


# Memory -----------------------------------------------------------------------------------------------------------


def _memory(s: Sizes, n: int, dtype: str) -> list[Row]:
    """Count the memory of the scores: kept whole, and in tiles."""
    size = BYTES[dtype]
    one_layer = s.n_heads * n * n * size
    return [
        _row(
            "memory", "scores_bytes", "scores of one layer, kept whole", f"n_heads · N² · {size} bytes ({dtype})",
            f"{s.n_heads} · {n}² · {size}", one_layer,
        ),
        _row(
            "memory", "scores_bytes_all_layers", "of all layers, as training keeps them", f"{_layers(s)} · one layer's",
            f"{s.n_attentions} · {one_layer:,}", s.n_attentions * one_layer,
        ),
        _row(
            "memory", "tiled_bytes", "tiled attention: log-sum-exp of one layer", "n_heads · N · 4 bytes (float32)",
            f"{s.n_heads} · {n} · 4", s.n_heads * n * 4,
        ),
        _row(
            "memory", "tiled_ratio", "how many times less that is", f"N · {size} / 4", f"{n} · {size} / 4",
            n * size / 4, "times",
        ),
    ]  # fmt: skip


def _kv_cache(s: Sizes, n: int) -> Iterator[Row]:
    """Count keys and values of a text of n, by sharing and by precision; an encoder keeps none."""
    layers = s.caching_layers
    if not layers:
        return
    formula = "2 · layers · n_kv_heads · d_head · N · bytes"
    for name, what, heads in _sharings(s):
        for dtype, names in (("float32", "float32"), ("float16", "float16 or bfloat16"), ("int8", "int8")):
            size = BYTES[dtype]
            numbers = f"2 · {layers} · {heads} · {s.d_head} · {n} · {size}"
            value = 2 * layers * heads * s.d_head * n * size
            yield _row("kv_cache", f"kv_cache_{name}_{dtype}", f"{what}, {names}", formula, numbers, value)


def _sharings(s: Sizes) -> list[tuple[str, str, int]]:
    """Return who may share keys and values: a name, a label, and the number of key/value heads."""
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


# What other numbers of heads and other lengths would change ---------------------------------------------------------


def _heads(s: Sizes, n: int, size: int) -> Iterator[Row]:
    """Yield numbers of heads that divide d_model: powers of two, and the model's own."""
    for heads in divisors(s.d_model):
        is_power = heads & (heads - 1) == 0
        if heads > max(128, s.n_heads) or not (is_power or heads == s.n_heads):
            continue
        d_head = s.d_model // heads
        yield {
            "n_heads": heads,
            "d_head": d_head,
            "scale": d_head**-0.5,
            "projections": 4 * s.d_model**2,
            "projections_mqa": 2 * s.d_model**2 + 2 * s.d_model * d_head,
            "scores_bytes": heads * n * n * size,
            "chosen": heads == s.n_heads and s.n_heads * s.d_head == s.d_model,
        }


def _lengths(n: int) -> list[int]:
    top = max(32768, 4 * n)
    return sorted({n, *(2**power for power in range(5, top.bit_length()))})


def _curves(s: Sizes, lengths: list[int], dtype: str) -> dict[tuple[str, str], list[float]]:
    """Return curves by panel and name: the values at each length."""
    texts = [{row["name"]: row["value"] for row in _per_text(s, length)} for length in lengths]
    memories = [{row["name"]: row["value"] for row in _memory(s, length, dtype)} for length in lengths]
    curves = {
        ("MACs", "projections"): [text["projections_per_text"] for text in texts],
        ("MACs", "scores and weighted values"): [text["scores_per_text"] + text["values_per_text"] for text in texts],
        ("MACs", "feed-forward"): [text["feed_forward_per_text"] for text in texts],
        ("bytes", f"scores of one layer ({dtype})"): [memory["scores_bytes"] for memory in memories],
        ("bytes", "log-sum-exp of one layer (tiled)"): [memory["tiled_bytes"] for memory in memories],
    }
    for _, what, heads in _sharings(s) if s.caching_layers else []:
        per_token = 2 * s.caching_layers * heads * s.d_head * BYTES["float16"]
        curves["bytes", f"KV cache, {what} (float16)"] = [per_token * length for length in lengths]
    return curves
