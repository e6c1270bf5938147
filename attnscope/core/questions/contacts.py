"""Undirected links, such as the contacts of residues in a protein: what maps say of pairs of words, and how precisely.

A head's map between words (`relations` says how it comes from that of tokens) is added to its transpose, and corrected
for what words give and get whatever their partner (average product correction):

    S = W + Wᵀ        F_ij = S_ij - (sum over k of S_ik) (sum over k of S_kj) / (sum over k, l of S_kl)

The head predicts the pairs with the largest F. Precision is the share of them that are linked.

Source: Rao et al. 2020, "Transformer protein language models are unsupervised structure learners", section 3; the
correction: Dunn, Wahl & Gloor 2008.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from attnscope.core.attention.tiles import Block

LEAST = 6
"""How many tokens apart the words of a pair are at least; nearer pairs are never predicted."""

SEPARATIONS: dict[str, tuple[int, int | None]] = {
    "all": (LEAST, None), "short": (LEAST, 12), "medium": (12, 24), "long": (24, None),
}  # fmt: skip
"""Ranges of pairs by how many tokens apart their words are: from the first number, to below the second if there is one.

Short, medium and long are the ranges in which predicted contacts of proteins are assessed (CASP), as in the code of Rao
et al. 2020.
"""

CUTS = (1, 2, 5)
"""L words give L divided by each of these as the number of predicted pairs."""


@dataclass(frozen=True, eq=False)
class Contacts:
    """The linked pairs of one relation in one text.

    Attributes:
        text: The text's number in the batch.
        cell: Where their numbers are added.
        pairs: Words of each pair, the smaller number first, (pair, 2), int64.
    """

    text: int
    cell: int
    pairs: Tensor


@dataclass(frozen=True, eq=False)
class Pairs:
    """All pairs of a text that may be predicted.

    Attributes:
        first: The word of the smaller number of each pair.
        second: The other word.
        apart: How many tokens their first tokens are apart.
        n_words: How many words the text has.
    """

    first: Int[Tensor, " pair"]
    second: Int[Tensor, " pair"]
    apart: Int[Tensor, " pair"]
    n_words: int

    def within(self, separation: str) -> Tensor:
        """Which pairs are in one of SEPARATIONS, (pair,), bool."""
        least, below = SEPARATIONS[separation]
        return (self.apart >= least) & (self.apart < (math.inf if below is None else below))

    def number_of(self, pairs: Int[Tensor, "n 2"]) -> Int[Tensor, " n"]:
        """The numbers that pairs have here, (m,), int64, in their order; pairs that may not be predicted are left out.

        Args:
            pairs: The words of each, the smaller number first.
        """
        key = self.first * self.n_words + self.second  # ascending
        wanted = pairs[:, 0] * self.n_words + pairs[:, 1]
        at = torch.searchsorted(key, wanted).clamp(max=max(len(key) - 1, 0))
        return at[key[at] == wanted] if len(key) else at[:0]


def first_tokens(units: Int[Tensor, "text token"], n_words: int) -> Int[Tensor, "text {n_words}"]:
    """The first token of each word of texts, int64; how many tokens a text has if it lacks the word."""
    n_texts, n_tokens = units.shape
    first = torch.full((n_texts, n_words), n_tokens, dtype=torch.int64, device=units.device)
    text, token = (units >= 0).nonzero().unbind(1)
    first.view(-1).scatter_reduce_(0, text * n_words + units[text, token], token, "amin")
    return first


def pairs_of(units: Int[Tensor, " token"]) -> Pairs:
    """The pairs of a text's words that are LEAST tokens apart, or more; `units` has each token's word, -1 = none."""
    n = int(units.max()) + 1 if len(units) else 0
    start = first_tokens(units[None], n)[0]
    first, second = torch.triu_indices(n, n, 1, device=units.device)
    apart = (start[second] - start[first]).abs()
    far = apart >= LEAST
    return Pairs(first[far], second[far], apart[far], n)


def correct_maps(maps: Float[Tensor, "*head word word"]) -> Float[Tensor, "*head word word"]:
    """Symmetrised maps after average product correction, as above, of either sign; all 0 where a map is."""
    both = maps + maps.transpose(-1, -2)
    sums = both.sum(-1)
    whole = sums.sum(-1)[..., None, None]
    return both - sums[..., :, None] * sums[..., None, :] / torch.where(whole == 0, 1, whole)


def precision(
    scores: Float[Tensor, "*head pair"], linked: Tensor, pairs: Pairs, separation: str = "all", cut: int = 1
) -> Float[Tensor, "*head"]:
    """The share of linked pairs among the predicted ones, 0 to 1, for each row of scores; NaN without pairs.

    The L / `cut` pairs of the largest scores are predicted, at least one, for L words. If several pairs share the last
    score that is predicted, each counts as the share of them that is.

    Args:
        scores: The score of each pair, the largest first to be predicted.
        linked: Whether each pair is linked, (pair,), bool.
        pairs: The pairs.
        separation: One of SEPARATIONS; only its pairs may be predicted.
        cut: Divides the number of words.
    """
    inside = pairs.within(separation)
    scores, right = scores[..., inside], linked[inside].to(scores.dtype)
    n = min(n_predicted(pairs.n_words, cut), scores.shape[-1])
    if n == 0:
        return scores.new_full(scores.shape[:-1], torch.nan)
    last = scores.topk(n, -1).values[..., -1:]
    above, level = scores > last, scores == last
    hits = (above * right).sum(-1)
    n_left = n - above.sum(-1)
    return (hits + n_left * (level * right).sum(-1) / level.sum(-1)) / n


def n_predicted(n_words: int, cut: int = 1) -> int:
    """How many pairs are predicted for a number of words."""
    return max(1, n_words // cut)


class WordMaps:
    """Puts the maps between words of some texts together, text by text, from the blocks of one attention.

    It holds no more than one block and the maps of its texts. `units` are those of `LinkFacts`.
    """

    def __init__(self, units: Int[Tensor, "text token"], texts: Sequence[int], n_queries: int) -> None:
        self._units, self._texts, self._n_queries = units, sorted(set(texts)), n_queries
        self._open: dict[int, Tensor] = {}

    def add(self, block: Block, weights: Float[Tensor, "text head query key"]) -> Iterator[tuple[int, Tensor]]:
        """Adds the weights of a block.

        Yields:
            Each text that it completes, and its maps, (head, word, word), 0 to 1.
        """
        n_heads = weights.shape[1]
        for text in self._texts:
            if not block.texts.start <= text < block.texts.stop:
                continue
            units = self._units[text]
            n_words = int(units.max()) + 1
            if text not in self._open:
                self._open[text] = weights.new_zeros(n_heads, n_words, n_words)
            of_text = weights[text - block.texts.start]
            key, query = units[block.keys], units[block.queries]
            by_word = of_text.new_zeros(n_heads, of_text.shape[1], n_words).index_add_(
                2, key[key >= 0], of_text[..., key >= 0]
            )
            n_pieces = torch.bincount(units[units >= 0], minlength=n_words)
            share = 1.0 / n_pieces[query[query >= 0]].to(of_text.dtype)
            self._open[text].index_add_(1, query[query >= 0], by_word[:, query >= 0] * share[:, None])
            if block.queries.stop == self._n_queries:
                yield text, self._open.pop(text)
