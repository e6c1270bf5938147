"""Read the weights of heads without any text: copying, matching, and which head feeds which (Elhage et al. 2021).

A head's map W_O W_V is d_model x d_model, but its rank is d_head at most. It is never formed: QR reduces its factors,
so that decompositions are those of d_head x d_head matrices. Callers fetch the weights from a model.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from attnscope.core.attention.precision import in_float64


def eigenvalue_score(matrix: Float[Tensor, "*heads k k"]) -> Float[Tensor, "*heads"]:
    """Return the sum of the eigenvalues divided by the sum of their absolute values, -1 to 1; NaN where all are 0.

    It is 1 if all eigenvalues are positive (the map copies), -1 if all are negative, and near 0 if they cancel.

    Source:
        Elhage et al. 2021, A Mathematical Framework for Transformer Circuits, "copying".
    """
    eigenvalues = torch.linalg.eigvals(in_float64(matrix))
    score: Tensor = eigenvalues.real.sum(-1) / eigenvalues.abs().sum(-1)
    return score


def triangular_factors(rows: Float[Tensor, "heads k d"]) -> Float[Tensor, "heads k k"]:
    """Return the factor L of rows = L Q, where the k rows of Q are orthonormal, in the unit of `rows`.

    L has the singular values and the left singular vectors of `rows`; Q holds its directions in d dimensions.
    """
    # QR of the transpose: rows.mT = Q.mT R, so L = R.mT.
    factors: Tensor = torch.linalg.qr(in_float64(rows).mT, mode="r").R.mT
    return factors


def random_rows(
    n: int,
    k: int,
    d: int,
    seed: int,
) -> Float[Tensor, "n k d"]:
    """Draw n matrices of k orthonormal rows in d dimensions, uniformly (Haar); entries are from -1 to 1."""
    # Q of a normal matrix is uniform once its columns have the signs of R's diagonal (Mezzadri 2007).
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
    """Return the eigenvalue score of each head's map from tokens to tokens, and the scores of random heads, -1 to 1.

    With the embedding E and the unembedding U, the map is U W_O W_V E, which has a row and a column for each token. Its
    eigenvalues other than 0 are those of W_V (E U) W_O, which is d_head x d_head.

    Args:
        reads: W_V, or for matching W_K.
        core: E U, a product over the vocabulary.
        writes: W_O, or for matching W_Q transposed.
        draws: G core H of each draw, for orthonormal rows G and orthonormal columns H that are random.

    Returns:
        The scores, and those of random heads, which have the singular values of the head's factors but read along the
        rows of G and write along the columns of H.
    """
    scores = eigenvalue_score(in_float64(reads) @ in_float64(core) @ in_float64(writes))
    read_factors = triangular_factors(reads)
    write_factors = triangular_factors(writes.mT).mT
    # The scores of one head for all draws, (draw,).
    chance = []
    for head in range(len(reads)):
        chance.append(eigenvalue_score(read_factors[head] @ draws @ write_factors[head]))
    return scores, torch.stack(chance)


def singular_directions(
    left: Float[Tensor, "d k"],
    right: Float[Tensor, "k d"],
    n: int,
) -> tuple[Float[Tensor, "n d"], Float[Tensor, "n d"], Float[Tensor, " n"]]:
    """Return the first n left and right singular directions of left @ right, and their shares of the squared norm.

    A head writes along the left directions what it reads along the right ones. Directions have length 1. Their signs
    make the largest entry of each left direction positive, for a decomposition leaves them open. Shares are 0 to 1.
    """
    # left = Q_left R_left and right = (Q_right R_right).mT, so that the k x k matrix R_left R_right.mT is decomposed.
    q_left, r_left = torch.linalg.qr(in_float64(left))
    q_right, r_right = torch.linalg.qr(in_float64(right).mT)
    u, singular_values, vh = torch.linalg.svd(r_left @ r_right.mT)
    # Back to d dimensions, (n, d).
    written = (q_left @ u[:, :n]).mT
    read = vh[:n] @ q_right.mT
    sign = written.gather(1, written.abs().argmax(1, keepdim=True)).sign()
    # A matrix of zeros has shares of 0.
    squares = singular_values.pow(2)
    shares = squares / squares.sum().clamp(min=1e-300)
    return sign * written, sign * read, shares[:n]


def sender_factors(
    writes: Float[Tensor, "heads d k"],
    reads: Float[Tensor, "heads k d"],
) -> Float[Tensor, "heads d k"]:
    """Return S of each head for `composition_shares`: W_O L, where W_V = L Q and the rows of Q are orthonormal.

    S has k columns in place of the d of W_O W_V, the same singular values and the same left directions, in its unit.
    """
    return in_float64(writes) @ triangular_factors(reads)


def receiver_factors(
    left: Float[Tensor, "heads d k"],
    reads: Float[Tensor, "heads k d"],
) -> Float[Tensor, "heads k d"]:
    """Return R of each head for `composition_shares`: left @ reads with the left factor reduced to its triangular one.

    R has k rows in place of d, the same singular values and the same right directions, in the unit of left @ reads. For
    composition by values left @ reads is W_O W_V; by queries or keys it is one of W_Q and W_K transposed, times the
    other.
    """
    return triangular_factors(left.mT).mT @ in_float64(reads)


def composition_shares(
    receivers: Float[Tensor, "r k d"], senders: Float[Tensor, "s d j"]
) -> Float[Tensor, "s r"]:
    """Return the composition of each pair, |R S| / (|R| |S|) in Frobenius norm, 0 to 1; NaN where a factor is 0.

    R is of `receiver_factors`, S of `sender_factors`: R S has the norm of the product of the two heads' whole maps.

    Source:
        Elhage et al. 2021, "composition".
    """
    # All pairs in one product: (r·k, d) @ (d, s·j).
    r, k, d = receivers.shape
    s, _, j = senders.shape
    sender_columns = senders.permute(1, 0, 2).reshape(d, s * j)
    products = receivers.reshape(r * k, d) @ sender_columns
    # Norms of the products, (r, s), divided by those of both factors.
    norms = in_float64(products.reshape(r, k, s, j).pow(2).sum((1, 3)).sqrt())
    receiver_norms = in_float64(torch.linalg.matrix_norm(receivers))
    sender_norms = in_float64(torch.linalg.matrix_norm(senders))
    composition: Tensor = norms / receiver_norms[:, None] / sender_norms
    return composition.T


def concentration(factors: Float[Tensor, "heads a b"]) -> Float[Tensor, " heads"]:
    """Return Σ s⁴ / (Σ s²)² over the singular values s of each matrix, 0 to 1; NaN where all are 0.

    It is 1 if only one singular value is not 0, and 1/rank if all are equal.
    """
    matrices = in_float64(factors)
    # Both Gram matrices have the eigenvalues s², except for zeros: take the smaller one.
    if matrices.shape[-2] > matrices.shape[-1]:
        matrices = matrices.mT
    gram = matrices @ matrices.mT
    fourth_powers = gram.pow(2).sum((-1, -2))
    squares = torch.diagonal(gram, dim1=-2, dim2=-1).sum(-1)
    return fourth_powers / squares.pow(2)
