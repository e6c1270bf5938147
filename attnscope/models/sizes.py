"""How large a model is, from its configuration alone: no weights, and for the common families no torch either."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from attnscope.errors import AttnscopeError, amount, first_line
from attnscope.models.own.layouts import LAYOUTS, Encoder

Config = Mapping[str, Any]


@dataclass(frozen=True)
class Sizes:
    """The sizes of a transformer that its costs follow from."""

    name: str
    source: str  # where the numbers come from
    kind: str  # "encoder", "decoder" or "encoder-decoder"
    d_model: int
    n_layers: int  # layers; of an encoder-decoder, the encoder's
    n_heads: int
    n_kv_heads: int
    d_head: int
    d_ff: int  # width within the feed-forward network; 0 = there is none
    ff_matrices: int = 2  # 2 (up and down), or 3 (gated)
    vocab_size: int = 0  # tokens in the vocabulary; 0 = not known, and left out of all sums
    max_tokens: int | None = None
    n_decoder_layers: int = 0  # an encoder-decoder's, else 0
    qkv_bias: bool = False  # whether W_Q, W_K and W_V have biases
    o_bias: bool = False
    ff_bias: bool = False
    d_embedding: int = 0
    n_positions: int = 0  # rows of a table of learned positions; 0 = there is none
    n_segments: int = 0  # rows of a table of segments
    # vectors of d_model that a layer's norms have; a decoder's layer beside an encoder has one more norm
    norm_vectors: int = 0
    norm_vectors_outside: int = 0  # the same outside of the layers
    relative_buckets: int = 0  # position biases a head, by distance, once a stack (T5)
    unembedding: str = ""  # "tied" (with the embeddings), "own", or "" (none)
    pooler: bool = False  # whether a d_model x d_model map follows the last layer
    # all parameters as the model's own modules have them, where its family is not known here in closed form
    counted: int | None = None
    notes: tuple[str, ...] = ()  # what a reader must know of it, one sentence each

    def __post_init__(self) -> None:
        for name in ("d_model", "n_layers", "n_heads", "n_kv_heads", "d_head", "d_ff"):
            value, least = getattr(self, name), int(name != "d_ff")  # there are models of attention alone
            if value < least:
                raise AttnscopeError(f"{name} is {value}, but must be at least {least}", "give another number")
        if self.n_heads % self.n_kv_heads:
            raise AttnscopeError(
                f"{self.n_heads} query heads are not a multiple of {self.n_kv_heads} key/value heads",
                "give numbers that divide",
            )

    @property
    def n_attentions(self) -> int:
        """Return how many attentions there are in all: a decoder's layer beside an encoder has two."""
        return self.n_layers + 2 * self.n_decoder_layers

    @property
    def caching_layers(self) -> int:
        """Return how many attentions keep keys and values while a text is written: none in an encoder."""
        return {"encoder": 0, "decoder": self.n_layers}.get(self.kind, 2 * self.n_decoder_layers)


def sizes_of(config: Config, name: str, source: str) -> Sizes:
    """Return the sizes of a model, from what its config.json holds.

    Families that are not known here in closed form are built without weights (on torch's meta device) and counted.
    """
    read = _FAMILIES.get(str(config.get("model_type")), _build_to_count)
    try:
        return read(config, name, source)
    except KeyError as error:
        raise AttnscopeError(
            f"the configuration of {name} does not say {error.args[0]}", "give its sizes as options, such as --d-model"
        ) from None
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise AttnscopeError(f"the configuration of {name} has sizes that make no sense: {error}") from None


def sizes_by_hand(d_model: int, n_heads: int, n_layers: int, **others: Any) -> Sizes:
    """Sizes that a user gives: a decoder without biases, feed-forward of 4 · d_model, if not said otherwise."""
    sizes = {name: value for name, value in others.items() if value is not None}
    if "d_head" not in sizes:
        sizes["d_head"] = _divide(d_model, n_heads)
    return Sizes(
        name=f"{amount(n_layers, 'layer')} of {amount(n_heads, 'head')}, d_model {d_model}",
        source="the options given",
        kind="decoder",
        d_model=d_model,
        n_layers=n_layers,
        n_heads=n_heads,
        **(
            {
                "n_kv_heads": n_heads,
                "d_ff": 4 * d_model,
                "d_embedding": d_model,
                "unembedding": "tied" if sizes.get("vocab_size") else "",
            }
            | sizes
        ),
    )


def _divide(d_model: int, n_heads: int) -> int:
    """Return the width of a head where heads share the model's width."""
    if d_model % n_heads:
        raise AttnscopeError(f"d_model {d_model} is not divisible by {n_heads} heads", "or give --d-head")
    return d_model // n_heads


