"""Report on a few heads side by side on one text, and on all heads on two texts that differ in a few words.

`questions.compare` chooses the report, and makes its other reports by `make_report` too. This module loads no torch.

Two texts are aligned token by token. An aligned pair, a row of the table `aligned`, is a token of each text: `equal`
tokens, or a token that replaces another. It is `asked` if the user's query names it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from attnscope.arrays import Floats
from attnscope.drawing.map_figure import Axis
from attnscope.errors import amount
from attnscope.questions.distances import (
    describe_texts,
    explain_distance,
    format_distance,
    name_distance,
)
from attnscope.questions.heatmap import MAX_ROW_SUM
from attnscope.questions.heatmap_plates import make_axis
from attnscope.report.blocks import Block, CustomBlock, Grid, HeadMap, Report, WordsColumn, rank_heads
from attnscope.report.numbers import largest_first
from attnscope.report.panels import AXES_NOTE, Panel, Panels
from attnscope.report.wording import list_some, printable, report_on
from attnscope.results.tokens import Tokens, tokens_from_table

if TYPE_CHECKING:
    from attnscope.questions.compare import Comparison

_SIDES = {"first": "text", "second": "other_text"}
"""The key of each text in `corpus`, by the suffix of its tables and arrays, such as "first" in "tokens:first"."""

_MAX_NAMED_HEADS = 6
"""The most heads that the report names; it says only how many others there are."""
_N_MAPPED_HEADS = 3
"""The number of heads for which a figure draws the change of weights as a map."""
_MAX_ROW_HEADS = 6
"""The most heads in the figure of one query's rows."""
_MAX_ROW_KEYS = 24
"""The most keys in the figure of one query's rows: the keys with the largest weights."""


def _read_tokens(comparison: Comparison, side: str) -> Tokens:
    """Return the tokens of a text, "first" or "second"."""
    return tokens_from_table(comparison.table(f"tokens:{side}"), comparison.corpus[_SIDES[side]])


def require_texts(comparison: Comparison) -> None:
    """Refuse a saved comparison whose tokens or weights are damaged.

    Raises:
        ValueError: Tokens do not fit the text, or the weights of a row sum to more than 1.
    """
    sides = [*_SIDES] if comparison.compared == "texts" else ["first"]
    for side in sides:
        # This raises a ValueError if tokens do not fit the text.
        _read_tokens(comparison, side)
        if np.nansum(comparison.grids[f"weights:{side}"], -1).max(initial=0.0) > MAX_ROW_SUM:
            raise ValueError("its weights sum to more than 1 in a row")


def make_report(
    comparison: Comparison, answer: Iterable[str], blocks: Sequence[Block], *guides: str, **fields: Any
) -> Report:
    """Return the report of a comparison.

    Args:
        comparison: The comparison.
        answer: The lines of the answer.
        blocks: The blocks of the report.
        guides: Lines that explain this report. They follow the lines that explain the distance.
        fields: Further fields of `Report`. If `subtitle` is missing, source and subtitle name the corpus.
    """
    if "subtitle" not in fields:
        source = describe_texts(comparison)
        fields["source"] = source
        fields["subtitle"] = f"{name_distance(comparison.distance_name)} · {source}"
    return report_on(comparison, answer, blocks, [*explain_distance(comparison), *guides], **fields)


def _quote_text(comparison: Comparison, side: str) -> str:
    """Return a text on one line, in quotation marks."""
    return f"“{' '.join(str(comparison.corpus[_SIDES[side]]).split())}”"


# Heads side by side on one text


