"""Attention from zone to zone: how much the queries of one zone of a text give to the keys of another.

    mass[a, b] = sum over queries q in a, keys k in b of A_qk
    even[a, b] = the same under uniform attention over the keys that the mask allows
    count[a, b] = how many queries in a may attend to some key in b

Ours. Knows no names: zones are columns of a table.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from attnscope.core.attention.precision import sum_dtype
from attnscope.core.attention.seam import AttentionCall
from attnscope.core.attention.tile_probe import TileProbe
from attnscope.core.attention.tiles import Block, Buffers


@dataclass(frozen=True, eq=False)
class ZoneFacts:
    """Where the zones of a padded batch of texts are.

    Attributes:
        zones: Whether a token is in a zone; padding is in none.
        real: True = a token, False = padding.
        asking: The tokens that count as queries.
    """

    zones: Bool[Tensor, "text token zone"]
    real: Bool[Tensor, "text token"]
    asking: Bool[Tensor, "text token"]


@dataclass(frozen=True, eq=False)
class ZoneSums:
    """What zones give to zones in one layer: the sums above, each (text, head, zone of queries, zone of keys)."""

    mass: Float[Tensor, "text head zone zone"]
    even: Float[Tensor, "text head zone zone"]
    count: Float[Tensor, "text head zone zone"]


class Zones(TileProbe[ZoneSums]):
    """Adds up what zones give to zones in every layer, in memory that grows with the length of the texts alone."""

    def __init__(self, facts: ZoneFacts, buffers: Buffers | None = None) -> None:
        super().__init__(buffers)
        self._facts = facts

    def _reader(self, call: AttentionCall) -> "_ZoneReader":
        n_texts, _, n_queries, _ = call.query.shape
        if self._facts.real.shape != (n_texts, n_queries) or call.key.shape[2] != n_queries:
            raise ValueError(
                f"{call.kind} layer {call.layer} has {n_texts} texts of {n_queries} queries and {call.key.shape[2]} "
                f"keys; the zones are of {tuple(self._facts.real.shape)}"
            )
        return _ZoneReader(self._facts, call.n_heads, call.query.device)


@torch.no_grad()
def zones_of_weights(weights: Float[Tensor, "text head query key"], facts: ZoneFacts) -> ZoneSums:
    """The same from dense weights. A query may attend to a key if any head puts weight there."""
    reader = _ZoneReader(facts, weights.shape[1], weights.device)
    reader.add(Block.whole(weights, (weights > 0).any(1, keepdim=True)), weights)
    return reader.result()


class _ZoneReader:
    """One attention's sums, block by block."""

    blocks: list[Block] | None = None

    def __init__(self, facts: ZoneFacts, n_heads: int, device: torch.device) -> None:
        self._zones, self._real = facts.zones.to(device), facts.real.to(device)
        self._asks = (facts.zones & facts.asking[..., None]).to(device, sum_dtype(device)).mT
        n_texts, _, n_zones = facts.zones.shape
        shape = n_texts, n_heads, n_zones, n_zones
        self._sums = ZoneSums(*(torch.zeros(shape, dtype=self._asks.dtype, device=device) for _ in range(3)))

    def add(self, block: Block, weights: Tensor) -> None:
        """Adds the weights of a block, (text, head, query, key)."""
        weights = weights.to(torch.promote_types(weights.dtype, torch.float32))
        keys = self._zones[block.texts, block.keys, :].to(weights.dtype)[:, None]
        asks = self._asks[block.texts, :, block.queries][:, None]
        may = self._real[block.texts, None, None, block.keys]
        if (allowed := block.allowed(weights.device)) is not None:
            may = allowed & may
        seen = (may.to(weights.dtype) @ keys).expand(-1, -1, asks.shape[-1], -1).to(asks.dtype)
        n_seen = may.sum(-1, keepdim=True).clamp(min=1)
        for part, rows in (("mass", (weights @ keys).to(asks.dtype)), ("even", seen / n_seen), ("count", seen > 0)):
            getattr(self._sums, part)[block.texts] += asks @ rows.to(asks.dtype)

    def result(self) -> ZoneSums:
        """The sums over all queries."""
        return self._sums
