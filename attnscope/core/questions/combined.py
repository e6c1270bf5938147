"""Links by several heads together: weighted sums of what each gives to each word, and how often they are right.

A combination is a number for each head: 1/k for the mean of k heads, or the coefficients of a logistic regression. Its
score of a word is the sum over heads of number times weight, by the rules of `relations` from tokens to words; its
score of an undirected pair, of number times corrected weight (`contacts`). A link is right if the largest score of its
source is on a target.

Until the last layer has come, only the scores of the links are kept, and nothing of any head.

Source: Rao et al. 2020, section 3.4, for undirected pairs; the rest is ours.
"""

from collections import defaultdict
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from attnscope.core.attention.precision import sum_dtype
from attnscope.core.attention.seam import AttentionCall
from attnscope.core.attention.tile_probe import TileProbe
from attnscope.core.attention.tiles import Block, Buffers, blocks
from attnscope.core.questions.contacts import (
    CUTS,
    SEPARATIONS,
    Contacts,
    correct_maps,
    first_tokens,
    pairs_of,
    precision,
)
from attnscope.core.questions.relations import BlockLinks, LinkFacts, LinkReader, divide_links

ASKED: tuple[tuple[str, int], ...] = tuple((separation, cut) for separation in SEPARATIONS for cut in CUTS)
"""Questions about undirected links: which of SEPARATIONS, and what L is divided by."""


@dataclass(frozen=True, eq=False)
class Combinations:
    """The combinations to try on a batch.

    Attributes:
        coefficients: The number of each head, float32, on the CPU.
        cell_relation: The relation of each cell.
        drawn: Links and words of which each head's weight is wanted.
        drawn_pairs: The same of undirected links: the place among `LinkFacts.contacts`, and two words.
        is_causal: Whether words do not see words that begin after them.
    """

    coefficients: Float[Tensor, "relation combination layer head"]
    cell_relation: Int[Tensor, " cell"]
    drawn: Int[Tensor, "sample 2"]
    drawn_pairs: Int[Tensor, "pair_sample 3"]
    is_causal: bool = False


@dataclass(frozen=True, eq=False)
class CombinedSums:
    """What combinations reach.

    Attributes:
        hits: How many links of a cell are right, (cell, combination), float64; 0 for undirected ones.
        precisions: Precision of undirected links at each of ASKED, (cell, combination, asked); NaN for others.
        chance: The hits and precisions of random picks: (cell, 1 + asked).
    """

    hits: Tensor
    precisions: Tensor
    chance: Tensor


