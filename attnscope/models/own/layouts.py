"""Judge which BERT-family checkpoints the native engine can read, and read their tensors by our names.

This module loads no torch, so that a model can be judged, described and tokenised while torch still loads. Tensors are
torch's or NumPy's.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from safetensors import SafetensorError, safe_open

from attnscope.errors import AttnscopeError, first_line
from attnscope.models.catalog import Source
from attnscope.models.files import weight_files
from attnscope.models.info import ModelInfo

Config = dict[str, Any]
Shape = tuple[int, ...]

PREFIXES = {"bert": "bert.", "roberta": "roberta.", "xlm-roberta": "roberta.", "camembert": "roberta."}
"""The prefix of every name in checkpoints with a head on top, by model_type of the family."""

_EMBEDDINGS = {
    "word": ("embeddings.word_embeddings", "vocab_size"),
    "position": ("embeddings.position_embeddings", "max_position_embeddings"),
    "segment": ("embeddings.token_type_embeddings", "type_vocab_size"),
}
"""The name of each embedding in a checkpoint, and the setting that says how many rows it has, by our name."""

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
"""The name of each part of a layer in a checkpoint, by our name."""

_REFUSED = {
    "is_decoder": "it is a decoder",
    "add_cross_attention": "it attends to another text",
    "pruned_heads": "some of its heads are pruned",
    "quantization_config": "its weights are quantised",
}
"""Settings that change the computation in a way that the engine does not know, with the reasons of a refusal."""


@dataclass(frozen=True)
class Encoder:
    """The settings of an encoder, by BERT's names and with BERT's defaults, for what config.json leaves out."""

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
        """Read a configuration, of which null counts as left out."""
        settings = {name: config.get(name) for name in cls.__annotations__}
        known = {name: value for name, value in settings.items() if value is not None}
        # RoBERTa's padding token is number 1 by default, BERT's number 0.
        return cls(**{"pad_token_id": int(config["model_type"] != "bert"), **known})

    @property
    def is_roberta(self) -> bool:
        """Return whether positions count from pad_token_id + 1, padding has none, and there are no segments."""
        return self.model_type != "bert"

    def positions(self, ids: Any) -> Any:
        """Return the positions of tokens in the table of positions, (…, token); arrays are NumPy's or torch's."""
        if not self.is_roberta:
            return (ids >= 0).cumsum(-1) - 1
        is_real = ids != self.pad_token_id  # a padding token that a user types gets no position
        return is_real.cumsum(-1) * is_real + self.pad_token_id

    @property
    def max_tokens(self) -> int:
        """Return the longest text in tokens."""
        return self.max_position_embeddings - (self.pad_token_id + 1 if self.is_roberta else 0)

    def tensors(self) -> dict[str, tuple[str, Shape]]:
        """Return the name of every tensor in the file (without prefix), and its shape, by our name for it."""
        width = self.hidden_size
        tensors: dict[str, tuple[str, Shape]] = {}
        for ours, (theirs, n_rows) in _EMBEDDINGS.items():
            tensors[f"{ours}.weight"] = (f"{theirs}.weight", (getattr(self, n_rows), width))
        # The parts with a bias: norms have vectors, linear maps matrices (out, in).
        shapes: dict[str, Shape] = dict.fromkeys(_LAYER, (width, width))
        shapes["attention_norm"] = shapes["norm"] = (width,)
        shapes["up"] = (self.intermediate_size, width)
        shapes["down"] = (width, self.intermediate_size)
        parts: dict[str, tuple[str, Shape]] = {"embedding_norm": ("embeddings.LayerNorm", (width,))}
        for number in range(self.num_hidden_layers):
            for ours, theirs in _LAYER.items():
                parts[f"layers.{number}.{ours}"] = (f"encoder.layer.{number}.{theirs}", shapes[ours])
        # Each part has a weight, and a bias as long as the weight has rows.
        for ours, (theirs, shape) in parts.items():
            tensors[f"{ours}.weight"] = (f"{theirs}.weight", shape)
            tensors[f"{ours}.bias"] = (f"{theirs}.bias", shape[:1])
        return tensors


def why_unsupported(config: Config) -> str | None:
    """Return why the native engine cannot compute a model exactly, as the end of a sentence; None if it can."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in PREFIXES:
        return f"its model_type is {model_type!r}, not one of {', '.join(sorted(PREFIXES))}"
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
    """Return whether a setting has a value that the native engine can compute with: a config.json may hold anything."""
    if name == "model_type":
        return True
    if name == "hidden_act":
        return bool(value == "gelu")
    if name == "layer_norm_eps":
        return type(value) in (int, float) and 0 <= value < math.inf
    return type(value) is int and value >= int(name != "pad_token_id")


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
    # The name of the class that was saved says whether it had a head on top, such as BertForMaskedLM.
    saved_class = str((config.get("architectures") or [""])[0])
    head = ""
    if "For" in saved_class:
        head = f"dropped: that of {saved_class}; ablate, patch and weights load it"
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
        head=head,
    )


# Tensors ------------------------------------------------------------------------------------------------------------


