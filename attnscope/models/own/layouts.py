"""Which checkpoints the native engine can read: what their families call settings and tensors, and in which shapes.

Knows no torch, so that a model can be judged, described and tokenised while torch still loads.
"""

import math
from dataclasses import dataclass
from typing import Any

from attnscope.models.catalog import Source
from attnscope.models.info import ModelInfo

Config = dict[str, Any]
Shape = tuple[int, ...]

PREFIXES = {"bert": "bert.", "roberta": "roberta.", "xlm-roberta": "roberta.", "camembert": "roberta."}
"""The families, by model_type, and what a checkpoint with a head on top puts before every name."""

_EMBEDDINGS = {
    "word": ("embeddings.word_embeddings", "vocab_size"),
    "position": ("embeddings.position_embeddings", "max_position_embeddings"),
    "segment": ("embeddings.token_type_embeddings", "type_vocab_size"),
}
"""Our name for an embedding -> its name in a checkpoint, and the setting that says how many rows it has."""

_LAYER = {
    "attention.q_proj": "attention.self.query",
    "attention.k_proj": "attention.self.key",
    "attention.v_proj": "attention.self.value",
    "attention.out_proj": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "up": "intermediate.dense",
    "down": "output.dense",
    "norm": "output.LayerNorm",
}
"""Our name for a part of a layer -> its name in a checkpoint."""

_REFUSED = {
    "is_decoder": "it is a decoder",
    "add_cross_attention": "it attends to another text",
    "pruned_heads": "some of its heads are pruned",
    "quantization_config": "its weights are quantised",
}
"""Settings that change the computation in a way that the engine does not know."""


@dataclass(frozen=True)
class Encoder:
    """The settings of an encoder, by BERT's names, and what they are where config.json leaves them out."""

    model_type: str
    vocab_size: int = 30522
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    hidden_act: str = "gelu"
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    layer_norm_eps: float = 1e-12
    pad_token_id: int = 0

    @classmethod
    def of(cls, config: Config) -> "Encoder":
        """Read a configuration that `supports` accepts; null counts as left out."""
        # RoBERTa's padding token is number 1 by default, BERT's number 0.
        known = {
            name: value
            for name, value in config.items()
            if value is not None and name in cls.__annotations__
        }
        return cls(**{"pad_token_id": int(config["model_type"] != "bert"), **known})

    @property
    def is_roberta(self) -> bool:
        """Return whether positions count from pad_token_id + 1, padding has none, and segments say nothing."""
        return self.model_type != "bert"

    def positions(self, ids: Any) -> Any:
        """Return the rows of the table of positions for token numbers, (…, token), arrays of NumPy or of torch."""
        if not self.is_roberta:
            return (ids >= 0).cumsum(-1) - 1
        real = ids != self.pad_token_id  # a padding token that a user types gets no position
        return real.cumsum(-1) * real + self.pad_token_id

    @property
    def max_tokens(self) -> int:
        """Return the longest text in tokens."""
        return self.max_position_embeddings - (self.pad_token_id + 1 if self.is_roberta else 0)

    def tensors(self) -> dict[str, tuple[str, Shape]]:
        """Return every tensor: our name for it -> its name in the file (without prefix) and its shape."""
        width = self.hidden_size
        tensors: dict[str, tuple[str, Shape]] = {}
        for ours, (theirs, n_rows) in _EMBEDDINGS.items():
            tensors[f"{ours}.weight"] = (f"{theirs}.weight", (getattr(self, n_rows), width))
        # The parts with a bias: norms have vectors, linear maps matrices (out, in).
        parts: dict[str, tuple[str, Shape]] = {"embedding_norm": ("embeddings.LayerNorm", (width,))}
        shapes: dict[str, Shape] = {
            "up": (self.intermediate_size, width),
            "down": (width, self.intermediate_size),
        }
        for number in range(self.num_hidden_layers):
            for ours, theirs in _LAYER.items():
                default = (width,) if ours.endswith("norm") else (width, width)
                shape = shapes.get(ours, default)
                parts[f"layers.{number}.{ours}"] = (f"encoder.layer.{number}.{theirs}", shape)
        # Each part has a weight, and a bias as long as the weight has rows.
        for ours, (theirs, shape) in parts.items():
            tensors[f"{ours}.weight"] = (f"{theirs}.weight", shape)
            tensors[f"{ours}.bias"] = (f"{theirs}.bias", shape[:1])
        return tensors


def supports(config: Config) -> str | None:
    """Return why the native engine cannot compute a model exactly, as the end of a sentence; None if it can."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in PREFIXES:
        return f"its model_type is {kind!r}, not one of {', '.join(sorted(PREFIXES))}"
    # Settings that change the computation.
    for name, reason in _REFUSED.items():
        if config.get(name):
            return f"{reason} ({name})"
    if config.get("position_embedding_type") not in (None, "absolute"):
        return f"its positions are {config['position_embedding_type']}, not absolute"
    if "AutoModel" in str(config.get("auto_map")):
        return "it brings its own code (auto_map)"
    # Settings that no encoder can have: wrong types, and sizes that do not divide.
    encoder = Encoder.of(config)
    for name, value in vars(encoder).items():
        if not _fits(name, value):
            return f"its {name} is {value!r}"
    if encoder.hidden_size % encoder.num_attention_heads:
        return f"its width {encoder.hidden_size} is not divisible by its {encoder.num_attention_heads} heads"
    return None


def _fits(name: str, value: Any) -> bool:
    """Return whether the native engine can take a setting: a config.json may hold anything."""
    if name in ("model_type", "hidden_act"):
        return value in (*PREFIXES, "gelu")
    if name == "layer_norm_eps":
        return type(value) in (int, float) and 0 <= value < math.inf
    return type(value) is int and value >= (0 if name == "pad_token_id" else 1)


def native_info(
    source: Source,
    config: Config,
    *,
    sha256: str,
    engine: str = "native",
    dtype: str = "float32",
    device: str = "cpu",
) -> ModelInfo:
    """Return the facts of a model on the native or the NumPy engine, all of them from its configuration."""
    encoder = Encoder.of(config)
    # The class that was saved tells whether there was a head on top.
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
