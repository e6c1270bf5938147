"""One number per head from a record of any kind: what every list of heads for another program is made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnscope.errors import AttnscopeError, UsageError
from attnscope.records import Record
from attnscope.records.ablation import Ablation
from attnscope.records.atlas.record import Atlas
from attnscope.records.circuits import Circuits
from attnscope.records.frame.checks import MOST_HEADS
from attnscope.records.frame.head_table import Column, HeadTable
from attnscope.records.heads.findings import Findings
from attnscope.records.patch import Patching
from attnscope.records.relations.record import LEAST_MASS, Relations

Floats = NDArray[np.float64]

LEVEL = 0.05
"""The false discovery rate at which a head is listed for its effect on pairs."""

RETRIEVAL = "retrieval"
"""The score of records of needles."""

TIE = 1e-3
"""The weight of the sink share in a value of `full_attention_values`: less than one needle token in 400 weighs."""

_NEEDLES_HINT = "make them: attnscope heads --probe needle -m MODEL -o FOLDER"


@dataclass(frozen=True, eq=False)
class HeadScores:
    """One number per query head of one kind of attention.

    Attributes:
        record: The record that it is from.
        kind: "encoder", "decoder" or "cross".
        name: The score: a column of the record's table of heads, or a relation.
        what: Its definition in a few words; may be empty.
        heads: (layer, head) of each.
        score: (head,), NaN where unknown.
        low: Lower end of its 95% interval, (head,); NaN without one.
        high: Upper end.
        baseline: What a head without the behaviour has, (head,): the decoy's score, the simple rule's, or that of
            uniform attention; NaN without one.
        baseline_name: Which of these it is: "decoy" or "baseline".
        chosen: (layer, head) of the heads that pass the record's own test, the largest score first.
        n_kv_heads: Key/value heads per layer; None = the record does not say.
    """

    record: Record
    kind: str
    name: str
    what: str
    heads: tuple[tuple[int, int], ...]
    score: Floats
    low: Floats
    high: Floats
    baseline: Floats
    baseline_name: str
    chosen: tuple[tuple[int, int], ...]
    n_kv_heads: int | None

    @property
    def shape(self) -> tuple[int, int]:
        """How many layers there are, and how many heads the widest has."""
        return 1 + max(layer for layer, _ in self.heads), 1 + max(head for _, head in self.heads)

    @property
    def run(self) -> Mapping[str, Any]:
        """What made the record."""
        return getattr(self.record, "run", {})

    def grid(self, values: Floats) -> Floats:
        """Numbers per head as (layer, head); NaN where there is no such head."""
        grid = np.full(self.shape, np.nan)
        grid[tuple(np.array(self.heads).T)] = values
        return grid

    def kv_head(self, head: int) -> int | None:
        """The key/value head that a query head reads; None where the record does not say how many there are."""
        n_heads = self.shape[1]
        return None if self.n_kv_heads is None or n_heads % self.n_kv_heads else head // (n_heads // self.n_kv_heads)

    def require_kv_heads(self) -> int:
        """How many key/value heads each layer has; refuses a record that does not say, or lacks heads."""
        if self.kv_head(0) is None or self.n_kv_heads is None:
            raise AttnscopeError(
                "the record does not say how many key/value heads a layer has",
                "make it again with this version of attnscope",
            )
        return self.n_kv_heads


def scores_of(record: Record, name: str | None = None, kind: str | None = None) -> HeadScores:
    """The scores of a record's heads.

    Args:
        record: Of heads, needles, an atlas, ablation, patching, circuits or relations.
        name: A number of its table of heads, or a relation; None = what it ranks heads by, where that is one.
        kind: Of attention; None = the only one with this score.

    Raises:
        UsageError: There is no such score, or it is to be said which.
        AttnscopeError: Records of this kind say nothing per head, or it holds no heads.
    """
    scores = _scores_of(record, name, kind)
    sizes = [_size_of(record, part, scores.kind) or MOST_HEADS for part in ("n_layers", "n_heads")]
    for place in scores.heads:
        if not all(0 <= number < size for number, size in zip(place, sizes, strict=True)):
            raise AttnscopeError(
                f"the record has a head L{place[0]}H{place[1]}, which its model has not", "make the record again"
            )
    return scores


def _scores_of(record: Record, name: str | None, kind: str | None) -> HeadScores:
    if isinstance(record, Relations):
        if kind not in (None, record.kind):
            raise UsageError(f"the record has no {kind} attention", f"it is of {record.kind} attention")
        return _scores_of_relation(record, name)
    if not isinstance(record, Findings | Ablation | Atlas | Circuits):
        raise AttnscopeError(
            f"{record.record_kind().one} has no scores of heads",
            "give what heads, relations, patch, ablate, circuits or atlas wrote",
        )
    table = record.head_table()
    columns = {column.name: column for column in table.columns if column.is_number and column.in_files}
    is_of_needles = isinstance(record, Findings) and record.needles is not None
    name = name or (RETRIEVAL if is_of_needles else getattr(record, "main", ""))
    if name not in columns:
        problem = f"{record.record_kind().one} has no score {name!r}" if name else "this record has several scores"
        raise UsageError(problem, f"choose one with --score: {', '.join(columns)}")
    column = columns[name]
    is_known = np.isfinite(np.asarray(column.values, np.float64))
    kinds = [*dict.fromkeys(of for (of, *_), known in zip(table.heads, is_known, strict=True) if known)]
    if kind is None and len(kinds) > 1:
        raise UsageError(f"{name} is of {' and '.join(kinds)} attention", "choose one with --kind")
    kind = kind or next(iter(kinds), "")
    rows = [row for row, (of, *_) in enumerate(table.heads) if of == kind]
    if not rows:
        raise AttnscopeError(f"the record has no {kind or 'finite'} scores of {name}", "choose another with --score")
    control = columns.get("decoy") if name == RETRIEVAL else None
    values, passes = np.asarray(column.values, np.float64), _passes(record, name, table)
    baseline = _part(column, "uniform") if control is None else np.asarray(control.values, np.float64)
    best_first = sorted((row for row in rows if passes[row]), key=lambda row: -values[row])
    return HeadScores(
        record, kind, name, column.what, tuple(table.heads[row][1:] for row in rows), values[rows],
        _part(column, "low")[rows], _part(column, "high")[rows], baseline[rows],
        "baseline" if control is None else "decoy", tuple(table.heads[row][1:] for row in best_first),
        _size_of(record, "n_kv_heads", kind),
    )  # fmt: skip


def _part(column: Column, name: str) -> Floats:
    return np.asarray(column.parts.get(name, np.full(len(column.values), np.nan)), np.float64)


def _passes(record: Record, name: str, table: HeadTable) -> NDArray[np.bool_]:
    """Which heads pass the record's own test of a score, in the order of its table."""
    if isinstance(record, Findings | Atlas):
        by_role = [any(role.measure.removesuffix("_active") == name for role in head.roles) for head in record.heads]
        return np.array(by_role, np.bool_)
    if isinstance(record, Patching) and name == record.main:
        effects = np.array([head.effects[name].value for head in record.heads])
        return np.asarray((record.q <= LEVEL) & (effects > 0))
    return np.zeros(len(table.heads), np.bool_)


