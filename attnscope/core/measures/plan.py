"""What texts and one mask determine, whatever the weights: worked out once for layers that share a mask. Ours."""

from collections.abc import Callable, Iterator
from itertools import groupby
from typing import TypeVar, cast

import torch
from torch import Tensor

from attnscope.core.attention.precision import has_float64, sum_dtype
from attnscope.core.attention.seam import AttentionCall
from attnscope.core.attention.tiles import Block, blocks
from attnscope.core.measures.board import N_QUERY_COLUMNS, QUERY
from attnscope.core.measures.catalogue import REACH
from attnscope.core.measures.dense import add_uniform
from attnscope.core.measures.facts import OFF_REST, TextFacts, key_columns
from attnscope.core.measures.queries import BEYOND_UNIFORM, Ground, ground
from attnscope.core.measures.ranges import Ranges, spread_over
from attnscope.core.measures.totals import Totals

KEPT_NUMBERS = 16_000_000
"""Numbers by query and key that may be kept from layer to layer (64 MB); more are worked out anew."""

KEPT_A_PAIR = 8
"""Numbers that may be kept for each query and key of texts that are measured together."""

SHORT_KEYS = 64
"""Keys up to which each query is compared with each key: so few take less time than prefix sums."""

Kept = TypeVar("Kept")


class _Rows:
    """What is known of each query of a batch, by name, in one array each.

    Kept block by block, they would lie in memory between temporary arrays of the next blocks, which then find no gap
    large
    enough: a text of 32,000 tokens took gigabytes.
    """

    def __init__(self, batch: int, n_queries: int) -> None:
        self._batch, self._n_queries = batch, n_queries
        self._arrays: dict[str, Tensor] = {}

    def put(self, name: str, block: Block, part: Tensor) -> None:
        """Keeps the rows of a block, (text, mask head, query, ...)."""
        if name not in self._arrays:
            self._arrays[name] = part.new_zeros(self._batch, part.shape[1], self._n_queries, *part.shape[3:])
        self._arrays[name][block.texts, :, block.queries] = part

    def of(self, block: Block, name: str) -> Tensor:
        """The rows of a block, as a view."""
        return self._arrays[name][block.texts, :, block.queries]


class _Distinct:
    """The distinct tokens of one text, in the order in which they come.

    Attributes:
        directions: The embedding of each, (distinct token, width).
        which: Which of them each token of the text is, (token,), int64.
        n_seen: How many of them there are up to each token, itself included, (token,), int64.
    """

    def __init__(self, texts: TextFacts, dtype: torch.dtype) -> None:
        assert texts.embeddings is not None
        ids = texts.ids[0]
        distinct, which = ids.unique(return_inverse=True)  # type: ignore[no-untyped-call]  # torch's own
        positions = torch.arange(len(ids), device=ids.device)
        first = torch.full_like(distinct, len(ids)).scatter_reduce_(0, which, positions, "amin")
        first, order = first.sort()
        self.which = order.argsort()[which]
        self.n_seen = self.which.cummax(0).values + 1
        self.directions = texts.embeddings[0, first].to(dtype)


