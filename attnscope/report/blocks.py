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
        figure: The name of the figure that shows it, without ending; empty = none does. Blocks of one name share a
            figure.
        title: The title of that figure, after the name of the model.
        notes: Sentences that a reader of this block must know.
    """

    heading: str = ""
    printed: Printed = "always"
    figure: str = ""
    title: str = ""
    notes: Sequence[str] = ()


@dataclass(frozen=True, eq=False, kw_only=True)
class HeadMap(Block):
    """A column of a table of heads as a map: layers down, heads across, one map per kind of attention.

    Alone in a figure it is large, with numbers and intervals; of over 100 heads, only the ten largest have numbers.
    Several in one figure are small, side by side.

    Attributes:
        heads: The table of heads.
        column: The name of its column.
    """

    heads: Table
    column: str


@dataclass(frozen=True, eq=False)
class Words:
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
        what: The header above the names of rows, such as "head".
        names: A name for each row of the table.
        table: The numbers.
        columns: Names of columns of the table, and columns of texts. A narrow terminal leaves out the last ones.
        order: The rows that are shown, the first one first; None = all, in the order of the table, even without --all.
        most: How many rows the terminal shows without --all.
        noun: A noun for a row, as in "and 3 more heads"; empty = `what`.
    """

    what: str
    names: Sequence[str]
    table: Table
    columns: Sequence[str | Words]
    order: Sequence[int] | None = None
    most: int = 5
    noun: str = ""


def rank_heads(
    result: Any, columns: Sequence[str | Words], order: Sequence[int], **more: Any
) -> Ranking:
    """Return a ranking of heads of a result, with columns of its table of heads; `more` are further fields of it."""
    heads = result.table("heads")
    return Ranking(
        what="head", names=result.head_names, table=heads, columns=columns, order=order, **more
    )


@dataclass(frozen=True, eq=False, kw_only=True)
class Grid(Block):
    """A matrix of numbers of either sign, (row, column), with names of rows and columns.

    Attributes:
        values: The numbers, (row, column).
        rows: The names of rows, the most important one first.
        columns: The names of columns.
        most: How many rows the terminal shows without --all.
        framed: The cells that have a frame in figures, (row, column), bool; None = no cell.
        drawn_whole: Whether figures show every row, in square cells; else the first twenty.
    """

    values: Floats
    rows: Sequence[str]
    columns: Sequence[str]
    most: int = 5
    framed: NDArray[np.bool_] | None = None
    drawn_whole: bool = False


@dataclass(frozen=True, eq=False, kw_only=True)
class Trends(Block):
    """A quantity over the steps of a training, with a line for each head; the lines that change most have names.

    Attributes:
        y: The name of the quantity, with its unit.
        what: A plural noun for the lines, such as "heads".
        steps: The steps.
        names: The name of each line.
        points: Values and the low and high ends of their intervals, (step, line, 3).
        limits: The ends of the scale, if they are known.
        by_chance: The value by chance, if it is the same for all lines.
    """

    y: str
    what: str
    steps: Sequence[int]
    names: Sequence[str]
    points: Floats
    limits: tuple[float, float] | None = None
    by_chance: float | None = None


@dataclass(frozen=True, eq=False)
class Link:
    """A line of a graph.

    Attributes:
        sender: The name of the node where it begins.
        receiver: The name of the node where it ends.
        receiver_input: The input of the receiver that it feeds: "query", "key" or "value"; empty = none of these.
        weight: Its width, relative to the other lines.
    """

    sender: str
    receiver: str
    receiver_input: str
    weight: float


@dataclass(frozen=True, eq=False, kw_only=True)
class Graph(Block):
    """A graph of heads, in a row for each layer, and of the lines from heads to the heads that they feed.

    Attributes:
        layers: The layer of each node, by its name; layer 0 is the lowest row. The logits have a layer above all.
        links: The lines.
    """

    layers: dict[str, int]
    links: Sequence[Link]


@dataclass(frozen=True, eq=False, kw_only=True)
class Note(Block):
    """A block of text.

    Attributes:
        lines: Its lines.
    """

    lines: Sequence[str]


@dataclass(frozen=True, eq=False, kw_only=True)
class Special(Block):
    """A block of one question alone, which draws it itself.

    Attributes:
        view: An object with `show(console, every=...)`, which returns the parts that the terminal prints (with
            `every` those of --all, too), or with `draw(report, lettering)`, which returns a page for its figure.
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
        source: The texts, such as "8 pairs, 80 tokens: pairs.jsonl".
        subtitle: A line below the title of figures.
        problems: Sentences on what went wrong, with texts or parts of the study, shown always.
        notes: Sentences that few need: the terminal shows them with --all, figures always.
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
        """Return the blocks of each figure by its name, in their order."""
        by_name: dict[str, list[Block]] = {}
        for block in self.blocks:
            if block.figure:
                by_name.setdefault(block.figure, []).append(block)
        return by_name

    @property
    def footer(self) -> list[str]:
        """Return the sentences at the foot of a figure."""
        return [*self.guide, *self.notes, *self.problems]
