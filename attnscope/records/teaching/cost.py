"""What attention costs: parameters, multiply-adds and memory, each as a formula with its numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from attnscope.errors import AttnscopeError, amount
from attnscope.records.frame.checks import shaped
from attnscope.records.frame.record import Record

GROUPS = ("parameters", "per_token", "per_text", "memory", "kv_cache")
"""What costs are grouped by, in their order."""


@dataclass(frozen=True)
class Quantity:
    """One number, and how it comes about.

    Attributes:
        name: Such as "attention_weights_per_layer".
        what: For people.
        formula: Such as "2 · d_model · d_head · (n_heads + n_kv_heads)".
        numbers: The same with numbers put in.
        value: The result; whole, but for shares.
        unit: "parameters", "multiply-adds", "exponentials", "bytes" or "share".
    """

    name: str
    what: str
    formula: str
    numbers: str
    value: int | float
    unit: str


@dataclass(frozen=True)
class HeadRow:
    """What a number of heads changes at one d_model, and what it does not.

    Attributes:
        n_heads: How many heads.
        d_head: d_model / n_heads.
        scale: 1 / sqrt(d_head).
        weights_mha: Attention weights a layer with a key/value head for each query head: 4 · d_model², always.
        weights_mqa: The same with one key/value head.
        scores_bytes: Memory of one layer's scores.
        chosen: Whether the model has so many.
    """

    n_heads: int
    d_head: int
    scale: float
    weights_mha: int
    weights_mqa: int
    scores_bytes: int
    chosen: bool


@dataclass(frozen=True)
class Curve:
    """One quantity against the length of the text: its `panel` is "multiply-adds", for a whole text, or "bytes"."""

    panel: str
    what: str
    values: tuple[int, ...] = field(metadata=shaped("lengths"))


@dataclass(frozen=True, repr=False)
class Cost(Record):
    """What a model's attention costs.

    Attributes:
        name: The model.
        source: Where its sizes come from.
        sizes: The sizes, as plain JSON values.
        n_tokens: For texts of this length.
        dtype: Precision of scores.
        groups: Quantities by group, one of `GROUPS`.
        heads: What another number of heads would change.
        lengths: Lengths of text that the curves are for.
        curves: Multiply-adds and memory against the length.
        notes: What a reader must know, one sentence each.
    """

    SCHEMA: ClassVar[str] = "attnscope.cost/1"

    name: str
    source: str
    sizes: Mapping[str, Any]
    n_tokens: int
    dtype: str
    groups: Mapping[str, tuple[Quantity, ...]]
    heads: tuple[HeadRow, ...]
    lengths: tuple[int, ...]
    curves: tuple[Curve, ...]
    notes: tuple[str, ...]

    def __repr__(self) -> str:
        layers = amount(self.sizes["n_layers"] + self.sizes["n_decoder_layers"], "layer")
        heads, tokens = amount(self.sizes["n_heads"], "head"), amount(self.n_tokens, "token")
        return f"Cost({self.name!r}, {layers} of {heads}, texts of {tokens})"

    def value(self, name: str) -> int | float:
        """A quantity's value by its name."""
        values = {quantity.name: quantity.value for group in self.groups.values() for quantity in group}
        if name not in values:
            raise AttnscopeError(f"there is no quantity {name!r}", f"there are: {', '.join(values)}")
        return values[name]

    def require_whole(self) -> None:
        """Refuses sizes that lack a number, and unknown groups and panels."""
        names = ("n_layers", "n_decoder_layers", "n_heads", "n_kv_heads", "d_head", "d_model")
        if not all(isinstance(self.sizes.get(name), int) for name in names) or not isinstance(
            self.sizes.get("kind"), str
        ):
            raise ValueError("its sizes are none")
        if unknown := self.groups.keys() - set(GROUPS):
            raise ValueError(f"there is no group of costs {min(unknown)[:40]!r}")
        if self.curves and {curve.panel for curve in self.curves} != {"multiply-adds", "bytes"}:
            raise ValueError("its curves are not of multiply-adds and of bytes")
