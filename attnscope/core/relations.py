"""Links between words: how often a head's largest weight falls on the word that a link names, and its mass there.

From tokens to words as Clark et al. 2019, section 4.1: a word of several pieces receives the sum of their weights, and
gives the mean of its pieces' weights. A link is right if the largest of a word's weights, among the other words and
without special tokens, is on a target.

No map is kept. Weights are computed beside the model's own attention: of a short batch all at once; of a long one only
the rows of words that have links, some after the others.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from attnscope.core.attention.precision import sum_dtype
from attnscope.core.attention.probes import OfChosen
from attnscope.core.attention.row_samples import rows_of
from attnscope.core.attention.seam import AttentionCall, attention_weights

WEIGHTS_AT_ONCE = 2**22
"""About how many weights of a layer are held at once."""


@dataclass(frozen=True, eq=False)
class LinkFacts:
    """The links of a batch of texts.

    A *row* is what a link starts from, one word or several; rows are counted over the batch. Links are added up by
    *cell*, such as a relation in a text.

    Attributes:
        word_of_token: For each token that may be looked at, the number of its word within the text, from 0; -1 = none:
            special tokens, padding. (text, token), int64.
        row_text: The text of each row, ascending. (row,), int64.
        pieces: Row and token of each piece of a row, ordered by row. (piece, 2), int64. Across two texts the tokens are
            tokens of the text that looks.
        link_row: The row of each link. (link,), int64.
        targets: Link and word: which words are right, never the row itself. (n, 2), int64.
        link_cell: The cell that each link is added to. (link,), int64.
        n_cells: How many cells there are.
        is_across: Whether rows look at another text; in their own they may not look at themselves.
    """

    word_of_token: Tensor
    row_text: Tensor
    pieces: Tensor
    link_row: Tensor
    targets: Tensor
    link_cell: Tensor
    n_cells: int
    is_across: bool = False

    def on(self, device: torch.device) -> "LinkFacts":
        """Return the same facts on a device, because layers may lie on several."""
        if self.word_of_token.device == device:
            return self
        moved: dict[str, Any] = {}
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                moved[name] = value.to(device)
        return replace(self, **moved)


def keep_links(facts: LinkFacts) -> OfChosen[Tensor]:
    """Return a probe that adds up the links of every layer of one forward pass; no gradient flows through its output.

    Its `maps` are kind -> layer -> hits and mass, (cell, head, 2), as `links_of_weights` returns them. It raises a
    ValueError if the shapes of a call are not those of the links.
    """

    def read(call: AttentionCall) -> Float[Tensor, "cell head 2"]:
        return _links_of_call(call, facts.on(call.query.device))

    return OfChosen(read)


@torch.no_grad()
def _links_of_call(call: AttentionCall, facts: LinkFacts) -> Float[Tensor, "cell head 2"]:
    """Return hits and mass in a layer; raise a ValueError if its shapes are not those of the links."""
    n_texts, n_heads, n_queries, _ = call.query.shape
    n_keys = call.key.shape[2]
    last_query = int(facts.pieces[:, 1].max()) if len(facts.pieces) else 0
    if facts.word_of_token.shape != (n_texts, n_keys) or last_query >= n_queries:
        raise ValueError(
            f"{call.kind} layer {call.layer} has {n_texts} texts of {n_queries} queries and {n_keys} keys; the "
            f"links are of {tuple(facts.word_of_token.shape)}"
        )
    # A short batch is read at once.
    if n_texts * n_heads * n_queries * n_keys <= WEIGHTS_AT_ONCE:
        return links_of_weights(attention_weights(call), facts)
    # A long one is read text by text, some rows at a time.
    sums = _no_sums(facts, n_heads)
    step = max(1, WEIGHTS_AT_ONCE // (n_heads * n_keys))
    for text in range(n_texts):
        text_rows = (facts.row_text == text).nonzero()[:, 0]
        for rows in text_rows.split(step):  # type: ignore[no-untyped-call]
            # Two rows may have a piece in common: its weights are computed once.
            pieces = facts.pieces[torch.isin(facts.pieces[:, 0], rows)]
            queries, query_of_piece = pieces[:, 1].unique(return_inverse=True)  # type: ignore[no-untyped-call]
            # (head, query, key) -> (piece, head, key)
            weights = rows_of(call, queries, slice(text, text + 1))[0]
            piece_weights = weights.movedim(1, 0)[query_of_piece]
            _add_rows(sums, facts, rows, pieces, piece_weights)
    return sums


@torch.no_grad()
def links_of_weights(
    weights: Float[Tensor, "text head query key"],
    facts: LinkFacts,
) -> Float[Tensor, "cell head 2"]:
    """Return hits and mass of dense weights.

    Returns:
        How many links of a cell are right, and the sum over its links of the weight on their targets, float64. If
        several words share the largest weight, a target counts as its share of them; without any weight nothing is
        right.
    """
    sums = _no_sums(facts, weights.shape[1])
    # The rows of weights of all pieces, (piece, head, key).
    row, token = facts.pieces.unbind(1)
    piece_weights = weights[facts.row_text[row], :, token]
    rows = torch.arange(len(facts.row_text), device=weights.device)
    _add_rows(sums, facts, rows, facts.pieces, piece_weights)
    return sums


def _no_sums(facts: LinkFacts, n_heads: int) -> Float[Tensor, "cell head 2"]:
    """Return hits and mass of no links: zeros, to be added to."""
    device = facts.word_of_token.device
    return torch.zeros(facts.n_cells, n_heads, 2, dtype=sum_dtype(device), device=device)


def _add_rows(
    sums: Float[Tensor, "cell head 2"],
    facts: LinkFacts,
    rows: Int[Tensor, " row"],
    pieces: Int[Tensor, "piece 2"],
    piece_weights: Float[Tensor, "piece head key"],
) -> None:
    """Add the links of some rows to the sums, from the weights of all their pieces."""
    if not len(rows):
        return
    words = word_weights(facts, rows, pieces, piece_weights)

    # The links of these rows, their targets, and where each one's row is among `rows`: (target,).
    target_row = facts.link_row[facts.targets[:, 0]]
    is_here = torch.isin(target_row, rows)
    link, word = facts.targets[is_here].unbind(1)
    row_index = torch.searchsorted(rows, target_row[is_here])

    # A target that shares the largest weight counts as its share: (target, head).
    largest = words.amax(-1)
    n_largest = (words == largest[..., None]).sum(-1)
    weight = words[row_index, :, word]
    is_right = (weight >= largest[row_index]) & (weight > 0)
    hits = is_right / n_largest[row_index].to(sums.dtype)
    mass = weight.clamp(min=0).to(sums.dtype)
    hits_and_mass = torch.stack([hits, mass], -1)
    sums.index_add_(0, facts.link_cell[link], hits_and_mass)


def word_weights(
    facts: LinkFacts,
    rows: Int[Tensor, " row"],
    pieces: Int[Tensor, "piece 2"],
    piece_weights: Float[Tensor, "piece head key"],
) -> Float[Tensor, "row head word"]:
    """Return the weights of some rows on each word of their text; -1 = there is no such word, or it is the row itself.

    Args:
        facts: The links.
        rows: The rows, ascending.
        pieces: Row and token of all their pieces.
        piece_weights: The weights of these.
    """
    piece_row, token = pieces.T.contiguous()
    row_index = torch.searchsorted(rows, piece_row)
    n_words = int(facts.word_of_token.max()) + 1
    _, n_heads, n_keys = piece_weights.shape

    # A row of a word is the mean of its pieces' rows: (row, head, key).
    dtype = torch.promote_types(piece_weights.dtype, torch.float32)
    share = 1.0 / torch.bincount(row_index)[row_index]
    token_weights = torch.zeros(len(rows), n_heads, n_keys, dtype=dtype, device=piece_weights.device)
    token_weights.index_add_(0, row_index, piece_weights.to(dtype) * share[:, None, None].to(dtype))

    # A word gets the sum of its pieces: (row, head, word). The last column holds tokens of no word.
    word_of_token = facts.word_of_token[facts.row_text[rows]]
    word_of_token = word_of_token.where(word_of_token >= 0, n_words)
    words = torch.zeros(len(rows), n_heads, n_words + 1, dtype=dtype, device=piece_weights.device)
    words.scatter_add_(2, word_of_token[:, None].expand(-1, n_heads, -1), token_weights)

    # Only the other words of the text may be looked at.
    allowed = torch.zeros(len(rows), n_words + 1, dtype=torch.bool, device=piece_weights.device)
    allowed.scatter_(1, word_of_token, True)
    if not facts.is_across:
        own_word = word_of_token[row_index, token]
        allowed[row_index, own_word] = False
    return words.masked_fill_(~allowed[:, None], -1)[..., :n_words]
