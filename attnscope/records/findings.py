"""What was found about the heads of a model: measures with intervals, roles with evidence. NumPy only.

The exact sums over texts are kept beside what was concluded from them, so that records merge without loss.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnscope.errors import AttnscopeError
from attnscope.records.ablation import Effect
from attnscope.records.parquet import parquet
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

HEADS_SCHEMA = "attnscope.heads/1"

PICTURES = "pictures"
RECORDINGS = "recordings"
"""What `corpus["of"]` is where each text is a picture, and each token one of its patches."""


_EFFECT_PARTS = ("value", "low", "high", "count")


@dataclass(frozen=True)
class Estimate:
    """A measure of one head over a corpus.

    Attributes:
        value: Σ sum / Σ count over all queries of all texts; NaN where the measure is undefined everywhere.
        low: Lower end of its 95% interval; NaN with fewer than 2 texts.
        high: Upper end.
        uniform: The measure's value under uniform attention over the keys that the mask allows.
        count: Over how many queries.
    """

    value: float
    low: float
    high: float
    uniform: float
    count: float


@dataclass(frozen=True)
class Role:
    """A role that a head has, with the evidence for it.

    Attributes:
        name: Such as "previous_token".
        measure: The measure that it rests on; may be an `_active` one.
        value: Value of that measure.
        low: Lower end of its 95% interval; NaN where the record has none.
        high: Upper end.
        baseline: What it had to beat beside the threshold: uniform attention, or the best fixed offset.
        threshold: What it had to reach; of relations, what the lower end had to reach.
        p: One-sided p-value against the larger of threshold and baseline (of relations, against the baseline), of all
            measures that the role may rest on together (Simes).
        q: The same after Benjamini-Hochberg over heads x roles.
        tentative: True where the evidence amounts to fewer texts than `options["fewest_texts"]`.
        active_share: For roles on an `_active` measure: the share of attention that it speaks of; else None.
        effective_texts: How many texts of one length the evidence amounts to; None where the record does not say.
    """

    name: str
    measure: str
    value: float
    low: float
    high: float
    baseline: float
    threshold: float
    p: float
    q: float
    tentative: bool
    active_share: float | None = None
    effective_texts: float | None = None


@dataclass(frozen=True)
class Head:
    """One head: its roles, the strongest first but sinks last (none = unclassified), and its measures by name.

    With `--causal`, `effects` has what changes without it, as `records.ablation` names it; else it is empty.
    """

    kind: str
    layer: int
    head: int
    roles: tuple[Role, ...]
    resting_share: float
    measures: Mapping[str, Estimate]
    effects: Mapping[str, Effect] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Such as L3H1."""
        return f"L{self.layer}H{self.head}"


@dataclass(frozen=True)
class RoleFacts:
    """What a record says about a role beside who has it.

    Attributes:
        what: Its definition in a few words; empty if the record does not say.
        measure: The measure that it rests on, without `_active`.
        threshold: What that measure must reach; NaN if the record does not say.
    """

    what: str
    measure: str
    threshold: float


@dataclass(frozen=True)
class MeasureFacts:
    """What a record says about a measure beside its values.

    Attributes:
        what: Its definition in a few words; empty if the record does not say.
        unit: Such as "nats", "tokens" or "share"; empty where the record does not say.
        low: Its least possible value; NaN where it has no bound or the record does not say.
        high: Its largest possible value.
    """

    what: str
    unit: str
    low: float
    high: float


