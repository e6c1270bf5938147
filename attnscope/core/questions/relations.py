"""Links between words: how often a head's largest weight falls on the word that a link names, and its mass there.

From tokens to words as Clark et al. 2019, section 4.1: a word of several pieces receives the sum of their weights, and
gives the mean of its pieces' weights. A link is right if the largest of a word's weights, among the other words and
without special tokens, is on a target.

One pass over tiles serves the model its output and all links at once. No map is kept: only the rows of words that have
links are turned into words, and only rows whose pieces lie in several blocks are held until the last block has come.
"""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from attnscope.core.attention.precision import sum_dtype
from attnscope.core.attention.seam import AttentionCall
from attnscope.core.attention.tile_probe import TileProbe
from attnscope.core.attention.tiles import Block, Buffers, blocks


@dataclass(frozen=True, eq=False)
class LinkFacts:
    """The links of a batch of texts.

    A *row* is a word, or several, that have links; rows are counted over the batch. A *cell* is what links are added up
    by, such as a relation in a text.

    Attributes:
        units: For each token that may be looked at, the number of its word within the text, from 0; -1 = none: special
            tokens, padding. (text, token), int64.
        row_text: The text of each row, ascending. (row,), int64.
        pieces: Row and token of each piece of a row, ordered by row. (piece, 2), int64. Across two texts the tokens are
            those of the text that looks.
        own: Row and word of the words that a row is itself; it may not look at them. (n, 2), int64. Empty if it looks
            at another text.
        link_row: The row of each link. (link,), int64.
        targets: Link and word: which words are right, never the row itself. (n, 2), int64.
        link_cell: Where each link is added. (link,), int64.
        n_cells: How many cells there are.
    """

    units: Tensor
    row_text: Tensor
    pieces: Tensor
    own: Tensor
    link_row: Tensor
    targets: Tensor
    link_cell: Tensor
    n_cells: int

    def on(self, device: torch.device) -> "LinkFacts":
        """The same facts on a device, because layers may lie on several."""
        if self.units.device == device:
            return self
        moved = {name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **moved)  # type: ignore[arg-type]  # n_cells is no tensor


@dataclass(frozen=True, eq=False)
class LinkSums:
    """The sums over the links of one layer.

    Attributes:
        hits: How many links of a cell are right, float64. If several words share the largest weight, a target counts as
            its share of them; without any weight nothing is right.
        mass: Sum over the links of the weight on their targets, float64.
    """

    hits: Float[Tensor, "cell head"]
    mass: Float[Tensor, "cell head"]


class Links(TileProbe[LinkSums]):
    """Adds up links in every layer, in memory that grows with the length of the texts alone; see TileProbe."""

    def __init__(self, facts: LinkFacts, buffers: Buffers | None = None) -> None:
        super().__init__(buffers)
        self._facts = facts

    def _reader(self, call: AttentionCall) -> "LinkReader":
        batch, _, n_queries, _ = call.query.shape
        n_keys = call.key.shape[2]
        last_query = int(self._facts.pieces[:, 1].max()) if len(self._facts.pieces) else 0
        if self._facts.units.shape != (batch, n_keys) or last_query >= n_queries:
            raise ValueError(
                f"{call.kind} layer {call.layer} has {batch} texts of {n_queries} queries and {n_keys} keys; the links "
                f"are of {tuple(self._facts.units.shape)}"
            )
        facts = self._on_device(self._facts, call.query.device)
        plan = self._plan_once(call, lambda: divide_links(facts, blocks(call)))
        return LinkReader(facts, plan, call.n_heads, n_keys, call.query.dtype)


@torch.no_grad()
def links_of_weights(weights: Float[Tensor, "text head query key"], facts: LinkFacts) -> LinkSums:
    """The same from dense weights."""
    whole = Block.whole(weights)
    _, n_heads, _, n_keys = weights.shape
    reader = LinkReader(facts, divide_links(facts, [whole]), n_heads, n_keys, weights.dtype)
    reader.add(whole, weights)
    return reader.result()


def word_weights(
    weights: Float[Tensor, "head query key"],
    units: Int[Tensor, " key"],
    tokens: Int[Tensor, " piece"],
    own: Int[Tensor, " own"],
) -> Float[Tensor, "head word"]:
    """What one word of one text gives to each word, by the rules above; -1 for the word itself.

    `units` are those of `LinkFacts`, `tokens` the word's pieces, `own` the words that it is.
    """
    n_units = int(units.max()) + 1
    rows = weights[:, tokens].double().mean(1)
    words = torch.zeros(len(weights), n_units, dtype=torch.float64)
    words.index_add_(1, units[units >= 0], rows[:, units >= 0])
    words[:, own] = -1
    return words


