"""Work out what texts and one mask determine of head measures, whatever the weights; `measures` adds up the rest.

That is the values of keys and pairs, which queries count, and all sums under uniform attention. A measure adds up
weights times values of keys, or of pairs of a query and a key, or it is a statistic of rows of weights (`catalogue`).

Sums have two views: 0 = of all keys, 1 = of keys outside sinks. A unit is a text, or one of the equal parts of a long
one (`catalogue.unit_queries`). A column is a measure's place in sums (`catalogue.Columns`).

Shapes: b texts, m mask heads (1 if all heads share one), h heads, q queries, k keys, c columns.

Source: ours.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from attnscope.core.attention.precision import sum_dtype
from attnscope.core.attention.tiles import Block, Tile
from attnscope.core.catalogue import Columns, unit_queries
from attnscope.core.facts import TextFacts, key_facts, pair_facts

KEPT_PAIRS = 2**20
"""Pairs of a batch up to which their table is kept from layer to layer, as six numbers a pair."""


class MaskedTexts:
    """The numbers that texts and one mask determine, whatever the weights: all layers under the mask share them.

    Args:
        columns: The measures.
        blocks: The tiles that weights will come in, none of which crosses the end of a unit.
        keys: The texts whose tokens are the keys.
        asking: Which queries count.
        mask_heads: m, how many heads the mask tells apart.
        own_text: Whether queries are tokens of the same texts as keys.
        dtype: The precision of weights.

    Attributes:
        device: Where all tensors are.
        exact: The precision of sums.
        n_units: How many units each text has.
        worth: The value of keys, (b, k, measure of keys), 0 where it is not known.
        outside_sinks: 1 for keys outside sinks, (b, k).
        pair_map: Which `parts` of a row each measure of pairs adds up, (part, pair).
        count: The counts of measures, (view, unit, m, c); outside sinks they depend on the head, and are 0 here.
        uniform: The sums under uniform attention, (view, unit, m, c); 0 outside sinks.
        counts_query: 1 if a query counts, (view, b, m, q, 1).
        beyond: The values of pairs under uniform attention that are subtracted, (view, b, m, q, pair).
        row_factors: The factors of statistics, (1, b, m, q, statistic).
        active: Whether measures outside sinks count a query, then their values under uniform attention,
            (1, b, m, q, 2 c).
    """

    def __init__(
        self,
        columns: Columns,
        blocks: list[Block],
        keys: TextFacts,
        asking: Bool[Tensor, "batch query"],
        *,
        mask_heads: int,
        own_text: bool,
        dtype: torch.dtype,
    ) -> None:
        batch, n_queries = asking.shape
        self.device = keys.real.device
        self.exact = sum_dtype(self.device)
        self.columns = columns
        self.blocks = blocks
        self.keys = keys
        self.own_text = own_text
        self._dtype = dtype
        self._mask_heads = mask_heads
        self._asking = asking
        # How many queries a unit has, and how many units a text: divided, and rounded up.
        self._unit = unit_queries(n_queries)
        self.n_units = max(-(-n_queries // self._unit), 1)
        # `_make_tables` of each block, if they are kept.
        self._tables: dict[Block, tuple[Tensor, Tensor]] = {}
        self._keeps_tables = asking.numel() * keys.real.shape[1] <= KEPT_PAIRS
        self.pair_map = torch.tensor(columns.pair_map, dtype=self.exact, device=self.device)

        # The values of keys, and which measures of keys and pairs are known.
        facts = key_facts(keys, self.exact)
        zeros = torch.zeros_like(keys.real, dtype=self.exact)
        self.worth = torch.stack([facts.get(family.fact, zeros) for family in columns.keys], -1)
        self._pair_facts = list(columns.facts) if own_text else []
        if keys.embeddings is None and "cosine" in self._pair_facts:
            self._pair_facts.remove("cosine")
        is_known = [family.fact in facts for family in columns.keys]
        for family in columns.pairs:
            is_known.append(own_text and (bool(family.offsets) or family.fact in self._pair_facts))
        self._is_known = torch.tensor(is_known, device=self.device)
        self._is_set = torch.tensor(columns.is_set, device=self.device)
        self._is_beyond = torch.tensor(columns.is_beyond, device=self.device)

        # The places of sinks, (b, sink). A text with fewer sinks than others has other keys at its last places.
        is_sink = keys.resting
        self.outside_sinks = (keys.real & ~is_sink).to(self.exact)
        n_sinks = int(is_sink.sum(1).max()) if batch else 0
        self._sinks = is_sink.int().topk(n_sinks, 1).indices
        self._is_sink = is_sink.gather(1, self._sinks)

        # Counts, and sums under uniform attention.
        n_columns = len(columns.families)
        self.count, self.uniform = self.zeros(2, 2, batch * self.n_units, mask_heads, n_columns)
        # One array for all blocks: small ones in between would leave gaps in memory that tiles do not fit into.
        shape = batch, mask_heads, n_queries
        self.counts_query = self.zeros(2, *shape, 1)
        self.beyond = self.zeros(2, *shape, len(columns.pairs))
        self.row_factors = self.zeros(1, *shape, len(columns.rows))
        self.active = self.zeros(1, *shape, 2 * n_columns)
        for block in blocks:
            if min(block.shape):
                self._prepare(block)

    def zeros(self, *shape: int) -> Tensor:
        """Return zeros of a shape, in the dtype of sums."""
        return torch.zeros(shape, dtype=self.exact, device=self.device)

    def units(self, block: Block) -> slice:
        """Return the units that a block is part of, one per text."""
        # The same unit of the next text is n_units further.
        unit_of_text = block.queries.start // self._unit
        first = block.texts.start * self.n_units + unit_of_text
        return slice(first, block.texts.stop * self.n_units, self.n_units)

    def parts(self, block: Block, weights: Float[Tensor, "b h q k"]) -> Float[Tensor, "view b h q part"]:
        """Return the parts of each row that measures of pairs add up.

        The parts are the mass, the sums of weights times each of the facts, and the weight at each of the offsets; in
        cross attention the mass alone.
        """
        tables = self._tables.get(block) or self._make_tables(block)
        if self._keeps_tables:
            self._tables[block] = tables
        table, sink_table = tables
        n_texts, n_queries, n_table_parts, n_keys = table.shape
        offsets = self.columns.offsets if self.own_text else []
        parts = self.zeros(2, *weights.shape[:3], n_table_parts + len(offsets))

        # Keys outside sinks, in the precision of weights: text by text, because all together would be copied.
        for text in range(n_texts):
            # (q, h, k) @ (q, k, part)
            sums = torch.bmm(weights[text].transpose(0, 1), table[text].mT)
            parts[:, text, ..., :n_table_parts] = sums.transpose(0, 1)

        # Sinks are few and heavy: in a float32 sum they would cost the other keys their digits.
        places = (self._sinks[block.texts] - block.keys.start).clamp(0, n_keys - 1)
        places = places[:, None, None].expand(*weights.shape[:3], -1)
        sink_weights = weights.gather(-1, places).to(self.exact)
        # (b, q, h, sink) @ (b, q, sink, part)
        sums = sink_weights.transpose(1, 2) @ sink_table.mT
        parts[0, ..., :n_table_parts] += sums.transpose(1, 2)

        if offsets:
            band = self._at_offsets(block, weights)
            is_outside = self.outside_sinks[block.texts, None, None, block.keys]
            is_outside = is_outside.expand(-1, -1, n_queries, -1)
            parts[0, ..., n_table_parts:] = band
            parts[1, ..., n_table_parts:] = band * self._at_offsets(block, is_outside)
        return parts

    def statistics(
        self,
        block: Block,
        weights: Tensor,
        tile: Tile | None,
    ) -> Float[Tensor, "b h q statistic"]:
        """Return the statistics of rows of weights, (b, h, q, k). Overwrites the scores of a tile."""
        largest = weights.amax(-1)
        entropies = torch.special.entr(weights).sum(-1) if tile is None else tile.entropies(largest)
        by_name = {
            "entropy": entropies,
            "relative_entropy": entropies,
            "rarest": torch.zeros_like(entropies),
        }
        if self.keys.rarest is not None and "rarest" in self.columns.rows:
            # How many keys share the largest weight, and how many of these are the rarest.
            scores = torch.empty_like(weights) if tile is None else tile.scores
            is_largest = torch.eq(weights, largest[..., None], out=scores)
            rarest = self.keys.rarest[block.texts, block.keys]
            sets = torch.stack([torch.ones_like(rarest), rarest], -1)[:, None].to(self._dtype)
            n_ties, n_rarest = (is_largest @ sets).unbind(-1)
            by_name["rarest"] = n_rarest / n_ties.clamp(min=1)
        return torch.stack([by_name[statistic] for statistic in self.columns.rows], -1)

    def _make_tables(
        self, block: Block
    ) -> tuple[Float[Tensor, "b q part k"], Float[Tensor, "b q part sink"]]:
        """Return the values of a block's pairs: for keys outside sinks, and for sinks in float64."""
        n_texts, n_queries, n_keys = block.shape
        parts = ["mass", *self.columns.facts] if self.own_text else ["mass"]
        shape = n_texts, n_queries, len(parts), n_keys
        table = torch.zeros(shape, dtype=self._dtype, device=self.device)
        table[:, :, 0] = 1
        texts = self.keys.part(block.texts)
        facts = pair_facts(self._pair_facts, texts, block.queries, block.keys, self._dtype)
        for name, values in facts.items():
            table[:, :, parts.index(name)] = values

        # (b, 1, 1, sink): the places of sinks, and whether they are sinks and in the block.
        places = (self._sinks[block.texts] - block.keys.start)[:, None, None]
        is_here = self._is_sink[block.texts, None, None] & (places >= 0) & (places < n_keys)
        places = places.clamp(0, n_keys - 1).expand(-1, n_queries, len(parts), -1)
        sink_table = table.gather(-1, places).to(self.exact) * is_here
        table *= self.outside_sinks[block.texts, None, None, block.keys].to(self._dtype)
        return table, sink_table

    def _at_offsets(self, block: Block, rows: Tensor) -> Float[Tensor, "b h q offset"]:
        """Return the number of each row at each of the offsets from its query; 0 beyond the block's keys."""
        # The place of each offset among the block's keys, (q, offset).
        n_keys = rows.shape[3]
        queries = torch.arange(block.queries.start, block.queries.stop, device=self.device)
        offsets = torch.tensor(self.columns.offsets, device=self.device)
        places = queries[:, None] + offsets - block.keys.start
        is_inside = (places >= 0) & (places < n_keys)
        places = places.clamp(0, n_keys - 1).expand(*rows.shape[:2], -1, -1)
        band: Tensor = rows.gather(-1, places) * is_inside
        return band

    def spread(self, block: Block, worth: Float[Tensor, "text key c"]) -> Float[Tensor, "view b m q c"]:
        """Return the mean value of the keys that each query of a block may attend to, as under uniform attention."""
        seen, n_seen = self._seen(block)
        return seen @ worth[block.texts, None, block.keys] / n_seen.clamp(min=1)[..., None]

    def _seen(self, block: Block) -> tuple[Float[Tensor, "view b m q k"], Float[Tensor, "view b m q"]]:
        """Return 1 where a query may attend to a key, in each view, and to how many keys it may."""
        n_texts, n_queries, n_keys = block.shape
        allowed = block.allowed()
        if allowed is None:
            allowed = torch.ones(1, 1, 1, 1, device=self.device)
        may = allowed.to(self.exact).expand(n_texts, self._mask_heads, n_queries, n_keys)
        may_outside = may * self.outside_sinks[block.texts, None, None, block.keys]
        seen = torch.stack([may, may_outside])
        return seen, seen.sum(-1)

    def _prepare(self, block: Block) -> None:
        """Work out which of a block's queries count, and their sums under uniform attention."""
        seen, n_seen = self._seen(block)
        divisor = n_seen.clamp(min=1)[..., None]
        counted = (n_seen[0] > 0) & self._asking[block.texts, None, block.queries]
        counts_query = torch.stack([counted, counted & (n_seen[1] > 0)])[..., None]

        # Values under uniform attention, (view, b, m, q, c). Sums of ones are exact in float32, of 1 / n they are not.
        pair_values = self.zeros(*n_seen.shape, len(self.columns.pairs))
        if self.own_text:
            parts = self.parts(block, seen[0].to(self._dtype))
            pair_values = parts @ self.pair_map / divisor
        value = torch.cat([self.spread(block, self.worth), pair_values], -1)
        # A set of keys none of which a query sees is undefined for it.
        defined = counts_query & self._is_known & ((value > 0) | ~self._is_set)

        # Measures of what pairs have beyond uniform attention are 0 under uniform attention.
        n_keys = len(self.columns.keys)
        beyond = value[..., n_keys:] * counts_query * self._is_beyond
        value[..., n_keys:] *= ~self._is_beyond

        # Statistics of rows are of all keys: in the view outside sinks they are 0.
        factors = self._row_factors(block, seen[0], n_seen[0], counted)
        even_weights = (seen[0] / divisor[0]).to(self._dtype)
        statistics = self.statistics(block, even_weights, None) * factors
        statistics = torch.stack([statistics, torch.zeros_like(factors)])
        value = torch.cat([value * defined, statistics], -1)
        has_statistics = torch.stack([factors, torch.zeros_like(factors)]) > 0
        defined = torch.cat([defined, has_statistics], -1)

        units = self.units(block)
        self.count[0, units] += defined[0].sum(2)
        self.uniform[0, units] += value[0].sum(2)
        index = slice(None), block.texts, slice(None), block.queries
        self.counts_query[index] = counts_query.to(self.exact)
        self.beyond[index] = beyond
        self.row_factors[index] = factors[None]
        self.active[index] = torch.cat([defined[1:], value[1:]], -1)

    def _row_factors(
        self,
        block: Block,
        may: Float[Tensor, "b m q k"],
        n_allowed: Float[Tensor, "b m q"],
        counted: Bool[Tensor, "b m q"],
    ) -> Float[Tensor, "b m q statistic"]:
        """Return the factor of each query's statistics, 0 if it does not count."""
        by_name = {
            "entropy": counted.to(self.exact),
            "relative_entropy": counted * (n_allowed >= 2) / n_allowed.clamp(min=2).log(),
            "rarest": torch.zeros_like(n_allowed),
        }
        if self.keys.rarest is not None:
            n_rarest = (may * self.keys.rarest[block.texts, None, None, block.keys]).sum(-1)
            by_name["rarest"] = counted * (n_rarest > 0) / n_rarest.clamp(min=1)
        return torch.stack([by_name[statistic] for statistic in self.columns.rows], -1)
