"""Report heads side by side on one text, and on two texts that differ in little. Loads no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from attnscope.errors import amount
from attnscope.questions.distances import distance_line, guide, three_decimals
from attnscope.questions.heatmap_plates import axis_of
from attnscope.report.blocks import Block, Grid, HeadMap, Ranking, Report, Special, Words
from attnscope.report.numbers import fixed
from attnscope.report.panels import AXES, Panel, Panels
from attnscope.report.wording import corpus_notes, model_of, printable
from attnscope.results.table import Floats
from attnscope.results.tokens import Tokens, tokens_of

if TYPE_CHECKING:
    from attnscope.questions.compare import Comparison

FIRST, SECOND = "first", "second"
_SHOWN_MAPS = 3
"""Heads whose change is drawn as maps."""
_SHOWN_ROWS = 6
"""Heads whose rows are drawn key by key."""
_MOST_KEYS = 24
"""Keys of a row that are drawn, those with the largest weights."""


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
        if np.nansum(comparison.grids[f"weights:{side}"], -1).max(initial=0.0) > 1.1:
            raise ValueError("its weights sum to more than 1 in a row")


# Heads side by side on one text


def picked_report(comparison: Comparison) -> Report:
    """Return how far the picked heads are apart on a text, their mean, and the single head that they would make."""
    names = comparison.head_names
    distances = comparison.distance()
    name = distance_line(comparison.distance_names[0])
    listed = ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
    rows, columns = np.triu_indices(len(names), 1)
    apart = distances[rows, columns]
    pairs = [f"{names[a]} and {names[b]}" for a, b in zip(rows, columns, strict=True)]
    answer = [f"{listed} side by side on “{printable(comparison.corpus['text'], 160)}”"]
    if len(names) == 2:
        answer.append(f"{name} {fixed(apart[0], 3)}")
    elif np.isfinite(apart).any():
        near, far = int(np.nanargmin(apart)), int(np.nanargmax(apart))
        nearest = f"{pairs[near]} are nearest ({fixed(apart[near], 3)})"
        answer.append(f"{nearest}, {pairs[far]} farthest ({fixed(apart[far], 3)})")

    # The heads and what is made of them, side by side; and how they differ.
    text = axis_of(tokens(comparison, FIRST))
    mean = comparison.grids["mean:first"]
    maps = dict(zip(names, comparison.grids["weights:first"], strict=True))
    made = {"single head": comparison.grids["single:first"]} if "single:first" in comparison.grids else {}
    differences = {f"{name} − mean": _difference(values, mean) for name, values in {**maps, **made}.items()}
    if len(names) == 2:
        first, second = names
        differences = {f"{first} − {second}": _difference(maps[first], maps[second])}
        differences |= {f"{name} − mean": _difference(values, mean) for name, values in made.items()}
    if made:
        gap = np.abs(_difference(made["single head"].astype(np.float64), mean)).sum(-1) / 2
        moved = float(np.nanmean(gap)) if np.isfinite(gap).any() else 0.0
        answer.append(f"the single head moves {moved:.0%} of a row's weight away from the mean of the heads")
    shown = [Panel(name, values, text, text) for name, values in {**maps, "mean": mean, **made}.items()]
    differing = [Panel(name, values, text, text) for name, values in differences.items()]
    meaning = "difference of attention weights"
    how_they_differ = Panels(f"{listed}: differences", differing, [AXES], meaning)
    side_by_side = Panels(f"{listed} side by side", shown)
    return Report(
        model=model_of(comparison.run),
        answer=answer,
        blocks=[
            Grid(heading=name, values=distances, rows=names, columns=names, most=len(names)),
            Special(printed="never", figure="picked", view=side_by_side),
            Special(printed="never", figure="differences", view=how_they_differ),
        ],
        guide=[*guide(comparison), printable(comparison.options["single_note"], 400)],
        subtitle=f"“{' '.join(str(comparison.corpus['text']).split())}”",
        problems=corpus_notes(comparison),
    )


def _difference(first: Floats, second: Floats) -> Floats:
    """Return how two maps differ; NaN where a row of either is empty."""
    is_there = first.any(-1, keepdims=True) & second.any(-1, keepdims=True)
    return np.where(is_there, first - second, np.nan)


# Two texts


@dataclass(frozen=True, eq=False)
class Keys:
    """The keys of two texts in the order of the first; a key of the second alone follows its neighbour.

    Attributes:
        names: What the keys are called.
        first: The token of each in the first text; -1 = it is in the second alone.
        second: The same of the second text.
    """

    names: list[str]
    first: NDArray[np.int64]
    second: NDArray[np.int64]

    @classmethod
    def of(cls, comparison: Comparison) -> Keys:
        """Return the keys of two texts."""
        aligned = comparison.table("aligned")
        labels = [comparison.table(f"tokens:{side}")["token"].tolist() for side in (FIRST, SECOND)]
        ours, theirs = aligned[FIRST], aligned[SECOND]
        alone = [np.setdiff1d(np.arange(len(labels[side])), (ours, theirs)[side]) for side in (0, 1)]
        # Tokens of the second text alone stand behind the last aligned one before them.
        before = [ours[theirs < token].max(initial=-1) + 0.5 for token in alone[1].tolist()]
        order = np.argsort([*ours, *alone[0], *before], kind="stable")
        first = np.concatenate([ours, alone[0], np.full(len(alone[1]), -1)])[order]
        second = np.concatenate([theirs, np.full(len(alone[0]), -1), alone[1]])[order]
        names = [
            _key_name(labels[0][a] if a >= 0 else "", labels[1][b] if b >= 0 else "")
            for a, b in zip(first.tolist(), second.tolist(), strict=True)
        ]
        return cls(names, first, second)

    def weights(self, comparison: Comparison, head: int, pair: int) -> Floats:
        """Return a row of both texts, (2, key), of an aligned query; a key that is not in a text weighs 0 there."""
        aligned = comparison.table("aligned")
        rows = []
        for side, places in ((FIRST, self.first), (SECOND, self.second)):
            row = comparison.grids[f"weights:{side}"][head, aligned[side][pair]]
            rows.append(np.where(places >= 0, row[places], 0.0))
        return np.stack(rows)

    def largest_change(self, comparison: Comparison, head: int, pair: int) -> str:
        """Say which key's weight changes most in a row, and from what to what; of a key that a text lacks, a dash."""
        # Both rows over the keys of both texts, (key,).
        before, after = self.weights(comparison, head, pair)
        key = int(np.abs(after - before).argmax())
        written = [
            "–" if places[key] < 0 else f"{weight:.2f}"
            for places, weight in (
                (self.first, before[key]),
                (self.second, after[key]),
            )
        ]
        return f"{self.names[key]} {written[0]} → {written[1]}"


