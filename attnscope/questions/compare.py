"""Declare the result of comparing heads: its arrays, and its reports on all heads of a model or of two models.

`compare_texts` makes the reports on a few heads on one text, and on heads on two texts. Loads no torch.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from attnscope.errors import amount
from attnscope.questions import compare_texts
from attnscope.questions.distances import (
    MEASURES,
    WITHOUT_SPECIAL,
    distance_line,
    distance_of,
    three_decimals,
)
from attnscope.report.blocks import Block, Grid, HeadMap, Ranking, Report, WordsColumn
from attnscope.report.numbers import largest_first, with_interval
from attnscope.report.wording import model_of
from attnscope.results.result import Result
from attnscope.results.table import HEADS, Array, Column, Floats, Table, count, flag, number
from attnscope.results.tokens import TOKENS

_MAX_PRINTED_PAIRS = 100
"""The most pairs of heads that --all prints."""

_DISTANCE_SUFFIXES = ("", "_low", "_high", "_count")
"""Endings of the arrays `distance`: its value, both ends of its interval, and the number of texts behind it."""


class Comparison(Result):
    """Hold distances between heads.

    `options["compared"]` says what was compared:

    - "heads": all heads of a model with each other. `distance:NAME` is (head, head). NAME is a measure of distance,
      such as "hellinger", with "_without_special" after it if special tokens are left out. `order`, `merges` and
      `places` are the heads' order, clusters and places in the plane by this distance.
    - "models": the heads of two models, `distance:NAME` (head, other head). `match` is the other model's head that each
      head is matched with.
    - "picked": a few heads on one text, `weights:first`, their `mean`, and the weights of the `single` head that would
      replace them.
    - "texts": every head on two texts, `weights:first` and `weights:second`. `divergence:NAME` is how much the rows of
      aligned tokens differ: the squared Hellinger distance, or the Jensen-Shannon divergence in nats.
    """

    SCHEMA: ClassVar[str] = "attnscope.compare/2"
    TABLES: ClassVar[Mapping[str, Sequence[Column]]] = {
        "heads": HEADS,
        "other_heads": HEADS,
        "tokens": TOKENS,
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
        """Return the distances, (head, other head), NaN where two heads were never compared."""
        return self.grids[f"distance:{self.distance_name}"]

    @property
    def match(self) -> NDArray[np.int64]:
        """Return the head of the other model that each head is matched with, (head,); -1 = none."""
        return self.grids[f"match:{self.distance_name}"]

    @property
    def other_head_names(self) -> list[str]:
        """Return the names of the heads in the columns of distances: the other model's, if there are two models."""
        return self.table("other_heads").head_names() if self.compared == "models" else self.head_names

    def same_heads(self) -> NDArray[np.int64]:
        """Return the heads that both models have by the same name, as rows of `heads` and `other_heads`, (pair, 2)."""
        # The rows of the common names, (pair,) each.
        _, ours, theirs = np.intersect1d(self.head_names, self.other_head_names, return_indices=True)
        return np.stack([ours, theirs], 1)

    def moved(self) -> NDArray[np.bool_]:
        """Return which heads are matched with a head of another name, (head,)."""
        matched_names = np.array(self.other_head_names)[self.match]
        is_moved: NDArray[np.bool_] = (self.match >= 0) & (matched_names != self.head_names)
        return is_moved

    def rows(self) -> Iterator[Sequence[Any]]:
        """Yield the rows of a file: one per pair of heads, or one per head if two texts are compared."""
        if self.compared == "texts":
            yield from self.table("heads").rows()
            return
        name = self.distance_name
        names = np.array(self.head_names)
        others = np.array(self.other_head_names)
        # Both heads of each pair, (pair,): every pair of two models, or each pair of one model once.
        if self.compared == "models":
            first, second = np.indices((len(names), len(others))).reshape(2, -1)
        else:
            first, second = np.triu_indices(len(names), 1)
        columns = {"a": names[first], "b": others[second]}
        for ending in _DISTANCE_SUFFIXES:
            columns[f"{name}{ending}"] = self.grids[f"distance{ending}:{name}"][first, second]
        if self.compared == "models":
            columns[f"{name}_matched"] = self.match[first] == second
        yield from Table({}, columns).rows()

    def require_whole(self) -> None:
        """Refuse what `Result` does, an unknown comparison or distance, and arrays that do not fit the heads."""
        super().require_whole()
        if self.compared not in _REPORTS:
            raise ValueError(f"it compares {self.compared[:40]!r}")
        if self.distance_name.removesuffix(WITHOUT_SPECIAL) not in MEASURES:
            raise ValueError(f"it has a distance {self.distance_name[:40]!r}")
        if self.compared in ("picked", "texts"):
            compare_texts.require_texts(self)
        if self.compared == "texts":
            return
        # Distances, ends of intervals and counts are (head, other head).
        shape = len(self.head_names), len(self.other_head_names)
        for ending in _DISTANCE_SUFFIXES:
            if self.grids[f"distance{ending}:{self.distance_name}"].shape != shape:
                raise ValueError("its distances do not fit its heads")

    def report(self) -> Report:
        """Return the report that fits what was compared."""
        return _REPORTS[self.compared](self)


