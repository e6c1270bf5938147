"""Compute what head measures need of texts and a mask before any weights are known; `measures` adds up the weights.

That is the values of keys and pairs, which queries count, and all sums under uniform attention. A measure adds up
weights times values of keys, or of pairs of a query and a key, or it is a statistic of rows of weights (`catalogue`).

Sums have two *views*: 0 = of all keys, 1 = of keys outside sinks. A *unit* is a text, or one of the equal parts of a
long one (`catalogue.queries_per_unit`). A *column* is the position of a measure in sums (`catalogue.MeasureColumns`).
The *parts* of a row are the numbers that measures of pairs are sums of: its mass, Σ_k A_qk f(q, k) for each fact f, and
its weight at each offset.

Shapes: b texts, m mask heads (1 if all heads share one), h heads, q queries, k keys, c columns.

Source: ours.
"""

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from attnscope.core.attention.precision import sum_dtype
from attnscope.core.attention.tiles import Tile, TileBounds
from attnscope.core.catalogue import MeasureColumns, queries_per_unit
from attnscope.core.facts import TextFacts, key_facts, pair_facts

KEPT_PAIRS = 2**20
"""The facts of a batch's pairs, about six numbers a pair, are kept from layer to layer up to so many pairs."""


class MaskedTexts:
    """What measures need of texts and one mask. It does not depend on weights, so layers with the same mask share it.

    Args:
        columns: The measures.
        blocks: The tiles that weights will come in, none of which crosses the end of a unit.
        keys: The texts whose tokens are the keys.
        is_query: Which queries count.
        mask_heads: m: 1 if all heads have the same mask, else the number of heads.
        own_text: Whether queries are tokens of the same texts as keys.
        dtype: The precision of weights.

    Attributes:
        device: Where all tensors are.
        exact: The precision of sums.
        n_units: How many units each text has.
        key_values: The value of each key in each measure of keys, (b, k, measure of keys); 0 where it is not known.
        outside_sinks: 1 for keys outside sinks, (b, k).
        pair_map: Which parts of a row each measure of pairs adds up, (part, pair).
        count: How many queries each measure counts, (view, unit, m, c). 0 in view 1: there a query counts by its mass,
            which depends on the head.
        uniform: The sums under uniform attention, (view, unit, m, c); 0 in view 1, for the same reason.
        counts_query: 1 if a query counts, (view, b, m, q, 1).
        beyond: The values under uniform attention that measures of pairs subtract, (view, b, m, q, pair).
        row_factors: What the statistics of each row are multiplied with, (b, m, q, statistic).
        active_count: View 1 of each query: 1 if a measure counts it, (b, m, q, c).
        active_uniform: View 1 of each query: the value of each measure under uniform attention, (b, m, q, c).
    """

    def __init__(
        self,
        columns: MeasureColumns,
        blocks: list[TileBounds],
        keys: TextFacts,
        is_query: Bool[Tensor, "batch query"],
        *,
        mask_heads: int,
        own_text: bool,
        dtype: torch.dtype,
    ) -> None:
        batch, n_queries = is_query.shape
        self.device = keys.real.device
        self.exact = sum_dtype(self.device)
        self.columns = columns
        self.blocks = blocks
        self.keys = keys
        self.own_text = own_text
        self._dtype = dtype
        self._mask_heads = mask_heads
        self._is_query = is_query
        # How many queries a unit has, and how many units a text, rounded up.
        self._unit = queries_per_unit(n_queries)
        self.n_units = max(math.ceil(n_queries / self._unit), 1)
        # The result of `_make_tables` for each block, if they are kept.
        self._tables: dict[TileBounds, tuple[Tensor, Tensor]] = {}
        self._keeps_tables = is_query.numel() * keys.real.shape[1] <= KEPT_PAIRS
        self.pair_map = torch.tensor(columns.pair_map, dtype=self.exact, device=self.device)

        # The values of keys, and which measures of keys and pairs are known.
        facts = key_facts(keys, self.exact)
        zeros = torch.zeros_like(keys.real, dtype=self.exact)
        self.key_values = torch.stack([facts.get(family.fact, zeros) for family in columns.keys], -1)
        self._pair_facts = list(columns.facts) if own_text else []
        if keys.embeddings is None and "cosine" in self._pair_facts:
            self._pair_facts.remove("cosine")
        is_known = [family.fact in facts for family in columns.keys]
        for family in columns.pairs:
            is_known.append(own_text and (bool(family.offsets) or family.fact in self._pair_facts))
        self._is_known = torch.tensor(is_known, device=self.device)
        self._is_indicator = torch.tensor(columns.is_indicator, device=self.device)
        self._is_beyond_uniform = torch.tensor(columns.is_beyond_uniform, device=self.device)

        # The positions of sinks, (b, sink). The last positions of a text with fewer sinks than another are no sinks.
        is_sink = keys.is_sink
        self.outside_sinks = (keys.real & ~is_sink).to(self.exact)
        n_sinks = int(is_sink.sum(1).max()) if batch else 0
        self._sinks = is_sink.int().topk(n_sinks, 1).indices
        self._is_sink = is_sink.gather(1, self._sinks)

        n_columns = len(columns.families)
        self.count, self.uniform = self.zeros(2, 2, batch * self.n_units, mask_heads, n_columns)
        # One array each for all blocks. Small arrays per block would leave gaps in memory too small for a tile.
        shape = batch, mask_heads, n_queries
        self.counts_query = self.zeros(2, *shape, 1)
        self.beyond = self.zeros(2, *shape, len(columns.pairs))
        self.row_factors = self.zeros(*shape, len(columns.rows))
        self.active_count, self.active_uniform = self.zeros(2, *shape, n_columns)
        for block in blocks:
            if min(block.shape):
                self._prepare(block)

    def zeros(self, *shape: int) -> Tensor:
        """Return zeros of a shape, in the dtype of sums."""
        return torch.zeros(shape, dtype=self.exact, device=self.device)

    def units(self, block: TileBounds) -> slice:
        """Return which units a block is part of: one in each of its texts."""
        # The next text has the same unit n_units further on.
        unit_of_text = block.queries.start // self._unit
        first = block.texts.start * self.n_units + unit_of_text
        return slice(first, block.texts.stop * self.n_units, self.n_units)

    def parts(
        self, block: TileBounds, weights: Float[Tensor, "b h q k"]
    ) -> Float[Tensor, "view b h q part"]:
        """Return the parts of each row: its mass, the sums of weights times facts, and the weights at offsets.

        In cross attention it is the mass alone.
        """
        tables = self._tables.get(block) or self._make_tables(block)
        if self._keeps_tables:
            self._tables[block] = tables
        table, sink_table = tables
        n_texts, n_queries, n_table_parts, n_keys = table.shape
        offsets = self.columns.offsets if self.own_text else []
        parts = self.zeros(2, *weights.shape[:3], n_table_parts + len(offsets))

        # Keys outside sinks, in the precision of weights. Text by text, because a product of all would copy them.
        for text in range(n_texts):
            # (q, h, k) @ (q, k, part)
            sums = torch.bmm(weights[text].transpose(0, 1), table[text].mT)
            parts[:, text, ..., :n_table_parts] = sums.transpose(0, 1)

        # Sinks apart, in the precision of sums: they are heavy, and in a float32 sum the other keys would lose digits.
        # A sink outside the block is read at the nearest key; `sink_table` is 0 for it.
        positions = (self._sinks[block.texts] - block.keys.start).clamp(0, n_keys - 1)
        positions = positions[:, None, None].expand(*weights.shape[:3], -1)
        sink_weights = weights.gather(-1, positions).to(self.exact)
        # (b, q, h, sink) @ (b, q, sink, part)
        sums = sink_weights.transpose(1, 2) @ sink_table.mT
        parts[0, ..., :n_table_parts] += sums.transpose(1, 2)

        if offsets:
            at_offsets = self._at_offsets(block, weights)
            is_outside = self.outside_sinks[block.texts, None, None, block.keys]
            is_outside = is_outside.expand(-1, -1, n_queries, -1)
            parts[0, ..., n_table_parts:] = at_offsets
            parts[1, ..., n_table_parts:] = at_offsets * self._at_offsets(block, is_outside)
        return parts

    def statistics(
        self,
        block: TileBounds,
        weights: Tensor,
        tile: Tile | None,
    ) -> Float[Tensor, "b h q statistic"]:
        """Return the statistics of rows of weights, (b, h, q, k), before `row_factors`. Overwrites a tile's scores."""
        largest = weights.amax(-1)
        entropies = torch.special.entr(weights).sum(-1) if tile is None else tile.entropies(largest)
        by_name = {
            "entropy": entropies,
            "relative_entropy": entropies,
            "rarest": torch.zeros_like(entropies),
        }
        if self.keys.rarest is not None and "rarest" in self.columns.rows:
            # How many keys share the largest weight, and how many of these are the rarest, in one product.
            scores = torch.empty_like(weights) if tile is None else tile.scores
            is_largest = torch.eq(weights, largest[..., None], out=scores)
            rarest = self.keys.rarest[block.texts, block.keys]
            all_and_rarest = torch.stack([torch.ones_like(rarest), rarest], -1)[:, None].to(self._dtype)
            n_largest, n_rarest = (is_largest @ all_and_rarest).unbind(-1)
            by_name["rarest"] = n_rarest / n_largest.clamp(min=1)
        return torch.stack([by_name[statistic] for statistic in self.columns.rows], -1)

    def _make_tables(
        self, block: TileBounds
    ) -> tuple[Float[Tensor, "b q part k"], Float[Tensor, "b q part sink"]]:
        """Return 1 (for the mass) and the facts of a block's pairs: for keys outside sinks, and for sinks apart."""
        n_texts, n_queries, n_keys = block.shape
        parts = ["mass", *self.columns.facts] if self.own_text else ["mass"]
        shape = n_texts, n_queries, len(parts), n_keys
        table = torch.zeros(shape, dtype=self._dtype, device=self.device)
        table[:, :, 0] = 1
        texts = self.keys.select_texts(block.texts)
        facts = pair_facts(self._pair_facts, texts, block.queries, block.keys, self._dtype)
        for name, values in facts.items():
            table[:, :, parts.index(name)] = values

        # Copy the columns of sinks, 0 where a text has fewer sinks, or a sink is outside the block, (b, q, part, sink).
        positions = (self._sinks[block.texts] - block.keys.start)[:, None, None]
        is_here = self._is_sink[block.texts, None, None] & (positions >= 0) & (positions < n_keys)
        positions = positions.clamp(0, n_keys - 1).expand(-1, n_queries, len(parts), -1)
        sink_table = table.gather(-1, positions).to(self.exact) * is_here
        table *= self.outside_sinks[block.texts, None, None, block.keys].to(self._dtype)
        return table, sink_table

    def _at_offsets(self, block: TileBounds, rows: Tensor) -> Float[Tensor, "b h q offset"]:
        """Return what each row, (b, h, q, k), holds at each offset from its query; 0 beyond the block's keys."""
        # The index of each query's key at each offset among the block's keys, (q, offset).
        n_keys = rows.shape[3]
        queries = torch.arange(block.queries.start, block.queries.stop, device=self.device)
        offsets = torch.tensor(self.columns.offsets, device=self.device)
        positions = queries[:, None] + offsets - block.keys.start
        is_inside = (positions >= 0) & (positions < n_keys)
        positions = positions.clamp(0, n_keys - 1).expand(*rows.shape[:2], -1, -1)
        at_offsets: Tensor = rows.gather(-1, positions) * is_inside
        return at_offsets

    def uniform_means(
        self, block: TileBounds, key_values: Float[Tensor, "text key c"]
    ) -> Float[Tensor, "view b m q c"]:
        """Return the mean of key values over the keys that each query of a block may attend to."""
        seen, n_seen = self._seen(block)
        return seen @ key_values[block.texts, None, block.keys] / n_seen.clamp(min=1)[..., None]

    def _seen(
        self, block: TileBounds
    ) -> tuple[Float[Tensor, "view b m q k"], Float[Tensor, "view b m q"]]:
        """Return 1 where a query may attend to a key of a view, else 0, and how many such keys each query has."""
        n_texts, n_queries, n_keys = block.shape
        allowed = block.allowed(self.device)
        if allowed is None:
            allowed = torch.ones(1, 1, 1, 1, device=self.device)
        seen = allowed.to(self.exact).expand(n_texts, self._mask_heads, n_queries, n_keys)
        seen_outside = seen * self.outside_sinks[block.texts, None, None, block.keys]
        by_view = torch.stack([seen, seen_outside])
        return by_view, by_view.sum(-1)

    def _prepare(self, block: TileBounds) -> None:
        """Work out which of a block's queries count, and their sums under uniform attention."""
        # A query counts in a view if it sees a key of that view, (view, b, m, q, 1).
        seen, n_seen = self._seen(block)
        divisor = n_seen.clamp(min=1)[..., None]
        is_counted = (n_seen > 0) & self._is_query[block.texts, None, block.queries]
        counts_query = is_counted[..., None]

        # Values under uniform attention, (view, b, m, q, c). Rows of ones are added up and then divided by n, because
        # their sums are exact in float32, and sums of 1 / n are not.
        pair_values = self.zeros(*n_seen.shape, len(self.columns.pairs))
        if self.own_text:
            parts = self.parts(block, seen[0].to(self._dtype))
            pair_values = parts @ self.pair_map / divisor
        value = torch.cat([self.uniform_means(block, self.key_values), pair_values], -1)
        # A measure of a set of keys does not count a query that sees none of the set.
        defined = counts_query & self._is_known & ((value > 0) | ~self._is_indicator)

        # Measures of pairs that subtract uniform attention are 0 under it.
        n_keys = len(self.columns.keys)
        beyond = value[..., n_keys:] * counts_query * self._is_beyond_uniform
        value[..., n_keys:] *= ~self._is_beyond_uniform

        # Statistics of rows are of all keys: in view 1 they are 0, and count no query.
        row_factors = self._row_factors(block, seen[0], n_seen[0], is_counted[0])
        factors = torch.stack([row_factors, torch.zeros_like(row_factors)])
        uniform_weights = (seen[0] / divisor[0]).to(self._dtype)
        statistics = self.statistics(block, uniform_weights, None) * factors
        value = torch.cat([value * defined, statistics], -1)
        defined = torch.cat([defined, factors > 0], -1)

        units = self.units(block)
        self.count[0, units] += defined[0].sum(2)
        self.uniform[0, units] += value[0].sum(2)
        rows = block.texts, slice(None), block.queries
        self.counts_query[:, *rows] = counts_query.to(self.exact)
        self.beyond[:, *rows] = beyond
        self.row_factors[rows] = row_factors
        self.active_count[rows] = defined[1].to(self.exact)
        self.active_uniform[rows] = value[1]

    def _row_factors(
        self,
        block: TileBounds,
        seen: Float[Tensor, "b m q k"],
        n_seen: Float[Tensor, "b m q"],
        is_counted: Bool[Tensor, "b m q"],
    ) -> Float[Tensor, "b m q statistic"]:
        """Return what the statistics of each query's row are multiplied with; 0 if the query does not count."""
        by_name = {
            "entropy": is_counted.to(self.exact),
            "relative_entropy": is_counted * (n_seen >= 2) / n_seen.clamp(min=2).log(),
            "rarest": torch.zeros_like(n_seen),
        }
        if self.keys.rarest is not None:
            n_rarest = (seen * self.keys.rarest[block.texts, None, None, block.keys]).sum(-1)
            by_name["rarest"] = is_counted * (n_rarest > 0) / n_rarest.clamp(min=1)
        return torch.stack([by_name[statistic] for statistic in self.columns.rows], -1)
