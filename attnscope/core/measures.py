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
    KEY_FAMILIES,
    MEASURES,
    OFFSETS,
    SINK_THRESHOLD,
    Keys,
    Row,
    unit_queries,
)
from attnscope.core.facts import TextFacts, outlying, value_norms
from attnscope.core.masked_texts import (
    ACTIVE,
    BEYOND,
    LAYER_FACTS,
    NAMES,
    PAIRS,
    ROW_COLUMNS,
    MaskedTexts,
    columns_of,
    weigh,
)

PAIRS_AT_ONCE = 2**18
"""Pairs of a query and a key in one tile, however few heads there are."""

FEW_QUERIES = 64
"""Queries whose weights on a key are added up in float32: sums of more are float64, or they would lose digits."""

_RECEIVED = next(name for name, measure in MEASURES.items() if measure.family == Row("received", of="text"))
_SINK = next(name for name, measure in MEASURES.items() if measure.family == Row("sink", of="text"))
_FIRST = next(name for name, family in KEY_FAMILIES.items() if family == Keys("first"))
_EVERY = next(name for name, family in KEY_FAMILIES.items() if family == Keys("resting", is_set=False))
"""A sink is recognised by the mass on the first token, and by a measure that counts every query."""

_OUTLYING = tuple(name for name, family in KEY_FAMILIES.items() if family == Keys("outlying"))

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
        texts = self._masked_texts(call, keys, queries)
        layer = _Layer(texts, self._layer_facts(call, texts.keys), call.n_heads)

        def add(tile: Tile) -> None:
            layer.add(tile.block, tile.weights, tile)

        output = attend_in_tiles(call, add, texts.blocks, self._buffers)
        return output, layer.result()

    def _texts(self, kind: Kind) -> tuple[TextFacts, TextFacts | None]:
        """Return the texts of keys, and of queries if they are others."""
        read = self._facts if self._query_facts is None else self._query_facts
        if kind == "cross":
            return self._facts, read
        return (read if kind == "decoder" else self._facts), None

    def _masked_texts(self, call: AttentionCall, keys: TextFacts, queries: TextFacts | None) -> MaskedTexts:
        """Return what the texts and the call's mask determine; refuse a call that is not of these texts."""
        asking = keys if queries is None else queries
        batch, n_heads, n_queries, _ = call.query.shape
        n_keys = call.key.shape[2]
        if asking.real.shape != (batch, n_queries) or keys.real.shape != (batch, n_keys):
            raise ValueError(
                f"{call.kind} layer {call.layer} has {batch} texts of {n_queries} queries and {n_keys} keys; the facts "
                f"are of {tuple(asking.real.shape)} queries and {tuple(keys.real.shape)} keys"
            )

        def make() -> MaskedTexts:
            unit = unit_queries(n_queries) if self._in_units else max(n_queries, 1)
            elements = min(tiles.TILE_ELEMENTS, PAIRS_AT_ONCE * n_heads)
            device = call.query.device
            return MaskedTexts(
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
    parts = []
    for text in range(batch):
        for start in range(0, n_queries, unit):
            queries_of_unit = slice(start, min(start + unit, n_queries))
            may_of_unit = may[text : text + 1, :, queries_of_unit]
            parts.append(Block(slice(text, text + 1), queries_of_unit, slice(0, n_keys), may_of_unit, False, None))

    dtype = sum_dtype(weights.device)
    texts = MaskedTexts(
        parts, keys, asking.asking, mask_heads=may.shape[1], own_text=queries is None, dtype=dtype, unit=unit
    )
    of_layer = {} if values is None else layer_facts(values, n_heads, factor, None)
    if outlying is not None:
        of_layer["outlying"] = outlying[:, None]
    layer = _Layer(texts, of_layer, n_heads)
    for block in parts:
        layer.add(block, weights[block.texts, :, block.queries].to(dtype, copy=True))
    return layer.result()


def layer_facts(
    values: Float[Tensor, "batch kv_head key d_value"],
    n_heads: int,
    factor: Float[Tensor, "head d d_value"] | None,
    which: Bool[Tensor, "batch key"] | None,
) -> dict[str, Tensor]:
    """Return what keys are worth in one layer, by fact, (batch, head or 1, key). Unknown facts are missing.

    Source: `facts`; norms of values are Kobayashi et al. 2020.
    """
    facts: dict[str, Tensor] = {}
    if values.shape[-1]:
        facts["value_norm"] = value_norms(values, n_heads)
        if factor is not None:
            facts["output_norm"] = value_norms(values, n_heads, factor)
    if which is not None:
        facts["outlying"] = which[:, None]
    return facts


# One layer -------------------------------------------------------------------------------------------------------


class _Layer:
    """Add up the measures of one attention, block by block.

    Args:
        texts: What texts and mask determine.
        facts: What keys are worth in this layer, as `layer_facts`.
        n_heads: How many heads there are.
    """

    def __init__(self, texts: MaskedTexts, facts: dict[str, Tensor], n_heads: int) -> None:
        self._texts = texts
        self._n_heads = n_heads
        batch, n_keys = texts.keys.real.shape
        n_units = batch * texts.n_units
        self._sum, self._count, self._uniform = texts.zeros(3, n_units, n_heads, len(NAMES))
        self._offset_sum = texts.zeros(n_units, n_heads, len(OFFSETS))

        # What each key receives from the whole text, under the head's weights and under uniform attention.
        self._received, self._evenly = texts.zeros(2, batch, n_heads, n_keys)

        # What keys are worth in this layer alone, (text, head, key, measure).
        of_layer = {name: family.fact for name, family in KEY_FAMILIES.items() if family.fact in LAYER_FACTS}
        names = [name for name, fact in of_layer.items() if fact in facts]
        self._key_names = *texts.key_names, *names
        self._missing = tuple(name for name in of_layer if name not in names)
        self._outlying = facts.get("outlying")
        worth = [facts[of_layer[name]].to(texts.exact).expand(-1, n_heads, -1) for name in names]
        self._worth = torch.stack(worth, -1) if worth else texts.zeros(batch, n_heads, n_keys, 0)

    def add(self, block: Block, weights: Float[Tensor, "text head query key"], tile: Tile | None = None) -> None:
        """Add the weights of a block, and overwrite the scores of its tile; None = there are weights alone."""
        if not weights.numel():
            return
        texts = self._texts
        units = texts.units(block)
        rows = texts.row_sums(block, weights)  # (text, query, head, column)
        band = texts.at_offsets(block, weights)
        mass_off = rows[..., 0].transpose(1, 2).to(texts.exact)
        self._add_keys(block, weights, mass_off)
        if texts.own_text:
            self._add_pairs(block, rows, band, weights.sum(-1).to(texts.exact), mass_off)

        # What `_active` measures count, and uniform attention, weighed by each query's mass outside sinks.
        counts, uniform = weigh(mass_off, texts.of(block, "active")).chunk(2, -1)
        self._count[units][..., ACTIVE] += counts
        self._uniform[units][..., ACTIVE] += uniform

        # Numbers of rows. They overwrite the scores.
        statistics, hits = texts.statistics(weights, rows, band, block, tile)
        sums = (statistics * texts.of(block, "worth")).sum(2, dtype=texts.exact)
        self._sum[units][..., ROW_COLUMNS] += sums
        self._offset_sum[units] += (hits * texts.of(block, "band")).sum(2, dtype=texts.exact)

    def _add_pairs(self, block: Block, rows: Tensor, band: Tensor, mass: Tensor, mass_off: Tensor) -> None:
        texts = self._texts
        sums = self._sum[texts.units(block)]
        counted = texts.of(block, "counted").transpose(1, 2)[..., None]
        parts = [(part * counted).sum(1) for part in texts.pair_parts(block, rows, band)]
        values, values_off = texts.pair_values(parts).chunk(2, -1)  # (text, head, measure)
        beyond, beyond_off = texts.of(block, "beyond").chunk(2, -1)
        values[..., BEYOND] -= weigh(mass, beyond)
        values_off[..., BEYOND] -= weigh(mass_off, beyond_off)
        for ending, of_measures in (("", values), ("_active", values_off)):
            which, columns = columns_of(PAIRS, ending)
            sums[..., columns] += of_measures[..., which]

    def _add_keys(self, block: Block, weights: Tensor, mass_off: Tensor) -> None:
        texts = self._texts
        units = texts.units(block)
        counted, spread = texts.of(block, "counted"), texts.of(block, "spread")
        here = block.texts, slice(None), block.keys

        # What each key receives, from the head and if attention were uniform, (text, head, key).
        groups = torch.arange(weights.shape[2], device=texts.device) // FEW_QUERIES
        belongs = torch.nn.functional.one_hot(groups).T * counted[:, :, None]
        received = (belongs.to(weights.dtype) @ weights).sum(2, dtype=texts.exact)
        may = texts.may(block)
        evenly = _over_keys(texts.of(block, "share"), may).expand_as(received)
        evenly_off = _over_keys(mass_off * spread, may)
        self._received[here] += received
        self._evenly[here] += evenly

        # Times what keys are worth, all of them and those outside sinks.
        off = texts.off[block.texts, None, block.keys]
        shares = torch.stack([received, evenly, received * off, evenly_off * off], 2)
        by_texts = shares.flatten(1, 2) @ texts.worth[block.texts, block.keys]
        by_texts = by_texts.view(*shares.shape[:3], -1)
        sums = torch.cat([by_texts, shares @ self._worth[here]], -1)
        for ending, first in (("", 0), ("_active", 2)):
            which, columns = columns_of(self._key_names, ending)
            self._sum[units][..., columns] += sums[:, :, first, which]
            self._uniform[units][..., columns] += sums[:, :, first + 1, which]

        # Whether a query sees an outlying token differs from layer to layer.
        if self._outlying is not None:
            outlying = self._outlying[block.texts, :, block.keys, None].to(texts.exact)
            sees = ((may @ outlying).squeeze(-1) > 0) * counted
            for ending, counts in (("", sees), ("_active", sees * (spread > 0) * mass_off)):
                self._count[units][..., columns_of(_OUTLYING, ending)[1]] += counts.sum(-1)[..., None]

    def result(self) -> Measured:
        """Return the measures of the layer."""
        texts, n_units = self._texts, self._texts.n_units
        count = self._count + texts.count
        uniform = self._uniform + texts.uniform

        # What the most attended key receives is a number of the whole text, which stands in its first unit.
        column = NAMES.index(_RECEIVED)
        for part, received in ((self._sum, self._received), (uniform, self._evenly)):
            part[::n_units, :, column] = received.amax(-1) if received.shape[2] else 0
        count[::n_units, :, column] = texts.n_counted.expand(-1, self._n_heads)
        for part in (self._sum, count, uniform):
            for ending in ("", "_active"):
                part[..., columns_of(self._missing, ending)[1]] = 0

        by_measure = [_by_column(part) for part in (self._sum, count, uniform)]
        _add_sinks(by_measure, n_units)
        sums, counts, uniform_sums = by_measure
        return Measured(
            sum=sums,
            count=counts,
            uniform_sum=uniform_sums,
            offset_sum=_by_column(self._offset_sum),
            offset_count=_by_column(texts.offset_count.expand_as(self._offset_sum)),
            offset_uniform=_by_column(texts.offset_uniform.expand_as(self._offset_sum)),
        )


def _by_column(sums: Float[Tensor, "unit head column"]) -> Sums:
    """Return sums as (column, unit, head), on the processor."""
    by_column: Sums = sums.permute(2, 0, 1).cpu().double().numpy()
    return by_column


def _over_keys(shares: Float[Tensor, "b head q"], may: Float[Tensor, "#b #m #q k"]) -> Float[Tensor, "b head k"]:
    """Return what each key receives if each query gives its share to every key that it may attend to."""
    if may.shape[2] == 1:
        return shares.sum(-1, keepdim=True) * may[:, :, 0]
    return weigh(shares, may)


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
