"""Comparisons of heads in the terminal, with rich: tables of what is most and least alike, and what changes."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.text import Text

from attnscope.errors import amount
from attnscope.records.compare.pairs import MinimalPair, PicturePair
from attnscope.records.compare.record import Comparison, HeadComparison, ModelComparison, PickedHeads
from attnscope.records.frame.pair_tables import PairTable, head_name
from attnscope.views.compare.summary import (
    PICTURE_NOTES,
    both_texts,
    distance,
    distance_name,
    distance_with_interval,
    hidden_notes,
    key_name,
    largest_change,
    table_line,
    table_notes,
    texts_line,
    title_of,
    tokens_changed,
)
from attnscope.views.tables.numbers import percent
from attnscope.views.tables.plain_text import dim_lines, heading
from attnscope.views.tables.table import Column, Table
from attnscope.views.tables.wording import label, model_of, printable

_NAMES: dict[str, Any] = {"wraps": True, "least": 6, "style": "bold"}


_MOST = 10
"""Rows of a ranking."""


def show(found: Comparison, console: Console) -> RenderableType:
    """What a comparison found, as tables."""
    parts: list[RenderableType] = [Text(title_of(found), style="bold")]
    if isinstance(found, HeadComparison):
        parts += _heads(found)
    elif isinstance(found, PickedHeads):
        parts += _picked(found)
    elif isinstance(found, MinimalPair):
        parts += _pair(found)
    elif isinstance(found, PicturePair):
        parts += _pictures(found)
    elif isinstance(found, ModelComparison):
        parts += _models(found)
    return Group(*parts)


def _heads(found: HeadComparison) -> list[RenderableType]:
    table, arrangement = found.tables[0], found.arrangements[0]
    others = found.tables[1:]
    parts: list[RenderableType] = [Text(texts_line(found.corpus), style="dim")]
    apart = Column("distance", lambda pair: distance_with_interval(table, *pair))
    pair_of_heads = Column("heads", lambda pair: " ".join(_head(found, head) for head in pair), **_NAMES)
    others_of_pair = [
        Column(_short(other), partial(lambda of, pair: distance(of.distances[pair]), other), drop=at)
        for at, other in enumerate(others, 1)
    ]
    alike = Table([pair_of_heads, apart, *others_of_pair], found.most_alike(table, _MOST))
    head = Column("head", lambda pair: _head(found, pair[0]), **_NAMES)
    nearest = Column("nearest", lambda pair: _head(found, pair[1]), wraps=True, least=6)
    alone = Table([head, nearest, apart], found.most_alone(table, _MOST))
    layers = list(dict.fromkeys(layer for layer, _ in found.heads))
    columns = [
        Column("layer", lambda at: f"L{layers[at]}", style="bold"),
        Column("within", lambda at: distance(arrangement.layers[at, at])),
        Column("to the next", lambda at: "" if at + 1 == len(layers) else _layers(arrangement, at)),
    ]
    follow = Table(columns, range(len(layers)))
    parts += [heading(f"most alike, by {table_line(table)}"), alike]
    parts += [heading("most alone: the head nearest to them is far"), alone]
    parts += [heading("layers: the distance between all their heads"), follow, Text()]
    if found.roles is not None:
        parts.append(Text(f"roles: {printable(found.roles_source)}", style="dim"))
    return parts + dim_lines(_notes(table, found.kind))


def _layers(arrangement: object, number: int) -> str:
    values = [float(getattr(arrangement, part)[number, number + 1]) for part in ("layers", "layers_low", "layers_high")]
    between = f" [{distance(values[1])}, {distance(values[2])}]" if math.isfinite(values[1] + values[2]) else ""
    return distance(values[0]) + between


def _head(found: HeadComparison, number: int) -> str:
    """A head's name, with its role where that is known."""
    role = "" if found.roles is None else found.roles[number]
    return head_name(found.heads[number]) + (f" ({label(role)})" if role else "")


def _picked(found: PickedHeads) -> list[RenderableType]:
    table, other = found.tables[0], found.tables[1:]
    said: list[RenderableType] = [Text(f"“{printable(found.tokens.text, 160)}”", style="dim")]
    names = [head_name(place) for place in found.heads]
    columns = [Column("", lambda row: names[row], style="bold")]
    columns += [
        Column(name, partial(lambda at, row: distance(float(table.distances[row, at])), at))
        for at, name in enumerate(names)
    ]
    said += [heading(table_line(table)), Table(columns, range(len(names)), goes_on=True)]
    if len(names) == 2:
        said += [Text(f"{table_line(t)}: {distance(t.distances[0, 1])}", style="dim") for t in other]
    if found.single is not None:
        gap = np.abs(dict(found.differences())["single head − mean"].astype(np.float64)).sum(-1) / 2
        gap = gap[np.isfinite(gap)] if np.isfinite(gap).any() else np.zeros(1)
        said.append(Text(f"the single head moves {gap.mean():.0%} of a row's weight away from the mean of the heads"))
    said.append(Text(printable(found.single_note, 400), style="dim"))
    return said + dim_lines(_notes(table, found.kind))


