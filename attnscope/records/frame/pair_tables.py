"""Heads by kind, layer and number. NumPy only."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from attnscope.errors import UsageError, amount
from attnscope.records.frame.checks import NUMBER

Floats = NDArray[np.float64]
HeadPlace = tuple[int, int]
"""Layer and head."""


def head_name(place: HeadPlace) -> str:
    """Such as L3H1."""
    return f"L{place[0]}H{place[1]}"


def require_known(known: Iterable[HeadPlace], picked: Iterable[HeadPlace], where: str) -> None:
    """Refuses picked heads that a record does not hold.

    Args:
        known: The heads that it holds.
        picked: Those that are asked for.
        where: What the record is called, such as "this atlas".
    """
    heads = {*known}
    if missing := [head for head in picked if head not in heads]:
        raise UsageError(f"there is no head {head_name(missing[0])} in {where}", f"it has {amount(len(heads), 'head')}")


class OneHead:
    """What is known of a head by its layer and number."""

    layer: int
    head: int

    @property
    def name(self) -> str:
        """Such as L3H1."""
        return head_name((self.layer, self.head))


@dataclass(frozen=True)
class HeadOfKind(OneHead):
    """The same where a model may have several kinds of attention: "encoder", "decoder" or "cross"."""

    kind: str
    layer: int = field(metadata=NUMBER)
    head: int = field(metadata=NUMBER)

    @property
    def address(self) -> tuple[str, int, int]:
        """Its kind of attention, layer and number."""
        return self.kind, self.layer, self.head
