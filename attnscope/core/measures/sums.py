"""Sums: the probe that measures every head without keeping a map.

One pass over tiles (`one_pass`) serves the model its output and all measures at once. It fills a board (`board`) of
what is read off rows. With it come what each key received, and what each query gave to keys outside the sinks. Every
measure follows from these three by its family: a sum over queries of a fact of the key alone needs only the mass that
each key received.

What depends on the texts and the mask alone is worked out once and serves all layers.
"""

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from attnscope.core.attention.seam import AttentionCall, Kind
from attnscope.core.attention.tile_probe import TileProbe
from attnscope.core.attention.tiles import Block, Buffers
from attnscope.core.measures.board import BOARD, N_COLUMNS, read_board
from attnscope.core.measures.catalogue import FROM_OFFSETS, measure_names, unit_queries
from attnscope.core.measures.dense import (
    NORMS,
    OUTLYING_TOLD,
    Received,
    add_outlying,
    add_received,
    clear_unknown,
    key_norms,
)
from attnscope.core.measures.facts import OFF_REST, TextFacts, outlying, output_factor
from attnscope.core.measures.one_pass import Read, read_tiles, wanted_parts
from attnscope.core.measures.plan import Plan
from attnscope.core.measures.ranges import spread_over
from attnscope.core.measures.totals import SumsOf, internal_names, join_totals


class Sums(TileProbe[SumsOf]):
    """Adds up head measures of every layer, in memory that grows with the length of the texts alone.

    A probe serves one forward pass on one batch. No gradient flows through its output.

    Args:
        facts: The texts; in an encoder-decoder, those that the encoder reads.
        measures: Which of core.measures.MEASURES; None = all.
        query_facts: In an encoder-decoder: the texts that the decoder reads.
        output_projections: (kind, layer) -> the weight of its output projection as torch.nn.Linear stores it, (d_model,
            n_heads * d_value), or its `output_factor` (n_heads, d, d_value), which saves the time; missing layers leave
            norm_weighted undefined.
        buffers: Memory for tiles, which may serve one batch after another; None = a batch's own.
        norms: (kind, layer) -> lengths of the hidden states that a layer reads, (batch, token), called as it comes;
            None leaves outlier_token undefined.
        in_units: Whether blocks of `unit_queries` of longer texts are units of their own.

    Attributes:
        sums: Kind -> layer -> sums and counts by measure, unit and head, in the order in which they came.

    Raises:
        ValueError: A measure is unknown.
    """

    def __init__(
        self,
        facts: TextFacts,
        measures: Iterable[str] | None = None,
        *,
        query_facts: TextFacts | None = None,
        output_projections: Mapping[tuple[Kind, int], Tensor] | None = None,
        buffers: Buffers | None = None,
        norms: Callable[[Kind, int], Tensor | None] | None = None,
        in_units: bool = False,
    ) -> None:
        chosen = None if measures is None else tuple(measures)
        super().__init__(buffers)
        self.names = measure_names(chosen)
        self._internal = internal_names(chosen)
        self._offsets = chosen is None or FROM_OFFSETS in chosen
        self._facts, self._query_facts = facts, query_facts
        self._norms, self._in_units = norms, in_units
        self._asks_outlying = any(name in self._internal for name in OUTLYING_TOLD)
        self._projections = dict(output_projections or {})

    def _read(self, call: AttentionCall) -> tuple[Tensor, SumsOf]:
        plan = self._plan(call)
        reader = _Reader(call, plan, self.names, self._internal, self._outlying(call, plan.keys), self._factor(call))
        output = read_tiles(call, plan, self._internal, reader.add, self._buffers)
        return output, reader.result()

    def _texts(self, kind: Kind) -> tuple[TextFacts, TextFacts | None]:
        """The texts of keys, and of queries if they are others."""
        if kind == "encoder" or self._query_facts is None:
            return self._facts, (self._facts if kind == "cross" else None)
        return (self._query_facts, None) if kind == "decoder" else (self._facts, self._query_facts)

    def _plan(self, call: AttentionCall) -> Plan:
        keys, queries = self._texts(call.kind)
        of_queries = keys if queries is None else queries
        batch, _, n_queries, _ = call.query.shape
        if of_queries.real.shape != (batch, n_queries) or keys.real.shape != (batch, call.key.shape[2]):
            raise ValueError(
                f"{call.kind} layer {call.layer} has {batch} texts of {n_queries} queries and {call.key.shape[2]} "
                f"keys; the facts are of {tuple(of_queries.real.shape)} queries and {tuple(keys.real.shape)} keys"
            )
        device = call.query.device

        def make() -> Plan:
            unit = unit_queries(n_queries) if self._in_units else max(n_queries, 1)
            facts = self._on_device(keys, device), self._on_device(of_queries, device)
            own_text = queries is None
            return Plan(call, *facts, self._internal, own_text=own_text, offsets=self._offsets, unit=unit)

        return self._plan_once(call, make, queries is None)

    def _outlying(self, call: AttentionCall, keys: TextFacts) -> Tensor | None:
        """Which keys are outlying; None if unknown, or none is. In cross attention, the layer's states are no keys'."""
        norms = None if self._norms is None or call.kind == "cross" else self._norms(call.kind, call.layer)
        if norms is None or norms.shape != keys.real.shape or not self._asks_outlying:
            return None
        which = outlying(norms.to(call.query.device), keys)
        return which if bool(which.any()) else None

    def _factor(self, call: AttentionCall) -> Tensor | None:
        projection = self._projections.get((call.kind, call.layer))
        if projection is None or projection.ndim == 3:
            return projection
        return output_factor(projection, call.n_heads)


