"""In what precision numbers are added up: float64 where there is one, never less than float32.

Whatever the model computes in: scores, weights and their sums are float32 or better for a bfloat16 model too. Ours.
"""

import torch
from torch import Tensor

WITHOUT_FLOAT64 = frozenset({"mps"})
"""Types of devices that have no float64. There sums over texts and tokens are float32 until they leave the device."""


def without_autocast(device: torch.device | str) -> torch.autocast:
    """Leave the caller's autocast aside within a `with` block: what is computed has the precision that records name."""
    return torch.autocast(torch.device(device).type, enabled=False)


def has_float64(device: torch.device | str) -> bool:
    """Return whether a device computes in float64."""
    return torch.device(device).type not in WITHOUT_FLOAT64


def sum_dtype(device: torch.device | str) -> torch.dtype:
    """Return the precision of sums on a device: float64, or float32 where that is the best there is."""
    return torch.float64 if has_float64(device) else torch.float32


def move(numbers: Tensor, device: torch.device | str) -> Tensor:
    """Return numbers on a device; those in float64 in the precision of its sums."""
    dtype = sum_dtype(device) if numbers.dtype == torch.float64 else numbers.dtype
    return numbers.to(device, dtype)


def in_float64(numbers: Tensor) -> Tensor:
    """Return numbers of any shape in float64: where they lie, or on the processor if their device has none."""
    return numbers.double() if has_float64(numbers.device) else numbers.cpu().double()
