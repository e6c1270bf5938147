"""What heads move from keys onto logits, against plain loops."""

import pytest
import torch

from attnscope.core.attention.moved import NOTHING, Targets, measure_moves
from attnscope.core.attention.seam import AttentionCall, attention_weights


@pytest.mark.parametrize("after", [False, True])
def test_what_is_moved_is_the_sum_over_the_keys_that_hold_the_token(after: bool) -> None:
    torch.manual_seed(0)
    n, heads, width = 7, 4, 3
    query = torch.randn(2, heads, n, width, dtype=torch.float64)
    key, value = (torch.randn(2, 2, n, width, dtype=torch.float64) for _ in range(2))
    call = AttentionCall(0, "decoder", query, key, value, 0.5, is_causal=True)
    ids = torch.randint(0, 3, (2, n))
    token, other = torch.randint(0, 3, (2, n)), torch.randint(0, 3, (2, n))
    token[0, 2] = other[0, 2] = NOTHING
    rests = torch.zeros(2, n, dtype=torch.bool)
    rests[:, 0] = True
    slope, other_slope = (torch.randn(2, heads, n, width, dtype=torch.float64) for _ in range(2))
    found = measure_moves(call, Targets(ids, rests, token, other, ids if after else None), slope, other_slope)
    weights = attention_weights(call)
    for b in range(2):
        for h in range(heads):
            for q in range(n):
                weight = above = nats = even_nats = active = 0.0
                off = [k for k in range(q + 1) if k > 0]
                total = sum(float(weights[b, h, q, k]) for k in off)
                for k in off:
                    a = float(weights[b, h, q, k])
                    active += a
                    holds = ids[b, k] == token[b, q] and (not after or (ids[b, k - 1] == ids[b, q] and k != q))
                    gain = float(value[b, h // 2, k] @ (slope[b, h, q] - other_slope[b, h, q]))
                    if holds:
                        weight, above, nats = weight + a, above + a, nats + a * gain
                        even_nats += total / len(off) * gain
                    if ids[b, k] == other[b, q]:
                        above -= a
                got = [float(one[b, h, q]) for one in (found.weight, found.above, found.nats, found.even_nats,
                                                       found.active)]  # fmt: skip
                assert got == pytest.approx([weight, above, nats, even_nats, active], abs=1e-9)
