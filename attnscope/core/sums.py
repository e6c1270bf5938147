"""Sums: the probe that measures every head without keeping a map.

One pass over tiles (core.tiles) serves the model its output and all measures at once. What a tile gives:

* Sums over queries of whatever asks for the key alone need only the mass that each key received: A'w, one product.
* Functions of query and key (distance, likeness) are one dot product of a head's tile with the function's.
* Previous, next, same token, induction are single weights, read where they are.
* Row maxima, entropies and root-mean-squares take a pass each over weights that lie in the cache.

What depends on the texts and the mask alone is worked out once and serves all layers.
"""

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from attnscope.core.attention import AttentionCall, Kind
from attnscope.core.measures.catalogue import REACH, WINDOW, measure_names, unit_queries
from attnscope.core.measures.dense import Received, add_outlying, add_received, finish, key_norms
from attnscope.core.measures.facts import TextFacts, outlying, pair_targets
from attnscope.core.measures.norms import output_factor
from attnscope.core.measures.plan import PAIR_FUNCTIONS, Plan, TileFacts
from attnscope.core.measures.totals import SumsOf, Totals, internal_names, join_totals
from attnscope.core.tile_probe import TileProbe
from attnscope.core.tiles import Block, Buffers, Tile

PLACES_APART = 64
"""Queries from whose middle places are counted: what is left of places is a difference, which far ones would blur."""


