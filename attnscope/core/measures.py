"""Every head measure, added up in one pass over the tiles of an attention, in memory that grows with length alone.

A measure is one of three (`catalogue`): keys that are worth something, pairs of a query and a key that are, or a number
of rows of weights. Everything here is a sum over queries and keys of weights times a function. Attention that is spread
evenly over the allowed keys, and attention outside sinks, are such sums with other weights. This module knows no model,
no tokenizer and no corpus.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float
from numpy.typing import NDArray
from torch import Tensor

from attnscope.core.attention import tiles
from attnscope.core.attention.precision import sum_dtype
from attnscope.core.attention.seam import AttentionCall, Kind
from attnscope.core.attention.tile_probe import TileProbe
from attnscope.core.attention.tiles import Block, Buffers, Tile, attend_in_tiles, blocks
from attnscope.core.catalogue import (
    MEASURES,
    OFFSETS,
    REACH,
    SINK_THRESHOLD,
    Keys,
    Pairs,
    Row,
    measure_names,
    unit_queries,
)
from attnscope.core.facts import TextFacts, key_facts, outlying, pair_facts, value_norms

KEPT_PAIRS = 2**19
"""Pairs of a query and a key of a batch up to which their table is kept from layer to layer, as 13 numbers a pair."""

PAIRS_AT_ONCE = 2**18
"""Pairs of a query and a key in one tile, however few heads there are."""

FEW_QUERIES = 64
"""Queries whose weights on a key are added up in float32: sums of more are float64, or they would lose digits."""

NAMES = measure_names()
"""The measures that have sums of their own, `<name>_active` after each."""

Sums = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Measured:
    """The measures of one layer on one batch, as sums and counts.

    A unit is a text; or, if long texts were cut (`catalogue.unit_queries`), a block of a text's queries. All units of
    the first text come before those of the second, and each text has as many. Numbers of a whole text (received, sink)
    are in its first unit.

    Attributes:
        sum: (measure, unit, head), in the order of `names`.
        count: Likewise: a value is sum / count, pooled over texts by adding both first. Undefined where 0.
        uniform_sum: The same under uniform attention over the keys that the mask allows, with the same count. In
            `…_active` each query weighs as it does in the head, by the head's mass on keys outside the sinks: a head
            that spreads evenly over them has just this, however much it rests.
        offset_sum: (offset, unit, head): queries whose largest weight is at the offset (OFFSETS); of t keys that share
            the largest weight each counts 1/t.
        offset_count: Queries that may attend to a key at the offset.
        offset_uniform: The sum under uniform attention, where all allowed keys share the largest weight.
    """

    sum: Sums
    count: Sums
    uniform_sum: Sums
    offset_sum: Sums
    offset_count: Sums
    offset_uniform: Sums
    names: tuple[str, ...] = NAMES

    def value(self, name: str) -> Sums:
        """Return a measure's value pooled over the batch, sum / count, (head,); NaN where nothing was counted."""
        return self._divide(self.sum, name)

    def uniform(self, name: str) -> Sums:
        """Return the value under uniform attention, (head,); NaN where nothing was counted."""
        return self._divide(self.uniform_sum, name)

    def _divide(self, sums: Sums, name: str) -> Sums:
        number = self.names.index(name)
        total, count = sums[number].sum(0), self.count[number].sum(0)
        ratio: Sums = np.divide(total, count, out=np.full_like(total, np.nan), where=count != 0)
        return ratio


