"""Which back end makes the pass over the weights: torch, or one fused pass that numba compiles. Ours."""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from attnscope.core.attention import AttentionCall
from attnscope.core.measures import torch_pass
from attnscope.core.measures.plan import Plan
from attnscope.core.measures.torch_pass import Reader
from attnscope.core.tiles import Buffers

Backend = Literal["torch", "numba"]

Pass = Callable[[AttentionCall, Plan, tuple[str, ...], Reader, Buffers], Tensor]
"""As `torch_pass.run`."""


def pass_of(backend: Backend, call: AttentionCall) -> Pass:
    """What makes the pass of a call: the back end where it can, else torch.

    Args:
        backend: The back end; numba computes in float32, on the processor alone.
        call: The attention.

    Returns:
        As `torch_pass.run`: gives the output, (batch, n_heads, query, d_value), in the dtype of the values.
    """
    fits = call.query.device.type == "cpu" and torch.promote_types(call.query.dtype, torch.float32) == torch.float32
    if backend == "numba" and fits:
        from attnscope.core.measures.numba_pass import run

        return run
    return torch_pass.run
