"""Every head measure, added up in one pass over the tiles of an attention, in memory that grows with length alone.

A measure adds up weights times what keys are worth, weights times what pairs of a query and a key are worth, or numbers
of rows of weights (`catalogue`). Uniform attention, and attention outside sinks, are such sums with other weights.
`HeadMeasures` measures every layer of a forward pass: `_MaskedTexts` works out what texts and one mask determine, and
`_Layer` adds up the tiles of one layer. This module knows no model, no tokenizer and no corpus.
Measures have their sources in the catalogue; adding them up over tiles is ours.

Sums have two views: 0 = of all keys, 1 = of keys outside sinks. A unit is a text, or one of the equal parts of a long
one (`catalogue.unit_queries`): the evidence that intervals rest on.

Shapes: b texts, m mask heads (1 if all heads share one), h heads, q queries, k keys, c columns.
"""

from collections.abc import Callable, Hashable, Mapping

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from attnscope.core.attention import tiles
from attnscope.core.attention.precision import sum_dtype
from attnscope.core.attention.seam import AttentionCall, Kind, refuse_second
from attnscope.core.attention.tiles import Block, Buffers, Tile, attend_in_tiles, blocks
from attnscope.core.catalogue import MEASURES, Columns, Keys, Measure, Measured, unit_queries
from attnscope.core.facts import TextFacts, key_facts, outlying, pair_facts

FEWEST_HEADS = 6
"""A tile holds no more pairs of a query and a key than it would with so many heads: each pair has a row of facts."""

KEPT_PAIRS = 2**20
"""Pairs of a batch up to which their table is kept from layer to layer, as six numbers a pair."""

FEW_QUERIES = 64
"""Queries whose weights on a key are added up in float32: sums of more are float64, or they would lose digits."""