class CombinedLinks(TileProbe[Tensor]):
    """Adds up combinations over the layers of one forward pass on one batch.

    Attributes:
        sums: Kind -> layer -> the weights that `tried` draws, links first, (sample, head), on the CPU.
    """

    def __init__(self, facts: LinkFacts, tried: Combinations, buffers: Buffers | None = None) -> None:
        super().__init__(buffers)
        self.facts, self.tried = facts, tried
        device = facts.units.device
        self._n_words = int(facts.units.max()) + 1 if facts.units.numel() else 0
        n_combinations = tried.coefficients.shape[1]
        self._scores = torch.zeros(len(facts.link_row), n_combinations, self._n_words, device=device)
        self._pairs = [pairs_of(facts.units[contacts.text]) for contacts in facts.contacts]
        self._pair_scores = [torch.zeros(n_combinations, len(pairs.first), device=device) for pairs in self._pairs]

    def _reader(self, call: AttentionCall) -> "_Reader":
        facts = self._on_device(self.facts, call.query.device)
        sizes = call.n_heads, call.query.shape[2], call.key.shape[2]
        plan = self._plan_once(call, lambda: divide_links(facts, blocks(call)))
        return _Reader(self, facts, plan, call.layer, sizes, call.query.dtype)

    @torch.no_grad()
    def read_weights(self, layer: int, weights: Float[Tensor, "text head query key"]) -> Tensor:
        """Reads a layer from dense weights; gives what is drawn of it, (sample, head), 0 to 1."""
        whole = Block.whole(weights)
        plan = divide_links(self.facts, [whole])
        reader = _Reader(self, self.facts, plan, layer, tuple(weights.shape[1:]), weights.dtype)
        reader.add(whole, weights)
        return reader.result()

    def add_links(self, layer: int, links: Tensor, masses: Float[Tensor, "link head word"]) -> None:
        """Adds what the heads of a layer give to each word, at least 0, for some links, (link,)."""
        relations = self.tried.cell_relation[self.facts.link_cell[links.to(self.facts.link_cell.device)].cpu()]
        for relation in sorted(set(relations.tolist())):
            numbers = self.tried.coefficients[relation, :, layer, : masses.shape[1]]
            heads = numbers.any(0).nonzero()[:, 0]
            if len(heads):
                mine = (relations == relation).nonzero()[:, 0].to(masses.device)
                part = masses[mine][:, heads.to(masses.device)].float()
                added = torch.einsum("lhw,mh->lmw", part, numbers[:, heads].to(masses.device))
                at = links[mine].to(self._scores.device)
                self._scores[at, :, : masses.shape[2]] += added.to(self._scores.device)

    def add_pairs(self, layer: int, number: int, scores: Float[Tensor, "head word word"]) -> None:
        """Adds the corrected maps of the heads of a layer for the undirected links `facts.contacts[number]`."""
        contacts, pairs = self.facts.contacts[number], self._pairs[number]
        numbers = self.tried.coefficients[self.tried.cell_relation[contacts.cell], :, layer, : len(scores)]
        heads = numbers.any(0).nonzero()[:, 0]
        if len(heads):
            first, second = pairs.first.to(scores.device), pairs.second.to(scores.device)
            part = scores[heads.to(scores.device)][:, first, second].float()
            added = numbers[:, heads].to(scores.device) @ part
            self._pair_scores[number] += added.to(self._pair_scores[number].device)

    def result(self) -> CombinedSums:
        """What the combinations reach, once every layer has been read."""
        facts, device = self.facts, self.facts.units.device
        n_combinations = self.tried.coefficients.shape[1]
        kind = sum_dtype(device)
        hits = torch.zeros(facts.n_cells, n_combinations, dtype=kind, device=device)
        precisions = torch.full((facts.n_cells, n_combinations, len(ASKED)), torch.nan, dtype=kind, device=device)
        chance = torch.zeros(facts.n_cells, 1 + len(ASKED), dtype=kind, device=device)
        if len(facts.link_row):
            may = self._may()
            scores = self._scores.masked_fill(~may[:, None], -torch.inf)
            link, word = facts.targets.unbind(1)
            largest = scores.amax(-1)
            ties = (scores == largest[..., None]).sum(-1)
            has_score = (self._scores != 0).any(-1)
            right = (scores[link, :, word] >= largest[link]) & has_score[link]
            hits.index_add_(0, facts.link_cell[link], right.to(kind) / ties[link])
            chance[:, 0].index_add_(0, facts.link_cell[link], 1 / may.sum(-1)[link].to(kind))
        for contacts, pairs, scores in zip(facts.contacts, self._pairs, self._pair_scores, strict=True):
            linked = torch.zeros(len(pairs.first), dtype=torch.bool, device=device)
            linked[pairs.number_of(contacts.pairs)] = True
            for number, (separation, cut) in enumerate(ASKED):
                precisions[contacts.cell, :, number] = precision(scores, linked, pairs, separation, cut).to(kind)
                chance[contacts.cell, 1 + number] = linked[pairs.within(separation)].to(kind).mean()
        return CombinedSums(hits.cpu(), precisions.cpu(), chance.cpu())

    def _may(self) -> Tensor:
        """Which words each link may be on, (link, word)."""
        facts = self.facts
        rows = first_tokens(facts.units, self._n_words)[facts.row_text]
        may = rows < facts.units.shape[1]
        if self.tried.is_causal:
            last = torch.zeros(len(facts.row_text), dtype=torch.int64, device=rows.device)
            last.scatter_reduce_(0, facts.pieces[:, 0], facts.pieces[:, 1], "amax")
            may &= rows <= last[:, None]
        may[facts.own[:, 0], facts.own[:, 1]] = False
        return may[facts.link_row]


class _Reader(LinkReader):
    """One layer's share in combinations."""

    def __init__(
        self, probe: CombinedLinks, facts: LinkFacts, plan: dict[Block, BlockLinks], layer: int,
        sizes: tuple[int, ...], dtype: torch.dtype,
    ) -> None:  # fmt: skip
        super().__init__(facts, plan, sizes, dtype)
        self._probe, self._layer = probe, layer
        self._by_text: dict[int, list[tuple[int, Contacts]]] = defaultdict(list)
        for number, contacts in enumerate(facts.contacts):
            self._by_text[contacts.text].append((number, contacts))
        tried = probe.tried
        self._drawn = torch.zeros(len(tried.drawn) + len(tried.drawn_pairs), sizes[0])

    def result(self) -> Tensor:  # type: ignore[override]  # what a probe keeps of a layer is its own
        return self._drawn

    def _judge(self, words: Tensor, links: BlockLinks) -> None:
        row, _, link = links.targets.unbind(1)
        row_of = torch.full((len(self._facts.link_row),), -1, dtype=torch.int64, device=words.device)
        row_of[link] = row
        here = (row_of >= 0).nonzero()[:, 0]
        masses = words[..., :-1].clamp(min=0)
        self._probe.add_links(self._layer, here, masses[row_of[here]])
        samples = self._probe.tried.drawn.to(words.device)
        inside = row_of[samples[:, 0]] >= 0
        weights = masses[row_of[samples[inside, 0]], :, samples[inside, 1]]
        self._drawn[: len(samples)][inside.cpu()] = weights.float().cpu()

    def _judge_pairs(self, text: int, maps: Tensor) -> None:
        scores = correct_maps(maps)
        samples = self._probe.tried.drawn_pairs.to(maps.device)
        for number, _ in self._by_text[text]:
            self._probe.add_pairs(self._layer, number, scores)
            mine = samples[:, 0] == number
            weights = scores[:, samples[mine, 1], samples[mine, 2]].T
            self._drawn[len(self._drawn) - len(samples) :][mine.cpu()] = weights.float().cpu()
