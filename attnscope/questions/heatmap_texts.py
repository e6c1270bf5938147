"""Attention on texts as figures: maps of heads with their tokens, bars of one query, and long texts pooled."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from attnscope.drawing.layout import nice_ticks
from attnscope.drawing.map_figure import Axis, MapsFigure
from attnscope.drawing.style import Style, meanings
from attnscope.errors import UsageError, amount
from attnscope.questions.heatmap import AttentionMap, Heatmap, Rollout
from attnscope.questions.heatmap_sheets import (
    Plate,
    Sheet,
    axis_of,
    model_name,
    note_shared,
    quote,
    sheets_of_heads,
)
from attnscope.questions.maps import ROLLOUT
from attnscope.questions.pooled import PooledHeatmap, PooledMap, around
from attnscope.report.numbers import weight
from attnscope.report.wording import change_notes, run_notes
from attnscope.results.tokens import Tokens

_MEANING = meanings(
    "attention weight: the share of a query's attention that a key gets",
    "attention weight ÷ the largest weight of the same head",
)
_ROLLOUT_MEANING = meanings(
    "share of a row that a column gets", "share of a row that a column gets ÷ the largest of the same map"
)
_POOLED_MEANING = "share of attention that the queries of a row give to the keys of a column (logarithmic)"
_SCALE = {"fixed": "", "head": ", ÷ the largest of the same head", "figure": ", ÷ the largest of this figure"}
_LEAST_RECEIVED = 0.1
_SHOWN_LINKS = 10


# Exact maps ---------------------------------------------------------------------------------------------------------


def text_plates(record: Heatmap, style: Style, query: str | None = None, *, before: str = "") -> Iterator[Plate]:
    """Yield the figures of a record in the order of their files.

    An overview of all layers and heads, then a figure per layer. Single heads that were picked make one figure. A query
    frames the rows of the tokens that it names, and adds a figure of all heads for each. Encoder-decoders have all that
    for each kind of attention.

    Args:
        record: The record.
        style: How it is drawn.
        query: Tokens that are named.
        before: Begins the names of files.

    Raises:
        AttnscopeError: The query names no token.
    """
    sides = [attention.queries for attention in record.maps]
    if query is not None and not any(tokens.find(query) for tokens in sides):
        raise sides[0].refuse(query, *sides[1:])
    for attention in record.maps:
        heads = record.chosen(attention)
        if not heads:  # all that were picked are in other maps
            continue
        mark = f"{before}{attention.kind}-" if len(record.maps) > 1 else before
        tokens = () if query is None else attention.queries.find(query)
        for sheet in sheets_of_heads(heads, picked=record.picked is not None, before=mark, mean=record.averaged):
            yield _map_plate(record, attention, sheet, style, () if sheet.form == "overview" else tokens)
        for token in tokens:
            yield _query_plate(record, attention, f"{mark}query-{token:03d}", token, style)


def _map_plate(record: Heatmap, attention: AttentionMap, sheet: Sheet, style: Style, marked: tuple[int, ...]) -> Plate:
    is_overview = sheet.form == "overview"
    # A rollout has two maps per layer: the attention, and where tokens came from.
    subject = sheet.subject
    if attention.kind == ROLLOUT:
        over_all = f"{attention.head_name(1)} over {amount(len(attention.layers), 'layer')}"
        subject = over_all if is_overview else f"{subject}: attention, and where it came from"
    # In a figure of one layer titles say the head alone.
    titles = sheet.titles(attention)
    if not is_overview:
        is_short = record.picked is None and len({layer for layer, _ in sheet.heads}) == 1
        titles["titles"] = _head_titles(attention, sheet.heads, is_short=is_short)
    # One map, (query, key), per head of the sheet.
    values = [attention.of(*pair) for pair in sheet.heads]
    figure = MapsFigure(
        **titles,
        subtitle=_subtitle(record, attention),
        notes=tuple(_notes(record, attention, sheet.form)),
        axes=((axis_of(attention.queries, marked), axis_of(attention.keys)),),
        boxes=tuple((0, row, len(attention.keys), row + 1) for row in marked),
        meaning=(_ROLLOUT_MEANING if attention.kind == ROLLOUT else _MEANING)[style.scale],
        cmap=style.cmap,
        has_numbers=sheet.form == "single",
        captions=tuple((f"max {weights.max():.2f}",) for weights in values) if style.scale == "head" else (),
        lettered=(model_name(record),),
    )
    return Plate(sheet.stem, _title(record, attention, subject), figure, values)


def _query_plate(record: Heatmap, attention: AttentionMap, stem: str, query: int, style: Style) -> Plate:
    """Return what one query attends to in all heads: a row per head."""
    heads = record.chosen(attention)
    token = f"“{attention.queries.labels[query]}” (token {query})"
    subject = f"where {token} came from" if attention.kind == ROLLOUT else f"what {token} attends to"
    figure = MapsFigure(
        titles=("a row per head",),
        subtitle=_subtitle(record, attention),
        notes=tuple(_notes(record, attention, "query")),
        axes=((Axis(_head_titles(attention, heads, is_short=False)), axis_of(attention.keys)),),
        meaning=(_ROLLOUT_MEANING if attention.kind == ROLLOUT else _MEANING)[style.scale],
        cmap=style.cmap,
        has_numbers=True,
        lettered=(model_name(record), token),
    )
    # One row, (key,), per head: (head, key).
    weights = np.stack([attention.of(*pair)[query] for pair in heads])
    return Plate(stem, _title(record, attention, subject), figure, [weights])


def _title(record: Heatmap, attention: AttentionMap, subject: str) -> str:
    """Return the title of a figure: the model, the kind of attention if there are several, and its heads."""
    kind = "cross-attention" if attention.kind == "cross" else attention.kind
    return " · ".join([model_name(record), *([kind] if len(record.maps) > 1 else []), subject])


def _head_titles(attention: AttentionMap, heads: tuple[tuple[int, int], ...], *, is_short: bool) -> tuple[str, ...]:
    """Return the title of each map of a figure, with the key/value head that it reads if several share it."""
    titles = []
    for layer, head in heads:
        title = attention.head_name(head) if is_short else attention.name_of(layer, head)
        if attention.n_kv_heads < attention.n_heads:
            title += f" · kv {head * attention.n_kv_heads // attention.n_heads}"
        titles.append(title)
    return tuple(titles)


def _subtitle(record: Heatmap, attention: AttentionMap) -> str:
    """Return the text in quotes, with its second part or what the model wrote."""
    queries = attention.queries
    if attention.kind != "encoder" and len(record.maps) > 1:
        return quote(record.text, queries.text, joint="→")
    if written := _written_text(queries):
        return quote(record.text, written, joint="…")
    return quote(record.text) if queries.pair is None else quote(record.text, queries.pair, joint="+")


def _written_text(tokens: Tokens) -> str:
    """Return the text that the model wrote after its input; empty if it wrote none, or its place is not known."""
    if not 0 < tokens.n_given < len(tokens):
        return ""
    start = int(tokens.offsets[tokens.n_given, 0])
    return tokens.text[start:] if start >= 0 else ""


def _notes(record: Heatmap, attention: AttentionMap, form: str) -> list[str]:
    """Return what a reader of a figure must know."""
    queries = attention.queries
    rows = "heads" if form == "query" else "queries (attend)"
    notes = [f"rows: {rows} · columns: keys (are attended to)"]
    if attention.kind == ROLLOUT:
        notes = ["rows: tokens after a layer · columns: of mean attention the layer's keys, else input tokens"]
    if isinstance(record, Rollout):
        notes.append(record.method)
    notes += [*change_notes(record, attention.kind), *note_shared(attention)]
    if 0 <= queries.n_given < len(queries):
        if form != "overview":
            notes.append("green tokens were written by the model itself")
        if form != "query" and queries.n_given:
            notes.append("red lines: from here on the model wrote")
    elif form != "query" and any(len(np.unique(tokens.segments)) > 1 for tokens in (queries, attention.keys)):
        notes.append("red lines: the second text begins")
    # What the run says, without what is about other kinds of attention.
    others = [f" {other.kind} layers" for other in record.maps if other.kind != attention.kind]
    for note in run_notes(record.run):
        if not any(other in note for other in others):
            notes.append(note.removesuffix("."))
    return notes


# Pooled maps --------------------------------------------------------------------------------------------------------


def pooled_plates(record: PooledHeatmap, style: Style, query: str | None = None) -> Iterator[Plate]:
    """Yield an overview and a figure per layer, or one for each head that was picked."""
    if query is not None:
        raise UsageError("pooled maps have no --query", "leave it out, or draw the exact part with heatmap --rows")
    is_picked = record.picked is not None
    for attention in record.maps:
        mark = f"{attention.kind}-" if len(record.maps) > 1 else ""
        for sheet in sheets_of_heads(record.chosen(attention), picked=is_picked, apart=True, before=mark):
            yield _pooled_plate(record, attention, sheet, style)


def _pooled_plate(record: PooledHeatmap, attention: PooledMap, sheet: Sheet, style: Style) -> Plate:
    cells = "tokens" if attention.query_cell == attention.key_cell else "queries and keys"
    size = f"{attention.query_cell} × {attention.key_cell}"
    # What is in all figures.
    notes = [f"rows: queries (attend) · columns: keys (are attended to) · a cell holds {size} {cells}, exactly pooled"]
    n_rows, n_columns = attention.cells.shape[2:]
    figure = MapsFigure(
        **sheet.titles(attention),
        subtitle=quote(record.text),
        notes=(),
        axes=(
            (
                _positions(len(attention.queries), n_rows, attention.query_cell),
                _positions(len(attention.keys), n_columns, attention.key_cell),
            ),
        ),
        meaning=f"{_POOLED_MEANING}{_SCALE[style.scale]}",
        cmap=style.cmap,
        largest_px=780,
        lettered=(model_name(record),),
    )
    # Strips above and beside larger maps.
    if sheet.form != "overview":
        most = max(float(len(attention.queries)), 10.0)
        notes.append(
            "above: mass that a key receives from all queries, the largest of its cell, logarithmic from "
            f"{_LEAST_RECEIVED} to {most:,.0f} (dashed: 1, the average) · right: entropy of a query's weights, the "
            f"mean of its cell, 0 to ln(keys) = {math.log(len(attention.keys)):.1f} nats"
        )
        places = [attention.place(*pair) for pair in sheet.heads]
        received = [_by_cell(attention.received[place], attention.key_cell, np.maximum) for place in places]
        entropy = [_by_cell(attention.entropy_nats[place], attention.query_cell, np.add) for place in places]
        highest = max(math.log(len(attention.keys)), 1e-9)
        figure = replace(
            figure,
            above=tuple(tuple(_received_share(values, most).tolist()) for values in received),
            beside=tuple(tuple(np.clip(values / highest, 0, 1).tolist()) for values in entropy),
            level=float(_received_share(np.ones(1), most)[0]),
        )
    if sheet.form == "single":
        figure, note = _add_links(figure, attention, sheet.heads[0])
        notes.append(note)
    notes += [*note_shared(attention), *run_notes(record.run)]
    # The title, and the cells of each head, (row, column).
    kind = f"{attention.kind} " if len(record.maps) > 1 else ""
    tokens = amount(len(attention.keys), "token")
    if attention.kind == "cross":
        tokens = f"{len(attention.queries):,} × {tokens}"
    title = f"{model_name(record)} · {kind}{sheet.subject} · {tokens}"
    values = [attention.of(*pair) for pair in sheet.heads]
    return Plate(sheet.stem, title, replace(figure, notes=tuple(notes)), values, is_logarithmic=True)


def _add_links(figure: MapsFigure, attention: PooledMap, pair: tuple[int, int]) -> tuple[MapsFigure, str]:
    """Return a figure with the far links of a head, framed on the map and listed below it, and a note on them."""
    # A frame is three cells wide, so that it can be seen.
    boxes = []
    lines = []
    for number, link in enumerate(attention.links(*pair)[:_SHOWN_LINKS], 1):
        column, row = link.key // attention.key_cell, link.query // attention.query_cell
        boxes.append((column - 1, row - 1, column + 2, row + 2))
        query, key = around(attention.queries, link.query, 34), around(attention.keys, link.key, 34)
        lines.append(f"{number}   {weight(link.weight)}   {link.query:,}  {query}   →   {link.key:,}  {key}")
    note = f"framed and listed: the strongest links{attention.far}, without special tokens and the first token as key"
    return replace(figure, boxes=tuple(boxes), lines=tuple(lines or ["there are no such links"])), note


def _positions(n: int, n_cells: int, cell: int) -> Axis:
    """Return the side of a map of so many tokens in cells, with round numbers of tokens."""
    ticks = [tick for tick in nice_ticks(float(n)) if tick == round(tick)]
    return Axis(n=n_cells, ticks=tuple((tick / (n_cells * cell), f"{tick:,.0f}") for tick in ticks))


def _by_cell(values: NDArray[np.float32], cell: int, merge: np.ufunc) -> NDArray[np.float64]:
    """Return values by token as values by cell: the largest, or their mean."""
    starts = np.arange(0, len(values), cell)
    merged = merge.reduceat(values.astype(np.float64), starts)
    return np.asarray(merged if merge is np.maximum else merged / np.diff([*starts, len(values)]))


def _received_share(values: NDArray[np.float64], most: float) -> NDArray[np.float64]:
    """Return how far up values stand on the logarithmic scale from the least mass that is drawn to `most`."""
    low = _LEAST_RECEIVED
    return np.clip(np.log(np.maximum(values, low) / low) / math.log(most / low), 0, 1)
