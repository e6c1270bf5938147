"""Define reports and their blocks: what is shown of a result, in the terminal and in figures alike.

A question lists its blocks once, in the order in which people read them. A block holds values, names and sentences, and
no pixels: `report.terminal` and `report.figures` draw each type of block in their own way.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from attnscope.results.table import Floats, Table

Printed = Literal["always", "with --all", "never"]


@dataclass(frozen=True, eq=False, kw_only=True)
class Block:
    """The fields that all blocks share.

    Attributes:
        heading: Its title in the terminal.
        printed: When the terminal shows it.
        figure: The name of the figure that shows it, which is also its file's stem; empty = no figure. Blocks with the
            same name share a figure.
        title: The title of that figure, after the name of the model.
        notes: Sentences below this block, without which it would be misread.
    """

    heading: str = ""
    printed: Printed = "always"
    figure: str = ""
    title: str = ""
    notes: Sequence[str] = ()


@dataclass(frozen=True, eq=False, kw_only=True)
class HeadMap(Block):
    """A column of a table of heads as a map: layers down, heads across, one map per kind of attention.

    A figure with one such block draws a large map, with numbers and intervals in its cells; of more than 100 heads it
    writes only the ten largest numbers. A figure with several draws small maps side by side.

    Attributes:
        heads: The table of heads.
        column: The name of its column.
    """

    heads: Table
    column: str


@dataclass(frozen=True, eq=False)
class WordsColumn:
    """A column of a ranking that holds texts.

    Attributes:
        title: Its header.
        texts: A text for each row of the table.
        wraps: Whether a narrow terminal may break its lines.
        right: Whether it is flush right, as numbers are.
    """

    title: str
    texts: Sequence[str]
    wraps: bool = False
    right: bool = False


@dataclass(frozen=True, eq=False, kw_only=True)
class Ranking(Block):
    """Rows of a table in an order, with the intervals of their numbers.

    Attributes:
        header: The header above the names of rows, such as "head".
        names: A name for each row of the table.
        table: The numbers, a row for each name.
        columns: What stands beside the names, from left to right: a string names a column of `table`, `WordsColumn`
            hold texts. A narrow terminal leaves out the last ones.
        order: The indices of the rows that are shown, the first one first; None = all rows, in the order of the table,
            also without --all.
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

    def shown(self, *, every: bool = False) -> Sequence[int]:
        """Return the indices of the rows that the terminal shows; `every` is whether --all was given."""
        # Only a ranking that has an order is cut.
        if self.order is None:
            return range(len(self.names))
        return self.order if every else self.order[: self.n_printed]


def rank_heads(
    result: Any, columns: Sequence[str | WordsColumn], order: Sequence[int], **more: Any
) -> Ranking:
    """Return a ranking of the heads of a `results.Result`, with columns of its table of heads.

    `more` are further fields of `Ranking`, such as `heading`.
    """
    heads = result.table("heads")
    return Ranking(
        header="head", names=result.head_names, table=heads, columns=columns, order=order, **more
    )


@dataclass(frozen=True, eq=False, kw_only=True)
class Grid(Block):
    """A matrix of numbers, which may be negative, with names of rows and columns.

    Attributes:
        values: The numbers, (row, column).
        rows: The names of rows, the most important one first.
        columns: The names of columns.
        n_printed: How many rows the terminal shows without --all.
        framed: The cells that have a frame in figures, (row, column), bool; None = no cell.
        drawn_whole: Whether figures show every row, in square cells. If not, they show the first twenty rows.
    """

    values: Floats
    rows: Sequence[str]
    columns: Sequence[str]
    n_printed: int = 5
    framed: NDArray[np.bool_] | None = None
    drawn_whole: bool = False


@dataclass(frozen=True, eq=False, kw_only=True)
class Trends(Block):
    """A quantity over the steps of a training, with a line for each head; the lines that change most have names.

    Attributes:
        y: The title of the vertical axis: the quantity with its unit.
        noun: A plural noun for the lines, such as "heads".
        steps: The training step of each checkpoint, ascending.
        names: The name of each line.
        points: Values and the low and high ends of their intervals, (step, line, 3).
        limits: The ends of the vertical axis; None = those of the values.
        uniform_level: The value of all lines under uniform attention, drawn as a level; None = not known, or not one.
    """

    y: str
    noun: str
    steps: Sequence[int]
    names: Sequence[str]
    points: Floats
    limits: tuple[float, float] | None = None
    uniform_level: float | None = None


@dataclass(frozen=True, eq=False)
class GraphEdge:
    """A line of a graph.

    Attributes:
        sender: The name of the node where it begins.
        receiver: The name of the node where it ends.
        receiver_input: The input of the receiver that it feeds: "query", "key" or "value"; empty = none of these.
        weight: How strong it is; its width is in proportion to the largest weight of the graph.
    """

    sender: str
    receiver: str
    receiver_input: str
    weight: float


@dataclass(frozen=True, eq=False, kw_only=True)
class Graph(Block):
    """A graph whose nodes are heads, one row of them for each layer, and whose lines go from a head to those it feeds.

    Attributes:
        layers: The layer of each node, by the node's name; layer 0 is the lowest row. A node for the logits has a layer
            of its own above all others.
        links: The lines.
    """

    layers: dict[str, int]
    links: Sequence[GraphEdge]


@dataclass(frozen=True, eq=False, kw_only=True)
class Note(Block):
    """A block of text.

    Attributes:
        lines: Its lines.
    """

    lines: Sequence[str]


@dataclass(frozen=True, eq=False, kw_only=True)
class CustomBlock(Block):
    """A block that only one question has, and that draws itself.

    Attributes:
        view: An object with one or both of two methods. For the terminal: `show(console, every=...)`, which returns
            what is printed; `every` is whether --all was given. For a figure: `draw(report, lettering)`, which returns
            its page.
    """

    view: Any


@dataclass(frozen=True, eq=False)
class Report:
    """Everything that people read about a result.

    Attributes:
        model: The name of the model.
        answer: The answer to the question in one to three sentences, the shortest first.
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

    def figures(self) -> dict[str, list[Block]]:
        """Return the blocks of each figure, by the name of the figure, in the order of the report."""
        by_name: dict[str, list[Block]] = {}
        for block in self.blocks:
            if block.figure:
                by_name.setdefault(block.figure, []).append(block)
        return by_name

    def listed_rows(self, table: Table) -> list[int]:
        """Return the rows of the table of files that the terminal lists without --all, each once, in its order."""
        rows: list[int] = []
        for block in self.blocks:
            if isinstance(block, Ranking) and block.table is table:
                rows += block.shown()
        return list(dict.fromkeys(rows))

    @property
    def footer(self) -> list[str]:
        """Return the sentences at the foot of a figure."""
        return [*self.guide, *self.notes, *self.problems]