def change_sizes(sizes: Sizes, **others: Any) -> Sizes:
    """Sizes with some of them replaced, where they are not None: what would be, if.

    d_head follows d_model / n_heads where only one of these two is given, and key/value heads follow query heads where
    every query head had its own.
    """
    changes = {name: value for name, value in others.items() if value is not None and value != getattr(sizes, name)}
    if not changes:
        return sizes
    d_model = changes.get("d_model", sizes.d_model)
    n_heads = changes.get("n_heads", sizes.n_heads)
    if "d_head" not in changes and ("d_model" in changes or "n_heads" in changes):
        changes["d_head"] = _divide(d_model, n_heads)
    if "n_heads" in changes and sizes.n_kv_heads == sizes.n_heads:
        changes.setdefault("n_kv_heads", n_heads)
    if "d_model" in changes and sizes.d_embedding == sizes.d_model:
        changes["d_embedding"] = d_model
    note = f"{sizes.name} with {', '.join(f'{name} {value}' for name, value in changes.items())}"
    if sizes.counted is not None:
        note += "; what is no attention is left as it was"
    return replace(sizes, **changes, counted=None, notes=(*sizes.notes, note))


def attention_weights(sizes: Sizes) -> int:
    """Weights of W_Q, W_K, W_V and W_O of one attention, without biases."""
    return 2 * sizes.d_model * sizes.d_head * (sizes.n_heads + sizes.n_kv_heads)


def attention_biases(sizes: Sizes) -> int:
    """Biases of the same."""
    return sizes.qkv_bias * sizes.d_head * (sizes.n_heads + 2 * sizes.n_kv_heads) + sizes.o_bias * sizes.d_model


# Families ---------------------------------------------------------------------------------------------------------


def _bert(config: Config, name: str, source: str) -> Sizes:
    encoder = Encoder.of(dict(config))
    width = encoder.hidden_size
    heads = encoder.num_attention_heads
    return Sizes(
        name=name,
        source=source,
        kind="encoder",
        d_model=width,
        n_layers=encoder.num_hidden_layers,
        n_heads=heads,
        n_kv_heads=heads,
        d_head=width // heads,
        d_ff=encoder.intermediate_size,
        vocab_size=encoder.vocab_size,
        max_tokens=encoder.max_tokens,
        qkv_bias=True,
        o_bias=True,
        ff_bias=True,
        d_embedding=encoder.embedding_size,
        n_positions=encoder.max_position_embeddings,
        n_segments=encoder.type_vocab_size if encoder.layout.segment else 0,
        norm_vectors=4,
        norm_vectors_outside=2,
        pooler=config["model_type"] not in ("distilbert", "electra"),
    )


def _gpt2(config: Config, name: str, source: str) -> Sizes:
    width = int(config.get("n_embd", 768))
    heads = int(config.get("n_head", 12))
    positions = int(config.get("n_positions", 1024))
    return Sizes(
        name=name,
        source=source,
        kind="decoder",
        d_model=width,
        n_layers=int(config.get("n_layer", 12)),
        n_heads=heads,
        n_kv_heads=heads,
        d_head=width // heads,
        d_ff=int(config.get("n_inner") or 4 * width),
        vocab_size=int(config.get("vocab_size", 50257)),
        max_tokens=positions,
        qkv_bias=True,
        o_bias=True,
        ff_bias=True,
        d_embedding=width,
        n_positions=positions,
        norm_vectors=4,
        norm_vectors_outside=2,
        unembedding="tied" if config.get("tie_word_embeddings", True) else "own",
    )


