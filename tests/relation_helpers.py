"""What tests read of results about relations: one relation with its numbers by (layer, head)."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnscope.questions.relations import LEAST_MASS, Relations
from attnscope.studies.relations.evidence import THRESHOLDS, Tally, judge


class Relation:
    """A relation of a result.

    Attributes:
        cells: What its row in the table of relations says; also read as attributes.
        best: The layer and head that do best on the half that chooses; None = none.
    """

    def __init__(self, result: Relations, name: str) -> None:
        self._result, self._row = result, result.row(name)
        table = result.table("relations")
        self.cells = {column: values[self._row].item() for column, values in table.values.items()}
        heads = result.table("heads")
        place = self.cells["best"]
        self.best = None if place < 0 else (int(heads["layer"][place]), int(heads["head"][place]))
        self.best_found = self.best is not None and bool(self.found[self.best])
        self.weak = self.best_found and bool(self.mass[self.best] < LEAST_MASS)

    def __getattr__(self, name: str) -> Any:
        if name in self.cells:
            return self.cells[name]
        array = {"low": "accuracy_low", "high": "accuracy_high"}.get(name, name)
        if array in self._result.grids:
            return self._by_place(self._result[array][self._row])
        raise AttributeError(name)

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


def judged(tallies: dict[str, Tally], kind: str = "encoder") -> Relations:
    """A result with the evidence of some tallies."""
    return Relations({"model": "made"}, {}, dict(THRESHOLDS), *judge(tallies, kind))
