"""Where a model runs, and with what precision."""

import contextlib

import torch
from torch import nn

from attnscope.core.attention.precision import has_float64
from attnscope.errors import AttnscopeError, first_line

_DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}


def dtype_of(name: str) -> torch.dtype:
    """Return the precision of a name."""
    if name not in _DTYPES:
        raise AttnscopeError(f"there is no precision {name!r}", f"one of {', '.join(_DTYPES)}")
    return _DTYPES[name]


def place(device: str, dtype: str = "float32") -> tuple[torch.device, torch.dtype]:
    """Return the device and the precision that names mean; refused where nothing can be computed there, or not so.

    The device "auto" is CUDA if there is one, else Apple's GPU, else the processor.
    """
    precision = dtype_of(dtype)
    device = _best() if device == "auto" else device
    try:
        where = torch.empty(1, device=device).device
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        hint = "--device auto takes the best there is; cpu is always there"
        if device.partition(":")[0] == "cuda" and torch.cuda.is_available():
            hint = f"there are {torch.cuda.device_count()} of them, from cuda:0 on; {hint}"
        raise AttnscopeError(f"cannot compute on device {device!r}: {first_line(error)}", hint) from error
    if where.type == "meta":
        raise AttnscopeError("cannot compute on device 'meta': it holds no numbers", "cpu is always there")
    if precision == torch.float64 and not has_float64(where):
        raise AttnscopeError(f"{where} has no float64", "choose --dtype float32, or --device cpu")
    return where, precision


def _best() -> str:
    return "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"


def device_of(module: nn.Module) -> torch.device:
    """Where a module's first parameter lies; the processor for modules without parameters."""
    return next((parameter.device for parameter in module.parameters()), torch.device("cpu"))


def name_dtype(dtype: torch.dtype) -> str:
    """Return the name of a precision, such as "float32"."""
    return str(dtype).removeprefix("torch.")


def fork_rng(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Within it, torch may draw random numbers on the processor and a device; afterwards the caller's own go on."""
    return torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])