def _llama(config: Config, name: str, source: str) -> Sizes:
    width = int(config["hidden_size"])
    heads = int(config["num_attention_heads"])
    family = config["model_type"]
    with_bias = bool(config.get("attention_bias", False)) if family == "llama" else family == "qwen2"
    return Sizes(
        name=name,
        source=source,
        kind="decoder",
        d_model=width,
        n_layers=int(config["num_hidden_layers"]),
        n_heads=heads,
        n_kv_heads=int(config.get("num_key_value_heads") or heads),
        d_head=int(config.get("head_dim") or width // heads),
        d_ff=int(config["intermediate_size"]),
        ff_matrices=3,
        vocab_size=int(config["vocab_size"]),
        max_tokens=config.get("max_position_embeddings"),
        qkv_bias=with_bias,
        o_bias=with_bias and family == "llama",
        ff_bias=bool(config.get("mlp_bias", False)) and family == "llama",
        d_embedding=width,
        norm_vectors=2,
        norm_vectors_outside=1,
        unembedding="tied" if config.get("tie_word_embeddings", False) else "own",
    )


def _t5(config: Config, name: str, source: str) -> Sizes:
    heads = int(config.get("num_heads", 8))
    layers = int(config.get("num_layers", 6))
    gated = str(config.get("feed_forward_proj", "relu")).startswith("gated")
    return Sizes(
        name=name,
        source=source,
        kind="encoder-decoder",
        d_model=int(config.get("d_model", 512)),
        n_layers=layers,
        n_decoder_layers=int(config.get("num_decoder_layers") or layers),
        n_heads=heads,
        n_kv_heads=heads,
        d_head=int(config.get("d_kv", 64)),
        d_ff=int(config.get("d_ff", 2048)),
        ff_matrices=3 if gated else 2,
        vocab_size=int(config.get("vocab_size", 32128)),
        d_embedding=int(config.get("d_model", 512)),
        norm_vectors=2,
        norm_vectors_outside=2,
        relative_buckets=int(config.get("relative_attention_num_buckets", 32)),
        unembedding="tied" if config.get("tie_word_embeddings", True) else "own",
    )


_FAMILIES: dict[str, Callable[[Config, str, str], Sizes]] = {
    **dict.fromkeys(LAYOUTS, _bert),
    "gpt2": _gpt2,
    "llama": _llama,
    "mistral": _llama,
    "qwen2": _llama,
    "t5": _t5,
}


def _build_to_count(config: Config, name: str, source: str) -> Sizes:
    """Return the sizes of any other model: by the names that transformers gives them, its parameters counted."""
    import warnings

    import torch
    from transformers import AutoConfig, AutoModel

    settings = dict(config)
    family = settings.pop("model_type", None)
    if not isinstance(family, str):
        raise AttnscopeError(f"the configuration of {name} names no model_type", "give its sizes as options")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            transformers_config = AutoConfig.for_model(family, **settings)
            with torch.device("meta"):
                model: Any = AutoModel.from_config(transformers_config)  # type: ignore[no-untyped-call]
    except Exception as error:  # whatever a stranger's configuration makes transformers raise
        raise AttnscopeError(
            f"transformers cannot build {name} ({family}): {first_line(error)[:160]}",
            "give its sizes as options, such as --d-model",
        ) from None
    text = transformers_config.get_text_config()
    heads = int(text.num_attention_heads)
    width = int(text.hidden_size)
    modules = {path: module for path, module in model.named_modules() if type(module).__name__.endswith("Attention")}
    outer = [m for path, m in modules.items() if not any(path.startswith(f"{other}.") for other in modules)]
    n_weights = sum(parameter.numel() for module in outer for parameter in module.parameters() if parameter.ndim == 2)
    looks_back = any(getattr(module, "is_causal", False) for module in outer)
    writes = looks_back or any("CausalLM" in str(kind) for kind in config.get("architectures") or ())
    is_both = transformers_config.is_encoder_decoder
    sizes = Sizes(
        name=name,
        source=source,
        kind="encoder-decoder" if is_both else "decoder" if writes else "encoder",
        d_model=width,
        n_layers=int(text.num_hidden_layers),
        n_heads=heads,
        n_kv_heads=int(getattr(text, "num_key_value_heads", None) or heads),
        d_head=int(getattr(text, "head_dim", None) or width // heads),
        d_ff=int(getattr(text, "intermediate_size", None) or 4 * width),
        # All such models of transformers have this name for it.
        ff_matrices=3 if any(path.endswith("gate_proj") for path, _ in model.named_modules()) else 2,
        n_decoder_layers=int(getattr(text, "decoder_layers", 0) or 0) if is_both else 0,
        max_tokens=getattr(text, "max_position_embeddings", None),
        d_embedding=width,
        counted=sum(parameter.numel() for parameter in model.parameters()),
    )
    if outer and n_weights != attention_weights(sizes) * sizes.n_attentions:
        note = (
            f"its modules named Attention hold {n_weights:,} weights: this architecture ({family}) is not just W_Q, "
            "W_K, W_V and W_O in every layer"
        )
        sizes = replace(sizes, notes=(note,))
    return sizes


# Presets ----------------------------------------------------------------------------------------------------------

PRESETS: dict[str, Sizes] = {
    "bert-base": _bert(
        {"model_type": "bert"},
        "bert-base",
        "Devlin et al. 2019, section 3; config.json of google-bert/bert-base-uncased",
    ),
    "gpt2": _gpt2(
        {}, "gpt2", "Radford et al. 2019, table 2 (124 M; there as 117 M); config.json of openai-community/gpt2"
    ),
    "gpt3": replace(
        _gpt2(
            {"n_embd": 12288, "n_head": 96, "n_layer": 96, "n_positions": 2048},
            "gpt3",
            "Brown et al. 2020, table 2.1 (175 B) and section 2.1; vocabulary of GPT-2",
        ),
        notes=("GPT-3 alternates dense with locally banded sparse attention; dense attention is counted",),
    ),
    "llama-2-7b": _llama(
        {
            "model_type": "llama",
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "intermediate_size": 11008,
            "vocab_size": 32000,
            "max_position_embeddings": 4096,
        },
        "llama-2-7b",
        "Touvron et al. 2023 (Llama 2), table 1; config.json of meta-llama/Llama-2-7b-hf",
    ),
    "llama-2-70b": _llama(
        {
            "model_type": "llama",
            "hidden_size": 8192,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "num_hidden_layers": 80,
            "intermediate_size": 28672,
            "vocab_size": 32000,
            "max_position_embeddings": 4096,
        },
        "llama-2-70b",
        "Touvron et al. 2023 (Llama 2), table 1 and section 2.2; config.json of meta-llama/Llama-2-70b-hf",
    ),
}
"""Published models by a short name."""


def divisors(number: int) -> list[int]:
    """All divisors of a number, ascending."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})
