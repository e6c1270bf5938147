"""What texts and one mask determine, whatever the weights: worked out once for layers that share a mask. Ours."""

from dataclasses import dataclass

import torch
from torch import Tensor

from attnscope.core.attention import AttentionCall
from attnscope.core.measures.catalogue import REACH
from attnscope.core.measures.dense import add_uniform, uniform_likeness
from attnscope.core.measures.facts import TextFacts, key_columns, pair_targets
from attnscope.core.measures.queries import ground
from attnscope.core.measures.totals import Totals
from attnscope.core.precision import sum_dtype
from attnscope.core.tiles import Block, blocks

KEPT_NUMBERS = 16_000_000
"""Numbers by query and key that may be kept from layer to layer (64 MB); beyond, they are worked out anew."""

SHORT_LIST = 8
"""Pairs of tokens are read one by one while they are at most one in so many of a tile."""


@dataclass(frozen=True, eq=False)
class TileFacts:
    """What the queries and keys of one block are, whatever the head; views of what the plan holds of the whole batch.

    Attributes:
        facts: Of the block's texts.
        rows: By name, as _Rows holds them: `real`, queries that are tokens, and no mere context, (text, 1, query);
            `counted`, as Ground's, as numbers; `max_weight`, likewise defined; `rarest_token`, 1 / how many of the
            rarest tokens the query may attend to, where it is defined; `inverse_log`, 1 / ln n_q where relative_entropy
            is defined, (text, mask head, query); `active`, which queries the `_active` measures count, and after these
            the value that each has under uniform attention, (text, mask head, query, 2 * name); `spread`, 1 / how many
            keys that nobody rests on the query may attend to; `similar`, similar_token under uniform attention
            and its `_active`, (text, mask head, query, 2); `band`, which offsets a query may attend to, (text, mask
            head, query, offset), and `band_active`, those off resting keys.
        all_real: Whether all queries are real.
        pairs: Same token and induction, both without and with resting keys' columns left out, as (places in the tile,
            (pair, 4) worths) for one text with few; None otherwise.
        functions: (text, query * key, function) of a block of several texts; None for one text.
        cosine: Cosines of static embeddings, (query, key), of a block of one text, where they may be kept.
        off_rest: 1 for keys that nobody rests on, (text, key).
        rarest: 1 for the rarest tokens, (text, key); None where they are unknown.
        final: Where each text ends in a special token, (text,), by key of the tile; None if none does.
    """

    facts: TextFacts
    rows: dict[str, Tensor]
    all_real: bool
    pairs: tuple[Tensor, Tensor] | None
    functions: Tensor | None
    cosine: Tensor | None
    off_rest: Tensor
    rarest: Tensor | None
    final: Tensor | None

    @property
    def real(self) -> Tensor:
        """(text, query)."""
        return self.rows["real"][:, 0]


class _Rows:
    """What is known of each query of a batch, by name; in one array each.

    Kept block by block they would lie in memory between what the next blocks need for a moment, which then finds no
    gap large enough: a text of 32,000 tokens took gigabytes so.
    """

    def __init__(self, batch: int, n_queries: int) -> None:
        self._batch, self._n_queries = batch, n_queries
        self._arrays: dict[str, Tensor] = {}

    def put(self, name: str, block: Block, part: Tensor) -> None:
        """Keeps a block's, (text, mask head, query, ...)."""
        if name not in self._arrays:
            self._arrays[name] = part.new_zeros(self._batch, part.shape[1], self._n_queries, *part.shape[3:])
        self._arrays[name][block.texts, :, block.queries] = part

    def of(self, block: Block) -> dict[str, Tensor]:
        """A block's, as views."""
        return {name: array[block.texts, :, block.queries] for name, array in self._arrays.items()}


PAIR_FUNCTIONS = ("distance_tokens", "similar_token", "same_token", "induction")
"""Measures that are a function of query and key, each followed by its `_active` wherever they stand in a row."""


