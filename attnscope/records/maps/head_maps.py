"""What maps of heads have in common, exact ones and pooled ones: which heads they hold, and how they are kept."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Generic, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from attnscope.errors import AttnscopeError
from attnscope.records.frame import codec
from attnscope.records.frame.checks import shaped
from attnscope.records.frame.record import Record
from attnscope.records.maps.tokens import Tokens
from attnscope.results.storage import json_array, plain

KINDS = ("encoder", "decoder", "cross")
KIND = {"choices": KINDS}
"""Metadata of a kind of attention: it becomes part of file names."""


class HeadMaps:
    """The maps of the heads of one kind of attention; those of a layer and head lie at its place in `layers`, `heads`.

    Attributes:
        MAPS: The name of the array that holds them, (layer, head, ...).
    """

    MAPS: ClassVar[str]
    kind: str
    layers: tuple[int, ...]
    heads: tuple[int, ...]
    queries: Tokens
    keys: Tokens
    head_names: tuple[str, ...] = ()

    def head_name(self, head: int) -> str:
        """Return what a head is called, such as H1."""
        return self.head_names[self.heads.index(head)] if self.head_names else f"H{head}"

    def name_of(self, layer: int, head: int) -> str:
        """Return what a head of a layer is called, such as L3H1."""
        return f"L{layer} {self.head_name(head)}" if self.head_names else f"L{layer}H{head}"

    def place(self, layer: int, head: int) -> tuple[int, int]:
        """Where a head stands in the arrays.

        Raises:
            AttnscopeError: It is not there.
        """
        if layer in self.layers and head in self.heads:
            return self.layers.index(layer), self.heads.index(head)
        raise AttnscopeError(
            f"L{layer}H{head} is not in this record",
            f"it holds layers {spans(self.layers)} and heads {spans(self.heads)}",
        )

    def of(self, layer: int, head: int) -> NDArray[np.float32]:
        """The map of one head: weights, (query, key), or cells, (row, column)."""
        weights: NDArray[np.float32] = getattr(self, self.MAPS)[self.place(layer, head)]
        return weights

    def exists(self, layer: int, head: int) -> bool:
        """Whether the record holds this head."""
        return layer in self.layers and head in self.heads and not bool(np.isnan(self.of(layer, head)).any())

    def __repr__(self) -> str:
        shape = getattr(self, self.MAPS).shape
        return f"{type(self).__name__}({self.kind}, layers {spans(self.layers)}, heads {spans(self.heads)}, {shape})"


OF_KINDS = shaped("n_maps", filled=True, **codec.parts(lambda entry, number: f"{entry['kind']}_" if number else ""))
"""Metadata of maps of several kinds: arrays of further ones have their kind before their names."""

M = TypeVar("M", bound=HeadMaps)


class MapsRecord(Record, Generic[M]):
    """A record of maps of heads on one text; what made it (`run`) stands at the top level of its description."""

    text: str
    maps: tuple[M, ...]
    run: Mapping[str, Any]
    picked: tuple[tuple[int, int], ...] | None

    def chosen(self, attention: M) -> tuple[tuple[int, int], ...]:
        """The heads to show of a map, as (layer, head): as they were picked, else layer by layer."""
        wanted = self.picked or tuple((layer, head) for layer in attention.layers for head in attention.heads)
        return tuple((layer, head) for layer, head in wanted if attention.exists(layer, head))

    def only(self, picked: Sequence[tuple[int, int]]) -> Self:
        """The same, showing only these heads, as (layer, head).

        Raises:
            AttnscopeError: The record does not hold one of them.
        """
        if not picked:
            raise AttnscopeError("no head is chosen")
        for layer, head in picked:
            if not any(attention.exists(layer, head) for attention in self.maps):
                self.maps[0].place(layer, head)
        return replace(self, picked=tuple(dict.fromkeys(picked)))  # type: ignore[type-var]  # a dataclass

    def block(self, layers: Collection[int], heads: Collection[int]) -> Self:
        """The same with these layers and heads alone; maps that have none of them go, and no head is picked.

        Raises:
            AttnscopeError: There is none of them.
        """
        maps = []
        for attention in self.maps:
            rows = [row for row, layer in enumerate(attention.layers) if layer in layers]
            columns = [column for column, head in enumerate(attention.heads) if head in heads]
            if not rows or not columns:
                continue
            cut: dict[str, Any] = {
                name: array[np.ix_(rows, columns)] for name, array in codec.arrays_of(attention).items()
            }
            cut["layers"] = tuple(attention.layers[row] for row in rows)
            cut["heads"] = tuple(attention.heads[column] for column in columns)
            maps.append(replace(attention, **cut))  # type: ignore[type-var]  # a dataclass
        if not maps:
            self.maps[0].place(min(layers, default=-1), min(heads, default=-1))
        return replace(self, maps=tuple(maps), picked=None)  # type: ignore[type-var]  # a dataclass

    def map(self, kind: str | None = None) -> M:
        """The map of a kind of attention: "encoder", "decoder" or "cross"; None = the first.

        Raises:
            AttnscopeError: The record has none of that kind.
        """
        for attention in self.maps:
            if kind in (None, attention.kind):
                return attention
        raise AttnscopeError(f"this record has no {kind} attention", f"it has {', '.join(m.kind for m in self.maps)}")

    def of(self, layer: int, head: int, kind: str | None = None) -> NDArray[np.float32]:
        """The map of one head by its numbers: weights, (query, key), or cells, (row, column).

        Args:
            layer: Number of the layer in the model, from 0.
            head: Number of the head, from 0.
            kind: "encoder", "decoder" or "cross"; None = that of the first map.

        Raises:
            AttnscopeError: The record does not hold it.
        """
        attention = self.map(kind)
        others = [m.kind for m in self.maps if layer in m.layers and head in m.heads]
        if others and attention.kind not in others:
            raise AttnscopeError(
                f"L{layer}H{head} is not among the {attention.kind} heads of this record", f'ask for kind="{others[0]}"'
            )
        return attention.of(layer, head)

    def describe(self) -> dict[str, Any]:
        """All but the arrays, as plain JSON values; what made the record (`run`) stands at its top level."""
        described = super().describe()
        return {**plain(described.pop("run")), **plain(described)}

    def to_json(self, *, ascii_only: bool = False, **more: Any) -> str:
        """One JSON document: the schema, the run, `arrays()` as nested lists, and `describe()` under "record".

        Numbers have as many digits as float32 needs to be read back unchanged; NaN becomes null.

        Args:
            ascii_only: Whether other characters are written as JSON escapes.
            more: Further members of the document, such as the files that were written.
        """
        head = json.dumps({"schema": self.SCHEMA, "run": dict(self.run), **more}, ensure_ascii=ascii_only)[:-1]
        lists = (
            f'"{name}": '
            + (json_array(array) if array.dtype == np.float32 else json.dumps(array.tolist(), ensure_ascii=ascii_only))
            for name, array in self.arrays().items()
        )
        return f'{head}, {", ".join(lists)}, "record": {json.dumps(self.describe(), ensure_ascii=ascii_only)}}}'

    @classmethod
    def rebuild(cls, described: Mapping[str, Any], held: Mapping[str, Any]) -> Self:
        """The record that `describe` and `arrays` were made of, npz or JSON."""
        fields = set(cls.__dataclass_fields__) | {"schema"}  # type: ignore[attr-defined]
        run = {name: value for name, value in described.items() if name not in fields}
        record: Self = codec.build(cls, described, held, run=run)
        return record

    def require_whole(self) -> None:
        """Refuses a record that shows none of its heads."""
        if self.picked is not None and not any(self.chosen(attention) for attention in self.maps):
            raise ValueError("it shows none of its heads")

    _repr_html_ = None  # type: ignore[assignment]  # a notebook would prefer it to the picture

    def _repr_png_(self) -> bytes:
        png: bytes = self.record_kind().view("glance")(self)
        return png

    def __repr__(self) -> str:
        shapes = ", ".join(f"{m.kind} {getattr(m, m.MAPS).shape}" for m in self.maps)
        return f"{type(self).__name__}({self.run.get('model')!r} on {self.text[:40]!r}: {shapes})"


def spans(numbers: Sequence[int]) -> str:
    """Numbers as people write them: (0, 1, 2, 5) is "0-2,5"."""
    parts: list[str] = []
    start = previous = None
    for number in [*sorted(set(numbers)), None]:
        if previous is not None and number != previous + 1:
            parts.append(str(start) if start == previous else f"{start}-{previous}")
            start = number
        elif previous is None:
            start = number
        previous = number
    return ",".join(parts)


def choose_heads(
    record: Any,
    pick: Sequence[tuple[int, int]] | None,
    layers: Collection[int] | None,
    heads: Collection[int] | None,
) -> Any:
    """A record that shows single heads, or those of some layers, or these heads of each; None = all."""
    if pick is not None:
        return record.only(pick)
    if layers is None and heads is None:
        return record
    maps = getattr(record, "maps", None)
    known = [(head.layer, head.head) for head in record.heads] if maps is None else [
        (layer, head) for one in maps for layer in one.layers for head in one.heads
    ]  # fmt: skip
    chosen = []
    for what, wanted, have in (
        ("layer", layers, {layer for layer, _ in known}),
        ("head", heads, {head for _, head in known}),
    ):
        beyond = sorted({*(wanted or ())} - have)
        if beyond:
            raise AttnscopeError(f"there is no {what} {beyond[0]} in this record", f"it holds {what}s {spans([*have])}")
        chosen.append(have if wanted is None else wanted)
    if maps is not None:
        return record.block(*chosen)
    return record.only([pair for pair in dict.fromkeys(known) if pair[0] in chosen[0] and pair[1] in chosen[1]])
