"""The worked example: five tokens and four columns, small enough to follow with pen and paper.

No projections: head h of H takes columns h · 4 / H up to (h + 1) · 4 / H of Q, K and V as they stand, and the joined
heads are the output. NumPy only, so that it can be computed without torch.

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
"""Projected values, (token, d_model): 1 in a column of its own for the first four tokens, 1/2 in each for "mat"."""

for _array in (Q, K, V):
    _array.setflags(write=False)
