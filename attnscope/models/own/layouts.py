"""Judge which BERT-family checkpoints the native engine can run, and read their tensors.

The native engine is attnscope's own encoder in torch (`own.native`). The NumPy engine computes the same encoder without
torch (`own.plain`). Each tensor has two names: "our name" is a parameter name of that encoder, such as
"layers.0.attention.q_proj.weight"; "their name" is the name in a checkpoint, such as
"encoder.layer.0.attention.self.query.weight".

This module does not import torch, so that a model can be described, and texts tokenised, before torch is loaded.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from safetensors import SafetensorError, safe_open

from attnscope.errors import AttnscopeError, first_line
from attnscope.models.catalog import Source
from attnscope.models.files import weight_files
from attnscope.models.info import ModelInfo

Config = Mapping[str, Any]
Shape = tuple[int, ...]

PREFIXES = {"bert": "bert.", "roberta": "roberta.", "xlm-roberta": "roberta.", "camembert": "roberta."}
"""model_type of each supported family → the prefix of tensor names in checkpoints that were saved with a head."""

_EMBEDDING_TABLES = {
    "word": ("embeddings.word_embeddings", "vocab_size"),
    "position": ("embeddings.position_embeddings", "max_position_embeddings"),
    "segment": ("embeddings.token_type_embeddings", "type_vocab_size"),
}
"""Our name of each embedding → its name in a checkpoint, and the setting that holds its number of rows."""

_LAYER_MODULES = {
    "attention.q_proj": "attention.self.query",
    "attention.k_proj": "attention.self.key",
    "attention.v_proj": "attention.self.value",
    "attention.out_proj": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "up": "intermediate.dense",
    "down": "output.dense",
    "norm": "output.LayerNorm",
}
"""Our name of each module in a layer → its name in a checkpoint."""

_REFUSAL_REASONS = {
    "is_decoder": "it is a decoder",
    "add_cross_attention": "it attends to another text",
    "pruned_heads": "some of its heads are pruned",
    "quantization_config": "its weights are quantised",
}
"""Settings of config.json that the engine does not support → the reason, if the setting is true or not empty."""


@dataclass(frozen=True)
class EncoderSettings:
    """The settings of an encoder, under the names of BERT's config.json and with BERT's defaults."""

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
    def from_config(cls, config: Config) -> "EncoderSettings":
        """Read the settings from a config.json. A setting that is missing or null gets its default."""
        settings = {}
        for name in cls.__annotations__:
            if config.get(name) is not None:
                settings[name] = config[name]
        # RoBERTa's default padding token is 1.
        if config["model_type"] != "bert":
            settings.setdefault("pad_token_id", 1)
        return cls(**settings)

    @property
    def is_roberta(self) -> bool:
        """Return whether the encoder is a RoBERTa model, which differs from BERT in positions and segments.

        RoBERTa's positions begin with pad_token_id + 1. Padding has the position pad_token_id. There are no segments.
        """
        return self.model_type != "bert"

    def positions(self, ids: Any) -> Any:
        """Return the row of the position embedding for each token, (…, token), as NumPy's array or torch's tensor."""
        if not self.is_roberta:
            # 0, 1, 2 …, by methods that NumPy and torch share: every id is at least 0.
            return (ids >= 0).cumsum(-1) - 1
        # As in transformers, a padding token that the user typed also counts as padding.
        is_real = ids != self.pad_token_id
        return is_real.cumsum(-1) * is_real + self.pad_token_id

    @property
    def max_tokens(self) -> int:
        """Return the largest number of tokens in a text."""
        # RoBERTa's first positions are unused.
        n_unused = self.pad_token_id + 1 if self.is_roberta else 0
        return self.max_position_embeddings - n_unused

    def tensor_specs(self) -> dict[str, tuple[str, Shape]]:
        """Return every tensor: our name → its name in a checkpoint, without prefix, and its shape."""
        width = self.hidden_size
        inner_width = self.intermediate_size
        tensors: dict[str, tuple[str, Shape]] = {}
        for ours, (theirs, size_setting) in _EMBEDDING_TABLES.items():
            tensors[f"{ours}.weight"] = (f"{theirs}.weight", (getattr(self, size_setting), width))
        # Shapes of weights, by our name of a module in a layer: norms (width,), linear maps (out, in). Modules that are
        # not listed are (width, width).
        shapes: dict[str, Shape] = {
            "attention_norm": (width,),
            "up": (inner_width, width),
            "down": (width, inner_width),
            "norm": (width,),
        }
        # Our name of each module with a bias → its name in a checkpoint, and the shape of its weight.
        modules: dict[str, tuple[str, Shape]] = {"embedding_norm": ("embeddings.LayerNorm", (width,))}
        for layer in range(self.num_hidden_layers):
            for ours, theirs in _LAYER_MODULES.items():
                shape = shapes.get(ours, (width, width))
                modules[f"layers.{layer}.{ours}"] = (f"encoder.layer.{layer}.{theirs}", shape)
        # Each of these modules has a weight, and a bias with one element per row of the weight.
        for ours, (theirs, shape) in modules.items():
            tensors[f"{ours}.weight"] = (f"{theirs}.weight", shape)
            tensors[f"{ours}.bias"] = (f"{theirs}.bias", shape[:1])
        return tensors


def why_unsupported(config: Config) -> str | None:
    """Return why the native engine cannot compute a model exactly, as the end of a sentence; None if it can."""
    model_type = config.get("model_type")
    families = sorted(PREFIXES)
    if model_type not in families:
        return f"its model_type is {model_type!r}, not one of {', '.join(families)}"
    # Refuse settings that change the computation.
    for name, reason in _REFUSAL_REASONS.items():
        if config.get(name):
            return f"{reason} ({name})"
    if config.get("position_embedding_type") not in (None, "absolute"):
        return f"its positions are {config['position_embedding_type']}, not absolute"
    if "AutoModel" in str(config.get("auto_map")):
        return "it brings its own code (auto_map)"
    # Refuse values that no encoder can have: wrong types, and sizes that do not divide.
    encoder = EncoderSettings.from_config(config)
    for name, value in vars(encoder).items():
        if not _is_supported_value(name, value):
            return f"its {name} is {value!r}"
    if encoder.hidden_size % encoder.num_attention_heads:
        return f"its width {encoder.hidden_size} is not divisible by its {encoder.num_attention_heads} heads"
    return None


def _is_supported_value(name: str, value: Any) -> bool:
    """Return whether the native engine can compute with the value of a setting; config.json may hold anything."""
    if name == "model_type":
        return True
    if name == "hidden_act":
        return bool(value == "gelu")
    if name == "layer_norm_eps":
        return type(value) in (int, float) and 0 <= value < math.inf
    # All other settings are integers. `type` excludes bool, which isinstance would take for int.
    min_value = 0 if name == "pad_token_id" else 1
    return type(value) is int and value >= min_value


def describe_native(
    source: Source,
    config: Config,
    *,
    sha256: str,
    engine: str = "native",
    dtype: str = "float32",
    device: str = "cpu",
) -> ModelInfo:
    """Return the facts of a model on the native or the NumPy engine, without reading its weights."""
    encoder = EncoderSettings.from_config(config)
    # The name of a class with a head contains "For", such as BertForMaskedLM. These engines leave the head out.
    saved_class = str((config.get("architectures") or [""])[0])
    dropped_head = ""
    if "For" in saved_class:
        dropped_head = f"dropped: that of {saved_class}; ablate, patch and weights load it"
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
        n_parameters=sum(math.prod(shape) for _, shape in encoder.tensor_specs().values()),
        max_tokens=encoder.max_tokens,
        dtype=dtype,
        device=device,
        head=dropped_head,
    )


# Tensors ------------------------------------------------------------------------------------------------------------


class Checkpoint:
    """The tensors of a checkpoint, in one file or several.

    Args:
        folder: The folder with the files.
        encoder: The settings of the encoder.
        framework: "pt" to read tensors as torch's, "np" to read them as NumPy's.
    """

    def __init__(
        self, folder: Path, encoder: EncoderSettings, framework: Literal["pt", "np"] = "pt"
    ) -> None:
        paths = weight_files(folder)
        # Error messages name the only file, or the folder of several files.
        self._label = paths[0] if len(paths) == 1 else folder
        self._encoder = encoder
        self._framework = framework
        # Name of a tensor in the files → the path of the file that contains it, and the open file.
        self._files: dict[str, tuple[Path, Any]] = {}
        for path in paths:
            try:
                file: Any = safe_open(path, framework=framework)
            except (SafetensorError, OSError) as error:
                raise _damage_error(path, error) from error
            self._files |= dict.fromkeys(file.keys(), (path, file))
        # Only checkpoints that were saved with a head have the prefix.
        prefix = PREFIXES[encoder.model_type]
        self._prefix = prefix if f"{prefix}embeddings.word_embeddings.weight" in self._files else ""

    def match_names(self) -> dict[str, str]:
        """Find every tensor that the encoder needs: return our name → the name in the files. No tensor is read.

        Raises:
            AttnscopeError: A tensor is missing or has another shape, or the layers hold tensors that the encoder would
                not use.
        """
        expected = self._encoder.tensor_specs()
        names = {ours: self._name_in_file(theirs) for ours, (theirs, _) in expected.items()}
        missing = [name for name in names.values() if name not in self._files]
        if missing:
            raise AttnscopeError(
                f"{self._label} lacks {len(missing)} of {len(names)} tensors, such as {missing[0]}",
                "the file is incomplete, or of another model than config.json describes",
            )
        # Layers with further tensors compute something else. Unused tensors outside of layers, such as a head's, may
        # be there.
        layer_prefix = f"{self._prefix}encoder.layer."
        unused = [
            name for name in self._files.keys() - {*names.values()} if name.startswith(layer_prefix)
        ]
        if unused:
            raise AttnscopeError(
                f"{self._label} holds {len(unused)} tensors that config.json has no place for, such as {min(unused)}",
                "give the config.json that belongs to the weights",
            )
        for ours, name in names.items():
            _, file = self._files[name]
            shape = tuple(file.get_slice(name).get_shape())
            _, expected_shape = expected[ours]
            if shape != expected_shape:
                raise AttnscopeError(
                    f"{self._label}: {name} has shape {shape}, but config.json makes it {expected_shape}",
                    "weights and config.json belong to different models",
                )
        return names

    def tensors(self, convert: Callable[[Any], Any]) -> Iterator[tuple[str, Any]]:
        """Yield every tensor that the encoder needs: our name, and the tensor after `convert`.

        Raises:
            AttnscopeError: `match_names` refuses the checkpoint; or a tensor cannot be read; or a tensor holds NaN or
                infinity, perhaps only after `convert`.
        """
        for ours, name in self.match_names().items():
            try:
                tensor = convert(self._read(name))
            except (SafetensorError, OSError, RuntimeError, TypeError) as error:
                raise _damage_error(self._files[name][0], error) from error
            # A sum is finite only if all its terms are. Sums in half precision would overflow, so use float32.
            widened = tensor if tensor.itemsize >= 4 else tensor.float()
            # NumPy computes the sum: torch would start its threads for each tensor, which is slow on a busy machine.
            with np.errstate(all="ignore"):
                total = np.asarray(widened).sum()
            if not np.isfinite(total):
                precision = str(tensor.dtype).removeprefix("torch.")
                raise AttnscopeError(
                    f"{self._label}: {name} holds NaN or infinite values as {precision}",
                    "the weights are damaged, or too large for this precision",
                )
            yield ours, tensor

    def _read(self, name: str) -> Any:
        """Return a tensor by its name in the files; refuse integers (quantised weights) and complex numbers."""
        path, file = self._files[name]
        # safetensors' names of dtypes: F16, F32, BF16, F8_E4M3, I8 …
        dtype = file.get_slice(name).get_dtype()
        if not dtype.startswith(("F", "BF")):
            hint = "the weights are quantised, or complex numbers"
            raise AttnscopeError(f"{self._label}: {name} is of type {dtype}", hint)
        if self._framework == "pt" or dtype in ("F16", "F32", "F64"):
            return file.get_tensor(name)
        # NumPy has no bfloat16 and no float8. So torch reads them, and float32 represents their values exactly.
        torch_file: Any = safe_open(path, framework="pt")
        return torch_file.get_tensor(name).float().numpy()

    def _name_in_file(self, name: str) -> str:
        """Return the name of a tensor in these files. `name` is its name in a checkpoint, without prefix.

        Checkpoints converted from TensorFlow call a norm's weight gamma and its bias beta.
        """
        name = self._prefix + name
        old_name = name.replace("Norm.weight", "Norm.gamma").replace("Norm.bias", "Norm.beta")
        if name not in self._files and old_name in self._files:
            return old_name
        return name


def _damage_error(path: Path, error: Exception) -> AttnscopeError:
    """Return the error for a file that cannot be read."""
    hint = "get the file again, by git lfs pull if it is a pointer of Git LFS"
    return AttnscopeError(f"{path} is damaged or cut short: {first_line(error)}", hint)
