"""The probe that measures heads on a picture, tile by tile, without keeping a map. Ours.

Masses on keys are one product with a column for each; functions of query and key (distances, likeness) are worked out
for the tile at hand, once for all heads. Uniform attention is added up likewise, as one head, once a picture.
"""

import math

import numpy as np
import torch
from torch import Tensor

from attnscope.core.attention.precision import has_float64, sum_dtype
from attnscope.core.attention.seam import AttentionCall, Kind
from attnscope.core.attention.tile_probe import TileProbe
from attnscope.core.attention.tiles import Tile
from attnscope.core.measures.totals import HeadSums
from attnscope.core.senses.picture_measures import PICTURE_MEASURES, PictureFacts

_ROWS = 64
"""Queries at a time of weights that came whole."""


class PictureSums(TileProbe[HeadSums]):
    """Adds up the picture measures of every layer, in memory that grows with the number of patches alone.

    One forward pass on one picture. No gradient flows through its output.

    Args:
        facts: What is known of the picture.

    Attributes:
        sums: Kind -> layer -> the measures of its heads, as PICTURE_MEASURES, in the order in which layers came.
        uniform: The same of one head that attends to all keys alike; None before the first layer.
    """

    input_name = "picture"

    def __init__(self, facts: PictureFacts) -> None:
        super().__init__()
        self.uniform: HeadSums | None = None
        self._facts = facts
        self._columns: Tensor | None = None

    def _reader(self, call: AttentionCall) -> "_Reader":
        if call.mask is not None or call.is_causal or call.window is not None:
            raise ValueError(f"layer {call.layer} hides some patches of the picture from others")
        batch, n_heads, n_queries, _ = call.query.shape
        shape = (batch, n_heads, n_queries, call.key.shape[2])
        return _Reader(self, self._begin(call.layer, shape, call.query.device))

    @torch.no_grad()
    def keep(self, kind: Kind, layer: int, weights: Tensor) -> None:
        """Adds up a layer of which an engine has computed the weights by itself.

        Args:
            kind: Kind of the attention.
            layer: Its layer.
            weights: (1, n_heads, query, key).

        Raises:
            RuntimeError: The layer has been here already.
            ValueError: As of a call.
        """
        self.require_new(kind, layer)
        added = self._begin(layer, tuple(weights.shape), weights.device)
        for first in range(0, weights.shape[2], _ROWS):
            part = weights[0, :, first : first + _ROWS].to(torch.promote_types(weights.dtype, torch.float32))
            added += self.sums_of(part, torch.special.entr(part).sum(-1), first)
        self.sums.setdefault(kind, {})[layer] = to_head_sums(added)

    def _begin(self, layer: int, shape: tuple[int, ...], device: torch.device) -> Tensor:
        """Sums and counts of nothing, (2, measure, head); those of uniform attention are added up the first time."""
        n_tokens = self._facts.n_before + self._facts.n_patches
        if shape[0] != 1 or shape[2:] != (n_tokens, n_tokens):
            raise ValueError(f"layer {layer} is {shape}; the facts are of 1 picture of {n_tokens} tokens")
        empty = torch.zeros(2, len(PICTURE_MEASURES), shape[1], dtype=sum_dtype(device), device=device)
        if self.uniform is None:
            even = empty[:, :, :1].clone()
            for first in range(0, n_tokens, _ROWS):
                n = min(_ROWS, n_tokens - first)
                weights = torch.full((1, n, n_tokens), 1 / n_tokens, dtype=empty.dtype, device=device)
                even += self.sums_of(weights, weights.new_full((1, n), math.log(n_tokens)), first)
            self.uniform = to_head_sums(even)
        return empty

    def sums_of(self, weights: Tensor, entropies: Tensor, first: int) -> Tensor:
        """Sums and counts of some queries, (2, measure, head), in the units of PICTURE_MEASURES; float32 or better.

        Args:
            weights: (head, query, key).
            entropies: (head, query).
            first: Which query comes first.
        """
        facts, summed = self._facts, sum_dtype(weights.device)
        n_heads, n_queries, _ = weights.shape
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
        found = torch.zeros(2, len(PICTURE_MEASURES), n_heads, dtype=summed, device=weights.device)
        start = min(max(facts.n_before - first, 0), n_queries)
        cls_row = facts.cls - first if facts.cls is not None else -1
        for number, name in enumerate(PICTURE_MEASURES):
            row = rows.get(name.removesuffix("_from_cls"))
            if row is None:
                continue
            for part, numbers in enumerate(row):
                if not name.endswith("_from_cls"):
                    found[part, number] = numbers[:, start:].sum(-1, dtype=summed)
                elif 0 <= cls_row < n_queries:
                    found[part, number] = numbers[:, cls_row].to(summed)
        if start < n_queries:
            self._add_places(found, weights[:, start:], on_patches[:, start:], first + start - facts.n_before)
        return found

    def _add_places(self, found: Tensor, weights: Tensor, on_patches: Tensor, first: int) -> None:
        """Adds the measures that compare positions or colours: of patch queries, from patch `first` on."""
        facts, summed = self._facts, found.dtype
        n_heads, n_queries, _ = weights.shape
        own = torch.diagonal(weights, facts.n_before + first, 1, 2).sum(-1, dtype=summed)
        functions = self._functions(first, n_queries, weights)
        among = weights[..., facts.n_before :]
        # Sums over keys first, then over queries in the precision of sums.
        masses = torch.bmm(among.transpose(0, 1), functions).sum(0, dtype=summed).T
        mass = on_patches.sum(-1)
        numbers_of = {name: number for number, name in enumerate(PICTURE_MEASURES)}
        sums = dict(zip(_FUNCTIONS, masses, strict=True)) | {"self_patch": own}
        for name, numbers in sums.items():
            found[0, numbers_of[name]] = numbers
            found[1, numbers_of[name]] = mass - own if name == "similar_colour" else mass

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


class _Reader:
    """One layer's sums, tile by tile."""

    blocks = None

    def __init__(self, probe: PictureSums, empty: Tensor) -> None:
        self._probe, self._added = probe, empty

    def add(self, tile: Tile) -> None:
        """Adds one tile; overwrites its scores."""
        entropies = tile.entropies(tile.log_sum_exp(tile.weights.amax(-1)))
        self._added += self._probe.sums_of(tile.weights[0], entropies[0], tile.block.queries.start)

    def result(self) -> HeadSums:
        """The sums over all tiles."""
        return to_head_sums(self._added)


def to_head_sums(added: Tensor) -> HeadSums:
    """Sums and counts, (2, measure, head), as they leave the device."""
    return HeadSums(*added.cpu().double().numpy())
