"""Hold the queries, keys and values of a worked example, small enough to follow with pen and paper.

It has five tokens and a model width (d_model) of four. There are no projections. Head h of H takes columns h · 4 / H to
(h + 1) · 4 / H - 1 of Q, K and V, and the concatenated heads are the output. NumPy only, so that it can be computed
without torch.

Source:
    Ours; the arithmetic is Vaswani et al. 2017, sections 3.2.1 and 3.2.2.
"""

import numpy as np

TOKENS = ("The", "cat", "sat", "on", "mat")
N_HEADS = 2

Q = np.array(
    [
        [1.0, 0.0, 1.0, 0.0],
        [0.0, 2.0, 0.0, 1.0],
        [1.0, 1.0, 1.0, 0.0],
        [0.0, 0.0, 1.0, 1.0],
        [1.0, 0.0, 0.0, 1.0],
    ]
)
"""Projected queries, (token, d_model). Read-only, as are K and V."""

K = np.array(
    [
        [0.0, 1.0, 0.0, 1.0],
        [1.0, 0.0, 1.0, 0.0],
        [1.0, 1.0, 0.0, 0.0],
        [0.0, 0.0, 1.0, 1.0],
        [1.0, 0.0, 0.5, 0.5],
    ]
)
"""Projected keys, (token, d_model)."""

V = np.vstack([np.eye(4), np.full(4, 0.5)])
"""Projected values, (token, d_model). The first four tokens have 1 in a column of their own; "mat" has 1/2 in all."""

for _array in (Q, K, V):
    _array.setflags(write=False)
