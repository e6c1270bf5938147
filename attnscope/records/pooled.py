"""Attention on long texts: maps pooled to a grid, what each key receives, each query's entropy, and far links."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from attnscope.errors import AttnscopeError
from attnscope.records.maps import Tokens, require_whole_tokens, spans, tokens_from_json
from attnscope.records.reading import read_record, reading, require_places, require_run, require_types
from attnscope.records.storage import json_array, json_lists, view, write_whole

POOLED_SCHEMA = "attnscope.pooled/1"
POOLS = ("mean", "max")
_ARRAYS = ("cells", "received", "entropy_nats", "link_places", "link_weights")


class Link(NamedTuple):
    """A weight between two tokens that are far apart: places of query and key, and the weight."""

    query: int
    key: int
    weight: float


@dataclass(frozen=True, eq=False)
class PooledMap:
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

    kind: str
    layers: tuple[int, ...]
    heads: tuple[int, ...]
    cells: NDArray[np.float32]
    received: NDArray[np.float32]
    entropy_nats: NDArray[np.float32]
    link_places: NDArray[np.int32]
    link_weights: NDArray[np.float32]
    queries: Tokens
    keys: Tokens
    query_cell: int
    key_cell: int
    far_tokens: int | None
    n_layers: int
    n_heads: int
    n_kv_heads: int

    def place(self, layer: int, head: int) -> tuple[int, int]:
        """Where a head stands in the arrays.

        Raises:
            AttnscopeError: It is not there.
        """
        if layer in self.layers and head in self.heads:
            return self.layers.index(layer), self.heads.index(head)
        raise AttnscopeError(
            f"L{layer}H{head} is not in this record",
            f"it holds layers {spans(self.layers)} and heads {spans(self.heads)}",
        )

    def of(self, layer: int, head: int) -> NDArray[np.float32]:
        """The cells of one head, (row, column)."""
        one: NDArray[np.float32] = self.cells[self.place(layer, head)]
        return one

    def exists(self, layer: int, head: int) -> bool:
        """Whether the record holds this head."""
        return layer in self.layers and head in self.heads and not bool(np.isnan(self.of(layer, head)).any())

    def links(self, layer: int, head: int) -> list[Link]:
        """The strongest far links of one head, largest weight first."""
        at = self.place(layer, head)
        return [
            Link(int(query), int(key), float(weight))
            for (query, key), weight in zip(self.link_places[at], self.link_weights[at], strict=True)
            if query >= 0
        ]

    def __repr__(self) -> str:
        return f"PooledMap({self.kind}, layers {spans(self.layers)}, heads {spans(self.heads)}, {self.cells.shape})"


@dataclass(frozen=True, eq=False)
class PooledHeatmap:
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

    text: str
    maps: tuple[PooledMap, ...]
    run: Mapping[str, Any]
    pool: str = "mean"
    picked: tuple[tuple[int, int], ...] | None = None

    def chosen(self, attention: PooledMap) -> tuple[tuple[int, int], ...]:
        """The heads to show of a map, as (layer, head): as they were picked, else layer by layer."""
        wanted = self.picked or tuple((layer, head) for layer in attention.layers for head in attention.heads)
        return tuple((layer, head) for layer, head in wanted if attention.exists(layer, head))

    def only(self, picked: Sequence[tuple[int, int]]) -> PooledHeatmap:
        """The same, showing only these heads, as (layer, head).

        Raises:
            AttnscopeError: The record does not hold one of them.
        """
        if not picked:
            raise AttnscopeError("no head is chosen")
        for layer, head in picked:
            if not any(attention.exists(layer, head) for attention in self.maps):
                self.maps[0].place(layer, head)
        return replace(self, picked=tuple(dict.fromkeys(picked)))

    def map(self, kind: str | None = None) -> PooledMap:
        """The map of a kind of attention; None = the first.

        Raises:
            AttnscopeError: The record has none of that kind.
        """
        for attention in self.maps:
            if kind in (None, attention.kind):
                return attention
        raise AttnscopeError(f"this record has no {kind} attention", f"it has {', '.join(m.kind for m in self.maps)}")

    def of(self, layer: int, head: int, kind: str | None = None) -> NDArray[np.float32]:
        """The cells of one head by its numbers, (row, column).

        Raises:
            AttnscopeError: The record does not hold it.
        """
        return self.map(kind).of(layer, head)

    def links(self, layer: int, head: int, kind: str | None = None) -> list[Link]:
        """The strongest far links of one head, largest weight first."""
        return self.map(kind).links(layer, head)

    def describe(self) -> dict[str, Any]:
        """All but the arrays, as plain JSON values; what made the record (`run`) stands at its top level."""
        return {
            "schema": POOLED_SCHEMA,
            "text": self.text,
            **self.run,
            "pool": self.pool,
            "picked": None if self.picked is None else [list(pair) for pair in self.picked],
            "maps": [
                {
                    "kind": m.kind,
                    "layers": list(m.layers),
                    "heads": list(m.heads),
                    "query_cell": m.query_cell,
                    "key_cell": m.key_cell,
                    "far_tokens": m.far_tokens,
                    "n_layers": m.n_layers,
                    "n_heads": m.n_heads,
                    "n_kv_heads": m.n_kv_heads,
                    "queries": m.queries.as_json(),
                    "keys": m.keys.as_json() if m.kind == "cross" else None,
                }
                for m in self.maps
            ],
        }

    def arrays(self) -> dict[str, NDArray[Any]]:
        """The first map's arrays by name; those of further maps have their kind before it, as in `cross_cells`."""
        return {
            f"{f'{m.kind}_' if number else ''}{name}": getattr(m, name)
            for number, m in enumerate(self.maps)
            for name in _ARRAYS
        }

    def told_links(self) -> list[dict[str, Any]]:
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

    def to_json(self, **more: Any) -> str:
        """One JSON document: the schema, the run, far links with their text, `arrays()` as lists, and `describe()`.

        Numbers have as many digits as float32 needs to be read back unchanged; NaN becomes null.

        Args:
            more: Further members of the document, such as the files that were written.
        """
        told = {"schema": POOLED_SCHEMA, "run": dict(self.run), "links": self.told_links(), **more}
        lists = (
            f'"{name}": {json_array(array) if array.dtype == np.float32 else json_lists(array)}'
            for name, array in self.arrays().items()
        )
        head = json.dumps(told, ensure_ascii=False)[:-1]
        return f'{head}, {", ".join(lists)}, "record": {json_lists(self.describe())}}}'

    def save(self, path: str | Path) -> Path:
        """Writes the record to a file, whole or not at all: `.npz` or `.json`; `load` reads both back without loss."""
        path = Path(path)
        if path.suffix == ".json":
            return write_whole(path, self.to_json().encode("utf-8", "backslashreplace"))
        if path.suffix != ".npz":
            raise AttnscopeError(f"a record is saved as .npz or .json, not {path.suffix or path.name!r}")
        held = io.BytesIO()
        described = np.frombuffer(json.dumps(self.describe()).encode(), np.uint8)
        # Half of a causal map is zeros.
        np.savez_compressed(held, allow_pickle=False, **self.arrays(), record=described)
        return write_whole(path, held.getvalue())

    def draw(
        self, folder: str | Path, formats: str | Sequence[str] = ("png",), *, scale: str = "fixed", cmap: str = "Blues"
    ) -> list[Path]:
        """Draws the record's figures into a folder, each file whole or not at all.

        Args:
            folder: Where to; made if it is not there.
            formats: Some of "png", "svg", "pdf".
            scale: What the darkest colour means: 1 ("fixed"), each head's largest cell ("head"), or the figure's
                ("figure"). Colours are logarithmic.
            cmap: Name of a matplotlib colormap.

        Returns:
            The files, overview first.

        Raises:
            AttnscopeError: An unknown format, scale or colormap; the folder cannot be written.
        """
        wanted = [formats] if isinstance(formats, str) else formats
        style = view("figures:Style")(scale, cmap)
        paths: list[Path] = view("figures:draw")(self, Path(folder), wanted, style=style)
        return paths

    def _repr_png_(self) -> bytes:
        png: bytes = view("figures:glance")(self)
        return png

    def __repr__(self) -> str:
        shapes = ", ".join(f"{m.kind} {m.cells.shape}" for m in self.maps)
        return f"PooledHeatmap({self.run.get('model')!r} on {self.text[:40]!r}: {self.pool} {shapes})"


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


