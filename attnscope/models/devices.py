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
from attnscope.errors import AttnscopeError, first_line, require_choice

DeviceMap = str | Mapping[str, str | int]
"""As accelerate takes it: "auto", "balanced", "sequential", or the device of each module, "disk" among them."""


def name_dtype(dtype: torch.dtype) -> str:
    """Return the name of a precision, such as "float32"."""
    return str(dtype).removeprefix("torch.")


def place(device: str, dtype: str = "float32") -> tuple[torch.device, torch.dtype]:
    """Return the device and the precision of two names; refuse a device that cannot compute, or not in this precision.

    The device "auto" is CUDA if there is one, else Apple's GPU, else the processor.
    """
    precision: torch.dtype = getattr(torch, dtype)
    device = _best() if device == "auto" else device
    # Try the device: a name may be well formed, and its driver missing.
    try:
        where = torch.zeros(1, device=device).device
        torch.zeros(1, device=where).cpu()  # "meta" holds no numbers
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        hint = "--device auto takes the best there is; cpu is always there"
        raise AttnscopeError(
            f"cannot compute on device {device!r}: {first_line(error)}", hint
        ) from error
    if precision == torch.float64 and not has_float64(where):
        raise AttnscopeError(f"{where} has no float64", "choose --dtype float32, or --device cpu")
    return where, precision


def _best() -> str:
    # CUDA first, then Apple's GPU.
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def device_of(module: nn.Module) -> torch.device:
    """Return where a module's first parameter lies; the processor for modules without parameters."""
    return next((parameter.device for parameter in module.parameters()), torch.device("cpu"))


def fork_rng(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Within it, torch may draw random numbers on the processor and a device; afterwards the caller's own go on."""
    return torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])


# Several devices --------------------------------------------------------------------------------------------------


def spreading_options(device_map: DeviceMap) -> dict[str, Any]:
    """Return the options with which transformers lets accelerate spread a model over devices."""
    if isinstance(device_map, str):
        require_choice("device map", device_map, ("auto", "balanced", "balanced_low_0", "sequential"))
    else:
        device_map = dict(device_map)
    if not all(importlib.util.find_spec(package) for package in ("accelerate", "psutil")):
        raise AttnscopeError(
            "spreading a model over devices needs accelerate",
            'install the extra: pip install "attnscope[accelerate]"',
        )
    # Weights that lie on disk go when this process ends.
    folder = tempfile.mkdtemp(prefix="attnscope-offload-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return {"device_map": device_map, "offload_folder": folder}


def describe_spread(device_map: Mapping[str, Any]) -> str:
    """Return which parts of a model lie where, as a sentence."""
    # How many parts each device holds.
    counts = Counter(
        f"cuda:{device}" if isinstance(device, int) else str(device) for device in device_map.values()
    )
    parts = ", ".join(f"{device} ({n} part{'s' if n > 1 else ''})" for device, n in counts.items())
    return f"Spread over {parts}."


def is_spread(model: nn.Module) -> bool:
    """Return whether accelerate moves what a model's parts get."""
    return _first_device(model) is not None


def input_device(model: nn.Module) -> torch.device:
    """Return where a model takes its inputs: its own device, or that of the first layer of one that is spread."""
    # A spread model takes inputs where its first part runs.
    first = _first_device(model)
    if first is None:
        return device_of(model)
    return torch.device("cuda", first) if isinstance(first, int) else torch.device(first)


def _first_device(model: nn.Module) -> Any:
    # accelerate's hooks carry the device; the outermost one that has it runs first.
    devices = (
        getattr(getattr(module, "_hf_hook", None), "execution_device", None)
        for module in model.modules()
    )
    return next((device for device in devices if device is not None), None)