def _key_name(ours: str, theirs: str) -> str:
    """Return what a key of two texts is called: its label, or both where they differ."""
    return printable("/".join(dict.fromkeys(label for label in (ours, theirs) if label)))


def texts_report(comparison: Comparison) -> Report:
    """Return the heads whose rows change most from one text to the other, and at which key."""
    name = comparison.distance_names[0]
    heads, names = comparison.table("heads"), comparison.head_names
    aligned = comparison.table("aligned")
    has_query = bool(aligned["asked"].any())
    overall = f"{name}_overall"
    column = f"{name}_at_query" if has_query else overall
    where = f"at “{printable(comparison.options.get('query'), 40)}”" if has_query else "overall"
    order = ranked(comparison)

    # What changes most in each head, and how much heads change.
    keys = Keys.of(comparison)
    labels = comparison.table("tokens:first")["token"]
    queries, changes = [""] * len(names), [""] * len(names)
    for head in order:
        pair = _most_changed_pair(comparison, head)
        queries[head] = printable(labels[aligned[FIRST][pair]])
        changes[head] = keys.largest_change(comparison, head, pair)
    texts = [" ".join(str(comparison.corpus[name]).split()) for name in ("text", "other_text")]
    both_texts = f"“{texts[0]}”  →  “{texts[1]}”"
    answer = [both_texts]
    known = heads[column][order]
    if order:
        first = order[0]
        answer.insert(0, f"{names[first]} changes most {where} ({three_decimals(known[0])}): {changes[first]}")
    if len(order) > 1:
        middle, nearly_all = (three_decimals(float(value)) for value in np.quantile(known, (0.5, 0.9)))
        answer.append(f"{amount(len(order), 'head')} {where}: median {middle}, nine in ten at most {nearly_all}")

    columns = [*dict.fromkeys([column, overall])]
    blocks: list[Block] = [
        Ranking(
            heading=f"the heads whose rows change most {where}, by {distance_line(name)}",
            what="head",
            names=names,
            table=heads,
            columns=[*columns, Words("query", queries), Words("the key that changes most", changes, wraps=True)],
            order=order,
        )
    ]
    for each in columns:
        figure = "change" if each == column else "change-overall"
        blocks.append(HeadMap(printed="never", figure=figure, title="what changes", heads=heads, column=each))
    if order:
        blocks += _map_figures(comparison, order)
    blocks += [_rows_figure(comparison, keys, pair) for pair in np.flatnonzero(aligned["asked"]).tolist()]
    legend = [*guide(comparison), "overall: the root mean square over the tokens that both texts share"]
    if min(keys.first.min(initial=0), keys.second.min(initial=0)) < 0:
        legend.append("–: the other text has no token for this one")
    return Report(
        model=model_of(comparison.run),
        answer=answer,
        blocks=blocks,
        guide=legend,
        subtitle=both_texts,
        problems=corpus_notes(comparison),
    )


