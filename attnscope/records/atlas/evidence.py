"""What other records of the same model say of an atlas's heads: relations, ablation, circuits, needles. NumPy only."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np

from attnscope.errors import AttnscopeError
from attnscope.records import load_record
from attnscope.records.ablation import Ablation
from attnscope.records.atlas.record import Atlas
from attnscope.records.circuits import COMPOSITIONS, Circuits, Link
from attnscope.records.frame.head_table import HeadTable
from attnscope.records.frame.record import Record
from attnscope.records.heads.findings import Estimate, Findings
from attnscope.records.relations.record import Relations, with_relations

STRONGEST = 3
"""How many partners of a head are named by each of Q, K and V, both of those that it reads and that read it."""

Evidence = Relations | Ablation | Circuits | Findings


def with_records(atlas: Atlas, paths: Iterable[Path]) -> Atlas:
    """An atlas that says of its heads what other records of the same model say.

    Relations that a head expresses join its roles. Numbers per head join the measures: the accuracy of each relation
    that any head expresses, what changes without a head, how it composes with others, how much of a needle it copies.

    Args:
        atlas: The atlas.
        paths: Records of relations, ablations and circuits, and of heads that were probed with needles.

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
    """Reads a record of any kind, and adds to an atlas what other records say of its heads.

    Args:
        path: The record, or its folder.
        beside: Other records of the same model; refused if the record is no atlas.
    """
    record, paths = load_record(path), [*beside]
    if paths:
        record.record_kind().require_options(["with"])
        assert isinstance(record, Atlas)
        record = with_records(record, paths)
    return record


def require_evidence(paths: Iterable[Path]) -> list[tuple[Path, Evidence]]:
    """Reads the records that can be added to an atlas; refuses others."""
    evidence: list[tuple[Path, Evidence]] = []
    for path in paths:
        record = load_record(path)
        has_needles = isinstance(record, Findings) and record.needles is not None
        if not has_needles and not isinstance(record, Relations | Ablation | Circuits):
            raise AttnscopeError(
                f"{path} is {record.record_kind().one}, which --with does not take",
                "give what relations, ablate, circuits or `heads --probe needle` wrote",
            )
        assert isinstance(record, Evidence)
        evidence.append((path, record))
    return evidence


def _with_record(atlas: Atlas, record: Evidence) -> Atlas:
    if isinstance(record, Circuits):
        atlas = replace(atlas, compositions=_compositions(atlas, record))
    if isinstance(record, Relations):
        atlas = _with_roles(atlas, record)
    return _with_columns(atlas, record.head_table())


def _with_roles(atlas: Atlas, relations: Relations) -> Atlas:
    """The atlas with the relations that heads express among their roles."""
    names = {relation.name for relation in relations.relations}
    bare = tuple(replace(head, roles=tuple(r for r in head.roles if r.name not in names)) for head in atlas.heads)
    findings = with_relations(Findings(atlas.run, atlas.corpus, atlas.options, bare, {}), relations)
    # Notes and problems that both records have are kept once.
    run = {**findings.run, "notes": list(dict.fromkeys(findings.run["notes"]))}
    problems = findings.corpus["problems"]
    corpus = {**findings.corpus, "problems": [each for at, each in enumerate(problems) if each not in problems[:at]]}
    return replace(atlas, heads=findings.heads, options=findings.options, run=run, corpus=corpus)


def _with_columns(atlas: Atlas, table: HeadTable) -> Atlas:
    """The atlas with the columns of another record's table that name their source, as measures of its heads."""
    places = [head.address for head in atlas.heads]
    columns = tuple(column for column in table.columns if column.source)
    estimates = HeadTable(table.heads, columns).align(places, _estimate)
    more = [{name: row[at] for name, row in estimates.items() if row[at] is not None} for at in range(len(places))]
    heads = tuple(
        replace(head, measures={**head.measures, **numbers}) for head, numbers in zip(atlas.heads, more, strict=True)
    )
    measures = {**atlas.options.get("measures", {}), **{column.name: column.facts() for column in columns}}
    return replace(atlas, heads=heads, options={**atlas.options, "measures": measures})


def _estimate(
    value: float, low: float = math.nan, high: float = math.nan, uniform: float = math.nan, count: float = 0.0
) -> Estimate:
    return Estimate(*map(float, (value, low, high, uniform, count)))


def _compositions(atlas: Atlas, record: Circuits) -> tuple[Link, ...]:
    """The strongest partners of each head, both ways; each pair once."""
    numbers = {head.address: number for number, head in enumerate(atlas.heads)}
    number = [numbers.get((record.kind, head.layer, head.head), -1) for head in record.heads]
    links: list[Link] = []
    for which, by in enumerate(COMPOSITIONS):
        excess, deviations = record.excess[which], record.deviations[which]
        ranked = np.where(np.isfinite(excess), excess, -np.inf)
        is_strong = np.zeros(ranked.shape, np.bool_)
        for axis in (0, 1):
            best = np.argsort(-ranked, axis=axis, kind="stable")
            np.put_along_axis(is_strong, best[:STRONGEST] if axis == 0 else best[:, :STRONGEST], True, axis)
        for sender, receiver in np.argwhere(is_strong & np.isfinite(excess)).tolist():
            if min(number[sender], number[receiver]) < 0:
                continue
            share = float(record.composition[which, sender, receiver])
            links.append(
                Link(
                    number[sender], number[receiver], by, share, share - float(excess[sender, receiver]),
                    float(deviations[sender, receiver]),
                )
            )  # fmt: skip
    return tuple(links)
