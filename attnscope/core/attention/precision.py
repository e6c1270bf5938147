"""Choose the precision of sums: float64 on devices that have it, float32 on others.

Scores, weights and sums are never below float32, even if the model computes in bfloat16. Ours.
"""

import torch
from torch import Tensor

WITHOUT_FLOAT64 = frozenset({"mps"})
"""Types of devices without float64. Sums over texts and tokens on them are float32, and float64 once on the CPU."""


def has_float64(device: torch.device | str) -> bool:
    """Return whether a device computes in float64."""
    return torch.device(device).type not in WITHOUT_FLOAT64


def sum_dtype(device: torch.device | str) -> torch.dtype:
    """Return the precision of sums on a device: float64, or float32 where that is the best there is."""
    return torch.float64 if has_float64(device) else torch.float32


def move(numbers: Tensor, device: torch.device | str) -> Tensor:
    """Return numbers of any shape on a device; float64 becomes float32 on a device without float64."""
    dtype = sum_dtype(device) if numbers.dtype == torch.float64 else numbers.dtype
    return numbers.to(device, dtype)


def in_float64(numbers: Tensor) -> Tensor:
    """Return numbers of any shape in float64: on their device, or on the CPU if their device has no float64."""
    return numbers.double() if has_float64(numbers.device) else numbers.cpu().double()
