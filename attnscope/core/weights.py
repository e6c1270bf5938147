"""Analyse the weights of heads without any text: copying, matching, and composition of heads (Elhage et al. 2021).

A head's map W_O W_V is d_model x d_model, but its rank is at most d_head. The product is never computed: QR reduces its
factors, so that decompositions are of d_head x d_head matrices. Callers fetch the weights from a model.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from attnscope.core.attention.precision import in_float64


def eigenvalue_score(matrix: Float[Tensor, "*heads k k"]) -> Float[Tensor, "*heads"]:
    """Return the sum of the eigenvalues divided by the sum of their absolute values, -1 to 1; NaN where all are 0.

    The score is 1 if all eigenvalues are positive (the map copies), -1 if all are negative, and near 0 if they cancel.

    Source:
        Elhage et al. 2021, A Mathematical Framework for Transformer Circuits, "copying".
    """
    eigenvalues = torch.linalg.eigvals(in_float64(matrix))
    score: Tensor = eigenvalues.real.sum(-1) / eigenvalues.abs().sum(-1)
    return score


def triangular_factors(rows: Float[Tensor, "heads k d"]) -> Float[Tensor, "heads k k"]:
    """Return the triangular factor L of rows = L Q, where the k rows of Q are orthonormal, in the unit of `rows`.

    L has the singular values and the left singular vectors of `rows`; Q has the directions in d dimensions.
    """
    # QR of the transpose: rows.mT = Q.mT R, so L = R.mT.
    factors: Tensor = torch.linalg.qr(in_float64(rows).mT, mode="r").R.mT
    return factors


def random_rows(
    n_matrices: int,
    k: int,
    d: int,
    seed: int,
) -> Float[Tensor, "n_matrices k d"]:
    """Draw matrices of k orthonormal rows in d dimensions, uniformly (Haar); entries are from -1 to 1."""
    # The Q of a normal matrix is uniform after its columns are multiplied by the signs of R's diagonal (Mezzadri 2007).
    normal = torch.randn(
        n_matrices, d, k, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    q, r = torch.linalg.qr(normal)
    rows: Tensor = (q * torch.diagonal(r, dim1=-2, dim2=-1).sign()[:, None]).mT
    return rows


def score_with_random_heads(
    reads: Float[Tensor, "heads k d"],
    vocabulary_core: Float[Tensor, "d d"],
    writes: Float[Tensor, "heads d k"],
    random_cores: Float[Tensor, "draws k k"],
) -> tuple[Float[Tensor, " heads"], Float[Tensor, "heads draws"]]:
    """Return the eigenvalue score of each head's map from tokens to tokens, and the scores of random heads, -1 to 1.

    With the embedding E and the unembedding U, the map is U W_O W_V E, which has a row and a column for each token. Its
    nonzero eigenvalues are those of the d_head x d_head matrix W_V (E U) W_O.

    Args:
        reads: What each head reads along: W_V for copying, W_K for matching.
        vocabulary_core: E U, a product over the vocabulary.
        writes: What each head writes along: W_O for copying, W_Q transposed for matching.
        random_cores: G (E U) H of each draw, for random orthonormal rows G and random orthonormal columns H.

    Returns:
        The scores of the heads, and of random heads. A random head has the singular values of the head's factors, but
        reads along the rows of G and writes along the columns of H.
    """
    scores = eigenvalue_score(in_float64(reads) @ in_float64(vocabulary_core) @ in_float64(writes))
    read_factors = triangular_factors(reads)
    write_factors = triangular_factors(writes.mT).mT
    # Score the random heads of one head at a time, (draw,).
    random_scores = []
    for head in range(len(reads)):
        random_scores.append(eigenvalue_score(read_factors[head] @ random_cores @ write_factors[head]))
    return scores, torch.stack(random_scores)


def singular_directions(
    left: Float[Tensor, "d k"],
    right: Float[Tensor, "k d"],
    n_directions: int,
) -> tuple[
    Float[Tensor, "n_directions d"], Float[Tensor, "n_directions d"], Float[Tensor, " n_directions"]
]:
    """Return the leading left and right singular directions of left @ right, and their shares of the squared norm.

    A head writes along a left direction what it reads along the right one. Directions have length 1. A decomposition
    leaves their signs open, so the largest entry of each left direction is made positive. Shares are 0 to 1.
    """
    # left = Q_left R_left and right = (Q_right R_right).mT, so that the k x k matrix R_left R_right.mT is decomposed.
    q_left, r_left = torch.linalg.qr(in_float64(left))
    q_right, r_right = torch.linalg.qr(in_float64(right).mT)
    u, singular_values, vh = torch.linalg.svd(r_left @ r_right.mT)
    # Back to d dimensions, (n_directions, d).
    left_directions = (q_left @ u[:, :n_directions]).mT
    right_directions = vh[:n_directions] @ q_right.mT
    sign = left_directions.gather(1, left_directions.abs().argmax(1, keepdim=True)).sign()
    # A matrix of zeros has shares of 0.
    squares = singular_values.pow(2)
    shares = squares / squares.sum().clamp(min=1e-300)
    return sign * left_directions, sign * right_directions, shares[:n_directions]


def sender_factors(
    writes: Float[Tensor, "heads d k"],
    reads: Float[Tensor, "heads k d"],
) -> Float[Tensor, "heads d k"]:
    """Return S of each head for `composition_shares`: S = W_O L, where W_V = L Q and the rows of Q are orthonormal.

    S has the singular values and the left directions of W_O W_V, but k columns instead of d. Its unit is that of
    W_O W_V.
    """
    return in_float64(writes) @ triangular_factors(reads)


def receiver_factors(
    left: Float[Tensor, "heads d k"],
    reads: Float[Tensor, "heads k d"],
) -> Float[Tensor, "heads k d"]:
    """Return R of each head for `composition_shares`: left @ reads, with `left` reduced to its triangular factor.

    R has the singular values and the right directions of left @ reads, but k rows instead of d. Its unit is that of
    left @ reads, which is W_O W_V for composition by values, W_K transposed times W_Q for composition by queries, and
    W_Q transposed times W_K for composition by keys.
    """
    return triangular_factors(left.mT).mT @ in_float64(reads)


def composition_shares(
    receivers: Float[Tensor, "r k d"], senders: Float[Tensor, "s d j"]
) -> Float[Tensor, "s r"]:
    """Return the composition of each pair, |R S| / (|R| |S|) in Frobenius norm, 0 to 1; NaN where a factor is 0.

    R comes from `receiver_factors`, S from `sender_factors`. R S has the norm of the product of the two heads' maps.

    Source:
        Elhage et al. 2021, "composition".
    """
    # Multiply all pairs at once: (r·k, d) @ (d, s·j).
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

    This is the inverse participation ratio of s². It is 1 if only one singular value is not 0, and 1/rank if all are
    equal.
    """
    matrices = in_float64(factors)
    # M Mᵀ and Mᵀ M both have the eigenvalues s², and zeros. The smaller one is faster.
    if matrices.shape[-2] > matrices.shape[-1]:
        matrices = matrices.mT
    gram = matrices @ matrices.mT
    fourth_powers = gram.pow(2).sum((-1, -2))
    squares = torch.diagonal(gram, dim1=-2, dim2=-1).sum(-1)
    return fourth_powers / squares.pow(2)
