"""What a description says: its terms as a line, and all of them as the columns and tables of `questions.heads`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

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
    """One term of a description; the table `terms` of `questions.heads.Heads` says what its fields are.

    `even` is the share under uniform attention, and `own` whether it was fitted to this head.
    """

    feature: str
    words: str
    weight: float
    share: float
    even: float
    gain: float
    share_of: str = ""
    part_of: str = ""
    own: bool = False

    @property
    def is_avoided(self) -> bool:
        """Whether the head looks less at such keys than it would by chance."""
        return self.weight < 0 and not self.share >= self.even


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
class Active:
    """What a head attends to when it attends: its attention on keys that are neither special tokens nor the first.

    Each row counts by how much of its attention lies on such keys, and is scaled to 1. Queries that are special tokens
    are left out.

    Attributes:
        terms: The terms, in the order in which they were chosen; the first explains most.
        share: How much of the head's attention lies on such keys, 0 to 1, mean over the scored texts.
        nats: How far this attention is from uniform attention on the same keys: mean KL divergence.
        explained: The share of these that the terms predict, on texts that they were not fitted on.
        low: Lower end of its 95% interval over texts, as of `HeadDescription`.
        high: Upper end.
        pairs: Pairs of tokens with much attention on the fitted texts, the strongest first.
        summary: What the terms come to, in few words.
    """

    terms: tuple[Term, ...]
    share: float
    nats: float
    explained: float
    low: float
    high: float
    pairs: tuple[Pair, ...] = ()
    summary: str = ""


@dataclass(frozen=True)
class HeadDescription:
    """What a head does, as terms that make its attention more likely.

    Attributes:
        kind: Of attention: "encoder", "decoder" or "cross".
        layer: Its layer, from 0.
        head: Its number there.
        terms: Where and when it rests, on special tokens and the first: terms in the order in which they were chosen.
        nats: How far its attention is from uniform: mean KL divergence over the scored texts.
        explained: The share of these that both parts of the description explain together, on texts that they were not
            fitted on.
        low: Lower end of its 95% interval over texts. The interval allows for kinds of text that the scored texts lack;
            NaN where these texts cannot tell (`core.intervals.predicted_interval`).
        high: Upper end, at most 1; NaN likewise.
        failures: Tokens of the scored texts that it explains least, the worst first, one of a text.
        content: The feature of the first active term, with "not" before it if its weight is below 0. "" = there is
            none.
        other_half: The same term of a description of the scored half alone, or `NO_TERM`; "" = it is the same feature.
        active: What it attends to when it does not rest; None = it spreads evenly.
    """

    kind: str
    layer: int
    head: int
    terms: tuple[Term, ...]
    nats: float
    explained: float
    low: float
    high: float
    failures: tuple[Failure, ...] = ()
    content: str = ""
    other_half: str = ""
    active: Active | None = None

    @property
    def main(self) -> HeadDescription | Active:
        """What its numbers are about where there is room for one part: the active part, unless the head only rests."""
        return self if self.active is None or self.active.share < HARDLY else self.active

    @property
    def words(self) -> str:
        """What it attends to and where it rests, such as "up to 4 after (46%; uniform 18%); rests 27% on [CLS]"."""
        if self.active is None:
            return "spreads evenly"
        return "; ".join(part for part in (self.attends, self.rests) if part)

    @property
    def attends(self) -> str:
        """What it attends to when it attends, such as "tokens like alice, dinah, such as she → alice"."""
        if self.active is None or self.active.share < HARDLY:
            return ""
        if self.active.nats < EVEN:
            return "all other tokens evenly"
        if not self.active.terms:
            return "undescribed"
        phrase = self.active.summary or _list_terms(self.active.terms)
        if not self.active.explained >= LITTLE:
            phrase += "; mostly undescribed"
        pairs = ", ".join(f"{pair.query} → {pair.key}" for pair in self.active.pairs)
        return f"{phrase}, such as {pairs}" if pairs and not self.active.summary else phrase

    @property
    def rests(self) -> str:
        """How much it rests and on what, such as "rests 69% on [CLS]"; what more there is to say are its `terms`."""
        if self.active is None or self.active.share > 1 - HARDLY:
            return ""
        on = [term for term in self.terms if term.share >= HARDLY and not (term.part_of or term.is_avoided)]
        named = " and ".join(term.words for term in sorted(on, key=lambda term: -term.share)[:2])
        return f"rests {percent(1 - self.active.share)}" + (f" on {named}" if named else "")


def _list_terms(terms: Sequence[Term]) -> str:
    """Return terms with their shares, each with those that say more about it."""
    whole = {term.feature for term in terms if not term.part_of}
    return ", ".join(
        _words(term, [part for part in terms if part.part_of == term.feature])
        for term in terms
        if term.part_of not in whole
    )


def _words(term: Term, parts: Sequence[Term]) -> str:
    notes = [f"{'more' if part.weight >= 0 else 'less'} {part.words}" for part in parts]
    if math.isfinite(term.share):
        whole = f" {term.share_of}" if term.share_of else ""
        notes = [f"{percent(term.share)}{whole}", f"uniform {percent(term.even)}", *notes]
    words = f"not {term.words}" if term.is_avoided else term.words
    return f"{words} ({'; '.join(notes)})" if notes else words


@dataclass(frozen=True)
class FeatureFacts:
    """A feature that descriptions may be made of; the table `features` of `questions.heads.Heads` has its fields."""

    words: str
    family: str
    source: str


@dataclass(frozen=True)
class Descriptions:
    """The descriptions of a model's heads, and what they were made of.

    Attributes:
        heads: One a head, by kind, layer, head; none where there were too few texts.
        n_texts: How many texts (chunks of long ones) were sampled.
        n_queries: How many of their queries.
        n_scored: On how many of the texts descriptions were scored; on the others they were fitted.
        features: The features that terms are made of, by name.
    """

    heads: tuple[HeadDescription, ...]
    n_texts: int
    n_queries: int
    n_scored: int
    features: Mapping[str, FeatureFacts] = field(default_factory=dict)

    @property
    def used(self) -> set[str]:
        """Names of the features that some head's terms are made of."""
        terms = [term for head in self.heads for term in (*head.terms, *(head.active.terms if head.active else ()))]
        return {name for term in terms for name in (term.feature, *term.feature.split(" from "))}

    def of(self, layer: int, head: int, kind: str | None = None) -> HeadDescription:
        """Return the description of a head; `kind` is of attention, None = the first that it is found in.

        Raises:
            KeyError: There is none.
        """
        for description in self.heads:
            if (description.layer, description.head) == (layer, head) and kind in (None, description.kind):
                return description
        raise KeyError(f"there is no description of L{layer}H{head}")


