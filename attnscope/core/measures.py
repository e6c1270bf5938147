"""Add up every head measure in one pass over the tiles of an attention, in memory that grows with length alone.

A measure adds up weights times values of keys, or of pairs of a query and a key, or statistics of rows of weights
(`catalogue`). Uniform attention, and attention outside sinks, are such sums with other weights.
`HeadMeasures` measures every layer of a forward pass: `masked_texts` works out what texts and one mask determine, and
`_Layer` adds up the tiles of one layer. This module knows no model, no tokenizer and no corpus.
Measures have their sources in the catalogue; adding them up over tiles is ours.

Sums have two views: 0 = of all keys, 1 = of keys outside sinks. A unit is a text, or one of the equal parts of a long
one (`catalogue.unit_queries`): the evidence that intervals rest on. A column is a measure's place in sums
(`catalogue.Columns`).

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
from attnscope.core.facts import TextFacts, outlying
from attnscope.core.masked_texts import MaskedTexts

FEWEST_HEADS = 6
"""A tile holds no more pairs of a query and a key than it would with so many heads: each pair has a row of facts."""

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
        self._plans: dict[Hashable, tuple[MaskedTexts, Tensor | None]] = {}

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

            def read(tile: Tile) -> None:
                layer.add(tile.block, tile.weights, tile)

            output = attend_in_tiles(call, read, texts.blocks, self._buffers)
            by_layer = self.sums.setdefault(call.kind, {})
            by_layer[call.layer] = layer.result()
        return output

    def _plan(self, call: AttentionCall) -> MaskedTexts:
        """Return what texts and mask determine, worked out once for all layers of the same mask and shapes."""
        decoder_facts = self._facts if self._query_facts is None else self._query_facts
        keys = decoder_facts if call.kind == "decoder" else self._facts
        queries = decoder_facts if call.kind == "cross" else keys
        batch, n_heads, n_queries, _ = call.query.shape
        n_keys = call.key.shape[2]
        _require_fit(f"{call.kind} layer {call.layer} has", (batch, n_queries, n_keys), queries, keys)

        # Most models hand every layer the same mask; some make a new view of the same memory each time.
        mask = call.mask
        device = call.query.device
        mask_identity: Hashable = None
        if mask is not None:
            version = 0 if mask.is_inference() else mask._version
            mask_identity = mask.data_ptr(), mask.shape, mask.stride(), version
        # All that the plan depends on, but for the texts.
        plan_key = mask_identity, device, call.kind, call.is_causal, call.window, n_heads
        if plan_key not in self._plans:
            elements = tiles.tile_elements(device)
            elements = min(elements, elements // FEWEST_HEADS * n_heads)
            texts = MaskedTexts(
                self._columns,
                blocks(call, elements, unit=unit_queries(n_queries)),
                keys.on(device),
                queries.on(device).asking,
                mask_heads=1 if mask is None else mask.shape[1],
                own_text=call.kind != "cross",
                dtype=torch.promote_types(call.query.dtype, torch.float32),
            )
            # The mask is held, so that no other one gets its address.
            self._plans[plan_key] = texts, mask
        plan, _ = self._plans[plan_key]
        return plan

    def _outlying(self, call: AttentionCall, keys: TextFacts) -> Tensor | None:
        """Return which keys are outlying in this layer, (b, k), bool; None = not known."""
        # In cross-attention the layer's hidden states are those of queries.
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
        keys: The texts whose tokens are the keys.
        queries: In cross attention the texts whose tokens are the queries; then measures of pairs are undefined. None =
            the same texts.
        allowed: Which query may attend to which key, boolean, broadcastable to (batch, head, query, key). None = where
            any head puts weight: right, except for weights so small that they are 0 in every head.
        outlying: Which keys are outlying (`facts.outlying`); None leaves outlier_token undefined.
        catalogue: The measures.

    Raises:
        ValueError: Shapes do not fit together.
    """
    own_text = queries is None
    queries = keys if queries is None else queries
    batch, n_heads, n_queries, n_keys = weights.shape
    _require_fit("the weights have", (batch, n_queries, n_keys), queries, keys)
    # (batch, 1 or head, query, key)
    may = (weights > 0).any(1, keepdim=True) if allowed is None else allowed
    may = may[(None,) * (4 - may.ndim)].expand(batch, -1, n_queries, n_keys)

    # One block per unit of each text.
    unit = unit_queries(n_queries)
    unit_blocks = []
    for text in range(batch):
        one_text = slice(text, text + 1)
        for start in range(0, n_queries, unit):
            rows = slice(start, min(start + unit, n_queries))
            block = Block(one_text, rows, slice(0, n_keys), may=may[one_text, :, rows])
            unit_blocks.append(block)

    dtype = sum_dtype(weights.device)
    texts = MaskedTexts(
        Columns(catalogue),
        unit_blocks,
        keys,
        queries.asking,
        mask_heads=may.shape[1],
        own_text=own_text,
        dtype=dtype,
    )
    layer = _Layer(texts, n_heads, outlying)
    for block in unit_blocks:
        # Copied, because a layer may overwrite the weights that it gets.
        block_weights = weights[block.texts, :, block.queries]
        layer.add(block, block_weights.to(dtype, copy=True))
    return layer.result()


