"""Hold what texts and one mask determine, whatever the weights, so that all layers under this mask share it.

That is: which queries count, what keys and pairs of a query and a key are worth, how the rows of a tile are read off by
it, and what uniform attention comes to. `core.measures` adds up heads by it. Knows no layers. Ours; the measures' own
sources are in `catalogue`.

Shapes: b texts, m mask heads (1 if all heads share one), q queries, k keys.
"""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from attnscope.core.attention import tiles
from attnscope.core.attention.precision import sum_dtype
from attnscope.core.attention.tiles import Block, Tile
from attnscope.core.catalogue import KEY_FAMILIES, OFFSETS, PAIR_FAMILIES, REACH, ROW_STATISTICS, measure_names
from attnscope.core.facts import TextFacts, key_facts, pair_facts

KEPT_PAIRS = 2**19
"""Pairs of a query and a key of a batch up to which their table is kept from layer to layer, as 12 numbers a pair."""

LEAST_QUERIES = 4
"""Queries in one table, however many keys there are."""

NAMES = measure_names()
"""The measures that have sums of their own, `<name>_active` after each."""

KEYS = tuple(KEY_FAMILIES)
PAIRS = tuple(PAIR_FAMILIES)

ACTIVE = [number for number, name in enumerate(NAMES) if name.endswith("_active")]
"""The columns of NAMES that count what is outside sinks."""

ROW_COLUMNS = [NAMES.index(name) for name in ROW_STATISTICS]

BEYOND = [number for number, family in enumerate(PAIR_FAMILIES.values()) if family.beyond_uniform]
"""Which of PAIRS subtract what uniform attention of the same mass comes to."""

LAYER_FACTS = ("value_norm", "output_norm", "outlying")
"""What keys are worth in one layer alone."""

_PAIR_FACTS = tuple(dict.fromkeys(family.fact for family in PAIR_FAMILIES.values() if not family.offsets))
_TABLE = ("off", *_PAIR_FACTS, *(f"{fact} off" for fact in _PAIR_FACTS), "squared distance")
"""What is added up of each row of weights: whether the key is outside sinks, and functions of query and key, of all
keys and of those outside sinks."""


@cache
def columns_of(names: tuple[str, ...], ending: str = "") -> tuple[list[int], list[int]]:
    """Return which of some measures have a sum `<name><ending>`, and its column in NAMES."""
    which = [number for number, name in enumerate(names) if name + ending in NAMES]
    return which, [NAMES.index(names[number] + ending) for number in which]


def weigh(shares: Float[Tensor, "b head q"], columns: Float[Tensor, "#b m q column"]) -> Float[Tensor, "b head column"]:
    """Return sums over queries of each head's share times what is known of the query; 0 if there are no queries."""
    if columns.shape[1] == 1:
        return shares @ columns[:, 0]
    return (shares[:, :, None] @ columns).squeeze(2)


