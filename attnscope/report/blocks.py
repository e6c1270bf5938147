"""Define reports and their blocks: what the terminal and figures show of a result.

A question lists its blocks once, in the order in which people read them. A block holds values, names and sentences, but
no pixels. `report.terminal` and `report.figures` draw each type of block in their own way.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from attnscope.arrays import Floats
from attnscope.results.table import Table

# When the terminal prints a block.
PrintCondition = Literal["always", "with --all", "never"]


@dataclass(frozen=True, eq=False, kw_only=True)
class Block:
    """The fields that all blocks share.

    Attributes:
        heading: Its title in the terminal.
        printed: When the terminal prints it; "with --all": only if the user gives --all.
        figure: The name of the figure that shows it, which is also its file's stem; empty = no figure. Blocks with the
            same name share a figure.
        title: The title of the figure, which stands after the name of the model.
        notes: Sentences below this block that readers need in order not to misread it.
    """

    heading: str = ""
    printed: PrintCondition = "always"
    figure: str = ""
    title: str = ""
    notes: Sequence[str] = ()


@dataclass(frozen=True, eq=False, kw_only=True)
class HeadMap(Block):
    """A column of a table of heads as a map: layers down, heads across, one map per kind of attention.

    A figure with one `HeadMap` draws a large map, with numbers and intervals in its cells. If there are more than 100
    heads, only the ten largest numbers are written. A figure with several `HeadMap` blocks draws small maps, in rows.

    Attributes:
        heads: The table of heads.
        column: The name of its column.
    """

    heads: Table
    column: str


@dataclass(frozen=True, eq=False)
class WordsColumn:
    """A column of a ranking that holds texts, such as descriptions of heads.

    Attributes:
        title: Its header.
        texts: A text for each row of the table.
        wraps: Whether a narrow terminal may break its lines.
        is_right_aligned: Whether it is flush right, as numbers are.
    """

    title: str
    texts: Sequence[str]
    wraps: bool = False
    is_right_aligned: bool = False


@dataclass(frozen=True, eq=False, kw_only=True)
class Ranking(Block):
    """Rows of a table in an order, with the intervals of their numbers.

    Attributes:
        header: The header above the names of rows, such as "head".
        names: A name for each row of the table.
        table: The numbers, a row for each name.
        columns: The columns right of the names, from left to right: a string names a column of `table`, a
            `WordsColumn` holds texts. A narrow terminal drops the last ones first.
        order: The indices of the rows that are shown, in the order in which they are shown; None = all rows in the
            order of the table, even without --all.
        n_printed: How many rows of `order` the terminal shows without --all.
        noun: A singular noun for a row, as in "and 3 more heads"; empty = `header`.
    """

    header: str
    names: Sequence[str]
    table: Table
    columns: Sequence[str | WordsColumn]
    order: Sequence[int] | None = None
    n_printed: int = 5
    noun: str = ""

    def select_printed_rows(self, *, every: bool = False) -> Sequence[int]:
        """Return the indices of the rows that the terminal prints; `every` is whether --all was given."""
        # Only a ranking with an order has a best part, so only that is cut to `n_printed` rows.
        if self.order is None:
            return range(len(self.names))
        return self.order if every else self.order[: self.n_printed]


def rank_heads(
    result: Any, columns: Sequence[str | WordsColumn], order: Sequence[int], **fields: Any
) -> Ranking:
    """Return a ranking of the heads of a `results.Result`, with columns of its table of heads.

    `fields` are further fields of `Ranking`, such as `heading`.
    """
    heads = result.table("heads")
    return Ranking(
        header="head", names=result.head_names, table=heads, columns=columns, order=order, **fields
    )


@dataclass(frozen=True, eq=False, kw_only=True)
class Grid(Block):
    """A matrix of numbers, which may be negative, with names of rows and columns.

    Attributes:
        values: The numbers, (row, column).
        rows: The names of rows, the most important one first.
        columns: The names of columns.
        n_printed: How many rows the terminal shows without --all.
        framed_cells: Whether a cell has a frame in figures, (row, column), bool; None = no cell has one.
        is_drawn_whole: Whether figures draw every row, in square cells. If not, they draw the first twenty rows.
    """

    values: Floats
    rows: Sequence[str]
    columns: Sequence[str]
    n_printed: int = 5
    framed_cells: NDArray[np.bool_] | None = None
    is_drawn_whole: bool = False


@dataclass(frozen=True, eq=False, kw_only=True)
class Trends(Block):
    """A quantity over the steps of a training run, with a curve for each head. The curves that change most are named.

    Attributes:
        y: The title of the vertical axis: the quantity with its unit.
        noun: A plural noun for the curves, such as "heads".
        steps: The training step of each checkpoint, ascending.
        names: The name of each curve.
        points: The values with their intervals, (step, curve, [value, low, high]).
        y_limits: The lower and upper end of the vertical axis; None = the range of the values.
        uniform_level: The value that every head would have under uniform attention, drawn as a dotted line; None = it
            is not known, or differs between heads.
    """

    y: str
    noun: str
    steps: Sequence[int]
    names: Sequence[str]
    points: Floats
    y_limits: tuple[float, float] | None = None
    uniform_level: float | None = None


@dataclass(frozen=True, eq=False)
class GraphEdge:
    """An edge of a graph, from one head to another.

    Attributes:
        sender: The name of the node where the edge begins.
        receiver: The name of the node where the edge ends.
        receiver_input: The input of the receiver that the edge feeds: "query", "key" or "value"; empty = another input.
        weight: The strength of the edge. The widest line is drawn for the largest weight of the graph.
    """

    sender: str
    receiver: str
    receiver_input: str
    weight: float


@dataclass(frozen=True, eq=False, kw_only=True)
class Graph(Block):
    """A graph of heads, with a row for each layer, whose edges lead from a head to the heads that it feeds.

    Attributes:
        layers: The layer of each node, by the node's name; layer 0 is the lowest row. A node for the logits has a layer
            of its own above all others.
        edges: The edges.
    """

    layers: dict[str, int]
    edges: Sequence[GraphEdge]


@dataclass(frozen=True, eq=False, kw_only=True)
class Note(Block):
    """A block of text.

    Attributes:
        lines: Its lines.
    """

    lines: Sequence[str]


@dataclass(frozen=True, eq=False, kw_only=True)
class CustomBlock(Block):
    """A block that only one question has. Its `view` is an object of that question that draws it.

    Attributes:
        view: An object with one or both of two methods. For the terminal: `show(console, every=...)`, which returns a
            list of what is printed; `every` is whether --all was given. For a figure: `draw(report, lettering)`, which
            returns its page.
    """

    view: Any


@dataclass(frozen=True, eq=False)
class Report:
    """Everything that people read about a result.

    Attributes:
        model: The name of the model.
        answer: The answer to the question in one to three sentences, the shortest first. The terminal prints the first
            sentence bold.
        blocks: The blocks, in the order in which people read them.
        guide: At most three sentences on how to read the blocks.
        source: Which texts were studied, such as "8 pairs, 80 tokens: pairs.jsonl".
        subtitle: A line below the title of figures.
        problems: Sentences on texts or parts of the study that failed; always shown.
        notes: Sentences that few readers need, on the whole report: the terminal shows them with --all, figures always.
    """

    model: str
    answer: Sequence[str]
    blocks: Sequence[Block]
    guide: Sequence[str] = ()
    source: str = ""
    subtitle: str = ""
    problems: Sequence[str] = ()
    notes: Sequence[str] = ()

    def blocks_by_figure(self) -> dict[str, list[Block]]:
        """Return the blocks of each figure, by the name of the figure, in the order of the report."""
        blocks_by_name: dict[str, list[Block]] = {}
        for block in self.blocks:
            if block.figure:
                blocks_by_name.setdefault(block.figure, []).append(block)
        return blocks_by_name

    def find_listed_rows(self, table: Table) -> list[int]:
        """Find the rows of a table that its rankings print without --all, each row once, in the order of printing.

        Table files for people (LaTeX, Markdown) have the same rows.
        """
        rows: list[int] = []
        for block in self.blocks:
            if isinstance(block, Ranking) and block.table is table:
                rows += block.select_printed_rows()
        return list(dict.fromkeys(rows))

    @property
    def footer(self) -> list[str]:
        """Return the sentences at the foot of a figure."""
        return [*self.guide, *self.notes, *self.problems]