def _require_fit(
    subject: str,
    shape: tuple[int, int, int],
    queries: TextFacts,
    keys: TextFacts,
) -> None:
    """Refuse facts that are not of the texts, queries and keys that `shape` counts; `subject` begins the message."""
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

    `outlying` are the keys that are outlying in this layer, (b, k); None = not known.
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
        self._worth = texts.worth
        # The columns that read outlying keys; none if these are not known.
        self._outlying: list[int] = []
        if outlying is not None:
            for column, family in enumerate(families):
                if family == Keys("outlying"):
                    self._outlying.append(column)
            self._worth = texts.worth.clone()
            self._worth[..., self._outlying] = outlying[..., None].to(texts.exact)

    def add(
        self,
        block: Block,
        weights: Float[Tensor, "b h q k"],
        tile: Tile | None = None,
    ) -> None:
        """Add the weights of a block, and overwrite the scores of its tile, if there is one."""
        if not weights.numel():
            return
        texts = self._texts
        # Views of the block's units, which are added to, (view, b, h, c).
        units = texts.units(block)
        sums = self._sum[:, units]
        counts = self._count[:, units]
        uniform = self._uniform[:, units]
        index = slice(None), block.texts, slice(None), block.queries
        counts_query = texts.counts_query[index]
        n_keys = len(texts.columns.keys)
        n_pairs = len(texts.columns.pairs)

        # Keys: the attention that each one receives, (b, h, k), times its value. Queries of a group are added up in the
        # precision of weights, (b, m, group, q) @ (b, h, q, k), and the groups in float64.
        groups = torch.arange(weights.shape[2], device=weights.device) // FEW_QUERIES
        belongs = torch.nn.functional.one_hot(groups).T * counts_query[0].mT
        received = (belongs.to(weights.dtype) @ weights).sum(2, dtype=texts.exact)
        received_outside = received * texts.outside_sinks[block.texts, None, block.keys]
        by_view = torch.stack([received, received_outside])
        sums[..., :n_keys] += by_view @ self._worth[block.texts, block.keys]

        # Pairs, less what uniform attention of the same mass has of them. Where a query sees no key outside sinks, its
        # parts of that view are 0: so one mask of queries serves both.
        parts = texts.parts(block, weights)
        masses = parts[..., 0]
        if texts.own_text:
            values = _over_queries(counts_query[:1, ..., 0], parts) @ texts.pair_map
            values -= _over_queries(masses, texts.beyond[index])
            sums[..., n_keys : n_keys + n_pairs] += values

        # Counts outside sinks, and uniform attention there, weighed by each query's mass.
        active, even = _over_queries(masses[1], texts.active[index][0]).chunk(2, -1)
        counts[1] += active
        uniform[1] += even
        if self._outlying:
            even = texts.spread(block, self._worth[..., self._outlying])
            is_seen = counts_query * (even > 0)
            query_weights = torch.stack([torch.ones_like(masses[1]), masses[1]])
            counts[..., self._outlying] += _over_queries(query_weights, is_seen)
            uniform[..., self._outlying] += _over_queries(query_weights, is_seen * even)

        # Statistics of rows come last, because they overwrite the scores.
        statistics = texts.statistics(block, weights, tile) * texts.row_factors[index][0]
        sums[0, ..., n_keys + n_pairs :] += statistics.sum(2)

    def result(self) -> Measured:
        """Return the measures of the layer."""
        texts = self._texts
        columns = texts.columns
        arrays = []
        for part in (self._sum, self._count + texts.count, self._uniform + texts.uniform):
            # Two lists of indices: (view, unit, head, column) becomes (name, unit, head).
            chosen = part[columns.views, :, :, columns.numbers]
            arrays.append(chosen.cpu().double().numpy())
        total, count, uniform = arrays
        return Measured(total, count, uniform, columns.names)


def _over_queries(
    shares: Float[Tensor, "... #h q"],
    rows: Float[Tensor, "... #h q c"],
) -> Float[Tensor, "... h c"]:
    """Return the sums over queries of shares times rows."""
    sums: Tensor = (shares[..., None, :] @ rows).squeeze(-2)
    return sums
