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
    """Keeps queries, keys and outputs of some tokens of each text; what it computes is another probe's.

    Args:
        probe: What computes attention.
        positions: Of each kind of attention the tokens that are kept of each text of the batch, (token,), int64.
        bare: What knows queries and keys before rotary positions.

    Attributes:
        kept: Kind -> layer -> text of the batch -> queries, scaled as scores are, (n_heads, token, d_head); keys,
            (n_kv_heads, token, d_head); outputs, (n_heads, token, d_value); float32, on the CPU.
        turned: Kind -> layer -> as what queries and keys are taken.
    """

    def __init__(self, probe: Probe, positions: Mapping[Kind, Sequence[Tensor]], bare: Bare) -> None:
        self._probe, self._positions, self._bare = probe, positions, bare
        self.kept: dict[Kind, dict[int, list[tuple[Tensor, Tensor, Tensor]]]] = {}
        self.turned: dict[Kind, dict[int, Turned]] = {}

    def __call__(self, call: AttentionCall) -> Tensor:
        """Computes an attention as the other probe does, and keeps what is asked for; shape and dtype: see `Probe`."""
        query, key, turned = self._bare(call)
        output = self._probe(call)
        self.turned.setdefault(call.kind, {})[call.layer] = turned
        held = self.kept.setdefault(call.kind, {})[call.layer] = []
        for text, positions in enumerate(self._positions[call.kind]):
            at = positions.to(query.device)
            some = (query[text, :, at].float() * call.scale, key[text, :, at].float(), output[text, :, at].float())
            held.append((some[0].cpu(), some[1].cpu(), some[2].cpu()))
        return output


class ScoreDirections(NamedTuple):
    """Queries and keys of heads along the leading directions of their scores.

    Attributes:
        queries: (head, query, direction), float64.
        keys: (head, key, direction), float64; a query's and a key's products, summed over all directions, are their
            score up to what is the same for all keys.
        explained: (head, direction): share of the variance of the scores; NaN where they do not vary.
        common: (head, direction): share of a direction's part that all queries have in common: 1 = each asks for the
            same keys, 0 = they cancel out.
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

    A softmax does not change where the same is added to all scores of a query, so keys are centred; queries are not:
    a key that every query looks for has its part in the scores. Direction d explains Σ_d² / sum of all Σ², the share
    of the variance over keys, summed over queries. No directions of large norm that do not meet one of the other side.

    Args:
        queries: Scaled as scores are.
        keys: As many heads.
        n: How many directions; fewer where there are not so many, as columns of zeros.

    Returns:
        Directions in order of what they explain, of the sign that makes the largest key coordinate positive.

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
    largest = on_keys.gather(1, on_keys.abs().argmax(1, keepdim=True))
    sign = torch.where(largest < 0, -1.0, 1.0)
    on_queries, on_keys = on_queries * sign, on_keys * sign
    squares = on_queries.pow(2).mean(1)
    return ScoreDirections(on_queries, on_keys, explained, on_queries.mean(1).pow(2) / squares)


def output_directions(outputs: Float[Tensor, "head token width"], n: int) -> tuple[Tensor, Tensor]:
    """Principal components of what heads write.

    Args:
        outputs: What each head writes at some tokens, in coordinates in which lengths mean something.
        n: How many components.

    Returns:
        (head, token, component), float64: of the sign that makes the largest coordinate positive; and (head,
        component): shares of the variance, NaN without any.
    """
    x = outputs.double()
    basis, factor = torch.linalg.qr(x - x.mean(1, keepdim=True))
    left, sizes, _ = torch.linalg.svd(factor, full_matrices=False)
    found = _first(basis @ left, n) * _first(sizes[:, None], n)
    largest = found.gather(1, found.abs().argmax(1, keepdim=True))
    return found * torch.where(largest < 0, -1.0, 1.0), _shares(sizes, n)


def _first(columns: Tensor, n: int) -> Tensor:
    """The first columns, with zeros for those that there are not."""
    found = columns[..., :n]
    return torch.nn.functional.pad(found, (0, n - found.shape[-1]))


def _shares(sizes: Tensor, n: int) -> Tensor:
    """Each singular value's share of the squares of all."""
    squares = sizes.pow(2)
    return _first(squares / squares.sum(-1, keepdim=True), n)
