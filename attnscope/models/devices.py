"""Choose the device and the dtype of a model. The library accelerate can spread a model over several devices."""

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
"""accelerate's `device_map`: a strategy such as "auto", or module path -> device, such as {"encoder.layer.0": 1}.

A device is the number of a GPU, "cpu", or "disk".
"""


def name_dtype(dtype: torch.dtype) -> str:
    """Return the name of a torch dtype, such as "float32"."""
    return str(dtype).removeprefix("torch.")


def choose_device(name: str, dtype: str) -> tuple[torch.device, torch.dtype]:
    """Return the torch device and dtype with these names, such as "cuda:0" and "float32".

    The device "auto" is CUDA if there is one, else Apple's GPU, else the CPU.

    Raises:
        AttnscopeError: The device cannot compute, or not with this dtype.
    """
    torch_dtype: torch.dtype = getattr(torch, dtype)
    if name == "auto":
        name = _best_device()
    # Compute on the device: torch.device accepts the name of one whose driver is missing. The device "meta" holds no
    # numbers, and fails at cpu().
    try:
        device = torch.zeros(1, device=name).device
        torch.zeros(1, device=device).cpu()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise AttnscopeError(
            f"cannot compute on device {name!r}: {first_line(error)}",
            "--device auto takes the best there is; cpu is always there",
        ) from error
    if torch_dtype == torch.float64 and not has_float64(device):
        raise AttnscopeError(f"{device} has no float64", "choose --dtype float32, or --device cpu")
    return device, torch_dtype


def _best_device() -> str:
    """Return the name of the fastest device that is available."""
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def device_of(module: nn.Module) -> torch.device:
    """Return the device of a module's first parameter; the CPU for modules without parameters."""
    return next((parameter.device for parameter in module.parameters()), torch.device("cpu"))


def fork_rng(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Restore torch's random generators when the context ends, so that the caller's random numbers do not change."""
    return torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])


# Several devices --------------------------------------------------------------------------------------------------


def make_spread_options(device_map: DeviceMap) -> dict[str, Any]:
    """Return the options of transformers' `from_pretrained` that make accelerate spread a model over devices."""
    if isinstance(device_map, str):
        require_choice("device map", device_map, ("auto", "balanced", "balanced_low_0", "sequential"))
    else:
        device_map = dict(device_map)
    if not all(importlib.util.find_spec(package) for package in ("accelerate", "psutil")):
        raise AttnscopeError(
            "spreading a model over devices needs accelerate",
            'install the extra: pip install "attnscope[accelerate]"',
        )
    # accelerate writes weights that do not fit into memory to a folder. Remove it when this process ends.
    folder = tempfile.mkdtemp(prefix="attnscope-offload-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return {"device_map": device_map, "offload_folder": folder}


def describe_device_map(device_map: Mapping[str, Any]) -> str:
    """Return how many parts of a model lie on each device, such as "Spread over cuda:0 (9 parts), disk (1 part)".

    Args:
        device_map: The device of each part of the model, a GPU's number or a name.
    """
    devices = [
        f"cuda:{device}" if isinstance(device, int) else str(device) for device in device_map.values()
    ]
    parts = [f"{device} ({amount(n_parts, 'part')})" for device, n_parts in Counter(devices).items()]
    return f"Spread over {', '.join(parts)}."


def is_spread(model: nn.Module) -> bool:
    """Return whether accelerate has spread a model over devices. Then it also moves the inputs of each part."""
    return _first_device(model) is not None


def input_device(model: nn.Module) -> torch.device:
    """Return the device of a model's inputs: the model's device; if it is spread, the device of its first part."""
    first_device = _first_device(model)
    if first_device is None:
        return device_of(model)
    if isinstance(first_device, int):
        return torch.device("cuda", first_device)
    return torch.device(first_device)


def _first_device(model: nn.Module) -> Any:
    """Return the device of a spread model's first part, a GPU's number or a name; None if it is not spread."""
    for module in model.modules():
        # accelerate sets `_hf_hook` on each part of a spread model; the hook knows the part's device.
        device = getattr(getattr(module, "_hf_hook", None), "execution_device", None)
        if device is not None:
            return device
    return None
