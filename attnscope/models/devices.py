"""Where a model runs, and with what precision."""

import torch

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


def check_device(device: str) -> None:
    """Refuses a device that is not there.

    Raises:
        AttnscopeError: Nothing can be computed on it.
    """
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise AttnscopeError(
            f"cannot compute on device {device!r}: {first_line(error)}", "cpu is always there"
        ) from error
