"""Patching: which heads carry a behaviour. Its columns, and what is said of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal, get_args

import numpy as np

from attnscope.choice import Choice
from attnscope.errors import UsageError, amount
from attnscope.options import group, option, options
from attnscope.report.blocks import Block, Curves, Graph, Grid, HeadMap, Link, Ranking, Report, Series
from attnscope.report.numbers import Q_VALUE, digits, interval, small_number
from attnscope.report.wording import corpus_line, corpus_notes, model_of, printable
from attnscope.results.result import Result
from attnscope.results.table import HEADS, Array, Column, Floats, Table, count, number, text

LOGITS = "logits"
"""The receiver of a path that leads to the answer through no other head."""

MOST_PATHS = 24
"""Paths that are drawn."""

ATTRIBUTION = number(
    "attribution",
    "the effect to first order: gradient times difference",
    "logits",
    label="effect by attribution patching",
    short="by attribution",
)


Direction = Literal["denoise", "noise"]
By = Literal["z", "query", "key", "value", "pattern"]
BY: tuple[By, ...] = get_args(By)


@options
class PatchOptions:
    """What comes from which run, and what is measured."""

    by: By = option(
        "What a head gets from the other run: z (its output before the output projection), query, key, value, or "
        "pattern (its weights).", default="z", choices=BY,
    )  # fmt: skip
    direction: Direction = option(
        "denoise: the corrupt run gets values of the clean one; noise: the clean run gets values of the corrupt one.",
        default="denoise", choices=("denoise", "noise"),
    )  # fmt: skip
    positions: bool = option(
        "Also patch each position alone; all pairs must have the same number of tokens.", default=False
    )
    attribution: bool = option(
        "Also estimate every head by gradient times difference, and say how well that ranks them.", default=False
    )
    exact: int | None = option(
        "Patch only the N heads that attribution patching puts first.  [default: all heads]", default=None, least=1
    )
    curve: bool = option(
        "Faithfulness: keep the k best heads, and patch all others from the corrupt run.", default=False
    )
    paths: int | None = option(
        "Path patching among the N strongest heads: head to head through query, key and value, and head to logits.",
        default=None, least=1,
    )  # fmt: skip
    edges: int | None = option(
        "Estimate the paths among all heads by gradient times difference, and patch the N with the largest estimates.",
        default=None, least=1,
    )  # fmt: skip
    choice: Choice = group(Choice)

    def require(self) -> None:
        """Refuses what needs values that are not measured."""
        if self.curve and self.exact is not None:
            raise UsageError("--curve ranks all heads by exact values", "leave out --exact")
        if self.paths is not None and self.edges is not None:
            raise UsageError("--paths and --edges choose paths in two ways", "leave out one of them")
        if (self.paths or self.edges) is not None and self.by != "z":
            option = "--paths" if self.paths is not None else "--edges"
            raise UsageError(f"{option} begin at the z of heads, and --by is {self.by}", "leave out --by")


class Patching(Result):
    """How a logit difference right - wrong changes where heads compute with values of another run.

    The table `whole` has the logit difference of the "clean" and the "corrupt" run, and the "total" effect, clean -
    corrupt. `heads` has the effect of each head, positive towards right answers, and `by_pair` the same on each pair.
    """

    SCHEMA: ClassVar[str] = "attnscope.patch/2"
    TABLES: ClassVar[Mapping[str, Sequence[Column]]] = {
        "heads": (
            *HEADS,
            number("effect", "change of the logit difference", "logits", label="effect on the logit difference"),
            number("effect_q", "false discovery rate at which it is not 0", Q_VALUE, range=(0, 1), label="q"),
            number("share", "effect by the total effect", label="share of the total effect", short="share of total"),
            text("patched_with", "the heads that are patched together, itself among them"),
        ),
        "whole": (text("quantity"), number("value", "mean over pairs", "logits")),
        "pairs": (
            text("source", "the file that it comes from"),
            count("line", "its line there"),
            text("clean", "the clean text"),
            text("corrupt", "the corrupt text"),
            text("right", "the right answers, as tokens"),
            text("wrong", "the wrong answers, as tokens"),
            number("clean_difference", "the logit difference right - wrong on the clean text", "logits"),
            number("corrupt_difference", "the same on the corrupt text", "logits"),
        ),
        "positions": (text("token", "a token of the first pair"),),
        "paths": (
            text("sender", "the head whose output comes from the other run, such as L3H1"),
            text("receiver", "the heads that read it, or the logits"),
            text("by", "what they compute of it: query, key or value; empty for the logits"),
            number("effect", "what the path alone changes", "logits"),
            number("q", "false discovery rate at which it is not 0", Q_VALUE, range=(0, 1)),
            number("share", "effect by the total effect", short="share of total"),
            ATTRIBUTION,
        ),
        "curve": (
            count("n_left", "how many heads keep their values", label="heads left"),
            number("faithfulness", "share of the total effect that is left"),
            text("removed", "the heads that went since the point before, those with the smallest effect first"),
        ),
    }
    ARRAYS: ClassVar[Sequence[Array]] = (
        Array("by_pair", "the effect on each pair", "logits", axes=("heads", "pairs")),
        Array("position_effects", "the mean effect of each position alone", "logits", axes=("heads", "positions")),
    )

    def total(self, quantity: str = "total") -> Floats:
        """Return "clean", "corrupt" or "total" with its interval, (3,)."""
        whole = self.table("whole")
        values: Floats = whole.interval("value")[whole["quantity"] == quantity][0]
        return values

    def strongest(self) -> list[int]:
        """Return the heads by the size of their effect, else of their estimate; of those patched together the first."""
        heads = self.table("heads")
        sizes = np.abs(heads["effect"])
        is_measured = np.isfinite(sizes)
        estimates = np.abs(heads["attribution"]) if "attribution" in heads else sizes
        order = np.lexsort((-np.where(is_measured, sizes, estimates), ~is_measured))
        _, firsts = np.unique(heads["patched_with"], return_index=True)
        return [row for row in order.tolist() if row in firsts]

    def require_whole(self) -> None:
        """Refuse what `Result` does, and effects without a total."""
        super().require_whole()
        if not {"clean", "corrupt", "total"} <= {*self.table("whole")["quantity"].tolist()}:
            raise ValueError("it has no total effect")

    def report(self, **shown: Any) -> Report:
        """Return the heads that carry the behaviour first, then how they do it."""
        clean, corrupt = (small_number(self.total(run)[0]) for run in ("clean", "corrupt"))
        difference = f"logit difference right − wrong: clean {clean}, corrupt {corrupt}"
        total, low, high = self.total()
        return Report(
            model=model_of(self.run),
            answer=[*_answer(self), difference],
            blocks=list(_blocks(self)),
            guide=_guide(self),
            source=corpus_line(self),
            subtitle=f"{difference}; total effect {small_number(total)} {interval(low, high, small_number)}",
            problems=corpus_notes(self),
            notes=_notes(self),
        )


def head_columns(by: str, direction: str) -> list[Column]:
    """Return the columns of heads, which say what was patched."""
    columns = []
    for column in Patching.TABLES["heads"]:
        if column.name == "effect":
            runs = f"where the corrupt run gets the {by} of the clean run: patched - corrupt"
            if direction == "noise":
                runs = f"where the clean run gets the {by} of the corrupt run: clean - patched"
            column = replace(column, meaning=f"change of the logit difference right - wrong {runs}", short="effect")
        columns.append(column)
    return columns


# What is shown


def _answer(patching: Patching) -> list[str]:
    """Say which head carries how much of the total effect."""
    total, low, high = patching.total()
    heads = patching.table("heads")
    first = patching.strongest()[0]
    effect = heads["effect"][first]
    whole = f"{small_number(total)} {interval(low, high, small_number)}"
    verb = "carries" if effect * total >= 0 else "works against the others:"
    answer = [f"{printable(heads['patched_with'][first])} {verb} {small_number(effect)} of {whole} logits"]
    if low <= 0 <= high:
        answer.insert(0, f"The model does not show this behaviour on these pairs: total effect {whole} logits")
    return answer


def _blocks(patching: Patching) -> Iterator[Block]:
    heads, order = patching.table("heads"), patching.strongest()
    names = heads["patched_with"].tolist()
    yield Ranking(
        what="head",
        names=names,
        table=heads,
        columns=["effect", "effect_q", *_known(heads, "share", "attribution")],
        order=order,
    )
    yield from _paths(patching)
    if "position_effects" in patching.grids:
        yield Grid(
            heading="effect of each position alone, on the tokens of the first pair",
            figure="positions",
            title="effect of each position alone, on the tokens of the first pair",
            values=patching["position_effects"][order],
            rows=[names[row] for row in order],
            columns=patching.table("positions")["token"].tolist(),
        )
    yield from _curve(patching)
    yield HeadMap(heading="effect of every head", printed="with --all", figure="effect", heads=heads, column="effect")
    if "attribution" in heads:
        yield HeadMap(printed="never", figure="attribution", heads=heads, column="attribution")


def _known(table: Table, *columns: str) -> list[str]:
    """Return those of some columns that have a number."""
    return [name for name in columns if name in table and np.isfinite(table[name]).any()]


def _paths(patching: Patching) -> Iterator[Block]:
    """Show paths between heads, those with the largest effects first, and as a graph those that are not 0."""
    paths = patching.table("paths")
    if not len(paths):
        return
    effects = paths.interval("effect")
    sizes = np.abs(effects[:, 0])
    order = np.argsort(-sizes, kind="stable").tolist()
    ends: list[tuple[str, str, str]] = list(
        zip(paths["sender"].tolist(), paths["receiver"].tolist(), paths["by"].tolist(), strict=True)
    )
    yield Ranking(
        what="path",
        names=[f"{sender} → {receiver}" + (f" ({by})" if by else "") for sender, receiver, by in ends],
        table=paths,
        columns=["effect", "q", *_known(paths, "share", "attribution")],
        order=order,
    )
    is_clear = (effects[:, 1] > 0) | (effects[:, 2] < 0)
    clear = [row for row in order if is_clear[row]][:MOST_PATHS]
    heads = patching.table("heads")
    layers = dict(zip(heads["patched_with"].tolist(), heads["layer"].tolist(), strict=True))
    n_paths = amount(len(clear), "path")
    if clear:
        yield Graph(
            figure="paths",
            title="paths on which heads act on the answer",
            layers={name: _layer_of(name, max(layers.values()) + 1) for row in clear for name in ends[row][:2]},
            links=[Link(ends[row][0], ends[row][1], ends[row][2], float(sizes[row])) for row in clear],
            notes=[
                f"the {n_paths} with the largest effects whose 95% interval does not hold 0; wider = a larger effect, "
                "of either sign; grey: to the logits without any other head"
            ],
        )


def _layer_of(node: str, top: int) -> int:
    """Return the layer of a node such as L3H1 or L3H0+L3H1; the logits are above all layers."""
    return top if node == LOGITS else int(node.partition("H")[0].removeprefix("L"))


def _curve(patching: Patching) -> Iterator[Block]:
    """Show how much of the total effect few heads keep."""
    curve = patching.table("curve")
    if not len(curve):
        return
    points = curve.interval("faithfulness")
    has_band = bool(np.isfinite(points[:, 1]).any())
    yield Curves(
        figure="curve",
        title="heads taken out one after another",
        y="faithfulness: share of the total effect",
        across="heads left, those with the smallest effect gone first",
        x=curve["n_left"].tolist(),
        # A point without an interval has a band of no height.
        series=[Series("", np.where(np.isfinite(points), points, points[:, :1]))],
        notes=[
            "faithfulness: heads that go get values of the corrupt run, in the order of one half of the pairs; it is "
            "measured on the other half" + ("; band: 95% interval over pairs" if has_band else "")
        ],
    )


# What is said


def _guide(patching: Patching) -> list[str]:
    """Say how to read it."""
    by = printable(patching.options.get("by", "z"))
    effect = f"effect: logits that come back when the corrupt run gets the head's {by} of the clean run"
    if patching.options.get("direction") == "noise":
        effect = f"effect: logits that go when the clean run gets the head's {by} of the corrupt run"
    return [effect, "q: the false discovery rate at which the effect is not 0"]


def _notes(patching: Patching) -> list[str]:
    """Say what few need to know."""
    options = patching.options
    names = patching.table("heads")["patched_with"].tolist()
    notes = []
    if len({*names}) < len(names):
        notes.append("heads that share a key/value head are patched together and have one effect")
    if isinstance(options.get("rank_agreement"), float):
        correlation = digits(options["rank_agreement"], 2)
        notes.append(f"attribution patching ranks heads like exact patching: rank correlation {correlation}")
    if options.get("n_paths"):
        n_patched = len(patching.table("paths"))
        ranks = ""
        if isinstance(options.get("path_agreement"), float):
            ranks = f": rank correlation {digits(options['path_agreement'], 2)}"
        notes.append(
            f"the {n_patched:,} of {options['n_paths']:,} paths with the largest estimates were patched{ranks}"
        )
    if options.get("exact") is not None:
        notes.append("only the heads that attribution patching puts first were patched: q counts these alone")
    if len(patching.table("pairs")) == 1:
        notes.append("one pair gives no interval")
    return notes