# Reports on all heads of a model, and on those of two models


def _make_heads_report(comparison: Comparison) -> Report:
    """Return the report: which heads are most alike, and which are least like any other."""
    name = comparison.distance_name
    names = comparison.head_names
    distances = comparison.distance()
    # Pairs of heads, the least distance first: (pair, 2).
    first, second = np.triu_indices(len(names), 1)
    alike = np.stack([first, second], 1)[largest_first(-distances[first, second], _MAX_PRINTED_PAIRS)]
    # The head nearest to each head, (head,), among the others that it was compared with.
    is_other = ~np.eye(len(names), dtype=bool) & ~np.isnan(distances)
    nearest = np.where(is_other, distances, np.inf).argmin(1)
    # Heads with their nearest head, the largest distance first: (head, 2).
    compared = np.flatnonzero(is_other.any(1))
    isolated = compared[largest_first(distances[compared, nearest[compared]])]
    with_nearest = np.stack([isolated, nearest[isolated]], 1)

    answer = [f"{model_of(comparison.run)}: which of {amount(len(names), 'head')} attend alike"]
    scale = f"0 to {distance_of(name).largest}"
    blocks: list[Block] = [
        _rank_pairs(comparison, alike, f"most alike, by {distance_line(name)} ({scale})", " and "),
        _rank_pairs(comparison, with_nearest, "least like any other head", "; nearest "),
    ]
    if len(alike):
        a, b = alike[0]
        distance = _format_distance(comparison, a, b)
        answer.append(f"most alike are {names[a]} and {names[b]}: distance {distance} (0 = the same)")
        head, other = with_nearest[0]
        distance = _format_distance(comparison, head, other)
        answer.append(
            f"least like any other is {names[head]}: the nearest, {names[other]}, has distance {distance}"
        )
        # All distances as a map, in the order of the clusters.
        order = comparison.grids[f"order:{name}"]
        ordered_names = [names[head] for head in order]
        matrix = _make_matrix(
            distances[np.ix_(order, order)],
            ordered_names,
            ordered_names,
            title="distances between heads",
            notes=["heads in the order of their clusters (average linkage); light: alike"],
        )
        blocks.append(matrix)
    return compare_texts.make_report(comparison, answer, blocks)


