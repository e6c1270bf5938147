"""Sums and counts of one layer: how they are added up, and what they come to."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attnscope.core.measures.catalogue import MEASURES, OFFSETS, SINK_THRESHOLD, Keys, Text, measure_names

Sum = NDArray[np.float64]

_BY_FAMILY = {measure.family: name for name, measure in MEASURES.items()}
RECEIVED, SINK = _BY_FAMILY[Text("received")], _BY_FAMILY[Text("sink")]
FIRST, EVERY = _BY_FAMILY[Keys("first")], _BY_FAMILY[Keys("resting", is_set=False)]
"""A sink is recognised by the mass on the first token, and by a measure that counts every query."""


@dataclass(frozen=True, eq=False)
class SumsOf:
    """The measures of one layer on one batch, as sums and counts.

    A unit is a text; or, if long texts were cut (`catalogue.unit_queries`), a block of a text's queries. All units of
    the first text come before those of the second, and each text has as many. Numbers of a whole text (received, sink)
    are in its first unit.

    Attributes:
        names: The measures of the first axis of the sums (`measure_names`).
        sum: (measure, unit, head), float64.
        count: Likewise: a value is sum / count, pooled over texts by adding both first. Undefined where 0.
        uniform_sum: The same under uniform attention over the keys that the mask allows, with the same count. In
            `…_active` each query weighs as it does in the head, by the head's mass on keys outside the sinks: a head
            that spreads evenly over them has just this, however much it rests.
        offset_sum: (offset, unit, head): queries whose largest weight is at the offset (OFFSETS); of t keys that share
            the largest weight each counts 1/t.
        offset_count: Queries that may attend to a key at the offset.
        offset_uniform: The sum under uniform attention, where all allowed keys share the largest weight.
    """

    names: tuple[str, ...]
    sum: Sum
    count: Sum
    uniform_sum: Sum
    offset_sum: Sum
    offset_count: Sum
    offset_uniform: Sum

    def value(self, name: str) -> Sum:
        """Pooled over the batch: sum / count, (head,); NaN where nothing was counted."""
        return self._ratio(self.sum, self.count, name)

    def uniform(self, name: str) -> Sum:
        """The value under uniform attention, (head,); NaN where nothing was counted."""
        return self._ratio(self.uniform_sum, self.count, name)

    def _ratio(self, sums: Sum, counts: Sum, name: str) -> Sum:
        i = self.names.index(name)
        total, count = sums[i].sum(0), counts[i].sum(0)
        ratio: Sum = np.divide(total, count, out=np.full_like(total, np.nan), where=count != 0)
        return ratio


class HeadSums(NamedTuple):
    """The measures of one layer on one picture or recording.

    Attributes:
        sums: (measure, head), float64.
        counts: Likewise: a value is sum / count, added up over pictures or recordings first.
    """

    sums: Sum
    counts: Sum


_AT_ONCE = 1000
"""How many small tensors wait on a device before they are fetched together."""

_ARRAYS = ("sum", "count", "offset_sum", "offset_count")


class Totals:
    """Adds up one layer's measures unit by unit (see SumsOf), for dense weights and for tiles."""

    def __init__(self, names: tuple[str, ...], n_units: int, n_heads: int) -> None:
        self.names = names
        shape = (len(names), n_units, n_heads)
        self.sum, self.count = np.zeros(shape), np.zeros(shape)
        offsets = (len(OFFSETS), n_units, n_heads)
        self.offset_sum, self.offset_count = np.zeros(offsets), np.zeros(offsets)
        self._place = {name: i for i, name in enumerate(names)}
        self._waiting: list[tuple[str, int | slice | list[int], slice, Tensor]] = []

    def __contains__(self, name: str) -> bool:
        return name in self._place

    def add(self, name: str, units: slice, sums: Tensor | None, counts: Tensor | None = None) -> None:
        """Adds sums and counts of some units, each (unit, head or 1); skips measures that are not wanted."""
        i = self._place.get(name)
        if i is None:
            return
        for kind, numbers in (("sum", sums), ("count", counts)):
            if numbers is not None:
                self._later(kind, i, units, numbers)

    def add_several(self, names: list[str], units: slice, numbers: Tensor, kind: Literal["sum", "count"]) -> None:
        """Adds sums or counts of several measures, (measure, unit, head or 1); skips those that are not wanted."""
        wanted, rows = _match(tuple(names), self.names)
        if wanted:
            self._later(kind, rows, units, numbers if len(wanted) == len(names) else numbers[wanted])

    def add_offsets(self, units: slice, sums: Tensor, counts: Tensor) -> None:
        """Adds the counts of largest weights by offset, each (unit, head or 1, offset)."""
        self._later("offset_sum", slice(None), units, sums.permute(2, 0, 1))
        self._later("offset_count", slice(None), units, counts.permute(2, 0, 1))

    def _later(self, kind: str, rows: int | slice | list[int], units: slice, numbers: Tensor) -> None:
        if numbers.device.type == "cpu":
            getattr(self, kind)[rows, units] += numbers.detach().numpy()
            return
        # A tile has some fifty small tensors: fetched one by one they would take as long as the tile itself.
        self._waiting.append((kind, rows, units, numbers))
        if len(self._waiting) >= _AT_ONCE:
            self.settle()

    def settle(self) -> None:
        """Adds what waits on a device; before anything is read."""
        if not self._waiting:
            return
        flat = torch.cat([numbers.detach().flatten() for *_, numbers in self._waiting]).cpu().double().numpy()
        start = 0
        for kind, rows, units, numbers in self._waiting:
            end = start + numbers.numel()
            getattr(self, kind)[rows, units] += flat[start:end].reshape(numbers.shape)
            start = end
        self._waiting.clear()

    def finish_texts(self, received: Tensor, counted: Tensor) -> None:
        """Adds the numbers of whole texts to their first units: what the most attended key received, and sinks.

        `received` is the mass of each key, (text, head or mask head, key), `counted` the number of queries, (text, mask
        head).
        """
        largest = received.amax(-1) if received.shape[2] else received.sum(-1)
        largest = largest.expand(-1, self.sum.shape[2])
        n_texts, n_units = len(largest), self.sum.shape[1]
        each = max(n_units // max(n_texts, 1), 1)
        first = slice(0, n_units, each)
        self.add(RECEIVED, first, largest, counted.expand(largest.shape))
        self.settle()
        if SINK in self:
            names = SINK, FIRST, EVERY
            rows = [self._place[name] for name in names]
            of_texts = [part[rows].reshape(3, n_texts, each, part.shape[2]).sum(2) for part in (self.sum, self.count)]
            tell_sinks(names, *of_texts)
            self.sum[rows[0], first], self.count[rows[0], first] = (part[0] for part in of_texts)

    def clear(self, name: str) -> None:
        """Makes a measure undefined, and its `_active`."""
        self.settle()
        for i in (self._place.get(name), self._place.get(f"{name}_active")):
            if i is not None:
                self.sum[i] = self.count[i] = 0.0

    def copy(self) -> "Totals":
        """The same sums, in arrays of their own."""
        self.settle()
        other = Totals(self.names, 0, 0)
        for name in _ARRAYS:
            setattr(other, name, getattr(self, name).copy())
        return other

    def take_counts(self, other: "Totals") -> None:
        """Takes over the counts of another's measures, except the `_active` ones, which depend on weights."""
        self.settle()
        other.settle()
        for name, i in self._place.items():
            if not name.endswith("_active"):
                self.count[i] = other.count[i]

    def widen(self, n_heads: int) -> None:
        """Repeats sums that all heads share."""
        self.settle()
        for name in _ARRAYS:
            shared = getattr(self, name)
            setattr(self, name, np.repeat(shared, n_heads // shared.shape[2], axis=2))


@cache
def _match(names: tuple[str, ...], wanted: tuple[str, ...]) -> tuple[list[int], list[int]]:
    """Which of some names are wanted, and where each of these lies among the wanted ones."""
    rows = {name: i for i, name in enumerate(wanted)}
    matching = [i for i, name in enumerate(names) if name in rows]
    return matching, [rows[names[i]] for i in matching]


def join_totals(heads: Totals, uniform: Totals, names: tuple[str, ...]) -> SumsOf:
    """Puts the totals of a layer's heads beside those of uniform attention; drops sums that only others needed."""
    for part in (heads, uniform):
        part.settle()
    keep: slice | list[int] = slice(None)
    if names != heads.names:
        keep = [heads.names.index(name) for name in names]
    return SumsOf(
        names,
        heads.sum[keep],
        heads.count[keep],
        uniform.sum[keep],
        heads.offset_sum,
        heads.offset_count,
        uniform.offset_sum,
    )


def internal_names(measures: Iterable[str] | None) -> tuple[str, ...]:
    """`measure_names`, and the measures that these need: a sink needs first_token, and a count of all queries."""
    chosen = None if measures is None else set(measures)
    names = measure_names(chosen)
    return measure_names(chosen | {FIRST, EVERY}) if chosen is not None and SINK in names else names


def tell_sinks(names: Sequence[str], sums: Sum, counts: Sum) -> None:
    """Writes which texts a head is a sink on, from the value of first_token in the whole text.

    A query that may not see the first token gives it nothing, and counts: a layer whose window is a few tokens has no
    sink there. Sums and counts are (measure, ...), of whole texts, with the measures in the order of `names`; written
    to.
    """
    i, first, every = (names.index(name) for name in (SINK, FIRST, EVERY))
    sums[i] = sums[first] > SINK_THRESHOLD * counts[every]
    counts[i] = counts[every] > 0
