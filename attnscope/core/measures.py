"""Add up every head measure in one pass over the tiles of an attention, in memory that is linear in the text's length.

A measure adds up weights times values of keys, or of pairs of a query and a key, or statistics of rows of weights
(`catalogue`). Uniform attention, and attention outside sinks, are such sums with other weights.
`HeadMeasures` measures every layer of a forward pass: `masked_texts` computes what depends on texts and mask alone, and
`_Layer` adds up the tiles of one layer. This module knows no model, no tokenizer and no corpus.
Measures have their sources in the catalogue; adding them up over tiles is ours.

Sums have two *views*: 0 = of all keys, 1 = of keys outside sinks. A *unit* is a text, or one of the equal parts of a
long one (`catalogue.queries_per_unit`); sums are kept per unit, because intervals are computed from units. A *column*
is the position of a measure in sums (`catalogue.MeasureColumns`). A *block* is a range of texts, queries and keys, and
a *tile* holds its weights.

Shapes: b texts, m mask heads (1 if all heads share one), h heads, q queries, k keys, c columns.
"""

from collections.abc import Callable, Hashable, Mapping

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from attnscope.core.attention import tiles
from attnscope.core.attention.precision import sum_dtype
from attnscope.core.attention.seam import AttentionCall, Kind, require_first_visit
from attnscope.core.attention.tiles import Tile, TileBounds, TileBuffers, attend_in_tiles, cut_blocks
from attnscope.core.catalogue import (
    MEASURES,
    KeyMeasure,
    Measure,
    MeasureColumns,
    MeasureSums,
    queries_per_unit,
)
from attnscope.core.facts import TextFacts, find_outlier_tokens
from attnscope.core.masked_texts import MaskedTexts

MIN_HEADS = 6
"""A tile of a model with fewer heads holds no more pairs of query and key than with so many: pairs have facts, which
take memory too."""

FEW_QUERIES = 64
"""Weights on a key are added up in float32 over so many queries at most, then in float64, or they would lose digits."""


