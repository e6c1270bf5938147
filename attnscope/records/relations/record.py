"""Which heads express which relations between words: accuracies with intervals, baselines, verdicts. NumPy only."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from attnscope.records.frame import codec
from attnscope.records.frame.checks import SHARE, shaped
from attnscope.records.frame.codec import APART, ARRAY, OMITTED
from attnscope.records.frame.record import StudyRecord
from attnscope.records.heads.findings import RECORDINGS, Role
from attnscope.records.relations.word_times import WordTimes
from attnscope.results.storage import finite, plain

Array = NDArray[np.float64]

LEAST_MASS = 0.1
"""With less of its attention on the targets, in the mean, a head expresses a relation weakly: it looks elsewhere."""

ARRAYS = ("choice", "accuracy", "low", "high", "mass", "p", "q")

_BY_HEAD = shaped("n_layers n_heads", filled=True, **ARRAY)
_SHARES = _BY_HEAD | SHARE


@dataclass(frozen=True, eq=False)
class Relation:
    """One relation: how well each head expresses it, and what a simple rule reaches.

    Of every two texts that hold it, one goes to each of two halves, at random. The head is chosen by its accuracy on
    the one; all else that has to do with accuracy is of the other, on which nothing was chosen but the rule, in the
    rule's favour.

    Attributes:
        name: Such as "nsubj→parent": from the dependent to its parent.
        n: Links that were measured, in both halves.
        n_texts: Texts that hold them.
        n_scored: Links of the half that is scored.
        n_texts_scored: Texts of that half.
        left_out: Links that could not be measured: reason -> how many.
        rule: The simple rule that does best, such as "offset +1" or "same word before".
        baseline: Its accuracy; NaN without links.
        why_no_verdict: Why there is none, such as "fewer than 20 examples"; empty where there is one.
        choice: Accuracy on the half that the head is chosen by, (layer, head). Here and below NaN where there is no
            such head, or no link.
        accuracy: Share of links whose source's largest weight is on a target, (layer, head).
        low: Lower end of its 95% interval; NaN with fewer than 2 texts.
        high: Upper end.
        mass: Mean weight on the targets.
        p: One-sided p-value against the baseline; NaN without a verdict.
        q: The same after Benjamini-Hochberg over heads x relations.
        found: Which heads express the relation, (layer, head), bool.
        n_sources: Sources that the texts are of, such as files or documents; a text alone is one. 0 = not known.
        halves: What was dealt to halves: "sources", none of which is in both, or "texts", where there are too few.
        ties: Further heads that express it, and whose accuracy on the half that the head is chosen by is no farther
            from the chosen one's than its standard error, or than 0.01: which of them is the best cannot be told.
    """

    name: str
    n: int
    n_texts: int
    n_scored: int
    n_texts_scored: int
    left_out: Mapping[str, int]
    rule: str
    baseline: float
    why_no_verdict: str
    choice: Array = field(metadata=_SHARES)
    accuracy: Array = field(metadata=_SHARES)
    low: Array = field(metadata=_BY_HEAD)
    high: Array = field(metadata=_BY_HEAD)
    mass: Array = field(metadata=_SHARES)
    p: Array = field(metadata=_SHARES)
    q: Array = field(metadata=_SHARES)
    found: NDArray[np.bool_] = field(metadata=_BY_HEAD)
    n_sources: int = 0
    halves: str = "texts"
    ties: tuple[tuple[int, int], ...] = ()

    TOLD: ClassVar[tuple[str, ...]] = ("best", "best_found")

    @property
    def best(self) -> tuple[int, int] | None:
        """The head that does best on the half that it is chosen by; None where no half has enough to choose by."""
        if np.isnan(self.choice).all():
            return None
        layer, head = np.unravel_index(int(np.nanargmax(self.choice)), self.choice.shape)
        return int(layer), int(head)

    @property
    def best_found(self) -> bool:
        """Whether the chosen head expresses the relation."""
        return self.best is not None and bool(self.found[self.best])

    @property
    def weak(self) -> bool:
        """Whether the chosen head expresses the relation with little weight: less than LEAST_MASS on the targets."""
        return self.best is not None and self.best_found and bool(self.mass[self.best] < LEAST_MASS)

    def others_found(self) -> list[tuple[int, int]]:
        """Further heads that express it, the largest accuracy first."""
        heads = [(layer, head) for layer, head in np.argwhere(self.found).tolist()]
        return sorted((head for head in heads if head != self.best), key=lambda head: -self.accuracy[head])


@dataclass(frozen=True)
class ExampleLink:
    """One link of an example.

    Attributes:
        source: Words that look.
        targets: Words of which any is right.
        looked: The word that gets the largest weight; -1 = one outside of what is shown.
        right: Whether it is a target.
        weight: How much it gets.
    """

    source: tuple[int, ...] = field(metadata={"index": "words"})
    targets: tuple[int, ...] = field(metadata={"index": "words"})
    looked: int = field(metadata={"index": "words", "least": -1})
    right: bool
    weight: float


@dataclass(frozen=True)
class Example:
    """What the best head of a relation does on one text, or on the part of a long one around a link.

    Attributes:
        relation: The relation's name.
        layer: The head's layer.
        head: The head.
        source: The file.
        line: The line in it that the text begins on.
        words: The words, in order.
        spaced: Whether a space stands before each word.
        links: Links of this relation alone.
        cut_before: Whether the text has words before these.
        cut_after: Whether it has words after these.
    """

    relation: str
    layer: int
    head: int
    source: str
    line: int
    words: tuple[str, ...]
    spaced: tuple[bool, ...] = field(metadata=shaped("words"))
    links: tuple[ExampleLink, ...]
    cut_before: bool = False
    cut_after: bool = False


@dataclass(frozen=True, eq=False, repr=False)
class Relations(StudyRecord):
    """Which heads of a model express which relations.

    Attributes:
        run: What made it: model, sha256, engine, versions, dtype, device, notes ... Plain JSON values.
        corpus: What it was made on: `sources`, `n_texts`, `n_tokens`, `sha256` of the annotated texts, `n_chunked`,
            `problems` (source, line, reason), `complete` (False after an interruption). Plain JSON values.
        options: What was chosen, as plain JSON values: `level` (of the false discovery rate), `margin` (how far the
            lower end of the interval must be above the baseline), `fewest_links`, `fewest_texts` ...
        kind: The kind of attention: "encoder" or "decoder".
        relations: The relations, the most frequent first.
        examples: Texts with what the best heads do on them, if asked for.
        word_times: How well the heads time words, where recordings were studied and heads listen to them.
    """

    SCHEMA: ClassVar[str] = "attnscope.relations/1"
    HOLDS: ClassVar[str] = "relations"

    kind: str
    relations: tuple[Relation, ...] = field(metadata=APART)
    examples: tuple[Example, ...] = ()
    word_times: WordTimes | None = field(default=None, metadata=OMITTED)

    def __getitem__(self, name: str) -> Relation:
        for relation in self.relations:
            if relation.name == name:
                return relation
        raise KeyError(name)

    @property
    def ranked(self) -> tuple[Relation, ...]:
        """Those with a head that expresses them first, by how far its interval is above the baseline; then the rest."""

        def rank(relation: Relation) -> tuple[int, float]:
            above = math.nan if relation.best is None else float(relation.low[relation.best]) - relation.baseline
            group = 0 if relation.best_found else 1 if relation.found.any() else 3 if relation.why_no_verdict else 2
            return group, -above if math.isfinite(above) else math.inf

        return tuple(sorted(self.relations, key=rank))

    def roles(self) -> dict[tuple[int, int], list[Role]]:
        """The relations that heads express, as roles: (layer, head) -> roles, the furthest above its baseline first.

        Not those that they express weakly: what a head is for gets some of its attention.
        """
        margin = float(self.options.get("margin", 0.0))
        by_head: dict[tuple[int, int], list[Role]] = {}
        for relation in self.relations:
            for layer, head in np.argwhere(relation.found & (relation.mass >= LEAST_MASS)).tolist():
                numbers = {n: float(getattr(relation, n)[layer, head]) for n in ("low", "high", "p", "q")}
                role = Role(
                    name=relation.name,
                    measure=f"accuracy on {relation.name}",
                    value=float(relation.accuracy[layer, head]),
                    baseline=relation.baseline,
                    threshold=relation.baseline + margin,
                    tentative=False,
                    **numbers,
                )
                by_head.setdefault((layer, head), []).append(role)
        for roles in by_head.values():
            roles.sort(key=lambda role: role.baseline - role.value)
        return by_head

    @property
    def alignment_heads(self) -> list[list[int]] | None:
        """Return [layer, head] of each head that listens to the words; None if the texts are no recordings.

        Heads that express the relation weakly are left out. The form is that of Whisper's generation_config.json, from
        which transformers, CTranslate2 and faster-whisper read the heads that time words.

        Source: transformers 5, models/whisper/generation_whisper.py.
        """
        if self.corpus.get("of") != RECORDINGS:
            return None
        listening = np.zeros((0, 2), np.int64)
        for relation in self.relations:
            listening = np.argwhere(relation.found & (relation.mass >= LEAST_MASS))
        heads: list[list[int]] = listening.tolist()
        return heads

    def describe(self) -> dict[str, Any]:
        """All but the arrays, with the head that is best of each relation; NaN stays."""
        described = super().describe() | {"relations": [codec.describe(relation) for relation in self.relations]}
        if self.alignment_heads is not None:
            described["alignment_heads"] = self.alignment_heads
        return described

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Those of all relations laid one on another: (relation, layer, head)."""
        if not self.relations:
            return {name: np.zeros((0, 0, 0)) for name in _ARRAYS}
        return {name: np.stack([getattr(relation, name) for relation in self.relations]) for name in _ARRAYS}

    def as_json(self) -> dict[str, Any]:
        """All of it as plain JSON values; NaN becomes null."""
        rows = [codec.describe(relation) | codec.arrays_of(relation) for relation in self.relations]
        whole: dict[str, Any] = plain(self.describe() | {"relations": rows}, finite)
        return whole

    def rows(self) -> Iterator[Sequence[Any]]:
        """Yield one row per relation and head."""
        header = (
            "relation", "layer", "head", "best", "found", *ARRAYS, "baseline", "rule", "n", "n_scored", "no_verdict",
        )  # fmt: skip
        yield header
        for relation in self.relations:
            facts = (float(relation.baseline), relation.rule, relation.n, relation.n_scored, relation.why_no_verdict)
            for head in np.ndindex(*relation.accuracy.shape):
                numbers = [getattr(relation, name)[head].item() for name in ARRAYS]
                verdict = (head == relation.best, bool(relation.found[head]))
                yield relation.name, *head, *verdict, *numbers, *facts

    @classmethod
    def rebuild(cls, described: Mapping[str, Any], held: Mapping[str, Any]) -> Self:
        """The relations that `describe` and `arrays` were made of."""
        rows = described["relations"]
        if {len(held[name]) for name in _ARRAYS} != {len(rows)}:
            raise ValueError("its arrays do not fit its relations")
        relations = tuple(
            codec.build(Relation, row, {name: held[name][at] for name in _ARRAYS}) for at, row in enumerate(rows)
        )
        record: Self = codec.build(cls, described, held, relations=relations)
        return record


_ARRAYS = (*ARRAYS, "found")
