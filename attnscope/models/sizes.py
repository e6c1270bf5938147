"""How large a model is, from its configuration alone: no weights, and for the common families no torch either."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from attnscope.errors import AttnscopeError, amount, first_line
from attnscope.models.own.layouts import PREFIXES, Encoder

Config = Mapping[str, Any]

_BY_HAND = "give its sizes, such as --sizes d_model=768,n_heads=12,n_layers=12"


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
    norm_vectors: int = 0  # vectors of d_model that a layer's norms have
    norm_vectors_outside: int = 0  # the same outside of the layers
    unembedding: str = ""  # "tied" (with the embeddings), "own", or "" (none)
    pooler: bool = False  # whether a d_model x d_model map follows the last layer
    # all parameters as the model's own modules have them, where its family is not known here in closed form
    counted: int | None = None
    notes: tuple[str, ...] = ()  # what a reader must know of it, one sentence each

    def __post_init__(self) -> None:
        # Sizes that costs are multiplied by.
        for name in ("d_model", "n_layers", "n_heads", "n_kv_heads", "d_head", "d_ff"):
            value = getattr(self, name)
            least = 0 if name == "d_ff" else 1  # there are models of attention alone
            if value < least:
                raise AttnscopeError(
                    f"{name} is {value}, but must be at least {least}", "give another number"
                )
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
        return _complete(name, source, read(config))
    except KeyError as error:
        raise AttnscopeError(
            f"the configuration of {name} does not say {error.args[0]}", _BY_HAND
        ) from None
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise AttnscopeError(
            f"the configuration of {name} has sizes that make no sense: {error}"
        ) from None


def sizes_by_hand(d_model: int, n_heads: int, n_layers: int, **others: Any) -> Sizes:
    """Return sizes from options: by default a decoder without biases, with a feed-forward width of 4 · d_model."""
    name = f"{amount(n_layers, 'layer')} of {amount(n_heads, 'head')}, d_model {d_model}"
    facts = {"kind": "decoder", "d_model": d_model, "n_heads": n_heads, "n_layers": n_layers, **others}
    if facts.get("vocab_size"):
        facts["unembedding"] = "tied"
    return _complete(name, "the options given", facts)


def _complete(name: str, source: str, facts: Config) -> Sizes:
    """Return sizes with what is usual where nothing is said: every head has keys and values, its share of d_model."""
    # What the configuration says wins over what is usual.
    known = {field: value for field, value in facts.items() if value is not None}
    width = known["d_model"]
    heads = known["n_heads"]
    usual = {"n_kv_heads": heads, "d_embedding": width, "d_ff": 4 * width}
    if "d_head" not in known:
        usual["d_head"] = _divide(width, heads)
    return Sizes(name=name, source=source, **{**usual, **known})


def _divide(d_model: int, n_heads: int) -> int:
    """Return the width of a head where heads share the model's width."""
    if d_model % n_heads:
        raise AttnscopeError(
            f"d_model {d_model} is not divisible by {n_heads} heads", "or give --sizes d_head=N"
        )
    return d_model // n_heads


def change_sizes(sizes: Sizes, **others: Any) -> Sizes:
    """Return sizes with some of them replaced, where they are not None, for a hypothetical model.

    d_head follows d_model / n_heads where only one of these two is given, and key/value heads follow query heads where
    every query head had its own.
    """
    changes = {
        name: value
        for name, value in others.items()
        if value is not None and value != getattr(sizes, name)
    }
    if not changes:
        return sizes
    # Sizes that followed another one before keep following it.
    d_model = changes.get("d_model", sizes.d_model)
    n_heads = changes.get("n_heads", sizes.n_heads)
    if "d_head" not in changes and ("d_model" in changes or "n_heads" in changes):
        changes["d_head"] = _divide(d_model, n_heads)
    if sizes.n_kv_heads == sizes.n_heads:
        changes.setdefault("n_kv_heads", n_heads)
    if sizes.d_embedding == sizes.d_model:
        changes["d_embedding"] = d_model
    # Say what was changed, and what could not follow.
    note = f"{sizes.name} with {', '.join(f'{name} {value}' for name, value in changes.items())}"
    if sizes.counted is not None:
        note += "; what is no attention is left as it was"
    return replace(sizes, **changes, counted=None, notes=(*sizes.notes, note))


# Families ---------------------------------------------------------------------------------------------------------

_WITH_BIASES = {
    "qkv_bias": True,
    "o_bias": True,
    "ff_bias": True,
    "norm_vectors": 4,
    "norm_vectors_outside": 2,
}

_NAMES = {
    "d_model": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "d_head": "head_dim",
    "d_ff": "intermediate_size",
    "vocab_size": "vocab_size",
    "max_tokens": "max_position_embeddings",
}
"""The names of the sizes in most configurations."""

_NAMES_OF_GPT2 = {
    "d_model": "n_embd",
    "n_layers": "n_layer",
    "n_heads": "n_head",
    "d_ff": "n_inner",
    "vocab_size": "vocab_size",
    "max_tokens": "n_positions",
    "n_positions": "n_positions",
}


