"""What metadata say of the fields of a record: each rule refuses what breaks it, in a record and in its parts."""

from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from attnscope.records.frame.checks import require_whole as require
from attnscope.records.frame.codec import OMITTED, build, describe


@dataclass(frozen=True, eq=False)
class Cell:
    name: str
    text: str = field(default="", metadata=OMITTED)

    def require_whole(self) -> None:
        if self.text == "bad":
            raise ValueError("its text is bad")


@dataclass(frozen=True, eq=False)
class Whole:
    share: float = field(metadata={"range": (0, 1)})
    cells: tuple[Cell, ...] = field(metadata={"distinct": "name"})
    single: int | None = None


CELLS = (Cell("x"), Cell("y", "good"))
WHOLE = Whole(0.5, CELLS)


def test_a_record_comes_back_from_what_describes_it() -> None:
    described = describe(WHOLE)
    assert described == {"share": 0.5, "cells": [{"name": "x"}, {"name": "y", "text": "good"}], "single": None}
    again = build(Whole, described)
    require(again)
    assert describe(again) == described


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"share": 1.02}, "a number of its share is not between 0 and 1"),
        ({"share": -0.02}, "a number of its share is not between 0 and 1"),
        ({"share": "x"}, "it.share is 'x'"),
        ({"single": 0.5}, "it.single is '0.5'"),
        ({"cells": (CELLS[0], CELLS[0])}, "two of its cells are the same"),
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
