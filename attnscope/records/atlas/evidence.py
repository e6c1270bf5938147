"""What other records of the same model say of an atlas's heads: relations, ablation, circuits, needles. NumPy only."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from attnscope.errors import AttnscopeError
from attnscope.records import load
from attnscope.records.ablation import Ablation
from attnscope.records.atlas.record import Atlas
from attnscope.records.circuits import COMPOSITIONS, Circuits, Link
from attnscope.records.frame.record import Record
from attnscope.records.heads.findings import NEEDLES, Estimate, Findings
from attnscope.records.relations.record import Relations, with_relations

STRONGEST = 3
"""So many partners of a head are named by its queries, keys and values, of those that write to it and that read it."""

Place = tuple[str, int, int]
Numbers = dict[Place, dict[str, Estimate]]
Facts = dict[str, dict[str, Any]]
Evidence = Relations | Ablation | Circuits | Findings


def with_records(atlas: Atlas, paths: Iterable[Path]) -> Atlas:
    """An atlas that says of its heads what other records of the same model say.

    Relations that a head expresses join its roles. What is a number for each head joins the measures: the accuracy of
    each relation that any head expresses, what changes without a head, how it composes with others, how much of a
    needle it copies.

    Args:
        atlas: The atlas.
        paths: Records of relations, ablations and circuits, and of heads where these were probed with needles.

    Raises:
        AttnscopeError: One is of another model or another kind, or damaged.
    """
    for path, record in require_evidence(paths):
        mine, theirs = atlas.run.get("sha256"), record.run.get("sha256")
        if not mine or mine != theirs:
            raise AttnscopeError(
                f"{path} is of another model than the atlas: {record.run.get('model')}, not {atlas.run.get('model')}",
                "make both with the same weights",
            )
        atlas = _with_record(atlas, record)
    return atlas


def load_with(path: Path, beside: Iterable[Path]) -> Record:
    """Reads a record of any kind, and of an atlas adds what other records say of its heads.

    Raises:
        UsageError: Others are given, and it is no atlas.
        AttnscopeError: As of `load` and `with_records`.
    """
    record, paths = load(path), [*beside]
    if paths:
        record.record_kind().require_options(["with"])
        assert isinstance(record, Atlas)
        return with_records(record, paths)
    return record


def require_evidence(paths: Iterable[Path]) -> list[tuple[Path, Evidence]]:
    """The records that can be added to an atlas, by their files.

    Raises:
        AttnscopeError: One is of another kind, or damaged.
    """
    found: list[tuple[Path, Evidence]] = []
    for path in paths:
        record = load(path)
        has_needles = isinstance(record, Findings) and record.needles is not None
        if not has_needles and not isinstance(record, Relations | Ablation | Circuits):
            raise AttnscopeError(
                f"{path} is {record.record_kind().one}, which --with does not take",
                "give what relations, ablate, circuits or `heads --probe needle` wrote",
            )
        assert isinstance(record, Evidence)
        found.append((path, record))
    return found


def _with_record(atlas: Atlas, record: Evidence) -> Atlas:
    if isinstance(record, Circuits):
        return replace(_with_numbers(atlas, *_of_circuits(record)), compositions=_compositions(atlas, record))
    if isinstance(record, Ablation):
        return _with_numbers(atlas, *_of_ablation(record))
    if isinstance(record, Findings):
        return _with_numbers(atlas, *_of_needles(record))
    names = {one.name for one in record.relations}
    bare = tuple(replace(head, roles=tuple(r for r in head.roles if r.name not in names)) for head in atlas.heads)
    known = with_relations(Findings(atlas.run, atlas.corpus, atlas.options, bare, {}), record)
    # What is said twice, such as of the model, or as an earlier record had it, is said once.
    run = {**known.run, "notes": list(dict.fromkeys(known.run["notes"]))}
    found = known.corpus["problems"]
    corpus = {**known.corpus, "problems": [one for at, one in enumerate(found) if one not in found[:at]]}
    extended = replace(atlas, heads=known.heads, options=known.options, run=run, corpus=corpus)
    return _with_numbers(extended, *_of_relations(record))


def _with_numbers(atlas: Atlas, numbers: Numbers, facts: Facts) -> Atlas:
    """The atlas with further numbers of its heads, and what these mean."""
    heads = tuple(
        replace(head, measures={**head.measures, **numbers.get((head.kind, head.layer, head.head), {})})
        for head in atlas.heads
    )
    measures = {**atlas.options.get("measures", {}), **facts}
    return replace(atlas, heads=heads, options={**atlas.options, "measures": measures})


def _of_relations(record: Relations) -> tuple[Numbers, Facts]:
    numbers: Numbers = {}
    facts: Facts = {}
    for one in record.relations:
        if not one.found.any():
            continue
        name = "relation_" + re.sub(r"\W+", "_", one.name).strip("_")
        what = f"accuracy on {one.name}; the best simple rule ({one.rule}) reaches {one.baseline:.2f}"
        facts[name] = {"what": what, "unit": "share", "range": [0, 1], "of": "relations", "relation": one.name}
        for layer, head in np.ndindex(*one.accuracy.shape):
            value, low, high = (float(array[layer, head]) for array in (one.accuracy, one.low, one.high))
            numbers.setdefault((record.kind, layer, head), {})[name] = Estimate(
                value, low, high, math.nan, float(one.n_scored)
            )
    return numbers, facts


def _of_ablation(record: Ablation) -> tuple[Numbers, Facts]:
    recorded: Mapping[str, Any] = record.options.get("quantities", {})
    facts = {
        name: {"what": "what changes without the head", "unit": "", **recorded.get(name, {}), "range": [None, None],
               "of": "ablation"}
        for name in record.names
    }  # fmt: skip
    return {
        (head.kind, head.layer, head.head): {
            name: Estimate(effect.value, effect.low, effect.high, math.nan, effect.count)
            for name, effect in head.effects.items()
            if name in facts
        }
        for head in record.heads
    }, facts


def _of_needles(record: Findings) -> tuple[Numbers, Facts]:
    """Of each head how much of the needles it copies, and of decoys."""
    names = ("retrieval", "decoy")
    recorded: Mapping[str, Any] = record.options.get("measures", {})
    facts = {
        name: {"what": "", "unit": "share", "range": [0, 1], **recorded.get(name, {}), "of": NEEDLES} for name in names
    }
    return {
        (head.kind, head.layer, head.head): {name: head.measures[name] for name in names if name in head.measures}
        for head in record.heads
    }, facts


def _of_circuits(record: Circuits) -> tuple[Numbers, Facts]:
    """Of each head how it copies and matches, and the strongest composition with those before and after it."""
    scores = {"copying": "whether it raises the token that it attends to", "matching": "whether it looks for its own"}
    facts: Facts = {
        name: {"what": f"{what}, by its weights: eigenvalues", "unit": "", "range": [-1, 1], "of": "circuits"}
        for name, what in scores.items()
    }
    numbers: Numbers = {
        (record.kind, head.layer, head.head): {
            name: Estimate(getattr(head, name).value, math.nan, math.nan, math.nan, 0.0) for name in scores
        }
        for head in record.heads
    }
    excess = np.where(np.isfinite(record.excess), record.excess, -np.inf)
    for axis, side, other in ((2, "sent", "what a later head reads by is"), (1, "received", "what it reads by is")):
        for number, by in enumerate(COMPOSITIONS):
            name = f"{by.lower()}_composition_{side}"
            facts[name] = {
                "what": f"how much of {by}, {other} written by one head, at most: share above random directions",
                "unit": "", "range": [None, 1], "of": "circuits",
            }  # fmt: skip
            most = excess[number].max(axis - 1)
            for head, value in zip(record.heads, most.tolist(), strict=True):
                found = value if math.isfinite(value) else math.nan
                numbers[record.kind, head.layer, head.head][name] = Estimate(found, math.nan, math.nan, math.nan, 0.0)
    return numbers, facts


def _compositions(atlas: Atlas, record: Circuits) -> tuple[Link, ...]:
    """The strongest partners of each head, both ways; each pair once."""
    place = {(head.kind, head.layer, head.head): at for at, head in enumerate(atlas.heads)}
    number = [place.get((record.kind, head.layer, head.head), -1) for head in record.heads]
    found: list[Link] = []
    for which, by in enumerate(COMPOSITIONS):
        excess, deviations = record.excess[which], record.deviations[which]
        ranked = np.where(np.isfinite(excess), excess, -np.inf)
        kept = np.zeros(ranked.shape, np.bool_)
        for axis in (0, 1):
            best = np.argsort(-ranked, axis=axis, kind="stable")
            np.put_along_axis(kept, best[:STRONGEST] if axis == 0 else best[:, :STRONGEST], True, axis)
        for sender, receiver in np.argwhere(kept & np.isfinite(excess)).tolist():
            if min(number[sender], number[receiver]) < 0:
                continue
            share = float(record.composition[which, sender, receiver])
            found.append(
                Link(
                    number[sender], number[receiver], by, share, share - float(excess[sender, receiver]),
                    float(deviations[sender, receiver]),
                )
            )  # fmt: skip
    return tuple(found)
