"""Where a model runs, and with what precision."""

import torch

from attnscope.core.attention.precision import has_float64
from attnscope.errors import AttnscopeError, first_line

_DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}


def dtype_of(name: str) -> torch.dtype:
    """The precision of a name.

    Raises:
        AttnscopeError: There is none.
    """
    if name not in _DTYPES:
        raise AttnscopeError(f"there is no precision {name!r}", f"one of {', '.join(_DTYPES)}")
    return _DTYPES[name]


def place(device: str, dtype: str = "float32") -> tuple[torch.device, torch.dtype]:
    """The device that a name means, and the precision; refused where they are not there.

    Args:
        device: As torch names it, or "auto": CUDA if there is one, else Apple's GPU, else the processor.
        dtype: The name of a precision.

    Raises:
        AttnscopeError: Nothing can be computed there, or not in that precision.
    """
    precision = dtype_of(dtype)
    found = _find_device(_best() if device == "auto" else device)
    if precision == torch.float64 and not has_float64(found):
        raise AttnscopeError(f"{found} has no float64", "choose --dtype float32, or --device cpu")
    return found, precision


def _best() -> str:
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def _find_device(device: str) -> torch.device:
    try:
        found = torch.empty(1, device=device).device
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        hint = "--device auto takes the best there is; cpu is always there"
        if device.partition(":")[0] == "cuda" and torch.cuda.is_available():
            hint = f"there are {torch.cuda.device_count()} of them, from cuda:0 on; {hint}"
        raise AttnscopeError(f"cannot compute on device {device!r}: {first_line(error)}", hint) from error
    if found.type == "meta":
        raise AttnscopeError("cannot compute on device 'meta': it holds no numbers", "cpu is always there")
    return found
