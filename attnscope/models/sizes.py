"""Read the sizes of a model from its configuration: without weights, and for the common families without torch.

The costs of a model (parameters, memory, FLOPs) follow from its `Sizes`; `studies.cost` computes them. Each family of
models, such as GPT-2, has a function here that translates its configuration to fields of `Sizes`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from attnscope.errors import AttnscopeError, amount, first_line
from attnscope.models.own.layouts import PREFIXES, Config, EncoderSettings

_SIZES_HINT = "give its sizes, such as --sizes d_model=768,n_heads=12,n_layers=12"


@dataclass(frozen=True)
class Sizes:
    """The sizes of a transformer from which its costs are computed."""

    # The model's name
    name: str
    # Where the numbers come from, such as a paper or a folder
    source: str
    # "encoder", "decoder" or "encoder-decoder"
    kind: str
    # Width of the hidden states
    d_model: int
    # Layers; of an encoder-decoder, the encoder's
    n_layers: int
    # Query heads of a layer
    n_heads: int
    # Key/value heads of a layer
    n_kv_heads: int
    # Width of a head
    d_head: int
    # Width within the feed-forward network; 0 = there is none
    d_ff: int
    # Matrices of the feed-forward network: 2 (up and down), or 3 (gated)
    ff_matrices: int = 2
    # Tokens in the vocabulary; 0 = not known, and left out of all sums
    vocab_size: int = 0
    # The longest text; None = not known
    max_tokens: int | None = None
    # Layers of an encoder-decoder's decoder; else 0
    n_decoder_layers: int = 0
    # Whether W_Q, W_K and W_V have biases
    qkv_bias: bool = False
    # Whether W_O has a bias
    o_bias: bool = False
    # Whether the feed-forward network has biases
    ff_bias: bool = False
    # Width of the token embedding
    d_embedding: int = 0
    # Rows of the table of learned position embeddings; 0 = there is no table
    n_positions: int = 0
    # Rows of the table of segment embeddings; 0 = there is no table
    n_segments: int = 0
    # The number of gains and biases of the norms of a layer, which are vectors of d_model numbers
    norm_vectors: int = 0
    # The number of gains and biases of norms outside of layers
    norm_vectors_outside: int = 0
    # "tied" (it shares the weights of the token embedding), "own" (it has weights of its own), or "" (no unembedding)
    unembedding: str = ""
    # Whether a d_model x d_model linear map follows the last layer
    pooler: bool = False
    # The number of all parameters, counted in the model as transformers builds it; None = computed from the sizes.
    # Records save the fields of this class by name.
    counted: int | None = None
    # What a reader of the numbers must know, one sentence each
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("d_model", "n_layers", "n_heads", "n_kv_heads", "d_head", "d_ff"):
            value = getattr(self, name)
            # A model of attention alone has no feed-forward network.
            min_value = 0 if name == "d_ff" else 1
            if value < min_value:
                raise AttnscopeError(
                    f"{name} is {value}, but must be at least {min_value}", "give another number"
                )
        if self.n_heads % self.n_kv_heads:
            raise AttnscopeError(
                f"{self.n_heads} query heads are not a multiple of {self.n_kv_heads} key/value heads",
                "give numbers that divide",
            )

    @property
    def n_attentions(self) -> int:
        """Return the number of attentions. A decoder layer of an encoder-decoder has two: self- and cross-attention."""
        return self.n_layers + 2 * self.n_decoder_layers

    @property
    def caching_layers(self) -> int:
        """Return the number of attentions that keep keys and values (the KV cache) while a text is generated."""
        if self.kind == "encoder":
            return 0
        return self.n_layers if self.kind == "decoder" else 2 * self.n_decoder_layers


def sizes_of(config: Config, name: str, source: str) -> Sizes:
    """Return the sizes of a model from the content of its config.json.

    If `_READERS_BY_FAMILY` lacks the model's family, transformers builds the model without weights, on torch's meta
    device, to count its parameters.
    """
    read_family = _READERS_BY_FAMILY.get(str(config.get("model_type")), _build_and_count)
    try:
        return _make_sizes(name, source, read_family(config))
    # A reader indexes the configuration only by keys that it must have.
    except KeyError as error:
        raise AttnscopeError(
            f"the configuration of {name} does not say {error.args[0]}", _SIZES_HINT
        ) from None
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise AttnscopeError(
            f"the configuration of {name} has sizes that make no sense: {error}"
        ) from None


def sizes_from_options(d_model: int, n_heads: int, n_layers: int, **others: Any) -> Sizes:
    """Return sizes from the user's options; `others` are further fields of Sizes.

    By default, the model is a decoder without biases, with a feed-forward width of 4 · d_model.
    """
    name = f"{amount(n_layers, 'layer')} of {amount(n_heads, 'head')}, d_model {d_model}"
    fields = {"kind": "decoder", "d_model": d_model, "n_heads": n_heads, "n_layers": n_layers, **others}
    if fields.get("vocab_size"):
        fields["unembedding"] = "tied"
    return _make_sizes(name, "the options given", fields)


def _make_sizes(name: str, source: str, fields: Config) -> Sizes:
    """Return Sizes with these fields; a field that is missing or None gets a default.

    By default every query head has its own keys and values, and d_head is d_model / n_heads.
    """
    known = {field: value for field, value in fields.items() if value is not None}
    d_model = known["d_model"]
    n_heads = known["n_heads"]
    complete = {"n_kv_heads": n_heads, "d_embedding": d_model, "d_ff": 4 * d_model, **known}
    if "d_head" not in known:
        complete["d_head"] = _divide_width(d_model, n_heads)
    return Sizes(name=name, source=source, **complete)


def _divide_width(d_model: int, n_heads: int) -> int:
    """Return d_model / n_heads; refuse numbers that do not divide."""
    if d_model % n_heads:
        raise AttnscopeError(
            f"d_model {d_model} is not divisible by {n_heads} heads", "or give --sizes d_head=N"
        )
    return d_model // n_heads


def change_sizes(sizes: Sizes, **new_sizes: Any) -> Sizes:
    """Return the sizes of a hypothetical model, with some sizes changed; a new size of None changes nothing.

    If d_model or n_heads changes and d_head is not given, d_head becomes d_model / n_heads. If n_kv_heads equals
    n_heads, or d_embedding equals d_model, both change together.
    """
    changes = {}
    for name, value in new_sizes.items():
        if value is not None and value != getattr(sizes, name):
            changes[name] = value
    if not changes:
        return sizes
    # Change the sizes that depend on changed sizes.
    d_model = changes.get("d_model", sizes.d_model)
    n_heads = changes.get("n_heads", sizes.n_heads)
    if "d_head" not in changes and ("d_model" in changes or "n_heads" in changes):
        changes["d_head"] = _divide_width(d_model, n_heads)
    if sizes.n_kv_heads == sizes.n_heads:
        changes.setdefault("n_kv_heads", n_heads)
    if sizes.d_embedding == sizes.d_model:
        changes["d_embedding"] = d_model
    # Add a note on the changes. Of a counted model, only the sizes of attention are known.
    change_list = ", ".join(f"{name} {value}" for name, value in changes.items())
    note = f"{sizes.name} with {change_list}"
    if sizes.counted is not None:
        note += "; what is no attention is left as it was"
    return replace(sizes, **changes, counted=None, notes=(*sizes.notes, note))


# Families ---------------------------------------------------------------------------------------------------------

_BIASES_AND_NORMS = {
    "qkv_bias": True,
    "o_bias": True,
    "ff_bias": True,
    "norm_vectors": 4,
    "norm_vectors_outside": 2,
}
"""Fields of Sizes for BERT and GPT-2: two norms per layer and one outside, each with a gain and a bias."""

_CONFIG_NAMES = {
    "d_model": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "d_head": "head_dim",
    "d_ff": "intermediate_size",
    "vocab_size": "vocab_size",
    "max_tokens": "max_position_embeddings",
}
"""Fields of Sizes → their names in the configurations of most families."""

_GPT2_CONFIG_NAMES = {
    "d_model": "n_embd",
    "n_layers": "n_layer",
    "n_heads": "n_head",
    "d_ff": "n_inner",
    "vocab_size": "vocab_size",
    "max_tokens": "n_positions",
    "n_positions": "n_positions",
}


def _read_bert(config: Config) -> dict[str, Any]:
    """Return the fields of Sizes for a configuration of BERT's family."""
    # `EncoderSettings` fills in settings that the configuration leaves out.
    encoder = EncoderSettings.from_config(config)
    return {
        **_read_fields(vars(encoder), _CONFIG_NAMES),
        **_BIASES_AND_NORMS,
        "kind": "encoder",
        "max_tokens": encoder.max_tokens,
        "n_positions": encoder.max_position_embeddings,
        "n_segments": encoder.type_vocab_size,
        "pooler": True,
    }