def load(path: str | Path) -> PooledHeatmap:
    """Reads a record that `PooledHeatmap.save` wrote, without loss.

    Raises:
        AttnscopeError: The file is not there, damaged, or no such record.
    """
    path = Path(path)
    with reading(path, "attnscope record of pooled maps", "give what `heatmap --format npz` or `json` wrote"):
        described, held = read_record(path, POOLED_SCHEMA)
        record = _from_json(described, held)
        _require_whole(record)
    return record


def _from_json(data: Mapping[str, Any], held: Mapping[str, Any]) -> PooledHeatmap:
    fields = {"schema", "text", "pool", "picked", "maps"}
    maps = []
    for number, entry in enumerate(data["maps"]):
        arrays: dict[str, Any] = {}
        for name in _ARRAYS:
            # Through float64: JSON's null is NaN there, and every float32 survives.
            array = np.array(held[f"{entry['kind']}_{name}" if number else name], np.float64)
            arrays[name] = array.astype(np.int32 if name == "link_places" else np.float32)
        queries = tokens_from_json(entry["queries"])
        maps.append(
            PooledMap(
                kind=entry["kind"],
                layers=tuple(map(int, entry["layers"])),
                heads=tuple(map(int, entry["heads"])),
                **arrays,
                queries=queries,
                keys=queries if entry["keys"] is None else tokens_from_json(entry["keys"]),
                query_cell=int(entry["query_cell"]),
                key_cell=int(entry["key_cell"]),
                far_tokens=None if entry["far_tokens"] is None else int(entry["far_tokens"]),
                n_layers=entry["n_layers"],
                n_heads=entry["n_heads"],
                n_kv_heads=entry["n_kv_heads"],
            )
        )
    return PooledHeatmap(
        text=data["text"],
        maps=tuple(maps),
        run={name: value for name, value in data.items() if name not in fields},
        pool=data["pool"],
        picked=None if data["picked"] is None else tuple((int(layer), int(head)) for layer, head in data["picked"]),
    )


