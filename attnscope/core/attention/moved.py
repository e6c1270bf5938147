"""What a head moves from some keys onto the logit of a token: its weights, times what each key's value does to it.

The part of a head's output that comes from key k is A_qk v_k. Along the slope g of a logit (by how much it rises with
the head's output) that is A_qk (v_k · g). Summed over the keys that hold a token, it tells what the head copies from
that token, whatever else it writes.

Source: Elhage et al. 2021 (the OV circuit moves what is at a key); for name movers and copy suppression: Wang et al.
2023, McDougall et al. 2023, section 3. The comparison with another token and with even attention is ours.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from attnscope.core.attention.seam import AttentionCall
from attnscope.core.attention.tiles import Tile, tiles

NOTHING = -1
"""In place of a token number: no token is moved onto there."""


@dataclass(frozen=True, eq=False)
class Targets:
    """Onto which token heads may move something at each query, and from which keys.

    Attributes:
        ids: Token numbers of the keys.
        sinks: Special tokens and the first; nothing is moved from these keys.
        token: The token whose logit counts; it may be moved from its own occurrences.
        other: Another token that occurs as often, for comparison.
        after: Only from keys that come after this token and that are not the query itself; None = from all that hold
            the token.
    """

    ids: Int[Tensor, "batch key"]
    sinks: Bool[Tensor, "batch key"]
    token: Int[Tensor, "batch query"]
    other: Int[Tensor, "batch query"]
    after: Int[Tensor, "batch query"] | None = None

    def keys(self, tile: Tile, token: Int[Tensor, "batch query"]) -> Float[Tensor, "text 1 query key"]:
        """1 where a key of a tile holds the query's token, else 0."""
        block = tile.block
        positions = torch.arange(self.ids.shape[1], device=self.ids.device)
        holds: Tensor = self.ids[block.texts, None, block.keys] == token[block.texts, block.queries, None]
        holds &= ~self.sinks[block.texts, None, block.keys]
        if self.after is not None and token is self.token:
            before = self.ids.roll(1, 1)
            holds &= before[block.texts, None, block.keys] == self.after[block.texts, block.queries, None]
            holds &= positions[block.keys] != positions[block.queries, None]
        return holds[:, None].to(tile.weights.dtype)


@dataclass(frozen=True, eq=False)
class Moved:
    """What heads move, each (batch, head, query).

    Even attention gives the same weight to each key that the mask allows. `even_above` and `even_nats` take the head's
    weight off the sinks and spread it evenly over the other keys.

    Attributes:
        active: The weight off the sinks.
        even_active: The same under even attention over all keys.
        weight: The weight on the keys that hold the token, 0 to 1.
        even_weight: The same under even attention over all keys.
        above: `weight`, less the weight on the keys that hold the other token.
        even_above: The same under even attention.
        nats: By how much what comes from the token's keys raises its logit above the other token's.
        even_nats: The same under even attention.
        even_whole: By how much the head as a whole raises the token's logit under even attention over all keys.
    """

    active: Tensor
    even_active: Tensor
    weight: Tensor
    even_weight: Tensor
    above: Tensor
    even_above: Tensor
    nats: Tensor
    even_nats: Tensor
    even_whole: Tensor


def measure_moves(
    call: AttentionCall,
    targets: Targets,
    slope: Float[Tensor, "batch head query d_value"],
    other_slope: Float[Tensor, "batch head query d_value"],
) -> Moved:
    """What the heads of an attention move onto tokens' logits from where these stand, tile by tile.

        weight = Σ_k∈S A_qk,  above = weight - Σ_k∈S' A_qk,  nats = Σ_k∈S A_qk v_k · (g - g')

    S are the keys that hold the token, S' those that hold the other one; g, g' the slopes of their logits. Under even
    attention A_qk is 1 / the number of keys that q may attend to. Memory is that of a tile and of the result.

    Args:
        call: The attention.
        targets: The tokens; queries without a token give zeros.
        slope: By how much the token's logit rises with what each head puts out.
        other_slope: The same for the other token.

    Returns:
        float32 (float64 for float64 queries); logits in nats. Queries that may attend to nothing have zeros.
    """
    shape = call.query.shape[:3]
    dtype = torch.promote_types(call.query.dtype, torch.float32)
    sums = Moved(*(torch.zeros(shape, dtype=dtype, device=call.query.device) for _ in range(9)))
    for tile in tiles(call):
        at = (tile.block.texts, slice(None), tile.block.queries)
        holds, holds_other = targets.keys(tile, targets.token), targets.keys(tile, targets.other)
        works = ~targets.sinks[tile.block.texts, None, None, tile.block.keys]
        active = (tile.weights * works).sum(-1)
        sums.active[at] = active
        even, even_off = _even(tile), _even(tile, works) * active[..., None]
        onto, onto_other = (_along_values(call, tile, slopes[at].to(dtype)) for slopes in (slope, other_slope))
        apart, gained = holds - holds_other, (onto - onto_other) * holds
        sums.even_active[at] = (even * works).sum(-1)
        sums.weight[at], sums.even_weight[at] = (tile.weights * holds).sum(-1), (even * holds).sum(-1)
        sums.above[at], sums.even_above[at] = (tile.weights * apart).sum(-1), (even_off * apart).sum(-1)
        sums.nats[at], sums.even_nats[at] = (tile.weights * gained).sum(-1), (even_off * gained).sum(-1)
        sums.even_whole[at] = (even * onto).sum(-1)
    return sums


def _even(tile: Tile, among: Tensor | None = None) -> Tensor:
    """The same weight on each key that may be attended to, or on those `among` them; broadcastable to weights."""
    n_keys = tile.weights.shape[-1]
    may = tile.block.allowed(tile.weights.device)
    if may is None:
        may = torch.ones(1, 1, 1, n_keys, dtype=torch.bool, device=tile.weights.device)
    may = may.expand(*may.shape[:-1], n_keys) if among is None else may & among
    counted = may.to(tile.weights.dtype)
    return counted / counted.sum(-1, keepdim=True).clamp(min=1)


def _along_values(call: AttentionCall, tile: Tile, slope: Tensor) -> Tensor:
    """v_k · g of each head, query and key of a tile, (text, head, query, key)."""
    n_texts, n_heads, n_queries, width = slope.shape
    values = call.value[tile.block.texts, :, tile.block.keys].to(slope.dtype)
    rows = slope.reshape(n_texts, call.n_kv_heads, n_heads // call.n_kv_heads * n_queries, width)
    return (rows @ values.mT).reshape(n_texts, n_heads, n_queries, values.shape[2])