class _Reader:
    """One attention call's sums, block by block."""

    def __init__(
        self,
        call: AttentionCall,
        plan: Plan,
        wanted: tuple[str, ...],
        names: tuple[str, ...],
        outlying: Tensor | None,
        factor: Tensor | None,
    ) -> None:
        batch, n_heads, n_keys = len(call.query), call.n_heads, call.key.shape[2]
        self._plan, self._wanted, self._outlying = plan, wanted, outlying
        self._parts = wanted_parts(names, plan)
        self._totals, self._uniform = plan.totals(n_heads)
        self._key_norms = key_norms(self._totals, call.value, n_heads, factor)
        # Of the unit at hand of each text; and of whole texts, where these have several.
        self._received = torch.zeros(batch, n_heads, n_keys, dtype=plan.summed, device=plan.device)
        self._evenly_active = torch.zeros_like(self._received)
        # What is added to `_evenly_active` as its running sums (`spread_over`).
        self._steps = self._received.new_zeros(batch, n_heads, n_keys + 1)
        self._of_texts = torch.zeros_like(self._received) if plan.n_units > 1 else self._received
        self._last: Block | None = None
        self._board = self._received.new_zeros(batch * plan.n_units, n_heads, N_COLUMNS)
        # Counts of `_active` measures, and after these what they are under uniform attention; of outlying tokens.
        self._active = self._received.new_zeros(batch * plan.n_units, n_heads, 2 * len(plan.active_names))
        self._sees = self._received.new_zeros(batch * plan.n_units, n_heads, 2)
        self._asks_active = any(name.endswith("_active") for name in names)
        self._asks_spread = bool(NORMS.keys() & set(names)) or outlying is not None

    def add(self, block: Block, read: Read) -> None:
        """Adds what one block comes to."""
        plan, units = self._plan, self._plan.units(block)
        if plan.n_units > 1 and self._last is not None and plan.units(self._last) != units:
            self._close_units(self._last.texts, plan.units(self._last))
        self._last = block
        self._board[units] += read.board
        self._received[block.texts, :, block.keys] += read.received
        active = read.active
        if self._asks_active:
            defined = plan.row(block, "active")
            one_mask = defined.shape[1] == 1
            self._active[units] += active @ defined[:, 0] if one_mask else (active.unsqueeze(-2) @ defined).squeeze(-2)
        if self._asks_spread:
            self._spread_evenly(block, active * plan.row(block, "spread"))
        if self._outlying is not None:
            sees = (plan.row(block, "spread") > 0) * self._sees_some(block, self._outlying)
            sees = sees.to(active.dtype)
            self._sees[units] += torch.stack([sees.expand_as(active), active * sees], -1).sum(2)

    def _sees_some(self, block: Block, keys: Tensor) -> Tensor:
        """Which queries may attend to one of some keys, (text, 1 or mask head, 1 or query)."""
        some, allowed = keys[block.texts, None, None, block.keys], block.allowed(keys.device)
        if allowed is not None:
            some = allowed & some
        return some.any(-1)

    def _spread_evenly(self, block: Block, shares: Tensor) -> None:
        """Adds to each key the share that each query gives to all keys that it may attend to, (text, head, query)."""
        plan = self._plan
        if not plan.hides[block]:
            edges = plan.row(block, "edges").to(torch.int64).expand(*shares.shape, 2) + block.keys.start
            spread_over(self._steps[block.texts], edges[..., 0], edges[..., 1], shares)
            return
        allowed = block.allowed(shares.device)
        assert allowed is not None
        may = allowed.to(shares.dtype)
        if may.shape[2] == 1:  # the same for all queries
            received = shares.sum(-1, keepdim=True) * may.squeeze(2)
        elif may.shape[1] == 1:
            received = shares @ may[:, 0]
        else:
            received = (shares.unsqueeze(-2) @ may).squeeze(-2)
        self._evenly_active[block.texts, :, block.keys] += received

    def result(self) -> SumsOf:
        """The measures of the layer."""
        plan, totals, uniform = self._plan, self._totals, self._uniform
        batch, n_units = len(self._received), plan.n_units
        if plan.blocks:
            self._add_board(slice(0, batch * n_units))
        if n_units == 1:
            self._close_units(slice(0, batch), slice(0, batch))
        elif self._last is not None:
            self._close_units(self._last.texts, plan.units(self._last))
        for part in (totals, uniform):
            clear_unknown(part, self._key_norms)
        totals.finish_texts(self._of_texts, plan.counted)
        return join_totals(totals, uniform, self._wanted)

    def _close_units(self, texts: slice, units: slice) -> None:
        """Adds what follows from the mass that keys received from the queries of some units, and starts the next."""
        plan, totals = self._plan, self._totals
        evenly_active = self._evenly_active[texts]
        if self._asks_spread:
            evenly_active += self._steps[texts].cumsum(-1)[..., :-1]
        received = Received(self._received[texts], plan.evenly[units], evenly_active)
        outside = plan.columns[OFF_REST][texts]
        totals.add_several(list(plan.columns), units, (received.mass @ plan.table[texts]).permute(2, 0, 1), "sum")
        if self._outlying is not None:
            add_outlying(totals, self._uniform, units, self._outlying[texts], received, self._sees[units])
        norms = {name: norm[texts] for name, norm in self._key_norms.items()}
        add_received(totals, self._uniform, units, outside, received, norms)
        if plan.n_units > 1:
            self._of_texts[texts] += received.mass
            received.mass.zero_()
            evenly_active.zero_()
            self._steps[texts].zero_()

    def _add_board(self, whole: slice) -> None:
        plan, totals = self._plan, self._totals
        # All in one piece: number by number they would take as long as a small tile.
        if self._asks_active:
            counts, even = self._active.permute(2, 0, 1).chunk(2)
            totals.add_several(plan.active_names, whole, counts, "count")
            self._uniform.add_several(plan.active_names, whole, even, "sum")
        knows = self._parts if plan.keys.embeddings is not None else self._parts - {"cosine"}
        knows = knows if plan.rarest is not None else knows - {"rarest"}
        names, sums = read_board(self._board, own_text=plan.own_text, knows=knows)
        totals.add_several(names, whole, sums, "sum")
        if plan.own_text and plan.offsets:
            totals.offset_count[:] = plan.uniform.offset_count
            hits = self._board[..., BOARD["hits"]]
            totals.add_offsets(whole, hits, torch.zeros_like(hits))
