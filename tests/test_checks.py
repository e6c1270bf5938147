"""What metadata say of the fields of a record: each rule refuses what breaks it, in a record and in its parts."""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from attnscope.records.frame.checks import require_whole as require
from attnscope.records.frame.checks import shaped
from attnscope.records.frame.codec import ARRAY, arrays_of, beside, build, coded, describe, parts


@dataclass(frozen=True, eq=False)
class Cell:
    name: str
    place: int = field(metadata={"index": "names", "least": -1})
    rows: np.ndarray[Any, np.dtype[np.float32]] = field(metadata=shaped("names n", weights=True, **beside("")))
    text: str = ""

    TOLD = ("length",)

    @property
    def length(self) -> int:
        return len(self.text)

    def require_whole(self) -> None:
        if self.text == "bad":
            raise ValueError("its text is bad")


@dataclass(frozen=True, eq=False)
class Whole:
    names: tuple[str, ...] = field(metadata={"filled": True, "distinct": ""} | coded(list, tuple))
    share: float = field(metadata={"range": (0, 1), "key": "part"})
    least: tuple[int, ...] = field(metadata={"range": (2, None)})
    kind: str = field(metadata={"choices": ("a", "b")})
    cells: tuple[Cell, ...] = field(metadata={"distinct": "name"} | parts(lambda entry, at: f"{entry['name']}_{at}"))
    single: np.ndarray[Any, np.dtype[np.int64]] | None = field(default=None, metadata=ARRAY)


ROWS = np.full((2, 3), 0.25, np.float32)
CELLS = (Cell("x", -1, ROWS), Cell("y", 1, ROWS, "good"))
WHOLE = Whole(("q", "r"), 0.5, (2, 9), "a", CELLS)


def test_a_record_comes_back_from_what_describes_it_and_its_arrays() -> None:
    described, arrays = describe(WHOLE), arrays_of(WHOLE)
    assert described["part"] == 0.5 and described["cells"][1] == {"name": "y", "place": 1, "text": "good", "length": 4}
    assert [*arrays] == ["x_0", "y_1"]
    again = build(Whole, described, arrays)
    require(again)
    assert describe(again) == described and again.single is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"names": ()}, "its names are empty"),
        ({"names": ("q", "q")}, "two of its names are the same"),
        ({"names": ("q",)}, "a number of its place is not between -1 and 0|the shape of its rows"),
        ({"share": 1.02}, "a number of its share is not between 0 and 1"),
        ({"share": -0.02}, "a number of its share is not between 0 and 1"),
        ({"share": "x"}, "it.share is 'x'"),
        ({"least": (2, 1)}, "a number of its least is not 2 or more"),
        ({"kind": "c"}, "its kind is 'c', not one of a, b"),
        ({"cells": (CELLS[0], CELLS[0])}, "two of its cells are the same"),
        ({"cells": (replace(CELLS[0], place=2),)}, "a number of its place is not between -1 and 1"),
        ({"cells": (replace(CELLS[0], rows=ROWS[:1]),)}, r"the shape of its rows, \(1, 3\), does not fit names x n"),
        ({"cells": (replace(CELLS[0], rows=-ROWS),)}, "its rows are not between 0 and 1"),
        ({"cells": (replace(CELLS[0], rows=2 * ROWS),)}, "its rows sum to more than 1 in a row"),
        ({"cells": (replace(CELLS[0], text="bad"),)}, "its text is bad"),
    ],
)
def test_what_breaks_a_rule_is_refused(changes: dict[str, Any], message: str) -> None:
    require(WHOLE)
    with pytest.raises(ValueError, match=message):
        require(replace(WHOLE, **changes))


def test_rounding_and_what_is_not_known_pass() -> None:
    for share in (1.005, -0.005, float("nan")):
        require(replace(WHOLE, share=share))
    require(replace(WHOLE, cells=(replace(CELLS[0], rows=ROWS * np.nan),)))


@pytest.mark.parametrize("value", [0.5, float("nan"), 1e30])
def test_an_array_of_whole_numbers_takes_no_others(value: float) -> None:
    with pytest.raises(ValueError, match="an array of int64 holds other numbers"):
        build(Whole, describe(WHOLE), {**arrays_of(WHOLE), "single": np.array([value])})
