"""What was found about the heads of a model: measures with intervals, roles with evidence. NumPy only.

The exact sums over texts are kept beside what was concluded from them, so that records merge without loss.
"""

from __future__ import annotations

import csv
import io
import json
import math
import zipfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnscope.errors import AttnscopeError
from attnscope.records import write_whole

HEADS_SCHEMA = "attnscope.heads/1"


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
        low: Lower end of its 95% interval; NaN for a tentative role.
        high: Upper end.
        baseline: What it had to beat beside the threshold: uniform attention, or the best fixed offset.
        threshold: What it had to reach.
        p: One-sided p-value against the larger of threshold and baseline; NaN for a tentative role.
        q: The same after Benjamini-Hochberg over heads x roles.
        tentative: True where there are too few texts for an interval.
        active_share: For roles on an `_active` measure: the share of attention that it speaks of; else None.
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


@dataclass(frozen=True)
class Head:
    """One head: its roles, the strongest first (none = unclassified), and its measures by name."""

    kind: str
    layer: int
    head: int
    roles: tuple[Role, ...]
    resting_share: float
    measures: Mapping[str, Estimate]

    @property
    def name(self) -> str:
        """Such as L3H1."""
        return f"L{self.layer}H{self.head}"


@dataclass(frozen=True, eq=False)
class Findings:
    """What every head of a model does on a corpus.

    Attributes:
        run: What made it: model, sha256, engine, versions, dtype, device, notes ... Plain JSON values.
        corpus: What it was made on: `sources`, `n_texts`, `n_tokens`, `sha256` of the texts, `shards` (such as ["1/2"]),
            `problems` (file, line, reason), `complete` (False after an interruption). Plain JSON values.
        options: What was chosen: thresholds by role, level, and how texts were split. Plain JSON values.
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

    def grid(self, kind: str, measure: str) -> NDArray[np.float64]:
        """The values of a measure, (layer, head); NaN where there is no such head."""
        mine = [head for head in self.heads if head.kind == kind]
        shape = (max(h.layer for h in mine) + 1, max(h.head for h in mine) + 1)
        values = np.full(shape, np.nan)
        for head in mine:
            if measure in head.measures:
                values[head.layer, head.head] = head.measures[measure].value
        return values

    def as_json(self) -> dict[str, Any]:
        """All but the sums as plain JSON values; NaN becomes null."""
        document = {
            "schema": HEADS_SCHEMA,
            "run": dict(self.run),
            "corpus": dict(self.corpus),
            "options": dict(self.options),
            "heads": [_head_json(head) for head in self.heads],
        }
        if self.control:
            document["control"] = [_head_json(head) for head in self.control]
        return document

    def to_csv(self) -> str:
        """One row a head: kind, layer, head, roles, resting share, then value, low, high and uniform of each measure."""
        held = io.StringIO()
        names = list(dict.fromkeys(name for head in self.heads for name in head.measures))
        writer = csv.writer(held, lineterminator="\n")
        parts = ("value", "low", "high", "uniform", "count")
        columns = [name if part == "value" else f"{name}_{part}" for name in names for part in parts]
        writer.writerow(["kind", "layer", "head", "roles", "tentative", "resting_share", *columns])
        for head in self.heads:
            cells = [
                "" if math.isnan(number) else repr(number)
                for name in names
                for number in (
                    getattr(head.measures[name], part) if name in head.measures else math.nan for part in parts
                )
            ]
            roles = "+".join(role.name for role in head.roles) or "unclassified"
            tentative = any(role.tentative for role in head.roles)
            writer.writerow([head.kind, head.layer, head.head, roles, tentative, repr(head.resting_share), *cells])
        return held.getvalue()

    def save(self, path: str | Path) -> Path:
        """Writes the record, whole or not at all: `.npz` (lossless, merges), `.json`, or `.csv`."""
        path = Path(path)
        if path.suffix == ".json":
            return write_whole(path, json.dumps(self.as_json(), ensure_ascii=False).encode())
        if path.suffix == ".csv":
            return write_whole(path, self.to_csv().encode())
        if path.suffix != ".npz":
            raise AttnscopeError(f"findings are saved as .npz, .json or .csv, not {path.suffix or path.name!r}")
        held = io.BytesIO()
        described = np.array(json.dumps(self.as_json(), ensure_ascii=False))
        np.savez(held, allow_pickle=False, record=described, **{f"sum_{k}": v for k, v in self.sums.items()})
        return write_whole(path, held.getvalue())


def load(path: str | Path) -> Findings:
    """Reads findings that `Findings.save` wrote as npz, without loss.

    Raises:
        AttnscopeError: The file is not there, damaged, or no such record.
    """
    path = Path(path)
    try:
        with np.load(path, allow_pickle=False) as archive:
            data = json.loads(str(archive["record"]))
            sums = {name.removeprefix("sum_"): archive[name] for name in archive.files if name.startswith("sum_")}
        if data["schema"] != HEADS_SCHEMA:
            raise AttnscopeError(f"{path} holds {data['schema']!r}, not {HEADS_SCHEMA!r}")
        heads, control = (tuple(_head_from(item) for item in data.get(key, ())) for key in ("heads", "control"))
        return Findings(data["run"], data["corpus"], data["options"], heads, sums, control)
    except FileNotFoundError:
        raise AttnscopeError(f"there is no file {path}") from None
    except (OSError, ValueError, KeyError, TypeError, EOFError, AttributeError, zipfile.BadZipFile) as error:
        raise AttnscopeError(
            f"{path} is no record of heads: {error}", "give the heads.npz that `heads` wrote"
        ) from None


def _head_json(head: Head) -> dict[str, Any]:
    return {
        "kind": head.kind,
        "layer": head.layer,
        "head": head.head,
        "roles": [{name: _number(value) for name, value in asdict(role).items()} for role in head.roles],
        "resting_share": _number(head.resting_share),
        "measures": {
            name: {part: _number(value) for part, value in asdict(estimate).items()}
            for name, estimate in head.measures.items()
        },
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
    )


def _number(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _nan(name: str, value: Any) -> Any:
    return math.nan if value is None and name != "active_share" else value
