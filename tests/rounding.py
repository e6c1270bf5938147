"""How far rounding may take a number: bounds from the arithmetic, never from what one machine happened to show.

Which instructions a processor has, how many threads share a sum and how texts are padded all change the order of
additions, and with it the last digits. Two bounds hold whatever the order is:

* `adding`: a sum of n numbers, each rounded, is off by at most n u of their sizes' sum, u being half the distance from
  1 to the next number (Higham 2002, section 4.2).
* `require_no_worse`, `require_output`: through a network of many layers such bounds multiply until they say nothing.
  There plain PyTorch on the same machine in the same precision is the measure: the error against float64 may be at most
  twice its error (as flash-attention's tests have it).

Where a test asks whether two ways are the same in mathematics, it had better ask in float64 (`core_helpers.EXACT`).
"""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from attnscope.core.attention.seam import AttentionCall, attend_with_weights

TIMES = 2.0
"""How much larger than plain PyTorch's an error may be: both are draws of chance, and the larger may be ours."""


def unit(dtype: torch.dtype) -> float:
    """Half the distance from 1 to the next number: the largest relative error of one rounding."""
    return torch.finfo(dtype).eps / 2


def adding(terms: int, dtype: torch.dtype = torch.float32) -> float:
    """Largest error of a sum of so many products in any order, relative to the sum of their sizes."""
    return (terms + 1) * unit(dtype)


def require_no_worse(
    found: "ArrayLike | Tensor",
    plain: "ArrayLike | Tensor",
    exact: "ArrayLike | Tensor",
    *,
    size: Any = None,
    slack: float | None = None,
    err_msg: str = "",
) -> None:
    """The largest error against float64 is at most twice that of plain PyTorch in the same precision.

    Args:
        found: What is looked at.
        plain: What plain PyTorch has in the same precision, on the same machine.
        exact: What float64 has.
        size: What an error is relative to, broadcastable; None = the largest number.
        slack: What else rounding may cost, relative to the size, such as `adding` for a sum that plain PyTorch had in
            float64; None = the one rounding of a float32.
        err_msg: What to say first where it fails.
    """
    # NumPy has no bfloat16.
    given = (one.double() if isinstance(one, Tensor) else one for one in (found, plain, exact))
    ours, theirs, true = (np.asarray(numbers, np.float64) for numbers in given)
    assert ours.shape == theirs.shape == true.shape, err_msg
    size = np.abs(true).max(initial=0.0) if size is None else np.asarray(size, np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):  # of nothing, any error is too much
        error = float(np.where(ours == true, 0.0, np.abs(ours - true) / size).max(initial=0.0))
        allowed = float(np.where(theirs == true, 0.0, np.abs(theirs - true) / size).max(initial=0.0))
    assert np.isfinite(allowed), f"{err_msg}: plain PyTorch is of no use as a measure"
    slack = unit(torch.float32) if slack is None else slack
    assert error <= TIMES * allowed + slack, (
        f"{err_msg}: off by {error:.2e} of the size; plain PyTorch by {allowed:.2e}"
    )


def require_output(found: Tensor, call: AttentionCall) -> None:
    """An attention's output is no worse than plain PyTorch's in the precision of the call.

    Beside twice its error one rounding of a score may be ours: it moves a weight by u times the largest score, which is
    at most s |q| |k|.
    """
    exact = in_float64(call)
    if not exact.key.numel() * exact.query.numel() * exact.value.numel():
        assert torch.equal(found, attend_with_weights(call)[0])
        return
    score = abs(call.scale) * float(exact.query.norm(dim=-1).amax() * exact.key.norm(dim=-1).amax())
    slack = (1 + 2 * score) * unit(call.query.dtype)
    plain = attend_with_weights(call)[0].detach()
    true = attend_with_weights(exact)[0].detach()
    require_no_worse(found.detach(), plain, true, size=float(exact.value.abs().amax()), slack=slack)


def in_float64(call: AttentionCall) -> AttentionCall:
    """The same attention in float64."""
    parts = {name: getattr(call, name) for name in ("query", "key", "value", "bias", "sinks")}
    return replace(call, **{name: part.double() for name, part in parts.items() if part is not None})
