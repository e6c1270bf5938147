"""What taking heads out of a model changes: effects with intervals, importance. NumPy only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from attnscope.records.frame.head_table import HeadTable, number_column
from attnscope.records.frame.pair_tables import HeadOfKind
from attnscope.records.frame.record import StudyRecord

PLACES = ("first", "repeated", "first_half", "second_half")
"""The places in a text by which a loss is given too, as "zero_loss_repeated"."""

_BY_PLACE = tuple(f"_loss_{place}" for place in PLACES)


@dataclass(frozen=True)
class Effect:
    """A quantity over texts.

    Attributes:
        value: Its value; NaN where no text has it.
        low: Lower end of its 95% interval over texts; NaN with fewer than 2.
        high: Upper end.
        count: Over how many texts or predictions, as its facts say.
    """

    value: float
    low: float
    high: float
    count: float


Effects = Mapping[str, Effect]
"""By name: "zero_l2", "mean_loss" …, "importance"; what a name means, `Ablation.facts` says."""


@dataclass(frozen=True)
class HeadEffects(HeadOfKind):
    """One head, and what changes without it."""

    effects: Effects


@dataclass(frozen=True)
class SetEffects:
    """Several heads taken out together.

    Attributes:
        heads: Their names, such as "L3H1", of an encoder-decoder "cross L3H1".
        effects: What changes without all of them.
    """

    heads: tuple[str, ...]
    effects: Effects


@dataclass(frozen=True)
class Facts:
    """What a record says about a quantity: its definition in a few words, and its unit; empty for plain numbers."""

    what: str
    unit: str


@dataclass(frozen=True, eq=False, repr=False)
class Ablation(StudyRecord):
    """What heads do for a model on texts, found by taking them out.

    Attributes:
        run: What made it: model, sha256, engine, versions, dtype, device, notes ... Plain JSON values.
        corpus: What it was made on: `sources`, `n_texts`, `n_tokens`, `n_predictions`, `sha256`, `problems`,
            `complete`. Plain JSON values.
        options: What was chosen, as plain JSON values; `quantities`: {name: {"what": str, "unit": str}}.
        whole: What the whole model has: "loss", where it has one.
        heads: One entry a head, by kind, layer, head.
        together: The heads of `--pick` taken out together; None with fewer than two.
    """

    SCHEMA: ClassVar[str] = "attnscope.ablate/1"
    HOLDS: ClassVar[str] = "heads"

    whole: Effects
    heads: tuple[HeadEffects, ...]
    together: SetEffects | None = None

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of attention in it, in their order."""
        return tuple(dict.fromkeys(head.kind for head in self.heads))

    @property
    def names(self) -> tuple[str, ...]:
        """The quantities that any head has, in their order; without those by position."""
        return tuple(name for name in self._all_names if not name.endswith(_BY_PLACE))

    @property
    def _all_names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for head in self.heads for name in head.effects))

    def by_position(self, effects: Effects, name: str) -> dict[str, Effect]:
        """A loss by position in the text, such as "zero_loss"; empty where the record has none."""
        return {place: effects[f"{name}_{place}"] for place in PLACES if f"{name}_{place}" in effects}

    @property
    def main(self) -> str:
        """The quantity that heads are ranked by: a change of loss, else of hidden states, else importance."""
        ranked = ("zero_loss", "mean_loss", "zero_l2", "mean_l2", "importance", "sensitivity")
        return next((name for name in ranked if name in self.names), "")

    def facts(self, name: str) -> Facts:
        """What the record says about a quantity."""
        table = self.options.get("quantities")
        recorded = table.get(name) if isinstance(table, Mapping) else None
        recorded = recorded if isinstance(recorded, Mapping) else {}
        return Facts(str(recorded.get("what", "")), str(recorded.get("unit", "")))

    def named(self, head: HeadEffects) -> str:
        """A head's name, with its kind where there are several."""
        return f"{head.kind} {head.name}" if len(self.run.get("kinds", self.kinds)) > 1 else head.name

    def head_table(self) -> HeadTable:
        """What changes without each head, with intervals."""
        columns = tuple(
            number_column(
                name, [head.effects.get(name) for head in self.heads], ("low", "high", "count"),
                what=self.facts(name).what or "what changes without the head", unit=self.facts(name).unit,
                label=label_of_quantity(name),
            )
            for name in self._all_names
        )  # fmt: skip
        return HeadTable(tuple(head.address for head in self.heads), columns)

    def rows(self) -> Iterator[Sequence[Any]]:
        """One row per head: kind, layer, head, then each quantity.

        A quantity has four columns: its value under its name, and `_low`, `_high` and `_count`. What heads taken out
        together change is in the other formats only.
        """
        return self.head_table().rows()

    def require_whole(self) -> None:
        """Refuse heads that cannot be ranked."""
        for head in self.heads:
            if self.main not in {"", *head.effects}:
                raise ValueError(f"{head.name} has no {self.main}, which others have")


_LABELS = {
    "l2": "change of the last layer's hidden states",
    "loss": "rise of the loss",
    "kl": "KL of the predictions",
    "importance": "importance E |dL/dξ|",
    "sensitivity": "sensitivity",
    "effect": "effect on the logit difference",
    "share": "share of the total effect",
    "attribution": "effect by attribution patching",
}


def label_of_quantity(name: str) -> str:
    """A quantity's name as people read it, such as "zero ablation: rise of the loss"."""
    mode, _, rest = name.partition("_")
    if not rest or name in _LABELS:
        return _LABELS.get(name, name)
    return f"{mode} ablation: {_LABELS.get(rest, rest)}"