def add_descriptions(result: Heads, described: Descriptions) -> Heads:
    """Return a study of heads with what each head does: columns of its heads, and tables of what lines are made of."""
    counts = {"n_texts": described.n_texts, "n_queries": described.n_queries, "n_scored": described.n_scored}
    options = {**result.options, "described": counts}
    if not described.heads:
        return replace(result, options=options)

    # The columns of heads; those that were not described have none of it.
    heads = result.table("heads")
    lines = {(line.kind, line.layer, line.head): line for line in described.heads}
    places = zip(*(heads[name].tolist() for name in ("kind", "layer", "head")), strict=True)
    found = [lines.get(place) for place in places]
    rows = [_columns(line) for line in found]
    columns = {column.name: column for column in DESCRIPTION}
    values = dict(Table.of(DESCRIPTION, rows).values)
    names = [*(column.name for column in HEADS), ROLE.name]
    all_columns = {name: heads.columns[name] for name in names} | columns | dict(heads.columns)
    all_values = {name: heads.values[name] for name in names} | values | dict(heads.values)
    tables = {**result.tables, "heads": Table(all_columns, all_values)}

    # What the lines are made of, and where they fail.
    parts: dict[str, list[dict[str, Any]]] = {name: [] for name in ("terms", "pairs", "failures", "expected")}
    for row, line in enumerate(found):
        if line is not None:
            _add_parts(parts, row, line)
    parts["features"] = [{"feature": name, **vars(facts)} for name, facts in described.features.items()]
    tables |= {name: Table.of(Heads.TABLES[name], rows_of) for name, rows_of in parts.items()}
    return replace(result, options=options, tables=tables)


def _columns(line: HeadDescription | None) -> dict[str, Any]:
    """Return a row of `DESCRIPTION`."""
    if line is None:
        return {"description": "", "summary": "", "first_term": "", "other_half": ""}
    active = line.active
    return {
        "description": line.words,
        "summary": active.summary if active is not None and line.attends else "",
        "kl_explained": Estimate(line.main.explained, line.main.low, line.main.high),
        "nats": line.main.nats,
        "active_share": None if active is None else active.share,
        "whole_explained": Estimate(line.explained, line.low, line.high),
        "whole_nats": line.nats,
        "first_term": line.content,
        "other_half": f"other half: {line.other_half}" if line.other_half else "",
    }


def _add_parts(parts: Mapping[str, list[dict[str, Any]]], row: int, line: HeadDescription) -> None:
    """Add the terms, pairs and failures of a head."""
    attends = () if line.active is None else line.active.terms
    for part, terms in (("attends", attends), ("rests", line.terms)):
        for term in terms:
            fields = {**vars(term), "share": Estimate(term.share, baseline=term.even)}
            parts["terms"].append({"head": row, "part": part, **fields})
    for pair in () if line.active is None else line.active.pairs:
        parts["pairs"].append({"head": row, **vars(pair)})
    for failure in line.failures:
        expected = [{"failure": len(parts["failures"]), **vars(key)} for key in failure.expected]
        parts["expected"] += expected
        parts["failures"].append({"head": row, **vars(failure)})