def make_picked_report(comparison: Comparison) -> Report:
    """Return the report on a few picked heads: distances, their mean, and the head that would replace them."""
    names = comparison.head_names
    listed = list_some(names, _MAX_NAMED_HEADS)
    answer = [
        f"{listed} side by side on “{printable(comparison.corpus['text'], 160)}”",
        _say_distances(comparison),
    ]

    mean = comparison.grids["mean:first"]
    single = comparison.grids.get("single:first")
    # Weights by title, (query, key): of each head; further down also of the mean and of the single head.
    maps = dict(zip(names, comparison.grids["weights:first"], strict=True))
    # Differences of weights by title, (query, key): between two heads, or between each head and the mean of all.
    differences = {}
    if len(names) == 2:
        first, second = names
        differences[f"{first} − {second}"] = _subtract_maps(maps[first], maps[second])
    else:
        for name, weights in maps.items():
            differences[f"{name} − mean"] = _subtract_maps(weights, mean)
    maps["mean"] = mean
    if single is not None:
        maps["single head"] = single
        difference = _subtract_maps(single.astype(np.float64), mean)
        differences["single head − mean"] = difference
        # The total variation distance between the rows of the single head and of the mean, (query,): the share of
        # weight that lies on other keys, which is half the sum of absolute differences.
        moved_shares = np.abs(difference).sum(-1) / 2
        mean_moved = float(np.nanmean(moved_shares)) if np.isfinite(moved_shares).any() else 0.0
        answer.append(
            f"the single head moves {mean_moved:.0%} of a row's weight away from the mean of the heads"
        )

    axis = make_axis(_read_tokens(comparison, "first"))
    side_by_side = Panels(f"{listed} side by side", _make_panels(maps, axis))
    how_they_differ = Panels(
        f"{listed}: differences",
        _make_panels(differences, axis),
        difference_meaning="difference of attention weights",
    )
    blocks = [
        Grid(
            heading=name_distance(comparison.distance_name),
            values=comparison.distance(),
            rows=names,
            columns=names,
            n_printed=len(names),
        ),
        CustomBlock(printed="never", figure="picked", view=side_by_side),
        CustomBlock(printed="never", figure="differences", view=how_they_differ),
    ]
    note = printable(comparison.options["single_note"], 400)
    return make_report(
        comparison, filter(None, answer), blocks, note, subtitle=_quote_text(comparison, "first")
    )


def _make_panels(maps: Mapping[str, Floats], axis: Axis) -> list[Panel]:
    """Return a panel for each map of one text; `maps` has (query, key) by title."""
    return [Panel(title, values, axis, axis) for title, values in maps.items()]


def _say_distances(comparison: Comparison) -> str:
    """Return the distance of two heads, or the nearest and farthest pairs of more heads; "" if no distance is known."""
    names = comparison.head_names
    rows, columns = np.triu_indices(len(names), 1)
    # The distance of each pair, (pair,).
    distances = comparison.distance()[rows, columns]
    if len(names) == 2:
        return f"{name_distance(comparison.distance_name)} {format_distance(distances[0])}"
    if not np.isfinite(distances).any():
        return ""
    nearest_index = int(np.nanargmin(distances))
    farthest_index = int(np.nanargmax(distances))
    nearest = f"{names[rows[nearest_index]]} and {names[columns[nearest_index]]}"
    farthest = f"{names[rows[farthest_index]]} and {names[columns[farthest_index]]}"
    return (
        f"{nearest} are nearest ({format_distance(distances[nearest_index])}), "
        f"{farthest} farthest ({format_distance(distances[farthest_index])})"
    )


def _subtract_maps(first: Floats, second: Floats) -> Floats:
    """Return the first map minus the second, (query, key); a row of zeros in either map becomes NaN."""
    has_data = first.any(-1, keepdims=True) & second.any(-1, keepdims=True)
    return np.where(has_data, first - second, np.nan)


# Two texts


class MergedKeys:
    """Hold the keys of two texts merged into one list, in the order of the first text. An aligned pair is one key.

    A key that only the second text has comes after the last aligned key before it.

    Attributes:
        positions: The index of each key's token in both texts, (text, key); -1 = the text lacks the key.
        names: The label of each key, such as "cat", or "wide/tired" for a replaced token.
    """

    def __init__(self, comparison: Comparison) -> None:
        self._comparison = comparison
        aligned = comparison.table("aligned")
        n_first = len(comparison.table("tokens:first"))
        n_second = len(comparison.table("tokens:second"))
        first_alone = np.setdiff1d(np.arange(n_first), aligned["first"])
        second_alone = np.setdiff1d(np.arange(n_second), aligned["second"])
        # Aligned tokens, then tokens of the first text alone, then tokens of the second text alone: (text, key).
        positions = np.full((2, n_first + len(second_alone)), -1)
        positions[0, :n_first] = np.concatenate([aligned["first"], first_alone])
        positions[1, : len(aligned)] = aligned["second"]
        positions[1, n_first:] = second_alone
        # The sort key of each key, (key,), is its position in the first text. A key of the second text alone gets the
        # position of the last aligned token before it plus 0.5; -0.5 without such a token.
        sort_position = positions[0].astype(np.float64)
        for key, token in enumerate(second_alone.tolist(), n_first):
            precedes = aligned["second"] < token
            sort_position[key] = aligned["first"][precedes].max(initial=-1) + 0.5
        self.positions = positions[:, np.argsort(sort_position, kind="stable")]
        self.names = _name_keys(comparison, self.positions)

    def rows(self, head: int, pair: int) -> Floats:
        """Return a head's rows of an aligned query in both texts, (text, key); 0 if a text lacks the key."""
        rows = []
        for side, positions in zip(_SIDES, self.positions, strict=True):
            query = self._comparison.table("aligned")[side][pair]
            row = self._comparison.grids[f"weights:{side}"][head, query]
            rows.append(np.where(positions >= 0, row[positions], 0.0))
        return np.stack(rows)

    def largest_change(self, head: int, pair: int) -> str:
        """Return the key that changes most with both weights, "cat 0.52 → 0.11"; – = the text lacks the key."""
        rows = self.rows(head, pair)
        key = int(np.abs(rows[1] - rows[0]).argmax())
        weights = []
        for side, position in enumerate(self.positions[:, key]):
            weights.append("–" if position < 0 else f"{rows[side, key]:.2f}")
        return f"{self.names[key]} {' → '.join(weights)}"