class HeadMeasures:
    """Measure every layer of one forward pass on one batch, without keeping a map: a `Probe` without gradient.

    Args:
        facts: The texts; in an encoder-decoder, those that the encoder reads.
        query_facts: In an encoder-decoder: the texts that the decoder reads.
        norms: A function of (kind, layer) that returns the lengths of the hidden states that the layer reads, (batch,
            token). It is called while the layer's attention is computed. None leaves outlier_token undefined.
        buffers: Memory for tiles, to use again for the next batch; None = new memory.
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
        buffers: TileBuffers | None = None,
        catalogue: Mapping[str, Measure] = MEASURES,
    ) -> None:
        self.sums: dict[Kind, dict[int, MeasureSums]] = {}
        self._facts = facts
        self._query_facts = facts if query_facts is None else query_facts
        self._norms = norms
        self._buffers = TileBuffers() if buffers is None else buffers
        self._columns = MeasureColumns(catalogue)
        # By mask and shapes; with each the mask itself.
        self._masked_texts: dict[Hashable, tuple[MaskedTexts, Tensor | None]] = {}

    def __call__(self, call: AttentionCall) -> Tensor:
        """Compute an attention, and measure its heads; shape and dtype of its output: see `Probe`.

        Raises:
            RuntimeError: The layer of this kind has been here already.
            ValueError: The call's shapes are not those of the texts.
        """
        require_first_visit(self.sums, call.kind, call.layer)
        with torch.no_grad():
            texts = self._texts_under_mask(call)
            layer = _Layer(texts, call.n_heads, self._outlying(call, texts.keys))

            def add_tile(tile: Tile) -> None:
                layer.add(tile.block, tile.weights, tile)

            output = attend_in_tiles(call, add_tile, texts.blocks, self._buffers)
            by_layer = self.sums.setdefault(call.kind, {})
            by_layer[call.layer] = layer.result()
        return output

    def _texts_under_mask(self, call: AttentionCall) -> MaskedTexts:
        """Return what depends on texts and mask alone, computed once for all layers of the same mask and shapes."""
        keys = self._query_facts if call.kind == "decoder" else self._facts
        queries = self._query_facts if call.kind == "cross" else keys
        batch, n_heads, n_queries, _ = call.query.shape
        n_keys = call.key.shape[2]
        _require_fit(f"{call.kind} layer {call.layer} has", (batch, n_queries, n_keys), queries, keys)

        # Most models hand every layer the same mask, but some make a new view of the same memory each time. `_version`
        # counts how often the memory was written to; tensors of inference mode have none.
        mask = call.mask
        device = call.query.device
        mask_identity: Hashable = None
        if mask is not None:
            version = 0 if mask.is_inference() else mask._version
            mask_identity = mask.data_ptr(), mask.shape, mask.stride(), version
        # All that the result depends on, but for the texts.
        cache_key = mask_identity, device, call.kind, call.is_causal, call.window, n_heads
        if cache_key not in self._masked_texts:
            elements = tiles.tile_elements(device)
            elements = min(elements, elements // MIN_HEADS * n_heads)
            texts = MaskedTexts(
                self._columns,
                cut_blocks(call, elements, queries_per_unit=queries_per_unit(n_queries)),
                keys.to(device),
                queries.to(device).is_query,
                mask_heads=1 if mask is None else mask.shape[1],
                own_text=call.kind != "cross",
                dtype=torch.promote_types(call.query.dtype, torch.float32),
            )
            # The mask is kept, so that no other one gets its address.
            self._masked_texts[cache_key] = texts, mask
        texts, _ = self._masked_texts[cache_key]
        return texts

    def _outlying(self, call: AttentionCall, keys: TextFacts) -> Tensor | None:
        """Return which keys are outlying in this layer, (b, k), bool; None = not known."""
        # In cross-attention the layer's hidden states are those of queries.
        if self._norms is None or call.kind == "cross":
            return None
        norms = self._norms(call.kind, call.layer)
        if norms is None or norms.shape != keys.real.shape:
            return None
        return find_outlier_tokens(norms.to(call.query.device), keys)


def measures_of_weights(
    weights: Float[Tensor, "batch head query key"],
    keys: TextFacts,
    queries: TextFacts | None = None,
    *,
    allowed: Tensor | None = None,
    outlying: Bool[Tensor, "batch key"] | None = None,
    catalogue: Mapping[str, Measure] = MEASURES,
) -> MeasureSums:
    """Return all measures of one layer from its dense weights, in float64 where there is one, one unit at a time.

    Args:
        weights: In any precision.
        keys: The texts whose tokens are the keys.
        queries: In cross attention the texts whose tokens are the queries; then measures of pairs are undefined. None =
            the same texts.
        allowed: Which query may attend to which key, boolean, broadcastable to (batch, head, query, key). None = all
            pairs on which any head has weight; this misses an allowed pair whose weight is rounded to 0 in every head.
        outlying: Which keys are outlying (`facts.find_outlier_tokens`); None leaves outlier_token undefined.
        catalogue: The measures.

    Raises:
        ValueError: Shapes do not fit together.
    """
    own_text = queries is None
    queries = keys if queries is None else queries
    batch, n_heads, n_queries, n_keys = weights.shape
    _require_fit("the weights have", (batch, n_queries, n_keys), queries, keys)
    if allowed is None:
        allowed = (weights > 0).any(1, keepdim=True)
    # All four axes, (batch, 1 or head, query, key).
    while allowed.ndim < 4:
        allowed = allowed[None]
    allowed = allowed.expand(batch, -1, n_queries, n_keys)

    # One block per unit of each text.
    unit = queries_per_unit(n_queries)
    unit_blocks = []
    for text in range(batch):
        one_text = slice(text, text + 1)
        for start in range(0, n_queries, unit):
            rows = slice(start, min(start + unit, n_queries))
            block = TileBounds(one_text, rows, slice(0, n_keys), mask=allowed[one_text, :, rows])
            unit_blocks.append(block)

    dtype = sum_dtype(weights.device)
    texts = MaskedTexts(
        MeasureColumns(catalogue),
        unit_blocks,
        keys,
        queries.is_query,
        mask_heads=allowed.shape[1],
        own_text=own_text,
        dtype=dtype,
    )
    layer = _Layer(texts, n_heads, outlying)
    for block in unit_blocks:
        layer.add(block, weights[block.texts, :, block.queries].to(dtype))
    return layer.result()


def _require_fit(
    subject: str,
    shape: tuple[int, int, int],
    queries: TextFacts,
    keys: TextFacts,
) -> None:
    """Raise an error if facts are of other shapes than (batch, query, key) of an attention; `subject` names it."""
    batch, n_queries, n_keys = shape
    query_shape = tuple(queries.real.shape)
    key_shape = tuple(keys.real.shape)
    if query_shape != (batch, n_queries) or key_shape != (batch, n_keys):
        raise ValueError(
            f"{subject} {batch} texts of {n_queries} queries and {n_keys} keys; the facts are of "
            f"{query_shape} queries and {key_shape} keys"
        )


class _Layer:
    """Add up the measures of one attention, block by block.

    `outlying` says which keys are outlying in this layer, (b, k); None = not known.
    """

    def __init__(
        self,
        texts: MaskedTexts,
        n_heads: int,
        outlying: Tensor | None,
    ) -> None:
        self._texts = texts
        families = texts.columns.families
        shape = len(texts.keys.real) * texts.n_units, n_heads, len(families)
        # (view, unit, h, c) each.
        self._sum, self._count, self._uniform = texts.zeros(3, 2, *shape)
        self._key_values = texts.key_values
        # The columns of measures of outlying keys; none if these keys are not known.
        self._outlying: list[int] = []
        if outlying is not None:
            for column, family in enumerate(families):
                if family == KeyMeasure("outlying"):
                    self._outlying.append(column)
            self._key_values = texts.key_values.clone()
            self._key_values[..., self._outlying] = outlying[..., None].to(texts.exact)

    def add(
        self,
        block: TileBounds,
        weights: Float[Tensor, "b h q k"],
        tile: Tile | None = None,
    ) -> None:
        """Add the weights of a block, and overwrite the scores of its tile, if there is one."""
        if not weights.numel():
            return
        texts = self._texts
        # The sums of the block's units, (view, b, h, c). They share memory with the whole, so adding to them is enough.
        units = texts.units(block)
        sums = self._sum[:, units]
        counts = self._count[:, units]
        uniform = self._uniform[:, units]
        # The index of the block's rows in arrays (b, m, q, …).
        rows = block.texts, slice(None), block.queries
        counts_query = texts.counts_query[:, *rows]
        n_keys = len(texts.columns.keys)
        n_pairs = len(texts.columns.pairs)

        # Measures of keys: the attention that each key receives, (b, h, k), times the key's value. Groups of queries
        # are added up in the precision of weights, (b, m, group, q) @ (b, h, q, k), then the groups in float64.
        groups = torch.arange(weights.shape[2], device=weights.device) // FEW_QUERIES
        is_in_group = torch.nn.functional.one_hot(groups).T * counts_query[0].mT
        received = (is_in_group.to(weights.dtype) @ weights).sum(2, dtype=texts.exact)
        received_outside = received * texts.outside_sinks[block.texts, None, block.keys]
        by_view = torch.stack([received, received_outside])
        sums[..., :n_keys] += by_view @ self._key_values[block.texts, block.keys]

        # Measures of pairs; some subtract what uniform attention of the same mass would give. A query that sees no key
        # outside sinks has parts of 0 in view 1, so the queries that count in view 0 are right for both.
        parts = texts.parts(block, weights)
        masses = parts[..., 0]
        if texts.own_text:
            values = _over_queries(counts_query[:1, ..., 0], parts) @ texts.pair_map
            values -= _over_queries(masses, texts.beyond[:, *rows])
            sums[..., n_keys : n_keys + n_pairs] += values

        # In view 1 a query counts by its mass outside sinks, in counts and under uniform attention.
        counts[1] += _over_queries(masses[1], texts.active_count[rows])
        uniform[1] += _over_queries(masses[1], texts.active_uniform[rows])
        # Outlying keys differ by layer, so `texts` could not count them: in view 0 a query counts 1.
        if self._outlying:
            uniform_values = texts.uniform_means(block, self._key_values[..., self._outlying])
            is_counted = counts_query * (uniform_values > 0)
            query_weights = torch.stack([torch.ones_like(masses[1]), masses[1]])
            counts[..., self._outlying] += _over_queries(query_weights, is_counted)
            uniform[..., self._outlying] += _over_queries(query_weights, is_counted * uniform_values)

        # Statistics of rows come last, because they overwrite the scores.
        statistics = texts.statistics(block, weights, tile) * texts.row_factors[rows]
        sums[0, ..., n_keys + n_pairs :] += statistics.sum(2)

    def result(self) -> MeasureSums:
        """Return the measures of the layer."""
        texts = self._texts
        columns = texts.columns
        arrays = []
        for sums in (self._sum, self._count + texts.count, self._uniform + texts.uniform):
            # The view and the column of each name: (view, unit, head, column) becomes (name, unit, head).
            by_name = sums[columns.view_by_value, :, :, columns.column_by_value]
            arrays.append(by_name.cpu().double().numpy())
        total, count, uniform = arrays
        return MeasureSums(total, count, uniform, columns.names)


def _over_queries(
    shares: Float[Tensor, "... #h q"],
    rows: Float[Tensor, "... #h q c"],
) -> Float[Tensor, "... h c"]:
    """Return the sums over queries of rows, each multiplied with its query's share."""
    sums: Tensor = (shares[..., None, :] @ rows).squeeze(-2)
    return sums
