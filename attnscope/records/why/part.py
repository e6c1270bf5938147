"""A part of a model that adds to the residual stream. NumPy only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """A part of a model that adds to the residual stream.

    Attributes:
        name: Such as "L3H1", "L3 MLP" or "token embedding".
        kind: "head", "MLP", "embedding" or "bias".
        layer: Its layer; -1 = it belongs to none.
        head: Its number among the heads of its layer; -1 = it is none.
    """

    name: str
    kind: str
    layer: int = -1
    head: int = -1
