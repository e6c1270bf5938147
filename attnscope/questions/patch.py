"""Declare the result of patching, which heads carry a behaviour: its columns and its report."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal, get_args

import numpy as np

from attnscope.choice import Choice
from attnscope.errors import UsageError, amount
from attnscope.options import group, option, options
from attnscope.report.blocks import Block, Graph, Grid, HeadMap, Link, Ranking, Report
from attnscope.report.numbers import Q_VALUE, digits, interval, largest_first, small_number
from attnscope.report.wording import printable, report_on
from attnscope.results.result import Result
from attnscope.results.table import HEADS, Array, Column, Floats, count, number, text

LOGITS = "logits"
"""The receiver of a path that leads to the answer through no other head."""

_MOST_PATHS = 24
"""Paths in the graph."""

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
    """The values to patch, the run they come from, and the quantities to measure."""

    by: By = option(
        "What a head gets from the other run: z (its output before the output projection), query, key, value, or "
        "pattern (its weights).",
        default="z",
        choices=BY,
    )
    direction: Direction = option(
        "denoise (the corrupt run gets values of the clean one) or noise (the other way round).",
        default="denoise",
        choices=("denoise", "noise"),
    )
    answer: str | None = option(
        "A class of a classifier, such as POSITIVE: it is right in the clean texts, and all others are wrong.  "
        "[default: the answers of the pairs]",
        default=None,
    )
    positions: bool = option(
        "Also patch each position alone; all pairs must have the same number of tokens.", default=False
    )
    attribution: int | None = option(
        "Also estimate every head by gradient times difference, and patch only the N heads that this puts first; "
        "0: patch all of them.",
        default=None,
        least=0,
    )
    paths: int | None = option(
        "Path patching among the N strongest heads: head to head through query, key and value, and head to logits.",
        default=None,
        least=1,
    )
    choice: Choice = group(Choice)

    def require(self) -> None:
        """Refuse paths that do not begin at the z of heads."""
        if self.paths is not None and self.by != "z":
            raise UsageError(f"--paths begin at the z of heads, and --by is {self.by}", "leave out --by")


_LARGEST_Q = 0.05
"""Above this false discovery rate, an effect may be chance."""


class Patching(Result):
    """The change of a logit difference, right - wrong, when heads take values from another run.

    The table `whole` has the logit difference of the "clean" and the "corrupt" run, and the "total" effect, clean -
    corrupt. `heads` has the effect of each head, positive towards right answers, as a mean over pairs; the array
    `by_pair` has it on each pair.
    """

    SCHEMA: ClassVar[str] = "attnscope.patch/2"
    TABLES: ClassVar[Mapping[str, Sequence[Column]]] = {
        "heads": (
            *HEADS,
            number(
                "effect",
                "change of the logit difference",
                "logits",
                label="effect on the logit difference",
            ),
            number(
                "effect_q", "false discovery rate at which it is not 0", Q_VALUE, range=(0, 1), label="q"
            ),
            number(
                "share",
                "effect by the total effect",
                label="share of the total effect",
                short="share of total",
            ),
            text("patched_with", "the heads that are patched together, itself among them"),
        ),
        "whole": (text("quantity"), number("value", "mean over pairs", "logits")),
        "pairs": (
            text("source", "the file that it comes from"),
            count("line", "its line there"),
            text("clean", "the clean text"),
            text("corrupt", "the corrupt text"),
            text("right", "the right answers, as tokens or classes"),
            text("wrong", "the wrong answers, as tokens or classes"),
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
        ),
    }
    ARRAYS: ClassVar[Sequence[Array]] = (
        Array("by_pair", "the effect on each pair", "logits", axes=("heads", "pairs")),
        Array(
            "position_effects",
            "the mean effect of each position alone",
            "logits",
            axes=("heads", "positions"),
        ),
    )

    def total(self, quantity: str = "total") -> Floats:
        """Return "clean", "corrupt" or "total" with its interval, (3,)."""
        whole = self.table("whole")
        values: Floats = whole.interval("value")[whole["quantity"] == quantity][0]
        return values

    def strongest(self) -> list[int]:
        """Return the rows of heads by the size of their effect, the largest first; then unpatched ones by estimate.

        Of heads that are patched together, only the first row is there.
        """
        heads = self.table("heads")
        sizes = np.abs(heads["effect"])
        is_patched = np.isfinite(sizes)
        if "attribution" in heads:
            sizes = np.where(is_patched, sizes, np.abs(heads["attribution"]))
        # Sort by the last key first: patched heads, then sizes.
        order = np.lexsort((-sizes, ~is_patched))
        _, first_rows = np.unique(heads["patched_with"], return_index=True)
        strongest: list[int] = order[np.isin(order, first_rows)].tolist()
        return strongest

    def require_whole(self) -> None:
        """Refuse a damaged result, also one without a total effect."""
        super().require_whole()
        if not {"clean", "corrupt", "total"} <= {*self.table("whole")["quantity"].tolist()}:
            raise ValueError("it has no total effect")

    def report(self, **shown: Any) -> Report:
        """Return the heads that carry the behaviour first, then the paths between them."""
        clean, corrupt = (small_number(self.total(run)[0]) for run in ("clean", "corrupt"))
        difference = f"logit difference right − wrong: clean {clean}, corrupt {corrupt}"
        if self.total("clean")[0] < 0:
            difference += " (even in the clean run the wrong answer is ahead)"
        # Values of the source run were put into the other run.
        is_noise = self.options.get("direction") == "noise"
        source, other = ("corrupt", "clean") if is_noise else ("clean", "corrupt")
        by = printable(self.options.get("by", "z"))
        effect = f"effect: logits by which the {other} run changes when one head gets its {by} from the {source} run"
        subtitle = f"{difference}; total effect {_total(self)}"
        return report_on(
            self,
            [*_answer(self), difference, effect],
            _blocks(self),
            _guide(self),
            subtitle=subtitle,
            notes=list(_notes(self)),
        )


def head_columns(by: str, direction: str) -> list[Column]:
    """Return the columns of heads; the meaning of `effect` names the values that were patched, and the runs."""
    runs = f"where the corrupt run gets the {by} of the clean run: patched - corrupt"
    if direction == "noise":
        runs = f"where the clean run gets the {by} of the corrupt run: clean - patched"
    meaning = f"change of the logit difference right - wrong {runs}"
    columns = {column.name: column for column in Patching.TABLES["heads"]}
    columns["effect"] = replace(columns["effect"], meaning=meaning, short="effect")
    return list(columns.values())


# The answer and the blocks


def _total(patching: Patching) -> str:
    """Return the total effect with its interval."""
    total, low, high = patching.total()
    return f"{small_number(total)} {interval(low, high, small_number)}"


def _answer(patching: Patching) -> list[str]:
    """Say which head carries how much of the total effect."""
    total, low, high = patching.total()
    heads = patching.table("heads")
    strongest = patching.strongest()[0]
    effect = heads["effect"][strongest]
    name = printable(heads["patched_with"][strongest])
    # An interval across 0: there is no behaviour to carry.
    if low <= 0 <= high:
        return [
            f"The model does not show this behaviour on these pairs: total effect {_total(patching)} logits",
            f"So no head carries it; {name} changes the answers most, by {small_number(effect)} logits",
        ]
    verb = "carries most" if effect * total >= 0 else "works most against the others"
    total_words = f"the {_total(patching)} logits between the corrupt and the clean run"
    q = heads["effect_q"][strongest]
    doubt = (
        f"; among so many heads that may be chance (false discovery rate q {small_number(q)})"
        if q > _LARGEST_Q
        else ""
    )
    return [f"{name} {verb}: {small_number(effect)} of {total_words}{doubt}"]


def _blocks(patching: Patching) -> Iterator[Block]:
    """Yield the heads by their effects, the paths between them, effects by position, and maps of all heads."""
    heads = patching.table("heads")
    order = patching.strongest()
    names = heads["patched_with"].tolist()
    columns = ["effect", "effect_q"]
    for name in ("share", "attribution"):
        if name in heads and np.isfinite(heads[name]).any():
            columns.append(name)
    yield Ranking(header="head", names=names, table=heads, columns=columns, order=order)
    yield from _paths(patching)
    # (head, position).
    if "position_effects" in patching.grids:
        title = "effect of each position alone, on the tokens of the first pair"
        yield Grid(
            heading=title,
            figure="positions",
            title=title,
            values=patching["position_effects"][order],
            rows=[names[row] for row in order],
            columns=patching.table("positions")["token"].tolist(),
        )
    yield HeadMap(
        heading="effect of every head",
        printed="with --all",
        figure="effect",
        heads=heads,
        column="effect",
    )
    if "attribution" in heads:
        yield HeadMap(printed="never", figure="attribution", heads=heads, column="attribution")


def _paths(patching: Patching) -> Iterator[Block]:
    """Yield paths between heads, the largest effects first; and as a graph those whose interval is beyond 0."""
    paths = patching.table("paths")
    if not len(paths):
        return
    links = []
    names = []
    for path in paths.as_dicts():
        link = Link(path["sender"], path["receiver"], path["by"], abs(path["effect"]))
        links.append(link)
        channel = f" ({link.receiver_input})" if link.receiver_input else ""
        names.append(f"{link.sender} → {link.receiver}{channel}")
    effects, low, high = paths.interval("effect").T
    order = largest_first(np.abs(effects))
    columns = ["effect", "q"]
    if np.isfinite(paths["share"]).any():
        columns.append("share")
    yield Ranking(header="path", names=names, table=paths, columns=columns, order=order)

    # The graph: the logits are above all layers.
    is_clear = (low > 0) | (high < 0)
    drawn = [links[row] for row in order if is_clear[row]][:_MOST_PATHS]
    if not drawn:
        return
    layers = {LOGITS: int(patching.table("heads")["layer"].max()) + 1}
    for link in drawn:
        for node in (link.sender, link.receiver):
            if node != LOGITS:
                layers[node] = _layer_of(node)
    yield Graph(
        figure="paths",
        title="paths on which heads act on the answer",
        layers=layers,
        links=drawn,
        notes=[
            f"the {amount(len(drawn), 'path')} with the largest effects whose 95% interval does not hold 0; wider = a "
            "larger effect, of either sign; grey: to the logits without any other head"
        ],
    )


def _layer_of(node: str) -> int:
    """Return the layer of a node such as L3H1, or L3H0+L3H1 for heads that are patched together."""
    return int(node.partition("H")[0].removeprefix("L"))


# Sentences


def _guide(patching: Patching) -> list[str]:
    """Say how to read effects."""
    by = printable(patching.options.get("by", "z"))
    effect = f"effect: logits that come back when the corrupt run gets the head's {by} of the clean run"
    if patching.options.get("direction") == "noise":
        effect = f"effect: logits that go when the clean run gets the head's {by} of the corrupt run"
    return [effect, "q: the false discovery rate at which the effect is not 0"]


def _notes(patching: Patching) -> Iterator[str]:
    """Yield notes on heads that share an effect, on attribution patching, and on a single pair."""
    options = patching.options
    names = patching.table("heads")["patched_with"].tolist()
    if len({*names}) < len(names):
        yield "heads that share a key/value head are patched together and have one effect"
    if isinstance(options.get("rank_agreement"), float):
        correlation = digits(options["rank_agreement"], 2)
        yield f"attribution patching ranks heads like exact patching: rank correlation {correlation}"
    if options.get("exact"):
        yield "only the heads that attribution patching puts first were patched: q counts these alone"
    if len(patching.table("pairs")) == 1:
        yield "one pair gives no interval"