def _make_models_report(comparison: Comparison) -> Report:
    """Return the report: which heads differ most from their namesakes, and how heads are matched.

    A head's namesake is the head of the other model with the same layer and number.
    """
    name = comparison.distance_name
    names = comparison.head_names
    others = comparison.other_head_names
    distances = comparison.distance()
    match = comparison.match

    # The distance of each head to its namesake, and both ends of its interval; NaN = no namesake. (head, 3)
    ours, theirs = comparison.same_heads().T
    to_namesake = np.full((len(names), 3), np.nan)
    to_namesake[ours] = comparison.interval(f"distance:{name}")[ours, theirs]
    value, low, high = to_namesake.T
    column = number("distance", "distance to the head of the same number in the other model")
    heads = comparison.table("heads").with_column(column, value, low=low, high=high)
    order = largest_first(value)

    # For each head the name of its match and their distance; empty = it has no match.
    match_texts = [""] * len(names)
    matched = np.flatnonzero(match >= 0).tolist()
    for head in matched:
        match_texts[head] = f"{others[match[head]]} {three_decimals(distances[head, match[head]])}"
    moved = f"{comparison.moved().sum()} of {amount(len(matched), 'head')} match one of another number"
    models = f"{model_of(comparison.run)} and {model_of(comparison.options['other_run'])}"
    answer = [f"{models}: {moved}"]
    if order:
        first = order[0]
        answer.append(
            f"{names[first]} differs most from the head of its number: {three_decimals(value[first])}"
        )
    same = "distance to the head of the same number"
    blocks = [
        Ranking(
            heading=f"the heads that differ most from those of the same number, by {distance_line(name)}",
            header="head",
            names=names,
            table=heads,
            columns=["distance", WordsColumn("best match", match_texts)],
            order=order,
        ),
        _make_matrix(
            distances,
            names,
            others,
            title="distances between their heads",
            # Each head with its match, (head, other head).
            framed=match[:, None] == np.arange(len(others)),
            notes=[
                "rows: heads of the first model · columns: heads of the second · light: alike",
                f"framed: the one-to-one matching with the least sum of distances; {moved}",
            ],
        ),
        HeadMap(
            printed="with --all",
            heading=same,
            figure="same-heads",
            title=same,
            heads=heads,
            column="distance",
        ),
    ]
    guide = "best match: one to one, with the least sum of distances"
    return compare_texts.make_report(comparison, answer, blocks, guide, model=models)


def _make_matrix(values: Floats, rows: Sequence[str], columns: Sequence[str], **fields: Any) -> Grid:
    """Return the figure of all distances, (row, column); `fields` are the title and further fields of `Grid`."""
    return Grid(
        printed="never",
        figure="matrix",
        drawn_whole=True,
        values=values,
        rows=rows,
        columns=columns,
        **fields,
    )


def _rank_pairs(comparison: Comparison, pairs: NDArray[np.int64], heading: str, joint: str) -> Ranking:
    """Return a ranking of pairs of heads, (pair, 2), with their distances; `joint` stands between their names."""
    name = comparison.distance_name
    names = comparison.head_names
    # The header of the column, such as "hellinger w/o special".
    short = name.replace(WITHOUT_SPECIAL, "_w/o_special").replace("_", " ")
    first, second = pairs.T
    value, low, high = comparison.interval(f"distance:{name}")[first, second].T
    column = number(name, "distance of two heads", short=short)
    return Ranking(
        heading=heading,
        header="heads",
        noun="pair",
        names=[f"{names[a]}{joint}{names[b]}" for a, b in pairs.tolist()],
        table=Table({}, {}).with_column(column, value, low=low, high=high),
        columns=[name],
        order=range(len(pairs)),
    )


def _format_distance(comparison: Comparison, a: int, b: int) -> str:
    """Return the distance of two heads with its interval, if that is known."""
    estimates = comparison.interval(f"distance:{comparison.distance_name}")
    return with_interval(estimates[a, b], three_decimals)


_REPORTS = {
    "heads": _make_heads_report,
    "models": _make_models_report,
    "picked": compare_texts.make_picked_report,
    "texts": compare_texts.make_texts_report,
}
"""The function that makes the report, by what was compared."""
