"""How far rounding may take a number: bounds from the arithmetic, never from what one machine happened to show.

Which instructions a processor has, how many threads share a sum and how texts are padded all change the order of
additions, and with it the last digits. Two bounds hold whatever the order is:

* `adding`, `attention_error`: a sum of n numbers, each rounded, is off by at most n u of their sizes' sum, u being half
  the distance from 1 to the next number (Higham 2002, section 4.2). For one sum, or one attention.
* `require_no_worse`: through a network of many layers such bounds multiply until they say nothing. There plain PyTorch
  on the same machine in the same precision is the measure: the error against float64 may be at most twice its error
  (as flash-attention's tests have it).
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from attnscope.core.attention import AttentionCall

TIMES = 2.0
"""How much larger than plain PyTorch's an error may be: both are draws of chance, and the larger may be ours."""


def unit(dtype: torch.dtype) -> float:
    """Half the distance from 1 to the next number: the largest relative error of one rounding."""
    return torch.finfo(dtype).eps / 2


def adding(terms: int, dtype: torch.dtype = torch.float32) -> float:
    """Largest error of a sum of so many products in any order, relative to the sum of their sizes."""
    return (terms + 1) * unit(dtype)


def attention_error(call: AttentionCall) -> tuple[float, float]:
    """Largest errors of one attention in its own precision, float32 at least: of weights, relative; of outputs.

    A score is a sum of d products, scaled: it is off by e <= (d + 2) u s |q| |k|. A weight is exp(score - largest) over
    the sum of these, so it is off by 2 e + (n + 8) u of itself: the two scores' errors, their difference, exp (4 u at
    most) and the sum. An output adds n products of weights and values.
    """
    dtype = torch.promote_types(call.query.dtype, torch.float32)
    n_keys, d_head = call.key.shape[2:]
    query, key, value = (part.detach().double() for part in (call.query, call.key, call.value))
    if not query.numel() * key.numel():
        return 0.0, 0.0
    largest = abs(call.scale) * float(query.norm(dim=-1).amax() * key.norm(dim=-1).amax())
    if call.bias is not None:
        largest += float(call.bias.detach().nan_to_num(neginf=0.0).abs().amax())
    of_weights = 2 * largest * adding(d_head + 1, dtype) + adding(n_keys + 7, dtype)
    return of_weights, (of_weights + adding(n_keys, dtype)) * float(value.abs().amax())


def close_to(call: AttentionCall, *, times: float = 1.0) -> dict[str, float]:
    """Arguments for `torch.testing.assert_close` of outputs that two kernels give for a call: each may be off."""
    return {"rtol": 0.0, "atol": 2 * times * attention_error(call)[1]}


def weights_close_to(call: AttentionCall) -> dict[str, float]:
    """Likewise of weights."""
    relative = attention_error(call)[0]
    return {"rtol": 2 * relative, "atol": torch.finfo(torch.float32).tiny}


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
    ours, theirs, true = (np.asarray(numbers, np.float64) for numbers in (found, plain, exact))
    assert ours.shape == theirs.shape == true.shape, err_msg
    size = np.abs(true).max(initial=0.0) if size is None else np.asarray(size, np.float64)
    errors = [np.divide(np.abs(it - true), size, where=size > 0, out=np.zeros(true.shape)) for it in (ours, theirs)]
    error, allowed = (float(part.max(initial=0.0)) for part in errors)
    slack = unit(torch.float32) if slack is None else slack
    assert error <= TIMES * allowed + slack, (
        f"{err_msg}: off by {error:.2e} of the size; plain PyTorch by {allowed:.2e}"
    )