class MaskedTexts:
    """Hold what texts and one mask determine.

    Args:
        blocks: The blocks of queries; none crosses the end of a unit.
        keys: The texts of the keys.
        asking: Which queries count, (b, q).
        mask_heads: How many heads the mask has.
        own_text: Whether queries are tokens of the same texts.
        dtype: The precision of weights.
        unit: How many queries are a unit.

    Attributes:
        key_names: The measures of keys whose facts are known of the texts.
        worth: What keys are worth by them, (b, k, measure).
        off: 1 for keys outside sinks, (b, k).
        count: What measures count, (unit, m, measure); those of `_active` depend on the head, and are 0.
        uniform: Their sums under uniform attention, likewise.
        offset_count: Queries that may attend to a key at the offset, (unit, m, offset).
        offset_uniform: How often it has the largest weight under uniform attention, likewise.
        n_counted: How many queries count, (b, m).
    """

    def __init__(
        self,
        blocks: list[Block],
        keys: TextFacts,
        asking: Bool[Tensor, "batch query"],
        *,
        mask_heads: int,
        own_text: bool,
        dtype: torch.dtype,
        unit: int,
    ) -> None:
        batch, n_queries = asking.shape
        n_keys = keys.real.shape[1]
        self.device = keys.real.device
        self.exact = sum_dtype(self.device)
        self.dtype = dtype
        self.blocks = blocks
        self.keys = keys
        self.own_text = own_text
        self.mask_heads = mask_heads
        self.n_units = max(-(-n_queries // unit), 1)
        self._unit = unit
        self._asking = asking
        self._map = _pair_map().to(self.device)
        self._tables: dict[Block, Tensor] = {}
        self._facts: dict[tuple[int, int], TextFacts] = {}
        self._keeps_tables = batch * n_queries * n_keys <= KEPT_PAIRS
        self._queries: dict[str, Tensor] = {}

        # What keys are worth, and whether they are outside sinks.
        facts = key_facts(keys, self.exact)
        self.key_names = tuple(name for name, family in KEY_FAMILIES.items() if family.fact in facts)
        self.worth = torch.stack([facts[KEY_FAMILIES[name].fact] for name in self.key_names], -1)
        self.off = (keys.real & ~keys.resting).to(self.exact)

        # Counts, and sums under uniform attention.
        self.count, self.uniform = self.zeros(2, batch * self.n_units, mask_heads, len(NAMES))
        self.offset_count, self.offset_uniform = self.zeros(2, batch * self.n_units, mask_heads, len(OFFSETS))
        self.n_counted = self.zeros(batch, mask_heads)
        for block in blocks:
            if min(block.shape):
                self._prepare(block)
        self.count[..., ACTIVE] = 0
        self.uniform[..., ACTIVE] = 0

    def zeros(self, *shape: int) -> Tensor:
        """Return zeros of a shape, in the dtype of sums."""
        return torch.zeros(shape, dtype=self.exact, device=self.device)

    def units(self, block: Block) -> slice:
        """Return the units that a block is part of, one per text."""
        unit = block.queries.start // self._unit
        first = block.texts.start * self.n_units + unit
        last = (block.texts.stop - 1) * self.n_units + unit
        return slice(first, last + 1, self.n_units)

    def of(self, block: Block, name: str) -> Tensor:
        """Return what is known of a block's queries, (b, m, q, ...), by name.

        `counted`: 1 if the query counts. `share`: 1 / how many keys it may attend to, `spread`: the same of keys
        outside sinks, 0 if it does not count. `worth`: what its statistics count, in the order of ROW_STATISTICS.
        `band`: 1 if it may attend to the key at each of OFFSETS. `active`: whether `_active` measures count it, and
        after these their values under uniform attention. `beyond`: the values under uniform attention that are
        subtracted, of all keys and of those outside sinks; none in cross attention.
        """
        return self._queries[name][block.texts, :, block.queries]

    def may(self, block: Block) -> Float[Tensor, "#b #m #q k"]:
        """Return 1 where a query may attend to a key."""
        may = block.allowed(self.device)
        if may is None:
            may = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=self.device)
        return may.to(self.exact).expand(-1, -1, -1, block.shape[2])

    # Reading the rows of a tile

    def at_offsets(self, block: Block, rows: Tensor) -> Float[Tensor, "b head q offset"]:
        """Return the number of each row at each of OFFSETS from its query; 0 beyond the block's keys."""
        index = torch.arange(block.queries.start, block.queries.stop, device=self.device)[:, None]
        index = index + torch.tensor(OFFSETS, device=self.device) - block.keys.start
        is_inside = (index >= 0) & (index < rows.shape[3])
        band = rows.gather(-1, index.clamp(0, rows.shape[3] - 1).expand(*rows.shape[:2], -1, -1))
        inside: Tensor = band * is_inside
        return inside

    def row_sums(self, block: Block, weights: Tensor) -> Float[Tensor, "b q head column"]:
        """Return the sums over keys of weights times the functions of _TABLE, each in the unit of its function.

        Args:
            block: Where the rows lie.
            weights: (b, head, q, k), 0 to 1, or unscaled; sums are linear in them.
        """
        if block in self._tables:
            return _row_sums(weights, self._tables[block])
        # A table is no larger than a tile, however few the heads are.
        n_texts, n_queries, n_keys = block.shape
        at_once = max(tiles.TILE_ELEMENTS // (n_texts * n_keys * len(_TABLE)), LEAST_QUERIES)
        sums = []
        for start in range(0, n_queries, at_once):
            some = slice(start, min(start + at_once, n_queries))
            sums.append(_row_sums(weights[:, :, some], self._table(block, some)))
        return torch.cat(sums, 1)

    def pair_parts(self, block: Block, rows: Tensor, band: Tensor) -> list[Float[Tensor, "b q head column"]]:
        """Return what measures of pairs add up: the `row_sums`, and the weights `at_offsets`, all and outside sinks.

        Args:
            block: Where the rows lie.
            rows: The `row_sums`, (b, q, head, column).
            band: The weights `at_offsets`, (b, head, q, offset), 0 to 1.

        Returns:
            The three parts, each (b, q, head, column), each in the unit of what it was made of.
        """
        n_queries, n_keys = block.shape[1:]
        off = self.off[block.texts, None, None, block.keys].expand(-1, -1, n_queries, n_keys)
        band_off = band * self.at_offsets(block, off).to(band.dtype)
        return [rows, band.transpose(1, 2), band_off.transpose(1, 2)]

    def pair_values(self, parts: list[Tensor]) -> Float[Tensor, "... value"]:
        """Return the values of PAIRS by their `pair_parts`, of all keys, then of those outside sinks, each in its unit.

        Args:
            parts: Each (b, q, head, column), or sums of these, (..., column).
        """
        both = torch.cat(parts, -1)
        return both @ self._map.to(both.dtype)

    def statistics(
        self, weights: Tensor, rows: Tensor, band: Tensor, block: Block, tile: Tile | None
    ) -> tuple[Float[Tensor, "b head q statistic"], Float[Tensor, "b head q offset"]]:
        """Return ROW_STATISTICS of each row, and the share of its largest weight that lies at each offset.

        Overwrites the scores of the tile, if there is one.
        """
        texts = self._facts_of(block)
        largest, largest_but_end = self._largest(block, weights)

        # Entropies overwrite the tile's scores, which hold the ties then.
        if tile is None:
            entropies = torch.special.entr(weights).sum(-1)
            is_largest = (weights == largest[..., None]).to(weights.dtype)
        else:
            entropies = tile.entropies(tile.log_sum_exp(largest))
            is_largest = torch.eq(weights, largest[..., None], out=tile.scores)

        # How many keys share the largest weight, and how many of these are the rarest.
        sets = [torch.ones_like(texts.real)]
        if texts.rarest is not None:
            sets.append(texts.rarest)
        chosen = torch.stack(sets, 1)[..., block.keys].to(weights.dtype)
        n_ties, *n_rarest = (is_largest @ chosen.mT[:, None]).unbind(-1)
        n_ties = n_ties.clamp(min=1)

        nothing = torch.zeros_like(entropies)
        by_name = {
            "entropy": entropies,
            "relative_entropy": entropies,
            "max_weight": largest_but_end,
            "rarest": n_rarest[0] / n_ties if n_rarest else nothing,
            "rms_distance": rows[..., -1].transpose(1, 2).sqrt() if self.own_text else nothing,
        }
        hits = (band == largest[..., None]) / n_ties[..., None]
        return torch.stack([by_name[statistic] for statistic in ROW_STATISTICS.values()], -1), hits

    def _largest(self, block: Block, weights: Tensor) -> tuple[Float[Tensor, "b head q"], Float[Tensor, "b head q"]]:
        """Return each row's largest weight, and the largest that is not on the text's final special token."""
        end_texts, end_keys = self._final_special(block).nonzero(as_tuple=True)
        on_ends = weights[end_texts, :, :, end_keys]
        weights[end_texts, :, :, end_keys] = 0
        largest_but_end = weights.amax(-1)
        weights[end_texts, :, :, end_keys] = on_ends
        largest = largest_but_end.index_put((end_texts,), torch.maximum(largest_but_end[end_texts], on_ends))
        return largest, largest_but_end

    def _final_special(self, block: Block) -> Bool[Tensor, "b k"]:
        """Return which of a block's keys is the special token that ends its text."""
        positions = torch.arange(block.keys.start, block.keys.stop, device=self.device)
        return self._facts_of(block).final_special[:, None] == positions

    def _facts_of(self, block: Block) -> TextFacts:
        """Return the facts of a block's texts, cut out once for all layers."""
        first, last = block.texts.start, block.texts.stop
        if (first, last) not in self._facts:
            self._facts[first, last] = self.keys.part(block.texts)
        return self._facts[first, last]

    def _table(self, block: Block, some: slice) -> Float[Tensor, "b q column k"]:
        """Return the functions of _TABLE for some of a block's queries; in cross attention the first alone."""
        n_texts, _, n_keys = block.shape
        off = self.off[block.texts, None, block.keys].to(self.dtype)
        n_columns = len(_TABLE) if self.own_text else 1
        n_queries = some.stop - some.start
        table = torch.zeros(n_texts, n_queries, n_columns, n_keys, dtype=self.dtype, device=self.device)
        table[:, :, 0] = off
        if not self.own_text:
            return table
        queries = slice(block.queries.start + some.start, block.queries.start + some.stop)
        facts = pair_facts(self._facts_of(block), queries, block.keys, self.dtype)
        for fact, function in facts.items():
            table[:, :, _TABLE.index(fact)] = function
        last = 1 + len(_PAIR_FACTS)
        torch.mul(table[:, :, 1:last], off[:, :, None], out=table[:, :, last:-1])
        table[:, :, -1] = facts["distance"].square()
        return table

    # Uniform attention

    def _prepare(self, block: Block) -> None:
        """Work out which of a block's queries count, and what uniform attention comes to there."""
        if self._keeps_tables:
            self._tables[block] = self._table(block, slice(0, block.shape[1]))
        may = self.may(block)
        queries = self._count(block, may)
        worth = self._statistics_worth(block, may, queries)
        uniform = self._measure_uniform(block, may, queries)
        band = uniform.band * queries.counted[..., None] * self.own_text

        # Which queries each measure counts, and its value there, (b, m, q, measure).
        defined, value = self.zeros(2, *queries.counted.shape, len(NAMES))
        self._define_keys(block, may, queries, defined)
        if self.own_text:
            self._define_pairs(queries, uniform, defined, value)
        defined[..., ROW_COLUMNS] = (worth > 0).to(self.exact)
        value[..., ROW_COLUMNS] = uniform.statistics * worth

        # Sums over the block's queries.
        units = self.units(block)
        self.count[units] += defined.sum(2)
        self.uniform[units] += (defined * value).sum(2)
        self.offset_count[units] += band.sum(2)
        self.offset_uniform[units] += (uniform.hits * band).sum(2)
        self.n_counted[block.texts] += queries.counted.sum(2)

        # What layers need of each query.
        defined, value = defined[..., ACTIVE], value[..., ACTIVE]
        self._put("counted", block, queries.counted, self.exact)
        self._put("share", block, queries.counted / queries.n_allowed.clamp(min=1), self.exact)
        self._put("spread", block, queries.active / queries.n_off.clamp(min=1), self.exact)
        self._put("worth", block, worth)
        self._put("band", block, band)
        self._put("active", block, torch.cat([defined, defined * value], -1), self.exact)
        if self.own_text:
            beyond = queries.counted[..., None] * uniform.pairs[..., BEYOND]
            beyond_off = queries.active[..., None] * uniform.pairs_off[..., BEYOND]
            self._put("beyond", block, torch.cat([beyond, beyond_off], -1), self.exact)

    def _put(self, name: str, block: Block, rows: Tensor, dtype: torch.dtype | None = None) -> None:
        # One array for all blocks: small ones in between would leave gaps in memory that tiles do not fit into.
        if name not in self._queries:
            batch, n_queries = self._asking.shape
            shape = batch, self.mask_heads, n_queries, *rows.shape[3:]
            self._queries[name] = torch.zeros(shape, dtype=dtype or self.dtype, device=self.device)
        self._queries[name][block.texts, :, block.queries] = rows

    def _count(self, block: Block, may: Tensor) -> "_Queries":
        n_texts, n_queries, _ = block.shape
        shape = n_texts, self.mask_heads, n_queries
        off = self.off[block.texts, None, block.keys, None]
        n_allowed = may.sum(-1).expand(shape)
        n_off = (may @ off).squeeze(-1).expand(shape)
        is_asking = self._asking[block.texts, None, block.queries]
        counted = ((n_allowed > 0) & is_asking).to(self.exact)
        return _Queries(n_allowed, n_off, counted, counted * (n_off > 0))

    def _measure_uniform(self, block: Block, may: Tensor, queries: "_Queries") -> "_Uniform":
        """Measure uniform attention: a head like any other, of equal weights, kept query by query."""
        # Sums of ones are exact in float32, those of 1 / n would not be.
        share = 1 / queries.n_allowed.clamp(min=1)
        ones = may.to(self.dtype).expand(*share.shape, block.shape[2]).contiguous()
        rows = self.row_sums(block, ones).to(self.exact) * share.transpose(1, 2)[..., None]
        band = self.at_offsets(block, ones)
        pairs = pairs_off = rows[..., :0]
        if self.own_text:
            parts = self.pair_parts(block, rows, band.to(self.exact) * share[..., None])
            pairs, pairs_off = self.pair_values(parts).transpose(1, 2).chunk(2, -1)
            mass_off = rows[..., 0].transpose(1, 2)[..., None]
            pairs_off = pairs_off / mass_off.clamp(min=torch.finfo(self.exact).tiny)
        even = ones.mul_(share[..., None])
        statistics, hits = self.statistics(even, rows, self.at_offsets(block, even), block, None)
        return _Uniform(pairs, pairs_off, statistics, hits, band)

    def _define_keys(self, block: Block, may: Tensor, queries: "_Queries", defined: Tensor) -> None:
        """Write which queries the measures of keys count; where that differs from layer to layer, none."""
        worth = self.worth[block.texts, block.keys]
        off = self.off[block.texts, block.keys, None]
        sees_all = may @ worth[:, None] > 0
        sees_off = may @ (worth * off)[:, None] > 0
        of_layer = tuple(name for name, family in KEY_FAMILIES.items() if family.fact in LAYER_FACTS)
        for ending, on, sees in (("", queries.counted, sees_all), ("_active", queries.active, sees_off)):
            numbers, columns = columns_of(self.key_names, ending)
            for number, column in zip(numbers, columns, strict=True):
                is_set = KEY_FAMILIES[self.key_names[number]].is_set
                defined[..., column] = on * sees[..., number] if is_set else on
            numbers, columns = columns_of(of_layer, ending)
            for number, column in zip(numbers, columns, strict=True):
                if not KEY_FAMILIES[of_layer[number]].is_set:
                    defined[..., column] = on

    def _define_pairs(self, queries: "_Queries", uniform: "_Uniform", defined: Tensor, value: Tensor) -> None:
        """Write which queries the measures of pairs count, and their values under uniform attention."""
        of_all = "", queries.counted, uniform.pairs
        of_off = "_active", queries.active, uniform.pairs_off
        for ending, on, pairs in (of_all, of_off):
            for number, column in zip(*columns_of(PAIRS, ending), strict=True):
                family = PAIR_FAMILIES[PAIRS[number]]
                of_queries = on * pairs[..., number]
                if family.fact != "cosine" or self.keys.embeddings is not None:
                    defined[..., column] = on * (of_queries > 0) if family.is_set else on
                if not family.beyond_uniform:
                    value[..., column] = of_queries

    def _statistics_worth(self, block: Block, may: Tensor, queries: "_Queries") -> Float[Tensor, "b m q statistic"]:
        """Return what ROW_STATISTICS of each query are multiplied by, 0 if it does not count."""
        texts = self._facts_of(block)
        n_allowed, counted = queries.n_allowed, queries.counted
        n_ends = (may * self._final_special(block)[:, None, None]).sum(-1)
        worth = {
            "entropy": counted,
            "relative_entropy": counted * (n_allowed >= 2) / n_allowed.clamp(min=2).log(),
            "max_weight": counted * (n_allowed > n_ends),
            "rarest": torch.zeros_like(counted),
            "rms_distance": counted * self.own_text,
        }
        if texts.rarest is not None:
            n_rarest = (may * texts.rarest[:, None, None, block.keys]).sum(-1)
            worth["rarest"] = counted * (n_rarest > 0) / n_rarest.clamp(min=1)
        return torch.stack([worth[statistic] for statistic in ROW_STATISTICS.values()], -1)


class _Queries(NamedTuple):
    """What the mask says of a block's queries, each (b, m, q).

    Attributes:
        n_allowed: How many keys a query may attend to.
        n_off: How many of these are outside sinks.
        counted: 1 if it counts.
        active: 1 if `_active` measures count it.
    """

    n_allowed: Tensor
    n_off: Tensor
    counted: Tensor
    active: Tensor


class _Uniform(NamedTuple):
    """What uniform attention comes to at a block's queries, each (b, m, q, ...).

    Attributes:
        pairs: Values of PAIRS; none in cross attention.
        pairs_off: The same outside sinks, of an attention that lies there alone.
        statistics: ROW_STATISTICS.
        hits: The share of the largest weight that lies at each of OFFSETS.
        band: 1 if the query may attend to the key at each of OFFSETS.
    """

    pairs: Tensor
    pairs_off: Tensor
    statistics: Tensor
    hits: Tensor
    band: Tensor


def _row_sums(weights: Tensor, table: Float[Tensor, "b q column k"]) -> Float[Tensor, "b q head column"]:
    # Text by text: the texts of a block together would be copied, to lie query by query.
    return torch.stack([torch.bmm(of.transpose(0, 1), one.mT) for of, one in zip(weights, table, strict=True)])


def _pair_map() -> Tensor:
    """Return which columns each measure of pairs adds up, (columns of _TABLE and two of OFFSETS, 2 measures), 0 or 1.

    Measures of all keys come first, then those of keys outside sinks.
    """
    chosen = torch.zeros(len(_TABLE) + 2 * len(OFFSETS), 2 * len(PAIRS))
    for number, family in enumerate(PAIR_FAMILIES.values()):
        all_rows: Sequence[int] = [len(_TABLE) + REACH + offset for offset in family.offsets]
        off_rows: Sequence[int] = [row + len(OFFSETS) for row in all_rows]
        if not family.offsets:
            all_rows = [_TABLE.index(family.fact)]
            off_rows = [_TABLE.index(f"{family.fact} off")]
        chosen[all_rows, number] = 1
        chosen[off_rows, len(PAIRS) + number] = 1
    return chosen
