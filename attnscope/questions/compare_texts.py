"""What is said of heads on one text, side by side, and on two texts that differ in little. Loads no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from attnscope.errors import amount
from attnscope.questions.compare_figures import Panel, Panels, RowPair, Rows
from attnscope.questions.distances import distance_line, guide, three_decimals
from attnscope.report.blocks import Block, Grid, HeadMap, Note, Ranking, Report, Special, Words
from attnscope.report.numbers import fixed
from attnscope.report.wording import corpus_notes, model_of, printable
from attnscope.results.table import Floats
from attnscope.results.tokens import tokens_of

if TYPE_CHECKING:
    from attnscope.questions.compare import Comparison
    from attnscope.results.tokens import Tokens

FIRST, SECOND = "first", "second"
_SHOWN_MAPS = 3
"""Heads whose change is drawn as maps."""
_SHOWN_ROWS = 6
"""Heads whose rows are drawn key by key."""
_AXES = "rows: queries (attend) · columns: keys (are attended to)"


def tokens(comparison: Comparison, side: str) -> Tokens:
    """Return the tokens of a text, "first" or "second"."""
    text = comparison.corpus["text" if side == FIRST else "other_text"]
    return tokens_of(comparison.table(f"tokens:{side}"), text)


def require_texts(comparison: Comparison) -> None:
    """Refuse texts that are none, and rows that could not be drawn.

    Raises:
        ValueError: They are.
    """
    for side in (FIRST, SECOND) if comparison.compared == "texts" else (FIRST,):
        tokens(comparison, side)
        weights = comparison.grids[f"weights:{side}"]
        if np.nansum(weights, -1).max(initial=0.0) > 1.1:
            raise ValueError("its weights sum to more than 1 in a row")
    if comparison.compared == "texts":
        for name in comparison.distance_names:
            if np.any(comparison.grids[f"divergence:{name}"] < 0):
                raise ValueError("a divergence is less than 0")


# Heads side by side on one text


def picked_report(comparison: Comparison) -> Report:
    """Return how far the picked heads are apart on a text, their mean, and the single head that they would make."""
    names, distances = comparison.head_names, comparison.distance()
    name = comparison.distance_names[0]
    listed = ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
    answer = [f"{listed} side by side on “{printable(comparison.corpus['text'], 160)}”"]
    if len(names) == 2:
        told = [
            f"{distance_line(each)} {fixed(comparison.distance(each)[0, 1], 3)}" for each in comparison.distance_names
        ]
        answer.append("; ".join(told))
    else:
        rows, columns = np.triu_indices(len(names), 1)
        nearest, farthest = (int(find(distances[rows, columns])) for find in (np.nanargmin, np.nanargmax))
        answer.append(
            f"{names[rows[nearest]]} and {names[columns[nearest]]} are nearest "
            f"({fixed(distances[rows[nearest], columns[nearest]], 3)}), {names[rows[farthest]]} and "
            f"{names[columns[farthest]]} farthest ({fixed(distances[rows[farthest], columns[farthest]], 3)})"
        )
    if "single:first" in comparison.grids:
        moved = f"{_moved_by_single(comparison):.0%} of a row's weight"
        answer.append(f"the single head moves {moved} away from the mean of the heads")
    return Report(
        model=model_of(comparison.run),
        answer=answer,
        blocks=list(_picked_blocks(comparison, name)),
        guide=[*guide(comparison), printable(comparison.options["single_note"], 400)],
        subtitle=f"“{' '.join(str(comparison.corpus['text']).split())}”",
        problems=corpus_notes(comparison),
    )


def _picked_blocks(comparison: Comparison, name: str) -> Iterator[Block]:
    names = comparison.head_names
    yield Grid(
        heading=distance_line(name),
        values=comparison.distance(),
        rows=names,
        columns=names,
        most=len(names),
    )
    text = tokens(comparison, FIRST)
    weights, mean = comparison.grids["weights:first"], comparison.grids["mean:first"]
    panels = [Panel(name, values, text, text) for name, values in zip(names, weights, strict=True)]
    panels.append(Panel("mean", mean, text, text))
    single = comparison.grids.get("single:first")
    if single is not None:
        panels.append(Panel("single head", single, text, text))
    listed = ", ".join(names[:6])
    yield Special(printed="never", figure="picked", view=Panels(f"{listed} side by side", panels, [_AXES]))
    if len(names) == 2:
        differences = [Panel(f"{names[0]} − {names[1]}", _difference(weights[0], weights[1]), text, text)]
    else:
        differences = [
            Panel(f"{name} − mean", _difference(values, mean), text, text)
            for name, values in zip(names, weights, strict=True)
        ]
    if single is not None:
        differences.append(Panel("single head − mean", _difference(single, mean), text, text))
    view = Panels(f"{listed}: differences", differences, [_AXES], "difference of attention weights")
    yield Special(printed="never", figure="differences", view=view)


def _difference(first: Floats, second: Floats) -> Floats:
    """Return how two maps differ; NaN where a row of either is empty."""
    is_there = first.any(-1, keepdims=True) & second.any(-1, keepdims=True)
    return np.where(is_there, first - second, np.nan)


def _moved_by_single(comparison: Comparison) -> float:
    """Return the mean share of a row that the single head puts elsewhere than the mean of the heads."""
    difference = _difference(comparison.grids["single:first"], comparison.grids["mean:first"])
    gap = np.abs(difference.astype(np.float64)).sum(-1) / 2
    return float(np.nanmean(gap)) if np.isfinite(gap).any() else 0.0


# Two texts


def texts_report(comparison: Comparison) -> Report:
    """Return the heads whose rows change most from one text to the other, and at which key."""
    name = comparison.distance_names[0]
    heads, order = comparison.table("heads"), ranked(comparison)
    query = comparison.options.get("query")
    at_query = f"{name}_at_query" if comparison.table("aligned")["asked"].any() else ""
    column = at_query or f"{name}_overall"
    where = f"at “{printable(query, 40)}”" if at_query else "overall"
    answer = [f"{_both_texts(comparison)}"]
    if order:
        answer.insert(0, _most_changed(comparison, order[0], column, where))
    changes = heads[column][np.isfinite(heads[column])]
    if len(changes) > 1:
        middle, nearly_all = (three_decimals(float(value)) for value in np.quantile(changes, (0.5, 0.9)))
        answer.append(f"{amount(len(changes), 'head')} {where}: median {middle}, nine in ten at most {nearly_all}")
    return Report(
        model=model_of(comparison.run),
        answer=answer,
        blocks=list(_texts_blocks(comparison, order, column, where)),
        guide=[
            *guide(comparison),
            "overall: the root mean square over the tokens that both texts share",
            *(["–: the other text has no token for this one"] if any(map(len, unmatched(comparison))) else []),
        ],
        subtitle=_both_texts(comparison),
        problems=corpus_notes(comparison),
    )


def ranked(comparison: Comparison) -> list[int]:
    """Return the heads by how much they change, most first: at the query if there is one, else overall."""
    heads, name = comparison.table("heads"), comparison.distance_names[0]
    has_query = comparison.table("aligned")["asked"].any()
    change = heads[f"{name}_at_query" if has_query else f"{name}_overall"]
    return [int(head) for head in np.argsort(-change, kind="stable") if math.isfinite(change[head])]


def unmatched(comparison: Comparison) -> tuple[list[int], list[int]]:
    """Return the tokens that the other text has nothing for, in the first and in the second text."""
    aligned = comparison.table("aligned")
    alone = []
    for side in (FIRST, SECOND):
        matched = {*aligned[side].tolist()}
        alone.append([token for token in range(len(comparison.table(f"tokens:{side}"))) if token not in matched])
    return alone[0], alone[1]


def _most_changed(comparison: Comparison, head: int, column: str, where: str) -> str:
    """Say which head changes most, and at which key."""
    key, before, after = largest_change(comparison, head, _pair_of(comparison, head))
    change = three_decimals(comparison.table("heads")[column][head])
    return f"{comparison.head_names[head]} changes most {where} ({change}): {key} {_weight(before)} → {_weight(after)}"


def _texts_blocks(comparison: Comparison, order: list[int], column: str, where: str) -> Iterator[Block]:
    heads, names = comparison.table("heads"), comparison.head_names
    name = comparison.distance_names[0]
    overall = f"{name}_overall"
    queries, keys = [""] * len(names), [""] * len(names)
    labels = comparison.table("tokens:first")["token"]
    for head in order:
        pair = _pair_of(comparison, head)
        key, before, after = largest_change(comparison, head, pair)
        queries[head] = printable(labels[comparison.table("aligned")["first"][pair]])
        keys[head] = f"{key} {_weight(before)} → {_weight(after)}"
    columns = [*dict.fromkeys([column, overall])]
    yield Ranking(
        heading=f"the heads whose rows change most {where}, by {distance_line(name)}",
        what="head",
        names=names,
        table=heads,
        columns=[*columns, Words("query", queries), Words("the key that changes most", keys, wraps=True)],
        order=order,
    )
    yield Note(heading="what differs", printed="with --all", lines=list(_changed_tokens(comparison)))
    for each in columns:
        figure = "change" if each == column else "change-overall"
        yield HeadMap(printed="never", figure=figure, title="what changes", heads=heads, column=each)
    yield from _map_figures(comparison, order)
    for pair in np.flatnonzero(comparison.table("aligned")["asked"]).tolist():
        yield _rows_figure(comparison, pair)


def _map_figures(comparison: Comparison, order: list[int]) -> Iterator[Block]:
    """Draw the heads that change most: their differences on tokens of both texts, and the first of them on each."""
    aligned = comparison.table("aligned")
    if not order or not len(aligned):
        return
    names = comparison.head_names
    first, second = tokens(comparison, FIRST), tokens(comparison, SECOND)
    rows = {side: aligned[side] for side in (FIRST, SECOND)}
    marked = np.flatnonzero(~aligned["equal"] | aligned["asked"]).tolist()
    both = _joined(comparison)
    panels = []
    for head in order[:_SHOWN_MAPS]:
        ours, theirs = (
            comparison.grids[f"weights:{side}"][head][np.ix_(rows[side], rows[side])] for side in (FIRST, SECOND)
        )
        panels.append(Panel(f"{names[head]}: second − first", theirs - ours, both, both, marked))
    notes = [_AXES, "tokens that both texts have a place for"]
    meaning = "attention weight in the second text − in the first"
    view = Panels("what changes: the heads that change most", panels, notes, meaning)
    yield Special(printed="never", figure="differences", view=view)
    head, name = order[0], names[order[0]]
    panels = []
    for side, text in ((FIRST, first), (SECOND, second)):
        weights = comparison.grids[f"weights:{side}"][head]
        panels.append(Panel(f"{name}: {side} text", weights, text, text, rows[side][marked].tolist()))
    yield Special(printed="never", figure="maps", view=Panels(f"what changes: {name}", panels, [_AXES]))


def _joined(comparison: Comparison) -> Tokens:
    """Return the aligned tokens; replaced ones with both labels."""
    aligned = comparison.table("aligned")
    first, second = tokens(comparison, FIRST), tokens(comparison, SECOND)
    pairs = zip(aligned[FIRST].tolist(), aligned[SECOND].tolist(), strict=True)
    labels = tuple(key_name(first.labels[a], second.labels[b]) for a, b in pairs)
    return replace(first.take(aligned[FIRST]), labels=labels)


def _rows_figure(comparison: Comparison, pair: int) -> Block:
    """Draw the keys that one query attends to in both texts, in the heads that change most there."""
    name = comparison.distance_names[0]
    divergences = np.nan_to_num(comparison.grids[f"divergence:{name}"][:, pair], nan=-1.0)
    order = [int(head) for head in np.argsort(-divergences, kind="stable") if divergences[head] >= 0][:_SHOWN_ROWS]
    keys, before, after = _rows_of(comparison, pair, order)
    titles = [f"{comparison.head_names[head]} · {three_decimals(math.sqrt(divergences[head]))}" for head in order]
    query = int(comparison.table("aligned")[FIRST][pair])
    label = comparison.table("tokens:first")["token"][query]
    rows = [RowPair(title, before[row], after[row]) for row, title in enumerate(titles)]
    notes = [
        "bars: the share of the query's attention that a key gets; a full panel is 1",
        f"heads: those whose row changes most here, by {distance_line(name)}",
    ]
    view = Rows(f"what “{printable(label, 40)}” attends to", rows, keys, notes)
    return Special(printed="never", figure=f"query-{query:03d}", view=view)


def _rows_of(comparison: Comparison, pair: int, heads: list[int]) -> tuple[list[str], Floats, Floats]:
    """Return the keys of a query, and their weights in the first and in the second text, (head, key).

    Keys stand in the order of the first text. What stands in the second alone comes after the token before it there,
    and weighs 0 in the first.
    """
    aligned = comparison.table("aligned")
    labels = {side: comparison.table(f"tokens:{side}")["token"].tolist() for side in (FIRST, SECOND)}
    alone = unmatched(comparison)
    ours = comparison.grids["weights:first"][heads, aligned[FIRST][pair]]
    theirs = comparison.grids["weights:second"][heads, aligned[SECOND][pair]]
    keys, places, before, after = [], [], [], []
    nothing = np.zeros(len(heads))
    for a, b in zip(aligned[FIRST].tolist(), aligned[SECOND].tolist(), strict=True):
        keys.append(key_name(labels[FIRST][a], labels[SECOND][b]))
        places.append(float(a))
        before.append(ours[:, a])
        after.append(theirs[:, b])
    for a in alone[0]:
        keys.append(printable(labels[FIRST][a]))
        places.append(float(a))
        before.append(ours[:, a])
        after.append(nothing)
    for b in alone[1]:
        earlier = aligned[FIRST][aligned[SECOND] < b]
        keys.append(printable(labels[SECOND][b]))
        places.append(float(earlier.max(initial=-1)) + 0.5 + b * 1e-6)
        before.append(nothing)
        after.append(theirs[:, b])
    order = np.argsort(places, kind="stable")
    return [keys[key] for key in order], np.stack(before, 1)[:, order], np.stack(after, 1)[:, order]


def _pair_of(comparison: Comparison, head: int) -> int:
    """Return the aligned token at which a head changes most: among those that the query names, or the equal ones."""
    aligned = comparison.table("aligned")
    pairs = np.flatnonzero(aligned["asked"] if aligned["asked"].any() else aligned["equal"])
    values = comparison.grids[f"divergence:{comparison.distance_names[0]}"][head, pairs]
    return int(pairs[np.nan_to_num(values, nan=-1.0).argmax()])


def largest_change(comparison: Comparison, head: int, pair: int) -> tuple[str, float | None, float | None]:
    """Return the key whose weight changes most in a row: its label, its weight in the first and in the second text.

    A key that one text lacks weighs 0 there, and is given as None.

    Args:
        comparison: A comparison of two texts.
        head: The head's row.
        pair: The aligned query.
    """
    aligned = comparison.table("aligned")
    labels = {side: comparison.table(f"tokens:{side}")["token"].tolist() for side in (FIRST, SECOND)}
    ours = comparison.grids["weights:first"][head, aligned[FIRST][pair]].tolist()
    theirs = comparison.grids["weights:second"][head, aligned[SECOND][pair]].tolist()
    alone = unmatched(comparison)
    keys: list[tuple[str, float | None, float | None]] = []
    for a, b in zip(aligned[FIRST].tolist(), aligned[SECOND].tolist(), strict=True):
        keys.append((key_name(labels[FIRST][a], labels[SECOND][b]), ours[a], theirs[b]))
    keys += [(printable(labels[FIRST][a]), ours[a], None) for a in alone[0]]
    keys += [(printable(labels[SECOND][b]), None, theirs[b]) for b in alone[1]]
    return max(keys, key=lambda key: abs((key[1] or 0.0) - (key[2] or 0.0)))


def _weight(weight: float | None) -> str:
    """Return a weight; of a key that is not there, a dash."""
    return "–" if weight is None else f"{weight:.2f}"


def _changed_tokens(comparison: Comparison) -> Iterator[str]:
    """Return the differences of the texts, stretch by stretch: what goes, and what comes."""
    aligned = comparison.table("aligned")
    labels = {side: comparison.table(f"tokens:{side}")["token"].tolist() for side in (FIRST, SECOND)}
    equal = aligned.select(aligned["equal"])
    ends = [*zip(equal[FIRST].tolist(), equal[SECOND].tolist(), strict=True)]
    ends.append((len(labels[FIRST]), len(labels[SECOND])))
    before = (-1, -1)
    for end in ends:
        ours = " ".join(labels[FIRST][before[0] + 1 : end[0]])
        theirs = " ".join(labels[SECOND][before[1] + 1 : end[1]])
        if ours or theirs:
            yield "  ".join(
                part for part in (ours and f"−{printable(ours)}", theirs and f"+{printable(theirs)}") if part
            )
        before = end


def _both_texts(comparison: Comparison) -> str:
    """Return the two texts on one line."""
    texts = [" ".join(str(comparison.corpus[name]).split()) for name in ("text", "other_text")]
    return f"“{texts[0]}”  →  “{texts[1]}”"


def key_name(ours: str, theirs: str) -> str:
    """Return what a key of two texts is called: its label, or both where they differ."""
    return printable(ours if ours == theirs else f"{ours}/{theirs}")
