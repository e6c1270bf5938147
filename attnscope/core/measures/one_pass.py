"""Read all measures off the weights in one pass over tiles, on any device and in any precision. Ours.

* Functions of query and key (distance, likeness) are one dot product of a head's tile with the function's.
* Weights at offsets, and those of like tokens while they are few, are read where they are.
* Row maxima, entropies and root-mean-squares take a pass each over weights that lie in the cache.
"""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from attnscope.core.attention.seam import AttentionCall
from attnscope.core.attention.tiles import Block, Buffers, Tile, attend_in_tiles
from attnscope.core.measures.board import BOARD, N_COLUMNS, QUERY
from attnscope.core.measures.catalogue import MEASURES, PAIR_FACTS, PairFact, Pairs, Places, Row
from attnscope.core.measures.facts import pair_facts, pair_targets
from attnscope.core.measures.plan import Plan

PLACES_APART = 64
"""Queries from whose middle positions count: signed distances are differences, which far positions would blur."""

TERMS_AT_ONCE = 2**14
"""Products of float32 that are added up at once: BLAS adds them one after another, and of 2^20 it loses four digits."""

SHORT_LIST = 8
"""Pairs of like tokens are read one by one if at most one in so many pairs of a tile is one."""

_SUMMED: tuple[PairFact, ...] = tuple(fact for fact in PAIR_FACTS if fact != "signed_distance")
"""Functions that are summed as they are; signed distances follow from what keys receive."""


class Read(NamedTuple):
    """What the weights of one block come to.

    Attributes:
        board: (text, head, N_COLUMNS): see BOARD.
        received: The mass that each key received from queries that count, (text, head, key).
        active: What each query gives to keys outside the sinks, (text, head, query).
    """

    board: Tensor
    received: Tensor
    active: Tensor


Reader = Callable[[Block, Read], None]
"""Receives each block, in order."""


def wanted_parts(names: tuple[str, ...], plan: Plan) -> set[str]:
    """Which columns of BOARD the measures need."""
    return set(_parts(names, plan.own_text, plan.offsets))


@cache
def _parts(names: tuple[str, ...], own_text: bool, offsets: bool) -> frozenset[str]:
    wanted: set[str] = {"hits"} if offsets and own_text else set()
    for name in {name.removesuffix("_active") for name in names}:
        match MEASURES[name].family:
            case Row(statistic):
                wanted.add(statistic)
            case Pairs(fact):
                wanted.add(fact)
            case Places():
                wanted.add("places")
    return frozenset(wanted if own_text else wanted - {"places", "rms_distance", *PAIR_FACTS})


def read_tiles(call: AttentionCall, plan: Plan, names: tuple[str, ...], read: Reader, buffers: Buffers) -> Tensor:
    """Attention in tiles; `read` gets the sums of each block, as far as the measures `names` need them.

    Returns:
        The output, (batch, n_heads, query, d_value), in the dtype of the values.
    """
    wanted = wanted_parts(names, plan)

    def read_tile(tile: Tile) -> None:
        if tile.weights.numel():
            read(tile.block, _TileReader(call, plan, wanted, tile).read())

    return attend_in_tiles(call, read_tile, plan.blocks, buffers)