def _name_keys(comparison: Comparison, positions: NDArray[np.int64]) -> list[str]:
    """Return the label of each key, such as "cat". If the labels in both texts differ, join them: "wide/tired".

    Args:
        comparison: The comparison.
        positions: The index of each key's token in both texts, (text, key); -1 = the text lacks the key.
    """
    first_labels = comparison.table("tokens:first")["token"].tolist()
    second_labels = comparison.table("tokens:second")["token"].tolist()
    names = []
    for first, second in positions.T.tolist():
        labels = []
        if first >= 0:
            labels.append(first_labels[first])
        if second >= 0:
            labels.append(second_labels[second])
        # dict.fromkeys drops a label that is the same in both texts.
        names.append(printable("/".join(dict.fromkeys(labels))))
    return names


def make_texts_report(comparison: Comparison) -> Report:
    """Return the report on two texts: the heads whose rows change most, and the key that changes most in each."""
    heads = comparison.table("heads")
    names = comparison.head_names
    aligned = comparison.table("aligned")
    overall = f"{comparison.distance_name}_overall"
    # Rank heads by their change at the query if the user gave a query, otherwise by their change over all equal tokens.
    if aligned["asked"].any():
        column = f"{comparison.distance_name}_at_query"
        where_words = f"at “{printable(comparison.options.get('query'), 40)}”"
    else:
        column = overall
        where_words = "on the tokens that both have"
    order = largest_first(heads[column])

    # For each head, the label of the query whose row changes most, and the key that changes most in that row.
    keys = MergedKeys(comparison)
    labels = comparison.table("tokens:first")["token"]
    queries = [""] * len(names)
    changes = [""] * len(names)
    for head in order:
        pair = _find_most_changed_pair(comparison, head)
        queries[head] = printable(labels[aligned["first"][pair]])
        changes[head] = keys.largest_change(head, pair)
    answer = []
    # The distance of each head between the texts, (head in order,): the largest first.
    distances = heads[column][order]
    if order:
        top_head = order[0]
        answer += [
            f"{names[top_head]} differs most between the texts, {where_words}: distance "
            f"{format_distance(distances[0])} (0 = no change, 1 = nothing in common)",
            f"most where it looks from “{queries[top_head]}”: weight on {changes[top_head]}",
        ]
    both_texts = f"{_quote_text(comparison, 'first')}  →  {_quote_text(comparison, 'second')}"
    answer.append(both_texts)
    if len(order) > 1:
        median, p90 = np.quantile(distances, (0.5, 0.9)).tolist()
        answer.append(
            f"distance of {amount(len(order), 'head')}: median {format_distance(median)}, "
            f"90th percentile {format_distance(p90)}"
        )

    # The ranking, then maps of all heads, then figures of weights. The names of the figures with maps, by column:
    figures = {column: "change"}
    if column != overall:
        figures[overall] = "change-overall"
    columns: list[str | WordsColumn] = [
        *figures,
        WordsColumn("query", queries),
        WordsColumn("the key that changes most", changes, wraps=True),
    ]
    heading = f"the heads that change most, by {name_distance(comparison.distance_name)}"
    blocks: list[Block] = [rank_heads(comparison, columns, order, heading=heading)]
    for name, figure in figures.items():
        blocks.append(
            HeadMap(printed="never", figure=figure, title="what changes", heads=heads, column=name)
        )
    if order:
        blocks += _make_map_figures(comparison, order)
    for pair in np.flatnonzero(aligned["asked"]).tolist():
        blocks.append(_make_rows_figure(comparison, keys, pair))
    guides = ["overall: the root mean square over the tokens that both texts share"]
    if keys.positions.min(initial=0) < 0:
        guides.append("–: the other text has no token for this one")
    return make_report(comparison, answer, blocks, *guides, subtitle=both_texts)


