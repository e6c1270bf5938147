"""Declare the options and the result of activation patching, which finds the heads that carry a behaviour.

A pair of texts has a right and a wrong answer: the model answers the clean text right, and the corrupt text wrong.
Patching runs the model on one text of the pair, and gives one head an activation from the run on the other text. The
effect is the change of the logit difference: logit of the right answer - logit of the wrong one. `studies.patch` does
the runs.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal, get_args

import numpy as np

from attnscope.arrays import Floats
from attnscope.choice import Choice
from attnscope.errors import UsageError, amount
from attnscope.options import group, option, options
from attnscope.report.blocks import Block, Graph, GraphEdge, Grid, HeadMap, Ranking, Report
from attnscope.report.numbers import Q_VALUE, format_digits, format_interval, format_small, largest_first
from attnscope.report.wording import printable, report_on
from attnscope.results.result import Result
from attnscope.results.table import HEADS, Array, Column, count, number, text

LOGITS = "logits"
"""The receiver in a path that leads from a head straight to the logits, bypassing all other heads."""

_MAX_DRAWN_PATHS = 24
"""The most paths that the graph shows."""

_MAX_Q = 0.05
"""Effects with a q-value above this are reported as possibly due to chance."""

# A further column of the table `heads`, added only by attribution patching: gradient * (source - patched activation).
ATTRIBUTION_COLUMN = number(
    "attribution",
    "the effect to first order: gradient times difference",
    "logits",
    label="effect by attribution patching",
    short="by attribution",
)

Direction = Literal["denoise", "noise"]
PatchedValue = Literal["z", "query", "key", "value", "pattern"]
PATCHED_VALUES: tuple[PatchedValue, ...] = get_args(PatchedValue)


@options
class PatchOptions:
    """The values to patch, the run they come from, and the quantities to measure."""

    by: PatchedValue = option(
        "What a head gets from the other run: z (its output before the output projection), query, key, value, or "
        "pattern (its weights).",
        default="z",
        choices=PATCHED_VALUES,
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
        """Refuse path patching with any other patched value than z, since a path begins at a head's output."""
        if self.paths is not None and self.by != "z":
            raise UsageError(f"--paths begin at the z of heads, and --by is {self.by}", "leave out --by")


