"""A device that is not there: tensors that say they live elsewhere, and whose numbers lie in ordinary memory.

Within `pretending()` a tensor made with `device="pretend"` is a `Pretended`: whoever mixes it with a tensor of the
processor, or asks for its numbers without moving it first, gets the error that a true device gives. So tests without
a GPU see every tensor that was made in the wrong place. Moves between the two are counted. There may be several:
"pretend:1". Like Apple's GPUs it can lack float64.

It is torch's third-party backend (PrivateUse1), as a Python mode; nothing is compiled.
"""

import contextlib
import functools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_map_only

NAME = "pretend"

aten = torch.ops.aten

_INDEXING = {
    aten.index.Tensor,
    aten.index_put_.default,
    aten.index_put.default,
    aten._index_put_impl_.default,
    aten._unsafe_index.Tensor,
}
"""As on CUDA, an index may lie on the processor; it is moved each time, which `moves` counts."""

moves: Counter[str] = Counter()
"""How often tensors of more than one number were moved, and how: "pretend to cpu"."""

_lacks: set[torch.dtype] = set()


class _Backend(getattr(backend_registration, "_DummyBackendModule", object)):
    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]


@functools.cache
def _registered() -> bool:
    """Tells torch of the device, once a process; false where this torch knows no such backends."""
    setup = getattr(backend_registration, "_setup_privateuseone_for_python_backend", None)
    if setup is None:
        return False
    setup(NAME, backend_module=_Backend())
    return True


def _numbered(device: Any) -> torch.device:
    found = torch.device(device)
    return torch.device(NAME, found.index or 0) if found.type == NAME else found


class Pretended(torch.Tensor):
    """A tensor that says it is elsewhere."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor, device: torch.device) -> "Pretended":
        if held.dtype in _lacks:
            raise TypeError(f"cannot make a tensor of {held.dtype} on {device}: this device has none")
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=device,
        )
        made.held = held
        return made

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    def numpy(self, *_: Any, **__: Any) -> Any:
        raise TypeError(
            f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() first"
        )

    def __array__(self, *_: Any, **__: Any) -> Any:
        return self.numpy()

    def tolist(self) -> Any:
        return self.detach().cpu().tolist()

    def __repr__(self, **_: Any) -> str:
        return f"Pretended({self.held!r}, {self.device})"

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(function, args, kwargs or {})


def _run(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Runs one operation on the numbers, where all of its tensors say the same device."""
    if torch._C._dispatch_has_kernel_for_dispatch_key(function.name(), "CompositeImplicitAutograd"):
        with _Mode():  # made of other operations, which come here by themselves but for inference mode
            return function.decompose(*args, **kwargs)
    given = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, torch.Tensor)]
    source = next((x.device for x in given if isinstance(x, Pretended)), None)
    if function is aten.copy_.default:
        source = args[0].device
        _count(args[1], source)
    elif function is aten._to_copy.default:
        source = _numbered(kwargs.get("device") or args[0].device)
        _count(args[0], source)
    else:
        devices = {x.device for x in given if x.ndim or isinstance(x, Pretended)}
        if len(devices) > 1 and function in _INDEXING and isinstance(args[0], Pretended):
            moves[f"index to {NAME}"] += 1
        elif len(devices) > 1:
            names = " and ".join(sorted(map(str, devices)))
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found at least two devices, {names}! ({function})"
            )
        if kwargs.get("device") is not None:
            source = _numbered(kwargs["device"])
    inner_args, inner = tree_map_only(Pretended, lambda x: x.held, (args, dict(kwargs)))
    if inner.get("device") is not None and torch.device(inner["device"]).type == NAME:
        inner["device"] = torch.device("cpu")
    inner.pop("pin_memory", None)
    pretends = source is not None and source.type == NAME
    found = function(*inner_args, **inner)
    if not pretends or function is aten._local_scalar_dense.default:
        return found
    wrapped = tree_map_only(torch.Tensor, lambda x: Pretended(x, source), found)
    return return_and_correct_aliasing(function, args, kwargs, wrapped)


def _count(moved: torch.Tensor, target: torch.device) -> None:
    if moved.device != target and moved.numel() > 1:
        moves[f"{moved.device.type} to {target.type}"] += 1


class _Mode(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(function, args, kwargs or {})


@contextlib.contextmanager
def pretending(*, float64: bool = True) -> Iterator[Counter[str]]:
    """Gives this thread the device "pretend"; yields how often tensors were moved to it and back.

    Args:
        float64: Whether it has that precision.
    """
    if not _registered():
        import pytest

        pytest.skip("this torch cannot have a device made in Python")
    moves.clear()
    _lacks.update(() if float64 else (torch.float64,))
    # As torch's own fake mode: what Python lists hold is made here first, and then moved.
    before = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)
    try:
        with _Mode():
            yield moves
    finally:
        torch._C._set_only_lift_cpu_tensors(before)
        _lacks.clear()
