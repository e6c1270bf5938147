"""Choose where a model runs and with which precision: on one device, or on several by accelerate."""

import atexit
import contextlib
import importlib.util
import shutil
import tempfile
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from attnscope.core.attention.precision import has_float64
from attnscope.errors import AttnscopeError, amount, first_line, require_choice

DeviceMap = str | Mapping[str, str | int]
"""What accelerate takes as `device_map`: "auto", "balanced", "sequential", or the device of each module by its path: a
GPU's number, "cpu" or "disk"."""


def name_dtype(dtype: torch.dtype) -> str:
    """Return the name of a torch dtype, such as "float32"."""
    return str(dtype).removeprefix("torch.")


def choose_device(name: str, dtype: str) -> tuple[torch.device, torch.dtype]:
    """Return the device and the precision of the given names.

    The device "auto" is CUDA if there is one, else Apple's GPU, else the processor.

    Raises:
        AttnscopeError: The device cannot compute, or not in this precision.
    """
    precision: torch.dtype = getattr(torch, dtype)
    if name == "auto":
        name = _best_device()
    # Try the device: its name may be well formed, and its driver missing. "meta" holds no numbers, and fails at cpu().
    try:
        device = torch.zeros(1, device=name).device
        torch.zeros(1, device=device).cpu()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        hint = "--device auto takes the best there is; cpu is always there"
        raise AttnscopeError(f"cannot compute on device {name!r}: {first_line(error)}", hint) from error
    if precision == torch.float64 and not has_float64(device):
        raise AttnscopeError(f"{device} has no float64", "choose --dtype float32, or --device cpu")
    return device, precision


def _best_device() -> str:
    """Return the device that "auto" stands for."""
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def device_of(module: nn.Module) -> torch.device:
    """Return the device of a module's first parameter; the processor for modules without parameters."""
    return next((parameter.device for parameter in module.parameters()), torch.device("cpu"))


def fork_rng(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Restore torch's random generators when the context ends, so that the caller's random numbers stay the same."""
    return torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])


# Several devices --------------------------------------------------------------------------------------------------


def spreading_options(device_map: DeviceMap) -> dict[str, Any]:
    """Return the options of `from_pretrained` with which accelerate spreads a model over devices."""
    if isinstance(device_map, str):
        require_choice("device map", device_map, ("auto", "balanced", "balanced_low_0", "sequential"))
    else:
        device_map = dict(device_map)
    if not all(importlib.util.find_spec(package) for package in ("accelerate", "psutil")):
        raise AttnscopeError(
            "spreading a model over devices needs accelerate",
            'install the extra: pip install "attnscope[accelerate]"',
        )
    # Weights that do not fit into memory go to a folder, which is removed when this process ends.
    folder = tempfile.mkdtemp(prefix="attnscope-offload-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return {"device_map": device_map, "offload_folder": folder}


def describe_spread(device_map: Mapping[str, Any]) -> str:
    """Return how many parts of a model lie on each device, such as "Spread over cuda:0 (9 parts), disk (1 part)".

    Args:
        device_map: The device of each part of the model, a GPU's number or a name.
    """
    devices = [
        f"cuda:{place}" if isinstance(place, int) else str(place) for place in device_map.values()
    ]
    parts = [f"{device} ({amount(n, 'part')})" for device, n in Counter(devices).items()]
    return f"Spread over {', '.join(parts)}."


def is_spread(model: nn.Module) -> bool:
    """Return whether accelerate has spread a model over devices, and moves the inputs of its parts there."""
    return _first_device(model) is not None


def input_device(model: nn.Module) -> torch.device:
    """Return the device of a model's inputs: the model's own, or that of its first part if it is spread."""
    first = _first_device(model)
    if first is None:
        return device_of(model)
    return torch.device("cuda", first) if isinstance(first, int) else torch.device(first)


def _first_device(model: nn.Module) -> Any:
    """Return the device of a spread model's first part, a GPU's number or a name; None if it is not spread."""
    for module in model.modules():
        # accelerate puts a hook at each part of a spread model, with the part's device.
        device = getattr(getattr(module, "_hf_hook", None), "execution_device", None)
        if device is not None:
            return device
    return None