class HeadMeasures(TileProbe[Measured]):
    """Measure every layer of one forward pass on one batch, without keeping a map. No gradient flows through.

    Args:
        facts: The texts; in an encoder-decoder, those that the encoder reads.
        query_facts: In an encoder-decoder: the texts that the decoder reads.
        factors: (kind, layer) -> the `output_factor` of its output projection; missing layers leave norm_weighted
            undefined.
        norms: (kind, layer) -> lengths of the hidden states that a layer reads, (batch, token), called as it comes;
            None leaves outlier_token undefined.
        buffers: Memory for tiles, which may serve one batch after another; None = a batch's own.
        in_units: Whether blocks of `unit_queries` of longer texts are units of their own.

    Attributes:
        sums: Kind -> layer -> its measures, in the order in which the layers came.
    """

    def __init__(
        self,
        facts: TextFacts,
        query_facts: TextFacts | None = None,
        *,
        factors: Mapping[tuple[Kind, int], Tensor] | None = None,
        norms: Callable[[Kind, int], Tensor | None] | None = None,
        buffers: Buffers | None = None,
        in_units: bool = False,
    ) -> None:
        super().__init__(buffers)
        self._facts = facts
        self._query_facts = query_facts
        self._factors = dict(factors or {})
        self._norms = norms
        self._in_units = in_units

    def _read(self, call: AttentionCall) -> tuple[Tensor, Measured]:
        keys, queries = self._texts(call.kind)
        ground = self._ground(call, keys, queries)
        layer = _Layer(ground, self._layer_facts(call, ground.keys), call.n_heads)

        def add(tile: Tile) -> None:
            layer.add(tile.block, tile.weights, tile)

        output = attend_in_tiles(call, add, ground.blocks, self._buffers)
        return output, layer.result()

    def _texts(self, kind: Kind) -> tuple[TextFacts, TextFacts | None]:
        """Return the texts of keys, and of queries if they are others."""
        read = self._facts if self._query_facts is None else self._query_facts
        if kind == "cross":
            return self._facts, read
        return (read if kind == "decoder" else self._facts), None

    def _ground(self, call: AttentionCall, keys: TextFacts, queries: TextFacts | None) -> "Ground":
        """Return what the texts and the call's mask determine; refuse a call that is not of these texts."""
        asking = keys if queries is None else queries
        batch, n_heads, n_queries, _ = call.query.shape
        n_keys = call.key.shape[2]
        if asking.real.shape != (batch, n_queries) or keys.real.shape != (batch, n_keys):
            raise ValueError(
                f"{call.kind} layer {call.layer} has {batch} texts of {n_queries} queries and {n_keys} keys; the facts "
                f"are of {tuple(asking.real.shape)} queries and {tuple(keys.real.shape)} keys"
            )

        def make() -> Ground:
            unit = unit_queries(n_queries) if self._in_units else max(n_queries, 1)
            elements = min(tiles.TILE_ELEMENTS, PAIRS_AT_ONCE * n_heads)
            device = call.query.device
            return Ground(
                blocks(call, elements, unit=unit),
                self._on_device(keys, device),
                self._on_device(asking, device).asking,
                mask_heads=1 if call.mask is None else call.mask.shape[1],
                own_text=queries is None,
                dtype=torch.promote_types(call.query.dtype, torch.float32),
                unit=unit,
            )

        return self._plan_once(call, make, queries is None)

    def _layer_facts(self, call: AttentionCall, keys: TextFacts) -> dict[str, Tensor]:
        norms = None if self._norms is None or call.kind == "cross" else self._norms(call.kind, call.layer)
        which = None
        if norms is not None and norms.shape == keys.real.shape:
            which = outlying(norms.to(call.query.device), keys)
        return layer_facts(call.value, call.n_heads, self._factors.get((call.kind, call.layer)), which)


def measures_of_weights(
    weights: Float[Tensor, "batch head query key"],
    keys: TextFacts,
    queries: TextFacts | None = None,
    *,
    allowed: Tensor | None = None,
    values: Float[Tensor, "batch kv_head key d_value"] | None = None,
    factor: Float[Tensor, "head d d_value"] | None = None,
    outlying: Bool[Tensor, "batch key"] | None = None,
) -> Measured:
    """Return all measures of one layer from its dense weights, of models that give out nothing else.

    Computed in float64 (float32 on devices without it), some queries of one text at a time.

    Args:
        weights: In any precision.
        keys: The texts that the keys are of.
        queries: In cross attention the texts that the queries are of; None = the same. Measures that compare places are
            undefined in cross attention.
        allowed: Which query may attend to which key, boolean, broadcastable to (batch, head, query, key). None = where
            any head puts weight: right, except for weights so small that they are 0 in every head.
        values: For value_weighted; None leaves it undefined.
        factor: `output_factor` of the layer, for norm_weighted; None leaves it undefined.
        outlying: Which keys are outlying (`facts.outlying`), for outlier_token; None leaves it undefined.

    Raises:
        ValueError: Shapes do not fit together.
    """
    asking = keys if queries is None else queries
    batch, n_heads, n_queries, n_keys = weights.shape
    if keys.real.shape != (batch, n_keys) or asking.real.shape != (batch, n_queries):
        raise ValueError(
            f"weights {tuple(weights.shape)} are not of texts of {tuple(asking.real.shape)} queries and "
            f"{tuple(keys.real.shape)} keys"
        )
    may = (weights > 0).any(1, keepdim=True) if allowed is None else allowed
    may = may[(None,) * (4 - may.ndim)].expand(batch, -1, n_queries, n_keys)

    # One block per unit of each text.
    unit = unit_queries(n_queries)
    parts = [
        Block(slice(text, text + 1), some, slice(0, n_keys), may[text : text + 1, :, some], False, None)
        for text in range(batch)
        for some in (slice(start, min(start + unit, n_queries)) for start in range(0, n_queries, unit))
    ]
    dtype = sum_dtype(weights.device)
    ground = Ground(
        parts, keys, asking.asking, mask_heads=may.shape[1], own_text=queries is None, dtype=dtype, unit=unit
    )
    of_layer = {} if values is None else layer_facts(values, n_heads, factor, None)
    if outlying is not None:
        of_layer["outlying"] = outlying[:, None]
    layer = _Layer(ground, of_layer, n_heads)
    for block in parts:
        layer.add(block, weights[block.texts, :, block.queries].to(dtype, copy=True))
    return layer.result()


