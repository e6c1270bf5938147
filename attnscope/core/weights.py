"""Read the weights of heads without any text: copying, matching, and which head feeds which (Elhage et al. 2021).

Everything goes through matrices of d_head x d_head: no product W_O W_V, which has d_model² numbers, is formed. Callers
fetch the weights from a model.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from attnscope.core.attention.precision import in_float64


def eigenvalue_score(matrix: Float[Tensor, "*heads k k"]) -> Float[Tensor, "*heads"]:
    """Return the sum of the eigenvalues divided by that of their absolute values, -1 to 1; NaN where all are 0.

    1 if a map gives each direction back to itself, -1 if it takes it away; near 0 if it does neither.

    Source:
        Elhage et al. 2021, A Mathematical Framework for Transformer Circuits, "copying".
    """
    values = torch.linalg.eigvals(in_float64(matrix))
    score: Tensor = values.real.sum(-1) / values.abs().sum(-1)
    return score


def inner_factors(rows: Float[Tensor, "heads k d"]) -> Float[Tensor, "heads k k"]:
    """Return L of rows = L Q, where Q has orthonormal rows: the factor without the directions, in the same unit."""
    # rows.mT = Q' R, so that rows = R.mT Q.
    factor: Tensor = torch.linalg.qr(in_float64(rows).mT, mode="r").R.mT
    return factor


def random_rows(
    n: int,
    k: int,
    d: int,
    seed: int,
) -> Float[Tensor, "n k d"]:
    """Draw n times k orthonormal rows in d dimensions, all equally likely (Haar); numbers from -1 to 1."""
    # QR of a normal matrix, with the signs of R's diagonal, is uniform (Mezzadri 2007).
    normal = torch.randn(n, d, k, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    q, r = torch.linalg.qr(normal)
    rows: Tensor = (q * torch.diagonal(r, dim1=-2, dim2=-1).sign()[:, None]).mT
    return rows


def scores_and_chance(
    reads: Float[Tensor, "heads k d"],
    core: Float[Tensor, "d d"],
    writes: Float[Tensor, "heads d k"],
    draws: Float[Tensor, "draws k k"],
) -> tuple[Float[Tensor, " heads"], Float[Tensor, "heads draws"]]:
    """Return the score of U W_O W_V E of each head, and the scores of random heads with the same singular values.

    The eigenvalues of U W_O W_V E, a matrix of all pairs of tokens, are those of W_V (E U) W_O, except for zeros.

    Args:
        reads: W_V, or for matching W_K.
        core: E U, summed over the vocabulary.
        writes: W_O, or W_Q transposed.
        draws: G core G' for random orthonormal rows G and columns G' of `random_rows`.

    Returns:
        The scores; and for each draw the scores if W_V read by G and W_O wrote by G' instead.
    """
    own = eigenvalue_score(in_float64(reads) @ in_float64(core) @ in_float64(writes))
    # The same singular values between random directions, (head, draw).
    left = inner_factors(reads)
    right = inner_factors(writes.mT).mT
    by_chance = []
    for head in range(len(left)):
        by_chance.append(eigenvalue_score(left[head] @ draws @ right[head]))
    return own, torch.stack(by_chance)


def singular_directions(
    left: Float[Tensor, "d k"],
    right: Float[Tensor, "k d"],
    n: int,
) -> tuple[Float[Tensor, "n d"], Float[Tensor, "n d"], Float[Tensor, " n"]]:
    """Return the first n singular directions of left @ right: those written, those read, and their shares of norm².

    Directions have length 1, and the largest number of each that is written is positive, so that every library gives
    the same. Shares are from 0 to 1. QR factors of `left` and `right` reduce the decomposition to one of k x k.
    """
    # Orthonormal bases of left and right, (d, k), then the decomposition of the k x k core.
    q_left, r_left = torch.linalg.qr(in_float64(left))
    q_right, r_right = torch.linalg.qr(in_float64(right).mT)
    u, s, vh = torch.linalg.svd(r_left @ r_right.mT)
    squares = s.pow(2)
    # All zeros have shares of 0.
    share = squares / squares.sum().clamp(min=1e-300)
    written = (q_left @ u[:, :n]).mT
    read = (q_right @ vh[:n].mT).mT
    # A decomposition leaves the sign of each pair of directions open.
    sign = written.gather(1, written.abs().argmax(1, keepdim=True)).sign()
    return sign * written, sign * read, share[:n]


def sender_factors(
    writes: Float[Tensor, "heads d k"],
    reads: Float[Tensor, "heads k d"],
) -> Float[Tensor, "heads d k"]:
    """Return W_O W_V with its right factor reduced to k columns: singular values and left directions stay the same."""
    return in_float64(writes) @ inner_factors(reads)


def receiver_factors(
    left: Float[Tensor, "heads d k"],
    reads: Float[Tensor, "heads k d"],
) -> Float[Tensor, "heads k d"]:
    """Return the counterpart of `sender_factors`: left @ reads with its left factor reduced, k rows in the unit of reads.

    `left` is what `writes` is to a sender: W_O, or W_Q or W_K transposed.
    """
    return inner_factors(left.mT).mT @ in_float64(reads)


def composition_shares(
    receivers: Float[Tensor, "r k d"], senders: Float[Tensor, "s d j"]
) -> Float[Tensor, "s r"]:
    """Return the composition of each pair, |R S| / (|R| |S|) in Frobenius norm, 0 to 1; NaN where a factor is 0.

    R is what `receiver_factors` gave, and S what `sender_factors` gave.

    Source:
        Elhage et al. 2021, "composition".
    """
    # All pairs in one product: (r·k, d) @ (d, s·j).
    r, k, d = receivers.shape
    s, _, j = senders.shape
    side_by_side = senders.permute(1, 0, 2).reshape(d, s * j)
    products = receivers.reshape(r * k, d) @ side_by_side
    norms = in_float64(products.reshape(r, k, s, j).pow(2).sum((1, 3)).sqrt())
    receiver_norms = in_float64(torch.linalg.matrix_norm(receivers))
    sender_norms = in_float64(torch.linalg.matrix_norm(senders))
    composition: Tensor = norms / receiver_norms[:, None] / sender_norms
    return composition.T


def concentration(factors: Float[Tensor, "heads a b"]) -> Float[Tensor, " heads"]:
    """Return Σ s⁴ / (Σ s²)² over the singular values s of each matrix, large where few hold all; NaN where all are 0.

    1 if one singular value has it all, 1/rank if all are equal.
    """
    matrices = in_float64(factors)
    # Of the two Gram matrices the smaller one: both have the eigenvalues s², except for zeros.
    if matrices.shape[-2] > matrices.shape[-1]:
        matrices = matrices.mT
    gram = matrices @ matrices.mT
    fourth_powers = gram.pow(2).sum((-1, -2))
    squares = torch.diagonal(gram, dim1=-2, dim2=-1).sum(-1)
    return fourth_powers / squares.pow(2)