class Checkpoint:
    """The tensors of a checkpoint, in one file or several.

    Args:
        folder: The folder with the files.
        encoder: The settings of the encoder.
        framework: Whether tensors are read as torch's ("pt"), or as NumPy's ("np").
    """

    def __init__(self, folder: Path, encoder: Encoder, framework: Literal["pt", "np"] = "pt") -> None:
        paths = weight_files(folder)
        # What messages name: the file, or the folder of several.
        self._where = paths[0] if len(paths) == 1 else folder
        self._encoder = encoder
        self._framework = framework
        # The open file of each tensor, and its path.
        self._files: dict[str, Any] = {}
        self._paths: dict[str, Path] = {}
        for path in paths:
            try:
                file: Any = safe_open(path, framework=framework)
            except (SafetensorError, OSError) as error:
                raise _damaged(path, error) from error
            self._files |= dict.fromkeys(file.keys(), file)
            self._paths |= dict.fromkeys(file.keys(), path)
        # A checkpoint saved with a head on top has the family's prefix before every name.
        prefix = PREFIXES[encoder.model_type]
        self._prefix = prefix if f"{prefix}embeddings.word_embeddings.weight" in self._files else ""

    def plan(self) -> dict[str, str]:
        """Return the names in the files of all tensors that a network needs, by our names. No tensor is read.

        Raises:
            AttnscopeError: A tensor is missing or has another shape, or the layers hold tensors that the network would
                not use.
        """
        expected = self._encoder.tensors()
        plan = {ours: self._find(theirs) for ours, (theirs, _) in expected.items()}
        missing = [name for name in plan.values() if name not in self._files]
        if missing:
            raise AttnscopeError(
                f"{self._where} lacks {len(missing)} of {len(plan)} tensors, such as {missing[0]}",
                "the file is incomplete, or of another model than config.json describes",
            )
        # Further tensors of layers would change what the layers compute; others, such as a head's, are left out.
        layers = f"{self._prefix}encoder.layer."
        unused = [name for name in self._files.keys() - {*plan.values()} if name.startswith(layers)]
        if unused:
            raise AttnscopeError(
                f"{self._where} holds {len(unused)} tensors that config.json has no place for, such as {min(unused)}",
                "give the config.json that belongs to the weights",
            )
        for ours, name in plan.items():
            shape = tuple(self._files[name].get_slice(name).get_shape())
            _, expected_shape = expected[ours]
            if shape != expected_shape:
                raise AttnscopeError(
                    f"{self._where}: {name} has shape {shape}, but config.json makes it {expected_shape}",
                    "weights and config.json belong to different models",
                )
        return plan

    def tensors(self, convert: Callable[[Any], Any]) -> Iterator[tuple[str, Any]]:
        """Yield our name and the converted tensor, of every tensor that a network needs.

        Raises:
            AttnscopeError: `plan` refuses the checkpoint; or a tensor cannot be read, or holds NaN or infinity, perhaps
                only after it was converted.
        """
        for ours, name in self.plan().items():
            try:
                tensor = convert(self._read(name))
            except (SafetensorError, OSError, RuntimeError, TypeError) as error:
                raise _damaged(self._paths[name], error) from error
            # A sum is finite only if all its numbers are. It is taken in float32 or better, for half precision
            # overflows; and by NumPy, for starting torch's threads for each tensor takes long on a busy machine.
            precise = tensor if tensor.itemsize >= 4 else tensor.float()
            with np.errstate(all="ignore"):
                total = np.asarray(precise).sum()
            if not np.isfinite(total):
                precision = str(tensor.dtype).removeprefix("torch.")
                raise AttnscopeError(
                    f"{self._where}: {name} holds NaN or infinite values as {precision}",
                    "the weights are damaged, or too large for this precision",
                )
            yield ours, tensor

    def _read(self, name: str) -> Any:
        """Return a tensor; refuse complex numbers, and integers, which are quantised weights."""
        file = self._files[name]
        dtype = file.get_slice(name).get_dtype()
        if not dtype.startswith(("F", "BF")):
            hint = "the weights are quantised, or complex numbers"
            raise AttnscopeError(f"{self._where}: {name} is of type {dtype}", hint)
        if self._framework == "pt" or dtype in ("F16", "F32", "F64"):
            return file.get_tensor(name)
        # NumPy has no bfloat16 and no float8. torch has, and each of their numbers is a float32.
        torch_file: Any = safe_open(self._paths[name], framework="pt")
        return torch_file.get_tensor(name).float().numpy()

    def _find(self, name: str) -> str:
        """Return the name that a tensor has in the files, from its name in the family.

        Checkpoints converted from TensorFlow call a norm's weight gamma and its bias beta.
        """
        name = self._prefix + name
        old_name = name.replace("Norm.weight", "Norm.gamma").replace("Norm.bias", "Norm.beta")
        return old_name if name not in self._files and old_name in self._files else name


def _damaged(path: Path, error: Exception) -> AttnscopeError:
    """Return the refusal of a file that cannot be read."""
    hint = "get the file again, by git lfs pull if it is a pointer of Git LFS"
    return AttnscopeError(f"{path} is damaged or cut short: {first_line(error)}", hint)