def _scores_of_relation(record: Relations, name: str | None) -> HeadScores:
    names = [relation.name for relation in record.relations]
    if name is None and len(names) == 1:
        (name,) = names
    if name not in names:
        problem = "a record of several relations" if name is None else f"the record has no relation {name!r}"
        raise UsageError(problem, f"choose with --score from {', '.join(names)}")
    relation = record[name]
    heads = tuple((layer, head) for layer, head in np.ndindex(*relation.accuracy.shape))
    accuracy, low, high = (array.ravel() for array in (relation.accuracy, relation.low, relation.high))
    strong = np.argwhere(relation.found & (relation.mass >= LEAST_MASS)).tolist()
    chosen = sorted(((layer, head) for layer, head in strong), key=lambda place: -relation.accuracy[place])
    return HeadScores(
        record, record.kind, name, f"accuracy on {name}; baseline: {relation.rule}", heads, accuracy, low, high,
        np.full(len(heads), relation.baseline), "baseline", tuple(chosen), _size_of(record, "n_kv_heads", record.kind),
    )  # fmt: skip


def _size_of(record: Record, part: str, kind: str) -> int | None:
    """How many layers, heads or key/value heads a model has; None where the record does not say."""
    by_kind = getattr(record, "run", {}).get(part)
    number = by_kind.get(kind) if isinstance(by_kind, Mapping) else None
    return number if type(number) is int and number > 0 else None


