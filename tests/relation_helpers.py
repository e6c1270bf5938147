"""What tests read of results about relations: one relation with its numbers by (layer, head)."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnscope.annotated import AnnotatedText, Link
from attnscope.questions.relations import Relations
from attnscope.studies.relations.evidence import (
    RULES,
    THRESHOLDS,
    HalfSplitter,
    LinkPart,
    TextHits,
    judge,
)
from attnscope.text import word_spans


class Relation:
    """A relation of a result; what its row in the table says, and its numbers by (layer, head), are attributes.

    Attributes:
        best: The layer and head that do best on the half that chooses; None = none.
        best_found: Whether that head expresses the relation.
    """

    def __init__(self, result: Relations, name: str) -> None:
        self._result = result
        self._row = result.row(name)
        table = result.table("relations")
        heads = result.table("heads")
        self._cells = {column: values[self._row].item() for column, values in table.values.items()}
        best = self._cells.pop("best")
        self.best = None if best < 0 else (int(heads["layer"][best]), int(heads["head"][best]))
        self.best_found = self.best is not None and bool(self.found[self.best])

    def __getattr__(self, name: str) -> Any:
        if name in self._cells:
            return self._cells[name]
        name = {"low": "accuracy_low", "high": "accuracy_high"}.get(name, name)
        if name not in self._result.grids:
            raise AttributeError(name)
        return self._by_place(self._result[name][self._row])

    @property
    def left_out(self) -> dict[str, int]:
        table = self._result.table("left_out")
        mine = table.select(table["relation"] == self._row)
        return dict(zip(mine["reason"].tolist(), mine["n"].tolist(), strict=True))

    def _by_place(self, values: NDArray[Any]) -> NDArray[Any]:
        heads = self._result.table("heads")
        shape = heads["layer"].max() + 1, heads["head"].max() + 1
        grid = np.zeros(shape, np.bool_) if values.dtype == np.bool_ else np.full(shape, np.nan)
        grid[heads["layer"], heads["head"]] = values
        return grid


def every_relation(result: Relations) -> list[Relation]:
    """All relations, in the order of the table."""
    return [Relation(result, name) for name in result.table("relations")["relation"].tolist()]


def text_of(text: str, *links: Link, line: int = 1) -> AnnotatedText:
    """A text with links between its words."""
    return AnnotatedText(text, tuple(word_spans(text)), links, "made up", line)


def part_of(
    texts: list[tuple[list[float], int]], first_rule: float = 0.0, mass: float = 0.5, name: str = "x"
) -> LinkPart:
    """Sums over texts, each with how many of its links each head of a layer is right in, and how many links it has.

    The first rule is right in that share of the links.
    """
    lots = HalfSplitter()
    part = LinkPart()
    cells = []
    values = []
    for hits, n in texts:
        rules = np.zeros(len(RULES))
        rules[0] = first_rule * n
        cells.append(TextHits(name, *lots.assign(None), n, rules))
        values.append([[hits], [[mass * n] * len(hits)]])  # (2, layer, head)
    part.add_cells(cells, np.array(values, float))
    return part


def judged(part: LinkPart) -> Relations:
    """A result with the evidence of some sums over one layer."""
    n_heads = (next(iter(part.sums.values())).shape[0] - len(RULES)) // 2
    return Relations({"model": "made"}, {}, dict(THRESHOLDS), *judge(part, "encoder", (1, n_heads)))
