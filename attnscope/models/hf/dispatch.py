"""Models too large for one device: their layers on several, by accelerate, which moves what each layer gets."""

import atexit
import importlib.util
import shutil
import tempfile
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import torch
from torch import nn

from attnscope.errors import AttnscopeError
from attnscope.models.devices import device_of

DeviceMap = str | Mapping[str, str | int]
"""As accelerate takes it: "auto", "balanced", "sequential", or the device of each module, "disk" among them."""

_NAMES = ("auto", "balanced", "balanced_low_0", "sequential")


def loading_options(device_map: DeviceMap) -> dict[str, Any]:
    """Return what transformers is to load a model with, so that it is spread over devices."""
    if isinstance(device_map, str) and device_map not in _NAMES:
        raise AttnscopeError(f"there is no device map {device_map!r}", f"choose from {', '.join(_NAMES)}")
    if not all(importlib.util.find_spec(package) for package in ("accelerate", "psutil")):
        raise AttnscopeError(
            "spreading a model over devices needs accelerate", 'install the extra: pip install "attnscope[accelerate]"'
        )
    mapped = device_map if isinstance(device_map, str) else dict(device_map)
    return {"device_map": mapped, "offload_folder": str(_make_offload_folder())}


_OFFLOADED = "attnscope-offload-"
_LOCK = ".lock"


def _make_offload_folder() -> Path:
    """Return a folder for weights that lie on disk, which goes when this process ends.

    One that is killed cannot see to that. But the lock that it holds in its folder goes with it, and the next process
    that makes one removes those that nobody holds.
    """
    for left in Path(tempfile.gettempdir()).glob(f"{_OFFLOADED}*/{_LOCK}"):
        with suppress(OSError, ImportError), left.open("rb") as file:  # held, somebody else's, or gone already
            _hold(file)
            shutil.rmtree(left.parent)
    folder = Path(tempfile.mkdtemp(prefix=_OFFLOADED))
    lock = (folder / _LOCK).open("wb")
    with suppress(OSError, ImportError):  # a file system or a Python without locks
        _hold(lock)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    atexit.register(lock.close)  # before the folder is removed
    return folder


def _hold(lock: IO[bytes]) -> None:
    """Lock a file until it is closed, at the latest when the process ends."""
    import fcntl  # not on Windows

    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def is_dispatched(model: nn.Module) -> bool:
    """Return whether accelerate moves what a model's parts get."""
    return any(_execution_device(module) is not None for module in model.modules())


def input_device(model: nn.Module) -> torch.device:
    """Where a model takes its inputs: its own device, or that of the first layer of one that is spread."""
    devices = (_execution_device(module) for module in model.modules())
    first = next((device for device in devices if device is not None), None)
    if first is None:
        return device_of(model)
    return torch.device("cuda", first) if isinstance(first, int) else torch.device(first)


def describe_spread(device_map: Mapping[str, Any]) -> str:
    """Return which parts of a model lie where, as a sentence."""
    counts = Counter(f"cuda:{device}" if isinstance(device, int) else str(device) for device in device_map.values())
    parts = ", ".join(f"{device} ({n} part{'s' if n > 1 else ''})" for device, n in counts.items())
    return f"Spread over {parts}."


def _execution_device(module: nn.Module) -> Any:
    return getattr(getattr(module, "_hf_hook", None), "execution_device", None)