def _read_gpt2(config: Config) -> dict[str, Any]:
    """Return the fields of Sizes for a configuration of GPT-2."""
    return {
        **_read_fields(config, _GPT2_CONFIG_NAMES),
        **_BIASES_AND_NORMS,
        "kind": "decoder",
        "unembedding": "tied" if config.get("tie_word_embeddings", True) else "own",
    }


def _read_llama(config: Config) -> dict[str, Any]:
    """Return the fields of Sizes for a configuration of Llama, Mistral or Qwen2."""
    # Mistral has no biases. Qwen2 has biases at Q, K and V only. For Llama, the configuration says which biases it has.
    family = config["model_type"]
    is_llama = family == "llama"
    has_bias = config.get("attention_bias", False)
    return {
        **_read_fields(config, _CONFIG_NAMES),
        "kind": "decoder",
        "ff_matrices": 3,
        "qkv_bias": family == "qwen2" or (is_llama and has_bias),
        "o_bias": is_llama and has_bias,
        "ff_bias": is_llama and config.get("mlp_bias", False),
        "norm_vectors": 2,
        "norm_vectors_outside": 1,
        "unembedding": "tied" if config.get("tie_word_embeddings", False) else "own",
    }


def _read_fields(config: Config, names: Mapping[str, str]) -> dict[str, Any]:
    """Return fields of Sizes, read from a configuration. `names` are field -> key of the configuration.

    A field whose key is missing is None.
    """
    return {field: config.get(name) for field, name in names.items()}