class Plan:
    """What the texts and one mask determine: tiles, uniform attention, counts, and what is known of each query.

    Attributes:
        keys: The texts of the keys.
        own_text: Whether queries are tokens of the same texts.
        offsets: Whether the offsets of largest weights are wanted.
        blocks: The tiles.
        columns: As `key_columns`, (batch, key).
        table: All of them, (batch, key, column).
        off_rest: 1 for keys outside the sinks, (batch, key).
        active_names: The `_active` measures, sorted, in the order of `active`.
        hides: Block -> whether queries may not attend to some key between their `edges`.
    """

    def __init__(
        self,
        call: AttentionCall,
        keys: TextFacts,
        queries: TextFacts,
        names: tuple[str, ...],
        *,
        own_text: bool,
        offsets: bool,
        unit: int,
    ) -> None:
        batch, _, n_queries, _ = call.query.shape
        n_keys = call.key.shape[2]
        self.keys, self.own_text, self.offsets = keys, own_text, offsets
        self.dtype = torch.promote_types(call.query.dtype, torch.float32)
        self.device = call.query.device
        mask_heads = 1 if call.mask is None else call.mask.shape[1]
        self._unit, self.n_units = unit, max(-(-n_queries // unit), 1)
        n_units = batch * self.n_units
        self.uniform = Totals(names, n_units, mask_heads)
        self.summed = sum_dtype(self.device)
        self.evenly = torch.zeros(n_units, mask_heads, n_keys, dtype=self.summed, device=self.device)
        self.counted = torch.zeros(batch, mask_heads, dtype=self.summed, device=self.device)
        self.columns = key_columns(keys, self.summed)
        self.table = torch.stack(list(self.columns.values()), -1)
        self.off_rest = self.columns[OFF_REST].to(self.dtype)
        self.rarest = None if keys.rarest is None else keys.rarest.to(self.dtype)
        self.blocks = blocks(call, unit=unit)
        self.active_names: list[str] = []
        n_numbers = batch * n_queries * n_keys * (1 if len(self.blocks) >= batch else KEPT_A_PAIR)
        self._keeps = n_numbers <= KEPT_NUMBERS
        self._texts = {texts.start: keys.part(texts) for texts in (block.texts for block in self.blocks)}
        self._ends = {start: bool((facts.final_special >= 0).any()) for start, facts in self._texts.items()}
        self._rows = _Rows(batch, n_queries)
        self.hides: dict[Block, bool] = {}
        self._all_real: dict[Block, bool] = {}
        self._kept: dict[tuple[Block, str], object] = {}
        self._of_texts: dict[tuple[int, str], object] = {}
        self._begun: dict[int, tuple[Totals, Totals]] = {}
        for span in self._spans():
            self._prepare_span(span, mask_heads, queries.asking)

    def totals(self, n_heads: int) -> tuple[Totals, Totals]:
        """What a layer's measures begin with: counts that do not depend on the head; and uniform attention, by head."""
        if n_heads not in self._begun:
            totals, uniform = Totals(self.uniform.names, *self.uniform.sum.shape[1:2], n_heads), self.uniform.copy()
            # Counts, except those of `_active`, do not depend on the head: they are those of uniform attention.
            totals.take_counts(uniform)
            uniform.widen(n_heads)
            evenly = self.evenly.view(len(self.counted), self.n_units, *self.evenly.shape[1:])
            uniform.finish_texts(evenly.sum(1), self.counted)
            self._begun[n_heads] = totals, uniform
        totals, uniform = self._begun[n_heads]
        return totals.copy(), uniform.copy()

    def units(self, block: Block) -> slice:
        """The units of evidence that a block is part of, one per text; see SumsOf."""
        texts, unit, step = block.texts, block.queries.start // self._unit, self.n_units
        return slice(texts.start * step + unit, (texts.stop - 1) * step + unit + 1, step)

    def _spans(self) -> Iterator[list[Block]]:
        """Blocks of the same texts and units, one after the other."""
        for _, span in groupby(self.blocks, lambda block: (block.texts.start, self.units(block).start)):
            yield list(span)

    def _prepare_span(self, span: list[Block], mask_heads: int, asking: Tensor) -> None:
        edges = [block.edges(self.device) for block in span]
        if self.evenly.shape[2] > SHORT_KEYS and all(edge is not None for edge in edges):
            self._prepare_ranges(span, cast("list[tuple[Tensor, Tensor]]", edges), mask_heads, asking)
            return
        for block, edge in zip(span, edges, strict=True):
            self._prepare(block, edge, mask_heads, asking)

    def _prepare_ranges(
        self, span: list[Block], edges: list[tuple[Tensor, Tensor]], mask_heads: int, asking: Tensor
    ) -> None:
        """Blocks in which no query's keys have gaps: nothing is as large as queries times keys."""
        texts, n_keys = span[0].texts, self.evenly.shape[2]
        whole = Block(texts, slice(span[0].queries.start, span[-1].queries.stop), slice(0, n_keys), None, False, None)
        n_texts = whole.shape[0]
        for block, of_block in zip(span, edges, strict=True):
            self._put_edges(block, of_block, mask_heads)
        # Edges that all queries of one block share stay one.
        wide = [block.shape[1] if len(span) > 1 else -1 for block in span]
        first, last = (
            torch.cat(
                [
                    edge[side].expand(n_texts, mask_heads, n_queries) + block.keys.start
                    for block, edge, n_queries in zip(span, edges, wide, strict=True)
                ],
                2,
            )
            for side in (0, 1)
        )
        real = asking[texts, whole.queries]
        where = self.device if has_float64(self.device) else torch.device("cpu")
        ranges = self.keep_texts(
            whole, "ranges", lambda: Ranges(self.texts_of(whole).on(where), own_text=self.own_text)
        )
        first, last = first.to(where), last.to(where)
        for block in span:
            self.hides[block] = False
        base = ranges.ground(first, last, real.to(where), whole.queries).on(self.device)
        share = (base.counted / base.n_allowed.clamp(min=1)).to(self.summed)
        first, last = (edge.to(self.device).expand(share.shape) for edge in (first, last))
        steps = self.evenly.new_zeros(*share.shape[:2], n_keys + 1)
        self.evenly[self.units(whole)] += spread_over(steps, first, last, share).cumsum(-1)[..., :n_keys]
        self._take(whole, base, real)

    def _prepare(self, block: Block, edges: tuple[Tensor, Tensor] | None, mask_heads: int, asking: Tensor) -> None:
        facts = self.texts_of(block)
        real = asking[block.texts, block.queries]
        allowed = block.allowed(self.device)
        n_texts, n_queries, n_keys = block.shape
        if allowed is None:
            allowed = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=self.device)
        self.hides[block] = edges is None
        allowed = allowed.expand(n_texts, mask_heads, -1, n_keys)
        if edges is None:  # all keys, where there is one
            last = allowed.any(-1) * n_keys
            edges = torch.zeros_like(last), last
        self._put_edges(block, edges, mask_heads)
        columns = self.keep_texts(block, "columns", lambda: key_columns(facts, self.dtype))
        base = ground(
            allowed, facts, real, (block.queries, block.keys), own_text=self.own_text, dtype=self.dtype,
            columns=columns, cosines=self.cosines(block) if self.own_text else None,
        )  # fmt: skip
        share = base.counted.to(self.dtype) / base.n_allowed.clamp(min=1)
        may = allowed.to(self.dtype)
        shared = allowed.shape[2] == 1
        self.evenly[self.units(block), :, block.keys] += (
            share.sum(-1, keepdim=True) * may[:, :, 0] if shared else (share.unsqueeze(2) @ may).squeeze(2)
        )
        self._take(block, base, real)

    def _put_edges(self, block: Block, edges: tuple[Tensor, Tensor], mask_heads: int) -> None:
        shape = block.shape[0], mask_heads, block.shape[1]
        self._rows.put("edges", block, torch.stack([edge.expand(shape) for edge in edges], -1).to(torch.int32))

    def _take(self, block: Block, base: Ground, real: Tensor) -> None:
        """Adds up uniform attention, and keeps what is known of each query."""
        add_uniform(self.uniform, self.units(block), base)
        self.uniform.settle()
        counted = base.counted.to(self.dtype)
        self.counted[block.texts] += counted.sum(-1)
        defined = {name: part.to(self.dtype) for name, part in base.defined.items()}
        self.active_names = sorted(name for name in defined if name.endswith("_active"))
        none = torch.zeros_like(counted)
        even = [defined[name] * base.even.get(name, none).to(self.dtype) for name in self.active_names]
        rows = {
            "real": real.to(self.dtype).unsqueeze(1),
            "active": torch.stack([defined[name] for name in self.active_names] + even, -1),
            "spread": counted / base.n_active.clamp(min=1).to(self.dtype),
            "worth": self._worth(block, base, counted),
        }
        for name, row in rows.items():
            self._rows.put(name, block, row)

    def _worth(self, block: Block, base: Ground, counted: Tensor) -> Tensor:
        """The columns of QUERY, (text, mask head, query, column)."""
        worth = counted.new_zeros(*counted.shape, N_QUERY_COLUMNS)
        worth[..., QUERY["counted"].start] = counted
        for statistic, numbers in base.worth.items():
            if statistic in QUERY:  # entropy is worth the same wherever it counts
                worth[..., QUERY[statistic].start] = numbers
        for name in BEYOND_UNIFORM:
            for ending, of in (("", ""), ("_active", " off rest")):
                if name + ending in base.uniform:
                    numbers = base.uniform[name + ending] * base.defined[name + ending]
                    worth[..., QUERY[f"uniform cosine{of}"].start] = numbers
        worth[..., QUERY["places"]] = base.band
        if block.shape[2]:
            off_rest = self.off_rest[block.texts, block.keys][:, self.band_index(block)].unsqueeze(1)
            worth[..., QUERY["places off rest"]] = base.band * off_rest
        return worth

    def row(self, block: Block, name: str) -> Tensor:
        """What is known of a block's queries, (text, mask head or 1, query, ...), by name.

        `real`: queries that are tokens, and not only context. `worth`: as QUERY. `active`: which queries the `_active`
        measures count, and after these the value that each has under uniform attention. `spread`: 1 / how many keys
        outside the sinks the query may attend to. `edges`: the first key that it may attend to and the one after the
        last, counted from the block's first.
        """
        return self._rows.of(block, name)

    def all_real(self, block: Block) -> bool:
        """Whether all of a block's queries are real."""
        if block not in self._all_real:
            self._all_real[block] = bool((self.row(block, "real") > 0).all())
        return self._all_real[block]

    def texts_of(self, block: Block) -> TextFacts:
        """The texts of a block's keys."""
        return self._texts[block.texts.start]

    def finals(self, block: Block) -> Tensor | None:
        """Where each text ends in a special token, (text,), int64, -1 if it does not; None if no text does."""
        return self.texts_of(block).final_special if self._ends[block.texts.start] else None

    def keep(self, block: Block, name: str, make: Callable[[], Kept]) -> Kept:
        """The value of `make` for a block, kept from layer to layer if there is room."""
        key = block, name
        value = cast("Kept", self._kept[key]) if key in self._kept else make()
        if self._keeps:
            self._kept[key] = value
        return value

    def keep_texts(self, block: Block, name: str, make: Callable[[], Kept]) -> Kept:
        """The value of `make` for a block's texts, shared with their other blocks."""
        key = block.texts.start, name
        if key not in self._of_texts:
            self._of_texts[key] = make()
        return cast("Kept", self._of_texts[key])

    def band_index(self, block: Block) -> Tensor:
        """Where in a tile's row each offset lies, (query, offset), int64, cut to the keys."""
        index: Tensor = torch.arange(block.queries.start, block.queries.stop, device=self.device)[:, None]
        index = index + torch.arange(-REACH, REACH + 1, device=self.device) - block.keys.start
        return index.clamp_(0, max(block.shape[2] - 1, 0))

    def cosines(self, block: Block) -> Tensor | None:
        """Cosines of static embeddings, (text, query, key), -1 to 1; None if embeddings are not known."""
        texts, n_keys = self.texts_of(block), block.shape[2]
        if texts.embeddings is None:
            return None

        def make() -> Tensor:
            assert texts.embeddings is not None
            if block.shape[0] == 1 and n_keys:
                distinct = self.keep_texts(block, "distinct tokens", lambda: _Distinct(texts, self.dtype))
                n_seen = int(distinct.n_seen[block.keys.stop - 1])
                if n_seen < n_keys:
                    by_token = distinct.directions[distinct.which[block.queries]] @ distinct.directions[:n_seen].mT
                    return by_token.index_select(1, distinct.which[block.keys])[None]
            directions = texts.embeddings.to(self.dtype)
            return directions[:, block.queries] @ directions[:, block.keys].mT

        return self.keep(block, "cosines", make)

    def offsets_of(self, block: Block) -> Tensor:
        """Key minus query in tokens, (query, key)."""
        q = torch.arange(block.queries.start, block.queries.stop, device=self.device, dtype=self.dtype)
        k = torch.arange(block.keys.start, block.keys.stop, device=self.device, dtype=self.dtype)
        return k - q[:, None]
