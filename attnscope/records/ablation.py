"""What taking heads out of a model changes: effects with intervals, importance, curves. NumPy only."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from attnscope.errors import AttnscopeError
from attnscope.records.reading import (
    read_record,
    reading,
    require_archive,
    require_counts,
    require_places,
    require_run,
    require_types,
)
from attnscope.records.storage import csv_text, finite, plain, write_whole

ABLATE_SCHEMA = "attnscope.ablate/1"

PLACES = ("first", "repeated", "first_half", "second_half")
"""By which places in a text a loss is told, as "zero_loss_repeated"; records of older versions have none."""

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
class HeadEffects:
    """One head, and what changes without it."""

    kind: str
    layer: int
    head: int
    effects: Effects

    @property
    def name(self) -> str:
        """Such as L3H1."""
        return f"L{self.layer}H{self.head}"


@dataclass(frozen=True)
class SetEffects:
    """Several heads taken out together.

    Attributes:
        heads: Their names, such as "L3H1", of an encoder-decoder "cross L3H1".
        effects: What changes without all of them.
        interaction: For pairs: by how much that is more than the sum of what changes without each alone.
    """

    heads: tuple[str, ...]
    effects: Effects
    interaction: Effects


@dataclass(frozen=True)
class Curve:
    """Heads taken out one after another.

    Attributes:
        order: "importance" or "sensitivity" (the least first), "effect" (the same), or "random".
        seed: Of the order, if it is random.
        removed: The heads in the order in which they went.
        n_left: How many heads are left at each point; the first has all.
        points: What changes at each point.
    """

    order: str
    seed: int | None
    removed: tuple[str, ...]
    n_left: tuple[int, ...]
    points: tuple[Effects, ...]


@dataclass(frozen=True)
class Facts:
    """What a record says about a quantity.

    Attributes:
        what: Its definition in a few words.
        unit: Such as "nats"; empty for plain numbers.
    """

    what: str
    unit: str


@dataclass(frozen=True, eq=False)
class Ablation:
    """What heads do for a model on texts, found by taking them out.

    Attributes:
        run: What made it: model, sha256, engine, versions, dtype, device, notes ... Plain JSON values.
        corpus: What it was made on: `sources`, `n_texts`, `n_tokens`, `n_predictions`, `sha256`, `problems`,
            `complete`. Plain JSON values.
        options: What was chosen, as plain JSON values; `quantities`: {name: {"what": str, "unit": str}}.
        whole: What the whole model has: "loss", where it has one.
        heads: One entry a head, by kind, layer, head.
        sets: The heads of `--pick` taken out together, and pairs.
        curves: Heads taken out one after another.
    """

    run: Mapping[str, Any]
    corpus: Mapping[str, Any]
    options: Mapping[str, Any]
    whole: Effects
    heads: tuple[HeadEffects, ...]
    sets: tuple[SetEffects, ...] = ()
    curves: tuple[Curve, ...] = ()

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of attention in it, in their order."""
        return tuple(dict.fromkeys(head.kind for head in self.heads))

    @property
    def names(self) -> tuple[str, ...]:
        """The quantities that any head has, in their order; without those by place."""
        return tuple(name for name in self._all_names if not name.endswith(_BY_PLACE))

    @property
    def _all_names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for head in self.heads for name in head.effects))

    def by_place(self, effects: Effects, name: str) -> dict[str, Effect]:
        """A loss by place in the text, such as "zero_loss"; empty where the record has none."""
        return {place: effects[f"{name}_{place}"] for place in PLACES if f"{name}_{place}" in effects}

    @property
    def main(self) -> str:
        """The quantity that heads are ranked by: a change of loss, else of hidden states, else importance."""
        ranked = ("zero_loss", "mean_loss", "zero_l2", "mean_l2", "importance", "sensitivity")
        return next((name for name in ranked if name in self.names), "")

    def facts(self, name: str) -> Facts:
        """What the record says about a quantity."""
        table = self.options.get("quantities")
        told = table.get(name) if isinstance(table, Mapping) else None
        told = told if isinstance(told, Mapping) else {}
        return Facts(str(told.get("what", "")), str(told.get("unit", "")))

    def named(self, head: HeadEffects) -> str:
        """A head's name, with its kind where there are several."""
        return f"{head.kind} {head.name}" if len(self.run.get("kinds", self.kinds)) > 1 else head.name

    def as_json(self) -> dict[str, Any]:
        """All of it as plain JSON values; NaN and infinities become null."""
        document: dict[str, Any] = plain(self._document(), finite)
        return document

    def _document(self) -> dict[str, Any]:
        def effects(given: Effects) -> dict[str, Any]:
            return {name: asdict(effect) for name, effect in given.items()}

        return {
            "schema": ABLATE_SCHEMA,
            "run": self.run,
            "corpus": self.corpus,
            "options": self.options,
            "whole": effects(self.whole),
            "heads": [
                {"kind": head.kind, "layer": head.layer, "head": head.head, "effects": effects(head.effects)}
                for head in self.heads
            ],
            "sets": [
                {"heads": one.heads, "effects": effects(one.effects), "interaction": effects(one.interaction)}
                for one in self.sets
            ],
            "curves": [
                {
                    "order": one.order,
                    "seed": one.seed,
                    "removed": one.removed,
                    "n_left": one.n_left,
                    "points": [effects(point) for point in one.points],
                }
                for one in self.curves
            ],
        }

    def to_csv(self) -> str:
        """One row a head: kind, layer, head, then each quantity.

        A quantity has four columns: its value under its name, and `_low`, `_high` and `_count`. Numbers have as many
        digits as they need to be read back unchanged; what is undefined is empty. Sets and curves are in the other
        formats only.
        """
        parts = ("value", "low", "high", "count")
        names = self._all_names
        columns = [name if part == "value" else f"{name}_{part}" for name in names for part in parts]
        rows: list[list[Any]] = [["kind", "layer", "head", *columns]]
        for head in self.heads:
            found = [head.effects.get(name) for name in names]
            cells = ["" if one is None else float(getattr(one, part)) for one in found for part in parts]
            rows.append([head.kind, head.layer, head.head, *cells])
        return csv_text(rows)

    def save(self, path: str | Path) -> Path:
        """Writes the record, whole or not at all: `.npz` (lossless), `.json`, or `.csv`."""
        path = Path(path)
        if path.suffix == ".json":
            return write_whole(path, json.dumps(self.as_json(), allow_nan=False).encode())
        if path.suffix == ".csv":
            return write_whole(path, self.to_csv().encode())
        if path.suffix != ".npz":
            raise AttnscopeError(f"ablations are saved as .npz, .json or .csv, not {path.suffix or path.name!r}")
        held = io.BytesIO()
        # NaN and infinities stay what they are here, other than in a .json for others to read.
        described = np.frombuffer(json.dumps(plain(self._document())).encode(), np.uint8)
        np.savez(held, allow_pickle=False, record=described)
        return write_whole(path, held.getvalue())


