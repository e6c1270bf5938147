"""Which checkpoints the native engine can read: how their families name settings and tensors, and in which shapes.

Knows no torch, so that a model can be judged, described and tokenised while torch still loads.
"""

import math
from dataclasses import dataclass, field
from typing import Any

from attnscope.models.catalog import Source
from attnscope.models.info import ModelInfo

Config = dict[str, Any]
Shape = tuple[int, ...]

ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_by_tanh",
    "gelu_pytorch_tanh": "gelu_by_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
"""The name of an activation in config.json -> the one of the four in native.py and plain.py that computes it."""


@dataclass(frozen=True)
class Layout:
    """How one family of post-norm encoders names things. Tensor names are without `.weight` and `.bias`.

    Attributes:
        prefix: What a checkpoint with a head on top puts before every name.
        layer: Where layer {} lies.
        query: Likewise key, value, output; attention_norm; up, down (the feed-forward layers); norm.
        word: The token embedding; likewise position, segment ("" = none), embedding_norm, projection ("" = none).
        positions_after_padding: Whether positions count from pad_token_id + 1, and padding has none (RoBERTa).
        reads_segments: Whether the family's tokenizers tell the model which of a pair's texts a token is from.
        settings: What the family calls a setting, where it is not BERT's name.
        defaults: What a setting is that config.json leaves out.
    """

    prefix: str
    layer: str = "encoder.layer.{}."
    query: str = "attention.self.query"
    key: str = "attention.self.key"
    value: str = "attention.self.value"
    output: str = "attention.output.dense"
    attention_norm: str = "attention.output.LayerNorm"
    up: str = "intermediate.dense"
    down: str = "output.dense"
    norm: str = "output.LayerNorm"
    word: str = "embeddings.word_embeddings"
    position: str = "embeddings.position_embeddings"
    segment: str = "embeddings.token_type_embeddings"
    embedding_norm: str = "embeddings.LayerNorm"
    projection: str = ""
    positions_after_padding: bool = False
    reads_segments: bool = True
    settings: Config = field(default_factory=dict)
    defaults: Config = field(default_factory=dict)


_ROBERTA = Layout(prefix="roberta.", positions_after_padding=True, reads_segments=False, defaults={"pad_token_id": 1})