def _require_whole(record: PooledHeatmap) -> None:
    """Refuses a record whose parts do not fit each other, before a picture of it fails or lies.

    Raises:
        ValueError: They do not.
    """
    if not record.maps:
        raise ValueError("it holds no attention")
    require_types(record)
    require_run(record.run)
    if record.pool not in POOLS:
        raise ValueError(f"there is no pool {record.pool!r}")
    for m in record.maps:
        if m.kind not in ("encoder", "decoder", "cross"):  # it becomes part of file names
            raise ValueError(f"there is no {m.kind!r} attention")
        if min(m.query_cell, m.key_cell) < 1:
            raise ValueError("its cells hold no tokens")
        heads, n_queries, n_keys = (len(m.layers), len(m.heads)), len(m.queries), len(m.keys)
        shapes = {
            "cells": (*heads, -(-n_queries // m.query_cell), -(-n_keys // m.key_cell)),
            "received": (*heads, n_keys),
            "entropy_nats": (*heads, n_queries),
            "link_places": (*heads, m.link_weights.shape[-1], 2),
            "link_weights": (*heads, m.link_weights.shape[-1]),
        }
        for name, shape in shapes.items():
            if getattr(m, name).shape != shape or 0 in shape[:2] or (name == "cells" and 0 in shape):
                raise ValueError(f"its {name} has shape {getattr(m, name).shape}, its tokens and heads say {shape}")
        # NaN stands for heads that a layer lacks. Rounding, in 16 bits too, stays far below the upper bound.
        if np.any(m.cells < 0) or np.any(m.cells > 1.1):
            raise ValueError("its cells are not between 0 and 1")
        require_places(m.layers, m.heads)
        if np.nansum(m.received, -1).max() > 1.1 * n_queries:
            raise ValueError("its keys receive more than there is")
        if np.any(m.received < 0) or np.any(np.isinf(m.received)) or np.any(np.isinf(m.entropy_nats)):
            raise ValueError("its marginals are no sums of weights")
        if np.any(m.link_places < -1) or np.any(m.link_places >= np.array([n_queries, n_keys])):
            raise ValueError("its links are between tokens that it does not have")
        for tokens in (m.queries, m.keys):
            require_whole_tokens(tokens)
    if record.picked is not None and not any(record.chosen(m) for m in record.maps):
        raise ValueError("it shows none of its heads")