class Sums(TileProbe[SumsOf]):
    """Adds up head measures of every layer, in memory that grows with the length of the texts alone.

    One forward pass on one batch: make a new one for the next batch. No gradient flows through its output.

    Args:
        facts: What is known of the texts; in an encoder-decoder, of what the encoder reads.
        measures: Which of core.measures.MEASURES; None = all.
        query_facts: In an encoder-decoder: what is known of what the decoder reads.
        output_projections: (kind, layer) -> the weight of its output projection as torch.nn.Linear stores it, (d_model,
            n_heads * d_value), or what `core.measures.output_factor` made of it (n_heads, d, d_value), which spares the
            time; layers that are not there leave norm_weighted undefined.
        buffers: Memory for tiles, which may serve one batch after another; None = a batch's own.
        norms: (kind, layer) -> how long the hidden states are that a layer reads, (batch, token), asked as it comes;
            None leaves outlier_token undefined.
        in_units: Whether blocks of `unit_queries` of texts that are longer are units of their own.

    Attributes:
        sums: Kind -> layer -> sums and counts by measure, unit and head. In the order in which they came.

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
        self._offsets = chosen is None or "positional" in chosen
        self._facts, self._query_facts = facts, query_facts
        self._norms, self._in_units = norms, in_units
        self._projections = dict(output_projections or {})
        self._moved: dict[tuple[TextFacts, torch.device], TextFacts] = {}

    def _reader(self, call: AttentionCall) -> "_Reader":
        plan = self._plan(call)
        return _Reader(call, plan, self.names, self._internal, self._outlying(call, plan.keys), self._factor(call))

    def _texts(self, kind: Kind) -> tuple[TextFacts, TextFacts | None]:
        """The texts of keys, and of queries where they are others."""
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
            facts = self._facts_on(keys, device), self._facts_on(of_queries, device)
            return Plan(call, *facts, self._internal, own_text=queries is None, offsets=self._offsets, unit=unit)

        return self._plan_once(call, make, queries is None)

    def _facts_on(self, facts: TextFacts, device: torch.device) -> TextFacts:
        if (facts, device) not in self._moved:
            self._moved[facts, device] = facts.on(device)
        return self._moved[facts, device]

    def _outlying(self, call: AttentionCall, keys: TextFacts) -> Tensor | None:
        """Which keys are outlying; None where it is not known, or none is. Across, the layer's states are no keys'."""
        norms = None if self._norms is None or call.kind == "cross" else self._norms(call.kind, call.layer)
        if norms is None or norms.shape != keys.real.shape or "outlier_token" not in self._internal:
            return None
        found = outlying(norms.to(call.query.device), keys)
        return found if bool(found.any()) else None

    def _factor(self, call: AttentionCall) -> Tensor | None:
        given = self._projections.get((call.kind, call.layer))
        if given is None or given.ndim == 3:
            return given
        return output_factor(given, call.n_heads)


class _Reader:
    """One attention call's sums, tile by tile."""

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
        self.blocks = plan.blocks
        self._call, self._plan, self._wanted, self._outlying = call, plan, wanted, outlying
        self._totals = Totals(names, batch * plan.n_units, n_heads)
        self._uniform = plan.uniform.copy()
        # Counts, but for those of `_active`, are no matter of the head: uniform attention's are everybody's.
        self._totals.take_counts(self._uniform)
        self._uniform.widen(n_heads)
        self._key_norms = key_norms(self._totals, call.value, n_heads, factor)
        # Of the unit at hand of each text; and of whole texts, where these have several.
        self._received = torch.zeros(batch, n_heads, n_keys, dtype=plan.summed, device=plan.device)
        self._evenly_active = torch.zeros_like(self._received)
        self._of_texts = torch.zeros_like(self._received) if plan.n_units > 1 else self._received
        self._last: Block | None = None
        # Sums of tiles by what they are, (unit, head, ...): those of a tile are added together, not one by one.
        self._slots: dict[str, slice] = {}
        self._board = self._received.new_zeros(0)
        self._pieces: list[tuple[str, Tensor]] = []
        places = {"previous_token", "self_token", "next_token", "window"} & set(names)
        self._wants = {
            "entropy": bool({"entropy_nats", "relative_entropy"} & set(names)),
            "ties": (plan.offsets and plan.own_text) or "rarest_token" in names,
            "band": plan.own_text and (plan.offsets or bool(places)),
            "functions": plan.own_text and bool(set(PAIR_FUNCTIONS) & set(names)),
            "active": any(name.endswith("_active") for name in names),
            "spread": bool({"value_weighted", "norm_weighted"} & set(names)) or outlying is not None,
        }

    def _note(self, name: str, sums: Tensor) -> None:
        """Keeps sums of the tile at hand, (text, head) or (text, head, several), for `_post`."""
        self._pieces.append((name, sums.unsqueeze(-1) if sums.ndim == 2 else sums))

    def _post(self, units: slice) -> None:
        """Adds the kept sums of one tile; every tile has the same."""
        if not self._slots:
            start = 0
            for name, piece in self._pieces:
                self._slots[name] = slice(start, start := start + piece.shape[-1])
            self._board = self._received.new_zeros(*self._totals.sum.shape[1:], start)
        self._board[units] += torch.cat([piece for _, piece in self._pieces], -1)
        self._pieces.clear()

    def add(self, tile: Tile) -> None:
        """Adds one tile; overwrites its scores."""
        block, weights, units = tile.block, tile.weights, self._plan.units(tile.block)
        if not weights.numel():
            return
        facts = self._plan.facts_of(block)
        if self._plan.n_units > 1 and self._last is not None and self._plan.units(self._last) != units:
            self._close_units(self._last.texts, self._plan.units(self._last))
        self._last = block
        self._add_received(tile, facts)
        self._add_shares_of_mass(tile, facts)
        if self._wants["functions"]:
            self._add_functions(tile, facts)
        largest = self._largest(weights, facts, block)
        log_sum_exp = tile.log_sum_exp(largest)
        if self._wants["entropy"]:
            entropies = tile.entropies(log_sum_exp)
            self._note("entropy_nats", (entropies * facts.rows["counted"]).sum(-1))
            self._note("relative_entropy", (entropies * facts.rows["inverse_log"]).sum(-1))
        scratch = tile.scores
        if "rms_distance_tokens" in self._totals and self._plan.own_text:
            squares = self._plan.offsets_of(block).square_()
            spread = torch.mul(weights, squares, out=scratch).sum(-1).sqrt_()
            self._note("rms_distance_tokens", (spread * facts.rows["counted"]).sum(-1))
        if self._wants["ties"]:
            ties = torch.eq(weights, largest.unsqueeze(-1), out=scratch).sum(-1)
            self._add_places_of_the_largest(tile, facts, largest, ties)
        elif self._wants["band"]:
            self._add_places_of_the_largest(tile, facts, largest, None)
        self._post(units)

    def _add_received(self, tile: Tile, facts: TileFacts) -> None:
        """Mass that each key received, and where it lay, a few queries at a time.

        Places count from the middle of these queries, as those of the queries do in `_add_shares_of_mass`. From the
        text's start the two sums would be n / 2 tokens a query, and nearly all of it the same: a head that looks one
        token back would be off by the rounding of n.
        """
        block, plan = tile.block, self._plan
        n_texts, n_heads, n_queries, n_keys = tile.weights.shape
        by_head = tile.weights.view(-1, n_queries, n_keys)
        real = facts.real[:, None, None].expand(n_texts, n_heads, 1, n_queries).reshape(-1, 1, n_queries)
        keys = torch.arange(block.keys.start, block.keys.stop, dtype=plan.summed, device=plan.device)
        all_or_off_rest = torch.stack([torch.ones_like(facts.off_rest), facts.off_rest], -1).to(plan.summed)
        ahead = self._received.new_zeros(n_texts, n_heads, 2)
        middle = block.queries.start + min(PLACES_APART, n_queries) // 2
        for start in range(0, n_queries, PLACES_APART):
            few = slice(start, min(start + PLACES_APART, n_queries))
            mass = torch.bmm(real[..., few], by_head[:, few]).view(n_texts, n_heads, n_keys).to(plan.summed)
            self._received[block.texts, :, block.keys] += mass
            if plan.own_text:
                ahead += mass @ ((keys - (middle + start)).unsqueeze(-1) * all_or_off_rest)
        if plan.own_text:
            self._note("ahead", ahead)

    def _add_shares_of_mass(self, tile: Tile, facts: TileFacts) -> None:
        """Mass off resting keys by query: what the `_active` measures count, and what distances count from."""
        weights = tile.weights
        first, last = tile.block.queries.start, tile.block.queries.stop
        q = torch.arange(last - first, device=weights.device, dtype=weights.dtype) % PLACES_APART
        q -= min(PLACES_APART, last - first) // 2
        counted = facts.rows["counted"]
        mass = counted if self._call.sinks is None else weights.sum(-1) * counted
        heads = weights.shape[:2]
        self._note("mass from", (mass * q).sum(-1).expand(heads))
        similar = facts.rows.get("similar")
        if similar is not None:
            uniform = similar[..., 0] if self._call.sinks is None else weights.sum(-1) * similar[..., 0]
            self._note("uniform similar", uniform.sum(-1).expand(heads))
        if not self._wants["active"]:
            return
        active = _times_columns(weights, facts.off_rest)
        self._note("active from", (active * counted * q).sum(-1))
        if self._wants["spread"]:
            self._spread_evenly(tile.block, active * facts.rows["spread"])
        if self._outlying is not None:
            sees = counted * self._sees(tile.block, self._outlying)
            self._note("outlying", torch.stack([sees.expand_as(active), active * sees], -1).sum(2))
        defined = facts.rows["active"]
        one_mask = defined.shape[1] == 1
        counts = active @ defined[:, 0] if one_mask else (active.unsqueeze(-2) @ defined).squeeze(-2)
        self._note("active", counts)
        if similar is not None:
            self._note("uniform similar_active", (active * similar[..., 1]).sum(-1))

    def _sees(self, block: Block, keys: Tensor) -> Tensor:
        """Which queries may attend to one of some keys, (text, 1 or mask head, 1 or query)."""
        some, allowed = keys[block.texts, None, None, block.keys], block.allowed(keys.device)
        if allowed is not None:
            some = allowed[(None,) * (4 - allowed.ndim)] & some
        return some.any(-1)

    def _spread_evenly(self, block: Block, shares: Tensor) -> None:
        """Adds to each key what queries give to each key that they may attend to, (text, head, query)."""
        allowed = block.allowed(shares.device)
        if allowed is None:
            given = shares.sum(-1, keepdim=True)
        else:
            may = allowed[(None,) * (4 - allowed.ndim)].to(shares.dtype)
            if may.shape[2] == 1:  # the same for all queries
                given = shares.sum(-1, keepdim=True) * may.squeeze(2)
            elif may.shape[1] == 1:
                given = shares @ may[:, 0]
            else:
                given = (shares.unsqueeze(-2) @ may).squeeze(-2)
        self._evenly_active[block.texts, :, block.keys] += given

    def _add_functions(self, tile: Tile, facts: TileFacts) -> None:
        block, weights, plan = tile.block, tile.weights, self._plan
        n_texts, n_heads, n_queries, n_keys = weights.shape
        flat = weights.view(n_texts, n_heads, n_queries * n_keys)
        if n_texts > 1:
            assert facts.functions is not None
            self._note("functions", torch.bmm(flat, facts.functions))
            return
        heads = flat[0]
        texts = facts.facts
        nothing = heads.new_zeros(n_heads)
        found = [nothing] * 2 * len(PAIR_FUNCTIONS)
        functions_by_name: dict[str, Tensor] = {"distance_tokens": plan.offsets_of(block).abs_()}
        if texts.embeddings is not None and "similar_token" in self._totals:
            functions_by_name["similar_token"] = plan.cosines(block, texts)[0] if facts.cosine is None else facts.cosine
        if facts.pairs is None:
            same, followed = pair_targets(texts, block.queries, block.keys)
            functions_by_name["same_token"] = same[0].to(weights.dtype)
            functions_by_name["induction"] = followed[0].to(weights.dtype)
        else:
            at, worth = facts.pairs
            found[2], found[3], found[6], found[7] = (heads.index_select(1, at) @ worth).unbind(-1)
        for name, function in functions_by_name.items():
            i = PAIR_FUNCTIONS.index(name)
            worth = function if facts.all_real else function * facts.real[0, :, None]
            found[i] = torch.mv(heads, worth.flatten())
            found[i + len(PAIR_FUNCTIONS)] = torch.mv(heads, (worth * facts.off_rest).flatten())
        self._note("functions", torch.stack(found, -1)[None])

    def _largest(self, weights: Tensor, facts: TileFacts, block: Block) -> Tensor:
        """The largest weight of each query, (text, head, query); adds up max_weight, which leaves the end out."""
        if facts.final is None:
            largest = weights.amax(-1)
            without = largest
        else:
            index = facts.final - block.keys.start
            inside = (index >= 0) & (index < weights.shape[3])
            index = index.clamp(0, weights.shape[3] - 1)
            by_key, texts = weights.permute(0, 3, 1, 2), torch.arange(len(index), device=index.device)
            there = by_key[texts, index]  # (text, head, query)
            by_key[texts, index] = there.masked_fill(inside[:, None, None], 0.0)
            without = weights.amax(-1)
            by_key[texts, index] = there
            largest = torch.maximum(without, there)
        self._note("max_weight", (without * facts.rows["max_weight"]).sum(-1))
        return largest

    def _add_places_of_the_largest(self, tile: Tile, facts: TileFacts, largest: Tensor, ties: Tensor | None) -> None:
        """Weights at the offsets; and where the largest is: at an offset, on the rarest token."""
        weights = tile.weights
        rows = facts.rows
        shared = None if ties is None else ties.clamp_(min=1).reciprocal_()
        if facts.rarest is not None and shared is not None and "rarest_token" in self._totals:
            # Where the largest weights are still stands in the scratch.
            hits = _times_columns(tile.scores, facts.rarest)
            self._note("rarest_token", (hits * shared * rows["rarest_token"]).sum(-1))
        if not self._wants["band"]:
            return
        band = weights.gather(-1, self._plan.band_index(tile.block).expand(*weights.shape[:2], -1, -1))
        if self._plan.offsets and shared is not None:
            hits = torch.eq(band, largest.unsqueeze(-1)) * shared.unsqueeze(-1)
            self._note("offsets", (hits * rows["band"]).sum(2))
        self._note("band", (band * rows["band"]).sum(2))
        self._note("band_active", band.mul_(rows["band_active"]).sum(2))

    def result(self) -> SumsOf:
        """The measures that it all comes to."""
        plan, totals, uniform = self._plan, self._totals, self._uniform
        batch, n_units = len(self._received), plan.n_units
        if self._slots:
            self._add_board(slice(0, batch * n_units), uniform)
        if n_units == 1:
            self._close_units(slice(0, batch), slice(0, batch))
        elif self._last is not None:
            self._close_units(self._last.texts, plan.units(self._last))
        evenly = plan.evenly.view(batch, n_units, *plan.evenly.shape[1:]).sum(1) if n_units > 1 else plan.evenly
        finish(totals, uniform, self._key_norms, self._of_texts, evenly, plan.counted)
        return join_totals(totals, uniform, self._wanted)

    def _close_units(self, texts: slice, units: slice) -> None:
        """Adds what follows from the mass that keys received from the queries of some units, and begins the next."""
        plan, totals = self._plan, self._totals
        received = Received(self._received[texts], plan.evenly[units], self._evenly_active[texts])
        columns = torch.stack([column[texts] for column in plan.columns.values()], -1)
        off_rest = plan.columns["active"][texts]
        totals.add_several(list(plan.columns), units, (received.mass @ columns).permute(2, 0, 1), "sum")
        if self._outlying is not None and self._slots:
            counts = self._board[units, :, self._slots["outlying"]]
            add_outlying(totals, self._uniform, units, self._outlying[texts], received, counts)
        norms = {name: norm[texts] for name, norm in self._key_norms.items()}
        add_received(totals, self._uniform, units, off_rest, received, norms)
        if plan.n_units > 1:
            self._of_texts[texts] += received.mass
            received.mass.zero_()
            received.evenly_active.zero_()

    def _add_board(self, whole: slice, uniform: Totals) -> None:
        plan, totals = self._plan, self._totals
        board = {name: self._board[..., slot] for name, slot in self._slots.items()}
        # All in one piece: number by number they would take as long as a small tile.
        sums: dict[str, Tensor] = {
            name: board[name][..., 0]
            for name in ("entropy_nats", "relative_entropy", "rms_distance_tokens", "max_weight", "rarest_token")
            if name in board
        }
        if "active" in board:
            counts, even = board["active"].permute(2, 0, 1).chunk(2)
            totals.add_several(plan.active_names, whole, counts, "count")
            uniform.add_several(plan.active_names, whole, even, "sum")
        if plan.own_text:
            sums |= self._sums_by_place(board)
        if sums:
            totals.add_several(list(sums), whole, torch.stack(list(sums.values())), "sum")
        if plan.own_text and "offsets" in board:
            totals.offset_count[:] = plan.uniform.offset_count
            totals.add_offsets(whole, board["offsets"], torch.zeros_like(board["offsets"]))

    def _sums_by_place(self, board: dict[str, Tensor]) -> dict[str, Tensor]:
        """Sums of measures that compare places in one text, (text, head) each, from what was posted."""
        sums = dict[str, Tensor]()
        for ending, start, i in (("", "mass from", 0), ("_active", "active from", 1)):
            if start in board:
                sums[f"signed_distance_tokens{ending}"] = board["ahead"][..., i] - board[start][..., 0]
            if "functions" in board:
                for j, name in enumerate(PAIR_FUNCTIONS):
                    sum_of = board["functions"][..., j + (len(PAIR_FUNCTIONS) if ending else 0)]
                    if name != "similar_token":
                        sums[name + ending] = sum_of
                    elif f"uniform similar{ending}" in board:
                        sums[name + ending] = sum_of - board[f"uniform similar{ending}"][..., 0]
            if "band" in board:
                band = board[f"band{ending}"]
                for name, offset in (("previous_token", -1), ("self_token", 0), ("next_token", 1)):
                    sums[name + ending] = band[..., offset + REACH]
                sums[f"window{ending}"] = band[..., REACH - WINDOW : REACH + WINDOW + 1].sum(-1)
        return sums


def _times_columns(weights: Tensor, column: Tensor) -> Tensor:
    """Sum over keys of weights times a number a key, (text, head, query)."""
    if weights.shape[0] == 1:
        return torch.mv(weights.view(-1, weights.shape[3]), column[0]).view(weights.shape[:3])
    return (weights * column[:, None, None]).sum(-1)