def _build_and_count(config: Config) -> dict[str, Any]:
    """Return the fields of Sizes for any family: build the model by transformers' own classes, and count parameters."""
    import warnings

    import torch
    from transformers import AutoConfig, AutoModel

    # Build the model without weights: all shapes follow from its configuration.
    settings = dict(config)
    family = settings.pop("model_type", None)
    try:
        with warnings.catch_warnings(), torch.device("meta"):
            warnings.simplefilter("ignore")
            built_config = AutoConfig.for_model(family, **settings)
            model: Any = AutoModel.from_config(built_config)  # type: ignore[no-untyped-call]
    except Exception as error:  # transformers may raise anything on a broken configuration
        raise AttnscopeError(
            f"transformers cannot build a {family}: {first_line(error)[:160]}", _SIZES_HINT
        ) from None
    # Read the sizes of the text model, which may be a part of a model for pictures and text.
    text_config = built_config.get_text_config()
    fields = {field: getattr(text_config, name, None) for field, name in _CONFIG_NAMES.items()}
    # A decoder is recognised by its attention modules, or by the name of the class that was saved.
    is_causal = any(getattr(module, "is_causal", False) for module in model.modules())
    if built_config.is_encoder_decoder:
        fields["kind"] = "encoder-decoder"
        # T5 calls this size num_decoder_layers, BART decoder_layers.
        n_decoder_layers = getattr(text_config, "num_decoder_layers", None)
        fields["n_decoder_layers"] = n_decoder_layers or getattr(text_config, "decoder_layers", None)
    elif is_causal or "CausalLM" in str(config.get("architectures")):
        fields["kind"] = "decoder"
    else:
        fields["kind"] = "encoder"
    # transformers calls the third matrix of gated feed-forward networks gate_proj.
    is_gated = any(path.endswith("gate_proj") for path, _ in model.named_modules())
    fields["ff_matrices"] = 3 if is_gated else 2
    # The count includes the embeddings. With a vocab_size, they would be added a second time.
    fields["vocab_size"] = None
    fields["counted"] = sum(parameter.numel() for parameter in model.parameters())
    fields["notes"] = (
        "attention is counted as W_Q, W_K, W_V and W_O in every layer, whatever else there is in it",
    )
    return fields


# model_type of config.json -> the function that reads its fields of Sizes
_READERS_BY_FAMILY: dict[str, Callable[[Config], dict[str, Any]]] = {
    **dict.fromkeys(PREFIXES, _read_bert),
    "gpt2": _read_gpt2,
    **dict.fromkeys(("llama", "mistral", "qwen2"), _read_llama),
}

# Presets ----------------------------------------------------------------------------------------------------------

_LLAMA_SOURCE = "Touvron et al. 2023 (Llama 2), table 1"
_GPT3_NOTE = "GPT-3 alternates dense with locally banded sparse attention; dense attention is counted"

_GPT2 = {
    "model_type": "gpt2",
    "n_embd": 768,
    "n_layer": 12,
    "n_head": 12,
    "vocab_size": 50257,
    "n_positions": 1024,
}
_GPT3 = {**_GPT2, "n_embd": 12288, "n_layer": 96, "n_head": 96, "n_positions": 2048}
_LLAMA_7B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "intermediate_size": 11008,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
}
_LLAMA_70B = {
    **_LLAMA_7B,
    "hidden_size": 8192,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "intermediate_size": 28672,
}

PRESETS: dict[str, Sizes] = {
    "bert-base": sizes_of({"model_type": "bert"}, "bert-base", "Devlin et al. 2019, section 3"),
    "gpt2": sizes_of(_GPT2, "gpt2", "Radford et al. 2019, table 2"),
    "gpt3": replace(
        sizes_of(_GPT3, "gpt3", "Brown et al. 2020, table 2.1 (175 B)"), notes=(_GPT3_NOTE,)
    ),
    "llama-2-7b": sizes_of(_LLAMA_7B, "llama-2-7b", _LLAMA_SOURCE),
    "llama-2-70b": sizes_of(_LLAMA_70B, "llama-2-70b", _LLAMA_SOURCE),
}
"""Published models by a short name."""
