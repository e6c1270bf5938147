"""Comparisons of heads in the terminal, with rich: tables of what is most and least alike, and what changes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.text import Text

from attnscope.errors import amount
from attnscope.records.compare.pairs import MinimalPair
from attnscope.records.compare.record import Comparison, HeadComparison, ModelComparison, PickedHeads
from attnscope.records.frame.pair_tables import Arrangement, PairTable, head_name
from attnscope.report.plain_text import dim_lines, heading
from attnscope.report.table import TextColumn, TextTable
from attnscope.report.wording import label, model_of, printable
from attnscope.views.compare.summary import (
    distance,
    distance_name,
    distance_with_interval,
    hidden_notes,
    largest_change,
    table_line,
    table_notes,
    texts_line,
    title_of,
    tokens_changed,
)

_NAMES: dict[str, Any] = {"wraps": True, "least": 6, "style": "bold"}


_MOST = 10
"""Rows of a ranking."""


def show(comparison: Comparison, console: Console) -> RenderableType:
    """A comparison as tables."""
    parts: list[RenderableType] = [Text(title_of(comparison), style="bold")]
    if isinstance(comparison, HeadComparison):
        parts += _show_heads(comparison)
    elif isinstance(comparison, PickedHeads):
        parts += _show_picked(comparison)
    elif isinstance(comparison, MinimalPair):
        parts += _show_pair(comparison)
    elif isinstance(comparison, ModelComparison):
        parts += _show_models(comparison)
    return Group(*parts)


def _show_heads(comparison: HeadComparison) -> list[RenderableType]:
    table, arrangement = comparison.tables[0], comparison.arrangements[0]
    others = comparison.tables[1:]
    parts: list[RenderableType] = [Text(texts_line(comparison.corpus), style="dim")]
    apart = TextColumn("distance", lambda pair: distance_with_interval(*table.distance_interval(*pair)))
    pair_of_heads = TextColumn(
        "heads", lambda pair: " ".join(_name_with_role(comparison, head) for head in pair), **_NAMES
    )
    others_of_pair = [
        TextColumn(_short(other), partial(lambda of, pair: distance(of.distances[pair]), other), drop=at)
        for at, other in enumerate(others, 1)
    ]
    alike = TextTable([pair_of_heads, apart, *others_of_pair], comparison.most_alike(table, _MOST))
    head = TextColumn("head", lambda pair: _name_with_role(comparison, pair[0]), **_NAMES)
    nearest = TextColumn("nearest", lambda pair: _name_with_role(comparison, pair[1]), wraps=True, least=6)
    alone = TextTable([head, nearest, apart], comparison.most_alone(table, _MOST))
    layers = list(dict.fromkeys(layer for layer, _ in comparison.heads))
    columns = [
        TextColumn("layer", lambda row: f"L{layers[row]}", style="bold"),
        TextColumn("within", lambda row: distance(arrangement.layers[row, row])),
        TextColumn("to the next", lambda row: "" if row + 1 == len(layers) else _distance_to_next(arrangement, row)),
    ]
    follow = TextTable(columns, range(len(layers)))
    parts += [heading(f"most alike, by {table_line(table)}"), alike]
    parts += [heading("most alone: the head nearest to them is far"), alone]
    parts += [heading("layers: the distance between all their heads"), follow, Text()]
    if comparison.roles is not None:
        parts.append(Text(f"roles: {printable(comparison.roles_source)}", style="dim"))
    return parts + dim_lines(_notes(table, comparison.kind))


def _distance_to_next(arrangement: Arrangement, row: int) -> str:
    edges = arrangement.layers, arrangement.layers_low, arrangement.layers_high
    return distance_with_interval(*(float(values[row, row + 1]) for values in edges))


def _name_with_role(comparison: HeadComparison, number: int) -> str:
    """A head's name, with its role where that is known."""
    role = "" if comparison.roles is None else comparison.roles[number]
    return head_name(comparison.heads[number]) + (f" ({label(role)})" if role else "")


def _show_picked(picked: PickedHeads) -> list[RenderableType]:
    table, other = picked.tables[0], picked.tables[1:]
    parts: list[RenderableType] = [Text(f"“{printable(picked.tokens.text, 160)}”", style="dim")]
    names = [head_name(place) for place in picked.heads]
    columns = [TextColumn("", lambda row: names[row], style="bold")]
    columns += [
        TextColumn(name, partial(lambda column, row: distance(float(table.distances[row, column])), column))
        for column, name in enumerate(names)
    ]
    parts += [heading(table_line(table)), TextTable(columns, range(len(names)), goes_on=True)]
    if len(names) == 2:
        parts += [Text(f"{table_line(t)}: {distance(t.distances[0, 1])}", style="dim") for t in other]
    if picked.single is not None:
        gap = np.abs(dict(picked.differences())["single head − mean"].astype(np.float64)).sum(-1) / 2
        gap = gap[np.isfinite(gap)] if np.isfinite(gap).any() else np.zeros(1)
        parts.append(Text(f"the single head moves {gap.mean():.0%} of a row's weight away from the mean of the heads"))
    parts.append(Text(printable(picked.single_note, 400), style="dim"))
    return parts + dim_lines(_notes(table, picked.kind))


