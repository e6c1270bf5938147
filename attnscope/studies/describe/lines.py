"""Write a description as one line, and all descriptions as the tables of `questions.heads`.

`study` fits descriptions and `words` names their terms. This module knows no model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from attnscope.core.descriptions import Score
from attnscope.questions.head_lines import EVEN
from attnscope.questions.heads import DESCRIPTION, ROLE, Heads
from attnscope.report.numbers import percent
from attnscope.results.table import HEADS, Estimate, Table

LITTLE = 0.3
"""Explained share below which a head is said to be mostly undescribed."""

NO_TERM = "no term outside sinks"
"""Stands for the other half's term if it has none outside sinks."""

HARDLY = 0.02
"""Share of attention below which a part of a description is not mentioned."""


@dataclass(frozen=True)
class Term:
    """One term of a description; its fields are the columns of the table `terms` of `questions.heads.Heads`.

    `even` is the share under uniform attention, and `own` whether it was fitted to this head.
    """

    feature: str
    words: str
    weight: float
    share: float
    even: float
    gain: float
    own: bool = False


@dataclass(frozen=True)
class Expected:
    """A key that a description expects a token to attend to, by its place in the text or chunk; weights are 0 to 1."""

    place: int
    token: str
    weight: float


@dataclass(frozen=True)
class Failure:
    """A token whose attention a description explains badly, with the keys that it expects most, the largest first."""

    text: int
    before: str
    token: str
    place: int
    nats: float
    expected: tuple[Expected, ...] = ()


@dataclass(frozen=True)
class Pair:
    """A pair of tokens with more attention than uniform attention would give it, in `n_texts` of the fitted texts."""

    query: str
    key: str
    n_texts: int


@dataclass(frozen=True)
class HeadDescription:
    """The description of one head, as terms that make its attention more likely.

    What it attends to is its attention on keys that are neither special tokens nor the first. There each row counts by
    how much of its attention lies on such keys, and is scaled to 1. Queries that are special tokens are left out.

    Attributes:
        kind: Of attention: "encoder", "decoder" or "cross".
        layer: Its layer, from 0.
        head: Its number there.
        whole: How well both parts of the description hold together, on texts that they were not fitted on.
        active: How well the terms of what it attends to hold there; None = it spreads evenly.
        share: How much of its attention lies on such keys, 0 to 1, mean over the scored texts.
        attends: The terms of what it attends to, in the order in which they were chosen; the first explains most.
        rests: The terms of where it rests, on special tokens and the first, in the same order.
        pairs: Pairs of tokens with much attention on the fitted texts, the strongest first.
        summary: The terms of `attends` in few words.
        failures: Tokens of the scored texts that it explains least, the worst first, one of a text.
        content: The feature of the first term, with "not" before it if its weight is below 0. "" = there is none.
        other_half: The same term of a description of the scored half alone, or `NO_TERM`; "" = it is the same feature.
    """

    kind: str
    layer: int
    head: int
    whole: Score
    active: Score | None = None
    share: float = 0.0
    attends: tuple[Term, ...] = ()
    rests: tuple[Term, ...] = ()
    pairs: tuple[Pair, ...] = ()
    summary: str = ""
    failures: tuple[Failure, ...] = ()
    content: str = ""
    other_half: str = ""

    @property
    def main(self) -> Score:
        """Return the score where there is room for one: of what it attends to, unless the head only rests."""
        return self.whole if self.active is None or self.share < HARDLY else self.active

    @property
    def words(self) -> str:
        """Return the line, such as "up to 4 after (46%; uniform 18%); rests 27% on [CLS]"."""
        if self.active is None:
            return "spreads evenly"
        return "; ".join(part for part in (self.attending, self.resting) if part)

    @property
    def attending(self) -> str:
        """Return the part of the line on keys off the sinks; "" = it hardly attends to any."""
        if self.active is None or self.share < HARDLY:
            return ""
        if self.active.nats < EVEN:
            return "all other tokens evenly"
        if not self.attends:
            return "undescribed"
        return self.summary if self.active.explained >= LITTLE else f"{self.summary}; mostly undescribed"

    @property
    def resting(self) -> str:
        """Return how much it rests and on what, such as "rests 69% on [CLS]"; "" = it hardly does."""
        if self.share > 1 - HARDLY:
            return ""
        # Name the two terms with the largest shares; one that only repels attention is no place to rest.
        on = [term for term in self.rests if term.share >= HARDLY and (term.weight >= 0 or term.share >= term.even)]
        named = " and ".join(term.words for term in sorted(on, key=lambda term: -term.share)[:2])
        return f"rests {percent(1 - self.share)}" + (f" on {named}" if named else "")


