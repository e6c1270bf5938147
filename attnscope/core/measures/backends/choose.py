"""Which back end makes the pass over the weights: torch, or one fused pass that numba or triton compiles. Ours."""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from attnscope.core.attention.seam import AttentionCall
from attnscope.core.attention.tiles import Buffers
from attnscope.core.measures.backends import torch_pass
from attnscope.core.measures.backends.torch_pass import Reader
from attnscope.core.measures.plan import Plan

Backend = Literal["torch", "numba", "triton"]

DEVICES: dict[Backend, str] = {"numba": "cpu", "triton": "cuda"}
"""The device that each compiled pass is for; torch's is for all."""

WIDEST = 512
"""Bytes of a head's query, key or value beyond which triton's tiles would not fit beside each other on all devices."""

PAIRS: dict[Backend, int] = {"numba": 2**20, "triton": 2**25}
"""Queries times keys of a block that a compiled pass makes, which keeps weights of a part of them at a time, or none:
what the plan works out for each takes 4 or 128 MB a function of both."""

Pass = Callable[[AttentionCall, Plan, tuple[str, ...], Reader, Buffers], Tensor]
"""As `torch_pass.run`."""


def makes(backend: Backend, call: AttentionCall) -> bool:
    """Whether a back end can make a call; what it cannot make, torch makes.

    Args:
        backend: The back end.
        call: The attention.
    """
    if backend == "torch":
        return True
    query, key, value = call.query, call.key, call.value
    fits = query.device.type == DEVICES[backend] and torch.promote_types(query.dtype, torch.float32) == torch.float32
    if backend == "numba":
        return fits
    widest = max(query.shape[3], value.shape[3]) * max(query.element_size(), value.element_size())
    # Programs are counted in 16 bits along all axes but the first.
    return fits and query.dtype == key.dtype and widest <= WIDEST and len(query) < 2**16


def pairs_of(backend: Backend, call: AttentionCall) -> int | None:
    """How many pairs of query and key a block may hold; None = as many as `core.tiles` says of a tile in memory."""
    return PAIRS.get(backend) if makes(backend, call) else None


def pass_of(backend: Backend, call: AttentionCall) -> Pass:
    """What makes the pass of a call: the back end where it can, else torch.

    Args:
        backend: The back end; numba computes in float32 on the processor, triton likewise on a CUDA device.
        call: The attention.

    Returns:
        As `torch_pass.run`: gives the output, (batch, n_heads, query, d_value), in the dtype of the values.
    """
    if backend == "numba" and makes(backend, call):
        from attnscope.core.measures.backends import numba_pass

        return numba_pass.run
    if backend == "triton" and makes(backend, call):
        from attnscope.core.measures.backends import triton_pass

        return triton_pass.run
    return torch_pass.run