@dataclass(frozen=True, eq=False)
class BlockLinks:
    """The links of one block. Rows are counted within it: those that end here first, then open ones.

    Attributes:
        pieces: (row here, text in the block, query in the block) of each piece, (piece, 3).
        share: 1 / number of pieces of the piece's row, (piece,).
        single: Whether each row is one piece, in order: nothing is added up.
        taken: Rows that were held: (row here, slot).
        kept: Rows that do not end here: (row here, slot).
        n_rows: How many rows there are here.
        n_done: How many of them end here.
        texts: The text in the block of each of those, (row,).
        first: The first token of each word of a text, (text, word); the number of keys if there is none.
        further: The j-th pieces of words: (text, n) tokens and words; padded by the number of keys and of words.
        own: (row here, word).
        targets: (row here, word, link).
    """

    pieces: Tensor
    share: Tensor
    single: bool
    taken: Tensor
    kept: Tensor
    n_rows: int
    n_done: int
    texts: Tensor
    first: Tensor
    further: tuple[tuple[Tensor, Tensor], ...]
    own: Tensor
    targets: Tensor


def divide_links(facts: LinkFacts, parts: list[Block]) -> dict[Block, BlockLinks]:
    """Divides the links among blocks, which come text by text and, within one, query by query."""
    n_rows, device = len(facts.row_text), facts.units.device
    rows, tokens = facts.pieces.unbind(1)
    n_pieces = torch.bincount(rows, minlength=n_rows).clamp(min=1)
    last = torch.zeros(n_rows, dtype=torch.int64, device=device).scatter_reduce(0, rows, tokens, "amax")
    begin = torch.full((n_rows,), torch.iinfo(torch.int64).max, dtype=torch.int64, device=device)
    begin = begin.scatter_reduce(0, rows, tokens, "amin")
    piece_text = facts.row_text[rows]
    target_row = facts.link_row[facts.targets[:, 0]]
    slots: dict[int, int] = {}
    words: dict[tuple[int, int], tuple[Tensor, tuple[tuple[Tensor, Tensor], ...]]] = {}
    divided = {}
    for block in parts:
        texts, queries = block.texts, block.queries
        of_text = (facts.row_text >= texts.start) & (facts.row_text < texts.stop)
        touched = of_text & (begin < queries.stop) & (last >= queries.start)
        ends = touched & (last < queries.stop)
        here = torch.cat([ends.nonzero()[:, 0], (touched & ~ends).nonzero()[:, 0]])
        number = torch.full((n_rows,), -1, dtype=torch.int64, device=device)
        number[here] = torch.arange(len(here), device=device)
        inside = (number[rows] >= 0) & (tokens >= queries.start) & (tokens < queries.stop)
        pieces = torch.stack(
            [number[rows[inside]], piece_text[inside] - texts.start, tokens[inside] - queries.start], 1
        )
        n_done = int(ends.sum())
        taken = [(int(number[row]), slots.pop(row)) for row in here.tolist() if row in slots]
        open_rows = []
        for row in here[n_done:].tolist():
            slot = next(free for free in range(len(slots) + 1) if free not in slots.values())
            slots[row] = slot
            open_rows.append((int(number[row]), slot))
        if (texts.start, texts.stop) not in words:
            words = {(texts.start, texts.stop): _words(facts.units[texts])}
        first, further = words[texts.start, texts.stop]
        mine = torch.zeros(n_rows, dtype=torch.bool, device=device)
        mine[here[:n_done]] = True
        own, target = facts.own[mine[facts.own[:, 0]]], mine[target_row]
        divided[block] = BlockLinks(
            pieces=pieces,
            share=1.0 / n_pieces[rows[inside]],
            single=torch.equal(pieces[:, 0], torch.arange(len(here), device=device))
            and bool((n_pieces[here] == 1).all()),
            taken=torch.tensor(taken, dtype=torch.int64, device=device).view(-1, 2),
            kept=torch.tensor(open_rows, dtype=torch.int64, device=device).view(-1, 2),
            n_rows=len(here),
            n_done=n_done,
            texts=facts.row_text[here[:n_done]] - texts.start,
            first=first,
            further=further,
            own=torch.stack([number[own[:, 0]], own[:, 1]], 1),
            targets=torch.stack([number[target_row[target]], facts.targets[target, 1], facts.targets[target, 0]], 1),
        )
    return divided


def _words(units: Tensor) -> tuple[Tensor, tuple[tuple[Tensor, Tensor], ...]]:
    """The pieces of the words of texts: the first of each, then the second of those that have one, and so on."""
    n_texts, n_keys = units.shape
    n_words = int(units.max()) + 1 if units.numel() else 0
    texts, tokens = (units >= 0).nonzero().unbind(1)
    flat = texts * max(n_words, 1) + units[texts, tokens]
    order = flat.argsort(stable=True)
    texts, tokens, flat = texts[order], tokens[order], flat[order]
    starts = torch.cat([flat.new_ones(1, dtype=torch.bool), flat[1:] != flat[:-1]])[: len(flat)]
    at = torch.arange(len(flat), device=units.device)
    rank = at - torch.where(starts, at, 0).cummax(0).values if len(flat) else at
    levels = []
    for level in range(1, int(rank.max()) + 1 if len(flat) else 1):
        chosen = rank == level
        text, token, word = texts[chosen], tokens[chosen], flat[chosen] % n_words
        counts = torch.bincount(text, minlength=n_texts)
        column = torch.arange(len(text), device=units.device) - (counts.cumsum(0) - counts)[text]
        width = int(counts.max())
        pieces, owners = (
            torch.full((n_texts, width), fill, dtype=torch.int64, device=units.device) for fill in (n_keys, n_words)
        )
        pieces[text, column], owners[text, column] = token, word
        levels.append((pieces, owners))
    return _first_tokens(units, n_words), tuple(levels)


