"""Declare the result of comparing heads: its arrays, and its reports on all heads of a model or of two models.

`compare_texts` makes the other reports: on a few heads on one text, and on all heads on two texts. `studies.compare`
computes the arrays. This module loads no torch.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from attnscope.arrays import Floats
from attnscope.errors import amount
from attnscope.questions import compare_texts
from attnscope.questions.distances import (
    DISTANCE_NAMES,
    WITHOUT_SPECIAL_SUFFIX,
    find_distance,
    format_distance,
    name_distance,
)
from attnscope.report.blocks import Block, Grid, HeadMap, Ranking, Report, WordsColumn
from attnscope.report.numbers import format_with_interval, largest_first
from attnscope.report.wording import model_of
from attnscope.results.result import Result
from attnscope.results.table import HEADS, Array, Column, Table, count, flag, number
from attnscope.results.tokens import TOKEN_COLUMNS

_MAX_PRINTED_PAIRS = 100
"""The most pairs of heads that the terminal prints with --all."""

_DISTANCE_SUFFIXES = ("", "_low", "_high", "_count")
"""Suffixes of the names of the arrays `distance`: the value, the ends of its interval, and its number of texts."""


class Comparison(Result):
    """Hold distances between heads.

    `options["compared"]` says what was compared:

    - "heads": all heads of a model with each other. `distance:NAME` is (head, head). NAME is a measure of distance,
      such as "hellinger", or "hellinger_without_special" if special tokens are left out. By this distance, `order` has
      the heads by clusters, `merges` the tree of clusters, and `places` the coordinates of heads in the plane.
    - "models": the heads of two models. `distance:NAME` is (head, other head). `match` is the other model's head that
      each head is matched with.
    - "picked": a few heads on one text. `weights:first` has their weights, `mean` the mean of these, and `single` the
      weights of the single head that would replace them.
    - "texts": every head on two texts, with `weights:first` and `weights:second`. `divergence:NAME` is how much the
      rows of aligned tokens differ: the squared Hellinger distance, or the Jensen-Shannon divergence in nats.

    Two texts are aligned token by token: an aligned pair is a token of each text, equal or replaced. The field `grids`
    has the arrays by name.
    """

    SCHEMA: ClassVar[str] = "attnscope.compare/2"
    TABLES: ClassVar[Mapping[str, Sequence[Column]]] = {
        "heads": HEADS,
        "other_heads": HEADS,
        "tokens": TOKEN_COLUMNS,
        "aligned": (
            count("first", "the token in the first text", refers_to="tokens:first"),
            count(
                "second", "the token in the second text that stands for it", refers_to="tokens:second"
            ),
            flag("equal", "whether they are the same token; else the second replaces the first"),
            flag("asked", "whether the query names it"),
        ),
    }
    ARRAYS: ClassVar[Sequence[Array]] = (
        Array(
            "distance",
            "root of the mean divergence of two heads",
            range=(0, 1),
            # The columns are the heads themselves, or those of the other model.
            axes=("heads", "columns"),
        ),
        Array(
            "order",
            "heads in the order of their clusters",
            kind="count",
            refers_to="heads",
            axes=("heads",),
        ),
        Array(
            "merges",
            "which clusters merge, at which distance, with how many heads",
            axes=("n_merges", "4"),
        ),
        Array("places", "the heads in the plane that keeps their distances best", axes=("heads", "2")),
        Array(
            "match",
            "the head of the other model that a head is matched with",
            kind="count",
            refers_to="other_heads",
            axes=("heads",),
        ),
        Array("weights", "attention weights", "share", range=(0, 1), axes=("heads", "tokens", "tokens")),
        Array("mean", "the mean of the heads", "share", range=(0, 1), axes=("tokens", "tokens")),
        Array(
            "single", "the weights of the single head", "share", range=(0, 1), axes=("tokens", "tokens")
        ),
        Array(
            "divergence",
            "how much a row differs between two texts",
            range=(0, 1),
            axes=("heads", "aligned"),
        ),
    )

    @property
    def compared(self) -> str:
        """Return what was compared: "heads", "models", "picked" or "texts"."""
        return str(self.options["compared"])

    @property
    def distance_name(self) -> str:
        """Return the name of the distance, such as "hellinger_without_special"."""
        return str(self.options["distances"][0])

    def distance(self) -> Floats:
        """Return the distances, (head, other head); NaN if two heads were never compared."""
        return self.grids[f"distance:{self.distance_name}"]

    @property
    def match(self) -> NDArray[np.int64]:
        """Return the head of the other model that each head is matched with, (head,); -1 = none."""
        return self.grids[f"match:{self.distance_name}"]

    @property
    def other_head_names(self) -> list[str]:
        """Return the names along the second axis of distances: of the other model's heads if there are two models."""
        return self.table("other_heads").head_names() if self.compared == "models" else self.head_names

    def same_heads(self) -> NDArray[np.int64]:
        """Return the heads that both models have by one name, as rows of `heads` and `other_heads`, (pair, 2)."""
        # The rows of the common names in each table, (pair,).
        _, rows, other_rows = np.intersect1d(self.head_names, self.other_head_names, return_indices=True)
        return np.stack([rows, other_rows], 1)

    def moved(self) -> NDArray[np.bool_]:
        """Return which heads are matched with a head of another name, (head,)."""
        # The index -1, no match, reads the last name here. The first condition below leaves these heads out.
        matched_names = np.array(self.other_head_names)[self.match]
        is_moved: NDArray[np.bool_] = (self.match >= 0) & (matched_names != self.head_names)
        return is_moved

    def rows(self) -> Iterator[Sequence[Any]]:
        """Yield the rows of a table file: one per pair of heads, or one per head if two texts are compared."""
        if self.compared == "texts":
            yield from self.table("heads").rows()
            return
        name = self.distance_name
        names = np.array(self.head_names)
        other_names = np.array(self.other_head_names)
        # The heads of each pair, (pair,) each. Two models have every pair; one model has each pair once.
        if self.compared == "models":
            row_heads, column_heads = np.indices((len(names), len(other_names))).reshape(2, -1)
        else:
            row_heads, column_heads = np.triu_indices(len(names), 1)
        columns = {"a": names[row_heads], "b": other_names[column_heads]}
        for ending in _DISTANCE_SUFFIXES:
            columns[f"{name}{ending}"] = self.grids[f"distance{ending}:{name}"][row_heads, column_heads]
        if self.compared == "models":
            columns[f"{name}_matched"] = self.match[row_heads] == column_heads
        # The first argument declares columns, for their meanings. A table file needs only names and values.
        yield from Table({}, columns).rows()

    def require_whole(self) -> None:
        """Raise a ValueError for what `Result.require_whole` refuses, and for arrays or options that do not fit."""
        super().require_whole()
        if self.compared not in _REPORTS:
            raise ValueError(f"it compares {self.compared[:40]!r}")
        if self.distance_name.removesuffix(WITHOUT_SPECIAL_SUFFIX) not in DISTANCE_NAMES:
            raise ValueError(f"it has a distance {self.distance_name[:40]!r}")
        if self.compared in ("picked", "texts"):
            compare_texts.require_texts(self)
        if self.compared == "texts":
            return
        # Only "texts" has no distances between heads. Distances, ends of intervals and counts are (head, other head).
        shape = len(self.head_names), len(self.other_head_names)
        for ending in _DISTANCE_SUFFIXES:
            if self.grids[f"distance{ending}:{self.distance_name}"].shape != shape:
                raise ValueError("its distances do not fit its heads")

    def report(self) -> Report:
        """Return the report that fits what was compared."""
        return _REPORTS[self.compared](self)


