"""Measure how often a head links two words that stand in a relation, such as a verb and its object.

A link leads from a word to its *targets*. A head *hits* it if the largest of the word's weights, among the other words
and without special tokens, is on a target. Its *mass* is the weight on all targets. Weights of words are computed from
those of tokens as in Clark et al. 2019, section 4.1: a word of several pieces receives the sum of their weights, and
its row is the mean of its pieces' rows.

No map is kept. Weights are computed beside the model's own attention: of a short batch all at once; of a long one only
the rows of words that have links, a few at a time.
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

WEIGHTS_AT_ONCE = 2**22
"""About how many weights of a layer are in memory at once."""


@dataclass(frozen=True, eq=False)
class LinkFacts:
    """The links of a batch of texts.

    A *row* is the start of links: a word, or several that are read as one. Rows are numbered over the whole batch. Its
    *pieces* are its tokens. Hits and mass of links are added up by *cell*, such as a relation in a text.

    Attributes:
        word_of_token: The word of each token that is a key, as its index within the text; -1 for special tokens and
            padding. (text, token), int64.
        row_text: The text of each row, ascending. (row,), int64.
        pieces: Row and token of each piece, ordered by row. (piece, 2), int64. In cross-attention the tokens are those
            of the queries' text.
        link_row: The row of each link. (link,), int64.
        targets: Link and word of each target, never the row itself. (target, 2), int64.
        link_cell: The cell that each link is added to. (link,), int64.
        n_cells: How many cells there are.
        is_across: Whether keys are words of another text. If not, a row may not attend to itself.
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
        moved: dict[str, Any] = {}
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                moved[name] = value.to(device)
        return replace(self, **moved)


def keep_links(facts: LinkFacts) -> HeadRecorder[Tensor]:
    """Return a probe that adds up the links of every layer of one forward pass; no gradient flows through its output.

    Its `maps` are kind -> layer -> hits and mass, (cell, head, 2), as `links_of_weights` returns them. It raises a
    ValueError if the shapes of a call are not those of the links.
    """

    def read(call: AttentionCall) -> Float[Tensor, "cell head 2"]:
        return _links_of_call(call, facts.on(call.query.device))

    return HeadRecorder(read)


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
    # A short batch at once.
    if n_texts * n_heads * n_queries * n_keys <= WEIGHTS_AT_ONCE:
        return links_of_weights(attention_weights(call), facts)
    # A long one text by text, some rows at a time.
    sums = _no_sums(facts, n_heads)
    step = max(1, WEIGHTS_AT_ONCE // (n_heads * n_keys))
    for text in range(n_texts):
        text_rows = (facts.row_text == text).nonzero()[:, 0]
        for rows in text_rows.split(step):  # type: ignore[no-untyped-call]
            # The weights of a piece that two rows share are computed once.
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
        How many links of a cell are hit, and the sum over its links of the weight on their targets, float64. If k words
        share the largest weight, a target among them counts as 1 / k of a hit; a row without any weight hits nothing.
    """
    sums = _no_sums(facts, weights.shape[1])
    # The rows of weights of all pieces, (piece, head, key).
    row, token = facts.pieces.unbind(1)
    piece_weights = weights[facts.row_text[row], :, token]
    rows = torch.arange(len(facts.row_text), device=weights.device)
    _add_rows(sums, facts, rows, facts.pieces, piece_weights)
    return sums


def _no_sums(facts: LinkFacts, n_heads: int) -> Float[Tensor, "cell head 2"]:
    """Return zeros to which hits and mass are added."""
    words = facts.word_of_token
    return words.new_zeros(facts.n_cells, n_heads, 2, dtype=sum_dtype(words.device))


def _add_rows(
    sums: Float[Tensor, "cell head 2"],
    facts: LinkFacts,
    rows: Int[Tensor, " row"],
    pieces: Int[Tensor, "piece 2"],
    piece_weights: Float[Tensor, "piece head key"],
) -> None:
    """Add the links of some rows to the sums, from the weights of all their pieces."""
    words = _word_weights(facts, rows, pieces, piece_weights)

    # The targets of these rows' links, as link and word, and the index of each one's row in `rows`: (target,) each.
    target_row = facts.link_row[facts.targets[:, 0]]
    is_here = torch.isin(target_row, rows)
    link, word = facts.targets[is_here].unbind(1)
    row_index = torch.searchsorted(rows, target_row[is_here])

    # A target that shares the largest weight with others is a part of a hit: (target, head).
    largest = words.amax(-1)
    n_largest = (words == largest[..., None]).sum(-1)
    weight = words[row_index, :, word]
    is_hit = (weight >= largest[row_index]) & (weight > 0)
    hits = is_hit / n_largest[row_index].to(sums.dtype)
    # No target has a negative weight but -1, of a word that is not there.
    mass = weight.clamp(min=0).to(sums.dtype)
    hits_and_mass = torch.stack([hits, mass], -1)
    sums.index_add_(0, facts.link_cell[link], hits_and_mass)


def _word_weights(
    facts: LinkFacts,
    rows: Int[Tensor, " row"],
    pieces: Int[Tensor, "piece 2"],
    piece_weights: Float[Tensor, "piece head key"],
) -> Float[Tensor, "row head word"]:
    """Return the weights of some rows, ascending, on each word of the text that they attend to.

    -1 = the text has no such word, or it is the row itself. `pieces` are all pieces of these rows.
    """
    piece_row, token = pieces.T.contiguous()
    row_index = torch.searchsorted(rows, piece_row)
    n_words = int(facts.word_of_token.max()) + 1
    _, n_heads, n_keys = piece_weights.shape

    # A row is the mean of its pieces' rows: (row, head, key).
    dtype = torch.promote_types(piece_weights.dtype, torch.float32)
    share = 1.0 / torch.bincount(row_index)[row_index]
    token_weights = piece_weights.new_zeros(len(rows), n_heads, n_keys, dtype=dtype)
    token_weights.index_add_(0, row_index, piece_weights.to(dtype) * share[:, None, None].to(dtype))

    # A word receives the sum over its tokens: (row, head, word + 1). Tokens of no word go to the last column.
    word_of_token = facts.word_of_token[facts.row_text[rows]]
    word_of_token = word_of_token.where(word_of_token >= 0, n_words)
    words = piece_weights.new_zeros(len(rows), n_heads, n_words + 1, dtype=dtype)
    words.scatter_add_(2, word_of_token[:, None].expand(-1, n_heads, -1), token_weights)

    # Only words that the text has, and not the row itself.
    allowed = piece_weights.new_zeros(len(rows), n_words + 1, dtype=torch.bool)
    allowed.scatter_(1, word_of_token, True)
    if not facts.is_across:
        own_word = word_of_token[row_index, token]
        allowed[row_index, own_word] = False
    return words.masked_fill_(~allowed[:, None], -1)[..., :n_words]
