"""Declare the result about splitting queries, keys and values into more or fewer heads: columns and report."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Self

import numpy as np

from attnscope.drawing.map_figure import Axis
from attnscope.errors import AttnscopeError, UsageError, amount
from attnscope.options import numbers_from, option, options
from attnscope.report.blocks import Block, Grid, Note, Ranking, Report, Special, Words
from attnscope.report.numbers import fixed, largest_first, percent
from attnscope.report.panels import AXES, Panel, Panels
from attnscope.report.wording import model_of, printable, report_on
from attnscope.results.result import Result
from attnscope.results.table import Array, Column, Floats, Table, count, number, share, text

MOST_KEYS = 12
MOST_HEADS = 8
"""With more keys or heads than these, only the largest weights of each head are printed, not all."""

MOST_LISTED = 12
"""Heads whose largest weights are printed."""

MOST_AT_ODDS = 4
"""Heads whose favourite keys the answer tells."""

MOST_DRAWN = 12
"""Heads that are drawn of one split, such as that into 16 heads."""

N_HEADS = count("n_heads", "how many heads there are", label="heads")


@options
class SplitOptions:
    """The options for splitting queries, keys and values into heads."""

    counts: tuple[int, ...] = option(
        "Numbers of heads to split into, such as 1,2,4.",
        default=(1, 2, 4),
        read=numbers_from,
        written="1,2,4",
    )
    drop: tuple[int, ...] = option(
        "Set the output of these heads to zero, one by one, and measure the change, such as 0,1.",
        default=(),
        read=numbers_from,
    )

    def require(self) -> None:
        """Refuse numbers of heads below 1, and heads to drop that no split has."""
        if not self.counts or min(self.counts) < 1:
            raise UsageError("a number of heads is at least 1", "such as --counts 1,2,4")
        beyond = [head for head in self.drop if not 0 <= head < max(self.counts)]
        if beyond:
            last = max(self.counts) - 1
            raise UsageError(
                f"there is no head {beyond[0]} to drop",
                f"of {max(self.counts)} heads the last is {last}",
            )


class Split(Result):
    """The same queries, keys and values with different numbers of heads.

    The table `counts` has a row per number of heads, `heads` one per head of each of them. Its `options` have the text,
    `d_model`, and what was done to the heads.
    """

    SCHEMA: ClassVar[str] = "attnscope.split/2"
    TABLES: ClassVar[Mapping[str, Sequence[Column]]] = {
        "heads": (
            N_HEADS,
            count("head", "its number"),
            count("first_column", "the first of its columns"),
            count("last_column", "the last of its columns"),
            number("entropy_nats", "mean entropy of its rows, 0 to ln(keys)", "nats"),
            count("uniform", "how many of its rows are uniform, of those with a choice"),
            count("rank", "rank of its dot products, at most d_head"),
        ),
        "counts": (N_HEADS, count("d_head", "columns of each"), number("scale", "1 / sqrt(d_head)")),
        "queries": (text("token", "a token that attends"),),
        "keys": (text("token", "a token that is attended to"),),
        "drops": (
            N_HEADS,
            count("head", "the head that puts out zeros"),
            number("l2", "L2 norm of the change of the whole output"),
            share("share", "the same divided by the norm of the output"),
        ),
    }
    ARRAYS: ClassVar[Sequence[Array]] = (
        Array("weights", "attention weights", "share", (0, 1), axes=("heads", "queries", "keys")),
        Array(
            "mean_weights",
            "mean of the heads, which is no head's own",
            "share",
            (0, 1),
            axes=("counts", "queries", "keys"),
        ),
        Array("output", "the heads side by side", axes=("counts", "queries", "outputs")),
        Array(
            "disagreement_nats",
            "Jensen-Shannon divergence of the heads' rows, 0 to ln(heads)",
            "nats",
            (0, None),
            axes=("counts", "queries"),
        ),
        Array("drop_l2", "L2 norm of the change of each query's output", axes=("drops", "queries")),
    )

    def of(self, n_heads: int) -> Self:
        """Return the part of the result for that many heads.

        Raises:
            AttnscopeError: The record does not have it.
        """
        counts = self.table("counts")["n_heads"]
        if n_heads not in counts:
            listed = ", ".join(map(str, counts.tolist()))
            raise AttnscopeError(
                f"there is no split into {amount(n_heads, 'head')} in this record", f"it has {listed}"
            )
        result = self
        for name in ("counts", "heads", "drops"):
            if name in self.tables:
                result = result.select(name, result.table(name)["n_heads"] == n_heads)
        return result

    @property
    def tokens(self) -> tuple[list[str], list[str]]:
        """Return the labels of queries and of keys."""
        queries, keys = (
            [printable(token, 40) for token in self.table(name)["token"]] for name in ("queries", "keys")
        )
        return queries, keys

    def require_whole(self) -> None:
        """Refuse what `Result` does, and heads that do not fit their numbers."""
        super().require_whole()
        counts = self.table("counts")["n_heads"].tolist()
        heads = self.table("heads")["n_heads"].tolist()
        if not counts or heads != [n for n in counts for _ in range(n)]:
            raise ValueError("its heads are not those of its numbers of heads")

    def report(self, **shown: Any) -> Report:
        """Return what a single head has to give up, how the numbers of heads compare, and all weights."""
        queries, keys = self.tokens
        size = f"{amount(len(queries), 'token')}, d_model {self.options.get('d_model')}"
        counts = ", ".join(map(str, self.table("counts")["n_heads"].tolist()))
        measures = "uniform rows (of those of all heads) choose nothing; disagreement: Jensen-Shannon divergence of "
        measures += "the heads, nats, 0 = alike"
        if len(self.table("drops")):
            measures += "; without: L2 norm of the output's change if the head puts out zeros"
        rank = f"rank: of a head's dot products; entropy: mean over its rows, 0 to {np.log(len(keys)):.2f} nats"
        answer = [
            f"{model_of(self.run)} ({size}): the same Q, K and V cut into {counts} heads",
            _compromise(self),
            "disagreement: distance between the rows of the heads, nats (0 = the same, ln n at most)",
        ]
        return report_on(
            self,
            answer,
            _blocks(self),
            [rank, measures],
            subtitle=f"“{printable(' '.join(str(self.options.get('text', '')).split()), 200)}”",
        )


def _compromise(split: Split) -> str:
    """Say about which query the heads disagree most, and what a single head makes of it."""
    queries, keys = split.tokens
    # Heads can disagree only where there are several.
    several = [n for n in split.table("counts")["n_heads"].tolist() if n > 1]
    if not several:
        return "one head has one pattern of attention: compare with more, such as --counts 1,2"
    # The query with the largest divergence between heads; below 1e-12 it is rounding.
    chosen = split.of(several[0])
    query = int(chosen["disagreement_nats"][0].argmax())
    if not chosen["disagreement_nats"][0, query] > 1e-12:
        return f"the {several[0]} heads agree about every query"
    # The favourite keys of each head, ties included; `wanted` has those of all heads, each once and in order.
    wishes = []
    wanted: dict[int, None] = {}
    for head, row in enumerate(chosen["weights"][:MOST_AT_ODDS, query]):
        favourites = np.flatnonzero(row >= row.max() * (1 - 1e-9)).tolist()
        if len(favourites) == len(keys):
            wishes.append(f"head {head} gives all keys the same")
            continue
        wanted |= dict.fromkeys(favourites)
        names = " and ".join(keys[key] for key in favourites)
        each = " each" if len(favourites) > 1 else ""
        wishes.append(f"head {head} gives {names} {row[favourites[0]]:.4f}{each}")
    more = "; …" if several[0] > MOST_AT_ODDS else ""
    said = f"of {several[0]} heads the rows of {queries[query]} differ most: " + "; ".join(wishes) + more
    # One head has to divide its attention between those favourites.
    if 1 in split.table("counts")["n_heads"]:
        single = split.of(1)["weights"][0, query]
        shares = ", ".join(f"{keys[key]} {single[key]:.4f}" for key in wanted)
        said += f". One head alone has one row for all, and gives {shares}"
    return said


def _blocks(split: Split) -> Iterator[Block]:
    # Numbers of heads side by side, then the weights of each.
    yield _comparison(split)
    yield Special(printed="never", figure="split", view=_panels(split))
    queries, keys = split.tokens
    for n in split.table("counts")["n_heads"].tolist():
        chosen = split.of(n)
        heads = chosen.table("heads")
        d_head = int(chosen.table("counts")["d_head"][0])
        name = f"{amount(n, 'head')}, d_head {d_head}"
        # Large matrices are listed by their largest weights.
        if len(keys) > MOST_KEYS or n > MOST_HEADS:
            yield Note(
                heading=f"{name}: the largest weights", lines=list(_largest(chosen, queries, keys))
            )
            continue
        # Weights of each head, (query, key), and their mean.
        for head, weights in enumerate(chosen["weights"]):
            yield _grid(f"{name}: weights of head {head}, {_span(heads, head)}", weights, queries, keys)
        if n > 1:
            heading = f"{name}: mean of the heads, no head's own"
            yield _grid(heading, chosen["mean_weights"][0], queries, keys, printed="with --all")
        # The output, (query, d_model).
        outputs = [str(column) for column in range(chosen["output"].shape[-1])]
        yield _grid(f"{name}: output", chosen["output"][0], queries, outputs, printed="with --all")


def _grid(
    heading: str, values: Floats, rows: Sequence[str], columns: Sequence[str], printed: Any = "always"
) -> Grid:
    return Grid(
        heading=heading, printed=printed, values=values, rows=rows, columns=columns, most=len(rows)
    )


def _comparison(split: Split) -> Ranking:
    """Compare the numbers of heads."""
    counts = split.table("counts")
    # One cell per number of heads in each column.
    cells: dict[str, list[str]] = {
        name: [] for name in ("d_head", "rank", "entropy", "uniform rows", "disagreement")
    }
    without = []
    for n in counts["n_heads"].tolist():
        chosen = split.of(n)
        heads = chosen.table("heads")
        cells["d_head"].append(str(chosen.table("counts")["d_head"][0]))
        cells["rank"].append(range_of(heads["rank"].tolist()))
        cells["entropy"].append(fixed(heads["entropy_nats"].mean(), 4))
        cells["uniform rows"].append(f"{heads['uniform'].sum()} of {n * len(split.table('queries'))}")
        cells["disagreement"].append(fixed(chosen["disagreement_nats"].mean(), 4))
        # How far the output moves without each head.
        drops = chosen.table("drops")
        changes = zip(drops["head"].tolist(), drops["l2"].tolist(), drops["share"].tolist(), strict=True)
        without.append(
            ", ".join(f"H{head}: {l2:.4f} ({percent(part)})" for head, l2, part in changes) or "–"
        )
    columns = [Words(title, texts, right=True) for title, texts in cells.items()]
    if len(split.table("drops")):
        columns.append(Words("without", without, wraps=True))
    names = [str(n) for n in counts["n_heads"].tolist()]
    return Ranking(what="heads", names=names, table=counts, columns=columns)


def _span(heads: Table, head: int) -> str:
    """Name the columns of a head."""
    first, last = (int(heads[name][head]) for name in ("first_column", "last_column"))
    return f"column {first}" if first == last else f"columns {first} to {last}"


def range_of(values: Sequence[int]) -> str:
    """Return the range of some numbers, such as 2–4, or 3 if all are the same."""
    least, most = min(values), max(values)
    return str(least) if least == most else f"{least}–{most}"


def _largest(chosen: Split, queries: Sequence[str], keys: Sequence[str]) -> Iterator[str]:
    """Yield the three largest weights of each head, one line per head."""
    for head, weights in enumerate(chosen["weights"][:MOST_LISTED]):
        links = [divmod(place, len(keys)) for place in largest_first(weights, 3)]  # (query, key)
        yield f"head {head}: " + ", ".join(
            f"{queries[q]} → {keys[k]} {weights[q, k]:.4f}" for q, k in links
        )
    n_more = len(chosen["weights"]) - MOST_LISTED
    if n_more > 0:
        yield f"and {amount(n_more, 'more head')} (--json has all)"


def _panels(split: Split) -> Panels:
    """Return the heads of each number of heads as maps, (query, key), then their mean; and what is known of them."""
    queries, keys = (Axis(tuple(labels)) for labels in split.tokens)
    panels = []
    notes = [AXES]
    for n in split.table("counts")["n_heads"].tolist():
        chosen = split.of(n)
        heads = chosen.table("heads")
        name = amount(n, "head")
        for head, weights in enumerate(chosen["weights"][:MOST_DRAWN]):
            panels.append(Panel(f"{name}: H{head}, {_span(heads, head)}", weights, queries, keys))
        if n > 1:
            panels.append(
                Panel(f"{name}: mean, no head's own", chosen["mean_weights"][0], queries, keys)
            )
        notes.append(
            f"{name}: rank {range_of(heads['rank'].tolist())}, entropy {heads['entropy_nats'].mean():.2f} nats, "
            f"disagreement {chosen['disagreement_nats'].mean():.2f} nats"
        )
    title = "the same queries, keys and values with more and fewer heads"
    return Panels(title, panels, notes, largest_px=300, is_fitted=True)
