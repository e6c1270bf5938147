"""Norms of value vectors, and of what the output projection makes of them (Kobayashi et al. 2020, section 2)."""

import torch
from jaxtyping import Float
from torch import Tensor

from attnscope.core.attention.precision import in_float64


def output_factor(weight: Float[Tensor, "d_model joined"], n_heads: int) -> Float[Tensor, "n_heads d d_value"]:
    """Makes the output projection small, so that norms behind it cost little: |W_O v| = |R v|, W_O = Q R.

    Args:
        weight: The output projection as torch.nn.Linear stores it, (d_model, n_heads * d_value).
        n_heads: How many heads' outputs it joins.

    Returns:
        R of each head, (n_heads, at most d_value, d_value), float64 for a float64 weight, else float32.

    Raises:
        ValueError: The width is not a multiple of the heads.
    """
    if weight.ndim != 2 or weight.shape[1] % n_heads:
        raise ValueError(f"an output projection of {n_heads} heads is (d_model, heads * d_value); got {weight.shape}")
    by_head = in_float64(weight.detach()).reshape(weight.shape[0], n_heads, -1).transpose(0, 1)
    small: Tensor = torch.linalg.qr(by_head, mode="r").R.to(
        weight.device, torch.promote_types(weight.dtype, torch.float32)
    )
    return small


def value_norms(
    values: Float[Tensor, "batch n_kv_heads key d_value"],
    n_heads: int,
    factor: Float[Tensor, "n_heads d d_value"] | None = None,
) -> Float[Tensor, "batch n_heads key"]:
    """|v_k|, or |W_O v_k| of each head.

    Args:
        values: (batch, n_kv_heads, key, d_value).
        n_heads: How many query heads there are.
        factor: What `output_factor` made of the output projection; None = plain norms.

    Returns:
        (batch, n_heads, key), at least 0, in the unit of the values; float32 or better.
    """
    group = n_heads // values.shape[1]
    wide = values.to(torch.promote_types(values.dtype, torch.float32))
    if factor is None:
        norms: Tensor = torch.linalg.vector_norm(wide, dim=-1)
        return norms if group == 1 else norms.repeat_interleave(group, 1)
    # Heads first: one product a head serves all texts.
    by_head = wide.transpose(0, 1)
    by_head = (by_head if group == 1 else by_head.repeat_interleave(group, 0)).flatten(1, 2)
    norms = torch.linalg.vector_norm(torch.bmm(by_head, factor.to(wide.dtype).mT), dim=-1)
    return norms.view(n_heads, values.shape[0], values.shape[2]).transpose(0, 1)