def load(path: str | Path) -> Ablation:
    """Reads a record that `Ablation.save` wrote as npz, without loss.

    Raises:
        AttnscopeError: The file is not there, damaged, or no such record.
    """
    path = Path(path)
    with reading(path, "record of an ablation", "give the ablation.npz that `ablate` wrote"):
        data, held = read_record(path, ABLATE_SCHEMA)
        require_archive(held)
        found = _from_document(data)
        require_types(found)
        require_run(found.run)
        require_places([head.layer for head in found.heads], [head.head for head in found.heads])
        require_counts(found.corpus, "n_texts", "n_tokens")
        for curve in found.curves:
            if not len(curve.n_left) == len(curve.points) <= len(curve.removed) + 1:
                raise ValueError("the points of a curve do not fit the heads that it takes out")
    return found


def _from_document(data: Mapping[str, Any]) -> Ablation:
    def effects(given: Mapping[str, Any]) -> dict[str, Effect]:
        return {name: Effect(**{part: _number(value) for part, value in one.items()}) for name, one in given.items()}

    return Ablation(
        run=data["run"],
        corpus=data["corpus"],
        options=data["options"],
        whole=effects(data["whole"]),
        heads=tuple(
            HeadEffects(str(one["kind"]), int(one["layer"]), int(one["head"]), effects(one["effects"]))
            for one in data["heads"]
        ),
        sets=tuple(
            SetEffects(tuple(one["heads"]), effects(one["effects"]), effects(one["interaction"]))
            for one in data["sets"]
        ),
        curves=tuple(
            Curve(
                one["order"], one["seed"], tuple(one["removed"]), tuple(one["n_left"]),
                tuple(effects(point) for point in one["points"]),
            )
            for one in data["curves"]
        ),
    )  # fmt: skip


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)