class Patching(Result):
    """Hold the changes of the logit difference, right - wrong, when heads take activations from another run.

    The table `whole` is about unpatched runs. Its rows are the logit difference of the "clean" and of the "corrupt"
    run, and the "total" effect, which is clean - corrupt. The table `heads` has the effect of each head as a mean over
    pairs, above 0 if the head helps the right answers. Its `share` is effect / total effect. Heads that share a
    key/value head are patched together, and each of their rows has the effect of the group, which `patched_with` names,
    such as "L3H0+L3H1". The array `by_pair` has the effect on each pair.

    In the table `paths`, `by` is the input through which the receiver reads the sender: "query", "key", "value"; empty
    for the logits.
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
        """Return the value, low and high of "clean", "corrupt" or "total" in the table `whole`, (3,)."""
        runs = self.table("whole")
        return np.asarray(runs.interval("value")[runs["quantity"] == quantity][0])

    def strongest(self) -> list[int]:
        """Return row numbers of the table `heads`, the largest effect of either sign first.

        Heads that were not patched come last, in the order of the size of their attribution. Heads that are patched
        together have the same effect, so only the first row of each group is returned.
        """
        heads = self.table("heads")
        effect_sizes = np.abs(heads["effect"])
        # With attribution patching, heads that were only estimated have the effect NaN.
        is_patched = np.isfinite(effect_sizes)
        if "attribution" in heads:
            effect_sizes = np.where(is_patched, effect_sizes, np.abs(heads["attribution"]))
        # `lexsort` sorts by its last key first: patched heads before others, then the largest sizes.
        rows = np.lexsort((-effect_sizes, ~is_patched))
        # The first row of each group of heads that are patched together.
        _, first_rows = np.unique(heads["patched_with"], return_index=True)
        return [row for row in rows.tolist() if row in first_rows]

    def require_whole(self) -> None:
        """Refuse a damaged result, also one without a total effect."""
        super().require_whole()
        if not {"clean", "corrupt", "total"} <= {*self.table("whole")["quantity"].tolist()}:
            raise ValueError("it has no total effect")

    def report(self, **shown: Any) -> Report:
        """Return the report: the heads that carry the behaviour first, then the paths between them.

        `shown`, which other kinds of results read, is ignored: a patching has nothing to choose from.
        """
        clean, _, _ = self.total("clean")
        corrupt, _, _ = self.total("corrupt")
        differences = f"logit difference right − wrong: clean {format_small(clean)}, corrupt {format_small(corrupt)}"
        if clean < 0:
            differences += " (even in the clean run the wrong answer is ahead)"
        # The patched run takes activations from the source run.
        patched, source = "corrupt", "clean"
        if self.options.get("direction") == "noise":
            patched, source = "clean", "corrupt"
        patched_value = printable(self.options.get("by", "z"))
        meaning = (
            f"effect: logits by which the {patched} run changes when one head gets its {patched_value} from the "
            f"{source} run"
        )
        return report_on(
            self,
            [*_write_answer(self), differences, meaning],
            _yield_blocks(self),
            _explain_numbers(self),
            subtitle=f"{differences}; total effect {_format_total(self)}",
            notes=list(_yield_notes(self)),
        )


def make_head_columns(patched_value: str, direction: str) -> list[Column]:
    """Return the columns of the table `heads`; the meaning of `effect` names the patched value and the runs."""
    meaning = "change of the logit difference right - wrong where "
    if direction == "noise":
        meaning += f"the clean run gets the {patched_value} of the corrupt run: clean - patched"
    else:
        meaning += f"the corrupt run gets the {patched_value} of the clean run: patched - corrupt"
    columns = {column.name: column for column in Patching.TABLES["heads"]}
    columns["effect"] = replace(columns["effect"], meaning=meaning, short="effect")
    return list(columns.values())


# The answer and the blocks


def _format_total(patching: Patching) -> str:
    """Format the total effect with its interval, such as "3.20 [2.80, 3.60]"."""
    total, low, high = patching.total()
    return f"{format_small(total)} {format_interval(low, high, format_small)}"


def _write_answer(patching: Patching) -> list[str]:
    """Write which head has the largest effect, and how much of the total effect that is."""
    total, low, high = patching.total()
    heads = patching.table("heads")
    row = patching.strongest()[0]
    effect = heads["effect"][row]
    name = printable(heads["patched_with"][row])
    if low <= 0 <= high:
        # The interval includes 0, so there may be no behaviour for a head to carry.
        return [
            f"The model does not show this behaviour on these pairs: total effect {_format_total(patching)} logits",
            f"So no head carries it; {name} changes the answers most, by {format_small(effect)} logits",
        ]
    verb = "carries most" if effect * total >= 0 else "works most against the others"
    answer = f"{name} {verb}: {format_small(effect)} of the {_format_total(patching)} logits"
    answer += " between the corrupt and the clean run"
    q = heads["effect_q"][row]
    if q > _MAX_Q:
        answer += f"; among so many heads that may be chance (false discovery rate q {format_small(q)})"
    return [answer]


def _yield_blocks(patching: Patching) -> Iterator[Block]:
    """Yield a ranking of heads, the paths between them, effects by position, and layer-by-head maps of all heads."""
    heads = patching.table("heads")
    order = patching.strongest()
    names = heads["patched_with"].tolist()
    columns = ["effect", "effect_q"]
    for name in ("share", "attribution"):
        if name in heads and np.isfinite(heads[name]).any():
            columns.append(name)
    yield Ranking(header="head", names=names, table=heads, columns=columns, order=order)
    yield from _yield_path_blocks(patching)
    if "position_effects" in patching.grids:
        title = "effect of each position alone, on the tokens of the first pair"
        yield Grid(
            heading=title,
            figure="positions",
            title=title,
            # (head, position)
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


def _yield_path_blocks(patching: Patching) -> Iterator[Block]:
    """Yield a ranking of the paths between heads, and a graph of those whose 95% interval does not hold 0."""
    paths = patching.table("paths")
    if not len(paths):
        return
    # An edge of the graph, and a label in the ranking, for each path.
    edges = []
    names = []
    for path in paths.as_dicts():
        edges.append(GraphEdge(path["sender"], path["receiver"], path["by"], abs(path["effect"])))
        receiver_input = f" ({path['by']})" if path["by"] else ""
        names.append(f"{path['sender']} → {path['receiver']}{receiver_input}")
    order = largest_first(np.abs(paths["effect"]))
    columns = ["effect", "q"]
    if np.isfinite(paths["share"]).any():
        columns.append("share")
    yield Ranking(header="path", names=names, table=paths, columns=columns, order=order)

    # The graph shows only paths whose interval lies entirely above or entirely below 0.
    _, low, high = paths.interval("effect").T
    is_clear = (low > 0) | (high < 0)
    drawn_edges = [edges[row] for row in order if is_clear[row]][:_MAX_DRAWN_PATHS]
    if not drawn_edges:
        return
    # The graph draws nodes by layer. The logits get a layer above the last one with heads.
    layer_by_node = {LOGITS: int(patching.table("heads")["layer"].max()) + 1}
    for edge in drawn_edges:
        for node in (edge.sender, edge.receiver):
            if node != LOGITS:
                layer_by_node[node] = _read_layer(node)
    yield Graph(
        figure="paths",
        title="paths on which heads act on the answer",
        layers=layer_by_node,
        edges=drawn_edges,
        notes=[
            f"the {amount(len(drawn_edges), 'path')} with the largest effects whose 95% interval does not hold 0; "
            "wider = a larger effect, of either sign; grey: to the logits without any other head"
        ],
    )


def _read_layer(node: str) -> int:
    """Return the layer in the name of a node: 3 for "L3H1", and for "L3H0+L3H1", heads that are patched together."""
    return int(node.partition("H")[0].removeprefix("L"))


# Sentences


def _explain_numbers(patching: Patching) -> list[str]:
    """Write how to read effects and q."""
    patched_value = printable(patching.options.get("by", "z"))
    meaning = f"effect: logits that come back when the corrupt run gets the head's {patched_value} of the clean run"
    if patching.options.get("direction") == "noise":
        meaning = f"effect: logits that go when the clean run gets the head's {patched_value} of the corrupt run"
    return [meaning, "q: the false discovery rate at which the effect is not 0"]


def _yield_notes(patching: Patching) -> Iterator[str]:
    """Yield notes on heads that share an effect, on attribution patching, and on a single pair."""
    options = patching.options
    names = patching.table("heads")["patched_with"].tolist()
    if len({*names}) < len(names):
        yield "heads that share a key/value head are patched together and have one effect"
    if isinstance(options.get("rank_agreement"), float):
        correlation = format_digits(options["rank_agreement"], 2)
        yield f"attribution patching ranks heads like exact patching: rank correlation {correlation}"
    # "exact" is the number of heads that were patched where attribution chose them; absent or None = all were.
    if options.get("exact"):
        yield "only the heads that attribution patching puts first were patched: q counts these alone"
    if len(patching.table("pairs")) == 1:
        yield "one pair gives no interval"