class HeadMeasures:
    """Measure every layer of one forward pass on one batch, without keeping a map: a `Probe` without gradient.

    Args:
        facts: The texts; in an encoder-decoder, those that the encoder reads.
        query_facts: In an encoder-decoder: the texts that the decoder reads.
        norms: (kind, layer) -> lengths of the hidden states that a layer reads, (batch, token), asked when the layer's
            attention is computed; None leaves outlier_token undefined.
        buffers: Memory for tiles, which may serve one batch after another; None = a batch's own.
        catalogue: The measures.

    Attributes:
        sums: Kind -> layer -> its measures, in the order in which the layers came.
    """

    def __init__(
        self,
        facts: TextFacts,
        query_facts: TextFacts | None = None,
        *,
        norms: Callable[[Kind, int], Tensor | None] | None = None,
        buffers: Buffers | None = None,
        catalogue: Mapping[str, Measure] = MEASURES,
    ) -> None:
        self.sums: dict[Kind, dict[int, Measured]] = {}
        self._facts = facts
        self._query_facts = query_facts
        self._norms = norms
        self._buffers = Buffers() if buffers is None else buffers
        self._columns = Columns(catalogue)
        self._plans: dict[Hashable, tuple[_MaskedTexts, Tensor | None]] = {}

    def __call__(self, call: AttentionCall) -> Tensor:
        """Compute an attention, and measure its heads; shape and dtype of its output: see `Probe`.

        Raises:
            RuntimeError: The layer of this kind has been here already.
            ValueError: The call's shapes are not those of the texts.
        """
        refuse_second(self.sums, call.kind, call.layer)
        with torch.no_grad():
            texts = self._plan(call)
            layer = _Layer(texts, call.n_heads, self._outlying(call, texts.keys))
            output = attend_in_tiles(
                call, lambda tile: layer.add(tile.block, tile.weights, tile), texts.blocks, self._buffers
            )
            self.sums.setdefault(call.kind, {})[call.layer] = layer.result()
        return output

    def _plan(self, call: AttentionCall) -> "_MaskedTexts":
        """Return the plan of texts and mask, worked out once for all layers of the same mask and shapes."""
        decoder_facts = self._facts if self._query_facts is None else self._query_facts
        keys = decoder_facts if call.kind == "decoder" else self._facts
        asking = decoder_facts if call.kind == "cross" else keys
        batch, n_heads, n_queries, _ = call.query.shape
        n_keys = call.key.shape[2]
        _require_fit(f"{call.kind} layer {call.layer} has", (batch, n_queries, n_keys), asking, keys)

        # Most models hand every layer the same mask; some make a new view of the same memory each time.
        mask = call.mask
        device = call.query.device
        mask_identity: Hashable = None
        if mask is not None:
            version = 0 if mask.is_inference() else mask._version
            mask_identity = mask.data_ptr(), mask.shape, mask.stride(), version
        plan_key = mask_identity, device, call.kind, call.is_causal, call.window, n_heads
        if plan_key not in self._plans:
            elements = tiles.tile_elements(device)
            elements = min(elements, elements // FEWEST_HEADS * n_heads)
            texts = _MaskedTexts(
                self._columns,
                blocks(call, elements, unit=unit_queries(n_queries)),
                keys.on(device),
                asking.on(device).asking,
                mask_heads=1 if mask is None else mask.shape[1],
                own_text=call.kind != "cross",
                dtype=torch.promote_types(call.query.dtype, torch.float32),
            )
            # The mask is held, so that its address stays its own.
            self._plans[plan_key] = texts, mask
        return self._plans[plan_key][0]

    def _outlying(self, call: AttentionCall, keys: TextFacts) -> Tensor | None:
        """Return the keys that are outlying in this layer, (b, k); None = its hidden states are not those of keys."""
        if self._norms is None or call.kind == "cross":
            return None
        norms = self._norms(call.kind, call.layer)
        if norms is None or norms.shape != keys.real.shape:
            return None
        return outlying(norms.to(call.query.device), keys)


def measures_of_weights(
    weights: Float[Tensor, "batch head query key"],
    keys: TextFacts,
    queries: TextFacts | None = None,
    *,
    allowed: Tensor | None = None,
    outlying: Bool[Tensor, "batch key"] | None = None,
    catalogue: Mapping[str, Measure] = MEASURES,
) -> Measured:
    """Return all measures of one layer from its dense weights, in float64 where there is one, one unit at a time.

    Args:
        weights: In any precision.
        keys: The texts that the keys are of.
        queries: In cross attention the texts that the queries are of; None = the same. Pairs are undefined there.
        allowed: Which query may attend to which key, boolean, broadcastable to (batch, head, query, key). None = where
            any head puts weight: right, except for weights so small that they are 0 in every head.
        outlying: Which keys are outlying (`facts.outlying`); None leaves outlier_token undefined.
        catalogue: The measures.

    Raises:
        ValueError: Shapes do not fit together.
    """
    asking = keys if queries is None else queries
    batch, n_heads, n_queries, n_keys = weights.shape
    _require_fit("the weights have", (batch, n_queries, n_keys), asking, keys)
    may = (weights > 0).any(1, keepdim=True) if allowed is None else allowed
    may = may[(None,) * (4 - may.ndim)].expand(batch, -1, n_queries, n_keys)

    # One block per unit of each text.
    unit = unit_queries(n_queries)
    unit_blocks = []
    for text in range(batch):
        for start in range(0, n_queries, unit):
            rows = slice(start, min(start + unit, n_queries))
            unit_blocks.append(
                Block(slice(text, text + 1), rows, slice(0, n_keys), may=may[text : text + 1, :, rows])
            )

    dtype = sum_dtype(weights.device)
    own_text = queries is None
    texts = _MaskedTexts(
        Columns(catalogue),
        unit_blocks,
        keys,
        asking.asking,
        mask_heads=may.shape[1],
        own_text=own_text,
        dtype=dtype,
    )
    layer = _Layer(texts, n_heads, outlying)
    for block in unit_blocks:
        layer.add(block, weights[block.texts, :, block.queries].to(dtype, copy=True))
    return layer.result()


def _require_fit(subject: str, shape: tuple[int, int, int], asking: TextFacts, keys: TextFacts) -> None:
    batch, n_queries, n_keys = shape
    if asking.real.shape != (batch, n_queries) or keys.real.shape != (batch, n_keys):
        raise ValueError(
            f"{subject} {batch} texts of {n_queries} queries and {n_keys} keys; the facts are of "
            f"{tuple(asking.real.shape)} queries and {tuple(keys.real.shape)} keys"
        )


# What texts and one mask determine -------------------------------------------------------------------------------


class _MaskedTexts:
    """The numbers that texts and one mask determine, whatever the weights: all layers under the mask share them.

    `blocks` cross no end of a unit, `asking` are the queries that count, (b, q), and `dtype` is that of weights.
    `own_text` says whether queries are tokens of the same texts as keys.

    Attributes:
        worth: The value of keys, (b, k, measure of keys), 0 where it is not known.
        outside_sinks: 1 for keys outside sinks, (b, k).
        pair_map: Which `parts` of a row each measure of pairs adds up, (part, pair).
        count: The counts of measures, (view, unit, m, c); outside sinks they depend on the head, and are 0 here.
        uniform: Their sums under uniform attention, likewise.
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
        self._unit = unit_queries(n_queries)
        self.n_units = max(-(-n_queries // self._unit), 1)
        self._tables: dict[Block, tuple[Tensor, Tensor]] = {}
        self._keeps_tables = asking.numel() * keys.real.shape[1] <= KEPT_PAIRS
        self.pair_map = torch.tensor(columns.pair_map, dtype=self.exact, device=self.device)

        # What keys are worth, and which measures of keys and pairs are known.
        facts = key_facts(keys, self.exact)
        nothing = torch.zeros_like(keys.real, dtype=self.exact)
        self.worth = torch.stack([facts.get(family.fact, nothing) for family in columns.keys], -1)
        known_keys = [family.fact in facts for family in columns.keys]
        known_pairs = [
            own_text and (family.fact != "cosine" or keys.embeddings is not None)
            for family in columns.pairs
        ]
        self._is_known = torch.tensor(known_keys + known_pairs, device=self.device)
        self._is_set = torch.tensor(columns.is_set, device=self.device)
        self._is_beyond = torch.tensor(columns.is_beyond, device=self.device)

        # Sinks by their places: a text with fewer of them than others has other keys there.
        resting = keys.resting
        self.outside_sinks = (keys.real & ~resting).to(self.exact)
        n_sinks = int(resting.sum(1).max()) if batch else 0
        self._sinks = resting.int().topk(n_sinks, 1).indices
        self._is_sink = resting.gather(1, self._sinks)

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
        unit = block.queries.start // self._unit
        first = block.texts.start * self.n_units + unit
        last = (block.texts.stop - 1) * self.n_units + unit
        return slice(first, last + 1, self.n_units)

    def parts(self, block: Block, weights: Float[Tensor, "b h q k"]) -> Float[Tensor, "view b h q part"]:
        """Return the parts of each row that measures of pairs add up.

        The parts are the mass, the sums of weights times each of the facts, and the weight at each of the offsets; in
        cross attention the mass alone.
        """
        tables = self._tables.get(block) or self._make_tables(block)
        if self._keeps_tables:
            self._tables[block] = tables
        n_table_parts = tables[0].shape[2]
        offsets = self.columns.offsets if self.own_text else []
        parts = self.zeros(2, *weights.shape[:3], n_table_parts + len(offsets))

        # Keys outside sinks, in the precision of weights: text by text, because all together would be copied.
        for text, (rows, table) in enumerate(zip(weights, tables[0], strict=True)):
            parts[:, text, ..., :n_table_parts] = torch.bmm(rows.transpose(0, 1), table.mT).transpose(
                0, 1
            )

        # Sinks are few and heavy: in a float32 sum they would cost the other keys their digits.
        sinks = (self._sinks[block.texts] - block.keys.start).clamp(0, block.shape[2] - 1)
        of_sinks = weights.gather(-1, sinks[:, None, None].expand(*weights.shape[:3], -1)).to(self.exact)
        parts[0, ..., :n_table_parts] += (of_sinks.transpose(1, 2) @ tables[1].mT).transpose(1, 2)

        if offsets:
            off = self.outside_sinks[block.texts, None, None, block.keys].expand(
                -1, -1, *block.shape[1:]
            )
            band = self._at_offsets(block, weights)
            parts[0, ..., n_table_parts:] = band
            parts[1, ..., n_table_parts:] = band * self._at_offsets(block, off)
        return parts

    def statistics(
        self, block: Block, weights: Tensor, tile: Tile | None
    ) -> Float[Tensor, "b h q statistic"]:
        """Return the statistics of each row. Overwrites the scores of the tile, if there is one."""
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
        order = ["mass", *self.columns.facts] if self.own_text else ["mass"]
        table = torch.zeros(
            n_texts, n_queries, len(order), n_keys, dtype=self._dtype, device=self.device
        )
        table[:, :, 0] = 1
        if self.own_text:
            names = [
                name
                for name in self.columns.facts
                if name != "cosine" or self.keys.embeddings is not None
            ]
            texts = self.keys.part(block.texts)
            facts = pair_facts(names, texts, block.queries, block.keys, self._dtype)
            for name, values in facts.items():
                table[:, :, order.index(name)] = values

        # (b, 1, 1, sink): the places of sinks, and whether they are sinks and in the block.
        sinks = (self._sinks[block.texts] - block.keys.start)[:, None, None]
        is_here = self._is_sink[block.texts, None, None] & (sinks >= 0) & (sinks < n_keys)
        within = sinks.clamp(0, n_keys - 1).expand(-1, n_queries, len(order), -1)
        of_sinks = table.gather(-1, within).to(self.exact) * is_here
        table *= self.outside_sinks[block.texts, None, None, block.keys].to(self._dtype)
        return table, of_sinks

    def _at_offsets(self, block: Block, rows: Tensor) -> Float[Tensor, "b h q offset"]:
        """Return the number of each row at each of the offsets from its query; 0 beyond the block's keys."""
        index = torch.arange(block.queries.start, block.queries.stop, device=self.device)[:, None]
        index = index + torch.tensor(self.columns.offsets, device=self.device) - block.keys.start
        is_inside = (index >= 0) & (index < rows.shape[3])
        band = rows.gather(-1, index.clamp(0, rows.shape[3] - 1).expand(*rows.shape[:2], -1, -1))
        inside: Tensor = band * is_inside
        return inside

    def spread(self, block: Block, worth: Float[Tensor, "text key c"]) -> Float[Tensor, "view b m q c"]:
        """Return the mean value of the keys that each query of a block may attend to, as under uniform attention."""
        seen, n = self._seen(block)
        return seen @ worth[block.texts, None, block.keys] / n.clamp(min=1)[..., None]

    def _seen(self, block: Block) -> tuple[Float[Tensor, "view b m q k"], Float[Tensor, "view b m q"]]:
        """Return 1 where a query may attend to a key, in each view, and to how many it may."""
        n_texts, n_queries, n_keys = block.shape
        allowed = block.allowed()
        may = self.zeros(1, 1, 1, 1) + 1 if allowed is None else allowed.to(self.exact)
        may = may.expand(n_texts, self._mask_heads, n_queries, n_keys)
        seen = torch.stack([may, may * self.outside_sinks[block.texts, None, None, block.keys]])
        return seen, seen.sum(-1)

    def _prepare(self, block: Block) -> None:
        """Work out which of a block's queries count, and their sums under uniform attention."""
        seen, n = self._seen(block)
        counted = (n[0] > 0) & self._asking[block.texts, None, block.queries]
        counts_query = torch.stack([counted, counted & (n[1] > 0)])

        # Values under uniform attention, (view, b, m, q, c). Sums of ones are exact in float32, of 1 / n they are not.
        of_pairs = self.zeros(*n.shape, len(self.columns.pairs))
        if self.own_text:
            of_pairs = (
                self.parts(block, seen[0].to(self._dtype)) @ self.pair_map / n.clamp(min=1)[..., None]
            )
        value = torch.cat([self.spread(block, self.worth), of_pairs], -1)
        defined = counts_query[..., None] & self._is_known & ((value > 0) | ~self._is_set)

        # Measures of what pairs have beyond uniform attention are 0 under uniform attention.
        n_keys = len(self.columns.keys)
        beyond = value[..., n_keys:] * counts_query[..., None] * self._is_beyond
        value[..., n_keys:] *= ~self._is_beyond

        # Numbers of rows, of all keys alone.
        rows = self._rows(block, seen[0], n[0], counted)
        evenly = (seen[0] / n[0].clamp(min=1)[..., None]).to(self._dtype)
        statistics = torch.stack([self.statistics(block, evenly, None) * rows, torch.zeros_like(rows)])
        value = torch.cat([value * defined, statistics], -1)
        defined = torch.cat(
            [defined, torch.stack([rows > 0, torch.zeros_like(rows, dtype=torch.bool)])], -1
        )

        units = self.units(block)
        self.count[0, units] += defined[0].sum(2)
        self.uniform[0, units] += value[0].sum(2)
        index = slice(None), block.texts, slice(None), block.queries
        self.counts_query[index] = counts_query[..., None].to(self.exact)
        self.beyond[index] = beyond
        self.row_factors[index] = rows[None]
        self.active[index] = torch.cat([defined[1:], value[1:]], -1)

    def _rows(
        self, block: Block, may: Tensor, n_allowed: Tensor, counted: Tensor
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


# One layer -------------------------------------------------------------------------------------------------------


class _Layer:
    """Add up the measures of one attention, block by block.

    `outlying` are the keys that are outlying in this layer, (b, k); None = not known.
    """

    def __init__(self, texts: _MaskedTexts, n_heads: int, outlying: Tensor | None) -> None:
        self._texts = texts
        families = texts.columns.families
        self._sum, self._count, self._uniform = texts.zeros(
            3, 2, len(texts.keys.real) * texts.n_units, n_heads, len(families)
        )
        self._worth = texts.worth
        self._outlying: list[int] = []
        if outlying is not None:
            self._outlying = [
                number for number, family in enumerate(families) if family == Keys("outlying")
            ]
            self._worth = texts.worth.clone()
            self._worth[..., self._outlying] = outlying[..., None].to(texts.exact)

    def add(self, block: Block, weights: Float[Tensor, "b h q k"], tile: Tile | None = None) -> None:
        """Add the weights of a block, and overwrite the scores of its tile, if there is one."""
        if not weights.numel():
            return
        texts = self._texts
        sums, counts, uniform = (
            part[:, texts.units(block)] for part in (self._sum, self._count, self._uniform)
        )
        index = slice(None), block.texts, slice(None), block.queries
        counts_query = texts.counts_query[index]
        n_keys = len(texts.columns.keys)
        n_pairs = len(texts.columns.pairs)

        # Keys: what each one receives, (b, h, k), times what it is worth. Queries of a group are added up in the
        # precision of weights, (b, m, group, q) @ (b, h, q, k), and the groups in float64.
        groups = torch.arange(weights.shape[2], device=weights.device) // FEW_QUERIES
        belongs = torch.nn.functional.one_hot(groups).T * counts_query[0].mT
        received = (belongs.to(weights.dtype) @ weights).sum(2, dtype=texts.exact)
        by_view = torch.stack([received, received * texts.outside_sinks[block.texts, None, block.keys]])
        sums[..., :n_keys] += by_view @ self._worth[block.texts, block.keys]

        # Pairs, less what uniform attention of the same mass has of them. Where a query sees no key outside sinks, its
        # parts of that view are 0: so one mask of queries serves both.
        parts = texts.parts(block, weights)
        masses = parts[..., 0]
        if texts.own_text:
            values = _over_queries(counts_query[:1, ..., 0], parts) @ texts.pair_map
            values -= _over_queries(masses, texts.beyond[index])
            sums[..., n_keys : n_keys + n_pairs] += values

        # What counts outside sinks, and uniform attention there, weighed by each query's mass.
        active, even = _over_queries(masses[1], texts.active[index][0]).chunk(2, -1)
        counts[1] += active
        uniform[1] += even
        if self._outlying:
            even = texts.spread(block, self._worth[..., self._outlying])
            is_seen = counts_query * (even > 0)
            weight = torch.stack([torch.ones_like(masses[1]), masses[1]])
            counts[..., self._outlying] += _over_queries(weight, is_seen)
            uniform[..., self._outlying] += _over_queries(weight, is_seen * even)

        # Numbers of rows. They overwrite the scores.
        statistics = texts.statistics(block, weights, tile) * texts.row_factors[index][0]
        sums[0, ..., n_keys + n_pairs :] += statistics.sum(2)

    def result(self) -> Measured:
        """Return the measures of the layer."""
        texts, columns = self._texts, self._texts.columns
        arrays = []
        for part in (self._sum, self._count + texts.count, self._uniform + texts.uniform):
            # Two lists of indices: (view, unit, head, column) becomes (name, unit, head).
            chosen = part[columns.views, :, :, columns.numbers]
            arrays.append(chosen.cpu().double().numpy())
        total, count, uniform = arrays
        return Measured(total, count, uniform, columns.names)


def _over_queries(
    shares: Float[Tensor, "... #h q"], rows: Float[Tensor, "... #h q c"]
) -> Float[Tensor, "... h c"]:
    """Return the sums over queries of shares times rows."""
    sums: Tensor = (shares[..., None, :] @ rows).squeeze(-2)
    return sums
