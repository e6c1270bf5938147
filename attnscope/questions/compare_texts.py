"""Report heads side by side on one text, and on two texts that differ in little. Loads no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from attnscope.errors import amount
from attnscope.questions.distances import distance_line, guide, texts_line, three_decimals
from attnscope.questions.heatmap_plates import axis_of
from attnscope.report.blocks import Block, Grid, HeadMap, Report, Special, Words, rank_heads
from attnscope.report.numbers import fixed, largest_first
from attnscope.report.panels import AXES, Panel, Panels
from attnscope.report.wording import printable, report_on
from attnscope.results.table import Floats
from attnscope.results.tokens import Tokens, tokens_of

if TYPE_CHECKING:
    from attnscope.questions.compare import Comparison

FIRST, SECOND = "first", "second"
_SIDES = {FIRST: "text", SECOND: "other_text"}
"""The two texts, and what each is called in a corpus."""

_SHOWN_MAPS = 3
"""Heads whose change is drawn as maps."""
_SHOWN_ROWS = 6
"""Heads whose rows are drawn key by key."""
_MOST_KEYS = 24
"""Keys of a row that are drawn, those with the largest weights."""


def tokens(comparison: Comparison, side: str) -> Tokens:
    """Return the tokens of a text, "first" or "second"."""
    return tokens_of(comparison.table(f"tokens:{side}"), comparison.corpus[_SIDES[side]])


def require_texts(comparison: Comparison) -> None:
    """Refuse texts that are none, and rows that could not be drawn.

    Raises:
        ValueError: They are.
    """
    for side in _SIDES if comparison.compared == "texts" else (FIRST,):
        tokens(comparison, side)
        if np.nansum(comparison.grids[f"weights:{side}"], -1).max(initial=0.0) > 1.1:
            raise ValueError("its weights sum to more than 1 in a row")


def make_report(
    comparison: Comparison, answer: Iterable[str], blocks: Sequence[Block], *explained: str, **more: Any
) -> Report:
    """Return the report of a comparison; without a `subtitle` among `more`, that of one over texts."""
    if "subtitle" not in more:
        more["source"] = texts_line(comparison)
        more["subtitle"] = f"{distance_line(comparison.distance_name)} · {more['source']}"
    return report_on(comparison, answer, blocks, [*guide(comparison), *explained], **more)


def _quoted(comparison: Comparison, side: str) -> str:
    """Return a text on one line, in quotation marks."""
    return f"“{' '.join(str(comparison.corpus[_SIDES[side]]).split())}”"


# Heads side by side on one text


def picked_report(comparison: Comparison) -> Report:
    """Return how far the picked heads are apart on a text, their mean, and the single head that they would make."""
    names = comparison.head_names
    distances = comparison.distance()
    listed = ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
    answer = [f"{listed} side by side on “{printable(comparison.corpus['text'], 160)}”"]
    answer.append(_say_distances(comparison))

    # The heads and what is made of them, side by side.
    mean = comparison.grids["mean:first"]
    maps = dict(zip(names, comparison.grids["weights:first"], strict=True))
    combined = (
        {"single head": comparison.grids["single:first"]} if "single:first" in comparison.grids else {}
    )
    for values in combined.values():
        gap = np.abs(_difference(values.astype(np.float64), mean)).sum(-1) / 2
        moved = float(np.nanmean(gap)) if np.isfinite(gap).any() else 0.0
        answer.append(
            f"the single head moves {moved:.0%} of a row's weight away from the mean of the heads"
        )
    shown = {**maps, "mean": mean, **combined}
    # How they differ: two heads from each other, several from their mean.
    differences = {
        f"{name} − mean": _difference(values, mean) for name, values in {**maps, **combined}.items()
    }
    if len(names) == 2:
        first, second = names
        del differences[f"{first} − mean"], differences[f"{second} − mean"]
        differences = {f"{first} − {second}": _difference(maps[first], maps[second]), **differences}

    axis = axis_of(tokens(comparison, FIRST))
    side_by_side = Panels(f"{listed} side by side", [Panel(*each, axis, axis) for each in shown.items()])
    how_they_differ = Panels(
        f"{listed}: differences",
        [Panel(*each, axis, axis) for each in differences.items()],
        difference="difference of attention weights",
    )
    heading = distance_line(comparison.distance_name)
    blocks = [
        Grid(heading=heading, values=distances, rows=names, columns=names, most=len(names)),
        Special(printed="never", figure="picked", view=side_by_side),
        Special(printed="never", figure="differences", view=how_they_differ),
    ]
    note = printable(comparison.options["single_note"], 400)
    return make_report(
        comparison, filter(None, answer), blocks, note, subtitle=_quoted(comparison, FIRST)
    )


def _say_distances(comparison: Comparison) -> str:
    """Return the distance of two heads; of several, which are nearest and which farthest. Empty if none is known."""
    names = comparison.head_names
    rows, columns = np.triu_indices(len(names), 1)
    apart = comparison.distance()[rows, columns]
    if len(names) == 2:
        return f"{distance_line(comparison.distance_name)} {fixed(apart[0], 3)}"
    if not np.isfinite(apart).any():
        return ""
    pairs = [f"{names[a]} and {names[b]}" for a, b in zip(rows, columns, strict=True)]
    near = int(np.nanargmin(apart))
    far = int(np.nanargmax(apart))
    nearest = f"{pairs[near]} are nearest ({fixed(apart[near], 3)})"
    return f"{nearest}, {pairs[far]} farthest ({fixed(apart[far], 3)})"


def _difference(first: Floats, second: Floats) -> Floats:
    """Return how two maps differ; NaN where a row of either is empty."""
    is_there = first.any(-1, keepdims=True) & second.any(-1, keepdims=True)
    return np.where(is_there, first - second, np.nan)


# Two texts


class Keys:
    """Hold the keys of two texts in the order of the first; a key of the second alone follows its neighbour.

    Attributes:
        positions: The token of each key in both texts, (2, key); -1 = the text has none.
        names: What the keys are called.
    """

    def __init__(self, comparison: Comparison) -> None:
        self._comparison = comparison
        # Tokens of the first text, aligned ones first; then those of the second text alone. (2, key)
        aligned = comparison.table("aligned")
        n_first, n_second = (len(comparison.table(f"tokens:{side}")) for side in _SIDES)
        first = np.concatenate([aligned[FIRST], np.setdiff1d(np.arange(n_first), aligned[FIRST])])
        second_alone = np.setdiff1d(np.arange(n_second), aligned[SECOND])
        positions = np.full((2, n_first + len(second_alone)), -1)
        positions[0, :n_first] = first
        positions[1, : len(aligned)] = aligned[SECOND]
        positions[1, n_first:] = second_alone
        # A token of the second text alone stands behind the last aligned one before it.
        before = [
            aligned[FIRST][aligned[SECOND] < token].max(initial=-1) + 0.5
            for token in second_alone.tolist()
        ]
        self.positions = positions[:, np.argsort([*first, *before], kind="stable")]
        self.names = _key_names(comparison, self.positions)

    def rows(self, head: int, pair: int) -> Floats:
        """Return a row of both texts, (2, key), of an aligned query; a key that is not in a text weighs 0 there."""
        rows = []
        for side, positions in zip(_SIDES, self.positions, strict=True):
            query = self._comparison.table("aligned")[side][pair]
            row = self._comparison.grids[f"weights:{side}"][head, query]
            rows.append(np.where(positions >= 0, row[positions], 0.0))
        return np.stack(rows)

    def largest_change(self, head: int, pair: int) -> str:
        """Say which key's weight changes most in a row, and from what to what; of a key that a text lacks, a dash."""
        before, after = rows = self.rows(head, pair)
        key = int(np.abs(after - before).argmax())
        written = [f"{weight:.2f}" for weight in rows[:, key]]
        for side in np.flatnonzero(self.positions[:, key] < 0):
            written[side] = "–"
        return f"{self.names[key]} {written[0]} → {written[1]}"