def require_needles(record: Record, score: str | None = None) -> Findings:
    """Refuses what is no record of needles in haystacks, or a score of it that is not retrieval; None = any."""
    if not isinstance(record, Findings) or score not in (None, RETRIEVAL):
        kind = f"the score {score}" if isinstance(record, Findings) else record.record_kind().one
        raise AttnscopeError(f"{kind} does not say which heads retrieve", _NEEDLES_HINT)
    if record.needles is None:
        raise AttnscopeError("the record has no retrieval scores", _NEEDLES_HINT)
    return record


def full_attention_values(scores: HeadScores, sinks: HeadScores | None = None) -> Floats:
    """How much each key/value head needs its full cache.

        v_h = retrieval_h - decoy_h, at least 0
        v_h = (1 - TIE) v_h + TIE (1 - sink share of h), where sink shares are known
        value of a key/value head = the largest v_h of the query heads that read it

    A cache is shared by the query heads that read it, so it is kept whole if any of them needs it. Most heads retrieve
    nothing: sink shares put these in order, and the heads that rest most stream first.

    Args:
        scores: Of a record of needles.
        sinks: The scores `resting_share` of the same model on texts.

    Returns:
        (layer, key/value head), 0 to 1.

    Raises:
        AttnscopeError: The record is of another kind, has no decoy, lacks heads, or does not say how many key/value
            heads there are; or sink shares are of another model.

    Source:
        The value: Xiao et al. 2024, DuoAttention, section 2.2, where it is trained. Ours: what it is made of.
    """
    require_needles(scores.record, scores.name)
    n_kv_heads = scores.require_kv_heads()
    if np.isnan(scores.baseline).any() or scores.baseline_name != "decoy":
        raise AttnscopeError("the record has no decoy to compare scores with", _NEEDLES_HINT)
    if np.prod(scores.shape) != len(scores.heads):  # before a layer of a damaged record takes all memory
        raise AttnscopeError("some heads have no scores", "study all heads of the model")
    needs = np.clip(scores.grid(scores.score - scores.baseline), 0, 1)
    if sinks is not None:
        if not scores.run.get("sha256") and not sinks.run.get("sha256"):
            raise AttnscopeError(
                "neither record says which weights it is of: both lack a sha256", "make both with a model from a folder"
            )
        if scores.run.get("sha256") != sinks.run.get("sha256"):
            raise AttnscopeError(
                f"sink shares are of {sinks.run.get('model')}, and scores of {scores.run.get('model')}",
                "make both records with the same weights",
            )
        if {*sinks.heads} != {*scores.heads}:
            raise AttnscopeError("the sink shares are not of the same heads", "study all heads of the model")
        needs = (1 - TIE) * needs + TIE * (1 - np.clip(sinks.grid(sinks.score), 0, 1))
    if np.isnan(needs).any():
        raise AttnscopeError("some heads have no scores", "study all heads of the model")
    grouped: Floats = needs.reshape(len(needs), n_kv_heads, -1).max(-1)
    return grouped
