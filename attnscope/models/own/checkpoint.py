"""The tensors of a checkpoint that our own networks compute, by our names: for torch, or for NumPy without torch."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
from safetensors import SafetensorError, safe_open

from attnscope.errors import AttnscopeError, first_line
from attnscope.models.files import weight_files
from attnscope.models.own.layouts import PREFIXES, Encoder

_NUMPY_FLOATS = ("F16", "F32", "F64")
"""Precisions that NumPy knows, as safetensors names them."""


class Checkpoint:
    """The tensors of a checkpoint, in one file or several, found by the names that its family or its elders use.

    Tensors are torch's ("pt") or NumPy's.
    """

    def __init__(self, folder: Path, encoder: Encoder, framework: Literal["pt", "np"] = "pt") -> None:
        paths = weight_files(folder)
        self._where = paths[0] if len(paths) == 1 else folder
        self._encoder = encoder
        self._framework = framework
        self._files: dict[str, Any] = {}  # the open file of each tensor
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
        """Return the file's names of all tensors that a network needs, by ours.

        Refuse missing and misshapen ones, and layers that hold more than the network would compute.
        """
        # Check names and shapes first: no tensor is read from a checkpoint that lacks one.
        sizes = self._encoder.tensors()
        plan = {ours: self._find(theirs) for ours, (theirs, _) in sizes.items()}
        missing = [name for name in plan.values() if name not in self._files]
        if missing:
            raise AttnscopeError(
                f"{self._where} lacks {len(missing)} of {len(plan)} tensors, such as {missing[0]}",
                "the file is incomplete, or of another model than config.json describes",
            )
        layers = f"{self._prefix}encoder.layer."
        unused = [name for name in self._files.keys() - {*plan.values()} if name.startswith(layers)]
        if unused:
            raise AttnscopeError(
                f"{self._where} holds {len(unused)} tensors that config.json has no place for, such as {min(unused)}",
                "give the config.json that belongs to the weights",
            )
        for ours, name in plan.items():
            size = tuple(self._files[name].get_slice(name).get_shape())
            if size != sizes[ours][1]:
                raise AttnscopeError(
                    f"{self._where}: {name} has shape {size}, but config.json makes it {sizes[ours][1]}",
                    "weights and config.json belong to different models",
                )
        return plan

    def tensors(self, convert: Callable[[Any], Any]) -> Iterator[tuple[str, Any]]:
        """Yield every tensor that a network needs, once all are there: our name, and what `convert` makes of it.

        Refuse NaN and infinity, also those that come of converting.
        """
        for ours, name in self.plan().items():
            try:
                tensor = convert(self._read(name))
            except (SafetensorError, OSError, RuntimeError, TypeError) as error:
                raise _damaged(self._paths[name], error) from error
            # One sum tells: NaN or infinity anywhere never leaves it finite. Wide, for half precision overflows; by
            # NumPy, for waking torch's threads a hundred times takes up to ten times as long on a busy machine.
            wide = tensor if tensor.itemsize >= 4 else tensor.float()
            with np.errstate(all="ignore"):
                total = np.asarray(wide).sum()
            if not np.isfinite(total):
                precision = str(tensor.dtype).removeprefix("torch.")
                raise AttnscopeError(
                    f"{self._where}: {name} holds NaN or infinite values as {precision}",
                    "the weights are damaged, or too large for this precision",
                )
            yield ours, tensor

    def _read(self, name: str) -> Any:
        """Return one tensor of real numbers; refuses complex numbers and quantised integers."""
        # The header tells the type: tensors that are no real numbers are never read.
        file = self._files[name]
        dtype = file.get_slice(name).get_dtype()
        if not dtype.startswith(("F", "BF")):
            reason = (
                "the weights are complex numbers"
                if dtype.startswith("C")
                else "the weights are quantised"
            )
            raise AttnscopeError(f"{self._where}: {name} is of type {dtype}", reason)
        if self._framework == "pt" or dtype in _NUMPY_FLOATS:
            return file.get_tensor(name)
        # NumPy has no bfloat16 and no float8. torch has, and each of their numbers is a float32.
        torch_file: Any = safe_open(self._paths[name], framework="pt")
        return torch_file.get_tensor(name).float().numpy()

    def _find(self, name: str) -> str:
        """Return the name in the file.

        Checkpoints converted from TensorFlow call a norm's weight gamma and its bias beta.
        """
        name = self._prefix + name
        elder = name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        )
        return elder if name not in self._files and elder in self._files else name


def _damaged(path: Path, error: Exception) -> AttnscopeError:
    is_pointer = path.is_file() and path.stat().st_size < 1024
    return AttnscopeError(
        f"{path} is damaged or cut short: {first_line(error)}",
        "it may be a Git LFS pointer: git lfs pull" if is_pointer else "get the file again",
    )
