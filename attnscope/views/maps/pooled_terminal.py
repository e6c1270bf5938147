"""Pooled maps of long texts in the terminal: maps, how attention is spread, far links with their text."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.text import Text

from attnscope.errors import amount
from attnscope.records.maps.pooled import PooledHeatmap, PooledMap, around
from attnscope.views.maps.pooling import DECADES, log_share
from attnscope.views.maps.terminal import side_by_side
from attnscope.views.tables.numbers import percent, weight
from attnscope.views.tables.plain_text import heading, safe
from attnscope.views.tables.table import Column, Table

_MOST_LARGE = 4
_LARGE_WIDTH = 64
_LINKS_OF_MANY = 2


def pooled_drawing(record: PooledHeatmap, console: Console) -> RenderableType:
    """A record as the terminal shows it: a map a head, then a table of marginals and far links."""
    parts: list[RenderableType] = []
    for attention in record.maps:
        heads = record.chosen(attention)
        if not heads:
            continue
        if len(record.maps) > 1:
            parts.append(heading(f"{attention.kind} attention"))
        if len(heads) <= _MOST_LARGE:
            for layer, head in heads:
                parts.append(Text())
                parts.append(_maps(attention, [(layer, head)], console, _LARGE_WIDTH))
        else:
            for layer in sorted({layer for layer, _ in heads}):
                parts.append(heading(f"layer {layer}"))
                parts.append(_maps(attention, [pair for pair in heads if pair[0] == layer], console, 24))
        parts.append(_legend(record, attention))
        parts.append(Text())
        parts.append(_table(attention, heads))
    return Group(*parts)


def _maps(attention: PooledMap, heads: Sequence[tuple[int, int]], console: Console, width: int) -> Text:
    titled = [
        (f"H{head}" if len(heads) > 1 else f"L{layer}H{head}", log_share(attention.of(layer, head), 1.0))
        for layer, head in heads
    ]
    return side_by_side(titled, console, "cells", width)


def _legend(record: PooledHeatmap, attention: PooledMap) -> Text:
    cells = "the share of a query's attention" if record.pool == "mean" else "the largest weight"
    return Text(
        f"\nrows: {amount(len(attention.queries), 'query', 'queries')}, {attention.query_cell} a cell · "
        f"columns: {amount(len(attention.keys), 'key')}, {attention.key_cell} a cell · shades: {cells}, logarithmic "
        f"from 1e-{DECADES} to 1",
        style="dim",
    )


def _table(attention: PooledMap, heads: Sequence[tuple[int, int]]) -> Table:
    far = "strongest links" if attention.far_tokens is None else f"strongest links over {attention.far_tokens} tokens"

    def entropy(pair: tuple[int, int]) -> str:
        return f"{np.exp(attention.entropy_nats[attention.place(*pair)].mean(dtype=np.float64)):,.0f} keys"

    def received(pair: tuple[int, int]) -> str:
        shares = attention.received[attention.place(*pair)] / len(attention.queries)
        most = int(shares.argmax())
        return f"{percent(shares[most])} {safe(attention.keys.labels[most])} @{most}"

    def links(pair: tuple[int, int]) -> Text:
        return _links(attention, pair, with_text=len(heads) <= _MOST_LARGE)

    columns = [
        Column("head", lambda pair: f"L{pair[0]}H{pair[1]}", style="bold"),
        Column("e^entropy", entropy, right=True, drop=2),
        Column("most received", received, wraps=True, least=20, drop=1),
        Column(f"{far} (query → key weight)", links, wraps=True, least=16),
    ]
    return Table(columns, heads)


def _links(attention: PooledMap, pair: tuple[int, int], *, with_text: bool) -> Text:
    lines = Text()
    links = attention.links(*pair)
    for number, link in enumerate(links if with_text else links[:_LINKS_OF_MANY]):
        lines.append("\n" if number and with_text else "   " if number else "")
        ends = ((attention.queries, link.query), (attention.keys, link.key))
        names = [safe(around(*end, 20) if with_text else end[0].labels[end[1]]) for end in ends]
        lines.append(f"{names[0]} @{link.query} → {names[1]} @{link.key} ")
        lines.append(weight(link.weight), style="cyan")
    return lines
