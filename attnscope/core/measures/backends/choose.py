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
"""Bytes of a head's query, key or value beyond which triton's tiles would not fit on all devices."""

PAIRS: dict[Backend, int] = {"numba": 2**20, "triton": 2**25}
"""Queries times keys of a block of a compiled pass, which keeps weights of a part of them at a time, or none. The
plan's functions of both take 4 or 128 MB each."""

Pass = Callable[[AttentionCall, Plan, tuple[str, ...], Reader, Buffers], Tensor]
"""As `torch_pass.run`."""


def makes(backend: Backend, call: AttentionCall) -> bool:
    """Whether a back end can make a call; torch makes what it cannot."""
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
    """How many pairs of query and key a block may hold; None = as many as a tile in memory."""
    return PAIRS.get(backend) if makes(backend, call) else None


def pass_of(backend: Backend, call: AttentionCall) -> Pass:
    """The pass of a call, as `torch_pass.run`: that of the back end if it can make the call, else torch's.

    numba computes in float32 on the processor, triton likewise on a CUDA device.
    """
    if backend == "numba" and makes(backend, call):
        from attnscope.core.measures.backends import numba_pass

        return numba_pass.run
    if backend == "triton" and makes(backend, call):
        from attnscope.core.measures.backends import triton_pass

        return triton_pass.run
    return torch_pass.run
