"""Attention to the first tokens and the latest ones alone, as streaming heads have it.

Source: the mask is that of Xiao et al. 2024, Efficient Streaming Language Models with Attention Sinks, section 3.2; on
some heads alone, Xiao et al. 2024, DuoAttention, section 2.3. The blocks are ours.
"""

from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from attnscope.core.attention.seam import AttentionCall, attend, select_part

QUERY_BLOCK = 256
"""Queries that are computed at once, each with the sink and at most so many more keys than the window has."""


def attend_streaming(
    call: AttentionCall, sink_size: int, recent_size: int, block: int = QUERY_BLOCK
) -> Float[Tensor, "batch n_heads query d_value"]:
    """Attention of every head to the first keys and the latest ones: causal, and whatever the call hides stays hidden.

        k is seen from q where k <= q and (k < sink_size or q - k < recent_size)

    Memory grows with the number of tokens, not with its square.

    Args:
        call: The attention; its queries and keys are the same tokens.
        sink_size: First keys that every query sees, at least 0.
        recent_size: Latest keys that it sees, including itself, at least 1.
        block: Queries that are computed at once.

    Returns:
        The output in the dtype of the values.

    Raises:
        ValueError: Queries and keys are not the same tokens, or a size is too small.
    """
    n_tokens = call.query.shape[2]
    if n_tokens != call.key.shape[2]:
        raise ValueError(f"streaming heads attend to their own tokens; got {n_tokens} and {call.key.shape[2]} keys")
    if sink_size < 0 or recent_size < 1:
        raise ValueError(f"a sink is at least 0 and a window at least 1; got {sink_size} and {recent_size}")
    tokens = torch.arange(n_tokens, device=call.query.device)
    output = call.value.new_empty(*call.query.shape[:3], call.value.shape[3])
    for start in range(0, n_tokens, block):
        queries = tokens[start : start + block]
        nearest = max(0, start - recent_size + 1)
        keys = torch.cat([tokens[: min(sink_size, nearest)], tokens[nearest : start + len(queries)]])
        distance = queries[:, None] - keys[None]
        seen = (distance >= 0) & ((distance < recent_size) | (keys < sink_size)[None])
        if call.window is not None:
            seen = seen & (distance < call.window)
        part = select_part(call, queries=queries, keys=keys)
        seen = seen if part.mask is None else seen & part.mask
        output[:, :, queries] = attend(replace(part, mask=seen, is_causal=False, window=None))
    return output
