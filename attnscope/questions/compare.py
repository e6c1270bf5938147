"""How alike are heads: of one model, side by side, on two texts, or of two models? Loads no torch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from attnscope.errors import AttnscopeError, amount
from attnscope.questions import compare_texts
from attnscope.questions.distances import MEASURES, WITHOUT_SPECIAL, distance_line, guide, texts_line, three_decimals
from attnscope.report.blocks import Block, Grid, HeadMap, Ranking, Report, Words
from attnscope.report.numbers import fixed, interval
from attnscope.report.wording import corpus_notes, model_of
from attnscope.results.result import Result
from attnscope.results.table import HEADS, Array, Column, Floats, Table, count, flag, number
from attnscope.results.tokens import TOKENS

_MOST_PAIRS = 100
"""Pairs of heads that --all prints."""


class Comparison(Result):
    """Distances between heads.

    `options["compared"]` says what was compared:

    - "heads": all heads of a model with each other. `distance:NAME` is (head, head), where NAME is a measure, with
      `_without_special` after it where special tokens are left out. By it heads have an order (`order`), clusters
      (`merges`) and places in the plane (`places`).
    - "models": the heads of two models. `match` is the other model's head that each head is matched with.
    - "picked": a few heads on one text, `weights:first`, with their mean and the single head that they would make.
    - "texts": every head on two texts, `weights:first` and `weights:second`. `divergence:NAME` is how much the rows of
      the aligned tokens differ: the squared Hellinger distance, or the Jensen-Shannon divergence in nats.
    """

    SCHEMA: ClassVar[str] = "attnscope.compare/2"
    TABLES: ClassVar[Mapping[str, Sequence[Column]]] = {
        "heads": HEADS,
        "other_heads": HEADS,
        "tokens": TOKENS,
        "aligned": (
            count("first", "the token in the first text", refers_to="tokens:first"),
            count("second", "the token in the second text that stands for it", refers_to="tokens:second"),
            flag("equal", "whether they are the same token; else the second replaces the first"),
            flag("asked", "whether the query names it"),
        ),
    }
    ARRAYS: ClassVar[Sequence[Array]] = (
        Array("distance", "root of the mean divergence of two heads", range=(0, 1), axes=("heads", "columns")),
        Array("order", "heads in the order of their clusters", kind="count", refers_to="heads", axes=("heads",)),
        Array("merges", "which clusters merge, at which distance, with how many heads", axes=("n_merges", "4")),
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
        Array("single", "the weights of the single head", "share", range=(0, 1), axes=("tokens", "tokens")),
        Array("divergence", "how much a row differs between two texts", range=(0, 1), axes=("heads", "aligned")),
    )

    @property
    def compared(self) -> str:
        """Return what was compared: "heads", "models", "picked" or "texts"."""
        return str(self.options["compared"])

    @property
    def distance_names(self) -> list[str]:
        """Return the names of its distances, such as "hellinger_without_special", the main one first."""
        return [str(name) for name in self.options["distances"]]

    def distance(self, name: str = "") -> Floats:
        """Return distances, (head, head), NaN where two heads were never compared.

        Args:
            name: One of `distance_names`; empty = the first.

        Raises:
            AttnscopeError: There are none of this name.
        """
        name = name or self.distance_names[0]
        if name not in self.distance_names:
            raise AttnscopeError(
                f"there is no distance {name!r} in this record", f"it has {', '.join(self.distance_names)}"
            )
        distances: Floats = self.grids[f"distance:{name}"]
        return distances

    def distance_interval(self, a: int, b: int) -> tuple[float, float, float]:
        """Return the first distance of two heads, by their rows, with the ends of its 95% interval."""
        name = self.distance_names[0]
        value, low, high = (float(self.grids[f"distance{part}:{name}"][a, b]) for part in ("", "_low", "_high"))
        return value, low, high

    @property
    def other_head_names(self) -> list[str]:
        """Return what the heads are called that the columns of distances are of."""
        return self.table("other_heads").head_names() if self.compared == "models" else self.head_names

    def same_heads(self) -> NDArray[np.int64]:
        """Return the heads that two models have by number: rows of `heads` and of `other_heads`, (pair, 2)."""
        others = {name: row for row, name in enumerate(self.other_head_names)}
        pairs = [(row, others[name]) for row, name in enumerate(self.head_names) if name in others]
        return np.array(pairs, np.int64).reshape(-1, 2)

    def moved(self) -> NDArray[np.bool_]:
        """Return which heads are matched with a head of another number, by the first distance, (head,)."""
        match = self.grids[f"match:{self.distance_names[0]}"]
        others = [*self.other_head_names, ""]
        moved = [row >= 0 and others[row] != name for row, name in zip(match.tolist(), self.head_names, strict=True)]
        return np.array(moved, np.bool_)

    def rows(self) -> Iterator[Sequence[Any]]:
        """Return the rows of a file: one per pair of heads, or of two texts one per head."""
        # Texts: a row per head.
        if self.compared == "texts":
            yield from self.table("heads").rows()
            return
        # A row per pair of heads; each distance with its interval and number of texts.
        names = self.distance_names
        parts = ["", "_low", "_high", "_count"]
        matched = [f"{name}_matched" for name in names if self.compared == "models"]
        yield ("a", "b", *(f"{name}{part}" for name in names for part in parts), *matched)
        for a, b in self._pairs():
            distances = [float(self.grids[f"distance{part}:{name}"][a, b]) for name in names for part in parts]
            matches = [int(self.grids[f"match:{name}"][a]) == b for name in names if matched]
            yield (self.head_names[a], self.other_head_names[b], *distances, *matches)

    def _pairs(self) -> Iterator[tuple[int, int]]:
        if self.compared == "models":
            return itertools.product(range(len(self.head_names)), range(len(self.other_head_names)))
        return itertools.combinations(range(len(self.head_names)), 2)

    def require_whole(self) -> None:
        """Refuse what `Result` does, and parts that do not fit what was compared."""
        # What was compared.
        super().require_whole()
        if self.compared not in _REPORTS:
            raise ValueError(f"it compares {self.compared[:40]!r}")
        if self.compared in ("picked", "texts"):
            compare_texts.require_texts(self)
        # Distances: (head, other head), from 0 on; NaN is allowed.
        for name in self.distance_names:
            if name.removesuffix(WITHOUT_SPECIAL) not in MEASURES:
                raise ValueError(f"it has a distance {name[:40]!r}")
            if self.compared == "texts":
                continue
            shape = len(self.head_names), len(self.other_head_names)
            for part in ("", "_low", "_high", "_count"):
                values = self.grids[f"distance{part}:{name}"]
                if values.shape != shape:
                    raise ValueError("its distances do not fit its heads")
                if np.any(values < -1e-6) or np.any(np.isinf(values)):
                    raise ValueError(f"a number of distance{part} is out of range")
            if np.any(np.isnan(self.grids[f"distance_count:{name}"])):
                raise ValueError("rows of some distances are not counted")

    def report(self) -> Report:
        """Return the answer, the blocks and the notes."""
        report: Report = _REPORTS[self.compared](self)
        return report


# All heads of a model, and those of two


def _heads_report(comparison: Comparison) -> Report:
    """Return which heads are alike, and which are alone."""
    name = comparison.distance_names[0]
    names = comparison.head_names
    alike = _most_alike(comparison)
    alone = _most_alone(comparison)
    answer = [f"{model_of(comparison.run)}: {amount(len(names), 'head')} compared"]
    if alike:
        a, b = alike[0]
        answer.append(f"most alike are {names[a]} and {names[b]}: {_distance(comparison, a, b)}")
    if alone:
        a, b = alone[0]
        answer.append(f"most alone is {names[a]}: its nearest, {names[b]}, is {_distance(comparison, a, b)} away")

    # All distances in the order of the clusters.
    order = comparison.grids[f"order:{name}"]
    ordered = [names[head] for head in order]
    blocks: list[Block] = [
        _ranked_pairs(comparison, alike, "most alike, by " + distance_line(name), " and "),
        _ranked_pairs(comparison, alone, "most alone: the head nearest to them is far", "; nearest "),
        Grid(
            printed="never",
            figure="matrix",
            title="distances between heads",
            values=comparison.distance()[np.ix_(order, order)],
            rows=ordered,
            columns=ordered,
            drawn_whole=True,
            notes=["heads in the order of their clusters (average linkage); light: alike"],
        ),
    ]
    return Report(
        model=model_of(comparison.run),
        answer=answer,
        blocks=blocks if alike else blocks[:2],
        guide=guide(comparison),
        source=texts_line(comparison),
        subtitle=f"{distance_line(name)} · {texts_line(comparison)}",
        problems=corpus_notes(comparison),
    )


def _models_report(comparison: Comparison) -> Report:
    """Return which heads differ most from those of the same number, and how heads are matched."""
    name = comparison.distance_names[0]
    models = model_of(comparison.run), model_of(comparison.options["other_run"])
    distances = comparison.distance()
    match = comparison.grids[f"match:{name}"]

    # The distance of each head to the one of its number, with its interval.
    ours, theirs = comparison.same_heads().T
    apart = np.full((3, len(match)), np.nan)
    for row, part in enumerate(("", "_low", "_high")):
        apart[row, ours] = comparison.grids[f"distance{part}:{name}"][ours, theirs]
    column = number("distance", "distance to the head of the same number in the other model")
    heads = comparison.table("heads").with_column(column, apart[0], low=apart[1], high=apart[2])
    known = np.flatnonzero(np.isfinite(apart[0]))
    order = known[np.argsort(-apart[0, known], kind="stable")].tolist()

    # The head that each one is matched with.
    matches = [
        f"{comparison.other_head_names[other]} {fixed(distances[row, other], 3)}" if other >= 0 else ""
        for row, other in enumerate(match.tolist())
    ]
    n_moved = int(comparison.moved().sum())
    n_matched = int((match >= 0).sum())
    moved = f"{n_moved} of {amount(n_matched, 'head')} match one of another number"
    answer = [f"{models[0]} and {models[1]}: {moved}"]
    if order:
        first = comparison.head_names[order[0]]
        answer.append(f"{first} differs most from the head of its number: {fixed(apart[0, order[0]], 3)}")
    return Report(
        model=f"{models[0]} and {models[1]}",
        answer=answer,
        blocks=[
            Ranking(
                heading=f"the heads that differ most from those of the same number, by {distance_line(name)}",
                what="head",
                names=comparison.head_names,
                table=heads,
                columns=["distance", Words("best match", matches)],
                order=order,
            ),
            Grid(
                printed="never",
                figure="matrix",
                title="distances between their heads",
                values=distances,
                rows=comparison.head_names,
                columns=comparison.other_head_names,
                framed=match[:, None] == np.arange(distances.shape[1]),
                drawn_whole=True,
                notes=[
                    "rows: heads of the first model · columns: heads of the second · light: alike",
                    f"framed: the one-to-one matching with the least sum of distances; {moved}",
                ],
            ),
            HeadMap(
                printed="with --all",
                heading="distance to the head of the same number",
                figure="same-heads",
                title="distance to the head of the same number",
                heads=heads,
                column="distance",
            ),
        ],
        guide=[*guide(comparison), "best match: one to one, with the least sum of distances"],
        source=texts_line(comparison),
        subtitle=f"{distance_line(name)} · {texts_line(comparison)}",
        problems=corpus_notes(comparison),
    )


def _most_alike(comparison: Comparison) -> list[tuple[int, int]]:
    """Return the pairs of heads with the least distance."""
    rows, columns = np.triu_indices(len(comparison.head_names), 1)
    distances = comparison.distance()[rows, columns]
    order = np.argsort(distances, kind="stable")[:_MOST_PAIRS]
    order = order[np.isfinite(distances[order])]
    return list(zip(rows[order].tolist(), columns[order].tolist(), strict=True))


def _most_alone(comparison: Comparison) -> list[tuple[int, int]]:
    """Return the heads whose most alike other head is farthest away, each with that head."""
    distances = comparison.distance().copy()
    np.fill_diagonal(distances, np.nan)
    known = np.flatnonzero(np.isfinite(distances).any(1)).tolist()
    nearest = [(head, int(np.nanargmin(distances[head]))) for head in known]
    return sorted(nearest, key=lambda pair: -distances[pair])


def _ranked_pairs(comparison: Comparison, pairs: Sequence[tuple[int, int]], heading: str, joint: str) -> Ranking:
    """Return pairs of heads with their distances."""
    columns = []
    values = {}
    # Pairs of (head of the first, head of the second) to two index arrays, each (pair,).
    rows, others = np.array(pairs, np.int64).reshape(-1, 2).T
    for name in comparison.distance_names:
        short = name.replace(WITHOUT_SPECIAL, "_w/o_special").replace("_", " ")
        columns.append(number(name, "distance of two heads", short=short))
        # Distance grids are (head of the first, head of the second); a pair picks one cell of each.
        for part in ("", "_low", "_high"):
            values[f"{name}{part}"] = comparison.grids[f"distance{part}:{name}"][rows, others]
    return Ranking(
        heading=heading,
        what="heads",
        noun="pair",
        names=[f"{comparison.head_names[a]}{joint}{comparison.head_names[b]}" for a, b in pairs],
        table=Table.of_arrays(columns, **values),
        columns=comparison.distance_names,
        order=range(len(pairs)),
    )


def _distance(comparison: Comparison, a: int, b: int) -> str:
    """Return a distance with its interval, if there is one."""
    value, low, high = comparison.distance_interval(a, b)
    beside = f" {interval(low, high, three_decimals)}" if np.isfinite([low, high]).all() else ""
    return fixed(value, 3) + beside


_REPORTS = {
    "heads": _heads_report,
    "models": _models_report,
    "picked": compare_texts.picked_report,
    "texts": compare_texts.texts_report,
}
"""What is said, by what was compared."""
