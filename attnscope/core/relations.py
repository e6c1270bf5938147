"""Measure how often a head links two words that stand in a relation, such as a verb and its object.

A *link* leads from a word to its *targets*. A head *hits* the link if the word's largest weight, among other words and
without special tokens, is on a target. The *mass* of the link is the weight on all its targets. Weights of words come
from weights of tokens as in Clark et al. 2019, section 4.1: a word of several tokens receives the sum of their weights,
and its row is the mean of its tokens' rows.

No attention map is kept. Weights are computed a second time, besides the model's own attention. A short batch is
computed at once; of a long one only the rows of words with links are computed, a few at a time.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from attnscope.core.attention.precision import sum_dtype
from attnscope.core.attention.probes import HeadRecorder
from attnscope.core.attention.row_samples import rows_of
from attnscope.core.attention.seam import AttentionCall, attention_weights

MAX_WEIGHTS_IN_MEMORY = 2**22
"""About the most weights of a layer that are in memory at once."""


@dataclass(frozen=True, eq=False)
class LinkFacts:
    """The links of a batch of texts.

    A *row* is what links start from: a word, or several words that are read as one. Rows are numbered over the whole
    batch. The *pieces* of a row are its tokens. A *cell* is a group of links whose hits and mass are added up, such as
    all links of one relation in one text.

    Attributes:
        word_of_token: The index within the text of the word that each key token is part of, (text, token), int64; -1
            for special tokens and padding.
        row_text: The index of the text of each row, ascending, (row,), int64.
        pieces: The row and the token position of each piece, ordered by row, (piece, 2), int64. In cross-attention the
            positions are those of queries.
        link_row: The row of each link, (link,), int64.
        targets: The link and the word of each target, (target, 2), int64. The word is never the row itself.
        link_cell: The cell that each link is added to, (link,), int64.
        n_cells: The number of cells.
        is_across: Whether keys are words of another text than queries. If not, weights of a row on itself are ignored.
    """

    word_of_token: Tensor
    row_text: Tensor
    pieces: Tensor
    link_row: Tensor
    targets: Tensor
    link_cell: Tensor
    n_cells: int
    is_across: bool = False

    def to(self, device: torch.device) -> "LinkFacts":
        """Return the same facts on a device. Layers of one model may be on several devices."""
        moved: dict[str, Any] = {}
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                moved[name] = value.to(device)
        return replace(self, **moved)


def record_links(facts: LinkFacts) -> HeadRecorder[Tensor]:
    """Return a probe that scores the links in every layer of one forward pass; no gradient flows through its output.

    The model calls the probe instead of `attend`. Its `maps` are kind -> layer -> hits and mass, (cell, head, 2), as
    `score_links` returns them. It raises a ValueError if the shapes of a call are not those of the links.
    """

    def score_call(call: AttentionCall) -> Float[Tensor, "cell head 2"]:
        return _score_call(call, facts.to(call.query.device))

    return HeadRecorder(score_call)


@torch.no_grad()
def _score_call(call: AttentionCall, facts: LinkFacts) -> Float[Tensor, "cell head 2"]:
    """Return hits and mass in a layer; raise a ValueError if its shapes are not those of the links."""
    n_texts, n_heads, n_queries, _ = call.query.shape
    n_keys = call.key.shape[2]
    last_query = int(facts.pieces[:, 1].max()) if len(facts.pieces) else 0
    if facts.word_of_token.shape != (n_texts, n_keys) or last_query >= n_queries:
        raise ValueError(
            f"{call.kind} layer {call.layer} has {n_texts} texts of {n_queries} queries and {n_keys} keys; the "
            f"links are of {tuple(facts.word_of_token.shape)}"
        )
    # Score a short batch at once.
    if n_texts * n_heads * n_queries * n_keys <= MAX_WEIGHTS_IN_MEMORY:
        return score_links(attention_weights(call), facts)
    # Score a long batch text by text, `step` rows at a time.
    sums = _make_zero_sums(facts, n_heads)
    step = max(1, MAX_WEIGHTS_IN_MEMORY // (n_heads * n_keys))
    for text in range(n_texts):
        text_rows = (facts.row_text == text).nonzero()[:, 0]
        for rows in text_rows.split(step):  # type: ignore[no-untyped-call]
            # Two rows may share a token: `unique` makes its weights be computed once.
            pieces = facts.pieces[torch.isin(facts.pieces[:, 0], rows)]
            queries, query_of_piece = pieces[:, 1].unique(return_inverse=True)  # type: ignore[no-untyped-call]
            # (head, query, key) -> (piece, head, key)
            weights = rows_of(call, queries, slice(text, text + 1))[0]
            piece_weights = weights.movedim(1, 0)[query_of_piece]
            _add_rows(sums, facts, rows, pieces, piece_weights)
    return sums


@torch.no_grad()
def score_links(
    weights: Float[Tensor, "text head query key"],
    facts: LinkFacts,
) -> Float[Tensor, "cell head 2"]:
    """Return hits and mass of all links, from dense weights.

    Returns:
        For each cell the number of links that are hit, and the sum of the weights on their targets. If k words share
        the largest weight, a target among them counts as 1 / k of a hit. A row without any weight hits nothing.
        Float64, or float32 on devices without float64.
    """
    sums = _make_zero_sums(facts, weights.shape[1])
    # The rows of weights of all pieces, (piece, head, key).
    row, token = facts.pieces.unbind(1)
    piece_weights = weights[facts.row_text[row], :, token]
    rows = torch.arange(len(facts.row_text), device=weights.device)
    _add_rows(sums, facts, rows, facts.pieces, piece_weights)
    return sums


def _make_zero_sums(facts: LinkFacts, n_heads: int) -> Float[Tensor, "cell head 2"]:
    """Return zeros to which the hits and the mass of cells are added."""
    word_weights = facts.word_of_token
    return word_weights.new_zeros(facts.n_cells, n_heads, 2, dtype=sum_dtype(word_weights.device))


def _add_rows(
    sums: Float[Tensor, "cell head 2"],
    facts: LinkFacts,
    rows: Int[Tensor, " row"],
    pieces: Int[Tensor, "piece 2"],
    piece_weights: Float[Tensor, "piece head key"],
) -> None:
    """Add the hits and mass of some rows' links to the sums, in place, from the weights of all pieces of these rows."""
    word_weights = _sum_by_word(facts, rows, pieces, piece_weights)

    # Of each target of these rows' links: the link, the word, and the index of the row within `rows`, (target,) each.
    target_row = facts.link_row[facts.targets[:, 0]]
    is_in_rows = torch.isin(target_row, rows)
    link, word = facts.targets[is_in_rows].unbind(1)
    row_index = torch.searchsorted(rows, target_row[is_in_rows])

    # A target that shares the largest weight with other words is a fraction of a hit, (target, head).
    largest = word_weights.amax(-1)
    n_largest = (word_weights == largest[..., None]).sum(-1)
    weight = word_weights[row_index, :, word]
    is_hit = (weight >= largest[row_index]) & (weight > 0)
    hits = is_hit / n_largest[row_index].to(sums.dtype)
    # A negative weight is -1, which marks a word that the text does not have: it has no mass.
    mass = weight.clamp(min=0).to(sums.dtype)
    hits_and_mass = torch.stack([hits, mass], -1)
    sums.index_add_(0, facts.link_cell[link], hits_and_mass)


