"""The blocks of a report: what is shown of a result, whatever draws it.

A question lists its blocks once, in the order in which people read them. A block holds values, names and sentences, and
no pixels: `report.terminal` and `report.figures` each draw every type of block once. A notebook
shows what the terminal shows.
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
        heading: What it is called in the terminal.
        printed: When the terminal shows it.
        figure: The name of the figure that it is drawn in, without ending; empty = it is in none. Blocks of one name
            share a figure.
        title: What the figure is called, after the name of the model.
        notes: What a reader of this block must know, a sentence each.
    """

    heading: str = ""
    printed: Printed = "always"
    figure: str = ""
    title: str = ""
    notes: Sequence[str] = ()


@dataclass(frozen=True, eq=False, kw_only=True)
class HeadMap(Block):
    """A column of a table of heads as a map: layers down, heads across, one map per kind of attention.

    In a figure of its own it is large, with numbers and intervals; of more than 100 heads, only the ten largest have
    them. Several in one figure are small, side by side.

    Attributes:
        heads: The table of heads.
        column: The name of its column.
    """

    heads: Table
    column: str


@dataclass(frozen=True, eq=False)
class Words:
    """A column of a ranking that is made of words.

    Attributes:
        title: What stands above it.
        texts: What it says of each row of the table.
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
        what: What a row is, such as "head".
        names: What each row of the table is called.
        table: The numbers.
        columns: Names of its columns, and columns of words. A narrow terminal leaves out the last ones.
        order: The rows that are shown; None = all, as they stand, also without --all.
        most: How many of them the terminal shows without --all.
        noun: What the rows are when they are counted; empty = `what`.
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
    """Return heads of a result in an order, with columns of its table of heads; `more` are further fields."""
    heads = result.table("heads")
    return Ranking(
        what="head", names=result.head_names, table=heads, columns=columns, order=order, **more
    )


@dataclass(frozen=True, eq=False, kw_only=True)
class Grid(Block):
    """A matrix of numbers of either sign, (row, column), with names of rows and columns.

    Attributes:
        values: The numbers.
        rows: The names of rows, the most important one first.
        columns: The names of columns.
        most: How many rows the terminal shows without --all.
        framed: Which cells have a frame in figures, (row, column); None = none.
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
    """Many lines over the steps of a training: those that change most by name, and all of them as a map.

    Attributes:
        y: What is followed, with its unit.
        what: What the lines are of, such as "heads".
        steps: The steps.
        names: The name of each line.
        points: Values and the ends of their intervals, (step, line, 3).
        limits: Ends of the scale, if they are known.
        level: The value by chance, if that is the same for all lines.
    """

    y: str
    what: str
    steps: Sequence[int]
    names: Sequence[str]
    points: Floats
    limits: tuple[float, float] | None = None
    level: float | None = None


@dataclass(frozen=True, eq=False)
class Link:
    """A line of a graph.

    Attributes:
        sender: The name of the node where it begins.
        receiver: The name of the node where it ends.
        receiver_input: What it feeds in the receiver: "query", "key" or "value"; empty = something else.
        weight: How wide it is, relative to the others.
    """

    sender: str
    receiver: str
    receiver_input: str
    weight: float


@dataclass(frozen=True, eq=False, kw_only=True)
class Graph(Block):
    """Heads in rows by layer, and which of them feeds which.

    Attributes:
        layers: The row of each node, by its name; row 0 is the lowest.
        links: The lines.
    """

    layers: dict[str, int]
    links: Sequence[Link]


@dataclass(frozen=True, eq=False, kw_only=True)
class Note(Block):
    """Lines of text of their own.

    Attributes:
        lines: The lines.
    """

    lines: Sequence[str]


@dataclass(frozen=True, eq=False, kw_only=True)
class Special(Block):
    """A block that one question alone has, and that draws itself.

    Attributes:
        view: What shows it: `show(console, every=...)` returns what the terminal prints, `draw(report, lettering)` its
            figure.
    """

    view: Any


@dataclass(frozen=True, eq=False)
class Report:
    """All that is said of a result.

    Attributes:
        model: The name of the model.
        answer: The answer to the question in one to three sentences, the shortest first.
        blocks: What is shown, in the order in which people read it.
        guide: How to read it, at most three sentences.
        source: On what it was measured, such as "8 pairs, 80 tokens: pairs.jsonl".
        subtitle: What figures say below their title.
        problems: What went wrong with texts or parts of the study: all media say it.
        notes: What few need to know: the terminal says it with --all, figures always.
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
        """Return what stands at the foot of a figure."""
        return [*self.guide, *self.notes, *self.problems]
