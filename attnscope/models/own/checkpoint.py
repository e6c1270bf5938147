"""The tensors of a checkpoint that our own networks compute, by our names: for torch, or for NumPy without torch."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError, safe_open

from attnscope.errors import AttnscopeError, first_line
from attnscope.models.own.layouts import Encoder

_NUMPY_FLOATS = ("F16", "F32", "F64")
"""Precisions that NumPy knows, as safetensors names them."""


class Checkpoint:
    """The tensors of a checkpoint, in one file or several, found by the names that its family or its elders use.

    The stack closes the files; tensors are torch's ("pt") or NumPy's. `where` is the file, or the folder of several.
    """

    def __init__(
        self, files: list[Path], encoder: Encoder, stack: ExitStack, framework: Literal["pt", "np"] = "pt"
    ) -> None:
        self.where = str(files[0] if len(files) == 1 else files[0].parent)
        self._encoder = encoder
        self._framework = framework
        self._files_by_tensor: dict[str, Any] = {}
        self._paths_by_tensor: dict[str, Path] = {}
        for path in files:
            try:
                file = stack.enter_context(safe_open(path, framework=framework))
            except (SafetensorError, OSError) as error:
                raise _damaged(path, error) from error
            self._files_by_tensor |= dict.fromkeys(file.keys(), file)
            self._paths_by_tensor |= dict.fromkeys(file.keys(), path)
        # A checkpoint saved with a head on top has the family's prefix before every name.
        has_prefix = f"{encoder.prefix}embeddings.word_embeddings.weight" in self._files_by_tensor
        self._prefix = encoder.prefix if has_prefix else ""

    def plan(self) -> dict[str, str]:
        """Return the file's names of all tensors that a network needs, by ours.

        Refuse missing and misshapen ones, and layers that hold more than the network would compute.
        """
        # Check names and shapes first: no tensor is read from a checkpoint that lacks one.
        plan = {ours: (self._find(theirs), size) for ours, (theirs, size) in self._encoder.tensors().items()}
        missing = [name for name, _ in plan.values() if name not in self._files_by_tensor]
        if missing:
            raise AttnscopeError(
                f"{self.where} lacks {len(missing)} of {len(plan)} tensors, such as {missing[0]}",
                "the file is incomplete, or of another model than config.json describes",
            )
        needed = {name for name, _ in plan.values()}
        layers = f"{self._prefix}encoder.layer."
        unused = [name for name in self._files_by_tensor if name.startswith(layers) and name not in needed]
        if unused:
            raise AttnscopeError(
                f"{self.where} holds {len(unused)} tensors that config.json has no place for, such as {unused[0]}",
                "give the config.json that belongs to the weights",
            )
        for name, size in plan.values():
            own_size = tuple(self._files_by_tensor[name].get_slice(name).get_shape())
            if own_size != size:
                raise AttnscopeError(
                    f"{self.where}: {name} has shape {own_size}, but config.json makes it {size}",
                    "weights and config.json belong to different models",
                )
        return {ours: name for ours, (name, _) in plan.items()}

    def raw(self) -> Iterator[tuple[str, str, Any]]:
        """Yield every tensor that a network needs, once all are there: our name, the file's, the tensor."""
        for ours, name in self.plan().items():
            try:
                tensor = self._read(name)
            except (SafetensorError, OSError, RuntimeError, TypeError) as error:
                raise _damaged(self._paths_by_tensor[name], error) from error
            yield ours, name, tensor

    def _read(self, name: str) -> Any:
        """Return one tensor of real numbers; refuses complex numbers and quantised integers."""
        # The header tells the type: tensors that are no real numbers are never read.
        file = self._files_by_tensor[name]
        dtype = file.get_slice(name).get_dtype()
        if not dtype.startswith(("F", "BF")):
            reason = "the weights are complex numbers" if dtype.startswith("C") else "the weights are quantised"
            raise AttnscopeError(f"{self.where}: {name} is of type {dtype}", reason)
        if self._framework == "pt" or dtype in _NUMPY_FLOATS:
            return file.get_tensor(name)
        # NumPy has no bfloat16 and no float8. torch has, and each of their numbers is a float32.
        with safe_open(self._paths_by_tensor[name], framework="pt") as torch_file:
            return torch_file.get_tensor(name).float().numpy()

    def _find(self, name: str) -> str:
        """Return the name in the file.

        Checkpoints converted from TensorFlow call a norm's weight gamma and its bias beta.
        """
        name = self._prefix + name
        elder = name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
        return elder if name not in self._files_by_tensor and elder in self._files_by_tensor else name


def _damaged(path: Path, error: Exception) -> AttnscopeError:
    pointer = path.is_file() and path.stat().st_size < 1024
    return AttnscopeError(
        f"{path} is damaged or cut short: {first_line(error)}",
        "it may be a Git LFS pointer: git lfs pull" if pointer else "get the file again",
    )