def _first_tokens(units: Int[Tensor, "text token"], n_words: int) -> Int[Tensor, "text {n_words}"]:
    """Return the first token of each word of texts, int64; the number of tokens where a text lacks the word."""
    n_texts, n_tokens = units.shape
    first = torch.full((n_texts, n_words), n_tokens, dtype=torch.int64, device=units.device)
    text, token = (units >= 0).nonzero().unbind(1)
    first.view(-1).scatter_reduce_(0, text * n_words + units[text, token], token, "amin")
    return first


class LinkReader:
    """Add up one attention's links, block by block; `plan` is that of `divide_links`."""

    def __init__(
        self, facts: LinkFacts, plan: dict[Block, BlockLinks], n_heads: int, n_keys: int, dtype: torch.dtype
    ) -> None:
        device = facts.units.device
        dtype = torch.promote_types(dtype, torch.float32)
        self.blocks = list(plan)
        self._facts, self._plan, self._n_keys = facts, plan, n_keys
        hits, mass = (torch.zeros(facts.n_cells, n_heads, dtype=sum_dtype(device), device=device) for _ in range(2))
        self._sums = LinkSums(hits, mass)
        self._held = torch.zeros(0, n_heads, n_keys, dtype=dtype, device=device)

    def add(self, block: Block, weights: Tensor) -> None:
        """Adds the weights of a block, (text, head, query, key)."""
        links = self._plan[block]
        if links.n_rows:
            rows = self._rows(weights, links, block.keys)
            if links.n_done:
                self._judge(self._in_words(rows[: links.n_done], links), links)

    def result(self) -> LinkSums:
        """The sums over all links."""
        return self._sums

    def _rows(self, weights: Tensor, links: BlockLinks, keys: slice) -> Tensor:
        """Mean of the rows of each word's pieces, (row, head, key): all keys, and one more of zeros."""
        row, text, query = links.pieces.unbind(1)
        rows = weights.new_zeros(links.n_rows, weights.shape[1], self._n_keys + 1)
        picked = weights[text, :, query]
        if links.single:
            rows[..., keys] = picked
        else:
            rows[..., keys].index_add_(0, row, picked * links.share[:, None, None].to(picked.dtype))
        if len(links.taken):
            rows[links.taken[:, 0], :, : self._n_keys] += self._held[links.taken[:, 1]]
        if len(links.kept):
            n_slots = int(links.kept[:, 1].max()) + 1
            if n_slots > len(self._held):
                more = self._held.new_zeros(n_slots - len(self._held), *self._held.shape[1:])
                self._held = torch.cat([self._held, more])
            self._held[links.kept[:, 1]] = rows[links.kept[:, 0], :, : self._n_keys]
        return rows

    def _in_words(self, rows: Tensor, links: BlockLinks) -> Tensor:
        """Sum over the pieces of each word, (row, head, word), and one word more; -1 on words that are not allowed."""
        n_rows, n_heads, _ = rows.shape
        n_words = links.first.shape[1]

        def each(table: Tensor) -> Tensor:
            return table[links.texts][:, None].expand(n_rows, n_heads, table.shape[1])

        words = rows.new_zeros(n_rows, n_heads, n_words + 1)
        words[..., :n_words] = rows.gather(2, each(links.first))
        for pieces, owners in links.further:
            words.scatter_add_(2, each(owners), rows.gather(2, each(pieces)))
        nowhere = torch.cat([links.first == self._n_keys, links.first.new_ones(len(links.first), 1).bool()], 1)
        away = nowhere[links.texts].to(words.dtype)
        away[links.own[:, 0], links.own[:, 1]] = 1
        return words.sub_(away[:, None], alpha=2)

    def _judge(self, words: Tensor, links: BlockLinks) -> None:
        """Adds the links of rows that are whole."""
        row, word, link = links.targets.unbind(1)
        largest = words.amax(-1, keepdim=True)
        ties = (words == largest).sum(-1)
        there = words[row, :, word]
        right = (there >= largest[row, :, 0]) & (there > 0)
        cell = self._facts.link_cell[link]
        self._sums.hits.index_add_(0, cell, right.to(self._sums.hits.dtype) / ties[row])
        self._sums.mass.index_add_(0, cell, there.clamp(min=0).to(self._sums.mass.dtype))
