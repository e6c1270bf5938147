"""Queries and keys of a head on the directions that make its scores, and its outputs on those that they vary in. Ours.

The idea of a plot of queries and keys of one head in common directions: Gabriel 1971, The biplot graphic display of
matrices with application to principal component analysis; here the matrix is that of a head's scores.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from attnscope.core.attention.seam import AttentionCall, Kind, Probe

Turned = Literal["never", "before", "after"]
"""Whether positions turn queries and keys (rotary), and if so, whether these are as they were before, or after."""

Bare = Callable[[AttentionCall], tuple[Tensor, Tensor, Turned]]
"""A call's queries and keys before positions turned them, if that is known, in the call's shapes."""


class TokenVectors:
    """Keeps queries, keys and outputs of some tokens of each text; `probe` computes the attention.

    Args:
        probe: The probe that computes attention.
        positions: For each kind of attention, the tokens that are kept of each text of the batch, (token,), int64.
        bare: Gives queries and keys before rotary positions.

    Attributes:
        kept: Kind -> layer -> text of the batch -> queries, scaled as scores are, (n_heads, token, d_head); keys,
            (n_kv_heads, token, d_head); outputs, (n_heads, token, d_value); float32, on the CPU.
        turned: Kind -> layer -> how queries and keys are taken.
    """

    def __init__(self, probe: Probe, positions: Mapping[Kind, Sequence[Tensor]], bare: Bare) -> None:
        self._probe, self._positions, self._bare = probe, positions, bare
        self.kept: dict[Kind, dict[int, list[tuple[Tensor, Tensor, Tensor]]]] = {}
        self.turned: dict[Kind, dict[int, Turned]] = {}

    def __call__(self, call: AttentionCall) -> Tensor:
        """Computes an attention as the other probe does, and keeps its tokens; shape and dtype: see `Probe`."""
        query, key, turned = self._bare(call)
        output = self._probe(call)
        self.turned.setdefault(call.kind, {})[call.layer] = turned
        texts = self.kept.setdefault(call.kind, {})[call.layer] = []
        for text, positions in enumerate(self._positions[call.kind]):
            at = positions.to(query.device)
            queries, keys, outputs = (part[text, :, at].float() for part in (query, key, output))
            texts.append(((queries * call.scale).cpu(), keys.cpu(), outputs.cpu()))
        return output


class ScoreDirections(NamedTuple):
    """Queries and keys of heads along the leading directions of their scores.

    Attributes:
        queries: (head, query, direction), float64.
        keys: (head, key, direction), float64. The products of a query and a key, summed over all directions, are their
            score up to a constant that is the same for all keys.
        explained: (head, direction): share of the variance of the scores; NaN where they do not vary.
        common: (head, direction): share of a direction that all queries have in common: 1 = each asks for the same
            keys, 0 = they cancel out.
    """

    queries: Tensor
    keys: Tensor
    explained: Tensor
    common: Tensor


def score_directions(
    queries: Float[Tensor, "head query d_head"], keys: Float[Tensor, "head key d_head"], n: int
) -> ScoreDirections:
    """The leading directions of the scores of all given queries with all given keys.

        S = Q (K - mean over keys of K)ᵀ = U Σ Vᵀ,  query i at U_i √Σ,  key j at V_j √Σ

    A softmax does not change if the same number is added to all scores of a query, so keys are centred. Queries are
    not: a key that every query looks for has its part in the scores. Direction d explains Σ_d² / sum of all Σ², its
        share of
    the variance over keys, summed over queries. A direction of large norm that meets none of the other side is left
    out.

    Args:
        queries: Scaled as scores are.
        keys: As many heads.
        n: How many directions; columns of zeros stand for those that do not exist.

    Returns:
        Directions in order of what they explain, each with the sign that makes the largest key coordinate positive.

    Source:
        Ours; the factorisation is that of Gabriel 1971, section 2.
    """
    q, k = queries.double(), keys.double()
    q_basis, q_factor = torch.linalg.qr(q)
    k_basis, k_factor = torch.linalg.qr(k - k.mean(1, keepdim=True))
    left, sizes, right = torch.linalg.svd(q_factor @ k_factor.mT, full_matrices=False)
    explained = _shares(sizes, n)
    roots = _first(sizes.sqrt()[:, None], n)
    on_queries, on_keys = _first(q_basis @ left, n) * roots, _first(k_basis @ right.mT, n) * roots
    sign = _signs(on_keys)
    on_queries, on_keys = on_queries * sign, on_keys * sign
    squares = on_queries.pow(2).mean(1)
    return ScoreDirections(on_queries, on_keys, explained, on_queries.mean(1).pow(2) / squares)


def output_directions(outputs: Float[Tensor, "head token width"], n: int) -> tuple[Tensor, Tensor]:
    """Principal components of what heads write at some tokens, in coordinates in which lengths mean something.

    Returns:
        (head, token, component), float64, each with the sign that makes the largest coordinate positive; and (head,
        component): shares of the variance, NaN without any.
    """
    x = outputs.double()
    basis, factor = torch.linalg.qr(x - x.mean(1, keepdim=True))
    left, sizes, _ = torch.linalg.svd(factor, full_matrices=False)
    coordinates = _first(basis @ left, n) * _first(sizes[:, None], n)
    return coordinates * _signs(coordinates), _shares(sizes, n)


def _signs(coordinates: Tensor) -> Tensor:
    """-1 where the largest number of a column, by size, is negative, else 1."""
    largest = coordinates.gather(1, coordinates.abs().argmax(1, keepdim=True))
    return torch.where(largest < 0, -1.0, 1.0)


def _first(columns: Tensor, n: int) -> Tensor:
    """The first n columns, with zeros for those that do not exist."""
    return torch.nn.functional.pad(columns[..., :n], (0, max(n - columns.shape[-1], 0)))


def _shares(sizes: Tensor, n: int) -> Tensor:
    """Each singular value's share of the squares of all."""
    squares = sizes.pow(2)
    return _first(squares / squares.sum(-1, keepdim=True), n)
