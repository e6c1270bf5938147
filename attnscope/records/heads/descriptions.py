"""What heads do in a line each, and how much of their attention that line explains. NumPy only."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from attnscope.errors import amount
from attnscope.records.frame.codec import OMITTED
from attnscope.records.frame.pair_tables import HeadOfKind

EVEN = 0.1
"""Nats from uniform below which a head is said to spread evenly, whatever could be said of the rest."""

LITTLE = 0.3
"""Explained share below which a head is said to be mostly undescribed."""

NO_TERM = "no term outside sinks"
"""Stands for the other half's term if it has none outside sinks."""


HARDLY = 0.02
"""Share of attention below which a part of a description is not mentioned."""

UNSURE = 0.5
"""If the interval of an explained share is wider than this, these texts cannot tell it."""


@dataclass(frozen=True)
class Term:
    """One term of a description.

    Attributes:
        feature: The feature's name.
        words: What it is called.
        weight: Its weight: log odds of a key that has it, all else alike; below 0 it is avoided.
        share: How much of the head's attention lies on such keys, mean over texts; NaN for what has no such share.
        even: The same for attention that is spread evenly.
        gain: Nats that it explained, when it was chosen, of the texts that it was chosen on.
        share_of: What the share is of, where that is not the feature itself, as of a number; else empty.
        part_of: The term that it says more about, by its feature's name, as "from punctuation" does of [CLS].
        own: Whether it was fitted to this head, rather than taken from the catalogue.
    """

    feature: str
    words: str
    weight: float
    share: float
    even: float
    gain: float
    share_of: str = ""
    part_of: str = ""
    own: bool = field(default=False, metadata=OMITTED)

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
    """A token whose attention a description explains badly.

    Attributes:
        text: The text's number in the corpus.
        before: What stands before the token, in a few words.
        token: Its label.
        place: Its place in the text, or in the chunk of a long one.
        nats: KL of its attention to what is described.
        predicted: The keys that the description expects most, the largest weight first; none in records of earlier
            versions.
    """

    text: int
    before: str
    token: str
    place: int
    nats: float
    predicted: tuple[Expected, ...] = field(default=(), metadata=OMITTED)


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
        summary: What the terms come to, in few words; "" = in records of earlier versions.
    """

    terms: tuple[Term, ...]
    share: float
    nats: float
    explained: float
    low: float
    high: float
    pairs: tuple[Pair, ...] = ()
    summary: str = ""

    @property
    def tells(self) -> float:
        """Nats that the terms predict, times the share of attention that they are about."""
        return max(0.0, self.explained) * self.nats * self.share if math.isfinite(self.explained) else 0.0


@dataclass(frozen=True)
class HeadDescription(HeadOfKind):
    """What a head does, as terms that make its attention more likely.

    Attributes:
        kind: Of attention: "encoder", "decoder" or "cross".
        layer: Its layer, from 0.
        head: Its number there.
        terms: Where and when it rests, on special tokens and the first: terms in the order in which they were chosen.
            In records of earlier versions, the terms of all its attention.
        nats: How far its attention is from uniform: mean KL divergence over the scored texts.
        explained: The share of these that both parts of the description explain together, on texts that they were not
            fitted on.
        low: Lower end of its 95% interval over texts. The interval allows for kinds of text that the scored texts lack;
            NaN where these texts cannot tell (`core.exact.intervals.predicted_interval`).
        high: Upper end, at most 1; NaN likewise.
        failures: Tokens of the scored texts that it explains least, the worst first, one of a text.
        content: The feature of the first active term, with "not" before it if its weight is below 0. "" = there is
            none.
        other_half: The same term of a description of the scored half alone, or `NO_TERM`; "" = it is the same
            feature.
        active: What it attends to when it does not rest; None = the record is of an earlier version, or the head
            spreads evenly.
    """

    terms: tuple[Term, ...]
    nats: float
    explained: float
    low: float
    high: float
    failures: tuple[Failure, ...] = ()
    content: str = field(default="", metadata=OMITTED)
    other_half: str = field(default="", metadata=OMITTED)
    active: Active | None = field(default=None, metadata=OMITTED)

    @property
    def warning(self) -> str:
        """Names the other half's first term outside sinks if it differs; "" = it is the same."""
        return f"other half: {self.other_half}" if self.other_half else ""

    @property
    def main(self) -> HeadDescription | Active:
        """What its numbers are about where there is room for one part: the active part, unless the head only rests."""
        return self if self.active is None or self.active.share < HARDLY else self.active

    @property
    def tells(self) -> float:
        """How much there is to say: nats that the terms predict, times the share of attention that they are about."""
        if self.spreads_evenly:
            return 0.0
        if self.active is not None:
            return self.active.tells
        return max(0.0, self.explained) * self.nats if math.isfinite(self.explained) else 0.0

    @property
    def spreads_evenly(self) -> bool:
        """Whether its attention is so near to uniform that there is nothing to describe."""
        return self.nats < EVEN

    @property
    def is_unsure(self) -> bool:
        """Whether these texts cannot tell how much is explained: the interval is missing, or wider than `UNSURE`."""
        return not self.main.high - max(self.main.low, 0.0) <= UNSURE

    @property
    def words(self) -> str:
        """What it attends to and where it rests, such as "up to 4 after (46%; uniform 18%); rests 27% on [CLS]"."""
        if self.spreads_evenly:
            return "spreads evenly"
        if self.active is None:
            return self._phrase(self.terms, self.explained)
        return "; ".join(part for part in (self.attends, self.rests) if part)

    @property
    def attends(self) -> str:
        """What it attends to when it attends, such as "tokens like alice, dinah, such as she → alice"."""
        if self.active is None or self.active.share < HARDLY:
            return ""
        if self.active.nats < EVEN:
            return "all other tokens evenly"
        pairs = ", ".join(f"{pair.query} → {pair.key}" for pair in self.active.pairs)
        phrase = self._phrase(self.active.terms, self.active.explained, self.active.summary)
        return f"{phrase}, such as {pairs}" if pairs and self.active.terms and not self.active.summary else phrase

    @property
    def rests(self) -> str:
        """How much it rests and on what, such as "rests 69% on [CLS]"; what more there is to say are its `terms`."""
        if self.active is None or self.active.share > 1 - HARDLY:
            return ""
        on = [term for term in self.terms if term.share >= HARDLY and not (term.part_of or term.is_avoided)]
        named = " and ".join(term.words for term in sorted(on, key=lambda term: -term.share)[:2])
        return f"rests {_percent(1 - self.active.share)}" + (f" on {named}" if named else "")

    def _phrase(self, terms: Sequence[Term], explained: float, summary: str = "") -> str:
        if not terms:
            return "undescribed"
        return (summary or self._list(terms)) + ("" if explained >= LITTLE else "; mostly undescribed")

    def _list(self, terms: Sequence[Term]) -> str:
        whole = {term.feature for term in terms if not term.part_of}
        return ", ".join(
            _words(term, [part for part in terms if part.part_of == term.feature])
            for term in terms
            if term.part_of not in whole
        )

    @property
    def line(self) -> str:
        """The words and what they predict, such as "near tokens: predicts 66% of what sets it apart from uniform"."""
        if self.spreads_evenly:
            return f"{self.words}: {self.nats:.2f} nats from uniform"
        unsure = " (these texts cannot tell)" if self.is_unsure else ""
        warning = f" (! {self.warning})" if self.warning else ""
        if self.active is None or not self.attends or self.active.nats < EVEN:
            return f"{self.words}: {_prediction(self)}{unsure}{warning}"
        rests = f"; {self.rests}" if self.rests else ""
        return f"{self.attends}: {_prediction(self.active)}{unsure}{warning}{rests}"