def _sum_by_word(
    facts: LinkFacts,
    rows: Int[Tensor, " row"],
    pieces: Int[Tensor, "piece 2"],
    piece_weights: Float[Tensor, "piece head key"],
) -> Float[Tensor, "row head word"]:
    """Return the weights of some rows, ascending, on each word of the text that the row attends to.

    -1 marks a word that the text does not have, or that is the row itself. `pieces` are all pieces of these rows.
    """
    piece_row, token = pieces.T.contiguous()
    row_index = torch.searchsorted(rows, piece_row)
    n_words = int(facts.word_of_token.max()) + 1
    _, n_heads, n_keys = piece_weights.shape

    # The weights of a row are the mean over its pieces, (row, head, key).
    dtype = torch.promote_types(piece_weights.dtype, torch.float32)
    share = 1.0 / torch.bincount(row_index)[row_index]
    token_weights = piece_weights.new_zeros(len(rows), n_heads, n_keys, dtype=dtype)
    token_weights.index_add_(0, row_index, piece_weights.to(dtype) * share[:, None, None].to(dtype))

    # A word receives the sum over its tokens, (row, head, word + 1). The extra last column collects tokens of no word.
    word_of_token = facts.word_of_token[facts.row_text[rows]]
    word_of_token = word_of_token.where(word_of_token >= 0, n_words)
    word_weights = piece_weights.new_zeros(len(rows), n_heads, n_words + 1, dtype=dtype)
    word_weights.scatter_add_(2, word_of_token[:, None].expand(-1, n_heads, -1), token_weights)

    # Mark the words that the text has, except the row itself. The last column is cut off on return.
    allowed = piece_weights.new_zeros(len(rows), n_words + 1, dtype=torch.bool)
    allowed.scatter_(1, word_of_token, True)
    if not facts.is_across:
        row_word = word_of_token[row_index, token]
        allowed[row_index, row_word] = False
    return word_weights.masked_fill_(~allowed[:, None], -1)[..., :n_words]
