"""Comparisons of heads in the terminal, with rich: tables of what is most and least alike, and what changes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from attnscope.errors import amount
from attnscope.records.comparison import (
    Comparison,
    HeadComparison,
    MinimalPair,
    ModelComparison,
    PickedHeads,
    PicturePair,
)
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
from attnscope.views.heads.summary import label, model_of, printable
from attnscope.views.tables.plain_text import dim_lines, heading, plain_table

_MOST_PICKED = 12


def show(found: Comparison, console: Console) -> None:
    """Prints what a comparison found, as tables."""
    console.print(tables(found, console))


def tables(found: Comparison, console: Console, most: int = 10) -> RenderableType:
    """What a comparison found, as tables.

    Args:
        found: The comparison.
        console: Tells the width.
        most: How many rows a ranking has.
    """
    parts: list[RenderableType] = [Text(title_of(found), style="bold")]
    if isinstance(found, HeadComparison):
        parts += _heads(found, most)
    elif isinstance(found, PickedHeads):
        parts += _picked(found, console)
    elif isinstance(found, MinimalPair):
        parts += _pair(found, most)
    elif isinstance(found, PicturePair):
        parts += _pictures(found, most)
    elif isinstance(found, ModelComparison):
        parts += _models(found, most)
    return Group(*parts)


def _heads(found: HeadComparison, most: int) -> list[RenderableType]:
    table, arrangement = found.tables[0], found.arrangements[0]
    others = found.tables[1:]
    parts: list[RenderableType] = [Text(texts_line(found.corpus), style="dim")]
    alike = _table(["heads", "distance", *map(_short, others)])
    for a, b in found.most_alike(table, most):
        pair = f"{_head(found, a)} {_head(found, b)}"
        alike.add_row(pair, distance_with_interval(table, a, b), *(distance(t.distances[a, b]) for t in others))
    alone = _table(["head", "nearest", "distance"])
    for a, b in found.most_alone(table, most):
        alone.add_row(_head(found, a), _head(found, b), distance_with_interval(table, a, b))
    layers = list(dict.fromkeys(layer for layer, _ in found.heads))
    follow = _table(["layer", "within", "to the next"])
    for number, layer in enumerate(layers):
        within = distance(arrangement.layers[number, number])
        following = "" if number + 1 == len(layers) else _layers(arrangement, number)
        follow.add_row(f"L{layer}", within, following)
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


def _picked(found: PickedHeads, console: Console) -> list[RenderableType]:
    table, other = found.tables[0], found.tables[1:]
    said: list[RenderableType] = [Text(f"“{printable(found.tokens.text, 160)}”", style="dim")]
    shown = min(len(found.heads), _MOST_PICKED, max(2, (console.width - 8) // 8))
    names = [head_name(place) for place in found.heads]
    matrix = _table(["", *names[:shown]])
    for row, name in enumerate(names):
        matrix.add_row(name, *(distance(table.distances[row, column]) for column in range(shown)))
    said += [heading(table_line(table)), matrix]
    if shown < len(names):
        said.append(
            Text(f"{amount(len(names) - shown, 'more column is', 'more columns are')} in the record", style="dim")
        )
    if len(names) == 2:
        said += [Text(f"{table_line(t)}: {distance(t.distances[0, 1])}", style="dim") for t in other]
    if found.single is not None:
        gap = np.abs(dict(found.differences())["single head − mean"].astype(np.float64)).sum(-1) / 2
        gap = gap[np.isfinite(gap)] if np.isfinite(gap).any() else np.zeros(1)
        said.append(Text(f"the single head moves {gap.mean():.0%} of a row's weight away from the mean of the heads"))
    said.append(Text(printable(found.single_note, 400), style="dim"))
    return said + dim_lines(_notes(table, found.kind))


def _pair(found: MinimalPair, most: int) -> list[RenderableType]:
    said: list[RenderableType] = [Text(f"“{printable(tokens.text, 160)}”", style="dim") for tokens in found.tokens]
    for ours, theirs in tokens_changed(found):
        said.append(Text.assemble(("−" + ours if ours else "", "red"), "  ", ("+" + theirs if theirs else "", "green")))
    overall, at = found.overall(), found.at_query()
    where = f"at “{printable(found.query, 40)}”" if found.queries else "overall"
    columns = ["head", *([where] if found.queries else []), "overall", "query", "the key that changes most"]
    said.append(heading(f"the heads whose rows change most {where}, by {distance_name(found.measure)}"))
    ranked = _table(columns)
    for head in found.ranked()[:most]:
        pairs = found.queries or tuple(range(len(found.aligned)))
        values = found.divergences[found.measure][head, list(pairs)]
        pair = pairs[int(np.nan_to_num(values, nan=-1.0).argmax())]
        query = printable(found.tokens[0].labels[found.aligned[pair, 0]])
        key, before, after = largest_change(found, head, pair)
        row = [distance(at[head])] if found.queries else []
        change = Text.assemble(f"{key} ", (f"{before:.2f} → {after:.2f}", "cyan"))
        ranked.add_row(head_name(found.heads[head]), *row, distance(overall[head]), query, change)
    every = at if found.queries else overall
    if len(every := every[np.isfinite(every)]) > 1:
        middle, nearly_all = (distance(float(value)) for value in np.quantile(every, (0.5, 0.9)))
        beside = f"{amount(len(every), 'head')} {where}: median {middle}, nine in ten at most {nearly_all}"
        said += [ranked, Text(beside, style="dim"), Text()]
    else:
        said += [ranked, Text()]
    said += [Text(note, style="dim") for note in hidden_notes(found)]
    return said


def _pictures(found: PicturePair, most: int) -> list[RenderableType]:
    said: list[RenderableType] = [Text(both_texts(found), style="dim")]
    said += [Text(facts, style="dim") for facts in dict.fromkeys(picture.facts for picture in found.pictures)]
    overall, at = found.overall(), found.at_query()
    where = f"at “{printable(found.query, 40)}”" if found.queries else "overall"
    columns = ["head", *([where] if found.queries else []), "overall", "on the picture", "most at the word"]
    said.append(heading(f"the heads whose attention changes most {where}, by {distance_name(found.measure)}"))
    ranked = _table(columns)
    for head in found.ranked()[:most]:
        before, after = (float(cells.sum()) for cells in found.maps(head))
        word = int(np.nan_to_num(found.divergences[found.measure][head], nan=-1.0).argmax())
        row = [distance(at[head])] if found.queries else []
        moved = Text(f"{before:.0%} → {after:.0%}", style="cyan")
        ranked.add_row(head_name(found.heads[head]), *row, distance(overall[head]), moved, key_name(*found.words[word]))
    return [*said, ranked, Text(), *dim_lines(list(PICTURE_NOTES))]


def _models(found: ModelComparison, most: int) -> list[RenderableType]:
    table, matching = found.tables[0], dict(found.matchings[0].tolist())
    said: list[RenderableType] = [Text(texts_line(found.corpus), style="dim")]
    same = sorted(found.same(), key=lambda pair: -np.nan_to_num(table.mean[pair], nan=-1.0))
    names = model_of(found.run), model_of(found.other_run)
    said.append(heading(f"the heads that differ most from those of the same number, by {table_line(table)}"))
    moved = _table(["head", "distance", "best match", "its distance"])
    for a, b in same[:most]:
        match = matching.get(a)
        name = "" if match is None else head_name(found.other_heads[match])
        to = "" if match is None else distance(table.distances[a, match])
        moved.add_row(head_name(found.heads[a]), distance_with_interval(table, a, b), name, to)
    said.append(moved)
    matched = (
        f"{found.moved()} of {len(found.matchings[0])} heads of {names[0]} match one of another number in {names[1]}"
    )
    said += [Text(), Text(matched + " (one to one, least sum of distances)")]
    return said + dim_lines(_notes(table, found.kind))


def _notes(table: PairTable, kind: str) -> list[str]:
    meaning, *hidden = table_notes(table, kind)
    intervals = ["in brackets: 95% interval over texts"] if np.isfinite(table.low).any() else []
    return [meaning, *intervals, *hidden]


def _short(table: PairTable) -> str:
    return table.name.replace("_", " ").replace("without", "w/o")


def _table(columns: Sequence[str]) -> Table:
    table = plain_table()
    for number, column in enumerate(columns):
        table.add_column(column, style="bold" if number == 0 else "", overflow="fold")
    return table