def layer_facts(
    values: Float[Tensor, "batch kv_head key d_value"],
    n_heads: int,
    factor: Float[Tensor, "head d d_value"] | None,
    which: Bool[Tensor, "batch key"] | None,
) -> dict[str, Tensor]:
    """Return what keys are worth in one layer, by fact, (batch, head or 1, key). Unknown facts are missing."""
    facts: dict[str, Tensor] = {}
    if values.shape[-1]:
        facts["value_norm"] = value_norms(values, n_heads)
        if factor is not None:
            facts["output_norm"] = value_norms(values, n_heads, factor)
    if which is not None:
        facts["outlying"] = which[:, None]
    return facts


# Columns ---------------------------------------------------------------------------------------------------------


def _named(family: type[Keys] | type[Pairs]) -> list[str]:
    return [name for name, measure in MEASURES.items() if isinstance(measure.family, family)]


def _columns(names: list[str], ending: str = "") -> tuple[list[int], list[int]]:
    """Return which of some measures have a sum `<name><ending>`, and its column in NAMES."""
    which = [number for number, name in enumerate(names) if name + ending in NAMES]
    return which, [NAMES.index(names[number] + ending) for number in which]


_KEYS = _named(Keys)
_PAIRS = _named(Pairs)
_ROWS = [name for name, measure in MEASURES.items() if isinstance(measure.family, Row) and measure.family.of == "query"]
_BEYOND = [name for name in _PAIRS if MEASURES[name].family.beyond_uniform]
_ACTIVE = [number for number, name in enumerate(NAMES) if name.endswith("_active")]
_ROW_COLUMNS = [NAMES.index(name) for name in _ROWS]

_LAYER_FACTS = ("value_norm", "output_norm", "outlying")
"""What keys are worth in one layer alone."""

_PAIR_FACTS = tuple(dict.fromkeys(MEASURES[name].family.fact for name in _PAIRS if not MEASURES[name].family.offsets))
_TABLE = ("off", *_PAIR_FACTS, *(f"{fact} off" for fact in _PAIR_FACTS), "squared distance")
"""What is added up of each row of weights: whether the key is outside sinks, and functions of query and key, of all
keys and of those outside sinks."""

_RECEIVED = next(name for name, measure in MEASURES.items() if measure.family == Row("received", of="text"))
_SINK = next(name for name, measure in MEASURES.items() if measure.family == Row("sink", of="text"))
_FIRST = next(name for name, measure in MEASURES.items() if measure.family == Keys("first"))
_EVERY = next(name for name, measure in MEASURES.items() if measure.family == Keys("resting", is_set=False))
"""A sink is recognised by the mass on the first token, and by a measure that counts every query."""


def _pair_map() -> Tensor:
    """Return which columns each measure of pairs adds up, (columns of _TABLE and two of OFFSETS, 2 measures), 0 or 1.

    Measures of all keys come first, then those of keys outside sinks.
    """
    n_pairs = len(_PAIRS)
    chosen = torch.zeros(len(_TABLE) + 2 * len(OFFSETS), 2 * n_pairs)
    for number, name in enumerate(_PAIRS):
        family = MEASURES[name].family
        for ending, column, start in ((" off", n_pairs + number, len(OFFSETS)), ("", number, 0)):
            if family.offsets:
                rows = [len(_TABLE) + start + REACH + offset for offset in family.offsets]
            else:
                rows = [_TABLE.index(family.fact + ending)]
            chosen[rows, column] = 1
    return chosen


# What texts and mask determine -----------------------------------------------------------------------------------