LAYOUTS: dict[str, Layout] = {
    "bert": Layout(prefix="bert."),
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
    "camembert": _ROBERTA,
    "electra": Layout(
        prefix="electra.",
        projection="embeddings_project",
        defaults={"embedding_size": 128, "hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 1024},
    ),
    "distilbert": Layout(
        prefix="distilbert.",
        layer="transformer.layer.{}.",
        query="attention.q_lin",
        key="attention.k_lin",
        value="attention.v_lin",
        output="attention.out_lin",
        attention_norm="sa_layer_norm",
        up="ffn.lin1",
        down="ffn.lin2",
        norm="output_layer_norm",
        segment="",
        reads_segments=False,
        settings={
            "hidden_size": "dim",
            "num_attention_heads": "n_heads",
            "num_hidden_layers": "n_layers",
            "intermediate_size": "hidden_dim",
            "hidden_act": "activation",
        },
        defaults={"num_hidden_layers": 6},
    ),
}

_BERT_DEFAULTS: Config = {
    "vocab_size": 30522,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "hidden_act": "gelu",
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
    "pad_token_id": 0,
}


@dataclass(frozen=True)
class Encoder:
    """An encoder's settings by BERT's names, whatever its family calls them."""

    layout: Layout
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    hidden_act: str
    max_position_embeddings: int
    type_vocab_size: int
    layer_norm_eps: float
    pad_token_id: int
    embedding_size: int

    @classmethod
    def of(cls, config: Config) -> "Encoder":
        """Read a configuration that `supports` accepts."""
        layout = LAYOUTS[config["model_type"]]
        # The file's own value wins, then the family's default, then BERT's; null counts as left out.
        values: Config = {}
        for name, default in _BERT_DEFAULTS.items():
            value = config.get(layout.settings.get(name, name), config.get(name))
            values[name] = layout.defaults.get(name, default) if value is None else value
        embedding_size = config.get("embedding_size") or layout.defaults.get("embedding_size")
        values["embedding_size"] = embedding_size if layout.projection else values["hidden_size"]
        return cls(layout=layout, **values)

    @property
    def max_tokens(self) -> int:
        """Return the longest text in tokens."""
        offset = self.pad_token_id + 1 if self.layout.positions_after_padding else 0
        return self.max_position_embeddings - offset

    def tensors(self) -> dict[str, tuple[str, Shape]]:
        """Return every tensor: our name for it -> its name in the file (without prefix) and its shape."""
        plan: dict[str, tuple[str, Shape]] = {}
        layout = self.layout
        width = self.hidden_size
        inner = self.intermediate_size

        def add(ours: str, theirs: str, *shape: int, has_bias: bool = True) -> None:
            plan[f"{ours}.weight"] = (f"{theirs}.weight", shape)
            if has_bias:
                plan[f"{ours}.bias"] = (f"{theirs}.bias", shape[:1])

        # The embeddings, and the map from their width to the model's where these differ (ELECTRA).
        add("word", layout.word, self.vocab_size, self.embedding_size, has_bias=False)
        add("position", layout.position, self.max_position_embeddings, self.embedding_size, has_bias=False)
        if layout.segment:
            add("segment", layout.segment, self.type_vocab_size, self.embedding_size, has_bias=False)
        add("embedding_norm", layout.embedding_norm, self.embedding_size)
        if self.embedding_size != width:
            add("projection", layout.projection, width, self.embedding_size)
        # The layers: W_Q, W_K, W_V and W_O, two norms, and the feed-forward network; (out, in).
        for i in range(self.num_hidden_layers):
            ours = f"layers.{i}."
            theirs = layout.layer.format(i)
            for part, name in (("q", layout.query), ("k", layout.key), ("v", layout.value), ("out", layout.output)):
                add(f"{ours}attention.{part}_proj", theirs + name, width, width)
            add(f"{ours}attention_norm", theirs + layout.attention_norm, width)
            add(f"{ours}up", theirs + layout.up, inner, width)
            add(f"{ours}down", theirs + layout.down, width, inner)
            add(f"{ours}norm", theirs + layout.norm, width)
        return plan


def supports(config: Config) -> str | None:
    """Return why the native engine cannot compute a model exactly, as the end of a sentence; None if it can."""
    # Settings that change the computation in a way that the engine does not know.
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in LAYOUTS:
        return f"its model_type is {kind!r}, not one of {', '.join(sorted(LAYOUTS))}"
    if config.get("is_decoder"):
        return "it is a decoder (is_decoder)"
    if config.get("add_cross_attention"):
        return "it attends to another text (add_cross_attention)"
    if config.get("position_embedding_type") not in (None, "absolute"):
        return f"its positions are {config['position_embedding_type']}, not absolute"
    own_code = config.get("auto_map")
    if own_code and (not isinstance(own_code, dict) or any(str(name).startswith("AutoModel") for name in own_code)):
        return "it brings its own code (auto_map)"
    if config.get("pruned_heads"):
        return "some of its heads are pruned"
    if config.get("quantization_config"):
        return "its weights are quantised"
    encoder = Encoder.of(config)
    # Settings that no encoder can have: wrong types, and sizes that do not divide.
    for name, value in vars(encoder).items():
        if name != "layout" and not _fits(name, value):
            return f"its {encoder.layout.settings.get(name, name)} is {value!r}"
    if encoder.hidden_act not in ACTIVATIONS:
        return f"its activation {encoder.hidden_act!r} is not one of {', '.join(sorted(ACTIVATIONS))}"
    if encoder.hidden_size % encoder.num_attention_heads:
        return f"its width {encoder.hidden_size} is not divisible by its {encoder.num_attention_heads} heads"
    return None


def _fits(name: str, value: Any) -> bool:
    """Return whether a setting is of the kind that the native engine takes it for: a config.json may hold anything."""
    if name == "hidden_act":
        return isinstance(value, str)
    if name == "layer_norm_eps":
        return type(value) in (int, float) and 0 <= value < math.inf
    return type(value) is int and value >= (0 if name == "pad_token_id" else 1)


def native_info(
    source: Source, config: Config, *, sha256: str, engine: str = "native", dtype: str = "float32", device: str = "cpu"
) -> ModelInfo:
    """Return the facts of a model on the native or the NumPy engine, all of them from its configuration."""
    encoder = Encoder.of(config)
    named = str((config.get("architectures") or [""])[0])
    return ModelInfo(
        name=source.name,
        source=source.origin,
        sha256=sha256,
        architecture=config["model_type"],
        engine=engine,
        kinds=("encoder",),
        n_layers=(encoder.num_hidden_layers,),
        n_heads=(encoder.num_attention_heads,),
        n_kv_heads=(encoder.num_attention_heads,),
        d_model=encoder.hidden_size,
        n_parameters=sum(math.prod(shape) for _, shape in encoder.tensors().values()),
        max_tokens=encoder.max_tokens,
        dtype=dtype,
        device=device,
        head=f"dropped: that of {named}; ablate, patch and weights load it" if "For" in named else "",
    )