def _pair(found: MinimalPair) -> list[RenderableType]:
    said: list[RenderableType] = [Text(f"“{printable(tokens.text, 160)}”", style="dim") for tokens in found.tokens]
    for ours, theirs in tokens_changed(found):
        said.append(Text.assemble(("−" + ours if ours else "", "red"), "  ", ("+" + theirs if theirs else "", "green")))
    overall, at = found.overall(), found.at_query()
    where = f"at “{printable(found.query, 40)}”" if found.queries else "overall"
    said.append(heading(f"the heads whose rows change most {where}, by {distance_name(found.measure)}"))

    def pair_of(head: int) -> int:
        pairs = found.queries or tuple(np.flatnonzero(found.equal).tolist())  # what `overall` is over
        values = found.divergences[found.measure][head, list(pairs)]
        return pairs[int(np.nan_to_num(values, nan=-1.0).argmax())]

    def change(head: int) -> Text:
        key, before, after = largest_change(found, head, pair_of(head))
        return Text.assemble(f"{key} ", (f"{_weight(before)} → {_weight(after)}", "cyan"))

    def query(head: int) -> str:
        return printable(found.tokens[0].labels[found.aligned[pair_of(head), 0]])

    columns = [
        *_columns_of_heads(found, where),
        Column("query", query, wraps=True, least=8),
        Column("the key that changes most", change, wraps=True, least=16),
    ]
    ranked = Table(columns, found.ranked()[:_MOST])
    every = at if found.queries else overall
    if len(every := every[np.isfinite(every)]) > 1:
        middle, nearly_all = (distance(float(value)) for value in np.quantile(every, (0.5, 0.9)))
        beside = f"{amount(len(every), 'head')} {where}: median {middle}, nine in ten at most {nearly_all}"
        said += [ranked, Text(beside, style="dim"), Text()]
    else:
        said += [ranked, Text()]
    notes = ["overall: the root mean square over the tokens that both texts share"]
    notes += [f"{_weight(None)}: the other text has no token for this one"] if any(found.unmatched()) else []
    return said + [Text(note, style="dim") for note in [*notes, *hidden_notes(found)]]


def _weight(weight: float | None) -> str:
    """A weight; of a key that is not there, a dash."""
    return "–" if weight is None else f"{weight:.2f}"


def _pictures(found: PicturePair) -> list[RenderableType]:
    said: list[RenderableType] = [Text(both_texts(found), style="dim")]
    said += [Text(facts, style="dim") for facts in dict.fromkeys(picture.facts for picture in found.pictures)]
    where = f"at “{printable(found.query, 40)}”" if found.queries else "overall"
    said.append(heading(f"the heads whose attention changes most {where}, by {distance_name(found.measure)}"))

    def word(head: int) -> str:
        return key_name(*found.words[int(np.nan_to_num(found.divergences[found.measure][head], nan=-1.0).argmax())])

    columns = [
        *_columns_of_heads(found, where),
        Column("on the picture", lambda head: " → ".join(percent(float(cells.sum())) for cells in found.maps(head)),
               style="cyan"),
        Column("most at the word", word, wraps=True, least=12),
    ]  # fmt: skip
    return [*said, Table(columns, found.ranked()[:_MOST]), Text(), *dim_lines(list(PICTURE_NOTES))]


def _columns_of_heads(found: MinimalPair | PicturePair, where: str) -> list[Column]:
    """A head, and how much it changes: at the query, if one is named, and overall."""
    overall, at = found.overall(), found.at_query()
    columns = [Column("head", lambda head: head_name(found.heads[head]), style="bold")]
    if found.queries:
        columns.append(Column(where, lambda head: distance(at[head]), wraps=True, least=9))
    return [*columns, Column("overall", lambda head: distance(overall[head]), drop=1 if found.queries else 0)]


def _models(found: ModelComparison) -> list[RenderableType]:
    table, matching = found.tables[0], dict(found.matchings[0].tolist())
    said: list[RenderableType] = [Text(texts_line(found.corpus), style="dim")]
    same = sorted(found.same(), key=lambda pair: -np.nan_to_num(table.mean[pair], nan=-1.0))
    names = model_of(found.run), model_of(found.other_run)
    said.append(heading(f"the heads that differ most from those of the same number, by {table_line(table)}"))

    def of_match(write: Callable[[int, int], str]) -> Callable[[tuple[int, int]], str]:
        return lambda pair: "" if (match := matching.get(pair[0])) is None else write(pair[0], match)

    columns = [
        Column("head", lambda pair: head_name(found.heads[pair[0]]), style="bold"),
        Column("distance", lambda pair: distance_with_interval(table, *pair)),
        Column("best match", of_match(lambda head, match: head_name(found.other_heads[match]))),
        Column("its distance", of_match(lambda head, match: distance(table.distances[head, match])), drop=1),
    ]
    said.append(Table(columns, same[:_MOST]))
    matched = f"{found.count_moved()} of {len(found.matchings[0])} heads of {names[0]} match one of another number"
    said += [Text(), Text(f"{matched} in {names[1]} (one to one, least sum of distances)")]
    return said + dim_lines(_notes(table, found.kind))


def _notes(table: PairTable, kind: str) -> list[str]:
    meaning, *hidden = table_notes(table, kind)
    intervals = ["in brackets: 95% interval over texts"] if np.isfinite(table.low).any() else []
    return [meaning, *intervals, *hidden]


def _short(table: PairTable) -> str:
    return table.name.replace("_", " ").replace("without", "w/o")