class Plan:
    """What the texts and one mask determine: tiles, uniform attention, counts, lists of like tokens."""

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
        mask_heads = 1 if call.mask is None or call.mask.ndim < 3 else call.mask.shape[-3]
        self._unit, self.n_units = unit, max(-(-n_queries // unit), 1)
        n_units = batch * self.n_units
        self.uniform = Totals(names, n_units, mask_heads)
        self.summed = sum_dtype(self.device)
        self.evenly = torch.zeros(n_units, mask_heads, n_keys, dtype=self.summed, device=self.device)
        self.counted = torch.zeros(batch, mask_heads, dtype=self.summed, device=self.device)
        self.columns = key_columns(keys, self.summed)
        self.off_rest = self.columns["active"].to(self.dtype)
        self._rarest = None if keys.rarest is None else keys.rarest.to(self.dtype)
        self.blocks = blocks(call, unit=unit)
        self.active_names: list[str] = []
        kept = batch * n_queries * n_keys * (1 if len(self.blocks) >= batch else 2 * len(PAIR_FUNCTIONS))
        self._keeps = kept <= KEPT_NUMBERS
        self._texts = {texts.start: keys.part(texts) for texts in (block.texts for block in self.blocks)}
        self._ends = {start: bool((facts.final_special >= 0).any()) for start, facts in self._texts.items()}
        self._rows = _Rows(batch, n_queries)
        self._all_real: dict[Block, bool] = {}
        self._kept: dict[Block, tuple[tuple[Tensor, Tensor] | None, Tensor | None, Tensor | None]] = {}
        columns = {start: key_columns(facts, self.dtype) for start, facts in self._texts.items()}
        for block in self.blocks:
            self._prepare(block, mask_heads, queries.asking, columns[block.texts.start])

    def units(self, block: Block) -> slice:
        """The units of evidence that a block is part of, one a text; see SumsOf."""
        texts, unit, step = block.texts, block.queries.start // self._unit, self.n_units
        return slice(texts.start * step + unit, (texts.stop - 1) * step + unit + 1, step)

    def _prepare(self, block: Block, mask_heads: int, asking: Tensor, columns: dict[str, Tensor]) -> None:
        facts = self._texts[block.texts.start]
        real = asking[block.texts, block.queries]
        allowed = block.allowed(self.device)
        n_texts, n_queries, n_keys = block.shape
        if allowed is None:
            allowed = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=self.device)
        allowed = allowed.expand(n_texts, mask_heads, n_queries, n_keys)
        cosines = self.cosines(block, facts) if self.own_text and facts.embeddings is not None else None
        given = ground(
            allowed, facts, real, block.queries, block.keys, own_text=self.own_text, dtype=self.dtype, columns=columns,
            cosines=cosines,
        )  # fmt: skip
        units = self.units(block)
        band = add_uniform(self.uniform, units, given)
        self.uniform.settle()
        counted = given.counted.to(self.dtype)
        share = counted / given.n_allowed.clamp(min=1)
        self.evenly[units, :, block.keys] += (share.unsqueeze(2) @ allowed.to(self.dtype)).squeeze(2)
        self.counted[block.texts] += counted.sum(-1)
        defined = {name: part.to(self.dtype) for name, part in given.defined.items()}
        self.active_names = [name for name in defined if name.endswith("_active")]
        uniform = given.uniform | uniform_likeness(given)
        even = [defined[name] * uniform.get(name, defined[name].new_zeros(())) for name in self.active_names]
        rows = {
            "real": real.to(self.dtype).unsqueeze(1),
            "counted": counted,
            "max_weight": defined["max_weight"],
            "inverse_log": defined["relative_entropy"] / given.n_allowed.clamp(min=2).log(),
            "active": torch.stack([defined[name] for name in self.active_names] + even, -1),
            "spread": counted / given.n_active.clamp(min=1),
            "band": band,
            "band_active": band,
        }
        if n_keys:
            off_rest = self.off_rest[block.texts, block.keys]
            rows["band_active"] = band * off_rest[:, self.band_index(block)].unsqueeze(1)
        if given.n_rarest is not None:
            rows["rarest_token"] = defined["rarest_token"] / given.n_rarest.clamp(min=1)
        if "similar_token" in given.uniform:
            both = ("similar_token", "similar_token_active")
            rows["similar"] = torch.stack([given.uniform[name] * given.defined[name] for name in both], -1)
        for name, row in rows.items():
            self._rows.put(name, block, row)
        self._all_real[block] = bool(real.all())
        if self._keeps:
            cosine = cosines[0] if cosines is not None and n_texts == 1 else None
            self._kept[block] = *self._functions(block, facts, real, cosines), cosine

    def facts_of(self, block: Block) -> TileFacts:
        """What is known of a block."""
        facts, off_rest = self._texts[block.texts.start], self.off_rest[block.texts, block.keys]
        rows = self._rows.of(block)
        if block in self._kept:
            pairs, functions, cosine = self._kept[block]
        else:
            (pairs, functions), cosine = self._functions(block, facts, rows["real"][:, 0] > 0, None), None
        final = facts.final_special if self._ends[block.texts.start] else None
        rarest = None if self._rarest is None else self._rarest[block.texts, block.keys]
        return TileFacts(facts, rows, self._all_real[block], pairs, functions, cosine, off_rest, rarest, final)

    def band_index(self, block: Block) -> Tensor:
        """Where in a tile's row each offset lies, (query, offset), int64, at least 0 and within the keys."""
        index: Tensor = torch.arange(block.queries.start, block.queries.stop, device=self.device)[:, None]
        index = index + torch.arange(-REACH, REACH + 1, device=self.device) - block.keys.start
        return index.clamp_(0, max(block.shape[2] - 1, 0))

    def _functions(
        self, block: Block, facts: TextFacts, real: Tensor, cosines: Tensor | None
    ) -> tuple[tuple[Tensor, Tensor] | None, Tensor | None]:
        """Like tokens as a short list, or all functions as one array: see TileFacts."""
        if not self.own_text:
            return None, None
        off_rest = self.off_rest[block.texts, block.keys]
        if block.shape[0] > 1:
            return None, self._function_values(block, facts, real, off_rest, cosines).flatten(1, 2)
        same, followed = (pair & real[..., None] for pair in pair_targets(facts, block.queries, block.keys))
        places = (same | followed).flatten().nonzero().squeeze(-1)
        if len(places) * SHORT_LIST > same.numel():
            return None, None
        worth = torch.stack([same.flatten()[places], followed.flatten()[places]], -1).to(self.dtype)
        off = off_rest[0, places % max(block.shape[2], 1)][:, None]
        return (places, torch.cat([worth, worth * off], -1)), None

    def cosines(self, block: Block, facts: TextFacts) -> Tensor:
        """Cosines of static embeddings, (text, query, key), -1 to 1."""
        assert facts.embeddings is not None
        directions = facts.embeddings.to(self.dtype)
        return directions[:, block.queries] @ directions[:, block.keys].mT

    def offsets_of(self, block: Block) -> Tensor:
        """Key minus query in tokens, (query, key)."""
        q = torch.arange(block.queries.start, block.queries.stop, device=self.device, dtype=self.dtype)
        k = torch.arange(block.keys.start, block.keys.stop, device=self.device, dtype=self.dtype)
        return k - q[:, None]

    def _function_values(
        self, block: Block, facts: TextFacts, real: Tensor, off_rest: Tensor, cosines: Tensor | None
    ) -> Tensor:
        """PAIR_FUNCTIONS with and without resting keys, (text, query, key, 2 * function); 0 for padded queries.

        Args:
            block: The tile.
            facts: Of its texts.
            real: As TileFacts's.
            off_rest: As TileFacts's.
            cosines: Those of the block where they are known already.
        """
        n_functions = len(PAIR_FUNCTIONS)
        n_texts, n_queries, n_keys = block.shape
        # Filled in place: a copy or two of it would be the largest things that a batch of short texts needs.
        values = torch.zeros(n_texts, n_queries, n_keys, 2 * n_functions, dtype=self.dtype, device=self.device)
        values[..., 0] = self.offsets_of(block).abs_()
        if cosines is not None or facts.embeddings is not None:
            values[..., 1] = self.cosines(block, facts) if cosines is None else cosines
        values[..., 2], values[..., 3] = pair_targets(facts, block.queries, block.keys)
        torch.mul(values[..., :n_functions], off_rest[:, None, :, None], out=values[..., n_functions:])
        return values.mul_(real[..., None, None])