def _key_names(comparison: Comparison, positions: NDArray[np.int64]) -> list[str]:
    """Return what keys at positions in both texts, (2, key), are called: their label, or both where they differ."""
    # The last is that of -1.
    labels = [[*comparison.table(f"tokens:{side}")["token"].tolist(), ""] for side in _SIDES]
    pairs = [(labels[0][first], labels[1][second]) for first, second in positions.T.tolist()]
    return [printable("/".join(dict.fromkeys(filter(None, pair)))) for pair in pairs]


def texts_report(comparison: Comparison) -> Report:
    """Return the heads whose rows change most from one text to the other, and at which key."""
    heads = comparison.table("heads")
    names = comparison.head_names
    aligned = comparison.table("aligned")
    column, overall = _column_of_change(comparison), f"{comparison.distance_name}_overall"
    where = "on shared tokens"
    if column != overall:
        where = f"at “{printable(comparison.options.get('query'), 40)}”"
    order = ranked(comparison)

    # What changes most in each head.
    keys = Keys(comparison)
    labels = comparison.table("tokens:first")["token"]
    queries = [""] * len(names)
    changes = [""] * len(names)
    for head in order:
        pair = _most_changed_pair(comparison, head)
        queries[head] = printable(labels[aligned[FIRST][pair]])
        changes[head] = keys.largest_change(head, pair)
    both_texts = "  →  ".join(_quoted(comparison, side) for side in _SIDES)
    answer = [both_texts]
    known = heads[column][order]
    if order:
        first = order[0]
        answer = [
            f"{names[first]} differs most between the texts, {where}: distance {three_decimals(known[0])} (0 to 1)",
            f"most at “{queries[first]}”: weight on {changes[first]}",
            both_texts,
        ]
    if len(order) > 1:
        middle, nearly_all = (three_decimals(float(value)) for value in np.quantile(known, (0.5, 0.9)))
        answer.append(
            f"{amount(len(order), 'head')} {where}: median {middle}, 90th percentile {nearly_all}"
        )

    # How much heads change, and where.
    by = distance_line(comparison.distance_name)
    columns = [*dict.fromkeys([column, overall])]
    blocks: list[Block] = [
        rank_heads(
            comparison,
            [*columns, Words("query", queries), Words("the key that changes most", changes, wraps=True)],
            order,
            heading=f"the heads whose rows change most {where}, by {by}",
        )
    ]
    for each, figure in zip(columns, ("change", "change-overall"), strict=False):
        blocks.append(
            HeadMap(printed="never", figure=figure, title="what changes", heads=heads, column=each)
        )
    if order:
        blocks += _map_figures(comparison, order)
    blocks += [
        _rows_figure(comparison, keys, pair) for pair in np.flatnonzero(aligned["asked"]).tolist()
    ]
    explained = ["overall: the root mean square over the tokens that both texts share"]
    if keys.positions.min(initial=0) < 0:
        explained.append("–: the other text has no token for this one")
    return make_report(comparison, answer, blocks, *explained, subtitle=both_texts)