def _show_pair(pair: MinimalPair) -> list[RenderableType]:
    parts: list[RenderableType] = [Text(f"“{printable(tokens.text, 160)}”", style="dim") for tokens in pair.tokens]
    for ours, theirs in tokens_changed(pair):
        parts.append(
            Text.assemble(("−" + ours if ours else "", "red"), "  ", ("+" + theirs if theirs else "", "green"))
        )
    where = f"at “{printable(pair.query, 40)}”" if pair.queries else "overall"
    parts.append(heading(f"the heads whose rows change most {where}, by {distance_name(pair.measure)}"))

    def pair_of(head: int) -> int:
        pairs = pair.queries or tuple(np.flatnonzero(pair.equal).tolist())  # what `overall` is over
        values = pair.divergences[pair.measure][head, list(pairs)]
        return pairs[int(np.nan_to_num(values, nan=-1.0).argmax())]

    def change(head: int) -> Text:
        key, before, after = largest_change(pair, head, pair_of(head))
        return Text.assemble(f"{key} ", (f"{_weight(before)} → {_weight(after)}", "cyan"))

    def query(head: int) -> str:
        return printable(pair.tokens[0].labels[pair.aligned[pair_of(head), 0]])

    overall, at_query = pair.overall(), pair.at_query()
    columns = [TextColumn("head", lambda head: head_name(pair.heads[head]), style="bold")]
    if pair.queries:
        columns.append(TextColumn(where, lambda head: distance(at_query[head]), wraps=True, least=9))
    columns += [
        TextColumn("overall", lambda head: distance(overall[head]), drop=1 if pair.queries else 0),
        TextColumn("query", query, wraps=True, least=8),
        TextColumn("the key that changes most", change, wraps=True, least=16),
    ]
    parts.append(TextTable(columns, pair.ranked()[:_MOST]))
    changes = at_query if pair.queries else overall
    if len(changes := changes[np.isfinite(changes)]) > 1:
        middle, nearly_all = (distance(float(value)) for value in np.quantile(changes, (0.5, 0.9)))
        spread = f"{amount(len(changes), 'head')} {where}: median {middle}, nine in ten at most {nearly_all}"
        parts.append(Text(spread, style="dim"))
    parts.append(Text())
    notes = ["overall: the root mean square over the tokens that both texts share"]
    notes += [f"{_weight(None)}: the other text has no token for this one"] if any(pair.unmatched()) else []
    return parts + [Text(note, style="dim") for note in [*notes, *hidden_notes(pair)]]


def _weight(weight: float | None) -> str:
    """A weight; of a key that is not there, a dash."""
    return "–" if weight is None else f"{weight:.2f}"


def _show_models(comparison: ModelComparison) -> list[RenderableType]:
    table, matching = comparison.tables[0], dict(comparison.matchings[0].tolist())
    parts: list[RenderableType] = [Text(texts_line(comparison.corpus), style="dim")]
    same = sorted(comparison.same(), key=lambda pair: -np.nan_to_num(table.mean[pair], nan=-1.0))
    names = model_of(comparison.run), model_of(comparison.other_run)
    parts.append(heading(f"the heads that differ most from those of the same number, by {table_line(table)}"))

    def of_match(write: Callable[[int, int], str]) -> Callable[[tuple[int, int]], str]:
        return lambda pair: "" if (match := matching.get(pair[0])) is None else write(pair[0], match)

    columns = [
        TextColumn("head", lambda pair: head_name(comparison.heads[pair[0]]), style="bold"),
        TextColumn("distance", lambda pair: distance_with_interval(*table.distance_interval(*pair))),
        TextColumn("best match", of_match(lambda head, match: head_name(comparison.other_heads[match]))),
        TextColumn("its distance", of_match(lambda head, match: distance(table.distances[head, match])), drop=1),
    ]
    parts.append(TextTable(columns, same[:_MOST]))
    parts += [Text(), Text(
        f"{comparison.count_moved()} of {len(matching)} heads of {names[0]} match one of another number in {names[1]} "
        "(one to one, least sum of distances)"
    )]  # fmt: skip
    return parts + dim_lines(_notes(table, comparison.kind))


def _notes(table: PairTable, kind: str) -> list[str]:
    meaning, *hidden = table_notes(table, kind)
    intervals = ["in brackets: 95% interval over texts"] if np.isfinite(table.low).any() else []
    return [meaning, *intervals, *hidden]


def _short(table: PairTable) -> str:
    return table.name.replace("_", " ").replace("without", "w/o")