@dataclass(frozen=True)
class Descriptions:
    """The descriptions of a model's heads.

    Attributes:
        heads: One description per head, by kind, layer, head; empty if there were too few texts.
        n_texts: How many texts (chunks of long ones) were sampled.
        n_queries: How many of their queries.
        n_scored: On how many of the texts descriptions were scored; on the others they were fitted.
    """

    heads: tuple[HeadDescription, ...]
    n_texts: int
    n_queries: int
    n_scored: int


def add_descriptions(result: Heads, described: Descriptions) -> Heads:
    """Return a study of heads with their descriptions: new columns of its heads, and tables of terms and failures."""
    # The size of the sample is recorded even if no head could be described.
    counts = {"n_texts": described.n_texts, "n_queries": described.n_queries, "n_scored": described.n_scored}
    options = {**result.options, "described": counts}
    if not described.heads:
        return replace(result, options=options)

    # The columns of heads; those that were not described have none of it.
    heads = result.table("heads")
    lines = {(line.kind, line.layer, line.head): line for line in described.heads}
    places = zip(*(heads[name].tolist() for name in ("kind", "layer", "head")), strict=True)
    lines_of_rows = [lines.get(place) for place in places]
    texts = {column.name: "" for column in DESCRIPTION if column.kind == "text"}
    added = Table.of(DESCRIPTION, [texts if line is None else _columns(line) for line in lines_of_rows])
    names = [*(column.name for column in HEADS), ROLE.name]
    columns = {name: heads.columns[name] for name in names} | dict(added.columns) | dict(heads.columns)
    values = {name: heads.values[name] for name in names} | dict(added.values) | dict(heads.values)

    # Tables of the terms of the lines, and of the tokens on which they fail.
    parts: dict[str, list[dict[str, Any]]] = {name: [] for name in ("terms", "pairs", "failures", "expected")}
    for row, line in enumerate(lines_of_rows):
        if line is not None:
            _add_parts(parts, row, line)
    tables = {name: Table.of(Heads.TABLES[name], rows) for name, rows in parts.items()}
    return replace(result, options=options, tables={**result.tables, "heads": Table(columns, values), **tables})


def _columns(line: HeadDescription) -> dict[str, Any]:
    """Return a row of `DESCRIPTION`."""
    main = line.main
    return {
        "description": line.words,
        "summary": line.summary if line.attending else "",
        "kl_explained": Estimate(main.explained, main.low, main.high),
        "nats": main.nats,
        "active_share": None if line.active is None else line.share,
        "whole_explained": Estimate(line.whole.explained, line.whole.low, line.whole.high),
        "whole_nats": line.whole.nats,
        "first_term": line.content,
        "other_half": f"other half: {line.other_half}" if line.other_half else "",
    }


def _add_parts(parts: Mapping[str, list[dict[str, Any]]], row: int, line: HeadDescription) -> None:
    """Add the terms, pairs and failures of a head."""
    # Tables link to heads, and expected keys to failures, by row numbers.
    for part, terms in (("attends", line.attends), ("rests", line.rests)):
        for term in terms:
            share = Estimate(term.share, baseline=term.even)
            parts["terms"].append({**vars(term), "head": row, "part": part, "share": share})
    parts["pairs"] += [{"head": row, **vars(pair)} for pair in line.pairs]
    for failure in line.failures:
        parts["expected"] += [{"failure": len(parts["failures"]), **vars(key)} for key in failure.expected]
        parts["failures"].append({"head": row, **vars(failure)})