def _column_of_change(comparison: Comparison) -> str:
    """Return the column that heads are ranked by: at the query if there is one, else overall."""
    where = "at_query" if comparison.table("aligned")["asked"].any() else "overall"
    return f"{comparison.distance_name}_{where}"


def ranked(comparison: Comparison) -> list[int]:
    """Return the heads by how much they change, most first."""
    change = comparison.table("heads")[_column_of_change(comparison)]
    return largest_first(change)


def _most_changed_pair(comparison: Comparison, head: int) -> int:
    """Return the aligned token at which a head changes most: among those that the query names, or the equal ones."""
    aligned = comparison.table("aligned")
    pairs = np.flatnonzero(aligned["asked"] if aligned["asked"].any() else aligned["equal"])
    values = comparison.grids[f"divergence:{comparison.distance_name}"][head, pairs]
    return int(pairs[np.nan_to_num(values, nan=-1.0).argmax()])


def _map_figures(comparison: Comparison, order: Sequence[int]) -> Iterator[Block]:
    """Draw the heads that change most: their differences on tokens of both texts, and the first of them on each."""
    aligned = comparison.table("aligned")
    names = comparison.head_names
    marked = np.flatnonzero(~aligned["equal"] | aligned["asked"])

    # Differences on aligned tokens; replaced ones have both labels.
    labels = _key_names(comparison, np.stack([aligned[side] for side in _SIDES]))
    shared = replace(tokens(comparison, FIRST).take(aligned[FIRST]), labels=tuple(labels))
    axis = axis_of(shared, marked.tolist())
    panels = []
    for head in order[:_SHOWN_MAPS]:
        first, second = (
            comparison.grids[f"weights:{side}"][head][np.ix_(aligned[side], aligned[side])]
            for side in _SIDES
        )
        panels.append(Panel(f"{names[head]}: second − first", second - first, axis, axis))
    notes = [AXES, "tokens that both texts have a place for"]
    meaning = "attention weight in the second text − in the first"
    view = Panels("what changes: the heads that change most", panels, notes, meaning)
    yield Special(printed="never", figure="differences", view=view)

    # The first head on each text.
    head = order[0]
    panels = []
    for side in _SIDES:
        axis = axis_of(tokens(comparison, side), aligned[side][marked].tolist())
        weights = comparison.grids[f"weights:{side}"][head]
        panels.append(Panel(f"{names[head]}: {side} text", weights, axis, axis))
    yield Special(printed="never", figure="maps", view=Panels(f"what changes: {names[head]}", panels))


def _rows_figure(comparison: Comparison, keys: Keys, pair: int) -> Grid:
    """Return the keys that one query attends to in both texts, in the heads that change most there."""
    # Divergences are (head,); heads without one, NaN, sort last and drop out.
    divergences = comparison.grids[f"divergence:{comparison.distance_name}"][:, pair]
    order = largest_first(divergences, _SHOWN_ROWS)
    # Two rows per head, first and second text: (2 heads, key); keys keep the order of the text.
    weights = np.concatenate([keys.rows(head, pair) for head in order])
    shown = sorted(largest_first(weights.max(0), _MOST_KEYS))
    titles = []
    for head in order:
        change = three_decimals(math.sqrt(divergences[head]))
        titles += [f"{comparison.head_names[head]} · {change}: first text", "second text"]
    # The query is named by its token in the first text.
    query = int(comparison.table("aligned")[FIRST][pair])
    label = comparison.table("tokens:first")["token"][query]
    notes = [f"heads: those whose row changes most here, by {distance_line(comparison.distance_name)}"]
    if len(shown) < len(keys.names):
        notes.append(f"the {amount(len(shown), 'key')} with the largest weights")
    return Grid(
        printed="never",
        figure=f"query-{query:03d}",
        title=f"what “{printable(label, 40)}” attends to",
        values=weights[:, shown],
        rows=titles,
        columns=[keys.names[key] for key in shown],
        notes=notes,
    )