# Reports on all heads of a model, and on those of two models


def _make_heads_report(comparison: Comparison) -> Report:
    """Return the report on one model: which heads are most alike, and which are least like any other."""
    name = comparison.distance_name
    names = comparison.head_names
    distances = comparison.distance()
    # The closest pairs of heads, the smallest distance first: (pair, 2).
    row_heads, column_heads = np.triu_indices(len(names), 1)
    closest_pairs = np.stack([row_heads, column_heads], 1)[
        largest_first(-distances[row_heads, column_heads], _MAX_PRINTED_PAIRS)
    ]
    # The head nearest to each head, (head,), among the other heads that it was compared with.
    is_compared = ~np.eye(len(names), dtype=bool) & ~np.isnan(distances)
    nearest = np.where(is_compared, distances, np.inf).argmin(1)
    # Heads with their nearest head, the largest distance first: (head, 2). Leave out heads that were never compared.
    compared = np.flatnonzero(is_compared.any(1))
    most_isolated = compared[largest_first(distances[compared, nearest[compared]])]
    with_nearest = np.stack([most_isolated, nearest[most_isolated]], 1)

    answer = [f"{model_of(comparison.run)}: which of {amount(len(names), 'head')} attend alike"]
    scale = f"0 to {find_distance(name).max_text}"
    blocks: list[Block] = [
        _rank_pairs(
            comparison, closest_pairs, f"most alike, by {name_distance(name)} ({scale})", " and "
        ),
        _rank_pairs(comparison, with_nearest, "least like any other head", "; nearest "),
    ]
    if len(closest_pairs):
        a, b = closest_pairs[0]
        distance = _format_distance(comparison, a, b)
        answer.append(f"most alike are {names[a]} and {names[b]}: distance {distance} (0 = the same)")
        head, other = with_nearest[0]
        distance = _format_distance(comparison, head, other)
        answer.append(
            f"least like any other is {names[head]}: the nearest, {names[other]}, has distance {distance}"
        )
        # A matrix of all distances, with heads in the order of their clusters.
        order = comparison.grids[f"order:{name}"]
        ordered_names = [names[head] for head in order]
        blocks.append(
            _make_matrix(
                distances[np.ix_(order, order)],
                ordered_names,
                ordered_names,
                title="distances between heads",
                notes=["heads in the order of their clusters (average linkage); light: alike"],
            )
        )
    return compare_texts.make_report(comparison, answer, blocks)