def _bert(config: Config) -> dict[str, Any]:
    # The native engine knows the defaults of this family.
    encoder = Encoder.of(dict(config))
    return {
        **{field: getattr(encoder, key, None) for field, key in _NAMES.items()},
        **_WITH_BIASES,
        "kind": "encoder",
        "max_tokens": encoder.max_tokens,
        "n_positions": encoder.max_position_embeddings,
        "n_segments": encoder.type_vocab_size,
        "pooler": True,
    }


def _gpt2(config: Config) -> dict[str, Any]:
    unembedding = "tied" if config.get("tie_word_embeddings", True) else "own"
    facts = {field: config.get(key) for field, key in _NAMES_OF_GPT2.items()}
    return {**facts, **_WITH_BIASES, "kind": "decoder", "unembedding": unembedding}


def _llama(config: Config) -> dict[str, Any]:
    # Mistral has no biases, Qwen2 has them at Q, K and V only; Llama's configuration says.
    family = config["model_type"]
    is_llama = family == "llama"
    has_bias = bool(config.get("attention_bias", False))
    return {
        **{field: config.get(key) for field, key in _NAMES.items()},
        "kind": "decoder",
        "ff_matrices": 3,
        "qkv_bias": family == "qwen2" or (is_llama and has_bias),
        "o_bias": is_llama and has_bias,
        "ff_bias": is_llama and bool(config.get("mlp_bias", False)),
        "norm_vectors": 2,
        "norm_vectors_outside": 1,
        "unembedding": "tied" if config.get("tie_word_embeddings", False) else "own",
    }


def _build_to_count(config: Config) -> dict[str, Any]:
    """Return the sizes of any other model: by the names that transformers gives them, its parameters counted."""
    import warnings

    import torch
    from transformers import AutoConfig, AutoModel

    # Build the model without weights: its configuration decides on all shapes.
    settings = dict(config)
    family = settings.pop("model_type", None)
    try:
        with warnings.catch_warnings(), torch.device("meta"):
            warnings.simplefilter("ignore")
            whole = AutoConfig.for_model(family, **settings)
            model: Any = AutoModel.from_config(whole)  # type: ignore[no-untyped-call]
    except Exception as error:  # whatever a stranger's configuration makes transformers raise
        raise AttnscopeError(
            f"transformers cannot build a {family}: {first_line(error)[:160]}", _BY_HAND
        ) from None
    # Read the sizes by transformers' names; the kind shows in the modules or in the class that was saved.
    text = whole.get_text_config()
    facts = {field: getattr(text, key, None) for field, key in _NAMES.items()}
    looks_back = any(getattr(module, "is_causal", False) for module in model.modules())
    if whole.is_encoder_decoder:
        facts["kind"] = "encoder-decoder"
        facts["n_decoder_layers"] = getattr(text, "num_decoder_layers", None) or getattr(
            text, "decoder_layers", None
        )
    elif looks_back or any("CausalLM" in str(kind) for kind in config.get("architectures") or ()):
        facts["kind"] = "decoder"
    else:
        facts["kind"] = "encoder"
    # All gated models of transformers have this name for it.
    facts["ff_matrices"] = (
        3 if any(path.endswith("gate_proj") for path, _ in model.named_modules()) else 2
    )
    facts["vocab_size"] = None
    facts["counted"] = sum(parameter.numel() for parameter in model.parameters())
    facts["notes"] = (
        "attention is counted as W_Q, W_K, W_V and W_O in every layer, whatever else there is in it",
    )
    return facts


_FAMILIES: dict[str, Callable[[Config], dict[str, Any]]] = {
    **dict.fromkeys(PREFIXES, _bert),
    "gpt2": _gpt2,
    **dict.fromkeys(("llama", "mistral", "qwen2"), _llama),
}

# Presets ----------------------------------------------------------------------------------------------------------


def _read_table(family: str, names: Mapping[str, str], numbers: str, name: str, source: str) -> Sizes:
    """Return the sizes of a published model, from its numbers in the order of the configuration's names."""
    # "-" leaves a number to the family's default.
    known = zip(names.values(), numbers.split(), strict=False)
    config = {key: int(number) for key, number in known if number != "-"}
    return sizes_of({"model_type": family, **config}, name, source)


_TOUVRON = "Touvron et al. 2023 (Llama 2), table 1"
_SPARSE = "GPT-3 alternates dense with locally banded sparse attention; dense attention is counted"
_GPT3 = _read_table(
    "gpt2", _NAMES_OF_GPT2, "12288 96 96 - 50257 2048", "gpt3", "Brown et al. 2020, table 2.1 (175 B)"
)

PRESETS: dict[str, Sizes] = {
    "bert-base": sizes_of({"model_type": "bert"}, "bert-base", "Devlin et al. 2019, section 3"),
    "gpt2": _read_table(
        "gpt2", _NAMES_OF_GPT2, "768 12 12 - 50257 1024", "gpt2", "Radford et al. 2019, table 2"
    ),
    "gpt3": replace(_GPT3, notes=(_SPARSE,)),
    "llama-2-7b": _read_table(
        "llama", _NAMES, "4096 32 32 - - 11008 32000 4096", "llama-2-7b", _TOUVRON
    ),
    "llama-2-70b": _read_table(
        "llama", _NAMES, "8192 80 64 8 - 28672 32000 4096", "llama-2-70b", _TOUVRON
    ),
}
"""Published models by a short name."""
