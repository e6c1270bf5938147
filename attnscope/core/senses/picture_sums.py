"""The probe that measures heads on a picture, tile by tile, without keeping a map. Ours.

Masses on keys are one product with a column for each. Functions of query and key (distances, likeness) are worked out
for each tile, once for all heads. Uniform attention is added up likewise, as one head, once per picture.
"""

import math

import numpy as np
import torch
from torch import Tensor

from attnscope.core.attention.precision import has_float64, sum_dtype
from attnscope.core.attention.seam import AttentionCall
from attnscope.core.attention.tiles import Tile
from attnscope.core.senses.picture_measures import PICTURE_MEASURES, PictureFacts
from attnscope.core.senses.sums import HeadSums, SenseSums

_ROWS = 64
"""Queries at a time of uniform attention."""


class PictureSums(SenseSums[PictureFacts, Tensor]):
    """Adds up the measures of PICTURE_MEASURES, in memory that grows with the number of patches alone."""

    input_name = "picture"

    def __init__(self, facts: PictureFacts) -> None:
        super().__init__(facts)
        self._columns: Tensor | None = None

    def _begin(self, call: AttentionCall) -> None:
        if call.mask is not None or call.is_causal or call.window is not None:
            raise ValueError(f"layer {call.layer} hides some patches of the picture from others")
        n_tokens = self._facts.n_before + self._facts.n_patches
        shape = (*call.query.shape[:3], call.key.shape[2])
        if shape[0] != 1 or shape[2:] != (n_tokens, n_tokens):
            raise ValueError(f"layer {call.layer} is {shape}; the facts are of 1 picture of {n_tokens} tokens")

    def _measure_uniform(self, call: AttentionCall) -> HeadSums:
        n_tokens, device = call.key.shape[2], call.query.device
        parts = []
        for first in range(0, n_tokens, _ROWS):
            n = min(_ROWS, n_tokens - first)
            weights = torch.full((1, n, n_tokens), 1 / n_tokens, dtype=sum_dtype(device), device=device)
            parts.append(self.sums_of(weights, weights.new_full((1, n), math.log(n_tokens)), first))
        return self._conclude(parts)

    def _read_tile(self, tile: Tile) -> Tensor:
        entropies = tile.entropies(tile.log_sum_exp(tile.weights.amax(-1)))
        return self.sums_of(tile.weights[0], entropies[0], tile.block.queries.start)

    def _conclude(self, parts: list[Tensor]) -> HeadSums:
        return HeadSums(*sum(parts[1:], parts[0]).cpu().double().numpy())

    def sums_of(self, weights: Tensor, entropies: Tensor, first: int) -> Tensor:
        """Sums and counts of the queries from `first` on, (2, measure, head), in the units of PICTURE_MEASURES.

        Weights are (head, query, key), entropies (head, query). The sums are float32 or better.
        """
        facts, summed = self._facts, sum_dtype(weights.device)
        n_queries = weights.shape[1]
        by_key = (weights @ self._key_columns(weights)).to(summed)
        on_patches, resting, on_cls, on_registers, on_edges = by_key.unbind(-1)
        largest = weights[..., facts.n_before :].amax(-1)
        ones, none = torch.ones_like(on_patches), torch.zeros_like(on_patches)
        has_cls, has_registers, has_edges = facts.cls is not None, bool(facts.registers), facts.edges is not None
        rows = {
            "max_weight": (largest, on_patches),
            "entropy_nats": (entropies, ones),
            "resting": (resting, ones),
            "cls": (on_cls, ones if has_cls else none),
            "registers": (on_registers, ones if has_registers else none),
            "edges": (on_edges, on_patches if has_edges else none),
        }
        totals = torch.zeros(2, len(PICTURE_MEASURES), len(weights), dtype=summed, device=weights.device)
        start = min(max(facts.n_before - first, 0), n_queries)
        cls_row = facts.cls - first if facts.cls is not None else -1
        for number, name in enumerate(PICTURE_MEASURES):
            row = rows.get(name.removesuffix("_from_cls"))
            if row is None:
                continue
            for part, numbers in enumerate(row):
                if not name.endswith("_from_cls"):
                    totals[part, number] = numbers[:, start:].sum(-1, dtype=summed)
                elif 0 <= cls_row < n_queries:
                    totals[part, number] = numbers[:, cls_row].to(summed)
        if start < n_queries:
            self._add_places(totals, weights[:, start:], on_patches[:, start:], first + start - facts.n_before)
        return totals

    def _add_places(self, totals: Tensor, weights: Tensor, on_patches: Tensor, first: int) -> None:
        """Adds the measures that compare positions or colours: of patch queries, from patch `first` on."""
        facts, summed = self._facts, totals.dtype
        own = torch.diagonal(weights, facts.n_before + first, 1, 2).sum(-1, dtype=summed)
        functions = self._functions(first, weights.shape[1], weights)
        among = weights[..., facts.n_before :]
        # Sums over keys first, then over queries in the precision of sums.
        masses = torch.bmm(among.transpose(0, 1), functions).sum(0, dtype=summed).T
        mass = on_patches.sum(-1)
        numbers_of = {name: number for number, name in enumerate(PICTURE_MEASURES)}
        sums = dict(zip(_FUNCTIONS, masses, strict=True)) | {"self_patch": own}
        for name, numbers in sums.items():
            totals[0, numbers_of[name]] = numbers
            totals[1, numbers_of[name]] = mass - own if name == "similar_colour" else mass

    def _key_columns(self, like: Tensor) -> Tensor:
        """What keys are worth, (key, column): patches, others, [CLS], registers, edges."""
        if self._columns is None or self._columns.dtype != like.dtype:
            facts = self._facts
            columns = np.zeros((facts.n_before + facts.n_patches, 5))
            columns[facts.n_before :, 0] = 1
            columns[: facts.n_before, 1] = 1
            if facts.cls is not None:
                columns[facts.cls, 2] = 1
            columns[list(facts.registers), 3] = 1
            if facts.edges is not None:
                columns[facts.n_before :, 4] = facts.edges
            self._columns = torch.from_numpy(columns).to(like.dtype).to(like.device)
        return self._columns

    def _functions(self, first: int, n: int, like: Tensor) -> Tensor:
        """_FUNCTIONS of n patches as queries, and all patches as keys: (query, key, function)."""
        facts, device = self._facts, like.device
        patches = torch.arange(facts.n_patches, device=device)
        queries = patches[first : first + n]
        row, column = patches // facts.grid[1], patches % facts.grid[1]
        rows, columns = ((part[queries][:, None] - part).abs() for part in (row, column))
        apart = rows.to(like.dtype), columns.to(like.dtype)
        near = (rows <= 1) & (columns <= 1) & (rows + columns > 0)
        # Distances are compared as they were sorted: in float64, wherever that is.
        where = device if has_float64(device) else torch.device("cpu")
        colours = torch.from_numpy(facts.colours).to(where)
        reach = torch.from_numpy(facts.reach).to(where)[first : first + n, None]
        asking = colours[first : first + n]
        squares = sum(((asking[:, None, c] - colours[None, :, c]).square() for c in range(3)), colours.new_zeros(()))
        similar = (squares <= reach).to(device) & (rows + columns > 0)
        return torch.stack([torch.hypot(*apart), *apart, near.to(like.dtype), similar.to(like.dtype)], -1)


_FUNCTIONS = ("distance_patches", "rows_apart_patches", "columns_apart_patches", "near_patches", "similar_colour")
"""Measures that are a function of query and key."""
