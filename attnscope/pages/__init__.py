"""Records as one HTML file: every head to look at, compare and save, without a server or a network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from attnscope.errors import AttnscopeError
from attnscope.pages.document import PAGE_SCHEMA, Page, assemble
from attnscope.pages.heads import Heads, heads_of
from attnscope.pages.texts import (
    FINE_STEP,
    FINE_UP_TO,
    LEFT_UNIT,
    STEP,
    PageText,
    describe_text,
    most_pieces,
    require_room,
)
from attnscope.questions.compare import Comparison
from attnscope.questions.compare_texts import FIRST, SECOND, tokens
from attnscope.questions.heads import Heads as HeadsResult
from attnscope.questions.heatmap import AttentionMap, Heatmap
from attnscope.questions.pooled import PooledHeatmap, PooledMap
from attnscope.results.tokens import Tokens
from attnscope.version import VERSION

__all__ = ["PAGE_SCHEMA", "Page", "PageText", "head_to_open", "page_of", "page_of_record", "require_room"]


def page_of_record(record: Any, *, findings: HeadsResult | None = None) -> Page:
    """Return the page of a record of any kind that has one.

    Args:
        record: Attention on a text, also pooled; heads, an atlas, a comparison, relations or an ablation.
        findings: Of attention or an atlas: name the roles of heads.

    Raises:
        AttnscopeError: The record holds nothing, or more weights than a browser would hold.
    """
    if isinstance(record, Heatmap):
        return page_of([PageText(record)], findings=findings)
    if isinstance(record, PooledHeatmap):
        return page_of([PageText(_text_of_cells(record))], findings=findings)
    if isinstance(record, Comparison) and record.compared in ("texts", "picked"):
        sides = (FIRST, SECOND) if record.compared == "texts" else (FIRST,)
        return page_of([PageText(_text_of_heads(record, side)) for side in sides])
    return page_of([], heads=heads_of(record, findings))


def page_of(
    texts: Sequence[PageText],
    *,
    findings: HeadsResult | None = None,
    start: Mapping[str, str] | None = None,
    heads: Heads | None = None,
) -> Page:
    """Make a page of one text or several, of a record about heads, or of both.

    Args:
        texts: May be empty if there are heads.
        findings: Names the roles of heads; None = what is known about heads does.
        start: The first view, as the page's address names it: `{"v": "matrix", "h": "3.1"}`.
        heads: What is known about heads, as of an atlas.

    Raises:
        AttnscopeError: There is no text, no head to show, or more weights than a browser would hold.
    """
    if not texts and heads is None:
        raise AttnscopeError("a page needs a text")
    # Roles come from the findings, or from what is known about heads.
    named = heads if findings is None else heads_of(findings)
    # Small pages keep weights in finer steps.
    is_small = not texts or require_room(text.record for text in texts) <= FINE_UP_TO
    step = FINE_STEP if is_small else STEP
    has_photos = any(text.record.picture is not None or text.record.pictures for text in texts)
    blocks = [] if heads is None else heads.blocks
    n_cards = 0 if heads is None else len(heads.cards)
    grid = "" if heads is None else heads.more.get("grid", "")
    # What the page's script reads first.
    manifest: dict[str, Any] = {
        "schema": PAGE_SCHEMA,
        "version": VERSION,
        "step": step,
        "mostPieces": most_pieces(step),
        "leftUnit": LEFT_UNIT,
        "heads": None if heads is None else {"landing": 0, "cards": list(range(1, 1 + n_cards)), "grid": grid},
        "roles": None if named is None else named.roles,
        "start": dict(start or {}),
    }
    # Means have names in place of numbers of heads.
    if texts and (first := texts[0].record).averaged:
        manifest["means"] = {f"{layer}.{head}": m.name_of(layer, head) for m in first.maps for layer, head in m.pairs}
    manifest["texts"] = [describe_text(text, blocks, step) for text in texts]
    # A page of texts opens on the view that suits the first one.
    if texts and heads is None:
        manifest["start"] = _first_view(texts[0].record, has_photos=has_photos) | manifest["start"]
        if has_photos:
            manifest["start"].pop("v", None)
    # Scripts that no part of the page needs are left out.
    parts = {"heads": heads is not None, "numbers": bool(grid), "photo": has_photos}
    return Page(assemble(manifest, blocks, tuple(part for part, is_there in parts.items() if is_there)))


def _first_view(record: Heatmap, *, has_photos: bool) -> dict[str, str]:
    """Return how a page of texts opens, as its address has it."""
    if has_photos:
        # One patch of hundreds seldom gets much: on a scale up to 1 none would be seen.
        return {"scale": "head"}
    head = head_to_open(record)
    return {} if head is None else {"h": f"{head[0]}.{head[1]}"}


def head_to_open(record: Heatmap) -> tuple[int, int] | None:
    """Return the head that a page opens on: the one whose queries choose distant tokens most, each its own.

    A query's score is its largest weight above the key's mean over all queries, among keys that are neither special
    nor first and more than two tokens away. The head with the largest mean score is taken; None = no key is as far.
    """
    attention = record.maps[0]
    # Pairs (query, key) that count.
    queries = np.arange(len(attention.queries))
    keys = np.arange(len(attention.keys))
    counts = (np.abs(queries[:, None] - keys) > 2) & ~attention.keys.special & (keys > 0)
    heads = record.chosen(attention)
    if not heads or not counts.any():
        return None

    # A key that all queries choose says little: its mean is taken off.
    def score(head: tuple[int, int]) -> float:
        weights = attention.of(*head)
        return float(np.where(counts, weights - weights.mean(0), 0.0).max(1).mean())

    return max(heads, key=score)


# Records whose attention is shown as that of a text


def _text_of_cells(record: PooledHeatmap) -> Heatmap:
    """Return a pooled record as one whose tokens are cells."""
    first = record.maps[0]
    shows = "the share that a query of its row gives to its keys, on average"
    note = f"a cell is {first.query_cell} × {first.key_cell} tokens, and shows {shows}"
    run = {**record.run, "notes": [*record.run.get("notes", ()), note]}
    return Heatmap(text=record.text, maps=tuple(map(_map_of_cells, record.maps)), run=run, picked=record.picked)


def _map_of_cells(pooled: PooledMap) -> AttentionMap:
    queries = _cell_tokens(pooled.queries, pooled.query_cell)
    is_square = pooled.kind != "cross" and pooled.key_cell == pooled.query_cell
    keys = queries if is_square else _cell_tokens(pooled.keys, pooled.key_cell)
    same = {name: getattr(pooled, name) for name in ("kind", "layers", "heads", "n_layers", "n_heads", "n_kv_heads")}
    return AttentionMap(**same, weights=pooled.cells, queries=queries, keys=keys)


def _cell_tokens(tokens: Tokens, size: int) -> Tokens:
    """Return the tokens along one side of a pooled map; `size` of them are a cell."""
    # A cell of several tokens is named by its place and its first words.
    labels = list(tokens.labels)
    if size > 1:
        labels = []
        for first in range(0, len(tokens), size):
            some = tokens.labels[first : first + size]
            words = " ".join(some[:6])[:28]
            labels.append(f"{first} {words}{'…' if len(some) > 1 else ''}")
    # No offsets, words or ids: cells are no tokens.
    n = len(labels)
    offsets = np.full((n, 2), -1, np.int32)
    zeros = np.zeros(n, np.int32)
    special = np.zeros(n, np.bool_)
    return Tokens("", zeros.astype(np.int64), tuple(labels), offsets, special, None, zeros)


def _text_of_heads(comparison: Comparison, side: str) -> Heatmap:
    """Return the attention of the heads of a comparison on one of its texts, "first" or "second", as a record."""
    table, weights = comparison.table("heads"), comparison.grids[f"weights:{side}"]
    picked = tuple(zip(table["layer"].tolist(), table["head"].tolist(), strict=True))
    # Layers and heads that the comparison has, in order.
    layers = sorted({layer for layer, _ in picked})
    heads = sorted({head for _, head in picked})
    text = tokens(comparison, side)
    # Picked heads fill their cells of (layer, head, query, key); others stay NaN.
    block = np.full((len(layers), len(heads), len(text), len(text)), np.nan, np.float32)
    for (layer, head), of_head in zip(picked, weights, strict=True):
        block[layers.index(layer), heads.index(head)] = of_head
    attention = AttentionMap(
        kind=table["kind"].tolist()[0],
        layers=tuple(layers),
        heads=tuple(heads),
        weights=block,
        queries=text,
        keys=text,
        n_layers=max(layers) + 1,
        n_heads=max(heads) + 1,
        n_kv_heads=max(heads) + 1,
    )
    changes = ("hide_special",) if comparison.hides_special else ()
    return Heatmap(text=text.text, maps=(attention,), run=comparison.run, picked=picked, changes=changes)