class Ground:
    """Hold what the texts and one mask determine, whatever the weights: which queries count, and uniform attention.

    Layers that share a mask share it. Shapes: b texts, m mask heads (1 if all heads share one), q queries, k keys.

    Args:
        parts: The blocks of queries; none crosses the end of a unit.
        keys: The texts of the keys.
        asking: Which queries count, (b, q).
        mask_heads: How many heads the mask has.
        own_text: Whether queries are tokens of the same texts.
        dtype: The precision of weights.
        unit: How many queries are a unit.
    """

    def __init__(
        self,
        parts: list[Block],
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
        self.blocks = parts
        self.keys = keys
        self.own_text = own_text
        self.mask_heads = mask_heads
        self.n_units = max(-(-n_queries // unit), 1)
        self._unit = unit
        self._asking = asking
        self._map = _pair_map().to(self.device)
        self._tables: dict[Block, Tensor] = {}
        self._parts: dict[tuple[int, int], TextFacts] = {}
        self._keeps_tables = batch * n_queries * n_keys <= KEPT_PAIRS
        self._queries: dict[str, Tensor] = {}

        # What keys are worth, (b, k, measure), and whether they are outside sinks, (b, k).
        facts = key_facts(keys, self.exact)
        self.key_names = [name for name in _KEYS if MEASURES[name].family.fact in facts]
        self.worth = torch.stack([facts[MEASURES[name].family.fact] for name in self.key_names], -1)
        self.off = (keys.real & ~keys.resting).to(self.exact)

        # Counts, and sums under uniform attention, (unit, m, measure); those of `_active` depend on the head.
        self.count, self.uniform = self._zeros(2, batch * self.n_units, mask_heads, len(NAMES))
        self.offset_count, self.offset_uniform = self._zeros(2, batch * self.n_units, mask_heads, len(OFFSETS))
        self.n_counted = self._zeros(batch, mask_heads)
        for block in parts:
            if min(block.shape):
                self._prepare(block)
        self.count[..., _ACTIVE] = 0
        self.uniform[..., _ACTIVE] = 0

    def _texts(self, block: Block) -> TextFacts:
        """Return the facts of a block's texts, cut out once for all its layers."""
        first, last = block.texts.start, block.texts.stop
        if (first, last) not in self._parts:
            self._parts[first, last] = self.keys.part(block.texts)
        return self._parts[first, last]

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=self.exact, device=self.device)

    def units(self, block: Block) -> slice:
        """Return the units that a block is part of, one per text."""
        texts, unit, step = block.texts, block.queries.start // self._unit, self.n_units
        return slice(texts.start * step + unit, (texts.stop - 1) * step + unit + 1, step)

    def of(self, block: Block, name: str) -> Tensor:
        """Return what is known of a block's queries, (b, m, q, ...), by name.

        `counted`: 1 if the query counts. `share`: 1 / how many keys it may attend to, `spread`: the same of keys
        outside sinks, 0 if it does not count. `worth`: what its statistics count, in the order of _ROWS. `band`: 1 if
        it may attend to the key at each of OFFSETS. `active`: whether `_active` measures count it, and after these
        their values under uniform attention. `beyond`: the values under uniform attention that are subtracted.
        """
        return self._queries[name][block.texts, :, block.queries]

    def _put(self, name: str, block: Block, rows: Tensor, dtype: torch.dtype | None = None) -> None:
        # One array for all blocks: small ones in between would leave gaps in memory that tiles do not fit into.
        if name not in self._queries:
            shape = (*self._asking.shape[:1], self.mask_heads, self._asking.shape[1], *rows.shape[3:])
            self._queries[name] = torch.zeros(shape, dtype=dtype or self.dtype, device=self.device)
        self._queries[name][block.texts, :, block.queries] = rows

    def may(self, block: Block) -> Float[Tensor, "#b #m #q k"]:
        """Return 1 where a query may attend to a key."""
        may = block.allowed(self.device)
        if may is None:
            may = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=self.device)
        return may.to(self.exact).expand(-1, -1, -1, block.shape[2])

    def table(self, block: Block) -> Float[Tensor, "b q column k"]:
        """Return the functions of _TABLE; in cross attention the first alone."""
        if block in self._tables:
            return self._tables[block]
        dtype = self.dtype
        n_texts, n_queries, n_keys = block.shape
        off = self.off[block.texts, None, block.keys].to(dtype)
        n_columns = len(_TABLE) if self.own_text else 1
        table = torch.zeros(n_texts, n_queries, n_columns, n_keys, dtype=dtype, device=self.device)
        table[:, :, 0] = off
        if self.own_text:
            facts = pair_facts(self._texts(block), block.queries, block.keys, dtype)
            for fact, function in facts.items():
                table[:, :, _TABLE.index(fact)] = function
            n_facts = len(_PAIR_FACTS)
            torch.mul(table[:, :, 1 : 1 + n_facts], off[:, :, None], out=table[:, :, 1 + n_facts : 1 + 2 * n_facts])
            table[:, :, -1] = facts["distance"].square()
        return table

    def _keep_table(self, block: Block) -> None:
        """Make a block's table for all layers to come, if the batch is small."""
        if self._keeps_tables:
            self._tables[block] = self.table(block)

    def at_offsets(self, block: Block, rows: Tensor) -> Float[Tensor, "b head q offset"]:
        """Return the number of each row at each of OFFSETS from its query; 0 beyond the block's keys."""
        index = torch.arange(block.queries.start, block.queries.stop, device=self.device)[:, None]
        index = index + torch.tensor(OFFSETS, device=self.device) - block.keys.start
        is_inside = (index >= 0) & (index < rows.shape[3])
        band = rows.gather(-1, index.clamp(0, rows.shape[3] - 1).expand(*rows.shape[:2], -1, -1))
        return band * is_inside

    def row_sums(self, block: Block, weights: Tensor) -> Float[Tensor, "b q head column"]:
        """Return the sums over keys of weights times the functions of _TABLE."""
        table = self.table(block)
        # Text by text: the texts of a block together would be copied, to lie query by query.
        return torch.stack([torch.bmm(of.transpose(0, 1), one.mT) for of, one in zip(weights, table, strict=True)])

    def pair_parts(self, block: Block, rows: Tensor, band: Tensor) -> list[Float[Tensor, "b q head column"]]:
        """Return what measures of pairs add up: the `row_sums`, and the weights `at_offsets`, all and outside sinks."""
        n_queries, n_keys = block.shape[1:]
        off = self.off[block.texts, None, None, block.keys].expand(-1, -1, n_queries, n_keys)
        band_off = band * self.at_offsets(block, off).to(band.dtype)
        return [rows, band.transpose(1, 2), band_off.transpose(1, 2)]

    def pair_values(self, parts: list[Tensor]) -> Float[Tensor, "... value"]:
        """Return the values of the measures of pairs, of all keys, then of those outside sinks, by `pair_parts`."""
        both = torch.cat(parts, -1)
        return both @ self._map.to(both.dtype) if self.own_text else both[..., :0]

    def statistics(
        self, weights: Tensor, rows: Tensor, band: Tensor, block: Block, tile: Tile | None
    ) -> tuple[Float[Tensor, "b head q statistic"], Float[Tensor, "b head q offset"]]:
        """Return the statistics of _ROWS of each row, and the share of its largest weight that lies at each offset."""
        texts = self._texts(block)

        # The largest weight, and the largest that is not on the text's final special token.
        ends = (texts.final_special[:, None] - block.keys.start) == torch.arange(block.shape[2], device=self.device)
        end_texts, end_keys = ends.nonzero(as_tuple=True)
        on_ends = weights[end_texts, :, :, end_keys]
        weights[end_texts, :, :, end_keys] = 0
        largest_but_end = weights.amax(-1)
        weights[end_texts, :, :, end_keys] = on_ends
        largest = largest_but_end.index_put((end_texts,), torch.maximum(largest_but_end[end_texts], on_ends))

        # Entropies overwrite the tile's scores, which hold the ties then.
        if tile is None:
            entropies = torch.special.entr(weights).sum(-1)
            is_largest = (weights == largest[..., None]).to(weights.dtype)
        else:
            entropies = tile.entropies(tile.log_sum_exp(largest))
            is_largest = torch.eq(weights, largest[..., None], out=tile.scores)
        all_and_rarest = [torch.ones_like(texts.real)] + ([] if texts.rarest is None else [texts.rarest])
        chosen = torch.stack(all_and_rarest, 1)[..., block.keys].to(weights.dtype)
        n_ties, *n_rarest = (is_largest @ chosen.mT[:, None]).unbind(-1)
        n_ties = n_ties.clamp(min=1)

        nothing = torch.zeros_like(entropies)
        of = {
            "entropy": entropies,
            "relative_entropy": entropies,
            "max_weight": largest_but_end,
            "rarest": n_rarest[0] / n_ties if n_rarest else nothing,
            "rms_distance": rows[..., -1].transpose(1, 2).sqrt() if self.own_text else nothing,
        }
        hits = (band == largest[..., None]) / n_ties[..., None]
        return torch.stack([of[MEASURES[name].family.statistic] for name in _ROWS], -1), hits

    def _prepare(self, block: Block) -> None:
        """Work out a block: what counts, and the measures of uniform attention."""
        n_texts, n_queries, n_keys = block.shape
        shape = n_texts, self.mask_heads, n_queries
        may = self.may(block)
        n_allowed = may.sum(-1).expand(shape)
        off = self.off[block.texts, block.keys]
        n_off = (may @ off[:, None, :, None]).squeeze(-1).expand(shape)
        counted = ((n_allowed > 0) & self._asking[block.texts, None, block.queries]).to(self.exact)
        active = counted * (n_off > 0)
        worth = self._statistics_worth(block, may, n_allowed, counted)

        # Uniform attention is a head like any other, of equal weights; what its rows come to is kept query by query.
        # Sums of ones are exact in float32, those of 1 / n would not be.
        ones = may.to(self.dtype).expand(*shape, n_keys).contiguous()
        share = 1 / n_allowed.clamp(min=1)
        self._keep_table(block)
        rows = self.row_sums(block, ones).to(self.exact) * share.transpose(1, 2)[..., None]
        band = self.at_offsets(block, ones)
        parts = self.pair_parts(block, rows, band.to(self.exact) * share[..., None])
        values = self.pair_values(parts).transpose(1, 2)
        whole, off_rest = values.chunk(2, -1)
        off_rest = off_rest / rows[..., 0].transpose(1, 2)[..., None].clamp(min=torch.finfo(self.exact).tiny)
        band = band * counted[..., None] * self.own_text
        even = ones.mul_(share[..., None])
        numbers, hits = self.statistics(even, rows, self.at_offsets(block, even), block, None)

        # Which queries each measure counts, and its value there, (b, m, q, measure).
        defined = self._zeros(*shape, len(NAMES))
        value = self._zeros(*shape, len(NAMES))
        sees_all = may @ self.worth[block.texts, None, block.keys]
        sees_off = may @ (self.worth[block.texts, block.keys] * off[..., None])[:, None]
        of_all = [name for name in _KEYS if MEASURES[name].family.fact in ("value_norm", "output_norm")]
        beyond = []
        for ending, on, of_pairs, sees in (("", counted, whole, sees_all), ("_active", active, off_rest, sees_off)):
            which, columns = _columns(self.key_names, ending)
            counts_all = [not MEASURES[self.key_names[number]].family.is_set for number in which]
            counts_all = torch.tensor(counts_all, dtype=torch.bool, device=self.device)
            defined[..., columns] = on[..., None] * ((sees[..., which] > 0) | counts_all)
            defined[..., _columns(of_all, ending)[1]] = on[..., None]
            if not self.own_text:
                continue
            for column in _columns(_PAIRS, ending)[1]:
                name = NAMES[column].removesuffix("_active")
                row = on * of_pairs[..., _PAIRS.index(name)]
                family = MEASURES[name].family
                if self._knows(name):
                    defined[..., column] = on * (row > 0) if family.is_set else on
                if family.beyond_uniform:
                    beyond.append(row)
                else:
                    value[..., column] = row
        defined[..., _ROW_COLUMNS] = (worth > 0).to(self.exact)
        value[..., _ROW_COLUMNS] = numbers * worth

        units = self.units(block)
        self.count[units] += defined.sum(2)
        self.uniform[units] += (defined * value).sum(2)
        self.offset_count[units] += band.sum(2)
        self.offset_uniform[units] += (hits * band).sum(2)
        self.n_counted[block.texts] += counted.sum(2)
        defined, value = defined[..., _ACTIVE], value[..., _ACTIVE]
        self._put("counted", block, counted, self.exact)
        self._put("share", block, counted / n_allowed.clamp(min=1), self.exact)
        self._put("spread", block, active / n_off.clamp(min=1), self.exact)
        self._put("worth", block, worth)
        self._put("band", block, band)
        self._put("active", block, torch.cat([defined, defined * value], -1), self.exact)
        self._put("beyond", block, torch.stack(beyond, -1) if beyond else value[..., :0], self.exact)

    def _knows(self, name: str) -> bool:
        return MEASURES[name].family.fact != "cosine" or self.keys.embeddings is not None

    def _statistics_worth(self, block: Block, may: Tensor, n_allowed: Tensor, counted: Tensor) -> Tensor:
        """Return what the statistics of _ROWS of each query are multiplied by, 0 if it does not count, (b, m, q, …)."""
        texts = self._texts(block)
        ends = (texts.final_special[:, None] - block.keys.start) == torch.arange(block.shape[2], device=self.device)
        n_ends = (may * ends[:, None, None]).sum(-1)
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
        return torch.stack([worth[MEASURES[name].family.statistic] for name in _ROWS], -1)


# One layer -------------------------------------------------------------------------------------------------------


class _Layer:
    """Add up the measures of one attention, block by block.

    Args:
        ground: What texts and mask determine.
        facts: What keys are worth in this layer, as `layer_facts`.
        n_heads: How many heads there are.
    """

    def __init__(self, ground: Ground, facts: dict[str, Tensor], n_heads: int) -> None:
        self._ground = ground
        self._n_heads = n_heads
        batch, n_keys = ground.keys.real.shape
        names = [name for name in _KEYS if MEASURES[name].family.fact in facts]
        self._key_names = [*ground.key_names, *names]
        worth = [facts[MEASURES[name].family.fact].to(ground.exact).expand(-1, n_heads, -1) for name in names]
        self._worth = torch.stack(worth, -1) if worth else ground._zeros(batch, n_heads, n_keys, 0)
        self._outlying = facts.get("outlying")
        is_missing = [name for name in _KEYS if MEASURES[name].family.fact in _LAYER_FACTS and name not in names]
        self._missing = [column for ending in ("", "_active") for column in _columns(is_missing, ending)[1]]
        n_units = batch * ground.n_units
        self._sum, self._count, self._uniform = ground._zeros(3, n_units, n_heads, len(NAMES))
        self._offset_sum = ground._zeros(n_units, n_heads, len(OFFSETS))
        # What each key receives from the whole text, under the head's weights and under uniform attention.
        self._received, self._evenly = ground._zeros(2, batch, n_heads, n_keys)

    def add(self, block: Block, weights: Float[Tensor, "text head query key"], tile: Tile | None = None) -> None:
        """Add the weights of a block, and overwrite the scores of its tile; None = there are weights alone."""
        if not weights.numel():
            return
        ground = self._ground
        rows = ground.row_sums(block, weights)
        band = ground.at_offsets(block, weights)
        active = rows[..., 0].transpose(1, 2).to(ground.exact)
        mass = weights.sum(-1).to(ground.exact)
        self._add_pairs(block, rows, band, mass, active)
        self._add_keys(block, weights, active)

        # What `_active` measures count, and uniform attention, weighed by each query's mass outside sinks.
        units = ground.units(block)
        counts, uniform = _weigh(active, ground.of(block, "active")).chunk(2, -1)
        self._count[units][..., _ACTIVE] += counts
        self._uniform[units][..., _ACTIVE] += uniform

        numbers, hits = ground.statistics(weights, rows, band, block, tile)
        sums = (numbers * ground.of(block, "worth")).sum(2, dtype=ground.exact)
        self._sum[units][..., _ROW_COLUMNS] += sums
        self._offset_sum[units] += (hits * ground.of(block, "band")).sum(2, dtype=ground.exact)

    def _add_pairs(self, block: Block, rows: Tensor, band: Tensor, mass: Tensor, active: Tensor) -> None:
        ground = self._ground
        if not ground.own_text:
            return
        counted = ground.of(block, "counted").transpose(1, 2)[..., None]
        parts = [(part * counted).sum(1) for part in ground.pair_parts(block, rows, band)]
        sums = ground.pair_values(parts)  # (text, head, value)
        units = ground.units(block)
        for ending, of_measures in zip(("", "_active"), sums.chunk(2, -1), strict=True):
            which, columns = _columns(_PAIRS, ending)
            self._sum[units][..., columns] += of_measures[..., which]
        beyond, beyond_off = ground.of(block, "beyond").chunk(2, -1)
        self._sum[units][..., _columns(_BEYOND)[1]] -= _weigh(mass, beyond)
        self._sum[units][..., _columns(_BEYOND, "_active")[1]] -= _weigh(active, beyond_off)

    def _add_keys(self, block: Block, weights: Tensor, active: Tensor) -> None:
        ground, units = self._ground, self._ground.units(block)
        counted, spread = ground.of(block, "counted"), ground.of(block, "spread")
        here = block.texts, slice(None), block.keys

        # What each key receives, from the head and if attention were uniform, (text, head, key).
        groups = torch.arange(weights.shape[2], device=ground.device) // FEW_QUERIES
        belongs = torch.nn.functional.one_hot(groups).T * counted[:, :, None]
        received = (belongs.to(weights.dtype) @ weights).sum(2, dtype=ground.exact)
        may = ground.may(block)
        evenly = _over_keys(ground.of(block, "share"), may).expand_as(received)
        evenly_off = _over_keys(active * spread, may)
        self._received[here] += received
        self._evenly[here] += evenly

        # Times what keys are worth, all of them and those outside sinks.
        off = ground.off[block.texts, None, block.keys]
        shares = torch.stack([received, evenly, received * off, evenly_off * off], 2)
        of_texts = (shares.flatten(1, 2) @ ground.worth[block.texts, block.keys]).unflatten(1, shares.shape[1:3])
        sums = torch.cat([of_texts, shares @ self._worth[here]], -1)
        for ending, first in (("", 0), ("_active", 2)):
            which, columns = _columns(self._key_names, ending)
            self._sum[units][..., columns] += sums[:, :, first, which]
            self._uniform[units][..., columns] += sums[:, :, first + 1, which]

        # Whether a query sees an outlying token differs from layer to layer.
        if self._outlying is not None:
            outlying = self._outlying[block.texts, :, block.keys, None].to(ground.exact)
            sees = ((may @ outlying).squeeze(-1) > 0) * counted
            names = [name for name in _KEYS if MEASURES[name].family == Keys("outlying")]
            for ending, counts in (("", sees), ("_active", sees * (spread > 0) * active)):
                self._count[units][..., _columns(names, ending)[1]] += counts.sum(-1)[..., None]

    def result(self) -> Measured:
        """Return the measures of the layer."""
        ground, n_units = self._ground, self._ground.n_units
        count = self._count + ground.count
        uniform = self._uniform + ground.uniform

        # What the most attended key receives is a number of the whole text, which stands in its first unit.
        column = NAMES.index(_RECEIVED)
        for sums, received in ((self._sum, self._received), (uniform, self._evenly)):
            sums[::n_units, :, column] = received.amax(-1) if received.shape[2] else 0
        count[::n_units, :, column] = ground.n_counted.expand(-1, self._n_heads)
        for part in (self._sum, count, uniform):
            part[..., self._missing] = 0

        by_measure = [part.permute(2, 0, 1).cpu().double().numpy() for part in (self._sum, count, uniform)]
        _add_sinks(by_measure, n_units)
        by_offset = [self._offset_sum]
        by_offset += [part.expand_as(self._offset_sum) for part in (ground.offset_count, ground.offset_uniform)]
        return Measured(*by_measure, *(part.permute(2, 0, 1).cpu().double().numpy() for part in by_offset))


def _weigh(shares: Float[Tensor, "b head q"], columns: Float[Tensor, "b m q column"]) -> Float[Tensor, "b head column"]:
    """Return sums over queries of each head's share times what is known of the query."""
    if columns.shape[1] == 1:
        return shares @ columns[:, 0]
    return (shares[:, :, None] @ columns).squeeze(2)


def _over_keys(shares: Float[Tensor, "b head q"], may: Float[Tensor, "#b #m #q k"]) -> Float[Tensor, "b head k"]:
    """Return what each key receives if each query gives its share to every key that it may attend to."""
    if may.shape[2] == 1:
        return shares.sum(-1, keepdim=True) * may[:, :, 0]
    return _weigh(shares, may)


def _add_sinks(by_measure: list[Sums], n_units: int) -> None:
    """Add to sums, counts and uniform sums, (measure, unit, head), on which texts a head is a sink."""
    rows = [NAMES.index(name) for name in (_SINK, _FIRST, _EVERY)]
    sums, counts, uniform = (part[rows] for part in by_measure)
    n_heads = sums.shape[2]
    of_texts = [part.reshape(3, -1, n_units, n_heads).sum(2) for part in (sums, counts, uniform)]
    tell_sinks((_SINK, _FIRST, _EVERY), of_texts[2], of_texts[1].copy())
    tell_sinks((_SINK, _FIRST, _EVERY), of_texts[0], of_texts[1])
    for part, of_text in zip(by_measure, of_texts[:2] + of_texts[2:], strict=True):
        part[rows[0], ::n_units] = of_text[0]


def tell_sinks(names: tuple[str, ...], sums: Sums, counts: Sums) -> None:
    """Write which texts a head is a sink on, from the value of first_token in the whole text.

    A query that may not see the first token gives it nothing, and counts: a layer whose window is a few tokens has no
    sink there.

    Args:
        names: The measures on the first axis: sink, first_token, and one that counts every query.
        sums: (measure, ...), of whole texts; written to.
        counts: Likewise; written to.
    """
    sink, first, every = (names.index(name) for name in (_SINK, _FIRST, _EVERY))
    sums[sink] = sums[first] > SINK_THRESHOLD * counts[every]
    counts[sink] = counts[every] > 0