def ranked(comparison: Comparison) -> list[int]:
    """Return the heads by how much they change, most first: at the query if there is one, else overall."""
    where = "at_query" if comparison.table("aligned")["asked"].any() else "overall"
    change = comparison.table("heads")[f"{comparison.distance_names[0]}_{where}"]
    return [int(head) for head in np.argsort(-change, kind="stable") if math.isfinite(change[head])]


def _most_changed_pair(comparison: Comparison, head: int) -> int:
    """Return the aligned token at which a head changes most: among those that the query names, or the equal ones."""
    aligned = comparison.table("aligned")
    pairs = np.flatnonzero(aligned["asked"] if aligned["asked"].any() else aligned["equal"])
    values = comparison.grids[f"divergence:{comparison.distance_names[0]}"][head, pairs]
    return int(pairs[np.nan_to_num(values, nan=-1.0).argmax()])


def _map_figures(comparison: Comparison, order: Sequence[int]) -> Iterator[Block]:
    """Draw the heads that change most: their differences on tokens of both texts, and the first of them on each."""
    aligned = comparison.table("aligned")
    names = comparison.head_names
    texts = {side: tokens(comparison, side) for side in (FIRST, SECOND)}
    weights = {side: comparison.grids[f"weights:{side}"] for side in (FIRST, SECOND)}
    marked = np.flatnonzero(~aligned["equal"] | aligned["asked"])

    # Aligned tokens; replaced ones with both labels.
    pairs = zip(aligned[FIRST].tolist(), aligned[SECOND].tolist(), strict=True)
    labels = tuple(_key_name(texts[FIRST].labels[a], texts[SECOND].labels[b]) for a, b in pairs)
    both = axis_of(replace(texts[FIRST].take(aligned[FIRST]), labels=labels), marked.tolist())
    panels = []
    for head in order[:_SHOWN_MAPS]:
        ours, theirs = (weights[side][head][np.ix_(aligned[side], aligned[side])] for side in (FIRST, SECOND))
        panels.append(Panel(f"{names[head]}: second − first", theirs - ours, both, both))
    notes = [AXES, "tokens that both texts have a place for"]
    meaning = "attention weight in the second text − in the first"
    view = Panels("what changes: the heads that change most", panels, notes, meaning)
    yield Special(printed="never", figure="differences", view=view)
    head = order[0]
    panels = []
    for side, text in texts.items():
        axis = axis_of(text, aligned[side][marked].tolist())
        panels.append(Panel(f"{names[head]}: {side} text", weights[side][head], axis, axis))
    yield Special(printed="never", figure="maps", view=Panels(f"what changes: {names[head]}", panels))


def _rows_figure(comparison: Comparison, keys: Keys, pair: int) -> Grid:
    """Return the keys that one query attends to in both texts, in the heads that change most there."""
    name = comparison.distance_names[0]
    # Divergences are (head,); heads without one, NaN, sort last and drop out.
    divergences = np.nan_to_num(comparison.grids[f"divergence:{name}"][:, pair], nan=-1.0)
    order = [head for head in np.argsort(-divergences, kind="stable").tolist() if divergences[head] >= 0]
    # Two rows per head, first and second text: (2 heads, key); keys keep the order of the text.
    rows = [keys.weights(comparison, head, pair) for head in order[:_SHOWN_ROWS]]
    weights = np.concatenate(rows)
    shown = np.sort(np.argsort(-weights.max(0), kind="stable")[:_MOST_KEYS])
    titles = []
    for head in order[:_SHOWN_ROWS]:
        change = three_decimals(math.sqrt(divergences[head]))
        titles += [f"{comparison.head_names[head]} · {change}: first text", "second text"]
    # The query is named by its token in the first text.
    query = int(comparison.table("aligned")[FIRST][pair])
    label = comparison.table("tokens:first")["token"][query]
    notes = [f"heads: those whose row changes most here, by {distance_line(name)}"]
    if len(shown) < len(keys.names):
        notes.append(f"the {amount(len(shown), 'key')} with the largest weights")
    return Grid(
        printed="never",
        figure=f"query-{query:03d}",
        title=f"what “{printable(label, 40)}” attends to",
        values=weights[:, shown],
        rows=titles,
        columns=[keys.names[key] for key in shown.tolist()],
        notes=notes,
    )
