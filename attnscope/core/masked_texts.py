"""Compute the part of head measures that depends on texts and mask alone; `measures` adds up the weights.

This part is the values of keys and pairs, the queries that count, and all sums under uniform attention. A measure adds
up weights times values of keys, or weights times values of pairs of a query and a key, or it is a statistic of rows of
weights (`catalogue`). A *fact* is a number that a key or a pair has, such as 1 if the key is punctuation, else 0.

Sums have two *views*: 0 = of all keys, 1 = of keys outside sinks. A *unit* is a text, or one of the equal parts of a
long one (`catalogue.queries_per_unit`). A *column* is the index of a measure in sums (`catalogue.MeasureColumns`).
The *parts* of a row are the terms that measures of pairs add up: its mass, Σ_k A_qk f(q, k) for each fact f, and its
weight at each offset.

Shapes: b texts, m mask heads (1 if all heads share one mask), h heads, q queries, k keys, c columns.

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

MAX_CACHED_PAIRS = 2**20
"""The most pairs of query and key in a batch whose facts, about six numbers per pair, are cached for all layers."""


class MaskedTexts:
    """Hold the values and sums that texts and one mask determine. All layers with the same mask share one object.

    Args:
        columns: The measures.
        blocks: The tiles in which weights will arrive. No tile crosses the end of a unit.
        keys: The texts whose tokens are the keys.
        is_query: Which queries count.
        mask_heads: m: 1 if all heads have the same mask, else the number of heads.
        is_self_attention: Whether queries and keys are tokens of the same texts; False in cross-attention.
        dtype: The dtype of weights.

    Attributes:
        device: Where all tensors are.
        sums_dtype: The dtype of sums, at least as precise as `dtype`.
        n_units: How many units each text has.
        key_values: The value of each key in each measure of keys, (b, k, measure of keys); 0 where it is unknown.
        outside_sinks: 1 for keys outside sinks, 0 for sinks and padding, (b, k).
        pair_map: 1 where a measure of pairs adds up a part of a row, (part, measure of pairs).
        counts: How many queries each measure counts, (view, unit, m, c). 0 in view 1: there a query counts by its mass,
            which depends on the head.
        uniform_sums: The sums under uniform attention, (view, unit, m, c); 0 in view 1, for the same reason.
        is_query_counted: 1 if a query counts, (view, b, m, q, 1).
        uniform_pair_values: The values of measures of pairs under uniform attention, which some of them subtract,
            (view, b, m, q, pair).
        row_factors: The factor of each statistic of each row, (b, m, q, statistic); 0 for a query that does not count.
        counts_outside_sinks: In view 1, whether a measure counts a query, 1 or 0, (b, m, q, c).
        uniform_outside_sinks: In view 1, the value of each measure for a query under uniform attention, (b, m, q, c).
    """

    def __init__(
        self,
        columns: MeasureColumns,
        blocks: list[TileBounds],
        keys: TextFacts,
        is_query: Bool[Tensor, "batch query"],
        *,
        mask_heads: int,
        is_self_attention: bool,
        dtype: torch.dtype,
    ) -> None:
        batch, n_queries = is_query.shape
        self.device = keys.real.device
        self.sums_dtype = sum_dtype(self.device)
        self.columns = columns
        self.blocks = blocks
        self.keys = keys
        self.is_self_attention = is_self_attention
        self._dtype = dtype
        self._mask_heads = mask_heads
        self._is_query = is_query
        # The number of queries in a unit, and of units in a text; the last unit may be shorter.
        self._unit_length = queries_per_unit(n_queries)
        self.n_units = max(math.ceil(n_queries / self._unit_length), 1)
        # The result of `_make_fact_tables` by block; empty if the batch has too many pairs to cache.
        self._fact_tables: dict[TileBounds, tuple[Tensor, Tensor]] = {}
        self._caches_tables = is_query.numel() * keys.real.shape[1] <= MAX_CACHED_PAIRS
        self.pair_map = torch.tensor(columns.pair_map, dtype=self.sums_dtype, device=self.device)

        # The values of keys, and whether the inputs of each measure of keys and of pairs are known.
        facts = key_facts(keys, self.sums_dtype)
        zeros = torch.zeros_like(keys.real, dtype=self.sums_dtype)
        self.key_values = torch.stack([facts.get(family.fact, zeros) for family in columns.keys], -1)
        self._pair_facts = list(columns.facts) if is_self_attention else []
        if keys.embeddings is None and "cosine" in self._pair_facts:
            self._pair_facts.remove("cosine")
        is_known = [family.fact in facts for family in columns.keys]
        for family in columns.pairs:
            is_known.append(
                is_self_attention and (bool(family.offsets) or family.fact in self._pair_facts)
            )
        self._is_known = torch.tensor(is_known, device=self.device)
        self._is_indicator = torch.tensor(columns.is_indicator, device=self.device)
        self._is_beyond_uniform = torch.tensor(columns.is_beyond_uniform, device=self.device)

        # The positions of sinks, (b, sink). A text with fewer sinks is padded with other positions; `_is_sink` tells
        # them apart.
        is_sink = keys.is_sink
        self.outside_sinks = (keys.real & ~is_sink).to(self.sums_dtype)
        n_sinks = int(is_sink.sum(1).max()) if batch else 0
        self._sinks = is_sink.int().topk(n_sinks, 1).indices
        self._is_sink = is_sink.gather(1, self._sinks)

        n_columns = len(columns.families)
        self.counts, self.uniform_sums = self.zeros(2, 2, batch * self.n_units, mask_heads, n_columns)
        # Each array covers all blocks, because many small arrays fragment memory until no tile fits.
        shape = batch, mask_heads, n_queries
        self.is_query_counted = self.zeros(2, *shape, 1)
        self.uniform_pair_values = self.zeros(2, *shape, len(columns.pairs))
        self.row_factors = self.zeros(*shape, len(columns.rows))
        self.counts_outside_sinks, self.uniform_outside_sinks = self.zeros(2, *shape, n_columns)
        for block in blocks:
            if min(block.shape):
                self._prepare(block)

    def zeros(self, *shape: int) -> Tensor:
        """Return zeros of a shape, in the dtype of sums."""
        return torch.zeros(shape, dtype=self.sums_dtype, device=self.device)

    def find_units(self, block: TileBounds) -> slice:
        """Return the indices of the units that contain a block: one unit of each of its texts."""
        # Units are numbered text by text, so the matching unit of the next text is n_units further on.
        unit_of_text = block.queries.start // self._unit_length
        first_unit = block.texts.start * self.n_units + unit_of_text
        return slice(first_unit, block.texts.stop * self.n_units, self.n_units)

    def sum_parts(
        self, block: TileBounds, weights: Float[Tensor, "b h q k"]
    ) -> Float[Tensor, "view b h q part"]:
        """Return the parts of each row: its mass, the sums of weights times facts, and the weights at offsets.

        In cross-attention the mass is the only part.
        """
        tables = self._fact_tables.get(block) or self._make_fact_tables(block)
        if self._caches_tables:
            self._fact_tables[block] = tables
        # (b, q, part, k) and (b, q, part, sink)
        table, sink_table = tables
        n_texts, n_queries, n_table_parts, n_keys = table.shape
        offsets = self.columns.offsets if self.is_self_attention else []
        parts = self.zeros(2, *weights.shape[:3], n_table_parts + len(offsets))

        # Keys outside sinks, in the dtype of weights. One text at a time, because a product of all texts
        # would copy the weights.
        for text in range(n_texts):
            # (q, h, k) @ (q, k, part)
            sums = torch.bmm(weights[text].transpose(0, 1), table[text].mT)
            parts[:, text, ..., :n_table_parts] = sums.transpose(0, 1)

        # Sinks are added separately, in the dtype of sums: their weights are so large that other keys would lose digits
        # in a float32 sum. For a sink outside the block the weight of the nearest key is read, and `sink_table` is 0.
        positions = (self._sinks[block.texts] - block.keys.start).clamp(0, n_keys - 1)
        positions = positions[:, None, None].expand(*weights.shape[:3], -1)
        sink_weights = weights.gather(-1, positions).to(self.sums_dtype)
        # (b, q, h, sink) @ (b, q, sink, part)
        sums = sink_weights.transpose(1, 2) @ sink_table.mT
        parts[0, ..., :n_table_parts] += sums.transpose(1, 2)

        if offsets:
            at_offsets = self._gather_at_offsets(block, weights)
            is_outside = self.outside_sinks[block.texts, None, None, block.keys]
            is_outside = is_outside.expand(-1, -1, n_queries, -1)
            parts[0, ..., n_table_parts:] = at_offsets
            parts[1, ..., n_table_parts:] = at_offsets * self._gather_at_offsets(block, is_outside)
        return parts

    def compute_statistics(
        self,
        block: TileBounds,
        weights: Tensor,
        tile: Tile | None,
    ) -> Float[Tensor, "b h q statistic"]:
        """Return the statistics of rows of weights, (b, h, q, k), without `row_factors`. Overwrites the tile's scores.

        `tile` is None if the weights belong to no tile, as uniform weights.
        """
        largest = weights.amax(-1)
        entropies = torch.special.entr(weights).sum(-1) if tile is None else tile.entropies(largest)
        by_name = {
            "entropy": entropies,
            "relative_entropy": entropies,
            "rarest": torch.zeros_like(entropies),
        }
        if self.keys.rarest is not None and "rarest" in self.columns.rows:
            # One product counts the keys that share the largest weight, and the rarest keys among them. The tile's
            # scores are no longer needed, so their memory holds the comparison.
            scores = torch.empty_like(weights) if tile is None else tile.scores
            is_largest = torch.eq(weights, largest[..., None], out=scores)
            rarest = self.keys.rarest[block.texts, block.keys]
            all_and_rarest = torch.stack([torch.ones_like(rarest), rarest], -1)[:, None].to(self._dtype)
            n_largest, n_rarest = (is_largest @ all_and_rarest).unbind(-1)
            by_name["rarest"] = n_rarest / n_largest.clamp(min=1)
        return torch.stack([by_name[statistic] for statistic in self.columns.rows], -1)

    def _make_fact_tables(
        self, block: TileBounds
    ) -> tuple[Float[Tensor, "b q part k"], Float[Tensor, "b q part sink"]]:
        """Return the factor of each weight in each part, 1 (for the mass) or a fact: for other keys, then for sinks."""
        n_texts, n_queries, n_keys = block.shape
        parts = ["mass", *self.columns.facts] if self.is_self_attention else ["mass"]
        shape = n_texts, n_queries, len(parts), n_keys
        table = torch.zeros(shape, dtype=self._dtype, device=self.device)
        table[:, :, 0] = 1
        texts = self.keys.select_texts(block.texts)
        facts = pair_facts(self._pair_facts, texts, block.queries, block.keys, self._dtype)
        for name, values in facts.items():
            table[:, :, parts.index(name)] = values

        # Copy the columns of sinks, (b, q, part, sink): 0 where the text has fewer sinks, or the sink is outside
        # the block.
        positions = (self._sinks[block.texts] - block.keys.start)[:, None, None]
        is_in_block = self._is_sink[block.texts, None, None] & (positions >= 0) & (positions < n_keys)
        positions = positions.clamp(0, n_keys - 1).expand(-1, n_queries, len(parts), -1)
        sink_table = table.gather(-1, positions).to(self.sums_dtype) * is_in_block
        table *= self.outside_sinks[block.texts, None, None, block.keys].to(self._dtype)
        return table, sink_table

    def _gather_at_offsets(self, block: TileBounds, rows: Tensor) -> Float[Tensor, "b h q offset"]:
        """Return the value of each row, (b, h, q, k), at each offset from its query; 0 beyond the block's keys."""
        # The index among the block's keys of the key at each offset from each query, (q, offset).
        n_keys = rows.shape[3]
        queries = torch.arange(block.queries.start, block.queries.stop, device=self.device)
        offsets = torch.tensor(self.columns.offsets, device=self.device)
        positions = queries[:, None] + offsets - block.keys.start
        is_inside = (positions >= 0) & (positions < n_keys)
        positions = positions.clamp(0, n_keys - 1).expand(*rows.shape[:2], -1, -1)
        at_offsets: Tensor = rows.gather(-1, positions) * is_inside
        return at_offsets

    def compute_uniform_means(
        self, block: TileBounds, key_values: Float[Tensor, "text key c"]
    ) -> Float[Tensor, "view b m q c"]:
        """Return the mean of key values over the keys that each query of a block may attend to."""
        allowed, n_allowed = self._allowed_by_view(block)
        return allowed @ key_values[block.texts, None, block.keys] / n_allowed.clamp(min=1)[..., None]

    def _allowed_by_view(
        self, block: TileBounds
    ) -> tuple[Float[Tensor, "view b m q k"], Float[Tensor, "view b m q"]]:
        """Return 1 where a query may attend to a key of a view, else 0; and the number of these keys per query."""
        n_texts, n_queries, n_keys = block.shape
        allowed = block.allowed(self.device)
        if allowed is None:
            allowed = torch.ones(1, 1, 1, 1, device=self.device)
        allowed = allowed.to(self.sums_dtype).expand(n_texts, self._mask_heads, n_queries, n_keys)
        allowed_outside = allowed * self.outside_sinks[block.texts, None, None, block.keys]
        by_view = torch.stack([allowed, allowed_outside])
        return by_view, by_view.sum(-1)

    def _prepare(self, block: TileBounds) -> None:
        """Find the queries of a block that count, and add their sums under uniform attention."""
        # A query counts in a view if it may attend to a key of that view, (view, b, m, q).
        allowed, n_allowed = self._allowed_by_view(block)
        divisor = n_allowed.clamp(min=1)[..., None]
        is_counted = (n_allowed > 0) & self._is_query[block.texts, None, block.queries]
        is_query_counted = is_counted[..., None]

        # Values under uniform attention, (view, b, m, q, c). Rows of ones are added up and then divided by the number
        # of keys: sums of ones are exact in float32, and sums of 1 / n are not.
        pair_values = self.zeros(*n_allowed.shape, len(self.columns.pairs))
        if self.is_self_attention:
            parts = self.sum_parts(block, allowed[0].to(self._dtype))
            pair_values = parts @ self.pair_map / divisor
        uniform_values = torch.cat([self.compute_uniform_means(block, self.key_values), pair_values], -1)
        # A measure of a set of keys, such as punctuation, does not count a query that may attend to no key of the set.
        is_defined = is_query_counted & self._is_known & ((uniform_values > 0) | ~self._is_indicator)

        # A measure of pairs that subtracts uniform attention is 0 under uniform attention.
        n_keys = len(self.columns.keys)
        uniform_pair_values = uniform_values[..., n_keys:] * is_query_counted * self._is_beyond_uniform
        uniform_values[..., n_keys:] *= ~self._is_beyond_uniform

        # Statistics of rows cover all keys, so they have no view 1: there they are 0, and count no query.
        row_factors = self._row_factors(block, allowed[0], n_allowed[0], is_counted[0])
        factors = torch.stack([row_factors, torch.zeros_like(row_factors)])
        uniform_weights = (allowed[0] / divisor[0]).to(self._dtype)
        statistics = self.compute_statistics(block, uniform_weights, None) * factors
        uniform_values = torch.cat([uniform_values * is_defined, statistics], -1)
        is_defined = torch.cat([is_defined, factors > 0], -1)

        units = self.find_units(block)
        self.counts[0, units] += is_defined[0].sum(2)
        self.uniform_sums[0, units] += uniform_values[0].sum(2)
        rows = block.texts, slice(None), block.queries
        self.is_query_counted[:, *rows] = is_query_counted.to(self.sums_dtype)
        self.uniform_pair_values[:, *rows] = uniform_pair_values
        self.row_factors[rows] = row_factors
        self.counts_outside_sinks[rows] = is_defined[1].to(self.sums_dtype)
        self.uniform_outside_sinks[rows] = uniform_values[1]

    def _row_factors(
        self,
        block: TileBounds,
        allowed: Float[Tensor, "b m q k"],
        n_allowed: Float[Tensor, "b m q"],
        is_counted: Bool[Tensor, "b m q"],
    ) -> Float[Tensor, "b m q statistic"]:
        """Return the factor of each statistic of each query's row; 0 if the query does not count."""
        by_name = {
            "entropy": is_counted.to(self.sums_dtype),
            "relative_entropy": is_counted * (n_allowed >= 2) / n_allowed.clamp(min=2).log(),
            "rarest": torch.zeros_like(n_allowed),
        }
        if self.keys.rarest is not None:
            n_rarest = (allowed * self.keys.rarest[block.texts, None, None, block.keys]).sum(-1)
            by_name["rarest"] = is_counted * (n_rarest > 0) / n_rarest.clamp(min=1)
        return torch.stack([by_name[statistic] for statistic in self.columns.rows], -1)