@dataclass(frozen=True, eq=False)
class Findings:
    """What every head of a model does on a corpus.

    Attributes:
        run: What made it: model, sha256, engine, versions, dtype, device, notes ... Plain JSON values.
        corpus: What it was made on: `sources`, `n_texts`, `n_tokens`, `sha256` of the texts, `shards` (such as
            ["1/2"]), `problems` (file, line, reason), `complete` (False after an interruption). Plain JSON values. Of
            pictures: `of` is "pictures", `grids` are the rows and columns of patches that occur.
        options: What was chosen, as plain JSON values: `level` (of the false discovery rate), how texts were split ...,
            and what names mean, so that a saved record explains itself:
            `roles`: {name: {"what": str, "measure": str, "threshold": float}} and
            `measures`: {name: {"what": str, "unit": str, "range": [least, largest], null = no bound}}.
        heads: One entry a head, by kind, layer, head.
        sums: The exact sums over texts by name, for merging.
        control: Findings of the same architecture with random weights, on the same texts, if asked for.
    """

    run: Mapping[str, Any]
    corpus: Mapping[str, Any]
    options: Mapping[str, Any]
    heads: tuple[Head, ...]
    sums: Mapping[str, NDArray[Any]]
    control: tuple[Head, ...] = ()

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of attention in it, in their order."""
        return tuple(dict.fromkeys(head.kind for head in self.heads))

    @property
    def of_pictures(self) -> bool:
        """Whether it was made on pictures."""
        return self.corpus.get("of") == PICTURES

    @property
    def of_senses(self) -> bool:
        """Whether it was made on pictures or recordings: heads then have measures, and no roles."""
        return self.corpus.get("of") in (PICTURES, RECORDINGS)

    def grid(self, kind: str, measure: str) -> NDArray[np.float64]:
        """The values of a measure, (layer, head); NaN where there is no such head."""
        mine = [head for head in self.heads if head.kind == kind]
        shape = (max((h.layer for h in mine), default=-1) + 1, max((h.head for h in mine), default=-1) + 1)
        values = np.full(shape, np.nan)
        for head in mine:
            if measure in head.measures:
                values[head.layer, head.head] = head.measures[measure].value
        return values

    def does_nothing(self, head: Head) -> bool:
        """Whether a head that was taken out (`--causal`) makes no difference by any ablation.

        That is so where the upper end of each effect's interval (its value, where a text alone gives none) is below
        what `options["causal"]` calls nothing.
        """
        causal = self.options.get("causal")
        if not isinstance(causal, Mapping) or not head.effects:
            return False
        quantity, least = str(causal.get("quantity")), _bound(causal.get("nothing_below"))
        found = [effect for name, effect in head.effects.items() if name.endswith(f"_{quantity}")]
        tops = [effect.high if math.isfinite(effect.high) else effect.value for effect in found]
        return bool(tops) and max(tops) < least

    @property
    def measure_names(self) -> tuple[str, ...]:
        """The measures that any head has, in their order."""
        return tuple(dict.fromkeys(name for head in self.heads for name in head.measures))

    def role_facts(self, role: str) -> RoleFacts:
        """What the record says about a role: in `options`, else by the heads that have it."""
        told = _told(self.options, "roles", role)
        seen = next((r for head in (*self.heads, *self.control) for r in head.roles if r.name == role), None)
        measure = told.get("measure", seen.measure.removesuffix("_active") if seen else "")
        return RoleFacts(
            _words(told.get("what")), str(measure), _bound(told.get("threshold", seen.threshold if seen else None))
        )

    def measure_facts(self, measure: str) -> MeasureFacts:
        """What the record says about a measure in `options`; of an `_active` one, what follows from the whole one."""
        told, beside = _told(self.options, "measures", measure), ""
        if not told and measure.endswith("_active"):
            told = _told(self.options, "measures", measure.removesuffix("_active"))
            beside = " (of what does not rest)"
        what = _words(told.get("what"))
        bounds = told.get("range")
        low, high = bounds if isinstance(bounds, Sequence) and len(bounds) == 2 else (None, None)
        return MeasureFacts(what and what + beside, _words(told.get("unit")), _bound(low), _bound(high))

    def as_json(self) -> dict[str, Any]:
        """All but the sums as plain JSON values; NaN and infinities become null."""
        document: dict[str, Any] = plain(self._document(), finite)
        return document

    def _document(self) -> dict[str, Any]:
        document = {
            "schema": HEADS_SCHEMA,
            "run": self.run,
            "corpus": self.corpus,
            "options": self.options,
            "heads": [_head_json(head) for head in self.heads],
        }
        if self.control:
            document["control"] = [_head_json(head) for head in self.control]
        return document

    def to_csv(self) -> str:
        """One row a head: kind, layer, head, roles, tentative, resting share, then each measure.

        A measure has five columns: its value under its name, and `_low`, `_high`, `_uniform` and `_count`; what changes
        without the head (`--causal`) follows, in four columns each. Numbers
        have as many digits as they need to be read back unchanged; what is undefined is empty.
        """
        columns = self.columns()
        columns["roles"] = ["+".join(names) or "unclassified" for names in columns["roles"]]
        return csv_text([list(columns), *zip(*columns.values(), strict=True)])

    def to_parquet(self) -> bytes:
        """The same as a Parquet file: roles are lists, what is undefined is null; its metadata name schema and run.

        Raises:
            AttnscopeError: pyarrow is not installed.
        """
        described = {"attnscope.schema": HEADS_SCHEMA, "attnscope.run": json.dumps(plain(self.run, finite))}
        return parquet(self.columns(), described)

    def columns(self) -> dict[str, list[Any]]:
        """One value a head in each column: kind, layer, head, roles, tentative, resting share, then the measures."""
        columns: dict[str, list[Any]] = {
            "kind": [head.kind for head in self.heads],
            "layer": [head.layer for head in self.heads],
            "head": [head.head for head in self.heads],
            "roles": [[role.name for role in head.roles] for head in self.heads],
            "tentative": [any(role.tentative for role in head.roles) for head in self.heads],
            "resting_share": [float(head.resting_share) for head in self.heads],
        }
        for name in self.measure_names:
            estimates = [head.measures.get(name) for head in self.heads]
            for part in ("value", "low", "high", "uniform", "count"):
                columns[name if part == "value" else f"{name}_{part}"] = [
                    math.nan if one is None else float(getattr(one, part)) for one in estimates
                ]
        for name in dict.fromkeys(name for head in self.heads for name in head.effects):
            effects = [head.effects.get(name) for head in self.heads]
            for part in _EFFECT_PARTS:
                columns[name if part == "value" else f"{name}_{part}"] = [
                    math.nan if one is None else float(getattr(one, part)) for one in effects
                ]
        return columns

    def save(self, path: str | Path) -> Path:
        """Writes the record, whole or not at all: `.npz` (lossless, merges), `.json`, `.csv`, `.parquet`."""
        path = Path(path)
        if path.suffix == ".json":
            return write_whole(path, json.dumps(self.as_json(), allow_nan=False).encode())
        if path.suffix == ".csv":
            return write_whole(path, self.to_csv().encode())
        if path.suffix == ".parquet":
            return write_whole(path, self.to_parquet())
        if path.suffix != ".npz":
            raise AttnscopeError(
                f"findings are saved as .npz, .json, .csv or .parquet, not {path.suffix or path.name!r}"
            )
        held = io.BytesIO()
        # NaN and infinities stay what they are here, other than in a .json for others to read. Bytes, as NumPy's own
        # text takes four of them a character.
        described = np.frombuffer(json.dumps(plain(self._document())).encode(), np.uint8)
        np.savez(held, allow_pickle=False, record=described, **{f"sum_{k}": v for k, v in self.sums.items()})
        return write_whole(path, held.getvalue())


def load(path: str | Path) -> Findings:
    """Reads findings that `Findings.save` wrote as npz, without loss.

    Raises:
        AttnscopeError: The file is not there, damaged, or no such record.
    """
    path = Path(path)
    with reading(path, "record of heads", "give the heads.npz that `heads` wrote"):
        data, held = read_record(path, HEADS_SCHEMA)
        require_archive(held)
        sums = {name.removeprefix("sum_"): held[name] for name in held if name.startswith("sum_")}
        heads, control = (
            tuple(_head_from(item) for item in items) for items in (data["heads"], data.get("control", ()))
        )
        found = Findings(data["run"], data["corpus"], data["options"], heads, sums, control)
        _require_whole(found)
    return found


def _require_whole(found: Findings) -> None:
    """Refuses findings whose parts are not what their class says, or of which a table cannot be made.

    Raises:
        ValueError: They are not.
    """
    require_types(found)
    require_run(found.run)
    require_places([h.layer for h in found.heads], [h.head for h in found.heads])
    for heads in (found.heads, found.control):
        if len({(head.kind, head.layer, head.head) for head in heads}) < len(heads):
            raise ValueError("it holds a head twice")
    require_counts(found.corpus, "n_texts", "n_tokens")


def _head_json(head: Head) -> dict[str, Any]:
    effects = {"effects": {name: asdict(effect) for name, effect in head.effects.items()}} if head.effects else {}
    return {
        "kind": head.kind,
        "layer": head.layer,
        "head": head.head,
        "roles": [asdict(role) for role in head.roles],
        "resting_share": head.resting_share,
        "measures": {name: asdict(estimate) for name, estimate in head.measures.items()},
        **effects,
    }


def _head_from(data: Mapping[str, Any]) -> Head:
    return Head(
        kind=data["kind"],
        layer=data["layer"],
        head=data["head"],
        roles=tuple(Role(**{k: _nan(k, v) for k, v in role.items()}) for role in data["roles"]),
        resting_share=_nan("resting_share", data["resting_share"]),
        measures={
            name: Estimate(**{part: _nan(part, value) for part, value in estimate.items()})
            for name, estimate in data["measures"].items()
        },
        effects={
            name: Effect(**{part: _nan(part, value) for part, value in effect.items()})
            for name, effect in data.get("effects", {}).items()
        },
    )


def _nan(name: str, value: Any) -> Any:
    return math.nan if value is None and name not in ("active_share", "effective_texts") else value


def _told(options: Mapping[str, Any], what: str, name: str) -> Mapping[str, Any]:
    """What `options[what]` says about a name; nothing where it is missing or of another form."""
    table = options.get(what)
    told = table.get(name) if isinstance(table, Mapping) else None
    return told if isinstance(told, Mapping) else {}


def _words(value: Any) -> str:
    return "" if value is None else str(value)


def _bound(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else math.nan