class _TileReader:
    """The sums of one tile; overwrites its scores."""

    def __init__(self, call: AttentionCall, plan: Plan, wanted: set[str], tile: Tile) -> None:
        self._plan, self._wanted, self._tile, self._has_sinks = plan, wanted, tile, call.sinks is not None
        self._block = block = tile.block
        self._worth = plan.row(block, "worth")
        self._off_rest = plan.off_rest[block.texts, block.keys]
        self._board = torch.zeros(*tile.weights.shape[:2], N_COLUMNS, dtype=plan.summed, device=plan.device)

    def _put(self, name: str, sums: Tensor) -> None:
        """Adds (text, head), or (text, head, several)."""
        slot = BOARD[name]
        self._board[..., slot] += sums if sums.ndim == 3 else sums.unsqueeze(-1)

    def _of_queries(self, name: str) -> Tensor:
        """A column of QUERY, (text, mask head, query)."""
        return self._worth[..., QUERY[name].start]

    def read(self) -> Read:
        tile, block, plan, wanted = self._tile, self._block, self._plan, self._wanted
        weights, counted = tile.weights, self._of_queries("counted")
        active = _times_columns(weights, self._off_rest)
        received = self._receive(active)
        if wanted & set(_SUMMED):
            self._add_functions()
        if "cosine" in wanted:
            mass = weights.sum(-1) if self._has_sinks else 1.0
            self._put("uniform cosine", self._over_heads(mass * self._of_queries("uniform cosine")))
            self._put("uniform cosine off rest", (active * self._of_queries("uniform cosine off rest")).sum(-1))
        largest = self._largest()
        log_sum_exp = tile.log_sum_exp(largest)
        scratch = tile.scores
        if wanted & {"entropy", "relative_entropy"}:
            entropies = tile.entropies(log_sum_exp)
            self._put("entropy", (entropies * counted).sum(-1))
            self._put("relative_entropy", (entropies * self._of_queries("relative_entropy")).sum(-1))
        if "rms_distance" in wanted:
            squares = plan.offsets_of(block).square_()
            spread = torch.mul(weights, squares, out=scratch).sum(-1).sqrt_()
            self._put("rms_distance", (spread * counted).sum(-1))
        shared = None
        if wanted & {"hits", "rarest"}:
            shared = torch.eq(weights, largest.unsqueeze(-1), out=scratch).sum(-1).clamp_(min=1).reciprocal_()
            if plan.rarest is not None and "rarest" in wanted:
                hits = _times_columns(scratch, plan.rarest[block.texts, block.keys])
                self._put("rarest", (hits * shared * self._of_queries("rarest")).sum(-1))
        if wanted & {"hits", "places"}:
            band = weights.gather(-1, plan.band_index(block).expand(*weights.shape[:2], -1, -1))
            if shared is not None and "hits" in wanted:
                hits = torch.eq(band, largest.unsqueeze(-1)) * shared.unsqueeze(-1)
                self._put("hits", (hits * self._worth[..., QUERY["places"]]).sum(2))
            self._put("places", (band * self._worth[..., QUERY["places"]]).sum(2))
            self._put("places off rest", band.mul_(self._worth[..., QUERY["places off rest"]]).sum(2))
        return Read(self._board, received, active)

    def _over_heads(self, rows: Tensor) -> Tensor:
        """Sums over queries, of all heads, (text, head)."""
        return rows.sum(-1).expand(self._tile.weights.shape[:2])

    def _receive(self, active: Tensor) -> Tensor:
        """The mass that each key received, and where it lay, a few queries at a time.

        Positions count from the middle of these queries, those of the queries too. From the text's start the two sums
        would be n / 2 tokens per query, and nearly equal: a head that looks one token back would be off by the rounding
        of n.
        """
        block, plan, weights = self._block, self._plan, self._tile.weights
        n_texts, n_heads, n_queries, n_keys = weights.shape
        by_head = weights.view(-1, n_queries, n_keys)
        real = plan.row(block, "real").expand(n_texts, n_heads, -1).reshape(-1, 1, n_queries)
        received = torch.zeros(n_texts, n_heads, n_keys, dtype=plan.summed, device=plan.device)
        ahead = received.new_zeros(n_texts, n_heads, 2)
        keys = torch.arange(block.keys.start, block.keys.stop, dtype=plan.summed, device=plan.device)
        all_or_off_rest = torch.stack([torch.ones_like(self._off_rest), self._off_rest], -1).to(plan.summed)
        middle = min(PLACES_APART, n_queries) // 2
        signed = "signed_distance" in self._wanted
        for start in range(0, n_queries, PLACES_APART):
            few = slice(start, min(start + PLACES_APART, n_queries))
            mass = torch.bmm(real[..., few], by_head[:, few]).view(n_texts, n_heads, n_keys).to(plan.summed)
            received += mass
            if signed:
                ahead += mass @ ((keys - (block.queries.start + middle + start)).unsqueeze(-1) * all_or_off_rest)
        if signed:
            counted = self._of_queries("counted")
            q = torch.arange(n_queries, device=weights.device, dtype=weights.dtype) % PLACES_APART - middle
            mass = weights.sum(-1) * counted if self._has_sinks else counted
            self._put("signed_distance", ahead[..., 0] - self._over_heads(mass * q))
            self._put("signed_distance off rest", ahead[..., 1] - (active * counted * q).sum(-1))
        return received

    def _add_functions(self) -> None:
        block, plan, weights = self._block, self._plan, self._tile.weights
        n_texts, n_heads, n_queries, n_keys = weights.shape
        flat = weights.view(n_texts, n_heads, n_queries * n_keys)
        if n_texts > 1:
            both = self._sum_products(flat, plan.keep(block, "functions", self._functions))
            for i, fact in enumerate(_SUMMED):
                self._put(fact, both[..., i])
                self._put(f"{fact} off rest", both[..., i + len(_SUMMED)])
            return
        heads, real = flat[0], plan.row(block, "real")[0, 0]
        functions: dict[PairFact, Tensor] = {"distance": plan.offsets_of(block).abs_()}
        cosines = plan.cosines(block) if "cosine" in self._wanted else None
        if cosines is not None:
            functions["cosine"] = cosines[0]
        listed = plan.keep(block, "pairs", self._list_pairs)
        if listed is None:
            same, followed = pair_targets(plan.texts_of(block), block.queries, block.keys)
            functions |= {"same_token": same[0].to(weights.dtype), "induction": followed[0].to(weights.dtype)}
        else:
            at, worth = listed
            sums = self._sum_products(heads.index_select(1, at)[None], worth[None])
            for i, name in enumerate(("same_token", "induction", "same_token off rest", "induction off rest")):
                self._put(name, sums[..., i])
        for fact, function in functions.items():
            worth = function if plan.all_real(block) else function * real[:, None]
            self._put(fact, self._sum_products(flat, worth.view(1, -1, 1))[..., 0])
            self._put(f"{fact} off rest", self._sum_products(flat, (worth * self._off_rest).view(1, -1, 1))[..., 0])

    def _sum_products(self, weights: Tensor, worth: Tensor) -> Tensor:
        """(text, head, pair) by (text, pair, several) -> (text, head, several), some pairs after others."""
        sums = torch.zeros(*weights.shape[:2], worth.shape[2], dtype=self._plan.summed, device=weights.device)
        for start in range(0, worth.shape[1], TERMS_AT_ONCE):
            some = slice(start, start + TERMS_AT_ONCE)
            sums += torch.bmm(weights[..., some], worth[:, some])
        return sums

    def _list_pairs(self) -> tuple[Tensor, Tensor] | None:
        """Like tokens of a block of one text, all and off resting keys: (positions in the tile, (pair, 4) worths).

        None if there are many.
        """
        block, plan = self._block, self._plan
        real = plan.row(block, "real")[:, 0, :, None] > 0
        same, followed = (pair & real for pair in pair_targets(plan.texts_of(block), block.queries, block.keys))
        positions = (same | followed).flatten().nonzero().squeeze(-1)
        if len(positions) * SHORT_LIST > same.numel():
            return None
        worth = torch.stack([same.flatten()[positions], followed.flatten()[positions]], -1).to(plan.dtype)
        off = self._off_rest[0, positions % max(block.shape[2], 1)][:, None]
        return positions, torch.cat([worth, worth * off], -1)

    def _functions(self) -> Tensor:
        """Functions of a block of several texts, all and off resting keys, (text, query * key, 2 * function)."""
        block, plan = self._block, self._plan
        n_texts, n_queries, n_keys = block.shape
        n = len(_SUMMED)
        # Filled in place: a copy or two of it would be the largest things that a batch of short texts needs.
        values = torch.zeros(n_texts, n_queries, n_keys, 2 * n, dtype=plan.dtype, device=plan.device)
        pairs = pair_facts(plan.texts_of(block), block.queries, block.keys, plan.dtype, plan.cosines(block))
        for i, fact in enumerate(_SUMMED):
            if fact in pairs:
                values[..., i] = pairs[fact]
        torch.mul(values[..., :n], self._off_rest[:, None, :, None], out=values[..., n:])
        return values.mul_(plan.row(block, "real")[:, 0, :, None, None]).flatten(1, 2)

    def _largest(self) -> Tensor:
        """The largest weight of each query, (text, head, query); adds up max_weight, which leaves the end out."""
        weights, block, finals = self._tile.weights, self._block, self._plan.finals(self._block)
        if finals is None:
            largest = without = weights.amax(-1)
        else:
            index = finals - block.keys.start
            inside = (index >= 0) & (index < weights.shape[3])
            index = index.clamp(0, weights.shape[3] - 1)
            by_key, texts = weights.permute(0, 3, 1, 2), torch.arange(len(index), device=index.device)
            there = by_key[texts, index]  # (text, head, query)
            by_key[texts, index] = there.masked_fill(inside[:, None, None], 0.0)
            without = weights.amax(-1)
            by_key[texts, index] = there
            largest = torch.maximum(without, there)
        self._put("max_weight", (without * self._of_queries("max_weight")).sum(-1))
        return largest


def _times_columns(weights: Tensor, column: Tensor) -> Tensor:
    """Sum over keys of weights times a number a key, (text, head, query)."""
    if weights.shape[0] == 1:
        return torch.mv(weights.view(-1, weights.shape[3]), column[0]).view(weights.shape[:3])
    return (weights * column[:, None, None]).sum(-1)
