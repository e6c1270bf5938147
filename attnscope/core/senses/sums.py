"""The probe that measures every layer on one picture or recording, for whatever the sense reads of weights. Ours."""

from abc import ABC, abstractmethod
from typing import Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from attnscope.core.attention.seam import AttentionCall
from attnscope.core.attention.tile_probe import TileProbe
from attnscope.core.attention.tiles import Tile, attend_in_tiles

Sum = NDArray[np.float64]

Facts = TypeVar("Facts")
Rows = TypeVar("Rows")


class HeadSums(NamedTuple):
    """The measures of one layer on one picture or recording.

    Attributes:
        sums: (measure, head), float64.
        counts: Likewise: a value is sum / count, added up over pictures or recordings first.
    """

    sums: Sum
    counts: Sum


class SenseSums(TileProbe[HeadSums], ABC, Generic[Facts, Rows]):
    """Adds up the measures of a sense, tile by tile, without keeping a map; one forward pass on one input.

    Attributes:
        sums: Kind -> layer -> the measures of its heads, in the order of the sense's catalogue.
        uniform: The same of one head that attends alike to all keys that it may see; None before the first layer.
    """

    def __init__(self, facts: Facts) -> None:
        super().__init__()
        self.uniform: HeadSums | None = None
        self._facts = facts

    def _read(self, call: AttentionCall) -> tuple[Tensor, HeadSums]:
        self._begin(call)
        if self.uniform is None:
            self.uniform = self._measure_uniform(call)
        parts: list[Rows] = []
        output = attend_in_tiles(call, lambda tile: parts.append(self._read_tile(tile)), None, self._buffers)
        return output, self._conclude(parts)

    @abstractmethod
    def _begin(self, call: AttentionCall) -> None:
        """Prepares to read an attention; refuses one that does not fit the facts, by a ValueError."""

    @abstractmethod
    def _measure_uniform(self, call: AttentionCall) -> HeadSums:
        """The measures of one head of uniform attention, in the shape of this call."""

    @abstractmethod
    def _read_tile(self, tile: Tile) -> Rows:
        """What the measures need of some queries; may overwrite the tile's scores."""

    @abstractmethod
    def _conclude(self, parts: list[Rows]) -> HeadSums:
        """The measures of a layer, of what its tiles gave, in the order of their queries."""
