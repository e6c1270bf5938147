"""Attention on long texts: maps pooled to a grid, what each key receives, each query's entropy, and far links."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from attnscope.records.frame.checks import NUMBER, shaped
from attnscope.records.frame.codec import ARRAY
from attnscope.records.maps.head_maps import KIND, OF_KINDS, HeadMaps, MapsRecord
from attnscope.records.maps.tokens import Tokens

POOLS = ("mean", "max")


class Link(NamedTuple):
    """A weight between two tokens that are far apart: places of query and key, and the weight."""

    query: int
    key: int
    weight: float


@dataclass(frozen=True, eq=False, repr=False)
class PooledMap(HeadMaps):
    """The attention of one kind of one model on one long text, pooled.

    Attributes:
        kind: "encoder", "decoder" (its own), or "cross" (a decoder's on the encoder).
        layers: Numbers of the layers in the arrays, from 0.
        heads: Numbers of the heads in the arrays, from 0.
        cells: The pooled map, (layer, head, row, column), float32, 0 to 1: what a cell shows stands in
            `PooledHeatmap.pool`. NaN, as in the other arrays, where a layer has no such head.
        received: Mass that each key receives from all queries, (layer, head, key), float32; 1 on average where there
            are as many queries as keys.
        entropy_nats: Entropy of each query's weights, (layer, head, query), float32.
        link_places: Query and key of the largest far weights, (layer, head, link, 2), int32, largest first; -1 where
            there are no more.
        link_weights: Those weights, (layer, head, link), float32.
        queries: The tokens that attend.
        keys: The tokens that are attended to; `queries` itself but for cross-attention.
        query_cell: Queries that share a row of cells (the last row may have fewer).
        key_cell: Keys that share a column of cells (likewise).
        far_tokens: A link is far where query and key are more than this many tokens apart; None = all are.
        n_layers: How many layers of this kind the model has.
        n_heads: How many heads a layer has (the most, where layers differ).
        n_kv_heads: How many key/value heads a layer has.
    """

    MAPS: ClassVar[str] = "cells"

    kind: str = field(metadata=KIND)
    layers: tuple[int, ...] = field(metadata=NUMBER)
    heads: tuple[int, ...] = field(metadata=NUMBER)
    cells: NDArray[np.float32] = field(metadata=shaped("layers heads n_rows n_columns", filled=True, **ARRAY))
    received: NDArray[np.float32] = field(metadata=shaped("layers heads keys", range=(0, None), **ARRAY))
    entropy_nats: NDArray[np.float32] = field(metadata=shaped("layers heads queries", range=(0, None), **ARRAY))
    link_places: NDArray[np.int32] = field(metadata=shaped("layers heads n_links 2", **ARRAY))
    link_weights: NDArray[np.float32] = field(metadata=shaped("layers heads n_links", **ARRAY))
    queries: Tokens
    keys: Tokens
    query_cell: int = field(metadata={"range": (1, None)})
    key_cell: int = field(metadata={"range": (1, None)})
    far_tokens: int | None
    n_layers: int
    n_heads: int
    n_kv_heads: int

    @property
    def n_rows(self) -> int:
        """How many rows of cells there are."""
        return -(-len(self.queries) // max(self.query_cell, 1))

    @property
    def n_columns(self) -> int:
        """How many columns of cells there are."""
        return -(-len(self.keys) // max(self.key_cell, 1))

    def require_whole(self) -> None:
        """Refuses cells that are no shares, keys that receive more than there is, and links of other tokens."""
        # NaN stands for heads that a layer lacks. Rounding, in 16 bits too, stays far below the upper bounds.
        if np.any(self.cells < 0) or np.any(self.cells > 1.1):
            raise ValueError("its cells are not between 0 and 1")
        if np.nansum(self.received, -1).max() > 1.1 * len(self.queries):
            raise ValueError("its keys receive more than there is")
        if np.any(self.link_places < -1) or np.any(self.link_places >= np.array([len(self.queries), len(self.keys)])):
            raise ValueError("its links are between tokens that it does not have")

    def links(self, layer: int, head: int) -> list[Link]:
        """The strongest far links of one head, largest weight first."""
        at = self.place(layer, head)
        return [
            Link(int(query), int(key), float(weight))
            for (query, key), weight in zip(self.link_places[at], self.link_weights[at], strict=True)
            if query >= 0
        ]


@dataclass(frozen=True, eq=False, repr=False)
class PooledHeatmap(MapsRecord[PooledMap]):
    """What every chosen head of a model attends to on one long text, pooled to a grid of cells.

    Attributes:
        text: The text as given.
        maps: The attention, one map a kind.
        run: What made it: model, sha256, engine, versions, dtype, device, notes ... Plain JSON values.
        pool: What a cell shows. "mean": the share of attention that the queries of its row give to the keys of its
            column, summed over the keys and averaged over the queries, so that rows sum to 1. "max": the largest
            single weight in it.
        picked: Single heads that were asked for, as (layer, head); None = all in the maps.
    """

    SCHEMA: ClassVar[str] = "attnscope.pooled/1"
    COMPRESSED: ClassVar[bool] = True  # half of a causal map is zeros

    text: str
    maps: tuple[PooledMap, ...] = field(metadata=OF_KINDS)
    run: Mapping[str, Any]
    pool: str = field(default="mean", metadata={"choices": POOLS})
    picked: tuple[tuple[int, int], ...] | None = None

    def links(self, layer: int, head: int, kind: str | None = None) -> list[Link]:
        """The strongest far links of one head, largest weight first."""
        return self.map(kind).links(layer, head)

    def describe(self) -> dict[str, Any]:
        """As of all maps; long texts stand there once: keys that are the queries are null."""
        described = super().describe()
        described["maps"] = [one | ({} if one["kind"] == "cross" else {"keys": None}) for one in described["maps"]]
        return described

    def described_links(self) -> list[dict[str, Any]]:
        """Each far link with its head, places, tokens and the text around them, as plain JSON values."""
        return [
            {
                "kind": m.kind,
                "layer": layer,
                "head": head,
                "query": link.query,
                "key": link.key,
                "weight": float(np.float32(link.weight)),
                "query_token": m.queries.labels[link.query],
                "key_token": m.keys.labels[link.key],
                "query_text": around(m.queries, link.query),
                "key_text": around(m.keys, link.key),
            }
            for m in self.maps
            for layer, head in self.chosen(m)
            for link in m.links(layer, head)
        ]

    def to_json(self, *, ascii_only: bool = False, **more: Any) -> str:
        """One JSON document, as of all maps, with the far links and the text around them."""
        return super().to_json(ascii_only=ascii_only, links=self.described_links(), **more)

    @classmethod
    def rebuild(cls, described: Mapping[str, Any], held: Mapping[str, Any]) -> Self:
        """The record that `describe` and `arrays` were made of, npz or JSON."""
        maps = [entry | {"keys": entry["keys"] or entry["queries"]} for entry in described["maps"]]
        return super().rebuild({**described, "maps": maps}, held)


def around(tokens: Tokens, place: int, characters: int = 30) -> str:
    """The text around a token, the token itself between ⟦ and ⟧; its label where its place in the text is not known."""
    start, stop = map(int, tokens.offsets[place])
    if start < 0:
        return f"⟦{tokens.labels[place]}⟧"
    text = tokens.text if int(tokens.segments[place]) == 0 or tokens.pair is None else tokens.pair
    token = text[start:stop]
    start += len(token) - len(token.lstrip())
    before, after = text[max(0, start - characters) : start], text[stop : stop + characters]
    return " ".join(f"{before}⟦{text[start:stop] or tokens.labels[place]}⟧{after}".split())