def _find_most_changed_pair(comparison: Comparison, head: int) -> int:
    """Return the row of `aligned` with a head's largest change, among asked tokens if any, else equal tokens."""
    aligned = comparison.table("aligned")
    is_candidate = aligned["asked"] if aligned["asked"].any() else aligned["equal"]
    pairs = np.flatnonzero(is_candidate)
    values = comparison.grids[f"divergence:{comparison.distance_name}"][head, pairs]
    return int(pairs[np.nan_to_num(values, nan=-1.0).argmax()])


def _make_map_figures(comparison: Comparison, order: Sequence[int]) -> Iterator[Block]:
    """Yield a figure of the changes of the first heads of an order, then a figure of the first head on each text."""
    aligned = comparison.table("aligned")
    names = comparison.head_names
    # Aligned pairs whose labels are marked: replaced tokens, and tokens that the query names.
    marked_pairs = np.flatnonzero(~aligned["equal"] | aligned["asked"])

    # Differences of weights between aligned tokens, (query pair, key pair). A replaced token has both labels.
    labels = _name_keys(comparison, np.stack([aligned["first"], aligned["second"]]))
    first_tokens = _read_tokens(comparison, "first").take(aligned["first"])
    axis = make_axis(replace(first_tokens, labels=tuple(labels)), marked_pairs.tolist())
    differences = {}
    for head in order[:_N_MAPPED_HEADS]:
        maps = []
        for side in _SIDES:
            weights = comparison.grids[f"weights:{side}"][head]
            maps.append(weights[np.ix_(aligned[side], aligned[side])])
        differences[f"{names[head]}: second − first"] = maps[1] - maps[0]
    view = Panels(
        "what changes: the heads that change most",
        _make_panels(differences, axis),
        notes=[AXES_NOTE, "tokens that both texts have a place for"],
        difference_meaning="attention weight in the second text − in the first",
    )
    yield CustomBlock(printed="never", figure="differences", view=view)

    # The weights of the first head on each text, (query, key).
    head = order[0]
    panels = []
    for side in _SIDES:
        axis = make_axis(_read_tokens(comparison, side), aligned[side][marked_pairs].tolist())
        weights = comparison.grids[f"weights:{side}"][head]
        panels.append(Panel(f"{names[head]}: {side} text", weights, axis, axis))
    yield CustomBlock(
        printed="never", figure="maps", view=Panels(f"what changes: {names[head]}", panels)
    )


def _make_rows_figure(comparison: Comparison, keys: MergedKeys, pair: int) -> Grid:
    """Return the figure of an aligned query's rows in both texts, for the heads whose row changes most."""
    # The divergence of each head's rows, (head,); `largest_first` leaves out heads with NaN.
    divergences = comparison.grids[f"divergence:{comparison.distance_name}"][:, pair]
    order = largest_first(divergences, _MAX_ROW_HEADS)
    # Two rows per head, of the first and of the second text: (2 x n_heads, key).
    weights = np.concatenate([keys.rows(head, pair) for head in order])
    # The indices of the keys with the largest weights, in the order of the text.
    shown_keys = sorted(largest_first(weights.max(0), _MAX_ROW_KEYS))
    titles = []
    for head in order:
        # Divergences are squared distances.
        change = format_distance(math.sqrt(divergences[head]))
        titles += [f"{comparison.head_names[head]} · {change}: first text", "second text"]
    # The file and the title name the query by its token in the first text.
    query = int(comparison.table("aligned")["first"][pair])
    label = comparison.table("tokens:first")["token"][query]
    notes = [f"heads: those whose row changes most here, by {name_distance(comparison.distance_name)}"]
    if len(shown_keys) < len(keys.names):
        notes.append(f"the {amount(len(shown_keys), 'key')} with the largest weights")
    return Grid(
        printed="never",
        figure=f"query-{query:03d}",
        title=f"what “{printable(label, 40)}” attends to",
        values=weights[:, shown_keys],
        rows=titles,
        columns=np.array(keys.names)[shown_keys].tolist(),
        notes=notes,
    )
