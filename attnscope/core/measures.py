"""Add up every head measure in one pass over the tiles of an attention, in memory that is linear in the text's length.

A measure adds up weights times values of keys, weights times values of pairs of a query and a key, or statistics of
rows of weights (`catalogue`). The same sums with uniform weights are its baseline; with sinks left out, its view 1.
`HeadMeasures` measures every layer of a forward pass: `masked_texts` computes the part that depends on texts and mask
alone, and `_LayerSums` adds up the tiles of one layer. This module knows no model, no tokenizer and no corpus. The
catalogue names the source of each measure; adding measures up over tiles is ours.

Sums have two *views*: 0 = of all keys, 1 = of keys outside sinks. A *unit* is a text, or one of the equal parts of a
long one (`catalogue.queries_per_unit`); sums are kept per unit, because intervals are computed from units. A *column*
is the index of a measure in sums (`catalogue.MeasureColumns`). A *block* is a range of texts, queries and keys, and
a *tile* holds its weights.

Shapes: b texts, m mask heads (1 if all heads share one mask), h heads, q queries, k keys, c columns.
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
"""Tiles are cut as if a layer had at least this many heads. Facts of pairs take memory whatever the number of heads, so
with few heads a tile of the usual number of weights would hold too many pairs."""

FLOAT32_QUERIES = 64
"""The most queries over which the weights on a key are added up in float32. These sums are then added up in float64, so
that long texts lose no digits."""


class HeadMeasures:
    """Measure every layer of one forward pass on one batch, without keeping attention maps.

    It is a `Probe`: a model calls it instead of `attend`, once per layer. No gradient flows through its output.

    Args:
        facts: The texts; in an encoder-decoder, those that the encoder reads.
        query_facts: In an encoder-decoder: the texts that the decoder reads.
        norms: A function of (kind, layer) that returns the norms of the hidden states that the layer reads, (batch,
            token). It is called while the layer's attention is computed. None = outlier_token is undefined.
        buffers: Memory for tiles, which batches can share; None = new memory.
        catalogue: The measures.

    Attributes:
        sums: Kind -> layer -> its measures, in the order of the forward pass.
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
        # By mask and shapes, see `cache_key`: the result, and the mask, which must stay alive.
        self._masked_texts_by_mask: dict[Hashable, tuple[MaskedTexts, Tensor | None]] = {}

    def __call__(self, call: AttentionCall) -> Tensor:
        """Compute an attention, and measure its heads; `Probe` documents shape and dtype of the output.

        Raises:
            RuntimeError: The same layer of this kind was measured before.
            ValueError: The call's shapes are not those of the texts.
        """
        require_first_visit(self.sums, call.kind, call.layer)
        with torch.no_grad():
            masked_texts = self._texts_under_mask(call)
            layer = _LayerSums(masked_texts, call.n_heads, self._find_outliers(call, masked_texts.keys))

            def add_tile(tile: Tile) -> None:
                layer.add(tile.block, tile.weights, tile)

            output = attend_in_tiles(call, add_tile, masked_texts.blocks, self._buffers)
            by_layer = self.sums.setdefault(call.kind, {})
            by_layer[call.layer] = layer.result()
        return output

    def _texts_under_mask(self, call: AttentionCall) -> MaskedTexts:
        """Return the `MaskedTexts` of a call, computed once for all layers with the same mask and shapes."""
        keys = self._query_facts if call.kind == "decoder" else self._facts
        queries = self._query_facts if call.kind == "cross" else keys
        batch, n_heads, n_queries, _ = call.query.shape
        n_keys = call.key.shape[2]
        _require_shapes(f"{call.kind} layer {call.layer} has", (batch, n_queries, n_keys), queries, keys)

        # Most models hand every layer the same mask, but some make a new tensor on the same memory each time. So the
        # mask is identified by its memory. `_version` counts writes to the memory; tensors of inference mode have no
        # counter.
        mask = call.mask
        device = call.query.device
        mask_identity: Hashable = None
        if mask is not None:
            version = 0 if mask.is_inference() else mask._version
            mask_identity = mask.data_ptr(), mask.shape, mask.stride(), version
        # Everything that the result depends on, except the texts, which are fixed.
        cache_key = mask_identity, device, call.kind, call.is_causal, call.window, n_heads
        if cache_key not in self._masked_texts_by_mask:
            elements = tiles.tile_elements(device)
            elements = min(elements, elements // MIN_HEADS * n_heads)
            masked_texts = MaskedTexts(
                self._columns,
                cut_blocks(call, elements, queries_per_unit=queries_per_unit(n_queries)),
                keys.to(device),
                queries.to(device).is_query,
                mask_heads=1 if mask is None else mask.shape[1],
                is_self_attention=call.kind != "cross",
                dtype=torch.promote_types(call.query.dtype, torch.float32),
            )
            # The mask stays alive here, so that no other mask gets its address.
            self._masked_texts_by_mask[cache_key] = masked_texts, mask
        masked_texts, _ = self._masked_texts_by_mask[cache_key]
        return masked_texts

    def _find_outliers(self, call: AttentionCall, keys: TextFacts) -> Tensor | None:
        """Return which keys have outlying hidden states in this layer, (b, k), bool; None = unknown."""
        # In cross-attention `norms` has the hidden states of queries, not of keys.
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
    """Return all measures of one layer from its dense weights, one unit at a time.

    Sums are float64, or float32 on devices without float64.

    Args:
        weights: The attention weights, in any floating dtype.
        keys: The texts whose tokens are the keys.
        queries: In cross-attention, the texts whose tokens are the queries. Measures of pairs are then undefined.
            None = self-attention, where the queries are tokens of `keys`.
        allowed: The attention mask, True = may attend, broadcastable to (batch, head, query, key). None = guess it: a
            pair is allowed if any head has weight on it. A pair whose weight is rounded to 0 in every head is missed.
        outlying: Which keys have outlying hidden states (`facts.find_outlier_tokens`). None = outlier_token is
            undefined.
        catalogue: The measures.

    Raises:
        ValueError: Shapes do not fit together.
    """
    is_self_attention = queries is None
    queries = keys if queries is None else queries
    batch, n_heads, n_queries, n_keys = weights.shape
    _require_shapes("the weights have", (batch, n_queries, n_keys), queries, keys)
    if allowed is None:
        allowed = (weights > 0).any(1, keepdim=True)
    # Prepend missing axes, and broadcast to (batch, 1 or head, query, key).
    while allowed.ndim < 4:
        allowed = allowed[None]
    allowed = allowed.expand(batch, -1, n_queries, n_keys)

    # One block per unit of each text.
    unit_length = queries_per_unit(n_queries)
    unit_blocks = []
    for text in range(batch):
        one_text = slice(text, text + 1)
        for start in range(0, n_queries, unit_length):
            rows = slice(start, min(start + unit_length, n_queries))
            block = TileBounds(one_text, rows, slice(0, n_keys), mask=allowed[one_text, :, rows])
            unit_blocks.append(block)

    dtype = sum_dtype(weights.device)
    masked_texts = MaskedTexts(
        MeasureColumns(catalogue),
        unit_blocks,
        keys,
        queries.is_query,
        mask_heads=allowed.shape[1],
        is_self_attention=is_self_attention,
        dtype=dtype,
    )
    layer = _LayerSums(masked_texts, n_heads, outlying)
    for block in unit_blocks:
        layer.add(block, weights[block.texts, :, block.queries].to(dtype))
    return layer.result()


def _require_shapes(
    subject: str,
    shape: tuple[int, int, int],
    queries: TextFacts,
    keys: TextFacts,
) -> None:
    """Raise an error unless the facts have the shape of an attention, (batch, query, key).

    `subject` begins the message, such as "encoder layer 3 has".
    """
    batch, n_queries, n_keys = shape
    query_shape = tuple(queries.real.shape)
    key_shape = tuple(keys.real.shape)
    if query_shape != (batch, n_queries) or key_shape != (batch, n_keys):
        raise ValueError(
            f"{subject} {batch} texts of {n_queries} queries and {n_keys} keys; the facts are of "
            f"{query_shape} queries and {key_shape} keys"
        )


class _LayerSums:
    """Add up the measures of one attention, block by block.

    `outlying` says which keys have outlying hidden states in this layer, (b, k); None = unknown.
    """

    def __init__(
        self,
        masked_texts: MaskedTexts,
        n_heads: int,
        outlying: Tensor | None,
    ) -> None:
        self._masked_texts = masked_texts
        families = masked_texts.columns.families
        shape = len(masked_texts.keys.real) * masked_texts.n_units, n_heads, len(families)
        # Σ of each measure, how many queries it counts, and Σ under uniform attention, (view, unit, h, c) each.
        self._sum, self._count, self._uniform = masked_texts.zeros(3, 2, *shape)
        self._key_values = masked_texts.key_values
        # The columns of measures of outlying keys; empty if these keys are unknown.
        self._outlier_columns: list[int] = []
        if outlying is not None:
            for column, family in enumerate(families):
                if family == KeyMeasure("outlying"):
                    self._outlier_columns.append(column)
            self._key_values = masked_texts.key_values.clone()
            self._key_values[..., self._outlier_columns] = outlying[..., None].to(self._sum)

    def add(
        self,
        block: TileBounds,
        weights: Float[Tensor, "b h q k"],
        tile: Tile | None = None,
    ) -> None:
        """Add the weights of a block, and overwrite the scores of its tile, if there is one."""
        if not weights.numel():
            return
        masked_texts = self._masked_texts
        # The sums of the block's units, (view, b, h, c). Slices share memory with the arrays, so += changes the arrays.
        units = masked_texts.find_units(block)
        sums = self._sum[:, units]
        counts = self._count[:, units]
        uniform = self._uniform[:, units]
        # The index of the block's rows in arrays (b, m, q, …).
        rows = block.texts, slice(None), block.queries
        is_query_counted = masked_texts.is_query_counted[:, *rows]
        n_keys = len(masked_texts.columns.keys)
        n_pairs = len(masked_texts.columns.pairs)

        # Measures of keys: the attention that each key receives, (b, h, k), times the key's value. Queries of one group
        # are added up in the dtype of weights, (b, m, group, q) @ (b, h, q, k), then groups in the dtype of sums.
        groups = torch.arange(weights.shape[2], device=weights.device) // FLOAT32_QUERIES
        is_in_group = torch.nn.functional.one_hot(groups).T * is_query_counted[0].mT
        received = (is_in_group.to(weights.dtype) @ weights).sum(2, dtype=masked_texts.sums_dtype)
        received_outside = received * masked_texts.outside_sinks[block.texts, None, block.keys]
        by_view = torch.stack([received, received_outside])
        sums[..., :n_keys] += by_view @ self._key_values[block.texts, block.keys]

        # Measures of pairs. Some subtract their value under uniform attention of the same mass. The queries that count
        # in view 0 serve both views: a query without keys outside sinks has parts of 0 in view 1 anyway.
        parts = masked_texts.sum_parts(block, weights)
        masses = parts[..., 0]
        if masked_texts.is_self_attention:
            values = _sum_over_queries(is_query_counted[:1, ..., 0], parts) @ masked_texts.pair_map
            values -= _sum_over_queries(masses, masked_texts.uniform_pair_values[:, *rows])
            sums[..., n_keys : n_keys + n_pairs] += values

        # In view 1 a query counts by its mass outside sinks, both in counts and under uniform attention.
        counts[1] += _sum_over_queries(masses[1], masked_texts.counts_outside_sinks[rows])
        uniform[1] += _sum_over_queries(masses[1], masked_texts.uniform_outside_sinks[rows])
        # Outlying keys differ by layer, so `MaskedTexts` could not count their queries. In view 0 a query counts 1.
        columns = self._outlier_columns
        if columns:
            uniform_values = masked_texts.compute_uniform_means(block, self._key_values[..., columns])
            is_counted = is_query_counted * (uniform_values > 0)
            query_weights = torch.stack([torch.ones_like(masses[1]), masses[1]])
            counts[..., columns] += _sum_over_queries(query_weights, is_counted)
            uniform[..., columns] += _sum_over_queries(query_weights, is_counted * uniform_values)

        # Statistics of rows come last, because they overwrite the scores of the tile.
        statistics = masked_texts.compute_statistics(block, weights, tile)
        statistics = statistics * masked_texts.row_factors[rows]
        sums[0, ..., n_keys + n_pairs :] += statistics.sum(2)

    def result(self) -> MeasureSums:
        """Return the measures of the layer as NumPy arrays, (measure, unit, head)."""
        masked_texts = self._masked_texts
        columns = masked_texts.columns
        arrays = []
        for sums in (
            self._sum,
            self._count + masked_texts.counts,
            self._uniform + masked_texts.uniform_sums,
        ):
            # Pick the view and the column of each measure: (view, unit, head, column) becomes (measure, unit, head).
            by_name = sums[columns.view_by_value, :, :, columns.column_by_value]
            arrays.append(by_name.cpu().double().numpy())
        total, count, uniform = arrays
        return MeasureSums(total, count, uniform, columns.names)


def _sum_over_queries(
    query_weights: Float[Tensor, "... #h q"],
    rows: Float[Tensor, "... #h q c"],
) -> Float[Tensor, "... h c"]:
    """Return the sum over queries of their rows, each times the weight of its query."""
    sums: Tensor = (query_weights[..., None, :] @ rows).squeeze(-2)
    return sums
