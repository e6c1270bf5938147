"""Declare the result of splitting queries, keys and values into more or fewer heads: its columns and its report.

A split into n heads cuts the d_model columns of Q, K and V into n equal slices of d_head columns. Each head computes
attention from its slice alone, and the outputs of all heads are concatenated. `studies.split` computes the result.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Self

import numpy as np

from attnscope.arrays import Floats
from attnscope.drawing.map_figure import Axis
from attnscope.errors import AttnscopeError, UsageError, amount
from attnscope.options import option, options, read_ranges
from attnscope.report.blocks import (
    Block,
    CustomBlock,
    Grid,
    Note,
    PrintCondition,
    Ranking,
    Report,
    WordsColumn,
)
from attnscope.report.numbers import UNDEFINED, format_fixed, format_percent, largest_first
from attnscope.report.panels import AXES_NOTE, Panel, Panels
from attnscope.report.wording import model_of, printable, report_on
from attnscope.results.result import Result
from attnscope.results.table import Array, Column, Table, count, number, share, text

_MAX_KEYS_PER_MATRIX = 12
"""With more keys than this, print the largest weights of each head rather than its matrix of weights."""

_MAX_HEADS_PER_MATRIX = 8
"""With more heads than this, print the largest weights of each head rather than its matrix of weights."""

_MAX_LISTED_HEADS = 12
"""The most heads whose largest weights are printed."""

_MAX_HEADS_IN_ANSWER = 4
"""The most heads for which the answer names the keys with the largest weight."""

_MAX_DRAWN_HEADS = 12
"""The most heads per split that the figure shows."""

_N_HEADS_COLUMN = count("n_heads", "how many heads there are", label="heads")


@options
class SplitOptions:
    """The options for splitting queries, keys and values into heads."""

    counts: tuple[int, ...] = option(
        "Numbers of heads to split into, such as 1,2,4.",
        default=(1, 2, 4),
        read=read_ranges,
        default_text="1,2,4",
    )
    drop: tuple[int, ...] = option(
        "Set the output of these heads to zero, one by one, and measure the change, such as 0,1.",
        default=(),
        read=read_ranges,
    )

    def require(self) -> None:
        """Refuse numbers of heads below 1, and heads to drop that no split has."""
        if not self.counts or min(self.counts) < 1:
            raise UsageError("a number of heads is at least 1", "such as --counts 1,2,4")
        unknown_heads = [head for head in self.drop if not 0 <= head < max(self.counts)]
        if unknown_heads:
            raise UsageError(
                f"there is no head {unknown_heads[0]} to drop",
                f"of {max(self.counts)} heads the last is {max(self.counts) - 1}",
            )


class Split(Result):
    """Hold attention from the same queries, keys and values with different numbers of heads.

    The table `counts` has one row per split. `heads` has one row per head of each split: a split into 2 heads and one
    into 4 make 6 rows. `drops` has one row per head whose output was set to zero. A row of weights is uniform if all
    its weights are the same. Rows with a single key are not counted as uniform, since they cannot be anything else.
    `options` has the text and `d_model`.
    """

    SCHEMA: ClassVar[str] = "attnscope.split/2"
    TABLES: ClassVar[Mapping[str, Sequence[Column]]] = {
        "heads": (
            _N_HEADS_COLUMN,
            count("head", "its number"),
            count("first_column", "the first of its columns"),
            count("last_column", "the last of its columns"),
            number("entropy_nats", "mean entropy of its rows, 0 to ln(keys)", "nats"),
            count("uniform", "how many of its rows are uniform, of those with a choice"),
            count("rank", "rank of its dot products, at most d_head"),
        ),
        "counts": (
            _N_HEADS_COLUMN,
            count("d_head", "columns of each"),
            number("scale", "1 / sqrt(d_head)"),
        ),
        "queries": (text("token", "a token that attends"),),
        "keys": (text("token", "a token that is attended to"),),
        "drops": (
            _N_HEADS_COLUMN,
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
        """Return the result of a single split, the one into `n_heads` heads: its rows of all tables and arrays.

        Raises:
            AttnscopeError: The result does not have this split.
        """
        if n_heads not in self.counts:
            listed = ", ".join(map(str, self.counts))
            raise AttnscopeError(
                f"there is no split into {amount(n_heads, 'head')} in this record", f"it has {listed}"
            )
        result = self
        # `select` also cuts the arrays whose first axis is the table.
        for name in ("counts", "heads", "drops"):
            if name in self.tables:
                result = result.select(name, result.table(name)["n_heads"] == n_heads)
        return result

    @property
    def tokens(self) -> tuple[list[str], list[str]]:
        """Return (labels of queries, labels of keys), cut and escaped for printing."""
        queries = [printable(token, 40) for token in self.table("queries")["token"]]
        keys = [printable(token, 40) for token in self.table("keys")["token"]]
        return queries, keys

    @property
    def counts(self) -> list[int]:
        """Return the number of heads of each split."""
        counts: list[int] = self.table("counts")["n_heads"].tolist()
        return counts

    def require_whole(self) -> None:
        """Refuse a damaged result, and one that lacks heads of a split."""
        super().require_whole()
        # Splits into 2 and into 4 heads have the rows 2, 2, 4, 4, 4, 4.
        expected = np.repeat(self.counts, self.counts).tolist()
        if not self.counts or self.table("heads")["n_heads"].tolist() != expected:
            raise ValueError("its heads are not those of its numbers of heads")

    def report(self, **shown: Any) -> Report:
        """Return the report: the query on which heads disagree most, a comparison of the splits, and all weights.

        `shown`, which other kinds of results read, is ignored.
        """
        queries, keys = self.tokens
        size = f"{amount(len(queries), 'token')}, d_model {self.options.get('d_model')}"
        counts_text = ", ".join(map(str, self.counts))
        guide = [
            f"rank: of a head's dot products; entropy: mean over its rows, 0 to {np.log(len(keys)):.2f} nats",
            "uniform rows (of those of all heads) choose nothing; disagreement: Jensen-Shannon divergence of "
            "the heads, nats, 0 = alike",
        ]
        if len(self.table("drops")):
            guide[-1] += "; without: L2 norm of the output's change if the head puts out zeros"
        answer = [
            f"{model_of(self.run)} ({size}): the same Q, K and V cut into {counts_text} heads",
            _describe_disagreement(self),
            "disagreement: how differently the heads of a split attend, nats (0 = all alike)",
        ]
        subtitle = f"“{printable(self.options.get('text', ''))}”"
        return report_on(self, answer, _yield_blocks(self), guide, subtitle=subtitle)


def _describe_disagreement(split: Split) -> str:
    """Write on which query the heads of a split disagree most, and how a single head attends there.

    The split is the first one with more than one head.
    """
    queries, keys = split.tokens
    counts = [count for count in split.counts if count > 1]
    if not counts:
        return "one head has one pattern of attention: compare with more, such as --counts 1,2"
    head_count = counts[0]
    split_result = split.of(head_count)
    # Jensen-Shannon divergence between the heads' rows, (query,). Values below 1e-12 are rounding.
    disagreement = split_result["disagreement_nats"][0]
    query = int(disagreement.argmax())
    if not disagreement[query] > 1e-12:
        return f"the {head_count} heads agree about every query"
    # Keys with the largest weight of a head, ties included. `all_favourites` collects them over heads; it is a dict to
    # keep their order without duplicates.
    phrases = []
    all_favourites: dict[int, None] = {}
    for head, row in enumerate(split_result["weights"][:_MAX_HEADS_IN_ANSWER, query]):
        favourites = np.flatnonzero(row >= row.max() * (1 - 1e-9)).tolist()
        if len(favourites) == len(keys):
            phrases.append(f"head {head} gives all keys the same")
        else:
            all_favourites |= dict.fromkeys(favourites)
            names = " and ".join(keys[key] for key in favourites)
            each_word = " each" if len(favourites) > 1 else ""
            phrases.append(f"head {head} gives most to {names}, {row[favourites[0]]:.2f}{each_word}")
    if head_count > _MAX_HEADS_IN_ANSWER:
        phrases.append("…")
    difference = f"they disagree by {disagreement.mean():.4f} nats, most on where {queries[query]} looks"
    answer = f"cut into {head_count}, {difference}: {'; '.join(phrases)}"
    # Show how a single head divides its attention between the same keys.
    if 1 in split.counts:
        single = split.of(1)["weights"][0, query]
        shares = ", ".join(f"{keys[key]} {single[key]:.2f}" for key in all_favourites)
        answer += f". A single head has to compromise: {shares}"
    return answer


def _yield_blocks(split: Split) -> Iterator[Block]:
    """Yield a comparison of the splits, a figure of all heads, then the weights and outputs of each split."""
    yield _compare_splits(split)
    yield CustomBlock(printed="never", figure="split", view=_draw_panels(split))
    queries, keys = split.tokens
    for n_heads in split.counts:
        split_result = split.of(n_heads)
        heads = split_result.table("heads")
        name = f"{amount(n_heads, 'head')}, d_head {split_result.table('counts')['d_head'][0]}"
        if len(keys) > _MAX_KEYS_PER_MATRIX or n_heads > _MAX_HEADS_PER_MATRIX:
            lines = list(_list_largest_weights(split_result, queries, keys))
            yield Note(heading=f"{name}: the largest weights", lines=lines)
            continue
        # The weights of each head, (query, key), then the mean over heads.
        for head, weights in enumerate(split_result["weights"]):
            heading = f"{name}: weights of head {head}, {_name_columns(heads, head)}"
            yield _make_grid(heading, weights, queries, keys)
        if n_heads > 1:
            heading = f"{name}: mean of the heads, no head's own"
            yield _make_grid(
                heading, split_result["mean_weights"][0], queries, keys, printed="with --all"
            )
        # (query, d_model)
        output = split_result["output"][0]
        dimensions = list(map(str, range(output.shape[1])))
        yield _make_grid(f"{name}: output", output, queries, dimensions, printed="with --all")


def _make_grid(
    heading: str,
    values: Floats,
    rows: Sequence[str],
    columns: Sequence[str],
    printed: PrintCondition = "always",
) -> Grid:
    """Return a matrix block, with all rows in the terminal."""
    return Grid(
        heading=heading, printed=printed, values=values, rows=rows, columns=columns, n_printed=len(rows)
    )


def _compare_splits(split: Split) -> Ranking:
    """Compare the splits in a table with one row per split."""
    # The cells of each column, by the column's title: one text per split.
    columns: dict[str, list[str]] = defaultdict(list)
    drop_texts = []
    for n_heads in split.counts:
        split_result = split.of(n_heads)
        heads = split_result.table("heads")
        columns["d_head"].append(str(split_result.table("counts")["d_head"][0]))
        columns["rank"].append(_format_range(heads["rank"].tolist()))
        columns["entropy"].append(format_fixed(heads["entropy_nats"].mean(), 4))
        n_rows = n_heads * len(split.table("queries"))
        columns["uniform rows"].append(f"{heads['uniform'].sum()} of {n_rows}")
        columns["disagreement"].append(format_fixed(split_result["disagreement_nats"].mean(), 4))
        # How much the output changes when a head is set to zero.
        changes = []
        for drop in split_result.table("drops").as_dicts():
            changes.append(f"H{drop['head']}: {drop['l2']:.4f} ({format_percent(drop['share'])})")
        drop_texts.append(", ".join(changes) or UNDEFINED)
    word_columns = [WordsColumn(title, texts, is_right_aligned=True) for title, texts in columns.items()]
    if len(split.table("drops")):
        word_columns.append(WordsColumn("without", drop_texts, wraps=True))
    names = list(map(str, split.counts))
    return Ranking(header="heads", names=names, table=split.table("counts"), columns=word_columns)


def _name_columns(heads: Table, head: int) -> str:
    """Describe a head's slice of Q, K and V, such as "columns 0 to 3"."""
    first, last = heads["first_column"][head], heads["last_column"][head]
    return f"column {first}" if first == last else f"columns {first} to {last}"