def _make_models_report(comparison: Comparison) -> Report:
    """Return the report on two models: which heads differ most from their namesakes, and how heads are matched.

    A head's namesake is the head of the other model with the same layer and number.
    """
    name = comparison.distance_name
    names = comparison.head_names
    other_names = comparison.other_head_names
    distances = comparison.distance()
    match = comparison.match

    # The distance of each head to its namesake with its interval, (head, [value, low, high]); NaN = no namesake.
    rows, other_rows = comparison.same_heads().T
    to_namesake = np.full((len(names), 3), np.nan)
    to_namesake[rows] = comparison.interval(f"distance:{name}")[rows, other_rows]
    value, low, high = to_namesake.T
    column = number("distance", "distance to the head of the same number in the other model")
    heads = comparison.table("heads").with_column(column, value, low=low, high=high)
    order = largest_first(value)

    # For each head, the name of its match and their distance, "L3H1 0.123"; empty = the head has no match.
    match_texts = [""] * len(names)
    matched = np.flatnonzero(match >= 0).tolist()
    for head in matched:
        match_texts[head] = f"{other_names[match[head]]} {format_distance(distances[head, match[head]])}"
    moved_words = (
        f"{comparison.moved().sum()} of {amount(len(matched), 'head')} match one of another number"
    )
    models = f"{model_of(comparison.run)} and {model_of(comparison.options['other_run'])}"
    answer = [f"{models}: {moved_words}"]
    if order:
        top_head = order[0]
        answer.append(
            f"{names[top_head]} differs most from the head of its number: {format_distance(value[top_head])}"
        )
    heading = "distance to the head of the same number"
    blocks = [
        Ranking(
            heading=f"the heads that differ most from those of the same number, by {name_distance(name)}",
            header="head",
            names=names,
            table=heads,
            columns=["distance", WordsColumn("best match", match_texts)],
            order=order,
        ),
        _make_matrix(
            distances,
            names,
            other_names,
            title="distances between their heads",
            # Frame the cell of each head and its match: (head, other head), bool.
            framed_cells=match[:, None] == np.arange(len(other_names)),
            notes=[
                "rows: heads of the first model · columns: heads of the second · light: alike",
                f"framed: the one-to-one matching with the least sum of distances; {moved_words}",
            ],
        ),
        HeadMap(
            printed="with --all",
            heading=heading,
            figure="same-heads",
            title=heading,
            heads=heads,
            column="distance",
        ),
    ]
    guide = "best match: one to one, with the least sum of distances"
    return compare_texts.make_report(comparison, answer, blocks, guide, model=models)


def _make_matrix(values: Floats, rows: Sequence[str], columns: Sequence[str], **fields: Any) -> Grid:
    """Return the block that draws all distances, (row, column); `fields` are the title and further fields of `Grid`."""
    return Grid(
        printed="never",
        figure="matrix",
        is_drawn_whole=True,
        values=values,
        rows=rows,
        columns=columns,
        **fields,
    )


def _rank_pairs(
    comparison: Comparison, pairs: NDArray[np.int64], heading: str, separator: str
) -> Ranking:
    """Return a ranking of pairs of heads, (pair, 2), with their distances; `separator` stands between their names."""
    name = comparison.distance_name
    names = comparison.head_names
    # The header of the column, such as "hellinger w/o special".
    header = name.replace(WITHOUT_SPECIAL_SUFFIX, "_w/o_special").replace("_", " ")
    row_heads, column_heads = pairs.T
    value, low, high = comparison.interval(f"distance:{name}")[row_heads, column_heads].T
    column = number(name, "distance of two heads", short=header)
    return Ranking(
        heading=heading,
        header="heads",
        noun="pair",
        names=[f"{names[a]}{separator}{names[b]}" for a, b in pairs.tolist()],
        table=Table({}, {}).with_column(column, value, low=low, high=high),
        columns=[name],
        order=range(len(pairs)),
    )


def _format_distance(comparison: Comparison, head: int, other: int) -> str:
    """Return the distance of two heads with its interval, if the interval is known."""
    estimates = comparison.interval(f"distance:{comparison.distance_name}")
    return format_with_interval(estimates[head, other], format_distance)


_REPORTS = {
    "heads": _make_heads_report,
    "models": _make_models_report,
    "picked": compare_texts.make_picked_report,
    "texts": compare_texts.make_texts_report,
}
"""The function that makes the report, by what was compared."""