def _prediction(part: HeadDescription | Active) -> str:
    share = _percent(part.explained) if math.isfinite(part.explained) else "an unknown share"
    return f"predicts {share} of what sets it apart from uniform attention ({part.nats:.2f} nats)"


def _words(term: Term, parts: Sequence[Term]) -> str:
    notes = [f"{'more' if part.weight >= 0 else 'less'} {part.words}" for part in parts]
    if math.isfinite(term.share):
        of = f" {term.share_of}" if term.share_of else ""
        notes = [f"{_percent(term.share)}{of}", f"uniform {_percent(term.even)}", *notes]
    words = f"not {term.words}" if term.is_avoided else term.words
    return f"{words} ({'; '.join(notes)})" if notes else words


def _percent(share: float) -> str:
    return f"{100 * share:.0f}%"


@dataclass(frozen=True)
class FeatureFacts:
    """A feature that descriptions may be made of.

    Attributes:
        words: What it is called.
        family: What it goes by: the key, the offset, a group, a list, a number, or by both query and key.
        source: Who has described heads by it, or "ours".
    """

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

    def sample_line(self, n_texts: int | None = None) -> str:
        """Such as "described from 274 of 2,001 texts (2,000 queries): fitted on 137, scored on 137 others".

        Args:
            n_texts: How many texts the corpus has; None = that is not known.
        """
        of = f"{self.n_texts:,} of " if n_texts is not None and n_texts > self.n_texts else ""
        drawn = of + amount(n_texts if of and n_texts else self.n_texts, "text")
        queries = amount(self.n_queries, "query", "queries")
        fitted, scored = self.n_texts - self.n_scored, amount(self.n_scored, "other")
        return f"described from {drawn} ({queries}): fitted on {fitted:,}, scored on {scored}"

    @property
    def stability_line(self) -> str:
        """In how many heads both halves of the texts have the same first term outside sinks; "" = no head tells."""
        compared = [head for head in self.heads if head.content or head.other_half]
        if not compared:
            return ""
        alike = sum(not head.other_half for head in compared)
        return (
            f"stability: both halves of the texts have the same first term outside sinks in {alike} of "
            f"{amount(len(compared), 'head')}" + "; ! marks heads in which they differ" * (alike < len(compared))
        )

    @property
    def used(self) -> set[str]:
        """Names of the features that some head's terms are made of."""
        terms = [term for head in self.heads for term in (*head.terms, *(head.active.terms if head.active else ()))]
        return {name for term in terms for name in (term.feature, *term.feature.split(" from "))}

    @property
    def by_head(self) -> dict[tuple[str, int, int], HeadDescription]:
        """The descriptions by kind of attention, layer and head."""
        return {each.address: each for each in self.heads}

    def of(self, layer: int, head: int, kind: str | None = None) -> HeadDescription:
        """The description of a head.

        Args:
            layer: Its layer.
            head: Its number.
            kind: Of attention; None = the first that it is found in.

        Raises:
            KeyError: There is none.
        """
        for description in self.heads:
            if (description.layer, description.head) == (layer, head) and kind in (None, description.kind):
                return description
        raise KeyError(f"there is no description of L{layer}H{head}")

    def __str__(self) -> str:
        lines = [f"{head.name}: {head.line}" for head in self.heads]
        return "\n".join([*lines, self.sample_line(), *([self.stability_line] if self.stability_line else [])])