def _format_range(values: Sequence[int]) -> str:
    """Format the range of some numbers, such as "2–4", or "3" if all are 3."""
    smallest, largest = min(values), max(values)
    return str(smallest) if smallest == largest else f"{smallest}–{largest}"


def _list_largest_weights(
    split_result: Split, queries: Sequence[str], keys: Sequence[str]
) -> Iterator[str]:
    """Yield one line per head of a split, with its three largest weights."""
    for head, weights in enumerate(split_result["weights"][:_MAX_LISTED_HEADS]):
        links = []
        # `largest_first` returns indices into the flattened array, (query, key).
        for index in largest_first(weights, 3):
            query, key = divmod(index, len(keys))
            links.append(f"{queries[query]} → {keys[key]} {weights[query, key]:.4f}")
        yield f"head {head}: {', '.join(links)}"
    n_more = len(split_result["weights"]) - _MAX_LISTED_HEADS
    if n_more > 0:
        yield f"and {amount(n_more, 'more head')} (--json has all)"


def _draw_panels(split: Split) -> Panels:
    """Return a figure with a map, (query, key), of each head and of the mean over heads, for each split."""
    queries, keys = (Axis(tuple(labels)) for labels in split.tokens)
    panels = []
    notes = [AXES_NOTE]
    for n_heads in split.counts:
        split_result = split.of(n_heads)
        heads = split_result.table("heads")
        name = amount(n_heads, "head")
        for head, weights in enumerate(split_result["weights"][:_MAX_DRAWN_HEADS]):
            title = f"{name}: H{head}, {_name_columns(heads, head)}"
            panels.append(Panel(title, weights, queries, keys))
        if n_heads > 1:
            panels.append(
                Panel(f"{name}: mean, no head's own", split_result["mean_weights"][0], queries, keys)
            )
        notes.append(
            f"{name}: rank {_format_range(heads['rank'].tolist())}, entropy {heads['entropy_nats'].mean():.2f} nats, "
            f"disagreement {split_result['disagreement_nats'].mean():.2f} nats"
        )
    title = "the same queries, keys and values with more and fewer heads"
    return Panels(title, panels, notes, max_panel_px=300, is_fitted=True)
